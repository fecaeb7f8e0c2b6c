"""Screen 2: strips of phases, quorum, deadlines, who is awaited; a coordinator's view and a silo's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.base import TextDialog
from console.screens.round import RoundScreen
from fedsilo.control.answers import Round, SiloInRound, no_run_yet, read, to_json
from fedsilo.views import rounds
from fedsilo.views.lines import ASCII, UNICODE, to_text
from tests.console.desk import Desk, console
from tests.console.rounds import at_coordinator, at_silo, phase, round_before, silo_row, through
from tests.console.states import coordinator


async def opened(desk: Desk, answer: Any = None, state: Any = None) -> RoundScreen:
    await desk.show(state or coordinator())
    await desk.press("2")
    screen = desk.app.screen
    assert isinstance(screen, RoundScreen)
    await desk.answer(screen.key, answer or at_coordinator())
    return screen


# ---- rows and lines --------------------------------------------------------------------------------


def of_coordinator(**changes: Any) -> Round:
    return read(Round, at_coordinator(**changes))


def silo(name: str, state: str, *phases: Any) -> SiloInRound:
    return read(SiloInRound, silo_row(name, state, *phases))


NO_QUORUM = {"needed": 1, "of": 1, "given": 0, "reached_seconds": None}


def test_what_nobody_kept_is_said_to_be_and_what_is_others_is_hidden() -> None:
    answer = of_coordinator()
    text = to_text(rounds.silo_text(answer.silos[0], answer, None, 90))
    assert "accepted; when: not kept" in text and "L2 0.93" in text
    unknown = silo("a", "waits", phase("sign", None, None), phase("train", 0.0, 9.0, step=4))
    assert "not kept" in to_text(rounds.silo_text(unknown, answer, None, 90)).splitlines()[-2]
    seen = read(Round, at_silo())
    mine, other = seen.silos[:2]
    assert rounds.now_text(mine, seen) == "for others 01:30" and rounds.now_text(other, seen) == "hidden"
    shown = rounds.silo_rows(seen, None, 20, UNICODE, ascii_only=False)[1]
    assert {shown.now, shown.strip, shown.bytes, shown.before} == {"hidden"}
    assert "0" not in to_text(rounds.silo_text(other, seen, None, 90)).replace("0 ", "")
    assert "how many are in: hidden" in to_text(rounds.head_lines(seen, None, 200, UNICODE))


def test_a_silent_silo_is_training_or_held_and_the_quorum_says_what_it_waits_for() -> None:
    answer = of_coordinator()

    def head(**changes: Any) -> str:
        return " ".join(to_text(rounds.head_lines(replace(answer, **changes), None, 300, UNICODE)).split())

    told = "no update for 04:01: training, or held by its people; train 8, others took 01:36"
    assert f"late uni_c {told}" in head() and "straggler" not in head()
    assert "updates 2 of 5 in · quorum 2 met at 05:31 · the others have until 10:00" in head()
    quorum = replace(answer.quorum, needed=3, reached_seconds=None)
    assert "updates 2 of 5 in · quorum 3 not met yet · waits for 1 more until 10:00" in head(quorum=quorum)
    assert "waits for" not in head(quorum=quorum, state="abandoned")
    (late,) = [row for row in answer.silos if row.straggler]
    assert "no update for 04:01: training, or held by its people" in " ".join(
        to_text(rounds.silo_text(late, answer, None, 200)).split()
    )


def test_two_rounds_are_compared_by_time_updates_and_what_was_changed() -> None:
    before = read(Round, round_before())
    text = to_text(rounds.compare_lines(of_coordinator(), before, 200, UNICODE))
    assert "round 1 committed after 06:11" in text and "3 updates then, 2 by this one" in text
    assert "changed only the base adapter" in text
    changed = at_coordinator()
    changed["digests"]["charter"] = "00" * 32
    changed["silos"][0]["code"] = "11" * 32
    text = to_text(rounds.compare_lines(read(Round, changed), before, 200, UNICODE))
    assert "changed charter, code or policy of hospital_a" in text
    rows = rounds.silo_rows(of_coordinator(), before, 20, UNICODE, ascii_only=False)
    assert [row.before for row in rows[:4]] == ["05:01 (+17 s)", "05:22", "05:40 (-9 s)", "-"]


@pytest.mark.parametrize("broken", [{}, {"silos": 5, "rounds": "x", "quorum": [], "deadlines": {}, "digests": 1},
                                    {"silos": [5, {"phases": [7, {"from_seconds": "x"}]}], "elapsed_seconds": "x",
                                     "round": None, "rounds": [None]}])  # fmt: skip
def test_an_answer_of_another_shape_draws_something_and_never_fails(broken: Any) -> None:
    answer = read(Round, {**at_coordinator(), **broken} if broken else {})
    rounds.head_lines(answer, of_coordinator(), 80, ASCII)
    rounds.silo_rows(answer, answer, 20, ASCII, ascii_only=True)
    rounds.fact_lines(answer, 80)
    rounds.legend_lines(answer, 80, ascii_only=True)
    rounds.rounds_line(answer, 80, ASCII)
    assert rounds.neighbours(read(Round, {})) == (None, None)


# ---- the screen ------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_brackets_go_to_the_rounds_around_and_c_compares() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)

        def asked() -> dict[str, Any]:
            return {key: question[1] for key, question in desk.app.wanted.items() if question[0] == rounds.QUERY}

        assert asked() == {"round newest newest": {}}
        for key, facts in (
            ("p", ("1a" * 32, "learning rate 1e-05")),
            ("enter", ("hospital_a, round 2", "when: not kept")),
        ):
            await desk.press(key)
            assert isinstance(desk.app.screen, TextDialog)
            desk.shows(*facts)
            await desk.press("escape")
        assert screen.inspected()["silo"] == "hospital_a" and "strip" not in screen.inspected()
        assert screen.twin() == "fedsilo run show run-1 --round 2"
        await desk.press("right_square_bracket")
        desk.shows("this is the newest round")
        await desk.press("c")
        assert asked()["round run-1 1"] == {"run": "run-1", "round": 1}
        await desk.answer("round run-1 1", round_before())
        desk.shows("round 1 committed after 06:11", "05:01 (+17 s)")
        await desk.press("c", "left_square_bracket")
        assert asked() == {"round run-1 1": {"run": "run-1", "round": 1}}
        await desk.answer("round run-1 1", round_before())
        desk.shows("committed after 06:11", "absent", "not the newest: ] goes on to round 2", lacks=["(+17 s)"])
        await desk.press("left_square_bracket")
        desk.shows("this is the first round that is listed")
        await desk.press("c")
        desk.shows("no round before this one")
        await desk.press("1", "2")  # it says so on every visit
        await desk.answer(screen.key, round_before() | {"rounds": [{"round": number} for number in (1, 2, 3)]})
        desk.shows("not the newest: ] goes on to round 2 of 3")
        await desk.press("right_square_bracket")
        await desk.answer(screen.key, at_coordinator())
        await desk.press("left_square_bracket")
        await desk.answer(screen.key, round_before())
        await desk.press("right_square_bracket")
        assert asked() == {"round newest newest": {}}  # and follows it from here
        await desk.answer(screen.key, at_coordinator())
        for typed, question in (("7", {"run": "run-1", "round": 7}), ("\x1b[31m", None), ("run-0", {"run": "run-0"})):
            before = asked()
            screen.go_to(typed)
            await desk.pilot.pause()
            assert list(asked().values()) == [question] if question else asked() == before


async def test_without_a_run_it_says_how_to_submit_one_and_before_a_round_what_is_awaited() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk, to_json(no_run_yet("coordinator")))
        assert "no runs yet" in desk.text and "fedsilo run submit run.yaml" in desk.text and "quorum" not in desk.text
        await desk.answer(screen.key, None, refused=("NOT_FOUND", "there is no run yet"))
        assert "there is no run yet" in desk.text and "fedsilo run submit run.yaml" in desk.text
        joining = [{"name": "join", "for": "join", "left_seconds": 30.0, "at_seconds": None}]
        empty = at_coordinator(round=0, rounds=[], silos=[], elapsed_seconds=None, awaited=[], deadlines=joining)
        await desk.answer(screen.key, empty)
        assert "deadline  join in 00:30" in desk.text and "no silos in this run yet" in desk.text


RUNS = at_coordinator(
    silos=[silo_row("a", "awaited", *through(10.0, 50.0, tail=[phase("update", 50.0, None, state="open")]))],
    elapsed_seconds=80.0, deadlines=[], quorum=NO_QUORUM,
)  # fmt: skip


WAITS = at_coordinator(
    silos=[silo_row("a", "waits", *through(0.0, 20.0, 40.0, 60.0))], elapsed_seconds=80.0,
    quorum=NO_QUORUM | {"given": 1, "reached_seconds": 60.0},
    deadlines=[{"name": "round/2", "for": "round", "left_seconds": 20.0, "at_seconds": 100.0}],
)  # fmt: skip


FAR = WAITS | {"deadlines": [{"name": "round/2", "for": "round", "left_seconds": 7000.0, "at_seconds": 7200.0}]}


@pytest.mark.parametrize(
    ("answer", "ascii_only", "scale", "strip"),
    [
        (RUNS, True, 80.0, "s====+u>"),
        (RUNS, False, 80.0, "░━━━━╋▓▸"),
        (WAITS, True, 100.0, "==+=+u:  |"),
        (FAR, True, 80.0, "==+==+u:"),  # the deadline is told in words; the strip keeps its room
    ],
)
def test_a_strip_has_each_phase_quorum_and_deadline_where_they_were(
    answer: dict[str, Any], ascii_only: bool, scale: float, strip: str
) -> None:
    shown = read(Round, answer)
    assert rounds.scale_of(shown) == scale
    cells = 10 if shown.deadlines else 8
    assert rounds.strip_text(shown.silos[0], shown, cells, scale, ascii_only=ascii_only) == strip

"""What stands below when the daemon is lost: what each screen read last, how old that is, and nothing made up."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.base import ANSWERS_MAX, BYTES_MAX, Remembered
from console.feed import Store
from console.recording import FORMAT_VERSION, NEVER_RECORDED, Replay
from fedsilo.protocol.errors import NotFoundError
from fedsilo.views.conditions import NOT_READ, answer_lines, condition_lines
from fedsilo.views.lines import to_text
from fedsilo.views.state import Link, Snapshot
from tests.console.desk import SIZES, Desk, console
from tests.console.rounds import at_silo, curves_at_silo
from tests.console.site_answers import CERTIFICATES
from tests.console.states import NOW, POLICY_DIGEST, Reading, live, release, silo
from tests.console.test_tables import page

SIZE_IDS = [f"{width}x{height}" for width, height in [(60, 16), *SIZES]]
CAUSE = "cannot reach the daemon at /srv/sites/cardio/hospital_a/state/control.sock: nothing listens there"
HINT = "is it started? is this the right --config?"


def lost(snapshot: Snapshot, now: float) -> Snapshot:
    return replace(snapshot, link=Link("disconnected", CAUSE, HINT, snapshot.link.received_at, now + 12))


async def lose(desk: Desk) -> None:
    await desk.show(lost(desk.app.snapshot, desk.now))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 16), *SIZES])
async def test_a_screen_that_was_not_read_says_so_and_shows_no_skeleton(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo())
        await desk.wait(7.0)
        await lose(desk)
        for key in ("1", "2", "4", "8", "9", "0"):
            await desk.press(key)
            desk.shows("nothing listens there", "r tries now.")
            told = desk.words.split("r tries now.")[1]
            assert not told.startswith(" is it started?") or HINT in told  # whole, or not at all
            rest = desk.text.split("DISCONNECTED")[-1]
            assert rest.count(NOT_READ) == (key != "1"), rest
            assert "<+" not in rest and (key == "1" or "below as of" not in rest), rest
            assert not [row for row in rest.splitlines() if "…" in row and set(row) <= set(" │…")], rest


@pytest.mark.slow
async def test_what_was_read_before_stands_with_its_own_age() -> None:
    figures = curves_at_silo()  # all names, and the points of what was asked for
    figures["series"] = [each for each in figures["series"] if each["name"] == "pass_at_1"]
    async with console((100, 30)) as desk:
        await desk.show(silo())
        for key, query, answer in (
            ("8", "certificates", CERTIFICATES),
            ("2", "round newest newest", at_silo()),
            ("5", "outbox", page(30)),
            ("4", "curves pass_at_1 step", figures),
        ):
            await desk.press(key)
            await desk.answer(query, answer)
        await desk.wait(400.0)
        await desk.show(silo())  # the reader asks nothing of what is not on top
        await desk.press("1")
        await lose(desk)
        for key, told in (("8", "3 of 8 to put right"), ("2", "quorum 2 of"), ("5", "09:00:30"), ("4", "pass@1")):
            await desk.press(key)
            desk.shows(told, "below as of 06:", lacks=[NOT_READ])
        await desk.press("T", "tab")  # the values of a figure that was not read are not said to be none
        desk.shows(NOT_READ, lacks=["no figures yet"])
        await desk.press("2", "left_square_bracket")
        for key in ("left_square_bracket", "right_square_bracket"):  # from a round that was not read either leads back
            desk.shows(NOT_READ, lacks=["quorum 2 of"])
            await desk.press(key)
            desk.shows("quorum 2 of", lacks=[NOT_READ])
            await desk.press("left_square_bracket")
        await desk.show(silo())
        await desk.press("8")
        desk.shows(lacks=["3 of 8 to put right"])  # it answers again, so it is asked anew
        await desk.answer("certificates", CERTIFICATES)
        await desk.press("space")
        await desk.wait(600.0)
        await lose(desk)
        desk.shows("FROZEN 10:0", "below as of 10:0", lacks=[NOT_READ])


def test_only_the_same_question_to_the_same_daemon_is_remembered_and_so_many_of_them() -> None:
    def answered(state: dict[str, Any], *keys: str) -> Snapshot:
        return replace(live(state), answers=dict.fromkeys(keys, 5), answered_at=dict.fromkeys(keys, 90.0))

    def gone(state: dict[str, Any]) -> Snapshot:
        return lost(live(state), 100.0)

    question = ("outbox", {"limit": 1})
    remembered = Remembered()
    assert remembered.with_answers(answered(silo(), "a", "b"), {"a": question}).answers == {"a": 5, "b": 5}
    found = remembered.with_answers(gone(silo()), {"a": question, "b": question})
    assert (found.answers, found.answered_at) == ({"a": 5}, {"a": 90.0})  # nobody knows what `b` was an answer to
    assert remembered.with_answers(gone(silo()), {"a": ("outbox", {"limit": 2})}).answers == {}
    assert remembered.with_answers(live(silo()), {"a": question}).answers == {}  # it will answer
    assert remembered.with_answers(gone(silo(silo="hospital_b")), {"a": question}).answers == {}
    assert remembered.with_answers(gone(silo()), {"a": question}).answers == {}
    remembered.with_answers(answered(silo(), "a"), {"a": question})
    assert remembered.with_answers(gone(silo(federation="other-net")), {"a": question}).answers == {}
    remembered.with_answers(answered(silo(), "a"), {"a": question}, keep=False)  # an answer to what was asked before
    assert remembered.with_answers(gone(silo()), {"a": question}).answers == {}
    for name in NEVER_RECORDED:
        remembered.with_answers(answered(silo(), "a"), {"a": (name, {})})
        assert remembered.with_answers(gone(silo()), {"a": (name, {})}).answers == {}
    keys = [f"page {number}" for number in range(ANSWERS_MAX + 1)]
    for key in keys:
        remembered.with_answers(answered(silo(), key), {key: question})
    found = remembered.with_answers(gone(silo()), dict.fromkeys(keys, question))
    assert set(found.answers) == set(keys[1:])
    large = replace(live(silo()), answers={"page 2": "x" * (BYTES_MAX - 30)}, answered_at={"page 2": 91.0})
    remembered.with_answers(large, {"page 2": question})
    found = remembered.with_answers(gone(silo()), dict.fromkeys(keys, question))
    assert "page 2" in found.answers and 1 < len(found.answers) < ANSWERS_MAX  # the oldest made room
    larger = replace(large, answers={"page 3": "x" * BYTES_MAX}, answered_at={"page 3": 92.0})
    remembered.with_answers(larger, {"page 3": question})
    assert remembered.with_answers(gone(silo()), dict.fromkeys(keys, question)).answers.keys() == found.answers.keys()


def refused_lines_of(code: str, text: str, cells: int = 76) -> list[Any]:
    return answer_lines(replace(live(silo()), refused={"a": (code, text)}), "a", 100.0, cells, opened_at=90.0)


@pytest.mark.parametrize(("cells", "most"), [(76, 2), (54, 3)])
def test_what_a_share_safe_recording_does_not_hold_is_told_whole(tmp_path: Path, cells: int, most: int) -> None:
    path, at = tmp_path / "a.fedrec", "2026-12-01T10:00:00.000Z"
    header = {
        "fedrec": FORMAT_VERSION,
        "federation": "f",
        "site": "s",
        "party": "silo",
        "began": at,
        "share_safe": True,
    }
    reading = {"sequence": 1, "time": at, "policy_digest": "", "state": {}}
    path.write_text(f"{json.dumps(header)}\n{json.dumps({'at': 0.0, 'snapshot': reading})}\n", encoding="utf-8")
    for name in ("certificates", "settings", "approval.comparison"):
        with pytest.raises(NotFoundError) as refused:
            Replay(path).query(name)
        rows = refused_lines_of(refused.value.code, refused.value.line, cells)
        text = " ".join(to_text(rows).split())
        assert len(rows) <= most and text.endswith("record it with --include-local LOCAL"), text
    rows = refused_lines_of("FAILED", "word " * 70 + "end")
    assert len(rows) == 3 and to_text(rows).endswith("…")  # a longer one is cut with a sign


@pytest.mark.parametrize("size", SIZES)
async def test_a_release_stays_as_it_was_shown_while_its_guard_starts_again(size: tuple[int, int]) -> None:
    async with console(size=size) as desk:
        await desk.show(silo(release()))
        await desk.press("enter")
        before = desk.app.screen
        desk.pass_time(4.0)
        store = Store()
        store.read(Reading(silo(release()), policy_digest=POLICY_DIGEST), desk.now - 4.0, wall_time=NOW)
        store.read(Reading({}, policy_digest=""), desk.now, wall_time=NOW)
        await desk.show(store.snapshot)
        assert desk.app.screen is before and "expires in 27:4" in desk.text
        assert (
            "live" not in desk.text and "told nothing of its state" in desk.text and "no longer held" not in desk.text
        )
        await desk.press("A")
        assert desk.app.screen is before
        await desk.show(silo(release()))
        assert "live" in desk.text


LONG = "/srv/sites/hospital_a/" + "deep/" * 30 + "control.sock"


@pytest.mark.parametrize("cells", [60, 80, 140])
@pytest.mark.parametrize(
    "cause", ["/run/fedsilo/a.sock: nothing listens there", f"{LONG}: nothing listens there", "x" * 200_000]
)
def test_T37_of_a_lost_link_the_cause_comes_first_however_long_it_is(cells: int, cause: str) -> None:
    link = Link("disconnected", f"cannot reach {cause}", "silo start", 100.0, 104.0)
    begun = time.process_time()
    rows = condition_lines(
        replace(live(silo()), link=link), 100.0, cells, opened_at=100.0, waits_for="the daemon", below_at=93.0
    )
    assert time.process_time() - begun < 2.0  # each turn over the whole of it takes seconds
    text = " ".join(to_text(rows).split())
    assert len(rows) <= 2 and text.startswith("DISCONNECTED: cannot reach ") and "r tries now" in text
    assert "below as of 00:07 ago" in text and (cells < 80 or "x" in cause or "nothing listens there" in text)

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
from console.screens.curves import CurvesScreen
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


@pytest.mark.parametrize("size", [(60, 16), *SIZES], ids=SIZE_IDS)
async def test_a_screen_that_was_not_read_says_so_and_shows_no_skeleton(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo())
        await lose(desk)
        for key in ("2", "4", "8", "9", "0"):
            await desk.press(key)
            rest = desk.text.split("DISCONNECTED")[-1]
            assert rest.count(NOT_READ) == 1 or key == "0", rest  # settings: this console's own are there
            assert "<+" not in rest and "below as of" not in rest, rest
            assert not [row for row in rest.splitlines() if "…" in row and set(row) <= set(" │…")], rest


async def test_while_an_answer_is_awaited_the_skeleton_has_no_mark_of_something_hidden() -> None:
    async with console((140, 42)) as desk:
        await desk.show(silo())
        await desk.press("9")
        assert "level" in desk.text and "…" in desk.text and "<+" not in desk.text


@pytest.mark.parametrize("size", [(60, 16), *SIZES], ids=SIZE_IDS)
async def test_the_banner_is_whole_on_every_screen(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo())
        await desk.wait(7.0)
        await lose(desk)
        for key in ("1", "8", "9"):
            await desk.press(key)
            text = " ".join(desk.text.split())
            assert "nothing listens there" in text and "r tries now." in text, text
            told = text.split("r tries now.")[1]
            assert not told.startswith(" is it started?") or HINT in told  # whole, or not at all


async def test_what_was_read_before_stands_with_its_own_age() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("8")
        await desk.answer("certificates", CERTIFICATES)
        await desk.press("2")
        await desk.answer("round newest newest", at_silo())
        assert "3 of 8 to put right" not in desk.text and "of 3" in desk.text
        read = desk.app.snapshot.link.received_at
        await desk.wait(400.0)
        await desk.show(silo())  # the reader asks nothing of what is not on top
        await desk.press("1")
        await lose(desk)
        age = int(desk.now - desk.app.snapshot.link.received_at)
        assert f"below as of 00:0{age} ago" in desk.text
        for key, told in (("8", "3 of 8 to put right"), ("2", "quorum 2 of")):
            await desk.press(key)
            minutes, seconds = divmod(int(desk.now - read), 60)
            assert told in desk.text and NOT_READ not in desk.text
            assert f"below as of {minutes:02d}:{seconds:02d} ago" in desk.text or key == "8", desk.text
            assert f"below as of {minutes:02d}:" in desk.text
        await desk.show(silo())
        await desk.press("8")
        assert "3 of 8 to put right" not in desk.text  # it answers again, so it is asked anew


async def test_a_view_that_is_older_than_the_last_reading_says_how_old() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("8")
        await desk.answer("certificates", CERTIFICATES)
        await desk.wait(60.0)
        await desk.show(replace(desk.app.snapshot, link=replace(desk.app.snapshot.link, received_at=desk.now)))
        await desk.wait(10.0)
        desk.app.tick()
        await desk.pilot.pause()
        assert "STALE 00:10: the daemon has not answered since; values below are 01:1" in desk.text


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


async def test_from_a_round_that_was_not_read_either_key_leads_back() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("2")
        await desk.answer("round newest newest", at_silo())
        await lose(desk)
        await desk.press("left_square_bracket")
        assert NOT_READ in desk.text and "quorum 2 of" not in desk.text
        for key in ("left_square_bracket", "right_square_bracket"):
            await desk.press(key)
            assert NOT_READ not in desk.text and "quorum 2 of" in desk.text
            await desk.press("left_square_bracket")


async def test_the_values_of_a_figure_that_was_not_read_are_not_said_to_be_none() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("4")
        screen = desk.app.screen
        assert isinstance(screen, CurvesScreen)
        answer = curves_at_silo()  # all names, and the points of what was asked for
        answer["series"] = [each for each in answer["series"] if each["name"] in screen.key.split()[1].split(",")]
        await desk.answer(screen.key, answer)
        await desk.press("T")
        assert "no figures yet" not in desk.text and NOT_READ not in desk.text
        await lose(desk)
        await desk.press("tab")
        assert NOT_READ in desk.text and "no figures yet" not in desk.text


def test_T37_a_cause_of_any_length_is_cut_at_once() -> None:
    told = replace(lost(live(silo()), 0.0), link=Link("disconnected", "x" * 200_000, HINT, 0.0, 12.0))
    begun = time.process_time()
    rows = condition_lines(told, 0.0, 76, opened_at=0.0, waits_for="", below_at=None, most=4)
    assert len(rows) <= 4 and time.process_time() - begun < 2.0  # each turn over the whole of it takes seconds


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
        told = replace(live(silo()), refused={"a": (refused.value.code, refused.value.line)})
        rows = answer_lines(told, "a", 100.0, cells, opened_at=90.0)
        text = " ".join(to_text(rows).split())
        assert len(rows) <= most and text.endswith("record it with --include-local LOCAL"), text


def test_a_long_refusal_is_cut_with_a_sign() -> None:
    refused = ("FAILED", "word " * 70 + "end")
    rows = answer_lines(replace(live(silo()), refused={"a": refused}), "a", 100.0, 76, opened_at=90.0)
    assert len(rows) == 3 and to_text(rows).endswith("…")
    rows = answer_lines(replace(live(silo()), refused={"a": ("FAILED", "disk full")}), "a", 100.0, 76, opened_at=90.0)
    assert to_text(rows) == "error: disk full [FAILED]"


async def test_a_table_keeps_its_rows() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("5")
        await desk.answer("outbox", page(30))
        await lose(desk)
        assert "09:00:30" in desk.text and NOT_READ not in desk.text


async def test_frozen_rows_are_as_old_as_their_title_says_and_not_called_unread() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("8")
        await desk.answer("certs", CERTIFICATES)
        await desk.press("space")
        await desk.wait(600.0)
        await lose(desk)
        assert "FROZEN 10:00" in desk.text and "below as of 10:00 ago" in desk.text and NOT_READ not in desk.text


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

"""What was held before: who said no and for which reason, and that a coordinator has none of it."""

from __future__ import annotations

from console.screens.approvals import AT_A_COORDINATOR, HistoryScreen
from fedsilo.control.answers import ReleaseRow, read
from fedsilo.views.approvals import HISTORY_COLUMNS
from tests.console.desk import console
from tests.console.states import coordinator, silo

NOTE = "the round was announced for next week, and half of the ward's records are still being coded; ask bob again"


def test_a_rejection_has_its_reason_code_and_a_yes_has_none() -> None:
    answers = next(column for column in HISTORY_COLUMNS if column.name == "answers")
    row = {"answers": [
        {"person": "alice", "verdict": "approve", "at": "", "reason": "CONTENT"},
        {"person": "bob", "verdict": "reject", "at": "", "reason": "TIMING"},
        {"person": "carol", "verdict": "reject", "at": ""},
    ]}  # fmt: skip
    assert answers.show(read(ReleaseRow, row))[0] == "alice yes, bob no TIMING, carol no"


async def test_what_a_code_means_stands_in_the_row_when_it_is_opened() -> None:
    row = {
        "id": "r1/hospital_a/0", "kind": "lora.factors", "state": "rejected", "held_since": 1.0, "needed": 1,
        "bytes": 5, "answers": [{"person": "bob", "verdict": "reject", "at": "", "reason": "TIMING", "note": NOTE}],
    }  # fmt: skip
    async with console((80, 24)) as desk:
        await desk.show(silo())
        await desk.open(HistoryScreen())
        await desk.answer("history", {"releases": [row], "total": 1, "next": None})
        assert "bob no TIMING " in desk.text and "not at this time" not in desk.text
        await desk.press("enter")
        words = " ".join(desk.text.replace("│", " ").split())
        assert "bob TIMING (not at this time)" in words and f'"{NOTE}"' in words


async def test_at_a_coordinator_it_asks_nothing_and_says_where_releases_are() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.open(HistoryScreen())
        assert "history" in desk.app.wanted and "s Sort" in desk.text
        await desk.show(coordinator())
        assert "history" not in desk.app.screen.wants() and "s Sort" not in desk.text
        assert AT_A_COORDINATOR[:50] in desk.text and "error" not in desk.text

"""What was held before: who said no and for which reason, and that a coordinator has none of it."""

from __future__ import annotations

from console.screens.history import AT_A_COORDINATOR, COLUMNS, KEY, HistoryScreen
from tests.console.desk import console
from tests.console.states import coordinator, silo


def test_a_rejection_has_its_reason_code_and_a_yes_has_none() -> None:
    answers = next(column for column in COLUMNS if column.name == "answers")
    row = {"answers": [
        {"person": "alice", "verdict": "approve", "at": "", "reason": "CONTENT"},
        {"person": "bob", "verdict": "reject", "at": "", "reason": "TIMING"},
        {"person": "carol", "verdict": "reject", "at": ""},
    ]}  # fmt: skip
    assert answers.show(row)[0] == "alice yes, bob no TIMING (not at this time), carol no"


async def test_at_a_coordinator_it_asks_nothing_and_says_where_releases_are() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.open(HistoryScreen())
        assert KEY in desk.app.wanted and "s Sort" in desk.text
        await desk.show(coordinator())
        assert KEY not in desk.app.screen.wants() and "s Sort" not in desk.text
        assert AT_A_COORDINATOR[:50] in desk.text and "error" not in desk.text

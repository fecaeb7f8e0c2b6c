"""The inbox and what was held before: what is held, who answered what, and that opening one is all they can do."""

from __future__ import annotations

from typing import Any

import pytest

from console.screens.approval import ApprovalScreen
from console.screens.approvals import AT_A_COORDINATOR, ApprovalsScreen, HistoryScreen
from fedsilo.control.answers import ReleaseRow, read
from fedsilo.views.approvals import HISTORY_COLUMNS
from tests.console.desk import SIZES, console
from tests.console.states import NOW, coordinator, release, silo

SECOND = release(id="r1/hospital_a/1", held_since=NOW - 10, expires_at=NOW + 200)
YES = {"person": "alice", "verdict": "approve", "at": "2026-12-01T07:00:00Z"}
NO = {"person": "bob", "verdict": "reject", "at": "2026-11-30T08:00:00Z"}
PAST = {
    "id": "r0/hospital_a/0", "kind": "lora.factors", "bytes": 1000, "digest": "cd" * 32, "state": "approved",
    "held_since": NOW - 9000, "expires_at": NOW - 7200, "needed": 2, "given": ["alice", "bob"],
    "policy_digest": "ef" * 32, "answers": [YES, {**YES, "person": "bob"}],
}  # fmt: skip
NOTE = "the round was announced for next week, and half of the ward's records are still being coded; ask bob again"


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([], "nobody"),
        ([YES, {**YES, "person": "bob"}], "alice yes, bob yes"),
        ([YES | {"reason": "CONTENT"}, NO | {"reason": "TIMING"}, NO], "alice yes, bob no TIMING, bob no"),
    ],
)
def test_who_answered_what(answers: list[dict[str, Any]], told: str) -> None:
    (column,) = (column for column in HISTORY_COLUMNS if column.name == "answers")
    assert column.show(read(ReleaseRow, {"answers": answers}))[0] == told


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_what_is_held_what_it_asks_for_and_that_nothing_can_be_answered_from_the_list(
    size: tuple[int, int],
) -> None:
    rules = [*release()["policy"]["rules"], {"rule": "new destination", "outcome": "look", "measured": "NEW place"}]
    second = {**SECOND, "policy": {**SECOND["policy"], "rules": rules}}
    async with console(size) as desk:
        desk.unlock()
        await desk.show(silo(release(), second))
        await desk.press("3")
        assert isinstance(desk.app.screen, ApprovalsScreen) and set(desk.app.wanted) == {"halts"}
        first, other = (line for line in desk.text.splitlines() if "hospital_a/" in line)
        assert "▸ r1/hospital_a/0" in first and "27:4" in first and "03:1" in other
        desk.shows("1 hold 23 ok", "leaves lora.factors 1.9 MiB to coordinator.example:7443", "asks 0 of 1 approvals")
        desk.shows("held people's approvals: 0 given, 1 needed", "findings none")
        await desk.press("j")
        desk.shows("findings NEW place", lacks=["findings none"])
        assert await desk.sends("A", "R", "enter") == []
        assert isinstance(desk.app.screen, ApprovalScreen) and desk.app.screen.shown.id == "r1/hospital_a/1"
        await desk.press("escape")
        await desk.show(silo(release()))
        assert desk.app.screen.context().release == "r1/hospital_a/0"
        await desk.show(silo())
        desk.shows("no releases that wait for an answer", lacks=["leaves"])


@pytest.mark.slow
async def test_history_is_a_screen_of_its_own_and_comes_in_pages() -> None:
    held: dict[str, Any] = {**PAST, "id": "r1/hospital_a/0", "state": "held", "answers": []}
    first = {**PAST, "id": "r0/hospital_a/9", "state": "rejected", "answers": [NO | {"reason": "TIMING", "note": NOTE}]}
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        await desk.press("3", "h")
        assert isinstance(desk.app.screen, HistoryScreen) and desk.app.screen.twin() == "silo approvals history"
        assert desk.app.wanted["history"] == ("approvals", {"limit": 100})
        await desk.answer("history", {"releases": [held, PAST], "total": 3, "next": 7})
        assert desk.app.wanted["history before 7"] == ("approvals", {"limit": 100, "before": 7})
        await desk.answer("history before 7", {"releases": [first], "total": 3, "next": None})
        assert "history before 7" not in desk.app.wanted
        await desk.press("j", "enter")
        desk.shows("yes alice", "2026-12-01T07:00:00Z", "cd" * 32, "silo approvals show r0/hospital_a/0")
        await desk.press("escape", "j", "enter")
        desk.shows("bob TIMING (not at this time)", f'"{NOTE}"'[:60])
        await desk.press("escape", "g", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.press("escape", "escape")
        assert isinstance(desk.app.screen, ApprovalsScreen) and set(desk.app.wanted) == {"halts"}


async def test_at_a_coordinator_it_asks_nothing_and_says_where_releases_are() -> None:
    async with console() as desk:
        await desk.show(coordinator())
        await desk.press("3")
        desk.shows(AT_A_COORDINATOR[:60], "silo approvals list", lacks=["h History", "s Sort", "╭"])
        assert not {"table", "approvals"} & desk.app.top.tags  # the help names no key that does nothing
        await desk.press("h")
        assert isinstance(desk.app.screen, ApprovalsScreen)
        await desk.wait(7.0)
        await desk.show(silo())
        assert "h History" in desk.text and {"table", "approvals"} <= desk.app.top.tags
        await desk.press("h")
        assert "history" in desk.app.wanted
        await desk.show(coordinator())
        assert "history" not in desk.app.screen.wants()  # type: ignore[attr-defined]
        desk.shows(AT_A_COORDINATOR[:50], lacks=["s Sort", "error"])
        await desk.press("escape", "escape")
        assert desk.app.top.called == "overview"

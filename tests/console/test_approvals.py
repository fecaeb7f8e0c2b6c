"""The inbox: what is held, what was answered, and that opening one is all it can do."""

from __future__ import annotations

from typing import Any

import pytest

from console.screens.approval import ApprovalScreen
from console.screens.approvals import AT_A_COORDINATOR, ApprovalsScreen, HistoryScreen
from tests.console.desk import SIZES, console
from tests.console.states import NOW, coordinator, release, silo

SECOND = release(id="r1/hospital_a/1", held_since=NOW - 10, expires_at=NOW + 200)
PAST = {
    "id": "r0/hospital_a/0", "kind": "lora.factors", "bytes": 1000, "digest": "cd" * 32, "state": "approved",
    "held_since": NOW - 9000, "expires_at": NOW - 7200, "needed": 2, "given": ["alice", "bob"],
    "policy_digest": "ef" * 32,
    "answers": [{"person": "alice", "verdict": "approve", "at": "2026-12-01T07:00:00Z"},
                {"person": "bob", "verdict": "approve", "at": "2026-12-01T07:10:00Z"}],
}  # fmt: skip


async def test_what_is_held_and_for_how_long_still() -> None:
    async with console() as desk:
        await desk.show(silo(release(), SECOND))
        await desk.press("3")
        assert isinstance(desk.app.screen, ApprovalsScreen) and "3·Approvals(2)" in desk.text
        first, second = (line for line in desk.text.splitlines() if "hospital_a/" in line)
        assert "▸ r1/hospital_a/0" in first and "27:4" in first and "03:1" in second and "held for" in desk.text
        await desk.press("j", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen) and desk.app.screen.shown.id == "r1/hospital_a/1"
        await desk.press("escape")
        assert isinstance(desk.app.screen, ApprovalsScreen) and desk.app.screen.context().release == "r1/hospital_a/1"
        await desk.show(silo(release()))
        assert desk.app.screen.context().release == "r1/hospital_a/0"


@pytest.mark.parametrize("size", SIZES)
async def test_below_the_list_stands_what_the_one_under_the_cursor_asks_for(size: tuple[int, int]) -> None:
    rules = [*release()["policy"]["rules"], {"rule": "new destination", "outcome": "look", "measured": "NEW place"}]
    second = {**SECOND, "policy": {**SECOND["policy"], "rules": rules}}
    async with console(size) as desk:
        await desk.show(silo(release(), second))
        await desk.press("3")
        words = " ".join(desk.text.split())
        for told in (
            "1 hold 23 ok", "leaves lora.factors 1.9 MiB to coordinator.example:7443", "c09f",
            "asks 0 of 1 approvals, by approver",
            "held people's approvals: 0 given, 1 needed", "findings none; no text screens in this ruleset",
        ):  # fmt: skip
            assert told in words, told
        await desk.press("j")
        assert "findings NEW place" in " ".join(desk.text.split()) and "findings none" not in desk.text
        await desk.show(silo())
        assert "leaves" not in desk.text  # the box goes with what was held


async def test_nothing_can_be_answered_from_the_list() -> None:
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("3", "A", "R", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen) and await desk.answers_sent() == []


async def test_history_is_a_screen_of_its_own_and_comes_in_pages() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        await desk.press("3")
        assert set(desk.app.wanted) == {"halts"}
        await desk.press("h")
        assert isinstance(desk.app.screen, HistoryScreen) and desk.app.screen.twin() == "silo approvals history"
        assert desk.app.wanted["history"] == ("approvals", {"limit": 100})
        held: dict[str, Any] = {**PAST, "id": "r1/hospital_a/0", "state": "held", "answers": []}
        await desk.answer("history", {"releases": [held, PAST], "total": 3, "next": 7})
        shown = [line for line in desk.text.splitlines() if "hospital_a/" in line]
        assert len(shown) == 2 and "approved" in shown[1] and "alice yes, bob yes" in shown[1] and "nobody" in shown[0]
        assert desk.app.wanted["history before 7"] == ("approvals", {"limit": 100, "before": 7})
        first: dict[str, Any] = {
            **PAST,
            "id": "r0/hospital_a/9",
            "state": "rejected",
            "answers": [{"person": "bob", "verdict": "reject", "at": "2026-11-30T08:00:00Z"}],
        }
        await desk.answer("history before 7", {"releases": [first], "total": 3, "next": None})
        assert "bob no" in desk.text and "history before 7" not in desk.app.wanted
        await desk.press("j", "enter")
        for told in ("yes alice", "2026-12-01T07:00:00Z", f"sha256:{'cd' * 32}", "silo approvals show r0/hospital_a/0"):
            assert told in desk.text
        await desk.press("escape", "k", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.press("escape", "escape")
        assert isinstance(desk.app.screen, ApprovalsScreen) and set(desk.app.wanted) == {"halts"}


async def test_nothing_held_and_a_coordinator_say_so() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("3")
        assert "no releases that wait for an answer" in desk.text
        await desk.show(coordinator())
        assert AT_A_COORDINATOR[:60] in " ".join(desk.text.split()) and "silo approvals list" in desk.text
        assert "h History" not in desk.text and "s Sort" not in desk.text and "╭" not in desk.text
        tags = desk.app.top.tags
        assert "table" not in tags and "approvals" not in tags  # the help names no key that does nothing
        await desk.press("h")
        assert isinstance(desk.app.screen, ApprovalsScreen) and "held before is at each silo" in desk.text
        await desk.wait(7.0)
        await desk.show(silo())
        assert "h History" in desk.text and {"table", "approvals"} <= desk.app.top.tags
        await desk.show(coordinator())
        await desk.press("escape")
        assert desk.app.top.called == "overview"

"""The inbox: what is held, what was answered, and that opening one is all it can do."""

from __future__ import annotations

from typing import Any

import pytest

from console.screens.approval import ApprovalScreen
from console.screens.approvals import ApprovalsScreen
from tests.console.desk import SIZES, console
from tests.console.states import NOW, coordinator, release, silo
from tests.console.test_safe import TOGETHER

SECOND = release(id="r1/hospital_a/1", held_since=NOW - 10, expires_at=NOW + 200)
PAST = {
    "id": "r0/hospital_a/0", "kind": "lora.factors", "bytes": 1000, "digest": "cd" * 32, "state": "sent",
    "held_since": NOW - 9000, "expires_at": NOW - 7200, "needed": 1, "given": ["alice"],
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
async def test_what_is_held_and_for_how_long_still(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo(release(), SECOND))
        await desk.press("3")
        assert isinstance(desk.app.screen, ApprovalsScreen) and "3·Approvals(2)" in desk.text
        first, second = (line for line in desk.text.splitlines() if "hospital_a/" in line)
        assert "▸ r1/hospital_a/0" in first and "27:4" in first and "03:1" in second and "held" in second
        await desk.press("j", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen) and desk.app.screen.shown.id == "r1/hospital_a/1"
        await desk.press("escape")
        assert isinstance(desk.app.screen, ApprovalsScreen) and desk.app.screen.context().release == "r1/hospital_a/1"
        await desk.show(silo(release()))
        assert desk.app.screen.context().release == "r1/hospital_a/0"


async def test_nothing_can_be_answered_from_the_list() -> None:
    async with console() as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("3", "A", "R", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen) and await desk.answers_sent() == []


async def test_history_is_asked_for_only_while_it_is_shown() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        await desk.press("3")
        assert set(desk.app.wanted) == {"halts"}
        await desk.press("h")
        assert desk.app.wanted["approvals"] == ("approvals", {})
        held: dict[str, Any] = {**PAST, "id": "r1/hospital_a/0", "state": "held"}
        await desk.answer("approvals", {"releases": [PAST, held]})
        shown = [line for line in desk.text.splitlines() if "hospital_a/" in line]
        assert len(shown) == 2 and "sent" in shown[1] and "1 of 1" in shown[1]
        await desk.press("j", "enter")
        assert "approved by alice" in desk.text and "silo approvals show r0/hospital_a/0" in desk.text
        await desk.press("escape", "h")
        assert set(desk.app.wanted) == {"halts"} and "r0/hospital_a/0" not in desk.text


async def test_nothing_held_and_a_coordinator_say_so() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("3")
        assert "no releases that wait for an answer" in desk.text
        await desk.show(coordinator())
        assert "each silo's own people answer its releases" in desk.text
        await desk.press("escape")
        assert desk.app.top.called == "overview"


@pytest.mark.parametrize("name", TOGETHER)
async def test_T37_hostile_history_draws_no_control_character(name: str) -> None:
    text = TOGETHER[name]
    async with console((140, 42)) as desk:
        await desk.show(silo(release(id=text)))
        await desk.press("3", "h")
        await desk.answer("approvals", {"releases": [{**PAST, "id": text + "2", "kind": text, "given": [text]}, 3]})
        for key in ("j", "enter", "escape", "i"):
            assert not [character for character in desk.text if not (character.isprintable() or character == "\n")]
            await desk.press(key)

"""The keys at the foot of a held release: what has to come first stands first; and a no by its code with its words."""

from __future__ import annotations

import pytest

from fedsilo.views.rule_words import REJECT_CODES
from tests.console.desk import SIZES, console, open_dialog
from tests.console.states import release, silo


@pytest.mark.parametrize("size", SIZES)
async def test_unlock_stands_first_while_locked_and_all_keys_fit(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("enter")
        await desk.show(silo(release()))
        footer = desk.text.splitlines()[-1]
        assert (
            footer.startswith(" A Approve…") and "Unlock" not in footer and "p Policy" in footer and "? Help" in footer
        )
        desk.app.signing.person = None
        await desk.show(silo(release()))
        footer = desk.text.splitlines()[-1]
        assert footer.startswith(" L Unlock") and "A Approve…" in footer and "? Help" in footer


async def test_a_console_that_cannot_be_unlocked_offers_no_key_for_it() -> None:
    async with console(read_only=True) as desk:
        await desk.show(silo(release()))
        await desk.press("enter")
        await desk.show(silo(release()))
        assert "L Unlock" not in desk.text and "A Approve…" in desk.text


async def test_a_rejection_asks_for_a_code_and_says_what_each_means() -> None:
    async with console() as desk:
        await open_dialog(desk, "R")
        words = " ".join(desk.text.replace("┃", " ").split())
        assert all(f"{code} {says}" in words for code, says in REJECT_CODES.items()) and "Cancel" in desk.text

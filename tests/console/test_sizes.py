"""Terminals that change size while something is asked, and such as are too small for anything but one sentence."""

from __future__ import annotations

import pytest
from textual.widgets import Input

from console.base import TextDialog, TooSmall
from console.dialogs import AskingDialog, ChooseDialog
from console.screens.approval import ApprovalScreen
from tests.console.desk import Desk, console, open_dialog, type_word
from tests.console.states import DIGEST, release, silo

SMALL, WIDE = (80, 24), (140, 42)
RESIZE_SECONDS = 4 / 120  # Textual draws a resize by a timer of 1/120 s, and what follows from it after that


async def resized(desk: Desk, *sizes: tuple[int, int]) -> None:
    for size in sizes:
        await desk.pilot.resize_terminal(*size)
        await desk.pilot.pause(RESIZE_SECONDS)


@pytest.mark.parametrize("key", ["R", "question_mark"])
async def test_what_is_below_a_dialog_is_whole_again_after_the_terminal_was_larger(key: str) -> None:
    async with console(SMALL) as desk:
        await open_dialog(desk, key)
        held = [desk.app.screen_stack[-2]]
        assert isinstance(held[0], ApprovalScreen) and desk.app.screen is not held[0]
        await desk.press("escape")
        before = desk.text.splitlines()[2:]  # without what ages
        await desk.press(key)
        await resized(desk, WIDE, SMALL)
        await desk.press("escape")
        await desk.show(silo(release()))
        assert desk.app.screen is held[0] and desk.text.splitlines()[2:] == before
        body = held[0].query_one("#body")
        assert body.max_scroll_y == 0 and not body.show_vertical_scrollbar


async def test_a_text_wraps_alike_with_a_scroll_bar_and_without() -> None:
    """Its bar has a place of its own, so whether it is there decides nothing."""
    async with console(SMALL) as desk:
        await desk.show(silo(release()))
        await desk.press("enter")
        body, column = desk.app.screen.query_one("#body"), desk.app.screen.query_one("#column")
        width = column.size.width
        assert not body.show_vertical_scrollbar
        await resized(desk, (80, 16))
        assert body.max_scroll_y > 0 and body.show_vertical_scrollbar
        assert column.size.width == width == 78


@pytest.mark.parametrize("size", [(40, 10), (200, 15), (20, 3)])
async def test_a_refusal_is_wrapped_and_is_all_there_is(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo(release()))
        words = " ".join(desk.text.split())
        told = f"needs 60x16, has {size[0]}x{size[1]}; 1 needs you; as text: silo status"
        assert words == told if size != (20, 3) else told.startswith(words) and "has 20x3" in words, words
        assert max(map(len, desk.text.splitlines())) <= size[0]
        await resized(desk, (60, 16))
        assert "needs 60x16" not in desk.text and "This silo" in desk.text


@pytest.mark.parametrize(
    ("dialog", "size"), [("A", (50, 15)), ("A", (140, 15)), ("question_mark", (50, 42)), ("colon", (50, 15))]
)
async def test_a_dialog_without_room_is_covered_takes_no_key_and_stands_there_again(
    dialog: str, size: tuple[int, int]
) -> None:
    async with console(SMALL) as desk:
        await open_dialog(desk, dialog)
        asked = desk.app.screen
        assert isinstance(asked, AskingDialog | TextDialog | ChooseDialog)
        if dialog == "A":
            await type_word(desk, DIGEST[-4:-1])
        await resized(desk, size)
        assert isinstance(desk.app.screen, TooSmall)
        assert " ".join(desk.text.split()).startswith(f"needs 60x16, has {size[0]}x{size[1]}; 1 needs you")
        await type_word(desk, DIGEST[-1])
        await desk.press("tab", "enter", "escape", "q")
        assert isinstance(desk.app.screen, TooSmall) and await desk.answers_sent() == []
        await resized(desk, SMALL)
        assert desk.app.screen is asked and "needs 60x16" not in desk.text
        if dialog == "A":  # as it was left, and it can be finished
            word = asked.query_one("#word", Input)
            assert word.value == DIGEST[-4:-1] and word.has_focus
            await desk.show(silo(release()))
            await type_word(desk, DIGEST[-1])
            await desk.press("tab", "enter")
            assert [sent[1] for sent in await desk.answers_sent()] == ["approvals.approve"]


async def test_a_dialog_that_opens_where_there_is_no_room_is_covered_at_once() -> None:
    async with console((50, 15)) as desk:
        await desk.show(silo(release()))
        await desk.press("question_mark")
        assert isinstance(desk.app.screen, TooSmall) and "Help" not in desk.text
        await resized(desk, SMALL)
        assert isinstance(desk.app.screen, TextDialog) and "Help, overview" in desk.text

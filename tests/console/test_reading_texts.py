"""A text that is opened over a screen: the usual keys go through it, and its frame says while more is below."""

from __future__ import annotations

from console.base import TextDialog
from fedsilo.views.lines import line
from tests.console.desk import Desk, console
from tests.console.states import silo

LINES = 200
MORE = "j for more"


async def opened(desk: Desk, lines: int = LINES) -> TextDialog:
    await desk.show(silo())
    dialog = TextDialog("Read this", [line(f"line {number} of it") for number in range(lines)])
    desk.app.push_screen(dialog)
    await desk.pilot.pause()
    await desk.pilot.pause()
    return dialog


async def test_each_key_that_moves_a_text_does_and_more_is_said_until_its_end() -> None:
    async with console() as desk:
        dialog = await opened(desk)
        page = dialog.box.size.height - 1
        assert "line 0 of it" in desk.text and MORE in desk.text
        at = 0
        for key, step in (
            ("j", 1), ("down", 1), ("k", -1), ("up", -1), ("space", page), ("pagedown", page), ("ctrl+d", page),
            ("b", -page), ("pageup", -page), ("ctrl+u", -page),
        ):  # fmt: skip
            await desk.press(key)
            at += step
            assert dialog.box.scroll_y == at, key
        for key in ("end", "G"):
            await desk.press(key)
            assert f"line {LINES - 1} of it" in desk.text and MORE not in desk.text, key
            await desk.press("home" if key == "end" else "g")
            assert "line 0 of it" in desk.text and MORE in desk.text
        await desk.press("q")
        assert not isinstance(desk.app.screen, TextDialog)


async def test_of_a_text_that_is_there_whole_no_more_is_said_until_the_terminal_shrinks() -> None:
    async with console((100, 30)) as desk:
        await opened(desk, 20)
        assert "line 19 of it" in desk.text and MORE not in desk.text
        await desk.pilot.resize_terminal(80, 20)
        await desk.pilot.pause(2 / 120)
        await desk.pilot.pause()
        assert MORE in desk.text


async def test_a_dialog_in_ascii_says_it_in_ascii() -> None:
    async with console((80, 24), ascii_only=True, theme_name="fed-mono") as desk:
        await opened(desk)
        assert MORE in desk.text and desk.text.isascii()

"""A console is as wide as its terminal, also where Textual lost a resize or the shell exports a size."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from itertools import count

import pytest
from textual import _time
from textual.geometry import Size

from console.screens.terminal_size import forget_pinned_size
from tests.console.desk import Desk, console
from tests.console.states import silo

WIDE = (140, 42)
LATE_SECONDS = 0.05  # several times the 1/120 s of the timer that draws a resize


async def resized_late(desk: Desk, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    """The terminal gets another size, while the machine is so busy that each look at the clock is a late one."""
    began, looks = _time.get_time(), count(1)
    with monkeypatch.context() as late:
        late.setattr(_time, "get_time", lambda: began + next(looks) * LATE_SECONDS)
        await desk.pilot.resize_terminal(*size)
        timer = desk.app._resize_timer
        assert timer is not None and timer._task is not None
        await timer._task  # ended without its callback
    await desk.pilot.pause()


def drawn(desk: Desk) -> int:
    return max(map(len, desk.text.splitlines()))


async def test_a_resize_that_textual_lost_is_drawn_with_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("6", "question_mark", "escape")
        await resized_late(desk, monkeypatch, WIDE)
        assert desk.app.size == Size(*WIDE) and desk.app.screen.outer_size == Size(80, 24)  # the fault as it was seen
        desk.app.tick()
        await desk.pilot.pause()
        assert desk.app.screen.outer_size == Size(*WIDE) and drawn(desk) == WIDE[0]
        await desk.pilot.resize_terminal(100, 30)  # and the way of every later one is free again
        await desk.pilot.pause(2 / 120)
        assert desk.app.screen.outer_size == Size(100, 30)


async def test_a_resize_that_nobody_heard_of_is_drawn_too_and_a_dialog_with_it() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("question_mark")
        assert desk.app._driver is not None
        desk.app._driver._size = WIDE
        for _ in range(2):  # Textual's own timer is between them
            desk.app.tick()
            await desk.pilot.pause(2 / 120)
        sizes = {screen.outer_size for screen in desk.app.screen_stack[1:]}
        assert sizes == {Size(*WIDE)} == {desk.app.size}, desk.app.screen_stack


async def test_a_tick_repeats_nothing_where_the_size_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as desk:
        await desk.show(silo())
        repeated: list[object] = []
        with monkeypatch.context() as watched:
            watched.setattr(desk.app, "post_message", repeated.append)
            watched.setattr(desk.app.screen, "post_message", repeated.append)
            desk.app.tick()
        assert not [message for message in repeated if type(message).__name__ == "Resize"]


ASKS = """
import os, shutil
from console.screens.terminal_size import forget_pinned_size
forget_pinned_size()
print(*shutil.get_terminal_size(), flush=True)
"""


@pytest.mark.parametrize(("on_terminal", "told"), [(True, "140 42"), (False, "50 10")])
def test_a_shell_that_exports_a_size_does_not_pin_it_on_a_terminal(on_terminal: bool, told: str) -> None:
    main, there = os.openpty()
    try:
        ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", WIDE[1], WIDE[0], 0, 0))
        done = subprocess.Popen(
            [sys.executable, "-c", ASKS], stdout=there if on_terminal else subprocess.PIPE, stdin=there,
            env={**os.environ, "COLUMNS": "50", "LINES": "10"},
        )  # fmt: skip
        out, _ = done.communicate(timeout=60)
        text = os.read(main, 1000) if on_terminal else out
        assert text.decode().strip() == told and done.returncode == 0
    finally:
        os.close(main)
        os.close(there)


def test_only_the_size_is_forgotten() -> None:
    environment = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    forget_pinned_size(environment, on_terminal=True)
    assert environment == {"TERM": "xterm"}

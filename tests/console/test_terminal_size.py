"""A console is as wide as its terminal, also where Textual lost a resize or the shell exports a size."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from itertools import count
from pathlib import Path

import pytest
from textual import _time
from textual.geometry import Size

from console.terminal import forget_pinned_size
from tests.console.desk import Desk, console
from tests.console.states import silo

WIDE = (140, 42)
LATE_SECONDS = 0.05  # several times the 1/120 s of the timer that draws a resize
SMALL = (80, 24)


@contextmanager
def drawn_on(desk: Desk, size: tuple[int, int]) -> Iterator[int]:
    """The driver's output is a terminal of that size; its other end, of which the size is set, is what is given."""
    main, there = os.openpty()
    try:
        resize(main, size)
        with os.fdopen(there, "w") as stream:
            desk.app._driver._file = stream  # type: ignore[union-attr]
            yield main
    finally:
        os.close(main)


def resize(terminal: int, size: tuple[int, int]) -> None:
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))


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


@pytest.mark.slow
async def test_a_resize_that_textual_lost_is_drawn_with_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("6", "question_mark", "escape")
        await resized_late(desk, monkeypatch, WIDE)
        assert desk.app.size == Size(*WIDE) and desk.app.screen.outer_size == Size(*SMALL)  # the fault as it was seen
        with drawn_on(desk, WIDE):
            desk.app.tick()
            await desk.pilot.pause()
        assert desk.app.screen.outer_size == Size(*WIDE) and drawn(desk) == WIDE[0]
        await desk.resize(100, 30)  # and the way of every later one is free again
        assert desk.app.screen.outer_size == Size(100, 30)


async def ticks(desk: Desk) -> set[Size]:
    """Sizes of all screens after two ticks."""
    for _ in range(2):  # Textual's own timer is between them
        desk.app.tick()
        await desk.pilot.pause(2 / 120)
    return {screen.outer_size for screen in desk.app.screen_stack[1:]} | {desk.app.size}


@pytest.mark.slow
async def test_a_resize_that_nobody_heard_of_is_drawn_too_and_a_dialog_with_it() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("question_mark")
        with drawn_on(desk, SMALL) as terminal:
            resize(terminal, WIDE)
            assert await ticks(desk) == {Size(*WIDE)}, desk.app.screen_stack


@pytest.mark.parametrize("untold", ["size of nothing", "told in band", "no terminal", "closed"])
async def test_who_does_not_say_its_size_is_not_taken_for_80x24(untold: str, tmp_path: Path) -> None:
    """As a serial line, whose size is 0x0, and a terminal that tells its size among the keys (mode 2048)."""
    async with console(WIDE) as desk:
        await desk.show(silo())
        driver = desk.app._driver
        assert driver is not None
        with drawn_on(desk, (0, 0) if untold == "size of nothing" else SMALL) as terminal:
            if untold == "told in band":
                driver._in_band_window_resize = True  # type: ignore[attr-defined]
            elif untold == "no terminal":
                driver._file = (tmp_path / "log").open("w")  # type: ignore[attr-defined]
            elif untold == "closed":
                driver._file.close()  # type: ignore[attr-defined]
            assert await ticks(desk) == {Size(*WIDE)}
            if untold == "size of nothing":
                resize(terminal, SMALL)  # from when it says one, it is believed
                assert await ticks(desk) == {Size(*SMALL)}


async def test_a_tick_repeats_nothing_where_the_size_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as desk:
        await desk.show(silo())
        repeated: list[object] = []
        with monkeypatch.context() as watched, drawn_on(desk, SMALL):
            watched.setattr(desk.app, "post_message", repeated.append)
            watched.setattr(desk.app.screen, "post_message", repeated.append)
            desk.app.tick()
        assert not [message for message in repeated if type(message).__name__ == "Resize"]


ASKS = """
import os, shutil
from console.terminal import forget_pinned_size
forget_pinned_size()
print(*shutil.get_terminal_size(), flush=True)
"""


@pytest.mark.parametrize(("on_terminal", "told"), [(True, "140 42"), (False, "50 10")])
def test_a_shell_that_exports_a_size_does_not_pin_it_on_a_terminal(on_terminal: bool, told: str) -> None:
    main, there = os.openpty()
    try:
        resize(there, WIDE)
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

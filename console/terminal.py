"""The terminal that the console draws on: its size, how the console ends on it, and that it may go away.

When its window is closed or the connection behind it ends, the kernel sends SIGHUP and SIGCONT together, and every
write fails. Textual's driver would enter the terminal once more at the SIGCONT, its thread that writes would die of the
failed write, and what waits for that thread would wait for ever: a console that holds an unlocked key and no screen.
Here a write to a terminal that is gone is dropped, and only a console that ctrl+z put aside enters the terminal again.

The size is asked again with every tick: a resize of which the console heard nothing is drawn then. Two ways in which
one is lost for ever otherwise, and with it every later one of the first kind:

- Textual draws a resize once, by a timer of 1/120 s (`App._on_resize`, `App._resize_timer`). A one-shot `Timer` that
  skips late ticks and finds itself late at its start ends without its callback (`textual.timer.Timer._run`). Nothing
  clears it then, and while it is set no resize reaches a screen: the app knows its size, the screens keep theirs.
- The signal of a resize may come while nobody is there to hear it, such as between two programs of a terminal.

Also: whoever exports COLUMNS or LINES would pin the size, for `shutil.get_terminal_size` believes them first. Only the
terminal itself is believed: one that does not tell its size (no terminal, or 0 rows), and one that tells it in band,
with the keys, is left to Textual, since its own question would be answered with 80x24.

A mistake of ours leaves the console as the exception it is; the command that opened it writes the report file and
leaves with 70. Textual would print it with the values of all variables instead, and those are data of the site.
SIGTERM, SIGHUP and SIGINT end the console as ctrl+q does, and then count as an interruption; a terminal that is closed
under it sends SIGHUP.

Does not cover: SIGSTOP from elsewhere, after which the screen stands as the shell left it until something is drawn;
SIGKILL, or a crash of the interpreter itself, after which `reset` restores the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from typing import IO, Any

from textual import events
from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size


class UntilGone:
    """A text file whose writes are dropped once they fail: what draws goes on to its end, and then to the app's."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TerminalDriver(LinuxDriver):
    """Textual's driver for terminals of Unix, for one that may go away."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file: Any = UntilGone(self._file)

    def _sigcont_application(self, *_: object) -> None:
        if self._must_signal_resume:  # it was put aside: `_sigtstp_application`
            super()._sigcont_application()


PINS = ("COLUMNS", "LINES")


def follow_terminal(app: App[Any]) -> None:
    """Repeat a resize that was not drawn.

    Args:
        app: whose size should be that of its terminal, and of its screens; one that draws on a whole terminal.
    """
    size = _terminal_size(app)
    if size is None or not app.screen_stack or app.size == app.screen.outer_size == size:
        return
    if app._resize_timer is not None:
        app._resize_timer.stop()
        app._resize_timer = None
    if app.size != size:
        app.post_message(events.Resize(size, size))
        return
    for screen in app.screen_stack:  # to the app itself a size that it has is no resize
        screen.post_message(events.Resize(size, size))


def _terminal_size(app: App[Any]) -> Size | None:
    """Return the size of the terminal that the driver draws on; None where it cannot be known."""
    drawn_on = getattr(app._driver, "_file", None)
    if drawn_on is None or getattr(app._driver, "_in_band_window_resize", False):
        return None
    try:
        width, height = os.get_terminal_size(drawn_on.fileno())
    except (OSError, ValueError):  # no terminal, or closed
        return None
    return Size(width, height) if width and height else None


def forget_pinned_size(environment: MutableMapping[str, str] = os.environ, *, on_terminal: bool | None = None) -> None:
    """Take what would pin the size out of the environment, where the console draws on a terminal: elsewhere, as behind
    `fedconsole serve`, it is how the size comes in."""
    if on_terminal is None:
        on_terminal = sys.__stdout__ is not None and sys.__stdout__.isatty()
    if on_terminal:
        for name in PINS:
            environment.pop(name, None)


ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class LetsThrough(App[None]):
    """An app that prints nothing of an exception that ends it: `run_to_the_end` raises it."""

    def _fatal_error(self) -> None:
        self.bell()
        self._close_messages_no_wait()

    def get_driver_class(self) -> type[Driver]:
        """Textual's choice, but for a terminal one that may go away under it."""
        chosen = super().get_driver_class()
        return TerminalDriver if chosen is LinuxDriver else chosen

    @property
    def failure(self) -> Exception | None:
        """Return the exception that ended it, if a fault of the console did."""
        return self._exception


def run_to_the_end(app: LetsThrough, **options: Any) -> None:
    """Run on this terminal until the person leaves.

    Args:
        app: not run yet.
        options: of `App.run_async`, such as `headless`.

    Raises:
        KeyboardInterrupt: a signal of `ENDS` ended it.
        Exception: whatever an unexpected exception in it was. Both once the terminal is as it was before.
    """
    caught: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        caught.append(number)
        app.exit()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in ends:
            loop.add_signal_handler(number, end, number)
        await app.run_async(**options)

    # only the main thread is told of signals; elsewhere they are its caller's business
    ends = ENDS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in ends}
    try:
        asyncio.run(run())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if app.failure is not None:
        raise app.failure
    if caught:
        raise KeyboardInterrupt

"""How a console ends when something goes wrong: the terminal as it was before, and the cause with whoever began it.

A mistake of ours leaves the console as the exception it is; the command that opened it writes the report file and
leaves with 70 (console design 7). Textual would print it with the values of all variables instead, and those are data
of the site. SIGTERM, SIGHUP and SIGINT end the console as ctrl+q does, and then count as an interruption; a terminal
that is closed under it sends SIGHUP.

Does not restore: after SIGKILL, or a crash of the interpreter itself; `reset` does.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver

from console.screens.terminal import TerminalDriver

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
        """What ended it, if a mistake of ours did."""
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

"""The terminal that the console draws on, also when it goes away: its window is closed, the connection behind it ends.

The kernel then sends SIGHUP and SIGCONT together, and every write fails. Textual's driver would enter the terminal once
more at the SIGCONT, its thread that writes would die of the failed write, and what waits for that thread would wait for
ever: a console that holds an unlocked key and no screen. Here a write to a terminal that is gone is dropped, and only a
console that ctrl+z put aside enters the terminal again.

Does not cover: SIGSTOP from elsewhere, after which the screen stands as the shell left it until something is drawn.
"""

from __future__ import annotations

import contextlib
from typing import IO, Any

from textual.drivers.linux_driver import LinuxDriver


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

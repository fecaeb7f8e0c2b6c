"""A database file that another process has locked, such as a backup tool: wait until it lets go, and say so meanwhile.

Nothing is lost by waiting: a round's deadlines go on at the other parties, and whoever waits goes on by itself with
whatever they left it. A full disk, or any other fault, is no lock and is raised at once. Who holds the lock is not
known: SQLite's locks carry no name.
Does not stop: a lock that is never released. It is named for as long as it lasts, and a stop ends the wait.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedsilo.protocol.errors import OperationError

_log = logging.getLogger("fedsilo.locked")

T = TypeVar("T")
TRY_SECONDS = 0.2  # SQLite's own wait for one try
SAID_AFTER_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
LOCKED = "DATABASE_LOCKED"


def is_locked(error: BaseException | None) -> bool:
    """Whether another one's lock is all that is wrong, so that the same statement may be tried again."""
    code = getattr(error, "sqlite_errorcode", 0) or 0
    held = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return held and code != sqlite3.SQLITE_BUSY_SNAPSHOT


class LockedFile:
    """Waits for one file; safe to use from several threads.

    Args:
        path: of the database.

    Attributes:
        give_up: asked in between: whether to wait no longer, since this process is to end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.give_up: Callable[[], bool] = lambda: False
        self._counting = threading.Lock()
        self._waiters = 0

    @property
    def waiting(self) -> str:
        """What is waited for, in words; empty while nothing is."""
        return self._told if self._waiters else ""

    @property
    def _told(self) -> str:
        return f"{self._path} is locked by another process; nothing is written until it lets go, and then all goes on"

    def until_free(self, work: Callable[[], T]) -> T:
        """What `work` returns, which is tried again while the file is locked.

        Raises:
            OperationError: it is locked, and this process is to end. sqlite3.Error: any other fault of the database.
        """
        begun, said = time.monotonic(), False
        try:
            while True:
                try:
                    return work()
                except sqlite3.Error as error:
                    if not is_locked(error):
                        raise
                    if self.give_up():
                        raise self._error() from error
                if not said and time.monotonic() - begun >= SAID_AFTER_SECONDS:
                    said = True
                    self._count(1)
                    _log.warning("%s; `fuser %s` names it", self._told, self._path)
                time.sleep(_PAUSE_SECONDS)
        finally:
            if said:
                self._count(-1)
                _log.warning("%s: no longer waited for after %.1f s", self._path, time.monotonic() - begun)

    def _error(self) -> OperationError:
        return OperationError(
            f"{self._path} is locked by another process", code=LOCKED,
            hint=f"`fuser {self._path}` names it: a backup tool? the file itself is whole, and there is space",
        )  # fmt: skip

    def _count(self, change: int) -> None:
        with self._counting:
            self._waiters += change

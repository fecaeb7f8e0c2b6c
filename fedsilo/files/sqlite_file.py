"""SQLite files that another process may hold: wait for a lock and say so, or read without leaving anything beside it.

Nothing is lost by waiting for a lock, such as a backup tool's: a round's deadlines go on at the other parties, and
whoever waits goes on by itself with whatever they left it. A full disk, or any other fault, is no lock and is raised at
once. Who holds the lock is not known: SQLite's locks carry no name.
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
    """Return whether another one's lock is all that is wrong, so that the same statement may be tried again."""
    code = getattr(error, "sqlite_errorcode", 0) or 0
    locked = code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return locked and code != sqlite3.SQLITE_BUSY_SNAPSHOT


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
        """Return what is waited for, in words; empty while nothing is."""
        return self._warning if self._waiters else ""

    @property
    def _warning(self) -> str:
        return f"{self._path} is locked by another process; nothing is written until it lets go, and then all goes on"

    def until_free(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; try it again while the file is locked.

        Raises:
            OperationError: it is locked, and this process is to end. sqlite3.Error: any other fault of the database.
        """
        begun, warned = time.monotonic(), False
        try:
            while True:
                try:
                    return work()
                except sqlite3.Error as error:
                    if not is_locked(error):
                        raise
                    if self.give_up():
                        raise OperationError(
                            f"{self._path} is locked by another process",
                            code=LOCKED,
                            hint=f"`fuser {self._path}` names it: a backup tool? the file itself is whole, and there "
                            "is space",
                        ) from error
                if not warned and time.monotonic() - begun >= SAID_AFTER_SECONDS:
                    warned = True
                    self._count(1)
                    _log.warning("%s; `fuser %s` names it", self._warning, self._path)
                time.sleep(_PAUSE_SECONDS)
        finally:
            if warned:
                self._count(-1)
                _log.warning("%s: no longer waited for after %.1f s", self._path, time.monotonic() - begun)

    def _count(self, change: int) -> None:
        with self._counting:
            self._waiters += change


# ---- reading only ----------------------------------------------------------------------------------------------------


def read_only_address(path: Path) -> str:
    """The SQLite URI of a database in WAL mode that is only read.

    Without a log of its own (-wal) such a database is complete. Read as immutable, SQLite takes no lock and makes no
    files beside it, so a folder that nobody may write to can be read too. With one, its content counts, and SQLite
    needs its shared memory.

    Does not cover: a daemon that starts meanwhile. What is read then may be of two moments; open it for each question.
    """
    complete = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    return f"{path.absolute().as_uri()}?mode=ro{complete}"

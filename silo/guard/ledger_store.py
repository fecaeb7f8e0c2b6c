"""How the ledger (`ledger.py`) reads and writes its one SQLite file: one lock, one transaction for each write."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedsilo.treaty.errors import OperationError


class LedgerStore:
    """Whoever extends it opens the database."""

    _database: sqlite3.Connection

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def _fact(self, name: str) -> str | None:
        row = self._one("SELECT value FROM facts WHERE name=?", (name,))
        return None if row is None else str(row["value"])

    def _set_fact(self, name: str, value: str) -> None:
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, flushed at the end. Raises OperationError: the disk refused (then nothing was sent)."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except sqlite3.IntegrityError:
                self._roll_back()
                raise
            except sqlite3.Error as error:
                self._roll_back()
                raise OperationError(
                    f"the ledger cannot be written: {error}", hint="is the disk full?", code="LEDGER_UNWRITABLE"
                ) from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _one(self, query: str, arguments: tuple[Any, ...]) -> sqlite3.Row | None:
        return next(iter(self._all(query, arguments)), None)

    def _all(self, query: str, arguments: tuple[Any, ...]) -> list[sqlite3.Row]:
        with self._lock:
            return list(self._database.execute(query, arguments).fetchall())

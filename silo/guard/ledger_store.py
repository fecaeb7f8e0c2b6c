"""How the ledger (`ledger.py`) reads and writes its one SQLite file: one lock, one transaction for each write, and the
head of what was written, which the audit log names (threat T42).

    head = HMAC-SHA-256(the ledger's own secret; number of the group, head before, counters, halts and budgets)

A group is all that was written between two records of the log. The ledger commits first, in the transaction itself, and
the next record names the head. So a ledger is as the log says, or one group ahead of it where a kill came in between;
one that is behind is an older copy. The ledger keeps the head that the log names last beside its own.
The secret keeps whoever reads the log from guessing at counts (T40).

Where another process has locked the file, whoever reads or writes waits until it lets go; a disk that refuses is told
at once.

Does not stop: the daemon's user, who may read the secret and write a group of his own choice.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedsilo.edge.locked_file import LockedFile
from fedsilo.treaty.errors import OperationError

_HEAD = "head"  # the fact that keeps it
_NO_HEAD = "0" * 64
# Counters by their sums, since a site has two for each run it ever took part in.
_COVERED = """
SELECT name, value FROM facts WHERE name IN
  ('acknowledged', 'clock_accepted', 'clock_halt', 'equivocation', 'history_before', 'history_book', 'latest_time',
   'policy_in_force')
UNION ALL SELECT 'sequences/' || direction, COUNT(*) || ' ' || SUM(value) FROM sequences GROUP BY direction
ORDER BY name"""


class Head(NamedTuple):
    """One group of the ledger, as a record of the log names it."""

    groups: int
    head: str

    @classmethod
    def named(cls, field: Mapping[str, Any]) -> Head:
        return cls(int(field["groups"]), str(field["head"]))

    def field(self) -> dict[str, Any]:
        """The field `ledger` of a record."""
        return self._asdict()


@dataclass(frozen=True)
class Heads:
    """Attributes:
    newest: of what the ledger holds.
    before: the head that this one was made from.
    logged: those that the log may name in its place: the one it named last, and more where a kill came, or a record
        failed, before that was known.
    """

    newest: Head
    before: str
    logged: tuple[Head, ...]

    def agree_with(self, named: Head) -> bool:
        """Whether the ledger is as the log says, or ahead of it by what the log need not have named."""
        return named == self.newest or named in self.logged


class LedgerStore:
    """Whoever extends it opens the database."""

    _database: sqlite3.Connection

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self.locked = LockedFile(path)
        self._named: Head | None = None  # which head the log is known to name last
        self._group_open = False  # something was written that the log does not name

    @property
    def heads(self) -> Heads | None:
        """None for a ledger of a version that kept no heads, until it is written the first time."""
        return _heads_of(self._fact(_HEAD))

    def is_unchanged(self) -> bool:
        """Whether counters, halts and budgets are those that the head was made of; so without a head."""
        with self._lock:
            heads = self.heads
            return heads is None or self._head(self._database, heads.newest.groups, heads.before) == heads.newest.head

    def agree(self, named: Head | None) -> None:
        """The log names this one last, or none, and it was compared."""
        with self._lock:
            heads = self.heads
            self._named = named
            self._group_open = heads is not None and named != heads.newest

    @contextmanager
    def naming(self) -> Iterator[dict[str, Any] | None]:
        """Around one record: its field `ledger`, or None where the log names the newest head already. Nothing is
        written into the ledger until the record stands. One that fails may be on the disk all the same, if only its
        flush failed: what is written next is another group, and the log may name either."""
        with self._lock:
            heads = self.heads
            if heads is None or heads.newest == self._named:
                yield None
                return
            self._group_open = False
            yield heads.newest.field()
            self._named = heads.newest

    def _follow(self, database: sqlite3.Connection, named: Head) -> None:
        """Within a transaction: this group follows the one that the log names, whichever this ledger held."""
        kept = {"groups": named.groups, "head": named.head, "before": _NO_HEAD, "logged": []}
        database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_HEAD, json.dumps(kept)))
        self._named, self._group_open = named, False

    def _advance_head(self, database: sqlite3.Connection) -> None:
        row = database.execute("SELECT value FROM facts WHERE name=?", (_HEAD,)).fetchone()
        heads = _heads_of(None if row is None else row["value"])
        before, groups, logged = _NO_HEAD, 1, tuple[Head, ...]()
        if heads is not None:
            before, groups, logged = heads.newest.head, heads.newest.groups, heads.logged
            if not self._group_open:
                groups += 1
                logged = (heads.newest,) if heads.newest == self._named else (*logged, heads.newest)
        head = self._head(database, groups, before)
        kept = {"groups": groups, "head": head, "before": before, "logged": logged}
        database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_HEAD, json.dumps(kept)))

    def _head(self, database: sqlite3.Connection, groups: int, before: str) -> str:
        covered = [list(row) for row in database.execute(_COVERED)]
        content = json.dumps(["fedsilo ledger", groups, before, covered], separators=(",", ":"))
        return hmac.new(self.finding_key(), content.encode(), hashlib.sha256).hexdigest()

    def finding_key(self) -> bytes:
        """The secret that heads and ids of findings are made with, the same for this ledger's life; none for a reader
        of one that has not made it yet."""
        return bytes.fromhex(self._fact("finding_key") or "")

    def _fact(self, name: str) -> str | None:
        row = self._one("SELECT value FROM facts WHERE name=?", (name,))
        return None if row is None else str(row["value"])

    def _set_fact(self, name: str, value: str) -> None:
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, flushed at the end. Raises OperationError: the disk refused (then nothing was sent)."""
        with self._begun():
            try:
                yield self._database
                self._advance_head(self._database)
                self.locked.until_free(lambda: self._database.execute("COMMIT"))
            except sqlite3.IntegrityError:
                self._roll_back()
                raise
            except sqlite3.Error as error:
                self._roll_back()
                raise _unwritable(error) from error
            except BaseException:
                self._roll_back()
                raise
            self._group_open = True

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """A transaction is open and nobody else reads. While the file is locked others may read what is there."""

        def begin() -> None:
            self._lock.acquire()
            try:
                self._database.execute("BEGIN IMMEDIATE")
            except BaseException:
                self._lock.release()
                raise

        try:
            self.locked.until_free(begin)
        except sqlite3.Error as error:
            raise _unwritable(error) from error
        try:
            yield
        finally:
            self._lock.release()

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _one(self, query: str, arguments: tuple[Any, ...]) -> sqlite3.Row | None:
        return next(iter(self._all(query, arguments)), None)

    def _all(self, query: str, arguments: tuple[Any, ...]) -> list[sqlite3.Row]:
        def read() -> list[sqlite3.Row]:
            with self._lock:
                return list(self._database.execute(query, arguments).fetchall())

        return self.locked.until_free(read)


def _unwritable(error: sqlite3.Error) -> OperationError:
    return OperationError(f"the ledger cannot be written: {error}", hint="is the disk full?", code="LEDGER_UNWRITABLE")


def _heads_of(text: str | None) -> Heads | None:
    if text is None:
        return None
    kept = json.loads(text)
    return Heads(Head.named(kept), str(kept["before"]), tuple(Head(int(n), str(head)) for n, head in kept["logged"]))

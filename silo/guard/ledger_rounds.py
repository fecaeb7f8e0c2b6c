"""What the ledger keeps of the open round, so that a guard that was killed goes on inside it: what the method was told,
what became of what it offered, and what was counted of a message that a kill kept from being kept.

A message is counted, then recorded, then put into the outbox, and only then sent. Killed in between, it never left and
never will; offered again, it must not be denied for a limit that it took up itself. So the counts as they were before
are kept beside the new ones until it lies in the outbox, or the next message is counted; an opened ledger takes such a
count back. Nothing that left is ever taken back: such a message is sent out of the outbox alone, and what is not
(control.*) is counted for good at once.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from silo.guard.ledger_store import LedgerStore


class RoundLedger(LedgerStore):
    """Whoever extends it opens the database."""

    def keep_of_round(self, run: str, kept: dict[str, Any], *, opens: bool = False) -> None:
        """A message of a round, durable before the method hears of it: {kind, round, step, digest, payload: hex}.

        opens: with it begins a round; what was kept of others goes.
        """
        name = f"run/{run}/again/{kept['kind']}/{kept['step']}/{kept['digest']}"
        with self._writing() as database:
            if opens:
                others = "name GLOB 'run/*/again/*' AND json_extract(value, '$.round')<>?"
                database.execute(f"DELETE FROM facts WHERE {others}", (kept["round"],))  # noqa: S608  # constant text
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(kept)))

    def kept_of_round(self, run: str, round_number: int) -> list[dict[str, Any]]:
        """In the order in which they came; empty where it goes on without this silo. Donors of a round may come before
        it has begun (`exchange: round_end`)."""
        rows = self._all("SELECT value FROM facts WHERE name GLOB ? ORDER BY rowid", (f"run/{run}/again/*",))
        kept = [dict(json.loads(row["value"])) for row in rows]
        return [one for one in kept if one["round"] == round_number]

    def forget_round(self) -> None:
        """The open round goes on without this silo, also over a restart."""
        with self._writing() as database:
            database.execute("DELETE FROM facts WHERE name GLOB 'run/*/again/*'")

    def take_back_count(self) -> None:
        """When it is opened: of a message that was counted and did not get into the outbox."""
        if (before := self._fact("history_before")) is None:
            return
        with self._writing() as database:
            count_for_good(database, before)
            if not before:
                database.execute("DELETE FROM facts WHERE name='history_book'")

    def became_of(self, kind: str, run: str, round_number: int, step: int) -> str:
        """What became of an offer: sent | denied | missed; waits: it is held, or lies in the outbox; empty: no trace.

        One that a rule denied leaves a trace in the audit log only.
        """
        place = "kind=? AND run=? AND round=? AND step=?"
        for table, meanings in (("outbox", _OUTBOX), ("releases", _RELEASES)):
            query = f"SELECT state FROM {table} WHERE {place} ORDER BY rowid DESC LIMIT 1"  # noqa: S608  # constant text
            if (row := self._one(query, (kind, run, round_number, step))) is not None:
                return meanings.get(row["state"], "denied")
        return ""


_OUTBOX = {"allowed": "waits", "sent": "sent"}
_RELEASES = {"held": "waits", "missed": "missed"}


def count_until_kept(database: sqlite3.Connection, book: str) -> None:
    """Replace the history, and keep the one before until `count_for_good`; an empty text where there was none."""
    before = "SELECT 'history_before', COALESCE((SELECT value FROM facts WHERE name='history_book'), '')"
    database.execute(f"INSERT OR REPLACE INTO facts {before}")  # constant text
    database.execute("INSERT OR REPLACE INTO facts VALUES ('history_book', ?)", (book,))


def count_for_good(database: sqlite3.Connection, book: str = "") -> None:
    """What was counted is not taken back any more. book: the history from now on, if it changes."""
    database.execute("DELETE FROM facts WHERE name='history_before'")
    if book:
        database.execute("INSERT OR REPLACE INTO facts VALUES ('history_book', ?)", (book,))

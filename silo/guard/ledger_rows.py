"""What the ledger (`ledger.py`) keeps: its tables, and their rows as frozen values."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from policies.model import PolicyFile
from policies.model_kinds import without_gone

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sequences (direction TEXT, run TEXT, value INTEGER NOT NULL, PRIMARY KEY (direction, run));
CREATE TABLE IF NOT EXISTS outbox (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL,
  digest TEXT NOT NULL, payload_bytes INTEGER NOT NULL, decision_seq INTEGER NOT NULL, at REAL NOT NULL,
  state TEXT NOT NULL, attempts INTEGER NOT NULL, archived INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS releases (
  id TEXT PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL,
  digest TEXT NOT NULL, policy_digest TEXT NOT NULL, payload_bytes INTEGER NOT NULL, recorded TEXT NOT NULL,
  facts TEXT NOT NULL, rules TEXT NOT NULL, persons INTEGER NOT NULL, requested_at REAL NOT NULL,
  expires_at REAL NOT NULL, expiry_outcome TEXT NOT NULL, state TEXT NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS approvals (
  release_id TEXT, person TEXT, fingerprint TEXT NOT NULL, digest TEXT NOT NULL, verdict TEXT NOT NULL,
  reason TEXT NOT NULL, at REAL NOT NULL, acknowledged TEXT NOT NULL DEFAULT '[]', record INTEGER NOT NULL DEFAULT -1,
  reason_code TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (release_id, person));
CREATE TABLE IF NOT EXISTS policy_changes (proposal TEXT PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, plan TEXT NOT NULL, state TEXT NOT NULL, view TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS outbox_place ON outbox (kind, run, round, step);
CREATE INDEX IF NOT EXISTS releases_state ON releases (state, kind, digest, run);
"""
LEFT = "left"  # state of a run that this silo left for good
# Of tables that an earlier version of this program made.
_ADDED = {
    "approvals": {
        "acknowledged": "TEXT NOT NULL DEFAULT '[]'", "record": "INTEGER NOT NULL DEFAULT -1",
        "reason_code": "TEXT NOT NULL DEFAULT ''",
    },
}  # fmt: skip


@dataclass(frozen=True)
class OutboxItem:
    """One content message that the gate allowed. Its bytes are kept until the coordinator has answered it."""

    id: int
    run: str
    round: int
    step: int
    kind: str
    digest: str
    payload_bytes: int
    decision_seq: int  # of the audit record
    at: float  # seconds since 1970
    state: str  # allowed | sent | dropped (its bytes are gone, or the policy changed its mind while it waited)
    attempts: int
    archived: bool  # its bytes stay when it is settled, until retention takes them


@dataclass(frozen=True)
class Release:
    """A held message. The payload of this digest is what will be sent, byte for byte, if persons approve."""

    id: str
    run: str
    round: int
    step: int
    kind: str
    digest: str
    policy_digest: str
    payload_bytes: int
    recorded: Mapping[str, Any]  # size and digest as they may stand in the audit log (T40)
    facts: Mapping[str, Any]
    rules: list[dict[str, Any]]
    persons: int
    requested_at: float
    expires_at: float
    expiry_outcome: str  # missed: the step's deadline comes first; denied: the policy's expiry does
    state: str  # held | approved | rejected | expired | missed | denied
    revision: int


@dataclass(frozen=True)
class Approval:
    release_id: str
    person: str
    fingerprint: str
    digest: str
    verdict: str  # approve | reject
    reason: str
    at: float
    acknowledged: tuple[str, ...] = ()  # ids of the findings that there were, each opened by the person
    record: int = -1  # of the audit log, where the yes stands; below zero: in none, and it counts nothing
    reason_code: str = ""  # of a no


@dataclass(frozen=True)
class PolicyInForce:
    """What decided last at this site.

    Attributes:
        digest: of the effective policy.
        content: the same as JSON, defaults filled in; two of them compare field by field.
        logged: digest that the audit log's newest record named when this was put in force. The log says either the one
            or the other; that it says a third shows a ledger restored from an older copy (T42).
    """

    digest: str
    content: dict[str, Any]
    logged: str

    @property
    def file(self) -> PolicyFile | None:
        """The content as this version reads it; None where another version's words do not fit."""
        try:
            return PolicyFile.model_validate(without_gone(self.content))
        except ValidationError:
            return None


def add_missing_columns(database: sqlite3.Connection) -> None:
    for table, columns in _ADDED.items():
        known = {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}
        for name in columns.keys() - known:
            database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")


def outbox_item_of(row: sqlite3.Row) -> OutboxItem:
    return OutboxItem(**{**dict(row), "archived": bool(row["archived"])})


def release_of(row: sqlite3.Row) -> Release:
    values = {name: row[name] for name in row.keys() if name != "number"}  # noqa: SIM118  # a row is no mapping
    return Release(**values | {name: json.loads(values[name]) for name in ("recorded", "facts", "rules")})


def approval_of(row: sqlite3.Row) -> Approval:
    """A reader may meet a table that nobody has added columns to."""
    values = dict(row)
    return Approval(**values | {"acknowledged": tuple(json.loads(values.get("acknowledged", "[]")))})

"""What the coordinator appends to its audit log beside the decisions on what it took in.

*Records of a transaction*: what a round agreed on and came to is in the database before it is in the log, or a kill in
between would leave a log that tells of a transcript which the restarted coordinator makes differently. So the record
goes into the transaction and from there into the log, at once or at the next start.

*The log's place*: the database knows how many records the log had with each message that it keeps, so a coordinator
that is started with another log, or with an older copy, is refused.

*Refusals*: each is a record, since somebody tried; but who tries is outside, and would fill the disk, which halts the
coordinator (T23, T24). Each identity has a bucket of single records; what comes beyond it is one record with a number,
once the bucket is full again.
What this does not bound: messages that the rules allow, which the charter's rates do; and identities, which the
federation's CA does.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import store as db
from fedsilo.audit.log import AuditLog
from fedsilo.protocol.errors import ConflictError

log = logging.getLogger("fedsilo.coordinator")

REFUSALS_MAX = 60  # recorded singly, of one identity
REFILL_SECONDS = 6.0  # until one more may be
IDENTITIES_MAX = 1024  # with a bucket of their own; further ones share one
MORE_REFUSALS = "MORE_REFUSALS"
_OTHERS = "others"
_NAMED_MAX = 16  # reasons that a summary names


# ---- records of a transaction ------------------------------------------------------------------------


class Pending:
    """Records that are durable with a transaction and appended once it is."""

    def __init__(self, store: db.Store, audit: AuditLog) -> None:
        self._store = store
        self._audit = audit

    def record(self, session: Session, event: str, **fields: Any) -> None:
        """Append to the audit log what this transaction changes, when it is durable and not before.

        Args:
            session: the caller's transaction.
            event: of the record.
            fields: of the record: run, round, kind, detail.
        """
        session.add(db.PendingRecord(event=event, fields=db.as_json(fields)))
        session.flush()
        self._store.once_committed(self.append)

    def append(self) -> None:
        """Raises OperationError: the log or the database takes nothing; the next start goes on from there."""
        self._append_but(set())

    def look(self) -> None:
        """At a start: that this is the log which the database was used with, and no older copy; its root is kept.

        Raises:
            ConflictError: it is not (`LOG_BEHIND`): silos that countersigned the longer one would see two histories.
        """
        audit, origin = self._audit, self._audit.origin
        with self._store.transaction() as session:
            place = session.get(db.LogPlace, origin)
        found = audit.size_found  # before this start closed what a kill had left open
        if place is not None and not (place.size <= found and audit.root_at(place.rooted).hex() == place.root):
            raise ConflictError(
                f"{audit.directory} has {found} records and is not the log that the database was used with: that "
                f"one is of {origin} and has {place.size} at least",
                hint="bring the audit folder as the last coordinator left it", code="LOG_BEHIND",
            )  # fmt: skip
        with self._store.transaction() as session:
            session.merge(db.LogPlace(origin=origin, size=found, rooted=found, root=audit.root_at(found).hex()))

    def take_up(self) -> None:
        """At a start: append what a kill left behind, but what it left between the log and the database only once."""
        with self._store.transaction() as session:
            waiting = {_content(row.event, json.loads(row.fields)) for row in session.scalars(_in_order())}
        there = (_content(record["event"], record) for record in self._audit.records()) if waiting else ()
        self._append_but(waiting & set(there))

    def _append_but(self, there: set[str]) -> None:
        with self._store.transaction() as session:
            rows = list(session.scalars(_in_order()))
            for row in rows:
                fields = json.loads(row.fields)
                if _content(row.event, fields) not in there:
                    self._audit.append(row.event, **fields)
                session.delete(row)
            if rows:  # an older copy of the log would lack what was taken out here
                db.set_log_size(session, self._audit.origin, self._audit.size)


def _in_order() -> Any:
    return select(db.PendingRecord).order_by(db.PendingRecord.id)


def _content(event: str, fields: dict[str, Any]) -> str:
    return db.as_json({"event": event, **{name: fields.get(name) for name in ("run", "round", "detail")}})


# ---- refusals ----------------------------------------------------------------------------------------


@dataclass
class _Bucket:
    """`left`: single records, at the moment `at` (seconds). `held`: reasons of what was not recorded singly."""

    left: float
    at: float
    held: Counter[str] = field(default_factory=Counter)


class Refusals:
    """Used under the driver's lock.

    Args:
        append: to the audit log.
        monotonic: seconds.
    """

    def __init__(self, append: Callable[..., Any], monotonic: Callable[[], float]) -> None:
        self._append = append
        self._monotonic = monotonic
        self._buckets: dict[str, _Bucket] = {}

    def may_record(self, identity: str, reasons: list[str]) -> bool:
        """Whether this refusal is recorded singly; it is counted where not.

        Args:
            identity: of the certificate, so that nobody spends another's records.
            reasons: codes.

        Raises:
            OperationError: a summary that is due cannot be recorded.
        """
        self.tell()
        if identity not in self._buckets and len(self._buckets) >= IDENTITIES_MAX:
            identity = _OTHERS
        bucket = self._buckets.setdefault(identity, _Bucket(REFUSALS_MAX, self._monotonic()))
        # once something is held, all is, until the bucket is full: a flood costs what its bucket holds, and a summary
        if bucket.held or bucket.left < 1:
            bucket.held[reasons[0] if reasons else MORE_REFUSALS] += 1
            return False
        bucket.left -= 1
        return True

    def tell(self, *, everything: bool = False) -> None:
        """Record the numbers of the buckets that are full again, or of all of them; a full bucket is forgotten.

        Raises:
            OperationError: one cannot be recorded; it is tried again.
        """
        now = self._monotonic()
        for identity, bucket in list(self._buckets.items()):
            bucket.left = min(REFUSALS_MAX, bucket.left + max(0.0, now - bucket.at) / REFILL_SECONDS)
            bucket.at = now
            if bucket.held and (everything or bucket.left >= REFUSALS_MAX):
                self._tell(identity, bucket.held)
                bucket.held = Counter()
            if bucket.left >= REFUSALS_MAX:
                del self._buckets[identity]

    def _tell(self, identity: str, held: Counter[str]) -> None:
        log.warning("refused %s: %d more, counted only", identity, held.total())
        self._append(
            "ingress.decision", kind="unknown", decision="deny", reasons=[MORE_REFUSALS], direction="ingress",
            peer=identity[:128], detail={"messages": held.total(), "reasons": dict(held.most_common(_NAMED_MAX))},
        )  # fmt: skip

"""The messages to a silo: signed replies under one counter per silo that never repeats a number, and those that wait
for each until it says that it took them in: at least once, oldest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from sqlalchemy import Row, bindparam, case, delete, insert, or_, select, update
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.blobs import AnyPayload, BytesPayload
from coordinator.store import Known, OutboxItem, its, table_of, where_its
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import seal
from fedsilo.protocol.place import Place

# Sequences are reserved on the disk in blocks, so that not every reply costs a write; a restart leaves a gap.
RESERVED_SEQUENCES = 256


@dataclass(frozen=True)
class Reply:
    envelope: pb.Envelope
    payload: AnyPayload


class Replies:
    """Seals replies. Used under the driver's lock.

    Args:
        sender: the coordinator's SPIFFE id.
        key: its message-signing key, pinned by every silo.
        undone: calls what it is given where the transaction fails.
    """

    def __init__(
        self, federation: str, sender: str, key: Ed25519PrivateKey, undone: Callable[[Callable[[], None]], None]
    ) -> None:
        self._federation = federation
        self._sender = sender
        self._key = key
        self._undone = undone
        self._last: dict[str, int] = {}
        self._reserved: dict[str, int] = {}

    def seal(
        self, session: Session, silo: str, place: Place, *, body: Message | None, payload: AnyPayload | None
    ) -> Reply:
        """Seal one reply: either `payload` as it is, or the canonical bytes of `body`."""
        content = payload if payload is not None else BytesPayload(codec.encode(body) if body is not None else b"")
        envelope = seal(
            place,
            content.digest,
            federation=self._federation,
            sender=self._sender,
            sequence=self._next_sequence(session, silo),
            attempt=1,
            key=self._key,
        )
        return Reply(envelope, content)

    def last_sequence(self, session: Session, silo: str) -> int:
        """The highest that was given to a silo, or, after a restart, a higher one."""
        if silo not in self._last:
            self._last[silo] = self._reserved[silo] = db.sequence_of(session, silo, "", "out")
        return self._last[silo]

    def _next_sequence(self, session: Session, silo: str) -> int:
        """One counter per silo over all runs: strictly increasing within each run as well."""
        self._last[silo] = self.last_sequence(session, silo) + 1
        if self._last[silo] > (before := self._reserved[silo]):
            self._undone(lambda: self._reserved.update({silo: before}))
            self._reserved[silo] = self._last[silo] + RESERVED_SEQUENCES - 1
            db.set_sequence(session, silo, "", "out", self._reserved[silo])
        return self._last[silo]


# ---- messages that wait ----------------------------------------------------------------------------------------------


LOST = -1  # as a delivered sequence: it was given, and no number that a silo acknowledges tells of it

_ITEMS = table_of(OutboxItem)
_QUEUE = insert(_ITEMS)
_FIRST = select(_ITEMS).where(where_its(OutboxItem.silo)).order_by(OutboxItem.id).limit(1)
_FIRST_BUT = _FIRST.where(OutboxItem.run.not_in(bindparam("but", expanding=True)))
_WAITS = select(OutboxItem.id).where(where_its(OutboxItem.silo)).limit(1)
_NEVER_GIVEN = _WAITS.where(where_its(OutboxItem.run, OutboxItem.kind), OutboxItem.delivered_sequence == 0)
_TAKEN_IN = (
    delete(_ITEMS)
    .where(where_its(OutboxItem.silo), OutboxItem.delivered_sequence.between(1, bindparam("sequence")))
    .returning(OutboxItem.id, OutboxItem.run, OutboxItem.kind)
)
_WITHDRAW = delete(_ITEMS).where(where_its(OutboxItem.silo, OutboxItem.run))
_GIVE = (
    update(_ITEMS)
    .where(where_its(OutboxItem.silo), or_(where_its(OutboxItem.id), OutboxItem.delivered_sequence > 0))
    .values(
        delivered_sequence=case(
            (OutboxItem.id != bindparam("its_id"), LOST),
            (OutboxItem.delivered_sequence > 0, OutboxItem.delivered_sequence),
            else_=bindparam("sequence"),
        )
    )
)
_COUNT_AS_LOST = (
    update(_ITEMS)
    .where(
        where_its(OutboxItem.silo),
        OutboxItem.delivered_sequence > 0,
        OutboxItem.id.not_in(bindparam("but", expanding=True)),
    )
    .values(delivered_sequence=LOST)
)


def _known(session: Session) -> Known:
    known: Known = session.info["outboxes"]
    return known


def queue(session: Session, silo: str, place: Place, payload: bytes) -> None:
    row = {"silo": silo, **place._asdict(), "payload": payload, "delivered_sequence": 0}
    session.connection().execute(_QUEUE, row)
    _known(session).queued[silo] += 1


def is_waiting(session: Session, silo: str) -> bool:
    """Return whether anything waits for a silo, of a paused run, too."""
    known = _known(session)
    if known.is_empty(silo):
        return False  # as mostly
    waits = session.connection().execute(_WAITS, its(silo=silo)).scalar() is not None
    if not waits:
        known.note_empty(silo)
    return waits


def first_item(session: Session, silo: str, *, but: Sequence[str] = ()) -> Row[Any] | None:
    """Return what waits longest for a silo, of a run that is not among `but`; a row of `OutboxItem`."""
    known = _known(session)
    if known.is_empty(silo):
        return None
    if but:
        return session.connection().execute(_FIRST_BUT, its(silo=silo) | {"but": list(but)}).first()
    row = session.connection().execute(_FIRST, its(silo=silo)).first()
    if row is None:
        known.note_empty(silo)
    return row


def items(session: Session, silo: str, *, but: Sequence[str] = ()) -> list[OutboxItem]:
    """Return all that waits for a silo, oldest first."""
    query = select(OutboxItem).where(OutboxItem.silo == silo, OutboxItem.run.not_in(list(but)))
    return list(session.scalars(query.order_by(OutboxItem.id)))


def give(session: Session, silo: str, item_id: int, sequence: int) -> None:
    """Note that an item is in the answer of this number; the first one counts: whoever acknowledges it, or a later one,
    has taken the item in. Whatever else was given to the silo and waits still is lost, as in `count_as_lost`."""
    session.connection().execute(_GIVE, its(silo=silo, id=item_id) | {"sequence": sequence})


def count_as_lost(session: Session, silo: str, *, but: Iterable[OutboxItem]) -> None:
    """Count as lost what waits for a silo, was given to it once and is not in its present answer (`but`). A silo
    acknowledges numbers; what it takes in now has a higher one, which would acknowledge these as well. If they did
    arrive, they come twice."""
    session.connection().execute(_COUNT_AS_LOST, its(silo=silo) | {"but": [item.id for item in but]})


def take_in(session: Session, silo: str, sequence: int) -> list[Row[int, str, str]]:
    """Take out what a silo has taken in when it acknowledges a sequence, whatever else waits in between: id, run and
    kind of each, oldest first."""
    if _known(session).is_empty(silo):
        return []
    gone = session.connection().execute(_TAKEN_IN, its(silo=silo) | {"sequence": sequence}).all()
    return sorted(gone, key=lambda row: int(row.id))


def never_given(session: Session, silo: str, run: str, kind: str) -> bool:
    """Return whether a message of this kind waits for a silo and was in no answer to it yet."""
    return session.connection().execute(_NEVER_GIVEN, its(silo=silo, run=run, kind=kind)).scalar() is not None


def withdraw(session: Session, silo: str, run: str) -> None:
    """Take back what a silo has not been given of a run."""
    session.connection().execute(_WITHDRAW, its(silo=silo, run=run))

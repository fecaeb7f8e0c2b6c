"""What goes back to a silo: one signed envelope each, under one counter per silo that never repeats a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.blobs import AnyPayload, BytesPayload
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
        federation: its id.
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
        self,
        session: Session,
        silo: str,
        place: Place,
        *,
        body: Message | None,
        payload: AnyPayload | None,
    ) -> Reply:
        """One reply: either `payload` as it is, or the canonical bytes of `body`."""
        content = payload if payload is not None else BytesPayload(codec.encode(body) if body is not None else b"")
        envelope = seal(
            place, content.digest, federation=self._federation, sender=self._sender,
            sequence=self._next_sequence(session, silo), attempt=1, key=self._key,
        )  # fmt: skip
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

"""What the coordinator's core is put together from, and the few values its modules hand each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.blobs import AnyPayload, Blobs
from coordinator.ingress import Ingress
from coordinator.members import Agreed
from coordinator.replies import Replies, Reply
from fedsilo.audit.log import AuditLog
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.kinds import OUTBOUND_KINDS

CONTRIBUTIONS = frozenset(kind for kind in OUTBOUND_KINDS if not kind.startswith("control."))


@dataclass
class Parts:
    """What a driver is put together from; `daemon.Coordinator` makes one from a configuration.

    Attributes:
        replies: makes what seals every reply.
    """

    federation: str
    spiffe_id: str
    signing_key: Ed25519PrivateKey
    silos: tuple[str, ...]
    agreed: Agreed
    store: db.Store
    blobs: Blobs
    audit: AuditLog
    ingress: Ingress
    now: Callable[[], str]
    monotonic: Callable[[], float]
    publish: Callable[[str, dict[str, Any]], None]
    finished: Callable[[Session, db.Run], None]
    payload_digest: Callable[[str, AnyPayload], dict[str, Any]]
    poll_wait_seconds_max: float = 30.0
    replies: Callable[..., Replies] = Replies


@dataclass
class MemberState:
    """What a silo was last seen doing; and how it stands since this coordinator started."""

    last_seen: str = ""
    heard_at: float = 0.0  # monotonic
    refusal: dict[str, str] | None = None  # of its last hello: {code, field, expected, got}; None where that was taken
    run: str = ""  # of its round and step
    round: int = 0
    step: int = 0
    error: str = ""
    certificate_until: str = ""  # UTC, of the certificate it last came with
    greetings: int = 0  # hellos that were taken since the silo last said anything else


@dataclass
class Taken:
    """What handling a message led to: the reply's kind and body, run and round it belongs to.

    reply: the answer, where it was sealed in the transaction that handled the message.
    """

    kind: str
    body: Any
    payload: AnyPayload | None = None
    run: str = ""
    round: int = 0
    step: int = 0
    reply: Reply | None = None


def ack() -> Taken:
    return Taken("control.ack", pb.Ack())

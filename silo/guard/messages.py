"""The states of a message on its way through the gate: offered, allowed, held or denied, sent; or let in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit.polls import PollWindow
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import OperationError, PeerError, UnreachableError, WireCode
from fedsilo.protocol.place import Place, Placed
from policies.engine import Decision, Facts


@dataclass(frozen=True)
class Inbound(Placed):
    """A message from the coordinator that was let in. `payload`: its exact bytes."""

    place: Place
    sequence: int
    body: ProtobufMessage
    payload: Buffer
    digest: str
    facts: Facts
    needs_approval: Decision | None = None


@dataclass(frozen=True)
class Reply:
    """One message from the coordinator, complete and within its declared length, not yet verified."""

    envelope: pb.Envelope
    payload: codec.Buffer


class Sink(Protocol):
    """Stores the bytes of one awaited payload as they come: `silo.guard.adapters.Arriving`."""

    digest: str

    @property
    def size_bytes(self) -> int: ...
    def write(self, chunk: codec.Buffer) -> None: ...
    def restart(self) -> None: ...
    def view(self) -> memoryview: ...


class Channel(Protocol):
    """Connection that the gate needs (`silo.guard.channel`). An experiment in one process has one without sockets."""

    def exchange(
        self,
        envelope: pb.Envelope,
        payload: codec.Buffer,
        *,
        wait_seconds: float,
        reply_bytes_max: int,
        into: Sink | None = None,
    ) -> Reply: ...

    def interrupt(self, *, for_good: bool = False) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TlsFiles:
    certificate: Path
    key: Path
    trust_root: Path


class ExchangeInterrupted(OperationError):
    """The exchange was cancelled from this side because the silo is stopping."""

    default_code = "INTERRUPTED"


class NotSent(UnreachableError):
    """There is no line, and nobody is writing a file: nothing has left, and it waits."""


class Carried(UnreachableError):
    """The message has left in a file that people carry. What became of it is known with a later import."""


class IngressDenied(PeerError):
    """The coordinator's message is genuine and was not let in. It is taken in as far as acknowledging goes."""

    def __init__(self, envelope: pb.Envelope, decision: Decision, body: ProtobufMessage) -> None:
        super().__init__(
            WireCode.INGRESS_DENIED,
            f"this site's policy does not let {envelope.kind} in: {', '.join(decision.reasons)}",
            hint=decision.explain()[:500],
        )
        self.envelope = envelope
        self.body = body


@dataclass(frozen=True)
class Original:
    """A message before the transforms, for the record.

    Attributes:
        digest: SHA-256 of its bytes; empty where the log may not hold it (T40).
    """

    payload_bytes: int
    facts: Facts
    transform: dict[str, Any]
    digest: str = ""


@dataclass(frozen=True)
class Allowed(Placed):
    """A decision to let exactly these bytes out, recorded and counted. Made by the gate alone."""

    place: Place
    payload: Buffer
    digest: str
    decision_seq: int
    sequence: int
    attempt: int = 0
    outbox_id: int | None = None
    window: PollWindow | None = None  # under whose decision it goes, with others


@dataclass(frozen=True)
class Denied:
    decision: Decision
    facts: Facts


@dataclass(frozen=True)
class Held(Placed):
    """Waits for persons. `payload`: the exact bytes that they are asked about, which are sent only after the gate has
    allowed them again."""

    place: Place
    decision: Decision
    facts: Facts
    payload: Buffer


@dataclass
class Counters:
    """Figures for the console: payload bytes that left, by kind, how the connection is, and what the coordinator claims
    of the run."""

    messages: Counter[str] = field(default_factory=Counter)
    payload_bytes: Counter[str] = field(default_factory=Counter)
    last_contact: float = 0.0
    last_fault: str = ""
    run_paused: bool = False  # its word for it: shown, and nothing follows from it

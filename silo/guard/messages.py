"""What a message becomes on its way through the gate: offered, allowed, held or denied, sent; or let in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit.polls import PollWindow
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, Buffer
from fedsilo.protocol.errors import OperationError, PeerError, UnreachableError, WireCode
from fedsilo.protocol.kinds import INBOUND_KINDS, REFT_KINDS, TENSOR_KINDS
from fedsilo.protocol.place import Place, Placed
from policies.engine import Decision, Facts
from policies.schema import LoraSchema
from silo.guard.ledger import Release


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
    """It has left in a file that people carry. What became of it is known with a later import."""


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
class Sent:
    reply: Inbound


@dataclass(frozen=True)
class Denied:
    decision: Decision
    facts: Facts


@dataclass(frozen=True)
class Held(Placed):
    """Waits for persons; `payload` are the exact bytes that will be sent."""

    place: Place
    decision: Decision
    facts: Facts
    payload: Buffer


@dataclass
class Counters:
    """For the console: payload bytes that left, by kind, how the connection is, and what the coordinator claims of the
    run."""

    messages: dict[str, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    last_contact: float = 0.0
    last_fault: str = ""
    run_paused: bool = False  # its word for it: shown, and nothing follows from it

    def count(self, sent: Allowed) -> None:
        self.messages[sent.place.kind] = self.messages.get(sent.place.kind, 0) + 1
        self.payload_bytes[sent.place.kind] = self.payload_bytes.get(sent.place.kind, 0) + len(sent.payload)


def factors_header(
    kind: str, schema: LoraSchema, header: pb.Factors, tensors: Mapping[str, Array], read_from: Buffer = b""
) -> tuple[pb.Factors, int, Mapping[str, Array]]:
    """Header rebuilt from values (B4), bytes of the whole payload, and the values; of the trainer's header only what
    the rules judge is taken over.

    Args:
        kind: of the update.
        schema: of the run's base model.
        header: the trainer's.
        tensors: float32 arrays by wire name.
        read_from: a payload that header and values are read from, in place of those two.

    Raises:
        PeerError: it is no payload.
    """
    if read_from:
        factors = decoded_factors(read_from)
        header, tensors = factors.header, factors.tensors
    if kind in REFT_KINDS:
        # No schema names these tensors: the policy does, and its rules compare rank, dtype and base.
        made = codec.factors_head(
            tensors, base_digest=header.base_digest, schema_sha256="", rank=header.rank, scale=1.0, dtype=header.dtype
        )
    else:
        made = codec.factors_head(
            tensors, base_digest=header.base_digest, schema_sha256=schema.digest, rank=schema.rank, scale=schema.scale,
            dtype=schema.dtype,
        )  # fmt: skip
    return *made, tensors


def is_rebuilt(read_from: Buffer, header: pb.Factors, payload_bytes: int, facts: Facts) -> bool:
    """Whether bytes already are what would be rebuilt from the header and the values that were read from them (B4):
    this header, then every value in its place and in canonical form (T4), and nothing besides. They may be sent then,
    and what was measured of them holds.

    Args:
        read_from: what `factors_header` read the values from.
        header: from `factors_header`.
        payload_bytes: from `factors_header`.
        facts: of these values.
    """
    start = codec.factors_start(header)
    return (
        len(read_from) == payload_bytes
        and read_from[: len(start)] == start
        and facts.get("values_not_canonical") == 0
        and facts.get("elements") == sum(math.prod(entry.shape) for entry in header.tensors)
    )


def decoded_factors(payload: Buffer) -> codec.Factors:
    """Raises PeerError: not canonical, or shapes that no array can have."""
    try:
        return codec.decode_factors(payload)
    except (OverflowError, ValueError) as error:
        raise PeerError(WireCode.MALFORMED, "a tensor has a shape that no array can have") from error


def held_plan(release: Release, payload: bytes) -> Inbound:
    """A held message that came in, as it did. Raises PeerError: as `parsed`."""
    body, _ = parsed(release.kind, payload, INBOUND_KINDS)
    return Inbound(release.place, 0, body, payload, release.digest, dict(release.facts))


def parsed(
    kind: str, payload: Buffer, kinds: Mapping[str, type[ProtobufMessage]]
) -> tuple[ProtobufMessage, Mapping[str, Array] | None]:
    """Canonical bytes as a message, and arrays for a tensor kind.

    Raises:
        PeerError: unknown kind, or not canonical.
    """
    if kind not in kinds:
        raise PeerError(WireCode.UNKNOWN_KIND, "a message of this kind does not belong here")
    if kind in TENSOR_KINDS:
        factors = decoded_factors(payload)
        return factors.header, factors.tensors
    return codec.decode(kinds[kind], payload), None

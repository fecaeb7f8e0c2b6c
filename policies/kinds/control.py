"""Control messages of both directions: what a policy names of them, and what their facts are.

Their rules are in `policies/rules`: they bind where a message stands, how often one is said, and what silos sign for
each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import WireCode
from fedsilo.protocol.isolation import ISOLATION_LEVELS
from fedsilo.protocol.kinds import KINDS as ROWS
from fedsilo.protocol.kinds import MESSAGES, OUTBOUND_KINDS
from policies import kind as k
from policies import lattice
from policies.fields import Closed
from policies.message import Context, Facts, Message

_F = k.FieldClass
_LOADS = frozenset({"fp32", "bf16", "nf4", "fp8"})
FIELDS: k.FieldTable = {
    "Hello": {
        "protocol_min": _F.NUMBER,
        "protocol_max": _F.NUMBER,
        "base_model_sha256": _F.DIGEST,
        "tokenizer_sha256": _F.DIGEST,
        "template_sha256": _F.DIGEST,
        "load": _LOADS,
        "lora_schema_sha256": _F.DIGEST,
        "public_set_sha256": _F.DIGEST,
        "held_out_sha256": _F.DIGEST,
        "code_sha256": _F.DIGEST,
        "isolation": frozenset(ISOLATION_LEVELS),
        "role": frozenset({"member", "lead"}),
        "policy_sha256": _F.DIGEST,
        "own_verifiers_sha256": _F.DIGEST,
        "min_updates": _F.NUMBER,
    },
    "Poll": {
        "wait_milliseconds": _F.NUMBER,
        "acknowledged_sequence": _F.NUMBER,
        "countersignature": _F.SIGNATURE,
    },
    "Fetch": {"digest": _F.DIGEST, "offset": _F.NUMBER},
    "Heartbeat": {},
    "Progress": {"round": _F.NUMBER, "step": _F.NUMBER},
    "Declined": {"kind": frozenset(OUTBOUND_KINDS), "round": _F.NUMBER, "step": _F.NUMBER},
    "Abstain": {"round": _F.NUMBER, "step": _F.NUMBER},
    "ErrorReport": {"code": frozenset(code.value for code in WireCode)},
    "Checkpoint": {
        "note": _F.NOTE,
        "previous_size": _F.NUMBER,
        "consistency": _F.HASH,
        "cosigned_note": _F.NOTE,
        "countersigned": _F.NOTE,
    },
    "PeerLog": {"certificate_pem": _F.CERTIFICATE},
    "LogStep": {"note": _F.NOTE, "previous_size": _F.NUMBER, "consistency": _F.HASH},
    "Ack": {
        "acknowledged_sequence": _F.NUMBER,
        "pending": _F.NUMBER,
        "checkpoints": _F.NUMBER,
        "record": _F.NUMBER,
        "paused": _F.NUMBER,
    },
    "Refusal": {
        "code": frozenset(code.value for code in WireCode),
        "field": _F.SHORT,
        "expected": _F.SHORT,
        "got": _F.SHORT,
    },
}


class OutboundControl(Closed):
    kinds: Annotated[
        tuple[
            Literal["hello", "poll", "fetch", "heartbeat", "progress", "declined", "abstain", "error", "checkpoint"],
            ...,
        ],
        lattice.INTERSECTION,
    ]


class InboundControl(Closed):
    kinds: Annotated[tuple[Literal["ack", "refusal", "checkpoint"], ...], lattice.INTERSECTION]


def measure(body: Any, message: Message, context: Context) -> Facts:
    """Return whether round and step of the envelope are free numbers: what bounds them, and whether the body repeats
    them."""
    place = (message.place.round, message.place.step)
    placed = isinstance(body, pb.Progress | pb.Declined | pb.Abstain)
    claimed = (body.round, body.step) if isinstance(body, pb.Progress | pb.Declined | pb.Abstain) else place
    content: Facts = {}
    if isinstance(body, pb.Checkpoint):
        content = {"peer_logs": len(body.peers), "countersigned": len(body.countersigned)}
    if isinstance(body, pb.Poll):
        content = {"countersignature_bytes": len(body.countersignature), "countersigns": context.countersigns}
    return content | {
        "refused_round": context.refused_round,
        "place_in_body": placed,
        "place_of_body": claimed == place,
    }


def example(at: k.Around) -> k.Example:
    """Return the plainest message: what must be said of a closed list, and the round that is open."""
    body = MESSAGES[at.kind]()
    fields = body.DESCRIPTOR.fields_by_name
    for name, value in (("round", 1), ("kind", "metrics.eval"), ("code", WireCode.INTERNAL.value)):
        if name in fields:
            setattr(body, name, value)
    return k.Example(body)


KINDS = tuple(
    k.PolicyKind(
        name,
        example,
        sent=OutboundControl if row.sent else None,
        taken=InboundControl if row.taken else None,
        measure=measure,
    )
    for name, row in ROWS.items()
    if row.is_control
)

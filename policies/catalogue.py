"""What each field of each message is: a field without a class here is denied, in both directions.

`tests/policies/test_catalogue.py` walks the protobuf descriptors and fails for a field that has no line below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from google.protobuf.message import Message

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.isolation import ISOLATION_LEVELS
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.plan import PLAN_CHARACTERS_MAX
from fedsilo.protocol.services import NOTE_SIGNATURES_MAX
from fedsilo.protocol.transcript import SIGNATURE_BYTES, transcript_from_canonical


class FieldClass(StrEnum):
    """What a field may hold; `_SHAPES` gives the test each value must pass."""

    DIGEST = "digest"  # SHA-256 as 64 hex digits, or empty
    NAME = "name"  # silo or metric name of the plan's form
    NAME_OR_NONE = "name_or_none"  # the same, or empty
    TOPIC = "topic"  # label of a public set; the metrics rule knows which
    CODE = "code"  # one of a closed list
    NUMBER = "number"
    TEXT = "text"  # free text: answers of models to public prompts, and nothing else
    TENSOR_NAME = "tensor_name"  # compared with the schema, or with the layers of the policy, by the tensor rules
    SHAPE = "shape"
    HASH = "hash"  # 32 raw bytes of a Merkle proof
    NOTE = "note"  # C2SP signed note of an audit log, or empty
    CERTIFICATE = "certificate"  # one certificate in PEM, or empty
    PLAN = "plan"  # canonical JSON of a Plan, parsed by the plan rules
    TRANSCRIPT = "transcript"  # canonical JSON of a round's Transcript: names, numbers and digests alone; or empty
    SIGNATURE = "signature"  # 64 bytes of Ed25519, or empty
    SHORT = "short"  # at most 128 printable characters, from the coordinator only


_DIGEST = re.compile(r"([0-9a-f]{64})?")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_NOTE_BODY = r"[^\n]{1,256}\n[0-9]{1,20}\n[A-Za-z0-9+/=]{44}\n([!-~][ -~]{0,255}\n){0,4}"
_NOTE_SIGNATURES = f"(\u2014 [^\\n ]{{1,256}} [A-Za-z0-9+/=]{{1,512}}\\n){{1,{NOTE_SIGNATURES_MAX}}}"
_NOTE = re.compile(rf"({_NOTE_BODY}\n{_NOTE_SIGNATURES})?")
_CERTIFICATE = re.compile(
    "(-----BEGIN CERTIFICATE-----\\n([A-Za-z0-9+/=]{1,64}\\n){1,128}-----END CERTIFICATE-----\\n)?"
)
TOPIC_CHARACTERS_MAX = 128
NAMES_MAX = 64

_LOADS = frozenset({"fp32", "bf16", "nf4", "fp8"})
_CODES: dict[str, frozenset[Any]] = {
    "Hello.load": _LOADS,
    "Hello.isolation": frozenset(ISOLATION_LEVELS),
    "Hello.role": frozenset({"member", "lead"}),
    "Declined.kind": frozenset(OUTBOUND_KINDS),
    "ErrorReport.code": frozenset(code.value for code in WireCode),
    "Refusal.code": frozenset(code.value for code in WireCode),
    "Factors.dtype": frozenset({"float32", "bfloat16"}),
    "MetricsEval.split": frozenset({"held_out"}),
    "RunEnd.outcome": frozenset({"finished", "failed", "aborted"}),
    "SiloVerdict.verdict": frozenset({"accepted", "left_out", "absent"}),
    "MatchDirective.part": frozenset({"give", "take"}),
    "Response.finish": frozenset({pb.FINISH_STOP, pb.FINISH_LENGTH}),
}

_F = FieldClass
# Message name -> field name -> class. A field that holds a message is walked into and needs no line.
CATALOGUE: dict[str, dict[str, FieldClass]] = {
    "Hello": {
        "protocol_min": _F.NUMBER,
        "protocol_max": _F.NUMBER,
        "base_model_sha256": _F.DIGEST,
        "tokenizer_sha256": _F.DIGEST,
        "template_sha256": _F.DIGEST,
        "load": _F.CODE,
        "lora_schema_sha256": _F.DIGEST,
        "public_set_sha256": _F.DIGEST,
        "held_out_sha256": _F.DIGEST,
        "code_sha256": _F.DIGEST,
        "isolation": _F.CODE,
        "role": _F.CODE,
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
    "Declined": {"kind": _F.CODE, "round": _F.NUMBER, "step": _F.NUMBER},
    "Abstain": {"round": _F.NUMBER, "step": _F.NUMBER},
    "ErrorReport": {"code": _F.CODE},
    "Checkpoint": {
        "note": _F.NOTE,
        "previous_size": _F.NUMBER,
        "consistency": _F.HASH,
        "cosigned_note": _F.NOTE,
        "countersigned": _F.NOTE,
    },
    "PeerLog": {"certificate_pem": _F.CERTIFICATE},
    "LogStep": {"note": _F.NOTE, "previous_size": _F.NUMBER, "consistency": _F.HASH},
    "Factors": {
        "base_digest": _F.DIGEST,
        "schema_sha256": _F.DIGEST,
        "rank": _F.NUMBER,
        "scale": _F.NUMBER,
        "dtype": _F.CODE,
    },
    "TensorEntry": {"name": _F.TENSOR_NAME, "shape": _F.SHAPE},
    "Response": {"text": _F.TEXT, "finish": _F.CODE},
    "PromptResponses": {"prompt_index": _F.NUMBER, "samples": _F.NUMBER},
    "PublicResponses": {"public_set_sha256": _F.DIGEST},
    "QuestionScore": {"question": _F.NUMBER, "matched": _F.NUMBER},
    "CompetenceScore": {"exemplar_set_sha256": _F.DIGEST},
    "ExemplarAnswer": {"exemplar": _F.NUMBER},
    "CompetenceAnswers": {"exemplar_set_sha256": _F.DIGEST},
    "QuestionRewards": {"question": _F.NUMBER, "rewards": _F.NUMBER, "abstained": _F.NUMBER},
    "RewardScalar": {},
    "ProfileVector": {"family": _F.NUMBER, "dynamic": _F.NUMBER, "histogram": _F.NUMBER},
    "BanditReward": {"match": _F.NUMBER, "value": _F.NUMBER},
    "PackageEntry": {"prompt_index": _F.NUMBER, "confidence": _F.NUMBER},
    "KnowledgePackage": {"transfer_set_sha256": _F.DIGEST, "match": _F.NUMBER, "peer": _F.NAME_OR_NONE},
    "Metric": {"name": _F.NAME, "topic": _F.TOPIC, "value": _F.NUMBER},
    "MetricsEval": {"split": _F.CODE, "adapter_digest": _F.DIGEST},
    "Ack": {
        "acknowledged_sequence": _F.NUMBER,
        "pending": _F.NUMBER,
        "checkpoints": _F.NUMBER,
        "record": _F.NUMBER,
        "paused": _F.NUMBER,
    },
    "Refusal": {"code": _F.CODE, "field": _F.SHORT, "expected": _F.SHORT, "got": _F.SHORT},
    "RunPlan": {"canonical_json": _F.PLAN},
    "PublicStep": {"step": _F.NUMBER, "prompt_indices": _F.NUMBER},
    "RoundOpen": {"base_digest": _F.DIGEST, "transcript": _F.TRANSCRIPT, "transcript_signature": _F.SIGNATURE},
    "Countersignature": {
        "silo": _F.NAME,
        "transcript_sha256": _F.DIGEST,
        "signature": _F.SIGNATURE,
        "certificate_pem": _F.CERTIFICATE,
    },
    "RoundAgreed": {"transcript_sha256": _F.DIGEST},
    "Donor": {"origin": _F.NAME, "position": _F.NUMBER},
    "PromptDonors": {"prompt_index": _F.NUMBER},
    "PublicDonors": {},
    "QuestionExemplars": {"question": _F.NUMBER, "exemplars": _F.NUMBER},
    "CompetenceAsk": {"exemplar_set_sha256": _F.DIGEST},
    "QuestionCandidates": {"question": _F.NUMBER},
    "RewardAsk": {"question_set_sha256": _F.DIGEST},
    "MatchDirective": {"match": _F.NUMBER, "peer": _F.NAME, "part": _F.CODE},
    "RoundResult": {
        "committed": _F.NUMBER,
        "adapter_digest": _F.DIGEST,
        "participants": _F.NAME,
        "transcript_sha256": _F.DIGEST,
        "result_signature": _F.SIGNATURE,
    },
    "SiloVerdict": {"silo": _F.NAME, "verdict": _F.CODE},
    "RunEnd": {"outcome": _F.CODE, "adapter_digest": _F.DIGEST},
}

_SHAPES: dict[FieldClass, Callable[[str, Any], bool]] = {
    _F.DIGEST: lambda _place, value: bool(_DIGEST.fullmatch(value)),
    _F.NAME: lambda _place, value: is_name(value),
    _F.NAME_OR_NONE: lambda _place, value: value == "" or is_name(value),
    _F.TOPIC: lambda _place, value: len(value) <= TOPIC_CHARACTERS_MAX and value.isprintable(),
    _F.CODE: lambda place, value: value in _CODES[place],
    _F.NUMBER: lambda _place, value: math.isfinite(value),
    _F.TEXT: lambda _place, _value: True,
    _F.TENSOR_NAME: lambda _place, _value: True,
    _F.SHAPE: lambda _place, _value: True,
    _F.HASH: lambda _place, value: len(value) == 32,
    _F.NOTE: lambda _place, value: bool(_NOTE.fullmatch(value)),
    _F.CERTIFICATE: lambda _place, value: bool(_CERTIFICATE.fullmatch(value)),
    _F.PLAN: lambda _place, value: len(value) <= PLAN_CHARACTERS_MAX,
    _F.TRANSCRIPT: lambda _place, value: value == "" or is_transcript(value),
    _F.SIGNATURE: lambda _place, value: len(value) in (0, SIGNATURE_BYTES),
    _F.SHORT: lambda _place, value: len(value) <= 128 and value.isprintable(),
}


def is_name(value: str) -> bool:
    return bool(_NAME.fullmatch(value))


def is_transcript(value: str) -> bool:
    try:
        transcript_from_canonical(value)
    except PeerError:
        return False
    return True


def digest_of(value: str) -> str:
    """The value where it is a digest, else empty: what is none may be any text, and facts hold none."""
    return value if _DIGEST.fullmatch(value) else ""


def names_of(values: Iterable[str]) -> tuple[list[str], int]:
    """The distinct values that are names, sorted, and how many others there were."""
    distinct = sorted(set(values))
    good = [value for value in distinct if is_name(value)][:NAMES_MAX]
    return good, len(distinct) - len(good)


def field_class(message_name: str, field_name: str) -> FieldClass | None:
    return CATALOGUE.get(message_name, {}).get(field_name)


def fields_at_fault(message: Message) -> dict[str, int]:
    """Fields of a message (and the messages in it) that have no class or hold what their class forbids.

    Returns:
        count by place, such as {"Hello.role": 1}. Places come from our own descriptors, so they carry no text.
    """
    faults: dict[str, int] = {}
    _walk(message, faults)
    return faults


def _walk(message: Message, faults: dict[str, int]) -> None:
    name = message.DESCRIPTOR.name
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.message_type is not None:
            for child in values:
                _walk(child, faults)
            continue
        place = f"{name}.{field.name}"
        kind = field_class(name, field.name)
        bad = len(values) if kind is None else sum(not _SHAPES[kind](place, item) for item in values)
        if bad:
            faults[place] = faults.get(place, 0) + bad

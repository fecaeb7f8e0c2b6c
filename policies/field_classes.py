"""What a field of a message may hold: a field without a class is denied, in both directions.

Each file in `policies/kinds` gives the classes of its messages' fields; `policies.kinds.CATALOGUE` has them all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from google.protobuf.message import Message

from fedsilo.protocol.errors import PeerError
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


# A field's class, or for a code the closed list it is from. By message, then by field; a field that holds a message is
# walked into and needs no line.
FieldTable = dict[str, dict[str, FieldClass | frozenset[Any]]]

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
_F = FieldClass


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


_SHAPES: dict[FieldClass, Callable[[Any], bool]] = {
    _F.DIGEST: lambda value: bool(_DIGEST.fullmatch(value)),
    _F.NAME: is_name,
    _F.NAME_OR_NONE: lambda value: value == "" or is_name(value),
    _F.TOPIC: lambda value: len(value) <= TOPIC_CHARACTERS_MAX and value.isprintable(),
    _F.NUMBER: math.isfinite,
    _F.TEXT: lambda _value: True,
    _F.TENSOR_NAME: lambda _value: True,
    _F.SHAPE: lambda _value: True,
    _F.HASH: lambda value: len(value) == 32,
    _F.NOTE: lambda value: bool(_NOTE.fullmatch(value)),
    _F.CERTIFICATE: lambda value: bool(_CERTIFICATE.fullmatch(value)),
    _F.PLAN: lambda value: len(value) <= PLAN_CHARACTERS_MAX,
    _F.TRANSCRIPT: lambda value: value == "" or is_transcript(value),
    _F.SIGNATURE: lambda value: len(value) in (0, SIGNATURE_BYTES),
    _F.SHORT: lambda value: len(value) <= 128 and value.isprintable(),
}


def fits(kind: FieldClass | frozenset[Any], value: Any) -> bool:
    """Return True if a value is what its field's class allows."""
    return value in kind if isinstance(kind, frozenset) else _SHAPES[kind](value)


def faults(message: Message, classes: FieldTable) -> dict[str, int]:
    """Fields of a message (and the messages in it) that have no class or hold what their class forbids.

    Returns:
        count by place, such as {"Hello.role": 1}. Places come from our own descriptors, so they carry no text.
    """
    found: dict[str, int] = {}
    _walk(message, classes, found)
    return found


def _walk(message: Message, classes: FieldTable, found: dict[str, int]) -> None:
    name = message.DESCRIPTOR.name
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.message_type is not None:
            for child in values:
                _walk(child, classes, found)
            continue
        place = f"{name}.{field.name}"
        kind = classes.get(name, {}).get(field.name)
        bad = len(values) if kind is None else sum(not fits(kind, item) for item in values)
        if bad:
            found[place] = found.get(place, 0) + bad

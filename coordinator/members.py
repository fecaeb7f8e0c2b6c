"""Who is in the federation, and whether what a silo has is what the federation agreed on (design 4, `hello`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fedsilo.treaty.errors import PeerError, WireCode
from fedsilo.treaty.isolation import RUNGS
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.services import PROTOCOL_VERSION

ROLES = frozenset({"member", "lead"})
TEXT_CHARACTERS_MAX = 64  # a hash in hex; nothing in hello is longer


@dataclass(frozen=True)
class Agreed:
    """What every silo must share; hashes are lower-case hex SHA-256."""

    base_model_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    load: str
    mixed_base: str
    lora_schema_sha256: str
    public_set_sha256: str
    held_out_sha256: str
    own_verifiers_sha256: str = ""  # empty: no site brings a verifier of its own
    mixed_verifiers: str = "refuse"


@dataclass(frozen=True)
class HelloFacts:
    """A hello that passed; what the run record states about a silo's software."""

    base_model_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    load: str
    lora_schema_sha256: str
    public_set_sha256: str
    held_out_sha256: str
    code_sha256: str
    isolation: str
    role: str
    policy_sha256: str
    own_verifiers_sha256: str


_CHECKS = (
    ("base_model_sha256", WireCode.BASE_MODEL_MISMATCH),
    ("tokenizer_sha256", WireCode.TOKENIZER_MISMATCH),
    ("template_sha256", WireCode.TEMPLATE_MISMATCH),
    ("load", WireCode.LOAD_MISMATCH),
    ("lora_schema_sha256", WireCode.SCHEMA_MISMATCH),
    ("public_set_sha256", WireCode.PUBLIC_SET_MISMATCH),
    ("held_out_sha256", WireCode.HELD_OUT_MISMATCH),
    ("own_verifiers_sha256", WireCode.VERIFIER_MISMATCH),
)
# Fields that may differ where the agreement allows a mixture, and where it says so.
_MAY_BE_MIXED = {"load": "mixed_base", "own_verifiers_sha256": "mixed_verifiers"}


def silo_of(spiffe_id: str, federation: str, silos: tuple[str, ...]) -> str:
    """The listed silo that an id names; exact match, no prefixes (T28).

    Raises:
        PeerError: another federation, another role, or not on the list.
    """
    for silo in silos:
        if spiffe_id == f"spiffe://{federation}/silo/{silo}":
            return silo
    raise PeerError(
        WireCode.NOT_A_MEMBER,
        f"{spiffe_id} is not on the coordinator's list of silos",
        hint="if it belongs here, list it under `silos:` in coordinator.yaml",
    )


def check_hello(hello: pb.Hello, agreed: Agreed) -> HelloFacts:
    """Compare a silo's hello with the federation's agreement.

    Raises:
        PeerError: the first difference, with the field's name and both values.
    """
    if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
        raise PeerError(
            WireCode.PROTOCOL_RANGE,
            f"no common protocol version: expected {PROTOCOL_VERSION}, got {hello.protocol_min}-{hello.protocol_max}",
            field="protocol",
            expected=str(PROTOCOL_VERSION),
            got=f"{hello.protocol_min}-{hello.protocol_max}",
        )
    for field, code in _CHECKS:
        expected, got = str(getattr(agreed, field)), _printable(getattr(hello, field))
        mixed = field in _MAY_BE_MIXED and getattr(agreed, _MAY_BE_MIXED[field]) == "allow"
        if expected != got and not mixed:
            differ = f"{field} differs: expected {expected or 'none'}, got {got or 'none'}"
            raise PeerError(code, differ, field=field, expected=expected, got=got)
    for field, allowed in (("role", ROLES), ("isolation", RUNGS)):
        got = _printable(getattr(hello, field))
        if got not in allowed:
            raise PeerError(
                WireCode.MALFORMED, f"{field} is {got!r}", field=field, expected="|".join(sorted(allowed)), got=got
            )
    return HelloFacts(**hello_as_fields(hello))


def hello_as_fields(hello: pb.Hello) -> dict[str, str]:
    """What a silo says of itself, safe to show, whether or not it is right."""
    return {name: _printable(getattr(hello, name)) for name in HelloFacts.__dataclass_fields__}


def facts_as_fields(facts: HelloFacts) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(facts).items()}


def _printable(text: str) -> str:
    """A peer's word, short and free of control characters, so that it can be logged and sent back (T37)."""
    return "".join(character if character.isprintable() else "?" for character in text[:TEXT_CHARACTERS_MAX])

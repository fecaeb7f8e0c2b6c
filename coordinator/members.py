"""Who is in the federation, and whether what a silo has is what the federation agreed on (design 4, `hello`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.isolation import ISOLATION_LEVELS
from fedsilo.protocol.services import PROTOCOL_VERSION
from fedsilo.protocol.text import harmless
from policies.model import MIN_UPDATES

ROLES = frozenset({"member", "lead"})
SILENT_SECONDS = 120.0  # a silo that is up sends a poll or a heartbeat at least every half minute
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
    min_updates: str
    protocol_min: str
    protocol_max: str


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


def standing(
    kept: str, *, by_files: bool, refused: bool, silent_seconds: float | None, up_seconds: float, greetings: int
) -> str:
    """How a silo stands with this coordinator: the one word for it on every screen and in every command.

    Does not stop: a silo whose guard polls while its trainer is dead. It is heard, so it has joined.

    Args:
        kept: `joined` or `refused`, as its last hello was answered; empty before the first one.
        by_files: its messages come in files, so nobody expects to hear it.
        refused: a hello was refused since this coordinator started, and none was taken after that.
        silent_seconds: since its last message; None where none came since this coordinator started.
        up_seconds: since this coordinator started.
        greetings: hellos taken since it last said anything else.

    Returns:
        absent: it never said hello. refused: at hello. by_files. not_heard_yet: this coordinator has only just started.
        silent: up or not, nothing has come from it for `SILENT_SECONDS`. only_greets: it was cut off after its hello,
        or does not believe the answer. joined: none of that.
    """
    if refused or kept == "refused":
        return "refused"
    if not kept:
        return "absent"
    if by_files:
        return "by_files"
    if (up_seconds if silent_seconds is None else silent_seconds) >= SILENT_SECONDS:
        return "silent"
    if silent_seconds is None:
        return "not_heard_yet"
    return "only_greets" if greetings > 1 else "joined"


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


def check_hello(hello: pb.Hello, agreed: Agreed, *, silos: int = 1) -> HelloFacts:
    """Compare a silo's hello with the federation's agreement.

    Args:
        hello: as it came.
        agreed: what every silo must share.
        silos: how many are listed here.

    Raises:
        PeerError: the first difference, with the field's name and both values.
    """
    _check_protocol(hello.protocol_min, hello.protocol_max)
    for field, code in _CHECKS:
        expected, told = str(getattr(agreed, field)), str(getattr(hello, field))
        mixed = field in _MAY_BE_MIXED and getattr(agreed, _MAY_BE_MIXED[field]) == "allow"
        if expected != told and not mixed:
            got = harmless(told, TEXT_CHARACTERS_MAX)
            differ = f"{field} differs: expected {expected or 'none'}, got {got or 'none'}"
            raise PeerError(code, differ, field=field, expected=expected, got=got)
    for field, allowed in (("role", ROLES), ("isolation", ISOLATION_LEVELS)):
        got = harmless(getattr(hello, field), TEXT_CHARACTERS_MAX)
        if got not in allowed:
            raise PeerError(
                WireCode.MALFORMED, f"{field} is '{got}'", field=field, expected="|".join(sorted(allowed)), got=got
            )
    # A larger number would fit into no transcript, or into none of this federation's rounds (T24).
    least, most = min(MIN_UPDATES, silos), max(MIN_UPDATES, silos)
    if not least <= hello.min_updates <= most:
        got, expected = str(hello.min_updates), f"{least}-{most}"
        differ = f"min_updates: expected {expected} among {silos} silo{'s' * (silos > 1)}, got {got}"
        raise PeerError(WireCode.MALFORMED, differ, field="min_updates", expected=expected, got=got)
    return HelloFacts(**hello_as_fields(hello))


def check_kept(fields: Mapping[str, str]) -> None:
    """Check that a hello that was accepted before this start, maybe by an earlier version, is of this protocol.

    Raises:
        PeerError: it is of another one. A hello that names none is from when there was version 1 only.
    """
    _check_protocol(int(fields.get("protocol_min", "1")), int(fields.get("protocol_max", "1")))


def _check_protocol(low: int, high: int) -> None:
    if not low <= PROTOCOL_VERSION <= high:
        got = f"{low}-{high}" if low != high else str(low)
        raise PeerError(
            WireCode.PROTOCOL_RANGE, f"no common protocol version: expected {PROTOCOL_VERSION}, got {got}",
            hint="use one version of FedSilo on both sides: update the older one",
            field="protocol", expected=str(PROTOCOL_VERSION), got=got,
        )  # fmt: skip


def hello_as_fields(hello: pb.Hello) -> dict[str, str]:
    """What a silo says of itself, safe to show, whether or not it is right."""
    return {name: harmless(str(getattr(hello, name)), TEXT_CHARACTERS_MAX) for name in HelloFacts.__dataclass_fields__}


def facts_as_fields(facts: HelloFacts) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(facts).items()}

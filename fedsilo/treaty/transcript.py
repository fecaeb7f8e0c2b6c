"""The transcript of a round: what the coordinator and every silo sign before anybody trains (threat model 7, T20).

    Transcript  <->  canonical JSON (RFC 8785)  ->  SHA-256  ->  one signed statement by each party

A statement names run, round and digest, so one signature is evidence by itself: two valid statements of one party, or
of the coordinator and a silo, about one round with different digests show that somebody was told something else than
the others. Pure: no clock, no file, no network.

What it does not stop: a coordinator that tells everybody the same lie, and a federation in which fewer silos than
`min_peers` are honest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from json import JSONDecodeError, loads
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsilo.treaty.errors import PeerError, VerificationError, WireCode
from fedsilo.treaty.wire.codec import canonical_json, sha256_hex

TRANSCRIPT_VERSION = 1
TRANSCRIPT_CHARACTERS_MAX = 16_384
SIGNATURE_BYTES = 64
_PREFIX = b"fedsilo-round-transcript-v1\n"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_SILOS_MAX = 64
_ROUND_MAX = 2**32


class Equivocation(VerificationError):
    """One round, two transcripts, both signed. Nothing may go on before people have looked.

    Attributes:
        evidence: both pieces, as JSON: {known, shown}, each {transcript or sha256, party, signature}.
    """

    default_code = "EQUIVOCATION"

    def __init__(self, message: str, *, hint: str = "", evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.evidence = dict(evidence or {})


@dataclass(frozen=True)
class Transcript:
    """What all parties of a round must have before them alike.

    Attributes:
        federation, run, round: which round of what.
        silos: the roster: who is asked to train, in the plan's order.
        plan_sha256: digest of the run's plan.
        policies: by silo, the digest of the effective policy that it said it is under; empty where it said none.
        base_digest: of the adapter that the round starts from; empty for a method without one.
        schema_sha256: of the LoRA schema.
        public_set_sha256: of the public set.
    """

    federation: str
    run: str
    round: int
    silos: tuple[str, ...]
    plan_sha256: str
    policies: Mapping[str, str]
    base_digest: str
    schema_sha256: str
    public_set_sha256: str

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"silos": list(self.silos), "policies": dict(self.policies)}
        return {"transcript_version": TRANSCRIPT_VERSION, **fields}

    def canonical(self) -> str:
        return canonical_json(self.to_json()).decode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: what is signed."""
        return sha256_hex(self.canonical().encode())

    def coordinates(self) -> tuple[str, str, int]:
        return self.federation, self.run, self.round

    def differences(self, other: Transcript) -> tuple[str, ...]:
        """Names of the fields in which two transcripts differ."""
        ours, theirs = self.to_json(), other.to_json()
        return tuple(name for name in ours if ours[name] != theirs[name])


def transcript_from_canonical(text: str) -> Transcript:
    """Read a transcript that came over the wire or stands in a log.

    Raises:
        PeerError: too long, another shape, a value that is no name, number or digest, or not in canonical form.
    """
    if len(text) > TRANSCRIPT_CHARACTERS_MAX:
        raise PeerError(WireCode.TOO_LARGE, f"a transcript has at most {TRANSCRIPT_CHARACTERS_MAX} characters")
    try:
        transcript = _from_json(loads(text))
        canonical = transcript.canonical()
    except (JSONDecodeError, RecursionError, ValueError, TypeError, KeyError) as error:
        raise PeerError(WireCode.MALFORMED, "the transcript of the round is malformed") from error
    if canonical != text:
        raise PeerError(WireCode.MALFORMED, "the transcript of the round is not in canonical form")
    return transcript


def _from_json(value: Any) -> Transcript:
    fields = dict(value)
    if type(fields["transcript_version"]) is not int or fields.pop("transcript_version") != TRANSCRIPT_VERSION:
        raise ValueError("another version")
    silos, policies = tuple(fields["silos"]), dict(fields["policies"])
    transcript = Transcript(**{**fields, "silos": silos, "policies": policies})
    digests = (transcript.plan_sha256, transcript.schema_sha256, transcript.public_set_sha256)
    optional = (transcript.base_digest, *policies.values())
    good = (
        all(_NAME.fullmatch(name) for name in (transcript.federation, transcript.run, *silos))
        and all(_DIGEST.fullmatch(digest) for digest in digests)
        and all(digest == "" or _DIGEST.fullmatch(digest) for digest in optional)
        and type(transcript.round) is int
        and 1 <= transcript.round < _ROUND_MAX
        and 1 <= len(silos) <= _SILOS_MAX
        and len(set(silos)) == len(silos)
        and set(policies) == set(silos)
    )
    if not good:
        raise ValueError("a value that belongs in no transcript")
    return transcript


# ---- statements --------------------------------------------------------------------------------------


def statement(*, federation: str, run: str, round_number: int, digest: str, party: str) -> bytes:
    """What a party signs: that this digest is the transcript it has of this round.

    Args:
        federation: its id.
        run: its name.
        round_number: from 1.
        digest: of the transcript.
        party: the signer's SPIFFE id, so that no signature passes for another's.
    """
    return _PREFIX + canonical_json(
        {"federation": federation, "run": run, "round": round_number, "transcript": digest, "party": party}
    )


def sign_transcript(transcript: Transcript, party: str, key: Ed25519PrivateKey) -> bytes:
    """A party's signature under the transcript as it has it."""
    return key.sign(_statement_of(transcript, transcript.digest, party))


def is_signed(
    transcript: Transcript, party: str, key: Ed25519PublicKey, signature: bytes, *, digest: str | None = None
) -> bool:
    """Whether a party signed this transcript, or another one with `digest` of the same round."""
    message = _statement_of(transcript, transcript.digest if digest is None else digest, party)
    try:
        key.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement_of(transcript: Transcript, digest: str, party: str) -> bytes:
    federation, run, number = transcript.coordinates()
    return statement(federation=federation, run=run, round_number=number, digest=digest, party=party)


def silo_id(federation: str, name: str) -> str:
    return f"spiffe://{federation}/silo/{name}"


# ---- agreement ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Countersignature:
    """A silo's signature, and the digest that it is said to be over."""

    silo: str
    digest: str
    signature: bytes


@dataclass(frozen=True)
class Counted:
    """Who signed what.

    Attributes:
        agreed: silos of the roster whose signature under this very transcript verifies.
        others: signatures that verify under another digest of the same round: evidence of equivocation.
    """

    agreed: frozenset[str]
    others: tuple[Countersignature, ...]


def count(
    transcript: Transcript, countersignatures: Iterable[Countersignature], keys: Mapping[str, Ed25519PublicKey]
) -> Counted:
    """Verify each countersignature; what does not verify, or is of nobody whose key is known, counts as nothing.

    Args:
        transcript: the one that the counting party has.
        countersignatures: as they were brought, in any order.
        keys: message-signing keys by silo, of those that count.
    """
    agreed: set[str] = set()
    others: list[Countersignature] = []
    for each in countersignatures:
        key = keys.get(each.silo)
        if key is None or each.silo not in transcript.silos:
            continue
        party = silo_id(transcript.federation, each.silo)
        if not is_signed(transcript, party, key, each.signature, digest=each.digest):
            continue
        if each.digest == transcript.digest:
            agreed.add(each.silo)
        else:
            others.append(each)
    return Counted(frozenset(agreed), tuple(others))


def needed(transcript: Transcript, *, min_peers: int, quorum: int) -> int:
    """How many silos of the roster, the counting one included, must have signed the same transcript.

    Where there are others, one's own signature alone is no agreement, whatever policy and plan are content with.

    Args:
        transcript: whose roster it is.
        min_peers: of the counting party's policy.
        quorum: of the plan.
    """
    return max(min_peers, quorum, min(2, len(transcript.silos)))


def conflict(known: Transcript, shown: Transcript) -> tuple[str, ...]:
    """The fields in which two transcripts of one round differ; none where they are the same, or of two rounds."""
    return known.differences(shown) if known.coordinates() == shown.coordinates() else ()

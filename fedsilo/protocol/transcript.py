"""The transcript of a round: what the coordinator and every silo sign before anybody trains (threat model 7, T20).

    Transcript  <->  canonical JSON (RFC 8785)  ->  SHA-256  ->  one signed statement by each party

A statement names run, round and digest, so one signature is evidence by itself: two valid statements of one party, or
of the coordinator and a silo, about one round with different digests show that somebody was told something else than
the others. Pure: no clock, no file, no network.

What it does not stop: a coordinator that tells everybody the same lie; silos that sign what they did not check; and a
coordinator that splits the federation: two groups of at least `needed` silos each can be shown two transcripts, and
each group agrees on its own and trains. No two such groups fit into a plan where `min_peers`, or the plan's quorum, is
above half of its silos.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from json import JSONDecodeError, loads
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import PeerError, VerificationError, WireCode

TRANSCRIPT_VERSION = 1
TRANSCRIPT_CHARACTERS_MAX = 32_768
SIGNATURE_BYTES = 64
_PREFIX = b"fedsilo-round-transcript-v1\n"
_RESULT_PREFIX = b"fedsilo-round-result-v1\n"
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
        pool: by silo, one digest of the answers that it gave for this round (`donor_pool.answers_digest`), of those
            whose answers are its donors; empty, and then not part of what is signed, where there are none.
        min_updates: with fewer the round is not committed: the largest of the plan's quorum and the silos' policies'
            `min_updates` (T58); 0, and then not part of what is signed, in transcripts of protocol 1 only.
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
    pool: Mapping[str, str] = field(default_factory=dict)
    min_updates: int = 0

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"silos": list(self.silos), "policies": dict(self.policies)}
        if pool := dict(fields.pop("pool")):
            fields["pool"] = pool
        if not self.min_updates:
            del fields["min_updates"]
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
        return tuple(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))


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
    silos, policies, pool = tuple(fields["silos"]), dict(fields["policies"]), dict(fields.get("pool", {}))
    transcript = Transcript(**{**fields, "silos": silos, "policies": policies, "pool": pool})
    digests = (transcript.plan_sha256, transcript.schema_sha256, transcript.public_set_sha256, *pool.values())
    optional = (transcript.base_digest, *policies.values())
    good = (
        all(_NAME.fullmatch(name) for name in (transcript.federation, transcript.run, *silos, *pool))
        and all(_DIGEST.fullmatch(digest) for digest in digests)
        and all(digest == "" or _DIGEST.fullmatch(digest) for digest in optional)
        and type(transcript.round) is int
        and 1 <= transcript.round < _ROUND_MAX
        and 1 <= len(silos) <= _SILOS_MAX
        and len(set(silos)) == len(silos)
        and set(policies) == set(silos)
        and len(pool) <= _SILOS_MAX
        and type(transcript.min_updates) is int
        and 0 <= transcript.min_updates <= _SILOS_MAX
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


def needed(planned: int, *, min_peers: int, quorum: int) -> int:
    """How many silos of the roster, the counting one included, must have signed the same transcript.

    Where there are others, one's own signature alone is no agreement, whatever policy and plan are content with. The
    plan says whether there are others: the roster is the coordinator's word, and may name one silo alone.

    Args:
        planned: how many silos the plan names.
        min_peers: of the counting party's policy.
        quorum: of the plan.
    """
    return max(min_peers, quorum, min(2, planned))


def conflict(known: Transcript, shown: Transcript) -> tuple[str, ...]:
    """The fields in which two transcripts of one round differ; none where they are the same, or of two rounds."""
    return known.differences(shown) if known.coordinates() == shown.coordinates() else ()


# ---- how a round ended -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundEnd:
    """What the coordinator says of a round's end, to every silo of its roster alike.

    Attributes:
        federation, run, round: which round of what.
        transcript_sha256: of the round.
        committed: whether there is another adapter than before.
        aggregate: digest of the adapter that the round came to.
        survivors: silos whose updates are in it, in the roster's order.
        verdicts: by silo of the roster: accepted | left_out | absent.
    """

    federation: str
    run: str
    round: int
    transcript_sha256: str
    committed: bool
    aggregate: str
    survivors: tuple[str, ...]
    verdicts: Mapping[str, str]

    @staticmethod
    def of(transcript: Transcript, body: pb.RoundResult) -> RoundEnd:
        """What a message says of the end of this transcript's round."""
        verdicts = {row.silo: row.verdict for row in body.verdicts}
        return RoundEnd(
            *transcript.coordinates(), body.transcript_sha256, body.committed, body.adapter_digest,
            tuple(body.participants), verdicts,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"survivors": list(self.survivors), "verdicts": dict(self.verdicts)}

    def coordinates(self) -> tuple[str, str, int]:
        return self.federation, self.run, self.round

    def statement(self, party: str) -> bytes:
        """What a party signs: that the round ended like this.

        Args:
            party: the signer's SPIFFE id.
        """
        return _RESULT_PREFIX + canonical_json(self.to_json() | {"party": party})


@dataclass(frozen=True)
class SignedEnd:
    """The end of a round with somebody's signature: evidence by itself, offline, with nothing but a public key."""

    end: RoundEnd
    party: str
    signature: bytes

    def verifies(self, key: Ed25519PublicKey) -> bool:
        """Whether the holder of this key said so."""
        try:
            key.verify(self.signature, self.end.statement(self.party))
        except (InvalidSignature, ValueError):
            return False
        return True

    def to_detail(self) -> dict[str, Any]:
        """As it stands in a `round.result` record, whose own fields name run and round."""
        return {
            "sha256": self.end.transcript_sha256,
            "committed": self.end.committed,
            "aggregate": self.end.aggregate,
            "survivors": list(self.end.survivors),
            "verdicts": dict(self.end.verdicts),
            "party": self.party,
            "signature": self.signature.hex(),
        }


def sign_end(end: RoundEnd, party: str, key: Ed25519PrivateKey) -> SignedEnd:
    return SignedEnd(end, party, key.sign(end.statement(party)))


def end_of_record(federation: str, run: str, round_number: int, detail: Mapping[str, Any]) -> SignedEnd:
    """Read what a `round.result` record says, as `SignedEnd.to_detail` wrote it.

    Args:
        federation: of the transcript that the record belongs to.
        run: as the record names it.
        round_number: as the record names it.
        detail: of the record.

    Raises:
        VerificationError: another shape, or without a signature.
    """
    try:
        committed, survivors, verdicts = detail["committed"], list(detail["survivors"]), dict(detail["verdicts"])
        texts = (detail["sha256"], detail["aggregate"], detail["party"], *survivors, *verdicts, *verdicts.values())
        if type(committed) is not bool or not all(isinstance(text, str) for text in texts):
            raise TypeError("a value of another type")
        end = RoundEnd(
            federation, run, round_number, detail["sha256"], committed, detail["aggregate"], tuple(survivors), verdicts
        )
        return SignedEnd(end, detail["party"], bytes.fromhex(detail["signature"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VerificationError(f"the result of round {round_number} of run {run} is malformed") from error


def two_ends(one: SignedEnd, other: SignedEnd, keys: Iterable[Ed25519PublicKey]) -> tuple[str, ...]:
    """The fields in which two results of one round differ that one party signed: it told two stories, provably.

    None where they say the same, are of two rounds or two parties, or where a signature does not verify: then it is
    not the signer who lied.

    Args:
        one: of one log.
        other: of another.
        keys: message-signing keys of the signer that are vouched for; each signature may be by any of them.
    """
    if one.party != other.party or one.end.coordinates() != other.end.coordinates():
        return ()
    known = tuple(keys)
    if not all(any(each.verifies(key) for key in known) for each in (one, other)):
        return ()
    ours, theirs = one.end.to_json(), other.end.to_json()
    return tuple(name for name in ours if ours[name] != theirs[name])

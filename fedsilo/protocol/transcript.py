"""The transcript of a round: what the coordinator and every silo sign before anybody trains (T20, decision 11).

    Transcript  <->  canonical JSON (RFC 8785)  ->  SHA-256  ->  one signed statement by each party

A statement names run, round and digest, so one signature is evidence by itself: two valid statements of one party, or
of the coordinator and a silo, about one round with different digests show that somebody was told something else than
the others. Pure: no clock, no file, no network.

What it does not stop: a coordinator that tells everybody the same lie; silos that sign what they did not check; and a
coordinator that splits the federation: two groups of at least `needed` silos each can be shown two transcripts, and
each group agrees on its own and trains. No two such groups fit into a plan where `min_peers`, or the plan's quorum, is
above half of its silos.

Afterwards a log or a run record is checked from plain JSON values alone (`RoundCheck`, `RecordCheck`):

    round.transcript, round.agreed, round.result of one round, as a log or a run record has them  ->  problems

Whoever wrote a record may have written anything, so every value is looked at before it is used, and a signature counts
for as much as its key: a key that the record itself names, or that only its own writer vouches for, is reported as
such. `fedsilo.audit.transcripts` reads logs, `fedsilo run verify` reads a run record. This does not stop parties that
invent a record together, with keys that nobody else knows; and `min_peers` of a silo's policy is not in a record, so
only what the record itself proves necessary is demanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from json import JSONDecodeError
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
    """Two transcripts of one round, both signed. Nothing may go on before people have looked.

    Attributes:
        evidence: both pieces, as JSON: {known, shown}, each {transcript or sha256, party, signature}.
    """

    default_code = "EQUIVOCATION"

    def __init__(self, message: str, *, hint: str = "", evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.evidence = dict(evidence or {})


@dataclass(frozen=True)
class Transcript:
    """The statement of a round that all its parties must hold alike.

    Attributes:
        federation, run, round: which round of what.
        silos: the roster: who is asked to train, in the plan's order.
        plan_sha256: digest of the run's plan.
        policies: by silo, the digest of the effective policy that it said it is under; empty where it said none.
        base_digest: of the adapter that the round starts from; empty for a method without one.
        schema_sha256: of the LoRA schema.
        public_set_sha256: of the public set.
        pool: by silo, one digest of the answers that it gave for this round (`fedsilo.protocol.swap.answers_digest`),
            of those whose answers are its donors; empty, and then not part of what is signed, where there are none.
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

    def statement(self, party: str, digest: str | None = None) -> bytes:
        """Return the bytes that a party signs: that this transcript, or another one with `digest`, is the one it has of
        this round. party: the signer's SPIFFE id, so that no signature passes for another's."""
        federation, run, number = self.coordinates()
        said = self.digest if digest is None else digest
        return _PREFIX + canonical_json(
            {"federation": federation, "run": run, "round": number, "transcript": said, "party": party}
        )

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
        transcript = _from_json(json.loads(text))
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


def sign_transcript(transcript: Transcript, party: str, key: Ed25519PrivateKey) -> bytes:
    """A party's signature under the transcript as it has it."""
    return key.sign(transcript.statement(party))


def is_signed(
    transcript: Transcript, party: str, key: Ed25519PublicKey, signature: bytes, *, digest: str | None = None
) -> bool:
    """Return whether a party signed this transcript, or another one with `digest` of the same round."""
    return _verifies(key, signature, transcript.statement(party, digest))


def _verifies(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


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
    """Count of signatures on a transcript.

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
    """Return how many silos of the roster, the counting one included, must have signed the same transcript.

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
    """The end of a round as the coordinator states it, to every silo of its roster alike.

    Attributes:
        federation, run, round: which round of what.
        transcript_sha256: of the round.
        committed: whether there is another adapter than before.
        aggregate: digest of the adapter that the round came to; where each silo has a result of its own, of the table
            of all of them (`results_digest`).
        survivors: silos that took part to the end, in the roster's order: those whose updates are in a committed
            round's adapter, or whose part of a closed round has ended.
        verdicts: by silo of the roster: accepted | left_out | absent.
        closed: whether it ended without an adapter as its method means it to, and then it is not committed; False is
            not part of what is signed.
    """

    federation: str
    run: str
    round: int
    transcript_sha256: str
    committed: bool
    aggregate: str
    survivors: tuple[str, ...]
    verdicts: Mapping[str, str]
    closed: bool = False

    @property
    def done(self) -> bool:
        """Return whether it ended as its method means it to, so that its participants must have signed."""
        return self.committed or self.closed

    @staticmethod
    def of(transcript: Transcript, body: pb.RoundResult) -> RoundEnd:
        """Read the end of this transcript's round from a message."""
        verdicts = {row.silo: row.verdict for row in body.verdicts}
        return RoundEnd(
            *transcript.coordinates(),
            body.transcript_sha256,
            body.committed,
            results_digest(results_in(body)) if body.results else body.adapter_digest,
            tuple(body.participants),
            verdicts,
            body.closed,
        )

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"survivors": list(self.survivors), "verdicts": dict(self.verdicts)}
        if not self.closed:
            del fields["closed"]
        return fields

    def coordinates(self) -> tuple[str, str, int]:
        return self.federation, self.run, self.round

    def statement(self, party: str) -> bytes:
        """Return the bytes that a party signs: that the round ended like this.

        Args:
            party: the signer's SPIFFE id.
        """
        return _RESULT_PREFIX + canonical_json(self.to_json() | {"party": party})


Results = Mapping[str, Mapping[str, Any]]  # receiver -> {"sha256", "participants"}


def results_in(body: pb.RoundResult) -> dict[str, dict[str, Any]]:
    """Return the table of a message; empty where all silos have the same result."""
    return {
        row.receiver: {"sha256": row.adapter_digest, "participants": list(row.participants)} for row in body.results
    }


def results_digest(results: Results) -> str:
    """Return the digest by which the end of a round names the results of its silos, and whose updates are in each."""
    return sha256_hex(canonical_json({receiver: dict(row) for receiver, row in results.items()}))


@dataclass(frozen=True)
class SignedEnd:
    """The end of a round with somebody's signature: evidence by itself, offline, with nothing but a public key."""

    end: RoundEnd
    party: str
    signature: bytes

    def verifies(self, key: Ed25519PublicKey) -> bool:
        """Return whether the signature is by this key."""
        return _verifies(key, self.signature, self.end.statement(self.party))

    def to_detail(self, results: Results | None = None) -> dict[str, Any]:
        """Return the end as it is written in a `round.result` record, whose own fields name run and round.

        Args:
            results: the table whose digest the end names, where each silo has a result of its own.
        """
        return {
            "sha256": self.end.transcript_sha256,
            "committed": self.end.committed,
            "aggregate": self.end.aggregate,
            "survivors": list(self.end.survivors),
            "verdicts": dict(self.end.verdicts),
            **({"closed": True} if self.end.closed else {}),
            **({"results": {receiver: dict(row) for receiver, row in results.items()}} if results else {}),
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
        VerificationError: a value is missing or of another type, or the round ends in two ways. Nothing of it is
            believed by this.
    """
    try:
        survivors, verdicts = detail["survivors"], detail["verdicts"]
        committed, closed = detail["committed"], detail.get("closed", False)
        if not isinstance(survivors, list) or {type(committed), type(closed)} != {bool}:
            raise TypeError("a value of another type")
        if committed and closed:
            raise ValueError("it ends in two ways")
        end = RoundEnd(
            federation,
            run,
            round_number,
            _digest(detail["sha256"]),
            committed,
            _digest(detail["aggregate"], empty=True),
            tuple(map(_text, survivors)),
            {_text(silo): _text(verdict) for silo, verdict in verdicts.items()},
            closed,
        )
        return SignedEnd(end, _text(detail["party"]), _signature(detail["signature"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VerificationError(f"the result of round {round_number} of run {run} is malformed") from error


def two_ends(one: SignedEnd, other: SignedEnd, known: KnownKey | None) -> tuple[str, ...]:
    """The fields in which two results of one round differ that one party signed: it told two stories, provably.

    None where they say the same, are of two rounds or two parties, or where a signature does not verify: then it is
    not the signer who lied.

    Args:
        one: of one log.
        other: of another.
        known: the signer's key; None: nobody knows it.
    """
    if one.party != other.party or one.end.coordinates() != other.end.coordinates() or known is None:
        return ()
    key = Ed25519PublicKey.from_public_bytes(known.raw)
    if not (one.verifies(key) and other.verifies(key)):
        return ()
    ours, theirs = one.end.to_json(), other.end.to_json()
    return tuple(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))


RECORD_PREFIX = b"fedsilo-run-record-v1\n"
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_PARTY = re.compile(
    r"spiffe://(?P<domain>[a-z][a-z0-9_-]{0,62})/(?P<role>coordinator|silo)/(?P<name>[a-z][a-z0-9_-]{0,62})"
)
_MALFORMED = (PeerError, VerificationError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class KnownKey:
    """A party's public key. `vouched`: by somebody else than who wrote what is checked with it."""

    raw: bytes
    vouched: bool = True


Keys = Mapping[str, KnownKey]  # by SPIFFE id


class RoundCheck:
    """Checks one round of one log or one run record. Each method takes one record's detail and returns problems.

    Args:
        run: its name.
        number: of the round.
        owner: SPIFFE id of who wrote the record; empty where nobody knows.
        keys: what is known of keys, besides what the record says.
        coordinators: who may have signed as coordinator; None where nobody knows.
        removed: the record of the transcript may have been removed by retention.
        exhaustive: `keys` has every silo there is: one that is not among them is nobody.

    Attributes:
        transcript: once one was read that is well-formed.
        sound: nothing was wrong with it.
        party: who is said to have signed it as coordinator.
        signed: silos whose signature under it verifies.
        unvouched: whose key is the record's own word, or not known at all; the coordinator as `coordinator/NAME`.
        signed_end, ended: how the round ended, once that was read.
        two_ends: fields in which a second result differs that the coordinator signed as well.
    """

    def __init__(
        self,
        run: str,
        number: int,
        *,
        owner: str,
        keys: Keys,
        coordinators: frozenset[str] | None = None,
        removed: bool = False,
        exhaustive: bool = False,
    ) -> None:
        self._place = (run, number)
        self._owner = _PARTY.fullmatch(owner)
        self._keys = keys
        own = self._owner is not None and self._owner["role"] == "coordinator"
        self._coordinators = frozenset({owner}) if own else coordinators
        self._removed = removed
        self._exhaustive = exhaustive
        self._agreements = 0
        self._fewest = _SILOS_MAX  # updates in one of the silos' results, where each has its own
        self.transcript: Transcript | None = None
        self.sound = False
        self.party = ""
        self.signed: set[str] = set()
        self.unvouched: set[str] = set()
        self.signed_end: SignedEnd | None = None
        self.two_ends: tuple[str, ...] = ()

    @property
    def ended(self) -> RoundEnd | None:
        return self.signed_end.end if self.signed_end is not None else None

    # ---- one record after the other ------------------------------------------------------------------

    def opened(self, detail: Any) -> list[str]:
        """A `round.transcript`: {sha256, transcript, party, signature}."""
        try:
            transcript = transcript_from_canonical(canonical_json(detail["transcript"]).decode())
            sha256, party, signature = (
                _digest(detail["sha256"]),
                _text(detail["party"]),
                _signature(detail["signature"]),
            )
        except _MALFORMED:
            return ["its round.transcript is malformed"]
        if self.transcript is not None:
            fields = self.transcript.differences(transcript)
            self.sound = self.sound and not fields and party == self.party
            if fields:
                return [f"a second transcript, which differs in {', '.join(fields)}"]
        self.transcript, self.party = transcript, party
        problems = self._wrong_with(transcript, sha256, party, signature)
        self.sound = not problems
        return problems

    def agreed(self, detail: Any) -> list[str]:
        """A `round.agreed`: {sha256, signatures, keys}."""
        try:
            sha256, signatures, named = _digest(detail["sha256"]), detail["signatures"], detail["keys"]
            pairs = {_text(silo): (_signature(each), _key(named[silo])) for silo, each in signatures.items()}
        except _MALFORMED:
            return ["its round.agreed is malformed"]
        transcript = self.transcript
        if transcript is None or sha256 != transcript.digest:
            return self._not_of_this("round.agreed")
        self._agreements += 1
        problems = []
        for silo, (signature, key) in sorted(pairs.items()):
            party = silo_id(transcript.federation, silo)
            known = self._keys.get(party)
            if known is not None and known.raw != key:
                problems.append(f"the key of {silo} is not the one that is known of it")
            elif known is None and self._exhaustive:
                problems.append(f"the key of {silo} is under no certificate of the federation")
            elif silo not in transcript.silos or not _signed(transcript, party, key, signature):
                problems.append(f"the signature of {silo} does not verify")
            else:
                self.signed.add(silo)
                if known is None or not known.vouched:
                    self.unvouched.add(silo)
        return problems

    def result(self, detail: Any) -> list[str]:
        """A `round.result`: {sha256, committed, aggregate, survivors, verdicts, party, signature}, closed, results."""
        transcript = self.transcript
        try:
            signed = end_of_record(transcript.federation if transcript is not None else "", *self._place, detail)
            results = {
                _text(name): set(map(_text, row["participants"])) for name, row in detail.get("results", {}).items()
            }
            differs = bool(results) and results_digest(detail["results"]) != signed.end.aggregate
        except _MALFORMED:
            return ["its round.result is malformed"]
        if transcript is None or signed.end.transcript_sha256 != transcript.digest:
            return self._not_of_this("round.result")
        known = self._keys.get(self.party)
        good = known is None or signed.verifies(Ed25519PublicKey.from_public_bytes(known.raw))
        if signed.party != self.party or not good:
            return [f"its result is not signed by {self.party}, whose transcript it is"]
        if differs:
            return ["its table of results is not the one that its result names"]
        if strangers := sorted({*results, *set().union(*results.values())} - set(transcript.silos)):
            return [f"its table of results names {', '.join(strangers)}, not of its roster"]
        self._fewest = min((len(names) for names in results.values()), default=self._fewest)
        return self._ends(transcript, signed, known)

    def _ends(self, transcript: Transcript, signed: SignedEnd, known: KnownKey | None) -> list[str]:
        """Take in an end of the round, unless there is another one."""
        if self.signed_end is not None and self.signed_end.end != signed.end:
            self.two_ends = two_ends(self.signed_end, signed, known)
            return [] if self.two_ends else ["a second result, which differs from the first"]
        self.signed_end = signed
        strangers = sorted({*signed.end.survivors, *signed.end.verdicts} - set(transcript.silos))
        return [f"its result names {', '.join(strangers)}, not of its roster"] if strangers else []

    # ---- all of them together ------------------------------------------------------------------------

    def missing(self, *, planned: int = 1, quorum: int = 0) -> list[str]:
        """Return what the records of the round lack: updates, where it is committed, and signatures, where it is
        committed or closed.

        Args:
            planned: how many silos the plan names, where that is known.
            quorum: of the plan, where that is known.
        """
        transcript = self.transcript
        if transcript is None:
            return []  # said of each record by itself
        ended, done = self.ended, self.ended is not None and self.ended.done
        survivors = set(ended.survivors) if ended is not None and done else set()
        problems: list[str] = []
        least = max(quorum, transcript.min_updates)
        if ended is not None and ended.committed and (fewest := min(len(survivors), self._fewest)) < least:
            problems.append(f"it is committed with {fewest} updates, needed: {least}")
        if self._owner is not None and self._owner["role"] == "silo":
            own = self._owner["name"]
            if own not in transcript.silos:
                return ["its roster does not name the silo whose log this is"]
            # Who signs after the round began for it is not in its record, nor anybody where it began without it.
            done = bool(self._agreements) or own in survivors
            survivors = {own}
        if not done:
            return problems
        least = needed(max(planned, len(transcript.silos)), min_peers=1, quorum=quorum)
        if len(self.signed) < least:
            problems.append(f"{len(self.signed)} signatures of silos verify, needed: {least}")
        if unsigned := sorted(survivors - self.signed):
            problems.append(f"no signature of {', '.join(unsigned)}, who took part")
        return problems

    @property
    def unsigned_survivors(self) -> set[str]:
        """Return the silos named as participants of a committed or closed round without a signature in this record."""
        return set(self.ended.survivors) - self.signed if self.ended is not None and self.ended.done else set()

    # ---- parts ---------------------------------------------------------------------------------------

    def _wrong_with(self, transcript: Transcript, sha256: str, party: str, signature: bytes) -> list[str]:
        if transcript.digest != sha256 or (transcript.run, transcript.round) != self._place:
            return ["the transcript is not the one that the record names (its digest, run or round is another)"]
        federation = self._owner["domain"] if self._owner is not None else transcript.federation
        if transcript.federation != federation:
            return [f"its transcript is of the federation {transcript.federation}, not of {federation}"]
        stranger = self._coordinators is not None and party not in self._coordinators
        if stranger or coordinator_domain(party) != federation:
            return [f"its transcript is signed by {party}, who is not known as the coordinator of {federation}"]
        known = self._keys.get(party)
        if known is None or not known.vouched:
            self.unvouched.add(_short(party))
        if known is not None and not _signed(transcript, party, known.raw, signature):
            return [f"its transcript is not signed by {party}: the coordinator's signature does not verify"]
        return []

    def _not_of_this(self, event: str) -> list[str]:
        if self.transcript is None:
            return [] if self._removed else [f"a {event} without a round.transcript before it"]
        return [f"its {event} belongs to another transcript"]


def check_evidence(
    detail: Any, *, run: str, number: int, owner: str, keys: Keys, coordinators: frozenset[str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Check both pieces of a `round.equivocation`: a transcript with its coordinator's signature, and a signature of
    the coordinator or a silo under another one of the same round.

    Args:
        detail: {known, shown}.
        run: its name.
        number: of the round.
        owner: SPIFFE id of whose log this is.
        keys: as for `RoundCheck`.
        coordinators: as for `RoundCheck`.

    Returns:
        who signed what, {signers, sha256, keys_not_vouched_for}, once the evidence proves it, else nothing; and what
        is wrong with the evidence.
    """
    round_check = RoundCheck(run, number, owner=owner, keys=keys, coordinators=coordinators)
    try:
        known, shown = detail["known"], detail["shown"]
        party, digest, signature = _text(shown["party"]), _digest(shown["sha256"]), _signature(shown["signature"])
        other = (
            transcript_from_canonical(canonical_json(shown["transcript"]).decode()) if "transcript" in shown else None
        )
    except _MALFORMED:
        return {}, ["its evidence of two transcripts is malformed"]
    problems = round_check.opened(known)
    transcript = round_check.transcript
    if problems or transcript is None:
        return {}, [f"the evidence of two transcripts does not verify: {problem}" for problem in problems]
    unknown = [name for name in (round_check.party, party) if name not in keys]
    if unknown:
        return {}, [f"the evidence of two transcripts cannot be checked: no key of {unknown[0]} is known"]
    may_sign = {round_check.party, *(silo_id(transcript.federation, silo) for silo in transcript.silos)}
    another = other is None or (other.coordinates() == transcript.coordinates() and other.digest == digest)
    if digest == transcript.digest or not another or party not in may_sign:
        return {}, ["the evidence of two transcripts shows no second one of this round"]
    if not _signed(transcript, party, keys[party].raw, signature, digest):
        return {}, [f"the evidence of two transcripts does not verify: the second one is not signed by {party}"]
    signers = list(dict.fromkeys((round_check.party, party)))
    return {
        "signers": signers,
        "sha256": [transcript.digest, digest],
        "keys_not_vouched_for": sorted(_short(name) for name in signers if not keys[name].vouched),
    }, []


# ---- a run record --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordCheck:
    """Result of checking a run record.

    Attributes:
        rounds: how many have a transcript with nothing wrong about it.
        unvouched: silos whose key is the coordinator's word alone.
        problems: what cannot be true in the record.
    """

    rounds: int
    unvouched: tuple[str, ...]
    problems: tuple[str, ...]


def verify_record(document: bytes, public_key: Ed25519PublicKey) -> dict[str, Any]:
    """A run record whose signature by a known key was checked; its rounds were not. Raises VerificationError."""
    try:
        parsed = json.loads(document)
        record = dict(parsed["record"])
        public_key.verify(bytes.fromhex(parsed["signature"]), RECORD_PREFIX + canonical_json(record))
    except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError) as error:
        raise VerificationError("the run record is not signed by that key") from error
    return record


def signer_of(document: bytes) -> str:
    """Return the signer that a run record names; only a signature under that name says whether it is so."""
    try:
        return _text(json.loads(document)["signer"])
    except _MALFORMED as error:
        raise VerificationError("the run record does not say who signed it") from error


def check_record(
    record: Mapping[str, Any], *, signer: str, public_key: Ed25519PublicKey, keys: Keys, exhaustive: bool = False
) -> RecordCheck:
    """The rounds of a run record whose own signature was checked: each with its transcript and enough signatures, each
    beginning where the last committed one ended.

    Args:
        record: of `verify_record`.
        signer: SPIFFE id of the coordinator.
        public_key: the coordinator's.
        keys: silos' keys, from elsewhere than the record.
        exhaustive: `keys` has every silo of the federation.
    """
    problems: list[str] = []
    unvouched: set[str] = set()
    good, last = 0, 0
    known = {**keys, signer: KnownKey(public_key.public_bytes_raw())}
    if signer in keys and keys[signer].raw != known[signer].raw:
        problems.append(f"the key of {signer} is not the one given")
    try:
        run, plan, base = _text(record["run"]), record["plan"], _digest(record["base_adapter_sha256"], empty=True)
        adapter, rows = _digest(record["adapter_sha256"], empty=True), list(record["rounds"])
        plan_sha256, silos, quorum = sha256_hex(canonical_json(plan)), set[str](), 1
        if plan or rows:  # a run may end before it has one, and then has no rounds
            silos, quorum = set(map(_text, plan["silos"])), _count(plan["quorum"])
    except _MALFORMED:
        return RecordCheck(0, (), (*problems, "the run record is malformed"))
    for row in rows:
        try:
            number, state, ends = _count(row["round"]), _text(row["state"]), _digest(row["adapter_sha256"], empty=True)
            results = row.get("results", {})
            end = results_digest(results) if results else ends
            begins, participants, shown = (
                _digest(row["base_sha256"], empty=True),
                row["participants"],
                row["transcript"],
            )
            round_check = RoundCheck(run, number, owner=signer, keys=known, exhaustive=exhaustive)
            wrong = _round_of_record(round_check, signer, shown, state, end, participants) if shown else []
        except _MALFORMED:
            problems.append("a round of the run record is malformed")
            continue
        if number <= last:
            wrong.append("it does not follow the round before it")
        if (begins or ends) and begins != base:
            wrong.append("its base adapter is not the one that the last committed round left")
        if not shown and (state in ("committed", "closed") or participants):
            wrong.append(f"it is {state} without a transcript")
        if (transcript := round_check.transcript) is not None:
            if transcript.plan_sha256 != plan_sha256 or not set(transcript.silos) <= silos:
                wrong.append("its transcript is of another plan")
            if transcript.base_digest != begins:
                wrong.append("its base adapter is not the one in its transcript")
            wrong += round_check.missing(planned=len(silos), quorum=quorum)
            good += not wrong
        problems += [f"round {number}: {problem}" for problem in wrong]
        unvouched |= round_check.unvouched
        last, base = number, ends if state == "committed" and not results else base
    if adapter != base:
        problems.append("its adapter is not the one that the last committed round left")
    return RecordCheck(good, tuple(sorted(unvouched)), tuple(problems))


def _round_of_record(check: RoundCheck, signer: str, shown: Any, state: str, ends: str, participants: Any) -> list[str]:
    """A row of a run record, as the three records of a log that say the same."""
    sha256, signatures = shown["sha256"], shown["countersignatures"]
    opened = {name: shown[name] for name in ("transcript", "sha256", "signature")} | {"party": signer}
    problems = check.opened(opened)
    agreed = {
        "sha256": sha256,
        "signatures": {silo: each["signature"] for silo, each in signatures.items()},
        "keys": {silo: each["key"] for silo, each in signatures.items()},
    }
    problems += check.agreed(agreed)
    if result := shown.get("result"):
        problems += check.result({**result, "sha256": result["transcript_sha256"], "party": signer})
    ended, committed, closed = check.ended, state == "committed", state == "closed"
    if ended is None:
        problems += [f"it is {state} without a result that its coordinator signed"] * (committed or closed)
    elif (ended.committed, ended.closed, sorted(ended.survivors)) != (
        committed,
        closed,
        sorted(map(_text, participants)),
    ):
        problems.append("its state or participants are not those of its result")
    elif committed and ended.aggregate != ends:
        problems.append("its adapter is not the one in its result")
    return problems


# ---- values ------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("not a number from 1")
    return value


def _digest(value: Any, *, empty: bool = False) -> str:
    if not (empty and value == "") and not _DIGEST.fullmatch(value):
        raise ValueError("not a digest")
    return str(value)


def _key(value: Any) -> bytes:
    return bytes.fromhex(_digest(value))


def _signature(value: Any) -> bytes:
    if not _SIGNATURE.fullmatch(value):
        raise ValueError("not a signature")
    return bytes.fromhex(value)


def _signed(transcript: Transcript, party: str, key: bytes, signature: bytes, digest: str | None = None) -> bool:
    return is_signed(transcript, party, Ed25519PublicKey.from_public_bytes(key), signature, digest=digest)


def coordinator_domain(party: str) -> str:
    """The federation whose coordinator a SPIFFE id names; empty where it names none."""
    match = _PARTY.fullmatch(party)
    return match["domain"] if match is not None and match["role"] == "coordinator" else ""


def domain_of(party: str) -> str:
    """The federation of a party; empty for what is no SPIFFE id of one."""
    match = _PARTY.fullmatch(party)
    return match["domain"] if match is not None else ""


def _short(party: str) -> str:
    """A silo by its name, the coordinator as coordinator/NAME, since a silo may have that name too."""
    match = _PARTY.fullmatch(party)
    if match is None:
        return party
    return match["name"] if match["role"] == "silo" else f"{match['role']}/{match['name']}"

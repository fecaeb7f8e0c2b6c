"""What can be said afterwards of the transcripts of rounds, from plain JSON values alone (threat model 7, T20).

    round.transcript, round.agreed, round.result of one round, as a log or a run record has them  ->  problems

Whoever wrote a record may have written anything, so every value is looked at before it is used, and a signature counts
for as much as its key: a key that the record itself names, or that only its own writer vouches for, is said to be so.
Pure: no file, no clock. `fedsilo.audit.transcripts` reads logs, `fedsilo run verify` reads a run record.

What it does not stop: parties that invent a record together, with keys that nobody else knows; and it does not know
which `min_peers` a silo's policy asked for, so only what the record itself proves necessary is demanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import PeerError, VerificationError
from fedsilo.protocol.transcript import (
    RoundEnd,
    SignedEnd,
    Transcript,
    end_of_record,
    is_signed,
    needed,
    silo_id,
    transcript_from_canonical,
    two_ends,
)

RECORD_PREFIX = b"fedsilo-run-record-v1\n"
_DIGEST = re.compile(r"[0-9a-f]{64}")
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
    """One round, as one log or one run record tells it. Each method takes one record's detail and returns problems.

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
        ended: how the round ended, once that was read.
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
        self.transcript: Transcript | None = None
        self.sound = False
        self.party = ""
        self.signed: set[str] = set()
        self.unvouched: set[str] = set()
        self.ended: RoundEnd | None = None
        self.signed_end: SignedEnd | None = None
        self.two_ends: tuple[str, ...] = ()

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
        """A `round.result`: {sha256, committed, aggregate, survivors, verdicts, party, signature}."""
        transcript = self.transcript
        try:
            signed = _signed_end(transcript.federation if transcript is not None else "", self._place, detail)
        except _MALFORMED:
            return ["its round.result is malformed"]
        if transcript is None or signed.end.transcript_sha256 != transcript.digest:
            return self._not_of_this("round.result")
        known = self._keys.get(self.party)
        good = known is None or signed.verifies(Ed25519PublicKey.from_public_bytes(known.raw))
        if signed.party != self.party or not good:
            return [f"its result is not signed by {self.party}, whose transcript it is"]
        return self._ends(transcript, signed, known)

    def _ends(self, transcript: Transcript, signed: SignedEnd, known: KnownKey | None) -> list[str]:
        """Take in an end of the round, unless there is another one."""
        if self.signed_end is not None and self.signed_end.end != signed.end:
            self.two_ends = ends_differ(self.signed_end, signed, known)
            return [] if self.two_ends else ["a second result, which differs from the first"]
        self.signed_end, self.ended = signed, signed.end
        strangers = sorted({*signed.end.survivors, *signed.end.verdicts} - set(transcript.silos))
        return [f"its result names {', '.join(strangers)}, not of its roster"] if strangers else []

    # ---- all of them together ------------------------------------------------------------------------

    def missing(self, *, planned: int = 1, quorum: int = 0) -> list[str]:
        """What all that was read of the round lacks: updates, where it is committed, and signatures.

        Args:
            planned: how many silos the plan names, where that is known.
            quorum: of the plan, where that is known.
        """
        transcript = self.transcript
        if transcript is None:
            return []  # said of each record by itself
        committed = self.ended is not None and self.ended.committed
        survivors = set(self.ended.survivors) if self.ended is not None and committed else set()
        problems: list[str] = []
        if committed and len(survivors) < (least := max(quorum, transcript.min_updates)):
            problems.append(f"it is committed with {len(survivors)} updates, needed: {least}")
        if self._owner is not None and self._owner["role"] == "silo":
            own = self._owner["name"]
            if own not in transcript.silos:
                return ["its roster does not name the silo whose log this is"]
            # Who signs after the round began for it is not in its record, nor anybody where it began without it.
            committed = bool(self._agreements) or own in survivors
            survivors = {own}
        if not committed:
            return problems
        least = needed(max(planned, len(transcript.silos)), min_peers=1, quorum=quorum)
        if len(self.signed) < least:
            problems.append(f"{len(self.signed)} signatures of silos verify, needed: {least}")
        if unsigned := sorted(survivors - self.signed):
            problems.append(f"no signature of {', '.join(unsigned)}, who took part")
        return problems

    @property
    def unsigned_survivors(self) -> set[str]:
        """Who is said to have taken part in what was committed, without a signature in this record."""
        return set(self.ended.survivors) - self.signed if self.ended is not None and self.ended.committed else set()

    # ---- parts ---------------------------------------------------------------------------------------

    def _wrong_with(self, transcript: Transcript, sha256: str, party: str, signature: bytes) -> list[str]:
        if transcript.digest != sha256 or (transcript.run, transcript.round) != self._place:
            return ["the transcript is not the one that the record names (its digest, run or round is another)"]
        federation = self._owner["domain"] if self._owner is not None else transcript.federation
        if transcript.federation != federation:
            return [f"its transcript is of the federation {transcript.federation}, not of {federation}"]
        stranger = self._coordinators is not None and party not in self._coordinators
        if stranger or _role(party, federation) != "coordinator":
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
    """Both pieces of a `round.equivocation`: a transcript with its coordinator's signature, and a signature of the
    coordinator or a silo under another one of the same round.

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
    """Attributes:
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
    """Who a run record says signed it; only a signature under that name says whether it is so."""
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
            begins, participants, shown = (
                _digest(row["base_sha256"], empty=True),
                row["participants"],
                row["transcript"],
            )
            round_check = RoundCheck(run, number, owner=signer, keys=known, exhaustive=exhaustive)
            wrong = _round_of_record(round_check, signer, shown, state, ends, participants) if shown else []
        except _MALFORMED:
            problems.append("a round of the run record is malformed")
            continue
        if number <= last:
            wrong.append("it does not follow the round before it")
        if (begins or ends) and begins != base:
            wrong.append("its base adapter is not the one that the last committed round left")
        if not shown and (state == "committed" or participants):
            wrong.append("it is committed without a transcript")
        if (transcript := round_check.transcript) is not None:
            if transcript.plan_sha256 != plan_sha256 or not set(transcript.silos) <= silos:
                wrong.append("its transcript is of another plan")
            if transcript.base_digest != begins:
                wrong.append("its base adapter is not the one in its transcript")
            wrong += round_check.missing(planned=len(silos), quorum=quorum)
            good += not wrong
        problems += [f"round {number}: {problem}" for problem in wrong]
        unvouched |= round_check.unvouched
        last, base = number, ends if state == "committed" else base
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
    if said := shown.get("result"):
        problems += check.result({**said, "sha256": said["transcript_sha256"], "party": signer})
    told, committed = check.ended, state == "committed"
    if told is None:
        problems += ["it is committed without a result that its coordinator signed"] * committed
    elif (told.committed, sorted(told.survivors)) != (committed, sorted(map(_text, participants))):
        problems.append("its state or participants are not those of its result")
    elif committed and told.aggregate != ends:
        problems.append("its adapter is not the one in its result")
    return problems


# ---- values ------------------------------------------------------------------------------------------


def ends_differ(one: SignedEnd, other: SignedEnd, known: KnownKey | None) -> tuple[str, ...]:
    """The fields in which two results of a round differ that one party provably signed both."""
    return two_ends(one, other, [Ed25519PublicKey.from_public_bytes(known.raw)] if known is not None else [])


def _signed_end(federation: str, place: tuple[str, int], detail: Mapping[str, Any]) -> SignedEnd:
    """A `round.result` whose values have the types they should; nothing of it is believed by this."""
    if not isinstance(detail["survivors"], list) or not isinstance(detail["verdicts"], Mapping):
        raise TypeError("another shape")
    _digest(detail["sha256"])
    _digest(detail["aggregate"], empty=True)
    _signature(detail["signature"])
    return end_of_record(federation, *place, detail)


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


def _role(party: str, federation: str) -> str:
    found = _PARTY.fullmatch(party)
    return found["role"] if found is not None and found["domain"] == federation else ""


def coordinator_domain(party: str) -> str:
    """The federation whose coordinator a SPIFFE id names; empty where it names none."""
    found = _PARTY.fullmatch(party)
    return found["domain"] if found is not None and found["role"] == "coordinator" else ""


def domain_of(party: str) -> str:
    """The federation of a party; empty for what is no SPIFFE id of one."""
    found = _PARTY.fullmatch(party)
    return found["domain"] if found is not None else ""


def _short(party: str) -> str:
    """A silo by its name, the coordinator as coordinator/NAME, since a silo may have that name too."""
    found = _PARTY.fullmatch(party)
    if found is None:
        return party
    return found["name"] if found["role"] == "silo" else f"{found['role']}/{found['name']}"

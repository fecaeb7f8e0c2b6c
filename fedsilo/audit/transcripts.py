"""Checks the rounds in audit logs: one transcript for each, signed by the coordinator and by the silos, the same in
every log (T20, decision 11). Offline, from the records alone; what a round must have is in `protocol.transcript`.

A signature is checked with the key that the party's own log, if it is given, is signed by; else with the one that a log
has pinned for it; else with the one that the record names. Where nobody but the log itself vouches for a key, the
row of the round says so, and signatures prove no more than that the log's owner wrote them. The signatures of a run
record are checked with such keys too, and with those that the federation CA certified (`silo_keys`).

Does not show: rounds whose records retention has removed, what a silo trained on after it had signed, parties that
invented logs together, and that a key was still its silo's when it signed: the times of a run are the coordinator's
word too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certs.encoding import read_one_certificate, read_root
from certs.identity import peer_identity
from fedsilo.audit.audit_verify import LogResult, verify_logs
from fedsilo.audit.reader import keys_in, typed_records
from fedsilo.files.identity_files import read_public
from fedsilo.protocol.errors import FedSiloError, NotAllowedError
from fedsilo.protocol.transcript import (
    Keys,
    KnownKey,
    RoundCheck,
    check_evidence,
    coordinator_domain,
    domain_of,
    two_ends,
)

EVENTS = frozenset({"round.transcript", "round.agreed", "round.result", "round.equivocation"})
PROBLEMS_MAX = 20  # told of one log
Place = tuple[str, int]  # run, round


@dataclass
class Rounds:
    """The rounds that one log tells of. `problems`: what cannot be true in it; `findings`: what it proves of others."""

    rounds: dict[Place, RoundCheck] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def sound(self, place: Place) -> RoundCheck | None:
        """A round with a transcript that its coordinator signed: what others can be compared with."""
        entry = self.rounds.get(place)
        return entry if entry is not None and entry.sound else None


def check_rounds(results: Sequence[LogResult], logs: Sequence[Path]) -> list[dict[str, Any]]:
    """Check the rounds of logs alone and against each other; what was found is added to the logs' results.

    Args:
        results: of `verify_logs` on the same logs. Each gets `findings`, what somebody provably signed in two ways, and
            `keys_not_vouched_for`, signers of whose keys only the log itself, or nobody, knows; a log with a problem
            is not verified any more.
        logs: folders.

    Returns:
        a row for each round of the first log: {run, round, sha256, party, silos, signed, keys_not_vouched_for,
        committed, aggregate, survivors, survivors_without_signature, verdicts, logs_alike}; and closed, where it is.
    """
    ring = Keyring(logs, [result["verified"] for result in results])
    logs_rounds = [
        _rounds_of(log, ring, number, result) for number, (log, result) in enumerate(zip(logs, results, strict=True))
    ]
    _compare([result["log"] for result in results], logs_rounds, ring.known_to(None))
    for number, (result, rounds) in enumerate(zip(results, logs_rounds, strict=True)):
        problems = [*ring.problems[number], *rounds.problems]
        more = [f"and {len(problems) - PROBLEMS_MAX} other problems of rounds"] * (len(problems) > PROBLEMS_MAX)
        result["findings"] = rounds.findings
        unvouched = {name for each in rounds.rounds.values() for name in each.unvouched}
        result["keys_not_vouched_for"] = sorted(unvouched)
        if problems:
            result["problems"] = [*result["problems"], *problems[:PROBLEMS_MAX], *more]
            result["verified"] = False
    return (
        [_row(place, logs_rounds) for place in sorted(logs_rounds[0].rounds) if logs_rounds[0].rounds[place].transcript]
        if logs_rounds
        else []
    )


def _row(place: Place, logs_rounds: Sequence[Rounds]) -> dict[str, Any]:
    first = logs_rounds[0].rounds[place]
    transcript, ended = first.transcript, first.ended
    assert transcript is not None  # noqa: S101  # the caller looked
    same = [other for each in logs_rounds if (other := each.rounds.get(place)) and other.transcript == transcript]
    signed_somewhere = {silo for other in same for silo in other.signed}
    return {
        "run": place[0],
        "round": place[1],
        "sha256": transcript.digest,
        "party": first.party,
        "silos": list(transcript.silos),
        "signed": sorted(first.signed),
        "keys_not_vouched_for": sorted(first.unvouched),
        "committed": ended.committed if ended else None,
        **({"closed": True} if ended and ended.closed else {}),
        "aggregate": ended.aggregate if ended else "",
        "survivors": list(ended.survivors) if ended else [],
        "survivors_without_signature": sorted(first.unsigned_survivors - signed_somewhere),
        "verdicts": dict(ended.verdicts) if ended else {},
        "logs_alike": len(same),
    }


class Keyring:
    """Public keys of parties, as the `keys/` folders of logs have them.

    A party's own log is the word on its key. Where it is not given, the others' are, if they agree. A log that does
    not verify is nobody's word: else whoever damages one could have an honest party's log called wrong.

    Args:
        logs: folders.
        verified: of each, whether it verifies by itself.

    Attributes:
        origins: whose log each is; empty where that cannot be read, which the verification of the log names.
        problems: for each log, which of its keys another log contradicts.
    """

    def __init__(self, logs: Sequence[Path], verified: Sequence[bool]) -> None:
        self.origins: list[str] = []
        self.problems: list[list[str]] = [[] for _ in logs]
        self._own: dict[str, dict[bytes, list[int]]] = {}  # party -> key -> logs
        self._pinned: dict[str, dict[bytes, list[int]]] = {}
        for number, (log, sound) in enumerate(zip(logs, verified, strict=True)):
            self.origins.append("")
            for path in sorted((log / "keys").glob("*.vkey")):
                for key in keys_in(path):
                    if path.name == "log.vkey":
                        self.origins[number] = key.name
                    if not sound:
                        continue
                    stated = self._own if path.name == "log.vkey" else self._pinned
                    stated.setdefault(key.name, {}).setdefault(key.public_bytes, []).append(number)
        for party in sorted(self._own.keys() | self._pinned.keys()):
            self._compare(party)

    def known_to(self, number: int | None) -> Keys:
        """Keys to check a log's records with, each vouched for by another log than this one.

        Args:
            number: of the log; None for a record of somebody who has no log among these.
        """
        own = self.origins[number] if number is not None else ""
        keys: dict[str, KnownKey] = {}
        for party in self._own.keys() | self._pinned.keys():
            stated = self._own.get(party) or self._pinned[party]
            if len(stated) == 1:
                ((raw, logs),) = stated.items()
                vouched = party in self._own or any(self.origins[each] != own for each in logs)
                keys[party] = KnownKey(raw, vouched)
        return keys

    def coordinators(self, federation: str) -> frozenset[str] | None:
        """Return who may be a federation's coordinator: whose log is given, else whom each log that knows one knows."""
        own = {party for party in self._own if coordinator_domain(party) == federation}
        if own:
            return frozenset(own)
        by_log: dict[int, set[str]] = {}
        for party, stated in self._pinned.items():
            if coordinator_domain(party) == federation:
                for number in {number for logs in stated.values() for number in logs}:
                    by_log.setdefault(number, set()).add(party)
        return frozenset(set.intersection(*by_log.values())) if by_log else None

    def _compare(self, party: str) -> None:
        own, pinned = self._own.get(party, {}), self._pinned.get(party, {})
        for stated, others in ((own, own), (pinned, own or pinned)):
            for raw, logs in stated.items():
                if others.keys() - {raw}:
                    for number in sorted(set(logs)):
                        where = "with which that party's own log is signed" if others is own else "of another log"
                        self.problems[number].append(f"keys: its key of {party} is not the one {where}")


def _rounds_of(log: Path, ring: Keyring, number: int, result: LogResult) -> Rounds:
    rounds = Rounds()
    owner = ring.origins[number]
    keys, coordinators = ring.known_to(number), ring.coordinators(domain_of(owner))
    begun: set[str] = set()  # runs with a transcript in this log: what follows of them was not removed
    try:
        for record in typed_records(log):
            if record.event not in EVENTS:
                continue
            run, place = record.run, (record.run, record.round)
            detail, event = record.detail, record.event
            if event == "round.equivocation":
                evidence, problems = check_evidence(
                    detail, run=run, number=place[1], owner=owner, keys=keys, coordinators=coordinators
                )
                if evidence:
                    rounds.findings.append(_finding(place, "transcripts", f"record {record.seq}", evidence))
            else:
                removed = bool(result["hashes_only"]) and run not in begun
                check = rounds.rounds.setdefault(
                    place,
                    RoundCheck(*place, owner=owner, keys=keys, coordinators=coordinators, removed=removed),
                )
                if event == "round.transcript":
                    begun.add(run)
                    problems = check.opened(detail)
                else:
                    problems = check.agreed(detail) if event == "round.agreed" else check.result(detail)
            where = f"record {record.seq}: round {place[1]} of run {run}"
            rounds.problems += [f"{where}: {problem}" for problem in problems]
    except FedSiloError as error:
        if not result["problems"]:  # else the verification of the log has named it
            rounds.problems.append(f"not all of its rounds can be read: {error.message}")
    for place, check in sorted(rounds.rounds.items()):
        if check.two_ends:
            rounds.findings.append(_finding(place, "results", f"fields {', '.join(check.two_ends)}", _signer(check)))
        rounds.problems += [f"round {place[1]} of run {place[0]}: {problem}" for problem in check.missing()]
    return rounds


def _compare(names: Sequence[str], logs_rounds: Sequence[Rounds], keys: Keys) -> None:
    """The same round in two logs is one round. A difference that the coordinator signed is its doing, not the logs';
    any other is a problem of both."""
    for place in sorted({place for rounds in logs_rounds for place in rounds.rounds}):
        having = [
            (name, rounds, check)
            for name, rounds in zip(names, logs_rounds, strict=True)
            if (check := rounds.sound(place))
        ]
        for name, rounds, check in having[1:]:
            first_name, first_rounds, first = having[0]
            what, fields, proven = _difference(first, check, keys.get(check.party))
            for log, other in ((rounds, first_name), (first_rounds, name)):
                difference = f"another {what} than in the log of {other}: {', '.join(fields)} differ"
                if fields and proven:
                    log.findings.append(_finding(place, f"{what}s", difference, _signer(check)))
                elif fields:
                    log.problems.append(f"round {place[1]} of run {place[0]} has {difference}")


def _difference(one: RoundCheck, other: RoundCheck, key: KnownKey | None) -> tuple[str, Sequence[str], bool]:
    """Return what differs between two logs about a round, in which fields, and whether one party provably signed
    both."""
    if one.party != other.party:
        return "coordinator", ["party"], False
    assert one.transcript is not None and other.transcript is not None  # noqa: S101  # both are sound
    if fields := one.transcript.differences(other.transcript):
        return "transcript", fields, key is not None
    if one.signed_end is None or other.signed_end is None or one.signed_end.end == other.signed_end.end:
        return "", (), False
    proven = two_ends(one.signed_end, other.signed_end, key)
    return "result", proven or ["a value"], bool(proven)


def _finding(place: Place, what: str, where: str, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"run": place[0], "round": place[1], "what": what, "where": where, **details}


def _signer(check: RoundCheck) -> dict[str, Any]:
    return {"signers": [check.party], "keys_not_vouched_for": sorted(name for name in check.unvouched if "/" in name)}


def verification_warnings(results: Sequence[LogResult]) -> list[str]:
    """Return what is no fault of a log and still matters to whoever relies on the verification.

    Args:
        results: of `verify_logs`.

    Returns:
        a line for each: a copy that ends before another, records that nobody signed yet, records that retention
        removed, witnesses that nobody vouches for.
    """
    return [
        *(f"{result['log']}: {notice}" for result in results for notice in result["notices"]),
        *(
            f"{result['log']}: {result['unsigned']} newest records not signed yet"
            for result in results
            if result["unsigned"]
        ),
        *(
            f"{result['log']}: leaf hashes only of the first {result['hashes_only']} records: "
            "retention removed the rest"
            for result in results
            if result["hashes_only"]
        ),
        *(
            f"{result['log']}: no other log given here vouches for the keys that its rounds are signed with, those of "
            f"{', '.join(result['keys_not_vouched_for'])}"
            for result in results
            if result["keys_not_vouched_for"]
        ),
    ]


def findings_of(results: Iterable[LogResult]) -> list[str]:
    """A sentence for each time that somebody provably signed two transcripts, or two results, of one round."""
    return [
        f"{result['log']}: two {each['what']} of round {each['round']} of run {each['run']} are signed, by "
        f"{' and '.join(each['signers'])} ({each['where']})"
        for result in results
        for each in result["findings"]
    ]


# ---- keys for a run record ---------------------------------------------------------------------------------------


def silo_keys(record: Mapping[str, Any], logs: Sequence[Path], ca: Path | None) -> tuple[Keys, list[str]]:
    """Return what is known of parties' keys, by SPIFFE id, and what is wrong with where it is from.

    Args:
        record: of the run; it carries the certificates of the silos that signed.
        logs: folders of audit logs.
        ca: the federation CA, under which the certificates must be.

    Raises:
        NotFoundError: there is no such file.
        NotAllowedError: `ca` is no CA.
    """
    results = verify_logs(list(logs))
    ring = Keyring(logs, [result["verified"] for result in results])
    problems = [f"{one['path']} does not verify: {problem}" for one in results for problem in one["problems"]]
    problems += [
        f"{log}: {problem}" for log, own_problems in zip(logs, ring.problems, strict=True) for problem in own_problems
    ]
    keys: dict[str, KnownKey] = dict(ring.known_to(None))
    if ca is None:
        return keys, problems
    trust_root = read_public(ca)
    read_root(trust_root)
    certificates = record.get("certificates", ())
    for number, pem in enumerate(certificates if isinstance(certificates, list) else ()):
        try:
            party, key = _certified(str(pem).encode(), trust_root, record)
        except (NotAllowedError, ValueError) as error:
            problems.append(f"certificate {number + 1} of the record: {error}")
            continue
        if party in keys and keys[party].raw != key:
            problems.append(f"certificate {number + 1} of the record: another key of {party} is known")
        keys.setdefault(party, KnownKey(key))
    return keys, problems


def _certified(pem: bytes, trust_root: bytes, record: Mapping[str, Any]) -> tuple[str, bytes]:
    """Whose key a silo's certificate certifies, judged at a moment of the run at which it was valid, if there is one.

    Raises:
        NotAllowedError: there is none, or it is no certificate of a silo under this CA.
        ValueError: the record has no times.
    """
    begins = read_one_certificate(pem, what="the certificate").not_valid_before_utc
    started = _moment(record.get("started_at") or record.get("submitted_at"))
    ended = _moment(record["ended_at"]) if record.get("ended_at") else datetime.max.replace(tzinfo=UTC)
    peer = peer_identity(pem, trust_root, min(max(started, begins), ended), role="silo")
    return peer.spiffe_id, peer.signing_public_key.public_bytes_raw()


def _moment(text: Any) -> datetime:
    moment = datetime.fromisoformat(str(text))
    if moment.tzinfo is None:
        raise ValueError(f"{moment} is no time with a zone")
    return moment

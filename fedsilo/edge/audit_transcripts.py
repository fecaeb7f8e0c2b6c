"""What logs say of the rounds: one transcript for each, signed by the coordinator and by the silos, the same in every
log (threat model 7, T20). Offline, from the records alone.

A signature is checked with the key that a log given here is signed by, or that one of them has pinned for that party;
where there is none, with the key that the record names, and then the row says so.

Does not show: rounds whose records retention has removed, and what a silo trained on after it had signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedsilo.edge.audit_segments import read_records
from fedsilo.treaty.audit.checkpoint import parse_verifier_key
from fedsilo.treaty.errors import FedSiloError, PeerError
from fedsilo.treaty.transcript import Transcript, conflict, is_signed, silo_id, transcript_from_canonical
from fedsilo.treaty.wire.codec import canonical_json

EVENTS = frozenset({"round.transcript", "round.agreed", "round.result", "round.equivocation"})
Place = tuple[str, int]  # run, round


@dataclass
class Rounds:
    """What one log says. `problems`: what cannot be true in it."""

    transcripts: dict[Place, Transcript] = field(default_factory=dict)
    signed: dict[Place, set[str]] = field(default_factory=dict)
    unvouched: dict[Place, set[str]] = field(default_factory=dict)
    results: dict[Place, Mapping[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def check_rounds(results: Sequence[dict[str, Any]], logs: Sequence[Path]) -> list[dict[str, Any]]:
    """Check the rounds of logs alone and against each other; what is wrong is added to the logs' results.

    Args:
        results: of `verify_logs` on the same logs; a log with a problem is not verified any more.
        logs: folders.

    Returns:
        a row for each round of the first log: {run, round, sha256, silos, signed, keys_not_vouched_for, committed,
        aggregate, survivors, verdicts, logs_alike}.
    """
    keys = _known_keys(logs)
    found = [_rounds_of(log, keys) for log in logs]
    _compare([result["log"] for result in results], found)
    for result, rounds in zip(results, found, strict=True):
        if rounds.problems:
            result["problems"] = [*result["problems"], *rounds.problems]
            result["verified"] = False
    return [_row(place, found) for place in sorted(found[0].transcripts)] if found else []


def _row(place: Place, found: Sequence[Rounds]) -> dict[str, Any]:
    first = found[0]
    transcript, result = first.transcripts[place], first.results.get(place, {})
    alike = sum(place in each.transcripts and each.transcripts[place].digest == transcript.digest for each in found)
    return {
        "run": place[0],
        "round": place[1],
        "sha256": transcript.digest,
        "silos": list(transcript.silos),
        "signed": sorted(first.signed.get(place, ())),
        "keys_not_vouched_for": sorted(first.unvouched.get(place, ())),
        "committed": result.get("committed"),
        "aggregate": result.get("aggregate", ""),
        "survivors": list(result.get("survivors", ())),
        "verdicts": dict(result.get("verdicts", {})),
        "logs_alike": alike,
    }


def _known_keys(logs: Iterable[Path]) -> dict[str, set[bytes]]:
    """By party, the keys that its own log is signed by or that another log has pinned for it."""
    keys: dict[str, set[bytes]] = {}
    for log in logs:
        for path in sorted((log / "keys").glob("*.vkey")):
            try:
                key = parse_verifier_key(path.read_text(encoding="utf-8").splitlines()[0])
            except (FedSiloError, OSError, UnicodeError, IndexError):
                continue  # named by the verification of the log
            keys.setdefault(key.name, set()).add(key.public_bytes)
    return keys


def _rounds_of(log: Path, keys: Mapping[str, set[bytes]]) -> Rounds:
    rounds = Rounds()
    try:
        for record in read_records(log):
            if record["event"] in EVENTS:
                _add(rounds, record, keys)
    except FedSiloError:
        pass  # what cannot be read is named by the verification of the log
    return rounds


def _add(rounds: Rounds, record: Mapping[str, Any], keys: Mapping[str, set[bytes]]) -> None:
    place = (str(record.get("run", "")), int(record.get("round", 0)))
    where = f"record {record['seq']}: round {place[1]} of run {place[0]}"
    try:
        wrong = _wrong_with(rounds, place, record["event"], record["detail"], keys)
    except (KeyError, TypeError, ValueError, AttributeError, PeerError):
        wrong = f"its {record['event']} is malformed"
    if wrong:
        rounds.problems.append(f"{where}: {wrong}")


def _wrong_with(
    rounds: Rounds, place: Place, event: str, detail: Mapping[str, Any], keys: Mapping[str, set[bytes]]
) -> str:
    if event == "round.equivocation":
        return "somebody signed two transcripts of it; both are in this record"
    if event == "round.transcript":
        transcript = transcript_from_canonical(canonical_json(detail["transcript"]).decode())
        known = rounds.transcripts.setdefault(place, transcript)
        if fields := conflict(known, transcript):
            return f"a second transcript, which differs in {', '.join(fields)}"
        if transcript.digest != detail["sha256"] or (transcript.run, transcript.round) != place:
            return "the transcript is not the one that the record names"
        party = str(detail["party"])
        vouched = keys.get(party, set())
        if vouched and not _by_any(transcript, party, vouched, bytes.fromhex(detail["signature"])):
            return f"its transcript is not signed by {party}"
        return ""
    of_round = rounds.transcripts.get(place)
    if of_round is None:
        return ""  # before what retention left, or the round went on without this party
    if detail["sha256"] != of_round.digest:
        return f"its {event.partition('.')[2]} belongs to another transcript"
    if event == "round.result":
        rounds.results[place] = detail
        return ""
    for silo, signature in detail["signatures"].items():
        party, named = silo_id(of_round.federation, silo), bytes.fromhex(detail["keys"][silo])
        vouched = keys.get(party, set())
        if vouched and named not in vouched:
            return f"the key of {silo} is not the one that the logs know"
        if silo not in of_round.silos or not _by_any(of_round, party, {named}, bytes.fromhex(signature)):
            return f"the signature of {silo} does not verify"
        rounds.signed.setdefault(place, set()).add(silo)
        if not vouched:
            rounds.unvouched.setdefault(place, set()).add(silo)
    return ""


def _by_any(transcript: Transcript, party: str, keys: Iterable[bytes], signature: bytes) -> bool:
    return any(is_signed(transcript, party, Ed25519PublicKey.from_public_bytes(key), signature) for key in keys)


def _compare(names: Sequence[str], found: Sequence[Rounds]) -> None:
    """The same round in two logs is one round; a difference is a problem of both."""
    for place in sorted({place for rounds in found for place in rounds.transcripts}):
        having = [(name, rounds) for name, rounds in zip(names, found, strict=True) if place in rounds.transcripts]
        first_name, first = having[0]
        for name, rounds in having[1:]:
            differing = first.transcripts[place].differences(rounds.transcripts[place])
            ours, theirs = first.results.get(place), rounds.results.get(place)
            if differing:
                what = f"another transcript than in the log of {{}}: {', '.join(differing)} differ"
            elif ours is not None and theirs is not None and dict(ours) != dict(theirs):
                what = "another result than in the log of {}"
            else:
                continue
            for log, other in ((rounds, first_name), (first, name)):
                log.problems.append(f"round {place[1]} of run {place[0]} has {what.format(other)}")

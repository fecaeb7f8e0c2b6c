"""Proofs that records are in an audit log: made from its folder, checked without it (threat T38).

A proof is a record's line, the RFC 6962 path from it to the root of a signed checkpoint, that checkpoint, and the
public keys that it is signed with. Nothing is handed out that does not hold: every proof is checked by the function
that checks one, and before a range is exported the log is verified as a whole (`audit_verify`, which shares no code
with this). An export ends where the newest checkpoint ends; when one is checked, every record in it needs its proof.

    DIR/records.jsonl   the lines, byte for byte
    DIR/proofs.json     {log, key, note, size, keys, proofs: [{seq, inclusion}]}

Whoever checks needs the log's key by another way than the proof: `key`, 64 digits. Does not show: that a log with that
key is the one that others countersigned (the names of those that did are told), or what comes after the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import (
    COSIGNATURE_V1,
    LOG_SIGNATURE,
    VerifierKey,
    check_name,
    cosigned_at,
    open_checkpoint,
    parse_checkpoint,
    parse_note,
    parse_verifier_key,
)
from fedsilo.audit.merkle import MerkleTree, leaf_hash, verify_inclusion
from fedsilo.audit.reader import leaf_hashes, read_lines, read_note, removed
from fedsilo.audit.record import link_of, parse_record
from fedsilo.files.durable import read_regular, write_durably
from fedsilo.protocol.errors import ConflictError, NotFoundError, UsageError, VerificationError

RECORDS, PROOFS = "records.jsonl", "proofs.json"
KEY_DIGITS = 64
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Proved:
    """One record with its proof.

    Attributes:
        inclusion: the path to the root; None where none was given.
    """

    seq: int
    line: bytes
    inclusion: Sequence[bytes] | None


# ---- making --------------------------------------------------------------------------------------------


def prove(folder: Path, seq: int) -> dict[str, Any]:
    """Return one record with its proof: {seq, record, leaf, log, key, size, inclusion, note, keys}.

    Raises:
        NotFoundError: no such record, or no checkpoint covers it yet.
        VerificationError: the record is not what the checkpoint covers.
    """
    line = next(read_lines(folder, seq), None)
    if line is None:
        raise NotFoundError(f"{folder} has no record {seq}")
    if line[0] != seq:
        raise removed(folder, seq)
    bundle, (proved,) = _proved(folder, [line])
    return {
        "seq": seq, "record": line[1].decode(), "leaf": leaf_hash(line[1]).hex(), "log": bundle["log"],
        "key": bundle["key"], "size": bundle["size"], "inclusion": _in_hex(proved), "note": bundle["note"],
        "keys": bundle["keys"],
    }  # fmt: skip


def export_range(folder: Path, out: Path, first: int, last: int | None) -> dict[str, Any]:
    """Records `first` to `last` with a proof for each, into the new folder `out`.

    What no signed checkpoint covers yet is left out: nobody could check it.

    Returns:
        {out, first, last, records, proved, left_out, checkpoint_size}: `first` is later than asked where retention
        removed what came before; `left_out` counts the newest records of the range, which have no proof yet.

    Raises:
        ConflictError: `out` exists.
        NotFoundError: no such records, or no checkpoint covers the first of them yet.
        VerificationError: the log does not verify, or a proof does not hold. Nothing was written.
    """
    if out.exists():
        raise ConflictError(f"{out} exists already")
    (result,) = verify_logs([folder])
    if not result["verified"]:
        problem, *more = result["problems"]
        raise VerificationError(
            f"{folder} does not verify: {problem}" + (f" (and {len(more)} other problems)" if more else ""),
            hint="nothing was exported; `fedsilo audit verify` with the other parties' logs says where to look",
        )
    end = result["size"] if last is None else min(last + 1, result["size"])  # what is appended since was not verified
    lines = []
    for seq, line in read_lines(folder, first):
        if seq >= end:
            break
        lines.append((seq, line))
    if not lines:
        raise NotFoundError(f"{folder} has no records in that range")
    bundle, proved = _proved(folder, lines)
    bundle["proofs"] = [{"seq": each.seq, "inclusion": _in_hex(each)} for each in proved]
    out.mkdir(parents=True)
    write_durably(out / RECORDS, b"".join(each.line + b"\n" for each in proved))
    write_durably(out / PROOFS, json.dumps(bundle, indent=1, ensure_ascii=False).encode() + b"\n")
    return {
        "out": str(out), "first": proved[0].seq, "last": proved[-1].seq, "records": len(proved), "proved": len(proved),
        "left_out": len(lines) - len(proved), "checkpoint_size": bundle["size"],
    }  # fmt: skip


def _proved(folder: Path, lines: Sequence[tuple[int, bytes]]) -> tuple[dict[str, Any], list[Proved]]:
    """{log, key, note, size, keys}, and the records among these that the note's checkpoint covers.

    Raises:
        NotFoundError: no checkpoint covers the first of them.
        VerificationError: a proof does not hold.
    """
    covering = covering_note(folder, lines[-1][0]) or covering_note(folder, lines[0][0], newest=True)
    if covering is None:
        raise not_covered(lines[0][0])
    note, size = covering
    tree = MerkleTree()  # after the note: a daemon that goes on writing signs only what can be read by then
    for leaf in leaf_hashes(folder):
        tree.append(leaf)
    own, keys = _keys_of(folder)
    checkpoint = open_checkpoint(note, own)
    if checkpoint.size != size or size > tree.size:
        raise VerificationError(f"{folder} was changed while it was read: its checkpoint at {size} is beyond its end")
    proved = [Proved(seq, line, tree.inclusion(seq, size)) for seq, line in lines if seq < size]
    if problems := _problems_of(proved, size, checkpoint.root):
        raise VerificationError(
            f"{folder} does not verify, or was changed while it was read: {next(iter(problems.values()))}"
        )
    return {"log": own.name, "key": own.public_bytes.hex(), "note": note, "size": size, "keys": keys}, proved


def _in_hex(proved: Proved) -> list[str]:
    return [part.hex() for part in proved.inclusion or ()]


def not_covered(seq: int) -> NotFoundError:
    """The error that says why a record that is there cannot be proved yet."""
    return NotFoundError(f"no signed checkpoint covers record {seq} yet", hint="one is made every round and at stop")


def covering_note(folder: Path, seq: int, *, newest: bool = False) -> tuple[str, int] | None:
    """The (note, size) that covers record `seq`: the earliest with a cosignature if there is one, else the earliest."""
    paths = sorted(path for path in (folder / "checkpoints").glob("*.note") if path.stem.isdecimal())
    paths = [path for path in paths if int(path.stem) > seq]
    if not paths:
        return None
    notes = [(read_note(path), int(path.stem)) for path in (paths[-1:] if newest else paths)]
    return next((item for item in notes if item[0].rpartition("\n\n")[2].count("\n") > 1), notes[0])


def _keys_of(folder: Path) -> tuple[VerifierKey, list[str]]:
    """(the log's own key, the lines of all its keys). Raises VerificationError: its own is missing or damaged."""
    own = folder / "keys" / "log.vkey"
    if not own.is_file():
        raise VerificationError(f"{folder}: keys/log.vkey is missing")
    paths = [own, *sorted(path for path in (folder / "keys").glob("*.vkey") if path != own)]
    lines = [line for path in paths for line in read_note(path).splitlines()]
    return parse_verifier_key(lines[0] if lines else ""), lines


# ---- checking ------------------------------------------------------------------------------------------


def check(path: Path, key: str = "") -> dict[str, Any]:
    """Check what `export_range` or `prove` made, without the log.

    Args:
        path: folder of an export, or file with what `prove` printed, as JSON or as the command's envelope.
        key: the log's key as its owner published it, 64 hex digits; empty: the one given with the proof, unproved.

    Returns:
        {path, log, key, key_compared, size, records, proved, first, last, cosigned, verified, problems}. Verified
        means that every record is proved; `proved` is 0 where the checkpoint itself, or what is said of it, is wrong.

    Raises:
        NotFoundError: nothing is there.
        UsageError: `key` is not 64 hex digits.
        VerificationError: what is there is no proof.
    """
    if key and not _is_key(key.lower()):
        raise UsageError("a log's key has 64 hex digits", hint="`fedsilo audit verify LOG --json` prints it as `key`")
    bundle_path = path / PROOFS if path.is_dir() else path
    if not bundle_path.is_file():
        raise NotFoundError(f"{bundle_path} does not exist, or is no file")
    try:
        bundle = json.loads(read_regular(bundle_path))
        if "schema" in bundle:
            bundle = bundle["data"]
        proved = _records_of_export(path, bundle) if path.is_dir() else [_record_of(bundle)]
        keys = [parse_verifier_key(line) for line in bundle["keys"]]
        note, size = str(bundle["note"]), int(bundle["size"])
        note.encode()
        log, given = check_name(str(bundle["log"])), str(bundle["key"])  # both are printed, whoever wrote them
        if not _is_key(given):
            raise ValueError("its key is none")
    except _MALFORMED as error:
        raise VerificationError(f"{bundle_path} is no proof: {str(error)[:80]}") from error
    problems: list[str] = []
    cosigned: list[str] = []
    failed: dict[int, str] = {each.seq: "" for each in proved}
    if not note:
        size = 0
        problems.append("no signed checkpoint covers these records: nothing is proved")
    else:
        own = _signer(note, keys)
        checkpoint = open_checkpoint(note, own)
        cosigned = _cosigners(note, keys, own.name, problems)
        signed = checkpoint.size, own.name, own.public_bytes.hex()
        if (size, log, given) != signed:
            problems.append("log, key or size beside the checkpoint are not those that it is signed with")
        size, log, given = signed
        if key and given != key.lower():
            problems.insert(0, f"it is signed with the key {given}, not with the one given")
        faults = _problems_of(proved, checkpoint.size, checkpoint.root)
        failed = faults if not problems else failed
        problems += _counted(faults.values())
    return {
        "path": str(path), "log": log, "key": given, "key_compared": bool(key), "size": size, "records": len(proved),
        "proved": len(proved) - len(failed), "first": proved[0].seq, "last": proved[-1].seq, "cosigned": cosigned,
        "verified": not problems, "problems": problems,
    }  # fmt: skip


def _is_key(text: str) -> bool:
    return len(text) == KEY_DIGITS and not set(text) - set("0123456789abcdef")


def _record_of(bundle: dict[str, Any]) -> Proved:
    """Return the record of a bundle. Raises VerificationError: the leaf hash beside the record is not its own."""
    inclusion = [bytes.fromhex(part) for part in bundle["inclusion"]]
    line, leaf = str(bundle["record"]).encode(), bundle.get("leaf")
    if "leaf" in bundle and leaf != leaf_hash(line).hex():
        raise VerificationError("the leaf hash beside the record is not that of the record")
    return Proved(int(bundle["seq"]), line, inclusion)


def _records_of_export(folder: Path, bundle: dict[str, Any]) -> list[Proved]:
    """The lines of the export, each with the proof that was given for it.

    Raises:
        NotFoundError: there are no records.
        VerificationError: a proof names no line here, or two prove the same.
    """
    if not (folder / RECORDS).is_file():
        raise NotFoundError(f"{folder / RECORDS} does not exist, or is no file")
    lines = read_regular(folder / RECORDS).split(b"\n")
    if lines.pop() or not lines:
        raise VerificationError(f"{folder / RECORDS} does not end with a whole line")
    first = parse_record(lines[0])["seq"]
    proofs = {int(item["seq"]): [bytes.fromhex(part) for part in item["inclusion"]] for item in bundle["proofs"]}
    strange = set(proofs) - set(range(first, first + len(lines)))
    if strange or len(proofs) != len(bundle["proofs"]):
        raise VerificationError(f"{folder / PROOFS} proves records that are not in {RECORDS}, or one twice")
    return [Proved(seq, line, proofs.get(seq)) for seq, line in enumerate(lines, first)]


def _signer(note: str, keys: Sequence[VerifierKey]) -> VerifierKey:
    """The log's own key among those given with the proof. Raises VerificationError: it is not there, or malformed."""
    parsed = parse_note(note)
    origin = parse_checkpoint(parsed.text).origin
    lines = {(item.name, item.key_id) for item in parsed.signatures}
    for key in keys:
        if key.name == origin and key.algorithm == LOG_SIGNATURE and (key.name, key.key_id) in lines:
            return key
    raise VerificationError(f"the key that {origin} signed the checkpoint with is not among those given with the proof")


def _cosigners(note: str, keys: Sequence[VerifierKey], log: str, problems: list[str]) -> list[str]:
    """Return who else countersigned the checkpoint, by the keys that came with it; what is wrong is added to
    `problems`."""
    cosigned = []
    for key in keys:
        if key.algorithm == COSIGNATURE_V1 and key.name != log:
            try:
                cosigned += [key.name] * (cosigned_at(note, key) is not None)
            except VerificationError as error:
                problems.append(error.message)
    return sorted(cosigned)


def _problems_of(proved: Sequence[Proved], size: int, root: bytes) -> dict[int, str]:
    """Return what is wrong, by record, with records that are to be in the tree of `size` leaves with this root."""
    problems: dict[int, str] = {}
    before = ""
    for each in proved:
        if trouble := _trouble(each, before, size, root):
            problems[each.seq] = f"record {each.seq} {trouble}"
        before = link_of(each.line)
    return problems


def _trouble(each: Proved, before: str, size: int, root: bytes) -> str:
    if each.inclusion is None:
        return "has no proof" + (f": the checkpoint ends at {size} records" if each.seq >= size else "")
    if not verify_inclusion(leaf_hash(each.line), each.seq, size, each.inclusion, root):
        return f"is not what the checkpoint at {size} covers"
    try:
        record = parse_record(each.line)
    except VerificationError as error:
        return f"is damaged: {error.message}"
    if record["seq"] != each.seq:
        return f"carries number {record['seq']}"
    if before and record["link"]["previous"] != before:
        return "does not follow the record before it"
    return ""


def _counted(problems: Iterable[str]) -> list[str]:
    """Problems that differ in their numbers only are told once."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"[0-9]+", "#", problem), []).append(problem)
    return [first + (f" (and {len(more)} more of this kind)" if more else "") for first, *more in kinds.values()]

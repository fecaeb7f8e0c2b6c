"""Verify FedSilo audit logs, offline and alone: `python audit_verify.py [--min-witnesses N] LOG...`

This one file needs Python and the `cryptography` package: read it, copy it to your own machine, and give it the log
folders of all sides, for they vouch for each other. Each log alone: records number on without a gap and each names the
hash of the one before; every signed checkpoint carries the log's signature and the RFC 6962 root of exactly these
records; every cosignature verifies. Of records that retention removed, leaf hashes are left (N.leaves), and other
parties' cosignatures show how old they were then: a year at least, which is the least that a policy may say. Given
other parties' logs, only those by keys that one of them has too show it. All logs together: each holds, in
`witnessed/`, the newest checkpoint of every other party that it countersigned, which must fit that party's records and
be among its checkpoints; copies of a log are compared. So a changed byte, a dropped end, a changed order and a log
rebuilt under another key show, as long as one other party is honest. Whoever countersigned a checkpoint is a witness of
all records up to it: --min-witnesses demands so many for all but the last 24 hours. Not covered: records after the
newest checkpoint (`unsigned`), lies told when a record was written, witnesses that a forger invented, unless their logs
are given, and what records mean and people signed (`fedsilo audit verify` does that).
Compare the `key` printed for each log with the one that its owner published. Exit status 0, or 7 if anything is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from array import array
from base64 import b64decode, b64encode
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

LOG_SIGNATURE, COSIGNATURE = 1, 4  # C2SP signature types
NOTE_BYTES_MAX, LINE_BYTES_MAX, LEAVES_MAX = 1 << 16, 1 << 20, 1 << 26  # no honest file or line has more bytes
YEAR_SECONDS, DAY_SECONDS = 365 * 86_400, 86_400  # parties' clocks may differ by a day
PROBLEMS_MAX, UNWITNESSED_HOURS_MAX = 20, 24  # problems that differ in their numbers only are told once and counted
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, InvalidSignature
)  # fmt: skip


class Further(TypedDict, total=False):  # what `fedsilo audit verify` adds
    clocks: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    keys_not_vouched_for: list[str]
    orders: dict[str, int]


class LogResult(Further):
    log: str
    path: str
    verified: bool
    problems: list[str]
    size: int
    origin: str
    root: str
    cosigned: dict[str, int]
    witnesses: list[list[int]]
    checkpoints: int
    unsigned: int
    hashes_only: int
    notices: list[str]
    key: str
    suspects: list[int]


def shown(text: object) -> str:  # one line, without what a terminal would obey or not show
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def read(path: Path, most: int = NOTE_BYTES_MAX) -> bytes:
    if path.is_file() and path.stat().st_size > most:  # a pipe would never end
        raise ValueError(f"it has more than {most} bytes")
    return path.read_bytes() if path.is_file() else b""


def number(digits: str) -> str:  # as RFC 8785 spells it, behind a mark: the shortest digits that mean the same
    value = float(digits)
    if value.is_integer() and abs(value) < 1 << 53:
        return f"\0{int(value)}"
    sign, shortest, exponent = Decimal(repr(value)).normalize().as_tuple()
    text, point = "".join(map(str, shortest)), len(shortest) + int(exponent)
    if 0 < point <= 21:
        text = text[:point].ljust(point, "0") + (f".{text[point:]}" if text[point:] else "")
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{text}"
    else:
        text = f"{text[0]}{'.' * (len(text) > 1)}{text[1:]}e{point - 1:+d}"
    return "\0" + "-" * sign + text


def parsed(line: bytes) -> dict[str, Any]:  # raises ValueError: not canonical JSON, which two readers might read apart
    record = json.loads(line.decode(), parse_int=number, parse_float=number, parse_constant=number)
    text = json.dumps(record, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    if re.sub(r'"\\u0000([^"]*)"', r"\1", text).encode() != line:
        raise ValueError("not in canonical form")
    return dict(json.loads(line))


def roots_at(leaves: bytes | bytearray, sizes: set[int]) -> dict[int, bytes]:
    """The RFC 6962 root of the first n leaves (32 bytes each), for every n in `sizes` that the log reaches."""
    complete: list[bytes] = []  # roots of complete subtrees, largest first, as the bits of the size say
    roots: dict[int, bytes] = {}
    for size in range(len(leaves) // 32 + 1):
        if size:
            node = bytes(leaves[32 * size - 32 : 32 * size])
            for _ in range((size & -size).bit_length() - 1):  # each trailing zero bit completes one more subtree
                node = hashlib.sha256(b"\x01" + complete.pop() + node).digest()
            complete.append(node)
        if size in sizes:
            root = complete[-1] if complete else hashlib.sha256(b"").digest()
            for left in reversed(complete[:-1]):
                root = hashlib.sha256(b"\x01" + left + root).digest()
            roots[size] = root
    return roots


class Key:  # one line of a .vkey file: name + key id + base64(type, Ed25519 public key)
    def __init__(self, line: str) -> None:
        self.name, key_id, encoded = line.split("+", 2)
        self.kind, self.public = (data := b64decode(encoded, validate=True))[0], data[1:]
        self.key_id = hashlib.sha256(self.name.encode() + b"\n" + data).digest()[:4]
        if self.key_id.hex() != key_id or b64encode(data).decode() != encoded or not line.isprintable():
            raise ValueError("a key does not belong to its id")


class Note:  # a signed checkpoint: origin, size and root, an empty line, signature lines
    def __init__(self, data: bytes) -> None:
        body, _, tail = data.decode().rpartition("\n\n")
        self.text, (origin, size, root) = body + "\n", body.split("\n")
        self.origin, self.size, self.root = origin, int(size), b64decode(root, validate=True)
        if not tail.endswith("\n") or f"{origin}\n{abs(self.size)}\n{b64encode(self.root).decode()}\n" != self.text:
            raise ValueError("not a checkpoint")
        self.signatures: list[tuple[str, bytes, bytes]] = []
        for line in tail[:-1].split("\n"):
            dash, name, encoded = line.split(" ")
            blob = b64decode(encoded, validate=True)
            if dash != "—" or b64encode(blob).decode() != encoded:
                raise ValueError("not a signature line")
            self.signatures.append((name, blob[:4], blob[4:]))

    def signed_by(self, key: Key) -> bool:  # raises InvalidSignature: a line says that `key` signed, and is wrong
        found = [item[2] for item in self.signatures if item[:2] == (key.name, key.key_id)]
        for signature in found:
            time = signature[:8] if key.kind == COSIGNATURE else b""
            message = (b"cosignature/v1\ntime %d\n" % int.from_bytes(time, "big") if time else b"") + self.text.encode()
            Ed25519PublicKey.from_public_bytes(key.public).verify(signature[len(time) :], message)
        return bool(found)


class Log:  # one log folder, and what is wrong with it
    def __init__(self, path: Path) -> None:
        self.path, self.origin, self.size = path, "", 0
        self.found: dict[str, list[str]] = {}  # problems that differ in their numbers only, in the order found
        self.suspects, self.notices = list[int](), list[str]()  # first and last record to look at; what may be right
        self.leaves, self.times = bytearray(), array("q")  # 32 + 8 bytes of each record, however long it is
        self.own, self.keys = list[Key](), list[Key]()  # the log's signing and cosigning key; all in the folder
        self.roots, self.reach = dict[int, bytes](), dict[str, int]()  # witness -> largest size that it countersigned
        self.hashes_only = 0  # first records that are gone
        self.removals = list[tuple[int, int, int]]()  # records that say so: number, records removed, least age
        self.cosigned_at = list[tuple[int, int]]()  # (records, UTC seconds) of every cosignature of another party
        self._read_keys()
        self.notes, self.witnessed = self._read_notes("checkpoints"), self._read_notes("witnessed")
        self._read_segments()  # after the notes: a daemon that goes on writing signs only what is there by then

    def problem(self, text: str) -> None:
        self.found.setdefault(re.sub(r"[0-9]+", "#", text), []).append(shown(text))

    def problems(self) -> list[str]:
        told = [one + (f" (and {len(more)} more of this kind)" if more else "") for one, *more in self.found.values()]
        return told[:PROBLEMS_MAX] + [f"and {len(told) - PROBLEMS_MAX} other problems"] * (len(told) > PROBLEMS_MAX)

    def _read_keys(self) -> None:
        for path in sorted((self.path / "keys").glob("*.vkey")):
            try:
                keys = [Key(line) for line in read(path).decode().removesuffix("\n").split("\n")]
                if [key.kind for key in keys] != [LOG_SIGNATURE, COSIGNATURE] or len({key.name for key in keys}) != 1:
                    raise ValueError("not a log key and a cosigning key of one name")
                self.keys += keys
                if path.name == "log.vkey":
                    self.own, self.origin = keys, keys[0].name
            except _DAMAGED as error:
                self.problem(f"keys/{path.name} is damaged ({str(error)[:80]})")
        if not self.own:
            self.problem("keys/log.vkey is missing or damaged" if self.path.is_dir() else "no such folder")

    def _read_segments(self) -> None:
        previous, shift = "0" * 64, 0  # of the record before; records lacking so far: each gap is told once
        for name in sorted({path.stem for end in ("jsonl", "leaves") for path in self.path.glob(f"*.{end}")}):
            if name != f"{self.size:012d}":
                self.problem(f"{name}.jsonl: the log has {self.size} records before this segment")
            path, at = (self.path / f"{name}.{end}" for end in ("jsonl", "leaves"))
            if path.is_file() and os.access(path, os.R_OK):
                previous, shift = self._read_records(path, previous, shift)
            elif not os.access(at, os.R_OK) or at.stat().st_size > LEAVES_MAX or not (hashes := read(at, LEAVES_MAX)):
                self.problem(f"{name} has no records or leaf hashes that can be read")
            else:
                if self.size != self.hashes_only or len(hashes) % 32:
                    self.problem(f"{name}.leaves is damaged, or stands behind records")
                self.leaves, previous = self.leaves + hashes, hashes[-32:].hex()
                self.size = self.hashes_only = len(self.leaves) // 32
                self.times.extend([0] * (self.size - len(self.times)))
        if self.hashes_only > max((size for _, size, _ in self.removals), default=0):
            self.problem(f"of the first {self.hashes_only} records leaf hashes are left, and no record says why")

    def _read_records(self, path: Path, previous: str, shift: int) -> tuple[str, int]:
        with path.open("rb") as stream:
            while line := stream.readline(LINE_BYTES_MAX + 1):
                content, t = line[:-1], self.times[-1] if self.times else 0
                if line[-1:] != b"\n":
                    long = f"record {self.size} is longer than any may be" if len(line) > LINE_BYTES_MAX else ""
                    self.problem(f"{path.name}: {long or 'the last line is not complete (cut, or being written)'}")
                    break
                try:
                    once = [content.count(key) for key in (b'"seq":', b'"link":', b'"previous":')] == [1, 1, 1]
                    record = parsed(content) if once else {}  # a reader that searches finds the same ones
                    gap, link, t = record["seq"] - self.size, record["link"]["previous"], int(record["t"])
                    if record["event"] == "retention.records":
                        least = max(YEAR_SECONDS, int(record["detail"].get("older_than_seconds", 0)))
                        self.removals.append((self.size, int(record["detail"]["size"]), least))
                except _DAMAGED:
                    trouble = "is damaged"
                else:
                    trouble = "" if link == previous else "does not follow the record before it"
                    if gap != shift:
                        trouble, shift = f"carries number {record['seq']}: records are missing or out of order", gap
                if trouble:
                    self.problem(f"record {self.size} {trouble}")
                    self.suspects = self.suspects or [max(0, self.size - 1), self.size]
                self.leaves += (leaf := hashlib.sha256(b"\x00" + content).digest())
                self.times.append(t & (1 << 62) - 1)
                previous, self.size = leaf.hex(), self.size + 1
        return previous, shift

    def _read_notes(self, folder: str) -> list[tuple[str, Note]]:
        notes = []
        for path in sorted((self.path / folder).glob("*.note")):
            try:
                notes.append((f"{folder}/{path.name}", Note(read(path))))
            except _DAMAGED as error:
                self.problem(f"{folder}/{path.name} is damaged ({str(error)[:80]})")
        return notes

    def fits(self, note: Note) -> str:
        if note.size > self.size:
            return f"says {note.size} records, the log has {self.size}: its end was dropped"
        return "" if self.roots[note.size] == note.root else f"does not fit the first {note.size} records"

    def check_alone(self, others: list[Log]) -> None:  # others: parties whose keys folders vouch for keys
        vouched = {(key.name, key.public) for other in others for key in other.keys}
        if not self.notes and self.size:
            self.problem("no signed checkpoint covers the records")
        sound = 0  # records that a checkpoint bears out
        for name, note in self.notes:
            if note.origin != self.origin or not self._signed(name, note, self.own[0]):
                self.problem(f"{name} is not signed by this log's key")
            elif trouble := self.fits(note):
                self.problem(f"{name} {trouble}")
                self.suspects = self.suspects or [sound, note.size - 1]
            else:
                sound = note.size
            for key, time in self._cosigners(name, note):
                if key.name != self.origin:
                    self.reach[key.name] = max(self.reach.get(key.name, 0), note.size)
                    self.cosigned_at += [(note.size, time)] * (not others or (key.name, key.public) in vouched)
        for name, note in self.witnessed:
            owner = [key for key in self.keys if key.name == note.origin and key.kind == LOG_SIGNATURE]
            owned = any(self._signed(name, note, key) for key in owner)
            if self.origin not in {key.name for key, _ in self._cosigners(name, note)} or not owned:
                self.problem(f"{name} lacks the signature of {note.origin} or this party's cosignature")
        self.check_removals()
        self.sound = not self.found

    def check_removals(self) -> None:  # records were old enough when the record of their removal was countersigned
        first = 0
        for seq, size, least in self.removals:
            known = min((time for reached, time in self.cosigned_at if reached >= size), default=None)
            gone = min((time for reached, time in self.cosigned_at if reached > seq), default=None)
            which = f"records {first} to {size - 1} were removed"
            if known is None or gone is None or gone == known:
                self.notices.append(f"{which} at an age that no cosignature proves")
            elif gone - known < least - DAY_SECONDS:
                ages = f"{(gone - known) // DAY_SECONDS} days old, not {least // DAY_SECONDS}"
                self.problem(f"{which} when their first cosignature was {ages}")
            first = size

    def _cosigners(self, name: str, note: Note) -> list[tuple[Key, int]]:  # with UTC seconds
        known = {(key.name, key.key_id): key for key in self.keys}
        keys = [known[item[:2]] for item in note.signatures if item[:2] in known]
        if len(keys) < len(note.signatures):
            self.problem(f"{name} carries a signature by a key that is not in keys/")
        times = {item[:2]: int.from_bytes(item[2][:8], "big") for item in note.signatures}
        signers = [key for key in keys if key.kind == COSIGNATURE and self._signed(name, note, key)]
        return [(key, times[key.name, key.key_id]) for key in signers]

    def _signed(self, name: str, note: Note, key: Key) -> bool:  # a wrong one is this log's problem if `name` is given
        try:
            return note.signed_by(key)
        except _DAMAGED:
            if name:
                self.problem(f"{name}: the signature of {key.name} is not valid")
            return False

    def check_against(self, other: Log) -> None:  # by what it countersigned or holds as a copy, if its signatures hold
        if (copy := other.origin == self.origin) and other.sound:  # a copy that does not verify is nobody's word
            if self.roots[shorter := min(self.size, other.size)] != other.roots[shorter]:
                self.problem(f"differs within the first {shorter} records from the copy in {other.path}")
            elif shorter < other.size:
                self.notices.append(f"ends {other.size - shorter} records before the copy {other.path}: older, or cut")
        elif not copy and other.own[1].public not in (known := {k.public for k in self.keys if k.name == other.origin}):
            self.reach.pop(other.origin, None)  # somebody of another key: one of the two was invented
        elif not copy and other.sound and known - {key.public for key in other.own}:
            self.problem(f"keys: it has a second key of {other.origin}, which does not sign that party's own log")
        for name, note in other.notes if copy else other.witnessed:
            if note.origin != self.origin or not self._signed("", note, other.own[not copy]):
                continue
            if not (ours := self._signed("", note, self.own[0])) and not copy:
                self.problem(f"{other.origin} countersigned this log under another key ({name}): it was rebuilt")
            if (trouble := self.fits(note)) and not copy:
                self.problem(f"the checkpoint {other.origin} countersigned ({name}) {trouble}")
            elif ours and not trouble and note.size not in {each.size for _, each in self.notes}:
                lost = f"checkpoints/{note.size:012d}.note is missing; {other.path} has it ({name})"
                (self.problem if note.size < self.size else self.notices.append)(lost)  # the last may be made since

    def check_witnesses(self, least: int) -> None:
        reached = ([self.size] * (least == 0) or sorted(self.reach.values(), reverse=True)[least - 1 :] or [0])[0]
        hours = (self.times[-1] - self.times[reached]) / 3_600_000 if reached < self.size else 0
        if self.size and (not reached or hours > UNWITNESSED_HOURS_MAX):
            found = f"{least} witnesses demanded, {len(self.reach)} found"
            self.problem(f"{found}; {least} vouch for the first {reached} of {self.size} records only")

    def result(self) -> LogResult:
        sizes = sorted({note.size for _, note in self.notes})
        name = re.sub(r"[a-z]+://[^/]+/(?:silo/([^/]+)|(coordinator)/.*)", r"\1\2", self.origin) or self.path.name
        return {
            "log": shown(name),
            "path": str(self.path),
            "verified": not self.found,
            "problems": self.problems(),
            "size": self.size,
            "origin": self.origin,
            "root": self.roots.get(self.size, b"").hex(),
            "cosigned": self.reach,
            "witnesses": [[size, sum(reached >= size for reached in self.reach.values())] for size in sizes],
            "checkpoints": len(sizes),
            "unsigned": self.size - min(self.size, max(sizes, default=0)),
            "hashes_only": self.hashes_only,
            "notices": [shown(text) for text in self.notices],
            "key": self.own[0].public.hex() if self.own else "",
            "suspects": self.suspects,
        }


def verify_logs(paths: list[Path], min_witnesses: int = 0) -> list[LogResult]:
    """One result per log folder."""
    logs = [Log(path) for path in paths]
    for log in logs:
        notes = {note.size for other in logs for _, note in other.notes + other.witnessed if note.origin == log.origin}
        log.roots = roots_at(log.leaves, notes | {other.size for other in logs if other.origin == log.origin})
        if log.own:
            log.check_alone([each for each in logs if each.own and each.origin != log.origin])
    for log in logs:
        for other in (each for each in logs if each is not log and log.own and each.own):
            log.check_against(other)
        log.check_witnesses(min_witnesses)
    return [log.result() for log in logs]


def main(arguments: list[str]) -> int:
    least = arguments[1] if arguments[:1] == ["--min-witnesses"] and len(arguments) > 1 else ""
    paths = [Path(item) for item in (arguments[2:] if least.isdecimal() else arguments)]
    paths = [path if (path / "keys").exists() or not (path / "audit").is_dir() else path / "audit" for path in paths]
    if not paths or any(str(path).startswith("-") for path in paths):
        print(__doc__)
        return 2
    results = verify_logs(paths, int(least or 0))
    for one in results:
        verdict = f"{one['log']}: {'verified' if one['verified'] else 'NOT VERIFIED'}, {one['size']} records"
        print(f"{verdict}, {one['unsigned']} of them not signed yet\n    {shown(one['path'])}\n    key {one['key']}")
        print(f"    witnesses {one['cosigned']}", *one["problems"], sep="\n    problem: ")
        print(*(f"    notice: {text}\n" for text in one["notices"]), sep="", end="")
    return 0 if all(one["verified"] for one in results) else 7


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

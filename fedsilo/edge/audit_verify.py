"""Verify FedSilo audit logs, offline and alone: `python audit_verify.py LOG...`

This one file needs Python and the `cryptography` package, nothing else of FedSilo: read it, copy it to a machine of
your own, and give it the log folders of all sides you have, for they vouch for each other.

Each log alone: records number on without a gap and each names the hash of the one before; every signed checkpoint
carries the log's signature and the RFC 6962 root of exactly the records in front of you; every cosignature verifies.
All given logs together: each log holds, in `witnessed/`, the newest checkpoint of every other party that it has
countersigned; that checkpoint must fit the other party's records. So a changed byte, a dropped end, a changed order
and a log rebuilt under another key show, the last two even if the checkpoints were rebuilt as well, as long as one
other party's folder is honest. Two copies of one log are compared as well.

Not covered: records after the newest checkpoint (counted as `unsigned`) and lies told when a record was written.
Compare the `key` printed for each log with the one its owner published. Exit status 0, or 7 if anything is wrong.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

LOG_SIGNATURE, COSIGNATURE = 1, 4  # C2SP signature types
PROBLEMS_MAX = 20  # different ones; those that differ in their numbers only are told once and counted
_DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, InvalidSignature)  # of what is read


def roots_at(leaves: list[bytes], sizes: set[int]) -> dict[int, bytes]:
    """The RFC 6962 root of the first n leaves, for every n in `sizes` that the log reaches."""
    complete: list[bytes] = []  # roots of complete subtrees, largest first, as the bits of the size say
    roots: dict[int, bytes] = {}
    for size in range(len(leaves) + 1):
        if size:
            node = leaves[size - 1]
            for _ in range((size & -size).bit_length() - 1):  # each trailing zero bit completes one more subtree
                node = hashlib.sha256(b"\x01" + complete.pop() + node).digest()
            complete.append(node)
        if size in sizes:
            root = complete[-1] if complete else hashlib.sha256(b"").digest()
            for left in reversed(complete[:-1]):
                root = hashlib.sha256(b"\x01" + left + root).digest()
            roots[size] = root
    return roots


class Key:
    """One line of a .vkey file: name + key id + base64(type, Ed25519 public key)."""

    def __init__(self, line: str) -> None:
        self.name, key_id, encoded = line.split("+", 2)
        data = base64.b64decode(encoded, validate=True)
        self.kind, self.public = data[0], data[1:]
        self.key_id = hashlib.sha256(self.name.encode() + b"\n" + data).digest()[:4]
        if self.key_id.hex() != key_id or base64.b64encode(data).decode() != encoded or not line.isprintable():
            raise ValueError("a key does not belong to its id")

    def verify(self, text: str, signature: bytes) -> None:
        """Raises InvalidSignature."""
        message = text.encode()
        if self.kind == COSIGNATURE:  # 8 bytes of time, then the signature
            seconds = int.from_bytes(signature[:8], "big")
            message, signature = f"cosignature/v1\ntime {seconds}\n".encode() + message, signature[8:]
        Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)


class Note:
    """A signed checkpoint: origin, size and root, an empty line, signature lines."""

    def __init__(self, data: bytes) -> None:
        body, _, tail = data.decode().rpartition("\n\n")
        self.text = body + "\n"
        origin, size, root = body.split("\n")
        self.origin, self.size, self.root = origin, int(size), base64.b64decode(root, validate=True)
        if not tail.endswith("\n") or f"{origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n" != self.text:
            raise ValueError("not a checkpoint")
        self.signatures: list[tuple[str, bytes, bytes]] = []
        for line in tail[:-1].split("\n"):
            dash, name, encoded = line.split(" ")
            blob = base64.b64decode(encoded, validate=True)
            if dash != "—" or base64.b64encode(blob).decode() != encoded:
                raise ValueError("not a signature line")
            self.signatures.append((name, blob[:4], blob[4:]))

    def signed_by(self, key: Key) -> bool:
        """Whether `key` signed. Raises InvalidSignature: a line says so and is wrong."""
        found = [value for name, key_id, value in self.signatures if (name, key_id) == (key.name, key.key_id)]
        for signature in found:
            key.verify(self.text, signature)
        return bool(found)


class Log:
    """One log folder, and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, list[str]] = {}  # problems that differ in their numbers only, in the order found
        self.suspects: list[int] = []  # first and last record among which to look first
        self.leaves: list[bytes] = []
        self.own: list[Key] = []  # the log's signing key and its cosigning key
        self.keys: list[Key] = []  # all keys in the folder
        self.notes: list[tuple[str, Note]] = []
        self.witnessed: list[tuple[str, Note]] = []
        self.roots: dict[int, bytes] = {}
        self.origin, self.size = "", 0
        if not path.is_dir():
            self.problem("no such folder")
            return
        self._read_keys()
        self._read_records()
        self.notes = self._read_notes("checkpoints")
        self.witnessed = self._read_notes("witnessed")

    def problem(self, text: str) -> None:
        self.found.setdefault(re.sub(r"[0-9]+", "#", text), []).append(text)

    def problems(self) -> list[str]:
        told = [one + (f" (and {len(more)} more of this kind)" if more else "") for one, *more in self.found.values()]
        return told[:PROBLEMS_MAX] + [f"and {len(told) - PROBLEMS_MAX} other problems"] * (len(told) > PROBLEMS_MAX)

    def _read_keys(self) -> None:
        for path in sorted((self.path / "keys").glob("*.vkey")):
            try:
                keys = [Key(line) for line in path.read_bytes().decode().removesuffix("\n").split("\n")]
                if [key.kind for key in keys] != [LOG_SIGNATURE, COSIGNATURE] or len({key.name for key in keys}) != 1:
                    raise ValueError("not a log key and a cosigning key of one name")
            except _DAMAGED as error:
                self.problem(f"keys/{path.name} is damaged ({str(error)[:80]})")
                continue
            self.keys += keys
            if path.name == "log.vkey":
                self.own, self.origin = keys, keys[0].name
        if not self.own:
            self.problem("keys/log.vkey, the log's own key, is missing or damaged")

    def _read_records(self) -> None:
        previous, shift = "0" * 64, 0  # records lacking before this one: each gap is told once
        for path in sorted(self.path.glob("*.jsonl")):
            data = path.read_bytes()
            if path.stem != f"{self.size:012d}":
                self.problem(f"{path.name}: the log has {self.size} records before this segment")
            lines = data.split(b"\n")
            if lines.pop():
                self.problem(f"{path.name}: the last line is not complete (cut, or being written)")
            for line in lines:
                try:
                    record = json.loads(line, object_pairs_hook=_unique)
                    gap, link = record["seq"] - self.size, record["link"]["previous"]
                except _DAMAGED:
                    trouble = "is damaged"
                else:
                    trouble = "" if link == previous else "does not follow the record before it"
                    if gap != shift:
                        trouble = f"carries number {record['seq']}: records are missing or out of order"
                    shift = gap
                if trouble:
                    self.problem(f"record {self.size} {trouble}")
                    self.suspects = self.suspects or [max(0, self.size - 1), self.size]
                self.leaves.append(hashlib.sha256(b"\x00" + line).digest())
                previous, self.size = self.leaves[-1].hex(), self.size + 1

    def _read_notes(self, folder: str) -> list[tuple[str, Note]]:
        notes = []
        for path in sorted((self.path / folder).glob("*.note")):
            try:
                notes.append((f"{folder}/{path.name}", Note(path.read_bytes())))
            except _DAMAGED as error:
                self.problem(f"{folder}/{path.name} is damaged ({str(error)[:80]})")
        return notes

    def fits(self, note: Note) -> str:
        """What of the note the records do not bear out; empty if all of it."""
        if note.size > self.size:
            return f"says {note.size} records, the log has {self.size}: its end was dropped"
        return "" if self.roots[note.size] == note.root else f"does not fit the first {note.size} records"

    def check_alone(self) -> None:
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
            self._check_cosignatures(name, note)
        for name, note in self.witnessed:
            owners = [key for key in self.keys if key.name == note.origin and key.kind == LOG_SIGNATURE]
            if not any(self._signed(name, note, key) for key in owners) or not self._signed(name, note, self.own[1]):
                self.problem(f"{name} lacks the signature of {note.origin} or this party's cosignature")
            self._check_cosignatures(name, note)

    def _check_cosignatures(self, name: str, note: Note) -> None:
        known = {(key.name, key.key_id): key for key in self.keys}
        for signer, key_id, _ in note.signatures:
            if (signer, key_id) not in known:
                self.problem(f"{name} carries a signature by a key that is not in keys/")
            elif known[signer, key_id].kind == COSIGNATURE:
                self._signed(name, note, known[signer, key_id])

    def _signed(self, name: str, note: Note, key: Key) -> bool:
        """Whether `key` signed. A wrong signature is this log's problem, unless `name` is empty."""
        try:
            return note.signed_by(key)
        except _DAMAGED:
            if name:
                self.problem(f"{name}: the signature of {key.name} is not valid")
            return False

    def check_against(self, other: Log) -> None:
        """Judge this log by what `other` countersigned, if `other`'s signatures hold."""
        if other.origin == self.origin:  # a copy of the same log
            shorter = min(self.size, other.size)
            if self.roots[shorter] != other.roots[shorter]:
                self.problem(f"differs within the first {shorter} records from the copy in {other.path}")
            return
        for name, note in other.witnessed:
            if note.origin != self.origin or not self._signed("", note, other.own[1]):
                continue
            if not self._signed("", note, self.own[0]):
                self.problem(f"{other.origin} countersigned this log under another key ({name}): it was rebuilt")
            if trouble := self.fits(note):
                self.problem(f"the checkpoint {other.origin} countersigned ({name}) {trouble}")

    def result(self) -> dict[str, Any]:
        covered = max((note.size for _, note in self.notes), default=0)
        others = [key for key in self.keys if key.kind == COSIGNATURE and key.name != self.origin]
        cosigned = {key.name: note.size for _, note in self.notes for key in others if self._signed("", note, key)}
        return {
            "log": _short_name(self.origin) or self.path.name,
            "path": str(self.path),
            "verified": not self.found,
            "size": self.size,
            "problems": self.problems(),
            "suspects": self.suspects,
            "origin": self.origin,
            "key": self.own[0].public.hex() if self.own else "",
            "root": self.roots.get(self.size, b"").hex(),
            "checkpoints": len(self.notes),
            "unsigned": max(0, self.size - covered),
            "cosigned": cosigned,
        }


def verify_logs(paths: list[Path]) -> list[dict[str, Any]]:
    """One result per log folder: {log, path, verified, size, problems, origin, key, root, ...}."""
    logs = [Log(path) for path in paths]
    for log in logs:
        copies = {other.size for other in logs if other.origin == log.origin}
        notes = [note for other in logs for _, note in other.notes + other.witnessed if note.origin == log.origin]
        log.roots = roots_at(log.leaves, {log.size, *copies, *(note.size for note in notes)})
    for log in logs:
        if log.own:
            log.check_alone()
    for log in logs:
        for other in logs:
            if other is not log and log.own and other.own:
                log.check_against(other)
    return [log.result() for log in logs]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _short_name(origin: str) -> str:
    """`coordinator`, or the silo's name, from a SPIFFE-like origin."""
    parts = re.sub(r"^[a-z]+://", "", origin).split("/")
    if "silo" in parts[:-1]:
        return parts[parts.index("silo") + 1]
    return "coordinator" if "coordinator" in parts else origin


def main(arguments: list[str]) -> int:
    if not arguments or any(item.startswith("-") for item in arguments):
        print(__doc__)
        return 2
    results = verify_logs([Path(item) for item in arguments])
    for result in results:
        verdict = "verified" if result["verified"] else "NOT VERIFIED"
        print(f"{result['log']}: {verdict}, {result['size']} records, {result['unsigned']} of them not signed yet")
        print(f"    {result['path']}\n    key {result['key']}", *result["problems"], sep="\n    problem: ")
    return 0 if all(result["verified"] for result in results) else 7


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

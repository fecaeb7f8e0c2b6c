"""Appends every record of an audit log once to a file of JSON lines, for the site's own log shipper, as the log grows.

Needs the log's folder only; the daemon may run or not, and nothing is asked of it. Each record is checked as it is
read: well-formed, numbered on, and naming the hash of the one before. What was handed on is kept in a position file,
which is replaced durably; after kill -9 the next start goes on from there, and first checks that the log still holds
what was handed on.

A file gets each record exactly once: the position says how long the file was, and what a kill left beyond it is cut
off if it is how the records after the position begin; anything else there is not this exporter's and is refused.

Only what `chosen` picks leaves: the fields on its list, and of these only numbers, digests, codes and short names. A
name with any other character is replaced by WITHHELD and its field is listed, so that nothing that another party
wrote can steer a parser or a person (threat T37). Never exported: facts, salt, clocks of the host, free text.
What is not covered: signatures. Chained records can be rewritten as a whole by whoever has the folder;
`fedsilo audit verify` and the hash in each exported record show that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedsilo.audit.reader import BATCH_RECORDS, LogReader, Place, log_key_of
from fedsilo.files.durable import fsync_directory, write_all, write_durably
from fedsilo.protocol.errors import ConflictError, OperationError, VerificationError

POSITION_VERSION = 1
SCHEMA = "fedsilo.audit/1"
WITHHELD = "(withheld)"
LIST_ITEMS_MAX = 16
LINE_BYTES_MAX = 8192  # the longest syslog message that every receiver should take (RFC 5425, 4.3.1)

_NAME = re.compile(r"[A-Za-z0-9_.:/@+-]{1,128}")
_DETAIL: Final = (
    "release", "person", "certificate", "expires_at", "name", "mode", "version", "code", "plan", "port", "run",
    "quarantine", "bytes", "size", "root", "refused_event", "backward_milliseconds",
    "forward_milliseconds",
)  # fmt: skip
_ROUTING: Final = ("run", "round", "step", "attempt", "kind", "sequence", "peer", "direction")


# ---- the line ---------------------------------------------------------------------------------------


def chosen(record: Mapping[str, Any], leaf: str, origin: str) -> dict[str, Any]:
    """The fields that may be exported.

    Args:
        record: as parsed from the log.
        leaf: hash of its line, hex: with it the exported copy can be compared with the log, record by record.
        origin: name of the log.
    """
    withheld: list[str] = []

    def safe(name: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str) and (not value or _NAME.fullmatch(value)):
            return value
        withheld.append(name)
        return WITHHELD

    picked: dict[str, Any] = {
        "schema": SCHEMA, "log": safe("log", origin), "seq": record["seq"], "t": record["t"], "event": record["event"],
        "actor": safe("actor", record["actor"]), "leaf": leaf, "previous": record["link"]["previous"],
    }  # fmt: skip
    picked |= {name: safe(name, record[name]) for name in _ROUTING if record.get(name) not in (None, "")}
    if "decision" in record:
        picked["decision"] = record["decision"]
    if record.get("reasons"):
        picked["reasons"] = [safe("reasons", code) for code in record["reasons"][:LIST_ITEMS_MAX]]
    rules = [rule for rule in record.get("rules", ()) if rule.get("outcome") in ("deny", "hold")]
    if rules:
        picked["rules"] = [_rule(rule, safe) for rule in rules[:LIST_ITEMS_MAX]]
    if len(rules) > LIST_ITEMS_MAX or len(record.get("reasons", ())) > LIST_ITEMS_MAX:
        picked["shortened"] = True
    blocks = {
        "policy": ("effective", "file", "code", "schema"),
        "payload": ("bytes", "sha256", "hmac_sha256", "bytes_before", "sha256_before", "archived"),
        "detail": _DETAIL,
    }
    for block, names in blocks.items():
        values = record.get(block, {})
        shown = {name: safe(f"{block}.{name}", values[name]) for name in names if name in values}
        if shown:
            picked[block] = shown
    if "decision" in record["link"]:
        picked["decided_by"] = record["link"]["decision"]
    if withheld:
        picked["withheld"] = sorted(set(withheld))
    return picked


def _rule(rule: Mapping[str, Any], safe: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A rule that denied or held: its names, and measured value and limit where these are numbers."""
    shown = {name: safe(f"rules.{name}", rule[name]) for name in ("rule", "outcome", "reason") if name in rule}
    for name in ("measured", "limit", "line"):
        value = rule.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown[name] = value
    return shown


def export_line(event: Mapping[str, Any], product_version: str) -> str:
    """Chosen fields as one line of ASCII of at most LINE_BYTES_MAX bytes."""
    line = _json({**event, "product_version": product_version})
    if len(line) > LINE_BYTES_MAX:  # sixteen rules with long names: the verdict and its first reason still fit
        short = {**event, "rules": event.get("rules", ())[:1], "reasons": event.get("reasons", ())[:1]}
        line = _json({**short, "shortened": True, "product_version": product_version})
    return line


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


# ---- the position file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """Where an export stopped, so that a restart goes on from there.

    Attributes:
        log: the log's key, so that a position is never used for another log.
        target: format and file; a position belongs to one of each.
        place: up to which everything was handed on.
        bytes: length of the output file there.
        product_version: of the program that wrote on from there: a line says it, so a torn one is told by it.
    """

    log: str
    target: str
    place: Place
    bytes: int = 0
    product_version: str = ""

    def save(self, path: Path) -> None:
        """Durably. Raises OperationError."""
        fields = {
            "v": POSITION_VERSION, "log": self.log, "target": self.target, "seq": self.place.seq,
            "previous": self.place.previous, "bytes": self.bytes, "product_version": self.product_version,
        }  # fmt: skip
        write_durably(path, json.dumps(fields).encode() + b"\n", mode=0o600)


def read_position(path: Path, *, log: str, target: str) -> Position | None:
    """The position kept in `path`, or None where there is none yet.

    Raises:
        ConflictError: it belongs to another log, format or destination, or is no position file.
    """
    if not path.exists():
        return None
    hint = "give another --position, or remove it to begin at the first record"
    try:
        content = json.loads(path.read_bytes())
        version = content["v"]
        position = Position(
            str(content["log"]), str(content["target"]), Place(int(content["seq"]), str(content["previous"])),
            int(content["bytes"]), str(content.get("product_version", "")),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise ConflictError(f"{path} is not a position file", hint=hint) from error
    if version != POSITION_VERSION or position.log != log or position.target != target:
        raise ConflictError(f"{path} belongs to another log, format or destination", hint=hint)
    return position


# ---- the export --------------------------------------------------------------------------------------


class Export:
    """Exports one log to one file, from where the position file says; durable after each batch.

    Attributes:
        records: exported so far.
        next: number of the next record.
    """

    def __init__(
        self,
        log: Path,
        out: Path,
        position_path: Path,
        *,
        target: str,
        product_version: str,
        first: int = 0,
        batch_records: int = BATCH_RECORDS,
    ) -> None:
        """Open log, position and file.

        Args:
            log: its folder.
            out: the file.
            position_path: where the position is kept.
            target: see `Position`.
            product_version: of this program.
            first: record to begin at where there is no position.
            batch_records: read, written and made durable at once.

        Raises:
            ConflictError: the file holds what no position accounts for, or less than the position says; or as
                `read_position`.
            NotFoundError, VerificationError: as `LogReader`.
            OperationError: the file cannot be written.
        """
        found = read_position(position_path, log=log_key_of(log)[0], target=target)
        self._log, self._out, self._position_path, self._target = log, out, position_path, target
        self._version, self._batch_records = product_version, batch_records
        self._reader = LogReader(log, found.place if found else None, first=first)
        self._bytes = found.bytes if found else 0
        self.records = 0
        try:
            self._descriptor = self._opened(found)
        except OSError as error:
            raise OperationError(f"{out}: {error.strerror}") from error

    @property
    def next(self) -> int:
        return self._reader.place.seq

    def run(self, wait: Callable[[], bool] | None = None, stopped: Callable[[], bool] = lambda: False) -> None:
        """Export records until there is nothing more, `wait` or `stopped` says so, or the log does not verify.

        Args:
            wait: called when there is nothing more to read; False ends the export. None: do not wait at all.
            stopped: asked before each batch; True ends the export.

        Raises:
            VerificationError: see `LogReader.read`; everything before was exported and the position says so.
            ConflictError: somebody else wrote to the file.
            OperationError: the file or the position file cannot be written; the next start goes on from there.
        """
        self._save()  # before the first byte: what a kill leaves behind is then known to be ours
        try:
            while not stopped():
                if batch := self._reader.read(self._batch_records):
                    self._append(b"".join(self._line(record, after, self._version) for _, record, after in batch))
                    self.records += len(batch)
                    self._save()
                elif wait is None or not wait():
                    return
        finally:
            os.close(self._descriptor)

    def _opened(self, found: Position | None) -> int:
        """Open the file at its end by the position; cut off what a kill left beyond it."""
        there = self._out.exists()
        size = self._out.stat().st_size if there else 0
        if size and found is None:
            raise ConflictError(f"{self._out} exists already and no position file says how far it got")
        if there and size < self._bytes:
            raise ConflictError(
                f"{self._out} has {size} bytes; {self._bytes} were written",
                hint="it was cut or replaced; move it away (its position goes on), or remove both to begin again",
            )
        if found is not None and size > self._bytes and not self._is_ours(found):
            raise ConflictError(
                f"{self._out} holds what this export did not write after its first {self._bytes} bytes",
                hint="somebody else writes there; move it away (its position goes on), or remove both to begin again",
            )
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._out, flags, 0o640)
        self._bytes = self._bytes if there else 0
        if size > self._bytes:
            os.ftruncate(descriptor, self._bytes)
        fsync_directory(self._out.parent)
        return descriptor

    def _is_ours(self, found: Position) -> bool:
        """Return True if what the file holds beyond the position is how its next lines begin."""
        with self._out.open("rb") as stream:
            stream.seek(found.bytes)
            for line in self._lines_after(found):
                there = stream.read(len(line))
                if not line.startswith(there):
                    return False
                if len(there) < len(line):
                    return True
            return not stream.read(1)

    def _lines_after(self, found: Position) -> Iterator[bytes]:
        """The lines behind a position as the program wrote them that was killed, up to a record that is damaged."""
        with contextlib.suppress(VerificationError):
            reader = LogReader(self._log, found.place)
            while batch := reader.read():
                yield from (
                    self._line(record, after, found.product_version or self._version) for _, record, after in batch
                )

    def _line(self, record: Mapping[str, Any], after: Place, version: str) -> bytes:
        return export_line(chosen(record, after.previous, self._reader.origin), version).encode("ascii") + b"\n"

    def _append(self, data: bytes) -> None:
        try:
            if (size := os.fstat(self._descriptor).st_size) != self._bytes:
                raise ConflictError(
                    f"{self._out} has {size} bytes; {self._bytes} were written",
                    hint="it was cut, or somebody else writes there; stop the export before the file is moved away",
                )
            write_all(self._descriptor, data)
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise OperationError(f"{self._out}: {error.strerror}", hint="the next start goes on from here") from error
        self._bytes += len(data)

    def _save(self) -> None:
        place = Position(self._reader.key, self._target, self._reader.place, self._bytes, self._version)
        place.save(self._position_path)

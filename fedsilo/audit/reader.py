"""Reads an audit log: records in order, and records as they are appended.

Reading needs no lock of the log: only complete lines count, a daemon that writes on adds to the last segment only, and
a line that is longer than any record is refused before it is in memory. A torn last line is no record yet.

    segment_lines              of one segment, from a place on; everything below reads by it
    read_lines, read_records   from a record on, to the end that the log has by then
    LogReader                  on from a record, checking each record and its link, as the log grows

Where a record lies without reading what is before it, and what a log tells of messages and rounds, is `index.py`'s.

Does not show that a record is genuine, and signatures are not looked at: `log.LogCheck` and `audit_verify` do that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.audit.checkpoint import VerifierKey, parse_verifier_key
from fedsilo.audit.merkle import HASH_BYTES, leaf_hash
from fedsilo.audit.record import LINE_BYTES_MAX, NO_PREVIOUS, Record, link_of, parse_record
from fedsilo.audit.segments import packed_leaves, reduced_segments, segments
from fedsilo.protocol.errors import NotFoundError, VerificationError


def leaf_hashes(directory: Path) -> Iterator[bytes]:
    """The leaf hash of every record, also of those that retention removed.

    Raises:
        NotFoundError: no such log.
        VerificationError: a segment, or leaf hashes, are missing in between or damaged.
    """
    size = 0
    for leaf in reduced_leaves(directory):
        yield leaf
        size += 1
    for number, line in read_lines(directory):
        if number != size:
            raise _gone(directory, size, number)
        yield leaf_hash(line)
        size += 1


def reduced_leaves(directory: Path) -> Iterator[bytes]:
    """The leaf hash of every record that retention removed. Raises VerificationError: as `leaf_hashes`."""
    size = 0
    for first, path in reduced_segments(directory):
        if first != size:
            raise _gone(directory, size, first)
        packed = packed_leaves(path)
        yield from (packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES))
        size += len(packed) // HASH_BYTES


def _gone(directory: Path, awaited: int, found: int) -> VerificationError:
    if found < awaited:
        return VerificationError(f"{directory}: record {found} stands there twice")
    return VerificationError(f"{directory}: records {awaited} to {found - 1} are gone")


def removed_leaf(directory: Path, seq: int) -> str:
    """The leaf hash of a record that retention removed; empty where it is not among them. Raises VerificationError."""
    for first, path in reversed(reduced_segments(directory)):
        if first <= seq:
            start = (seq - first) * HASH_BYTES
            return packed_leaves(path)[start : start + HASH_BYTES].hex()
    return ""


def removed(directory: Path, seq: int) -> NotFoundError:
    """The error that says why a record that was there cannot be shown."""
    left = next((number for number, _ in segments(directory)), None)
    hint = "" if left is None else f"the first record that is left is {left}"
    return NotFoundError(
        f"{directory} holds only the leaf hash of record {seq}: retention removed what it said", hint=hint
    )


def segment_lines(path: Path, number: int, offset: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """(number, line without its end, where the next one begins) of every complete line of a segment.

    Args:
        path: of the segment.
        number: of the record that begins at `offset`.
        offset: in bytes.

    Raises:
        VerificationError: a line is longer than any record; no more of it is read.
    """
    with path.open("rb") as stream:
        stream.seek(offset)
        while line := stream.readline(LINE_BYTES_MAX + 1):
            if not line.endswith(b"\n"):
                if len(line) > LINE_BYTES_MAX:
                    raise VerificationError(f"{path}: record {number} has more than {LINE_BYTES_MAX} bytes")
                return  # being written right now, or torn: not a record (yet)
            offset += len(line)
            yield number, line[:-1], offset
            number += 1


def read_lines(directory: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(number, line without newline) of every complete line from record `start` on that retention did not remove.

    Raises:
        NotFoundError: no such log.
        VerificationError: a segment is missing in between, or a line is longer than any record.
    """
    return ((number, line) for number, line, _ in _lines_from(directory, start))


_Spot = tuple[int, int, int]  # first record of a segment; number of a record in it, and the byte where it begins


def _lines_from(directory: Path, start: int, spot: _Spot = (-1, 0, 0)) -> Iterator[tuple[int, bytes, _Spot]]:
    """Lines as `read_lines`, each with the spot behind it. spot: no later than `start`, so that less is read."""
    files = segments(directory)  # before any is read: what a segment follows is complete
    for (first, path), following in zip(files, [*(number for number, _ in files[1:]), None], strict=False):
        if following is not None and following <= start:
            continue
        number, begin = spot[1:] if spot[0] == first else (first, 0)
        for seq, line, end in segment_lines(path, number, begin):
            number = seq + 1
            if seq >= start:
                yield seq, line, (first, number, end)
        if following is not None and number != following:
            raise _gone(directory, number, following)


def read_records(directory: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Parsed records from `start` on. Raises NotFoundError, VerificationError."""
    for number, line in read_lines(directory, start):
        try:
            record = parse_record(line)
        except VerificationError as error:
            raise VerificationError(f"{directory}: record {number}: {error.message}") from error
        yield record


def typed_records(directory: Path, start: int = 0) -> Iterator[Record]:
    """Read records as `read_records` does, each as a `Record`."""
    return map(Record, read_records(directory, start))


# ---- notes and keys ----------------------------------------------------------------------------------------------

NOTE_BYTES_MAX = 64 << 10  # of a checkpoint with its cosignatures, 150 bytes each; and of a file of keys


def read_note(path: Path) -> str:
    """A note, or public keys, as written (no translation of line ends).

    Raises:
        VerificationError: no file, not UTF-8, or more than `NOTE_BYTES_MAX`.
    """
    if not path.is_file():
        raise VerificationError(f"{path} is no file")
    with path.open("rb") as stream:
        data = stream.read(NOTE_BYTES_MAX + 1)
    if len(data) > NOTE_BYTES_MAX:
        raise VerificationError(f"{path} has more than {NOTE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise VerificationError(f"{path} is damaged") from error


# ---- lines that somebody asks for --------------------------------------------------------------------------------

LOOK_RECORDS = 2_000  # whoever asks with a filter looks at so many records a call
_CONTROL = b'"kind":"control.'  # as canonical JSON spells it
DAMAGED = "damaged"  # the event of what stands in for a line that is no record


def line_filter(event: str = "", text: str = "", *, control: bool = True) -> Callable[[bytes], bool]:
    """Return a test for the lines of a log that a query asks for.

    Args:
        event: the beginning of an event's name; empty for any.
        text: what stands anywhere in a record, in upper or lower case; empty for any.
        control: also records of control messages, such as polls. Without, one that was denied stays, as does a line
            that is no record: both are to be seen.
    """
    # as canonical JSON spells it; a quote or backslash in it is no event's and no text's
    mark, sought = f'"event":"{event}'.encode(), text.casefold()

    def wanted(line: bytes) -> bool:
        if (event and mark not in line) or (sought and sought not in line.decode("utf-8", "replace").casefold()):
            return False
        return control or _CONTROL not in line or not _is_allowed_control(line)

    return wanted


def _is_allowed_control(line: bytes) -> bool:
    try:
        return Record(json.loads(line)).is_allowed_control  # the mark may also stand deeper in a record of another kind
    except (ValueError, AttributeError, RecursionError):
        return False


def record_at(number: int, line: bytes) -> dict[str, Any]:
    """The record in a line; for one that is damaged {"seq", "t": 0, "event": "damaged", "why"}."""
    try:
        record = parse_record(line)
        if record["seq"] != number:
            raise VerificationError(f"it carries number {record['seq']}")
    except VerificationError as error:
        return {"seq": number, "t": 0, "event": DAMAGED, "why": error.message}
    return record


# ---- records as they are appended --------------------------------------------------------------------------------

BATCH_RECORDS = 256


@dataclass(frozen=True)
class Place:
    """Between two records: the number of the next one, and the hash of the one before it."""

    seq: int = 0
    previous: str = NO_PREVIOUS


class LogReader:
    """Reads on from a place, verifying. Keeps no file open between calls, so that a cut-off torn end does not matter.

    Raises:
        NotFoundError: no such log, no such record yet where it is to start, or retention removed it.
        VerificationError: the log no longer holds the record before the place.
    """

    def __init__(self, directory: Path, place: Place | None = None, *, first: int = 0) -> None:
        self._directory = directory
        self._spot: _Spot = (-1, 0, 0)
        self.key, self.origin = log_key_of(directory)
        self.place = self._place_of(first) if place is None else place
        if place is not None:
            self._check_behind()

    def read(self, records_max: int = BATCH_RECORDS) -> list[tuple[bytes, dict[str, Any], Place]]:
        """(line, record, place behind it) of complete records from the place on; empty where there are none yet.

        Raises:
            VerificationError: the next record is damaged, missing, or does not follow the one before. What came
                before it was returned by an earlier call.
        """
        records: list[tuple[bytes, dict[str, Any], Place]] = []
        try:
            for seq, line, spot in _lines_from(self._directory, self.place.seq, self._spot):
                if seq != self.place.seq:
                    raise _gone(self._directory, self.place.seq, seq)
                record = self._checked(line)
                self.place, self._spot = Place(seq + 1, link_of(line)), spot
                records.append((line, record, self.place))
                if len(records) == records_max:
                    break
        except VerificationError:
            if not records:
                raise
        return records

    def _checked(self, line: bytes) -> dict[str, Any]:
        seq = self.place.seq
        try:
            record = parse_record(line)
        except VerificationError as error:
            raise VerificationError(f"{self._directory}: record {seq}: {error.message}") from error
        if record["seq"] != seq:
            raise VerificationError(f"{self._directory}: record {seq} carries number {record['seq']}")
        if record["link"]["previous"] != self.place.previous:
            raise VerificationError(
                f"{self._directory}: record {seq} does not follow the record before it: one of them was changed",
                hint="nothing from here on was exported; run `fedsilo audit verify` with the other parties' logs",
            )
        return record

    def _place_of(self, first: int) -> Place:
        """The place before record `first`. Raises NotFoundError: it is not there yet, or retention removed it."""
        self._refuse_removed(first)
        if first == 0:
            return Place()
        before = self._link_of(first - 1)
        if not before:
            raise NotFoundError(f"{self._directory} has no record {first - 1} yet")
        return Place(first, before)

    def _check_behind(self) -> None:
        if self.place.seq == 0:
            self._refuse_removed(0)
            return
        if self._link_of(self.place.seq - 1) != self.place.previous:
            raise VerificationError(
                f"{self._directory}: record {self.place.seq - 1}, which was exported, is gone or was changed since",
                hint="compare the exported copy with the log; each exported record carries the hash of its line",
            )
        self._refuse_removed(self.place.seq)

    def _link_of(self, seq: int) -> str:
        """The hash of a record, which retention leaves when it removes it; empty where there is none. Reading goes on
        behind it."""
        number, line, spot = next(_lines_from(self._directory, seq), (-1, b"", self._spot))
        if number == seq:
            self._spot = spot
            return link_of(line)
        return removed_leaf(self._directory, seq)

    def _refuse_removed(self, seq: int) -> None:
        """Refuse a gap. Raises NotFoundError: the next record to read is not lost; retention removed it."""
        if removed_leaf(self._directory, seq):
            raise removed(self._directory, seq)


def keys_in(path: Path) -> list[VerifierKey]:
    """Return both keys of a file, the one that signs and the one that countersigns; none of a file that is damaged,
    which the verification of the log names."""
    if not path.is_file():
        return []  # a pipe would be waited for
    try:
        keys = [parse_verifier_key(line) for line in read_note(path).splitlines()]
    except (VerificationError, OSError):
        return []
    return keys if len({key.name for key in keys}) == 1 else []


def log_key_of(directory: Path) -> tuple[str, str]:
    """(the log's own key as text, its name). Raises NotFoundError, VerificationError."""
    path = directory / "keys" / "log.vkey"
    if not path.is_file():
        raise NotFoundError(f"{directory} is not an audit log folder: keys/log.vkey is missing")
    text = path.read_bytes().decode("utf-8", "replace").partition("\n")[0]
    return text, parse_verifier_key(text).name

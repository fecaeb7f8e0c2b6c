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
from fedsilo.protocol.errors import (
    NotFoundError,
    VerificationError,
)


def leaf_hashes(directory: Path) -> Iterator[bytes]:
    """The leaf hash of every record, also of those that retention removed.

    Raises:
        NotFoundError: no such log.
        VerificationError: a segment, or leaf hashes, are missing in between or damaged.
    """
    size = 0
    for first, path in reduced_segments(directory):
        packed = packed_leaves(path)
        if first != size:
            raise VerificationError(f"{path} stands in the place of record {size}")
        yield from (packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES))
        size += len(packed) // HASH_BYTES
    for number, line in read_lines(directory):
        if number != size:
            raise VerificationError(f"{directory}: record {number} stands in the place of record {size}")
        yield leaf_hash(line)
        size += 1


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
    files = segments(directory)
    for position, (first, path) in enumerate(files):
        following = files[position + 1][0] if position + 1 < len(files) else None
        if following is not None and following <= start:
            continue
        number = first - 1
        for number, line, _ in segment_lines(path, first):
            if number >= start:
                yield number, line
        if following is not None and number + 1 != following:
            raise VerificationError(f"{path} ends before record {number + 1}; the next segment starts at {following}")


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
        self.key, self.origin = log_key_of(directory)
        self.place = self._place_of(first) if place is None else place
        if place is not None:
            self._check_behind()
        self._segment: Path | None = None
        self._offset = 0

    def read(self, records_max: int = BATCH_RECORDS) -> list[tuple[bytes, dict[str, Any], Place]]:
        """(line, record, place behind it) of complete records from the place on; empty where there are none yet.

        Raises:
            VerificationError: the next record is damaged, missing, or does not follow the one before. What came
                before it was returned by an earlier call.
        """
        records: list[tuple[bytes, dict[str, Any], Place]] = []
        try:
            while len(records) < records_max and (self._segment is not None or self._find_segment()):
                self._read_segment(records, records_max)
                if len(records) < records_max and not self._go_to_next_segment():
                    break
        except VerificationError:
            if not records:
                raise
        return records

    def _read_segment(self, records: list[tuple[bytes, dict[str, Any], Place]], records_max: int) -> None:
        """Take in the complete lines that this segment has by now."""
        assert self._segment is not None  # noqa: S101 - the caller found one
        for seq, line, offset in segment_lines(self._segment, self.place.seq, self._offset):
            record = self._checked(line)
            self.place, self._offset = Place(seq + 1, link_of(line)), offset
            records.append((line, record, self.place))
            if len(records) == records_max:
                return

    def _go_to_next_segment(self) -> bool:
        """Return whether there is more to read: a segment that follows, or a line written while the folder was looked
        at."""
        assert self._segment is not None  # noqa: S101 - the caller found one
        following = next((item for item in segments(self._directory) if item[1].name > self._segment.name), None)
        if following is None:
            return False
        if following[0] == self.place.seq:
            self._segment, self._offset = following[1], 0
            return True
        if next(segment_lines(self._segment, self.place.seq, self._offset), None) is not None:
            return True
        raise VerificationError(
            f"{self._segment} ends before record {self.place.seq}; the next segment starts at {following[0]}"
        )

    def _find_segment(self) -> bool:
        """Open the segment that holds the place, and skip what is before it."""
        files = segments(self._directory)
        holding = [item for item in files if item[0] <= self.place.seq]
        if not holding:
            if files:
                raise VerificationError(f"{self._directory}: records {self.place.seq} to {files[0][0] - 1} are gone")
            return False
        number, self._segment = holding[-1]
        self._offset = 0
        lines = segment_lines(self._segment, number)
        while number < self.place.seq:
            if (line := next(lines, None)) is None:
                raise VerificationError(f"{self._directory} ends at record {number - 1}, before {self.place.seq}")
            number, self._offset = line[0] + 1, line[2]
        return True

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
        """The hash of a record, which retention leaves when it removes it; empty where there is none."""
        line = next(read_lines(self._directory, seq), None)
        if line is not None and line[0] == seq:
            return link_of(line[1])
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

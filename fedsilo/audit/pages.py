"""Records of an audit log by their number, without reading the log from its beginning.

A segment holds one record a line, so a record's place follows from counting line ends. That is done once for each
segment that somebody asks about, and the place of every `STRIDE`-th record is kept: 8 bytes for 32 records. A page
then costs as many lines as it shows, and at most `STRIDE` more; a single record up to `STRIDE` lines. Needs no lock of
the log: only complete lines count, and a daemon that writes on adds to the last segment only.

Does not show that a record is genuine: numbers are counted, and what a line says is not compared with anything. That is
`check.py`.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsilo.audit.record import LINE_BYTES_MAX, parse_record
from fedsilo.audit.segments import segments
from fedsilo.protocol.errors import OperationError, VerificationError

STRIDE = 32
BLOCK_LINES = 128  # read at a time, at least, while something is looked for
LOOK_RECORDS = 2_000  # whoever asks with a filter looks at so many records a call
_CONTROL = b'"kind":"control.'  # as canonical JSON spells it
DAMAGED = "damaged"  # the event of what stands in for a line that is no record
_CHUNK_BYTES = 1 << 20


@dataclass
class _Segment:
    """What is known of one file: where every `STRIDE`-th line begins, and how far it was counted."""

    first: int
    path: Path
    places: array[int] = field(default_factory=lambda: array("Q", [0]))
    lines: int = 0  # complete ones
    counted_bytes: int = 0  # up to the end of the last complete line

    def count(self) -> None:
        """Take in the lines that were added since."""
        if not self.path.exists() or self.path.stat().st_size < self.counted_bytes:  # cut since: nothing of it holds
            self.places, self.lines, self.counted_bytes = array("Q", [0]), 0, 0
        with self.path.open("rb") as stream:
            stream.seek(self.counted_bytes)
            start = self.counted_bytes
            while chunk := stream.read(_CHUNK_BYTES):
                at = chunk.find(b"\n")
                while at >= 0:
                    self.lines += 1
                    self.counted_bytes = start + at + 1
                    if self.lines % STRIDE == 0:
                        self.places.append(self.counted_bytes)
                    at = chunk.find(b"\n", at + 1)
                start += len(chunk)


@dataclass(frozen=True)
class Back:
    """What a look backwards found.

    Attributes:
        lines: (number, line) of what was wanted, newest first.
        next: ask again with this as `before`; None where nothing older is left.
    """

    lines: list[tuple[int, bytes]]
    next: int | None


class LogPages:
    """Thread-safe.

    Args:
        directory: the log's folder.

    Attributes:
        lines_read: lines taken from the disk so far, which is what a page costs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines_read = 0
        self._lock = threading.Lock()
        self._known: dict[Path, _Segment] = {}

    @property
    def first(self) -> int:
        """Number of the first record that retention left; 0 for a log without any."""
        return next((first for first, _ in segments(self.directory)), 0)

    def lines(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """(number, line without its end) of the records from `start` up to and without `end` that are there.

        Raises:
            NotFoundError: no such log.
            VerificationError: a line is longer than any record.
            OperationError: a segment cannot be read.
        """
        return self._ranges([(start, end)])

    def at(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """The lines of these records, by number, as far as they are there.

        Raises:
            NotFoundError, VerificationError, OperationError: as `lines`.
        """
        return dict(self._ranges([(number, number + 1) for number in numbers]))

    def _ranges(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        with self._lock:
            try:
                files = segments(self.directory)
                self._known = {path: self._known.get(path) or _Segment(first, path) for first, path in files}
                for start, end in ranges:
                    for position, (first, path) in enumerate(files):
                        following = files[position + 1][0] if position + 1 < len(files) else end
                        if first < end and (following > start or position + 1 == len(files)):
                            found += self._of_segment(self._known[path], max(start, first), end)
            except OSError as error:  # also: retention removed a segment just now
                raise OperationError(f"{self.directory}: {error.strerror}", hint="ask again") from error
        return found

    def _of_segment(self, segment: _Segment, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        if end > segment.first + segment.lines:
            segment.count()
        end = min(end, segment.first + segment.lines)
        if start >= end:
            return
        stride = (start - segment.first) // STRIDE
        number = segment.first + stride * STRIDE
        with segment.path.open("rb") as stream:
            stream.seek(segment.places[stride])
            while number < end and (line := stream.readline(LINE_BYTES_MAX + 1)):
                self.lines_read += 1
                if not line.endswith(b"\n") and len(line) > LINE_BYTES_MAX:
                    raise VerificationError(f"{segment.path}: record {number} has more than {LINE_BYTES_MAX} bytes")
                if number >= start:
                    yield number, line.removesuffix(b"\n")
                number += 1

    def records(self, start: int, end: int) -> list[dict[str, Any]]:
        """The same parsed, oldest first; for a line that is no record, what `record_at` makes of it.

        Raises:
            NotFoundError, VerificationError, OperationError: as `lines`.
        """
        return [record_at(number, line) for number, line in self.lines(start, end)]

    def back(self, before: int, wanted: Callable[[bytes], bool], *, limit: int, look_max: int) -> Back:
        """The newest lines before a number that are wanted.

        Args:
            before: the first number that is not looked at.
            wanted: of a line.
            limit: how many.
            look_max: lines looked at, at most; then `next` says where to go on.

        Raises:
            NotFoundError, VerificationError, OperationError: as `lines`.
        """
        found: list[tuple[int, bytes]] = []
        first, at = self.first, before
        lowest = max(first, before - look_max)
        while at > lowest and len(found) < limit:
            # as much as is lacking, since mostly every line is wanted; else so much that few files are opened for it
            start = max(lowest, at - max(limit - len(found), BLOCK_LINES))
            block = [item for item in self.lines(start, at) if wanted(item[1])]
            found += reversed(block)
            at = start
        if len(found) > limit:
            found = found[:limit]
        if len(found) == limit and found:
            at = found[-1][0]
        return Back(found, at if at > first else None)

    def forget(self) -> None:
        """Count every segment anew: the folder was changed by somebody else than the log's own writer."""
        with self._lock:
            self._known = {}


def line_filter(event: str = "", text: str = "", *, control: bool = True) -> Callable[[bytes], bool]:
    """Which lines of a log somebody asks for.

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


def is_allowed_control(record: Mapping[str, Any]) -> bool:
    """Whether a record is of a control message, such as a poll, that nobody refused or held."""
    return str(record.get("kind", "")).startswith("control.") and record.get("decision") in (None, "", "allow")


def _is_allowed_control(line: bytes) -> bool:
    try:
        return is_allowed_control(json.loads(line))  # the mark may also stand deeper in a record of another kind
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

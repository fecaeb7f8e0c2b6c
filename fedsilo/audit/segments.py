"""The files of an audit log: their names, appending to them durably, and the disk-full reserve (T39).

A segment is named by the number of its first record: `000000000000.jsonl`. A line is one record; appending is one
write and one fdatasync. `reader.py` reads them.

    LOG/000000000000.jsonl ...   the records
    LOG/000000000000.leaves      in place of a segment that retention removed: its leaf hashes, 32 bytes each
    LOG/checkpoints/SIZE.note    this log's signed checkpoints, with the cosignatures they earned
    LOG/witnessed/NAME.note      the newest checkpoint of each other party that this party countersigned
    LOG/shown/SILO/SIZE.step     at the coordinator: the steps by which the logs of silos came there
    LOG/keys/*.vkey              public keys: log.vkey is this log's own
    LOG/quarantine/              torn line ends taken out by a repair
    LOG/lock, LOG/reserve        one writer; space kept for the last record
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from fedsilo.audit.merkle import HASH_BYTES
from fedsilo.files.durable import FULL, disk_error, fsync_directory, read_regular, write_all
from fedsilo.protocol.errors import NotFoundError, OperationError, UsageError, VerificationError

RESERVE_BYTES = 16 << 20
LEAVES_BYTES_MAX = 64 << 20  # of one segment: more than a segment of 64 MiB can have records for
_SEGMENT_NAME = re.compile(r"(\d{12})\.jsonl")
_LEAVES_NAME = re.compile(r"(\d{12})\.leaves")


class LogFullError(OperationError):
    """Error of a log that cannot take a record: nothing can be recorded, so nothing may be sent, until space
    returns."""

    default_code = "LOG_FULL"


class LogLostError(OperationError):
    """The file that records were written into is no longer the log at its path, so nothing may be sent (P2)."""

    default_code = "LOG_LOST"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """(number of the first record, path) of every segment, in order.

    Raises:
        NotFoundError: no such log.
        VerificationError: what has a segment's name is no file.
    """
    if not directory.is_dir():
        raise NotFoundError(f"{directory} is not an audit log folder")
    named = ((_SEGMENT_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    numbered = sorted((int(match[1]), path) for match, path in named if match)
    for _, path in numbered:
        if not path.is_file():
            raise VerificationError(f"{path} is no file")
    return numbered


def reduced_segments(directory: Path) -> list[tuple[int, Path]]:
    """(number of the first record, path) of every segment of which the leaf hashes are left, in order."""
    matches = ((_LEAVES_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match and not path.with_suffix(".jsonl").exists())


def packed_leaves(path: Path) -> bytes:
    """The leaf hashes in `path`, one behind the other. Raises VerificationError: none, or not whole ones."""
    try:
        packed = read_regular(path, bytes_max=LEAVES_BYTES_MAX)
    except (NotFoundError, UsageError) as error:
        raise VerificationError(error.message) from error
    if not packed or len(packed) % HASH_BYTES:
        raise VerificationError(f"{path} is damaged: it does not hold whole leaf hashes")
    return packed


def file_stem(origin: str) -> str:
    """A file name for an origin: readable, and different for different origins."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", origin).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}"


class SegmentWriter:
    """Appends lines to the newest segment. Not thread-safe: the log's lock is held around every call."""

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._reserve = directory / "reserve"
        self._reserve_bytes = reserve_bytes
        self._path = directory
        self._descriptor: int | None = None
        self._broken = ""
        self.segment_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def open_segment(self, first: int) -> None:
        """Continue the segment that starts at record `first`, or begin it.

        Raises:
            DiskFullError: no space for a new file.
            OperationError: it cannot be opened.
        """
        self.close()
        path = self._directory / f"{first:012d}.jsonl"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
            fsync_directory(self._directory)
        except OSError as error:
            raise _error_of(error, path) from error
        self._descriptor, self._path = descriptor, path
        self.segment_bytes = os.fstat(descriptor).st_size

    def append(self, line: bytes) -> None:
        """Append one line, durable at return: one write, one fdatasync.

        Raises:
            LogLostError: see `check_in_place`; nothing is written.
            DiskFullError: no space; the partial line is taken back.
            OperationError: the disk failed. What is on it is then unknown (a failed flush is not repeated by the
                kernel), so nothing is written any more until a restart has read the log again.
        """
        if self._descriptor is None or self._broken:
            raise OperationError(f"the audit log takes no records: {self._broken or 'it is closed'}")
        self.check_in_place()
        data = line + b"\n"
        try:
            write_all(self._descriptor, data)
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._take_back(error)
            raise _error_of(error, self._directory) from error
        self.segment_bytes += len(data)

    def check_in_place(self) -> None:
        """Check that the file written so far is the one at its path, with the length that was written.

        Does not stop: bytes that somebody changes in place without changing the length, and earlier segments that
        somebody removes; the checkpoints show both, to `audit verify` and at the next start.

        Raises:
            LogLostError: it was removed, moved, replaced, truncated or written to by somebody else.
        """
        if self._descriptor is None:
            return
        try:
            written, in_place = os.fstat(self._descriptor), self._path.stat(follow_symlinks=False)
        except OSError as error:
            raise _lost(self._path, f"it is not there ({error.strerror})") from error
        if (in_place.st_dev, in_place.st_ino) != (written.st_dev, written.st_ino):
            raise _lost(self._path, "another file stands in its place")
        if in_place.st_size != self.segment_bytes:
            raise _lost(self._path, f"it has {in_place.st_size} bytes, and {self.segment_bytes} were written")

    def _take_back(self, cause: OSError) -> None:
        assert self._descriptor is not None  # noqa: S101 - append checked it
        if cause.errno not in FULL:
            self._broken = f"writing failed earlier ({cause.strerror})"
            return
        try:
            os.ftruncate(self._descriptor, self.segment_bytes)
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._broken = f"a partial line could not be taken back ({error.strerror})"

    def cut(self, path: Path, size: int) -> None:
        """Shorten a segment to its first `size` bytes, durably. Raises OperationError."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OperationError(f"cannot repair {path}: {error.strerror}") from error

    def take_reserve(self) -> None:
        """Make sure the reserve file holds its space. Raises DiskFullError, OperationError; nothing is left behind."""
        if self._reserve_bytes == 0:
            return
        try:
            descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_blocks * 512 < self._reserve_bytes:
                    os.posix_fallocate(descriptor, 0, self._reserve_bytes)
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fsync_directory(self._directory)
        except OSError as error:
            self.release_reserve()
            raise _error_of(error, self._reserve) from error

    def release_reserve(self) -> None:
        with contextlib.suppress(OSError):  # if it cannot be freed, the halt record simply will not fit
            self._reserve.unlink(missing_ok=True)
            fsync_directory(self._directory)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lost(path: Path, what: str) -> LogLostError:
    return LogLostError(
        f"the audit log {path} is not the file that was written: {what}",
        hint="put the file back as it was, check it with `fedsilo audit verify`, then start again",
    )


def _error_of(error: OSError, path: Path) -> OperationError:
    return disk_error(str(path), error, if_full="free space; nothing is sent until records fit again")

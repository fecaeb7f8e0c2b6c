"""Payloads on disk, named by their SHA-256: uploads, global adapters, and what is still arriving.

A payload is spooled to a local file while its bytes come, hashed on the way, flushed, and only then given its name, so
a name always stands for complete bytes; uploads, which may be cut and go on, are in `uploads`. The final place is any
fsspec URL; on a local disk it is a rename.
What this does not do: encrypt, or delete old rounds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec

from fedsilo.files.durable import FLUSHED_BYTES, EarlyFlush, disk_error, fsync_directory, leave_page_cache
from fedsilo.protocol.codec import CHUNK_BYTES_MAX, SMALL_PAYLOAD_BYTES_MAX, Buffer, sha256_hex
from fedsilo.protocol.errors import OperationError, PeerError, WireCode

_DIGEST = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True)
class BytesPayload:
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    @property
    def digest(self) -> str:
        return sha256_hex(self.data)

    def read_at(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


@dataclass(frozen=True)
class FilePayload:
    """A payload behind an fsspec path. On a local disk it is opened once, with the first read, and closed with this
    object, so none is held open between rounds; what it was opened as stays readable if it is renamed meanwhile."""

    filesystem: Any
    path: str
    digest: str
    size_bytes: int

    def read_at(self, offset: int, length: int) -> bytes:
        if "file" in self.filesystem.protocol:
            return os.pread(self._descriptor, length, offset)
        return bytes(self.filesystem.cat_file(self.path, start=offset, end=offset + length))

    def leave_memory(self) -> None:
        """It has been read for what may be the last time: what the machine holds of it in memory goes back now."""
        if "file" in self.filesystem.protocol:
            with contextlib.suppress(OSError):
                leave_page_cache(self._descriptor)

    @functools.cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


AnyPayload = BytesPayload | FilePayload


def whole(payload: AnyPayload) -> bytes:
    """A small payload's bytes.

    Raises:
        PeerError: larger than a message that is read as a whole may be (T23).
    """
    if payload.size_bytes > SMALL_PAYLOAD_BYTES_MAX:
        raise PeerError(WireCode.TOO_LARGE, f"payload of {payload.size_bytes} bytes exceeds {SMALL_PAYLOAD_BYTES_MAX}")
    return payload.read_at(0, payload.size_bytes)


def chunks(payload: AnyPayload, offset: int = 0) -> Iterator[bytes]:
    for start in range(offset, payload.size_bytes, CHUNK_BYTES_MAX):
        yield payload.read_at(start, min(CHUNK_BYTES_MAX, payload.size_bytes - start))


class Spool:
    """A payload being written: feed it chunks, then `Blobs.keep` it, or drop it by leaving the `with` block.

    Raises (all writing methods):
        DiskFullError: no space left; the partial file is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{secrets.token_hex(16)}.part"
        self._hash = hashlib.sha256()
        self.size_bytes = 0
        try:
            self._stream = self.path.open("xb")
            self._flush = EarlyFlush(self._stream.fileno())
        except OSError as error:
            raise not_kept(error, self.path) from error

    def write(self, chunk: Buffer) -> None:
        try:
            self._stream.write(chunk)
        except OSError as error:
            self.drop()
            raise not_kept(error, self.path) from error
        self._hash.update(chunk)
        before, self.size_bytes = self.size_bytes, self.size_bytes + memoryview(chunk).nbytes
        if before // FLUSHED_BYTES != self.size_bytes // FLUSHED_BYTES:
            self._flush.begin()

    def finish(self) -> FilePayload:
        """Flush to the disk; the payload may be read from now on, still under its temporary name."""
        try:
            self._stream.flush()
            self._flush.end()
            self._stream.close()
        except OSError as error:
            self.drop()
            raise not_kept(error, self.path) from error
        return FilePayload(fsspec.filesystem("file"), str(self.path), self._hash.hexdigest(), self.size_bytes)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._flush.abandon()
        with contextlib.suppress(OSError):  # closing flushes, which may fail on the same full disk that made us drop it
            self._stream.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()


class Blobs:
    """The store.

    Args:
        state_dir: local folder; arriving payloads lie under `arriving/`.
        url: where kept payloads go; by default `state_dir`/blobs.
    """

    def __init__(self, state_dir: Path, url: str = "") -> None:
        self.arriving = state_dir / "arriving"
        self.arriving.mkdir(parents=True, exist_ok=True)
        # what this process was making of its own; uploads have another name and are gone on with
        for stale in self.arriving.glob("*.part"):
            stale.unlink()
        self._filesystem, self._root = fsspec.core.url_to_fs(url or str(state_dir / "blobs"))
        self._local = "file" in self._filesystem.protocol
        if not self._filesystem.exists(self._root):
            self._filesystem.makedirs(self._root, exist_ok=True)
            if self._local:
                fsync_directory(Path(self._root).parent)

    def spool(self) -> Spool:
        return Spool(self.arriving)

    def keep(self, payload: AnyPayload) -> FilePayload:
        """Make a payload durable under its digest; keeping the same bytes twice is harmless."""
        if isinstance(payload, BytesPayload):
            with self.spool() as spool:
                spool.write(payload.data)
                return self.keep(spool.finish())
        place = self._place(payload.digest)
        kept = FilePayload(self._filesystem, place, payload.digest, payload.size_bytes)
        try:
            if not self._filesystem.exists(place):
                self._filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
                if self._local:
                    Path(payload.path).rename(place)
                else:
                    self._filesystem.put_file(payload.path, place)
            if self._local:
                # also where all is there already: a kill may have come between making a name and flushing it (T39)
                fsync_directory(Path(place).parent)
                fsync_directory(Path(self._root))
        except OSError as error:
            raise not_kept(error, Path(place)) from error
        return kept

    def find(self, digest: str) -> FilePayload | None:
        place = self._place(digest)
        if not _DIGEST.match(digest) or not self._filesystem.exists(place):
            return None
        return FilePayload(self._filesystem, place, digest, int(self._filesystem.size(place)))

    def get(self, digest: str) -> FilePayload:
        """Raises OperationError: a payload that the database names is not on the disk."""
        found = self.find(digest)
        if found is None:
            raise OperationError(f"payload {digest} is missing from {self._root}", hint="restore the state folder")
        return found

    def _place(self, digest: str) -> str:
        return f"{self._root}/{digest[:2]}/{digest}"


def not_kept(error: OSError, path: Path) -> OperationError:
    """What a disk's refusal is called: where there is no space, nothing is acknowledged any more (threat T39)."""
    return disk_error(f"cannot write {path}", error, if_full="free space in state_dir, then start again")

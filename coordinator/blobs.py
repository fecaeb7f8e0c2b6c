"""Payloads on disk, named by their SHA-256: uploads, global adapters, and what is still arriving.

A payload is spooled to a local file while its bytes come, hashed on the way, flushed, and only then given its name, so
a name always stands for complete bytes. The final place is any fsspec URL; on a local disk it is a rename.

A large payload gets a place before its first byte is taken: a few at a time, the others wait in the order in which they
came, and the bytes of whoever waits stay with the sender. What comes is written to `arriving/SILO.DIGEST.partial`. The
same silo with the same digest goes on at its end, after a cut line as after a kill of either side; the digest is what
the signed envelope names, so the bytes that come later can only be of the message that the site let out (T29).

Bounded (T23): a silo has one place, and its newest call has it; it leaves at most `PARTIALS_PER_SILO_MAX` pieces, none
larger than its kind may be; what nobody goes on with for `PARTIAL_SECONDS_MAX` is removed.

What this does not do: encrypt, or delete old rounds. It does not stop as many silos as there are places, each at the
slowest pace that is allowed, from delaying the others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec
from sqlalchemy import select

from coordinator import store as db
from fedsilo.files.durable import FLUSHED_BYTES, EarlyFlush, PartialFile, disk_error, fsync_directory, leave_page_cache
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
        """Give back what the machine holds of it in memory: it has been read for what may be the last time."""
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
        stored = FilePayload(self._filesystem, place, payload.digest, payload.size_bytes)
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
        return stored

    def find(self, digest: str) -> FilePayload | None:
        place = self._place(digest)
        if not _DIGEST.match(digest) or not self._filesystem.exists(place):
            return None
        return FilePayload(self._filesystem, place, digest, int(self._filesystem.size(place)))

    def get(self, digest: str) -> FilePayload:
        """Open a payload. Raises OperationError: the database names it and it is not on the disk."""
        payload = self.find(digest)
        if payload is None:
            raise OperationError(f"payload {digest} is missing from {self._root}", hint="restore the state folder")
        return payload

    def _place(self, digest: str) -> str:
        return f"{self._root}/{digest[:2]}/{digest}"


def not_kept(error: OSError, path: Path) -> OperationError:
    """Return the error for a disk's refusal: where there is no space, nothing is acknowledged any more (threat T39)."""
    return disk_error(f"cannot write {path}", error, if_full="free space in state_dir, then start again")


# ---- uploads on their way in -------------------------------------------------------------------------------------

PLACES = 4
PARTIALS_PER_SILO_MAX = 2
PARTIAL_SECONDS_MAX = 86_400.0


class LineClosed(Exception):  # no fault of anybody's, and nobody is left to be told
    """The call ended while it waited for its turn."""


@dataclass(eq=False)
class _Turn:
    silo: str
    cut: Callable[[], object]


class Upload:
    """A payload that is being received.

    Args:
        file: what has come of it.

    Raises (writing):
        DiskFullError, OperationError: the disk refused; what had come is removed.
    """

    def __init__(self, file: PartialFile) -> None:
        self._file = file
        self.offset = file.size_bytes

    def write(self, chunk: Buffer) -> None:
        with self._writing():
            self._file.write(chunk)

    def finish(self) -> AnyPayload:
        """Durable at return, and to be read under its temporary name."""
        with self._writing():
            self._file.close()
        file = self._file
        return FilePayload(fsspec.filesystem("file"), str(file.path), file.digest, file.size_bytes)

    def drop(self) -> None:
        """Remove it: it was judged, or it is not what was announced."""
        self._file.drop()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file.drop()
            raise not_kept(error, self._file.path) from error


class Uploads:
    """Gives large payloads a place, a few at a time, and goes on with those that were cut off.

    Args:
        blobs: whose folder of arriving payloads is used.
        now_seconds: UTC, as the files' times are.
    """

    def __init__(self, blobs: Blobs, *, now_seconds: Callable[[], float] = time.time) -> None:
        self._blobs = blobs
        self._now_seconds = now_seconds
        self._changed = threading.Condition()
        self._queue: list[_Turn] = []  # the first ones have a place
        self._stopping = False

    @contextlib.contextmanager
    def turn(self, silo: str, *, is_active: Callable[[], bool], cut: Callable[[], object]) -> Iterator[None]:
        """Wait for a place and hold it.

        Args:
            silo: whose upload. Its older call ends: a silo sends one message at a time, so its line is dead.
            is_active: whether the call still stands; `wake` is called when it ends.
            cut: ends the call.

        Raises:
            LineClosed: the call ended first.
            OperationError: nobody gets a place any more, since this coordinator stops.
        """
        own = _Turn(silo, cut)
        with self._changed:
            older = [turn for turn in self._queue if turn.silo == silo]
            self._queue.append(own)
            self._changed.notify_all()
        try:
            for turn in older:
                turn.cut()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not is_active() or self._is_its_turn(own))
                if not is_active():
                    raise LineClosed
                if self._stopping:
                    raise OperationError("an upload waited for its turn while the coordinator was stopping")
            yield
        finally:
            with self._changed:
                self._queue.remove(own)
                self._changed.notify_all()

    def _is_its_turn(self, own: _Turn) -> bool:
        before = self._queue[: self._queue.index(own)]
        return len({turn.silo for turn in before}) < PLACES and all(turn.silo != own.silo for turn in before)

    @property
    def silos(self) -> frozenset[str]:
        """Silos whose large messages come in, or wait for a place."""
        with self._changed:
            return frozenset(turn.silo for turn in self._queue)

    @property
    def waiting(self) -> int:
        """Uploads without a place; of each, no byte of the payload has been taken."""
        with self._changed:
            return sum(not self._is_its_turn(turn) for turn in self._queue)

    def wake(self) -> None:
        """Some call has ended."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def arriving(self, silo: str, digest: str, announced: int) -> Iterator[Upload]:
        """The upload, with what has come of it already. Whoever has its silo's turn may ask.

        Args:
            silo: listed.
            digest: that the signed envelope names.
            announced: size of the whole payload.

        Raises:
            DiskFullError, OperationError: as `Upload`.
        """
        path = self._blobs.arriving / f"{silo}.{digest}.partial"
        try:
            self.sweep(silo, path)
            file = PartialFile(path, whole_bytes=announced)
        except OSError as error:
            raise not_kept(error, path) from error
        try:
            yield Upload(file)
        finally:
            try:
                file.close()
            except OSError:
                file.drop()

    def taken_before(self, store: db.Store, silo: str, digest: str) -> FilePayload | None:
        """The payload, where this silo's upload of it was taken and only the answer was lost."""
        of_silo = select(db.Upload.digest).where(db.Upload.silo == silo, db.Upload.digest == digest).limit(1)
        with store.transaction() as session:
            known = session.scalar(of_silo) is not None
        return self._blobs.find(digest) if known else None

    def sweep(self, silo: str = "", wanted: Path | None = None) -> None:
        """Remove what is too old, and of a silo that begins an upload what is too many beside that."""
        oldest = self._now_seconds() - PARTIAL_SECONDS_MAX
        with self._changed:
            sending = {turn.silo for turn in self._queue} - {silo}
            pieces: list[tuple[float, Path]] = []
            for path in self._blobs.arriving.glob("*.partial"):
                with contextlib.suppress(FileNotFoundError):
                    pieces.append((path.stat().st_mtime, path))
            own = [path for _, path in sorted(pieces) if silo and path.name.startswith(f"{silo}.") and path != wanted]
            too_many = set(own[: max(0, len(own) - PARTIALS_PER_SILO_MAX + 1)])
            for at, path in pieces:
                if path in too_many or (at < oldest and path.name.partition(".")[0] not in sending):
                    path.unlink(missing_ok=True)

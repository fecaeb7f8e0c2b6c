"""Large payloads on their way in: who may send now, and where an upload goes on after it was cut.

An upload gets a place before its first byte is taken: a few at a time, the others wait in the order in which they came,
and the bytes of whoever waits stay with the sender. What comes is written to `arriving/SILO.DIGEST.partial`. The same
silo with the same digest goes on at its end, after a cut line as after a kill of either side; the digest is what the
signed envelope names, so the bytes that come later can only be of the message that the site let out (T29).

Bounded (T23): a silo has one place, and its newest call has it; it leaves at most `PARTIALS_PER_SILO_MAX` pieces, none
larger than its kind may be; what nobody goes on with for `PARTIAL_SECONDS_MAX` is removed.
What this does not stop: as many silos as there are places, each at the slowest pace that is allowed, delay the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
from sqlalchemy import select

from coordinator import store as db
from coordinator.blobs import AnyPayload, Blobs, FilePayload, not_kept
from fedsilo.files.partial_file import PartialFile
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import OperationError

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
    """One payload that is being taken in.

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
        """It is not gone on with: it was judged, or it is not what was announced."""
        self._file.drop()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file.drop()
            raise not_kept(error, self._file.path) from error


class Uploads:
    """Args:
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
        """Whose large messages come in, or wait for a place."""
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
            found: list[tuple[float, Path]] = []
            for path in self._blobs.arriving.glob("*.partial"):
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, path))
            own = [path for _, path in sorted(found) if silo and path.name.startswith(f"{silo}.") and path != wanted]
            too_many = set(own[: max(0, len(own) - PARTIALS_PER_SILO_MAX + 1)])
            for at, path in found:
                if path in too_many or (at < oldest and path.name.partition(".")[0] not in sending):
                    path.unlink(missing_ok=True)

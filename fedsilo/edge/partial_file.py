"""Bytes that come over a line which may be cut at any of them, in a file: whoever opens it again goes on where it ends.

Every block is on the disk before a byte of the next one is written. So after a power cut, which may leave a file longer
than what was written of it, all before the block that it ends in is what came; no second file has to say how much that
is. Does not find bytes that a disk changed: whoever has all of them compares the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from pathlib import Path

from fedsilo.edge.files import write_past_cache

BLOCK_BYTES = 16 << 20
ROOM_BYTES = 2 << 20  # what is gathered before it is written; a block is a multiple of it
_PIECE_BYTES = 1 << 20


class PartialFile:
    """Opened where it ends, or empty.

    Args:
        path: of the file; made (0600) where it is not there.
        whole_bytes: of what is coming; a file that is longer is not the beginning of it, and is emptied.
        synced_bytes: size at which this process has closed the file before; 0 where it has not.
        hashed: whether `digest` is asked for; who holds all the bytes hashes them at once.

    Raises (all methods):
        OSError: the disk refused, or a link lies there.
    """

    def __init__(self, path: Path, *, whole_bytes: int, synced_bytes: int = 0, hashed: bool = True) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._hash = hashlib.sha256() if hashed else None
        self._room = mmap.mmap(-1, min(ROOM_BYTES, max(whole_bytes, 1)))  # begins on a page
        self._gathered = memoryview(self._room)[:0]
        self.size_bytes = 0
        try:
            found = os.fstat(self._descriptor).st_size
            certain = found if found == synced_bytes else max(found - 1, 0) // BLOCK_BYTES * BLOCK_BYTES
            os.ftruncate(self._descriptor, certain if found <= whole_bytes else 0)
            if self._hash is None:
                self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
            else:
                while piece := os.read(self._descriptor, _PIECE_BYTES):
                    self._hash.update(piece)
                    self.size_bytes += len(piece)
        except OSError:
            os.close(self._descriptor)
            raise
        self.resumed_at = self.size_bytes

    def write(self, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        if self._hash is not None:
            self._hash.update(view)
        while view:
            begin = len(self._gathered)
            # gathered to where a room ends in the file, so that each but the first after a cut begins on a page there
            end = min(len(self._room), ROOM_BYTES - (self.size_bytes - begin) % ROOM_BYTES)
            part = view[: end - begin]
            self._gathered = memoryview(self._room)[: begin + len(part)]
            self._gathered[begin:] = part
            self.size_bytes += len(part)
            if len(self._gathered) == end:
                self._write_out()
            view = view[len(part) :]

    def _write_out(self) -> None:
        gathered, self._gathered = self._gathered, memoryview(self._room)[:0]
        write_past_cache(self._descriptor, gathered)
        # Who judges it reads it at once: from the disk it comes while the rest is still on the line.
        with contextlib.suppress(OSError):  # an advice, which not every file system takes
            begin = self.size_bytes - len(gathered)
            os.posix_fadvise(self._descriptor, begin, len(gathered), os.POSIX_FADV_WILLNEED)
        if self.size_bytes % BLOCK_BYTES == 0:
            os.fdatasync(self._descriptor)

    def restart(self) -> None:
        """Forget what is there: it comes again from the first byte."""
        self._gathered = memoryview(self._room)[:0]
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash = None if self._hash is None else hashlib.sha256()
        self.size_bytes = self.resumed_at = 0

    def view(self) -> memoryview:
        """All that is there, mapped from the file, which may be removed then. Raises ValueError: nothing is there."""
        self._write_out()
        return memoryview(mmap.mmap(self._descriptor, self.size_bytes, access=mmap.ACCESS_READ))

    @property
    def digest(self) -> str:
        """SHA-256 of all that is there."""
        if self._hash is None:
            raise ValueError("it was opened without a hash")
        return self._hash.hexdigest()

    def close(self) -> None:
        """What is there is on the disk at return. Closing twice is harmless."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            write_past_cache(descriptor, self._gathered)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def drop(self) -> None:
        """Remove it, unless it has another name by now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.path.unlink(missing_ok=True)

"""Bytes that come over a line which may be cut at any of them, in a file: whoever opens it again goes on where it ends.

What was written is there after `kill -9` of whoever wrote it. After a power cut a file may hold something else than
what came, and no second file says how much of it does not: whoever has all the bytes compares the digest, and where
they are not what it names, everything comes again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

from fedsilo.files.durable import FLUSHED_BYTES, EarlyFlush, write_all

_PIECE_BYTES = 1 << 20


class PartialFile:
    """Opened where it ends, or empty.

    Args:
        path: of the file; made (0600) where it is not there.
        whole_bytes: of what is coming; a file that is longer is not the beginning of it, and is emptied.
        hashed: whether `digest` is asked for; who holds all the bytes hashes them at once.

    Raises (all methods):
        OSError: the disk refused, or a link lies there.
    """

    def __init__(self, path: Path, *, whole_bytes: int, hashed: bool = True) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._hash = hashlib.sha256() if hashed else None
        self._flush = EarlyFlush(self._descriptor)
        self.size_bytes = 0
        try:
            if os.fstat(self._descriptor).st_size > whole_bytes:
                os.ftruncate(self._descriptor, 0)
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
        write_all(self._descriptor, view)
        before, self.size_bytes = self.size_bytes, self.size_bytes + len(view)
        if before // FLUSHED_BYTES != self.size_bytes // FLUSHED_BYTES:
            self._flush.begin()

    def restart(self) -> None:
        """Forget what is there: it comes again from the first byte."""
        if self.size_bytes:  # ext4 writes out at close what was cut to nothing, for whoever replaces a file so
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash = None if self._hash is None else hashlib.sha256()
        self.size_bytes = self.resumed_at = 0

    def view(self) -> memoryview:
        """All that is there, mapped from the file, which may be removed then. Raises ValueError: nothing is there."""
        self._flush.begin()  # it goes to the disk while its reader looks at it
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # at once: page by page takes as long as hashing
        return memoryview(mmap.mmap(self._descriptor, self.size_bytes, flags=flags, prot=mmap.PROT_READ))

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
            self._flush.end()
        finally:
            os.close(descriptor)

    def drop(self) -> None:
        """Remove it, unless it has another name by now."""
        self.path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            self._flush.abandon()
            os.close(self._descriptor)
            self._descriptor = -1

"""Memory for one large buffer after the other.

Pages that a process has not had before are the dearest: the kernel clears each, and on a virtual machine whose host
gives memory at its first touch they cost several times what copying into them does. A `ReusableBuffer` is taken again
for the next message once nobody looks at the last one, at the price of its size while there is none.
"""

from __future__ import annotations

import contextlib
import mmap


class ReusableBuffer:
    """Starts on a page, in huge pages where the kernel has them. Not for several threads."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None

    def take(self, size_bytes: int) -> memoryview:
        """So many bytes, at least one, to be written to; they hold anything. What takes up memory is what is written,
        now or when they were taken before.

        Where somebody still holds a view of what was taken last, this is other memory, and that stays as it is.
        """
        if self._pages is not None:
            with contextlib.suppress(BufferError):  # somebody does
                self._pages.resize(size_bytes)
                return memoryview(self._pages)
        self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: seldom huge
        with contextlib.suppress(OSError):  # a kernel without
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._pages)

"""Places of a control socket's calls, so that whoever only looks leaves threads for people's commands.

A watch holds its thread for as long as somebody watches, and a query for as long as the daemon's loop takes. Each kind
has so many places, and one call more is refused at once; the threads beyond those are the commands'.
Does not stop: somebody in the socket's group who takes all places of one kind; reading is then refused, and commands
are not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from fedsilo.protocol.errors import OperationError

WATCHERS_MAX = 64
READERS_MAX = 32
_FOR_COMMANDS = 16  # one is carried out at a time, the others wait for it; a call that is refused is through at once
THREADS = WATCHERS_MAX + READERS_MAX + _FOR_COMMANDS


class NoPlace(OperationError):
    """So many calls of the kind are open already."""

    default_code = "TOO_MANY_CALLS"


class Places:
    """One kind of call.

    Args:
        kind: in words.
        most: how many may be open at a time.
    """

    def __init__(self, kind: str, most: int) -> None:
        self._cause = f"{most} {kind} of the control socket are open, which is the most"
        self._free = threading.Semaphore(most)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold a place while the block runs. Raises NoPlace."""
        if not self._free.acquire(blocking=False):
            raise NoPlace(self._cause, hint="end some of those that watch")
        try:
            yield
        finally:
            self._free.release()


def watchers() -> Places:
    return Places("watches", WATCHERS_MAX)


def readers() -> Places:
    return Places("queries", READERS_MAX)

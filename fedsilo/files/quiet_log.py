"""Log lines that somebody outside can cause at will: each kind at most so often, and the rest as a number (T24).

Without it, whoever may knock at a port or open a control socket for reading decides how large the log grows. The kinds
are the caller's; where there are too many of them, the further ones share one. Thread-safe.
What this does not bound: what one line holds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

QUIET_SECONDS = 10.0
KINDS_MAX = 32
_OTHERS = "of other kinds or from elsewhere"


@dataclass
class _Kind:
    """`since`: seconds, when its first line was said. `about`: what a count of it is a count of."""

    about: str
    since: float
    said: int = 0
    held: int = 0


class QuietLog:
    """Says at most `lines_max` lines of a kind in `QUIET_SECONDS`, then how many more there were.

    Args:
        log: where the lines go.
        lines_max: of one kind, in that time.
        monotonic: seconds.
    """

    def __init__(
        self, log: logging.Logger, *, lines_max: int = 1, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._lines_max = lines_max
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}

    def say(
        self, kind: str, about: str, line: str, *, level: int = logging.WARNING, error: BaseException | None = None
    ) -> bool:
        """Log `line`, or count it; tells whether it was logged.

        Args:
            kind: what counts as the same.
            about: begins the line that tells the count.
            line: the whole line.
            level: of logging.
            error: its traceback follows the line.
        """
        now = self._monotonic()
        self._tell(now - QUIET_SECONDS)
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                kind, about = _OTHERS, f"{about}, and lines {_OTHERS}"
            entry = self._kinds.setdefault(kind, _Kind(about, now))
            if entry.said >= self._lines_max:
                entry.held += 1
                return False
            entry.said += 1
        self._log.log(level, "%s", line, exc_info=error)
        return True

    def flush(self, *, everything: bool = False) -> None:
        """Tell the counts of the kinds whose time is over, or of all of them, and begin those anew."""
        self._tell(math.inf if everything else self._monotonic() - QUIET_SECONDS)

    def _tell(self, until: float) -> None:
        with self._lock:
            ended = [self._kinds.pop(kind) for kind in [k for k, entry in self._kinds.items() if entry.since <= until]]
        for entry in ended:
            if entry.held:
                self._log.warning("%s: %d more", entry.about, entry.held)

    @property
    def holding(self) -> bool:
        """Is there a count that is still to be told?"""
        with self._lock:
            return any(entry.held for entry in self._kinds.values())

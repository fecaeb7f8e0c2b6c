"""The console's one clock, by which ages grow and the lock closes: it counts on while the machine sleeps.

A clock that stands still in suspend would leave a laptop that was closed for the night unlocked in the morning, and
facts of yesterday looking fresh. Does not stop: somebody who opens it within the idle time.
"""

from __future__ import annotations

import time

# CLOCK_MONOTONIC counts suspend where there is no CLOCK_BOOTTIME (clock_gettime(2) of macOS); on Linux it does not.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since the machine was started, those in suspend included; never set back."""
    return time.clock_gettime(_CLOCK)


def waited_seconds(came_at: float) -> float:
    """Seconds for which an event waited to be looked at.

    Args:
        came_at: when it came, as Textual stamps its messages.
    """
    return max(time.monotonic() - came_at, 0.0)

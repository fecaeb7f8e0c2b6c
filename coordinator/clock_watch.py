"""The coordinator's clock, held against the time for which it has run (threat T41); the decision is in
`fedsilo.protocol.clocks`.

Nobody tells a coordinator the time, so its clock is believed as it is at the start. A jump forward beyond the limit is
not followed: what is judged, stored and signed goes by the time that has passed, until the clock is as before or an
approver accepts it. People are told of both.

Does not stop: a clock that is wrong at the start, which is recorded where the log's latest time is long over; a jump
below the limit, which is recorded.
"""

from __future__ import annotations

import threading
import time as system_time
from collections.abc import Callable

from fedsilo.protocol.clocks import SIGNED_SECONDS_MAX, SLACK_SECONDS, TOLD_SECONDS, Verdict, judge


def running() -> float:
    """Seconds since the machine was started, those in which it slept too."""
    return system_time.clock_gettime(getattr(system_time, "CLOCK_BOOTTIME", system_time.CLOCK_MONOTONIC))


class ClockWatch:
    """Thread-safe.

    Args:
        wall, running: seconds.

    Attributes:
        believed: what the clock showed when it was believed last without a question, UTC seconds.
        jumped: seconds of jumps, and of the gap before the start, that nobody has recorded yet.
        offset: the clock less the time for which the machine has run, seconds. Small steps of the clock do not move it.
    """

    def __init__(self, wall: Callable[[], float], running: Callable[[], float]) -> None:
        self._wall, self._running = wall, running
        self._mutex = threading.Lock()
        self.believed, self._since = wall(), running()
        self.offset = self.believed - self._since
        self.jumped = self._told = 0.0

    def begin(self, latest: float) -> None:
        """Tell of a gap since the audit log's end. latest: UTC seconds of that; 0 before its first record."""
        gap = self.believed - latest if latest else 0.0
        if gap > SIGNED_SECONDS_MAX + SLACK_SECONDS:
            self.jumped += gap

    def wall(self) -> float:
        """Return the time that the clock shows, believed or not, in UTC seconds."""
        return self._wall()

    def time(self) -> float:
        """UTC seconds to judge, store and sign by."""
        return self._look()[0]

    @property
    def ahead(self) -> float:
        """Seconds of a jump that is not followed; 0 while the clock is believed."""
        return self._look()[1]

    def take_jump(self) -> float:
        """Seconds that nobody vouches for and nobody was told of; asked again, they are none."""
        self._look()
        with self._mutex:
            jumped, self.jumped = self.jumped, 0.0
            return jumped

    def accept(self) -> None:
        """An approver accepts the clock as it is now."""
        with self._mutex:
            self.believed, self._since, self._told = self._wall(), self._running(), 0.0

    def _look(self) -> tuple[float, float]:
        """UTC seconds to go by, and by how much the clock is ahead of them."""
        with self._mutex:
            wall, running = self._wall(), self._running()
            if abs(wall - running - self.offset) > TOLD_SECONDS:
                self.offset = wall - running
            judged = judge(wall, stored=0.0, ran=self.believed + running - self._since)
            if abs(judged.seconds - self._told) > TOLD_SECONDS:
                self.jumped += max(0.0, judged.seconds - self._told)
                self._told = judged.seconds  # what it was believed at stays, so that small jumps add up
            return judged.time, judged.seconds if judged.verdict == Verdict.AHEAD else 0.0

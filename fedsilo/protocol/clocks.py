"""Judges whether a machine's clock may be believed (threat T41). Pure: every time is an argument.

Three things know better than a clock that was set wrong: the monotonic clock, as long as the process runs and the
machine is awake; the coordinator's signed time, whenever it can be asked; and the latest time that is stored. What is
stored never goes back, so a clock that is set back revives nothing: time stands still until it has caught up.

Does not stop: a clock that is wrong by less than the limits; a coordinator whose own clock is wrong from its start
(then a person compares the two); a clock that is wrong from the start at a site that nobody can tell the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

RUNNING_SECONDS_MAX = 86_400.0  # of a jump while a process runs, and of a clock behind what is stored
SIGNED_SECONDS_MAX = 3_600.0  # of any of it, where the coordinator's signed time was compared
SLACK_SECONDS = 5.0  # signed times are whole seconds, and an answer takes a moment
TOLD_SECONDS = 60.0  # a difference between two parties' clocks that people are told of

CERTIFICATE_TIME = "CERTIFICATE_TIME"  # code: a certificate is not valid by this machine's clock
COMMAND_TIME = "COMMAND_TIME"  # code: a person's order is not valid at the moment that a daemon's clock shows
CLOCK_UNKNOWN = "CLOCK_UNKNOWN"  # code: nobody has vouched for it yet


class Verdict(StrEnum):
    GOOD = "good"
    UNKNOWN = "unknown"  # longer off than a jump may be, and the coordinator can still be asked
    AHEAD = "CLOCK_AHEAD"
    BEHIND = "CLOCK_BEHIND"
    STORED_AHEAD = "CLOCK_STORED_AHEAD"  # the latest time that is stored is later than the clock shows


HALTING = frozenset({Verdict.AHEAD, Verdict.BEHIND, Verdict.STORED_AHEAD})


@dataclass(frozen=True)
class Judged:
    """A judgement on a clock.

    Attributes:
        verdict: whether the clock is believed.
        seconds: by how much it is off; with GOOD, the time that nobody can vouch for.
        time: UTC seconds to judge and store by in place of the clock.
    """

    verdict: Verdict
    seconds: float
    time: float


def judge(
    wall: float,
    *,
    stored: float,
    ran: float | None = None,
    signed: float | None = None,
    compared: bool = False,
    offline: bool = False,
) -> Judged:
    """Judge a clock.

    Args:
        wall: what it shows, UTC seconds.
        stored: the latest time that was ever stored; 0 before the first.
        ran: what it should show by the monotonic clock, since it was last believed in this process; None after a
            start and after a suspend.
        signed: what it should show by the coordinator's signed time, when that has just come.
        compared: a signed time was compared in this process.
        offline: nobody can be asked: a gap is gone on with.
    """
    if ran is not None:
        limit = SIGNED_SECONDS_MAX if compared else RUNNING_SECONDS_MAX
        if wall - ran > limit + SLACK_SECONDS:
            return Judged(Verdict.AHEAD, wall - ran, max(ran, stored))
        return Judged(Verdict.GOOD, max(0.0, wall - ran), wall)
    if signed is not None:
        limit = SIGNED_SECONDS_MAX + SLACK_SECONDS
        if wall - signed > limit:
            return Judged(Verdict.AHEAD, wall - signed, stored or signed)
        if signed - wall > limit:
            return Judged(Verdict.BEHIND, signed - wall, max(wall, stored))
        if stored - wall > limit:
            return Judged(Verdict.STORED_AHEAD, stored - wall, stored)
        return Judged(Verdict.GOOD, 0.0, wall)
    if stored and stored - wall > RUNNING_SECONDS_MAX + SLACK_SECONDS:
        return Judged(Verdict.STORED_AHEAD, stored - wall, stored)
    gap = max(0.0, wall - stored) if stored else 0.0
    if gap > SIGNED_SECONDS_MAX + SLACK_SECONDS and not offline:
        return Judged(Verdict.UNKNOWN, gap, stored)
    return Judged(Verdict.GOOD, gap, wall)


def in_words(seconds: float) -> str:
    """A difference as people say it: 3 h 2 min, 400 d 1 h."""
    left, parts = round(abs(seconds)), []
    for size, second in ((86_400, 3_600), (3_600, 60)):  # two parts are said, and the second one is rounded
        if left >= size - second / 2:
            left = round(left / second) * second
            break
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if left >= size:
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2]) or "0 s"


def apart(seconds: float) -> str:
    """Return the difference of one clock from another in words: 3 h 2 min ahead of, 5 min behind."""
    return f"{in_words(seconds)} {'ahead of' if seconds > 0 else 'behind'}"


def utc(seconds: float) -> str:
    """Return a time since 1970 as the answers of daemons spell it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Windows of polls in two logs: what one party permitted and counted against what the other did (T38).

A window of one log need not begin and end where one of the other does, so ranges of sequence numbers are compared: what
lies within a window of mine is at most what that window counts, and what a window of mine counts is at most what the
other's windows there can hold. Pure functions over records.

Does not show: one poll moved within a window, and anything within the bounds of a window that a crash ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedsilo.audit.poll_window import count_in, messages_of, permitted_by


@dataclass(frozen=True)
class Polls:
    """Some polls as one end recorded them.

    Attributes:
        record: that says so.
        first: sequence number of the first.
        last: of the last; infinite while the window is open.
        least: how many certainly passed.
        most: how many may have.
        began: UTC milliseconds.
        ended: UTC milliseconds.
    """

    record: int
    first: float
    last: float
    least: int
    most: int
    began: int
    ended: int

    def __str__(self) -> str:
        number = str(self.least) if self.least == self.most else f"{self.least} to {self.most}"
        last = "" if math.isinf(self.last) else f" to {self.last:.0f}"
        return f"{number} polls, sequence {self.first:.0f}{last}"


def opened(record: Mapping[str, Any]) -> Polls:
    """A window as the decision that begins it says; of the receiver's, one message had arrived by then."""
    least = int(record["event"] == "ingress.decision")
    first = record.get("sequence") or 0
    return Polls(record["seq"], first, math.inf, least, permitted_by(record), record["t"], record["t"])


def closed(window: Polls, record: Mapping[str, Any]) -> Polls:
    """The same window as the record that ends it says."""
    detail = record.get("detail", {})
    passed, refused = messages_of(record), count_in(detail, "refused") or 0
    stated = count_in(detail, "polls_most")
    most = passed if stated is None else stated
    # after a crash nobody knows the last one
    last = record.get("sequence") or window.first if most < window.most else math.inf
    return Polls(record["seq"], window.first, last, max(0, passed - refused), most, window.began, record["t"])


def problem_of(window: Polls, record: Mapping[str, Any]) -> str:
    """Why the record that ends a window cannot be true; empty where it can."""
    detail = record.get("detail", {})
    if any(count_in(detail, name) is None for name in {"polls", *({"polls_most", "refused"} & detail.keys())}):
        return f"is the end of a window, record {window.record}, and does not count its messages"
    if not (counted := messages_of(record)) <= (most := closed(window, record).most) <= window.most:
        return f"counts {max(counted, most)} messages, and its decision, record {window.record}, permits {window.most}"
    return ""


def in_order(ranges: Sequence[Polls]) -> list[Polls]:
    """Ranges of one log by their numbers, each ending before the next one begins: numbers only grow."""
    found = sorted(ranges, key=lambda one: (one.first, one.record))
    following = [after.first - 1 for after in found[1:]] + [math.inf]
    return [replace(one, last=max(one.first, min(one.last, end))) for one, end in zip(found, following, strict=False)]


def differences(
    mine: Sequence[Polls], theirs: Sequence[Polls], *, until: float, since: float, whole: bool
) -> list[tuple[Polls, str]]:
    """Ranges of one log that those of the other contradict, with what is wrong.

    Args:
        mine: of one run and kind.
        theirs: of the same.
        until: UTC milliseconds from which on the other log may not yet say what it knows.
        since: until which what the other log said may be gone.
        whole: whether both logs say all they ever will: then the totals are compared too.
    """
    found: list[tuple[Polls, str]] = []
    for one in mine:
        inside = sum(other.least for other in theirs if one.first <= other.first and other.last <= one.last)
        around = sum(other.most for other in theirs if other.first <= one.last and one.first <= other.last)
        if inside > one.most:
            found.append((one, f"has at least {inside} there"))
        elif around < one.least and one.ended < until and one.began > since:
            found.append((one, f"has at most {around} there"))
    least, most = sum(one.least for one in mine), sum(other.most for other in theirs)
    if whole and mine and least > most and not found:
        found.append((mine[0], f"has at most {most} in all, and {least} are counted here"))
    return found

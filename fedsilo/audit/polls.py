"""Windows of polls: one record lets many empty polls out, and one says how many there were (threats T38, T39).

A silo without work asks every few seconds whether there is some. One decision on record permits at most `POLLS_MAX` of
these messages within `WINDOW_SECONDS`; it is on disk before the first of them leaves (P2). Each is still judged by
every rule, counted in the ledger and given a sequence number of its own, so that a refused one is recorded as always
and every other message shows by its number how many came before it. The coordinator records what arrives in the same
way. After a crash a window is closed as "between none and as many as it permits".

A window of one log need not begin and end where one of the other does, so ranges of sequence numbers are compared: what
lies within a window of mine is at most what that window counts, and what a window of mine counts is at most what the
other's windows there can hold. Pure: no clock, no file.

Does not show: when within its window a poll left, one poll moved within a window, and how many there were of a window
that a crash ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fedsilo.audit.record import Record

KINDS: Final = frozenset({"control.poll", "control.heartbeat"})
WINDOW_SECONDS: Final = 3600
POLLS_MAX: Final = 4096
ARRIVED = "ingress.polls"  # the event that closes a window at the receiver
ENDS: Final = frozenset({"egress.sent", "egress.indeterminate", ARRIVED})  # events that may close one
_DECISIONS: Final = frozenset({"egress.decision", "ingress.decision"})


@dataclass
class PollWindow:
    """A decision that permits repeated messages of one kind until a time.

    Attributes:
        peer: SPIFFE id of the other side.
        kind: of its messages.
        run: of its messages; empty outside a run.
        policy: digest of the policy that permits them.
        until: UTC seconds.
        decision: number of the record that permits them.
        first: sequence number of the first message.
        last: of the newest one.
        permitted: messages that may have left, or that arrived.
        certain: those of them that are known to have left, or that arrived.
        refused: those of these that were answered with a refusal.
        payload_bytes: of the certain ones.
    """

    peer: str
    kind: str
    run: str
    policy: str
    until: float
    decision: int
    first: int
    last: int = 0
    permitted: int = 0
    certain: int = 0
    refused: int = 0
    payload_bytes: int = 0

    def covers(self, run: str, policy: str, now: float) -> bool:
        """Return whether one more message may go under the same decision."""
        return (self.run, self.policy) == (run, policy) and now < self.until and self.permitted < POLLS_MAX

    def passed(self, payload_bytes: int) -> None:
        """The message that was permitted last has left, or arrived."""
        self.certain, self.payload_bytes = self.certain + 1, self.payload_bytes + payload_bytes


@dataclass
class PollWindows:
    """The open windows of one party, one for each peer and kind.

    Args:
        append: to the audit log; the record's number.
        direction: egress at the sender, ingress at the receiver.
    """

    append: Callable[..., int]
    direction: str
    _open: dict[tuple[str, str], PollWindow] = field(default_factory=dict)

    def take(
        self, peer: str, kind: str, *, run: str, policy: str, now: float, sequence: int,
        decide: Callable[[Mapping[str, Any]], int],
    ) -> PollWindow:  # fmt: skip
        """Return the window that one more allowed message goes under; one that is over is closed first.

        Args:
            peer: SPIFFE id of the other side.
            kind: of the message.
            run: of the message.
            policy: digest of the policy that allowed it.
            now: UTC seconds.
            sequence: of the message.
            decide: records the decision that permits a new window, with this `detail`; the record's number.

        Raises:
            what `append` and `decide` do; the message may not go then.
        """
        window = self._open.get((peer, kind))
        if window is not None and not window.covers(run, policy, now):
            self._close(window)
            window = None
        if window is None:
            until = int(now) + WINDOW_SECONDS
            decision = decide({"window": {"polls_most": POLLS_MAX, "until": until}})
            window = self._open[peer, kind] = PollWindow(peer, kind, run, policy, until, decision, sequence)
        window.last, window.permitted = sequence, window.permitted + 1
        return window

    def close(self, *, over: float | None = None) -> None:
        """Record how many there were. over: only of windows that ended before this UTC second.

        Raises:
            what `append` does; what is not recorded stays open.
        """
        for window in list(self._open.values()):
            if over is None or window.until <= over:
                self._close(window)

    def _close(self, window: PollWindow) -> None:
        detail: dict[str, Any] = {"polls": window.certain, "first": window.first}
        if window.permitted > window.certain:
            detail["polls_most"] = window.permitted
        if window.refused:
            detail["refused"] = window.refused
        event = ARRIVED
        if self.direction == "egress":
            event = "egress.sent" if window.certain else "egress.indeterminate"
        self.append(
            event, kind=window.kind, run=window.run, round=0, step=0, peer=window.peer, direction=self.direction,
            sequence=window.last, payload={"bytes": window.payload_bytes}, link={"decision": window.decision},
            detail=detail,
        )  # fmt: skip
        del self._open[window.peer, window.kind]


def is_empty(kind: str, body: object) -> bool:
    """Return whether a message only asks; a poll that brings a signature under a round is on record by itself."""
    return kind in KINDS and not getattr(body, "countersignature", b"")


def count_in(block: object, name: str) -> int | None:
    """A count in a block of a record, whoever wrote it; None where there is none, or something else stands there."""
    value = block.get(name) if isinstance(block, Mapping) else None
    return value if type(value) is int and value >= 0 else None


def permitted_by(record: Record) -> int:
    """Return how many messages the window permits that a record begins; 0 for one that is no decision to begin one."""
    begins = record.event in _DECISIONS and record.decision == "allow" and _of_polls(record)
    detail = record.detail
    window = detail.get("window") if begins and isinstance(detail, Mapping) else None
    return count_in(window, "polls_most") or 0


def closing_after_crash(record: Record) -> tuple[str, dict[str, Any]]:
    """Event and `detail` that close the window of a decision whose party was killed."""
    most, first = permitted_by(record), record.sequence or 0
    if record.event == "egress.decision":
        return "egress.indeterminate", {"polls": 0, "polls_most": most, "first": first}
    return ARRIVED, {"polls": 1, "polls_most": most, "first": first}  # it was recorded as one had arrived


def messages_of(record: Record) -> int:
    """Return how many messages a record of what left, or arrived, stands for."""
    polls = count_in(record.detail, "polls")
    return 1 if polls is None or not _of_polls(record) else polls


def _of_polls(record: Record) -> bool:
    return record.kind in KINDS


# ---- windows of two logs compared --------------------------------------------------------------------------------


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


def opened(record: Record) -> Polls:
    """A window as the decision that begins it says; of the receiver's, one message had arrived by then."""
    least = int(record.event == "ingress.decision")
    first = record.sequence or 0
    return Polls(record.seq, first, math.inf, least, permitted_by(record), record.t, record.t)


def closed(window: Polls, record: Record) -> Polls:
    """Return the same window as the record that ends it says."""
    detail = record.detail
    passed, refused = messages_of(record), count_in(detail, "refused") or 0
    stated = count_in(detail, "polls_most")
    most = passed if stated is None else stated
    # after a crash nobody knows the last one
    last = record.sequence or window.first if most < window.most else math.inf
    return Polls(record.seq, window.first, last, max(0, passed - refused), most, window.began, record.t)


def problem_of(window: Polls, record: Record) -> str:
    """Why the record that ends a window cannot be true; empty where it can."""
    detail = record.detail
    if any(count_in(detail, name) is None for name in {"polls", *({"polls_most", "refused"} & detail.keys())}):
        return f"is the end of a window, record {window.record}, and does not count its messages"
    if not (counted := messages_of(record)) <= (most := closed(window, record).most) <= window.most:
        return f"counts {max(counted, most)} messages, and its decision, record {window.record}, permits {window.most}"
    return ""


def in_order(ranges: Sequence[Polls]) -> list[Polls]:
    """Ranges of one log by their numbers, each ending before the next one begins: numbers only grow."""
    ordered = sorted(ranges, key=lambda one: (one.first, one.record))
    following = [after.first - 1 for after in ordered[1:]] + [math.inf]
    return [replace(one, last=max(one.first, min(one.last, end))) for one, end in zip(ordered, following, strict=False)]


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
    differing: list[tuple[Polls, str]] = []
    for one in mine:
        inside = sum(other.least for other in theirs if one.first <= other.first and other.last <= one.last)
        around = sum(other.most for other in theirs if other.first <= one.last and one.first <= other.last)
        if inside > one.most:
            differing.append((one, f"has at least {inside} there"))
        elif around < one.least and one.ended < until and one.began > since:
            differing.append((one, f"has at most {around} there"))
    least, most = sum(one.least for one in mine), sum(other.most for other in theirs)
    if whole and mine and least > most and not differing:
        differing.append((mine[0], f"has at most {most} in all, and {least} are counted here"))
    return differing

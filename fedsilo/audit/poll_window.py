"""Windows of polls: one record lets many empty polls out, and one says how many there were (threats T38, T39).

A silo without work asks every few seconds whether there is some. One decision on record permits at most `POLLS_MAX` of
these messages within `WINDOW_SECONDS`; it is on disk before the first of them leaves (P2). Each is still judged by
every rule, counted in the ledger and given a sequence number of its own, so that a refused one is recorded as always
and every other message shows by its number how many came before it. The coordinator records what arrives in the same
way. After a crash a window is closed as "between none and as many as it permits".

Does not show: when within its window a poll left, and how many there were of a window that a crash ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

KINDS: Final = frozenset({"control.poll", "control.heartbeat"})
WINDOW_SECONDS: Final = 3600
POLLS_MAX: Final = 4096
ARRIVED = "ingress.polls"  # the event that closes a window at the receiver
ENDS: Final = frozenset({"egress.sent", "egress.indeterminate", ARRIVED})  # events that may close one
_DECISIONS: Final = frozenset({"egress.decision", "ingress.decision"})


@dataclass
class PollWindow:
    """Attributes:
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
        """Whether one more message may go under the same decision."""
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
    """Whether a message only asks; a poll that brings a signature under a round is on record by itself."""
    return kind in KINDS and not getattr(body, "countersignature", b"")


def count_in(block: object, name: str) -> int | None:
    """A count in a block of a record, whoever wrote it; None where there is none, or something else stands there."""
    value = block.get(name) if isinstance(block, Mapping) else None
    return value if type(value) is int and value >= 0 else None


def permitted_by(record: Mapping[str, Any]) -> int:
    """How many messages the window permits that a record begins; 0 for one that is no decision to begin one."""
    begins = record.get("event") in _DECISIONS and record.get("decision") == "allow" and _of_polls(record)
    detail = record.get("detail")
    window = detail.get("window") if begins and isinstance(detail, Mapping) else None
    return count_in(window, "polls_most") or 0


def closing_after_crash(record: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Event and `detail` that close the window of a decision whose party was killed."""
    most, first = permitted_by(record), record.get("sequence") or 0
    if record["event"] == "egress.decision":
        return "egress.indeterminate", {"polls": 0, "polls_most": most, "first": first}
    return ARRIVED, {"polls": 1, "polls_most": most, "first": first}  # it was recorded as one had arrived


def messages_of(record: Mapping[str, Any]) -> int:
    """How many messages a record of what left, or arrived, stands for."""
    polls = count_in(record.get("detail"), "polls")
    return 1 if polls is None or not _of_polls(record) else polls


def _of_polls(record: Mapping[str, Any]) -> bool:
    return str(record.get("kind")) in KINDS

"""Checks the messages in audit logs: each log by itself, and one party's sent messages against the other's received
ones (T38).

A log can verify and still tell what cannot be: a message that was sent although it was denied, without any decision, by
a decision against its own rules, or after a hold that nobody granted, or that a person rejected or time ended. Two logs
can verify and contradict each other: what the coordinator received of a silo is what that silo sent, by kind, place,
size and, for tensors, digest. Pure functions over records.

What is honestly possible is no difference: an outcome that the sender does not know; a repetition of a message that
arrived, which the receiver does not record twice; what the sender saw refused, since a refusal may only be counted; and
what is newer than the other log's end, or as old as records that retention reduced to leaf hashes. Parties' clocks may
differ: by how much is the median over the messages that both recorded, and a log with more than a minute says so.

Does not show: what both parties leave out, the last messages of a log within `CLOCKS_APART_MILLISECONDS` of its end,
anything after a log's end (an older copy looks the same), what stands in records that retention removed, and what a
coordinator sent, which its log does not record. That a grant is the person's is the approval's signature, not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from fedsilo.audit import polls as audit_polls
from fedsilo.audit.audit_verify import LogResult
from fedsilo.audit.polls import ARRIVED, ENDS, Polls, permitted_by
from fedsilo.audit.reader import typed_records
from fedsilo.audit.record import Record
from fedsilo.protocol.clocks import TOLD_SECONDS, apart
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.transcript import coordinator_domain

PROBLEMS_MAX = 20  # told of one log by itself
DIFFERENCES_MAX = 5  # told of one direction between two logs
CLOCKS_APART_MILLISECONDS = 300_000  # two honest parties' clocks

_NO = frozenset({"deny", "hold"})  # outcomes of a rule with which no decision is an allow
_RULES_SHOWN_MAX = 5

What = tuple[Any, ...]
PollsKey = tuple[str, str, str]  # the other end, run, kind


@dataclass(frozen=True)
class MessageRecord:
    """A message as one end recorded it."""

    record: int
    t: int
    event: str
    place: What  # run, kind, round, step, payload bytes
    sequence: int | None
    digest: str  # SHA-256; empty where only a keyed digest may stand in a log (T40)
    attempt: int
    carried: bool  # in a file, which may get lost

    @classmethod
    def of(cls, record: Record) -> MessageRecord:
        return cls(
            record=record.seq,
            t=record.t,
            event=record.event,
            place=(record.run, record.kind, record.round, record.step, record.payload.get("bytes")),
            sequence=record.sequence,
            digest=str(record.payload.get("sha256", "")),
            attempt=record.attempt,
            carried=bool(record.detail.get("carried")),
        )

    @property
    def slot(self) -> tuple[str, int | None]:
        """Return the key by which both ends name one message: numbers are given once in a run, to each sender."""
        return self.place[0], self.sequence

    def same(self, other: MessageRecord) -> bool:
        alike = not (self.digest and other.digest) or self.digest == other.digest
        return alike and self.place == other.place

    def __str__(self) -> str:
        run, kind, number, step, size = self.place
        where = f", round {number}.{step} of run {run}" if run else ""
        return f"record {self.record}: {kind} of {size} bytes{where}"


@dataclass
class LogSummary:
    """Summary of what one log says of messages. `problems`: what cannot be true in it."""

    origin: str
    name: str
    reduced: bool = False  # leaf hashes only are left of its first records
    problems: list[str] = field(default_factory=list)
    sent: dict[str, list[MessageRecord]] = field(default_factory=dict)  # by receiver; also what perhaps went out
    received: dict[str, list[MessageRecord]] = field(default_factory=dict)  # by sender
    arrived: set[int] = field(default_factory=set)  # records of what was carried and acknowledged
    refused: set[int] = field(default_factory=set)  # records of what was sent and answered with a refusal
    polls: dict[PollsKey, list[Polls]] = field(default_factory=dict)  # windows by other end, run and kind
    first_t: int = 0
    last_t: int = 0


def summarize(records: Iterable[Record], *, origin: str, name: str) -> LogSummary:
    """Read one log's records in order. Raises FedSiloError: from `records`; what was read until then is lost."""
    summary, checks = LogSummary(origin, name), MessageChecks()
    under_way: dict[int, tuple[str, MessageRecord]] = {}  # allowed, outcome not recorded
    exported: dict[int, MessageRecord] = {}  # by decision, what left in a file last
    answered: dict[str, MessageRecord] = {}  # the newest message to each peer, as long as its answer is not recorded
    for record in records:
        if not summary.first_t:
            summary.first_t, summary.reduced = record.t, record.seq > 0
        summary.last_t = max(summary.last_t, record.t)
        event, peer = record.event, record.peer
        if checks.take(record):
            continue
        if event == "egress.decision" and record.decision == "allow":
            under_way[record.seq] = peer, MessageRecord.of(record)
        elif event in ("egress.sent", "egress.indeterminate"):
            under_way.pop(record.decided_by or 0, None)
            answered[peer] = MessageRecord.of(record)
            summary.sent.setdefault(peer, []).append(answered[peer])
            if answered[peer].carried:
                exported[record.decided_by or 0] = answered[peer]
        elif event == "egress.acked" and (message := exported.get(record.decided_by or 0)):
            summary.arrived.add(message.record)
        elif event == "ingress.decision" and peer:
            before = answered.pop(peer, None)
            if before and (record.kind == "control.refusal" or record.decision == "deny"):
                summary.refused.add(before.record)
            if "bytes" in record.payload and not record.approvals:
                summary.received.setdefault(peer, []).append(MessageRecord.of(record))
    for peer, message in under_way.values():
        summary.sent.setdefault(peer, []).append(message)
    summary.problems, summary.polls = checks.problems, checks.polls
    return summary


# ---- one log ---------------------------------------------------------------------------------------------


class MessageChecks:
    """Checks, record by record, that each message that left was allowed to by the records before it."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._first: int | None = None  # number of the first record that is left
        self._decisions: dict[int, tuple[str, MessageRecord]] = {}  # of content always; of control until it was sent
        self._tried: set[tuple[int, int]] = set()  # (decision, attempt) that was sent
        self._held: set[What] = set()
        self._asked: set[What] = set()  # releases whose request is among these records
        # release -> record -> person whose yes is not used up, and the name of the hold that it answers
        self._grants: dict[What, dict[int, tuple[str, str]]] = {}
        # of polls, by the decision that permits them: its event, whose they are, and how many
        self._windows: dict[int, tuple[str, PollsKey, Polls]] = {}
        self.polls: dict[PollsKey, list[Polls]] = {}  # all windows, by other end, run and kind
        self._void: dict[int, tuple[int, str]] = {}  # record of a yes -> record and event that ended its hold with a no

    def _tell(self, record: Record, text: str) -> None:
        self.problems.append(f"record {record.seq}: {record.kind or 'a message'} {text}")

    def take(self, record: Record) -> bool:
        """Check the next record; return True if it begins or ends a window of polls."""
        self._first = record.seq if self._first is None else self._first
        event = record.event
        if begins := bool(permitted_by(record)):
            key, window = (record.peer, record.run, record.kind), audit_polls.opened(record)
            self._windows[record.seq] = event, key, window
            self.polls.setdefault(key, []).append(window)
        ended = (
            self._windows.pop(-1 if record.decided_by is None else record.decided_by, None) if event in ENDS else None
        )
        if ended is not None:
            self._window_ended(record, *ended)
        elif event == ARRIVED or (event == "egress.indeterminate" and "polls" in record.detail):
            self._no_window(record)
        elif event == "egress.sent":
            self._sent(record)
        elif event in ("egress.decision", "ingress.decision"):
            self._decided(record)
        elif event == "approval.request":
            self._asked.add(record.held_bytes)
        elif event == "approval.grant":
            person = str(record.detail.get("person", ""))
            self._grants.setdefault(record.held_bytes, {})[record.seq] = person, _hold(record)
        elif event in ("approval.deny", "approval.expire"):  # what was granted until then frees nothing any more
            granted = self._grants.get(record.held_bytes, {})
            for number in [number for number, (_, hold) in granted.items() if hold == _hold(record)]:
                del granted[number]
                self._void[number] = record.seq, event
        return begins or ended is not None

    def _decided(self, record: Record) -> None:
        verdict, release, leaves = record.decision, record.held_bytes, record.event == "egress.decision"
        if leaves:
            self._decisions[record.seq] = verdict, MessageRecord.of(record)
        release_key = (*release, record.policy)
        if verdict == "hold" and leaves:
            self._held.add(release_key)
        if verdict != "allow":
            return
        if against := [str(rule.get("rule")) for rule in record.rules if rule.get("outcome") in _NO]:
            self._tell(record, f"is allowed, and its own rules say otherwise: {', '.join(against[:_RULES_SHOWN_MAX])}")
        # how many the rule of that name asked for, as the record itself says
        limits = [rule.get("limit") for rule in record.rules if rule.get("rule") == "approvals"]
        named, needed = record.approvals, max((limit for limit in limits if isinstance(limit, int)), default=0)
        if release_key in self._held and release[-1] and not named:
            self._tell(record, "was held, and is allowed under the same policy without anybody's approval")
        granted = self._grants.get(release, {})
        void = sorted(number for number in named if number in self._void)
        lacking = sorted(str(number) for number in named - granted.keys() - set(void))
        approvals_given = len({person for number, (person, _) in granted.items() if number in named})
        is_recorded = release in self._asked or not self._first  # else the grants may be among what retention removed
        if void:
            (end, ending), numbers = self._void[void[0]], ", ".join(map(str, void))
            self._tell(record, f"is allowed with approvals of which {numbers} ended with record {end}, {ending}")
        elif lacking and is_recorded:
            self._tell(record, f"is allowed with approvals of which {', '.join(lacking)} are no grants before it")
        elif approvals_given + len(lacking) < needed:
            self._tell(
                record, f"is allowed with approvals of {approvals_given} persons, and its rule asks for {needed}"
            )
        if named and leaves:
            self._grants.pop(release, None)

    def _window_ended(self, record: Record, began: str, key: PollsKey, window: Polls) -> None:
        self._decisions.pop(window.record, None)
        # by the key of its beginning: a hostile log may say another one at its end
        ranges = self.polls[key]
        ranges[ranges.index(window)] = audit_polls.closed(window, record)
        if began.partition(".")[0] != record.event.partition(".")[0]:
            self._tell(record, f"is the end of a window of the other direction, record {window.record}")
        elif key != (record.peer, record.run, record.kind):
            self._tell(record, f"is the end of a window of another peer, run or kind, record {window.record}")
        elif problem := audit_polls.problem_of(window, record):
            self._tell(record, problem)

    def _no_window(self, record: Record) -> None:
        number = record.decided_by
        if number is None or number >= (self._first or 0):  # else retention removed its beginning
            self._tell(record, "is the end of a window, and names none that is open")

    def _sent(self, record: Record) -> None:
        number, message = record.decided_by, MessageRecord.of(record)
        if number is None:
            self._tell(record, "was sent, and names no decision")
            return
        if number < (self._first or 0):
            return
        if number not in self._decisions:
            self._tell(record, f"was sent, and record {number} is no decision on a message that was still to leave")
            return
        verdict, decided = self._decisions[number]
        if verdict != "allow":
            self._tell(record, f"was sent, and its decision, record {number}, is {verdict}")
        elif decided.place[:2] != message.place[:2] or (decided.place[-1] is not None and not decided.same(message)):
            self._tell(record, f"was sent, and its decision, record {number}, is on another message")
        elif "polls" in record.detail:
            self._tell(record, f"counts messages, and its decision, record {number}, is on a single one")
        elif (number, message.attempt) in self._tried:
            self._tell(record, f"was sent twice in one attempt under its decision, record {number}")
        if record.kind.startswith("control."):
            del self._decisions[number]
        else:
            self._tried.add((number, message.attempt))


def _hold(record: Record) -> str:
    """The name of the one hold that is answered; the same bytes may be held again, under another name."""
    return str(record.detail.get("release", ""))


# ---- two logs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Result of comparing what two logs say about the messages between them.

    Attributes:
        differences: messages that only one has, or that they have differently: a sentence each, which names a record.
        pairs: messages that both recorded.
        ahead_milliseconds: of the sender's clock before the receiver's, the median over them; 0 without any.
    """

    differences: list[str]
    pairs: int
    ahead_milliseconds: int

    @property
    def clocks(self) -> str:
        """Return by how much the sender's clock was off the receiver's, in words; empty up to a minute."""
        seconds = self.ahead_milliseconds / 1000
        return "" if abs(seconds) <= TOLD_SECONDS else apart(seconds)


def compare(sender: LogSummary, receiver: LogSummary, *, under_way: bool = True) -> Comparison:
    """Messages from one party to the other.

    Args:
        sender: its log.
        receiver: its log.
        under_way: whether one log may end before the other; False where both parties had stopped.
    """
    windowed = _windowed(sender, receiver)
    sent, received = (
        [message for message in messages if (message.place[0], message.place[1]) not in windowed]
        for messages in (sender.sent.get(receiver.origin, []), receiver.received.get(sender.origin, []))
    )
    waiting: dict[tuple[str, int | None], list[MessageRecord]] = {}
    for message in reversed(received):
        waiting.setdefault(message.slot, []).append(message)
    pairs: list[tuple[MessageRecord, MessageRecord]] = []
    lacking: list[MessageRecord] = []
    for message in sent:
        arrivals = waiting.get(message.slot, [])
        # without numbers, what is alike belongs together
        index = next((at for at in reversed(range(len(arrivals))) if message.same(arrivals[at])), len(arrivals) - 1)
        if index >= 0 and (message.sequence is not None or message.same(arrivals[index])):
            pairs.append((message, arrivals.pop(index)))
        elif message.event == "egress.sent" and (not message.carried or message.record in sender.arrived):
            # else nobody knows, or it is under way
            lacking.append(message)
    ahead = round(median(one.t - other.t for one, other in pairs)) if pairs else 0
    differences = [
        f"{one} as {sender.name} sent it is not record {other.record} of {receiver.name}"
        for one, other in pairs
        if not one.same(other)
    ]
    left = sorted(chain.from_iterable(waiting.values()), key=lambda message: message.record)
    for end, (mine, theirs, having, other, verb) in enumerate(
        ((lacking, received, sender, receiver, "sent"), (left, sent, receiver, sender, "received"))
    ):
        matched = [pair[end].record for pair in pairs]
        first, last = min(matched, default=None), max(matched, default=-1)
        known = {(one.place, one.digest) for one in theirs if not str(one.place[1]).startswith("control.")}
        for message in mine:
            # a silo that starts again sends again; what arrived unknown to its sender was a further attempt
            repeated = (message.place, message.digest) in known and (verb == "sent" or message.attempt > 0)
            before = first is None or message.record < first
            t = message.t + (ahead if end else -ahead)  # by the other's clock
            before = before and other.reduced and t <= other.first_t + CLOCKS_APART_MILLISECONDS
            after = message.record > last and t >= other.last_t - CLOCKS_APART_MILLISECONDS
            if not (repeated or before or (after and under_way) or message.record in having.refused):
                differences.append(f"{message} that {having.name} {verb} is not in the log of {other.name}")
    differences += _polls_differ(sender, receiver, windowed, ahead, under_way=under_way)
    return Comparison(differences, len(pairs), ahead)


def _windowed(sender: LogSummary, receiver: LogSummary) -> set[tuple[str, str]]:
    """Return the runs and kinds for which one of two logs has windows."""
    ends = ((sender, receiver.origin), (receiver, sender.origin))
    return {(run, kind) for summary, peer in ends for whose, run, kind in summary.polls if whose == peer}


def _polls_differ(
    sender: LogSummary, receiver: LogSummary, windowed: set[tuple[str, str]], ahead: int, *, under_way: bool
) -> list[str]:
    """Return what two logs say differently of polls where one of them has windows.

    Args:
        sender: its log.
        receiver: its log.
        windowed: as `_windowed`.
        ahead: milliseconds of the sender's clock before the receiver's.
        under_way: as `compare`.
    """
    ends = ((sender, receiver.origin), (receiver, sender.origin))
    differences: list[str] = []
    for run, kind in sorted(windowed):
        sides = []
        for summary, peer in ends:
            messages = (summary.sent if summary is sender else summary.received).get(peer, [])
            singly = [_as_polls(summary, one) for one in messages if one.place[:2] == (run, kind)]
            sides.append(audit_polls.in_order(summary.polls.get((peer, run, kind), []) + singly))
        for (summary, _), (other, _), mine, theirs in zip(ends, ends[::-1], sides, sides[::-1], strict=True):
            by_mine = ahead if summary is sender else -ahead  # from the other's clock to this one's
            until = other.last_t + by_mine - CLOCKS_APART_MILLISECONDS if under_way else float("inf")
            since = other.first_t + by_mine + CLOCKS_APART_MILLISECONDS if other.reduced else float("-inf")
            whole = not under_way and not other.reduced
            differences += [
                f"record {one.record}: {kind} of {summary.name}, {one}: the log of {other.name} {what}"
                for one, what in audit_polls.differences(mine, theirs, until=until, since=since, whole=whole)
            ]
    return differences


def _as_polls(summary: LogSummary, message: MessageRecord) -> Polls:
    """A poll that has a record of its own."""
    unsure = message.event in ("egress.decision", "egress.indeterminate") or message.record in summary.refused
    unsure = unsure or (message.carried and message.record not in summary.arrived)
    at = message.sequence or 0
    return Polls(message.record, at, at, int(not unsure), 1, message.t, message.t)


def check_consistency(results: Sequence[LogResult], logs: Sequence[Path]) -> None:
    """Check each log by itself, and all logs against each other; what is wrong is added to the logs' results.

    Args:
        results: of `verify_logs` on the same logs; a log with a problem is not verified any more.
        logs: folders.
    """
    summaries: list[LogSummary | None] = []
    problems: list[list[str]] = [[] for _ in logs]
    for log, result, own_problems in zip(logs, results, problems, strict=True):
        try:
            summary = summarize(typed_records(log), origin=result["origin"], name=result["log"])
        except FedSiloError as error:
            summaries.append(None)
            if not result["problems"]:  # else the verification has named it
                own_problems.append(f"its records cannot be read: {error.message}")
        else:
            summaries.append(summary)
            own_problems.extend(_first_of(summary.problems, PROBLEMS_MAX))
    for one, sender in enumerate(summaries):
        for other, receiver in enumerate(summaries):
            # an honest coordinator's log has no records of what it sends
            if sender and receiver and one != other and (sender.sent or not coordinator_domain(sender.origin)):
                compared = compare(sender, receiver)
                _tell_clocks(results[one], receiver.name, compared)
                differences = _first_of(compared.differences, DIFFERENCES_MAX)
                problems[one] += differences
                problems[other] += differences
    for result, own_problems in zip(results, problems, strict=True):
        if own_problems:
            result["problems"] = [*result["problems"], *own_problems]
            result["verified"] = False


def _tell_clocks(result: LogResult, other: str, compared: Comparison) -> None:
    if compared.pairs:
        clocks = result.setdefault("clocks", [])
        clocks.append({"other": other, "ahead_milliseconds": compared.ahead_milliseconds, "pairs": compared.pairs})
    if compared.clocks:
        count = f"{compared.pairs} message{'s' * (compared.pairs != 1)}"
        sentence = f"its clock was {compared.clocks} that of {other}, by the median of {count} that both recorded"
        result["notices"] = [*result["notices"], sentence]


def _first_of(problems: Sequence[str], most: int) -> list[str]:
    more = [f"and {len(problems) - most} more of this kind"] * (len(problems) > most)
    return [*problems[:most], *more]

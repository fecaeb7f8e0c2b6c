"""Which messages a party's audit log tells of, kept in memory, so that a page of them costs what it shows.

The log stays the only truth: the index is folded from it when it is first asked for, and with the records that were
added each time after that, in the asking thread. It holds numbers of records, not their content: about 60 bytes for
each message that is not an allowed control message (silos poll all the time), of at most `ROWS_MAX` messages in each
direction, so 15 MB; and the rows of the newest `ROWS_READY` (some 2 KiB each, 4 MB). Rows before these are read from
the log by their position; messages that are not indexed, by looking back through it, `LOOK_RECORDS` records a call.

Does not show: a message whose record was damaged on the disk since (`audit.verify` names it), or was removed by
retention.
"""

from __future__ import annotations

import json
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsilo.audit.reader import LogPages
from fedsilo.protocol.clocks import utc

ROWS_MAX = 250_000
ROWS_READY = 2_000
LOOK_RECORDS = 4_000
FOLD_RECORDS = 1_024  # lines in memory at a time while folding
OUTCOME_RECORDS = 64  # of a message that is not indexed the outcome is looked for in so many records behind it

DECISION_EVENTS = {"egress": "egress.decision", "ingress": "ingress.decision"}
OUTCOMES = ("", "sent", "acked", "indeterminate")
# What became of a message that was held: empty while people are asked. `approved` has a decision of its own, `ended` is
# one so old that only its end is known, and `repeated` one that came again, as a plan does with each poll.
HOLD_ENDS = ("approved", "rejected", "denied", "expired", "missed", "ended", "repeated")
_FATES = (*OUTCOMES, *HOLD_ENDS)
_NO_EVENTS = ("approval.deny", "approval.expire")  # that end a hold without a yes
# As canonical JSON spells them.
_MARKS = tuple(f'"event":"{event}'.encode() for event in ("egress.", 'ingress.decision"', *_NO_EVENTS))
_COUNTED = ("units", "tensors", "responses", "metrics", "donors", "prompts", "questions")  # what a message has many of
_NOT_YET = -1


@dataclass
class _Rows:
    """One direction. The lists by filter hold record numbers in ascending order; `all` has three columns beside it."""

    all: array[int] = field(default_factory=lambda: array("Q"))
    outcomes: array[int] = field(default_factory=lambda: array("B"))
    monotonic: array[int] = field(default_factory=lambda: array("Q"))  # milliseconds, at the decision
    elapsed: array[int] = field(default_factory=lambda: array("q"))  # milliseconds from there to the sending
    by: dict[tuple[str, str], array[int]] = field(default_factory=dict)  # (verdict or "", kind or "") -> numbers
    ready: OrderedDict[int, dict[str, Any]] = field(default_factory=OrderedDict)
    counts: dict[str, int] = field(default_factory=dict)  # verdict -> messages, of the whole log
    control_allowed: int = 0  # messages that are not indexed
    complete_from: int = 0  # every message from this record on is indexed
    waiting: dict[tuple[object, ...], list[int]] = field(default_factory=dict)  # held, by what was held
    held: set[int] = field(default_factory=set)  # the same, by their records

    def hold(self, seq: int, bytes_of: tuple[object, ...], *, again: bool) -> None:
        """again: these bytes wait once, however often they come."""
        if again:
            self.end_hold(bytes_of, "repeated")
        self.held.add(seq)
        self.waiting.setdefault(bytes_of, []).append(seq)

    def end_hold(self, bytes_of: tuple[object, ...], end: str) -> None:
        """The oldest hold of these bytes is over."""
        if not (waiting := self.waiting.get(bytes_of)):
            return
        seq = waiting.pop(0)
        self.held.discard(seq)
        if not waiting:
            del self.waiting[bytes_of]
        if (at := self.place(seq)) is not None:
            self.outcomes[at] = _FATES.index(end)

    def add(self, row: dict[str, Any], monotonic: int) -> None:
        seq, verdict, kind = row["seq"], row["verdict"], row["kind"]
        self.all.append(seq)
        self.outcomes.append(0)
        self.monotonic.append(monotonic)
        self.elapsed.append(_NOT_YET)
        for key in ((verdict, ""), ("", kind), (verdict, kind)):
            self.by.setdefault(key, array("Q")).append(seq)
        self.counts[verdict] = self.counts.get(verdict, 0) + 1
        self.ready[seq] = row
        if len(self.ready) > ROWS_READY:
            self.ready.popitem(last=False)
        if len(self.all) > ROWS_MAX:
            self._cut(ROWS_MAX // 4)

    def _cut(self, rows: int) -> None:
        self.complete_from = self.all[rows]
        for column in (self.outcomes, self.monotonic, self.elapsed):
            del column[:rows]
        for numbers in (self.all, *self.by.values()):
            del numbers[: bisect_left(numbers, self.complete_from)]

    def place(self, seq: int) -> int | None:
        at = bisect_left(self.all, seq)
        return at if at < len(self.all) and self.all[at] == seq else None


@dataclass(frozen=True)
class Page:
    """Attributes:
    rows: newest first.
    next: ask again with this as `before`; None where nothing older is left.
    """

    rows: list[dict[str, Any]]
    next: int | None


class MessageIndex:
    """Thread-safe; the first call folds the log, or what was added to it.

    Args:
        pages: the log.
        size: how many records it has by now.
    """

    def __init__(self, pages: LogPages, size: Callable[[], int]) -> None:
        self._pages = pages
        self._size = size
        self._lock = threading.Lock()
        self._at = 0
        self._boots: dict[int, str] = {}  # first decision after a start -> boot; clocks of two boots do not compare
        self._boot = ""
        self._sides = {"egress": _Rows(), "ingress": _Rows()}

    # ---- folding -----------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Take in every record up to the log's present size. Raises FedSiloError: it cannot be read."""
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> None:
        size = self._size()
        while self._at < size:
            end = min(self._at + FOLD_RECORDS, size)
            for number, line in self._pages.lines(self._at, end):
                if any(mark in line for mark in _MARKS):
                    self._take(number, line)
            self._at = end

    def _take(self, number: int, line: bytes) -> None:
        record = parsed(number, line)
        if record is None:
            return
        event = record["event"]
        direction, _, what = event.partition(".")
        if event in DECISION_EVENTS.values():
            side = self._sides[direction]
            if not is_content(record):
                side.control_allowed += 1
                return
            if record["boot"] != self._boot:
                self._boot = self._boots[number] = record["boot"]
            side.add(row_of(record), record["mono"])
            if record["decision"] == "hold":
                side.hold(number, _held_bytes(record), again=direction == "ingress")
            elif record.get("link", {}).get("approvals"):  # the second decision, after people's yes
                side.end_hold(_held_bytes(record), "approved" if record["decision"] == "allow" else "denied")
        elif event in _NO_EVENTS:
            for side in self._sides.values():
                side.end_hold(_held_bytes(record), _end_of(record))
        elif direction == "egress" and what in OUTCOMES:
            self._outcome(record, what)

    def _outcome(self, record: Mapping[str, Any], what: str) -> None:
        side, decided = self._sides["egress"], record.get("link", {}).get("decision")
        at = side.place(decided) if isinstance(decided, int) else None
        if at is None:
            return
        side.outcomes[at] = OUTCOMES.index(what)
        if what == "sent" and record["boot"] == self._boot_of(side.all[at]):
            side.elapsed[at] = max(0, record["mono"] - side.monotonic[at])

    def _boot_of(self, seq: int) -> str:
        starts = list(self._boots)
        at = bisect_left(starts, seq + 1) - 1
        return self._boots[starts[at]] if at >= 0 else ""

    # ---- asking ------------------------------------------------------------------------------------

    def page(
        self, direction: str, *, before: int | None = None, limit: int, verdict: str = "", kind: str = "",
        control: bool = False,
    ) -> Page:  # fmt: skip
        """Messages of one direction, newest first.

        Args:
            direction: egress or ingress.
            before: only records before this number.
            limit: rows at most. Fewer may come although more are left; `next` says so.
            verdict: only these decisions.
            kind: only this kind.
            control: allowed control messages too, which are not indexed.

        Raises:
            FedSiloError: the log cannot be read.
        """
        with self._lock:
            self._catch_up()
            side = self._sides[direction]
            before = self._at if before is None else min(before, self._at)
            if control and verdict in ("", "allow"):
                return self._look_back(direction, before, limit, verdict, kind, control=True)
            numbers = side.by.get((verdict, kind), array("Q")) if verdict or kind else side.all
            end = bisect_left(numbers, before)
            chosen = list(reversed(numbers[max(0, end - limit) : end]))
            rows = self._rows(side, chosen)
            if end > limit:
                return Page(rows, chosen[-1])
            if not side.complete_from:
                return Page(rows, None)
            # messages so old that they are not indexed
            rest = self._look_back(
                direction, min(before, side.complete_from), limit - len(rows), verdict, kind, control=False
            )
            return Page(rows + rest.rows, rest.next)

    def totals(self, direction: str, *, control: bool = False) -> dict[str, int]:
        """{"total", "held", "denied"}: messages of the whole log. Held are those that people are asked about still;
        denied those that were when they were first decided on."""
        with self._lock:
            self._catch_up()
            side = self._sides[direction]
            total = sum(side.counts.values()) + (side.control_allowed if control else 0)
            return {"total": total, "held": len(side.held), "denied": side.counts.get("deny", 0)}

    def fate(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """{"outcome", "milliseconds"} of one decision. Raises FedSiloError: the log cannot be read."""
        with self._lock:
            self._catch_up()
            direction, seq = record["event"].partition(".")[0], record["seq"]
            side = self._sides[direction]
            at = side.place(seq)
            if record["decision"] == "hold" or direction != "egress" or at is not None:
                return self._known_fate(side, at, hold=seq if record["decision"] == "hold" else None)
            return self._fates_behind(seq, seq + 1).get(seq, {"outcome": "", "milliseconds": None})

    def _known_fate(self, side: _Rows, at: int | None, *, hold: int | None = None) -> dict[str, Any]:
        """hold: its record, where it was held."""
        if at is None:
            over = hold is not None and hold not in side.held
            return {"outcome": "ended" if over else "", "milliseconds": None}
        elapsed = side.elapsed[at]
        return {"outcome": _FATES[side.outcomes[at]], "milliseconds": None if elapsed == _NOT_YET else elapsed}

    def _rows(self, side: _Rows, numbers: Sequence[int]) -> list[dict[str, Any]]:
        lines = self._pages.at([number for number in numbers if number not in side.ready])
        read = {number: record for number, line in lines.items() if (record := parsed(number, line)) is not None}
        rows = []
        for number in numbers:
            row = side.ready.get(number) or (row_of(read[number]) if number in read else None)
            if row is not None:
                rows.append({**row, **self._known_fate(side, side.place(number))})
        return rows

    def _look_back(self, direction: str, before: int, limit: int, verdict: str, kind: str, *, control: bool) -> Page:
        """Through the log itself, a bounded number of records a call."""
        event = f'"event":"{DECISION_EVENTS[direction]}"'.encode()
        found: list[dict[str, Any]] = []

        def wanted(line: bytes) -> bool:
            record = parsed(None, line) if event in line else None
            return (
                record is not None
                and record["event"] == DECISION_EVENTS[direction]
                and (control or is_content(record))
                and verdict in ("", record["decision"])
                and kind in ("", record["kind"])
            )

        back = self._pages.back(before, wanted, limit=limit, look_max=LOOK_RECORDS)
        side = self._sides[direction]
        records = [record for record in (parsed(*item) for item in back.lines) if record]
        oldest = min((record["seq"] for record in records), default=before)
        fates = self._fates_behind(oldest, before) if direction == "egress" and records else {}
        for record in records:
            at = side.place(record["seq"])
            fate = self._known_fate(side, at) if at is not None else fates.get(record["seq"])
            hold = record["seq"] if record["decision"] == "hold" else None
            found.append({**row_of(record), **(fate or self._known_fate(side, None, hold=hold))})
        return Page(found, back.next)

    def _fates_behind(self, start: int, end: int) -> dict[int, dict[str, Any]]:
        """What became of the decisions from `start` to `end`, as far as the records right behind them say."""
        decided: dict[int, tuple[str, int]] = {}
        fates: dict[int, dict[str, Any]] = {}
        for number, line in self._pages.lines(start, min(end + OUTCOME_RECORDS, self._at)):
            record = parsed(number, line) if _MARKS[0] in line else None
            if record is None:
                continue
            what = record["event"].partition(".")[2]
            if what == "decision":
                decided[number] = record["boot"], record["mono"]
            elif what in OUTCOMES and (seq := record.get("link", {}).get("decision")) in decided:
                fate = fates.setdefault(seq, {"outcome": "", "milliseconds": None})
                fate["outcome"] = what
                if what == "sent" and decided[seq][0] == record["boot"]:
                    fate["milliseconds"] = max(0, record["mono"] - decided[seq][1])
        return fates


# ---- rows ------------------------------------------------------------------------------------------


def parsed(number: int | None, line: bytes) -> dict[str, Any] | None:
    """The record in a line of the own log; None where it is damaged. Not compared with its canonical bytes."""
    try:
        record = json.loads(line)
        good = {"seq", "event", "t", "mono", "boot"} <= record.keys() and (number is None or record["seq"] == number)
        if record["event"] in DECISION_EVENTS.values():
            good = good and {"kind", "decision"} <= record.keys()
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return record if good else None


def _held_bytes(record: Mapping[str, Any]) -> tuple[object, ...]:
    """What was held: the records of a hold, of the answers to it and of its end name the same bytes."""
    payload = record.get("payload", {})
    place = (record.get(name) for name in ("kind", "run", "round", "step"))
    return *place, payload.get("sha256") or payload.get("hmac_sha256")


def _end_of(record: Mapping[str, Any]) -> str:
    if record["event"] == "approval.deny":
        return "rejected" if record.get("detail", {}).get("person") else "denied"
    reasons = record.get("reasons", [])
    return next((end for reason, end in (("EXPIRED", "expired"), ("POLICY_CHANGED", "denied")) if reason in reasons),
                "missed")  # fmt: skip


def is_content(record: Mapping[str, Any]) -> bool:
    """Whether a decision is listed without being asked for: all but allowed control messages."""
    return record["decision"] != "allow" or not str(record["kind"]).startswith("control.")


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the outbox or inbox, without what became of it."""
    deciding = [rule["rule"] for rule in record.get("rules", ()) if rule["outcome"] in ("deny", "hold")]
    payload = record.get("payload", {})
    row = {
        "seq": record["seq"],
        "time": utc(record["t"] / 1000),
        "run": record.get("run", ""),
        "round": record.get("round", 0),
        "step": record.get("step", 0),
        "kind": record["kind"],
        "items": items_of(record),
        "bytes": payload.get("bytes", 0),
        "verdict": record["decision"],
        "rule": deciding[0] if deciding else "",
        "reasons": list(record.get("reasons", [])),
        "rules": deciding,
        # Keyed with the site's key where the content could be guessed (T40), so it is not the digest of the bytes.
        "digest": payload.get("sha256") or payload.get("hmac_sha256") or "",
        "digest_keyed": "sha256" not in payload and "hmac_sha256" in payload,
    }
    return row | {"peer": record.get("peer", "")} if record["event"] == DECISION_EVENTS["ingress"] else row


def items_of(record: Mapping[str, Any]) -> int:
    """How many of its things a message has: tensors, answers, figures; 1 for one thing, 0 if nothing was measured."""
    facts = record.get("facts", {}).get("final")
    if not facts:
        return 0
    for name in _COUNTED:
        value = facts.get(name)
        if isinstance(value, list):
            return len(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 1

"""When what happened in a round, read from a party's own audit log: one mark for each record that says so.

The log stays the only truth: marks are folded from it when they are first asked for, and with the records that were
added each time after that, in the asking thread, at most `FOLD_RECORDS` a call, so that no question waits for a log of
any length. At most `ROUNDS_MAX` rounds are kept, with `MARKS_MAX` marks on messages and `OWN_MARKS_MAX` on the round
itself, 21 MB at the very most. A message that was not let in is no mark: its sender names any run and any round, and
would displace those there are (T23).

Does not show: what no record says, such as when a plan was taken in at a coordinator; nor that a record is genuine.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsilo.audit.reader import LogPages

ROUNDS_MAX = 256
MARKS_MAX = 256
OWN_MARKS_MAX = 64
REASONS_MAX = 8  # of one mark
BLOCK_RECORDS = 1_024  # lines in memory at a time
FOLD_RECORDS = 50_000  # of one call; 0.14 s of processor time, measured on a log of 100,000 records, mostly of polls
_ROUND = b'"event":"round.'  # as canonical JSON spells it
_MESSAGES = (
    b'"event":"egress.decision"', b'"event":"egress.sent"', b'"event":"ingress.decision"', b'"event":"approval.deny"',
    b'"event":"approval.expire"',
)  # fmt: skip
_CONTROL = b'"kind":"control.'


@dataclass(frozen=True)
class Mark:
    """One record about a round.

    Attributes:
        at: seconds since 1970.
        event: of the record.
        kind: of the message it is about.
        step: public step; 0 for none.
        verdict: of a decision: allow, deny or hold.
        reasons: codes why something did not leave; empty of every other record.
        detail: of an event of the round itself: what it names, by silo, for `round.agreed` (signatures) and
            `round.result` (verdicts).
    """

    at: float
    event: str
    kind: str
    step: int = 0
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Round:
    marks: list[Mark] = field(default_factory=list)
    own: int = 0  # of them, on the round itself

    def add(self, mark: Mark) -> None:
        if not mark.event.startswith("round."):
            if len(self.marks) - self.own < MARKS_MAX:
                self.marks.append(mark)
            return
        if self.own == OWN_MARKS_MAX:  # how the round ended is the last of them
            newest = next(each for each in reversed(self.marks) if each.event.startswith("round."))
            self.marks.remove(newest)
            self.own -= 1
        self.marks.append(mark)
        self.own += 1


class RoundMarks:
    """Thread-safe.

    Args:
        pages: the log.
        size: how many records it has by now.
        messages: also the decisions on content, of rules and of people, and its sending; without, only events of the
            round itself.
    """

    def __init__(self, pages: LogPages, size: Callable[[], int], *, messages: bool) -> None:
        self._pages = pages
        self._size = size
        self._messages = messages
        self._lock = threading.Lock()
        self._at = 0
        self._rounds: OrderedDict[tuple[str, int], _Round] = OrderedDict()

    def of(self, run: str, number: int) -> tuple[Mark, ...]:
        """In the order of the log. Raises FedSiloError: the log cannot be read."""
        with self._lock:
            self._catch_up()
            found = self._rounds.get((run, number))
            return tuple(found.marks) if found is not None else ()

    def rounds_of(self, run: str) -> list[int]:
        """Numbers of the rounds that are known, ascending. Raises FedSiloError: the log cannot be read."""
        with self._lock:
            self._catch_up()
            return sorted(number for name, number in self._rounds if name == run and number)

    @property
    def complete(self) -> bool:
        """Whether the whole log was taken in; until then, what is asked for may be missing."""
        return self._at >= self._size()

    def _catch_up(self) -> None:
        end = min(self._size(), self._at + FOLD_RECORDS)
        while self._at < end:
            block = min(self._at + BLOCK_RECORDS, end)
            for _, line in self._pages.lines(self._at, block):
                if _ROUND in line or (self._messages and _CONTROL not in line and any(m in line for m in _MESSAGES)):
                    self._take(line)
            self._at = block

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            run, number = str(record.get("run", "")), int(record.get("round", 0))
            mark = _mark_of(record)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return  # damaged: `audit.verify` names it
        if mark.event == "ingress.decision" and mark.verdict != "allow":
            return
        self._rounds.setdefault((run, number), _Round()).add(mark)
        while len(self._rounds) > ROUNDS_MAX:
            self._rounds.popitem(last=False)


def no_run_yet(party: str) -> dict[str, Any]:
    """What the query `round` answers before the first run, in the shape of every other answer."""
    return {
        "party": party, "run": "", "run_state": "", "method": "", "round": 0, "rounds_planned": 0, "rounds": [],
        "state": "no run yet", "opened_at": None, "closed_at": None, "elapsed_seconds": None, "closed_seconds": None,
        "paused": False, "quorum": {"needed": None, "of": None, "given": None, "reached_seconds": None},
        "deadlines": [], "awaited": [], "silos": [], "parameters": {}, "digests": {}, "hidden": [],
    }  # fmt: skip


def _mark_of(record: Mapping[str, Any]) -> Mark:
    told = {"round.agreed": "signatures", "round.result": "verdicts"}.get(record["event"], "")
    detail = record.get("detail", {}).get(told, {}) if told else {}
    kept_in = record.get("decision") == "deny" or record["event"] in ("approval.deny", "approval.expire")
    return Mark(
        at=record["t"] / 1000, event=record["event"], kind=str(record.get("kind", "")),
        step=int(record.get("step", 0)), verdict=str(record.get("decision", "")),
        reasons=tuple(map(str, record.get("reasons", ())[:REASONS_MAX])) if kept_in else (),
        detail={str(name): str(value) if told == "verdicts" else "" for name, value in detail.items()},
    )  # fmt: skip

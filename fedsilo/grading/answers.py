"""Answers of several parties graded within bounds: nobody's answers wait for another's, and no time limit decides.

    a queue for each party    its messages one after the other; each of several graders takes from another queue
    a budget for each party and step    of seconds, over all its messages of that step

An answer that is not graded within the budget, or on which the grading process died, has no verdict: it is dropped and
counted, and it is no reason to refuse anything, since times and memory differ between machines. The verdicts on the
last message of a step are kept, so that a retry is not graded again and costs nothing.

What this does not stop: a party that uses up its own budget in each step, or more parties at once than there are
graders, each for as long as its budget lasts.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsilo.grading.verdict import Verdict, VerdictCode

STEPS_REMEMBERED = 64  # of each party
_NO_VERDICT = frozenset({VerdictCode.TIMEOUT, VerdictCode.CRASHED})

Place = tuple[str, int, int]  # run, round, step


class Grader(Protocol):
    """The part of `fedsilo.grading.worker.GradingProcess` that is needed here."""

    def grade_many(
        self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None
    ) -> Sequence[Verdict]: ...


@dataclass
class _Spent:
    """What a party has used of a step's budget, and the result of its last message."""

    seconds: float = 0.0
    digest: bytes = b""
    verdicts: tuple[bool | None, ...] = ()


class _Queue:
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.steps: OrderedDict[Place, _Spent] = OrderedDict()

    def of(self, place: Place) -> _Spent:
        spent = self.steps.setdefault(place, _Spent())
        self.steps.move_to_end(place)
        while len(self.steps) > STEPS_REMEMBERED:
            self.steps.popitem(last=False)
        return spent


class AnswerGrading:
    """Safe to use from several threads.

    Args:
        graders: each grades one batch at a time.
        budget_seconds: what so many answers of one party to one step may take.
        monotonic: seconds.
    """

    def __init__(
        self,
        graders: Sequence[Grader],
        budget_seconds: Callable[[int], float],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free: queue.LifoQueue[Grader] = queue.LifoQueue()  # so that one that was never needed never starts
        for grader in graders:
            self._free.put(grader)
        self._budget_seconds = budget_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._queues: dict[str, _Queue] = {}

    def grade(self, party: str, place: Place, pairs: Sequence[tuple[str, str]]) -> tuple[bool | None, ...]:
        """Return whether each answer of a party's message is correct, in order; None: it got no verdict.

        Args:
            party: whose answers they are; one of a closed list, since each has a queue here for good.
            place: of the step that they answer.
            pairs: (response, reference).

        Raises:
            OperationError: the grading process cannot be started at all.
        """
        return self._graded_within(party, place, pairs, math.inf)[0]

    def grade_together(
        self, place: Place, batches: Mapping[str, Sequence[tuple[str, str]]]
    ) -> dict[str, tuple[bool | None, ...]]:
        """Return the same for one message with answers of several parties, which take no longer than as many of one
        party.

        Each in turn may use what is left of that, except the mean time of the answers behind it: so no party uses up
        the time of another one's answers.

        Args:
            place: of the step that they answer.
            batches: (response, reference) pairs by party.
        """
        verdicts: dict[str, tuple[bool | None, ...]] = {}
        behind = sum(map(len, batches.values()))
        left, without = self._budget_seconds(behind), self._budget_seconds(0)
        for party, pairs in batches.items():
            behind -= len(pairs)
            reserved = self._budget_seconds(behind) - without
            verdicts[party], seconds = self._graded_within(party, place, pairs, left - reserved)
            left -= seconds
        return verdicts

    def _graded_within(
        self, party: str, place: Place, pairs: Sequence[tuple[str, str]], seconds_max: float
    ) -> tuple[tuple[bool | None, ...], float]:
        """The verdicts, and what they took of the party's budget and of so many seconds."""
        digest = hashlib.sha256(json.dumps(pairs).encode()).digest()
        with self._lock:
            waiting = self._queues.setdefault(party, _Queue())
        with waiting.turn:
            spent = waiting.of(place)
            if spent.digest == digest:
                return spent.verdicts, 0.0
            left = max(0.0, min(self._budget_seconds(len(pairs)) - spent.seconds, seconds_max))
            spent.verdicts, seconds = self._graded(pairs, left)
            spent.digest, spent.seconds = digest, spent.seconds + seconds
            return spent.verdicts, seconds

    def _graded(self, pairs: Sequence[tuple[str, str]], seconds: float) -> tuple[tuple[bool | None, ...], float]:
        """The verdicts, and what they took of so many seconds."""
        if not pairs:
            return (), 0.0
        grader = self._free.get()
        try:
            begun = self._monotonic()
            graded = grader.grade_many(pairs, budget_seconds=seconds)
            took = min(seconds, self._monotonic() - begun)  # a process that had to be started is not the party's fault
        finally:
            self._free.put(grader)
        return tuple(None if verdict.code in _NO_VERDICT else verdict.correct for verdict in graded), took

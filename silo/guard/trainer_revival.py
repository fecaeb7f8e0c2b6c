"""What a trainer was given in the open round, so that one that died can be started again and brought to where it was.

The trainer keeps its own state at every step boundary (`silo/trainer/resume.py`) and says where that stands. Where it
fits what the guard was told, the task in hand is given again and nothing else. Where it does not (torn, of another run,
a lost disk), the round is started over: the same tasks with the same rows, donors and draws, whose answers are not
taken a second time, since what they offered has gone to the gate. Either way no message leaves twice.

Does not stop: a trainer that lies about where it stands, which is a trainer that trains on what it likes (N1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.method import CHANGING
from silo.link import LinkMessage


@dataclass(frozen=True)
class Restart:
    """One time that a trainer died and was to be started again; a `trainer.restart` record of the audit log.

    Attributes:
        exit_status: of the one that died; None where it is not known.
        number: how often it died since it last finished a task, this time among them.
        code: why it could not be brought to where it was; empty where it was.
        repeated: tasks of the round that were given once more, whose answers were not taken.
        task: what it worked on; None when it was idle.
    """

    exit_status: int | None
    number: int
    code: str = ""
    repeated: int = 0
    task: LinkMessage | None = None

    def fields(self) -> dict[str, Any]:
        """Of the record. Nothing that a trainer said is in it: task, round and step are what the guard gave it."""
        given = self.task.fields if self.task is not None else {}
        outcome = "failed" if self.code else "round_repeated" if self.repeated else "resumed"
        detail = {"outcome": outcome, "number": self.number, "repeated": self.repeated}
        detail |= {"exit_status": self.exit_status, "task": given.get("task")}
        return {
            "round": given.get("round"),
            "step": given.get("step"),
            "reasons": ["TRAINER_DIED", *([self.code] if self.code not in ("", "TRAINER_DIED") else [])],
            "detail": {name: value for name, value in detail.items() if value is not None},
        }


class Given:
    """Attributes:
    plan: of the run that the trainer serves, as it was sent; None before the first.
    planned: what it answered to that, once it did.
    task: what it works on; None when it is idle.
    """

    def __init__(self) -> None:
        self.plan: LinkMessage | None = None
        self.planned: Mapping[str, Any] | None = None
        self.task: LinkMessage | None = None
        self._round: list[LinkMessage] = []  # done since the round's adapter was loaded, that task among them
        self._rounds = 0
        self._goes_on = False  # inside a round that another guard's life began: its first tasks are not known here

    def sent(self, message: LinkMessage) -> None:
        if message.type == "plan":
            self.plan, self.planned, self.task, self._round, self._rounds = message, None, None, [], 0
            self._goes_on = False
        elif message.type == "task":
            self.task = message

    def heard(self, message: LinkMessage) -> None:
        if message.type == "planned":
            self.planned = message.fields
            self._goes_on = isinstance(message.fields.get("resumed"), Mapping)
        elif message.type == "done" and self.task is not None:
            task, self.task = self.task, None
            if task.fields.get("task") not in CHANGING:
                return
            if task.fields["task"] == "LoadAdapter":
                self._round.clear()
                self._rounds += 1
                self._goes_on = False
            self._round.append(task)

    def to_repeat(self, resumed: object) -> list[LinkMessage] | None:
        """Tasks to give once more before the one in hand, their answers not to be taken. None: nothing leads back.

        Args:
            resumed: where the trainer says that it stands: {task, round, step}, or None for the run's beginning.
        """
        if isinstance(resumed, Mapping):
            if self._round and _stands_at(resumed, self._round[-1]):
                return []
            if self.task is not None and _stands_at(resumed, self.task):
                return []  # it was done, and only the answer was lost
        if self._goes_on:
            before = (self.planned or {}).get("resumed")
            return [] if not self._round and resumed is not None and resumed == before else None
        if not self._round:
            return []
        keeps_optimiser = self.plan is not None and '"state":"keep"' in _optimiser_of(self.plan)
        if keeps_optimiser and (self._rounds > 1 or resumed is not None):
            return None  # its moments are not those of the round's start, and nothing leads back to them
        if self.task is not None and self.task.fields.get("task") == "LoadAdapter" and not keeps_optimiser:
            return []
        return list(self._round)


def require_same_rung(got: str, before: str) -> None:
    """Raises OperationError: other walls than those that the policy and the coordinator were told of."""
    if got != before:
        raise OperationError(f"its walls are {got}, and were {before}", code="ISOLATION")


def _stands_at(resumed: Mapping[str, Any], task: LinkMessage) -> bool:
    if task.fields.get("task") not in CHANGING:
        return False
    place = (task.fields["task"], task.fields.get("round"), task.fields.get("step", 0))
    return (resumed.get("task"), resumed.get("round"), resumed.get("step")) == place


def _optimiser_of(plan: LinkMessage) -> str:
    """Of our own message; canonical, so it reads the same every time."""
    optimiser = json.loads(str(plan.fields["canonical_json"])).get("optimiser", {})
    return json.dumps(optimiser, separators=(",", ":"))

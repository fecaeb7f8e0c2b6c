"""A session's parts as several processes share them: the rollout engine, the graders and the kept state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fedsilo.protocol.errors import FedSiloError
from silo.trainer.grading import Grader, Mark, mark_of
from silo.trainer.resume import SessionState, StateFile, StateRefused
from silo.trainer.rollout.embedded import Question, Rollout
from silo.trainer.rollout.engine import RolloutEngine, Rows
from silo.trainer.scale_out import Processes, dealt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    M = TypeVar("M", bound=DataclassInstance)
else:
    M = TypeVar("M")


class SharedEngine:
    """Each process answers whole prompts of its own; afterwards all have all answers.

    Args:
        engine: of this process.
        group: the processes.
        whole: inside, this process holds all the base's weights (`sharding`).
    """

    def __init__(
        self, engine: RolloutEngine, group: Processes, whole: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._engine = engine
        self._group = group
        self._whole = whole

    def use(self, rows: Rows) -> None:
        self._engine.use(rows)

    def rest(self) -> None:
        self._engine.rest()

    def close(self) -> None:
        self._engine.close()

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Raises OperationError: as the engine, in whichever process."""
        costs = [(len(one.prompt_ids) + max_new_tokens) * len(one.draws) for one in questions]
        mine = dealt(costs, self._group.size)[self._group.rank]

        def work() -> list[tuple[Rollout, ...]]:
            return self._engine.generate(
                [questions[place] for place in mine], temperature=temperature, max_new_tokens=max_new_tokens
            )

        with self._whole():
            found = self._group.together(work)
        told = [[place, _told(answers)] for place, answers in zip(mine, found, strict=True)]
        answers: list[tuple[Rollout, ...]] = [() for _ in questions]
        for share in self._group.gather(told):
            for place, rows in share:
                answers[place] = _heard(rows)
        return answers


class LedEngine:
    """Process 0 asks, and all have its answers: for an engine that is a server, which wants to be told things once.

    Args:
        engine: makes it; called in process 0 alone.
        group: the processes.
    """

    def __init__(self, engine: Callable[[], RolloutEngine], group: Processes) -> None:
        self._group = group
        self._engine = group.together(lambda: engine() if group.rank == 0 else None)

    def use(self, rows: Rows) -> None:
        self._group.together(lambda: self._engine.use(rows) if self._engine is not None else None)

    def rest(self) -> None:
        self._group.together(lambda: self._engine.rest() if self._engine is not None else None)

    def close(self) -> None:
        """Without the others, who may be gone."""
        if self._engine is not None:
            self._engine.close()

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Raises OperationError: as the engine."""

        def work() -> list[tuple[Rollout, ...]]:
            if self._engine is None:
                return []
            return self._engine.generate(questions, temperature=temperature, max_new_tokens=max_new_tokens)

        found = self._group.together(work)
        return [_heard(rows) for rows in self._group.gather([_told(answers) for answers in found])[0]]


def shared_engine(
    engine: Callable[[], RolloutEngine],
    group: Processes | None,
    *,
    server: bool,
    whole: Callable[[], contextlib.AbstractContextManager[None]],
) -> RolloutEngine:
    """The engine of a run. engine: makes it; server: it is one, and process 0 alone asks; whole: of `SharedEngine`."""
    if group is None:
        return engine()
    return LedEngine(engine, group) if server else SharedEngine(engine(), group, whole)


def shared_material(material: M, group: Processes) -> M:
    """The same with graders that are shared. material: a `session.Material`."""
    names = ("private_grader", "public_grader", "held_out_grader")
    return dataclasses.replace(material, **{name: shared_grader(getattr(material, name), group) for name in names})


def _told(answers: Sequence[Rollout]) -> list[list[object]]:
    return [[list(one.ids), one.finished, list(one.logp), one.adapter] for one in answers]


def _heard(rows: Sequence[Sequence[list[object]]]) -> tuple[Rollout, ...]:
    return tuple(Rollout(tuple(ids), bool(done), tuple(logp), str(name)) for ids, done, logp, name in rows)  # type: ignore[arg-type]


def shared_grader(grader: Grader, group: Processes) -> Grader:
    """Each process grades every so many-th answer; all get all verdicts, and so the same ones."""

    def grade(pairs: Sequence[tuple[str, str]]) -> list[Mark]:
        mine = list(pairs)[group.rank :: group.size]
        shares = group.gather([mark_of(each) for each in group.together(lambda: grader(mine) if mine else [])])
        # JSON brings a mark back as a list
        return [Mark(*shares[place % group.size][place // group.size]) for place in range(len(pairs))]

    return grade


class SharedStateFile(StateFile):
    """Process 0's file; the others go on from what it read."""

    def __init__(self, file: StateFile, group: Processes) -> None:
        self.__dict__.update(file.__dict__)
        self._group = group
        self.is_written_here = group.rank == 0  # the others need not so much as make the copies

    def save(self, state: SessionState) -> None:
        if self._group.rank == 0:
            super().save(state)

    def discard(self) -> None:
        if self._group.rank == 0:
            super().discard()

    def read(self) -> bytes | None:
        data, trouble = None, ""
        if self._group.rank == 0:
            try:
                data = super().read()
            except FedSiloError as error:
                trouble = error.message
        there, trouble = self._group.gather([data is not None, trouble])[0]
        if trouble:
            raise StateRefused(trouble)
        return self._group.broadcast(data or b"") if there else None

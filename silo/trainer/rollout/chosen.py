"""The rollout engine of a run: in this process, or the guard's servers; and as several processes share it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question, Rollout, RolloutEngine, RolloutPlace, Rows
from silo.trainer.rollout.vllm_server import VllmEngine
from silo.trainer.scale_out import Processes, dealt


def engine_for(
    adapter: LoraAdapter, place: RolloutPlace | None, *, stop_ids: Collection[int], cache_bytes: int
) -> RolloutEngine:
    """Args:
        adapter: the one that is trained.
        place: of the rollout servers; None: the embedded engine.
        stop_ids: tokens that end an answer.
        cache_bytes: budget of the embedded engine's keys and values.

    Raises:
        OperationError: a server does not answer, or offers no adapters.
    """
    if place is None:
        return EmbeddedEngine(adapter.decoder, stop_ids=stop_ids, cache_bytes=cache_bytes, name=adapter.name)
    return VllmEngine(adapter, place, stop_ids=stop_ids, vocabulary=adapter.decoder.embedding.shape[0])


# ---- several processes ----


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


def _told(answers: Sequence[Rollout]) -> list[list[object]]:
    return [[list(one.ids), one.finished, list(one.logp), one.adapter] for one in answers]


def _heard(rows: Sequence[Sequence[list[object]]]) -> tuple[Rollout, ...]:
    return tuple(Rollout(tuple(ids), bool(done), tuple(logp), str(name)) for ids, done, logp, name in rows)  # type: ignore[arg-type]

"""The interface of a rollout engine, wherever it runs: `rollout.embedded` in this process, `rollout.vllm_server` in
another.

Both are asked the same way: `use` says which policy and whose prompts come next, `generate` answers them. Between two
calls of `use` all prompts are private or all are public; an engine lets the two share no batch and no cache (T14), and
the caller keys their randomness apart. Where several processes train, `shared_engine` has each answer whole prompts
(`SharedEngine`), or process 0 ask a server for all (`LedEngine`).

Free of torch: the worker reads where the servers are before it loads the libraries of training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from fedsilo.files.task_files import CLOSED
from silo.trainer.scale_out import Processes, dealt


@dataclass(frozen=True)
class RolloutPlace:
    """The rollout servers' places, as the trainer sees them inside its sandbox.

    Attributes:
        private, public: sockets; twice the same where one server answers both.
        adapters: folder that the trainer writes and the servers read.
        timeout_seconds: how long a server may be away.
        sleep: ask for sleep while the trainer trains, where the server offers it.
    """

    __pydantic_config__ = CLOSED
    private: Path
    public: Path
    adapters: Path
    timeout_seconds: float
    sleep: bool = False


PromptSource = Literal["private", "public"]


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    Attributes:
        ids: generated tokens, the end-of-sequence token included.
        finished: it was emitted before the limit.
        logp: of each token under the distribution it was drawn from, temperature included; empty where none was drawn.
        adapter: name of the adapter that the engine computed with, as `adapters.lora.adapter_name` writes it.
    """

    ids: tuple[int, ...]
    finished: bool
    logp: tuple[float, ...] = field(default=(), compare=False)  # its last bits hang on who else was in the batch
    adapter: str = ""


@dataclass(frozen=True)
class Question:
    """A prompt and one source of randomness per answer wanted; None asks for the most likely token each time."""

    prompt_ids: tuple[int, ...]
    draws: tuple[np.random.Generator | None, ...]


class RolloutEngine(Protocol):
    def use(self, source: PromptSource) -> None:
        """Answer with the adapter as it is at this moment, and prompts of this source only, until the next call."""

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Answers in the order of `questions`, for each as many as it has draws. No prompt may be empty.

        Raises:
            OperationError: the engine failed, or does not hold the policy that the trainer holds.
        """

    def rest(self) -> None:
        """Free what memory can be freed: no question comes for a while."""

    def close(self) -> None:
        """End: leave no adapter with a server. What is gone or silent is left as it is."""


# ---- several processes ----


class SharedEngine:
    """An engine in each process, which answers whole prompts of its own; afterwards all have all answers.

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

    def use(self, source: PromptSource) -> None:
        self._engine.use(source)

    def rest(self) -> None:
        self._engine.rest()

    def close(self) -> None:
        self._engine.close()

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Answer a share of the questions and gather the others'. Raises OperationError: as the engine, in whichever
        process."""
        costs = [(len(one.prompt_ids) + max_new_tokens) * len(one.draws) for one in questions]
        mine = dealt(costs, self._group.size)[self._group.rank]

        def work() -> list[tuple[Rollout, ...]]:
            return self._engine.generate(
                [questions[place] for place in mine], temperature=temperature, max_new_tokens=max_new_tokens
            )

        with self._whole():
            own = self._group.together(work)
        payload = [[place, _to_json(answers)] for place, answers in zip(mine, own, strict=True)]
        answers: list[tuple[Rollout, ...]] = [() for _ in questions]
        for share in self._group.gather(payload):
            for place, some in share:
                answers[place] = _from_json(some)
        return answers


class LedEngine:
    """An engine that process 0 asks, and whose answers all have: for an engine that is a server, which wants to be told
    things once.

    Args:
        engine: makes it; called in process 0 alone.
        group: the processes.
    """

    def __init__(self, engine: Callable[[], RolloutEngine], group: Processes) -> None:
        self._group = group
        self._engine = group.together(lambda: engine() if group.rank == 0 else None)

    def use(self, source: PromptSource) -> None:
        self._group.together(lambda: self._engine.use(source) if self._engine is not None else None)

    def rest(self) -> None:
        self._group.together(lambda: self._engine.rest() if self._engine is not None else None)

    def close(self) -> None:
        """Close the engine without the others, who may be gone."""
        if self._engine is not None:
            self._engine.close()

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Have process 0 ask, and share its answers. Raises OperationError: as the engine."""

        def work() -> list[tuple[Rollout, ...]]:
            if self._engine is None:
                return []
            return self._engine.generate(questions, temperature=temperature, max_new_tokens=max_new_tokens)

        own = self._group.together(work)
        return [_from_json(some) for some in self._group.gather([_to_json(answers) for answers in own])[0]]


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


def _to_json(answers: Sequence[Rollout]) -> list[list[object]]:
    return [[list(one.ids), one.finished, list(one.logp), one.adapter] for one in answers]


def _from_json(answers: Sequence[Sequence[list[object]]]) -> tuple[Rollout, ...]:
    return tuple(Rollout(tuple(ids), bool(done), tuple(logp), str(name)) for ids, done, logp, name in answers)  # type: ignore[arg-type]

"""A trainer and a separate engine on the same tiny model in bfloat16, and pushes at lr 1e-5 to go wrong in.

The engine has a model, a decoder and factors of its own, so it can be fed any adapter while its answers carry the name
of the right one: then the figures alone can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from silo.trainer import agreement
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.agreement import AgreementWatch, AnswerFigures, Limits, Probe, Row
from silo.trainer.grpo import Answer, Group, Learner
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import PromptSource, Question, Rollout
from tests.algorithms.tiny import ALPHA, RANK, make_model, make_plan, make_shape, random_factors

LEARNING_RATE = 1e-5
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 6, 48
TEMPERATURE = 1.0
Factors: TypeAlias = list[Tensor]


@dataclass(frozen=True)
class Fault:
    """What is wrong with the engine.

    Attributes:
        lag: pushes that it is behind.
        scale: its alpha / r is this many times the right one.
        base_seed: it loads another random model, of this seed.
        base_noise: its base is the right one with so much relative noise on the weights.
        base_share: of the answers, sampled by the base without adapter.
    """

    lag: int = 0
    scale: float = 1.0
    base_seed: int = 0
    base_noise: float = 0.0
    base_share: float = 0.0


def noisy(model: Any, noise: float) -> Any:
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=draws))
    return model


def held(adapter: LoraAdapter) -> Factors:
    return [each.detach().clone() for each in adapter.parameters]


def put(adapter: LoraAdapter, factors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for live, value in zip(adapter.parameters, factors, strict=True):
            live.copy_(value)


class Rig:
    """Args:
    b_scale: of B at the start of the history: 0 is a run's first round, more an adapter that has learned.
    pushes: of the history, after its start.
    seed: of everything that is drawn.
    dtype: of both bases.
    """

    def __init__(
        self, *, b_scale: float = 0.0, pushes: int = 16, seed: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.seed = seed
        self._dtype = dtype
        model = make_model().to(dtype)
        self._shape = make_shape(model)
        self.trainer = LoraAdapter(model, self._shape)
        self.trainer.load(random_factors(self._shape, seed, b_scale))
        self.probe = Probe(self.trainer, TEMPERATURE)
        self._draws = np.random.default_rng([seed, 1])
        self.history = [held(self.trainer)]
        plan = make_plan(optimiser__learning_rate=LEARNING_RATE, rollout__temperature=TEMPERATURE)
        learner = Learner(self.trainer, plan, microbatch_tokens=1 << 16)
        own = EmbeddedEngine(self.trainer.decoder, stop_ids=[])
        for _ in range(pushes):
            questions = self.questions()
            learner.update(
                [
                    Group(
                        asked.prompt_ids, tuple(Answer(each.ids, "", True, float(each.ids[0] % 2)) for each in answers)
                    )
                    for asked, answers in zip(questions, self.sample(own, questions), strict=True)
                ]
            )
            self.history.append(held(self.trainer))

    def questions(self, count: int = PROMPTS, samples: int = SAMPLES) -> list[Question]:
        return [
            Question(
                tuple(int(token) for token in self._draws.integers(3, 23, PROMPT_TOKENS)),
                tuple(np.random.default_rng(self._draws.integers(1 << 62)) for _ in range(samples)),
            )
            for _ in range(count)
        ]

    @staticmethod
    def sample(engine: EmbeddedEngine, questions: Sequence[Question]) -> list[tuple[Rollout, ...]]:
        return engine.generate(questions, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)

    @cached_property
    def _engines(self) -> dict[tuple[float, int, float], LoraAdapter]:
        return {}

    def engine(self, fault: Fault) -> LoraAdapter:
        """The engine's own adapter on its own model."""
        key = fault.scale, fault.base_seed, fault.base_noise
        if key not in self._engines:
            model = noisy(make_model(fault.base_seed), fault.base_noise).to(self._dtype)
            shape = LoraShape(RANK, ALPHA * fault.scale, self._shape.shapes)
            self._engines[key] = LoraAdapter(model, shape)
        return self._engines[key]

    def answered(
        self, at: int, fault: Fault, questions: Sequence[Question], *, name: str | None = None
    ) -> list[tuple[Rollout, ...]]:
        """What the engine writes when the trainer is at push `at`, under the name of what it should have used."""
        told = self.trainer.name() if name is None else name
        adapter = self.engine(fault)
        put(adapter, self.history[max(at - fault.lag, 0)])
        engine = EmbeddedEngine(adapter.decoder, stop_ids=[], name=lambda: told)
        plain = round(fault.base_share * SAMPLES)
        with_adapter = [Question(each.prompt_ids, each.draws[plain:]) for each in questions]
        answers = self.sample(engine, with_adapter)
        if plain:
            with adapter.off():
                others = self.sample(engine, [Question(each.prompt_ids, each.draws[:plain]) for each in questions])
            answers = [one + other for one, other in zip(others, answers, strict=True)]
        return answers

    def figures(self, at: int, fault: Fault) -> list[AnswerFigures]:
        """One step's answers at push `at`, all of them looked at."""
        put(self.trainer, self.history[at])
        questions = self.questions()
        answers = self.answered(at, fault, questions)
        rows = [Row(place, each) for place, of_prompt in enumerate(answers) for each in of_prompt]
        names = self.trainer.trained_names
        start = dict(zip(names, self.history[0], strict=True))
        previous = dict(zip(names, self.history[at - 1], strict=True)) if at else None
        others = {agreement.PREVIOUS: previous, agreement.START: start}
        passes = self.probe.passes([each.prompt_ids for each in questions], rows, others)
        return agreement.answer_figures(passes, agreement.reported_by(rows))

    def watch(self, limits: Limits) -> AgreementWatch:
        return AgreementWatch(self.trainer, TEMPERATURE, self.draw, limits)

    def draw(self, *key: str | int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *(len(str(part)) + sum(map(ord, str(part))) for part in key)])

    def check(
        self, watch: AgreementWatch, at: int, fault: Fault, *, name: str | None = None, source: PromptSource = "private"
    ) -> dict[str, float]:
        """What a step does: the engine answers, the watch looks. Raises what the watch raises."""
        put(self.trainer, self.history[at])
        questions = self.questions()
        answers = self.answered(at, fault, questions, name=name)

        def generate(asked: Sequence[Question], tokens: int) -> list[tuple[Rollout, ...]]:
            """The marker goes the way of every push."""
            engine = self.engine(fault)
            put(engine, held(self.trainer) if not fault.lag else self.history[max(at - fault.lag, 0)])
            sampler = EmbeddedEngine(engine.decoder, stop_ids=[], name=self.trainer.name)
            return sampler.generate(asked, temperature=TEMPERATURE, max_new_tokens=tokens)

        return watch.check((1, at), [each.prompt_ids for each in questions], answers, generate, source)

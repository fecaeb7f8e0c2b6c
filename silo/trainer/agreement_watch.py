"""The proof of agreement at run time: looks at a few answers of every rollout before the update trusts them.

Wrong is one of: an answer that names another adapter than the one that is trained; log-probabilities that are missing
or too far from the trainer's; figures that follow another adapter (`agreement`); a marker that does not show. Each of
them stops the step, before any factor has changed.

Does not stop: an engine that lies, and computes what it is asked for its checks alone. The engine is this site's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedsilo.treaty.errors import OperationError
from fedsilo.treaty.wire.codec import Array
from silo.trainer import agreement
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.agreement import AnswerFigures, Limits, Numbers
from silo.trainer.batch import Stream, stream_of
from silo.trainer.exact import ExactDecoder
from silo.trainer.layers import token_logp
from silo.trainer.rollout.embedded import Question, Rollout

STALE = "STALE_ROLLOUT"  # another adapter
DISAGREES = "ROLLOUT_DISAGREES"  # other log-probabilities than the trainer's
NOT_PROVEN = "ROLLOUT_NOT_PROVEN"  # the engine does not say what a proof needs
# Below so many answers the error of their mean says little.
ANSWERS_MIN = 2
MARKER_QUESTIONS = 2
MARKER_ANSWERS = 4  # to each
MARKER_TOKENS = 16
# Size of what the marker adds to a layer's output, beside what the layer gives: the first that shows is taken.
MARKER_STRENGTHS = (0.25, 1.0, 4.0, 16.0, 64.0)

Generate: TypeAlias = Callable[[Sequence[Question], int], Sequence[tuple[Rollout, ...]]]
Draw: TypeAlias = Callable[..., np.random.Generator]


@dataclass(frozen=True)
class Row:
    """An answer that is looked at. place: of its prompt in the step."""

    place: int
    rollout: Rollout


class Probe:
    """What a few answers look like to the trainer, under the adapter in use and under others.

    Args:
        adapter: the one that is trained.
        temperature: of the rollout.
    """

    def __init__(self, adapter: LoraAdapter, temperature: float) -> None:
        self._adapter = adapter
        self._temperature = temperature
        self._exact = ExactDecoder(adapter.decoder)

    def answers(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], others: Mapping[str, Sequence[Tensor] | None]
    ) -> list[AnswerFigures]:
        """In the order of `rows`, one at least.

        Args:
            prompts: of the step.
            rows: the answers to look at.
            others: by name, trained factors in the order of `adapter.parameters`; None where there are none.

        Raises:
            OperationError: the engine reported no log-probabilities, or some that are not finite.
        """
        reported = _reported(rows)
        stream = self._stream(prompts, rows)
        found = {"exact": self._exact.logp(stream, self._temperature)}
        found[agreement.BASE] = self._exact.logp(stream, self._temperature, base_only=True)
        found["trainer"], found["trainer_base"] = found["exact"], found[agreement.BASE]
        if self._adapter.decoder.embedding.dtype != torch.float32:
            found["trainer"] = self._own(stream)
            with self._adapter.off():
                found["trainer_base"] = self._own(stream)
        for name, values in others.items():
            if values is not None:
                replaced = list(zip(self._adapter.parameters, values, strict=True))
                found[name] = self._exact.logp(stream, self._temperature, factors=replaced)
        return _answers(found, reported)

    def under(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], factors: Mapping[str, Array]) -> Numbers:
        """Exact log-probabilities of all rows' tokens under these factors, by wire name; none: the live ones. [M]."""
        device = self._adapter.decoder.device
        live = self._adapter.factors
        replaced = [(live[name], torch.from_numpy(values).to(device)) for name, values in factors.items()]
        return _numbers(self._exact.logp(self._stream(prompts, rows), self._temperature, factors=replaced))

    @torch.no_grad()
    def _own(self, stream: Stream) -> Tensor:
        """In the precision that is trained in. [M]."""
        decoder = self._adapter.decoder
        return token_logp(decoder.hidden(stream), decoder.head, stream.targets, self._temperature)[0]

    def _stream(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> Stream:
        places = sorted({row.place for row in rows})
        local = {place: index for index, place in enumerate(places)}
        return stream_of(
            [prompts[place] for place in places],
            [(local[row.place], row.rollout.ids) for row in rows],
            self._adapter.decoder.device,
        )


class AgreementWatch:
    """Args:
    adapter: the one that is trained.
    temperature: of the rollout.
    draw: keyed generator of this watch's own draws, by (purpose, ...).
    limits: what is measured and what stops a step.
    """

    def __init__(self, adapter: LoraAdapter, temperature: float, draw: Draw, limits: Limits) -> None:
        self._adapter = adapter
        self._draw = draw
        self._limits = limits
        self._probe = Probe(adapter, temperature)
        self._watch = agreement.Watch(limits)
        self._previous: list[Tensor] | None = None
        self._rollouts = 0
        self._marker: dict[str, float] = {}

    def check(
        self,
        key: tuple[str | int, ...],
        prompts: Sequence[tuple[int, ...]],
        rollouts: Sequence[tuple[Rollout, ...]],
        generate: Generate,
    ) -> dict[str, float]:
        """Look at a step's answers, before the update.

        Args:
            key: of the rollout: what it is for, round, step.
            prompts: their tokens.
            rollouts: the answers to each.
            generate: asks the engine (questions, most new tokens) under whatever the adapter then holds.

        Returns:
            Figures for the step's metrics.

        Raises:
            OperationError: `STALE_ROLLOUT`, `ROLLOUT_DISAGREES` or `ROLLOUT_NOT_PROVEN`, with the reason.
        """
        started = time.monotonic()
        _refuse_other_adapter(self._adapter.name(), rollouts)
        figures: dict[str, float] = {}
        rows = self._chosen(key, prompts, rollouts)
        if rows:
            figures |= self._measured(prompts, rows)
        self._rollouts += 1
        if rows and self._limits.marker_pushes and (self._rollouts - 1) % self._limits.marker_pushes == 0:
            self._send_marker(key, prompts, rows, generate)
        stored = self._adapter.decoder.embedding.dtype
        self._previous = [each.detach().to(stored, copy=True) for each in self._adapter.parameters]
        return {**figures, **self._marker, "agreement_seconds": time.monotonic() - started}

    # ---- the difference in differences ---------------------------------------------------------------

    def _chosen(
        self, key: tuple[str | int, ...], prompts: Sequence[tuple[int, ...]], rollouts: Sequence[tuple[Rollout, ...]]
    ) -> list[Row]:
        """Answers in an order drawn at random, until they cost the share of the step that may be looked at."""
        if not self._limits.share:
            return []
        rows = [Row(place, rollout) for place, answers in enumerate(rollouts) for rollout in answers if rollout.ids]
        whole = sum(map(len, prompts)) + sum(len(row.rollout.ids) for row in rows)
        chosen: list[Row] = []
        spent = 0
        for at in self._draw("agreement", *key).permutation(len(rows)):
            row = rows[at]
            known = any(row.place == other.place for other in chosen)
            cost = len(row.rollout.ids) + (0 if known else len(prompts[row.place]))
            if len(chosen) >= ANSWERS_MIN and spent + cost > self._limits.share * whole:
                break
            chosen.append(row)
            spent += cost
        return chosen

    def _measured(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> dict[str, float]:
        others = {agreement.START: self._adapter.start, agreement.PREVIOUS: self._previous}
        answers = self._probe.answers(prompts, rows, others)
        trained = [answer.trainer for answer in answers]
        found = agreement.divergence([answer.engine for answer in answers], trained)
        rounding = agreement.divergence([answer.exact for answer in answers], trained).kl
        limit = self._limits.kl_limit(rounding)
        if found.exceeds(limit):
            raise OperationError(
                f"the engine's distribution is {found.kl:.3g} nats per token from the trainer's (standard error "
                f"{found.error:.2g}), at most {limit:.3g} may be",
                code=DISAGREES,
                hint="the engine must load the same base in the same precision, and report log-probabilities after "
                "temperature",
            )
        if alarms := self._watch.add(answers):
            reasons = "; or ".join(alarm.reason() for alarm in alarms)
            raise OperationError(reasons, code=STALE, hint="push the adapter again under a name of its own")
        return {
            "rollout_kl": found.kl,
            "rollout_kl_error": found.error,
            "rollout_kl_limit": limit,
            **self._watch.figures(),
        }

    # ---- the marker ----------------------------------------------------------------------------------

    def _send_marker(
        self,
        key: tuple[str | int, ...],
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        generate: Generate,
    ) -> None:
        """A strong random adapter goes to the engine and is answered with, on the step's own prompts."""
        for attempt, strength in enumerate(MARKER_STRENGTHS):
            seen = self._marker_sent((*key, attempt), strength, prompts, rows, generate)
            if seen.contrast >= agreement.MARKER_CONTRAST_MIN:  # else it was too weak to show for this model
                break
        self._marker = {"marker_distance": seen.distance, "marker_contrast": seen.contrast}
        if not seen.has_shown:
            raise OperationError(
                f"a marker adapter was sent and does not show: the engine's log-probabilities are {seen.distance:.2f} "
                f"nats per token from it, the adapter in use is {seen.contrast:.2f}",
                code=STALE,
                hint="the engine takes adapters and does not compute them, or answers from a cache of before",
            )

    def _marker_sent(
        self,
        key: tuple[str | int, ...],
        strength: float,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        generate: Generate,
    ) -> agreement.MarkerSeen:
        marker = self._marker_factors(key, strength)
        asked = sorted({row.place for row in rows})[:MARKER_QUESTIONS]
        questions = [
            Question(
                prompts[place],
                tuple(self._draw("marker-rollout", *key, place, sample) for sample in range(MARKER_ANSWERS)),
            )
            for place in asked
        ]
        with self._adapter.replaced_by(marker):
            name = self._adapter.name()
            answers = generate(questions, MARKER_TOKENS)
        _refuse_other_adapter(name, answers)
        drawn = [Row(place, each) for place, row in zip(asked, answers, strict=True) for each in row]
        return agreement.marker_seen(
            np.concatenate(_reported(drawn)),
            self._probe.under(prompts, drawn, marker),
            self._probe.under(prompts, drawn, {}),
        )

    def _marker_factors(self, key: tuple[str | int, ...], strength: float) -> dict[str, Array]:
        shape, draws = self._adapter.shape, self._draw("marker", *key)
        factors: dict[str, Array] = {}
        for name, sides in sorted(shape.shapes.items()):
            drawn = draws.standard_normal(sides)
            size = sides[1] ** -0.5 if name.endswith("lora_A") else strength / (shape.scale * shape.rank**0.5)
            factors[name] = (size * drawn).astype(np.float32)
        return factors


def _refuse_other_adapter(name: str, rollouts: Sequence[tuple[Rollout, ...]]) -> None:
    others = {rollout.adapter for answers in rollouts for rollout in answers} - {name}
    if others:
        other = sorted(others)[0]
        raise OperationError(
            f"an answer was written with the adapter {other[:12] or 'that has no name'}, trained is {name[:12]}",
            code=STALE,
            hint="the engine has not taken the adapter that was pushed",
        )


def _reported(rows: Sequence[Row]) -> list[Numbers]:
    """The engine's log-probabilities of each answer. Raises OperationError: they are missing, or are no numbers."""
    found = [np.asarray(row.rollout.logp, dtype=np.float64) for row in rows]
    for row, logp in zip(rows, found, strict=True):
        if len(logp) != len(row.rollout.ids) or not np.isfinite(logp).all():
            raise OperationError(
                f"the engine reports {len(logp)} log-probabilities for {len(row.rollout.ids)} tokens, or some that "
                "are no finite number",
                code=NOT_PROVEN,
            )
    return found


def _numbers(logp: Tensor) -> Numbers:
    return logp.double().cpu().numpy()


def _answers(passes: Mapping[str, Tensor], reported: Sequence[Numbers]) -> list[AnswerFigures]:
    edges = np.cumsum([len(each) for each in reported])[:-1]
    of_answer = {name: np.split(_numbers(logp), edges) for name, logp in passes.items()}
    return [
        AnswerFigures(
            engine=engine,
            trainer=of_answer["trainer"][place],
            trainer_base=of_answer["trainer_base"][place],
            exact=of_answer["exact"][place],
            others={name: parts[place] for name, parts in of_answer.items() if name in agreement.FAULTS},
        )
        for place, engine in enumerate(reported)
    ]

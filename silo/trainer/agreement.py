"""Proves that the engine that writes the answers computes the adapter that is trained.

An adapter push that silently does not arrive lets a run train on the answers of a stale policy for weeks. Three proofs:
identity (an answer names the adapter, by digest), the marker (a strong adapter that must show) and, here, a difference
in differences. Of every sampled token of a few answers,

    y = engine's logp - trainer's logp, each in its own precision       what the engine does beside the trainer
    x = exact logp under another adapter - exact logp under the one in use       how the other adapter would show

and y is regressed on x, with an intercept for each step. The coefficient is 0 when the engine computes the adapter in
use, and 1 when it computes the other one; a share between when some answers, or some of the scale, come from it.
"Exact" is float32 on the same rounded weights (`ExactDecoder`): were x measured in bfloat16, its own rounding would
stand in y as well, and give a fresh engine a coefficient of one half. The error is of whole answers (Liang and Zeger
1986), since rounding errors of one answer hang together.

bfloat16 does not see all of an adapter: what it adds to an output is lost where it is less than half the spacing there.
An engine that computes the other adapter then shows a coefficient of the share that is seen, which is measured on the
trainer itself (`visible`): the effect of its adapter in its own precision, regressed on the exact effect. What is not
seen is no difference between two policies either, so nothing is lost where it cannot be found.

Does not show: an engine that agrees on the answers that were looked at and not on others; one that computes the right
adapter and reports what it did not draw; staleness below what the measured error can tell from 0, which is said.

Three parts, from the bottom up: figures in, verdict out, in pure numpy (`Watch`); what answers look like to the trainer
(`Probe`); and the check of each rollout before the update trusts it (`AgreementWatch`). It stops the step, before any
factor has changed, where an answer names another adapter than the one that is trained, where log-probabilities are
missing or too far from the trainer's, where figures follow another adapter, and where a marker does not show. Where
several processes train (`scale_out`), process 0 looks and all judge what it found, so that all stop at the same step.
What was found so far is part of a session's kept state (`resume`).

Does not stop: an engine that lies, and computes what it is asked for its checks alone. The engine is this site's own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.randomness import generator, private_seed_of
from silo.trainer.adapters import TrainedState
from silo.trainer.decoder import Decoder, Factors, Projection, Stream, low_rank_linear, stream_of, token_logp
from silo.trainer.rollout.engine import PromptSource, Question, Rollout
from silo.trainer.scale_out import Processes

Numbers: TypeAlias = NDArray[np.float64]

BASE = "base"  # the base model, adapter off
START = "start"  # the adapter of the round's start
PREVIOUS = "previous"  # the adapter of the rollout before
DIFFERENCES = "differences"  # of the engine from the trainer, whatever the adapter
OWN = "own"  # no engine's: how much of its adapter the trainer itself sees
# In words, for whoever reads why a step was stopped.
FAULTS = {
    PREVIOUS: "the engine computes the adapter of the rollout before",
    START: "the engine computes the adapter of the round's start",
    BASE: "the engine computes the adapter not at all, not for every answer, or with another scale",
}
# Standard normal quantile of one false alarm in a million judgements, both sides together.
ALARM_QUANTILE = 4.89
# Beyond the alarm's edge an effect is found with 97.7 %.
POWER_QUANTILE = 2.0
# Of an adapter that its own precision sees less of, nothing can be told.
VISIBLE_MIN = 0.01
# Below this an effect is no fault of a push, whatever its error: nothing that goes wrong is a tenth stale.
COEFFICIENT_MIN = 0.1
# Adapters that differ less than this, root mean square in nats, are the same: the exact pass is good to about 1e-6.
EQUAL_NATS = 1e-5
# The log-ratio of the KL estimate counts up to here; exp(20) is 5e8.
LOG_RATIO_MAX = 20.0


@dataclass(frozen=True)
class Limits:
    """Limits of the proof: what is measured of a run, and what stops a step.

    Attributes:
        share: of a step's tokens, prompts counted, that are looked at, two answers whatever they cost; with 0 identity
            is all that is proven.
        kl_max: nats by which the engine's distribution may differ from the trainer's, mean over tokens.
        rounding_ratio: it may differ by this many times what the trainer differs from the exact pass, and no more.
        kl_floor: nats that it may differ by in any case; a float32 trainer has no rounding to compare with.
        marker_pushes: the marker is sent every so many rollouts; 0 is never.
        window_tokens: judged at the earliest.
        window_tokens_max: what was seen longer ago is forgotten.
    """

    share: float = 0.02
    kl_max: float = 0.02
    rounding_ratio: float = 10.0
    kl_floor: float = 1e-3
    marker_pushes: int = 50
    window_tokens: int = 4_000
    window_tokens_max: int = 1 << 20

    def kl_limit(self, rounding: float) -> float:
        """Return the KL that the engine may show. rounding: KL of the trainer from the exact pass, on the same
        tokens."""
        return min(self.kl_max, max(self.kl_floor, self.rounding_ratio * rounding))


def limits_from(fields: Mapping[str, float]) -> Limits:
    """Read limits from the keys of `rollout` in a site's configuration; what is not named has its default."""
    plain = Limits()
    return Limits(
        share=fields.get("agreement_share", plain.share),
        kl_max=fields.get("kl_max", plain.kl_max),
        marker_pushes=int(fields.get("marker_pushes", plain.marker_pushes)),
    )


@dataclass(frozen=True)
class AnswerFigures:
    """Log-probabilities of one answer's tokens, temperature included. Each [m].

    Attributes:
        engine: as the engine reported them.
        trainer: the trainer's own, in the precision it trains in.
        trainer_base: the same of the base model, adapter off.
        exact: in float32, under the adapter in use.
        others: the same under other adapters: `PREVIOUS`, `START`, `BASE`.
    """

    engine: Numbers
    trainer: Numbers
    trainer_base: Numbers
    exact: Numbers
    others: Mapping[str, Numbers] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """The evidence of the tokens so far about one other adapter.

    Attributes:
        other: which.
        coefficient: 0 where the engine computes the adapter in use, `visible` where it computes the other.
        error: standard error of it.
        quantile: errors by which the coefficient must leave 0: Student's, by the number of answers.
        tokens, answers: behind it.
        visible: share of an adapter's effect that the trainer's own precision sees; 1 where that was not measured.
    """

    other: str
    coefficient: float
    error: float
    quantile: float
    tokens: int
    answers: int
    visible: float = 1.0

    @property
    def is_alarm(self) -> bool:
        return abs(self.coefficient) >= COEFFICIENT_MIN and abs(self.coefficient) > self.quantile * self.error

    @property
    def detectable(self) -> float:
        """Return how much of the other adapter would be found, with 97.7 %: 1 is all of it, 3 is three times as
        much."""
        return max(COEFFICIENT_MIN, (self.quantile + POWER_QUANTILE) * self.error) / max(self.visible, VISIBLE_MIN)

    @property
    def is_fresh(self) -> bool:
        """The other adapter itself is ruled out, and would have been found."""
        return self.detectable <= 1.0 and not self.is_alarm

    def reason(self) -> str:
        return (
            f"{FAULTS[self.other]}: coefficient {self.coefficient:.2f}, standard error {self.error:.2g}, over "
            f"{self.tokens} tokens of {self.answers} answers"
        )


@dataclass(frozen=True)
class Divergence:
    """Difference of two distributions. kl: mean k3 of the engine to the trainer, in nats per token. error: its standard
    error over answers."""

    kl: float
    error: float

    def exceeds(self, limit: float) -> bool:
        """Beyond the limit by more than chance: one token that the two see differently is not a wrong model."""
        return self.kl - 3.0 * self.error > limit


def divergence(drawn: Sequence[Numbers], other: Sequence[Numbers]) -> Divergence:
    """KL per token by Schulman's k3, of the distribution that tokens were drawn from to another one.

    Args:
        drawn: log-probabilities of each answer's tokens in the one, no answer empty.
        other: in the other.
    """
    pairs = list(zip(drawn, other, strict=True))
    return _divergence_of([_k3(one, another) for one, another in pairs], [len(one) for one, _ in pairs])


def _k3(one: Numbers, another: Numbers) -> float:
    """Return the K3 estimate over all tokens of an answer together."""
    difference = np.minimum(another - one, LOG_RATIO_MAX)
    return float(np.sum(np.exp(difference) - difference - 1))


def _divergence_of(per_answer: Sequence[float], lengths: Sequence[float]) -> Divergence:
    tokens = float(sum(lengths))
    kl = sum(per_answer) / tokens
    if len(per_answer) < 2:
        return Divergence(kl, 0.0)
    off = [value - kl * length for value, length in zip(per_answer, lengths, strict=True)]
    squares = sum(value * value for value in off) * len(off) / (len(off) - 1)
    return Divergence(kl, math.sqrt(squares) / tokens)


def student_quantile(normal: float, freedom: int) -> float:
    """Student's quantile to the same tail as a normal one (Wallace 1959, Ann. Math. Stat. 30:1124, inverted); within
    a few per cent for 5 degrees of freedom and more, and rather too large below."""
    adjusted = normal * (8 * freedom + 3) / (8 * freedom + 1)
    exponent = adjusted * adjusted / freedom
    return math.sqrt(freedom * math.expm1(exponent)) if exponent < 700 else math.inf


@dataclass
class Regression:
    """Regression of y on x: of every answer two sums, which is all that slope and error need."""

    tokens: int = 0
    _squares: list[float] = field(default_factory=list)
    _products: list[float] = field(default_factory=list)

    def add(self, x: Sequence[Numbers], y: Sequence[Numbers]) -> None:
        """Add one step's answers; nothing where x is no difference."""
        if float(np.sqrt(np.mean(np.square(np.concatenate(x))))) < EQUAL_NATS:
            return
        middle_x, middle_y = (float(np.mean(np.concatenate(each))) for each in (x, y))
        for one, other in zip(x, y, strict=True):
            self._squares.append(float(np.sum((one - middle_x) ** 2)))
            self._products.append(float(np.sum((one - middle_x) * (other - middle_y))))
            self.tokens += len(one)

    def finding(self, other: str, visible: float = 1.0) -> Finding | None:
        """Return the finding, or None before there are three answers."""
        answers = len(self._squares)
        if answers < 3:
            return None
        squares, products = np.array(self._squares), np.array(self._products)
        coefficient = float(products.sum() / squares.sum())
        off = products - coefficient * squares
        return Finding(
            other=other,
            coefficient=coefficient,
            error=math.sqrt(float(np.sum(off**2)) * answers / (answers - 1)) / float(squares.sum()),
            quantile=student_quantile(ALARM_QUANTILE, answers - 1),
            tokens=self.tokens,
            answers=answers,
            visible=visible,
        )

    def sums(self) -> Numbers:
        """Return all that the regression holds but `tokens`: [2, answers]."""
        return np.array([self._squares, self._products])

    @classmethod
    def of(cls, tokens: int, sums: Numbers) -> Regression:
        """Rebuild a regression from its state. Raises ValueError: the sums are not [2, answers]."""
        squares, products = (each.tolist() for each in sums)
        return cls(tokens, squares, products)


class Differences:
    """The differences of engine and trainer over some steps: of every answer two sums, and its tokens.

    Of two answers whose differences are not alike, a step by itself can say nothing; some steps together can.
    """

    def __init__(self) -> None:
        self._answers: list[list[float]] = []

    def add(self, answers: Sequence[AnswerFigures]) -> None:
        self._answers += [
            [_k3(each.engine, each.trainer), _k3(each.exact, each.trainer), float(len(each.engine))] for each in answers
        ]

    def found(self) -> tuple[Divergence, float]:
        """Return the engine's divergence, and the trainer's own from the exact pass. There must be an answer."""
        engine, exact, tokens = np.array(self._answers).T.tolist()
        return _divergence_of(engine, tokens), _divergence_of(exact, tokens).kl

    def sums(self) -> Numbers:
        """[answers, 3]."""
        return np.array(self._answers, dtype=np.float64).reshape(-1, 3)

    @classmethod
    def of(cls, sums: Numbers) -> Differences:
        """Rebuild differences from their state. Raises ValueError: the sums are not [answers, 3]."""
        if sums.ndim != 2 or sums.shape[1] != 3:
            raise ValueError("the sums of a divergence")
        differences = cls()
        differences._answers = sums.tolist()
        return differences


class Window:
    """The regressions on every other adapter, and on the trainer's own base, over some steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self._others: dict[str, Regression] = {}
        self._own = Regression()

    def add(self, answers: Sequence[AnswerFigures]) -> None:
        """Add one step's answers, all with the same other adapters."""
        y = [answer.engine - answer.trainer for answer in answers]
        for other in sorted(answers[0].others):
            x = [answer.others[other] - answer.exact for answer in answers]
            self._others.setdefault(other, Regression()).add(x, y)
            if other == BASE:
                self._own.add(x, [answer.trainer_base - answer.trainer for answer in answers])
        self.tokens += sum(len(answer.engine) for answer in answers)

    @property
    def visible(self) -> float:
        """Share of the adapter's effect that the trainer's precision sees; 1 where it has none yet."""
        own = self._own.finding(BASE)
        return 1.0 if own is None else min(max(own.coefficient, 0.0), 1.0)

    def findings(self) -> list[Finding]:
        findings = (regression.finding(other, self.visible) for other, regression in sorted(self._others.items()))
        return [finding for finding in findings if finding is not None]

    def state(self) -> tuple[dict[str, Any], dict[str, Numbers]]:
        """Facts for JSON, and sums by name."""
        regressions = {**self._others, OWN: self._own}
        tokens = {name: regression.tokens for name, regression in regressions.items()}
        return {"tokens": self.tokens, "of": tokens}, {
            name: regression.sums() for name, regression in regressions.items()
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any], sums: Mapping[str, Numbers]) -> Window:
        """Rebuild a window from its `state`. Raises KeyError, TypeError, ValueError: it is none."""
        window = cls()
        window.tokens = int(facts["tokens"])
        window._others = {name: Regression.of(int(tokens), sums[name]) for name, tokens in facts["of"].items()}
        window._own = window._others.pop(OWN)
        return window


class Watch:
    """Two windows over the steps: a short one, judged as soon as it has the tokens, which a fault that begins late is
    not diluted in; and a long one of several short ones, until it has ruled staleness of one rollout out.

    Judged is a window at its end alone, so the false alarms are those of the judgements: one in a million for each
    other adapter and window.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._short = Window()
        self._long = Window()
        self._differences = Differences()  # of the short window
        self._judged: dict[str, Finding] = {}

    def differ(self, answers: Sequence[AnswerFigures]) -> tuple[Divergence, float]:
        """Take a step's answers in, before `add` does. Returns how far the engine is from the trainer over the short
        window, and what may be. An engine that agrees is ten times below what stops it, so that to look at every step
        is no more chance of a false alarm than to look once."""
        self._differences.add(answers)
        divergence_seen, rounding = self._differences.found()
        return divergence_seen, self._limits.kl_limit(rounding)

    def add(self, answers: Sequence[AnswerFigures]) -> list[Finding]:
        """Take a step's answers in. Returns what stops the step: the alarms, the strongest first."""
        self._short.add(answers)
        self._long.add(answers)
        if self._short.tokens < self._limits.window_tokens:
            return []
        findings = [*self._short.findings(), *self._long.findings()]
        self._judged |= {finding.other: finding for finding in findings}  # the long window's, which come last
        previous = self._judged.get(PREVIOUS)
        if self._long.tokens >= self._limits.window_tokens_max or (previous is not None and previous.is_fresh):
            self._long = Window()
        self._short, self._differences = Window(), Differences()
        return sorted((finding for finding in findings if finding.is_alarm), key=_errors_off, reverse=True)

    def figures(self) -> dict[str, float]:
        """Return the figures of the last judgement, for the step's metrics; nothing before the first."""
        figures: dict[str, float] = {"agreement_tokens": float(self._long.tokens)}
        for other, finding in sorted(self._judged.items()):
            figures[f"stale_{other}"] = finding.coefficient
            figures[f"stale_{other}_error"] = finding.error
            figures["adapter_visible_share"] = finding.visible
        if previous := self._judged.get(PREVIOUS):
            # k rollouts of drift show about k times as strong as one
            figures["stale_detectable_steps"] = previous.detectable
        return figures

    def state(self) -> tuple[dict[str, Any], dict[str, Numbers]]:
        """Facts for JSON, and sums by name: what the next judgement hangs on."""
        facts: dict[str, Any] = {"judged": {other: dataclasses.asdict(each) for other, each in self._judged.items()}}
        sums: dict[str, Numbers] = {DIFFERENCES: self._differences.sums()}
        for name, window in (("short", self._short), ("long", self._long)):
            facts[name], window_sums = window.state()
            sums |= {f"{name}.{other}": each for other, each in window_sums.items()}
        return facts, sums

    @classmethod
    def of(cls, limits: Limits, facts: Mapping[str, Any], sums: Mapping[str, Numbers]) -> Watch:
        """The one whose `state` this is, on with these limits. Raises KeyError, TypeError, ValueError: it is none."""
        watch = cls(limits)
        watch._judged = {other: Finding(**each) for other, each in facts["judged"].items()}
        watch._differences = Differences.of(sums[DIFFERENCES])
        watch._short, watch._long = (
            Window.of(facts[name], {key.removeprefix(f"{name}."): each for key, each in sums.items()})
            for name in ("short", "long")
        )
        return watch


def _errors_off(finding: Finding) -> float:
    return abs(finding.coefficient) / max(finding.error, 1e-300)


@dataclass(frozen=True)
class MarkerEffect:
    """The effect of a strong adapter that was sent the same way on the tokens that the engine drew under it.

    Attributes:
        distance: mean |engine - exact under the marker|, in nats per token.
        contrast: mean |exact under the adapter in use - exact under the marker|.
    """

    distance: float
    contrast: float

    @property
    def has_shown(self) -> bool:
        """The engine is nearer to the marker than a quarter of the way to the adapter in use, which is far enough off
        for rounding not to matter."""
        return self.contrast >= MARKER_CONTRAST_MIN and self.distance < self.contrast / 4


# Nats per token between the marker and the adapter in use: ten times what bfloat16 rounds.
MARKER_CONTRAST_MIN = 0.2


def marker_effect(engine: Numbers, marker: Numbers, in_use: Numbers) -> MarkerEffect:
    """Compare the engine's log-probabilities with the marker's. engine: as reported; marker, in_use: exact, under the
    two adapters. Each [m], tokens drawn under the marker."""
    return MarkerEffect(float(np.mean(np.abs(engine - marker))), float(np.mean(np.abs(in_use - marker))))


# Numbers of one block of the head, and of one block of logits, while they are float32: 64 MiB.
NUMBERS_TOGETHER = 1 << 24


class ExactDecoder(Decoder):
    """A view of a decoder's weights that computes in float32, with other values in place of the factors if asked.

    Args:
        decoder: whose weights these are; they are neither copied nor changed.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(copy.copy(decoder).__dict__)
        self._values: Mapping[int, Tensor] = {}

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids).float()

    @torch.no_grad()
    def logp(
        self,
        stream: Stream,
        temperature: float,
        *,
        factors: Sequence[tuple[Tensor, Tensor]] | None = None,
        base_only: bool = False,
    ) -> Tensor:
        """Log-probability of every answer token of a stream. [M] float32.

        Args:
            stream: prompts and answers.
            temperature: of the rollout; divides the logits.
            factors: (live tensor of the decoder, values to take in its place); None takes the live ones.
            base_only: compute the base model.
        """
        self._values = {id(live): values for live, values in factors or ()}
        self.adapted = not base_only
        try:
            return self._chosen(self.hidden(stream), stream.targets, temperature)
        finally:
            self._values = {}

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        stored = self.embedding.dtype
        factors: list[Factors] = []
        for each in projection.factors if self.adapted else ():
            a, b, *core = (
                self._values.get(id(live), live).to(stored).float()
                for live in (each.a, each.b, each.core)
                if live is not None
            )
            factors.append(Factors(each.start, each.stop, a, b, *core))
        bias = None if projection.bias is None else projection.bias.float()
        found = projection.weight_if(self.adapted)
        weight = found if isinstance(found, Tensor) else found.whole(stored)
        return low_rank_linear(x, weight.float(), bias, factors, self._scale)

    def _chosen(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Block by block of the vocabulary: a widened head would be the largest tensor of all."""
        words, width = self.head.shape
        together = max(1, NUMBERS_TOGETHER // max(width, len(hidden)))
        total = torch.full((len(hidden),), -torch.inf, device=hidden.device)  # [M] log of the sum so far
        chosen = torch.zeros_like(total)
        for start in range(0, words, together):
            logits = hidden @ self.head[start : start + together].float().T / temperature  # [M, block]
            total = torch.logaddexp(total, logits.logsumexp(1))
            inside = (targets >= start) & (targets < start + logits.shape[1])
            place = (targets - start).clamp(0, logits.shape[1] - 1)
            chosen = torch.where(inside, logits.gather(1, place.unsqueeze(1)).squeeze(1), chosen)
        return chosen - total


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
T = TypeVar("T")
PREFIX = "agreement."  # of its tensors in a kept state
ONE_SERVER = "one"  # that answers private and public prompts; this process itself is one


@dataclass(frozen=True)
class Row:
    """An answer that is looked at. place: of its prompt in the step."""

    place: int
    rollout: Rollout


class Probe:
    """The trainer's own view of a few answers, under the adapter in use and under others.

    Args:
        adapter: the one that is trained.
        temperature: of the rollout.
        rounds_once: whether the engine rounds a layer and its factors together, as the trainer does.
    """

    def __init__(self, adapter: TrainedState, temperature: float, *, rounds_once: bool = True) -> None:
        self._adapter = adapter
        self._temperature = temperature
        self._rounds_once = rounds_once
        self._exact = ExactDecoder(adapter.decoder)

    def passes(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], others: Mapping[str, Mapping[str, Tensor] | None]
    ) -> dict[str, Numbers]:
        """Log-probabilities of all rows' tokens, [M] each: fields of `AnswerFigures`, and others by name.

        Args:
            prompts: of the step.
            rows: the answers to look at, one at least.
            others: by name, factors by wire name that stand in the live ones' place; None where there are none.
        """
        stream = self._stream(prompts, rows)
        logps = {"exact": self._exact.logp(stream, self._temperature)}
        logps[BASE] = self._exact.logp(stream, self._temperature, base_only=True)
        logps["trainer"], logps["trainer_base"] = logps["exact"], logps[BASE]
        if self._adapter.decoder.embedding.dtype != torch.float32:
            logps["trainer"] = self._own(stream)
            with self._adapter.off():
                logps["trainer_base"] = self._own(stream)
        for name, values in others.items():
            if values is not None:
                replaced = [(self._adapter.factors[each], value) for each, value in values.items()]
                logps[name] = self._exact.logp(stream, self._temperature, factors=replaced)
        return {name: _numbers(logp) for name, logp in logps.items()}

    def under(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], factors: Mapping[str, Array]) -> Numbers:
        """Exact log-probabilities of all rows' tokens under these factors, by wire name; none: the live ones. [M]."""
        device = self._adapter.decoder.device
        live = self._adapter.factors
        replaced = [(live[name], torch.from_numpy(values).to(device)) for name, values in factors.items()]
        return _numbers(self._exact.logp(self._stream(prompts, rows), self._temperature, factors=replaced))

    @torch.no_grad()
    def _own(self, stream: Stream) -> Tensor:
        """In the precision that is trained in, rounded as the engine does: a server that rounds a small adapter away
        would else seem not to have taken it. [M]."""
        decoder = self._adapter.decoder
        with contextlib.nullcontext() if self._rounds_once else decoder.rounding_apart():
            return token_logp(decoder.hidden(stream), decoder.head, stream.targets, self._temperature)[0]

    def _stream(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> Stream:
        places = sorted({row.place for row in rows})
        local = {place: index for index, place in enumerate(places)}
        return stream_of(
            [prompts[place] for place in places],
            [(local[row.place], row.rollout.ids) for row in rows],
            self._adapter.decoder.device,
        )


def keyed_draw(site_secret: bytes, seed: int) -> Draw:
    """Return a watch's source of draws: private, and its own in every run."""
    return lambda purpose, *key: generator(private_seed_of(site_secret, seed, purpose, *key))


class AgreementWatch:
    """Proof that the engine computes the adapter that is trained, rollout by rollout.

    Args:
        adapter: the one that is trained.
        temperature: of the rollout.
        draw: keyed generator of this watch's own draws, by (purpose, ...).
        limits: what is measured and what stops a step.
        group: the processes that train together; None: this one alone.
        equal_passes: they need each other in every pass through the model (`sharding`).
        rounds_once: as of `Probe`.
        servers_apart: private and public prompts are answered by two servers, which are told of adapters one by one.
    """

    def __init__(
        self,
        adapter: TrainedState,
        temperature: float,
        draw: Draw,
        limits: Limits,
        *,
        group: Processes | None = None,
        equal_passes: bool = False,
        rounds_once: bool = True,
        servers_apart: bool = False,
    ) -> None:
        self._adapter = adapter
        self._group = group
        self._equal_passes = equal_passes
        self._draw = draw
        self._limits = limits
        self._probe = Probe(adapter, temperature, rounds_once=rounds_once)
        self._watch = Watch(limits)
        self._servers_apart = servers_apart
        # by what answers: each server has an adapter of its own that it may have been left with
        self._previous: dict[str, dict[str, Tensor]] = {}
        self._rollouts: dict[str, int] = {}
        self._marker: dict[str, float] = {}

    def check(
        self,
        key: tuple[str | int, ...],
        prompts: Sequence[tuple[int, ...]],
        rollouts: Sequence[tuple[Rollout, ...]],
        generate: Generate,
        source: PromptSource = "private",
    ) -> dict[str, float]:
        """Look at a step's answers, before the update.

        Args:
            key: round and step.
            prompts: their tokens.
            rollouts: the answers to each.
            generate: asks the engine (questions, most new tokens) under whatever the adapter then holds.
            source: of the prompts.

        Returns:
            Figures for the step's metrics.

        Raises:
            OperationError: `STALE_ROLLOUT`, `ROLLOUT_DISAGREES` or `ROLLOUT_NOT_PROVEN`, with the reason.
        """
        started = time.monotonic()
        self._together(lambda: _refuse_other_adapter(self._adapter.name(), rollouts))
        figures: dict[str, float] = {}
        chosen = self._chosen(key, prompts, rollouts)
        server = source if self._servers_apart else ONE_SERVER
        if chosen:
            figures |= self._measured(prompts, chosen, self._previous.get(server))
        before = self._rollouts.get(server, 0)
        self._rollouts[server] = before + 1
        if chosen and self._limits.marker_pushes and before % self._limits.marker_pushes == 0:
            self._send_marker(key, prompts, chosen, generate)
        stored = self._adapter.decoder.embedding.dtype
        trained = zip(self._adapter.trained_names, self._adapter.parameters, strict=True)
        self._previous[server] = {name: each.detach().to(stored, copy=True) for name, each in trained}
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

    def _measured(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], previous: Mapping[str, Tensor] | None
    ) -> dict[str, float]:
        start = dict(zip(self._adapter.trained_names, self._adapter.start, strict=True))
        others = {START: start, PREVIOUS: previous}
        reported = self._together(lambda: reported_by(rows))
        passes = self._of_process_0(lambda: self._probe.passes(prompts, rows, others))
        answers = answer_figures(passes, reported)
        return self._together(lambda: self._judged(answers))

    def _judged(self, answers: Sequence[AnswerFigures]) -> dict[str, float]:
        trained = [answer.trainer for answer in answers]
        engine_divergence = divergence([answer.engine for answer in answers], trained)
        rounding = divergence([answer.exact for answer in answers], trained).kl
        limit = self._limits.kl_limit(rounding)
        for of, most in (
            (engine_divergence, limit),
            self._watch.differ(answers),
        ):  # this step's, and over the short window
            if of.exceeds(most):
                raise OperationError(
                    f"the engine's distribution is {of.kl:.3g} nats per token from the trainer's (standard error "
                    f"{of.error:.2g}), at most {most:.3g} may be",
                    code=DISAGREES,
                    hint="the engine must load the same base in the same precision, and report log-probabilities after "
                    "temperature",
                )
        if alarms := self._watch.add(answers):
            reasons = "; or ".join(alarm.reason() for alarm in alarms)
            raise OperationError(reasons, code=STALE, hint="push the adapter again under a name of its own")
        return {
            "rollout_kl": engine_divergence.kl,
            "rollout_kl_error": engine_divergence.error,
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
            if seen.contrast >= MARKER_CONTRAST_MIN:  # else it was too weak to show for this model
                break
        self._marker = {"marker_distance": seen.distance, "marker_contrast": seen.contrast}
        self._together(lambda: _refuse_unseen(seen))

    def _marker_sent(
        self,
        key: tuple[str | int, ...],
        strength: float,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        generate: Generate,
    ) -> MarkerEffect:
        marker = self._adapter.marker(self._draw("marker", *key), strength)
        chosen = sorted({row.place for row in rows})[:MARKER_QUESTIONS]
        questions = [
            Question(
                prompts[place],
                tuple(self._draw("marker-rollout", *key, place, sample) for sample in range(MARKER_ANSWERS)),
            )
            for place in chosen
        ]
        with self._adapter.replaced_by(marker):
            name = self._adapter.name()
            answers = generate(questions, MARKER_TOKENS)
        self._together(lambda: _refuse_other_adapter(name, answers))
        drawn = [Row(place, each) for place, row in zip(chosen, answers, strict=True) for each in row]
        reported = self._together(lambda: reported_by(drawn))
        exact = self._of_process_0(
            lambda: {
                "marker": self._probe.under(prompts, drawn, marker),
                "in use": self._probe.under(prompts, drawn, {}),
            }
        )
        return marker_effect(np.concatenate(reported), exact["marker"], exact["in use"])

    # ---- several processes ---------------------------------------------------------------------------

    def _together(self, work: Callable[[], T]) -> T:
        """Judge; where one process has a reason to stop, all stop."""
        return work() if self._group is None else self._group.together(work)

    def _of_process_0(self, work: Callable[[], dict[str, Numbers]]) -> dict[str, Numbers]:
        """Passes through the model, as process 0 finds them: their last bits may differ on another accelerator."""
        if self._group is None:
            return work()
        first = self._group.rank == 0
        if self._equal_passes:
            with self._group.lost_on_failure():
                logps = work()
        else:
            logps = self._group.together(lambda: work() if first else {})
        payload = {name: each.tolist() for name, each in logps.items()} if first else None
        return {name: np.array(each, dtype=np.float64) for name, each in self._group.gather(payload)[0].items()}

    # ---- what is kept --------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Facts for JSON, and copies on the CPU under names with `PREFIX`: what later verdicts hang on."""
        facts, sums = self._watch.state()
        tensors = {f"{PREFIX}sums.{name}": torch.from_numpy(each) for name, each in sums.items()}
        for server, previous in self._previous.items():
            for name, each in previous.items():
                tensors[f"{PREFIX}previous.{server}.{name}"] = each.to("cpu", copy=True)
        facts_of_run = {
            "watch": facts,
            "rollouts": dict(self._rollouts),
            "marker": self._marker,
            "previous": sorted(self._previous),
        }
        return facts_of_run, tensors

    def ready_to_restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Read a `state` and change nothing; what is returned goes back to it.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        start = f"{PREFIX}sums."
        sums = {name.removeprefix(start): each.numpy() for name, each in tensors.items() if name.startswith(start)}
        watch = Watch.of(self._limits, facts["watch"], sums)
        rollouts = {str(server): int(count) for server, count in dict(facts["rollouts"]).items()}
        marker = {name: float(each) for name, each in facts["marker"].items()}
        device, previous = self._adapter.decoder.device, dict[str, dict[str, Tensor]]()
        for server in map(str, facts["previous"]):
            start = f"{PREFIX}previous.{server}."
            factors = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
            # of the open round, or of the one before, which may have trained others
            if sorted(factors) not in self._adapter.trained_by_turns or any(
                self._adapter.factors[name].shape != each.shape for name, each in factors.items()
            ):
                raise ValueError(f"{start[:-1]}, the factors of the rollout before")
            previous[server] = {name: each.to(device, copy=True) for name, each in factors.items()}

        def restore() -> None:
            self._watch, self._rollouts, self._marker, self._previous = watch, rollouts, marker, previous

        return restore


def _refuse_unseen(seen: MarkerEffect) -> None:
    if not seen.has_shown:
        raise OperationError(
            f"a marker adapter was sent and does not show: the engine's log-probabilities are {seen.distance:.2f} "
            f"nats per token from it, the adapter in use is {seen.contrast:.2f}",
            code=STALE,
            hint="the engine takes adapters and does not compute them, or answers from a cache of before",
        )


def _refuse_other_adapter(name: str, rollouts: Sequence[tuple[Rollout, ...]]) -> None:
    others = {rollout.adapter for answers in rollouts for rollout in answers} - {name}
    if others:
        other = sorted(others)[0]
        raise OperationError(
            f"an answer was written with the adapter {other[:12] or 'that has no name'}, trained is {name[:12]}",
            code=STALE,
            hint="the engine has not taken the adapter that was pushed",
        )


def reported_by(rows: Sequence[Row]) -> list[Numbers]:
    """The engine's log-probabilities of each answer. Raises OperationError: they are missing, or are no numbers."""
    reported = [np.asarray(row.rollout.logp, dtype=np.float64) for row in rows]
    for row, logp in zip(rows, reported, strict=True):
        if len(logp) != len(row.rollout.ids) or not np.isfinite(logp).all():
            raise OperationError(
                f"the engine reports {len(logp)} log-probabilities for {len(row.rollout.ids)} tokens, or some that "
                "are no finite number",
                code=NOT_PROVEN,
            )
    return reported


def _numbers(logp: Tensor) -> Numbers:
    return logp.double().cpu().numpy()


def answer_figures(passes: Mapping[str, Numbers], reported: Sequence[Numbers]) -> list[AnswerFigures]:
    """`Probe.passes`, cut into answers. reported: the engine's own, of each."""
    edges = np.cumsum([len(each) for each in reported])[:-1]
    of_answer = {name: np.split(logp, edges) for name, logp in passes.items()}
    return [
        AnswerFigures(
            engine=engine,
            trainer=of_answer["trainer"][place],
            trainer_base=of_answer["trainer_base"][place],
            exact=of_answer["exact"][place],
            others={name: parts[place] for name, parts in of_answer.items() if name in FAULTS},
        )
        for place, engine in enumerate(reported)
    ]

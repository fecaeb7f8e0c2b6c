"""Does the engine that writes the answers compute the adapter that is trained? Figures in, verdict out; pure numpy.

An adapter push that silently does not arrive lets a run train on the answers of a stale policy for weeks. Three proofs:
identity (an answer names the adapter, by digest), the marker (a strong adapter that must show) and, here, a difference
in differences. Of every sampled token of a few answers,

    y = engine's logp - trainer's logp, each in its own precision       what the engine does beside the trainer
    x = exact logp under another adapter - exact logp under the one in use       how the other adapter would show

and y is regressed on x, with an intercept for each step. The coefficient is 0 when the engine computes the adapter in
use, and 1 when it computes the other one; a share between when some answers, or some of the scale, come from it.
"Exact" is float32 on the same rounded weights (`exact`): were x measured in bfloat16, its own rounding would stand in y
as well, and give a fresh engine a coefficient of one half. The error is of whole answers (Liang and Zeger 1986), since
rounding errors of one answer hang together.

bfloat16 does not see all of an adapter: what it adds to an output is lost where it is less than half the spacing there.
An engine that computes the other adapter then shows a coefficient of the share that is seen, which is measured on the
trainer itself (`visible`): the effect of its adapter in its own precision, regressed on the exact effect. What is not
seen is no difference between two policies either, so nothing is lost where it cannot be found.

Does not show: an engine that agrees on the answers that were looked at and not on others; one that computes the right
adapter and reports what it did not draw; staleness below what the measured error can tell from 0, which is said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

BASE = "base"  # the base model, adapter off
START = "start"  # the adapter of the round's start
PREVIOUS = "previous"  # the adapter of the rollout before
DIFFERENCES = "differences"  # of the engine from the trainer, whatever the adapter
OWN = "own"  # no engine's: how much of its adapter the trainer itself sees
BASE_NAME = "base"  # what an engine calls itself that computes no adapter
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
    """What is measured of a run, and what stops a step.

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
        """rounding: KL of the trainer from the exact pass, on the same tokens."""
        return min(self.kl_max, max(self.kl_floor, self.rounding_ratio * rounding))


def limits_from(fields: Mapping[str, float]) -> Limits:
    """Of the keys of `rollout` in a site's configuration; what is not named has its default."""
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
    """What the tokens so far say about one other adapter.

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
        """How much of the other adapter would be found, with 97.7 %: 1 is all of it, 3 is three times as much."""
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
    """kl: mean k3 of the engine to the trainer, in nats per token. error: its standard error over answers."""

    kl: float
    error: float

    def exceeds(self, limit: float) -> bool:
        """Beyond the limit by more than chance: one token that the two see differently is not a wrong model."""
        return self.kl - 3.0 * self.error > limit


def adapter_name(tensors: Mapping[str, NDArray[np.float32]], scale: float) -> str:
    """Digest of an adapter's factors, names, shapes and scale: what its rollouts must name."""
    digest = hashlib.sha256(f"{scale!r}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor, dtype=np.float32).data)
    return digest.hexdigest()


def divergence(drawn: Sequence[Numbers], other: Sequence[Numbers]) -> Divergence:
    """KL per token by Schulman's k3, of the distribution that tokens were drawn from to another one.

    Args:
        drawn: log-probabilities of each answer's tokens in the one, no answer empty.
        other: in the other.
    """
    pairs = list(zip(drawn, other, strict=True))
    return _divergence_of([_k3(one, another) for one, another in pairs], [len(one) for one, _ in pairs])


def _k3(one: Numbers, another: Numbers) -> float:
    """Of all tokens of an answer together."""
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


class Regression:
    """y on x: of every answer two sums, which is all that slope and error need."""

    def __init__(self) -> None:
        self.tokens = 0
        self._squares: list[float] = []
        self._products: list[float] = []

    def add(self, x: Sequence[Numbers], y: Sequence[Numbers]) -> None:
        """One step's answers. Nothing is added where x is no difference."""
        if float(np.sqrt(np.mean(np.square(np.concatenate(x))))) < EQUAL_NATS:
            return
        middle_x, middle_y = (float(np.mean(np.concatenate(each))) for each in (x, y))
        for one, other in zip(x, y, strict=True):
            self._squares.append(float(np.sum((one - middle_x) ** 2)))
            self._products.append(float(np.sum((one - middle_x) * (other - middle_y))))
            self.tokens += len(one)

    def finding(self, other: str, visible: float = 1.0) -> Finding | None:
        """None before there are three answers."""
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
        """All that it holds but `tokens`: [2, answers]."""
        return np.array([self._squares, self._products])

    @classmethod
    def of(cls, tokens: int, sums: Numbers) -> Regression:
        """The one whose these are. Raises ValueError: they are not [2, answers]."""
        found = cls()
        found.tokens = tokens
        found._squares, found._products = (each.tolist() for each in sums)
        return found


class Differences:
    """How far engine and trainer are apart over some steps: of every answer two sums, and its tokens.

    Of two answers whose differences are not alike, a step by itself can say nothing; some steps together can.
    """

    def __init__(self) -> None:
        self._answers: list[list[float]] = []

    def add(self, answers: Sequence[AnswerFigures]) -> None:
        self._answers += [
            [_k3(each.engine, each.trainer), _k3(each.exact, each.trainer), float(len(each.engine))] for each in answers
        ]

    def found(self) -> tuple[Divergence, float]:
        """Of the engine, and what the trainer itself differs from the exact pass by. Not of nothing."""
        engine, exact, tokens = np.array(self._answers).T.tolist()
        return _divergence_of(engine, tokens), _divergence_of(exact, tokens).kl

    def sums(self) -> Numbers:
        """[answers, 3]."""
        return np.array(self._answers, dtype=np.float64).reshape(-1, 3)

    @classmethod
    def of(cls, sums: Numbers) -> Differences:
        """The one whose these are. Raises ValueError: they are not [answers, 3]."""
        if sums.ndim != 2 or sums.shape[1] != 3:
            raise ValueError("the sums of a divergence")
        found = cls()
        found._answers = sums.tolist()
        return found


class Window:
    """The regressions on every other adapter, and on the trainer's own base, over some steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self._others: dict[str, Regression] = {}
        self._own = Regression()

    def add(self, answers: Sequence[AnswerFigures]) -> None:
        """One step's answers, all with the same other adapters."""
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
        found = (regression.finding(other, self.visible) for other, regression in sorted(self._others.items()))
        return [finding for finding in found if finding is not None]

    def state(self) -> tuple[dict[str, Any], dict[str, Numbers]]:
        """Facts for JSON, and sums by name."""
        held = {**self._others, OWN: self._own}
        tokens = {name: regression.tokens for name, regression in held.items()}
        return {"tokens": self.tokens, "of": tokens}, {name: regression.sums() for name, regression in held.items()}

    @classmethod
    def of(cls, facts: Mapping[str, Any], sums: Mapping[str, Numbers]) -> Window:
        """The one whose `state` this is. Raises KeyError, TypeError, ValueError: it is none."""
        found = cls()
        found.tokens = int(facts["tokens"])
        found._others = {name: Regression.of(int(tokens), sums[name]) for name, tokens in facts["of"].items()}
        found._own = found._others.pop(OWN)
        return found


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
        found, rounding = self._differences.found()
        return found, self._limits.kl_limit(rounding)

    def add(self, answers: Sequence[AnswerFigures]) -> list[Finding]:
        """Take a step's answers in. Returns what stops the step: the alarms, the strongest first."""
        self._short.add(answers)
        self._long.add(answers)
        if self._short.tokens < self._limits.window_tokens:
            return []
        found = [*self._short.findings(), *self._long.findings()]
        self._judged |= {finding.other: finding for finding in found}  # the long window's, which come last
        previous = self._judged.get(PREVIOUS)
        if self._long.tokens >= self._limits.window_tokens_max or (previous is not None and previous.is_fresh):
            self._long = Window()
        self._short, self._differences = Window(), Differences()
        return sorted((finding for finding in found if finding.is_alarm), key=_errors_off, reverse=True)

    def figures(self) -> dict[str, float]:
        """Of the last judgement, for the step's metrics; nothing before the first."""
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
            facts[name], held = window.state()
            sums |= {f"{name}.{other}": each for other, each in held.items()}
        return facts, sums

    @classmethod
    def of(cls, limits: Limits, facts: Mapping[str, Any], sums: Mapping[str, Numbers]) -> Watch:
        """The one whose `state` this is, on with these limits. Raises KeyError, TypeError, ValueError: it is none."""
        found = cls(limits)
        found._judged = {other: Finding(**each) for other, each in facts["judged"].items()}
        found._differences = Differences.of(sums[DIFFERENCES])
        found._short, found._long = (
            Window.of(facts[name], {key.removeprefix(f"{name}."): each for key, each in sums.items()})
            for name in ("short", "long")
        )
        return found


def _errors_off(finding: Finding) -> float:
    return abs(finding.coefficient) / max(finding.error, 1e-300)


@dataclass(frozen=True)
class MarkerSeen:
    """What a strong adapter that was sent the same way did to the tokens that the engine drew under it.

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


def marker_seen(engine: Numbers, marker: Numbers, in_use: Numbers) -> MarkerSeen:
    """engine: as reported; marker, in_use: exact, under the two adapters. Each [m], tokens drawn under the marker."""
    return MarkerSeen(float(np.mean(np.abs(engine - marker))), float(np.mean(np.abs(in_use - marker))))

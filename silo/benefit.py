"""Whether joining helped this silo: three policies on the same private holdout, with intervals. Pure arithmetic.

A prompt counts with its share of right answers; what is compared is paired by prompt, and prompts of one group (a
patient) form a cluster, since they are not independent. The 95 % interval of a mean is Student's t on cluster sums
after a few made-up clusters are added (Agresti and Coull 1998 for a rate: two right, two wrong; Bonett and Price 2012
for a paired difference: one won, one lost). Without them an interval has no width where all prompts agree, which a
small holdout does often. Clusters of n_c prompts differ in size, so:

- a made-up cluster is as large as the one that a prompt is in on average: sum n_c^2 / sum n_c;
- the variance is that of sum_c n_c (m_c - centre) with the factor k / (k - 1), k = (sum n_c)^2 / sum n_c^2 (Kish 1965);
- degrees of freedom are Satterthwaite's (1946) for that sum of squares, as if prompts of one cluster all did the same,
  rounded down. Equal clusters have one less than there are; a cluster that outweighs the others leaves hardly any.
  Below two there is no interval: such a holdout is too few, however many prompts it has.

Simulated in tests/algorithms/test_benefit.py: equal and unequal clusters, and large ones that rarely differ.

What an interval does not cover: chance in the training itself, which is one run here, and looking at many topics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from fedsilo.protocol.codec import Array

Arm = Literal["base", "local_only", "federated"]
ARMS: tuple[Arm, ...] = ("base", "local_only", "federated")
# what the report is about comes first
DIFFERENCES: tuple[tuple[Arm, Arm], ...] = (("federated", "local_only"), ("federated", "base"), ("local_only", "base"))
CONFIDENCE = 0.95
POWER = 0.8
TOPIC_PROMPTS_MIN = 10
DEGREES_MIN = 2
# (value, number) of the made-up clusters
_MADE_UP_RATE = ((0.0, 2.0), (1.0, 2.0))
_MADE_UP_DIFFERENCE = ((-1.0, 1.0), (1.0, 1.0))
_DEGREES_AS_NORMAL = 1000  # from here on t and normal quantile agree within 0.2 %

DEFINITION = {
    "base": "the base model, adapter off",
    "local_only": "the same method, plan and initial adapter with this silo as its whole roster: its own private "
    "prompts, the same public steps on its own answers only, nobody else's answers, no averaging, no clipping at the "
    "gate; trained here by this command",
    "federated": "the run's final global adapter",
    "pass_at_1": "share of right answers at the plan's rollout temperature, mean over prompts; greedy: one answer at "
    "temperature 0. The three arms answer the same prompts with the same random numbers",
    "interval": "95 %, Student's t over clusters (groups, equal prompts, else single prompts) with made-up ones: two "
    "right and two wrong for a rate (Agresti and Coull), one won and one lost for a difference, paired by prompt "
    "(Bonett and Price); Satterthwaite's degrees of freedom, and too few below two, as where one group outweighs the "
    "others. It covers the choice of prompts and the sampling, not chance in training",
    "detectable": "true difference to local-only that such a holdout shows 4 times in 5",
}


@dataclass(frozen=True)
class Holdout:
    """The prompts, in one order for all arms. groups: number of each prompt's cluster."""

    topics: tuple[str, ...]
    groups: tuple[int, ...]
    samples: int


@dataclass(frozen=True)
class Answers:
    """The answers of one arm. correct: [P] right answers among the samples; greedy: [P] 0 or 1."""

    correct: tuple[int, ...]
    greedy: tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """Interval of a mean and what makes it: centre and half width before it is cut to the possible values."""

    low: float
    high: float
    standard_error: float
    degrees: int


# ---- arithmetic ------------------------------------------------------------------------------------


@functools.cache
def student_quantile(probability: float, degrees: int) -> float:
    """Student's t quantile for 0.5 <= probability < 1, by bisection on the closed form for whole degrees of freedom.

    Source: Abramowitz and Stegun 26.7.3, 26.7.4.
    """
    if degrees >= _DEGREES_AS_NORMAL:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2.0


def _student_cdf(value: float, degrees: int) -> float:
    angle = math.atan(value / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for k in range(3, degrees - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        inside = 2.0 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 1.0
        for k in range(2, degrees - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        inside = sine * total
    return 0.5 + inside / 2.0


def rate_interval(rates: Array, groups: Array) -> Spread | None:
    """Return the interval of the mean of rates [P] in 0 to 1; None where the clusters are too few or too unequal."""
    return _interval(rates, groups, _MADE_UP_RATE, (0.0, 1.0))


def difference_interval(differences: Array, groups: Array) -> Spread | None:
    """Of the mean of paired differences [P] in -1 to 1; None where the clusters are too few or too unequal."""
    return _interval(differences, groups, _MADE_UP_DIFFERENCE, (-1.0, 1.0))


def _interval(
    values: Array, groups: Array, made_up: Sequence[tuple[float, float]], bounds: tuple[float, float]
) -> Spread | None:
    _, cluster_of, counts = np.unique(groups, return_inverse=True, return_counts=True)  # [P], [clusters]
    sizes = counts.astype(float)
    degrees = cluster_degrees(sizes)
    if degrees < DEGREES_MIN:
        return None
    made_up_size = float(sizes @ sizes) / len(values)
    added = sum(number for _, number in made_up)
    size = len(values) + added * made_up_size
    centre = (float(values.sum()) + sum(value * number for value, number in made_up) * made_up_size) / size
    deviations = np.bincount(cluster_of, weights=values - centre)  # [clusters], sums
    made_up_squares = sum(number * (value - centre) ** 2 for value, number in made_up) * made_up_size**2
    parts = size**2 / (float(sizes @ sizes) + added * made_up_size**2)  # as many equal clusters say as much
    error = math.sqrt((float(deviations @ deviations) + made_up_squares) * parts / (parts - 1.0)) / size
    half = student_quantile(0.5 + CONFIDENCE / 2.0, degrees) * error
    return Spread(max(bounds[0], centre - half), min(bounds[1], centre + half), error, degrees)


def cluster_degrees(sizes: Array) -> int:
    """Degrees of freedom of sum_c n_c^2 (m_c - mean)^2 where all cluster means vary alike, rounded down.

    With A the matrix of that quadratic form they are (tr A)^2 / tr A^2 (Satterthwaite). A = D - w d' - d w' + s w w'
    for shares w = n / sum n, d = n^2, s = sum d and D = diag d, so both traces are a few sums.

    Args:
        sizes: [clusters], prompts of each.
    """
    if len(sizes) < 2:
        return 0
    shares, squares = sizes / sizes.sum(), sizes**2
    total = float(squares.sum())
    ww, wd, dd = float(shares @ shares), float(shares @ squares), float(squares @ squares)
    trace = total - 2.0 * wd + total * ww
    trace_of_square = (
        dd
        + 2.0 * (total * float(squares @ shares**2) - 2.0 * float(squares**2 @ shares))
        + 2.0 * (wd**2 + ww * dd)
        - 4.0 * total * ww * wd
        + (total * ww) ** 2
    )
    return math.floor(trace**2 / trace_of_square + 1e-6)  # equal clusters give a whole number, up to rounding


# ---- the report ------------------------------------------------------------------------------------


def compare(holdout: Holdout, arms: Mapping[Arm, Answers]) -> dict[str, Any]:
    """Return everything the report says about the numbers, as JSON: fractions, not points; `null` for an interval that
    so few prompts do not give.

    Returns:
        {"holdout", "arms", "differences", "per_topic", "verdict"}.
    """
    everything = np.ones(len(holdout.topics), dtype=bool)
    whole = _part(holdout, arms, everything)
    topics = np.array(holdout.topics)
    return {
        "holdout": {
            "prompts": len(holdout.topics),
            "groups": len(set(holdout.groups)),
            "samples_per_prompt": holdout.samples,
        },
        **{name: whole[name] for name in ("arms", "differences")},
        "per_topic": {
            topic: _part(holdout, arms, topics == topic, least_prompts=TOPIC_PROMPTS_MIN)
            for topic in sorted(set(holdout.topics))
        },
        "verdict": _verdict(holdout, arms, whole),
    }


def _part(
    holdout: Holdout, arms: Mapping[Arm, Answers], chosen: np.ndarray[Any, np.dtype[np.bool_]], least_prompts: int = 0
) -> dict[str, Any]:
    """Arms and differences over the chosen prompts. chosen: [P]."""
    groups = np.array(holdout.groups)[chosen]
    enough = int(chosen.sum()) >= least_prompts
    rates = {arm: np.array(arms[arm].correct, dtype=float)[chosen] / holdout.samples for arm in ARMS}
    shown: dict[str, Any] = {"prompts": int(chosen.sum()), "arms": {}, "differences": {}}
    for arm in ARMS:
        shown["arms"][arm] = {
            "pass_at_1": _mean(rates[arm]),
            "interval": _ends(rate_interval(rates[arm], groups) if enough else None),
            "greedy": _mean(np.array(arms[arm].greedy, dtype=float)[chosen]),
        }
    for one, other in DIFFERENCES:
        pairs = rates[one] - rates[other]
        shown["differences"][f"{one}_minus_{other}"] = {
            "mean": _mean(pairs),
            "interval": _ends(difference_interval(pairs, groups) if enough else None),
        }
    return shown


def _verdict(holdout: Holdout, arms: Mapping[Arm, Answers], whole: Mapping[str, Any]) -> dict[str, Any]:
    pairs = (np.array(arms["federated"].correct) - np.array(arms["local_only"].correct)) / holdout.samples
    spread = difference_interval(pairs, np.array(holdout.groups))
    if spread is None:
        return {
            "outcome": "too_few",
            "detectable": None,
            "sentence": "too few holdout prompts, or groups of them, to say whether joining helped",
        }
    reach = student_quantile(0.5 + CONFIDENCE / 2.0, spread.degrees) + student_quantile(POWER, spread.degrees)
    detectable = min(1.0, reach * spread.standard_error)
    shown = f"{points(whole['differences']['federated_minus_local_only'])}"
    if spread.low > 0:
        outcome, words = "helped", f"joining helped: {shown} over training alone"
    elif spread.high < 0:
        outcome, words = "hurt", f"joining hurt: {shown} against training alone"
    else:
        outcome = "no_difference"
        words = f"no difference to training alone that this holdout can show: {shown}"
    return {"outcome": outcome, "detectable": round(detectable, 6), "sentence": words}


def points(difference: Mapping[str, Any]) -> str:
    """`+3.1 points [+0.4, +5.8]`, or `too few` in place of the interval."""
    mean = f"{100 * difference['mean']:+.1f} points"
    ends = difference["interval"]
    return f"{mean} [{100 * ends[0]:+.1f}, {100 * ends[1]:+.1f}]" if ends else f"{mean} (too few for an interval)"


def _mean(values: Array) -> float:
    return round(float(values.mean()), 6) if values.size else 0.0


def _ends(spread: Spread | None) -> list[float] | None:
    return None if spread is None else [round(spread.low, 6), round(spread.high, 6)]

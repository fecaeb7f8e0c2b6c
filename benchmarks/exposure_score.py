"""How much a trained policy favours what it was trained on: figures on two exchangeable sets of canaries (X12).

Canaries are random prompt -> answer pairs. A fair draw says which of them one silo trains on and which nobody does, so
whatever else training changes, it changes for both sets alike: without memory of the trained ones the expected score
is 0, and the draw itself is the null distribution. The p-value is exact for rewards, which are counts; for
real-valued gains it is estimated by drawing splits.

Several independent sets of canaries ("strata": one for each seed) are put together by permuting within each.
Pure functions: numbers in, numbers out; randomness is an argument.

What a score of 0 does not show: that nothing was memorised (N2). It says that answering, as often as it was sampled
here, does not tell the two sets apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = Sequence[float]
_RESAMPLED_VALUES_MAX = 1 << 22  # of one block in memory, 32 MiB of float64


@dataclass(frozen=True)
class Gains:
    """What training changed for each canary: after minus before. Rewards as whole numbers of passed samples.

    Raises:
        ValueError: a set is empty, or a value is not finite.
    """

    trained: tuple[float, ...]
    held_out: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.trained or not self.held_out:
            raise ValueError("both sets need a canary")
        if not np.isfinite([*self.trained, *self.held_out]).all():
            raise ValueError("a gain is not a finite number")


def gains_of(before: Numbers, after: Numbers, is_trained: Sequence[bool]) -> Gains:
    """Gain of every canary, by the set that the draw put it in.

    Args:
        before: a figure for each canary, such as samples passed, under the policy that training started from.
        after: the same under the trained policy.
        is_trained: whether the canary was in the private data.

    Raises:
        ValueError: the three are not of one length, or a set is empty.
    """
    gained = [(later - earlier, inside) for earlier, later, inside in zip(before, after, is_trained, strict=True)]
    return Gains(tuple(gain for gain, inside in gained if inside), tuple(gain for gain, inside in gained if not inside))


def exposure_score(strata: Sequence[Gains]) -> float:
    """Mean gain of the trained canaries minus that of the held-out ones; the mean over strata where there are several.

    Raises ValueError: no strata.
    """
    if not strata:
        raise ValueError("no canaries")
    return float(np.mean([np.mean(gains.trained) - np.mean(gains.held_out) for gains in strata]))


def exact_p_value(strata: Sequence[Gains]) -> float:
    """Share of all ways to split each stratum's canaries into sets of these sizes whose score is at least as large.

    One-sided: exposure is a gain of the trained ones. The splits are counted, not listed: for whole numbers the ways
    to choose k canaries with sum s follow from adding one canary at a time (Pagano and Tritchler 1983). Only positive
    numbers are added and multiplied, so rounding stays at 1e-13 of the result.

    Raises:
        ValueError: no strata, a gain is not a whole number, or strata differ in size: then the score is not a
            function of the summed gains of the trained ones.
        OverflowError: a stratum has so many canaries that the number of splits exceeds a float (about 1,000).
    """
    if not strata:
        raise ValueError("no canaries")
    if len({(len(gains.trained), len(gains.held_out)) for gains in strata}) > 1:
        raise ValueError("strata of unlike sizes weigh a gain differently")
    shares = np.ones(1)
    observed = 0
    for gains in strata:
        values = [*gains.trained, *gains.held_out]
        if any(value != int(value) for value in values):
            raise ValueError("an exact test wants whole numbers, such as samples passed")
        lowest = int(min(values))
        places = [int(value) - lowest for value in values]  # at least 0, so that a sum is an index
        shares = np.convolve(shares, _shares_by_sum(places, len(gains.trained)))
        observed += sum(places[: len(gains.trained)])
    return float(shares[observed:].sum())


def monte_carlo_p_value(strata: Sequence[Gains], draws: np.random.Generator, *, splits: int = 20_000) -> float:
    """The same share, estimated from random splits, the observed one among them: never 0, and valid at any number
    (Phipson and Smyth 2010).

    Args:
        strata: gains of any kind.
        draws: source of the splits.
        splits: to draw.
    """
    observed = exposure_score(strata)
    scores = np.zeros(splits)
    for gains in strata:
        values = np.array([*gains.trained, *gains.held_out])
        count = len(gains.trained)
        block = max(1, _RESAMPLED_VALUES_MAX // len(values))
        for start in range(0, splits, block):
            rows = min(block, splits - start)
            shuffled = draws.permuted(np.tile(values, (rows, 1)), axis=1)  # [splits, canaries]
            scores[start : start + rows] += shuffled[:, :count].mean(1) - shuffled[:, count:].mean(1)
    # A split that equals the observed one may sum up in another order and fall a rounding error short of it.
    tolerance = 1e-12 * max(1.0, *(abs(value) for gains in strata for value in (*gains.trained, *gains.held_out)))
    as_large = int((scores / len(strata) >= observed - tolerance).sum())
    return (1 + as_large) / (1 + splits)


def bootstrap_interval(
    strata: Sequence[Gains], draws: np.random.Generator, *, confidence: float = 0.95, resamples: int = 10_000
) -> tuple[float, float]:
    """Percentile interval of the score when the canaries of each set of each stratum are drawn again with replacement.

    It tells how far the score hangs on which canaries were made; training is not repeated.

    Args:
        strata: gains of any kind.
        draws: source of the resamples.
        confidence: share between the two ends.
        resamples: to draw.
    """
    scores = np.zeros(resamples)
    for gains in strata:
        scores += _resampled_means(gains.trained, draws, resamples) - _resampled_means(gains.held_out, draws, resamples)
    low, high = np.quantile(scores / len(strata), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _resampled_means(values: Numbers, draws: np.random.Generator, resamples: int) -> np.ndarray[Any, Any]:
    return np.asarray(draws.choice(np.asarray(values, dtype=float), size=(resamples, len(values))).mean(1))


def _shares_by_sum(places: Sequence[int], size: int) -> np.ndarray[Any, Any]:
    """[s]: share of the subsets of `size` of these whose sum is s."""
    subsets = float(math.comb(len(places), size))
    ways = np.zeros((size + 1, sum(sorted(places)[-size:]) + 1))  # [subset size, sum]
    ways[0, 0] = 1.0
    for place in places:
        for chosen in range(size, 0, -1):  # from above, so that no canary is taken twice
            ways[chosen, place:] += ways[chosen - 1, : ways.shape[1] - place]
    return np.asarray(ways[size] / subsets)

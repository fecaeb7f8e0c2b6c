"""How a round's updates become its result: arithmetic on numpy arrays, as data of a method. Pure.

    element by element   master [n], updates [n] each, state [n] each  ->  next master [n], next state [n] each
    tensor by tensor     master, updates, by name                           ->  result, by name

The coordinator calls the first on tiles, each of which may hold parts of several tensors, so that no update is in
memory as a whole. The second is for what needs a tensor as a whole, such as a distance between updates.

Averaging methods take two steps. The updates come to one, D, their mean or what the plan names in its place. Then the
plan's server optimiser moves the adapter theta by it, with rate eta and numbers that rounds hand on, at first 0:

    none      theta + D
    momentum  v = beta v + D, theta + eta v               (FedAvgM, Hsu et al. 2019)
    nesterov  v = beta v + D, theta + eta (D + beta v)    (Sutskever et al. 2013)
    adam      m = b1 m + (1 - b1) D, v = b2 v + (1 - b2) D^2, theta + eta m / (sqrt(v) + tau)
                                                          (FedAdam, Reddi et al. 2021, algorithm 2)

FedAdam has no correction of m and v for having begun at 0; some libraries add Adam's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from fedsilo.protocol.codec import Array
from fedsilo.protocol.factors import (
    mean_delta,
    median_delta,
    trimmed_mean_delta,
    update_weights,
    weighted_delta,
)
from fedsilo.protocol.plan import SHIFTING, Plan, ServerOptimiser
from fedsilo.protocol.products import shifted

Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class ElementWise:
    """Attributes:
    combine: (master tile, tiles of the updates in silo order, tiles of the state) -> the new master tile and those of
        the new state, all [n] float32, in memory that it does not touch again.
    state: how many numbers there are beside each number of the master, from round to round of a run; at first all 0.
    """

    combine: Callable[[Array, Sequence[Array], Sequence[Array]], tuple[Array, ...]]
    state: int = 0


@dataclass(frozen=True)
class TensorWise:
    """Attributes:
    combine: (master or None, updates in silo order) -> the result's tensors, float32, all by wire name; what it is
        given is read from the disk whenever it is asked for. What the run freezes is not asked for and stays.
    master: whether updates are differences to the adapter that the round began with; else they stand by themselves.
    """

    combine: Callable[[Tensors | None, Sequence[Tensors]], Tensors]
    master: bool = True


Aggregate = ElementWise | TensorWise


def averaged(plan: Plan, silos: Sequence[str]) -> Aggregate:
    """Return how the updates of these silos, in this order, become the next adapter of an averaging method."""
    if plan.aggregate in SHIFTING:

        def shift(master: Tensors | None, deltas: Sequence[Tensors]) -> Tensors:
            return shifted(plan.aggregate, master or {}, deltas)

        return TensorWise(shift)
    average, optimiser = average_of(plan, silos), plan.server_optimiser
    move = _MOVES[optimiser.name]

    def combine(master: Array, deltas: Sequence[Array], state: Sequence[Array]) -> tuple[Array, ...]:
        step, *next_state = move(optimiser, average(deltas), *state)
        return master + step, *next_state

    return ElementWise(combine, STATES[optimiser.name])


def average_of(plan: Plan, silos: Sequence[str]) -> Callable[[Sequence[Array]], Array]:
    """Return what the updates of these silos come to: their mean, weighted where the plan lets them differ in steps, or
    what it names in the mean's place (`aggregate`)."""
    if plan.aggregate == "median":
        return median_delta
    if plan.aggregate == "trimmed_mean":
        return partial(trimmed_mean_delta, plan.trim)
    steps = [plan.steps_of(silo) for silo in silos]
    if plan.silo_weights == "steps" or len(set(steps)) == 1:
        return mean_delta
    return partial(weighted_delta, update_weights(steps))


# ---- server optimisers -------------------------------------------------------------------------------------------

# How many numbers each keeps beside a number of the adapter.
STATES: Final[dict[str, int]] = {"none": 0, "momentum": 1, "nesterov": 1, "adam": 2}


def _none(_: ServerOptimiser, update: Array) -> tuple[Array, ...]:
    return (update,)


def _momentum(optimiser: ServerOptimiser, update: Array, v: Array) -> tuple[Array, ...]:
    v = optimiser.momentum * v + update
    return optimiser.learning_rate * v, v


def _nesterov(optimiser: ServerOptimiser, update: Array, v: Array) -> tuple[Array, ...]:
    v = optimiser.momentum * v + update
    return optimiser.learning_rate * (update + optimiser.momentum * v), v


def _adam(optimiser: ServerOptimiser, update: Array, m: Array, v: Array) -> tuple[Array, ...]:
    m = optimiser.beta1 * m + (1 - optimiser.beta1) * update
    v = optimiser.beta2 * v + (1 - optimiser.beta2) * (update * update)
    return optimiser.learning_rate * m / (np.sqrt(v) + optimiser.tau), m, v


_MOVES: Final[dict[str, Callable[..., tuple[Array, ...]]]] = {
    "none": _none,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
}

ROUNDING: Final = 1 + 2**-16  # what float32 adds to a step at most, over the rounds of a run


@dataclass(frozen=True)
class StepBound:
    """How far the adapter moves in a round at most (L2): the smaller of `scale` times the longest that an update may
    be, and `most`, which holds however long they are."""

    scale: float = 1.0
    most: float = math.inf

    def of(self, longest: float) -> float:
        return min(self.scale * longest, self.most)


def step_bound(plan: Plan, elements: int) -> StepBound:
    """Return what follows for a round's step from the signed plan, where in no round an update is longer than l, so
    that ||D|| <= L = l `aggregate_bound`.

    Momentum, in round t: v = sum_{k<t} beta^k D_{t-k}, so ||eta v|| <= eta L (1 - beta^t) / (1 - beta).
    Nesterov: D_t has the weight 1 + beta and D_{t-k} beta^(k+1), together sum_{k<=t} beta^k, so the same with t + 1.
    Adam: m = (1 - b1) sum_{k<t} b1^k D_{t-k}, whose weights add up to 1 - b1^t, and sqrt(v) + tau >= tau, so
    ||eta m / (sqrt(v) + tau)|| <= eta L (1 - b1^t) / tau. And for each number, with q = b1^2 / b2, by Cauchy and
    Schwarz over b1^k D = (b1^k / b2^(k/2)) (b2^(k/2) D):

        |m| <= (1 - b1) sqrt(sum_{k<t} q^k) sqrt(sum_{k<t} b2^k D_{t-k}^2)
             = (1 - b1) sqrt(sum_{k<t} q^k) sqrt(v / (1 - b2)),

    so |m| / (sqrt(v) + tau) < c = (1 - b1) sqrt(sum_{k<t} q^k / (1 - b2)), whatever L, and the norm over n numbers is
    at most eta c sqrt(n). All of them grow with t, which is at most the plan's number of rounds.

    Args:
        plan: of the run.
        elements: n, how many numbers the run trains.
    """
    optimiser, rounds = plan.server_optimiser, plan.rounds
    length = aggregate_bound(plan)
    rate = optimiser.learning_rate * ROUNDING
    match optimiser.name:
        case "momentum":
            return StepBound(length * rate * _powers(optimiser.momentum, rounds))
        case "nesterov":
            return StepBound(length * rate * _powers(optimiser.momentum, rounds + 1))
        case "adam":
            b1, b2 = optimiser.beta1, optimiser.beta2
            powers = 1.0 if b1 == 0 else _powers(b1 * b1 / b2, rounds) if b2 > 0 else math.inf
            each = (1 - b1) * math.sqrt(powers / (1 - b2))
            return StepBound(length * rate * (1 - b1**rounds) / optimiser.tau, rate * each * math.sqrt(elements))
    return StepBound(length * ROUNDING) if length > 1 else StepBound()


def aggregate_bound(plan: Plan) -> float:
    """Return how long D is at most, for each unit of the longest update: 1 for a mean.

    Median of N: for each number, floor(N/2) + 1 updates add up to as many squares of it at least, those on its side of
    0 that are no smaller; of an even N it is m = (a + b)/2 with a <= b, and N/2 b^2 + a^2 >= (N/2 + 1) m^2. So
    (floor(N/2) + 1) ||D||^2 <= sum_n ||D_n||^2 <= N l^2. Trimmed mean: what is left has squares of (N - 2t) m^2 at
    least, and the t on the far side of it are no smaller than m, so (N - t) ||D||^2 <= N l^2. Both are below 2^(1/2).
    Weights of `silo_weights: silos` add up to mean(steps) mean(1/steps), at most (f + s)^2 / (4 f s) where the fewest
    steps are f and the most s (Kantorovich), which is 81/32 where a silo takes one in 8. N is from the quorum up.
    """
    if plan.aggregate == "median":
        return math.sqrt(max(count / (count // 2 + 1) for count in range(plan.quorum, len(plan.silos) + 1)))
    if plan.aggregate == "trimmed_mean":
        return math.sqrt(plan.quorum / (plan.quorum - plan.trim))
    steps = [plan.steps_of(silo) for silo in plan.silos]
    if plan.silo_weights == "steps" or len(set(steps)) == 1:
        return 1.0
    return (min(steps) + max(steps)) ** 2 / (4 * min(steps) * max(steps))


def shift_bound(aggregate: str, scale: float, rank: int, longest: float) -> float:
    """Return how far a round moves the base's shift at most (L2), where no update (dA, dB) is longer than `longest`.

    FedEx: a round adds s mean(b_n a_n) of what is apart from the mean, and |b| |a| is at most half the square. FLoRA:
    it adds s mean(dB_n (A + dA_n)), and A as drawn is no longer than twice the root of a third of its rank.
    """
    if aggregate == "fedex":
        return scale * longest**2 / 2
    return scale * longest * (2 * math.sqrt(rank / 3) + longest)


def _powers(q: float, count: int) -> float:
    """sum of q^k for k < count."""
    if q == 1:
        return float(count)
    try:
        return (1 - q**count) / (1 - q)
    except OverflowError:
        return math.inf

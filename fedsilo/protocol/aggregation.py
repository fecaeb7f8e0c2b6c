"""How a round's updates become its result: arithmetic on numpy arrays, as data of a method. Pure.

    element by element   master [n], updates [n] each, kept state [n] each  ->  next master [n], next state [n] each
    tensor by tensor     master, updates, by name                           ->  result, by name

The coordinator calls the first on tiles, each of which may hold parts of several tensors, so that no update is in
memory as a whole. The second is for what needs a tensor as a whole, such as a distance between updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fedsilo.protocol.codec import Array
from fedsilo.protocol.factors import (
    mean_delta,
    median_delta,
    trimmed_mean_delta,
    update_weights,
    weighted_delta,
)
from fedsilo.protocol.plan import SHIFTING, Plan
from fedsilo.protocol.products import shifted

Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class ElementWise:
    """Attributes:
    combine: (master tile, tiles of the updates in silo order, tiles of the state) -> the new master tile and those of
        the new state, all [n] float32, in memory that it does not touch again.
    state: how many numbers are kept beside each number of the master, from round to round of a run; at first all 0.
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
    average = average_of(plan, silos)

    def combine(master: Array, deltas: Sequence[Array], _state: Sequence[Array]) -> tuple[Array, ...]:
        return (master + average(deltas),)

    return ElementWise(combine)


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

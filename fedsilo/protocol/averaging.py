"""The adapter every silo starts from, and how uploads become the next one, as arithmetic on one tile: the coordinator
carries that out tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsilo.protocol.codec import Array
from fedsilo.protocol.freezing import frozen_sha256, is_frozen
from fedsilo.protocol.randomness import generator, seed_of


def initial_factors(shapes: Sequence[tuple[str, tuple[int, ...]]], seed: int) -> dict[str, Array]:
    """A as torch's linear layers draw it (uniform, bound 1/sqrt(inputs)), B zero, by wire name, float32.

    Each tensor has its own key, so the draw does not depend on their order.
    """
    tensors: dict[str, Array] = {}
    for name, shape in shapes:
        if name.endswith(".lora_A"):
            bound = 1.0 / np.sqrt(shape[1])
            draw = generator(seed_of(seed, "initial_adapter", name))
            tensors[name] = draw.uniform(-bound, bound, size=shape).astype(np.float32)
        else:
            tensors[name] = np.zeros(shape, dtype=np.float32)
    return tensors


def initial_frozen_sha256(shapes: Sequence[tuple[str, tuple[int, ...]]], seed: int, freeze: str) -> str:
    """Digest of the frozen factors among `initial_factors`; empty if none is frozen. Shapes come in name order."""
    frozen = [(name, shape) for name, shape in shapes if is_frozen(name, freeze)]
    return frozen_sha256(((name, initial_factors([(name, shape)], seed)[name]) for name, shape in frozen), freeze)


def update_weights(steps: Sequence[int]) -> tuple[float, ...]:
    """What each silo's update counts so that all silos count the same whatever their steps: (mean of steps) / (own
    steps) / N, FedNova's normalised average with equal shares (Wang et al. 2020, eq. 8). All 1/N where steps are equal.

    A plain mean would minimise another objective, in which a silo counts by its steps. What this does not give: an
    update of few steps is scaled up with its noise.
    """
    mean = sum(steps) / len(steps)
    return tuple(mean / own / len(steps) for own in steps)


def weighted_delta(weights: Sequence[float], master: Array, deltas: Sequence[Array]) -> Array:
    """`mean_delta` with a weight for each silo: A_{p+1} = A_p + sum_n w_n (A^n - A_p), float32, in the order given."""
    total = deltas[0].astype(np.float32) * np.float32(weights[0])
    for weight, delta in zip(weights[1:], deltas[1:], strict=True):
        total += delta.astype(np.float32) * np.float32(weight)
    combined: Array = master + total
    return combined


def median_delta(master: Array, deltas: Sequence[Array]) -> Array:
    """A_{p+1} = A_p + median_n (A^n - A_p) of each number, float32; of an even count the mean of the two in the middle
    (Yin et al. 2018, definition 1). The order of the silos does not count.

    While more than half of the silos are honest, each number of the result lies among theirs (T51). What this does not
    stop: silos that agree on something within the honest spread, which may push every number to its edge; and where
    silos hold unlike data the median drops what only few of them learn. It needs each silo's own update, so it cannot
    go with secure aggregation, which shows none.
    """
    combined: Array = master + np.median(np.stack(deltas).astype(np.float32, copy=False), axis=0).astype(np.float32)
    return combined


def trimmed_mean_delta(trim: int, master: Array, deltas: Sequence[Array]) -> Array:
    """A_{p+1} = A_p + the mean of (A^n - A_p) without the `trim` largest and the `trim` smallest of each number,
    float32, summed from the smallest on (Yin et al. 2018, definition 2). The order of the silos does not count.

    Up to `trim` bad silos do not move a number beyond those of the honest ones (T51). What it does not stop: one more
    than `trim`; and up to that many, what `median_delta` does not stop. Like it, it drops what only few silos learn.

    Args:
        trim: fewer than half of the deltas.
        master: [n] float32.
        deltas: one [n] float32 per silo.
    """
    kept = np.sort(np.stack(deltas).astype(np.float32, copy=False), axis=0)[trim : len(deltas) - trim]
    return mean_delta(master, list(kept))


def mean_delta(master: Array, deltas: Sequence[Array]) -> Array:
    """FedIT on one tile: A_{p+1} = A_p + mean_n (A^n - A_p), float32, in the order given (methods 2.2).

    Args:
        master: [n] float32.
        deltas: one [n] float32 per silo, in silo order; at least one.
    """
    total = deltas[0].astype(np.float32, copy=True)
    for delta in deltas[1:]:
        total += delta
    total /= np.float32(len(deltas))
    combined: Array = master + total
    return combined

"""The adapter every silo starts from, and how uploads become the next one, as arithmetic on one tile: the coordinator
carries that out tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsilo.treaty.freezing import frozen_sha256, is_frozen
from fedsilo.treaty.randomness import generator, seed_of
from fedsilo.treaty.wire.codec import Array


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

"""How uploads become the next adapter, as arithmetic on one tile. The coordinator carries it out tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsilo.treaty.wire.codec import Array


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

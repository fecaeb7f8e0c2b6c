"""How far silos drifted apart in a round, and what averaging the factors apart costs (methods 2.8). Pure.

All of it comes from Gram matrices of r x r numbers, so B A, which is as large as the base, is never formed. Sums are
float64: what is wanted are differences a thousandth as large as what is subtracted.

Axes: r rank, d inputs, m outputs, N silos. Does not say why silos differ: data, sampling and length of training all do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsilo.treaty.wire.codec import Array

Pair = tuple[Array, Array]  # (A [r, d], B [m, r]) of one module


@dataclass(frozen=True)
class Drift:
    """Over all modules. The matrices are [N, N], symmetric, 0 on the diagonal, in the order of the silos.

    Attributes:
        factors: sqrt(||A_n - A_n'||^2 + ||B_n - B_n'||^2).
        products: ||s (B_n A_n - B_n' A_n')||_F.
        aggregation_error: ||mean(B A) - mean(B) mean(A)||_F / ||mean(B A)||_F; 0 where the mean is 0.
    """

    factors: NDArray[np.float64]
    products: NDArray[np.float64]
    aggregation_error: float


class DriftSums:
    """Takes one module after the other, so that no more than one is in memory.

    Args:
        silos: how many.
        scale: s = alpha / r.
    """

    def __init__(self, silos: int, scale: float) -> None:
        self._scale = scale
        self._factors = np.zeros((silos, silos))
        self._products = np.zeros((silos, silos))
        self._error = self._mean = 0.0

    def add(self, pairs: Sequence[Pair]) -> None:
        """One module's factors, of every silo in order. Raises ValueError: not as many as there are silos."""
        if len(pairs) != len(self._factors):
            raise ValueError(f"{len(pairs)} silos' factors, {len(self._factors)} silos")
        wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
        mean_a, mean_b = (np.mean(each, axis=0) for each in zip(*wide, strict=True))
        count = len(wide)
        for one in range(count):
            for other in range(one):
                (a, b), (a2, b2) = wide[one], wide[other]
                apart_a, apart_b = a - a2, b - b2
                # B A - B' A' = B (A - A') + (B - B') A': nothing large is subtracted
                square = _norm_square([(apart_a, b), (a2, apart_b)])
                for place in ((one, other), (other, one)):
                    self._factors[place] += float(np.sum(apart_a**2) + np.sum(apart_b**2))
                    self._products[place] += square
        # mean(B A) - mean(B) mean(A) is the mean of (B - mean B)(A - mean A)
        self._error += _norm_square([(a - mean_a, b - mean_b) for a, b in wide]) / count**2
        self._mean += _norm_square(wide) / count**2

    def drift(self) -> Drift:
        return Drift(
            factors=np.sqrt(self._factors),
            products=self._scale * np.sqrt(self._products),
            aggregation_error=math.sqrt(self._error / self._mean) if self._mean else 0.0,
        )


def _norm_square(terms: Sequence[Pair]) -> float:
    """||sum_k B_k A_k||_F^2 = sum_kl <B_k' B_l, A_k A_l'>, from r x r matrices."""
    total = 0.0
    for a, b in terms:
        for a2, b2 in terms:
            total += float(np.sum((b.T @ b2) * (a @ a2.T)))
    return max(total, 0.0)  # rounding of what is zero

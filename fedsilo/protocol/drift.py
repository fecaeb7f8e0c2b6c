"""How far silos drifted apart in a round, and what averaging the factors apart costs (methods 2.8). Pure.

All of it comes from Gram matrices of the factors, so B A, which is as large as the base, is never formed: one matrix
product for all A of a module, one for all B. Each factor is taken as the silos' mean and what is apart from it:

    D_n = B_n A_n - M_B M_A = B_n a_n + b_n M_A,   a_n = A_n - M_A,   b_n = B_n - M_B,
    ||B_n A_n - B_n' A_n'||^2 = <D_n, D_n> + <D_n', D_n'> - 2 <D_n, D_n'>,

so that nothing large is subtracted. Matrix products are made in the changes' own dtype, which for float32 takes half
the time; sums over them are float64. In float32 a distance is right to 1e-5 of itself or 1e-3 of the largest one: that
of two silos which nearly agree comes from the difference of larger numbers.

Axes: r rank, d inputs, m outputs, N silos. Does not say why silos differ: data, sampling and length of training all do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsilo.protocol.codec import Array

Pair = tuple[Array, Array]  # (A [r, d], B [m, r]) of one module
Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """Over all modules. The matrices are [N, N], symmetric, 0 on the diagonal, in the order of the silos.

    Attributes:
        factors: sqrt(||A_n - A_n'||^2 + ||B_n - B_n'||^2).
        products: ||s (B_n A_n - B_n' A_n')||_F.
        aggregation_error: ||mean(B A) - mean(B) mean(A)||_F / ||mean(B A)||_F; 0 where the mean is 0.
    """

    factors: Sums
    products: Sums
    aggregation_error: float


class DriftSums:
    """Takes one module after the other, so that no more than one is in memory.

    Args:
        silos: how many.
        scale: s = alpha / r.
    """

    def __init__(self, silos: int, scale: float) -> None:
        self._silos = silos
        self._scale = scale
        self._factors = np.zeros((silos, silos))  # <.,.> of what is apart from the mean
        self._products = np.zeros((silos, silos))
        self._error = self._mean = 0.0

    def add(self, master: Pair, changes: Sequence[Pair]) -> None:
        """One module.

        Args:
            master: the factors that all silos began with.
            changes: what each silo added to them, in order, float32 or float64.

        Raises:
            ValueError: not as many as there are silos.
        """
        if len(changes) != self._silos:
            raise ValueError(f"{len(changes)} silos' factors, {self._silos} silos")
        count = self._silos
        # [N r, d] and [N r, m]: rank is the inner one of two axes, so the silos' blocks are r x r
        a, mean_a = _around_mean(master[0], np.stack([a for a, _ in changes]))
        b, mean_b = _around_mean(master[1].T, np.stack([b.T for _, b in changes]))
        blocks = (count, len(mean_a), count, len(mean_a))
        aa, bb = _inner(a, a).reshape(blocks), _inner(b, b).reshape(blocks)
        # with the mean in the place of the second silo, and of the first
        am, bm = (_inner(each, mean).reshape(*blocks[:2], 1, -1) for each, mean in ((a, mean_a), (b, mean_b)))
        ma, mb = am.transpose(2, 3, 0, 1), bm.transpose(2, 3, 0, 1)
        mma, mmb = (_inner(mean, mean).reshape(1, blocks[1], 1, -1) for mean in (mean_a, mean_b))
        self._factors += np.einsum("ikjk->ij", aa) + np.einsum("ikjk->ij", bb)
        # <B_n a_n + b_n M_A, B_n' a_n' + b_n' M_A> with B_n = b_n + M_B, term by term of the B's
        inner = bb * (aa + am + ma + mma) + bm * (aa + ma) + mb * (aa + am) + mmb * aa
        self._products += inner.sum(axis=(1, 3))
        # mean(B A) - mean(B) mean(A) is the mean of b_n a_n
        error = float(np.vdot(aa, bb)) / count**2
        self._error += error
        self._mean += float(np.vdot(mma, mmb) + 2 * np.vdot(am, bm) / count) + error

    def drift(self) -> Drift:
        return Drift(
            factors=_apart(self._factors),
            products=self._scale * _apart(self._products),
            aggregation_error=math.sqrt(max(self._error, 0.0) / self._mean) if self._mean > 0 else 0.0,
        )


def _around_mean(master: Array, changes: Array) -> Pair:
    """Changes [N, r, x] as [N r, x] around their mean, in place; and the mean of what they make of the master."""
    mean = changes.mean(axis=0)
    changes -= mean
    return changes.reshape(-1, changes.shape[2]), master + mean


def _inner(one: Array, other: Array) -> Sums:
    return (one @ other.T).astype(np.float64)


def _apart(inner: Sums) -> Sums:
    """Distances from inner products."""
    squares = np.diagonal(inner)
    # rounding of what is zero may be below it
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares[None, :] - inner - inner.T, 0.0)))

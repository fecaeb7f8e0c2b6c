"""Products of LoRA factors, B A, which are as large as the base: added, averaged and measured without being formed, and
factored afresh. numpy, float64 inside. Pure.

The mean of products is not the product of means, so averaging A and B apart (FedIT) is off by

    E = mean_n(B_n A_n) - mean(B) mean(A) = mean_n((B_n - mean B)(A_n - mean A)),

of rank at most r (N - 1) (FedEx-LoRA, Singhal et al. 2024, eq. 6). The mean itself is one product of stacked factors,
[B_1 ... B_N] / N times A_1 over ... over A_N, of rank at most N r (FLoRA, Wang et al. 2024, eq. 5). Stacked factors
hand each silo every other silo's own update (T58). What comes down is therefore a `fresh` factorisation, which the
product alone determines:

    B A = U S V^T,   B' = U S^(1/2),   A' = S^(1/2) V^T,

singular values from the largest to the smallest, and in each column of B' the number of the largest size positive.
Directions whose singular value is below `DROPPED` of the largest are left out: nothing is in them but the rounding of
the silos' own factors. B' and A' are the same bits for any two stacks of one product, except

- where two singular values lie together: any basis of their common space is as good, and rounding chooses;
- where two numbers of a column are of the largest size: rounding chooses which one is positive;
- where a float64 lies within its own rounding of the edge between two float32: one bit in some ten million numbers.

What this does not hide: the mean itself, from which either of two silos can subtract its own part (T58 asks for more).
Axes: r rank, d inputs, m outputs, k any rank, N silos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsilo.protocol.codec import Array
from fedsilo.protocol.factors import Pair

# Of float32 factors the product is right to 2^-24; of float64 ones, as they are worked with here, to 2^-50 or so.
DROPPED = 2.0**-30
ROUNDING = 2.0**-24  # of one operation in float32

Wide = NDArray[np.float64]


def stacked(pairs: Sequence[Pair]) -> Pair:
    """The sum of products B A as one product: every A below the one before it, every B beside it, float64.

    Args:
        pairs: (A [k, d], B [m, k]) each, of any k; at least one.
    """
    a = np.concatenate([np.asarray(a, np.float64) for a, _ in pairs], axis=0)
    b = np.concatenate([np.asarray(b, np.float64) for _, b in pairs], axis=1)
    return a, b


def mean_product(pairs: Sequence[Pair]) -> Pair:
    """mean_n(B_n A_n) as one product, of rank at most the sum of ranks. Only one side is weighted: weights on both
    would be squared."""
    a, b = stacked(pairs)
    return a, b / len(pairs)


def residual_product(pairs: Sequence[Pair]) -> Pair:
    """mean_n(B_n A_n) - mean(B) mean(A) as one product, of rank at most r (N - 1); nothing large is subtracted."""
    mean_a = sum(np.asarray(a, np.float64) for a, _ in pairs) / len(pairs)
    mean_b = sum(np.asarray(b, np.float64) for _, b in pairs) / len(pairs)
    return mean_product([(a - mean_a, b - mean_b) for a, b in pairs])


def fresh(product: Pair, rank: int) -> Pair:
    """The factors of a product in the form of this module, float32, filled up to `rank` with zeros.

    Args:
        product: (A [k, d], B [m, k]).
        rank: of what is returned, (A' [rank, d], B' [m, rank]).

    Raises:
        ValueError: the product has a higher rank, or a value is not finite.
    """
    a, b = (np.asarray(each, np.float64) for each in product)
    out_a, out_b = np.zeros((rank, a.shape[1]), np.float32), np.zeros((b.shape[0], rank), np.float32)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("a factor is not finite")
    left, core_b = np.linalg.qr(b)  # [m, i], [i, k]
    right, core_a = np.linalg.qr(a.T)  # [d, j], [j, k]
    u, s, vt = np.linalg.svd(core_b @ core_a.T)
    found = int(np.count_nonzero(s > DROPPED * s[0])) if s.size else 0
    if found > rank:
        raise ValueError(f"a product of rank {found} does not fit rank {rank}")
    root = np.sqrt(s[:found])
    columns, rows = (left @ u[:, :found]) * root, root[:, None] * (vt[:found] @ right.T)
    largest = np.abs(columns).argmax(axis=0) if found else np.zeros(0, np.intp)
    signs = np.where(columns[largest, np.arange(found)] < 0, -1.0, 1.0)
    out_b[:, :found], out_a[:found] = columns * signs, rows * signs[:, None]
    return out_a, out_b


def l2_of(product: Pair) -> float:
    """||B A||_F = ||R_B R_A^T||_F, of the triangles of B = Q_B R_B and A^T = Q_A R_A. Right to 2^-50 or so of
    `size_of`. Gram matrices would be right to the root of that alone, and hide what a sender of factors wants."""
    a, b = (np.asarray(each, np.float64) for each in product)
    r_b, r_a = (np.asarray(np.linalg.qr(each, mode="r")) for each in (b, a.T))
    return float(np.linalg.norm(r_b @ r_a.T))


def size_of(product: Pair) -> float:
    """sum_k |B_k| |A_k| over the columns of B and the rows of A: no less than || |B| |A| ||_F, on which all rounding of
    B A depends, and than the sum of the singular values of B A.

    Of a fresh factorisation it is that sum, since |B'_k| = |A'_k| = s_k^(1/2), and so at most k^(1/2) ||B A||_F."""
    a, b = (np.asarray(each, np.float64) for each in product)
    return float(np.linalg.norm(b, axis=0) @ np.linalg.norm(a, axis=1))


def l2_most(product: Pair) -> float:
    """||B A||_F at most, and no less than rounding makes of it where the product is formed in float32: by k 2^-24 of
    `size_of`, the worst case of sums of k terms (Higham 2002, eq. 3.13).

    Factors may be long and their product 0: large terms cancel, and what is left of them is rounding. With the size in
    the figure, whatever is within a limit has a product within it, exactly and in float32. A fresh factorisation
    gains k^(3/2) 2^-24 of its length, 3e-5 at rank 64."""
    return l2_of(product) + len(product[0]) * ROUNDING * size_of(product)


def l2_between(product: Pair, other: Pair) -> float:
    """||B A - B' A'||_F at most: what float64 rounds off is added, 2^-24 of both sizes, as the bound of Householder's
    method has it (Higham 2002, theorem 19.4) where a side times k is below 2^28."""
    a, b = other
    both = stacked([product, (a, -np.asarray(b, np.float64))])
    return l2_of(both) + ROUNDING * size_of(both)


def shifted(aggregate: str, master: Mapping[str, Array], updates: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The next adapter, whose factors and shift together are what the mean of the silos' products makes of this one:
    s (shift + B A) grows by s (mean(B_n A_n) - B A), to the rounding of float32.

    fedex: A and B become their means, and the shift takes what these leave over. flora: A and B stay what the run began
    with (A drawn, B 0), so that each round trains afresh, and the shift takes the whole mean.

    Args:
        aggregate: fedex | flora.
        master: the adapter that the round began with, by wire name, shift and all.
        updates: what each silo added to A and B, in silo order.

    Raises:
        ValueError: the shift's rank is not enough.
    """
    result: dict[str, Array] = {}
    for module in sorted(name.removesuffix(".shift_A") for name in master if name.endswith(".shift_A")):
        a, b, shift_a, shift_b = (f"{module}.{side}" for side in ("lora_A", "lora_B", "shift_A", "shift_B"))
        start = (master[a], master[b])
        pairs = [
            (start[0].astype(np.float64) + update[a], start[1].astype(np.float64) + update[b]) for update in updates
        ]
        before = (master[shift_a], master[shift_b])
        if aggregate == "fedex":
            # what float32 rounds off the means is left where it is: it would be of full rank
            means = np.mean([a for a, _ in pairs], axis=0), np.mean([b for _, b in pairs], axis=0)
            result[a], result[b] = (each.astype(np.float32) for each in means)
            further = residual_product(pairs)
        else:
            result[a], result[b] = start
            further = stacked([mean_product(pairs), (start[0], -start[1])])
        result[shift_a], result[shift_b] = fresh(stacked([before, further]), len(before[0]))
    return result

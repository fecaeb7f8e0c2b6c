"""How rows of one pool are divided over silos (methods 1.5). Pure: labels and a generator in, row numbers out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsilo.protocol.errors import UsageError


def split_dirichlet_equal_size(
    labels: Sequence[str], *, silos: int, rows_per_silo: int, alpha: float, generator: np.random.Generator
) -> list[list[int]]:
    """The equal-size Dirichlet split of Acar et al., as PubSwap uses it (methods 1.5).

    One class distribution q_n ~ Dir(alpha) per silo; while places remain, a silo not yet full is picked uniformly,
    a class is drawn from its q_n, and it gets one unused row of that class. Where a class has run out, q_n is
    renormalised over the others, and is uniform over them when nothing of its mass is left.

    Args:
        labels: the class of each row of the pool.
        silos: number of parts.
        rows_per_silo: size of every part.
        alpha: concentration; small values give each silo few classes.
        generator: source of every draw.

    Returns:
        for each silo its row numbers, in ascending order; no row stands twice.

    Raises:
        UsageError: the pool holds fewer rows than the parts need, or a number is not positive.
    """
    if silos < 1 or rows_per_silo < 1 or not alpha > 0:
        raise UsageError(f"cannot split over {silos} silos of {rows_per_silo} rows with alpha {alpha}")
    if len(labels) < silos * rows_per_silo:
        raise UsageError(f"{silos} silos of {rows_per_silo} rows need {silos * rows_per_silo}; there are {len(labels)}")
    classes = sorted(set(labels))
    unused: list[list[int]] = [[] for _ in classes]
    for row in generator.permutation(len(labels)):
        unused[classes.index(labels[int(row)])].append(int(row))
    preference = generator.dirichlet(np.full(len(classes), alpha), size=silos)
    parts: list[list[int]] = [[] for _ in range(silos)]
    open_silos = list(range(silos))
    while open_silos:
        silo = open_silos[int(generator.integers(len(open_silos)))]
        remaining = np.array([len(rows) > 0 for rows in unused])
        chosen = int(generator.choice(len(classes), p=_over_non_empty(preference[silo], remaining)))
        parts[silo].append(unused[chosen].pop())
        if len(parts[silo]) == rows_per_silo:
            open_silos.remove(silo)
    return [sorted(part) for part in parts]


def _over_non_empty(preference: npt.NDArray[np.float64], remaining: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    weights = np.where(remaining, preference, 0.0)
    mass = float(weights.sum())
    if mass < 1e-12:
        weights, mass = remaining.astype(np.float64), float(remaining.sum())
    return np.asarray(weights / mass, dtype=np.float64)


def mean_total_variation(labels: Sequence[str], parts: Sequence[Sequence[int]]) -> float:
    """Mean over silos of the total variation between the silo's label histogram and that of all silos together."""
    classes = sorted(set(labels))
    histograms = np.array([[sum(labels[row] == name for row in part) for name in classes] for part in parts], float)
    pooled = histograms.sum(axis=0) / histograms.sum()
    shares = histograms / histograms.sum(axis=1, keepdims=True)
    return float(np.abs(shares - pooled).sum(axis=1).mean() / 2)

"""The equal-size Dirichlet split against measured figures: 7 classes, 4 silos x 400 of 2,000, ten seeds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedsilo.demo.data import mean_total_variation, split_dirichlet_equal_size
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.randomness import generator, seed_of

LABELS = [f"class_{row % 7}" for row in range(2000)]


def split(seed: int, alpha: float, *, silos: int = 4, rows: int = 400, labels: list[str] = LABELS) -> list[list[int]]:
    draws = generator(seed_of(seed, "test-split"))
    return split_dirichlet_equal_size(labels, silos=silos, rows_per_silo=rows, alpha=alpha, generator=draws)


def slow_total_variation(labels: list[str], parts: list[list[int]]) -> float:
    """Straight from the definition: half the sum of absolute differences of two histograms."""
    pooled = Counter(labels[row] for part in parts for row in part)
    total = sum(pooled.values())
    distances = []
    for part in parts:
        own = Counter(labels[row] for row in part)
        distances.append(0.5 * sum(abs(own[name] / len(part) - pooled[name] / total) for name in pooled))
    return sum(distances) / len(distances)


def mean_over_seeds(alpha: float) -> float:
    return float(np.mean([slow_total_variation(LABELS, split(seed, alpha)) for seed in range(10)]))


@pytest.mark.slow
def test_the_heterogeneity_is_that_of_the_paper() -> None:
    independent = mean_over_seeds(1e4)
    strong = mean_over_seeds(0.1)
    assert strong > 0.35
    assert strong > 5 * independent
    assert mean_over_seeds(0.3) == pytest.approx(0.42, abs=0.06)
    assert mean_over_seeds(1.0) == pytest.approx(0.28, abs=0.06)
    assert independent == pytest.approx(0.04, abs=0.02)


def test_total_variation_agrees_with_its_definition() -> None:
    parts = split(3, 0.3)
    assert mean_total_variation(LABELS, parts) == pytest.approx(slow_total_variation(LABELS, parts))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 1e4])
def test_parts_are_equal_disjoint_and_repeatable(alpha: float) -> None:
    parts = split(5, alpha)
    rows = [row for part in parts for row in part]
    assert [len(part) for part in parts] == [400] * 4
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(len(LABELS)))
    assert split(5, alpha) == parts
    assert split(6, alpha) != parts


def test_a_pool_that_is_used_up_completely_still_ends() -> None:
    parts = split(1, 0.01, silos=4, rows=500)
    assert sorted(row for part in parts for row in part) == list(range(2000))


def test_one_silo_takes_rows_and_too_many_rows_are_refused() -> None:
    assert len(split(1, 0.1, silos=1, rows=10)[0]) == 10
    with pytest.raises(UsageError, match="2004"):
        split(1, 0.1, silos=4, rows=501)

"""Drift between silos and the error of averaging factors, against the products written out."""

from __future__ import annotations

import numpy as np
import pytest

from fedsilo.protocol.factors import Drift, DriftSums, Pair

SHAPES = ((3, 7, 5), (3, 4, 9))  # rank, inputs, outputs


def modules(silos: int, spread: float, seed: int = 0) -> list[list[Pair]]:
    """By module, then by silo: a common adapter and what each silo made of it."""
    draws = np.random.default_rng(seed)
    found = []
    for rank, inputs, outputs in SHAPES:
        common = draws.normal(size=(rank, inputs)), draws.normal(size=(outputs, rank))
        found.append(
            [
                tuple((each + spread * draws.normal(size=each.shape)).astype(np.float32) for each in common)
                for _ in range(silos)
            ]
        )
    return found  # type: ignore[return-value]


def drift_of(given: list[list[Pair]], scale: float = 2.0, dtype: type = np.float64) -> Drift:
    """Of silos that each began with 1 in every number."""
    sums = DriftSums(len(given[0]), scale)
    for pairs in given:
        ones: Pair = np.ones(pairs[0][0].shape, dtype), np.ones(pairs[0][1].shape, dtype)
        sums.add(ones, [(a.astype(dtype) - ones[0], b.astype(dtype) - ones[1]) for a, b in pairs])
    return sums.drift()


# float32 has 7 digits, of which a spread of a thousandth leaves 4: the factors themselves are no more exact
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-3)])
@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_figures_equal_the_products_written_out(spread: float, dtype: type, tolerance: float) -> None:
    given = modules(4, spread)
    drift = drift_of(given, dtype=dtype)
    wide = [[(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs] for pairs in given]
    for one in range(4):
        for other in range(4):
            factors = products = 0.0
            for pairs in wide:
                (a, b), (a2, b2) = pairs[one], pairs[other]
                factors += ((a - a2) ** 2).sum() + ((b - b2) ** 2).sum()
                products += (4.0 * (b @ a - b2 @ a2) ** 2).sum()
            assert drift.factors[one, other] == pytest.approx(factors**0.5, rel=tolerance)
            assert drift.products[one, other] == pytest.approx(products**0.5, rel=tolerance)
    apart = whole = 0.0
    for pairs in wide:
        mean_product = np.mean([b @ a for a, b in pairs], axis=0)
        product_of_means = np.mean([b for _, b in pairs], axis=0) @ np.mean([a for a, _ in pairs], axis=0)
        apart += ((mean_product - product_of_means) ** 2).sum()
        whole += (mean_product**2).sum()
    assert drift.aggregation_error == pytest.approx((apart / whole) ** 0.5, rel=max(1e-6, tolerance))


def test_fedit_of_opposite_scalars_loses_all() -> None:
    """(1, 1) and (-1, -1): both products are 1, the mean factors are 0."""
    one = np.ones((1, 1), np.float32)
    drift = drift_of([[(one, one), (-one, -one)]], scale=1.0)
    assert drift.aggregation_error == 1.0
    assert drift.products[0, 1] == 0.0
    assert drift.factors[0, 1] == pytest.approx(8**0.5)


def test_with_a_common_a_nothing_is_lost() -> None:
    pairs = [(modules(1, 0.0)[0][0][0], pair[1]) for pair in modules(3, 1.0)[0]]
    assert drift_of([pairs]).aggregation_error == pytest.approx(0.0, abs=1e-12)


def test_one_silo_has_no_drift_and_a_zero_adapter_no_error() -> None:
    drift = drift_of(modules(1, 1.0))
    assert drift.factors.tolist() == drift.products.tolist() == [[0.0]]
    assert drift.aggregation_error == pytest.approx(0.0, abs=1e-12)
    zero = [[(a, np.zeros_like(b)) for a, b in pairs] for pairs in modules(2, 1.0)]
    assert drift_of(zero).aggregation_error == 0.0


def test_a_silo_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="silos"):
        two = modules(2, 1.0)[0]
        DriftSums(3, 1.0).add(two[0], two)

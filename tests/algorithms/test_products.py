"""Products of factors against the matrices written out, and what a fresh factorisation tells (T58)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fedsilo.protocol.factors import DriftSums, Pair
from fedsilo.protocol.products import (
    fresh,
    l2_between,
    l2_most,
    l2_of,
    mean_product,
    residual_product,
    size_of,
    stacked,
)

RANK, INPUTS, OUTPUTS = 3, 20, 17


def silos(count: int, seed: int = 0, rank: int = RANK) -> list[Pair]:
    draws = np.random.default_rng(seed)
    return [
        (
            draws.normal(size=(rank, INPUTS)).astype(np.float32),
            draws.normal(size=(OUTPUTS, rank)).astype(np.float32),
        )
        for _ in range(count)
    ]


def dense(pair: Pair) -> np.ndarray:
    return pair[1].astype(np.float64) @ pair[0].astype(np.float64)


def dense_mean(pairs: list[Pair]) -> np.ndarray:
    return np.mean([dense(each) for each in pairs], axis=0)


def dense_residual(pairs: list[Pair]) -> np.ndarray:
    return dense_mean(pairs) - np.mean([b for _, b in pairs], axis=0, dtype=np.float64) @ np.mean(
        [a for a, _ in pairs], axis=0, dtype=np.float64
    )


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_mean_of_products_is_exact_in_float32_and_of_no_higher_rank_than_all_together(count: int) -> None:
    pairs = silos(count)
    a, b = fresh(mean_product(pairs), RANK * count)
    assert a.dtype == b.dtype == np.float32
    assert apart(dense((a, b)), dense_mean(pairs)) < 1e-6
    assert np.linalg.matrix_rank(dense_mean(pairs)) == RANK * count


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_residual_is_exact_in_float32_and_has_one_silos_rank_less(count: int) -> None:
    pairs = silos(count, seed=1)
    a, b = fresh(residual_product(pairs), RANK * (count - 1))
    assert apart(dense((a, b)), dense_residual(pairs)) < 1e-6
    with pytest.raises(ValueError, match="rank"):
        fresh(residual_product(pairs), RANK * (count - 1) - 1)
    # and it is what FedIT's mean of factors is off by
    sums = DriftSums(count, 1.0)
    zero = np.zeros((RANK, INPUTS)), np.zeros((OUTPUTS, RANK))
    sums.add(zero, [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs])
    error = sums.drift().aggregation_error
    assert 0 < error == pytest.approx(l2_of((a, b)) / np.linalg.norm(dense_mean(pairs)), rel=1e-6)


def test_with_one_a_or_one_b_nothing_is_left_over() -> None:
    pairs = silos(4)
    for shared in ([(pairs[0][0], b) for _, b in pairs], [(a, pairs[0][1]) for a, _ in pairs]):
        assert np.linalg.norm(dense_residual(shared)) < 1e-6
        assert l2_of(residual_product(shared)) == pytest.approx(0.0, abs=1e-6)
    a, b = fresh(residual_product([pairs[0]] * 3), 2)
    assert not a.any() and not b.any()


def test_ranks_may_differ_and_more_of_them_than_a_side_has_are_none() -> None:
    pairs = [silos(1, seed, rank)[0] for seed, rank in enumerate((2, 7, 15))]
    a, b = fresh(mean_product(pairs), OUTPUTS)  # 24 in all, of which 17 are left
    assert apart(dense((a, b)), dense_mean(pairs)) < 1e-6


def test_the_form_is_ordered_by_size_with_equal_halves_and_signs_fixed() -> None:
    a, b = fresh(mean_product(silos(3)), 12)
    sizes = np.linalg.svd(dense_mean(silos(3)), compute_uv=False)[:9]
    np.testing.assert_allclose((b[:, :9] ** 2).sum(axis=0), sizes, rtol=1e-5)
    np.testing.assert_allclose((a[:9] ** 2).sum(axis=1), sizes, rtol=1e-5)
    assert not a[9:].any() and not b[:, 9:].any()
    assert all(column[np.abs(column).argmax()] > 0 for column in b.T[:9])


def mixed(pairs: list[Pair], seed: int) -> list[Pair]:
    """Other factors with the same sum of products: [B_1 ... B_N] Q and Q^-1 times the A's, Q of whole numbers and of
    determinant 1, so that nothing is rounded."""
    draws, size = np.random.default_rng(seed), RANK * len(pairs)
    q = inverse = np.eye(size)
    for _ in range(2 * size):
        row, other = draws.choice(size, 2, replace=False)
        step = np.eye(size)
        step[row, other] = draws.choice([-1, 1])
        q, inverse = q @ step, (2 * np.eye(size) - step) @ inverse
    assert np.array_equal(q @ inverse, np.eye(size))
    a, b = stacked(pairs)
    parts = np.split(inverse @ a, len(pairs)), np.split(b @ q, len(pairs), axis=1)
    return [(a.astype(np.float32), b.astype(np.float32)) for a, b in zip(*parts, strict=True)]


def whole_numbers(count: int, seed: int) -> list[Pair]:
    draws = np.random.default_rng(seed)
    return [
        (
            draws.integers(-9, 10, size=(RANK, INPUTS)).astype(np.float32),
            draws.integers(-9, 10, size=(OUTPUTS, RANK)).astype(np.float32),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(10))
def test_T58_silos_with_one_mean_product_give_the_same_bits(seed: int) -> None:
    pairs = whole_numbers(4, seed)
    others = mixed(pairs, seed + 100)
    assert np.array_equal(dense_mean(pairs), dense_mean(others))
    assert not np.array_equal(pairs[0][0], others[0][0])
    assert same(fresh(mean_product(pairs), 12), fresh(mean_product(others), 12))
    # stacking does tell them apart: it is the silos' own factors
    assert not same(stacked(pairs), stacked(others))


@pytest.mark.parametrize("seed", range(10))
def test_T58_silos_with_the_same_means_give_the_same_bits_of_the_residual(seed: int) -> None:
    """Around unchanged means of A and of B, in another order and another basis of each silo's own rank."""
    draws = np.random.default_rng(seed)
    (mean_a, mean_b), *changes = whole_numbers(4, seed)
    changes.append((-sum(a for a, _ in changes), -sum(b for _, b in changes)))
    lower = np.tril(draws.integers(-2, 3, size=(RANK, RANK)), -1) + np.eye(RANK)
    inverse = np.round(np.linalg.inv(lower))
    one = [(mean_a + a, mean_b + b) for a, b in changes]
    other = [(mean_a + inverse @ a, mean_b + b @ lower) for a, b in reversed(changes)]
    for side in (0, 1):
        assert np.array_equal(sum(each[side] for each in one), sum(each[side] for each in other))
    assert same(fresh(residual_product(one), 9), fresh(residual_product(other), 9))


def same(one: Pair, other: Pair) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(one, other, strict=True))


def test_lengths_are_those_of_the_matrices_written_out() -> None:
    one, other = mean_product(silos(3)), silos(1, seed=5)[0]
    assert l2_of(one) == pytest.approx(np.linalg.norm(one[1] @ one[0]), rel=1e-12)
    assert l2_between(one, other) == pytest.approx(np.linalg.norm(one[1] @ one[0] - dense(other)), rel=1e-6)
    assert l2_between(other, other) == pytest.approx(0.0, abs=1e-6 * l2_of(other))


def test_what_is_not_finite_has_no_factors() -> None:
    a, b = silos(1)[0]
    b[0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        fresh((a, b), RANK)


def exact_l2(*products: Pair) -> Fraction:
    """||sum of B A||_F squared, in whole fractions: no number is rounded."""
    rows, columns = products[0][1].shape[0], products[0][0].shape[1]
    total = Fraction(0)
    for row in range(rows):
        for column in range(columns):
            terms = (
                Fraction(float(b[row, k])) * Fraction(float(a[k, column])) for a, b in products for k in range(len(a))
            )
            total += sum(terms) ** 2
    return total


def cancelling(draws: np.random.Generator) -> Pair:
    """Factors of which all large terms cancel: rows of A in pairs that differ in last bits, columns of B opposite."""
    a, b = np.zeros((4, 5), np.float32), np.zeros((3, 4), np.float32)
    for k in (0, 2):
        a[k] = draws.normal(size=5) * 2.0 ** draws.integers(-20, 40)
        a[k + 1] = a[k] * np.float32(1 + draws.integers(0, 3) * 2.0**-23)
        b[:, k] = draws.normal(size=3) * 2.0 ** draws.integers(-20, 80)
        b[:, k + 1] = -b[:, k]
    return a, b


def test_T20_no_factors_have_a_product_longer_than_what_is_measured() -> None:
    draws = np.random.default_rng(3)
    hidden = 0
    for _ in range(200):
        one, other = cancelling(draws), cancelling(draws)
        assert Fraction(l2_most(one)) ** 2 >= exact_l2(one)
        assert Fraction(l2_between(one, other)) ** 2 >= exact_l2(one, (other[0], -other[1]))
        in_float32 = one[1] @ one[0]
        assert np.linalg.norm(in_float32.astype(np.float64)) <= l2_most(one) * (1 + 1e-12)
        a, b = (each.astype(np.float64) for each in one)
        by_gram = max(0.0, float(np.vdot(a @ a.T, b.T @ b)))
        hidden += Fraction(by_gram) < exact_l2(one) / 4
    assert hidden > 20, "the Gram matrices of these would show less than half of many of them"


def test_T20_the_whole_of_a_product_may_lie_in_the_last_bit_of_a_factor() -> None:
    a, b = np.zeros((2, 6), np.float32), np.zeros((4, 2), np.float32)
    a[:, 0], a[1, 1], b[0] = 2.0**20, 1 + 2.0**-23, (2.0**100, -(2.0**100))
    a[0, 1] = 1
    assert exact_l2((a, b)) == Fraction(2) ** 154
    assert l2_most((a, b)) >= 2.0**77


@pytest.mark.parametrize("rank", [1, 4, 17])
def test_a_fresh_factorisation_is_balanced_and_measured_as_long_as_it_is(rank: int) -> None:
    for seed in range(5):
        made = fresh(silos(1, seed, rank)[0], rank)
        length = float(np.linalg.norm(dense(made)))
        assert size_of(made) == pytest.approx(np.linalg.svd(dense(made), compute_uv=False).sum(), rel=1e-5)
        assert length <= l2_most(made) <= length * (1 + (rank**1.5 + 1) * 2.0**-24)

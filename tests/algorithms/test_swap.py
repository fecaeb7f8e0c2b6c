"""PubSwap's swap rules against hand-made groups and as properties over random counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.protocol.randomness import generator
from fedsilo.protocol.swap import balanced_donors, donors_wanted, random_group, replaced_positions


def answers(counts: tuple[int, ...]) -> dict[str, list[str]]:
    return {f"s{silo}": [f"s{silo}-{n}" for n in range(count)] for silo, count in enumerate(counts)}


@pytest.mark.parametrize(
    ("counts", "replacements"), [((0, 4, 8, 1), (4, 0, 0, 3)), ((0, 0, 0, 1), (1, 1, 1, 0)), ((3,), (0,))]
)
def test_balanced_replacements_by_hand(counts: tuple[int, ...], replacements: tuple[int, ...]) -> None:
    pool = answers(counts)
    drawn = tuple(len(balanced_donors(pool, f"s{n}", 8, generator(n))) for n in range(len(counts)))
    assert drawn == replacements


@pytest.mark.parametrize(("samples", "correct", "wanted"), [(5, 1, 1), (5, 2, 0), (8, 0, 4), (1, 0, 0), (8, 8, 0)])
def test_target_is_half_rounded_down(samples: int, correct: int, wanted: int) -> None:
    assert donors_wanted(correct, samples) == wanted


@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=5), samples=st.integers(8, 12), seed=st.integers(0, 2**32)
)
def test_balanced_invariants(counts: list[int], samples: int, seed: int) -> None:
    pool = answers(tuple(counts))
    for silo, correct in enumerate(counts):
        name = f"s{silo}"
        donors = balanced_donors(pool, name, samples, generator(seed))
        rewards = [1.0] * correct + [0.0] * (samples - correct)
        replaced = replaced_positions(rewards, len(donors), generator(seed))
        assert all(origin != name for origin, _, _ in donors)
        assert all(pool[origin][position] == answer for origin, position, answer in donors)
        assert len({(origin, position) for origin, position, _ in donors}) == len(donors)
        assert len(replaced) == len(donors), "every donor finds a wrong answer to replace"
        assert all(rewards[position] == 0.0 for position in replaced), "own correct answers survive"
        correct_after = correct + len(donors)
        assert correct_after <= max(correct, samples // 2)
        assert len(donors) / samples <= 0.5
        available = sum(counts) - correct
        assert len(donors) == min(available, donors_wanted(correct, samples))


def test_random_group_draws_every_answer_equally_often() -> None:
    pool = answers((4, 4, 4, 4))
    draws = 4000
    seen = Counter(answer for seed in range(draws) for _, _, answer in random_group(pool, 4, generator(seed)))
    # Each of 16 answers is drawn with probability 4/16: binomial standard deviation 27; 5 of them either way.
    assert len(seen) == 16
    assert all(abs(count - draws / 4) < 5 * np.sqrt(draws * 0.25 * 0.75) for count in seen.values())


def test_random_with_one_silo_is_a_permutation_of_its_own() -> None:
    group = random_group(answers((5,)), 5, generator(3))
    assert sorted(position for _, position, _ in group) == [0, 1, 2, 3, 4]

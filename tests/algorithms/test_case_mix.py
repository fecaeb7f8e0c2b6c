"""The case mix that an update shows (N7): by hand, and against a slow count of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.protocol.errors import UsageError
from silo.report.case_mix import compare

TOPICS = ["a", "a", "b", "b", "c", "c", "d", "d"]
BEFORE = [2] * 8


def of(after: list[int], rows: dict[str, int]) -> dict[str, Any]:
    return compare(TOPICS, BEFORE, after, 4, rows)


def test_by_hand() -> None:
    found = of([4, 4, 3, 2, 2, 2, 0, 2], {"a": 60, "b": 30, "d": 10})
    assert [(row["topic"], row["gain"], row["private_rows"], row["private_share"]) for row in found["topics"]] == [
        ("a", 0.5, 60, 0.6), ("b", 0.125, 30, 0.3), ("c", 0.0, 0, 0.0), ("d", -0.25, 10, 0.1),
    ]  # fmt: skip
    assert (found["main_topics"], found["guessed"], found["found"]) == (["a", "b", "d"], ["a", "b", "c"], 2)
    assert found["by_chance"] == 2.25  # three of four, chosen blindly: 3 x 3/4
    # ranks of gain 4 3 2 1 and of rows 4 3 1 2: 1 - 6 x 2 / (4 x 15)
    assert found["rank_correlation"] == pytest.approx(0.8)


def test_an_update_that_gains_where_the_site_has_nothing_shows_nothing() -> None:
    found = of([2, 2, 2, 2, 4, 4, 4, 4], {"a": 60, "b": 40})
    assert (found["found"], found["by_chance"]) == (0, 1.0) and found["rank_correlation"] < 0


def test_an_update_that_changes_nothing_has_no_ranks() -> None:
    assert of(BEFORE, {"a": 1, "b": 2})["rank_correlation"] is None


@pytest.mark.parametrize(
    ("topics", "rows"), [(["a"] * 8, {"a": 5}), ([""] * 8, {"a": 5}), (TOPICS, {"x": 5}), (TOPICS, {})]
)
def test_where_there_are_no_topics_to_tell_apart_that_is_said(topics: list[str], rows: dict[str, int]) -> None:
    with pytest.raises(UsageError) as refused:
        compare(topics, BEFORE, BEFORE, 4, rows)
    assert refused.value.code == "NO_TOPICS"
    compare(TOPICS, BEFORE, BEFORE, 4, {"a": 5})  # the counterpart


@pytest.mark.slow
@given(st.permutations([0, 1, 2, 3]), st.permutations([10, 20, 30, 40]))
def test_rank_correlation_is_that_of_a_slow_count(gains: list[int], rows: list[int]) -> None:
    """Without ties Spearman's is 1 - 6 sum d^2 / (n (n^2 - 1)), with ranks counted one by one."""
    after = [2 + gain - 1 for gain in gains for _ in range(2)]
    found = of(after, dict(zip("abcd", rows, strict=True)))["rank_correlation"]
    ranks = [[sum(other < one for other in values) for one in values] for values in (gains, rows)]
    squares = sum((one - other) ** 2 for one, other in zip(*ranks, strict=True))
    assert found == pytest.approx(1 - 6 * squares / (4 * 15), abs=1e-4)
    assert len(list(itertools.chain(*ranks))) == 8

"""What `benchmarks.learning` makes of two exchanges, against numbers by hand."""

from __future__ import annotations

import pytest

from benchmarks.learning import compared


@pytest.mark.parametrize(
    ("last", "mean", "interval", "equivalent"), [(0.61, 1.0, [1.0, 1.0], True), (0.62, 1.5, [-4.85, 7.85], False)]
)
def test_the_difference_of_two_exchanges_is_paired_by_seed(
    last: float, mean: float, interval: list[float], equivalent: bool
) -> None:
    """Differences of 1 and 1 points, or of 1 and 2: standard error 0.5, Student's t of one degree 12.706."""
    after = [(1, "step", 0.50), (1, "round_end", 0.51), (2, "step", 0.60), (2, "round_end", last)]
    rows = [{"seed": seed, "exchange": exchange, "after": value} for seed, exchange, value in after]
    found = compared(rows, "step", "round_end")
    assert (found["difference_points"], found["interval_95"], found["equivalent"]) == (mean, interval, equivalent)

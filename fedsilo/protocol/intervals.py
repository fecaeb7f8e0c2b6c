"""Intervals of a share that was measured on a few prompts. Pure.

Does not cover: draws that depend on each other. Several answers to one prompt do, so whoever counts prompts, not
answers, gets an interval that is rather too wide than too narrow.
"""

from __future__ import annotations

import math

Z_95 = 1.959964  # of the standard normal distribution, two-sided 95 %


def interval_of(value: float, count: int | None) -> tuple[float | None, float | None]:
    """Return the interval of a share to six digits; of what is none, and without a count, none."""
    if count is None or not 0.0 <= value <= 1.0:
        return None, None
    low, high = wilson_interval(value, count)
    return round(low, 6), round(high, 6)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927, JASA 22:209), within 0 and 1.

    Args:
        share: measured, 0 to 1; it need not be a whole number of `count`.
        count: of independent draws, at least 1.

    Raises:
        ValueError: no draw, or no share.
    """
    if count < 1 or not 0.0 <= share <= 1.0:
        raise ValueError("a share lies between 0 and 1 and is measured on at least one draw")
    spread = Z_95 * Z_95 / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) / count + spread / (4 * count)) * Z_95 / (1 + spread)
    return max(middle - half, 0.0), min(middle + half, 1.0)

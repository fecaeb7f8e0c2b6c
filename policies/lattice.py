"""Order of any two policies, field by field: each field's type says which of two values is the tighter one.

A field is annotated with one of the orders below. From `meet`, the loosest value that is at least as tight as both,
everything else follows: a is tighter than b where meet(a, b) = a. So two policies combine into one that allows only
what both allow (threat T34), and a change of a file can be told tighter, looser or incomparable.

Each meet is commutative, associative and idempotent (X2). Where no value is as tight as both, the block that needs
one is absent, and what is absent is denied.
What this does not stop: a looser policy signed by the people who may loosen it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

ANY = "any"
_LARGEST_STEP = 2**53  # beyond it no grid of doubles is one


class NothingInCommon(ValueError):
    """Error of two limits of which no value is at least as tight as both."""


@dataclass(frozen=True, eq=False)
class Order:
    """The order of one field.

    Attributes:
        meet: (first, second) -> the loosest value as tight as both. Raises NothingInCommon.
        decisive: what of a value decides; by default its meet with itself, which spells it in one way.
    """

    meet: Callable[[Any, Any], Any]
    decisive: Callable[[Any], Any] | None = None

    def same(self, first: Any, second: Any) -> bool:
        """Return whether the two allow the same, however they are spelled."""
        if self.decisive is not None:
            return bool(self.decisive(first) == self.decisive(second))
        return bool(self.meet(first, first) == self.meet(second, second))


def _common(first: Any, second: Any) -> Any:
    return tuple(sorted(set(first) & set(second)))


def _common_or_any(first: Any, second: Any) -> Any:
    if ANY in first and ANY in second:
        return (ANY,)
    if ANY in first or ANY in second:
        return tuple(sorted(set(second if ANY in first else first)))
    return _common(first, second)


def _smallest_stated(first: Any, second: Any) -> Any:
    return min((value for value in (first, second) if value is not None), default=None)


def _overlap(first: Any, second: Any) -> Any:
    low, high = max(first[0], second[0]), min(first[1], second[1])
    if low > high:
        raise NothingInCommon
    return (low, high)


def _same(first: Any, second: Any) -> Any:
    if first != second:
        raise NothingInCommon
    return first


def _common_multiple(first: Any, second: Any) -> Any:
    one, two = Fraction(repr(float(first))), Fraction(repr(float(second)))
    common = Fraction(math.lcm(one.numerator, two.numerator), math.gcd(one.denominator, two.denominator))
    if common > _LARGEST_STEP or Fraction(repr(float(common))) != common:
        raise NothingInCommon  # a step that no double spells: no grid lies in both
    return float(common)


def _content(pin: Any) -> Any:
    return None if pin is None else (pin.sha256, pin.rows)


def _pin(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    _same(_content(first), _content(second))
    return min(first, second, key=lambda pin: (pin.file, pin.licence))


class Demanded:
    """Marks a block that demands something, so that its absence is looser than its presence, not tighter."""


SMALLEST = Order(min)  # a largest allowed number
LARGEST = Order(max)  # a smallest required number
EARLIEST, LATEST = SMALLEST, LARGEST  # UTC times in ISO form, whose order is that of their text
SMALLEST_STATED = Order(
    _smallest_stated
)  # a largest allowed number; where a file does not state it, the other's counts
# Lists whose order means nothing, so that their meet is sorted: of what is allowed, and of what is demanded. In the
# second one the word `any` allows everything.
INTERSECTION = Order(_common)
INTERSECTION_OR_ANY = Order(_common_or_any)
UNION = Order(lambda first, second: tuple(sorted({*first, *second})))
OVERLAP = Order(_overlap)  # a range [from, to] of allowed numbers
BOTH = Order(lambda first, second: first or second)  # a demand: made if one of the two makes it
SAME = Order(_same)  # a name or digest
LABEL = Order(min)  # decides nothing: a name for people, a licence, a file's place
MULTIPLE = Order(_common_multiple)  # the step of a grid, as a decimal: every second point is tighter
PIN = Order(_pin, _content)  # a pinned file that may be absent: then any file will do
# What a demand leaves out, or None, which is the tightest; two different exemptions have none in common.
EXEMPTION = Order(lambda first, second: first if first == second else None)
DEMANDED = Demanded()


def ladder(*words: str) -> Order:
    """Return an order of words, the tightest first."""
    return Order(lambda first, second: min(first, second, key=words.index))


def rhythm(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Approval rounds that contain those of both: (first_rounds, then), in their one spelling.

    Rounds 1..n are held, and every multiple of t, t = 0 for none. Both parts only add rounds, so the meet is the
    longer beginning and the greatest common divisor.
    """
    start, step = max(first[0], second[0]), math.gcd(first[1], second[1])
    while step and start and start % step == 0:
        start -= 1  # a multiple of t is held anyway
    return start, step

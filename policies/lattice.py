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
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

ANY = "any"
_LARGEST_STEP = 2**53  # beyond it no grid of doubles is one


class NothingInCommon(ValueError):
    """Error of two limits of which no value is at least as tight as both."""


class Order(ABC):
    """The order of one field."""

    @abstractmethod
    def meet(self, first: Any, second: Any) -> Any:
        """Return the loosest value as tight as both. Raises NothingInCommon."""

    def same(self, first: Any, second: Any) -> bool:
        """Return whether the two allow the same, however they are spelled."""
        return bool(self.meet(first, first) == self.meet(second, second))


class _Smallest(Order):
    """A largest allowed number."""

    def meet(self, first: Any, second: Any) -> Any:
        return min(first, second)


class _Largest(Order):
    """A smallest required number; for UTC times in ISO form, whose order is that of their text, the later one."""

    def meet(self, first: Any, second: Any) -> Any:
        return max(first, second)


class _Intersection(Order):
    """A list of what is allowed. Its order means nothing, so the meet is sorted."""

    def meet(self, first: Any, second: Any) -> Any:
        return tuple(sorted(set(first) & set(second)))


class _IntersectionOrAny(Order):
    """As `_Intersection`; a list with the word `any` in it allows everything."""

    def meet(self, first: Any, second: Any) -> Any:
        if ANY in first and ANY in second:
            return (ANY,)
        if ANY in first or ANY in second:
            return tuple(sorted(set(second if ANY in first else first)))
        return INTERSECTION.meet(first, second)


class _Union(Order):
    """A list of what is demanded. Its order means nothing, so the meet is sorted."""

    def meet(self, first: Any, second: Any) -> Any:
        return tuple(sorted(set(first) | set(second)))


class _SmallestStated(Order):
    """A largest allowed number that a file may leave unsaid; then the other file's counts."""

    def meet(self, first: Any, second: Any) -> Any:
        stated = [value for value in (first, second) if value is not None]
        return min(stated, default=None)


class _Overlap(Order):
    """A range [from, to] of allowed numbers."""

    def meet(self, first: Any, second: Any) -> Any:
        low, high = max(first[0], second[0]), min(first[1], second[1])
        if low > high:
            raise NothingInCommon
        return (low, high)


class _Both(Order):
    """A demand that is either made or not: made if one of the two makes it."""

    def meet(self, first: Any, second: Any) -> Any:
        return first or second


class _Ladder(Order):
    """A closed list of words, the tightest first."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def meet(self, first: Any, second: Any) -> Any:
        return min(first, second, key=self._words.index)


class _Same(Order):
    """A name or digest that is either the same or has nothing in common."""

    def meet(self, first: Any, second: Any) -> Any:
        if first != second:
            raise NothingInCommon
        return first


class _Label(Order):
    """A field that decides nothing: a name for people, a licence, a file's place."""

    def meet(self, first: Any, second: Any) -> Any:
        return min(first, second)


class _Multiple(Order):
    """The step of a grid: every second point is tighter. The meet is the smallest common multiple as decimals."""

    def meet(self, first: Any, second: Any) -> Any:
        one, two = Fraction(repr(float(first))), Fraction(repr(float(second)))
        common = Fraction(math.lcm(one.numerator, two.numerator), math.gcd(one.denominator, two.denominator))
        if common > _LARGEST_STEP or Fraction(repr(float(common))) != common:
            raise NothingInCommon  # a step that no double spells: no grid lies in both
        return float(common)


class _Pin(Order):
    """A pinned file that may be absent: then any file will do, so what is pinned is tighter."""

    def meet(self, first: Any, second: Any) -> Any:
        if first is None or second is None:
            return second if first is None else first
        if (first.sha256, first.rows) != (second.sha256, second.rows):
            raise NothingInCommon
        return min(first, second, key=lambda pin: (pin.file, pin.licence))

    def same(self, first: Any, second: Any) -> bool:
        if first is None or second is None:
            return first is second
        return (first.sha256, first.rows) == (second.sha256, second.rows)


class _Exemption(Order):
    """What a demand leaves out, or None. Two different exemptions have none in common, and none is the tightest."""

    def meet(self, first: Any, second: Any) -> Any:
        return first if first == second else None


class Demanded:
    """Marks a block that demands something, so that its absence is looser than its presence, not tighter."""


SMALLEST, LARGEST, INTERSECTION, OVERLAP, BOTH = _Smallest(), _Largest(), _Intersection(), _Overlap(), _Both()
SAME, LABEL, MULTIPLE, PIN = _Same(), _Label(), _Multiple(), _Pin()
UNION, SMALLEST_STATED, EXEMPTION = _Union(), _SmallestStated(), _Exemption()
INTERSECTION_OR_ANY = _IntersectionOrAny()
DEMANDED = Demanded()
EARLIEST, LATEST = SMALLEST, LARGEST  # of times in ISO form


def ladder(*words: str) -> Order:
    """Return an order of words, the tightest first."""
    return _Ladder(*words)


def rhythm(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Approval rounds that contain those of both: (first_rounds, then), in their one spelling.

    Rounds 1..n are held, and every multiple of t, t = 0 for none. Both parts only add rounds, so the meet is the
    longer beginning and the greatest common divisor.
    """
    start, step = max(first[0], second[0]), math.gcd(first[1], second[1])
    while step and start and start % step == 0:
        start -= 1  # a multiple of t is held anyway
    return start, step

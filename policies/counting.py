"""Bits in what a policy leaves free, counted: how many messages of a kind its rules let a trainer choose between.

Where the rules leave nothing else free the count is exact (small grids are enumerated in tests/policies); for text and
tensors it is an upper bound, as in policies/capacity.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from policies.fields import MetricField

# A policy may allow numbers up to 2 to the 53: what is beyond these is bounded, not computed.
EXACT_BITS = 512
_EXACT_COUNT = 4096
_EXACT_SUM = 64


@dataclass(frozen=True)
class Bits:
    """Attributes:
    bits: in one round, at most.
    because: the numbers it is made of.
    planted_bits: what a planted scheme got through in one round; None where none was run.
    planted: that scheme.
    """

    bits: float
    because: str
    planted_bits: float | None = None
    planted: str = ""


def points_of(grid: MetricField) -> int:
    """Multiples of the quantum from min to max."""
    return multiples(grid.min, grid.max, grid.quantum)


def multiples(low: float, high: float, quantum: float) -> int:
    """As decimals, the way a policy spells them; never less than 0."""
    step = Fraction(repr(float(quantum)))
    first, last = math.ceil(Fraction(repr(float(low))) / step), math.floor(Fraction(repr(float(high))) / step)
    return max(0, last - first + 1)


def of_steps(bits: float, messages: int, steps: int, because: str) -> Bits:
    """At most one message a step and `messages` a round. Which steps go without, where there are more, counts too.

    `bits`: in what one step says, or does not.
    """
    sent = min(messages, steps)
    chosen = 0.0
    if steps > messages:
        if steps <= _EXACT_COUNT or sent <= _EXACT_SUM:
            chosen = math.log2(sum(math.comb(steps, count) for count in range(sent + 1)))
        else:
            # the bound holds for the sum as well, up to half of the steps
            chosen = _entropy_bits(steps, sent) if 2 * sent <= steps else float(steps)
    return Bits(sent * bits + chosen, f"{sent} x {because}")


def log2_states(base: int, power: int, more: int = 1) -> float:
    """log2 of base to the power, and of so many more states; these are lost in a float where the power is long."""
    bits = power * math.log2(max(1, base))
    return bits if bits > EXACT_BITS else math.log2(base**power + more)


def log2_choices(of: int, chosen: int) -> float:
    """log2 of the binomial coefficient; of a bound above it, where both numbers are long."""
    few = min(chosen, of - chosen)
    return math.log2(math.comb(of, few)) if few <= _EXACT_COUNT else _entropy_bits(of, few)


def _entropy_bits(of: int, chosen: int) -> float:
    """The entropy of their ratio times `of`: no binomial coefficient has more bits. 0 < chosen < of."""
    rest = of - chosen
    return chosen * math.log2(of / chosen) + rest * math.log2(of / rest)


def answer_bits(entries: int, answer_bytes: int, message_bytes: int) -> float:
    """Bits in the answers of one message.

    Args:
        entries: answers in it.
        answer_bytes: of one, at most.
        message_bytes: of all, at most.
    """
    # which are absent, where one ends and the next begins, and how each finished
    size = min(message_bytes, entries * answer_bytes)
    return 8 * size + entries * math.log2((answer_bytes + 1) * 2 + 1)


def text_in_words(entries: int, answer_bytes: int, message_bytes: int) -> str:
    return f"{min(message_bytes, entries * answer_bytes)} bytes of text in at most {entries} answers"

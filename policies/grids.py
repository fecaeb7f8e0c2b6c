"""Values on the wire: on which grid they lie, how many there are within a limit, and which patterns of bits no training
makes (threat T4), each of which is a place to hide in; and how many bits a policy leaves free in them.

Where the rules leave nothing else free the count of bits is exact (small grids are enumerated in tests/policies); for
text and tensors it is an upper bound, as in policies/capacity.py.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.protocol.codec import SMALLEST_NORMAL_BITS
from policies.fields import MetricField

MANTISSA_BITS = {"float32": 23, "bfloat16": 7}  # stored ones
_SMALLEST_NORMAL = struct.unpack("<f", struct.pack("<I", 1 << 23))[0]  # 2**-126; denormals are not canonical
_LARGEST = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]
_DROPPED_BITS = {"float32": 0, "bfloat16": 16}


def grid_points(limit: float, grid: str, random_bits: int = 0) -> int:
    """Canonical values of one element with |value| <= limit: zero, and the normal numbers of the grid, both signs.

    Args:
        limit: largest magnitude.
        grid: float32 or bfloat16 (float32 whose lower half is zero).
        random_bits: lowest bits of the mantissa that the guard overwrites; what differs in them only counts once.
    """
    shift = _DROPPED_BITS[grid] + min(random_bits, MANTISSA_BITS[grid])
    limit = min(limit, _LARGEST)
    if limit < _SMALLEST_NORMAL:
        return 1
    return 2 * ((_bits_of(limit) >> shift) - (_bits_of(_SMALLEST_NORMAL) >> shift) + 1) + 1


def _bits_of(value: float) -> int:
    """The pattern of the largest float32 that is not above `value` > 0; patterns of positive floats are in order."""
    (pattern,) = struct.unpack("<I", struct.pack("<f", value))
    (nearest,) = struct.unpack("<f", struct.pack("<I", pattern))
    return int(pattern) - int(nearest > value)


def on_grid(value: float, quantum: float) -> bool:
    """Return whether value is exactly the double nearest to a whole multiple of the quantum as written in decimal."""
    multiple = round(value / quantum)
    return float(Decimal(multiple) * Decimal(repr(quantum))) == value


_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


@dataclass
class BitPatterns:
    """Counts over the values seen so far.

    Attributes:
        not_finite: infinities and NaN (each of its 2^23 - 1 payloads).
        not_canonical: -0 and denormals, which aggregation takes for 0.
        off_bfloat16: with a bit below those of a bfloat16.
    """

    not_finite: int = 0
    not_canonical: int = 0
    off_bfloat16: int = 0
    # memory that is new for each tile costs as much as what is looked for in it
    _room: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32), repr=False, compare=False)
    _lower: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16), repr=False, compare=False)

    def facts(self) -> dict[str, int]:
        """Return the counts under their fact names."""
        return {
            "values_not_finite": self.not_finite,
            "values_not_canonical": self.not_canonical,
            "values_off_bfloat16": self.off_bfloat16,
        }

    def add(self, values: npt.NDArray[np.float32], *, finite: bool = False) -> None:
        """Count in contiguous values of any length. One look at the extremes first: mostly there is nothing.

        finite: they are known to be.
        """
        if not values.size:
            return
        bits = values.view(np.uint32)
        if self._room.size < bits.size:
            self._room, self._lower = np.empty(bits.size, np.uint32), np.empty(bits.size, np.uint16)
        magnitude = np.bitwise_and(bits, _MAGNITUDE, out=self._room[: bits.size].reshape(bits.shape))
        if not finite and magnitude.max() >= _INFINITY:
            self.not_finite += int(np.count_nonzero(magnitude >= _INFINITY))
        if magnitude.min() < SMALLEST_NORMAL_BITS:
            self.not_canonical += int(np.count_nonzero((magnitude < SMALLEST_NORMAL_BITS) & (bits != 0)))
        lower = self._lower[: bits.size].reshape(bits.shape)
        np.copyto(lower, bits, casting="unsafe")  # drops the upper half of the bits
        self.off_bfloat16 += int(np.count_nonzero(lower))


# ---- bits in what a policy leaves free, counted ------------------------------------------------------

# A policy may allow numbers up to 2 to the 53: what is beyond these is bounded, not computed.
EXACT_BITS = 512
_EXACT_COUNT = 4096
_EXACT_SUM = 64


@dataclass(frozen=True)
class Bits:
    """How many bits a kind's messages may carry out of a site.

    Attributes:
        bits: in one round, at most.
        because: the numbers it is made of.
        planted_bits: what a planted scheme got through in one round; None where none was run.
        planted: that scheme.
        kind: of the messages; empty where `PolicyKind.bits` counts them.
    """

    bits: float
    because: str
    planted_bits: float | None = None
    planted: str = ""
    kind: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "bits": round(self.bits, 1),
            "because": self.because,
            "planted_bits": None if self.planted_bits is None else round(self.planted_bits, 1),
            "planted": self.planted,
        }


def points_of(grid: MetricField) -> int:
    """Multiples of the quantum from min to max."""
    return multiples(grid.min, grid.max, grid.quantum)


def lowest(grid: MetricField) -> float:
    """Return the smallest multiple of the quantum that is in range; never -0.0."""
    step = Decimal(repr(float(grid.quantum)))
    return float(math.ceil(Decimal(repr(float(grid.min))) / step) * step) + 0.0


def multiples(low: float, high: float, quantum: float) -> int:
    """Count the multiples of a quantum in a range, all as decimals, the way a policy spells them."""
    step = Fraction(repr(float(quantum)))
    first, last = math.ceil(Fraction(repr(float(low))) / step), math.floor(Fraction(repr(float(high))) / step)
    return max(0, last - first + 1)


def of_steps(bits: float, messages: int, steps: int, because: str) -> Bits:
    """Return the bits of at most one message a step and `messages` a round. Which steps go without, where there are
    more, counts too.

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
    """Return log2 of base to the power, and of so many more states; these are lost in a float where the power is
    long."""
    bits = power * math.log2(max(1, base))
    return bits if bits > EXACT_BITS else math.log2(base**power + more)


def log2_choices(of: int, chosen: int) -> float:
    """Return log2 of the binomial coefficient; of a bound above it, where both numbers are long."""
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

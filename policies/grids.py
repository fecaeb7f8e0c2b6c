"""What values of the wire are: on which grid, how many there are within a limit, and which patterns of bits no training
makes (threat T4), each of which is a place to hide in."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from fedsilo.protocol.codec import SMALLEST_NORMAL_BITS

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
    """Whether value is exactly the double nearest to a whole multiple of the quantum as written in decimal."""
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

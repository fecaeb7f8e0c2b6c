"""How many values the wire's grids have within a limit."""

from __future__ import annotations

import struct

from policies.model import MANTISSA_BITS

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

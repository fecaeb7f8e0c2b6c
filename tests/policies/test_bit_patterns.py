"""Bit patterns counted value by value, with struct instead of numpy."""

from __future__ import annotations

import math
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.grids import BitPatterns

_EDGES = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x80000000, 0x80000001, 0xFF800000]
_BITS = st.one_of(
    st.sampled_from(_EDGES),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1).map(lambda upper: upper << 16),
)


def slowly(bits: list[int]) -> BitPatterns:
    counts = BitPatterns()
    for each in bits:
        (value,) = struct.unpack("<f", struct.pack("<I", each))
        counts.not_finite += not math.isfinite(value)
        small = abs(value) < 2.0**-126
        counts.not_canonical += small and each != 0  # -0 or a denormal; +0 is the one zero
        counts.off_bfloat16 += each % 2**16 != 0
    return counts


@given(st.lists(st.lists(_BITS, max_size=40), max_size=4))
def test_T04_patterns_are_counted_in_every_piece(pieces: list[list[int]]) -> None:
    counts = BitPatterns()
    for piece in pieces:
        counts.add(np.array(piece, dtype=np.uint32).view(np.float32))
    assert counts == slowly([each for piece in pieces for each in piece])


def test_T04_a_second_tile_counts_as_well_as_the_first() -> None:
    counts = BitPatterns()
    for _ in range(2):
        counts.add(np.array([0x3F800001, 0x3F800000, 0x7FC00123], dtype=np.uint32).view(np.float32))
    assert counts == BitPatterns(not_finite=2, not_canonical=0, off_bfloat16=4)

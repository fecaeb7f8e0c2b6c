"""What the bits of float32 values may not be (threat T4): each pattern that no training makes is a place to hide in."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedsilo.protocol.codec import SMALLEST_NORMAL_BITS

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

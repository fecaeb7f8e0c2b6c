"""How far the silos of a committed round drifted apart, as a note of the run record (methods 2.8).

Read from the uploads that were averaged, one module at a time. The figures are the coordinator's own, which has every
upload anyway: they tell a reader of the run record how much two silos' updates differ, and nothing of a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.aggregate import read_factors
from coordinator.blobs import AnyPayload
from fedsilo.treaty.drift import DriftSums, Pair
from fedsilo.treaty.wire.codec import Array, FactorsReader

NAME = "drift"
DIGITS = 6  # that mean something


def drift_note(silos: Sequence[str], master: AnyPayload, uploads: Sequence[AnyPayload]) -> dict[str, Any]:
    """Fields of the note: distances between silos by factors and by products, and what averaging factors apart costs.

    Args:
        silos: in the order of the uploads.
        master: the adapter that the round began with.
        uploads: differences to it, in float32 or bfloat16; a factor that is frozen is in none of them.
    """
    base, readers = read_factors(master), [read_factors(upload) for upload in uploads]
    sums = DriftSums(len(readers), base.header.scale)
    names = {place.name for place in base.places}
    for module in sorted(name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")):
        if f"{module}.lora_B" in names:
            sums.add([_pair(module, base, reader) for reader in readers])
    drift = sums.drift()
    return {
        "silos": list(silos),
        "factors": [[_rounded(value) for value in row] for row in drift.factors.tolist()],
        "products": [[_rounded(value) for value in row] for row in drift.products.tolist()],
        "aggregation_error": _rounded(drift.aggregation_error),
    }


def _pair(module: str, base: FactorsReader, upload: FactorsReader) -> Pair:
    a, b = (_factor(f"{module}.{name}", base, upload) for name in ("lora_A", "lora_B"))
    return a, b


def _factor(name: str, base: FactorsReader, upload: FactorsReader) -> Array:
    """A silo's own factor: the master's and its difference, added in float64 so that the difference stays whole."""
    found = [
        reader.tile(place, 0, place.elements).reshape(place.shape).astype(np.float64)
        for reader in (base, upload)
        for place in reader.places
        if place.name == name
    ]
    total: Array = np.sum(found, axis=0)
    return total


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")

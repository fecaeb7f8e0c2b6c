"""Transforms between the two decisions on an offer: clip and round the delta, drop donors that graded wrong.

Each returns the new value and a JSON-able record of what it did, for the audit log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.codec import Array, from_bfloat16_bits, to_bfloat16_bits
from policies.model import LoraFactors

_TILE_ELEMENTS = 1 << 20


def l2_of(tensors: Mapping[str, Array]) -> float:
    """L2 norm over all values of all tensors, summed in float64 in name order."""
    squares = 0.0
    for name in sorted(tensors):
        flat = np.ascontiguousarray(tensors[name]).reshape(-1)
        for start in range(0, flat.size, _TILE_ELEMENTS):
            wide = flat[start : start + _TILE_ELEMENTS].astype(np.float64)
            squares += float(np.dot(wide, wide))
    return math.sqrt(squares)


def clip_delta(tensors: Mapping[str, Array], clip_l2: float) -> dict[str, Array]:
    """Scale all tensors by one factor so that their common L2 norm is at most clip_l2; within it they are unchanged.

    Args:
        tensors: float32 deltas by wire name.
        clip_l2: the limit; 0 makes every value 0.

    Raises:
        ValueError: a value is not finite, so there is no norm to clip to.
    """
    norm = l2_of(tensors)
    if not math.isfinite(norm):
        raise ValueError("a delta that is not finite cannot be clipped")
    if norm <= clip_l2:
        return {name: _canonical(tensors[name]) for name in tensors}
    scale = clip_l2 / norm
    return {name: _canonical((tensors[name].astype(np.float64) * scale).astype(np.float32)) for name in tensors}


def quantise(tensors: Mapping[str, Array], grid: str) -> dict[str, Array]:
    """Round float32 values to the nearest one of the grid: float32 (unchanged) or bfloat16.

    Raises:
        ValueError: no such grid.
    """
    if grid == "float32":
        return {name: _canonical(tensors[name]) for name in tensors}
    if grid == "bfloat16":
        return {name: _canonical(from_bfloat16_bits(to_bfloat16_bits(tensors[name]))) for name in tensors}
    raise ValueError(f"there is no grid {grid!r}")


def transform_factors(tensors: Mapping[str, Array], rules: LoraFactors) -> tuple[dict[str, Array], dict[str, Any]]:
    """Clip, then quantise, as the policy's lora.factors block says. Raises ValueError as `clip_delta` does."""
    before = l2_of(tensors)
    result = quantise(clip_delta(tensors, rules.clip_l2), rules.quantise.grid)
    record = {
        "l2_before": before,
        "l2_after": l2_of(result),
        "clip_l2": rules.clip_l2,
        "clipped": before > rules.clip_l2,
        "grid": rules.quantise.grid,
    }
    return result, record


def drop_wrong_donors(body: pb.PublicDonors, verdicts: Sequence[bool]) -> tuple[pb.PublicDonors, dict[str, int]]:
    """Remove the donors that the receiver's own grading calls wrong; donors without a response stay.

    Args:
        body: the message as it came.
        verdicts: one for each donor that carries a response, in message order.

    Returns:
        the remaining donors and how many were dropped, by origin.

    Raises:
        ValueError: the number of verdicts differs from the number of responses.
    """
    kept, dropped = pb.PublicDonors(), dict[str, int]()
    position = 0
    for prompt in body.prompts:
        target = kept.prompts.add(prompt_index=prompt.prompt_index)
        for donor in prompt.donors:
            if donor.HasField("response"):
                if position >= len(verdicts):
                    raise ValueError("there are fewer verdicts than responses")
                position += 1
                if not verdicts[position - 1]:
                    dropped[donor.origin] = dropped.get(donor.origin, 0) + 1
                    continue
            target.donors.add().CopyFrom(donor)
    if position != len(verdicts):
        raise ValueError("there are more verdicts than responses")
    return kept, dropped


def _canonical(values: Array) -> Array:
    """-0 and denormals become +0, as the codec writes them (T4)."""
    array = np.ascontiguousarray(values, dtype=np.float32)
    return np.where(np.abs(array) < np.finfo(np.float32).tiny, np.float32(0), array)

"""Transforms between the two decisions on an offer: clip and round the delta, overwrite its low bits, drop donors that
graded wrong.

Each returns the new value and a JSON-able record of what it did, for the audit log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, from_bfloat16_bits, to_bfloat16_bits
from policies.model import MANTISSA_BITS, LoraFactors

_EXPONENT = np.uint32(0x7F800000)


def clip_factor(l2: float | None, clip_l2: float) -> float:
    """What every value of a delta is multiplied by, so that its L2 norm is at most clip_l2: 1.0 within the limit.

    Args:
        l2: norm over all tensors; None where a value is not finite.
        clip_l2: the limit; 0 makes every value 0.

    Raises:
        ValueError: a value is not finite, so there is no norm to clip to.
    """
    if l2 is None or not math.isfinite(l2):
        raise ValueError("a delta that is not finite cannot be clipped")
    return 1.0 if l2 <= clip_l2 else clip_l2 / l2


def quantise(values: Array, grid: str) -> Array:
    """Round float32 values to the nearest one of the grid: float32 (unchanged) or bfloat16.

    Raises:
        ValueError: no such grid.
    """
    if grid not in MANTISSA_BITS:
        raise ValueError(f"there is no grid {grid!r}")
    return from_bfloat16_bits(to_bfloat16_bits(values)) if grid == "bfloat16" else values


def randomise_low_bits(values: Array, bits: int, grid: str, random_bytes: Callable[[int], bytes]) -> Array:
    """Overwrite the lowest bits of each value's mantissa, on its grid, by random ones (threat T5).

    Sign and exponent stay, and so does zero, whose exponent is that of denormals. What was written into these bits is
    gone. What this does not stop: a payload in the bits above, in the choice of zeros, or spread over many values as a
    small change of each (N1): such a one is read out of the sum, in which the random bits cancel.

    Args:
        values: float32 values of the grid.
        bits: how many; more than the grid's mantissa has means all of it.
        grid: float32 or bfloat16.
        random_bytes: (count) -> that many bytes, from a source that nobody can predict.
    """
    mantissa = MANTISSA_BITS[grid]
    bits = min(bits, mantissa)
    shift = np.uint32(MANTISSA_BITS["float32"] - mantissa)
    mask = np.uint32(((1 << bits) - 1) << int(shift))
    width = np.dtype("<u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4")
    result = np.array(values, dtype=np.float32)
    pattern = result.reshape(-1).view(np.uint32)
    noise = np.frombuffer(random_bytes(pattern.size * width.itemsize), dtype=width).astype(np.uint32)
    overwritten = (pattern & ~mask) | ((noise << shift) & mask)
    np.copyto(pattern, overwritten, where=(pattern & _EXPONENT) != 0)
    return result


def transform_factors(
    l2: float | None, rules: LoraFactors, random_bytes: Callable[[int], bytes]
) -> tuple[Callable[[Array], Array], dict[str, Any]]:
    """Clip, quantise and overwrite low bits, as the policy's block for the update says.

    Args:
        l2: norm of the delta over all its tensors, as `measure` found it.
        rules: the block.
        random_bytes: (count) -> that many bytes; asked only where the block wants low bits overwritten.

    Returns:
        what makes float32 values fit, to be applied once to each, a tile at a time and so without a second copy of
        the delta; and the record of it.

    Raises:
        ValueError: a value is not finite.
    """
    bits, grid = rules.randomise_low_bits, rules.quantise.grid
    # Random bits may lengthen a value by this factor at most, so that what was clipped still fits max_l2.
    clip_l2 = rules.clip_l2 / _growth(bits, grid)
    factor = clip_factor(l2, clip_l2)

    def fit(values: Array) -> Array:
        scaled = values if factor == 1.0 else (values.astype(np.float64) * factor).astype(np.float32)
        rounded = quantise(scaled, grid)
        return randomise_low_bits(rounded, bits, grid, random_bytes) if bits else rounded

    record = {
        "l2_before": l2,
        "clip_l2": clip_l2,
        "clipped": factor != 1.0,
        "grid": grid,
        "randomised_low_bits": min(bits, MANTISSA_BITS[grid]),
    }
    return fit, record


def changes_bytes(record: Mapping[str, Any], dtype: str) -> bool:
    """Whether what a record of `transform_factors` tells of may leave other bytes than were offered.

    Args:
        record: empty where nothing was transformed.
        dtype: of the wire, whose rounding the offered bytes have too.
    """
    return bool(record) and (
        record["clipped"] or record["randomised_low_bits"] > 0 or record["grid"] not in ("float32", dtype)
    )


def _growth(bits: int, grid: str) -> float:
    """The most by which overwriting `bits` of a mantissa multiplies a value: from 1.0 with all of them 0 to all 1."""
    mantissa = MANTISSA_BITS[grid]
    return 1.0 if bits == 0 else 1.0 + ((1 << min(bits, mantissa)) - 1) / (1 << mantissa)


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


def withhold_responses(body: pb.PublicResponses, hits: Sequence[bool]) -> tuple[pb.PublicResponses, list[int]]:
    """Remove the responses in which a screen found something; each prompt keeps its place and number of samples.

    What is left are the bytes of a message in which those responses had been graded wrong and never offered (T18).

    Args:
        body: the message as offered.
        hits: one for each response, in message order.

    Returns:
        the remaining message, and the positions of its responses in the one offered.

    Raises:
        ValueError: the number of hits differs from the number of responses.
    """
    left, places, position = pb.PublicResponses(public_set_sha256=body.public_set_sha256), list[int](), 0
    if len(hits) != sum(len(prompt.responses) for prompt in body.prompts):
        raise ValueError("there is not one verdict for each response")
    for prompt in body.prompts:
        target = left.prompts.add(prompt_index=prompt.prompt_index, samples=prompt.samples)
        for response in prompt.responses:
            if not hits[position]:
                target.responses.add().CopyFrom(response)
                places.append(position)
            position += 1
    return left, places


def blank_responses(body: pb.PublicResponses, places: Sequence[int]) -> pb.PublicResponses:
    """The same message with nothing in place of some responses, so that the others keep their numbers. Nobody else
    sends such a one: a response says how it ended, or is refused."""
    blank, position = pb.PublicResponses(), 0
    blank.CopyFrom(body)
    for prompt in blank.prompts:
        for response in prompt.responses:
            if position in places:
                response.Clear()
            position += 1
    return blank


def within_share(body: pb.PublicDonors, keep: Sequence[bool], most: int) -> list[bool]:
    """Of the donors that are kept so far, the first `most` of each peer, in message order (T21).

    Args:
        body: the message as it came.
        keep: one for each donor that carries a response.
        most: the largest number of one peer's.
    """
    origins = [donor.origin for prompt in body.prompts for donor in prompt.donors if donor.HasField("response")]
    counts: dict[str, int] = {}
    within = []
    for origin, kept in zip(origins, keep, strict=True):
        counts[origin] = counts.get(origin, 0) + kept
        within.append(kept and counts[origin] <= most)
    return within

"""Clip, grid and dropping donors, each checked by another way of computing it (threats T4, T7, T21)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol.codec import decode_factors, encode_factors
from policies.engine import measure
from policies.kinds.adapters import changes_bytes, clip_factor, quantise, transform_factors
from policies.kinds.public_donors import drop_wrong_donors
from tests.policies.setting import SCHEMA, context, donors_message, policy_of, policy_text, zeros

VALUES = st.floats(-100, 100, width=32)


def _tensors(values: list[float]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    tensors = zeros()
    (first, *_), (second, *_) = SCHEMA.tensors
    tensors[first].flat[: len(values)] = values
    tensors[second].flat[0] = values[0]
    return tensors


def norm_of(tensors: dict[str, np.ndarray[Any, Any]]) -> float:
    return sum(float(value) ** 2 for array in tensors.values() for value in array.flat) ** 0.5


@given(values=st.lists(VALUES, min_size=1, max_size=12), clip=st.floats(0.01, 50))
@settings(max_examples=80, deadline=None)
def test_T07_clipping_keeps_direction_and_bounds_the_norm(values: list[float], clip: float) -> None:
    tensors = _tensors(values)
    norm = norm_of(tensors)
    factor = clip_factor(norm, clip)
    clipped = {name: array * np.float32(factor) for name, array in tensors.items()}
    # float32 rounds each value by 2**-24 of it at most, and the factor as much
    assert norm_of(clipped) <= clip * (1 + 1e-6) or norm <= clip
    assert factor == pytest.approx(min(1.0, clip / norm) if norm else 1.0, rel=1e-12)


def test_within_the_clip_nothing_changes_and_zeros_stay_zeros() -> None:
    assert clip_factor(norm_of(_tensors([0.1, -0.2])), 1.0) == 1.0
    assert clip_factor(0.0, 0.0) == 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, None])
def test_T04_what_is_not_finite_is_not_clipped(value: float | None) -> None:
    with pytest.raises(ValueError, match="not finite"):
        clip_factor(value, 1.0)


@given(values=st.lists(VALUES, min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_bfloat16_grid_is_the_nearest_value_of_eight_bits(values: list[float]) -> None:
    rounded = quantise(np.array(values, np.float32), "bfloat16")
    for value, got in zip(values, rounded, strict=True):
        if value == 0:
            assert got == 0
            continue
        mantissa, exponent = np.frexp(np.float64(value))
        nearest = np.round(mantissa * 256) / 256 * 2.0**exponent  # half to even, 8 significant bits
        assert got == pytest.approx(nearest if abs(nearest) >= np.finfo(np.float32).tiny else 0.0, abs=1e-37)


def test_unknown_grid() -> None:
    with pytest.raises(ValueError, match="no grid"):
        quantise(np.zeros(1, np.float32), "int4")


def test_T07_after_the_transforms_a_large_delta_passes_its_own_policy() -> None:
    policy = policy_of(policy_text())
    rules = policy.file.egress.lora_factors
    assert rules is not None
    offered = _tensors([3.0, -4.0])
    fit, record = transform_factors(norm_of(offered), rules, bytes)
    result = {name: fit(values) for name, values in offered.items()}
    assert record["clipped"] is True and record["l2_before"] == pytest.approx((9 + 16 + 9) ** 0.5)
    assert norm_of(result) <= rules.max_l2
    payload = encode_factors(
        result, base_digest="ab" * 32, schema_sha256=SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
    )
    back = decode_factors(payload).tensors
    assert all(np.array_equal(back[name], result[name]) for name in result)


@pytest.mark.parametrize(
    ("clip", "grid", "bits", "dtype", "changes"),
    [
        (100.0, "float32", 0, "float32", False),
        (100.0, "float32", 0, "bfloat16", False),
        (100.0, "bfloat16", 0, "bfloat16", False),
        (100.0, "bfloat16", 0, "float32", True),
        (1.0, "float32", 0, "float32", True),
        (100.0, "float32", 3, "float32", True),
    ],
)
def test_bytes_change_exactly_where_a_transform_changes_them(
    clip: float, grid: str, bits: int, dtype: str, changes: bool
) -> None:
    rules = policy_of(policy_text()).file.egress.lora_factors
    assert rules is not None
    block = rules.model_copy(
        update={
            "clip_l2": clip,
            "randomise_low_bits": bits,
            "quantise": rules.quantise.model_copy(update={"grid": grid}),
        }
    )
    offered = _tensors([3.0, -4.1])
    fit, record = transform_factors(norm_of(offered), block, lambda count: b"\x05" * count)
    head: dict[str, Any] = {"base_digest": "", "schema_sha256": "", "rank": 2, "scale": 2.0, "dtype": dtype}
    assert (encode_factors(offered, **head) != encode_factors(offered, fit=fit, **head)) is changes
    assert changes_bytes(record, dtype) is changes
    assert changes_bytes({}, dtype) is False


def test_T21_wrong_donors_are_dropped_and_counted_by_origin() -> None:
    message = donors_message(
        (1, "hospital_b", "1"), (1, "hospital_a", None), (1, "hospital_c", "2"), (4, "hospital_b", "3")
    )
    kept, dropped = drop_wrong_donors(message.body, (True, False, False))  # type: ignore[arg-type]
    assert dropped == {"hospital_c": 1, "hospital_b": 1}
    assert [[donor.origin for donor in prompt.donors] for prompt in kept.prompts] == [["hospital_b", "hospital_a"], []]
    facts = measure(donors_message((1, "hospital_b", "1")), context(verdicts=(True,)))
    assert facts["responses_wrong"] == 0
    for verdicts in ((True, False), (True,) * 4):
        with pytest.raises(ValueError, match="verdicts"):
            drop_wrong_donors(message.body, verdicts)  # type: ignore[arg-type]

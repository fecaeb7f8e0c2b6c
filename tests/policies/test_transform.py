"""Clip, grid and dropping donors, each checked by another way of computing it (threats T4, T7, T21)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.treaty.wire.codec import decode_factors, encode_factors
from policies.engine import measure
from policies.transform import clip_delta, drop_wrong_donors, l2_of, quantise, transform_factors
from tests.policies.setting import SCHEMA, context, donors_message, policy_of, policy_text, zeros

VALUES = st.floats(-100, 100, width=32)


def _tensors(values: list[float]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    tensors = zeros()
    (first, *_), (second, *_) = SCHEMA.tensors
    tensors[first].flat[: len(values)] = values
    tensors[second].flat[0] = values[0]
    return tensors


@given(values=st.lists(VALUES, min_size=1, max_size=12), clip=st.floats(0.01, 50))
@settings(max_examples=80, deadline=None)
def test_T07_clipping_keeps_direction_and_bounds_the_norm(values: list[float], clip: float) -> None:
    tensors = _tensors(values)
    norm = sum(float(value) ** 2 for array in tensors.values() for value in array.flat) ** 0.5
    clipped = clip_delta(tensors, clip)
    assert l2_of(clipped) <= clip * (1 + 1e-6) or norm <= clip
    scale = min(1.0, clip / norm) if norm else 1.0
    for name, array in tensors.items():
        np.testing.assert_allclose(clipped[name], array * scale, rtol=2e-6, atol=2e-38)


def test_within_the_clip_nothing_changes_and_zeros_stay_zeros() -> None:
    tensors = _tensors([0.1, -0.2])
    for before, after in ((tensors, clip_delta(tensors, 1.0)), (zeros(), clip_delta(zeros(), 0.0))):
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_T04_what_is_not_finite_is_not_clipped(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        clip_delta(_tensors([value]), 1.0)


@given(values=st.lists(VALUES, min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_bfloat16_grid_is_the_nearest_value_of_eight_bits(values: list[float]) -> None:
    rounded = quantise(_tensors(values), "bfloat16")
    first = SCHEMA.tensors[0][0]
    for value, got in zip(values, rounded[first].flat, strict=False):
        if value == 0:
            assert got == 0
            continue
        mantissa, exponent = np.frexp(np.float64(value))
        nearest = np.round(mantissa * 256) / 256 * 2.0**exponent  # half to even, 8 significant bits
        assert got == pytest.approx(nearest if abs(nearest) >= np.finfo(np.float32).tiny else 0.0, abs=1e-37)


def test_unknown_grid() -> None:
    with pytest.raises(ValueError, match="no grid"):
        quantise(zeros(), "int4")


def test_T07_after_the_transforms_a_large_delta_passes_its_own_policy() -> None:
    policy = policy_of(policy_text())
    rules = policy.file.egress.lora_factors
    assert rules is not None
    result, record = transform_factors(_tensors([3.0, -4.0]), rules)
    assert record["clipped"] is True and record["l2_before"] == pytest.approx((9 + 16 + 9) ** 0.5)
    assert record["l2_after"] <= rules.max_l2
    payload = encode_factors(
        result, base_digest="ab" * 32, schema_sha256=SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
    )
    back = decode_factors(payload).tensors
    assert all(np.array_equal(back[name], result[name]) for name in result)


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

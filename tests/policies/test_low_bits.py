"""Random low bits of an update (threat T5): what was planted in them is gone, what is spread over values is not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.capacity import capacities
from policies.engine import measure
from policies.grids import MANTISSA_BITS, grid_points
from policies.kinds.adapters import LoraFactors, quantise, randomise_low_bits, transform_factors
from tests.policies.setting import context, policy_of
from tests.policies.test_frozen import FROZEN, STRICT, STRICT_PLAN, TEXT, B, update

Array = np.ndarray[Any, np.dtype[Any]]
PAGE = Path(__file__).parents[2] / "docs" / "explain" / "low-bits.md"
VALUES = 1 << 16
ALL_BITS = range(1, 8)  # of bfloat16's mantissa


def delta(seed: int = 1) -> Array:
    """What an update looks like: normal values, some hundredths of a step's largest."""
    return (1e-4 * np.random.default_rng(seed).standard_normal(VALUES)).astype(np.float32)


def random_bytes(seed: int = 2) -> Any:
    return np.random.default_rng(seed).bytes


def norm_of(values: Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def rules(**changes: Any) -> LoraFactors:
    block = STRICT.file.egress.lora_factor_b
    assert block is not None
    return block.model_copy(update={"clip_l2": 1.0, "max_l2": 1.02, **changes})


def transformed(values: Array, **changes: Any) -> Array:
    fit, _ = transform_factors(norm_of(values), rules(**changes), random_bytes())
    return fit(values)


def planted(values: Array, payload: Array, bits: int) -> Array:
    """A trainer's scheme: the payload in the lowest bits of each bfloat16 mantissa, which is the upper half."""
    pattern = quantise(values, "bfloat16").view(np.uint32)
    return ((pattern & ~np.uint32(((1 << bits) - 1) << 16)) | (payload.astype(np.uint32) << 16)).view(np.float32)


def read_back(values: Array, bits: int) -> Array:
    """[n, bits] zeros and ones."""
    low = (values.view(np.uint32) >> 16) & np.uint32((1 << bits) - 1)
    return (low[:, None] >> np.arange(bits, dtype=np.uint32)) & 1


@pytest.mark.parametrize("bits", ALL_BITS)
def test_T05_a_payload_in_the_low_bits_is_noise_afterwards_and_whole_without_the_transform(bits: int) -> None:
    payload = np.random.default_rng(3).integers(0, 1 << bits, VALUES)
    sent = planted(delta(), payload, bits)
    written = (payload[:, None] >> np.arange(bits)) & 1
    assert np.array_equal(read_back(transformed(sent, randomise_low_bits=0), bits), written)
    errors = int(np.count_nonzero(read_back(transformed(sent, randomise_low_bits=bits), bits) != written))
    n = VALUES * bits  # fair coins: n/2 errors, sigma sqrt(n)/2
    assert abs(errors - n / 2) <= 3 * math.sqrt(n) / 2, (errors, n)


def test_T05_bits_above_the_random_ones_still_carry_a_payload() -> None:
    payload = np.random.default_rng(3).integers(0, 1 << 4, VALUES)
    sent = planted(delta(), payload, 4)
    got = transformed(sent, randomise_low_bits=2)
    written = (payload[:, None] >> np.arange(4)) & 1
    assert np.array_equal(read_back(got, 4)[:, 2:], written[:, 2:]), "what is not overwritten is what was sent"


@pytest.mark.parametrize("bits", range(8))
def test_T05_documented_survivor_a_spread_spectrum_payload_at_a_tenth_of_the_norm_is_read_exactly(bits: int) -> None:
    """16 bits, each spread over all 65,536 values by a sequence of signs that sender and reader share. Nobody may claim
    that random low bits stop this: the reader's sum over the values averages them away."""
    honest, message = delta(), np.random.default_rng(5).integers(0, 2, 16)
    signs = np.random.default_rng(4).choice(np.array([-1.0, 1.0]), size=(16, VALUES))
    carrier = (2 * message - 1) @ signs
    carrier *= 0.1 * np.linalg.norm(honest) / np.linalg.norm(carrier)
    got = transformed((honest + carrier).astype(np.float32), randomise_low_bits=bits)
    assert np.array_equal((signs @ got > 0).astype(int), message)


def test_sign_exponent_zero_and_the_bits_above_stay_and_the_low_ones_are_the_given_ones() -> None:
    values = quantise(delta(), "bfloat16")
    values[:100] = 0.0
    got = randomise_low_bits(values, 3, "bfloat16", lambda count: b"\x05" * count)
    before, after = values.view(np.uint32), got.view(np.uint32)
    assert np.array_equal(after >> 19, before >> 19)
    assert not got[:100].any() and not np.signbit(got[:100]).any()
    assert set(((after[100:] >> 16) & 7).tolist()) == {5} and not (after & 0xFFFF).any()
    assert np.array_equal(randomise_low_bits(values, 0, "bfloat16", bytes), values)


@pytest.mark.parametrize(("bits", "width"), [(8, 1), (9, 2), (16, 2), (17, 4), (23, 4)])
def test_float32_has_23_bits_to_overwrite(bits: int, width: int) -> None:
    asked: list[int] = []

    def ones(count: int) -> bytes:
        asked.append(count)
        return b"\xff" * count

    got = randomise_low_bits(delta(), bits, "float32", ones).view(np.uint32)
    mask = np.uint32((1 << bits) - 1)
    assert ((got & mask) == mask).all() and np.array_equal(got & ~mask, delta().view(np.uint32) & ~mask)
    assert sum(asked) == width * VALUES


def test_more_bits_than_the_mantissa_has_are_the_whole_of_it() -> None:
    values = quantise(delta(), "bfloat16")
    most = randomise_low_bits(values, 7, "bfloat16", random_bytes())
    assert np.array_equal(randomise_low_bits(values, 23, "bfloat16", random_bytes()), most)


@pytest.mark.parametrize("bits", range(8))
def test_T07_a_clipped_delta_with_random_low_bits_still_fits_its_limit(bits: int) -> None:
    large = (1000 * delta()).astype(np.float32)
    for noise in (random_bytes(), lambda count: b"\xff" * count):
        fit, record = transform_factors(norm_of(large), rules(randomise_low_bits=bits), noise)
        assert record["clipped"] and record["randomised_low_bits"] == bits
        assert norm_of(fit(large)) <= rules().max_l2
        grown = 1 + ((1 << bits) - 1) / 128 if bits else 1
        assert record["clip_l2"] == pytest.approx(1.0 / grown, rel=1e-12)


def test_what_leaves_has_canonical_values_of_the_grid() -> None:
    values = delta()[:8].reshape(4, 2)
    fit, _ = transform_factors(norm_of(values), rules(randomise_low_bits=7), random_bytes())
    facts = measure(update({B: fit(values)}), context(schema=FROZEN, plan=STRICT_PLAN))
    assert (facts["values_off_bfloat16"], facts["values_not_canonical"], facts["values_not_finite"]) == (0, 0, 0)


@pytest.mark.parametrize("grid", ["bfloat16", "float32"])
def test_capacity_counts_values_that_differ_in_random_bits_once(grid: str) -> None:
    limit = 3.0
    for bits in (0, 1, 3, 7):
        shift = 23 - MANTISSA_BITS[grid] + bits
        top = int(np.float32(limit).view(np.uint32)) >> shift
        least = int(np.finfo(np.float32).tiny.view(np.uint32)) >> shift
        assert grid_points(limit, grid, bits) == 2 * (top - least + 1) + 1
    patterns = np.arange(0x0080, 0x4041, dtype=np.uint32)  # bfloat16, from the smallest normal number to 3.0
    assert grid_points(limit, "bfloat16", 3) == 2 * len(set((patterns >> 3).tolist())) + 1


def test_T05_the_capacity_of_an_update_falls_by_the_bits_that_are_random() -> None:
    def bits(text: str) -> float:
        (row,) = [row for row in capacities(policy_of(text), FROZEN) if row.kind == "lora.factor_b"]
        return row.bits

    none = bits(TEXT.replace("randomise_low_bits: 2 ", "randomise_low_bits: 0 "))
    # each of the 8 values has 2 bits fewer; the edges of the range make less than a hundredth of a bit
    assert none - bits(TEXT) == pytest.approx(8 * 2, abs=0.1)
    (row,) = [row for row in capacities(STRICT, FROZEN) if row.kind == "lora.factor_b"]
    assert "lowest 2 bits random" in row.because


def relative_error(bits: int, grid: str = "bfloat16") -> float:
    honest = delta()
    got = transformed(honest, randomise_low_bits=bits, clip_l2=1e9, max_l2=1e9, quantise=rules().quantise)
    return float(np.linalg.norm(got.astype(np.float64) - honest) / np.linalg.norm(honest.astype(np.float64)))


def test_the_page_says_how_much_an_update_changes() -> None:
    rows = re.findall(r"^\| (\d) \| ([\d.]+) % \| ([\d.]+) bits \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(bits) for bits, _, _ in rows] == list(range(8))
    for bits, percent, carried in rows:
        assert f"{math.log2(grid_points(0.02, 'bfloat16', int(bits))):.1f}" == carried
        # other values and other random bits move it by well under a fiftieth; the page has two digits
        assert 100 * relative_error(int(bits)) == pytest.approx(float(percent), rel=0.03)

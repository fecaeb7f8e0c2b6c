"""Capacity figures against counting: every value that the rules let through, one by one, where that is possible."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from policies.capacity import capacities
from policies.engine import History, decide, measure
from policies.grids import grid_points
from policies.model import Policy
from tests.policies.setting import SCHEMA, context, edited, metrics_message, policy_of, policy_text


def bits(policy: Policy) -> dict[str, float]:
    return {row.kind: row.bits for row in capacities(policy, SCHEMA)}


@pytest.mark.quick(keep=4)
@pytest.mark.parametrize("limit", [2.0**-126, 1e-37, 3.3e-37, 1.0e-36])
@pytest.mark.parametrize("grid", ["float32", "bfloat16"])
def test_grid_points_are_those_that_are_there(limit: float, grid: str) -> None:
    """All bit patterns up to the limit, looked at one by one; beyond it nothing changes but the count of exponents."""
    last = int(np.float32(limit).view(np.uint32)) + 2
    patterns = np.arange(0, last, dtype=np.uint32)
    values = patterns.view(np.float32)
    canonical = (values == 0) | (np.abs(values) >= np.float32(2.0**-126))
    canonical &= values.astype(np.float64) <= limit
    if grid == "bfloat16":
        canonical &= (patterns & 0xFFFF) == 0
    positive = int(canonical.sum()) - 1
    assert grid_points(limit, grid) == 2 * positive + 1


def test_a_limit_below_every_canonical_value_leaves_zero_alone() -> None:
    assert grid_points(0.0, "float32") == grid_points(1e-40, "bfloat16") == 1
    # one more octave is as many values again as an octave has, on both sides of zero
    assert grid_points(4.0, "float32") - grid_points(2.0, "float32") == 2 * 2**23
    assert grid_points(4.0, "bfloat16") - grid_points(2.0, "bfloat16") == 2 * 2**7
    assert grid_points(1e300, "float32") == 2 * 254 * 2**23 + 1


@pytest.mark.slow
def test_metrics_are_as_many_as_the_rules_let_through() -> None:
    """Every message over a coarse grid and one topic, judged by the rules."""
    policy = policy_of(
        policy_text(topics=("rotate",))
        .replace("quantum: 0.0001", "quantum: 0.5")
        .replace("      donors_trained:", "      donors_x:", 1)
        .replace("    per_round: 2", "    per_round: 1", 1)
    )
    block = policy.file.egress.metrics_eval
    assert block is not None
    names = sorted(name for name in block.fields if name != "donors_x")
    places = [(name, topic) for topic in ("", "rotate") for name in names]
    offered = (None, 0.0, 0.25, 0.5, 1.0, 1.5)  # 0.25 is off the grid, 1.5 out of range
    allowed = 0
    for values in itertools.product(offered, repeat=len(places)):
        given = [(*place, value) for place, value in zip(places, values, strict=True) if value is not None]
        if not given:
            continue
        message = metrics_message(*given)
        decision = decide(measure(message, context(topics=frozenset({"rotate"}))), policy, History())
        allowed += decision.verdict == "allow"
    donors = 2 * math.log2(block.fields["donors_x"].max + 2)  # the figure that was not tried, for both topics
    assert math.log2(allowed + 1) == pytest.approx(bits(policy)["metrics.eval"] - donors, abs=1e-9)
    assert allowed + 1 == 4 ** len(places)  # absent, 0, 0.5 or 1


def test_T09_the_order_of_figures_says_nothing() -> None:
    policy = policy_of(policy_text())
    first, second = ("pass_at_1", "", 0.25), ("pass_at_1", "rotate", 0.5)
    verdicts = [
        decide(measure(metrics_message(*order), context()), policy, History())
        for order in ((first, second), (second, first))
    ]
    assert verdicts[0].verdict == "allow" and verdicts[1].reasons == ("METRIC_ORDER",)


def test_tighter_limits_carry_less() -> None:
    before = bits(policy_of(policy_text()))
    for old, new, kind in (
        ('grid: "float32"', "grid: bfloat16", "lora.factors"),
        ("max_tensor_l2: 0.0", "max_tensor_l2: 0.00000", "lora.factors"),
        ("max_responses_per_round: 24", "max_responses_per_round: 12", "public.responses"),
        ("quantum: 0.0001", "quantum: 0.01", "metrics.eval"),
    ):
        after = bits(edited(old, new))
        assert after[kind] < before[kind]
        assert {name: after[name] for name in after if name not in (kind, "control.*")} == {
            name: before[name] for name in before if name not in (kind, "control.*")
        }
    assert bits(policy_of(policy_text("deny_all"))) == {}


def test_factors_hold_about_their_bytes_and_no_more() -> None:
    row = bits(policy_of(policy_text()))["lora.factors"]
    assert 0.9 * 32 * SCHEMA.elements < row < 32 * SCHEMA.elements

"""Limits of what an adapter adds to the base (rulesets fedex and flora): in all, in a round, and at first (T20)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsilo.protocol.codec import decode_factors, encode_factors
from fedsilo.protocol.factors import initial_factors
from fedsilo.protocol.place import Place
from policies.engine import History, Message, decide, measure
from policies.schema import LoraSchema
from tests.policies.messages import SHIFT_SCHEMA
from tests.policies.setting import COORDINATOR, FROM_COORDINATOR, PLAN, SCHEMA, context, policy_of, policy_text

POLICY = policy_of(policy_text("fedex", schema=SHIFT_SCHEMA))
BLOCK = POLICY.file.ingress.global_adapter
SHIFT_A, SHIFT_B = (name for name, _ in SHIFT_SCHEMA.tensors if "shift" in name)
START = initial_factors(SHIFT_SCHEMA.tensors, PLAN.seed)
SCALE = SHIFT_SCHEMA.scale


def shifted_by(l2: float, turned: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The run's first adapter with a shift of this length, scale and all; turned: in another direction."""
    tensors = {name: values.copy() for name, values in START.items()}
    tensors[SHIFT_A][0, 1 if turned else 0] = 2.0
    tensors[SHIFT_B][0, 0] = l2 / SCALE / 2
    return tensors


def reasons(tensors: dict[str, Any], schema: LoraSchema = SHIFT_SCHEMA, policy: Any = POLICY, **at: Any) -> Any:
    payload = encode_factors(tensors, base_digest="", schema_sha256=schema.digest, rank=2, scale=SCALE, dtype="float32")
    factors = decode_factors(payload)
    place = Place("run-1", 0, 0, "global.adapter")
    message = Message("ingress", place, COORDINATOR, len(payload), factors.header, factors.tensors)
    known = {**FROM_COORDINATOR, "schema": schema, "plan": PLAN, **at}
    return decide(measure(message, context(**known)), policy, History()).reasons


FIRST = {"last_adapter_first": True}
LIMIT, STEP = BLOCK.max_shift_l2, BLOCK.max_shift_step_l2


def after(last: dict[str, Any], rounds: int = 1) -> dict[str, Any]:
    return {"last_adapter": last, "last_adapter_rounds": rounds, "adapter_round": rounds}


def test_the_ruleset_has_limits_and_others_allow_no_shift() -> None:
    assert 0 < STEP < LIMIT
    other = policy_of(policy_text()).file.ingress.global_adapter
    assert (other.max_shift_l2, other.max_shift_step_l2) == (0.0, 0.0)
    assert "max_shift_l2" not in other.model_dump(mode="json")  # so the digest of such a policy is as it was


def test_T20_a_run_begins_without_a_shift_and_who_comes_later_counts_rounds() -> None:
    assert reasons(START, **FIRST) == ()
    assert reasons(shifted_by(STEP / 100), **FIRST) == ("SHIFT_STEP",)
    assert reasons(shifted_by(2 * STEP * (1 - 1e-6)), **FIRST, adapter_round=2) == ()
    assert reasons(shifted_by(2 * STEP * (1 + 1e-6)), **FIRST, adapter_round=2) == ("SHIFT_STEP",)


@pytest.mark.parametrize(("factor", "expected"), [(1 - 1e-6, ()), (1 + 1e-6, ("SHIFT_STEP",))])
def test_T20_a_round_shifts_the_base_no_further_than_its_limit(factor: float, expected: tuple[str, ...]) -> None:
    last = shifted_by(STEP)
    assert reasons(shifted_by(STEP + STEP * factor), **after(last)) == expected
    assert reasons(shifted_by(STEP + 2 * STEP * factor), **after(last, rounds=2)) == expected
    # as long as before, and elsewhere: the root of two apart
    assert reasons(shifted_by(STEP, turned=True), **after(last)) == ("SHIFT_STEP",)


def test_T20_all_rounds_together_shift_the_base_no_further_than_their_limit() -> None:
    last = shifted_by(LIMIT - STEP / 2)
    assert reasons(shifted_by(LIMIT * (1 - 1e-6)), **after(last)) == ()
    assert reasons(shifted_by(LIMIT * (1 + 1e-6)), **after(last)) == ("SHIFT_L2",)


def test_T20_another_factorisation_of_the_same_shift_is_no_step_and_the_factors_are_not_measured_with_it() -> None:
    last, other = shifted_by(STEP), shifted_by(STEP)
    other[SHIFT_A] *= 1000.0
    other[SHIFT_B] /= 1000.0
    assert reasons(other, **after(last)) == ()
    moved = {**other, SCHEMA.tensors[1][0]: np.full((4, 2), 100.0, np.float32)}
    assert "ADAPTER_STEP" in reasons(moved, **after(last))


def test_a_shift_that_cannot_be_measured_is_refused() -> None:
    bad = shifted_by(STEP)
    bad[SHIFT_A][0, 0] = np.inf
    assert {"NOT_FINITE", "SHIFT_L2", "SHIFT_STEP"} <= set(reasons(bad, **after(shifted_by(STEP))))
    assert {"ADAPTER_STEP", "SHIFT_STEP"} <= set(reasons(START, adapter_round=1, last_adapter_rounds=1))


def test_a_policy_without_a_shift_lets_no_adapter_with_one_in() -> None:
    assert "TENSOR_SET" in reasons(shifted_by(STEP), schema=SCHEMA, policy=policy_of(policy_text("fedavg")), **FIRST)

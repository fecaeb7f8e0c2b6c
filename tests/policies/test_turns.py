"""Factors that take turns (ruleset rolora): each round's own side leaves, and the other stays as it was (T6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode_factors, encode_factors
from fedsilo.protocol.factors import initial_factors, initial_frozen_sha256
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Lora
from policies.engine import History, Message, decide, measure
from silo.guard.decisions import RunView
from tests.policies.setting import (
    BASE_DIGEST,
    COORDINATOR,
    FROM_COORDINATOR,
    PLAN,
    SCHEMA,
    SILO,
    context,
    policy_of,
    policy_text,
)

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
TURNS = dataclasses.replace(SCHEMA, freeze="alternate")
POLICY = policy_of(policy_text("rolora", schema=TURNS))
A, B = (name for name, _ in SCHEMA.tensors)
START = initial_factors(TURNS.tensors, PLAN.seed)
FROZEN = initial_frozen_sha256(TURNS.tensors, PLAN.seed, "alternate")
TURNS_PLAN = PLAN.model_copy(
    update={
        "method": "fedavg-grpo",
        "lora": Lora(rank=2, alpha=4.0, schema_sha256=TURNS.digest, freeze="alternate", frozen_sha256=FROZEN),
    }
)


def reasons(kind: str, number: int, tensors: Arrays, **at: Any) -> tuple[str, ...]:
    taken = kind == "global.adapter"
    payload = encode_factors(
        tensors, base_digest="" if taken else BASE_DIGEST, schema_sha256=TURNS.digest, rank=2, scale=2.0,
        dtype="float32",
    )  # fmt: skip
    factors = decode_factors(payload)
    way, sender = ("ingress", COORDINATOR) if taken else ("egress", SILO)
    message = Message(way, Place("run-1", number, 0, kind), sender, len(payload), factors.header, factors.tensors)
    known = {"schema": TURNS, "plan": TURNS_PLAN, "records": 64, "epochs": 1, "steps": 4, "open_round": number}
    return decide(measure(message, context(**{**known, **(FROM_COORDINATOR if taken else {}), **at})), POLICY,
                  History()).reasons  # fmt: skip


@pytest.mark.parametrize(("number", "kind", "other"), [(1, A, B), (2, B, A), (3, A, B)])
def test_T06_a_round_lets_its_own_side_out_and_not_the_other(number: int, kind: str, other: str) -> None:
    delta = {name: np.full(values.shape, 2.0**-10, np.float32) for name, values in START.items()}
    due, fixed = ("lora.factor_b", "lora.factor_a") if number % 2 else ("lora.factor_a", "lora.factor_b")
    assert reasons(due, number, {other: delta[other]}) == ()
    assert reasons(fixed, number, {kind: delta[kind]}) == ("FROZEN",)
    assert "TENSOR_SET" in reasons(due, number, delta)


def moved(*names: str) -> Arrays:
    return {name: values + np.float32(2.0**-12 * (name in names)) for name, values in START.items()}


@pytest.mark.parametrize(("adapter_round", "trained", "fixed"), [(1, B, A), (2, A, B), (3, B, A)])
def test_T06_what_a_round_fixed_is_as_it_was_before(adapter_round: int, trained: str, fixed: str) -> None:
    at = {"last_adapter": START, "last_adapter_rounds": 1, "adapter_round": adapter_round}
    assert reasons("global.adapter", adapter_round + 1, moved(trained), **at) == ()
    assert reasons("global.adapter", adapter_round + 1, moved(fixed), **at) == ("FROZEN",)
    assert reasons("global.adapter", adapter_round + 1, moved(A, B), **at) == ("FROZEN",)
    # over two rounds both have been trained
    assert reasons("global.adapter", adapter_round + 2, moved(A, B), **at | {"last_adapter_rounds": 2}) == ()


def test_T06_a_run_begins_with_the_a_that_its_seed_draws() -> None:
    for adapter_round, expected in ((0, ("FROZEN",)), (1, ("FROZEN",)), (2, ())):
        at = {"last_adapter_first": True, "adapter_round": adapter_round}
        assert reasons("global.adapter", adapter_round + 1, moved(A), **at) == expected
        assert reasons("global.adapter", adapter_round + 1, moved(B), **at) == ()


def test_the_round_that_an_adapter_is_the_result_of() -> None:
    view = RunView(TURNS_PLAN).opened(1, pb.RoundOpen(base_digest="aa" * 32))
    assert view.adapter_round == 0
    assert view.evaluating("bb" * 32).adapter_round == 1  # what the open round came to
    assert view.opened(2, pb.RoundOpen(base_digest="bb" * 32)).adapter_round == 1

"""Server optimisers: against Flower's strategies, torch's SGD and slow loops; how far they can move an adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsilo.protocol.aggregation import STATES, ElementWise, aggregate_bound, average_of, averaged, step_bound
from fedsilo.protocol.codec import Array, canonical_values
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import mean_delta
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.plan import Plan, ServerOptimiser, parameters_of, plan_from_canonical
from tests.policies import setting

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "flower_server_optimisers.json").read_text())
FLOWER = VECTORS["cases"]
SUM = ElementWise(lambda master, deltas, state: (master + sum(deltas),))  # a method's own
NAMES = ("momentum", "nesterov", "adam")


def plan_with(rounds: int = 10, **fields: Any) -> Plan:
    return setting.PLAN.model_copy(update={"rounds": rounds, "server_optimiser": ServerOptimiser(**fields)})


def played(plan: Plan, start: Any, rounds: Sequence[Sequence[Any]]) -> list[Any]:
    """The adapter after each round of updates, in the arrays' own precision."""
    how = averaged(plan, plan.silos[:1])
    state: Sequence[Any] = [np.zeros_like(start)] * how.state
    after = [start]
    for updates in rounds:
        theta, *state = how.combine(after[-1], updates, state)
        assert theta.dtype == start.dtype and all(each.dtype == start.dtype for each in state)
        after.append(theta)
    return after


def numbers(values: Sequence[str], dtype: Any = np.float64) -> Any:
    return np.array([float.fromhex(value) for value in values]).astype(dtype)


def flower(name: str, dtype: Any = np.float64) -> tuple[list[Any], list[Any]]:
    """What this code and Flower come to after each of ten rounds, in which other silos took part each time."""
    case: Mapping[str, Any] = FLOWER[name]
    rounds = [[numbers(update, dtype) for update in row["updates"]] for row in case["rounds"]]
    assert len({len(updates) for updates in rounds}) > 1, "unequal participation"
    ours = played(plan_with(**case["server_optimiser"]), numbers(case["start"], dtype), rounds)
    return ours[1:], [numbers(row["after"], dtype) for row in case["rounds"]]


@pytest.mark.parametrize("name", FLOWER)
def test_ten_rounds_come_to_what_flower_comes_to(name: str) -> None:
    for ours, theirs in zip(*flower(name), strict=True):
        # of numbers around 1, each some tens of float64 roundings away
        assert np.allclose(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", [name for name in FLOWER if "dyadic" in name])
def test_on_dyadic_values_it_is_flower_s_result_bit_for_bit(name: str, dtype: Any) -> None:
    for ours, theirs in zip(*flower(name, dtype), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "nesterov"), [("nesterov", True), ("momentum", False)])
def test_momentum_is_torch_s_sgd_on_the_negative_mean_update(name: str, nesterov: bool) -> None:
    import torch

    draw = np.random.default_rng(3)
    start = draw.normal(size=7)
    rounds = [[draw.normal(size=7) for _ in range(silos)] for silos in (3, 1, 4, 2, 3, 4, 1, 2, 3, 4)]
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.SGD([parameter], lr=0.3, momentum=0.8, nesterov=nesterov)
    ours = played(plan_with(name=name, learning_rate=0.3, momentum=0.8), start, rounds)
    for updates, theta in zip(rounds, ours[1:], strict=True):
        parameter.grad = -torch.from_numpy(sum(updates) / len(updates))
        optimiser.step()
        assert np.allclose(parameter.detach().numpy(), theta, rtol=1e-12, atol=1e-13)


def test_adam_is_algorithm_2_by_a_slow_loop() -> None:
    draw = np.random.default_rng(4)
    rounds = [[draw.normal(size=3)] for _ in range(6)]
    ours = played(plan_with(name="adam", learning_rate=0.1, beta1=0.7, beta2=0.8, tau=0.01), np.zeros(3), rounds)
    for place in range(3):
        theta = m = v = 0.0
        for [update], after in zip(rounds, ours[1:], strict=True):
            m = 0.7 * m + 0.3 * float(update[place])
            v = 0.8 * v + 0.2 * float(update[place]) ** 2
            theta += 0.1 * m / (math.sqrt(v) + 0.01)
            assert after[place] == pytest.approx(theta, rel=1e-12)


finite = st.floats(-1e3, 1e3, width=32)
of_rounds = st.lists(st.lists(st.lists(finite, min_size=4, max_size=4), min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.sampled_from(["momentum", "nesterov"]), of_rounds)
def test_without_momentum_at_rate_1_it_is_the_plain_mean_bit_for_bit(name: str, given_rounds: Any) -> None:
    rounds = [[np.array(update, np.float32) for update in updates] for updates in given_rounds]
    start = np.array([0.5, -3.0, 0.0, 1e-3], np.float32)
    plain, theta = played(plan_with(), start, rounds), start
    for updates, after in zip(rounds, plain[1:], strict=True):
        theta = theta + mean_delta(updates)
        assert np.array_equal(after, theta)
    moved = played(plan_with(name=name, momentum=0.0), start, rounds)
    for one, other in zip(plain, moved, strict=True):
        assert canonical_values(one).tobytes() == canonical_values(other).tobytes()


# ---- how far a step can be ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.floats(0, 0.99), st.floats(0, 0.999), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_T20_no_updates_of_a_length_make_a_step_longer_than_the_plan_says(
    name: str, beta: float, beta2: float, rounds: int, seed: int
) -> None:
    """Random, constant and alternating directions, all of the longest length: constant ones come close."""
    fields = {"beta1": beta, "beta2": beta2, "tau": 0.01} if name == "adam" else {"momentum": beta}
    plan, longest = plan_with(rounds, name=name, learning_rate=0.7, **fields), 3.0
    bound = step_bound(plan, 5).of(longest)
    draw = np.random.default_rng(seed)
    fixed = draw.normal(size=5)
    for direction in (lambda _: fixed, lambda t: fixed * (-1) ** t, lambda _: draw.normal(size=5) ** 3):
        updates = [direction(number) for number in range(rounds)]
        of_length = [[(longest * update / np.linalg.norm(update)).astype(np.float32)] for update in updates]
        ours = played(plan, np.zeros(5, np.float32), of_length)
        steps = [float(np.linalg.norm(after.astype(np.float64) - before)) for before, after in pairwise(ours)]
        assert max(steps) <= bound * (1 + 1e-6), (max(steps), bound)
        if direction(0) is fixed and name != "adam":
            assert max(steps) >= bound * (1 - 1e-3), "it is no longer than it must be"


def test_T20_the_bound_of_adam_is_reached_and_grows_with_the_elements() -> None:
    # one round: m = (1 - b1) D and sqrt(v) = sqrt(1 - b2) |D|, so each number moves by 0.1 / sqrt(0.01) = 1 of eta
    one = step_bound(plan_with(1, name="adam", learning_rate=2.0, tau=1e-9), 100)
    assert one.most == pytest.approx(2.0 * 10, rel=1e-4) and one.of(1e-12) < 1e-2
    start = np.zeros(100)
    [_, after] = played(plan_with(1, name="adam", learning_rate=2.0, tau=1e-9), start, [[np.ones(100)]])
    assert np.linalg.norm(after) == pytest.approx(one.most, rel=1e-4)
    assert step_bound(plan_with(), 100).of(6.2) == 6.2, "without an optimiser it is the length of the updates"


# ---- the plan ----------------------------------------------------------------------------------------------------


def test_a_plan_without_one_is_what_it_was_and_one_with_it_says_so() -> None:
    assert "server_optimiser" not in setting.PLAN.canonical()
    assert not any(name.startswith("server_optimiser") for name in parameters_of(setting.PLAN))
    plan = plan_with(name="adam", learning_rate=0.5)
    assert plan_from_canonical(plan.canonical()) == plan and plan.digest != setting.PLAN.digest
    shown = {name: value for name, value in parameters_of(plan).items() if name.startswith("server_optimiser")}
    assert shown == {
        "server_optimiser": "adam", "server_optimiser.learning_rate": 0.5, "server_optimiser.beta1": 0.9,
        "server_optimiser.beta2": 0.99, "server_optimiser.tau": 1e-3,
    }  # fmt: skip
    assert {name: averaged(plan_with(name=name), setting.PLAN.silos).state for name in STATES} == STATES


@pytest.mark.parametrize(
    "fields",
    [{"name": "none", "learning_rate": 0.5}, {"name": "momentum", "tau": 1.0}, {"name": "adam", "momentum": 0.5},
     {"name": "momentum", "momentum": 1.0}, {"name": "adam", "tau": 0.0}, {"name": "adam", "learning_rate": 0.0}],
)  # fmt: skip
def test_a_field_of_another_optimiser_or_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServerOptimiser(**fields)


def test_what_changes_each_round_keeps_no_state() -> None:
    fields = setting.PLAN.model_dump() | {"server_optimiser": {"name": "momentum"}}
    fields["lora"] |= {"freeze": "alternate", "frozen_sha256": "ab" * 32}
    with pytest.raises(ValidationError, match="server_optimiser"):
        Plan.model_validate(fields)
    Plan.model_validate(fields | {"server_optimiser": {"name": "none"}})


def test_a_method_that_does_not_average_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with(name="momentum").model_copy(update={"method": "fedavg-grpo"})
    require_exchange(plan)
    own = replace(METHODS["fedavg-grpo"], aggregate=lambda plan, silos: SUM)
    monkeypatch.setitem(METHODS, "fedavg-grpo", own)
    with pytest.raises(UsageError) as refused:
        require_exchange(plan)
    assert refused.value.code == "SERVER_OPTIMISER"


def all_but_one(count: int) -> list[Array]:
    """Unit vectors, of which each lacks one number: whatever ranks numbers gets all of them large."""
    return [((1 - np.eye(count)[n]) / np.sqrt(count - 1)).astype(np.float32) for n in range(count)]


@pytest.mark.parametrize(
    ("changes", "count", "tight"),
    [
        ({"aggregate": "median"}, 3, True),
        ({"aggregate": "median"}, 4, False),
        ({"aggregate": "median"}, 7, False),
        ({"aggregate": "trimmed_mean", "trim": 1}, 4, True),
        ({"aggregate": "trimmed_mean", "trim": 2}, 7, False),
        ({"silo_steps": {"s0": 1}, "local_steps": 8}, 2, False),
        ({"silo_steps": {"s0": 1}, "local_steps": 8, "silo_weights": "steps"}, 2, False),
        ({}, 5, False),
    ],
)
def test_T20_what_updates_come_to_is_no_longer_than_the_plan_s_bound(changes: Any, count: int, tight: bool) -> None:
    silos = tuple(f"s{n}" for n in range(count))
    plan = setting.PLAN.model_copy(update={"silos": silos, "quorum": count, **changes})
    bound, average = aggregate_bound(plan), average_of(plan, silos)
    draws = np.random.default_rng(7)
    for _ in range(100):
        deltas = [draws.normal(size=6) * draws.integers(0, 2, 6) + 0.5 for _ in silos]
        units = [(each / np.linalg.norm(each)).astype(np.float32) for each in deltas]
        assert np.linalg.norm(average(units)) <= bound * (1 + 1e-6)
    length = np.linalg.norm(average(all_but_one(count)))
    assert length == pytest.approx(bound, rel=1e-6) if tight else length <= bound * (1 + 1e-6)
    same = [np.array([1, 0], np.float32)] * count
    assert np.linalg.norm(average(same)) <= bound * (1 + 1e-6)
    assert bound < 1.5 or "silo_steps" in changes

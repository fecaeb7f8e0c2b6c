"""Silos that take fewer steps a round than others, and figures of a step: what an update counts, and what leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedsilo.files.run_request import check_form, read_request
from fedsilo.protocol import codec
from fedsilo.protocol.aggregation import average_of
from fedsilo.protocol.errors import FedSiloError, UsageError
from fedsilo.protocol.factors import mean_delta, update_weights, weighted_delta
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.tasks import PrivateStep
from silo.guard.answers.curves import FILE, LINE_BYTES_MAX, NAMES_MAX
from silo.guard.answers.state import _METRICS_KEPT, _METRICS_SHOWN
from silo.guard.trainer_report import ValuesUnusable
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, federation, until_quiet
from tests.simulated.queries import as_json
from tests.world import Loop

FEWER = RUN_YAML.replace("method: pubswap", "method: fedavg-grpo") + "silo_steps: {hospital_a: 1, hospital_c: 2}\n"
STEPS = {"hospital_a": 1, "hospital_b": 4, "hospital_c": 2, "hospital_d": 4}


def test_each_update_counts_over_its_steps() -> None:
    # speeds 1:1:2:3 with 4, 4, 8, 12 steps: the mean of steps is 7
    assert update_weights((4, 4, 8, 12)) == pytest.approx((7 / 16, 7 / 16, 7 / 32, 7 / 48), rel=1e-15)
    assert update_weights((5, 5, 5, 5)) == (0.25,) * 4
    # all take the same step at every step: the mean is as if each had taken the mean of steps
    deltas = [np.full(3, 2.0 * steps, np.float32) for steps in (4, 4, 8, 12)]
    assert weighted_delta(update_weights((4, 4, 8, 12)), deltas).tolist() == [14.0] * 3


@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_sum_is_that_of_a_slow_loop(steps: list[int], seed: int) -> None:
    draws = np.random.default_rng(seed)
    master, *deltas = (draws.normal(0, 1, 5).astype(np.float32) for _ in range(len(steps) + 1))
    found = master + weighted_delta(update_weights(steps), deltas)
    for position in range(5):
        exact = float(master[position]) + math.fsum(
            float(delta[position]) / own * (math.fsum(steps) / len(steps)) / len(steps)
            for delta, own in zip(deltas, steps, strict=True)
        )
        # some ten roundings to float32 of numbers that no weight makes larger than 40 times 6
        assert abs(float(found[position]) - exact) <= 10 * 2.0**-24 * 240


def test_where_all_take_as_many_steps_it_is_the_plain_mean_bit_for_bit() -> None:
    plan = setting.PLAN.model_copy(update={"silo_steps": {"hospital_a": 2, "hospital_b": 2}, "local_steps": 4})
    assert average_of(plan, ("hospital_a", "hospital_b")) is mean_delta
    assert average_of(plan, ("hospital_a", "hospital_c")) is not mean_delta
    by_steps = plan.model_copy(update={"silo_weights": "steps"})
    assert average_of(by_steps, ("hospital_a", "hospital_c")) is mean_delta


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["silos", "steps"])
def test_a_run_in_which_some_take_fewer_steps_ends_with_the_adapter_of_its_weights(
    tmp_path: Path, weights: str
) -> None:
    house, silos = federation(tmp_path)
    house.submit(FEWER + f"silo_weights: {weights}\n")
    taken: dict[str, list[tuple[int, int]]] = {silo.name: [] for silo in silos}
    for silo in silos:
        work, own = silo.work, taken[silo.name]

        def counted(task: Any, work: Any = work, own: Any = own) -> Any:
            if isinstance(task, PrivateStep):
                own.append((task.round, task.step))
            return work(task)

        silo.work = counted  # type: ignore[method-assign]
        silo.join()
    until_quiet(silos)
    run = house.run()
    assert (run.state, run.reason) == ("finished", "")
    for name, steps in STEPS.items():
        assert taken[name] == [(number, step) for number in (1, 2) for step in range(1, steps + 1)]

    master = {key: value.astype(np.float64) for key, value in
              codec.decode_factors(silos[0].adapters[run.base_digest]).tensors.items()}  # fmt: skip
    mean = sum(STEPS.values()) / 4
    for number in (1, 2):
        for tensor in master:
            for silo in silos:
                share = 0.25 if weights == "steps" else mean / STEPS[silo.name] / 4
                master[tensor] += share * silo.delta(number)[tensor].astype(np.float64)
    adapter = load_file(tmp_path / "runs" / "run-1" / "adapter" / "adapter_model.safetensors")
    for tensor, values in master.items():
        # two rounds of four sums of numbers below 1, each rounded to float32
        np.testing.assert_allclose(adapter[f"base_model.model.{tensor}.weight"], values, rtol=0, atol=8 * 2.0**-24)


def test_where_silos_wait_for_each_other_at_each_public_step_none_takes_fewer(tmp_path: Path) -> None:
    house, _ = federation(tmp_path)
    with pytest.raises(FedSiloError, match=r"run\.yaml:14: pubswap: silos wait for each other") as told:
        house.submit(FEWER.replace("fedavg-grpo", "pubswap"))
    assert told.value.hint == "exchange: round_end, or method " + " or ".join(
        sorted(set(METHODS) - {"pubswap", "pubswap-random", "responses-only"})
    )
    house.submit(FEWER)  # the counterpart
    house.close()
    plan = setting.PLAN.model_copy(update={"silo_steps": {"hospital_a": 2}})
    with pytest.raises(UsageError) as refused:
        require_exchange(plan.model_copy(update={"method": "pubswap"}))
    assert refused.value.code == "SILO_STEPS"
    assert require_exchange(plan.model_copy(update={"method": "public-no-swap"})) is METHODS["public-no-swap"]
    at_the_end = plan.model_copy(update={"method": "pubswap", "exchange": "round_end"})
    assert require_exchange(at_the_end) is METHODS["pubswap"], "nobody waits for anybody inside a round"


@pytest.mark.parametrize(
    ("steps", "told"),
    [("{hospital_a: 5}", "5 for hospital_a, of 1 to 4"), ("{hospital_a: 0}", "0 for hospital_a, of 1 to 4"),
     ("{hospital_z: 2}", "'hospital_z' is not a silo of this federation")],
)  # fmt: skip
def test_a_number_of_steps_that_cannot_be_is_named_with_its_line(tmp_path: Path, steps: str, told: str) -> None:
    house, _ = federation(tmp_path)
    text = FEWER.replace("{hospital_a: 1, hospital_c: 2}", steps)
    with pytest.raises(FedSiloError, match=rf"run\.yaml:14: .*{told}"):
        house.submit(text)


def test_an_eighth_of_the_steps_is_the_fewest() -> None:
    def form(steps: int) -> None:
        text = FEWER.replace("local_steps: 4", "local_steps: 20").replace("hospital_a: 1", f"hospital_a: {steps}")
        check_form(read_request(text.replace(", hospital_c: 2", "").encode(), "run.yaml"))

    form(3)
    with pytest.raises(UsageError, match="2 for hospital_a, of 3 to 20"):
        form(2)


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    loop.turn()
    return loop


def report(loop: Loop, metrics: dict[str, Any], step: int = 2) -> None:
    loop.guard.status.metrics({"metrics": metrics}, PrivateStep(1, step), loop.bench.judge.view.plan, {})


def test_what_a_step_says_of_its_engine_is_in_the_state_and_in_the_curves(loop: Loop) -> None:
    told = {"rollout_kl": 1e-4, "stale_previous": 0.25, "stale_detectable_steps": 3.5, "made_up": 1.0}
    report(loop, told)
    state = loop.state()
    assert state["metrics"]["stale_detectable_steps"]["value"] == 3.5
    assert "stale_previous" not in state["metrics"]  # of these there are many: the curves have them
    curves = as_json(loop.guard.queries)["curves"]({"names": "stale_previous,rollout_kl"})
    found = {series["name"]: series["points"][0]["value"] for series in curves["series"]}
    assert found == {"stale_previous": 0.25, "rollout_kl": 1e-4}
    assert "made_up" not in curves["names"]
    assert {series["unit"] for series in curves["series"]} == {"", "nats"}


def test_all_figures_of_one_task_fit_a_line(loop: Loop, tmp_path: Path) -> None:
    names = [name for name in (*_METRICS_SHOWN, *_METRICS_KEPT) if name not in ("donors_rejected", "alpha_histogram")]
    assert len(set(names)) == len(names) < NAMES_MAX
    report(loop, dict.fromkeys(names, -math.pi / 1e5))  # as long as a number gets
    [path] = tmp_path.rglob(FILE)
    [line] = path.read_bytes().splitlines()
    assert len(line) < LINE_BYTES_MAX
    assert len(json.loads(line)["figures"]) == len(names)


@pytest.mark.parametrize("value", [float("nan"), "text", [1]])
def test_a_figure_that_is_no_number_is_refused(loop: Loop, value: Any) -> None:
    with pytest.raises(ValuesUnusable):
        report(loop, {"stale_previous": value})
    report(loop, {"stale_previous": None})  # not measured
    report(loop, {"stale_previous": 0.0})

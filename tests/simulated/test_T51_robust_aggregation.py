"""Updates put together so that few bad silos do not move the result beyond the honest ones (T51)."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedsilo.files.run_request import check_form, read_request
from fedsilo.protocol import codec
from fedsilo.protocol.aggregation import ElementWise, average_of
from fedsilo.protocol.errors import FedSiloError, PeerError, UsageError
from fedsilo.protocol.factors import mean_delta, median_delta, trimmed_mean_delta
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.plan import parameters_of, plan_from_canonical
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, federation, until_quiet

TEXT = RUN_YAML.replace("method: pubswap", "method: fedavg-grpo").replace("quorum: 2", "quorum: 4")
AT_LINE = TEXT.count("\n") + 1
ZERO = np.zeros(1, np.float32)
NUMBERS = st.floats(-1e3, 1e3, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30)


LAST = ElementWise(lambda master, deltas, state: (master + deltas[-1],))  # a method's own


def of_numbers(combine: Any, values: list[float]) -> float:
    return float(combine([np.array([value], np.float32) for value in values])[0])


@given(values=st.lists(NUMBERS, min_size=1, max_size=9), seed=st.integers(0, 99))
def test_T51_both_are_what_a_slow_loop_over_sorted_lists_gives(values: list[float], seed: int) -> None:
    largest = max(abs(value) for value in values)
    assert of_numbers(median_delta, values) == pytest.approx(statistics.median(values), rel=2**-23, abs=1e-30)
    for trim in range((len(values) + 1) // 2):
        kept = sorted(values)[trim : len(values) - trim]
        found = of_numbers(lambda *given, trim=trim: trimmed_mean_delta(trim, *given), values)
        # at most nine roundings to float32 of sums of nine numbers
        assert abs(found - statistics.fmean(kept)) <= 9 * 9 * 2**-24 * largest
        # the order of the silos does not count, not even in the last bit
        mixed = [values[at] for at in np.random.default_rng(seed).permutation(len(values))]
        assert of_numbers(lambda *given, trim=trim: trimmed_mean_delta(trim, *given), mixed) == found
        assert of_numbers(median_delta, mixed) == of_numbers(median_delta, values)


@pytest.mark.parametrize(("honest", "bad"), [(4, 1), (5, 2)])
@pytest.mark.parametrize("attack", [lambda own: own * 100, lambda own: -own * 3, lambda own: own + 50])
def test_T51_few_bad_silos_do_not_move_a_number_beyond_the_honest_ones(honest: int, bad: int, attack: Any) -> None:
    draws = np.random.default_rng(5)
    master = draws.normal(0, 1, 400).astype(np.float32)
    good = [draws.normal(0.2, 0.1, 400).astype(np.float32) for _ in range(honest)]
    given = [*good, *(attack(draws.normal(0.2, 0.1, 400)).astype(np.float32) for _ in range(bad))]
    low, high = np.min(good, axis=0), np.max(good, axis=0)

    def outside(combined: Any) -> float:
        moved = combined - master
        room = 2.0**-21  # the master, of numbers below 8, is added and taken away in float32
        return float(np.mean((moved < low - room) | (moved > high + room)))

    assert outside(master + median_delta(given)) == outside(master + trimmed_mean_delta(bad, given)) == 0.0
    assert outside(master + mean_delta(given)) > 0.5, "the counterpart: the mean goes where they push it"
    assert outside(master + trimmed_mean_delta(bad - 1, given)) > 0.05, "one more than it trims"


@pytest.mark.parametrize("options", ["aggregate: median\n", "aggregate: trimmed_mean\ntrim: 1\n", ""])
def test_T51_a_run_with_one_bad_silo_ends_with_the_adapter_of_its_plan(tmp_path: Path, options: str) -> None:
    house, silos = federation(tmp_path)
    house.submit(TEXT + options)
    bad = silos[2]
    honest = bad.delta
    bad.delta = lambda number: {name: -values for name, values in honest(number).items()}  # type: ignore[method-assign]
    for silo in silos:
        silo.join()
    until_quiet(silos)
    run = house.run()
    assert (run.state, run.reason) == ("finished", "")
    master = dict(codec.decode_factors(silos[0].adapters[run.base_digest]).tensors)
    for number in (1, 2):
        for name, values in master.items():
            stack = np.sort(np.stack([silo.delta(number)[name] for silo in silos]), axis=0)
            moved = stack.mean(axis=0) if not options else stack[1:3].mean(axis=0)  # of four both are the middle two's
            master[name] = values + moved
    adapter = load_file(tmp_path / "runs" / "run-1" / "adapter" / "adapter_model.safetensors")
    for name, values in master.items():
        # two rounds of sums of four numbers below 1, each rounded to float32
        np.testing.assert_allclose(adapter[f"base_model.model.{name}.weight"], values, rtol=0, atol=8 * 2.0**-24)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("aggregate: trimmed_mean\n", "aggregate: trimmed_mean with trim 0"),
        ("aggregate: mean\ntrim: 1\n", "aggregate: mean with trim 1"),
        ("aggregate: median\ntrim: 1\n", "aggregate: median with trim 1"),
        ("aggregate: trimmed_mean\ntrim: 2\n", "aggregate: trimmed_mean of 4 updates, .* takes at least 5"),
        ("aggregate: median\nsilo_steps: {hospital_a: 2}\n", "aggregate: median has no weights, which silo_steps"),
    ],
)
def test_T51_what_cannot_work_is_refused_with_its_line(tmp_path: Path, options: str, told: str) -> None:
    house, _ = federation(tmp_path)
    with pytest.raises(FedSiloError, match=rf"run\.yaml:{AT_LINE}: {told}"):
        house.submit(TEXT + options)
    house.submit(TEXT + "aggregate: trimmed_mean\ntrim: 1\n")


def test_T51_a_quorum_of_two_is_too_few_for_a_median() -> None:
    def form(quorum: int) -> None:
        text = TEXT.replace("quorum: 4", f"quorum: {quorum}") + "aggregate: median\n"
        check_form(read_request(text.encode(), "run.yaml"))

    form(3)
    with pytest.raises(UsageError, match="median of 2 updates"):
        form(2)


def test_T51_a_method_that_does_not_average_has_no_median() -> None:
    plan = setting.PLAN.model_copy(update={"method": "fedavg-grpo", "aggregate": "median", "quorum": 3})
    assert require_exchange(plan).averages and average_of(plan, plan.silos) is median_delta
    last = dataclasses.replace(METHODS["fedavg-grpo"], aggregate=lambda plan, silos: LAST)
    METHODS[last.name], before = last, METHODS[last.name]
    try:
        with pytest.raises(UsageError, match="does not average updates") as refused:
            require_exchange(plan)
        assert refused.value.code == "AGGREGATE"
        assert require_exchange(plan.model_copy(update={"aggregate": "mean"})) is last
    finally:
        METHODS[last.name] = before


def test_T51_people_are_told_of_it_and_of_a_mean_nothing() -> None:
    trimmed = setting.PLAN.model_copy(update={"aggregate": "trimmed_mean", "trim": 1})
    assert {name: parameters_of(trimmed)[name] for name in ("aggregate", "trim")} == {
        "aggregate": "trimmed_mean", "trim": 1,
    }  # fmt: skip
    assert not {"aggregate", "trim"} & set(parameters_of(setting.PLAN))


def test_T51_a_plan_that_never_spoke_of_it_keeps_its_digest() -> None:
    plain = setting.PLAN.canonical()
    assert '"aggregate"' not in plain and '"trim"' not in plain and plan_from_canonical(plain) == setting.PLAN
    median = setting.PLAN.model_copy(update={"aggregate": "median", "quorum": 3, "silos": ("a", "b", "c")})
    assert '"aggregate":"median"' in median.canonical() and plan_from_canonical(median.canonical()) == median
    with pytest.raises(PeerError, match="not in canonical form"):
        plan_from_canonical(plain.replace('{"base', '{"aggregate":"mean","base', 1))

"""X12: the exposure score tells trained canaries from held-out ones when a policy memorised them, and not otherwise.

The planted memoriser is real: the trainer's own GRPO steps on a random model of a few thousand numbers, through the
same `expose` as `python -m benchmarks.exposure`. A canary's reference is a random half of the alphabet, of which an
answer's first character must be one: a random model passes half of the time, and only memory says which half it is.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exposure_score import (
    Gains,
    bootstrap_interval,
    exact_p_value,
    exposure_score,
    gains_of,
    monte_carlo_p_value,
)
from fedsilo.protocol.randomness import generator

if TYPE_CHECKING:
    from benchmarks.exposure import Setting, Trial
    from tests.algorithms.tiny import Row

COUNTS = st.integers(-5, 5)
SETS = st.integers(1, 4).flatmap(
    lambda size: st.tuples(st.lists(COUNTS, min_size=size, max_size=size), st.lists(COUNTS, min_size=1, max_size=4))
)
SIGNIFICANT = 0.001  # one fair draw in a thousand would do this without any memory
CANARIES = 40
SAMPLES = 16
HALF_OF_THE_ALPHABET = 10


def gains(trained: list[int], held_out: list[int]) -> Gains:
    return Gains(tuple(trained), tuple(held_out))


def counted_by_hand(strata: list[Gains]) -> float:
    """Every split of every stratum, one by one."""
    scores = [
        [
            np.mean([values[place] for place in chosen])
            - np.mean([value for place, value in enumerate(values) if place not in chosen])
            for chosen in itertools.combinations(range(len(values)), len(one.trained))
        ]
        for one in strata
        for values in [[*one.trained, *one.held_out]]
    ]
    everything = [np.mean(combination) for combination in itertools.product(*scores)]
    # means of whole numbers that are equal may differ by a rounding error; unequal ones differ by over 1e-3 here
    return float(np.mean([score >= exposure_score(strata) - 1e-9 for score in everything]))


# ---- the figures -------------------------------------------------------------------------------------


def test_score_by_hand() -> None:
    found = gains_of(before=[1, 0, 3, 2], after=[4, 1, 3, 1], is_trained=[True, False, True, False])
    assert found == gains([3, 0], [1, -1])
    assert exposure_score([found]) == 1.5  # (3 + 0) / 2 - (1 - 1) / 2
    assert exposure_score([found, gains([0], [1])]) == 0.25  # every run counts alike, however many canaries it has


def test_p_value_by_hand() -> None:
    # of the six ways to choose two of 3, 0, 1, -1 the sums are 4, 3, 2, 1, 0, -1: two of them are at least 3
    assert exact_p_value([gains([3, 0], [1, -1])]) == pytest.approx(2 / 6, rel=1e-12)
    assert exact_p_value([gains([9, 8, 7], [1, 2, 3])]) == pytest.approx(1 / 20, rel=1e-12)
    assert exact_p_value([gains([1, 2, 3], [9, 8, 7])]) == pytest.approx(1.0, rel=1e-12)
    assert exact_p_value([gains([9, 8], [1, 2]), gains([9, 8], [1, 2])]) == pytest.approx(1 / 36, rel=1e-12)


@given(SETS)
def test_swapping_the_sets_changes_the_sign(sets: tuple[list[int], list[int]]) -> None:
    one, other = sets
    assert exposure_score([gains(one, other)]) == -exposure_score([gains(other, one)])


@given(
    st.lists(COUNTS, min_size=1, max_size=6).flatmap(lambda values: st.tuples(st.just(values), st.permutations(values)))
)
def test_identical_sets_score_nothing(sets: tuple[list[int], list[int]]) -> None:
    assert exposure_score([gains(*sets)]) == 0.0
    assert exact_p_value([gains(*sets)]) >= 0.5  # a split and its swap have opposite scores


@given(SETS)
def test_exact_p_value_is_the_count_of_all_splits(sets: tuple[list[int], list[int]]) -> None:
    strata = [gains(*sets)]
    assert exact_p_value(strata) == pytest.approx(counted_by_hand(strata), rel=1e-12)  # sums of floats up to 70


@pytest.mark.slow
@settings(max_examples=20)  # a thousand splits of three runs, one by one
@given(st.lists(st.tuples(*[COUNTS] * 5), min_size=2, max_size=3))
def test_exact_p_value_over_several_runs_splits_each_on_its_own(runs: list[tuple[int, ...]]) -> None:
    strata = [gains(list(run[:2]), list(run[2:])) for run in runs]
    assert exact_p_value(strata) == pytest.approx(counted_by_hand(strata), rel=1e-12)  # sums of floats up to 1,000


def test_estimated_p_value_agrees_with_the_exact_one() -> None:
    draws = np.random.default_rng(12)
    splits = 20_000
    for shift in (0, 2, 4):
        strata = [gains((draws.integers(-4, 5, 12) + shift).tolist(), draws.integers(-4, 5, 12).tolist()) for _ in "ab"]
        exact = exact_p_value(strata)
        # five standard deviations of a share estimated from `splits` draws, and the split that is always counted
        tolerance = 5 * np.sqrt(exact * (1 - exact) / splits) + 1 / splits
        assert monte_carlo_p_value(strata, draws, splits=splits) == pytest.approx(exact, abs=tolerance)
    # as good as impossible by chance, and yet one of the splits that were looked at
    assert monte_carlo_p_value([gains([9] * 20, [0] * 20)], draws, splits=99) == 1 / 100


@pytest.mark.slow
def test_without_memory_a_fair_draw_is_rarely_significant() -> None:
    """The p-value holds its level: at most one draw in twenty is below 0.05, whatever the gains are."""
    draws = np.random.default_rng(12)
    values = draws.integers(-8, 9, 16)
    below = 0
    for _ in range(2_000):
        order = draws.permutation(values).tolist()
        below += exact_p_value([gains(order[:8], order[8:])]) <= 0.05
    assert below <= 2_000 * 0.05 + 4 * np.sqrt(2_000 * 0.05 * 0.95)  # four standard deviations of the count


def test_interval_holds_the_score_and_narrows_with_more_canaries() -> None:
    few = [gains([4, 0, 2, 3], [0, 1, -1, 0])]
    many = [gains([4, 0, 2, 3] * 25, [0, 1, -1, 0] * 25)]
    (low, high), (lowest, highest) = (bootstrap_interval(strata, generator(1)) for strata in (few, many))
    assert low < exposure_score(few) == 2.25 < high
    # a hundred times the canaries, a fifth of the width; resampling leaves some per cent of it open
    assert highest - lowest == pytest.approx((high - low) / 5, rel=0.1)
    assert bootstrap_interval([gains([1, 1], [3, 3])], generator(1)) == (-2.0, -2.0)
    assert bootstrap_interval(few, generator(1)) == (low, high)


def test_what_has_no_score_is_refused() -> None:
    for trained, held_out in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="both sets"):
            gains(trained, held_out)
    with pytest.raises(ValueError, match="finite"):
        Gains((float("nan"),), (0.0,))
    with pytest.raises(ValueError, match="zip"):
        gains_of([1, 2], [1, 2], [True])
    with pytest.raises(ValueError, match="no canaries"):
        exposure_score([])
    with pytest.raises(ValueError, match="no canaries"):
        exact_p_value([])
    with pytest.raises(ValueError, match="whole numbers"):
        exact_p_value([Gains((0.5,), (0.0,))])
    with pytest.raises(ValueError, match="unlike sizes"):
        exact_p_value([gains([1], [0]), gains([1, 1], [0, 0])])


# ---- the canaries of the benchmark -------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("labels", ["reachable", "uniform"])
def test_canaries_are_random_pairs_on_strings_that_nobody_trains_on(labels: str) -> None:
    from benchmarks.exposure import make_canaries
    from fedsilo.demo import digit_tasks
    from fedsilo.demo.data import make_digit_set

    canaries = make_canaries(3, 400, labels)  # type: ignore[arg-type]
    strings = {canary.prompt[1:-1] for canary in canaries}
    assert len(strings) == len(canaries)
    assert all(digit_tasks.is_held_out(digits) for digits in strings)
    data = make_digit_set(3)
    others = [*data.public, *(row for rows in data.private.values() for row in rows)]
    assert not strings & {str(row["prompt"])[1:-1] for row in others}
    right = sum(canary.answer == digit_tasks.answer(canary.topic, canary.prompt[1:-1]) for canary in canaries)
    # one in three where the answer is one of three; 10^-2 or 10^-4 where it is digits. Four standard deviations.
    expected = 400 / 3 if labels == "reachable" else 1.0
    assert right == pytest.approx(expected, abs=4 * np.sqrt(expected))


@pytest.mark.torch
def test_the_draw_takes_half_and_every_canary_as_often() -> None:
    from benchmarks.exposure import fair_split

    splits = np.array([fair_split(seed, 20) for seed in range(1_000)])
    assert (splits.sum(axis=1) == 10).all()
    assert len({tuple(split) for split in splits.tolist()}) > 990  # of 184,756 possible ones
    # four standard deviations of a count of 1,000 fair draws, for each of 20 canaries
    assert np.abs(splits.sum(axis=0) - 500).max() <= 4 * np.sqrt(1_000 / 4)


# ---- the planted memoriser ---------------------------------------------------------------------------


def canaries_of(seed: int) -> list[Row]:
    from tests.algorithms.tiny import ALPHABET, Row

    draws = np.random.default_rng(seed)
    letters = list(ALPHABET[:-1])
    return [
        Row(f"canary{place}", f"{place:02d}?", "".join(draws.permutation(letters)[:HALF_OF_THE_ALPHABET]))
        for place in range(CANARIES)
    ]


def tiny_setting(method: str = "fedavg-grpo", *, steps: int = 5, learning_rate: float = 1e-2) -> Setting:
    """Two silos, two rounds; each pair is given to a step once in each step of silo a."""
    from benchmarks.exposure import Setting
    from tests.algorithms.tiny import first_character_grader, make_codec, make_model, make_plan, make_shape

    plan = make_plan(
        method=method,
        rounds=2,
        local_steps=steps,
        prompts_per_step=CANARIES // 2,
        samples_per_prompt=8,
        optimiser__learning_rate=learning_rate,
        rollout__max_new_tokens=1,
    )
    return Setting(plan, dict(make_shape(make_model()).shapes), make_model, make_codec(), first_character_grader)


def other_rows() -> list[Row]:
    """As many pairs of the same form that are no canaries."""
    return [replace(row, id=f"other-{row.id}", prompt=f"{row.prompt[:-1]}=") for row in canaries_of(2)]


def trial(setting: Setting) -> Trial:
    """Silo a has the canaries that the draw chose and nothing else, silo b other rows."""
    from benchmarks.exposure import expose, fair_split

    others = other_rows()
    return expose(setting, {"a": [], "b": others}, others, canaries_of(1), fair_split(1, CANARIES), SAMPLES)


@pytest.mark.slow
@pytest.mark.torch
def test_a_memoriser_is_found_in_its_own_adapter_and_in_the_average() -> None:
    found = trial(tiny_setting())
    own, averaged = ([found.reward[policy]] for policy in ("own", "averaged"))
    assert exact_p_value(own) < SIGNIFICANT
    assert exposure_score(own) / SAMPLES > 0.25  # of 0.5 that a perfect memory would gain
    assert bootstrap_interval(own, generator(1))[0] > 0
    assert exact_p_value(averaged) < 0.05  # half of the step, so it shows less
    assert 0 < exposure_score(averaged) < exposure_score(own)
    base, after = found.pass_rates["base"], found.pass_rates["own"]
    rise = {side: after[side] - base[side] for side in ("trained", "held_out")}
    # four decimals in the rates, so half a unit of the last for each of four
    assert exposure_score(own) / SAMPLES == pytest.approx(rise["trained"] - rise["held_out"], abs=2e-4)


@pytest.mark.torch
def test_an_untrained_policy_scores_nothing() -> None:
    found = trial(tiny_setting(steps=1, learning_rate=1e-12))  # moves no sample over an edge
    for gained in (*found.reward.values(), *found.logp.values()):
        assert exposure_score([gained]) == pytest.approx(0, abs=1e-5)  # float32 log-probabilities
    assert exact_p_value([found.reward["own"]]) == pytest.approx(1.0, rel=1e-12)
    assert found.times_given == 2.0  # one private step in each of two rounds takes every row


@pytest.mark.slow
@pytest.mark.torch
def test_a_policy_that_trained_on_other_rows_is_not_taken_for_a_memoriser() -> None:
    """It changed as much, and for both sets alike."""
    from benchmarks.exposure import Examiner, fair_split, train

    setting, others = tiny_setting(), other_rows()
    federation = train(setting, {"a": others, "b": others}, others)
    examiner = Examiner(setting, canaries_of(1), SAMPLES)
    before, after = examiner.ask(setting.start()), examiner.ask(federation.own["a"])
    assert sum(abs(one - other) for one, other in zip(before.passed, after.passed, strict=True)) > CANARIES
    assert exact_p_value([gains_of(before.passed, after.passed, fair_split(1, CANARIES))]) > SIGNIFICANT


@pytest.mark.slow
@pytest.mark.torch
def test_the_federation_of_the_benchmark_averages_and_exchanges() -> None:
    """Own adapters start from the averaged one of the round before, and their mean is the last; answers cross."""
    from benchmarks.exposure import Federation, train

    rows = other_rows()
    short, full = (
        train(replace(setting, plan=setting.plan.model_copy(update={"rounds": rounds})), {"a": rows, "b": rows}, rows)
        for rounds in (1, 2)
        for setting in [tiny_setting("pubswap", steps=2)]
    )
    assert isinstance(full, Federation)
    assert {kind for kind, _, _ in full.offered["a"]} >= {"public.responses", "lora.factors"}
    assert len(full.commits) == full.averaged_rounds == 2
    for name, averaged in full.adapter.items():
        # float32 sums of numbers up to 1, in another order
        assert averaged == pytest.approx((full.own["a"][name] + full.own["b"][name]) / 2, abs=1e-6)
        assert full.own["a"][name] - full.uploads["a"][name] == pytest.approx(short.adapter[name], abs=1e-6)
    assert any((full.own["a"][name] != full.own["b"][name]).any() for name in full.adapter)


@pytest.mark.torch
def test_figures_are_shares_of_samples() -> None:
    from benchmarks.exposure import Trial, figures_of

    rates = {"trained": 0.5, "held_out": 0.25}
    one = Trial(
        reward={"own": gains([3, 0], [1, -1]), "averaged": gains([0, 0], [0, 0])},
        logp={"own": Gains((1.0, 0.5), (0.25, 0.25)), "averaged": Gains((0.0, 0.0), (0.0, 0.0))},
        pass_rates=dict.fromkeys(("base", "own", "averaged"), rates),
        times_given=0.5,
    )
    figures = figures_of({7: one}, samples=4)
    assert figures["own"]["exposure_score"] == 0.375  # 1.5 of 4 samples
    assert figures["own"]["p_value"] == pytest.approx(1 / 3, rel=1e-12)
    assert figures["own"]["likelihood_gap_nats"] == 0.5
    assert figures["averaged"]["exposure_score"] == 0.0
    assert [row["seed"] for row in figures["own"]["seeds"]] == [7]

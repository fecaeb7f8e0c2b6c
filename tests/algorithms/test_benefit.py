"""The arithmetic of `silo report benefit`: quantiles from a table, intervals by hand and by simulation, verdicts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.cli.silo import benefit_text
from silo.benefit import (
    ARMS,
    DEFINITION,
    Answers,
    Holdout,
    cluster_degrees,
    compare,
    difference_interval,
    rate_interval,
    student_quantile,
)


@pytest.mark.parametrize(
    ("probability", "degrees", "printed"),
    [  # any printed table
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 9, 2.262),
        (0.975, 10, 2.228), (0.975, 30, 2.042), (0.975, 120, 1.980), (0.9, 5, 1.476), (0.8, 10, 0.879),
        (0.975, 5000, 1.960), (0.5, 7, 0.0),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability: float, degrees: int, printed: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(printed, abs=6e-4)  # tables give three decimals


def test_the_quantile_is_continuous_where_it_becomes_the_normal_one() -> None:
    assert student_quantile(0.975, 999) == pytest.approx(student_quantile(0.975, 1000), rel=2e-3)


def slowly(values: list[float], groups: list[int], made_up: list[tuple[float, float]]) -> tuple[float, float]:
    """The same interval prompt by prompt, the covariances inside each group added up one by one, and the degrees of
    freedom from the matrix of the quadratic form."""
    sizes = np.array(list(Counter(groups).values()), dtype=float)
    typical = sum(groups.count(group) for group in groups) / len(groups)  # size of the cluster that a prompt is in
    everyone = [(value, f"group {group}") for value, group in zip(values, groups, strict=True)]
    size = len(everyone) + sum(number * typical for _, number in made_up)
    total = sum(value for value, _ in everyone) + sum(value * number * typical for value, number in made_up)
    centre = total / size
    variance = sum(number * (typical * (value - centre)) ** 2 for value, number in made_up)
    for value, group in everyone:
        for other, its_group in everyone:
            if group == its_group:
                variance += (value - centre) * (other - centre)
    squares = sum(each**2 for each in sizes) + sum(number * typical**2 for _, number in made_up)
    parts = size**2 / squares
    half = student_quantile(0.975, by_matrix(sizes)) * math.sqrt(variance * parts / (parts - 1)) / size
    return centre - half, centre + half


def by_matrix(sizes: Any) -> int:
    deviation = np.eye(len(sizes)) - np.outer(np.ones(len(sizes)), sizes / sizes.sum())
    form = deviation.T @ np.diag(sizes**2) @ deviation
    return math.floor(np.trace(form) ** 2 / np.trace(form @ form) + 1e-6)


@pytest.mark.parametrize(
    ("sizes", "degrees"),
    [
        ([1] * 30, 29), ([7] * 10, 9), ([2, 2, 2], 2), ([5, 5], 1), ([9], 0), (list(range(1, 21)), 10),
        ([100, 5, 5, 5, 5], 1), ([60, 20, 5, 5, 5, 5], 1), ([24] + [1] * 76, 1), ([30, 30] + [2] * 20, 1),
    ],
)  # fmt: skip
def test_degrees_of_freedom_are_those_of_the_clusters_that_weigh(sizes: list[int], degrees: int) -> None:
    assert cluster_degrees(np.array(sizes, dtype=float)) == degrees
    assert len(sizes) < 2 or by_matrix(np.array(sizes, dtype=float)) == degrees


def test_intervals_equal_a_slow_computation() -> None:
    draws = np.random.default_rng(2)
    compared = 0
    for _ in range(20):
        size = int(draws.integers(12, 40))
        groups = draws.integers(0, 8, size) // draws.integers(1, 3, size)
        rates, others = draws.integers(0, 5, size) / 4, draws.integers(0, 5, size) / 4
        rate = rate_interval(rates, groups)
        if rate is None:
            assert by_matrix(np.array(list(Counter(groups.tolist()).values()), dtype=float)) < 2
            continue
        compared += 1
        low, high = slowly(rates.tolist(), groups.tolist(), [(0, 2), (1, 2)])
        assert (rate.low, rate.high) == pytest.approx((max(0.0, low), min(1.0, high)))
        difference = difference_interval(rates - others, groups)
        low, high = slowly((rates - others).tolist(), groups.tolist(), [(-1, 1), (1, 1)])
        assert difference is not None
        assert (difference.low, difference.high) == pytest.approx((max(-1.0, low), min(1.0, high)))
    assert compared > 10


def test_many_prompts_give_the_textbook_interval() -> None:
    """Mean and standard error of 4,000 independent prompts; the made-up ones weigh nothing there."""
    values = np.random.default_rng(0).choice([-0.5, 0.0, 0.25, 1.0], size=4000)
    spread = difference_interval(values, np.arange(4000))
    assert spread is not None
    error = values.std(ddof=1) / math.sqrt(4000)
    assert spread.low == pytest.approx(values.mean() - 1.96 * error, abs=3e-4)  # two of 4,002 prompts
    assert spread.high == pytest.approx(values.mean() + 1.96 * error, abs=2e-4)


def test_a_repeated_prompt_is_no_second_observation() -> None:
    values = np.random.default_rng(0).choice([-0.5, 0.0, 0.5, 1.0], size=200)
    once = difference_interval(values, np.arange(200))
    as_groups = difference_interval(np.repeat(values, 5), np.repeat(np.arange(200), 5))
    as_prompts = difference_interval(np.repeat(values, 5), np.arange(1000))
    assert once and as_groups and as_prompts
    width = once.high - once.low
    assert as_groups.high - as_groups.low == pytest.approx(width, rel=0.02)  # the made-up prompts' part
    assert as_prompts.high - as_prompts.low < 0.5 * width


REPETITIONS = 2000
# Nominal is 95 %. 2,000 repetitions have a standard error of 0.5 points; below 93 % the method would be at fault, not
# chance. It may cover more: the made-up clusters widen small holdouts.
LEAST_COVERAGE = 0.93
UNEQUAL = {
    "some large": [20] * 4 + [5] * 20,
    "half in large": [10] * 10 + [1] * 100,
    "a ramp": list(range(1, 21)),
    "five weigh most": [30] * 5 + [1] * 30,
    "one weighs a third": [30] + [5] * 14,
}


def coverage(sizes: list[int], truth: float, draw: Callable[[], Any], interval: Any = difference_interval) -> float:
    """Share of intervals that hold the truth. draw: values [P] of one holdout."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    covered = 0
    for _ in range(REPETITIONS):
        spread = interval(draw(), groups)
        assert spread is not None
        covered += spread.low <= truth <= spread.high
    print(f"{len(sizes)} clusters, truth {truth:.3f}: covered {covered / REPETITIONS:.1%}")
    return covered / REPETITIONS


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize(
    "sizes", [[1] * 12, [1] * 40, [4] * 15, *UNEQUAL.values()], ids=["12x1", "40x1", "15x4", *UNEQUAL]
)
def test_coverage_of_paired_differences(sizes: list[int]) -> None:
    """4 samples a prompt, prompts of all difficulties, arms that are right on the same ones more often than not."""
    draws = np.random.default_rng(7)
    truth = 0.08

    def holdout() -> Any:
        easy = 0.9 * np.repeat(draws.beta(0.5, 0.8, size=len(sizes)), sizes)  # difficulty is shared inside a group
        return (draws.binomial(4, easy + truth) - draws.binomial(4, easy)) / 4

    assert coverage(sizes, truth, holdout) > LEAST_COVERAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "chance"),
    [
        ([20] * 10, 0.05), ([20] * 20, 0.05), ([5] * 30, 0.02), ([20] * 20, 0.1), ([5] * 30, 0.1), ([1] * 40, 0.1),
        *((sizes, 0.1) for sizes in UNEQUAL.values()),
    ],
    ids=["10x20", "20x20", "30x5", "20x20 more", "30x5 more", "40x1", *UNEQUAL],
)  # fmt: skip
def test_coverage_where_whole_clusters_differ_and_few_do(sizes: list[int], chance: float) -> None:
    """A cluster is won as a whole with a small chance, none is lost."""
    draws = np.random.default_rng(9)
    won = coverage(sizes, chance, lambda: np.repeat((draws.random(len(sizes)) < chance).astype(float), sizes))
    assert won > LEAST_COVERAGE


def test_made_up_prompts_in_place_of_clusters_would_cover_too_little() -> None:
    """The failing counterpart: the same holdout with made-up clusters of one prompt each covers half of the time."""
    draws = np.random.default_rng(9)
    covered = 0
    for _ in range(REPETITIONS):
        values = 20.0 * (draws.random(10) < 0.05)  # sums of ten clusters of twenty
        centre = values.sum() / 202.0
        squares = ((values - 20.0 * centre) ** 2).sum() + (1 - centre) ** 2 + (1 + centre) ** 2
        half = student_quantile(0.975, 9) * math.sqrt(squares * 12 / 11) / 202.0
        covered += centre - half <= 0.05 <= centre + half
    assert covered / REPETITIONS < 0.6


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize("sizes", [[20] * 10, [1] * 40, UNEQUAL["some large"], UNEQUAL["five weigh most"]], ids=len)
@pytest.mark.parametrize(("right", "wrong"), [(0.2, 0.2), (0.1, 1.0)])
def test_coverage_of_rates_that_differ_between_clusters(sizes: list[int], right: float, wrong: float) -> None:
    draws = np.random.default_rng(11)
    rates = coverage(
        sizes,
        right / (right + wrong),
        lambda: draws.binomial(4, np.repeat(draws.beta(right, wrong, len(sizes)), sizes)) / 4,
        rate_interval,
    )
    assert rates > LEAST_COVERAGE


@pytest.mark.parametrize("sizes", [[100, 5, 5, 5, 5], [60, 20, 5, 5, 5, 5], [24] + [1] * 76])
def test_one_large_cluster_is_too_few_however_many_prompts(sizes: list[int]) -> None:
    """One patient gives most of the holdout, or most of its variance: nothing can be said, whatever it shows.

    The failing counterpart: t with one degree less than there are clusters shows an effect that is not there in more
    than 7 % of cases (5 % are nominal), and in half of them where one patient gives nearly everything.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    assert difference_interval(np.ones(len(groups)), groups) is None
    assert rate_interval(np.ones(len(groups)), groups) is None
    draws = np.random.default_rng(10)
    shown = 0
    for _ in range(REPETITIONS):
        effects = draws.normal(0.0, 0.2, len(sizes))
        values = np.repeat(effects, sizes)
        deviations = np.array(sizes) * (effects - values.mean())
        error = math.sqrt(float(deviations @ deviations) * len(sizes) / (len(sizes) - 1)) / len(values)
        shown += abs(values.mean()) > student_quantile(0.975, len(sizes) - 1) * error
    assert shown / REPETITIONS > (0.45 if sizes[0] == 100 else 0.07)


def test_coverage_where_hardly_any_prompt_differs() -> None:
    """Two prompts in a hundred are won, none lost: the plain t interval covers 45 % here, since most samples of 30 show
    one such prompt or none."""
    draws = np.random.default_rng(8)
    covered = plain = 0
    for _ in range(REPETITIONS):
        values = (draws.random(30) < 0.02).astype(float)
        spread = difference_interval(values, np.arange(30))
        assert spread is not None
        covered += spread.low <= 0.02 <= spread.high
        half = 2.045 * values.std(ddof=1) / math.sqrt(30)
        plain += values.mean() - half <= 0.02 <= values.mean() + half
    assert covered / REPETITIONS > LEAST_COVERAGE
    assert plain / REPETITIONS < 0.6


def test_fewer_than_three_clusters_have_no_interval() -> None:
    assert rate_interval(np.array([1.0, 0.0, 1.0]), np.zeros(3, dtype=int)) is None
    assert difference_interval(np.array([]), np.array([], dtype=int)) is None
    assert rate_interval(np.array([1.0, 0.0]), np.array([3, 9])) is None
    three = rate_interval(np.array([1.0, 0.0, 1.0]), np.array([3, 9, 4]))
    assert three is not None and (three.low, three.high) == (0.0, 1.0)


def found_for(federated: int, local_only: int, prompts: int = 60, groups: int = 60) -> dict[str, Any]:
    """Everybody is right on a third of 4 samples or so; so many more right ones of each prompt for two arms."""
    base = [place % 3 for place in range(prompts)]
    topics = tuple("long topic name that fills a line" if place < prompts - 5 else "few" for place in range(prompts))
    correct = {"base": base, "local_only": [count + local_only for count in base]}
    correct["federated"] = [count + federated for count in base]
    return compare(
        Holdout(topics, tuple(place % groups for place in range(prompts)), 4),
        {arm: Answers(tuple(correct[arm]), tuple(int(count > 1) for count in correct[arm])) for arm in ARMS},
    )


@pytest.mark.parametrize(
    ("federated", "local_only", "outcome", "words"),
    [
        (2, 0, "helped", "joining helped: +50.0 points ["),
        (0, 2, "hurt", "joining hurt: -50.0 points ["),
        (1, 1, "no_difference", "no difference to training alone that this holdout can show: +0.0 points ["),
    ],
)
def test_verdicts(federated: int, local_only: int, outcome: str, words: str) -> None:
    found = found_for(federated, local_only)
    assert found["verdict"]["outcome"] == outcome
    assert found["verdict"]["sentence"].startswith(words)
    # A holdout on which nobody differs still says how little it can show: more than nothing, less than everything.
    assert 0.02 < found["verdict"]["detectable"] < 0.2
    assert found["holdout"] == {"prompts": 60, "groups": 60, "samples_per_prompt": 4}
    means = {name: row["mean"] for name, row in found["differences"].items()}
    assert means == {
        "federated_minus_local_only": (federated - local_only) / 4,
        "federated_minus_base": federated / 4,
        "local_only_minus_base": local_only / 4,
    }
    assert found["arms"]["base"]["pass_at_1"] == 0.25
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_few_prompts_are_too_few() -> None:
    found = found_for(2, 0)
    few = found["per_topic"]["few"]
    assert few["prompts"] == 5
    assert [row["interval"] for row in (*few["arms"].values(), *few["differences"].values())] == [None] * 6
    assert found["per_topic"]["long topic name that fills a line"]["arms"]["base"]["interval"] is not None
    for groups in (1, 2):
        one_patient = found_for(2, 0, groups=groups)
        assert one_patient["verdict"] == {
            "outcome": "too_few",
            "detectable": None,
            "sentence": "too few holdout prompts, or groups of them, to say whether joining helped",
        }
        assert one_patient["differences"]["federated_minus_base"]["interval"] is None


@pytest.mark.parametrize("groups", [60, 1])
def test_the_text_fits_eighty_columns_and_says_what_it_is_about(groups: int) -> None:
    found = found_for(2, 0, groups=groups)
    found["holdout"] |= {"left_out_overlong": 0, "left_out_public": 3 * (groups == 1)}
    said = {"run": "r1", "method": "pubswap", "adapter": "ab" * 32, "isolation": "namespaces", "definition": DEFINITION}
    text = benefit_text({**found, **said})
    assert max(map(len, text.splitlines())) <= 80
    assert "isolation namespaces" in " ".join(text.split())
    assert "nobody else's answers" in " ".join(text.split())
    assert ("3 also public and left out" in " ".join(text.split())) is (groups == 1)
    assert "too long" not in text
    assert ("too few" in text.splitlines()[5]) is (groups == 1)
    assert "never sent" in text

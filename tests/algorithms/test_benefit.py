"""The arithmetic of `silo report benefit`: quantiles from a table, intervals by hand and by simulation, verdicts."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from fedsilo.launch.cli_report import benefit_text
from silo.report.benefit import (
    ARMS,
    DEFINITION,
    Answers,
    Holdout,
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
    """The same interval prompt by prompt, the covariances inside each group added up one by one."""
    everyone = [(value, 1.0, f"group {group}") for value, group in zip(values, groups, strict=True)]
    everyone += [(value, weight, "made up") for value, weight in made_up]
    size = sum(weight for _, weight, _ in everyone)
    centre = sum(value * weight for value, weight, _ in everyone) / size
    variance = 0.0
    for value, weight, group in everyone:
        for other, _, its_group in everyone:
            if group == its_group != "made up":
                variance += (value - centre) * (other - centre)
        if group == "made up":
            variance += weight * (value - centre) ** 2
    parts = len(set(groups)) + sum(weight for _, weight in made_up)
    half = student_quantile(0.975, len(set(groups)) - 1) * math.sqrt(variance * parts / (parts - 1)) / size
    return centre - half, centre + half


def test_intervals_equal_a_slow_computation() -> None:
    draws = np.random.default_rng(2)
    for _ in range(20):
        size = int(draws.integers(6, 40))
        groups = draws.integers(0, 8, size)
        rates, others = draws.integers(0, 5, size) / 4, draws.integers(0, 5, size) / 4
        if len(set(groups.tolist())) < 2:
            continue
        rate = rate_interval(rates, groups)
        low, high = slowly(rates.tolist(), groups.tolist(), [(0, 2), (1, 2)])
        assert rate is not None
        assert (rate.low, rate.high) == pytest.approx((max(0.0, low), min(1.0, high)))
        difference = difference_interval(rates - others, groups)
        low, high = slowly((rates - others).tolist(), groups.tolist(), [(-1, 0.5), (1, 0.5), (0, 1)])
        assert difference is not None
        assert (difference.low, difference.high) == pytest.approx((max(-1.0, low), min(1.0, high)))


def test_many_prompts_give_the_textbook_interval() -> None:
    """Mean and standard error of 4,000 independent prompts; the made-up ones weigh nothing there."""
    values = np.random.default_rng(0).choice([-0.5, 0.0, 0.25, 1.0], size=4000)
    spread = difference_interval(values, np.arange(4000))
    assert spread is not None
    error = values.std(ddof=1) / math.sqrt(4000)
    assert spread.low == pytest.approx(values.mean() - 1.96 * error, abs=2e-4)  # two of 4,002 prompts
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


@pytest.mark.parametrize(("clusters", "size"), [(12, 1), (40, 1), (15, 4)])
def test_coverage_of_paired_differences(clusters: int, size: int) -> None:
    """4 samples a prompt, prompts of all difficulties, arms that are right on the same ones more often than not.

    Nominal is 95 %. 2,000 repetitions have a standard error of 0.5 points; below 93 % the method would be at fault,
    not chance. It may cover more: the made-up prompts widen small holdouts.
    """
    draws = np.random.default_rng(7)
    truth, covered = 0.08, 0
    for _ in range(2000):
        patient = draws.beta(0.5, 0.8, size=clusters)  # difficulty is shared inside a group
        easy = 0.9 * np.repeat(patient, size)
        groups = np.repeat(np.arange(clusters), size)
        one, other = (draws.binomial(4, chance) / 4 for chance in (easy + truth, easy))
        spread = difference_interval(one - other, groups)
        assert spread is not None
        covered += spread.low <= truth <= spread.high
    assert covered / 2000 > 0.93


def test_coverage_where_hardly_any_prompt_differs() -> None:
    """Two prompts in a hundred are won, none lost: the plain t interval covers 45 % here, since most samples of 30 show
    one such prompt or none."""
    draws = np.random.default_rng(8)
    covered = plain = 0
    for _ in range(2000):
        values = (draws.random(30) < 0.02).astype(float)
        spread = difference_interval(values, np.arange(30))
        assert spread is not None
        covered += spread.low <= 0.02 <= spread.high
        half = 2.045 * values.std(ddof=1) / math.sqrt(30)
        plain += values.mean() - half <= 0.02 <= values.mean() + half
    assert covered / 2000 > 0.93
    assert plain / 2000 < 0.6


def test_fewer_than_two_clusters_have_no_interval() -> None:
    assert rate_interval(np.array([1.0, 0.0, 1.0]), np.zeros(3, dtype=int)) is None
    assert difference_interval(np.array([]), np.array([], dtype=int)) is None
    two = rate_interval(np.array([1.0, 0.0]), np.array([3, 9]))
    assert two is not None and (two.low, two.high) == (0.0, 1.0)


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
    one_patient = found_for(2, 0, groups=1)
    assert one_patient["verdict"] == {
        "outcome": "too_few",
        "detectable": None,
        "sentence": "too few holdout prompts to say whether joining helped",
    }
    assert one_patient["differences"]["federated_minus_base"]["interval"] is None


@pytest.mark.parametrize("groups", [60, 1])
def test_the_text_fits_eighty_columns_and_says_what_it_is_about(groups: int) -> None:
    found = found_for(2, 0, groups=groups)
    found["holdout"]["left_out_overlong"] = 0
    said = {"run": "r1", "method": "pubswap", "adapter": "ab" * 32, "isolation": "namespaces", "definition": DEFINITION}
    text = benefit_text({**found, **said})
    assert max(map(len, text.splitlines())) <= 80
    assert "isolation namespaces" in " ".join(text.split())
    assert "nobody else's answers" in " ".join(text.split())
    assert ("too few" in text.splitlines()[5]) is (groups == 1)
    assert "never sent" in text

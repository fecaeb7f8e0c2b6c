"""The estimator on figures that are made by hand: what it says is fresh, stale, a share, or not to be told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from silo.config import Rollout
from silo.trainer import agreement
from silo.trainer.adapters.lora import adapter_name
from silo.trainer.agreement import (
    BASE,
    PREVIOUS,
    AnswerFigures,
    Finding,
    Limits,
    Regression,
    Watch,
    Window,
    divergence,
    limits_from,
    marker_effect,
    student_quantile,
)

NOISE = 0.02  # of bfloat16, in nats per token
STEP = 5e-4  # what one step at lr 1e-5 moves


def answers(
    seed: int,
    *,
    stale: float = 0.0,
    seen: float = 1.0,
    answers: int = 64,
    tokens: int = 64,
    noise: float = NOISE,
    step: float = STEP,
) -> list[AnswerFigures]:
    """One step. stale: how much of the previous adapter the engine computes. seen: by bfloat16, of any adapter."""
    draws = np.random.default_rng(seed)
    made = []
    for _ in range(answers):
        exact = draws.normal(-2, 1, tokens)
        moved = step * draws.standard_t(4, tokens)
        # rounding of one answer hangs together: part of it is the answer's own, and some answers round worse
        rounding, own = (
            noise * draws.uniform(0.5, 1.5) * (draws.standard_t(5, tokens) + draws.normal()) for _ in range(2)
        )
        trainer = exact + own
        made.append(
            AnswerFigures(
                engine=exact + rounding + stale * seen * moved,
                trainer=trainer,
                trainer_base=trainer + seen * 10 * moved + noise * draws.normal(size=tokens),
                exact=exact,
                others={PREVIOUS: exact + moved, BASE: exact + 10 * moved},
            )
        )
    return made


def found(steps: Sequence[Sequence[AnswerFigures]], other: str = PREVIOUS) -> Finding:
    window = Window()
    for step in steps:
        window.add(step)
    [finding] = [each for each in window.findings() if each.other == other]
    return finding


@pytest.mark.parametrize("stale", [0.0, 1.0, 3.0, 0.25])
def test_the_coefficient_is_how_much_of_the_other_adapter_there_is(stale: float) -> None:
    finding = found([answers(seed, stale=stale) for seed in range(20)])
    assert finding.tokens == 20 * 64 * 64
    assert abs(finding.coefficient - stale) < 4 * finding.error  # 4 errors: once in 16 000 seeds


@pytest.mark.slow
def test_one_step_is_told_from_none_only_with_enough_tokens() -> None:
    """In bfloat16 4 000 tokens cannot show one step at lr 1e-5, and say so; 600 000 show it."""
    few = found([answers(0, stale=1.0)])
    assert few.tokens == 4096
    assert not few.is_alarm and few.detectable > 1
    assert found([answers(1, stale=1.3 * few.detectable)]).is_alarm  # that much of a fault the same tokens do show
    many = [answers(seed, stale=1.0) for seed in range(150)]
    assert found(many).is_alarm
    fresh = found([answers(seed) for seed in range(150)])
    assert not fresh.is_alarm and fresh.detectable <= 1 and fresh.is_fresh


@pytest.mark.slow
def test_a_share_that_bfloat16_does_not_see_is_measured_and_taken_into_account() -> None:
    steps = [answers(seed, stale=1.0, seen=0.3) for seed in range(100)]
    finding = found(steps)
    assert finding.visible == pytest.approx(0.3, abs=0.03)
    assert abs(finding.coefficient - 0.3) < 4 * finding.error
    seen_whole = found([answers(seed, stale=1.0) for seed in range(100)])
    assert finding.detectable == pytest.approx(seen_whole.detectable / 0.3, rel=0.2)


def test_x_in_bfloat16_would_accuse_a_fresh_engine() -> None:
    """Why the exact pass: the trainer's own rounding stands in x and in y, and makes a coefficient of one half."""
    naive, exact = Regression(), Regression()
    draws = np.random.default_rng(3)
    for seed in range(20):
        made = answers(seed)
        y = [one.engine - one.trainer for one in made]
        previous = [one.others[PREVIOUS] + NOISE * draws.standard_t(5, len(one.exact)) for one in made]
        naive.add([other - one.trainer for other, one in zip(previous, made, strict=True)], y)
        exact.add([one.others[PREVIOUS] - one.exact for one in made], y)
    accused, cleared = naive.finding(PREVIOUS), exact.finding(PREVIOUS)
    assert accused is not None and cleared is not None
    assert accused.is_alarm and 0.3 < accused.coefficient < 0.8
    assert not cleared.is_alarm


def test_slope_and_error_equal_a_slow_loop() -> None:
    made = answers(5, answers=4, tokens=3)
    xs = [[float(value) for value in one.others[PREVIOUS] - one.exact] for one in made]
    ys = [[float(value) for value in one.engine - one.trainer] for one in made]
    mean_x = sum(map(sum, xs)) / 12
    mean_y = sum(map(sum, ys)) / 12
    top = bottom = 0.0
    for row_x, row_y in zip(xs, ys, strict=True):
        for x, y in zip(row_x, row_y, strict=True):
            top += (x - mean_x) * (y - mean_y)
            bottom += (x - mean_x) ** 2
    slope = top / bottom
    squares = 0.0
    for row_x, row_y in zip(xs, ys, strict=True):
        score = 0.0
        for x, y in zip(row_x, row_y, strict=True):
            score += (x - mean_x) * (y - mean_y - slope * (x - mean_x))
        squares += score * score
    finding = found([made])
    assert finding.coefficient == pytest.approx(slope, rel=1e-9)
    assert finding.error == pytest.approx(math.sqrt(squares * 4 / 3) / bottom, rel=1e-9)
    assert finding.quantile == student_quantile(agreement.ALARM_QUANTILE, 3)


def test_each_step_has_an_intercept_of_its_own() -> None:
    """An engine that is off by a constant in one step does not make two steps look stale."""
    shifted = [
        AnswerFigures(one.engine + 5, one.trainer, one.trainer_base, one.exact - 5, one.others) for one in answers(1)
    ]
    plain, off = found([answers(0), answers(1)]), found([answers(0), shifted])
    assert off.coefficient == pytest.approx(plain.coefficient, rel=1e-6)


@pytest.mark.slow
def test_false_alarms_are_as_rare_as_the_error_says() -> None:
    """Rounding with heavy tails that hangs together within an answer: 2 errors off in 4.6 of 100, none at the edge."""
    beyond, alarms, runs = 0, 0, 600
    for seed in range(runs):
        finding = found([answers(1000 + seed, answers=32, tokens=32)])
        beyond += abs(finding.coefficient) > 2 * finding.error
        alarms += finding.is_alarm
    assert alarms == 0
    # 600 draws of a share of 0.046 to 0.055 (Student, 31 answers): three binomial errors either way
    assert 0.02 < beyond / runs < 0.083


@pytest.mark.slow
def test_an_error_that_forgets_answers_would_be_too_small() -> None:
    """The failing counterpart: tokens as if they were independent, on an x that hangs together as well."""
    ratios = []
    for seed in range(100):
        draws = np.random.default_rng(seed)
        own = [draws.normal(size=2) for _ in range(30)]
        x = [one[0] + 0.1 * draws.normal(size=40) for one in own]
        y = [one[1] + 0.1 * draws.normal(size=40) for one in own]
        whole, loose = Regression(), Regression()
        whole.add(x, y)
        loose.add([each for one in x for each in one[:, None]], [each for one in y for each in one[:, None]])
        first, second = whole.finding(PREVIOUS), loose.finding(PREVIOUS)
        assert first is not None and second is not None
        ratios.append((first.coefficient / first.error, second.coefficient / second.error))
    assert sum(abs(ratio) > 3 for ratio, _ in ratios) <= 3
    assert sum(abs(ratio) > 3 for _, ratio in ratios) > 30


@pytest.mark.parametrize(("normal", "freedom", "table"), [(1.96, 5, 2.571), (1.96, 30, 2.042), (3.0902, 10, 4.144)])
def test_student_quantiles_are_those_of_the_tables(normal: float, freedom: int, table: float) -> None:
    assert student_quantile(normal, freedom) == pytest.approx(table, rel=0.01)  # Wallace's approximation


def test_two_answers_are_no_proof() -> None:
    window = Window()
    window.add(answers(0, answers=2, tokens=5000, stale=1000.0))
    assert window.findings() == []
    assert found([answers(0, answers=3, tokens=5000, stale=1000.0)]).quantile > 100


def test_an_adapter_that_has_not_moved_is_not_compared_with_itself() -> None:
    still = [
        AnswerFigures(one.engine, one.trainer, one.trainer_base, one.exact, {PREVIOUS: one.exact + 1e-7})
        for one in answers(0)
    ]
    window = Window()
    window.add(still)
    assert window.findings() == []


# ---- windows -----------------------------------------------------------------------------------------


def test_nothing_is_judged_before_a_window_is_full() -> None:
    watch = Watch(Limits())
    made = answers(0, stale=100.0, answers=60)  # 3 840 tokens
    assert watch.add(made) == []
    assert watch.figures() == {"agreement_tokens": 3840.0}
    alarms = {alarm.other: alarm for alarm in watch.add(made)}
    assert watch.figures()["stale_previous"] == pytest.approx(100, rel=0.05)
    assert "rollout before" in alarms[PREVIOUS].reason() and "7680 tokens of 120 answers" in alarms[PREVIOUS].reason()


@pytest.mark.slow
def test_a_small_fault_adds_up_over_windows_and_a_fresh_run_is_never_stopped() -> None:
    stale, fresh = Watch(Limits()), Watch(Limits())
    stopped = next((step for step in range(200) if stale.add(answers(step, stale=1.0))), None)
    assert stopped is not None and stopped > 10  # no single window could tell
    assert all(fresh.add(answers(1000 + step)) == [] for step in range(200))
    assert fresh.figures()["stale_detectable_steps"] <= 1.5


@pytest.mark.slow
def test_a_fault_that_begins_late_is_seen_in_the_short_window() -> None:
    watch = Watch(Limits())
    for step in range(100):
        assert watch.add(answers(step)) == []
    assert watch.add(answers(500, stale=30.0)) != []


def test_what_was_decided_is_forgotten() -> None:
    """In float32 one window decides, and the next begins empty."""
    watch = Watch(Limits())
    assert watch.add(answers(0, noise=1e-7)) == []
    assert watch.figures()["agreement_tokens"] == 0
    assert watch.figures()["stale_detectable_steps"] == pytest.approx(agreement.COEFFICIENT_MIN)


# ---- divergence, marker, name ------------------------------------------------------------------------


def test_divergence_equals_a_slow_loop() -> None:
    made = answers(7, answers=5, tokens=4, noise=0.3)
    total, count = 0.0, 0
    for one in made:
        for engine, trainer in zip(one.engine.tolist(), one.trainer.tolist(), strict=True):
            total += math.exp(trainer - engine) - (trainer - engine) - 1
            count += 1
    kl = divergence([one.engine for one in made], [one.trainer for one in made])
    assert kl.kl == pytest.approx(total / count)
    assert 0 < kl.error < kl.kl * 2


def test_one_strange_token_is_not_a_wrong_model() -> None:
    made = [np.full(50, -1.0) for _ in range(40)]
    other = [row.copy() for row in made]
    other[3][10] += 4.0
    assert divergence(made, other).kl > 0.02
    assert not divergence(made, other).exceeds(0.02)
    assert divergence(made, [row + 0.5 for row in made]).exceeds(0.02)
    assert math.isfinite(divergence(made, [row + 900 for row in made]).kl)


@pytest.mark.parametrize(("rounding", "limit"), [(0.0, 1e-3), (2e-4, 2e-3), (1.0, 0.02)])
def test_the_limit_goes_with_the_trainers_own_rounding(rounding: float, limit: float) -> None:
    assert Limits().kl_limit(rounding) == pytest.approx(limit)


def test_a_sites_configuration_sets_the_limits() -> None:
    config = Rollout(agreement_share=0.5, kl_max=0.1, marker_pushes=7)
    told = config.model_dump(include={"agreement_share", "kl_max", "marker_pushes"})
    assert limits_from(told) == Limits(share=0.5, kl_max=0.1, marker_pushes=7)
    assert limits_from({}) == Limits() == limits_from(Rollout().model_dump(include=set(told)))


@pytest.mark.parametrize(("towards", "shows"), [(1.0, True), (0.9, True), (0.5, False), (0.0, False)])
def test_a_marker_shows_or_does_not(towards: float, shows: bool) -> None:
    marker, in_use = np.zeros(40), np.full(40, -3.0)
    assert marker_effect((1 - towards) * in_use + towards * marker, marker, in_use).has_shown is shows


def test_a_marker_that_changes_nothing_proves_nothing() -> None:
    assert not marker_effect(np.zeros(4), np.zeros(4), np.full(4, 0.01)).has_shown


FACTORS: Mapping[str, np.ndarray] = {"a.lora_A": np.ones((2, 3), np.float32), "a.lora_B": np.zeros((4, 2), np.float32)}


@pytest.mark.parametrize(
    ("other", "scale"),
    [
        ({**FACTORS, "a.lora_B": FACTORS["a.lora_B"] + np.float32(1e-30)}, 2.0),
        ({**FACTORS, "a.lora_A": np.ones((3, 2), np.float32)}, 2.0),
        ({"b.lora_A": FACTORS["a.lora_A"], "a.lora_B": FACTORS["a.lora_B"]}, 2.0),
        (FACTORS, 4.0),
    ],
    ids=["value", "shape", "name", "scale"],
)
def test_an_adapters_name_is_all_of_it(other: Mapping[str, np.ndarray], scale: float) -> None:
    assert adapter_name(other, scale) != adapter_name(FACTORS, 2.0)
    turned = {name: FACTORS[name] for name in sorted(FACTORS, reverse=True)}
    assert adapter_name(turned, 2.0) == adapter_name(FACTORS, 2.0)

"""The objective against a slow loop in plain Python, and against closed forms."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from silo.trainer import grpo
from silo.trainer.decoder import token_logp
from tests.algorithms.ratios import clipped_of, gain_of

pytestmark = pytest.mark.torch
CLIP = {"clip_low": 0.2, "clip_high": 0.25}


@dataclass(frozen=True)
class Settings:
    std: str = "sample"
    aggregation: str = "response-mean"
    dual_clip: float | None = None
    kl: float = 0.0
    mask_truncated: bool = False


@dataclass(frozen=True)
class SlowAnswer:
    logp: list[float]
    old: list[float]
    reference: list[float]
    reward: float
    finished: bool


def slow_loss(groups: list[list[SlowAnswer]], settings: Settings) -> float:
    """docs/explain/objective.md read aloud, token by token."""
    per_token: list[list[list[float]]] = []
    for group in groups:
        rewards = [answer.reward for answer in group]
        mean = sum(rewards) / len(rewards)
        squares = sum((reward - mean) ** 2 for reward in rewards)
        if max(rewards) - min(rewards) < 1e-12:
            advantages = [0.0] * len(rewards)
        else:
            deviation = math.sqrt(squares / (len(rewards) - 1 if settings.std == "sample" else len(rewards)))
            advantages = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
        terms = []
        for answer, advantage in zip(group, advantages, strict=True):
            row = []
            for new, old, reference in zip(answer.logp, answer.old, answer.reference, strict=True):
                rho = math.exp(new - old)
                gain = min(rho * advantage, min(max(rho, 0.8), 1.25) * advantage)
                if settings.dual_clip is not None and advantage < 0:
                    gain = max(gain, settings.dual_clip * advantage)
                kl = math.exp(reference - new) - (reference - new) - 1
                row.append(-gain + settings.kl * kl)
            terms.append(row if answer.finished or not settings.mask_truncated else [])
        per_token.append(terms)
    if settings.aggregation == "token-mean":
        flat = [term for terms in per_token for row in terms for term in row]
        return sum(flat) / max(1, len(flat))
    return sum(sum(sum(row) / len(row) if row else 0.0 for row in terms) / len(terms) for terms in per_token) / len(
        per_token
    )


def fast_loss(groups: list[list[SlowAnswer]], settings: Settings) -> float:
    rows = [(place, answer) for place, group in enumerate(groups) for answer in group]

    def joined(name: str) -> torch.Tensor:
        return torch.tensor([value for _, answer in rows for value in getattr(answer, name)])

    advantages = torch.cat(
        [
            grpo.group_advantages(
                torch.tensor([answer.reward for answer in group]),
                std=settings.std,  # type: ignore[arg-type]
                epsilon=1e-6,
            )
            for group in groups
        ]
    )
    weights = grpo.row_weights(
        torch.tensor([len(answer.logp) for _, answer in rows]),
        torch.tensor([len(groups[place]) for place, _ in rows]),
        len(groups),
        settings.aggregation,  # type: ignore[arg-type]
        kept=torch.tensor([answer.finished or not settings.mask_truncated for _, answer in rows]),
    )
    lengths = torch.tensor([len(answer.logp) for _, answer in rows])
    of_tokens, advantages = weights.repeat_interleave(lengths), advantages.repeat_interleave(lengths)  # [M]
    logp, old, reference = joined("logp"), joined("old"), joined("reference")
    gain = gain_of(logp, old, advantages, **CLIP, dual_clip=settings.dual_clip)
    return float(((settings.kl * grpo.k3(logp, reference) - gain) * of_tokens).sum())


def random_groups(seed: int) -> list[list[SlowAnswer]]:
    draws = random.Random(seed)

    def answer() -> SlowAnswer:
        length = draws.choice([0, 1, 2, 5, 9])
        logp = [draws.uniform(-4, -0.1) for _ in range(length)]
        return SlowAnswer(
            logp,
            [value + draws.gauss(0, 0.4) for value in logp],
            [value + draws.gauss(0, 0.4) for value in logp],
            float(draws.random() < 0.5),
            draws.random() < 0.7,
        )

    return [[answer() for _ in range(draws.choice([1, 3, 8]))] for _ in range(4)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(std="population"),
        Settings(aggregation="token-mean"),
        Settings(dual_clip=3.0),
        Settings(kl=0.5),
        Settings(mask_truncated=True),
        Settings(aggregation="token-mean", mask_truncated=True, kl=0.1),
    ],
)
def test_loss_equals_the_slow_loop(seed: int, settings: Settings) -> None:
    groups = random_groups(seed)
    expected = slow_loss(groups, settings)
    assert fast_loss(groups, settings) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_answers_changes_nothing(seed: int) -> None:
    groups = random_groups(seed)
    shuffled = [list(reversed(group)) for group in reversed(groups)]
    assert fast_loss(shuffled, Settings(kl=0.1)) == pytest.approx(fast_loss(groups, Settings(kl=0.1)), rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gain", "gradient_is_zero"),
    [(1.0, 1.5, 1.25, True), (1.0, 0.5, 0.5, False), (-1.0, 0.5, -0.8, True), (-1.0, 1.5, -1.5, False)],
)
def test_a_clip(advantage: float, ratio: float, gain: float, gradient_is_zero: bool) -> None:
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    value = gain_of(logp, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    value.sum().backward()
    assert value.item() == pytest.approx(gain)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(0.0 if gradient_is_zero else advantage * ratio)
    clipped = clipped_of(logp.detach(), torch.zeros(1), torch.tensor([advantage]), **CLIP)
    assert clipped.item() is gradient_is_zero


def test_dual_clip_bounds_only_what_pushes_down() -> None:
    logp = torch.log(torch.tensor([10.0, 10.0]))
    gain = gain_of(logp, torch.zeros(2), torch.tensor([-1.0, 1.0]), **CLIP, dual_clip=3.0)
    assert gain.tolist() == pytest.approx([-3.0, 1.25])


def test_clipped_is_what_has_no_gradient_with_the_dual_clip_too() -> None:
    ratios = [0.5, 0.9, 1.1, 1.5, 2.9, 3.1, 10.0]
    for dual_clip in (None, 3.0):
        logp = torch.tensor(ratios * 2).log().requires_grad_()
        advantages = torch.tensor([-1.0] * len(ratios) + [1.0] * len(ratios))
        options = {**CLIP, "dual_clip": dual_clip}
        gain_of(logp, torch.zeros_like(logp), advantages, **options).sum().backward()
        clipped = clipped_of(logp.detach(), torch.zeros_like(logp), advantages, **options)
        assert logp.grad is not None
        assert clipped.tolist() == (logp.grad == 0).tolist()
        assert clipped[: len(ratios)].tolist() == [True, *[False] * 4, *[dual_clip is not None] * 2]


def test_b_half_correct() -> None:
    rewards = torch.tensor([1.0] * 4 + [0.0] * 4)
    sample = grpo.group_advantages(rewards, std="sample", epsilon=1e-6)
    population = grpo.group_advantages(rewards, std="population", epsilon=1e-6)
    assert sample.tolist() == pytest.approx([math.sqrt(7 / 8)] * 4 + [-math.sqrt(7 / 8)] * 4, rel=1e-5)
    assert population.tolist() == pytest.approx([1.0] * 4 + [-1.0] * 4, rel=1e-5)


def test_c_one_correct() -> None:
    advantages = grpo.group_advantages(torch.tensor([1.0] + [0.0] * 7), std="population", epsilon=1e-6)
    assert advantages.tolist() == pytest.approx([2.6458] + [-0.3780] * 7, abs=1e-4)


def test_d_first_update_is_the_mean_policy_gradient() -> None:
    """With rho = 1 the gradient on each token's logp is A_k / (K |y_k|) over one prompt."""
    rewards, lengths = [1.0, 0.0, 0.0, 1.0], [3, 1, 2, 5]
    advantages = grpo.group_advantages(torch.tensor(rewards), std="sample", epsilon=1e-6)
    logp = torch.full((sum(lengths),), -1.0, requires_grad=True)
    weights = grpo.row_weights(torch.tensor(lengths), torch.tensor([4] * 4), 1, "response-mean")
    counts = torch.tensor(lengths)
    gain = gain_of(logp, logp.detach(), advantages.repeat_interleave(counts), **CLIP)
    (gain * weights.repeat_interleave(counts)).sum().backward()
    assert logp.grad is not None
    for row, part in enumerate(logp.grad.split(lengths)):
        assert part.tolist() == pytest.approx([advantages[row].item() / (4 * lengths[row])] * lengths[row])


@pytest.mark.parametrize("std", ["sample", "population"])
def test_e_shift_and_scale_of_rewards_change_nothing(std: str) -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.5])
    plain = grpo.group_advantages(rewards, std=std, epsilon=1e-6)  # type: ignore[arg-type]
    shifted = grpo.group_advantages(rewards + 3, std=std, epsilon=1e-6)  # type: ignore[arg-type]
    scaled = grpo.group_advantages(rewards * 5, std=std, epsilon=1e-6)  # type: ignore[arg-type]
    assert shifted.tolist() == pytest.approx(plain.tolist(), abs=1e-5)
    assert scaled.tolist() == pytest.approx(plain.tolist(), abs=1e-5)


def test_g_the_last_token_counts() -> None:
    old = torch.full((3,), -1.0)
    moved = old.clone()
    moved[-1] += 0.1
    gain = gain_of(moved, old, torch.ones(3), **CLIP)
    assert gain.tolist() == pytest.approx([1.0, 1.0, math.exp(0.1)])


@pytest.mark.parametrize("rewards", [[1.0], [0.0], [0.0] * 8, [1.0] * 8])
def test_groups_without_signal_have_exactly_no_advantage(rewards: list[float]) -> None:
    advantages = grpo.group_advantages(torch.tensor(rewards), std="sample", epsilon=1e-6)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_k3_is_never_negative_and_zero_only_where_equal() -> None:
    difference = torch.linspace(-3, 3, 61)
    values = grpo.k3(-difference, torch.zeros(61))
    assert (values >= 0).all()
    assert values[30].item() == pytest.approx(0.0, abs=1e-7)


def test_temperature_divides_logits_before_the_softmax() -> None:
    logits = [2.0, -1.0, 0.5]
    scores = [value / 0.7 for value in logits]
    expected = scores[2] - math.log(sum(math.exp(score) for score in scores))
    # a head that hands on what it reads
    got, spread = token_logp(torch.tensor([logits]), torch.eye(3), torch.tensor([2]), 0.7, with_entropy=True)
    assert got.item() == pytest.approx(expected, rel=1e-6)
    probabilities = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
    entropy = -sum(p * math.log(p) for p in probabilities)
    assert spread is not None and spread.item() == pytest.approx(entropy, rel=1e-6)


def test_fedprox_minimiser() -> None:
    """On (a/2)(x - c)^2 the local minimiser is (a c + mu x_p) / (a + mu)."""
    a, c, mu, start = 2.0, 5.0, 0.5, torch.tensor([1.0])
    x = start.clone().requires_grad_()
    for _ in range(200):
        loss = 0.5 * a * (x - c).square().sum() + grpo.proximal_term([x], [start], mu)
        (gradient,) = torch.autograd.grad(loss, x)
        x = (x - 0.2 * gradient).detach().requires_grad_()
    assert x.item() == pytest.approx((a * c + mu * 1.0) / (a + mu), rel=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [0.1, 25.0, 100.0, 1000.0, -1000.0])
def test_no_log_ratio_makes_a_gradient_that_is_not_finite(advantage: float, distance: float) -> None:
    """exp overflows beyond 88; a clipped token's gradient would be 0 x inf."""
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0 - distance, -1.0])
    gain = gain_of(logp, old, torch.full((2,), advantage), clip_low=0.2, clip_high=0.25, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(gain.sum(), logp)
    assert torch.isfinite(gain).all() and torch.isfinite(gradient).all()
    assert float(gradient[1]) == advantage  # the token beside it is what it would be alone
    if abs(distance) < grpo.LOG_RATIO_MAX:
        assert float(gradient[0]) == pytest.approx(advantage * math.exp(distance), rel=1e-5)
    else:
        assert float(gradient[0]) == 0.0
    kl = grpo.k3(logp, torch.tensor([-1.0 + distance, -1.0]))
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    assert torch.isfinite(kl).all() and torch.isfinite(gradient).all()
    if distance < 0:  # nothing overflows there, and the pull stays
        assert float(gradient[0]) == 1.0

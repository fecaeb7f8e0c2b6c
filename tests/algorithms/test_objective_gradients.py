"""Loss and gradients of the whole update against one loop over tokens, for every option of the objective.

The loop knows nothing of streams, weights, chunks or masks: each answer goes through transformers and peft alone, each
token's term is written down as docs/explain/objective.md says it, and automatic differentiation does the rest. Compared
are both epochs: in the second, taken at the factors that the first has reached, ratios leave the band.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsilo.protocol.plan import Plan
from silo.trainer import grpo
from silo.trainer.grpo import Answer, Group
from tests.algorithms.ratios import gain_of
from tests.algorithms.test_trl_agreement import LEARNING_RATE, WHOLE, Epoch, our_epochs
from tests.algorithms.tiny import make_adapter, make_plan, peft_twin

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
# Both compute in float32 and add in different orders; gradients here are up to about 1 (test_trl_agreement).
TOLERANCE = 1e-5
END = 1


def random_groups(seed: int) -> list[Group]:
    """Ragged prompts and answers, groups of one and of equal rewards among them; some answers are cut off."""
    draws = random.Random(seed)

    def answer() -> Answer:
        ids = [draws.randrange(3, 24) for _ in range(draws.choice([0, 1, 2, 4, 7]))]
        finished = not ids or draws.random() < 0.6
        return Answer((*ids, *([END] if finished else [])), "", finished, float(draws.random() < 0.5))

    sizes = [1, 4, 5, 3]
    made = [
        Group(
            tuple(draws.randrange(3, 24) for _ in range(draws.choice([1, 3, 6]))), tuple(answer() for _ in range(size))
        )
        for size in sizes
    ]
    equal = Group((6, 7), (Answer((4, END), "", True, 1.0), Answer((9, 8, 7), "", False, 1.0)))
    return [*made, equal]


def token_terms(model: Any, group: Group, answer: Answer, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probability and entropy of each token."""
    ids = torch.tensor([[*group.prompt_ids, *answer.ids]])
    logits = model(input_ids=ids).logits[0]
    logps, entropies = [], []
    for place, token in enumerate(answer.ids):
        row = logits[len(group.prompt_ids) - 1 + place] / temperature
        logp = row - row.exp().sum().log()
        logps.append(logp[token])
        entropies.append(-(logp.exp() * logp).sum())
    return logps, entropies


def slow_loss(model: Any, groups: list[Group], plan: Plan, old: dict[tuple[int, int, int], float]) -> Tensor:
    """-J + beta k3 - c_H H, token by token. old: by (group, answer, token); filled where it is empty."""
    settings, temperature = plan.objective, plan.rollout.temperature
    first = not old
    per_group: list[list[list[Tensor]]] = []
    for at, group in enumerate(groups):
        rewards = [answer.reward for answer in group.answers]
        mean = sum(rewards) / len(rewards)
        squares = sum((reward - mean) ** 2 for reward in rewards)
        rows: list[list[Tensor]] = []
        for number, answer in enumerate(group.answers):
            if max(rewards) == min(rewards):
                advantage = 0.0
            else:
                count = len(rewards) - 1 if settings.advantage_std == "sample" else len(rewards)
                advantage = (answer.reward - mean) / (math.sqrt(squares / count) + settings.advantage_epsilon)
            logps, entropies = token_terms(model, group, answer, temperature)
            with torch.no_grad(), model.disable_adapter():
                references, _ = token_terms(model, group, answer, temperature)
            terms = []
            for place, (logp, entropy, reference) in enumerate(zip(logps, entropies, references, strict=True)):
                if first:
                    old[at, number, place] = float(logp.detach())
                ratio = (logp - old[at, number, place]).exp()
                low, high, at_ratio = 1 - settings.clip_low, 1 + settings.clip_high, float(ratio.detach())
                gain = ratio * advantage
                if min(max(at_ratio, low), high) * advantage < at_ratio * advantage:
                    gain = torch.tensor(min(max(at_ratio, low), high) * advantage)
                if settings.dual_clip is not None and advantage < 0 and at_ratio > settings.dual_clip:
                    gain = torch.tensor(settings.dual_clip * advantage)
                k3 = (reference - logp).exp() - (reference - logp) - 1
                terms.append(-gain + settings.kl_coefficient * k3 - settings.entropy_coefficient * entropy)
            rows.append(terms if answer.finished or not settings.mask_truncated else [])
        per_group.append(rows)
    if settings.token_aggregation == "token-mean":
        flat = [term for rows in per_group for terms in rows for term in terms]
        return torch.stack(flat).sum() / len(flat)
    total = torch.zeros(())
    for rows in per_group:
        for terms in rows:
            if terms:
                total = total + torch.stack(terms).sum() / len(terms) / len(rows) / len(per_group)
    return total


def slow_epochs(groups: list[Group], plan: Plan, epochs: list[Epoch]) -> list[Epoch]:
    """The loop at the factors of each epoch."""
    adapter = make_adapter()
    names = sorted(adapter.shape.shapes)
    start = [each.detach().clone() for each in adapter.parameters]
    twin = peft_twin(adapter)
    old: dict[tuple[int, int, int], float] = {}
    found = []
    for epoch in epochs:
        with torch.no_grad():
            for name, live in zip(names, adapter.parameters, strict=True):
                live.copy_(epoch.factors[name])
        loss = slow_loss(twin, groups, plan, old)
        for live, began in zip(adapter.parameters, start, strict=True):
            loss = loss + 0.5 * plan.objective.proximal_mu * (live - began).square().sum()
        gradients = torch.autograd.grad(loss, adapter.parameters)
        found.append(Epoch(float(loss.detach()), epoch.factors, dict(zip(names, gradients, strict=True))))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "population std": {"objective__advantage_std": "population"},
    "epsilon 0.1": {"objective__advantage_epsilon": 0.1},
    "token mean": {"objective__token_aggregation": "token-mean"},
    "narrow band": {"objective__clip_low": 0.05, "objective__clip_high": 0.6},
    "dual clip": {"objective__dual_clip": 1.01},
    "temperature": {"rollout__temperature": 0.7},
    "truncated masked": {"objective__mask_truncated": True},
    "KL": {"objective__kl_coefficient": 0.05},
    "entropy": {"objective__entropy_coefficient": 0.03},
    "FedProx": {"objective__proximal_mu": 5.0},
    "all at once": {
        "objective__advantage_std": "population",
        "objective__token_aggregation": "token-mean",
        "objective__dual_clip": 1.01,
        "objective__mask_truncated": True,
        "objective__kl_coefficient": 0.05,
        "objective__entropy_coefficient": 0.03,
        "objective__proximal_mu": 5.0,
        "rollout__temperature": 0.7,
    },
    "all at once, mean per answer": {
        "objective__dual_clip": 1.01,
        "objective__mask_truncated": True,
        "objective__kl_coefficient": 0.05,
        "objective__entropy_coefficient": 0.03,
        "objective__proximal_mu": 5.0,
        "rollout__temperature": 0.7,
    },
}
# What `our_epochs` sets where a case does not.
SET = {
    "objective__clip_low": 0.2,
    "objective__clip_high": 0.25,
    "objective__advantage_epsilon": 1e-4,
    "optimiser__learning_rate": LEARNING_RATE,
}


@pytest.mark.quick(keep=4)
@pytest.mark.exhaustive(keep=8)
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_every_gradient_equal_the_loop_over_tokens(name: str, pieces: bool) -> None:
    groups = random_groups(4)
    ours = our_epochs(groups, OPTIONS[name], 20 if pieces else WHOLE)
    slow = slow_epochs(groups, make_plan(**{**SET, **OPTIONS[name]}), ours)
    for one, other in zip(ours, slow, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=TOLERANCE)
        for factor, gradient in one.gradients.items():
            assert torch.allclose(gradient, other.gradients[factor], rtol=0, atol=TOLERANCE), factor
    assert max(float(gradient.abs().max()) for gradient in slow[0].gradients.values()) > 0.05


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"defaults"}))
def test_every_option_moves_the_gradient_by_far_more_than_the_tolerance(name: str) -> None:
    """Else the test above would pass without it."""
    groups = random_groups(4)
    plain, changed = our_epochs(groups, {}), our_epochs(groups, OPTIONS[name])
    moved = max(
        float((one.gradients[factor] - other.gradients[factor]).abs().max())
        for one, other in zip(plain, changed, strict=True)
        for factor in one.gradients
    )
    assert moved > 100 * TOLERANCE


@pytest.mark.parametrize("seed", range(20))
def test_the_slope_of_one_token_is_what_a_pencil_gives(seed: int) -> None:
    """d gain / d logp is rho A inside the band and 0 where the clip holds; d k3 / d logp is 1 - exp(ref - logp)."""
    draws = random.Random(seed)
    logp, old, reference = (draws.uniform(-4, -0.1) for _ in range(3))
    advantage, low, high = (
        draws.choice([-1.0, 1.0]) * draws.uniform(0.1, 3),
        draws.uniform(0.05, 0.5),
        draws.uniform(0.05, 0.9),
    )
    dual = draws.choice([None, draws.uniform(1.1, 3)])
    ratio = math.exp(logp - old)
    held = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    held = held or (dual is not None and advantage < 0 and ratio > dual)
    live = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    given = [torch.tensor([value], dtype=torch.float64) for value in (old, advantage, reference)]
    gain = gain_of(live, given[0], given[1], clip_low=low, clip_high=high, dual_clip=dual)
    (slope,) = torch.autograd.grad(gain.sum(), live)
    assert slope.item() == pytest.approx(0.0 if held else ratio * advantage, rel=1e-9)
    (slope,) = torch.autograd.grad(grpo.k3(live, given[2]).sum(), live)
    assert slope.item() == pytest.approx(1 - math.exp(reference - logp), rel=1e-9)

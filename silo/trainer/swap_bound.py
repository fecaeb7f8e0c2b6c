"""What one swapped answer does to the gradient: beta and the omega proxy of the drift bound (methods 2.8).

beta_i(x) is the largest change of a group's gradient when one local answer gives way to a donor's. Measured is one such
exchange for a few prompts, so what is reported bounds the supremum from below and says nothing of other prompts. The
gradient is that of the first update, where every ratio is 1, without KL and entropy: those do not hang on the exchange.

Axes as in `batch`: M answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedsilo.protocol.plan import Plan
from silo.trainer import objective
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.batch import Answer, Group, stream_of
from silo.trainer.layers import token_logp

# Public steps from one measurement to the next, and prompts of each: a hundredth of a step's time.
STEPS_BETWEEN = 8
PROMPTS_MAX = 2


@dataclass(frozen=True)
class SwapBound:
    """beta_mean, beta_max: norm of the gradient's change, over the prompts that were looked at.

    omega: K * mean(alpha) * beta_mean, the bound's proxy.
    """

    beta_mean: float
    beta_max: float
    omega: float


def is_due(step: int, swap_period: int) -> bool:
    """At the first public step of a round and every `STEPS_BETWEEN` after it. step: in the round, from 1."""
    return step // swap_period % STEPS_BETWEEN == 1 % STEPS_BETWEEN


def swap_bound(
    adapter: LoraAdapter, plan: Plan, before: Sequence[Group], after: Sequence[Group], alphas: Sequence[float]
) -> SwapBound | None:
    """Take one donor of the first few swapped groups back out, and see what that does to the gradient.

    Args:
        adapter: at the step's start; neither it nor its gradients are changed.
        plan: objective and temperature.
        before: own answers, group by group.
        after: the same groups with donors, each in the place of the answer that gave way.
        alphas: m'/K of each.

    Returns:
        None where nothing was swapped.
    """
    betas: list[float] = []
    for own, swapped in zip(before, after, strict=True):
        places = [place for place, answer in enumerate(swapped.answers) if answer.donor]
        if not places or len(own.answers) != len(swapped.answers) or len(betas) == PROMPTS_MAX:
            continue
        place = places[0]
        back = Group(swapped.prompt_ids, _with(swapped.answers, place, own.answers[place]))
        betas.append(gradient_change(adapter, plan, back, swapped))
    if not betas:
        return None
    mean = sum(betas) / len(betas)
    samples = max(len(group.answers) for group in after)
    return SwapBound(mean, max(betas), samples * sum(alphas) / max(len(alphas), 1) * mean)


def gradient_change(adapter: LoraAdapter, plan: Plan, one: Group, other: Group) -> float:
    """Norm of the difference of two groups' gradients over the trained factors. Both are of one prompt."""
    coefficients: dict[tuple[int, ...], float] = {}
    for group, sign in ((one, 1.0), (other, -1.0)):
        for answer, weight in zip(group.answers, _weights(group, plan), strict=True):
            # the same tokens in both have the same gradient, so only what is left of their weights counts
            coefficients[answer.ids] = coefficients.get(answer.ids, 0.0) + sign * weight
    kept = {ids: value for ids, value in coefficients.items() if ids and value}
    if not kept:
        return 0.0
    decoder = adapter.decoder
    stream = stream_of([one.prompt_ids], [(0, ids) for ids in kept], decoder.device)
    logp, _ = token_logp(
        decoder.hidden(stream, checkpointing=True), decoder.head, stream.targets, plan.rollout.temperature
    )  # [M]
    weights = torch.tensor(list(kept.values()), device=decoder.device).repeat_interleave(stream.lengths)  # [M]
    gradients = torch.autograd.grad((weights * logp).sum(), adapter.parameters)
    return float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt())


def _weights(group: Group, plan: Plan) -> list[float]:
    """A_k times the weight of a token, of each answer of a group that is a step by itself."""
    settings = plan.objective
    rewards = torch.tensor([answer.reward for answer in group.answers])  # [K]
    advantages = objective.group_advantages(rewards, std=settings.advantage_std, epsilon=settings.advantage_epsilon)
    count = len(group.answers)
    weights = objective.row_weights(
        torch.tensor([len(answer.ids) for answer in group.answers]),
        torch.full((count,), count),
        1,
        settings.token_aggregation,
        kept=torch.tensor([answer.finished or not settings.mask_truncated for answer in group.answers]),
    )
    found: list[float] = (advantages * weights).tolist()
    return found


def _with(answers: tuple[Answer, ...], place: int, answer: Answer) -> tuple[Answer, ...]:
    return (*answers[:place], answer, *answers[place + 1 :])

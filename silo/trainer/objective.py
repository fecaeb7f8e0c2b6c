"""GRPO in pure torch: advantages, the clipped objective, KL, entropy and how tokens are averaged (methods 1.3).

Axes, as trailing comments: K answers of one prompt, R answers of a batch (rows), M answer tokens of a batch, one after
the other without padding. Nothing here knows a model, a tokenizer or a silo.

Sources: PubSwap Eq. 2 (with the ratio on y_t: the printed y_<t is a typo, methods 2.10), Schulman's k3 estimator,
DAPO's clip-higher, Ye et al.'s dual clip, FedProx.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

# Rewards closer together than this are one value: the group carries no signal (methods 1.3).
ZERO_VARIANCE_RANGE = 1e-12
# A log-ratio counts up to here: exp(20) is 5e8. Beyond 88 exp overflows, and the gradient of a clipped token, 0 x inf,
# would be NaN.
LOG_RATIO_MAX = 20.0


def has_zero_variance(rewards: Tensor) -> bool:
    """True for a group that gives no policy gradient, a group of one among them. rewards: [K]."""
    return bool(rewards.max() - rewards.min() < ZERO_VARIANCE_RANGE)


def group_advantages(rewards: Tensor, *, std: Literal["sample", "population"], epsilon: float) -> Tensor:
    """A_k = (r_k - mean(r)) / (std(r) + epsilon); exactly 0 for a group of one or of equal rewards (methods 1.3).

    Args:
        rewards: [K].
        std: divide the squared deviations by K - 1 (sample, as VERL) or K (population, as FedGRPO prints).
        epsilon: eps_A.
    """
    if has_zero_variance(rewards):
        return torch.zeros_like(rewards)  # [K]
    deviation = rewards.std(correction=1 if std == "sample" else 0)  # []
    return (rewards - rewards.mean()) / (deviation + epsilon)  # [K]


def ratio_of(logp: Tensor, logp_old: Tensor) -> Tensor:
    """rho_kt of PubSwap Eq. 2, its logarithm kept within +-`LOG_RATIO_MAX`; a token beyond has no gradient. All [M]."""
    return (logp - logp_old).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()  # [M]


def policy_gain(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """What one token adds to the objective, to be maximised: min(rho A, clip(rho, 1 - low, 1 + high) A).

    Args:
        logp: [M] with gradient.
        logp_old: [M] without.
        advantages: [M], the same for every token of an answer.
        clip_low: eps_low of the band.
        clip_high: eps_high of the band.
        dual_clip: bound the loss at this multiple of |A| where A < 0; None is off.
    """
    ratio = ratio_of(logp, logp_old)  # [M]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages  # [M]
    gain = torch.minimum(ratio * advantages, clipped)  # [M]
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)  # [M]
    return gain


def is_clipped(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Tokens whose gradient a clip removes: ratio outside the band on the side that A pushes to, or beyond the bound of
    the dual clip where A < 0. Arguments as of `policy_gain`. All [M]."""
    ratio = ratio_of(logp, logp_old)  # [M]
    outside = ratio < 1 - clip_low  # [M]
    if dual_clip is not None:
        outside = outside | (ratio > dual_clip)
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & outside)  # [M]


def k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """KL(policy || reference) per token, estimated as exp(d) - d - 1 >= 0 with d = logp_ref - logp. All [M].

    d counts up to `LOG_RATIO_MAX`, beyond which a token has no gradient. Far below 0 nothing overflows: there the value
    and its pull towards the reference stay exact.
    """
    difference = (logp_reference - logp).clamp(max=LOG_RATIO_MAX)  # [M]
    return difference.exp() - difference - 1  # [M]


def row_weights(
    token_counts: Tensor,
    group_sizes: Tensor,
    prompts: int,
    aggregation: Literal["response-mean", "token-mean"],
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Weight of every token of an answer, so that a weighted sum over tokens is the step's mean.

    `response-mean` is PubSwap Eq. 2: mean over an answer's tokens, over a prompt's answers, over prompts.
    `token-mean` is one mean over all tokens of the step. Because the weights carry the denominators, a batch can
    be cut into parts whose losses add up, and answers without gradient can be left out of the forward pass.

    Args:
        token_counts: [R] tokens of each answer; an empty answer weighs nothing.
        group_sizes: [R] number of answers K' in the answer's group.
        prompts: groups in the step, those without signal included.
        aggregation: which of the two means.
        kept: [R] bool, False where a truncated answer is masked (`mask_truncated`): it keeps its place in the
            prompt's mean but adds no token.
    """
    counts = token_counts.float()  # [R]
    keep = (token_counts > 0).float() if kept is None else ((token_counts > 0) & kept).float()  # [R]
    if aggregation == "token-mean":
        return keep / (counts * keep).sum().clamp(min=1)  # [R]
    return keep / (counts.clamp(min=1) * group_sizes.float() * prompts)  # [R]


def proximal_term(parameters: Iterable[Tensor], starts: Iterable[Tensor], mu: float) -> Tensor:
    """FedProx, to be added to the loss: (mu / 2) sum ||theta - theta_p||^2 over the factors, each on its own
    (methods 2.7). The paper writes it as a term to minimise beside an objective to maximise: mind the sign."""
    squares = [(parameter - start).square().sum() for parameter, start in zip(parameters, starts, strict=True)]
    return 0.5 * mu * torch.stack(squares).sum()

"""Terms of the objective from log-probabilities, by the two steps in which the learner makes them."""

from __future__ import annotations

from typing import Any

import torch

from fedsilo.protocol.plan import Objective
from silo.trainer import grpo


def gain_of(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    **objective: Any,
) -> torch.Tensor:
    """`policy_gain` of log-probabilities, before and after."""
    return grpo.policy_gain(logp, grpo.ratio_of(logp, old, lengths), advantages, Objective(**objective))


def clipped_of(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    **objective: Any,
) -> torch.Tensor:
    """`is_clipped` of the same."""
    return grpo.is_clipped(grpo.ratio_of(logp, old, lengths), advantages, Objective(**objective))

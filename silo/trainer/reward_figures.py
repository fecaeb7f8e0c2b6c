"""Figures of graded answers, for a step's metrics (methods 2.8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from silo.trainer import objective
from silo.trainer.batch import Group


def zero_variance_share(groups: Sequence[Group]) -> float:
    """Share of groups without signal, by the rule and in the precision of the advantages (`step`, `objective`)."""
    rewards = [torch.tensor([answer.reward for answer in group.answers], dtype=torch.float32) for group in groups]
    return mean([float(objective.has_zero_variance(each)) for each in rewards])


def reward_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Figures of own answers, before any swap."""
    answers = [answer for group in groups for answer in group.answers]
    return {
        "reward_mean": mean([answer.reward for answer in answers]),
        "tokens": sum(len(answer.ids) for answer in answers),
        "truncated_share": mean([float(not answer.finished) for answer in answers]),
        "correct_histogram": _histogram(groups),
    }


def _histogram(groups: Sequence[Group]) -> dict[str, int]:
    """{correct answers of a group: groups}."""
    return {
        str(correct): count
        for correct, count in sorted(
            Counter(sum(answer.correct for answer in group.answers) for group in groups).items()
        )
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""The task of measuring an adapter on this site's own prompts, which no method knows: guard and report give it, the
trainer carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsilo.protocol.tasks import TrainerTask

PromptSet = Literal["private", "held_out"]


@dataclass(frozen=True)
class MeasureHoldout(TrainerTask):
    """See `silo.trainer.tasks.evaluate`. The adapter to measure crosses as its body; none: the base model.

    Attributes:
        samples: answers to each prompt, beside a greedy one.
        rows: the private holdout, or the public held-out set.
    """

    samples: int
    round: int = 0
    rows: PromptSet = "private"

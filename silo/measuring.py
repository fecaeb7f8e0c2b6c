"""The task of measuring an adapter on this site's own prompts, which no method knows: guard and report give it, the
trainer carries it out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.method import TrainerTask

PromptSet = Literal["private", "held_out"]


@dataclass(frozen=True)
class MeasureHoldout:
    """See `silo.trainer.evaluation.measure_holdout`.

    Attributes:
        samples: answers to each prompt, beside a greedy one.
        rows: the private holdout, or the public held-out set.
    """

    samples: int
    round: int = 0
    rows: PromptSet = "private"


GuardTask = TrainerTask | MeasureHoldout  # whatever a guard gives its trainer


def fields_of(task: GuardTask) -> dict[str, Any]:
    """A task as the fields of a link message; donors travel as its body."""
    fields: dict[str, Any] = {"task": type(task).__name__}
    for item in dataclasses.fields(task):
        value = getattr(task, item.name)
        if not isinstance(value, pb.PublicDonors):
            fields[item.name] = list(value) if isinstance(value, tuple) else value
    return fields

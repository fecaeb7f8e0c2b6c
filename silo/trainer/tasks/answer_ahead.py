"""AnswerAhead: right answers to public prompts of the next round, for the other silos."""

from __future__ import annotations

import numpy as np

from fedsilo.protocol.codec import Buffer, encode
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.tasks import AnswerAhead
from silo.trainer.data import Prompt
from silo.trainer.run import Done, Run
from silo.trainer.tasks.generate_public import answered


def carry_out(run: Run, task: AnswerAhead, body: Buffer) -> Done:
    """Raises OperationError: the engine does not agree."""

    def draw(prompt: Prompt, sample: int) -> np.random.Generator:
        key = (run.material.silo, task.round, task.for_step, prompt.row, sample)
        return generator(seed_of(run.plan.seed, "answers-ahead", *key))

    step, message = answered(run, (task.round, 0), task.prompt_indices, "correct", draw)
    # of no step's training: only what it cost belongs to the round's curves
    kept = {name: value for name, value in step.metrics.items() if name.endswith("_seconds")}
    return Done({**kept, "reencoding_mismatches": step.metrics["reencoding_mismatches"]}, encode(message))

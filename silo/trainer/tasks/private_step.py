"""PrivateStep: one GRPO step on the private rows that the guard drew (docs/explain/private-step.md: all in order)."""

from __future__ import annotations

import numpy as np

from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.randomness import generator, private_seed_of
from fedsilo.protocol.tasks import PrivateStep
from silo.trainer.run import Done, Run, Step
from silo.trainer.scale_out import BAD_TASK


def carry_out(run: Run, task: PrivateStep, body: Buffer) -> Done:
    """Take one step: rollout, grade, update. Raises OperationError: no such rows, the engine does not agree, or a
    gradient is not finite."""
    prompts = run.private.prompts
    if not task.rows or max(task.rows) >= len(prompts) or min(task.rows) < 0:
        raise OperationError(
            f"step {task.step} of round {task.round} names other rows than the {len(prompts)} private prompts",
            code=BAD_TASK,
        )

    def draw(place: int, sample: int) -> np.random.Generator:
        # by the prompt's place in the step, which comes with the task; of public prompts the row is known to all
        key = (task.round, task.step, place, sample)
        return generator(private_seed_of(run.material.site_secret, run.plan.seed, "private-rollout", *key))

    step = Step(run, (task.round, task.step))
    step.rollout("private", [prompts[row] for row in task.rows], draw)
    step.grade(run.material.private_grader)
    step.update(step.groups)
    return Done(step.metrics)

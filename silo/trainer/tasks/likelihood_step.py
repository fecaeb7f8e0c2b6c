"""LikelihoodStep: a supervised step on what the public file says, its solutions or else its answers.

Each text is graded by this silo's own verifier against its row's answer; one that is not right, or does not fit the
plan's lengths, is left out and counted.
"""

from __future__ import annotations

from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.tasks import LikelihoodStep
from silo.trainer.data import grade_distinct
from silo.trainer.grpo import Answer, Group
from silo.trainer.run import Done, Run, Step


def carry_out(run: Run, task: LikelihoodStep, body: Buffer) -> Done:
    """Take the step. Raises OperationError: a gradient is not finite."""
    prompts = [run.public.by_row[row] for row in task.prompt_indices if row in run.public.by_row]
    texts = [prompt.solution or prompt.reference for prompt in prompts]
    pairs = [(text, prompt.reference) for text, prompt in zip(texts, prompts, strict=True)]
    codec, tokens_max = run.material.codec, run.plan.rollout.max_new_tokens
    groups = []
    for prompt, text, mark in zip(prompts, texts, grade_distinct(run.material.public_grader, pairs), strict=True):
        ids = codec.answer_ids(text, finished=True)
        if mark.correct and len(ids) <= tokens_max and not codec.has_special(ids, finished=True):
            answer = Answer(ids, text, finished=True, **mark._asdict())
            groups.append(Group(prompt.ids, (answer,), advantages=(1.0,)))
    step = Step(run, (task.round, task.step))
    step.metrics["answers_refused"] = len(prompts) - len(groups)
    step.update(groups, likelihood=True)
    return Done(step.metrics)

"""Evaluate: pass@1 of an adapter on the held-out file, sampled at the rollout temperature and greedy, over all and by
topic (design 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, encode
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.tasks import Evaluate
from silo.trainer.data import Grader, Prompt, grade_distinct
from silo.trainer.rollout.engine import Question
from silo.trainer.run import Done, Run

PASS_AT_1 = "pass_at_1"  # a metric's name
PASS_AT_1_GREEDY = "pass_at_1_greedy"  # a metric's name
DONORS_TRAINED = "donors_trained"  # a metric's name
DECIMALS = 4  # the grid of metrics.eval


def carry_out(run: Run, task: Evaluate, body: Buffer) -> Done:
    """Answer every held-out prompt `evaluation.samples` times and once greedily, with the adapter in `body`, or the
    base model where there is none.

    Draws are keyed by silo, prompt and sample, not by round: two adapters are compared on the same random numbers.

    Raises:
        PeerError: the adapter does not fit the schema.
    """
    run.on_phase(task.round, 0, "rollout")
    prompts, samples = run.held_out.prompts, run.plan.evaluation.samples

    def seed(prompt: Prompt, sample: int) -> int:
        return seed_of(run.plan.seed, "evaluation", run.material.silo, prompt.row, sample)

    with run.policy_of(body, "public"):
        verdicts = verdicts_of(run, prompts, run.material.held_out_grader, samples, seed)  # [P, S + 1]
    message = pb.MetricsEval(split="held_out", adapter_digest=task.digest)
    topics = np.array([prompt.topic for prompt in prompts])
    for topic in ("", *sorted(set(topics.tolist()))):
        of_topic = verdicts if topic == "" else verdicts[topics == topic]  # [P of the topic, S + 1]
        for name, part in ((PASS_AT_1, of_topic[:, :samples]), (PASS_AT_1_GREEDY, of_topic[:, samples:])):
            value = round(float(part.mean()), DECIMALS) if part.size else 0.0
            message.metrics.add(name=name, topic=topic, value=value)
    overall = {metric.name: metric.value for metric in message.metrics if metric.topic == ""}
    if task.round:
        # For the run record: how many of the donors sent to this silo it took a step on.
        message.metrics.add(name=DONORS_TRAINED, topic="", value=float(run.donors_trained))
    message.metrics.sort(key=lambda metric: (metric.topic, metric.name))
    return Done(overall, encode(message))


def verdicts_of(
    run: Run,
    prompts: Sequence[Prompt],
    grader: Grader,
    samples: int,
    seed_of_sample: Callable[[Prompt, int], int],
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Answer each prompt `samples` times and once greedily, with whatever policy the engine holds.

    Returns:
        [P, S + 1], 0 or 1; the last column is the greedy answer.
    """
    rollouts = run.engine.generate(
        [
            Question(prompt.ids, (*(generator(seed_of_sample(prompt, sample)) for sample in range(samples)), None))
            for prompt in prompts
        ],
        temperature=run.plan.rollout.temperature,
        max_new_tokens=run.plan.rollout.max_new_tokens,
    )
    pairs = [
        (run.material.codec.text_of(rollout.ids), prompt.reference)
        for prompt, answers in zip(prompts, rollouts, strict=True)
        for rollout in answers
    ]
    correct = [mark.correct for mark in grade_distinct(grader, pairs)]
    return np.array(correct, dtype=float).reshape(len(prompts), samples + 1)

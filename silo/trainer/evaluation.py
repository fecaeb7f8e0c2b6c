"""pass@1 on the held-out file: sampled at the rollout temperature, and greedy, over all and by topic (design 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsilo.treaty.plan import Plan
from fedsilo.treaty.randomness import generator, seed_of
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from silo.trainer.data import Prompt
from silo.trainer.grading import Grader, grade_distinct
from silo.trainer.rollout.embedded import EmbeddedEngine, Question
from silo.trainer.text import TextCodec

PASS_AT_1 = "pass_at_1"  # a metric's name
PASS_AT_1_GREEDY = "pass_at_1_greedy"  # a metric's name
DONORS_TRAINED = "donors_trained"  # a metric's name
DECIMALS = 4  # the grid of metrics.eval


def evaluate(
    engine: EmbeddedEngine,
    codec: TextCodec,
    prompts: Sequence[Prompt],
    grader: Grader,
    *,
    plan: Plan,
    silo: str,
    adapter_digest: str,
) -> tuple[pb.MetricsEval, dict[str, float]]:
    """Answer every prompt `plan.evaluation.samples` times and once greedily, with whatever policy `engine` holds.

    Draws are keyed by silo, prompt and sample, not by round: two adapters are compared on the same random numbers.

    Returns:
        The message, and its overall figures by metric name.
    """
    samples = plan.evaluation.samples

    def draws(prompt: Prompt) -> tuple[np.random.Generator | None, ...]:
        seeds = (seed_of(plan.seed, "evaluation", silo, prompt.row, sample) for sample in range(samples))
        return (*(generator(seed) for seed in seeds), None)

    rollouts = engine.generate(
        [Question(prompt.ids, draws(prompt)) for prompt in prompts],
        temperature=plan.rollout.temperature,
        max_new_tokens=plan.rollout.max_new_tokens,
    )
    pairs = [
        (codec.text_of(rollout.ids), prompt.reference)
        for prompt, answers in zip(prompts, rollouts, strict=True)
        for rollout in answers
    ]
    verdicts = np.array(grade_distinct(grader, pairs), dtype=float).reshape(len(prompts), samples + 1)  # [P, S + 1]
    message = pb.MetricsEval(split="held_out", adapter_digest=adapter_digest)
    topics = np.array([prompt.topic for prompt in prompts])
    for topic in ("", *sorted(set(topics.tolist()))):
        of_topic = verdicts if topic == "" else verdicts[topics == topic]  # [P of the topic, S + 1]
        for name, part in ((PASS_AT_1, of_topic[:, :samples]), (PASS_AT_1_GREEDY, of_topic[:, samples:])):
            value = round(float(part.mean()), DECIMALS) if part.size else 0.0
            message.metrics.add(name=name, topic=topic, value=value)
    return message, {metric.name: metric.value for metric in message.metrics if metric.topic == ""}

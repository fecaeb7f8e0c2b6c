"""pass@1, sampled at the rollout temperature and greedy: on the held-out file, over all and by topic (design 1), and on
the private holdout, prompt by prompt, for this site's own eyes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from fedsilo.grading.exact import normalise
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, private_seed_of, seed_of
from silo.trainer.data import Prompt, TaskRow, clusters_of, encode_prompts
from silo.trainer.grading import Grader, grade_distinct
from silo.trainer.rollout.embedded import Question
from silo.trainer.rollout.engine import RolloutEngine
from silo.trainer.text import TextCodec

PASS_AT_1 = "pass_at_1"  # a metric's name
PASS_AT_1_GREEDY = "pass_at_1_greedy"  # a metric's name
DONORS_TRAINED = "donors_trained"  # a metric's name
DECIMALS = 4  # the grid of metrics.eval


def evaluate(
    engine: RolloutEngine,
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

    def seed(prompt: Prompt, sample: int) -> int:
        return seed_of(plan.seed, "evaluation", silo, prompt.row, sample)

    verdicts = _verdicts(engine, codec, prompts, grader, plan, samples, seed)  # [P, S + 1]
    message = pb.MetricsEval(split="held_out", adapter_digest=adapter_digest)
    topics = np.array([prompt.topic for prompt in prompts])
    for topic in ("", *sorted(set(topics.tolist()))):
        of_topic = verdicts if topic == "" else verdicts[topics == topic]  # [P of the topic, S + 1]
        for name, part in ((PASS_AT_1, of_topic[:, :samples]), (PASS_AT_1_GREEDY, of_topic[:, samples:])):
            value = round(float(part.mean()), DECIMALS) if part.size else 0.0
            message.metrics.add(name=name, topic=topic, value=value)
    return message, {metric.name: metric.value for metric in message.metrics if metric.topic == ""}


def measure_holdout(
    engine: RolloutEngine,
    codec: TextCodec,
    rows: Sequence[TaskRow],
    public: Sequence[TaskRow],
    grader: Grader,
    *,
    plan: Plan,
    site_secret: bytes,
    samples: int,
) -> bytes:
    """Answer the rows of a holdout `samples` times and once greedily, with whatever policy `engine` holds.

    Left out and counted: a row whose prompt is longer than the plan allows, and one whose prompt is also public, since
    public prompts are trained on (compared as in `clusters_of`). Draws are keyed by the site secret, the row's id and
    the sample: policies are compared on the same random numbers.

    Returns:
        JSON {"samples", "overlong", "public", "topics": [P], "groups": [P], "correct": [P], "greedy": [P]}: in the
        order of the ids; clusters as numbers, so that no id leaves the trainer; correct answers of the samples; the
        greedy one 0 or 1.
    """
    trained_on = {normalise(row.prompt) for row in public}
    in_order = sorted(zip(rows, clusters_of(rows), strict=True), key=lambda pair: pair[0].id)
    unseen = [(row, cluster) for row, cluster in in_order if normalise(row.prompt) not in trained_on]
    prompts = encode_prompts([row for row, _ in unseen], codec, plan.rollout.max_prompt_tokens)

    def seed(prompt: Prompt, sample: int) -> int:
        return private_seed_of(site_secret, plan.seed, "holdout", prompt.id, sample)

    verdicts = _verdicts(engine, codec, prompts.prompts, grader, plan, samples, seed)  # [P, S + 1]
    names = [unseen[place][1] for place in prompts.by_row]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return json.dumps(
        {
            "samples": samples,
            "overlong": prompts.overlong,
            "public": len(in_order) - len(unseen),
            "topics": [prompt.topic for prompt in prompts.prompts],
            "groups": [numbers[name] for name in names],
            "correct": [int(count) for count in verdicts[:, :samples].sum(axis=1)],
            "greedy": [int(verdict) for verdict in verdicts[:, samples]],
        }
    ).encode()


def _verdicts(
    engine: RolloutEngine,
    codec: TextCodec,
    prompts: Sequence[Prompt],
    grader: Grader,
    plan: Plan,
    samples: int,
    seed_of_sample: Callable[[Prompt, int], int],
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[P, S + 1], 0 or 1; the last column is the greedy answer."""
    rollouts = engine.generate(
        [
            Question(prompt.ids, (*(generator(seed_of_sample(prompt, sample)) for sample in range(samples)), None))
            for prompt in prompts
        ],
        temperature=plan.rollout.temperature,
        max_new_tokens=plan.rollout.max_new_tokens,
    )
    pairs = [
        (codec.text_of(rollout.ids), prompt.reference)
        for prompt, answers in zip(prompts, rollouts, strict=True)
        for rollout in answers
    ]
    correct = [mark.correct for mark in grade_distinct(grader, pairs)]
    return np.array(correct, dtype=float).reshape(len(prompts), samples + 1)

"""Pass@1 of an adapter, or of what this silo trains, sampled at the rollout temperature and greedy: on the held-out
file, over all and by topic, for the federation (Evaluate, EvaluateOwn); on the private holdout or the held-out file,
prompt by prompt, for this site's own eyes (MeasureHoldout)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from fedsilo.grading.exact import normalise
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, encode
from fedsilo.protocol.randomness import generator, private_seed_of, seed_of
from fedsilo.protocol.tasks import Evaluate, EvaluateOwn
from silo.measuring import MeasureHoldout
from silo.trainer.data import Grader, Prompt, clusters_of, encode_prompts, grade_distinct
from silo.trainer.rollout.engine import Question
from silo.trainer.run import Done, Run

PASS_AT_1 = "pass_at_1"  # a metric's name
PASS_AT_1_GREEDY = "pass_at_1_greedy"  # a metric's name
DONORS_TRAINED = "donors_trained"  # a metric's name
DECIMALS = 4  # the grid of metrics.eval


def evaluate(run: Run, task: Evaluate, body: Buffer) -> Done:
    """Answer every held-out prompt `evaluation.samples` times and once greedily, with the adapter in `body`, or the
    base model where there is none.

    Draws are keyed by silo, prompt and sample, not by round: two adapters are compared on the same random numbers.

    Raises:
        PeerError: the adapter does not fit the schema.
    """
    run.on_phase(task.round, 0, "rollout")
    with run.policy_of(body, "public"):
        return _figures(run, task.round, task.digest)


def evaluate_own(run: Run, task: EvaluateOwn, body: Buffer) -> Done:
    """The same of the policy as it is now; its name, for the site's own records, is the figure `state`."""
    run.on_phase(task.round, 0, "rollout")
    run.engine.use("public")
    done = _figures(run, task.round, "")
    return Done({**done.metrics, "state": run.adapter.name()}, done.body)


def _figures(run: Run, number: int, digest: str) -> Done:
    """Answer the held-out prompts with whatever policy the model computes, which the message names by `digest`."""
    prompts, samples = run.held_out.prompts, run.plan.evaluation.samples

    def seed(prompt: Prompt, sample: int) -> int:
        return seed_of(run.plan.seed, "evaluation", run.material.silo, prompt.row, sample)

    verdicts = verdicts_of(run, prompts, run.material.held_out_grader, samples, seed)  # [P, S + 1]
    message = pb.MetricsEval(split="held_out", adapter_digest=digest)
    topics = np.array([prompt.topic for prompt in prompts])
    for topic in ("", *sorted(set(topics.tolist()))):
        of_topic = verdicts if topic == "" else verdicts[topics == topic]  # [P of the topic, S + 1]
        for name, part in ((PASS_AT_1, of_topic[:, :samples]), (PASS_AT_1_GREEDY, of_topic[:, samples:])):
            value = round(float(part.mean()), DECIMALS) if part.size else 0.0
            message.metrics.add(name=name, topic=topic, value=value)
    overall = {metric.name: metric.value for metric in message.metrics if metric.topic == ""}
    if number:
        # For the run record: how many of the donors sent to this silo it took a step on.
        message.metrics.add(name=DONORS_TRAINED, topic="", value=float(run.donors_trained))
    message.metrics.sort(key=lambda metric: (metric.topic, metric.name))
    return Done(overall, encode(message))


def measure_holdout(run: Run, task: MeasureHoldout, body: Buffer) -> Done:
    """Answer the rows `samples` times and once greedily, with the adapter in `body`, or the base model where there is
    none.

    Left out and counted: a row whose prompt is longer than the plan allows, and one whose prompt is also public, since
    public prompts are trained on (compared as in `clusters_of`). Draws are keyed by the site secret, the row's id and
    the sample: policies are compared on the same random numbers.

    Returns:
        JSON {"samples", "overlong", "public", "topics": [P], "groups": [P], "correct": [P], "greedy": [P]}: in the
        order of the ids; clusters as numbers, so that no id leaves the trainer; correct answers of the samples; the
        greedy one 0 or 1.

    Raises:
        PeerError: the adapter does not fit the schema.
    """
    run.on_phase(task.round, 0, "rollout")
    site, is_private = run.material, task.rows == "private"
    rows = run.split.holdout if is_private else site.held_out[: run.plan.evaluation.prompts]
    trained_on = {normalise(row.prompt) for row in site.public}
    in_order = sorted(zip(rows, clusters_of(rows), strict=True), key=lambda pair: pair[0].id)
    unseen = [(row, cluster) for row, cluster in in_order if normalise(row.prompt) not in trained_on]
    prompts = encode_prompts([row for row, _ in unseen], site.codec, run.plan.rollout.max_prompt_tokens)

    def seed(prompt: Prompt, sample: int) -> int:
        return private_seed_of(site.site_secret, run.plan.seed, "holdout", prompt.id, sample)

    with run.policy_of(body, "private" if is_private else "public"):
        grader = site.private_grader if is_private else site.held_out_grader
        verdicts = verdicts_of(run, prompts.prompts, grader, task.samples, seed)  # [P, S + 1]
    names = [unseen[place][1] for place in prompts.by_row]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    report = {
        "samples": task.samples,
        "overlong": prompts.overlong,
        "public": len(in_order) - len(unseen),
        "topics": [prompt.topic for prompt in prompts.prompts],
        "groups": [numbers[name] for name in names],
        "correct": [int(count) for count in verdicts[:, : task.samples].sum(axis=1)],
        "greedy": [int(verdict) for verdict in verdicts[:, task.samples :].ravel()],
    }
    return Done({}, json.dumps(report).encode())


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

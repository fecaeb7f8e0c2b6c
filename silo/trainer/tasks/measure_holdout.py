"""MeasureHoldout: pass@1 on the private holdout or the held-out file, prompt by prompt, for this site's own eyes."""

from __future__ import annotations

import json

from fedsilo.grading.exact import normalise
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.randomness import private_seed_of
from silo.measuring import MeasureHoldout
from silo.trainer.data import Prompt, clusters_of, encode_prompts
from silo.trainer.run import Done, Run
from silo.trainer.tasks.evaluate import verdicts_of


def carry_out(run: Run, task: MeasureHoldout, body: Buffer) -> Done:
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
    found = {
        "samples": task.samples,
        "overlong": prompts.overlong,
        "public": len(in_order) - len(unseen),
        "topics": [prompt.topic for prompt in prompts.prompts],
        "groups": [numbers[name] for name in names],
        "correct": [int(count) for count in verdicts[:, : task.samples].sum(axis=1)],
        "greedy": [int(verdict) for verdict in verdicts[:, task.samples :].ravel()],
    }
    return Done({}, json.dumps(found).encode())

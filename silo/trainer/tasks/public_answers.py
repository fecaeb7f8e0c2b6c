"""Answers to public prompts: those of a step, which wait for donors and are offered to others (GeneratePublic), and
right ones to prompts of the next round, for the other silos (AnswerAhead)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, encode
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.tasks import AnswerAhead, GeneratePublic
from silo.trainer.data import Prompt
from silo.trainer.grpo import Answer
from silo.trainer.run import Done, OpenStep, OwnAnswers, Run, Step


def generate(run: Run, task: GeneratePublic, body: Buffer) -> Done:
    """Answer the public prompts of a step, and open it for donors. Raises OperationError: the engine does not agree."""

    def draw(prompt: Prompt, sample: int) -> np.random.Generator:
        key = (run.material.silo, task.round, task.step, prompt.row, sample)
        return generator(seed_of(run.plan.seed, "public-rollout", *key))

    step, message = answered(run, (task.round, task.step), task.prompt_indices, task.offer, draw)
    run.open_step = OpenStep(task.round, task.step, task.offer, step.own)
    _remember(run, (task.round, task.step), step.own, task.offer)
    return Done(step.metrics, encode(message))


def answer_ahead(run: Run, task: AnswerAhead, body: Buffer) -> Done:
    """Answer public prompts of the next round. Raises OperationError: the engine does not agree."""

    def draw(prompt: Prompt, sample: int) -> np.random.Generator:
        key = (run.material.silo, task.round, task.for_step, prompt.row, sample)
        return generator(seed_of(run.plan.seed, "answers-ahead", *key))

    step, message = answered(run, (task.round, 0), task.prompt_indices, "correct", draw)
    _remember(run, (task.round + 1, task.for_step), step.own, "correct")
    # of no step's training: only what it cost is reported, its tokens apart from those of steps
    costs = {name: value for name, value in step.metrics.items() if name.endswith("_seconds")}
    costs["extra_tokens"] = step.metrics["tokens"]
    return Done({**costs, "reencoding_mismatches": step.metrics["reencoding_mismatches"]}, encode(message))


def answered(
    run: Run,
    where: tuple[int, int],
    indices: Sequence[int],
    offer: str,
    draw: Callable[[Prompt, int], np.random.Generator],
) -> tuple[Step, pb.PublicResponses]:
    """Answer public prompts, as far as they are short enough, and say what leaves of that.

    Args:
        run: the open run.
        where: as of `Step`.
        indices: of the prompts, in the order of the message.
        offer: as of `responses_message`.
        draw: by prompt and sample.
    """
    prompts = [run.public.by_row[index] for index in indices if index in run.public.by_row]
    step = Step(run, where)
    step.rollout("public", prompts, lambda place, sample: draw(prompts[place], sample))
    step.grade(run.material.public_grader)
    codec = run.material.codec
    step.metrics["reencoding_mismatches"] = sum(
        codec.answer_ids(answer.text, finished=answer.finished) != answer.ids
        for own in step.own
        for answer in own.answers
    )
    own = {each.prompt.row: each for each in step.own}
    return step, responses_message(run.plan.public_set_sha256, indices, own, offer)


def _remember(run: Run, used: tuple[int, int], own: Sequence[OwnAnswers], offer: str) -> None:
    """Keep the log-probabilities of what is offered, where donors' ratios take them, until the round of its use is
    over. used: round and step in which the answers are donors."""
    if run.plan.donor_denominator != "donor" or offer == "none":
        return
    codec = run.material.codec
    written = {place: answers for place, answers in run.written.items() if place[0] >= used[0] - 1}
    for each in own:
        written[(*used, each.prompt.row)] = tuple(
            answer.logp if codec.answer_ids(answer.text, finished=answer.finished) == answer.ids else ()
            for answer in offered_answers(each, offer)
        )
    run.written = written


def offered_answers(own: OwnAnswers, offer: str) -> tuple[Answer, ...]:
    """Return the answers that the message holds for this prompt, in the order `Donor.position` counts. offer: correct |
    all | none."""
    if offer == "correct":
        return tuple(answer for answer in own.answers if answer.correct)
    return own.answers if offer == "all" else ()


def responses_message(
    public_set_sha256: str, indices: Sequence[int], own: Mapping[int, OwnAnswers], offer: str
) -> pb.PublicResponses:
    """Return the message. Every prompt of the step is listed with K', also one with nothing correct or overlong."""
    message = pb.PublicResponses(public_set_sha256=public_set_sha256)
    for index in indices:
        row = message.prompts.add(prompt_index=index)
        if index not in own:
            continue
        row.samples = len(own[index].answers)
        for answer in offered_answers(own[index], offer):
            row.responses.add(text=answer.text, finish=pb.FINISH_STOP if answer.finished else pb.FINISH_LENGTH)
    return message

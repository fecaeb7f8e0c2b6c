"""PublicStep: one GRPO step on own answers to public prompts and the donors that come in their place.

Donors are untrusted: each is encoded and graded here again. One that fails is dropped, the own answer stays, and
the silo that sent it is counted. Correct own answers are never removed and a silo is never its own donor.

What one swapped answer does to the gradient is measured for PubSwap's drift bound: beta_i(x) is the largest change of a
group's gradient when one local answer gives way to a donor's. Measured is one such exchange for a few prompts, so what
is reported bounds the supremum from below and says nothing of other prompts. The gradient is that of the first update,
where every ratio is 1, without KL and entropy, which do not hang on the exchange, and without importance weights.

Axes as in `silo.trainer.grpo`: M answer tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.methods.pubswap.options import SelfSwap
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.swap import donors_wanted, replaced_positions
from fedsilo.protocol.tasks import PublicStep
from silo.trainer.adapters import TrainedState
from silo.trainer.data import Grader, Prompt, TextCodec, grade_distinct
from silo.trainer.decoder import stream_of, token_logp
from silo.trainer.grpo import Answer, Group, batch_of
from silo.trainer.run import Done, OwnAnswers, Run, Step, mean, reward_metrics, zero_variance_share
from silo.trainer.scale_out import BAD_TASK
from silo.trainer.tasks.public_answers import answered, offered_answers


def carry_out(run: Run, task: PublicStep, body: Buffer) -> Done:
    """Train on own answers and donors. Raises OperationError: no answers wait for this step, there is no such swap, or
    a gradient is not finite."""
    opened = run.open_step
    if opened is None or (opened.round, opened.step) != (task.round, task.step):
        raise OperationError(f"no public answers were generated for round {task.round} step {task.step}", code=BAD_TASK)
    donors = {row.prompt_index: list(row.donors) for row in task.donors.prompts}
    site = run.material
    intake = DonorIntake(
        site.silo, site.codec, site.public_grader, run.plan.rollout.max_new_tokens, _logp_of(run, task)
    )

    def random_of(prompt: Prompt) -> np.random.Generator:
        return generator(seed_of(run.plan.seed, "replaced", site.silo, task.round, task.step, prompt.row))

    before = [Group(own.prompt.ids, own.answers) for own in opened.own]
    extra_tokens = 0
    match task.swap:
        case "replace":
            groups, figures = intake.balanced(opened.own, donors, random_of)
        case "key" | "worked-key":
            key_donors = _key_donors(opened.own, worked=task.swap == "worked-key")
            groups, figures = intake.balanced(opened.own, key_donors, random_of)
        case "self":
            own_donors, extra_tokens = _self_donors(run, task, opened.own)
            groups, figures = intake.balanced(opened.own, own_donors, random_of)
        case "pool":
            groups, figures = intake.pooled(opened.own, donors, opened.offer)
        case "none":
            groups, figures = before, SwapFigures()
        case _:
            raise OperationError(f"there is no swap {task.swap!r}", code=BAD_TASK)
    bound = None
    measured = task.swap == "replace" and run.plan.donor_denominator == "local"
    if measured and is_due(task.step, run.plan.swap_period):
        # a pass through the model, as the update's: one process that fails at it must not leave the others waiting
        bound = run.learner.together(lambda: swap_bound(run.adapter, run.plan, before, groups, figures.alphas))
    step = Step(run, (task.round, task.step))
    step.metrics |= {"zero_variance_share_before": zero_variance_share(before), **swap_metrics(figures, bound)}
    step.metrics |= reward_metrics(before) | {"zero_variance_share": zero_variance_share(groups)}
    if extra_tokens:
        step.metrics["extra_tokens"] = extra_tokens
    step.update(groups)
    # after the update: one that fails has trained on no donor, and the step may be asked for once more
    run.open_step = None
    if task.swap in ("replace", "pool"):  # other silos' donors: a control's own count for nothing in the run record
        run.donors_trained += figures.used
    return Done(step.metrics)


def _key_donors(own: Sequence[OwnAnswers], *, worked: bool) -> dict[int, Sequence[pb.Donor]]:
    """Return the public file's own answer, or its solution, as often as Balanced can want one, as each prompt's
    donors."""
    texts = {each.prompt.row: each.prompt.solution if worked else each.prompt.reference for each in own}
    return {
        each.prompt.row: _donors("key", [texts[each.prompt.row]] * donors_wanted(0, len(each.answers))) for each in own
    }


def _self_donors(run: Run, task: PublicStep, own: Sequence[OwnAnswers]) -> tuple[dict[int, Sequence[pb.Donor]], int]:
    """Return the correct ones among further answers of this silo's own policy as the donors of each prompt, by default
    of as many answers as the other silos would have given. Beside them the tokens sampled."""
    right: dict[int, list[str]] = {each.prompt.row: [] for each in own}
    tokens = 0
    for other in range(SelfSwap.times(run.plan)):

        def draw(prompt: Prompt, sample: int, other: int = other) -> np.random.Generator:
            key = (run.material.silo, task.round, task.step, prompt.row, other, sample)
            return generator(seed_of(run.plan.seed, "self-rollout", *key))

        step, _ = answered(run, (task.round, task.step), list(right), "none", draw)
        tokens += int(step.metrics["tokens"])
        for each in step.own:
            right[each.prompt.row] += [answer.text for answer in each.answers if answer.correct and answer.finished]
    return {row: _donors("self", texts) for row, texts in right.items()}, tokens


def _logp_of(run: Run, task: PublicStep) -> Callable[[pb.Donor, int], Sequence[float]] | None:
    """Return what `DonorIntake` asks for the log-probabilities of a donor; None where its ratios take none."""
    known = run.material.donor_logp
    if run.plan.donor_denominator != "donor" or known is None:
        return None
    return lambda donor, row: known(donor.origin, task.round, task.step, row, donor.position)


def _donors(origin: str, texts: Sequence[str]) -> list[pb.Donor]:
    return [
        pb.Donor(origin=origin, position=place, response=pb.Response(text=text, finish=pb.FINISH_STOP))
        for place, text in enumerate(texts)
    ]


@dataclass
class SwapFigures:
    """Counts over the prompts of one public step.

    Attributes:
        wanted: donors Balanced asks for, sum of m.
        found: donors the coordinator sent.
        used: donors trained on.
        rejected: {silo: donors of it that failed here}.
        alphas: m'/K of each prompt.
    """

    wanted: int = 0
    found: int = 0
    used: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    alphas: list[float] = field(default_factory=list)


class DonorIntake:
    """Turns donors into answers this silo may train on.

    Args:
        silo: own name.
        codec: the shared tokenizer.
        grader: own grading of public answers.
        max_new_tokens: a donor that encodes to more is refused.
        logp_of: log-probabilities of a donor's tokens under the policy that wrote them, by donor and row of its prompt;
            a donor of which they are not known is refused. None: they are not wanted.
    """

    def __init__(
        self,
        silo: str,
        codec: TextCodec,
        grader: Grader,
        max_new_tokens: int,
        logp_of: Callable[[pb.Donor, int], Sequence[float]] | None = None,
    ) -> None:
        self._logp_of = logp_of
        self._silo = silo
        self._codec = codec
        self._grader = grader
        self._max_new_tokens = max_new_tokens

    def balanced(
        self,
        own: Sequence[OwnAnswers],
        donors: Mapping[int, Sequence[pb.Donor]],
        random_of: Callable[[Prompt], np.random.Generator],
    ) -> tuple[list[Group], SwapFigures]:
        """`swap: replace`: up to m verified donors take the place of wrong own answers, drawn uniformly.

        Args:
            own: this silo's answers, one entry a prompt.
            donors: by prompt index, in the coordinator's order.
            random_of: keyed generator for the choice of the answers that give way.
        """
        figures = SwapFigures()
        graded = self._graded(own, donors, figures)
        groups = []
        for one in own:
            correct = [answer.correct for answer in one.answers]
            wanted = donors_wanted(sum(correct), len(correct))
            good: list[Answer] = []
            for donor, answer in graded[one.prompt.row]:
                if donor.origin == self._silo or answer is None or not answer.correct:
                    figures.rejected[donor.origin] += 1
                elif len(good) < wanted:
                    good.append(answer)
            places = replaced_positions(correct, len(good), random_of(one.prompt))
            answers = list(one.answers)
            for place, answer in zip(places, good, strict=True):
                answers[place] = answer
            groups.append(Group(one.prompt.ids, tuple(answers)))
            figures.wanted += wanted
            figures.used += len(places)
            figures.alphas.append(len(places) / len(answers))
        return groups, figures

    def pooled(
        self, own: Sequence[OwnAnswers], donors: Mapping[int, Sequence[pb.Donor]], offer: str
    ) -> tuple[list[Group], SwapFigures]:
        """`swap: pool`: train on exactly the answers listed; wrong ones belong to the group too (Random).

        At most K of a prompt count, each once: what a list holds beyond is refused, else its length would set how much
        one prompt weighs, and how much memory the update takes.

        Args:
            own: this silo's answers, one entry a prompt.
            donors: by prompt index, in the coordinator's order.
            offer: what this silo's own message held; own answers are named by their place in it.
        """
        figures = SwapFigures()
        within: dict[int, Sequence[pb.Donor]] = {}
        for one in own:
            listed, most = donors.get(one.prompt.row, ()), len(one.answers)
            within[one.prompt.row] = listed[:most]
            figures.found += sum(donor.origin != self._silo for donor in listed[most:])
            figures.rejected.update(donor.origin for donor in listed[most:])
        graded = self._graded(own, within, figures)
        groups = []
        for one in own:
            left = dict(enumerate(offered_answers(one, offer)))
            answers: list[Answer] = []
            for donor, answer in graded[one.prompt.row]:
                if donor.origin == self._silo and not donor.HasField("response") and donor.position in left:
                    answers.append(left.pop(donor.position))
                elif donor.origin == self._silo or answer is None:
                    figures.rejected[donor.origin] += 1
                else:
                    answers.append(answer)
            # an empty list is a prompt the coordinator pooled nothing for
            group = Group(one.prompt.ids, tuple(answers) or one.answers)
            used = sum(bool(answer.donor) for answer in group.answers)
            groups.append(group)
            figures.used += used
            figures.alphas.append(used / len(group.answers))
        return groups, figures

    def _graded(
        self, own: Sequence[OwnAnswers], donors: Mapping[int, Sequence[pb.Donor]], figures: SwapFigures
    ) -> dict[int, list[tuple[pb.Donor, Answer | None]]]:
        """Donors by prompt row, each encoded and graded here; None where it cannot be used, and for a repeat."""
        listed: list[tuple[int, pb.Donor, Answer | None, str]] = []
        for one in own:
            seen: set[tuple[str, int]] = set()
            for donor in donors.get(one.prompt.row, ()):
                figures.found += donor.origin != self._silo
                repeated = (donor.origin, donor.position) in seen
                seen.add((donor.origin, donor.position))
                answer = None if repeated or donor.origin == self._silo else self._encoded(donor, one.prompt.row)
                listed.append((one.prompt.row, donor, answer, one.prompt.reference))
        usable = [(answer.text, reference) for _, _, answer, reference in listed if answer is not None]
        marks = iter(grade_distinct(self._grader, usable))
        graded: dict[int, list[tuple[pb.Donor, Answer | None]]] = {one.prompt.row: [] for one in own}
        for row, donor, answer, _ in listed:
            scored = None if answer is None else replace(answer, **next(marks)._asdict())
            graded[row].append((donor, scored))
        return graded

    def _encoded(self, donor: pb.Donor, row: int) -> Answer | None:
        if not donor.origin:  # an answer of nobody's counts as an own one
            return None
        if not donor.HasField("response") or donor.response.finish == pb.FINISH_UNSPECIFIED:
            return None
        finished = donor.response.finish == pb.FINISH_STOP
        ids = self._codec.answer_ids(donor.response.text, finished=finished)
        if len(ids) > self._max_new_tokens or self._codec.has_special(ids, finished=finished):
            return None
        logp = () if self._logp_of is None else tuple(self._logp_of(donor, row))
        if self._logp_of is not None and (len(logp) != len(ids) or not all(map(math.isfinite, logp))):
            return None
        return Answer(ids, donor.response.text, finished, donor=donor.origin, logp=logp)


# Public steps from one measurement to the next, and prompts of each: a hundredth of a step's time.
STEPS_BETWEEN = 8
PROMPTS_MAX = 2


@dataclass(frozen=True)
class SwapBound:
    """What one swapped answer does to the gradient. beta_mean, beta_max: norm of the gradient's change, over the
    prompts that were looked at.

    omega: K * mean(alpha * beta) over all prompts, the bound's proxy: 0 for each without a swap, and for each with one
        what the measured ones come to on average.
    """

    beta_mean: float
    beta_max: float
    omega: float


def is_due(step: int, swap_period: int) -> bool:
    """Return whether the bound is measured at this step: at the first public step of a round and every `STEPS_BETWEEN`
    after it. step: in the round, from 1."""
    return step // swap_period % STEPS_BETWEEN == 1 % STEPS_BETWEEN


def swap_bound(
    adapter: TrainedState, plan: Plan, before: Sequence[Group], after: Sequence[Group], alphas: Sequence[float]
) -> SwapBound | None:
    """Take one donor of the first few swapped groups back out, and see what that does to the gradient.

    Args:
        adapter: at the step's start; neither it nor its gradients are changed.
        plan: objective and temperature.
        before: own answers, group by group.
        after: the same groups with donors, each in the place of the answer that gave way.
        alphas: m'/K of each.

    Returns:
        None where nothing was swapped.
    """
    betas: list[float] = []
    products: list[float] = []
    for own, swapped, alpha in zip(before, after, alphas, strict=True):
        places = [place for place, answer in enumerate(swapped.answers) if answer.donor]
        if not places or len(own.answers) != len(swapped.answers) or len(betas) == PROMPTS_MAX:
            continue
        place = places[0]
        back = Group(swapped.prompt_ids, _with(swapped.answers, place, own.answers[place]))
        betas.append(gradient_change(adapter, plan, back, swapped))
        products.append(alpha * betas[-1])
    if not betas:
        return None
    samples = max(len(group.answers) for group in after)
    swapped_share = mean([float(alpha > 0) for alpha in alphas])
    return SwapBound(mean(betas), max(betas), samples * swapped_share * mean(products))


def gradient_change(adapter: TrainedState, plan: Plan, one: Group, other: Group) -> float:
    """Norm of the difference of two groups' gradients over the trained factors. Both are of one prompt."""
    coefficients: dict[tuple[int, ...], float] = {}
    for group, sign in ((one, 1.0), (other, -1.0)):
        batch = batch_of([group], plan)  # as a step by itself
        for answer, weight in zip(group.answers, (batch.advantages * batch.weights).tolist(), strict=True):
            # the same tokens in both have the same gradient, so only what is left of their weights counts
            coefficients[answer.ids] = coefficients.get(answer.ids, 0.0) + sign * weight
    remaining = {ids: value for ids, value in coefficients.items() if ids and value}
    if not remaining:
        return 0.0
    decoder = adapter.decoder
    stream = stream_of([one.prompt_ids], [(0, ids) for ids in remaining], decoder.device)
    logp, _ = token_logp(
        decoder.hidden(stream, checkpointing=True), decoder.head, stream.targets, plan.rollout.temperature
    )  # [M]
    weights = torch.tensor(list(remaining.values()), device=decoder.device).repeat_interleave(stream.lengths)  # [M]
    gradients = torch.autograd.grad((weights * logp).sum(), adapter.parameters)
    return float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt())


def _with(answers: tuple[Answer, ...], place: int, answer: Answer) -> tuple[Answer, ...]:
    return (*answers[:place], answer, *answers[place + 1 :])


def swap_metrics(figures: SwapFigures, bound: SwapBound | None) -> dict[str, Any]:
    """Return the metrics of a swap. alpha is m'/K of a prompt: the share of its answers that donors took the place
    of."""
    metrics: dict[str, Any] = {
        "donors_wanted": figures.wanted,
        "donors_found": figures.found,
        "donors_used": figures.used,
        "donors_rejected": dict(figures.rejected),
        "alpha_mean": mean(figures.alphas),
        "alpha_max": max(figures.alphas, default=0.0),
        "alpha_histogram": {f"{alpha:.3f}": count for alpha, count in sorted(Counter(figures.alphas).items())},
        "swapped_share": mean([float(alpha > 0) for alpha in figures.alphas]),
    }
    if bound is not None:
        metrics |= {"beta_mean": bound.beta_mean, "beta_max": bound.beta_max, "omega": bound.omega}
    return metrics

"""One GRPO step: answers to prompts in, changed factors and figures out (docs/explain/objective.md).

The objective comes first, in pure torch, and knows no model, tokenizer or silo: advantages, the clipped objective, KL
and how tokens are averaged. Sources: PubSwap Eq. 2 (with the ratio on y_t: the printed y_<t is a typo), Schulman's k3
estimator, DAPO's clip-higher, Ye et al.'s dual clip, FedProx; Dr.GRPO's constant normaliser, GSPO's ratio of a whole
answer, CISPO's clipped weight (MiniMax-M1), importance sampling truncated or masked against the rollout engine.

The `Learner` then makes `epochs` passes over the step's whole batch, one optimiser step each. The old log-probabilities
are those of the first pass, detached: it sees the policy that generated, so no extra forward is needed, and donors'
tokens get the receiver's own policy as denominator (`local`), unless the plan names another (`donor_denominator`).
A batch may be cut into parts, and these dealt out over processes (`scale_out`): weights are those of the whole batch,
gradients add up and only their sum is applied. Groups without signal stay in every denominator but are left out of the
forward pass, unless a KL or entropy term wants them.

Axes, as trailing comments: K answers of one prompt, R answers of a batch (rows), M answer tokens of a batch, one after
the other without padding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.plan import Objective, Plan
from silo.budgets import SCORES_MAX
from silo.trainer.adapters import TrainedState
from silo.trainer.decoder import Padding, Stream, stream_of, token_logp
from silo.trainer.scale_out import BAD_TASK, Processes, dealt

T = TypeVar("T")
_Snapshot = tuple[list[Tensor], dict[str, Any]]

# Rewards closer together than this are one value: the group carries no signal.
ZERO_VARIANCE_RANGE = 1e-12
# A log-ratio counts up to here: exp(20) is 5e8. Beyond 88 exp overflows, and the gradient of a clipped token, 0 x inf,
# would be NaN.
LOG_RATIO_MAX = 20.0
# gamma of LUFFY's policy shaping
SHAPE = 0.1


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt.

    Attributes:
        ids: its tokens, the end-of-sequence token included where it was emitted.
        text: the same as text, special tokens left out.
        finished: False where the token limit cut it off.
        reward: of the local verdict, 0 to 1; advantages go by it.
        donor: name of the silo that wrote it; empty for an own answer.
        correct: the local verdict; counts, donors and replaced answers go by it. Where it is not given, a reward
            above 1/2 is correct, which is right for rewards of 0 and 1 alone.
        logp: of each token under the policy that wrote it, as it was reported then; empty: nobody has asked.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool
    reward: float = 0.0
    donor: str = ""
    correct: bool = None  # type: ignore[assignment]  # a bool once it is made
    logp: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.correct is None:
            object.__setattr__(self, "correct", self.reward > 0.5)


@dataclass(frozen=True)
class Group:
    """A prompt and the answers a step trains on. advantages: of each answer, from outside; None: they follow from the
    rewards."""

    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    advantages: tuple[float, ...] | None = None


def has_zero_variance(rewards: Tensor) -> bool:
    """Return True for a group that gives no policy gradient, a group of one among them. rewards: [K]."""
    return bool(rewards.max() - rewards.min() < ZERO_VARIANCE_RANGE)


def group_advantages(rewards: Tensor, *, std: Literal["sample", "population", "none"], epsilon: float) -> Tensor:
    """A_k = (r_k - mean(r)) / (std(r) + epsilon); exactly 0 for a group of one or of equal rewards.

    Args:
        rewards: [K].
        std: divide the squared deviations by K - 1 (sample, as VERL) or K (population, as FedGRPO prints); none: A_k
            is r_k - mean(r) (Dr.GRPO).
        epsilon: eps_A.
    """
    if has_zero_variance(rewards):
        return torch.zeros_like(rewards)  # [K]
    if std == "none":
        return rewards - rewards.mean()  # [K]
    deviation = rewards.std(correction=1 if std == "sample" else 0)  # []
    return (rewards - rewards.mean()) / (deviation + epsilon)  # [K]


def ratio_of(logp: Tensor, logp_old: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return rho_kt of PubSwap Eq. 2, its logarithm kept within +-`LOG_RATIO_MAX`; a token beyond has no gradient.

    Args:
        logp: [M].
        logp_old: [M].
        lengths: [R] tokens of each answer, in their order. Each token then gets s_k = exp(mean_t log rho_kt), the ratio
            of its whole answer (GSPO, eq. 7).

    Returns:
        [M].
    """
    difference = logp - logp_old  # [M]
    if lengths is not None:
        means = torch.segment_reduce(difference, "sum", lengths=lengths) / lengths.clamp(min=1)  # [R]
        difference = means.repeat_interleave(lengths)  # [M]
    return difference.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()  # [M]


def policy_gain(logp: Tensor, ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """Return each token's term of the objective, to be maximised: min(rho A, clip(rho, 1 - low, 1 + high) A).

    With `clip: cispo` it is min(rho, 1 + high) A log pi, whose first factor has no gradient (MiniMax-M1, eq. 4 without
    its lower bound): a clip takes weight from a token and never its gradient. With `dual_clip` the loss is bounded at
    this multiple of |A| where A < 0.

    Args:
        logp: [M] with gradient.
        ratio: [M] of `ratio_of`, with gradient.
        advantages: [M], the same for every token of an answer.
        objective: of the plan.
    """
    if objective.clip == "cispo":
        return ratio.detach().clamp(max=1 + objective.clip_high) * advantages * logp
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages  # [M]
    gain = torch.minimum(ratio * advantages, clipped)  # [M]
    if objective.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, objective.dual_clip * advantages), gain)  # [M]
    return gain


def is_clipped(ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """Return tokens whose gradient a clip removes: ratio outside the band on the side that A pushes to, or beyond the
    bound of the dual clip where A < 0. Under `cispo`, tokens whose weight it cuts. All [M]."""
    above = ratio > 1 + objective.clip_high  # [M]
    if objective.clip == "cispo":
        return (advantages != 0) & above
    outside = ratio < 1 - objective.clip_low  # [M]
    if objective.dual_clip is not None:
        outside = outside | (ratio > objective.dual_clip)
    return ((advantages > 0) & above) | ((advantages < 0) & outside)  # [M]


def donor_gain(logp: Tensor, advantages: Tensor, denominator: Literal["unit", "shaped"]) -> Tensor:
    """Return the term of donors' tokens whose denominator is 1: pi A (`unit`), or pi / (pi + 0.1) A (`shaped`, LUFFY,
    Yan et al. 2025, eq. 7). No clip holds there: a ratio of pi is never above 1. All [M]."""
    probability = logp.exp()  # [M]
    if denominator == "shaped":
        return probability / (probability + SHAPE) * advantages
    return probability * advantages


def importance_factor(
    logp_old: Tensor, logp_engine: Tensor, *, correction: Literal["truncate", "mask"], cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's importance weight w = exp(logp_old - logp_engine) against the engine that sampled it, without
    gradient: min(cap, w) (`truncate`, Yao et al. 2025), or w, and 0 where it is beyond the cap (`mask`).

    A log-probability that is not there or not finite says nothing of its token, whose factor is 0.

    Args:
        logp_old: [M] of the trainer, before the update.
        logp_engine: [M] as the engine reported them; NaN where it did not.
        correction: which of the two.
        cap: 1 or more.

    Returns:
        The factors, and which tokens are beyond the cap, and which have no log-probability. All [M].
    """
    missing = ~logp_engine.isfinite()  # [M]
    weight = ratio_of(logp_old.detach(), torch.where(missing, 0.0, logp_engine))  # [M]
    beyond = ~missing & (weight > cap)  # [M]
    factor = weight.clamp(max=cap) if correction == "truncate" else weight.masked_fill(beyond, 0.0)  # [M]
    return factor.masked_fill(missing, 0.0), beyond, missing


def k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """KL(policy || reference) per token, estimated as exp(d) - d - 1 >= 0 with d = logp_ref - logp. All [M].

    d counts up to `LOG_RATIO_MAX`, beyond which a token has no gradient. Far below 0 nothing overflows: there the value
    and its pull towards the reference stay exact.
    """
    difference = (logp_reference - logp).clamp(max=LOG_RATIO_MAX)  # [M]
    return difference.exp() - difference - 1  # [M]


def row_weights(
    token_counts: Tensor,
    group_sizes: Tensor,
    prompts: int,
    aggregation: Literal["response-mean", "token-mean", "constant"],
    *,
    kept: Tensor | None = None,
    tokens_max: int = 1,
) -> Tensor:
    """Weight of every token of an answer, so that a weighted sum over tokens is the step's mean.

    `response-mean` is PubSwap Eq. 2: mean over an answer's tokens, over a prompt's answers, over prompts.
    `token-mean` is one mean over all tokens of the step. `constant` divides the sum over an answer's tokens by the same
    number for all, then as response-mean (Dr.GRPO). Because the weights carry the denominators, a batch can
    be cut into parts whose losses add up, and answers without gradient can be left out of the forward pass.

    Args:
        token_counts: [R] tokens of each answer; an empty answer weighs nothing.
        group_sizes: [R] number of answers K' in the answer's group.
        prompts: groups in the step, those without signal included.
        aggregation: which of the three means.
        kept: [R] bool, False where a truncated answer is masked (`mask_truncated`): it keeps its place in the
            prompt's mean but adds no token.
        tokens_max: the longest answer that there may be, by which `constant` divides.
    """
    counts = token_counts.float()  # [R]
    keep = (token_counts > 0).float() if kept is None else ((token_counts > 0) & kept).float()  # [R]
    if aggregation == "token-mean":
        return keep / (counts * keep).sum().clamp(min=1)  # [R]
    if aggregation == "constant":
        return keep / (tokens_max * group_sizes.float() * prompts)  # [R]
    return keep / (counts.clamp(min=1) * group_sizes.float() * prompts)  # [R]


def proximal_term(parameters: Iterable[Tensor], starts: Iterable[Tensor], mu: float) -> Tensor:
    """FedProx, to be added to the loss: (mu / 2) sum ||theta - theta_p||^2 over the factors, each on its own.
    The paper writes it as a term to minimise beside an objective to maximise: mind the sign."""
    squares = [(parameter - start).square().sum() for parameter, start in zip(parameters, starts, strict=True)]
    return 0.5 * mu * torch.stack(squares).sum()


@dataclass(frozen=True)
class StepFigures:
    """Figures of one update; all are means or counts.

    Attributes:
        clip_share: share of trained tokens whose gradient the clip removed, over the epochs after the first.
        kl: mean k3 to the reference before the update; None where the plan has no KL term.
        entropy: mean entropy before the update in nats; None where the plan has no entropy term.
        logp_own: mean log-probability of a token of the trained own answers; None without any.
        logp_donor: the same for donors: how far from the local policy they are.
        ratio_deviation_first: largest |rho - 1| at the first epoch: 0 by construction, but for donors' tokens where the
            donor's own policy is the denominator.
        ratio_deviation_last: the same at the last epoch.
        grad_norm: before clipping, last epoch.
        trained_tokens: answer tokens in the forward pass.
        importance_truncated_share: share of own answers' tokens whose importance weight the cap cut or dropped; None
            where the plan corrects nothing.
        importance_missing: own answers' tokens without an engine's log-probability, whose weight is 0; None likewise.
    """

    clip_share: float
    kl: float | None
    entropy: float | None
    logp_own: float | None
    logp_donor: float | None
    ratio_deviation_first: float
    ratio_deviation_last: float
    grad_norm: float
    trained_tokens: int
    importance_truncated_share: float | None = None
    importance_missing: int | None = None


@dataclass(frozen=True)
class Batch:
    """The answers of a step, prompt by prompt, and what each counts for in the loss; tensors are [R].

    Attributes:
        groups: the prompts with their answers.
        answers: each with the place of its prompt among them.
        advantages: of each answer's tokens.
        weights: of each answer's tokens in the step's mean.
        trained: numbers of the answers that pass through the model.
        likelihood: they are trained on by likelihood (`Learner.update`).
    """

    groups: Sequence[Group]
    answers: Sequence[tuple[int, Answer]]
    advantages: Tensor
    weights: Tensor
    trained: Sequence[int]
    likelihood: bool = False


def batch_of(groups: Sequence[Group], plan: Plan, *, likelihood: bool = False) -> Batch:
    """Give every answer its advantage and its tokens' weight, and leave out of training what has no signal.

    An answer of weight 0 adds nothing, nor does one of advantage 0 unless a KL or entropy term wants it; both stay in
    the denominators, which are those of the whole step.
    """
    settings = plan.objective
    answers: list[tuple[int, Answer]] = []
    advantages: list[Tensor] = []
    for place, group in enumerate(groups):
        advantages.append(_advantages(group, settings))
        answers.extend((place, answer) for answer in group.answers)
    if not answers:
        return Batch(groups, [], torch.empty(0), torch.empty(0), [], likelihood)
    kept = torch.tensor([answer.finished or not settings.mask_truncated for _, answer in answers])  # [R]
    weights = row_weights(
        torch.tensor([len(answer.ids) for _, answer in answers]),
        torch.tensor([len(groups[place].answers) for place, _ in answers]),
        len(groups),
        settings.token_aggregation,
        kept=kept,
        tokens_max=plan.rollout.max_new_tokens,
    )  # [R]
    advantage = torch.cat(advantages)  # [R]
    wants_all = settings.kl_coefficient > 0 or settings.entropy_coefficient > 0
    trained = (weights > 0) & (torch.ones_like(kept) if wants_all else advantage != 0)  # [R]
    rows = [row for row, wanted in enumerate(trained.tolist()) if wanted]
    return Batch(groups, answers, advantage, weights, rows, likelihood)


def _advantages(group: Group, settings: Objective) -> Tensor:
    """Return the advantage of each answer. Raises ValueError: there are not as many as answers."""
    if group.advantages is not None:
        if len(group.advantages) != len(group.answers):
            raise ValueError(f"{len(group.advantages)} advantages for {len(group.answers)} answers")
        return torch.tensor(group.advantages, dtype=torch.float32)  # [K]
    rewards = torch.tensor([answer.reward for answer in group.answers], dtype=torch.float32)  # [K]
    return group_advantages(rewards, std=settings.advantage_std, epsilon=settings.advantage_epsilon)  # [K]


@dataclass
class _Part:
    """A slice of the batch that fits the budgets, as one stream; tensors are [M].

    Attributes:
        likelihood: it is trained on by likelihood.
        counts: False: of weight zero, only so that every process makes as many passes.
        logp_written: under the policy that wrote each answer, as it was reported then; NaN where it was not.
        factor: importance weight of each token; None: no correction.
    """

    stream: Stream
    weights: Tensor
    advantages: Tensor
    is_donor: Tensor
    donor_tokens: int
    likelihood: bool = False
    counts: bool = True
    logp_written: Tensor | None = None
    factor: Tensor | None = None
    logp_old: Tensor | None = None
    logp_reference: Tensor | None = None


class Learner:
    """The optimiser of one run and the update it makes.

    Args:
        adapter: the factors to train.
        plan: objective, optimiser and temperature.
        microbatch_tokens: budget of one forward and backward pass, prompts counted once.
        checkpointing: keep each layer's input alone and compute the rest again in the backward pass.
        group: the processes that share the work; None: this one alone.
        equal_passes: every process makes as many passes as any other, as sharded weights want it.

    Attributes:
        reference: factors by wire name of what the KL term is against, where the plan says an adapter.
    """

    def __init__(
        self,
        adapter: TrainedState,
        plan: Plan,
        *,
        microbatch_tokens: int,
        checkpointing: bool = False,
        group: Processes | None = None,
        equal_passes: bool = False,
    ) -> None:
        self._group = group
        self._equal_passes = equal_passes
        self._adapter = adapter
        self._plan = plan
        self._microbatch_tokens = microbatch_tokens
        self._checkpointing = checkpointing
        self._device = adapter.parameters[0].device
        self.reference: Mapping[str, Array] | None = None
        self._optimiser = self._fresh_optimiser()

    def start_round(self) -> None:
        """Optimiser state is re-created every round (the paper), unless the plan keeps it."""
        if self._plan.optimiser.state == "reset":
            self._optimiser = self._fresh_optimiser()

    def update(self, groups: Sequence[Group], *, likelihood: bool = False) -> StepFigures:
        """Make the step's update.

        With `likelihood` it is a supervised one: log pi, times the advantage, takes the place of the clipped objective.
        There is no ratio and no clip; with advantages of 1, and without KL and entropy, the loss is the cross-entropy.
        Whatever is raised, memory that does not suffice among it, factors and optimiser are as before the step.

        Raises:
            OperationError: a gradient is not finite.
        """
        before = self._snapshot() if self._group is None else self._group.together(self._snapshot)
        try:
            return self._update(groups, likelihood)
        except BaseException:
            self._restore(before)
            raise

    def _update(self, groups: Sequence[Group], likelihood: bool) -> StepFigures:
        plan, objective_plan = self._plan, self._plan.objective
        batch = batch_of(groups, plan, likelihood=likelihood)
        parts = self._parts(batch)
        if objective_plan.kl_coefficient > 0:
            self.together(lambda: self._add_references(parts))
        figures = _Figures()
        for epoch in range(plan.optimiser.epochs):
            self._optimiser.zero_grad(set_to_none=True)
            figures.deviation = []
            self.together(lambda first=epoch == 0: self._backward_all(parts, figures, first=first))  # type: ignore[misc]
            for parameter in self._adapter.parameters:
                # no part may be left when every group lacks signal; momentum and weight decay still act
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            if self._group is not None:
                self._group.add_up([each.grad for each in self._adapter.parameters if each.grad is not None])
            if objective_plan.proximal_mu > 0:
                proximal_term(self._adapter.parameters, self._adapter.start, objective_plan.proximal_mu).backward()
            norm = torch.nn.utils.clip_grad_norm_(self._adapter.parameters, plan.optimiser.grad_norm_max)
            figures.grad_norm = float(norm)
            if self._group is None:
                _refuse_not_finite(figures.grad_norm)
            else:  # all processes hold the same sum, so that all stop together
                self._group.together(lambda: _refuse_not_finite(figures.grad_norm))
            self._optimiser.step()
        if self._group is not None:
            self._group.require_equal(self._adapter.parameters)
        return figures.summary(self._group)

    def together(self, work: Callable[[], T]) -> T:
        """Passes through the model, which every process makes: where one fails at them, none goes on.

        With sharded weights they are not work of this process alone: others wait inside for a share of this one.

        Raises:
            OperationError: another process failed; each is as it was.
            ProcessLost: with sharded weights; this one must end.
        """
        if self._group is None:
            return work()
        if self._equal_passes:
            with self._group.lost_on_failure():
                return work()
        return self._group.together(work)

    def _add_references(self, parts: Sequence[_Part]) -> None:
        with torch.no_grad(), self._as_reference():
            for part in parts:
                part.logp_reference = self._logp(part)[0]  # [M]

    def _as_reference(self) -> AbstractContextManager[None]:
        """Make the model compute inside the block what the KL term is against. Raises OperationError: it is not
        there."""
        if self._plan.objective.kl_reference == "frozen_base":
            return self._adapter.off()
        if self.reference is None:
            raise OperationError("the adapter that the KL term is against was not loaded", code=BAD_TASK)
        return self._adapter.replaced_by(self.reference)

    def _backward_all(self, parts: Sequence[_Part], figures: _Figures, *, first: bool) -> None:
        for part in parts:
            self._backward(part, figures, first=first)

    def _snapshot(self) -> _Snapshot:
        """Copies of factors and optimiser to go back to. They are made first: where memory does not suffice, going back
        takes none."""
        factors = [parameter.detach().clone() for parameter in self._adapter.parameters]
        return factors, copy.deepcopy(self._optimiser.state_dict())

    def _restore(self, before: _Snapshot) -> None:
        factors, optimiser = before
        self._optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(self._adapter.parameters, factors, strict=True):
                parameter.copy_(value)
        self._optimiser.load_state_dict(optimiser)

    def state(self) -> dict[str, Tensor]:
        """The optimiser's moments and counts: copies on the CPU, as `optimiser.KIND.NAME`; none before a step."""
        by_place = self._optimiser.state_dict()["state"]
        names = self._adapter.trained_names
        return {
            f"optimiser.{kind}.{names[place]}": value.detach().to("cpu", copy=True)
            for place, kinds in by_place.items()
            for kind, value in kinds.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to a `state`. Raises ValueError: it is not of this optimiser; nothing was changed."""
        parameters = dict(zip(self._adapter.trained_names, self._adapter.parameters, strict=True))
        places = {name: place for place, name in enumerate(parameters)}
        by_place: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            _, kind, name = key.split(".", 2)
            if name not in places or (kind != "step" and value.shape != parameters[name].shape):
                raise ValueError(f"the optimiser's {key!r}")
            by_place.setdefault(places[name], {})[kind] = value.clone()  # it is changed in place from now on
        if by_place and any(
            set(by_place.get(place, {})) != {"step", "exp_avg", "exp_avg_sq"} for place in places.values()
        ):
            raise ValueError("the optimiser's moments")
        optimiser = self._fresh_optimiser()
        optimiser.load_state_dict({"state": by_place, "param_groups": optimiser.state_dict()["param_groups"]})
        self._optimiser = optimiser

    def _fresh_optimiser(self) -> torch.optim.AdamW:
        settings = self._plan.optimiser
        return torch.optim.AdamW(
            self._adapter.parameters,
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _parts(self, batch: Batch) -> list[_Part]:
        """Cut what is trained on into parts, each of which is one pass through the model and within its budgets. Of
        several processes each makes the parts of its own share."""
        groups, answers = batch.groups, batch.answers
        own = self._cut(batch, self._share(batch, self._group) if self._group else batch.trained)
        passes = self._filled_up(own, batch.trained, self._group) if self._group and self._equal_passes else own
        parts = []
        for number, chosen in enumerate(passes):
            places = sorted({answers[row][0] for row in chosen})
            local = {place: index for index, place in enumerate(places)}
            stream = stream_of(
                [groups[place].prompt_ids for place in places],
                [(local[answers[row][0]], answers[row][1].ids) for row in chosen],
                self._device,
            )
            donors = torch.tensor([bool(answers[row][1].donor) for row in chosen])
            weights_of, advantages_of, is_donor = (
                each.to(self._device).repeat_interleave(stream.lengths)
                for each in (batch.weights[chosen], batch.advantages[chosen], donors)
            )
            donor_tokens = sum(len(answers[row][1].ids) for row in chosen if answers[row][1].donor)
            counts = number < len(own)
            weights_of = weights_of if counts else torch.zeros_like(weights_of)
            part = _Part(stream, weights_of, advantages_of, is_donor, donor_tokens, batch.likelihood, counts)
            if self._plan.wants_logp:
                part.logp_written = torch.tensor(
                    [each for row in chosen for each in _written(answers[row][1])], device=self._device
                )
            parts.append(part)
        return parts

    @staticmethod
    def _share(batch: Batch, among: Processes) -> Sequence[int]:
        """Return this process's share of the answers that are trained on: whole prompts, dealt out by tokens."""
        groups, answers, rows = batch.groups, batch.answers, batch.trained
        tokens = {answers[row][0]: len(groups[answers[row][0]].prompt_ids) for row in rows}
        for row in rows:
            tokens[answers[row][0]] += len(answers[row][1].ids)
        places = sorted(tokens)
        mine = dealt([tokens[place] for place in places], among.size)[among.rank]
        chosen = {places[each] for each in mine}
        return [row for row in rows if answers[row][0] in chosen]

    @staticmethod
    def _filled_up(own: list[list[int]], rows: Sequence[int], among: Processes) -> list[list[int]]:
        """Fill up to as many passes as any process makes. An added row may be anybody's and counts for nothing."""
        most = max(among.gather(len(own)))
        return own + [list(rows[:1])] * (most - len(own))

    def _cut(self, batch: Batch, rows: Sequence[int]) -> list[list[int]]:
        """Cut rows into parts within the token budget and `SCORES_MAX`; a single row that exceeds them is a part of its
        own. Answers to one prompt stay together as far as they fit, and groups of like lengths meet."""
        groups, answers = batch.groups, batch.answers
        longest: dict[int, int] = {}
        for row in rows:
            place, answer = answers[row]
            longest[place] = max(longest.get(place, 0), len(answer.ids))
        parts: list[list[int]] = []
        tokens, seen, padding = 0, set[int](), Padding()
        for row in sorted(rows, key=lambda row: (-longest[answers[row][0]], answers[row][0])):
            place, answer = answers[row]
            prompt, length = len(groups[place].prompt_ids), len(answer.ids)
            more = length + (0 if place in seen else prompt)
            padded = padding.with_answer(prompt - 1, length, more_prompts=int(place not in seen))
            if not parts or tokens + more > self._microbatch_tokens or padded.scores > SCORES_MAX:
                parts.append([])
                tokens, seen = 0, set()
                more, padded = length + prompt, Padding().with_answer(prompt - 1, length, more_prompts=1)
            parts[-1].append(row)
            padding = padded
            tokens += more
            seen.add(place)
        return parts

    def _logp(self, part: _Part) -> tuple[Tensor, Tensor | None]:
        """Log-probability of every answer token, and the entropy where the plan asks for it. Both [M]."""
        decoder = self._adapter.decoder
        return token_logp(
            decoder.hidden(part.stream, checkpointing=self._checkpointing),
            decoder.head,
            part.stream.targets,
            self._plan.rollout.temperature,
            with_entropy=self._plan.objective.entropy_coefficient > 0,
        )

    def _backward(self, part: _Part, figures: _Figures, *, first: bool) -> None:
        settings, weights = self._plan.objective, part.weights
        logp, entropy = self._logp(part)  # [M]
        if part.logp_old is None:
            part.logp_old = logp.detach()  # [M]
            if self._plan.donor_denominator == "donor" and part.logp_written is not None:
                part.logp_old = torch.where(part.is_donor, part.logp_written, part.logp_old)  # [M]
            self._correct(part, figures)
        lengths = part.stream.lengths if settings.ratio == "sequence" else None
        ratio = ratio_of(logp, part.logp_old, lengths)  # [M]
        gain = self._gain(logp, ratio, part)  # [M]
        loss = -((gain if part.factor is None else part.factor * gain) * weights).sum()
        if part.logp_reference is not None:
            kl = k3(logp, part.logp_reference)  # [M]
            loss = loss + settings.kl_coefficient * (kl * weights).sum()
            if first and part.counts:
                figures.add_sum("kl", kl)
        if entropy is not None:
            loss = loss - settings.entropy_coefficient * (entropy * weights).sum()
            if first and part.counts:
                figures.add_sum("entropy", entropy)
        loss.backward()
        if not part.counts:
            return
        with torch.no_grad():
            figures.add_ratio(logp, ratio, part, self._plan, first=first)

    def _gain(self, logp: Tensor, ratio: Tensor, part: _Part) -> Tensor:
        """Return each token's term of what is maximised. All [M]."""
        denominator = self._plan.donor_denominator
        if part.likelihood:
            return logp * part.advantages
        gain = policy_gain(logp, ratio, part.advantages, self._plan.objective)  # [M]
        if part.donor_tokens and (denominator == "unit" or denominator == "shaped"):
            gain = torch.where(part.is_donor, donor_gain(logp, part.advantages, denominator), gain)  # [M]
        return gain

    def _correct(self, part: _Part, figures: _Figures) -> None:
        """Set the importance weights of a part: of own answers' tokens, since no engine of this silo's wrote the
        donors'."""
        settings = self._plan.objective
        if settings.importance_correction == "none" or part.likelihood:
            return
        assert part.logp_old is not None and part.logp_written is not None  # noqa: S101  # set before
        factor, beyond, missing = importance_factor(
            part.logp_old, part.logp_written, correction=settings.importance_correction, cap=settings.importance_cap
        )
        part.factor = factor.masked_fill(part.is_donor, 1.0)  # [M]
        if part.counts:
            figures.add_sum("truncated", beyond & ~part.is_donor)
            figures.add_sum("missing", missing & ~part.is_donor)


def _written(answer: Answer) -> Sequence[float]:
    """Return the log-probabilities that were reported with an answer; NaN where there are not as many as tokens."""
    return answer.logp if len(answer.logp) == len(answer.ids) else [math.nan] * len(answer.ids)


def _refuse_not_finite(norm: float) -> None:
    if not math.isfinite(norm):
        raise OperationError("the gradient is not finite; the step was not applied", code="NOT_FINITE")


@dataclass
class _Figures:
    """Sums over the parts of a step, on the device until `summary` reads them all at once.

    Attributes:
        grad_norm: before clipping, of the last epoch.
        deviation: largest |rho - 1| of each part, of the epoch that is under way.
    """

    grad_norm: float = 0.0
    deviation: list[Tensor] = field(default_factory=list)
    _deviation_first: list[Tensor] = field(default_factory=list)
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _tokens: int = 0
    _donor_tokens: int = 0
    _clippable: int = 0

    def add_sum(self, name: str, per_token: Tensor) -> None:
        more = per_token.detach().sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + more if name in self._sums else more

    def add_ratio(self, logp: Tensor, ratio: Tensor, part: _Part, plan: Plan, *, first: bool) -> None:
        """Take the ratios of a part in. logp, ratio: [M]."""
        self.deviation.append((ratio - 1).abs().max().double())
        if first:
            self._deviation_first = self.deviation
            self._tokens += len(logp)
            self._donor_tokens += part.donor_tokens
            self.add_sum("own", logp.masked_fill(part.is_donor, 0.0))
            self.add_sum("donor", logp.masked_fill(~part.is_donor, 0.0))
            return
        if part.likelihood:
            return
        clipped = is_clipped(ratio, part.advantages, plan.objective)
        if plan.donor_denominator in ("unit", "shaped"):
            clipped = clipped & ~part.is_donor
        self.add_sum("clipped", clipped)
        self._clippable += len(clipped)

    def summary(self, group: Processes | None = None) -> StepFigures:
        """Over the parts of all processes."""
        collected = {
            **self._sums,
            **{f"first {place}": each for place, each in enumerate(self._deviation_first)},
            **{f"last {place}": each for place, each in enumerate(self.deviation)},
        }
        values = torch.stack(list(collected.values())).tolist() if collected else []
        read = dict(zip(collected, values, strict=True))
        if group is not None:
            read = self._added_up(read, group)

        def mean(name: str, tokens: int) -> float | None:
            return read[name] / tokens if name in read and tokens else None

        def largest(prefix: str) -> float:
            return max((value for name, value in read.items() if name.startswith(prefix)), default=0.0)

        return StepFigures(
            clip_share=mean("clipped", self._clippable) or 0.0,
            kl=mean("kl", self._tokens),
            entropy=mean("entropy", self._tokens),
            logp_own=mean("own", self._tokens - self._donor_tokens),
            logp_donor=mean("donor", self._donor_tokens),
            ratio_deviation_first=largest("first "),
            ratio_deviation_last=largest("last "),
            grad_norm=self.grad_norm,
            trained_tokens=self._tokens,
            importance_truncated_share=mean("truncated", self._tokens - self._donor_tokens),
            importance_missing=int(read["missing"]) if "missing" in read else None,
        )

    def _added_up(self, own: dict[str, float], group: Processes) -> dict[str, float]:
        counts = (self._tokens, self._donor_tokens, self._clippable)
        shares = group.gather([own, counts])
        self._tokens, self._donor_tokens, self._clippable = (
            sum(other[place] for _, other in shares) for place in range(len(counts))
        )
        read: dict[str, float] = {}
        for rank, (values, _) in enumerate(shares):
            for name, value in values.items():
                if name.startswith(("first ", "last ")):
                    read[f"{name} {rank}"] = value  # the largest is asked for
                else:
                    read[name] = read.get(name, 0.0) + value
        return read

"""One GRPO step's update: groups in, changed factors and figures out (methods 1.3, 1.4).

`epochs` passes over the step's whole batch, one optimiser step each. The old log-probabilities are those of the
first pass, detached: it sees the policy that generated, so no extra forward is needed, and donors' tokens get the
receiver's own policy as denominator (`local`, methods 2.3). A batch may be cut into parts: gradients add up and
only their sum is applied. Groups without signal stay in every denominator but are left out of the forward pass,
unless a KL or entropy term wants them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsilo.treaty.errors import OperationError
from fedsilo.treaty.plan import Plan
from silo.trainer import objective
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.batch import Answer, Group, Stream, stream_of
from silo.trainer.layers import token_logp


@dataclass(frozen=True)
class StepFigures:
    """What one update says about itself; all are means or counts.

    Attributes:
        clip_share: share of trained tokens whose gradient the clip removed, over the epochs after the first.
        kl: mean k3 to the base before the update; None where the plan has no KL term.
        entropy: mean entropy before the update in nats; None where the plan has no entropy term.
        logp_own: mean log-probability of a token of the trained own answers; None without any.
        logp_donor: the same for donors: how far from the local policy they are (methods 2.8).
        ratio_deviation_first: largest |rho - 1| at the first epoch: 0 by construction.
        ratio_deviation_last: the same at the last epoch.
        grad_norm: before clipping, last epoch.
        trained_tokens: answer tokens in the forward pass.
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


@dataclass
class _Part:
    """A slice of the batch that fits the token budget, as one stream; all [M] but the stream."""

    stream: Stream
    weights: Tensor
    advantages: Tensor
    is_donor: Tensor
    logp_old: Tensor | None = None
    logp_reference: Tensor | None = None


@dataclass(frozen=True)
class _Snapshot:
    factors: list[Tensor]
    optimiser: dict[str, Any]


class Learner:
    """The optimiser of one run and the update it makes.

    Args:
        adapter: the factors to train.
        plan: objective, optimiser and temperature.
        microbatch_tokens: budget of one forward and backward pass, prompts counted once.
    """

    def __init__(self, adapter: LoraAdapter, plan: Plan, *, microbatch_tokens: int) -> None:
        self._adapter = adapter
        self._plan = plan
        self._microbatch_tokens = microbatch_tokens
        self._device = adapter.parameters[0].device
        self._optimiser = self._fresh_optimiser()

    def start_round(self) -> None:
        """Optimiser state is re-created every round (the paper), unless the plan keeps it."""
        if self._plan.optimiser.state == "reset":
            self._optimiser = self._fresh_optimiser()

    def update(self, groups: Sequence[Group]) -> StepFigures:
        """Raises OperationError: a gradient is not finite; factors and optimiser are as they were before the step."""
        plan, objective_plan = self._plan, self._plan.objective
        parts = self._parts(groups)
        if objective_plan.kl_coefficient > 0:
            with torch.no_grad(), self._adapter.off():
                for part in parts:
                    part.logp_reference = self._logp(part)[0]  # [M]
        figures = _Figures()
        before = self._snapshot() if plan.optimiser.epochs > 1 else None
        for epoch in range(plan.optimiser.epochs):
            self._optimiser.zero_grad(set_to_none=True)
            figures.start_epoch()
            for part in parts:
                self._backward(part, figures, first=epoch == 0)
            if objective_plan.proximal_mu > 0:
                objective.proximal_term(
                    self._adapter.parameters, self._adapter.start, objective_plan.proximal_mu
                ).backward()
            for parameter in self._adapter.parameters:
                # no part may be left when every group lacks signal; momentum and weight decay still act
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            norm = torch.nn.utils.clip_grad_norm_(self._adapter.parameters, plan.optimiser.grad_norm_max)
            figures.grad_norm = float(norm)
            if not math.isfinite(figures.grad_norm):
                if before is not None:
                    self._restore(before)
                raise OperationError("the gradient is not finite; the step was not applied", code="NOT_FINITE")
            self._optimiser.step()
        return figures.summary()

    def _snapshot(self) -> _Snapshot:
        """Copies to go back to when a later epoch fails after an earlier one was applied."""
        factors = [parameter.detach().clone() for parameter in self._adapter.parameters]
        return _Snapshot(factors, copy.deepcopy(self._optimiser.state_dict()))

    def _restore(self, before: _Snapshot) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._adapter.parameters, before.factors, strict=True):
                parameter.copy_(value)
        self._optimiser.load_state_dict(before.optimiser)

    def _fresh_optimiser(self) -> torch.optim.AdamW:
        settings = self._plan.optimiser
        return torch.optim.AdamW(
            self._adapter.parameters,
            lr=settings.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _parts(self, groups: Sequence[Group]) -> list[_Part]:
        settings = self._plan.objective
        answers: list[tuple[int, Answer]] = []
        advantages: list[Tensor] = []
        sizes: list[int] = []
        for place, group in enumerate(groups):
            rewards = torch.tensor([answer.reward for answer in group.answers], dtype=torch.float32)  # [K]
            advantages.append(
                objective.group_advantages(rewards, std=settings.advantage_std, epsilon=settings.advantage_epsilon)
            )
            answers.extend((place, answer) for answer in group.answers)
            sizes.extend([len(group.answers)] * len(group.answers))
        if not answers:
            return []
        kept = torch.tensor([answer.finished or not settings.mask_truncated for _, answer in answers])  # [R]
        weights = objective.row_weights(
            torch.tensor([len(answer.ids) for _, answer in answers]),
            torch.tensor(sizes),
            len(groups),
            settings.token_aggregation,
            kept=kept,
        )  # [R]
        advantage = torch.cat(advantages)  # [R]
        wants_all = settings.kl_coefficient > 0 or settings.entropy_coefficient > 0
        trained = (weights > 0) & (torch.ones_like(kept) if wants_all else advantage != 0)  # [R]
        rows = [row for row, wanted in enumerate(trained.tolist()) if wanted]
        parts = []
        for chosen in self._cut(groups, answers, rows):
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
                for each in (weights[chosen], advantage[chosen], donors)
            )
            parts.append(_Part(stream, weights_of, advantages_of, is_donor))
        return parts

    def _cut(
        self, groups: Sequence[Group], answers: Sequence[tuple[int, Answer]], rows: Sequence[int]
    ) -> list[list[int]]:
        """Cut rows into parts within the token budget. Answers to one prompt stay together as far as they fit, and
        groups of like lengths meet, since attention pads."""
        longest: dict[int, int] = {}
        for row in rows:
            place, answer = answers[row]
            longest[place] = max(longest.get(place, 0), len(answer.ids))
        parts: list[list[int]] = []
        tokens, seen = 0, set[int]()
        for row in sorted(rows, key=lambda row: (-longest[answers[row][0]], answers[row][0])):
            place, answer = answers[row]
            more = len(answer.ids) + (0 if place in seen else len(groups[place].prompt_ids))
            if not parts or tokens + more > self._microbatch_tokens:
                parts.append([])
                tokens, seen = 0, set()
                more = len(answer.ids) + len(groups[place].prompt_ids)
            parts[-1].append(row)
            tokens += more
            seen.add(place)
        return parts

    def _logp(self, part: _Part) -> tuple[Tensor, Tensor | None]:
        """Log-probability of every answer token, and the entropy where the plan asks for it. Both [M]."""
        decoder = self._adapter.decoder
        return token_logp(
            decoder.hidden(part.stream),
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
        gain = objective.policy_gain(
            logp,
            part.logp_old,
            part.advantages,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )  # [M]
        loss = -(gain * weights).sum()
        if part.logp_reference is not None:
            kl = objective.k3(logp, part.logp_reference)  # [M]
            loss = loss + settings.kl_coefficient * (kl * weights).sum()
            if first:
                figures.add_mean("kl", kl)
        if entropy is not None:
            loss = loss - settings.entropy_coefficient * (entropy * weights).sum()
            if first:
                figures.add_mean("entropy", entropy)
        loss.backward()
        with torch.no_grad():
            figures.add_ratio(logp, part, settings.clip_low, settings.clip_high, first=first)


class _Figures:
    """Sums over the parts of a step."""

    def __init__(self) -> None:
        self.grad_norm = 0.0
        self._sums: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._clipped = self._clippable = 0
        self._deviation_first = self._deviation = 0.0

    def start_epoch(self) -> None:
        self._deviation = 0.0

    def add_mean(self, name: str, per_token: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(per_token.detach().sum())
        self._tokens[name] = self._tokens.get(name, 0) + len(per_token)

    def add_ratio(self, logp: Tensor, part: _Part, clip_low: float, clip_high: float, *, first: bool) -> None:
        assert part.logp_old is not None  # noqa: S101  # set by the first forward of the same call
        self._deviation = max(self._deviation, float(((logp - part.logp_old).exp() - 1).abs().max()))
        if first:
            self._deviation_first = self._deviation
            self.add_mean("tokens", torch.zeros_like(logp))
            self.add_mean("own", logp[~part.is_donor])
            self.add_mean("donor", logp[part.is_donor])
            return
        clipped = objective.is_clipped(logp, part.logp_old, part.advantages, clip_low=clip_low, clip_high=clip_high)
        self._clipped += int(clipped.sum())
        self._clippable += len(clipped)

    def _mean(self, name: str) -> float | None:
        return self._sums[name] / self._tokens[name] if self._tokens.get(name) else None

    def summary(self) -> StepFigures:
        return StepFigures(
            clip_share=self._clipped / max(1, self._clippable),
            kl=self._mean("kl"),
            entropy=self._mean("entropy"),
            logp_own=self._mean("own"),
            logp_donor=self._mean("donor"),
            ratio_deviation_first=self._deviation_first,
            ratio_deviation_last=self._deviation,
            grad_norm=self.grad_norm,
            trained_tokens=self._tokens.get("tokens", 0),
        )

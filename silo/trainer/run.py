"""The state that the tasks of one run share, and the three parts of a step: rollout, grade, update.

The tasks (`silo.trainer.tasks`) say which prompts, which draws and which answers; how a step goes is written here once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedsilo.files.task_files import Task
from fedsilo.protocol.codec import Array, Buffer, decode_factors
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import Fixed, is_fixed
from fedsilo.protocol.plan import Plan
from silo.budgets import CACHE_BYTES, MICROBATCH_TOKENS
from silo.reusable_buffer import ReusableBuffer
from silo.trainer.adapters import TrainedState
from silo.trainer.agreement import AgreementWatch, Limits
from silo.trainer.data import Grader, Prompt, PromptSet, Split, TextCodec, grade_distinct
from silo.trainer.grpo import Answer, Group, Learner, has_zero_variance
from silo.trainer.rollout.engine import PromptSource, Question, Rollout, RolloutEngine, RolloutPlace

Metrics = dict[str, Any]
DonorLogp = Callable[[str, int, int, int, int], Sequence[float]]
Draw = Callable[[int, int], np.random.Generator]  # by the prompt's place in the step, and the sample


@dataclass(frozen=True)
class Material:
    """Model, data and settings that a silo brings to every run.

    Attributes:
        silo: own name in the roster.
        model: the base model, a Hugging Face causal LM of an architecture that `decoder` knows.
        codec: its tokenizer.
        private, public, held_out: rows of the task files, in file order.
        holdout_share: of the private rows, set aside by group and prompt; never trained on.
        private_grader, public_grader, held_out_grader: the verifier of each file.
        site_secret: key of private draws.
        microbatch_tokens: budget of one training pass through the model.
        cache_bytes: budget of the keys and values of answers that are sampled together.
        rollout: the servers that sample; None: this process does.
        checkpointing: train in less memory and more time (`Learner`).
        agreement: how the engine's answers are checked, and what stops a step.
        donor_logp: log-probabilities of a donor's tokens under the policy that wrote them, by origin, round, step, row
            of the prompt, and position among the answers that the origin offered; empty where they are not known. No
            message carries them: only experiments in one process know the others' (`Session.logp_of`).
    """

    silo: str
    model: Any
    codec: TextCodec
    private: Sequence[Task]
    public: Sequence[Task]
    held_out: Sequence[Task]
    private_grader: Grader
    public_grader: Grader
    held_out_grader: Grader
    site_secret: bytes
    microbatch_tokens: int = MICROBATCH_TOKENS
    cache_bytes: int = CACHE_BYTES
    rollout: RolloutPlace | None = None
    checkpointing: bool = False
    holdout_share: float = 0.0
    agreement: Limits = field(default_factory=Limits)
    donor_logp: DonorLogp | None = None


@dataclass(frozen=True)
class Done:
    """A finished task: figures for the guard's records, and the message it offers, as bytes."""

    metrics: Metrics
    body: Buffer = b""


@dataclass(frozen=True)
class OwnAnswers:
    """This silo's graded answers to one prompt."""

    prompt: Prompt
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class OpenStep:
    """Own answers to the public prompts of a step between GeneratePublic and PublicStep."""

    round: int
    step: int
    offer: str
    own: tuple[OwnAnswers, ...]


@dataclass(frozen=True)
class Position:
    """The last task that changed the session."""

    task: str
    round: int
    step: int


@dataclass
class Run:
    """One run of a session.

    Attributes:
        material: of the silo, with graders that the processes share.
        split: of the private rows; the only way from them to a step is through `split.training`.
        private, public, held_out: prompts that the plan's lengths allow.
        engine: samples answers.
        agreement: proves, of the answers to a step, that the engine computes the adapter that is trained.
        on_phase, seconds: as of the session.
        buffer: memory of what is exported; None: what this process exports goes nowhere.
        processes: that do the same tasks together.
        stays: which factors this silo trains and goes on with by itself.
        base_digest: of the adapter that the open round started from; empty: none was loaded.
        open_step: the public step that waits for donors.
        donors_trained: in the open round.
        position: the last task that changed any of this.
        written: log-probabilities of the answers that were offered, in their order, by round, step and row of the
            prompt; kept where the plan has `donor_denominator: donor`, and not over a kill.
    """

    material: Material
    plan: Plan
    split: Split
    private: PromptSet
    public: PromptSet
    held_out: PromptSet
    adapter: TrainedState
    learner: Learner
    engine: RolloutEngine
    agreement: AgreementWatch
    on_phase: Callable[[int, int, str], None]
    seconds: Callable[[], float]
    buffer: ReusableBuffer | None
    processes: int
    stays: Fixed = "none"
    base_digest: str = ""
    open_step: OpenStep | None = None
    donors_trained: int = 0
    position: Position | None = None
    written: dict[tuple[int, int, int], tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    def policy_of(self, payload: Buffer, source: PromptSource) -> contextlib.AbstractContextManager[None]:
        """Make the model compute this adapter inside the block, or the base model where there is none; prompts are of
        this source."""
        self.engine.use(source)
        return self.adapter.replaced_by(self.tensors_of(payload)) if payload else self.adapter.off()

    def tensors_of(self, payload: Buffer) -> Mapping[str, Array]:
        """Return the tensors of an adapter, with this silo's own in the place of those that stay here. The adapter that
        a run begins with is taken as it is."""
        tensors = decode_factors(payload).tensors
        if self.stays == "none" or self.position is None:
            return tensors
        own = self.adapter.values()
        return {name: own[name] if is_fixed(name, self.stays) else values for name, values in tensors.items()}


@dataclass
class Step:
    """A step of a task: rollout, then grade, then update, each with its figures.

    Attributes:
        run: the run it is a step of.
        where: round and step that it is shown as; step 0: none of the round's.
        own: the graded answers.
        groups: the same as what is trained on where nothing is swapped.
        metrics: figures of what was done so far.
    """

    run: Run
    where: tuple[int, int]
    own: tuple[OwnAnswers, ...] = ()
    groups: Sequence[Group] = ()
    metrics: Metrics = field(default_factory=dict)
    _prompts: Sequence[Prompt] = ()
    _rollouts: Sequence[tuple[Rollout, ...]] = ()

    def rollout(self, source: PromptSource, prompts: Sequence[Prompt], draw: Draw) -> None:
        """Sample K answers to each prompt from the current local policy, and prove that the engine computed it. Raises
        OperationError: the engine does not agree, or gives no log-probabilities and the plan takes them."""
        run, plan = self.run, self.run.plan
        run.on_phase(*self.where, "rollout")
        questions = [
            Question(prompt.ids, tuple(draw(place, sample) for sample in range(plan.samples_per_prompt)))
            for place, prompt in enumerate(prompts)
        ]

        def generate(questions: Sequence[Question], most: int) -> list[tuple[Rollout, ...]]:
            tokens = min(most, plan.rollout.max_new_tokens)
            return run.engine.generate(questions, temperature=plan.rollout.temperature, max_new_tokens=tokens)

        started = run.seconds()
        run.engine.use(source)
        self._rollouts = generate(questions, plan.rollout.max_new_tokens)
        self._prompts = prompts
        if plan.wants_logp and not any(each.logp for answers in self._rollouts for each in answers):
            raise OperationError(
                "the rollout engine gives no log-probabilities of its answers, which the plan's objective takes",
                hint="objective.importance_correction: none, donor_denominator: local, or another engine",
                code="ENGINE_LOGP",
            )
        seconds = run.seconds() - started
        self.metrics["rollout_seconds"] = seconds
        prompt_ids = [each.prompt_ids for each in questions]
        self.metrics |= run.agreement.check(self.where, prompt_ids, self._rollouts, generate, source)
        tokens = sum(len(each.ids) for answers in self._rollouts for each in answers)
        self.metrics["rollout_tokens_per_second"] = rate(tokens, seconds)

    def grade(self, grader: Grader) -> None:
        """Grade each answer by this silo's own verifier."""
        run, started = self.run, self.run.seconds()
        run.on_phase(*self.where, "grade")
        texts = [[run.material.codec.text_of(each.ids) for each in answers] for answers in self._rollouts]
        pairs = [(text, prompt.reference) for prompt, row in zip(self._prompts, texts, strict=True) for text in row]
        marks = iter(grade_distinct(grader, pairs))
        self.own = tuple(
            OwnAnswers(
                prompt,
                tuple(
                    Answer(
                        each.ids,
                        text,
                        each.finished,
                        **next(marks)._asdict(),
                        logp=each.logp if run.plan.wants_logp else (),
                    )
                    for each, text in zip(answers, row, strict=True)
                ),
            )
            for prompt, answers, row in zip(self._prompts, self._rollouts, texts, strict=True)
        )
        self.groups = [Group(each.prompt.ids, each.answers) for each in self.own]
        self.metrics |= reward_metrics(self.groups)
        self.metrics["zero_variance_share"] = zero_variance_share(self.groups)
        self.metrics["grade_seconds"] = run.seconds() - started

    def update(self, groups: Sequence[Group], *, likelihood: bool = False) -> None:
        """Take one GRPO step on these answers, or a supervised one. Raises OperationError: a gradient is not finite;
        nothing has changed."""
        run = self.run
        run.on_phase(*self.where, "update")
        run.engine.rest()
        started = run.seconds()
        figures = run.learner.update(groups, likelihood=likelihood)
        seconds = run.seconds() - started
        self.metrics |= {name: value for name, value in dataclasses.asdict(figures).items() if value is not None}
        self.metrics |= {
            "drift": run.adapter.drift(),
            "update_seconds": seconds,
            "update_tokens_per_second": rate(figures.trained_tokens * run.plan.optimiser.epochs, seconds),
            "memory_peak_bytes": memory_peak_bytes(),
        }


# ---- figures of a step: the silo's own, of which the guard keeps and shows those that `silo.guard.answers.state` names


def reward_metrics(groups: Sequence[Group]) -> Metrics:
    """Figures of own answers, before any swap."""
    answers = [answer for group in groups for answer in group.answers]
    correct = Counter(sum(answer.correct for answer in group.answers) for group in groups)
    return {
        "reward_mean": mean([answer.reward for answer in answers]),
        "tokens": sum(len(answer.ids) for answer in answers),
        "truncated_share": mean([float(not answer.finished) for answer in answers]),
        "correct_histogram": {str(count): times for count, times in sorted(correct.items())},  # correct answers: groups
    }


def zero_variance_share(groups: Sequence[Group]) -> float:
    """Share of groups without signal, by the rule and in the precision of the advantages (`grpo`)."""
    rewards = [torch.tensor([answer.reward for answer in group.answers], dtype=torch.float32) for group in groups]
    return mean([float(has_zero_variance(each)) for each in rewards])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def rate(tokens: int, seconds: float) -> float:
    """Tokens per second; 0 where no time passed."""
    return tokens / seconds if seconds > 0 else 0.0


def memory_peak_bytes() -> int:
    """The most this process held so far: resident memory, which never goes down again, and beside it what torch had
    allocated on the accelerator."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident = peak if sys.platform == "darwin" else peak * 1024
    return resident + (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)

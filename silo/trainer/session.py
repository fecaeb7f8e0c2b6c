"""What a trainer does for one silo, as plain calls: no socket, no process, no clock of its own.

The worker carries the guard's messages to it; tests and the in-process experiments call it directly. Order of a
run: configure (constructor) -> `begin_run` -> tasks of `fedsilo.protocol.method`, one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsilo.protocol.codec import Buffer, decode_factors, encode, factors_head, joined_factors
from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.method import (
    AnswerAhead,
    Evaluate,
    ExportDelta,
    GeneratePublic,
    LoadAdapter,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, private_seed_of, seed_of
from silo.budgets import CACHE_BYTES, MICROBATCH_TOKENS
from silo.measuring import MeasureHoldout
from silo.room import Room
from silo.trainer import evaluation
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.agreement import Limits
from silo.trainer.agreement_watch import AgreementWatch, keyed_draw
from silo.trainer.batch import Answer, Group
from silo.trainer.data import Prompt, PromptSet, TaskRow, encode_prompts, split_holdout
from silo.trainer.grading import Grader, grade_distinct
from silo.trainer.public import DonorIntake, OwnAnswers, SwapFigures, responses_message
from silo.trainer.resume import OpenStep, Position, SessionState, restore, same_surroundings, state_of
from silo.trainer.reward_figures import reward_metrics, zero_variance_share
from silo.trainer.rollout.chosen import engine_for
from silo.trainer.rollout.embedded import Question, Rollout
from silo.trainer.rollout.engine import RolloutEngine, Rows
from silo.trainer.rollout.place import RolloutPlace
from silo.trainer.scale_out import BAD_TASK, Processes
from silo.trainer.sharding import ShardedBase
from silo.trainer.shared_work import shared_engine, shared_material
from silo.trainer.step import Learner
from silo.trainer.step_figures import memory_peak_bytes, rate, swap_metrics
from silo.trainer.swap_bound import is_due, swap_bound
from silo.trainer.text import TextCodec

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Material:
    """What a silo brings to every run.

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
    """

    silo: str
    model: Any
    codec: TextCodec
    private: Sequence[TaskRow]
    public: Sequence[TaskRow]
    held_out: Sequence[TaskRow]
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


@dataclass(frozen=True)
class Done:
    """A finished task: figures for the guard's records, and the message it offers, as bytes."""

    metrics: Metrics
    body: Buffer = b""


@dataclass
class _Run:
    plan: Plan
    adapter: LoraAdapter
    learner: Learner
    engine: RolloutEngine
    watch: AgreementWatch
    private: PromptSet
    public: PromptSet
    held_out: PromptSet
    base_digest: str = ""
    open_step: OpenStep | None = None
    donors_trained: int = 0  # in the open round
    position: Position | None = None  # the last task that changed any of this


class Session:
    """Args:
    material: model, rows and graders of this silo.
    on_phase: told (round, step, phase) as a task goes on: rollout | grade | update.
    seconds: monotonic clock for the figures.
    group: the processes that do the same tasks together; None: this one alone.
    shard_base: each process keeps its share of the base's weights alone.
    """

    def __init__(
        self,
        material: Material,
        *,
        on_phase: Callable[[int, int, str], None] = lambda round_number, step, phase: None,
        seconds: Callable[[], float] = time.monotonic,
        group: Processes | None = None,
        shard_base: bool = False,
    ) -> None:
        self._material = material if group is None else shared_material(material, group)
        self._group = group
        self._shard_base = shard_base and group is not None
        # The only way from private rows to a step is through `split.training`.
        self.split = split_holdout(material.private, material.holdout_share, material.site_secret)
        self._on_phase = on_phase
        self._seconds = seconds
        self._run: _Run | None = None
        self._room = Room()  # of what is exported

    def begin_run(self, plan: Plan, shape: LoraShape) -> dict[str, int]:
        """Make ready for a plan; a trainer serves one run.

        Returns:
            Prompts left out as longer than the plan allows, by set: private | public | held_out.

        Raises:
            UsageError: the schema does not fit the model, no prompt is short enough, or a run has begun already.
        """
        if self._run is not None:
            raise UsageError("this trainer has begun a run already; start it again for another")
        material = self._material
        limit = plan.rollout.max_prompt_tokens
        private = encode_prompts(self.split.training, material.codec, limit)
        public = encode_prompts(material.public, material.codec, limit)
        held_out = encode_prompts(material.held_out[: plan.evaluation.prompts], material.codec, limit)
        if not private.by_row:
            raise UsageError(f"no private prompt has at most {limit} tokens", hint="raise rollout.max_prompt_tokens")
        context = getattr(material.model.config, "max_position_embeddings", None)
        if context is not None and limit + plan.rollout.max_new_tokens > context:
            raise UsageError(
                f"max_prompt_tokens {limit} + max_new_tokens {plan.rollout.max_new_tokens} exceed the model's "
                f"context of {context}"
            )
        adapter = LoraAdapter(material.model, shape)
        shards = ShardedBase(adapter.decoder, material.model, self._group) if self._group and self._shard_base else None
        self._run = _Run(
            plan=plan,
            adapter=adapter,
            learner=Learner(
                adapter,
                plan,
                microbatch_tokens=material.microbatch_tokens,
                checkpointing=material.checkpointing or shards is not None,
                group=self._group,
                equal_passes=shards is not None,
            ),
            engine=shared_engine(
                lambda: engine_for(
                    adapter, material.rollout, stop_ids=material.codec.stop_ids, cache_bytes=material.cache_bytes
                ),
                self._group,
                server=material.rollout is not None,
                whole=contextlib.nullcontext if shards is None else shards.whole,
            ),
            watch=AgreementWatch(
                adapter,
                plan.rollout.temperature,
                keyed_draw(material.site_secret, plan.seed),
                material.agreement,
                group=self._group,
                equal_passes=shards is not None,
                rounds_once=material.rollout is None,
                servers_apart=material.rollout is not None and material.rollout.private != material.rollout.public,
            ),
            private=private,
            public=public,
            held_out=held_out,
        )
        return {"private": private.overlong, "public": public.overlong, "held_out": held_out.overlong}

    @property
    def private_prompts(self) -> int:
        """How many private prompts the run can use; their numbers are 0 to one less. Raises UsageError: no run."""
        if self._run is None:
            raise UsageError("no run has begun in this trainer")
        return len(self._run.private.by_row)

    def carry_out(self, task: TrainerTask | MeasureHoldout, body: Buffer = b"") -> Done:
        """Do one task. `body`: the adapter payload of LoadAdapter and of the measuring tasks, empty for the base model.

        Raises:
            UsageError: no run has begun.
            OperationError: the task does not fit what was done before, or the update was not finite.
            PeerError: the adapter does not fit the schema.
        """
        if self._run is None:
            raise UsageError("no run has begun in this trainer", code=BAD_TASK)
        started = self._seconds()
        match task:
            case LoadAdapter():
                done = self._load(self._run, task, body)
            case PrivateStep():
                done = self._private_step(self._run, task)
            case GeneratePublic() | AnswerAhead():
                done = self._generate_public(self._run, task)
            case PublicStep():
                done = self._public_step(self._run, task)
            case ExportDelta():
                done = self._export(self._run)
            case Evaluate():
                done = self._evaluate(self._run, task, body)
            case MeasureHoldout():
                done = self._measure(self._run, task, body)
        if isinstance(task, LoadAdapter | PrivateStep | GeneratePublic | PublicStep):
            self._run.position = Position(type(task).__name__, task.round, getattr(task, "step", 0))
        return dataclasses.replace(done, metrics={**done.metrics, "seconds": self._seconds() - started})

    def close(self) -> None:
        """No task comes any more: what rollout servers were given for this run is taken back."""
        if self._run is not None:
            self._run.engine.close()

    def state(self) -> SessionState:
        """Where the run stands after its last finished task. Raises OperationError: nothing is loaded yet."""
        if self._run is None:
            raise UsageError("no run has begun in this trainer")
        return state_of(self._run, silo=self._material.silo, split=self.split.digest, processes=self._processes)

    @property
    def _processes(self) -> int:
        return 1 if self._group is None else self._group.size

    def restore(self, state: SessionState) -> bool:
        """Go on from a state, after `begin_run` and in place of what was done until then.

        Returns:
            Whether what follows has the bits of an undisturbed run, and not only its values to rounding.

        Raises:
            StateRefused: it is of another run, site or data; nothing was changed, and the round is to be started over.
        """
        if self._run is None:
            raise UsageError("no run has begun in this trainer")
        restore(self._run, state, silo=self._material.silo, split=self.split.digest)
        return same_surroundings(state, self._run.adapter, self._processes)

    def _load(self, run: _Run, task: LoadAdapter, body: Buffer) -> Done:
        run.adapter.load(decode_factors(body).tensors)
        run.learner.start_round()
        run.base_digest = task.digest
        run.open_step = None
        # here and not after the evaluation: an abandoned round has none, and its donors are not the next one's
        run.donors_trained = 0
        return Done({})

    def _private_step(self, run: _Run, task: PrivateStep) -> Done:
        prompts = run.private.prompts
        if not task.rows or max(task.rows) >= len(prompts) or min(task.rows) < 0:
            raise OperationError(
                f"step {task.step} of round {task.round} names other rows than the {len(prompts)} private prompts",
                code=BAD_TASK,
            )
        chosen = [prompts[row] for row in task.rows]

        def draw(place: int, sample: int) -> np.random.Generator:
            # by the prompt's place in the step, which comes with the task; of public prompts the row is known to all
            key = (task.round, task.step, place, sample)
            return generator(private_seed_of(self._material.site_secret, run.plan.seed, "private-rollout", *key))

        own, metrics = self._answer(run, "private", task.round, task.step, chosen, draw)
        groups = [Group(one.prompt.ids, one.answers) for one in own]
        return Done(metrics | self._update(run, task.round, task.step, groups))

    def _generate_public(self, run: _Run, task: GeneratePublic | AnswerAhead) -> Done:
        """Answers to public prompts: for the public step that follows, or ahead, for other silos' next round."""
        if isinstance(task, AnswerAhead):
            purpose, offer, step, shown = "answers-ahead", "correct", task.for_step, 0
        else:
            purpose, offer, step, shown = "public-rollout", task.offer, task.step, task.step
        chosen = [run.public.by_row[index] for index in task.prompt_indices if index in run.public.by_row]
        silo = self._material.silo

        def draw(place: int, sample: int) -> np.random.Generator:
            row = chosen[place].row
            return generator(seed_of(run.plan.seed, purpose, silo, task.round, step, row, sample))

        own, metrics = self._answer(run, "public", task.round, shown, chosen, draw)
        if isinstance(task, GeneratePublic):
            run.open_step = OpenStep(task.round, task.step, offer, tuple(own))
        else:  # of no step's training: only what it cost belongs to the round's curves
            metrics = {name: value for name, value in metrics.items() if name.endswith("_seconds")}
        by_row = {one.prompt.row: one for one in own}
        body = responses_message(run.plan.public_set_sha256, task.prompt_indices, by_row, offer)
        mismatches = sum(
            self._material.codec.answer_ids(answer.text, finished=answer.finished) != answer.ids
            for one in own
            for answer in one.answers
        )
        return Done({**metrics, "reencoding_mismatches": mismatches}, encode(body))

    def _public_step(self, run: _Run, task: PublicStep) -> Done:
        opened = run.open_step
        if opened is None or (opened.round, opened.step) != (task.round, task.step):
            raise OperationError(
                f"no public answers were generated for round {task.round} step {task.step}", code=BAD_TASK
            )
        donors = {row.prompt_index: list(row.donors) for row in task.donors.prompts}
        site, most = self._material, run.plan.rollout.max_new_tokens
        intake = DonorIntake(site.silo, site.codec, site.public_grader, most)

        def random_of(prompt: Prompt) -> np.random.Generator:
            key = (self._material.silo, task.round, task.step, prompt.row)
            return generator(seed_of(run.plan.seed, "replaced", *key))

        match task.swap:
            case "replace":
                groups, figures = intake.balanced(opened.own, donors, random_of)
            case "pool":
                groups, figures = intake.pooled(opened.own, donors, opened.offer)
            case "none":
                groups = [Group(one.prompt.ids, one.answers) for one in opened.own]
                figures = SwapFigures()
            case _:
                raise OperationError(f"there is no swap {task.swap!r}", code=BAD_TASK)
        before = [Group(one.prompt.ids, one.answers) for one in opened.own]
        bound = None
        if task.swap == "replace" and is_due(task.step, run.plan.swap_period):
            # a pass through the model, as the update's: one process that fails at it must not leave the others waiting
            bound = run.learner.together(lambda: swap_bound(run.adapter, run.plan, before, groups, figures.alphas))
        metrics = {"zero_variance_share_before": zero_variance_share(before), **swap_metrics(figures, bound)}
        metrics |= reward_metrics(before) | self._update(run, task.round, task.step, groups)
        # after the update: one that fails has trained on no donor, and the step may be asked for once more
        run.open_step = None
        run.donors_trained += figures.used
        return Done(metrics)

    def _export(self, run: _Run) -> Done:
        if not run.base_digest:
            raise OperationError("no adapter was loaded, so there is no difference to export", code=BAD_TASK)
        delta = run.adapter.delta()
        header, size_bytes = factors_head(
            delta,
            base_digest=run.base_digest,
            schema_sha256=run.plan.lora.schema_sha256,
            rank=run.adapter.shape.rank,
            scale=run.adapter.shape.scale,
            dtype="float32",
        )
        # what any other process than the first of a group makes goes nowhere, and is not kept room for
        into = self._room.take(size_bytes) if self._group is None else None
        return Done({"drift": run.adapter.drift()}, joined_factors(header, size_bytes, delta, into=into))

    def _evaluate(self, run: _Run, task: Evaluate, body: Buffer) -> Done:
        self._on_phase(task.round, 0, "rollout")
        with _policy_of(run, body, "public"):
            message, metrics = evaluation.evaluate(
                run.engine,
                self._material.codec,
                run.held_out.prompts,
                self._material.held_out_grader,
                plan=run.plan,
                silo=self._material.silo,
                adapter_digest=task.digest,
            )
        if task.round:
            # For the run record: how many of the donors sent to this silo it took a step on.
            message.metrics.add(name=evaluation.DONORS_TRAINED, topic="", value=float(run.donors_trained))
        message.metrics.sort(key=lambda metric: (metric.topic, metric.name))
        return Done(metrics, encode(message))

    def _measure(self, run: _Run, task: MeasureHoldout, body: Buffer) -> Done:
        self._on_phase(task.round, 0, "rollout")
        site, private = self._material, task.rows == "private"
        with _policy_of(run, body, "private" if private else "public"):
            verdicts = evaluation.measure_holdout(
                run.engine,
                site.codec,
                self.split.holdout if private else site.held_out[: run.plan.evaluation.prompts],
                site.public,
                site.private_grader if private else site.held_out_grader,
                plan=run.plan,
                site_secret=site.site_secret,
                samples=task.samples,
            )
        return Done({}, verdicts)

    def _answer(
        self,
        run: _Run,
        rows: Rows,
        round_number: int,
        step: int,
        prompts: Sequence[Prompt],
        draw: Callable[[int, int], np.random.Generator],
    ) -> tuple[list[OwnAnswers], Metrics]:
        """K graded answers to each prompt with the current local policy."""
        self._on_phase(round_number, step, "rollout")
        started = self._seconds()
        samples = run.plan.samples_per_prompt
        questions = [
            Question(prompt.ids, tuple(draw(place, sample) for sample in range(samples)))
            for place, prompt in enumerate(prompts)
        ]
        most = run.plan.rollout.max_new_tokens
        grader = self._material.private_grader if rows == "private" else self._material.public_grader
        run.engine.use(rows)

        def generate(asked: Sequence[Question], tokens: int) -> list[tuple[Rollout, ...]]:
            return run.engine.generate(
                asked, temperature=run.plan.rollout.temperature, max_new_tokens=min(tokens, most)
            )

        rollouts = generate(questions, most)
        rollout_seconds = self._seconds() - started
        agreed = run.watch.check((round_number, step), [prompt.ids for prompt in prompts], rollouts, generate, rows)
        graded_from = self._seconds()
        self._on_phase(round_number, step, "grade")
        codec = self._material.codec
        texts = [[codec.text_of(rollout.ids) for rollout in answers] for answers in rollouts]
        pairs = [(text, prompt.reference) for prompt, row in zip(prompts, texts, strict=True) for text in row]
        marks = iter(grade_distinct(grader, pairs))
        own = [
            OwnAnswers(
                prompt,
                tuple(
                    Answer(rollout.ids, text, rollout.finished, **next(marks)._asdict())
                    for rollout, text in zip(answers, row, strict=True)
                ),
            )
            for prompt, answers, row in zip(prompts, rollouts, texts, strict=True)
        ]
        groups = [Group(one.prompt.ids, one.answers) for one in own]
        return own, {
            **reward_metrics(groups),
            "zero_variance_share": zero_variance_share(groups),
            "rollout_seconds": rollout_seconds,
            "rollout_tokens_per_second": rate(sum(len(one.ids) for row in rollouts for one in row), rollout_seconds),
            "grade_seconds": self._seconds() - graded_from,
            **agreed,
        }

    def _update(self, run: _Run, round_number: int, step: int, groups: Sequence[Group]) -> Metrics:
        self._on_phase(round_number, step, "update")
        run.engine.rest()
        started = self._seconds()
        figures = run.learner.update(groups)
        seconds = self._seconds() - started
        return {
            **{name: value for name, value in dataclasses.asdict(figures).items() if value is not None},
            "zero_variance_share": zero_variance_share(groups),
            "drift": run.adapter.drift(),
            "update_seconds": seconds,
            "update_tokens_per_second": rate(figures.trained_tokens * run.plan.optimiser.epochs, seconds),
            "memory_peak_bytes": memory_peak_bytes(),
        }


def _policy_of(run: _Run, payload: Buffer, rows: Rows) -> contextlib.AbstractContextManager[None]:
    """Inside, the model computes this adapter, or the base model where there is none; prompts are of these rows."""
    run.engine.use(rows)
    return run.adapter.replaced_by(decode_factors(payload).tensors) if payload else run.adapter.off()

"""The trainer of one silo as plain calls: no socket, no process, no clock of its own.

The worker carries the guard's messages to it; tests and the in-process experiments call it directly. Order of a
run: configure (constructor) -> `begin_run` -> tasks of `fedsilo.protocol.tasks`, one at a time. How a task is carried
out is written in `silo.trainer.tasks`, and the three parts of a step (rollout, grade, update) in `silo.trainer.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from fedsilo.protocol.codec import Array, Buffer
from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.factors import is_shift
from fedsilo.protocol.methods import method_named, require_donor_logp
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import TrainerTask
from silo.reusable_buffer import ReusableBuffer
from silo.trainer.adapters import TrainedState, state_for
from silo.trainer.adapters.lora import LoraShape
from silo.trainer.agreement import AgreementWatch, keyed_draw
from silo.trainer.data import Grader, Mark, PromptSet, encode_prompts, mark_of, split_holdout
from silo.trainer.grpo import Learner
from silo.trainer.resume import SessionState, restore, same_surroundings, state_of
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import RolloutEngine, shared_engine
from silo.trainer.rollout.vllm_server import VllmEngine
from silo.trainer.run import Done, Material, Position, Run
from silo.trainer.scale_out import BAD_TASK, Processes
from silo.trainer.sharding import ShardedBase
from silo.trainer.tasks import CARRIED_OUT


class Session:
    """The trainer of one silo.

    Args:
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
        self._material = material if group is None else _with_shared_graders(material, group)
        self._group = group
        self._shard_base = shard_base and group is not None
        self.split = split_holdout(material.private, material.holdout_share, material.site_secret)
        self._on_phase = on_phase
        self._seconds = seconds
        self._run: Run | None = None

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
        require_donor_logp(plan, known=material.donor_logp is not None)
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
        self._run = self._run_of(plan, state_for(material.model, shape), private, public, held_out)
        return {"private": private.overlong, "public": public.overlong, "held_out": held_out.overlong}

    def _run_of(
        self, plan: Plan, adapter: TrainedState, private: PromptSet, public: PromptSet, held_out: PromptSet
    ) -> Run:
        """Put together what the run's tasks work on."""
        material, group, servers = self._material, self._group, self._material.rollout
        if any(map(is_shift, adapter.factors)) and (servers is not None or (group and self._shard_base)):
            raise UsageError(
                "the run's adapter shifts the base's weights, which rollout servers and a sharded base do not have",
                hint="take trainer.rollout and trainer.shard_base out of the configuration, or leave the run",
            )
        shards = ShardedBase(adapter.decoder, material.model, group) if group and self._shard_base else None
        learner = Learner(
            adapter,
            plan,
            microbatch_tokens=material.microbatch_tokens,
            checkpointing=material.checkpointing or shards is not None,
            group=group,
            equal_passes=shards is not None,
        )
        engine = shared_engine(
            lambda: self._engine(adapter),
            group,
            server=servers is not None,
            whole=contextlib.nullcontext if shards is None else shards.whole,
        )
        watch = AgreementWatch(
            adapter,
            plan.rollout.temperature,
            keyed_draw(material.site_secret, plan.seed),
            material.agreement,
            group=group,
            equal_passes=shards is not None,
            rounds_once=servers is None,
            servers_apart=servers is not None and servers.private != servers.public,
        )
        return Run(
            material=material,
            plan=plan,
            split=self.split,
            private=private,
            public=public,
            held_out=held_out,
            adapter=adapter,
            learner=learner,
            engine=engine,
            agreement=watch,
            on_phase=self._on_phase,
            seconds=self._seconds,
            # what any other process than the first of a group makes goes nowhere, and is not kept room for
            buffer=ReusableBuffer() if group is None else None,
            processes=1 if group is None else group.size,
            stays=method_named(plan.method).stays,
        )

    def _engine(self, adapter: TrainedState) -> RolloutEngine:
        material, stop_ids = self._material, self._material.codec.stop_ids
        if material.rollout is not None:
            return VllmEngine(
                adapter, material.rollout, stop_ids=stop_ids, vocabulary=adapter.decoder.embedding.shape[0]
            )
        return EmbeddedEngine(adapter.decoder, stop_ids=stop_ids, cache_bytes=material.cache_bytes, name=adapter.name)

    @property
    def _begun(self) -> Run:
        if self._run is None:
            raise UsageError("no run has begun in this trainer")
        return self._run

    @property
    def private_prompts(self) -> int:
        """Return how many private prompts the run can use; their numbers are 0 to one less. Raises UsageError: no
        run."""
        return len(self._begun.private.by_row)

    def values(self, payload: Buffer = b"") -> Mapping[str, Array]:
        """Return what the run trains, by wire name, as it is now, or as this silo computes with the adapter `payload`.
        Raises UsageError: no run has begun."""
        run = self._begun
        return run.tensors_of(payload) if payload else run.adapter.values()

    @property
    def keeps_part(self) -> bool:
        """Return whether this silo computes with a part of its own in every adapter of the open run."""
        return self._run is not None and self._run.stays != "none"

    def logp_of(self, round_number: int, step: int, row: int, position: int) -> tuple[float, ...]:
        """Return the log-probabilities of an answer that this session offered, as it sampled them; empty where it
        remembers none, and where the answer's text does not encode to the tokens that were sampled.

        Args:
            round_number: in which it is a donor.
            step: likewise.
            row: of the prompt.
            position: among the answers to it that were offered.
        """
        answers = self._run.written.get((round_number, step, row), ()) if self._run is not None else ()
        return answers[position] if 0 <= position < len(answers) else ()

    def carry_out(self, task: TrainerTask, body: Buffer = b"") -> Done:
        """Do one task. `body`: what crosses beside its fields (`TrainerTask.body`).

        Raises:
            UsageError: no run has begun.
            OperationError: the task does not fit what was done before, or the update was not finite.
            PeerError: the adapter does not fit the schema.
        """
        run, carry_out = self._run, CARRIED_OUT.get(type(task))
        if run is None:
            raise UsageError("no run has begun in this trainer", code=BAD_TASK)
        if carry_out is None:
            raise OperationError(f"there is no task {task.name}", code=BAD_TASK)
        started = self._seconds()
        done = carry_out(run, task, body)
        if task.changes:
            run.position = Position(task.name, task.round, task.step)
        return dataclasses.replace(done, metrics={**done.metrics, "seconds": self._seconds() - started})

    def close(self) -> None:
        """End: take back what rollout servers were given for this run."""
        if self._run is not None:
            self._run.engine.close()

    def state(self) -> SessionState:
        """Return the run's state after its last finished task. Raises OperationError: nothing is loaded yet."""
        return state_of(self._begun)

    def restore(self, state: SessionState) -> bool:
        """Go on from a state, after `begin_run` and in place of what was done until then.

        Returns:
            Whether what follows has the bits of an undisturbed run, and not only its values to rounding.

        Raises:
            StateRefused: it is of another run, site or data; nothing was changed, and the round is to be started over.
        """
        restore(self._begun, state)
        return same_surroundings(state, self._begun.adapter, self._begun.processes)


def _with_shared_graders(material: Material, group: Processes) -> Material:
    """Return the same, with graders whose work the processes share."""
    return dataclasses.replace(
        material,
        private_grader=shared_grader(material.private_grader, group),
        public_grader=shared_grader(material.public_grader, group),
        held_out_grader=shared_grader(material.held_out_grader, group),
    )


def shared_grader(grader: Grader, group: Processes) -> Grader:
    """Return a grader of which each process grades every n-th answer; all get all verdicts, and so the same ones."""

    def grade(pairs: Sequence[tuple[str, str]]) -> list[Mark]:
        mine = list(pairs)[group.rank :: group.size]
        shares = group.gather([mark_of(each) for each in group.together(lambda: grader(mine) if mine else [])])
        # JSON brings a mark back as a list
        return [Mark(*shares[place % group.size][place // group.size]) for place in range(len(pairs))]

    return grade

"""A federation of one: both halves of a method played against each other with a single silo, nothing in between.

This is what a silo could have had alone under the same plan. The method itself says what becomes of it without others,
so no second rule for "local only" can drift away from it. Not carried out: evaluations on the public
held-out file, which change nothing in the result; deadlines, since nobody is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import Message

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import TensorWise
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import is_fixed
from fedsilo.protocol.method import (
    Commit,
    Committed,
    CoordinatorAction,
    CoordinatorEvent,
    FinishRun,
    MessageArrived,
    Method,
    Offer,
    OfferSettled,
    RunStarted,
    Send,
    SiloAction,
    SiloEvent,
    TaskDone,
    Train,
)
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import TrainerTask

# Carries a task out and gives the body of the trainer's answer.
DoTask = Callable[[TrainerTask, codec.Buffer], codec.Buffer]


def plan_alone(plan: Plan, silo: str, run: str) -> Plan:
    """The plan with this silo as its whole roster. `run`: a name of its own, which keys nothing that is drawn."""
    of_one = {"aggregate": "mean", "trim": 0}  # which is what a median, or a trimmed mean, of one update is
    return plan.model_copy(update={"silos": (silo,), "quorum": 1, "run": run, **of_one})


def train_alone(method: Method, plan: Plan, start: codec.Buffer, do: DoTask) -> codec.Buffer:
    """Args:
        method: of the run.
        plan: of `plan_alone`.
        start: payload of the initial adapter.
        do: the trainer.

    Returns:
        Payload of the last round's adapter.

    Raises:
        OperationError: the method comes to no result with one silo.
        FedSiloError: of `do`.
    """
    return _Alone(method, plan, do).run(start)


def with_update(
    method: Method,
    plan: Plan,
    number: int,
    adapter: codec.Buffer,
    update: codec.Factors | None,
    state: dict[str, Sequence[codec.Array]] | None = None,
) -> codec.Buffer:
    """The adapter that a coordinator makes of one update alone.

    Args:
        method: of the run.
        plan: of `plan_alone`.
        number: of the round.
        adapter: payload of the adapter that the round began with.
        update: of one silo.
        state: by name, what is kept beside each tensor from round to round; takes in what is left. None: at its start.

    Raises:
        OperationError: the update has other tensors than the round trains.
    """
    base = codec.decode_factors(adapter)
    trained = {name for name in base.tensors if not is_fixed(name, method.fixed_in(plan, number))}
    if update is None or update.tensors.keys() != trained:
        raise OperationError("the trainer's update does not fit the adapter it was given", code="TRAINER_CONFUSED")
    how = method.aggregate(plan, plan.silos)
    if isinstance(how, TensorWise):
        combined = dict(how.combine(base.tensors if how.master else None, [update.tensors]))
    else:
        combined, state = {}, {} if state is None else state
        for name in trained:
            kept = state.get(name, [np.zeros_like(base.tensors[name])] * how.state)
            combined[name], *state[name] = how.combine(base.tensors[name], [update.tensors[name]], kept)
    return codec.encode_factors(
        {**base.tensors, **combined},
        base_digest="",
        schema_sha256=base.header.schema_sha256,
        rank=base.header.rank,
        scale=base.header.scale,
        dtype="float32",
    )


@dataclass
class _Alone:
    method: Method
    plan: Plan
    do: DoTask
    adapter: codec.Buffer = b""
    upload: codec.Factors | None = None
    state: dict[str, Sequence[codec.Array]] = field(default_factory=dict)
    to_silo: deque[SiloEvent] = field(default_factory=deque)
    to_coordinator: deque[CoordinatorEvent] = field(default_factory=deque)
    finished: FinishRun | None = None

    @property
    def silo(self) -> str:
        return self.plan.silos[0]

    def run(self, start: codec.Buffer) -> codec.Buffer:
        self.adapter = start
        silo = self.method.silo.start(self.plan, self.silo)
        coordinator = self.method.coordinator.start(self.plan, "")
        self.to_coordinator.append(RunStarted(self.plan.silos, codec.sha256_hex(start)))
        while self.finished is None and (self.to_silo or self.to_coordinator):
            # What the silo waits for comes first, so that an offer is settled before its answer arrives.
            if self.to_silo:
                silo, actions = self.method.silo.on_event(silo, self.to_silo.popleft())
                for action in actions:
                    self._silo_wants(action)
            else:
                coordinator, decided = self.method.coordinator.on_event(coordinator, self.to_coordinator.popleft())
                for decision in decided:
                    self._coordinator_wants(decision)
        if self.finished is None or self.finished.outcome != "finished":
            reason = "it waits for others" if self.finished is None else self.finished.reason
            raise OperationError(f"method {self.plan.method} comes to no result with one silo: {reason}")
        return self.adapter

    def _silo_wants(self, action: SiloAction) -> None:
        match action:
            case Train(task):
                self.to_silo.append(TaskDone(task, self._trained(task)))
            case Offer(kind, round_number, step, body):
                self.to_silo.append(OfferSettled(kind, round_number, step, "sent"))
                self.to_coordinator.append(MessageArrived(self.silo, kind, round_number, step, body, kind))

    def _coordinator_wants(self, action: CoordinatorAction) -> None:
        match action:
            case Send(_, kind, round_number, step, body):
                self.to_silo.append(MessageArrived("", kind, round_number, step, body, kind))
            case Commit(round_number, results):
                self._commit(round_number)
                digest = codec.sha256_hex(self.adapter)
                self.to_coordinator.append(Committed(round_number, {each.receiver: digest for each in results}))
            case FinishRun():
                self.finished = action

    def _trained(self, task: TrainerTask) -> Message | None:
        if task.gives is pb.MetricsEval and not task.changes:
            return pb.MetricsEval()  # figures alone
        body = self.do(task, self.adapter if task.reads_adapter else task.body())
        if task.gives is pb.Factors:
            self.upload = codec.decode_factors(body)
            return self.upload.header
        return None if task.gives is None else codec.decode(task.gives, body)

    def _commit(self, number: int) -> None:
        """Aggregate one upload as the coordinator would (coordinator.aggregate), with the same canonical zeros."""
        self.adapter = with_update(self.method, self.plan, number, self.adapter, self.upload, self.state)
        self.upload = None  # each round is made of an update of its own

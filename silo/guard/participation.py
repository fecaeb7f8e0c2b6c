"""One run at this silo: feeds the method's silo half and carries out its actions, one after the other.

The half is pure (`protocol.method`); what it wants done goes through `Hands`: the trainer, the gate, the clock. Nothing
here decides what may leave, and nothing here waits: a task that the trainer works on ends with an event.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import OperationError, PeerError
from fedsilo.protocol.method import (
    AnswerAhead,
    DeadlinePassed,
    Evaluate,
    ExportDelta,
    Fetch,
    GeneratePublic,
    LoadAdapter,
    Method,
    Offer,
    OfferSettled,
    PrivateStep,
    PublicStep,
    SiloAction,
    SiloEvent,
    StartDeadline,
    TaskDone,
    Train,
    TrainerTask,
)
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.services import TENSOR_KINDS
from policies.schema import LoraSchema
from silo.guard.messages import decoded_factors
from silo.link import LinkMessage
from silo.measuring import MeasureHoldout
from silo.sampling import PROMPTS_MAX, TaskGiver, Training

_NOTHING = LoadAdapter(0, "")


class Hands(Protocol):
    """What a run may ask of the daemon."""

    def train(self, fields: dict[str, Any], body: Buffer) -> None:
        """Hand the trainer one task."""

    def offer(self, action: Offer, factors: codec.Factors | None) -> str | None:
        """Hand the gate a message. `sent`, `denied` or `missed`; None: it is held, and `settled` follows."""

    def adapter(self, digest: str) -> Buffer:
        """The payload of a global adapter, fetched if it is not here yet."""

    def start_deadline(self, name: str, seconds: float) -> None: ...

    def public_step(self, step: int) -> None:
        """The exchange of this public step is open from now on."""

    def task_giver(self, private_prompts: int) -> TaskGiver:
        """Draws the rows of this run's private steps."""

    def has_behind(self, task: TrainerTask) -> bool:
        """The trainer has done this before a kill."""

    def to_measure(self, loaded: LoadAdapter) -> MeasureHoldout | None:
        """Before anything is trained from an adapter: what the trainer was told to measure first.

        None: nothing; or the round is not gone on with here.
        """

    def measured(self, body: Buffer) -> None:
        """The trainer's answer to that."""

    def trained(self, training: Training) -> None:
        """What the open round's update was trained on, before the update is offered."""


@dataclass
class Participation:
    """Attributes:
    task: what the trainer works on; None when it is idle.
    over: the run has ended here, perhaps while an action of it was carried out; nothing more is.
    """

    plan: Plan
    method: Method
    silo: str
    hands: Hands
    state: Any = None
    task: TrainerTask | MeasureHoldout | None = None
    paused: bool = False
    over: bool = False
    _actions: deque[SiloAction] = field(default_factory=deque)
    _factors: codec.Factors | None = None
    _carrying_out: bool = False
    _task_is_void: bool = False
    _giver: TaskGiver | None = None
    _loaded: LoadAdapter = _NOTHING  # the round that the trainer is in may be over already

    def __post_init__(self) -> None:
        self.state = self.method.silo.start(self.plan, self.silo)

    @property
    def busy(self) -> bool:
        """Whether the trainer works, so that the coordinator has to wait for us and not we for it."""
        return self.task is not None

    def feed(self, *events: SiloEvent) -> None:
        """One event after the other; afterwards everything that can be done now is done.

        Raises:
            FedSiloError: of the hands: an exchange failed, or the gate is halted.
        """
        for event in events:
            self.state, actions = self.method.silo.on_event(self.state, event)
            self._actions.extend(actions)
        self.advance()

    def advance(self) -> None:
        """Carry out the actions that wait, up to a task for a trainer that is busy or paused."""
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._actions and not self.over:
                action = self._actions[0]
                if isinstance(action, Train) and (self.busy or self.paused):
                    return
                if isinstance(action, Train) and isinstance(action.task, PrivateStep | GeneratePublic):
                    self.task = self.hands.to_measure(self._loaded)
                    if self.busy or not self._actions:
                        return
                if isinstance(action, Offer):
                    # Offered once, whatever comes of it: what was sent before a failure is not sent again.
                    self._actions.popleft()
                    settled = self._carry_out(action)
                else:
                    settled = self._carry_out(action)
                    self._actions.popleft()
                if settled is not None:
                    self.state, further = self.method.silo.on_event(self.state, settled)
                    self._actions.extend(further)
        finally:
            self._carrying_out = False

    def _carry_out(self, action: SiloAction) -> SiloEvent | None:
        match action:
            case Train(task):
                return self._train(task)
            case Fetch(digest):
                self.hands.adapter(digest)
            case StartDeadline(name, seconds):
                self.hands.start_deadline(name, seconds)
            case Offer():
                outcome = self.hands.offer(action, self._factors if action.kind in TENSOR_KINDS else None)
                if action.kind in TENSOR_KINDS:
                    self._factors = None
                if outcome is not None:
                    return OfferSettled(action.kind, action.round, action.step, outcome)
        return None

    def _train(self, task: TrainerTask) -> SiloEvent | None:
        """Hand the trainer a task; or say at once that it is done, where it was before a kill."""
        body: Buffer = b""
        match task:
            case LoadAdapter(_, digest):
                body, self._loaded = self.hands.adapter(digest), task
            case Evaluate(_, digest) if digest:
                body = self.hands.adapter(digest)
            case GeneratePublic(_, step):
                self.hands.public_step(step)
            case PublicStep():
                body = codec.encode(task.donors)
        if self._giver is not None:
            task = self._giver.complete(task)
        elif isinstance(task, PrivateStep):
            raise OperationError("the trainer has not said how many private prompts it has", code="TRAINER_CONFUSED")
        if self.hands.has_behind(task):
            return TaskDone(task, skipped_body(task))
        self.hands.train(fields_of(task), body)
        self.task = task
        return None

    def planned(self, fields: Mapping[str, Any]) -> None:
        """The trainer is ready for the plan. Raises OperationError: it has no usable number of private prompts."""
        count = fields.get("private_prompts")
        if type(count) is not int or not 1 <= count <= PROMPTS_MAX:
            raise OperationError("the trainer says no number of private prompts", code="TRAINER_CONFUSED")
        if self._giver is None:
            self._giver = self.hands.task_giver(count)

    def abandon_round(self) -> None:
        """Go on as after a restart: what was to be done is dropped, and the method's part waits for the next round."""
        self._actions.clear()
        self._factors = None
        self._task_is_void = self.busy
        self.state = self.method.silo.start(self.plan, self.silo)

    def deadline(self, name: str) -> None:
        self.feed(DeadlinePassed(name))

    def settled(self, kind: str, round_number: int, step: int, outcome: str) -> None:
        """A held offer came to its end."""
        self.feed(OfferSettled(kind, round_number, step, outcome))

    def done(self, fields: Mapping[str, Any], body: Buffer) -> None:
        """The trainer finished its task: parse what it offers.

        Raises:
            OperationError: it is not the task it was given, or its values do not parse.
        """
        task, self.task = self.task, None
        if task is None or fields.get("task") != type(task).__name__ or fields.get("round") != task.round:
            raise OperationError("the trainer finished a task that it was not given", code="TRAINER_CONFUSED")
        if self._task_is_void:
            self._task_is_void = False
            self.advance()
            return
        if isinstance(task, MeasureHoldout):
            self.hands.measured(body)
            self.advance()
            return
        try:
            offered = self._parsed(task, body)
        except PeerError as error:
            raise OperationError(
                f"what the trainer offers does not parse: {error.message}", code="TRAINER_CONFUSED"
            ) from error
        if isinstance(task, ExportDelta) and self._giver is not None and self._giver.training is not None:
            self.hands.trained(self._giver.training)
        self.feed(TaskDone(task, offered))

    def _parsed(self, task: TrainerTask, body: Buffer) -> pb.PublicResponses | pb.Factors | pb.MetricsEval | None:
        match task:
            case GeneratePublic() | AnswerAhead():
                return codec.decode(pb.PublicResponses, body)
            case ExportDelta():
                self._factors = decoded_factors(body)
                return self._factors.header
            case Evaluate():
                return codec.decode(pb.MetricsEval, body)
        return None


def fields_of(task: TrainerTask | MeasureHoldout) -> dict[str, Any]:
    """A task as the fields of a link message; donors travel as its body."""
    fields: dict[str, Any] = {"task": type(task).__name__}
    for item in dataclasses.fields(task):
        value = getattr(task, item.name)
        if not isinstance(value, pb.PublicDonors):
            fields[item.name] = list(value) if isinstance(value, tuple) else value
    return fields


def plan_message(plan: Plan, schema: LoraSchema, *, resume: bool) -> LinkMessage:
    """A plan for the trainer. resume: it is to go on from the state that it kept, and to say where that stands."""
    shapes = [{"name": name, "shape": list(shape)} for name, shape in schema.tensors]
    told = {
        "base_model_sha256": schema.base_model_sha256, "rank": schema.rank, "alpha": schema.alpha,
        "dtype": schema.dtype, "targets": schema.targets, "freeze": schema.freeze, "tensors": shapes,
    }  # fmt: skip
    fields = {"canonical_json": plan.canonical(), "lora_schema": told}
    return LinkMessage("plan", fields | ({"resume": True} if resume else {}))


def skipped_body(task: TrainerTask) -> pb.PublicResponses | pb.MetricsEval | None:
    """What stands for the answer to a task that is not given again: of it nothing is offered any more."""
    match task:
        case GeneratePublic():
            return pb.PublicResponses()
        case Evaluate():
            return pb.MetricsEval()
    return None

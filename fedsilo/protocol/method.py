"""The interface of a method: two pure halves that turn events into actions.

A half never sees a socket, a clock, an array in memory or a random device. The driver (coordinator) and the
daemon (silo) carry the actions out, and report what came of them as the next event. Deadlines are actions and
events too, so time is the caller's. Randomness is keyed (`protocol.randomness`), so a replay gives the same actions.

A method cannot send what the site's policy does not name: `Offer` hands a message to the gate, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

from fedsilo.protocol.aggregation import Aggregate, averaged
from fedsilo.protocol.factors import TURNS, UPDATE_KIND, Fixed
from fedsilo.protocol.kinds import TENSOR_KINDS
from fedsilo.protocol.plan import Options, Plan
from fedsilo.protocol.tasks import EvaluateOwn, LoadOwn, TrainerTask

EVERYBODY: Final = ""  # in the place of the silo that a result is for

# ---- coordinator: events ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStarted:
    """The run begins: every silo in `silos` (roster order) has joined and accepted the plan. Others may come later."""

    silos: tuple[str, ...]
    base_digest: str


@dataclass(frozen=True)
class MessageArrived:
    """A complete message that passed the receiver's ingress check.

    Attributes:
        silo: sender's name at the coordinator; empty at a silo, where all messages are the coordinator's.
        body: parsed payload; for a tensor kind its header only. The arrays stay with the driver, by `digest`.
    """

    silo: str
    kind: str
    round: int
    step: int
    body: Message
    digest: str


@dataclass(frozen=True)
class SiloAbstained:
    """The silo says it will not contribute to this step (step > 0) or round (step 0): declined, missed, halted.

    `declined` is the kind of the message that its site keeps back; empty when the silo itself drops out.
    """

    silo: str
    round: int
    step: int
    declined: str = ""


@dataclass(frozen=True)
class SiloCame:
    """A silo took the plan in after the run had begun: it belongs to the rounds that open from here on."""

    silo: str


@dataclass(frozen=True)
class SiloLeft:
    silo: str


@dataclass(frozen=True)
class DeadlinePassed:
    name: str


@dataclass(frozen=True)
class Committed:
    """The results of a round are durable. digests: of each, by the silo that gets it, or `EVERYBODY`."""

    round: int
    digests: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Digest of the result for all silos; empty where each has its own."""
        return self.digests.get(EVERYBODY, "")


CoordinatorEvent = RunStarted | MessageArrived | SiloAbstained | SiloCame | SiloLeft | DeadlinePassed | Committed

# ---- coordinator: actions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    silo: str
    kind: str
    round: int
    step: int
    body: Message


@dataclass(frozen=True)
class StartDeadline:
    name: str
    seconds: float


class Result(NamedTuple):
    """One result of a round: of which silos' uploads it is made, in the order given, and who gets it."""

    silos: tuple[str, ...]
    upload_digests: tuple[str, ...]
    receiver: str = EVERYBODY


@dataclass(frozen=True)
class Commit:
    """Combine the uploads of a round into its results, with `Method.aggregate`: one for all silos, or one for each of
    several, which no other may fetch. Each is made of at least as many uploads as the plan's quorum."""

    round: int
    results: tuple[Result, ...]


@dataclass(frozen=True)
class CloseRound:
    """End the open round without an adapter, as it should: what its silos gave was for each other, or stays with them.
    It comes before the round.result of the round; a round that sends its result without it is abandoned. silos: whose
    part of it has ended, in the plan's order."""

    round: int
    silos: tuple[str, ...]


@dataclass(frozen=True)
class FinishRun:
    """End the run. outcome: finished | failed. reason: a stable code for the run record, empty when finished."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """One line of the run record: counts and scalars only."""

    name: str
    round: int
    step: int
    fields: dict[str, Any]


CoordinatorAction = Send | StartDeadline | Commit | CloseRound | FinishRun | Note

# ---- silo: events (MessageArrived and DeadlinePassed as above) --------------------------------------


@dataclass(frozen=True)
class OfferSettled:
    """The gate's result for an offer: `sent`, `denied` (by policy or a person), `missed` (deadline passed, held)."""

    kind: str
    round: int
    step: int
    outcome: str


@dataclass(frozen=True)
class TaskDone:
    """The trainer finished a task. `body` is the message it offers, if the task makes one (for factors: the header)."""

    task: TrainerTask
    body: Message | None


SiloEvent = MessageArrived | OfferSettled | TaskDone | DeadlinePassed

# ---- silo: actions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Train:
    task: TrainerTask


@dataclass(frozen=True)
class Offer:
    """Hand a message to the gate. It may be sent, held or denied; `OfferSettled` tells which."""

    kind: str
    round: int
    step: int
    body: Message


@dataclass(frozen=True)
class Fetch:
    """Make the adapter with this digest present at the silo before the next action."""

    digest: str


SiloAction = Train | Offer | Fetch | StartDeadline


def in_turn(kinds: Sequence[str], number: int) -> str:
    """Return which of these kinds a round's update is of; empty where there are none."""
    return kinds[(number - 1) % len(kinds)] if kinds else ""


# ---- the interface ---------------------------------------------------------------------------------

State = TypeVar("State")
Event = TypeVar("Event", contravariant=True)
Action = TypeVar("Action", covariant=True)


class Half(Protocol, Generic[State, Event, Action]):
    """One party's part: the first state, and a pure step. State is immutable plain data."""

    def start(self, plan: Plan, party: str) -> State: ...

    def on_event(self, state: State, event: Event) -> tuple[State, tuple[Action, ...]]: ...


@dataclass(frozen=True)
class Method:
    """A method of the registry.

    Attributes:
        kinds: the message kinds a silo may offer under this method where nothing is frozen. Never widens a site's
            policy: a kind must be named by both.
        ruleset: the shipped ruleset this method runs under.
        aggregate: how the coordinator makes a result of the uploads of some silos, by the plan.
        sends_wrong_answers: whether it lives on answers to public prompts that do not verify as well, so that a
            policy that lets only verified ones out cannot serve it.
        exchanges: the values of the plan's `exchange` that its halves carry out; a plan with another is refused.
        tasks: those that its silo half names. Each is carried out by a module of `silo/trainer/tasks`.
        swaps: whether silos wait for each other's answers at each public step under `exchange: step`.
        options: model of what a plan may say of this method alone (`Plan.options`).
        same_model: whether all silos must have one base model, tokenizer and template, as what crosses is of one.
        stays: which factors are trained and never leave a silo, so that each goes on with its own; only where nothing
            is frozen.
        solutions: whether it takes the solutions of the public file, so that each row must have one.
    """

    name: str
    summary: str
    kinds: frozenset[str]
    ruleset: str
    coordinator: Half[Any, CoordinatorEvent, CoordinatorAction]
    silo: Half[Any, SiloEvent, SiloAction]
    tasks: frozenset[type[TrainerTask]]
    aggregate: Callable[[Plan, Sequence[str]], Aggregate] = averaged
    sends_wrong_answers: bool = False
    exchanges: frozenset[str] = frozenset({"step"})
    swaps: bool = False
    options: type[Options] = Options
    stays: Fixed = "none"
    solutions: bool = False
    same_model: bool = True

    @property
    def keeps_own(self) -> bool:
        """Return whether each silo goes on from round to round with what it has trained itself, or with a part of
        it."""
        return LoadOwn in self.tasks or self.stays != "none"

    @property
    def evaluates_own(self) -> bool:
        """Return whether silos send figures of what they themselves trained in a round, while it is open."""
        return EvaluateOwn in self.tasks

    @property
    def averages(self) -> bool:
        """Return whether it sends updates that are averaged, so that a plan may ask for a median or a trimmed mean in
        its place."""
        return self.aggregate is averaged and bool(self.kinds & TENSOR_KINDS)

    def fixed_in(self, plan: Plan, number: int) -> Fixed:
        """Return what the uploads of a round do not hold, so that a coordinator leaves it as it was. What a method
        leaves at each silo is not compared as it comes down: a silo goes on with its own."""
        return plan.lora.fixed_in(number) if self.stays == "none" else self.stays

    def kinds_under(self, plan: Plan) -> frozenset[str]:
        """The kinds that a silo may offer in a run of this plan: what is trained decides which ones carry it."""
        return self.kinds - {UPDATE_KIND["none"]} | set(self.update_kinds(plan))

    def update_kinds(self, plan: Plan) -> tuple[str, ...]:
        """Return the kinds of the rounds' updates, which take turns; none where no update leaves a silo."""
        if UPDATE_KIND["none"] in self.kinds:
            return tuple(UPDATE_KIND[fixed] for fixed in TURNS[plan.lora.freeze])
        return tuple(sorted(self.kinds & TENSOR_KINDS))

    def update_kind(self, plan: Plan, number: int) -> str:
        """Return the kind of the message by which a round's update leaves a silo; empty where none does."""
        return in_turn(self.update_kinds(plan), number)

    def last_kind(self, plan: Plan, number: int) -> str:
        """Return the kind of the message that ends a silo's part of a round; empty where none does."""
        return "metrics.eval" if self.evaluates_own else self.update_kind(plan, number)

"""A run at this silo, from its plan to its end.

    plan let in -> HeldPlans (people look) -> accepted: RunManager begins a SiloRun | declined: the name is spent
    item let in -> RunManager.take_in -> Agreement (signed by enough?) -> SiloRun.feed -> the method's silo half
    what the method asks for -> a task for the trainer | an adapter | an offer to the gate | a deadline
    killed, started again -> RoundResume: what the method was told is told again, what is done is not done again
    ordered away, or without a trainer -> Leaving: nothing more of the run is sent, and the goodbye is said until it is
                                          answered

The method's half is pure; nothing here decides what may leave (`gate`, `decisions`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from google.protobuf.message import Message

from fedsilo.control.server import Publish
from fedsilo.files.logs import about_its_message
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, Factors, decode_factors
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import (
    ConflictError,
    DeniedError,
    FedSiloError,
    NotAllowedError,
    OperationError,
    PeerError,
    UnreachableError,
    WireCode,
)
from fedsilo.protocol.kinds import INBOUND_KINDS, TENSOR_KINDS
from fedsilo.protocol.method import (
    DeadlinePassed,
    Fetch,
    MessageArrived,
    Method,
    Offer,
    OfferSettled,
    SiloAction,
    SiloEvent,
    StartDeadline,
    TaskDone,
    Train,
)
from fedsilo.protocol.methods import TASKS, method_named, require_donor_logp, require_solutions
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan, plan_from_canonical
from fedsilo.protocol.rounds import (
    EVALUATION,
    ROUND_OVER,
    AtSilo,
    Effect,
    SiloRound,
    Verdict,
    end_at_silo,
    message_at_silo,
    silo_step,
)
from fedsilo.protocol.tasks import FIRST, LoadAdapter, LoadReference, TrainerTask
from fedsilo.protocol.transcript import transcript_from_canonical
from policies.schema import LoraSchema
from silo.guard.acceptance import Acceptance
from silo.guard.adapters import AdapterStore, frozen_under
from silo.guard.coordinator_client import CoordinatorClient
from silo.guard.decisions import Judge, Outcomes, RunView, halts
from silo.guard.gate import Gate
from silo.guard.ledger import LEFT, Ledger, OutboxItem, Release
from silo.guard.messages import Allowed, Denied, Held, Inbound, IngressDenied
from silo.guard.releases import Releases, Settled
from silo.guard.round_agreement import Agreement, TooFewUpdates, TranscriptRefused, Waiting
from silo.guard.site import Site, require_part, trained_with
from silo.guard.trainer_process.supervisor import TrainerHandle
from silo.link import LinkClosed, LinkMessage
from silo.measuring import MeasureHoldout
from silo.sampling import PROMPTS_MAX, TaskGiver

_log = logging.getLogger("fedsilo.silo")


# ---- adapters in ---------------------------------------------------------------------------------------------


def fetch(client: CoordinatorClient, adapters: AdapterStore, digest: str, *, run: str, bytes_max: int) -> Inbound:
    """Ask for an adapter, let the answer in and return it.

    Args:
        client: of the coordinator.
        adapters: store what comes.
        digest: of the adapter.
        run: that it is for.
        bytes_max: largest payload that it may be.

    Raises:
        UnreachableError: the line was cut, and what came is stored; or what was stored is not the beginning of the
            adapter, and is removed. Ask again.
        PeerError: the answer was refused; nothing is stored.
        OperationError: the disk refused it.
    """
    with adapters.arriving(digest, bytes_max) as arriving:
        resumed_at = arriving.size_bytes
        try:
            answer = client.say(
                Place(run, 0, 0, "control.fetch"), pb.Fetch(digest=digest, offset=resumed_at), into=arriving
            )
        except PeerError as error:
            arriving.drop()
            if resumed_at and error.wire_code is WireCode.DIGEST_MISMATCH:
                raise UnreachableError(
                    f"the {resumed_at} bytes kept of adapter {digest[:12]} are not its beginning; all of it is fetched"
                ) from error
            raise
        if answer.place.kind != "global.adapter":
            arriving.drop()
        return answer


class AdapterRefused(PeerError):
    """The coordinator answered, but not with the adapter that the round is about."""


# ---- plans ---------------------------------------------------------------------------------------------------


Ruling = Literal["taken", "accept", "decline", "wait"]
_SEQUENCE = "plan_sequence"


class HeldPlans:
    """Plans that persons look at before this silo takes part in a run, and the no to a plan (threats T34, T36).

    The coordinator takes a plan that was acknowledged for one that was accepted. So a plan is acknowledged only when it
    is accepted here or when the no to it was heard, and each under its own sequence: what is said of one plan is
    nothing said of another.
    Does not stop: a coordinator that begins a run and counts a silo in that never said yes. Such a silo trains nothing
    and sends nothing for it.

    Args:
        ledger: which names of runs are spent, and under which sequence a held plan first came.
        releases: the inbox where plans wait.
        publish: tells people.
        client: says no to the coordinator.
    """

    def __init__(self, *, ledger: Ledger, releases: Releases, publish: Publish, client: CoordinatorClient) -> None:
        self._ledger = ledger
        self._releases = releases
        self._publish = publish
        self._client = client

    def look(self, item: Inbound, *, busy: bool) -> Ruling:
        """Return what to do with a plan that the rules let in, and hold it where the policy asks for persons.

        Args:
            item: the plan.
            busy: a run is open, so no other one can begin, whatever persons say.

        Returns:
            taken (nothing to do), accept (or refuse, as what cannot begin), decline, or wait (for persons: not taken in
            yet).
        """
        if state := self._ledger.run_state(item.run):
            # Said no to, or over: the name is spent. The coordinator takes silence for a yes, so it is told each time.
            return "taken" if state == "running" else "decline"
        if item.needs_approval is None or busy:
            return "accept"
        known = self._known(item.run)
        if not known:
            # Before the hold, so that no hold is without it. The first delivery counts at the coordinator.
            self._ledger.remember_of_run(item.run, _SEQUENCE, str(item.sequence))
            release = self._releases.hold_inbound(item)
            _log.warning("plan of run %s waits for approval as %s", item.run, release.id)
            self._publish("release.held", {"release": release.id, "kind": release.kind})
            return "wait"
        if known[-1].digest != item.digest:
            _log.error("the coordinator sends two plans of run %s; it is declined", item.run)
            return "decline"
        if known[-1].state == "held":
            return "wait"
        # Approved just before this silo was killed?
        approved = known[-1].state == "approved" and self._releases.plan_still_allowed(known[-1], item)
        return "accept" if approved else "decline"

    def decline(self, run: str) -> None:
        """Say no to a plan. Only when that was answered may the plan be acknowledged.

        Raises:
            UnreachableError, NotAllowedError, PeerError, DeniedError: it is not known to have been heard.
        """
        self.spend(run, "DECLINED")
        self._client.decline(run)

    def spend(self, run: str, reason: str) -> None:
        """Spend the run's name: it never begins here, and persons are not asked about its plan any more.

        Args:
            run: its name.
            reason: why, as a code for the log and for whoever was asked.
        """
        self.end_hold(run, reason)
        if not self._ledger.run_state(run):
            self._releases.deny_approved_plan(run)
        self._ledger.decline_run(run)

    def end_hold(self, run: str, reason: str) -> None:
        """Stop asking persons about this plan, since an answer would come too late."""
        for settled in self._releases.end_plan(run, reason):
            event = {"release": settled.release.id, "outcome": settled.outcome, "reason": reason}
            self._publish("release.settled", event)

    def acknowledge(self, run: str) -> None:
        """Acknowledge a held plan whose refusal was heard, as after a rule's no. Else it would come once more, and only
        persons' refusals would be said twice (T18)."""
        for sequence in self._ledger.remembered_of_run(run, _SEQUENCE):
            self._ledger.acknowledge(int(sequence))

    def run_ended(self, run: str, outcome: str) -> None:
        """Spend the name of a run that the coordinator ended and that is not open here. Where persons still look at its
        plan, a yes would join a run that is over, and nothing would ever end it here. A run that was never heard of
        leaves no trace (T24)."""
        if self._ledger.run_state(run) or not self._known(run):
            return
        _log.warning("run %s ended (%s) before its plan was accepted here", run, outcome)
        self.spend(run, "RUN_ENDED")
        self._publish("run.ended", {"run": run, "outcome": outcome})

    def _known(self, run: str) -> list[Release]:
        return [release for release in self._ledger.releases() if release.kind == "run.plan" and release.run == run]


# ---- leaving -------------------------------------------------------------------------------------------------


RUN_LEFT = "RUN_LEFT"  # reason of what is dropped
_GOODBYE = "goodbye"


class Leaving:
    """Leaves a run for good: nothing more of it is sent, and the coordinator is informed. A silo leaves by a person's
    order (`silo leave`), where too few updates stand behind a round, or since its trainer is gone.

    That it left is on the disk before anything else, so a restart does not go on with the run, and a plan of that name
    is declined ever after. What was held ends, and what lay in the outbox is dropped, also where a kill came in
    between: whether it had arrived stays open. The goodbye is `control.abstain` with round 0, said again until it is
    answered; the coordinator then waits for this silo no more, and keeps what it had already taken. The silo stays in
    the federation: the plan of the next run is looked at as usual.

    Does not take back: what was sent before. Does not stop: a coordinator that says nothing of the goodbye to the
    others; it is in this silo's log, and so is its answer.

    Args:
        ledger, judge, client: the guard's parts.
    """

    def __init__(self, *, ledger: Ledger, judge: Judge, client: CoordinatorClient) -> None:
        self._ledger = ledger
        self._outcomes = Outcomes(judge, ledger)
        self._client = client
        self._due = [
            run.run for run in ledger.runs() if run.state == LEFT and not ledger.remembered_of_run(run.run, _GOODBYE)
        ]

    def begin(self, run: str) -> None:
        """Send nothing of the run any more, also after a restart.

        Raises:
            OperationError: the ledger, or the log, takes nothing.
        """
        self._ledger.end_run(run, LEFT)
        self._due.append(run)
        self.drop_waiting()

    def drop_waiting(self) -> None:
        """Drop what still lies in the outbox of runs that were left. Raises as `begin`."""
        for item in self._ledger.outbox("allowed"):
            if self._ledger.run_state(item.run) == LEFT:
                self._outcomes.drop(item, [RUN_LEFT])

    def say_goodbye(self) -> None:
        """Say goodbye to each run that was left and whose goodbye is not known to have been heard.

        Raises:
            UnreachableError, NotAllowedError, PeerError: not yet; it is said again.
        """
        for run in list(self._due):
            try:
                self._client.abstain(run)
            except DeniedError as error:
                _log.warning("run %s: the goodbye may not be said, so others wait up to each deadline: %s", run, error)
            self._ledger.remember_of_run(run, _GOODBYE, "said")
            self._due.remove(run)
            self._client.witness()


# ---- after a kill --------------------------------------------------------------------------------------------


class RoundResume:
    """Resumes the round in which a guard was killed.

        message for the method       ->  in the ledger, before the method gets it
        killed, started again        ->  the trainer reports after which task its state was saved
        planned                      ->  the method gets the same messages again: tasks that the trainer has done are
                                         not given again, and offers are not made again

    The method's half is pure, the rows of each step are drawn again from the site's secret (`silo.sampling`), and the
    trainer's answers follow from seeds: so the round comes out as it would have, and every message leaves once. Where
    the trainer saved nothing, it does the round over, with the same result. Figures that were offered once are neither
    measured nor offered again, in whichever round or process the method asks for them next; unless a rule denied them,
    of which the ledger has no trace: then they are measured, and denied, again.

    A round that this silo left (an orderly stop, a refused adapter, a transcript that differs) is not gone on with: the
    coordinator was told so. Nor is one that was agreed on under another policy than the restart's, or other sets.
    What it does not stop: an outage longer than the round's deadline; that round was closed.

    Args:
        site: what the round was agreed on, but for the policy.
        ledger: stores the messages that the method gets.

    Attributes:
        waiting: messages that the method gets again, once the trainer is ready for the plan.
    """

    def __init__(self, site: Site, judge: Judge, ledger: Ledger) -> None:
        self._site, self._judge = site, judge
        self._ledger = ledger
        self._saved_after: tuple[int, int, int] | None = None  # round, step and order of the trainer's task
        self._passed_over: set[tuple[str, int, int]] = set()
        self._run, self._round = "", 0
        self.waiting: list[MessageArrived] = []

    @property
    def begun(self) -> bool:
        """Return True if the opening of a round waits, so that the trainer goes on from the state it saved."""
        return any(message.kind == "round.open" for message in self.waiting)

    def store_opening(self, item: Inbound, waits: Waiting | None) -> None:
        """Store a round's opening where an item may let the round begin, before the transcript records that it has."""
        if waits is not None and isinstance(item.body, pb.RoundAgreed):
            self.store(waits.opening)

    def store(self, item: Inbound) -> None:
        """Store a message in the ledger before the method gets it."""
        if item.kind == "run.end" or not item.round:
            return
        message = {"kind": item.kind, "round": item.round, "step": item.step, "digest": item.digest}
        message["payload"] = bytes(item.payload).hex()
        opens = item.kind == "round.open"
        self._ledger.keep_of_round(item.run, message, opens=opens)
        if opens and (item.run, item.round) != (self._run, self._round):
            self._forget()

    def leave(self) -> None:
        """Forget the round, which goes on without this silo."""
        self._forget()
        self._ledger.forget_round()

    def _forget(self) -> None:
        self._saved_after, self._run, self._round, self.waiting = None, "", 0, []
        self._passed_over.clear()

    def find(self, plan: Plan, round_number: int) -> list[MessageArrived]:
        """Return the messages that the method got of a round that this silo was in, and have them wait."""
        run = plan.run
        stored = self._ledger.kept_of_round(run, round_number)
        if any(message["kind"] == "round.open" for message in stored) and not self._is_agreed(plan, round_number):
            if self._waits(run, round_number):
                # killed as it was agreed on: that comes again, and what came before it (donors) does not
                stored = [message for message in stored if message["kind"] != "round.open"]
            else:
                self.leave()
                stored = []
        self._run, self._round = (run, round_number) if stored else ("", 0)
        self.waiting = []
        for message in stored:
            kind, payload = message["kind"], bytes.fromhex(message["payload"])
            body, _ = parsed(kind, payload, INBOUND_KINDS)
            self.waiting.append(MessageArrived("", kind, message["round"], message["step"], body, message["digest"]))
        return self.waiting

    def _waits(self, run: str, round_number: int) -> bool:
        """Return True if the round's transcript still waits for signatures, as far as this site knows."""
        signed = self._ledger.transcript(run, round_number)
        return bool(signed and signed["opening"] and not signed.get("agreed") and not signed["others"])

    def _is_agreed(self, plan: Plan, round_number: int) -> bool:
        """Return True if the round had begun, agreed on what this site has after the restart (T20)."""
        signed = self._ledger.transcript(plan.run, round_number)
        if signed is None or not signed.get("agreed") or signed["others"]:
            return False
        transcript, site = transcript_from_canonical(signed["transcript"]), self._site
        schema = plan.model_of(site.config.silo).lora_schema_sha256
        named = (transcript.policies.get(site.config.silo), schema, transcript.public_set_sha256)
        return named == (self._judge.policy.digest, site.schema.digest, site.public.sha256)

    def trainer_saved(self, resumed: object) -> None:
        """Note after which task the trainer's state was saved: {task, round, step}, or None for the run's start."""
        self._saved_after = None
        if isinstance(resumed, Mapping) and resumed.get("round") == self._round:
            task, step = TASKS.get(str(resumed.get("task"))), resumed.get("step")
            if task is not None and task.changes and isinstance(step, int):
                self._saved_after = (self._round, step, task.order)

    def is_done(self, task: TrainerTask) -> bool:
        """Return True if the trainer has done this task of the open round already, and is not to do it again.

        Where it gives something, such as answers to public prompts, only if what became of that is known too, or the
        task that uses it is done; else the trainer is asked for it again, and gives the same.
        """
        if not task.changes:
            offers = task.offers
            return bool(offers and self._ledger.became_of(self._judge.view.place(offers, task.round, task.step)))
        saved = self._saved_after
        if saved is None or task.round != self._round:
            return False
        here = (task.round, task.step, task.order)
        if task.offers and here < saved:
            self._passed_over.add((task.offers, task.round, task.step))
        return here < saved or (here == saved and task.gives is None)

    def became_of(self, place: Place) -> str:
        """Return what became of an offer made before the kill, or of figures, as the ledger says it;
        empty: none was made."""
        if place.kind != EVALUATION and (place.run, place.round) != (self._run, self._round):
            return ""
        outcome = self._ledger.became_of(place)
        return outcome or ("denied" if (place.kind, place.round, place.step) in self._passed_over else "")


# ---- one run -------------------------------------------------------------------------------------------------


_NOTHING = LoadAdapter(0, "")


@dataclass
class SiloRun:
    """The method's half in one run, and the actions it asked for that are not carried out yet.

    Attributes:
        manager: trains, offers and fetches for it.
        at: where the newest round stands here.
        task: what the trainer works on; None when it is idle.
        offered: places of what was offered in the open round.
        deadlines: (moment, name), as the method asked for them.
        over: the run has ended here, perhaps while an action of it was carried out; nothing more is.
    """

    plan: Plan
    method: Method
    silo: str
    manager: RunManager
    state: Any = None
    at: SiloRound = field(default_factory=SiloRound)
    task: TrainerTask | None = None
    offered: set[Place] = field(default_factory=set)
    deadlines: list[tuple[float, str]] = field(default_factory=list)
    paused: bool = False
    over: bool = False
    _actions: deque[SiloAction] = field(default_factory=deque)
    _factors: codec.Factors | None = None
    _carrying_out: bool = False
    _task_is_void: bool = False
    _task_giver: TaskGiver | None = None
    _loaded: LoadAdapter = _NOTHING  # the round that the trainer is in may be over already

    def __post_init__(self) -> None:
        self.state = self.method.silo.start(self.plan, self.silo)

    @property
    def busy(self) -> bool:
        """Return True while the trainer works, so that the coordinator has to wait for us and not we for it."""
        return self.task is not None

    def feed(self, *events: SiloEvent) -> None:
        """Hand the method one event after the other, then carry out everything that can be done now.

        Raises:
            FedSiloError: an exchange failed, or the gate is halted.
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
                if isinstance(action, Train) and action.task.order == FIRST and self._loaded.digest:
                    self.task = self.manager.measure_first(self._loaded)
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
                self.manager.adapter(digest)
            case StartDeadline(name, seconds):
                self.deadlines.append((self.manager.monotonic() + seconds, name))
            case Offer():
                factors = None
                if action.kind in TENSOR_KINDS:
                    factors, self._factors = self._factors, None
                outcome = self.manager.offer(action, factors)
                if outcome is not None:
                    return OfferSettled(action.kind, action.round, action.step, outcome)
        return None

    def _train(self, task: TrainerTask) -> SiloEvent | None:
        """Hand the trainer a task; or say at once that it is done, where it was before a kill."""
        digest = getattr(task, "digest", "") if task.reads_adapter else ""
        if digest and isinstance(task, LoadReference):
            body = self.manager.reference(digest)
        else:
            body = self.manager.adapter(digest) if digest else task.body()
        if isinstance(task, LoadAdapter):
            self._loaded = task
        if task.begins_round and self.method.keeps_own:
            self.manager.note_own(task.round)
        if task.opens_exchange:
            self.manager.change_view(open_step=task.step)
        if self._task_giver is not None:
            # Also for a task that is done already: after a restart the same rows are drawn and counted again, so that
            # the next step gets the rows that follow, and `training` says of the whole round what it was made of.
            task = self._task_giver.with_rows_drawn(task)
        elif task.draws_rows:
            raise OperationError("the trainer has not said how many private prompts it has", code="TRAINER_CONFUSED")
        if self.manager.resume.is_done(task):
            return TaskDone(task, task.gives() if task.gives is not None else None)  # nothing is offered any more
        self.manager.train(task, body)
        self.task = task
        return None

    def planned(self, fields: Mapping[str, Any]) -> None:
        """The trainer is ready for the plan. Raises OperationError: it has no usable number of private prompts."""
        count = fields.get("private_prompts")
        if type(count) is not int or not 1 <= count <= PROMPTS_MAX:
            raise OperationError("the trainer says no number of private prompts", code="TRAINER_CONFUSED")
        if self._task_giver is None:
            self._task_giver = self.manager.task_giver(count)

    def abandon_round(self) -> None:
        """Go on as after a restart: what was to be done is dropped, and the method's part waits for the next round."""
        self._actions.clear()
        self.offered.clear()
        self.deadlines.clear()
        self._factors = None
        self._task_is_void = self.busy
        self.state = self.method.silo.start(self.plan, self.silo)

    def done(self, fields: Mapping[str, Any], body: Buffer) -> None:
        """Parse what the trainer's finished task gives, and hand it to the method.

        Raises:
            OperationError: it is not the task it was given, or its values do not parse.
        """
        task, self.task = self.task, None
        if task is None or fields.get("task") != task.name or fields.get("round") != task.round:
            raise OperationError("the trainer finished a task that it was not given", code="TRAINER_CONFUSED")
        if self._task_is_void:
            self._task_is_void = False
            self.advance()
            return
        if isinstance(task, MeasureHoldout):
            self.manager.measured(body)
            self.advance()
            return
        offered: Message | None = None
        try:
            if task.gives is pb.Factors:
                self._factors = decode_factors(body)
                offered = self._factors.header
            elif task.gives is not None:
                offered = codec.decode(task.gives, body)
        except PeerError as error:
            raise OperationError(
                f"what the trainer offers does not parse: {error.message}", code="TRAINER_CONFUSED"
            ) from error
        if task.gives is pb.Factors and self._task_giver is not None and self._task_giver.training is not None:
            self.manager.change_view(training=self._task_giver.training)
        self.feed(TaskDone(task, offered))


def plan_message(plan: Plan, schema: LoraSchema, *, resume: bool) -> LinkMessage:
    """Return a plan for the trainer. resume: it goes on from the state that it saved, and reports after which task."""
    shapes = [{"name": name, "shape": list(shape)} for name, shape in schema.tensors]
    names = ("base_model_sha256", "rank", "alpha", "dtype", "targets", "freeze")
    lora = {**{name: getattr(schema, name) for name in names}, "tensors": shapes}
    fields = {"canonical_json": plan.canonical(), "lora_schema": lora}
    return LinkMessage("plan", fields | ({"resume": True} if resume else {}))


_OWN_SINCE = "own_since"


# ---- the manager ---------------------------------------------------------------------------------------------


class RunManager:
    """Takes in the coordinator's items, begins and ends runs, and does what the open run asks for.

    Args:
            site, gate, ledger, releases, adapters: the guard's parts.
            publish: tells people what happens.
            client: of the coordinator.
            agreement: what is signed before a round begins.
            trainer: carries out tasks; begun anew for each run.
            monotonic: seconds; deadlines go by it.

    Attributes:
        run: the part in the open run, if there is one.
        plans: what persons look at before a run begins.
    """

    def __init__(
        self,
        *,
        site: Site,
        gate: Gate,
        ledger: Ledger,
        releases: Releases,
        adapters: AdapterStore,
        publish: Publish,
        client: CoordinatorClient,
        agreement: Agreement,
        trainer: TrainerHandle,
        monotonic: Callable[[], float],
    ) -> None:
        self._site = site
        self._gate, self._judge = gate, gate.judge
        self._ledger = ledger
        self._releases = releases
        self._adapters = adapters
        self._publish = publish
        self._client = client
        self.agreement = agreement
        self._trainer = trainer
        self.monotonic = monotonic
        self._trainer_used = False
        self.run: SiloRun | None = None
        self.resume = RoundResume(site, gate.judge, ledger)
        self.plans = HeldPlans(ledger=ledger, releases=releases, publish=publish, client=client)
        self.acceptance = Acceptance(site.config, judge=gate.judge, adapters=adapters, publish=publish)
        self.leaving = Leaving(ledger=ledger, judge=gate.judge, client=client)

    # ---- what comes in -----------------------------------------------------------------------------

    @about_its_message
    def take_in(self, item: Inbound) -> bool:
        """Act on an item of the coordinator's outbox. False: it is not taken in yet (a plan that persons look at)."""
        _log.info("in: %s %s round %d step %d", item.kind, item.run, item.round, item.step)
        if isinstance(item.body, pb.RunPlan):
            return self._take_plan(item)
        self.agreement.compare(item, item.body)  # before anything is passed over
        if (run := self.run) is None or item.run != run.plan.run:
            if isinstance(item.body, pb.RunEnd):
                self.plans.run_ended(item.run, item.body.outcome)
        else:
            try:
                if isinstance(item.body, pb.RoundResult):
                    self.agreement.require_updates(item, item.body, run.plan)
                self._take_into(run, item)
            except TooFewUpdates as error:
                # For good: a coordinator that commits such a round is not given another update.
                self.agreement.record_refused(item, error)
                self.leave(error.reason, item.round)
        return True

    def _take_into(self, run: SiloRun, item: Inbound) -> None:
        """Act on an item of the open run as the table of its newest round says (`protocol.rounds.silo_step`)."""
        ended = end_at_silo(item.body) if isinstance(item.body, pb.RoundResult) else ""
        event = message_at_silo(item.kind, item.round, item.step, item.digest, ended=ended)
        outcome, message = silo_step(run.at, event), None
        if outcome.verdict is not Verdict.IGNORED:
            try:
                if outcome.verdict is Verdict.REFUSED:
                    raise TranscriptRefused(outcome.code, f"round {item.round} opens, which is {run.at.state} here")
                self.resume.store_opening(item, self.agreement.waiting)
                message = self.agreement.take_in(item, run.plan)
            except TranscriptRefused as error:
                if not self.agreement.refuse(item, error):
                    return
                event = AtSilo("refuse", item.round)
            if event.name == "agree" and message is None:
                event = AtSilo("too few", item.round, event.mark)
            outcome = silo_step(run.at, event)
            run.at = outcome.life
        for effect in outcome.effects:
            self._carry_out(effect, run, item, message)

    def _carry_out(self, effect: Effect, run: SiloRun, item: Inbound, message: Inbound | None) -> None:
        """Carry out one effect of an item. message: for the method, where the table says that it gets one."""
        match effect, item.body:
            case Effect.ENTER, pb.RoundOpen() as body:
                self._client.round_opened()
                self.set_view(self.acceptance.anchored(self._judge.view.opened(item.round, body)))
                if item.round == 1:
                    self._ledger.remember_of_run(item.run, "start_adapter", body.base_digest)
                run.offered.clear()
            case Effect.NOTE_END, pb.RoundResult() as body:
                self.set_view(self._judge.view.told(item.round, body))  # the next round begins with what it left
            case Effect.MISS, pb.RoundResult() as body:
                self._miss(item.run, item.round, None)
                if body.committed and item.round == self._judge.view.round:
                    self.set_view(self._judge.view.evaluating(body.adapter_digest))
            case Effect.SHOW, body:
                if item.kind == "public.donors" and run.plan.exchange == "step":  # else those of the next round's
                    self._miss(item.run, item.round, item.step)
                if (view := self._judge.view.asking(body, item.step)) != self._judge.view:
                    self.set_view(view)
                self._publish(item.kind, {"run": item.run, "round": item.round, "step": item.step})
            case Effect.TELL, _ if message is not None:
                self.resume.store(message)
                arrived = (message.kind, message.round, message.step, message.body, message.digest)
                run.feed(MessageArrived("", *arrived))
            case Effect.WITNESS, _:
                self._client.witness_round(item.round)
            case Effect.DROP, _:
                self._drop_round(run)
            case Effect.END, pb.RunEnd() as body:
                self._ledger.remember_of_run(item.run, "final_adapter", body.adapter_digest)
                self.end_run(body.outcome)
                self._client.witness()

    def _take_plan(self, item: Inbound) -> bool:
        match self.plans.look(item, busy=self.run is not None):
            case "accept":
                self._accept(item)
            case "decline":
                self.plans.decline(item.run)
            case "wait":
                return False
        return True

    def _accept(self, item: Inbound) -> bool:
        """Begin the run. False: it cannot be begun here, and the no to it was heard; raises as `decline`."""
        assert isinstance(item.body, pb.RunPlan)  # noqa: S101  # only plans come here
        plan, other_run = plan_from_canonical(item.body.canonical_json), self.run
        try:
            if other_run is not None:
                raise ConflictError(f"run {other_run.plan.run} has not ended")
            require_part(plan, self._site.config)  # what the rules cannot know
            require_solutions(plan, self._site.public.unsolved)
            require_donor_logp(plan, known=self._trainer.description.get("donor_logp") is True)
            self._begin(plan, resume=False)
        except FedSiloError as error:
            if other_run is None:  # else nothing was begun, and that one goes on
                self.run = None
                self._judge.view = RunView()
                if halts(error):  # the plan comes again when there is space
                    raise
            _log.error("plan of run %s refused: %s", plan.run, error.message)
            payload = self._judge.digests("run.plan", item.payload)
            self._judge.record_denied("ingress", "run.plan", error.code, run=plan.run, payload=payload)
            self.plans.spend(plan.run, error.code)
            if error.code.startswith("TRAINER"):
                self._client.abstain(plan.run, heard=False)
                raise
            self.plans.decline(plan.run)
            return False
        self.plans.end_hold(plan.run, "ACCEPTED")  # another policy than held it asks for no persons
        detail = {"plan": plan.digest, "isolation": self._trainer.isolation}
        self._judge.record("plan.accept", run=plan.run, kind="run.plan", detail=detail)
        self._ledger.start_run(plan.run, item.body.canonical_json)
        self.set_view(self._judge.view)
        _log.info("run %s: method %s, %d rounds of %d steps", plan.run, plan.method, plan.rounds, plan.local_steps)
        self._publish("run.accepted", {"run": plan.run, "method": plan.method})
        return True

    def _begin(self, plan: Plan, *, resume: bool) -> None:
        """Begin a run with a trainer of its own. resume: it goes on from the state that it saved."""
        if self._trainer_used:
            # A trainer serves one run: its adapter and optimiser are that run's.
            self._trainer.stop()
            self._trainer.start()
            self._client.isolation_is(self._trainer.isolation)
        self._trainer_used = True
        # Which private rows it trains on: a holdout is one only if it was one whenever this run was worked on.
        split = self._trainer.description.get("ready", {}).get("split", "")
        self._ledger.remember_of_run(plan.run, "split", str(split)[:64])
        self._ledger.remember_of_run(plan.run, "trained_with", trained_with(self._site.config))
        self._judge.view = RunView(plan=plan)
        self.run = SiloRun(plan, method_named(plan.method), self._site.config.silo, self)
        self.run.paused = self._ledger.is_paused(plan.run)
        self._trainer.send(plan_message(plan, self._site.schema, resume=resume))

    def planned(self, fields: Mapping[str, Any]) -> None:
        """Go on with what a kill interrupted: the trainer is ready for the plan.

        Raises:
            OperationError: what this silo trained in earlier rounds, and goes on with, is lost.
        """
        if self.run is not None:
            self.run.planned(fields)
            if not isinstance(fields.get("resumed"), Mapping):
                self._require_nothing_lost(self.run)
            self.resume.trainer_saved(fields.get("resumed"))
            messages, self.resume.waiting = self.resume.waiting, []
            self.run.feed(*messages)

    def note_own(self, number: int) -> None:
        """Note the first round from which on this silo goes on with what it has trained itself."""
        if self.run is not None and not self._ledger.remembered_of_run(self.run.plan.run, _OWN_SINCE):
            self._ledger.remember_of_run(self.run.plan.run, _OWN_SINCE, str(number))

    def _require_nothing_lost(self, run: SiloRun) -> None:
        """The round in which this silo began can be done over, with the same result, while it is in that round; nothing
        leads back to it from a later one. Raises OperationError: it is lost."""
        for since in self._ledger.remembered_of_run(run.plan.run, _OWN_SINCE):
            if int(since) < self._judge.view.round or run.at.state in ROUND_OVER | {"left"}:
                raise OperationError(
                    f"what this silo has trained since round {since} is lost, and nothing leads back to it",
                    hint="the trainer's scratch folder must outlive a restart",
                    code="TRAINER_STATE_LOST",
                )

    def _finish_leaving(self) -> None:
        """Do what a kill kept `leave` from; the goodbye is due anyway."""
        self.leaving.drop_waiting()
        for run in {release.run for release in self._ledger.releases("held")}:
            if self._ledger.run_state(run) == LEFT:
                self._miss(run, None, None)

    def take_up_open_run(self) -> None:
        """Go on, after a restart, inside the open round (`RoundResume`), or from the next where this one was left."""
        self._finish_leaving()
        self._releases.rejudge_held()
        self._judge.forget_runs(run.run for run in self._ledger.runs() if run.state != "running")
        opened = self._ledger.open_run()
        if opened is None:
            return
        run, canonical, view = opened
        plan, round_number = plan_from_canonical(canonical), int(view.get("round", 0))
        messages = self.resume.find(plan, round_number)
        self._begin(plan, resume=self.resume.begun or method_named(plan.method).keeps_own)
        self._judge.view = RunView.from_json(plan, view)
        waiting = {release.round for release in self._ledger.releases("held") if release.run == run}
        waiting |= {item.round for item in self._ledger.outbox("allowed") if item.run == run}
        assert self.run is not None  # noqa: S101  # it has just begun
        self.run.at = SiloRound(heard=frozenset((each.kind, each.round, each.step, each.digest) for each in messages))
        if self._judge.view.agreeing and self.agreement.resume(plan, round_number):
            self._move(self.run, "wait on", round_number)
            return  # nothing of the round has begun anywhere
        self.set_view(self._judge.view.settled())
        if begun := self.resume.begun:
            self._move(self.run, "go on", round_number)
            for each in messages:
                if isinstance(each.body, pb.RoundResult):
                    self._move(self.run, end_at_silo(each.body), round_number)
        else:
            self._move(self.run, "leave", round_number)
            self.resume.leave()
        _log.warning("run %s is taken up again %s round %d", run, "in" if begun else "after", round_number)
        if round_number and not begun and round_number not in waiting:
            self._client.abstain(run, round_number, heard=False)

    def end_run(self, outcome: str) -> None:
        if self.run is not None:
            self._ledger.end_run(self.run.plan.run, outcome or "ended")
            self._close(self.run, outcome)

    def leave(self, reason: str, round_number: int) -> None:
        """Leave the open run for good (`Leaving`), whatever the cause; the goodbye is due from here on.

        Args:
            reason: code of the cause.
            round_number: in which it arose.

        Raises:
            OperationError: the ledger, or the log, takes nothing.
        """
        if (run := self.run) is not None:
            self.leaving.begin(run.plan.run)
            self._publish("run.left", {"run": run.plan.run, "round": round_number, "reason": reason})
            self._close(run, LEFT)

    def _close(self, run: SiloRun, outcome: str) -> None:
        """Do nothing more of a run that the ledger says is over; nobody is asked about what is held of it any more."""
        self._miss(run.plan.run, None, None)
        self.agreement.drop()
        _log.info("run %s has ended: %s", run.plan.run, outcome)
        self._publish("run.ended", {"run": run.plan.run, "outcome": outcome})
        run.over, self.run = True, None
        self._judge.view = RunView()
        self._judge.forget_runs([run.plan.run])

    @staticmethod
    def _move(run: SiloRun, name: str, number: int) -> tuple[Effect, ...]:
        """Move by an event that is no message, and return its effects; before the first round nothing moves."""
        outcome = silo_step(run.at, AtSilo(name, number))
        if number:
            run.at = outcome.life
        return outcome.effects

    # ---- trouble -----------------------------------------------------------------------------------

    def abandon_round(self, code: WireCode = WireCode.DECLINED) -> None:
        """The round cannot go on here, since its adapter is not let in: stand aside until the next one."""
        if self.run is None:
            return
        run, number = self.run.plan.run, self._judge.view.round
        _log.warning("round %d of run %s goes on without this silo", number, run)
        self.sit_out(run, number)
        self._publish("round.abandoned", {"run": run, "round": number})
        if number:
            self._client.decline(run, number, heard=False, code=code)

    def sit_out(self, run: str, number: int) -> bool:
        """Take in and do nothing more of this round. False: it is not the open one."""
        if self.run is None or run != self.run.plan.run:
            return False
        effects, is_open = self._move(self.run, "leave", number), number == self._judge.view.round
        if is_open or Effect.DROP in effects:  # the one before the newest may still be evaluated
            self._drop_round(self.run)
        return is_open

    def _drop_round(self, run: SiloRun) -> None:
        self.agreement.drop()
        self.resume.leave()
        run.abandon_round()

    def without_donors(self, run: str, round_number: int, step: int) -> None:
        """The donors of a step are not let in: the step goes on with own answers, as if none had come in time."""
        if self.run is not None and self.run.plan.run == run:
            self._miss(run, round_number, step)
            self.run.feed(DeadlinePassed(f"donors/{round_number}/{step}"))

    def change_view(self, **fields: Any) -> None:
        """Change fields of the open run's view, and keep it."""
        self.set_view(replace(self._judge.view, **fields))

    def set_view(self, view: RunView) -> None:
        """Judge by this view of the open run from here on, and keep it."""
        self._judge.view = view
        if view.run:
            self._ledger.save_view(view.run, view.to_json())

    # ---- the way out -------------------------------------------------------------------------------

    @about_its_message
    def offer(self, action: Offer, factors: Factors | None) -> str | None:
        place = self._judge.view.place(action.kind, action.round, action.step)
        if self.run is not None:
            self.run.offered.add(place)
        if before := self.resume.became_of(place):
            return None if before == "waits" else before
        tensors, read_from = (None, b"") if factors is None else (factors.tensors, factors.payload)
        try:
            offered = self._gate.offer(place, action.body, tensors=tensors, read_from=read_from)
        except PeerError as error:
            # Bytes rebuilt from the trainer's values are no message.
            raise OperationError(
                f"what the trainer offers is no {action.kind}: {error.message}", code="TRAINER_CONFUSED"
            ) from error
        if isinstance(offered, Denied):
            self._declined(place, "; ".join(offered.decision.reasons))
            return "denied"
        if isinstance(offered, Held):
            plan = self._judge.view.plan
            seconds = None if plan is None else plan.hold_seconds(action.step)
            held = self._releases.hold(offered, deadline_seconds=seconds)
            _log.warning("held: %s of round %d waits for approval as %s", action.kind, action.round, held.id)
            self._publish("release.held", {"release": held.id, "kind": held.kind})
            return None
        return self._send(offered)

    def _send(self, content: Allowed | OutboxItem) -> str | None:
        """Send, and return what became of it. None: it lies in the outbox and goes out when the coordinator answers."""
        try:
            if isinstance(content, OutboxItem):
                reply = self._gate.retry(content)
            else:
                reply = self._gate.transmit_in_turn(content)
        except (UnreachableError, NotAllowedError) as error:
            self._client.back_off(error)
            return None
        except PeerError as error:
            # The answer is worth nothing, but the bytes are out, and they are not offered a second time.
            _log.error("the answer to %s of round %d was refused: %s", content.kind, content.round, error.message)
            self._client.back_off(error)
            return "sent"
        self._client.last_sent = self.monotonic()
        if isinstance(reply.body, pb.Ack) and reply.body.pending:
            self._client.poll_now = True
        return self._outcome_of_reply(content.kind, content.round, reply)

    def _outcome_of_reply(self, kind: str, round_number: int, reply: Inbound) -> str:
        self._publish("sent", {"kind": kind, "round": round_number})
        if not isinstance(reply.body, pb.Refusal):
            return "sent"
        _log.warning("the coordinator refuses %s of round %d: %s", kind, round_number, reply.body.code)
        return "missed" if reply.body.code == WireCode.ROUND_CLOSED else "denied"

    def answered(self, item: OutboxItem, sequence: int, reply: Inbound) -> None:
        """Take the answer, which came in a file, to what left in another under `sequence`. Raises UnreachableError: it
        was not taken."""
        self._gate.answered_later(item, sequence, reply)
        self._settled(item, self._outcome_of_reply(item.kind, item.round, reply))

    @about_its_message
    def retry(self, item: OutboxItem) -> bool:
        """Send what the outbox kept. False: the coordinator still does not answer."""
        try:
            outcome = self._send(item)
        except DeniedError as error:
            outcome = "denied"
            self._declined(item.place, error.message)
        if outcome is not None:
            self._settled(item, outcome)
        return outcome is not None

    def send_freed_or_report(self, settled: Settled) -> bool:
        """Act on the end of a hold: send what persons freed, begin the run of a plan that they agreed to, or say out
        there that nothing comes.

        Returns:
            Whether the message has left, or the run has begun. False of what was freed: it waits in the outbox, and
            `retry` sends it.
        """
        release = settled.release
        if release.kind == "run.plan":
            return self._settle_plan(settled)
        self._publish("release.settled", {"release": release.id, "outcome": settled.outcome})
        if (allowed := settled.allowed) is not None:
            if (sent := self._send(allowed)) is None:
                return False
            outcome = sent
        elif settled.outcome == "missed":
            outcome = "missed"
            if self._judge.view.round == release.round and self._judge.view.run == release.run:
                self._client.abstain(release.run, release.round, release.step, heard=False)
        else:
            outcome = "denied"
            self._declined(release.place, release.state)
        self._settled(release, outcome)
        return allowed is not None

    def _settle_plan(self, settled: Settled) -> bool:
        run, outcome = settled.release.run, "denied"
        try:
            if settled.inbound is None:
                self.plans.decline(run)
            elif self._accept(settled.inbound):
                outcome = settled.outcome
                return True
            self.plans.acknowledge(run)
        except (UnreachableError, NotAllowedError, PeerError, DeniedError) as error:
            # The plan is not acknowledged: it comes again, and is declined again.
            _log.warning("run %s: the no was not heard yet: %s", run, error.message)
        finally:
            self._publish("release.settled", {"release": settled.release.id, "outcome": outcome})
        return False

    def _settled(self, item: Release | OutboxItem, outcome: str) -> None:
        if self.run is not None and item.place in self.run.offered:  # what an earlier run left behind is none of these
            self.run.feed(OfferSettled(item.kind, item.round, item.step, outcome))

    def _miss(self, run: str, round_number: int | None, step: int | None) -> None:
        for settled in self._releases.miss(run, round_number, step):
            self._publish("release.settled", {"release": settled.release.id, "outcome": "missed"})
            if step is not None:
                self._settled(settled.release, "missed")

    def _declined(self, place: Place, reasons: str) -> None:
        """Nobody out there learns more than that this silo declined (B6)."""
        _log.warning("denied by this site's policy: %s of round %d: %s", place.kind, place.round, reasons)
        self._publish("denied", {"kind": place.kind, "round": place.round, "step": place.step})
        body = pb.Declined(kind=place.kind, round=place.round, step=place.step)
        self._client.tell(place._replace(kind="control.declined"), body)

    # ---- what a run asks for -----------------------------------------------------------------------

    def train(self, task: TrainerTask | MeasureHoldout, body: Buffer, digest: str = "") -> None:
        """Hand the trainer a task. digest: of the adapter that crosses, where no field names it."""
        fields = task.fields()
        try:  # an adapter has a name: it is measured and then trained on, and crosses once
            self._trainer.send(LinkMessage("task", fields, body, digest or str(fields.get("digest", ""))))
        except LinkClosed as error:
            raise OperationError("the trainer is gone", code="TRAINER_DIED") from error

    def adapter(self, digest: str) -> Buffer:
        """Return the payload of a global adapter, let in under this run's plan and measured from its last adapter (T6,
        T20). It is fetched if it is not here.

        Raises:
            AdapterRefused: another payload came.
            IngressDenied: this site's policy does not let it in.
            UnreachableError, NotAllowedError, DeniedError: nothing came.
        """
        view = self._judge.view
        frozen = frozen_under(view.plan)
        # One that was measured from another than this run's last adapter was never measured from that (T20).
        after = None if view.last_adapter in ("", digest) else view.step_from
        payload: Buffer | None = self._adapters.find(digest, frozen_sha256=frozen, after=after)
        if payload is None:
            answer = self._fetched(digest)
            payload, in_use = answer.payload, {*view.adapters, *self.acceptance.kept(view.run)}
            in_use |= {view.plan.reference_sha256} if view.plan is not None else set()
            self._adapters.keep(digest, payload, answer.facts.get("l2"), frozen, view.step_from, in_use)
        if digest == view.base_digest:
            self.set_view(self._judge.view.with_base_l2(self._adapters.l2(digest)))
        return payload

    def reference(self, digest: str) -> Buffer:
        """Return the payload of the adapter that the KL term is against, as it was let in under this run's plan.
        Nothing is trained from it, so its distance from the run's last adapter does not count. Raises as `adapter`."""
        plan = self._judge.view.plan
        payload = self._adapters.find(digest, frozen_sha256=frozen_under(plan)) if plan is not None else None
        return self.adapter(digest) if payload is None else payload

    def _fetched(self, digest: str) -> Inbound:
        """Fetch an adapter, and record where another payload comes. Raises as `adapter`."""
        view, bytes_max = self._judge.view, 2 * self._site.schema.payload_bytes  # as of what the gate takes
        try:
            answer = fetch(self._client, self._adapters, digest, run=view.run, bytes_max=bytes_max)
        except IngressDenied:
            raise
        except PeerError as error:
            raise AdapterRefused(error.wire_code, error.message) from error
        if answer.kind != "global.adapter" or answer.digest != digest:
            payload = self._judge.digests(answer.kind, answer.payload)
            reason, where = WireCode.DIGEST_MISMATCH.value, {"run": view.run, "round": view.round}
            self._judge.record_denied("ingress", answer.kind, reason, **where, payload=payload)
            raise AdapterRefused(WireCode.DIGEST_MISMATCH, f"the coordinator did not give adapter {digest[:12]}")
        return answer

    def measure_first(self, loaded: LoadAdapter) -> MeasureHoldout | None:
        """Return what the trainer is told to measure before anything is trained from an adapter. None: nothing, or the
        round is not gone on with here."""
        assert self.run is not None  # noqa: S101  # it loads the adapter
        with_own = self.run.method.stays != "none"
        due = self.acceptance.due(self._judge.view.run, loaded, with_own=with_own)
        if isinstance(due, WireCode):
            self.abandon_round(due)
        elif due is not None:
            self.train(due, self.acceptance.payload(), self.acceptance.asked_digest)
            return due
        return None

    def measured(self, body: Buffer) -> None:
        """Take the trainer's measurement, and abandon the round where it lets the adapter not in."""
        if (code := self.acceptance.take(body)) is not None:
            self.abandon_round(code)

    @property
    def deadlines(self) -> list[tuple[float, str]]:
        """(moment, name) of each that runs."""
        return self.run.deadlines if self.run is not None else []

    def pass_deadlines(self) -> None:
        """Tell the method of each deadline that has passed."""
        if (run := self.run) is None:
            return
        now = self.monotonic()
        due = [name for at, name in run.deadlines if at <= now]
        run.deadlines = [(at, name) for at, name in run.deadlines if at > now]
        for name in due:
            if not run.over:
                run.feed(DeadlinePassed(name))

    def task_giver(self, private_prompts: int) -> TaskGiver:
        """Return what draws the rows of the run's private steps."""
        plan = self._judge.view.plan
        assert plan is not None  # noqa: S101  # only a run asks, and it has one
        self.change_view(usable_records=private_prompts)
        state_path = self._site.config.state_dir / "sampler" / f"{plan.run}.json"
        return TaskGiver(plan, private_prompts, self._site.site_secret, state_path)

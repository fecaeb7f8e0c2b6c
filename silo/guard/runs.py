"""The run this silo takes part in: plans accepted or refused, the coordinator's items fed to the method, its offers
carried to the gate, and what became of them. `RunKeeper` is the hands of a `Participation`; `Guard` holds it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedsilo.files.json_log import about_its_message
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, Factors
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
from fedsilo.protocol.method import LoadAdapter, MessageArrived, Offer
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan, plan_from_canonical
from silo.guard.acceptance import Acceptance
from silo.guard.adapters import AdapterStore
from silo.guard.context import RunView
from silo.guard.conversation import Conversation
from silo.guard.decisions import halts, in_turn
from silo.guard.gate import Gate
from silo.guard.held_plans import HeldPlans
from silo.guard.incoming_adapters import stored_or_fetched
from silo.guard.leaving import Leaving
from silo.guard.ledger import LEFT, Ledger, OutboxItem, Release
from silo.guard.messages import Allowed, Denied, Held, Inbound
from silo.guard.panel import Panel
from silo.guard.participation import Participation, fields_of, plan_message
from silo.guard.releases import Releases, Settled
from silo.guard.round_again import RoundAgain
from silo.guard.startup import Site, require_part, trained_with
from silo.guard.supervisor import TrainerHandle
from silo.guard.transcripts import Agreement, TooFewUpdates, TranscriptRefused
from silo.link import LinkClosed, LinkMessage
from silo.measuring import MeasureHoldout
from silo.sampling import TaskGiver, Training

_log = logging.getLogger("fedsilo.silo")


class RunKeeper:
    """Args:
        site, gate, ledger, releases, adapters, panel: the guard's parts.
        talk: the conversation with the coordinator.
        agreement: what is signed before a round begins.
        trainer: carries out tasks; begun anew for each run.
        monotonic: seconds; deadlines go by it.

    Attributes:
        run: the participation in the open run, if there is one.
        deadlines: (moment, name), as the method asked for them.
        plan_held: a plan waits for persons.
    """

    def __init__(
        self,
        *,
        site: Site,
        gate: Gate,
        ledger: Ledger,
        releases: Releases,
        adapters: AdapterStore,
        panel: Panel,
        talk: Conversation,
        agreement: Agreement,
        trainer: TrainerHandle,
        monotonic: Callable[[], float],
    ) -> None:
        self._site = site
        self._gate = gate
        self._ledger = ledger
        self._releases = releases
        self._adapters = adapters
        self._panel = panel
        self._talk = talk
        self.agreement = agreement
        self._trainer = trainer
        self._monotonic = monotonic
        self._trainer_used = False
        self._ignored_round = 0
        self._offered: set[tuple[str, int, int]] = set()
        self._fed: set[tuple[str, int, int, str]] = set()
        self.run: Participation | None = None
        self.again = RoundAgain(site, gate, ledger)
        self.has_behind = self.again.has_behind
        self.deadlines: list[tuple[float, str]] = []
        self.plan_held = False
        self._plans = HeldPlans(ledger=ledger, releases=releases, panel=panel, talk=talk)
        self.acceptance = Acceptance(site.config, gate=gate, adapters=adapters, panel=panel)
        self.leaving = Leaving(ledger=ledger, gate=gate, talk=talk)

    # ---- what comes in -----------------------------------------------------------------------------

    @about_its_message
    def take_in(self, item: Inbound) -> bool:
        """Act on an item of the coordinator's outbox. False: it is not taken in yet (a plan that persons look at)."""
        _log.info("in: %s %s round %d step %d", item.kind, item.run, item.round, item.step)
        self.plan_held = False  # the outbox is in order: a plan that still waits is this item
        if isinstance(item.body, pb.RunPlan):
            return self._take_plan(item)
        self.agreement.compare(item, item.body)  # before anything is passed over
        if (run := self.run) is None or item.run != run.plan.run:
            if isinstance(item.body, pb.RunEnd):
                self._plans.run_ended(item.run, item.body.outcome)
            return True
        if isinstance(item.body, pb.RoundResult):
            try:
                self.agreement.require_updates(item, item.body, run.plan)
            except TooFewUpdates as error:
                self._leave_for(item, error)
                return True
        ignored = 0 < item.round <= self._ignored_round and not isinstance(item.body, pb.RunEnd)
        if ignored and not isinstance(item.body, pb.RoundResult):
            return True  # of a round that a restart left; that the run ended counts all the same
        # The coordinator sends at least once; what was fed is not fed again.
        mark = (item.kind, item.round, item.step, item.digest)
        if mark in self._fed:
            return self._follow(item)  # an exchange may have failed before that
        try:
            self.again.keep_opening(item, self.agreement.waiting)
            told = self.agreement.take_in(item, run.plan)
        except TranscriptRefused as error:
            if self.agreement.refuse(item, error):
                self._ignored_round = max(self._ignored_round, item.round)
            return True
        self._fed.add(mark)
        if isinstance(item.body, pb.RoundResult):
            self._set_view(self._gate.view.told(item.round, item.body))  # the next round begins with what it left
            if ignored:
                return True
        if isinstance(item.body, pb.RoundOpen):
            self._talk.round_opened()
            self._set_view(self.acceptance.anchored(self._gate.view.opened(item.round, item.body)))
            if item.round == 1:
                self._ledger.remember_of_run(item.run, "start_adapter", item.body.base_digest)
            self._offered.clear()
        elif item.kind == "public.donors" and run.plan.exchange == "step":  # else what is held is for the next round's
            self._miss(item.run, item.round, item.step)
        elif isinstance(item.body, pb.RoundAgreed):
            self._set_view(self._gate.view)
        elif isinstance(item.body, pb.RoundResult):
            self._miss(item.run, item.round, None)
            if item.body.committed and item.round == self._gate.view.round:
                self._set_view(self._gate.view.evaluating(item.body.adapter_digest))
        if (view := self._gate.view.asking(item.body, item.step)) != self._gate.view:
            self._set_view(view)
        if told is not None or not isinstance(item.body, pb.RoundAgreed):
            self._panel.publish(item.kind, {"run": item.run, "round": item.round, "step": item.step})
        if told is not None:
            self.again.keep(told)
            run.feed(MessageArrived("", told.kind, told.round, told.step, told.body, told.digest))
        elif isinstance(item.body, pb.RoundResult):
            self._ignored_round = max(self._ignored_round, item.round)  # it ended before it began here
        return self._follow(item)

    def _leave_for(self, item: Inbound, error: TooFewUpdates) -> None:
        """This silo's run is over, for good: a coordinator that commits such a round is not given another update."""
        self.agreement.record_refused(item, error)
        self.leaving.begin(item.run)
        self._panel.publish("run.left", {"run": item.run, "round": item.round, "reason": error.reason})
        self.end_run(LEFT)

    def _follow(self, item: Inbound) -> bool:
        """What the end of a round or run asks for besides what the method does; done once more if it may not be."""
        if item.kind == "round.result":
            self._talk.witness_round(item.round)
        if isinstance(item.body, pb.RunEnd):
            self._ledger.remember_of_run(item.run, "final_adapter", item.body.adapter_digest)
            self.end_run(item.body.outcome)
            self._talk.witness()
        return True

    def _take_plan(self, item: Inbound) -> bool:
        match self._plans.look(item, busy=self.run is not None):
            case "accept":
                self._accept(item)
            case "decline":
                self.decline(item.run)
            case "wait":
                return False
        return True

    def decline(self, run: str) -> None:
        """Say no to a plan. Only when that was answered may the plan be acknowledged.

        Raises:
            UnreachableError, NotAllowedError, PeerError, DeniedError: it is not known to have been heard.
        """
        self._plans.decline(run)

    def _accept(self, item: Inbound) -> bool:
        """Begin the run. False: it cannot be begun here, and the no to it was heard; raises as `decline`."""
        assert isinstance(item.body, pb.RunPlan)  # noqa: S101  # only plans come here
        plan, other_run = plan_from_canonical(item.body.canonical_json), self.run
        try:
            if other_run is not None:
                raise ConflictError(f"run {other_run.plan.run} has not ended")
            require_part(plan, self._site.config)  # what the rules cannot know
            self._begin(plan)
        except FedSiloError as error:
            if other_run is None:  # else nothing was begun, and that one goes on
                self.run = None
                self._gate.view = RunView()
                if halts(error):  # the plan comes again when there is space
                    raise
            _log.error("plan of run %s refused: %s", plan.run, error.message)
            self._gate.record(
                "ingress.decision", run=plan.run, kind="run.plan", decision="deny", reasons=[error.code],
                payload=self._gate.digests("run.plan", item.payload), direction="ingress",
            )  # fmt: skip
            self._plans.spend(plan.run, error.code)
            if error.code.startswith("TRAINER"):
                self._talk.abstain(plan.run, heard=False)
                raise
            self.decline(plan.run)
            return False
        self._plans.end_hold(plan.run, "ACCEPTED")  # another policy than held it asks for no persons
        told = {"plan": plan.digest, "isolation": self._trainer.rung}
        self._gate.record("plan.accept", run=plan.run, kind="run.plan", detail=told)
        self._ledger.start_run(plan.run, item.body.canonical_json)
        self._set_view(self._gate.view)
        _log.info("run %s: method %s, %d rounds of %d steps", plan.run, plan.method, plan.rounds, plan.local_steps)
        self._panel.publish("run.accepted", {"run": plan.run, "method": plan.method})
        return True

    def _begin(self, plan: Plan) -> None:
        if self._trainer_used:
            # A trainer serves one run: its adapter and optimiser are that run's.
            self._trainer.stop()
            try:
                self._trainer.start()
            finally:
                self._panel.trainer(self._trainer.description)
            self._talk.isolation_is(self._trainer.rung)
        self._trainer_used = True
        # Which private rows it trains on: a holdout is one only if it was one whenever this run was worked on.
        split = self._trainer.description.get("ready", {}).get("split", "")
        self._ledger.remember_of_run(plan.run, "split", str(split)[:64])
        self._ledger.remember_of_run(plan.run, "trained_with", trained_with(self._site.config))
        self._gate.view = RunView(plan=plan)
        self.run = Participation(plan, method_named(plan.method), self._site.config.silo, self)
        self.run.paused = self._ledger.is_paused(plan.run)
        self._trainer.send(plan_message(plan, self._site.schema, resume=self.again.begun))

    def planned(self, fields: Mapping[str, Any]) -> None:
        """The trainer is ready for the plan; what a kill interrupted goes on."""
        if self.run is not None:
            self.run.planned(fields)
            self.again.trainer_stands(fields.get("resumed"))
            told, self.again.waiting = self.again.waiting, []
            self.run.feed(*told)

    def take_up_open_run(self) -> None:
        """After a restart: go on inside the open round (`round_again`), or from the next where this one was left."""
        self._releases.judge_again()
        self._gate.forget_runs(run["run"] for run in self._ledger.runs() if run["state"] != "running")
        opened = self._ledger.open_run()
        if opened is None:
            return
        run, canonical, view = opened
        plan, round_number = plan_from_canonical(canonical), int(view.get("round", 0))
        told = self.again.find(run, round_number)
        self._begin(plan)
        self._gate.view = RunView.from_json(plan, view)
        waiting = {release.round for release in self._ledger.releases("held") if release.run == run}
        waiting |= {item.round for item in self._ledger.outbox("allowed") if item.run == run}
        self._fed |= {(one.kind, one.round, one.step, one.digest) for one in told}
        if self._gate.view.agreeing and self.agreement.resume(plan, round_number):
            self._ignored_round = round_number - 1
            return  # nothing of the round has begun anywhere
        self._set_view(self._gate.view.settled())
        self._ignored_round = round_number - (begun := self.again.begun)
        if not begun:
            self.again.leave()
        _log.warning("run %s is taken up again %s round %d", run, "in" if begun else "after", round_number)
        if round_number and not begun and round_number not in waiting:
            self._talk.abstain(run, round_number, heard=False)

    def end_run(self, outcome: str) -> None:
        if (run := self.run) is None:
            return
        self._ledger.end_run(run.plan.run, outcome or "ended")
        self._miss(run.plan.run, None, None)
        self.agreement.drop()
        _log.info("run %s has ended: %s", run.plan.run, outcome)
        self._panel.publish("run.ended", {"run": run.plan.run, "outcome": outcome})
        run.over, self.run = True, None
        self.deadlines.clear()
        self._fed.clear()
        self._ignored_round = 0
        self._gate.view = RunView()
        self._gate.forget_runs([run.plan.run])

    # ---- trouble -----------------------------------------------------------------------------------

    def abandon_round(self, code: WireCode = WireCode.DECLINED) -> None:
        """The round cannot go on here, since its adapter is not let in: stand aside until the next one."""
        if self.run is None:
            return
        run, number = self.run.plan.run, self._gate.view.round
        _log.warning("round %d of run %s goes on without this silo", number, run)
        self.sit_out(run, number)
        self._panel.publish("round.abandoned", {"run": run, "round": number})
        if number:
            self._talk.decline(run, number, heard=False, code=code)

    def sit_out(self, run: str, number: int) -> bool:
        """Of this round nothing more is taken in, and nothing more is done. False: it is not the open one."""
        if self.run is None or run != self.run.plan.run:
            return False
        self._ignored_round = max(self._ignored_round, number)
        if number != self._gate.view.round:
            return False
        self.agreement.drop()
        self.again.leave()
        self.run.abandon_round()
        self._offered.clear()
        self.deadlines.clear()
        return True

    def without_donors(self, run: str, round_number: int, step: int) -> None:
        """The donors of a step are not let in: the step goes on with own answers, as if none had come in time."""
        if self.run is not None and self.run.plan.run == run:
            self._miss(run, round_number, step)
            self.run.deadline(f"donors/{round_number}/{step}")

    def change_view(self, change: Callable[[RunView], RunView]) -> None:
        self._set_view(change(self._gate.view))

    def _set_view(self, view: RunView) -> None:
        self._gate.view = view
        if view.run:
            self._ledger.save_view(view.run, view.to_json())

    # ---- the way out -------------------------------------------------------------------------------

    @about_its_message
    def offer(self, action: Offer, factors: Factors | None) -> str | None:
        run = self._gate.view.run
        self._offered.add((action.kind, action.round, action.step))
        if before := self.again.became_of(action.kind, run, action.round, action.step):
            return None if before == "waits" else before
        tensors, read_from = (None, b"") if factors is None else (factors.tensors, factors.payload)
        try:
            offered = self._gate.offer(
                action.kind, action.body, run=run, round_number=action.round, step=action.step, tensors=tensors,
                read_from=read_from,
            )  # fmt: skip
        except PeerError as error:
            # Bytes rebuilt from the trainer's values are no message.
            raise OperationError(
                f"what the trainer offers is no {action.kind}: {error.message}", code="TRAINER_CONFUSED"
            ) from error
        if isinstance(offered, Denied):
            self._declined(action.kind, run, action.round, action.step, "; ".join(offered.decision.reasons))
            return "denied"
        if isinstance(offered, Held):
            plan = self._gate.view.plan
            seconds = None if plan is None else plan.hold_seconds(action.step)
            held = self._releases.hold(action.kind, run, action.round, action.step, offered, deadline_seconds=seconds)
            _log.warning("held: %s of round %d waits for approval as %s", action.kind, action.round, held.id)
            self._panel.publish("release.held", {"release": held.id, "kind": held.kind})
            return None
        return self._outcome_of(offered, lambda: in_turn(offered, self._ledger, self._gate.transmit))

    def _outcome_of(self, content: Allowed | OutboxItem, exchange: Callable[[], Inbound]) -> str | None:
        """Send, and say what became of it; None: it lies in the outbox and goes out when the coordinator answers."""
        try:
            reply = exchange()
        except (UnreachableError, NotAllowedError) as error:
            self._talk.back_off(error)
            return None
        except PeerError as error:
            # The answer is worth nothing, but the bytes are out, and they are not offered a second time.
            _log.error("the answer to %s of round %d was refused: %s", content.kind, content.round, error.message)
            self._talk.back_off(error)
            return "sent"
        self._talk.last_sent = self._monotonic()
        if isinstance(reply.body, pb.Ack) and reply.body.pending:
            self._talk.poll_now = True
        return self._outcome_said(content.kind, content.round, reply)

    def _outcome_said(self, kind: str, round_number: int, reply: Inbound) -> str:
        self._panel.publish("sent", {"kind": kind, "round": round_number})
        if not isinstance(reply.body, pb.Refusal):
            return "sent"
        _log.warning("the coordinator refuses %s of round %d: %s", kind, round_number, reply.body.code)
        return "missed" if reply.body.code == WireCode.ROUND_CLOSED else "denied"

    def answered(self, item: OutboxItem, sequence: int, reply: Inbound) -> None:
        """What left in a file under `sequence` was answered in another. Raises UnreachableError: it was not taken."""
        self._gate.answered_later(item, sequence, reply)
        self._settled(item, self._outcome_said(item.kind, item.round, reply))

    @about_its_message
    def retry(self, item: OutboxItem) -> bool:
        """Send what the outbox kept. False: the coordinator still does not answer."""
        try:
            outcome: str | None = self._outcome_of(item, lambda: self._gate.retry(item).reply)
        except DeniedError as error:
            outcome = "denied"
            self._declined(item.kind, item.run, item.round, item.step, error.message)
        if outcome is not None:
            self._settled(item, outcome)
        return outcome is not None

    def settle(self, settled: Settled) -> None:
        """Act on the end of a hold."""
        release = settled.release
        if release.kind == "run.plan":
            self._settle_plan(settled)
            return
        self._panel.publish("release.settled", {"release": release.id, "outcome": settled.outcome})
        if (allowed := settled.allowed) is not None:
            outcome = self._outcome_of(allowed, lambda: in_turn(allowed, self._ledger, self._gate.transmit))
            if outcome is None:
                return
        elif settled.outcome == "missed":
            outcome = "missed"
            if self._gate.view.round == release.round and self._gate.view.run == release.run:
                self._talk.abstain(release.run, release.round, release.step, heard=False)
        else:
            outcome = "denied"
            self._declined(release.kind, release.run, release.round, release.step, release.state)
        self._settled(release, outcome)

    def _settle_plan(self, settled: Settled) -> None:
        run, outcome, self.plan_held = settled.release.run, "denied", False
        try:
            if settled.inbound is None:
                self.decline(run)
            elif self._accept(settled.inbound):
                outcome = settled.outcome
                return
            self._plans.acknowledge(run)
        except (UnreachableError, NotAllowedError, PeerError, DeniedError) as error:
            # The plan is not acknowledged: it comes again, and is declined again.
            _log.warning("run %s: the no was not heard yet: %s", run, error.message)
        finally:
            self._panel.publish("release.settled", {"release": settled.release.id, "outcome": outcome})

    def _settled(self, item: Release | OutboxItem, outcome: str) -> None:
        offered = (item.kind, item.round, item.step)  # what an earlier run left behind says nothing of it in this one
        if self.run is not None and item.run == self.run.plan.run and offered in self._offered:
            self.run.settled(*offered, outcome)

    def _miss(self, run: str, round_number: int | None, step: int | None) -> None:
        for settled in self._releases.miss(run, round_number, step):
            self._panel.publish("release.settled", {"release": settled.release.id, "outcome": "missed"})
            if step is not None:
                self._settled(settled.release, "missed")

    def _declined(self, kind: str, run: str, round_number: int, step: int, reasons: str) -> None:
        """Nobody out there learns more than that this silo declined (B6)."""
        _log.warning("denied by this site's policy: %s of round %d: %s", kind, round_number, reasons)
        self._panel.publish("denied", {"kind": kind, "round": round_number, "step": step})
        self._talk.tell(
            "control.declined", pb.Declined(kind=kind, round=round_number, step=step), run=run,
            round_number=round_number, step=step,
        )  # fmt: skip

    # ---- hands of the participation ----------------------------------------------------------------

    def train(self, fields: dict[str, Any], body: Buffer, digest: str = "") -> None:
        try:  # an adapter has a name: it is measured and then trained on, and crosses once
            self._trainer.send(LinkMessage("task", fields, body, digest or str(fields.get("digest", ""))))
        except LinkClosed as error:
            raise OperationError("the trainer is gone", code="TRAINER_DIED") from error
        self._panel.task(fields)

    def adapter(self, digest: str) -> Buffer:
        bytes_max = 2 * self._site.schema.payload_bytes  # as of what the gate takes
        kept = self.acceptance.kept(self._gate.view.run)
        stored = stored_or_fetched(digest, self._adapters, self._gate, self._talk, bytes_max=bytes_max, in_use=kept)
        if digest == self._gate.view.base_digest:
            self._set_view(self._gate.view.with_base_l2(self._adapters.l2(digest)))
        return stored

    def to_measure(self, loaded: LoadAdapter) -> MeasureHoldout | None:
        due = self.acceptance.due(self._gate.view.run, loaded)
        if isinstance(due, WireCode):
            self.abandon_round(due)
        elif due is not None:
            self.train(fields_of(due), self.acceptance.payload(), self.acceptance.asked_digest)
            return due
        return None

    def measured(self, body: Buffer) -> None:
        if (code := self.acceptance.take(body)) is not None:
            self.abandon_round(code)

    def start_deadline(self, name: str, seconds: float) -> None:
        self.deadlines.append((self._monotonic() + seconds, name))

    def public_step(self, step: int) -> None:
        self._set_view(self._gate.view.at_step(step))

    def task_giver(self, private_prompts: int) -> TaskGiver:
        plan = self._gate.view.plan
        assert plan is not None  # noqa: S101  # only a participation asks, and it has one
        self._set_view(replace(self._gate.view, usable_records=private_prompts))
        state_path = self._site.config.state_dir / "sampler" / f"{plan.run}.json"
        return TaskGiver(plan, private_prompts, self._site.site_secret, state_path)

    def trained(self, training: Training) -> None:
        self._set_view(self._gate.view.trained(training))

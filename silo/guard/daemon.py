"""The guard's main path: one loop, one thread, one exchange with the coordinator at a time.

    queue of events (trainer link, signed commands, signals)  ->  loop  ->  Participation  ->  Gate  ->  coordinator

How it and the coordinator come to speak is an `Exchange`: calls over a line, or files that people carry. `Guard` holds
every part; no part holds the guard.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from fedsilo.edge.audit_log import AuditLog
from fedsilo.edge.control_desk import ControlDesk
from fedsilo.edge.disk_space import require_space
from fedsilo.treaty.audit.record import RecordError
from fedsilo.treaty.errors import (
    DeniedError,
    FedSiloError,
    NotAllowedError,
    OperationError,
    PeerError,
    UnreachableError,
    VerificationError,
    WireCode,
)
from fedsilo.treaty.transcript import Equivocation
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from silo.guard.adapters import AdapterStore
from silo.guard.archive import Archive
from silo.guard.calls import Calls, Exchange
from silo.guard.conversation import Conversation
from silo.guard.events import Command, Event, Wake
from silo.guard.gate import Gate
from silo.guard.halts import Halts, ends_when
from silo.guard.in_force import RECORDS_LOOKED_AT
from silo.guard.incoming_adapters import AdapterRefused
from silo.guard.judge import halts
from silo.guard.ledger import Ledger
from silo.guard.messages import ExchangeInterrupted, IngressDenied
from silo.guard.orders import Orders
from silo.guard.panel import Panel
from silo.guard.release_keeping import keep_recorded_noes
from silo.guard.releases import Releases
from silo.guard.runs import RunKeeper
from silo.guard.startup import Site
from silo.guard.supervisor import TrainerGone, TrainerHandle, TrainerSaid
from silo.guard.trainer_link import where_it_tells
from silo.guard.trainer_report import ValuesUnusable, plain
from silo.guard.transcripts import EQUIVOCATION, Agreement
from silo.guard.transfer import FileExchange
from silo.guard.witnessing import Witnessing
from silo.link import LinkClosed, LinkMessage

_log = logging.getLogger("fedsilo.silo")

PROGRESS_SECONDS = 1.0
HOURLY_SECONDS = 3600.0  # how often what is too old, or soon will be, is looked for
COMMAND_TIMEOUT_SECONDS = 120.0
CONFUSED = "TRAINER_CONFUSED"  # it runs, and what it says makes no sense


class Guard:
    """Holds the parts and runs the loop.

    Args:
        site: what was read at start.
        gate, ledger, audit, releases, adapters: the parts of the way out.
        trainer: its handle; started for each run.
        desk: where people look and command.
        events: the queue that the trainer's reader fills.
        monotonic: seconds; deadlines and throttles go by it.
    """

    def __init__(
        self,
        *,
        site: Site,
        gate: Gate,
        ledger: Ledger,
        audit: AuditLog,
        releases: Releases,
        adapters: AdapterStore,
        trainer: TrainerHandle,
        desk: ControlDesk,
        events: queue.Queue[Event],
        code_sha256: str,
        monotonic: Callable[[], float] = time.monotonic,
        archive: Archive | None = None,
    ) -> None:
        self._site = site
        self._archive = archive
        self.hourly: list[Callable[[], object]] = [] if archive is None else [archive.expire]  # what is too old, first
        self._gate = gate
        self._ledger = ledger
        self._audit = audit
        self._releases = releases
        self._trainer = trainer
        self._events = events
        self._monotonic = monotonic
        self._stopping = threading.Event()
        self._last_progress, self._hourly_at = -PROGRESS_SECONDS, 0.0
        self._failure: FedSiloError | None = None
        self._halt_said, self._taken_up, self._sits_out = "", False, False
        self.panel = Panel(site, gate, ledger, audit, releases, desk, clock=gate.clock)
        witnessing = Witnessing(
            audit, lambda: gate.policy, own_id=site.config.spiffe_id, trust_root_pem=site.identity.trust_root_pem,
            now_seconds=gate.now,
        )  # fmt: skip
        self._talk = Conversation(site, gate, witnessing, code_sha256=code_sha256, monotonic=monotonic)
        self._agreement = Agreement(site=site, gate=gate, ledger=ledger, witnessing=witnessing, talk=self._talk)
        try:
            newest = list(audit.records(max(0, audit.size - RECORDS_LOOKED_AT)))
            self._agreement.take_up(newest)
            keep_recorded_noes(ledger, newest)
        except (OperationError, RecordError) as error:  # evidence in the log alone halts like that in the ledger
            gate.halted = gate.halted or self._agreement.halted or error.message
        gate.halted = gate.halted or self._agreement.halted  # as before a restart, and before anything can be sent
        self.keeper = RunKeeper(
            site=site, gate=gate, ledger=ledger, releases=releases, adapters=adapters, panel=self.panel,
            talk=self._talk, agreement=self._agreement, trainer=trainer, monotonic=monotonic,
        )  # fmt: skip
        self.files: FileExchange | None = None
        self._line: Exchange = Calls(
            gate, ledger, self._talk, self._agreement, self.keeper, rung=lambda: trainer.rung, monotonic=monotonic
        )
        if site.config.coordinator.by_files:
            self._line = self.files = FileExchange(
                site, gate, ledger, self._talk, self._agreement, self.keeper, panel=self.panel,
                rung=lambda: trainer.rung,
            )  # fmt: skip
        self.orders = Orders(
            site=site, gate=gate, ledger=ledger, audit=audit, releases=releases, halts=Halts(gate, ledger),
            keeper=self.keeper, panel=self.panel, trainer=trainer, on_loop=self.on_loop, stop=self._stopping.set,
            fail=self._fail, files=self.files,
        )  # fmt: skip

    # ---- life --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the loop to end. Safe in a signal handler.

        The exchange in flight (at most a long poll) may finish, so that its outcome is on record at both ends; a second
        call gives it up for good, and the log says `egress.indeterminate`.
        """
        if self._stopping.is_set():
            self._gate.interrupt(for_good=True)
        self._stopping.set()
        self._events.put(Wake())

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            FedSiloError: why this silo cannot go on (refused at join, trainer dead, policy denies hello).
        """
        self._take_up()
        try:
            while not self.stopping:
                self._turn()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._leave()

    def _take_up(self) -> None:
        """Go on where a restart, or a halt that people have released, left off; halted, nothing goes on."""
        if self._gate.halted:
            return
        if not self._taken_up:
            self._taken_up = True
            self.keeper.take_up_open_run()
        elif self._sits_out:
            self._sits_out = False
            self.keeper.abandon_round()

    def _turn(self) -> None:
        """One step of the loop: an event if there is one, else one exchange, else wait."""
        try:
            event = self._events.get(timeout=self._patience())
        except queue.Empty:
            event = None
        try:
            self._step(event)
        except ExchangeInterrupted:
            if not self.stopping:
                raise
        except (UnreachableError, NotAllowedError) as error:
            self._talk.back_off(error)
        except DeniedError as error:
            self._denied(error)
        except PeerError as error:
            _log.error("the coordinator's answer was refused: %s [%s]", error.line, error.code)
            self._talk.back_off(error)
        except VerificationError as error:
            _log.critical("checkpoint: %s", error.message)
            self._gate.halt(error.message, error.code)
        except OperationError as error:
            if halts(error) and not self._gate.halted:
                self._gate.halt(error.message, error.code)
            if self._gate.halted:
                self._halt()
            else:
                self._failure = error
        self.panel.show(self.keeper.run, link_fault=self._gate.counters.last_fault)

    def _step(self, event: Event | None) -> None:
        """The work of a turn, and what follows from a refusal in it, which may fail like any other work."""
        try:
            if event is not None:
                self._handle(event)
            self._keep_time()
            if self._events.empty() and not self.stopping and self._monotonic() >= self._talk.retry_at:
                self._exchange()
        except Equivocation as error:
            self._equivocated(error)
        except IngressDenied as error:
            self._refuse(error)
        except AdapterRefused as error:
            _log.error("%s", error.message)
            self._talk.back_off(error)
            self.keeper.abandon_round()
        except OperationError as error:
            if self._gate.halted or not (error.code.startswith("TRAINER") or isinstance(error, LinkClosed)):
                raise
            self._trainer_failed(error)

    def _patience(self) -> float:
        """How long to wait for an event before looking at the clock again."""
        now = self._monotonic()
        if self._gate.halted:
            return 1.0
        if now < self._talk.retry_at:
            return min(1.0, self._talk.retry_at - now)
        if self._line.waits:
            return 0.0
        return max(0.0, min([1.0, *(at - now for at, _ in self.keeper.deadlines)]))

    def _handle(self, event: Event) -> None:
        match event:
            case Command():
                if not event.result.set_running_or_notify_cancel():
                    return  # nobody waits for it any more, so it is not done behind their back
                try:
                    event.result.set_result(event.work())
                except FedSiloError as error:
                    event.result.set_exception(error)
                    if halts(error):
                        raise
            case TrainerGone(_, confused) if confused:
                raise OperationError(
                    f"the trainer breaks the rules of its link: {plain(confused)}", hint=self._trainer_log,
                    code=CONFUSED,
                )  # fmt: skip
            case TrainerGone(status):
                raise OperationError(
                    f"the trainer is gone (exit status {status})" if status is not None else "the trainer is gone",
                    hint=self._trainer_log, code="TRAINER_DIED",
                )  # fmt: skip
            case TrainerSaid(message):
                try:
                    self._trainer_said(message)
                except ValuesUnusable as error:
                    raise OperationError(
                        f"the trainer's {message.type!r} says what cannot be: {error}", hint=self._trainer_log,
                        code=CONFUSED,
                    ) from error  # fmt: skip
            case Wake():
                return

    def _keep_time(self) -> None:
        now = self._monotonic()
        due = [name for at, name in self.keeper.deadlines if at <= now]
        self.keeper.deadlines = [(at, name) for at, name in self.keeper.deadlines if at > now]
        for name in due:
            if self.keeper.run is not None:
                self.keeper.run.deadline(name)
        for settled in self._releases.expire():
            self.keeper.settle(settled)
        if now >= self._hourly_at:
            self._hourly_at = now + HOURLY_SECONDS
            for work in self.hourly:
                work()

    # ---- the coordinator's turn --------------------------------------------------------------------

    def _exchange(self) -> None:
        if self._gate.halted:
            self._halt()
            return
        self._take_up()
        self._talk.look_at_policy()
        self._line.turn()

    # ---- the trainer -------------------------------------------------------------------------------

    def _trainer_said(self, message: LinkMessage) -> None:
        run = self.keeper.run
        match message.type:
            case "done" if run is not None:
                if run.task is not None:
                    self.panel.metrics(message.fields, run.task)
                run.done(message.fields, message.body)
            case "step" if run is not None and run.task is not None:
                self.panel.step(message.fields, run.task)
                if self._monotonic() - self._last_progress >= PROGRESS_SECONDS and self._talk.joined:
                    self._last_progress = self._monotonic()
                    self._tell_progress(run.task.round, getattr(run.task, "step", 0))
            case "planned":
                self.panel.planned(message.fields)
                self.keeper.planned(message.fields)
            case "failed":
                raise OperationError(
                    f"the trainer reports {plain(message.fields.get('code', ''), 64)}: "
                    f"{plain(message.fields.get('message', ''), 500)}",
                    hint=self._trainer_log, code="TRAINER_FAILED",
                )  # fmt: skip

    def _tell_progress(self, number: int, step: int) -> None:
        """Where the task stands that we gave, whatever the trainer says of it: its numbers carry nothing out."""
        self._talk.tell("control.progress", pb.Progress(round=number, step=step), round_number=number, step=step)

    @property
    def _trainer_log(self) -> str:
        return where_it_tells(self._site.config)

    def _trainer_failed(self, error: OperationError) -> None:
        """The run goes on without us: say so, then end with the cause.

        Raises DiskFullError: one that just ended, where there is no space: that is the cause, or hides it. The run is
        not left, but gone on with after a restart.
        """
        _log.error("%s", error.message)
        if error.code == "TRAINER_DIED" or isinstance(error, LinkClosed):
            require_space(self._site.config.state_dir)
        self.panel.publish("trainer.failed", {"code": error.code})
        run = self._gate.view.run
        if run and self._talk.joined:
            # what it said is no message, so no rule has judged it; the log still says that there was something (T3)
            self._gate.record(
                "egress.decision", run=run, round=self._gate.view.round, kind="unknown", decision="deny",
                reasons=[error.code], direction="egress",
            )  # fmt: skip
            self._talk.tell("control.error", pb.ErrorReport(code=WireCode.INTERNAL.value), run=run)
            self._talk.abstain(run, heard=False)
            self._ledger.end_run(run, "left")
        self.keeper.run = None
        self._failure = error

    # ---- trouble -----------------------------------------------------------------------------------

    def _halt(self) -> None:
        """Say once, everywhere, that nothing is sent any more; in the audit log in the space kept for that (T39)."""
        if self._halt_said == self._gate.halted:
            return
        self._halt_said = self._gate.halted
        code = EQUIVOCATION if self._agreement.halted else self._gate.halt_code or "STATE_UNWRITABLE"
        until = ends_when(code, self._site.config.state_dir)
        _log.critical("halted: %s; nothing is sent until %s", self._gate.halted, until)
        self.panel.publish("halted", {"reason": self._gate.halted})
        with contextlib.suppress(OperationError):
            self._audit.append("halt", reasons=[code])

    def _equivocated(self, error: Equivocation) -> None:
        """Somebody signed two transcripts of one round (T20): keep both, and halt until people release it."""
        _log.critical("%s; %s", error.message, error.hint)
        try:
            self._agreement.keep(error)
            self._sits_out = self.keeper.sit_out(error.evidence["run"], error.evidence["round"])
        except FedSiloError as failure:  # what cannot be written halts, too
            _log.critical("not all of the evidence is kept: %s", failure.line)
        self._gate.halted = self._gate.halted or error.message
        self._halt()

    def _refuse(self, error: IngressDenied) -> None:
        """A genuine message that our policy does not let in: the coordinator is told no, and not why (B6).

        An item of the outbox is acknowledged then; an answer (an adapter, control.*) has a sequence that stands for
        nothing, and to acknowledge it would take in an item that waits before it.
        """
        envelope = error.envelope
        try:
            self._agreement.compare(envelope, error.body)
        except Equivocation as equivocation:
            self._equivocated(equivocation)
            return
        _log.error("%s; %s", error.message, error.hint.replace("\n", "; "))
        self.panel.publish("ingress.denied", {"kind": envelope.kind, "round": envelope.round})
        if envelope.kind == "global.adapter":
            self.keeper.abandon_round()
        elif envelope.kind.startswith("control."):
            self._talk.tell_declined(envelope.run)
        else:
            try:
                self._go_on_without(envelope)
            except (UnreachableError, NotAllowedError, PeerError, DeniedError) as failure:
                # Not acknowledged, so it comes again: a no that got lost must not pass for a yes.
                _log.warning("%s comes again: %s", envelope.kind, failure.message)
            else:
                self._ledger.acknowledge(envelope.sequence)
        self._talk.back_off(error)

    def _go_on_without(self, envelope: pb.Envelope) -> None:
        match envelope.kind:
            # of a run that was accepted only the accepted plan counts, and it goes on under that one
            case "run.plan" if self._ledger.run_state(envelope.run) != "running":
                self.keeper.decline(envelope.run)
            case "round.open":
                self._gate.view = self._gate.view.refused(envelope.round)
                self._talk.decline(envelope.run, envelope.round)
            case "round.agreed" if (waiting := self._agreement.waiting) and waiting.opening.round == envelope.round:
                self._agreement.stand_aside()
            case other:
                self._talk.tell_declined(envelope.run)
                if other == "public.donors":
                    self.keeper.without_donors(envelope.run, envelope.round, envelope.step)

    def _denied(self, error: DeniedError) -> None:
        """Our own policy denies what the protocol cannot do without. What is over its rate waits; a first hello that
        the policy does not name at all is the end, since this silo could never take part."""
        if not self._talk.policy_said and error.code != "MESSAGE_RATE":
            self._failure = error
            return
        self._talk.back_off(error)

    def _leave(self) -> None:
        """Say goodbye as far as possible, then end the trainer."""
        with contextlib.suppress(FedSiloError):
            self._gate.record("stop", detail={"run": self._gate.view.run})
        if self._talk.joined and not self._gate.halted and not self._gate.counters.last_fault:
            self._agreement.leave(self.keeper.run.plan.run if self.keeper.run is not None else "")
            try:
                self._talk.witness()
            except FedSiloError as error:
                _log.info("last checkpoint not exchanged: %s", error.message)
        self._trainer.stop()
        self._gate.close()

    # ---- people ------------------------------------------------------------------------------------

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the loop's thread and wait for it. Raises what it raises."""
        self._events.put(command := Command(work))
        try:
            return command.result.result(COMMAND_TIMEOUT_SECONDS)
        except TimeoutError as error:
            said, hint = "the silo is still at it", "see what came of it before a new command is given"
            if command.result.cancel():
                said, hint = "the silo was busy with an exchange; nothing was done", "give a new command"
            raise UnreachableError(said, hint=hint) from error

    def register(self, desk: ControlDesk) -> None:
        """Queries and commands of the control socket."""
        self.orders.register(desk)
        if self._archive is not None:
            self._archive.register(desk, self.on_loop)

    def _fail(self, error: FedSiloError) -> None:
        self._failure = error

"""The guard's main path: one loop, one thread, one exchange with the coordinator at a time.

    queue of events (trainer link, signed commands, signals)  ->  loop  ->  SiloRun  ->  Gate  ->  coordinator

How it and the coordinator come to speak is an `Exchange`: calls over a line, or files that people carry. `Guard` holds
every part; no part holds the guard.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import RecordError
from fedsilo.control.server import ControlServer
from fedsilo.files.durable import require_space
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.clocks import CERTIFICATE_TIME, CLOCK_UNKNOWN, in_words
from fedsilo.protocol.errors import (
    DeniedError,
    FedSiloError,
    NotAllowedError,
    OperationError,
    PeerError,
    UnreachableError,
    VerificationError,
    WireCode,
)
from fedsilo.protocol.text import harmless
from fedsilo.protocol.transcript import Equivocation
from policies.capacity import PROGRESS_SECONDS
from silo.guard.adapters import AdapterStore
from silo.guard.answers.curves import FILE, FigureHistory
from silo.guard.answers.queries import Queries
from silo.guard.answers.state import Moment, RunStatus, Status
from silo.guard.archive import Archive
from silo.guard.clock_watch import ClockWatch
from silo.guard.commands import Halts, Orders, ends_when
from silo.guard.coordinator_client import CoordinatorClient, Witnessing
from silo.guard.decisions import halts
from silo.guard.exchange import Exchange, FileExchange, LineExchange
from silo.guard.gate import Gate
from silo.guard.ledger import Ledger
from silo.guard.messages import ExchangeInterrupted, IngressDenied
from silo.guard.policy_change import RECORDS_LOOKED_AT
from silo.guard.releases import Releases, keep_recorded_noes
from silo.guard.round_agreement import EQUIVOCATION, Agreement
from silo.guard.run import AdapterRefused, RunManager
from silo.guard.site import Site
from silo.guard.trainer_process.supervisor import TrainerGone, TrainerHandle, TrainerSaid
from silo.guard.trainer_process.trainer_link import where_it_tells
from silo.guard.trainer_report import ValuesUnusable
from silo.link import LinkClosed, LinkMessage


@dataclass
class Command:
    """Something a person or a query wants done on the loop's thread."""

    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Wake:
    """Event that only has the loop look again."""


@dataclass(eq=False)
class Done:
    """Work that was done aside is done. noticed: by whoever waits for it, or for other work that began later."""

    noticed: bool = False


Event = TrainerSaid | TrainerGone | Command | Wake | Done

_log = logging.getLogger("fedsilo.silo")

HOURLY_SECONDS = 3600.0  # how often what is too old, or soon will be, is looked for
COMMAND_TIMEOUT_SECONDS = 120.0
CONFUSED = "TRAINER_CONFUSED"  # it runs, and what it says makes no sense


class Guard:
    """Holds the parts and runs the loop.

    Args:
        site: what was read at start.
        gate, ledger, audit, releases, adapters: the parts of the way out.
        trainer: its handle; started for each run.
        control_server: where people look and command.
        events: the queue that the trainer's reader fills.
        monotonic: seconds; deadlines and throttles go by it.
        watch: what holds the clock against what knows better; gate and audit log go by its `time`.

    Attributes:
        failure: why this silo cannot go on; None while it can.
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
        control_server: ControlServer,
        events: queue.Queue[Event],
        code_sha256: str,
        monotonic: Callable[[], float] = time.monotonic,
        archive: Archive | None = None,
        watch: ClockWatch | None = None,
    ) -> None:
        self._watch = watch
        self._site = site
        self._archive = archive
        self.hourly: list[Callable[[], object]] = [] if archive is None else [archive.expire]  # what is too old, first
        self._gate = gate
        self._judge = judge = gate.judge
        self._ledger = ledger
        self._audit = audit
        self._releases = releases
        self._trainer = trainer
        self._events = events
        self._monotonic = monotonic
        self._later: deque[Event] = deque()  # what came while something was done aside
        self._stopping = threading.Event()
        self._progress_tick, self._look_at, self._hourly_at = self._tick(), 0.0, 0.0
        self.failure: FedSiloError | None = None
        self._clocks_told = ""
        self._halt_said, self._taken_up, self._sits_out = "", False, False
        self._publish = control_server.publish
        history = FigureHistory(audit.directory.parent / FILE)
        self.status = Status(site.config, site.identity.not_after, control_server, history, clock=judge.clock)
        self.queries = Queries(site, judge, ledger, audit, releases, history, clock=judge.clock)
        witnessing = Witnessing(
            audit,
            lambda: judge.policy,
            own_id=site.config.spiffe_id,
            trust_root_pem=site.identity.trust_root_pem,
            now_seconds=judge.now,
        )
        self._client = CoordinatorClient(
            site, gate, witnessing, code_sha256=code_sha256, monotonic=monotonic, compare=self._compare_clocks
        )
        self._agreement = Agreement(site=site, judge=judge, ledger=ledger, witnessing=witnessing, client=self._client)
        try:
            newest = list(audit.records(max(0, audit.size - RECORDS_LOOKED_AT)))
            self._agreement.take_up(newest)
            keep_recorded_noes(ledger, newest)
        except (OperationError, RecordError) as error:  # evidence in the log alone halts like that in the ledger
            judge.halted = judge.halted or self._agreement.halted or error.message
        judge.halted = judge.halted or self._agreement.halted  # as before a restart, and before anything can be sent
        if watch is not None and watch.fault is not None and not judge.halted:
            judge.halt(watch.fault.message, watch.fault.code)
        self.runs = RunManager(
            site=site, gate=gate, ledger=ledger, releases=releases, adapters=adapters, publish=control_server.publish,
            client=self._client, agreement=self._agreement, trainer=trainer, monotonic=monotonic,
        )  # fmt: skip
        parts = (self._client, self._agreement, self.runs)
        self.files: FileExchange | None = None
        self._line: Exchange
        if site.config.coordinator.by_files:
            self._line = self.files = FileExchange(site, gate, ledger, *parts, isolation=lambda: trainer.isolation)
        else:
            self._line = LineExchange(judge, ledger, *parts, isolation=lambda: trainer.isolation, monotonic=monotonic)
        judge.aside = self._aside
        ledger.locked.give_up = self._stopping.is_set
        control_server.before_snapshot = lambda: self.status.show_waiting(ledger.locked.waiting)
        self.orders = Orders(
            site=site, gate=gate, judge=judge, ledger=ledger, audit=audit, releases=releases,
            halts=Halts(judge, ledger),
            runs=self.runs, publish=control_server.publish, show=self.show, trainer=trainer, on_loop=self.on_loop,
            stop=self._stopping.set, fail=self._fail, files=self.files, watch=watch,
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
                self.turn()
                if self.failure is not None:
                    raise self.failure
        finally:
            self._shut_down()

    def _take_up(self) -> None:
        """Go on where a restart, or a halt that people have released, left off; halted, nothing goes on."""
        if self._judge.halted:
            return
        if not self._taken_up:
            self._taken_up = True
            self.runs.take_up_open_run()
        elif self._sits_out:
            self._sits_out = False
            self.runs.abandon_round()

    def turn(self) -> None:
        """Take one step of the loop: handle an event if there is one; else do what is due; else wait."""
        event: Event | None = None
        with contextlib.suppress(queue.Empty):
            event = self._later.popleft() if self._later else self._events.get(timeout=self._patience())
        self._attempt(lambda: self._step(event))
        self.show()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do it, and what follows where it fails."""
        try:
            self._look_at_clock()
            self._follow(work)
        except ExchangeInterrupted:
            if not self.stopping:
                raise
        except (UnreachableError, NotAllowedError) as error:
            self._go_on_unvouched(error)
            self._client.back_off(error)
        except DeniedError as error:
            self._denied(error)
        except PeerError as error:
            _log.error("the coordinator's answer was refused: %s [%s]", error.line, error.code)
            self._go_on_unvouched(error)
            self._client.back_off(error)
        except VerificationError as error:
            _log.critical("checkpoint: %s", error.message)
            self._judge.halt(error.message, error.code)
        except OperationError as error:
            if halts(error) and not self._judge.halted:
                self._judge.halt(error.message, error.code)
            if self._judge.halted:
                self._halt()
            else:
                self.failure = error

    def _follow(self, work: Callable[[], None]) -> None:
        """The work, and what follows from a refusal in it, which may fail like any other work."""
        try:
            work()
        except Equivocation as error:
            self._equivocated(error)
        except IngressDenied as error:
            self._refuse(error)
        except AdapterRefused as error:
            _log.error("%s", error.message)
            self._client.back_off(error)
            self.runs.abandon_round()
        except OperationError as error:
            if self._judge.halted or not (error.code.startswith("TRAINER") or isinstance(error, LinkClosed)):
                raise
            self._trainer_failed(error)

    def _step(self, event: Event | None) -> None:
        """The work of a turn. An event before anything is due is only handled: so when a message leaves that no event
        leads to does not depend on when the trainer says something, or how often (T11)."""
        if event is not None and not isinstance(event, Wake):
            self._handle(event)
            if self._patience() > 0.0:
                return
        try:
            self._keep_time()
            self._keep_house()
            self._tell_progress()
            now, run = self._monotonic(), self.runs.run
            # An event that waits comes before a long poll, and a flood of them does not keep back what is due.
            waits = bool(self._later) or not self._events.empty()
            due = now >= self._look_at or (run is not None and run.busy)
            if (due or not waits) and not self.stopping and now >= self._client.retry_at:
                self._exchange()
        finally:
            self._look_at = self._next_look()

    def _next_look(self) -> float:
        """The next whole second of this guard's clock."""
        return math.floor(self._monotonic()) + 1.0

    def _patience(self) -> float:
        """Seconds until something is due, by this guard's clock alone."""
        now = self._monotonic()
        moments = [self._look_at, *(at for at, _ in self.runs.deadlines)]
        if now < self._client.retry_at:
            moments.append(self._client.retry_at)
        elif self._line.waits and not self._judge.halted:
            return 0.0
        return max(0.0, min(moments) - now)

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
                    f"the trainer breaks the rules of its link: {harmless(confused, 500)}",
                    hint=self._trainer_log,
                    code=CONFUSED,
                )
            case TrainerGone(status):
                raise OperationError(
                    f"the trainer is gone (exit status {status})" if status is not None else "the trainer is gone",
                    hint=self._trainer_log,
                    code="TRAINER_DIED",
                )
            case TrainerSaid(message):
                try:
                    self._trainer_said(message)
                except ValuesUnusable as error:
                    raise OperationError(
                        f"the trainer's {message.type!r} says what cannot be: {error}",
                        hint=self._trainer_log,
                        code=CONFUSED,
                    ) from error
            case Wake() | Done():
                return

    def _keep_time(self) -> None:
        self.runs.pass_deadlines()
        if self._watch is not None and self._watch.unknown:
            return  # nothing expires by a clock that nobody has vouched for
        for settled in self._releases.expire():
            self.runs.send_freed_or_report(settled)

    def _keep_house(self) -> None:
        now = self._monotonic()
        if now >= self._hourly_at and not (self._watch is not None and self._watch.unknown):
            self._hourly_at = now + HOURLY_SECONDS
            for work in self.hourly:
                work()

    # ---- the coordinator's turn --------------------------------------------------------------------

    def _exchange(self) -> None:
        if self._judge.halted:
            self._halt()
            return
        unknown = self._watch is not None and self._watch.unknown
        if self._watch is not None and unknown:
            policy = self._judge.policy
            if not policy.valid_from_seconds <= self._watch.wall() < policy.valid_until_seconds:
                raise UnreachableError(
                    "by this machine's clock the policy is not valid, and nobody has vouched for the clock",
                    hint="look at the clock, then at `valid` in the policy",
                    code=CLOCK_UNKNOWN,
                )
            self._client.joined = False  # hello and a checkpoint first: its signature under that says what time it is
        self._take_up()
        self._client.look_at_policy()
        self._line.turn()
        if self._watch is not None and unknown and self._watch.unknown and self._client.joined:
            self._watch.nobody_answers()  # it answers, and signs no time

    # ---- the clock -----------------------------------------------------------------------------------

    def _look_at_clock(self) -> None:
        """Halt where the clock is not believed; say what jumped below the limit."""
        if (watch := self._watch) is None:
            return
        watch.look()
        fault = watch.fault
        if fault is not None:
            if self._ledger.clock_halt != asdict(fault):
                self._ledger.keep_clock_halt(asdict(fault))
            if not self._judge.halted:
                self._judge.halt(fault.message, fault.code)
                self._halt()
        elif watch.jumped and not self._judge.halted:
            jumped, watch.jumped = watch.jumped, 0.0
            _log.warning("the clock went on by %s that nobody vouches for", in_words(jumped))
            self._judge.record("clock.jump", detail={"forward_milliseconds": int(jumped * 1000)})

    def _compare_clocks(self, signed: float, took: float) -> None:
        if (watch := self._watch) is None:
            return
        watch.compare(signed, took)
        difference = str(watch.state()["told"])
        if difference != self._clocks_told:
            self._clocks_told = difference
            _log.warning("this machine's clock is %s", difference or "as the coordinator's again")
        self._look_at_clock()

    def _go_on_unvouched(self, error: FedSiloError) -> None:
        """Nobody says what time it is. A certificate that is not valid by this clock is no such answer."""
        if self._watch is not None and error.code not in (CERTIFICATE_TIME, CLOCK_UNKNOWN) and self._watch.unknown:
            self._watch.nobody_answers()

    # ---- the trainer -------------------------------------------------------------------------------

    def _trainer_said(self, message: LinkMessage) -> None:
        run = self.runs.run
        match message.type:
            case "done" if run is not None:
                if run.task is not None:
                    self.status.metrics(message.fields, run.task, run.plan, self._trainer.description)
                run.done(message.fields, message.body)
            case "step" if run is not None and run.task is not None:
                self.status.step(message.fields, run.task)
            case "planned":
                self.status.planned(message.fields)
                self.runs.planned(message.fields)
            case "failed":
                raise OperationError(
                    f"the trainer reports {harmless(message.fields.get('code', ''), 64)}: "
                    f"{harmless(message.fields.get('message', ''), 500)}",
                    hint=self._trainer_log,
                    code="TRAINER_FAILED",
                )

    def _tick(self) -> int:
        return int(self._monotonic() // PROGRESS_SECONDS)

    def _tell_progress(self) -> None:
        """Say, on a schedule of this guard's clock alone, which step the trainer was given while it works (T9, T11).

        Nothing that the trainer says moves a message or its numbers. It does not hide how long the trainer takes for a
        step, to within a tick; the capacity report counts that.
        """
        before, self._progress_tick = self._progress_tick, self._tick()
        task = self.runs.run.task if self.runs.run is not None else None
        if task is None or before == self._progress_tick or not self._may_speak:
            return
        number, step = task.round, task.step
        self._client.tell(
            self._judge.view.place("control.progress", number, step), pb.Progress(round=number, step=step)
        )

    @property
    def _may_speak(self) -> bool:
        return self._client.joined and not self._judge.halted and self._monotonic() >= self._client.retry_at

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
        self._publish("trainer.failed", {"code": error.code})
        run, number = self._judge.view.run, self._judge.view.round
        if run and self._client.joined:
            # what it said is no message, so no rule has judged it; the log still says that there was something (T3)
            self._judge.record_denied("egress", "unknown", error.code, run=run, round=number)
            self.runs.leave(error.code, number)
            self._client.tell_declined(run, WireCode.INTERNAL)
            try:
                self.runs.leaving.say_goodbye()
            except FedSiloError as failure:
                _log.warning("the goodbye is said again after the next start: %s", failure.message)
        self.failure = error

    # ---- trouble -----------------------------------------------------------------------------------

    def _halt(self) -> None:
        """Say once, everywhere, that nothing is sent any more; in the audit log in the space kept for that (T39)."""
        if self._halt_said == self._judge.halted:
            return
        self._halt_said = self._judge.halted
        code = EQUIVOCATION if self._agreement.halted else self._judge.halt_code or "STATE_UNWRITABLE"
        until = ends_when(code, self._site.config.state_dir)
        _log.critical("halted: %s; nothing is sent until %s", self._judge.halted, until)
        self._publish("halted", {"reason": self._judge.halted})
        with contextlib.suppress(OperationError):
            self._audit.append("halt", reasons=[code])

    def _equivocated(self, error: Equivocation) -> None:
        """Somebody signed two transcripts of one round (T20): keep both, and halt until people release it."""
        _log.critical("%s; %s", error.message, error.hint)
        try:
            self._agreement.keep(error)
            self._sits_out = self.runs.sit_out(error.evidence["run"], error.evidence["round"])
        except FedSiloError as failure:  # what cannot be written halts, too
            _log.critical("not all of the evidence is kept: %s", failure.line)
        self._judge.halted = self._judge.halted or error.message
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
        self._publish("ingress.denied", {"kind": envelope.kind, "round": envelope.round})
        if envelope.kind == "global.adapter":
            self.runs.abandon_round()
        elif envelope.kind.startswith("control."):
            self._client.tell_declined(envelope.run)
        else:
            try:
                self._go_on_without(envelope)
            except (UnreachableError, NotAllowedError, PeerError, DeniedError) as failure:
                # Not acknowledged, so it comes again: a no that got lost must not pass for a yes.
                _log.warning("%s comes again: %s", envelope.kind, failure.message)
            else:
                self._ledger.acknowledge(envelope.sequence)
        self._client.back_off(error)

    def _go_on_without(self, envelope: pb.Envelope) -> None:
        match envelope.kind:
            # of a run that was accepted only the accepted plan counts, and it goes on under that one
            case "run.plan" if self._ledger.run_state(envelope.run) != "running":
                self.runs.plans.decline(envelope.run)
            case "round.open":
                self._judge.view = self._judge.view.refused(envelope.round)
                self._client.decline(envelope.run, envelope.round)
            case "round.agreed" if (waiting := self._agreement.waiting) and waiting.opening.round == envelope.round:
                self._agreement.stand_aside()
            case other:
                self._client.tell_declined(envelope.run)
                if other == "public.donors":
                    self.runs.without_donors(envelope.run, envelope.round, envelope.step)

    def _denied(self, error: DeniedError) -> None:
        """Our own policy denies what the protocol cannot do without. What is over its rate waits; a first hello that
        the policy does not name at all is the end, since this silo could never take part."""
        if self._watch is not None and self._watch.unknown:
            self._watch.nobody_answers()
        elif not self._client.policy_said and error.code != "MESSAGE_RATE":
            self.failure = error
            return
        self._client.back_off(error)

    def _shut_down(self) -> None:
        """End the daemon: say so to the coordinator as far as possible, then end the trainer. The run is not left."""
        with contextlib.suppress(FedSiloError):
            self._gate.close_windows()
            self._judge.record("stop", detail={"run": self._judge.view.run})
        if self._client.joined and not self._judge.halted and not self._gate.counters.last_fault:
            self._agreement.leave(self.runs.run.plan.run if self.runs.run is not None else "")
            try:
                self._client.witness()
            except FedSiloError as error:
                _log.info("last checkpoint not exchanged: %s", error.message)
        with contextlib.suppress(FedSiloError):
            self._gate.close_windows()
        self._trainer.stop()
        self._gate.close()

    # ---- people ------------------------------------------------------------------------------------

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the loop's thread and wait for it. Raises what it raises."""
        self._events.put(command := Command(work))
        try:
            return command.result.result(COMMAND_TIMEOUT_SECONDS)
        except TimeoutError as error:
            cause, hint = "the silo is still at it", "see what came of it before a new command is given"
            if command.result.cancel():
                busy = self._ledger.locked.waiting or "the silo was busy with an exchange"
                cause, hint = f"{busy}; nothing was done", "give a new command"
            raise UnreachableError(cause, hint=hint) from error

    def _aside(self, work: Callable[[], Any]) -> Any:
        """Do what takes long and changes nothing here on a thread of its own; meanwhile carry out people's orders, and
        say and do what is due by the clock. All else waits for its turn.

        Raises:
            ExchangeInterrupted: this guard is to end; the work is given up, as by a kill.
            Exception: what the work raises, or what halted this guard meanwhile.
        """
        result: Future[Any] = Future()
        done = Done()

        def do() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001  # raised on the loop's thread
                result.set_exception(error)
            self._events.put(done)

        threading.Thread(target=do, name="aside", daemon=True).start()
        failure: FedSiloError | None = None
        while not done.noticed:
            if self.stopping:
                raise ExchangeInterrupted("this silo is to end, and does not wait for what it grades")
            event: Event | None = None
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=max(0.0, self._look_at - self._monotonic()))
            if isinstance(event, Done):
                event.noticed = True  # perhaps of work that this one was ordered during
            elif isinstance(event, Command):
                try:
                    self._handle(event)
                except FedSiloError as error:
                    failure = failure or error
            elif event is not None and not isinstance(event, Wake):
                self._later.append(event)
            if self._monotonic() >= self._look_at:
                self._look_at = self._next_look()
                self._attempt(self._look_aside)
        if failure is not None:
            raise failure
        return result.result()

    def _look_aside(self) -> None:
        """Do what is due while something is done aside."""
        self._keep_time()
        self._tell_progress()
        if self._may_speak and not (self._watch is not None and self._watch.unknown):
            self._line.beat()

    def moment(self) -> Moment:
        """Return what the parts of this guard say now."""
        judge, run = self._judge, self.runs.run
        held = self.runs.acceptance.held
        return Moment(
            run=RunStatus(run.plan, run.task, run.paused, held) if run is not None else None,
            trainer=self._trainer.description,
            policy=judge.policy,
            view=judge.view,
            counters=self._gate.counters,
            halted=judge.halted,
            screen_halts=list(judge.book.screen_halts),
            screen_troubles=judge.screen_troubles(),
            held=[self.queries.held(release) for release in self._ledger.releases("held")],
            last_run=self._ledger.last_run(),
            waits=self._ledger.locked.waiting,
            clock=self._watch.state() if self._watch is not None else {},
            audit_size=self._audit.size,
            audit_broken=self.queries.records.broken,
        )

    def show(self) -> None:
        """Show people the present state."""
        self.status.show(self.moment())

    def register(self, control_server: ControlServer) -> None:
        """Queries and commands of the control socket."""
        for name, answer in self.queries.handlers().items():
            control_server.register_query(name, answer)
        self.orders.register(control_server)
        if self._archive is not None:
            self._archive.register(control_server, self.on_loop)

    def _fail(self, error: FedSiloError) -> None:
        self.failure = error

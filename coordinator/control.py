"""The control server of a coordinator: the state, queries and commands that people see and give.

Changes arrive as commands signed by an operator or approver of the coordinator's own site, which the server has
verified. A submitted run waits (`Submissions`) until every silo it names has joined and is heard, or until its join
deadline with at least the quorum; only then is its roster, and with it the plan, final.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from certs.commands import VerifiedCommand
from coordinator import store as db
from coordinator.aggregate import initial_pieces
from coordinator.answers.rounds import RoundView
from coordinator.blobs import FilePayload
from coordinator.config import CoordinatorConfig
from coordinator.driver import Driver
from coordinator.record import Outcome, run_record
from coordinator.runs import ActiveRun, min_updates_of
from fedsilo.control.answers import Broken, CoordinatorStatus, LogState, MemberRow, RunRow, read
from fedsilo.control.server import ControlServer
from fedsilo.files.adapter_folder import ImportedAdapter
from fedsilo.files.run_request import (
    Fixed,
    check_request,
    plan_from_request,
    read_request,
    read_start,
    silos_of,
    with_start,
)
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.clocks import TOLD_SECONDS, apart
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.rounds import RUN, advance, gather, silo_is_here

REFRESH_SECONDS = 1.0
LOOK_SECONDS = 1.0  # for a state that is being made up


@dataclass
class Control:
    """Answers queries and carries out commands, which it registers at the control server.

    Attributes:
        address: host:port on which silos are served, once known.
        clock: what stands still for it, as `Coordinator.clock`.
        log_broken: the break that the newest verification of the audit log found; None where none.
    """

    control_server: ControlServer
    driver: Driver
    submissions: Submissions
    outcome: Outcome
    config: CoordinatorConfig
    charter_digest: str
    address: str = ""
    clock: Callable[[], dict[str, Any]] = dict
    log_broken: Callable[[], Broken | None] = lambda: None

    def __post_init__(self) -> None:
        self._changed = True
        self._shown = read(CoordinatorStatus, {})  # nothing yet
        self._shown_at = 0.0
        self._looking = threading.Lock()
        server = self.control_server
        server.before_snapshot = self.bring_up_to_date
        server.register_query("runs", lambda _: self.runs())
        server.register_query("run", self.run)
        server.register_query("silos", lambda _: self.silos())
        server.register_query("traffic", self.traffic)
        rounds = RoundView(self.driver, self.charter_digest)
        server.register_query("round", rounds.round)
        server.register_query("curves", rounds.curves)
        for verb in ("submit", "start", "pause", "resume", "abort"):
            server.register_command(f"run.{verb}", f"run.{verb}", self._ordered(verb))

    # ---- reading -------------------------------------------------------------------------------------

    def publish(self, name: str, fields: Mapping[str, Any]) -> None:
        self._changed = True
        self.control_server.publish(name, fields)

    def bring_up_to_date(self) -> None:
        """Refresh the state before somebody looks, and for nobody else: with each message something changes. While
        another one waits for the database, what was shown last is shown: who looks holds up nobody who has something to
        say."""
        if not self._looking.acquire(timeout=LOOK_SECONDS):
            return
        try:
            self.refresh_if_changed()
        except OperationError as error:
            self.driver.halt(error)
            self.show_halted()
        finally:
            self._looking.release()

    def refresh_if_changed(self) -> None:
        """After an event at once; what changes without one, such as when a silo was last seen, every
        `REFRESH_SECONDS`, and without reading the runs again, of which there may be many."""
        if self._changed:
            self.refresh()
        elif self.driver.dependencies.monotonic() - self._shown_at >= REFRESH_SECONDS:
            self._show(self._with(**self._of_no_event()))

    def refresh(self) -> None:
        """Put the present state into the snapshot."""
        self._changed = False
        self._show(self.state())

    def show_halted(self) -> None:
        """Show the last known state and that everything has halted, where the database cannot be read."""
        self._show(self._with(halted=self.driver.halted))

    def _with(self, **fields: Any) -> CoordinatorStatus:
        """Return what was shown last, with these fields as they are now."""
        return replace(self._shown, **fields, absent=self._shown.absent - fields.keys())

    def _show(self, state: CoordinatorStatus) -> None:
        self._shown, self._shown_at = state, self.driver.dependencies.monotonic()
        self.control_server.set_state(state, policy_digest=self.charter_digest)

    def _of_no_event(self) -> dict[str, Any]:
        return {
            "halted": self.driver.halted,
            "waits": self.driver.dependencies.store.waiting,
            "silos": self.silos(),
            "audit": LogState(size=self.driver.dependencies.audit.size, broken=self.log_broken()),
            "clock": self.clock(),
        }

    def state(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            party="coordinator",
            coordinator=self.config.coordinator,
            site=self.config.site,
            federation=self.config.federation,
            address=self.address,
            state_dir=str(self.config.state_dir),
            runs=self.runs(),
            **self._of_no_event(),
        )

    def runs(self) -> tuple[RunRow, ...]:
        with self.driver.dependencies.store.transaction() as session:
            rows = session.scalars(select(db.Run).order_by(db.Run.ordinal))
            return tuple(self._summary(session, run) for run in rows)

    def run(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return one run in full: the run record's content so far, and the request."""
        with self.driver.dependencies.store.transaction() as session:
            run = self._row(session, arguments)
            record = run_record(session, run, charter_digest=self.charter_digest)
            return record | {"folder": self._folder(run), "request": json.loads(run.request)}

    def silos(self) -> tuple[MemberRow, ...]:
        with self.driver.dependencies.store.transaction() as session:
            members = {member.silo: member for member in session.scalars(select(db.Member))}
            standings = self.driver.standings(session)
            by_files = set(session.scalars(select(db.CarriedSilo.silo)))
        now = self.driver.dependencies.monotonic()
        rows = []
        for silo in self.config.silos:
            member, seen = members.get(silo), self.driver.seen.get(silo)
            ahead = self.driver.services.relay.clocks.get(silo, 0) if silo not in by_files else 0
            at = (seen.round, seen.step) if seen and seen.run in self.driver.runs else (0, 0)
            words = f"{apart(ahead)} this machine's" if abs(ahead) > TOLD_SECONDS else ""
            rows.append(
                MemberRow(
                    silo=silo,
                    state=standings[silo],
                    since=member.since if member else "",
                    last_seen=seen.last_seen if seen else "",
                    age_seconds=round(now - seen.heard_at, 1) if seen and seen.last_seen else None,
                    certificate_until=seen.certificate_until if seen else "",
                    round=at[0],
                    step=at[1],
                    error=seen.error if seen else "",
                    hello=json.loads(member.hello) if member else {},
                    refusal=seen.refusal if seen and seen.refusal else _refusal_of(member),
                    clock=words,
                    absent=frozenset() if words else frozenset({"clock"}),
                )
            )
        return tuple(rows)

    def traffic(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Payload bytes by silo, direction and kind: of one run, or, without one, of everything."""
        with self.driver.dependencies.store.transaction() as session:
            run = self._row(session, arguments).name if "run" in arguments else None
            return db.traffic_table(session, run)

    def _summary(self, session: Session, run: db.Run) -> RunRow:
        plan = json.loads(run.plan or "{}")
        newest = session.scalars(
            select(db.Round).where(db.Round.run == run.name).order_by(db.Round.number.desc()).limit(1)
        ).first()
        return RunRow(
            run=run.name,
            state=run.state,
            reason=run.reason,
            silo_errors=db.errors_of(session, run.name),
            method=plan.get("method") or json.loads(run.request).get("method", ""),
            round=newest.number if newest else 0,
            rounds=plan.get("rounds", json.loads(run.request).get("rounds", 0)),
            committed=db.rounds_done(session, run.name),
            silos=plan.get("silos", ()),
            submitted_at=run.submitted_at,
            started_at=run.started_at,
            ended_at=run.ended_at,
            adapter_sha256=run.adapter_digest,
            folder=self._folder(run),
        )

    def _folder(self, run: db.Run) -> str:
        return str(self.outcome.folder_of(run.name)) if run.ended_at else ""

    def _row(self, session: Session, arguments: Mapping[str, Any]) -> db.Run:
        name = arguments.get("run")
        run = session.get(db.Run, name) if isinstance(name, str) else None
        if run is None:
            raise NotFoundError(f"there is no run {name!r}", hint="`fedsilo run list` shows those there are")
        return run

    # ---- commands ------------------------------------------------------------------------------------

    def _ordered(self, verb: str) -> Callable[[VerifiedCommand], dict[str, Any]]:
        """Carry out a command and record who gave it, in one transaction: neither is there without the other.

        Halted, none is taken but the abort of a run: it sends nothing, and its record waits in the database.

        Raises:
            OperationError: halted; or database or log take nothing, and the coordinator is halted then, as it is by a
                message (T39). Of an order that is in the database and not in the log, the message says so.
        """
        work: Callable[[VerifiedCommand, Record], dict[str, Any]] = getattr(self, f"_{verb}")
        event, audit = f"run.{verb}", self.driver.dependencies.audit

        def carry_out(command: VerifiedCommand) -> dict[str, Any]:
            detail = {
                "person": command.person,
                "certificate": command.certificate_fingerprint,
                "request": command.request_id,
            }
            done: list[str] = []

            def record(session: Session, run: str) -> None:
                policy = {"effective": self.charter_digest}
                self.driver.dependencies.store.once_committed(lambda: done.append(run))
                order = {"orders": [dict(command.order)]} if command.order else {}
                self.driver.pending.record(session, event, run=run, detail=detail, policy=policy, **order)

            with self.driver.changing():
                if self.driver.halted and verb != "abort":
                    raise OperationError(
                        f"the coordinator is halted ({self.driver.halted}): of all orders it takes run.abort alone",
                        hint="its log says why; put that right and start it again",
                        code="HALTED",
                    )
                before = audit.size
                try:
                    result = work(command, record)
                except OperationError as error:
                    self.driver.halt(error)
                    if not done:
                        raise
                    raise OperationError(
                        f"{event} of run {done[0]!r} is done, but not in the audit log yet: {error.message}",
                        hint="do not give it again: the next start records it",
                        code=error.code,
                    ) from error
                there = (each["seq"] for each in audit.records(before) if each.get("detail") == detail)
                return result | {"record": next(there), "audit_size": audit.size}

        return carry_out

    def _submit(self, command: VerifiedCommand, record: Record) -> dict[str, Any]:
        text, source = command.arguments.get("text"), command.arguments.get("source", "run.yaml")
        if not isinstance(text, str) or not isinstance(source, str):
            raise UsageError("run.submit needs the text of a run file")
        return self.submissions.submit(text, source=source[:128], person=command.person, record=record)

    def _start(self, command: VerifiedCommand, record: Record) -> dict[str, Any]:
        """Start a run; with `silos`, only while those and no others have joined: whoever gave it saw with whom it would
        begin."""
        run, shown = str(command.arguments.get("run", "")), command.arguments.get("silos")
        return self.submissions.start_now(run, record, shown=shown)

    def _pause(self, command: VerifiedCommand, record: Record) -> dict[str, Any]:
        with self.driver.dependencies.store.transaction() as session:
            run = self._active(command)
            run.pause(session)
            record(session, run.name)
            self.publish("run.paused", {"run": run.name, "by": command.person})
            return {"run": run.name, "state": "paused"}

    def _resume(self, command: VerifiedCommand, record: Record) -> dict[str, Any]:
        with self.driver.dependencies.store.transaction() as session:
            run = self._active(command)
            run.resume(session)
            record(session, run.name)
            self.publish("run.resumed", {"run": run.name, "by": command.person})
            self.driver.changing().notify_all()
            return {"run": run.name, "state": "running"}

    def _abort(self, command: VerifiedCommand, record: Record) -> dict[str, Any]:
        """Abort a run; with `round`, only while that is the newest round: whoever typed its number saw no other."""
        name = str(command.arguments.get("run", ""))
        if self.submissions.abort(name, record):
            return {"run": name, "state": "aborted"}
        with self.driver.dependencies.store.transaction() as session:
            run = self._active(command)
            shown, newest = command.arguments.get("round"), run.life.round
            if shown is not None and shown != newest:
                raise ConflictError(
                    f"run {name!r} is in round {newest}, not {shown!r}", hint="look again", code="STALE_VIEW"
                )
            record(session, name)
            run.abort(session)
            self.driver.services.forget_ended()
            self.driver.changing().notify_all()
            return {"run": name, "state": "aborted"}

    def _active(self, command: VerifiedCommand) -> ActiveRun:
        name = str(command.arguments.get("run", ""))
        run = self.driver.runs.get(name)
        if run is None:
            raise NotFoundError(f"no run {name!r} is going on", hint="`fedsilo run list` shows the runs")
        return run


def _refusal_of(member: db.Member | None) -> dict[str, str] | None:
    if member is None or member.state != "refused" or not member.refusal:
        return None
    refusal: dict[str, str] = json.loads(member.refusal)
    return refusal


# ---- runs before they have a plan --------------------------------------------------------------------------------

Record = Callable[[Session, str], None]  # within the transaction that does it: which run


def _nothing(session: Session, run: str) -> None:
    """Record nothing, for callers that no person ordered."""


def accepted_request(request: dict[str, Any]) -> strict_yaml.Document:
    """Return a request that was accepted earlier; its lines are gone with the file."""
    return strict_yaml.Document("run", request, {})


@dataclass
class Waiting:
    """A run whose roster is not final."""

    request: dict[str, Any]
    plan: Plan  # with every silo it names
    due: float  # monotonic


@dataclass
class Submissions:
    """Accepts runs and starts them with a final plan. Used under the driver's lock.

    Attributes:
        folder: where a relative path of a request starts.
    """

    driver: Driver
    fixed: Fixed
    now: Callable[[], str]
    folder: Path
    waiting: dict[str, Waiting] = field(default_factory=dict)

    def load(self) -> None:
        """Take up, after a restart, the runs that were still waiting for silos."""
        with self.driver.changing(), self.driver.dependencies.store.transaction() as session:
            rows = session.scalars(select(db.Run).where(db.Run.plan == "", db.Run.state == "waiting"))
            for row in rows:
                self._wait(row.name, json.loads(row.request))

    def submit(self, text: str, *, source: str, person: str, record: Record = _nothing) -> dict[str, Any]:
        """Accept a run.

        Args:
            text: content of run.yaml.
            source: its name, for messages.
            person: who signed the command.
            record: is told of it within the transaction.

        Raises:
            UsageError: not a valid run.
            ConflictError: the name is taken, a silo is in a run that has not ended (`SILO_BUSY`), or one has no line
                and the run needs answers inside a round (`BY_FILES`).
        """
        document = read_request(text.encode(), source)
        start = self._import_start(document)
        document = with_start(document, start)
        request = dict(document.value)
        with self.driver.changing(), self.driver.dependencies.store.transaction() as session:
            ordinal = (session.scalar(select(func.max(db.Run.ordinal))) or 0) + 1
            request.setdefault("run", f"run-{ordinal}")
            document = replace(document, value=request)
            plan = check_request(document, self.fixed, start)
            self._refuse_waiting_for_files(session, document, plan)
            if session.get(db.Run, plan.run) is not None:
                raise ConflictError(f"there is a run {plan.run!r} already", hint="choose another `run:`")
            self._refuse_busy(plan)
            self._refuse_too_few(session, document, plan)
            session.add(
                db.Run(
                    name=plan.run,
                    ordinal=ordinal,
                    state="waiting",
                    request=db.as_json(request),
                    submitted_by=person,
                    submitted_at=self.now(),
                )
            )
            session.flush()
            record(session, plan.run)
            self._wait(plan.run, request)
            self.driver.dependencies.publish("run.submitted", {"run": plan.run, "method": plan.method, "by": person})
            self._start_complete(session)
            return {"run": plan.run, "state": "waiting", "silos": list(plan.silos)}

    def _import_start(self, document: strict_yaml.Document) -> ImportedAdapter | None:
        """Keep the adapter that a request starts from. Raises UsageError: it cannot be the run's; OperationError."""
        blobs = self.driver.dependencies.blobs
        with blobs.spool() as spool:
            start = read_start(document, self.folder, self.fixed.schema, spool.write)
            if start is not None:
                blobs.keep(spool.finish())
        return start

    def look(self) -> None:
        """Start what is complete or due."""
        if not self.waiting:
            return
        with self.driver.changing(), self.driver.dependencies.store.transaction() as session:
            self._start_complete(session)

    def start_now(self, name: str, record: Record = _nothing, *, shown: Any = None) -> dict[str, Any]:
        """Start with the silos that have joined.

        Args:
            name: of the run.
            record: is told of it within the transaction.
            shown: names of all silos that had joined when somebody looked, sorted; None for whichever there are.

        Raises:
            NotFoundError: it does not wait. ConflictError: below the quorum, or others than `shown` (`STALE_VIEW`).
        """
        with self.driver.changing(), self.driver.dependencies.store.transaction() as session:
            if name not in self.waiting:
                raise NotFoundError(f"no run {name!r} is waiting for silos")
            item = self.waiting[name]
            here = self._here(session)
            if shown is not None and shown != sorted(here):
                difference = f"the silos here are {', '.join(sorted(here)) or 'none'}, not those shown"
                raise ConflictError(difference, hint="look again", code="STALE_VIEW")
            ready = tuple(silo for silo in item.plan.silos if silo in here)
            quorum = self._quorum(session, item.plan, ready)
            if len(ready) < quorum:
                raise ConflictError(
                    f"{len(ready)} silos are here, the quorum is {quorum}",
                    hint="coordinator silos list: one that is silent or was refused does not count",
                )
            record(session, name)
            self._start(session, name, ready)
            return {"run": name, "state": "started", "silos": list(ready)}

    def abort(self, name: str, record: Record = _nothing) -> bool:
        """End a waiting run; False if it is not waiting."""
        with self.driver.changing(), self.driver.dependencies.store.transaction() as session:
            if name not in self.waiting:
                return False
            record(session, name)
            self._end(session, name, "abort", "ABORTED")
            return True

    def _wait(self, name: str, request: dict[str, Any]) -> None:
        document = accepted_request(request)
        plan = plan_from_request(document, self.fixed, silos_of(document, self.fixed.silos))
        due = self.driver.dependencies.monotonic() + plan.join_deadline_seconds
        # The default follows from the silos that are asked for, not from those that come.
        self.waiting[name] = Waiting({**request, "quorum": plan.quorum}, plan, due)

    @staticmethod
    def _refuse_waiting_for_files(session: Session, document: strict_yaml.Document, plan: Plan) -> None:
        by_files = [silo for silo in plan.silos if silo in db.carried_silos(session)]
        if by_files and plan.exchange == "step" and method_named(plan.method).swaps:
            raise ConflictError(
                f"{document.place(('exchange',))}: exchange: step needs answers inside a round, and these silos only "
                f"exchange files: {', '.join(by_files)}",
                hint="exchange: round_end, or name the other silos in `silos:`",
                code="BY_FILES",
            )

    @staticmethod
    def _refuse_too_few(session: Session, document: strict_yaml.Document, plan: Plan) -> None:
        least = min_updates_of(session, plan.silos)
        if len(plan.silos) < least:
            raise ConflictError(
                f"{document.place(('silos',))}: {len(plan.silos)} silos, and a policy among them asks for means of "
                f"{least} updates or more (federation.min_updates)",
                hint="name more silos",
                code="MIN_UPDATES",
            )

    def _quorum(self, session: Session, plan: Plan, ready: tuple[str, ...]) -> int:
        """Return the quorum of the run that begins with these: as it was asked for, and never below what one of their
        policies asks."""
        return max(plan.quorum, min_updates_of(session, ready))

    def _refuse_busy(self, plan: Plan) -> None:
        """A silo has one trainer and is in one run at a time; runs of different silos go on side by side."""
        going_on = {name: run.silos for name, run in self.driver.runs.items()}
        going_on |= {name: item.plan.silos for name, item in self.waiting.items()}
        for name, silos in going_on.items():
            if busy := [silo for silo in plan.silos if silo in silos]:
                raise ConflictError(
                    f"run {name!r} has not ended, and {', '.join(busy)} {'is' if len(busy) == 1 else 'are'} in it",
                    hint="wait for it, abort it, or name other silos in `silos:`",
                    code="SILO_BUSY",
                )

    def _here(self, session: Session, *further: str) -> set[str]:
        """Silos that a run can begin with, and those in a `further` state: one that joined once and is silent now would
        be waited for in vain."""
        standings = self.driver.standings(session)
        return {silo for silo, state in standings.items() if silo_is_here(state) or state in further}

    def _start_complete(self, session: Session) -> None:
        for name, item in list(self.waiting.items()):
            # who joined and had no time yet to be heard counts, too: a restart sends nobody away
            here = self._here(session, "not_heard_yet")
            ready = tuple(silo for silo in item.plan.silos if silo in here)
            late = self.driver.dependencies.monotonic() >= item.due
            whole, quorum = len(item.plan.silos), self._quorum(session, item.plan, ready)
            verdict = gather(ready=len(ready), of=whole, quorum=quorum, deadline_passed=late)
            if verdict == "start":
                self._start(session, name, ready)
            elif verdict:
                self._end(session, name, verdict, "QUORUM_NOT_REACHED")

    def _start(self, session: Session, name: str, silos: tuple[str, ...]) -> None:
        item = self.waiting.pop(name)
        quorum = self._quorum(session, item.plan, silos)
        plan = plan_from_request(accepted_request({**item.request, "quorum": quorum}), self.fixed, silos)
        row = session.get_one(db.Run, name)
        adapter = self._first_adapter(plan)
        row.plan, row.base_digest, row.adapter_digest = plan.canonical(), adapter.digest, adapter.digest
        session.flush()
        self.driver.add_run(session, plan)
        self.driver.changing().notify_all()

    def _first_adapter(self, plan: Plan) -> FilePayload:
        """The adapter that the plan names, as it was kept when the run was submitted; else the one its seed draws."""
        blobs = self.driver.dependencies.blobs
        if plan.start_adapter_sha256:
            return blobs.get(plan.start_adapter_sha256)
        with blobs.spool() as spool:
            for piece in initial_pieces(self.fixed.schema, plan.seed):
                spool.write(piece)
            return blobs.keep(spool.finish())

    def _end(self, session: Session, name: str, event: str, reason: str) -> None:
        self.waiting.pop(name)
        row = session.get_one(db.Run, name)
        row.state = advance(RUN, row.state, event)
        row.reason, row.ended_at = reason, self.now()
        self.driver.dependencies.finished(session, row)
        self.driver.dependencies.publish("run.ended", {"run": name, "outcome": row.state, "reason": reason})

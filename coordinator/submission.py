"""From `run.yaml` to a signed plan: what the submitter chose, what the federation fixes, and who takes part.

A run waits until every silo it names has joined and is heard, or until its join deadline with at least the quorum;
only then is its roster, and with it the plan, final.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.aggregate import initial_pieces
from coordinator.driver import Driver
from coordinator.runs import ActiveRun, min_updates_of
from fedsilo.files.run_request import Fixed, check_request, plan_from_request, read_request, silos_of
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.errors import ConflictError, NotFoundError
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.round_tables import RUN, advance, gather, silo_is_here

Record = Callable[[Session, str], None]  # within the transaction that does it: which run


def _nothing(session: Session, run: str) -> None:
    """For callers that nobody ordered."""


def _taken(request: dict[str, Any]) -> strict_yaml.Document:
    """A request that was accepted earlier; its lines are gone with the file."""
    return strict_yaml.Document("run", request, {})


@dataclass
class Waiting:
    """A run whose roster does not stand yet."""

    request: dict[str, Any]
    plan: Plan  # with every silo it names
    due: float  # monotonic


@dataclass
class Submissions:
    """Runs before they have a plan. Used under the driver's lock."""

    driver: Driver
    fixed: Fixed
    now: Callable[[], str]
    waiting: dict[str, Waiting] = field(default_factory=dict)

    def load(self) -> None:
        """Take up, after a restart, the runs that were still waiting for silos."""
        with self.driver.changing(), self.driver.parts.store.transaction() as session:
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
        request = dict(document.value)
        with self.driver.changing(), self.driver.parts.store.transaction() as session:
            ordinal = (session.scalar(select(func.max(db.Run.ordinal))) or 0) + 1
            request.setdefault("run", f"run-{ordinal}")
            document = replace(document, value=request)
            plan = check_request(document, self.fixed)
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
            self.driver.parts.publish("run.submitted", {"run": plan.run, "method": plan.method, "by": person})
            self._start_complete(session)
            return {"run": plan.run, "state": "waiting", "silos": list(plan.silos)}

    def look(self) -> float | None:
        """Start what is complete or due. Returns the seconds until the next join deadline."""
        if not self.waiting:
            return None
        with self.driver.changing(), self.driver.parts.store.transaction() as session:
            self._start_complete(session)
            waits = [item.due - self.driver.parts.monotonic() for item in self.waiting.values()]
            return max(0.0, min(waits)) if waits else None

    def look_within(self) -> None:
        """As `look`, for a caller that holds the driver's lock already."""
        if self.waiting:
            self.look()

    def start_now(self, name: str, record: Record = _nothing, *, shown: Any = None) -> dict[str, Any]:
        """Start with the silos that have joined.

        Args:
            name: of the run.
            record: is told of it within the transaction.
            shown: names of all silos that had joined when somebody looked, sorted; None for whichever there are.

        Raises:
            NotFoundError: it does not wait. ConflictError: below the quorum, or others than `shown` (`STALE_VIEW`).
        """
        with self.driver.changing(), self.driver.parts.store.transaction() as session:
            if name not in self.waiting:
                raise NotFoundError(f"no run {name!r} is waiting for silos")
            item = self.waiting[name]
            here = sorted(self._all_here(session) & set(self.fixed.silos))
            if shown is not None and shown != here:
                told = f"the silos here are {', '.join(here) or 'none'}, not those shown"
                raise ConflictError(told, hint="look again", code="STALE_VIEW")
            ready = self._here(session, item.plan)
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
        with self.driver.changing(), self.driver.parts.store.transaction() as session:
            if name not in self.waiting:
                return False
            record(session, name)
            self._end(session, name, "abort", "ABORTED")
            return True

    def _wait(self, name: str, request: dict[str, Any]) -> None:
        document = _taken(request)
        plan = plan_from_request(document, self.fixed, silos_of(document, self.fixed.silos))
        due = self.driver.parts.monotonic() + plan.join_deadline_seconds
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
        """Of the run that begins with these: as it was asked for, and never below what one of their policies asks."""
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

    def _all_here(self, session: Session) -> set[str]:
        """Silos that a run can begin with: one that joined once and is silent now would be waited for in vain."""
        return {silo for silo, word in self.driver.standings(session).items() if silo_is_here(word)}

    def _here(self, session: Session, plan: Plan) -> tuple[str, ...]:
        here = self._all_here(session)
        return tuple(silo for silo in plan.silos if silo in here)

    def _expected(self, session: Session, plan: Plan) -> tuple[str, ...]:
        """As `_here`, with those that joined and had no time yet to be heard: a restart sends nobody away."""
        words = self.driver.standings(session)
        return tuple(silo for silo in plan.silos if silo_is_here(words[silo]) or words[silo] == "not_heard_yet")

    def _start_complete(self, session: Session) -> None:
        for name, item in list(self.waiting.items()):
            ready = self._expected(session, item.plan)
            late = self.driver.parts.monotonic() >= item.due
            whole, quorum = len(item.plan.silos), self._quorum(session, item.plan, ready)
            verdict = gather(ready=len(ready), of=whole, quorum=quorum, deadline_passed=late)
            if verdict == "start":
                self._start(session, name, ready)
            elif verdict:
                self._end(session, name, verdict, "QUORUM_NOT_REACHED")

    def _start(self, session: Session, name: str, silos: tuple[str, ...]) -> None:
        item = self.waiting.pop(name)
        quorum = self._quorum(session, item.plan, silos)
        plan = plan_from_request(_taken({**item.request, "quorum": quorum}), self.fixed, silos)
        row = session.get_one(db.Run, name)
        blobs = self.driver.parts.blobs
        with blobs.spool() as spool:
            for piece in initial_pieces(self.fixed.schema, plan.seed):
                spool.write(piece)
            adapter = blobs.keep(spool.finish())
        row.plan, row.base_digest, row.adapter_digest = plan.canonical(), adapter.digest, adapter.digest
        session.flush()
        self.driver.add_run(session, ActiveRun(plan, self.driver.around))
        self.driver.changing().notify_all()

    def _end(self, session: Session, name: str, event: str, reason: str) -> None:
        self.waiting.pop(name)
        row = session.get_one(db.Run, name)
        row.state = advance(RUN, row.state, event)
        row.reason, row.ended_at = reason, self.now()
        self.driver.parts.finished(session, row)
        self.driver.parts.publish("run.ended", {"run": name, "outcome": row.state, "reason": reason})

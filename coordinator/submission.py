"""From `run.yaml` to a signed plan: what the submitter chose, what the federation fixes, and who takes part.

A run waits until every silo it names has joined, or until its join deadline with at least the quorum; only then is
its roster, and with it the plan, final.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.aggregate import initial_adapter
from coordinator.blobs import BytesPayload
from coordinator.driver import Driver
from coordinator.members import Agreed
from coordinator.runs import ActiveRun
from fedsilo.treaty import rounds, strict_yaml
from fedsilo.treaty.averaging import initial_frozen_sha256
from fedsilo.treaty.errors import ConflictError, NotFoundError, UsageError
from fedsilo.treaty.methods import method_named
from fedsilo.treaty.plan import Plan
from policies.schema import LoraSchema

Record = Callable[[Session, str], None]  # within the transaction that does it: which run


def _nothing(session: Session, run: str) -> None:
    """For callers that nobody ordered."""


@dataclass(frozen=True)
class Fixed:
    """What a submitter cannot choose, since the silos agreed on it."""

    federation: str
    silos: tuple[str, ...]
    agreed: Agreed
    schema: LoraSchema
    public_set_rows: int

    def fields(self) -> dict[str, Any]:
        agreed = self.agreed
        return {
            "federation": self.federation,
            "lora": {
                "rank": self.schema.rank,
                "alpha": self.schema.alpha,
                "schema_sha256": self.schema.digest,
                "freeze": self.schema.freeze,
            },
            "base_model_sha256": agreed.base_model_sha256,
            "tokenizer_sha256": agreed.tokenizer_sha256,
            "template_sha256": agreed.template_sha256,
            "load": agreed.load,
            "mixed_base": agreed.mixed_base,
            "public_set_sha256": agreed.public_set_sha256,
            "public_set_rows": self.public_set_rows,
            "held_out_sha256": agreed.held_out_sha256,
            "wire_dtype": self.schema.dtype,
        }


def plan_from_request(document: strict_yaml.Document, fixed: Fixed, silos: tuple[str, ...]) -> Plan:
    """The plan of a request for these silos.

    Args:
        document: the request, a mapping, with its lines where they are known.
        fixed: what cannot be chosen.
        silos: the roster.

    Raises:
        UsageError: an unknown field, a wrong value, a silo that is not of the federation, or a value that differs
            from what the federation fixes; named.
    """
    fields = dict(document.value)
    for name, value in fixed.fields().items():
        given = fields.get(name, value)
        if name == "lora" and isinstance(given, Mapping):
            given = {**value, **given}
        if given != value:
            raise UsageError(
                f"{document.place((name,))}: {name} is {given!r}; this federation has {value!r}",
                hint=f"leave {name} out of the file",
            )
        fields[name] = value
    fields["silos"] = list(silos)
    unknown = [silo for silo in silos if silo not in fixed.silos]
    if unknown:
        raise UsageError(
            f"{document.place(('silos',))}: {unknown[0]!r} is not a silo of this federation",
            hint=f"known: {', '.join(fixed.silos)}",
        )
    try:
        fields["lora"] = {**fields["lora"], "frozen_sha256": _frozen_sha256(fixed.schema, fields.get("seed"))}
        plan = Plan.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise strict_yaml.mistake(Plan, error, document) from error
    method_named(plan.method)
    return plan


def _frozen_sha256(schema: LoraSchema, seed: object) -> str:
    """Digest of the factors that the run freezes, which follow from its seed; that a seed is none, the plan says."""
    if schema.freeze == "none":
        return ""
    number = seed if isinstance(seed, int) and 0 <= seed < 2**53 else 0
    return initial_frozen_sha256(schema.tensors, number, schema.freeze)


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
            ConflictError: the name is taken, or another run has not ended.
        """
        document = strict_yaml.load(text.encode(), source)
        if not isinstance(document.value, dict):
            raise UsageError(f"{source}: a run is a mapping of keys")
        request = dict(document.value)
        with self.driver.changing(), self.driver.parts.store.transaction() as session:
            ordinal = (session.scalar(select(func.max(db.Run.ordinal))) or 0) + 1
            request.setdefault("run", f"run-{ordinal}")
            document = replace(document, value=request)
            plan = plan_from_request(document, self.fixed, self._silos_of(document))
            if session.get(db.Run, plan.run) is not None:
                raise ConflictError(f"there is a run {plan.run!r} already", hint="choose another `run:`")
            going_on = session.scalars(select(db.Run)).all()
            active = [run.name for run in going_on if not rounds.is_terminal(rounds.RUN, run.state)]
            if active:
                raise ConflictError(f"run {active[0]!r} has not ended", hint="wait for it, or abort it")
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
            joined = sorted(self._all_joined(session) & set(self.fixed.silos))
            if shown is not None and shown != joined:
                told = f"the silos joined are {', '.join(joined) or 'none'}, not those shown"
                raise ConflictError(told, hint="look again", code="STALE_VIEW")
            ready = self._joined(session, item.plan)
            if len(ready) < item.plan.quorum:
                raise ConflictError(f"{len(ready)} silos have joined, the quorum is {item.plan.quorum}")
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

    def _silos_of(self, document: strict_yaml.Document) -> tuple[str, ...]:
        given = document.value.get("silos", self.fixed.silos)
        if not isinstance(given, list | tuple) or not all(isinstance(silo, str) for silo in given):
            raise UsageError(f"{document.place(('silos',))}: silos is a list of names")
        return tuple(given)

    def _wait(self, name: str, request: dict[str, Any]) -> None:
        document = _taken(request)
        plan = plan_from_request(document, self.fixed, self._silos_of(document))
        due = self.driver.parts.monotonic() + plan.join_deadline_seconds
        self.waiting[name] = Waiting(request, plan, due)

    def _all_joined(self, session: Session) -> set[str]:
        members = session.scalars(select(db.Member).where(db.Member.state == "joined")).all()
        return {member.silo for member in members}

    def _joined(self, session: Session, plan: Plan) -> tuple[str, ...]:
        joined = self._all_joined(session)
        return tuple(silo for silo in plan.silos if silo in joined)

    def _start_complete(self, session: Session) -> None:
        for name, item in list(self.waiting.items()):
            ready = self._joined(session, item.plan)
            late = self.driver.parts.monotonic() >= item.due
            if len(ready) == len(item.plan.silos) or (late and len(ready) >= item.plan.quorum):
                self._start(session, name, ready)
            elif late:
                self._end(session, name, "fail", "QUORUM_NOT_REACHED")

    def _start(self, session: Session, name: str, silos: tuple[str, ...]) -> None:
        item = self.waiting.pop(name)
        plan = plan_from_request(_taken(item.request), self.fixed, silos)
        row = session.get_one(db.Run, name)
        adapter = self.driver.parts.blobs.keep(BytesPayload(initial_adapter(self.fixed.schema, plan.seed)))
        row.plan, row.base_digest, row.adapter_digest = plan.canonical(), adapter.digest, adapter.digest
        session.flush()
        self.driver.add_run(session, ActiveRun(plan, self.driver.around))
        self.driver.changing().notify_all()

    def _end(self, session: Session, name: str, event: str, reason: str) -> None:
        self.waiting.pop(name)
        row = session.get_one(db.Run, name)
        row.state = rounds.advance(rounds.RUN, row.state, event)
        row.reason, row.ended_at = reason, self.now()
        self.driver.parts.finished(session, row)
        self.driver.parts.publish("run.ended", {"run": name, "outcome": row.state, "reason": reason})

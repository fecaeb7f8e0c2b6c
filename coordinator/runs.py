"""One run: folds what happened through its method's coordinator half and carries the actions out.

Everything a fold changes (state of the run, outbox, uploads, the event itself) goes into the caller's one
transaction, so after a crash either all of it is there or none. A restarted coordinator folds `method_events` again
and stands where it stood.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import agreement
from coordinator import store as db
from coordinator.aggregate import AggregateRefusedError, aggregate
from coordinator.blobs import Blobs, whole
from coordinator.round_drift import NAME as DRIFT
from coordinator.round_drift import drift_note
from fedsilo.treaty import rounds
from fedsilo.treaty.errors import OperationError
from fedsilo.treaty.method import (
    Commit,
    Committed,
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
    FinishRun,
    MessageArrived,
    Note,
    RunStarted,
    Send,
    SiloAbstained,
    SiloLeft,
    StartDeadline,
)
from fedsilo.treaty.methods import method_named
from fedsilo.treaty.plan import Plan
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.codec import FactorsReader, decode, encode
from fedsilo.treaty.wire.services import OUTBOUND_KINDS, TENSOR_KINDS
from policies.asked import Asked

JOIN = "join"  # the deadline before a run has a method
ABSTENTIONS_MAX = 16  # of one silo in one round, beside two for each public step: the round itself, and its kinds


@dataclass
class Surroundings:
    """What a run needs of the coordinator.

    Attributes:
        now: UTC, ISO 8601.
        monotonic: seconds, for deadlines and durations only.
        publish: tells watchers (name, fields).
        checkpoint: closes a round in the audit log.
        finished: writes adapter folder and run record of a run that ended.
        agreements: what is signed before a round begins.
    """

    blobs: Blobs
    now: Callable[[], str]
    monotonic: Callable[[], float]
    publish: Callable[[str, dict[str, Any]], None]
    checkpoint: Callable[[], None]
    finished: Callable[[Session, db.Run], None]
    agreements: agreement.Agreements


@dataclass
class ActiveRun:
    """A run with a plan.

    Attributes:
        deadlines: name -> monotonic moment at which it passes.
        accepted: silos that took the plan in and did not decline it.
        left: silos that are out of the run.
        asked: what was asked of each silo beside public steps.
    """

    plan: Plan
    around: Surroundings
    accepted: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    deadlines: dict[str, float] = field(default_factory=dict)
    started: bool = False
    ended: bool = False
    paused_at: float | None = None
    asked: dict[str, Asked] = field(default_factory=dict)
    _out: set[tuple[int, str]] = field(default_factory=set)  # (round, silo) that said it takes no part in that round
    _abstained: set[SiloAbstained] = field(default_factory=set)  # of the newest round
    _opened_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.method = method_named(self.plan.method)
        self._state: Any = self.method.coordinator.start(self.plan, "coordinator")

    @property
    def name(self) -> str:
        return self.plan.run

    @property
    def silos(self) -> tuple[str, ...]:
        return tuple(silo for silo in self.plan.silos if silo not in self.left)

    # ---- life ----------------------------------------------------------------------------------------

    def offer_plan(self, session: Session) -> None:
        """Queue the signed plan for every silo of the roster."""
        body = encode(pb.RunPlan(canonical_json=self.plan.canonical()))
        for silo in self.plan.silos:
            queue(session, silo=silo, run=self.name, round_number=0, step=0, kind="run.plan", payload=body)
        self.deadlines[JOIN] = self.around.monotonic() + self.plan.join_deadline_seconds

    def start_if_accepted(self, session: Session, *, deadline_passed: bool = False) -> None:
        """Start once every silo took the plan in, or at the deadline with the quorum; below the quorum, fail."""
        if self.started:
            return
        waiting = [silo for silo in self.silos if silo not in self.accepted]
        if waiting and not deadline_passed and len(self.silos) >= self.plan.quorum:
            return
        ready = tuple(silo for silo in self.silos if silo in self.accepted)
        run = self._row(session)
        self.deadlines.pop(JOIN, None)
        if len(ready) < self.plan.quorum:
            self._end_early(session, "failed", "QUORUM_NOT_REACHED")
            return
        late = [silo for silo in self.silos if silo not in ready]
        self._send_away(session, late, "aborted")
        self.left |= set(late)
        run.state = rounds.advance(rounds.RUN, run.state, "start")
        run.started_at = self.around.now()
        self.started = True
        self.around.publish("run.started", {"run": self.name, "silos": list(ready)})
        self.feed(session, RunStarted(ready, run.base_digest))

    def leave(self, session: Session, silo: str) -> None:
        """A silo is out: its site declined the plan, or it was removed."""
        if silo in self.left or silo not in self.plan.silos:
            return
        self.left.add(silo)
        withdraw(session, silo, self.name)
        if self.started:
            self.feed(session, SiloLeft(silo))
            self.look_at_agreement(session)
            return
        figure = db.Figure(run=self.name, round=0, step=0, silo=silo, name=db.PLAN_DECLINED, fields="{}")
        session.add(figure)
        self.start_if_accepted(session)

    def end(self, session: Session, outcome: str, reason: str) -> None:
        """Bring the run to `finished`, `failed` or `aborted`, and write its record."""
        event = {"finished": "finish", "failed": "fail", "aborted": "abort"}[outcome]
        run = self._row(session)
        run.state = rounds.advance(rounds.RUN, run.state, event)
        run.reason = reason
        run.ended_at = self.around.now()
        self.ended = True
        self.deadlines.clear()
        self.around.finished(session, run)
        self.around.publish("run.ended", {"run": self.name, "outcome": outcome, "reason": reason})

    def abort(self, session: Session) -> None:
        """End at once."""
        self._end_early(session, "aborted", "ABORTED")

    def _end_early(self, session: Session, outcome: str, reason: str) -> None:
        """End before the method does."""
        self._send_away(session, self.silos, outcome)
        self.end(session, outcome, reason)

    def _send_away(self, session: Session, silos: Iterable[str], outcome: str) -> None:
        """The run is over for these silos: what is queued is withdrawn, and whoever was given the plan is told. Else it
        would take itself to be in this run when the next one comes, or join it when its people have looked at the plan.
        """
        body = encode(pb.RunEnd(outcome=outcome, adapter_digest=self._row(session).adapter_digest))
        number = self.open_round(session)
        for silo in silos:
            knows = not never_given(session, silo, self.name, "run.plan")
            withdraw(session, silo, self.name)
            if knows:
                queue(session, silo=silo, run=self.name, round_number=number, step=0, kind="run.end", payload=body)

    def pause(self, session: Session) -> None:
        """Deliver nothing and let no deadline pass until resumed."""
        run = self._row(session)
        run.state = rounds.advance(rounds.RUN, run.state, "pause")
        self.paused_at = self.around.monotonic()

    def resume(self, session: Session) -> None:
        run = self._row(session)
        run.state = rounds.advance(rounds.RUN, run.state, "resume")
        waited = self.around.monotonic() - (self.paused_at if self.paused_at is not None else self.around.monotonic())
        self.deadlines = {name: due + waited for name, due in self.deadlines.items()}
        self.paused_at = None

    def due(self, moment: float) -> list[str]:
        """Deadlines that have passed, earliest first; none while paused."""
        if self.paused_at is not None:
            return []
        return sorted((name for name, at in self.deadlines.items() if at <= moment), key=self.deadlines.__getitem__)

    def pass_deadline(self, session: Session, name: str) -> None:
        self.deadlines.pop(name, None)
        if name == JOIN:
            self.start_if_accepted(session, deadline_passed=True)
        elif name.startswith(agreement.DEADLINE):
            self.look_at_agreement(session, deadline_passed=True)
        else:
            self.feed(session, DeadlinePassed(name))

    # ---- agreement -----------------------------------------------------------------------------------

    def countersign(self, session: Session, peer: PeerIdentity, signature: bytes) -> bool:
        """A silo signed the open round's transcript. False: it did not."""
        number = self.open_round(session)
        if not self.around.agreements.countersign(session, self.plan, number, peer, signature):
            return False
        self.look_at_agreement(session)
        return True

    def look_at_agreement(self, session: Session, *, deadline_passed: bool = False) -> None:
        """Let the open round begin at those who signed, once nobody is left to wait for."""
        number = 0 if self.ended else self.open_round(session)
        out = frozenset({silo for absent, silo in self._out if absent == number} | self.left)
        agreements = self.around.agreements
        for silo, payload in agreements.look(session, self.plan, number, out=out, deadline_passed=deadline_passed):
            queue(session, silo=silo, run=self.name, round_number=number, step=0, kind="round.agreed", payload=payload)
            self.deadlines.pop(agreement.deadline_name(number), None)
            self.around.publish("round.agreed", {"run": self.name, "round": number, "silo": silo})

    def abstain(self, session: Session, event: SiloAbstained) -> None:
        """A silo keeps something back. What it has said before, or says of another round, changes and stores nothing,
        and it has no more to say than a round can ask of it (T11)."""
        if event.round != self.newest_round(session) or event in self._abstained:
            return
        told = sum((each.round, each.silo) == (event.round, event.silo) for each in self._abstained)
        if told < 2 * len(self.plan.public_steps()) + ABSTENTIONS_MAX:
            self.feed(session, event)
            self.look_at_agreement(session)

    # ---- the fold ------------------------------------------------------------------------------------

    def feed(self, session: Session, event: CoordinatorEvent) -> None:
        """Fold one event, and those its actions cause, into the caller's transaction."""
        pending: deque[CoordinatorEvent] = deque([event])
        while pending:
            event = pending.popleft()
            session.add(
                db.MethodEvent(
                    run=self.name, ordinal=db.next_ordinal(session, self.name), event=db.as_json(event_fields(event))
                )
            )
            session.flush()
            self._note_out(event)
            self._state, actions = self.method.coordinator.on_event(self._state, event)
            for action in actions:
                pending.extend(self._carry_out(session, action))

    def replay(self, session: Session) -> None:
        """Fold the stored events again, without their effects: those are in the database already."""
        query = select(db.MethodEvent).where(db.MethodEvent.run == self.name).order_by(db.MethodEvent.ordinal)
        passed: set[str] = set()
        for row in session.scalars(query):
            event = event_from_fields(json.loads(row.event), self.around.blobs)
            if isinstance(event, RunStarted):
                self.started = True
                self.accepted = set(event.silos)
                self.left = set(self.plan.silos) - set(event.silos)
            elif isinstance(event, SiloLeft):
                self.left.add(event.silo)
            elif isinstance(event, DeadlinePassed):
                passed.add(event.name)
            self._note_out(event)
            self._state, actions = self.method.coordinator.on_event(self._state, event)
            for action in actions:
                if isinstance(action, StartDeadline):
                    # counted anew: an outage must not close a round (design 5)
                    self.deadlines[action.name] = self.around.monotonic() + action.seconds
                elif isinstance(action, Send):
                    self._note_asked(action)
        for name in passed:
            self.deadlines.pop(name, None)
        if not self.started:
            self.deadlines[JOIN] = self.around.monotonic() + self.plan.join_deadline_seconds
            figures = select(db.Figure.silo).where(db.Figure.run == self.name, db.Figure.name == db.PLAN_DECLINED)
            self.left = set(session.scalars(figures))
            # whose plan is no longer queued has taken it in
            queued = select(db.OutboxItem.silo).where(db.OutboxItem.run == self.name)
            self.accepted = set(self.plan.silos) - set(session.scalars(queued)) - self.left
        transcript = session.get(db.RoundTranscript, (self.name, self.open_round(session)))
        if transcript is not None and transcript.state == "signing":
            self._await_signatures(transcript.round)
        if self._row(session).state == "paused":
            self.paused_at = self.around.monotonic()

    def open_round(self, session: Session) -> int:
        """Number of the open round, 0 if none is."""
        query = select(db.Round.number).where(db.Round.run == self.name, db.Round.state == "open")
        return session.scalar(query) or 0

    def newest_round(self, session: Session) -> int:
        query = select(db.Round.number).where(db.Round.run == self.name).order_by(db.Round.number.desc()).limit(1)
        return session.scalar(query) or 0

    def _carry_out(self, session: Session, action: CoordinatorAction) -> list[CoordinatorEvent]:
        match action:
            case Send():
                self._note_round(session, action)
                action = self._with_transcript(session, action)
                self._note_asked(action)
                queue(
                    session,
                    silo=action.silo,
                    run=self.name,
                    round_number=action.round,
                    step=action.step,
                    kind=action.kind,
                    payload=encode(action.body),
                )
            case StartDeadline(name, seconds):
                self.deadlines[name] = self.around.monotonic() + seconds
            case Note(name, number, step, fields):
                silo = str(fields.get("silo", ""))
                session.add(
                    db.Figure(
                        run=self.name, round=number, step=step, silo=silo, name=name, fields=db.as_json(dict(fields))
                    )
                )
                self.around.publish(f"note.{name}", {"run": self.name, "round": number, "step": step, **fields})
            case Commit():
                return self._commit(session, action)
            case FinishRun(outcome, reason):
                self.end(session, outcome, reason)
        return []

    def _with_transcript(self, session: Session, action: Send) -> Send:
        """What opens or ends a round names its transcript, whatever the method."""
        agreements = self.around.agreements
        if isinstance(action.body, pb.RoundOpen):
            body, made = agreements.opening(session, self.plan, action.round, action.body, self.silos)
            if made:
                self._await_signatures(action.round)
            return replace(action, body=body)
        if isinstance(action.body, pb.RoundResult):
            return replace(action, body=agreements.result(session, self.plan, action.round, action.body))
        return action

    def _await_signatures(self, number: int) -> None:
        self.deadlines[agreement.deadline_name(number)] = self.around.monotonic() + agreement.seconds_for(self.plan)

    def _note_out(self, event: CoordinatorEvent) -> None:
        if isinstance(event, SiloAbstained):
            self._abstained = {each for each in self._abstained if each.round == event.round} | {event}
            if event.step == 0:
                self._out.add((event.round, event.silo))

    def _note_asked(self, action: Send) -> None:
        self.asked[action.silo] = self.asked.get(action.silo, Asked()).after(action.body, action.step)

    def _note_round(self, session: Session, action: Send) -> None:
        """Keep what the driver must know of rounds: which is open, on which base, with which public prompts."""
        row = session.get(db.Round, (self.name, action.round))
        if isinstance(action.body, pb.RoundOpen) and row is None:
            steps = {str(step.step): list(step.prompt_indices) for step in action.body.public_steps}
            session.add(
                db.Round(
                    run=self.name,
                    number=action.round,
                    state="open",
                    base_digest=action.body.base_digest,
                    public_steps=db.as_json(steps),
                    opened_at=self.around.now(),
                )
            )
            session.flush()
            self._opened_at[action.round] = self.around.monotonic()
            self.around.publish("round.opened", {"run": self.name, "round": action.round})
        if isinstance(action.body, pb.RoundResult) and row is not None and row.state == "open":
            row.state = rounds.advance(rounds.ROUND, row.state, "abandon")
            self._close(row)
            self.around.publish("round.abandoned", {"run": self.name, "round": action.round})

    def _commit(self, session: Session, action: Commit) -> list[CoordinatorEvent]:
        row = session.get(db.Round, (self.name, action.round))
        if row is None:
            raise OperationError(f"round {action.round} of {self.name} was never opened")
        blobs = self.around.blobs
        uploads = [blobs.get(digest) for digest in action.upload_digests]
        row.state = rounds.advance(rounds.ROUND, row.state, "commit")
        try:
            base = blobs.get(row.base_digest)
            adapter = aggregate(blobs, base, uploads, self.method.combine, freeze=self.plan.lora.freeze)
        except AggregateRefusedError as error:
            # the ingress check lets no such upload in; if one is there, the old adapter stays and people must look
            row.state = rounds.advance(rounds.ROUND, row.state, "abandon")
            self._close(row)
            self.around.publish("round.refused", {"run": self.name, "round": action.round, "reason": error.message})
            self._end_early(session, "failed", error.code)
            return []
        fields = db.as_json(drift_note(action.silos, base, uploads))
        session.add(db.Figure(run=self.name, round=action.round, step=0, silo="", name=DRIFT, fields=fields))
        row.adapter_digest = adapter.digest
        row.participants = db.as_json(list(action.silos))
        row.state = rounds.advance(rounds.ROUND, row.state, "committed")
        self._close(row)
        self._row(session).adapter_digest = adapter.digest
        self.around.checkpoint()
        self.around.publish(
            "round.committed",
            {"run": self.name, "round": action.round, "silos": list(action.silos), "seconds": row.seconds},
        )
        return [Committed(action.round, adapter.digest)]

    def _close(self, row: db.Round) -> None:
        row.closed_at = self.around.now()
        row.seconds = round(self.around.monotonic() - self._opened_at.get(row.number, self.around.monotonic()), 3)
        self.deadlines.pop(f"round/{row.number}", None)
        self.deadlines.pop(agreement.deadline_name(row.number), None)

    def _row(self, session: Session) -> db.Run:
        run = session.get(db.Run, self.name)
        if run is None:
            raise OperationError(f"run {self.name} is not in the database")
        return run


# ---- outbox -----------------------------------------------------------------------------------------


def queue(session: Session, *, silo: str, run: str, round_number: int, step: int, kind: str, payload: bytes) -> None:
    session.add(db.OutboxItem(silo=silo, run=run, round=round_number, step=step, kind=kind, payload=payload))
    session.flush()


def never_given(session: Session, silo: str, run: str, kind: str) -> bool:
    """Whether a message of this kind waits for a silo and was in no answer to it yet."""
    item = db.OutboxItem
    waiting = select(item.id).where(
        item.silo == silo, item.run == run, item.kind == kind, item.delivered_sequence == 0
    )  # fmt: skip
    return session.scalar(waiting.limit(1)) is not None


def withdraw(session: Session, silo: str, run: str) -> None:
    """Take back what a silo has not been given of a run."""
    session.execute(delete(db.OutboxItem).where(db.OutboxItem.silo == silo, db.OutboxItem.run == run))


# ---- events as JSON ---------------------------------------------------------------------------------

_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (RunStarted, SiloAbstained, SiloLeft, DeadlinePassed, Committed)
}


def event_fields(event: CoordinatorEvent) -> dict[str, Any]:
    """An event as JSON; a message by the digest of its kept payload."""
    if isinstance(event, MessageArrived):
        named = {name: getattr(event, name) for name in ("silo", "kind", "round", "step", "digest")}
        return {"event": "MessageArrived", **named}
    return {"event": type(event).__name__, **asdict(event)}


def event_from_fields(fields: dict[str, Any], blobs: Blobs) -> CoordinatorEvent:
    """The event again. Raises OperationError: a payload it names is missing."""
    fields = dict(fields)
    name = fields.pop("event")
    if name == "MessageArrived":
        payload = blobs.get(fields["digest"])
        kind = fields["kind"]
        if kind in TENSOR_KINDS:
            return MessageArrived(body=FactorsReader(payload, payload.size_bytes).header, **fields)
        return MessageArrived(body=decode(OUTBOUND_KINDS[kind], whole(payload)), **fields)
    event: CoordinatorEvent = _EVENTS[name](
        **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    )
    return event

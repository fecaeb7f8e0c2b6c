"""The coordinator without sockets: one complete message in, one signed message out.

    peer, envelope, payload
      -> ingress.admit, parse               no state, no lock
      -> sequence, place, rules, grading    public answers only; graded outside the lock, if no rule refuses them
      -> sequence, charter, audit record    durable before anything is acknowledged
      -> Services: hello | poll | fetch | checkpoint | a contribution folded through the run's method
      -> one transaction: sequence, counts, upload, event, outbox, and the answer's own number
      -> signed reply: ack, refusal, or the next item of the sender's outbox

`server` holds a `Driver` and hands it messages; `Driver` holds runs, store and log and knows nobody above it. Time
comes in by two clocks, so a test moves it by hand. All state changes happen under one lock, one after the other.

What it appends to the audit log beside the decisions on what it took in:

*Records of a transaction*: what a round agreed on and came to is in the database before it is in the log, or a kill in
between would leave a log that tells of a transcript which the restarted coordinator makes differently. So the record
goes into the transaction and from there into the log, at once or at the next start.

*The log's place*: the database knows how many records the log had with each message that it keeps, so a coordinator
that is started with another log, or with an older copy, is refused.

*Refusals*: each is a record, since somebody tried; but who tries is outside, and would fill the disk, which halts the
coordinator (T23, T24). Each identity has a bucket of single records; what comes beyond it is one record with a number,
once the bucket is full again.

What this does not bound: messages that the rules allow, which the charter's rates do; and identities, which the
federation's CA does.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, delete, select
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import outbox
from coordinator import store as db
from coordinator.aggregate import l2_norm
from coordinator.blobs import AnyPayload, Blobs, BytesPayload
from coordinator.ingress import (
    SILENT_SECONDS,
    Arrived,
    OpenPlace,
    Ruling,
    check_hello,
    check_kept,
    hello_as_fields,
    standing,
)
from coordinator.outbox import Reply
from coordinator.runs import ActiveRun, Agreements, Dependencies, stored_life
from coordinator.witnessing import Relay
from fedsilo.audit import polls
from fedsilo.audit.checkpoint import Checkpoint
from fedsilo.audit.log import AuditLog
from fedsilo.audit.polls import PollWindows
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, PeerError, WireCode
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.method import DeadlinePassed, SiloAbstained, SiloLeft
from fedsilo.protocol.place import Place, Placed
from fedsilo.protocol.plan import Plan, plan_from_canonical
from fedsilo.protocol.rounds import Verdict, is_over
from fedsilo.protocol.swap import rows_answered
from policies.engine import HistoryBook
from policies.message import Requests

log = logging.getLogger("fedsilo.coordinator")

# ---- what a message does -----------------------------------------------------------------------------------------

CONTRIBUTIONS = frozenset(kind for kind in OUTBOUND_KINDS if not kind.startswith("control."))


@dataclass
class MemberState:
    """State of a silo: what it was last seen doing, and what came of it since this coordinator started."""

    last_seen: str = ""
    heard_at: float = 0.0  # monotonic
    refusal: dict[str, str] | None = None  # of its last hello: {code, field, expected, got}; None where that was taken
    run: str = ""  # of its round and step
    round: int = 0
    step: int = 0
    error: str = ""
    certificate_until: str = ""  # UTC, of the certificate it last came with
    greetings: int = 0  # hellos that were taken since the silo last said anything else


@dataclass
class Taken(Placed):
    """Result of handling one message: the answer to it.

    Attributes:
        place: of the answer.
        body: of the answer, or None where its payload is there already.
        reply: the answer, where it was sealed in the transaction that handled the message.
    """

    place: Place
    body: Any
    payload: AnyPayload | None = None
    reply: Reply | None = None


def ack() -> Taken:
    return Taken(Place("", 0, 0, "control.ack"), pb.Ack())


@dataclass(frozen=True)
class Prepared:
    """Result of `Services.prepare`.

    Attributes:
        objection: why the message cannot be carried out; None where it can.
        failure: what failed on the way to know; it is raised once the message is on record.
        taken: of a checkpoint, what was countersigned.
        adapter: that a silo may fetch.
    """

    objection: PeerError | None = None
    failure: Exception | None = None
    taken: Checkpoint | None = None
    adapter: AnyPayload | None = None


def contribution_of(arrived: Arrived) -> rounds.Contribution:
    """A message as the tables of a run know it."""
    envelope = arrived.envelope
    return rounds.Contribution(
        arrived.silo,
        envelope.kind,
        envelope.round,
        envelope.step,
        envelope.attempt,
        arrived.payload.digest,
        arrived.ungraded,
    )


@dataclass
class Services:
    """Does what a message asks for, once it has passed the ingress. Runs inside the driver's lock and transaction.

    Attributes:
        dependencies: of the driver.
        runs: the driver's runs that have not ended, by name.
        seen: what each silo was last seen doing.
        notify: wakes waiting polls.
        last_sent: the highest sequence that was given to a silo, or a higher one.
    """

    dependencies: Dependencies
    runs: dict[str, ActiveRun]
    seen: dict[str, MemberState]
    notify: Callable[[], None]
    last_sent: Callable[[Session, str], int]

    def __post_init__(self) -> None:
        self.relay = Relay(self.dependencies.audit, self.dependencies.silos)

    def prepare(self, session: Session, peer: PeerIdentity, arrived: Arrived) -> Prepared:
        """Return whether a message that the rules allow can be carried out, before the log says that it was let in.

        Raises:
            OperationError: our memory of a silo's log cannot be stored.
        """
        try:
            with db.named_errors():
                return self._prepare(session, peer, arrived)
        except PeerError as error:
            return Prepared(objection=error)
        except OperationError:
            raise
        except Exception as error:  # noqa: BLE001  # raised again once the message is on record
            return Prepared(failure=error)

    def _prepare(self, session: Session, peer: PeerIdentity, arrived: Arrived) -> Prepared:
        silo, envelope, body = arrived.silo, arrived.envelope, arrived.body
        match body:
            case pb.Hello():
                check_hello(body, self.dependencies.agreed.of(silo), silos=len(self.dependencies.silos))
            case pb.Fetch():
                return Prepared(adapter=self._adapter(session, silo, body))
            case pb.Checkpoint():
                return Prepared(taken=self.relay.take_in(peer, body))
            case pb.Declined() | pb.Abstain():
                self._run_of(envelope, silo)
            case _ if envelope.kind in CONTRIBUTIONS:
                if not db.has_joined(session, silo):  # whoever differs has no part
                    raise PeerError(WireCode.NOT_A_MEMBER, f"{silo} contributes although it has not joined")
                run = self._run_of(envelope, silo)
                run.check(contribution_of(arrived))
                if envelope.kind not in run.method.kinds_under(run.plan):
                    raise PeerError(WireCode.UNKNOWN_KIND, f"{envelope.kind} does not belong to {run.plan.method}")
        return Prepared()

    def carry_out(
        self, session: Session, peer: PeerIdentity, arrived: Arrived, prepared: Prepared, l2: float | None
    ) -> Taken:
        """Do what an allowed message asks for.

        Args:
            session: the caller's transaction.
            peer: its sender.
            arrived: the message.
            prepared: of `prepare`.
            l2: of tensors, their norm as the rules measured it; None where they did not.

        Raises:
            PeerError: what `prepare` had against it.
        """
        silo, envelope, body = arrived.silo, arrived.envelope, arrived.body
        state = self.seen[silo]
        state.greetings = state.greetings + 1 if isinstance(body, pb.Hello) else 0
        if isinstance(body, pb.Hello):
            self._keep_member(session, peer, body, prepared.objection)  # one that is refused, too
        if prepared.objection is not None:
            raise prepared.objection
        match body:
            case pb.Hello():
                self._welcome(session, peer, body)
            case pb.Poll():
                self._acknowledge(session, silo, body.acknowledged_sequence)
                if body.countersignature:
                    self._countersign(session, peer, body.countersignature)
            case pb.Fetch():
                return Taken(Place(envelope.run, envelope.round, 0, "global.adapter"), None, prepared.adapter)
            case pb.Checkpoint():
                return Taken(
                    Place("", 0, 0, "control.checkpoint"), self.relay.answer(session, peer, body, prepared.taken)
                )
            case pb.Progress():
                if (run := self.runs.get(envelope.run)) is not None:
                    state.run, state.round, state.step = run.name, body.round, body.step
                    run.apply(session, rounds.Progressed(silo, body.round, body.step))
                self.dependencies.publish(
                    "silo.progress", {"silo": silo, "run": envelope.run, "round": body.round, "step": body.step}
                )
            case pb.ErrorReport():
                state.error = body.code
                self.dependencies.publish("silo.error", {"silo": silo, "run": envelope.run, "code": body.code})
                if (run := self.runs.get(envelope.run)) is not None and silo in run.plan.silos:
                    number = run.life.open_round
                    db.note_error(session, run=run.name, round_number=number, silo=silo, code=body.code)
            case pb.Declined() | pb.Abstain():
                self._abstain(session, silo, envelope, body)
            case _ if envelope.kind in CONTRIBUTIONS:
                self._contribution(session, arrived, l2)
        return ack()

    def _keep_member(self, session: Session, peer: PeerIdentity, hello: pb.Hello, objection: PeerError | None) -> None:
        member = db.Member(
            silo=peer.name,
            state="joined",
            hello=db.as_json(hello_as_fields(hello)),
            fingerprint=peer.fingerprint,
            refusal="",
            since=self.dependencies.now(),
        )
        if objection is not None:
            self.seen[peer.name].greetings = 0
            self._refuse(member, objection)
        session.merge(member)

    def _welcome(self, session: Session, peer: PeerIdentity, hello: pb.Hello) -> None:
        silo = peer.name
        self.seen[silo].refusal = None
        session.execute(delete(db.CarriedSilo).where(db.CarriedSilo.silo == silo))  # `transfer` says where it is one
        session.flush()
        if self.seen[silo].greetings > 1:
            # Whoever believes the answer to hello goes on to exchange checkpoints.
            log.warning(
                "%s says hello again and nothing else: it was cut off, or it does not believe this coordinator's "
                "answers (is its id/coordinator.pub the key of %s?)",
                peer.spiffe_id,
                self.dependencies.spiffe_id,
            )
        self.dependencies.publish("silo.joined", {"silo": silo, "isolation": hello.isolation, "role": hello.role})
        for run in self.runs.values():
            if silo in run.accepted:
                self._note_isolation(session, run, silo)

    def _refuse(self, member: db.Member, error: PeerError) -> None:
        member.state, member.refusal = "refused", db.as_json(error.difference)
        self.dependencies.publish("silo.refused", {"silo": member.silo, **error.difference})

    def refuse_other_protocols(self, session: Session) -> None:
        """Refuse silos that joined before this coordinator was updated and speak an earlier protocol, until they say
        hello again: they take part in no round, since they could not read its transcript."""
        for member in session.scalars(select(db.Member).where(db.Member.state == "joined")):
            try:
                check_kept(json.loads(member.hello))
            except PeerError as error:
                log.warning("refused %s: %s; %s", member.silo, error.message, error.hint)
                self._refuse(member, error)

    def _note_isolation(self, session: Session, run: ActiveRun, silo: str) -> None:
        """Note the isolation of a silo in a run, as its guard tells it: one line at the beginning, one at a change."""
        member = session.get(db.Member, silo)
        level = json.loads(member.hello)["isolation"] if member is not None else ""
        if level and level != (db.isolation_of(session, run.name).get(silo) or [""])[-1]:
            fields = db.as_json({"silo": silo, "rung": level})
            where = {"run": run.name, "round": run.life.open_round, "step": 0, "silo": silo}
            db.keep_figures(session, [where | {"name": db.ISOLATION, "fields": fields}])

    def _adapter(self, session: Session, silo: str, fetch: pb.Fetch) -> AnyPayload:
        payload = self.dependencies.blobs.find(fetch.digest) if db.may_fetch(session, silo, fetch.digest) else None
        if payload is None:
            raise PeerError(WireCode.NOT_FOUND, f"there is no adapter {fetch.digest[:64]!r}", field="digest")
        return payload

    def _abstain(self, session: Session, silo: str, envelope: pb.Envelope, body: pb.Declined | pb.Abstain) -> None:
        run = self._run_of(envelope, silo)
        if body.round == 0:
            # outside a round there is only the plan to say no to; to decline the base evaluation is no reason to go
            run.apply(session, SiloLeft(silo) if isinstance(body, pb.Abstain) else rounds.PlanDeclined(silo))
        else:
            # whoever keeps a whole-round message back keeps back the round; a step's answers only the step
            step = body.step if not (isinstance(body, pb.Declined) and body.kind != "public.responses") else 0
            declined = body.kind if isinstance(body, pb.Declined) else ""
            run.apply(session, SiloAbstained(silo, body.round, step, declined))
        self.forget_ended()
        self.notify()

    def _contribution(self, session: Session, arrived: Arrived, l2: float | None) -> None:
        silo, envelope = arrived.silo, arrived.envelope
        run = self._run_of(envelope, silo)
        blob = self.dependencies.blobs.keep(arrived.payload)
        norm = l2 or (l2_norm(blob) if arrived.tensors is not None else 0.0)
        db.keep_upload(
            session,
            run=run.name,
            round=envelope.round,
            step=envelope.step,
            kind=envelope.kind,
            silo=silo,
            digest=blob.digest,
            payload_bytes=blob.size_bytes,
            norm=norm,
            received_at=self.dependencies.now(),
        )
        if isinstance(arrived.body, pb.MetricsEval):
            self._keep_metrics(session, run.name, silo, envelope.round, arrived.body)
        log.info(
            "run %s round %d: %s of %s taken (%d bytes)",
            run.name,
            envelope.round,
            envelope.kind,
            silo,
            blob.size_bytes,
        )
        self.dependencies.publish(
            "upload",
            {
                "run": run.name,
                "round": envelope.round,
                "step": envelope.step,
                "silo": silo,
                "kind": envelope.kind,
                "bytes": blob.size_bytes,
            },
        )
        run.apply(session, contribution_of(arrived), arrived.body)
        self.forget_ended()
        self.notify()

    def _keep_metrics(self, session: Session, run: str, silo: str, number: int, body: pb.MetricsEval) -> None:
        fields = {"split": body.split, "adapter_digest": body.adapter_digest}
        figures, where = list[dict[str, Any]](), {"run": run, "round": number, "step": 0, "silo": silo}
        for metric in body.metrics:
            values = fields | {"topic": metric.topic, "value": metric.value}
            figures.append(where | {"name": f"metric.{metric.name}", "fields": db.as_json(values)})
            if not metric.topic:
                self.dependencies.publish(
                    "metric", {"run": run, "round": number, "silo": silo, "name": metric.name, "value": metric.value}
                )
        db.keep_figures(session, figures)

    def _acknowledge(self, session: Session, silo: str, sequence: int) -> None:
        """Drop what the silo has taken in; a plan that is taken in is accepted unless it is declined."""
        # whatever number it names, it took in no more than was sent to it
        for item in outbox.take_in(session, silo, min(sequence, self.last_sent(session, silo))):
            run = self.runs.get(item.run)
            if item.kind == "run.plan" and run is not None:
                self._note_isolation(session, run, silo)
                run.apply(session, rounds.PlanTaken(silo))
                self.notify()
        self.forget_ended()

    def _countersign(self, session: Session, peer: PeerIdentity, signature: bytes) -> None:
        """A silo's signature under the transcript of a round that is open; polls do not say of which run."""
        for run in self.runs.values():
            if peer.name in run.silos and run.countersign(session, peer, signature):
                self.notify()

    def note_refused(self, session: Session, arrived: Arrived) -> None:
        """Note that the charter refused a silo's update of the open round; it may come with another."""
        envelope, run = arrived.envelope, self.runs.get(arrived.envelope.run)
        if run is not None and envelope.kind == run.method.update_kind(run.plan, envelope.round):
            run.apply(session, rounds.UpdateRefused(arrived.silo, envelope.round))

    def _run_of(self, envelope: pb.Envelope, silo: str) -> ActiveRun:
        run = self.runs.get(envelope.run)
        if run is None or silo not in run.silos:
            raise PeerError(WireCode.NO_SUCH_RUN, f"{silo} has no part in a run {envelope.run[:64]!r}")
        return run

    def forget_ended(self) -> None:
        for run in [run for run in self.runs.values() if run.life.over]:
            del self.runs[run.name]
            self.dependencies.store.once_undone(functools.partial(self.runs.setdefault, run.name, run))


# ---- the state of a run, as the rules see it -----------------------------------------------------------------------

NORMS_KEPT = 16  # of adapters; each is read once for its norm


class MessageContexts:
    """Finds the state of a message's run. Used under the driver's lock.

    Args:
        blobs: where adapters are.
        runs: those that have a plan and have not ended.
    """

    def __init__(self, blobs: Blobs, runs: Mapping[str, ActiveRun]) -> None:
        self._runs = runs
        self._norm = functools.lru_cache(NORMS_KEPT)(lambda digest: l2_norm(blobs.get(digest)))
        self._asked: dict[str, tuple[int, str, dict[int, tuple[int, ...]]]] = {}  # by run, of its open round

    def of(self, session: Session, arrived: Arrived) -> OpenPlace:
        """The open round, or the newest for what may come after a round."""
        run, envelope = self._runs.get(arrived.envelope.run), arrived.envelope
        if run is None:
            return OpenPlace()
        number = run.life.open_round
        step, indices, evaluated, digest = 0, tuple[int, ...](), "", ""
        if number:
            digest, steps_asked = self._opened(session, run.name, number)
            if (rows := rows_answered(run.plan, number, steps_asked).get(envelope.step)) is not None:
                step, indices = envelope.step, rows
        if envelope.kind == "metrics.eval":
            of_round = session.get(db.Round, (run.name, envelope.round))
            own = session.get(db.RoundResult, (run.name, envelope.round, arrived.silo))
            evaluated = own.digest if own else of_round.adapter_digest if of_round else ""
        if envelope.kind == "metrics.eval" or envelope.kind.startswith("control."):
            number = run.life.round
        norm = self._norm(digest) if digest and arrived.tensors is not None else None
        asked_of = run.asked.get(arrived.silo, Requests())
        return OpenPlace(run.plan, digest, norm, number, step, indices, evaluated, asked_of)

    def _opened(self, session: Session, run: str, number: int) -> tuple[str, dict[int, tuple[int, ...]]]:
        """Adapter that a round starts from, and rows of its public steps; neither changes once it is open."""
        known = self._asked.get(run)
        if known is None or known[0] != number:
            row = session.get_one(db.Round, (run, number))
            steps = {int(place): tuple(rows) for place, rows in json.loads(row.public_steps).items()}
            self._asked = {name: steps_of for name, steps_of in self._asked.items() if name in self._runs}
            known = self._asked[run] = number, row.base_digest, steps
        return known[1], known[2]


# ---- records -----------------------------------------------------------------------------------------------------

REFUSALS_MAX = 60  # recorded singly, of one identity
REFILL_SECONDS = 6.0  # until one more may be
IDENTITIES_MAX = 1024  # with a bucket of their own; further ones share one
MORE_REFUSALS = "MORE_REFUSALS"
_OTHERS = "others"
_NAMED_MAX = 16  # reasons that a summary names


# ---- records of a transaction ------------------------------------------------------------------------


@dataclass
class Pending:
    """Records that are durable with a transaction and appended once it is."""

    store: db.Store
    audit: AuditLog

    def record(self, session: Session, event: str, **fields: Any) -> None:
        """Append to the audit log what this transaction changes, when it is durable and not before.

        Args:
            session: the caller's transaction.
            event: of the record.
            fields: of the record: run, round, kind, detail.
        """
        session.add(db.PendingRecord(event=event, fields=db.as_json(fields)))
        session.flush()
        self.store.once_committed(self.append)

    def append(self) -> None:
        """Raises OperationError: the log or the database takes nothing; the next start goes on from there."""
        self._append_but(set())

    def look(self) -> None:
        """Require, at a start, the log which the database was used with, and no older copy; store its root.

        Raises:
            ConflictError: it is not (`LOG_BEHIND`): silos that countersigned the longer one would see two histories.
        """
        audit, origin = self.audit, self.audit.origin
        with self.store.transaction() as session:
            place = session.get(db.LogPlace, origin)
        size = audit.size_found  # before this start closed what a kill had left open
        if place is not None and not (place.size <= size and audit.root_at(place.rooted).hex() == place.root):
            raise ConflictError(
                f"{audit.directory} has {size} records and is not the log that the database was used with: that "
                f"one is of {origin} and has {place.size} at least",
                hint="bring the audit folder as the last coordinator left it",
                code="LOG_BEHIND",
            )
        with self.store.transaction() as session:
            session.merge(db.LogPlace(origin=origin, size=size, rooted=size, root=audit.root_at(size).hex()))

    def take_up(self) -> None:
        """Append, at a start, what a kill left behind, but what it left between the log and the database only once."""
        with self.store.transaction() as session:
            waiting = {_content(row.event, json.loads(row.fields)) for row in session.scalars(_PENDING)}
        there = (_content(record["event"], record) for record in self.audit.records()) if waiting else ()
        self._append_but(waiting & set(there))

    def _append_but(self, there: set[str]) -> None:
        with self.store.transaction() as session:
            rows = list(session.scalars(_PENDING))
            for row in rows:
                fields = json.loads(row.fields)
                if _content(row.event, fields) not in there:
                    self.audit.append(row.event, **fields)
                session.delete(row)
            if rows:  # an older copy of the log would lack what was taken out here
                db.set_log_size(session, self.audit.origin, self.audit.size)


_PENDING = select(db.PendingRecord).order_by(db.PendingRecord.id)


def _content(event: str, fields: dict[str, Any]) -> str:
    return db.as_json({"event": event, **{name: fields.get(name) for name in ("run", "round", "detail")}})


# ---- refusals ----------------------------------------------------------------------------------------


@dataclass
class _Bucket:
    """`left`: single records, at the moment `at` (seconds). `held`: reasons of what was not recorded singly."""

    left: float
    at: float
    held: Counter[str] = field(default_factory=Counter)


class Refusals:
    """Used under the driver's lock.

    Args:
        append: to the audit log.
    """

    def __init__(self, append: Callable[..., Any], monotonic: Callable[[], float]) -> None:
        self._append = append
        self._monotonic = monotonic
        self._buckets: dict[str, _Bucket] = {}

    def may_record(self, identity: str, reasons: list[str]) -> bool:
        """Return whether this refusal is recorded singly; it is counted where not.

        Args:
            identity: of the certificate, so that nobody spends another's records.
            reasons: codes.

        Raises:
            OperationError: a summary that is due cannot be recorded.
        """
        self.tell()
        if identity not in self._buckets and len(self._buckets) >= IDENTITIES_MAX:
            identity = _OTHERS
        bucket = self._buckets.setdefault(identity, _Bucket(REFUSALS_MAX, self._monotonic()))
        # once something is held, all is, until the bucket is full: a flood costs what its bucket holds, and a summary
        if bucket.held or bucket.left < 1:
            bucket.held[reasons[0] if reasons else MORE_REFUSALS] += 1
            return False
        bucket.left -= 1
        return True

    def tell(self, *, everything: bool = False) -> None:
        """Record the numbers of the buckets that are full again, or of all of them; a full bucket is forgotten.

        Raises:
            OperationError: one cannot be recorded; it is tried again.
        """
        now = self._monotonic()
        for identity, bucket in list(self._buckets.items()):
            bucket.left = min(REFUSALS_MAX, bucket.left + max(0.0, now - bucket.at) / REFILL_SECONDS)
            bucket.at = now
            if bucket.held and (everything or bucket.left >= REFUSALS_MAX):
                self._tell(identity, bucket.held)
                bucket.held = Counter()
            if bucket.left >= REFUSALS_MAX:
                del self._buckets[identity]

    def _tell(self, identity: str, held: Counter[str]) -> None:
        log.warning("refused %s: %d more, counted only", identity, held.total())
        self._append(
            "ingress.decision",
            kind="unknown",
            decision="deny",
            reasons=[MORE_REFUSALS],
            direction="ingress",
            peer=identity[:128],
            detail={"messages": held.total(), "reasons": dict(held.most_common(_NAMED_MAX))},
        )


# ---- the driver --------------------------------------------------------------------------------------------------

PAST_RUNS_KEPT = 8


@dataclass
class Driver:
    """The coordinator's core.

    Attributes:
        runs: runs that have a plan and have not ended.
        halted: why nothing is taken any more; empty while all is well.
        importing: silos whose files are being read; what waits for them goes into a file (`coordinator.transfer`).
        after_hello: called, under the lock, when a silo has said hello, or was silent and is heard again.
        sending: silos whose large message is on its way in.
    """

    dependencies: Dependencies
    runs: dict[str, ActiveRun] = field(default_factory=dict)
    seen: dict[str, MemberState] = field(default_factory=dict)
    importing: set[str] = field(default_factory=set)
    halted: str = ""
    stopping: bool = False
    after_hello: Callable[[], object] = field(default=lambda: None)
    sending: Callable[[], frozenset[str]] = frozenset

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        names, key = (self.dependencies.federation, self.dependencies.spiffe_id), self.dependencies.signing_key
        self.replies = self.dependencies.replies(*names, key, self.dependencies.store.once_undone)
        self._contexts = MessageContexts(self.dependencies.blobs, self.runs)
        self._up_since = self.dependencies.monotonic()
        self._past: dict[str, rounds.Life] = {}  # a few runs that have ended, for retries of what came last
        self.books: dict[str, HistoryBook] = {}
        self.pending = Pending(self.dependencies.store, self.dependencies.audit)
        self._polls = PollWindows(self.dependencies.audit.append, "ingress")
        self.refusals = Refusals(self.dependencies.audit.append, self.dependencies.monotonic)
        self.services = Services(
            self.dependencies, self.runs, self.seen, self._changed.notify_all, self.replies.last_sequence
        )
        self.agreements = Agreements(
            self.dependencies.spiffe_id,
            self.dependencies.signing_key,
            self.dependencies.ingress.policy.file.federation.min_peers,
            self.pending.record,
        )

    # ---- life ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Take up the runs that had not ended when the coordinator stopped, each where it stood."""
        self.pending.look()
        self.pending.take_up()
        with self._changed, self.dependencies.store.transaction() as session:
            self.services.refuse_other_protocols(session)
            for row in session.scalars(select(db.Run).where(db.Run.plan != "").order_by(db.Run.ordinal)):
                if not is_over(row.state):
                    run = self._active_run(plan_from_canonical(row.plan))
                    run.replay(session)
                    self.runs[row.name] = run

    def _active_run(self, plan: Plan) -> ActiveRun:
        return ActiveRun(plan, self.dependencies, self.agreements)

    def add_run(self, session: Session, plan: Plan) -> None:
        """Offer the plan of a run, whose roster is final."""
        self.runs[plan.run] = run = self._active_run(plan)
        self.dependencies.store.once_undone(lambda: self.runs.pop(run.name, None))
        run.offer_plan(session)

    def stop(self) -> None:
        """Answer every waiting poll now; no further message is taken."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
            if not self.halted:
                try:
                    self.refusals.tell(everything=True)
                    self._polls.close()
                except OperationError as error:
                    self.halt(error)

    def changing(self) -> threading.Condition:
        """The lock under which state changes; who holds it and changes an outbox notifies."""
        return self._changed

    def turn_back(self, now: float) -> None:
        """The clock was accepted: what was counted at a later time counts as of now (T41). now: UTC seconds."""
        with self._changed, self.dependencies.store.transaction() as session:
            for silo in self.dependencies.silos:
                book = self._book(session, silo)
                book.turn_back(now)
                db.set_counts(session, silo, db.as_json(book.to_json()))

    def close_windows(self) -> None:
        """Record how many polls came under each decision that permits more of them. Raises OperationError: no space."""
        with self._changed:
            self._polls.close()

    def halt(self, error: FedSiloError) -> None:
        """Take nothing any more, clearly: what cannot be recorded is not acknowledged (T39)."""
        with self._changed:
            if not self.halted:
                self.halted = error.code
                log.critical("halted: %s", error.message)
                self.dependencies.publish("halt", {"code": error.code, "message": error.message})
            self._changed.notify_all()

    def tick(self) -> None:
        """Let deadlines pass."""
        with self._changed:
            if self.halted:
                return
            for run in list(self.runs.values()):
                for name in run.life.due(self.dependencies.monotonic()):
                    log.info("run %s: deadline %s has passed", run.name, name, extra={"run": run.name})
                    with self.dependencies.store.transaction() as session:
                        run.apply(session, DeadlinePassed(name))
            self.services.forget_ended()
            self.refusals.tell()
            self._polls.close(over=self.dependencies.ingress.now_seconds())
            self._changed.notify_all()

    # ---- one message ---------------------------------------------------------------------------------

    def receive(self, peer: PeerIdentity, envelope: pb.Envelope, payload: AnyPayload | bytes) -> Reply:
        """Take one complete message and answer it. Waits, for a poll, until there is something to deliver.

        Raises:
            FedSiloError: the coordinator itself cannot answer (full disk, database); the caller ends the call
                without a word.
        """
        content = BytesPayload(payload) if isinstance(payload, bytes) else payload
        silo = ""
        try:
            silo = self.dependencies.ingress.admit(peer, envelope, content.size_bytes)
            arrived = self._graded(self.dependencies.ingress.parse(silo, envelope, content))
            with self._changed:
                was_here = self.is_heard(silo)
                seen = self.seen.setdefault(silo, MemberState())
                seen.last_seen, seen.certificate_until = self.dependencies.now(), f"{peer.not_after:%Y-%m-%dT%H:%M:%SZ}"
                seen.heard_at = self.dependencies.monotonic()
                taken = self._take(peer, arrived)
                if (contradiction := self.services.relay.contradiction()) and not self.halted:
                    self.halt(contradiction)
                if isinstance(arrived.body, pb.Hello) or not was_here:
                    self.after_hello()
            if taken.reply is not None:
                return taken.reply
            if isinstance(arrived.body, pb.Poll):
                wait = min(arrived.body.wait_milliseconds / 1000, self.dependencies.poll_wait_seconds_max)
                self.wait_for_pending(silo, wait)
                with self._changed, self.dependencies.store.transaction() as session:
                    return self._delivered(session, silo) or self.seal(session, silo, ack())
            if isinstance(taken.body, pb.Ack):
                taken.body.acknowledged_sequence = envelope.sequence
            return self._reply(silo, taken)
        except PeerError as error:
            return self.refuse(peer, envelope, error, silo)
        except OperationError as error:
            self.halt(error)
            raise

    def is_heard(self, silo: str) -> bool:
        """Return True if the silo was heard lately and does more than send one hello after another."""
        seen = self.seen.get(silo)
        silent = seen is None or self.dependencies.monotonic() - seen.heard_at >= SILENT_SECONDS
        return not (seen is None or silent or seen.greetings > 1)

    def standings(self, session: Session) -> dict[str, str]:
        """Return the state of every silo of this federation (`ingress.standing`)."""
        states = {member.silo: member.state for member in session.scalars(select(db.Member))}
        by_files, now = db.carried_silos(session), self.dependencies.monotonic()
        for silo in self.sending() & self.seen.keys():
            self.seen[silo].heard_at = now  # late with a large message, or waiting for its turn: not silent
        words = {}
        for silo in self.dependencies.silos:
            seen = self.seen.get(silo)
            words[silo] = standing(
                states.get(silo, ""),
                by_files=silo in by_files,
                refused=bool(seen and seen.refusal),
                silent_seconds=None if seen is None else now - seen.heard_at,
                up_seconds=now - self._up_since,
                greetings=seen.greetings if seen else 0,
            )
        return words

    def wait_for_pending(self, silo: str, timeout: float) -> bool:
        """Wait until there is something to deliver to a silo, at most `timeout` seconds; whether there is."""
        with self._changed:
            waits, seen = False, None

            def is_over() -> bool:
                nonlocal waits, seen
                # every message wakes all who wait, and of most of them nothing has changed
                now = self.dependencies.store.outboxes.queued[silo], [run.name for run in self._paused()]
                if now != seen:
                    with self.dependencies.store.transaction() as session:
                        seen, waits = now, self._is_pending(session, silo)
                return waits or self.stopping or bool(self.halted)

            self._changed.wait_for(is_over, timeout)
            return waits

    def _take(self, peer: PeerIdentity, arrived: Arrived) -> Taken:
        """Sequence, charter, audit, effect. Caller holds the lock."""
        if self.halted:
            raise PeerError(WireCode.HALTED, "the coordinator is halted")
        if self.stopping:
            raise PeerError(WireCode.HALTED, "the coordinator is stopping")
        silo, envelope = arrived.silo, arrived.envelope
        ruling: Ruling | None = None
        try:
            with self.dependencies.store.transaction() as session:
                if not self._is_new(session, arrived):
                    # the first one was recorded, counted and folded; only its answer was lost (T29)
                    db.raise_sequence(session, silo, envelope.run, envelope.sequence)
                    return ack()
                if envelope.run and envelope.run not in self.runs and session.get(db.Run, envelope.run) is None:
                    # before anything is stored under a name that the sender made up
                    raise PeerError(WireCode.NO_SUCH_RUN, f"{silo} names a run {envelope.run[:64]!r} that never was")
                book, place = self._book(session, silo), self._contexts.of(session, arrived)
                ruling = self.dependencies.ingress.judge(arrived, place, book)
                decision, prepared, refused = ruling.decision, Prepared(), list[str]()
                if decision.verdict != "allow":
                    refused = list(decision.reasons) or [WireCode.INGRESS_DENIED.value]
                else:
                    prepared = self.services.prepare(session, peer, arrived)
                    refused = [prepared.objection.code] if prepared.objection is not None else []
                is_recorded = not refused or self.refusals.may_record(peer.spiffe_id, refused)
                number = self._record(arrived, ruling, prepared.objection) if is_recorded else None
                if prepared.failure is not None:
                    raise prepared.failure
                db.raise_sequence(session, silo, envelope.run, envelope.sequence)
                in_round = min(envelope.round, place.round)  # a round of its own making has no row of its own
                self._count(session, silo, envelope.run, in_round, envelope.kind, "in", arrived.payload.size_bytes)
                db.set_log_size(session, self.dependencies.audit.origin, self.dependencies.audit.size)
                return self._settle(session, peer, arrived, ruling, book, prepared, number)
        except OperationError:
            raise
        except Exception:
            if ruling is None:
                raise
            # It was judged: an error that nobody thought of must not be a way past the rates (T11, T23).
            with self.dependencies.store.transaction() as session:
                db.raise_sequence(session, silo, envelope.run, envelope.sequence)
                self._counted(session, silo, ruling, self._book(session, silo))
            raise

    def _settle(
        self,
        session: Session,
        peer: PeerIdentity,
        arrived: Arrived,
        ruling: Ruling,
        book: HistoryBook,
        prepared: Prepared,
        number: int | None,
    ) -> Taken:
        """Do what a message that was judged asks for, if it may, and seal the answer. number: of its record in the
        audit log; None: it was refused, and is counted only."""
        silo, envelope = arrived.silo, arrived.envelope
        if ruling.decision.verdict != "allow":
            refusal = self._why_denied(arrived, ruling)
            self.services.note_refused(session, arrived)
            if number is not None:
                log.warning("refused: %s; %s", refusal.message, ruling.decision.explain().replace("\n", "; "))
            taken = self._refusal(refusal, envelope, silo)
        else:
            # a silo that is put right may still contribute in this round
            if prepared.objection is None or prepared.objection.wire_code is not WireCode.NOT_A_MEMBER:
                self._counted(session, silo, ruling, book)
            try:
                taken = self.services.carry_out(session, peer, arrived, prepared, ruling.facts.get("l2"))
            except PeerError as error:
                if number is not None:
                    log.warning("refused %s: %s [%s]", peer.spiffe_id, error.line, error.code)
                taken = self._refusal(error, envelope, silo)
        if isinstance(taken.body, pb.Ack):
            taken.body.record, taken.body.acknowledged_sequence = number or 0, envelope.sequence
        if isinstance(arrived.body, pb.Poll):
            taken.reply = self._delivered(session, silo)
        elif not isinstance(arrived.body, pb.Hello):  # after which more happens before it is answered
            taken.reply = self.seal(session, silo, taken)
        return taken

    def _counted(self, session: Session, silo: str, ruling: Ruling, book: HistoryBook) -> None:
        if ruling.decision.verdict == "allow":
            self.dependencies.store.once_undone(lambda: self.books.pop(silo, None))
            book.record(ruling.facts)
            book.forget_runs_but(self.runs)
            db.set_counts(session, silo, db.as_json(book.to_json()))

    def _why_denied(self, arrived: Arrived, ruling: Ruling) -> PeerError:
        """The one code the sender gets; the reasons stay here (B6), but a message that is merely late hears so."""
        envelope, what = arrived.envelope, f"{arrived.envelope.kind} of {arrived.silo}"
        if envelope.kind in CONTRIBUTIONS:
            run = self.runs.get(envelope.run)
            if run is None:
                return PeerError(WireCode.NO_SUCH_RUN, f"{what}: no part in a run {envelope.run[:64]!r}")
            try:
                run.check(contribution_of(arrived))
            except PeerError as error:
                return error
        return PeerError(WireCode.INGRESS_DENIED, f"{what}: {', '.join(ruling.decision.reasons)}")

    def _graded(self, arrived: Arrived) -> Arrived:
        """A message with verdicts on its public answers. The lock is free meanwhile, so `_take` looks at all again."""
        if not isinstance(arrived.body, pb.PublicResponses):
            return arrived
        with self._changed, self.dependencies.store.transaction() as session:
            if self.halted or self.stopping or not self._is_new(session, arrived):
                return arrived
            place, book = self._contexts.of(session, arrived), self._book(session, arrived.silo)
            if not self.dependencies.ingress.is_worth_grading(arrived, place, book):
                return arrived
        return self.dependencies.ingress.grade(arrived)

    def _is_new(self, session: Session, arrived: Arrived) -> bool:
        """Return whether a message is not a retry of one that was taken.

        Raises:
            PeerError: neither a retry nor numbered above the last one.
        """
        if self._is_retry(session, arrived):
            return False
        silo, envelope = arrived.silo, arrived.envelope
        last = db.sequence_of(session, silo, envelope.run, "in")
        if envelope.sequence <= last:
            raise PeerError(WireCode.SEQUENCE_REPLAYED, f"{silo} sent sequence {envelope.sequence} after {last}")
        return True

    def _is_retry(self, session: Session, arrived: Arrived) -> bool:
        if arrived.envelope.kind not in CONTRIBUTIONS:
            return False
        life = self._life(session, arrived.envelope.run)
        return life is not None and rounds.step(life, contribution_of(arrived), 0.0).verdict is Verdict.IGNORED

    def _life(self, session: Session, name: str) -> rounds.Life | None:
        """Return where a run stands, whether or not it has ended; None where none of that name ever had a plan."""
        if name in self.runs:
            return self.runs[name].life
        if name not in self._past:
            row = session.get(db.Run, name)
            if row is None or not row.plan:
                return None
            past = list(self._past.items())[1 - PAST_RUNS_KEPT :]
            self._past = dict([*past, (name, stored_life(session, plan_from_canonical(row.plan)))])
        return self._past[name]

    # ---- replies -------------------------------------------------------------------------------------

    def _delivered(self, session: Session, silo: str) -> Reply | None:
        """The next item of a silo's outbox; None: there is none."""
        item = None if silo in self.importing else self._next_item(session, silo)
        if item is None or self.halted:
            return None
        place = Place(item.run, item.round, item.step, item.kind)
        reply = self.seal(session, silo, Taken(place, None, BytesPayload(item.payload)))
        outbox.give(session, silo, item.id, reply.envelope.sequence)
        return reply

    def _reply(self, silo: str, taken: Taken) -> Reply:
        with self._changed, self.dependencies.store.transaction() as session:
            return self.seal(session, silo, taken)

    def seal(self, session: Session, silo: str, taken: Taken) -> Reply:
        """Sign one message to a silo, and count it."""
        if isinstance(taken.body, pb.Ack):
            taken.body.pending = self._is_pending(session, silo)
            taken.body.checkpoints = silo in self.services.relay.waiting
            taken.body.paused = any(silo in run.silos for run in self._paused())
        reply = self.replies.seal(session, silo, taken.place, body=taken.body, payload=taken.payload)
        # a refusal names the round that was asked for, which need not be one
        number = taken.round if taken.run and self._is_round(session, taken.run, taken.round) else 0
        self._count(session, silo, taken.run, number, taken.kind, "out", reply.payload.size_bytes)
        return reply

    def refuse(self, peer: PeerIdentity, envelope: pb.Envelope, error: PeerError, silo: str = "") -> Reply:
        """A refusal of what did not get as far as the rules; recorded, since somebody tried, as often as may be."""
        listed = peer.spiffe_id in {
            f"spiffe://{self.dependencies.federation}/silo/{name}" for name in self.dependencies.silos
        }
        try:
            with self._changed:
                is_recorded = self.refusals.may_record(peer.spiffe_id, [error.code])
            if is_recorded:
                log.warning("refused %s: %s [%s]", peer.spiffe_id, error.line, error.code)
                self.dependencies.publish("refused", {"peer": peer.spiffe_id, "code": error.code})
                kind = envelope.kind if silo else "unknown"
                self.dependencies.audit.append(
                    "ingress.decision",
                    kind=kind,
                    decision="deny",
                    reasons=[error.code],
                    direction="ingress",
                    peer=peer.spiffe_id[:128],
                )
            taken = self._refusal(error, envelope, peer.name if listed else "")
            return self._reply(peer.name if listed else peer.spiffe_id, taken)
        except OperationError as failure:
            self.halt(failure)
            raise

    def _refusal(self, error: PeerError, envelope: pb.Envelope, silo: str) -> Taken:
        """silo: a listed one whose own message is refused; empty for anybody else."""
        if silo and envelope.kind == "control.hello" and error.wire_code is not WireCode.HALTED:
            self.seen.setdefault(silo, MemberState()).refusal = error.difference
        body = pb.Refusal(code=error.wire_code.value, field=error.field, expected=error.expected, got=error.got)
        run, number = (envelope.run, envelope.round) if envelope.run in self.runs else ("", 0)
        return Taken(Place(run, number, 0, "control.refusal"), body)

    # ---- state ---------------------------------------------------------------------------------------

    def _is_pending(self, session: Session, silo: str) -> bool:
        return self._next_item(session, silo) is not None if self._paused() else outbox.is_waiting(session, silo)

    def _next_item(self, session: Session, silo: str) -> Row[Any] | None:
        return outbox.first_item(session, silo, but=[run.name for run in self._paused()])

    def _is_round(self, session: Session, name: str, number: int) -> bool:
        run = self.runs.get(name)
        return 0 < number <= run.life.round if run is not None else db.is_round(session, name, number)

    def _paused(self) -> list[ActiveRun]:
        return [run for run in self.runs.values() if run.life.paused_at is not None]

    def _book(self, session: Session, silo: str) -> HistoryBook:
        """Kept in memory as it is in the database; read again where a transaction that counted on failed."""
        if silo not in self.books:
            counts = db.counts_of(session, silo)
            self.books[silo] = HistoryBook.from_json(json.loads(counts)) if counts else HistoryBook()
        return self.books[silo]

    def _count(
        self, session: Session, silo: str, run: str, number: int, kind: str, direction: str, payload_bytes: int
    ) -> None:
        db.count_message(
            session,
            silo=silo,
            run=run,
            round_number=number,
            kind=kind,
            direction=direction,
            payload_bytes=payload_bytes,
        )

    def _record(self, arrived: Arrived, ruling: Ruling, objection: PeerError | None) -> int:
        """Record what became of a message. One that the rules allowed and that was refused all the same was not let in:
        it stands as denied, without the facts, since no rule refuses it and judged again they would let it in."""
        envelope, decision = arrived.envelope, ruling.decision
        facts = {"final": dict(ruling.facts), "history": ruling.history.to_json()}
        if arrived.ungraded:
            facts["transform"] = {"responses_ungraded": len(arrived.ungraded)}

        def append(detail: Mapping[str, Any] | None = None) -> int:
            return self.dependencies.audit.append(
                "ingress.decision",
                run=envelope.run,
                round=envelope.round,
                step=envelope.step,
                attempt=envelope.attempt,
                kind=envelope.kind,
                sequence=envelope.sequence,
                peer=envelope.sender,
                direction="ingress",
                decision="deny" if objection is not None else decision.verdict,
                reasons=list(decision.reasons) if objection is None else [objection.code],
                facts=facts if objection is None else {},
                policy={"effective": decision.policy_sha256},
                payload=self.dependencies.payload_digest(envelope.kind, arrived.payload),
                detail=detail,
            )

        allowed = objection is None and decision.verdict == "allow"
        if not allowed or not polls.is_empty(envelope.kind, arrived.body):
            return append()
        window = self._polls.take(
            envelope.sender,
            envelope.kind,
            run=envelope.run,
            policy=decision.policy_sha256,
            now=self.dependencies.ingress.now_seconds(),
            sequence=envelope.sequence,
            decide=append,
        )
        window.passed(arrived.payload.size_bytes)
        return window.decision

"""What each message from a silo does, once it has passed the ingress; and the parts that the coordinator's core is made
of. Runs inside the driver's lock and transaction.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import outbox
from coordinator import store as db
from coordinator.aggregate import l2_norm
from coordinator.blobs import AnyPayload, Blobs
from coordinator.ingress import Agreed, Arrived, Ingress, check_hello, check_kept, facts_as_fields, hello_as_fields
from coordinator.outbox import Replies, Reply
from coordinator.runs import ActiveRun
from coordinator.witnessing import Relay
from fedsilo.audit.checkpoint import Checkpoint
from fedsilo.audit.log import AuditLog
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.method import SiloAbstained, SiloLeft
from fedsilo.protocol.place import Place, Placed

CONTRIBUTIONS = frozenset(kind for kind in OUTBOUND_KINDS if not kind.startswith("control."))


@dataclass
class Parts:
    """What a driver is put together from; `daemon.Coordinator` makes one from a configuration.

    Attributes:
        replies: makes what seals every reply.
    """

    federation: str
    spiffe_id: str
    signing_key: Ed25519PrivateKey
    silos: tuple[str, ...]
    agreed: Agreed
    store: db.Store
    blobs: Blobs
    audit: AuditLog
    ingress: Ingress
    now: Callable[[], str]
    monotonic: Callable[[], float]
    publish: Callable[[str, dict[str, Any]], None]
    finished: Callable[[Session, db.Run], None]
    payload_digest: Callable[[str, AnyPayload], dict[str, Any]]
    poll_wait_seconds_max: float = 30.0
    replies: Callable[..., Replies] = Replies


@dataclass
class MemberState:
    """What a silo was last seen doing; and how it stands since this coordinator started."""

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


log = logging.getLogger("fedsilo.coordinator")


@dataclass(frozen=True)
class Prepared:
    """What `Effects.prepare` found.

    Attributes:
        objection: why the message cannot be carried out; None where it can.
        taken: of a checkpoint, what was countersigned.
        l2: of tensors, their norm as the rules measured it; None where they did not.
        adapter: that a silo may fetch.
    """

    objection: PeerError | None = None
    taken: Checkpoint | None = None
    l2: float | None = None
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


class Effects:
    """One method per kind.

    Args:
        parts: of the driver.
        runs: the driver's runs that have not ended, by name.
        seen: what each silo was last seen doing.
        notify: wakes waiting polls.
        last_sent: the highest sequence that was given to a silo, or a higher one.
    """

    def __init__(
        self,
        parts: Parts,
        runs: dict[str, ActiveRun],
        seen: dict[str, MemberState],
        notify: Callable[[], None],
        last_sent: Callable[[Session, str], int],
    ) -> None:
        self._parts = parts
        self._runs = runs
        self._seen = seen
        self._notify = notify
        self._last_sent = last_sent
        self.relay = Relay(parts.audit, parts.silos)

    def prepare(self, session: Session, peer: PeerIdentity, arrived: Arrived) -> Prepared:
        """Whether a message that the rules allow can be carried out, before the log says that it was let in.

        Raises:
            OperationError: our memory of a silo's log cannot be stored.
        """
        try:
            return self._prepare(session, peer, arrived)
        except PeerError as error:
            return Prepared(error)

    def _prepare(self, session: Session, peer: PeerIdentity, arrived: Arrived) -> Prepared:
        silo, envelope, body = arrived.silo, arrived.envelope, arrived.body
        match body:
            case pb.Hello():
                check_hello(body, self._parts.agreed, silos=len(self._parts.silos))
            case pb.Fetch():
                return Prepared(adapter=self._adapter(session, body))
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

    def carry_out(self, session: Session, peer: PeerIdentity, arrived: Arrived, prepared: Prepared) -> Taken:
        """Do what an allowed message asks for. Raises PeerError: what `prepare` had against it."""
        silo, envelope, body = arrived.silo, arrived.envelope, arrived.body
        state = self._seen[silo]
        state.greetings = state.greetings + 1 if isinstance(body, pb.Hello) else 0
        if isinstance(body, pb.Hello):
            return self._hello(session, peer, silo, body)  # one that is refused is kept, too
        if prepared.objection is not None:
            raise prepared.objection
        match body:
            case pb.Poll():
                self._acknowledge(session, silo, body.acknowledged_sequence)
                if body.countersignature:
                    self._countersign(session, peer, body.countersignature)
                return ack()
            case pb.Fetch():
                return Taken(Place(envelope.run, envelope.round, 0, "global.adapter"), None, prepared.adapter)
            case pb.Checkpoint():
                return Taken(
                    Place("", 0, 0, "control.checkpoint"), self.relay.answer(session, peer, body, prepared.taken)
                )
            case pb.Progress():
                if (run := self._runs.get(envelope.run)) is not None:
                    state.run, state.round, state.step = run.name, body.round, body.step
                    run.apply(session, rounds.Progressed(silo, body.round, body.step))
                self._parts.publish(
                    "silo.progress", {"silo": silo, "run": envelope.run, "round": body.round, "step": body.step}
                )
                return ack()
            case pb.ErrorReport():
                state.error = body.code
                self._parts.publish("silo.error", {"silo": silo, "run": envelope.run, "code": body.code})
                if (run := self._runs.get(envelope.run)) is not None and silo in run.plan.silos:
                    number = run.life.open_round
                    db.note_error(session, run=run.name, round_number=number, silo=silo, code=body.code)
                return ack()
            case pb.Declined() | pb.Abstain():
                return self._abstain(session, silo, envelope, body)
            case _ if envelope.kind in CONTRIBUTIONS:
                return self._contribution(session, arrived, prepared.l2)
        return ack()

    def _hello(self, session: Session, peer: PeerIdentity, silo: str, hello: pb.Hello) -> Taken:
        member = db.Member(
            silo=silo,
            state="joined",
            hello=db.as_json(hello_as_fields(hello)),
            fingerprint=peer.fingerprint,
            refusal="",
            since=self._parts.now(),
        )
        try:
            member.hello = db.as_json(
                facts_as_fields(check_hello(hello, self._parts.agreed, silos=len(self._parts.silos)))
            )
        except PeerError as error:
            self._seen[silo].greetings = 0
            self._refuse(member, error)
            session.merge(member)
            raise
        session.merge(member)
        self._seen[silo].refusal = None
        session.execute(delete(db.CarriedSilo).where(db.CarriedSilo.silo == silo))  # `transfer` says where it is one
        session.flush()
        if self._seen[silo].greetings > 1:
            # Whoever believes the answer to hello goes on to exchange checkpoints.
            log.warning(
                "%s says hello again and nothing else: it was cut off, or it does not believe this coordinator's "
                "answers (is its id/coordinator.pub the key of %s?)",
                peer.spiffe_id,
                self._parts.spiffe_id,
            )
        self._parts.publish("silo.joined", {"silo": silo, "isolation": hello.isolation, "role": hello.role})
        for run in self._runs.values():
            if silo in run.accepted:
                self._note_isolation(session, run, silo)
        return ack()

    def _refuse(self, member: db.Member, error: PeerError) -> None:
        refusal = {"code": error.code, "field": error.field, "expected": error.expected, "got": error.got}
        member.state, member.refusal = "refused", db.as_json(refusal)
        self._parts.publish("silo.refused", {"silo": member.silo, **refusal})

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

    def _adapter(self, session: Session, fetch: pb.Fetch) -> AnyPayload:
        payload = self._parts.blobs.find(fetch.digest) if db.is_adapter(session, fetch.digest) else None
        if payload is None:
            raise PeerError(WireCode.NOT_FOUND, f"there is no adapter {fetch.digest[:64]!r}", field="digest")
        return payload

    def _abstain(self, session: Session, silo: str, envelope: pb.Envelope, body: pb.Declined | pb.Abstain) -> Taken:
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
        self._notify()
        return ack()

    def _contribution(self, session: Session, arrived: Arrived, l2: float | None) -> Taken:
        silo, envelope = arrived.silo, arrived.envelope
        run = self._run_of(envelope, silo)
        kept = self._parts.blobs.keep(arrived.payload)
        norm = l2 or (l2_norm(kept) if arrived.tensors is not None else 0.0)
        db.keep_upload(
            session,
            run=run.name,
            round=envelope.round,
            step=envelope.step,
            kind=envelope.kind,
            silo=silo,
            digest=kept.digest,
            payload_bytes=kept.size_bytes,
            norm=norm,
            received_at=self._parts.now(),
        )
        if isinstance(arrived.body, pb.MetricsEval):
            self._keep_metrics(session, run.name, silo, envelope.round, arrived.body)
        log.info(
            "run %s round %d: %s of %s taken (%d bytes)", run.name, envelope.round, envelope.kind, silo, kept.size_bytes
        )
        self._parts.publish(
            "upload",
            {
                "run": run.name,
                "round": envelope.round,
                "step": envelope.step,
                "silo": silo,
                "kind": envelope.kind,
                "bytes": kept.size_bytes,
            },
        )
        run.apply(session, contribution_of(arrived), arrived.body)
        self.forget_ended()
        self._notify()
        return ack()

    def _keep_metrics(self, session: Session, run: str, silo: str, number: int, body: pb.MetricsEval) -> None:
        fields = {"split": body.split, "adapter_digest": body.adapter_digest}
        figures, where = list[dict[str, Any]](), {"run": run, "round": number, "step": 0, "silo": silo}
        for metric in body.metrics:
            values = fields | {"topic": metric.topic, "value": metric.value}
            figures.append(where | {"name": f"metric.{metric.name}", "fields": db.as_json(values)})
            if not metric.topic:
                self._parts.publish(
                    "metric", {"run": run, "round": number, "silo": silo, "name": metric.name, "value": metric.value}
                )
        db.keep_figures(session, figures)

    def _acknowledge(self, session: Session, silo: str, sequence: int) -> None:
        """Drop what the silo has taken in; a plan that is taken in is accepted unless it is declined."""
        # whatever number it names, it took in no more than was sent to it
        for item in outbox.take_in(session, silo, min(sequence, self._last_sent(session, silo))):
            run = self._runs.get(item.run)
            if item.kind == "run.plan" and run is not None:
                self._note_isolation(session, run, silo)
                run.apply(session, rounds.PlanTaken(silo))
                self._notify()
        self.forget_ended()

    def _countersign(self, session: Session, peer: PeerIdentity, signature: bytes) -> None:
        """A silo's signature under the transcript of a round that is open; polls do not say of which run."""
        for run in self._runs.values():
            if peer.name in run.silos and run.countersign(session, peer, signature):
                self._notify()

    def note_refused(self, session: Session, arrived: Arrived) -> None:
        """That the charter refused a silo's update of the open round; it may come with another."""
        envelope, run = arrived.envelope, self._runs.get(arrived.envelope.run)
        if run is not None and envelope.kind == run.plan.lora.update_kind:
            run.apply(session, rounds.UpdateRefused(arrived.silo, envelope.round))

    def _run_of(self, envelope: pb.Envelope, silo: str) -> ActiveRun:
        run = self._runs.get(envelope.run)
        if run is None or silo not in run.silos:
            raise PeerError(WireCode.NO_SUCH_RUN, f"{silo} has no part in a run {envelope.run[:64]!r}")
        return run

    def forget_ended(self) -> None:
        for run in [run for run in self._runs.values() if run.life.over]:
            del self._runs[run.name]
            self._parts.store.once_undone(functools.partial(self._runs.setdefault, run.name, run))

"""One run: what `protocol.rounds` accepts is kept, told to the method's coordinator half, and carried out.

Everything an event changes (the event itself, state of the run, outbox, uploads) goes into the caller's one
transaction, so after a crash either all of it is there or none; where the transaction fails, the run in memory is what
it was before. A restarted coordinator folds `transitions` again and stands where it stood.

Before a round begins, the silos sign its transcript (T20). It is made, signed, recorded and stored with the first
round.open of a round, and goes to every silo of the roster. Their signatures come with their polls. When nobody is left
to wait for, or when the time for it has passed and enough have signed, those who signed get everybody's signatures with
`round.agreed`, and so do silos without a line, which sign later; when one more signs later, all get them again. The
method knows nothing of this: it opened the round, and waits for what the silos give.

What it does not stop: silos that sign and then train on something else.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from sqlalchemy import select
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import outbox
from coordinator import store as db
from coordinator.aggregate import NAME as DRIFT
from coordinator.aggregate import AggregateRefusedError, ServerState, aggregate, drift_note, shift_note
from coordinator.blobs import AnyPayload, Blobs, whole
from coordinator.ingress import Ingress
from coordinator.outbox import Replies
from fedsilo.audit.log import AuditLog
from fedsilo.files.run_request import Agreed
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import ElementWise
from fedsilo.protocol.codec import FactorsReader, decode, encode
from fedsilo.protocol.errors import ConflictError, OperationError, PeerError, WireCode
from fedsilo.protocol.kinds import OUTBOUND_KINDS, TENSOR_KINDS
from fedsilo.protocol.method import (
    EVERYBODY,
    CloseRound,
    Commit,
    Committed,
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
    FinishRun,
    MessageArrived,
    Note,
    Result,
    RunStarted,
    Send,
    SiloCame,
    SiloLeft,
    StartDeadline,
)
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import SHIFTING, Plan
from fedsilo.protocol.rounds import CONFLICT, ROUND_OVER, Effect, Verdict, possible
from fedsilo.protocol.swap import pool_digests
from fedsilo.protocol.transcript import (
    RoundEnd,
    Transcript,
    is_signed,
    needed,
    results_in,
    sign_end,
    sign_transcript,
    transcript_from_canonical,
)
from policies.kinds.public_responses import blank_responses
from policies.message import Requests

# ---- the transcript of a round -----------------------------------------------------------------------------------

log = logging.getLogger("fedsilo.coordinator")

_COUNTERSIGNED = select(db.Countersigned.silo, db.Countersigned.witness)

ROUND_SHARE = 4  # the part of a round's time that signing it may take, at most


@dataclass(frozen=True)
class Agreements:
    """Makes the transcript of each round, takes the signatures under it, and records both.

    Args:
        coordinator_id: SPIFFE id.
        signing_key: the coordinator's.
        min_peers: of its charter.
        record: appends to the audit log what a transaction changes, once it is durable.
    """

    coordinator_id: str
    signing_key: Ed25519PrivateKey
    min_peers: int
    record: Callable[..., Any]

    # ---- a round opens -------------------------------------------------------------------------------

    def opening(
        self, session: Session, plan: Plan, number: int, body: pb.RoundOpen, roster: tuple[str, ...]
    ) -> tuple[pb.RoundOpen, bool]:
        """A method's round.open with the round's transcript, and whether that was made with it.

        Args:
            session: the caller's transaction.
            plan: of the run.
            number: of the round.
            body: as the method made it.
            roster: silos that take part.

        Raises:
            OperationError: TRANSCRIPT, it would be one that no party can read. It is not signed.
        """
        row = session.get(db.RoundTranscript, (plan.run, number))
        made = row is None
        if row is None:
            transcript = Transcript(
                federation=plan.federation,
                run=plan.run,
                round=number,
                silos=roster,
                plan_sha256=plan.digest,
                policies={silo: _policy_of(session, silo) for silo in roster},
                base_digest=body.base_digest,
                schema_sha256=plan.lora.schema_sha256,
                public_set_sha256=plan.public_set_sha256,
                pool=_pool_of(session, plan, number),
                # more than the quorum where a policy was tightened since
                min_updates=max(min_updates_of(session, roster), plan.quorum),
            )
            _check_readable(transcript)
            signature = sign_transcript(transcript, self.coordinator_id, self.signing_key)
            row = db.RoundTranscript(
                run=plan.run,
                round=number,
                digest=transcript.digest,
                canonical=transcript.canonical(),
                signature=signature,
                state="signing",
            )
            detail = {"sha256": transcript.digest, "transcript": transcript.to_json()}
            detail |= {"party": self.coordinator_id, "signature": signature.hex()}
            session.add(row)
            session.flush()
            self.record(session, "round.transcript", run=plan.run, round=number, kind="round.open", detail=detail)
        whole = pb.RoundOpen()
        whole.CopyFrom(body)
        whole.transcript, whole.transcript_signature = row.canonical, row.signature
        return whole, made

    # ---- signatures ----------------------------------------------------------------------------------

    def countersign(self, session: Session, plan: Plan, number: int, peer: PeerIdentity, signature: bytes) -> bool:
        """Keep a silo's signature under the open round's transcript. False: it is none, or was there already."""
        row = session.get(db.RoundTranscript, (plan.run, number))
        if row is None or session.get(db.RoundSignature, (plan.run, number, peer.name)) is not None:
            return False
        transcript = transcript_from_canonical(row.canonical)
        good = is_signed(transcript, peer.spiffe_id, peer.signing_public_key, signature)
        if peer.name not in transcript.silos or not good:
            # of the round before, most of the time: it is said with every poll until round.agreed is taken in
            log.info("%s: no signature under the transcript of round %d of %s", peer.spiffe_id, number, plan.run)
            return False
        session.add(
            db.RoundSignature(
                run=plan.run,
                round=number,
                silo=peer.name,
                signature=signature,
                public_key=peer.signing_public_key.public_bytes_raw(),
                certificate=peer.certificate_pem.decode("ascii"),
                delivered=False,
            )
        )
        session.flush()
        return True

    def look(
        self, session: Session, plan: Plan, number: int, *, out: frozenset[str], deadline_passed: bool = False
    ) -> list[tuple[str, bytes]]:
        """Return who gets `round.agreed` now: (silo, payload).

        Args:
            session: the caller's transaction.
            plan: of the run.
            number: of the open round.
            out: silos that take no part in it.
            deadline_passed: the time to sign has passed, at this moment or before.
        """
        row = session.get(db.RoundTranscript, (plan.run, number))
        if row is None:
            return []
        if deadline_passed and row.state == "signing":
            row.state = "late"
        transcript, signed = transcript_from_canonical(row.canonical), signatures(session, plan.run, number)
        unsigned = set(transcript.silos) - {each.silo for each in signed} - out
        enough = len(signed) >= needed(len(plan.silos), min_peers=self.min_peers, quorum=plan.quorum)
        # Their signatures come in the file that their updates come in (`coordinator.transfer`).
        by_files = unsigned & db.carried_silos(session) if enough else frozenset()
        waited_for = unsigned - by_files
        if not signed or (row.state != "agreed" and waited_for and not (row.state == "late" and enough)):
            return []
        waiting = [each for each in signed if not each.delivered]
        if not waiting:
            return []
        row.state = "agreed"
        keys = {each.silo: each.public_key.hex() for each in signed}
        detail = {
            "sha256": row.digest,
            "signatures": {each.silo: each.signature.hex() for each in signed},
            "keys": keys,
        }
        for each in waiting:
            each.delivered = True
        self.record(session, "round.agreed", run=plan.run, round=number, kind="round.agreed", detail=detail)
        # Also who had fewer of them before: its own policy may ask for more than the plan does.
        receivers = [each.silo for each in signed if each.silo not in out] + sorted(by_files)
        # who has countersigned a silo's log knows its key
        known = {(each.silo, each.witness) for each in session.execute(_COUNTERSIGNED)}
        return [(silo, _agreed(row, signed, known, silo)) for silo in receivers]

    # ---- a round ends --------------------------------------------------------------------------------

    def result(self, session: Session, plan: Plan, number: int, silo: str, body: pb.RoundResult) -> pb.RoundResult:
        """A method's round.result for a silo, as `end` completes it.

        Raises:
            OperationError: the method ends one round in two ways, or gives a silo another's result; the coordinator
                signs no such end.
        """
        results = db.results_of(session, plan.run, number)
        if results and body.adapter_digest != (results[silo].digest if silo in results else ""):
            raise OperationError(f"round {number} of {plan.run} ends for {silo} with the result of another")
        return self.end(session, plan, number, body)

    def end(self, session: Session, plan: Plan, number: int, body: pb.RoundResult) -> pb.RoundResult:
        """The end of a round with the transcript that it belongs to, a verdict on each silo of it, and whether it was
        closed; recorded once, also where no silo is left that could be told of it.

        It is signed for itself, so that two silos that were told of two ends can prove it. Where each silo has a result
        of its own, all are given the table of them, and so the same end to compare.

        Raises:
            OperationError: the round ends in two ways.
        """
        row = session.get(db.RoundTranscript, (plan.run, number))
        whole = pb.RoundResult()
        whole.CopyFrom(body)
        whole.closed = session.get_one(db.Round, (plan.run, number)).state == "closed"
        for each in db.results_of(session, plan.run, number).values():
            given = json.loads(each.participants)
            whole.results.add(receiver=each.receiver, adapter_digest=each.digest, participants=given)
        if row is None:
            return whole
        whole.transcript_sha256 = row.digest
        query = select(db.Upload.silo).where(
            db.Upload.run == plan.run,
            db.Upload.round == number,
            db.Upload.kind == method_named(plan.method).update_kind(plan, number),
        )
        gave = set(session.scalars(query))
        transcript = transcript_from_canonical(row.canonical)
        for silo in transcript.silos:
            verdict = "accepted" if silo in body.participants else "left_out" if silo in gave else "absent"
            whole.verdicts.add(silo=silo, verdict=verdict)
        signed = sign_end(RoundEnd.of(transcript, whole), self.coordinator_id, self.signing_key)
        fields, ended = db.as_json(signed.end.to_json()), session.get(db.EndedRound, (plan.run, number))
        if ended is not None and ended.fields != fields:
            raise OperationError(f"round {number} of {plan.run} ends in two ways")
        whole.result_signature = signed.signature
        if ended is None:
            row.state = "over"
            session.add(db.EndedRound(run=plan.run, round=number, fields=fields, signature=signed.signature))
            detail = signed.to_detail(results_in(whole))
            self.record(session, "round.result", run=plan.run, round=number, kind="round.result", detail=detail)
        return whole


def _agreed(
    row: db.RoundTranscript, signed: list[db.RoundSignature], known: set[tuple[str, str]], receiver: str
) -> bytes:
    """known: (silo, receiver) where the receiver needs no certificate of the silo."""
    body = pb.RoundAgreed(transcript_sha256=row.digest)
    for each in signed:
        needless = each.silo == receiver or (each.silo, receiver) in known
        body.countersignatures.add(
            silo=each.silo,
            transcript_sha256=row.digest,
            signature=each.signature,
            certificate_pem="" if needless else each.certificate,
        )
    return encode(body)


def signatures(session: Session, run: str, number: int) -> list[db.RoundSignature]:
    """Return the signatures of one round, by silo."""
    query = select(db.RoundSignature).where(db.RoundSignature.run == run, db.RoundSignature.round == number)
    return list(session.scalars(query.order_by(db.RoundSignature.silo)))


def figures(session: Session, run: str, number: int) -> dict[str, Any]:
    """Return what the run record says of a round's transcript; nothing of a round that has none."""
    row, ended = session.get(db.RoundTranscript, (run, number)), session.get(db.EndedRound, (run, number))
    if row is None:
        return {}
    return {
        "sha256": row.digest,
        "transcript": json.loads(row.canonical),
        "signature": row.signature.hex(),
        "countersignatures": {
            each.silo: {"signature": each.signature.hex(), "key": each.public_key.hex()}
            for each in signatures(session, run, number)
        },
        "result": {**json.loads(ended.fields), "signature": ended.signature.hex()} if ended is not None else {},
    }


def _pool_of(session: Session, plan: Plan, number: int) -> dict[str, str]:
    """Return whose answers are a round's donors: those that were taken in the round before."""
    if plan.exchange != "round_end":
        return {}
    upload = db.Upload
    taken = select(upload.silo, upload.kind, upload.step, upload.digest).where(
        upload.run == plan.run, upload.round == number - 1
    )
    accepted = [(row.silo, row.kind, row.step, row.digest) for row in session.execute(taken)]
    return pool_digests(accepted, method_named(plan.method).update_kind(plan, number - 1))


def _policy_of(session: Session, silo: str) -> str:
    """Digest of the policy that a silo said it is under; empty where it has not joined."""
    return str(_said(session, silo).get("policy_sha256", ""))


def min_updates_of(session: Session, silos: Iterable[str]) -> int:
    """The largest number of updates that the policies of these silos ask for in a mean, as each said in its hello; 0
    where none has said one yet."""
    return max((int(_said(session, silo).get("min_updates", 0)) for silo in silos), default=0)


def _check_readable(transcript: Transcript) -> None:
    """Check a transcript as its receivers do. Raises OperationError: `transcript_from_canonical` refuses it."""
    try:
        transcript_from_canonical(transcript.canonical())
    except PeerError as error:
        raise OperationError(
            f"round {transcript.round} of {transcript.run}: no party could read its transcript, so it is not signed: "
            f"{error.message}",
            hint="compare what the silos said in their hello: `coordinator silos list --json`",
            code="TRANSCRIPT",
        ) from error


def min_updates_of_round(session: Session, run: str, number: int) -> int:
    """The least number of updates that a round's transcript binds; 0 where it binds none, as in protocol 1."""
    row = session.get(db.RoundTranscript, (run, number))
    return transcript_from_canonical(row.canonical).min_updates if row is not None else 0


def _said(session: Session, silo: str) -> dict[str, Any]:
    """Fields of a silo's hello; none of one that was refused, which is kept for people to see."""
    member = session.get(db.Member, silo)
    return dict(json.loads(member.hello)) if member is not None and member.state == "joined" else {}


# ---- one run -----------------------------------------------------------------------------------------------------


@dataclass
class Dependencies:
    """Dependencies of a driver and its runs; `main.Coordinator` makes them from a configuration.

    Attributes:
        now: UTC, ISO 8601.
        monotonic: seconds, for deadlines and durations only.
        publish: tells watchers (name, fields).
        finished: writes adapter folder and run record of a run that ended.
        payload_digest: what the audit log says of a payload of that kind.
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
class ActiveRun:
    """A run with a plan.

    Attributes:
        life: its state in the tables.
        asked: what was asked of each silo beside public steps.
    """

    plan: Plan
    dependencies: Dependencies
    agreements: Agreements
    asked: Mapping[str, Requests] = field(default_factory=dict)
    _opened_at: dict[int, float] = field(default_factory=dict)
    _ordinal: int = 0  # of the next event that is kept; 0 where the database is to be asked

    def __post_init__(self) -> None:
        self.method = method_named(self.plan.method)
        self.life = first_life(self.plan)
        self._state: Any = self.method.coordinator.start(self.plan, "coordinator")

    @property
    def name(self) -> str:
        return self.plan.run

    @property
    def silos(self) -> tuple[str, ...]:
        """Return the silos that are in the run, or may still come."""
        return tuple(silo for silo in self.plan.silos if self.life.standing[silo] != "out")

    @property
    def accepted(self) -> tuple[str, ...]:
        """Return the silos that accepted the plan and are in the run."""
        return self.life.those("accepted")

    # ---- orders --------------------------------------------------------------------------------------

    def offer_plan(self, session: Session) -> None:
        """Queue the signed plan for every silo of the roster."""
        body = encode(pb.RunPlan(canonical_json=self.plan.canonical()))
        for silo in self.plan.silos:
            outbox.queue(session, silo, Place(self.name, 0, 0, "run.plan"), body)
        self.apply(session, StartDeadline(rounds.JOIN, self.plan.join_deadline_seconds))

    def abort(self, session: Session) -> None:
        """End at once."""
        self.apply(session, FinishRun("aborted", "ABORTED"))

    def pause(self, session: Session) -> None:
        """Deliver nothing and let no deadline pass until resumed."""
        self.apply(session, rounds.RunPaused())

    def resume(self, session: Session) -> None:
        self.apply(session, rounds.RunResumed())

    def countersign(self, session: Session, peer: PeerIdentity, signature: bytes) -> bool:
        """A silo signed the open round's transcript. False: it did not."""
        number = self.life.open_round
        if not self.agreements.countersign(session, self.plan, number, peer, signature):
            return False
        self.apply(session, rounds.Signed(peer.name, number))
        return True

    # ---- the fold ------------------------------------------------------------------------------------

    def judged(self, event: rounds.Event) -> rounds.Outcome:
        """Return what the tables say of an event; nothing changes."""
        return rounds.step(self.life, event, self.dependencies.monotonic())

    def check(self, event: rounds.Event) -> rounds.Outcome:
        """Judge an event as `judged` does. Raises ConflictError, PeerError: the tables refuse it."""
        outcome, name = self.judged(event), rounds.name_of(self.life, event)
        if outcome.verdict is not Verdict.REFUSED:
            return outcome
        if outcome.code == CONFLICT:
            raise ConflictError(f"cannot {name} what is {self.life.state}", hint=possible(self.life.state))
        code, silo, asked = WireCode(outcome.code), getattr(event, "silo", ""), getattr(event, "round", 0)
        if code is WireCode.NO_SUCH_RUN:
            raise PeerError(code, f"{silo} has no part in a run {self.name!r}")
        if code is not WireCode.ROUND_CLOSED:
            raise PeerError(code, f"{name} of {silo} for round {asked}: another is there, or the round is to come")
        number = self.life.open_round
        raise PeerError(
            code,
            f"{name} of {silo} came for round {asked}; open is {number or 'none'}",
            field="round",
            expected=str(number),
            got=str(asked),
        )

    def apply(self, session: Session, event: rounds.Event, body: Message | None = None) -> bool:
        """Keep an event and carry out what it leads to, all in the caller's transaction. False: it is to be ignored.

        Args:
            session: the transaction.
            event: what happened.
            body: of a contribution, its parsed payload.

        Raises:
            ConflictError, PeerError: the tables refuse it.
        """
        outcome = self.check(event)
        if outcome.verdict is Verdict.IGNORED:
            return False
        pending = deque(self._taken(session, event, outcome, body))
        while pending:
            pending.extend(self._must(session, pending.popleft()))
        return True

    def _must(self, session: Session, event: rounds.Event) -> list[rounds.Event]:
        """An event that the run itself causes. Raises OperationError: the tables refuse it, a fault of ours."""
        try:
            outcome = self.check(event)
        except ConflictError as error:
            raise OperationError(f"run {self.name}: {error.message}") from error
        return self._taken(session, event, outcome) if outcome.verdict is Verdict.ACCEPTED else []

    def _taken(
        self, session: Session, event: rounds.Event, outcome: rounds.Outcome, body: Message | None = None
    ) -> list[rounds.Event]:
        """Keep one accepted event and carry its effects out. Returns the events that follow from it."""
        before, snapshot = self.life, (self.life, self._state, self.asked, self._ordinal)
        self.dependencies.store.once_undone(lambda: self._restore(*snapshot))
        ordinal = self._ordinal or db.next_ordinal(session, self.name)
        db.keep_transition(session, self.name, ordinal, db.as_json(rounds.to_fields(event)))
        self.life, self._ordinal = outcome.life, ordinal + 1
        if self.life.state != before.state:
            self._row(session).state = self.life.state
        if before.round == self.life.round and before.round_state != self.life.round_state:
            session.get_one(db.Round, (self.name, before.round)).state = self.life.round_state
        session.flush()
        follow: list[rounds.Event] = []
        for effect in outcome.effects:
            if effect is Effect.TELL:
                follow += self._tell(session, event, body)
            else:
                follow += self._carry_out(session, effect, event, before)
        if outcome.then == "start":
            follow.append(RunStarted(self.accepted, self._row(session).base_digest))
        elif outcome.then == "give up":
            follow.append(rounds.GivenUp("QUORUM_NOT_REACHED"))
        return follow

    def _restore(self, *before: Any) -> None:
        self.life, self._state, self.asked, self._ordinal = before

    def _told(self, event: rounds.Event, body: Message | None) -> CoordinatorEvent:
        """An event as the method knows it."""
        if isinstance(event, rounds.PlanTaken):
            return SiloCame(event.silo)
        if not isinstance(event, rounds.Contribution):
            return cast(CoordinatorEvent, event)
        if body is None:
            body = body_of(event, self.dependencies.blobs)
        if event.ungraded and isinstance(body, pb.PublicResponses):
            body = blank_responses(body, event.ungraded)
        return MessageArrived(event.silo, event.kind, event.round, event.step, body, event.digest)

    def _tell(self, session: Session, event: rounds.Event, body: Message | None) -> list[rounds.Event]:
        self._state, actions = self.method.coordinator.on_event(self._state, self._told(event, body))
        return [each for action in actions for each in self._act(session, action)]

    def replay(self, session: Session) -> None:
        """Fold the stored events again, without their effects: those are in the database already. Where the method ends
        the run by them, and did not when they were stored (as another version), it ends now: nothing else would end it.

        Raises:
            OperationError: the events do not make the state that the run and its newest round are in.
        """
        ended: FinishRun | None = None
        for event in stored_events(session, self.name):
            outcome = self.judged(event)
            if outcome.verdict is not Verdict.ACCEPTED:
                raise OperationError(f"run {self.name}: its stored {rounds.name_of(self.life, event)} does not fit")
            self.life = outcome.life
            if Effect.TELL in outcome.effects:
                self._state, actions = self.method.coordinator.on_event(self._state, self._told(event, None))
                for action in actions:
                    if isinstance(action, Send):
                        self._note_asked(action)
                    elif isinstance(action, FinishRun):
                        ended = action
        newest = session.get(db.Round, (self.name, self.life.round))
        states = self._row(session).state, newest.state if newest is not None else "none"
        folded = self.life.state, self.life.round_state
        if states != folded:
            raise OperationError(
                f"run {self.name} and its newest round are {states} in the database, {folded} by their stored events",
                hint="the database was changed by hand, or is of another version: take it from a backup",
            )
        if ended is not None and not self.life.over:
            self.apply(session, ended)

    # ---- what the method wants -----------------------------------------------------------------------

    def _act(self, session: Session, action: CoordinatorAction) -> list[rounds.Event]:
        match action:
            case Send():
                follow = self._note_round(session, action)
                action = self._with_transcript(session, action)
                self._note_asked(action)
                place = Place(self.name, action.round, action.step, action.kind)
                outbox.queue(session, action.silo, place, encode(action.body))
                return follow
            case StartDeadline():
                return self._must(session, action)
            case Note(name, number, step, fields):
                self._keep_figure(session, number, name, dict(fields), step=step, silo=str(fields.get("silo", "")))
                self.dependencies.publish(f"note.{name}", {"run": self.name, "round": number, "step": step, **fields})
                return []
            case Commit() | CloseRound() | FinishRun():
                return self._must(session, action)

    def _note_round(self, session: Session, action: Send) -> list[rounds.Event]:
        """Note what the tables must know of what the method sends: a round opens, or ends without an adapter."""
        if isinstance(action.body, pb.RoundOpen) and action.round > self.life.round:
            steps = {str(step.step): list(step.prompt_indices) for step in action.body.public_steps}
            session.add(
                db.Round(
                    run=self.name,
                    number=action.round,
                    state="open",
                    base_digest=action.body.base_digest,
                    public_steps=db.as_json(steps),
                    opened_at=self.dependencies.now(),
                )
            )
            session.flush()
            return self._must(session, rounds.RoundOpened(action.round))
        if isinstance(action.body, pb.RoundResult):
            return self._must(session, rounds.RoundAbandoned(action.round))
        return []

    def _with_transcript(self, session: Session, action: Send) -> Send:
        """Add the transcript to a message that opens or ends a round, whatever the method."""
        agreements = self.agreements
        if isinstance(action.body, pb.RoundOpen):
            body, made = agreements.opening(session, self.plan, action.round, action.body, self.accepted)
            if made:  # so long a round waits for the last signature once enough are there
                seconds = min(self.plan.join_deadline_seconds, self.plan.round_deadline_seconds / ROUND_SHARE)
                self._must(session, StartDeadline(f"{rounds.AGREEMENT}{action.round}", seconds))
            return replace(action, body=body)
        if isinstance(action.body, pb.RoundResult):
            return replace(action, body=agreements.result(session, self.plan, action.round, action.silo, action.body))
        return action

    def _note_asked(self, action: Send) -> None:
        of_silo = self.asked.get(action.silo, Requests()).after(action.body, action.step)
        self.asked = {**self.asked, action.silo: of_silo}

    # ---- effects -------------------------------------------------------------------------------------

    def _carry_out(
        self, session: Session, effect: Effect, event: rounds.Event, before: rounds.Life
    ) -> list[rounds.Event]:
        """Do what the tables say. Returns the events that follow from it."""
        match effect, event:
            case Effect.BEGIN, RunStarted(silos):
                self._row(session).started_at = self.dependencies.now()
                self.dependencies.publish("run.started", {"run": self.name, "silos": list(silos)})
            case Effect.WITHDRAW, rounds.PlanDeclined(silo) | SiloLeft(silo):
                self.dependencies.publish("silo.left", {"run": self.name, "silo": silo})
                outbox.withdraw(session, silo, self.name)
            case Effect.NOTE_DECLINED, rounds.PlanDeclined(silo) | SiloLeft(silo):
                self._keep_figure(session, 0, db.PLAN_DECLINED, {}, silo=silo)
            case Effect.AGREE, _:
                self.look_who_signed(session, deadline_passed=isinstance(event, DeadlinePassed))
            case Effect.INVITE, rounds.RoundOpened(number):
                self._opened_at[number] = self.dependencies.monotonic()
                self.dependencies.publish("round.opened", {"run": self.name, "round": number})
            case Effect.AGGREGATE, Commit():
                return self._commit(session, event)
            case Effect.CLOSE, Committed(number) | CloseRound(number) | rounds.RoundAbandoned(number):
                self._close(row := session.get_one(db.Round, (self.name, number)))
                if isinstance(event, CloseRound):
                    row.participants = db.as_json(list(event.silos))
                    self.dependencies.audit.checkpoint()
                if not isinstance(event, rounds.RoundAbandoned):
                    digest = event.digest if isinstance(event, Committed) else row.base_digest
                    end = pb.RoundResult(committed=isinstance(event, Committed), adapter_digest=digest,
                                         participants=json.loads(row.participants))  # fmt: skip
                    self.agreements.end(session, self.plan, number, end)
                if before.round_state == "open":
                    self.dependencies.publish(f"round.{self.life.round_state}", {"run": self.name, "round": number})
            case Effect.SEND_AWAY, _:
                self._send_away(session, self.silos, self.life.state, before.open_round)
            case Effect.DISMISS, _:
                self._send_away(session, self.life.those("asked"), self.life.state, 0)
            case Effect.RECORD, FinishRun(reason=reason) | rounds.GivenUp(reason):
                self._record(session, reason, before)
        return []

    def look_who_signed(self, session: Session, *, deadline_passed: bool = False) -> None:
        """Let the open round begin at those who signed, once nobody is left to wait for."""
        number, out = self.life.open_round, self.life.absent()
        for silo, payload in self.agreements.look(session, self.plan, number, out=out, deadline_passed=deadline_passed):
            outbox.queue(session, silo, Place(self.name, number, 0, "round.agreed"), payload)
            self._must(session, rounds.DeadlineDropped(f"{rounds.AGREEMENT}{number}"))
            self.dependencies.publish("round.agreed", {"run": self.name, "round": number, "silo": silo})

    def _send_away(self, session: Session, silos: Iterable[str], outcome: str, number: int) -> None:
        """The run is over for these silos: what is queued is withdrawn, and whoever was given the plan is told. Else it
        would take itself to be in this run when the next one comes, or join it when its people have looked at the plan.
        """
        body = encode(pb.RunEnd(outcome=outcome, adapter_digest=self._row(session).adapter_digest))
        for silo in silos:
            knows = not outbox.never_given(session, silo, self.name, "run.plan")
            outbox.withdraw(session, silo, self.name)
            if knows:
                outbox.queue(session, silo, Place(self.name, number, 0, "run.end"), body)

    def _record(self, session: Session, reason: str, before: rounds.Life) -> None:
        if before.round_state not in ROUND_OVER and before.round:
            self._close(session.get_one(db.Round, (self.name, before.round)))
        run = self._row(session)
        run.reason, run.ended_at = reason, self.dependencies.now()
        self.dependencies.finished(session, run)
        self.dependencies.publish("run.ended", {"run": self.name, "outcome": run.state, "reason": reason})

    def _commit(self, session: Session, action: Commit) -> list[rounds.Event]:
        row = session.get_one(db.Round, (self.name, action.round))
        fewest = min(len(result.silos) for result in action.results)
        if fewest < min_updates_of_round(session, self.name, action.round):
            # A policy was tightened since the plan was signed: it is not for this run to be committed under (T58).
            event = {"run": self.name, "round": action.round, "reason": "MIN_UPDATES"}
            self.dependencies.publish("round.refused", event)
            return [rounds.RoundAbandoned(action.round), rounds.GivenUp("MIN_UPDATES")]
        try:
            digests = {result.receiver: self._result(session, row, result) for result in action.results}
        except AggregateRefusedError as error:
            # the ingress check lets no such upload in; if one is there, the old adapter stays and people must look
            self.dependencies.publish(
                "round.refused", {"run": self.name, "round": action.round, "reason": error.message}
            )
            return [rounds.RoundAbandoned(action.round), rounds.GivenUp(error.code)]
        silos = [silo for silo in self.plan.silos if any(silo in result.silos for result in action.results)]
        row.participants = db.as_json(silos)
        if adapter := digests.get(EVERYBODY, ""):
            row.adapter_digest = self._row(session).adapter_digest = adapter
            if self.plan.aggregate in SHIFTING:
                self._keep_figure(session, row.number, "shift", shift_note(self.dependencies.blobs.get(adapter)))
            self._note_drift(session, row, action.results[0])
        self.dependencies.audit.checkpoint()
        event = {"run": self.name, "round": action.round, "silos": silos, "seconds": self._seconds(row)}
        self.dependencies.publish("round.committed", event)
        return [Committed(action.round, digests)]

    def _result(self, session: Session, row: db.Round, result: Result) -> str:
        """Make one result of a round, and name it in the database. Returns its digest."""
        blobs, how = self.dependencies.blobs, self.method.aggregate(self.plan, result.silos)
        master = blobs.get(row.base_digest) if isinstance(how, ElementWise) or how.master else None
        before = db.server_state_of(session, self.name, row.number)
        state = ServerState(blobs.get(before) if before else None)
        uploads = [blobs.get(digest) for digest in result.upload_digests]
        fixed = self.method.fixed_in(self.plan, row.number)
        made = aggregate(blobs, master, uploads, how, fixed=fixed, state=state)
        if state.after is not None:
            if result.receiver != EVERYBODY:
                raise OperationError(f"{self.plan.method} keeps a state beside a result that is not for all")
            session.add(db.ServerState(run=self.name, round=row.number, digest=state.after.digest))
        if result.receiver != EVERYBODY:
            participants = db.as_json(list(result.silos))
            where = {"run": self.name, "round": row.number, "receiver": result.receiver}
            session.add(db.RoundResult(**where, digest=made.digest, participants=participants))
        return made.digest

    def _note_drift(self, session: Session, row: db.Round, result: Result) -> None:
        """Note how far apart a round's updates are, where they are differences to an adapter that all silos have,
        and all that the silos train. A failure costs the note, and not the round."""
        if not row.base_digest or self.method.stays != "none":
            return
        try:
            payloads = [self.dependencies.blobs.get(each) for each in (row.base_digest, *result.upload_digests)]
            fields = drift_note(result.silos, payloads[0], payloads[1:])
            for payload in payloads:  # averaged, and the adapter before the newest: this was their last reader
                payload.leave_memory()
        except Exception as error:  # noqa: BLE001  # of any kind: raised, it would undo the commit at every retry
            place, why = {"run": self.name, "round": row.number}, f"{type(error).__name__}: {error}"
            log.warning("run %s round %d: its drift is not noted: %s", self.name, row.number, why, extra=place)
        else:
            self._keep_figure(session, row.number, DRIFT, fields)

    def _keep_figure(
        self, session: Session, number: int, name: str, fields: dict[str, Any], *, step: int = 0, silo: str = ""
    ) -> None:
        where = {"run": self.name, "round": number, "step": step, "silo": silo}
        db.keep_figures(session, [where | {"name": name, "fields": db.as_json(fields)}])

    def _close(self, row: db.Round) -> None:
        row.closed_at, row.seconds = self.dependencies.now(), self._seconds(row)

    def _seconds(self, row: db.Round) -> float:
        """Since a round was opened; by the clock where that was before a restart."""
        opened, now = self._opened_at.get(row.number), self.dependencies.monotonic()
        return row.seconds_until(self.dependencies.now()) if opened is None else round(now - opened, 3)

    def _row(self, session: Session) -> db.Run:
        run = session.get(db.Run, self.name)
        if run is None:
            raise OperationError(f"run {self.name} is not in the database")
        return run


# ---- the journal ------------------------------------------------------------------------------------


def stored_events(session: Session, run: str) -> list[rounds.Event]:
    """Return the accepted events of a run, in their order. Raises OperationError: a stored event is none."""
    query = select(db.Transition.event).where(db.Transition.run == run).order_by(db.Transition.ordinal)
    try:
        return [rounds.from_fields(json.loads(text)) for text in session.scalars(query)]
    except (KeyError, TypeError, ValueError) as error:
        raise OperationError(f"run {run}: what the database keeps of it cannot be read") from error


def first_life(plan: Plan) -> rounds.Life:
    """Return the state of a run whose plan is being sent."""
    method = method_named(plan.method)
    return rounds.first_life(plan, method.update_kinds(plan), evaluates_own=method.evaluates_own)


def stored_life(session: Session, plan: Plan) -> rounds.Life:
    """Return where a run stands by what is stored, its deadlines aside."""
    first = first_life(plan)
    return rounds.folded(first, stored_events(session, plan.run), 0.0)


def body_of(message: rounds.Contribution, blobs: Blobs) -> Message:
    """The parsed payload; of tensors, the header. Raises OperationError: it is missing."""
    payload = blobs.get(message.digest)
    if message.kind in TENSOR_KINDS:
        return FactorsReader(payload, payload.size_bytes).header
    return decode(OUTBOUND_KINDS[message.kind], whole(payload))

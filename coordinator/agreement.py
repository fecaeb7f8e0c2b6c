"""Before a round begins: its transcript, the silos' signatures under it, and `round.agreed` (threat model 7, T20).

The transcript is made, signed, recorded and stored with the first round.open of a round, and goes to every silo of the
roster. Their signatures come with their polls. When nobody is left to wait for, or when the time for it has passed and
enough have signed, those who signed get everybody's signatures, and so do silos without a line, which sign later; when
one more signs later, all get them again. The method knows nothing of this: it opened the round, and waits for what the
silos give.

What it does not stop: silos that sign and then train on something else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import store as db
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import encode
from fedsilo.protocol.donor_pool import pool_digests
from fedsilo.protocol.errors import OperationError, PeerError
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.transcript import (
    RoundEnd,
    Transcript,
    is_signed,
    needed,
    sign_end,
    sign_transcript,
    transcript_from_canonical,
)

log = logging.getLogger("fedsilo.coordinator")

_COUNTERSIGNED = select(db.Countersigned.silo, db.Countersigned.witness)

ROUND_SHARE = 4  # the part of a round's time that signing it may take, at most


def seconds_for(plan: Plan) -> float:
    """How long a round waits for the last signature once enough are there."""
    return min(plan.join_deadline_seconds, plan.round_deadline_seconds / ROUND_SHARE)


@dataclass(frozen=True)
class Agreements:
    """Args:
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
                min_updates=_min_updates(session, plan, roster),
            )
            _check_readable(transcript)
            signature = sign_transcript(transcript, self.coordinator_id, self.signing_key)
            row = db.RoundTranscript(
                run=plan.run, round=number, digest=transcript.digest, canonical=transcript.canonical(),
                signature=signature, state="signing",
            )  # fmt: skip
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
                run=plan.run, round=number, silo=peer.name, signature=signature,
                public_key=peer.signing_public_key.public_bytes_raw(), certificate=peer.certificate_pem.decode("ascii"),
                delivered=False,
            )
        )  # fmt: skip
        session.flush()
        return True

    def look(
        self, session: Session, plan: Plan, number: int, *, out: frozenset[str], deadline_passed: bool = False
    ) -> list[tuple[str, bytes]]:
        """Who is to get `round.agreed` at this moment: (silo, payload).

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

    def result(self, session: Session, plan: Plan, number: int, body: pb.RoundResult) -> pb.RoundResult:
        """A method's round.result with the transcript that it belongs to and a verdict on each silo of it; recorded.

        It is signed for itself, so that two silos that were told of two ends can prove it.

        Raises:
            OperationError: the method ends one round in two ways; the coordinator signs no second one.
        """
        row = session.get(db.RoundTranscript, (plan.run, number))
        whole = pb.RoundResult()
        whole.CopyFrom(body)
        if row is None:
            return whole
        whole.transcript_sha256 = row.digest
        query = select(db.Upload.silo).where(
            db.Upload.run == plan.run, db.Upload.round == number, db.Upload.kind == plan.lora.update_kind
        )
        gave = set(session.scalars(query))
        transcript = transcript_from_canonical(row.canonical)
        for silo in transcript.silos:
            verdict = "accepted" if silo in body.participants else "left_out" if silo in gave else "absent"
            whole.verdicts.add(silo=silo, verdict=verdict)
        signed = sign_end(RoundEnd.of(transcript, whole), self.coordinator_id, self.signing_key)
        fields, kept = db.as_json(signed.end.to_json()), session.get(db.EndedRound, (plan.run, number))
        if kept is not None and kept.fields != fields:
            raise OperationError(f"round {number} of {plan.run} ends in two ways")
        whole.result_signature = signed.signature
        if kept is None:
            row.state = "over"
            session.add(db.EndedRound(run=plan.run, round=number, fields=fields, signature=signed.signature))
            detail = signed.to_detail()
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
            silo=each.silo, transcript_sha256=row.digest, signature=each.signature,
            certificate_pem="" if needless else each.certificate,
        )  # fmt: skip
    return encode(body)


def signatures(session: Session, run: str, number: int) -> list[db.RoundSignature]:
    """Of one round, by silo."""
    query = select(db.RoundSignature).where(db.RoundSignature.run == run, db.RoundSignature.round == number)
    return list(session.scalars(query.order_by(db.RoundSignature.silo)))


def figures(session: Session, run: str, number: int) -> dict[str, Any]:
    """What the run record says of a round's transcript; nothing of a round that has none."""
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
    """Of a round, whose answers are its donors: what was taken in the round before."""
    if plan.exchange != "round_end":
        return {}
    upload = db.Upload
    taken = select(upload.silo, upload.kind, upload.step, upload.digest).where(
        upload.run == plan.run, upload.round == number - 1
    )
    return pool_digests(
        [(row.silo, row.kind, row.step, row.digest) for row in session.execute(taken)], plan.lora.update_kind
    )


def _policy_of(session: Session, silo: str) -> str:
    """Digest of the policy that a silo said it is under; empty where it has not joined."""
    return str(_said(session, silo).get("policy_sha256", ""))


def min_updates_of(session: Session, silos: Iterable[str]) -> int:
    """The largest number of updates that the policies of these silos ask for in a mean, as each said in its hello; 0
    where none has said one yet."""
    return max((int(_said(session, silo).get("min_updates", 0)) for silo in silos), default=0)


def _check_readable(transcript: Transcript) -> None:
    """Raises OperationError: `transcript_from_canonical` refuses what this transcript would be sent as."""
    try:
        transcript_from_canonical(transcript.canonical())
    except PeerError as error:
        raise OperationError(
            f"round {transcript.round} of {transcript.run}: no party could read its transcript, so it is not signed: "
            f"{error.message}",
            hint="compare what the silos said in their hello: `coordinator silos list --json`", code="TRANSCRIPT",
        ) from error  # fmt: skip


def _min_updates(session: Session, plan: Plan, roster: tuple[str, ...]) -> int:
    """Return the least number of updates for a round: the plan's quorum, or more where a policy was tightened since."""
    return max(min_updates_of(session, roster), plan.quorum)


def min_updates_of_round(session: Session, run: str, number: int) -> int:
    """The least number of updates that a round's transcript binds; 0 where it binds none, as in protocol 1."""
    row = session.get(db.RoundTranscript, (run, number))
    return transcript_from_canonical(row.canonical).min_updates if row is not None else 0


def _said(session: Session, silo: str) -> dict[str, Any]:
    """Fields of a silo's hello; none of one that was refused, which is kept for people to see."""
    member = session.get(db.Member, silo)
    return dict(json.loads(member.hello)) if member is not None and member.state == "joined" else {}

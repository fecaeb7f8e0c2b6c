"""Silos without a line: their messages come in files that people carry, and what waits for them goes out in others.

A message out of a file is judged as one that came over a line: by its own signature under a certificate of the
federation, its sequence, its digest and the charter. What is answered to it is kept, signed, until the silo says that
it has taken it in. What waits in the silo's outbox is written into every file until then.

Such a silo cannot sign a transcript before it has carried it home, so the others do not wait for its signature once
enough are there (`coordinator.runs`); it checks theirs, and its own comes with its update.
Does not stop: whoever carries the files from reading them, delaying them or bringing an older one: it is refused or
passed over. A silo whose file comes after the round's deadline is late, as over a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from certs.commands import VerifiedCommand
from certs.identity import PeerIdentity, peer_identity
from coordinator import outbox
from coordinator import store as db
from coordinator.blobs import AnyPayload, BytesPayload, chunks, whole
from coordinator.driver import Driver, Taken
from coordinator.outbox import Reply
from fedsilo.control.server import ControlServer
from fedsilo.files.transfer_file import CarriedMessage, Header, TransferFile, TransferWriter
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotFoundError, OperationError, UsageError, WireCode
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import plan_from_canonical

# Answers that mean something later; what else a poll or a fetch brings is in the next file anyway.
_KEPT = frozenset({"control.ack", "control.refusal", "control.checkpoint"})
_BEFORE = "taken before"


@dataclass
class Transfers:
    """Takes files of silos that have no line, and writes those that go out to them, by signed command.

    Attributes:
        driver: takes the messages and seals those that go out.
        now: UTC, timezone-aware.
        charter_digest: of the charter, for the log.
    """

    driver: Driver
    trust_root_pem: bytes
    now: Callable[[], datetime]
    charter_digest: str

    def __post_init__(self) -> None:
        self._dependencies = self.driver.dependencies

    def register(self, control_server: ControlServer) -> None:
        control_server.register_command("transfer.export", "transfer.export", self._ordered_export)
        control_server.register_command("transfer.import", "transfer.import", self._ordered_import)

    # ---- orders --------------------------------------------------------------------------------------

    def _ordered_export(self, command: VerifiedCommand) -> dict[str, Any]:
        silo, path = str(command.arguments.get("silo", "")), _path_of(command)
        export = self.export_plan(silo, path)
        try:
            return export | self._record("transfer.export", command, export | {"silo": silo})
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _ordered_import(self, command: VerifiedCommand) -> dict[str, Any]:
        imported = self.import_release(_path_of(command))
        return imported | self._record("transfer.import", command, imported)

    def _record(self, event: str, command: VerifiedCommand, result: dict[str, Any]) -> dict[str, Any]:
        detail = {
            "person": command.person,
            "certificate": command.certificate_fingerprint,
            "request": command.request_id,
            "silo": result["silo"],
            "sha256": result["sha256"],
            "messages": len(result["messages"]),
        }
        with self.driver.changing():
            policy, orders = {"effective": self.charter_digest}, [dict(command.order)] if command.order else None
            number = self._dependencies.audit.append(event, detail=detail, policy=policy, orders=orders)
        return {"record": number, "audit_size": self._dependencies.audit.size}

    # ---- files in ------------------------------------------------------------------------------------

    def import_release(self, path: Path) -> dict[str, Any]:
        """Take a silo's file, one message after the other.

        Returns:
            Its silo and digest, and of each message what was answered: a refused one does not keep the next from being
            taken.

        Raises:
            TransferBroken: it is not whole, or not what the silo wrote; nothing of it was taken.
            NotAllowedError: the certificate in it is of no silo of this federation, or is not valid now.
            UsageError: it is for another coordinator. NotFoundError: it cannot be read.
            OperationError: the coordinator is halted; what was taken stays taken, and the file can be imported again.
        """
        with TransferFile(path) as file:
            header = file.header
            if header.receiver != self._dependencies.spiffe_id or header.federation != self._dependencies.federation:
                raise UsageError(f"{path} is for {header.receiver[:128]!r}, this is {self._dependencies.spiffe_id}")
            peer = peer_identity(header.certificate_pem.encode(), self.trust_root_pem, self.now(), role="silo")
            file.verify(peer.signing_public_key)
            for message in file.messages:
                for _ in file.pieces(message):  # before the first is taken
                    pass
            self.driver.importing.add(peer.name)
            try:
                rows = [self._take(peer, file, message) for message in file.messages]
            finally:
                self.driver.importing.discard(peer.name)
            if any(row["answer"] != _BEFORE for row in rows):  # an old file says nothing of how it speaks at this time
                self._mark(peer.name)
            return {"silo": peer.name, "sha256": file.digest, "messages": rows}

    def _take(self, peer: PeerIdentity, file: TransferFile, message: CarriedMessage) -> dict[str, Any]:
        envelope = message.envelope
        row: dict[str, Any] = {
            "kind": envelope.kind,
            "run": envelope.run,
            "round": envelope.round,
            "step": envelope.step,
            "bytes": message.payload_bytes,
        }
        with self._dependencies.store.transaction() as session:
            if envelope.sequence <= db.sequence_of(session, peer.name, envelope.run, "in"):
                return row | {"answer": _BEFORE, "code": ""}
        with self._payload(file, message) as payload:
            reply = self.driver.receive(peer, envelope, payload)
        answer = reply.envelope.kind
        code = codec.decode(pb.Refusal, whole(reply.payload)).code if answer == "control.refusal" else ""
        if code == WireCode.HALTED:  # which is no answer to the message
            raise OperationError("the coordinator takes nothing at this time", hint="import the file again", code=code)
        with self.driver.changing(), self._dependencies.store.transaction() as session:
            if answer in _KEPT and envelope.kind != "control.poll":
                self._keep(session, peer.name, envelope, reply)
            if envelope.kind == "control.poll" and answer != "control.refusal":
                self._forget(session, peer.name, file.read(message))
        return row | {"answer": "refused" if code else "taken", "code": code}

    @contextmanager
    def _payload(self, file: TransferFile, message: CarriedMessage) -> Iterator[AnyPayload]:
        """A large one on the disk while it is judged; where it was kept, that is under another name."""
        if message.payload_bytes <= codec.UNASKED_BYTES_MAX:
            yield BytesPayload(file.read(message))
            return
        with self._dependencies.blobs.spool() as spool:
            for piece in file.pieces(message):
                spool.write(piece)
            yield spool.finish()

    @staticmethod
    def _keep(session: Session, silo: str, question: pb.Envelope, reply: Reply) -> None:
        session.add(
            db.CarriedAnswer(
                silo=silo,
                sequence=reply.envelope.sequence,
                asked_run=question.run,
                asked_sequence=question.sequence,
                envelope=reply.envelope.SerializeToString(deterministic=True),
                payload=whole(reply.payload),
            )
        )

    @staticmethod
    def _forget(session: Session, silo: str, poll: bytes) -> None:
        """Answers that the silo has taken in, by its signed word for it."""
        try:
            taken_in = pb.Poll.FromString(poll).acknowledged_sequence
        except DecodeError:
            return
        answer = db.CarriedAnswer
        session.execute(delete(answer).where(answer.silo == silo, answer.sequence <= taken_in))

    def _mark(self, silo: str) -> None:
        """Its messages come in files, until it says hello over a line."""
        with self.driver.changing(), self._dependencies.store.transaction() as session:
            session.merge(db.CarriedSilo(silo=silo, since=self._dependencies.now()))
            session.flush()
            for run in self.driver.runs.values():
                if silo in run.silos:
                    run.look_who_signed(session)
            self.driver.changing().notify_all()

    # ---- files out -----------------------------------------------------------------------------------

    def export_plan(self, silo: str, path: Path) -> dict[str, Any]:
        """Write what waits for a silo: answers, items of its outbox, and the adapters that they name.

        Args:
            silo: listed.
            path: of the file; nothing may be there.

        Returns:
            Digest and size of the file, its messages, and what it would be worth waiting for.

        Raises:
            NotFoundError: no such silo. ConflictError: there is something of that name.
            OperationError: halted, or a disk refuses.
        """
        if silo not in self._dependencies.silos:
            raise NotFoundError(f"no silo of that name is listed: {silo[:64]!r}", hint="coordinator silos list")
        receiver = f"spiffe://{self._dependencies.federation}/silo/{silo}"
        header = Header(self._dependencies.federation, self._dependencies.spiffe_id, receiver, self._dependencies.now())
        with TransferWriter(path, header, self._dependencies.signing_key) as file:
            with self.driver.changing(), self._dependencies.store.transaction() as session:
                if self.driver.halted:
                    raise OperationError(f"the coordinator is halted: {self.driver.halted}", code="HALTED")
                answers = list(session.scalars(_answers_of(silo)))
                sealed = self._sealed(session, silo)
                waits_for = self._waits_for(session, silo)
            for answer in answers:
                envelope = pb.Envelope.FromString(answer.envelope)
                file.add(envelope, answer.payload, answers=(answer.asked_run, answer.asked_sequence))
            for reply in sealed:
                file.add(reply.envelope, chunks(reply.payload))
            digest = file.finish()
            rows = file.messages
        return {
            "silo": silo,
            "file": str(path),
            "sha256": digest,
            "bytes": path.stat().st_size,
            "messages": rows,
            "waits_for": waits_for,
        }

    def _sealed(self, session: Session, silo: str) -> list[Reply]:
        """Each item under a new sequence. The newest one counts as its delivery: of two files, the silo may have taken
        in a part of either."""
        replies, listed, adapters = list[Reply](), list[db.OutboxItem](), dict[str, str]()
        paused = [run.name for run in self.driver.runs.values() if run.life.paused_at is not None]
        for item in outbox.items(session, silo, but=paused):
            place = Place(item.run, item.round, item.step, item.kind)
            reply = self.driver.seal(session, silo, Taken(place, None, BytesPayload(item.payload)))
            item.delivered_sequence = reply.envelope.sequence
            listed.append(item)
            replies.append(reply)
            adapters |= dict.fromkeys(_adapters_named(session, item), item.run)
        outbox.count_as_lost(session, silo, but=listed)
        for digest, run in adapters.items():
            if db.may_fetch(session, silo, digest):
                adapter = Taken(Place(run, 0, 0, "global.adapter"), None, self._dependencies.blobs.get(digest))
                replies.append(self.driver.seal(session, silo, adapter))
        return replies

    def _waits_for(self, session: Session, silo: str) -> list[str]:
        """Rounds that are open here and not signed by enough yet: a file written later holds their beginning."""
        rounds = []
        for run in self.driver.runs.values():
            number = run.life.open_round
            row = session.get(db.RoundTranscript, (run.name, number)) if number and silo in run.life.places else None
            if row is not None and row.state in ("signing", "late"):
                rounds.append(f"round {number} of run {run.name} is not signed by enough silos yet")
        return rounds


def _answers_of(silo: str) -> Any:
    return select(db.CarriedAnswer).where(db.CarriedAnswer.silo == silo).order_by(db.CarriedAnswer.sequence)


def _adapters_named(session: Session, item: db.OutboxItem) -> Iterable[str]:
    """Digests of adapters that a silo will ask for when it takes the item in: also with the word that a round has
    begun, since its opening may have come in an earlier file."""
    match item.kind:
        case "round.agreed":
            return session.get_one(db.Round, (item.run, item.round)).base_digest, _reference(session, item.run)
        case "round.open":
            return pb.RoundOpen.FromString(item.payload).base_digest, _reference(session, item.run)
        case "round.result":
            return (pb.RoundResult.FromString(item.payload).adapter_digest,)
        case "run.end":
            return (pb.RunEnd.FromString(item.payload).adapter_digest,)
    return ()


def _reference(session: Session, run: str) -> str:
    """Digest of the adapter that a run's KL term is against, which a silo lacks that was not there when it began."""
    return plan_from_canonical(session.get_one(db.Run, run).plan).reference_sha256


def _path_of(command: VerifiedCommand) -> Path:
    path = Path(str(command.arguments.get("path", "")))
    if not path.is_absolute():
        raise UsageError(f"{str(path)[:200]!r} is no absolute path", code="PATH")
    return path

"""The coordinator's turn: over a line, or by files that people carry.

Over a line (`LineExchange`): hello, what is left in the outbox, then a poll or a heartbeat. The silo polls only when it
is the coordinator's turn: a long poll when nothing is to do, a short one while a release is held, none while the
trainer works (then a heartbeat every few seconds, and a poll when an answer says that something waits).

By files (`FileExchange`; `exchange: round_end`), the guard of a silo without a line speaks when people
carry them:

    silo import-plan      a file of the coordinator's: answers, plans, rounds, donors, adapters; each message is let in
                          when it is its turn, by its own signature, sequence and the policy, as over a line
    silo export-release   what may leave by now: hello, what was taken in, our signature, the outbox, what was said
                          meanwhile; each is decided and recorded as it is written

What was let out stays in the outbox until an answer to it comes in; until then every export holds it again, so a file
that gets lost costs a trip and nothing else. Heartbeats and progress are not said at all.
Does not stop: whoever carries the files from reading them, delaying them or bringing an older one. Nobody out there
learns from this silo how far it is until a file arrives: the round's deadline has to be as long as a trip.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit.record import RecordError
from fedsilo.files.durable import fsync_directory, make_private_directory, write_durably
from fedsilo.files.transfer_file import CarriedMessage, Header, TransferFile
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, DeniedError, PeerError, UnreachableError, UsageError, WireCode
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.place import Place
from fedsilo.protocol.transcript import sign_transcript, transcript_from_canonical
from silo.guard.coordinator_client import NOTHING_YET, CoordinatorClient, seconds_between
from silo.guard.decisions import Judge
from silo.guard.gate import Gate, check_answer
from silo.guard.ledger import Ledger
from silo.guard.messages import Inbound, IngressDenied
from silo.guard.round_agreement import Agreement
from silo.guard.run import RunManager
from silo.guard.site import Site

LONG_POLL_SECONDS = 3.0  # also how long an ending daemon may wait for the exchange in flight
SHORT_POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 5.0


class Exchange(Protocol):
    """The way in which a silo and its coordinator speak: over a line, or by files (`FileExchange`)."""

    def turn(self) -> None:
        """Say and hear what is possible now. Raises what gate, runs and client do."""

    def beat(self) -> None:
        """Show that this silo is there, where nothing was said for a while. Raises what the gate does."""

    @property
    def waits(self) -> bool:
        """The next turn waits for the other side by itself, or has something to do at once."""


class LineExchange:
    """The `Exchange` of a silo that dials its coordinator.

    Args:
        judge, ledger, client, agreement, runs: the guard's parts.
    """

    def __init__(
        self, judge: Judge, ledger: Ledger, client: CoordinatorClient, agreement: Agreement, runs: RunManager, *,
        isolation: Callable[[], str], monotonic: Callable[[], float],
    ) -> None:  # fmt: skip
        self._judge = judge
        self._ledger = ledger
        self._client = client
        self._agreement = agreement
        self._runs = runs
        self._isolation = isolation
        self._monotonic = monotonic

    @property
    def waits(self) -> bool:
        run = self._runs.run
        return run is None or not run.busy or self._client.poll_now  # the poll itself is the wait

    def turn(self) -> None:
        if not self._client.joined:
            self._client.join(self._isolation())
            return
        for item in self._ledger.outbox("allowed"):
            if not self._runs.retry(item):
                return
        self._runs.leaving.say_goodbye()
        if (run := self._runs.run) is not None:
            run.advance()
        if self._client.relay():
            return  # the next round opens once enough parties have countersigned our log
        # A lost poll may not silence our signature while the trainer works.
        signs = self._agreement.waiting is not None and self._quiet_seconds >= SHORT_POLL_SECONDS
        if run is None or not run.busy or self._client.poll_now or signs:
            self._poll(0.0 if run is not None and run.busy else self._poll_seconds())
        else:
            self.beat()

    def beat(self) -> None:
        if self._quiet_seconds >= HEARTBEAT_SECONDS:
            self._client.say(self._judge.view.place("control.heartbeat"), pb.Heartbeat())

    @property
    def _quiet_seconds(self) -> int:
        return seconds_between(self._client.last_sent, self._monotonic())

    def _poll_seconds(self) -> float:
        run = self._runs.run
        soon = bool(self._ledger.releases("held")) or (run is not None and run.paused)
        return SHORT_POLL_SECONDS if soon else LONG_POLL_SECONDS

    def _poll(self, wait_seconds: float) -> None:
        self._client.poll_now = False
        body = pb.Poll(
            wait_milliseconds=int(wait_seconds * 1000),
            acknowledged_sequence=self._ledger.acknowledged,
            countersignature=self._agreement.countersignature,
        )
        item = self._client.say(self._judge.view.place("control.poll"), body, wait_seconds=wait_seconds)
        if item.kind in {"control.ack", "control.refusal"}:
            return
        if take_in(item, self._runs, self._ledger, self._judge):
            # Something came, so more may wait; the answer to what is said while the trainer works tells as much.
            self._client.poll_now = self._runs.run is None or not self._runs.run.busy
        else:
            self._client.retry_at = self._monotonic() + SHORT_POLL_SECONDS


def take_in(item: Inbound, runs: RunManager, ledger: Ledger, judge: Judge) -> bool:
    """Act on an item of the coordinator's outbox and acknowledge it. False: it is a plan that waits for persons, and it
    comes again. Raises PeerError: it cannot be written down; further as `RunManager.take_in`."""
    try:
        taken = runs.take_in(item)
    except RecordError as error:
        peer = judge.policy.file.federation.coordinator
        judge.record_denied("ingress", "unknown", error.code, peer=peer)
        raise PeerError(WireCode.MALFORMED, f"what came cannot be written down: {error.message}") from error
    if taken:
        ledger.acknowledge(item.sequence)
    return taken


# ---- by files that people carry ---------------------------------------------------------------------

_log = logging.getLogger("fedsilo.silo")

FOLDER = "transfer"  # in state_dir
EXPORTS_REMEMBERED = 64
# Said while there is no line, and kept for the next export; all else of control.* is of the moment.
_KEPT = frozenset({"control.abstain", "control.declined", "control.error"})

Recorder = Callable[[Mapping[str, Any]], dict[str, int]]  # of the person's order, with what it came to


class FileExchange:
    """The `Exchange` of a silo whose `coordinator.address` is `files`.

    Args:
        site: names and keys.
        gate, ledger, client, agreement, runs: the guard's parts.

    Attributes:
        open: an export is being written.
    """

    def __init__(
        self, site: Site, gate: Gate, ledger: Ledger, client: CoordinatorClient, agreement: Agreement, runs: RunManager,
        *, isolation: Callable[[], str],
    ) -> None:  # fmt: skip
        self._site = site
        self._gate, self._judge = gate, gate.judge
        self._ledger = ledger
        self._client = client
        self._agreement = agreement
        self._runs = runs
        self._isolation = isolation
        self._folder = site.config.state_dir / FOLDER
        make_private_directory(self._folder)
        self._imported = self._folder / "imported.zip"
        self._words_path, self._exports_path = self._folder / "words.json", self._folder / "exports.json"
        self._words: list[dict[str, Any]] = _read_list(self._words_path)
        self._exports: list[dict[str, Any]] = _read_list(self._exports_path)
        self._file: TransferFile | None = TransferFile(self._imported) if self._imported.exists() else None
        self._held: Inbound | None = None
        self._stuck = False
        self.open = False
        if self._exports:
            client.witnessing.was_shown(self._exports[-1].get("shown_size", 0))
        client.carrier = self
        client.joined = True  # as far as can be known here; hello is said with every export

    # ---- the coordinator's turn --------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Something of the imported file is to be taken in at once."""
        return self._held is None and self._next() is not None

    def turn(self) -> None:
        """Take in the next message of the imported file."""
        if (run := self._runs.run) is not None:
            run.advance()
        if (message := self._next()) is None:
            return
        self._client.count_witnesses()
        sequence = message.envelope.sequence
        if self._held is None or self._held.sequence != sequence:
            try:
                item = self._let_in(message)
            except PeerError as error:
                if message.answers is not None:
                    self._ledger.acknowledge(sequence)  # the same bytes would come in every file until then
                elif not isinstance(error, IngressDenied):
                    self._stuck = True  # nothing behind it may count as taken in: another file has to come
                raise
        else:
            item = self._held
        self._held = None
        if message.answers is not None:
            self._answered(message.answers, item)
            self._ledger.acknowledge(sequence)
        elif not take_in(item, self._runs, self._ledger, self._judge):
            self._held = item

    def beat(self) -> None:
        """Nobody hears it."""

    def _next(self) -> CarriedMessage | None:
        if self._stuck or self._file is None:
            return None
        for message in self._file.messages:
            if message.envelope.kind != "global.adapter" and message.envelope.sequence > self._ledger.acknowledged:
                return message
        return None

    def _let_in(self, message: CarriedMessage) -> Inbound:
        assert self._file is not None  # noqa: S101  # it is where the message is from
        large = message.payload_bytes > codec.UNASKED_BYTES_MAX
        payload = self._file.view(message) if large else self._file.read(message)
        return self._gate.ingress.let_in(message.envelope, payload, carried=True)

    def _answered(self, place: tuple[str, int], answer: Inbound) -> None:
        """An answer to a message that left in a file."""
        sent = (row for export in self._exports for row in export["messages"])
        question = next((row for row in sent if (row["run"], row["sequence"]) == place), None)
        if isinstance(answer.body, pb.Checkpoint):
            self._client.witnessed(answer.body)
        if question is None:
            return
        if isinstance(answer.body, pb.Refusal) and answer.body.code == WireCode.HALTED:  # it was not taken, and stays
            _log.warning(
                "the coordinator was halted or stopping, and did not take %s: it is said again", question["kind"]
            )
            return
        if isinstance(answer.body, pb.Refusal) and question["kind"] == "control.hello":
            refused = self._client.refused(answer.body)
            _log.error("%s; %s", refused.message, refused.hint)
            self._gate.counters.last_fault = refused.message
        for item in self._ledger.outbox("allowed"):
            if (item.place, item.digest) == _place_of(question):
                self._runs.answered(item, question["sequence"], answer)
        left = [word for word in self._words if _place_of(word) != _place_of(question)]
        if len(left) < len(self._words):
            if isinstance(answer.body, pb.Refusal):
                _log.warning("the coordinator refuses %s: %s", question["kind"], answer.body.code)
            self._keep_words(left)

    # ---- files in ----------------------------------------------------------------------------------

    def take(self, path: Path, record: Recorder) -> dict[str, Any]:
        """Put a file of the coordinator's in the place of the one before, whole or not at all.

        Raises:
            TransferBroken: it is not whole, or not what the coordinator of this federation wrote.
            PeerError: the coordinator did not sign a message in it.
            UsageError: it is for another silo. ConflictError: an older one than was taken.
            NotFoundError, OperationError: it cannot be read or kept.
        """
        arriving = self._imported.with_suffix(".partial")
        with TransferFile(path) as file:
            self._check_receiver(file)
            file.copy_to(arriving)
        try:
            # the copy, which nobody else writes to
            with TransferFile(arriving, copy_of=path) as file:
                self._check(file)
                if self._file is not None and self._newest(file) < self._newest(self._file):
                    raise ConflictError(
                        f"{path} is older than the file that was taken last", hint="bring the newest", code="STALE_VIEW"
                    )
                digest, rows = file.digest, [self._row(message) for message in file.messages]
                receipt = record({"sha256": digest, "messages": len(rows), "written_at": file.header.written_at})
        except BaseException:
            arriving.unlink()
            raise
        with self._judge.halting():
            arriving.replace(self._imported)
            fsync_directory(self._folder)
        if self._file is not None:
            self._file.close()
        self._file, self._held, self._stuck = TransferFile(self._imported), None, False
        self._client.retry_at = 0.0
        return {"file": str(path), "sha256": digest, "messages": rows, **receipt}

    def _check_receiver(self, file: TransferFile) -> None:
        config = self._site.config
        if file.header.receiver != config.spiffe_id or file.header.federation != config.federation:
            raise UsageError(
                f"{file.path} is for {file.header.receiver[:128]!r}, this silo is {config.spiffe_id}",
                hint=f"coordinator export-plan --silo {config.silo}",
            )

    def _check(self, file: TransferFile) -> None:
        config, coordinator = self._site.config, self._judge.policy.file.federation.coordinator
        self._check_receiver(file)
        file.verify(self._site.coordinator_key)
        for message in file.messages:
            check_answer(
                message.envelope,
                None,
                federation=config.federation,
                coordinator_id=coordinator,
                key=self._site.coordinator_key,
            )
            for _ in file.pieces(message):
                pass  # its digest is compared with the last piece

    def _row(self, message: CarriedMessage) -> dict[str, Any]:
        envelope = message.envelope
        done = envelope.sequence <= self._ledger.acknowledged
        return {
            "kind": envelope.kind,
            "run": envelope.run,
            "round": envelope.round,
            "step": envelope.step,
            "bytes": message.payload_bytes,
            "taken_before": done,
        }

    @staticmethod
    def _newest(file: TransferFile) -> int:
        return max((message.envelope.sequence for message in file.messages), default=0)

    # ---- files out ---------------------------------------------------------------------------------

    def export(self, path: Path, record: Recorder) -> dict[str, Any]:
        """Write what may leave by now. What was in an export before and has no answer yet is in it again.

        Args:
            path: of the file; nothing may be there.
            record: the order's; where it fails, no file stays.

        Raises:
            ConflictError: there is something of that name.
            DeniedError: the policy does not let hello or poll out. OperationError: halted, or a disk refuses.
        """
        config, peer = self._site.config, self._judge.policy.file.federation.coordinator
        certificate = config.identity.certificate.read_text(encoding="ascii")
        written_at = _utc(self._judge.now())
        header = Header(config.federation, config.spiffe_id, peer, written_at, certificate)
        with self._gate.writing_into(path, header) as file:
            self._runs.leaving.say_goodbye()  # kept with the other words, and so said until it is answered
            self.open = True
            try:
                self._say_all()
            finally:
                self.open = False
            rows = file.messages
            export = {"written_at": written_at, "shown_size": self._client.witnessing.shown_size, "messages": rows}
            self._exports = [*self._exports, export][-EXPORTS_REMEMBERED:]
            with self._judge.halting():
                write_durably(self._exports_path, json.dumps(self._exports).encode(), mode=0o600)
            digest = file.finish()
        try:
            size_bytes = path.stat().st_size
            receipt = record({"sha256": digest, "messages": len(rows), "bytes": size_bytes})
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        run = self._runs.run
        return {
            "file": str(path),
            "sha256": digest,
            "bytes": size_bytes,
            "messages": rows,
            "held": [release.id for release in self._ledger.releases("held")],
            "working": run is not None and run.busy,
            **receipt,
        }

    def _say_all(self) -> None:
        self._client.join(self._isolation())
        body = pb.Poll(acknowledged_sequence=self._ledger.acknowledged, countersignature=self._countersignature())
        self._client.say(self._judge.view.place("control.poll"), body)
        for item in self._ledger.outbox("allowed"):
            self._runs.retry(item)
        for word in list(self._words):
            said = codec.decode(OUTBOUND_KINDS[word["kind"]], bytes.fromhex(word["body"]))
            try:
                self._client.say(_place_of(word)[0], said)
            except DeniedError as error:
                _log.warning("%s is not said: %s", word["kind"], error.message)

    def _countersignature(self) -> bytes:
        """Ours under the open round's transcript, also where enough others had signed and the round has begun."""
        if self._agreement.waiting is not None:
            return self._agreement.countersignature
        view = self._judge.view
        kept = self._ledger.transcript(view.run, view.round)
        if kept is None or not kept["signed"]:
            return b""
        transcript = transcript_from_canonical(kept["transcript"])
        return sign_transcript(transcript, self._site.config.spiffe_id, self._site.identity.signing_key)

    # ---- what the client would say over a line -----------------------------------------------

    def instead(self, place: Place, body: ProtobufMessage) -> Inbound | None:
        """Answer what is said outside of an export: an adapter out of the imported file, a word that is kept for the
        next export, or nothing. None: an export is being written, and the gate takes it.

        Raises:
            UnreachableError: the imported file does not hold the adapter. PeerError: it is not let in.
        """
        if self.open:
            return None
        if isinstance(body, pb.Fetch):
            return self._adapter(body.digest)
        if place.kind in _KEPT:
            payload = codec.encode(body)
            word = {
                "kind": place.kind,
                "body": payload.hex(),
                "sha256": codec.sha256_hex(payload),
                "run": place.run,
                "round": place.round,
                "step": place.step,
            }
            if word not in self._words:
                self._keep_words([*self._words, word])
        return NOTHING_YET

    def _adapter(self, digest: str) -> Inbound:
        for message in self._file.messages if self._file is not None else ():
            if message.envelope.kind == "global.adapter" and message.digest == digest:
                return self._let_in(message)
        raise UnreachableError(
            f"adapter {digest[:12]} is not in the file that was imported last",
            hint="`coordinator export-plan` once more, then `silo import-plan`",
        )

    def _keep_words(self, words: list[dict[str, Any]]) -> None:
        self._words = words
        with self._judge.halting():
            write_durably(self._words_path, json.dumps(words).encode(), mode=0o600)


def _read_list(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_bytes())) if path.exists() else []


def _place_of(row: Mapping[str, Any]) -> tuple[Place, str]:
    """Return where a message belongs that is listed in a file of this folder, and the digest of its payload."""
    return Place(row["run"], row["round"], row["step"], row["kind"]), row["sha256"]


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"

"""The only way out of a site, and the only way in.

    parse -> measure -> decide -> clip and quantise -> measure and decide again -> approval -> record -> send -> outcome

Every outbound message goes through `Gate`: polls, hello and error codes like factors. Payload bytes are rebuilt from
parsed values (threat model B4); what is denied is recorded with every rule's verdict and nothing of the reason is sent
(B6). The decision record is on disk before the first byte leaves (P2), and the count against every limit before that.
What comes back is believed only with the pinned coordinator's signature, a fresh sequence number, canonical bytes and
the policy's consent.

Does not stop: information in the allowed values themselves (N1), and a coordinator that says false things of the right
form. There are no text screens yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.edge.audit_log import AuditLog, LogFullError
from fedsilo.treaty.errors import (
    ConflictError,
    DeniedError,
    FedSiloError,
    NotAllowedError,
    OperationError,
    PeerError,
    UnreachableError,
    WireCode,
)
from fedsilo.treaty.wire import codec
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.codec import Array, sha256_hex
from fedsilo.treaty.wire.services import INBOUND_KINDS, OUTBOUND_KINDS, TENSOR_KINDS
from policies.engine import FINAL, OFFERED, Approval, Decision, Facts, HistoryBook, Message, decide, measure
from policies.load import Policy
from policies.transform import drop_wrong_donors, transform_factors
from silo.guard import envelopes
from silo.guard.channel import Channel, GrpcChannel, Reply, server_certificate
from silo.guard.context import RunView, SiteView, context_of
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.messages import (
    Allowed,
    Counters,
    Denied,
    Held,
    Inbound,
    IngressDenied,
    Original,
    Sent,
    TlsFiles,
    encoded_factors,
    parsed,
)
from silo.guard.public import answers_of, donated_answers_of
from silo.guard.records import decision_fields, overruled, payload_digests

# Tensor replies are bounded by the schema; everything else by this (threat T23).
_SMALL_REPLY_BYTES_MAX = codec.SMALL_PAYLOAD_BYTES_MAX


class Gate:
    """Holds the channel, the signing key and the policy.

    Args:
        channel: the one connection.
        policy: what may leave and what is let in.
        ledger: counters and history that survive a kill.
        audit: our log; durable at return of `append`.
        signing_key: our message-signing key.
        coordinator_key: its pinned message-signing key.
        site: what does not change: names, schema, public set.
        federation: its name.
        site_key: keys the digests of short payloads in the log (T40).
        clock: UTC seconds.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        policy: Policy,
        ledger: Ledger,
        audit: AuditLog,
        signing_key: Ed25519PrivateKey,
        coordinator_key: Ed25519PublicKey,
        site: SiteView,
        federation: str,
        site_key: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._channel = channel
        self.policy = policy
        self._ledger = ledger
        self._audit = audit
        self._signing_key = signing_key
        self._coordinator_key = coordinator_key
        self._site = site
        self._federation = federation
        self._site_key = site_key
        self._clock = clock
        book = ledger.book
        self._book = HistoryBook.from_json(book) if book else HistoryBook()
        self.view = RunView()
        self.counters = Counters()
        self.halted = ""

    def now(self) -> float:
        """UTC seconds that never go back: the latest of clock, ledger and audit log (T41)."""
        return max(self._ledger.now(self._clock()), self._audit.latest_time)

    # ---- the way out -------------------------------------------------------------------------------

    def send(
        self,
        kind: str,
        body: ProtobufMessage,
        *,
        run: str | None = None,
        round_number: int = 0,
        step: int = 0,
        wait_seconds: float = 0.0,
    ) -> Inbound:
        """Offer a small message, send it at once if it is allowed, and return the coordinator's answer.

        Args:
            kind: of the message.
            body: its values.
            round_number: of the envelope; 0 outside a round.
            step: of the envelope; 0 outside a step.
            run: by default the open run.
            wait_seconds: how long the coordinator may wait before it answers (polls).

        Raises:
            DeniedError: the policy says no, or asks for persons; recorded, nothing sent.
            UnreachableError, NotAllowedError, PeerError, OperationError: see `transmit`.
        """
        offered = self.offer(kind, body, run=run, round_number=round_number, step=step)
        if not isinstance(offered, Allowed):
            raise DeniedError(f"this site's policy does not let {kind} out", hint=offered.decision.explain()[:500])
        return self.transmit(offered, wait_seconds=wait_seconds).reply

    def offer(
        self,
        kind: str,
        body: ProtobufMessage,
        *,
        run: str | None = None,
        round_number: int = 0,
        step: int = 0,
        tensors: Mapping[str, Array] | None = None,
    ) -> Allowed | Denied | Held:
        """Decide on a message of parsed values; an allowed one may then be handed to `transmit`.

        Args:
            kind: of the message.
            body: its values.
            run: by default the open run.
            round_number: of the envelope.
            step: of the envelope.
            tensors: float32 arrays by wire name, for a tensor kind; `body` is then its header.

        Raises:
            LogFullError, OperationError: it cannot be recorded; the gate is halted and nothing is sent.
        """
        run = self.view.run if run is None else run
        original = None
        if tensors is not None and isinstance(body, pb.Factors):
            # Whole factors, exactly as offered: what is wrong with them must show before anything is made fit.
            offered = encoded_factors(self._site.schema, body, tensors)
            facts, decision = self._judge(self._message(kind, run, round_number, step, offered), stage=OFFERED)
            if decision.verdict == "deny":
                return self._deny(facts, decision, offered)
            try:
                payload, transform = self._transformed(kind, body, tensors)
            except (ArithmeticError, ValueError) as error:
                # Values that cannot be made fit: a refusal like any other, with its cause on record (B5).
                return self._deny(facts, overruled(decision, "TRANSFORM_FAILED", type(error).__name__), offered)
            original = Original(len(offered), sha256_hex(offered), facts, transform)
        else:
            payload = codec.encode(body)
        return self.decide_payload(kind, run, round_number, step, payload, original=original)

    def decide_payload(
        self,
        kind: str,
        run: str,
        round_number: int,
        step: int,
        payload: bytes,
        *,
        approvals: tuple[Approval, ...] = (),
        original: Original | None = None,
    ) -> Allowed | Denied | Held:
        """The final decision on exact bytes, recorded durably.

        Args:
            kind: of the message.
            run: of the envelope.
            round_number: of the envelope.
            step: of the envelope.
            payload: the bytes that will be sent.
            approvals: persons whose signature over this payload's digest has been verified.
            original: what it was before the transforms.
        """
        message = self._message(kind, run, round_number, step, payload)
        facts, decision = self._judge(message, approvals=approvals)
        judged_by = self._book.view(facts, approvals).to_json()  # before this message counts: the log replays
        if decision.verdict == "deny" or (decision.verdict == "allow" and not decision.may_leave):
            return self._deny(facts, decision, payload, original=original, history=judged_by)
        if decision.verdict == "hold":
            self._record(facts, decision, payload, original=original, history=judged_by)
            return Held(decision, facts, payload)
        with self._halting():
            # Counted first: a crash between the two writes costs a number, never lets an uncounted byte out (L3).
            self._book.record(facts)
            sequence = self._ledger.allow(self._book.to_json(), run)
        decision_seq = self._record(
            facts, decision, payload, original=original, sequence=sequence, history=judged_by,
            approvals=[approval.person for approval in approvals],
        )  # fmt: skip
        outbox_id = None
        if not kind.startswith("control."):
            item = OutboxItem(
                0, run, round_number, step, kind, sha256_hex(payload), payload, len(payload), decision_seq,
                self._clock(), "allowed", 0,
            )  # fmt: skip
            with self._halting():
                outbox_id = self._ledger.keep_until_sent(item)
        return Allowed(
            kind, run, round_number, step, payload, sha256_hex(payload), decision_seq, sequence, 0, outbox_id
        )

    def transmit(self, allowed: Allowed, *, wait_seconds: float = 0.0) -> Sent:
        """Send what was allowed, record the outcome, let the answer in.

        Raises:
            UnreachableError, NotAllowedError, OperationError: not known to have arrived (recorded as indeterminate);
                a content message stays in the outbox for `retry`.
            PeerError: the answer was refused; the message itself counts as sent.
        """
        if self.halted:
            raise OperationError(f"nothing is sent: {self.halted}", code="HALTED")
        envelope = envelopes.sealed(
            allowed, federation=self._federation, sender=self._site.spiffe_id, key=self._signing_key
        )
        try:
            reply = self._channel.exchange(
                envelope,
                allowed.payload,
                wait_seconds=wait_seconds,
                reply_bytes_max=max(_SMALL_REPLY_BYTES_MAX, 2 * self._site.schema.payload_bytes),
            )
        except FedSiloError as error:
            if isinstance(error, PeerError):
                self._outcome("egress.sent", allowed)
                self._settle(allowed)
            else:
                self._outcome("egress.indeterminate", allowed)
            if isinstance(error, UnreachableError | NotAllowedError):
                self.counters.last_fault = error.message
            raise
        self._outcome("egress.sent", allowed)
        self.counters.messages[allowed.kind] = self.counters.messages.get(allowed.kind, 0) + 1
        payload_bytes = self.counters.payload_bytes.get(allowed.kind, 0) + len(allowed.payload)
        self.counters.payload_bytes[allowed.kind] = payload_bytes
        self.counters.last_contact, self.counters.last_fault = self._clock(), ""
        try:
            inbound = self.let_in(reply)
        except PeerError:
            self._settle(allowed)  # the message itself is out, whatever is wrong with the answer
            raise
        if isinstance(inbound.body, pb.Ack) and allowed.outbox_id is not None:
            self._outcome("egress.acked", allowed)
        self._settle(allowed)
        return Sent(inbound)

    def retry(self, item: OutboxItem) -> Sent:
        """Send an allowed content message again: the same bytes under a new sequence. Raises as `transmit` does."""
        if item.payload is None:
            raise ConflictError(f"message {item.id} of the outbox was settled already")
        with self._halting():
            attempt = self._ledger.count_attempt(item.id)
            sequence = self._ledger.next_sequence(item.run)
        return self.transmit(
            Allowed(
                item.kind, item.run, item.round, item.step, item.payload, item.digest, item.decision_seq, sequence,
                attempt, item.id,
            )
        )  # fmt: skip

    def interrupt(self, *, for_good: bool = False) -> None:
        """Give up the exchange in flight, or all of them. Safe in a signal handler."""
        self._channel.interrupt(for_good=for_good)

    def close(self) -> None:
        self._channel.close()

    # ---- the way in --------------------------------------------------------------------------------

    def let_in(self, reply: Reply) -> Inbound:
        """Believe a message of the coordinator, or not; recorded either way.

        Raises:
            PeerError: wrong sender, federation, digest, signature or sequence, not canonical, or denied by policy.
        """
        envelope, payload = reply.envelope, reply.payload
        try:
            envelopes.check(
                envelope, payload, federation=self._federation, coordinator_id=self._site.coordinator_id,
                key=self._coordinator_key,
            )  # fmt: skip
            body, tensors = parsed(envelope.kind, payload, INBOUND_KINDS)
            with self._halting():
                self._ledger.accept_sequence("", envelope.sequence)
        except ConflictError as error:
            self._record_refused(envelope, payload, WireCode.SEQUENCE_REPLAYED)
            raise PeerError(WireCode.SEQUENCE_REPLAYED, error.message) from error
        except PeerError as error:
            self._record_refused(envelope, payload, error.wire_code)
            raise
        message = Message(
            "ingress", envelope.kind, envelope.run, envelope.round, envelope.step, envelope.sender, len(payload), body,
            tensors,
        )  # fmt: skip
        original = None
        block = self.policy.file.ingress.public_donors
        # A method that trains on the whole pool wants the wrong ones too, where the policy says so.
        if isinstance(body, pb.PublicDonors) and block is not None and block.verify_locally:
            message, original = self._without_wrong_donors(message, body, payload)
        facts, decision = self._judge(message)
        self._record(facts, decision, payload, sequence=envelope.sequence, original=original)
        if decision.verdict == "deny":
            raise IngressDenied(envelope, decision)
        return Inbound(
            envelope.kind, envelope.run, envelope.round, envelope.step, envelope.sequence, message.body, payload,
            sha256_hex(payload), facts, decision if decision.verdict == "hold" else None,
        )  # fmt: skip

    def _without_wrong_donors(
        self, message: Message, body: pb.PublicDonors, payload: bytes
    ) -> tuple[Message, Original]:
        """Donors that this site's own grading calls wrong are dropped and counted by the silo they are from (T21)."""
        facts, _ = self._judge(message, stage=OFFERED)
        verdicts, _ = self._site.public.judge(donated_answers_of(body))
        kept, dropped = drop_wrong_donors(body, verdicts)
        original = Original(len(payload), sha256_hex(payload), facts, {"donors_dropped": dropped})
        return replace(message, body=kept), original

    def decide_inbound(self, held: Inbound, approvals: tuple[Approval, ...]) -> Decision:
        """Judge a held inbound message (a plan) again, with the approvals given since."""
        body, tensors = parsed(held.kind, held.payload, INBOUND_KINDS)
        message = Message(
            "ingress", held.kind, held.run, held.round, held.step, self._site.coordinator_id, len(held.payload), body,
            tensors,
        )  # fmt: skip
        facts, decision = self._judge(message, approvals=approvals)
        judged_by, people = self._book.view(facts, approvals).to_json(), [approval.person for approval in approvals]
        self._record(facts, decision, held.payload, approvals=people, history=judged_by)
        return decision

    # ---- judging -----------------------------------------------------------------------------------

    def _message(self, kind: str, run: str, round_number: int, step: int, payload: bytes) -> Message:
        """Parse our own rebuilt bytes again, so that what is judged is what is sent."""
        body, tensors = parsed(kind, payload, OUTBOUND_KINDS)
        return Message("egress", kind, run, round_number, step, self._site.spiffe_id, len(payload), body, tensors)

    def _judge(
        self, message: Message, *, stage: str = FINAL, approvals: tuple[Approval, ...] = ()
    ) -> tuple[Facts, Decision]:
        graded = None
        if isinstance(message.body, pb.PublicResponses):
            graded = self._site.public.judge(answers_of(message.body))
        elif isinstance(message.body, pb.PublicDonors):
            graded = self._site.public.judge(donated_answers_of(message.body))
        sender = self._site.spiffe_id if message.direction == "egress" else self._site.coordinator_id
        context = context_of(
            self._site, self.view, message, now_seconds=self.now(), expected_sender=sender, graded=graded
        )
        facts = measure(message, context, stage=stage)
        return facts, decide(facts, self.policy, self._book.view(facts, approvals))

    def _transformed(self, kind: str, header: pb.Factors, tensors: Mapping[str, Array]) -> tuple[bytes, dict[str, Any]]:
        """Clip and round a delta as the policy says, and serialise it once."""
        block = self.policy.file.egress.lora_factors
        if kind != "lora.factors" or block is None:
            return encoded_factors(self._site.schema, header, tensors), {}
        fitted, record = transform_factors(tensors, block)
        return encoded_factors(self._site.schema, header, fitted), record

    # ---- recording and sending ---------------------------------------------------------------------

    def _deny(self, facts: Facts, decision: Decision, payload: bytes, **recorded: Any) -> Denied:
        self._record(facts, decision, payload, **recorded)
        return Denied(decision, facts)

    def _record(
        self,
        facts: Facts,
        decision: Decision,
        payload: bytes,
        *,
        original: Original | None = None,
        sequence: int | None = None,
        approvals: list[str] | None = None,
        history: dict[str, Any] | None = None,
    ) -> int:
        fields = decision_fields(
            facts, decision, self.policy, peer=self._site.coordinator_id,
            payload_digests=self.digests(facts["kind"], payload),
            history=history or self._book.view(facts).to_json(), schema_sha256=self._site.schema.digest,
        )  # fmt: skip
        if original is not None:
            fields["payload"] |= {"bytes_before": original.payload_bytes}
            if facts["kind"] in TENSOR_KINDS:
                fields["payload"] |= {"sha256_before": original.digest}
            fields["facts"] |= {"offered": original.facts, "transform": original.transform}
        if approvals:
            fields["link"] = {"approvals": approvals}
        event = "egress.decision" if facts["direction"] == "egress" else "ingress.decision"
        return self.record(event, sequence=sequence, **fields)

    def record(self, event: str, **fields: Any) -> int:
        """Append to the audit log; a full disk halts the gate.

        Raises:
            LogFullError, OperationError: not recorded.
        """
        with self._halting():
            return self._audit.append(event, **fields)

    def digests(self, kind: str, payload: bytes) -> dict[str, Any]:
        """Size and digest of a payload as they may stand in the log: keyed where the content can be guessed (T40)."""
        return payload_digests(kind, payload, self._site_key)

    def forget_runs(self, runs: Iterable[str]) -> None:
        """Drop the counts of runs that are over. Their names stay spent in the ledger, so none can begin again."""
        before = len(self._book.counts)
        for run in runs:
            if run:
                self._book.forget_run(run)
        if len(self._book.counts) != before:
            with self._halting():
                self._ledger.keep_book(self._book.to_json())

    def _record_refused(self, envelope: pb.Envelope, payload: bytes, code: WireCode) -> None:
        """An answer that was not believed far enough to be measured."""
        kind = envelope.kind if envelope.kind in INBOUND_KINDS else "unknown"
        self.record(
            "ingress.decision", kind=kind, decision="deny", reasons=[code.value], direction="ingress",
            peer=self._site.coordinator_id, payload=self.digests("", payload),
        )  # fmt: skip

    def _outcome(self, event: str, allowed: Allowed) -> None:
        self.record(
            event,
            kind=allowed.kind,
            run=allowed.run,
            round=allowed.round,
            step=allowed.step,
            attempt=allowed.attempt,
            sequence=allowed.sequence,
            peer=self._site.coordinator_id,
            direction="egress",
            payload=self.digests(allowed.kind, allowed.payload),
            link={"decision": allowed.decision_seq},
        )

    def _settle(self, allowed: Allowed) -> None:
        if allowed.outbox_id is not None:
            with self._halting():
                self._ledger.settle_outbox(allowed.outbox_id, "sent")

    @contextlib.contextmanager
    def _halting(self) -> Iterator[None]:
        """Turns a disk that cannot record into a gate that does not send."""
        if self.halted:
            raise OperationError(f"nothing is recorded or sent: {self.halted}", code="HALTED")
        try:
            yield
        except FedSiloError as error:
            if isinstance(error, LogFullError) or error.code == "LEDGER_UNWRITABLE":
                self.halted = error.message
            raise


def open_channel(address: str, files: TlsFiles) -> Channel:
    """The real channel. Only here, so that whoever sends has passed the gate."""
    return GrpcChannel(address, files)


def coordinator_leaf(address: str, files: TlsFiles) -> bytes:
    """The coordinator's certificate (DER). Raises UnreachableError, naming the cause."""
    return server_certificate(address, files)

"""The only way out of a site, and the only way in.

    parse -> measure -> decide -> clip, quantise, screen -> measure, decide -> held | denied | allowed
    allowed, or approved and decided again -> count -> record -> outbox -> transmit -> outcome

How a held message is approved, and all that ends a hold, is at the head of `releases.py`; no line leads from held to
the second one but a person's yes. Control messages need no outbox: they are sent at once, or not at all.
Every outbound message goes through `Gate`: polls, hello and error codes like factors. Payload bytes are rebuilt from
parsed values (threat model B4), or are found to be the same; what is denied is recorded with every rule's verdict, and
nothing of the reason is sent (B6). The decision is on disk before a byte leaves (P2), and the count before that.
What comes in is believed (`Ingress`) with the coordinator's pinned signature, a fresh sequence number, canonical bytes
and the policy's consent, and recorded either way (threats T12, T13, T20, T21, T29). What both directions rest on is in
`decisions.py`.

Does not stop: information in the allowed values themselves (N1), and private text that no screen knows (N3); a
coordinator that says false things of the right form.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit import polls
from fedsilo.audit.polls import PollWindows
from fedsilo.audit.record import RecordError
from fedsilo.files.transfer_file import Header
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, Buffer, sha256_hex, sha256_of
from fedsilo.protocol.envelope import check_signature, parsed, seal
from fedsilo.protocol.errors import (
    ConflictError,
    DeniedError,
    FedSiloError,
    NotAllowedError,
    PeerError,
    UnreachableError,
    UsageError,
    WireCode,
)
from fedsilo.protocol.kinds import INBOUND_KINDS, REFT_KINDS
from fedsilo.protocol.place import Place
from policies.engine import OFFERED, Approval, Decision, Facts, Message
from policies.kinds.adapters import changes_bytes, transform_factors
from policies.kinds.public_donors import answers_of_step, donors_of_one_peer_most, drop_wrong_donors, within_share
from policies.kinds.public_responses import withhold_responses
from policies.schema import LoraSchema
from policies.screens import screen_facts, texts_of
from silo.config import CoordinatorPlace
from silo.guard.archive import Archive
from silo.guard.channel import Export, FileChannel, GrpcChannel, server_certificate
from silo.guard.decisions import (
    Judge,
    Outcomes,
    Readings,
    overruled,
    places_by_row,
    tensor_digests,
)
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.messages import (
    Allowed,
    Carried,
    Channel,
    Counters,
    Denied,
    Held,
    Inbound,
    IngressDenied,
    NotSent,
    Original,
    Sink,
    TlsFiles,
)
from silo.guard.proxied import proxy_of

# Tensor replies are bounded by the schema; everything else by this (threat T23).
_SMALL_REPLY_BYTES_MAX = codec.SMALL_PAYLOAD_BYTES_MAX


class Gate:
    """Holds the channel, the signing key and the policy.

    Args:
        channel: the one connection.
        ledger: counters and history that survive a kill.
        archive: makes room for what leaves, and keeps it until it is answered, or longer.
        signing_key: our message-signing key.
        coordinator_key: its pinned message-signing key.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        judge: Judge,
        ledger: Ledger,
        archive: Archive,
        federation: str,
        signing_key: Ed25519PrivateKey,
        coordinator_key: Ed25519PublicKey,
    ) -> None:
        self.judge = judge
        self.ingress = Ingress(judge, ledger, federation=federation, coordinator_key=coordinator_key)
        self._channel = channel
        self._archive = archive
        self._ledger = ledger
        self._signing_key = signing_key
        self._federation = federation
        self._outcomes = Outcomes(judge, ledger)
        self._windows = PollWindows(judge.record, "egress")
        self.counters = Counters()

    # ---- the way out -------------------------------------------------------------------------------

    def send(
        self,
        place: Place,
        body: ProtobufMessage,
        *,
        wait_seconds: float = 0.0,
        into: Sink | None = None,
    ) -> Inbound:
        """Offer a small message, send it at once if it is allowed, and return the coordinator's answer.

        Args:
            place: of the message.
            body: its values.
            wait_seconds: how long the coordinator may wait before it answers (polls).
            into: keeps the answer's payload as it comes (fetches).

        Raises:
            DeniedError: the policy says no, or asks for persons; recorded, nothing sent.
            UnreachableError, NotAllowedError, PeerError, OperationError: see `transmit`.
        """
        offered = self.offer(place, body)
        if not isinstance(offered, Allowed):
            reasons = offered.decision.reasons
            raise DeniedError(
                f"this site's policy does not let {place.kind} out",
                hint=offered.decision.explain()[:500],
                code=reasons[0] if len(reasons) == 1 else "DENIED",
            )
        return self.transmit(offered, wait_seconds=wait_seconds, into=into)

    def offer(
        self,
        place: Place,
        body: ProtobufMessage,
        *,
        tensors: Mapping[str, Array] | None = None,
        read_from: Buffer = b"",
    ) -> Allowed | Denied | Held:
        """Decide on a message of parsed values; an allowed one may then be handed to `transmit`.

        For a tensor kind `body` is the header and `tensors` has float32 arrays by wire name. `read_from` is the payload
        that both were read from, in memory that nobody else can write to, or nothing.

        Raises:
            LogFullError, OperationError: it cannot be recorded; the gate is halted and nothing is sent.
        """
        if tensors is not None and isinstance(body, pb.Factors):
            with self._archive.ahead(read_from, self.judge.policy.file.egress.updates.get(place.kind), body.dtype):
                return self._offer_update(place, body, tensors, read_from)
        payload = codec.encode(body)
        message = self.judge.outbound(place, payload)
        if isinstance(body, pb.PublicResponses) or self.judge.screens_asked(message):
            return self._offer_texts(message, payload)
        return self.decide_payload(place, payload)

    def _offer_update(
        self, place: Place, body: pb.Factors, tensors: Mapping[str, Array], read_from: Buffer
    ) -> Allowed | Denied | Held:
        """Whole factors are judged as offered, since what is wrong with them must show before anything is made fit;
        then each value is clipped, rounded and written once, and those bytes are judged. What is fit is judged as is.

        Args:
            place: of the update.
            body: the trainer's header.
            tensors: float32 arrays by wire name.
            read_from: as `offer`.
        """
        header, payload_bytes, tensors = factors_header(place.kind, self.judge.site.schema, body, tensors, read_from)
        message = Message("egress", place, self.judge.site.spiffe_id, payload_bytes, header, tensors)
        facts, decision = self.judge.judge(message, stage=OFFERED)
        as_offered = codec.factors_pieces(header, tensors)  # made as they are read, by one of the lines below
        if decision.verdict == "deny":
            return self._outcomes.denied(facts, decision, tensor_digests(payload_bytes, sha256_of(as_offered)))
        block, fit, transform = self.judge.policy.file.egress.updates.get(place.kind), None, dict[str, Any]()
        if block is not None:
            try:
                fit, transform = transform_factors(facts["l2"], block, secrets.token_bytes)
            except (ArithmeticError, ValueError) as error:
                # Values that cannot be made fit: a refusal like any other, with its cause on record (B5).
                overruling = overruled(decision, "TRANSFORM_FAILED", type(error).__name__)
                return self._outcomes.denied(facts, overruling, tensor_digests(payload_bytes, sha256_of(as_offered)))
        readings, changed = Readings(), changes_bytes(transform, header.dtype)
        if not changed and is_rebuilt(read_from, header, payload_bytes, facts):
            payload, readings = read_from, Readings(measured=facts)
        else:
            payload = self._archive.begin(codec.joined_factors(header, payload_bytes, tensors, fit))
        digest = sha256_hex(payload)
        original = Original(payload_bytes, facts, transform, sha256_of(as_offered) if changed else digest)
        return self.decide_payload(place, payload, original=original, readings=readings, digest=digest)

    def _offer_texts(self, message: Message, payload: bytes) -> Allowed | Denied | Held:
        """Texts that are to be read: first the rules that need nothing of that (T55); then answers are graded, and each
        text goes through every screen; then what is left is decided on.

        A response that was not graded in time is dropped here, and with on_hit withhold one with a hit. What leaves are
        the bytes of a message in which it had been graded wrong, and the screens have run the same once, so the
        coordinator learns of no hit (T18). Of other kinds nothing is dropped: a hit denies the message, and so many a
        day halt the kind.
        """
        offered = message
        facts, decision = self.judge.judge(message, stage=OFFERED, readings=Readings())
        if decision.would_be == "deny":
            return self._outcomes.denied(facts, decision, self.judge.digests(message.place.kind, payload))
        readings, transform = self.judge.graded(message), dict[str, Any]()
        places = list(range(len(readings.ungraded)))
        if late := sum(readings.ungraded):
            transform["responses_ungraded"] = late
            message, readings, places = self._without(message, readings, readings.ungraded)
        facts, decision = self.judge.judge(message, stage=OFFERED, readings=readings)
        if decision.verdict == "deny":
            original = Original(len(payload), facts, transform) if transform else None
            digests = self.judge.digests(message.place.kind, payload)
            return self._outcomes.denied(facts, decision, digests, original=original)
        readings = self.judge.screened(message, readings)
        if (screened := readings.screened) is not None:
            self.judge.count_hits(message, screened)
            facts |= screen_facts(screened, len(list(texts_of(message.body))))
            block = self.judge.policy.file.egress.public_responses
            if isinstance(message.body, pb.PublicResponses) and block is not None:
                withheld = [bool(hits) and block.on_hit == "withhold" for hits in screened.hits]
                transform["responses_withheld"] = sum(withheld)
                if any(withheld) and not screened.failed:
                    message, readings, left = self._without(message, readings, withheld)
                    places = [places[place] for place in left]
        original = Original(len(payload), facts, transform) if transform or screened is not None else None
        if message is not offered:
            self.judge.places_sent = message.place, places_by_row(_answers(offered), places)
            payload = codec.encode(message.body)
        return self.decide_payload(message.place, payload, original=original, readings=readings)

    @staticmethod
    def _without(message: Message, readings: Readings, dropped: Sequence[bool]) -> tuple[Message, Readings, list[int]]:
        """A message without some of its answers, and where the others stood."""
        left, places = withhold_responses(_answers(message), dropped)
        return replace(message, body=left, payload_bytes=left.ByteSize()), readings.of(places), places

    def decide_payload(
        self,
        place: Place,
        payload: Buffer,
        *,
        approvals: tuple[Approval, ...] = (),
        granted: Sequence[int] = (),
        original: Original | None = None,
        readings: Readings | None = None,
        graded: Facts | None = None,
        digest: str = "",
    ) -> Allowed | Denied | Held:
        """Decide on the exact bytes that will be sent, and record the decision durably.

        `approvals` are of persons whose signature over the payload's digest was verified; `granted` has the numbers of
        their records. `original` is what the payload was before its transforms. `readings` has what was found in its
        texts or values; without it they are screened now. `graded` has the facts from when the same bytes were held,
        since people's orders wait for no grading. `digest` is the payload's SHA-256, where it is known already.
        """
        message = self.judge.outbound(place, payload)
        digest = digest or sha256_hex(payload)
        digests = self.judge.digests(place.kind, payload, digest)
        if graded is not None:
            readings = self.judge.screened(message, self.judge.graded_before(message, graded))
        facts, decision = self.judge.judge(message, approvals=approvals, readings=readings)
        judged_by = self.judge.book.view(facts, approvals).to_json()  # before this message counts: the log replays
        if decision.verdict == "deny" or (decision.verdict == "allow" and not decision.may_leave):
            return self._outcomes.denied(facts, decision, digests, original=original, history=judged_by)
        content, archived = not place.kind.startswith("control."), False
        if content:
            with self.judge.halting():
                archived = self._archive.keep(payload, digest)
        record = partial(self.judge.record_decision, facts, decision, digests, original=original, history=judged_by)
        try:
            if decision.verdict == "hold":
                record()
                return Held(place, decision, facts, payload)
            # Counted first: a crash between the two writes costs a number, never lets an uncounted byte out.
            sequence = self.judge.count(facts, place.run)
            by_line = not isinstance(self._channel, FileChannel)
            if by_line and not content and polls.is_empty(place.kind, message.body):
                # Many empty polls over a line share one record, which is on disk before the first of them leaves (P2).
                window = self._windows.take(
                    self.judge.site.coordinator_id,
                    place.kind,
                    run=place.run,
                    policy=self.judge.policy.digest,
                    now=self.judge.now(),
                    sequence=sequence,
                    decide=lambda permission: record(sequence=sequence, detail=permission),
                )
                return Allowed(place, payload, digest, window.decision, sequence, window=window)
            decision_seq = record(sequence=sequence, archived=archived, approvals=granted)
        except RecordError as error:
            return self._outcomes.unrecorded(facts, decision, digests, error, kept=digest if content else "")
        outbox_id = None
        if content:
            item = OutboxItem(0, place, digest, len(payload), decision_seq, self.judge.now(), "allowed", 0, archived)
            with self.judge.halting():
                outbox_id = self._ledger.keep_until_sent(item)
        return Allowed(place, payload, digest, decision_seq, sequence, 0, outbox_id)

    def close_windows(self) -> None:
        """Record how many polls left under the decisions on record. Raises as `record`."""
        self._windows.close()

    def transmit(self, allowed: Allowed, *, wait_seconds: float = 0.0, into: Sink | None = None) -> Inbound:
        """Send what was allowed, record the outcome, let the answer in and return it.

        Raises:
            UnreachableError, NotAllowedError, OperationError: not known to have arrived (recorded as indeterminate), or
                not taken by a halted coordinator; a content message stays in the outbox for `retry`.
            PeerError: the answer was refused; the message itself counts as sent.
        """
        self.judge.check_recorded()
        envelope = seal(
            allowed.place, allowed.digest, federation=self._federation, sender=self.judge.site.spiffe_id,
            sequence=allowed.sequence, attempt=allowed.attempt, key=self._signing_key,
        )  # fmt: skip
        try:
            reply = self._channel.exchange(
                envelope,
                allowed.payload,
                wait_seconds=wait_seconds,
                into=into,
                reply_bytes_max=max(_SMALL_REPLY_BYTES_MAX, 2 * self.judge.site.schema.payload_bytes),
            )
        except Carried:
            self._record_sent(allowed, carried=True)
            raise
        except FedSiloError as error:
            if isinstance(error, PeerError):
                self._outcomes.record("egress.sent", allowed)
                self._outcomes.settle(allowed)
            elif not isinstance(error, NotSent):
                self._outcomes.record("egress.indeterminate", allowed)
            if isinstance(error, UnreachableError | NotAllowedError) and not isinstance(error, NotSent):
                self.counters.last_fault = error.message
            raise
        self._record_sent(allowed)
        self.counters.last_contact, self.counters.last_fault = self.judge.clock(), ""
        try:
            inbound = self.ingress.let_in(reply.envelope, reply.payload, to_window=allowed.window is not None)
        except PeerError:
            self._outcomes.settle(allowed)  # the message itself is out, whatever is wrong with the answer
            raise
        if allowed.window is not None and isinstance(inbound.body, pb.Refusal):
            allowed.window.refused += 1
        self._outcomes.answered(allowed, inbound.body)
        return inbound

    def transmit_in_turn(self, allowed: Allowed) -> Inbound:
        """Send what was just allowed, unless something that was allowed before it still waits: content leaves in the
        order in which it was allowed. With the last update the coordinator closes a round, and refuses answers that
        come later.

        Raises:
            NotSent: it waits behind that in the outbox, and both go out with the next turn. Further as `transmit`.
        """
        if any(item.id < (allowed.outbox_id or 0) for item in self._ledger.outbox("allowed")):
            raise NotSent(f"{allowed.kind} of round {allowed.round} waits behind what was allowed before it")
        return self.transmit(allowed)

    def _record_sent(self, allowed: Allowed, *, carried: bool = False) -> None:
        self._outcomes.record("egress.sent", allowed, carried=carried)
        self.counters.messages[allowed.kind] += 1
        self.counters.payload_bytes[allowed.kind] += len(allowed.payload)

    def retry(self, item: OutboxItem) -> Inbound:
        """Send an allowed content message again, under a new sequence. Raises as `once_more` and `transmit`."""
        return self.transmit(self._outcomes.once_more(item))

    def answered_later(self, item: OutboxItem, sequence: int, answer: Inbound) -> None:
        """Take the answer, which came in a file, to what left in another under `sequence`."""
        self._outcomes.answered_later(item, sequence, answer.body)

    def writing_into(self, path: Path, header: Header) -> AbstractContextManager[Export]:
        """Carry what is sent inside in a file. Raises UsageError: this silo dials its coordinator."""
        if not isinstance(self._channel, FileChannel):
            raise UsageError("this silo dials its coordinator", hint="files are for `coordinator: {address: files}`")
        return self._channel.into(path, header, self._signing_key)

    def interrupt(self, *, for_good: bool = False) -> None:
        """Give up the exchange in flight, or all of them. Safe in a signal handler."""
        self._channel.interrupt(for_good=for_good)

    def close(self) -> None:
        self._channel.close()


def factors_header(
    kind: str, schema: LoraSchema, header: pb.Factors, tensors: Mapping[str, Array], read_from: Buffer = b""
) -> tuple[pb.Factors, int, Mapping[str, Array]]:
    """Header rebuilt from values (B4), bytes of the whole payload, and the values; of the trainer's header only what
    the rules judge is taken over.

    Args:
        kind: of the update.
        schema: of the run's base model.
        header: the trainer's.
        tensors: float32 arrays by wire name.
        read_from: a payload that header and values are read from, in place of those two.

    Raises:
        PeerError: it is no payload.
    """
    if read_from:
        factors = codec.decode_factors(read_from)
        header, tensors = factors.header, factors.tensors
    # No schema names the tensors of ReFT kinds: the policy does, and its rules compare rank, dtype and base.
    digest, rank, scale, dtype = schema.digest, schema.rank, schema.scale, schema.dtype
    if kind in REFT_KINDS:
        digest, rank, scale, dtype = "", header.rank, 1.0, header.dtype
    made = codec.factors_head(
        tensors, base_digest=header.base_digest, schema_sha256=digest, rank=rank, scale=scale, dtype=dtype
    )
    return *made, tensors


def is_rebuilt(read_from: Buffer, header: pb.Factors, payload_bytes: int, facts: Facts) -> bool:
    """Return whether bytes already are what would be rebuilt from the header and the values that were read from them
    (B4): this header, then every value in its place and in canonical form (T4), and nothing besides. They may be sent
    then, and what was measured of them holds.

    Args:
        read_from: what `factors_header` read the values from.
        header: from `factors_header`.
        payload_bytes: from `factors_header`.
        facts: of these values.
    """
    start = codec.factors_start(header)
    return (
        len(read_from) == payload_bytes
        and read_from[: len(start)] == start
        and facts.get("values_not_canonical") == 0
        and facts.get("elements") == sum(math.prod(entry.shape) for entry in header.tensors)
    )


def check_answer(
    envelope: pb.Envelope, payload: Buffer | None, *, federation: str, coordinator_id: str, key: Ed25519PublicKey
) -> None:
    """Check that the pinned coordinator signed exactly these bytes for this federation. payload: None where its digest
    is compared by whoever reads it.

    Raises:
        PeerError: it did not; the code names what is wrong first.
    """
    wrong = ""
    if envelope.sender != coordinator_id:
        wrong = f"comes from {envelope.sender[:120]!r}, the policy pins {coordinator_id}"
    elif envelope.federation != federation:
        wrong = f"is of federation {envelope.federation[:64]!r}, this silo is of {federation!r}"
    if wrong:
        hint = "is coordinator.address in silo.yaml the one of this federation's coordinator?"
        raise PeerError(WireCode.SENDER_MISMATCH, f"the answer {wrong}", hint=hint)
    if payload is not None and envelope.payload_digest.hex() != sha256_hex(payload):
        raise PeerError(WireCode.DIGEST_MISMATCH, "the answer's payload is not the one that was signed")
    pinned = sha256_hex(key.public_bytes_raw())[:16]
    check_signature(
        envelope,
        key,
        what="the answer",
        signer=f"the pinned key of the coordinator (SHA-256 {pinned})",
        hint="compare id/coordinator.pub and the policy's coordinator_key_sha256 with the coordinator's people",
    )


def _answers(message: Message) -> pb.PublicResponses:
    assert isinstance(message.body, pb.PublicResponses)  # noqa: S101  # of no other are any dropped here
    return message.body


def open_channel(place: CoordinatorPlace, files: TlsFiles) -> Channel:
    """The real channel. Only here, so that whoever sends has passed the gate. Raises as `proxy_of`."""
    if place.by_files:
        return FileChannel()
    return GrpcChannel(place.address, files, proxy=proxy_of(place), keepalive_seconds=place.keepalive_seconds)


def coordinator_leaf(place: CoordinatorPlace, files: TlsFiles) -> bytes:
    """The coordinator's certificate (DER). Raises UnreachableError, naming the cause; further as `proxy_of`."""
    return server_certificate(place.address, files, proxy_of(place))


# ---- the way in -------------------------------------------------------------------------------------


class Ingress:
    """The way in. It is handed what the channel brought, and can send nothing.

    Args:
    judge: decides and records.
    ledger: remembers the sequence numbers.
    federation: its name.
    coordinator_key: the coordinator's pinned message-signing key.
    """

    def __init__(self, judge: Judge, ledger: Ledger, *, federation: str, coordinator_key: Ed25519PublicKey) -> None:
        self._judge = judge
        self._ledger = ledger
        self._federation = federation
        self._coordinator_key = coordinator_key

    def let_in(
        self, envelope: pb.Envelope, payload: Buffer, *, carried: bool = False, to_window: bool = False
    ) -> Inbound:
        """Believe a message of the coordinator, or not; recorded either way.

        Args:
            envelope: as it came.
            payload: as it came.
            carried: in a file, of which one message after the other is let in when it is its turn, and once more after
                a kill; none that was taken in for good is (T29).
            to_window: it answers a poll of a window; where it says only that there is nothing, and is let in, no record
                of its own is written.

        Raises:
            PeerError: wrong sender, federation, digest, signature or sequence, not canonical, more than a record takes,
                or denied by policy.
        """
        judge = self._judge
        try:
            check_answer(
                envelope,
                payload,
                federation=self._federation,
                coordinator_id=judge.site.coordinator_id,
                key=self._coordinator_key,
            )
            body, tensors = parsed(envelope.kind, payload, INBOUND_KINDS)
            with judge.halting():
                self._ledger.accept_sequence("", envelope.sequence, carried=carried)
        except ConflictError as error:
            self._record_refused(envelope.kind, payload, WireCode.SEQUENCE_REPLAYED)
            raise PeerError(WireCode.SEQUENCE_REPLAYED, error.message) from error
        except PeerError as error:
            self._record_refused(envelope.kind, payload, error.wire_code)
            raise
        message = Message(
            "ingress",
            Place(envelope.run, envelope.round, envelope.step, envelope.kind),
            envelope.sender,
            len(payload),
            body,
            tensors,
        )
        original = None
        if isinstance(body, pb.PublicDonors) and judge.policy.file.ingress.public_donors is not None:
            message, original, facts, decision = self._without_bad_donors(message, body, payload)
        else:
            facts, decision = judge.judge(message)
        digest = envelope.payload_digest.hex()  # compared above
        digests = judge.digests(envelope.kind, payload, digest)
        try:
            if not (to_window and envelope.kind == "control.ack" and decision.verdict == "allow"):
                judge.record_decision(facts, decision, digests, sequence=envelope.sequence, original=original)
        except RecordError as error:
            self._record_refused("unknown", payload, error.code)
            raise PeerError(WireCode.MALFORMED, f"what came cannot be written down: {error.message}") from error
        if decision.verdict == "deny":
            raise IngressDenied(envelope, decision, body)
        held = decision if decision.verdict == "hold" else None
        return Inbound(message.place, envelope.sequence, message.body, payload, digest, facts, held)

    def _without_bad_donors(
        self, message: Message, body: pb.PublicDonors, payload: Buffer
    ) -> tuple[Message, Original | None, Facts, Decision]:
        """Donors that are wrong by this site's own grading or not graded in time, that a screen finds something in,
        that are more than one peer's share, or of a silo that the round's transcript does not name as a donor, are
        dropped and counted by the silo they are from (T21). What any other rule refuses is not read any further (T23,
        T55); then, and only then, it is read, and judged as a whole."""
        judge = self._judge
        facts, decision = judge.judge(message, stage=OFFERED, readings=Readings())
        if decision.would_be == "deny":
            return message, None, facts, decision
        readings = judge.graded(message)
        facts, decision = judge.judge(message, stage=OFFERED, readings=readings)
        block = judge.policy.file.ingress.public_donors
        if decision.would_be == "deny" or block is None:  # the policy, or where the run stands, is another one by now
            return message, None, facts, decision
        readings = judge.screened(message, readings)
        facts |= screen_facts(readings.screened, len(list(texts_of(body)))) if readings.screened else {}
        verdicts, _ = readings.graded or ((), ())
        hits = [bool(each_hit) for each_hit in readings.screened.hits] if readings.screened else []
        # A screen that failed has no hits to go by: nothing is dropped for it, and the whole message is denied.
        clean = [not hit for hit in hits] if len(hits) == len(verdicts) else [True] * len(verdicts)
        # A method that trains on the whole pool wants the wrong ones too, where the policy says so.
        good = [
            right is not None and (right or not block.verify_locally) and fine
            for right, fine in zip(verdicts, clean, strict=True)
        ]
        if (pool := judge.view.pool) is not None:
            written = [donor for prompt in body.prompts for donor in prompt.donors if donor.HasField("response")]
            good = [fine and donor.origin in pool for fine, donor in zip(good, written, strict=True)]
        most = donors_of_one_peer_most(block, answers_of_step(body, judge.view.plan))
        keep = within_share(body, good, most)
        clean_body, dropped = drop_wrong_donors(body, keep)
        record = {"donors_dropped": dropped, "donors_hit": sum(hits), "donors_over_share": sum(good) - sum(keep)}
        if late := sum(readings.ungraded):
            record["donors_ungraded"] = late
        original = Original(len(payload), facts, record)
        places = [place for place, each in enumerate(keep) if each]
        message = replace(message, body=self._places_as_offered(message, clean_body))
        return message, original, *judge.judge(message, readings=readings.of(places))

    def _places_as_offered(self, message: Message, body: pb.PublicDonors) -> pb.PublicDonors:
        """Own answers are named by their place in what was sent; where some were withheld, the trainer counts more."""
        sent, places = self._judge.places_sent
        if message.place[:3] != sent[:3]:
            return body
        moved = pb.PublicDonors()
        for prompt in body.prompts:
            target, own = moved.prompts.add(prompt_index=prompt.prompt_index), places.get(prompt.prompt_index, [])
            for donor in prompt.donors:
                if not donor.HasField("response") and donor.position >= len(own):
                    continue  # names an answer that was never sent
                target.donors.add().CopyFrom(donor)
                if not donor.HasField("response"):
                    target.donors[-1].position = own[donor.position]
        return moved

    def decide_inbound(self, held: Inbound, approvals: tuple[Approval, ...], granted: Sequence[int] = ()) -> Decision:
        """Judge a held inbound message (a plan) again, with the approvals given since.

        Args:
            held: as it came.
            approvals: whose they are.
            granted: numbers of the records that they are in.
        """
        judge = self._judge
        message = Message("ingress", held.place, judge.site.coordinator_id, len(held.payload), held.body, None)
        facts, decision = judge.judge(message, approvals=approvals)
        judged_by = judge.book.view(facts, approvals).to_json()
        digests = judge.digests(held.kind, held.payload, held.digest)
        judge.record_decision(facts, decision, digests, approvals=granted, history=judged_by)
        return decision

    def _record_refused(self, kind: str, payload: Buffer, code: str) -> None:
        """An answer that was not believed far enough to be measured, or whose measures no record takes."""
        kind = kind if kind in INBOUND_KINDS else "unknown"
        peer, digests = self._judge.site.coordinator_id, self._judge.digests("", payload)
        self._judge.record_denied("ingress", kind, str(code), peer=peer, payload=digests)

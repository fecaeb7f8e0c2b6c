"""The only way in: what the coordinator sends is believed with its pinned signature, a fresh sequence number, canonical
bytes and the policy's consent, and recorded either way (threats T12, T13, T20, T21, T29).

The gate hands over what its channel brought; nothing here can send. Does not stop: a coordinator that says false things
of the right form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedsilo.audit.record import RecordError
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import ConflictError, PeerError, WireCode
from fedsilo.protocol.services import INBOUND_KINDS
from policies.engine import OFFERED, Approval, Decision, Facts, Message
from policies.facts_text import answers_of_step
from policies.rules.ingress import donors_of_one_peer_most
from policies.screening import screen_facts, texts_of
from policies.transform import drop_wrong_donors, within_share
from silo.guard import envelopes
from silo.guard.decisions import Judge, Readings
from silo.guard.ledger import Ledger
from silo.guard.messages import Inbound, IngressDenied, Original, parsed


class Entrance:
    """Args:
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
            envelopes.check(
                envelope, payload, federation=self._federation, coordinator_id=judge.site.coordinator_id,
                key=self._coordinator_key,
            )  # fmt: skip
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
            "ingress", envelope.kind, envelope.run, envelope.round, envelope.step, envelope.sender, len(payload), body,
            tensors,
        )  # fmt: skip
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
        return Inbound(
            envelope.kind, envelope.run, envelope.round, envelope.step, envelope.sequence, message.body, payload,
            digest, facts, decision if decision.verdict == "hold" else None,
        )  # fmt: skip

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
        hits = [bool(found) for found in readings.screened.hits] if readings.screened else []
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
        kept, dropped = drop_wrong_donors(body, keep)
        record = {"donors_dropped": dropped, "donors_hit": sum(hits), "donors_over_share": sum(good) - sum(keep)}
        if late := sum(readings.ungraded):
            record["donors_ungraded"] = late
        original = Original(len(payload), facts, record)
        places = [place for place, each in enumerate(keep) if each]
        message = replace(message, body=self._places_as_offered(message, kept))
        return message, original, *judge.judge(message, readings=readings.of(places))

    def _places_as_offered(self, message: Message, body: pb.PublicDonors) -> pb.PublicDonors:
        """Own answers are named by their place in what was sent; where some were withheld, the trainer counts more."""
        sent, places = self._judge.places_sent
        if (message.run, message.round, message.step) != sent:
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
        body, tensors = parsed(held.kind, held.payload, INBOUND_KINDS)
        message = Message(
            "ingress", held.kind, held.run, held.round, held.step, judge.site.coordinator_id, len(held.payload), body,
            tensors,
        )  # fmt: skip
        facts, decision = judge.judge(message, approvals=approvals)
        judged_by = judge.book.view(facts, approvals).to_json()
        digests = judge.digests(held.kind, held.payload, held.digest)
        judge.record_decision(facts, decision, digests, approvals=granted, history=judged_by)
        return decision

    def _record_refused(self, kind: str, payload: Buffer, code: str) -> None:
        """An answer that was not believed far enough to be measured, or whose measures no record takes."""
        kind = kind if kind in INBOUND_KINDS else "unknown"
        self._judge.record(
            "ingress.decision", kind=kind, decision="deny", reasons=[str(code)], direction="ingress",
            peer=self._judge.site.coordinator_id, payload=self._judge.digests("", payload),
        )  # fmt: skip

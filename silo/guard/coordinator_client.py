"""The silo's messages to the coordinator other than contributions: hello, control messages, checkpoints; and when to
try again after a failure. There is one exchange at a time, and every message goes through the gate.

As one of the witnesses (`Witnessing`) a silo shows its log, countersigns what others show, and counts who countersigned
its own. All of that travels in `control.checkpoint`, through the coordinator. What another silo shows is believed by
that silo's own signature, under the key in its certificate when it is first seen (issued by the federation CA, for a
peer that the policy lists) and pinned from then on. A peer that signed two histories is told of in our log, with both
notes kept; its log is not countersigned any more, and everything else goes on: the fault is not ours.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from certs.identity import peer_identity
from fedsilo.audit.checkpoint import checkpoint_in, cosigned_at, cosigner_key
from fedsilo.audit.log import AuditLog
from fedsilo.audit.witness import OWN_HISTORY_LOST, TwoHistories
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import (
    FedSiloError,
    NotAllowedError,
    OperationError,
    UnreachableError,
    VerificationError,
    WireCode,
)
from fedsilo.protocol.place import Place
from fedsilo.protocol.services import PROTOCOL_VERSION
from policies.model import Policy
from silo.guard.gate import Gate
from silo.guard.messages import Carried, Inbound, NotSent, Sink
from silo.guard.site import Site, own_verifiers

_log = logging.getLogger("fedsilo.silo")

BACKOFF_SECONDS = (0.5, 15.0)
_ASKED = frozenset({"control.hello", "control.poll", "control.heartbeat"})  # a yes to one ends a back-off
RELAY_SECONDS = 1.0  # at most one exchange about other silos' checkpoints in this time
WITNESS_WAIT_SECONDS = 60.0  # for cosignatures after a round; the coordinator's own comes at once


NOTHING_YET = Inbound(
    Place("", 0, 0, "control.ack"), 0, pb.Ack(), b"", "", {}
)  # in place of an answer that comes by file


def seconds_between(earlier: float, later: float) -> int:
    """Whole seconds of the clock that begin after one moment and not after another.

    No fraction of a second decides when a message leaves that only time leads to: a trainer may move those (T11).
    """
    return math.floor(later) - math.floor(earlier)


class Carrier(Protocol):
    """Takes the place of an exchange at a silo without a line: `silo.guard.exchange.FileExchange`."""

    @property
    def open(self) -> bool:
        """A file is being written: what is said goes into it."""

    def instead(self, place: Place, body: Any) -> Inbound | None:
        """The answer, where nothing is sent; None where the gate is to send it."""


class Refused(OperationError):
    """The coordinator does not take this silo in."""

    default_code = "REFUSED"


class CoordinatorClient:
    """Speaks with the coordinator, one message at a time, through the gate.

    Args:
            site: what hello says.
            gate: the way out.
            witnessing: our part in the exchange of checkpoints; an attribute too.
            code_sha256: hash of the program that runs here.
            monotonic: seconds.
            compare: is told the coordinator's signed time, and the seconds in which it was signed.

    Attributes:
        joined: hello was answered with yes.
        poll_now: an answer said that something waits.
        checkpoints_wait: an answer said that other silos' checkpoints or cosignatures wait.
        policy_said: digest of the policy that hello named last; empty before the first.
        last_sent: when something was last said.
        carrier: where there is no line.
        retry_at: not before then, after trouble.
    """

    def __init__(
        self, site: Site, gate: Gate, witnessing: Witnessing, *, code_sha256: str, monotonic: Callable[[], float],
        compare: Callable[[float, float], None] = lambda signed, took: None,
    ) -> None:  # fmt: skip
        self._site = site
        self._gate, self._judge = gate, gate.judge
        self.witnessing = witnessing
        self._code_sha256 = code_sha256
        self._compare = compare
        self._monotonic = monotonic
        self._backoff_seconds = 0.0
        self.joined = False
        self._isolation_said = self.policy_said = ""
        self.poll_now = False
        self.checkpoints_wait = False
        self._witnessed_at = self._shown_at = 0.0
        self._between_rounds = False
        self.last_sent = 0.0
        self.retry_at = 0.0
        self.carrier: Carrier | None = None

    def join(self, isolation: str) -> None:
        """Say hello with the hashes that all must share.

        Raises:
            OperationError: the coordinator refuses this silo; names both values.
            UnreachableError: it is halted or stopping, and has not looked at what this silo says.
        """
        site, fingerprints, policy = self._site, self._site.fingerprints, self._judge.policy.digest
        answer = self.say(
            Place("", 0, 0, "control.hello"),
            pb.Hello(
                protocol_min=PROTOCOL_VERSION,
                protocol_max=PROTOCOL_VERSION,
                base_model_sha256=fingerprints.base_model_sha256,
                tokenizer_sha256=fingerprints.tokenizer_sha256,
                template_sha256=fingerprints.template_sha256,
                load=site.config.model.load,
                lora_schema_sha256=site.schema.digest,
                public_set_sha256=site.public.sha256,
                held_out_sha256=site.held_out.sha256,
                code_sha256=self._code_sha256,
                isolation=isolation,
                role=site.config.role,
                policy_sha256=policy,
                own_verifiers_sha256=own_verifiers(site.config),
                min_updates=self._judge.policy.file.federation.min_updates,
            ),
        )
        if isinstance(answer.body, pb.Refusal) and answer.body.code == WireCode.HALTED:
            cause, hint = _refusal_in_words("control.hello", answer.body)
            raise UnreachableError(cause, hint=hint)
        if isinstance(answer.body, pb.Refusal):
            raise self.refused(answer.body)
        self.joined, self._isolation_said, self.policy_said = True, isolation, policy
        if answer is not NOTHING_YET:
            _log.info("joined %s at %s", site.config.federation, site.config.coordinator.address)
        self.witness()

    def refused(self, refusal: pb.Refusal) -> Refused:
        """A hello that was answered with no: both values, and which file of this site holds ours."""
        config, policy = self._site.config, self._site.policy
        model = f"the model folder {config.model.path}"
        holder = {
            "base_model_sha256": model,
            "tokenizer_sha256": model,
            "template_sha256": model,
            "load": f"model.load in {config.source}",
            "lora_schema_sha256": f"the LoRA schema that {policy.source} pins",
            "public_set_sha256": f"the public set {config.data.public.path}",
            "held_out_sha256": f"the held-out set {config.data.held_out.path}",
            "own_verifiers_sha256": "of the packages that brought the verifiers here; `silo check` names them",
            "min_updates": f"federation.min_updates of {policy.source}",
            "protocol": "this version of FedSilo",
        }.get(refusal.field, f"{config.source}")
        if refusal.field:
            cause = f"{refusal.field}: it expects {refusal.expected or '-'}, here it is {refusal.got or '-'}"
            agreed = "what the federation agreed on"
            if refusal.field == "protocol":
                agreed = "one version of FedSilo on both sides: update the older one"
            hint = f"ours is {holder}; use {agreed}"
        elif refusal.code == WireCode.NOT_A_MEMBER:
            cause = f"{config.spiffe_id} is not on its list of silos"
            hint = "its people list this silo under `silos:` in coordinator.yaml, or this is another silo's certificate"
        else:
            cause, hint = f"it answers hello with {refusal.code or 'no code'}", "the coordinator's log says why"
            if refusal.code == WireCode.UNKNOWN_FIELD:
                hint = (
                    f"this FedSilo speaks protocol {PROTOCOL_VERSION}, and the coordinator's an earlier one; use one "
                    "version of FedSilo on both sides: update the coordinator"
                )
        return Refused(f"the coordinator refuses this silo: {cause}", hint=hint, code=refusal.code or "REFUSED")

    def isolation_is(self, level: str) -> None:
        """A trainer was started anew: if its isolation is another than the coordinator was told, hello is due again."""
        if self._isolation_said and level != self._isolation_said:
            _log.warning("the trainer's isolation was %s and is %s", self._isolation_said, level)
            self.joined = False

    def look_at_policy(self) -> None:
        """If another policy decides than the coordinator was told, hello is due again: transcripts name it."""
        if self.policy_said and self._judge.policy.digest != self.policy_said:
            self.joined = False

    def say(self, place: Place, body: Any, *, wait_seconds: float = 0.0, into: Sink | None = None) -> Inbound:
        """Send one control message through the gate and note what the answer says beside its content.

        That the run is paused is a claim of the coordinator's, which people are shown as such (T37): what is done,
        sent or let in here is the same with it and without. Does not notice a coordinator that says nothing, or
        something else, while its run stands still. A refusal backs off like a line that is down, whatever it refuses:
        a coordinator that takes nothing is asked a few times a minute. It does not stop a coordinator that answers
        polls with nothing at once, and each is recorded: the rate of the policy is what bounds those.
        """
        if self.carrier is not None and (told := self.carrier.instead(place, body)) is not None:
            return told
        try:
            answer = self._gate.send(place, body, wait_seconds=wait_seconds, into=into)
        except Carried:
            return NOTHING_YET
        self.last_sent = self._monotonic()
        if isinstance(answer.body, pb.Refusal):
            cause, hint = _refusal_in_words(place.kind, answer.body)
            self.back_off(UnreachableError(cause, hint=hint))
            return answer
        if place.kind in _ASKED:  # a yes to a complaint about an answer that is not let in says nothing of the next one
            self._backoff_seconds = 0.0
        if isinstance(answer.body, pb.Ack) and answer.body.pending and place.kind != "control.poll":
            self.poll_now = True
        if isinstance(answer.body, pb.Ack) and answer.body.checkpoints:
            self.checkpoints_wait = True
        if isinstance(answer.body, pb.Ack):
            self._gate.counters.run_paused = answer.body.paused
        elif place.kind == "control.poll":
            self._gate.counters.run_paused = False  # of a paused run nothing comes
        return answer

    def tell(self, place: Place, body: Any) -> None:
        """Say something that the run does not depend on: a failure is logged and forgotten."""
        try:
            self.say(place, body)
        except FedSiloError as error:
            _log.warning("%s was not said: %s", place.kind, error.message)

    def abstain(self, run: str, round_number: int = 0, step: int = 0, *, heard: bool = True) -> None:
        """Say that this silo takes no part in a run (round 0), in a round of it (step 0), or in one step.

        Args:
            run: of which.
            round_number: in it.
            step: in that.
            heard: raise where the coordinator is not known to have heard it; else that is logged and forgotten.

        Raises:
            UnreachableError, NotAllowedError, PeerError, DeniedError: only if `heard`.
        """
        say = self.say if heard else self.tell
        body = pb.Abstain(round=round_number, step=step)
        say(Place(run, round_number, step, "control.abstain"), body)

    def decline(
        self, run: str, round_number: int = 0, *, heard: bool = True, code: WireCode = WireCode.DECLINED
    ) -> None:
        """Say no to a plan (round 0) or to a round of it. Whether a person or a rule said it here, it is the same
        messages with the same bytes in them: the reason is for this site's own log (B6, T18).

        Args, Raises: as `abstain`. code: of what is measured here, one of the two for adapters.
        """
        self.tell_declined(run, code)
        self.abstain(run, round_number, heard=heard)

    def tell_declined(self, run: str, code: WireCode = WireCode.DECLINED) -> None:
        """Say in the one code for it that something is not let in here."""
        self.tell(Place(run, 0, 0, "control.error"), pb.ErrorReport(code=code.value))

    def witness(self, *, same: bool = False) -> None:
        """Exchange checkpoints (threat T38): ours out, theirs in, each countersigned, and those of other silos.

        Args:
            same: show the checkpoint that was shown last: for what others have for us, which needs no other one.
        """
        if self.carrier is not None and not self.carrier.open:
            return  # the next export shows our log as it is then
        sent = self.witnessing.message(same=same)
        self.checkpoints_wait, self._witnessed_at = False, self._monotonic()
        if not same:
            self._shown_at, self._between_rounds = self._witnessed_at, True
        asked_at = self._monotonic()
        answer = self.say(Place("", 0, 0, "control.checkpoint"), sent)
        if isinstance(answer.body, pb.Checkpoint):
            self.witnessed(answer.body)
            if (signed := self.witnessing.signed_time(answer.body)) is not None:
                self._compare(signed, self._monotonic() - asked_at)

    def witnessed(self, answer: pb.Checkpoint) -> None:
        """Take in what the coordinator answered to our checkpoint."""
        self.witnessing.take_in(answer)
        self.count_witnesses()

    def count_witnesses(self) -> None:
        """Tell the rules how many parties have countersigned our log."""
        self._judge.view = self._judge.view.witnessed(self.witnessing.count())

    def witness_round(self, number: int) -> None:
        """A round is over: show the log as it is, as often as the policy asks."""
        if number % self._judge.policy.file.audit.checkpoint_every.rounds == 0:
            self.witness()

    def round_opened(self) -> None:
        """Return whether enough parties had countersigned our log was judged with it."""
        self._between_rounds = False

    def relay(self) -> bool:
        """Fetch and bring cosignatures before the coordinator's next message, if some wait, or if ours are too few.

        Returns:
            whether to wait for more of them first. Not longer than a while: then the next round is not opened here.
        """
        now = self._monotonic()
        wanting = self._between_rounds and self._judge.view.round > 0 and not self.witnessing.enough
        rested = seconds_between(self._witnessed_at, now) >= RELAY_SECONDS
        if (self.checkpoints_wait or self.witnessing.owes or wanting) and rested:
            self.witness(same=True)
            wanting = wanting and not self.witnessing.enough
        waits = wanting and now - self._shown_at < WITNESS_WAIT_SECONDS
        if waits:
            self.retry_at = now + RELAY_SECONDS
        self.count_witnesses()
        return waits

    def back_off(self, error: FedSiloError) -> None:
        """Say nothing more for a while, which grows from one trouble to the next until something is answered with yes;
        a second trouble within the while does not lengthen it."""
        if isinstance(error, Carried | NotSent):
            return  # by file: there is nothing to be tried again before people come
        self._gate.counters.last_fault = error.message
        now = self._monotonic()
        if self._backoff_seconds and now < self.retry_at:
            _log.warning("%s", error.line)
            return
        first, most = BACKOFF_SECONDS
        self._backoff_seconds = min(most, max(first, 2 * self._backoff_seconds))
        self.retry_at = now + self._backoff_seconds * random.uniform(0.7, 1.3)  # noqa: S311  # jitter
        _log.warning("%s; next try in %.1f s", error.line, self._backoff_seconds)


def _refusal_in_words(kind: str, refusal: pb.Refusal) -> tuple[str, str]:
    """Return who refused what, and where to look."""
    if refusal.code == WireCode.HALTED:
        return (
            f"the coordinator is halted or stopping: it refuses {kind}",
            "its people see why: `coordinator status`; this silo goes on by itself when that is put right",
        )
    return f"the coordinator refuses {kind}: {refusal.code}", "the coordinator's log says why"


# ---- checkpoints ------------------------------------------------------------------------------------


MESSAGE_BYTES_MAX = 30_000  # shipped policies let control messages of up to 32,768 out; what is left goes next time


class Witnessing:
    """Exchanges checkpoints: of this site's log, and of the other parties' logs.

    Args:
        own_id: SPIFFE id of this silo.
        now_seconds: UTC seconds that never go back.
    """

    def __init__(
        self,
        audit: AuditLog,
        policy: Callable[[], Policy],
        *,
        own_id: str,
        trust_root_pem: bytes,
        now_seconds: Callable[[], float],
    ) -> None:
        self._audit = audit
        self._policy = policy
        self._own_id = own_id
        self._trust_root_pem = trust_root_pem
        self._now_seconds = now_seconds
        # After a restart nobody knows what had arrived; to say it again does no harm.
        self._owed = audit.countersigned(self.peers)
        self._included: set[str] = set()
        self._recorded: set[tuple[str, str]] = set()

    @property
    def coordinator(self) -> str:
        return self._policy().file.federation.coordinator

    @property
    def peers(self) -> tuple[str, ...]:
        """The other silos that the policy lists."""
        return tuple(peer for peer in self._policy().file.federation.peers if peer != self._own_id)

    @property
    def owes(self) -> bool:
        """Return whether cosignatures of ours are not known to have arrived."""
        return bool(self._owed)

    def message(self, *, same: bool) -> pb.Checkpoint:
        """Our checkpoint, and what we countersigned since that was last taken in.

        Args:
            same: show the checkpoint that was shown last.
        """
        message = self._audit.offer(self.coordinator, same=same)
        peers, self._included = frozenset(self.peers), set[str]()
        for peer, note in sorted(self._owed.items()):
            if peer in peers and message.ByteSize() + len(note.encode()) <= MESSAGE_BYTES_MAX:
                message.countersigned.append(note)
                self._included.add(peer)
        return message

    def take_in(self, answer: pb.Checkpoint) -> None:
        """The answer to the last `message`.

        Raises:
            VerificationError: the coordinator's log lost or changed records, or somebody's cosignature shows that ours
                did: then nothing may go on.
        """
        self._audit.take(answer, self.coordinator)
        peers = frozenset(self.peers)  # what `message` said has arrived
        self._owed = {peer: note for peer, note in self._owed.items() if peer in peers and peer not in self._included}
        for shown in answer.peers:
            self._follow(shown)
        for note in answer.countersigned:
            self._cosignature(note)

    def signed_time(self, answer: pb.Checkpoint) -> int | None:
        """UTC seconds at which the coordinator countersigned the checkpoint that it was just shown; None where it did
        not. Raises VerificationError: it is not its signature."""
        note = answer.cosigned_note
        if not note or checkpoint_in(note).size != self._audit.offered_size:
            return None
        return cosigned_at(note, cosigner_key(self.coordinator, self._audit.key_of(self.coordinator)))

    def _follow(self, shown: pb.PeerLog) -> None:
        peer = ""
        try:
            if not shown.steps:
                return
            peer = checkpoint_in(shown.steps[-1].note).origin
            if peer not in self.peers:
                return  # a silo of the federation that this site does not deal with
            if not self._audit.knows(peer):
                self._introduce(peer, shown.certificate_pem)
            note = self._audit.follow(peer, shown.steps)
            if note:
                self._owed[peer] = note
        except TwoHistories as error:
            self._record_refused(peer, error)
            _log.critical("%s; %s", error.message, error.hint)
        except (VerificationError, NotAllowedError) as error:
            if self._record_refused(peer, error):
                _log.warning("the log of %s is not countersigned: %s", peer or "a silo", error.message)

    def key_of(self, peer: str, certificate_pem: str) -> Ed25519PublicKey | None:
        """The message-signing key of a silo that the policy lists; None where nobody vouches for one.

        Args:
            peer: its SPIFFE id.
            certificate_pem: shown for it, in case that it is met for the first time.
        """
        if peer not in self.peers:
            return None
        try:
            if not self._audit.knows(peer):
                self._introduce(peer, certificate_pem)
            return self._audit.key_of(peer)
        except (VerificationError, NotAllowedError) as error:
            _log.warning("no signature of %s counts: %s", peer, error.message)
            return None

    def _introduce(self, peer: str, certificate_pem: str) -> None:
        now = datetime.fromtimestamp(self._now_seconds(), UTC)
        identity = peer_identity(certificate_pem.encode(), self._trust_root_pem, now, role="silo")
        if identity.spiffe_id != peer:
            raise NotAllowedError(f"the certificate shown for {peer} is of {identity.spiffe_id}")
        self._audit.pin_peer(peer, identity.signing_public_key)

    def _record_refused(self, peer: str, error: VerificationError | NotAllowedError) -> bool:
        """Record that a log was not countersigned; each cause once a start, since it comes with every exchange."""
        known = peer if peer in self.peers else ""
        if (known, error.code) in self._recorded:
            return False
        self._recorded.add((known, error.code))
        self._audit.append(
            "ingress.decision",
            kind="control.checkpoint",
            decision="deny",
            reasons=[error.code],
            direction="ingress",
            peer=known or self.coordinator,
        )
        return True

    def _cosignature(self, note: str) -> None:
        """Check a cosignature. Raises VerificationError: a note signed by our key contradicts our log."""
        try:
            self._audit.add_cosignature(note)
        except VerificationError as error:
            if error.code == OWN_HISTORY_LOST:
                raise
            _log.info("a cosignature was worth nothing: %s", error.message)

    @property
    def shown_size(self) -> int:
        """Size of our log as it was last shown; 0 before the first time."""
        return self._audit.offered_size

    def was_shown(self, size: int) -> None:
        """Take up, after a restart, what was last shown of our log."""
        self._audit.was_offered(size)

    def count(self) -> int:
        """Return how many parties that the policy counts have countersigned our log as it was last shown."""
        counted = self._policy().file.audit.witnesses
        among = (self.coordinator,) * ("coordinator" in counted) + self.peers * ("peers" in counted)
        size = self._audit.offered_size
        return self._audit.witnesses(size, among) if size else 0

    @property
    def enough(self) -> bool:
        return self.count() >= self._policy().file.audit.min_witnesses

"""This silo among the witnesses: it shows its log, countersigns what others show, and counts who countersigned its own.

Everything travels in `control.checkpoint`, through the coordinator. What another silo shows is believed by that silo's
own signature, under the key in its certificate when it is first seen (issued by the federation CA, for a peer that the
policy lists) and pinned from then on. A peer that signed two histories is told of in our log, with both notes kept; its
log is not countersigned any more, and everything else goes on: the fault is not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from certs.identity import peer_identity
from fedsilo.audit.checkpoint import cosigned_at, cosigner_key, parse_checkpoint, parse_note
from fedsilo.audit.cosignature import LogStep, Offer
from fedsilo.audit.log import AuditLog
from fedsilo.audit.witness import OWN_HISTORY_LOST, TwoHistories
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotAllowedError, VerificationError
from policies.load import Policy

_log = logging.getLogger("fedsilo.silo")

MESSAGE_BYTES_MAX = 30_000  # shipped policies let control messages of up to 32,768 out; what is left goes next time


class Witnessing:
    """Args:
    audit: our log.
    policy: the one in force.
    own_id: SPIFFE id of this silo.
    trust_root_pem: the federation CA.
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
        self._said: set[str] = set()
        self._told: set[tuple[str, str]] = set()

    @property
    def coordinator(self) -> str:
        return self._policy().file.federation.coordinator

    @property
    def peers(self) -> tuple[str, ...]:
        """The other silos that the policy lists."""
        return tuple(peer for peer in self._policy().file.federation.peers if peer != self._own_id)

    @property
    def owes(self) -> bool:
        """Whether cosignatures of ours are not known to have arrived."""
        return bool(self._owed)

    def message(self, *, same: bool) -> pb.Checkpoint:
        """Our checkpoint, and what we countersigned since that was last taken in.

        Args:
            same: show the checkpoint that was shown last.
        """
        offer = self._audit.offer(self.coordinator, same=same)
        message = pb.Checkpoint(
            note=offer.note,
            previous_size=offer.previous_size,
            consistency=offer.consistency,
            cosigned_note=offer.cosigned_note,
        )
        peers, self._said = frozenset(self.peers), set[str]()
        for peer, note in sorted(self._owed.items()):
            if peer in peers and message.ByteSize() + len(note.encode()) <= MESSAGE_BYTES_MAX:
                message.countersigned.append(note)
                self._said.add(peer)
        return message

    def take_in(self, answer: pb.Checkpoint) -> None:
        """The answer to the last `message`.

        Raises:
            VerificationError: the coordinator's log lost or changed records, or somebody's cosignature shows that ours
                did: then nothing may go on.
        """
        offer = Offer(answer.note, answer.previous_size, tuple(answer.consistency), answer.cosigned_note)
        self._audit.take(offer, self.coordinator)
        peers = frozenset(self.peers)  # what `message` said has arrived
        self._owed = {peer: note for peer, note in self._owed.items() if peer in peers and peer not in self._said}
        for shown in answer.peers:
            self._follow(shown)
        for note in answer.countersigned:
            self._cosignature(note)

    def signed_time(self, answer: pb.Checkpoint) -> int | None:
        """UTC seconds at which the coordinator countersigned the checkpoint that it was just shown; None where it did
        not. Raises VerificationError: it is not its signature."""
        note = answer.cosigned_note
        if not note or parse_checkpoint(parse_note(note).text).size != self._audit.offered_size:
            return None
        return cosigned_at(note, cosigner_key(self.coordinator, self._audit.key_of(self.coordinator)))

    def _follow(self, shown: pb.PeerLog) -> None:
        peer = ""
        try:
            steps = [LogStep(step.note, step.previous_size, tuple(step.consistency)) for step in shown.steps]
            if not steps:
                return
            peer = parse_checkpoint(parse_note(steps[-1].note).text).origin
            if peer not in self.peers:
                return  # a silo of the federation that this site does not deal with
            if not self._audit.knows(peer):
                self._introduce(peer, shown.certificate_pem)
            note = self._audit.follow(peer, steps)
            if note:
                self._owed[peer] = note
        except TwoHistories as error:
            self._tell(peer, error)
            _log.critical("%s; %s", error.message, error.hint)
        except (VerificationError, NotAllowedError) as error:
            if self._tell(peer, error):
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

    def _tell(self, peer: str, error: VerificationError | NotAllowedError) -> bool:
        """Record that a log was not countersigned; each cause once a start, since it comes with every exchange."""
        known = peer if peer in self.peers else ""
        if (known, error.code) in self._told:
            return False
        self._told.add((known, error.code))
        self._audit.append(
            "ingress.decision", kind="control.checkpoint", decision="deny", reasons=[error.code], direction="ingress",
            peer=known or self.coordinator,
        )  # fmt: skip
        return True

    def _cosignature(self, note: str) -> None:
        """Raises VerificationError: a note signed by our key that our log does not bear out."""
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
        """After a restart: so was our log as it was last shown."""
        self._audit.was_offered(size)

    def count(self) -> int:
        """How many parties that the policy counts have countersigned our log as it was last shown."""
        counted = self._policy().file.audit.witnesses
        among = (self.coordinator,) * ("coordinator" in counted) + self.peers * ("peers" in counted)
        size = self._audit.offered_size
        return self._audit.witnesses(size, among) if size else 0

    @property
    def enough(self) -> bool:
        return self.count() >= self._policy().file.audit.min_witnesses

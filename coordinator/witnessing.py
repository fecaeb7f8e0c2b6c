"""The coordinator's half of the checkpoint exchange: countersign a silo's log, hand out our own (threat T38)."""

from __future__ import annotations

from certs.identity import PeerIdentity
from fedsilo.edge.audit_log import AuditLog
from fedsilo.treaty.audit.witness import Offer
from fedsilo.treaty.errors import PeerError, VerificationError, WireCode
from fedsilo.treaty.wire._generated import federation_pb2 as pb


def exchange_checkpoints(audit: AuditLog, peer: PeerIdentity, theirs: pb.Checkpoint) -> pb.Checkpoint:
    """Take in a silo's checkpoint and answer with ours; its log and key bear the name of its certificate.

    Raises:
        PeerError: its log lost or changed records, or a signature does not verify; nothing is countersigned.
        OperationError: our memory of its log cannot be stored.
    """
    offer = Offer(theirs.note, theirs.previous_size, tuple(theirs.consistency), theirs.cosigned_note)
    try:
        audit.trust_peer(peer.spiffe_id, peer.signing_public_key)
        audit.take(offer, peer.spiffe_id)
        ours = audit.offer(peer.spiffe_id)
    except VerificationError as error:
        raise PeerError(WireCode.CHECKPOINT_INCONSISTENT, f"checkpoint of {peer.spiffe_id}: {error.message}") from error
    return pb.Checkpoint(
        note=ours.note,
        previous_size=ours.previous_size,
        consistency=ours.consistency,
        cosigned_note=ours.cosigned_note,
    )

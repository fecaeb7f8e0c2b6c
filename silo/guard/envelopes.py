"""Envelopes: what is signed around the bytes that leave, and what is checked around those that come back."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode
from silo.guard.messages import Allowed


def sealed(allowed: Allowed, *, federation: str, sender: str, key: Ed25519PrivateKey) -> pb.Envelope:
    """The signed envelope of an allowed message.

    Args:
        allowed: the decision, with its sequence.
        federation: its name.
        sender: our SPIFFE id.
        key: our message-signing key.
    """
    envelope = pb.Envelope(
        federation=federation,
        run=allowed.run,
        round=allowed.round,
        step=allowed.step,
        attempt=allowed.attempt,
        kind=allowed.kind,
        sender=sender,
        sequence=allowed.sequence,
        payload_digest=bytes.fromhex(allowed.digest),
    )
    envelope.signature = key.sign(codec.signing_bytes(envelope))
    return envelope


def check(
    envelope: pb.Envelope, payload: codec.Buffer | None, *, federation: str, coordinator_id: str, key: Ed25519PublicKey
) -> None:
    """Whether the pinned coordinator signed exactly these bytes for this federation.

    Args:
        envelope: as it came.
        payload: as it came; None where its digest is compared by whoever reads it.
        federation: its name.
        coordinator_id: the pinned SPIFFE id.
        key: the coordinator's pinned message-signing key.

    Raises:
        PeerError: it did not; the code names what is wrong first.
    """
    if envelope.sender != coordinator_id:
        raise PeerError(
            WireCode.SENDER_MISMATCH,
            f"the answer comes from {envelope.sender[:120]!r}, the policy pins {coordinator_id}",
            hint="is coordinator.address in silo.yaml the one of this federation's coordinator?",
        )
    if envelope.federation != federation:
        raise PeerError(
            WireCode.SENDER_MISMATCH,
            f"the answer is of federation {envelope.federation[:64]!r}, this silo is of {federation!r}",
            hint="is coordinator.address in silo.yaml the one of this federation's coordinator?",
        )
    if payload is not None and envelope.payload_digest.hex() != codec.sha256_hex(payload):
        raise PeerError(WireCode.DIGEST_MISMATCH, "the answer's payload is not the one that was signed")
    try:
        signed = codec.signing_bytes(envelope)
    except ValueError as error:  # a number beyond what canonical JSON carries, so nobody can have signed it
        raise PeerError(WireCode.MALFORMED, "the answer's envelope holds a number that nobody can sign") from error
    try:
        key.verify(envelope.signature, signed)
    except InvalidSignature as error:
        pinned = codec.sha256_hex(key.public_bytes_raw())
        raise PeerError(
            WireCode.SIGNATURE_INVALID,
            f"the answer is not signed by the pinned key of the coordinator (SHA-256 {pinned[:16]})",
            hint="compare id/coordinator.pub and the policy's coordinator_key_sha256 with the coordinator's people",
        ) from error

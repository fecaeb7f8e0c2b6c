"""Envelopes: signs the bytes of a message, and checks them before any is believed or read.

Both parties seal and check by this module, each by the key that it holds of the other (threats T21, T30, B7).
Does not stop: the owner of a key from signing something false; the same envelope from coming twice, which its sequence
shows to whoever keeps count (T29).
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, Buffer
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.kinds import TENSOR_KINDS
from fedsilo.protocol.place import Place


def seal(
    place: Place, digest: str, *, federation: str, sender: str, sequence: int, attempt: int, key: Ed25519PrivateKey
) -> pb.Envelope:
    """Return the signed envelope of a message.

    Args:
        place: where it belongs.
        digest: SHA-256 of its payload.
        federation: its name.
        sender: our SPIFFE id.
        sequence: our number of it, never used before.
        attempt: which one it is.
        key: our message-signing key.
    """
    envelope = pb.Envelope(
        federation=federation, run=place.run, round=place.round, step=place.step, attempt=attempt, kind=place.kind,
        sender=sender, sequence=sequence, payload_digest=bytes.fromhex(digest),
    )  # fmt: skip
    envelope.signature = key.sign(codec.signing_bytes(envelope))
    return envelope


def check_signature(envelope: pb.Envelope, key: Ed25519PublicKey, *, what: str, signer: str, hint: str = "") -> None:
    """Check that the owner of a key signed every field of an envelope. what, signer: in the words of an error.

    Raises:
        PeerError: nobody can have signed it (`MALFORMED`), or this key did not (`SIGNATURE_INVALID`).
    """
    try:
        signed = codec.signing_bytes(envelope)
    except ValueError as error:  # a number beyond what canonical JSON carries
        raise PeerError(WireCode.MALFORMED, f"{what} has an envelope with a number that nobody can sign") from error
    try:
        key.verify(envelope.signature, signed)
    except InvalidSignature as error:
        raise PeerError(WireCode.SIGNATURE_INVALID, f"{what} is not signed by {signer}", hint=hint) from error


def parsed(
    kind: str, payload: Buffer, kinds: Mapping[str, type[ProtobufMessage]]
) -> tuple[ProtobufMessage, Mapping[str, Array] | None]:
    """Canonical bytes as a message, and arrays for a tensor kind.

    Raises:
        PeerError: unknown kind, or not canonical.
    """
    if kind not in kinds:
        raise PeerError(WireCode.UNKNOWN_KIND, "a message of this kind does not belong here")
    if kind in TENSOR_KINDS:
        factors = codec.decode_factors(payload)
        return factors.header, factors.tensors
    return codec.decode(kinds[kind], payload), None

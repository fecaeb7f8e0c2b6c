"""When a party countersigns another's checkpoint, and what it remembers of it (threat T38).

A witness countersigns a checkpoint only if the log's key signed it and an RFC 6962 proof shows that the log only
grew since the checkpoint this witness countersigned before. Its memory is one tree head per log; the caller makes
the new one durable *before* it hands the cosignature out. From then on the log's owner cannot show anybody who asks
this witness a history in which those records are missing or different.

Does not stop: a log that was false from the start, and records younger than the last countersigned checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedsilo.audit.checkpoint import Checkpoint, log_key, open_checkpoint
from fedsilo.audit.merkle import verify_consistency
from fedsilo.protocol.errors import VerificationError

PROOF_HASHES_MAX = 128


@dataclass(frozen=True)
class TreeHead:
    """What the witness remembers of a log."""

    size: int
    root: bytes


@dataclass(frozen=True)
class Offer:
    """What one party sends the other in a `control.checkpoint` (the fields of wire message Checkpoint)."""

    note: str  # the sender's latest checkpoint
    previous_size: int  # the size at which, as far as the sender knows, the receiver countersigned last; 0 for never
    consistency: tuple[bytes, ...]  # proof previous_size -> size of note
    cosigned_note: str  # the receiver's latest note the sender knows, with the sender's cosignature; or empty


@dataclass(frozen=True)
class LogStep:
    """One checkpoint of a log as its owner showed it to the relay (the fields of wire message LogStep)."""

    note: str
    previous_size: int  # of the checkpoint that the owner showed before; 0 for the first
    consistency: tuple[bytes, ...]  # proof previous_size -> size of note


def judge(
    previous: TreeHead | None, note: str, proof: Sequence[bytes], *, origin: str, public_key: Ed25519PublicKey
) -> Checkpoint:
    """The checkpoint to countersign and to remember.

    Args:
        previous: what this witness remembers of the log, or None at the first contact.
        note: the log's signed checkpoint.
        proof: consistency proof from `previous` (empty at first contact and when the size is unchanged).
        origin: whose log it must be.
        public_key: that party's key, from its certificate.

    Raises:
        VerificationError: not signed by that party, shorter than before, or not an extension of what was before.
    """
    checkpoint = open_checkpoint(note, log_key(origin, public_key))
    if len(proof) > PROOF_HASHES_MAX:
        raise VerificationError(f"a consistency proof has at most {PROOF_HASHES_MAX} hashes")
    if previous is None:
        if proof:
            raise VerificationError(f"{origin}: a proof from a checkpoint that was never countersigned here")
        return checkpoint
    if checkpoint.size < previous.size:
        raise VerificationError(
            f"{origin} shows a log of {checkpoint.size} records; it had {previous.size}: records were dropped",
            hint="keep both notes: they are signed evidence",
        )
    if not verify_consistency(previous.size, checkpoint.size, proof, previous.root, checkpoint.root):
        raise VerificationError(
            f"{origin}: the log at size {checkpoint.size} does not extend the one countersigned at {previous.size}",
            hint="keep both notes: they are signed evidence of two histories",
        )
    return checkpoint

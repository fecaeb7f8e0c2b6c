"""Signed checkpoints of an audit log, in the C2SP forms that transparency-log tools already read, and when a party
countersigns another's (threat T38).

* c2sp.org/signed-note: a text, an empty line, and signature lines `— <key name> <base64(key id || signature)>`.
* c2sp.org/tlog-checkpoint: the text is origin, size and base64 root, a line each. The log's own signature
  (type 0x01) carries the origin as its key name.
* c2sp.org/tlog-cosignature: another party's line (type 0x04) signs a prefix, a time and the checkpoint, so that a
  cosignature can never be taken for a log's own signature, although a party uses one key for both.

A checkpoint here has no extension lines: what is not specified is refused.

A witness countersigns a checkpoint only if the log's key signed it and an RFC 6962 proof shows that the log only
grew since the checkpoint this witness countersigned before. Its memory is one checkpoint per log; the caller makes
the new one durable *before* it hands the cosignature out. From then on the log's owner cannot show anybody who asks
this witness a history in which those records are missing or different.

Does not stop: a log that was false from the start, and records younger than the last countersigned checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsilo.audit.merkle import HASH_BYTES, verify_consistency
from fedsilo.protocol.errors import VerificationError
from fedsilo.protocol.services import NOTE_SIGNATURES_MAX

LOG_SIGNATURE = 0x01  # Ed25519 over the text
COSIGNATURE_V1 = 0x04  # Ed25519 over "cosignature/v1\ntime <seconds>\n" and the text, preceded by the time
NOTE_BYTES_MAX = 64 << 10
_EM_DASH = "—"
_KEY_ID_BYTES = 4
_SIGNATURE_BYTES = 64
_TIME_BYTES = 8


@dataclass(frozen=True)
class VerifierKey:
    """A named public key. As text (a C2SP vkey): `<name>+<key id, hex>+<base64(type || public key)>`."""

    name: str
    algorithm: int
    public_bytes: bytes

    @property
    def key_id(self) -> bytes:
        data = self.name.encode() + b"\n" + bytes([self.algorithm]) + self.public_bytes
        return hashlib.sha256(data).digest()[:_KEY_ID_BYTES]

    @property
    def text(self) -> str:
        encoded = base64.b64encode(bytes([self.algorithm]) + self.public_bytes).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"


@dataclass(frozen=True)
class NoteSignature:
    name: str
    key_id: bytes
    signature: bytes  # what follows the key id


@dataclass(frozen=True)
class Note:
    text: str  # ends with a newline
    signatures: tuple[NoteSignature, ...]

    def __str__(self) -> str:
        lines = (
            f"{_EM_DASH} {item.name} {base64.b64encode(item.key_id + item.signature).decode()}\n"
            for item in self.signatures
        )
        return self.text + "\n" + "".join(lines)


@dataclass(frozen=True)
class Checkpoint:
    """The commitment of a log: these many records, with this root."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def log_key(origin: str, key: Ed25519PublicKey) -> VerifierKey:
    """The key a log signs its own checkpoints with; its name is the log's origin."""
    return VerifierKey(check_name(origin), LOG_SIGNATURE, key.public_bytes_raw())


def cosigner_key(name: str, key: Ed25519PublicKey) -> VerifierKey:
    """The key a party countersigns other logs with; its name is the origin of the party's own log."""
    return VerifierKey(check_name(name), COSIGNATURE_V1, key.public_bytes_raw())


def check_name(name: str) -> str:
    """A key name or origin: printable, without white space or plus sign. Raises VerificationError."""
    if not name or len(name) > 255 or not name.isprintable() or "+" in name or any(c.isspace() for c in name):
        raise VerificationError(f"{name[:80]!r} is no key name: it needs 1 to 255 printable characters, no space, no +")
    return name


def parse_verifier_key(text: str) -> VerifierKey:
    """Read a verifier key. Raises VerificationError: malformed, or the key id does not belong to name and key."""
    name, _, encoded = text.split("+", 2) if text.count("+") > 1 else ("", "", ".")
    data = _decoded(encoded, "a verifier key reads name+id+base64")
    if len(data) != 33 or data[0] not in (LOG_SIGNATURE, COSIGNATURE_V1):
        raise VerificationError(f"verifier key of {name[:80]!r} is neither an Ed25519 nor a cosignature/v1 key")
    key = VerifierKey(check_name(name), data[0], data[1:])
    if key.text != text:
        raise VerificationError(f"verifier key of {name[:80]!r}: the key id does not belong to it")
    return key


def parse_note(text: str) -> Note:
    """Structure only; no signature is checked.

    Raises:
        VerificationError: not a signed note, or not in its one canonical spelling.
    """
    if len(text.encode("utf-8", "surrogatepass")) > NOTE_BYTES_MAX:
        raise VerificationError(f"a note has at most {NOTE_BYTES_MAX} bytes")
    body, separator, tail = text.rpartition("\n\n")
    if not separator or not tail.endswith("\n"):
        raise VerificationError("a signed note is a text, an empty line and signature lines")
    lines = tail[:-1].split("\n")
    if len(lines) > NOTE_SIGNATURES_MAX:
        raise VerificationError(f"a note has at most {NOTE_SIGNATURES_MAX} signatures")
    note = Note(body + "\n", tuple(_parse_signature(line) for line in lines))
    if any(ord(character) < 0x20 and character != "\n" for character in note.text) or str(note) != text:
        raise VerificationError("the note is not in canonical form")
    return note


def _parse_signature(line: str) -> NoteSignature:
    parts = line.split(" ")
    if len(parts) != 3 or parts[0] != _EM_DASH:
        raise VerificationError("a signature line reads: em dash, key name, base64")
    data = _decoded(parts[2], "a signature line carries base64")
    if len(data) <= _KEY_ID_BYTES:
        raise VerificationError("a signature line is too short")
    return NoteSignature(check_name(parts[1]), data[:_KEY_ID_BYTES], data[_KEY_ID_BYTES:])


def _decoded(text: str, otherwise: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise VerificationError(otherwise) from error


def sign_note(text: str, name: str, key: Ed25519PrivateKey) -> str:
    """A note with one plain signature (type 0x01). Raises ValueError: the text does not end with a newline."""
    if not text.endswith("\n"):
        raise ValueError("a note's text ends with a newline")
    verifier = log_key(name, key.public_key())
    return str(Note(text, (NoteSignature(name, verifier.key_id, key.sign(text.encode())),)))


def open_note(text: str, key: VerifierKey) -> Note:
    """The note, once `key`'s plain signature on it has been checked.

    Raises:
        VerificationError: malformed, not signed by that key, or wrongly signed.
    """
    note = parse_note(text)
    matching = [item for item in note.signatures if (item.name, item.key_id) == (key.name, key.key_id)]
    if key.algorithm != LOG_SIGNATURE or len(matching) != 1:
        raise VerificationError(f"the note carries no signature, or more than one, by the known key of {key.name}")
    try:
        Ed25519PublicKey.from_public_bytes(key.public_bytes).verify(matching[0].signature, note.text.encode())
    except InvalidSignature as error:
        raise VerificationError(f"the signature of {key.name} on the note is not valid") from error
    return note


def parse_checkpoint(text: str) -> Checkpoint:
    """Read a checkpoint's text (without signatures). Raises VerificationError unless it is in canonical form."""
    lines = text.split("\n")
    if len(lines) != 4 or lines[3] or not lines[1].isascii() or not lines[1].isdecimal() or len(lines[1]) > 16:
        raise VerificationError("a checkpoint reads origin, size, base64 root, a line each")
    root = _decoded(lines[2], "the root of a checkpoint is base64")
    checkpoint = Checkpoint(check_name(lines[0]), int(lines[1]), root)
    if len(root) != HASH_BYTES or checkpoint.text != text:
        raise VerificationError("the checkpoint is not in canonical form")
    return checkpoint


def checkpoint_in(note: str) -> Checkpoint:
    """The checkpoint in a note; no signature is checked. Raises VerificationError: malformed."""
    return parse_checkpoint(parse_note(note).text)


def sign_checkpoint(checkpoint: Checkpoint, key: Ed25519PrivateKey) -> str:
    return sign_note(checkpoint.text, checkpoint.origin, key)


def open_checkpoint(text: str, key: VerifierKey) -> Checkpoint:
    """The checkpoint in a note, once the log's signature has been checked.

    Raises:
        VerificationError: malformed, not signed by `key`, or of another log than `key` belongs to.
    """
    checkpoint = parse_checkpoint(open_note(text, key).text)
    if checkpoint.origin != key.name:
        raise VerificationError(f"a checkpoint of {checkpoint.origin} signed by {key.name}")
    return checkpoint


def cosign(text: str, name: str, key: Ed25519PrivateKey, time_seconds: int) -> str:
    """The note with `name`'s cosignature added (an older one by the same key is replaced).

    Only after `judge` accepted the note. Raises VerificationError: malformed.
    """
    note = parse_note(text)
    parse_checkpoint(note.text)
    verifier = cosigner_key(name, key.public_key())
    signature = time_seconds.to_bytes(_TIME_BYTES, "big") + key.sign(_cosigned_bytes(note.text, time_seconds))
    others = tuple(item for item in note.signatures if item.key_id != verifier.key_id or item.name != name)
    return str(Note(note.text, (*others, NoteSignature(name, verifier.key_id, signature))))


def cosigned_at(text: str, key: VerifierKey) -> int | None:
    """The time (UTC seconds) in `key`'s cosignature, or None if it has not cosigned.

    Raises:
        VerificationError: malformed, or a line that names the key does not verify.
    """
    note = parse_note(text)
    matching = [item for item in note.signatures if (item.name, item.key_id) == (key.name, key.key_id)]
    if not matching:
        return None
    data = matching[0].signature
    time_seconds = int.from_bytes(data[:_TIME_BYTES], "big")
    if key.algorithm != COSIGNATURE_V1 or len(matching) != 1 or len(data) != _TIME_BYTES + _SIGNATURE_BYTES:
        raise VerificationError(f"the cosignature of {key.name} is malformed")
    try:
        Ed25519PublicKey.from_public_bytes(key.public_bytes).verify(
            data[_TIME_BYTES:], _cosigned_bytes(note.text, time_seconds)
        )
    except InvalidSignature as error:
        raise VerificationError(f"the cosignature of {key.name} is not valid") from error
    return time_seconds


def only_signed_by(text: str, keys: Iterable[VerifierKey]) -> str:
    """The note with no signature lines but those that name one of `keys`. Raises VerificationError: none is left."""
    note = parse_note(text)
    known = {(key.name, key.key_id) for key in keys}
    signatures = tuple(item for item in note.signatures if (item.name, item.key_id) in known)
    if not signatures:
        raise VerificationError("the note carries no signature of a known key")
    return str(Note(note.text, signatures))


def merge_signatures(ours: str, theirs: str) -> str:
    """`ours` with the signature lines of `theirs` that it lacks; both over the same text. Raises VerificationError."""
    first, second = parse_note(ours), parse_note(theirs)
    if first.text != second.text:
        raise VerificationError("two notes over different texts cannot be merged")
    known = {(item.name, item.key_id) for item in first.signatures}
    added = tuple(item for item in second.signatures if (item.name, item.key_id) not in known)
    return str(Note(first.text, first.signatures + added))


def _cosigned_bytes(text: str, time_seconds: int) -> bytes:
    return f"cosignature/v1\ntime {time_seconds}\n{text}".encode()


# ---- what a witness countersigns ---------------------------------------------------------------------------------

PROOF_HASHES_MAX = 128


def judge(
    previous: Checkpoint | None, note: str, proof: Sequence[bytes], *, origin: str, public_key: Ed25519PublicKey
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

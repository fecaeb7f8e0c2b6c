"""Countersignatures: those that a log's owner gave to other logs, and those that its own log received (threat T38).

Two ways lead here. *Exchange*: two parties that talk hand each other their checkpoints; `offer(peer)` is sent, `take`
is called on what arrives. *Relay*: the coordinator carries what other silos showed it; `follow(peer, steps)`
countersigns a silo's newest checkpoint after a proof for every step from the remembered one. The relay can forge
neither half: a step is believed by the silo's own signature and an RFC 6962 proof, and the silo's key is taken from its
certificate the first time and pinned from then on (`pin_peer`). What was countersigned is on disk before anybody learns
of it, so the memory only grows, over restarts too.

Does not stop: a relay that carries nothing (then there are fewer witnesses, which the policy's `min_witnesses` sees),
and two histories shown from the very first contact.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsilo.audit.checkpoint import (
    Checkpoint,
    VerifierKey,
    checkpoint_in,
    cosign,
    cosigned_at,
    cosigner_key,
    judge,
    log_key,
    merge_signatures,
    only_signed_by,
    open_checkpoint,
    parse_verifier_key,
)
from fedsilo.audit.merkle import MerkleTree
from fedsilo.audit.reader import read_note
from fedsilo.audit.segments import LogFullError, file_stem
from fedsilo.files.durable import DiskFullError, write_durably
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, VerificationError

OWN_HISTORY_LOST = "OWN_HISTORY_LOST"  # code: others countersigned records that our own log does not have
EVIDENCE_MAX = 16  # notes of one party: one proves it, and a party that lies can sign any number


class TwoHistories(VerificationError):
    """A party signed two checkpoints that cannot both be true. Both are kept as evidence."""

    default_code = "TWO_HISTORIES"


def store_note(path: Path, data: bytes) -> None:
    """Write a note durably. Raises LogFullError where only space is lacking, else OperationError."""
    try:
        write_durably(path, data)
    except DiskFullError as error:
        raise LogFullError(f"no space to store a checkpoint: {error.message}") from error


class Witnessed(ABC):
    """The half of an `AuditLog` that deals with other parties. `_mutex` is held around everything that changes it."""

    directory: Path
    origin: str
    _key: Ed25519PrivateKey
    _log_key: VerifierKey
    _cosigner_key: VerifierKey
    _tree: MerkleTree
    _note: str
    _note_size: int

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._peers: dict[str, Ed25519PublicKey] = {}
        self._cosigned_sizes: dict[str, int] = {}
        self._offered = ""

    @abstractmethod
    def checkpoint(self) -> str:
        """Sign the present size and root."""

    @abstractmethod
    def _now(self) -> int:
        """UTC milliseconds."""

    # ---- who is who --------------------------------------------------------------------------------------

    def trust_peer(self, origin: str, public_key: Ed25519PublicKey) -> None:
        """Use this key (from the peer's certificate) for the peer's notes and cosignatures, and keep it for auditors.

        Raises:
            ConflictError: the peer claims this log's own name.
        """
        if origin == self.origin:
            raise ConflictError(f"a peer cannot have the name of this log, {origin}")
        keys = (log_key(origin, public_key), cosigner_key(origin, public_key))
        path = self.directory / "keys" / f"{file_stem(origin)}-{keys[0].key_id.hex()}.vkey"
        with self._mutex:
            if self._peers.get(origin) != public_key:
                if not path.exists():
                    write_durably(path, "".join(f"{key.text}\n" for key in keys).encode())
                self._peers[origin] = public_key
                self._cosigned_sizes.pop(origin, None)

    def pin_peer(self, origin: str, public_key: Ed25519PublicKey) -> None:
        """Trust a peer's key as `trust_peer` does, once: a party that was introduced through a relay keeps its key for
        good.

        Raises:
            VerificationError: another key is pinned.
        """
        with self._mutex:
            if origin in self._peers and self._peers[origin] != public_key:
                raise VerificationError(
                    f"{origin} is shown with another key than the pinned one",
                    hint=f"ask that party; if it began a new log, remove its file in {self.directory / 'keys'}",
                    code="PEER_KEY_CHANGED",
                )
            self.trust_peer(origin, public_key)

    def knows(self, origin: str) -> bool:
        """Return whether a party's key is known."""
        return origin in self._peers

    def key_of(self, origin: str) -> Ed25519PublicKey:
        """A party's key. Raises VerificationError: it was never introduced."""
        if origin not in self._peers:
            raise VerificationError(f"{origin} was not introduced to the log: its certificate has not been seen")
        return self._peers[origin]

    def _load_pinned(self) -> None:
        """Keys pinned before a restart. Of a party that had several, none: whoever deals with it says which."""
        found: dict[str, set[bytes]] = {}
        for path in sorted((self.directory / "keys").glob("*.vkey")):
            if path.name != "log.vkey":
                key = parse_verifier_key(path.read_text(encoding="utf-8").splitlines()[0])
                found.setdefault(key.name, set()).add(key.public_bytes)
        for name, keys in found.items():
            if len(keys) == 1:
                self._peers[name] = Ed25519PublicKey.from_public_bytes(*keys)

    def first_cosigned(self, size: int) -> int | None:
        """UTC seconds of the earliest cosignature of another party over the first `size` records; None without one."""
        with self._mutex:
            times = [
                time
                for path in sorted((self.directory / "checkpoints").glob("*.note"))
                if path.stem.isdecimal() and int(path.stem) >= size
                for origin, public_key in self._peers.items()
                if (time := cosigned_at(read_note(path), cosigner_key(origin, public_key))) is not None
            ]
        return min(times, default=None)

    # ---- exchange ----------------------------------------------------------------------------------------

    def offer(self, peer: str, previous_size: int | None = None, *, same: bool = False) -> pb.Checkpoint:
        """Our newest checkpoint, the proof from the one `peer` countersigned last, and its own with our cosignature.

        Args:
            peer: origin of the receiver's log.
            previous_size: where the proof starts, if the peer said so; by default what its cosignatures show.
            same: show the checkpoint that was shown last, so that an exchange about others' logs makes no other one.

        Raises:
            VerificationError: the peer was never introduced (`trust_peer`).
            OperationError: the checkpoint cannot be stored.
        """
        with self._mutex:
            self._offered = self._offered if same and self._offered else self.checkpoint()
            size = checkpoint_in(self._offered).size
            previous = self._cosigned_size(peer) if previous_size is None else min(previous_size, size)
            witnessed = self._witnessed_path(peer)
            cosigned = read_note(witnessed) if witnessed.exists() else ""
            own = only_signed_by(self._offered, [self._log_key])  # who else countersigned is not the peer's business
            proof = self._tree.consistency(previous, size)
            return pb.Checkpoint(note=own, previous_size=previous, consistency=proof, cosigned_note=cosigned)

    @property
    def offered_size(self) -> int:
        """Size of the checkpoint that was shown last; 0 before the first."""
        with self._mutex:
            return checkpoint_in(self._offered).size if self._offered else 0

    def was_offered(self, size: int) -> None:
        """After a restart: the checkpoint of that size was shown last."""
        with self._mutex:
            if (path := self._note_path(size)).exists():
                self._offered = read_note(path)

    def take(
        self, offer: pb.Checkpoint, peer: str, *, growing: Callable[[Checkpoint], object] = lambda _checkpoint: None
    ) -> Checkpoint | None:
        """Take in what `peer` sent: its cosignature of our log, then its checkpoint, which we countersign, durably.

        Args:
            offer: what it sent.
            peer: origin of its log.
            growing: called with a checkpoint that is further than the remembered one, once it is judged and before it
                is remembered: what this keeps is never behind our memory.

        Returns the checkpoint now countersigned, or None where the peer had not yet seen our last cosignature: our
        next offer carries it and the peer's next proof will start there.

        Raises:
            VerificationError: the peer was never introduced (`trust_peer`); its log dropped or changed records; or
                its cosignature shows that *our* log did.
        """
        with self._mutex:
            if offer.cosigned_note:
                self.add_cosignature(offer.cosigned_note)
            public_key = self.key_of(peer)
            previous = self._remembered(peer)
            seen = open_checkpoint(offer.note, log_key(peer, public_key))
            remembered_size = previous.size if previous else 0
            if offer.previous_size > remembered_size:
                raise VerificationError(
                    f"{peer} proves from size {offer.previous_size}; here size {remembered_size} is remembered",
                    hint="the witnessed folder of this site was lost or restored from a backup",
                )
            if offer.previous_size < remembered_size < seen.size:
                return None
            proof = () if seen.size == remembered_size else offer.consistency
            checkpoint = judge(previous, offer.note, proof, origin=peer, public_key=public_key)
            if previous is None or checkpoint.size > previous.size:
                growing(checkpoint)
            self._countersign(offer.note, peer, public_key)
            return checkpoint

    def clock_of(self, peer: str, cosigned_note: str) -> int | None:
        """Seconds by which a peer's clock was ahead of ours in the last exchange, in which it countersigned this note
        of ours just after we had countersigned its own; None where one of the two did not. Call it before `take`.

        Raises:
            VerificationError: a signature is not its party's.
        """
        with self._mutex:
            path = self._witnessed_path(peer)
            if not cosigned_note or not path.exists():
                return None
            ours = cosigned_at(read_note(path), self._cosigner_key)
            theirs = cosigned_at(cosigned_note, cosigner_key(peer, self.key_of(peer)))
            return None if ours is None or theirs is None else theirs - ours

    def _countersign(self, note: str, peer: str, public_key: Ed25519PublicKey) -> str:
        """Only after `judge`."""
        signed = only_signed_by(note, [log_key(peer, public_key)])
        cosigned = cosign(signed, self.origin, self._key, self._now() // 1000)
        store_note(self._witnessed_path(peer), cosigned.encode())
        return cosigned

    # ---- relay -------------------------------------------------------------------------------------------

    def follow(self, peer: str, steps: Sequence[pb.LogStep]) -> str:
        """Countersign the newest of a pinned party's checkpoints that the steps prove to extend the remembered one.

        At the first contact nothing is remembered, and the newest one is taken as it is.

        Returns:
            its note with our cosignature, durable; empty where there is nothing further to countersign.

        Raises:
            TwoHistories: the party signed another root for the remembered size; the note is kept as evidence.
            VerificationError: unknown party, not its signature, or a step that its proof does not bear out.
        """
        with self._mutex:
            public_key = self.key_of(peer)
            remembered = head = self._remembered(peer)
            newest = ""
            for step in steps if head else steps[-1:]:
                seen = open_checkpoint(step.note, log_key(peer, public_key))
                if head is not None and seen.size == head.size and seen.root != head.root:
                    raise self._two_histories(peer, step.note, seen, head)
                if head is not None and (seen.size <= head.size or step.previous_size != head.size):
                    continue  # an old one, or one that begins elsewhere: it proves nothing about what is remembered
                proof = () if head is None else step.consistency
                head, newest = judge(head, step.note, proof, origin=peer, public_key=public_key), step.note
            return self._countersign(newest, peer, public_key) if newest and head != remembered else ""

    def _two_histories(self, peer: str, note: str, seen: Checkpoint, remembered: Checkpoint) -> TwoHistories:
        evidence = self.directory / "evidence"
        name = f"{file_stem(peer)}-{seen.size}-{hashlib.sha256(note.encode()).hexdigest()[:16]}.note"
        evidence.mkdir(mode=0o700, exist_ok=True)
        earlier = set(evidence.glob(f"{file_stem(peer)}-*.note"))
        where = f"both notes are kept: {self._witnessed_path(peer)} and {evidence / name}"
        if evidence / name not in earlier and len(earlier) >= EVIDENCE_MAX:
            where = (
                f"it signed more such notes than are kept in {evidence}; compare one with {self._witnessed_path(peer)}"
            )
        elif evidence / name not in earlier:
            store_note(evidence / name, note.encode())
        return TwoHistories(
            f"{peer} signed two logs of {seen.size} records: roots {remembered.root.hex()[:16]} and "
            f"{seen.root.hex()[:16]}",
            hint=where,
        )

    def countersigned(self, peers: Collection[str]) -> dict[str, str]:
        """Return, by party, its newest note that we countersigned, where there is one."""
        with self._mutex:
            paths = {peer: self._witnessed_path(peer) for peer in peers}
            return {peer: read_note(path) for peer, path in paths.items() if path.exists()}

    # ---- our own log's witnesses -------------------------------------------------------------------------

    def add_cosignature(self, note: str) -> None:
        """Store a peer's cosignature of one of our checkpoints.

        Raises:
            VerificationError: not our checkpoint, not cosigned by an introduced peer, or signed by us for a history
                that this log does not have (it was restored from a backup, or records were dropped).
        """
        with self._mutex:
            checkpoint = open_checkpoint(note, self._log_key)
            if checkpoint.size > self._tree.size or self._tree.root(checkpoint.size) != checkpoint.root:
                raise VerificationError(
                    f"{self.origin} has {self._tree.size} records; a note signed with its key says {checkpoint.size} "
                    f"with root {checkpoint.root.hex()[:16]}, which this log does not have",
                    hint="this log lost records (restored backup?); keep the note and compare with the witness",
                    code=OWN_HISTORY_LOST,
                )
            peers = {name: cosigner_key(name, key) for name, key in self._peers.items()}
            signers = [name for name, key in peers.items() if cosigned_at(note, key) is not None]
            if not signers:
                raise VerificationError("the note carries no cosignature of a known peer")
            known = only_signed_by(note, [self._log_key, *peers.values()])
            path = self._note_path(checkpoint.size)
            stored = read_note(path) if path.exists() else known
            merged = merge_signatures(stored, known)
            if merged != stored or not path.exists():
                store_note(path, merged.encode())
            if checkpoint.size == self._note_size:
                self._note = merged
            for name in signers:
                self._cosigned_sizes[name] = max(self._cosigned_sizes.get(name, 0), checkpoint.size)

    def witnesses(self, size: int, among: Collection[str]) -> int:
        """Return how many of these parties have countersigned our log at `size` records or later."""
        with self._mutex:
            return sum(self.knows(name) and self._cosigned_size(name) >= size for name in among)

    def _remembered(self, peer: str) -> Checkpoint | None:
        path = self._witnessed_path(peer)
        if not path.exists():
            return None
        text = read_note(path)
        if cosigned_at(text, self._cosigner_key) is None:
            raise VerificationError(f"{path} does not carry this party's cosignature")
        return checkpoint_in(text)

    def _cosigned_size(self, peer: str) -> int:
        """The largest size at which `peer` countersigned, found once by reading the notes newest first."""
        if peer not in self._cosigned_sizes:
            key = cosigner_key(peer, self.key_of(peer))
            self._cosigned_sizes[peer] = next(
                (
                    int(path.stem)
                    for path in sorted((self.directory / "checkpoints").glob("*.note"), reverse=True)
                    if cosigned_at(read_note(path), key) is not None
                ),
                0,
            )
        return self._cosigned_sizes[peer]

    def _note_path(self, size: int) -> Path:
        return self.directory / "checkpoints" / f"{size:012d}.note"

    def _witnessed_path(self, peer: str) -> Path:
        return self.directory / "witnessed" / f"{file_stem(peer)}.note"

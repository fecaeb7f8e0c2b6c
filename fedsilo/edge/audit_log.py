"""A party's audit log: append durably, checkpoint, be countersigned, countersign others (threats T38, T39, T41).

`append` returns when the record is on disk; only then may the message go. One process writes (exclusive lock), any
number of threads. Opening reads the whole log once: it cuts off and quarantines a torn last line, refuses a log that
is shorter than, or different from, its own newest checkpoint, and records `egress.indeterminate` for every allowed
message whose outcome was never recorded.

Exchange of checkpoints, the same on both sides, one message each way: `offer(peer)` is sent, `take(offer, peer)` is
called on what arrives. Taking the peer's cosignature of our note fails if our log has lost records since.

Does not stop: somebody with this log's key who rewrites records younger than the last countersigned checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsilo.edge.audit_loading import TornTail, load, read_note
from fedsilo.edge.audit_segments import (
    FULL,
    RESERVE_BYTES,
    DiskFullError,
    SegmentWriter,
    file_stem,
    read_records,
    segments,
)
from fedsilo.edge.files import FileLock, lock_exclusively, make_private_directory, write_durably
from fedsilo.treaty.audit.checkpoint import (
    Checkpoint,
    cosign,
    cosigned_at,
    cosigner_key,
    log_key,
    merge_signatures,
    only_signed_by,
    open_checkpoint,
    parse_checkpoint,
    parse_note,
    sign_checkpoint,
)
from fedsilo.treaty.audit.merkle import leaf_hash
from fedsilo.treaty.audit.record import SALT_BYTES, link_of, record_line
from fedsilo.treaty.audit.witness import Offer, TreeHead, judge
from fedsilo.treaty.errors import ConflictError, OperationError, VerificationError

SEGMENT_BYTES_MAX = 64 << 20
CHECKPOINT_RECORDS = 100
CLOCK_BACKWARD_MILLISECONDS = 1000  # smaller steps are what time synchronisation does
_CHECKPOINTED_EVENTS = frozenset({"start", "stop", "halt"})
_ROUTING = ("run", "round", "step", "attempt", "kind", "sequence", "peer", "direction", "payload")


class LogFullError(OperationError):
    """Nothing can be recorded, so nothing may be sent, until space returns."""

    default_code = "LOG_FULL"


def _store(path: Path, data: bytes) -> None:
    """Write a note durably. Raises LogFullError where only space is lacking, else OperationError."""
    try:
        write_durably(path, data)
    except OperationError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
            raise LogFullError(f"no space to store a checkpoint: {error.message}") from error
        raise


class AuditLog:
    """See the module. Close it (or use `with`); after kill -9 simply open it again."""

    def __init__(
        self,
        directory: Path,
        *,
        origin: str,
        key: Ed25519PrivateKey,
        actor: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        randomness: Callable[[int], bytes] = secrets.token_bytes,
        reserve_bytes: int = RESERVE_BYTES,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        checkpoint_records: int = CHECKPOINT_RECORDS,
    ) -> None:
        """Open or create the log in `directory`.

        Args:
            directory: the log's folder, see `audit_segments`.
            origin: name of this log for good; also the name of the key that countersigns others. No space, no plus.
            key: the party's Ed25519 message-signing key. A log keeps its key for good; a new key is a new log.
            actor: SPIFFE id recorded where `append` is not told another.
            clock: UTC seconds.
            monotonic: seconds since any fixed moment of this boot.
            randomness: n -> n random bytes.
            reserve_bytes: kept free for the `halt` record (0: none).
            segment_bytes_max: a segment that has reached this is closed and the next begun.
            checkpoint_records: a checkpoint is made at least every so many records.

        Raises:
            ConflictError: another process has it open, or it belongs to another key or origin.
            VerificationError: records were changed, or are missing against the log's own checkpoints.
            LogFullError: not even the reserve fits.
        """
        self.directory = directory
        self.origin = origin
        self._actor = actor
        self._key, self._log_key = key, log_key(origin, key.public_key())
        self._cosigner_key = cosigner_key(origin, key.public_key())
        self._clock, self._monotonic, self._randomness = clock, monotonic, randomness
        self._segment_bytes_max, self._checkpoint_records = segment_bytes_max, checkpoint_records
        self._boot = _boot_id()
        self._mutex = threading.RLock()
        self._last_t = self._latest_t = 0
        self._previous, self._note, self._note_size = "", "", -1
        self._full = self._segment_closed = False
        self._peers: dict[str, Ed25519PublicKey] = {}
        self._cosigned_sizes: dict[str, int] = {}
        for name in ("", "checkpoints", "witnessed", "keys", "quarantine"):
            make_private_directory(directory / name if name else directory)
        self._lock: FileLock = lock_exclusively(directory / "lock")
        self._writer = SegmentWriter(directory, reserve_bytes)
        try:
            self._open()
        except BaseException:
            self._writer.close()
            self._lock.release()
            raise

    # ---- what it says ------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self._tree.size

    @property
    def root(self) -> bytes:
        with self._mutex:
            return self._tree.root()

    @property
    def latest_note(self) -> str:
        """The newest signed checkpoint with the cosignatures it has so far; empty before the first."""
        return self._note

    @property
    def latest_time(self) -> float:
        """The latest UTC second ever recorded: expiry is judged by max(this, now) (T41)."""
        return self._latest_t / 1000

    def records(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Records from number `start` up to the present size. Raises VerificationError: damaged on disk."""
        size = self.size
        for record in read_records(self.directory, start):
            if record["seq"] >= size:
                return
            yield record

    def consistency(self, old: int, new: int) -> list[bytes]:
        """Proof that the log at size `new` extends the log at size `old`. Raises IndexError."""
        with self._mutex:
            return self._tree.consistency(old, new)

    def inclusion(self, seq: int, size: int) -> list[bytes]:
        """Proof that record `seq` is in the log at size `size`. Raises IndexError."""
        with self._mutex:
            return self._tree.inclusion(seq, size)

    # ---- writing -----------------------------------------------------------------------------------------

    def append(self, event: str, **fields: Any) -> int:
        """Record an event; returns its number once it is durable. Fields are those of `treaty/audit/record.py`.

        Raises:
            RecordError: not a record that may be written; nothing was.
            LogFullError: no space; a final `halt` was written from the reserve if that was possible.
            OperationError: the disk failed; nothing is recorded until a restart.
        """
        with self._mutex:
            if self._full:
                self._regain_space(event)
            try:
                if self._writer.segment_bytes >= self._segment_bytes_max:
                    self._close_segment()
                backward = self._last_t - self._now()
                if backward >= CLOCK_BACKWARD_MILLISECONDS:
                    self._write("clock.jump", {"detail": {"backward_milliseconds": backward}})
                seq = self._write(event, fields)
            except DiskFullError as error:
                self._halt(event)
                raise LogFullError(f"no space to record {event}: {error.message}", hint=error.hint) from error
            if event in _CHECKPOINTED_EVENTS or self.size - max(self._note_size, 0) >= self._checkpoint_records:
                # The record itself is durable; a checkpoint that found no space is tried again at the next record.
                with contextlib.suppress(OperationError):
                    self.checkpoint()
            return seq

    def checkpoint(self) -> str:
        """Sign the present size and root; returns the note (the existing one if nothing was added since).

        Raises:
            OperationError: it cannot be stored.
        """
        with self._mutex:
            if self._note_size != self.size:
                note = sign_checkpoint(Checkpoint(self.origin, self.size, self._tree.root()), self._key)
                _store(self._note_path(self.size), note.encode())
                self._note, self._note_size = note, self.size
            return self._note

    def close(self) -> None:
        """Checkpoint what is not covered yet and give up the lock."""
        with self._mutex:
            if self._writer.is_open:
                with contextlib.suppress(OperationError):  # no space: the last checkpoint stands
                    self.checkpoint()
            self._writer.close()
            self._lock.release()

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> int:
        return max(0, int(self._clock() * 1000))

    def _write(self, event: str, fields: Mapping[str, Any]) -> int:
        seq, t = self.size, self._now()
        further = dict(fields)
        line = record_line(
            seq=seq,
            salt=self._randomness(SALT_BYTES),
            t=t,
            boot=self._boot,
            mono=int(self._monotonic() * 1000),
            actor=further.pop("actor", None) or self._actor,
            event=event,
            previous=self._previous,
            fields=further,
        )
        if self._segment_closed:
            self._writer.open_segment(seq)
            self._segment_closed = False
        self._writer.append(line)
        self._tree.append(leaf_hash(line))
        self._previous = link_of(line)
        self._last_t, self._latest_t = t, max(self._latest_t, t)
        return seq

    def _close_segment(self) -> None:
        self._write("segment.close", {"detail": {"size": self.size, "root": self._tree.root().hex()}})
        self._segment_closed = True

    def _halt(self, refused: str) -> None:
        """Say in the log that it is full, in the space kept for that."""
        self._full = True
        self._writer.release_reserve()
        with contextlib.suppress(OperationError):  # somebody else took the freed space: the caller's error says it
            self._write("halt", {"reasons": ["LOG_FULL"], "detail": {"refused_event": refused}})
            self.checkpoint()

    def _regain_space(self, event: str) -> None:
        try:
            self._writer.take_reserve()
        except DiskFullError as error:
            raise LogFullError(f"still no space to record {event}: {error.message}", hint=error.hint) from error
        self._full = False

    # ---- countersigning ----------------------------------------------------------------------------------

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

    def offer(self, peer: str, previous_size: int | None = None) -> Offer:
        """Our newest checkpoint, the proof from the one `peer` countersigned last, and its own with our cosignature.

        Args:
            peer: origin of the receiver's log.
            previous_size: where the proof starts, if the peer said so; by default what its cosignatures show.

        Raises:
            VerificationError: the peer was never introduced (`trust_peer`).
            OperationError: the checkpoint cannot be stored.
        """
        with self._mutex:
            note = self.checkpoint()
            previous = self._cosigned_size(peer) if previous_size is None else min(previous_size, self.size)
            witnessed = self._witnessed_path(peer)
            cosigned = read_note(witnessed) if witnessed.exists() else ""
            own = only_signed_by(note, [self._log_key])  # who else countersigned is not the peer's business
            return Offer(own, previous, tuple(self._tree.consistency(previous, self.size)), cosigned)

    def take(self, offer: Offer, peer: str) -> Checkpoint | None:
        """Take in what `peer` sent: its cosignature of our log, then its checkpoint, which we countersign, durably.

        Returns the checkpoint now countersigned, or None where the peer had not yet seen our last cosignature: our
        next offer carries it and the peer's next proof will start there.

        Raises:
            VerificationError: the peer was never introduced (`trust_peer`); its log dropped or changed records; or
                its cosignature shows that *our* log did.
        """
        with self._mutex:
            if offer.cosigned_note:
                self.add_cosignature(offer.cosigned_note)
            public_key = self._peer_key(peer)
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
            signed = only_signed_by(offer.note, [log_key(peer, public_key)])
            cosigned = cosign(signed, self.origin, self._key, self._now() // 1000)
            _store(self._witnessed_path(peer), cosigned.encode())
            return checkpoint

    def add_cosignature(self, note: str) -> None:
        """Store a peer's cosignature of one of our checkpoints.

        Raises:
            VerificationError: not our checkpoint, not cosigned by an introduced peer, or signed by us for a history
                that this log does not have (it was restored from a backup, or records were dropped).
        """
        with self._mutex:
            checkpoint = open_checkpoint(note, self._log_key)
            if checkpoint.size > self.size or self._tree.root(checkpoint.size) != checkpoint.root:
                raise VerificationError(
                    f"{self.origin} has {self.size} records; a note signed with its key says {checkpoint.size} with "
                    f"root {checkpoint.root.hex()[:16]}, which this log does not have",
                    hint="this log lost records (restored backup?); keep the note and compare with the witness",
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
                _store(path, merged.encode())
            if checkpoint.size == self._note_size:
                self._note = merged
            for name in signers:
                self._cosigned_sizes[name] = max(self._cosigned_sizes.get(name, 0), checkpoint.size)

    def _peer_key(self, peer: str) -> Ed25519PublicKey:
        if peer not in self._peers:
            raise VerificationError(f"{peer} was not introduced to the log: its certificate has not been seen")
        return self._peers[peer]

    def _remembered(self, peer: str) -> TreeHead | None:
        path = self._witnessed_path(peer)
        if not path.exists():
            return None
        text = read_note(path)
        if cosigned_at(text, self._cosigner_key) is None:
            raise VerificationError(f"{path} does not carry this party's cosignature")
        checkpoint = parse_checkpoint(parse_note(text).text)
        return TreeHead(checkpoint.size, checkpoint.root)

    def _cosigned_size(self, peer: str) -> int:
        """The largest size at which `peer` countersigned, found once by reading the notes newest first."""
        if peer not in self._cosigned_sizes:
            key = cosigner_key(peer, self._peer_key(peer))
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

    # ---- opening -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._claim_key()
        for leftover in self.directory.glob("*/.*.tmp"):  # of a write that a kill interrupted
            leftover.unlink()
        loaded = load(self.directory, self._log_key)
        self._tree, self._previous = loaded.tree, loaded.previous
        self._last_t, self._latest_t = loaded.last_t, loaded.latest_t
        self._note, self._note_size = loaded.note, loaded.note_size
        if loaded.torn:
            self._quarantine(loaded.torn)
        try:
            self._writer.open_segment(self.size if loaded.segment_closed else loaded.segment_first)
            self._writer.take_reserve()
        except DiskFullError as error:
            raise LogFullError(f"no space for the audit log: {error.message}", hint=error.hint) from error
        for path in sorted((self.directory / "quarantine").glob("*.torn")):
            if path.name not in loaded.repaired:
                self.append("tail.repaired", detail={"quarantine": path.name, "bytes": path.stat().st_size})
        for seq, record in loaded.open_allows.items():
            routing = {name: record.get(name) for name in _ROUTING}
            self.append("egress.indeterminate", link={"decision": seq}, **routing)
        if self.size:
            self.checkpoint()

    def _claim_key(self) -> None:
        path = self.directory / "keys" / "log.vkey"
        text = f"{self._log_key.text}\n{self._cosigner_key.text}\n"
        if not path.exists() and not segments(self.directory):
            write_durably(path, text.encode())
        elif not path.exists() or path.read_bytes() != text.encode():
            raise ConflictError(
                f"{self.directory} is the log of another key or name than {self.origin}",
                hint="a log keeps its key for good: move the folder away and begin a new log under a new origin",
            )

    def _quarantine(self, torn: TornTail) -> None:
        """Put a torn line end aside, then cut it off. It is recorded after opening; a kill in between repeats it."""
        name = f"{self.size:012d}-{hashlib.sha256(torn.data).hexdigest()[:16]}.torn"
        write_durably(self.directory / "quarantine" / name, torn.data, mode=0o600)
        self._writer.cut(torn.segment, torn.offset)


def sent_by_kind(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """{kind: (messages, payload bytes)} of everything that left, counted from the `egress.sent` records."""
    counts: dict[str, tuple[int, int]] = {}
    for record in records:
        if record["event"] == "egress.sent":
            messages, payload_bytes = counts.get(record["kind"], (0, 0))
            counts[record["kind"]] = (messages + 1, payload_bytes + record["payload"]["bytes"])
    return dict(sorted(counts.items()))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: monotonic times of different processes are then not comparable
        return f"process-{secrets.token_hex(8)}"

"""A party's audit log: append durably, checkpoint, be countersigned, countersign others (threats T38, T39, T41).

`append` returns when the record is on disk; only then may the message go. One process writes (exclusive lock), any
number of threads. Opening reads the whole log once (`load`): every line is hashed and must follow the one before; lines
up to the newest own checkpoint are settled by its root. It cuts off and quarantines a torn last line (a kill in the
middle of a write) if no checkpoint covers it, refuses a log that is shorter than, or different from, its own newest
checkpoint, and records `egress.indeterminate` for every allowed message whose outcome was never recorded. `LogCheck`
checks every line, link and signed checkpoint again while the process goes on, and names the first record that breaks.

What other parties countersign, and what this one countersigns, is in `witness.py`.

Does not stop: somebody with this log's key who rewrites records younger than the last countersigned checkpoint. Does
not show: a log that was replaced as a whole together with its key, which only other parties' logs show
(`fedsilo audit verify` with all of them); what was written after the newest checkpoint is chained, not yet signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.audit.checkpoint import Checkpoint, VerifierKey, cosigner_key, log_key, open_checkpoint, sign_checkpoint
from fedsilo.audit.index import remove_index
from fedsilo.audit.merkle import MerkleTree, leaf_hash
from fedsilo.audit.polls import ARRIVED, closing_after_crash, messages_of, permitted_by
from fedsilo.audit.reader import read_lines, read_note, read_records, reduced_leaves, segment_lines
from fedsilo.audit.record import CLOCK_ACCEPTED, NO_PREVIOUS, SALT_BYTES, Record, link_of, parse_record, record_line
from fedsilo.audit.segments import RESERVE_BYTES, SegmentWriter, segments
from fedsilo.audit.segments import LogFullError as LogFullError
from fedsilo.audit.segments import LogLostError as LogLostError
from fedsilo.audit.witness import Witnessed, store_note
from fedsilo.files.durable import (
    DiskFullError,
    FileLock,
    lock_exclusively,
    make_private_directory,
    remove_durably,
    write_durably,
)
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, VerificationError

SEGMENT_BYTES_MAX = 64 << 20
CHECKPOINT_RECORDS = 100
CLOCK_BACKWARD_MILLISECONDS = 1000  # smaller steps are what time synchronisation does
_CHECKPOINTED_EVENTS = frozenset({"start", "stop", "halt"})
Naming = Callable[[], contextlib.AbstractContextManager[dict[str, Any] | None]]
_ROUTING = ("run", "round", "step", "attempt", "kind", "sequence", "peer", "direction", "payload")


class AuditLog(Witnessed):
    """A party's audit log; see the module. Close it (or use `with`); after kill -9 simply open it again.

    Attributes:
        size_found: how many records there were before this opening appended any.
    """

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
            directory: the log's folder, see `segments.py`.
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
        super().__init__()
        self.directory = directory
        self.origin = origin
        self._actor = actor
        self._key, self._log_key = key, log_key(origin, key.public_key())
        self._cosigner_key = cosigner_key(origin, key.public_key())
        self._clock, self._monotonic, self._randomness = clock, monotonic, randomness
        self._segment_bytes_max, self._checkpoint_records = segment_bytes_max, checkpoint_records
        self._boot = _boot_id()
        self._last_t = self._latest_t = 0
        self._previous, self._note, self._note_size = "", "", -1
        self._full = self._segment_closed = False
        self.ledger: dict[str, Any] | None = None  # the newest head of a ledger that a record names
        self._naming: Naming = contextlib.nullcontext
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

    def root_at(self, size: int) -> bytes:
        """Root of the first `size` records. Raises IndexError: there are fewer."""
        with self._mutex:
            return self._tree.root(size)

    @property
    def latest_note(self) -> str:
        """The newest signed checkpoint with the cosignatures it has so far; empty before the first."""
        return self._note

    @property
    def latest_time(self) -> float:
        """The latest UTC second recorded since a person accepted the clock, if one did: expiry is judged by
        max(this, now) (T41)."""
        return self._latest_t / 1000

    def records(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Records from number `start` up to the present size. Raises VerificationError: damaged on disk."""
        size = self.size
        for record in read_records(self.directory, start):
            if record["seq"] >= size:
                return
            yield record

    # ---- writing -----------------------------------------------------------------------------------------

    def append(self, event: str, **fields: Any) -> int:
        """Record an event; returns its number once it is durable. Fields are those of `record.py`.

        Raises:
            RecordError: not a record that may be written; nothing was.
            LogFullError: no space; a final `halt` was written from the reserve if that was possible.
            LogLostError: the file was removed, moved, replaced or truncated; nothing was written.
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
                with self._naming() as head:
                    seq = self._write(event, fields if head is None else {**fields, "ledger": head})
                    self.ledger = head or self.ledger
            except DiskFullError as error:
                self._halt(event)
                raise LogFullError(f"no space to record {event}: {error.message}", hint=error.hint) from error
            if event in _CHECKPOINTED_EVENTS or self.size - max(self._note_size, 0) >= self._checkpoint_records:
                # The record itself is durable; a checkpoint that found no space is tried again at the next record.
                with contextlib.suppress(OperationError):
                    self.checkpoint()
            return seq

    def name_heads(self, naming: Naming) -> None:
        """Make records from here on name the newest head of the party's ledger (T42). naming: entered around each
        record; it gives that record's field `ledger`, or None where a record before said the same."""
        with self._mutex:
            self._naming = naming

    def check_in_place(self) -> None:
        """Check, before bytes leave, that the newest segment is still the file at its path, as long as it was written.

        Raises:
            LogLostError: it is not; see `SegmentWriter.check_in_place`, also for what this does not stop.
        """
        with self._mutex:
            self._writer.check_in_place()

    def checkpoint(self) -> str:
        """Sign the present size and root; returns the note (the existing one if nothing was added since).

        Raises:
            OperationError: it cannot be stored.
        """
        with self._mutex:
            if self._note_size != self.size:
                note = sign_checkpoint(Checkpoint(self.origin, self.size, self._tree.root()), self._key)
                store_note(self._note_path(self.size), note.encode())
                self._note, self._note_size = note, self.size
            return self._note

    def remove_old(self, before_t: int) -> int:
        """Reduce whole segments, oldest first, whose records are all older, to their leaf hashes (retention).

        Proofs about them and `audit verify` still hold; what they said is gone. That, and how far, is recorded first.
        A log that others countersign reduces records only once a cosignature over them is older too, so that a verifier
        can tell how old they were (T57). Does not stop: a log that nobody countersigned; there the age is unproven.

        Args:
            before_t: UTC milliseconds.

        Returns:
            how many records in all have leaf hashes only; 0 where nothing was removed.

        Raises:
            LogFullError, OperationError: not recorded, or not removed; it may be called again.
        """
        with self._mutex:
            old: list[tuple[int, int, Path]] = []
            for (first, path), (following, _) in itertools.pairwise(segments(self.directory)):
                if max(parse_record(line)["t"] for _, line, _ in segment_lines(path, first)) >= before_t:
                    break
                cosigned = self.first_cosigned(following)
                if cosigned is not None and cosigned * 1000 >= before_t:
                    break
                old.append((first, following, path))
            if not old:
                return 0
            age = max(0, (self._now() - before_t) // 1000)
            removed = {"size": old[-1][1], "segments": len(old), "older_than_seconds": age}
            self.append("retention.records", detail=removed)
            self.checkpoint()  # from here on a signed root stands for what is removed
            for first, following, path in old:
                leaves = b"".join(self._tree.leaf(index) for index in range(first, following))
                write_durably(path.with_suffix(".leaves"), leaves, mode=0o640)
                remove_durably(path)
            with contextlib.suppress(OSError):  # whoever asks next finds that it is of records that are gone
                remove_index(self.directory)
            return old[-1][1]

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
        self._last_t, self._latest_t = t, latest_t(self._latest_t, event, t)
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

    # ---- opening -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._claim_key()
        self._load_pinned()
        for leftover in self.directory.glob("*/.*.tmp"):  # of a write that a kill interrupted
            leftover.unlink()
        loaded = load(self.directory, self._log_key)
        self._tree, self._previous = loaded.tree, loaded.previous
        self.size_found = self._tree.size
        self._last_t, self._latest_t = loaded.last_t, loaded.latest_t
        self._note, self._note_size = loaded.note, loaded.note_size
        self.ledger = loaded.ledger
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
            routing = {name: record.fields.get(name) for name in _ROUTING}
            event, detail = closing_after_crash(record) if permitted_by(record) else ("egress.indeterminate", None)
            self.append(event, link={"decision": seq}, detail=detail, **routing)
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


def sent_by_kind(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """{kind: (messages, payload bytes)} of everything that left, counted from the `egress.sent` records."""
    counts: dict[str, tuple[int, int]] = {}
    for record in records:
        if record.event == "egress.sent":
            messages, payload_bytes = counts.get(record.kind, (0, 0))
            counts[record.kind] = (messages + messages_of(record), payload_bytes + record.payload["bytes"])
    return dict(sorted(counts.items()))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: monotonic times of different processes are then not comparable
        return f"process-{secrets.token_hex(8)}"


# ---- reading it back at start ------------------------------------------------------------------------------------
_OUTCOMES = frozenset({"egress.sent", "egress.acked", "egress.indeterminate", ARRIVED})


@dataclass(frozen=True)
class TornTail:
    """The end of the last segment that is no record."""

    segment: Path
    offset: int
    data: bytes


@dataclass
class LoadedLog:
    tree: MerkleTree = field(default_factory=MerkleTree)
    previous: str = NO_PREVIOUS  # link of the last record
    last_t: int = 0  # time of the last record, UTC milliseconds
    latest_t: int = 0  # latest time of any record since a person accepted the clock
    segment_first: int = 0  # where the newest segment starts
    segment_closed: bool = True  # the next record begins a new segment
    torn: TornTail | None = None
    open_allows: dict[int, Record] = field(default_factory=dict)  # allowed, outcome not recorded; open windows
    repaired: set[str] = field(default_factory=set)  # quarantined files that a record names
    ledger: dict[str, Any] | None = None  # newest head of the party's ledger that a record names
    note: str = ""  # newest own checkpoint
    note_size: int = -1


def load(directory: Path, key: VerifierKey) -> LoadedLog:
    """Read the log of `key` in `directory`.

    Raises:
        VerificationError: a record is damaged or missing, or the log is not what its newest checkpoint says.
    """
    state = LoadedLog()
    for leaf in reduced_leaves(directory):
        state.tree.append(leaf)
        state.previous = leaf.hex()
    files = segments(directory)
    for position, (first, path) in enumerate(files):
        if first != state.tree.size:
            raise VerificationError(f"{path}: starts at record {first}, the log has {state.tree.size} before it")
        state.segment_first, state.segment_closed = first, False
        _read_segment(state, path, last=position == len(files) - 1)
    _check_newest_checkpoint(state, directory, key)
    return state


def _decision_of(outcome: Record, decisions: Mapping[int, Record]) -> int | None:
    """Return the number of the decision that an outcome belongs to: by its link, else by run, kind and sequence."""
    if (linked := outcome.decided_by) is not None:
        return linked if linked in decisions else None
    if outcome.sequence is None:
        return None
    key = outcome.run, outcome.kind, outcome.sequence
    return next((seq for seq, item in decisions.items() if (item.run, item.kind, item.sequence) == key), None)


def _read_segment(state: LoadedLog, path: Path, *, last: bool) -> None:
    offset = 0
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        while line := stream.readline():
            final = last and offset + len(line) >= size
            try:
                if not line.endswith(b"\n"):
                    raise VerificationError("the line is not complete")
                record = Record(parse_record(line[:-1]) if final else json.loads(line))
                if record.seq != state.tree.size or record.link["previous"] != state.previous:
                    raise VerificationError("it does not follow the record before")
            except (VerificationError, ValueError, KeyError, TypeError, AttributeError) as error:
                if not final:
                    raise VerificationError(f"{path}: record {state.tree.size} is damaged: {error}") from error
                state.torn = TornTail(path, offset, line)
                return
            _take_in(state, line[:-1], record)
            offset += len(line)


def _take_in(state: LoadedLog, line: bytes, record: Record) -> None:
    event = record.event
    if record.decision == "allow" and (event == "egress.decision" or permitted_by(record)):
        state.open_allows[record.seq] = record
    elif event in _OUTCOMES:
        seq = _decision_of(record, state.open_allows)
        if seq is not None:
            del state.open_allows[seq]
    elif event == "tail.repaired":
        state.repaired.add(record.detail.get("quarantine", ""))
    state.ledger = record.fields.get("ledger", state.ledger)
    state.segment_closed = event == "segment.close"
    state.tree.append(leaf_hash(line))
    state.previous = link_of(line)
    state.last_t, state.latest_t = record.t, latest_t(state.latest_t, event, record.t)


def latest_t(latest: int, event: str, t: int) -> int:
    """The latest time of any record, after one more. A person who accepted the clock released what was later (T41)."""
    return t if event == CLOCK_ACCEPTED else max(latest, t)


def _check_newest_checkpoint(state: LoadedLog, directory: Path, key: VerifierKey) -> None:
    newest = max((directory / "checkpoints").glob("*.note"), default=None)
    if newest is None:
        return
    note = read_note(newest)
    checkpoint = open_checkpoint(note, key)
    if checkpoint.size > state.tree.size:
        raise VerificationError(
            f"{directory} has {state.tree.size} records; its checkpoint {newest.name} says {checkpoint.size}",
            hint="records were dropped or damaged, or an older copy was restored; run `fedsilo audit verify`",
        )
    if state.tree.root(checkpoint.size) != checkpoint.root:
        raise VerificationError(f"{directory}: records differ from checkpoint {newest.name}")
    state.note, state.note_size = note, checkpoint.size


# ---- checking it beside its writer -------------------------------------------------------------------------------

BLOCK_RECORDS = 256


@dataclass(frozen=True)
class Broken:
    """The place where a log stops being sound: the first record in doubt, and why."""

    seq: int
    why: str


class _BrokenError(Exception):
    """args: seq, why."""


class LogCheck:
    """One pass over a log.

    Args:
        directory: the log's folder.
        key: that its checkpoints are signed with.
        size: records to check, from the first on.
        progress: called with the number of records that are checked, again and again.
    """

    def __init__(self, directory: Path, key: VerifierKey, size: int, progress: Callable[[int], None]) -> None:
        self._directory = directory
        self._key = key
        self._size = size
        self._progress = progress
        self._tree = MerkleTree()
        self._previous = NO_PREVIOUS
        self._sound = 0  # records that a checkpoint bears out

    def run(self) -> Broken | None:
        """Check the log; return None if everything holds. Raises OSError: the folder cannot be read."""
        try:
            notes = self._notes()
            for leaf in reduced_leaves(self._directory):
                self._add(leaf, notes)
                self._previous = leaf.hex()
            self._records(notes)
        except _BrokenError as error:
            return Broken(*error.args)
        except FedSiloError as error:
            return Broken(self._tree.size, error.message)
        return None

    def _notes(self) -> dict[int, bytes]:
        """Roots by size, each from a note with the log's own signature."""
        roots: dict[int, bytes] = {}
        for path in sorted((self._directory / "checkpoints").glob("*.note")):
            try:
                checkpoint = open_checkpoint(read_note(path), self._key)
            except VerificationError as error:
                size = int(path.stem) if path.stem.isdecimal() and path.stem.isascii() else 0
                raise _BrokenError(max(size - 1, 0), f"checkpoints/{path.name}: {error.message}") from error
            roots[checkpoint.size] = checkpoint.root
        return roots

    def _records(self, notes: dict[int, bytes]) -> None:
        self._progress(self._tree.size)
        for number, line in read_lines(self._directory):
            if number >= self._size:
                break
            if number != (at := self._tree.size):
                raise _BrokenError(at, f"records {at} to {number - 1} are gone")
            self._line(number, line)
            self._add(leaf_hash(line), notes)
            if (number + 1) % BLOCK_RECORDS == 0:
                self._progress(number + 1)
        if (at := self._tree.size) < self._size:
            raise _BrokenError(at, f"record {at} and what follows it are gone")
        self._progress(at)

    def _line(self, number: int, line: bytes) -> None:
        try:
            record = Record(parse_record(line))
        except VerificationError as error:
            raise _BrokenError(number, f"record {number} is damaged: {error.message}") from error
        if record.seq != number:
            raise _BrokenError(number, f"record {number} carries number {record.seq}")
        if record.link["previous"] != self._previous:
            raise _BrokenError(
                max(number - 1, 0), f"record {number} does not follow the record before it: one of them was changed"
            )
        self._previous = link_of(line)

    def _add(self, leaf: bytes, notes: dict[int, bytes]) -> None:
        self._tree.append(leaf)
        size = self._tree.size
        if size in notes:
            if self._tree.root() != notes[size]:
                why = f"records {self._sound} to {size - 1} are not those that checkpoint {size} was signed for"
                raise _BrokenError(self._sound, why)
            self._sound = size

"""Reading a whole audit log back when it is opened. Changes nothing on disk; says what has to be repaired.

Every line is hashed and must follow the one before. Lines up to the newest own checkpoint are settled by its root;
the very last line may be torn (a kill in the middle of a write) only if no checkpoint covers it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsilo.audit.checkpoint import VerifierKey, open_checkpoint
from fedsilo.audit.merkle import HASH_BYTES, MerkleTree, leaf_hash
from fedsilo.audit.poll_window import ARRIVED, permitted_by
from fedsilo.audit.record import CLOCK_ACCEPTED, NO_PREVIOUS, link_of, parse_record
from fedsilo.audit.segments import packed_leaves, reduced_segments, segments
from fedsilo.protocol.errors import VerificationError

NOTE_BYTES_MAX = 64 << 10  # of a checkpoint with its cosignatures, 150 bytes each; and of a file of keys
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
    open_allows: dict[int, dict[str, Any]] = field(default_factory=dict)  # allowed, outcome not recorded; open windows
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
    for first, path in reduced_segments(directory):
        _take_hashes(state, first, path)
    files = segments(directory)
    for position, (first, path) in enumerate(files):
        if first != state.tree.size:
            raise VerificationError(f"{path}: starts at record {first}, the log has {state.tree.size} before it")
        state.segment_first, state.segment_closed = first, False
        _read_segment(state, path, last=position == len(files) - 1)
    _check_newest_checkpoint(state, directory, key)
    return state


def decision_of(outcome: Mapping[str, Any], decisions: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The number of the decision an outcome record belongs to: by its link, else by run, kind and sequence."""
    linked = outcome.get("link", {}).get("decision")
    if linked is not None:
        return linked if linked in decisions else None
    key = [outcome.get(name) for name in ("run", "kind", "sequence")]
    if key[2] is None:
        return None
    return next(
        (seq for seq, item in decisions.items() if [item.get(name) for name in ("run", "kind", "sequence")] == key),
        None,
    )


def read_note(path: Path) -> str:
    """A note, or public keys, as written (no translation of line ends).

    Raises:
        VerificationError: no file, not UTF-8, or more than `NOTE_BYTES_MAX`.
    """
    if not path.is_file():
        raise VerificationError(f"{path} is no file")
    with path.open("rb") as stream:
        data = stream.read(NOTE_BYTES_MAX + 1)
    if len(data) > NOTE_BYTES_MAX:
        raise VerificationError(f"{path} has more than {NOTE_BYTES_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise VerificationError(f"{path} is damaged") from error


def _take_hashes(state: LoadedLog, first: int, path: Path) -> None:
    packed = packed_leaves(path)
    if first != state.tree.size:
        raise VerificationError(f"{path} does not follow record {state.tree.size - 1}")
    for start in range(0, len(packed), HASH_BYTES):
        state.tree.append(packed[start : start + HASH_BYTES])
    state.previous = packed[-HASH_BYTES:].hex()


def _read_segment(state: LoadedLog, path: Path, *, last: bool) -> None:
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        end = data.find(b"\n", offset)
        line = data[offset : end if end >= 0 else len(data)]
        final = last and (end < 0 or end + 1 == len(data))
        try:
            if end < 0:
                raise VerificationError("the line is not complete")
            record = parse_record(line) if final else json.loads(line)
            if record["seq"] != state.tree.size or record["link"]["previous"] != state.previous:
                raise VerificationError("it does not follow the record before")
        except (VerificationError, ValueError, KeyError, TypeError) as error:
            if not final:
                raise VerificationError(f"{path}: record {state.tree.size} is damaged: {error}") from error
            state.torn = TornTail(path, offset, data[offset:])
            return
        _take_in(state, line, record)
        offset = end + 1


def _take_in(state: LoadedLog, line: bytes, record: dict[str, Any]) -> None:
    event = record["event"]
    if record.get("decision") == "allow" and (event == "egress.decision" or permitted_by(record)):
        state.open_allows[record["seq"]] = record
    elif event in _OUTCOMES:
        seq = decision_of(record, state.open_allows)
        if seq is not None:
            del state.open_allows[seq]
    elif event == "tail.repaired":
        state.repaired.add(record.get("detail", {}).get("quarantine", ""))
    state.ledger = record.get("ledger", state.ledger)
    state.segment_closed = event == "segment.close"
    state.tree.append(leaf_hash(line))
    state.previous = link_of(line)
    state.last_t, state.latest_t = record["t"], latest_t(state.latest_t, event, record["t"])


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

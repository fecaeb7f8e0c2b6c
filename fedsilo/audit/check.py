"""A log checked by the process that writes it, beside its work: every line, every link, every signed checkpoint.

What is read is the disk, up to a size that the caller names, so a daemon may write on meanwhile. The first break is
named with its record: a line that is no record, a number or a link that does not follow, or, where every link holds,
the records between two checkpoints of which the later one does not fit.

Does not show: a log that was replaced as a whole together with its key, which only other parties' logs show
(`fedsilo audit verify` with all of them); and what was written after the newest checkpoint is chained, not yet signed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedsilo.audit.checkpoint import VerifierKey, open_checkpoint
from fedsilo.audit.loading import read_note
from fedsilo.audit.merkle import HASH_BYTES, MerkleTree, leaf_hash
from fedsilo.audit.pages import LogPages
from fedsilo.audit.record import NO_PREVIOUS, link_of, parse_record
from fedsilo.audit.segments import packed_leaves, reduced_segments
from fedsilo.protocol.errors import FedSiloError, VerificationError

BLOCK_RECORDS = 256


@dataclass(frozen=True)
class Broken:
    """Where a log stops being what it says: the first record in doubt, and why."""

    seq: int
    why: str


class _BrokenError(Exception):
    """args: seq, why."""


class LogCheck:
    """One pass over a log.

    Args:
        pages: the log.
        key: that its checkpoints are signed with.
        size: records to check, from the first on.
        told: called with the number of records that are checked, again and again.
    """

    def __init__(self, pages: LogPages, key: VerifierKey, size: int, told: Callable[[int], None]) -> None:
        self._pages = pages
        self._key = key
        self._size = size
        self._told = told
        self._tree = MerkleTree()
        self._previous = NO_PREVIOUS
        self._sound = 0  # records that a checkpoint bears out

    def run(self) -> Broken | None:
        """None where everything holds. Raises OSError: the folder cannot be read."""
        try:
            notes = self._notes()
            self._reduced(notes)
            self._records(notes)
        except _BrokenError as error:
            return Broken(*error.args)
        except FedSiloError as error:
            return Broken(self._tree.size, error.message)
        return None

    def _notes(self) -> dict[int, bytes]:
        """Roots by size, each from a note with the log's own signature."""
        roots: dict[int, bytes] = {}
        for path in sorted((self._pages.directory / "checkpoints").glob("*.note")):
            try:
                checkpoint = open_checkpoint(read_note(path), self._key)
            except VerificationError as error:
                size = int(path.stem) if path.stem.isdecimal() and path.stem.isascii() else 0
                raise _BrokenError(max(size - 1, 0), f"checkpoints/{path.name}: {error.message}") from error
            roots[checkpoint.size] = checkpoint.root
        return roots

    def _reduced(self, notes: dict[int, bytes]) -> None:
        for first, path in reduced_segments(self._pages.directory):
            if first != self._tree.size:
                raise _BrokenError(self._tree.size, f"{path.name} does not follow record {self._tree.size - 1}")
            packed = packed_leaves(path)
            for start in range(0, len(packed), HASH_BYTES):
                self._add(packed[start : start + HASH_BYTES], notes)
            self._previous = packed[-HASH_BYTES:].hex()

    def _records(self, notes: dict[int, bytes]) -> None:
        while (at := self._tree.size) < self._size:
            self._told(at)
            block = self._pages.lines(at, min(at + BLOCK_RECORDS, self._size))
            if not block:
                raise _BrokenError(at, f"record {at} and what follows it are gone")
            for number, line in block:
                if number != self._tree.size:
                    raise _BrokenError(self._tree.size, f"records {self._tree.size} to {number - 1} are gone")
                self._line(number, line)
                self._add(leaf_hash(line), notes)
        self._told(self._tree.size)

    def _line(self, number: int, line: bytes) -> None:
        try:
            record = parse_record(line)
        except VerificationError as error:
            raise _BrokenError(number, f"record {number} is damaged: {error.message}") from error
        if record["seq"] != number:
            raise _BrokenError(number, f"record {number} carries number {record['seq']}")
        if record["link"]["previous"] != self._previous:
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

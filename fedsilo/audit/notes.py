"""Notes that people write when they reject: stored at the site, beside the audit log and not in it.

    STATE/audit/...          the log: the record of the no names the digest of the note
    STATE/notes/DIGEST.json  the note with a random salt; SHA-256 of the file is its name, and stands in what its
                             writer signed

A log folder, an export, a proof and whatever countersigns the log hold the digest alone, and the salt keeps anybody
from guessing the note by it. At the site the note can be held against its record, by anybody and offline.
Does not stop: whoever may write the state folder from deleting a note. Its record still says that there was one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsilo.audit.audit_verify import LogResult
from fedsilo.audit.reader import typed_records
from fedsilo.audit.record import NOTE_CHARACTERS_MAX, Record, note_text
from fedsilo.files.durable import make_private_directory, read_regular, remove_durably, write_durably
from fedsilo.protocol.errors import FedSiloError, NotFoundError, UsageError

FOLDER = "notes"
FILE_BYTES_MAX = 8 * NOTE_CHARACTERS_MAX
_DIGEST = re.compile(r"[0-9a-f]{64}")


def notes_of(log: Path) -> Path:
    """The folder of the notes to a log."""
    return log.absolute().parent / FOLDER


def keep(log: Path, sealed: bytes) -> str:
    """Keep a note durably, as it came beside the order of its writer; the digest for its record.

    Raises:
        UsageError: there is no note in it, or it is too long, or has what a terminal would obey.
        DiskFullError, OperationError: the disk refused.
    """
    if len(sealed) > FILE_BYTES_MAX or not _text_in(sealed):
        raise UsageError(f"a note has 1 to {NOTE_CHARACTERS_MAX} printable characters")
    digest = hashlib.sha256(sealed).hexdigest()
    make_private_directory(notes_of(log))
    write_durably(notes_of(log) / f"{digest}.json", sealed, mode=0o600)
    return digest


def note_of(log: Path, record: Record) -> str:
    """The note to a record; empty where it has none, or it is not here, or not the one that was recorded."""
    digest = _named(record)
    try:
        data = read_regular(notes_of(log) / f"{digest}.json", bytes_max=FILE_BYTES_MAX)
    except (NotFoundError, UsageError):
        return ""
    if not digest or hashlib.sha256(data).hexdigest() != digest:
        return ""
    return _text_in(data)


def trouble_of(log: Path, record: Record) -> str:
    """Return what is wrong with the note to a record: it is not here, or not the one that was recorded; else empty."""
    digest = _named(record)
    if not digest or note_of(log, record):
        return ""
    if not (notes_of(log) / f"{digest}.json").exists():
        return f"the note to record {record.seq} is not beside this log; the site has it, or somebody removed it"
    return f"the note to record {record.seq} is not the one that was recorded"


def _text_in(data: bytes) -> str:
    """Empty where there is none that may be shown."""
    try:
        value = json.loads(data)
        text = value["reason"] if "reason" in value else value["note"]  # as an earlier version wrote it
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return text if isinstance(text, str) and text == note_text(text) else ""


def check_notes(results: Sequence[LogResult], logs: Sequence[Path]) -> None:
    """Hold the notes beside each log against its records: another text is a problem, a missing one a notice.

    Args:
        results: of `verify_logs`; what is found is added.
        logs: their folders, in the same order.
    """
    for result, log in zip(results, logs, strict=True):
        missing = 0
        with contextlib.suppress(FedSiloError):  # a log that cannot be read is a problem already
            for record in typed_records(log):
                if not (trouble := trouble_of(log, record)):
                    continue
                if not (notes_of(log) / f"{_named(record)}.json").exists():
                    missing += 1
                else:
                    result["problems"].append(trouble)
                    result["verified"] = False
        if missing:
            result["notices"].append(
                f"not beside this log, but at the site: {missing} of the notes of people that it names"
            )


def forget(log: Path, records: Iterable[Record]) -> None:
    """Remove notes that no record names any more. records: all that are left. Raises OperationError."""
    if any(notes_of(log).glob("*.json")):
        named = {_named(record) for record in records}
        for path in notes_of(log).glob("*.json"):
            if path.stem not in named:
                remove_durably(path)


def _named(record: Record) -> str:
    digest = record.detail.get("note")
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else ""

"""The overlap index of the private records, built where they are for the guard's screen (threats T14, T15).

The guard hands over the key and the settings; the index goes into the scratch folder as one file that the guard opens
as an untrusted one. It covers prompts and answers of every private record, set-aside ones too; n-grams that stand in
the public set are left out, since they are no secret. The file is named after everything it is made of, so a restart
that finds it builds nothing. Free of torch.
Does not stop: a trainer that builds it of other records than it trains on (N1).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import FedSiloError, UsageError
from policies.screens.overlap import OverlapIndex, build_index
from silo.trainer.data import TaskRow

_PREFIX, _SUFFIX = "overlap-", ".index"


@dataclass(frozen=True)
class IndexSettings:
    """What the guard asks for. background: leave out n-grams of the public set."""

    key: bytes = field(repr=False)
    n: int
    false_positive_rate: float
    background: bool


def settings_from(fields: Any) -> IndexSettings | None:
    """`screen_index` of the configure message; None where no index is wanted. Raises UsageError."""
    if fields is None:
        return None
    try:
        return IndexSettings(
            key=bytes.fromhex(fields["key"]),
            n=int(fields["n"]),
            false_positive_rate=float(fields["false_positive_rate"]),
            background=bool(fields["background"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the trainer's configuration misstates screen_index: {error}") from error


def provide_index(
    settings: IndexSettings | None, private: Sequence[TaskRow], public: Sequence[TaskRow], scratch: Path | None
) -> dict[str, Any]:
    """Find or build the index.

    Args:
        settings: None where no index is wanted.
        private: every private row.
        public: rows of the public set.
        scratch: where it is written.

    Returns:
        `screen_index` of the ready message: {"file": name, "records": rows, "built": whether it was not there yet};
        {"why": sentence} where there is none, empty where none is wanted.
    """
    if settings is None:
        return {}
    if scratch is None:
        return {"why": "the trainer has no scratch folder to write it into; start it with --scratch"}
    try:
        return _found_or_built(settings, private, public, scratch)
    except (OSError, FedSiloError) as error:
        return {"why": error.message if isinstance(error, FedSiloError) else f"it cannot be written: {error.strerror}"}


def _found_or_built(
    settings: IndexSettings, private: Sequence[TaskRow], public: Sequence[TaskRow], scratch: Path
) -> dict[str, Any]:
    name = f"{_PREFIX}{_digest(settings, private, public)}{_SUFFIX}"
    built = not _is_good(scratch / name, settings.key)
    if built:
        data = build_index(
            _texts(private),
            key=settings.key,
            n=settings.n,
            false_positive_rate=settings.false_positive_rate,
            background=_texts(public) if settings.background else (),
        )
        scratch.mkdir(parents=True, exist_ok=True)
        part = scratch / f"{name}.part"
        part.write_bytes(data)
        os.replace(part, scratch / name)  # noqa: PTH105  # one name for "atomic" throughout the project
    for old in scratch.glob(f"{_PREFIX}*"):
        if old.name != name:
            old.unlink(missing_ok=True)
    return {"file": name, "records": len(private), "built": built}


def _texts(rows: Sequence[TaskRow]) -> Iterator[str]:
    for row in rows:
        yield row.prompt
        yield row.answer


def _digest(settings: IndexSettings, private: Sequence[TaskRow], public: Sequence[TaskRow]) -> str:
    """Names settings and corpus; keyed, so that the file's name tells nobody which records it is made of."""
    digest = hmac.new(settings.key, b"fedsilo overlap index file", hashlib.sha256)
    digest.update(canonical_json([settings.n, settings.false_positive_rate, settings.background]) + b"\n")
    for rows in (private, public if settings.background else ()):
        for row in rows:
            digest.update(canonical_json([row.prompt, row.answer]) + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _is_good(path: Path, key: bytes) -> bool:
    """Whether the file is there and whole, as the guard will read it."""
    try:
        OverlapIndex.from_bytes(path.read_bytes(), key=key)
    except (OSError, FedSiloError):
        return False
    return True

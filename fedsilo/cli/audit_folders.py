"""Folders of audit logs as people name them on the command line: finding, naming and first looks.

A command that reads a log for somebody is no verification. `reading_warnings` says so, or does one where that takes
no noticeable time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.cli.output import existing
from fedsilo.protocol.errors import NotFoundError

VERIFIED_BYTES_MAX = 8 << 20  # of a log that is verified before it is shown: about half a second
_OWN_KEY = Path("keys") / "log.vkey"


def log_folder(path: Path) -> Path:
    """The log folder itself where the state folder around it was named."""
    inner = path / "audit"
    return inner if not (path / _OWN_KEY).exists() and _looks_like_a_log(inner) else path


def existing_log(path: Path) -> Path:
    """`log_folder`, which must hold a log: a wrong path must not read as a log that somebody tampered with.

    Raises:
        NotFoundError: nothing is there, or something else.
    """
    folder = log_folder(path)
    if existing(folder).is_dir() and (folder / "proofs.json").exists():
        raise NotFoundError(
            f"{folder} is no log folder; it is an export with proofs",
            hint=f"check it with: fedsilo audit prove --check {folder}",
        )
    if _looks_like_a_log(folder):
        return folder
    around = any(folder.glob("*/state/audit/keys"))
    hint = f"did you mean {folder}/*/state?" if around else "a log is STATE_DIR/audit"
    raise NotFoundError(f"{folder} is no log folder", hint=hint)


def _looks_like_a_log(folder: Path) -> bool:
    return any((folder / part).exists() for part in ("keys", "checkpoints")) or any(folder.glob("*.jsonl"))


def told_apart(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of `verify_logs` whose `log` names one folder: its path stands in front of the name that its key has
    wherever two have that name, or the path does not say it, as with another party's key in a folder.
    """
    from fedsilo.audit.audit_verify import shown

    listed = list(results)
    named = Counter(result["log"] for result in listed)

    def name(result: Mapping[str, Any]) -> str:
        log, path = str(result["log"]), Path(result["path"])
        if not result["origin"]:
            return shown(path)
        return log if named[log] == 1 and log in path.absolute().parts else f"{shown(path)} ({log})"

    return [{**result, "log": name(result)} for result in listed]


def verification_warnings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is no fault of a log, and what whoever relies on the verification has to know all the same.

    Args:
        results: of `verify_logs`, named as `told_apart` names them, or not.

    Returns:
        a line for each: a copy that ends before another, records that nobody signed yet, records that retention
        removed, witnesses that nobody vouches for.
    """
    from fedsilo.audit.transcripts import unvouched_warnings

    return [
        *(f"{result['log']}: {notice}" for result in results for notice in result["notices"]),
        *(f"{result['log']}: {result['unsigned']} newest records not signed yet" for result in results
          if result["unsigned"]),
        *(f"{result['log']}: leaf hashes only of the first {result['hashes_only']} records: retention removed the rest"
          for result in results if result["hashes_only"]),
        *unvouched_warnings(results),
    ]  # fmt: skip


def reading_warnings(folder: Path) -> list[str]:
    """What whoever reads this log must know: that it does not verify, or, of a large one, that nobody looked."""
    from fedsilo.audit.audit_verify import verify_logs

    size = sum(path.stat().st_size for path in folder.glob("*.jsonl") if path.is_file())
    if size > VERIFIED_BYTES_MAX:
        return [f"nothing of this log was verified, it has {size >> 20} MiB: run fedsilo audit verify {folder}"]
    (result,) = verify_logs([folder])
    if result["verified"]:
        return []
    return [f"this log does not verify, what is shown may be false: {first_of(result['problems'])}"]


def first_of(problems: Sequence[str]) -> str:
    """The first problem, and how many there are besides."""
    return problems[0] + (f" (and {len(problems) - 1} other problems)" if problems[1:] else "")

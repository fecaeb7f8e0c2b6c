"""Where a party's disk stands: below a minimum no daemon starts, and a trainer that ended may have ended of it.

Does not stop: a disk that fills up between this look and the next write; every write tells that by itself (T39). It
sees the file system, and no quota or file-size limit of a user.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fedsilo.files.durable import DiskFullError
from fedsilo.protocol.errors import OperationError

DISK_BYTES_MIN = 64 << 20


def free_bytes(folder: Path) -> int:
    """Of the file system on which the folder lies, or will lie. Raises OperationError: it cannot be looked at."""
    try:
        place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        return shutil.disk_usage(place).free
    except OSError as error:
        raise OperationError(
            f"cannot look at the space of {folder}: {error.strerror}", hint="run it as the user whose files they are"
        ) from error


def require_space(folder: Path) -> str:
    """What is free for a state folder, in words.

    Raises:
        DiskFullError: too little to keep a record. OperationError: nothing can be written there, or as `free_bytes`.
    """
    free = free_bytes(folder)
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        kept = "" if place == folder.absolute() else f", and {folder} must be kept in it"
        raise OperationError(
            f"{place} cannot be written by this user{kept}",
            hint="run it as the user whose files they are, or mount the file system for writing",
        )
    if free < DISK_BYTES_MIN:
        raise DiskFullError(
            f"{folder} has {free} bytes left; {DISK_BYTES_MIN} are needed to keep a record",
            hint="free some space: what cannot be recorded is neither sent nor taken",
        )
    return f"{free} bytes free for {folder}"

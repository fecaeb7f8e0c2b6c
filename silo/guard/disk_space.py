"""Where a silo's disk stands: below a minimum it does not start, and a trainer that ended may have ended of it.

Does not stop: a disk that fills up between this look and the next write; every write tells that by itself (T39).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fedsilo.edge.files import DiskFullError
from silo.config import SiloConfig

DISK_BYTES_MIN = 64 << 20


def free_bytes(folder: Path) -> int:
    """Of the file system on which the folder lies, or will lie."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(place).free


def require_space(config: SiloConfig) -> str:
    """What is free, in words.

    Raises:
        DiskFullError: too little to keep a record.
    """
    free, folder = free_bytes(config.state_dir), config.state_dir
    if free < DISK_BYTES_MIN:
        raise DiskFullError(
            f"{folder} has {free} bytes left; {DISK_BYTES_MIN} are needed to keep a record",
            hint="free some space: what cannot be recorded cannot be sent",
        )
    return f"{free} bytes free for {folder}"


def where_trainer_tells(config: SiloConfig) -> str:
    """Where to look for what a trainer said before it ended, and whether there was space for it."""
    if config.trainer.launch == "external":
        return "see its own output, where it was started"
    told, free = f"see {config.state_dir / 'logs' / 'trainer.log'}", free_bytes(config.state_dir)
    if free >= DISK_BYTES_MIN:
        return told
    return f"{told}, where little can have been written: {config.state_dir} has {free} bytes left"

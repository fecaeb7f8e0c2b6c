"""How a database that another process may own is opened for reading, without leaving anything beside it."""

from __future__ import annotations

from pathlib import Path


def read_only_address(path: Path) -> str:
    """The SQLite URI of a database in WAL mode that is only read.

    Without a log of its own (-wal) such a database is complete. Read as immutable, SQLite takes no lock and makes no
    files beside it, so a folder that nobody may write to can be read too. With one, its content counts, and SQLite
    needs its shared memory.

    Does not cover: a daemon that starts meanwhile. What is read then may be of two moments; open it for each question.
    """
    complete = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    return f"{path.absolute().as_uri()}?mode=ro{complete}"

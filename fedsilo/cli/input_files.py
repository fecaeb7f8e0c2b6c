"""Files that somebody names on the command line: what is wrong with one is wrong usage, with the file's name in it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsilo.files.durable import read_regular
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UsageError

DOCUMENT_BYTES_MAX = 1 << 20


def read_document(path: Path) -> str:
    """The text of a file. Raises NotFoundError: none; UsageError: no plain file, too large, or not UTF-8."""
    data = read_regular(path, bytes_max=DOCUMENT_BYTES_MAX)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text", hint="is it the right file? save it as UTF-8") from error


def require_plain_file(path: Path, hint: str = "") -> None:
    """Before a file is opened that would be waited for if it were a pipe.

    Does not stop: that it becomes one before it is opened.

    Raises:
        NotFoundError: nothing is there. UsageError: a folder, pipe, device or socket, or below one that is closed.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", hint=hint) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise UsageError(f"cannot read {path}: it is {what}, not a file", hint=hint)


@contextmanager
def named_as_input(path: Path) -> Iterator[None]:
    """Around reading a file that is only looked at: of another type it is a wrong argument, not a missing right.

    Raises:
        UsageError: in place of NotAllowedError, which says that a person or a party is not who it must be.
    """
    try:
        yield
    except NotAllowedError as error:
        told = error.message if str(path) in error.message else f"{path}: {error.message}"
        raise UsageError(told, hint=error.hint) from error

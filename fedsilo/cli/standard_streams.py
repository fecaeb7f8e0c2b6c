"""The three streams of a process whose other end fails: a full disk, a closed descriptor, a reader that went away.

An answer that cannot be written ends its command with exit status 1 and one line on stderr, also with --json; where
stderr takes nothing either, the exit status is all that is told. A reader that closed its pipe (`| head`) is no error.
Does not stop: a disk that takes the bytes and loses them later; what the command did before it answered stays done.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import TextIO

from fedsilo.protocol.errors import OperationError

_PRINTING = ("typer", "rich")  # they open no file


class OutputLostError(OperationError):
    """The answer could not be written to stdout."""

    default_code = "OUTPUT_LOST"

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"the answer could not be written to stdout: {error.strerror or error}",
            hint="what the command does may be done all the same: look before you repeat it",
        )


def open_all() -> None:
    """Give a process that was started with closed streams all three of them.

    Without them the next file or socket that is opened would get a stream's number, and what is printed would go
    there. Nothing can be read from stdin then; what is written to stdout fails (it is opened for reading only), so
    that the caller who closed it learns that there was an answer; what is written to stderr is dropped.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    # None where the descriptor was closed when the interpreter started
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what this terminal has no sign for


def takes_signs() -> bool:
    """Whether every character can be written to the terminal as itself; where not, screens are drawn in ASCII."""
    try:
        return codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
    except LookupError:
        return False


def write_out(text: str) -> None:
    """Write to stdout, and see that it arrived.

    Raises:
        OutputLostError: it takes nothing. BrokenPipeError: its reader went away.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise OutputLostError(error) from error


def write_err(text: str) -> None:
    """Write to stderr; nothing is told where it takes nothing, as there is no further place to tell it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def output_lost(error: OSError) -> OutputLostError | None:
    """Whether an error comes from printing by a library, as of help and versions; None: it is of something else."""
    import traceback

    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or frames[-1][0].f_globals.get("__name__", "").partition(".")[0] not in _PRINTING:
        return None
    silence(sys.stdout)
    return OutputLostError(error)


def silence(stream: TextIO) -> None:
    """Let go nowhere what is left in a stream, or the interpreter would complain of it when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in a test, has no such end
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)

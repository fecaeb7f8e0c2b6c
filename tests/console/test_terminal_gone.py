"""A terminal that is closed under the console ends it; one that the console was put aside on is entered again."""

from __future__ import annotations

import math
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path

import pytest

from console.terminal import UntilGone

RECORDING = Path(__file__).parents[2] / "fedsilo" / "demo" / "approve.fedrec"
WAIT_SECONDS = 60.0  # it takes two
ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"


@contextmanager
def opened(*, is_told: bool = True, encoding: str = "utf-8") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A console that has drawn, on a terminal of which we have the other end.

    Args:
        is_told: the kernel tells it when the terminal ends; not to a program on a terminal of another session.
        encoding: of what the terminal shows.
    """
    main, there = os.openpty()
    ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "fedsilo.cli", "fedconsole", "--replay", str(RECORDING)]
    if is_told:  # a terminal that the leader of a session opens is that session's own (termios(4))
        words = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(there), *words]
    console = subprocess.Popen(
        words, stdin=there, stdout=there, stderr=there, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    try:
        read_until(main, b"Overview")
        os.close(there)  # as long as nobody has it open, what reads from the other end is told that it ended
        yield console, main
    finally:
        console.kill()
        console.wait()


def read_until(main: int, wanted: bytes, *, typing: bytes = b"") -> bytes:
    """All that was read. typing: pressed once a second."""
    data, typed_at = b"", -math.inf
    deadline = time.monotonic() + WAIT_SECONDS
    while wanted not in data:
        assert time.monotonic() < deadline, data
        if typing and time.monotonic() > typed_at + 1.0:
            os.write(main, typing)
            typed_at = time.monotonic()
        if select.select([main], [], [], 0.2)[0]:
            data += os.read(main, 1 << 16)
    return data


def test_it_ends_when_its_terminal_is_closed() -> None:
    with opened() as (console, main):
        os.close(main)  # the kernel sends SIGHUP and SIGCONT, and each write fails from here on
        assert console.wait(WAIT_SECONDS) == 130


def test_sigterm_ends_it_after_its_terminal_has_gone() -> None:
    with opened(is_told=False) as (console, main):
        os.close(main)
        console.send_signal(signal.SIGCONT)  # as a kernel that does tell; what would enter the terminal again writes
        console.send_signal(signal.SIGTERM)
        assert console.wait(WAIT_SECONDS) == 130


def test_it_enters_the_terminal_again_after_it_was_put_aside() -> None:
    with opened() as (console, main):
        console.send_signal(signal.SIGTSTP)  # what the shell's ctrl+z sends
        read_until(main, LEAVES)
        _, status = os.waitpid(console.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        console.send_signal(signal.SIGCONT)
        read_until(main, ENTERS)
        read_until(main, LEAVES, typing=b"\x11")  # ctrl+q; what comes while the terminal is being taken is flushed
        assert console.wait(WAIT_SECONDS) == 0
        os.close(main)


@pytest.mark.parametrize("gone", [True, False])
def test_a_write_to_what_is_gone_is_dropped(gone: bool) -> None:
    reader, writer = os.pipe()
    if gone:
        os.close(reader)
    # a text file keeps what it could not write, and tries again when it is closed
    with suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as file:
        UntilGone(file).write("a line\n")  # line buffered: written at once
        UntilGone(file).flush()
        named = UntilGone(file).fileno()
    assert named == writer
    if not gone:
        assert os.read(reader, 100) == b"a line\n"
        os.close(reader)

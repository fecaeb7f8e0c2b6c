"""The console on a terminal of our own: closed, put aside, not in UTF-8, with or without its mouse."""

from __future__ import annotations

import math
import os
import re
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
ENTERS, LEAVES, QUIT = b"\x1b[?1049h", b"\x1b[?1049l", b"\x11"
ESCAPE = re.compile(rb"\\[ux][0-9a-f]{2,4}")
# Any way to ask a terminal for reports of its mouse (xterm's control sequences, "Mouse Tracking").
REPORTS = re.compile(rb"\x1b\[\?(9|100[0-36]|1015|1016)h")


@contextmanager
def opened(
    *options: str, is_told: bool = True, encoding: str = "utf-8"
) -> Iterator[tuple[subprocess.Popen[bytes], int, bytes]]:
    """A console that has drawn, on a terminal of which we have the other end, and what it wrote until then.

    Args:
        options: of the command.
        is_told: the kernel tells it when the terminal ends; not to a program on a terminal of another session.
        encoding: of what the terminal shows.
    """
    main, there = os.openpty()
    ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "fedsilo.cli", "fedconsole", "--replay", str(RECORDING), *options]
    if is_told:  # a terminal that the leader of a session opens is that session's own (termios(4))
        words = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(there), *words]
    console = subprocess.Popen(
        words, stdin=there, stdout=there, stderr=there, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    try:
        drawn = read_until(main, b"Overview")
        os.close(there)  # as long as nobody has it open, what reads from the other end is told that it ended
        yield console, main, drawn
    finally:
        console.kill()
        console.wait()
        with suppress(OSError):
            os.close(main)


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


@pytest.mark.parametrize("is_told", [True, False])
def test_it_ends_when_its_terminal_is_closed_and_with_sigterm_after_that(is_told: bool) -> None:
    with opened(is_told=is_told) as (console, main, _):
        os.close(main)  # the kernel sends SIGHUP and SIGCONT where it tells, and each write fails from here on
        if not is_told:
            console.send_signal(signal.SIGCONT)  # what would enter the terminal again writes
            console.send_signal(signal.SIGTERM)
        assert console.wait(WAIT_SECONDS) == 130


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["iso8859-1", "ascii", "utf-8"])
def test_it_draws_what_its_terminal_can_show_and_enters_it_again_after_it_was_put_aside(encoding: str) -> None:
    with opened(encoding=encoding) as (console, main, _):
        if encoding == "utf-8":
            console.send_signal(signal.SIGTSTP)  # what the shell's ctrl+z sends
            read_until(main, LEAVES)
            _, status = os.waitpid(console.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            console.send_signal(signal.SIGCONT)
            read_until(main, ENTERS)
        read_until(main, b"Approvals", typing=b"3")  # the whole screen comes once more, and then the terminal is left
        shown = read_until(main, LEAVES, typing=QUIT)
        assert console.wait(WAIT_SECONDS) == 0
    assert ESCAPE.search(shown) is None
    assert any(byte >= 0x80 for byte in shown) == (encoding == "utf-8")


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize(("options", "asks"), [((), True), (("--no-mouse",), False)])
def test_the_terminal_keeps_its_mouse_where_it_was_asked_to(options: tuple[str, ...], asks: bool) -> None:
    with opened(*options) as (console, main, drawn):
        written = drawn + read_until(main, LEAVES, typing=QUIT)
        assert console.wait(WAIT_SECONDS) == 0 and ENTERS in written
    assert bool(REPORTS.search(written)) == asks


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

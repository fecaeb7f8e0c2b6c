"""Whose the mouse is: the console's, or with --no-mouse the terminal's (console design 7). On a terminal of our own."""

from __future__ import annotations

import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from console.app import FedConsole

RECORDING = Path(__file__).parents[2] / "fedsilo" / "demo" / "approve.fedrec"
WAIT_SECONDS = 60.0  # it takes two
# Any way to ask a terminal for reports of its mouse (xterm's control sequences, "Mouse Tracking").
REPORTS = re.compile(rb"\x1b\[\?(9|100[0-36]|1015|1016)h")
LEAVES = b"\x11"  # ctrl+q


def written(*options: str) -> bytes:
    """All that the console writes to its terminal, from its start until ctrl+q ended it."""
    main, there = os.openpty()
    ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "fedsilo.cli", "fedconsole", "--replay", str(RECORDING), *options]
    console = subprocess.Popen(
        words, stdin=there, stdout=there, stderr=there, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(there)
    try:
        data, left, deadline = b"", False, time.monotonic() + WAIT_SECONDS
        while select.select([main], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            try:
                data += os.read(main, 1 << 16)
            except OSError:  # the last one that wrote to it ended
                break
            if not left and b"Overview" in data:
                left = os.write(main, LEAVES) > 0
        assert console.wait(WAIT_SECONDS) == 0 and b"\x1b[?1049h" in data and b"\x1b[?1049l" in data, data
        return data
    finally:
        console.kill()
        console.wait()
        os.close(main)


@pytest.mark.parametrize(("options", "asks"), [((), True), (("--no-mouse",), False)])
def test_the_terminal_keeps_its_mouse_where_it_was_asked_to(options: tuple[str, ...], asks: bool) -> None:
    assert bool(REPORTS.search(written(*options))) == asks


def test_a_console_has_the_mouse_unless_it_is_told_otherwise() -> None:
    assert FedConsole().mouse and not FedConsole(mouse=False).mouse

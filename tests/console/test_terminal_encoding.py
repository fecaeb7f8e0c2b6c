"""A terminal that is not UTF-8: the interactive console draws in ASCII, and writes out no escape."""

from __future__ import annotations

import os
import re

import pytest

from tests.console.test_terminal_gone import LEAVES, WAIT_SECONDS, opened, read_until

ESCAPE = re.compile(rb"\\[ux][0-9a-f]{2,4}")


@pytest.mark.parametrize("encoding", ["iso8859-1", "ascii", "utf-8"])
def test_the_interactive_console_draws_what_its_terminal_can_show(encoding: str) -> None:
    with opened(encoding=encoding) as (console, main):
        # the whole screen comes once more, and then the terminal is left
        read_until(main, b"Approvals", typing=b"3")
        shown = read_until(main, LEAVES, typing=b"\x11")
        assert console.wait(WAIT_SECONDS) == 0
        os.close(main)
    drawn = [byte for byte in shown if byte >= 0x80]
    assert ESCAPE.search(shown) is None
    assert bool(drawn) == (encoding == "utf-8")

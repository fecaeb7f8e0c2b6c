"""Log lines that stay one line: whatever a message quotes, nothing of it begins a line or acts on a terminal (T8, T37).

A line break in quoted text would begin a line of its own, in the form of the daemon's lines, and what filters or reads
the log by lines would take it for the daemon's word. So every character that is not printable is written as its escape
(`\\n`, `\\u001b`, `\\u202e`), a traceback's line breaks too.
Does not stop: printable text that is untrue or private; who logs it decides that. An escape in the text itself cannot
be told from one that was made here.
"""

from __future__ import annotations

import logging

from fedsilo.protocol.text import harmless


class _OneLineOf(logging.Formatter):
    """What another formatter makes, in one line."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return harmless(self._inner.format(record))


def keep_to_one_line(logger: logging.Logger) -> None:
    """Let every handler of `logger` write a record as one line, in the form that it has."""
    for handler in logger.handlers:
        handler.setFormatter(_OneLineOf(handler.formatter or logging.Formatter()))

"""CSV that people open in a spreadsheet: no cell of it is computed there (OWASP, CSV injection; threat T37).

Does not stop: a spreadsheet that takes what follows the apostrophe for a formula all the same, or that cells are joined
to one there.
"""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Iterable
from typing import Any

from fedsilo.protocol.text import harmless

FORMULA_SIGNS = ("=", "+", "-", "@")
_NEXT_CELL = ("\t", "\r", "\n")  # what follows may be taken for the beginning of another cell


def csv_text(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """RFC 4180 with one header line and line feeds alone; every cell as `csv_cell` makes it."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerows([csv_cell(value) for value in row] for row in (header, *rows))
    return lines.getvalue()


def csv_cell(value: Any) -> str:
    """Text of one cell: numbers as they are, None empty, what is no text as JSON.

    A text that a spreadsheet would compute begins with an apostrophe, whatever blanks stand before the sign and also if
    it is the sign's full-width or small form; characters that a terminal obeys are written as `harmless` writes them.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    computed = first in FORMULA_SIGNS or text.startswith(_NEXT_CELL)
    shown = harmless(text)
    return f"'{shown}" if computed else shown

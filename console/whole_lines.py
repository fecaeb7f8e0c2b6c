"""Lines in which nothing is cut: where a word is wider than the line, it goes on in the next one. Pure.

For what somebody compares or types: a fingerprint, a path, a command, a line of a log. A text that is longer than
`CHARACTERS_MAX` is cut all the same, with the count that `safe` gives it (threat T37).
"""

from __future__ import annotations

from rich.cells import cell_len

from console.drawing import Line, line
from console.safe import Shown, safe

CHARACTERS_MAX = 4_000


def whole(text: str, cells: int, style: str = "") -> list[Line]:
    """The text in lines of at most `cells` cells, broken between words where there is one."""
    rows: list[str] = []
    row = ""
    for word in safe(text, CHARACTERS_MAX).split(" "):
        if row and cell_len(row) + 1 + cell_len(word) <= cells:
            row = f"{row} {word}"
            continue
        if row:
            rows.append(row)
        *full, row = _broken(word, cells)
        rows += full
    return [line((Shown(each), style)) for each in (*rows, row) if each]


def field(name: str, text: str, cells: int, style: str = "", *, name_cells: int = 13) -> list[Line]:
    """A named text, whole: the name stands before its first line."""
    rows = whole(text, max(cells - name_cells, 8), style)
    blank = " " * name_cells
    return [line((Shown(f"{name:{name_cells}}" if not index else blank), "dim"), *row) for index, row in enumerate(
        rows)]  # fmt: skip


def _broken(word: str, cells: int) -> list[str]:
    pieces, piece, used = [], "", 0
    for character in word:
        size = cell_len(character)
        if piece and used + size > cells:
            pieces.append(piece)
            piece, used = "", 0
        piece, used = piece + character, used + size
    return [*pieces, piece]

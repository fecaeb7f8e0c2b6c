"""Columns of a table, and which of them fit into how many cells. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedsilo.views.lines import Part

GAP_CELLS = 2
MARK_CELLS = 2  # the cursor's own column

Row: TypeAlias = Any  # an answer, or a JSON object that nothing has read yet


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: its title, and the field name of a filter such as `verdict:deny`.
        show: text and style of its cell, of a row or what was read from it.
        cells: its width; a longer text is cut with a sign.
        worth: the columns with the smallest go first into a narrow table; 0 is always there.
        right: aligned to the right.
        grows: takes a share of what width is left.
        order: what it is sorted by; its text by default.
    """

    name: str
    show: Callable[[Any], Part]
    cells: int
    worth: int = 1
    right: bool = False
    grows: bool = False
    order: Callable[[Any], Any] | None = None


def choose_columns(columns: Sequence[Column], cells: int, *, turn: int = 0) -> list[tuple[Column, int]]:
    """Those that fit into `cells` with their widths, in their usual order; nothing is ever off to the side.

    Args:
        columns: all there are.
        cells: of the table, the cursor's mark included.
        turn: how often somebody asked for other columns; columns of worth 0 stay, the others take turns.
    """
    fixed = [column for column in columns if column.worth == 0]
    others = sorted((column for column in columns if column.worth > 0), key=lambda column: column.worth)
    if others and turn and not _all_fit(columns, cells):
        first = turn % len(others)
        others = others[first:] + others[:first]
    taken = list(fixed)
    left = cells - MARK_CELLS - sum(column.cells for column in fixed) - GAP_CELLS * (len(fixed) - 1)
    for column in others:
        needed = column.cells + (GAP_CELLS if taken else 0)
        if needed <= left:
            taken.append(column)
            left -= needed
    shown = [column for column in columns if column in taken]
    growing = sum(column.grows for column in shown)
    share = max(left, 0) // growing if growing else 0
    widths = [column.cells + share if column.grows else column.cells for column in shown]
    while left < 0 and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
        left += 1
    return list(zip(shown, widths, strict=True))


def _all_fit(columns: Sequence[Column], cells: int) -> bool:
    return MARK_CELLS + sum(column.cells for column in columns) + GAP_CELLS * (len(columns) - 1) <= cells

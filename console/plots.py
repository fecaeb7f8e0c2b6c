"""Curves in characters: braille dots, two by four to a cell, or letters where only ASCII is drawn.

Each series has a letter and a pattern of dots of its own, so that no colour is needed to tell two apart; an interval is
an upright bar through its point. Nothing is drawn between the last point and now. Pure: numbers and a size in, lines
out; the texts of an axis are ours, so the rows pass as `Shown`.

Does not draw what is not finite, and nothing where there is no room for an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from console.drawing import Line, Part, line, pad
from console.safe import Shown

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PATTERNS = ((1, 1), (4, 7), (1, 4), (8, 11))  # (dots, of so many): solid, dashes, dots, long dashes
STYLES = ("accent", "ok", "warn", "strong")
AXIS_CELLS = 8  # of a value and its tick
PLOT_CELLS_MIN, PLOT_ROWS_MIN = 16, 3
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille, by row and column
_BRAILLE = 0x2800


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """Args:
    letter: of `LETTERS`; also what stands at its points.
    points: in the order of x.
    place: which of the patterns and styles.
    """

    letter: str
    points: tuple[Point, ...]
    place: int = 0

    @property
    def style(self) -> str:
        return STYLES[self.place % len(STYLES)]


@dataclass(frozen=True)
class Frame:
    """What the axes go over.

    Args:
        x, y: from and to.
        y_text: how a value is written, in at most `AXIS_CELLS - 2` cells.
        x_text: how a place is written.
        level: a value over the whole width, such as a baseline.
        cursor: a place that somebody looks at.
        only: the one place that has a point, where there is one: no other is written below the axis.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    y_text: Callable[[float], str]
    x_text: Callable[[float], str]
    level: float | None = None
    cursor: float | None = None
    only: float | None = None


@dataclass
class _Cells:
    """`bits` of braille, and what else stands in a cell with its style; characters win over dots."""

    width: int
    height: int
    ascii_only: bool
    bits: dict[tuple[int, int], int] = field(default_factory=dict)
    styles: dict[tuple[int, int], str] = field(default_factory=dict)
    signs: dict[tuple[int, int], str] = field(default_factory=dict)
    letters: set[tuple[int, int]] = field(default_factory=set)  # cells whose sign names a series

    def dot(self, column: int, row: int, style: str, sign: str) -> None:
        """A dot, counted from the top left; `sign` stands for it in ASCII."""
        cell = column // 2, row // 4
        if not (0 <= cell[0] < self.width and 0 <= cell[1] < self.height):
            return
        if self.ascii_only:
            self.signs.setdefault(cell, sign)
        else:
            self.bits[cell] = self.bits.get(cell, 0) | _DOTS[row % 4][column % 2]
        self.styles.setdefault(cell, style)

    def sign(self, column: int, row: int, sign: str, style: str) -> None:
        """A character of its own."""
        self.signs[column // 2, row // 4] = sign
        self.styles[column // 2, row // 4] = style

    def letter(self, column: int, row: int, sign: str, style: str) -> None:
        """A character in the nearest cell of its line that has none: of series that meet, each keeps its letter."""
        cell, line_of_it = column // 2, row // 4
        for away in range(self.width):
            for place in (cell - away, cell + away):
                if 0 <= place < self.width and (place, line_of_it) not in self.letters:
                    self.letters.add((place, line_of_it))
                    self.sign(place * 2, row, sign, style)
                    return

    def row(self, row: int) -> list[Part]:
        parts: list[Part] = []
        for column in range(self.width):
            cell = column, row
            bits = self.bits.get(cell, 0)
            # an empty braille cell would be a blank that `safe` spells out
            character = self.signs.get(cell) or (chr(_BRAILLE + bits) if bits else " ")
            style = self.styles.get(cell, "")
            if parts and parts[-1][1] == style:
                parts[-1] = (Shown(parts[-1][0] + character), style)
            else:
                parts.append((Shown(character), style))
        return parts


def bounds(values: Sequence[float], *, least: float | None = None, most: float | None = None) -> tuple[float, float]:
    """A range with some room around the values, within `least` and `most`; never of no height."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 0.5
    low, high = low - room, high + room
    low = low if least is None else max(low, least)
    high = high if most is None else min(high, most)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def plot_lines(curves: Sequence[Curve], frame: Frame, cells: int, rows: int, *, ascii_only: bool) -> list[Line]:
    """The plot with its axes in `rows` lines; nothing where that is too little."""
    width, height = cells - AXIS_CELLS, rows - 1
    if width < PLOT_CELLS_MIN or height < PLOT_ROWS_MIN:
        return []
    drawn = _Cells(width, height, ascii_only)

    # bars stand a cell beside each other; room behind the last point, so that there, too, they do not turn back
    barred = [curve.place for curve in curves if any(point.low is not None for point in curve.points)]
    end = width - min(max(barred, default=0), width // 4)

    def column(x: float) -> int:
        return round((x - frame.x[0]) / ((frame.x[1] - frame.x[0]) or 1.0) * (end * 2 - 1))

    def row(y: float) -> int:
        share = (y - frame.y[0]) / ((frame.y[1] - frame.y[0]) or 1.0)
        return round((1.0 - min(max(share, 0.0), 1.0)) * (height * 4 - 1))

    for curve in curves:
        _draw(drawn, curve, column, row)
    for curve in curves:  # behind the curves: no bar goes through a line or a letter
        _draw_bars(drawn, curve, column, row)
    if frame.level is not None and math.isfinite(frame.level):
        for place in range(0, width * 2, 4):
            drawn.dot(place, row(frame.level), "dim", "-")
    if frame.cursor is not None:
        _draw_cursor(drawn, column(frame.cursor), height, ascii_only)
    ticks = {0: frame.y[1], height - 1: frame.y[0]} | ({height // 2: sum(frame.y) / 2} if height >= 5 else {})
    tick, wall = ("+", "|") if ascii_only else ("┤", "│")
    lines: list[Line] = []
    for number in range(height):
        told = frame.y_text(ticks[number]) if number in ticks else ""
        axis = pad(told, AXIS_CELLS - 2, right=True) + " "
        lines.append(((Shown(axis + (tick if number in ticks else wall)), "dim"), *drawn.row(number)))
    return [*lines, _axis(frame, width, end, ascii_only)]


def _draw(drawn: _Cells, curve: Curve, column: Callable[[float], int], row: Callable[[float], int]) -> None:
    points = [point for point in curve.points if math.isfinite(point.x) and math.isfinite(point.y)]
    on, of = PATTERNS[curve.place % len(PATTERNS)]
    count = 0
    for first, second in pairwise(points):
        start, end = (column(first.x), row(first.y)), (column(second.x), row(second.y))
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for step in range(steps + 1):
            if count % of < on:
                part = step / steps
                drawn.dot(round(start[0] + part * (end[0] - start[0])), round(start[1] + part * (end[1] - start[1])),
                          curve.style, ".")  # fmt: skip
            count += 1
    for point in points:
        drawn.dot(column(point.x), row(point.y), curve.style, ".")
    # letters only where there is room between them, and always at the end, which is what people ask about
    last = None
    for point in reversed(points):
        if last is None or last - column(point.x) >= 16:
            last = column(point.x)
            drawn.letter(last, row(point.y), curve.letter, curve.style)


def _draw_bars(drawn: _Cells, curve: Curve, column: Callable[[float], int], row: Callable[[float], int]) -> None:
    """Intervals in cells that nothing else takes, those of each series a cell beside those of the one before."""
    taken = {*drawn.bits, *drawn.signs}
    for point in curve.points:
        if point.low is None or point.high is None or not (math.isfinite(point.x) and math.isfinite(point.y)):
            continue
        at = column(point.x)
        aside = 2 * curve.place if at + 2 * curve.place < drawn.width * 2 else -2 * curve.place
        for place in range(row(point.high), row(point.low) + 1):
            if ((at + aside) // 2, place // 4) not in taken:
                drawn.dot(at + aside, place, "dim", "|")


def _draw_cursor(drawn: _Cells, column: int, height: int, ascii_only: bool) -> None:
    for place in range(height):
        cell = column // 2, place
        if cell not in drawn.signs and cell not in drawn.bits:
            drawn.sign(column, place * 4, ":" if ascii_only else "┊", "dim")


def _axis(frame: Frame, width: int, end: int, ascii_only: bool) -> Line:
    """Beginning, middle and end of x, each below its place; `end`: cells to behind the last place."""
    corner, dash = ("+", "-") if ascii_only else ("└", "─")
    first, last = frame.x_text(frame.x[0]), frame.x_text(frame.x[1])
    middle_x = float(round(sum(frame.x) / 2))  # places are whole numbers
    middle = frame.x_text(middle_x)
    under = round((middle_x - frame.x[0]) / ((frame.x[1] - frame.x[0]) or 1.0) * (end - 1)) - len(middle) // 2
    shown = [dash] * width
    told = ((first, 0), (last, end - len(last)), (middle, under))
    if frame.only is not None:
        word, share = frame.x_text(frame.only), (frame.only - frame.x[0]) / ((frame.x[1] - frame.x[0]) or 1.0)
        told = ((word, round(share * (end - 1)) - len(word) // 2),) * 3
    for text, at in told:
        if at >= 0 and at + len(text) <= width and all(shown[place] == dash for place in range(at, at + len(text))):
            shown[at : at + len(text)] = list(text)
    return line((Shown(" " * (AXIS_CELLS - 1) + corner + "".join(shown)), "dim"))

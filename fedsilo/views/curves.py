"""Figures by round or step: which there are, their curves in characters, and the lines around them.

Curves are braille dots, two by four to a cell, or letters where only ASCII is drawn. Each series has a letter and a
pattern of dots of its own, so that no colour is needed to tell two apart; an interval is an upright bar through its
point. Nothing is drawn between the last point and now. Pure: the answer of the query `curves` and a size in, lines out;
the texts of an axis are ours, so the rows pass as `Shown`.

Does not draw what is not finite, and nothing where there is no room for an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fedsilo.control.answers import CurvePoint, Curves
from fedsilo.control.figures import FIGURES
from fedsilo.views.columns import Column
from fedsilo.views.lines import Glyphs, Line, Part, Shown, flow, line, named, pad, wrap

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
    place: which of the patterns and styles."""

    letter: str
    points: tuple[Point, ...]
    place: int = 0

    @property
    def style(self) -> str:
        return STYLES[self.place % len(STYLES)]


@dataclass(frozen=True)
class Frame:
    """The ranges of the axes.

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
    for index in range(height):
        told = frame.y_text(ticks[index]) if index in ticks else ""
        axis = pad(told, AXIS_CELLS - 2, right=True) + " "
        lines.append(((Shown(axis + (tick if index in ticks else wall)), "dim"), *drawn.row(index)))
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


QUERY = "curves"
# In this order; what is not named here comes after, by its name.
ORDER = ("pass_at_1", "reward_mean", "kl", "update_norm", "gap", "pass_at_1_greedy", "tokens", "drift", "donors_used",
         "donors_wanted", "donors_found", "swapped_share", "alpha_mean", "alpha_max", "zero_variance_share_before",
         "zero_variance_share", "clip_share", "truncated_share", "rollout_kl", "rollout_kl_limit",
         "adapter_visible_share", "stale_detectable_steps", "seconds")  # fmt: skip
# What a figure's name does not say by itself (docs/reference/figures.md has them all).
TITLES = {
    "pass_at_1": "pass@1", "pass_at_1_greedy": "pass@1 greedy", "reward_mean": "reward", "kl": "KL",
    "update_norm": "update norm", "gap": "pass@1 gap between silos", "zero_variance_share": "groups without variance",
    "zero_variance_share_before": "groups without variance before swapping",
    "alpha_histogram": "prompts by the share of swapped answers", "clip_share": "clipped",
    "truncated_share": "answers cut off at the token limit", "donors_used": "donors used",
    "donors_wanted": "donors wanted", "donors_found": "donors found", "donors_rejected": "donors rejected",
    "swapped_share": "prompts with swapped answers", "alpha_mean": "answers swapped of a prompt's, mean",
    "alpha_max": "answers swapped of a prompt's, most", "beta_mean": "gradient change by one swapped answer, mean",
    "beta_max": "gradient change by one swapped answer, most", "omega": "drift bound of swapping",
    "drift": "distance from the round's start", "logp_own": "log-probability of own answers",
    "logp_donor": "log-probability of donors' answers", "grad_norm": "gradient norm",
    "rollout_kl": "KL of the rollout engine from the trainer", "rollout_kl_limit": "limit of the rollout engine's KL",
    "adapter_visible_share": "adapter's effect that the precision shows",
    "stale_detectable_steps": "steps by which a stale engine is noticed",
    "stale_previous": "resemblance to the previous step's adapter",
    "stale_start": "resemblance to the round's first adapter", "stale_base": "resemblance to no adapter",
    "marker_distance": "engine's distance from the marker", "marker_contrast": "adapter's distance from the marker",
    "importance_truncated_share": "importance weights cut", "importance_missing": "tokens without an importance weight",
}  # fmt: skip
SHARES = frozenset(name for name, figure in FIGURES.items() if figure.unit == "share")  # shown in per cent
PASS_RATES = frozenset({"pass_at_1", "pass_at_1_greedy"})
SMOOTH_POINTS = 5  # of a moving mean
ROWS_OF_ONE_PLACE = 9  # a point needs no more, and more would look like a curve
CURVES_DRAWN_MAX = 8  # more lie over each other; the table has all


def title_of(name: str) -> str:
    return TITLES.get(name, name.replace("_", " "))


def names_of(answer: Curves) -> list[str]:
    """Figures that there are, the most asked for first."""
    return sorted(answer.names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def value_text(value: float, name: str) -> str:
    """A share in per cent, everything else with what can be told apart."""
    if name in SHARES:
        return f"{100 * value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def unit_text(name: str, unit: str) -> str:
    return "%" if name in SHARES else unit


def place_text(x: str) -> Callable[[float], str]:
    """Return a place on the x axis as text."""
    return (lambda at: f"r{at:.0f}") if x == "round" else (lambda at: f"{at:.0f}")


# ---- series ----------------------------------------------------------------------------------------


class FigureValue(CurvePoint):
    """One value of a figure, with what it belongs to."""

    x: float
    value: float
    name: str
    silo: str  # empty for a figure over all silos
    source: str
    unit: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval; None where the number of prompts behind the value is not known."""
        return (self.low, self.high) if self.n and self.low is not None and self.high is not None else None

    @property
    def count_text(self) -> str:
        """How many prompts are behind it, or are at most."""
        return "" if not self.n else f"{self.n:,}" if self.n_exact else f"at most {self.n:,}"


@dataclass(frozen=True)
class Series:
    """One silo's figure; `why_not`: why it is not drawn, or nothing."""

    silo: str
    source: str
    unit: str
    points: tuple[FigureValue, ...]
    why_not: str = ""


def series_of(answer: Curves, name: str = "") -> list[Series]:
    """The series of one figure, or of all, each with whether it can be drawn."""
    found = []
    for each in answer.series:
        if name not in ("", each.name):
            continue
        points = tuple(
            FigureValue(**vars(point), name=each.name, silo=each.silo, source=each.source, unit=each.unit)
            for point in each.points
            if point.value is not None and point.x is not None
        )
        why_not = ""
        if each.name in PASS_RATES and not all(point.interval for point in points):
            why_not = "the number of prompts behind it is not known, so it has no interval"
        found.append(Series(each.silo, each.source, each.unit, points, why_not))
    return found


def smoothed(points: Sequence[Point], window: int = SMOOTH_POINTS) -> tuple[Point, ...]:
    """The mean of each point and those before it, at most `window`; an interval belongs to a value that was measured,
    so it goes."""
    shown = []
    for index, point in enumerate(points):
        taken = points[max(index - window + 1, 0) : index + 1]
        shown.append(Point(point.x, sum(each.y for each in taken) / len(taken)))
    return tuple(shown)


def baseline_of(answer: Curves, name: str) -> tuple[float, int] | None:
    """Mean of what was measured before the first round, and at how many silos; None where nobody did."""
    values = [row.value for row in answer.baseline if row.name == name and row.value is not None]
    return (sum(values) / len(values), len(values)) if values else None


def places_of(answer: Curves, name: str) -> list[float]:
    """Return the places where the cursor can be."""
    return sorted({point.x for each in series_of(answer, name) for point in each.points})


# ---- drawing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """How a person wants to see a figure."""

    name: str
    cursor: float | None = None
    smooth: bool = False
    baseline: bool = True


def plot_of(answer: Curves, view: View, cells: int, rows: int, *, ascii_only: bool) -> list[Line]:
    """The plot of one figure, or why there is none."""
    drawn = [each for each in series_of(answer, view.name) if not each.why_not and each.points][:CURVES_DRAWN_MAX]
    if not drawn:
        return []
    curves = []
    for place, each in enumerate(drawn):
        points = tuple(Point(point.x, point.value, point.low, point.high) for point in each.points)
        curves.append(Curve(LETTERS[place], smoothed(points) if view.smooth else points, place))
    known = baseline_of(answer, view.name) if view.baseline else None
    values = [value for curve in curves for point in curve.points for value in (point.y, point.low, point.high)
              if value is not None] + ([known[0]] if known else [])  # fmt: skip
    least = 0.0 if view.name in SHARES or min(values) >= 0 else None
    places = [point.x for curve in curves for point in curve.points]
    # the axis ends where the figures do: what is to come is no part of a curve
    alone = max(places) == min(places)
    rows = min(rows - 1, ROWS_OF_ONE_PLACE) if alone else rows
    frame = Frame(
        x=(min(places) - 1.0, min(places) + 1.0) if alone else (min(places), max(places)),
        y=bounds(values, least=least, most=1.0 if view.name in SHARES else None),
        y_text=lambda value: value_text(value, view.name), x_text=place_text(answer.x),
        level=known[0] if known else None, cursor=None if alone else view.cursor, only=min(places) if alone else None,
    )  # fmt: skip
    drawn_lines = plot_lines(curves, frame, cells, rows, ascii_only=ascii_only)
    if not (alone and drawn_lines):
        return drawn_lines
    return [*drawn_lines, line((f"one {answer.x or 'round'} so far: a point each, no curve yet", "dim"))]


def head_lines(answer: Curves, view: View, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return the run, the x axis, the source, and what the bars mean."""
    sources = sorted({each.source for each in series_of(answer, view.name)} - {""})
    pieces = [
        line(("run ", "dim"), answer.run or "-", (f" {answer.run_state}", "dim")),
        line(("by ", "dim"), answer.x or "round"),
        line(("source ", "dim"), ", ".join(sources) or "-"),
    ]
    if view.smooth:
        pieces.append(line((f"smoothed over {SMOOTH_POINTS} points, no intervals", "warn")))
    lines = flow(pieces, cells, between=glyphs.dot)
    told = _interval_text(answer, view)
    return [*lines, *(wrap(told, cells, "dim") if told else [])]


def _interval_text(answer: Curves, view: View) -> str:
    if view.name not in PASS_RATES:
        return "best silo less worst one" if view.name == "gap" else ""
    exact = all(point.n_exact for each in series_of(answer, view.name) if not each.why_not for point in each.points)
    bars = "values" if view.smooth else "bars: 95 % interval, Wilson"
    if exact:
        return f"{bars} over the n held-out prompts that were answered"
    return f"{bars} over the plan's n prompts; fewer answered: wider"


def value_lines(
    answer: Curves, view: View, cells: int, glyphs: Glyphs, *, most: int, brief: bool = False
) -> list[Line]:
    """Every silo's value under the cursor with its number and interval; what is not drawn says why. `brief` leaves out
    intervals and baseline, which the plot below has, on screens from which `4` has the rest."""
    name = view.name
    pieces: list[Line] = []
    series = series_of(answer, name)
    counts = {
        point.count_text
        for each in series
        if not each.why_not
        for point in each.points
        if point.interval and point.x == view.cursor
    }
    if view.cursor is not None:
        told = f", n {next(iter(counts))}" if len(counts) == 1 else ""
        pieces.append(line((f"{answer.x or 'round'} {view.cursor:.0f}", "strong"), (told, "")))
    letters = iter(LETTERS)
    for each in series:
        silo = each.silo or "all silos"
        if each.why_not:
            pieces.append(line((f"{silo} is not drawn: {each.why_not}", "warn")))
            continue
        letter = next(letters, "?") if each.points else " "
        point = next((point for point in each.points if point.x == view.cursor), None)
        pieces.append(
            line(
                (letter, "accent"),
                f" {silo} ",
                *(_value(point, name, counted=len(counts) > 1, brief=brief) if point else [("-", "dim")]),
            )
        )
    known = baseline_of(answer, name)
    if known and view.baseline and not brief:
        count = f", mean of {known[1]} silos" if known[1] > 1 else ""
        pieces.append(line(("before round 1 ", "dim"), value_text(known[0], name), (count, "dim")))
    lines = flow(pieces, cells, between="   ")
    more = f"{len(lines) - most + 1} more lines: {'4' if brief else 'T'}"
    return lines if len(lines) <= most else [*lines[: most - 1], line((more, "dim"))]


def _value(point: FigureValue, name: str, *, counted: bool, brief: bool) -> list[Part]:
    """Return a value with its interval, and with its own number of prompts where those under the cursor differ."""
    parts: list[Part] = [(value_text(point.value, name), "strong")]
    if point.interval and not brief:
        low, high = (value_text(end, name) for end in point.interval)
        parts.append((f" [{low}, {high}]{f' n {point.count_text}' if counted else ''}", "dim"))
    if point.silos:
        parts.append((f" of {point.silos} silos", "dim"))
    return parts


def _title(name: str, series: Sequence[Series]) -> str:
    return f"{title_of(name)} {unit_text(name, series[0].unit if series else '')}".rstrip()


def border_title(answer: Curves, name: str) -> str:
    """Return the figure's name, its unit, and its number among the figures."""
    names = names_of(answer)
    where = f" · figure {names.index(name) + 1} of {len(names)}" if name in names else ""
    return _title(name, series_of(answer, name)) + where


def short_title(answer: Curves, name: str) -> str:
    """Return the figure's name, its unit, its source, and what its bars mean."""
    series = series_of(answer, name)
    sources = ", ".join(sorted({each.source for each in series} - {""}))
    bars = "bars: 95 %" if name in PASS_RATES else ""
    return " · ".join(part for part in (_title(name, series), sources, bars) if part)


def nothing_lines(answer: Curves, name: str, cells: int) -> list[Line]:
    """Why nothing can be drawn: no figure yet, or only such that may not be."""
    hidden = [each for each in series_of(answer, name) if each.why_not]
    if hidden:
        return wrap(f"{title_of(name)} is not drawn: {hidden[0].why_not}; T has its values", cells, "warn")
    return []


# ---- table -----------------------------------------------------------------------------------------


def table_rows(answer: Curves, name: str = "") -> list[FigureValue]:
    """Every value of one figure, or of all, newest first."""
    rows = [point for each in series_of(answer, name) for point in each.points]
    return sorted(rows, key=lambda row: (-row.x, row.silo))


def row_id(row: FigureValue) -> str:
    return f"{row.name} {row.silo} {row.round} {row.step}"


def _figure(row: FigureValue, value: float | None) -> Part:
    return ("-", "dim") if value is None else (value_text(value, row.name), "")


COLUMNS = (
    Column("round", lambda row: (f"r{row.round}", ""), 6, worth=0, right=True, order=lambda row: row.round),
    Column("step", lambda row: (str(row.step or "-"), ""), 5, worth=1, right=True, order=lambda row: row.step),
    Column("silo", lambda row: (row.silo or "all", "strong"), 14, worth=0, grows=True),
    Column("value", lambda row: _figure(row, row.value), 10, worth=0, right=True, order=lambda row: row.value),
    Column("low", lambda row: _figure(row, row.low), 8, worth=0, right=True, order=lambda row: row.low or 0.0),
    Column("high", lambda row: _figure(row, row.high), 8, worth=0, right=True, order=lambda row: row.high or 0.0),
    Column("n", lambda row: (row.count_text.replace("at most ", "<=") or "-", "" if row.n else "dim"), 7, worth=0,
           right=True, order=lambda row: row.n or 0),
    Column("source", lambda row: (row.source, "dim"), 8, worth=2),
    Column("at UTC", lambda row: (row.at[:19].replace("T", " "), "dim"), 19, worth=3),
)  # fmt: skip


def point_text(row: FigureValue, answer: Curves, cells: int) -> list[Line]:
    """Return one value whole."""
    facts = [
        ("figure", title_of(row.name)),
        ("silo", row.silo or "all"),
        ("run", answer.run),
        ("place", f"round {row.round}, step {row.step}"),
        ("value", value_text(row.value, row.name)),
        ("source", row.source),
    ]
    if row.interval:
        low, high = (value_text(end, row.name) for end in row.interval)
        facts.append(("interval", f"{low} to {high}, 95 %, Wilson over {row.count_text} prompts"))
    lines = [part for label, text in facts for part in named(label, wrap(text, cells - 10))]
    for index, told in enumerate(answer.not_recorded):
        lines += named("not here" if not index else "", wrap(told, cells - 10, "dim"))
    return lines

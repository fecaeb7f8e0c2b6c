"""The two figures below the overview's boxes, where there is room: the first two of those that are asked for first.

Asks only while they are drawn. The last value of each silo stands above its curve, with the interval where it has one;
everything else is a screen away (`4`).

Does not draw: a figure that the daemon has not, nor anything on a terminal that needs the rows for what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from textual.app import ComposeResult
from textual.containers import Horizontal

from console import curves
from console.drawing import Glyphs, Line
from console.feed import Question
from console.reading import mapping
from console.screens.base import FedScreen, Lines
from console.values import CoordinatorState

KEY = "overview figures"
NAMES = curves.ORDER[:4]
BORDER_ROWS, BORDER_CELLS = 2, 4
ROWS_MIN, ROWS_MAX = 7, 26  # of one figure without its border: two of values, axis, and a curve that says something
CELLS_MIN = 100
VALUE_LINES_MAX = 2


class OverviewFigures(Horizontal):
    DEFAULT_CSS = """
    OverviewFigures {
        height: auto; display: none;
        .figure { width: 1fr; border: round $secondary; border-title-color: $accent; padding: 0 1; }
        &.-ascii .figure { border: ascii $secondary; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._room = 0

    def compose(self) -> ComposeResult:
        yield Lines(id="first-figure", classes="figure")
        yield Lines(id="second-figure", classes="figure")

    @property
    def _screen(self) -> FedScreen:
        return cast("FedScreen", self.screen)

    def wants(self) -> Mapping[str, Question]:
        """What is asked for what was drawn last."""
        state = self._screen.fed.snapshot.state
        if self._room < ROWS_MIN or state is None:
            return {}
        x = "round" if isinstance(state, CoordinatorState) else "step"
        return {KEY: (curves.QUERY, {"names": ",".join(NAMES), "x": x})}

    def draw(self, rows: int, cells: int) -> int:
        """Fill both.

        Args:
            rows: that are free, with borders.
            cells: over both.

        Returns:
            The rows that they take.
        """
        fed = self._screen.fed
        self._room = min(rows - BORDER_ROWS, ROWS_MAX) if fed.size.width >= CELLS_MIN else 0
        answer = mapping(fed.snapshot.answers.get(KEY)) if self._room >= ROWS_MIN else {}
        names = [name for name in curves.names_of(answer) if name in NAMES][:2]
        self.display = bool(names)
        self.set_class(fed.ascii_only, "-ascii")
        if not names:
            return 0
        panes = list(self.query(Lines))
        for pane, name in zip(panes, [*names, ""], strict=False):
            pane.display = bool(name)
            if name:
                pane.border_title = fed.title_of(curves.short_title(answer, name))
                pane.styles.height = self._room + BORDER_ROWS
                shown = figure_lines(answer, name, cells // len(names) - BORDER_CELLS, self._room, fed.glyphs,
                                     ascii_only=fed.ascii_only)  # fmt: skip
                pane.draw(shown, greyed=self._screen.greyed)
        return self._room + BORDER_ROWS


def figure_lines(
    answer: Mapping[str, Any], name: str, cells: int, rows: int, glyphs: Glyphs, *, ascii_only: bool
) -> list[Line]:
    """The newest values of a figure and its curve, in so many rows."""
    places = curves.places_of(answer, name)
    last = curves.View(name, places[-1] if places else None)
    values = curves.value_lines(answer, last, cells, glyphs, most=VALUE_LINES_MAX, brief=True)
    plot = curves.plot_of(answer, curves.View(name), cells, rows - len(values), ascii_only=ascii_only)
    return [*values, *(plot or curves.nothing_lines(answer, name, cells))][:rows]

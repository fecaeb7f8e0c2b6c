"""Screen 9: the newest lines of the attached daemon's own log, and of no other (console design 4).

It follows the newest line until somebody moves the cursor; `g` follows again. `v` shows fewer levels, `w` whole lines,
`/` filters by words or, behind `~`, by a regular expression. Nothing is changed, the daemon's own level neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console import log_lines
from console.actions import PLACE_TWINS, command_line
from console.drawing import Line, line
from console.feed import Question
from console.help import json_lines
from console.rows import NEAR_THE_END_ROWS
from console.screens.base import FedScreen, Lines
from console.screens.confirm import TextDialog
from console.screens.tables import TablePane
from console.values import CoordinatorState

QUERY = "logs"
TALL_ROWS_MIN = 30


class LogPane(TablePane):
    """The table of lines."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(
            log_lines.COLUMNS, log_lines.row_id, title="Log", key=QUERY, empty="lines in this daemon's log",
            makes="silo start", id=id,
        )  # fmt: skip
        self.rows: log_lines.LogRows = log_lines.LogRows(log_lines.COLUMNS, log_lines.row_id)

    def say_if_empty(self, least: str, makes: str) -> None:
        """What stands in place of lines: a level that hides them all is not an empty log."""
        hidden = least != log_lines.SHOWN_FROM[0]
        self._empty = f"lines of {least} and above among those that came" if hidden else "lines in this daemon's log"
        self._makes = "v shows all levels" if hidden else makes

    def action_turn(self) -> None:
        """There are no other columns worth a turn; whole lines are."""
        self.rows.wrapped = not self.rows.wrapped
        self._changed()


class LogsScreen(FedScreen):
    called = "logs"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "level", show=False)]
    CSS = "LogsScreen { #head, #whole, #trainer { padding: 0 2; } }"

    def __init__(self) -> None:
        super().__init__()
        self._least = log_lines.SHOWN_FROM[0]
        self._lines = log_lines.LINES_FIRST
        self._known: Any = None  # the newest answer; one of fewer lines stands while more are asked for

    def panes(self) -> ComposeResult:
        yield Lines(id="head")
        yield LogPane(id="lines")
        yield Lines(id="trainer")
        yield Lines(id="whole")  # last, for its second row is often empty

    @property
    def table(self) -> LogPane:
        return self.query_one(LogPane)

    @property
    def _at_a_coordinator(self) -> bool:
        return isinstance(self.fed.snapshot.state, CoordinatorState)

    def wants(self) -> Mapping[str, Question]:
        if not self.is_mounted or self.table.frozen_at is not None:
            return {}
        return {QUERY: (QUERY, {"lines": self._lines})}

    def draw(self) -> None:
        fed, table, width = self.fed, self.table, self.app.size.width - 4
        answer = fed.snapshot.answers.get(QUERY)
        if answer is not None and table.frozen_at is None:
            self._known = answer
            table.take_rows(log_lines.from_level(log_lines.log_rows(answer), self._least))
        self._ask_for_more()
        table.say_if_empty(self._least, "coordinator start" if self._at_a_coordinator else "silo start")
        head = log_lines.head_lines(
            self._known, table.rows, self._least, self._lines, width, coordinator=self._at_a_coordinator
        )  # fmt: skip
        self.query_one("#head", Lines).draw(head, greyed=self.greyed)
        trainer = self.query_one("#trainer", Lines)
        trainer.display = not self._at_a_coordinator
        trainer.draw(log_lines.trainer_lines(width))
        table.draw()
        whole = self.query_one("#whole", Lines)
        whole.display = not table.rows.wrapped
        whole.draw(log_lines.cursor_lines(table.selected(), width, fed.glyphs), greyed=self.greyed)

    def _ask_for_more(self) -> None:
        """Somebody is near the oldest line that came, or looks for something: then more of them are worth reading."""
        rows = self.table.rows
        index = next((at for at, item in enumerate(rows.shown) if item.id == rows.cursor), 0)
        searched = bool(rows.filter_text) or self._least != log_lines.SHOWN_FROM[0]
        if searched:
            self._lines = log_lines.LINES_MAX
        elif rows.moved and rows.kept >= self._lines and index >= len(rows.shown) - NEAR_THE_END_ROWS:
            self._lines = min(self._lines + log_lines.LINES_STEP, log_lines.LINES_MAX)

    def action_level(self) -> None:
        """The next level from which on lines are shown; the daemon writes what it wrote."""
        places = log_lines.SHOWN_FROM
        self._least = places[(places.index(self._least) + 1) % len(places)]
        if self._known is not None:
            self.table.take_rows(log_lines.from_level(log_lines.log_rows(self._known), self._least))
        self.redraw()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        cells = max(self.app.size.width * 96 // 100 - 6, 30)
        row = message.item.row
        body = json_lines(log_lines.parsed(row), cells)
        self.app.push_screen(TextDialog("Line", log_lines.detail_lines(row, body, self.twin(), cells)))

    def twin(self) -> str:
        return command_line(PLACE_TWINS[self.called](self.context()))

    def inspected(self) -> Any:
        item = self.table.selected()
        return log_lines.parsed(item.row) if item else None

    def keys(self) -> Line:
        return line(" enter JSON  v Level  w Wrap  / Filter  ? Help  ctrl+q Quit")

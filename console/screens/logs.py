"""Screen 9: the newest lines of the attached daemon's own log, and of no other.

It follows the newest line until somebody moves the cursor; `g` follows again. `v` shows fewer levels, `w` whole lines,
`/` filters by words or, behind `~`, by a regular expression. Nothing is changed, the daemon's own level neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import re2
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import json_lines
from console.base import Lines
from console.table_screen import NEAR_THE_END_ROWS, Filter, Item, Rows, Subject, TablePane, TableScreen, Term
from fedsilo.control.answers import LogLines, read
from fedsilo.views import logs
from fedsilo.views.columns import GAP_CELLS, MARK_CELLS, Row, choose_columns
from fedsilo.views.lines import Glyphs, Line, Part, Shown, pad, whole
from fedsilo.views.logs import REGEX_SIGN, TEXT
from fedsilo.views.state import Question

PATTERN_BYTES_MAX = 1 << 20  # of memory for one compiled pattern
INSTRUCTIONS_MAX = 2_000  # of one compiled pattern, as in a site's own patterns (policies/custom_patterns.py)
MATCH_SECONDS_MAX = 0.1  # of all lines at one go: a key is answered within that


# ---- filter ----------------------------------------------------------------------------------------


class _SlowError(Exception):
    """The pattern took too long over the lines that there are."""


@dataclass(frozen=True)
class Matching(Filter):
    """Lines in which a regular expression is found, letters of either case the same."""

    pattern: Any = None  # of `pattern_of`
    clock: Callable[[], float] = time.monotonic
    found: dict[str, bool] = field(default_factory=dict, compare=False)
    began: list[float] = field(default_factory=list, compare=False)

    def passes(self, texts: Mapping[str, str]) -> bool:
        text = texts[TEXT]
        if text not in self.found:
            if not self.began:
                self.began.append(self.clock())
            if self.clock() - self.began[0] > MATCH_SECONDS_MAX:
                raise _SlowError
            self.found[text] = self.pattern.search(text.encode("utf-8", "replace")) is not None
        return self.found[text]


def pattern_of(typed: str) -> tuple[Any, str]:
    """A regular expression in RE2's syntax, letters of either case the same; or None, and why it is not taken.

    RE2 finds it in time linear in the line, whatever it is, so no pattern makes the console stand still (CWE-1333). Its
    size when compiled is limited, for each character of a line may cost one step for each instruction. RE2 has no
    look-around and no back reference.
    """
    options = re2.Options()
    options.case_sensitive, options.never_capture, options.log_errors = False, True, False
    options.max_mem = PATTERN_BYTES_MAX
    try:
        made = re2.compile(typed, options=options)
    except re2.error as error:
        why = error.args[0] if error.args else ""
        return None, f"is no regular expression: {why.decode('utf-8', 'replace') if isinstance(why, bytes) else why}"
    except UnicodeEncodeError:
        return None, "is no regular expression: half a character stands in it"
    if made.programsize > INSTRUCTIONS_MAX:
        return None, f"is too large: {made.programsize} instructions when compiled, at most {INSTRUCTIONS_MAX}"
    return made, ""


@dataclass
class LogRows(Rows):
    """Rows of a log.

    Attributes:
        wrapped: a text goes on in further lines, and none of it is cut.
        why_not: what was typed behind `~` is not used, because.
    """

    wrapped: bool = False
    why_not: str = ""
    _drawn: list[str] = field(default_factory=list)  # the id of each line that was last drawn

    def filter(self, text: str) -> None:
        self.why_not = ""
        if not text.startswith(REGEX_SIGN):
            super().filter(text)
            return
        pattern, self.why_not = pattern_of(text[1:])
        self.filter_text = text
        terms = (Term(text),) if text[1:] else ()
        self._filter = Filter() if pattern is None else Matching(terms, pattern)
        self._settle()

    def take_newest(
        self, page: Sequence[Row], following: Any, *, total: int | None = None, reaches: int | None = None
    ) -> None:
        """Take the newest page as any table does; until somebody moves it, the cursor follows the newest line."""
        super().take_newest(page, following, total=total, reaches=reaches)
        if not self.moved and self.shown:
            self.cursor = self.shown[0].id

    def _settle(self) -> None:
        try:
            if isinstance(self._filter, Matching):
                self._filter.began.clear()
            super()._settle()
        except _SlowError:
            self.why_not, self._filter = "takes too long over these lines", Filter()
            super()._settle()

    def lines(self, cells: int, height: int, glyphs: Glyphs) -> list[Line]:
        if not self.wrapped:
            self._drawn = []
            return super().lines(cells, height, glyphs)
        header = super().lines(cells, 1, glyphs)[0]
        room = max(height - 1, 1)
        place = max(self._place(), 0)
        if not self.moved:
            self.cursor, place, self.above = self.shown[0].id, 0, 0
        first = min(self.above, place)
        blocks = [self._block(item, cells, glyphs) for item in self.shown[first : place + 1]]
        while len(blocks) > 1 and sum(map(len, blocks)) > room:
            blocks.pop(0)
            first += 1
        for item in self.shown[place + 1 :]:
            if sum(map(len, blocks)) >= room:
                break
            blocks.append(self._block(item, cells, glyphs))
        self.above = first
        self._drawn = [
            item.id for item, block in zip(self.shown[first:], blocks, strict=False) for _ in block
        ]  # fmt: skip
        return [header, *[row for block in blocks for row in block][:room]]

    def _block(self, item: Item, cells: int, glyphs: Glyphs) -> list[Line]:
        chosen = choose_columns(self.columns, cells, turn=self.turn)
        here = item.id == self.cursor
        parts: list[Part] = [(f"{glyphs.cursor} " if here else "  ", "accent")]
        before = MARK_CELLS
        by_name = dict(zip((column.name for column in self.columns), item.cells, strict=True))
        for column, width in chosen:
            if column.name != TEXT:
                text, style = by_name[column.name]
                parts += [(pad(text, width, more=glyphs.more), style), (" " * GAP_CELLS, "")]
                before += width + GAP_CELLS
        text, style = by_name[TEXT]
        rows = whole(text, max(cells - before, 8), style or ("strong" if here else "")) or [()]
        return [(*(parts if not index else [(Shown(" " * before), "")]), *row) for index, row in enumerate(rows)]

    def row_at(self, line_number: int) -> str:
        if not self._drawn:
            return super().row_at(line_number)
        return self._drawn[line_number] if 0 <= line_number < len(self._drawn) else ""


class LogPane(TablePane):
    """The table of lines."""

    def __init__(self, about: Subject) -> None:
        super().__init__(
            about.columns, about.id_of, title=about.title, key=about.query, empty=about.empty, makes=about.makes
        )
        self.rows: LogRows = LogRows(about.columns, about.id_of)

    def say_if_empty(self, least: str, makes: str) -> None:
        """Return the text in place of lines; a level that hides them all is not an empty log."""
        hidden = least != logs.SHOWN_FROM[0]
        self._empty = f"lines of {least} and above among those that came" if hidden else "lines in this daemon's log"
        self._makes = "v shows all levels" if hidden else makes

    def action_turn(self) -> None:
        """There are no other columns worth a turn; whole lines are."""
        self.rows.wrapped = not self.rows.wrapped
        self._changed()


class LogsScreen(TableScreen):
    called = "logs"
    subject = Subject(
        logs.COLUMNS, lambda row: row.id, title="Log", one="Line",
        keys=" enter JSON  v Level  w Wrap  / Filter  ? Help  ctrl+q Quit", query="logs",
        empty="lines in this daemon's log", makes="silo start",
    )  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "level", show=False)]
    CSS = "LogsScreen { #whole, #trainer { padding: 0 2; } }"

    def __init__(self) -> None:
        super().__init__()
        self._least = logs.SHOWN_FROM[0]
        self._lines = logs.LINES_FIRST
        self._known: LogLines | None = None  # the newest answer; one of fewer lines stands while more are asked for

    def panes(self) -> ComposeResult:
        yield from super().panes()
        yield Lines(id="trainer")
        yield Lines(id="whole")  # last, for its second row is often empty

    def make_table(self) -> LogPane:
        return LogPane(self.subject)

    @property
    def table(self) -> LogPane:
        return self.query_one(LogPane)

    def wants(self) -> Mapping[str, Question]:
        return {query: (query, {"lines": self._lines}) for query in super().wants()}

    def draw(self) -> None:
        width = self.app.size.width - 4
        if self.answer is not None and self.table.frozen_at is None:
            self._known = read(LogLines, self.answer)
        trainer, whole_text = self.query_one("#trainer", Lines), self.query_one("#whole", Lines)
        trainer.display, whole_text.display = not self.at_a_coordinator, not self.table.rows.wrapped
        super().draw()
        trainer.draw(logs.trainer_lines(width))
        item = self.table.selected()
        told = logs.cursor_lines(item.row if item is not None else None, width, self.fed.glyphs)
        whole_text.draw(told, greyed=self.greyed)

    def rows_of(self, answer: Any) -> Sequence[Row] | None:
        return None if self._known is None else logs.from_level(logs.log_rows(self._known), self._least)

    def head_lines(self, rows: Sequence[Row], cells: int) -> list[Line]:
        shown = self.table.rows
        return logs.head_lines(
            self._known, self._least, self._lines, cells, coordinator=self.at_a_coordinator, moved=shown.moved,
            wrapped=shown.wrapped, why_not=shown.why_not,
        )  # fmt: skip

    def whole_lines(self, row: Row, cells: int) -> list[Line]:
        return logs.detail_lines(row, json_lines(logs.parsed(row), cells), self.twin(), cells)

    def took_rows(self) -> None:
        """Ask for more lines where somebody is near the oldest that came, or looks for something."""
        rows = self.table.rows
        index = next((at for at, item in enumerate(rows.shown) if item.id == rows.cursor), 0)
        searched = bool(rows.filter_text) or self._least != logs.SHOWN_FROM[0]
        if searched:
            self._lines = logs.LINES_MAX
        elif rows.moved and rows.kept >= self._lines and index >= len(rows.shown) - NEAR_THE_END_ROWS:
            self._lines = min(self._lines + logs.LINES_STEP, logs.LINES_MAX)
        self.table.say_if_empty(self._least, "coordinator start" if self.at_a_coordinator else "silo start")

    def action_level(self) -> None:
        """The next level from which on lines are shown; the daemon writes what it wrote."""
        places = logs.SHOWN_FROM
        self._least = places[(places.index(self._least) + 1) % len(places)]
        self.redraw()

    def inspected(self) -> Any:
        item = self.table.selected()
        return logs.parsed(item.row) if item else None

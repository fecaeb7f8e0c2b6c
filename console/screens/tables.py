"""A table of rows that come in pages: the widget around `console.rows`.

It draws the rows around the cursor as lines and no more, whatever the number of rows: measured with 2000 rows of eight
columns on 140x42, 0.01 s of processor time for a redraw, against 0.35 s for refilling a `DataTable`. So there is no
second copy of the rows in a widget, no width to keep in step, and every cell is drawn by the one function that makes
text safe (threat T37).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from console import conditions
from console.drawing import Line, duration_text, line
from console.feed import Question
from console.reading import mapping
from console.rows import Column, Item, Row, Rows, skeleton
from console.safe import safe
from console.screens.base import FedScreen, Lines
from console.screens.fields import TextLine
from console.values import Snapshot

PAGE_ROWS = 100
FILTER_CHARACTERS_MAX = 120


class FilterLine(TextLine):
    """What follows `/`. Enter goes back to the rows and keeps it, escape clears it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear_filter", show=False)]

    def action_clear_filter(self) -> None:
        self.value = ""
        cast("TablePane", self.parent).close_filter()


class RowLines(Lines, can_focus=True):
    """The rows; a click puts the cursor on one."""

    DEFAULT_CSS = "RowLines { height: 1fr; }"

    def on_resize(self, event: events.Resize) -> None:
        cast("TablePane", self.parent).draw()

    def on_click(self, event: events.Click) -> None:
        cast("TablePane", self.parent).click(event.y - 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        cast("TablePane", self.parent).action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        cast("TablePane", self.parent).action_move(-3)


class TablePane(Vertical):
    """One table with its title, filter line and keys.

    Args:
        columns: what a row shows.
        id_of: what names a row for good.
        title: of the box.
        key: of its answer in `Snapshot.answers`; empty for rows given to `take_rows`.
        query: the query's name and arguments without `limit` and `before`.
        rows_in: the field of the answer that has the rows.
        empty: what would stand here, such as "messages that left this silo".
        makes: the command that makes some.
    """

    DEFAULT_CSS = """
    TablePane { border: round $secondary; border-title-color: $accent; padding: 0 1; height: 1fr; }
    TablePane:focus-within { border: round $accent; }
    TablePane FilterLine { height: 1; border: none; padding: 0; display: none; }
    TablePane FilterLine:focus { border: none; }
    TablePane FilterLine.-open { display: block; }
    .-ascii TablePane, .-ascii TablePane:focus-within { border: ascii $secondary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", show=False),
        Binding("k,up", "move(-1)", show=False),
        Binding("ctrl+d,pagedown", "page(1)", show=False),
        Binding("ctrl+u,pageup", "page(-1)", show=False),
        Binding("g,home", "newest", show=False),
        Binding("G,end", "last", show=False),
        Binding("enter", "open", show=False),
        Binding("slash", "filter", show=False),
        Binding("s", "sort", show=False),
        Binding("w", "turn", show=False),
        Binding("z", "maximise", show=False),
        Binding("space", "freeze", show=False),
        Binding("escape", "back", show=False),
    ]

    class Opened(Message):
        """Somebody wants to see a row whole."""

        def __init__(self, item: Item) -> None:
            super().__init__()
            self.item = item

    class Moved(Message):
        """The cursor is on another row."""

    def __init__(
        self,
        columns: Sequence[Column],
        id_of: Callable[[Row], str],
        *,
        title: str,
        key: str = "",
        query: Question = ("", {}),
        rows_in: str = "",
        empty: str = "rows",
        makes: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.rows = Rows(columns, id_of)
        self.frozen_at: float | None = None
        self._columns = columns
        self._title = title
        self._key = key
        self._query = query
        self._rows_in = rows_in
        self._empty = empty
        self._makes = makes
        self._taken: dict[str, Any] = {}

    def compose(self) -> ComposeResult:
        yield RowLines()
        yield FilterLine(
            placeholder="text  field:value  !not", max_length=FILTER_CHARACTERS_MAX, select_on_focus=False
        )  # fmt: skip

    @property
    def fed_screen(self) -> FedScreen:
        return cast("FedScreen", self.screen)

    # ---- rows --------------------------------------------------------------------------------------

    def wants(self) -> Mapping[str, Question]:
        """For `FedScreen.wants`: the newest page, and an older one while the cursor is near the last row."""
        if not self._key or self.frozen_at is not None:
            return {}
        name, arguments = self._query
        wanted: dict[str, Question] = {self._key: (name, {**arguments, "limit": PAGE_ROWS})}
        before = self.rows.wants_older()
        if before is not None:
            wanted[self._older_key(before)] = (name, {**arguments, "limit": PAGE_ROWS, "before": before})
        return wanted

    def ask_otherwise(self, query: Question, *, key: str = "") -> None:
        """Ask another query from now on; the rows of the last one go.

        Args:
            query: its name and arguments.
            key: of its answer; by default made of the query, so that no answer to another one is taken for its rows.
        """
        if query == self._query:
            return
        text, self._query, self._taken = self.rows.filter_text, query, {}
        self._key = key or " ".join([query[0], *(f"{name} {value}" for name, value in query[1].items())])
        self.rows = type(self.rows)(self._columns, self.rows.id_of)
        self.rows.filter(text)

    @property
    def key_asked(self) -> str:
        """Of the newest answer in `Snapshot.answers`, for what is asked now."""
        return self._key

    def take(self, snapshot: Snapshot) -> None:
        """What came in for this table, unless it is frozen. Call it before `draw`."""
        if self.frozen_at is not None:
            return
        newest = snapshot.answers.get(self._key)
        if newest is not None and newest is not self._taken.get(self._key):
            self._taken[self._key] = newest
            answer = mapping(newest)
            size = answer.get("size")
            total = answer.get("total", size)
            self.rows.take_newest(
                self._page(answer), answer.get("next"), total=total if isinstance(total, int) else None,
                reaches=size if isinstance(size, int) else None,
            )  # fmt: skip
        before = self.rows.next
        older = snapshot.answers.get(self._older_key(before)) if before is not None else None
        if older is not None:
            answer = mapping(older)
            self.rows.take_older(self._page(answer), before, answer.get("next"))

    def take_rows(self, rows: Sequence[Row]) -> None:
        """Rows that the screen has already, all of them."""
        if self.frozen_at is None:
            self.rows.take_newest(rows, None, total=len(rows))

    def _page(self, answer: Mapping[str, Any]) -> Sequence[Row]:
        page = answer.get(self._rows_in)
        return [mapping(row) for row in page] if isinstance(page, list) else []

    def _older_key(self, before: Any) -> str:
        # the place is part of the key, so that no answer can be taken for another page's
        return f"{self._key} before {before}"

    @property
    def asked(self) -> Question:
        """The query that these rows come from."""
        return self._query

    def selected(self) -> Item | None:
        return self.rows.selected()

    # ---- drawing -----------------------------------------------------------------------------------

    def draw(self) -> None:
        if not self.is_mounted:
            return
        fed, lines = self.fed_screen.fed, self.query_one(RowLines)
        size = lines.size
        snapshot, now = fed.snapshot, fed.now()
        told: list[Line] = []
        if self._key and self.frozen_at is None:  # frozen, it asks for nothing, and its title says so
            told = conditions.answer_lines(snapshot, self._key, now, size.width, opened_at=self.fed_screen.opened_at)
        rows: list[Line]
        if not self.rows.arrived:
            lost = conditions.is_lost(snapshot, self._key)
            if lost and not self._key:
                rows = [line((conditions.NOT_READ, "dim"))]
            elif lost or self._key in snapshot.refused:
                rows = []
            else:
                rows = skeleton(self._columns, size.width, size.height, fed.glyphs)
        elif not self.rows.kept:
            rows = conditions.empty_lines(self._empty, self._makes, size.width)
        elif not self.rows.shown:
            rows = [line((f"none of {self.rows.kept} rows passes the filter; esc clears it", "dim"))]
        else:
            if self.rows.newer:
                told = [*told, line(("newer rows are not shown here: g goes to the newest", "warn"))]
            rows = self.rows.lines(size.width, max(size.height - len(told), 2), fed.glyphs)
        if self.rows.left:
            self.rows.left = False
            fed.came_on()
        self._lines_above = len(told)
        lines.draw([*told, *rows], greyed=self.fed_screen.greyed)
        self.border_title = fed.title_of(self._title_text(now))

    _lines_above = 0

    def _title_text(self, now: float) -> str:
        rows = self.rows
        parts = [self._title]
        if rows.arrived:
            known = max(rows.total or 0, rows.kept)
            # what is not loaded is asked for on the way down
            loaded = " loaded" if len(rows.shown) == rows.kept else ""
            parts.append(f"{len(rows.shown):,}{loaded} of {known:,}" if len(rows.shown) != known else f"{known:,}")
        if rows.above:
            parts.append(f"{rows.above} above")
        if rows.filter_text:
            parts.append(f"/{safe(rows.filter_text, 40)}")
        if rows.sorted_by:
            parts.append(f"by {rows.sorted_by}")
        if self.frozen_at is not None:
            parts.insert(0, f"FROZEN {duration_text(now - self.frozen_at)}")
        return " · ".join(parts)

    # ---- keys --------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self.post_message(self.Moved())
        self.fed_screen.redraw()

    def action_move(self, step: int) -> None:
        self.rows.move(step)
        self._changed()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(self.query_one(RowLines).size.height - 2, 1))

    def action_newest(self) -> None:
        self.rows.go_newest()
        self._taken = {}
        self._changed()

    def go_before(self, before: Any) -> None:
        """Ask for the rows from there downwards, for `go_to` of a screen (`:audit 1200`)."""
        self.rows.go_before(before)
        self._changed()

    def action_last(self) -> None:
        self.action_move(len(self.rows.shown))

    def click(self, row: int) -> None:
        row_id = self.rows.row_at(row - self._lines_above)
        if row_id and self.rows.select(row_id):
            self._changed()

    def action_open(self) -> None:
        item = self.rows.selected()
        if item is not None:
            self.post_message(self.Opened(item))

    def action_sort(self) -> None:
        self.rows.sort_next()
        self._changed()

    def action_turn(self) -> None:
        self.rows.turn += 1
        self._changed()

    def action_maximise(self) -> None:
        self.fed_screen.maximise_pane(self)

    def action_freeze(self) -> None:
        self.frozen_at = self.fed_screen.fed.now() if self.frozen_at is None else None
        self._changed()

    def action_back(self) -> None:
        """One level up: out of the filter first, then out of the screen."""
        if self.rows.filter_text:
            self.query_one(FilterLine).value = ""
            self.close_filter()
        else:
            self.fed_screen.action_leave()

    # ---- filter ------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        field = self.query_one(FilterLine)
        field.add_class("-open")
        field.focus()
        field.action_select_all()  # what is typed takes the place of a filter that is there

    def close_filter(self) -> None:
        self.query_one(FilterLine).set_class(bool(self.rows.filter_text), "-open")
        self.query_one(RowLines).focus()

    def filter(self, text: str) -> None:
        """As if it had been typed after `/`; for presets of the palette."""
        field = self.query_one(FilterLine)
        field.add_class("-open")
        field.value = text

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.rows.filter(event.value)
        if not event.value and not event.input.has_focus:
            event.input.remove_class("-open")
        self._changed()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        self.close_filter()

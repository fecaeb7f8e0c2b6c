"""A table of rows that come in pages, newest first: which rows pass, where the cursor stays, the widget around them.

The cursor belongs to a row's id, never to a place: rows that arrive, a filter or another order move the row, and the
cursor goes with it, on the same line of the screen where that can be. Only when its row is gone, or slid out of sight
before anybody had placed the cursor, does the cursor go elsewhere, and `left` tells that it did; to a row that only a
filter took away it comes back with the row. What is kept is one run of rows without a hole, at most `ROWS_MAX` of them:
what was dropped is asked for again when somebody goes there.

The widget draws the rows around the cursor as lines and no more, whatever the number of rows: measured with 2000 rows
of eight columns on 140x42, 0.01 s of processor time for a redraw, against 0.35 s for refilling a `DataTable`. So there
is no second copy of the rows in a widget, no width to keep in step, and every cell is drawn by the one function that
makes text safe (threat T37).

Does not say how old the rows are: the screen tells that from the snapshot they came with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from rich.cells import cell_len
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from console.base import FedScreen, Lines, TextDialog, TextLine
from fedsilo.control.answers import to_json
from fedsilo.views import conditions
from fedsilo.views.columns import GAP_CELLS, MARK_CELLS, Column, Row, choose_columns
from fedsilo.views.lines import Glyphs, Line, Part, Shown, duration_text, line, pad, safe
from fedsilo.views.state import Question, Snapshot, mapping

ROWS_MAX = 5000  # of some 2 kB each; a filter looks at all of them within the blink of a key
NEAR_THE_END_ROWS = 30  # the next page is asked for when the cursor comes that near to the last row


# ---- filter ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    text: str
    field: str = ""
    excludes: bool = False


@dataclass(frozen=True)
class Filter:
    """A filter as typed after `/`: words that must all match. `text` is searched in every column, `field:value` in one,
    and `!` before either negates. Case is ignored."""

    terms: tuple[Term, ...] = ()

    def passes(self, texts: Mapping[str, str]) -> bool:
        """Args:
        texts: column name -> its text, lower case."""
        return all(self._holds(term, texts) != term.excludes for term in self.terms)

    @staticmethod
    def _holds(term: Term, texts: Mapping[str, str]) -> bool:
        if term.field:
            return term.text in texts[term.field]
        return any(term.text in text for text in texts.values())


def parse_filter(text: str, names: Iterable[str]) -> Filter:
    """A filter; a word before a colon that is no column's name is a text like any other, as in `r1:x`."""
    known = {name.lower(): name for name in names}
    terms: list[Term] = []
    for word in text.split():
        excludes = word.startswith("!")
        body = word[1:] if excludes else word
        name, colon, value = body.partition(":")
        if colon and name.lower() in known:
            terms.append(Term(value.lower(), known[name.lower()], excludes))
        elif body:
            terms.append(Term(body.lower(), "", excludes))
    return Filter(tuple(terms))


# ---- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A row with what its cells show."""

    id: str
    row: Row
    cells: tuple[Part, ...]


@dataclass
class Rows:
    """The rows of one table and its cursor.

    Args:
        columns: what a row shows.
        id_of: a text that names the row for good, such as its sequence number.
    """

    columns: Sequence[Column]
    id_of: Callable[[Row], str]
    cursor: str = ""
    moved: bool = False  # somebody placed the cursor
    left: bool = False  # the row under the cursor went away, and the cursor had to go elsewhere
    total: int | None = None  # as the daemon counts, with those not asked for
    next: Any = None  # where the next older page begins; None at the end
    newer: bool = False  # there are newer rows that do not join those here
    turn: int = 0
    shown: list[Item] = field(default_factory=list)  # those that pass the filter, in the order of the table
    above: int = 0  # rows above those that were last drawn
    arrived: bool = False  # a page came in; before that there is nothing to say, not even that there is nothing
    filter_text: str = ""
    _items: list[Item] = field(default_factory=list)
    _filter: Filter = Filter()
    _sorted_by: int = -1  # a column, or -1 for newest first
    _descending: bool = False
    _aside: str = ""  # the row where the cursor belongs while a filter does not let it through
    _reached: int | None = None  # numbers below this one were there when the newest page came, where that is told

    # ---- pages -------------------------------------------------------------------------------------

    def take_newest(
        self, page: Sequence[Row], following: Any, *, total: int | None = None, reaches: int | None = None
    ) -> None:
        """The newest page came. A page of what a query looked through may hold few rows or none, so whether it joins
        those that are here follows from the numbers that it covers, where the daemon tells them, and from a row that
        both have elsewhere.

        Args:
            page: rows, newest first.
            following: where the page after it begins; None when this is all there is.
            total: how many there are in all, when the daemon tells.
            reaches: the number above the newest that the query looked at, when the daemon tells.
        """
        fresh = self._made(page)
        self.total = total
        known = {item.id for item in self._items}
        covers = self._covers(following, reaches)
        joins = following is None or covers or any(item.id in known for item in fresh)
        if not joins and self.moved:
            self.newer = True  # what somebody looks at stays; `go_newest` brings the rest
            return
        before, self.arrived, self.newer, self._reached = self.arrived, True, False, reaches
        if not joins or following is None or not before:
            self._items, self.next = fresh, following
        elif covers:
            arrived = {item.id for item in fresh}
            self._items = fresh + [item for item in self._items if item.id not in arrived]
        else:
            arrived = {item.id for item in fresh}
            last = max(index for index, item in enumerate(self._items) if item.id in arrived)
            self._items = fresh + [item for item in self._items[last + 1 :] if item.id not in arrived]
        if len(self._items) > ROWS_MAX:
            self._keep_most()
        self._settle()

    def _covers(self, following: Any, reaches: int | None) -> bool:
        """The page goes down to what was there when the last one came."""
        if self._reached is None or reaches is None or not isinstance(following, int) or not self.arrived:
            return False
        return not self.newer and following <= self._reached <= reaches

    def take_older(self, page: Sequence[Row], asked_before: Any, following: Any) -> None:
        """An older page came; one that was asked for before the rows changed is not taken.

        Args:
            page: rows, newest first.
            asked_before: what it was asked with: `next` of then.
            following: where the page after it begins; None at the end.
        """
        if self.next is None or asked_before != self.next:
            return
        self.arrived = True
        known = {item.id for item in self._items}
        self._items += [item for item in self._made(page) if item.id not in known]
        self.next = following
        if len(self._items) > ROWS_MAX:
            # somebody goes down: the newest give way, and are a key away
            self._items = self._items[len(self._items) - ROWS_MAX :]
            self.newer = True
        self._settle()

    def wants_older(self) -> Any:
        """Return where the page begins that should be asked for now, or None."""
        if self.next is None:
            return None
        if self._filter.terms and len(self._items) >= ROWS_MAX:
            return None  # a filter that nothing passes would otherwise fetch everything there ever was
        return self.next if self._place() >= len(self.shown) - NEAR_THE_END_ROWS else None

    def go_newest(self) -> None:
        """To the first row; rows that do not join the newest page are dropped, so that it can come in whole."""
        if self.newer:
            self._items, self.newer, self.next, self.arrived = [], False, None, False
        self.moved, self._aside = False, ""
        self._settle()
        self.cursor = self.shown[0].id if self.shown else ""
        self.above = 0

    def go_before(self, before: Any) -> None:
        """To the rows from there downwards, such as a record by its number; they are asked for now."""
        self._items, self.next, self.newer, self.moved, self.arrived = [], before, True, True, False
        self.cursor, self.above, self._aside = "", 0, ""
        self._settle()

    def _made(self, page: Sequence[Row]) -> list[Item]:
        known = {item.id: item for item in self._items}
        made: dict[str, Item] = {}
        for row in page:
            name = self.id_of(row)
            before = known.get(name)
            if before is not None and before.row == row:
                made[name] = before
            else:
                made[name] = Item(name, row, tuple(column.show(row) for column in self.columns))
        return list(made.values())

    def _keep_most(self) -> None:
        """Newest ones came and there are too many: the oldest give way, but not what somebody looks at."""
        place = next((index for index, item in enumerate(self._items) if item.id == self.cursor), 0)
        if place < ROWS_MAX - NEAR_THE_END_ROWS:
            self._items = self._items[:ROWS_MAX]
            self.next = self._before_of(self._items[-1])
        else:
            self._items = self._items[len(self._items) - ROWS_MAX :]
            self.newer = True

    @staticmethod
    def _before_of(item: Item) -> Any:
        """Pages begin before a sequence number (the queries' `before`)."""
        return item.row.seq

    # ---- what is shown -----------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        return len(self._items)

    @property
    def sorted_by(self) -> str:
        return self.columns[self._sorted_by].name if self._sorted_by >= 0 else ""

    def selected(self) -> Item | None:
        return next((item for item in self.shown if item.id == self.cursor), None)

    def filter(self, text: str) -> None:
        self.filter_text = text
        self._filter = parse_filter(text, [column.name for column in self.columns])
        self._settle()

    def sort_next(self) -> None:
        """Sort by the first column, then the same downwards, then by the next column, and at the end newest first."""
        if self._sorted_by < 0:
            self._sorted_by, self._descending = 0, False
        elif not self._descending:
            self._descending = True
        else:
            self._sorted_by, self._descending = self._sorted_by + 1, False
            if self._sorted_by >= len(self.columns):
                self._sorted_by = -1
        self._settle()

    def move(self, steps: int) -> None:
        """Down with more than nothing, up with less; it stops at both ends."""
        if not self.shown:
            return
        self.moved, self._aside = True, ""
        place = max(0, min(self._place() + steps, len(self.shown) - 1))
        self.cursor = self.shown[place].id

    def select(self, row_id: str) -> bool:
        """Put the cursor on a row; False when it is not there."""
        if all(item.id != row_id for item in self.shown):
            return False
        self.cursor, self.moved, self._aside = row_id, True, ""
        return True

    def _place(self) -> int:
        return next((index for index, item in enumerate(self.shown) if item.id == self.cursor), -1)

    def _settle(self) -> None:
        before, line_number = self._place(), self._place() - self.above
        wanted = self._aside or self.cursor
        self.shown = [item for item in self._items if self._filter.passes(self._texts(item))] if (
            self._filter.terms
        ) else list(self._items)  # fmt: skip
        if self._sorted_by >= 0:
            column = self._sorted_by
            order = self.columns[column].order
            self.shown.sort(
                key=lambda item: _sortable(order(item.row) if order is not None else item.cells[column][0].lower()),
                reverse=self._descending,
            )
        if self._aside and any(item.id == self._aside for item in self.shown):
            self.cursor, self._aside, self.left = self._aside, "", True
        place = self._place()
        if place >= 0:
            if self.moved:
                self.above = max(place - line_number, 0)  # the row stays on its line of the screen
            return
        if self.cursor:
            self.left = True
        # a row that only the filter took away is gone back to, once it passes again
        self._aside = wanted if any(item.id == wanted for item in self._items) else ""
        self.cursor = self.shown[max(0, min(before, len(self.shown) - 1))].id if self.shown else ""

    def _texts(self, item: Item) -> dict[str, str]:
        return {column.name: text.lower() for column, (text, _) in zip(self.columns, item.cells, strict=True)}

    # ---- drawing -----------------------------------------------------------------------------------

    def row_at(self, line_number: int) -> str:
        """The id of the row that was last drawn on a line below the header, or nothing."""
        place = self.above + line_number
        return self.shown[place].id if line_number >= 0 and place < len(self.shown) else ""

    def lines(self, cells: int, height: int, glyphs: Glyphs) -> list[Line]:
        """Header and the rows around the cursor, in at most `height` lines of `cells`; nothing sticks out."""
        chosen = choose_columns(self.columns, cells, turn=self.turn)
        room = max(height - 1, 1)
        place = max(self._place(), 0)
        if not self.moved and place >= room:
            # nobody chose that row, and the newest are what a live table is for
            self.cursor, self.left, place = self.shown[0].id, True, 0
        self.above = min(self.above, place, max(len(self.shown) - room, 0))
        self.above = max(self.above, place - room + 1)
        shown = [self._header(chosen, glyphs)]
        for item in self.shown[self.above : self.above + room]:
            here = item.id == self.cursor
            parts: list[Part] = [(f"{glyphs.cursor} " if here else "  ", "accent")]
            by_name = dict(zip((column.name for column in self.columns), item.cells, strict=True))
            for index, (column, width) in enumerate(chosen):
                text, style = by_name[column.name]
                parts += [(" " * GAP_CELLS, "")] if index else []
                shown_text = pad(text, width, right=column.right, more=glyphs.more)
                parts.append((shown_text, style or ("strong" if here else "")))
            shown.append(tuple(parts))
        return shown

    def _header(self, chosen: Sequence[tuple[Column, int]], glyphs: Glyphs) -> Line:
        parts: list[Part] = [(" " * MARK_CELLS, "")]
        for index, (column, width) in enumerate(chosen):
            mark = (glyphs.down if self._descending else glyphs.up) if column.name == self.sorted_by else ""
            title = column.name[: max(width - cell_len(mark), 0)] + mark
            parts += [(" " * GAP_CELLS, "")] if index else []
            parts.append((pad(title, width, right=column.right), "strong" if mark else "dim"))
        return tuple(parts)


def _sortable(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, so that a value of another type than usual cannot break the order."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def skeleton(columns: Sequence[Column], cells: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Return the table before the first page comes: the header, and placeholder rows."""
    chosen = choose_columns(columns, cells)
    widths = [(column.name, width, column.right) for column, width in chosen]
    space = " " * GAP_CELLS
    header = space.join(pad(name, width, right=right) for name, width, right in widths)
    empty = space.join(pad(glyphs.more, width, right=right) for _, width, right in widths)
    # what `pad` made safe stays so: a run of spaces is none that hides something
    return [((Shown(" " * MARK_CELLS + text), "dim"),) for text in [header, *[empty] * max(min(height - 1, 3), 1)]]


PAGE_ROWS = 100
FILTER_CHARACTERS_MAX = 120


class FilterLine(TextLine):
    """The input line after `/`. Enter goes back to the rows and keeps the filter, escape clears it."""

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
    """A table with its title, filter line and keys.

    Args:
        columns: what a row shows.
        id_of: what names a row for good.
        title: of the box.
        key: of its answer in `Snapshot.answers`; empty for rows given to `take_rows`.
        query: the query's name and arguments without `limit` and `before`.
        rows_of: returns the rows of an answer.
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
        rows_of: Callable[[Any], Sequence[Row]] = lambda answer: (),
        empty: str = "rows",
        makes: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.rows = Rows(columns, id_of)
        self.frozen_at: float | None = None
        self._columns = columns
        self._title = title
        self.key_asked = key  # of the newest answer to the present question
        self.asked = query
        self._rows_of = rows_of
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
        if not self.key_asked or self.frozen_at is not None:
            return {}
        name, arguments = self.asked
        wanted: dict[str, Question] = {self.key_asked: (name, {**arguments, "limit": PAGE_ROWS})}
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
        if query == self.asked:
            return
        text, self.asked, self._taken = self.rows.filter_text, query, {}
        self.key_asked = key or " ".join([query[0], *(f"{name} {value}" for name, value in query[1].items())])
        self.rows = type(self.rows)(self._columns, self.rows.id_of)
        self.rows.filter(text)

    def take(self, snapshot: Snapshot) -> None:
        """Take the answers for this table, unless it is frozen. Call it before `draw`."""
        if self.frozen_at is not None:
            return
        newest = snapshot.answers.get(self.key_asked)
        if newest is not None and newest is not self._taken.get(self.key_asked):
            self._taken[self.key_asked] = newest
            answer = mapping(newest)
            size = answer.get("size")
            total = answer.get("total", size)
            self.rows.take_newest(
                self._rows_of(answer), answer.get("next"), total=total if isinstance(total, int) else None,
                reaches=size if isinstance(size, int) else None,
            )  # fmt: skip
        before = self.rows.next
        older = snapshot.answers.get(self._older_key(before)) if before is not None else None
        if older is not None:
            self.rows.take_older(self._rows_of(older), before, mapping(older).get("next"))

    def take_rows(self, rows: Sequence[Row]) -> None:
        """Rows that the screen has already, all of them."""
        if self.frozen_at is None:
            self.rows.take_newest(rows, None, total=len(rows))

    def _older_key(self, before: Any) -> str:
        # the place is part of the key, so that no answer can be taken for another page's
        return f"{self.key_asked} before {before}"

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
        if self.key_asked and self.frozen_at is None:  # frozen, it asks for nothing, and its title says so
            told = conditions.answer_lines(
                snapshot, self.key_asked, now, size.width, opened_at=self.fed_screen.opened_at
            )
        rows: list[Line]
        if not self.rows.arrived:
            lost = conditions.is_lost(snapshot, self.key_asked)
            if lost and not self.key_asked:
                rows = [line((conditions.NOT_READ, "dim"))]
            elif lost or self.key_asked in snapshot.refused:
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
        """Go one level up: out of the filter first, then out of the screen."""
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
        """Set the filter as if it had been typed after `/`; for presets of the palette."""
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


@dataclass(frozen=True)
class Subject:
    """The query, columns and details of a screen with one table.

    Attributes:
        columns: of the table.
        id_of: what names a row for good.
        title: of the table.
        one: title of the dialog with a row whole.
        keys: the footer.
        query: that the rows come from, all in one answer; empty where the screen takes them from elsewhere.
        empty: what would stand in the table.
        makes: the command that makes some.
    """

    columns: Sequence[Column]
    id_of: Callable[[Row], str]
    title: str
    one: str
    keys: str
    query: str = ""
    empty: str = "rows"
    makes: str = ""


class TableScreen(FedScreen):
    """Base class of the screens of one form: lines on top, a table, and a row whole in a dialog.

    A subclass says what it is about, and makes its rows and lines of the answer.
    """

    subject: ClassVar[Subject]
    DEFAULT_CSS = "TableScreen #head { padding: 0 2; }"

    def panes(self) -> ComposeResult:
        yield Lines(id="head")
        yield self.make_table()

    def make_table(self) -> TablePane:
        about = self.subject
        return TablePane(
            about.columns, about.id_of, title=about.title, key=about.query, empty=about.empty, makes=about.makes,
        )  # fmt: skip

    @property
    def table(self) -> TablePane:
        return self.query_one(TablePane)

    @property
    def answer(self) -> Any:
        """The newest answer to the subject's query; None before it came."""
        return self.fed.snapshot.answers.get(self.subject.query)

    def wants(self) -> Mapping[str, Question]:
        query = self.subject.query
        return {query: (query, {})} if query and self.is_mounted and self.table.frozen_at is None else {}

    def draw(self) -> None:
        rows = self.rows_of(self.answer)
        if rows is not None:
            self.table.take_rows(rows)
            self.took_rows()
        self.query_one("#head", Lines).draw(self.head_lines(rows or (), self.app.size.width - 4), greyed=self.greyed)
        self.table.draw()

    def took_rows(self) -> None:
        """Do what follows from the rows that the table now has, before they are drawn."""

    def rows_of(self, answer: Any) -> Sequence[Row] | None:
        """Return the rows of an answer; None while there is nothing to say, not even that there are none."""
        raise NotImplementedError

    def head_lines(self, rows: Sequence[Row], cells: int) -> list[Line]:
        """Return what stands above the table."""
        raise NotImplementedError

    def whole_lines(self, row: Row, cells: int) -> list[Line]:
        """Return a row whole."""
        raise NotImplementedError

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        self.open_row(message.item)

    def open_row(self, item: Item) -> None:
        """Show a row whole."""
        self.app.push_screen(TextDialog(self.subject.one, self.whole_lines(item.row, self.dialog_cells)))

    def inspected(self) -> Any:
        item = self.table.selected()
        return to_json(item.row) if item else None

    def keys(self) -> Line:
        return line(self.subject.keys)

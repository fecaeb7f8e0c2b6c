"""Screen 4: figures by round or step: at a coordinator what silos released, at a silo its trainer's.

One figure at a time, two where there is room; `tab` goes to the next. Values under a cursor that `h` and `l` move, `T`
the same as a table. Nothing is changed here, so every key is about the view. When the daemon does not answer, the plot
stops where it is and is greyed: a line that goes on flat would be a claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import SCREEN_TWINS, command_line
from console.base import FedScreen, Lines, TextDialog
from console.table_screen import RowLines, TablePane
from fedsilo.control.answers import Curves, read, to_json
from fedsilo.views import conditions, curves
from fedsilo.views.lines import Line, line
from fedsilo.views.state import Question

NOTHING = read(Curves, None)  # while the daemon has answered nothing
TALL_ROWS_MIN = 34  # from there on two plots
VALUE_LINES_MAX = 4


class PointsPane(TablePane):
    """The values of one figure, under its name."""

    def name_it(self, title: str) -> None:
        self._title = title


class CurvesScreen(FedScreen):
    called = "curves"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_figure(1)", show=False),
        Binding("shift+tab", "next_figure(-1)", show=False),
        Binding("h,left", "cursor(-1)", show=False),
        Binding("l,right", "cursor(1)", show=False),
        Binding("T", "as_table", show=False),
        Binding("m", "smooth", show=False),
        Binding("b", "baseline", show=False),
        Binding("x", "axis", show=False),
    ]
    CSS = """
    CurvesScreen {
        .figure { height: 1fr; }
        #second { display: none; }
        #points { display: none; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown_name = curves.ORDER[0]
        self._chosen = False  # by a person; until then the first that there is
        self._x = ""
        self._run = ""
        self._cursor: float | None = None  # None: the last place
        self._smooth = False
        self._baseline = True
        self._table = False
        self._read: tuple[Any, Curves | None] = None, None  # the newest answer, and what was read from it
        self._last: Curves = NOTHING
        self._site = ""

    def panes(self) -> ComposeResult:
        yield Lines(id="first", classes="box figure")
        yield Lines(id="second", classes="box figure")
        yield PointsPane(
            curves.COLUMNS, curves.row_id, title="Values", empty="figures", makes="fedsilo run submit run.yaml",
            id="points",
        )  # fmt: skip

    # ---- what is asked -----------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """Return the answer's key, which includes what it is about so that no other answer is taken for it."""
        return " ".join(["curves", *self._names_asked, self._axis, self._run]).strip()

    @property
    def _axis(self) -> str:
        return self._x or ("round" if self.at_a_coordinator else "step")

    @property
    def _names_asked(self) -> list[str]:
        names = curves.names_of(self._last)
        if self._shown_name not in names or len(names) < 2 or not self._two:
            return [self._shown_name]
        return [self._shown_name, names[(names.index(self._shown_name) + 1) % len(names)]]

    @property
    def _two(self) -> bool:
        return self.app.size.height >= TALL_ROWS_MIN and not self._table

    @property
    def answer(self) -> Curves | None:
        told = self.fed.snapshot.answers.get(self.key)
        if told is not self._read[0]:
            self._read = told, None if told is None else read(Curves, told)
        return self._read[1]

    def wants(self) -> Mapping[str, Question]:
        if not self.is_mounted or self.fed.snapshot.state is None:
            return {}
        asked = {"names": ",".join(self._names_asked), "x": self._axis, **({"run": self._run} if self._run else {})}
        return {self.key: (curves.QUERY, asked)}

    # ---- drawing -----------------------------------------------------------------------------------

    def draw(self) -> None:
        if self._site != self.fed.snapshot.site:  # another daemon: nothing of the former one is shown
            self._site, self._last, self._run = self.fed.snapshot.site, NOTHING, ""
        answer = self.answer
        if answer:
            self._last = answer
            names = curves.names_of(answer)
            if names and self._shown_name not in names and not self._chosen:
                self._shown_name = names[0]
                answer = self.answer
        shown = answer or self._last
        first, second = self.query_one("#first", Lines), self.query_one("#second", Lines)
        points = self.query_one("#points", PointsPane)
        asked = self._names_asked
        first.display, points.display = not self._table, self._table
        second.display = self._two and len(asked) > 1 and answer is not None
        if self._table:
            rows = curves.table_rows(shown, self._shown_name)
            points.display = answer is not None or bool(rows)
            first.display = not points.display  # says what is awaited, or that it was not read
            if first.display:
                first.border_title = self.fed.title_of(curves.border_title(shown, self._shown_name))
                first.draw(self._figure(answer or NOTHING, self._shown_name, self.app.size.width - 4, self.room - 2))
            else:
                points.take_rows(rows)
            points.name_it(f"{curves.title_of(self._shown_name)}, every value")
            points.draw()
            return
        panes = [(first, self._shown_name), *([(second, asked[1])] if second.display else [])]
        height = self.room // len(panes)
        for pane, name in panes:
            pane.border_title = self.fed.title_of(curves.border_title(shown, name))
            pane.draw(self._figure(shown, name, self.app.size.width - 4, height - 2), greyed=self._stopped)

    @property
    def _stopped(self) -> bool:
        """Return True if the screen shows an answer that is not current."""
        snapshot = self.fed.snapshot
        age = self.fed.now() - snapshot.answered_at.get(self.key, self.fed.now())
        return self.greyed or (self.key in snapshot.answers and age > conditions.ANSWER_STALE_SECONDS)

    def _figure(self, answer: Curves, name: str, cells: int, rows: int) -> list[Line]:
        fed = self.fed
        told = conditions.answer_lines(fed.snapshot, self.key, fed.now(), cells, opened_at=self.opened_at)
        if self._stopped and self.key in fed.snapshot.answers and not told:
            told = [line(("the plot stops where the daemon's last answer stops", "warn"))]
        if answer is NOTHING:
            awaited = self.key not in fed.snapshot.refused and not conditions.is_lost(fed.snapshot, self.key)
            return [*told, line(("…", "dim"))] if awaited else told
        names = curves.names_of(answer)
        if not names:
            makes = "fedsilo run submit run.yaml" + ("" if self.at_a_coordinator else "  at the coordinator")
            return [*told, *conditions.empty_lines(f"figures of run {answer.run or '-'}", makes, cells)]
        if name not in names:
            return [*told, *conditions.empty_lines(f"{curves.title_of(name)} in this run; tab goes to the next figure",
                                                   "", cells)]  # fmt: skip
        view = curves.View(name, self._place(answer, name), self._smooth, self._baseline)
        head = curves.head_lines(answer, view, cells, fed.glyphs)
        values = curves.value_lines(answer, view, cells, fed.glyphs, most=VALUE_LINES_MAX)
        room = rows - len(told) - len(head) - len(values)
        plot = curves.plot_of(answer, view, cells, room, ascii_only=fed.ascii_only)
        return [*told, *head, *values, *(plot or curves.nothing_lines(answer, name, cells))]

    def _place(self, answer: Curves, name: str) -> float | None:
        places = curves.places_of(answer, name)
        if not places:
            return None
        wanted = places[-1] if self._cursor is None else self._cursor
        return min(places, key=lambda each: abs(each - wanted))

    # ---- keys --------------------------------------------------------------------------------------

    def action_next_figure(self, step: int) -> None:
        names = curves.names_of(self.answer or self._last)
        if names:
            here = names.index(self._shown_name) if self._shown_name in names else -step
            self._shown_name, self._chosen = names[(here + step) % len(names)], True
            self.redraw()

    def action_cursor(self, step: int) -> None:
        answer = self.answer or self._last
        places = curves.places_of(answer, self._shown_name)
        here = self._place(answer, self._shown_name)
        if here is not None:
            at = min(max(places.index(here) + step, 0), len(places) - 1)
            self._cursor = places[at] if at < len(places) - 1 else None  # at the end it goes along with what comes
            self.redraw()

    def action_as_table(self) -> None:
        self._table = not self._table
        self.redraw()
        if self._table:
            self.query_one("#points", TablePane).query_one(RowLines).focus()
        else:
            self.set_focus(None)

    def action_smooth(self) -> None:
        self._smooth = not self._smooth
        self.redraw()

    def action_baseline(self) -> None:
        self._baseline = not self._baseline
        known = curves.baseline_of(self.answer or self._last, self._shown_name)
        self.redraw()
        if self._baseline and known is None:
            self.fed.say(f"{curves.title_of(self._shown_name)} has no value from before the first round")

    def action_axis(self) -> None:
        self._x, self._cursor = ("step" if self._axis == "round" else "round"), None
        self.redraw()

    def go_to(self, text: str) -> None:
        """`:curves NAME` or `:curves RUN`: a figure of this run, or another run."""
        names = curves.names_of(self.answer or self._last)
        wanted = text.strip()
        found = [name for name in names if name == wanted or curves.title_of(name).lower() == wanted.lower()]
        if found:
            self._shown_name, self._chosen = found[0], True
        elif wanted in self._last.runs:
            self._run, self._cursor = wanted, None
        else:
            self.fed.say(f"curves takes a figure ({', '.join(map(curves.title_of, names[:6])) or '-'}) or a run")
        self.redraw()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        cells = self.dialog_cells
        told = curves.point_text(message.item.row, self.answer or self._last, cells)
        self.app.push_screen(TextDialog("Value", [*told, line(("as text ", "dim"), self.twin())]))

    def twin(self) -> str:
        run = ("--run", self._run) if self._run else ()
        words = SCREEN_TWINS["curves"](self.context())
        return command_line((*words, *run, "--name", self._shown_name, "--x", self._axis))

    def inspected(self) -> Any:
        if self._table and (item := self.query_one("#points", TablePane).selected()) is not None:
            return to_json(item.row)
        return self.fed.snapshot.answers.get(self.key)

    def keys(self) -> Line:
        toggle = "T Plot" if self._table else "T Table"
        return line(f" tab Figure  h l Cursor  {toggle}  m Smooth  b Base  x Axis  ? Help  ctrl+q Quit")

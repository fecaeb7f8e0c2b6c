"""Screen 7: every limit that counts over messages, how much of it is used, and for how many rounds it is good.

Three tables share one answer. A low terminal shows one of them at a time; `tab` goes to the next. Nothing is changed
here: a limit is a line of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import command_line
from console.base import FedScreen, Lines, TextDialog
from console.table_screen import RowLines, TablePane
from fedsilo.control.answers import Answer, Limits, read, to_json
from fedsilo.views import limits
from fedsilo.views.lines import Line, line, wrap
from fedsilo.views.state import Question

LIMITS = "limits"
TALL_ROWS_MIN = 36  # below that one table at a time
HEAD_ROWS_MIN = 30  # below that what is not counted is told with a limit (`enter`)
PANES = ("limits", "capacity", "releases")
CALLED = {"limits": "limits", "capacity": "bits per round", "releases": "released"}
TWINS = {
    "limits": ("silo", "ledger", "limits"), "capacity": ("silo", "ledger", "forecast"),
    "releases": ("silo", "ledger", "show"),
}  # fmt: skip
AT_A_COORDINATOR = "limits are counted at each silo, by its own policy; a coordinator keeps none and shows none"


class BudgetScreen(FedScreen):
    called = "budget"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("tab", "next_pane", show=False)]
    CSS = """
    BudgetScreen {
        #summary { padding: 0 2; }
        #limits { height: 1fr; }
        &.-tall #limits { height: 2fr; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._pane = PANES[0]

    def panes(self) -> ComposeResult:
        yield Lines(id="summary")
        yield TablePane(
            limits.LIMIT_COLUMNS, limits.limit_id, title="Limits", key=LIMITS,
            empty="limits that count over messages", makes="fedsilo policy init", id="limits",
        )  # fmt: skip
        yield TablePane(
            limits.CAPACITY_COLUMNS, lambda row: row.kind, title="Bits per round, of a hostile trainer",
            empty="kinds whose values the trainer chooses", makes="fedsilo policy show --effective", id="capacity",
        )  # fmt: skip
        yield TablePane(
            limits.RELEASE_COLUMNS, lambda row: str(row.seq), title="Released so far, newest",
            empty="messages of content that were let out", makes="silo outbox list", id="releases",
        )  # fmt: skip

    def pane(self, name: str) -> TablePane:
        return self.query_one(f"#{name}", TablePane)

    @property
    def shown(self) -> TablePane:
        return self.pane(self._pane)

    @property
    def answer(self) -> Limits:
        return read(Limits, self.fed.snapshot.answers.get(LIMITS))

    def wants(self) -> Mapping[str, Question]:
        return {} if self.at_a_coordinator or not self.is_mounted else {LIMITS: (LIMITS, {})}

    def draw(self) -> None:
        fed, answer, known = self.fed, self.answer, LIMITS in self.fed.snapshot.answers
        tall = self.app.size.height >= TALL_ROWS_MIN
        width = self.app.size.width - 4
        rows = limits.limit_rows(answer.rows, self.daemon_now, fed.glyphs)
        head: list[Line] = []
        if self.at_a_coordinator:
            head = wrap(AT_A_COORDINATOR, width, "warn")
        elif known:
            head = limits.head_lines(answer, rows, width, fed.glyphs, brief=self.app.size.height < HEAD_ROWS_MIN)
        bits = sorted(answer.capacity, key=lambda row: -row.bits)
        given: Mapping[str, Sequence[Answer]] = {
            "limits": rows, "capacity": bits, "releases": answer.releases,
        }  # fmt: skip
        if known and not tall and not self.at_a_coordinator:
            head += [limits.tables_line(CALLED, {name: len(each) for name, each in given.items()}, self._pane)]
        self.query_one("#summary", Lines).draw(head, greyed=self.greyed)
        for name, pane_rows in given.items():
            pane = self.pane(name)
            pane.display = not self.at_a_coordinator and (name == self._pane or (tall and known))
            if known:
                pane.take_rows(pane_rows)
            pane.draw()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """A click, too, says which table is meant."""
        found = next((name for name in PANES if self.pane(name) in event.widget.ancestors), self._pane)
        if found != self._pane:
            self._pane = found
            self.redraw()

    # ---- keys --------------------------------------------------------------------------------------

    def action_next_pane(self) -> None:
        if self.at_a_coordinator:
            self.fed.say(AT_A_COORDINATOR)
            return
        self._pane = PANES[(PANES.index(self._pane) + 1) % len(PANES)]
        self.shown.display = True
        self.shown.query_one(RowLines).focus()
        self.fed.came_on()
        self.redraw()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        cells = self.dialog_cells
        row, answer = message.item.row, self.answer
        match self._pane:
            case "limits":
                title, told = "Limit", limits.limit_text(row, cells)
            case "capacity":
                title, told = "Bits per round", limits.capacity_text(row, answer, cells)
            case _:
                title, told = "Released", limits.release_text(row, cells)
        more = [line(""), *limits.not_covered_lines(answer, cells)] if self._pane == "limits" else []
        self.app.push_screen(TextDialog(title, [*told, line(("as text ", "dim"), self.twin()), *more]))

    def twin(self) -> str:
        item = self.shown.selected() if self.is_mounted else None
        if self._pane == "releases" and item is not None and item.id.isdigit():
            return command_line(("silo", "outbox", "show", item.id))
        return command_line(TWINS[self._pane])

    def inspected(self) -> Any:
        item = self.shown.selected()
        return to_json(item.row) if item else None

    def keys(self) -> Line:
        if self.at_a_coordinator:
            return line(" : Go to  ? Help  ctrl+q Quit")
        return line(" tab Next table  enter Open  / Filter  s Sort  : Go to  ? Help  ctrl+q Quit")

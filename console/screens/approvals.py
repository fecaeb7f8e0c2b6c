"""Screen 3: what is held, and below it what was held before and how it ended (`h`).

The inbox is the snapshot's own. Nothing is answered here: enter opens the release with all its facts, and only there
can it be approved or rejected. Below the rows stands what the one under the cursor asks for; it is no more than a
preview, for nothing of it counts as read. What the person at this console put off stands here all the same, and says
so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import SCREEN_TWINS, Context, command_line
from console.base import Lines
from console.table_screen import Item, Subject, TablePane, TableScreen
from fedsilo.control.answers import ReleaseRow, read_rows, to_json
from fedsilo.views import approvals
from fedsilo.views.columns import Row
from fedsilo.views.lines import Line, line, wrap
from fedsilo.views.state import Question, mapping, text_of

AT_A_COORDINATOR = (
    "releases are held and answered at each silo, by its own people; a coordinator is told of none. "
    "Look there: fedconsole or silo approvals list, on the silo's own machine"
)


class ReleasesScreen(TableScreen):
    """Base class of the screens with a table of releases; there are none at a coordinator."""

    @property
    def selected_id(self) -> str:
        item = self.table.selected()
        return item.id if item else ""

    def notices(self, cells: int) -> list[Line]:
        told = super().notices(cells)
        return [*told, *wrap(AT_A_COORDINATOR, cells, "warn")] if self.at_a_coordinator else told

    def context(self) -> Context:
        return replace(super().context(), release=self.selected_id)

    def twin(self) -> str:
        return command_line(SCREEN_TWINS["approval"](self.context())) if self.selected_id else super().twin()

    def inspected(self) -> Any:
        item = self.table.selected()
        return None if item is None else self.fed.snapshot.release(item.id) or to_json(item.row)


class HistoryScreen(ReleasesScreen):
    """Releases that were ever held, newest first: who answered, when, on which bytes and under which policy.

    Args:
        kind: of message; empty for all.
    """

    called = "history"
    subject = Subject(
        approvals.HISTORY_COLUMNS, lambda row: row.id, title="Held before", one="Held before",
        keys=" enter Open  / Filter  s Sort  w Columns  esc Back  Y Twin  ? Help", query="approvals",
        empty="releases that were held", makes="a policy that asks for approvals holds the first one",
    )  # fmt: skip

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self._kind = kind

    def panes(self) -> ComposeResult:
        about, kind = self.subject, self._kind
        yield TablePane(
            about.columns, about.id_of, title=f"{about.title}{f': {kind}' if kind else ''}", key="history",
            query=(about.query, {"kind": kind} if kind else {}),
            rows_of=lambda answer: read_rows(ReleaseRow, mapping(answer).get("releases")), empty=about.empty,
            makes=about.makes,
        )  # fmt: skip

    def wants(self) -> Mapping[str, Question]:
        return {} if self.at_a_coordinator else self.table.wants()

    def draw(self) -> None:
        self.table.display = not self.at_a_coordinator
        self.table.take(self.fed.snapshot)
        self.table.draw()

    def crumb(self) -> str:
        return "held before"

    def keys(self) -> Line:
        return line(" esc Back  : Go to  ? Help  ctrl+q Quit") if self.at_a_coordinator else super().keys()

    # ---- keys --------------------------------------------------------------------------------------

    def open_row(self, item: Item) -> None:
        release = self.fed.snapshot.release(item.id)
        if release is not None:
            self.fed.open_release(release)
        else:
            super().open_row(item)

    def whole_lines(self, row: Row, cells: int) -> list[Line]:
        return approvals.answered_lines(row, self.twin(), cells)

    def context(self) -> Context:
        return replace(super().context(), kind=self._kind)


class ApprovalsScreen(ReleasesScreen):
    called = "approvals"
    subject = Subject(
        approvals.HELD_COLUMNS, lambda row: text_of(row.get("id")), title="Approvals", one="Release",
        keys=" enter Open  n Next  / Filter  s Sort  h History  : Go to  ? Help  ctrl+q Quit",
        empty="releases that wait for an answer", makes="h opens those that were answered",
    )  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [Binding("h", "history", show=False)]

    def panes(self) -> ComposeResult:
        yield self.make_table()
        yield Lines(id="preview", classes="box")

    def draw(self) -> None:
        fed = self.fed
        now = self.daemon_now
        self.table.display = not self.at_a_coordinator
        if fed.snapshot.state is not None:
            self.table.take_rows([approvals.held_row(release, now, fed.lock.person) for release in fed.snapshot.held])
        self.table.draw()
        self._draw_preview()

    def _draw_preview(self) -> None:
        """Draw what the selected release asks for, if one is selected and still held."""
        fed, name = self.fed, self.selected_id
        release = fed.snapshot.release(name) if name and not self.at_a_coordinator else None
        self.query_one("#preview").display = release is not None
        if release is not None:
            rows = approvals.preview_lines(release, self.app.size.width - 6, fed.glyphs.more)
            self.box("#preview", "Under the cursor", rows, greyed=self.greyed)

    @property
    def tags(self) -> frozenset[str]:
        return super().tags - {self.called} if self.at_a_coordinator else super().tags

    def keys(self) -> Line:
        if self.at_a_coordinator:
            return line(" esc Overview  n Next  : Go to  ? Help  ctrl+q Quit")
        return super().keys()

    # ---- keys --------------------------------------------------------------------------------------

    def action_history(self) -> None:
        if self.at_a_coordinator:
            self.fed.say("what was held before is at each silo too")
            return
        self.fed.open_below(HistoryScreen())

    def open_row(self, item: Item) -> None:
        release = self.fed.snapshot.release(item.id)
        if release is not None:
            self.fed.open_release(release)

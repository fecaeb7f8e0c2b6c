"""The least screen with a table, to copy from: columns, the query it reads, and what happens with a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import command_line
from console.base import FedScreen, Lines, TextDialog
from console.table_screen import TablePane
from fedsilo.control.answers import MessagePage, read, to_json
from fedsilo.views.columns import Column
from fedsilo.views.lines import bytes_text, line
from fedsilo.views.messages import verdict_part
from fedsilo.views.state import Question

COLUMNS = (
    Column("time", lambda row: (row.time[11:19], ""), 8, worth=0),
    Column("round", lambda row: (f"r{row.round}", ""), 5, worth=2, order=lambda row: row.round),
    Column("kind", lambda row: (row.kind, ""), 16, worth=0, grows=True),
    Column("items", lambda row: (str(row.items), ""), 10, worth=5),
    Column("bytes", lambda row: (bytes_text(row.bytes), ""), 9, worth=3, right=True, order=lambda row: row.bytes),
    Column("verdict", verdict_part, 7, worth=0),
    Column("rule", lambda row: (row.rule, ""), 16, worth=1),
    Column("digest", lambda row: (row.digest[:12], "dim"), 12, worth=4),
    Column("ms", lambda row: (str(row.milliseconds), ""), 5, worth=6, right=True),
)


class ExampleScreen(FedScreen):
    called = "example"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("X", "offer('stop')", show=False)]
    CSS = "ExampleScreen { #detail { height: auto; padding: 0 1; } }"

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[str] = []

    def panes(self) -> ComposeResult:
        yield TablePane(
            COLUMNS, lambda row: str(row.seq), title="Outbox", key="outbox", query=("outbox", {}),
            rows_of=lambda answer: read(MessagePage, answer).messages, empty="messages that left this silo",
            makes="silo start", id="messages",
        )  # fmt: skip
        yield Lines(id="detail")

    @property
    def table(self) -> TablePane:
        return self.query_one("#messages", TablePane)

    def wants(self) -> Mapping[str, Question]:
        return self.table.wants() if self.is_mounted else {}

    def draw(self) -> None:
        self.table.take(self.fed.snapshot)
        self.table.draw()
        item = self.table.selected()
        rule = item.row.rule if item else ""
        self.query_one("#detail", Lines).draw([line(("decided by ", "dim"), rule)], greyed=self.greyed)

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        self.app.push_screen(TextDialog("Message", [line(message.item.row.digest)]))

    def act(self, action: str) -> None:
        """Comes only after the key stood alone, on a row that had not just moved there; a real one opens a dialog."""
        item = self.table.selected()
        if item is not None:
            self.stopped.append(item.id)

    def crumb(self) -> str:
        return "Outbox"

    def twin(self) -> str:
        item = self.table.selected()
        return command_line(("silo", "outbox", "show", item.id) if item else ("silo", "outbox", "list"))

    def inspected(self) -> Any:
        item = self.table.selected()
        return to_json(item.row) if item else None

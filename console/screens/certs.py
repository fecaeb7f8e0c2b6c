"""Screen 8: this party's certificates and the authorities above them, with how long each is good (console design 4).

Nothing is changed here: renewing takes the CA's signature, which no daemon has; `enter` says which commands do it. No
key material is in the daemon's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult

from console.actions import PLACE_TWINS, command_line
from console.base import FedScreen, Lines
from console.dialogs import TextDialog
from console.table_screen import TablePane
from fedsilo.views import certificates
from fedsilo.views.lines import Line, line
from fedsilo.views.state import Question

QUERY = "certificates"


class CertsScreen(FedScreen):
    called = "certs"
    CSS = "CertsScreen { #head { padding: 0 2; } }"

    def panes(self) -> ComposeResult:
        yield Lines(id="head")
        yield TablePane(
            certificates.COLUMNS, certificates.certificate_id, title="Certificates", key=QUERY, empty="certificates",
            makes="fedsilo certs request", id="certificates",
        )  # fmt: skip

    @property
    def table(self) -> TablePane:
        return self.query_one("#certificates", TablePane)

    @property
    def _daemon_now(self) -> float:
        return self.fed.snapshot.server_now(self.fed.now())

    def wants(self) -> Mapping[str, Question]:
        return {QUERY: (QUERY, {})} if self.is_mounted and self.table.frozen_at is None else {}

    def draw(self) -> None:
        fed, width = self.fed, self.app.size.width - 4
        answer = fed.snapshot.answers.get(QUERY)
        rows = certificates.certificate_rows(answer, self._daemon_now, fed.glyphs)
        if answer is not None:
            self.table.take_rows(rows)
        head = certificates.head_lines(rows, fed.snapshot, width, fed.glyphs)
        self.query_one("#head", Lines).draw(head, greyed=self.greyed)
        self.table.draw()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        cells = max(self.app.size.width * 96 // 100 - 6, 30)
        rows = certificates.detail_lines(message.item.row, self._daemon_now, cells, self.fed.glyphs)
        self.app.push_screen(TextDialog("Certificate", [*rows, line(""), line(("as text ", "dim"), self.twin())]))

    def twin(self) -> str:
        return command_line(PLACE_TWINS[self.called](self.context()))

    def inspected(self) -> Any:
        item = self.table.selected()
        return {name: value for name, value in item.row.items() if name != "_"} if item else None

    def keys(self) -> Line:
        return line(" enter Open, renewal  / Filter  s Sort  : Go to  ? Help  ctrl+q Quit")

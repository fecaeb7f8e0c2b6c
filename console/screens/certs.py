"""Screen 8: this party's certificates and the authorities above them, with how long each is good.

Nothing is changed here: renewing takes the CA's signature, which no daemon has; `enter` says which commands do it. No
key material is in the daemon's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from console.table_screen import Subject, TableScreen
from fedsilo.control.answers import CertificateRow, read_rows, to_json
from fedsilo.views import certificates
from fedsilo.views.columns import Row
from fedsilo.views.lines import Line, line


class CertsScreen(TableScreen):
    called = "certs"
    subject = Subject(
        certificates.COLUMNS, certificates.certificate_id, title="Certificates", one="Certificate",
        keys=" enter Open, renewal  / Filter  s Sort  : Go to  ? Help  ctrl+q Quit", query="certificates",
        empty="certificates", makes="fedsilo certs request",
    )  # fmt: skip

    def rows_of(self, answer: Any) -> Sequence[Row] | None:
        told = read_rows(CertificateRow, answer)
        return None if answer is None else certificates.certificate_rows(told, self.daemon_now, self.fed.glyphs)

    def head_lines(self, rows: Sequence[Row], cells: int) -> list[Line]:
        return certificates.head_lines(rows, self.fed.snapshot, cells, self.fed.glyphs)

    def whole_lines(self, row: Row, cells: int) -> list[Line]:
        told = certificates.detail_lines(row, self.daemon_now, cells, self.fed.glyphs)
        return [*told, line(""), line(("as text ", "dim"), self.twin())]

    def inspected(self) -> Any:
        item = self.table.selected()
        return to_json(item.row, CertificateRow) if item else None

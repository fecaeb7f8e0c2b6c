"""Screen 3: what is held, and with `h` what was held before and how it ended (console design 4).

The inbox is the snapshot's own; the history is asked for only while it is shown. Nothing is answered here: enter opens
the release with all its facts, and only there can it be approved or rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import Context, command_line
from console.conditions import answer_lines
from console.drawing import Line, Part, bytes_text, duration_text, line
from console.feed import Question
from console.reading import mapping, number, text_of, whole
from console.rows import Column, Row
from console.screens.base import FedScreen
from console.screens.confirm import TextDialog
from console.screens.tables import TablePane
from console.values import CoordinatorState, Release

HISTORY = "approvals"
EXPIRES_SOON_SECONDS = 300


def _state(row: Row) -> Part:
    word = text_of(row["state"])
    return word, {"held": "warn", "sent": "ok", "approved": "ok", "denied": "bad"}.get(word, "dim")


def _text(name: str) -> Any:
    return lambda row: (text_of(row[name]), "")


COLUMNS = (
    Column("release", lambda row: (text_of(row["id"]), "strong"), 18, worth=0, grows=True),
    Column("kind", _text("kind"), 16, worth=2),
    Column("bytes", lambda row: (bytes_text(row["bytes"]), ""), 9, worth=3, right=True, order=lambda row: row["bytes"]),
    Column("state", _state, 12, worth=0),
    Column("verdicts", _text("verdicts"), 19, worth=4),
    Column("given", _text("given"), 6, worth=1),
    Column("held", _text("age"), 8, worth=1, right=True, order=lambda row: row["held_since"]),
    Column("ends in", lambda row: (row["ends"], "warn" if row["soon"] else ""), 8, worth=0, right=True,
           order=lambda row: row["expires_at"]),
    Column("digest", lambda row: (text_of(row["digest"])[:12], "accent"), 12, worth=5),
)  # fmt: skip


class ApprovalsScreen(FedScreen):
    called = "approvals"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("h", "history", show=False)]

    def __init__(self) -> None:
        super().__init__()
        self._with_history = False
        self._asked_at = 0.0

    def panes(self) -> ComposeResult:
        yield TablePane(
            COLUMNS, lambda row: text_of(row.get("id")), title="Approvals",
            empty="releases that wait for an answer", makes="h shows those that were answered", id="releases",
        )  # fmt: skip

    @property
    def table(self) -> TablePane:
        return self.query_one(TablePane)

    def wants(self) -> Mapping[str, Question]:
        return {HISTORY: ("approvals", {})} if self._with_history else {}

    def draw(self) -> None:
        fed = self.fed
        now = fed.snapshot.server_now(fed.now())
        if fed.snapshot.state is not None:
            rows = [_held_row(release, now) for release in fed.snapshot.held]
            held = {row["id"] for row in rows}
            told = mapping(fed.snapshot.answers.get(HISTORY)).get("releases") if self._with_history else None
            past = [_past_row(mapping(row)) for row in reversed(told)] if isinstance(told, list) else []
            self.table.take_rows([*rows, *(row for row in past if row["id"] not in held)])
        self.table.draw()

    def notices(self, cells: int) -> list[Line]:
        told, fed = super().notices(cells), self.fed
        if self._with_history:
            told += answer_lines(fed.snapshot, HISTORY, fed.now(), cells, opened_at=self._asked_at)
        if isinstance(self.fed.snapshot.state, CoordinatorState):
            return [*told, line(("each silo's own people answer its releases, at the silo; none is shown here", "dim"))]
        return told

    def keys(self) -> Line:
        return line(" enter Open  n Next  / Filter  s Sort  h History  : Go to  ? Help  ctrl+q Quit")

    # ---- keys --------------------------------------------------------------------------------------

    def action_history(self) -> None:
        self._with_history = not self._with_history
        self._asked_at = self.fed.now()
        self.redraw()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        release = self.fed.snapshot.release(message.item.id)
        if release is not None:
            self.fed.open_release(release)
        else:
            row = message.item.row
            self.app.push_screen(
                TextDialog(
                    "Answered",
                    [
                        line((text_of(row["id"]), "strong"), f" {text_of(row['state'])}"),
                        line(("approved by ", "dim"), text_of(row["people"]) or "nobody"),
                        line(("digest ", "dim"), f"sha256:{text_of(row['digest'])}"),
                        line(("all of it ", "dim"), self.twin()),
                    ],
                )
            )

    def _selected_id(self) -> str:
        item = self.table.selected()
        return item.id if item else ""

    def twin(self) -> str:
        name = self._selected_id()
        return command_line(("silo", "approvals", "show", name) if name else ("silo", "approvals", "list"))

    def context(self) -> Context:
        return replace(super().context(), release=self._selected_id())

    def inspected(self) -> Any:
        item = self.table.selected()
        return None if item is None else self.fed.snapshot.release(item.id) or item.row


def _held_row(release: Release, now: float) -> dict[str, Any]:
    left = release.expires_at - now
    return {
        "id": release.id, "kind": ", ".join(kind.kind for kind in release.kinds), "bytes": release.size_bytes,
        "state": release.state, "given": f"{len(release.given)} of {release.needed}",
        "verdicts": " ".join(f"{release.count(name)} {name}" for name in ("ok", "look", "deny")),
        "held_since": release.held_since, "age": duration_text(now - release.held_since),
        "expires_at": release.expires_at, "ends": duration_text(left) if left > 0 else "EXPIRED",
        "soon": left < EXPIRES_SOON_SECONDS, "digest": release.digest, "people": ", ".join(release.given),
    }  # fmt: skip


def _past_row(row: Mapping[str, Any]) -> dict[str, Any]:
    people = row.get("given")
    given = list(map(text_of, people)) if isinstance(people, list) else []
    return {
        "id": text_of(row.get("id")), "kind": text_of(row.get("kind")), "bytes": number(row.get("bytes")),
        "state": text_of(row.get("state")), "given": f"{len(given)} of {whole(row.get('needed'))}", "verdicts": "",
        "held_since": number(row.get("held_since")), "age": "", "expires_at": number(row.get("expires_at")), "ends": "",
        "soon": False, "digest": text_of(row.get("digest")), "people": ", ".join(given),
    }  # fmt: skip

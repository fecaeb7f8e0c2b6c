"""Screen 3: what is held (console design 4); `h` opens what was held before and how it ended.

The inbox is the snapshot's own. Nothing is answered here: enter opens the release with all its facts, and only there
can it be approved or rejected. What the person at this console put off stands here all the same, and says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import Context, command_line
from console.drawing import Line, Part, bytes_text, duration_text, line
from console.reading import text_of
from console.rows import Column, Row
from console.screens.base import FedScreen
from console.screens.history import HistoryScreen
from console.screens.tables import TablePane
from console.values import CoordinatorState, Release

EXPIRES_SOON_SECONDS = 300


def _state(row: Row) -> Part:
    word = text_of(row["state"])
    return word, "warn" if word == "held" else "dim"


def _text(name: str) -> Any:
    return lambda row: (text_of(row[name]), "")


COLUMNS = (
    Column("release", lambda row: (text_of(row["id"]), "strong"), 18, worth=0, grows=True),
    Column("kind", _text("kind"), 16, worth=2),
    Column("bytes", lambda row: (bytes_text(row["bytes"]), ""), 9, worth=3, right=True, order=lambda row: row["bytes"]),
    Column("state", _state, 8, worth=0),
    Column("later", lambda row: (row["later"], "dim"), 8, worth=1, right=True, order=lambda row: row["later_seconds"]),
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

    def panes(self) -> ComposeResult:
        yield TablePane(
            COLUMNS, lambda row: text_of(row.get("id")), title="Approvals",
            empty="releases that wait for an answer", makes="h opens those that were answered", id="releases",
        )  # fmt: skip

    @property
    def table(self) -> TablePane:
        return self.query_one(TablePane)

    def draw(self) -> None:
        fed = self.fed
        now = fed.snapshot.server_now(fed.now())
        if fed.snapshot.state is not None:
            self.table.take_rows([_held_row(release, now, fed.lock.person) for release in fed.snapshot.held])
        self.table.draw()

    def notices(self, cells: int) -> list[Line]:
        told = super().notices(cells)
        if isinstance(self.fed.snapshot.state, CoordinatorState):
            return [*told, line(("each silo's own people answer its releases, at the silo; none is shown here", "dim"))]
        return told

    def keys(self) -> Line:
        return line(" enter Open  n Next  / Filter  s Sort  h History  : Go to  ? Help  ctrl+q Quit")

    # ---- keys --------------------------------------------------------------------------------------

    def action_history(self) -> None:
        self.fed.open_below(HistoryScreen())

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        release = self.fed.snapshot.release(message.item.id)
        if release is not None:
            self.fed.open_release(release)

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


def _held_row(release: Release, now: float, person: str) -> dict[str, Any]:
    left, later = release.expires_at - now, release.deferred_until(person, now)
    return {
        "id": release.id, "kind": ", ".join(kind.kind for kind in release.kinds), "bytes": release.size_bytes,
        "state": release.state,
        # of the person who looks alone: what is exported as the release's state says nothing of it
        "later": duration_text(later - now) if later else "-", "later_seconds": later - now if later else 0.0,
        "given": f"{len(release.given)} of {release.needed}",
        "verdicts": " ".join(f"{release.count(name)} {name}" for name in ("ok", "look", "deny")),
        "held_since": release.held_since, "age": duration_text(now - release.held_since),
        "expires_at": release.expires_at, "ends": duration_text(left) if left > 0 else "EXPIRED",
        "soon": left < EXPIRES_SOON_SECONDS, "digest": release.digest,
    }  # fmt: skip

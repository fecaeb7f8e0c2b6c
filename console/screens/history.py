"""Releases that were ever held, newest first: who answered, when, on which bytes and under which policy.

All kinds, or one: beside a release that is held it shows what became of the ones like it. Nothing is answered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from textual.app import ComposeResult

from console.actions import Context, command_line
from console.drawing import Line, Part, bytes_text, line, wrap
from console.feed import Question
from console.reading import mapping, number, text_of, whole
from console.rows import Column, Row
from console.rule_words import reason_text
from console.screens.base import FedScreen
from console.screens.confirm import TextDialog
from console.screens.tables import TablePane
from console.values import HIDDEN, CoordinatorState

KEY = "history"
AT_A_COORDINATOR = (
    "releases are held and answered at each silo, by its own people; a coordinator is told of none. "
    "Look there: fedconsole or silo approvals list, on the silo's own machine"
)
_STYLES = {"held": "warn", "approved": "ok", "denied": "bad", "rejected": "bad"}


def _state(row: Row) -> Part:
    word = text_of(row.get("state"))
    return word, _STYLES.get(word, "dim")


def _answers(row: Row) -> list[Mapping[str, Any]]:
    told = row.get("answers")
    return [mapping(one) for one in told] if isinstance(told, list) else []


def _who(row: Row) -> Part:
    if "answers" not in row:
        return HIDDEN, "dim"
    # the code alone: what it means stands in the row when it is opened
    people = [" ".join(filter(None, (text_of(one.get("person")), _verb(one), _code(one)))) for one in _answers(row)]
    return ", ".join(people) or "nobody", ""


def _verb(answer: Mapping[str, Any]) -> str:
    return {"approve": "yes", "reject": "no"}.get(text_of(answer.get("verdict")), "?")


def _code(answer: Mapping[str, Any]) -> str:
    """The reason code of a no; a yes has none."""
    return text_of(answer.get("reason")) if _verb(answer) == "no" else ""


def _why(answer: Mapping[str, Any]) -> str:
    """The same with its words."""
    return f" {reason_text(code)}" if (code := _code(answer)) else ""


def _when(row: Row) -> Part:
    """Of the last answer."""
    answers = _answers(row)
    return (text_of(answers[-1].get("at")) if answers else "-" if "answers" in row else HIDDEN), "dim"


def _held_at(row: Row) -> str:
    seconds = number(row.get("held_since"))
    return datetime.fromtimestamp(min(max(seconds, 0.0), 253_402_300_799), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bytes(row: Row) -> str:
    return bytes_text(number(row.get("bytes"))) if "bytes" in row else HIDDEN


def _digest(row: Row, name: str) -> str:
    return text_of(row.get(name)) if name in row else HIDDEN


COLUMNS = (
    Column("release", lambda row: (text_of(row.get("id")), "strong"), 18, worth=0, grows=True),
    Column("kind", lambda row: (text_of(row.get("kind")), ""), 16, worth=3),
    Column("state", _state, 8, worth=0),
    Column("answers", _who, 16, worth=1, grows=True),
    Column("answered", _when, 20, worth=2),
    Column("held", lambda row: (_held_at(row), "dim"), 20, worth=6, order=lambda row: number(row.get("held_since"))),
    Column("bytes", lambda row: (_bytes(row), ""), 9, worth=7, right=True,
           order=lambda row: number(row.get("bytes"))),
    Column("digest", lambda row: (_digest(row, "digest")[:12], "accent"), 12, worth=4),
    Column("policy", lambda row: (_digest(row, "policy_digest")[:8], "dim"), 8, worth=5),
)  # fmt: skip


class HistoryScreen(FedScreen):
    """Args:
    kind: of message; empty for all.
    """

    called = "history"

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self._kind = kind

    def panes(self) -> ComposeResult:
        yield TablePane(
            COLUMNS, lambda row: text_of(row.get("id")), title=f"Held before{f': {self._kind}' if self._kind else ''}",
            key=KEY, query=("approvals", {"kind": self._kind} if self._kind else {}), rows_in="releases",
            empty="releases that were held", makes="a policy that asks for approvals holds the first one",
        )  # fmt: skip

    @property
    def table(self) -> TablePane:
        return self.query_one(TablePane)

    @property
    def _at_a_coordinator(self) -> bool:
        return isinstance(self.fed.snapshot.state, CoordinatorState)

    def wants(self) -> Mapping[str, Question]:
        return {} if self._at_a_coordinator else self.table.wants()

    def draw(self) -> None:
        self.table.display = not self._at_a_coordinator
        self.table.take(self.fed.snapshot)
        self.table.draw()

    def notices(self, cells: int) -> list[Line]:
        told = super().notices(cells)
        return [*told, *wrap(AT_A_COORDINATOR, cells, "warn")] if self._at_a_coordinator else told

    def crumb(self) -> str:
        return "held before"

    def keys(self) -> Line:
        if self._at_a_coordinator:
            return line(" esc Back  : Go to  ? Help  ctrl+q Quit")
        return line(" enter Open  / Filter  s Sort  w Columns  esc Back  Y Twin  ? Help")

    # ---- keys --------------------------------------------------------------------------------------

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        release = self.fed.snapshot.release(message.item.id)
        if release is not None:
            self.fed.open_release(release)
            return
        row = message.item.row
        answers = list[Line]()
        for one in _answers(row):
            answers.append(
                line(
                    (f"{_verb(one):4}", "ok" if _verb(one) == "yes" else "bad"), text_of(one.get("person")),
                    (_why(one), "bad"), (f"  {text_of(one.get('at'))}", "dim"),
                )
            )  # fmt: skip
            if note := text_of(one.get("note")):
                answers += wrap(f'"{note}"', max(self.app.size.width * 96 // 100 - 6, 30), "bad")
        self.app.push_screen(
            TextDialog(
                "Held before",
                [
                    line((text_of(row.get("id")), "strong"), f" {text_of(row.get('kind'))} ", _state(row)),
                    line(("held ", "dim"), _held_at(row), f"  {_bytes(row)}"),
                    *(answers or [line(("nobody answered" if "answers" in row else f"answers {HIDDEN}", "dim"))]),
                    line(("needed ", "dim"), f"{whole(row.get('needed'))} yes"),
                    line(("digest ", "dim"), f"sha256:{_digest(row, 'digest')}"),
                    line(("policy ", "dim"), f"sha256:{_digest(row, 'policy_digest')}"),
                    line(("all of it ", "dim"), self.twin()),
                ],
            )
        )

    def _selected_id(self) -> str:
        item = self.table.selected()
        return item.id if item else ""

    def twin(self) -> str:
        if name := self._selected_id():
            return command_line(("silo", "approvals", "show", name))
        return command_line(("silo", "approvals", "history", *(("--kind", self._kind) if self._kind else ())))

    def context(self) -> Context:
        return replace(super().context(), release=self._selected_id())

    def inspected(self) -> Any:
        item = self.table.selected()
        return None if item is None else self.fed.snapshot.release(item.id) or item.row

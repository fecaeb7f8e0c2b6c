"""Screen 5: did anything else leave? Every outbound message with its verdict, whether it left, and the rule that
decided; `tab` shows what came in.

The counts are the daemon's, of its whole log. A filter such as `verdict:deny` is asked of the daemon as well, so that
one denied message among many thousands is found without reading those before it. Enter opens one decision: envelope,
transforms, and every rule with what it measured. A coordinator judges what comes in and not what it sends, so its
outbox has counts by round, kind and silo instead (`fedsilo.views.messages`). Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import command_line
from console.base import TALL_ROWS_MIN, FedScreen, Lines, ScrolledScreen
from console.table_screen import RowLines, TablePane, parse_filter
from fedsilo.control import answers
from fedsilo.views import messages
from fedsilo.views.lines import Line, line
from fedsilo.views.messages import (
    VERDICTS,
    brief_lines,
    columns_of,
    copied_digest,
    detail_lines,
    noun,
    summary_lines,
    why_line,
)
from fedsilo.views.state import CoordinatorState, Question, SiloState, Snapshot

DIRECTIONS = ("outbox", "inbox")
TITLES = {"outbox": "Outbox", "inbox": "Inbox"}
MAKES = "messages come with a run: fedsilo run submit; control messages are left out, c adds them"
BRIEF_ROWS_MAX = 6
ROW_NAME_SLASHES = 3  # run/round/kind/silo
PROGRAMS = ("silo", "coordinator")
NUMBER_DIGITS_MAX = 15
WIDE_CELLS_MIN = 136


class MessagePane(TablePane):
    """The rows of one direction.

    Args:
        direction: outbox or inbox, which is the query's name.
        program: whose they are: silo or coordinator.
    """

    def __init__(self, direction: str, program: str) -> None:
        at_coordinator = program == "coordinator"
        columns = (
            messages.SENT_COLUMNS
            if _counts(program, direction)
            else columns_of(direction, at_coordinator=at_coordinator)
        )
        super().__init__(
            columns, lambda row: str(row.seq), title=TITLES[direction], key=direction, query=(direction, {}),
            rows_of=lambda answer: answers.read(answers.MessagePage, answer).messages, empty=noun(direction),
            makes=MAKES, id=f"{program}-{direction}",
        )  # fmt: skip
        self.direction = direction
        self._program = program
        self._wide = False
        self._looked_at = ""  # the row where somebody put the cursor
        self._put_aside = ""  # where the cursor is only because that row does not pass the filter
        self._filtered_by = ""
        self._none_shown = False

    def ask_for(self, *, verdict: str, control: bool) -> bool:
        """Ask for these from now on; True when that is another question than before.

        Args:
            verdict: only these decisions; empty for all.
            control: allowed control messages too.
        """
        arguments = {**({"verdict": verdict} if verdict else {}), **({"control": True} if control else {})}
        if self.asked == (self.direction, arguments):
            return False
        # the question is part of the key, so that an answer to the one before is not taken for this one's
        key = " ".join([self.direction, *([verdict] if verdict else []), *(["control"] if control else [])])
        self._empty = noun(self.direction, verdict)
        self.ask_otherwise((self.direction, arguments), key=key)
        return True

    def fit(self, *, wide: bool) -> None:
        """The same columns, in the widths that a table of that room has."""
        if wide is self._wide or self._program == "coordinator":  # whose inbox has the silo's name instead
            return
        self._wide = wide
        self._columns = columns_of(self.direction, wide=wide)
        self.rows.columns = self._columns

    def take(self, snapshot: Snapshot) -> None:
        super().take(snapshot)
        # while a filter is typed, or its rows are awaited, that row may be gone for a moment; then the cursor goes back
        rows = self.rows
        changed = self._none_shown or rows.filter_text != self._filtered_by
        self._none_shown, self._filtered_by = not rows.shown, rows.filter_text
        if changed:
            self._put_aside = rows.cursor if self._looked_at and not rows.select(self._looked_at) else ""
        elif rows.cursor != self._put_aside:
            self._looked_at = rows.cursor if rows.moved else ""

    def verdict_asked(self) -> str:
        """The verdict that the filter names whole, for the daemon; empty when it names none."""
        terms = parse_filter(self.rows.filter_text, ["verdict"]).terms
        named = [term.text for term in terms if term.field and not term.excludes and term.text in VERDICTS]
        return named[0] if named else ""


class OutboxScreen(FedScreen):
    called = "outbox"
    CSS = "OutboxScreen { #summary, #why { padding: 0 1; } }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab,h,l", "direction", show=False),
        Binding("c", "control", show=False),
        Binding("y", "copy_digest", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._direction = DIRECTIONS[0]
        self._control = False
        self._drawn_for = ""

    def panes(self) -> ComposeResult:
        yield Lines(id="summary")
        for program in PROGRAMS:
            for direction in DIRECTIONS:
                yield MessagePane(direction, program)
        yield Lines(id="brief", classes="box")
        yield Lines(id="why")

    @property
    def table(self) -> MessagePane:
        """Return the pane that is shown."""
        return self.query_one(f"#{self._program}-{self._direction}", MessagePane)

    @property
    def _program(self) -> str:
        return "coordinator" if isinstance(self.fed.snapshot.state, CoordinatorState) else "silo"

    @property
    def _counts(self) -> bool:
        return _counts(self._program, self._direction)

    def wants(self) -> Mapping[str, Question]:
        if not self.is_mounted:
            return {}
        wanted = dict(self.table.wants())
        item = self.table.selected()
        if item is not None and self._brief_fits and wanted:
            wanted[_one(self._direction, item.id)] = (self._direction, {"seq": item.row.seq})
        return wanted

    @property
    def _brief_fits(self) -> bool:
        return self.app.size.height >= TALL_ROWS_MIN

    # ---- drawing -----------------------------------------------------------------------------------

    def draw(self) -> None:
        fed, table = self.fed, self.table
        summary = self.query_one("#summary", Lines)
        if not table.display or self._program != self._drawn_for:
            self._drawn_for = self._program
            for pane in self.query(MessagePane):
                pane.display = pane is table
            table.query_one(RowLines).focus()
        if table.frozen_at is None and table.ask_for(verdict=self._verdict(), control=self._control):
            self.opened_at = fed.now()
        table.fit(wide=self.app.size.width >= WIDE_CELLS_MIN)
        table.take(fed.snapshot)
        state, key = fed.snapshot.state, table.key_asked
        answer = self.answer_as(answers.MessagePage, key) if key in fed.snapshot.answers else None
        left_bytes = sum(each.bytes for each in state.left) if isinstance(state, SiloState) else None
        cells = self.app.size.width - 2
        summary_of_page = (
            messages.sent_summary_lines(answer, cells, control=self._control)
            if self._counts
            else summary_lines(self._direction, answer, left_bytes, cells, control=self._control)
        )
        summary.draw(summary_of_page, greyed=self.greyed)
        self._draw_brief(cells - 2)
        table.draw()

    def _draw_brief(self, cells: int) -> None:
        item = self.table.selected()
        self.query_one("#brief").display = item is not None and self._brief_fits
        why = self.query_one("#why", Lines)
        why.display = item is not None and not self._brief_fits and not self._counts
        if item is not None and why.display:
            why.draw([why_line(item.row, cells, self.fed.glyphs.more)], greyed=self.greyed)
        if item is None or not self._brief_fits:
            return
        key, twin = _one(self._direction, item.id), self.twin()
        if self._counts:
            rows = messages.sent_lines(item.row, self.answer_as(answers.SentInFull, key), twin, cells - 2)
        else:
            rows = brief_lines(self._direction, item.row, self.answer_as(answers.DecisionInFull, key), twin, cells - 2)
        if len(rows) > BRIEF_ROWS_MAX:
            rows = [*rows[: BRIEF_ROWS_MAX - 1], line(("enter shows the rest", "dim"))]
        # always as high, so that the rows above stay where they are while the cursor moves
        rows += [line()] * (BRIEF_ROWS_MAX - len(rows))
        title = item.id if self._counts else f"Record {item.id}: {item.row.kind}"
        self.box("#brief", title, rows, greyed=self.greyed)

    def keys(self) -> Line:
        other = "In" if self._direction == "outbox" else "Out"
        return line(f" enter Open  tab {other}  / Filter  c Control  s Sort  Y Twin  ? Help  ctrl+q Quit")

    # ---- keys --------------------------------------------------------------------------------------

    def _verdict(self) -> str:
        return "" if self._counts else self.table.verdict_asked()

    def action_direction(self) -> None:
        if self._maximised is not None:
            self.maximise_pane(self._maximised)
        self._direction = DIRECTIONS[1 - DIRECTIONS.index(self._direction)]
        self.opened_at = self.fed.now()
        self.fed.came_on()
        self.redraw()

    def action_control(self) -> None:
        if self.table.frozen_at is not None:
            self.fed.say("the rows are frozen: space goes on")
            return
        self._control = not self._control
        self.redraw()

    def action_copy_digest(self) -> None:
        item = self.table.selected()
        digest = copied_digest(item.row.digest, keyed=item.row.digest_keyed) if item is not None else ""
        if digest:
            self.fed.copy(digest)
        else:
            self.fed.say("there is no digest to copy")

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        self._open(message.item.id, message.item.row)

    def _open(self, seq: str, row: answers.MessageRow) -> None:
        self.fed.open_below(MessageScreen(self._direction, seq, row, program=self._program))

    @property
    def numbers(self) -> str:
        return "" if self._counts else f"{self._direction} record"

    def go_to(self, text: str) -> None:
        """`:outbox 118` opens that record, as `:118` here; `:inbox` shows what came in; `:outbox verdict:deny` filters;
        at a coordinator `:outbox` takes the name of a row, such as run-1/2/round.open/hospital_a."""
        first, _, rest = text.partition(" ")
        if first == DIRECTIONS[1]:
            if self._direction != first:
                self.action_direction()
            if rest:
                self.go_to(rest.strip())
            return
        if text.isdecimal() and len(text) > NUMBER_DIGITS_MAX:
            self.fed.say("no record has a number of that length")
        elif self._counts and text.count("/") >= ROW_NAME_SLASHES:
            self._open(text, answers.filled(answers.MessageRow, seq=text))
        elif text.isdecimal() and text.isascii() and not self._counts:
            self._open(text, answers.filled(answers.MessageRow, seq=int(text)))
        else:
            self.table.filter(text)

    def twin(self) -> str:
        table = self.table
        item = table.selected()
        if item is not None:
            return _show_command(self._program, self._direction, item.id)
        verdict = self._verdict()
        more = (*(("--verdict", verdict) if verdict else ()), *(("--control",) if self._control else ()))
        return command_line((self._program, self._direction, "list", *more))

    def inspected(self) -> Any:
        item = self.table.selected()
        if item is None:
            return None
        answer = self.fed.snapshot.answers.get(_one(self._direction, item.id))
        return answers.to_json(item.row) if answer is None else answer


class MessageScreen(ScrolledScreen):
    """One decision.

    Args:
        direction: outbox or inbox.
        seq: number of its audit record, as text.
        row: of the table it was opened from.
        program: whose commands tell the same: silo or coordinator.
    """

    called = "message"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy_digest", show=False)]
    own_keys = " esc Back  i JSON  y Digest  Y Twin  ? Help"

    def __init__(self, direction: str, seq: str, row: answers.MessageRow, *, program: str = "silo") -> None:
        super().__init__()
        self._direction, self._seq, self._row, self._program = direction, seq, row, program
        self._key, self._counts = _one(direction, seq), _counts(program, direction)

    def wants(self) -> Mapping[str, Question]:
        return {self._key: (self._direction, {"seq": self._row.seq})}

    def lines(self, cells: int) -> list[Line]:
        there = self._key in self.fed.snapshot.answers
        rows = self.awaited_lines(self._key, cells, there=there)
        if not there:
            return rows
        if self._counts:
            sent = self.answer_as(answers.SentInFull, self._key)
            return [*rows, *messages.sent_lines(self._row, sent, self.twin(), cells)]
        answer = self.answer_as(answers.DecisionInFull, self._key)
        return [*rows, *detail_lines(self._direction, answer, self.twin(), cells, party=self._program)]

    def crumb(self) -> str:
        return self._seq if self._counts else f"record {self._seq}"

    def action_copy_digest(self) -> None:
        payload = answers.read(answers.AuditRecord, self.answer_as(answers.DecisionInFull, self._key).message).payload
        if digest := copied_digest(payload.digest, keyed=payload.keyed):
            self.fed.copy(digest)
        else:
            self.fed.say("there is no digest to copy")

    def twin(self) -> str:
        return _show_command(self._program, self._direction, self._seq)

    def inspected(self) -> Any:
        return self.fed.snapshot.answers.get(self._key)


def _counts(program: str, direction: str) -> bool:
    """Return True if rows count what a coordinator sent, and are not decisions."""
    return program == "coordinator" and direction == DIRECTIONS[0]


def _one(direction: str, seq: str) -> str:
    return f"{direction} record {seq}"


def _show_command(program: str, direction: str, seq: str) -> str:
    return command_line((program, direction, "show", seq))

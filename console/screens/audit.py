"""Screen 6: the audit log, newest first, and what the daemon says of its chain.

`v` has the daemon read its whole log again; that changes nothing, so the key is in lower case. Allowed control
messages, which parties send all the time, are left out as in the outbox, and `c` adds them. However long the log, the
rows that are kept are bounded (`ROWS_MAX`); `:N`, or `:audit N` from elsewhere, goes to a record by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import command_line, json_lines
from console.base import Lines
from console.table_screen import FilterLine, RowLines, Rows, Subject, TablePane, TableScreen, parse_filter
from fedsilo.control.answers import AuditStatus, RecordPage
from fedsilo.views import audit
from fedsilo.views.audit import COLUMNS, CONTROL, CONTROL_NAMES
from fedsilo.views.conditions import ADDS_CONTROL
from fedsilo.views.lines import Line, line, wrap
from fedsilo.views.state import Question, text_of


@dataclass(frozen=True)
class Asked:
    """A filter in two parts.

    Args:
        event: the beginning of an event's name, for the daemon.
        text: what stands anywhere in a record, for the daemon.
        rest: words that this console compares with the columns itself.
    """

    event: str = ""
    text: str = ""
    rest: str = ""


def asked_of(typed: str) -> Asked:
    """Parse what was typed after `/`. The daemon searches the whole log for one event and one text, so that nobody has
    to fetch records that do not match; `field:value` of another column, `!not` and further words are compared here. A
    star at the end of an event's name is not needed, since the beginning of a name matches."""
    event, text, rest = "", "", []
    names = {column.name for column in COLUMNS}
    for word in typed.split():
        name, colon, value = word.partition(":")
        if name.lower() == "event" and colon and not event and (prefix := value.rstrip("*").lower()):
            event = prefix
        elif name.lower() == "event" and colon and not value.rstrip("*"):
            continue  # any event
        elif not text and not word.startswith("!") and not (colon and name.lower() in names):
            text = word
        else:
            rest.append(word)
    return Asked(event, text, " ".join(rest))


def question_of(typed: str, *, control: bool) -> Question:
    """The query of a filter.

    Args:
        typed: after `/`.
        control: allowed control messages too.
    """
    asked = asked_of(typed)
    arguments: dict[str, Any] = {name: value for name, value in (("event", asked.event), ("text", asked.text)) if value}
    return "audit", arguments if control else {**arguments, "control": False}


def seeks_control(typed: str) -> bool:
    """Tell whether a filter names polls or other control messages. A record of a poll has its rules in it, which no
    column shows: `/approval` would find every one of them."""
    words = [word.lower().rpartition(":")[2].rstrip("*") for word in typed.split() if not word.startswith("!")]
    return any(word.startswith(CONTROL) or word in CONTROL_NAMES for word in words)


class ChainRows(Rows):
    """Rows of a log: a filter's first event and text are the daemon's to compare."""

    def filter(self, text: str) -> None:
        self.filter_text = text
        self._filter = parse_filter(asked_of(text).rest, [column.name for column in self.columns])
        self._settle()


STATUS = "audit.status"
VERIFY = "audit.verify"
TALL_ROWS_MIN = 30  # below that the rows are worth more than what the screen does not show
LIMITS_OF_IT = "the daemon's own word; fedsilo audit verify with the logs of all parties depends on no daemon"


class ChainPane(TablePane):
    """The table of records, whose filter the daemon helps with."""

    def __init__(self) -> None:
        super().__init__(COLUMNS, lambda row: text_of(row.seq), title="Audit log", rows_of=audit.record_rows)
        self.rows = ChainRows(COLUMNS, self.rows.id_of)
        self.program = "silo"  # whose log it is
        self.control_chosen: bool | None = None  # by somebody; until then the filter says it
        self.ask_for()

    @property
    def control(self) -> bool:
        """Return True if control messages that were allowed are shown too."""
        return seeks_control(self.rows.filter_text) if self.control_chosen is None else self.control_chosen

    def ask_for(self) -> None:
        """Ask for the records of the filter."""
        question = question_of(self.rows.filter_text, control=self.control)
        if question != self.asked:
            self.frozen_at = None  # the daemon filters, so other rows come than those that were frozen
        arguments = [f"{name} {value}" for name, value in question[1].items() if name != "control"]
        # the question is part of the key, so that an answer to the one before is not taken for this one's
        self.ask_otherwise(question, key=" ".join(["audit", *arguments, *(["control"] if _is_whole(question) else [])]))

    def ask_otherwise(self, query: Question, *, key: str = "") -> None:
        super().ask_otherwise(query, key=key)
        if set(query[1]) - {"control"}:
            # nothing of that may be there after a look through the whole log, which no command makes
            self._empty, self._makes = "such records", "esc clears the filter"
        elif self.control:
            self._empty, self._makes = "records", f"{self.program} start"
        else:
            self._empty, self._makes = "records but of control messages", f"{self.program} start; {ADDS_CONTROL}"

    def draw(self) -> None:
        super().draw()
        rows = self.rows
        if self.is_mounted and rows.arrived and not rows.kept and rows.filter_text and rows.next is None:
            size = self.fed_screen.answer_as(RecordPage, self.key_asked).size
            lines = audit.none_passes_lines(size, self.query_one(RowLines).size.width, control=self.control)
            self.query_one(RowLines).draw(lines, greyed=self.fed_screen.greyed)

    def clear_filter(self) -> None:
        self.rows.filter("")
        self.ask_for()
        self.query_one(FilterLine).value = ""
        self.close_filter()


def _is_whole(question: Question) -> bool:
    """Tell whether a question to the audit log asks for allowed control messages, too."""
    return question[1].get("control") is not False


class AuditScreen(TableScreen):
    called = "audit"
    subject = Subject(
        COLUMNS, lambda row: text_of(row.seq), title="Audit log", one="Record",
        keys=" enter Open  v Verify  / Filter  c Control  : Go to  ? Help  ctrl+q Quit",
    )  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "verify", show=False),
        Binding("c", "control", show=False),
    ]
    CSS = "AuditScreen #why { padding: 0 2; }"

    def __init__(self) -> None:
        super().__init__()
        self._asks_to_verify = 0  # the number of the question, while the daemon has not answered; else 0
        self._times_asked = 0
        self._sought: int | None = None  # a record that `:audit N` asked for
        self._control_before: bool | None = None  # the choice before that, which leaving it brings back

    def panes(self) -> ComposeResult:
        yield Lines(id="break")
        yield from super().panes()
        yield Lines(id="why")

    def make_table(self) -> ChainPane:
        return ChainPane()

    @property
    def table(self) -> ChainPane:
        return self.query_one(ChainPane)

    @property
    def status(self) -> AuditStatus | None:
        """Return the state of the daemon's log; None before it was read."""
        return self.answer_as(AuditStatus, STATUS) if STATUS in self.fed.snapshot.answers else None

    @property
    def _verify_key(self) -> str:
        return f"{VERIFY} {self._asks_to_verify}"

    def wants(self) -> Mapping[str, Question]:
        if not self.is_mounted:
            return {}
        wanted: dict[str, Question] = {STATUS: (STATUS, {}), **self.table.wants()}
        if self._asks_to_verify:
            wanted[self._verify_key] = (VERIFY, {})
        return wanted

    def draw(self) -> None:
        fed = self.fed
        self._take_verification()
        self.table.program = "coordinator" if self.at_a_coordinator else "silo"
        self.table.ask_for()
        self.table.take(fed.snapshot)
        width, status = self.app.size.width, self.status
        broken = audit.break_line(status, width, fed.glyphs) if status is not None else []
        breaks, head = self.query_one("#break", Lines), self.query_one("#head", Lines)
        breaks.display = bool(broken)
        breaks.draw(broken)
        head.draw(self._head(status, width - 4), greyed=self.greyed)
        item = self.table.selected()
        why = [audit.why_line(item.row, width - 4, fed.glyphs.more)] if item is not None else []
        self.query_one("#why", Lines).draw(why, greyed=self.greyed)
        self.table.draw()

    def _head(self, status: AuditStatus | None, cells: int) -> list[Line]:
        fed, rows = self.fed, self.table.rows
        lines = audit.head_lines(
            status, self.daemon_now, cells, fed.glyphs, control=self.table.control,
            at_coordinator=self.at_a_coordinator,
        )  # fmt: skip
        if status is not None and self.app.size.height >= TALL_ROWS_MIN:
            lines += wrap(LIMITS_OF_IT, cells, "dim")
        if self._asks_to_verify:
            lines += [line(("asked the daemon to verify", "accent"))]
        if self._sought is not None and rows.arrived and rows.newer:
            first = rows.shown[0].row.seq if rows.shown else None
            if first != self._sought:
                text = f"record {self._sought} is not kept any more; below is the next older one that is"
                lines += wrap(text if rows.shown else f"record {self._sought} and older ones are not kept any more; g "
                              "goes to the newest", cells, "warn")  # fmt: skip
        return lines

    def _take_verification(self) -> None:
        """The daemon began, or did not: it is not asked again."""
        snapshot = self.fed.snapshot
        if not self._asks_to_verify:
            return
        if self._verify_key in snapshot.refused:
            code, text = snapshot.refused[self._verify_key]
            self._asks_to_verify = 0
            self.app.call_later(self.fed.say, f"not verified: {text} [{code}]")
        elif self._verify_key in snapshot.answers:
            self._asks_to_verify = 0
        elif snapshot.link.state == "disconnected":
            self._asks_to_verify = 0
            self.app.call_later(self.fed.say, "not verified: the daemon cannot be reached; r tries again")

    # ---- keys --------------------------------------------------------------------------------------

    def action_verify(self) -> None:
        if self._asks_to_verify or (self.status is not None and self.status.verifying):
            self.fed.say("a verification is going on")
        else:
            self._times_asked += 1
            self._asks_to_verify = self._times_asked
            self.redraw()

    def action_control(self) -> None:
        if self.table.frozen_at is not None:
            self.fed.say("the rows are frozen: space goes on")
            return
        self.table.control_chosen = not self.table.control
        self.table.ask_for()
        self.redraw()

    @property
    def numbers(self) -> str:
        return "record"

    def go_to(self, text: str) -> None:
        """`:audit N`: the record of that number."""
        answer = self.answer_as(RecordPage, self.table.key_asked)
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            self.fed.say("audit takes the number of a record after its name, such as :audit 1200")
            return
        seq = int(text)
        if "size" not in answer.absent and seq >= answer.size:
            self.fed.say(f"the log has {answer.size:,} records, the newest is {answer.size - 1}")
            return
        if self._sought is None:
            self._control_before = self.table.control_chosen
        self.table.control_chosen = True  # it may be one of those that are left out
        if self.table.rows.filter_text:
            self.table.clear_filter()
        self.table.ask_for()
        self._sought = seq
        if self.table.rows.select(str(seq)):
            self.redraw()
        else:
            self.table.go_before(seq + 1)

    def action_leave(self) -> None:
        """Out of a record that was gone to back to the newest ones, and only then out of the place."""
        if self._sought is None or self._maximised is not None:
            super().action_leave()
            return
        self._sought, self.table.control_chosen = None, self._control_before
        self.table.action_newest()

    def whole_lines(self, row: audit.ShownRecord, cells: int) -> list[Line]:
        return audit.record_lines(row, self.twin(), json_lines(row.json, cells), cells)

    def on_table_pane_moved(self) -> None:
        """Somebody went on: what was sought is not what is looked at."""
        if not self.table.rows.newer:
            self._sought = None

    def twin(self) -> str:
        item = self.table.selected() if self.is_mounted else None
        here = self.at_a_coordinator
        if item is not None and item.id.isdigit():
            return command_line(audit.show_twin(item.id, at_coordinator=here))
        control = self.is_mounted and self.table.control
        return command_line(audit.list_twin(control=control, at_coordinator=here))

    def inspected(self) -> Any:
        item = self.table.selected()
        return item.row.json if item else None

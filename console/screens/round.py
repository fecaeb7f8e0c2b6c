"""Screen 2: one round, a strip of phases for each silo, quorum and deadlines, and what the round is about.

`[` and `]` go to the round before and after; `c` sets the round before beside this one. At a silo its own phases are
shown, and of the others what the coordinator tells all. Starting and aborting a run are orders with dialogs of their
own; no key here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from console.actions import command_line
from console.base import Lines, TextDialog
from console.dialogs import OrderingScreen
from console.table_screen import RowLines, TablePane
from fedsilo.control.answers import Round, SiloInRound, to_json
from fedsilo.views import conditions, rounds
from fedsilo.views.lines import Line, line, safe, wrap
from fedsilo.views.state import Question

FACT_ROWS_MIN = 30  # below that, parameters and digests are a key away (p)


TABLE_ROWS_MORE = 4  # frame, header, and a line for a filter or a notice


class RoundScreen(OrderingScreen):
    called = "round"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left_square_bracket", "earlier", show=False),
        Binding("right_square_bracket", "later", show=False),
        Binding("c", "compare", show=False),
        Binding("p", "facts", show=False),
    ]
    CSS = """
    RoundScreen {
        #head { padding: 0 2; }
        #silos { height: 1fr; }
        #scale, #facts { padding: 0 2; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._run = ""
        self._number: int | None = None  # None: the newest
        self._asked_for_a_run = False
        self._compare = False
        self._shown: tuple[str, int | None, bool] = "", None, False  # the last that an answer was seen of

    def panes(self) -> ComposeResult:
        yield Lines(id="head")
        yield TablePane(
            rounds.COLUMNS, lambda row: row.silo, title="Silos", empty="silos in this run",
            makes="fedsilo run submit run.yaml", id="silos",
        )  # fmt: skip
        yield Lines(id="scale")
        yield Lines(id="facts")

    @property
    def table(self) -> TablePane:
        return self.query_one("#silos", TablePane)

    @property
    def key(self) -> str:
        """Return the answer's key, which includes what it is about so that no other answer is taken for it."""
        return f"round {self._run or 'newest'} {self._number or 'newest'}"

    @property
    def answer(self) -> Round:
        """The round that is looked at; without a party until it has come."""
        return self.answer_as(Round, self.key)

    @property
    def before(self) -> Round | None:
        """The round before, while it is compared; without a party until it has come."""
        if not self._compare or self._before_number is None:
            return None
        return self.answer_as(Round, self._before_key)

    @property
    def _before_number(self) -> int | None:
        return rounds.neighbours(self.answer)[0]

    @property
    def _before_key(self) -> str:
        return f"round {self.answer.run} {self._before_number}"

    def wants(self) -> Mapping[str, Question]:
        if not self.is_mounted or self.fed.snapshot.state is None:
            return {}
        asked: dict[str, Any] = {"run": self._run} if self._run else {}
        wanted: dict[str, Question] = {
            self.key: (rounds.QUERY, asked | ({"round": self._number} if self._number else {}))
        }
        if self._compare and self._before_number is not None:
            wanted[self._before_key] = (rounds.QUERY, {"run": self.answer.run, "round": self._before_number})
        return wanted

    # ---- drawing -----------------------------------------------------------------------------------

    def draw(self) -> None:
        fed, answer, known = self.fed, self.answer, bool(self.answer.party)
        if known:
            self._shown = self._run, self._number, self._asked_for_a_run
        cells, tall = self.app.size.width - 4, self.app.size.height >= FACT_ROWS_MIN
        head, facts = self.query_one("#head", Lines), self.query_one("#facts", Lines)
        scale = self.query_one("#scale", Lines)
        lines = conditions.answer_lines(fed.snapshot, self.key, fed.now(), cells, opened_at=self.opened_at)
        missing = not known and self.key in fed.snapshot.refused
        if missing and fed.snapshot.refused[self.key][0].startswith("NOT_FOUND"):
            lines = conditions.empty_lines(f"rounds: {fed.snapshot.refused[self.key][1]}", self._makes, cells)
        nothing = answer.state == "no run yet"
        if nothing:
            lines += conditions.empty_lines("runs", self._makes, cells)
        lines += self._not_newest_lines(answer, cells)
        if not nothing:
            lines += rounds.head_lines(answer, self.before, cells, fed.glyphs)
        if answer.silos and tall:
            lines += rounds.rounds_line(answer, cells, fed.glyphs)
        head.draw(lines, greyed=self.greyed)
        self._draw_table(answer, cells)
        scale.display = bool(answer.round)
        if answer.round:
            ascii_only, turn = fed.ascii_only, self.table.rows.turn
            line_of_times = rounds.scale_line(answer, self._columns, cells, turn, ascii_only=ascii_only)
            legend = rounds.legend_lines(answer, cells, ascii_only=ascii_only)
            scale.draw([line_of_times, *legend], greyed=self.greyed)
        facts.display = tall and bool(answer.silos)
        shown = rounds.fact_lines(answer, cells)
        facts.draw(shown if self.app.size.height >= FACT_ROWS_MIN + 6 else shown[:4], greyed=self.greyed)
        self.table.display = not (missing or nothing or conditions.is_lost(fed.snapshot, self.key))

    def _not_newest_lines(self, answer: Round, cells: int) -> list[Line]:
        """Return that there is a newer round than the one that somebody went to: it stays on that one, however long."""
        shown, newest = answer.round, rounds.newest(answer)
        if self._number is None or not shown or newest <= shown:
            return []
        of = f" of {newest}" if newest > shown + 1 else ""
        return wrap(f"not the newest: ] goes on to round {shown + 1}{of}", cells, "warn")

    @property
    def _makes(self) -> str:
        where = "" if self.at_a_coordinator else "  at the coordinator"
        return f"fedsilo run submit run.yaml{where}"

    @property
    def _columns(self) -> Any:
        return rounds.COMPARED if self.before is not None else rounds.COLUMNS

    def _draw_table(self, answer: Round, cells: int) -> None:
        table, fed = self.table, self.fed
        if table.rows.columns != self._columns:
            table.rows.columns = self._columns
        if answer.party:
            _, width = rounds.strip_span(self._columns, cells, table.rows.turn)
            rows = rounds.silo_rows(answer, self.before, width, fed.glyphs, ascii_only=fed.ascii_only)
            table.take_rows(rows)
            # no higher than its rows, so that scale and legend stand below the strips
            table.styles.max_height = len(rows) + TABLE_ROWS_MORE
        table.draw()

    # ---- keys --------------------------------------------------------------------------------------

    def action_earlier(self) -> None:
        self._go(rounds.neighbours(self.answer)[0], "this is the first round that is listed")

    def action_later(self) -> None:
        self._go(rounds.neighbours(self.answer)[1], "this is the newest round")

    def _go(self, number: int | None, none: str) -> None:
        here = self._run, self._number, self._asked_for_a_run
        if not self.answer.party and here != self._shown and conditions.is_lost(self.fed.snapshot, self.key):
            self._run, self._number, self._asked_for_a_run = self._shown  # nothing will come here: back
            self.redraw()
            return
        if number is None:
            self.fed.say(none if self.answer.party else "not loaded yet")
            return
        self._run = self.answer.run
        self._number = number if number != rounds.newest(self.answer) else None
        if self._number is None:
            self._run = self._run if self._asked_for_a_run else ""
        self.redraw()

    def action_compare(self) -> None:
        if not self._compare and self._before_number is None:
            self.fed.say("there is no round before this one to compare with")
            return
        self._compare = not self._compare
        self.redraw()

    def action_facts(self) -> None:
        cells = self.dialog_cells
        if self.answer.party:
            facts = rounds.fact_lines(self.answer, cells, whole_digests=True)
            self.app.push_screen(TextDialog("What this round is about", facts))

    def go_to(self, text: str) -> None:
        """`:round 13`, or `:round RUN` for the newest of another run."""
        wanted = text.strip()
        if wanted.isascii() and wanted.isdigit() and len(wanted) <= 9 and int(wanted):
            self._run, self._number = self.answer.run, int(wanted)
        elif wanted and wanted.isprintable() and len(wanted) <= 64:
            self._run, self._number, self._asked_for_a_run = wanted, None, True
        else:
            self.fed.say("round takes a number or the name of a run, such as :round 13")
        self.redraw()

    def on_mount(self) -> None:
        super().on_mount()
        self.table.query_one(RowLines).focus()

    def on_table_pane_opened(self, message: TablePane.Opened) -> None:
        cells = self.dialog_cells
        row = message.item.row
        lines = rounds.silo_text(row, self.answer, self.before, cells)
        title = f"{safe(row.silo, 40)}, round {self.answer.round}"
        self.app.push_screen(TextDialog(title, [*lines, line(""), line(("as text ", "dim"), self.twin())]))

    def twin(self) -> str:
        run, number = self.answer.run, str(self.answer.round or "")
        if not self.at_a_coordinator:
            return super().twin()
        if not run:
            return command_line(("fedsilo", "run", "list"))
        return command_line(("fedsilo", "run", "show", run, *(("--round", number) if number else ())))

    def inspected(self) -> Any:
        item = self.table.selected()
        return to_json(item.row, SiloInRound) if item else self.fed.snapshot.answers.get(self.key)

    def keys(self) -> Line:
        return line(" [ ] Round  c Compare  enter Silo  p Digests  / Filter  ? Help  ctrl+q Quit")

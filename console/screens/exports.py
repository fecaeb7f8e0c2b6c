"""The dialog behind `e`: which file, in which form, and with what in it. It changes no daemon; the file is the
person's. The rows are written by a worker, so a slow disk stops no screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from console import export
from console.actions import PLACE_TWINS, command_line
from console.drawing import Line, line, wrap
from console.export import FORMS, LOCAL_WORD, Sheet, Taken
from console.reading import mapping
from console.screens.base import FedScreen, Lines
from console.screens.fields import HandTyped, TextLine
from console.values import CoordinatorState
from fedsilo.treaty.errors import FedSiloError, OperationError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from console.app import FedConsole
    from console.screens.tables import TablePane

PATH_CHARACTERS_MAX = 400
# Tables whose rows a screen makes from what every snapshot has: the query that tells the same, and the field of it.
MADE_OF = {"approvals": ("approvals", "releases")}
SMALL_ROWS = 28  # below it fields are drawn without a frame


def sheet_of(pane: TablePane) -> Sheet:
    """What a table holds now."""
    screen = pane.fed_screen
    snapshot = screen.fed.snapshot
    query, rows_in = pane.asked
    if not query[0] and screen.called in MADE_OF:
        name, rows_in = MADE_OF[screen.called]
        query = name, {}
    state = snapshot.state
    daemon = "" if state is None else (
        f"coordinator:{state.coordinator}" if isinstance(state, CoordinatorState) else f"silo:{state.silo}"
    )  # fmt: skip
    about: dict[str, Any] = {"daemon": daemon, "as_of": _moment(snapshot.server_now(screen.fed.now()))}
    status = mapping(snapshot.answers.get("audit.status"))
    if query[0] == "audit" and status:
        # the daemon's word on its checkpoint; the signed note itself is handed out by `fedsilo audit export`
        about |= {"checkpoint": status.get("checkpoint"), "verified_to": status.get("verified_to")}
    rows = pane.rows
    return Sheet(
        query[0] or pane.id or screen.called, [item.row for item in rows.shown], [item.row for item in rows.all_items],
        query, rows_in, rows.total, rows.filter_text, screen.twin(), _list_twin(screen, query), about,
    )  # fmt: skip


def _list_twin(screen: FedScreen, query: tuple[str, Mapping[str, Any]]) -> str:
    """The command that lists the table, with what was asked for and without the row under the cursor."""
    name, arguments = query
    kind = ("--kind", str(arguments["kind"])) if "kind" in arguments else ()
    if screen.called == "history":
        return command_line(("silo", "approvals", "history", *kind))
    list_of = PLACE_TWINS.get(screen.called)
    words = () if list_of is None else list_of(screen.context())
    if name in ("outbox", "inbox") and words:
        words = (words[0], name, "list", *kind, *(("--control",) if arguments.get("control") else ()))
    if name == "audit" and arguments.get("control") is not False:
        words = tuple(word for word in words if word != "--no-control")
    return command_line(words) if words else ""


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}" if seconds else ""


class PathLine(TextLine):
    """The file's path. Up and down change the form that its end says."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "form(-1)", show=False),
        Binding("down", "form(1)", show=False),
    ]

    def action_form(self, step: int) -> None:
        stem, dot, end = self.value.rpartition(".")
        known = dot and end.lower() in FORMS
        place = FORMS.index(end.lower()) + step if known else 0
        self.value = f"{stem if known else self.value}.{FORMS[place % len(FORMS)]}"
        self.cursor_position = len(self.value)


class ExportDialog(ModalScreen[None]):
    """Args:
    sheet: what would be written.
    """

    CSS = """
    ExportDialog {
        align: center middle;
        #box { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round $accent; background: $surface;
               padding: 0 1; border-title-color: $accent; }
        Input { height: 3; }
        &.-small Input { height: 1; border: none; }
        &.-ascii #box { border: ascii $accent; }
        &.-ascii Input { border: ascii $secondary; }
        &.-ascii.-small Input { border: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    def __init__(self, sheet: Sheet) -> None:
        super().__init__()
        self._sheet = sheet
        self._shared = export.released(sheet, export.PREVIEW_ROWS)
        self._refused: FedSiloError | None = None
        self._writing = False

    @property
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = self.fed.title_of(f"Export {self._sheet.name}")
            yield Lines(id="what")
            yield Lines(id="why")  # above the fields: on a low screen it would be cut off below them
            yield PathLine(id="path", placeholder="path of a new file", max_length=PATH_CHARACTERS_MAX)
            yield Lines(id="form")
            yield HandTyped(id="word", placeholder="empty: what was released", max_length=16)

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        self.query_one("#path").focus()
        self.call_after_refresh(self.redraw)

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    @property
    def _cells(self) -> int:
        return max(min(self.app.size.width, 76) - 4, 20)

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        cells, height = self._cells, self.app.size.height
        self.set_class(height < SMALL_ROWS, "-small")
        why = self._why(cells)
        self.query_one("#why", Lines).draw(why)
        typed = self.query_one("#path", Input).value
        here = typed.rpartition(".")[2].lower() if "." in typed else ""
        forms = [part for form in FORMS for part in ((" ", ""), (form, "strong" if form == here else "dim"))]
        form = [
            line("format, as the name ends:", *forms, ("  up, down", "dim")),  # in one row of a low screen
            *wrap(f"To write every column and row shown, type the word {LOCAL_WORD} here (Tab):", cells),
        ]  # fmt: skip
        self.query_one("#form", Lines).draw(form)
        room = height - len(why) - len(form) - (4 if height < SMALL_ROWS else 8)  # 2 of the frame, the rest of fields
        self.query_one("#what", Lines).draw(self._what(cells)[: max(room, 1)])

    def _what(self, cells: int) -> list[Line]:
        sheet, shared = self._sheet, self._shared
        total = max(sheet.total or 0, len(sheet.here))
        some = f" of {total:,}; the others were not asked for yet" if total > len(sheet.here) else ""
        rows = wrap(f"{len(sheet.here):,} rows are here{some}. The file is yours, on this machine.", cells)
        if shared.why_none:
            return [*rows, *wrap(f"Nothing to share: {shared.why_none}.", cells, "warn")]
        rows += wrap("Share-safe: only what the policy released already.", cells)
        if shared.left_out:
            rows += wrap(f"Left out: {', '.join(shared.left_out)}.", cells, "warn")[:3]
        if shared.rows_left_out:
            first = min(len(sheet.here), export.PREVIEW_ROWS)
            text = f"Left out: {shared.rows_left_out:,} of the first {first:,} rows, which were not released."
            rows += wrap(text, cells, "warn")
        if sheet.filter_text:
            rows += wrap("The filter counts only with the word: it may compare columns that are local.", cells, "dim")
        return rows

    def _why(self, cells: int) -> list[Line]:
        if self._writing:
            return [line(("writing…", "accent"))]
        if self._refused is not None:
            return wrap("; ".join(filter(None, (self._refused.message, self._refused.hint))), cells, "bad")
        return [line(("Enter writes, esc leaves", "dim"))]

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self._refused = None
        self.redraw()

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        if self._writing:
            return
        word = self.query_one("#word", Input).value
        try:
            path = export.path_of(self.query_one("#path", Input).value)
            if word and word != LOCAL_WORD:
                raise UsageError(f"the word is {LOCAL_WORD}, in capitals", hint="or leave it empty")
            if not self._sheet.here:
                raise UsageError("no row is here to be written", hint=f"as text: {self._sheet.twin} --json")
        except FedSiloError as error:
            self._refused = error
            self.redraw()
            return
        self._writing = True
        self.redraw()
        # a worker of the console, not of the dialog: leaving the dialog does not end it half way
        self.app.run_worker(
            partial(self._write, path, local=bool(word)), thread=True, group="export", exit_on_error=False
        )  # fmt: skip

    def _write(self, path: Path, *, local: bool) -> None:
        taken: Taken | None = None
        refused: FedSiloError | None = None
        try:
            taken = export.write_export(path, self._sheet, local=local)
        except FedSiloError as error:
            refused = error
        except Exception as error:  # noqa: BLE001  # else the dialog would say for ever that it writes
            refused = OperationError(
                f"a fault of FedSilo ended the writing ({type(error).__name__})", hint=f"look at what is in {path}"
            )
        self.app.call_from_thread(self._written, path, taken, refused, local=local)

    def _written(self, path: Path, taken: Taken | None, refused: FedSiloError | None, *, local: bool) -> None:
        self._writing, self._refused = False, refused
        if taken is None and self.is_attached:
            self.redraw()
            return
        if self.is_attached and self.app.screen is self:
            self.dismiss(None)
        told = export.done_text(path, taken, local=local) if taken is not None else f"not written: {refused}"
        self.fed.say(told)

    def action_cancel(self) -> None:
        self.dismiss(None)

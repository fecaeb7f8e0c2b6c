"""What all screens share: the frame around their own panes, content made only from safe parts, what they ask for, and
telling the app when they come on.

A screen is a subclass of `FedScreen` that yields its panes in `panes`, says in `wants` which queries it needs, and
fills the panes in `draw` from `self.fed.snapshot`. The frame draws by itself: top bar, tabs or crumbs, why what is
shown is not live, what concerns every screen (a certificate that ends, clocks that differ, a halt), and the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from console.actions import PLACES, Context, crumbs_line, tabs_line, title_of
from fedsilo.views import conditions, overview
from fedsilo.views.lines import Line, in_ascii, line, safe, width_of
from fedsilo.views.overview import needs_text, top_bar
from fedsilo.views.state import CoordinatorState, Question

if TYPE_CHECKING:
    from console.app import FedConsole

# Meaning -> theme colour. No screen names a colour.
STYLES = {
    "": "$foreground",
    "dim": "$muted",
    "strong": "bold $foreground",
    "accent": "$accent",
    "ok": "$success",
    "warn": "bold $warning",
    "bad": "bold $error",
    "gone": "$muted strike",
}
CELLS_MIN, ROWS_MIN = 60, 16
TALL_ROWS_MIN = 30
FIRST_SCREENS = 2  # Textual's own empty one, and a place


def is_too_small(size: Size) -> bool:
    """Nothing is drawn by halves: below this size there is one sentence."""
    return size.width < CELLS_MIN or size.height < ROWS_MIN


def content_of(lines: Iterable[Line], *, greyed: bool = False, ascii_only: bool = False) -> Content:
    """Lines as content. There is no markup anywhere: a text cannot style itself or bind an action."""
    parts: list[tuple[str, str]] = []
    for index, row in enumerate(lines):
        if index:
            parts.append(("\n", ""))
        for text, style in row:
            shown = in_ascii(safe(text)) if ascii_only else safe(text)
            parts.append((shown, STYLES["dim"] if greyed else STYLES[style]))
    return Content.assemble(*parts)


class Lines(Static):
    """A widget that draws lines and nothing else."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(Content(""), id=id, classes=classes, markup=False)
        self._drawn: tuple[tuple[Line, ...], bool, bool, int] | None = None

    def draw(self, lines: Iterable[Line], *, greyed: bool = False) -> None:
        ascii_only = bool(getattr(self.app, "ascii_only", False))
        wanted = tuple(map(tuple, lines)), greyed, ascii_only, self.size.width
        if wanted == self._drawn and self.size.height >= len(wanted[0]):
            # An update lays out the whole screen and writes the widget to the terminal, the same or not. One that was
            # drawn before it had its height is drawn again.
            return
        self._drawn = wanted
        self.update(content_of(wanted[0], greyed=greyed, ascii_only=ascii_only))


class FedScreen(Screen[None]):
    """A screen that redraws when a snapshot comes in, the clock ticks or the terminal changes size."""

    # A scroll bar's place is kept: text that wraps otherwise beside the bar may need it for that alone, and keep it so.
    DEFAULT_CSS = """
    FedScreen {
        background: $background;
        #bar, #tabs { height: 1; background: $panel; }
        #tabs { background: $surface; }
        #notice { padding: 0 1; }
        #frame { height: 1fr; }
        #footer { background: $panel; }
        &.-too-small #bar { height: auto; }
        VerticalScroll { padding: 0 0 0 1; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    }
    """
    # Textual declares both for instances, so they cannot be ClassVar
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-medium"), (140, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (TALL_ROWS_MIN, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", show=False)]
    called: ClassVar[str]  # its name in `console.actions.PLACES`, or that of a screen below one

    def __init__(self) -> None:
        super().__init__()
        self.opened_at = 0.0  # the console's monotonic clock
        self.room = 0  # rows between the frame's lines
        self._maximised: Widget | None = None
        self._hidden: list[Widget] = []

    @property
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    # ---- what a screen says of itself --------------------------------------------------------------

    def wants(self) -> Mapping[str, Question]:
        """Queries to ask while this screen is on top, by keys of its own. Answers: `self.fed.snapshot.answers[key]`."""
        return {}

    def panes(self) -> ComposeResult:
        """What stands between the frame's lines."""
        yield from ()

    def draw(self) -> None:
        """Fill the panes from `self.fed.snapshot`; called often, so it only draws."""

    def crumb(self) -> str:
        """What it is called on the way to it, such as a release's id; empty for a place of its own."""
        return ""

    def twin(self) -> str:
        """The command that tells the same."""
        return ""

    def inspected(self) -> Any:
        """The JSON value behind what is selected, for `i`; None when there is none."""
        return None

    def context(self) -> Context:
        """What the twins of its actions name."""
        coordinator = isinstance(self.fed.snapshot.state, CoordinatorState)
        return Context(coordinator=coordinator, person=self.fed.lock.person, place=self.called)

    def act(self, action: str) -> None:
        """A changing key of this screen stood alone: open its dialog, or say why not."""
        self.fed.say(f"{title_of(action)}: not on this screen")

    def action_offer(self, name: str) -> None:
        """A changing key was pressed; `act` follows when it stood alone."""
        self.fed.offer(name)

    def why_off(self, action: str) -> str:
        """Why an action cannot be done here now, for the help; nothing when it can."""
        return ""

    def go_to(self, text: str) -> None:
        """What was typed after its name in `:`, such as a record's number."""
        self.fed.say(f"{self.called} takes nothing after its name")

    @property
    def numbers(self) -> str:
        """What a number after `:` names here, such as "record"; empty where it names nothing."""
        return ""

    @property
    def tags(self) -> frozenset[str]:
        """What `console.actions` calls it."""
        tables, replay = any(pane.display for pane in self.query("TablePane")), self.fed.replays
        return frozenset({self.called, *(["table"] if tables else []), *(["replay"] if replay else [])})

    def keys(self) -> Line:
        """The footer: at most eight keys, most useful first."""
        return line(" : Go to  n Next  ? Help  ctrl+q Quit")

    # ---- the frame ---------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Lines(id="bar")
        yield Lines(id="tabs")
        yield Lines(id="notice")
        with Vertical(id="frame"):
            yield from self.panes()
        yield Lines(id="footer")

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        fed = self.fed
        width, height = self.app.size
        self.set_class(fed.ascii_only, "-ascii")
        frame, tabs, notice = self.query_one("#frame"), self.query_one("#tabs", Lines), self.query_one("#notice", Lines)
        frame.display = not self.too_small
        self.set_class(self.too_small, "-too-small")
        if self.too_small:
            self.query_one("#bar", Lines).draw([self.refusal()])
            tabs.display = notice.display = False
            self.query_one("#footer", Lines).draw([])
            return
        left = width - width_of(fed.banner)
        bar = (*fed.banner, *top_bar(fed.snapshot, fed.lock, fed.now(), left, fed.glyphs))
        self.query_one("#bar", Lines).draw([bar])
        way, shown, footer = self.way(width), self.notices(width - 2), self.footer(self.keys())
        tabs.display, notice.display = bool(way), bool(shown)
        tabs.draw([way])
        notice.draw(shown)
        self.query_one("#footer", Lines).draw(footer)
        self.room = height - 1 - bool(way) - len(shown) - len(footer)
        self._show_maximised(restore=True)
        self.draw()
        self._show_maximised()
        fed.ask()

    def way(self, cells: int) -> Line:
        """The places one can go to, or on a screen below them the way back; a low terminal has its rows for facts."""
        if self.crumb() and self.app.size.height < TALL_ROWS_MIN:
            return ()
        if crumb := self.crumb():
            return crumbs_line(self.fed.trail(), crumb, cells, self.fed.glyphs)
        return tabs_line(self.called, self.fed.snapshot, cells, self.fed.glyphs)

    def notices(self, cells: int) -> list[Line]:
        """Why what is shown is not live, and what concerns every screen."""
        fed = self.fed
        told = conditions.condition_lines(
            fed.snapshot, fed.now(), cells, opened_at=fed.opened_at, waits_for=fed.waits_for, below_at=self.below_at
        )
        return [*told, *overview.standing_lines(fed.snapshot, fed.now(), cells, fed.glyphs)[:2]]

    @property
    def below_at(self) -> float | None:
        """When what it shows was read, by the console's clock: the oldest of its answers, or the daemon's state where
        it asks for nothing; None when none of it was."""
        snapshot, wanted = self.fed.snapshot, self.wants()
        shown = [snapshot.answered_at[key] for key in wanted if key in snapshot.answered_at]
        shown += [at for pane in self.query("TablePane") if (at := getattr(pane, "frozen_at", None)) is not None]
        if wanted or shown:
            return min(shown, default=None)
        return snapshot.link.received_at if snapshot.state is not None else None

    @property
    def greyed(self) -> bool:
        """What is shown is not what the daemon says just now."""
        snapshot = self.fed.snapshot
        return snapshot.state is not None and (snapshot.link.state != "live" or snapshot.is_stale(self.fed.now()))

    def on_mount(self) -> None:
        self.opened_at = self.fed.now()
        self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()
        keep_covered(self.app)

    def on_screen_resume(self) -> None:
        self.fed.came_on()
        self.redraw()

    def action_leave(self) -> None:
        """One level up."""
        if self._maximised is not None:
            self.maximise_pane(self._maximised)
        elif len(self.app.screen_stack) > FIRST_SCREENS:
            self.app.pop_screen()
        elif self.called != PLACES[0].name:
            self.fed.action_go(PLACES[0].name)
        else:
            self.fed.say(f"this is the first screen: {self.fed.leaving}")

    def footer(self, keys: Line) -> list[Line]:
        """The message of the moment in place of the keys: there it covers no fact."""
        return self.fed.message_lines(self.app.size.width - 2) or [keys]

    @property
    def too_small(self) -> bool:
        return is_too_small(self.app.size)

    def refusal(self) -> Line:
        """What stands in place of everything on a terminal that is too small."""
        width, height = self.app.size
        needs = len(overview.needs_of(self.fed.snapshot, self.fed.now()))
        size = f"needs {CELLS_MIN}x{ROWS_MIN}, has {width}x{height}"
        return line(f"{size}; {needs_text(needs)}; as text: {self.twin()}")

    # ---- one pane alone ----------------------------------------------------------------------------

    def maximise_pane(self, pane: Widget) -> None:
        """One pane in place of all, and back. The frame stays: what needs a person is always in sight."""
        self._show_maximised(restore=True)
        self._maximised = None if self._maximised is pane else pane
        self.redraw()

    def _show_maximised(self, *, restore: bool = False) -> None:
        if restore:
            for widget in self._hidden:
                widget.display = True
            self._hidden = []
            return
        child, body = self._maximised, self.query_one("#frame")
        while child is not None and child is not body:
            parent = cast("Widget", child.parent)
            for sibling in parent.children:
                if sibling is not child and sibling.display:
                    sibling.display = False
                    self._hidden.append(sibling)
            child = parent


class TooSmall(ModalScreen[None]):
    """What covers a dialog on a terminal that is too small for it: a dialog whose facts are cut off is not to be
    answered, so no key reaches it. It stands there as it was once there is room again."""

    CSS = """
    TooSmall {
        background: $background;
        #refusal { height: auto; background: $panel; }
    }
    """

    def compose(self) -> ComposeResult:
        yield Lines(id="refusal")

    def redraw(self) -> None:
        if self.is_mounted:
            self.query_one("#refusal", Lines).draw([cast("FedConsole", self.app).top.refusal()])

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()


def keep_covered(app: App[Any], *_: object) -> None:
    """Cover a dialog that has no room, and uncover it when it has; called whenever the size or the screen changes."""
    top, small = app.screen, is_too_small(app.size)
    if isinstance(top, TooSmall) and not small:
        app.pop_screen()
    elif isinstance(top, ModalScreen) and not isinstance(top, TooSmall) and small:
        app.push_screen(TooSmall())

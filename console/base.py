"""Base classes of all screens: the app as they know it, the frame around their panes, content made only of safe parts.

`Console` shows one daemon's snapshots and asks people before anything is signed. It holds no state of its own. A reader
thread posts frozen snapshots (`Arrived`); screens only draw the last one, and the one on top says what else the reader
shall ask (`FedScreen.wants`). Lower-case keys never change anything. Upper-case keys are offered to the `KeyGate`
first, then open a dialog; the answer is signed in a worker thread with the person's own key, and the daemon checks all
of it again.

A screen is a subclass of `FedScreen` that yields its panes in `panes`, says in `wants` which queries it needs, and
fills the panes in `draw` from `self.fed.snapshot`. The frame draws by itself: top bar, tabs or crumbs, why what is
shown is not live, what concerns every screen (a certificate that ends, clocks that differ, a halt), and the keys.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Input, Static

from console.actions import (
    PLACES,
    SCREEN_TWINS,
    Action,
    Context,
    Entry,
    History,
    command_line,
    crumbs_line,
    tabs_line,
    title_of,
)
from console.feed import Feed, Person, Signer, Source, boot_seconds
from console.lock import BURST, BURST_SECONDS, KeyFiles, KeyGate, Outcome, Signing
from console.orders import Order
from console.recording import NEVER_RECORDED, Replay
from console.terminal import LetsThrough, forget_pinned_size, run_to_the_end
from console.theme import THEMES, draw_without_colour
from fedsilo.control import answers
from fedsilo.views import conditions, overview
from fedsilo.views.lines import ASCII, UNICODE, Glyphs, Line, in_ascii, line, safe, width_of, wrap
from fedsilo.views.overview import Lock, needs_of, needs_text, top_bar
from fedsilo.views.state import HALTS, CoordinatorState, Question, Release, SiloState, Snapshot

ANSWERS_MAX = 64  # of every place some, and the pages somebody went through last
BYTES_MAX = 8 << 20  # as JSON; what the daemon holds in objects is some times that
SETTLE_SECONDS = BURST_SECONDS + 0.01
MESSAGE_SECONDS, MESSAGE_LINES_MAX = 6.0, 3
LEAVING = "ctrl+q ends the console"
TITLE_BEGINS, TITLE_ENDS = "\x1b]2;", "\x07"

Finished: TypeAlias = Callable[[Outcome], None]

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


def dialog_cells(size: Size) -> int:
    """Return the width of a text in a dialog: within its border and beside its scroll bar."""
    return max(size.width * 96 // 100 - 6, 30)


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


def drawable(text: str) -> str:
    """The first line of `text`, with only those characters that `safe` draws as they are, and no stacks of marks."""
    first = (text.splitlines() or [""])[0]
    kept = "".join(character for character in first if safe(character) == character)
    return "".join(
        character for index, character in enumerate(kept) if not _is_mark(character) or not _stacked(kept, index)
    )


def _is_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me", "Mc")


def _stacked(text: str, index: int) -> bool:
    return index == 0 or (index > 1 and _is_mark(text[index - 1]) and _is_mark(text[index - 2]))


class TextLine(Input):
    """An input line whose typed or pasted text holds only what can be drawn."""

    def validate_value(self, value: str) -> str:
        return drawable(value)


@dataclass
class Remembered:
    """Answers of one daemon by key, with the question that they are to and when they came."""

    _answers: dict[str, tuple[Question, Any, float, int]] = field(default_factory=dict)  # the last: its size in bytes
    _site: str = ""
    _whose: tuple[object, ...] = ()

    def with_answers(self, snapshot: Snapshot, wanted: Mapping[str, Question], *, keep: bool = True) -> Snapshot:
        """The snapshot; of a daemon that is lost, with what it last answered to the questions that are wanted.

        Args:
            snapshot: as the reader gave it.
            wanted: questions of the screen on top, by key.
            keep: the snapshot's answers are to these questions; false where a screen has only now begun to ask.
        """
        whose = (type(snapshot.state), snapshot.state.federation) if snapshot.state is not None else self._whose
        if snapshot.site != self._site or whose != self._whose:
            self._answers, self._site, self._whose = {}, snapshot.site, whose
        if snapshot.link.state != "disconnected":
            for key in wanted.keys() & snapshot.answered_at.keys() & snapshot.answers.keys() if keep else ():
                if wanted[key][0] in NEVER_RECORDED:
                    continue  # what people were shown of a payload stays with the screen that showed it
                self._keep(key, wanted[key], snapshot.answers[key], snapshot.answered_at[key])
            return snapshot
        known = {
            key: self._answers[key]
            for key, question in wanted.items()
            if key not in snapshot.answers and key in self._answers and self._answers[key][0] == question
        }
        if not known:
            return snapshot
        return replace(
            snapshot,
            answers={**snapshot.answers, **{key: value for key, (_, value, _, _) in known.items()}},
            answered_at={**snapshot.answered_at, **{key: at for key, (_, _, at, _) in known.items()}},
        )

    def _keep(self, key: str, question: Question, answer: Any, at: float) -> None:
        """Keep this as the newest entry; drop the oldest while there are too many or they are too large."""
        known = self._answers.pop(key, None)
        size = known[3] if known is not None and known[2] == at else len(json.dumps(answer))
        if size > BYTES_MAX:
            return
        self._answers[key] = question, answer, at, size
        while len(self._answers) > ANSWERS_MAX or sum(size for *_, size in self._answers.values()) > BYTES_MAX:
            del self._answers[next(iter(self._answers))]  # the oldest


class Arrived(Message):
    """The reader has something newer."""

    def __init__(self, snapshot: Snapshot, reader: int | None = None) -> None:
        """reader: its number in the console; None for one that none delivers."""
        super().__init__()
        self.snapshot, self.reader = snapshot, reader

    def can_replace(self, message: Message) -> bool:
        """Of several that wait, the newest has it all: a slow terminal falls behind by one snapshot, not by many."""
        return isinstance(message, Arrived)


class Console(LetsThrough):
    """The console without its screens: what it reads, says and asks its person. Screens and dialogs know it as this.

    Args:
    signer: None for a console that can only look.
    key_files: of the person at this console.
    site: whose daemon this should be; empty for whichever answers.
    banner: what the bar says of the source, such as `Replay.banner`.
    replay: what `.` pauses and `<` `>` move; None where nothing is played back.
    waits_for: what is awaited while loading, for people.
    leaving: how to go on once the run is over, for people.
    ascii_only: no character above 0x7e but in data.
    theme_name: of `console.theme`.
    origins: where settings of its own come from, by their names in `fedsilo.views.settings`; else they are defaults.
    mouse: False leaves it to the terminal, which then marks text with it.
    clock: monotonic seconds that count on in suspend.
    driven_by_hand: no timers; a test moves the clock and calls `tick` and `settle_keys`.
    """

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        key_files: KeyFiles | None = None,
        site: str = "",
        banner: Callable[[], str] = str,
        replay: Replay | None = None,
        waits_for: str = "the daemon",
        leaving: str = LEAVING,
        read_only: bool = False,
        ascii_only: bool = False,
        theme_name: str = "fed-dark",
        origins: Mapping[str, str] | None = None,
        mouse: bool = True,
        clock: Callable[[], float] = boot_seconds,
        driven_by_hand: bool = False,
    ) -> None:
        super().__init__()
        if self.no_color:
            draw_without_colour(self)
        self.snapshot = Snapshot()
        self._source_banner, self.replay = banner, replay
        self.ascii_only = ascii_only
        self.mouse = mouse
        self.waits_for = waits_for
        self.leaving = leaving
        self.origins = origins or {}
        self.signing = Signing(signer, key_files, site, read_only, clock)
        self._clock = clock
        self._by_hand = driven_by_hand
        self._keys = KeyGate()
        self._theme_name = theme_name
        self._rung: set[str] = set()
        self._last_key: events.Key | None = None
        self._pressed_at: float | None = None  # of the key that came last; None after the mouse
        self._said: tuple[str, float] = ("", 0.0)  # what, and until when it stands
        self._feed: Feed | None = None
        self.reader = 0  # number of the present one
        self.wanted: Mapping[str, Question] = {}  # what the reader is asked for now
        self._typed, self._remembered = History(), Remembered()
        self.opened_at = clock()

    # ---- reading ---------------------------------------------------------------------------------

    def read_from(self, connect: Callable[[], Source]) -> None:
        """Begin to read a source, in place of any other. connect: makes it, again after each loss."""
        self.stop_reading()
        self._feed = Feed(connect, partial(self._arrived, self.reader))
        self._feed.start()

    def stop_reading(self) -> None:
        """Waits until the reader has ended."""
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    def run_on(self, connect: Callable[[], Source], **options: Any) -> None:
        """Run on a source; returns when the person leaves. options: of `run_to_the_end`."""
        forget_pinned_size()
        self.read_from(connect)
        try:
            run_to_the_end(self, mouse=self.mouse, **options)
        finally:
            self.stop_reading()

    def _arrived(self, reader: int, snapshot: Snapshot) -> None:
        """Called by the reader's thread."""
        self.post_message(Arrived(snapshot, reader))

    def on_arrived(self, message: Arrived) -> None:
        if message.reader not in (None, self.reader):
            return  # of a daemon that is attached no more
        read = self._remembered.with_answers(message.snapshot, self.wanted)
        self.snapshot = replace(read, viewer=self.lock.person)
        self._tell_new_needs()
        self.redraw()

    def _lock_when_idle(self) -> None:
        if self.signing.lock_when_idle():
            self.snapshot = replace(self.snapshot, viewer="")
            self.say("locked: nothing was pressed for 15 minutes")

    def ask(self) -> None:
        """Tell the reader what the screen on top needs, and no other does."""
        wanted = dict(self.top.wants())
        if isinstance(self.snapshot.state, SiloState):
            wanted[HALTS] = ("halts", {})
        if wanted != self.wanted:
            self.wanted = wanted
            if self._feed is not None:
                self._feed.want(wanted)
            before, self.snapshot = self.snapshot, self._remembered.with_answers(self.snapshot, wanted, keep=False)
            if self.snapshot is not before:
                self.top.redraw()

    def _tell_new_needs(self) -> None:
        """Once for each new thing: the bell, and the count in the terminal's title."""
        needs = {need.key for need in needs_of(self.snapshot, self.now())}
        if needs - self._rung:
            self.bell()
        self._rung = needs
        title = f"({len(needs)}) fedconsole" if needs else "fedconsole"
        if title != self.title:
            self.title = title
            self.write_title()

    def write_title(self) -> None:
        """To the terminal; Textual keeps its title to itself. Nothing in it comes from a daemon but a number (T37)."""
        if self._driver is not None:
            self._driver.write(f"{TITLE_BEGINS}{self.title}{TITLE_ENDS}")

    # ---- what screens ask for --------------------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    @property
    def glyphs(self) -> Glyphs:
        return ASCII if self.ascii_only else UNICODE

    @property
    def lock(self) -> Lock:
        # a source that has a banner of its own says it where a live link says "live"
        return replace(self.signing.lock, banner="" if self.snapshot.link.banner else self._source_banner())

    @property
    def read_only(self) -> bool:
        return self.signing.read_only

    @property
    def banner(self) -> Line:
        """Return what the bar begins with: the context, where there are several (`console.app`)."""
        return ()

    def contexts_to_go(self, *, each: bool) -> list[Entry]:
        """Return the other daemons that this console may be attached to, for `:`, and with `each` for the palette."""
        return []

    def why_not_send(self, order: Order) -> str:
        """Return why this person cannot give this order now; empty if nothing is in the way."""
        why = self.signing.why_not(self.snapshot.site)
        return why or order.why_not(self.snapshot, self.lock.person, self.now())

    def title_of(self, text: str) -> Content:
        return content_of([line(safe(text, 80))], ascii_only=self.ascii_only)

    def say(self, text: str) -> None:
        """Shown below everything else until the next key, or for some seconds."""
        (before, until), self._said = self._said, (text, self.now() + MESSAGE_SECONDS)
        if text != before or self.now() >= until:  # of a burst of keys each says the same
            self.redraw()

    def message_lines(self, cells: int) -> list[Line]:
        """Return the lines of the current message given to `say`."""
        text, until = self._said
        return [line(" ", *row) for row in wrap(text, cells, "warn")[:MESSAGE_LINES_MAX]] if self.now() < until else []

    def copy(self, text: str) -> None:
        """To the terminal's clipboard, and shown: there is no acknowledgement from a terminal."""
        shown = safe(text)
        self.copy_to_clipboard(shown)
        self.say(f"copied: {shown}")

    # ---- places ----------------------------------------------------------------------------------

    @property
    def top(self) -> FedScreen:
        """The screen that people look at, also behind a dialog."""
        screens = [screen for screen in self.screen_stack if isinstance(screen, FedScreen)]
        return screens[-1] if screens else self.get_screen(PLACES[0].name, FedScreen)

    def trail(self) -> list[str]:
        """The way to the screen on top, without it."""
        screens = [screen for screen in self.screen_stack if isinstance(screen, FedScreen)]
        places = {place.name: place.title for place in PLACES}
        return [screen.crumb() or places.get(screen.called, screen.called) for screen in screens[:-1]]

    def open_below(self, screen: FedScreen) -> None:
        """A screen below the one on top; escape comes back."""
        self.came_on()
        self.push_screen(screen)

    def action_go(self, name: str) -> None:
        """To a place, from anywhere but a dialog."""
        if self.top.called == name:
            return
        self.came_on()
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.push_screen(name)

    # ---- keys ------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        # a key that nobody took bubbles up and comes by a second time
        if isinstance(event, events.Key) and event is not self._last_key:
            waited = 0.0 if self._by_hand else max(time.monotonic() - event.time, 0.0)  # to be looked at
            self._last_key, self._pressed_at = event, self.now() - waited
            if self._said[0] and not (self._said[0] == BURST and self._keys.in_burst(self._pressed_at)):
                self._said = ("", 0.0)
                self.redraw()
            # before the key counts as one: no tick comes in suspend, nor while the screen is busy
            self._lock_when_idle()
            self.signing.last_input = self.now()
            if told := self._keys.key(self._pressed_at):
                self.say(told)
        elif isinstance(event, events.MouseDown):
            self._pressed_at = None
        await super().on_event(event)

    def came_on(self) -> None:
        """Note that the screen has changed: keys that change something are ignored for a moment."""
        self._keys.screen_changed(self.now())

    def offer(self, name: str) -> None:
        """A changing key was pressed; it acts when it stood alone."""
        if why := self._keys.offer(name, self.now() if self._pressed_at is None else self._pressed_at):
            self.say(why)
        elif not self._by_hand:
            self.set_timer(SETTLE_SECONDS, self.settle_keys)

    def action_offer(self, name: str) -> None:
        self.offer(name)

    def _toggle_lock(self) -> None:
        text = self.signing.toggle(self.snapshot.site)
        self.snapshot = replace(self.snapshot, viewer=self.lock.person)
        if text:
            self.say(text)
        self.redraw()

    def action_read_now(self) -> None:
        if self._feed is not None:
            self._feed.read_now()

    def next_theme(self) -> None:
        names = list(THEMES)
        here = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(here + 1) % len(names)]

    def do(self, action: Action) -> None:
        """An action chosen in the palette goes the way of its key and asks the same questions."""
        if action.name == "lock":
            self._toggle_lock()
        elif action.changes:
            self.top.act(action.name)
        else:
            self.simulate_key(action.key)

    # ---- answers and orders ----------------------------------------------------------------------

    def send(self, order: Order, finished: Finished) -> None:
        """Sign and give an order, if it still may be; `finished` is told how it went, in the console's own thread."""
        person = self.signing.person
        if why := self.why_not_send(order):
            finished(Outcome(why, ok=False))
        elif person is not None:
            self._carry_out(order, person.ordering(self.snapshot.federation), finished)  # whose daemon was shown

    @work(thread=True, group="answers", exit_on_error=False)
    def _carry_out(self, order: Order, person: Person, finished: Finished) -> None:
        self.call_from_thread(finished, self.signing.carry_out(order, person))
        self.call_from_thread(self.action_read_now)

    # ---- what the whole app adds -------------------------------------------------------------------

    def open_release(self, release: Release) -> None:
        """Open a held release below the screen on top."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the screen on top, and what covers it, again."""
        raise NotImplementedError

    def settle_keys(self) -> None:
        """Do what was offered, once its key stood alone."""
        raise NotImplementedError


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
        .box { border: round $secondary; border-title-color: $accent; padding: 0 1; height: auto; }
        &.-ascii .box { border: ascii $secondary; }
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
        self._answers_read: dict[str, tuple[Any, answers.Answer]] = {}  # by key: the JSON, and its value
        self.room = 0  # rows between the frame's lines
        self._maximised: Widget | None = None
        self._hidden: list[Widget] = []

    @property
    def fed(self) -> Console:
        return cast("Console", self.app)

    @property
    def at_a_coordinator(self) -> bool:
        return isinstance(self.fed.snapshot.state, CoordinatorState)

    @property
    def daemon_now(self) -> float:
        """The daemon's clock, in seconds since 1970; 0 while it is not known."""
        return self.fed.snapshot.server_now(self.fed.now())

    @property
    def dialog_cells(self) -> int:
        return dialog_cells(self.app.size)

    def answer_as(self, row: type[answers.Row], key: str) -> answers.Row:
        """Return the newest answer that has this key; an empty one before it came. Each is read once."""
        value = self.fed.snapshot.answers.get(key)
        if key not in self._answers_read or self._answers_read[key][0] is not value:
            now = self.fed.snapshot.answers
            self._answers_read = {name: each for name, each in self._answers_read.items() if name in now}
            self._answers_read[key] = value, answers.read(row, value)
        return cast("answers.Row", self._answers_read[key][1])

    # ---- what a screen says of itself --------------------------------------------------------------

    def wants(self) -> Mapping[str, Question]:
        """Queries to ask while this screen is on top, by keys of its own. Answers: `self.fed.snapshot.answers[key]`."""
        return {}

    def panes(self) -> ComposeResult:
        """Yield the widgets between the frame's lines."""
        yield from ()

    def draw(self) -> None:
        """Fill the panes from `self.fed.snapshot`; called often, so it only draws."""

    def crumb(self) -> str:
        """Return this screen's name in the path, such as a release's id; empty for a place of its own."""
        return ""

    def twin(self) -> str:
        """The command that tells the same."""
        twin = SCREEN_TWINS.get(self.called)
        return command_line(twin(self.context())) if twin is not None else ""

    def inspected(self) -> Any:
        """The JSON value behind what is selected, for `i`; None when there is none."""
        return None

    def context(self) -> Context:
        """Return what the twin commands of its actions name."""
        return Context(coordinator=self.at_a_coordinator, person=self.fed.lock.person)

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
        """Go to what was typed after the screen's name in `:`, such as a record's number."""
        self.fed.say(f"{self.called} takes nothing after its name")

    @property
    def numbers(self) -> str:
        """Return what a number after `:` names here, such as "record"; empty where it names nothing."""
        return ""

    @property
    def tags(self) -> frozenset[str]:
        """Return the tags by which `console.actions` selects this screen's actions."""
        tables, replays = any(pane.display for pane in self.query("TablePane")), self.fed.replay is not None
        return frozenset({self.called, *(["table"] if tables else []), *(["replay"] if replays else [])})

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
        """Return when the data on the screen was read, by the console's clock: the oldest of its answers, or the
        daemon's state where it asks for nothing; None before anything was read."""
        snapshot, wanted = self.fed.snapshot, self.wants()
        shown = [snapshot.answered_at[key] for key in wanted if key in snapshot.answered_at]
        shown += [at for pane in self.query("TablePane") if (at := getattr(pane, "frozen_at", None)) is not None]
        if wanted or shown:
            return min(shown, default=None)
        return snapshot.link.received_at if snapshot.state is not None else None

    @property
    def greyed(self) -> bool:
        """Return True if the screen no longer shows what the daemon currently says."""
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
        """Go one level up."""
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
        """Return the line shown in place of everything on a terminal that is too small."""
        width, height = self.app.size
        needs = len(overview.needs_of(self.fed.snapshot, self.fed.now()))
        size = f"needs {CELLS_MIN}x{ROWS_MIN}, has {width}x{height}"
        return line(f"{size}; {needs_text(needs)}; as text: {self.twin()}")

    # ---- what several screens draw -----------------------------------------------------------------

    def box(self, name: str, title: str, rows: list[Line], *, greyed: bool = False) -> None:
        """Draw lines in one of the screen's boxes, under a title."""
        box = self.query_one(name, Lines)
        box.border_title = self.fed.title_of(title)
        box.draw(rows, greyed=greyed)

    def awaited_lines(self, key: str, cells: int, *, there: bool) -> list[Line]:
        """Return why an answer is missing or old; while it is on its way, with a sign of that.

        there: what is wanted of it has come.
        """
        snapshot = self.fed.snapshot
        rows = conditions.answer_lines(snapshot, key, self.fed.now(), cells, opened_at=self.opened_at)
        if there or key in snapshot.refused or conditions.is_lost(snapshot, key):
            return rows
        return [*rows, line((self.fed.glyphs.more, "dim"))]

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


class ScrolledScreen(FedScreen):
    """A screen with a text to scroll; while more of it is below, the footer says so."""

    DEFAULT_CSS = "ScrolledScreen #body { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
    ]
    own_keys: ClassVar[str]

    def panes(self) -> ComposeResult:
        with VerticalScroll(id="body"):
            yield Lines(id="text")

    def lines(self, cells: int) -> list[Line]:
        """Return all lines of the text."""
        return []

    def draw(self) -> None:
        self.query_one("#text", Lines).draw(self.lines(self.app.size.width - 4), greyed=self.greyed)

    @property
    def body(self) -> VerticalScroll:
        return self.query_one("#body", VerticalScroll)

    @property
    def more_below(self) -> bool:
        return self.body.max_scroll_y > 0 and self.body.scroll_target_y < self.body.max_scroll_y

    def on_mount(self) -> None:
        super().on_mount()
        for what in ("virtual_size", "scroll_y"):  # whether more is below is known once it is laid out
            self.watch(self.body, what, self._draw_footer, init=False)

    def _draw_footer(self) -> None:
        if self.is_mounted and not self.too_small:
            self.query_one("#footer", Lines).draw(self.footer(self.keys()))

    def keys(self) -> Line:
        return (*line(self.own_keys), *((("  j more below", "accent"),) if self.more_below else ()))

    def action_scroll(self, step: int) -> None:
        self.body.scroll_relative(y=step, animate=False)


class TextDialog(ModalScreen[None]):
    """Something to read, scrolled with the usual keys, left with escape or q. While more is below it says so."""

    CSS = """
    TextDialog {
        align: center middle;
        #box { width: 96%; height: auto; max-height: 90%; border: round $accent; background: $surface;
               padding: 0 1; overflow-y: auto;
               border-title-color: $accent; border-subtitle-color: $accent; }
        &.-ascii #box { border: ascii $accent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
        Binding("space,ctrl+d,pagedown", "pages(1)", show=False),
        Binding("b,ctrl+u,pageup", "pages(-1)", show=False),
        Binding("g,home", "end(False)", show=False),
        Binding("G,end", "end(True)", show=False),
    ]

    def __init__(self, title: str, lines: list[Line] | Callable[[int], list[Line]]) -> None:
        """lines: for so many cells, where they are to be cut anew when the terminal changes its size."""
        super().__init__()
        self._title = title
        self._lines = lines

    @property
    def fed(self) -> Console:
        return cast("Console", self.app)

    @property
    def box(self) -> Vertical:
        return self.query_one("#box", Vertical)

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = Content(f"{self._title}: esc leaves")
            yield Lines(id="text")

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        self._draw()
        for what in ("virtual_size", "scroll_y"):  # whether more is below is known once it is laid out
            self.watch(self.box, what, self._say_more, init=False)

    def _draw(self) -> None:
        cells = dialog_cells(self.app.size)
        self.query_one("#text", Lines).draw(self._lines(cells) if callable(self._lines) else self._lines)

    def _say_more(self) -> None:
        below = self.box.max_scroll_y > 0 and self.box.scroll_target_y < self.box.max_scroll_y
        self.box.border_subtitle = "j for more, space a page" if below else ""

    def redraw(self) -> None:
        """It shows what it was opened with."""

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self._draw()
        self._say_more()

    def action_scroll(self, step: int) -> None:
        self.box.scroll_relative(y=step, animate=False)

    def action_pages(self, pages: int) -> None:
        self.action_scroll(pages * max(self.box.size.height - 1, 1))

    def action_end(self, last: bool) -> None:
        self.box.scroll_to(y=self.box.max_scroll_y if last else 0, animate=False)

    def action_leave(self) -> None:
        self.dismiss(None)


class TooSmall(ModalScreen[None]):
    """Covers a dialog on a terminal that is too small for it. A dialog whose facts are cut off must not be answered, so
    no key reaches it. It is shown again as it was once there is space."""

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
            self.query_one("#refusal", Lines).draw([cast("Console", self.app).top.refusal()])

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

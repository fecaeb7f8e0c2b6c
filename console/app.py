"""The console: shows one daemon's snapshots and asks people before anything is signed. It holds no state of its own.

A reader thread posts frozen snapshots (`Arrived`); screens only draw the last one, and the one on top says what else
the reader shall ask (`FedScreen.wants`). Lower-case keys never change anything. Upper-case keys are offered to the
`KeyGate` first, then open a dialog; the answer is signed in a worker thread with the person's own key, and the daemon
checks all of it again.

`ToldConsole` is the console over something else than a daemon alone, a recording played back or a link that is
recorded; what it says of that stands where the lock stands and is never dropped from the bar. `ContextConsole` goes
from one daemon to another. One is attached at a time: going to another stops the reader of the former and begins
everything anew, locked, and what the former reader still had on its way is dropped by the turn it was read in. The bar
names the context in words and colour; one that is called production is shown in capitals and as an alarm.

Does not stop: a picture of a replay passed off as live, for the banner is on the screen, not in every line of it; two
contexts with the same socket, or a socket behind which another daemon was started. A silo's own name in the bar comes
from the daemon, and a signature binds to the site.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from textual import events, work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message

from console.actions import PLACES, Action, History, help_lines, json_lines, matches
from console.base import FedScreen, TooSmall, content_of, keep_covered
from console.dialogs import (
    Answer,
    AskingDialog,
    ChooseDialog,
    Entry,
    TextDialog,
    by_letters,
    by_place,
    places_to_go,
    things_to_do,
)
from console.feed import Feed, Hand, Person, Source, boot_seconds, connect_to, waited_seconds
from console.lock import BURST, BURST_SECONDS, Decision, Given, KeyFiles, KeyGate, Signer, Signing, why_not_release
from console.recording import NEVER_RECORDED, Replay
from console.screens.approval import ApprovalScreen
from console.screens.approvals import ApprovalsScreen
from console.screens.audit import AuditScreen
from console.screens.budget import BudgetScreen
from console.screens.certs import CertsScreen
from console.screens.curves import CurvesScreen
from console.screens.logs import LogsScreen
from console.screens.outbox import OutboxScreen
from console.screens.overview import OverviewScreen
from console.screens.round import RoundScreen
from console.screens.settings import SettingsScreen
from console.terminal import LetsThrough, follow_terminal, forget_pinned_size, run_to_the_end
from console.theme import THEMES, draw_without_colour
from fedsilo.protocol.errors import OperationError, UnreachableError, UsageError
from fedsilo.views.lines import ASCII, UNICODE, Glyphs, Line, Part, fit, line, safe, wrap
from fedsilo.views.overview import Lock, needs_of, shorter
from fedsilo.views.state import HALTS, Question, Release, SiloState, Snapshot

ANSWERS_MAX = 64  # of every place some, and the pages somebody went through last
BYTES_MAX = 8 << 20  # as JSON; what the daemon holds in objects is some times that


@dataclass
class Remembered:
    """Answers of one daemon by key, with the question that they are to and when they came."""

    _answers: dict[str, tuple[Question, Any, float]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes, of the same keys
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
            self._answers, self._sizes, self._site, self._whose = {}, {}, snapshot.site, whose
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
            answers={**snapshot.answers, **{key: value for key, (_, value, _) in known.items()}},
            answered_at={**snapshot.answered_at, **{key: at for key, (_, _, at) in known.items()}},
        )

    def _keep(self, key: str, question: Question, answer: Any, at: float) -> None:
        """As the newest; the oldest go, as many as are too many or too large."""
        known = self._answers.pop(key, None)
        size = self._sizes.pop(key, 0)
        if known is None or known[2] != at:
            size = len(json.dumps(answer))
        if size > BYTES_MAX:
            return
        self._answers[key], self._sizes[key] = (question, answer, at), size
        total = sum(self._sizes.values())
        for oldest in list(self._answers):
            if len(self._answers) <= ANSWERS_MAX and total <= BYTES_MAX:
                break
            total -= self._sizes.pop(oldest)
            del self._answers[oldest]


TICK_SECONDS = 1.0
SETTLE_SECONDS = BURST_SECONDS + 0.01
MESSAGE_SECONDS, MESSAGE_LINES_MAX = 6.0, 3
LEAVING = "ctrl+q ends the console"
TITLE_BEGINS, TITLE_ENDS = "\x1b]2;", "\x07"
TITLE_KEPT, TITLE_BACK = "\x1b[22;2t", "\x1b[23;2t"  # the terminal's own, before the console's

Finished: TypeAlias = Callable[..., None]

# Every place of `console.actions.PLACES`, and nothing that is not there yet.
SCREENS: Mapping[str, Callable[[], FedScreen]] = {
    "overview": OverviewScreen,
    "round": RoundScreen,
    "approvals": ApprovalsScreen,
    "curves": CurvesScreen,
    "outbox": OutboxScreen,
    "audit": AuditScreen,
    "budget": BudgetScreen,
    "certs": CertsScreen,
    "logs": LogsScreen,
    "settings": SettingsScreen,
}


class Arrived(Message):
    """The reader has something newer."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot

    def can_replace(self, message: Message) -> bool:
        """Of several that wait, the newest has it all: a slow terminal falls behind by one snapshot, not by many."""
        return isinstance(message, Arrived)


class FedConsole(LetsThrough):
    """Args:
    signer: None for a console that can only look.
    key_files: of the person at this console.
    site: whose daemon this should be; empty for whichever answers.
    waits_for: what is awaited while loading, for people.
    leaving: how to go on once the run is over, for people.
    ascii_only: no character above 0x7e but in data.
    theme_name: of `console.theme`.
    origins: where settings of its own come from, by their names in `fedsilo.views.settings`; else they are defaults.
    mouse: False leaves it to the terminal, which then marks text with it.
    clock: monotonic seconds that count on in suspend.
    driven_by_hand: no timers; a test moves the clock and calls `tick` and `settle_keys`.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "fedconsole"
    CSS = """
    .-ascii Button { border: ascii $secondary; }
    Input > .input--placeholder { color: $secondary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(place.key, f"go('{place.name}')", show=False) for place in PLACES),
        Binding("colon", "go_to", show=False),
        Binding("n", "next_need", show=False),
        Binding("i", "inspect", show=False),
        Binding("L", "offer('lock')", show=False),
        Binding("Y", "copy_twin", show=False),
        Binding("r", "read_now", show=False),
        Binding("question_mark", "help", show=False),
        Binding("ctrl+p", "palette", show=False),
        Binding("ctrl+q", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        key_files: KeyFiles | None = None,
        site: str = "",
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
        self.wanted: Mapping[str, Question] = {}  # what the reader is asked for now
        self._typed, self._remembered = History(), Remembered()
        self.opened_at = clock()

    # ---- life --------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        for theme in THEMES.values():
            self.register_theme(theme)
        self.theme = self._theme_name
        for name, make in SCREENS.items():
            self.install_screen(make(), name)
        self.push_screen(PLACES[0].name)
        self.screen_change_signal.subscribe(self, partial(keep_covered, self))
        if self._driver is not None:
            self._driver.write(TITLE_KEPT)
        self.write_title()
        if not self._by_hand:
            self.set_interval(TICK_SECONDS, self.tick)

    def on_unmount(self) -> None:
        if self._driver is not None:
            self._driver.write(TITLE_BACK)

    def read_from(self, connect: Callable[[], Source]) -> None:
        """Begin to read a source, in place of any other.

        Args:
            connect: makes it, again after each loss.
        """
        self.stop_reading()
        self._feed = Feed(connect, self._arrived)
        self._feed.start()

    def stop_reading(self) -> None:
        """Waits until the reader has ended."""
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    def run_on(self, connect: Callable[[], Source], **options: Any) -> None:
        """Run it on a source; returns when the person leaves.

        Args:
            connect: makes the source, again after each loss.
            options: of `run_to_the_end`.
        """
        forget_pinned_size()
        self.read_from(connect)
        try:
            run_to_the_end(self, mouse=self.mouse, **options)
        finally:
            self.stop_reading()

    def _arrived(self, snapshot: Snapshot) -> None:
        """Called by the reader's thread."""
        self.post_message(Arrived(snapshot))

    def on_arrived(self, message: Arrived) -> None:
        read = self._remembered.with_answers(message.snapshot, self.wanted)
        self.snapshot = replace(read, viewer=self.lock.person)
        self._tell_new_needs()
        self._redraw()

    def tick(self) -> None:
        """Ages grow, locks close, and a resize that was lost is drawn."""
        follow_terminal(self)
        self._lock_when_idle()
        self._redraw()

    def _lock_when_idle(self) -> None:
        if self.signing.lock_when_idle():
            self.snapshot = replace(self.snapshot, viewer="")
            self.say("locked: nothing was pressed for 15 minutes")

    def _redraw(self) -> None:
        stack, top = self.screen_stack, self.top
        # what is below redraws when it comes on again
        for screen in stack[stack.index(top) :] if top in stack else ():
            if isinstance(screen, FedScreen | AskingDialog | TooSmall):
                screen.redraw()

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

    # ---- what screens ask for ----------------------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    @property
    def glyphs(self) -> Glyphs:
        return ASCII if self.ascii_only else UNICODE

    @property
    def lock(self) -> Lock:
        return self.signing.lock

    @property
    def read_only(self) -> bool:
        return self.signing.read_only

    @property
    def replays(self) -> bool:
        """A recording is played back, which some keys move."""
        return False

    @property
    def banner(self) -> Line:
        """What stands first in the bar: the context, where there are several (`console.app`)."""
        return ()

    def contexts_to_go(self, *, each: bool) -> list[Entry]:
        """For `:`, and with `each` for the palette: the other daemons that this console may be attached to."""
        return []

    def why_not(self, release: Release, *, approve: bool) -> str:
        """Why this person cannot answer this release now, or nothing."""
        if why := self.signing.why_not(self.snapshot.site):
            return why
        return why_not_release(release, self.snapshot, self.lock.person, self.now(), approve=approve)

    def why_not_send(self, decision: Decision) -> str:
        """Why this person cannot give this answer or order now, or nothing."""
        why = self.signing.why_not(self.snapshot.site)
        return why or decision.why_not(self.snapshot, self.lock.person, self.now())

    def title_of(self, text: str) -> Content:
        return content_of([line(safe(text, 80))], ascii_only=self.ascii_only)

    def say(self, text: str) -> None:
        """Shown below everything else until the next key, or for some seconds."""
        (before, until), self._said = self._said, (text, self.now() + MESSAGE_SECONDS)
        if text != before or self.now() >= until:  # of a burst of keys each says the same
            self._redraw()

    def message_lines(self, cells: int) -> list[Line]:
        """What `say` was given, while it stands."""
        text, until = self._said
        return [line(" ", *row) for row in wrap(text, cells, "warn")[:MESSAGE_LINES_MAX]] if self.now() < until else []

    def copy(self, text: str) -> None:
        """To the terminal's clipboard, and shown: there is no acknowledgement from a terminal."""
        shown = safe(text)
        self.copy_to_clipboard(shown)
        self.say(f"copied: {shown}")

    def open_release(self, release: Release) -> None:
        self.open_below(ApprovalScreen(release))

    # ---- places ------------------------------------------------------------------------------------

    @property
    def top(self) -> FedScreen:
        """The screen that people look at, also behind a dialog."""
        screens = [screen for screen in self.screen_stack if isinstance(screen, FedScreen)]
        return screens[-1] if screens else self.overview

    @property
    def overview(self) -> OverviewScreen:
        return self.get_screen("overview", OverviewScreen)

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

    def action_next_need(self) -> None:
        """To what needs a person next; on the overview it moves on, wherever else one comes to it."""
        top = self.top
        if isinstance(top, OverviewScreen):
            top.select_next()
            return
        if isinstance(top, ApprovalScreen):
            self.overview.select_next(top.shown.id)
        self.action_go("overview")

    # ---- keys --------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        # a key that nobody took bubbles up and comes by a second time
        if isinstance(event, events.Key) and event is not self._last_key:
            waited = 0.0 if self._by_hand else waited_seconds(event.time)
            self._last_key, self._pressed_at = event, self.now() - waited
            if self._said[0] and not (self._said[0] == BURST and self._keys.in_burst(self._pressed_at)):
                self._said = ("", 0.0)
                self._redraw()
            # before the key counts as one: no tick comes in suspend, nor while the screen is busy
            self._lock_when_idle()
            self.signing.last_input = self.now()
            if told := self._keys.key(self._pressed_at):
                self.say(told)
        elif isinstance(event, events.MouseDown):
            self._pressed_at = None
        await super().on_event(event)

    def came_on(self) -> None:
        """What is on the screen changed: changing keys rest for a moment."""
        self._keys.screen_changed(self.now())

    def offer(self, name: str) -> None:
        """A changing key was pressed; it acts when it stood alone."""
        if why := self._keys.offer(name, self.now() if self._pressed_at is None else self._pressed_at):
            self.say(why)
        elif not self._by_hand:
            self.set_timer(SETTLE_SECONDS, self.settle_keys)

    def action_offer(self, name: str) -> None:
        self.offer(name)

    def settle_keys(self) -> None:
        name = self._keys.settle(self.now())
        screen = self.screen
        if name == "lock":
            self._toggle_lock()
        elif name == "confirm" and isinstance(screen, AskingDialog):
            screen.confirm()
        elif name == "choose" and isinstance(screen, ChooseDialog):
            screen.choose()
        elif name is not None and isinstance(screen, FedScreen):
            screen.act(name)

    def _toggle_lock(self) -> None:
        text = self.signing.toggle(self.snapshot.site)
        self.snapshot = replace(self.snapshot, viewer=self.lock.person)
        if text:
            self.say(text)
        self._redraw()

    def action_read_now(self) -> None:
        if self._feed is not None:
            self._feed.read_now()

    def action_help(self) -> None:
        if not isinstance(self.screen, TextDialog):
            cells = max(self.size.width * 96 // 100 - 6, 30)
            rows = help_lines(self.top.tags, self.top.context(), self.top.why_off, cells)
            self.push_screen(TextDialog(f"Help, {self.top.called}", rows))

    def action_copy_twin(self) -> None:
        self.copy(self.top.twin())

    def action_inspect(self) -> None:
        value = self.top.inspected()
        if value is None:
            self.say("nothing is selected here")
        else:
            self.push_screen(TextDialog("JSON", json_lines(value, max(self.size.width * 96 // 100 - 6, 30))))

    def action_go_to(self) -> None:
        self.push_screen(ChooseDialog("Go to", places_to_go(self), by_place(self), history=self._typed))

    def action_palette(self) -> None:
        self.push_screen(ChooseDialog("What shall be done?", things_to_do(self), by_letters))

    def next_theme(self) -> None:
        names = list(THEMES)
        self.theme = names[(names.index(self.theme) + 1) % len(names)]

    def do(self, action: Action) -> None:
        """An action chosen in the palette goes the way of its key and asks the same questions."""
        if action.name == "lock":
            self._toggle_lock()
        elif action.changes:
            self.top.act(action.name)
        else:
            self.simulate_key(action.key)

    # ---- answers and orders ------------------------------------------------------------------------

    def send(self, decision: Answer | Decision, finished: Finished) -> None:
        """Sign and give what was decided, if it still may be; `finished(text, ok=..., result=...)` is told how it went.

        Args:
            decision: an answer to a release, an order, or whatever has the same methods.
            finished: called in the console's own thread; without `result` when nothing was sent.
        """
        given = Given(decision) if isinstance(decision, Answer) else decision
        person = self.signing.person
        if why := self.why_not_send(given):
            finished(why, ok=False)
        elif person is not None:
            self._carry_out(given, person.ordering(self.snapshot.federation), finished)  # whose daemon was shown

    @work(thread=True, group="answers", exit_on_error=False)
    def _carry_out(self, decision: Decision, person: Person, finished: Finished) -> None:
        outcome = self.signing.carry_out(decision, person)
        self.call_from_thread(finished, outcome.text, ok=outcome.ok, result=outcome.result)
        self.call_from_thread(self.action_read_now)


def run(socket: Path, *, read_only: bool = False, **options: Any) -> None:
    """Open the console on a control socket; returns when the person leaves.

    Args:
        socket: of the daemon.
        read_only: no unlocking.
        options: of `FedConsole`.
    """
    signer = None if read_only else Hand(socket)
    FedConsole(signer=signer, waits_for=str(socket), read_only=read_only, **options).run_on(connect_to(socket))


SEEK_SECONDS = 10.0
SCREEN_SECONDS_MAX = 10.0


@dataclass(frozen=True)
class ToldLock(Lock):
    """A lock with what else is told beside it."""

    told: str = ""

    def words(self) -> list[Part]:
        words = super().words()
        if not self.told:
            return words
        (whole, _), (least, _) = words[0], words[-1]
        told = shorter(self.told)
        return [*((f"{each} {whole}", "warn") for each in told), (f"{told[-1]} {least}", "warn")]


class ToldConsole(FedConsole):
    """Args:
    told: what the bar says, such as `Replay.banner`.
    replay: what `.` pauses and `<` `>` move; None where nothing is played back.
    options: of `FedConsole`.
    """

    # written as tuples: Textual itself is imported by screens only
    BINDINGS: ClassVar[list[Any]] = [
        ("full_stop", "toggle_pause", ""),
        ("less_than_sign", f"seek({-SEEK_SECONDS})", ""),
        ("greater_than_sign", f"seek({SEEK_SECONDS})", ""),
    ]

    def __init__(self, *, told: Callable[[], str], replay: Replay | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._told = told
        self._replay = replay

    @property
    def lock(self) -> Lock:
        lock = super().lock
        # A source that has a banner of its own says it where a live link says "live".
        told = "" if self.snapshot.link.told else self._told()
        return ToldLock(lock.person, lock.seconds_left, lock.read_only, told)

    @property
    def replays(self) -> bool:
        return self._replay is not None

    def action_toggle_pause(self) -> None:
        if self._replay is None:
            return
        if self._replay.paused:
            self._replay.resume()
        else:
            self._replay.pause()
        self.action_read_now()

    def action_seek(self, seconds: float) -> None:
        if self._replay is not None:
            self._replay.seek(self._replay.position + seconds)
            self.action_read_now()


def run_told(
    connect: Callable[[], Source],
    told: Callable[[], str],
    *,
    replay: Replay | None = None,
    signer: Signer | None = None,
    **options: Any,
) -> None:
    """Open the console on a source; returns when the person leaves.

    Args:
        connect: makes the source, again after each loss.
        told: what the bar says.
        replay: what the keys move.
        signer: None for looking only.
        options: of `FedConsole`.
    """
    ToldConsole(told=told, replay=replay, signer=signer, **options).run_on(connect)


def screen_text(
    connect: Callable[[], Source],
    number: str,
    told: Callable[[], str],
    *,
    cells: int,
    rows: int,
    **options: Any,
) -> str:
    """One screen as text, drawn by the console itself without a terminal.

    Args:
        connect: makes the source.
        number: of the screen, as its key says.
        told: what the bar says.
        cells: width.
        rows: height.
        options: of `FedConsole`.

    Raises:
        UsageError: no such screen.
        UnreachableError: the source cannot be read. OperationError: its answers did not come in time.
    """
    place = next((one for one in PLACES if one.key == number), None)
    if place is None:
        known = ", ".join(f"{one.key} {one.name}" for one in PLACES)
        raise UsageError(f"there is no screen {number}", hint=f"there are: {known}")
    app = ToldConsole(told=told, **options)
    drawn: list[str] = []

    async def look(pilot: Any) -> None:
        deadline = time.monotonic() + SCREEN_SECONDS_MAX
        await pilot.pause()
        app.action_go(place.name)
        while time.monotonic() < deadline and not _complete(app):
            await pilot.pause(0.05)
        await pilot.pause()
        if _complete(app):
            compositor = app.screen._compositor  # its strips are what a terminal would get
            drawn.extend("".join(part.text for part in strip).rstrip() for strip in compositor.render_strips())
        app.exit()

    app.run_on(connect, headless=True, size=(cells, rows), auto_pilot=look)
    if app.snapshot.link.state == "disconnected":
        raise UnreachableError(app.snapshot.link.cause, hint=app.snapshot.link.hint)
    if not drawn:
        raise OperationError(f"screen {number} was not complete within {SCREEN_SECONDS_MAX:g} s")
    return "\n".join(drawn)


def _complete(app: FedConsole) -> bool:
    """Everything that the screen asks for was answered or refused."""
    snapshot = app.snapshot
    if snapshot.link.state == "disconnected":
        return True
    return snapshot.state is not None and all(
        key in snapshot.answered_at or key in snapshot.refused for key in app.wanted
    )


BANNER_CELLS_MAX = 24
PRODUCTION = ("prod", "production", "live")


@dataclass(frozen=True)
class Attachment:
    """A daemon to attach to.

    Attributes:
        name: of the context, as it is typed and shown.
        connect: makes the source, again after each loss.
        waits_for: what is awaited while loading, for people.
        site: whose daemon this should be; empty for whichever answers.
        signer: None for looking only.
        key_files: of the person, for this site.
    """

    name: str
    connect: Callable[[], Source]
    waits_for: str
    site: str = ""
    signer: Signer | None = None
    key_files: KeyFiles | None = None


def is_production(name: str) -> bool:
    """Whether a context is called so: prod, production or live, alone or as a part of the name."""
    parts = name.lower().replace(":", "-").replace("_", "-").replace(".", "-").split("-")
    return any(part in PRODUCTION for part in parts)


class ContextConsole(FedConsole):
    """Args:
    attachments: the first is attached at once; all have names of their own.
    named: the bar names the context even if there is only one.
    read_only: no unlocking, in any of them.
    options: of `FedConsole`, but for what an attachment says.
    """

    def __init__(
        self, attachments: Sequence[Attachment], *, named: bool = True, read_only: bool = False, **options: Any
    ) -> None:
        first = attachments[0]
        super().__init__(
            signer=first.signer, key_files=first.key_files, site=first.site, waits_for=first.waits_for,
            read_only=read_only, **options,
        )  # fmt: skip
        self._attachments = {each.name: each for each in attachments}
        self._here = first
        self._named = named or len(attachments) > 1
        self._looks_only = read_only
        self._turn = 0

    @property
    def here(self) -> Attachment:
        """What is attached now."""
        return self._here

    @property
    def banner(self) -> Line:
        if not self._named:
            return ()
        name = self._here.name
        production = is_production(name)
        shown = fit(name.upper() if production else name, BANNER_CELLS_MAX)
        return line(" ", (f"[{shown}]", "bad" if production else "accent"))

    # ---- reading -----------------------------------------------------------------------------------

    def read_from(self, connect: Callable[[], Source]) -> None:
        self.stop_reading()
        turn = self._turn
        self._feed = Feed(connect, lambda snapshot: self._arrived_in(turn, snapshot))
        self._feed.start()

    def _arrived_in(self, turn: int, snapshot: Snapshot) -> None:
        """Called by a reader's thread."""
        message = Arrived(snapshot)
        message.turn = turn  # type: ignore[attr-defined]
        self.post_message(message)

    def on_arrived(self, message: Arrived) -> None:
        if getattr(message, "turn", self._turn) != self._turn:
            message.prevent_default()  # of a daemon that is attached no more

    # ---- going to another --------------------------------------------------------------------------

    def go_to_context(self, typed: str) -> None:
        """What followed `:ctx`: a name or its beginning; nothing lists them."""
        names = list(self._attachments)
        if not typed:
            self.push_screen(ChooseDialog("Contexts", self._entries("{}"), by_letters))
            return
        found = matches(typed, names)
        if len(found) == 1:
            self.attach(found[0])
        elif found:
            self.say(f"{typed} is the beginning of {', '.join(found)}")
        else:
            self.say(f"there is no context {typed}: there {'are' if len(names) > 1 else 'is'} {', '.join(names)}")

    def attach(self, name: str) -> None:
        """Go to another daemon, and forget everything of this one."""
        wanted = self._attachments[name]
        if wanted is self._here:
            self.say(f"this is {name}")
            return
        if any(not worker.is_finished for worker in self.workers):
            self.say("an answer is on its way to this daemon: wait until it is there")
            return
        former, self._feed = self._feed, None
        self._turn += 1
        if former is not None:
            # it may wait for a daemon that does not answer, and nobody should wait for that
            threading.Thread(target=former.stop, name="console-leave", daemon=True).start()
        self._here = wanted
        self._forget()
        if former is not None:
            self.read_from(wanted.connect)
        self.push_screen(PLACES[0].name)
        self.came_on()
        self.say(f"attached to {name}; locked")

    def _forget(self) -> None:
        here, clock = self._here, self._clock
        self.signing = Signing(here.signer, here.key_files, here.site, self._looks_only, clock)
        self.snapshot, self.wanted = Snapshot(), {}
        self.waits_for, self.opened_at = here.waits_for, clock()
        self._keys, self._typed, self._rung, self._remembered = KeyGate(), History(), set(), Remembered()
        self._tell_new_needs()  # the terminal's title counted what the former one needs
        while len(self.screen_stack) > 1:
            self.pop_screen()
        for name, make in SCREENS.items():
            screen = self.get_screen(name)
            self.uninstall_screen(name)
            if screen.is_running:
                screen.remove()
            self.install_screen(make(), name)

    # ---- what `:` and the palette offer ------------------------------------------------------------

    def contexts_to_go(self, *, each: bool) -> list[Entry]:
        if each:
            return self._entries("ctx {}") if len(self._attachments) > 1 else []
        return [Entry("ctx", "", "ctx NAME: another daemon, everything of this one forgotten", self.go_to_context)]

    def _entries(self, form: str) -> list[Entry]:
        def going(name: str) -> Callable[[str], None]:
            return lambda rest: self.attach(name)

        return [
            Entry(form.format(name), "", f"{'here: ' if each is self._here else ''}{each.waits_for}", going(name))
            for name, each in self._attachments.items()
        ]

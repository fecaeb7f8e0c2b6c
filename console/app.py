"""The whole console: its screens, what its keys do, and how it is opened on a daemon, several, or a recording.

Over a recording that is played back, or a link that is recorded, a banner says so where the lock is shown, and is never
dropped from the bar. `ContextConsole` goes from one daemon to another. One is attached at a time: going to another
stops the reader of the former and begins everything anew, locked, and what the former reader still delivers is dropped.
The bar names the context in words and colour; one that is called production is shown in capitals and as an alarm.

Does not stop: a picture of a replay passed off as live, for the banner is on the screen, not in every line of it; two
contexts with the same socket, or a socket behind which another daemon was started. A silo's own name in the bar comes
from the daemon, and a signature binds to the site.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from console.actions import PLACES, Entry, History, help_lines, json_lines, matches
from console.base import Console, FedScreen, Remembered, TextDialog, TooSmall, dialog_cells, keep_covered
from console.dialogs import ChooseDialog, OrderDialog, by_letters, by_place, places_to_go, things_to_do
from console.feed import Signer, Source
from console.lock import KeyFiles, KeyGate, Signing
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
from console.terminal import follow_terminal
from console.theme import THEMES
from fedsilo.protocol.errors import OperationError, UnreachableError, UsageError
from fedsilo.views.lines import Line, fit, line
from fedsilo.views.state import Release, Snapshot

TICK_SECONDS = 1.0
SEEK_SECONDS = 10.0
TITLE_KEPT, TITLE_BACK = "\x1b[22;2t", "\x1b[23;2t"  # the terminal's own, before the console's

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


class FedConsole(Console):
    """The console with all its screens; arguments are those of `Console`."""

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
        Binding("full_stop", "toggle_pause", show=False),
        Binding("less_than_sign", f"seek({-SEEK_SECONDS})", show=False),
        Binding("greater_than_sign", f"seek({SEEK_SECONDS})", show=False),
    ]

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

    def tick(self) -> None:
        """Ages grow, locks close, and a resize that was lost is drawn."""
        follow_terminal(self)
        self._lock_when_idle()
        self.redraw()

    def redraw(self) -> None:
        stack, top = self.screen_stack, self.top
        # what is below redraws when it comes on again
        for screen in stack[stack.index(top) :] if top in stack else ():
            if isinstance(screen, FedScreen | OrderDialog | TooSmall):
                screen.redraw()

    def open_release(self, release: Release) -> None:
        self.open_below(ApprovalScreen(release))

    @property
    def overview(self) -> OverviewScreen:
        return self.get_screen("overview", OverviewScreen)

    def action_next_need(self) -> None:
        """To what needs a person next; on the overview it moves on, wherever else one comes to it."""
        top = self.top
        if isinstance(top, OverviewScreen):
            top.select_next()
            return
        if isinstance(top, ApprovalScreen):
            self.overview.select_next(top.shown.id)
        self.action_go("overview")

    def settle_keys(self) -> None:
        name = self._keys.settle(self.now())
        screen = self.screen
        if name == "lock":
            self._toggle_lock()
        elif name == "confirm" and isinstance(screen, OrderDialog):
            screen.confirm()
        elif name == "choose" and isinstance(screen, ChooseDialog):
            screen.choose()
        elif name is not None and isinstance(screen, FedScreen):
            screen.act(name)

    def action_help(self) -> None:
        if not isinstance(self.screen, TextDialog):
            cells = dialog_cells(self.size)
            rows = help_lines(self.top.tags, self.top.context(), self.top.why_off, cells)
            self.push_screen(TextDialog(f"Help, {self.top.called}", rows))

    def action_copy_twin(self) -> None:
        self.copy(self.top.twin())

    def action_inspect(self) -> None:
        value = self.top.inspected()
        if value is None:
            self.say("nothing is selected here")
        else:
            self.push_screen(TextDialog("JSON", json_lines(value, dialog_cells(self.size))))

    def action_go_to(self) -> None:
        self.push_screen(ChooseDialog("Go to", places_to_go(self), by_place(self), history=self._typed))

    def action_palette(self) -> None:
        self.push_screen(ChooseDialog("What shall be done?", things_to_do(self), by_letters))

    def action_toggle_pause(self) -> None:
        if self.replay is None:
            return
        if self.replay.paused:
            self.replay.resume()
        else:
            self.replay.pause()
        self.action_read_now()

    def action_seek(self, seconds: float) -> None:
        if self.replay is not None:
            self.replay.seek(self.replay.position + seconds)
            self.action_read_now()


SCREEN_SECONDS_MAX = 10.0


def screen_text(
    connect: Callable[[], Source],
    number: str,
    banner: Callable[[], str],
    *,
    cells: int,
    rows: int,
    **options: Any,
) -> str:
    """Return one screen as text, drawn by the console itself without a terminal.

    Args:
        connect: makes the source.
        number: of the screen, as its key says.
        banner: what the bar says.
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
    app = FedConsole(banner=banner, **options)
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
    """Return True once everything that the screen asks for was answered or refused."""
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
    """Return True if the context's name contains prod, production or live."""
    parts = name.lower().replace(":", "-").replace("_", "-").replace(".", "-").split("-")
    return any(part in PRODUCTION for part in parts)


class ContextConsole(FedConsole):
    """Args:
    attachments: the first is attached at once; all have names of their own.
    named: the bar names the context even if there is only one.
    read_only: no unlocking, in any of them.
    options: of `FedConsole`, but for what an attachment says."""

    def __init__(
        self, attachments: Sequence[Attachment], *, named: bool = True, read_only: bool = False, **options: Any
    ) -> None:
        first = attachments[0]
        super().__init__(
            signer=first.signer, key_files=first.key_files, site=first.site, waits_for=first.waits_for,
            read_only=read_only, **options,
        )  # fmt: skip
        self._attachments = {each.name: each for each in attachments}
        self.here = first  # what is attached now
        self._named = named or len(attachments) > 1
        self._looks_only = read_only

    @property
    def banner(self) -> Line:
        if not self._named:
            return ()
        name = self.here.name
        production = is_production(name)
        shown = fit(name.upper() if production else name, BANNER_CELLS_MAX)
        return line(" ", (f"[{shown}]", "bad" if production else "accent"))

    # ---- going to another --------------------------------------------------------------------------

    def go_to_context(self, typed: str) -> None:
        """Open the context whose name, or its beginning, followed `:ctx`; without one, list the contexts."""
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
        if wanted is self.here:
            self.say(f"this is {name}")
            return
        if any(not worker.is_finished for worker in self.workers):
            self.say("an answer is on its way to this daemon: wait until it is there")
            return
        former, self._feed = self._feed, None
        self.reader += 1  # what the former one still delivers is dropped
        if former is not None:
            # it may wait for a daemon that does not answer, and nobody should wait for that
            threading.Thread(target=former.stop, name="console-leave", daemon=True).start()
        self.here = wanted
        self._forget()
        if former is not None:
            self.read_from(wanted.connect)
        self.push_screen(PLACES[0].name)
        self.came_on()
        self.say(f"attached to {name}; locked")

    def _forget(self) -> None:
        here, clock = self.here, self._clock
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
            Entry(form.format(name), "", f"{'here: ' if each is self.here else ''}{each.waits_for}", going(name))
            for name, each in self._attachments.items()
        ]

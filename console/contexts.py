"""The console over several daemons: `:ctx NAME` and the palette go from one to another.

One daemon is attached at a time. Going to another stops the reader of the former and begins everything anew: it is
locked, nothing is selected, and no answer, event or filter of the former is left. What the former reader still had on
its way is dropped, by the turn it was read in: no release of one daemon is ever drawn under the name of another.
The bar names the context in words and colour; one that is called production is shown in capitals and as an alarm.

Does not stop: two contexts with the same socket, or a socket behind which another daemon was started. A silo's own name
in the bar comes from the daemon, and a signature binds to the site.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from console.app import SCREENS, Arrived, FedConsole
from console.drawing import Line, fit, line
from console.feed import Feed, Source
from console.keys import KeyGate
from console.navigation import PLACES, History, matches
from console.remembered import Remembered
from console.screens.palette import ChooseDialog, Entry, by_letters
from console.signing import KeyFiles, Signer, Signing
from console.values import Snapshot

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

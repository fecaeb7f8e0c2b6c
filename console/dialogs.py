"""Dialogs: what is asked before something is signed, the fields that take text, and one line to type a command in.

Each asks what, with what effect, by whom, and says why not now. Escape cancels. The focus starts in the field, where
there is one; Enter in a field signs nothing and says what is missing, a paste into it does nothing, and the button is
off until the word is right; the placeholder never shows it, and the key that opened the dialog cannot confirm it. While
the button is off Tab goes back to the field instead of to Cancel, where the next Enter would throw away what was typed.
Whatever a dialog is about is asked again until it is signed, so nobody confirms what has become something else
meanwhile (threat T36).

Textual draws a field's value as it is, so a control, format or bidirectional character must never become part of one
(threat T37). A terminal without bracketed paste sends a paste as keys: a run that comes faster than hands type fills no
word.

`:` goes by beginnings and remembers what was typed; the palette goes by some letters in their order. Both read the one
table of actions, and neither changes anything by itself: an action that changes opens the same dialog as its key.

Does not stop: a program that types as slowly as a person does, or a single pasted character.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf
from typing import ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.fuzzy import FuzzySearch
from textual.screen import ModalScreen
from textual.widgets import Button, Input

from console.actions import (
    ORDERING,
    ORDERING_RUNS,
    ORDERING_SILO,
    PLACES,
    Action,
    Context,
    Entry,
    History,
    actions_on,
    matches,
    title_of,
)
from console.base import Console, FedScreen, Lines, TextLine
from console.lock import Outcome
from console.orders import (
    DIGEST_TYPED_CHARACTERS,
    MINUTES,
    Deferral,
    Order,
    approval,
    choices,
    deferral,
    order_of,
    rejection,
    with_reason,
)
from fedsilo.audit.record import note_text
from fedsilo.views import releases
from fedsilo.views.lines import Line, Part, clip, flow, line, pad, wrap
from fedsilo.views.rule_words import REJECT_CODES
from fedsilo.views.state import CoordinatorState, Release, SiloState

# Half of what `console.lock` asks of keys that change at once: a wrong guess only costs typing the word again.
TYPED_SECONDS_MIN = 0.02
FASTER_THAN_HANDS = "keys came faster than hands type: type the word"


class NoPaste(Input):
    """A field into which a paste does nothing."""

    def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()


class TypedWord(NoPaste):
    """The word that confirms, typed by hand: no paste, no clipboard, no run of keys that a terminal made of one."""

    _typed_at = -inf

    def action_paste(self) -> None:
        """The clipboard is no typing either."""

    async def _on_key(self, event: events.Key) -> None:
        if not event.is_printable:
            return
        dialog = cast("OrderDialog", self.screen)
        before, self._typed_at = self._typed_at, dialog.fed.now()
        if self._typed_at - before < TYPED_SECONDS_MIN:
            event.prevent_default()
            event.stop()
            self.value = ""
            dialog.fed.say(FASTER_THAN_HANDS)
            dialog.word_dropped = True

    async def action_submit(self) -> None:
        """Enter in the field signs nothing; the dialog says what is missing."""
        # called, not posted: keys that follow at once must find what this does to the field
        cast("OrderDialog", self.screen).entered()


BOX_CELLS = 72
WORD_CHARACTERS_MAX = 80


class OrderDialog(ModalScreen[Order | None]):
    """Asks for a typed word or one more key. Ends with the order, or with None.

    Args:
        order: as it is shown.
        signer: who signs.
    """

    # a screen's sheet counts for its own name alone, so a subclass puts its name here
    CSS = """
    OrderDialog {
        align: center middle;
        #box { width: 72; max-width: 100%; height: auto; max-height: 100%; border: heavy $warning; background: $surface;
               padding: 0 1; border-title-color: $warning; }
        #what { margin-bottom: 1; }
        Input { height: 3; }
        #buttons { height: 3; margin-top: 0; }
        Button { margin-right: 2; }
        /* off: no fill, no weight; the library would leave it its colour and dim it until it cannot be read */
        Button:disabled { opacity: 100%; text-opacity: 100%; text-style: none; color: $secondary; background: $surface;
                          border: dashed $secondary; }
        &.-ascii #box { border: ascii $warning; }
        &.-ascii Input { border: ascii $secondary; }
        &.-ascii Button:disabled { border: ascii $secondary; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", show=False),
        Binding("tab", "next_field", show=False),
    ]

    def __init__(self, order: Order, signer: str) -> None:
        super().__init__()
        self._order = order
        self._signer = signer
        self._entered = False
        self.word_dropped = False  # what was typed came too fast, and nothing was typed since
        self.fields = 1  # where a word is typed

    @property
    def fed(self) -> Console:
        return cast("Console", self.app)

    def compose(self) -> ComposeResult:
        typed, verb = bool(self._order.word_is), self._order.verb.capitalize()
        with Vertical(id="box") as box:
            box.border_title = self.fed.title_of(self.heading(verb))
            yield self.lines("what")
            yield self.lines("ask")
            if typed:
                yield TypedWord(id="word", placeholder="type it here", max_length=WORD_CHARACTERS_MAX)
            yield from self.further_fields()
            yield self.lines("why")
            if typed:
                with Horizontal(id="buttons"):
                    yield Button(verb, id="confirm", variant="warning", disabled=True)
                    yield Button("Cancel (esc)", id="cancel")

    # ---- what is asked -----------------------------------------------------------------------------

    def heading(self, verb: str) -> str:
        return f"{verb}?"

    def further_fields(self) -> ComposeResult:
        """Yield the fields below the word."""
        yield from ()

    def what(self, cells: int) -> list[Line]:
        """The object, the effect, whether it can be undone, and the signer."""
        order = self._order
        return [
            *wrap(order.about, cells, "strong"),
            *wrap(f"Effect: {order.effect}.", cells),
            *wrap(f"{order.undone} Signed by {self._signer}.", cells, "warn"),
        ]

    def asked(self) -> list[Line]:
        """Return the lines that say what confirms the order."""
        order = self._order
        if order.word_is:
            keys = ", ".join([*["Tab"] * self.fields, "Enter"])
            return [line("To go on, type ", (order.word_is, "strong"), ", then ", (keys, "strong"), ":")]
        return [line((order.key, "accent"), f" {order.verb}   ", ("esc", "accent"), " cancel")]

    def why_not(self) -> str:
        """Why it cannot be confirmed now, or nothing."""
        return self.fed.why_not_send(self._order)

    def typed(self) -> str:
        return self.query_one("#word", Input).value.strip()

    def word_fits(self) -> bool:
        """Return True if the typed text confirms the order."""
        return not self._order.word_is or self.typed() == self._order.word != ""

    def wrong_word(self) -> str:
        return f"This is not {self._order.word_is}."

    def missing(self) -> str:
        """After Enter: why that did not sign."""
        if not self._order.word_is:
            return f"Enter signs nothing: {self._order.key} does."
        if not self.word_fits():
            return self.wrong_word()
        fields = list(self.query(Input))
        way = "Tab, Tab" if self.focused in fields[:-1] else "Tab"
        return f"Enter signs nothing in a field: {way} to the button, then Enter."

    def decided(self) -> Order:
        """Return the order that the dialog ends with."""
        return self._order

    # ---- drawing -----------------------------------------------------------------------------------

    def lines(self, name: str) -> Lines:
        """The widget of `what`, `ask` or `why`, with its lines in it: nobody ever sees a dialog without its effect."""
        widget = Lines(id=name)
        widget.draw(self._rows(name))
        return widget

    def _rows(self, name: str) -> list[Line]:
        return self.what(self._cells) if name == "what" else self.asked() if name == "ask" else self._why(self._cells)

    @property
    def _cells(self) -> int:
        return min(self.app.size.width, BOX_CELLS) - 4

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        for word in self.query("#word"):
            word.focus()
        self.redraw()

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        for name in ("what", "ask", "why"):
            self.query_one(f"#{name}", Lines).draw(self._rows(name))
        for button in self.query("#confirm"):
            button.disabled = bool(self.why_not()) or not self.word_fits()

    def _why(self, cells: int) -> list[Line]:
        told = self.why_not()
        if not told and self._entered:
            told = FASTER_THAN_HANDS if self.word_dropped and not self.word_fits() else self.missing()
        return wrap(told, cells, "bad") or self.fed.message_lines(cells)

    # ---- keys --------------------------------------------------------------------------------------

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._entered = False
        if event.input.id == "word" and event.input.value:
            self.word_dropped = False
        self.redraw()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.entered()

    def entered(self) -> None:
        """Enter: say what is missing. A wrong word is marked, so that what is typed next replaces it."""
        self._entered = True
        if not self.word_fits():
            self.query_one("#word", Input).action_select_all()
        self.redraw()

    def action_next_field(self) -> None:
        """Tab: from the last field to the button; while that is off, to the word, and what is missing is said."""
        fields, here = list(self.query(Input)), self.focused
        confirm = self.query("#confirm")
        if fields and here is fields[-1] and confirm and confirm.first(Button).disabled:
            fields[0].focus()
            self.entered()
        else:
            self.focus_next()

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        event.stop()
        if event.button.id == "cancel":
            self.dismiss(None)
        else:
            self.fed.offer("confirm")

    def on_key(self, event: events.Key) -> None:
        """Only the order's own key confirms; a field takes its keys itself."""
        if self._order.word_is:
            return
        if event.key == self._order.key:
            event.stop()
            self.fed.offer("confirm")
        elif event.key == "enter":
            event.stop()
            self.entered()

    def action_cancel(self) -> None:
        self.dismiss(None)

    def confirm(self) -> None:
        """The key or button stood alone long enough; everything is asked once more."""
        if self.why_not() or not self.word_fits():
            self.redraw()
        else:
            self.dismiss(self.decided())


BRIEF_ROWS_MIN = 24  # below that the codes of a no take the row that names what leaves


class ConfirmDialog(OrderDialog):
    """Asks for a yes or a no to a release.

    Args:
        release: as it is shown.
        approve: a yes; else a no.
        signer: who signs.
        opened: ids of the findings that were opened.
        note: what the note of a no begins with.
    """

    CSS = OrderDialog.CSS.replace("OrderDialog", "ConfirmDialog")

    def __init__(
        self, release: Release, *, approve: bool, signer: str, opened: Collection[str] = (), note: str = ""
    ) -> None:
        self._answer = approval(release) if approve else rejection(release)
        super().__init__(self._answer, signer)
        self.note = note  # what was typed for a no, also where it was not signed: the next dialog begins with it
        self._opened = frozenset(opened)
        self.fields = 1 if approve else 2

    def heading(self, verb: str) -> str:
        return f"{verb} this release"

    def further_fields(self) -> ComposeResult:
        if not self._answer.approve:
            yield TextLine(
                self.note, id="reason", placeholder="optional note; it stays at this site, beside the audit log",
                max_length=500, select_on_focus=False,
            )  # fmt: skip

    def what(self, cells: int) -> list[Line]:
        answer, release = self._answer, self._answer.release
        brief = answer.approve or self.app.size.height >= BRIEF_ROWS_MIN
        return [
            releases.signature_line(release),
            *(releases.brief(release, cells) if brief else []),
            *wrap(f"Effect: {answer.effect or releases.NOT_TOLD}.", cells),
            *(releases.later(release, cells) if answer.approve else []),
            *wrap(f"{answer.undone} Signed by {self._signer}.", cells, "warn"),
        ]

    def asked(self) -> list[Line]:
        codes = [line((code, "accent"), f" {says}") for code, says in REJECT_CODES.items()]
        listed = [] if self._answer.approve else flow(codes, min(self.app.size.width, BOX_CELLS) - 4)
        return [*super().asked(), *listed]

    def word_fits(self) -> bool:
        if not self._answer.approve:
            return self.typed().upper() in REJECT_CODES
        return len(self._answer.word) == DIGEST_TYPED_CHARACTERS and self.typed().lower() == self._answer.word

    def wrong_word(self) -> str:
        if self._answer.approve:
            return f"These are not the last {DIGEST_TYPED_CHARACTERS} characters of the digest."
        return "This is no reason code: type one of those above."

    def why_not(self) -> str:
        if why := super().why_not():
            return why
        # what the daemon has found since then counts, though bytes, policy and revision are the same
        release = self._answer.release
        there = self.fed.snapshot.release(release.id) or release
        left = there.not_opened(self._opened) if self._answer.approve else ()
        return f"{releases.unread_text(left)}: esc, then open what was found" if left else ""

    @on(Input.Changed, "#reason")
    def _noted(self, event: Input.Changed) -> None:
        self.note = event.value

    def decided(self) -> Order:
        if self._answer.approve:
            return self._answer
        return with_reason(self._answer, self.typed().upper(), note_text(self.query_one("#reason", Input).value))


ORDERS = ("pause", "start", "abort", "stop", "release_halt")


class OrderingScreen(FedScreen):
    """A screen from which orders are given: P, S, X and H, and more in the palette. What came of the last one stands
    below the top bar until the next one or for a minute."""

    RESULT_SECONDS: ClassVar[float] = 60.0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("P", "offer('pause')", show=False),
        Binding("S", "offer('start')", show=False),
        Binding("X", "offer('abort')", show=False),
        Binding("H", "offer('release_halt')", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._sending = False
        self._result: tuple[str, str, float] = ("", "", 0.0)  # text, style, and until when it stands

    @property
    def tags(self) -> frozenset[str]:
        match self.fed.snapshot.state:
            case CoordinatorState():
                return super().tags | ORDERING | ORDERING_RUNS
            case SiloState():
                return super().tags | ORDERING | ORDERING_SILO
        return super().tags | ORDERING

    def context(self) -> Context:
        context, state = super().context(), self.fed.snapshot.state
        if isinstance(state, CoordinatorState):
            run = state.current
            return replace(context, run=run.run if run else "", paused=run is not None and run.state == "paused")
        paused = isinstance(state, SiloState) and state.paused
        return replace(context, halted_kind=self.halted_kind(), paused=paused)

    def halted_kind(self) -> str:
        """Return the message kind that `H` acts on: the one selected here."""
        return ""

    def order_for(self, action: str) -> Order | str:
        """The order that an action gives now, or why it gives none."""
        if self._sending:
            return "an order is on its way"
        order = order_of(action, self.fed.snapshot, kind=self.halted_kind())
        return order if isinstance(order, str) else self.fed.why_not_send(order) or order

    def orders_possible(self) -> list[tuple[str, str]]:
        """Key and verb of what the state allows, whoever is here, for the footer."""
        keys = {action.name: action.key for action in actions_on(*self.tags) if action.key}
        orders = [(keys[name], order_of(name, self.fed.snapshot, kind=self.halted_kind())) for name in ORDERS
                  if name in keys]  # fmt: skip
        return [(key, order.verb.capitalize()) for key, order in orders if isinstance(order, Order)]

    def act(self, action: str) -> None:
        if action not in ORDERS:
            super().act(action)
            return
        order = self.order_for(action)
        if isinstance(order, str):
            self.fed.say(f"{title_of(action)}: {order}")
        else:
            self.app.push_screen(OrderDialog(order, self.fed.lock.person), self._decided)

    def why_off(self, action: str) -> str:
        if action not in ORDERS:
            return super().why_off(action)
        order = self.order_for(action)
        return order if isinstance(order, str) else ""

    def _decided(self, order: Order | None) -> None:
        if order is None:
            self.fed.say("cancelled: no order was given")
            return
        self._sending = True
        self._result = (f"{order.verb} {order.about.partition(',')[0]}: sending…", "warn", float("inf"))
        self.redraw()
        self.fed.send(order, self.finished)

    def finished(self, outcome: Outcome) -> None:
        """Show the daemon's answer to an order."""
        self._sending = False
        self._result = (outcome.text, "ok" if outcome.ok else "bad", self.fed.now() + self.RESULT_SECONDS)
        if self.fed.top is self:
            self.redraw()
        else:
            self.fed.say(outcome.text)  # somebody went on meanwhile

    def result_lines(self, cells: int) -> list[Line]:
        """Return the result of the last order, for `notices`."""
        text, style, until = self._result
        return wrap(text, cells, style)[:3] if text and self.fed.now() < until else []

    def notices(self, cells: int) -> list[Line]:
        return [*self.result_lines(cells), *super().notices(cells)]


class DeferDialog(OrderDialog):
    """Digits choose how long, and only then `d` signs it.

    Args:
        release: as it is shown.
        time: seconds since 1970, the daemon's clock.
        signer: who signs.
    """

    CSS = OrderDialog.CSS.replace("OrderDialog", "DeferDialog")

    def __init__(self, release: Release, time: float, signer: str) -> None:
        self._release, self._time = release, time
        self._choices = choices(release, time)
        first = next(iter(self._choices.values()), 1)
        super().__init__(deferral(release, first, time), signer)
        self._minutes = first

    @property
    def order(self) -> Deferral:
        return deferral(self._release, self._minutes, self._time)

    def asked(self) -> list[Line]:
        keys: list[Part] = []
        for key, minutes in self._choices.items():
            here = minutes == self._minutes  # marked by a sign too: not every terminal has styles
            keys.append((f"{self.fed.glyphs.cursor if here else ' '} ", "accent"))
            keys += [(key, "accent"), (f" {minutes} minutes  ", "strong" if here else "dim")]
        late = [f"{minutes} minutes" for key, minutes in MINUTES.items() if key not in self._choices]
        cells = min(self.app.size.width, BOX_CELLS) - 4
        told = wrap(f"it expires before {' and '.join(late)} are over", cells, "dim") if late else []
        return [tuple(keys), *told, (), *super().asked()]

    def on_key(self, event: events.Key) -> None:
        if event.key in self._choices:
            event.stop()
            self._minutes = self._choices[event.key]
            self._order = self.order
            self.redraw()
        else:
            super().on_key(event)


SHOWN_MAX = 10
NAME_CELLS = 22
INBOX = "inbox"  # the other direction of the outbox: a place to go to, and no screen of its own
TYPED_CHARACTERS_MAX = 200


def by_beginning(text: str, entries: Sequence[Entry]) -> list[Entry]:
    names = matches(text.partition(" ")[0], [entry.name for entry in entries])
    return [entry for entry in entries if entry.name in names] if text.strip() else list(entries)


def by_place(fed: Console) -> Callable[[str, Sequence[Entry]], list[Entry]]:
    """For `:`: by beginnings, and a number alone names what the screen on top has under it."""
    top = fed.top

    def find(text: str, entries: Sequence[Entry]) -> list[Entry]:
        typed, found = text.strip(), by_beginning(text, entries)
        if not (top.numbers and typed.isascii() and typed.isdigit()):
            return found
        return [Entry(typed, "", f"{top.numbers} {typed} on this screen", lambda rest: top.go_to(typed)), *found]

    return find


def by_letters(text: str, entries: Sequence[Entry]) -> list[Entry]:
    if not text.strip():
        return list(entries)
    typed, search = text.strip().lower(), FuzzySearch()

    def worth(entry: Entry) -> tuple[int, bool, float]:
        """Least first: it begins so, a word of it does, its letters are in it, a word of what it does begins so. Of
        those that fit alike, what may change something comes last: nobody stops a silo by a slip."""
        name = entry.name.lower()
        score = search.match(typed, name)[0]
        if name.startswith(typed):
            place = 0
        elif f" {typed}" in f" {name}":
            place = 1
        elif score > 0:
            place = 2
        else:
            place = 3 if f" {typed}" in f" {entry.says.lower()}" else 4
        return place, entry.guarded, -score

    found = sorted(((worth(entry), index, entry) for index, entry in enumerate(entries)), key=lambda each: each[:2])
    return [entry for (place, _, _), _, entry in found if place < 4]


def places_to_go(fed: Console) -> list[Entry]:
    """Return the entries of `:`: every place, which is given the text after its name, and every held release."""

    def going(name: str) -> Callable[[str], None]:
        def go(rest: str) -> None:
            fed.action_go(name)
            if rest:
                fed.call_later(fed.top.go_to, rest)

        return go

    def opening(release_id: str) -> Callable[[str], None]:
        def open_it(rest: str) -> None:
            release = fed.snapshot.release(release_id)
            if release is None:
                fed.say(f"{release_id} is no longer held")
            else:
                fed.open_release(release)

        return open_it

    def going_in(rest: str) -> None:
        fed.action_go("outbox")
        screen = fed.top
        fed.call_later(lambda: screen.go_to(f"{INBOX} {rest}".strip()))

    places = [Entry(place.name, place.key, place.says, going(place.name)) for place in PLACES]
    places.append(Entry(INBOX, "5 tab", "what came in; a number after it names a record", going_in))
    held = [Entry(held.id, "", "the held release", opening(held.id)) for held in fed.snapshot.held]
    return [*places, *held, *fed.contexts_to_go(each=False)]


def things_to_do(fed: Console) -> list[Entry]:
    """Return the palette's entries: every action of the current screen, every place, and what has no key."""

    def doing(action: Action) -> Callable[[str], None]:
        return lambda rest: fed.do(action)

    return [
        Entry(
            action.title, action.shown_key, action.says, doing(action),
            guarded=action.changes or action.name == "lock",
        )
        for action in actions_on(*fed.top.tags)
        if action.name != "palette"
    ] + [Entry("theme", "", "the next look: dark, light, without colour", lambda rest: fed.next_theme())] + (
        fed.contexts_to_go(each=True)
    )  # fmt: skip


class ChooseDialog(ModalScreen[None]):
    """Args:
    title: of the box.
    entries: what there is to choose from.
    find: which of them fit what was typed, best first.
    history: of what was typed, for `:`; without it up and down move among what was found."""

    CSS = """
    ChooseDialog {
        align: center top;
        #box { width: 76; max-width: 96%; height: auto; max-height: 90%; margin-top: 2; border: round $accent;
               background: $surface; padding: 0 1; border-title-color: $accent; }
        Input { height: 1; border: none; padding: 0; }
        &.-ascii #box { border: ascii $accent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", show=False),
        Binding("up", "step(-1)", show=False),
        Binding("down", "step(1)", show=False),
    ]

    def __init__(
        self,
        title: str,
        entries: Sequence[Entry],
        find: Callable[[str, Sequence[Entry]], list[Entry]],
        *,
        history: History | None = None,
    ) -> None:
        super().__init__()
        self._title = title
        self._entries = entries
        self._find = find
        self._history = history
        self._at = 0

    @property
    def fed(self) -> Console:
        return cast("Console", self.app)

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = self.fed.title_of(self._title)
            yield NoPaste(max_length=TYPED_CHARACTERS_MAX)
            yield Lines(id="found")

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        self.query_one(NoPaste).focus()
        self.redraw()

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def found(self) -> list[Entry]:
        return self._find(self.query_one(NoPaste).value, self._entries)

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        cells = max(min(self.app.size.width * 96 // 100, 76) - 4, 20)
        most = max(min(SHOWN_MAX, self.app.size.height - 8), 1)
        found = self.found()
        self._at = max(0, min(self._at, len(found) - 1))
        first = max(self._at - most + 1, 0)
        rows: list[Line] = []
        for index, entry in enumerate(found[first : first + most], first):
            here = index == self._at
            mark = (f"{self.fed.glyphs.cursor} " if here else "  ", "accent")
            name = (pad(entry.name, NAME_CELLS), "strong" if here else "")
            rows.append(clip(line(mark, name, (pad(f" {entry.key}", 8), "accent"), (entry.says, "dim")), cells))
        if not found:
            rows = [line(("nothing fits; esc leaves", "warn"))]
        elif len(found) > first + most:
            rows.append(line((f"  and {len(found) - first - most} more", "dim")))
        self.query_one("#found", Lines).draw(rows)

    def action_step(self, steps: int) -> None:
        if self._history is not None:
            field = self.query_one(NoPaste)
            field.value = self._history.back() if steps < 0 else self._history.forth()
            field.cursor_position = len(field.value)
        else:
            self._at += steps
        self.redraw()

    @on(Input.Changed)
    def _typed(self) -> None:
        self._at = 0
        self.redraw()

    @on(Input.Submitted)
    def _chosen(self, event: Input.Submitted) -> None:
        event.stop()
        found = self.found()
        if found and found[self._at].guarded:
            self.fed.offer("choose")
        else:
            self.choose()

    def choose(self) -> None:
        """Carry out the marked entry once the dialog is closed."""
        text, found = self.query_one(NoPaste).value.strip(), self.found()
        if not found or (self._history is not None and not text):
            return
        if self._history is not None:
            self._history.add(text)
        self.dismiss(None)
        self.app.call_later(found[self._at].choose, text.partition(" ")[2].strip())

    def action_cancel(self) -> None:
        self.dismiss(None)

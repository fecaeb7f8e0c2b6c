"""`:` and ctrl+p: one line to type in, and what it finds. Both read the one table of actions.

`:` goes by beginnings and remembers what was typed; the palette goes by some letters in their order. Neither changes
anything by itself: an action that changes opens the same dialog as its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.fuzzy import FuzzySearch
from textual.screen import ModalScreen
from textual.widgets import Input

from console.actions import Action, actions_on
from console.drawing import Line, clip, line, pad
from console.navigation import PLACES, History, matches
from console.screens.base import Lines

if TYPE_CHECKING:
    from console.app import FedConsole

SHOWN_MAX = 10
NAME_CELLS = 22
INBOX = "inbox"  # the other direction of the outbox: a place to go to, and no screen of its own
TYPED_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Entry:
    """Something to choose.

    Args:
        name: as it is typed.
        key: that does the same.
        says: what it does.
        choose: is told what followed the name.
        guarded: it may change something, so enter must have stood alone, as its key must.
    """

    name: str
    key: str
    says: str
    choose: Callable[[str], None]
    guarded: bool = False


def by_beginning(text: str, entries: Sequence[Entry]) -> list[Entry]:
    names = matches(text.partition(" ")[0], [entry.name for entry in entries])
    return [entry for entry in entries if entry.name in names] if text.strip() else list(entries)


def by_place(fed: FedConsole) -> Callable[[str, Sequence[Entry]], list[Entry]]:
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


def places_to_go(fed: FedConsole) -> list[Entry]:
    """For `:`: every place, with what follows its name given to it, and every held release."""

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


def things_to_do(fed: FedConsole) -> list[Entry]:
    """For the palette: every action of the screen on top, every place, and what has no key."""

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


class ChooseLine(Input):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "older", show=False),
        Binding("down", "newer", show=False),
    ]

    def _on_paste(self, event: events.Paste) -> None:
        """A paste is no choice."""
        event.prevent_default()
        event.stop()

    def action_older(self) -> None:
        cast("ChooseDialog", self.screen).step(-1)

    def action_newer(self) -> None:
        cast("ChooseDialog", self.screen).step(1)


class ChooseDialog(ModalScreen[None]):
    """Args:
    title: of the box.
    entries: what there is to choose from.
    find: which of them fit what was typed, best first.
    history: of what was typed, for `:`; without it up and down move among what was found.
    """

    CSS = """
    ChooseDialog {
        align: center top;
        #box { width: 76; max-width: 96%; height: auto; max-height: 90%; margin-top: 2; border: round $accent;
               background: $surface; padding: 0 1; border-title-color: $accent; }
        Input { height: 1; border: none; padding: 0; }
        &.-ascii #box { border: ascii $accent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

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
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = self.fed.title_of(self._title)
            yield ChooseLine(max_length=TYPED_CHARACTERS_MAX)
            yield Lines(id="found")

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        self.query_one(ChooseLine).focus()
        self.redraw()

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def found(self) -> list[Entry]:
        return self._find(self.query_one(ChooseLine).value, self._entries)

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

    def step(self, steps: int) -> None:
        if self._history is not None:
            field = self.query_one(ChooseLine)
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
        """What is marked is done once the dialog is gone."""
        text, found = self.query_one(ChooseLine).value.strip(), self.found()
        if not found or (self._history is not None and not text):
            return
        if self._history is not None:
            self._history.add(text)
        self.dismiss(None)
        self.app.call_later(found[self._at].choose, text.partition(" ")[2].strip())

    def action_cancel(self) -> None:
        self.dismiss(None)

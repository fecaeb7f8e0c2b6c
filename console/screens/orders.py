"""The dialog before an order is given, and what a screen has that gives orders.

It names the object, the effect, whether it can be undone, and the signer. One labelled key in lower case confirms what
can be taken back, and a typed word the rest; Enter confirms neither, and a paste is no typing. Whatever it was made
from is asked again until it is signed, so nobody confirms what has become something else meanwhile (threat T36).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input

from console.actions import ORDERING, ORDERING_RUNS, ORDERING_SILO, Context, actions_on, title_of
from console.drawing import Line, line, wrap
from console.orders import Order, order_of
from console.screens.asking import AskingDialog, TypedWord
from console.screens.base import FedScreen
from console.values import CoordinatorState, SiloState

WORD_CHARACTERS_MAX = 80
ORDERS = ("pause", "start", "abort", "stop", "release_halt")


class OrderDialog(AskingDialog[Order | None]):
    """Ends with the order, or with None."""

    CSS = AskingDialog.CSS.replace("AskingDialog", "OrderDialog")

    def __init__(self, order: Order, signer: str) -> None:
        super().__init__()
        self._order = order
        self._signer = signer

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = self.fed.title_of(f"{self._order.verb.capitalize()}?")
            yield self.lines("what")
            yield self.lines("ask")
            if self._order.word:
                yield TypedWord(id="word", placeholder="type it here", max_length=WORD_CHARACTERS_MAX)
            yield self.lines("why")
            if self._order.word:
                with Horizontal(id="buttons"):
                    yield Button(self._order.verb.capitalize(), id="confirm", variant="warning", disabled=True)
                    yield Button("Cancel (esc)", id="cancel")

    def what(self, cells: int) -> list[Line]:
        order = self._order
        return [
            *wrap(order.about, cells, "strong"),
            *wrap(f"Effect: {order.effect}.", cells),
            *wrap(f"{order.undone} Signed by {self._signer}.", cells, "warn"),
        ]

    def asked(self) -> list[Line]:
        order = self._order
        if order.word:
            return [line("To go on, type ", (order.word_is, "strong"), ", then ", ("Tab, Enter", "strong"), ":")]
        return [line((order.key, "accent"), f" {order.verb}   ", ("esc", "accent"), " cancel")]

    def word_fits(self) -> bool:
        return not self._order.word or self.query_one("#word", Input).value.strip() == self._order.word

    def why_not(self) -> str:
        return self.fed.why_not_send(self._order)

    def missing(self) -> str:
        if not self._order.word:
            return f"Enter signs nothing: {self._order.key} does."
        if self.word_fits():
            return "Enter signs nothing in a field: Tab to the button, then Enter."
        return f"This is not {self._order.word_is}."

    def on_key(self, event: events.Key) -> None:
        """Only the order's own key confirms; a field takes its keys itself."""
        if self._order.word:
            return
        if event.key == self._order.key:
            event.stop()
            self.fed.offer("confirm")
        elif event.key == "enter":
            event.stop()
            self.entered()

    def decided(self) -> Order:
        return self._order


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
        """What `H` is about: the kind that is selected here."""
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

    def finished(self, text: str, *, ok: bool, result: Mapping[str, Any] | None = None) -> None:
        """What the daemon said."""
        self._sending = False
        self._result = (text, "ok" if ok else "bad", self.fed.now() + self.RESULT_SECONDS)
        if self.fed.top is self:
            self.redraw()
        else:
            self.fed.say(text)  # somebody went on meanwhile

    def result_lines(self, cells: int) -> list[Line]:
        """What came of the last order, for `notices`."""
        text, style, until = self._result
        return wrap(text, cells, style)[:3] if text and self.fed.now() < until else []

    def notices(self, cells: int) -> list[Line]:
        return [*self.result_lines(cells), *super().notices(cells)]

"""What every dialog does that asks before something is signed: what, with what effect, by whom, and why not now.

Escape cancels. The focus starts in the field, where there is one; Enter in a field signs nothing and says what is
missing, a paste into it does nothing, and the button is off until the word is right. While it is off Tab goes back to
the field instead of to Cancel, where the next Enter would throw away what was typed. Whatever a dialog is about is
asked again until it is signed (threat T36).

Does not stop: a program that types as slowly as a person does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual import events, on
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Button, Input

from console.drawing import Line, wrap
from console.screens.base import Lines
from console.screens.fields import FASTER_THAN_HANDS, HandTyped

if TYPE_CHECKING:
    from console.app import FedConsole

BOX_CELLS = 72


class TypedWord(HandTyped):
    """The word that confirms."""

    async def action_submit(self) -> None:
        """Enter in the field signs nothing; the dialog says what is missing."""
        # called, not posted: keys that follow at once must find what this does to the field
        if isinstance(self.screen, AskingDialog):
            self.screen.entered()

    def dropped(self) -> None:
        if isinstance(self.screen, AskingDialog):
            self.screen.word_dropped = True


class AskingDialog(ModalScreen[ScreenResultType]):
    """Ends with what was decided, or with None. A subclass yields `#what`, `#ask`, `#why`, and where a word is typed
    the field `#word` and the buttons `#confirm` and `#cancel`."""

    # a screen's sheet counts for its own name alone, so a subclass puts its name here
    CSS = """
    AskingDialog {
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

    def __init__(self) -> None:
        super().__init__()
        self._entered = False
        self.word_dropped = False  # what was typed came too fast, and nothing was typed since

    @property
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    # ---- what a dialog says of itself --------------------------------------------------------------

    def what(self, cells: int) -> list[Line]:
        """The object, the effect, whether it can be undone, and the signer."""
        raise NotImplementedError

    def asked(self) -> list[Line]:
        """What confirms it."""
        raise NotImplementedError

    def why_not(self) -> str:
        """Why it cannot be confirmed now, or nothing."""
        raise NotImplementedError

    def word_fits(self) -> bool:
        """Whether what was typed confirms it."""
        raise NotImplementedError

    def missing(self) -> str:
        """After Enter: why that did not sign."""
        raise NotImplementedError

    def decided(self) -> ScreenResultType:
        """What the dialog ends with."""
        raise NotImplementedError

    # ---- drawing -----------------------------------------------------------------------------------

    def lines(self, name: str) -> Lines:
        """The widget of `what`, `ask` or `why`, with its lines in it: nobody ever sees a dialog without its effect."""
        widget, cells = Lines(id=name), self._cells
        widget.draw({"what": lambda: self.what(cells), "ask": self.asked}.get(name, lambda: self._why(cells))())
        return widget

    @property
    def _cells(self) -> int:
        return min(self.app.size.width, BOX_CELLS) - 4

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        for field in self.query("#word"):
            field.focus()
        self.redraw()

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        cells = self._cells
        self.query_one("#what", Lines).draw(self.what(cells))
        self.query_one("#ask", Lines).draw(self.asked())
        self.query_one("#why", Lines).draw(self._why(cells))
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

    def action_cancel(self) -> None:
        self.dismiss(None)

    def confirm(self) -> None:
        """The key or button stood alone long enough; everything is asked once more."""
        if self.why_not() or not self.word_fits():
            self.redraw()
        else:
            self.dismiss(self.decided())

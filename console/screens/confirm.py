"""Dialogs that ask before anything changes: what, with what effect, signed by whom, and a word to type.

Escape cancels. The focus starts in the field, Enter in a field signs nothing and says what is missing, a paste into it
does nothing, the button is off until the word is right, and the placeholder never shows it. The key that opened the
dialog cannot confirm it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input

from console import facts
from console.drawing import Line, line, wrap
from console.screens.base import Lines
from console.screens.fields import HandTyped, TextLine
from console.values import Release

if TYPE_CHECKING:
    from console.app import FedConsole

REJECT_CODES = ("CONTENT", "TIMING", "POLICY", "UNEXPECTED", "OTHER")
DIGEST_TYPED_CHARACTERS = 4


@dataclass(frozen=True)
class Answer:
    """What a person decided on what was shown; the same answer sent twice has the same request id."""

    release: Release
    approve: bool
    acknowledged: tuple[str, ...] = ()  # ids of the findings that were opened
    reason_code: str = ""
    reason: str = ""
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def command(self) -> str:
        return "approvals.approve" if self.approve else "approvals.reject"

    def arguments(self) -> Mapping[str, Any]:
        """Bound to the exact bytes, the policy and the revision that were shown."""
        shown = {
            "release": self.release.id,
            "digest": self.release.digest,
            "policy_digest": self.release.policy_digest,
            "revision": self.release.revision,
        }
        opened = {"acknowledged": list(self.acknowledged)} if self.acknowledged else {}
        return shown | opened if self.approve else shown | {"reason_code": self.reason_code, "reason": self.reason}


class TypedWord(HandTyped):
    """The word that confirms."""

    async def action_submit(self) -> None:
        """Enter in the field signs nothing; the dialog says what is missing."""
        # called, not posted: keys that follow at once must find what this does to the field
        if isinstance(self.screen, ConfirmDialog):
            self.screen.entered()


class ConfirmDialog(ModalScreen[Answer | None]):
    """Ends with the answer, or with None."""

    CSS = """
    ConfirmDialog {
        align: center middle;
        #box { width: 72; max-width: 100%; height: auto; max-height: 100%; border: heavy $warning; background: $surface;
               padding: 0 1; border-title-color: $warning; }
        #what { margin-bottom: 1; }
        Input { height: 3; }
        #buttons { height: 3; margin-top: 0; }
        Button { margin-right: 2; }
        #why { color: $error; }
        &.-ascii #box { border: ascii $warning; }
        &.-ascii Input { border: ascii $secondary; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    def __init__(self, release: Release, *, approve: bool, signer: str, opened: Collection[str] = ()) -> None:
        super().__init__()
        self._opened = frozenset(opened)
        self._release = release
        self._approve = approve
        self._signer = signer
        self._entered = False
        self._request_id = secrets.token_hex(16)

    @property
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    def compose(self) -> ComposeResult:
        verb = "Approve" if self._approve else "Reject"
        with Vertical(id="box") as box:
            box.border_title = f"{verb} this release"
            yield Lines(id="what")
            yield Lines(id="ask")
            yield TypedWord(id="word", placeholder="type it here", max_length=24)
            if not self._approve:
                yield TextLine(
                    id="reason", placeholder="optional text; it stays at this site, in the audit log", max_length=200
                )
            yield Lines(id="why")
            with Horizontal(id="buttons"):
                yield Button(verb, id="confirm", variant="warning", disabled=True)
                yield Button("Cancel", id="cancel")

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        self.query_one("#word").focus()
        # once the box has its width: lines drawn before keep the height they had without it
        self.call_after_refresh(self.redraw)

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        cells = min(self.app.size.width, 72) - 4
        release = self._release
        effect = release.on_approve if self._approve else release.on_reject
        undone = "This cannot be undone." if self._approve else "The release cannot be brought back."
        what: list[Line] = [
            facts.signature_line(release),
            *wrap(f"Effect: {effect or facts.NOT_TOLD}.", cells),
            *wrap(f"{undone} Signed by {self._signer}.", cells, "warn"),
        ]
        self.query_one("#what", Lines).draw(what)
        word = "the last 4 characters of the digest" if self._approve else "a reason code"
        way = "Tab, Enter" if self._approve else "Tab, Tab, Enter"
        ask = [line("To go on, type ", (word, "strong"), ", then ", (way, "strong"), ":")]
        if not self._approve:
            ask.append(line((" ".join(REJECT_CODES), "accent")))
        self.query_one("#ask", Lines).draw(ask)
        why = self.why_not()
        told = wrap(why or self._missing(), cells, "bad") or self.fed.message_lines(cells)
        self.query_one("#why", Lines).draw(told)
        self.query_one("#confirm", Button).disabled = bool(why) or not self.word_fits()

    def word_fits(self) -> bool:
        typed = self.query_one("#word", Input).value.strip()
        if self._approve:
            wanted = self._release.digest[-DIGEST_TYPED_CHARACTERS:]
            return len(wanted) == DIGEST_TYPED_CHARACTERS and typed.lower() == wanted
        return typed.upper() in REJECT_CODES

    def why_not(self) -> str:
        if why := self.fed.why_not(self._release, approve=self._approve):
            return why
        # what the daemon has found since then counts, though bytes, policy and revision are the same
        there = self.fed.snapshot.release(self._release.id) or self._release
        left = there.not_opened(self._opened) if self._approve else ()
        return f"{facts.unread_text(left)}: esc, then open what was found" if left else ""

    def _missing(self) -> str:
        """After Enter in a field: why that did not sign."""
        if not self._entered:
            return ""
        if self.word_fits():
            way = "Tab" if self._in_last_field() else "Tab, Tab"
            return f"Enter signs nothing in a field: {way} to the button, then Enter."
        if self._approve:
            return f"These are not the last {DIGEST_TYPED_CHARACTERS} characters of the digest."
        return "This is no reason code: type one of those above."

    def _in_last_field(self) -> bool:
        return self._approve or not self.query_one("#word").has_focus

    @on(Input.Changed)
    def _typed(self) -> None:
        self._entered = False
        self.redraw()

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.entered()

    def entered(self) -> None:
        """Enter in a field: say what is missing. A wrong word is marked, so that what is typed next replaces it."""
        self._entered = True
        if not self.word_fits():
            self.query_one("#word", Input).action_select_all()
        self.redraw()

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
        """The button stood alone long enough; everything is asked once more."""
        if self.why_not() or not self.word_fits():
            self.redraw()
            return
        code = "" if self._approve else self.query_one("#word", Input).value.strip().upper()
        reason = "" if self._approve else self.query_one("#reason", Input).value
        opened = tuple(finding.id for finding in self._release.noticed) if self._approve else ()
        self.dismiss(Answer(self._release, self._approve, opened, code, reason, self._request_id))


class TextDialog(ModalScreen[None]):
    """Something to read, scrolled with the usual keys, left with escape or q."""

    CSS = """
    TextDialog {
        align: center middle;
        #box { width: 96%; height: 90%; border: round $accent; background: $surface; padding: 0 1; overflow-y: auto;
               border-title-color: $accent; }
        &.-ascii #box { border: ascii $accent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, title: str, lines: list[Line]) -> None:
        super().__init__()
        self._title = title
        self._lines = lines

    @property
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.can_focus = True
            box.border_title = Content(f"{self._title}: esc leaves")
            yield Lines(id="text")

    def on_mount(self) -> None:
        self.set_class(self.fed.ascii_only, "-ascii")
        self.query_one("#text", Lines).draw(self._lines)
        self.query_one("#box").focus()

    def redraw(self) -> None:
        """It shows what it was opened with."""

    def on_screen_resume(self) -> None:
        self.fed.came_on()

    def action_scroll(self, step: int) -> None:
        self.query_one("#box").scroll_relative(y=step, animate=False)

    def action_leave(self) -> None:
        self.dismiss(None)

"""Dialogs that ask before anything changes: what, with what effect, signed by whom, and a word to type.

Escape cancels. The focus starts in the field, Enter in a field signs nothing and says what is missing, a paste into it
does nothing, the button is off until the word is right, and the placeholder never shows it. The key that opened the
dialog cannot confirm it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
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
from console.drawing import Line, flow, line, wrap
from console.rule_words import REJECT_CODES
from console.screens.asking import BOX_CELLS, AskingDialog, TypedWord
from console.screens.base import Lines
from console.screens.fields import TextLine
from console.values import Release
from fedsilo.audit.record import note_text

if TYPE_CHECKING:
    from console.app import FedConsole

DIGEST_TYPED_CHARACTERS = 4
BRIEF_ROWS_MIN = 24  # below that the codes of a no take the row that names what leaves


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
        """Bound to the exact bytes, the policy and the revision that were shown; a yes to all facts that were."""
        shown = {
            "release": self.release.id,
            "digest": self.release.digest,
            "policy_digest": self.release.policy_digest,
            "revision": self.release.revision,
        }
        opened = {"acknowledged": list(self.acknowledged)} if self.acknowledged else {}
        return (
            shown | opened | {"shown": self.release.shown}
            if self.approve
            else shown | {"reason_code": self.reason_code, "reason": self.reason}
        )


class ConfirmDialog(AskingDialog[Answer | None]):
    """Ends with the answer, or with None."""

    CSS = AskingDialog.CSS.replace("AskingDialog", "ConfirmDialog")

    def __init__(
        self, release: Release, *, approve: bool, signer: str, opened: Collection[str] = (), note: str = ""
    ) -> None:
        super().__init__()
        self.note = note  # what was typed for a no, also where it was not signed: the next dialog begins with it
        self._opened = frozenset(opened)
        self._release = release
        self._approve = approve
        self._signer = signer
        self._request_id = secrets.token_hex(16)

    def compose(self) -> ComposeResult:
        verb = "Approve" if self._approve else "Reject"
        with Vertical(id="box") as box:
            box.border_title = f"{verb} this release"
            yield self.lines("what")
            yield self.lines("ask")
            yield TypedWord(id="word", placeholder="type it here", max_length=24)
            if not self._approve:
                yield TextLine(
                    self.note, id="reason", placeholder="optional note; it stays at this site, beside the audit log",
                    max_length=500, select_on_focus=False,
                )  # fmt: skip
            yield self.lines("why")
            with Horizontal(id="buttons"):
                yield Button(verb, id="confirm", variant="warning", disabled=True)
                yield Button("Cancel (esc)", id="cancel")

    def what(self, cells: int) -> list[Line]:
        release = self._release
        effect = release.on_approve if self._approve else release.on_reject
        undone = "This cannot be undone." if self._approve else "The release cannot be brought back."
        told = facts.brief(release, cells) if self._approve or self.app.size.height >= BRIEF_ROWS_MIN else []
        return [
            facts.signature_line(release),
            *told,
            *wrap(f"Effect: {effect or facts.NOT_TOLD}.", cells),
            *(facts.later(release, cells) if self._approve else []),
            *wrap(f"{undone} Signed by {self._signer}.", cells, "warn"),
        ]

    def asked(self) -> list[Line]:
        word = "the last 4 characters of the digest" if self._approve else "a reason code"
        way = "Tab, Enter" if self._approve else "Tab, Tab, Enter"
        ask = [line("To go on, type ", (word, "strong"), ", then ", (way, "strong"), ":")]
        if not self._approve:
            codes = [line((code, "accent"), f" {says}") for code, says in REJECT_CODES.items()]
            ask += flow(codes, min(self.app.size.width, BOX_CELLS) - 4)
        return ask

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

    def missing(self) -> str:
        if self.word_fits():
            way = "Tab" if self._in_last_field() else "Tab, Tab"
            return f"Enter signs nothing in a field: {way} to the button, then Enter."
        if self._approve:
            return f"These are not the last {DIGEST_TYPED_CHARACTERS} characters of the digest."
        return "This is no reason code: type one of those above."

    def _in_last_field(self) -> bool:
        return self._approve or not self.query_one("#word").has_focus

    @on(Input.Changed, "#reason")
    def _noted(self, event: Input.Changed) -> None:
        self.note = event.value

    def decided(self) -> Answer:
        code = "" if self._approve else self.query_one("#word", Input).value.strip().upper()
        reason = "" if self._approve else note_text(self.query_one("#reason", Input).value)
        opened = tuple(finding.id for finding in self._release.noticed) if self._approve else ()
        return Answer(self._release, self._approve, opened, code, reason, self._request_id)


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
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

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
        cells = max(self.app.size.width * 96 // 100 - 6, 30)  # within the border and beside the scroll bar
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

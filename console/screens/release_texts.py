"""What is read beside a held release, each as a screen below it: its payload, and all of it beside the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll

from console.actions import Context, command_line
from console.conditions import answer_lines, is_lost
from console.drawing import Line, line
from console.feed import Question
from console.reading import mapping
from console.release_lines import comparison_lines, payload_lines
from console.screens.base import FedScreen, Lines
from console.values import Release

COMPARISON, PAYLOAD = "comparison", "payload"  # keys of the answers


class TextScreen(FedScreen):
    """Lines of one release, scrolled.

    Args:
        release: as it was shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
        Binding("ctrl+d,pagedown", "pages(1)", show=False),
        Binding("ctrl+u,pageup", "pages(-1)", show=False),
        Binding("g,home", "end(False)", show=False),
        Binding("G,end", "end(True)", show=False),
    ]

    own_keys: ClassVar[str] = " esc Back  i JSON  Y Twin  ? Help"

    def __init__(self, release: Release) -> None:
        super().__init__()
        self.release = release

    def panes(self) -> ComposeResult:
        with VerticalScroll(id="body"):
            yield Lines(id="told")

    @property
    def body(self) -> VerticalScroll:
        return self.query_one("#body", VerticalScroll)

    def lines(self, cells: int) -> list[Line]:
        """All of what is read."""
        return []

    def draw(self) -> None:
        self.query_one("#told", Lines).draw(self.lines(self.app.size.width - 4), greyed=self.greyed)

    def on_mount(self) -> None:
        super().on_mount()
        for what in ("virtual_size", "scroll_y"):  # whether more is below is known once it is laid out
            self.watch(self.body, what, self._draw_footer, init=False)

    def _draw_footer(self) -> None:
        if self.is_mounted and not self.too_small:
            self.query_one("#footer", Lines).draw(self.footer(self.keys()))

    def keys(self) -> Line:
        below = self.body.max_scroll_y > 0 and self.body.scroll_target_y < self.body.max_scroll_y
        more = (("  j more below", "accent"),) if below else ()
        return (*line(self.own_keys), *more)

    def action_scroll(self, step: int) -> None:
        self.body.scroll_relative(y=step, animate=False)

    def action_pages(self, pages: int) -> None:
        self.body.scroll_relative(y=pages * max(self.room - 1, 1), animate=False)

    def action_end(self, last: bool) -> None:
        self.body.scroll_to(y=self.body.max_scroll_y if last else 0, animate=False)

    def context(self) -> Context:
        return replace(super().context(), release=self.release.id, digest=f"sha256:{self.release.digest}")


class ComparisonScreen(TextScreen):
    CSS = "ComparisonScreen { #body { height: 1fr; } }"
    called = "comparison"

    def wants(self) -> Mapping[str, Question]:
        return {COMPARISON: ("approval.comparison", {"release": self.release.id})}

    def lines(self, cells: int) -> list[Line]:
        fed = self.fed
        rows = answer_lines(fed.snapshot, COMPARISON, fed.now(), cells, opened_at=self.opened_at)
        told = self.inspected()
        if told is not None:
            return [*rows, *comparison_lines(mapping(told), cells)]
        ended = COMPARISON in fed.snapshot.refused or is_lost(fed.snapshot, COMPARISON)
        return rows if ended else [*rows, line((fed.glyphs.more, "dim"))]

    def inspected(self) -> Any:
        told = self.fed.snapshot.answers.get(COMPARISON)
        return told if mapping(told).get("release") == self.release.id else None

    def crumb(self) -> str:
        return "beside the last one"

    def twin(self) -> str:
        return command_line(("silo", "approvals", "diff", self.release.id))


class PayloadScreen(TextScreen):
    """What a ticket stands for, which is good for one look: asked for until it is there, and kept by this screen alone.

    Args:
        release: as it was shown.
        ticket: of the daemon, for the signed reading.
    """

    CSS = "PayloadScreen { #body { height: 1fr; } }"
    called = "payload"
    own_keys = " esc Back  Y Twin  ? Help"  # of its JSON only a part could be drawn; the lines have all of it
    ALLOW_SELECT: ClassVar[bool] = False  # what is selected may be copied out of the console

    def __init__(self, release: Release, ticket: str) -> None:
        super().__init__(release)
        self._ticket = ticket
        self._shown: Mapping[str, Any] | None = None

    def wants(self) -> Mapping[str, Question]:
        return {} if self._shown is not None else {PAYLOAD: ("approvals.payload", {"ticket": self._ticket})}

    def redraw(self) -> None:
        if self._shown is None:
            told = mapping(self.fed.snapshot.answers.get(PAYLOAD))
            if told.get("sha256") == self.release.digest:
                self._shown = told
        super().redraw()

    def lines(self, cells: int) -> list[Line]:
        fed = self.fed
        if self._shown is not None:
            return payload_lines(self._shown, cells, fed.glyphs)
        rows = answer_lines(fed.snapshot, PAYLOAD, fed.now(), cells, opened_at=self.opened_at)
        ended = PAYLOAD in fed.snapshot.refused or is_lost(fed.snapshot, PAYLOAD)
        return rows if ended else [*rows, line((fed.glyphs.more, "dim"))]

    def crumb(self) -> str:
        return "what would leave"

    def twin(self) -> str:
        person = self.fed.lock.person or "PERSON"
        return command_line(("silo", "approvals", "payload", self.release.id, "--operator", person))

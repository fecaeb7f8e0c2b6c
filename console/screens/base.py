"""What all screens share: content made only from safe parts, breakpoints, and telling the app when they come on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from textual import events
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from console.drawing import Line, in_ascii
from console.safe import safe

if TYPE_CHECKING:
    from console.app import FedConsole

# Meaning -> theme colour. No screen names a colour.
STYLES = {
    "": "$foreground",
    "dim": "$muted",
    "strong": "bold $foreground",
    "accent": "$accent",
    "ok": "$success",
    "warn": "bold $warning",
    "bad": "bold $error",
    "gone": "$muted strike",
}
CELLS_MIN, ROWS_MIN = 60, 16


def content_of(lines: Iterable[Line], *, greyed: bool = False, ascii_only: bool = False) -> Content:
    """Lines as content. There is no markup anywhere: a text cannot style itself or bind an action."""
    parts: list[tuple[str, str]] = []
    for index, row in enumerate(lines):
        if index:
            parts.append(("\n", ""))
        for text, style in row:
            shown = in_ascii(safe(text)) if ascii_only else safe(text)
            parts.append((shown, STYLES["dim"] if greyed else STYLES[style]))
    return Content.assemble(*parts)


class Lines(Static):
    """A widget that draws lines and nothing else."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(Content(""), id=id, classes=classes, markup=False)

    def draw(self, lines: Iterable[Line], *, greyed: bool = False) -> None:
        ascii_only = bool(getattr(self.app, "ascii_only", False))
        self.update(content_of(lines, greyed=greyed, ascii_only=ascii_only))


class FedScreen(Screen[None]):
    """A screen that redraws when a snapshot comes in, the clock ticks or the terminal changes size."""

    # Textual declares both for instances, so they cannot be ClassVar
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-medium"), (140, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012

    @property
    def fed(self) -> FedConsole:
        return cast("FedConsole", self.app)

    def redraw(self) -> None:
        raise NotImplementedError

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def on_screen_resume(self) -> None:
        self.fed.came_on()
        self.redraw()

    def footer(self, keys: Line) -> list[Line]:
        """The message of the moment in place of the keys: there it covers no fact."""
        return self.fed.message_lines(self.app.size.width - 2) or [keys]

    @property
    def too_small(self) -> bool:
        width, height = self.app.size
        return width < CELLS_MIN or height < ROWS_MIN

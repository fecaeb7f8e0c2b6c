"""The console's own themes: state colours of at least 4.5:1 on background, surface and panel.

Does not cover: a terminal of 16 or 256 colours, which puts the nearest of its own in their place.
"""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import App
from textual.filter import Monochrome, NoColor
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.theme import Theme

DARK = Theme(
    name="fed-dark",
    primary="#7fb4ff",
    secondary="#8fa3bf",
    accent="#6fd3e0",
    success="#7ddc8c",
    warning="#ffc66d",
    error="#ff8f8f",
    foreground="#e6e9ee",
    background="#0e1116",
    surface="#151a21",
    panel="#1c232d",
    dark=True,
    variables={"muted": "#9aa7b8", "footer-key-foreground": "#6fd3e0"},
)
LIGHT = Theme(
    name="fed-light",
    primary="#0b4f9e",
    secondary="#42546b",
    accent="#00616f",
    success="#0f6327",
    warning="#7a4a00",
    error="#a51520",
    foreground="#15191f",
    background="#ffffff",
    surface="#f4f6f8",
    panel="#e9edf2",
    dark=False,
    variables={"muted": "#4a5563", "footer-key-foreground": "#00616f"},
)
# No hue at all: words, glyphs and bold carry every state.
MONO = Theme(
    name="fed-mono",
    primary="#ffffff",
    secondary="#d0d0d0",
    accent="#ffffff",
    success="#f0f0f0",
    warning="#ffffff",
    error="#ffffff",
    foreground="#f0f0f0",
    background="#000000",
    surface="#101010",
    panel="#1c1c1c",
    dark=True,
    variables={"muted": "#b8b8b8", "footer-key-foreground": "#ffffff"},
)
THEMES = {theme.name: theme for theme in (DARK, LIGHT, MONO)}


class WholeCells(ScrollBarRender):
    """A scroll bar of whole cells: the library's ends in eighths of a cell, which ASCII has not."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "] * 8
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "] * 8


ScrollBar.renderer = WholeCells


def draw_without_colour(app: App[Any]) -> None:
    """No colour is written at all, not even a grey: NO_COLOR asks for the terminal's own two."""
    app._filters[:] = [each for each in app._filters if not isinstance(each, Monochrome)]
    app._filters.append(NoColor())

"""The size of the terminal, asked again with every tick: a resize of which the console heard nothing is drawn then.

Two ways in which one is lost for ever otherwise, and with it every later one of the first kind:

- Textual draws a resize once, by a timer of 1/120 s (`App._on_resize`, `App._resize_timer`). A one-shot `Timer` that
  skips late ticks and finds itself late at its start ends without its callback (`textual.timer.Timer._run`). Nothing
  clears it then, and while it is set no resize reaches a screen: the app knows its size, the screens keep theirs.
- The signal of a resize may come while nobody is there to hear it, such as between two programs of a terminal.

Also: whoever exports COLUMNS or LINES would pin the size, for `shutil.get_terminal_size` believes them first.

Only the terminal itself is believed: one that does not tell its size (no terminal, or 0 rows), and one that tells it in
band, with the keys, is left to Textual, since its own question would be answered with 80x24.

Does not cover: a browser, whose driver has no terminal to ask.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Any

from textual import events
from textual.app import App
from textual.geometry import Size

PINS = ("COLUMNS", "LINES")


def follow_terminal(app: App[Any]) -> None:
    """Repeat a resize that was not drawn.

    Args:
        app: whose size should be that of its terminal, and of its screens; one that draws on a whole terminal.
    """
    size = _terminal_size(app)
    if size is None or not app.screen_stack or app.size == app.screen.outer_size == size:
        return
    if app._resize_timer is not None:
        app._resize_timer.stop()
        app._resize_timer = None
    if app.size != size:
        app.post_message(events.Resize(size, size))
        return
    for screen in app.screen_stack:  # to the app itself a size that it has is no resize
        screen.post_message(events.Resize(size, size))


def _terminal_size(app: App[Any]) -> Size | None:
    """Of the terminal that the driver draws on; None where nobody may say."""
    drawn_on = getattr(app._driver, "_file", None)
    if drawn_on is None or getattr(app._driver, "_in_band_window_resize", False):
        return None
    try:
        width, height = os.get_terminal_size(drawn_on.fileno())
    except (OSError, ValueError):  # no terminal, or closed
        return None
    return Size(width, height) if width and height else None


def forget_pinned_size(environment: MutableMapping[str, str] = os.environ, *, on_terminal: bool | None = None) -> None:
    """Take what would pin the size out of the environment, where the console draws on a terminal: elsewhere, as behind
    `fedconsole serve`, it is how the size comes in."""
    if on_terminal is None:
        on_terminal = sys.__stdout__ is not None and sys.__stdout__.isatty()
    if on_terminal:
        for name in PINS:
            environment.pop(name, None)

"""What a screen looks like, kept beside the tests: its text, and in which style each cell of it is.

A test calls `compare(name, desk)`. `dumps/NAME.txt` has the text as it was when somebody last looked, and below it a
letter for each cell, after the colours and attributes that each letter means. All in plain text, so that a difference
can be read. To keep how it looks now, run the tests with KEEP_DUMPS=1 in the environment and read the difference before
committing it.

Does not notice: what a terminal makes of a colour, and which font draws it.
"""

from __future__ import annotations

import difflib
import os
import string
import tempfile
from pathlib import Path

from rich.segment import Segment
from rich.style import Style
from textual.widgets import Input

from tests.console.desk import Desk

FOLDER = Path(__file__).with_name("dumps")
OTHER_THEMES = ("fed-light", "fed-mono")
ATTRIBUTES = ("bold", "dim", "italic", "underline", "reverse", "strike", "blink", "conceal", "overline")


def compare(name: str, desk: Desk) -> None:
    """Raises AssertionError: it looks otherwise than what is kept; with the difference and where the new look lies."""
    text = "\n".join(line.rstrip() for line in desk.text.splitlines()).rstrip() + "\n"
    _same(FOLDER / f"{name}.txt", f"{text}\n{styles(desk)}")


async def compare_variants(name: str, desk: Desk) -> None:
    """The same screen in the other themes, of which only the styles differ, and in ASCII, of which the text does too.

    Raises:
        AssertionError: as `compare`.
    """
    before, text = desk.app.theme, desk.text
    for theme in OTHER_THEMES:
        desk.app.theme = theme
        await desk.pilot.pause()
        assert desk.text == text, f"{theme} draws other characters"
        compare(f"{name}-{theme}", desk)
    desk.app.theme, desk.app.ascii_only = before, True
    desk.app.redraw()
    await desk.pilot.pause()
    compare(f"{name}-ascii", desk)


def styles(desk: Desk) -> str:
    """A line for each style with its letter, in the order in which they come first, and a letter for each cell."""
    for field in desk.app.screen.query(Input):
        field.cursor_blink = False  # else whether the cursor is seen is a matter of the moment
    height = desk.app.size.height
    letters: dict[str, str] = {}
    rows = []
    for strip in desk.app.screen._compositor.render_strips()[:height]:
        rows.append("".join(_letter(segment, letters) * segment.cell_length for segment in strip))
    head = [f"{letter} {style}" for style, letter in letters.items()]
    return "\n".join([*head, "", *rows]) + "\n"


def _letter(segment: Segment, letters: dict[str, str]) -> str:
    style = segment.style or Style.null()
    colours = [colour.name if colour else "default" for colour in (style.color, style.bgcolor)]
    told = " ".join([*(name for name in ATTRIBUTES if getattr(style, name)), colours[0], "on", colours[1]])
    return letters.setdefault(told, string.ascii_letters[len(letters)])


def _same(path: Path, now: str) -> None:
    if os.environ.get("KEEP_DUMPS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(now, encoding="utf-8")
        return
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if kept == now:
        return
    written = Path(tempfile.mkdtemp(prefix="looks-")) / path.name
    written.write_text(now, encoding="utf-8")
    difference = difflib.unified_diff(kept.splitlines(), now.splitlines(), "kept", "now", lineterm="")
    raise AssertionError(
        "\n".join([f"kept: {path}", f"now:  {written}", "look at it; KEEP_DUMPS=1 keeps it", *difference])
    )

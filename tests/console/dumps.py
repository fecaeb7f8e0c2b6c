"""What a screen looks like, kept as plain text beside the tests.

A test calls `compare(name, desk)`; `dumps/NAME.txt` is what it looked like when somebody last looked. To keep how it
looks now, run the tests with KEEP_DUMPS=1 in the environment and read the difference before committing it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from tests.console.desk import Desk

FOLDER = Path(__file__).with_name("dumps")


def compare(name: str, desk: Desk) -> None:
    """Raises AssertionError: it looks otherwise than what is kept, with the difference."""
    text = "\n".join(line.rstrip() for line in desk.text.splitlines()).rstrip() + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("KEEP_DUMPS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert path.exists(), f"{path.name} is not kept: look at it, then run with KEEP_DUMPS=1\n{text}"
    kept = path.read_text(encoding="utf-8")
    difference = difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "now", lineterm="")
    assert kept == text, "\n".join(difference)

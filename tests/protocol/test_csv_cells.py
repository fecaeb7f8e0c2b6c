"""CSV for spreadsheets: one writer for all of them, of whose cells none is computed (T37)."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from fedsilo.cli.output import csv_text

ROOT = Path(__file__).parents[2]


def test_T37_every_cell_is_made_safe_and_read_back_alike() -> None:
    text = csv_text(("name", "@sum"), [('say "a, b"', -0.5), ("=1+1", None), ("two\nlines", True)])
    assert "\r" not in text and text.endswith("\n")
    assert list(csv.reader(io.StringIO(text))) == [
        ["name", "'@sum"], ['say "a, b"', "-0.5"], ["'=1+1", ""], ["two\\nlines", "true"],
    ]  # fmt: skip
    assert csv_text(("a", "b"), []) == "a,b\n"


def test_T37_there_is_no_second_writer() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("fedsilo", "console", "coordinator", "silo", "policies", "certs")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^\s*(import csv|from csv import)\b", path.read_text(), re.MULTILINE)
    }
    assert found == {"fedsilo/cli/output.py"}

"""The page on rounds is what the tables say."""

from __future__ import annotations

import re

import pytest

from fedsilo.protocol import rounds
from fedsilo.protocol.rounds import TABLES
from tools.rounds_page import PAGE, rounds_page


def test_the_page_on_rounds_is_what_the_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == rounds_page(), "run `make reference`"


def test_each_move_of_each_table_is_drawn_once() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): (.+)$", rounds_page(), flags=re.MULTILINE)
    arrows = [(state, to, event) for state, to, events in drawn for event in events.split(", ")]
    moves = [(state, cell.next, event) for table in TABLES.values() for state, row in table.items()
             for event, cell in row.items() if cell.next]  # fmt: skip
    assert sorted(arrows) == sorted(moves)


def test_a_table_that_is_changed_makes_the_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**rounds.RUN, "running": {**rounds.RUN["running"], "pause": rounds.BAD}}
    monkeypatch.setattr("tools.rounds_page.TABLES", {**TABLES, "run": changed})
    assert rounds_page() != PAGE.read_text(encoding="utf-8")

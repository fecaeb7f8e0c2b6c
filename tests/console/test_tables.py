"""The table widget on the example screen: pages, cursor, filter, sort, freeze, and nothing off to the side."""

from __future__ import annotations

from typing import Any

import pytest
from textual.widgets import Input

from console.lock import INERT_SECONDS
from console.table_screen import PAGE_ROWS, RowLines, TablePane
from tests.console.desk import SIZES, Desk, console
from tests.console.example_screen import ExampleScreen
from tests.console.states import silo


def message(seq: int, **changes: Any) -> dict[str, Any]:
    return {
        "seq": seq, "time": f"2026-12-01T09:{seq // 60 % 60:02d}:{seq % 60:02d}Z", "round": 1, "step": 0,
        "kind": "public.responses" if seq % 3 else "lora.factors", "items": "64", "bytes": 1000 + seq % 7,
        "verdict": "deny" if seq % 10 == 0 else "allow", "rule": "prompt ids" if seq % 10 == 0 else "kinds",
        "digest": f"{seq:064x}", "milliseconds": 4, **changes,
    }  # fmt: skip


def page(newest: int, oldest: int = 1, **changes: Any) -> dict[str, Any]:
    first = max(newest - PAGE_ROWS + 1, oldest)
    rows = [message(seq, **changes) for seq in range(newest, first - 1, -1)]
    return {"messages": rows, "total": newest, "held": 0, "denied": 0, "next": first if first > oldest else None}


async def opened(desk: Desk, newest: int = 250) -> TablePane:
    await desk.show(silo())
    await desk.open(ExampleScreen())
    await desk.answer("outbox", page(newest))
    return desk.app.screen.query_one(TablePane)


@pytest.mark.slow
async def test_changing_keys_rest_after_the_row_under_the_cursor_went_away_and_in_a_burst() -> None:
    async with console((100, 30)) as desk:
        table = await opened(desk)
        screen = desk.app.screen
        assert isinstance(screen, ExampleScreen)
        await desk.press("X")
        await desk.answer("outbox", page(251))
        await desk.press("X")
        assert screen.stopped == ["250", "250"]  # a row came in above, the row is the same
        await desk.answer("outbox", {**page(90), "next": None})
        assert table.rows.cursor == "89"
        await desk.pilot.press("X")
        await desk.wait(INERT_SECONDS + 0.1)
        assert screen.stopped == ["250", "250"]
        await desk.press("X")
        assert screen.stopped == ["250", "250", "89"]
        await desk.wait(1.0)
        await desk.pilot.press("j", "X", "X")
        await desk.wait(1.0)
        await desk.press("slash", "X", "enter")
        assert screen.stopped == ["250", "250", "89"]


@pytest.mark.parametrize("size", [(60, 16), *SIZES])
async def test_columns_go_by_width_and_nothing_is_off_to_the_side(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        table = await opened(desk)
        rows = table.query_one(RowLines)
        header = next(line for line in desk.text.splitlines() if " verdict" in line)
        assert "kind" in header and "time" in header
        assert ("round" in header) == (size[0] > 60) and ("digest" in header) == (size[0] >= 100)
        assert ("items" in header) == (size[0] >= 140)
        assert rows.virtual_size.width <= rows.size.width and rows.max_scroll_x == 0
        await desk.resize(140, 42)
        header = next(line for line in desk.text.splitlines() if " verdict" in line)
        assert "digest" in header and "items" in header


@pytest.mark.slow
async def test_a_filter_shows_what_passes_and_keys_typed_into_it_do_nothing_else() -> None:
    async with console((100, 30)) as desk:
        table = await opened(desk)
        await desk.press("slash", *"verdict:deny", "enter")
        assert [item.id for item in table.rows.shown] == [str(seq) for seq in range(250, 150, -10)]
        assert "Outbox · 10 of 250 · /verdict:deny" in desk.text
        await desk.press("slash", "end", *" !lora", "enter")  # without end it takes the place of what is there
        assert table.rows.filter_text == "verdict:deny !lora" and len(table.rows.shown) == 7
        await desk.press("slash", "end", *" AR1L", "enter")
        assert isinstance(desk.app.screen, ExampleScreen) and list(table.rows.shown) == []
        assert "none of 100 rows passes the filter" in desk.text
        await desk.press("escape")
        assert table.rows.filter_text == "" and isinstance(desk.app.screen, ExampleScreen)
        await desk.press("escape")
        assert not isinstance(desk.app.screen, ExampleScreen)


async def test_no_answer_to_another_question_is_shown() -> None:
    async with console((100, 30)) as desk:
        table = await opened(desk)
        table.ask_otherwise(("outbox", {"verdict": "deny"}))
        desk.app.tick()
        await desk.pilot.pause()
        assert table.key_asked == "outbox verdict deny" and not table.rows.arrived
        assert desk.app.wanted[table.key_asked] == ("outbox", {"verdict": "deny", "limit": PAGE_ROWS})
        await desk.answer("outbox", page(300))  # was on its way
        assert not table.rows.arrived and "09:05:00" not in desk.text
        await desk.answer(table.key_asked, {**page(250), "messages": [message(250)], "next": None})
        assert [item.id for item in table.rows.shown] == ["250"]
        table.ask_otherwise(("outbox", {}))
        assert table.key_asked == "outbox"


async def test_a_paste_into_the_filter_brings_no_control_character() -> None:
    from textual import events

    async with console((100, 30)) as desk:
        await opened(desk)
        await desk.press("slash")
        field = desk.app.screen.query_one(Input)
        field.post_message(events.Paste("\x1b]0;x\x07de\u202eny\nmore"))
        await desk.pilot.pause()
        assert field.value == "]0;xdeny"


@pytest.mark.slow
async def test_it_asks_for_pages_shows_the_newest_first_and_keeps_its_cursor() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.open(ExampleScreen())
        assert desk.app.wanted["outbox"] == ("outbox", {"limit": PAGE_ROWS})
        table = desk.app.screen.query_one(TablePane)
        await desk.answer("outbox", page(250))
        await desk.press("G")
        assert desk.app.wanted["outbox before 151"] == ("outbox", {"limit": PAGE_ROWS, "before": 151})
        await desk.answer("outbox before 151", page(150))
        assert table.rows.kept == 200
        await desk.press("escape")
        await desk.open(ExampleScreen())
        table = desk.app.screen.query_one(TablePane)
        await desk.answer("outbox", page(250))
        await desk.answer("outbox", page(290))
        assert table.rows.cursor == "290"  # nobody has moved
        await desk.press("j", "Y")
        desk.shows("copied: silo outbox show 289")
        await desk.press("i")
        desk.shows('"seq": 289,')
        await desk.press("escape")
        await desk.answer("outbox", page(2000))
        assert table.rows.cursor == "289" and "g goes to the newest" in desk.text
        await desk.press("g")
        await desk.answer("outbox", page(2001))
        assert "g goes to the newest" not in desk.text and table.rows.shown[0].id == "2001"
        await desk.press("space")
        assert "outbox" not in desk.app.wanted
        await desk.answer("outbox", page(3000))
        await desk.wait(41.0)
        desk.app.tick()
        await desk.pilot.pause()
        assert "FROZEN 00:4" in desk.text and table.rows.total == 2001
        await desk.press("space", "z")
        desk.shows(lacks=["FROZEN", "decided by"])  # one pane alone
        await desk.press("escape")
        desk.shows("decided by")
        await desk.press("escape")
        assert "outbox" not in desk.app.wanted

"""The audit screen without control messages, whichever way the daemon can leave them out, and records by number."""

from __future__ import annotations

import pytest

from console.screens.audit import AuditScreen, seeks_control
from console.table_screen import PAGE_ROWS
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
from tests.console.desk import console
from tests.console.states import silo
from tests.console.test_audit_screen import Log, answer_all, filter_by, is_poll, opened

CONTROL_KINDS = sorted(kind for kind in (OUTBOUND_KINDS | INBOUND_KINDS) if kind.startswith("control."))


async def test_the_log_opens_without_control_messages_as_the_outbox_does_and_c_adds_them() -> None:
    log = Log(1000, polls=True)
    async with console() as desk:
        screen = await opened(desk, log)
        assert ("audit", {"control": False, "limit": PAGE_ROWS}) in log.asked
        rows = [item.row for item in screen.table.rows.shown]
        assert len(rows) >= 100 and not [row for row in rows if is_poll(row)]
        assert [row["seq"] for row in rows if row["kind"] == "control.poll"]  # a refused one stays
        assert "c adds control messages" in desk.text and "c Control" in desk.text
        await desk.press("5")
        assert "c adds control messages" in desk.text and "c Control" in desk.text
        await desk.press("6", "c")
        await answer_all(desk, log)
        assert any(is_poll(item.row) for item in screen.table.rows.shown) and "c hides control messages" in desk.text
        await desk.press("c")
        await filter_by(desk, "event:egress")
        await answer_all(desk, log)
        assert ("audit", {"event": "egress", "control": False, "limit": PAGE_ROWS}) in log.asked
        await desk.press("c")
        await answer_all(desk, log)
        assert log.asked[-1] == ("audit", {"event": "egress", "limit": PAGE_ROWS})
        assert "c hides control messages" in desk.text


async def test_a_text_does_not_find_polls_by_what_no_column_shows_and_c_or_their_name_brings_them() -> None:
    log = Log(1000, polls=True)
    async with console() as desk:
        screen = await opened(desk, log)
        await filter_by(desk, "approval")
        await answer_all(desk, log)
        asked = {"text": "approval", "limit": PAGE_ROWS}
        assert log.asked[-1] == ("audit", {**asked, "control": False}) and "c adds control messages" in desk.text
        await desk.press("c")
        await answer_all(desk, log)
        assert log.asked[-1] == ("audit", asked) and "c adds" not in desk.text
        assert screen.table.control
    async with console() as desk:
        await opened(desk, log)
        await filter_by(desk, "poll")
        await answer_all(desk, log)
        assert "control" not in log.asked[-1][1] and "c hides control messages" in desk.text


async def test_a_daemon_that_cannot_leave_polls_out_is_told_of_and_they_are_left_out_here() -> None:
    log = Log(1000, polls=True)
    refused = ("INVALID_INPUT", "1 of the query's arguments are not known")
    async with console() as desk:
        await desk.show(silo())
        await desk.press("6")
        await desk.answer("audit", None, refused=refused)
        await answer_all(desk, log)
        screen = desk.app.screen
        assert isinstance(screen, AuditScreen)
        rows = [item.row for item in screen.table.rows.shown]
        assert rows and not [row for row in rows if is_poll(row)] and "control" not in log.asked[-1][1]
        assert any(row["kind"] == "control.poll" for row in rows)
        assert "this daemon cannot leave control messages out" in " ".join(desk.text.split())
        await desk.press("c")
        await answer_all(desk, log)
        assert any(is_poll(item.row) for item in screen.table.rows.shown) and "cannot" not in desk.text
    async with console() as desk:
        await desk.show(silo())
        await desk.press("6")
        await desk.answer("audit", None, refused=("NOT_ALLOWED", "bob may not read this"))
        screen = desk.app.screen
        assert isinstance(screen, AuditScreen)
        assert "not allowed: bob may not read this" in desk.text and not screen.table.control_refused


async def test_a_number_alone_after_the_colon_goes_to_that_record_and_says_where_there_is_none() -> None:
    log = Log(5000)
    async with console((100, 30)) as desk:
        screen = await opened(desk, log)
        await desk.press("colon", *"1200")
        assert "record 1200 on this screen" in desk.text
        await desk.press("enter")
        await answer_all(desk, log)
        assert screen.table.rows.cursor == "1200" and screen.table.control  # it may be a poll's
        await desk.press("escape")
        await answer_all(desk, log)
        assert "4999" in desk.text and not screen.table.control  # back to the newest, and to what was left out
        await desk.press("colon", *"5000", "enter")
        assert "the log has 5,000 records, the newest is 4999" in desk.text
        await desk.press("1", "colon", *"1200")
        assert "nothing fits" in desk.text  # here a number names nothing


@pytest.mark.parametrize(
    "typed",
    [*CONTROL_KINDS, "/declined", "abstain", "control.*", "control.po", "error", "polls", "event:ingress.polls"],
)
def test_every_control_message_can_be_looked_for_by_its_name(typed: str) -> None:
    assert (
        seeks_control(typed.removeprefix("/"))
        and not seeks_control("lora.factors")
        and not seeks_control("!declined x")
    )

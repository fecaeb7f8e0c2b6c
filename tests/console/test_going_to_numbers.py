"""A number alone after `:` on the screens that count: the record of that number, or that there is none."""

from __future__ import annotations

from console.screens.outbox import MessageScreen, OutboxScreen
from tests.console.desk import console
from tests.console.states import coordinator, silo


async def test_a_number_opens_that_message_whichever_way_it_went_and_one_that_is_none_is_told_of() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("5", "colon", *"118")
        assert "outbox record 118 on this screen" in desk.text
        await desk.press("enter")
        assert isinstance(desk.app.screen, MessageScreen)
        assert desk.app.wanted["outbox record 118"] == ("outbox", {"seq": 118})
        await desk.answer("outbox record 118", None, ("NOT_FOUND", "there is no message with record 118"))
        assert "there is no message with record 118" in desk.text
        await desk.press("escape", "tab", "colon", *"7", "enter")
        assert desk.app.wanted["inbox record 7"] == ("inbox", {"seq": 7})
        await desk.press("escape", "colon", *"9" * 16, "enter")
        assert isinstance(desk.app.screen, OutboxScreen) and "no record has a number of that length" in desk.text


async def test_the_inbox_is_a_place_to_go_to_with_or_without_a_number() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("colon", *"inbox", "enter")
        await desk.pilot.pause()
        assert isinstance(desk.app.screen, OutboxScreen) and "inbox" in desk.app.wanted
        await desk.press("1", "colon", *"inbox 12", "enter")
        await desk.pilot.pause()
        assert isinstance(desk.app.screen, MessageScreen) and "inbox record 12" in desk.app.wanted
        await desk.press("escape", "tab", "1", "colon", *"outbox 12", "enter")
        await desk.pilot.pause()
        assert "outbox record 12" in desk.app.wanted


async def test_where_rows_are_counts_a_number_names_nothing() -> None:
    async with console((100, 30)) as desk:
        await desk.show(coordinator())
        await desk.press("5", "colon", *"118")
        assert "nothing fits" in desk.text

"""What is the same on every screen: places, `:`, palette, help, twin, JSON, next need, sizes, texts that are opened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual import events
from textual.widgets import Input

from console.actions import ACTIONS, JSON_LINES_MAX, actions_on, json_lines, title_of
from console.app import FedConsole
from console.base import TextDialog, TooSmall
from console.dialogs import ChooseDialog, ConfirmDialog, NoPaste, OrderDialog, by_letters, things_to_do
from console.screens.approval import ApprovalScreen
from console.screens.overview import OverviewScreen
from fedsilo.views.conditions import answer_lines, denied_lines, empty_lines, refused_lines
from fedsilo.views.lines import line, to_text
from fedsilo.views.state import Link, Snapshot
from tests.console.desk import Desk, console, open_dialog, type_word
from tests.console.example_screen import ExampleScreen
from tests.console.states import DIGEST, coordinator, live, release, silo
from tests.console.test_tables import opened

SMALL, WIDE = (80, 24), (140, 42)


async def resized(desk: Desk, *sizes: tuple[int, int]) -> None:
    for size in sizes:
        await desk.resize(*size)


# ---- places ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_places_are_gone_to_by_digits_and_beginnings_and_keep_their_cursor() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release(), release(id="r1/hospital_a/1")))
        await desk.press("n")
        assert desk.app.top.context().release == "r1/hospital_a/1"  # n goes to the next need, and wraps
        await desk.press("n", "j", "enter")
        desk.shows("Overview > r1/hospital_a/1 esc back")
        await desk.press("1")
        assert isinstance(desk.app.screen, OverviewScreen) and desk.app.top.context().release == "r1/hospital_a/1"
        await desk.press("enter", "n")
        assert isinstance(desk.app.screen, OverviewScreen) and desk.app.top.context().release == "r1/hospital_a/0"
        await desk.press("escape", "q")
        desk.shows("ctrl+q ends the console")
        await desk.go("r1/hospital_a/0")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.go("over")
        assert isinstance(desk.app.screen, OverviewScreen)
        await desk.go("nowhere")
        assert isinstance(desk.app.screen, ChooseDialog)
        await desk.press("escape", "colon", "up", "up", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen)


@pytest.mark.slow
async def test_only_what_is_on_top_is_asked_for() -> None:
    async with console((100, 30)) as desk:
        assert desk.app.wanted == {}
        await opened(desk)
        for keys, wanted in (((), {"outbox", "halts"}), (("question_mark",), {"outbox", "halts"})):
            await desk.press(*keys)
            assert set(desk.app.wanted) == wanted  # below the help it can still be seen
        await desk.press("escape")
        await desk.show(silo(release()))
        desk.app.open_release(desk.app.snapshot.held[0])
        await desk.pilot.pause()
        assert set(desk.app.wanted) == {"halts"}
        await desk.press("escape")
        assert set(desk.app.wanted) == {"outbox", "halts"}
        await desk.press("n")
        assert isinstance(desk.app.screen, OverviewScreen) and set(desk.app.wanted) == {"halts"}
        await desk.show(coordinator())
        assert set(desk.app.wanted) == {"overview figures"}  # which have room here


@pytest.mark.slow
async def test_the_palette_finds_by_letters_asks_the_same_questions_and_bursts_open_nothing() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        await desk.press("enter", "ctrl+p", *"approve", "enter")
        desk.shows("approve: LOCKED")
        desk.unlock()
        await desk.press("ctrl+p", *"polrule", "enter")
        assert isinstance(desk.app.screen, TextDialog)
        await desk.press("escape", "ctrl+p", *"approve")
        desk.shows(lacks=["Screenshot"])
        await desk.show(silo(release()))
        assert await desk.sends("enter") == [] and isinstance(desk.app.screen, ConfirmDialog)
        await desk.press("escape", "ctrl+p", *"nothing at all like it", "enter", "escape")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.wait(0.5)
        await desk.pilot.press("ctrl+p", *"approve", "enter")
        await desk.wait(0.5)
        assert not isinstance(desk.app.screen, ConfirmDialog)
        field = desk.app.screen.query_one(NoPaste)
        field.post_message(events.Paste("approve"))
        await desk.pilot.pause()
        assert field.value == "approve"  # as typed, not twice


@pytest.mark.slow
async def test_the_palette_finds_what_is_called_so_before_what_is_told_so_and_before_what_changes_something() -> None:
    def titles(typed: str) -> list[str]:
        return [entry.name for entry in by_letters(typed, things_to_do(desk.app))]

    async with console() as desk:
        await desk.show(silo(release()))
        assert titles("theme")[0] == "theme" and "stop this silo" not in titles("theme")
        for typed in ("p", "s", "l", "o", "sto", "re", "the"):
            found = titles(typed)
            called_so = {name for name in found if name.startswith(typed)}
            assert set(found[: len(called_so)]) == called_so, typed
        before = desk.app.theme
        await desk.press("ctrl+p", *"theme", "enter")
        assert desk.app.theme != before and isinstance(desk.app.screen, OverviewScreen)


def test_no_name_of_the_program_is_shown_to_people_and_no_key_means_the_opposite_elsewhere() -> None:
    for action in ACTIONS:
        assert "_" not in action.title and title_of(action.name), action.name
    for screens in ("overview", "approval", "audit", "outbox", "round", "curves", "budget", "logs"):
        there = [action.title for action in actions_on(screens, "table", "ordering", "ordering a silo")]
        assert len(set(there)) == len(there)
    assert len({action.says.partition(",")[2] for action in ACTIONS if action.name == "control"}) == 1


@pytest.mark.slow
async def test_help_and_json_are_of_this_screen() -> None:
    async with console((100, 60)) as desk:
        await desk.press("i")
        desk.shows("nothing is selected here")
        await desk.show(silo(release()))
        for keys, facts, lacks in (
            (("question_mark",), ("silo pause --operator PERSON", "off now: LOCKED"), ["fedsilo run abort"]),
            (("escape", "i"), ('"id": "r1/hospital_a/0"',), []),
            (("escape", "enter", "i"), ('"id": "r1/hospital_a/0"',), []),
            (("escape", "question_mark"), ("silo approvals approve r1/hospital_a/0", "off now: LOCKED"), ["filter:"]),
        ):
            await desk.press(*keys)
            desk.shows(*facts, lacks=lacks)


def test_long_json_is_cut_with_a_count() -> None:
    text = to_text(json_lines({"rows": [{"a": {"b": {"c": {"d": {"e": index}}}}} for index in range(1000)]}, 80))
    assert "more lines" in text and len(text.splitlines()) == JSON_LINES_MAX + 1
    assert '\n              "e": 0' in text  # as deep as it is, not "<+2>"
    assert "<+10002 characters>" in to_text(json_lines("ab" * 6000, 80))


@pytest.mark.parametrize("replay", [None, object()])
async def test_replay_keys_are_told_where_something_is_played_back(replay: Any) -> None:
    app = FedConsole(banner=lambda: "REPLAY", replay=replay, driven_by_hand=True)
    async with app.run_test(size=(100, 60)) as pilot:
        await pilot.pause()
        keys = {action.shown_key for action in actions_on(*app.top.tags)}
        assert ({".", "<"} <= keys) is (replay is not None)


# ---- what concerns every screen ----------------------------------------------------------------------


@pytest.mark.slow
async def test_what_concerns_every_screen_stands_on_every_screen() -> None:
    ends = {"certificate_until": "2026-12-02T10:00:00+00:00"}
    async with console() as desk:
        for changes, skew, told in (
            (ends, 0.0, "this silo's certificate ends in 24 hours"),
            ({"halted": "LOG_FULL"}, 0.0, "HALTED: LOG_FULL"),
            ({}, -95.0, "clocks differ by 95 s"),
        ):
            shown = replace(live(silo(release(), **changes), at=desk.now), skew_seconds=skew)
            await desk.show(shown)
            desk.shows(told)
            for screen in (ApprovalScreen, ExampleScreen):
                if screen is ApprovalScreen:
                    desk.app.open_release(desk.app.snapshot.held[0])
                    await desk.pilot.pause()
                else:
                    await desk.open(ExampleScreen())
                await desk.show(replace(shown, link=replace(shown.link, received_at=desk.now)))
                assert isinstance(desk.app.screen, screen)
                desk.shows(told)
                await desk.press("escape")


async def test_the_terminals_title_counts_the_needs_and_says_nothing_of_a_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with console() as desk:
        written: list[str] = []
        monkeypatch.setattr(desk.app._driver, "write", written.append)
        await desk.show(silo(silo="\x1b]2;evil\x07"))
        await desk.show(silo(release(id="\x1b]2;evil\x07"), release(id="r1/hospital_a/1")))
        await desk.show(silo())
        titles = [text for text in written if "]2;" in text]
        assert titles == ["\x1b]2;(2) fedconsole\x07", "\x1b]2;fedconsole\x07"]


@pytest.mark.slow
async def test_stale_and_disconnected_grey_every_screen_and_keep_what_was_known() -> None:
    async with console() as desk:
        await desk.open(ExampleScreen())
        desk.shows("loading", "verdict", lacks=["no messages"])  # its frame, and no data
        table = await opened(desk)
        assert not table.fed_screen.greyed
        await desk.wait(10.0)
        desk.app.tick()
        await desk.pilot.pause()
        assert table.fed_screen.greyed
        desk.shows("STALE 00:10", "public.responses")
        gone = replace(desk.app.snapshot, link=Link("disconnected", "nothing listens there", "", 100.0, desk.now + 9))
        await desk.show(gone)
        desk.shows("DISCONNECTED", "nothing listens there", "r tries now", "public.responses")


FRESH = replace(live(silo()), answers={"outbox": {}}, answered_at={"outbox": 100.0})


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (answer_lines(live(silo()), "outbox", 101.0, 80, opened_at=100.0), ""),
        (answer_lines(live(silo()), "outbox", 103.0, 80, opened_at=100.0),
         "loading: waiting for the daemon's answer to outbox since 00:03"),
        (answer_lines(FRESH, "outbox", 103.0, 80, opened_at=90.0), ""),
        (answer_lines(FRESH, "outbox", 106.0, 80, opened_at=90.0),
         "as of 00:06 ago: the daemon has not answered since"),
        (answer_lines(Snapshot(), "outbox", 100.5, 80, opened_at=100.0), ""),
        (refused_lines("NOT_ALLOWED", "no role", 80), "not allowed: no role"),
        (refused_lines("FAILED", "disk full", 80), "error: disk full [FAILED]"),
        (empty_lines("rounds", "fedsilo run submit", 80), "no rounds yet\nfedsilo run submit"),
        (denied_lines("prompt ids", "63", "64", "remove item 17", 80),
         "DENY prompt ids: measured 63, limit 64\nwould pass: remove item 17"),
    ],
)  # fmt: skip
def test_what_a_screen_says_when_it_has_nothing(lines: Any, told: str) -> None:
    assert to_text(lines) == told


# ---- sizes -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("key", ["R", "question_mark"])
async def test_what_is_below_a_dialog_is_whole_again_after_the_terminal_was_larger(key: str) -> None:
    async with console(SMALL) as desk:
        await open_dialog(desk, key)
        await desk.press("escape")
        held, before = desk.app.screen, desk.text.splitlines()[2:]  # without what ages
        await desk.press(key)
        await resized(desk, WIDE, SMALL)
        await desk.press("escape")
        await desk.show(silo(release()))
        assert desk.app.screen is held and desk.text.splitlines()[2:] == before
        body, width = held.query_one("#body"), held.query_one("#column").size.width
        assert body.max_scroll_y == 0 and not body.show_vertical_scrollbar
        await resized(desk, (80, 16))  # a text wraps alike with a scroll bar and without
        assert body.show_vertical_scrollbar and held.query_one("#column").size.width == width == 78


@pytest.mark.parametrize("size", [(40, 10), (200, 15), (20, 3)])
async def test_a_refusal_is_wrapped_and_is_all_there_is(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo(release()))
        told = f"needs 60x16, has {size[0]}x{size[1]}; 1 needs you; as text: silo status"
        assert told.startswith(desk.words) and (desk.words == told or size == (20, 3))
        assert max(map(len, desk.text.splitlines())) <= size[0]
        await desk.press("question_mark")
        assert isinstance(desk.app.screen, TooSmall) and "Help" not in desk.text
        await resized(desk, (60, 16))
        assert isinstance(desk.app.screen, TextDialog) and "needs 60x16" not in desk.text


@pytest.mark.slow
@pytest.mark.parametrize(("dialog", "size"), [("A", (50, 15)), ("question_mark", (50, 42)), ("colon", (140, 15))])
async def test_a_dialog_without_room_is_covered_takes_no_key_and_stands_there_again(
    dialog: str, size: tuple[int, int]
) -> None:
    async with console(SMALL) as desk:
        await open_dialog(desk, dialog)
        asked = desk.app.screen
        assert isinstance(asked, OrderDialog | TextDialog | ChooseDialog)
        if dialog == "A":
            await type_word(desk, DIGEST[-4:-1])
        await resized(desk, size)
        await type_word(desk, DIGEST[-1])
        assert await desk.sends("tab", "enter", "escape", "q") == [] and isinstance(desk.app.screen, TooSmall)
        await resized(desk, SMALL)
        assert desk.app.screen is asked and "needs 60x16" not in desk.text
        if dialog == "A":  # as it was left, and it can be finished
            assert asked.query_one("#word", Input).value == DIGEST[-4:-1]
            await desk.show(silo(release()))
            await type_word(desk, DIGEST[-1])
            assert [sent[1] for sent in await desk.sends("tab", "enter")] == ["approvals.approve"]


# ---- texts -------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_each_key_that_moves_a_text_does_and_more_is_said_until_its_end() -> None:
    more = "j for more"
    async with console(ascii_only=True, theme_name="fed-mono") as desk:
        await desk.show(silo())
        dialog = TextDialog("Read this", [line(f"line {number} of it") for number in range(200)])
        desk.app.push_screen(dialog)
        await desk.pilot.pause()
        await desk.pilot.pause()
        page, at = dialog.box.size.height - 1, 0
        assert more in desk.text and desk.text.isascii()
        for keys, step in (
            (("j", "down"), 1), (("k", "up"), -1), (("space", "pagedown", "ctrl+d"), page),
            (("b", "pageup", "ctrl+u"), -page),
        ):  # fmt: skip
            for key in keys:
                await desk.press(key)
                at += step
                assert dialog.box.scroll_y == at, key
        for end, start in (("end", "home"), ("G", "g")):
            await desk.press(end)
            desk.shows("line 199 of it", lacks=[more])
            await desk.press(start)
            desk.shows("line 0 of it", more)
        await desk.press("q")
        desk.app.push_screen(TextDialog("Read this", [line("all of it")] * 10))
        await desk.pilot.pause()
        assert more not in desk.text
        await resized(desk, (80, 10 + 6))
        assert isinstance(desk.app.screen, TextDialog)

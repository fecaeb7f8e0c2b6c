"""What is the same on every screen: places, `:`, palette, help, twin, JSON, next need, and what concerns them all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual import events

from console.actions import ACTIONS, JSON_LINES_MAX, actions_on, json_lines, title_of
from console.app import ToldConsole, ToldLock
from console.base import TextDialog
from console.dialogs import ChooseDialog, ConfirmDialog, by_letters, things_to_do
from console.feed import Store
from console.screens.approval import ApprovalScreen
from console.screens.overview import OverviewScreen
from fedsilo.views.conditions import answer_lines, denied_lines, empty_lines, refused_lines
from fedsilo.views.lines import UNICODE, to_text
from fedsilo.views.overview import Lock, top_bar
from fedsilo.views.state import Link, Snapshot
from tests.console.desk import SIZES, Desk, console
from tests.console.example_screen import ExampleScreen
from tests.console.states import NOW, Reading, coordinator, live, release, silo
from tests.console.test_tables import opened

HALT = {"kind": "public.responses", "since": NOW - 600, "digest": "ab" * 32, "needed": 2, "given": ["alice"]}
HALTED = {"screens": {"halts": ["public.responses"], "troubles": []}}


def over(desk: Desk) -> ApprovalScreen | ExampleScreen | OverviewScreen:
    return desk.app.top  # type: ignore[return-value]


def needs_column(desk: Desk) -> str:
    """The text of the needs, which stand in a column of their own on a wide terminal."""
    first = 92 if desk.app.size.width >= 140 else 0
    return " ".join(" ".join(line[first:] for line in desk.text.splitlines()[1:]).replace("│", " ").split())


# ---- places ----------------------------------------------------------------------------------------


async def test_digits_go_to_places_and_escape_comes_back() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        assert "1·Overview" in desk.text.splitlines()[1]
        await desk.press("enter")
        assert "Overview > r1/hospital_a/0  esc back" in desk.text
        await desk.press("1")
        assert isinstance(desk.app.screen, OverviewScreen)
        await desk.press("enter", "escape")
        assert isinstance(desk.app.screen, OverviewScreen)
        await desk.press("escape")
        assert "this is the first screen: ctrl+q ends the console" in desk.text


async def test_a_place_keeps_its_cursor_while_one_is_elsewhere() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release(), release(id="r1/hospital_a/1")))
        await desk.press("j", "enter", "1")
        assert over(desk).context().release == "r1/hospital_a/1"


async def test_only_what_is_on_top_is_asked_for() -> None:
    async with console((100, 30)) as desk:
        assert desk.app.wanted == {}
        await opened(desk)
        assert set(desk.app.wanted) == {"outbox", "halts"}
        await desk.press("question_mark")
        assert set(desk.app.wanted) == {"outbox", "halts"}  # it can still be seen
        await desk.press("escape")
        await desk.show(silo(release()))
        desk.app.open_release(desk.app.snapshot.held[0])
        await desk.pilot.pause()
        assert set(desk.app.wanted) == {"halts"}  # it cannot
        await desk.press("escape")
        assert set(desk.app.wanted) == {"outbox", "halts"}
        await desk.press("escape")
        assert set(desk.app.wanted) == {"halts"}
        await desk.show(coordinator())
        assert set(desk.app.wanted) == {"overview figures"}  # which have room here


async def test_colon_goes_by_beginnings_and_remembers() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        await desk.press("colon", *"r1/", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen)
        await desk.press("colon", *"over", "enter")
        assert isinstance(desk.app.screen, OverviewScreen)
        await desk.press("colon", *"nowhere", "enter")
        assert isinstance(desk.app.screen, ChooseDialog) and "nothing fits" in desk.text
        await desk.press("escape", "colon", "up", "up", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen)


async def test_the_palette_finds_by_letters_and_asks_the_same_questions() -> None:
    async with console((100, 30)) as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("enter", "ctrl+p", *"polrule", "enter")
        assert isinstance(desk.app.screen, TextDialog) and "L2 of the delta" in desk.text
        await desk.press("escape", "ctrl+p", *"approve")
        assert "Screenshot" not in desk.text
        await desk.show(silo(release()))
        await desk.press("enter")
        assert isinstance(desk.app.screen, ConfirmDialog) and await desk.answers_sent() == []
        await desk.press("escape", "ctrl+p", *"nothing at all like it", "enter", "escape")
        assert isinstance(desk.app.screen, ApprovalScreen)


def titles(desk: Desk, typed: str) -> list[str]:
    return [entry.name for entry in by_letters(typed, things_to_do(desk.app))]


async def test_the_palette_finds_what_is_called_so_before_what_is_told_so_and_before_what_changes_something() -> None:
    async with console() as desk:
        await desk.show(silo(release()))
        assert titles(desk, "theme")[0] == "theme" and "stop this silo" not in titles(desk, "theme")
        assert titles(desk, "stop")[0] == "stop this silo"
        for typed in ("p", "s", "l", "o", "sto", "re", "the"):
            found = titles(desk, typed)
            called_so = {name for name in found if name.startswith(typed)}
            assert set(found[: len(called_so)]) == called_so, typed
        before = desk.app.theme
        await desk.press("ctrl+p", "t", "h", "e", "m", "e", "enter")
        assert desk.app.theme != before and isinstance(desk.app.screen, OverviewScreen)


def test_no_name_of_the_program_is_shown_to_people() -> None:
    for action in ACTIONS:
        assert "_" not in action.title and title_of(action.name), action.name
    for screens in ("overview", "approval", "audit", "outbox", "round", "curves", "budget", "logs"):
        there = [action.title for action in actions_on(screens, "table", "ordering", "ordering a silo")]
        assert len(set(there)) == len(there), [title for title in there if there.count(title) > 1]


def test_a_key_does_not_mean_the_opposite_on_another_screen() -> None:
    """What polls are is left out at first wherever there is a key for them, and the key adds them."""
    told = {action.says.partition(",")[2].strip() for action in ACTIONS if action.name == "control"}
    assert told == {"and without"}


async def test_a_burst_of_keys_through_the_palette_opens_no_dialog() -> None:
    async with console((100, 30)) as desk:
        desk.unlock()
        await desk.show(silo(release()))
        await desk.press("enter")
        await desk.wait(0.5)
        await desk.pilot.press("ctrl+p", *"approve", "enter")
        await desk.wait(0.5)
        assert not isinstance(desk.app.screen, ConfirmDialog)
        for dialog in (desk.app.screen,):
            field = dialog.query("ChooseLine").first()
            field.post_message(events.Paste("approve"))
            await desk.pilot.pause()
            assert field.value == "approve"  # type: ignore[attr-defined]  # as typed, not twice


async def test_locked_the_palette_says_why_not() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release()))
        await desk.press("enter", "ctrl+p", *"approve", "enter")
        assert isinstance(desk.app.screen, ApprovalScreen) and "approve: LOCKED" in desk.text


async def test_help_is_of_this_screen_with_commands_and_why_something_is_off() -> None:
    async with console((100, 60)) as desk:
        await desk.show(silo(release()))
        await desk.press("enter", "question_mark")
        words = " ".join(desk.text.split())
        assert "silo approvals approve r1/hospital_a/0" in words and "off now: LOCKED: press L to unlock" in words
        assert "filter: text" not in words
        await desk.press("escape", "escape", "question_mark")
        words = " ".join(desk.text.split())
        assert "open the release under the cursor" in words and "silo pause --operator PERSON" in words
        assert "off now: LOCKED" in words and "fedsilo run abort" not in words  # that is a coordinator's


async def test_i_shows_the_json_behind_what_is_selected() -> None:
    async with console() as desk:
        await desk.press("i")
        assert "nothing is selected here" in desk.text
        await desk.show(silo(release()))
        await desk.press("i")
        assert '"id": "r1/hospital_a/0"' in desk.text
        await desk.press("escape", "enter", "i")
        assert '"id": "r1/hospital_a/0"' in desk.text


def test_long_json_is_cut_with_a_count() -> None:
    text = to_text(json_lines({"rows": [{"a": {"b": {"c": {"d": {"e": index}}}}} for index in range(1000)]}, 80))
    assert "more lines" in text and len(text.splitlines()) == JSON_LINES_MAX + 1
    assert '\n              "e": 0' in text  # as deep as it is, not "<+2>"
    assert "<+10002 characters>" in to_text(json_lines("ab" * 6000, 80))


async def test_n_goes_to_the_next_need_from_anywhere_and_wraps() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo(release(), release(id="r1/hospital_a/1")))
        await desk.press("n")
        assert over(desk).context().release == "r1/hospital_a/1"
        await desk.press("n")
        assert over(desk).context().release == "r1/hospital_a/0"
        await desk.press("enter", "n")
        assert isinstance(desk.app.screen, OverviewScreen) and over(desk).context().release == "r1/hospital_a/1"
        await opened(desk)
        await desk.press("n")
        assert isinstance(desk.app.screen, OverviewScreen)


# ---- needs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_T18_a_halted_kind_needs_a_person_and_names_the_command(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo())
        assert "nothing needs you" in desk.text
        await desk.show(silo(**HALTED))
        assert "1 needs you" in desk.text and "public.responses HALTED" in needs_column(desk)
        await desk.answer("halts", {"halts": [HALT]})
        assert "1 needs you" in desk.text and "1 of 2 approved its release" in needs_column(desk)
        await desk.press("enter")
        assert "silo approvals release public.responses" in " ".join(desk.text.split())
        await desk.press("Y")
        assert "copied: silo approvals release public.responses" in " ".join(desk.text.split())


def test_T18_a_halt_that_only_the_query_knows_is_a_need_too() -> None:
    from fedsilo.views.overview import needs_of

    snapshot = replace(live(silo()), answers={"halts": {"halts": [{**HALT, "kind": "equivocation"}]}})
    assert [need.key for need in needs_of(snapshot, 100.0)] == ["halt equivocation"]
    for junk in ({"halts": None}, [], {"halts": [3, None, {"kind": None}]}):
        needs_of(replace(live(silo()), answers={"halts": junk}), 100.0)


async def test_a_screen_that_cannot_run_is_told() -> None:
    trouble = "policy.yaml:12: public.responses is denied while its screen overlap cannot run: no index"
    async with console((140, 42)) as desk:
        await desk.show(silo(screens={"halts": [], "troubles": [trouble]}))
        assert "its screen overlap cannot run: no index" in needs_column(desk)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"certificate_until": "2026-12-02T10:00:00+00:00"}, "this silo's certificate ends in 24 hours"),
     ({"certificate_until": "2026-11-30T10:00:00+00:00"}, "this silo's certificate HAS ENDED"),
     ({"halted": "LOG_FULL"}, "HALTED: LOG_FULL")],
)  # fmt: skip
@pytest.mark.parametrize("size", SIZES)
async def test_what_concerns_every_screen_stands_on_every_screen(
    size: tuple[int, int], changes: dict[str, Any], told: str
) -> None:
    async with console(size) as desk:
        await desk.show(silo(release()))
        assert told not in desk.text
        await desk.press("j", "enter")
        for screen in (ApprovalScreen, OverviewScreen):
            await desk.show(silo(release(), **changes))
            assert isinstance(desk.app.screen, screen) and told in " ".join(desk.text.replace("│", " ").split())
            await desk.press("escape")
        await desk.open(ExampleScreen())
        assert told in desk.text


async def test_clocks_that_differ_are_told_on_every_screen() -> None:
    async with console((80, 24)) as desk:
        await desk.show(replace(live(silo(release())), skew_seconds=-95.0))
        assert "clocks differ by 95 s" in desk.text
        await desk.press("n", "n")
        await desk.open(ExampleScreen())
        assert "clocks differ by 95 s" in desk.text


@pytest.mark.parametrize("size", SIZES)
async def test_of_fifty_silos_those_with_trouble_come_first_and_the_rest_is_counted(size: tuple[int, int]) -> None:
    fine = coordinator()["silos"][0]
    many = [{**fine, "silo": f"silo_{index:02d}"} for index in range(49)]
    async with console(size) as desk:
        await desk.show(coordinator(silos=[*many, {**fine, "silo": "late", "state": "refused", "refusal": {"a": "b"}}]))
        words = desk.text
        assert "late" in words and "more: coordinator silos list" in words and "running" in words
        assert "silo_00" in words and "silo_48" not in words


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


def test_the_bar_has_the_links_latency_or_the_age() -> None:
    store = Store()
    store.read(Reading(silo()), 100.0, wall_time=NOW, latency_seconds=0.0421)
    assert "live 42 ms" in to_text([top_bar(store.snapshot, Lock(), 100.0, 120, UNICODE)])
    assert "STALE 00:10" in to_text([top_bar(store.snapshot, Lock(), 110.0, 120, UNICODE)])
    assert "live  " in to_text([top_bar(live(silo()), Lock(), 100.0, 120, UNICODE)])  # nobody measured it


@pytest.mark.parametrize(("cells", "shown"), [(120, "cardio-net · silo:hospital_a"), (64, " silo:hospital_a")])
def test_the_bar_never_loses_whose_console_it_is(cells: int, shown: str) -> None:
    bar = to_text([top_bar(live(silo()), Lock(), 100.0, cells, UNICODE)])
    assert shown in bar and len(bar) <= cells


LOCAL = "WITH LOCAL DATA"
REPLAYED = f"REPLAY 00:10 of 02:00 paused, 2026-12-01 10:00:00Z, {LOCAL}"


@pytest.mark.parametrize("cells", [60, 80, 100, 140])
@pytest.mark.parametrize(("told", "kept"), [
    (f"RECORDING 00:10, {LOCAL}", "LOCAL DATA"), ("RECORDING 00:10, share-safe", "RECORDING"),
    ("RECORDING STOPPED: the disk has 12 MiB", "RECORDING STOPPED"), ("", "UNLOCKED"),
])  # fmt: skip
def test_the_bar_keeps_the_party_and_what_is_recorded_before_the_latency(cells: int, told: str, kept: str) -> None:
    snapshot = live(silo(release()))
    snapshot = replace(snapshot, link=replace(snapshot.link, latency_seconds=0.002))
    bar = to_text([top_bar(snapshot, ToldLock("bob", 899.0, told=told), 100.0, cells, UNICODE)])
    assert "hospital_a" in bar and "live" in bar and "bob UNLOCKED" in bar and kept in bar and len(bar) <= cells, bar
    assert ("2 ms" in bar) == (cells >= 100 or not told), bar


@pytest.mark.parametrize("cells", [60, 80, 100, 140])
def test_the_bar_says_of_a_recording_that_it_has_local_data(cells: int) -> None:
    snapshot = live(silo(release()))
    for told in (REPLAYED, REPLAYED.replace(LOCAL, "share-safe")):
        shown = replace(snapshot, link=replace(snapshot.link, told=told))
        bar = to_text([top_bar(shown, Lock(read_only=True), 100.0, cells, UNICODE)])
        assert ("LOCAL DATA" in bar) == (LOCAL in told) and "REPLAY" in bar and "hospital_a" in bar, bar
        assert "READ-ONLY" in bar and len(bar) <= cells and ("REPLAY 00:10" in bar or cells == 60)


def test_a_party_with_a_long_name_goes_before_the_lock_does() -> None:
    bar = to_text([top_bar(live(silo(silo="clinic-" * 9)), Lock(), 100.0, 60, UNICODE)])
    assert bar.endswith("LOCKED") and "clinic" not in bar


async def test_replay_keys_are_told_where_something_is_played_back() -> None:
    for replay in (None, object()):
        app = ToldConsole(told=lambda: "REPLAY", replay=replay)  # type: ignore[arg-type]
        async with app.run_test(size=(100, 60)) as pilot:
            await pilot.pause()
            keys = {action.shown_key for action in actions_on(*app.top.tags)}
            assert ({".", "<"} <= keys) is (replay is not None)


# ---- states ----------------------------------------------------------------------------------------


async def test_stale_and_disconnected_grey_every_screen_and_keep_what_was_known() -> None:
    async with console() as desk:
        table = await opened(desk)
        assert not table.fed_screen.greyed
        await desk.wait(10.0)
        desk.app.tick()
        await desk.pilot.pause()
        assert "STALE 00:10" in desk.text and table.fed_screen.greyed and "public.responses" in desk.text
        gone = replace(desk.app.snapshot, link=Link("disconnected", "nothing listens there", "", 100.0, desk.now + 9))
        await desk.show(gone)
        words = " ".join(desk.text.split())
        for told in ("DISCONNECTED", "nothing listens there", "r tries now", "public.responses"):
            assert told in words, told


async def test_before_the_first_snapshot_a_screen_has_its_frame_and_no_data() -> None:
    async with console((80, 24)) as desk:
        await desk.open(ExampleScreen())
        assert "loading" in desk.text and "verdict" in desk.text and "no messages" not in desk.text


async def test_a_tiny_terminal_says_what_it_needs_on_every_screen() -> None:
    async with console((59, 15)) as desk:
        await desk.show(silo(release()))
        assert "needs 60x16, has 59x15; 1 needs you" in desk.text
        await desk.open(ExampleScreen())
        assert "needs 60x16" in desk.text
        await desk.pilot.resize_terminal(60, 16)
        await desk.pilot.pause()
        assert "needs 60x16" not in desk.text


def test_what_a_screen_says_when_it_has_nothing() -> None:
    snapshot = live(silo())
    assert answer_lines(snapshot, "outbox", 101.0, 80, opened_at=100.0) == []
    assert "waiting" in to_text(answer_lines(snapshot, "outbox", 103.0, 80, opened_at=100.0))
    fresh = replace(snapshot, answers={"outbox": {}}, answered_at={"outbox": 100.0})
    assert answer_lines(fresh, "outbox", 103.0, 80, opened_at=90.0) == []
    assert "as of 00:06 ago" in to_text(answer_lines(fresh, "outbox", 106.0, 80, opened_at=90.0))
    assert answer_lines(Snapshot(), "outbox", 100.5, 80, opened_at=100.0) == []
    assert to_text(refused_lines("NOT_ALLOWED", "no role", 80)) == "not allowed: no role"
    assert to_text(refused_lines("FAILED", "disk full", 80)) == "error: disk full [FAILED]"
    assert to_text(empty_lines("rounds", "fedsilo run submit run.yaml", 80)) == (
        "no rounds yet\nfedsilo run submit run.yaml"
    )
    assert to_text(denied_lines("prompt ids", "63", "64", "remove item 17", 80)) == (
        "DENY prompt ids: measured 63, limit 64\nwould pass: remove item 17"
    )

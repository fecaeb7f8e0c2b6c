"""Screen 9: the daemon's own log, followed, filtered by level, words and patterns, and never the trainer's."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from console.screens import logs
from console.screens.logs import LogsScreen
from fedsilo.views import logs as logs_screen
from fedsilo.views.columns import choose_columns
from fedsilo.views.lines import UNICODE, to_text, width_of
from tests.console.desk import Desk, console
from tests.console.site_answers import LINES, LOGS
from tests.console.states import coordinator, silo


def rows_of(lines: list[str], **more: Any) -> logs.LogRows:
    rows = logs.LogRows(logs_screen.COLUMNS, logs_screen.row_id, **more)
    rows.take_newest(logs_screen.log_rows({"lines": lines}), None, total=len(lines))
    return rows


async def opened(desk: Desk, answer: Any = LOGS) -> LogsScreen:
    await desk.show(silo())
    await desk.press("9")
    await desk.answer("logs", answer)
    screen = desk.app.screen
    assert isinstance(screen, LogsScreen)
    return screen


def texts(rows: logs.LogRows) -> list[str]:
    return [item.row["text"] for item in rows.shown]


# ---- lines -----------------------------------------------------------------------------------------


def test_a_line_is_taken_apart_and_the_newest_is_first() -> None:
    rows = logs_screen.log_rows(LOGS)
    assert rows[0]["level"] == "ERROR" and rows[0]["time"] == "2026-12-01T09:59:58.001Z"
    assert rows[0]["source"] == "hospital_a" and rows[0]["line"] == LINES[-1]
    assert logs_screen.parsed(rows[0])["json"] == {"peer": "10.0.0.7:7443", "attempt": 3}
    assert "json" not in logs_screen.parsed({"text": "a {b"})
    odd = logs_screen.log_rows({"lines": ["no form at all", 7, None]})
    assert [(row["level"], row["text"]) for row in odd] == [("", ""), ("", "7"), ("", "no form at all")]
    assert logs_screen.log_rows({"lines": "x"}) == [] and logs_screen.log_rows(None) == []


def test_a_line_keeps_its_name_while_newer_ones_arrive_and_equal_ones_are_told_apart() -> None:
    before = {row["line"]: row["id"] for row in logs_screen.log_rows({"lines": LINES[:20]})}
    after = {row["line"]: row["id"] for row in logs_screen.log_rows({"lines": LINES[:30]})}
    assert all(after[text] == name for text, name in before.items())
    twice = logs_screen.log_rows({"lines": ["same", "same"]})
    assert twice[0]["id"] != twice[1]["id"]


def test_a_level_hides_what_is_below_it_but_never_a_line_without_a_level() -> None:
    rows = logs_screen.log_rows({"lines": [*LINES, "no form at all"]})
    levels = [row["level"] for row in logs_screen.from_level(rows, "WARNING")]
    assert set(levels) == {"", "WARNING", "ERROR"} and len(levels) == 22
    assert len(logs_screen.from_level(rows, "DEBUG")) == len(rows)


# ---- patterns --------------------------------------------------------------------------------------


def test_a_pattern_filters_and_words_do_as_everywhere() -> None:
    rows = rows_of(LINES)
    rows.filter(r"~step \d+: public\.(responses|prompts)")
    assert len(rows.shown) == 20 and rows.why_not == "" and rows.filter_text.startswith("~step")
    rows.filter("level:warn !coordinator")
    assert set(texts(rows)) == {"the trainer reports (left out)"}
    rows.filter("~COORDINATOR.*acknow")
    assert len(rows.shown) == 20
    rows.filter("~")
    assert len(rows.shown) == len(LINES)


# Python's own matcher needs 17 s for the first over three lines, and longer than anybody waits for most of the others.
@pytest.mark.parametrize(
    "typed", ["a?a?a?a?a?a?.*.*Q", "(a+)+Q$", "(a*)*Q", "(a|aa)+Q", "(.*a){20}Q", r"(\w+\s?)*Q", "a*a*a*Q", ".*.*.*Q",
              "a?" * 20 + "a" * 20 + "Q", "a+b{0,}c*Q", "((a{1,30}){1,10}a*)Q"],
)  # fmt: skip
def test_a_pattern_that_could_explode_takes_no_time(typed: str) -> None:
    lines = [f"2026-12-01T09:00:00.000Z INFO hospital_a {'a' * 450}{number}" for number in range(3)]
    rows = rows_of(lines)
    began = time.process_time()
    rows.filter(f"~{typed}")
    # RE2 walks 1,350 characters once, at most 2,000 instructions each: milliseconds; the rest is for a slow machine
    assert time.process_time() - began < 1.0
    assert rows.why_not == "" and len(rows.shown) == 0
    rows = rows_of([*lines, f"2026-12-01T09:00:00.000Z INFO hospital_a {'a' * 450}Q"])
    rows.filter(f"~{typed}")
    assert len(rows.shown) == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [(r"(a)\1", "is no regular expression"), ("(?=a)a", "is no regular expression"), ("\ud800", "half a character"),
     ("(a{900}b{90})a{990}b{90}", "is too large"), ("a" * 90_000, "too large")],
)  # fmt: skip
def test_a_pattern_that_is_not_linear_or_too_large_is_refused(typed: str, said: str) -> None:
    found, why = logs.pattern_of(typed)
    assert found is None and said in why
    rows = rows_of(LINES)
    rows.filter(f"~{typed}")
    assert len(rows.shown) == len(LINES) and rows.why_not == why


def test_a_line_with_half_a_character_is_matched_as_any() -> None:
    rows = rows_of(["2026-12-01T09:00:00.000Z INFO hospital_a one \ud800 two", *LINES])
    rows.filter("~one .+ two")
    assert len(rows.shown) == 1 and rows.why_not == ""


@pytest.mark.parametrize(
    "typed", [r"a+b*", "(a|b)c", "colou?r", r"\(x\)+", r"[*+{]+", r"[)]*x", r"x\{2\}", "^a.*b$", "(?i)x"]
)
def test_a_pattern_of_the_usual_kind_is_taken(typed: str) -> None:
    found, why = logs.pattern_of(typed)
    assert found is not None and why == ""


def test_what_is_no_pattern_says_why() -> None:
    assert "is no regular expression" in logs.pattern_of("[a")[1]
    assert "is no regular expression" in logs.pattern_of("(a")[1]


def test_the_worst_pattern_that_is_taken_gives_way_over_lines_made_against_it() -> None:
    chance = random.Random(1)  # so that RE2 meets states that it has not met before
    texts_made = ["".join(chance.choices("xy", k=440)) for _ in range(1_000)]
    rows = rows_of([f"2026-12-01T09:00:00.000Z INFO hospital_a {text}{at:04d}" for at, text in enumerate(texts_made)])
    began = time.process_time()
    rows.filter("~x[xy]{500}[xyz]{400}q")  # a millisecond a line
    spent = time.process_time() - began
    assert rows.why_not == "takes too long over these lines" and len(rows.shown) == 1_000
    # 0.1 s for all lines and one line more; twenty times that for a machine that does other work
    assert spent < 2.0
    rows.filter("~y?x?0999")
    assert rows.why_not == "" and len(rows.shown) == 1


# ---- whole lines -----------------------------------------------------------------------------------


def test_whole_lines_cut_nothing_and_keep_the_cursor_in_sight() -> None:
    long = "2026-12-01T09:00:00.000Z INFO hospital_a " + "word " * 60 + "END" + "y" * 90
    rows = rows_of([long, *LINES], wrapped=True)
    for height in (3, 8, 20):
        rows.move(-1_000)
        for _ in range(len(LINES) + 1):
            drawn = rows.lines(76, height, UNICODE)
            assert len(drawn) <= height and max(map(width_of, drawn)) <= 76
            assert sum("▸" in to_text([each]) for each in drawn) == 1
            rows.move(1)
    rows.move(1_000)
    joined = "".join(to_text(rows.lines(76, 40, UNICODE)).split())
    assert "END" in joined and "yyyyyy<+84>" in joined  # a run is counted, as everywhere


async def test_a_click_on_any_line_of_a_whole_text_selects_it() -> None:
    async with console((80, 24)) as desk:
        screen = await opened(desk)
        await desk.press("w")
        rows = screen.table.rows
        ids = [rows.row_at(at) for at in range(8)]
        assert ids[0] == ids[1] != ids[2] == ids[4] and rows.row_at(-1) == "" and rows.row_at(500) == ""


# ---- the screen ------------------------------------------------------------------------------------


async def test_it_follows_the_newest_until_somebody_moves_and_g_follows_again() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk, {"lines": LINES[:30], "left_out": 0})
        assert "follows the newest" in desk.text and "nothing had to be left out" in desk.text
        await desk.answer("logs", {"lines": LINES[:33], "left_out": 0})
        assert screen.table.rows.shown[0].id == screen.table.rows.cursor
        await desk.press("j")
        here = screen.table.rows.cursor
        await desk.answer("logs", LOGS)
        assert screen.table.rows.cursor == here and "stays here; g follows again" in desk.text
        await desk.press("g")
        assert screen.table.rows.shown[0].id == screen.table.rows.cursor and "follows the newest" in desk.text
        await desk.press("space")
        assert "FROZEN" in desk.text and screen.wants() == {}


async def test_levels_patterns_and_what_they_hide_are_named() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        assert screen.wants() == {"logs": ("logs", {"lines": logs_screen.LINES_FIRST})}
        await desk.press("v")
        assert "WARNING and above" in desk.text and "INFO" not in desk.text and "the trainer reports" in desk.text
        assert screen.wants() == {"logs": ("logs", {"lines": logs_screen.LINES_MAX})}
        await desk.answer("logs", {"lines": LINES[:1], "left_out": 0})
        assert "no lines of WARNING and above among those that came" in desk.text and "v shows all" in desk.text
        await desk.press("v", "v")
        assert "all levels" in desk.text and "round 1 step 4" in desk.text
        await desk.press("slash", *"~(a+", "enter")
        assert "not filtered: what follows ~ is no regular expression" in desk.text


async def test_older_lines_are_asked_for_when_somebody_goes_there() -> None:
    lines = [f"2026-12-01T09:{n // 60:02d}:{n % 60:02d}.000Z INFO hospital_a line {n}" for n in range(1_000)]
    async with console((100, 30)) as desk:
        screen = await opened(desk, {"lines": lines[-200:], "left_out": 0})
        assert screen.wants()["logs"][1] == {"lines": 200}
        for asked in (400, 600, 800, 1_000):
            await desk.press("G")
            assert screen.wants()["logs"][1] == {"lines": asked}
            await desk.answer("logs", {"lines": lines[-asked:], "left_out": 0})
        await desk.press("G")
        assert screen.table.selected() is not None and screen.inspected()["text"] == "line 0"
        assert "the newest 1000; older ones" in desk.text


async def test_the_trainers_log_is_named_where_it_can_be_read_and_at_a_coordinator_there_is_none() -> None:
    async with console((80, 24)) as desk:
        screen = await opened(desk)
        assert "not here: the trainer's log (may quote private text): silo logs --trainer" in desk.text
        assert "redaction on: 20 lines left out or cut" in desk.text and "words); hide them: /!(left" in desk.text
        rows = desk.text.splitlines()
        (place,) = [at for at, row in enumerate(rows) if "not here: the trainer's log" in row]
        assert rows[place - 1].startswith("╰") and rows[place + 1].startswith("  ▸ connection lost")
        assert screen.twin() == "silo logs"
        await desk.show(coordinator())
        await desk.answer("logs", {"lines": LINES[:3]})
        assert "silo logs --trainer" not in desk.text and screen.twin() == "coordinator logs"


@pytest.mark.parametrize(("cells", "names"), [
    (76, {"time UTC", "level", "text"}), (136, {"time UTC", "level", "text", "day"}),
    (170, {"time UTC", "level", "text", "day", "source"}),
])  # fmt: skip
def test_a_line_is_given_room_before_what_is_the_same_in_most_lines(cells: int, names: set[str]) -> None:
    shown = {column.name: width for column, width in choose_columns(logs_screen.COLUMNS, cells)}
    assert set(shown) == names and shown["text"] >= min(96, cells - 26)

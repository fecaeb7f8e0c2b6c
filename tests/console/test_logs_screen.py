"""Screen 9: the daemon's own log, followed, filtered by level, words and patterns, and never the trainer's."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from console.screens import logs
from console.screens.logs import LogsScreen
from fedsilo.control.answers import LogLines, read
from fedsilo.views import logs as logs_screen
from fedsilo.views.columns import choose_columns
from fedsilo.views.lines import UNICODE, to_text, width_of
from tests.console.desk import console
from tests.console.site_answers import LINES, LOGS
from tests.console.states import coordinator, silo


def rows_of(lines: list[str], **more: Any) -> logs.LogRows:
    rows = logs.LogRows(logs_screen.COLUMNS, lambda row: row.id, **more)
    rows.take_newest(logs_screen.log_rows(read(LogLines, {"lines": lines})), None, total=len(lines))
    return rows


# ---- lines -----------------------------------------------------------------------------------------


def test_a_line_is_taken_apart_and_the_newest_is_first() -> None:
    rows = logs_screen.log_rows(read(LogLines, LOGS))
    assert {key: getattr(rows[0], key) for key in ("level", "time", "source", "line")} == {
        "level": "ERROR", "time": "2026-12-01T09:59:58.001Z", "source": "hospital_a", "line": LINES[-1],
    }  # fmt: skip
    assert logs_screen.parsed(rows[0])["json"] == {"peer": "10.0.0.7:7443", "attempt": 3}
    assert "json" not in logs_screen.parsed(read(logs_screen.LogRow, {"text": "a {b"}))
    odd = logs_screen.log_rows(read(LogLines, {"lines": ["no form at all", 7, None]}))
    assert [(row.level, row.text) for row in odd] == [("", ""), ("", "7"), ("", "no form at all")]
    assert (
        logs_screen.log_rows(read(LogLines, {"lines": "x"})) == [] and logs_screen.log_rows(read(LogLines, None)) == []
    )
    old, new = (
        {row.line: row.id for row in logs_screen.log_rows(read(LogLines, {"lines": LINES[:end]}))} for end in (20, 30)
    )
    assert old.items() <= new.items()  # a line keeps its name while newer ones arrive
    one, other = logs_screen.log_rows(read(LogLines, {"lines": ["same", "same"]}))
    assert one.id != other.id


@pytest.mark.parametrize(
    ("level", "levels", "count"),
    [("WARNING", {"", "WARNING", "ERROR"}, 22), ("DEBUG", {"", "INFO", "WARNING", "ERROR"}, len(LINES) + 1)],
)
def test_a_level_hides_what_is_below_it_but_never_a_line_without_a_level(
    level: str, levels: set[str], count: int
) -> None:
    shown = logs_screen.from_level(logs_screen.log_rows(read(LogLines, {"lines": [*LINES, "no form at all"]})), level)
    assert {row.level for row in shown} == levels and len(shown) == count


# ---- patterns --------------------------------------------------------------------------------------


ODD = "2026-12-01T09:00:00.000Z INFO hospital_a one \ud800 two"
USUAL = ("a+b*", "(a|b)c", "colou?r", r"\(x\)+", "[*+{]+", "[)]*x", r"x\{2\}", "^a.*b$")


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        (r"~step \d+: public\.(responses|prompts)", 20),
        ("level:warn !coordinator", 20),
        ("~COORDINATOR.*acknow", 20),
        ("~", len(LINES) + 1),
        ("~one .+ two", 1),  # half a character is matched as any
        *((f"~{each}", None) for each in USUAL),
    ],
)
def test_a_pattern_filters_and_words_do_as_everywhere(typed: str, count: int | None) -> None:
    rows = rows_of([ODD, *LINES])
    rows.filter(typed)
    assert rows.why_not == "" and count in (None, len(rows.shown))


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
     ("[a", "is no regular expression"), ("(a", "is no regular expression"),
     ("(a{900}b{90})a{990}b{90}", "is too large"), ("a" * 90_000, "too large")],
)  # fmt: skip
def test_a_pattern_that_is_not_linear_or_too_large_is_refused(typed: str, said: str) -> None:
    found, why = logs.pattern_of(typed)
    assert found is None and said in why
    rows = rows_of(LINES)
    rows.filter(f"~{typed}")
    assert len(rows.shown) == len(LINES) and rows.why_not == why


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


# ---- the screen ------------------------------------------------------------------------------------


EACH_SECOND = [f"2026-12-01T09:{n // 60:02d}:{n % 60:02d}.000Z INFO hospital_a line {n}" for n in range(1_000)]


@pytest.mark.slow
async def test_the_trainers_log_is_named_where_it_can_be_read_and_at_a_coordinator_there_is_none() -> None:
    async with console((80, 24)) as desk:
        await desk.show(silo())
        await desk.press("9")
        await desk.answer("logs", LOGS)
        desk.shows("the trainer's log (may quote private text): silo logs --trainer", "20 lines left out or cut")
        assert desk.app.top.twin() == "silo logs"
        await desk.show(coordinator())
        await desk.answer("logs", {"lines": LINES[:3]})
        assert "silo logs --trainer" not in desk.text and desk.app.top.twin() == "coordinator logs"


@pytest.mark.parametrize(("cells", "names"), [
    (76, {"time UTC", "level", "text"}), (136, {"time UTC", "level", "text", "day"}),
    (170, {"time UTC", "level", "text", "day", "source"}),
])  # fmt: skip
def test_a_line_is_given_room_before_what_is_the_same_in_most_lines(cells: int, names: set[str]) -> None:
    shown = {column.name: width for column, width in choose_columns(logs_screen.COLUMNS, cells)}
    assert set(shown) == names and shown["text"] >= min(96, cells - 26)


@pytest.mark.slow
async def test_it_follows_filters_and_fetches_and_says_so() -> None:
    def told(lines: list[str]) -> dict[str, Any]:
        return {"lines": lines, "left_out": 0}

    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("9")
        screen = desk.app.screen
        assert isinstance(screen, LogsScreen)
        assert screen.wants() == {"logs": ("logs", {"lines": logs_screen.LINES_FIRST})}
        await desk.answer("logs", told(LINES[:30]))
        table = screen.table
        desk.shows("follows the newest")
        await desk.answer("logs", told(LINES[:33]))
        assert table.rows.shown[0].id == table.rows.cursor
        await desk.press("j")
        here = table.rows.cursor
        await desk.answer("logs", LOGS)
        assert table.rows.cursor == here
        desk.shows("stays here; g follows again")
        await desk.press("g")
        assert table.rows.shown[0].id == table.rows.cursor
        await desk.answer("logs", told(EACH_SECOND[-200:]))
        for asked in (400, 600, 800, 1_000):
            await desk.press("G")
            assert screen.wants()["logs"][1] == {"lines": asked}
            await desk.answer("logs", told(EACH_SECOND[-asked:]))
        await desk.press("G")
        assert screen.inspected()["text"] == "line 0"
        await desk.press("g")
        await desk.answer("logs", LOGS)
        await desk.press("v")
        desk.shows("WARNING and above", "the trainer reports", lacks=["INFO"])
        assert screen.wants() == {"logs": ("logs", {"lines": logs_screen.LINES_MAX})}
        await desk.answer("logs", told(LINES[:1]))
        desk.shows("no lines of WARNING and above among those that came")
        await desk.press("v", "v", "slash", *"~(a+", "enter")
        desk.shows("all levels", "not filtered: what follows ~ is no regular expression")
        await desk.press("escape", "w")
        await desk.answer("logs", LOGS)
        ids = [table.rows.row_at(at) for at in range(8)]  # a click on any line of a whole text selects it
        assert len(set(ids)) < 8 and table.rows.row_at(-1) == table.rows.row_at(500) == ""
        await desk.press("space")
        assert screen.wants() == {} and "FROZEN" in desk.text

"""Which columns fit, which rows pass, and that the cursor stays on its row, without a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.table_screen import NEAR_THE_END_ROWS, ROWS_MAX, Rows, parse_filter, skeleton
from fedsilo.views.columns import Column, choose_columns
from fedsilo.views.lines import UNICODE, to_text, width_of

COLUMNS = (
    Column("time", lambda row: (str(row.seq), ""), 8, worth=0),
    Column("kind", lambda row: (row.kind, ""), 12, worth=0, grows=True),
    Column("bytes", lambda row: (f"{row.bytes} B", ""), 9, worth=2, right=True, order=lambda row: row.bytes),
    Column("verdict", lambda row: (row.verdict, ""), 7, worth=1),
    Column("digest", lambda row: (f"{row.seq:012x}", ""), 12, worth=3),
)


def row(seq: int, **changes: Any) -> SimpleNamespace:
    usual = {"seq": seq, "kind": "lora.factors", "bytes": seq % 7, "verdict": "deny" if seq % 5 == 0 else "allow"}
    return SimpleNamespace(**usual | changes)


def newest(top: int, count: int = 100) -> list[SimpleNamespace]:
    return [row(seq) for seq in range(top, top - count, -1)]


def rows(top: int = 1000, following: Any = 901) -> Rows:
    made = Rows(COLUMNS, lambda each: str(each.seq))
    made.take_newest(newest(top), following, total=top)
    return made


def ids(made: Rows) -> list[int]:
    return [int(item.id) for item in made.shown]


# ---- columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "names"),
    [(20, ["time", "kind"]), (24, ["time", "kind"]), (33, ["time", "kind", "verdict"]),
     (44, ["time", "kind", "bytes", "verdict"]), (58, ["time", "kind", "bytes", "verdict", "digest"])],
)  # fmt: skip
def test_columns_come_by_worth_and_stand_in_their_order(cells: int, names: list[str]) -> None:
    assert [column.name for column, _ in choose_columns(COLUMNS, cells)] == names


def test_somebody_can_ask_for_the_columns_that_do_not_fit() -> None:
    turned = [[column.name for column, _ in choose_columns(COLUMNS, 38, turn=turn)] for turn in range(4)]
    assert turned == [["time", "kind", "verdict"], ["time", "kind", "bytes"], ["time", "kind", "digest"], turned[0]]
    assert choose_columns(COLUMNS, 80, turn=2) == choose_columns(COLUMNS, 80)


@given(cells=st.integers(10, 200), height=st.integers(2, 50))
def test_nothing_ever_sticks_out(cells: int, height: int) -> None:
    made = rows()
    made.take_newest([row(1000, kind="宽" * 50), *newest(999, 99)], 901)
    empty = skeleton(COLUMNS, cells, height, UNICODE)
    assert "<+" not in to_text(empty)  # no mark of something hidden
    for shown in (made.lines(cells, height, UNICODE), empty):
        assert len(shown) <= max(height, 2) and all(width_of(parts) <= max(cells, 10) for parts in shown)


# ---- filter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "passes"),
    [("", True), ("lora", True), ("LORA", True), ("kind:lora", True), ("verdict:lora", False), ("!lora", False),
     ("!verdict:deny", True), ("lora allow", True), ("lora deny", False), ("kind:lora !allow", False), ("r1:x", False),
     ("7:00", True), ("!", True), ("kind:", True), ("Verdict:ALLOW", True)],
)  # fmt: skip
def test_what_a_filter_lets_through(text: str, passes: bool) -> None:
    texts = {"time": "17:00", "kind": "lora.factors", "verdict": "allow"}
    assert parse_filter(text, texts).passes(texts) is passes


@pytest.mark.slow
def test_a_filter_that_nothing_passes_does_not_fetch_everything() -> None:
    made = rows(following=901)
    made.filter("nothing-like-it")
    asked = 0
    while (before := made.wants_older()) is not None:
        made.take_older([row(before - 1 - index) for index in range(100)], before, before - 100)
        asked += 1
        assert asked < 1000
    assert made.kept == ROWS_MAX and not made.newer


# ---- cursor ----------------------------------------------------------------------------------------


def test_rows_that_arrive_leave_the_cursor_on_its_row_and_its_line() -> None:
    made = rows()
    made.move(4)
    before = made.lines(60, 20, UNICODE)
    made.take_newest(newest(1030), 931, total=1030)
    after = made.lines(60, 20, UNICODE)
    assert made.cursor == "996" and not made.left
    assert to_text(before).splitlines()[5] == to_text(after).splitlines()[5] and "996" in to_text([after[5]])
    assert made.above == 30


@pytest.mark.slow
@given(st.lists(st.integers(-60, 160), max_size=12))
def test_whatever_arrives_and_however_it_is_sorted_the_cursor_stays(steps: list[int]) -> None:
    made = rows()
    made.move(37)
    kept, top = made.cursor, 1000
    for step in steps:
        if step < 0:
            made.sort_next()
        else:
            top += step
            made.take_newest(newest(top), top - 99)
        made.lines(80, 24, UNICODE)
        assert made.cursor == kept and not made.left
        assert made.selected() is not None and len(set(ids(made))) == len(ids(made))


def test_before_anybody_placed_the_cursor_a_live_table_shows_the_newest() -> None:
    made = rows()
    made.lines(60, 10, UNICODE)
    made.take_newest(newest(1003), 904)
    made.lines(60, 10, UNICODE)
    assert made.cursor == "1000" and not made.left  # still in sight
    made.take_newest(newest(1020), 921)
    shown = to_text(made.lines(60, 10, UNICODE))
    assert made.cursor == "1020" and made.left and "1020" in shown


@pytest.mark.parametrize("typed", ["nothing-like-it", "verdict:deny", f"digest:{950:012x}"])
def test_to_a_row_that_only_a_filter_took_away_the_cursor_comes_back(typed: str) -> None:
    made = rows()
    made.move(11)
    assert made.cursor == "989"  # allowed, so no filter lets it through
    for length in range(len(typed) + 1):
        made.filter(typed[:length])
    assert typed[0] != "d" or ids(made) == [950]  # of a column that does not fit too
    chosen = made.selected()
    assert chosen is None or (chosen.id != "989" and made.left)
    made.left = False
    made.filter("")
    assert made.cursor == "989" and made.selected() is not None and made.left  # changing keys rest a moment
    made.filter("verdict:deny")
    made.move(2)
    here = made.cursor
    made.filter("")
    assert made.cursor == here != "989"  # whoever moves within a filter stays there


# ---- pages -----------------------------------------------------------------------------------------


def test_the_next_page_is_asked_for_near_the_end_and_taken_once() -> None:
    made = rows()
    assert made.wants_older() is None
    made.move(99 - NEAR_THE_END_ROWS)
    assert made.wants_older() is None
    made.move(1)
    assert made.wants_older() == 901
    made.take_older([row(seq) for seq in range(900, 850, -1)], 901, 851)
    made.take_older([row(seq) for seq in range(900, 850, -1)], 901, 851)  # came twice
    assert ids(made) == list(range(1000, 850, -1)) and made.wants_older() is None
    made.move(60)
    made.take_older([row(850)], 851, None)
    assert ids(made)[-1] == 850 and made.wants_older() is None


def test_at_most_so_many_rows_are_kept_and_those_somebody_looks_at_are_among_them() -> None:
    made = rows(200_000, 199_901)
    while made.kept < ROWS_MAX or not made.newer:
        made.move(len(made.shown))
        before = made.wants_older()
        made.take_older([row(before - 1 - index) for index in range(100)], before, before - 100)
    assert made.kept == ROWS_MAX and ids(made)[0] < 200_000 and made.selected() is not None
    cursor = made.cursor
    made.take_newest(newest(200_000), 199_901)
    assert made.newer and made.cursor == cursor  # the newest do not join, so there is no hole
    made.go_newest()
    made.take_newest(newest(200_000), 199_901)
    assert ids(made) == list(range(200_000, 199_900, -1)) and made.cursor == "200000" and not made.newer


def test_when_many_arrive_the_oldest_give_way() -> None:
    made = rows(1000, 901)
    made.move(3)
    for top in range(1050, 1000 + ROWS_MAX + 500, 50):
        made.take_newest(newest(top), top - 99)
        made.select(str(top - 20))
    assert made.kept == ROWS_MAX and made.next == ids(made)[-1] and not made.newer


def test_a_page_with_few_rows_or_none_joins_by_the_numbers_that_it_covers_and_no_hole_is_shown_as_none() -> None:
    made = Rows(COLUMNS, lambda each: str(each.seq))
    for numbers, reaches, following, shown, hole in (
        ([950], 1000, 900, [950], False),
        ([], 1060, 960, [950], False),
        ([1061], 1070, 970, [1061, 950], False),
        ([1300], 1310, 1210, [1061, 950], True),  # from 1070 to 1210
    ):
        made.take_newest([row(seq) for seq in numbers], following, reaches=reaches)
        made.move(0 if made.cursor else 1)
        made.select("950")
        assert (ids(made), made.newer) == (shown, hole)
    untold = Rows(COLUMNS, lambda each: str(each.seq))
    untold.take_newest([row(950)], 900)
    untold.move(1)
    untold.take_newest([row(1061)], 960)
    assert untold.newer  # without the numbers nobody knows what is in between
    for moved in (True, False):
        made = rows()
        if moved:
            made.move(1)
        made.take_newest(newest(5000), 4901)
        assert made.newer is moved and ids(made)[0] == (1000 if moved else 5000)


def test_a_record_can_be_gone_to_by_its_number() -> None:
    made = rows(100_000, 99_901)
    made.go_before(501)
    made.take_newest(newest(100_001), 99_902)
    assert made.wants_older() == 501 and not made.arrived
    made.take_older([row(seq) for seq in range(500, 400, -1)], 501, 401)
    assert made.cursor == "500" and made.newer and made.arrived


def test_values_of_another_type_do_not_break_the_order() -> None:
    made = rows()
    made.take_newest([row(3, bytes="many"), row(2, bytes=None), row(1, bytes=4)], None)
    for _ in range(2 * len(COLUMNS) + 1):
        made.sort_next()
        assert sorted(ids(made)) == [1, 2, 3]
    assert made.sorted_by == "" and ids(made) == [3, 2, 1]

"""Screen 4: figures as plots and as a table; pass@1 only with its number and interval."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from console.base import TextDialog
from console.screens.curves import CurvesScreen
from fedsilo.control.answers import Curves, read
from fedsilo.control.figures import FIGURES
from fedsilo.views import curves
from fedsilo.views.curves import Curve, Frame, Point, plot_lines
from fedsilo.views.lines import UNICODE, to_text, width_of
from silo.guard.answers import state
from tests.console.desk import Desk, console
from tests.console.rounds import curves_at_coordinator, curves_at_silo
from tests.console.states import coordinator, silo


async def opened(desk: Desk, answer: Any = None, state: Any = None) -> CurvesScreen:
    await desk.show(state or coordinator())
    await desk.press("4")
    screen = desk.app.screen
    assert isinstance(screen, CurvesScreen)
    await told(desk, screen, answer or curves_at_coordinator())
    return screen


async def told(desk: Desk, screen: CurvesScreen, answer: Any) -> None:
    """The daemon answers until the screen asks for nothing else."""
    asked = ""
    while asked != screen.key:
        asked = screen.key
        await desk.answer(asked, answer)


def frame(**changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "x": (0.0, 10.0),
        "y": (0.0, 1.0),
        "y_text": lambda y: f"{y:.1f}",
        "x_text": lambda x: f"r{x:.0f}",
    }
    return Frame(**fields | changes)


def braille(lines: Any) -> int:
    """How many dots are drawn."""
    return sum(
        (ord(sign) - 0x2800).bit_count()
        for row in lines
        for text, _ in row
        for sign in text
        if 0x2800 < ord(sign) <= 0x28FF
    )


# ---- plots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [24, 60, 200])
@pytest.mark.parametrize("rows", [4, 12, 40])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_plot_fits_its_room_whatever_is_drawn(cells: int, rows: int, ascii_only: bool) -> None:
    points = tuple(Point(x, math.sin(x) * 9, -20.0, 20.0) for x in range(11))
    pair = [Curve("a", points), Curve("b", points[:2], 1)]
    lines = plot_lines(pair, frame(cursor=5.0, level=0.4), cells, rows, ascii_only=ascii_only)
    assert len(lines) == rows and {width_of(row) for row in lines} == {cells}
    text = to_text(lines)
    assert "a" in text and "<" not in text and (text.isascii() or not ascii_only)
    for narrow, low in ((23, rows), (cells, 3), (0, 0), (-5, -5)):
        assert plot_lines(pair, frame(), narrow, low, ascii_only=ascii_only) == []


def test_a_point_stands_where_it_belongs() -> None:
    lines = plot_lines([Curve("a", (Point(0.0, 0.0), Point(10.0, 1.0)))], frame(), 28, 6, ascii_only=False)
    first, last = to_text(lines).splitlines()[0], to_text(lines).splitlines()[4]
    assert first.rstrip().endswith("a") and last[8] == "a"
    assert first.strip().startswith("1.0") and last.strip().startswith("0.0")
    assert to_text(lines).splitlines()[-1].strip().startswith("└r0") and to_text(lines).endswith("r10")


def test_series_that_meet_keep_a_letter_each_and_two_differ_without_any_colour() -> None:
    meeting = [Curve(letter, (Point(0.0, 0.5), Point(9.0, 0.5)), place) for place, letter in enumerate("abcd")]
    for ascii_only in (False, True):
        drawn = to_text(plot_lines(meeting, frame(), 80, 10, ascii_only=ascii_only))
        assert all(drawn.count(letter) == 2 for letter in "abcd")
    alone = [plot_lines([Curve("a", each.points, each.place)], frame(), 60, 8, ascii_only=False) for each in meeting]
    assert len({to_text(lines) for lines in alone}) == len({braille(lines) for lines in alone}) == 4


def test_one_place_is_drawn_as_a_point_and_not_as_a_whole_plot() -> None:
    points = [{"x": 4, "value": 0.3, "n": 90, "low": 0.2, "high": 0.4, "n_exact": True}]
    answer = {"x": "round", "series": [{"name": "pass_at_1", "silo": "hospital_a", "points": points}]}
    lines = curves.plot_of(read(Curves, answer), curves.View("pass_at_1", 4.0), 80, 30, ascii_only=True)
    text = to_text(lines)
    assert len(lines) == curves.ROWS_OF_ONE_PLACE + 1 and "one round so far: a point each, no curve yet" in text
    assert text.count("r4") == 1 and "r3" not in text and "r5" not in text and ":" not in text.split("one round")[0]
    two = {**answer, "series": [{**answer["series"][0], "points": [*points, {**points[0], "x": 5}]}]}
    lines = curves.plot_of(read(Curves, two), curves.View("pass_at_1", 4.0), 80, 30, ascii_only=True)
    assert len(lines) == 30 and "so far" not in to_text(lines)


def test_nothing_is_drawn_beyond_the_last_point_or_of_what_is_no_number() -> None:
    short = plot_lines([Curve("a", (Point(0.0, 0.5), Point(5.0, 0.5)))], frame(), 48, 8, ascii_only=False)
    body = [row[8:] for row in to_text(short).splitlines()[:-1]]
    assert max(len(row.rstrip()) for row in body) <= 22  # half of 40 cells, and the letter
    broken = plot_lines([Curve("a", (Point(0.0, math.nan), Point(math.inf, 0.5)))], frame(), 48, 8, ascii_only=False)
    assert braille(broken) == 0 and "a" not in to_text(broken)


@pytest.mark.parametrize("values", [[], [math.nan], [0.5], [0.0, 0.0], [1e9, -1e9], [0.0, 1.0]])
def test_an_axis_has_a_height(values: list[float]) -> None:
    low, high = curves.bounds(values, least=0.0 if min(values, default=0) >= 0 else None)
    assert low < high and (not values or math.isnan(values[0]) or all(low <= value <= high for value in values))


# ---- figures ---------------------------------------------------------------------------------------


def test_bars_of_the_last_place_stand_beside_each_other_as_those_of_the_first() -> None:
    series = [
        Curve(letter, (Point(0.0, y, y - 9, y + 9), Point(10.0, y, y - 9, y + 9)), place)
        for place, (letter, y) in enumerate((("a", 20.0), ("b", 50.0), ("c", 80.0)))
    ]
    frame = Frame(x=(0.0, 10.0), y=(0.0, 100.0), y_text=lambda value: f"{value:.0f}", x_text=lambda at: f"r{at:.0f}")
    rows = to_text(plot_lines(series, frame, 60, 40, ascii_only=True)).splitlines()
    by_letter = {
        letter: {
            at for row in rows[first:last] for at, sign in enumerate(row) if sign == "|" and at >= curves.AXIS_CELLS
        }
        for letter, (first, last) in {"c": (0, 13), "b": (13, 26), "a": (26, 39)}.items()
    }
    left = curves.AXIS_CELLS
    right = next(row for row in rows if "a" in row).rindex("a")
    assert by_letter == {"a": {left, right}, "b": {left + 1, right + 1}, "c": {left + 2, right + 2}}
    assert rows[-1].rstrip("-").endswith("r10") and rows[-1].rindex("r10") + 2 == right


def test_pass_at_1_is_drawn_with_its_number_and_interval_and_not_without() -> None:
    answer = curves_at_coordinator()
    view = curves.View("pass_at_1", 7.0)
    with_bars = plots_of(answer, view)
    assert braille(with_bars) > braille(plots_of(answer, replace(view, smooth=True)))
    for missing in ("n", "low", "high"):
        without = curves_at_coordinator()
        for series in without["series"]:
            for each in series["points"]:
                each[missing] = None
        assert plots_of(without, view) == []
        assert "is not drawn: the number of prompts behind it is not known" in to_text(
            curves.nothing_lines(read(Curves, without), "pass_at_1", 100)
        )
        assert plots_of(without, curves.View("update_norm"))  # a norm needs none
    one = curves_at_coordinator()
    one["series"][0]["points"][3]["n"] = 0
    text = to_text(curves.value_lines(read(Curves, one), view, 200, UNICODE, most=9))
    assert "hospital_a is not drawn" in text and "hospital_b 38.7 [34.5, 43.0]" in text


def plots_of(answer: Any, view: curves.View) -> Any:
    return curves.plot_of(read(Curves, answer), view, 100, 20, ascii_only=False)


def values(answer: Any, at: float = 7.0) -> str:
    return to_text(curves.value_lines(read(Curves, answer), curves.View("pass_at_1", at), 200, UNICODE, most=9))


MIXED = curves_at_coordinator()

MIXED["series"][0]["points"][7] |= {"n": 400, "n_exact": True}


@pytest.mark.parametrize(
    ("text", "facts", "bound"),
    [
        (values(curves_at_coordinator()), ("round 7, n at most 500", "a hospital_a 41.2 [37.0, 45.6]"), True),
        (values(curves_at_silo(), 40.0), ("step 40, n 487",), False),
        (values(MIXED), ("[37.0, 45.6] n 400", "n at most 500"), True),
    ],
)
def test_the_number_is_said_to_be_a_bound_where_it_is_one(text: str, facts: tuple[str, ...], bound: bool) -> None:
    assert all(fact in text for fact in facts) and ("at most" in text) is bound


def test_each_figure_that_is_kept_has_a_title_of_words_and_shares_are_in_per_cent() -> None:
    kept = {*state._METRICS_SHOWN, *state._METRICS_KEPT, *FIGURES}
    plain = {name for name in kept if name not in curves.TITLES}
    # every word of these is one that a person reads elsewhere
    assert {word for name in plain for word in name.split("_")} <= {
        "tokens", "seconds", "rollout", "agreement", "grade", "update", "entropy", "per", "second", "memory", "peak",
        "bytes",
    }  # fmt: skip
    assert curves.value_text(0.125, "alpha_mean") == "12.5" and curves.unit_text("swapped_share", "share") == "%"
    assert curves.value_text(0.125, "rollout_kl") == "0.125" and curves.unit_text("rollout_kl", "nats") == "nats"
    assert curves.names_of(read(Curves, {"names": ["seconds", "x", "rollout_kl", "swapped_share"]})) == [
        "swapped_share", "rollout_kl", "seconds", "x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"series": 5},
        {"series": [5, {"name": "pass_at_1", "points": [1, {"x": "a", "value": 1}]}]},
        {"series": [{"name": "pass_at_1", "points": [{"x": True, "value": 1.0}]}]},
        {"names": [None, 5, "x"]},
        {"baseline": "x"},
    ],
)
def test_an_answer_of_another_shape_draws_something_and_never_fails(broken: Any) -> None:
    answer = {**curves_at_coordinator(), **broken}
    view = curves.View("pass_at_1", 1.0)
    curves.names_of(read(Curves, answer))
    curves.head_lines(read(Curves, answer), view, 80, UNICODE)
    curves.value_lines(read(Curves, answer), view, 80, UNICODE, most=3)
    plots_of(answer, view)
    assert isinstance(curves.table_rows(read(Curves, answer), "pass_at_1"), list)


# ---- the screen ------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_it_asks_for_what_it_shows_and_takes_no_other_answer_for_it() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        assert desk.app.wanted["curves pass_at_1 round"] == ("curves", {"names": "pass_at_1", "x": "round"})
        await desk.press("h", "left")
        desk.shows("round 5, n at most 500", "hospital_a 38.2")
        await desk.press("l", "l", "l")
        desk.shows("round 7, n at most 500")
        await desk.press("T", "j", "enter")
        assert isinstance(desk.app.screen, TextDialog)
        desk.shows("hospital_b", "38.7", "Wilson over at most 500 prompts", "cosine between updates")
        await desk.press("escape", "T", "x")
        assert desk.app.wanted["curves pass_at_1 step"] == ("curves", {"names": "pass_at_1", "x": "step"})
        await desk.press("x", "m")
        desk.shows("smoothed over 5 points, no intervals")
        await desk.press("m", "b")
        desk.shows(lacks=["before round 1"])
        await desk.press("tab")
        await told(desk, screen, curves_at_coordinator())
        desk.shows("update norm L2 · figure 2 of 3", lacks=["pass@1 %"])
        screen.go_to("run-0")
        assert desk.app.wanted["curves update_norm round run-0"][1]["run"] == "run-0"
        assert screen.twin() == (
            "fedsilo curves --coordinator coordinator.yaml --run run-0 --name update_norm --x round"
        )
        screen.go_to("nothing")
        await desk.pilot.pause()
        desk.shows("curves takes a figure")
    async with console((100, 30)) as desk:
        screen = await opened(desk, curves_at_silo(), silo())
        assert desk.app.wanted["curves pass_at_1 step"] == ("curves", {"names": "pass_at_1", "x": "step"})
        await desk.press("tab")
        await told(desk, screen, curves_at_silo())
        desk.shows("reward 0..1 · figure 2 of 3")
        assert screen.twin().startswith("fedsilo curves --config silo.yaml")
        await desk.show(coordinator())
        desk.shows(lacks=["reward 0..1"])  # another daemon: nothing of the former one


def test_smoothing_is_a_mean_of_those_before_and_a_baseline_of_those_that_were_measured() -> None:
    points = [Point(float(x), float(x % 2), 0.0, 1.0) for x in range(8)]
    smooth = curves.smoothed(points, 2)
    assert [each.y for each in smooth] == [0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert {each.low for each in smooth} == {None} and [each.x for each in smooth] == [each.x for each in points]
    rows = [("pass_at_1", 0.2), ("pass_at_1", 0.4), ("kl", 9)]
    answer = curves_at_coordinator(baseline=[{"name": name, "silo": "a", "value": value} for name, value in rows])
    assert curves.baseline_of(read(Curves, answer), "pass_at_1") == pytest.approx((0.3, 2))
    assert curves.baseline_of(read(Curves, answer), "update_norm") is None

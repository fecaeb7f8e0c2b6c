"""Screen 7: limits, the bits of a hostile trainer, the forecast, releases, and what no limit counts."""

from __future__ import annotations

from typing import Any

import pytest

from console.base import TextDialog
from console.screens.budget import BudgetScreen
from fedsilo.control.answers import LimitRow, Limits, read
from fedsilo.views import limits
from fedsilo.views.lines import UNICODE, to_text
from tests.console.desk import Desk, console
from tests.console.states import NOW, coordinator, silo

MIB = 1 << 20


def limit(name: str, kind: str, used: int, most: int, unit: str, window: str, line: int) -> dict[str, Any]:
    return {
        "limit": name, "kind": kind, "used": used, "max": most, "unit": unit, "window": window,
        "line": f"policy.yaml:{line}",
    }  # fmt: skip


LIMITS: dict[str, Any] = {
    "rows": [
        limit("round_bytes", "content", 2_040_739, 8 * MIB, "bytes", "round", 12),
        limit("day_bytes", "all", 233_911_201, 256 * MIB, "bytes", "day", 13),
        limit("messages_per_minute", "content", 4, 60, "messages", "minute", 14),
        limit("control_messages_per_minute", "control.*", 11, 120, "messages", "minute", 15),
        limit("polls_per_minute", "control.poll", 20, 240, "messages", "minute", 16),
        limit("per_round", "lora.factors", 1, 1, "sets", "round", 31),
        limit("max_responses_per_round", "public.responses", 256, 512, "responses", "round", 44),
        limit("max_tokens_per_round", "public.responses", 48_211, 131_072, "tokens", "round", 45),
        limit("max_bytes_per_round", "public.responses", 188_231, MIB, "bytes", "round", 46),
        limit("max_hits_per_day", "public.responses", 0, 3, "hits", "day", 52),
        limit("max_per_day", "reward.scalar", 81, 100, "scores", "day", 60),
        limit("outbox_max_gb", "content", 41_000_000, 2_000_000_000, "bytes", "life", 77),
    ],
    "capacity": [
        {"kind": "lora.factors", "bits": 995_328.0, "because": "1 x 124416 values of 8.0 bits (float32, at most 1.5)",
         "planted_bits": 124_416.0, "planted": "one low bit of each value"},
        {"kind": "public.responses", "bits": 8_395_264.4, "because": "1048576 bytes of text in at most 512 answers",
         "planted_bits": None, "planted": ""},
        {"kind": "control.*", "bits": 311.2, "because": "offers: 6 with 4 outcomes each", "planted_bits": 40.0,
         "planted": "progress"},
    ],
    "not_counted": "not counted in these bits: when messages are sent",
    "dp": "off",
    "forecast": {"rounds_left": 16, "bound_by": "day_bytes of this UTC day (policy.yaml:13)"},
    "releases": [
        {"seq": 5200 - 7 * index, "run": "run-1", "round": 14 - index // 4, "kind": "public.responses",
         "bytes": 48_231 + index, "at": f"2026-12-01T09:{59 - index:02d}:00Z", "outcome": "acked"}
        for index in range(20)
    ],
}  # fmt: skip


def told(answer: Any) -> Limits:
    return read(Limits, answer)


async def opened(desk: Desk, answer: Any = LIMITS) -> BudgetScreen:
    await desk.show(silo())
    await desk.press("7")
    screen = desk.app.screen
    assert isinstance(screen, BudgetScreen)
    await desk.answer("limits", answer)
    return screen


def one(used: int, most: int, **more: Any) -> dict[str, Any]:
    return limit("x", "k", used, most, "messages", "round", 1) | more


# ---- rows and lines --------------------------------------------------------------------------------


def test_the_fullest_come_first_and_the_others_stay_as_the_policy_has_them() -> None:
    rows = limits.limit_rows(told(LIMITS).rows, NOW, UNICODE)
    assert [(row.limit, row.state) for row in rows[:3]] == [
        ("per_round", "FULL"), ("day_bytes", "look"), ("max_per_day", "look"),
    ]  # fmt: skip
    assert [row.limit for row in rows[3:6]] == ["round_bytes", "messages_per_minute", "control_messages_per_minute"]
    assert {row.state for row in rows[3:]} == {"ok"} and len(rows) == len(LIMITS["rows"])


@pytest.mark.parametrize(
    ("used", "most", "state", "percent"),
    [(80, 100, "ok", "80 %"), (81, 100, "look", "81 %"), (999, 1000, "look", "99 %"), (100, 100, "FULL", "100 %"),
     (101, 100, "FULL", "over"), (0, 0, "ok", "0 %"), (1, 0, "FULL", "over"), (0, 5, "ok", "0 %")],
)  # fmt: skip
def test_a_limit_is_full_only_when_it_is(used: int, most: int, state: str, percent: str) -> None:
    (row,) = limits.limit_rows(told({"rows": [one(used, most)]}).rows, NOW, UNICODE)
    assert row.state == state and row.percent == percent
    assert row.bar.startswith("━" * 6) == (state == "FULL")
    assert row.bar.startswith("╌") == (used == 0)


@pytest.mark.parametrize(
    ("window", "now", "text"),
    [("day", 86400 * 20_000 + 36_000, "00:00Z in 14h00"), ("day", 86400 * 20_000 + 86_399, "00:00Z in 0h00"),
     ("minute", NOW, "after 60 s each"), ("round", NOW, "next round"), ("match", NOW, "next match"),
     ("life", NOW, "as room is freed"), ("week", NOW, "-")],
)  # fmt: skip
def test_when_a_limit_begins_anew(window: str, now: float, text: str) -> None:
    assert limits.resets_text(window, now) == text


def test_the_head_names_what_is_nearly_used_up_what_binds_and_what_is_not_counted() -> None:
    rows = limits.limit_rows(told(LIMITS).rows, NOW, UNICODE)
    text = to_text(limits.head_lines(told(LIMITS), rows, 200, UNICODE, brief=False))
    assert "look      per_round lora.factors 100 % · day_bytes all 87 % · max_per_day reward.scalar 81 %" in text
    assert "about 16 more rounds, if each is like the last one" in text
    assert "bound by day_bytes of this UTC day (policy.yaml:13)" in text
    assert "DP off: no privacy budget is kept and none is claimed" in text
    assert "at most 9,390,904 bits (1.1 MiB) a round" in text
    assert "not counted in these bits: when messages are sent" in text and limits.NOT_COVERED in text
    assert limits.NOT_COVERED not in to_text(limits.head_lines(told(LIMITS), rows, 200, UNICODE, brief=True))
    assert "FULL nothing more fits  look above 80 %" in text and "over" not in text.rpartition("words")[2]
    over = limits.limit_rows(told({"rows": [{"limit": "a", "used": 3, "max": 2}]}).rows, 0.0, UNICODE)
    assert "over more was used than is allowed" in to_text(limits.legend_lines(over, 200))
    assert "state     FULL: nothing more fits; over: more was used" in to_text(limits.limit_text(over[0], 200))
    assert limits.legend_lines([], 200) == []


@pytest.mark.parametrize(
    ("forecast", "said"),
    [({"rounds_left": None, "bound_by": "no round has let anything out yet"},
      "no forecast: no round has let anything out yet"),
     ({"rounds_left": 0, "bound_by": "day_bytes"}, "no further round fits: bound by day_bytes"),
     ({"rounds_left": 1200, "bound_by": "day_bytes"}, "about 1,200 more rounds,"), (None, "no forecast: not told")],
)  # fmt: skip
def test_a_forecast_that_is_none_says_why(forecast: Any, said: str) -> None:
    assert said in to_text(limits.forecast_lines(told({"forecast": forecast}), 120))


def test_nothing_is_said_of_a_budget_that_the_daemon_does_not_tell() -> None:
    assert to_text([limits.dp_line(told({"dp": "off"}))]).endswith(limits.DP_OFF)
    assert to_text([limits.dp_line(told({}))]).endswith("DP not told") and "claimed" not in to_text(
        [limits.dp_line(told({}))]
    )
    assert "no limit is above 80 %" in to_text(limits.look_lines([], 80, UNICODE))
    assert "no kind whose values" in to_text(limits.capacity_lines(told({"capacity": []}), 80))


# ---- the screen ------------------------------------------------------------------------------------


async def test_it_asks_limits_without_arguments_and_a_coordinator_nothing() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("7")
        assert desk.app.wanted["limits"] == ("limits", {})
        await desk.show(coordinator())
        assert "limits" not in desk.app.wanted and "a coordinator keeps none" in desk.text


async def test_at_80_cells_each_limit_kind_and_amount_stands_whole() -> None:
    rows = [
        {**row, "used": 360_755, "max": 50_000_000_000} if row["unit"] == "bytes" else row for row in LIMITS["rows"]
    ]
    async with console((80, 24)) as desk:
        screen = await opened(desk, {**LIMITS, "rows": rows})
        shown = desk.text.partition("Limits ")[2]
        assert "353 KiB of 46.6 GiB" in shown and "…" not in shown
        assert all(item.row.limit in shown and item.row.kind in shown for item in screen.shown.rows.shown)


async def test_each_fact_is_there_or_a_key_away() -> None:
    async with console() as desk:
        screen = await opened(desk)
        for said in ("look      per_round", "DP off: no privacy budget", "about 16 more", "9,390,904 bits", "FULL",
                     "1 of 1 ", "100 %", "223.1 of 256.0 MiB", "lora.factors"):  # fmt: skip
            assert said in desk.text, said
        assert screen.twin() == "silo ledger limits"
        await desk.press("j", "enter")
        assert isinstance(desk.app.screen, TextDialog)
        for said in ("day_bytes", "policy.yaml:13", "233,911,201 of 268,435,456 bytes", "00:00Z in 14h00",
                     "silo ledger limits", "what a message says", "the guard"):  # fmt: skip
            assert said in desk.text, said
        await desk.press("escape", "tab")
        assert "8,395,264" in desk.text and screen.twin() == "silo ledger forecast"
        await desk.press("j", "enter")
        assert "124,416 bits a round were got out" in " ".join(desk.text.split()) and "one low bit" in desk.text
        await desk.press("escape", "tab")
        assert "Released so far, newest · 20" in desk.text and screen.twin() == "silo outbox show 5200"
        await desk.press("enter")
        assert isinstance(desk.app.screen, TextDialog)
        await desk.press("escape", "tab")
        assert screen.twin() == "silo ledger limits"
        assert await desk.answers_sent() == []


async def test_where_one_table_is_seen_at_a_time_the_others_are_named() -> None:
    async with console((80, 24)) as desk:
        await opened(desk)
        assert "tables    [limits 12]  bits per round 3  released 20  tab: next" in desk.text
        await desk.press("tab")
        assert "limits 12  [bits per round 3]  released 20" in desk.text
    async with console((140, 42)) as desk:
        await opened(desk)
        assert "tab: next" not in desk.text and "control_messages_per_minute " in desk.text
        assert "words     FULL nothing more fits  look above 80 %" in desk.text


async def test_at_a_coordinator_no_key_is_offered_that_does_nothing() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("7")
        assert "tab Next table  enter Open" in desk.text
        await desk.show(coordinator())
        assert "limits are counted at each silo" in desk.text
        assert not any(key in desk.text for key in ("tab Next", "enter Open", "/ Filter", "s Sort"))
        await desk.press("tab")
        assert not desk.app.screen.query_one("#capacity").display  # which no coordinator has


async def test_rows_that_move_do_not_take_the_cursor_along() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press("j")
        chosen = screen.shown.rows.cursor
        assert chosen == "day_bytes all day"
        fuller = [row | {"used": row["max"]} if row["limit"] == "round_bytes" else row for row in LIMITS["rows"]]
        await desk.answer("limits", LIMITS | {"rows": fuller})
        assert screen.shown.rows.cursor == chosen
        assert [item.row.limit for item in screen.shown.rows.shown[:2]] == ["round_bytes", "per_round"]


@pytest.mark.parametrize(
    ("used", "most", "text"),
    [(int(1.9 * 2**20), 1000 * 2**30, "2 MiB of 1000.0 GiB"), (2**20 // 2, 1000 * 2**30, "512 KiB of 1000.0 GiB"),
     (int(1.9 * 2**20), 9 * 2**20, "1.9 of 9.0 MiB")],
)  # fmt: skip
def test_an_amount_without_its_tenths_is_rounded_up(used: int, most: int, text: str) -> None:
    assert limits.of_text(read(LimitRow, {"used": used, "max": most, "unit": "bytes"})) == text

"""Screen 7: limits, the bits of a hostile trainer, the forecast, releases, and what no limit counts."""

from __future__ import annotations

from typing import Any

import pytest

from console.base import TextDialog
from console.screens.budget import BudgetScreen
from fedsilo.control.answers import LimitRow, Limits, read
from fedsilo.views import limits
from fedsilo.views.lines import UNICODE, to_text
from tests.console.desk import console
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
TOLD = read(Limits, LIMITS)


def rows_of(*rows: dict[str, Any]) -> list[Any]:
    return limits.limit_rows(read(Limits, {"rows": list(rows)}).rows, NOW, UNICODE)


def test_the_fullest_come_first_and_the_others_stay_as_the_policy_has_them() -> None:
    rows = rows_of(*LIMITS["rows"])
    assert [(row.limit, row.state) for row in rows[:6]] == [
        ("per_round", "FULL"), ("day_bytes", "look"), ("max_per_day", "look"), ("round_bytes", "ok"),
        ("messages_per_minute", "ok"), ("control_messages_per_minute", "ok"),
    ]  # fmt: skip
    assert {row.state for row in rows[3:]} == {"ok"} and len(rows) == len(LIMITS["rows"])


@pytest.mark.parametrize(
    ("used", "most", "state", "percent"),
    [(80, 100, "ok", "80 %"), (81, 100, "look", "81 %"), (999, 1000, "look", "99 %"), (100, 100, "FULL", "100 %"),
     (101, 100, "FULL", "over"), (0, 0, "ok", "0 %"), (1, 0, "FULL", "over"), (0, 5, "ok", "0 %")],
)  # fmt: skip
def test_a_limit_is_full_only_when_it_is(used: int, most: int, state: str, percent: str) -> None:
    (row,) = rows_of(limit("x", "k", used, most, "messages", "round", 1))
    assert (row.state, row.percent) == (state, percent)
    assert (row.bar.startswith("━" * 6), row.bar.startswith("╌")) == (state == "FULL", used == 0)


@pytest.mark.parametrize(
    ("window", "now", "text"),
    [("day", 86400 * 20_000 + 36_000, "00:00Z in 14h00"), ("day", 86400 * 20_000 + 86_399, "00:00Z in 0h00"),
     ("minute", NOW, "after 60 s each"), ("round", NOW, "next round"), ("match", NOW, "next match"),
     ("life", NOW, "as room is freed"), ("week", NOW, "-")],
)  # fmt: skip
def test_when_a_limit_begins_anew(window: str, now: float, text: str) -> None:
    assert limits.resets_text(window, now) == text


@pytest.mark.parametrize(
    ("used", "most", "text"),
    [(int(1.9 * 2**20), 1000 * 2**30, "2 MiB of 1000.0 GiB"), (2**20 // 2, 1000 * 2**30, "512 KiB of 1000.0 GiB"),
     (int(1.9 * 2**20), 9 * 2**20, "1.9 of 9.0 MiB")],
)  # fmt: skip
def test_an_amount_without_its_tenths_is_rounded_up(used: int, most: int, text: str) -> None:
    assert limits.of_text(read(LimitRow, {"used": used, "max": most, "unit": "bytes"})) == text


NONE = read(Limits, {})
OVER = rows_of({"limit": "a", "used": 3, "max": 2})


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        (limits.head_lines(TOLD, rows_of(*LIMITS["rows"]), 200, UNICODE, brief=False),
         ("per_round lora.factors 100 % · day_bytes all 87 % · max_per_day reward.scalar 81 %", "about 16 more rounds",
          "bound by day_bytes of this UTC day (policy.yaml:13)", "9,390,904 bits (1.1 MiB) a round", limits.DP_OFF,
          LIMITS["not_counted"], limits.NOT_COVERED, "FULL nothing more fits  look above 80 %")),
        (limits.legend_lines(OVER, 200), ("over more was used than is allowed",)),
        (limits.limit_text(OVER[0], 200), ("FULL: nothing more fits; over: more was used",)),
        (limits.capacity_text(TOLD.capacity[0], TOLD, 200), ("124,416 bits a round were got out", "one low bit")),
        (limits.look_lines([], 80, UNICODE), ("no limit is above 80 %",)),
        (limits.capacity_lines(NONE, 80), ("no kind whose values",)),
        ([limits.dp_line(TOLD)], (limits.DP_OFF,)),
        ([limits.dp_line(NONE)], ("DP not told",)),
        (limits.forecast_lines(NONE, 120), ("no forecast: not told",)),
        (limits.forecast_lines(read(Limits, {"forecast": {"rounds_left": None, "bound_by": "why"}}), 120),
         ("no forecast: why",)),
        (limits.forecast_lines(read(Limits, {"forecast": {"rounds_left": 0, "bound_by": "day"}}), 120),
         ("no further round fits: bound by day",)),
        (limits.forecast_lines(read(Limits, {"forecast": {"rounds_left": 1200, "bound_by": "day"}}), 120),
         ("about 1,200 more rounds,",)),
    ],
)  # fmt: skip
def test_what_is_said_above_and_of_one(lines: Any, facts: tuple[str, ...]) -> None:
    text = to_text(lines)
    assert [fact for fact in facts if fact not in text] == []


def test_where_there_is_little_room_what_no_limit_counts_is_a_key_away_and_no_legend_names_nothing() -> None:
    brief = to_text(limits.head_lines(TOLD, rows_of(*LIMITS["rows"]), 200, UNICODE, brief=True))
    assert limits.NOT_COVERED not in brief and limits.legend_lines([], 200) == []


@pytest.mark.slow
async def test_each_table_is_a_key_away_and_at_a_coordinator_there_is_none() -> None:
    async with console() as desk:
        await desk.show(silo())
        await desk.press("7")
        assert desk.app.wanted["limits"] == ("limits", {})
        await desk.answer("limits", LIMITS)
        screen = desk.app.screen
        assert isinstance(screen, BudgetScreen)
        shown = desk.text.partition("Limits ")[2]
        assert "…" not in shown
        assert all(item.row.limit in shown and item.row.kind in shown for item in screen.shown.rows.shown)
        await desk.press("j")
        fuller = [row | {"used": row["max"]} if row["limit"] == "round_bytes" else row for row in LIMITS["rows"]]
        await desk.answer("limits", LIMITS | {"rows": fuller})
        assert screen.shown.rows.cursor == "day_bytes all day"  # rows that move do not take the cursor along
        for table, twin, facts in (
            ("[limits 12]", "silo ledger limits", ("policy.yaml:13", "233,911,201 of 268,435,456 bytes", "the guard")),
            ("[bits per round 3]", "silo ledger forecast", ("8,395,264", "1048576 bytes of text")),
            ("[released 20]", "silo outbox show 5200", ("5200",)),
        ):
            desk.shows(table)
            assert screen.twin() == twin
            await desk.press("enter")
            assert isinstance(desk.app.screen, TextDialog)
            desk.shows(*facts)
            await desk.press("escape", "tab")
        desk.shows("[limits 12]")
        await desk.show(coordinator())
        assert "limits" not in desk.app.wanted and not desk.app.screen.query_one("#capacity").display
        await desk.press("tab")
        desk.shows("a coordinator keeps none", lacks=["tab Next", "enter Open", "/ Filter", "s Sort"])
    async with console((140, 42)) as desk:
        await desk.show(silo())
        await desk.press("7")
        await desk.answer("limits", LIMITS)
        desk.shows("control_messages_per_minute ", "FULL nothing more fits", lacks=["tab: next"])

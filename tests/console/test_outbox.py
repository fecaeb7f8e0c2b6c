"""The outbox: what was to leave, whether it left, and why; the inbox beside it; and one decision whole."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from console.screens.outbox import MessageScreen, OutboxScreen
from console.table_screen import PAGE_ROWS
from fedsilo.views.columns import choose_columns
from fedsilo.views.lines import to_text
from fedsilo.views.messages import columns_of, detail_lines, left_part, message_row, why_lines
from fedsilo.views.state import Link, value_text
from silo.guard.messages import Denied
from tests.console.desk import Desk, console
from tests.console.states import silo
from tests.simulated.queries import poll, queries_of
from tests.world import Bench

SENT = {"allow": "acked", "deny": "", "hold": ""}
RULES_OK = [
    {"rule": "measured", "outcome": "ok", "measured": True, "limit": True, "line": 3},
    {"rule": "sender", "outcome": "ok", "measured": "spiffe://cardio-net/silo/hospital_a",
     "limit": "the expected party, listed in the policy", "line": 14},
    {"rule": "valid", "outcome": "ok", "measured": 1796119200, "limit": [1796083200, 1827619199], "line": 16,
     "file": "charter"},
    {"rule": "message bytes", "outcome": "ok", "measured": 1_992_294, "limit": 8 << 20, "line": 22},
    {"rule": "schema", "outcome": "ok", "measured": "ab" * 32, "limit": "ab" * 32, "line": 38},
    {"rule": "L2 of the delta", "outcome": "ok", "measured": 0.93217, "limit": 4.0, "line": 54},
]  # fmt: skip
DENIED = {
    "rule": "public prompts of the open step", "outcome": "deny", "reason": "PROMPT", "measured": 1, "limit": 0,
    "line": 70,
}  # fmt: skip
WOULD_PASS = "public prompts of the open step: at most 0 pass, it had 1 (policy.yaml:70)"


def message(seq: int, verdict: str = "", **changes: Any) -> dict[str, Any]:
    """A row as `fedsilo.audit.index.row_of` makes it."""
    verdict = verdict or ("deny" if seq % 10 == 0 else "hold" if seq % 17 == 0 else "allow")
    factors = seq % 3 == 0
    rule = {"deny": DENIED["rule"], "hold": "approvals"}.get(verdict, "")
    return {
        "seq": seq, "time": f"2026-12-01T09:{seq // 60 % 60:02d}:{seq % 60:02d}Z", "run": "run-1", "round": 1,
        "step": seq % 4, "kind": "lora.factors" if factors else "public.responses", "items": 28 if factors else 64,
        "bytes": 1_992_294 if factors else 48_231 + seq % 7, "verdict": verdict, "rule": rule,
        "reasons": ["PROMPT"] if verdict == "deny" else [], "rules": [rule] if rule else [],
        "digest": f"{seq:04x}" + "5a" * 28 + f"{seq:04x}", "digest_keyed": not factors,
        "outcome": SENT[verdict], "milliseconds": 14 if verdict == "allow" else None, **changes,
    }  # fmt: skip


def page(newest: int, oldest: int = 1, rows: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    first = max(newest - PAGE_ROWS + 1, oldest)
    rows = rows or [message(seq, **changes) for seq in range(newest, first - 1, -1)]
    verdicts = [message(seq)["verdict"] for seq in range(newest)]
    return {
        "messages": rows,
        "total": newest,
        "held": verdicts.count("hold"),
        "denied": verdicts.count("deny"),
        "next": first if first > oldest else None,
    }


def decision(seq: int, verdict: str, **changes: Any) -> dict[str, Any]:
    """The answer to the query for one, with the record as `silo.guard.decisions.Judge.record_decision` makes it."""
    held = {"rule": "approvals", "outcome": "hold", "reason": "APPROVAL", "measured": 0, "limit": 1, "line": 85}
    facts = {"payload_bytes": 1_992_294, "tensors": 28, "elements": 124_416, "l2": 0.93217}
    record = {
        "seq": seq, "t": 1_796_119_200_000, "event": "egress.decision", "kind": "lora.factors", "run": "run-1",
        "round": 1, "step": 0, "peer": "spiffe://cardio-net/coordinator/main", "decision": verdict, "sequence": 4,
        "reasons": ["PROMPT"] if verdict == "deny" else [],
        "rules": [*RULES_OK, *([DENIED] if verdict == "deny" else [held] if verdict == "hold" else [])],
        "payload": {"bytes": 1_992_294, "sha256": "7b" * 32, "sha256_before": "7c" * 32, "archived": True},
        "facts": {
            "final": facts, "offered": {**facts, "l2": 5.25},
            "transform": {"clip_l2": 4.0, "clipped": True, "grid": "bfloat16", "randomised_low_bits": 3},
        },
        "policy": {"effective": "9f2c" + "31" * 28 + "41ab"}, "detail": {"rules_not_applicable": 122}, **changes,
    }  # fmt: skip
    sentences = {"deny": [WOULD_PASS], "hold": ["approvals: 1 persons must approve exactly these bytes, 0 have"]}
    return {
        "message": record, "outcome": SENT[verdict], "milliseconds": 14 if verdict == "allow" else None,
        "would_pass": sentences.get(verdict, []),
    }  # fmt: skip


async def opened(desk: Desk, answer: dict[str, Any] | None = None) -> OutboxScreen:
    await desk.show(silo())
    await desk.press("5")
    await desk.answer("outbox", answer or page(250))
    screen = desk.app.screen
    assert isinstance(screen, OutboxScreen)
    return screen


def rows_of(desk: Desk) -> list[str]:
    return [row for row in desk.text.splitlines() if ":" in row and ("lora." in row or "public." in row)]


# ---- the list --------------------------------------------------------------------------------------


async def test_when_what_the_verdict_and_whether_it_left_stand_at_the_least_size_too() -> None:
    async with console((60, 16)) as desk:
        await opened(desk)
        header = next(line for line in desk.text.splitlines() if " verdict" in line)
        for name in ("time", "kind", "verdict", "left"):
            assert name in header, name
        first = next(row for row in desk.text.splitlines() if "09:04:10" in row)
        assert "▸" in first and "DENY" in first and "no" in first.split("DENY")[1]
        second = next(row for row in desk.text.splitlines() if "09:04:09" in row)
        assert "allow" in second and "yes" in second.split("allow")[1]


async def test_the_counts_of_the_daemon_and_the_bytes_out_stand_above() -> None:
    async with console() as desk:
        await opened(desk)
        words = " ".join(desk.text.split())
        assert "r1 public.responses" in words and "100 loaded of 250" in words
        # the whole rule of the row under the cursor, also where its column is narrow
        assert "DENY public prompts of the open step" in words and "00fa…00fa" in words
        assert "250 messages 13 held 25 denied 51.1 KiB left since the start, control included" in words, words
        await desk.press("tab")
        assert "since the daemon" not in desk.text


@pytest.mark.parametrize(
    ("verdict", "outcome", "told"),
    [("allow", "acked", "yes"), ("allow", "sent", "yes"), ("allow", "", "not yet"), ("deny", "", "no"),
     ("hold", "", "no"), ("allow", "indeterminate", "unknown"), ("deny", "sent", "unknown"),
     ("shadow", "", "unknown"), (None, 7, "unknown")],
)  # fmt: skip
def test_what_cannot_be_told_never_counts_as_not_left(verdict: Any, outcome: Any, told: str) -> None:
    assert left_part(message_row({"verdict": verdict, "outcome": outcome}))[0] == told
    answer = {"message": {"decision": verdict, "kind": "k"}, "outcome": outcome}
    text = to_text(detail_lines("outbox", answer, "silo outbox show 1", 120))
    assert ("count it as gone" in text) == (told == "unknown")
    assert ("nothing was sent" in text) == (told == "no")


async def test_rows_that_arrive_do_not_move_the_cursor_and_older_pages_come_when_somebody_goes_there() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press("j", "j")
        await desk.answer("outbox", page(260))
        assert screen.table.selected().id == "248"  # type: ignore[union-attr]
        assert not [key for key in desk.app.wanted if "before" in key]
        await desk.press("G")
        assert desk.app.wanted["outbox before 151"] == ("outbox", {"limit": PAGE_ROWS, "before": 151})
        await desk.answer("outbox before 151", page(150))
        assert screen.table.rows.kept == 210


async def test_a_verdict_in_the_filter_is_asked_of_the_daemon_and_the_cursor_stays_on_its_row() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press(*["j"] * 10)
        await desk.press("slash", *"verdict:den")
        assert desk.app.wanted["outbox"] == ("outbox", {"limit": PAGE_ROWS})
        await desk.press("y", "enter")
        assert "outbox" not in desk.app.wanted
        assert desk.app.wanted["outbox deny"] == ("outbox", {"verdict": "deny", "limit": PAGE_ROWS})
        assert "09:04" not in desk.text  # what was there before is no answer to this
        denied = page(250, rows=[message(seq) for seq in (250, 240, 20, 10)])
        await desk.answer("outbox deny", {**denied, "next": None})
        assert [item.id for item in screen.table.rows.shown] == ["250", "240", "20", "10"]
        assert screen.table.selected().id == "240"  # type: ignore[union-attr]
        assert "Outbox · 4 loaded of 250 · /verdict:deny" in desk.text
        await desk.press("escape")
        assert desk.app.wanted["outbox"] == ("outbox", {"limit": PAGE_ROWS})
        assert screen.table.rows.kept in (0, 100)
        await desk.answer("outbox", page(250))
        assert screen.table.rows.kept == 100 and screen.table.rows.next == 151
        assert screen.table.selected().id == "240"  # type: ignore[union-attr]
        await desk.press("slash", *"!verdict:deny", "enter")
        assert "outbox" in desk.app.wanted and "DENY" not in "".join(rows_of(desk))


async def test_polls_are_asked_for_only_when_somebody_wants_them() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press("c")
        assert desk.app.wanted["outbox control"] == ("outbox", {"control": True, "limit": PAGE_ROWS})
        await desk.answer("outbox control", page(3, kind="control.poll"))
        assert "c hides control messages" in desk.text and "control.poll" in desk.text
        assert screen.twin() == "silo outbox show 3"
        await desk.press("space", "c")
        assert "the rows are frozen" in desk.text and screen.table.rows.kept == 3


@pytest.mark.parametrize("key", ["tab", "h", "l"])
async def test_the_inbox_is_a_key_away_and_each_keeps_its_cursor(key: str) -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press("j", key)
        assert "outbox" not in desk.app.wanted
        assert desk.app.wanted["inbox"] == ("inbox", {"limit": PAGE_ROWS})
        came = [message(7, kind="run.plan", peer="spiffe://cardio-net/coordinator/main", outcome="", milliseconds=None)]
        await desk.answer("inbox", {**page(7), "messages": came, "next": None})
        assert "run.plan" in desk.text and "coordinator/main" in desk.text and "let in" in desk.text
        header = next(line for line in desk.text.splitlines() if " verdict" in line)
        assert " left" not in header and " ms" not in header
        assert screen.twin() == "silo inbox show 7"
        await desk.press("j", "k", key)
        assert screen.twin() == "silo outbox show 249"


# ---- one decision ----------------------------------------------------------------------------------


async def test_a_denied_one_says_which_rule_its_limit_and_what_would_pass() -> None:
    async with console() as desk:
        await opened(desk)
        await desk.press("enter")
        assert isinstance(desk.app.screen, MessageScreen)
        assert desk.app.wanted["outbox record 250"] == ("outbox", {"seq": 250})
        await desk.answer("outbox record 250", decision(250, "deny"))
        words = " ".join(desk.text.split())
        for fact in (
            "nothing was sent", f"DENY {WOULD_PASS}", "run-1, round 1 step 0", "spiffe://cardio-net/coordinator/main",
            "1992294 bytes, 1.9 MiB", "2026-12-01 10:00:00 UTC", "sha256 " + "7b" * 16 + " " + "7b" * 16,
        ):  # fmt: skip
            assert fact in words, fact
        assert words.count("at most 0 pass") == 1 and "would pass" not in words and "measured 1, limit" not in words


@pytest.mark.parametrize("answer", [7, [], {"messages": 3}, {"messages": [None, {}, {"seq": None}], "next": "x"}])
def test_a_record_of_another_shape_breaks_nothing(answer: Any) -> None:
    assert detail_lines("inbox", {"message": answer, "would_pass": answer}, "", 60)


def test_a_sentence_that_says_what_was_measured_stands_for_the_rule_and_another_below_it() -> None:
    record = {"decision": "deny", "rules": [DENIED, {**DENIED, "rule": "kind", "measured": "a", "limit": "b"}]}
    told = to_text(why_lines(record, {"would_pass": [WOULD_PASS, "kind: b passes"]}, 100)).splitlines()
    assert told == [f"DENY {WOULD_PASS}", "DENY kind: measured a, limit b", "would pass: kind: b passes"]


def test_where_there_is_room_a_rule_stands_whole_in_its_row_and_a_long_time_in_its_cell() -> None:
    shown = {column.name: width for column, width in choose_columns(columns_of("outbox", wide=True), 136)}
    assert shown["rule"] >= len("public prompts of the open step") and {"record", "digest"} <= set(shown)
    assert shown["kind"] >= len("control.checkpoint")
    (milliseconds,) = [column for column in columns_of("outbox") if column.name == "ms"]
    assert milliseconds.show(message_row({"milliseconds": 9_999}))[0] == "9999"
    assert milliseconds.show(message_row({"milliseconds": 12_345}))[0] == "12 s"


async def test_every_rule_and_what_the_guard_changed_are_told() -> None:
    async with console((140, 60)) as desk:
        await opened(desk)
        await desk.press("j", "enter")
        await desk.answer("outbox record 249", decision(249, "allow"))
        words = " ".join(desk.text.split())
        for fact in (
            "sent, and the coordinator took it, after 14 ms", "the bytes are kept in this site's archive",
            "other bytes than were offered", "clipped to L2 4", "to bfloat16", "3 low bits of each value are random",
            "bytes 1.9 MiB → 1.9 MiB", "L2 5.25 → 0.9322", "ok message bytes 1.9 MiB 8.0 MiB policy:22",
            "ok valid 2026-12-01 2026-12-01 to 2027-11-30 charter:16", "ok L2 of the delta 0.9322 4 policy:54",
            "122 more rules do not apply to this kind", "9f2c…41ab", "249 of this silo's audit log",
            "silo outbox show 249",
        ):  # fmt: skip
            assert fact in words, fact
        await desk.press("Y")
        assert "copied: silo outbox show 249" in desk.text
        await desk.press("y")
        assert "copied: sha256:" + "7b" * 32 in " ".join(desk.text.split())
        await desk.press("escape")
        assert desk.app.top.called == "outbox"


async def test_a_held_one_says_that_it_waits_for_people() -> None:
    async with console((100, 30)) as desk:
        await opened(desk, page(17))
        await desk.press("enter")
        await desk.answer("outbox record 17", decision(17, "hold"))
        assert "nothing was sent; a person's yes" in desk.text and "HOLD approvals: 0 of 1" in desk.text
        assert "1 persons must approve exactly these bytes" in desk.text and "DENY" not in desk.text


@pytest.mark.parametrize(
    ("end", "left", "told"),
    [("rejected", "no", "a person said no, for good"), ("approved", "later", "a decision of its own"),
     ("expired", "no", "nobody answered in time"), ("missed", "no", "the run went on")],
)  # fmt: skip
async def test_a_hold_that_is_over_neither_waits_nor_says_what_would_pass(end: str, left: str, told: str) -> None:
    async with console((80, 24)) as desk:
        row = message(17, verdict="hold", outcome=end, milliseconds=None)
        screen = await opened(desk, {**page(1, rows=[row]), "held": 0})
        names = [column.name for column in columns_of("outbox")]
        cells = dict(zip(names, (part[0] for part in screen.table.rows.shown[0].cells), strict=True))
        assert (cells["verdict"], cells["left"], cells["rule"]) == ("held", left, end)
        assert "HOLD" not in desk.text and "0 held" in desk.text
        await desk.press("enter")
        await desk.answer("outbox record 17", {**decision(17, "hold"), "outcome": end, "would_pass": []})
        words = " ".join(desk.text.split())
        assert told in words and "held by approvals" in words and "HOLD" not in words and "would pass" not in words


async def test_the_box_below_tells_of_the_row_under_the_cursor_where_there_is_room() -> None:
    async with console((100, 30)) as desk:
        await opened(desk)
        assert desk.app.wanted["outbox record 250"] == ("outbox", {"seq": 250})
        await desk.answer("outbox record 250", decision(250, "deny"))
        assert "Record 250" in desk.text and WOULD_PASS[:60] in desk.text
        await desk.press("j")
        assert "Record 249" in desk.text and WOULD_PASS[:60] not in desk.text
        await desk.pilot.resize_terminal(80, 24)
        await desk.pilot.pause()
        assert "Record 249" not in desk.text and not [key for key in desk.app.wanted if "record" in key]


async def test_all_of_a_long_decision_can_be_read_at_80x24() -> None:
    async with console((80, 24)) as desk:
        await opened(desk)
        await desk.press("enter")
        await desk.answer("outbox record 250", decision(250, "deny"))
        assert "j more below" in desk.text and "silo outbox show 250" not in desk.text
        await desk.pilot.press(*["j"] * 40)
        await desk.pilot.pause()
        assert "silo outbox show 250" in desk.text and "j more below" not in desk.text


async def test_going_there_by_number_or_with_a_filter() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("colon", *"outbox 118", "enter")
        assert isinstance(desk.app.screen, MessageScreen)
        assert desk.app.wanted["outbox record 118"] == ("outbox", {"seq": 118})
        await desk.answer("outbox record 118", None, refused=("NOT_FOUND", "record 118 is no outbound decision"))
        assert "error: record 118 is no outbound decision [NOT_FOUND]" in desk.text
        await desk.press("escape", "colon", *"outbox verdict:hold", "enter")
        assert "outbox hold" in desk.app.wanted


# ---- states ----------------------------------------------------------------------------------------


async def test_loading_empty_refused_stale_and_disconnected_say_so() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("5")
        assert "…" in desk.text and "no outbound messages" not in desk.text
        await desk.wait(2.5)
        await desk.show(silo())
        assert "waiting for the daemon's answer to outbox since 00:0" in desk.text
        await desk.answer("outbox", None, refused=("NOT_ALLOWED", "bob has no role auditor; alice may grant it"))
        assert "not allowed: bob has no role auditor" in desk.text
        await desk.answer("outbox", {"messages": [], "total": 0, "held": 0, "denied": 0, "next": None})
        assert "no outbound messages yet" in desk.text and "fedsilo run submit" in desk.text
        await desk.press("slash", *"verdict:deny", "enter")
        await desk.answer("outbox deny", {"messages": [], "total": 9, "held": 0, "denied": 0, "next": None})
        assert "no denied outbound messages yet" in desk.text
        await desk.press("escape")
        await desk.answer("outbox", page(50))
        await desk.wait(10.0)
        desk.app.tick()
        await desk.pilot.pause()
        assert "STALE" in desk.text and "09:00:50" in desk.text
        gone = replace(desk.app.snapshot, link=Link("disconnected", "nothing listens there", "", 100.0, 120.0))
        await desk.show(gone)
        told = " ".join(desk.text.split())
        assert "DISCONNECTED" in told and "nothing listens there" in told and "09:00:50" in told


async def test_one_pane_alone_and_back() -> None:
    async with console((100, 30)) as desk:
        await opened(desk)
        await desk.press("z")
        assert "Record 250" not in desk.text and "13 held" not in desk.text
        await desk.press("tab")
        await desk.answer("inbox", page(7))
        assert "Inbox · 7" in desk.text and "[inbound]" in desk.text


# ---- with the daemon's own answers -----------------------------------------------------------------


@pytest.fixture
def bench(bench: Bench) -> Bench:
    poll(bench)
    bench.gate.transmit(bench.responses())
    assert isinstance(bench.responses(), Denied)
    bench.factors()
    return bench


async def test_what_a_real_gate_wrote_is_what_is_shown(bench: Bench) -> None:
    ask = queries_of(bench)
    async with console((140, 60)) as desk:
        screen = await opened(desk, ask["outbox"]({"limit": PAGE_ROWS}))
        left = {item.row["kind"]: item.cells[8][0] for item in screen.table.rows.shown}
        assert [item.cells[7][0] for item in screen.table.rows.shown] == ["allow", "DENY", "allow"]
        assert columns_of("outbox")[8].name == "left" and left["lora.factors"] == "not yet"
        assert "3 messages" in desk.text and "1 denied" in desk.text
        await desk.press("j")
        seq = screen.table.selected().id  # type: ignore[union-attr]
        await desk.press("enter")
        await desk.answer(f"outbox record {seq}", ask["outbox"]({"seq": int(seq)}))
        words = " ".join(desk.text.split())
        assert "DENY one message per step: at most 1 pass, it had 2" in words
        assert (
            re.search(r"ok bytes of one response 2 B 512 B policy:\d+ ", words)
            and "keyed with this site's key" in words
        )
        await desk.press("escape", "k", "enter")
        await desk.answer(f"outbox record {screen.twin().split()[-1]}", ask["outbox"]({"seq": int(screen.twin()[-2:])}))
        words = " ".join(desk.text.split())
        assert "not sent yet" in words and "not clipped, within L2" in words and "the same bytes as were" in words
        await desk.press("escape", "tab", "c")
        await desk.answer("inbox control", ask["inbox"]({"limit": PAGE_ROWS, "control": True}))
        assert "control.ack" in desk.text and "coordinator/main" in desk.text


@pytest.mark.parametrize(
    ("value", "rule", "told"),
    [(None, "", ""), (True, "", "yes"), (1_992_294, "message bytes", "1.9 MiB"), (0.123456, "", "0.1235"),
     ([1, 2], "", "1, 2"), (list(range(9)), "", "9 listed"), ("ab" * 32, "schema", "abab…abab"),
     (float("nan"), "", "nan"),
     (10.0**300, "valid", "1e+300"), ({"a": 1}, "", "{'a': 1}")],
)  # fmt: skip
def test_values_are_short(value: Any, rule: str, told: str) -> None:
    assert value_text(value, rule) == told


async def test_a_row_and_a_whole_record_are_copied_and_inspected() -> None:
    async with console() as desk:
        await opened(desk)
        await desk.press("y")
        assert "copied: " in desk.text
        await desk.press("i")
        assert '"seq": 250' in desk.text
        await desk.press("escape", "enter")
        link, transform = {"approvals": [7]}, {"responses_withheld": 3}
        await desk.answer("outbox record 250", decision(250, "allow", link=link, facts={"transform": transform}))
        assert "audit records 7" in desk.text and "3 responses" in desk.text
        await desk.press("i")
        assert '"responses_withheld": 3' in desk.text or '"message"' in desk.text

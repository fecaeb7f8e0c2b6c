"""The outbox: what was to leave, whether it left, and why; the inbox beside it; and one decision whole."""

from __future__ import annotations

import re
from typing import Any

import pytest

from console.screens.outbox import MessageScreen, OutboxScreen
from console.table_screen import PAGE_ROWS
from fedsilo.control.answers import AuditRecord, DecisionInFull, MessagePage, MessageRow, read
from fedsilo.views.columns import choose_columns
from fedsilo.views.lines import to_text
from fedsilo.views.messages import (
    columns_of,
    detail_lines,
    left_part,
    rule_part,
    summary_lines,
    verdict_part,
    why_lines,
)
from fedsilo.views.state import value_text
from silo.guard.messages import Denied
from tests.console.desk import Desk, console
from tests.console.states import coordinator, silo
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


# ---- the list --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "outcome", "left", "rule", "says"),
    [
        ("allow", "acked", "yes", "-", "and the coordinator took it"),
        ("allow", "sent", "yes", "-", "has not said that it took it"),
        ("allow", "", "not yet", "-", "not sent yet"),
        ("deny", "", "no", "-", "nothing was sent"),
        ("hold", "", "no", "-", "a person's yes"),
        ("allow", "indeterminate", "unknown", "-", "count it as gone"),
        ("deny", "sent", "unknown", "-", "count it as gone"),
        ("shadow", "", "unknown", "-", "count it as gone"),
        (None, 7, "unknown", "-", "count it as gone"),
        ("hold", "rejected", "no", "rejected", "a person said no, for good"),
        ("hold", "approved", "later", "approved", "a decision of its own"),
        ("hold", "expired", "no", "expired", "nobody answered in time"),
        ("hold", "missed", "no", "missed", "the run went on"),
    ],
)
def test_whether_it_left_and_what_became_of_it(verdict: Any, outcome: Any, left: str, rule: str, says: str) -> None:
    row = read(MessageRow, {"verdict": verdict, "outcome": outcome, "rule": "", "reasons": []})
    assert (left_part(row)[0], rule_part(row)[0]) == (left, rule)
    held = {"rule": "approvals", "outcome": "hold", "measured": 0, "limit": 1}
    record = {"decision": verdict, "kind": "k", "rules": [held] if verdict == "hold" else []}
    answer = read(DecisionInFull, {"message": record, "outcome": outcome})
    text = to_text(detail_lines("outbox", answer, "silo outbox show 1", 120))
    assert says in text and ("count it as gone" in text) == (left == "unknown")
    over = rule != "-"  # nobody is asked any more
    if verdict == "hold":
        assert verdict_part(row)[0] == ("held" if over else "HOLD") and ("HOLD" in text) is not over


@pytest.mark.slow
async def test_a_verdict_in_the_filter_is_asked_of_the_daemon_and_the_cursor_stays_on_its_row() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        table = screen.table
        await desk.press(*["j"] * 10)
        await desk.press("slash", *"verdict:den")
        assert desk.app.wanted["outbox"] == ("outbox", {"limit": PAGE_ROWS})
        await desk.press("y", "enter")
        assert "outbox" not in desk.app.wanted and "09:04" not in desk.text  # what was there is no answer to this
        assert desk.app.wanted["outbox deny"] == ("outbox", {"verdict": "deny", "limit": PAGE_ROWS})
        denied = page(250, rows=[message(seq) for seq in (250, 240, 20, 10)])
        await desk.answer("outbox deny", {**denied, "next": None})
        assert ([item.id for item in table.rows.shown], table.rows.cursor) == (["250", "240", "20", "10"], "240")
        await desk.press("escape")
        await desk.answer("outbox", page(250))
        assert (table.rows.kept, table.rows.next, table.rows.cursor) == (100, 151, "240")
        await desk.press("slash", *"!verdict:deny", "enter")
        assert "outbox" in desk.app.wanted and not [item for item in table.rows.shown if item.row.verdict == "deny"]


@pytest.mark.slow
async def test_a_verdict_a_number_or_control_messages_are_asked_of_the_daemon() -> None:
    nothing = {"messages": [], "total": 9, "held": 0, "denied": 0, "next": None}
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press("c")
        assert desk.app.wanted["outbox control"] == ("outbox", {"control": True, "limit": PAGE_ROWS})
        await desk.answer("outbox control", page(3, kind="control.poll"))
        assert screen.twin() == "silo outbox show 3"
        await desk.press("space", "c")
        assert screen.table.rows.kept == 3  # the rows are frozen
        await desk.press("space", "c")
        await desk.go("outbox verdict:deny")
        await desk.answer("outbox deny", nothing)
        desk.shows("no denied outbound messages yet")
        for typed, key in (
            ("118", "outbox record 118"),
            ("outbox 12", "outbox record 12"),
            ("inbox 7", "inbox record 7"),
        ):
            await desk.go(typed)
            name, _, number = key.split()
            assert desk.app.wanted[key] == (name, {"seq": int(number)}) and isinstance(desk.app.screen, MessageScreen)
            await desk.answer(key, None, ("NOT_FOUND", "there is no such record"))
            desk.shows("there is no such record [NOT_FOUND]")
            await desk.press("escape")
        await desk.go("9" * 16)
        assert isinstance(desk.app.screen, OutboxScreen)
        await desk.press("1")
        await desk.go("inbox")
        assert isinstance(desk.app.screen, OutboxScreen) and "inbox" in desk.app.wanted
        await desk.press("tab")
        await desk.show(coordinator())
        await desk.press("colon", *"118")
        desk.shows("nothing fits")  # where rows are counts a number names nothing


@pytest.mark.slow
@pytest.mark.parametrize("key", ["tab", "h", "l"])
async def test_the_inbox_is_a_key_away_and_each_keeps_its_cursor(key: str) -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        await desk.press("j", key)
        assert "outbox" not in desk.app.wanted and desk.app.wanted["inbox"] == ("inbox", {"limit": PAGE_ROWS})
        came = [message(7, kind="run.plan", peer="spiffe://cardio-net/coordinator/main", outcome="", milliseconds=None)]
        await desk.answer("inbox", {**page(7), "messages": came, "next": None})
        desk.shows("run.plan", "coordinator/main", "let in")
        assert screen.twin() == "silo inbox show 7"
        await desk.press("j", "k", key)
        assert screen.twin() == "silo outbox show 249"


# ---- one decision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [7, [], {"messages": 3}, {"messages": [None, {}, {"seq": None}], "next": "x"}])
def test_a_record_of_another_shape_breaks_nothing(answer: Any) -> None:
    assert detail_lines("inbox", read(DecisionInFull, {"message": answer, "would_pass": answer}), "", 60)


def test_a_sentence_that_says_what_was_measured_stands_for_the_rule_and_another_below_it() -> None:
    rules = [DENIED, {**DENIED, "rule": "kind", "measured": "a", "limit": "b"}]
    record = read(AuditRecord, {"decision": "deny", "rules": rules})
    answer = read(DecisionInFull, {"would_pass": [WOULD_PASS, "kind: b passes"]})
    told = to_text(why_lines(record, answer, 100)).splitlines()
    assert told == [f"DENY {WOULD_PASS}", "DENY kind: measured a, limit b", "would pass: kind: b passes"]


def test_where_there_is_room_a_rule_stands_whole_in_its_row_and_a_long_time_in_its_cell() -> None:
    shown = {column.name: width for column, width in choose_columns(columns_of("outbox", wide=True), 136)}
    assert shown["rule"] >= len("public prompts of the open step") and {"record", "digest"} <= set(shown)
    assert shown["kind"] >= len("control.checkpoint")
    (milliseconds,) = [column for column in columns_of("outbox") if column.name == "ms"]
    assert milliseconds.show(read(MessageRow, {"milliseconds": 9_999}))[0] == "9999"
    assert milliseconds.show(read(MessageRow, {"milliseconds": 12_345}))[0] == "12 s"


@pytest.mark.parametrize(
    ("verdict", "facts", "lacks"),
    [
        ("deny", ("nothing was sent", f"DENY {WOULD_PASS}", "run-1, round 1 step 0", "1992294 bytes, 1.9 MiB",
                  "spiffe://cardio-net/coordinator/main", "2026-12-01 10:00:00 UTC", "7b" * 16),
         ("would pass", "measured 1, limit")),
        ("hold", ("nothing was sent", "HOLD approvals: 0 of 1", "1 persons must approve exactly these bytes"),
         ("DENY",)),
        ("allow", ("and the coordinator took it, after 14 ms", "kept in this site's archive", "clipped to L2 4",
                   "other bytes than were offered", "to bfloat16", "3 low bits of each value are random",
                   "bytes 1.9 MiB → 1.9 MiB", "L2 5.25 → 0.9322", "ok message bytes 1.9 MiB 8.0 MiB policy:22",
                   "ok valid 2026-12-01 2026-12-01 to 2027-11-30 charter:16", "9f2c…41ab", "silo outbox show 9",
                   "122 more rules do not apply", "9 of this silo's audit log"), ()),
    ],
)  # fmt: skip
def test_one_decision_whole(verdict: str, facts: tuple[str, ...], lacks: tuple[str, ...]) -> None:
    answer = read(DecisionInFull, decision(9, verdict))
    words = " ".join(to_text(detail_lines("outbox", answer, "silo outbox show 9", 140)).split())
    assert [fact for fact in facts if fact not in words] == [] and not [fact for fact in lacks if fact in words]


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
    rows = read(MessagePage, ask["outbox"]({"limit": PAGE_ROWS})).messages
    assert [(verdict_part(row)[0], left_part(row)[0]) for row in rows] == [
        ("allow", "not yet"), ("DENY", "no"), ("allow", "yes"),
    ]  # fmt: skip
    for row, facts in (
        (rows[1], ("DENY one message per step: at most 1 pass, it had 2", "keyed with this site's key",
                   r"ok bytes of one response 2 B 512 B policy:\d+ ")),
        (rows[0], ("not sent yet", "not clipped, within L2", "the same bytes as were")),
    ):  # fmt: skip
        words = " ".join(
            to_text(detail_lines("outbox", read(DecisionInFull, ask["outbox"]({"seq": row.seq})), "", 140)).split()
        )
        assert all(re.search(fact, words) for fact in facts), words
    came = read(MessagePage, ask["inbox"]({"limit": PAGE_ROWS, "control": True})).messages
    assert {row.kind for row in came} >= {"control.ack"} and came[0].peer.endswith("coordinator/main")


@pytest.mark.parametrize(
    ("value", "rule", "told"),
    [(None, "", ""), (True, "", "yes"), (1_992_294, "message bytes", "1.9 MiB"), (0.123456, "", "0.1235"),
     ([1, 2], "", "1, 2"), (list(range(9)), "", "9 listed"), ("ab" * 32, "schema", "abab…abab"),
     (float("nan"), "", "nan"),
     (10.0**300, "valid", "1e+300"), ({"a": 1}, "", "{'a': 1}")],
)  # fmt: skip
def test_values_are_short(value: Any, rule: str, told: str) -> None:
    assert value_text(value, rule) == told


@pytest.mark.parametrize(
    ("direction", "sent_bytes", "control", "facts"),
    [
        ("outbox", 52_367.0, False, {"[outbound]", "250 messages", "13 held", "25 denied", "51.1 KiB", "c adds"}),
        ("outbox", None, True, {"[outbound]", "c hides"}),
        ("inbox", 52_367.0, False, {"[inbound]", "250 messages"}),
    ],
)
def test_the_counts_of_the_daemon_stand_above(
    direction: str, sent_bytes: float | None, control: bool, facts: set[str]
) -> None:
    text = to_text(summary_lines(direction, read(MessagePage, page(250)), sent_bytes, 200, control=control))
    assert all(fact in text for fact in facts) and ("KiB" in text) is ("51.1 KiB" in facts)


@pytest.mark.slow
async def test_a_row_and_a_whole_record_are_opened_copied_and_inspected() -> None:
    link, facts = {"approvals": [7]}, {"transform": {"responses_withheld": 3}}
    async with console((80, 24)) as desk:
        await opened(desk)
        assert not [key for key in desk.app.wanted if "record" in key]  # for the box below there is no room
        await desk.press("y")
        desk.shows("copied: ")
        await desk.press("i")
        desk.shows('"seq": 250')
        await desk.press("escape", "enter")
        assert isinstance(desk.app.screen, MessageScreen)
        assert desk.app.wanted["outbox record 250"] == ("outbox", {"seq": 250})
        await desk.answer("outbox record 250", decision(250, "allow", link=link, facts=facts))
        desk.shows("audit records 7", "3 responses", "j more below", lacks=["silo outbox show 250"])
        await desk.pilot.press(*["j"] * 40)
        await desk.pilot.pause()
        desk.shows("silo outbox show 250", lacks=["j more below"])
        for key, copied in (("Y", "silo outbox show 250"), ("y", "sha256:" + "7b" * 32)):
            await desk.press(key)
            desk.shows(f"copied: {copied}")
        await desk.press("i")
        desk.shows('"message"')
        await desk.press("escape", "escape")
        assert desk.app.top.called == "outbox"
        await desk.resize(100, 30)
        await desk.answer("outbox record 250", decision(250, "deny"))
        desk.shows("Record 250", WOULD_PASS[:60])
        await desk.press("j")
        desk.shows("Record 249", lacks=[WOULD_PASS[:60]])
        await desk.press("z")
        desk.shows(lacks=["Record 249"])
        await desk.press("tab")
        await desk.answer("inbox", page(7))
        desk.shows("[inbound]")  # no pane is alone any more

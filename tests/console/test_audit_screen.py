"""Screen 6 on a log that is made record by record as it is asked for; refusals and the broken chain first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from console.screens import audit
from console.screens.audit import AuditScreen, seeks_control
from console.screens.overview import OverviewScreen
from console.table_screen import PAGE_ROWS, ROWS_MAX, TablePane
from fedsilo.control.answers import AuditRecord, AuditStatus, read, to_json
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
from fedsilo.views import audit as audit_screen
from fedsilo.views.lines import ASCII, UNICODE, to_text, width_of
from fedsilo.views.state import Link, Question
from tests.console.desk import Desk, console
from tests.console.states import NOW, silo

KINDS = ("lora.factors", "public.responses", "metrics.eval")


def digest(seq: int) -> str:
    return sha256(b"%d" % seq).hexdigest()


def record(seq: int, **changes: Any) -> dict[str, Any]:
    """As a guard's log has them: every third a decision, then that it was sent and acknowledged."""
    event = ("egress.decision", "egress.sent", "egress.acked")[seq % 3]
    link: dict[str, Any] = {"previous": digest(seq - 1)}
    if event != "egress.decision":
        link["decision"] = seq - seq % 3
    decided: dict[str, Any] = {"decision": "allow", "reasons": []} if event == "egress.decision" else {}
    if seq % 30 == 0:
        decided = {"decision": "deny", "reasons": ["PROMPT_ID"]}
    return {
        "v": 1, "seq": seq, "salt": "5a" * 16, "t": int(NOW * 1000) - 1000 * (300 - seq % 300), "boot": "boot-1",
        "mono": seq, "actor": "spiffe://cardio-net/silo/hospital_a", "event": event, "run": "run-1",
        "round": 1 + seq // 30 % 3, "step": seq % 8, "kind": KINDS[seq // 3 % 3], "direction": "egress",
        "payload": {"bytes": 1000 + seq % 7, "sha256": digest(seq)}, "link": link, **decided, **changes,
    }  # fmt: skip


STATUS: dict[str, Any] = {
    "size": 18_290, "verified_to": 18_204, "verified_at": "2026-12-01T09:41:00Z", "verifying": False,
    "looked_at": 18_204, "of": 18_204, "broken": None, "coordinator": "matches",
    "checkpoint": {"size": 18_000, "time": "2026-12-01T09:38:00Z",
                   "cosigned_by": ["spiffe://cardio-net/coordinator/main", "spiffe://cardio-net/silo/uni_c"]},
}  # fmt: skip


class Log:
    """A log of any length, none of which is kept: pages as `audit` gives them, of at most `look_max` records looked at.

    Args:
        size: records.
        first: the oldest that retention left.
        look_max: as the daemon's `LOOK_RECORDS`.
        polls: nine of ten records are of allowed polls, and each hundredth is of a refused one.
    """

    def __init__(
        self,
        size: int,
        *,
        first: int = 0,
        look_max: int = 2000,
        status: dict[str, Any] | None = None,
        polls: bool = False,
    ) -> None:
        self.size, self.first, self.look_max, self.polls = size, first, look_max, polls
        self.status = {**STATUS, "size": size} if status is None else status
        self.asked: list[Question] = []
        self.verifications = 0

    def query(self, question: Question) -> Any:
        name, arguments = question
        self.asked.append(question)
        if name == "audit.status":
            return self.status
        if name == "audit.verify":
            self.verifications += 1
            self.status = {**self.status, "verifying": True, "looked_at": 0, "of": self.size}
            return self.status
        before = min(arguments.get("before", self.size), self.size)
        lowest = max(self.first, before - self.look_max)
        found: list[dict[str, Any]] = []
        while before > lowest and len(found) < arguments["limit"]:
            before -= 1
            row = record(before)
            if self.polls and before % 10:
                denied = before % 100 == 1
                row |= {"kind": "control.poll", "event": "ingress.decision", "decision": "deny" if denied else "allow"}
            if arguments.get("control") is False and is_poll(row):
                continue
            if row["event"].startswith(arguments.get("event", "")) and arguments.get("text", "") in str(row).lower():
                found.append(row)
        return {"records": found, "size": self.size, "next": before if before > self.first else None}


def is_poll(row: Mapping[str, Any]) -> bool:
    return row["kind"].startswith("control.") and row.get("decision") != "deny"


async def answer_all(desk: Desk, log: Log, rounds: int = 60) -> None:
    """Answer what is wanted until nothing else is."""
    for _ in range(rounds):
        open_keys = [key for key in desk.app.wanted if key not in desk.app.snapshot.answers and key != "halts"]
        if not open_keys:
            return
        for key in open_keys:
            if key in desk.app.wanted:
                await desk.answer(key, log.query(desk.app.wanted[key]))
        kept = {key: value for key, value in desk.app.snapshot.answers.items() if key in desk.app.wanted}
        await desk.show(replace(desk.app.snapshot, answers=kept))
    raise AssertionError(f"it asks on and on: {log.asked[-3:]}")


async def newest_again(desk: Desk, log: Log, **status: Any) -> None:
    """A second later the feed has asked again what is wanted."""
    log.status = {**log.status, **status}
    for key, question in list(desk.app.wanted.items()):
        if key != "halts" and "before" not in question[1]:
            await desk.answer(key, log.query(question))
    await answer_all(desk, log)


async def filter_by(desk: Desk, log: Log, text: str) -> None:
    """Type it after `/`, and answer what is asked for then."""
    desk.app.screen.query_one(TablePane).filter(text)
    await desk.pilot.pause()
    await answer_all(desk, log)


async def opened(desk: Desk, log: Log) -> AuditScreen:
    await desk.show(silo())
    await desk.press("6")
    screen = desk.app.screen
    assert isinstance(screen, AuditScreen)
    await answer_all(desk, log)
    return screen


# ---- what is not right -----------------------------------------------------------------------------


def test_a_break_is_one_line_as_wide_as_the_screen_that_names_the_record() -> None:
    for why in ("x", "x y " * 100, "\u65e5\u672c" * 60):
        (line,) = audit_screen.break_line(read(AuditStatus, {"broken": {"seq": 17, "why": why}}), 80, UNICODE)
        assert {style for _, style in line} == {"bad"} and width_of(line) == 80
        assert " RECORD 17: " in to_text([line])
    assert audit_screen.break_line(read(AuditStatus, {"broken": None}), 80, UNICODE) == []
    status = read(AuditStatus, {"broken": {"seq": 1, "why": "x"}})
    assert to_text(audit_screen.break_line(status, 60, ASCII)).isascii()


@pytest.mark.parametrize(
    ("changes", "said", "not_said"),
    [
        ({}, "matches coordinator", "DIFFERS"),
        ({"coordinator": "differs"}, "DIFFERS FROM COORDINATOR", "matches"),
        ({"coordinator": "not seen"}, "not countersigned by the coordinator yet", "matches"),
        ({"verified_to": None, "verified_at": None}, "18,290 records, not verified yet", "verified to"),
        ({"checkpoint": {"size": 0, "time": "", "cosigned_by": []}}, "no signed checkpoint yet", "countersigned"),
        ({"checkpoint": {"size": 9, "time": "", "cosigned_by": []}}, "countersigned by nobody yet", "signed by c"),
        ({"verified_at": "2026-11-30T09:41:00Z"}, "of 18,290 at 2026-11-30 09:41:00", "18,290 at 09:41"),
        ({"broken": {"seq": 17, "why": "x"}, "verified_to": 17}, "holds to 17 of 18,290", "verified to"),
        ({"verifying": True, "looked_at": 9_145}, "verifying 9,145 of 18,204 50 %", "DIFFERS"),
    ],
)
def test_the_head_says_what_the_daemon_knows_and_no_more(changes: dict[str, Any], said: str, not_said: str) -> None:
    status = read(AuditStatus, {**STATUS, **changes})
    text = to_text(audit_screen.head_lines(status, NOW, 200, UNICODE, control=False))
    assert said in text and not_said not in text and ("c adds control messages" in text)


# ---- verify ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_v_has_the_daemon_verify_once_and_shows_how_far_it_is() -> None:
    log = Log(71, status={**STATUS, "size": 71, "verified_to": None, "verified_at": None})
    async with console((100, 30)) as desk:
        await opened(desk, log)
        assert log.verifications == 0
        await desk.press("v")
        await answer_all(desk, log)
        assert log.verifications == 1 and not [key for key in desk.app.wanted if key.startswith("audit.verify")]
        await newest_again(desk, log, looked_at=40)
        desk.shows("verifying 40 of 71 56 %")
        await desk.press("v")
        await newest_again(desk, log, verifying=False, verified_to=71, verified_at="2026-12-01T10:00:00Z")
        assert log.verifications == 1  # one was going on
        await desk.press("v")
        await answer_all(desk, log)
        assert log.verifications == 2 and await desk.answers_sent() == []


async def test_v_that_is_refused_or_reaches_nobody_says_so_and_is_over() -> None:
    log = Log(71)
    async with console((100, 30)) as desk:
        await opened(desk, log)
        await desk.press("v")
        await desk.answer("audit.verify 1", None, refused=("OPERATION", "disk is full"))
        await desk.pilot.pause()
        desk.shows("disk is full [OPERATION]")
        await desk.show(replace(desk.app.snapshot, link=Link("disconnected", "refused", "start it", desk.now, 1e9)))
        await desk.press("v")
        assert log.verifications == 0 and not [key for key in desk.app.wanted if key.startswith("audit.verify")]


# ---- rows ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_control_messages_are_left_out_until_c_a_number_or_their_name_brings_them() -> None:
    log = Log(1000, polls=True)
    async with console() as desk:
        screen = await opened(desk, log)
        table = screen.table

        def polls() -> int:
            return sum(is_poll(to_json(item.row)) for item in table.rows.shown)

        assert ("audit", {"control": False, "limit": PAGE_ROWS}) in log.asked and len(table.rows.shown) >= 100
        assert not polls() and any(item.row.kind == "control.poll" for item in table.rows.shown)  # a refused one stays
        for typed, control in (("approval", False), ("poll", True)):
            await filter_by(desk, log, typed)
            assert log.asked[-1][1].get("control", True) is control and screen.table.control is control
        await filter_by(desk, log, "event:egress")
        assert ("audit", {"event": "egress", "control": False, "limit": PAGE_ROWS}) in log.asked
        await desk.press("c")
        await answer_all(desk, log)
        assert log.asked[-1] == ("audit", {"event": "egress", "limit": PAGE_ROWS})
        await desk.press("c")
        await filter_by(desk, log, "")
        await desk.press("c")
        await answer_all(desk, log)
        assert polls() and "c hides control messages" in desk.text


@pytest.mark.slow
async def test_a_filter_that_little_passes_goes_through_the_whole_log_and_keeps_what_it_found() -> None:
    log = Log(9000, look_max=500)
    async with console((100, 30)) as desk:
        screen = await opened(desk, log)
        await filter_by(desk, log, digest(2000)[:16])  # the record's own payload, and the link of the one after it
        for _ in range(4):
            await newest_again(desk, log)
        older = [question[1]["before"] for question in log.asked if {"text", "before"} <= set(question[1])]
        assert len(older) == len(set(older)) == 17  # once through the log, not again with each newest page
        log.size += 5
        await newest_again(desk, log)
        assert [item.id for item in screen.table.rows.shown] == ["2001", "2000"] and "newer rows" not in desk.text


@pytest.mark.parametrize(
    ("typed", "event", "text", "rest"),
    [("event:egress.*", "egress.", "", ""), ("event:egress.* deny", "egress.", "deny", ""),
     ("!event:egress", "", "", "!event:egress"), ("r1:x", "", "r1:x", ""), ("event:*", "", "", ""),
     ("kind:lora a b !c", "", "a", "kind:lora b !c"), ("event:halt event:x", "halt", "", "event:x")],
)  # fmt: skip
def test_what_the_daemon_looks_for_and_what_the_console_compares(typed: str, event: str, text: str, rest: str) -> None:
    assert audit.asked_of(typed) == audit.Asked(event, text, rest)


@pytest.mark.slow
async def test_a_record_is_gone_to_by_its_number_and_escape_comes_back() -> None:
    log = Log(100_000, first=300)
    async with console((100, 30)) as desk:
        screen = await opened(desk, log)
        table = screen.table
        await filter_by(desk, log, "event:egress.sent")
        await go_to(desk, log, "50005")
        assert table.rows.cursor == "50005" and table.rows.filter_text == ""  # a filter that would hide it is left
        for number in ("99990", "50010"):
            await go_to(desk, log, number)
            await newest_again(desk, log)
            assert table.rows.cursor == number and screen.table.control  # it may be a poll's
        assert screen.twin() == "fedsilo audit show 50010 --log STATE_DIR"
        for typed, told in (("100000", "the newest is 99999"), ("-1", "takes the number of a record"),
                            ("12", "record 12 and older ones are not kept any more")):  # fmt: skip
            await go_to(desk, log, typed)
            desk.shows(told)
        await desk.press("escape")
        await newest_again(desk, log)
        assert table.rows.cursor == "99999" and not screen.table.control and "not kept" not in desk.text
        await desk.press("colon", *"1200")
        desk.shows("record 1200 on this screen")
        await desk.press("escape", "escape")
        assert isinstance(desk.app.screen, OverviewScreen)
        await desk.press("colon", *"1200")
        desk.shows("nothing fits")  # here a number names nothing


@pytest.mark.slow
def test_more_records_than_are_kept_are_gone_through_with_a_bounded_number_of_them_kept() -> None:
    size = 3 * ROWS_MAX
    log = Log(size)
    rows = audit.ChainRows(audit_screen.COLUMNS, lambda row: str(row.seq))
    page = log.query(("audit", {"limit": 200}))
    rows.take_newest(audit_screen.record_rows(page), page["next"], total=page["size"])
    seen, most = 0, 0
    while rows.next is not None:
        before = rows.next
        page = log.query(("audit", {"limit": 200, "before": before}))
        rows.take_older(audit_screen.record_rows(page), before, page["next"])
        rows.move(len(rows.shown))
        seen, most = seen + len(page["records"]), max(most, rows.kept)
    assert seen == size - 200 and rows.cursor == "0" and most <= ROWS_MAX
    assert [int(item.id) for item in rows.shown] == list(range(ROWS_MAX - 1, -1, -1))  # without a hole


# ---- one record ------------------------------------------------------------------------------------


async def test_a_record_is_opened_with_its_links_its_twin_and_all_of_its_json() -> None:
    async with console((100, 42)) as desk:
        await opened(desk, Log(71))
        await desk.press("enter")  # 70 is what was sent, 69 its decision
        desk.shows(
            "record 69 has the hash", digest(69)[:60], "record 69, the decision this belongs to", '"salt": "5a5a'
        )
        desk.shows("fedsilo audit show 70 --log STATE_DIR")
        await desk.press("escape", "i")
        desk.shows('"event": "egress.sent"')


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ({"run": "", "round": 0, "step": 0}, ""),
        ({"run": "r1", "round": 0, "step": 0}, "r1"),
        ({}, ""),
        ({"run": "r1", "round": 2, "step": 0}, "r1/2/0"),
        ({"run": "r1", "round": 2}, "r1/2"),
    ],
)
def test_a_record_of_no_run_or_round_has_no_place_of_one(place: dict[str, Any], told: str) -> None:
    row = read(AuditRecord, {"seq": 322, "event": "egress.decision", "decision": "allow", **place})
    assert audit_screen.place_of(row) == told
    assert to_text([audit_screen.why_line(row, 80, "…")]).split()[2].rstrip(",") == (told or "allowed")


def test_a_damaged_line_stands_among_the_records_as_that() -> None:
    row = read(AuditRecord, {"seq": 5, "t": 0, "event": "damaged", "why": "it carries number 9"})
    cells = {column.name: column.show(row) for column in audit_screen.COLUMNS}
    assert cells["event"] == ("DAMAGED", "bad") and cells["reasons"][0] == "it carries number 9"
    assert cells["time UTC"][0] == "" and audit_screen.moment_of(read(AuditRecord, {"t": 2**53 - 1})) == str(2**53 - 1)
    assert "is no record: it carries number 9" in to_text(audit_screen.record_lines(row, "x", [], 80))
    assert "none: it is the first" in to_text(audit_screen.record_lines(read(AuditRecord, record(0)), "x", [], 80))


# ---- looks -----------------------------------------------------------------------------------------


async def go_to(desk: Desk, log: Log, typed: str) -> None:
    desk.app.top.go_to(typed)
    await desk.pilot.pause()
    await answer_all(desk, log)


@pytest.mark.slow
async def test_a_filter_asks_the_daemon_for_the_event_and_the_text_also_over_frozen_rows() -> None:
    log = Log(9000)
    async with console((100, 30)) as desk:
        table = (await opened(desk, log)).table
        assert [item.id for item in table.rows.shown[:2]] == ["8999", "8998"]
        await desk.press("G")
        await answer_all(desk, log)
        assert table.rows.kept == 200 and log.asked[-1] == (
            "audit",
            {"control": False, "limit": PAGE_ROWS, "before": 8900},
        )
        await desk.press("g", "slash", *"event:egress.sent*", "enter")
        await answer_all(desk, log)
        assert ("audit", {"event": "egress.sent", "control": False, "limit": PAGE_ROWS}) in log.asked
        assert table.rows.kept >= 100 and {item.row.event for item in table.rows.shown} == {"egress.sent"}
        await desk.press("space")
        assert "audit" not in {name for name, _ in desk.app.wanted.values()}
        await filter_by(desk, log, "event:egress.sent* prompt_id decision:deny")
        desk.shows(lacks=["FROZEN"])
        desk.shows("rows passes the filter")  # a denial is a decision and was not sent
        await desk.press("escape")
        await answer_all(desk, log)
        assert (
            len(table.rows.shown) == 100
            and isinstance(desk.app.screen, AuditScreen)
            and table.rows.shown[0].id == "8999"
        )
        await filter_by(desk, log, "reject")
        desk.shows("none of 9,000 rows passes the filter; a rejection is event approval.deny")


CONTROL_KINDS = sorted(kind for kind in (OUTBOUND_KINDS | INBOUND_KINDS) if kind.startswith("control."))


SOUGHT = ("declined", "abstain", "control.*", "control.po", "error", "polls", "event:ingress.polls")


@pytest.mark.parametrize(
    ("typed", "seeks"),
    [*((each, True) for each in (*CONTROL_KINDS, *SOUGHT)), ("lora.factors", False), ("!declined x", False)],
)
def test_every_control_message_can_be_looked_for_by_its_name(typed: str, seeks: bool) -> None:
    assert bool(seeks_control(typed)) is seeks

"""The query `audit` without control messages: what is left out, what stays, and what a page costs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.reader import STRIDE, LogPages, line_filter
from fedsilo.control import audit_queries
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import DeniedError, UsageError
from fedsilo.protocol.place import Place
from tests.simulated.guarded import Bench
from tests.simulated.queries import all_pages, long_log, poll, queries_of


def is_control(record: dict[str, Any]) -> bool:
    return str(record.get("kind", "")).startswith("control.") and record.get("decision") != "deny"


def test_control_messages_are_left_out_where_that_is_asked_and_denied_ones_stay(bench: Bench) -> None:
    audit = queries_of(bench)["audit"]
    for _ in range(3):
        poll(bench)
        bench.gate.send(Place("", 0, 0, "control.checkpoint"), pb.Checkpoint())
    bench.factors()
    with pytest.raises(DeniedError):
        bench.gate.send(Place("run-1", 0, 0, "control.error"), pb.ErrorReport(code="X" * 40_000))  # too large
    # an event that only speaks of a control message is none
    bench.audit.append("halt", detail={"about": {"kind": "control.poll"}})
    poll(bench)
    whole = list(bench.audit.records())[::-1]
    kept = [each for each in whole if not is_control(each)]
    assert all_pages(audit, {"limit": 2, "control": False}) == kept
    assert {each["event"] for each in kept} >= {"halt", "egress.decision"} and len(whole) - len(kept) >= 8
    assert [each["kind"] for each in kept if each.get("decision") == "deny"] == ["control.error"]
    for arguments in ({}, {"control": True}, {"control": None}):
        assert audit(arguments)["records"] == whole
    decided = audit({"control": False, "event": "egress.decision"})["records"]
    assert decided == [each for each in kept if each["event"] == "egress.decision"]
    for wrong in ("no", 0):
        with pytest.raises(UsageError, match="control is true or false"):
            audit({"control": wrong})


@pytest.mark.parametrize(
    ("decision", "stays"), [('"allow"', False), ("null", False), ('"deny"', True), ('"hold"', True)]
)
def test_only_a_control_message_that_went_through_is_left_out(decision: str, stays: bool) -> None:
    wanted = line_filter("", "", control=False)
    assert wanted(f'{{"kind":"control.poll","decision":{decision}}}'.encode()) is stays


def test_a_damaged_line_is_never_left_out() -> None:
    for line in (b'{"kind":"control.poll"', b'["kind":"control.poll"]', b'[{"kind":"control.poll"}]'):
        assert line_filter(control=False)(line)
    assert not line_filter(control=False)(b'{"event":"egress.sent","kind":"control.poll"}')


def test_a_page_looks_at_so_many_records_at_most(tmp_path: Path) -> None:
    with closing(long_log(tmp_path / "log", 6_000)) as log:
        pages = LogPages(log.directory)
        view = audit_queries.AuditView(log, pages, witnesses=tuple, contradicting=tuple, now_seconds=lambda: 0.0)
        read = pages.lines_read
        answer = view.page({"control": False, "limit": 200, "event": "egress.decision"})
        # one in twenty records is a decision on content
        assert len(answer["records"]) == audit_queries.LOOK_RECORDS // 20 and answer["next"] is not None
        assert pages.lines_read - read <= audit_queries.LOOK_RECORDS + 16 * STRIDE
        page = view.page({"control": False, "limit": 20})
        assert {each["kind"] for each in page["records"]} == {"metrics.eval"} and len(page["records"]) == 20

"""What the control socket answers about messages, records and limits: against a slow reading of the whole log, under
appends, at 100,000 records, with hostile arguments; and nothing private in any of it."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certs.roles import Roles
from fedsilo.audit import index as audit_index
from fedsilo.audit.checkpoint import cosign
from fedsilo.audit.index import BLOCK_LINES, STRIDE, LogIndex
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import LOOK_RECORDS, line_filter
from fedsilo.audit.segments import segments
from fedsilo.control import audit_queries
from fedsilo.control.server import ControlServer
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import (
    DeniedError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    PeerError,
    UnreachableError,
    UsageError,
    VerificationError,
)
from fedsilo.protocol.place import Place
from policies.compare import effective
from policies.load import load_policy
from silo.guard.ledger import Release
from silo.guard.messages import Allowed, Denied, Held
from tests.policies import setting
from tests.simulated.queries import (
    WAIT_SECONDS,
    all_pages,
    as_json,
    asked_of,
    long_log,
    poll,
    queries_of,
    same,
    settled,
    slow,
)
from tests.world import COORDINATOR_KEY, OUR_KEY, Bench, Loop, small_factors

CANARY = "quiet-harbour-lantern"


def denied_factors(bench: Bench) -> None:
    assert isinstance(bench.factors(small_factors() | {"extra": small_factors().popitem()[1]}), Denied)


def a_round(bench: Bench) -> None:
    """A poll, answers that leave, factors that are lost and sent again, answers that are denied."""
    poll(bench)
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    bench.gate.transmit(offered)
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    bench.channel.fails = UnreachableError("gone")
    with pytest.raises(UnreachableError):
        bench.gate.transmit(offered)
    bench.channel.fails = None
    (item,) = bench.ledger.outbox("allowed")
    bench.gate.retry(item)
    assert isinstance(bench.responses(), Denied)
    denied_factors(bench)


# ---- messages --------------------------------------------------------------------------------------


def test_the_outbox_is_what_a_slow_reading_of_the_log_gives_and_stays_so(bench: Bench) -> None:
    outbox = queries_of(bench)["outbox"]
    assert outbox({}) == {"messages": [], "total": 0, "held": 0, "denied": 0, "next": None}
    a_round(bench)
    answer = outbox({})
    assert same(answer["messages"], slow(bench.audit, "egress"))
    assert (answer["total"], answer["denied"], answer["next"]) == (4, 2, None)
    assert [row["outcome"] for row in answer["messages"]] == ["", "", "acked", "acked"]
    assert [row["items"] for row in answer["messages"]][1:] == [3, 2, 3]
    assert all(row["milliseconds"] >= 0 for row in answer["messages"][2:])
    assert answer["messages"][0]["rule"] and answer["messages"][2]["rule"] == ""
    factors, responses = answer["messages"][2:]
    assert (factors["digest_keyed"], responses["digest_keyed"]) == (False, True)
    poll(bench)
    denied_factors(bench)
    assert same(outbox({})["messages"], slow(bench.audit, "egress"))
    again = bench.restart()
    assert same(queries_of(again)["outbox"]({})["messages"], slow(again.audit, "egress"))
    again.close()


def test_allowed_control_messages_are_there_when_they_are_asked_for(bench: Bench) -> None:
    queries = queries_of(bench)
    for _ in range(5):
        poll(bench)
    a_round(bench)
    bench.gate.close_windows()
    whole = slow(bench.audit, "egress", control=True)
    answer = queries["outbox"]({"control": True})
    assert same(answer["messages"], whole) and answer["total"] == len(whole) == 5
    assert same(all_pages(queries["outbox"], {"control": True, "limit": 3}), whole)
    polls = queries["outbox"]({"control": True, "kind": "control.poll"})["messages"]
    assert [row["outcome"] for row in polls] == ["sent"]  # six polls of one window
    assert queries["outbox"]({"kind": "control.poll"})["messages"] == []


def test_milliseconds_are_of_one_start_of_the_machine(bench: Bench) -> None:
    """Clocks of two boots do not compare; the outcome counts all the same."""
    outbox = queries_of(bench)["outbox"]
    factors = bench.factors()
    polled = bench.gate.offer(Place("", 0, 0, "control.checkpoint"), pb.Checkpoint())
    assert isinstance(factors, Allowed) and isinstance(polled, Allowed)
    bench.audit._boot = "another boot"
    bench.gate.transmit(factors)
    bench.gate.transmit(polled)
    rows = outbox({"control": True})["messages"]
    assert [(row["outcome"], row["milliseconds"]) for row in rows] == [("sent", None), ("acked", None)]
    assert same(rows, slow(bench.audit, "egress", control=True))
    bench.gate.send(Place("", 0, 0, "control.checkpoint"), pb.Checkpoint())
    bench.gate.transmit(bench.responses())
    assert all(row["milliseconds"] >= 0 for row in outbox({"control": True})["messages"][:2])


def test_the_inbox_is_what_a_slow_reading_of_the_log_gives(bench: Bench) -> None:
    inbox = queries_of(bench)["inbox"]
    a_round(bench)
    bench.channel.answer = ("run.plan", pb.RunPlan(canonical_json=setting.PLAN.canonical()))
    bench.channel.routing = {"run": setting.PLAN.run}
    poll(bench)
    bench.channel.answer = ("round.open", b"\xff")  # no message at all
    with pytest.raises(PeerError):
        poll(bench)
    answer = inbox({})
    assert same(answer["messages"], slow(bench.audit, "ingress"))
    assert {row["kind"]: row["verdict"] for row in answer["messages"]} == {"run.plan": "allow", "round.open": "deny"}
    assert {row["peer"] for row in answer["messages"]} == {setting.COORDINATOR}
    assert same(inbox({"control": True})["messages"], slow(bench.audit, "ingress", control=True))
    seq = answer["messages"][0]["seq"]
    assert inbox({"seq": seq})["message"]["reasons"] == answer["messages"][0]["reasons"]
    with pytest.raises(NotFoundError):
        queries_of(bench)["outbox"]({"seq": seq})  # it came in


def test_filters_and_totals(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(setting.policy_text(first_rounds=1)))) as bench:
        outbox = queries_of(bench)["outbox"]
        assert isinstance(bench.factors(), Held)
        bench.gate.transmit(bench.responses())
        assert isinstance(bench.responses(), Denied)
        whole = slow(bench.audit, "egress")
        for verdict in ("allow", "hold", "deny"):
            for kind in ("", "lora.factors", "public.responses", "no.such"):
                asked = {"verdict": verdict, "kind": kind or None}
                wanted = [row for row in whole if row["verdict"] == verdict and kind in ("", row["kind"])]
                answer = outbox(asked)
                assert same(answer["messages"], wanted)
                assert (answer["total"], answer["held"], answer["denied"]) == (3, 1, 1)


def test_one_message_says_what_would_have_passed(bench: Bench) -> None:
    outbox = queries_of(bench)["outbox"]
    a_round(bench)
    rows = {(row["kind"], row["verdict"]): row["seq"] for row in outbox({})["messages"]}
    shown = outbox({"seq": rows["public.responses", "deny"]})
    (line,) = {rule["line"] for rule in shown["message"]["rules"] if rule["outcome"] == "deny"}
    assert f"one message per step: at most 1 pass, it had 2 (policy.yaml:{line})" in shown["would_pass"]
    allowed = outbox({"seq": rows["public.responses", "allow"]})
    assert allowed["would_pass"] == [] and allowed["outcome"] == "acked" and allowed["milliseconds"] >= 0
    bench.gate.close_windows()
    polled = next(record["seq"] for record in bench.events("egress.decision") if record["kind"] == "control.poll")
    assert outbox({"seq": polled})["outcome"] == "sent"  # not indexed
    bench.judge.policy = setting.edited("  messages_per_minute: 600", "  messages_per_minute: 599")
    assert outbox({"seq": rows["public.responses", "deny"]})["would_pass"][-1].endswith("would deny the same message")
    for seq in (bench.audit.size, rows["public.responses", "allow"] + 1):
        with pytest.raises(NotFoundError, match="no outbound decision"):
            outbox({"seq": seq})


@settings(max_examples=15, deadline=None)  # every example writes a real log, with a flush for each record
@given(
    st.lists(st.sampled_from(["allow", "deny", "hold", "poll", "sent", "other"]), max_size=25),
    st.lists(st.sampled_from(["allow", "deny", "poll", "sent"]), max_size=8),
    st.integers(1, 7), st.booleans(), st.sampled_from(["", "allow", "deny"]), st.sampled_from([3, 8_192]),
)  # fmt: skip
def test_all_pages_together_are_the_whole_list_whatever_is_appended_meanwhile(
    first: list[str], later: list[str], limit: int, control: bool, verdict: str, fold_records: int
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_index, "FOLD_RECORDS", fold_records)  # a transaction
        with AuditLog(Path(place) / "log", origin="log", key=OUR_KEY, actor="a", reserve_bytes=0) as log:
            index = LogIndex(log.directory, lambda: log.size)
            for what in first:
                append(log, what)
            index.catch_up()
            whole = [row for row in slow(log, "egress", control=control) if verdict in ("", row["verdict"])]
            coming = iter(later)

            def query(asked: dict[str, Any]) -> dict[str, Any]:
                page = index.page("egress", control=control, verdict=verdict, **asked)
                return {"messages": page.rows, "next": page.next}

            found = all_pages(query, {"limit": limit}, between=lambda: append(log, next(coming, "other")))
            # What was sent meanwhile has its outcome on later pages already.
            names = ("seq", "kind", "verdict", "rules")
            assert [[row[name] for name in names] for row in found] == [[row[name] for name in names] for row in whole]
            now = [row for row in slow(log, "egress", control=control) if verdict in ("", row["verdict"])]
            assert same(all_pages(query, {"limit": limit}), now)


def append(log: AuditLog, what: str) -> None:
    """A record of this sort; `sent` is the outcome of the newest allowed message."""
    common = {"kind": "metrics.eval", "direction": "egress", "run": "r", "payload": {"bytes": 3}}
    if what in ("allow", "deny", "hold", "poll"):
        common["kind"] = "control.poll" if what == "poll" else "metrics.eval"
        log.append("egress.decision", decision="allow" if what == "poll" else what, **common)
        return
    newest = next((row for row in slow(log, "egress", control=True) if row["verdict"] == "allow"), None)
    if what == "sent" and newest is not None:
        log.append("egress.sent", **{**common, "kind": newest["kind"]}, link={"decision": newest["seq"]})
    else:
        log.append("screen.hit", kind="metrics.eval")


def test_pages_hold_while_another_thread_appends(bench: Bench) -> None:
    queries = queries_of(bench)
    for _ in range(20):
        denied_factors(bench)
    whole = slow(bench.audit, "egress")

    def append_many() -> None:
        for _ in range(150):
            append(bench.audit, "deny")

    writer = threading.Thread(target=append_many)
    writer.start()
    while writer.is_alive():
        found = all_pages(queries["outbox"], {"limit": 3})
        assert same(found[len(found) - len(whole) :], whole)
        assert [row["seq"] for row in found] == sorted({row["seq"] for row in found}, reverse=True)
    writer.join(WAIT_SECONDS)
    assert same(queries["outbox"]({"limit": 500})["messages"], slow(bench.audit, "egress")[:500])


@pytest.mark.slow
def test_100000_records_are_browsed_by_reading_a_page_at_a_time(tmp_path: Path) -> None:
    with long_log(tmp_path / "log", 100_000) as log:
        index = LogIndex(log.directory, lambda: log.size)
        view = audit_queries.AuditView(log, index, witnesses=tuple, contradicting=tuple, now_seconds=time.time)
        index.catch_up()
        assert index.lines_read <= log.size + log.size // audit_index.FOLD_RECORDS * STRIDE
        cost = 200 + BLOCK_LINES + 2 * STRIDE
        for before in (None, 50_001, 777):
            read = index.lines_read
            page = view.page({"before": before, "limit": 200})
            assert len(page.records) == 200 and page.records[0]["seq"] == (before or log.size) - 1
            assert index.lines_read - read <= cost
        read = index.lines_read
        assert len(index.page("egress", limit=500).rows) == 500
        assert index.page("egress", limit=100, verdict="deny").rows[0]["verdict"] == "deny"
        old = index.page("egress", before=20_000, limit=10)
        assert len(old.rows) == 10 and old.rows[0]["seq"] < 20_000 and old.rows[0]["kind"] == "metrics.eval"
        totals = index.totals("egress")
        assert totals["total"] == 5_000 and totals["denied"] == len(range(1, 100_001, 60))
        assert index.lines_read == read
        view.page({"text": "no such text anywhere"})
        assert index.lines_read - read <= 2 * (LOOK_RECORDS + 16 * STRIDE)
        again = LogIndex(log.directory, lambda: log.size)
        assert again.totals("egress") == totals and again.lines_read <= STRIDE  # after a restart


# ---- the audit log ---------------------------------------------------------------------------------


def test_the_audit_pages_are_the_whole_log(bench: Bench) -> None:
    audit = queries_of(bench)["audit"]
    a_round(bench)
    whole = list(bench.audit.records())[::-1]
    assert all_pages(audit, {"limit": 4}) == whole
    assert audit({})["size"] == len(whole) and audit({"before": 0})["records"] == []
    ours = [record for record in whole if record["event"].startswith("egress.")]
    assert all_pages(audit, {"limit": 4, "event": "egress."}) == ours
    assert audit({"event": "egress.dec"})["records"] == [each for each in ours if each["event"] == "egress.decision"]
    assert audit({"text": "LORA.factors"})["records"] == [each for each in whole if "lora.factors" in json.dumps(each)]
    upper = [each for each in whole if "TENSOR_SET" in json.dumps(each)]
    assert upper and audit({"text": "tensor_set"})["records"] == upper
    assert audit({"text": "never said"}) == {"records": [], "size": len(whole), "next": None}


def test_a_verification_runs_beside_the_loop_and_says_how_far_it_came(loop: Loop) -> None:
    queries, bench = as_json(loop.guard.queries), loop.bench
    bench.gate.send(Place("", 0, 0, "control.poll"), pb.Poll())
    status = queries["audit.status"]({})
    assert (status["verified_to"], status["verified_at"], status["broken"]) == (None, None, None)
    assert status["coordinator"] == "matches" and status["checkpoint"]["cosigned_by"] == [setting.COORDINATOR]
    assert 0 < status["checkpoint"]["size"] <= status["size"] and status["checkpoint"]["time"]
    begun = queries["audit.verify"]({})
    assert begun["size"] == bench.audit.size
    ended = settled(queries["audit.status"])
    assert (ended["verified_to"], ended["broken"]) == (bench.audit.size, None) and ended["verified_at"]


def test_T38_a_break_is_named_with_its_record_and_contradicts_the_coordinator(loop: Loop) -> None:
    queries, bench = as_json(loop.guard.queries), loop.bench
    (_, path), *_ = segments(bench.audit.directory)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"event":"start"', b'"event":"stop"', 1))
    queries["audit.verify"]({})
    broken = settled(queries["audit.status"])
    assert broken["broken"]["seq"] == broken["verified_to"] == 0 and broken["broken"]["why"]
    assert broken["coordinator"] == "differs"
    path.write_bytes(whole)
    queries["audit.verify"]({})
    assert settled(queries["audit.status"])["broken"] is None
    assert queries["audit.status"]({})["coordinator"] == "matches"


def test_T38_a_cosignature_of_another_history_differs(bench: Bench, tmp_path: Path) -> None:
    queries = queries_of(bench)
    bench.audit.append("start")
    bench.audit.trust_peer(setting.COORDINATOR, COORDINATOR_KEY.public_key())
    assert queries["audit.status"]({})["coordinator"] == "not seen"
    elsewhere = Bench(tmp_path / "b", bench.policy)
    elsewhere.audit.append("start")
    elsewhere.audit.append("stop")
    note = cosign(elsewhere.audit.checkpoint(), setting.COORDINATOR, COORDINATOR_KEY, 1)
    elsewhere.close()
    with pytest.raises(VerificationError) as lost:
        bench.audit.add_cosignature(note)
    bench.judge.halt(lost.value.message, "LEDGER_UNWRITABLE")  # whatever its words, another cause
    assert queries["audit.status"]({})["coordinator"] == "not seen"
    bench.judge.halt(lost.value.message, lost.value.code)  # as the loop does
    assert queries["audit.status"]({})["coordinator"] == "differs"
    bench.judge.halted = ""
    assert queries["audit.status"]({})["coordinator"] == "not seen"


@pytest.mark.parametrize(
    ("note", "code", "word", "until"),
    [("of another history", "OWN_HISTORY_LOST", "differs", "compared"),
     ("of no witness", "VERIFICATION_FAILED", "matches", "compared"),
     ("", "LEDGER_UNWRITABLE", "matches", "space is free in")],
)  # fmt: skip
def test_T38_a_halt_carries_the_code_of_its_cause_and_only_a_lost_history_differs(
    loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture, note: str, code: str, word: str, until: str
) -> None:
    audit = loop.bench.audit
    cause: FedSiloError = OperationError("a note signed with its key says nothing", code=code)
    if note:
        with AuditLog(tmp_path / "other", origin=setting.SILO, key=OUR_KEY, actor=setting.SILO) as other:
            other.append("start", detail={"elsewhere": 1})
            shown = cosign(other.checkpoint(), setting.COORDINATOR, COORDINATOR_KEY, 1)
        audit.append("start")
        with pytest.raises(VerificationError) as raised:
            audit.add_cosignature(shown if note == "of another history" else audit.checkpoint())
        cause = raised.value
    else:
        loop.bench.judge.halt(cause.message, code)
    loop.coordinator.fails_at("control.poll", cause)
    loop.turn()
    assert loop.bench.judge.halted == str(cause) and loop.bench.judge.halt_code == code
    assert as_json(loop.guard.queries)["audit.status"]({})["coordinator"] == word
    loop.turn()
    assert until in next(line for line in caplog.text.splitlines() if "nothing is sent until" in line)
    assert loop.bench.events("halt")[-1]["reasons"] == [code]


def test_what_is_shown_goes_by_the_guards_own_clock(loop: Loop) -> None:
    status, verify = (as_json(loop.guard.queries)[name] for name in ("audit.status", "audit.verify"))
    loop.bench.clock_now = setting.NOW + 86_400
    verify({})
    moment = datetime.fromtimestamp(setting.NOW + 86_400, UTC)
    assert settled(status)["verified_at"] == f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def test_while_one_verification_goes_on_the_status_answers_and_no_second_begins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_round(bench)
    site, go_on = asked_of(bench), threading.Event()
    told: list[int] = []

    def progress(number: int) -> None:
        told.append(number)
        go_on.wait(WAIT_SECONDS)

    monkeypatch.setattr(site.records, "_progress", progress)
    queries = as_json(site)
    try:
        for _ in range(3):
            assert queries["audit.verify"]({})["verifying"] is True
        assert sum(thread.name == "audit-verify" for thread in threading.enumerate()) == 1
        bench.gate.send(Place("", 0, 0, "control.checkpoint"), pb.Checkpoint())  # the gate goes on
    finally:
        go_on.set()
    ended = settled(queries["audit.status"])
    assert ended["broken"] is None and ended["verified_to"] == told[-1] < bench.audit.size


def test_what_retention_removed_is_the_end_of_every_list(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))
    bench.audit._segment_bytes_max = 3_000
    queries = queries_of(bench)
    for _ in range(4):
        denied_factors(bench)
        bench.clock_now += 86_400
    before = queries["outbox"]({})["messages"]
    removed = bench.audit.remove_old(int((bench.clock_now - 2 * 86_400) * 1000))
    assert removed > 0
    assert 0 < len(queries["outbox"]({})["messages"]) < len(before)  # the index holds nothing of what was removed
    records = all_pages(queries["audit"], {"limit": 5})
    assert records[-1]["seq"] == removed and records == list(bench.audit.records())[::-1]
    again = bench.restart()
    kept = queries_of(again)["outbox"]({})["messages"]
    assert same(kept, slow(again.audit, "egress")) and 0 < len(kept) < len(before)
    queries = queries_of(again)
    queries["audit.verify"]({})
    assert settled(queries["audit.status"])["broken"] is None
    again.close()


# ---- limits ----------------------------------------------------------------------------------------

# the rule that compares the same count, what it adds for the message at hand
COUNTING_RULES = {
    ("round_bytes", "content"): ("round bytes", "payload_bytes"),
    ("day_bytes", "all"): ("day bytes", "payload_bytes"),
    ("messages_per_minute", "content"): ("messages per minute", ""),
    ("max_responses_per_round", "public.responses"): ("responses per round", "responses"),
    ("max_tokens_per_round", "public.responses"): ("tokens per round", "tokens"),
    ("max_bytes_per_round", "public.responses"): ("bytes of responses per round", "text_bytes"),
    ("max_bytes_per_day", "public.responses"): ("bytes of responses per day", "text_bytes"),
}


def test_a_limit_of_the_charter_is_named_where_it_stands(tmp_path: Path) -> None:
    text = setting.policy_text()
    tighter = re.sub(r"(?m)^  day_bytes: .*$", "  day_bytes: 99999", "# one line more\n" + text)
    own, charter = load_policy(text.encode(), "a/policy.yaml"), load_policy(tighter.encode(), "a/charter.yaml")
    with closing(Bench(tmp_path / "a", effective(own, charter))) as bench:
        rows = {row["limit"]: row for row in queries_of(bench)["limits"]({})["rows"]}
    place, _, line = rows["day_bytes"]["line"].partition(":")
    assert (place, rows["day_bytes"]["max"]) == ("charter.yaml", 99_999)
    assert tighter.splitlines()[int(line) - 1] == "  day_bytes: 99999"
    place, _, line = rows["round_bytes"]["line"].partition(":")
    assert place == "policy.yaml" and text.splitlines()[int(line) - 1].startswith("  round_bytes:")


def test_what_is_used_and_its_limit_are_what_the_next_decision_is_judged_by(bench: Bench) -> None:
    queries = queries_of(bench)
    a_round(bench)
    answer = queries["limits"]({})
    rows = {(row["limit"], row["kind"]): row for row in answer["rows"]}
    assert rows["per_round", "lora.factors"]["used"] == rows["per_round", "lora.factors"]["max"] == 1
    assert rows["polls_per_minute", "control.poll"]["used"] == 1
    bench.judge.view = replace(bench.judge.view, open_step=4)
    bench.responses((0, ("12",)), (2, ()), (3, ()), step=4)  # nothing stands against it, so that all of it is judged
    decided = bench.events("egress.decision")[-1]
    rules = {rule["rule"]: rule for rule in decided["rules"]}
    for key, (name, fact) in COUNTING_RULES.items():
        adds = decided["facts"]["final"][fact] if fact else 1
        assert rows[key]["used"] == rules[name]["measured"] - adds, key
        assert rows[key]["max"] == rules[name]["limit"], key
        assert rows[key]["line"] == f"policy.yaml:{rules[name]['line']}", key
    assert {row["window"] for row in answer["rows"]} == {"minute", "round", "day", "life"}
    bench.clock_now += 61
    later = {row["limit"]: row["used"] for row in queries["limits"]({})["rows"]}
    assert later["messages_per_minute"] == later["polls_per_minute"] == 0 < later["day_bytes"]
    text = setting.policy_text().splitlines()
    for row in answer["rows"]:
        assert text[int(row["line"].partition(":")[2]) - 1].strip().startswith(f"{row['limit']}:"), row


@pytest.mark.parametrize("ruleset", ["pubswap", "fedgrpo", "knexa", "fedavg", "fedid-central", "local-only"])
def test_every_key_that_a_ruleset_counts_by_is_a_row(tmp_path: Path, ruleset: str) -> None:
    text = setting.policy_text(ruleset)
    with closing(Bench(tmp_path / "a", setting.policy_of(text))) as bench:
        rows = queries_of(bench)["limits"]({})["rows"]
        egress = text[text.index("\negress:") : text.index("\ningress:")] if "\ningress:" in text else ""
        keys = "per_round|per_match|max_per_day|max_(?:hits|bytes)_per_day|max_\\w+_per_round"
        counting = re.findall(rf"^    ({keys}):", egress, re.M)
        assert sorted(counting) == sorted(
            row["limit"] for row in rows if "." in row["kind"] and not row["kind"].startswith("control.")
        )
        assert all(row["used"] == 0 for row in rows)


def test_the_forecast_is_what_is_left_of_the_day_by_the_last_round(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^  day_bytes: .*$", "  day_bytes: 100000", setting.policy_text())
    with closing(Bench(tmp_path / "a", setting.policy_of(text))) as bench:
        queries = queries_of(bench)
        assert queries["limits"]({})["forecast"]["rounds_left"] is None
        a_round(bench)
        answer = queries["limits"]({})
        cost = sum(item.payload_bytes for item in bench.ledger.outbox())
        (day,) = [row for row in answer["rows"] if row["limit"] == "day_bytes"]
        assert day["used"] > cost > 0 and day["max"] == 100_000  # polls count for the day, too
        assert answer["forecast"]["rounds_left"] == (day["max"] - day["used"]) // cost
        assert answer["forecast"]["bound_by"] == f"day_bytes of this UTC day ({day['line']})"
        assert answer["dp"] == "off"
        assert [row["kind"] for row in answer["releases"]] == ["lora.factors", "public.responses"]
        assert {row["kind"] for row in answer["capacity"]} >= {"lora.factors", "public.responses", "control.*"}
        bench.clock_now += 86_400
        poll(bench)
        used = next(row["used"] for row in queries["limits"]({})["rows"] if row["limit"] == "day_bytes")
        assert 0 < used < cost


def test_the_last_round_is_the_newest_that_is_over_whatever_stands_between_its_messages(bench: Bench) -> None:
    queries = queries_of(bench)
    for number, kind, size in (
        (1, "lora.factors", 30), (1, "metrics.eval", 20), (2, "public.responses", 7), (1, "metrics.eval", 3),
        (2, "lora.factors", 5),
    ):  # fmt: skip
        bench.audit.append(
            "egress.decision", kind=kind, decision="allow", run="run-1", round=number, payload={"bytes": size}
        )
    day = setting.policy_of(setting.policy_text()).file.budgets.day_bytes  # of which the ledger says nothing is used
    for open_round, cost in ((2, 30 + 20 + 3), (3, 7 + 5)):
        bench.judge.view = replace(bench.judge.view, round=open_round)
        assert queries["limits"]({})["forecast"]["rounds_left"] == day // cost


def test_a_round_that_is_held_and_one_of_figures_alone_are_no_measure_of_the_next(bench: Bench) -> None:
    queries = queries_of(bench)
    day = setting.policy_of(setting.policy_text()).file.budgets.day_bytes

    def left() -> Any:
        return queries["limits"]({})["forecast"]["rounds_left"]

    def leaves(number: int, kind: str, size: int) -> None:
        bench.audit.append(
            "egress.decision", kind=kind, decision="allow", run="run-1", round=number, payload={"bytes": size}
        )

    leaves(1, "metrics.eval", 20)
    assert left() is None
    leaves(1, "public.responses", 7)
    assert bench.judge.view.round == 1 and left() == day // 27
    kept = Release(
        id="r1/hospital_a/0", place=Place("run-1", 1, 0, "lora.factors"), digest=sha256_hex(b"held"),
        policy_digest="0" * 64, payload_bytes=4, recorded={}, facts={}, rules=(), persons=1, requested_at=0.0,
        expires_at=1.0, expiry_outcome="denied", state="held", revision=1,
    )  # fmt: skip
    bench.ledger.hold(kept, b"held")
    assert left() is None  # its update waits: 27 bytes are not what a round takes
    bench.judge.view = replace(bench.judge.view, round=2)
    assert left() == day // 27  # over, and this is what it let out
    leaves(2, "metrics.eval", 3)
    assert left() == day // 27


def test_what_people_kept_back_counts_for_the_next_round_unless_it_left_after_all(bench: Bench) -> None:
    queries = queries_of(bench)
    day = setting.policy_of(setting.policy_text()).file.budgets.day_bytes

    def append(event: str, kind: str, size: int, digest: str, **more: Any) -> None:
        payload = {"bytes": size, "sha256": digest * 64}
        bench.audit.append(event, kind=kind, run="run-1", round=1, step=0, payload=payload, **more)

    append("egress.decision", "public.responses", 7, "a", decision="allow")
    append("egress.decision", "lora.factors", 300, "b", decision="hold")
    bench.judge.view = replace(bench.judge.view, round=2)
    left = [queries["limits"]({})["forecast"]["rounds_left"]]
    append("approval.deny", "lora.factors", 300, "b", reasons=["TIMING"], detail={"person": "alice"})
    left.append(queries["limits"]({})["forecast"]["rounds_left"])
    append("egress.decision", "lora.factors", 200, "c", decision="allow")
    left.append(queries["limits"]({})["forecast"]["rounds_left"])
    assert left == [day // 7, day // 307, day // 207]


# ---- who asks --------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    -1, 2**53, 10**400, 1.5, True, "1", "\ud800", "\x1b[2J", "x" * 300, [], {}, [[]], {"seq": 1}, float("1e308"),
]  # fmt: skip
NAMES = ("seq", "before", "limit", "control", "verdict", "kind", "event", "text", "state", "release", "lines", "source")


def test_a_guard_registers_each_query_once_and_they_answer(loop: Loop) -> None:
    desk = ControlServer("hospital_a", b"", Roles("hospital_a", {}), lambda: datetime.now(UTC))
    loop.guard.register(desk)
    for name in ("approvals", "outbox", "inbox", "audit", "audit.status", "limits", "ledger", "halts"):
        reply = desk.query(name, "")
        assert not reply.error_code and json.loads(reply.data_json), name
    unknown = desk.query("outboxes", "")
    assert unknown.error_code == "NOT_FOUND"


def test_hostile_arguments_are_refused_in_words_and_never_fail(bench: Bench) -> None:
    a_round(bench)
    desk = ControlServer("hospital_a", b"", Roles("hospital_a", {}), lambda: datetime.now(UTC))
    site = SimpleNamespace(
        schema=setting.SCHEMA, config=SimpleNamespace(state_dir=bench.folder, source=Path("silo.yaml"))
    )
    queries = queries_of(bench, site)
    for name, answer in queries.items():
        desk.register_query(name, answer)
    for query in queries:
        if query in ("certificates", "settings"):
            continue  # they take none, and are tried with a real site elsewhere
        for name in (*NAMES, "no.such", "\ud800"):
            for value in HOSTILE:
                reply = desk.query(query, json.dumps({name: value}))
                code = reply.error_code.partition(":")[0]
                assert code in ("", "INVALID_INPUT", "NOT_FOUND", "NOT_ALLOWED"), (query, name, value)
                assert reply.error_message.isprintable()
        assert desk.query(query, "[]").error_code == "INVALID_INPUT"
    good = desk.query("outbox", json.dumps({"before": None, "limit": 500, "verdict": "deny", "kind": "lora.factors"}))
    assert not good.error_code and len(json.loads(good.data_json)["messages"]) == 1
    for query, wrong in (
        ("outbox", {"limit": 501}), ("outbox", {"limit": True}), ("audit", {"limit": 201}), ("outbox", {"verdict": 1}),
        ("outbox", {"seq": 1, "limit": 2}), ("logs", {"lines": 1001}), ("limits", {"x": 1}), ("audit.verify", {"x": 1}),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            queries[query](wrong)


def test_T40_nothing_private_is_in_any_answer(bench: Bench, tmp_path: Path) -> None:
    bench.count_tokens = len
    offered = bench.responses((1, ("12", "12")), (4, (f"{CANARY} 12",)), (7, ("12",)))
    assert isinstance(offered, Denied)  # wrong, so it does not leave
    a_round(bench)
    (bench.folder / "logs").mkdir()
    (bench.folder / "logs" / "guard.log").write_text(
        "2027-01-15T08:00:00.000Z INFO hospital_a policy 1234 is in force\n"
        f"2027-01-15T08:00:01.000Z ERROR hospital_a the trainer reports X: {CANARY}\n"
        f"  {CANARY} in a traceback\n"
        f"2027-01-15T08:00:02.000Z WARNING hospital_a private lines left out: {CANARY}\n"
    )
    (bench.folder / "logs" / "trainer.log").write_text(CANARY)
    site = SimpleNamespace(schema=setting.SCHEMA, config=SimpleNamespace(state_dir=bench.folder))
    queries = queries_of(bench, site)
    asked: list[Any] = [
        *((name, {}) for name in queries if name not in ("certificates", "settings")),
        *(("outbox", {"seq": row["seq"]}) for row in queries["outbox"]({})["messages"]),
    ]
    for name, arguments in asked:
        try:
            text = json.dumps(queries[name](arguments))
        except NotFoundError as error:  # there is no such thing here yet, which is an answer too
            text = error.line
        assert CANARY not in text and "BEGIN" not in text and "prompt 1" not in text, name
    shown = queries["logs"]({})
    assert shown["lines"][0].endswith("policy 1234 is in force") and len(shown["lines"]) == 3
    assert shown["left_out"] == 3
    assert queries["logs"]({"lines": 1})["lines"] == shown["lines"][-1:]
    with pytest.raises(NotAllowedError, match="may quote private text"):
        queries["logs"]({"source": "trainer"})


# ---- the audit log without control messages ----------------------------------------------------------


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
        index = LogIndex(log.directory, lambda: log.size)
        index.catch_up()
        view = audit_queries.AuditView(log, index, witnesses=tuple, contradicting=tuple, now_seconds=lambda: 0.0)
        read = index.lines_read
        answer = view.page({"control": False, "limit": 200, "event": "egress.decision"})
        # one in twenty records is a decision on content
        assert len(answer.records) == audit_queries.LOOK_RECORDS // 20 and answer.next is not None
        assert index.lines_read - read <= audit_queries.LOOK_RECORDS + 16 * STRIDE
        page = view.page({"control": False, "limit": 20})
        assert {each["kind"] for each in page.records} == {"metrics.eval"} and len(page.records) == 20

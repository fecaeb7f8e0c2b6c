"""The report for a reviewer: its numbers are those of the raw lines, and nothing in a record can change the page."""

from __future__ import annotations

import csv
import hashlib
import html
import json
import re
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedsilo.audit import statistics as audit_statistics
from fedsilo.audit.log import AuditLog
from fedsilo.audit.orders import ORDERS_IN_WORDS
from fedsilo.audit.record import COUNT_MAX, EVENTS, Record
from fedsilo.audit.statistics import OTHERS, LogStatistics, bucket, moment
from fedsilo.cli import audit as cli_audit_report
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report import RESIDUALS, audit_report, held_by, inventory_csv, page, text, words_of
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.kinds import MESSAGES
from policies.capacity import capacities
from silo.config import load_config
from tests.policies.setting import SCHEMA, edited, policy_of, policy_text
from tests.policies.test_plan_size import SMALL, coordinator, folder, silo
from tests.protocol.audit_parties import (
    COORDINATOR,
    KEYS,
    OTHER_KEY,
    SILO,
    Clock,
    append_send,
    copied,
    introduce,
    open_log,
    two_witnessed_logs,
)
from tests.protocol.audit_story import CERTIFICATE, HOSTILE, digests, two_policies, write_story
from tests.protocol.test_audit_reading import cut

__all__ = ["folder"]  # a fixture: what sites have before `silo init`


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_story(tmp_path_factory.mktemp("story"))


@pytest.fixture(scope="module")
def report(logs: tuple[Path, Path]) -> dict[str, Any]:
    return audit_report(logs, policies=two_policies(), schema=SCHEMA)


@pytest.fixture(scope="module")
def raw(logs: tuple[Path, Path]) -> list[dict[str, Any]]:
    lines = b"".join(path.read_bytes() for path in sorted(logs[0].glob("*.jsonl"))).splitlines()
    return [json.loads(line) for line in lines]


# ---- numbers -------------------------------------------------------------------------------------------


def test_what_left_is_what_the_raw_lines_say(report: dict[str, Any], raw: list[dict[str, Any]]) -> None:
    sent = [record for record in raw if record["event"] == "egress.sent"]
    found = {row["kind"]: (row["messages"], row["bytes"]) for row in report["left"] if row["messages"]}
    assert found == {
        kind: (
            sum(record["kind"] == kind for record in sent),
            sum(record["payload"]["bytes"] for record in sent if record["kind"] == kind),
        )
        for kind in {record["kind"] for record in sent}
    }
    # and by hand: one hello, four answers of 302 to 305 bytes, one set of factors
    assert found == {"control.hello": (1, 490), "public.responses": (4, 1214), "lora.factors": (1, 352239)}
    assert report["left_total"] == {"messages": 6, "bytes": 353943}
    assert sum(row["messages"] for row in report["left_by_run"]) == len(sent)
    unasked = [(row["kind"], row["messages"], row["bytes"], row["line"]) for row in report["left_unasked"]]
    assert unasked == [("public.responses", 4, 1214, 0), ("control.hello", 1, 490, 0)]


def test_decisions_and_denials_are_those_of_the_raw_lines(report: dict[str, Any], raw: list[dict[str, Any]]) -> None:
    for direction, part in (("egress", "left"), ("ingress", "arrived")):
        decided = Counter(
            (record["kind"], record["decision"]) for record in raw if record["event"] == f"{direction}.decision"
        )
        rows = {(row["kind"], verdict): count for row in report[part] for verdict, count in row["decisions"].items()}
        assert {key: count for key, count in rows.items() if count} == dict(decided)
    denied = Counter(
        (record["event"].removesuffix(".decision"), record["kind"], reason)
        for record in raw
        if record.get("decision") == "deny"
        for reason in record["reasons"]
    )
    assert {(row["direction"], row["kind"], row["reason"]): row["count"] for row in report["denials"]} == dict(denied)
    assert denied["egress", "lora.factors", "DELTA_L2"] == 2
    [twice] = [row for row in report["denials"] if row["reason"] == "DELTA_L2"]
    assert (twice["first"], twice["last"]) == (20, 22)


def test_events_incidents_and_identities_are_complete(report: dict[str, Any], raw: list[dict[str, Any]]) -> None:
    assert report["events"] == Counter(record["event"] for record in raw) and report["events"].keys() <= EVENTS
    assert report["records"] == len(raw)
    assert [item["event"] for item in report["incidents"]] == ["egress.indeterminate"]
    assert [item["reasons"] for item in report["halts"]] == [["LOG_FULL"]]
    assert {item["identity"] for item in report["identities"]} == {record["actor"] for record in raw}
    assert {item["identity"] for item in report["peers"]} == {record["peer"] for record in raw if "peer" in record}
    assert report["period"] == {"first_t": raw[0]["t"], "last_t": raw[-1]["t"]}


def test_policy_versions_and_what_changed(report: dict[str, Any]) -> None:
    before, after = two_policies()
    assert [item["effective"] for item in report["policies"]] == [before.digest, after.digest]
    assert [item["decisions"] for item in report["policies"]] == [10, 0]
    size = before.file.budgets.message_bytes
    assert report["policies"][0]["changes"] is None
    assert report["policies"][1]["changes"] == [
        {"field": "budgets.message_bytes", "before": size, "after": size - 1, "direction": "tighter"}
    ]


def test_changes_and_capacity_need_the_files(logs: tuple[Path, Path]) -> None:
    alone = audit_report(logs[:1])
    assert [item["changes"] for item in alone["policies"]] == [None, None]
    assert alone["capacity"]["computed"] is False and alone["capacity"]["rows"] == []
    assert "Not computed: the file of the policy in force was not given" in page(alone)
    only_old = audit_report(logs[:1], policies=two_policies()[:1])
    assert only_old["capacity"]["computed"] is False


def test_capacity_is_that_of_the_policy_in_force(report: dict[str, Any]) -> None:
    expected = [row.to_json() for row in capacities(two_policies()[1], SCHEMA)]
    assert report["capacity"]["rows"] == expected
    assert report["capacity"]["bits"] == round(sum(row["bits"] for row in expected), 1)
    assert report["capacity"]["policy"] == two_policies()[1].digest


def test_T36_who_approved_what(report: dict[str, Any]) -> None:
    granted, rejected = report["approvals"]
    assert (granted["release"], granted["state"], granted["digest"]) == ("r3/hospital_a", "granted", "ef" * 32)
    assert [item.get("person") for item in granted["answers"]] == [None, "alice"]
    assert granted["answers"][1]["certificate"] == CERTIFICATE
    assert (rejected["state"], rejected["answers"][1]["person"], rejected["answers"][1]["reasons"]) == (
        "rejected", "bob", ["CONTENT"],
    )  # fmt: skip
    assert [(item["person"], item["answers"]) for item in report["persons"]] == [
        ("alice", {"grant": 1}), ("bob", {"deny": 1}),
    ]  # fmt: skip


def test_verification_and_witnesses(report: dict[str, Any]) -> None:
    assert [item["verified"] for item in report["verification"]] == [True, True]
    assert report["witness"]["cosigned_by"] == {"spiffe://net/coordinator/main": 41}
    assert report["witness"]["countersigned_for_others"] == [{"origin": "spiffe://net/coordinator/main", "size": 2}]
    assert report["dp"].startswith("off")
    assert list(RESIDUALS) == ["N1", "N2", "N3", "N4", "N5", "N6", "N7"] and report["residuals"] == RESIDUALS


# ---- the page ------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """What a browser would see: tags, attributes and text; refuses tags that are not closed in order."""

    VOID = ("meta", "br")

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def words_on(source: str) -> str:
    """Return the text of a page, each run of white space one space."""
    return " ".join(" ".join(Reader(source).text).split())


def shown(report: dict[str, Any]) -> str:
    return words_on(page(report))


def test_T37_nothing_in_a_record_becomes_markup(report: dict[str, Any]) -> None:
    source = page(report)
    read = Reader(source)
    assert HOSTILE in read.text  # it is shown, as text
    assert read.tags["script"] == 0 and "<script" not in source.lower()
    assert read.attributes <= {
        "lang", "charset", "name", "content", "http-equiv", "class", "data-label", "style"
    }  # fmt: skip
    # the same page with harmless strings of the same length has the same tags
    quiet = json.loads(json.dumps(report).replace(json.dumps(HOSTILE)[1:-1], "h" * len(HOSTILE)))
    assert Reader(page(quiet)).tags == read.tags


def test_the_page_fetches_nothing(report: dict[str, Any]) -> None:
    source = page(report)
    assert "default-src 'none'" in source
    assert not re.search(r"https?://|url\(|@import|\bsrc=|\bhref=|javascript:", source)


@pytest.mark.parametrize("value", [HOSTILE, "a\u202eb", "x\x1b[2Jy", "line\nend", "'\"", "&amp;", "\u2028"])
def test_T37_text_is_harmless_and_loses_nothing_visible(value: str) -> None:
    made = text(value)
    assert not re.search(r"[<>\"'\x00-\x1f\u202e\u2028]", made)
    assert html.unescape(made).startswith(value[0] if value[0].isprintable() else "\\")


def test_the_numbers_are_on_the_page(report: dict[str, Any]) -> None:
    told = shown(report)
    for words in ("353,943", "352,239", "DELTA_L2", "alice", "bob", "budgets.message_bytes", "LOG_FULL", *RESIDUALS):
        assert words in told, words


# ---- the command ---------------------------------------------------------------------------------------


def run(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def invoke(*words: object) -> Any:
    return run("report", *words)


def test_the_command_writes_both_files_and_finds_the_pinned_schema(logs: tuple[Path, Path], tmp_path: Path) -> None:
    size = two_policies()[0].file.budgets.message_bytes
    first, second, out = tmp_path / "first.yaml", tmp_path / "second.yaml", tmp_path / "out"
    first.write_text(policy_text())
    second.write_text(policy_text().replace(f"message_bytes: {size}", f"message_bytes: {size - 1}", 1))
    words = (logs[0].parent, logs[1], "--policy", first, "--policy", second)
    assert invoke(*words, "--out", out).exit_code == 0
    made = json.loads((out / "report.json").read_bytes())
    assert (out / "report.html").read_text(encoding="utf-8") == page(made)
    assert made["left_total"]["bytes"] == 353943 and "schema file was not found" in made["capacity"]["note"]
    assert len(made["policies"][1]["changes"]) == 1
    (tmp_path / "lora_schema.json").write_bytes(SCHEMA.canonical())
    assert invoke(*words, "--out", tmp_path / "again").exit_code == 0
    made = json.loads((tmp_path / "again/report.json").read_bytes())
    assert "the policy pins" in made["capacity"]["note"]
    assert invoke(*words, "--out", out).exit_code == 6


def test_T38_a_log_that_does_not_verify_is_reported_as_such_with_status_7(
    logs: tuple[Path, Path], tmp_path: Path
) -> None:
    log = copied(logs[0], tmp_path / "log")
    path = sorted(log.glob("*.jsonl"))[1]
    path.write_bytes(path.read_bytes().replace(b'"bytes":302', b'"bytes":303', 1))
    ended = invoke(log, logs[1], "--out", tmp_path / "out")
    assert ended.exit_code == 7 and "the report was written, but these logs do not verify" in ended.stderr
    source = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    top = source.split("<h2>")[0]
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    assert f"NOT VERIFIED: {made['verification'][0]['log']}" in html.unescape(re.sub("<[^>]*>", "", top))
    assert "every log given verifies" not in source
    # The same two the other way round: the one reported on is sound, and is not called otherwise for the other's sake.
    assert invoke(logs[1], log, "--out", tmp_path / "other").exit_code == 7
    made = json.loads((tmp_path / "other/report.json").read_bytes())
    top = (tmp_path / "other/report.html").read_text(encoding="utf-8").split("<h2>")[0]
    assert [item["verified"] for item in made["verification"]] == [True, False]
    sound, damaged = (item["log"] for item in made["verification"])
    assert "NOT VERIFIED" not in top and f"{sound} verifies" in top
    assert damaged in top and "every log given verifies" not in top


def test_damage_ends_the_counting_and_the_page_says_so(logs: tuple[Path, Path], tmp_path: Path) -> None:
    log = copied(logs[0], tmp_path / "log")
    path = sorted(log.glob("*.jsonl"))[1]
    path.write_bytes(b"garbage\n" + path.read_bytes())
    ended = invoke(log, "--out", tmp_path / "out")
    assert ended.exit_code == 7
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    assert made["complete"] is False and made["records"] == int(path.stem)
    assert "Counted only up to damage" in (tmp_path / "out/report.html").read_text(encoding="utf-8")


def test_an_empty_log_and_no_log(tmp_path: Path) -> None:
    with open_log(tmp_path / "log"):
        pass
    made = audit_report([tmp_path / "log"])
    assert made["left_counted"] and made["left_total"] == {"messages": 0, "bytes": 0}
    Reader(page(made))
    assert invoke(tmp_path / "none", "--out", tmp_path / "out").exit_code == 8
    assert not (tmp_path / "out").exists()


# ---- witnesses, retention, spreadsheet ---------------------------------------------------------------


def test_witnesses_and_what_the_policy_demands_are_told(report: dict[str, Any]) -> None:
    witness = report["witness"]
    assert witness["demanded"] == {"witnesses": ["coordinator", "peers"], "min_witnesses": 1}
    assert witness["vouched"] == [[1, size] for size in witness["cosigned_by"].values()]
    assert witness["two_histories"] == [] and "two histories" not in page(report)
    made = page(report | {"witness": witness | {"two_histories": ["<b>x</b>.note"]}})
    assert "two histories" in made and "<b>x</b>" not in made


def test_reads_and_deletions_of_payloads_and_removed_records_are_told(tmp_path: Path) -> None:
    with open_log(tmp_path / "log", segment_bytes_max=600) as log:
        for number in range(4):
            log.append("egress.decision", kind="lora.factors", decision="deny", direction="egress", sequence=number)
        for person in ("alice", HOSTILE):
            log.append(
                "payload.read", kind="public.responses", detail={"person": person, "certificate": CERTIFICATE},
                link={"decision": 2},
            )  # fmt: skip
        log.append("retention.payloads", detail={"payloads": 3, "bytes": 4_000_000, "why": "age"})
        size = log.remove_old(2**52)
        log.append("retention.payloads", detail={"payloads": 2, "bytes": 1, "why": "space"})
        for person in ("bob", HOSTILE):
            log.append("payload.read", kind="public.responses", detail={"person": person}, link={"decision": 2})
    made = audit_report([tmp_path / "log"])
    kept = made["retention"]
    assert kept["leaf_hashes_only"] == size > 0
    assert (kept["payloads_deleted"], kept["bytes_deleted"]) == (5, 4_000_001)
    assert [item["person"] for item in kept["reads"]][-2:] == ["bob", HOSTILE]
    assert [item["decision"] for item in kept["reads"]] == [2] * kept["reads_total"]
    shown = page(made)
    assert f"Of the first {size} records leaf hashes only" in shown and "<script>alert" not in shown
    assert made["verification"][0]["verified"]


def test_the_spreadsheet_says_the_same_as_the_json(report: dict[str, Any]) -> None:
    rows = list(csv.DictReader(inventory_csv(report).splitlines()))
    outward = [row for row in rows if row["direction"] == "egress"]
    kinds = {HOSTILE: "(withheld)"}
    assert [(row["kind"], int(row["messages"]), int(row["bytes"]), int(row["deny"])) for row in outward] == [
        (kinds.get(row["kind"], row["kind"]), row["messages"], row["bytes"], row["decisions"]["deny"])
        for row in report["left"]
    ]
    inward = [row for row in rows if row["direction"] == "ingress"]
    assert [(row["kind"], int(row["messages"]), int(row["bytes"])) for row in inward] == [
        (kinds.get(row["kind"], row["kind"]), row["messages"], row["bytes"]) for row in report["arrived"]
    ]


# ---- what is long, cut, contradicted or hostile ---------------------------------------------------------

PERSON = {"person": "alice", "certificate": "5a" * 32}


def reported(tmp_path: Path, *logs: Path, name: str = "out") -> tuple[Any, dict[str, Any], str]:
    """What the command said, its JSON file and the text of its page."""
    done = invoke(*logs, "--out", tmp_path / name)
    made = json.loads((tmp_path / name / "report.json").read_bytes())
    return done, made, words_on((tmp_path / name / "report.html").read_text("utf-8"))


def record(event: str, seq: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": event, "seq": seq, "t": 1_800_000_000_000, "actor": SILO, "link": {}, **fields}


def tallied(*records: dict[str, Any]) -> dict[str, Any]:
    totals = LogStatistics()
    for number, each in enumerate(records):
        totals.add(Record({**each, "seq": number}))
    return totals.to_json()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report on a log of one record, into which other counts can be put."""
    folder = tmp_path_factory.mktemp("plain") / "log"
    with open_log(folder) as log:
        log.append("start")
    return audit_report([folder])


# ---- nothing is lost behind a list's end -----------------------------------------------------------------


def test_T38_halts_are_counted_behind_any_number_of_other_incidents(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        for _ in range(audit_statistics.INCIDENTS_MAX + 5):
            log.append("screen.hit", kind="public.responses")
        for _ in range(3):
            log.append("halt", kind="public.responses", reasons=["SCREEN_HALT"])
    made = audit_report([tmp_path / "log"])
    assert made["halts_total"] == len(made["halts"]) == 3
    assert (made["incidents_total"], len(made["incidents"])) == (
        audit_statistics.INCIDENTS_MAX + 5,
        audit_statistics.INCIDENTS_MAX,
    )
    assert "5 more are in the log." in shown(made)


@pytest.mark.parametrize("more", [0, 200])
def test_T36_releases_beyond_the_list_are_counted(plain: dict[str, Any], more: int) -> None:
    count = audit_statistics.RELEASES_MAX + more
    records = []
    for number in range(count):
        name = {"release": f"r{number}"}
        records += [record("approval.request", detail=name), record("approval.grant", detail=name | PERSON)]
    found = tallied(*records)
    assert (len(found["approvals"]), found["approvals_total"]) == (audit_statistics.RELEASES_MAX, count)
    assert f"{count:,} releases held for people" in shown(plain | found)


def hostile_records(count: int) -> list[dict[str, Any]]:
    """As many names, texts and versions as there are records."""
    found: list[dict[str, Any]] = []
    for n in range(count):
        who = f"spiffe://net/silo/s{n}"
        routing: dict[str, Any] = {"kind": f"kind.{n}", "run": f"run-{n}", "peer": who}
        facts = {"final": {"public_set_sha256": f"{n:064x}", "records": 5}, "transform": {"donors_dropped": {who: 1}}}
        fingerprint = {"fingerprint": f"{n:064x}", "x": ["y" * 100] * 20}
        found += [
            record("start", actor=who, detail={"version": f"v{n}", "isolation": "user"}, policy={"effective": f"p{n}"}),
            record("egress.decision", decision="allow", direction="egress", facts=facts, **routing),
            record("egress.sent", payload={"bytes": 2}, **routing),
            record("ingress.decision", decision="deny", direction="ingress", reasons=[f"R{n}"] * 3,
                   payload={"bytes": 3}, facts=facts, **routing),
            record("key.expire_warn", detail=fingerprint),
            record("approval.deny", detail={"release": "r1", "person": f"p{n}"}, reasons=["A"] * 4000),
            record("approval.grant", detail={"person": "bob"}, reasons=["SCREEN_HALT"]),
            record("halt", detail={f"k{k}": "z" * 128 for k in range(4000)} if n < 250 else {}),
            record("payload.read", detail={"person": ["x"] * 4000}),
        ]  # fmt: skip
    return found


@pytest.mark.slow
def test_T23_what_a_long_log_makes_of_a_report_is_bounded_and_its_totals_are_whole(plain: dict[str, Any]) -> None:
    count = audit_statistics.PLACES_MAX + 10
    records = hostile_records(count)
    found = tallied(*records)
    assert found["records"] == len(records)
    bounds = {
        # records without a kind take the first name
        "left": audit_statistics.KINDS_MAX, "arrived": audit_statistics.KINDS_MAX,
        "left_by_run": audit_statistics.PLACES_MAX + 1, "arrived_from": audit_statistics.PLACES_MAX + 1,
        "denials": audit_statistics.DENIALS_MAX + 1, "identities": audit_statistics.IDENTITIES_MAX + 1,
        "peers": audit_statistics.IDENTITIES_MAX + 1, "trainers": audit_statistics.IDENTITIES_MAX + 1,
        "programs": audit_statistics.PROGRAMS_MAX + 1, "persons": audit_statistics.PERSONS_MAX + 1,
        "key_events": audit_statistics.KEY_EVENTS_MAX, "halts": audit_statistics.INCIDENTS_MAX,
        "halt_grants": audit_statistics.GRANTS_MAX, "donors_dropped": audit_statistics.DONOR_ROWS_MAX,
    }  # fmt: skip
    assert {name: len(found[name]) for name in bounds} == bounds
    assert len(found["approvals"][0]["answers"]) == audit_statistics.ANSWERS_MAX
    assert found["approvals"][0]["answers"][0]["reasons"] == ["A"] * audit_statistics.REASONS_MAX + ["and 3992 more"]
    # and nothing is missing from what is counted by them
    assert found["left_total"] == {"messages": count, "bytes": 2 * count}
    assert sum(row["messages"] for row in found["left"]) == count
    assert sum(row["bytes"] for row in found["left_by_run"]) == 2 * count
    assert (
        sum(row["decisions"]["deny"] for row in found["arrived"]) == sum(r["count"] for r in found["denials"]) == count
    )
    assert sum(row["bytes"] for row in found["arrived_from"]) == 3 * count
    assert sum(row["records"] for row in found["identities"]) == len(records)
    assert sum(row["starts"] for row in found["programs"]) == count
    assert sum(sum(row["answers"].values()) for row in found["persons"]) == 2 * count
    assert (found["key_events_total"], found["halts_total"], found["donors_dropped_total"]) == (count,) * 3
    assert found["approvals"][0]["answers_total"] == found["halt_grants_total"] == count
    assert found["key_events"][-1]["detail"]["fingerprint"] == f"{count - 1:064x}"
    source = page(plain | found)
    assert len(source) < 6 << 20  # of 60 MiB that these records have
    Reader(source)


@pytest.mark.parametrize("more", [0, 3])
def test_sets_beyond_the_list_are_said_to_be_missing(tmp_path: Path, more: int) -> None:
    with open_log(tmp_path / "log") as log:
        for number in range(audit_statistics.SETS_MAX + more):
            facts = {"final": {"held_out_sha256": f"{number:064x}"}}
            log.append("egress.decision", kind="metrics.eval", decision="allow", direction="egress", facts=facts)
    made = audit_report([tmp_path / "log"])
    assert (len(made["data"]["sets"]), made["data"]["sets_not_listed"]) == (audit_statistics.SETS_MAX, more)


def test_T34_of_many_policy_versions_the_one_in_force_is_always_told() -> None:
    count = audit_statistics.POLICIES_MAX + 10
    totals = LogStatistics()
    for number in range(count):
        totals.add(Record(record("policy.load", number, policy={"effective": f"p{number}"})))
    assert totals.policies_total == count and len(totals.policies) == audit_statistics.POLICIES_MAX
    assert [item["effective"] for item in totals.policies[-2:]] == [
        f"p{audit_statistics.POLICIES_MAX - 2}",
        f"p{count - 1}",
    ]


# ---- what the log says of people -------------------------------------------------------------------------

PLACE: dict[str, Any] = {
    "kind": "lora.factors",
    "run": "r",
    "round": 1,
    "step": 0,
    "payload": {"bytes": 1, "sha256": "ef" * 32},
}


def held(limit: int) -> dict[str, Any]:
    rules = [{"rule": "approvals", "outcome": "hold", "measured": 0, "limit": limit}]
    return record("egress.decision", decision="hold", direction="egress", rules=rules, **PLACE)


def answer(event: str, who: str = "") -> dict[str, Any]:
    return record(f"approval.{event}", detail={"release": "r1"} | ({"person": who} if who else {}), **PLACE)


def allowed(*grants: int, decision: str = "allow") -> dict[str, Any]:
    return record("egress.decision", decision=decision, direction="egress", link={"approvals": list(grants)}, **PLACE)


LOADED = record("policy.load", policy={"effective": "another"})


@pytest.mark.parametrize(
    ("records", "found"),
    [
        # state, approvals given and needed, and the decision that followed
        ([held(2), answer("request")], ("held", 0, 2, None)),
        ([held(2), answer("request"), answer("grant", "a")], ("held", 1, 2, None)),
        ([held(2), answer("request"), answer("grant", "a"), answer("grant", "a")], ("held", 1, 2, None)),
        ([held(1), answer("request"), answer("grant", "a")], ("held", 1, 1, None)),
        ([answer("grant", "a")], ("held", 1, None, None)),
        ([held(2), answer("request"), answer("grant", "a"), answer("grant", "b"), allowed(2, 3)], ("granted", 2, 2, 4)),
        ([held(1), answer("request"), answer("grant", "a"), allowed(2, decision="deny")], ("refused", 1, 1, 3)),
        ([held(2), answer("request"), answer("grant", "a"), allowed(decision="deny")], ("held", 1, 2, None)),
        ([held(1), answer("request"), answer("grant", "a"), allowed(decision="deny")], ("refused", 1, 1, 3)),
        ([held(1), answer("request"), answer("grant", "a"), allowed(0)], ("held", 1, 1, None)),
        ([held(1), answer("request"), answer("grant", "a"), allowed(2) | {"round": 2}], ("held", 1, 1, None)),
        ([held(1), answer("request"), answer("grant", "a"), answer("deny", "b"), allowed(2)], ("rejected", 1, 1, 4)),
        ([held(1), answer("request"), answer("expire")], ("expired", 0, 1, None)),
        ([held(2), answer("request"), answer("grant", "a"), LOADED], ("held", 0, None, None)),
        ([held(2), answer("request"), answer("grant", "a"), LOADED, answer("grant", "b")], ("held", 1, None, None)),
    ],
)
def test_T36_a_release_is_granted_only_where_a_decision_says_so(
    plain: dict[str, Any], records: list[dict[str, Any]], found: tuple[str, int, int | None, int | None]
) -> None:
    made = tallied(*records)
    (row,) = made["approvals"]
    decision = row["decision"] and row["decision"]["seq"]
    assert (row["state"], row["given"], row["needed"], decision) == found
    # what left although somebody said no stands out on the page
    assert ("allowed all the same" in shown(plain | made)) is (found[0] == "rejected" and decision is not None)


@pytest.mark.parametrize("verdict", ["", *ORDERS_IN_WORDS])
def test_T36_the_page_says_of_what_people_signed_no_more_than_was_found(plain: dict[str, Any], verdict: str) -> None:
    """A log without an order: nothing was checked. One order: its verdict, and none of the others."""
    results = [{**plain["verification"][0], "orders": {verdict: 1} if verdict else {}}]
    words = shown(plain | {"verification": results}).split("Who approved what")[1].split("Data inventory")[0]
    assert ("was checked here" in words) is bool(verdict)
    assert [name for name, told in ORDERS_IN_WORDS.items() if told in words] == [verdict] * bool(verdict)


@pytest.mark.parametrize("of_halt", [True, False])
def test_T18_a_yes_to_the_end_of_a_halt_is_no_release(plain: dict[str, Any], of_halt: bool) -> None:
    detail = PERSON | ({"since": 1_800_000_000} if of_halt else {"release": "r1"})
    found = tallied(
        record("halt", kind="public.responses"), record("approval.grant", kind="public.responses", detail=detail),
        record("release", kind="public.responses"),
    )  # fmt: skip
    assert (found["approvals_total"], found["halt_grants_total"]) == ((0, 1) if of_halt else (1, 0))
    words = shown(plain | found)
    assert f"{1 - of_halt} releases held for people" in words and "2 halts and their ends" in words
    assert ("agreed to end a halt 1" in words) is ("2027-01-15 08:00:00 UTC Other incidents" in words) is of_halt


# ---- what verification warns of --------------------------------------------------------------------------


def test_T38_what_verify_warns_of_stands_at_the_top_on_stderr_and_in_the_json(tmp_path: Path) -> None:
    log, coordinator = two_witnessed_logs(tmp_path)
    short = cut(copied(log, tmp_path / "short"), 6)
    verified = json.loads(run("verify", short, log, "--json").stdout)
    assert any("older, or cut" in warning for warning in verified["warnings"])
    done, made, words = reported(tmp_path, short, log)
    assert done.exit_code == 0 and made["warnings"] == verified["warnings"]
    top = words.split("What left, by kind")[0]
    for warning in verified["warnings"]:
        assert warning in top and f"warning: {warning}" in done.stderr, warning
    assert "every log given verifies, with warnings" in top
    done, made, words = reported(tmp_path, log, coordinator, name="whole")
    assert made["warnings"] == [] and "warning" not in done.stderr and "with warnings" not in words


def test_T38_after_retention_the_page_says_from_which_record_on_it_counts(tmp_path: Path) -> None:
    for name in ("whole", "removed"):
        with open_log(tmp_path / name, segment_bytes_max=3000) as log:
            for number in range(40):
                append_send(log, number)
            first = log.remove_old(2**52) if name == "removed" else 0
        done, made, words = reported(tmp_path, tmp_path / name, name=f"{name}_out")
        told = json.loads(invoke(tmp_path / name, "--out", tmp_path / f"{name}_json", "--json").stdout)["data"]
        assert (
            (made["counted_from"], made["complete"]) == (told["counted_from"], told["complete"]) == (first, not first)
        )
        for said in (words, done.stdout):
            assert (f"from record {first} on" in said) is bool(first)
        assert done.exit_code == 0
    assert made["left_total"]["messages"] < 40


def test_T20_a_proof_of_two_signatures_takes_the_good_badge_from_the_top(tmp_path: Path) -> None:
    made = audit_report(two_witnessed_logs(tmp_path))
    assert "every log given verifies" in shown(made)
    made["verification"][0]["findings"] = [
        {"run": "r", "round": 1, "what": "transcripts", "where": "record 5", "signers": [COORDINATOR],
         "keys_not_vouched_for": []}
    ]  # fmt: skip
    top = shown(made).split("What left, by kind")[0]
    assert "every log given verifies" not in top and "two transcripts of round 1 of run r are signed" in top
    assert 'class="verdict good"' not in page(made).split("<h2>")[0]


def test_a_folder_that_is_no_log_is_none_and_not_a_log_that_somebody_tampered_with(tmp_path: Path) -> None:
    log, _ = two_witnessed_logs(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.txt").write_text("x")
    assert run("export", "--log", log, "--out", tmp_path / "exported").exit_code == 0
    for place, hint in ((tmp_path / "photos", "no log folder"), (tmp_path / "exported", "an export with proofs")):
        done = invoke(place, "--out", tmp_path / "out")
        assert done.exit_code == 8 and hint in " ".join(done.stderr.split())
        assert not (tmp_path / "out").exists()
    assert invoke(log, "--out", tmp_path / "out").exit_code == 0


# ---- hostile values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("http://x.invalid","y")', "a b", "lora.factors"]
)
def test_T37_no_kind_becomes_a_formula_in_a_spreadsheet(tmp_path: Path, kind: str) -> None:
    with open_log(tmp_path / "log") as log:
        log.append("ingress.decision", kind=kind, decision="deny", reasons=["UNKNOWN_KIND"], direction="ingress")
        log.append("egress.sent", kind=kind, payload={"bytes": 1})
    made = audit_report([tmp_path / "log"])
    cells = {row["kind"] for row in csv.DictReader(inventory_csv(made).splitlines())}
    assert cells == {kind if kind == "lora.factors" else "(withheld)"}
    assert {row["kind"] for row in made["left"]} == {kind}


@pytest.mark.parametrize(
    ("event", "detail"),
    [
        ("retention.payloads", None),
        ("retention.payloads", {"payloads": "3", "bytes": 1.5}),
        ("retention.payloads", {"payloads": 2, "bytes": 30}),
        ("approval.grant", {"release": "r", "person": ["x"]}),
        ("approval.grant", {"release": {"a": []}, "person": "x", "certificate": {}}),
        ("approval.grant", {"person": {"a": 1}, "since": COUNT_MAX}),
        ("payload.read", {"person": {}, "certificate": ["x"]}),
        ("start", {"version": [1], "code": {}, "isolation": ["user"]}),
        ("policy.load", {"name": [], "mode": {}, "proposal": {"a": 1}, "proposer": [1]}),
        ("key.renew", {"fingerprint": "1a" * 32, "identity": [1], "not_after": 1e300}),
    ],
)
def test_T37_no_value_in_a_record_stops_the_report(tmp_path: Path, event: str, detail: dict[str, Any] | None) -> None:
    with open_log(tmp_path / "log") as log:
        log.append(event, detail=detail, policy={"effective": "p"})
    done, made, _ = reported(tmp_path, tmp_path / "log")
    assert done.exit_code == 0, done.exception
    counted = (2, 30) if detail == {"payloads": 2, "bytes": 30} else (0, 0)
    assert (made["retention"]["payloads_deleted"], made["retention"]["bytes_deleted"]) == counted


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(9_007_199_254_740.0, "9007199254740000 ms after 1970"), (1_800_000_000.0, "2027-01-15 08:00:00 UTC")],
)
def test_T37_a_time_that_no_calendar_has_stops_no_report(tmp_path: Path, seconds: float, words: str) -> None:
    with open_log(tmp_path / "log", clock=Clock(seconds)) as log:
        log.append("halt")
        log.append("payload.read", detail=PERSON)
    done, _, text = reported(tmp_path, tmp_path / "log")
    assert done.exit_code == 0 and words in text
    assert moment(1e300).endswith("ms after 1970")


HEX = "ab" * 32
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", HEX, SILO, COORDINATOR, OTHERS, "user"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "x"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
DETAILS = [
    "release", "person", "certificate", "since", "name", "mode", "version", "code", "isolation", "fingerprint",
    "identity", "not_after", "proposal", "proposer", "payloads", "bytes", "transcript", "signatures", "result", "silos",
    "signed", "certificates", "notes", "first", "second", "coordinator", "parts", "round", "run", "digest",
]  # fmt: skip
FACTS = ["public_set_sha256", "public_set_rows", "held_out_sha256", "records", "isolation", "donors_dropped"]
FACT = st.dictionaries(st.sampled_from(FACTS), JSON | st.dictionaries(st.just("a"), JSON), max_size=4)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["lora.factors", "control.hello", "run.plan", "x", OTHERS]),
        "run": st.sampled_from(["r", "", HEX]),
        "round": st.sampled_from([0, 1, COUNT_MAX]),
        "peer": st.sampled_from([COORDINATOR, "x", ""]),
        "payload": st.sampled_from([{}, {"bytes": 1}, {"bytes": COUNT_MAX, "sha256": HEX}]),
        "decision": st.sampled_from(["allow", "deny", "hold"]),
        "reasons": st.sampled_from([[], ["A"], ["A"] * 20]),
        "rules": st.lists(st.fixed_dictionaries({"rule": st.just("approvals"), "limit": JSON}), max_size=2),
        "facts": st.fixed_dictionaries({}, optional={"final": FACT | JSON, "transform": FACT | JSON}),
        "policy": st.sampled_from([{}, {"effective": "p"}, {"effective": "q", "file": "f"}]),
        "link": st.sampled_from([{}, {"decision": 0}, {"approvals": [0, 1, 2]}, {"approvals": ["x"]}]),
        "detail": st.dictionaries(st.sampled_from(DETAILS), JSON, max_size=6),
    },
)


def append_what_is_well_formed(log: AuditLog, records: list[tuple[str, dict[str, Any]]]) -> int:
    written = 0
    for event, fields in records:
        try:
            log.append(event, **fields)
        except UsageError:  # no record, so that nobody can be given it either
            continue
        written += 1
    return written


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    owner=st.sampled_from([SILO, COORDINATOR]),
    seconds=st.sampled_from([1_800_000_000.0, 0.0, 9_007_199_254_740.0]),
    records=st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), FIELDS), min_size=1, max_size=6),
)
def test_T37_no_well_formed_log_stops_the_report(
    owner: str, seconds: float, records: list[tuple[str, dict[str, Any]]]
) -> None:
    with TemporaryDirectory() as folder:
        with open_log(Path(folder) / "log", owner, clock=Clock(seconds)) as log:
            count = append_what_is_well_formed(log, records)
        made = audit_report([Path(folder) / "log"])
        assert made["records"] == count and made["unreadable"] == ""
        assert json.loads(json.dumps(made, allow_nan=False)) == made
        Reader(page(made))
        assert len(list(csv.reader(inventory_csv(made).splitlines()))) == 1 + len(made["left"]) + len(made["arrived"])


PUBLIC, HELD_OUT = "0" * 63 + "4", "0" * 63 + "5"  # of the policy in tests/policies/setting.py
NEVER_LEFT = ("messages left", "left, payload bytes", "What left, by kind", "What left coordinator")


def decide(log: AuditLog, direction: str, kind: str, final: dict[str, Any], **fields: Any) -> int:
    facts = {"final": final, **fields.pop("facts", {})}
    routing = {"run": "run-1", "round": 1, "peer": COORDINATOR} | fields
    return log.append(
        f"{direction}.decision", kind=kind, decision=routing.pop("decision", "allow"), direction=direction, facts=facts,
        payload={"bytes": 10}, **routing,
    )  # fmt: skip


# ---- what is counted -----------------------------------------------------------------------------------


def test_T38_a_coordinators_log_does_not_say_that_nothing_left(tmp_path: Path) -> None:
    with open_log(tmp_path / "log", COORDINATOR) as log:
        for sender, count in (("hospital_a", 2), ("hospital_b", 1)):
            for _ in range(count):
                decide(log, "ingress", "lora.factors", {}, peer=f"spiffe://net/silo/{sender}")
    made = audit_report([tmp_path / "log"])
    assert (made["left_counted"], made["left_total"], made["left"]) == (False, None, [])
    assert made["arrived_total"] == {"messages": 3, "bytes": 30}
    assert [(row["identity"], row["messages"]) for row in made["arrived_from"]] == [
        ("spiffe://net/silo/hospital_a", 2), ("spiffe://net/silo/hospital_b", 1),
    ]  # fmt: skip
    words = shown(made)
    assert "This log has no records of what its owner sent." in words and "3 messages came in" in words
    assert not [each for each in NEVER_LEFT if each in words]
    ended = CliRunner().invoke(app, ["report", str(tmp_path / "log"), "--out", str(tmp_path / "out")])
    assert ended.exit_code == 0
    assert "no records of what its owner sent; 3 messages, 30 bytes came in" in ended.stdout
    assert "left" not in ended.stdout.replace(str(tmp_path), "")


def test_T21_dropped_answers_of_others_are_told_by_round_and_site(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        for number, dropped in (
            (1, {"hospital_a": 3}),
            (1, {"hospital_a": 4, "hospital_b": 1}),
            (2, {"hospital_a": 2}),
        ):
            decide(log, "ingress", "public.donors", {}, round=number, facts={"transform": {"donors_dropped": dropped}})
        decide(log, "ingress", "public.donors", {}, round=2, facts={"transform": {"donors_dropped": {}}})
    made = audit_report([tmp_path / "log"])
    assert made["donors_dropped_total"] == 10
    assert made["donors_dropped"] == [
        {"run": "run-1", "round": 1, "of": "hospital_a", "answers": 7, "first": 0, "last": 1},
        {"run": "run-1", "round": 1, "of": "hospital_b", "answers": 1, "first": 1, "last": 1},
        {"run": "run-1", "round": 2, "of": "hospital_a", "answers": 2, "first": 2, "last": 2},
    ]


# ---- data ----------------------------------------------------------------------------------------------


def test_sets_come_from_the_policy_and_the_records_and_nothing_is_invented(tmp_path: Path) -> None:
    policy = edited("rows: 10", "rows: 10\n    licence: CC-BY-4.0")
    with open_log(tmp_path / "log") as log:
        log.append("policy.load", policy=digests(policy), detail={"name": "pubswap", "mode": "enforce"})
        decide(log, "ingress", "run.plan", {"public_set_sha256": "ab" * 32, "public_set_rows": 77})
        decide(log, "ingress", "run.plan", {"public_set_sha256": "cd" * 32, "public_set_rows": 1}, decision="deny")
        decide(log, "ingress", "round.open", {"public_set_sha256": PUBLIC})
        for records in (80, 99, 100):
            decide(log, "egress", "lora.factors", {"records": records})
        decide(log, "egress", "lora.factors", {"records": 5}, decision="deny")
    made = audit_report([tmp_path / "log"], policies=[policy])
    data = made["data"]
    found = {row["sha256"]: (row["rows"], row["licence"], row["in_policy"], row["in_records"]) for row in data["sets"]}
    assert found == {
        PUBLIC: (10, "CC-BY-4.0", True, True), HELD_OUT: (8, "", True, False), "ab" * 32: (77, "", False, True),
    }  # fmt: skip
    assert [(row["run"], row["records"], row["messages"]) for row in data["trained"]] == [
        ("run-1", "10 to 99", 2), ("run-1", "100 to 999", 1),
    ]  # fmt: skip
    assert (data["collection"], data["purpose"]) == ("", None)
    # a policy that was given, and that this log never loaded, says nothing of this site's data
    other = audit_report([tmp_path / "log"], policies=[edited("rows: 10", "rows: 11\n    licence: MIT")])
    assert "MIT" not in shown(other) and PUBLIC in {row["sha256"] for row in other["data"]["sets"]}


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0"), (1, "1 to 9"), (9, "1 to 9"), (10, "10 to 99"), (99_999, "10000 to 99999")]
)
def test_a_number_of_records_is_told_as_a_power_of_ten(count: int, words: str) -> None:
    assert bucket(count) == words


# ---- identities ----------------------------------------------------------------------------------------


def test_T26_certificates_are_those_that_the_records_name(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        renewed = {"identity": SILO, "fingerprint": "1a" * 32, "not_after": "2027-01-02T03:04:05Z"}
        log.append("key.renew", detail=renewed)
        log.append("key.expire_warn", detail={"fingerprint": "2b" * 32, "not_after": 1_800_000_000})
        log.append("key.expire_warn", detail={"why": "no fingerprint"})
        log.append("approval.grant", detail={"release": "r1", "person": HOSTILE, "certificate": "3c" * 32})
    made = audit_report([tmp_path / "log"])
    assert [(row["identity"], row["fingerprint"], row["valid_until"], row["seq"]) for row in made["certificates"]] == [
        (SILO, "1a" * 32, "2027-01-02T03:04:05Z", 0),
        (SILO, "2b" * 32, "2027-01-15 08:00:00 UTC", 1),
        (HOSTILE, "3c" * 32, "", None),
    ]
    assert all(each * 32 in shown(made) for each in ("1a", "2b", "3c"))


def test_T29_keys_are_whole_and_one_that_its_owner_contradicts_is_marked(tmp_path: Path) -> None:
    logs = two_witnessed_logs(tmp_path)
    made = audit_report(logs)
    keys = {row["identity"]: row for row in made["keys"]}
    assert {name: row["key"] for name, row in keys.items()} == {
        name: KEYS[name].public_key().public_bytes_raw().hex() for name in (SILO, COORDINATOR)
    }
    assert keys[SILO]["of_this_log"] and keys[COORDINATOR]["own_log"] is True
    assert all(row["key"] in shown(made) for row in keys.values()) and "names another key" not in shown(made)
    alone = {row["identity"]: row["own_log"] for row in audit_report(logs[:1])["keys"]}
    assert alone == {SILO: True, COORDINATOR: None}  # the coordinator's log was not given
    with open_log(tmp_path / "other", COORDINATOR, key=OTHER_KEY) as log:
        log.append("start")
    lied = audit_report([logs[0], tmp_path / "other"])
    assert {row["identity"]: row["own_log"] for row in lied["keys"]}[COORDINATOR] is False
    assert "that party's own log names another key" in shown(lied)


@pytest.mark.parametrize("right", [True, False])
def test_T29_the_coordinators_key_is_compared_with_the_one_that_the_policy_pins(tmp_path: Path, right: bool) -> None:
    key = KEYS[COORDINATOR].public_key().public_bytes_raw()
    pin = hashlib.sha256(key).hexdigest() if right else "1" * 64
    text = policy_text().replace("cardio-net", "net")  # the federation of these logs
    policy = policy_of(re.sub(r'coordinator_key_sha256: \["0+"\]', f'coordinator_key_sha256: ["{pin}"]', text))
    with open_log(tmp_path / "log") as log, open_log(tmp_path / "coordinator", COORDINATOR) as other:
        introduce(log, other)
        log.append("policy.load", policy=digests(policy), detail={"name": "pubswap", "mode": "enforce"})
    made = audit_report([tmp_path / "log"], policies=[policy])
    assert {row["identity"]: row["pinned"] for row in made["keys"]} == {SILO: None, COORDINATOR: right}
    assert ("the policy in force names another key" in shown(made)) is not right


def test_T10_the_isolation_of_a_trainer_is_told_or_said_to_be_missing(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        log.append("start", detail={"version": "0.1.0", "code": "ab" * 32})
    assert "The isolation level of the trainer is not in this log." in shown(audit_report([tmp_path / "log"]))
    with open_log(tmp_path / "log") as log:
        log.append("start", detail={"version": "0.1.0", "code": "ab" * 32, "isolation": "user"})
        log.append("start", detail={"isolation": "a strong one"})
    made = audit_report([tmp_path / "log"])
    assert [(row["identity"], row["isolation"]) for row in made["trainers"]] == [(SILO, "user")]
    assert "is not in this log" not in shown(made) and "a strong one" not in shown(made)


# ---- words ---------------------------------------------------------------------------------------------


def test_every_kind_is_explained_and_text_and_weights_are_named() -> None:
    assert all(words_of(kind).partition(";")[0] for kind in MESSAGES)
    with_text = {kind for kind in MESSAGES if "free text" in held_by(kind)}
    assert with_text == {kind for kind, message in MESSAGES.items() if _has_text(message.DESCRIPTOR)}
    assert {"public.responses", "public.donors", "knowledge.package"} <= with_text
    assert held_by("lora.factors")[0] == "weights" and held_by("control.heartbeat") == ["nothing"]
    assert words_of(HOSTILE) == "no kind of this protocol"


def _has_text(message: Any) -> bool:
    return any(
        field.name == "text" or (field.message_type and _has_text(field.message_type)) for field in message.fields
    )


# ---- evidence and signature ----------------------------------------------------------------------------


def test_evidence_is_named_by_its_digest_and_not_read_for_its_meaning(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        log.append("start")
    junit = tmp_path / "junit<b>.xml"
    junit.write_bytes(b"<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><testsuite>&a;</testsuite>")
    assert invoke(tmp_path / "log", "--out", tmp_path / "out", "--evidence", junit).exit_code == 0
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    digest = hashlib.sha256(junit.read_bytes()).hexdigest()
    assert made["evidence"] == [{"name": "junit<b>.xml", "bytes": junit.stat().st_size, "sha256": digest}]
    assert digest in shown(made) and "junit<b>" not in page(made)
    assert invoke(tmp_path / "log", "--out", tmp_path / "none", "--evidence", tmp_path).exit_code == 8
    assert not (tmp_path / "none").exists()


@pytest.fixture
def sites(folder: Path) -> tuple[Path, Path, Path]:
    """A log of hospital_a, signed with its key, and the configurations of hospital_a and hospital_b."""
    coordinator(folder, *SMALL)
    configs = []
    for name in ("hospital_a", "hospital_b"):
        silo(folder, name=name)
        configs.append(folder / "trial" / name / "silo.yaml")
    signer = cli_audit_report.signer_of_site(configs[0])
    name = signer.spiffe_id
    with AuditLog(folder / "log", origin=name, actor=name, key=signer.signing_key, reserve_bytes=0) as log:
        log.append("start")
    return folder / "log", configs[0], configs[1]


def checked(out: Path) -> tuple[bool, bool]:
    """Whether the signature over the list is good, and whether the files are those of the list, as an auditor asks."""
    verify = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", "report.pub", "-in", "report.sha256",
              "-sigfile", "report.sha256.sig"]  # fmt: skip
    commands = (verify, ["sha256sum", "--check", "--strict", "report.sha256"])
    first, second = (
        subprocess.run(each, cwd=out, capture_output=True, check=False).returncode == 0 for each in commands
    )
    return first, second


def test_T38_one_signature_covers_every_file_of_the_report(sites: tuple[Path, Path, Path], tmp_path: Path) -> None:
    log, own, _ = sites
    done = invoke(log, "--out", tmp_path / "out", "--sign", own, "--config", own, "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 0 and answer["warnings"] == []
    assert answer["data"]["signed_by"] == "spiffe://cardio-net/silo/hospital_a"
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    assert made["signature"]["trouble"] == "" and made["data"]["collection"] == load_config(own).data.collection
    assert made["signature"]["key"] == made["keys"][0]["key"] and "Signed by" in shown(made)
    listed = {line.split("  ")[1] for line in (tmp_path / "out/report.sha256").read_text().splitlines()}
    unlisted = {"report.sha256", "report.sha256.sig", "report.pub"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == listed | unlisted
    assert checked(tmp_path / "out") == (True, True)
    for name in sorted(listed):
        changed = copied(tmp_path / "out", tmp_path / f"changed-{name}")
        (changed / name).write_bytes((changed / name).read_bytes().replace(b"e", b"3", 1))
        assert checked(changed) == (True, False), name
        digests_of = hashlib.sha256((changed / name).read_bytes()).hexdigest()
        lines = (changed / "report.sha256").read_text().splitlines()
        rewritten = [f"{digests_of}  {name}" if line.endswith(name) else line for line in lines]
        (changed / "report.sha256").write_text("\n".join(rewritten) + "\n")
        assert checked(changed) == (False, True), name


def test_T38_a_report_signed_by_another_than_the_logs_owner_says_so(
    sites: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    log, own, other = sites
    words = "signed by spiffe://cardio-net/silo/hospital_b, not by the log's owner spiffe://cardio-net/silo/hospital_a"
    done = invoke(log, "--out", tmp_path / "out", "--sign", other, "--config", other)
    assert done.exit_code == 0 and words in " ".join(done.stderr.split())
    assert "--config is that of spiffe://cardio-net/silo/hospital_b" in " ".join(done.stderr.split())
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    assert words in shown(made) and made["data"]["collection"] == ""
    told = json.loads(invoke(log, "--out", tmp_path / "json", "--sign", other, "--json").stdout)
    assert [words in warning for warning in told["warnings"]] == [True]
    # the same name, and another key than the one that signed the log
    name = cli_audit_report.signer_of_site(own).spiffe_id
    with AuditLog(tmp_path / "forged", origin=name, actor=name, key=OTHER_KEY, reserve_bytes=0) as forged:
        forged.append("start")
    done = invoke(tmp_path / "forged", "--out", tmp_path / "key", "--sign", own)
    assert f"signed by {name} with another key than the log's" in " ".join(done.stderr.split())

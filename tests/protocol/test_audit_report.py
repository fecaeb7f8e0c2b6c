"""The report for a reviewer: its numbers are those of the raw lines, and nothing in a record can change the page."""

from __future__ import annotations

import csv
import html
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.record import EVENTS
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report_page import RESIDUALS, audit_report, inventory_csv, page, text
from policies.capacity import capacities
from tests.policies.setting import SCHEMA, policy_text
from tests.protocol.audit_parties import copied, open_log
from tests.protocol.audit_story import CERTIFICATE, HOSTILE, two_policies, write_story


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


def test_the_report_begins_with_one_sentence_in_words_whose_numbers_are_those_of_the_raw_lines(
    report: dict[str, Any], raw: list[dict[str, Any]]
) -> None:
    said = report["in_words"]
    assert "5 messages with content left hospital_a, 1 after people's yes and 4 without a person" in said
    assert "1 message of the protocol itself" in said and "people rejected 1" in said
    assert f"rules denied {sum(record.get('decision') == 'deny' for record in raw)} messages" in said
    verifies = report["verification"][0]["verified"]
    assert said.endswith("the log verifies." if verifies else "the log does NOT verify.")
    shown = html.unescape(page(report))
    assert shown.index(said) < shown.index("<h2>")
    rows = [(row["kind"], row["messages"], row["bytes"], row["line"]) for row in report["left_unasked"]]
    assert rows == [("public.responses", 4, 1214, 0), ("control.hello", 1, 490, 0)]


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
    shown = " ".join(" ".join(Reader(page(report)).text).split())
    assert f"loaded, at a start or anew: {report['policies'][0]['loads']}; " in shown
    for words in ("353,943", "352,239", "DELTA_L2", "approved by alice", "rejected by bob", "budgets.message_bytes",
                  "tighter", "every log given verifies", "LOG_FULL", *RESIDUALS, "off: no privacy budget"):  # fmt: skip
        assert words in shown, words


# ---- the command ---------------------------------------------------------------------------------------


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


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
    assert made["left_total"] == {"messages": 0, "bytes": 0}
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

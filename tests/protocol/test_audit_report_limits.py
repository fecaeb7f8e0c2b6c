"""The report on a log that is long, cut, contradicted or hostile: it is whole, or says that it is not."""

from __future__ import annotations

import csv
import json
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
from fedsilo.audit.record import COUNT_MAX, EVENTS
from fedsilo.audit.statistics import OTHERS, LogStatistics, moment
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report_page import audit_report, inventory_csv, page
from fedsilo.protocol.errors import UsageError
from tests.protocol.audit_parties import (
    COORDINATOR,
    SILO,
    Clock,
    append_send,
    copied,
    open_log,
    segment,
    two_witnessed_logs,
)
from tests.protocol.test_audit_reading import cut
from tests.protocol.test_audit_report import Reader

PERSON = {"person": "alice", "certificate": "5a" * 32}


def shown(report: dict[str, Any]) -> str:
    """The page's text, each run of white space one space."""
    return " ".join(" ".join(Reader(page(report)).text).split())


def run(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def reported(tmp_path: Path, *logs: Path, name: str = "out") -> tuple[Any, dict[str, Any], str]:
    """What the command said, its JSON file and the text of its page."""
    done = run("report", *logs, "--out", tmp_path / name)
    made = json.loads((tmp_path / name / "report.json").read_bytes())
    return done, made, " ".join(" ".join(Reader((tmp_path / name / "report.html").read_text("utf-8")).text).split())


def record(event: str, seq: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": event, "seq": seq, "t": 1_800_000_000_000, "actor": SILO, "link": {}, **fields}


def tallied(*records: dict[str, Any]) -> dict[str, Any]:
    totals = LogStatistics()
    for number, each in enumerate(records):
        totals.add({**each, "seq": number})
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
    words = shown(made)
    assert "3 halts and their ends" in words and "5 more are in the log." in words


@pytest.mark.parametrize("more", [0, 2])
def test_halts_beyond_the_list_are_in_the_total_and_said_to_be_missing(plain: dict[str, Any], more: int) -> None:
    count = audit_statistics.INCIDENTS_MAX + more
    words = shown(plain | tallied(*[record("halt")] * count))
    assert f"{count} halts and their ends" in words
    assert ("2 more are in the log" in words) is bool(more)


@pytest.mark.parametrize("more", [0, 200])
def test_T36_releases_beyond_the_list_are_counted(plain: dict[str, Any], more: int) -> None:
    count = audit_statistics.RELEASES_MAX + more
    records = []
    for number in range(count):
        name = {"release": f"r{number}"}
        records += [record("approval.request", detail=name), record("approval.grant", detail=name | PERSON)]
    found = tallied(*records)
    assert (len(found["approvals"]), found["approvals_total"]) == (audit_statistics.RELEASES_MAX, count)
    words = shown(plain | found)
    assert f"{count:,} releases held for people" in words and f"approved {count}" in words
    told = f"Further releases are in the log, and not listed here: approved {more}, asked {more}."
    assert (told in words) is bool(more)


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
    words = " ".join(" ".join(Reader(source).text).split())
    assert (
        f"{count - audit_statistics.KEY_EVENTS_MAX:,} more are in the log, all of them older" in words
        and OTHERS in words
    )
    assert f"{count - audit_statistics.ANSWERS_MAX:,} more answers are in the log" in words


@pytest.mark.parametrize("more", [0, 3])
def test_sets_beyond_the_list_are_said_to_be_missing(tmp_path: Path, more: int) -> None:
    with open_log(tmp_path / "log") as log:
        for number in range(audit_statistics.SETS_MAX + more):
            facts = {"final": {"held_out_sha256": f"{number:064x}"}}
            log.append("egress.decision", kind="metrics.eval", decision="allow", direction="egress", facts=facts)
    made = audit_report([tmp_path / "log"])
    assert (len(made["data"]["sets"]), made["data"]["sets_not_listed"]) == (audit_statistics.SETS_MAX, more)
    assert ("3 more decisions name sets that are not listed here." in shown(made)) is bool(more)


def test_T34_of_many_policy_versions_the_one_in_force_is_always_told(plain: dict[str, Any]) -> None:
    count = audit_statistics.POLICIES_MAX + 10
    totals = LogStatistics()
    for number in range(count):
        totals.add(record("policy.load", number, policy={"effective": f"p{number}"}))
    assert totals.policies_total == count and len(totals.policies) == audit_statistics.POLICIES_MAX
    assert [item["effective"] for item in totals.policies[-2:]] == [
        f"p{audit_statistics.POLICIES_MAX - 2}",
        f"p{count - 1}",
    ]
    rows = [{**item, "given": False, "changes": None, "bits_a_round": None} for item in totals.policies]
    gap = f"Versions {audit_statistics.POLICIES_MAX} to {count - 1} are in the log, and not listed here."
    assert gap in shown(plain | {"policies": rows})
    assert "not listed here" not in shown(plain | {"policies": rows[:-1]})


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
    ("records", "state", "words"),
    [
        ([held(2), answer("request")], "held", "held: 0 of 2 approvals"),
        ([held(2), answer("request"), answer("grant", "a")], "held", "held: 1 of 2 approvals"),
        ([held(2), answer("request"), answer("grant", "a"), answer("grant", "a")], "held", "held: 1 of 2 approvals"),
        ([held(1), answer("request"), answer("grant", "a")], "held", "held: 1 of 1 approval; no decision follows"),
        ([answer("grant", "a")], "held", "held: 1 approval; how many it needs is not told"),
        ([held(2), answer("request"), answer("grant", "a"), answer("grant", "b"), allowed(2, 3)], "granted",
         "granted: 2 of 2 approvals; decided in record 4"),
        ([held(1), answer("request"), answer("grant", "a"), allowed(2, decision="deny")], "refused",
         "approved, and denied by the rules: 1 of 1 approval; decided in record 3"),
        ([held(2), answer("request"), answer("grant", "a"), allowed(decision="deny")], "held",
         "held: 1 of 2 approvals"),
        ([held(1), answer("request"), answer("grant", "a"), allowed(decision="deny")], "refused",
         "approved, and denied by the rules"),
        ([held(1), answer("request"), answer("grant", "a"), allowed(0)], "held", "no decision follows"),
        ([held(1), answer("request"), answer("grant", "a"), allowed(2) | {"round": 2}], "held", "no decision follows"),
        ([held(1), answer("request"), answer("grant", "a"), answer("deny", "b"), allowed(2)], "rejected",
         "allowed all the same"),
        ([held(1), answer("request"), answer("expire")], "expired", "expired: 0 of 1 approval"),
        ([held(2), answer("request"), answer("grant", "a"), LOADED], "held",
         "held: approvals given under an earlier policy do not count"),
        ([held(2), answer("request"), answer("grant", "a"), LOADED, answer("grant", "b")], "held",
         "held: 1 approval; how many it needs is not told"),
    ],
)  # fmt: skip
def test_T36_a_release_is_granted_only_where_a_decision_says_so(
    plain: dict[str, Any], records: list[dict[str, Any]], state: str, words: str
) -> None:
    found = tallied(*records)
    assert [item["state"] for item in found["approvals"]] == [state]
    told = shown(plain | found)
    assert words in told
    assert ("allowed all the same" in told) is (words == "allowed all the same")


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
        told = json.loads(run("report", tmp_path / name, "--out", tmp_path / f"{name}_json", "--json").stdout)["data"]
        assert (
            (made["counted_from"], made["complete"]) == (told["counted_from"], told["complete"]) == (first, not first)
        )
        assert (f"messages left, from record {first} on" in words) is bool(first)
        assert (f"counted from record {first} on" in words) is bool(first)
        assert (f"records, from record {first} on" in done.stdout) is bool(first)
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


def test_T38_two_folders_of_one_log_are_told_apart(tmp_path: Path) -> None:
    log, _ = two_witnessed_logs(tmp_path)
    first, second = copied(log, tmp_path / "one/hospital_a"), copied(log, tmp_path / "two/hospital_a")
    segment(second).write_bytes(segment(second).read_bytes().replace(b'"allow"', b'"deny"', 1))
    done, made, words = reported(tmp_path, first, second)
    assert done.exit_code == 7 and f"do not verify: {second}" in " ".join(done.stderr.split())
    assert [item["log"] for item in made["verification"]] == [f"{first} (hospital_a)", f"{second} (hospital_a)"]
    assert f"{first} (hospital_a) verified" in words and f"{second} (hospital_a) NOT VERIFIED" in words
    _, made, words = reported(tmp_path, copied(log, tmp_path / "hospital_a"), name="alone")
    assert [item["log"] for item in made["verification"]] == ["hospital_a"]


def test_a_folder_that_is_no_log_is_none_and_not_a_log_that_somebody_tampered_with(tmp_path: Path) -> None:
    log, _ = two_witnessed_logs(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.txt").write_text("x")
    assert run("export", "--log", log, "--out", tmp_path / "exported").exit_code == 0
    for folder, hint in ((tmp_path / "photos", "no log folder"), (tmp_path / "exported", "an export with proofs")):
        done = run("report", folder, "--out", tmp_path / "out")
        assert done.exit_code == 8 and hint in " ".join(done.stderr.split())
        assert not (tmp_path / "out").exists()
    assert run("report", log, "--out", tmp_path / "out").exit_code == 0


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


def test_names_beyond_the_limit_are_counted_together() -> None:
    names = audit_statistics.Names(2, OTHERS)
    assert [names(name) for name in ("a", "b", "c", "a", "c")] == ["a", "b", OTHERS, "a", OTHERS]
    rows = audit_statistics.FirstOf(2)
    for number in range(3):
        rows.add({"number": number})
    assert (rows.rows, rows.total) == ([{"number": 0}, {"number": 1}], 3)

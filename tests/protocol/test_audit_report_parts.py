"""The report's further parts: what a coordinator's log counts, data, certificates, evidence, donors, one signature."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.log import AuditLog
from fedsilo.audit.statistics import DONOR_ROWS_MAX, bucket
from fedsilo.cli import audit_report as cli_audit_report
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report_page import ORIENTATION, audit_report, held_by, page, words_of
from fedsilo.protocol.kinds import MESSAGES
from silo.config import load_config
from tests.policies.setting import edited, policy_of, policy_text
from tests.policies.test_plan_size import SMALL, coordinator, folder, silo
from tests.protocol.audit_parties import (
    COORDINATOR,
    KEYS,
    OTHER_KEY,
    SILO,
    copied,
    introduce,
    open_log,
    two_witnessed_logs,
)
from tests.protocol.audit_story import HOSTILE, digests
from tests.protocol.test_audit_report import Reader

__all__ = ["folder"]  # the fixture: what sites have before `silo init`

PUBLIC, HELD_OUT = "0" * 63 + "4", "0" * 63 + "5"  # of the policy in tests/policies/setting.py
NEVER_LEFT = ("messages left", "left, payload bytes", "What left, by kind", "What left coordinator")


def shown(report: dict[str, Any]) -> str:
    """The page's text, each run of white space one space."""
    return " ".join(" ".join(Reader(page(report)).text).split())


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


def test_a_silos_log_in_which_nothing_was_sent_says_that_nothing_left(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        log.append("start")
    made = audit_report([tmp_path / "log"])
    assert made["left_counted"] and made["left_total"] == {"messages": 0, "bytes": 0}
    assert "0 messages left" in shown(made) and "no records of what its owner sent" not in shown(made)


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
    words = shown(made)
    assert "10 answers of other sites dropped" in words
    assert words.index("Halts and other incidents") < words.index("run-1 1 hospital_a 7 0 1") < words.index("Programs")


def test_T23_rows_of_dropped_answers_have_an_end_and_their_number_has_none(tmp_path: Path) -> None:
    over = 5
    with open_log(tmp_path / "log") as log:
        for start in range(0, DONOR_ROWS_MAX + over, 201):
            names = {f"peer{number}": 1 for number in range(start, min(start + 201, DONOR_ROWS_MAX + over))}
            decide(log, "ingress", "public.donors", {}, facts={"transform": {"donors_dropped": names}})
    made = audit_report([tmp_path / "log"])
    assert (len(made["donors_dropped"]), made["donors_dropped_total"]) == (DONOR_ROWS_MAX, DONOR_ROWS_MAX + over)
    assert f"{over} more were dropped." in shown(made)


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
    words = shown(made)
    for part in ("CC-BY-4.0", "the policy states none", "no policy that names it was given", "not in the log;",
                 "neither policy nor log holds one"):  # fmt: skip
        assert part in words, part
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
    words = shown(made)
    assert all(each * 32 in words for each in ("1a", "2b", "3c")) and "2027-01-02T03:04:05Z" in words
    assert "replaced the one before" in words and "expires soon" in words


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


def test_the_page_has_sign_off_orientation_and_what_the_capacity_leaves_out(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        log.append("start")
    words = shown(audit_report([tmp_path / "log"]))
    for part in (
        "Log review", "Name and role", "Date", "Signature", "Orientation only, not legal advice", "Not signed.",
        "Not counted: what the timing of messages can carry", "docs/explain/border-figures.md",
    ):  # fmt: skip
        assert part in words, part
    assert all(rule in words for rule, _, _ in ORIENTATION)
    for rule in ("164.312(b)", "164.316(b)(2)", "Art. 5(2)", "Art. 35", "28/2024", "Art. 26", "800-226"):
        assert any(rule in each or rule.removeprefix("Art. ") in each for each, _, _ in ORIENTATION), rule


# ---- evidence and signature ----------------------------------------------------------------------------


def report_on(log: Path, out: Path, *words: object) -> Any:
    return CliRunner().invoke(app, ["report", str(log), "--out", str(out), *map(str, words)])


def test_evidence_is_named_by_its_digest_and_not_read_for_its_meaning(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        log.append("start")
    junit = tmp_path / "junit<b>.xml"
    junit.write_bytes(b"<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><testsuite>&a;</testsuite>")
    assert report_on(tmp_path / "log", tmp_path / "out", "--evidence", junit).exit_code == 0
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    digest = hashlib.sha256(junit.read_bytes()).hexdigest()
    assert made["evidence"] == [{"name": "junit<b>.xml", "bytes": junit.stat().st_size, "sha256": digest}]
    assert digest in shown(made) and "junit<b>" not in page(made)
    assert report_on(tmp_path / "log", tmp_path / "none", "--evidence", tmp_path).exit_code == 8
    assert not (tmp_path / "none").exists()


@pytest.fixture
def sites(folder: Path) -> tuple[Path, Path, Path]:
    """A log of hospital_a, signed with its key, and the configurations of hospital_a and hospital_b."""
    coordinator(folder, *SMALL)
    configs = []
    for name in ("hospital_a", "hospital_b"):
        silo(folder, name=name)
        configs.append(folder / "trial" / name / "silo.yaml")
    signer = cli_audit_report._signer(configs[0])
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
    done = report_on(log, tmp_path / "out", "--sign", own, "--config", own, "--json")
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
    done = report_on(log, tmp_path / "out", "--sign", other, "--config", other)
    assert done.exit_code == 0 and words in " ".join(done.stderr.split())
    assert "--config is that of spiffe://cardio-net/silo/hospital_b" in " ".join(done.stderr.split())
    made = json.loads((tmp_path / "out/report.json").read_bytes())
    assert words in shown(made) and made["data"]["collection"] == ""
    told = json.loads(report_on(log, tmp_path / "json", "--sign", other, "--json").stdout)
    assert [words in warning for warning in told["warnings"]] == [True]
    # the same name, and another key than the one that signed the log
    name = cli_audit_report._signer(own).spiffe_id
    with AuditLog(tmp_path / "forged", origin=name, actor=name, key=OTHER_KEY, reserve_bytes=0) as forged:
        forged.append("start")
    done = report_on(tmp_path / "forged", tmp_path / "key", "--sign", own)
    assert f"signed by {name} with another key than the log's" in " ".join(done.stderr.split())

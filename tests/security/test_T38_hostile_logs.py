"""A log that its owner filled with nonsense, and signed, is called by its name; no other log suffers for it (T38).

Each log here is sound as far as numbers, links and signatures go, and what its records say is of any type and value.
A command that ended by an exception would tell nothing of the honest logs that were given with it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from certs.identity import named_in
from fedsilo.audit import audit_verify
from fedsilo.audit import proofs as audit_proofs
from fedsilo.audit import record as audit_record
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.consistency import check_consistency
from fedsilo.audit.notes import keep
from fedsilo.audit.orders import check_orders
from fedsilo.audit.statistics import LogStatistics
from fedsilo.cli.audit import app
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import FedSiloError, NotAllowedError
from tests.protocol.audit_parties import COORDINATOR, SILO, Clock, append_send, exchange, introduce, open_log
from tests.protocol.audit_story import write_story
from tests.protocol.hostile_logs import (
    JUNK,
    Record,
    exchanged,
    further_records,
    is_record,
    record,
    records_in,
    signed_log,
    window_of_polls,
    with_wrong_values,
)
from tests.security.test_T36_what_people_signed import GIVEN, NOW, WORLD, approval, grant

ENDS = {0, 1, 7, 8}  # verified; equivocation; not verified; no such release


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log of an honest coordinator, `good`, and the CA of the people."""
    folder = tmp_path_factory.mktemp("hostile")
    _, coordinator = write_story(folder / "story")
    told = records_in(coordinator)
    signed_log(folder / "good", [*told, *window_of_polls("ingress", len(told))], COORDINATOR)
    (folder / "ca.crt").write_bytes(WORLD.ca.certificate_pem)
    return folder


@pytest.fixture(scope="module")
def told(place: Path) -> list[list[Record]]:
    """What logs tell: of messages, of people, of all else."""
    silo, _ = write_story(place / "another")
    people = [record("approval.grant", **grant(approval()))]
    for event, (name, arguments, fields, _) in GIVEN.items():
        order = WORLD.command(name, arguments)
        detail = {"person": "alice", "certificate": order.certificate_fingerprint, "request": order.request_id}
        detail |= {"acknowledged": ["f-1"], **fields.get("detail", {})}
        rest = {name: value for name, value in fields.items() if name not in ("event", "detail")}
        people.append(record(event, **rest, policy={"effective": "cd" * 32}, detail=detail, orders=[dict(order.order)]))
    return [records_in(silo), people, further_records()]


def ends_of_all_commands(place: Path, log: Path) -> dict[str, int]:
    """How each command that reads a log ends, with an honest log beside it where it takes several."""
    good, site_ca, ends = place / "good", ("--site-ca", place / "ca.crt"), dict[str, int]()
    out = place / f"report-{len(list(place.iterdir()))}"
    for words in (
        ("verify", log, good, *site_ca), ("report", log, good, *site_ca, "--out", out), ("tail", "--log", log),
        ("tail", "--log", log, "--person", "alice", "--release", "r3/hospital_a", "--since", "2020-01-01"),
        ("release", "r3/hospital_a", "--log", log),
    ):  # fmt: skip
        done = CliRunner(env={"FEDSILO_TRACEBACK": "1"}).invoke(app, list(map(str, words)))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        ends[words[0]] = done.exit_code
    ends["alone"] = audit_verify.main([str(log), str(good)])
    return ends


@pytest.mark.parametrize("seed", range(3))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_T38_no_value_of_a_signed_record_ends_a_command(
    place: Path, told: list[list[Record]], tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    random = Random(data.draw(st.integers(0, 1 << 32)))
    hostile = signed_log(tmp_path_factory.mktemp("log"), with_wrong_values(told[seed], random, 8))
    ends = ends_of_all_commands(place, hostile)
    assert set(ends.values()) <= ENDS, ends


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_T38_no_record_at_all_ends_the_verifier_that_stands_alone(
    told: list[list[Record]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """It reads lines that the program's own reader refuses."""
    random = Random(data.draw(st.integers(0, 1 << 32)))
    every = [each for part in told for each in part]
    records = [exchanged(random.choice(every), random, every) for _ in range(8)]
    assert audit_verify.main([str(signed_log(tmp_path_factory.mktemp("log"), records))]) in (0, 7)


@pytest.mark.parametrize("detail", [*JUNK, {"size": {"x": "y"}}, {"size": [5]}, {"size": 1e308}, {"size": -1}])
def test_T38_a_removal_that_says_anything_is_a_damaged_record_or_none(tmp_path: Path, detail: Any) -> None:
    log = signed_log(tmp_path / "log", [record("start"), record("retention.records") | {"detail": detail}])
    assert audit_verify.main([str(log)]) in (0, 7)


@pytest.mark.parametrize("name", ["peer", "run", "kind"])
def test_T38_a_window_of_polls_that_ends_as_another_one_is_a_problem(place: Path, tmp_path: Path, name: str) -> None:
    began, ended = window_of_polls("egress", 1)
    for changed in ({}, {name: "control.heartbeat" if name == "kind" else "another"}):
        log = signed_log(tmp_path / f"log-{len(changed)}", [record("start"), began, ended | changed])
        ends_of_all_commands(place, log)
        results = verify_logs([log])
        check_consistency(results, [log])
        assert [("another peer, run or kind" in each) for each in results[0]["problems"]] == [True] * bool(changed)


def told_of(folder: Path, *records: Record) -> list[str]:
    """What the stories of a log with these records, behind its start, are said to have wrong."""
    log = signed_log(folder, [record("start"), *records])
    results = verify_logs([log])
    assert results[0]["verified"]
    check_consistency(results, [log])
    return list(results[0]["problems"])


MESSAGE: dict[str, Any] = {
    "kind": "lora.factors", "run": "r1", "round": 1, "step": 0, "peer": COORDINATOR, "direction": "egress",
    "payload": {"bytes": 1000, "sha256": "ab" * 32},
}  # fmt: skip
DENIED_BY = [{"rule": "delta_l2", "outcome": "deny"}]
PLAN = MESSAGE | {"kind": "run.plan", "direction": "ingress"}
STORIES: dict[str, tuple[list[Record], bool]] = {  # with whether they can be true
    "allowed": ([record("egress.decision", decision="allow", **MESSAGE),
                 record("egress.sent", link={"decision": 1}, **MESSAGE)], True),
    "without a decision": ([record("egress.sent", **MESSAGE)], False),
    "denied": ([record("egress.decision", decision="deny", **MESSAGE),
                record("egress.sent", link={"decision": 1}, **MESSAGE)], False),
    "allowed against its rules": ([record("egress.decision", decision="allow", rules=DENIED_BY, **MESSAGE),
                                   record("egress.sent", link={"decision": 1}, **MESSAGE)], False),
    "a plan": ([record("ingress.decision", decision="allow", **PLAN)], True),
    "a plan against its rules": ([record("ingress.decision", decision="allow", rules=DENIED_BY, **PLAN)], False),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_T38_a_count_of_polls_takes_no_record_out_of_the_story(tmp_path: Path, name: str) -> None:
    records, true = STORIES[name]
    assert (told_of(tmp_path / "log", *records) == []) is true
    for number, count in enumerate((1, 0, -1000, True, None)):
        last = records[-1] | {"detail": {"polls": count}}
        problems = told_of(tmp_path / str(number), *records[:-1], last)
        assert (problems == []) is (true and last["event"] != "egress.sent")  # a single message is no window


@pytest.mark.parametrize("direction", ["egress", "ingress"])
@pytest.mark.parametrize("name", ["polls", "polls_most", "refused"])
def test_T38_what_ends_a_window_counts_its_messages_and_reports_count_no_fewer_than_none(
    tmp_path: Path, direction: str, name: str
) -> None:
    began, ended = window_of_polls(direction, 1)
    for number, value in enumerate(("absent", 4, 5, 4096, 4097, -1000, *JUNK)):
        detail = {**ended["detail"], name: value}
        if value == "absent":
            del detail[name]
        last = ended | {"detail": detail}
        counts = type(value) is int and value >= 0
        true = {  # 3 polls, or 4 at most
            "polls": counts and value <= 4,
            "polls_most": value == "absent" or (counts and 3 <= value <= 4096),
            "refused": value == "absent" or counts,
        }[name]
        assert (told_of(tmp_path / f"log-{number}", began, last) == []) is true, value
        counted = LogStatistics()
        for each in (began, last):
            counted.add(audit_record.Record({"seq": 1, **each}))
        assert min([0, *counted.left.values(), *counted.arrived_from.values()]) == 0


@pytest.mark.parametrize(
    ("changed", "true"),
    [
        ({}, True),
        ({"event": "egress.acked"}, False),  # no decision
        ({"decision": "deny"}, False),
        ({"kind": "lora.factors"}, False),
        *(({"detail": {"window": {"polls_most": each}}}, False) for each in (0, -1, True, 2.5, "5", None)),
        ({"detail": {"window": {"polls_most": 4}}}, True),
    ],
)
def test_T38_only_a_decision_on_polls_begins_a_window(tmp_path: Path, changed: Record, true: bool) -> None:
    began, ended = window_of_polls("egress", 1)
    assert (told_of(tmp_path / "log", began | changed, ended) == []) is true


def test_T38_a_window_ends_once_and_by_no_other_record(tmp_path: Path) -> None:
    began, ended = window_of_polls("egress", 1)
    unsure = ended | {"event": "egress.indeterminate"}
    assert told_of(tmp_path / "unsure", began, unsure) == []
    for number, last in enumerate(([ended, ended], [ended, unsure], [unsure | {"link": {}}])):
        assert len(told_of(tmp_path / str(number), began, *last)) == 1


# ---- files that are none ---------------------------------------------------------------------------------


@pytest.fixture
def impatient() -> Iterator[None]:
    """Whoever waits for a pipe that nobody writes into is told to stop."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


PARTS = ("*.jsonl", "*.leaves", "keys/log.vkey", "keys/spiffe*", "checkpoints/*", "witnessed/*", "../notes/*")


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize("part", PARTS)
def test_T38_no_command_waits_for_a_pipe_in_the_place_of_a_file(tmp_path: Path, impatient: None, part: str) -> None:
    log, clock = tmp_path / "state" / "audit", Clock()
    silo = open_log(log, SILO, clock=clock, segment_bytes_max=1200)
    (tmp_path / "ca.crt").write_bytes(WORLD.ca.certificate_pem)
    with silo, open_log(tmp_path / "good", COORDINATOR, clock=clock) as coordinator:
        introduce(silo, coordinator)
        for number in range(8):
            append_send(silo, number)
        exchange(silo, coordinator)
        exchange(silo, coordinator)
        digest = keep(log, b'{"note":"seen","salt":"x"}')
        clock.now += 400 * 86_400
        silo.append("approval.deny", reasons=["OTHER"], detail={"release": "r3/hospital_a", "note": digest})
        assert silo.remove_old(int((clock.now - 3600) * 1000)) > 0
    whole = ends_of_all_commands(tmp_path, log)
    assert set(whole.values()) == {0} and audit_proofs.prove(log, silo.size - 1)["log"] == SILO
    first = sorted(log.glob(part))[0]
    first.unlink()
    os.mkfifo(first)
    ends = ends_of_all_commands(tmp_path, log)
    assert set(ends.values()) <= ENDS and ends["verify"] == 7
    with contextlib.suppress(FedSiloError):
        audit_proofs.prove(log, silo.size - 1)


# ---- what people signed ----------------------------------------------------------------------------------


def with_kept(**changes: bytes) -> Record:
    """The record of a grant, with other bytes kept of what was signed."""
    order = dict(approval().order) | {name: base64.b64encode(each).decode() for name, each in changes.items()}
    return record("approval.grant", **grant(approval(), orders=[order]))


def certificate() -> bytes:
    return base64.b64decode(approval().order["certificate"])


OTHERWISE: dict[str, tuple[bytes, bytes]] = {
    "a version that does not exist": (bytes.fromhex("a003020102"), bytes.fromhex("a003020107")),
    "a curve that is not known": (bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030101")),
    "a kind of key that is not known": (bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06072a8648ce3d0209")),
    "an extension that is there twice": (bytes.fromhex("0603551d25"), bytes.fromhex("0603551d0f")),
    "a name of a kind that is not known": (b"\x86" + bytes([len(b"spiffe://hospital_a/operator/alice")]) + b"spiffe",
                                           b"\x83" + bytes([len(b"spiffe://hospital_a/operator/alice")]) + b"spiffe"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_T38_a_kept_certificate_that_cannot_be_read_is_a_problem_of_its_log_alone(
    place: Path, tmp_path: Path, name: str
) -> None:
    old, new = OTHERWISE[name]
    changed = certificate().replace(old, new)
    assert changed != certificate()
    log = signed_log(tmp_path / "log", [record("start"), with_kept(certificate=changed)])
    words = ["verify", str(log), str(place / "good"), "--site-ca", str(place / "ca.crt"), "--json"]
    done = CliRunner(env={"FEDSILO_TRACEBACK": "1"}).invoke(app, words)
    assert done.exit_code == 7, done.exception
    hostile, good = json.loads(done.stdout)["data"]
    assert (hostile["verified"], good["verified"]) == (False, True)
    assert len(hostile["problems"]) == 1 and "record 1" in hostile["problems"][0]


@pytest.mark.slow
def test_T38_certificates_with_any_byte_changed_are_judged_or_refused(tmp_path: Path) -> None:
    random, der = Random(5), certificate()
    every, refused = [], 0
    for _ in range(250):
        changed = bytearray(der)
        for _ in range(random.choice((1, 1, 2))):
            changed[random.randrange(len(der))] = random.randrange(256)
        every.append(bytes(changed))
        pem = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(changed) + b"-----END CERTIFICATE-----\n"
        try:
            named_in(pem)
        except NotAllowedError:
            refused += 1
    log = signed_log(tmp_path / "log", [with_kept(certificate=each) for each in every])
    results = verify_logs([log])
    check_orders(results, [log], [WORLD.ca.certificate_pem])
    assert sum(results[0]["orders"].values()) == len(every) >= results[0]["orders"]["broken"] >= refused > 0


@pytest.mark.parametrize("acknowledged", [each for each in JUNK if each])
def test_T38_findings_that_are_no_list_of_names_were_opened_by_nobody(tmp_path: Path, acknowledged: Any) -> None:
    for signed in (["f-1"], acknowledged):
        fields = grant(approval(acknowledged=signed))
        fields["detail"] |= {"acknowledged": acknowledged}
        log = signed_log(
            tmp_path / f"log-{signed == acknowledged}", [record("start"), record("approval.grant", **fields)]
        )
        results = verify_logs([log])
        check_orders(results, [log])
        opened = signed == acknowledged == ["x", "x"]  # of all junk the one list of names
        assert results[0]["orders"]["signed"] == opened and results[0]["orders"]["broken"] == (not opened)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_T38_whatever_a_person_s_key_signed_is_judged(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The key of a real person, over statements and arguments that no client of ours signs."""
    random = Random(data.draw(st.integers(0, 1 << 32)))
    records = []
    for event, (name, arguments, _, _) in GIVEN.items():
        order = dict(WORLD.command(name, arguments).order)
        version, _, body = base64.b64decode(order["signed"]).partition(b"\n")
        said = json.loads(body)
        if random.random() < 0.5:
            inner = exchanged(json.loads(said["arguments"]) | {"acknowledged": ["f-1"]}, random, [said])
            said["arguments"] = canonical_json(inner).decode()
        else:
            said = exchanged(said, random, [said])
        signed = version + b"\n" + canonical_json(said)
        signature = WORLD.keys["alice"][0].sign(signed, ec.ECDSA(hashes.SHA256()))
        kept = {"signed": signed, "signature": signature}
        order |= {name: base64.b64encode(each).decode() for name, each in kept.items()}
        made = record(event, detail={"person": "alice", "acknowledged": ["f-1"], "release": "r1"}, orders=[order])
        assert is_record(made | {"seq": 1, "link": {"previous": "0" * 64}})
        records.append(made | {"t": round(NOW.timestamp() * 1000)})
    log = signed_log(tmp_path_factory.mktemp("log"), records, random.choice((SILO, COORDINATOR)))
    results = verify_logs([log])
    check_orders(results, [log], [WORLD.ca.certificate_pem])
    assert sum(results[0]["orders"].values()) == len(records)

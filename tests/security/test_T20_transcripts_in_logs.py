"""T20, afterwards: what `audit verify`, `audit report` and `run verify` say of the rounds, from the files alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from certs.authority import create_ca
from certs.encoding import public_key_pem
from certs.enrolment import EnrolmentKeys
from coordinator.record import sign_record
from fedsilo.audit import record as audit_record
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import log_key
from fedsilo.audit.log import AuditLog
from fedsilo.audit.transcripts import check_rounds
from fedsilo.cli import audit as cli_audit
from fedsilo.cli import run as cli_run
from fedsilo.cli.audit_report import audit_report, page
from fedsilo.protocol import codec
from fedsilo.protocol.transcript import (
    KnownKey,
    RoundCheck,
    RoundEnd,
    Transcript,
    check_evidence,
    check_record,
    sign_end,
    sign_transcript,
    silo_id,
    transcript_from_canonical,
)
from tests.policies import setting
from tests.world import COORDINATOR_KEY, OUR_KEY, PEER_KEYS, World

KEYS = {"hospital_a": OUR_KEY, **PEER_KEYS}
STRANGER = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
A, C = silo_id("cardio-net", "hospital_a"), silo_id("cardio-net", "hospital_c")
EVENTS = ["round.transcript", "round.agreed", "round.result", "round.equivocation"]
B = silo_id("cardio-net", "hospital_b")
Detail = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One honest round: hospital_a's log, the coordinator's, and the run record."""
    folder = tmp_path_factory.mktemp("run")
    federation = World(folder)
    assert federation.run(rounds=1) == "finished"
    federation.close()
    return folder


def details(run: Path) -> dict[str, Detail]:
    records = (json.loads(line) for path in (run / "hospital_a" / "audit").glob("*.jsonl") for line in path.open())
    return {row["event"]: row["detail"] for row in records if row["event"].startswith("round.")}


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Detail:
    """The run record of two honest rounds."""
    folder = tmp_path_factory.mktemp("two_rounds")
    federation = World(folder)
    assert federation.run(rounds=2) == "finished"
    federation.close()
    record: Detail = json.loads((folder / "coordinator/runs/run-1/run_record.json").read_text())["record"]
    return record


def log_of(
    folder: Path,
    said: dict[str, Detail],
    *,
    origin: str = B,
    key: Ed25519PrivateKey = PEER_KEYS["hospital_b"],
    pins: Mapping[str, Ed25519PrivateKey] | None = None,
    number: int = 1,
) -> Path:
    """A party's own log, sound in itself, that says this of a round."""
    with AuditLog(folder, origin=origin, key=key, actor=origin, clock=lambda: setting.NOW, reserve_bytes=0) as log:
        for party, pinned in (pins or {}).items():
            log.trust_peer(party, pinned.public_key())
        for event in sorted(said, key=EVENTS.index):
            log.append(event, run="run-1", round=number, detail=said[event])
    return folder


def shown_in(said: dict[str, Detail]) -> Transcript:
    return transcript_from_canonical(codec.canonical_json(said["round.transcript"]["transcript"]).decode())


def signed_anew(
    said: dict[str, Detail],
    transcript: Transcript,
    *,
    coordinator: Ed25519PrivateKey = COORDINATOR_KEY,
    keys: Mapping[str, Ed25519PrivateKey] = KEYS,
    signers: tuple[str, ...] = (),
    **result: Any,
) -> dict[str, Detail]:
    """The three records of a round with this transcript, with signatures by these keys."""
    party = said["round.transcript"]["party"]
    opened = {"transcript": transcript.to_json(), "sha256": transcript.digest, "party": party}
    opened |= {"signature": sign_transcript(transcript, party, coordinator).hex()}
    silos = signers or transcript.silos
    agreed = {
        "sha256": transcript.digest,
        "signatures": {
            name: sign_transcript(transcript, silo_id("cardio-net", name), keys[name]).hex() for name in silos
        },
        "keys": {name: keys[name].public_key().public_bytes_raw().hex() for name in silos},
    }
    fields = {"committed": True, "aggregate": "a" * 64, "survivors": transcript.silos, **result}
    verdicts = {name: "accepted" if name in fields["survivors"] else "absent" for name in transcript.silos}
    end = RoundEnd(*transcript.coordinates(), transcript.digest, verdicts=verdicts, **fields)
    ended = sign_end(end, party, coordinator).to_detail()
    return {"round.transcript": opened, "round.agreed": agreed, "round.result": ended}


def checked(*logs: Path, findings: int = 0) -> tuple[list[list[str]], list[dict[str, Any]]]:
    results = verify_logs(list(logs))
    assert all(result["verified"] for result in results)  # every log is whole: it is what they say that counts
    rows = check_rounds(results, list(logs))
    assert sum(len(result["findings"]) for result in results) == findings
    assert [result["verified"] for result in results] == [not result["problems"] for result in results]
    return [result["problems"] for result in results], rows


def test_T20_the_logs_of_all_parties_of_an_honest_round_agree(run: Path, tmp_path: Path) -> None:
    said = details(run)
    logs = [run / "hospital_a" / "audit", log_of(tmp_path / "b", said), run / "coordinator" / "audit"]
    problems, rows = checked(*logs)
    assert problems == [[], [], []]
    (row,) = rows
    assert row["signed"] == ["hospital_a", "hospital_b"] == row["survivors"] and row["logs_alike"] == 3
    assert row["keys_not_vouched_for"] == []
    assert (
        row["aggregate"]
        == json.loads((run / "coordinator/runs/run-1/run_record.json").read_text())["record"]["adapter_sha256"]
    )
    assert CliRunner().invoke(cli_audit.app, ["verify", *map(str, logs)]).exit_code == 0


def other_transcript(said: dict[str, Detail]) -> None:
    """What hospital_b was shown by a coordinator that equivocates: another base, signed just as well."""
    text = codec.canonical_json(said["round.transcript"]["transcript"]).decode()
    shown = replace(transcript_from_canonical(text), base_digest="f" * 64)
    signature = sign_transcript(shown, setting.COORDINATOR, COORDINATOR_KEY).hex()
    said["round.transcript"] |= {"transcript": shown.to_json(), "sha256": shown.digest, "signature": signature}
    del said["round.agreed"], said["round.result"]


def test_T20_another_transcript_in_a_second_log_is_the_coordinators_doing_and_not_the_logs(
    run: Path, tmp_path: Path
) -> None:
    said = details(run)
    other_transcript(said)
    logs = [run / "hospital_a" / "audit", log_of(tmp_path / "b", said)]
    assert checked(logs[1])[0] == [[]]  # alone nothing is wrong with it
    problems, rows = checked(*logs, findings=2)
    assert problems == [[], []] and rows[0]["logs_alike"] == 1
    done = CliRunner().invoke(cli_audit.app, ["verify", *map(str, logs), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["error"]["code"]) == (1, "EQUIVOCATION")
    assert [result["findings"][0]["signers"] for result in told["data"]] == [[setting.COORDINATOR]] * 2
    assert "another transcript than in the log of hospital_b: base_digest differ" in told["error"]["message"]
    made = audit_report(logs)
    assert made["verification"][0]["verified"] and made["rounds"][0]["logs_alike"] == 1
    assert "two transcripts of round 1 of run run-1 are signed" in page(made) and "1 of 2" in page(made)


def test_T20_a_difference_that_nobody_known_signed_is_a_problem_of_both_logs(tmp_path: Path, run: Path) -> None:
    """Each alone could be: no log given knows the coordinator."""
    said, other = details(run), details(run)
    other_transcript(other)
    said["round.transcript"]["signature"] = other["round.transcript"]["signature"]
    problems, _ = checked(log_of(tmp_path / "b", said), log_of(tmp_path / "a", other, origin=A, key=OUR_KEY))
    assert [len(each) for each in problems] == [1, 1] and "another transcript" in problems[0][0]


def test_T20_another_signed_result_in_a_second_log_is_the_coordinators_doing(run: Path, tmp_path: Path) -> None:
    said = signed_anew(details(run), shown_in(details(run)), aggregate="f" * 64)
    logs = [run / "hospital_a" / "audit", log_of(tmp_path / "b", said)]
    assert checked(*logs, findings=2)[0] == [[], []]
    done = CliRunner().invoke(cli_audit.app, ["verify", *map(str, logs)])
    assert done.exit_code == 1 and "two results of round 1" in done.stdout and "aggregate differ" in done.stdout


def test_T20_two_signed_results_in_one_log_are_the_coordinators_doing(run: Path, tmp_path: Path) -> None:
    said = details(run)
    other = signed_anew(said, shown_in(said), aggregate="f" * 64)
    log = log_of(tmp_path / "b", said)
    log_of(log, {"round.result": other["round.result"]})
    assert checked(log, run / "hospital_a" / "audit", findings=1)[0] == [[], []]
    other["round.result"]["signature"] = "00" * 64
    log_of(log, {"round.result": other["round.result"]})
    assert "result is not signed" in checked(log, run / "hospital_a" / "audit", findings=1)[0][0][0]


def put(found: Any, place: tuple[str | int, ...], value: Any) -> None:
    """Exchange what stands in a place; None takes it away."""
    *way, last = place
    for name in way:
        found = found[name]
    if value is None:
        del found[last]
    else:
        found[last] = value


def forge_key(said: dict[str, Detail]) -> None:
    """A signature that verifies, under a key of nobody."""
    signature = sign_transcript(shown_in(said), B, STRANGER)
    put(said, ("round.agreed", "signatures", "hospital_b"), signature.hex())
    put(said, ("round.agreed", "keys", "hospital_b"), STRANGER.public_key().public_bytes_raw().hex())


def stranger_signs(said: dict[str, Detail]) -> None:
    for each in ("signatures", "keys"):
        put(said, ("round.agreed", each, "hospital_x"), said["round.agreed"][each]["hospital_b"])


def others_agreed(said: dict[str, Detail]) -> None:
    """Enough signatures, without the one of the silo whose log it is."""
    said |= signed_anew(
        said, replace(shown_in(said), silos=ROSTER, policies=POLICIES), signers=("hospital_a", "hospital_c")
    )


def without_b(said: dict[str, Detail]) -> None:
    said |= signed_anew(said, replace(shown_in(said), silos=("hospital_a",), policies={"hospital_a": ""}))


def nobody_coordinates(said: dict[str, Detail]) -> None:
    said["round.transcript"] |= {"party": "spiffe://cardio-net/coordinator/nobody", "signature": "00" * 64}


def another_federation(said: dict[str, Detail]) -> None:
    said["round.transcript"] = signed_anew(said, replace(shown_in(said), federation="other-net"))["round.transcript"]


def a_survivor_from_elsewhere(said: dict[str, Detail]) -> None:
    said |= signed_anew(said, shown_in(said), survivors=("hospital_a", "hospital_x"))


ROSTER = ("hospital_a", "hospital_b", "hospital_c")
POLICIES = dict.fromkeys(ROSTER, "")


SHOWN, AGREED, ENDED = "round.transcript", "round.agreed", "round.result"


@pytest.mark.quick(keep=8)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        # a place and what stands there instead, None for nothing; or what changes more than one
        ((SHOWN, "transcript", "plan_sha256", "f" * 64), "not the one that the record names"),
        ((SHOWN, "signature", "00" * 64), "not signed by spiffe://cardio-net/coordinator/main"),
        ((SHOWN, "transcript", "text"), "malformed"),
        ((SHOWN, "party", C), "silo/hospital_c, who is not known as the coordinator"),
        (nobody_coordinates, "coordinator/nobody, who is not known as the coordinator"),
        (another_federation, "of the federation other-net"),
        (without_b, "does not name the silo whose log this is"),
        ((SHOWN, None), "a round.agreed without a round.transcript"),
        ((SHOWN, None), "a round.result without a round.transcript"),
        ((AGREED, "sha256", "f" * 64), "belongs to another transcript"),
        ((AGREED, "signatures", "hospital_b", "00" * 64), "signature of hospital_b does not verify"),
        (forge_key, "key of hospital_b is not the one"),
        (stranger_signs, "signature of hospital_x does not verify"),
        ((AGREED, None), "no signature of hospital_b, who took part"),
        ((AGREED, None), "0 signatures of silos verify"),
        ((AGREED, "signatures", "hospital_a", None), "1 signatures of silos verify, needed: 2"),
        (others_agreed, "no signature of hospital_b"),
        ((ENDED, "survivors", 5), "round.result is malformed"),
        ((ENDED, "verdicts", [1]), "round.result is malformed"),
        ((ENDED, "aggregate", "f" * 64), "result is not signed by spiffe://cardio-net/coordinator/main"),
        (a_survivor_from_elsewhere, "hospital_x, not of its roster"),
    ],
)
def test_T20_what_cannot_be_true_in_a_log_is_found(run: Path, tmp_path: Path, change: Any, found: str) -> None:
    said = details(run)
    change(said) if callable(change) else put(said, change[:-1], change[-1])
    logs = [log_of(tmp_path / "b", said), run / "hospital_a" / "audit"]
    results = verify_logs(logs)
    check_rounds(results, logs)
    assert any(found in problem for problem in results[0]["problems"]), results[0]["problems"]
    assert not results[0]["verified"] and results[1]["problems"] == []  # the honest log beside it is not to blame
    assert CliRunner().invoke(cli_audit.app, ["verify", *map(str, logs)]).exit_code == 7
    assert page(audit_report(logs))


def test_T20_two_transcripts_of_one_round_in_one_log_are_found(run: Path, tmp_path: Path) -> None:
    said, other = details(run), details(run)
    other_transcript(other)
    folder = log_of(tmp_path / "b", said)
    log_of(folder, other)
    problems, _ = checked(folder)
    assert len(problems[0]) == 1 and "a second transcript, which differs in base_digest" in problems[0][0]


def test_T20_a_log_does_not_vouch_for_signatures_in_itself(run: Path, tmp_path: Path) -> None:
    """It has the others' keys in its folder, and its owner put them there."""
    alone, coordinator = run / "hospital_a" / "audit", run / "coordinator" / "audit"
    assert [path.name for path in (alone / "keys").glob("*hospital_b*")]
    problems, rows = checked(alone)
    assert problems == [[]] and rows[0]["keys_not_vouched_for"] == ["coordinator/main", "hospital_b"]
    done = CliRunner().invoke(cli_audit.app, ["verify", str(alone), "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["data"][0]["keys_not_vouched_for"] == ["coordinator/main", "hospital_b"]
    assert any("vouches for the keys" in warning for warning in told["warnings"])
    assert "coordinator/main, hospital_b" in page(audit_report([alone]))
    problems, rows = checked(alone, coordinator)
    assert problems == [[], []] and rows[0]["keys_not_vouched_for"] == ["hospital_b"]  # it is not pinned there
    problems, rows = checked(alone, coordinator, log_of(tmp_path / "b", details(run)))
    assert problems == [[], [], []] and rows[0]["keys_not_vouched_for"] == []


def test_T20_a_copy_of_a_log_vouches_for_nothing_more_than_the_log(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "hospital_a" / "audit", tmp_path / "copy")
    _, rows = checked(run / "hospital_a" / "audit", tmp_path / "copy")
    assert rows[0]["keys_not_vouched_for"] == ["coordinator/main", "hospital_b"]


def test_T20_a_partys_own_log_is_the_word_on_its_key(run: Path, tmp_path: Path) -> None:
    """hospital_c invents a round that hospital_b signed, with a key that it vouches for itself."""
    said = details(run)
    three = replace(shown_in(said), silos=ROSTER, policies=POLICIES, round=2)
    forged = {**KEYS, "hospital_b": STRANGER}
    honest = log_of(tmp_path / "b", details(run))
    pins = {B: STRANGER, setting.COORDINATOR: COORDINATOR_KEY}
    lying = log_of(
        tmp_path / "c", signed_anew(said, three, keys=forged), origin=C, key=KEYS["hospital_c"], pins=pins, number=2
    )
    problems, _ = checked(lying, honest, run / "coordinator" / "audit")
    assert any("its key of spiffe://cardio-net/silo/hospital_b is not the one" in each for each in problems[0])
    assert any("the key of hospital_b is not the one that is known" in each for each in problems[0])
    assert problems[1:] == [[], []]
    problems, _ = checked(lying, run / "hospital_a" / "audit")  # without hospital_b's log it is word against word
    for told in problems:
        assert any(
            "its key of spiffe://cardio-net/silo/hospital_b is not the one of another log" in one for one in told
        )


def test_T20_a_silo_hears_of_nobody_who_signs_after_it_and_the_coordinators_log_must(run: Path, tmp_path: Path) -> None:
    said = details(run)
    three = replace(shown_in(said), silos=ROSTER, policies=POLICIES, round=2)
    early = signed_anew(said, three, signers=("hospital_a", "hospital_b"))
    silo, place = log_of(tmp_path / "b", early, number=2), ("run-1", 2)
    problems, (row,) = checked(silo)
    assert problems == [[]] and row["survivors_without_signature"] == ["hospital_c"]
    full = log_of(tmp_path / "c", signed_anew(said, three), origin=C, key=KEYS["hospital_c"], number=2)
    problems, (row,) = checked(silo, full)
    assert problems == [[], []] and row["survivors_without_signature"] == [] and (row["run"], row["round"]) == place
    lying = log_of(tmp_path / "main", early, origin=setting.COORDINATOR, key=COORDINATOR_KEY, number=2)
    assert checked(lying)[0] == [["round 2 of run run-1: no signature of hospital_c, who took part"]]


def test_T20_a_silo_that_the_round_began_without_need_not_know_who_signed(run: Path, tmp_path: Path) -> None:
    said = details(run)
    three = replace(shown_in(said), silos=ROSTER, policies=POLICIES)
    left = signed_anew(said, three, survivors=("hospital_a", "hospital_c"))
    del left["round.agreed"]
    problems, (row,) = checked(log_of(tmp_path / "b", left))
    assert problems == [[]] and row["survivors_without_signature"] == ["hospital_a", "hospital_c"]


def test_T20_only_retention_may_take_a_transcript_away(run: Path, tmp_path: Path) -> None:
    said = details(run)
    del said["round.transcript"]
    log = log_of(tmp_path / "b", said)
    log_of(log, signed_anew(details(run), replace(shown_in(details(run)), round=2)), number=2)
    results = verify_logs([log])
    results[0]["hashes_only"] = 1  # as where the first records are leaf hashes
    assert [row["round"] for row in check_rounds(results, [log])] == [] or results[0]["problems"] == []
    later = signed_anew(details(run), replace(shown_in(details(run)), round=3))
    del later["round.transcript"]
    log_of(log, later, number=3)
    results = verify_logs([log])
    results[0]["hashes_only"] = 1
    check_rounds(results, [log])
    assert [problem.partition(": ")[2] for problem in results[0]["problems"]] == [
        "round 3 of run run-1: a round.agreed without a round.transcript before it",
        "round 3 of run run-1: a round.result without a round.transcript before it",
    ]


def test_T20_rounds_behind_a_record_that_cannot_be_read_do_not_count_as_checked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier of logs takes any record that is chained; a record with an unknown field hides what follows."""
    said = details(run)
    with monkeypatch.context() as patched:
        patched.setitem(audit_record._FIELDS, "more", lambda value: True)
        with AuditLog(
            tmp_path / "b", origin=B, key=KEYS["hospital_b"], actor=B, clock=lambda: setting.NOW, reserve_bytes=0
        ) as log:
            log.append("start", more=1)
            log.append("round.result", run="run-1", round=1, detail=said["round.result"])
    problems, _ = checked(tmp_path / "b")
    assert len(problems[0]) == 1 and "not all of its rounds can be read" in problems[0][0]


# ---- two signed transcripts, in the log of the silo that was shown them ------------------------------------


def evidence(run: Path, *, signer: str = setting.COORDINATOR, key: Ed25519PrivateKey = COORDINATOR_KEY) -> Detail:
    """As a guard keeps it: what it was shown, and what somebody signed besides."""
    known = details(run)["round.transcript"]
    other = replace(shown_in(details(run)), base_digest="f" * 64)
    shown: Detail = {"sha256": other.digest, "party": signer, "signature": sign_transcript(other, signer, key).hex()}
    if signer == setting.COORDINATOR:
        shown["transcript"] = other.to_json()
    return {"known": {name: known[name] for name in ("sha256", "transcript", "party", "signature")}, "shown": shown}


@pytest.mark.parametrize(
    ("signer", "key"),
    [(setting.COORDINATOR, COORDINATOR_KEY), (C, PEER_KEYS["hospital_c"])],
    ids=["coordinator", "silo"],
)
def test_T20_the_log_of_a_silo_that_was_shown_two_transcripts_is_sound_and_names_the_signer(
    run: Path, tmp_path: Path, signer: str, key: Ed25519PrivateKey
) -> None:
    said = details(run)
    three = signed_anew(said, replace(shown_in(said), silos=ROSTER, policies=POLICIES))["round.transcript"]
    other = replace(shown_in({"round.transcript": three}), base_digest="f" * 64)
    proof = evidence(run, signer=signer, key=key)
    proof["known"] = three
    proof["shown"] |= {"sha256": other.digest, "signature": sign_transcript(other, signer, key).hex()}
    if signer == setting.COORDINATOR:
        proof["shown"]["transcript"] = other.to_json()
    pins = {setting.COORDINATOR: COORDINATOR_KEY, C: PEER_KEYS["hospital_c"]}
    log = log_of(tmp_path / "b", {"round.transcript": three, "round.equivocation": proof}, pins=pins)
    assert checked(log, findings=1)[0] == [[]]
    done = CliRunner().invoke(cli_audit.app, ["verify", str(log), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["error"]["code"], told["data"][0]["verified"]) == (1, "EQUIVOCATION", True)
    (finding,) = told["data"][0]["findings"]
    assert finding["signers"] == list(dict.fromkeys((setting.COORDINATOR, signer)))
    assert finding["sha256"] == [three["sha256"], other.digest]
    sarif = CliRunner().invoke(cli_audit.app, ["verify", str(log), "--output", "sarif"]).stdout
    assert [row["ruleId"] for row in json.loads(sarif)["runs"][0]["results"]] == ["EQUIVOCATION"]
    made = audit_report([log])
    assert made["verification"][0]["verified"] and f"are signed, by {setting.COORDINATOR}" in page(made)
    report = CliRunner().invoke(cli_audit.app, ["report", str(log), "--out", str(tmp_path / "report"), "--json"])
    assert (report.exit_code, json.loads(report.stdout)["error"]["code"]) == (1, "EQUIVOCATION")
    assert (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize("damage", ["two names in one file", "a log of that name with no checkpoint of its own"])
def test_T20_a_damaged_log_is_nobodys_word_on_a_key(run: Path, tmp_path: Path, damage: str) -> None:
    """Else whoever adds one to a folder of evidence has the honest party's log called wrong."""
    fake = log_key(setting.COORDINATOR, Ed25519PrivateKey.generate().public_key()).text
    log = log_of(tmp_path / "b", details(run))
    path = log / "keys" / "log.vkey"
    if damage == "two names in one file":
        path.write_text(f"{path.read_text()}{fake}\n")
    else:
        path.write_text(f"{fake}\n{fake}\n")
    logs = [run / "hospital_a" / "audit", log]
    results = verify_logs(logs)
    check_rounds(results, logs)
    assert [result["verified"] for result in results] == [True, False]


def test_T20_a_pipe_among_the_keys_is_named_and_not_waited_for(run: Path, tmp_path: Path) -> None:
    log = log_of(tmp_path / "b", details(run))
    os.mkfifo(log / "keys" / "0.vkey")
    done = CliRunner().invoke(cli_audit.app, ["verify", str(log), "--json"])
    assert done.exit_code == 7 and "0.vkey" in json.dumps(json.loads(done.stdout)["data"][0]["problems"])


def of_another_round(proof: Detail) -> None:
    other = replace(transcript_from_canonical(codec.canonical_json(proof["shown"]["transcript"]).decode()), round=2)
    signature = sign_transcript(other, setting.COORDINATOR, COORDINATOR_KEY).hex()
    proof["shown"] |= {"transcript": other.to_json(), "sha256": other.digest, "signature": signature}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("shown", "signature", "00" * 64), "second one is not signed by"),
        (("known", "signature", "00" * 64), "does not verify"),
        (lambda proof: proof.update(shown=dict(proof["known"])), "no second one"),
        (of_another_round, "no second one"),
        (("shown", "party", silo_id("cardio-net", "hospital_x")), "no key of"),
        (("shown", [1]), "malformed"),
    ],
)
def test_T20_evidence_that_does_not_verify_is_a_problem_of_the_log(
    run: Path, tmp_path: Path, change: Any, found: str
) -> None:
    proof = evidence(run)
    change(proof) if callable(change) else put(proof, change[:-1], change[-1])
    log = log_of(tmp_path / "b", {"round.equivocation": proof}, pins={setting.COORDINATOR: COORDINATOR_KEY})
    problems, _ = checked(log)
    assert len(problems[0]) == 1 and found in problems[0][0]
    assert CliRunner().invoke(cli_audit.app, ["verify", str(log)]).exit_code == 7


# ---- hostile values ----------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 52) | st.text(st.sampled_from("af01<>é"), max_size=6)
    | st.sampled_from(["", "f" * 64, "0" * 128, "hospital_b", B, setting.COORDINATOR]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["a", "hospital_b", "sha256"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def changed_somewhere(data: st.DataObject, value: Any) -> None:
    """Another value, or none, for one of the fields, however deep it lies."""
    within, name = value, data.draw(st.sampled_from(sorted(value)))
    while isinstance(within[name], dict | list) and within[name] and data.draw(st.integers(0, 3)):
        within = within[name]
        name = data.draw(st.sampled_from(sorted(within) if isinstance(within, dict) else range(len(within))))
    if data.draw(st.booleans()):
        within[name] = data.draw(VALUES)
    else:
        del within[name]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_T20_no_value_in_a_round_record_stops_verification_or_report(run: Path, data: st.DataObject) -> None:
    said = {**details(run), "round.equivocation": evidence(run)}
    changed_somewhere(data, said[data.draw(st.sampled_from(sorted(said)))])
    with TemporaryDirectory() as folder:
        logs = [
            log_of(Path(folder) / "b", said, pins={setting.COORDINATOR: COORDINATOR_KEY}),
            run / "hospital_a" / "audit",
        ]
        results = verify_logs(logs)
        rows = check_rounds(results, logs)
        assert page(audit_report(logs)) and json.dumps(rows, allow_nan=False)
        assert results[1]["problems"] == []
        for row in rows:
            assert all(isinstance(silo, str) for silo in row["survivors"]) and isinstance(row["verdicts"], dict)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_T20_no_value_in_records_of_a_round_stops_the_check(run: Path, data: st.DataObject) -> None:
    said, proof = details(run), evidence(run)
    keys = {setting.COORDINATOR: KnownKey(COORDINATOR_KEY.public_key().public_bytes_raw())}
    check = RoundCheck("run-1", 1, owner=B, keys=keys)
    changed_somewhere(data, {**said, "evidence": proof})
    told = [
        *check.opened(said["round.transcript"]), *check.agreed(said["round.agreed"]),
        *check.result(said["round.result"]), *check.missing(),
        *check_evidence(proof, run="run-1", number=1, owner=B, keys=keys)[1],
    ]  # fmt: skip
    assert all(isinstance(problem, str) for problem in told)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_T20_no_value_in_a_run_record_stops_the_check(run: Path, data: st.DataObject) -> None:
    record = record_of(run)
    place = data.draw(st.sampled_from([record, record["rounds"][0], record["rounds"][0]["transcript"]]))
    changed_somewhere(data, place)
    key = COORDINATOR_KEY.public_key()
    found = check_record(record, signer=setting.COORDINATOR, public_key=key, keys={})
    assert all(isinstance(problem, str) for problem in found.problems)


# ---- the run record ----------------------------------------------------------------------------------------


def verified(folder: Path, record: Detail, *options: str) -> tuple[int, Any]:
    """`run verify` of a record that the coordinator has signed, whatever it says."""
    document, key = folder / "record.json", folder / "coordinator.pub"
    document.write_bytes(sign_record(record, setting.COORDINATOR, COORDINATOR_KEY))
    key.write_bytes(public_key_pem(COORDINATOR_KEY.public_key()))
    done = CliRunner().invoke(cli_run.app, ["verify", str(document), "--key", str(key), *options, "--json"])
    return done.exit_code, json.loads(done.stdout)


def record_of(run: Path) -> Detail:
    record: Detail = json.loads((run / "coordinator/runs/run-1/run_record.json").read_text())["record"]
    return record


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        (("transcript", "signature"), "00" * 64, "coordinator's signature"),
        (("transcript", "countersignatures", "hospital_b", "signature"), "00" * 64, "signature of hospital_b"),
        (("transcript", "countersignatures"), {}, "0 signatures of silos verify, needed: 2"),
        (("transcript", "countersignatures"), [1], "malformed"),
        (("transcript", "transcript", "plan_sha256"), "f" * 64, "digest"),
        (("transcript", "transcript", "silos"), "text", "malformed"),
        (("transcript", "sha256"), "f" * 64, "digest"),
        (("transcript", "result"), {}, "without a result that its coordinator signed"),
        (("transcript", "result", "aggregate"), "f" * 64, "result is not signed"),
        (("transcript",), {}, "without a transcript"),
        (("base_sha256",), "f" * 64, "base adapter"),
        (("adapter_sha256",), "f" * 64, "its adapter is not the one in its result"),
        (("state",), "abandoned", "state or participants"),
        (("participants",), ["hospital_c"], "participants"),
        (("participants",), 5, "malformed"),
    ],
)
def test_T20_run_verify_checks_the_transcript_of_each_round(
    run: Path, tmp_path: Path, place: tuple[str, ...], value: Any, found: str
) -> None:
    record = record_of(run)
    code, told = verified(tmp_path, record)
    assert (code, told["data"]["transcripts"], told["data"]["problems"]) == (0, 1, [])
    put(record, ("rounds", 0, *place), value)
    code, told = verified(tmp_path, record)
    assert code == 7 and any(found in problem for problem in told["data"]["problems"]), told["data"]["problems"]
    assert told["data"]["transcripts"] == 0


@pytest.mark.parametrize("dropped", ["hospital_a", "hospital_b"])
def test_T20_run_verify_counts_signatures_and_looks_for_those_of_who_took_part(
    run: Path, tmp_path: Path, dropped: str
) -> None:
    record = record_of(run)
    del record["rounds"][0]["transcript"]["countersignatures"][dropped]
    code, told = verified(tmp_path, record)
    assert code == 7 and told["data"]["problems"] == [
        "round 1: 1 signatures of silos verify, needed: 2",
        f"round 1: no signature of {dropped}, who took part",
    ]


def test_T20_run_verify_asks_for_the_quorum_of_the_plan(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    put(record, ("plan", "quorum"), 3)
    code, told = verified(tmp_path, record)
    assert code == 7 and told["data"]["problems"] == [
        "round 1: its transcript is of another plan",
        "round 1: it is committed with 2 updates, needed: 3",
        "round 1: 2 signatures of silos verify, needed: 3",
    ]


@pytest.mark.parametrize("least", [0, 2, 3])
def test_T58_run_verify_and_audit_verify_ask_for_the_updates_that_the_transcript_binds(
    run: Path, tmp_path: Path, least: int
) -> None:
    """Two were committed. A transcript of protocol 1 names no number (0)."""
    record, said = record_of(run), details(run)
    ended = said["round.result"]
    kept = {name: ended[name] for name in ("aggregate", "survivors")}
    said = signed_anew(said, replace(shown_in(said), min_updates=least), **kept)
    log = log_of(tmp_path / "log", said)
    results = verify_logs([log])
    check_rounds(results, [log])
    assert (results[0]["problems"] == []) is (least < 3)
    agreed, shown = said["round.agreed"], record["rounds"][0]["transcript"]
    shown |= {name: said["round.transcript"][name] for name in ("transcript", "sha256", "signature")}
    shown["countersignatures"] = {
        name: {"signature": agreed["signatures"][name], "key": agreed["keys"][name]} for name in agreed["keys"]
    }
    told = said["round.result"]
    shown["result"] |= {**told, "transcript_sha256": told["sha256"]}
    code, out = verified(tmp_path, record)
    assert (code, out["data"]["problems"] == []) == ((0, True) if least < 3 else (7, False)), out


@pytest.mark.slow
def test_T20_run_verify_follows_the_adapter_from_round_to_round(two_rounds: Detail, tmp_path: Path) -> None:
    assert verified(tmp_path, two_rounds)[0] == 0
    first, second = two_rounds["rounds"]
    for rounds, found in (
        ([second], "round 2: its base adapter is not the one that the last committed round left"),
        ([first], "its adapter is not the one that the last committed round left"),
        ([first, first, second], "round 1: it does not follow the round before it"),
    ):
        code, told = verified(tmp_path, {**two_rounds, "rounds": rounds})
        assert code == 7 and any(problem.startswith(found) for problem in told["data"]["problems"])


def invented(record: Detail) -> Detail:
    """The same rounds, with signatures of silos that the coordinator made up."""
    made: Detail = json.loads(json.dumps(record))
    for row in made["rounds"]:
        shown = row["transcript"]
        transcript = transcript_from_canonical(codec.canonical_json(shown["transcript"]).decode())
        for name in shown["countersignatures"]:
            key = Ed25519PrivateKey.generate()
            signature = sign_transcript(transcript, silo_id("cardio-net", name), key).hex()
            stated = key.public_key().public_bytes_raw().hex()
            shown["countersignatures"][name] = {"signature": signature, "key": stated}
    return made


STATED = "silo keys as the coordinator states them"


def test_T20_run_verify_says_whose_word_the_silo_keys_are(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    for one in (record, invented(record)):
        code, told = verified(tmp_path, one)
        assert code == 0 and told["data"]["silo_keys"] == STATED
        assert told["data"]["keys_not_vouched_for"] == ["hospital_a", "hospital_b"]
    key, document = str(tmp_path / "coordinator.pub"), str(tmp_path / "record.json")
    assert STATED in CliRunner().invoke(cli_run.app, ["verify", document, "--key", key]).stdout


def test_T20_run_verify_takes_silo_keys_from_given_logs(run: Path, tmp_path: Path) -> None:
    record, logs = record_of(run), ("--log", str(run / "hospital_a" / "audit"))
    code, told = verified(tmp_path, record, *logs)
    assert code == 0 and told["data"]["silo_keys"] == "silo keys from given logs"
    assert told["data"]["keys_not_vouched_for"] == []  # hospital_a has pinned hospital_b's
    code, told = verified(tmp_path, invented(record), *logs)
    assert code == 7 and "round 1: the key of hospital_a is not the one that is known of it" in told["data"]["problems"]
    own = log_of(tmp_path / "b", details(run))
    code, told = verified(tmp_path, record, "--log", str(own))
    assert code == 0 and told["data"]["keys_not_vouched_for"] == ["hospital_a"]
    lying = log_of(tmp_path / "c", {}, origin=C, key=KEYS["hospital_c"], pins={B: STRANGER})
    code, told = verified(tmp_path, record, "--log", str(own), "--log", str(lying))
    assert code == 7 and any(
        "its key of spiffe://cardio-net/silo/hospital_b" in one for one in told["data"]["problems"]
    )
    (own / "000000000000.jsonl").write_text("")
    assert verified(tmp_path, record, "--log", str(own))[0] == 7


def test_T20_run_verify_takes_silo_keys_from_certificates_under_the_federations_ca(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    begins = datetime.fromisoformat(record["started_at"])
    ca, strange = (
        create_ca("cardio-net", kind="federation", not_before=begins - timedelta(days=1), days=30) for _ in range(2)
    )

    def certificate(name: str, key: Ed25519PrivateKey, *, under: Any = ca, now: datetime = begins) -> str:
        keys = EnrolmentKeys(ec.generate_private_key(ec.SECP256R1()).public_key(), key.public_key())
        pem: bytes = under.issue(keys, "silo", name, now=now).certificate_pem
        return pem.decode()

    root, signers = tmp_path / "ca.crt", ("hospital_a", "hospital_b")
    root.write_bytes(ca.certificate_pem)
    record["certificates"] = [certificate(name, KEYS[name]) for name in signers]
    code, told = verified(tmp_path, record, "--ca", str(root))
    assert (
        code == 0 and told["data"]["keys_not_vouched_for"] == [] and "certificates under" in told["data"]["silo_keys"]
    )
    code, told = verified(tmp_path, invented(record), "--ca", str(root))
    assert code == 7 and "round 1: the key of hospital_b is not the one that is known of it" in told["data"]["problems"]
    none_that_does: list[Any] = [[], 5, record["certificates"][:1]]
    for certificates in none_that_does:
        code, told = verified(tmp_path, record | {"certificates": certificates}, "--ca", str(root))
        assert code == 7 and "the key of hospital_b is under no certificate of the federation" in str(told["data"])
    later = begins + timedelta(days=8)
    for wrong in (
        certificate("hospital_b", KEYS["hospital_b"], under=strange),
        certificate("hospital_b", KEYS["hospital_b"], now=later),
        "text",
    ):
        others = [record["certificates"][0], wrong]
        code, told = verified(tmp_path, record | {"certificates": others}, "--ca", str(root))
        assert code == 7 and "certificate 2 of the record" in told["data"]["problems"][0]


@pytest.mark.slow
def test_T20_an_auditor_checks_a_run_record_without_the_coordinators_libraries(run: Path, tmp_path: Path) -> None:
    assert verified(tmp_path, record_of(run))[0] == 0
    program = (
        "import sys\n"
        "for name in ('sqlalchemy', 'grpc', 'coordinator'): sys.modules[name] = None\n"
        "from fedsilo.cli.run import app\n"
        f"app(['verify', {str(tmp_path / 'record.json')!r}, '--key', {str(tmp_path / 'coordinator.pub')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""T20, afterwards: what `audit verify`, `audit report` and `run verify` say of the rounds, from the files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from certs.encoding import public_key_pem
from coordinator.record import sign_record
from fedsilo.edge.audit_log import AuditLog
from fedsilo.edge.audit_report import audit_report
from fedsilo.edge.audit_transcripts import check_rounds
from fedsilo.edge.audit_verify import verify_logs
from fedsilo.launch import cli_audit, cli_run
from fedsilo.launch.audit_report_page import page
from fedsilo.treaty.transcript import sign_transcript, silo_id, transcript_from_canonical
from fedsilo.treaty.wire import codec
from tests.policies import setting
from tests.security.hostile_bench import Federation
from tests.simulated.guard_loop import PEER_KEYS
from tests.simulated.guarded import COORDINATOR_KEY

B = silo_id("cardio-net", "hospital_b")
Detail = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One honest round: hospital_a's log, the coordinator's, and the run record."""
    folder = tmp_path_factory.mktemp("run")
    federation = Federation(folder)
    assert federation.run(rounds=1) == "finished"
    federation.close()
    return folder


def details(run: Path) -> dict[str, Detail]:
    records = (json.loads(line) for path in (run / "hospital_a" / "audit").glob("*.jsonl") for line in path.open())
    return {row["event"]: row["detail"] for row in records if row["event"].startswith("round.")}


def log_of_b(folder: Path, said: dict[str, Detail]) -> Path:
    """hospital_b's own log, sound in itself, that says this of round 1."""
    with AuditLog(
        folder, origin=B, key=PEER_KEYS["hospital_b"], actor=B, clock=lambda: setting.NOW, reserve_bytes=0
    ) as log:
        for event in sorted(said, key=["round.transcript", "round.agreed", "round.result"].index):
            log.append(event, run="run-1", round=1, detail=said[event])
    return folder


def checked(*logs: Path) -> tuple[list[list[str]], list[dict[str, Any]]]:
    results = verify_logs(list(logs))
    assert all(result["verified"] for result in results)  # every log is whole: it is what they say that counts
    rows = check_rounds(results, list(logs))
    assert [result["verified"] for result in results] == [not result["problems"] for result in results]
    return [result["problems"] for result in results], rows


def test_T20_the_logs_of_all_parties_of_an_honest_round_agree(run: Path, tmp_path: Path) -> None:
    said = details(run)
    logs = [run / "hospital_a" / "audit", log_of_b(tmp_path / "b", said), run / "coordinator" / "audit"]
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


def other_result(said: dict[str, Detail]) -> None:
    said["round.result"]["aggregate"] = "f" * 64


def test_T20_another_transcript_in_a_second_log_is_found(run: Path, tmp_path: Path) -> None:
    said = details(run)
    other_transcript(said)
    logs = [run / "hospital_a" / "audit", log_of_b(tmp_path / "b", said)]
    assert checked(logs[1])[0] == [[]]  # alone nothing is wrong with it
    problems, rows = checked(*logs)
    assert problems == [
        ["round 1 of run run-1 has another transcript than in the log of hospital_b: base_digest differ"],
        ["round 1 of run run-1 has another transcript than in the log of hospital_a: base_digest differ"],
    ]
    assert rows[0]["logs_alike"] == 1
    done = CliRunner().invoke(cli_audit.app, ["verify", *map(str, logs), "--json"])
    assert done.exit_code == 7 and "another transcript" in done.stdout
    made = audit_report(logs)
    assert not made["verification"][0]["verified"] and made["rounds"][0]["logs_alike"] == 1
    assert "Transcripts of rounds" in page(made) and "1 of 2" in page(made)


def test_T20_another_result_in_a_second_log_is_found(run: Path, tmp_path: Path) -> None:
    said = details(run)
    other_result(said)
    problems, _ = checked(run / "hospital_a" / "audit", log_of_b(tmp_path / "b", said))
    assert [len(each) for each in problems] == [1, 1] and "another result" in problems[0][0]


def change_field(said: dict[str, Detail]) -> None:
    said["round.transcript"]["transcript"]["plan_sha256"] = "f" * 64


def change_digest(said: dict[str, Detail]) -> None:
    said["round.agreed"]["sha256"] = "f" * 64


def forge_signature(said: dict[str, Detail]) -> None:
    said["round.agreed"]["signatures"]["hospital_b"] = "00" * 64


def forge_key(said: dict[str, Detail]) -> None:
    """A signature that verifies, under a key of nobody."""
    text = codec.canonical_json(said["round.transcript"]["transcript"]).decode()
    key = Ed25519PrivateKey.generate()
    signature = sign_transcript(transcript_from_canonical(text), B, key)
    said["round.agreed"]["signatures"]["hospital_b"] = signature.hex()
    said["round.agreed"]["keys"]["hospital_b"] = key.public_key().public_bytes_raw().hex()


def unsigned(said: dict[str, Detail]) -> None:
    said["round.transcript"]["signature"] = "00" * 64


def stranger_signs(said: dict[str, Detail]) -> None:
    said["round.agreed"]["signatures"]["hospital_x"] = said["round.agreed"]["signatures"]["hospital_b"]
    said["round.agreed"]["keys"]["hospital_x"] = said["round.agreed"]["keys"]["hospital_b"]


def nonsense(said: dict[str, Detail]) -> None:
    said["round.transcript"]["transcript"] = "text"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_field, "not the one that the record names"), (change_digest, "belongs to another transcript"),
        (forge_signature, "signature of hospital_b does not verify"), (forge_key, "key of hospital_b is not the one"),
        (unsigned, "not signed by spiffe://cardio-net/coordinator/main"),
        (stranger_signs, "signature of hospital_x does not verify"), (nonsense, "malformed"),
    ],
)  # fmt: skip
def test_T20_what_cannot_be_true_in_a_log_is_found(
    run: Path, tmp_path: Path, change: Callable[[dict[str, Detail]], None], found: str
) -> None:
    said = details(run)
    change(said)
    problems, _ = checked(log_of_b(tmp_path / "b", said), run / "hospital_a" / "audit")
    assert any(found in problem for problem in problems[0]), problems


def test_T20_two_transcripts_of_one_round_in_one_log_are_found(run: Path, tmp_path: Path) -> None:
    said, other = details(run), details(run)
    other_transcript(other)
    folder = log_of_b(tmp_path / "b", said)
    log_of_b(folder, other)
    problems, _ = checked(folder)
    assert len(problems[0]) == 1 and "a second transcript, which differs in base_digest" in problems[0][0]


def test_T20_a_key_that_no_log_vouches_for_is_named(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    shutil.copytree(run / "hospital_a" / "audit", folder)
    for path in (folder / "keys").glob("*hospital_b*"):
        path.unlink()
    problems, rows = checked(folder)
    assert problems == [[]] and rows[0]["keys_not_vouched_for"] == ["hospital_b"]


# ---- the run record ----------------------------------------------------------------------------------------


def verified(folder: Path, record: Detail) -> tuple[int, Any]:
    """`run verify` of a record that the coordinator has signed, whatever it says."""
    document, key = folder / "record.json", folder / "coordinator.pub"
    document.write_bytes(sign_record(record, setting.COORDINATOR, COORDINATOR_KEY))
    key.write_bytes(public_key_pem(COORDINATOR_KEY.public_key()))
    done = CliRunner().invoke(cli_run.app, ["verify", str(document), "--key", str(key), "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        (("transcript", "signature"), "00" * 64, "coordinator's signature"),
        (("transcript", "countersignatures", "hospital_b", "signature"), "00" * 64, "signature of hospital_b"),
        (("transcript", "transcript", "plan_sha256"), "f" * 64, "digest"),
        (("transcript", "transcript", "silos"), "text", "malformed"),
        (("transcript", "sha256"), "f" * 64, "digest"),
        (("base_sha256",), "f" * 64, "base adapter"),
        (("participants",), ["hospital_c"], "participants"),
    ],
)
def test_T20_run_verify_checks_the_transcript_of_each_round(
    run: Path, tmp_path: Path, place: tuple[str, ...], value: Any, found: str
) -> None:
    record = json.loads((run / "coordinator/runs/run-1/run_record.json").read_text())["record"]
    code, told = verified(tmp_path, record)
    assert (code, told["data"]["transcripts"]) == (0, 1)
    within = record["rounds"][0]
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value
    code, told = verified(tmp_path, record)
    assert code == 7 and found in told["error"]["message"]

"""Today's code reads what version 5c7e7d9 left on the disks of a finished and of a waiting federation as it was then.

`tests/vectors/first_version.tar.xz` holds two silos and a coordinator after `fedsilo demo --silos 2 --rounds 2`, and
`held/`, a silo that was killed while its first update waited for a person. Private keys are left out. The expected
values below were printed by that version.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from policies.compare import compare, effective
from policies.load import load_policy
from policies.model_kinds import GONE
from silo.guard.in_force import Seen, step_to
from silo.guard.ledger import Ledger
from tests.house.tree import ROOT

ARCHIVE = ROOT / "tests/vectors/first_version.tar.xz"
PARTIES = {"coordinator": 198, "hospital_a": 321, "hospital_b": 318}  # records in each log
EFFECTIVE = "af9ca186cfce2271213b66f17e665b911a9b8c31b54f6ddb538f4a55e9d8bbfd"
ONE_SILO = "11f947484696c9fb2282f8b4d5860ca5f221ae764b4c847586dd46696c7b5da1"  # of the same policy for hospital_a alone
HELD = "3f0fa26fcd12676e989003415c6ae29e1db1b4a59ecacdfeb497a75e2af1bc7d"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first_version")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "first_version"


def _fedsilo(*arguments: str | Path) -> tuple[int, Any]:
    command = [sys.executable, "-m", "fedsilo.launch", "fedsilo", *map(str, arguments), "--json"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return ran.returncode, json.loads(ran.stdout)["data"]


def _logs(left: Path) -> list[Path]:
    return [left / party / "state/audit" for party in PARTIES]


def test_logs_of_all_parties_verify_and_vouch_for_each_other(left: Path) -> None:
    code, data = _fedsilo("audit", "verify", *_logs(left))
    assert code == 0
    assert [(log["verified"], log["size"]) for log in data] == [(True, records) for records in PARTIES.values()]


def test_the_verifier_that_stands_alone_agrees(left: Path) -> None:
    alone = [sys.executable, "-P", str(ROOT / "fedsilo/edge/audit_verify.py"), *map(str, _logs(left))]
    assert subprocess.run(alone, check=False, capture_output=True, timeout=120).returncode == 0


def test_a_changed_record_of_that_time_is_noticed(left: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(left / "hospital_a/state/audit", tmp_path / "changed")
    segment = next(changed.glob("*.jsonl"))
    segment.write_text(segment.read_text().replace('"decision":"allow"', '"decision":"deny"', 1))
    code, _ = _fedsilo("audit", "verify", changed)
    assert code == 7


@pytest.mark.parametrize("silo", ["hospital_a", "hospital_b"])
def test_a_policy_means_what_its_records_name(left: Path, silo: str) -> None:
    code, data = _fedsilo("policy", "hash", left / silo / "policy.yaml", "--charter", left / silo / "charter.yaml")
    records = [json.loads(line) for line in next((left / silo / "state/audit").glob("*.jsonl")).open()]
    named = {record["policy"]["effective"] for record in records if record.get("policy")}
    assert code == 0 and named == {EFFECTIVE} and EFFECTIVE in json.dumps(data)


@pytest.mark.parametrize("also_in_the_charter", [True, False])
def test_a_policy_of_one_silo_keeps_its_digest_and_asks_for_one_update(
    left: Path, tmp_path: Path, also_in_the_charter: bool
) -> None:
    def alone(text: str) -> str:
        made = text.replace(', "spiffe://demo/silo/hospital_b"]', "]")
        assert made != text and "min_updates" not in text
        return made

    site = left / "hospital_a"
    policy, charter = (
        (site / name).read_text().replace("min_peers: 2", "min_peers: 1") for name in ("policy.yaml", "charter.yaml")
    )
    both = (alone(policy), alone(charter) if also_in_the_charter else charter)
    in_force = effective(*(load_policy(text.encode(), "policy.yaml") for text in both))
    assert in_force.digest == ONE_SILO
    assert in_force.file.federation.min_updates == 1


@pytest.mark.parametrize("silo", ["hospital_a", "hospital_b"])
def test_every_decision_replays_as_it_was_taken(left: Path, silo: str) -> None:
    site = left / silo
    charter = site / "charter.yaml"
    code, data = _fedsilo(
        "audit", "replay", "--policy", site / "policy.yaml", "--charter", charter, "--log", site / "state/audit"
    )
    assert code == 0 and data["changed"] == []


def test_the_run_record_and_its_adapter_are_the_ones_that_were_signed(left: Path) -> None:
    run = left / "coordinator/state/runs/run-1"
    key = left / "coordinator/id/coordinator.pub"
    ca = left / "coordinator/id/federation_ca.crt"
    code, _ = _fedsilo("run", "verify", run / "run_record.json", "--key", key, "--ca", ca, "--log", _logs(left)[1])
    assert code == 0


def test_a_ledger_opens_with_what_it_counted(left: Path) -> None:
    path = left / "hospital_a/state/ledger.sqlite3"
    with sqlite3.connect(path) as database:
        (sent,) = database.execute("SELECT count(*) FROM outbox").fetchone()
    ledger = Ledger(path)
    assert len(ledger.outbox()) == sent > 0
    assert ledger.run_state("run-1") == "finished"
    ledger.close()


def test_a_silo_starts_under_the_policy_that_its_ledger_and_log_name(left: Path) -> None:
    """Without a person: kinds that are gone since are null in what that version kept, and no reason to ask."""
    site = left / "hospital_a"
    own, charter = (load_policy((site / name).read_bytes(), name) for name in ("policy.yaml", "charter.yaml"))
    policy = effective(own, charter)
    with closing(Ledger(site / "state/ledger.sqlite3")) as ledger:
        last = ledger.policy_in_force
        assert last is not None and last.file is not None
        assert {last.content["egress"][kind] for kind in GONE} == {None}
        assert compare(last.file, policy.file) == []
        nobody: Any = None
        step = step_to(policy, ledger, Seen.in_folder(site / "state/audit"), nobody, (b"", nobody), 0.0)
    assert (step.how, policy.digest) == ("same", EFFECTIVE)


def test_a_held_release_is_still_held_with_the_bytes_that_were_shown(left: Path) -> None:
    ledger = Ledger(left / "held/hospital_a/state/ledger.sqlite3")
    (release,) = ledger.releases("held")
    assert (release.id, release.digest) == ("r1/hospital_a/0", HELD)
    kept = left / "held/hospital_a/state/payloads" / HELD
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == HELD
    ledger.close()

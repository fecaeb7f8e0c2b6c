"""Today's code reads what earlier versions left on the disks of a finished and of a waiting federation as it was then.

`tests/vectors/first_version.tar.xz` is of 5c7e7d9: two silos and a coordinator after `fedsilo demo --silos 2
--rounds 2`, and `held/`, a silo that was killed while its first update waited for a person; private keys are left out.
`before_folders.tar.xz` is what `python -m tools.vectors` made before the packages were renamed. The expected values
below were printed by those versions.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policies.compare import compare, effective
from policies.load import load_policy
from policies.model import GONE
from silo.guard.ledger import Ledger
from silo.guard.policy_change import Seen, step_to
from tests.answers import ROOT, unpacked


@dataclass(frozen=True)
class Expected:
    """Attributes:
    records: in each party's log.
    effective: digest of the policy in force at each silo.
    held: SHA-256 of the update that waits in `held/`.
    """

    records: dict[str, int]
    effective: dict[str, str]
    held: str


VERSIONS = {
    "first_version": Expected(
        {"coordinator": 198, "hospital_a": 321, "hospital_b": 318},
        dict.fromkeys(("hospital_a", "hospital_b"), "af9ca186cfce2271213b66f17e665b911a9b8c31b54f6ddb538f4a55e9d8bbfd"),
        "3f0fa26fcd12676e989003415c6ae29e1db1b4a59ecacdfeb497a75e2af1bc7d",
    ),
    "before_folders": Expected(
        {"coordinator": 125, "hospital_a": 208, "hospital_b": 169},
        {
            "hospital_a": "e7728ef57f87ed6ff3c10015c9edc1074a22074a5e2dc96d40e276adc54436ff",
            "hospital_b": "6e2f71fa2a962150fea215acc43a5e1a5090614ccc4f1192052faac1760f00e1",
        },
        "2aed5175f44901234816b2cdada5c5fe2e5d5a1358ad9ff266c2ab28f8ea3589",
    ),
}
ONE_SILO = "11f947484696c9fb2282f8b4d5860ca5f221ae764b4c847586dd46696c7b5da1"  # first_version's, for hospital_a alone


@pytest.fixture(scope="module", params=list(VERSIONS))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def left(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(ROOT / f"tests/vectors/{version}.tar.xz", tmp_path_factory.mktemp(version))


@pytest.fixture(scope="module")
def expected(version: str) -> Expected:
    return VERSIONS[version]


def _fedsilo(*arguments: str | Path) -> tuple[int, Any]:
    command = [sys.executable, "-m", "fedsilo.cli", "fedsilo", *map(str, arguments), "--json"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return ran.returncode, json.loads(ran.stdout)["data"]


def _logs(left: Path) -> list[Path]:
    return [left / party / "state/audit" for party in ("coordinator", "hospital_a", "hospital_b")]


@pytest.mark.quick(keep=1)
def test_logs_of_all_parties_verify_and_vouch_for_each_other(left: Path, expected: Expected) -> None:
    code, data = _fedsilo("audit", "verify", *_logs(left))
    assert code == 0
    assert [(log["verified"], log["size"]) for log in data] == [(True, size) for size in expected.records.values()]


def test_the_verifier_that_stands_alone_agrees(left: Path) -> None:
    alone = [sys.executable, "-P", str(ROOT / "fedsilo/audit/audit_verify.py"), *map(str, _logs(left))]
    assert subprocess.run(alone, check=False, capture_output=True, timeout=120).returncode == 0


@pytest.mark.quick(keep=1)
def test_a_changed_record_of_that_time_is_noticed(left: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(left / "hospital_a/state/audit", tmp_path / "changed")
    segment = next(changed.glob("*.jsonl"))
    segment.write_text(segment.read_text().replace('"decision":"allow"', '"decision":"deny"', 1))
    code, _ = _fedsilo("audit", "verify", changed)
    assert code == 7


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("silo", ["hospital_a", "hospital_b"])
def test_a_policy_means_what_its_records_name(left: Path, expected: Expected, silo: str) -> None:
    code, data = _fedsilo("policy", "hash", left / silo / "policy.yaml", "--charter", left / silo / "charter.yaml")
    records = [json.loads(line) for line in next((left / silo / "state/audit").glob("*.jsonl")).open()]
    named = {record["policy"]["effective"] for record in records if record.get("policy")}
    assert code == 0 and named == {expected.effective[silo]} and expected.effective[silo] in json.dumps(data)


@pytest.mark.parametrize("version", ["first_version"], indirect=True)  # later ones say how many updates they want
@pytest.mark.parametrize("also_in_the_charter", [True, False])
def test_a_policy_of_one_silo_keeps_its_digest_and_asks_for_one_update(left: Path, also_in_the_charter: bool) -> None:
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


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("silo", ["hospital_a", "hospital_b"])
def test_every_decision_replays_as_it_was_taken(left: Path, silo: str) -> None:
    site = left / silo
    charter = site / "charter.yaml"
    code, data = _fedsilo(
        "audit", "replay", "--policy", site / "policy.yaml", "--charter", charter, "--log", site / "state/audit"
    )
    assert code == 0 and data["changed"] == []


@pytest.mark.quick(keep=1)
def test_a_kept_policy_with_kinds_that_are_gone_is_read_for_report_replay_and_diff(left: Path, tmp_path: Path) -> None:
    site, old = left / "hospital_a", tmp_path / "old.yaml"
    text = (site / "policy.yaml").read_text()
    block = "egress:\n  count.examples: {values: {min: 1, max: 9, quantum: 1}, per_round: 1}\n"
    old.write_text(text.replace("egress:\n", block, 1))
    log, both = site / "state/audit", ("--policy", old, "--charter", site / "charter.yaml")
    assert _fedsilo("audit", "report", log, *both, "--out", tmp_path / "out")[0] == 0
    assert _fedsilo("audit", "replay", "--log", log, *both)[1]["changed"] == []
    assert _fedsilo("policy", "diff", old, site / "policy.yaml")[1]["changes"] == []


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


def test_a_silo_starts_under_the_policy_that_its_ledger_and_log_name(left: Path, expected: Expected) -> None:
    """Without a person: kinds that are gone since are null in what that version kept, and no reason to ask."""
    site = left / "hospital_a"
    policy = effective(*(load_policy((site / name).read_bytes(), name) for name in ("policy.yaml", "charter.yaml")))
    with closing(Ledger(site / "state/ledger.sqlite3")) as ledger:
        last = ledger.policy_in_force
        assert last is not None and last.file is not None
        assert {last.content["egress"][kind] for kind in GONE} == {None}
        assert compare(last.file, policy.file) == []
        nobody: Any = None
        step = step_to(policy, ledger, Seen.in_folder(site / "state/audit"), nobody, (b"", nobody), 0.0)
    assert (step.how, policy.digest) == ("same", expected.effective["hospital_a"])


def test_a_held_release_is_still_held_with_the_bytes_that_were_shown(left: Path, expected: Expected) -> None:
    ledger = Ledger(left / "held/hospital_a/state/ledger.sqlite3")
    (release,) = ledger.releases("held")
    assert (release.id, release.digest) == ("r1/hospital_a/0", expected.held)
    kept = left / "held/hospital_a/state/payloads" / expected.held
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == expected.held
    ledger.close()

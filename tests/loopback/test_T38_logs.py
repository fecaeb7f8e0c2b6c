"""What a federation's sites kept of a demo: which sandboxes stood, and logs that nobody can change.

One real run; tests/loopback/test_demo.py reads the same one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedsilo.cli.demo import report
from silo.guard.trainer_process import probing
from tests.loopback.federation import Demo, command

SILOS = ["hospital_a", "hospital_b", "hospital_c", "hospital_d"]

pytestmark = pytest.mark.demo


def test_T10_isolation_has_one_name_in_every_guard_the_record_and_the_report(finished_demo: Demo) -> None:
    best = probing.best_level()  # probed by this process, on the machine where the demo's guards probed theirs
    record = json.loads(Path(finished_demo.data["run_record"]).read_text())["record"]
    assert record["isolation"] == {silo: [best] for silo in SILOS}
    assert {row["silo"]: row["isolation"] for row in record["silos"]} == dict.fromkeys(SILOS, best)
    assert finished_demo.data["isolation"] == record["isolation"]
    assert f"the trainers' isolation: {best}\n" in finished_demo.reply.stderr  # the guards' own ready lines
    last = report({**finished_demo.data, "base_model": ""}).splitlines()
    assert f"isolation   {', '.join(f'{silo} {best}' for silo in SILOS)}" in last


@pytest.fixture
def logs(finished_demo: Demo, tmp_path: Path) -> dict[str, Path]:
    """Copies of the real logs."""
    return {
        site: Path(shutil.copytree(finished_demo.out / site / "state" / "audit", tmp_path / site))
        for site in (*SILOS, "coordinator")
    }


def verdicts(logs: dict[str, Path]) -> tuple[int, dict[str, bool], str]:
    reply = command("fedsilo", "audit", "verify", *logs.values())
    said = {row["log"]: row["verified"] for row in reply.envelope["data"]}
    message = reply.envelope["error"]["message"] if reply.envelope["error"] else ""
    return reply.exit_code, {site: said[site] for site in logs}, message


def newest_segment(log: Path) -> Path:
    return max(log.glob("*.jsonl"))


def test_T38_the_logs_verify_untouched(logs: dict[str, Path]) -> None:
    assert verdicts(logs) == (0, dict.fromkeys(logs, True), "")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["hospital_b", "coordinator"])
def test_T38_a_flipped_byte_is_found_and_the_log_named(logs: dict[str, Path], victim: str) -> None:
    path = newest_segment(logs[victim])
    content = bytearray(path.read_bytes())
    place = content.index(b'"bytes":', len(content) // 2) + len(b'"bytes":')
    content[place] = ord("1") if content[place] != ord("1") else ord("2")  # still JSON: a count made to look smaller
    path.write_bytes(content)
    exit_code, verified, message = verdicts(logs)
    assert (exit_code, verified[victim]) == (7, False)
    assert victim in message


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["hospital_c", "coordinator"])
def test_T38_a_dropped_tail_is_found_by_what_the_others_hold(logs: dict[str, Path], victim: str) -> None:
    path = newest_segment(logs[victim])
    lines = path.read_bytes().splitlines(keepends=True)
    own = sorted(logs[victim].glob("checkpoints/*.note"), key=lambda note: int(note.stem))
    kept = int(own[len(own) // 2].stem)
    path.write_bytes(b"".join(lines[:kept]))
    for note in own:  # no trace of the rest in this log itself
        if int(note.stem) > kept:
            note.unlink()
    alone = command("fedsilo", "audit", "verify", logs[victim])
    assert alone.exit_code == 0  # a shorter log is a good log, alone
    exit_code, verified, message = verdicts(logs)
    assert (exit_code, verified[victim]) == (7, False)
    assert victim in message


@pytest.mark.slow
def test_T38_two_records_in_another_order_are_found(logs: dict[str, Path]) -> None:
    path = newest_segment(logs["hospital_c"])
    lines = path.read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    lines[middle], lines[middle + 1] = lines[middle + 1], lines[middle]
    path.write_bytes(b"".join(lines))
    exit_code, verified, message = verdicts(logs)
    assert (exit_code, verified["hospital_c"]) == (7, False) and "hospital_c" in message

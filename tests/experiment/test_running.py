"""A run with real processes: killed, it leaves none behind, and goes on where it was; and no two append to one file."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsilo.experiment.design import Cell
from fedsilo.experiment.running import Workers, run_cells
from fedsilo.protocol.errors import ConflictError

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TEXT = """\
experiment: killed
settings:
  D: {silos: 2, base: {steps: 2}, rounds: 1, local_steps: 1, private_rows: 8, public_rows: 8, held_out_rows: 8,
    tuning_rows: 8, evaluation_samples: 1, prompts_per_step: 1, samples_per_prompt: 2}
seeds: [1, 2]
rows: {private: {method: fedavg-grpo}, plain: {method: public-no-swap}}
claims:
  C: {setting: D, row: plain, against: private}
tuning:
  seeds: [3]
  grids: {optimiser.learning_rate: [0.001, 0.002]}
  families: {all: {rows: [private, plain]}}
  widenings: 0
"""
SECONDS = 240


def environment(folder: Path) -> Mapping[str, str]:
    return {**os.environ, "FEDSILO_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def run(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedsilo.cli", "fedsilo", "experiment", "run", str(path), "--jobs", "1", "--json"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(path.parent)
    )


def workers_of(path: Path) -> list[int]:
    """The processes whose command names this file, but for the one that started them."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if b"work" in words and str(path).encode() in words:
                found.append(int(process.name))
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_suffix(".results.jsonl").read_text().splitlines()]


def test_a_killed_run_leaves_no_process_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "killed.yaml"
    path.write_text(TEXT)
    first = run(path)
    assert first.stderr is not None
    said = []
    for line in first.stderr:
        said.append(line)
        if line.startswith("1 of 4: "):
            break
    (worker,) = workers_of(path)
    handle = os.pidfd_open(worker)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    ended, _, _ = select.select([handle], [], [], SECONDS)
    os.close(handle)
    assert ended and not workers_of(path), "".join(said)
    before = lines_of(path)
    assert [line.get("trial") for line in before] == [True, True, None, False], "tuning, what it froze, and one cell"
    # the half that a kill may leave of a line
    with path.with_suffix(".results.jsonl").open("a") as file:
        file.write('{"row": "pl')
    second = run(path)
    answer, complaints = second.communicate(timeout=SECONDS)
    assert second.returncode == 0, complaints
    assert json.loads(answer)["data"]["carried_out"] == 3
    after = lines_of(path)
    assert after[:4] == before and len(after) == 7
    rate = dict(before[2]["knobs"])["optimiser.learning_rate"]
    assert {line["knobs"]["optimiser.learning_rate"] for line in after[3:]} == {rate}
    assert {(line["row"], line["seed"]) for line in after[3:]} == {
        (row, seed) for row in ("private", "plain") for seed in (1, 2)
    }

    # a line that was made from other rows stops the run that would stand beside it
    results = path.with_suffix(".results.jsonl")
    results.write_text(
        "".join(json.dumps(line) + "\n" for line in [*after[:3], {**after[3], "split_sha256": "0" * 64}])
    )
    knobs = (("optimiser.learning_rate", rate),)
    other = "plain" if after[3]["row"] == "private" else "private"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConflictError, match="split_sha256"):
        patch.setenv("FEDSILO_CACHE", str(tmp_path / "cache"))
        run_cells(path, [Cell("D", other, 1, knobs)], results, jobs=1, say=lambda line: None)
    assert len(lines_of(path)) == 4 and not workers_of(path)


def test_a_worker_that_fails_or_dies_leaves_no_files(tmp_path: Path) -> None:
    """The first is given a cell that cannot be carried out and answers so; the other ends at its first breath."""
    path, said = tmp_path / "failing.yaml", list[str]()
    tasks = {"questions": "files", "data": {"files": ["none.jsonl"], "verifier": "math"}, "model": {"path": "none"}}
    setting = {**tasks, "rounds": 1, "local_steps": 1}
    path.write_text(
        json.dumps(
            {"experiment": "failing", "settings": {"M": setting}, "seeds": [1], "rows": {"b": {"method": "base"}}}
        )
    )
    cell, results = Cell("M", "b", 1), tmp_path / "results.jsonl"
    assert run_cells(path, [cell], results, jobs=1, say=said.append).failed == 1
    assert "none.jsonl is missing" in said[-1]
    with Workers(tmp_path / "no-such.yaml", [cell], 1) as workers:
        ((_, died),) = workers.answers()
    assert isinstance(died, str) and "no-such.yaml" in died
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108  # only looked into
    left = [each for place in places for each in place.glob(f"fedsilo-{os.getpid()}-*")]
    assert not left and not workers_of(path)

"""examples/track_curves.py: what `fedsilo curves --json` says becomes runs of a tracker, each value once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "track_curves.py"
# As much of MLflow as the script uses, kept in a file between calls.
STAND_IN = """
import json, pathlib
from collections import namedtuple
from types import SimpleNamespace
Metric = namedtuple("Metric", "key value timestamp step")
class MlflowClient:
    def __init__(self, tracking_uri):
        self.path = pathlib.Path(tracking_uri)
        self.kept = json.loads(self.path.read_text()) if self.path.exists() else {}
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name) if self.kept else None
    def create_experiment(self, name): return name
    def search_runs(self, where, wanted, max_results):
        named = [name for name in self.kept if all(f"'{part}'" in wanted for part in name.split("|"))]
        return [SimpleNamespace(info=SimpleNamespace(run_id=name)) for name in named]
    def create_run(self, where, tags):
        name = f"{tags['fedsilo.run']}|{tags['fedsilo.silo']}"
        self.kept[name] = []
        return SimpleNamespace(info=SimpleNamespace(run_id=name))
    def get_metric_history(self, run, key):
        return [SimpleNamespace(step=row[2]) for row in self.kept[run] if row[0] == key]
    def log_batch(self, run, metrics):
        self.kept[run] += [[each.key, each.value, each.step] for each in metrics]
        self.path.write_text(json.dumps(self.kept))
"""


def point(x: int, value: float, low: float | None = None, high: float | None = None) -> dict[str, object]:
    return {"x": x, "round": x, "step": 0, "value": value, "low": low, "high": high}


def test_each_value_becomes_one_of_its_silos_run_however_often_it_is_handed_over(tmp_path: Path) -> None:
    package = tmp_path / "mlflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "entities.py").write_text(STAND_IN)
    (package / "tracking.py").write_text("from mlflow.entities import MlflowClient\n")
    store = tmp_path / "store.json"

    def hand_over(*points: dict[str, object], ok: bool = True) -> subprocess.CompletedProcess[str]:
        series = [
            {"name": "pass_at_1", "silo": "hospital_a", "points": list(points)},
            {"name": "gap", "silo": "", "points": [point(1, 0.5)]},
        ]
        error = None if ok else {"message": "no such run"}
        answer = {"ok": ok, "data": {"run": "run-1", "series": series}, "error": error}
        return subprocess.run(
            [sys.executable, SCRIPT, "mlflow", "--uri", store], input=json.dumps(answer), text=True,
            capture_output=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip

    first = hand_over(point(0, 0.25), point(1, 0.5, 0.375, 0.625))
    assert (first.returncode, first.stdout) == (0, "run-1: 5 values\n"), first.stderr
    assert hand_over(point(0, 0.25), point(1, 0.5, 0.375, 0.625)).stdout == "run-1: 0 values\n"
    assert hand_over(point(0, 0.25), point(1, 0.5, 0.375, 0.625), point(2, 0.75)).stdout == "run-1: 1 values\n"
    assert json.loads(store.read_text()) == {
        "run-1|hospital_a": [
            ["pass_at_1", 0.25, 0], ["pass_at_1", 0.5, 1], ["pass_at_1_low", 0.375, 1], ["pass_at_1_high", 0.625, 1],
            ["pass_at_1", 0.75, 2],
        ],
        "run-1|all silos": [["gap", 0.5, 1]],
    }  # fmt: skip
    refused = hand_over(ok=False)
    assert refused.returncode == 1 and "no such run" in refused.stderr

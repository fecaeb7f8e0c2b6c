"""`fedsilo curves --tensorboard`, read back by TensorBoard's own reader; and `fedsilo run export` beside its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli.curves import FILE
from tests.console.commands import Site
from tests.console.states import POLICY_DIGEST, coordinator

MORE: list[dict[str, Any]] = []  # that the desk answers beside what it always does


def series(name: str, silo: str, *values: tuple[int, float]) -> dict[str, Any]:
    points = [
        {"x": x, "round": x, "step": 0, "value": value, "n": None, "n_exact": None, "low": None, "high": None}
        for x, value in values
    ]
    return {"name": name, "silo": silo, "unit": "", "source": "released", "points": points}


def answer(*more: dict[str, Any]) -> dict[str, Any]:
    found = [series("pass_at_1", "hospital_a", (0, 0.25), (1, 0.5)), series("gap", "", (1, 0.125)), *more]
    return {"run": "run-1", "series": found, "baseline": [], "not_recorded": []}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


@pytest.fixture
def desk(site: Site) -> Site:
    site.desk.set_state(coordinator(), policy_digest=POLICY_DIGEST)
    site.answer(curves=lambda _: answer(*MORE))
    MORE.clear()
    site.answer(run={"folder": str(site.folder / "runs" / "run-1"), "state": "completed"})
    return site


def run(desk: Site, *arguments: object) -> tuple[int, str, str]:
    context = (
        ["--context", f"coordinator={desk.socket}"] if arguments[0] == "curves" else ["--socket", str(desk.socket)]
    )
    told = CliRunner().invoke(cli_fedsilo.app, [*map(str, arguments), *context])
    return told.exit_code, told.stdout, told.stderr


def test_values_by_silo_and_by_round(desk: Site, tmp_path: Path) -> None:
    code, told, _ = run(desk, "curves", "--tensorboard", tmp_path / "logs")
    silo = tmp_path / "logs" / "run-1" / "hospital_a"
    assert code == 0 and f"wrote {silo / FILE}" in told
    assert scalars(silo, "pass_at_1") == [(0, 0.25), (1, 0.5)]  # exact in float32
    assert scalars(silo.parent / "all", "gap") == [(1, 0.125)]
    assert (silo / FILE).stat().st_mode & 0o777 == 0o600
    assert json.loads(run(desk, "curves", "--tensorboard", tmp_path / "logs", "--json")[1])["data"]["run"] == "run-1"


def test_written_again_it_holds_what_is_new_and_nothing_twice(desk: Site, tmp_path: Path) -> None:
    run(desk, "curves", "--tensorboard", tmp_path)
    MORE.append(series("pass_at_1", "hospital_b", (1, 0.75)))
    assert run(desk, "curves", "--tensorboard", tmp_path)[0] == 0
    assert scalars(tmp_path / "run-1" / "hospital_a", "pass_at_1") == [(0, 0.25), (1, 0.5)]
    assert scalars(tmp_path / "run-1" / "hospital_b", "pass_at_1") == [(1, 0.75)]


def test_an_exported_run_has_them_beside_its_record(desk: Site, tmp_path: Path) -> None:
    (desk.folder / "runs" / "run-1").mkdir(parents=True)
    (desk.folder / "runs" / "run-1" / "run_record.json").write_text("{}")
    assert run(desk, "run", "export", "run-1", tmp_path / "out")[0] == 0
    assert scalars(tmp_path / "out" / "tensorboard" / "run-1" / "hospital_a", "pass_at_1") == [(0, 0.25), (1, 0.5)]
    assert (tmp_path / "out" / "run_record.json").read_text() == "{}"


def test_T37_a_name_that_leads_elsewhere_is_refused(desk: Site, tmp_path: Path) -> None:
    MORE.append(series("pass_at_1", "../../elsewhere", (1, 0.75)))
    code, _, told = run(desk, "curves", "--tensorboard", tmp_path / "logs")
    assert code != 0 and "elsewhere" in told and not list(tmp_path.rglob("elsewhere"))


def test_a_dry_run_writes_nothing(desk: Site, tmp_path: Path) -> None:
    code, told, _ = run(desk, "curves", "--tensorboard", tmp_path / "logs", "--dry-run")
    assert code == 0 and "would" in told and not (tmp_path / "logs").exists()

"""Runs of two rounds whose aggregation is exact, in all that is shared, each under its own ruleset: they finish, and
their logs verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.run import ALPHA, LEARNING_RATE, RANK
from fedsilo.demo.sites import DemoSettings, Sites, make_sites
from fedsilo.demo.tiny_model import cached_model, recipe_for
from fedsilo.experiment.cell import CellResult, run_cell
from fedsilo.files.adapter_folder import adapter_sha256

pytestmark = pytest.mark.torch
SEED, SILOS, STEPS = 5, 2, 2
NAME = "adapter_model.safetensors"
KINDS = {
    "rolora": {"lora.factor_a", "lora.factor_b"},
    "fed-sb": {"lora.core_r"},
    "fedex": {"lora.factors"},
    "flora": {"lora.factors"},
    "fedsa-lora": {"lora.factor_a"},
}  # fmt: skip


def played(folder: Path, ruleset: str, **changes: Any) -> tuple[Sites, CellResult]:
    data = write_digit_folder(folder / "data", SEED, silos=SILOS)
    sites = make_sites(
        DemoSettings(
            out=folder, model=cached_model(recipe_for("digits")), data=data, ruleset=ruleset,
            seed=SEED, rank=RANK, alpha=ALPHA, holds="", local_steps=STEPS, swap_period=2,
            prompts_per_step=2, samples_per_prompt=4, learning_rate=LEARNING_RATE,
        )
    )  # fmt: skip
    plan = {
        "run": "run-1", "method": "fedavg-grpo", "rounds": 2, "local_steps": STEPS, "swap_period": 2,
        "prompts_per_step": 2, "samples_per_prompt": 4, "seed": SEED, "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": LEARNING_RATE},
        "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
        "evaluation": {"prompts": 8, "samples": 1}, **changes,
    }  # fmt: skip
    return sites, run_cell(sites, plan)


@pytest.mark.parametrize(
    "ruleset", [name if name == "rolora" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_a_run_of_two_rounds_finishes(tmp_path_factory: pytest.TempPathFactory, ruleset: str) -> None:
    changes = {"aggregate": ruleset} if ruleset in ("fedex", "flora") else {}
    changes |= {"method": ruleset} if ruleset == "fedsa-lora" else {}
    sites, result = played(tmp_path_factory.mktemp("cell"), ruleset, **changes)
    assert result.record["state"] == "finished" and not result.refused, result.record["reason"]
    kinds = {kind for _, kind in result.traffic if not kind.startswith("control.")}
    assert kinds == KINDS[ruleset] | {"metrics.eval"}
    notes = [note for row in result.record["rounds"] for note in row["notes"] if note["name"] == "shift"]
    assert len(notes) == (2 if "aggregate" in changes else 0)
    assert all(note["l2"] > 0 and note["rank"] <= RANK * SILOS * 2 for note in notes)
    folders = {path.parent for path in sites.coordinator.folder.rglob(f"run-1/adapter/{NAME}")}
    assert len(folders) == (ruleset != "fedsa-lora"), "what is shared alone is no model"
    if ruleset not in ("fed-sb", "fedsa-lora"):
        assert adapter_sha256(*folders, result.record["plan"]["lora"]) == result.record["adapter_sha256"]
    if ruleset == "fedsa-lora":
        of_silos = [each["pass_at_1"] for each in result.record["rounds"][-1]["metrics"].values()]
        assert len(of_silos) == SILOS and of_silos[0] != of_silos[1], "each has another B"
    assert all(row["verified"] for row in verify_logs([site.audit_log for site in sites.all()]))

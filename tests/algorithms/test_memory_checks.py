"""What `silo check` says of memory and devices beside the estimate: several processes, a GPU that is asked for."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedsilo.files.model_facts import read_model_facts
from fedsilo.protocol.errors import UsageError
from silo import memory_estimate
from silo.config import Model, Rollout, SiloConfig, Trainer
from silo.guard import checks
from silo.memory_estimate import Machine, Settings, Shapes, estimate, judge, require_card
from tests.algorithms import tiny
from tests.policies.messages import NAMED, ruleset_text

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.make_model().save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    return path


def test_too_many_processes_are_told_from_too_large_a_one(folder: Path) -> None:
    alone = Settings(load="bf16", cache_bytes=1 << 20)
    found = estimate(read_model_facts(folder), alone, Shapes(max_prompt_tokens=8, max_new_tokens=8))
    has = Machine("RAM", 3 * found.peak_bytes, 3 * found.peak_bytes)
    four = dataclasses.replace(alone, processes=4)
    assert judge(found, has, dataclasses.replace(alone, processes=3), trainers=3) == ""
    with pytest.raises(UsageError, match="for 4 processes") as told:
        judge(found, has, four, trainers=4)
    assert told.value.hint == "lower trainer.processes, which is 4"
    assert "lower trainer.processes" in judge(found, Machine("RAM", 1 << 50, found.peak_bytes), four, trainers=4)
    with pytest.raises(UsageError) as told:  # of one process there is too little: fewer would not help
        judge(found, Machine("RAM", found.peak_bytes - 1, 1), four, trainers=4)
    assert "processes" not in told.value.hint


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_estimate, "_first_card", lambda: None)
    monkeypatch.setattr(memory_estimate, "_DEVICE_FILES", (str(tmp_path / "nvidia[0-9]*"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    require_card("auto")
    require_card("cpu")
    with pytest.raises(UsageError, match="this machine shows no GPU") as told:
        require_card("cuda")
    assert (told.value.code, told.value.hint) == ("NO_GPU", "trainer.devices: auto or cpu")
    (tmp_path / "nvidia0").touch()
    require_card("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES hides all"):
        require_card("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    require_card("cuda")


def memory_line(model: Path, state: Path, ruleset: str, load: str, **trainer: Any) -> str:
    """What `silo check` says of memory at a site under a shipped ruleset."""
    policy = state / f"{ruleset}.yaml"
    policy.write_text(ruleset_text(ruleset))
    config = SiloConfig.model_construct(
        state_dir=state, model=Model(path=model, load=load), rollout=Rollout(), silos_on_this_host=1, policy=policy,
        charter=None, charter_sha256=None, federation=NAMED[ruleset].file.federation.id,
        trainer=Trainer(cache_bytes=1 << 20, **{"devices": "cpu", **trainer}),
    )  # fmt: skip
    return checks.memory(checks.Look(config, facts=read_model_facts(model)))


def test_silo_check_counts_the_shift_that_the_policys_schema_has(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "machine", lambda devices: Machine("RAM", 1 << 50, 1 << 50))
    monkeypatch.setattr(memory_estimate, "LIBRARIES_BYTES", 0)  # so that a model of next to nothing has a share
    line = partial(memory_line, folder, tmp_path, load="fp32", checkpointing=True, microbatch_tokens=64)
    assert "shifted weights" in line("fedex") and "shifted weights" not in line("pubswap")


def test_silo_check_says_of_how_many_processes_it_speaks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**changes: Any) -> str:
        return memory_line(folder, tmp_path, "pubswap", load="bf16", **changes)

    plenty = Machine("RAM", 1 << 50, 1 << 50)
    monkeypatch.setattr(checks, "machine", lambda devices: plenty)
    assert "for each of 2 processes" in told(processes=2) and "for each" not in told()
    monkeypatch.setattr(memory_estimate, "_first_card", lambda: None)
    monkeypatch.setattr(memory_estimate, "_DEVICE_FILES", ())
    with pytest.raises(UsageError, match=r"trainer\.devices is cuda"):
        told(devices="cuda")

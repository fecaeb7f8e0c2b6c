"""The memory estimate against real processes, and what is made of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fedsilo.files.model_facts import ModelFacts, read_model_facts
from fedsilo.protocol.errors import UsageError
from silo.memory_estimate import LIBRARIES_BYTES, SERVER_BYTES, Machine, Settings, Shapes, estimate, judge, machine
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.grpo import Answer, Group, Learner
from silo.trainer.worker import load_model
from tests.algorithms import memory_child, tiny

pytestmark = pytest.mark.torch
# Measured: 0.92 to 1.14, and 1.37 to 1.57 for nf4 and fp8 on processors without instructions for bfloat16, whose
# products pack no weights. Allocators keep more or less of what was freed, as pages and threads happen to fall.
LOWEST, HIGHEST = 0.75, 1.75
ROOT = Path(__file__).resolve().parents[2]


def saved(path: Path, **sizes: int) -> Path:
    config = Qwen3Config(
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.2, **sizes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tiny.make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of 17 M parameters, and one of next to none: what they differ by is not the libraries'."""
    large = tmp_path_factory.mktemp("large")
    saved(large, vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, head_dim=64)
    small = tmp_path_factory.mktemp("small")
    saved(small, vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=8)
    return large, small


def shapes(new_tokens: int) -> Shapes:
    return Shapes(
        prompts_per_step=memory_child.PROMPTS, samples_per_prompt=memory_child.SAMPLES,
        max_prompt_tokens=memory_child.PROMPT_TOKENS, max_new_tokens=new_tokens, evaluation_answers=0, rank=tiny.RANK,
    )  # fmt: skip


CASES = [("fp32", False, 64), ("bf16", False, 64), ("bf16", True, 64), ("nf4", True, 32), ("fp8", True, 32)]


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What processes held: forks by folder and case; and the one that loaded the libraries, at the small model."""

    forks: dict[tuple[Any, ...], int]
    whole: int


@pytest.fixture(scope="module")
def peaks(folders: tuple[Path, Path]) -> Peaks:
    wanted = [(folder, *case) for case in CASES for folder in folders]
    jobs = [
        {"folder": str(folder), "load": load, "checkpointing": checkpointing, "new_tokens": new_tokens,
         "cache_bytes": Settings().cache_bytes}
        for folder, load, checkpointing, new_tokens in [*wanted, (folders[1], *CASES[0])]
    ]  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-m", "tests.algorithms.memory_child", json.dumps(jobs)],
        stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=3000,  # where a processor has no instructions for bfloat16, ten minutes and more
    )  # fmt: skip
    *forks, whole = json.loads(child.stdout.splitlines()[-1])
    return Peaks(dict(zip(wanted, forks, strict=True)), whole)


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(("load", "checkpointing", "new_tokens"), CASES)
def test_the_estimate_is_near_what_a_process_holds(
    folders: tuple[Path, Path], peaks: Peaks, load: str, checkpointing: bool, new_tokens: int
) -> None:
    settings = Settings(load=load, checkpointing=checkpointing)
    large, small = (peaks.forks[folder, load, checkpointing, new_tokens] for folder in folders)
    estimates = [estimate(read_model_facts(folder), settings, shapes(new_tokens)).peak_bytes for folder in folders]
    assert LOWEST < (estimates[0] - estimates[1]) / (large - small) < HIGHEST


@pytest.mark.slow
def test_what_a_small_trainer_holds_is_nearly_all_the_libraries(peaks: Peaks) -> None:
    assert 0.8 < LIBRARIES_BYTES / peaks.whole < 1.25


@pytest.mark.slow
def test_what_the_adapter_costs_is_counted_to_the_byte(folders: tuple[Path, Path]) -> None:
    """Moments and what a step that fails goes back to; the kept state; and the room beside narrow weights."""
    model = load_model(folders[0], "bf16")
    shape = tiny.make_shape(model)
    adapter = LoraAdapter(model, shape)
    adapter.load(tiny.random_factors(shape, 0, 0.3))
    learner = Learner(adapter, tiny.make_plan(), microbatch_tokens=64)
    learner.update([Group((5, 9), (Answer((4, 1), "", True, 1.0), Answer((3, 1), "", True, 0.0)))])
    factors, optimiser = learner._snapshot()
    states = (learner._optimiser.state_dict(), optimiser)
    moments = [each[kind] for held in states for each in held["state"].values() for kind in ("exp_avg", "exp_avg_sq")]
    facts, run = read_model_facts(folders[0]), shapes(64)
    found = estimate(facts, Settings(load="bf16"), run)
    assert found.lasting["optimiser"] == sum(each.nbytes for each in (*moments, *factors))
    layers = [[layer.qkv, layer.output, layer.gate_up, layer.down] for layer in adapter.decoder.layers]
    rooms = [
        each.roomy.nbytes - each.weight.nbytes
        for layer in layers
        for each in layer
        if each.roomy is not None and isinstance(each.weight, torch.Tensor)
    ]
    assert found.lasting["room"] == sum(rooms) > 0
    assert "room" not in estimate(facts, Settings(load="nf4"), run).lasting
    previous = [each.to(torch.bfloat16) for each in adapter.parameters]
    assert found.lasting["agreement"] == sum(each.nbytes for each in previous)
    served = estimate(facts, Settings(load="bf16", samples_here=False), run)
    assert served.lasting["agreement"] == 2 * found.lasting["agreement"]


def test_what_a_shift_costs_is_counted_to_the_byte(folders: tuple[Path, Path]) -> None:
    """A copy of every adapted weight, as the decoder holds it, and the shift's own factors."""
    model, rank = load_model(folders[1], "fp32"), 12
    plain = tiny.make_shape(model)
    tensors = dict(plain.shapes)
    for name, sides in plain.shapes.items():
        if name.endswith("lora_A"):
            module, inputs, outputs = name[: -len("lora_A")], sides[1], plain.shapes[f"{name[:-1]}B"][0]
            least = min(rank, inputs, outputs)
            tensors |= {f"{module}shift_A": (least, inputs), f"{module}shift_B": (outputs, least)}
    adapter = LoraAdapter(model, dataclasses.replace(plain, shapes=tensors))
    copies = [
        each.shifted.nbytes
        for layer in adapter.decoder.layers
        for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if each.shifted is not None
    ]
    factors = [each.nbytes for name, each in adapter.factors.items() if ".shift_" in name]
    facts, run = read_model_facts(folders[1]), shapes(64)
    found = estimate(facts, Settings(), dataclasses.replace(run, shift_rank=rank))
    without = estimate(facts, Settings(), run)
    assert found.lasting["shifted weights"] == sum(copies) + sum(factors) > 0
    assert "shifted weights" not in without.lasting
    assert found.lasting == {**without.lasting, "shifted weights": sum(copies) + sum(factors)}


@pytest.mark.parametrize("load", ["nf4", "fp8"])
def test_a_quantised_projection_is_counted_once_more_with_its_factors_beside_it(
    folders: tuple[Path, Path], load: str
) -> None:
    facts = read_model_facts(folders[0])
    found = estimate(facts, Settings(load=load), shapes(64))
    # gate and up in one, and two factors' room
    widest = 2 * facts.intermediate * (facts.hidden + 2 * tiny.RANK)
    assert found.update["joined"] == 2 * widest and 2 * tiny.RANK % 8 == 0
    assert "joined" not in estimate(facts, Settings(load="bf16"), shapes(64)).update
    assert found.rollout["engine"] > found.update["joined"] + found.update["dequantised"]


def test_what_is_kept_of_a_large_adapter_can_be_the_peak_and_is_never_on_a_card(folders: tuple[Path, Path]) -> None:
    facts = read_model_facts(folders[1])
    large = dataclasses.replace(shapes(1), rank=1 << 14)
    found = estimate(facts, Settings(), large)
    state = found.lasting["adapter"] + 2 * (found.lasting["adapter"] // 2) + found.lasting["agreement"]
    assert found.update == {"kept state": 3 * state}
    assert "kept state" not in estimate(facts, dataclasses.replace(Settings(), on_cuda=True), large).update
    assert "kept state" not in estimate(facts, Settings(), shapes(64)).update


# ---- what is made of it --------------------------------------------------------------------------------

BASE = Settings(load="bf16")


def facts_of(folder: Path, **changes: Any) -> ModelFacts:
    return dataclasses.replace(read_model_facts(folder), **changes)


@pytest.mark.parametrize(
    ("changed", "shapes_of", "hint"),
    [
        ({"load": "fp32"}, {"max_prompt_tokens": 1, "max_new_tokens": 1, "evaluation_answers": 1}, "model.load: bf16"),
        ({}, {"max_new_tokens": 200_000}, "trainer.checkpointing: true"),
        (
            {"checkpointing": True, "microbatch_tokens": 1 << 20, "cache_bytes": 1 << 20},
            {},
            "trainer.microbatch_tokens",
        ),
        ({"cache_bytes": 1 << 40, "microbatch_tokens": 64, "checkpointing": True}, {}, "trainer.cache_bytes"),
    ],
)
def test_what_cannot_fit_is_refused_naming_the_key_to_lower(
    folders: tuple[Path, Path], changed: dict[str, Any], shapes_of: dict[str, Any], hint: str
) -> None:
    settings = dataclasses.replace(BASE, **changed)
    found = estimate(read_model_facts(folders[0]), settings, Shapes(**shapes_of))
    enough = Machine("RAM", found.peak_bytes, found.peak_bytes)
    assert judge(found, enough, settings) == ""
    with pytest.raises(UsageError) as raised:
        judge(found, dataclasses.replace(enough, total_bytes=found.peak_bytes - 1), settings)
    assert (raised.value.code, raised.value.exit_code) == ("MEMORY_TOO_SMALL", 2)
    assert hint in raised.value.hint
    assert hint in judge(found, dataclasses.replace(enough, free_bytes=1), settings)  # short now: a warning
    with pytest.raises(UsageError, match="for 2 processes"):
        judge(found, enough, settings, trainers=2)
    assert judge(found, None, settings) == ""


def test_each_key_of_the_hint_lowers_the_estimate(folders: tuple[Path, Path]) -> None:
    model = read_model_facts(folders[0])

    def peak(**changes: Any) -> int:
        return estimate(model, dataclasses.replace(Settings(), **changes), Shapes()).peak_bytes

    assert peak(load="fp32") > peak(load="bf16") > peak(load="nf4", checkpointing=True)
    assert peak() > peak(microbatch_tokens=4096) and peak() > peak(checkpointing=True)
    small = {"checkpointing": True, "microbatch_tokens": 64}
    assert peak(**small) > peak(**small, cache_bytes=1 << 24)


def test_rollout_servers_are_counted_and_the_trainer_then_samples_nothing(folders: tuple[Path, Path]) -> None:
    model = read_model_facts(folders[0])
    alone = Settings(load="bf16", checkpointing=True, microbatch_tokens=64)
    served = dataclasses.replace(alone, samples_here=False, servers=2, server_cache_bytes=1 << 30)
    here, there = estimate(model, alone, Shapes()), estimate(model, served, Shapes())
    assert here.phase == "rollout" and there.phase == "update" and not there.rollout
    assert there.lasting["rollout servers"] == 2 * (SERVER_BYTES + (1 << 30) + there.lasting["model"])
    elsewhere = estimate(model, dataclasses.replace(served, servers=0), Shapes())
    assert there.peak_bytes - elsewhere.peak_bytes == there.lasting["rollout servers"]


def test_the_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine("cpu")
    assert found is not None and found.kind == "RAM" and 0 < found.free_bytes <= found.total_bytes
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.total_bytes <= pages

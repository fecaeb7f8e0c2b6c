"""Whatever is taken in at a site is data (threat T22): a pickle in place of a model, an adapter or a file is refused
unread, and a key that names code has no place anywhere. Beside tests/policies/test_model_folder.py, for `auto_map`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedsilo.files.model_folder import lora_schema_of, read_fingerprints
from fedsilo.files.site_policy import read_policy
from fedsilo.files.task_files import read_tasks
from fedsilo.grading import require_verifier
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.plan import plan_from_canonical
from policies.schema import schema_from_json
from silo.config import load_config
from tests.policies import setting
from tests.policies.setting import FROM_COORDINATOR, inbound, judged
from tests.world import Loop, small_factors

EXAMPLE = Path(__file__).parents[2] / "examples" / "hospital_a.yaml"
SHARDS = {"weight_map": {"model.layers.0.self_attn.q_proj.weight": "pytorch_model-00001.bin"}}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """There, once the pickle was loaded."""
    return tmp_path / "loaded"


@pytest.fixture
def pickled(marker: Path) -> bytes:
    """Opens `marker` for writing when it is loaded; by hand, so that nothing here can load one."""
    return f"cbuiltins\nopen\n(S'{marker}'\nS'w'\ntR.".encode()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros((6, 4), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def _read_model(folder: Path) -> None:
    lora_schema_of(folder, 2, 4.0)
    read_fingerprints(folder)


def _only_a_pickle(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)


def _sharded(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(SHARDS))
    (folder / "pytorch_model-00001.bin").write_bytes(data)


def _in_place_of(name: str) -> Callable[[Path, bytes], None]:
    return lambda folder, data: (folder / name).write_bytes(data) and None


# ---- pickle bytes ----------------------------------------------------------------------------------


def test_the_pickle_does_what_it_says_where_something_loads_it(pickled: bytes, marker: Path) -> None:
    loads = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    subprocess.run([sys.executable, "-I", "-c", loads], input=pickled, check=True)
    assert marker.exists()


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (_in_place_of("model.safetensors"), "not a safetensors file"),
        (_only_a_pickle, r"lacks model\.safetensors"),
        (_sharded, "not a safetensors file"),
        (_in_place_of("config.json"), "not JSON"),
        (_in_place_of("tokenizer_config.json"), "not JSON"),
    ],
    ids=["weights", "bin", "shard", "config", "tokenizer-config"],
)
def test_T22_pickle_bytes_in_a_model_folder_are_refused(
    model: Path, pickled: bytes, marker: Path, put: Callable[[Path, bytes], None], said: str
) -> None:
    _read_model(model)
    put(model, pickled)
    with pytest.raises(FedSiloError, match=said):
        _read_model(model)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda path: schema_from_json(path.read_bytes(), "lora_schema.json"), "lora_schema.json"),
        (read_policy, "policy.yaml"),
        (load_config, "hospital_a.yaml"),
        (read_tasks, "train.jsonl"),
        (lambda path: codec.decode_factors(path.read_bytes()), "adapter"),
        (lambda path: plan_from_canonical(path.read_text()), "plan"),
    ],
    ids=["schema", "policy", "site", "tasks", "factors", "plan"],
)
def test_T22_a_file_that_is_a_pickle_is_refused(
    tmp_path: Path, pickled: bytes, marker: Path, read: Callable[[Path], object], name: str
) -> None:
    (tmp_path / name).write_bytes(pickled)
    with pytest.raises(FedSiloError):
        read(tmp_path / name)
    assert not marker.exists()


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    return loop


@pytest.mark.parametrize("adapter", ["pickle", "pickle behind a header", "factors"])
def test_T22_pickle_bytes_as_the_global_adapter_are_denied(
    loop: Loop, pickled: bytes, marker: Path, adapter: str
) -> None:
    good = codec.encode_factors(
        small_factors(), base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
    )
    payload = {"pickle": pickled, "pickle behind a header": good + pickled, "factors": good}[adapter]
    loop.open_round(adapter=payload)
    loop.coordinator.says("control.fetch", "global.adapter", payload, run="run-1", round=1)
    loop.base_evaluated()
    denied = [row for row in loop.bench.events("ingress.decision") if row["decision"] == "deny"]
    assert ([row["reasons"] for row in denied], "LoadAdapter" in loop.trainer.tasks()) == (
        ([], True) if adapter == "factors" else ([["MALFORMED"]], False)
    )
    assert not marker.exists()


# ---- a key that names code ---------------------------------------------------------------------------

CLASS = "os.system"


@pytest.mark.parametrize(
    "where", [(), ("rollout",), ("optimiser",), ("lora",)], ids=["plan", "rollout", "optimiser", "lora"]
)
def test_T22_a_path_key_in_a_plan_is_denied(where: tuple[str, ...]) -> None:
    raw = json.loads(setting.PLAN.canonical())
    assert plan_from_canonical(codec.canonical_json(raw).decode()) == setting.PLAN
    place = raw
    for key in where:
        place = place[key]
    place["path"] = CLASS
    text = codec.canonical_json(raw).decode()
    with pytest.raises(FedSiloError, match="Extra inputs"):
        plan_from_canonical(text)
    decision = judged(
        inbound("run.plan", pb.RunPlan(canonical_json=text)), setting.policy_of(setting.policy_text()),
        **FROM_COORDINATOR,
    )  # fmt: skip
    assert decision.verdict == "deny" and "NOT_MEASURED" in decision.reasons


@pytest.mark.parametrize("key", ["federation", "model", "text_screens", "valid", "trainer", "  round.open"])
def test_T22_a_path_key_in_a_policy_is_refused(tmp_path: Path, key: str) -> None:
    text, path = setting.policy_text("pubswap-strict"), tmp_path / "policy.yaml"
    path.write_text(text)
    read_policy(path)
    inner = " " * (len(key) - len(key.lstrip()) + 2)
    assert text.count(f"\n{key}:\n") == 1
    path.write_text(text.replace(f"\n{key}:\n", f"\n{key}:\n{inner}path: {CLASS}\n"))
    with pytest.raises(FedSiloError, match=r"unknown key '[^']*path'"):
        read_policy(path)


@pytest.mark.parametrize("place", ["of the whole", "of a tensor"])
def test_T22_a_path_key_in_a_lora_schema_is_refused(place: str) -> None:
    raw = json.loads(setting.SCHEMA.canonical())
    assert schema_from_json(json.dumps(raw), "lora_schema.json") == setting.SCHEMA
    (raw if place == "of the whole" else raw["tensors"][0])["path"] = CLASS
    with pytest.raises(FedSiloError, match="not a LoRA schema"):
        schema_from_json(json.dumps(raw), "lora_schema.json")


@pytest.mark.parametrize("key", ["trainer", "coordinator", "rollout", "identity"])
def test_T22_a_path_key_in_a_sites_configuration_is_refused(tmp_path: Path, key: str) -> None:
    text, path = EXAMPLE.read_text(), tmp_path / "hospital_a.yaml"
    path.write_text(text)
    load_config(path)
    assert text.count(f"\n{key}:\n") == 1
    path.write_text(text.replace(f"\n{key}:\n", f"\n{key}:\n  path: {CLASS}\n"))
    with pytest.raises(FedSiloError, match=r"unknown key '[^']*path'"):
        load_config(path)


@pytest.mark.parametrize("name", ["path:os.system", "os.system", "path: graders.Verifier", "../grader.py", ""])
def test_T22_a_verifier_is_one_of_the_registry_and_no_path_to_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedSiloError, match="unknown verifier"):
        require_verifier(name)
    path = tmp_path / "hospital_a.yaml"
    text = EXAMPLE.read_text()
    assert text.count("\n  verifier: choice\n") == 1
    path.write_text(text.replace("\n  verifier: choice\n", f"\n  verifier: {json.dumps(name)}\n"))
    with pytest.raises(FedSiloError, match="verifier"):
        load_config(path)

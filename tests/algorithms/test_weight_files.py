"""Whoever reads a model folder reads the files that its fingerprint covers; where it is uncertain, it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file

from fedsilo.files.model_facts import read_model_facts
from fedsilo.files.model_folder import lora_schema_of, read_fingerprints, tensor_places, weight_files
from fedsilo.protocol.errors import UsageError
from silo.trainer.quantised import load_quantised
from silo.trainer.worker import load_model
from tests.algorithms.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.torch
LOST = "model.layers.1.mlp.down_proj"
INDEX = "model.safetensors.index.json"

READERS: dict[str, Callable[[Path], Any]] = {
    "fingerprints": read_fingerprints,
    "schema": lambda folder: lora_schema_of(folder, 2, 4.0, base_model_sha256="0" * 64),
    "facts": read_model_facts,
    "fp32": lambda folder: load_model(folder, "fp32"),
    "bf16": lambda folder: load_model(folder, "bf16"),
    "nf4": lambda folder: load_model(folder, "nf4"),
    "fp8 alone": lambda folder: load_quantised(folder, "fp8"),
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one file and in shards, and another one's weights."""
    root = tmp_path_factory.mktemp("origin")
    model = make_model(0)
    for name, size in (("single", "1GB"), ("shards", "10KB")):
        model.save_pretrained(root / name, max_shard_size=size)
        make_tokenizer().save_pretrained(root / name)
    make_model(1).save_pretrained(root / "other")
    assert (root / "shards" / INDEX).is_file() and not (root / "single" / INDEX).exists()
    return root


def copy_of(origin: Path, kind: str, to: Path) -> Path:
    return Path(shutil.copytree(origin / kind, to / "model"))


def add_other(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, origin: Path) -> None:
        shutil.copy(origin / "other" / "model.safetensors", folder / name)

    return change


def name_other_weights(folder: Path, origin: Path) -> None:
    add_other("other.bin")(folder, origin)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "transformers_weights": "other.bin"})
    )


def put_an_adapter_on_it(folder: Path, _: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("shards", add_other("model.safetensors"), "model.safetensors beside model.safetensors.index.json"),
        ("single", add_other("zz.safetensors"), "zz.safetensors beside model.safetensors and no index"),
        ("single", put_an_adapter_on_it, "adapter_config.json"),
    ],
)
def test_T01_a_folder_whose_base_is_not_certain_is_refused_by_every_reader(
    origin: Path, tmp_path: Path, reader: str, kind: str, change: Callable[[Path, Path], None], said: str
) -> None:
    folder = copy_of(origin, kind, tmp_path)
    READERS[reader](folder)
    change(folder, origin)
    with pytest.raises(UsageError, match=said):
        READERS[reader](folder)


@pytest.mark.parametrize("reader", ["fingerprints", "schema", "facts", "fp32", "nf4"])
def test_T01_a_config_that_names_other_weights_is_refused(origin: Path, tmp_path: Path, reader: str) -> None:
    folder = copy_of(origin, "single", tmp_path)
    READERS[reader](folder)
    name_other_weights(folder, origin)
    with pytest.raises(UsageError, match="transformers_weights"):
        READERS[reader](folder)


def numbers_of(model: Any) -> list[float]:
    layer = model.get_submodule(LOST)
    weight = layer.stored.whole() if hasattr(layer, "stored") else layer.weight
    return list(weight.float()[0].tolist())


@pytest.mark.parametrize("load", ["fp32", "bf16", "nf4", "fp8"])
def test_T01_what_lies_beside_the_shards_of_an_index_is_read_by_nobody(origin: Path, tmp_path: Path, load: str) -> None:
    folder = copy_of(origin, "shards", tmp_path)
    before = numbers_of(load_model(folder, load)), read_fingerprints(folder), read_model_facts(folder)
    add_other("zz_consolidated.safetensors")(folder, origin)
    assert (numbers_of(load_model(folder, load)), read_fingerprints(folder), read_model_facts(folder)) == before
    # and the other one would be seen: its numbers are not these
    assert numbers_of(load_model(copy_of(origin, "single", tmp_path / "one"), load)) == before[0]
    shutil.copy(origin / "other" / "model.safetensors", tmp_path / "one" / "model" / "model.safetensors")
    assert numbers_of(load_model(tmp_path / "one" / "model", load)) != before[0]


def test_an_index_of_one_file_is_no_contradiction(origin: Path, tmp_path: Path) -> None:
    folder = copy_of(origin, "single", tmp_path)
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert weight_files(folder) == [folder / "model.safetensors"]
    assert numbers_of(load_model(folder, "bf16")) == numbers_of(load_model(origin / "single", "bf16"))


def test_a_tensor_that_lies_in_two_shards_is_refused(origin: Path, tmp_path: Path) -> None:
    folder = copy_of(origin, "shards", tmp_path)
    first, second = weight_files(folder)[:2]
    twice = next(iter(load_file(first)))
    save_file({**load_file(second), twice: load_file(first)[twice] + 1}, second, {"format": "pt"})
    with pytest.raises(UsageError, match=f"{twice} lies in two shards"):
        load_model(folder, "bf16")


@pytest.mark.parametrize("load", ["fp32", "bf16", "nf4", "fp8"])
def test_a_missing_weight_is_refused_before_it_is_made_up(origin: Path, tmp_path: Path, load: str) -> None:
    """transformers fills it with random numbers, others each time."""
    folder = copy_of(origin, "single", tmp_path)
    load_model(folder, load)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{LOST}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=f"lack {LOST}.weight") as refused:
        load_model(folder, load)
    assert refused.value.code == "MODEL_NOT_SUPPORTED"


# ---- one file, as safetensors' own loader reads it -----------------------------------------------------------


def weights_file(folder: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path = folder / "weights.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def assert_read_alike(path: Path) -> bool:
    """Return whether both read it; then the values are the same."""
    try:
        theirs = load_arrays(path)
    except SafetensorError:
        with pytest.raises(UsageError, match=path.name):
            tensor_places(path)
        return False
    ours = {
        name: np.fromfile(place, "<f4", (end - start) // 4, offset=start).reshape(shape)
        for name, (shape, _, place, (start, end)) in tensor_places(path).items()
    }
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    return True


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("file")


@given(tensors=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=3), numbers=st.integers(0, 6))
def test_tensors_lie_end_to_end_or_the_file_is_refused(
    place: Path, tensors: list[tuple[int, int]], numbers: int
) -> None:
    """tensors: (first number, how many) of each; numbers: in the file."""
    header = {
        name: {"dtype": "F32", "shape": [count], "data_offsets": [4 * first, 4 * (first + count)]}
        for name, (first, count) in zip("abc", tensors, strict=False)
    }
    assert_read_alike(weights_file(place, header, np.arange(1, numbers + 1, dtype="<f4").tobytes()))


@pytest.mark.parametrize(
    ("tensors", "numbers", "is_read"),
    [
        ({"a": [0, 8], "b": [8, 16]}, 4, True),
        ({"b": [0, 8], "a": [8, 16]}, 4, True),
        ({"a": [0, 0], "b": [0, 8], "c": [8, 8]}, 2, True),
        ({}, 0, True),
        ({}, 1, False),  # behind the last
        ({"a": [0, 8], "b": [8, 16]}, 5, False),
        ({"a": [0, 8], "b": [12, 20]}, 5, False),  # a hole
        ({"a": [4, 12]}, 3, False),
        ({"a": [0, 8], "b": [4, 12]}, 3, False),  # overlapping
        ({"a": [0, 8], "b": [0, 8]}, 2, False),
        ({"a": [0, 8], "b": [8, 16]}, 3, False),  # cut
        ({"a": [-8, 0]}, 0, False),
        ({"a": ["0", "8"]}, 2, False),
        ({"a": [0.0, 8.0]}, 2, False),
        ({"a": [0]}, 0, False),
        ({"a": [0, 8, 8]}, 2, False),
    ],
)
def test_files_that_are_read_and_files_that_are_not(
    tmp_path: Path, tensors: dict[str, list[Any]], numbers: int, is_read: bool
) -> None:
    header = {
        name: {"dtype": "F32", "shape": [int(ends[-1]) // 4 - int(ends[0]) // 4], "data_offsets": ends}
        for name, ends in tensors.items()
    }
    assert assert_read_alike(weights_file(tmp_path, header, bytes(4 * numbers))) is is_read


@pytest.mark.parametrize(
    ("shape", "is_read"),
    [
        ([2], True),
        ([1, 2], True),
        ([-2], False),
        ([-1, -2], False),
        (["2"], False),
        ([2.0], False),
        (2, False),
    ],
)
def test_sides_are_counts(tmp_path: Path, shape: Any, is_read: bool) -> None:
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}
    assert assert_read_alike(weights_file(tmp_path, header, bytes(8))) is is_read

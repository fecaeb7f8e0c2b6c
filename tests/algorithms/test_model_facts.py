"""A model folder that cannot be trained is refused from its headers, before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fedsilo.files.model_facts import read_model_facts
from fedsilo.protocol.errors import UsageError
from silo.trainer.data import load_codec
from tests.algorithms.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.torch
SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None,
}  # fmt: skip


def built(kind: str) -> Any:
    match kind:
        case "qwen3":
            return make_model()
        case "mistral":
            return MistralForCausalLM(MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=None))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
        case _:
            return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "qwen2", "llama", "mistral"):
        built(kind).save_pretrained(root / kind)
        make_tokenizer().save_pretrained(root / kind)
    return root


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
def test_sizes_are_those_of_the_model(origin: Path, kind: str) -> None:
    facts, model = read_model_facts(origin / kind), built(kind)
    assert facts.parameters == sum(each.numel() for each in model.parameters())
    linear = [each for name, each in model.named_modules() if type(each) is torch.nn.Linear and name != "lm_head"]
    assert facts.projection_numbers == sum(each.weight.numel() for each in linear)
    assert facts.projection_rows == sum(each.out_features for each in linear)
    assert facts.tied is kind.startswith("qwen")


def config_is(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


AROUND = {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [31], "tokens": ["<s>"]}}}


def token_is(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def added_beside(name: str, content: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))

    return change


def tensors_are(change_tensors: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def two_heads(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", config_is(architectures=["GemmaForCausalLM"]), "architecture 'GemmaForCausalLM' is not known"),
        ("llama", config_is(architectures=["GPT2LMHeadModel"]), "architecture 'GPT2LMHeadModel' is not known"),
        # transformers' own default is a window of 4096
        ("llama", config_is(architectures=["MistralForCausalLM"]), "sliding window"),
        ("mistral", config_is(sliding_window=4096), "sliding window"),
        ("qwen3", token_is("added_tokens", [{"id": 24, "content": "What", "special": False}]), "token 24, .* 24 rows"),
        ("qwen3", token_is("post_processor", {"type": "Sequence", "processors": [AROUND]}), "token 31, but .* 24 rows"),
        ("qwen3", added_beside("tokenizer_config.json", {"added_tokens_decoder": {"24": {"content": "W"}}}), "ken 24"),
        ("qwen3", added_beside("added_tokens.json", {"What": 30}), "added_tokens.json: token 30"),
        ("qwen3", added_beside("generation_config.json", {"eos_token_id": [1, 24]}), "token 24"),
        ("llama", config_is(hidden_act="gelu"), "activation 'gelu'"),
        ("llama", config_is(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "positions of kind 'dynamic'"),
        ("llama", config_is(rope_parameters={"partial_rotary_factor": 0.5}), "only 0.5 of each head"),
        ("qwen2", config_is(use_sliding_window=True), "sliding window"),
        ("qwen3", config_is(quantization_config={"quant_method": "fp8"}), "stored quantised"),
        ("qwen3", config_is(auto_map={"AutoModel": "m.M"}), "has auto_map"),
        ("qwen3", config_is(hidden_size="24"), "hidden_size is '24'"),
        ("qwen3", config_is(intermediate_size=31), r"has shape \[32, 24\], config.json makes it \[31, 24\]"),
        ("qwen3", pickled, r"weights are pickled \(pytorch_model.bin\)"),
        ("qwen3", lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
        ("qwen3", lambda folder: (folder / "tokenizer.json").unlink(), "lacks tokenizer.json"),
        ("qwen3", lambda folder: (folder / "tokenizer.json").write_text("{}"), "is no tokenizer"),
        ("qwen3", lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
        ("qwen3", cut, "its header names"),
        ("llama", tensors_are(lambda all: all.pop("lm_head.weight")), "lack lm_head.weight"),  # type: ignore[arg-type,return-value]
        ("llama", tensors_are(lambda all: all.pop("model.layers.1.mlp.up_proj.weight")), "lack .*up_proj"),  # type: ignore[arg-type,return-value]
        ("qwen2", tensors_are(lambda all: all.pop("model.layers.0.self_attn.k_proj.bias")), "lack .*k_proj.bias"),  # type: ignore[arg-type,return-value]
        ("llama", config_is(mlp_bias=True), "lack .*gate_proj.bias"),
        ("llama", config_is(attention_bias=True), "lack .*q_proj.bias"),
        ("qwen3", tensors_are(two_heads), "lm_head.weight is not the embedding"),
        (
            "qwen3",
            tensors_are(lambda all: all.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)})),
            "stored as I8",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(
    origin: Path, tmp_path: Path, kind: str, change: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / kind
    shutil.copytree(origin / kind, folder)
    read_model_facts(folder)
    change(folder)
    with pytest.raises(UsageError, match=said) as raised:
        read_model_facts(folder)
    assert (raised.value.code, raised.value.exit_code) == ("MODEL_NOT_SUPPORTED", 2)


def test_biases_are_expected_where_the_family_has_them(origin: Path, tmp_path: Path) -> None:
    """Of q, k and v alone in a Qwen2, whatever its config says; in a Llama as its config says."""
    for kind in ("qwen2", "qwen3"):
        folder = tmp_path / kind
        shutil.copytree(origin / kind, folder)
        before = read_model_facts(folder).tensors
        config_is(**({"attention_bias": True} if kind == "qwen2" else {"mlp_bias": True}))(folder)
        assert read_model_facts(folder).tensors == before
    biased = tmp_path / "biased"
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, mlp_bias=True, attention_bias=True))
    model.save_pretrained(biased)
    make_tokenizer().save_pretrained(biased)
    facts = read_model_facts(biased)
    assert facts.parameters == sum(each.numel() for each in model.parameters())
    for lost in ("mlp.up_proj.bias", "mlp.down_proj.bias", "self_attn.o_proj.bias"):
        folder = tmp_path / lost
        shutil.copytree(biased, folder)
        tensors_are(lambda all, lost=lost: all.pop(f"model.layers.1.{lost}"))(folder)  # type: ignore[misc]
        with pytest.raises(UsageError, match=f"lack .*{lost}"):
            read_model_facts(folder)


def test_a_head_that_is_the_embedding_may_be_stored_twice(origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    shutil.copytree(origin / "qwen3", folder)
    before = read_model_facts(folder).parameters
    tensors_are(lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"].clone()}))(folder)
    assert read_model_facts(folder).parameters == before


def test_the_last_row_of_the_embedding_may_be_a_token(origin: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    shutil.copytree(origin / "qwen3", folder)
    token_is("added_tokens", [{"id": 23, "content": "What", "special": False}])(folder)
    read_model_facts(folder)


def test_M1_a_token_that_gets_its_id_when_it_is_loaded_is_refused_too(origin: Path, tmp_path: Path) -> None:
    """A settings file that names a token unknown to tokenizer.json: transformers gives it the next id."""
    folder = tmp_path / "qwen3"
    shutil.copytree(origin / "qwen3", folder)
    load_codec(folder)
    added_beside("tokenizer_config.json", {"pad_token": "[PAD]"})(folder)
    with pytest.raises(UsageError, match="token 24, but the embedding has 24 rows") as raised:
        load_codec(folder)
    assert raised.value.code == "MODEL_NOT_SUPPORTED"


_READ = """
import sys, pathlib
from fedsilo.files.model_facts import read_model_facts
from fedsilo.protocol.errors import UsageError
try:
    read_model_facts(pathlib.Path(sys.argv[1]))
except UsageError as error:
    print(error.code, error.message, bool(error.hint))
"""


def test_a_folder_that_may_be_entered_and_not_listed_is_named(origin: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(origin / "qwen3", tmp_path / "model"))
    # root lists every folder, unless this is taken from it
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    folder.chmod(0o300)
    try:
        ran = subprocess.run(
            [*as_others, sys.executable, "-c", _READ, str(folder)], capture_output=True, text=True, check=True
        )
    finally:
        folder.chmod(0o700)
    assert ran.stdout == f"MODEL_NOT_SUPPORTED {folder} cannot be listed: Permission denied True\n"
    assert read_model_facts(folder).layers > 0

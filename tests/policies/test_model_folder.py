"""Model folders without torch: the schema is what peft makes, fingerprints notice what matters (threats T1, T22)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedsilo.files.model_folder import ending_ids, lora_schema_of, read_fingerprints
from fedsilo.protocol.codec import encode_factors
from fedsilo.protocol.errors import UsageError
from policies.schema import schema_from_json


def _folder(path: Path, config: dict[str, Any] | None = None) -> Path:
    """A model folder by hand: two layers of two matrices, a norm, an embedding and a head."""
    path.mkdir()
    tensors = {"model.embed_tokens.weight": np.zeros((9, 4), np.float32), "lm_head.weight": np.ones((9, 4), np.float32)}
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = np.zeros((6, 4), np.float32)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = np.zeros((4, 8), np.float32)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.zeros(4, np.float32)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config or {"model_type": "qwen3", "transformers_version": "5.0"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A", "model_max_length": 10**30}))
    return path


WHOLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 9, "max_position_embeddings": 64,
}  # fmt: skip


def whole_folder(path: Path, **config: Any) -> Path:
    """A model folder by hand with everything that training needs."""
    path.mkdir(parents=True)
    sides: dict[str, tuple[int, ...]] = {"input_layernorm": (16,), "post_attention_layernorm": (16,)}
    sides |= {f"self_attn.{name}_proj": (16, 16) for name in "qkvo"}
    sides |= {"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
    sides |= {"mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}
    tensors = {"model.embed_tokens": (9, 16), "lm_head": (9, 16), "model.norm": (16,)}
    tensors |= {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in sides.items()}
    save_file(
        {f"{name}.weight": np.full(shape, 0.5, np.float32) for name, shape in tensors.items()},
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(WHOLE | config))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 8}}}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "A", "model_max_length": 10**30}))
    return path


def test_schema_by_hand(tmp_path: Path) -> None:
    schema = lora_schema_of(_folder(tmp_path / "model"), 3, 6.0)
    expected = []
    for layer in (0, 1):
        expected += [
            (f"model.layers.{layer}.mlp.down_proj.lora_A", (3, 8)),
            (f"model.layers.{layer}.mlp.down_proj.lora_B", (4, 3)),
            (f"model.layers.{layer}.self_attn.q_proj.lora_A", (3, 4)),
            (f"model.layers.{layer}.self_attn.q_proj.lora_B", (6, 3)),
        ]
    assert list(schema.tensors) == expected
    assert schema.scale == 2.0 and schema.elements == 2 * (24 + 12 + 12 + 18)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in schema.tensors}
    payload = encode_factors(
        zeros, base_digest="0" * 64, schema_sha256=schema.digest, rank=3, scale=2.0, dtype="float32"
    )
    assert schema.payload_bytes == len(payload)
    assert schema_from_json(schema.canonical(), "x") == schema
    assert schema_from_json(json.dumps(json.loads(schema.canonical()), indent=2), "x").digest == schema.digest


def test_targets_choose_matrices_and_must_exist(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    assert len(lora_schema_of(folder, 2, 4.0, "q_proj").tensors) == 4
    with pytest.raises(UsageError, match="v_proj"):
        lora_schema_of(folder, 2, 4.0, "q_proj,v_proj")


@pytest.mark.torch
def test_T01_the_schema_is_exactly_what_peft_adapts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    schema = lora_schema_of(tmp_path / "model", 4, 8.0)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    state = peft.get_peft_model_state_dict(adapted)
    expected = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): tuple(value.shape)
        for name, value in state.items()
    }
    assert dict(schema.tensors) == expected
    assert {name.split(".")[-2] for name in expected} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_fingerprints_notice_weights_tokenizer_and_template_apart(tmp_path: Path) -> None:
    first = read_fingerprints(_folder(tmp_path / "a"))
    assert read_fingerprints(_folder(tmp_path / "b", {"model_type": "qwen3", "transformers_version": "6"})) == first
    weights = _folder(tmp_path / "c")
    data = bytearray((weights / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (weights / "model.safetensors").write_bytes(data)
    changed = read_fingerprints(weights)
    assert changed.base_model_sha256 != first.base_model_sha256
    assert changed.tokenizer_sha256 == first.tokenizer_sha256
    template = _folder(tmp_path / "d")
    (template / "chat_template.jinja").write_text("B")
    changed = read_fingerprints(template)
    assert changed.template_sha256 != first.template_sha256
    assert changed.tokenizer_sha256 == first.tokenizer_sha256
    tokenizer = _folder(tmp_path / "e")
    (tokenizer / "tokenizer.json").write_text('{"x": 1}')
    assert read_fingerprints(tokenizer).tokenizer_sha256 != first.tokenizer_sha256


ENDS = {"model_type": "qwen3", "eos_token_id": 2}


def test_folders_that_end_answers_differently_are_different_models(tmp_path: Path) -> None:
    def base(ends: object = None) -> str:
        folder = _folder(tmp_path / str(len(list(tmp_path.iterdir()))), ENDS)
        if ends is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 0.6}))
        return read_fingerprints(folder).base_model_sha256

    # a copy that says no more than config.json is the same model, and the order of the tokens is none
    assert base() == base(2) == base([2])
    assert base([2, 7]) == base([7, 2, 2])
    assert len({base(), base([2, 7]), base(7), base([0])}) == 4


@pytest.mark.parametrize("ends", ["2", True, 1.5, [2, None], -1, {"a": 2}])
def test_ends_that_are_no_tokens_are_refused(tmp_path: Path, ends: object) -> None:
    folder = _folder(tmp_path / "model", ENDS)
    assert ending_ids(folder) == {2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    for read in (ending_ids, read_fingerprints):
        with pytest.raises(UsageError, match=r"generation_config\.json: eos_token_id is neither a token id nor a list"):
            read(folder)


def test_special_tokens_named_beside_the_tokenizer_are_its_own(tmp_path: Path) -> None:
    """transformers reads them where tokenizer_config.json lists no added tokens, and only there."""
    first, read, unread = (_folder(tmp_path / name) for name in "abc")
    for folder in (read, unread):
        (folder / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    settings = {"added_tokens_decoder": {}, **json.loads((unread / "tokenizer_config.json").read_text())}
    listed = _folder(tmp_path / "d")
    for folder in (unread, listed):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    digest = {folder.name: read_fingerprints(folder).tokenizer_sha256 for folder in (first, read, unread, listed)}
    assert digest["b"] != digest["a"] and digest["c"] == digest["d"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(UsageError, match=f"lacks {name}"):
        read_fingerprints(folder)


def test_T22_folders_with_code_or_odd_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="auto_map"):
        read_fingerprints(_folder(tmp_path / "code", {"auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(UsageError, match="transposed"):
        lora_schema_of(_folder(tmp_path / "gpt2", {"model_type": "gpt2"}), 2, 4.0)
    quantised = _folder(tmp_path / "nf4")
    save_file({"model.layers.0.q_proj.weight": np.zeros((8, 1), np.uint8)}, quantised / "model.safetensors")
    with pytest.raises(UsageError, match="not a plain matrix"):
        lora_schema_of(quantised, 2, 4.0)
    (quantised / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(UsageError, match="not a safetensors file"):
        lora_schema_of(quantised, 2, 4.0)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"rank": 1}'])
def test_a_broken_schema_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a LoRA schema"):
        schema_from_json(text, "lora_schema.json")

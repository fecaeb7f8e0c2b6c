"""The payloads of `benchmarks.transport`: LoRA factors of a model of 28 layers, 392 float32 arrays, and what every
side's answer must be.

A silo's update holds one constant in every number: (silo + 1) / 2**14. Sums and means of these are exact in float32,
so what the mean must be is a number by hand: 2.5 / 2**14 for four silos, 8.5 / 2**14 for sixteen.

Ours sends the update; a peer sends the model, which begins with numbers of its own in each array: Flower sends equal
content once, and with equal arrays it was eight times as fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNIT = 2.0**-14
EMPTY = 0.0  # as a size: one layer of rank 1, for what a round costs without a payload


@dataclass(frozen=True)
class Shape:
    """A model without weights worth reading, and the rank of its factors.

    Attributes:
        layers: each with seven matrices to adapt, so 14 arrays.
        hidden: width D.
        intermediate: width I of the feed-forward part.
        rank: of the factors.
    """

    layers: int
    hidden: int
    intermediate: int
    rank: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each, by module name."""
        D, wide = self.hidden, self.intermediate
        sides = {f"self_attn.{name}_proj": (D, D) for name in "qkvo"}
        sides |= {"mlp.gate_proj": (wide, D), "mlp.up_proj": (wide, D), "mlp.down_proj": (D, wide)}
        return {f"model.layers.{place}.{name}": side for place in range(self.layers) for name, side in sides.items()}

    def arrays(self) -> dict[str, tuple[int, int]]:
        """Shapes of the factors, by name, in the order of the wire."""
        found: dict[str, tuple[int, int]] = {}
        for name, (out, inputs) in self.matrices().items():
            found[f"{name}.lora_A"] = (self.rank, inputs)
            found[f"{name}.lora_B"] = (out, self.rank)
        return dict(sorted(found.items()))

    @property
    def payload_bytes(self) -> int:
        """Of the numbers alone."""
        return 4 * sum(math.prod(shape) for shape in self.arrays().values())


# By megabytes (10^6) of the numbers alone.
SHAPES = {
    EMPTY: Shape(1, 8, 8, 1),
    6.96: Shape(28, 64, 413, 32),
    69.6: Shape(28, 1024, 2719, 32),
    # as many arrays and bytes as rank 32 has of a model of 7 and of 70 billion weights; the second of a smaller model
    # and a larger rank, since a site hashes its weights
    323.0: Shape(28, 3584, 16896, 32),
    1660.0: Shape(80, 1024, 2987, 256),
}


def constant_of(silo: int) -> float:
    """Every number of the update of a silo; they count from 0."""
    return (silo + 1) * UNIT


def mean_of(silos: int) -> float:
    """Every number of the mean update."""
    return (silos + 1) / 2 * UNIT


def write_model_folder(folder: Path, shape: Shape) -> Path:
    """A model folder as a site has one, its weights all zero: they are hashed, and nobody computes with them."""
    from fedsilo.demo.tiny_model import END, PADDING, make_tokenizer

    folder.mkdir(parents=True)
    tokenizer = make_tokenizer("digits")
    D, words = shape.hidden, tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": D,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": D, "vocab_size": words, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "pad_token_id": tokenizer.token_to_id(PADDING),
        "eos_token_id": tokenizer.token_to_id(END),
    }  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": side for name, side in shape.matrices().items()}
    for place in range(shape.layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{place}.{name}.weight"] = (D,)
    tensors |= {"model.embed_tokens.weight": (words, D), "model.norm.weight": (D,)}
    _write_zeros(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def _write_zeros(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of float16 zeros that takes no room on the disk: a header, and a hole for the numbers."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

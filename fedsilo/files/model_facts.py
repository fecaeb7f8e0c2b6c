"""Reads a model's sizes from config.json and the safetensors headers alone, and checks that our decoder computes it.

`coordinator init`, `silo init`, `fedsilo policy init` and `silo check` refuse here what the trainer would refuse
minutes later, or what nobody would refuse: weights that are missing are filled with random numbers by the library that
loads them. Reads no weights, except both output heads where
a folder that ties them stores two. Does not prove that the numbers in it are a good model; the policy pins their hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.files.model_folder import FLOATS, Placed, ending_ids, read_config, read_json, tensors_of
from fedsilo.protocol.errors import UsageError

# What the trainer's decoder takes.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Kinds of rotary positions whose angles depend on the position alone, not on how long the text turns out to be.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "swish")
SUPPORTED = "supported are Llama, Qwen2, Qwen2.5, Qwen3, and Mistral without a sliding window"

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelFacts:
    """Sizes by the decoder's letters. `tensors`: shape by name; `tied`: the head is the embedding."""

    architecture: str
    layers: int
    hidden: int  # D
    intermediate: int  # I
    heads: int  # H
    key_value_heads: int  # G
    head_width: int  # E
    vocabulary: int  # V
    context_tokens: int
    tied: bool
    tensors: Mapping[str, tuple[int, ...]]
    stored_bytes: int  # of all tensors in the files

    @property
    def parameters(self) -> int:
        """Numbers, a tied head counted once."""
        return self.projection_numbers + self.other_numbers

    @property
    def projection_numbers(self) -> int:
        """Numbers of the linear layers inside the layers, which nf4 and fp8 store in fewer bits."""
        return sum(_count(shape) for name, shape in self.tensors.items() if _is_projection(name))

    @property
    def projection_rows(self) -> int:
        return sum(shape[0] for name, shape in self.tensors.items() if _is_projection(name))

    @property
    def other_numbers(self) -> int:
        """Embedding, head, norms and biases."""
        return sum(
            _count(shape)
            for name, shape in self.tensors.items()
            if not _is_projection(name) and not (self.tied and name == "lm_head.weight")
        )


def _is_projection(name: str) -> bool:
    parts = name.split(".")
    return len(parts) > 2 and parts[-1] == "weight" and parts[-2] in PROJECTIONS


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def read_model_facts(folder: Path) -> ModelFacts:
    """Read and check a model folder.

    Raises:
        UsageError: the folder, or the model in it, is nothing that can be trained here; says what and where.
    """
    try:
        config = read_config(folder)
        architecture = _check_config(folder / "config.json", config)
        placed = _tensors_of(folder)
        facts = _facts_of(folder, architecture, config, placed)
        _check_tensors(folder, config, facts, placed)
        _check_tokenizer(folder, facts.vocabulary)
    except UsageError as error:
        raise UsageError(error.message, hint=error.hint, code="MODEL_NOT_SUPPORTED") from error
    return facts


def _check_config(path: Path, config: Mapping[str, Any]) -> str:
    """Check what the decoder must compute, and return the architecture."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if architecture not in ARCHITECTURES:
        known = f"{SUPPORTED}: {', '.join(ARCHITECTURES)}"
        raise UsageError(f"{path}: architecture {architecture!r} is not known", hint=known)
    if config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise UsageError(f"{path}: activation {config['hidden_act']!r}", hint=f"known are {', '.join(ACTIVATIONS)}")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = (rotary.get("rope_type") or rotary.get("type") or "default") if isinstance(rotary, dict) else rotary
    if kind not in ROTARY_KINDS:
        raise UsageError(f"{path}: positions of kind {kind!r}", hint=f"known are {', '.join(ROTARY_KINDS)}")
    turned = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if turned != 1.0:
        raise UsageError(f"{path}: only {turned} of each head is turned by its position", hint="all of it must be")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UsageError(f"{path}: layers with a sliding window are not supported", hint=SUPPORTED)
    # transformers' Mistral has a window of 4096 where its configuration does not say that there is none
    if architecture == "MistralForCausalLM" and config.get("sliding_window", 4096) is not None:
        raise UsageError(
            f"{path}: layers with a sliding window are not supported", hint=f"{SUPPORTED} (sliding_window: null)"
        )
    if config.get("quantization_config") is not None:
        raise UsageError(
            f"{path}: the weights are stored quantised",
            hint="use the model's unquantised folder; model.load: nf4 or fp8 quantises it when it is loaded",
        )
    return str(architecture)


def _facts_of(folder: Path, architecture: str, config: Mapping[str, Any], placed: Mapping[str, Placed]) -> ModelFacts:
    def whole(name: str, default: int = 0) -> int:
        value = config.get(name, default)
        if type(value) is not int or value < 1:
            raise UsageError(f"{folder / 'config.json'}: {name} is {value!r}, not a number from 1")
        return value

    heads = whole("num_attention_heads")
    hidden = whole("hidden_size")
    return ModelFacts(
        architecture=architecture,
        layers=whole("num_hidden_layers"),
        hidden=hidden,
        intermediate=whole("intermediate_size"),
        heads=heads,
        key_value_heads=whole("num_key_value_heads", 8 if architecture == "MistralForCausalLM" else heads),
        head_width=whole("head_dim", hidden // heads) if config.get("head_dim") is not None else hidden // heads,
        vocabulary=whole("vocab_size"),
        context_tokens=whole("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),  # as transformers reads these families
        tensors={name: shape for name, (shape, _, _, _) in placed.items()},
        stored_bytes=sum(stop - start for _, _, _, (start, stop) in placed.values()),
    )


def _tensors_of(folder: Path) -> dict[str, Placed]:
    try:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be listed: {error.strerror}", hint="give the account that runs this read access to it"
        ) from error
    if pickled and not list(folder.glob("*.safetensors*")):
        raise UsageError(
            f"{folder}: the weights are pickled ({pickled[0]}), and unpickling runs code (threat T22)",
            hint="use the folder's safetensors form",
        )
    return tensors_of(folder)


def _check_tensors(folder: Path, config: Mapping[str, Any], facts: ModelFacts, placed: Mapping[str, Placed]) -> None:
    for name, shape in _expected(config, facts).items():
        if name not in placed:
            raise UsageError(
                f"{folder}: the weights lack {name}", hint="they would be random numbers; copy the folder again"
            )
        if placed[name][0] != shape:
            raise UsageError(f"{folder}: {name} has shape {list(placed[name][0])}, config.json makes it {list(shape)}")
    for name, (_, kind, path, _) in placed.items():
        if kind not in FLOATS and not name.endswith("inv_freq"):
            raise UsageError(f"{path}: {name} is stored as {kind}, not as plain numbers")
    head, embedding = placed.get("lm_head.weight"), placed["model.embed_tokens.weight"]
    if facts.tied and head is not None and _digest(head) != _digest(embedding):
        raise UsageError(
            f"{folder}: tie_word_embeddings is true, and lm_head.weight is not the embedding",
            hint="which of the two heads counts hangs on the program that loads it; set it to false at every site",
        )


def _expected(config: Mapping[str, Any], facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that the decoder reads."""
    D, E = facts.hidden, facts.head_width
    sides = {
        "self_attn.q_proj": (facts.heads * E, D),
        "self_attn.k_proj": (facts.key_value_heads * E, D),
        "self_attn.v_proj": (facts.key_value_heads * E, D),
        "self_attn.o_proj": (D, facts.heads * E),
        "mlp.gate_proj": (facts.intermediate, D),
        "mlp.up_proj": (facts.intermediate, D),
        "mlp.down_proj": (D, facts.intermediate),
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
    }
    if facts.architecture == "Qwen3ForCausalLM":
        sides |= {"self_attn.q_norm": (E,), "self_attn.k_norm": (E,)}
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{place}.{name}.weight": shape for place in range(facts.layers) for name, shape in sides.items()
    }
    for place in range(facts.layers):
        for name in _biased(config, facts.architecture):
            shapes[f"model.layers.{place}.{name}.bias"] = sides[name][:1]
    shapes |= {"model.embed_tokens.weight": (facts.vocabulary, D), "model.norm.weight": (D,)}
    return shapes if facts.tied else shapes | {"lm_head.weight": (facts.vocabulary, D)}


def _biased(config: Mapping[str, Any], architecture: str) -> tuple[str, ...]:
    """Projections with a bias, as transformers builds the families."""
    attention = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    if architecture == "Qwen2ForCausalLM":
        return attention[:3]
    llama = architecture == "LlamaForCausalLM"
    if architecture == "MistralForCausalLM":
        return ()
    return (
        *(attention if config.get("attention_bias") else ()),
        *(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if llama and config.get("mlp_bias") else ()),
    )


def _digest(placed: Placed) -> bytes:
    _, kind, path, (start, stop) = placed
    digest = hashlib.sha256(kind.encode())
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(_READ_BYTES, stop - start))):
            digest.update(chunk)
            start += len(chunk)
    return digest.digest()


def _check_tokenizer(folder: Path, rows: int) -> None:
    """A text may hold any token of the tokenizer, so each needs a row of the embedding."""
    path = folder / "tokenizer.json"
    whole = read_json(path)
    if not isinstance(whole.get("model"), dict):
        raise UsageError(f"{path} is no tokenizer")
    for name, token in _token_ids(folder, whole):
        if token >= rows:
            raise UsageError(
                f"{folder / name}: token {token}, but the embedding has {rows} rows (tokens 0 to {rows - 1})",
                hint="take the tokenizer that was made with these weights, or remove the token that was added to it",
            )


def _token_ids(folder: Path, tokenizer: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every id that a file gives to a token, or puts around a text, with the name of that file."""
    vocabulary, added = tokenizer["model"].get("vocab"), tokenizer.get("added_tokens")
    around: list[Any] = []
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values() if vocabulary else ()
    _inserted(tokenizer.get("post_processor"), around)
    ids_by_file: dict[str, Iterable[Any]] = {
        "tokenizer.json": [*ids, *(each.get("id") for each in added or () if isinstance(each, dict)), *around],
        "what ends an answer": ending_ids(folder),
    }
    # transformers adds to the tokenizer what stands in these
    for name in ("tokenizer_config.json", "added_tokens.json"):
        if (folder / name).is_file():
            settings = read_json(folder / name)
            decoder = settings.get("added_tokens_decoder")
            numbers = settings.values() if name == "added_tokens.json" else decoder if isinstance(decoder, dict) else ()
            ids_by_file[name] = [int(each) if isinstance(each, str) and each.isdecimal() else each for each in numbers]
    for name, listed in ids_by_file.items():
        yield from ((name, each) for each in listed if type(each) is int)


def _inserted(processor: Any, found: list[Any]) -> None:
    """Ids that a post-processor puts before or after a text, also one of several in sequence."""
    if not isinstance(processor, dict):
        return
    for each in processor.get("processors") or ():
        _inserted(each, found)
    tokens = processor.get("special_tokens")
    for token in tokens.values() if isinstance(tokens, dict) else ():
        found += token.get("ids") or () if isinstance(token, dict) else ()
    found += [each[1] for each in (processor.get("sep"), processor.get("cls")) if isinstance(each, list) and each[1:]]

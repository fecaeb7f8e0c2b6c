"""The forward pass of the Llama, Qwen2 and Qwen3 decoders, written out once for training and for sampling.

The weights are the Hugging Face model's own: projections of one input lie side by side in one tensor, and the model's
parameters become views of it, so nothing is held twice; quantised ones (`quantised`) likewise. Tokens are one stream
without padding; attention alone sees rows. The K answers to a prompt share it: it is computed once, and gradients flow
through its keys and values.

Axes: N tokens of a stream, S of them of prompts, P prompts, L longest prefix, r answers of a block, t the longest of
them, D hidden, H heads, G key-value heads, E numbers of a head.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedsilo.protocol.errors import UsageError
from silo.trainer.batch import Stream
from silo.trainer.layers import (
    Factors,
    JoinedFactors,
    attention,
    gather_rows,
    is_narrow,
    join_factors,
    joined_linear,
    low_rank_linear,
    rms_norm,
    room_for,
    rotate,
    swiglu,
)
from silo.trainer.quantised import QuantisedLinear, QuantisedWeight, side_by_side

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Kinds of rotary positions whose angles depend on the position alone, not on how long the text turns out to be.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ACTIVATIONS = ("silu", "swish")

Angles: TypeAlias = tuple[Tensor, Tensor]
# A second decoder would join the weights anew, and the first would hold a whole model of its own from then on.
_DECODED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class Projection:
    """Linear layers of one input, side by side.

    Attributes:
        weight: [M, D], frozen.
        bias: [M], frozen.
        factors: of some rows.
        roomy: [M, D + room], the memory that a narrow weight is the left part of; the factors are laid beside it.
        joined: the factors as they were when sampling began, in place of `factors`.
    """

    weight: Tensor | QuantisedWeight
    bias: Tensor | None
    factors: tuple[Factors, ...]
    roomy: Tensor | None = None
    joined: JoinedFactors | None = None


@dataclass(frozen=True)
class Layer:
    """Frozen weights of one layer, with the factors that are trained. Norms: [D], those of heads [E]."""

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Decoder:
    """Args:
        model: the base, a Hugging Face causal LM of one of `ARCHITECTURES`; it is frozen, and still works by itself.
        factors: (A [r, in], B [out, r]) by the name of the linear layer.
        scale: alpha / r.

    Attributes:
        adapted: whether the factors count.
        rounds_once: what a layer and its factors give is rounded together; false: as vLLM does, each by itself.
        heads, key_value_heads, head_width: H, G and E.

    Raises:
        UsageError: the model is not computed as written here (architecture, activation, positions, sliding windows,
            mixed weights, or quantised by others than `quantised`), has a decoder already, or factors belong to no
            layer of `ADAPTABLE`.
    """

    def __init__(self, model: Any, factors: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> None:
        _check_supported(model, factors)
        config, core = model.config, model.model
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.adapted = self.rounds_once = True
        self.heads: int = config.num_attention_heads
        self.key_value_heads: int = config.num_key_value_heads
        self.head_width = _head_width(config)
        self.embedding: Tensor = core.embed_tokens.weight.data
        self.head: Tensor = model.lm_head.weight.data
        self._scale = scale
        self._epsilon: float = config.rms_norm_eps
        self._final_norm: Tensor = core.norm.weight.data
        self._rotary = core.rotary_emb
        self.layers = [_layer(f"model.layers.{place}", layer, factors) for place, layer in enumerate(core.layers)]
        _DECODED.add(model)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Inside, the factors do not count: the reference of the KL term (methods 1.3)."""
        before, self.adapted = self.adapted, False
        try:
            yield
        finally:
            self.adapted = before

    @contextmanager
    def rounding_apart(self) -> Iterator[None]:
        """Inside, it rounds as vLLM does: the base's product first, and then what is added to it."""
        before, self.rounds_once = self.rounds_once, False
        try:
            yield
        finally:
            self.rounds_once = before

    # ---- the parts of a layer ------------------------------------------------------------------------

    def embedded(self, ids: Tensor) -> Tensor:
        """What the first layer reads. ids: [N]; returns [N, D]."""
        return self.embedding[ids]

    def angles(self, positions: Tensor) -> Angles:
        """Cosine and sine of each position, [N, 1, E / 2] each. positions: [N]."""
        cosine, sine = self._rotary(self.embedding, positions.unsqueeze(0))
        half = self.head_width // 2
        return cosine[0, :, None, :half], sine[0, :, None, :half]

    def heads_of(self, x: Tensor, layer: Layer, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, E], keys and values [N, G, E]. x: [N, D]."""
        joined = self._project(rms_norm(x, layer.input_norm, self._epsilon), layer.qkv)  # [N, (H + 2 G) E]
        sides = [self.heads, self.key_value_heads, self.key_value_heads]
        query, key, value = joined.view(len(x), -1, self.head_width).split(sides, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, self._epsilon)
            key = rms_norm(key, layer.key_norm, self._epsilon)
        return rotate(query, *angles), rotate(key, *angles), value

    def after_attention(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        """The rest of a layer. x: [N, D]; attended: [N, H * E]; returns [N, D]."""
        x = x + self._project(attended, layer.output)
        both = self._project(rms_norm(x, layer.mlp_norm, self._epsilon), layer.gate_up)
        return x + self._project(swiglu(both), layer.down)

    def attend_within(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor, inside: Tensor) -> Tensor:
        """Causal attention within each prompt's prefix.

        Args:
            query: [S or N, H, E].
            key: [S or N, G, E].
            value: [S or N, G, E].
            places: [P, L] where the tokens of each prefix lie, right-padded.
            inside: [S] where they lie among the P * L.

        Returns:
            [S, H * E].
        """
        rows = (gather_rows(each, places).transpose(1, 2) for each in (query, key, value))
        found = attention(*rows, causal=True)  # [P, H, L, E]; what pads a prefix comes after it
        return gather_rows(found.transpose(1, 2).flatten(0, 1), inside).flatten(1)

    def final(self, x: Tensor) -> Tensor:
        """What the head reads. x: [N, D]."""
        return rms_norm(x, self._final_norm, self._epsilon)

    def layers_for_sampling(self) -> list[Layer]:
        """The layers with the factors as they are at this moment, made ready for many small products without gradients:
        joined and in the base's dtype once and not at every token."""
        if not self.adapted or not self.rounds_once:
            return self.layers
        return [
            dataclasses.replace(
                layer,
                qkv=self._joined(layer.qkv),
                output=self._joined(layer.output),
                gate_up=self._joined(layer.gate_up),
                down=self._joined(layer.down),
            )
            for layer in self.layers
        ]

    def _joined(self, projection: Projection) -> Projection:
        if not projection.factors:
            return projection
        dtype = self.embedding.dtype
        joined = join_factors(projection.factors, projection.weight, self._scale, dtype, projection.roomy)
        return dataclasses.replace(projection, joined=joined)

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        if projection.joined is not None:
            return joined_linear(x, projection.weight, projection.bias, projection.joined)
        factors = projection.factors if self.adapted else ()
        return low_rank_linear(
            x,
            projection.weight,
            projection.bias,
            factors,
            self._scale,
            rounds_once=self.rounds_once,
            roomy=projection.roomy,
        )

    # ---- training ------------------------------------------------------------------------------------

    def hidden(self, stream: Stream, *, checkpointing: bool = False) -> Tensor:
        """The last layer's normalised output at every answer token.

        Args:
            stream: prompts and answers.
            checkpointing: keep each layer's input alone and compute the rest again in the backward pass.

        Returns:
            [N - S, D].
        """
        x = self.embedded(stream.ids)
        angles = self.angles(stream.positions)
        masks = [block.mask(x.dtype) for block in stream.blocks]  # held for this pass only
        for place, layer in enumerate(self.layers):
            last = place == len(self.layers) - 1
            if checkpointing:
                x = checkpoint(self._layer_of, x, layer, angles, stream, masks, last, use_reentrant=False)
            else:
                x = self._layer_of(x, layer, angles, stream, masks, last)
        return self.final(x)

    def _layer_of(
        self, x: Tensor, layer: Layer, angles: Angles, stream: Stream, masks: Sequence[Tensor], last: bool
    ) -> Tensor:
        query, key, value = self.heads_of(x, layer, angles)
        found = []
        for block, mask in zip(stream.blocks, masks, strict=True):
            answered = attention(
                gather_rows(query, block.query_places).transpose(1, 2),
                gather_rows(key, block.key_places).transpose(1, 2),
                gather_rows(value, block.key_places).transpose(1, 2),
                mask=mask,
            )  # [r, H, t, E]
            found.append(answered.transpose(1, 2).flatten(0, 1))
        attended = gather_rows(torch.cat(found), stream.query_of).flatten(1)  # [N - S, H * E]
        prefix_tokens = len(stream.prefix_of)
        if last:  # of the prompts, nobody reads more than keys and values
            return self.after_attention(x[prefix_tokens:], attended, layer)
        if prefix_tokens:
            before = self.attend_within(query, key, value, stream.prefix_places, stream.prefix_of)
            attended = torch.cat([before, attended])
        return self.after_attention(x, attended, layer)


def _layer(name: str, layer: Any, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def norm(owner: Any, which: str) -> Tensor | None:
        module = getattr(owner, which, None)
        return None if module is None else module.weight.data

    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_side_by_side(f"{name}.self_attn", attention, ("q_proj", "k_proj", "v_proj"), factors),
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        output=_side_by_side(f"{name}.self_attn", attention, ("o_proj",), factors),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_side_by_side(f"{name}.mlp", mlp, ("gate_proj", "up_proj"), factors),
        down=_side_by_side(f"{name}.mlp", mlp, ("down_proj",), factors),
    )


def _side_by_side(
    path: str, owner: Any, names: tuple[str, ...], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> Projection:
    modules = [getattr(owner, each) for each in names]
    quantised = [module.stored for module in modules if isinstance(module, QuantisedLinear)]
    pairs = {each: pair for each in names if (pair := factors.get(f"{path}.{each}")) is not None}
    roomy: Tensor | None = None
    weight: Tensor | QuantisedWeight
    if quantised:
        weight = side_by_side(quantised)
    elif pairs and is_narrow(modules[0].weight.dtype):
        inputs, room = modules[0].in_features, room_for(sum(len(a) for a, _ in pairs.values()))
        roomy = modules[0].weight.data.new_zeros(sum(module.out_features for module in modules), inputs + room)
        weight = torch.cat([module.weight.data for module in modules], out=roomy[:, :inputs])
    else:
        weight = torch.cat([module.weight.data for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
    found, start = [], 0
    for each, module in zip(names, modules, strict=True):
        stop = start + module.out_features
        if isinstance(weight, QuantisedWeight):
            module.stored = weight.part(start, stop)
        else:
            module.weight.data = weight[start:stop]
        if bias is not None:
            module.bias.data = bias[start:stop]
        if each in pairs:
            found.append(Factors(start, stop, *pairs[each]))
        start = stop
    return Projection(weight, bias, tuple(found), roomy)


def _head_width(config: Any) -> int:
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def _check_supported(model: Any, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    kind, config = type(model).__name__, model.config
    if kind not in ARCHITECTURES:
        raise UsageError(f"the base model is a {kind}", hint=f"supported are {', '.join(ARCHITECTURES)}")
    if model in _DECODED:
        raise UsageError("the base model has a decoder already", hint="load the model again for another")
    if config.hidden_act not in ACTIVATIONS:
        raise UsageError(
            f"the base model's activation is {config.hidden_act!r}", hint=f"one of {', '.join(ACTIVATIONS)}"
        )
    _check_positions(model)
    mistral_window = config.sliding_window if kind == "MistralForCausalLM" else None  # in a Qwen it may lie unused
    if mistral_window is not None or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UsageError("the base model has layers with a sliding window, which are not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "the base model's folder holds quantised weights, which is not supported",
            hint="use its unquantised folder; model.load: nf4 or fp8 quantises when it is loaded",
        )
    dtype = model.model.embed_tokens.weight.dtype
    for name, module in model.named_modules():
        adaptable = name.rpartition(".")[2] in ADAPTABLE
        plain = type(module) is nn.Linear or (adaptable and type(module) is QuantisedLinear)
        if (adaptable or name == "lm_head") and not plain:
            raise UsageError(f"the base model's {name} is a {type(module).__name__}, not a plain linear layer")
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype:
            raise UsageError(f"the base model's {name} is {parameter.dtype}, its embedding {dtype}")
    other = sorted(name for name in factors if name.rpartition(".")[2] not in ADAPTABLE)
    if other:
        raise UsageError(f"the LoRA schema names {other[0]!r}", hint=f"adapted can be {', '.join(ADAPTABLE)}")
    loose = sorted(set(factors) - {name for name, _ in model.named_modules()})
    if loose:
        raise UsageError(f"the LoRA schema names {loose[0]!r}, which is no layer of the base model")


def _check_positions(model: Any) -> None:
    config = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY_KINDS:
        raise UsageError(f"the base model's positions are of kind {rotary!r}", hint=f"one of {', '.join(ROTARY_KINDS)}")
    turned, width = 2 * len(model.model.rotary_emb.inv_freq), _head_width(config)
    if turned != width:
        raise UsageError(f"the base model turns {turned} of a head's {width} numbers; only all of them is supported")

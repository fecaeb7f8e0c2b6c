"""Frozen weights in 4 or 8 bits: `model.load: nf4` and `fp8`.

    nf4   blocks of 64 numbers of a row, each number one of 16 levels, two in a byte, times the block's largest (QLoRA,
          Dettmers et al. 2023, appendix E): 4.5 bits a number with its float32 scale; scales are not quantised again
    fp8   float8 e4m3 (4 bits of exponent, 3 of mantissa) times one float32 scale a row: 8 bits a number

Only storage is narrow. A weight is multiplied out to the dtype of the activations (bfloat16) where it is used, once in
the forward and once in the backward pass, so nothing runs faster than in bf16: what is won is memory. The linear layers
inside the layers are quantised; embedding, head, norms and biases stay in bfloat16. Sampling and training read the same
stored weights, so they agree as they do in bf16. Plain torch, on the CPU as on a GPU.

What it costs in quality is not bounded beyond each number's rounding (tests/algorithms/test_quantised.py). What fp8
does not do: clip outliers or scale by column; what nf4 does not: store any number but zero and a block's largest
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsilo.files.model_facts import PROJECTIONS
from fedsilo.files.model_folder import weight_files
from fedsilo.protocol.errors import UsageError

Load: TypeAlias = Literal["nf4", "fp8"]
LOADS: tuple[Load, ...] = ("nf4", "fp8")
BLOCK = 64
FP8_MAX = 448.0  # the largest finite number of e4m3

# Quantiles of the standard normal distribution, halved at zero so that zero is one of them, over the largest (QLoRA,
# appendix E). tests/algorithms/test_quantised.py computes them anew.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class QuantisedWeight:
    """[M, D] in few bits.

    nf4: `numbers` [M, blocks * 32] uint8, the first of two in the high half; `scales` [M, blocks] float32.
    fp8: `numbers` [M, D] float8_e4m3fn; `scales` [M, 1] float32.
    """

    load: Load
    numbers: Tensor
    scales: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def size_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.numbers, self.scales))

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as numbers, [M, D]. dtype: of the result; by default that of the model."""
        dtype = dtype or self.dtype
        if self.load == "fp8":
            places = self.numbers.view(torch.uint8).flatten().int()
            wide = _e4m3(self.device).index_select(0, places).view(torch.float32).view(self.shape)
            return wide.mul_(self.scales).to(dtype)
        rows, blocks = self.scales.shape
        spread = _pairs(self.device).index_select(0, self.numbers.flatten().int()).view(torch.float32)
        return (
            spread.view(rows, blocks, BLOCK).mul_(self.scales.unsqueeze(2)).view(rows, -1)[:, : self.shape[1]].to(dtype)
        )

    def float(self) -> Tensor:
        """The numbers that a pass in the model's dtype multiplies by, as float32, [M, D]."""
        return self.whole().float()

    def part(self, start: int, stop: int) -> QuantisedWeight:
        """Rows `start` to `stop`, a view."""
        return QuantisedWeight(
            self.load, self.numbers[start:stop], self.scales[start:stop], (stop - start, self.shape[1]), self.dtype
        )

    def to(self, device: torch.device) -> QuantisedWeight:
        return QuantisedWeight(self.load, self.numbers.to(device), self.scales.to(device), self.shape, self.dtype)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


# Tables of what a byte stands for, as whole numbers of the same bits: on a CPU `index_select` of those from one
# dimension took 0.5 and 0.9 ns a weight, torch's own conversion from float8 8 ns and plain indexing 43 ns (measured).


@cache
def _pairs(device: torch.device) -> Tensor:
    """Two levels of nf4 for each byte: [256] int64, two float32 side by side."""
    byte = torch.arange(256, device=device)
    return _levels(device)[torch.stack((byte >> 4, byte & 15), dim=1)].view(torch.int64).flatten()


@cache
def _e4m3(device: torch.device) -> Tensor:
    """The float32 for each byte of float8 e4m3: [256] int32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device).view(torch.int32)


def quantise(weight: Tensor, load: Load) -> QuantisedWeight:
    """Round each number to the nearest that can be stored. weight: [M, D], finite.

    Raises:
        UsageError: a number is not finite.
    """
    wide = weight.float()
    rows, columns = wide.shape
    if not bool(wide.isfinite().all()):
        raise UsageError("the base model holds a weight that is not finite, so it cannot be quantised")
    if load == "fp8":
        scales = wide.abs().amax(1, keepdim=True) / FP8_MAX
        scales = torch.where(scales > 0, scales, 1.0)
        numbers = (wide / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return QuantisedWeight(load, numbers, scales, (rows, columns), weight.dtype)
    padded = functional.pad(wide, (0, -columns % BLOCK)).view(rows, -1, BLOCK)  # [M, blocks, 64]
    scales = padded.abs().amax(2)  # [M, blocks]
    inside = padded / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    levels = _levels(weight.device)
    # between two levels the nearer one
    code = torch.bucketize(inside, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(rows, -1, 2)
    numbers = (code[..., 0] << 4) | code[..., 1]
    return QuantisedWeight(load, numbers, scales, (rows, columns), weight.dtype)


def side_by_side(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Weights of one input as one: rows below rows."""
    first = weights[0]
    # torch joins no float8; the bytes are the same
    numbers = torch.cat([each.numbers.view(torch.uint8) for each in weights]).view(first.numbers.dtype)
    scales = torch.cat([each.scales for each in weights])
    return QuantisedWeight(
        first.load, numbers, scales, (sum(each.shape[0] for each in weights), first.shape[1]), first.dtype
    )


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is stored in few bits. `weight` has its shape and dtype and holds nothing."""

    stored: QuantisedWeight

    def __init__(self, stored: QuantisedWeight, bias: Tensor | None) -> None:
        rows, columns = stored.shape
        super().__init__(columns, rows, bias=bias is not None, device="meta", dtype=stored.dtype)
        self.weight.requires_grad_(False)
        self.stored = stored
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.stored.whole(input.dtype), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`model.to(device)`: the stored weight goes along; what holds nothing stays where it is."""
        bias = self.bias
        if bias is not None:
            self.bias = nn.Parameter(fn(bias.data), requires_grad=False)
        device = fn(torch.empty(0)).device
        self.stored = self.stored.to(device)
        return self


def load_quantised(folder: Path, load: Load) -> Any:
    """A model folder's causal LM with quantised linear layers, on the CPU. Tensors are read and quantised one by one,
    so that the model is never whole in bfloat16.

    Raises:
        UsageError: the folder cannot be loaded, or lacks a weight.
    """
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        weights: dict[str, Tensor | QuantisedWeight] = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    tensor = file.get_tensor(name).to(torch.bfloat16)
                    parts = name.split(".")
                    is_projection = parts[-1] == "weight" and parts[-2] in PROJECTIONS
                    weights[name] = quantise(tensor, load) if is_projection else tensor.clone()
        _fill(model, weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"no model can be loaded from {folder}: {str(error).splitlines()[0][:200]}") from error
    return model.eval()


def _fill(model: Any, weights: dict[str, Tensor | QuantisedWeight]) -> None:
    for name, module in list(model.named_modules()):
        stored = weights.pop(f"{name}.weight", None) if type(module) is nn.Linear else None
        if isinstance(stored, QuantisedWeight):
            owner, _, last = name.rpartition(".")
            bias = weights.pop(f"{name}.bias", None) if module.bias is not None else None
            if module.bias is not None and not isinstance(bias, Tensor):
                raise UsageError(f"the model folder lacks {name}.bias")
            setattr(
                model.get_submodule(owner), last, QuantisedLinear(stored, bias if isinstance(bias, Tensor) else None)
            )
        elif stored is not None:
            weights[f"{name}.weight"] = stored
    for name, parameter in list(model.named_parameters()):
        if parameter.device.type != "meta" or isinstance(_owner(model, name), QuantisedLinear):
            continue
        tensor = weights.get(name)
        if tensor is None and name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != parameter.shape:
            raise UsageError(f"the model folder lacks {name}, or it has another shape")
        setattr(_owner(model, name), name.rpartition(".")[2], nn.Parameter(tensor, requires_grad=False))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    # its frequencies follow from the configuration, and were made on no device
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def _owner(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])

"""The LoRA adapter a run trains: peft layers on a frozen base, loaded from and exported to the wire's names.

W = W0 + s B A with s = alpha / rank, A [r, in], B [out, r], no dropout (with dropout the ratio would differ from 1
on the first update, methods 1.3). Wire names are the base model's own module names followed by `.lora_A` or
`.lora_B`. Factors are float32 whatever the base is loaded as, and so is the exported difference to the round's start.

With A frozen (FFA-LoRA, methods 6) only B is trained, only B is in the difference, and A stays what was loaded, bit for
bit: then the mean of the silos' products is the product of the means.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from fedsilo.treaty.errors import PeerError, UsageError, WireCode
from fedsilo.treaty.freezing import Freeze, freeze_named, is_frozen
from fedsilo.treaty.wire.codec import Array


@dataclass(frozen=True)
class LoraShape:
    """What the federation's LoRA schema says. shapes: wire name -> shape, both factors of every module."""

    rank: int
    alpha: float
    shapes: Mapping[str, tuple[int, ...]]
    freeze: Freeze = "none"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(sorted({name.rpartition(".")[0] for name in self.shapes}))


def shape_from_schema(schema: Mapping[str, Any]) -> LoraShape:
    """Read the schema's JSON form: {rank, alpha, freeze, tensors: [{name, shape}], ...}.

    Raises:
        UsageError: a field is missing or of another type.
    """
    try:
        shapes = {str(entry["name"]): tuple(int(side) for side in entry["shape"]) for entry in schema["tensors"]}
        return LoraShape(int(schema["rank"]), float(schema["alpha"]), shapes, freeze_named(schema["freeze"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the LoRA schema is not readable: {error}") from error


class LoraAdapter:
    """Owns the trainable factors of one run. `model` is the base with the adapter's layers in place; call it directly.

    Args:
        base: a Hugging Face causal LM. Its linear layers are wrapped in place; its weights are frozen.
        shape: the schema; every module it names must be a linear layer of the base with these sides.

    Raises:
        UsageError: the schema does not fit the base model.
    """

    def __init__(self, base: Any, shape: LoraShape) -> None:
        _check_fit(base, shape)
        config = LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,
            target_modules=list(shape.modules),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            # peft 0.21 asks for a name that transformers 5.23 has renamed
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            self._peft = get_peft_model(base, config)
        self._peft.eval()
        self.model = self._peft.get_base_model()
        self.shape = shape
        named = {_wire_name(name): parameter for name, parameter in self._peft.named_parameters() if "lora_" in name}
        for parameter in named.values():
            parameter.data = parameter.data.float()
        self._factors: dict[str, torch.nn.Parameter] = {name: named[name] for name in sorted(named)}
        for name, parameter in self._factors.items():
            if name.endswith(".lora_B"):
                torch.nn.init.zeros_(parameter)
        self._trained = {name: each for name, each in self._factors.items() if not is_frozen(name, shape.freeze)}
        self._require_gradients()
        self._start = [parameter.detach().clone() for parameter in self.parameters]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Factors that are trained, in the order of their wire names."""
        return list(self._trained.values())

    @property
    def start(self) -> list[Tensor]:
        """theta_p: the trained factors at the round's start, in the order of `parameters`."""
        return self._start

    def load(self, tensors: Mapping[str, Array]) -> None:
        """Make these factors the round's start. Raises PeerError: names or shapes differ from the schema."""
        self._write(tensors)
        self._start = [parameter.detach().clone() for parameter in self.parameters]

    def delta(self) -> dict[str, Array]:
        """Trained factors minus the round's start, float32, by wire name (methods 2.2)."""
        return {
            name: (parameter.detach() - start).cpu().numpy().astype(np.float32)
            for (name, parameter), start in zip(self._trained.items(), self._start, strict=True)
        }

    def drift(self) -> float:
        """||theta - theta_p|| over all trained factors (methods 2.8)."""
        squares = [
            (parameter.detach() - start).square().sum()
            for parameter, start in zip(self.parameters, self._start, strict=True)
        ]
        return float(torch.stack(squares).sum().sqrt())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, `model` computes the base model: the reference of the KL term for the whole run (methods 1.3)."""
        try:
            with self._peft.disable_adapter():
                yield
        finally:
            self._require_gradients()  # peft leaves every factor of an adapter that it puts back in training

    @contextmanager
    def replaced_by(self, tensors: Mapping[str, Array]) -> Iterator[None]:
        """Inside, `model` computes another adapter; afterwards the local factors are back, bit for bit."""
        held = {name: parameter.detach().clone() for name, parameter in self._factors.items()}
        self._write(tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._factors.items():
                    parameter.copy_(held[name])

    def _require_gradients(self) -> None:
        for name, parameter in self._factors.items():
            parameter.requires_grad_(name in self._trained)

    def _write(self, tensors: Mapping[str, Array]) -> None:
        got = {name: tuple(array.shape) for name, array in tensors.items()}
        if got != dict(self.shape.shapes):
            differing = sorted(set(got.items()) ^ set(self.shape.shapes.items()))[0][0]
            raise PeerError(WireCode.SCHEMA_MISMATCH, f"the adapter does not fit the LoRA schema at {differing[:80]!r}")
        with torch.no_grad():
            for name, parameter in self._factors.items():
                parameter.copy_(torch.from_numpy(np.array(tensors[name], dtype=np.float32)))


def _wire_name(parameter_name: str) -> str:
    """`base_model.model.M.lora_A.default.weight` -> `M.lora_A`."""
    return parameter_name.removeprefix("base_model.model.").removesuffix(".default.weight")


def _check_fit(base: Any, shape: LoraShape) -> None:
    linear = {name: module for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    expected: dict[str, tuple[int, ...]] = {}
    for name in shape.modules:
        if name not in linear:
            raise UsageError(
                f"the LoRA schema names {name!r}, which is no linear layer of the base model",
                hint="write the schema again from this model folder: fedsilo policy schema make",
            )
        expected[f"{name}.lora_A"] = (shape.rank, linear[name].in_features)
        expected[f"{name}.lora_B"] = (linear[name].out_features, shape.rank)
    if expected != dict(shape.shapes):
        differing = sorted(set(expected.items()) ^ set(shape.shapes.items()))[0][0]
        raise UsageError(f"the LoRA schema's shape of {differing!r} is not the base model's")

"""The LoRA adapter a run trains: factors beside a frozen base, loaded from and exported to the wire's names.

W = W0 + s B A with s = alpha / rank, A [r, in], B [out, r], no dropout (with dropout the ratio would differ from 1
on the first update). Wire names are the base model's own module names followed by `.lora_A` or
`.lora_B`. Factors are float32 whatever the base is loaded as, and so is the exported difference to the round's start.

What a round fixes (`protocol.factors`) stays what was loaded, bit for bit, and is not in the difference: then the mean
of the silos' products is the product of the means. Between two frozen factors a core R [r, r] is trained: W0 + s B R A.
A shift of the base comes with the adapter, W0 + s shift_B shift_A + s B A, and is never trained: it is added to a copy
of the weights in float32, and with the adapter off W0 counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from fedsilo.protocol.codec import Array, Buffer, factors_head, joined_factors
from fedsilo.protocol.errors import PeerError, UsageError, WireCode
from fedsilo.protocol.factors import TURNS, Fixed, Freeze, fixed_in, freeze_named, is_fixed, is_shift
from silo.reusable_buffer import ReusableBuffer
from silo.trainer.decoder import Decoder, Pair

BASE_NAME = "base"  # what an engine calls itself that computes no adapter
_PEFT_PREFIX = "base_model.model."


def adapter_name(tensors: Mapping[str, NDArray[np.float32]], scale: float) -> str:
    """Digest of an adapter's factors, names, shapes and scale: what its rollouts must name."""
    digest = hashlib.sha256(f"{scale!r}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor, dtype=np.float32).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class LoraShape:
    """The federation's LoRA schema. shapes: wire name -> shape, both factors of every module and the core between
    them, where there is one."""

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
    """Owns the trainable factors of one run. `decoder` computes the base with them.

    Args:
        base: a Hugging Face causal LM, which is frozen.
        shape: the schema; every module it names must be a linear layer of the base with these sides.

    Attributes:
        decoder: computes the base model with the factors, or the base alone.
        factors: all by wire name, the frozen ones among them, as `decoder` computes with them.
        parameters: those that are trained in the open round, in the order of their wire names.
        trained_names: wire names of `parameters`.
        start: theta_p, the trained factors at the round's start, in the order of `parameters`.

    Raises:
        UsageError: the schema does not fit the base model, or its architecture is not supported.
    """

    def __init__(self, base: Any, shape: LoraShape) -> None:
        _check_fit(base, shape)
        self.shape = shape
        device = next(base.parameters()).device
        # zero until a round's adapter is loaded: the coordinator draws A, once for all
        self.factors: dict[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(torch.zeros(sides, device=device)) for name, sides in sorted(shape.shapes.items())
        }
        self.decoder = Decoder(base, {name: self._of_module(name) for name in shape.modules}, shape.scale)
        self.take_turn(1)

    def _of_module(self, name: str) -> Pair:
        """A and B, and the core and the shift where there are some."""
        further = (self.factors.get(f"{name}.{side}") for side in ("lora_R", "shift_A", "shift_B"))
        return self.factors[f"{name}.lora_A"], self.factors[f"{name}.lora_B"], *further

    def take_turn(self, number: int) -> None:
        """Make what a round trains the parameters, as they are now, and the start."""
        fixed = fixed_in(self.shape.freeze, number)
        for name, parameter in self.factors.items():
            parameter.requires_grad_(not is_fixed(name, fixed))
            parameter.grad = None
        self._trained = {name: each for name, each in self.factors.items() if each.requires_grad}
        self.parameters = list(self._trained.values())
        self.trained_names = list(self._trained)
        self.start = [parameter.detach().clone() for parameter in self.parameters]

    @property
    def trained_by_turns(self) -> list[list[str]]:
        """Wire names of what rounds train, in the turns that they take."""
        return [[name for name in self.factors if not is_fixed(name, fixed)] for fixed in TURNS[self.shape.freeze]]

    def name(self) -> str:
        """Return the name that rollouts must give what `decoder` computes: the digest of its adapter, or `BASE_NAME`
        with it off."""
        if not self.decoder.adapted:
            return BASE_NAME
        return adapter_name(self.values(), self.shape.scale)

    def load(self, tensors: Mapping[str, Array], number: int = 1) -> None:
        """Make these factors the start of the round `number`. Raises PeerError: they do not fit the schema."""
        self._write(tensors)
        self.take_turn(number)

    def delta(self) -> dict[str, Array]:
        """Trained factors minus the round's start, float32, by wire name."""
        return {
            name: (parameter.detach() - start).cpu().numpy().astype(np.float32)
            for (name, parameter), start in zip(self._trained.items(), self.start, strict=True)
        }

    def exported(
        self, base_digest: str, schema_sha256: str, buffer: ReusableBuffer | None, stays: Fixed = "none"
    ) -> Buffer:
        """Return the payload of `delta`; arguments as of `TrainedState.exported`."""
        delta = {name: values for name, values in self.delta().items() if not is_fixed(name, stays)}
        header, size_bytes = factors_head(
            delta,
            base_digest=base_digest,
            schema_sha256=schema_sha256,
            rank=self.shape.rank,
            scale=self.shape.scale,
            dtype="float32",
        )
        return joined_factors(header, size_bytes, delta, into=buffer.take(size_bytes) if buffer is not None else None)

    def marker(self, draws: np.random.Generator, strength: float) -> dict[str, Array]:
        """Return random factors that an engine cannot compute with unseen: their product changes an output by about
        `strength` times the size of its input."""
        factors: dict[str, Array] = {}
        for name, sides in sorted(self.shape.shapes.items()):
            drawn = draws.standard_normal(sides)
            if is_shift(name):
                factors[name] = self.factors[name].detach().cpu().numpy()
                continue
            is_b = name.endswith("lora_B")
            size = strength / (self.shape.scale * self.shape.rank**0.5) if is_b else sides[1] ** -0.5
            factors[name] = (size * drawn).astype(np.float32)
        return factors

    def write_for_servers(self, folder: Path) -> None:
        """Make `folder` with the factors of `policy`, as `write_adapter` does. Raises OSError."""
        write_adapter(folder, self.policy(), self.shape)

    def values(self) -> dict[str, Array]:
        """Return all factors by wire name, as `load` takes them: copies on the CPU, float32."""
        return {name: each.detach().to("cpu", copy=True).numpy() for name, each in self.factors.items()}

    def state(self) -> dict[str, Tensor]:
        """Return all factors and the round's start: copies on the CPU, as `factor.NAME` and `start.NAME`."""
        tensors: dict[str, Tensor] = {f"factor.{name}": each for name, each in self.factors.items()}
        tensors |= {f"start.{name}": each for name, each in zip(self._trained, self.start, strict=True)}
        return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to a `state`, bit for bit. Raises KeyError: a tensor is missing."""
        with torch.no_grad():
            for name, parameter in self.factors.items():
                parameter.copy_(tensors[f"factor.{name}"])
        self.decoder.shift_base()
        device = self.decoder.device
        self.start = [tensors[f"start.{name}"].to(device, copy=True) for name in self._trained]

    def policy(self) -> dict[str, Array]:
        """A and B that `decoder` computes with, float32, by wire name; all zeros while the base alone counts. A core is
        part of A."""
        factors = self.values()
        for name in [name for name in factors if name.endswith(".lora_R")]:
            factors[name[:-1] + "A"] = factors.pop(name) @ factors[name[:-1] + "A"]
        return factors if self.decoder.adapted else {name: np.zeros_like(values) for name, values in factors.items()}

    def drift(self) -> float:
        """||theta - theta_p|| over all trained factors."""
        squares = [
            (parameter.detach() - start).square().sum()
            for parameter, start in zip(self.parameters, self.start, strict=True)
        ]
        return float(torch.stack(squares).sum().sqrt())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Make `decoder` compute the base model inside the block: the reference of the KL term for the whole run."""
        with self.decoder.base_only():
            yield

    @contextmanager
    def replaced_by(self, tensors: Mapping[str, Array]) -> Iterator[None]:
        """Make `decoder` compute another adapter inside the block; afterwards the local factors are back, bit for
        bit."""
        own = {name: parameter.detach().clone() for name, parameter in self.factors.items()}
        self._write(tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.factors.items():
                    parameter.copy_(own[name])
            self.decoder.shift_base()

    def _write(self, tensors: Mapping[str, Array]) -> None:
        shapes = {name: tuple(array.shape) for name, array in tensors.items()}
        if shapes != dict(self.shape.shapes):
            differing = sorted(set(shapes.items()) ^ set(self.shape.shapes.items()))[0][0]
            raise PeerError(WireCode.SCHEMA_MISMATCH, f"the adapter does not fit the LoRA schema at {differing[:80]!r}")
        with torch.no_grad():
            for name, parameter in self.factors.items():
                parameter.copy_(torch.from_numpy(np.array(tensors[name], dtype=np.float32)))
        self.decoder.shift_base()


def write_adapter(folder: Path, factors: Mapping[str, Array], shape: LoraShape) -> None:
    """Make `folder`, in the format of peft 0.21, float32.

    Args:
        folder: does not exist; its parent does.
        factors: by wire name, both of every module.
        shape: rank, alpha and modules.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o755)
    tensors = {
        f"{_PEFT_PREFIX}{name}.weight": np.ascontiguousarray(values, np.float32) for name, values in factors.items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": None,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": sorted({module.rpartition(".")[2] for module in shape.modules}),
    }
    (unfinished / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    (unfinished / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    os.rename(unfinished, folder)  # noqa: PTH104  # refuses a folder that is there and not empty


def _check_fit(base: Any, shape: LoraShape) -> None:
    linear = {name: module for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    expected: dict[str, tuple[int, ...]] = {}
    stored = next(base.parameters()).dtype
    if stored != torch.float32 and any(map(is_shift, shape.shapes)):
        raise UsageError(
            f"the LoRA schema has a shift of the base's weights, which are loaded as {stored} and would round it away",
            hint="model.load: fp32",
        )
    for name in shape.modules:
        if name not in linear:
            raise UsageError(
                f"the LoRA schema names {name!r}, which is no linear layer of the base model",
                hint="write the schema again from this model folder: fedsilo policy schema make",
            )
        expected[f"{name}.lora_A"] = (shape.rank, linear[name].in_features)
        expected[f"{name}.lora_B"] = (linear[name].out_features, shape.rank)
        if (shift := shape.shapes.get(f"{name}.shift_A")) is not None:  # of any rank
            expected[f"{name}.shift_A"] = (shift[0], linear[name].in_features)
            expected[f"{name}.shift_B"] = (linear[name].out_features, shift[0])
        if shape.freeze == "AB":
            expected[f"{name}.lora_R"] = (shape.rank, shape.rank)
    if expected != dict(shape.shapes):
        differing = sorted(set(expected.items()) ^ set(shape.shapes.items()))[0][0]
        raise UsageError(f"the LoRA schema's shape of {differing!r} is not the base model's")

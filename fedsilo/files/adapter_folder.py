"""An adapter as a folder that `PeftModel.from_pretrained` and vLLM read: what stands in it, and whether it is that of a
run record: its values, as the coordinator's payload, have the digest, and what says how they are used is ours.

Does not look at the base model's name in it, which is for people, or at further files, which it can name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fedsilo.files.durable import read_regular
from fedsilo.protocol.codec import Array, factors_head, factors_pieces
from fedsilo.protocol.errors import NotFoundError, UsageError, VerificationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_MODEL = "base_model_name_or_path"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"


def name_in_folder(name: str) -> str:
    """Return what peft calls the factor that a payload calls `name`: base_model.model.<module path>.lora_A.weight."""
    return f"{_PREFIX}{name}{_SUFFIX}"


def adapter_config(names: Iterator[str], *, rank: int, alpha: float, base_model: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        names: of the factors, as a payload has them.
        rank: of the LoRA schema, as alpha.
        alpha: the scale is alpha / rank.
        base_model: a name for people; nothing is loaded from it.

    Raises:
        UsageError: a name is not a LoRA factor's.
    """
    modules: set[str] = set()
    for name in names:
        module, _, factor = name.rpartition(".")
        if factor not in ("lora_A", "lora_B"):
            raise UsageError(f"{name[:64]!r} is not a LoRA factor")
        modules.add(module.rpartition(".")[2])
    return {
        BASE_MODEL: base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


class _Factors(Mapping[str, Array]):
    """Arrays by the name that a payload has for them, read from the file when they are asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = list(file.keys())
        for name in self._names:
            # one by another name would shadow, or be shadowed by, the one that peft loads
            if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
                raise ValueError(f"{name[:64]!r} is no factor's name")

    def __getitem__(self, name: str) -> Array:
        values: Array = self._file.get_tensor(name_in_folder(name))
        if values.dtype != np.float32:
            raise ValueError(f"{name[:64]!r} is {values.dtype}, not float32")
        return values

    def __iter__(self) -> Iterator[str]:
        return (name[len(_PREFIX) : -len(_SUFFIX)] for name in self._names)

    def __len__(self) -> int:
        return len(self._names)


def adapter_sha256(folder: Path, lora: Mapping[str, Any]) -> str:
    """SHA-256 of the `global.adapter` payload whose values an adapter folder holds (`coordinator.aggregate`).

    Args:
        folder: with both files.
        lora: of the plan: {rank, alpha, schema_sha256}.

    Raises:
        NotFoundError: a file is not there.
        VerificationError: it is no adapter folder of ours, says that its values are used in another way, or is of a run
            that trained cores.
    """
    if lora.get("freeze") == "AB":
        raise VerificationError(
            f"{folder} holds each core as part of A, and the digest is of both apart",
            hint="the payload itself, which the coordinator and the silos keep, has it",
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise NotFoundError(f"{weights} is not there")
    try:
        rank, alpha, digest = int(lora["rank"]), float(lora["alpha"]), hashlib.sha256()
        config = json.loads(read_regular(folder / CONFIG))
        with safe_open(weights, framework="numpy") as file:
            factors = _Factors(file)
            ours = adapter_config(iter(factors), rank=rank, alpha=alpha, base_model=config[BASE_MODEL])
            keys = config.keys() | ours.keys()
            if other := sorted(key for key in keys if config.get(key, ...) != ours.get(key, ...)):
                raise ValueError(f"{CONFIG} says otherwise in {', '.join(other)[:200]}")
            header, _ = factors_head(
                factors,
                base_digest="",
                schema_sha256=lora["schema_sha256"],
                rank=rank,
                scale=alpha / rank,
                dtype="float32",
            )
            for piece in factors_pieces(header, factors):
                digest.update(piece)
    except NotFoundError:
        raise
    except (
        SafetensorError,
        UsageError,
        OSError,
        ArithmeticError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise VerificationError(f"{folder} is no adapter as `fedsilo run export` writes it: {error}") from error
    return digest.hexdigest()


def further_files(folder: Path) -> list[str]:
    """Names of what else lies in an adapter folder."""
    return sorted(path.name[:64] for path in folder.iterdir() if path.name not in (CONFIG, WEIGHTS))

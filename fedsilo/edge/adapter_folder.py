"""Whether an adapter folder is the adapter of a run record: its values, as the coordinator's payload, under its digest.

Does not look at what a folder may say of itself besides rank and alpha: the base model's name in it is for people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fedsilo.edge.files import read_regular
from fedsilo.treaty.errors import NotFoundError, VerificationError
from fedsilo.treaty.wire.codec import Array, factors_head, factors_pieces

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"  # what peft writes around a factor's name


class _Factors(Mapping[str, Array]):
    """Arrays by the name that a payload has for them, read from the file when they are asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = {name.removeprefix(_PREFIX).removesuffix(_SUFFIX): name for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Array:
        values: Array = self._file.get_tensor(self._names[name])
        if values.dtype != np.float32:
            raise ValueError(f"{name[:64]!r} is {values.dtype}, not float32")
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def adapter_sha256(folder: Path, schema_sha256: str) -> str:
    """SHA-256 of the `global.adapter` payload whose values a PEFT adapter folder holds (`coordinator.aggregate`).

    Args:
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        schema_sha256: of the plan's LoRA schema; it stands in the payload, and not in the folder.

    Raises:
        NotFoundError: there is no such file. VerificationError: it is no adapter folder of ours.
    """
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise NotFoundError(f"{weights} is not there")
    try:
        config = json.loads(read_regular(folder / CONFIG))
        rank, scale = int(config["r"]), float(config["lora_alpha"]) / int(config["r"])
        digest = hashlib.sha256()
        with safe_open(weights, framework="numpy") as file:
            factors = _Factors(file)
            header, _ = factors_head(
                factors, base_digest="", schema_sha256=schema_sha256, rank=rank, scale=scale, dtype="float32"
            )
            for piece in factors_pieces(header, factors):
                digest.update(piece)
    except (SafetensorError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise VerificationError(f"{folder} is no adapter as `fedsilo run export` writes it: {error}") from error
    return digest.hexdigest()

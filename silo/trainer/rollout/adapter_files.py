"""A LoRA adapter as a folder that peft and vLLM read: `adapter_config.json` and `adapter_model.safetensors`.

A folder appears under its name when it is whole, and is never written again: a server that caches by name and path
would not see that it changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fedsilo.protocol.codec import Array
from silo.trainer.adapters.lora import LoraShape

PREFIX = "base_model.model."


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
    tensors = {f"{PREFIX}{name}.weight": np.ascontiguousarray(values, np.float32) for name, values in factors.items()}
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

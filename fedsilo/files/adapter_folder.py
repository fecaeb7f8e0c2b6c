"""An adapter as a folder that `PeftModel.from_pretrained` and vLLM read: what stands in it, and whether it is that of a
run record: its values, as the coordinator's payload, have the digest, and what says how they are used is ours.

A run may start from such a folder, of whichever trainer wrote it (`import_adapter`), where it holds the factors of the
federation's LoRA schema and nothing else.

Does not look at the base model's name in it, which is for people, or at further files, which it can name: that an
adapter was trained on this base model is known to whoever names its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.files.durable import read_regular
from fedsilo.files.model_folder import Placed, tensor_places
from fedsilo.protocol.codec import Array, factors_head, factors_pieces, from_bfloat16_bits
from fedsilo.protocol.errors import NotFoundError, UsageError, VerificationError
from fedsilo.protocol.factors import frozen_sha256, is_drawn, is_shift
from policies.schema import LoraSchema

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


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # of the values as they lie in the file


class _Stored(Mapping[str, Array]):
    """The factors of a weights file by the name that a payload has for them, widened to float32, each read when asked
    for."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError: it is no safetensors file, or a tensor is no factor by its name, type or size."""
        self.path = path
        self.places: dict[str, Placed] = {}
        for name, placed in tensor_places(path).items():
            shape, dtype, _, (start, end) = placed
            # one by another name would shadow, or be shadowed by, the one that peft loads
            if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
                raise UsageError(f"{path}: {name[:120]!r} is no factor's name", hint="save a LoRA adapter alone")
            if dtype not in _DTYPES:
                raise UsageError(f"{path}: {name} is {dtype[:16]}", hint=f"save it as one of {', '.join(_DTYPES)}")
            if end - start != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
                raise UsageError(f"{path}: {name} has {end - start} bytes", hint="copy the file again")
            self.places[name[len(_PREFIX) : -len(_SUFFIX)]] = placed

    def __getitem__(self, name: str) -> Array:
        shape, dtype, path, (start, _) = self.places[name]
        found = np.fromfile(path, dtype=_DTYPES[dtype], count=math.prod(shape), offset=start).reshape(shape)
        values: Array = from_bfloat16_bits(found) if dtype == "BF16" else found.astype(np.float32, copy=False)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class _Split(Mapping[str, Array]):
    """Factors of a payload, of which a folder has the base's shift as further rows of A and columns of B."""

    def __init__(self, factors: _Stored, rank: int, further: int) -> None:
        self._factors, self._rank, self._further = factors, rank, further

    def __getitem__(self, name: str) -> Array:
        module, _, side = name.rpartition(".")
        a, values = self._factors[f"{module}.lora_A"], self._factors[f"{module}.lora_{side[-1]}"]
        b = values if side[-1] == "B" else self._factors[f"{module}.lora_B"]
        # a matrix has no higher rank than its sides, and the folder the same rank for all
        last = self._rank + min(self._further, a.shape[1], len(b))
        part = slice(0, self._rank) if side.startswith("lora") else slice(self._rank, last)
        return values[part] if side[-1] == "A" else np.ascontiguousarray(values[:, part])

    def __iter__(self) -> Iterator[str]:
        modules = (name.rpartition(".")[0] for name in self._factors if name.endswith(".lora_A"))
        return (f"{module}.{side}" for module in modules for side in ("lora_A", "lora_B", "shift_A", "shift_B"))

    def __len__(self) -> int:
        return 2 * len(self._factors)


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
        factors = _Stored(weights)
        if wide := sorted(name for name, (_, dtype, *_) in factors.places.items() if dtype != "F32"):
            raise ValueError(f"{wide[0][:64]!r} is not float32")
        further = max(0, int(config["r"]) - rank)  # of the base's shift, which has the same scale
        ours = adapter_config(
            iter(factors),
            rank=rank + further,
            alpha=alpha / rank * (rank + further) if further else alpha,
            base_model=config[BASE_MODEL],
        )
        keys = config.keys() | ours.keys()
        if other := sorted(key for key in keys if config.get(key, ...) != ours.get(key, ...)):
            raise ValueError(f"{CONFIG} says otherwise in {', '.join(other)[:200]}")
        tensors = _Split(factors, rank, further) if further else factors
        header, _ = factors_head(
            tensors,
            base_digest="",
            schema_sha256=lora["schema_sha256"],
            rank=rank,
            scale=alpha / rank,
            dtype="float32",
        )
        for piece in factors_pieces(header, tensors):
            digest.update(piece)
    except NotFoundError:
        raise
    except (
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


# ---- an adapter to start from --------------------------------------------------------------------------------

# Keys of adapter_config.json under which the factors would mean something else than s B A beside a frozen base.
_UNLIKE_OURS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
    "use_rslora",
)
_TRAIN_AGAIN = "a run starts from an adapter of its own schema: `fedsilo policy schema make` says which that is"


@dataclass(frozen=True)
class ImportedAdapter:
    """An adapter folder as `global.adapter` payload.

    Attributes:
        sha256: of the payload.
        l2: norm over all factors.
        frozen_sha256: digest of the factors that the first round fixes; empty where it fixes none.
    """

    sha256: str
    l2: float
    frozen_sha256: str


def import_adapter(folder: Path, schema: LoraSchema, write: Callable[[bytes | memoryview], object]) -> ImportedAdapter:
    """Read a PEFT LoRA folder as the adapter that a run starts from. float16 and bfloat16 are widened, exactly but for
    what is below the smallest normal float32 and becomes 0 (T4). One tensor is in memory at a time.

    Args:
        folder: with both files.
        schema: which the run trains: it must hold exactly these factors, by name and shape.
        write: takes the payload's bytes from front to back.

    Raises:
        NotFoundError: the folder, or a file, is not there.
        UsageError: the schema holds more than a folder does; it is no LoRA adapter, does not fit the schema, or a value
            is not finite; the hint says the mend.
    """
    _check_schema(schema)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise NotFoundError(f"{folder / name} is not there", hint="name a folder as PEFT saves an adapter")
    _check_config(folder / CONFIG, schema)
    tensors = _FoundFactors(folder / WEIGHTS, schema)
    digest = hashlib.sha256()
    for piece in adapter_pieces(schema, tensors):
        digest.update(piece)
        write(piece)
    kept = [name for name, _ in schema.tensors if is_drawn(name, schema.freeze)]
    frozen = frozen_sha256(((name, tensors[name]) for name in kept), schema.freeze)
    return ImportedAdapter(digest.hexdigest(), math.sqrt(tensors.squares), frozen)


def adapter_pieces(schema: LoraSchema, tensors: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an adapter's payload from front to back. tensors: by the schema's names, each read when its
    bytes are due."""
    header, _ = factors_head(
        {name: np.broadcast_to(np.float32(0), shape) for name, shape in schema.tensors},
        base_digest="",
        schema_sha256=schema.digest,
        rank=schema.rank,
        scale=schema.scale,
        dtype="float32",
    )
    yield from factors_pieces(header, tensors)


def _check_schema(schema: LoraSchema) -> None:
    """Raises UsageError: the schema has factors beside A and B, which a folder holds as part of these."""
    for name, _ in schema.tensors:
        if is_shift(name) or not name.endswith((".lora_A", ".lora_B")):
            beside = "a shift of the base (aggregate: fedex, flora)" if is_shift(name) else "a core (fed-sb)"
            raise UsageError(
                f"the federation's LoRA schema has {beside} beside A and B, which an adapter folder holds as part of "
                "them",
                hint="leave start_adapter out, or a federation whose ruleset trains A and B alone, such as fedavg",
            )


def _check_config(path: Path, schema: LoraSchema) -> None:
    """Raises UsageError: what PEFT would do with the factors is not what a run does with them."""
    try:
        config = json.loads(read_regular(path))
        if not isinstance(config, dict):
            raise ValueError("no mapping of keys")
        rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
        unlike = [key for key in _UNLIKE_OURS if config.get(key)]
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no adapter's configuration: {str(error)[:80]}", hint="name a folder as PEFT saves an adapter"
        ) from error
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        unlike += [key for key, ours in (("peft_type", "LORA"), ("bias", "none")) if config.get(key, ours) != ours]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        unlike.append("init_lora_weights")  # PiSSA, OLoRA and their like change the base model, too
    if unlike:
        raise UsageError(
            f"{path}: {unlike[0]} is {str(config.get(unlike[0]))[:40]!r}, and a run trains plain LoRA factors beside "
            "the base model",
            hint="merge what it adds into plain factors, or train it again without",
        )
    for key, value, ours in (("r", rank, schema.rank), ("lora_alpha", alpha, schema.alpha)):
        if type(value) not in (int, float) or value != ours:
            raise UsageError(f"{path}: {key} is {str(value)[:40]}, the run's schema has {ours:g}", hint=_TRAIN_AGAIN)
    if isinstance(targets, list):  # else a pattern, of which the tensors say what it found
        found = {str(each).rpartition(".")[2] for each in targets}
        trained = {_module_of(name).rpartition(".")[2] for name, _ in schema.tensors}
        if found != trained:
            raise UsageError(
                f"{path}: target_modules has {', '.join(sorted(found ^ trained))[:120]} "
                f"{'beyond' if found - trained else 'less than'} the run's schema",
                hint=_TRAIN_AGAIN,
            )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


class _FoundFactors(_Stored):
    """Those of the run's schema.

    Attributes:
        squares: sum of the squares of all values that were read.
    """

    def __init__(self, path: Path, schema: LoraSchema) -> None:
        """Raises UsageError: the file holds other tensors than the schema's, or of other shapes."""
        super().__init__(path)
        self._squares: dict[str, float] = {}
        ours = dict(schema.tensors)
        if differing := sorted(self.places.keys() ^ ours.keys()):
            where = "beyond" if differing[0] in self.places else "missing of"
            raise UsageError(f"{path}: {differing[0][:120]!r} is {where} the run's schema", hint=_TRAIN_AGAIN)
        for name, shape in ours.items():
            if (found := self.places[name][0]) != shape:
                raise UsageError(
                    f"{path}: {name} is {list(found)}, the run's schema has {list(shape)}", hint=_TRAIN_AGAIN
                )

    @property
    def squares(self) -> float:
        return math.fsum(self._squares.values())

    def __getitem__(self, name: str) -> Array:
        values = super().__getitem__(name)
        self._squares[name] = float(np.square(values, dtype=np.float64).sum())
        if not np.isfinite(values).all():
            raise UsageError(
                f"{self.path}: {name} holds a value that is not finite",
                hint="its training diverged: take an earlier checkpoint",
            )
        return values


# ---- the folder as it lies ------------------------------------------------------------------------------------


def further_files(folder: Path) -> list[str]:
    """Names of what else lies in an adapter folder."""
    return sorted(path.name[:64] for path in folder.iterdir() if path.name not in (CONFIG, WEIGHTS))

"""The memory that a trainer will need at its peak, from shapes alone, and whether the machine has it (`silo check`).

A run takes turns between two phases, and the peak is that of the larger: `rollout` (keys and values of answers that are
sampled together, and their logits) and `update` (gradients, what the backward pass needs of each token, one chunk of
logits). Model, adapter and optimiser stay. The terms follow `silo.trainer.decoder`, `step` and
`rollout.embedded`; axes as there. What the terms leave out, what allocators hold back and kernels use as scratch, is
one measured share (`MARGIN`). For small processes on a CPU the estimate beyond the libraries was within 0.75 and 1.35
times the measured peak (`tests/algorithms/test_memory_estimate.py`). On a GPU nothing was measured. What other programs
take comes on top. It decides nothing at run time: a step that runs out of memory fails and is undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsilo.files.model_facts import ModelFacts
from fedsilo.protocol.errors import UsageError
from silo.budgets import CACHE_BYTES, LOGITS_MAX, MICROBATCH_TOKENS, SCORES_MAX

FLOAT32_BYTES = 4
# Measured: a trainer with torch 2.13 and transformers 5.23 whose model is next to nothing, after a step.
LIBRARIES_BYTES = 440 << 20
MARGIN = 0.25  # of all parts but the libraries; fitted to the five processes of the test
# What the CUDA context and the libraries' kernels take of the card; not measured here, from NVIDIA's own figures.
CUDA_CONTEXT_BYTES = 600 << 20
ROOM_UNIT = 8  # `silo.trainer.decoder`
NF4_BLOCK = 64
# Of one vLLM 0.32 CPU server and its two processes, its keys and values and its model left out: measured once, and
# pages that they share are counted more than once.
SERVER_BYTES = 2 << 30
CODE = "MEMORY_TOO_SMALL"
# What drivers of accelerators that torch calls `cuda` put there: NVIDIA's, AMD's, and that of Windows' Linux.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Shapes:
    """The shapes of a run: tokens, prompts and answers. The defaults are those of a plan."""

    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 2048
    evaluation_answers: int = 512 * 4
    rank: int = 32
    shift_rank: int = 0  # of the base's shift, no more than a matrix has; 0: there is none
    with_entropy: bool = False
    source: str = "defaults of a plan"


@dataclass(frozen=True)
class Settings:
    """The settings of a site that memory depends on."""

    load: str = "fp32"
    microbatch_tokens: int = MICROBATCH_TOKENS
    cache_bytes: int = CACHE_BYTES
    checkpointing: bool = False
    on_cuda: bool = False
    samples_here: bool = True  # False: rollout servers do
    servers: int = 0  # rollout servers beside the trainer on this machine
    server_cache_bytes: int = 0  # keys and values of each
    processes: int = 1  # that train together in this memory, each with the whole of the estimate


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak, by part. `rollout` and `update` are the parts that only their phase holds; of rollout servers
    all counts as lasting, asleep or not."""

    lasting: Mapping[str, int]
    rollout: Mapping[str, int]
    update: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        held = sum(self.lasting.values()) + max(sum(self.rollout.values()), sum(self.update.values()))
        apart = sum(self.lasting.get(name, 0) for name in ("libraries", "file pages", "rollout servers"))
        return apart + int((held - apart) * (1 + MARGIN))

    @property
    def phase(self) -> str:
        """Return the phase of the peak."""
        return "update" if sum(self.update.values()) > sum(self.rollout.values()) else "rollout"

    @property
    def parts(self) -> dict[str, int]:
        return {**self.lasting, **self.rollout, **self.update}


def estimate(model: ModelFacts, settings: Settings, shapes: Shapes) -> Estimate:
    """Args:
    model: what is loaded.
    settings: how.
    shapes: what a run asks of it."""
    item = FLOAT32_BYTES if settings.load == "fp32" else 2
    factors = sum(shapes.rank * (rows + columns) for rows, columns in _projections(model))
    lasting = {
        "libraries": LIBRARIES_BYTES + (CUDA_CONTEXT_BYTES if settings.on_cuda else 0),
        # The weights' file as it was read, which the kernel takes back where memory is short.
        "file pages": 0 if settings.on_cuda else model.stored_bytes,
        "model": _model_bytes(model, settings.load, item),
        "adapter": 2 * factors * FLOAT32_BYTES,  # the factors and where they were when the round began
        # two moments; and factors and moments once more, to which a step that fails goes back
        "optimiser": 5 * factors * FLOAT32_BYTES,
        # the factors of the rollout before, in the base's numbers: what the proof of agreement compares with. Servers
        # may be two, each with its own.
        "agreement": factors * item * (1 if settings.samples_here else 2),
    }
    rooms = [rows * _room(parts, shapes.rank) for rows, _, parts in _joined(model)]
    if settings.load == "bf16":
        lasting["room"] = model.layers * sum(rooms) * item  # beside each weight, for its factors
    # The base's weights once more with their shift, and its factors, which are never trained.
    shift = sum(min(shapes.shift_rank, rows, columns) * (rows + columns) for rows, columns in _projections(model))
    if shift:
        weights = model.layers * sum(rows * columns for rows, columns, _ in _joined(model))
        lasting["shifted weights"] = (weights + shift) * FLOAT32_BYTES
    if settings.servers:
        each = SERVER_BYTES + _model_bytes(model, settings.load, item) + settings.server_cache_bytes
        lasting["rollout servers"] = settings.servers * each
    tokens = _tokens_of_a_pass(settings, shapes)
    update = {
        "gradients": factors * FLOAT32_BYTES,
        "activations": _activation_bytes(model, settings, shapes, tokens, item),
        "logits": _logits_bytes(model, shapes, tokens, item),
    }
    if settings.load in ("nf4", "fp8"):
        # the projection at work as plain numbers; as float32 and places in a table on the way there
        update["dequantised"] = max(rows * columns for rows, columns, _ in _joined(model)) * (
            item + FLOAT32_BYTES + (4 if settings.load == "fp8" else 2)
        )
        # and then once more, with room for its factors beside it
        update["joined"] = item * max(
            rows * columns + room for (rows, columns, _), room in zip(_joined(model), rooms, strict=True)
        )
    rows, cache = _rollout_rows(model, settings, shapes, item)
    rollout = {"kv cache": cache}
    if settings.load == "fp32":
        # weights with the factors added to them: one at work in training, all of them while answers are sampled
        sides = [rows * columns for rows, columns, _ in _joined(model)]
        update["merged"], rollout["merged"] = max(sides) * item, model.layers * sum(sides) * item
    rollout |= {
        # logits, their float32 copy, probabilities
        "engine": rows * model.vocabulary * (item + 2 * FLOAT32_BYTES)
        + _prefill_bytes(model, shapes, rows, item)
        + update.get("dequantised", 0)
        + update.get("joined", 0),
    }
    # Between a step's end and the next, on the host: factors, start, moments and what agreement compares with, as
    # copies and as the content of a file, which safetensors has twice for a moment.
    saved = 3 * ((4 * factors + shift) * FLOAT32_BYTES + lasting["agreement"])
    if not settings.on_cuda and saved > sum(update.values()):
        update = {"kept state": saved}
    return Estimate(lasting, rollout if settings.samples_here else {}, update)


def _projections(model: ModelFacts) -> list[tuple[int, int]]:
    D, E = model.hidden, model.head_width
    one = [
        (model.heads * E, D), (model.key_value_heads * E, D), (model.key_value_heads * E, D), (D, model.heads * E),
        (model.intermediate, D), (model.intermediate, D), (D, model.intermediate),
    ]  # fmt: skip
    return one * model.layers


def _joined(model: ModelFacts) -> list[tuple[int, int, int]]:
    """Sides of the weights as the decoder holds them, those of one input in one, and how many are in each."""
    D, E = model.hidden, model.head_width
    wide = (model.heads + 2 * model.key_value_heads) * E
    return [(wide, D, 3), (D, model.heads * E, 1), (2 * model.intermediate, D, 2), (D, model.intermediate, 1)]


def _room(parts: int, rank: int) -> int:
    """Columns beside a weight for the factors of so many, as `silo.trainer.decoder` rounds them up."""
    return -(-parts * rank // ROOM_UNIT) * ROOM_UNIT


def _model_bytes(model: ModelFacts, load: str, item: int) -> int:
    projections = model.projection_numbers
    if load == "nf4":
        inside = projections // 2 + projections // NF4_BLOCK * FLOAT32_BYTES
    elif load == "fp8":
        inside = projections + model.projection_rows * FLOAT32_BYTES
    else:
        inside = projections * item
    return inside + model.other_numbers * item


def _tokens_of_a_pass(settings: Settings, shapes: Shapes) -> int:
    """Tokens that go through the model at once: the budget, a whole step where it is smaller, one answer at least."""
    answers = shapes.prompts_per_step * shapes.samples_per_prompt * shapes.max_new_tokens
    step = answers + shapes.prompts_per_step * shapes.max_prompt_tokens
    return max(min(settings.microbatch_tokens, step), shapes.max_prompt_tokens + shapes.max_new_tokens)


def _activation_bytes(model: ModelFacts, settings: Settings, shapes: Shapes, tokens: int, item: int) -> int:
    D, intermediate = model.hidden, model.intermediate
    queries, keys = model.heads * model.head_width, model.key_value_heads * model.head_width
    # An answer attends to its prompt's keys and values, which are laid out again for each answer.
    repeated = (shapes.max_prompt_tokens + shapes.max_new_tokens) / shapes.max_new_tokens
    normed = model.architecture == "Qwen3ForCausalLM"
    numbers = (
        4 * D  # before and after each of the two norms
        + (queries + 2 * keys if normed else 0)  # before the norms of heads
        + queries + 2 * keys * repeated  # what attention reads
        + 2 * queries  # what it gives, by answer and in the stream
        + 3 * intermediate  # gate, up, and what goes into down
        + (0 if settings.load == "fp32" else 7 * shapes.rank)
    )  # fmt: skip
    layer = int(tokens * numbers) * item
    # What the backward pass of one layer makes besides: gradients of its widest parts, and float32 ones of the norms.
    backward = tokens * ((3 * intermediate + 2 * D) * item + 2 * D * FLOAT32_BYTES)
    masks = min(tokens * (shapes.max_prompt_tokens + shapes.max_new_tokens), SCORES_MAX) * item
    if settings.checkpointing:
        return model.layers * tokens * D * item + layer + backward + masks
    return model.layers * layer + backward + masks


def _logits_bytes(model: ModelFacts, shapes: Shapes, tokens: int, item: int) -> int:
    chunk = min(max(LOGITS_MAX // model.vocabulary, 1), tokens) * model.vocabulary
    held = (2 if shapes.with_entropy else 1) * FLOAT32_BYTES + (item if item < FLOAT32_BYTES else 0)
    return chunk * held + (2 if shapes.with_entropy else 1) * tokens * model.hidden * item


def _rollout_rows(model: ModelFacts, settings: Settings, shapes: Shapes, item: int) -> tuple[int, int]:
    """Answers that are sampled together, and bytes of their keys and values."""
    row = 2 * model.layers * model.key_value_heads * model.head_width * item
    row *= shapes.max_prompt_tokens + shapes.max_new_tokens
    wanted = max(shapes.prompts_per_step * shapes.samples_per_prompt, shapes.evaluation_answers)
    rows = max(min(wanted, settings.cache_bytes // row), 1)
    # while rows that have finished are dropped, one layer's half exists twice
    return rows, rows * row + rows * row // (2 * model.layers)


def _prefill_bytes(model: ModelFacts, shapes: Shapes, rows: int, item: int) -> int:
    """The prompts go through one layer after the other; nothing is kept for a backward pass."""
    prompts = -(-rows // shapes.samples_per_prompt)
    wide = (model.heads + 2 * model.key_value_heads) * model.head_width
    return prompts * shapes.max_prompt_tokens * (2 * wide + 3 * model.intermediate + 4 * model.hidden) * item


# ---- what the machine has ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Memory for trainers. `total_bytes` could be had at best, `free_bytes` can be had now."""

    kind: str  # RAM | CUDA
    total_bytes: int
    free_bytes: int


def machine(devices: str) -> Machine | None:
    """The card's memory where the trainer will use one, else this machine's or this container's; None: not known.

    Args:
        devices: `trainer.devices`.
    """
    if devices != "cpu" and (card := _first_card()) is not None:
        return card
    return None if devices == "cuda" else _ram()


def require_card(devices: str) -> None:
    """Check that `trainer.devices: cuda` can be had; otherwise the trainer would silently train on the CPU.

    What it does not see: a driver that is broken, or a torch that was built for processors alone.

    Raises:
        UsageError: no driver of an accelerator is there, or CUDA_VISIBLE_DEVICES hides all.
    """
    if devices != "cuda":
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip() in ("", "-1")
    if hidden or (not any(glob.glob(each) for each in _DEVICE_FILES) and _first_card() is None):  # noqa: PTH207
        why = "CUDA_VISIBLE_DEVICES hides all" if hidden else "this machine shows no GPU"
        raise UsageError(f"trainer.devices is cuda, and {why}", hint="trainer.devices: auto or cpu", code="NO_GPU")


def _ram() -> Machine | None:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None
    for limit_name, used_name in (
        ("memory.max", "memory.current"),  # of this process's own control group, as seen in a container
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit = int(Path("/sys/fs/cgroup", limit_name).read_text(encoding="ascii"))
            used = int(Path("/sys/fs/cgroup", used_name).read_text(encoding="ascii"))
            total, free = min(total, limit), min(free, max(limit - used, 0))
    return Machine("RAM", total, free)


class _CardMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _first_card() -> Machine | None:
    """Ask the driver's own library, so that the guard needs no torch. The trainer uses the first card it sees."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    place = int(visible) if visible.isdecimal() else 0
    if visible in ("", "-1") or library.nvmlInit_v2() != 0:
        return None
    try:
        handle, found = ctypes.c_void_p(), _CardMemory()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(place), ctypes.byref(handle)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)) != 0:
            return None
        return Machine("CUDA", int(found.total), int(found.free))
    finally:
        library.nvmlShutdown()


# ---- the verdict -------------------------------------------------------------------------------------


def judge(found: Estimate, has: Machine | None, settings: Settings, trainers: int = 1) -> str:
    """A warning where memory is short now; empty where it suffices or is not known.

    Args:
        found: for one trainer.
        has: this machine.
        settings: what the estimate is for.
        trainers: processes that share the machine's memory: silos on this host, and of each its own.

    Raises:
        UsageError: it could not fit even if nothing else ran here; the hint names the keys that lower it.
    """
    if has is None:
        return ""
    wanted = found.peak_bytes * trainers
    together = f" for {trainers} processes" if trainers > 1 else ""
    if wanted > has.total_bytes:
        raise UsageError(
            f"a trainer here needs about {size_text(wanted)}{together}; "
            f"this machine has {size_text(has.total_bytes)} of {has.kind}",
            hint=_fewer(found, has.total_bytes, settings, trainers) or remedy(found, settings),
            code=CODE,
        )
    if wanted > has.free_bytes:
        return (
            f"a trainer here needs about {size_text(wanted)}{together}, and {size_text(has.free_bytes)} of {has.kind} "
            f"are free now; {_fewer(found, has.free_bytes, settings, trainers) or remedy(found, settings)}"
        )
    return ""


def _fewer(found: Estimate, has_bytes: int, settings: Settings, trainers: int) -> str:
    """Where it is the number of processes that asks for too much: one of each silo here would have its memory."""
    if settings.processes == 1 or found.peak_bytes * (trainers // settings.processes) > has_bytes:
        return ""
    return f"lower trainer.processes, which is {settings.processes}"


def remedy(found: Estimate, settings: Settings) -> str:
    """Return which key to lower: that of the largest part which one lowers."""
    largest = max(("model", "kv cache", "engine", "activations", "logits"), key=lambda name: _held(found, name))
    if largest == "model":
        lower = {"fp32": "bf16", "bf16": "nf4", "fp8": "nf4"}.get(settings.load)
        return f"set model.load: {lower}" if lower else "use a smaller model"
    if largest in ("kv cache", "engine"):
        return f"lower trainer.cache_bytes, which is {settings.cache_bytes}"
    if not settings.checkpointing:
        return "set trainer.checkpointing: true, or lower trainer.microbatch_tokens"
    return f"lower trainer.microbatch_tokens, which is {settings.microbatch_tokens}"


def _held(found: Estimate, name: str) -> int:
    return {**found.lasting, **(found.update if found.phase == "update" else found.rollout)}.get(name, 0)


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:.0f} MiB"

"""What the learner's benchmarks share: a random Qwen3 of some 7 million numbers, prompts, and two workers of one task.

A worker is a process of its own, so that its peak memory is its own: each line asks it for a cycle, and each answer has
the seconds. Both sides get the same weights, prompts, rewards and, on the ragged task, answer lengths.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 32, 128
SHORTEST = 16  # tokens of an answer of the ragged task
SIGNAL = 0.6  # share of the ragged task's groups whose rewards differ
WORDS = 4_096
WORDS_LARGE = 32_768
RANK, ALPHA, TEMPERATURE = 32, 64.0, 0.7
PADDING, END_FROM_LAST = 2, 1  # the last two words of the vocabulary are <pad> and <end>
ROOT = Path(__file__).parents[1]
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Task:
    """One row of the comparison. dtype: of the base; factors are float32 on both sides."""

    dtype: str
    ragged: bool = False
    words: int = WORDS

    @property
    def arguments(self) -> list[str]:
        return [f"--dtype={self.dtype}", f"--words={self.words}", *(["--ragged"] if self.ragged else [])]


def make_model(task: Task) -> Any:
    """The same weights in every process."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=task.words, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=task.words - END_FROM_LAST, pad_token_id=task.words - PADDING, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(getattr(torch, task.dtype)).eval()


def shapes_of(model: Any, rank: int = RANK) -> dict[str, tuple[int, ...]]:
    """Shapes of the factors beside every linear layer, by wire name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ADAPTED:
            shapes[f"{name}.lora_A"] = (rank, module.in_features)
            shapes[f"{name}.lora_B"] = (module.out_features, rank)
    return shapes


def adapted_numbers(model: Any) -> int:
    """Return how many weights the adapted layers have."""
    return sum(module.weight.numel() for name, module in model.named_modules() if name.rpartition(".")[2] in ADAPTED)


def load_into_peft(model: Any, factors: Mapping[str, Any]) -> None:
    """Put factors, tensors by wire name, into a model that peft wrapped."""
    import torch

    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, factor in factors.items():
            named[f"base_model.model.{name}.default.weight"].copy_(factor)


def make_prompts(task: Task) -> list[list[int]]:
    import random

    draws = random.Random(1)  # noqa: S311  # no secret
    return [[draws.randrange(3, task.words - 8) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def words_tokenizer(task: Task) -> Any:
    """A word for each number of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = task.words - END_FROM_LAST
    vocabulary = {f"w{number}": number for number in range(task.words - PADDING)} | {"<pad>": end - 1, "<end>": end}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="w0")


def lengths_of(task: Task) -> list[int]:
    """Tokens of each answer, the end token included."""
    import random

    if not task.ragged:
        return [NEW_TOKENS] * (PROMPTS * SAMPLES)
    draws = random.Random(2)  # noqa: S311  # no secret
    return [draws.randint(SHORTEST, NEW_TOKENS) for _ in range(PROMPTS * SAMPLES)]


def rewards_of(task: Task) -> list[float]:
    """Alternating in a group; on the ragged task two groups in five are all right."""
    with_signal = round(PROMPTS * SIGNAL) if task.ragged else PROMPTS
    return [float(place % 2) if place // SAMPLES < with_signal else 1.0 for place in range(PROMPTS * SAMPLES)]


def flops_per_second(task: Task) -> float:
    """The best of some products of the step's largest shape."""
    import torch

    dtype = getattr(torch, task.dtype)
    left, right = torch.randn(8_192, 256, dtype=dtype), torch.randn(256, 1_408, dtype=dtype)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    return 2.0 * 8_192 * 256 * 1_408 / min(seconds)


def worker_environment() -> dict[str, str]:
    """Of a side's process: one thread, and no hub."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
                         "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}  # fmt: skip


class Worker:
    """One side in a process of its own."""

    def __init__(self, module: str, side: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, f"--worker={side}", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            env=worker_environment(),
        )  # fmt: skip

    def cycle(self) -> dict[str, Any]:
        self.begin()
        return self.answer()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("cycle\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            raise SystemExit(f"a worker ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def cycles_of(module: str, task: Task, cycles: int, sides: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return what each side measured, cycle by cycle, in turn; one cycle before warms up."""
    workers = {side: Worker(module, side, *task.arguments) for side in sides}
    try:
        for worker in workers.values():
            worker.cycle()
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in workers}
        for _ in range(cycles):
            for side, worker in workers.items():
                found[side].append(worker.cycle())
    finally:
        for worker in workers.values():
            worker.end()
    return found


def answer_cycles(run: Any) -> None:
    """A worker's loop: one line in, one JSON line out, until the end of input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for _ in sys.stdin:
        figures = run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        out.write(json.dumps({**figures, "peak_bytes": peak}) + "\n")
        out.flush()

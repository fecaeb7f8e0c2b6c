"""Sampling alone, against transformers' `generate` and a vLLM server on this CPU, alternating:
`python -m benchmarks.rollout --json [--cycles 5] [--vllm PYTHON]`.

K = 8 answers of exactly 128 tokens to each of b = 8 prompts of 32 tokens, temperature 0.7: 64 rows. Same weights (a
random Qwen3 of some 7 million numbers), same LoRA (rank 32, every linear layer), one thread each. `generate` gets the
adapter as TRL gives it to it (peft, beside the base), and once merged into the base, which is the fastest it can be.
vLLM (`--vllm`: the python of a virtual environment that has it, see docs/how-to/vllm.md) gets it as its own LoRA.

    ratio_generate_bf16, ratio_generate_fp32    our tokens/s / those of `generate` with the adapter beside the base
    ratio_merged_bf16, ratio_merged_fp32        the same, the adapter merged for `generate` alone
    ratio_vllm_cpu                              our tokens/s / the server's, float32; only with --vllm
    ours_bf16_tokens_per_second, ...            medians; ours_beside_vllm_...: of the cycles that took turns with vLLM
    share_of_flop_limit_fp32                    products no method leaves out / what torch's largest product reaches

The ratio of a row is the median over cycles of the ratio of two that ran one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.learner_model import (
    ADAPTED,
    ALPHA,
    END_FROM_LAST,
    NEW_TOKENS,
    PADDING,
    PROMPT_TOKENS,
    PROMPTS,
    RANK,
    SAMPLES,
    TEMPERATURE,
    WORDS,
    Task,
    adapted_numbers,
    answer_cycles,
    cycles_of,
    flops_per_second,
    load_into_peft,
    make_model,
    make_prompts,
    shapes_of,
    words_tokenizer,
)

VLLM_PYTHON = "FEDSILO_BENCHMARK_VLLM"
TOKENS = PROMPTS * SAMPLES * NEW_TOKENS
REQUIRED = {"ratio_generate_bf16": 2.2}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--cycles", type=int, default=5, help="of each side, after one that warms up")
    parser.add_argument("--vllm", type=Path, help="python of an environment that has vLLM")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--words", type=int, default=WORDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answer_cycles(SIDES[options.worker](Task(options.dtype, words=options.words)))
        return 0
    figures: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        found = cycles_of("benchmarks.rollout", Task(dtype), options.cycles, ["ours", "beside", "merged"])
        figures |= {**figures_of(name, found), **share_of_limit(name, found["ours"])}
    if options.vllm is not None:
        os.environ[VLLM_PYTHON] = str(options.vllm)
        found = cycles_of("benchmarks.rollout", Task("float32"), options.cycles, ["ours", "vllm"])
        figures |= figures_of("fp32", found, ours="ours_beside_vllm")
    kept = {name: figures[name] >= least for name, least in REQUIRED.items()}
    conditions = {
        "rows": PROMPTS * SAMPLES, "tokens": [PROMPT_TOKENS, NEW_TOKENS], "rank": RANK, "cycles": options.cycles,
        "threads": 1, "words": WORDS, "required": REQUIRED, "kept": kept,
    }  # fmt: skip
    print(json.dumps({"name": "rollout", "figures": figures, "conditions": conditions}))
    return 0 if all(kept.values()) else 1


RATIOS = {"beside": "ratio_generate", "merged": "ratio_merged", "vllm": "ratio_vllm_cpu"}


def figures_of(name: str, found: dict[str, list[dict[str, Any]]], *, ours: str = "ours") -> dict[str, Any]:
    """Ratios to our side and tokens per second. name: bf16 | fp32; ours: what our own figures are called here."""
    figures: dict[str, Any] = {}
    for side in (side for side in found if side != "ours"):
        pairs = zip(found[side], found["ours"], strict=True)
        ratio = statistics.median(their["seconds"] / our["seconds"] for their, our in pairs)
        figures[RATIOS[side] + ("" if side == "vllm" else f"_{name}")] = round(ratio, 3)
    for side, answers in found.items():
        seconds = statistics.median(each["seconds"] for each in answers)
        figures[f"{ours if side == 'ours' else side}_{name}_tokens_per_second"] = round(TOKENS / seconds)
    return figures


def share_of_limit(name: str, cycles: list[dict[str, Any]]) -> dict[str, Any]:
    """In float32, in which the machine's limit is measured. cycles: ours."""
    if name != "fp32":
        return {}
    shares = (each["useful_flops"] / each["seconds"] / each["flops_per_second"] for each in cycles)
    return {"share_of_flop_limit_fp32": round(statistics.median(shares), 3)}


def factors_of(model: Any) -> dict[str, Any]:
    """The same adapter on every side, by wire name: A as peft draws it, B small, so that the product is not zero."""
    import torch

    torch.manual_seed(1)
    found = {}
    for name, shape in shapes_of(model).items():
        if name.endswith("lora_A"):
            found[name] = torch.nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5)
        else:
            found[name] = torch.randn(shape) * 1e-3
    return found


def adapter_of(model: Any) -> Any:
    """The adapter in a model, as a silo's trainer has it."""
    from silo.trainer.adapters.lora import LoraAdapter, LoraShape

    factors = factors_of(model)
    adapter = LoraAdapter(model, LoraShape(RANK, ALPHA, {name: tuple(each.shape) for name, each in factors.items()}))
    adapter.load({name: each.numpy() for name, each in factors.items()})
    return adapter


def sampling(engine: Any, task: Task, more: Callable[[], dict[str, Any]] = dict) -> Any:
    """A cycle of one of our engines. more: figures beside the seconds."""
    import numpy as np

    from silo.trainer.rollout.engine import Question

    prompts, number = make_prompts(task), 0

    def cycle() -> dict[str, Any]:
        nonlocal number
        number += 1
        questions = [
            Question(tuple(prompt), tuple(np.random.default_rng([number, place, each]) for each in range(SAMPLES)))
            for place, prompt in enumerate(prompts)
        ]
        started = time.perf_counter()
        rollouts = engine.generate(questions, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)
        seconds = time.perf_counter() - started
        assert sum(len(one.ids) for row in rollouts for one in row) == TOKENS
        return {"seconds": seconds, **more()}

    return cycle


# ---- ours --------------------------------------------------------------------------------------------


def ours(task: Task) -> Any:
    import torch

    from silo.trainer.rollout.embedded import EmbeddedEngine

    torch.set_num_threads(1)
    model = make_model(task)
    adapter = adapter_of(model)
    numbers, head = adapted_numbers(model), model.lm_head.weight.numel()
    flops = 2.0 * (numbers * (TOKENS + PROMPTS * PROMPT_TOKENS) + head * TOKENS)
    return sampling(
        EmbeddedEngine(adapter.decoder, stop_ids=()),
        task,
        lambda: {"useful_flops": flops, "flops_per_second": flops_per_second(task)},
    )


# ---- transformers ------------------------------------------------------------------------------------


def with_peft(task: Task) -> Any:
    """The model with the adapter beside it, as peft makes it. Returns (peft model, prompts [b, L])."""
    import peft
    import torch

    torch.set_num_threads(1)
    model = make_model(task)
    factors = factors_of(model)
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTED), task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, settings).eval()
    load_into_peft(wrapped, factors)
    return wrapped, torch.tensor(make_prompts(task))


def generating(model: Any, prompts: Any, task: Task) -> Any:
    import torch

    rows = prompts.repeat_interleave(SAMPLES, 0)
    number = 0

    def cycle() -> dict[str, Any]:
        nonlocal number
        number += 1
        torch.manual_seed(number)
        started = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                input_ids=rows, attention_mask=torch.ones_like(rows), do_sample=True, temperature=TEMPERATURE,
                top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                pad_token_id=task.words - PADDING, eos_token_id=task.words - END_FROM_LAST,
            )  # fmt: skip
        seconds = time.perf_counter() - started
        assert found.shape == (PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS)
        return {"seconds": seconds}

    return cycle


def beside(task: Task) -> Any:
    model, prompts = with_peft(task)
    return generating(model, prompts, task)


def merged(task: Task) -> Any:
    model, prompts = with_peft(task)
    return generating(model.merge_and_unload(), prompts, task)


# ---- vLLM --------------------------------------------------------------------------------------------


def vllm(task: Task) -> Any:
    """The server as a silo's guard starts it, asked as a silo's trainer asks it; its start is not counted."""
    import atexit

    import torch

    from silo.config import Model, Rollout, SiloConfig, Trainer
    from silo.guard.trainer_process import probing
    from silo.guard.trainer_process.rollout_server import RolloutServers
    from silo.trainer.rollout.engine import RolloutPlace
    from silo.trainer.rollout.vllm_server import VllmEngine

    torch.set_num_threads(1)
    model = make_model(task)
    home = Path(tempfile.mkdtemp(prefix="fs-vllm-"))
    model.save_pretrained(home / "model")
    words_tokenizer(task).save_pretrained(home / "model")
    socket = home / "run" / "server.sock"
    url = f"unix:{socket}"
    config = SiloConfig.model_construct(
        state_dir=home, silos_on_this_host=1, model=Model(path=home / "model"),
        trainer=Trainer(devices="cpu", threads=1),
        rollout=Rollout(
            url=url, public_url=url, python=Path(os.environ[VLLM_PYTHON]).absolute(), max_lora_rank=RANK,
            max_model_tokens=512, kv_cache_bytes=1 << 30,
        ),
    )  # fmt: skip
    level = "namespaces" if probing.best_level() == "namespaces" else "waived"
    servers = RolloutServers(
        config,
        level=level,
        never=[],
    )
    servers.start()
    atexit.register(servers.stop)
    servers.wait_ready()
    adapter = adapter_of(model)
    engine = VllmEngine(
        adapter, RolloutPlace(socket, socket, servers.adapters, 600.0), stop_ids=(), vocabulary=task.words
    )
    engine.use("private")
    return sampling(engine, task)


SIDES = {"ours": ours, "beside": beside, "merged": merged, "vllm": vllm}


if __name__ == "__main__":
    sys.exit(main())

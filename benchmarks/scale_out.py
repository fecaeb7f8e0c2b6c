"""How much faster two processes of a trainer are than one: `python -m benchmarks.scale_out --json`.

One step of the 7 M-parameter Qwen3 of `learner_model` on its dense batch in float32: answers sampled, and two epochs
of the update. One thread a process, on the CPU. The limit that the machine itself sets is measured beside it: two
processes that know nothing of each other do the same work at the same time, and share cores, caches and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.learner_model import (
    ALPHA,
    NEW_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    RANK,
    SAMPLES,
    TEMPERATURE,
    Task,
    Worker,
    answer_cycles,
    make_model,
    make_prompts,
    rewards_of,
    shapes_of,
)

TASK = Task("float32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted; the answer is JSON in any case")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answer_cycles(shared_cycle(**json.loads(options.worker)))
        return 0
    print(json.dumps({"name": "scale_out", **measured(options.cycles)}))
    return 0


class Side:
    """Some processes that get their lines together; a cycle lasts until the last has answered."""

    def __init__(self, *orders: dict[str, Any]) -> None:
        self._workers = [Worker("benchmarks.scale_out", json.dumps(order)) for order in orders]

    def cycle(self) -> tuple[float, list[dict[str, Any]]]:
        started = time.perf_counter()
        for worker in self._workers:
            worker.begin()
        answers = [worker.answer() for worker in self._workers]
        return time.perf_counter() - started, answers

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


def measured(cycles: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:

        def pair(name: str, **more: Any) -> Side:
            (Path(folder) / name).mkdir()
            meet = f"file://{folder}/{name}/store"
            return Side(*({"rank": rank, "size": 2, "rendezvous": meet, **more} for rank in range(2)))

        sides = {
            "one": Side({}), "two": pair("two"), "sharded": pair("sharded", shard=True),
            "one_checkpointing": Side({"checkpointing": True}), "strangers": Side({}, {}),
        }  # fmt: skip
        try:
            for side in sides.values():
                side.cycle()  # warms up
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            last: dict[str, list[dict[str, Any]]] = {}
            for _ in range(cycles):
                for name, side in sides.items():
                    took, last[name] = side.cycle()
                    seconds[name].append(took)
        finally:
            for side in sides.values():
                side.end()
    found = {name: statistics.median(values) for name, values in seconds.items()}
    figures: dict[str, Any] = {
        "speed_up": round(statistics.median(a / b for a, b in zip(seconds["one"], seconds["two"], strict=True)), 3),
        "speed_up_limit": round(2 * found["one"] / found["strangers"], 3),
        "speed_up_sharded": round(found["one_checkpointing"] / found["sharded"], 3),
        **{f"{name}_seconds": round(value, 3) for name, value in found.items()},
        "one_split": last["one"][0]["split"],
        "two_split": last["two"][0]["split"],
        "weights_bytes": last["one"][0]["weights_bytes"],
        "weights_bytes_sharded": last["sharded"][0]["weights_bytes"],
    }
    conditions = {
        "prompts": PROMPTS, "samples": SAMPLES, "tokens": [PROMPT_TOKENS, NEW_TOKENS], "rank": RANK, "epochs": 2,
        "threads_of_a_process": 1, "cores": len(os.sched_getaffinity(0)), "cycles": cycles, "backend": "gloo",
        "dtype": TASK.dtype,
    }  # fmt: skip
    return {"figures": figures, "conditions": conditions}


def shared_cycle(
    rank: int = 0, size: int = 1, rendezvous: str = "", *, shard: bool = False, checkpointing: bool = False
) -> Any:
    import contextlib

    import numpy as np
    import torch

    from silo.trainer.adapters.lora import LoraAdapter, LoraShape
    from silo.trainer.grpo import Answer, Group, Learner
    from silo.trainer.rollout.embedded import EmbeddedEngine
    from silo.trainer.rollout.engine import Question, shared_engine
    from silo.trainer.scale_out import Place, Processes
    from silo.trainer.sharding import ShardedBase
    from tests.algorithms.tiny import make_plan

    torch.set_num_threads(1)
    group = Processes(Place(rank, size, rendezvous)) if size > 1 else None
    model = make_model(TASK)
    shapes = shapes_of(model)
    adapter = LoraAdapter(model, LoraShape(RANK, ALPHA, shapes))
    draws = np.random.default_rng(0)
    adapter.load({
        name: (draws.standard_normal(sides) / sides[1] ** 0.5 if name.endswith("A") else np.zeros(sides))
        for name, sides in sorted(shapes.items())
    })  # fmt: skip
    weights = sum(each.numel() * each.element_size() for name, each in model.named_parameters() if "_proj" in name)
    shards = ShardedBase(adapter.decoder, model, group) if shard and group is not None else None
    plan = make_plan(
        samples_per_prompt=SAMPLES, prompts_per_step=PROMPTS, optimiser={"learning_rate": 1e-5, "epochs": 2},
        objective={"kl_coefficient": 0.0}, rollout={"temperature": TEMPERATURE, "max_prompt_tokens": PROMPT_TOKENS,
                                                    "max_new_tokens": NEW_TOKENS},
    )  # fmt: skip
    engine = shared_engine(
        lambda: EmbeddedEngine(adapter.decoder, stop_ids=()), group, server=False,
        whole=contextlib.nullcontext if shards is None else shards.whole,
    )  # fmt: skip
    learner = Learner(
        adapter, plan, microbatch_tokens=1 << 20, checkpointing=checkpointing or shards is not None, group=group,
        equal_passes=shards is not None,
    )  # fmt: skip
    prompts, rewards = make_prompts(TASK), rewards_of(TASK)
    number = 0

    def cycle() -> dict[str, Any]:
        nonlocal number
        number += 1
        started = time.perf_counter()
        questions = [
            Question(tuple(prompt), tuple(np.random.default_rng([number, place, k]) for k in range(SAMPLES)))
            for place, prompt in enumerate(prompts)
        ]
        rollouts = engine.generate(questions, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)
        rolled = time.perf_counter()
        scores = iter(rewards)
        groups = [
            Group(tuple(prompt), tuple(Answer(one.ids, "", one.finished, next(scores)) for one in row))
            for prompt, row in zip(prompts, rollouts, strict=True)
        ]
        learner.update(groups)
        ended = time.perf_counter()
        return {
            "split": {"rollout": round(rolled - started, 3), "update": round(ended - rolled, 3)},
            "weights_bytes": weights if shards is None else shards.share_bytes,
        }

    return cycle


if __name__ == "__main__":
    sys.exit(main())

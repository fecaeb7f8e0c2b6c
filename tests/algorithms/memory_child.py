"""A small trainer in a process of its own: says how much memory it held at its peak.

Arguments: model folder, load type, 1 for checkpointing, new tokens, budget of the cache in bytes. Prints how many
bytes were resident at most until the end of a step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fedsilo.treaty.method import LoadAdapter, PrivateStep
from silo.trainer.quantised import load_quantised
from silo.trainer.session import Material
from silo.trainer.worker import load_model
from tests.algorithms import tiny

PROMPTS, SAMPLES, PROMPT_TOKENS = 4, 4, 16


def held(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    folder, load, checkpointing, new_tokens, cache_bytes = sys.argv[1:]
    torch.set_num_threads(1)
    base = load_quantised(Path(folder), load) if load in ("nf4", "fp8") else load_model(Path(folder), load)  # type: ignore[arg-type]
    plan = tiny.make_plan(
        prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, rollout__max_prompt_tokens=PROMPT_TOKENS,
        rollout__max_new_tokens=int(new_tokens), objective__kl_coefficient=1e-3,  # so that every answer is trained on
    )  # fmt: skip
    grade: Any = lambda pairs: [place % 2 == 0 for place, _ in enumerate(pairs)]  # noqa: E731
    rows = [tiny.Row(f"p{place}", "abcdefgh" * 2, "1") for place in range(8)]
    shape = tiny.make_shape(base)
    material = Material(
        silo="a", model=base, codec=tiny.make_codec(), private=rows, public=rows, held_out=rows, private_grader=grade,
        public_grader=grade, held_out_grader=grade, site_secret=b"secret", microbatch_tokens=16384,
        cache_bytes=int(cache_bytes), checkpointing=checkpointing == "1",
    )  # fmt: skip
    session = tiny.GuidedSession(material)
    session.begin_run(plan, shape)
    payload, digest = tiny.start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    done = session.carry_out(PrivateStep(1, 1))
    assert done.metrics["trained_tokens"] > 0
    print(held("VmHWM"))


if __name__ == "__main__":
    main()

"""Small trainers, each in a process of its own: say how much memory each held at its peak.

Argument: a JSON list of jobs, each {folder, load, checkpointing, new_tokens, cache_bytes}. Prints the peaks in bytes,
in the same order: what was resident at most until the end of a step. The libraries are loaded once, since that takes
longer than most jobs: each job but the last is a fork of the process that loaded them, and the last is that process
itself. A fork begins without the libraries' files, which are not its own memory, and counts those pages it touches.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
from silo.trainer.quantised import load_quantised
from silo.trainer.run import Material
from silo.trainer.worker import load_model
from tests.algorithms import tiny

PROMPTS, SAMPLES, PROMPT_TOKENS = 4, 4, 16


def held(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_of(folder: str, load: str, checkpointing: bool, new_tokens: int, cache_bytes: int) -> int:
    base = load_quantised(Path(folder), load) if load in ("nf4", "fp8") else load_model(Path(folder), load)  # type: ignore[arg-type]
    plan = tiny.make_plan(
        prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, rollout__max_prompt_tokens=PROMPT_TOKENS,
        rollout__max_new_tokens=new_tokens, objective__kl_coefficient=1e-3,  # so that every answer is trained on
    )  # fmt: skip
    grade: Any = lambda pairs: [place % 2 == 0 for place, _ in enumerate(pairs)]  # noqa: E731
    rows = [tiny.Row(f"p{place}", "abcdefgh" * 2, "1") for place in range(8)]
    shape = tiny.make_shape(base)
    material = Material(
        silo="a", model=base, codec=tiny.make_codec(), private=rows, public=rows, held_out=rows, private_grader=grade,
        public_grader=grade, held_out_grader=grade, site_secret=b"secret", microbatch_tokens=16384,
        cache_bytes=cache_bytes, checkpointing=checkpointing,
    )  # fmt: skip
    session = tiny.GuidedSession(material)
    session.begin_run(plan, shape)
    payload, digest = tiny.start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    done = session.carry_out(PrivateStep(1, 1))
    assert done.metrics["trained_tokens"] > 0
    return held("VmHWM")


def in_a_fork(job: dict[str, Any]) -> int:
    """Nothing was computed before, so that no thread of torch is missed in the fork."""
    read, write = os.pipe()
    number = os.fork()
    if number == 0:
        os.write(write, str(peak_of(**job)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        found = said.read()
    assert os.waitpid(number, 0)[1] == 0
    return int(found)


def main() -> None:
    *forked, last = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    assert AutoModelForCausalLM  # loaded by now, for all
    peaks = [in_a_fork(job) for job in forked]
    print(json.dumps([*peaks, peak_of(**last)]))


if __name__ == "__main__":
    main()

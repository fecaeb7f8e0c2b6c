"""200 private steps on the demo's task, ours and TRL's `GRPOTrainer`: `python -m benchmarks.grpo_curve --json`.

One silo that holds the private prompts of all four, the demo's model of 0.3 million numbers and its settings: 8 prompts
a step, 8 answers each, two epochs, LoRA rank 16 on every linear layer, learning rate 1e-3, temperature 1, KL 0. Both
sides take the same prompts in the same order, start from the same factors and are graded by the same verifier; only the
draws of the answers differ. A side and seed is a process of its own, one torch thread, sides in turn.

    reward_ours, reward_trl          mean reward of the last 50 steps, over seeds
    reward_difference                ours - TRL's, mean over seeds, with the 95 % interval of the paired differences
    ratio_seconds                    TRL's seconds for all steps / ours, median over seeds; start-up is not counted
    curve_ours, curve_trl            mean reward of each 20 steps, over seeds

Required: faster, and as good: the lower end of that interval is at least -0.02, so TRL's is not better by more than
one answer in fifty. Less could not be told by five seeds: with 64 answers a step, half of them correct, chance alone
moves the mean of 50 steps by 0.009 on either side, so that where nothing differs the interval is still +-0.015 wide.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.learner_model import ADAPTED, ROOT, load_into_peft, shapes_of, worker_environment

STEPS, PROMPTS, SAMPLES, LAST = 200, 8, 8, 50
RANK, ALPHA, LEARNING_RATE = 16, 32.0, 1e-3
PROMPT_TOKENS, NEW_TOKENS = 8, 6
BIN = 20
REWARD_MARGIN = 0.02
SEEDS_MIN = 2  # one has no interval
# Two-sided 95 % of Student's t by degrees of freedom from 1 (any table). Beyond the last it is taken, which is wider.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        found = {"ours": ours, "trl": theirs}[options.worker](options.seeds[0], options.steps)
        sys.__stdout__.write("\n" + json.dumps(found) + "\n")
        return 0
    if len(set(options.seeds)) < max(SEEDS_MIN, len(options.seeds)):
        parser.error(f"--seeds: at least {SEEDS_MIN}, each once")
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for seed in options.seeds:
        for side, found in sides.items():
            found.append(measured(side, seed, options.steps))
    last = min(LAST, options.steps)
    rewards = {side: [statistics.mean(each["rewards"][-last:]) for each in found] for side, found in sides.items()}
    differences = [our - their for our, their in zip(rewards["ours"], rewards["trl"], strict=True)]
    mean, half = statistics.mean(differences), half_width(differences)
    ratio = statistics.median(
        their["seconds"] / our["seconds"] for our, their in zip(sides["ours"], sides["trl"], strict=True)
    )
    figures: dict[str, Any] = {
        **{f"reward_{side}": round(statistics.mean(each), 4) for side, each in rewards.items()},
        "reward_difference": [round(mean, 4), round(mean - half, 4), round(mean + half, 4)],
        "ratio_seconds": round(ratio, 3),
        **{f"seconds_{side}": round(statistics.median(each["seconds"] for each in found), 1)
           for side, found in sides.items()},
        **{f"curve_{side}": curve(found) for side, found in sides.items()},
    }  # fmt: skip
    kept = {"reward": is_as_good(differences), "faster": ratio > 1}
    conditions = {
        "steps": options.steps, "seeds": options.seeds, "prompts": PROMPTS, "samples": SAMPLES, "threads": 1,
        "learning_rate": LEARNING_RATE, "reward_margin": REWARD_MARGIN, "kept": kept,
    }  # fmt: skip
    print(json.dumps({"name": "grpo_curve", "figures": figures, "conditions": conditions}))
    return 0 if all(kept.values()) else 1


def half_width(differences: list[float]) -> float:
    """Of the 95 % interval of the mean. differences: one a seed, two at least."""
    student = STUDENT[min(len(differences) - 1, len(STUDENT)) - 1]
    return student * statistics.stdev(differences) / math.sqrt(len(differences))


def is_as_good(differences: list[float]) -> bool:
    """Not worse by more than the margin, as far as the seeds can tell. differences: ours - TRL's, one a seed."""
    return statistics.mean(differences) - half_width(differences) >= -REWARD_MARGIN


def curve(found: list[dict[str, Any]]) -> list[float]:
    steps = len(found[0]["rewards"])
    return [
        round(statistics.mean(reward for each in found for reward in each["rewards"][start : start + BIN]), 3)
        for start in range(0, steps, BIN)
    ]


def measured(side: str, seed: int, steps: int) -> dict[str, Any]:
    arguments = ["-m", "benchmarks.grpo_curve", f"--worker={side}", f"--seeds={seed}", f"--steps={steps}"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, cwd=ROOT,
        env=worker_environment(), check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{side}, seed {seed}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# ---- what both sides share ---------------------------------------------------------------------------


def make_task(seed: int, steps: int) -> tuple[Any, Any, list[Any], list[list[int]]]:
    """(model folder, tokenizer, rows, the rows of each step)."""
    import numpy as np
    from transformers import AutoTokenizer

    from fedsilo.demo.data import make_digit_set
    from fedsilo.demo.tiny_model import cached_model, recipe_for

    folder = cached_model(recipe_for("digits"))
    made = make_digit_set(seed)
    rows = [row for part in made.private.values() for row in part]
    draws = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < steps * PROMPTS:
        order += draws.permutation(len(rows)).tolist()
    chosen = [order[step * PROMPTS : (step + 1) * PROMPTS] for step in range(steps)]
    return folder, AutoTokenizer.from_pretrained(folder), rows, chosen


def start_factors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """A as peft draws it, B zero."""
    import numpy as np

    draws = np.random.default_rng(seed)
    return {
        name: (draws.uniform(-1, 1, sides) / math.sqrt(sides[1]) if name.endswith("lora_A") else np.zeros(sides))
        .astype(np.float32)
        for name, sides in sorted(shapes.items())
    }  # fmt: skip


def correct(text: str, reference: str) -> bool:
    from fedsilo.grading import grade

    return grade("exact", text, reference).correct


def load(folder: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# ---- ours --------------------------------------------------------------------------------------------


def ours(seed: int, steps: int) -> dict[str, Any]:
    from fedsilo.protocol.codec import encode_factors
    from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
    from silo.trainer.adapters.lora import LoraShape
    from silo.trainer.data import TextCodec
    from silo.trainer.run import Material
    from silo.trainer.session import Session
    from tests.algorithms.tiny import Row, make_plan

    folder, tokenizer, rows, chosen = make_task(seed, steps)
    model = load(folder)
    plan = make_plan(
        method="fedavg", local_steps=steps, prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, seed=seed,
        objective={"kl_coefficient": 0.0, "advantage_epsilon": 1e-4}, optimiser={"learning_rate": LEARNING_RATE},
        rollout={"temperature": 1.0, "max_prompt_tokens": PROMPT_TOKENS, "max_new_tokens": NEW_TOKENS},
    )  # fmt: skip
    tasks = [Row(row["id"], row["prompt"], row["answer"], row["topic"]) for row in rows]

    def grade_pairs(pairs: Any) -> list[bool]:
        return [correct(text, reference) for text, reference in pairs]

    session = Session(
        Material(
            silo="a", model=model, codec=TextCodec(tokenizer), private=tasks, public=tasks[:10], held_out=tasks[:10],
            private_grader=grade_pairs, public_grader=grade_pairs, held_out_grader=grade_pairs,
            site_secret=f"seed {seed}".encode(),
        )
    )  # fmt: skip
    shape = LoraShape(RANK, ALPHA, shapes_of(model, RANK))
    session.begin_run(plan, shape)
    payload = encode_factors(
        start_factors(dict(shape.shapes), seed), base_digest="", schema_sha256="0" * 64, rank=RANK, scale=shape.scale,
        dtype="float32",
    )  # fmt: skip
    session.carry_out(LoadAdapter(1, "0" * 64), payload)
    rewards = []
    started = time.perf_counter()
    for step, each in enumerate(chosen, 1):
        rewards.append(session.carry_out(PrivateStep(1, step, tuple(each))).metrics["reward_mean"])
    return {"seconds": time.perf_counter() - started, "rewards": rewards}


# ---- TRL ---------------------------------------------------------------------------------------------


def theirs(seed: int, steps: int) -> dict[str, Any]:
    import contextlib
    import io

    import datasets
    import peft
    import torch
    import trl

    folder, tokenizer, rows, chosen = make_task(seed, steps)
    model = load(folder)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    factors = start_factors(shapes_of(model, RANK), seed)
    # the order of the data set is the order of the steps: the sampler repeats each prompt, and shuffles nothing
    prompts = [rows[place] for each in chosen for place in each]
    rewards: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        given = [float(correct(text, reference)) for text, reference in zip(completions, answer, strict=True)]
        rewards.append(statistics.mean(given))
        return given

    arguments = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=PROMPTS * SAMPLES, gradient_accumulation_steps=1, num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS, beta=0.0, loss_type="grpo", scale_rewards="group", num_iterations=2,
        temperature=1.0, epsilon=0.2, epsilon_high=0.25, learning_rate=LEARNING_RATE, weight_decay=0.01,
        lr_scheduler_type="constant", max_grad_norm=1.0, shuffle_dataset=False, max_steps=2 * steps, seed=seed,
        logging_steps=10 * steps, save_strategy="no", disable_tqdm=True, adam_beta2=0.999,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": row["prompt"], "answer": row["answer"]} for row in prompts]
        ),
        peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTED), task_type="CAUSAL_LM"),
    )  # fmt: skip
    load_into_peft(trainer.model, {name: torch.from_numpy(factor) for name, factor in factors.items()})
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return {"seconds": time.perf_counter() - started, "rewards": rewards[:steps]}


if __name__ == "__main__":
    sys.exit(main())

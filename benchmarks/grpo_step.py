"""One GRPO step against TRL's GRPOTrainer, alternating: `python -m benchmarks.grpo_step --json [--cycles 3]`.

A cycle is what a step costs a silo: K = 8 answers to each of b = 8 prompts (32 + 128 tokens), then two update epochs.
Same weights, prompts, rewards, LoRA (rank 32, every linear layer), loss (`grpo`), temperature 0.7, KL 0, AdamW, one
thread each, plain transformers as TRL's back end.

    ratio_dense_fp32, ratio_dense_bf16   TRL's seconds for a cycle / ours, every answer of full length
    ratio_ragged                         lengths 16 to 128, two groups in five without signal, float32
    ratio_large_vocabulary               32,768 words in place of 4,096, float32
    peak_memory_ratio                    our process's peak / TRL's, dense, float32, the libraries' own share included
    share_of_flop_limit                  our useful products / what torch's largest product reaches here, dense, float32
    SIDE_ROW_seconds                     medians

The ratio of a row is the median over cycles of the ratio of two that ran one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks.learner_model import (
    ADAPTED,
    ALPHA,
    END_FROM_LAST,
    NEW_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    RANK,
    SAMPLES,
    TEMPERATURE,
    WORDS,
    WORDS_LARGE,
    Task,
    adapted_numbers,
    answer_cycles,
    cycles_of,
    flops_per_second,
    lengths_of,
    make_model,
    make_prompts,
    rewards_of,
    shapes_of,
    words_tokenizer,
)

ROWS = {
    "dense_fp32": Task("float32"),
    "dense_bf16": Task("bfloat16"),
    "ragged": Task("float32", ragged=True),
    "large_vocabulary": Task("float32", words=WORDS_LARGE),
}
REQUIRED = {"ratio_dense_fp32": 1.6, "ratio_dense_bf16": 2.0, "ratio_ragged": 2.5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--cycles", type=int, default=3, help="of each side, after one that warms up")
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--words", type=int, default=WORDS, help=argparse.SUPPRESS)
    parser.add_argument("--ragged", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        task = Task(options.dtype, options.ragged, options.words)
        answer_cycles({"ours": ours, "trl": theirs}[options.worker](task))
        return 0
    figures: dict[str, Any] = {}
    for row, task in ROWS.items():
        if options.only in (None, row):
            figures |= compared(row, task, options.cycles)
    kept = {name: figures[name] >= least for name, least in REQUIRED.items() if name in figures}
    conditions = {
        "prompts": PROMPTS, "samples": SAMPLES, "tokens": [PROMPT_TOKENS, NEW_TOKENS], "rank": RANK, "epochs": 2,
        "cycles": options.cycles, "threads": 1, "required": REQUIRED, "kept": kept,
    }  # fmt: skip
    print(json.dumps({"name": "grpo_step", "figures": figures, "conditions": conditions}))
    return 0 if all(kept.values()) else 1


def compared(row: str, task: Task, cycles: int) -> dict[str, Any]:
    found = cycles_of("benchmarks.grpo_step", task, cycles, ("ours", "trl"))
    pairs = zip(found["trl"], found["ours"], strict=True)
    figures: dict[str, Any] = {
        f"ratio_{row}": round(statistics.median(their["seconds"] / our["seconds"] for their, our in pairs), 3)
    }
    for side, answers in found.items():
        figures[f"{side}_{row}_seconds"] = round(statistics.median(each["seconds"] for each in answers), 3)
    figures[f"ours_{row}_split"] = found["ours"][-1]["split"]
    if row == "dense_fp32":
        figures["parameters"] = found["ours"][-1]["parameters"]
        figures["peak_memory_ratio"] = round(found["ours"][-1]["peak_bytes"] / found["trl"][-1]["peak_bytes"], 3)
        shares = (each["useful_flops"] / each["seconds"] / each["flops_per_second"] for each in found["ours"])
        figures["share_of_flop_limit"] = round(statistics.median(shares), 3)
        figures["flop_limit_per_second"] = round(found["ours"][-1]["flops_per_second"])
    return figures


# ---- ours --------------------------------------------------------------------------------------------


class Numbers:
    """A source of draws for one answer of a given length: the end token has the last share of the unit interval."""

    def __init__(self, seed: int, length: int) -> None:
        import numpy as np

        self._draws = np.random.default_rng(seed)
        self._left = length

    def random(self, count: int) -> Any:
        values = self._draws.random(count) * 0.99  # not the end token, whose share is about a 4,096th
        if 0 < self._left <= count:
            values[self._left - 1] = 1.0 - 2.0**-53
        self._left -= count
        return values


def ours(task: Task) -> Any:
    import torch

    from silo.trainer.adapters.lora import LoraAdapter, LoraShape
    from silo.trainer.grpo import Answer, Group, Learner
    from silo.trainer.rollout.embedded import EmbeddedEngine
    from silo.trainer.rollout.engine import Question
    from tests.algorithms.tiny import make_plan

    torch.set_num_threads(1)
    model = make_model(task)
    adapter = LoraAdapter(model, LoraShape(RANK, ALPHA, shapes_of(model)))
    with torch.no_grad():
        for name, factor in adapter.factors.items():
            if name.endswith("lora_A"):
                torch.nn.init.kaiming_uniform_(factor, a=5**0.5)  # as peft draws it
    plan = make_plan(
        samples_per_prompt=SAMPLES, prompts_per_step=PROMPTS, optimiser={"learning_rate": 1e-5, "epochs": 2},
        objective={"kl_coefficient": 0.0, "advantage_epsilon": 1e-4},
        rollout={"temperature": TEMPERATURE, "max_prompt_tokens": PROMPT_TOKENS, "max_new_tokens": NEW_TOKENS},
    )  # fmt: skip
    end = task.words - END_FROM_LAST
    stops = (end,) if task.ragged else ()
    engine = EmbeddedEngine(adapter.decoder, stop_ids=stops)
    learner = Learner(adapter, plan, microbatch_tokens=1 << 20)
    prompts, lengths, rewards = make_prompts(task), lengths_of(task), rewards_of(task)
    number = 0

    def cycle() -> dict[str, Any]:
        nonlocal number
        started = time.perf_counter()
        draws: list[Any] = [Numbers(1000 * number + place, length) for place, length in enumerate(lengths)]
        number += 1
        questions = [
            Question(tuple(prompt), tuple(draws[place * SAMPLES : (place + 1) * SAMPLES]))
            for place, prompt in enumerate(prompts)
        ]
        rollouts = engine.generate(questions, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)
        rolled = time.perf_counter()
        flat = [one for row in rollouts for one in row]
        assert [len(one.ids) for one in flat] == lengths
        answers = [Answer(one.ids, "", one.finished, reward) for one, reward in zip(flat, rewards, strict=True)]
        groups = [
            Group(tuple(prompt), tuple(answers[place * SAMPLES : (place + 1) * SAMPLES]))
            for place, prompt in enumerate(prompts)
        ]
        learner.update(groups)
        ended = time.perf_counter()
        return {
            "seconds": ended - started,
            "split": {"rollout": round(rolled - started, 3), "update": round(ended - rolled, 3)},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "useful_flops": useful_flops(model, task),
            "flops_per_second": flops_per_second(task),
        }

    return cycle


def useful_flops(model: Any, task: Task) -> float:
    """Products that no method can leave out: each generated token once through the weights, each trained one forward
    and backward to its inputs twice. Attention, factors, norms and sampling are not counted."""
    linear = adapted_numbers(model)
    head = model.lm_head.weight.numel()
    answered = sum(lengths_of(task))
    prompts = PROMPTS * PROMPT_TOKENS
    generated = 2.0 * (linear * (answered + prompts) + head * answered)
    trained = 2 * 4.0 * (linear * (answered + prompts) + head * answered)
    return generated + trained


# ---- TRL ---------------------------------------------------------------------------------------------


def theirs(task: Task) -> Any:
    import datasets
    import peft
    import torch
    import trl
    from transformers import LogitsProcessor, LogitsProcessorList

    torch.set_num_threads(1)
    model = make_model(task)
    end = task.words - END_FROM_LAST
    tokenizer = words_tokenizer(task)
    texts = [" ".join(f"w{number}" for number in prompt) for prompt in make_prompts(task)]
    rows = [{"prompt": text} for text in texts for _ in range(SAMPLES)]
    lengths, rewards = torch.tensor(lengths_of(task)), rewards_of(task)

    class Ends(LogitsProcessor):
        """Each row ends at its length and not before."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, end] = -torch.inf
            if task.ragged:
                due = input_ids.shape[1] - PROMPT_TOKENS + 1 >= lengths
                scores[due] = -torch.inf
                scores[due, end] = 0.0
            return scores

    generate = model.generate

    def ending(*arguments: Any, **options: Any) -> Any:
        return generate(*arguments, **options, logits_processor=LogitsProcessorList([Ends()]))

    model.generate = ending
    arguments = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=PROMPTS * SAMPLES, gradient_accumulation_steps=1, num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS, beta=0.0, loss_type="grpo", scale_rewards="group", num_iterations=2,
        temperature=TEMPERATURE, epsilon=0.2, epsilon_high=0.25, learning_rate=1e-5, weight_decay=0.01,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: rewards,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(ADAPTED), task_type="CAUSAL_LM"),
    )
    trainer.current_gradient_accumulation_steps = 1  # set by the loop around training_step
    trainer.create_optimizer()

    def cycle() -> dict[str, Any]:
        started = time.perf_counter()
        for _ in range(2):  # the first generates
            trainer.training_step(trainer.model, rows, None)
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.model.zero_grad()
        seconds = time.perf_counter() - started
        (batch,) = trainer._buffered_inputs
        assert sorted(batch["completion_mask"].sum(1).tolist()) == sorted(lengths.tolist())
        return {"seconds": seconds}

    return cycle


if __name__ == "__main__":
    sys.exit(main())

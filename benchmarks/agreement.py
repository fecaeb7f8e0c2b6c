"""What the proof of agreement can tell: `python -m benchmarks.agreement --json [--only faults share alarms cost]`.

A tiny random Qwen3 in bfloat16 takes steps at lr 1e-5; a second engine answers with each fault in turn, under the right
adapter's name, until the figures give it away or so many tokens were looked at. `learned` starts from an adapter that
has done some rounds, `first` from B = 0, whose effect bfloat16 hardly sees. Tokens are those that were looked at. False
alarms: fresh windows of 4,000 tokens, with the 95 % Wilson interval; the exact rate that is aimed at, one in a million,
takes more windows than anybody runs, so the share beyond two standard errors is counted as well: 4.6 % of them ought to
be. Share: how soon divergence stops a large fault where 2 % of a step is looked at. Cost: a step of the learner's
benchmark, 7 million numbers, with the checks and without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedsilo.protocol.intervals import wilson_interval
from silo.trainer.agreement import AnswerFigures, Finding, Limits, Watch, Window, divergence
from tests.algorithms.agreement_rig import Fault, Rig

PARTS = ["faults", "share", "alarms", "cost"]
LEARNED = 0.02
PUSHES = 16
PLACES = (12, 13, 14, 15, 16)  # of the history, in turn
TOKENS_MAX = 400_000
STEPS_WATCHED = (1, 2, 4, 8, 16, 41)  # 41 steps of two answers of 48 tokens are the short window
FAULTS: dict[str, tuple[str, Fault]] = {
    "1 step stale": ("learned", Fault(lag=1)),
    "2 steps stale": ("learned", Fault(lag=2)),
    "4 steps stale": ("learned", Fault(lag=4)),
    "8 steps stale": ("learned", Fault(lag=8)),
    "never pushed since the round's start": ("learned", Fault(lag=PUSHES)),
    "half the scale": ("learned", Fault(scale=0.5)),
    "twice the scale": ("learned", Fault(scale=2.0)),
    "alpha for alpha / r": ("learned", Fault(scale=4.0)),
    "another base": ("learned", Fault(base_seed=1)),
    "base with 1 % of noise": ("learned", Fault(base_noise=0.01)),
    "no adapter": ("learned", Fault(base_share=1.0)),
    "half of a batch by the base": ("learned", Fault(base_share=0.5)),
    "an eighth of a batch by the base": ("learned", Fault(base_share=0.125)),
    "1 step stale, float32": ("float32", Fault(lag=1)),
    "never pushed in the first round": ("first", Fault(lag=PUSHES)),
    "never pushed in the first round, float32": ("first float32", Fault(lag=PUSHES)),
}


# What divergence is for, and nothing wrong at all.
LARGE = {
    "none": Fault(),
    **{name: fault for name, (kind, fault) in FAULTS.items() if kind == "learned" and not fault.lag},
}


def rigs(seed: int) -> dict[str, Rig]:
    return {
        "learned": Rig(b_scale=LEARNED, pushes=PUSHES, seed=seed),
        "first": Rig(pushes=PUSHES, seed=seed),
        "float32": Rig(b_scale=LEARNED, pushes=PUSHES, seed=seed, dtype=torch.float32),
        "first float32": Rig(pushes=PUSHES, seed=seed, dtype=torch.float32),
    }


def fault_row(rig: Rig, fault: Fault, tokens_max: int) -> dict[str, Any]:
    """As `AgreementWatch` does, step by step: the divergence first, then the windows."""
    limits = Limits()
    watch, everything = Watch(limits), Window()
    tokens, turn, caught, kl, limit = 0, 0, "", 0.0, 0.0
    alarms: list[Finding] = []
    while not caught and tokens < tokens_max:
        answers = rig.figures(PLACES[turn % len(PLACES)], fault)
        turn, tokens = turn + 1, tokens + sum(len(answer.engine) for answer in answers)
        everything.add(answers)
        kl, limit, beyond = judged(answers, limits)
        together, most = watch.differ(answers)
        beyond = beyond or together.exceeds(most)
        alarms = watch.add(answers)
        caught = "divergence" if beyond else "coefficient" if alarms else ""
    findings = {finding.other: finding for finding in everything.findings()}
    row: dict[str, Any] = {
        "caught": bool(caught),
        "by": caught,
        "tokens": tokens,
        "kl": kl,
        "kl_limit": limit,
        "adapter_visible_share": round(everything.visible, 3),
    }
    for other, finding in findings.items():
        row[other] = {"coefficient": round(finding.coefficient, 4), "error": round(finding.error, 4)}
    if previous := findings.get("previous"):
        row["steps_detectable_with_these_tokens"] = round(previous.detectable, 2)
    return row


def stopped_at_the_default_share(rig: Rig, fault: Fault, runs: int) -> dict[str, float]:
    """Share of runs that divergence has stopped by a step, where of 64 answers two are looked at."""
    limits = Limits()
    steps = [rig.figures(PLACES[0], fault) for _ in range(6)]
    draws, counts, alone, seen = np.random.default_rng(0), dict.fromkeys(STEPS_WATCHED, 0), 0, 0
    for _ in range(runs):
        watch, at = Watch(limits), STEPS_WATCHED[-1] + 1
        for step in range(1, STEPS_WATCHED[-1] + 1):
            answers = steps[draws.integers(len(steps))]
            two = [answers[place] for place in draws.permutation(len(answers))[:2]]
            by_itself = judged(two, limits)[2]
            alone, seen = alone + by_itself, seen + 1
            together, most = watch.differ(two)
            if by_itself or together.exceeds(most):
                at = step
                break
        for step in STEPS_WATCHED:
            counts[step] += at <= step
    found = {f"by_step_{step}": round(count / runs, 3) for step, count in counts.items()}
    return {"a_step_by_itself_until_then": round(alone / seen, 3), **found}


def judged(answers: Sequence[AnswerFigures], limits: Limits) -> tuple[float, float, bool]:
    trained = [answer.trainer for answer in answers]
    found = divergence([answer.engine for answer in answers], trained)
    limit = limits.kl_limit(divergence([answer.exact for answer in answers], trained).kl)
    return found.kl, limit, found.exceeds(limit)


def false_alarms(windows: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Fresh windows of two steps each, over histories of several seeds, on learned and first adapters."""
    judged_windows = alarms = beyond = findings = steps = stopped = 0
    for seed in seeds:
        for rig in (Rig(b_scale=LEARNED, pushes=PUSHES, seed=seed), Rig(pushes=PUSHES, seed=seed)):
            for number in range(windows // (2 * len(seeds))):
                window = Window()
                for place in (PLACES[number % len(PLACES)], PLACES[(number + 1) % len(PLACES)]):
                    answers = rig.figures(place, Fault())
                    stopped += judged(answers, Limits())[2]
                    steps += 1
                    window.add(answers)
                found = window.findings()
                judged_windows += 1
                findings += len(found)
                alarms += sum(finding.is_alarm for finding in found)
                beyond += sum(abs(finding.coefficient) > 2 * finding.error for finding in found)
    return {
        "windows": judged_windows,
        "alarms": alarms,
        "alarm_share_95": [
            round(each, 5) for each in wilson_interval(min(alarms, judged_windows) / judged_windows, judged_windows)
        ],
        "findings": findings,
        "beyond_two_errors_share": round(beyond / findings, 4),
        "beyond_two_errors_95": [round(each, 4) for each in wilson_interval(beyond / findings, findings)],
        "steps": steps,
        "steps_stopped_by_divergence": stopped,
    }


def cost(repeats: int) -> dict[str, Any]:
    """One private step of 64 answers of 128 tokens, 7 million numbers: seconds of the checks beside the whole."""
    from benchmarks import learner_model
    from silo.trainer.adapters.lora import LoraAdapter
    from silo.trainer.agreement import AgreementWatch
    from silo.trainer.grpo import Answer, Group, Learner
    from silo.trainer.rollout.embedded import EmbeddedEngine
    from silo.trainer.rollout.engine import Question, Rollout
    from tests.algorithms.tiny import make_plan, make_shape, random_factors

    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        task = learner_model.Task(dtype)
        model = learner_model.make_model(task)
        shape = make_shape(model, learner_model.RANK, learner_model.ALPHA)
        adapter = LoraAdapter(model, shape)
        adapter.load(random_factors(shape, 0, 0.01))
        plan = make_plan(rollout__temperature=learner_model.TEMPERATURE, optimiser__learning_rate=1e-5)
        engine = EmbeddedEngine(adapter.decoder, stop_ids=[], name=adapter.name)
        learner = Learner(adapter, plan, microbatch_tokens=16384)
        watch = AgreementWatch(
            adapter, learner_model.TEMPERATURE, lambda *key: np.random.default_rng(len(key)), Limits(marker_pushes=50)
        )
        prompts = [tuple(each) for each in learner_model.make_prompts(task)]
        rewards = iter(learner_model.rewards_of(task) * (repeats + 1))

        def generate(asked: Sequence[Question], tokens: int) -> list[tuple[Rollout, ...]]:
            return engine.generate(asked, temperature=learner_model.TEMPERATURE, max_new_tokens=tokens)  # noqa: B023

        times: dict[str, list[float]] = {"step": [], "checks": []}
        for turn in range(repeats + 1):
            started = time.perf_counter()
            questions = [
                Question(prompt, tuple(np.random.default_rng([turn, place, sample]) for sample in range(8)))
                for place, prompt in enumerate(prompts)
            ]
            rollouts = generate(questions, learner_model.NEW_TOKENS)
            before = time.perf_counter()
            watch.check((1, turn), prompts, rollouts, generate)
            checks = time.perf_counter() - before
            learner.update(
                [
                    Group(prompt, tuple(Answer(each.ids, "", True, next(rewards)) for each in row))
                    for prompt, row in zip(prompts, rollouts, strict=True)
                ]
            )
            times["step"].append(time.perf_counter() - started)
            times["checks"].append(checks)
        # the first has the marker and everything cold; one of fifty rollouts carries it
        later = sum(times["checks"][1:]) / repeats
        whole = sum(times["step"][1:]) / repeats
        found[dtype] = {
            "step_seconds": round(whole, 3),
            "checks_seconds": round(later, 3),
            "checks_share": round(later / whole, 4),
            "checks_share_with_marker": round((later + max(times["checks"][0] - later, 0) / 50) / whole, 4),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens-max", type=int, default=TOKENS_MAX)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    if "faults" in options.only:
        made = rigs(0)
        figures["faults"] = {
            name: fault_row(made[kind], fault, options.tokens_max) for name, (kind, fault) in FAULTS.items()
        }
    if "share" in options.only:
        rig = rigs(0)["learned"]
        figures["default_share"] = {
            name: stopped_at_the_default_share(rig, fault, options.runs) for name, fault in LARGE.items()
        }
    if "alarms" in options.only:
        figures["false_alarms"] = false_alarms(options.windows, options.seeds)
    if "cost" in options.only:
        figures["cost"] = cost(options.repeats)
    report = {
        "name": "agreement",
        "figures": figures,
        "conditions": {
            "learning_rate": 1e-5,
            "model": "random Qwen3, 24 wide, 2 layers, bfloat16 unless said",
            "window_tokens": Limits().window_tokens,
            "share_looked_at": {"faults": 1.0, "cost": Limits().share},
            "tokens_max": options.tokens_max,
            "cores": os.cpu_count(),
        },
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

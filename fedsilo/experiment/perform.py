"""Carries out one cell of an experiment file: base model, split and sites from (setting, seed), the federation, and one
line of results that says what it came of and what it is made of."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.demo import digit_tasks
from fedsilo.demo.data import DataFolder, DigitSet, Lengths, make_digit_set, make_topic_set, write_data_folder
from fedsilo.demo.sites import DemoSettings, make_sites
from fedsilo.demo.tiny_model import Recipe, cached_model
from fedsilo.experiment.cell import CellResult, run_cell
from fedsilo.experiment.design import Cell, Experiment, Setting, digest_of, plan_of, ruleset_of
from silo.guard.site import code_sha256

_IN_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder of this process's own is made in it


def perform(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """Carry out one cell; returns its line of results.

    Raises:
        FedSiloError: the federation cannot be set up, or stands still. A run that ends as failed is a result.
    """
    setting, seed = experiment.setting, cell.seed
    model = cached_model(recipe_of(setting, seed))
    folder = Path(tempfile.mkdtemp(prefix="fedsilo-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
    try:
        data = _data_of(folder / "data", setting, seed)
        lengths = data.description.lengths
        plan = plan_of(experiment, cell, lengths.model_dump())
        sites = make_sites(
            DemoSettings(
                out=folder,
                model=model,
                data=data,
                ruleset=ruleset_of(experiment, cell),
                seed=seed,
                rank=setting.rank,
                alpha=setting.alpha,
                holds="",
                local_steps=setting.local_steps,
                swap_period=plan["swap_period"],
                prompts_per_step=plan["prompts_per_step"],
                samples_per_prompt=plan["samples_per_prompt"],
                learning_rate=plan["optimiser"]["learning_rate"],
            )
        )
        result = run_cell(sites, plan)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _line(experiment, cell, result)


def recipe_of(setting: Setting, seed: int) -> Recipe:
    """Return the base model of a seed: each has one of its own."""
    base = setting.base
    return Recipe("digits", seed=seed, steps=base.steps, questions=setting.questions, right_share=base.right_share)


def _data_of(root: Path, setting: Setting, seed: int) -> DataFolder:
    """Write the split of a seed."""
    verifier = "exact" if setting.questions == "one-step" else "final"
    made = _rows_of(setting, seed)
    return write_data_folder(
        root,
        name=f"{setting.questions}-{seed}",
        tokenizer="digits",
        lengths=lengths_of(setting),
        private={silo: (verifier, rows) for silo, rows in made.private.items()},
        public=(verifier, made.public),
        held_out=(verifier, made.held_out),
    )


def lengths_of(setting: Setting) -> Lengths:
    """Return the longest prompt and answer, end mark included, with one token to spare."""
    topics = digit_tasks.TOPICS if setting.questions == "one-step" else tuple(digit_tasks.TWO_STEP_TOPICS)
    digits = "0" * digit_tasks.DIGITS
    prompt = max(len(digit_tasks.question(topic, digits)) for topic in topics)
    answer = max(len(digit_tasks.work(topic, digits)) for topic in topics)
    return Lengths(max_prompt_tokens=prompt + 1, max_new_tokens=answer + 2)


def _rows_of(setting: Setting, seed: int) -> DigitSet:
    if setting.split == "dirichlet":
        return make_digit_set(
            seed,
            silos=setting.silos,
            rows_per_silo=setting.private_rows,
            public_rows=setting.public_rows,
            held_out_rows=setting.held_out_rows,
        )
    topics = tuple(digit_tasks.TWO_STEP_TOPICS) if setting.questions == "two-step" else digit_tasks.TOPICS
    return make_topic_set(
        seed,
        topics[: setting.silos],
        rows_per_silo=setting.private_rows,
        public_rows=setting.public_rows,
        held_out_rows=setting.held_out_rows,
    )


# ---- the line of results -----------------------------------------------------------------------------------------


def _line(experiment: Experiment, cell: Cell, result: CellResult) -> dict[str, Any]:
    record, plan = result.record, result.record["plan"]
    rounds = [_measured(record["before"]), *map(_measured, record["rounds"])]
    return {
        "experiment": experiment.experiment,
        "row": cell.row,
        "seed": cell.seed,
        "design_sha256": digest_of(experiment, cell),
        "code_sha256": code_sha256(),
        "versions": record["versions"],
        "base_model_sha256": plan["base_model_sha256"],
        "public_set_sha256": plan["public_set_sha256"],
        "held_out_sha256": plan["held_out_sha256"],
        "adapter_sha256": result.adapter_sha256,
        "state": record["state"],
        "reason": record["reason"],
        "rounds": rounds,
        "steps": sum(name in _STEPS for name, _, _, _ in next(iter(result.figures.values()))),
        "generated_tokens": _sum(result, ("PrivateStep", "GeneratePublic"), "tokens")
        + _sum(result, ("PublicStep",), "extra_tokens"),
        "trained_tokens": _sum(result, _STEPS, "trained_tokens"),
        "bytes": {"up": _bytes(record["traffic"], "in"), "down": _bytes(record["traffic"], "out")},
        "refused": {f"{kind} {reason}": count for (kind, reason), count in sorted(result.refused.items())},
        "zero_variance_share_before": _mean(result, ("PublicStep",), "zero_variance_share_before"),
        "zero_variance_share": _mean(result, ("PublicStep",), "zero_variance_share"),
        "alpha_mean": _mean(result, ("PublicStep",), "alpha_mean"),
        "drift": _mean(result, _STEPS, "drift", last=True),
        "seconds": round(result.seconds, 2),
    }


_STEPS = ("PrivateStep", "PublicStep")


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the first silo measured of a round's adapter, or of the base model: one for all.

    None stands for what no gate let out.
    """
    metrics: Mapping[str, Mapping[str, float]] = next(iter(row["metrics"].values()), {})
    topics = {topic: value for topic, value in metrics.get("pass_at_1", {}).items() if topic}
    return {
        "pass_at_1": metrics.get("pass_at_1", {}).get(""),
        "pass_at_1_greedy": metrics.get("pass_at_1_greedy", {}).get(""),
        "topics": topics,
    }


def _values(result: CellResult, tasks: Sequence[str], name: str) -> list[float]:
    return [
        float(metrics[name])
        for figures in result.figures.values()
        for task, _, _, metrics in figures
        if task in tasks and name in metrics
    ]


def _sum(result: CellResult, tasks: Sequence[str], name: str) -> int:
    return int(sum(_values(result, tasks, name)))


def _mean(result: CellResult, tasks: Sequence[str], name: str, *, last: bool = False) -> float | None:
    """Return the mean over silos and steps, or over silos of the last step; None where there is none."""
    values = _values(result, tasks, name)
    if last:
        silos = [
            [float(m[name]) for t, _, _, m in each if t in tasks and name in m] for each in result.figures.values()
        ]
        values = [each[-1] for each in silos if each]
    return round(sum(values) / len(values), 6) if values else None


def _bytes(traffic: Sequence[Mapping[str, Any]], direction: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in traffic:
        if row["direction"] == direction:
            counts[row["kind"]] += row["bytes"]
    return dict(sorted(counts.items()))

"""Carries out one cell of an experiment file: base model, split and sites from (setting, seed), the federation, and one
line of results that says what it came of and what it is made of."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.demo.data import DataFolder, Row, Rows, to_json_lines, write_data_folder
from fedsilo.demo.sites import HOLDOUT_SHARE, DemoSettings, Site, make_sites
from fedsilo.demo.tiny_model import Recipe, cached_model, recipe_for
from fedsilo.experiment.cell import CellResult, run_cell
from fedsilo.experiment.design import Cell, Experiment, Setting, digest_of, plan_of, ruleset_of
from fedsilo.experiment.program import program
from fedsilo.experiment.rates import success_rates
from fedsilo.experiment.rows import lengths_of, rows_of, verifier_of
from fedsilo.files.site_policy import read_pinned_schema, read_policy
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.codec import canonical_json, sha256_hex
from policies.capacity import capacities
from silo.config import load_config as load_silo_config


def perform(experiment: Experiment, cell: Cell, below: Path) -> dict[str, Any]:
    """Carry out one cell; returns its line of results.

    Args:
        experiment: the file.
        cell: with its knobs.
        below: folder in which the cell's own is made, and removed at the end.

    Raises:
        FedSiloError: the federation cannot be set up, or nothing moves in it. A run that ends as failed is a result.
    """
    setting, seed, row = experiment.settings[cell.setting], cell.seed, experiment.rows[cell.row]
    made_by = program()  # before the cell runs, so that it is what was loaded
    model = model_of(setting, seed)
    folder = Path(tempfile.mkdtemp(dir=below))
    try:
        made = rows_of(setting, seed, lambda rows: _rates(model, setting, rows, seed))
        data = _write(folder, f"{setting.questions}-{seed}", made, setting, pooled=row.pooled, trial=cell.trial)
        plan = plan_of(experiment, cell, lengths_of(setting).model_dump())
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
                load=_load_of(setting),
                holdout_share=HOLDOUT_SHARE if setting.data is None else 0.0,  # a paper's counts are trained on whole
                server_optimisers=_server_optimisers(plan),
            )
        )
        tuning = () if cell.trial or not made.tuning else read_tasks(folder / _TUNING).rows
        result = run_cell(sites, plan, tuning)
        bits = capacity_bits(sites.silos[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**_line(experiment, cell, made, result, made_by), "capacity_bits": bits}


_TUNING = "tuning.jsonl"


def capacity_bits(site: Site) -> dict[str, float]:
    """Return how many bits a silo's messages of one round can carry at most, by kind, for whoever chooses their values:
    what `fedsilo policy check` says of its policy."""
    policy = read_policy(load_silo_config(site.config).policy)
    schema = read_pinned_schema(policy, site.folder) if policy.file.egress.updates else None
    return {row.kind: round(row.bits, 1) for row in capacities(policy, schema)}


def _load_of(setting: Setting) -> str:
    return setting.model.load if setting.model else "fp32"


def _server_optimisers(plan: Mapping[str, Any]) -> tuple[str, ...]:
    name = plan.get("server_optimiser", {}).get("name", "none")
    return () if name == "none" else (name,)


def _rates(model: Path, setting: Setting, rows: Sequence[Row], seed: int) -> Sequence[float]:
    longest = lengths_of(setting).max_new_tokens
    return success_rates(model, _load_of(setting), rows, verifier_of(setting), longest, seed)


def model_of(setting: Setting, seed: int) -> Path:
    """Return the folder of the base model of a seed: each has one of its own, but where the setting names one."""
    if setting.model is not None:
        return Path(setting.model.path)
    if setting.questions == "files":
        return cached_model(recipe_for("bytes", seed=seed))
    base = setting.base
    return cached_model(
        Recipe("digits", seed=seed, steps=base.steps, questions=setting.questions, right_share=base.right_share)
    )


def _write(folder: Path, name: str, made: Rows, setting: Setting, *, pooled: bool, trial: bool) -> DataFolder:
    """Write the rows of a cell: of a trial the tuning rows are what is measured on, and of a pooled one the first silo
    has everybody's private rows."""
    private = made.private
    if pooled:
        private = {next(iter(private)): [row for rows in private.values() for row in rows]}
    verifier = verifier_of(setting)
    (folder / _TUNING).write_bytes(to_json_lines(made.tuning))
    return write_data_folder(
        folder / "data",
        name=name,
        tokenizer="bytes" if setting.questions == "files" else "digits",
        lengths=lengths_of(setting),
        private={silo: (verifier, rows) for silo, rows in private.items()},
        public=(verifier, made.public),
        held_out=(verifier, made.tuning if trial else made.held_out),
    )


# ---- the line of results -----------------------------------------------------------------------------------------

_STEPS = ("PrivateStep", "PublicStep", "LikelihoodStep")
_PUBLIC_STEPS = ("PublicStep", "LikelihoodStep")
_WITH_RESULT = ("committed", "closed")  # states of a round; the second where a method makes no adapter
# Figures of steps that lines of results have as curves: what the drift bound of PubSwap speaks of, and what it leaves.
_CURVES: Mapping[str, Sequence[str]] = {
    "PrivateStep": ("reward_mean", "zero_variance_share", "drift"),
    "PublicStep": (
        "reward_mean",
        "zero_variance_share_before",
        "zero_variance_share",
        "alpha_mean",
        "alpha_max",
        "swapped_share",
        "donors_wanted",
        "donors_found",
        "beta_mean",
        "beta_max",
        "omega",
        "logp_own",
        "logp_donor",
        "drift",
    ),
    "LikelihoodStep": ("logp_own", "drift"),
}
_DECIMALS = 4


def _line(
    experiment: Experiment, cell: Cell, made: Rows, result: CellResult, made_by: Mapping[str, str]
) -> dict[str, Any]:
    record, plan = result.record, result.record["plan"]
    shares = {silo: _topic_shares(rows) for silo, rows in made.private.items()}
    pooled = experiment.rows[cell.row].pooled
    rounds = [_measured(row, shares, pooled=pooled) for row in (record["before"], *record["rounds"])]
    return {
        "experiment": experiment.experiment,
        "setting": cell.setting,
        "row": cell.row,
        "seed": cell.seed,
        "knobs": dict(cell.knobs),
        "trial": cell.trial,
        "design_sha256": digest_of(experiment, cell),
        "program": made_by,
        "versions": record["versions"],
        "split_sha256": sha256_hex(canonical_json(made.private)),
        "base_model_sha256": plan["base_model_sha256"],
        "public_set_sha256": plan["public_set_sha256"],
        "held_out_sha256": plan["held_out_sha256"],
        "evaluation_sha256": _evaluation_digest(record["before"]),
        "adapter_sha256": result.adapter_sha256,
        "state": record["state"],
        "reason": record["reason"],
        "silos": len(shares),
        "rounds_planned": plan["rounds"],
        "rounds_finished": sum(each["state"] in _WITH_RESULT for each in record["rounds"]),
        "rounds": rounds,
        "best": _best(rounds, result.on_tuning),
        "steps": _steps(result, _STEPS),
        "public_steps": _steps(result, _PUBLIC_STEPS),
        "generated_tokens": _sum(result, ("PrivateStep", "GeneratePublic"), "tokens")
        + _sum(result, ("PublicStep", "AnswerAhead"), "extra_tokens"),
        "trained_tokens": _sum(result, _STEPS, "trained_tokens"),
        "bytes": {"up": _bytes(record["traffic"], "in"), "down": _bytes(record["traffic"], "out")},
        "refused": {f"{kind} {reason}": count for (kind, reason), count in sorted(result.refused.items())},
        "zero_variance_share_before": _mean(result, ("PublicStep",), "zero_variance_share_before"),
        "zero_variance_share": _mean(result, ("PublicStep",), "zero_variance_share"),
        "alpha_mean": _mean(result, ("PublicStep",), "alpha_mean"),
        "alpha_histogram": _alpha_histogram(result),
        "drift": _mean(result, _STEPS, "drift", last=True),
        "steps_at": {task: [list(place) for place in _taken(result, task)] for task in _CURVES},
        "curves": {task: _curves(result, task, names) for task, names in _CURVES.items()},
        "seconds": round(result.seconds, 2),
    }


def _topic_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    counts = Counter(str(row["topic"]) for row in rows)
    return {topic: count / len(rows) for topic, count in counts.items()}


def _evaluation_digest(before: Mapping[str, Any]) -> str:
    """Return a digest of what the first silo measured of the base model: of the model, the prompts and the draws; empty
    where no gate let that out."""
    first = next(iter(before["metrics"].values()), None)
    return "" if first is None else sha256_hex(canonical_json(first))


def _measured(row: Mapping[str, Any], shares: Mapping[str, Mapping[str, float]], *, pooled: bool) -> dict[str, Any]:
    """Return what was measured after a round, or of the base model.

    The mean over the silos that measured: one and the same where they share an adapter, each its own where they do not.
    None: no gate let it out.

    Args:
        row: of the run record.
        shares: of each topic among a silo's private rows.
        pooled: what one silo measured is of all.
    """
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]] = row["metrics"]
    sampled = {silo: dict(each.get("pass_at_1", {})) for silo, each in metrics.items()}
    if pooled:
        sampled = {silo: each for each in sampled.values() for silo in shares}
    topics = sorted({topic for each in sampled.values() for topic in each if topic})
    own = [
        sum(share * sampled[silo][topic] for topic, share in shares[silo].items())
        for silo in sampled
        if silo in shares and shares[silo].keys() <= sampled[silo].keys()
    ]
    apart = next((note for note in row["notes"] if note["name"] == "drift"), None)
    return {
        "pass_at_1": _mean_of([each.get("") for each in sampled.values()]),
        "pass_at_1_greedy": _mean_of([each.get("pass_at_1_greedy", {}).get("") for each in metrics.values()]),
        "topics": {topic: _mean_of([each.get(topic) for each in sampled.values()]) for topic in topics},
        "own_task": _mean_of(own),
        "worst_silo": min(own, default=None),
        "apart": None
        if apart is None
        else {
            "factors": _between(apart["factors"]),
            "products": _between(apart["products"]),
            "aggregation_error": apart["aggregation_error"],
        },
    }


def _best(rounds: Sequence[Mapping[str, Any]], on_tuning: Mapping[int, float]) -> dict[str, Any] | None:
    """Return the round whose adapter is best on the tuning strings, the earlier of two, and what it reaches on the
    others; None where nothing was measured on them."""
    measured = {number: value for number, value in on_tuning.items() if 0 < number < len(rounds)}
    if not measured:
        return None
    best = min(measured, key=lambda number: (-measured[number], number))
    return {"round": best, "on_tuning": round(measured[best], 6), "pass_at_1": rounds[best]["pass_at_1"]}


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 6) if known else None


def _between(distances: Sequence[Sequence[float]]) -> float | None:
    """Return the mean distance of two silos; None where there is one."""
    return _mean_of([value for place, row in enumerate(distances) for value in row[place + 1 :]])


def _values(result: CellResult, tasks: Sequence[str], name: str) -> list[float]:
    return [
        float(figure.metrics[name])
        for figures in result.figures.values()
        for figure in figures
        if figure.task in tasks and name in figure.metrics
    ]


def _sum(result: CellResult, tasks: Sequence[str], name: str) -> int:
    return int(sum(_values(result, tasks, name)))


def _mean(result: CellResult, tasks: Sequence[str], name: str, *, last: bool = False) -> float | None:
    """Return the mean over silos and steps, or over silos of the last step; None where there is none."""
    if not last:
        return _mean_of(_values(result, tasks, name))
    silos = [
        [float(figure.metrics[name]) for figure in figures if figure.task in tasks and name in figure.metrics]
        for figures in result.figures.values()
    ]
    return _mean_of([each[-1] for each in silos if each])


def _steps(result: CellResult, tasks: Sequence[str]) -> int:
    """Return how many such steps the first silo took."""
    return sum(figure.task in tasks for figure in next(iter(result.figures.values())))


def _taken(result: CellResult, task: str) -> dict[tuple[int, int], list[Mapping[str, Any]]]:
    """Return what silos noted of each step of a task, by (round, step), in order."""
    at: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for figures in result.figures.values():
        for each in figures:
            if each.task == task:
                at.setdefault((each.round, each.step), []).append(each.metrics)
    return dict(sorted(at.items()))


def _curves(result: CellResult, task: str, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return each figure over the steps of a task, in order: the mean over silos, None where a step has no such figure,
    and no list where no step has it."""
    taken = _taken(result, task).values()
    curves = {name: [_mean_of([each.get(name) for each in metrics]) for metrics in taken] for name in names}
    return {
        name: [value if value is None else round(value, _DECIMALS) for value in values]
        for name, values in curves.items()
        if any(value is not None for value in values)
    }


def _alpha_histogram(result: CellResult) -> dict[str, int]:
    """Return how many prompts had which share of their answers replaced."""
    counts: Counter[str] = Counter()
    for figures in result.figures.values():
        for figure in figures:
            counts.update(figure.metrics.get("alpha_histogram", {}))
    return dict(sorted(counts.items()))


def _bytes(traffic: Sequence[Mapping[str, Any]], direction: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in traffic:
        if row["direction"] == direction:
            counts[row["kind"]] += row["bytes"]
    return dict(sorted(counts.items()))

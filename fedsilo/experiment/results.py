"""Tables and verdicts from the lines of results alone: nothing is measured here.

Rows are compared pairwise by seed. The interval is Student's of the paired differences; the p-value of a claim is two-
sided, or the larger of two one-sided ones where equivalence is claimed. The claims of a family are judged together by
Holm's method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any

import numpy as np

from fedsilo.experiment.design import (
    BASE,
    IN_POINTS,
    Cell,
    Claim,
    Experiment,
    Metric,
    Row,
    Table,
    cells_of,
    digest_of,
)
from fedsilo.experiment.tuning import frozen_of, with_knobs
from fedsilo.protocol.errors import UsageError

MARGIN = 0.015  # differences of pass@1 below this are none that matters
LEVEL = 0.05

Line = Mapping[str, Any]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Read a results file. A last line that a kill cut short is none. Raises UsageError with the line that is wrong."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(whole_lines(path.read_bytes()), 1):
        try:
            line = json.loads(text)
        except ValueError:  # also where it is no text at all
            line = None
        if not isinstance(line, dict):
            raise UsageError(f"{path}:{number}: this is no line of results", hint="remove that line")
        lines.append(line)
    return lines


def whole_lines(content: bytes) -> list[bytes]:
    """Return the lines that end with a newline."""
    return content.split(b"\n")[:-1]


def of_experiment(experiment: Experiment, lines: Iterable[Line]) -> dict[Cell, Line]:
    """Return the newest line of each cell that was made by this design: another setting's results count for nothing.

    A line belongs to every cell of its design, whatever these are named. A cell whose knobs are not frozen has none. A
    row of the base model has what other rows of its seed measured before their first round.
    """
    lines = list(lines)
    newest = {line.get("design_sha256"): line for line in lines}
    knobs = {place: frozen.knobs for place, frozen in frozen_of(experiment, lines).items()}
    found = {
        cell: line
        for cell in cells_of(experiment)
        if (whole := with_knobs(experiment, knobs, cell)) is not None
        and (line := newest.get(digest_of(experiment, whole))) is not None
    }
    for name in (name for name, row in experiment.rows.items() if row.method == BASE):
        for cell, line in list(found.items()):
            found.setdefault(replace(cell, row=name), _untrained(line))
    return found


def _untrained(line: Line) -> Line:
    """Return the line of the base model by itself: no steps, no tokens, and nothing sent."""
    before = line["rounds"][0]
    return {
        **{name: line[name] for name in (*EQUAL_OVER_ROWS, "seed", "code_sha256", "silos") if name in line},
        "rounds": [before, before],
        "steps": 0,
        "generated_tokens": 0,
        "trained_tokens": 0,
        "bytes": {"up": {}, "down": {}},
        "refused": {},
        "zero_variance_share": None,
        "seconds": 0.0,
        "state": "finished",
    }


EQUAL_OVER_ROWS = (
    "split_sha256",
    "base_model_sha256",
    "public_set_sha256",
    "held_out_sha256",
    "evaluation_sha256",
)


def trials_of(experiment: Experiment, lines: Iterable[Line]) -> dict[str, float]:
    """Return what trials reached on the tuning strings, by the digest of each; nothing measured counts as 0."""
    return {
        str(line["design_sha256"]): value_of(line, "pass_at_1") or 0.0 for line in lines if line.get("trial") is True
    }


def unequal(results: Mapping[Cell, Line]) -> list[str]:
    """Return what differs between rows of one setting and seed although it must not: a sentence for each.

    Rows are compared with the first one of their setting and seed that has a result. Steps are those of a silo, in runs
    that finished; the base model has none.
    """
    firsts: dict[tuple[str, int, str], tuple[Cell, Any]] = {}
    faults = []
    for cell, line in results.items():
        trained = line["steps"] if line.get("state") == "finished" and line["steps"] else None
        for name, value in [*((name, line.get(name)) for name in EQUAL_OVER_ROWS), ("steps", trained)]:
            if not value:
                continue  # nothing was measured, or an earlier version noted nothing
            first, expected = firsts.setdefault((cell.setting, cell.seed, name), (cell, value))
            if value != expected:
                faults.append(f"{cell} and {first} differ in {name}")
    return faults


def value_of(line: Line, metric: Metric) -> float | None:
    """Return a cell's value after the last round; None where nothing was measured: the gate let no measurement out, or
    the method has no such figure."""
    last = line["rounds"][-1]
    value: float | None
    match metric:
        case "worst_topic":
            value = min(last["topics"].values(), default=None)
        case "best_pass_at_1":
            value = (line.get("best") or {}).get("pass_at_1")
        case "drift_between":
            value = (last.get("apart") or {}).get("factors")
        case "gain_per_megabyte":
            value = _gain_per_megabyte(line)
        case "zero_variance_share":
            value = line[metric]
        case _:
            value = last.get(metric)
    return None if value is None else float(value)


def _gain_per_megabyte(line: Line) -> float | None:
    """Return points of pass@1 gained for each megabyte that a silo sent; None where it sent nothing."""
    before, after = (line["rounds"][place]["pass_at_1"] for place in (0, -1))
    sent = sum(line["bytes"]["up"].values()) / line["silos"] / 1e6
    return None if before is None or after is None or not sent else 100 * (after - before) / sent


@dataclass(frozen=True)
class Contrast:
    """A paired difference over seeds.

    Attributes:
        differences: by seed, in the experiment's order.
        mean, low, high: of the 95 % t-interval; low and high are NaN with fewer than two seeds.
        p: two-sided, of no difference; of `equivalent` the larger of the two one-sided tests against the margin.
        inside: the 90 % interval lies within the margin.
    """

    differences: tuple[float, ...]
    mean: float
    low: float
    high: float
    p: float
    inside: bool


def contrast(experiment: Experiment, results: Mapping[Cell, Line], claim: Claim) -> Contrast | None:
    """Return the contrast of a claim over the seeds that both rows have; None where there is none.

    Over several settings a seed's value is the slope of its differences on log2 of the local steps.
    """
    rows = [row for row in claim.rows if row != claim.share_of]
    by_seed = _values_by_seed(experiment, results, claim, rows)
    taus = [math.log2(experiment.settings[name].local_steps) for name in claim.settings]
    values = [_slope(taus, [one - other for one, other in each]) for each in by_seed]
    margin = MARGIN if claim.metric in IN_POINTS and len(taus) == 1 else 0.0
    return paired(values, claim.direction, margin) if values else None


def _values_by_seed(
    experiment: Experiment, results: Mapping[Cell, Line], claim: Claim, rows: Sequence[str]
) -> list[list[list[float]]]:
    """Return, for each seed that has them all, the values of these rows: [settings, rows]."""
    found = []
    for seed in claim.seeds or experiment.seeds:
        lines = [[results.get(Cell(name, row, seed)) for row in rows] for name in claim.settings]
        values = [[None if line is None else value_of(line, claim.metric) for line in each] for each in lines]
        whole = [[value for value in each if value is not None] for each in values]
        if all(len(each) == len(rows) for each in whole):
            found.append(whole)
    return found


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of a least-squares line, or the value where there is one."""
    if len(values) == 1:
        return values[0]
    return linear_regression(places, values).slope


@dataclass(frozen=True)
class Share:
    """Part of another row's lead: the ratio of mean leads, and the middle 95 % of it over resampled seeds."""

    mean: float
    low: float
    high: float


_RESAMPLES = 10_000


def share(experiment: Experiment, results: Mapping[Cell, Line], claim: Claim) -> Share | None:
    """Return what part of the lead of `share_of` over `against` the claim's row has; the interval is a percentile
    bootstrap over seeds (Efron 1979). None: no seed has all three rows, or there is no lead."""
    values = _values_by_seed(experiment, results, claim, claim.rows)
    leads = np.array([[one - base, other - base] for ((one, base, other),) in values])  # [seeds, 2]
    if not len(leads) or leads[:, 1].mean() <= 0:
        return None
    picked = np.random.default_rng(0).integers(len(leads), size=(_RESAMPLES, len(leads)))
    one, other = leads[picked].mean(axis=1).T
    ratios = one[other > 0] / other[other > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    one, other = leads.mean(axis=0)
    return Share(float(one / other), float(low), float(high))


def paired(differences: Sequence[float], direction: str, margin: float = MARGIN) -> Contrast:
    """Return mean, interval and p-value of paired differences (Student 1908; Schuirmann 1987 for `equivalent`).

    Args:
        differences: one for each seed.
        direction: as declared.
        margin: differences within it are none that matters; 0: any difference matters.
    """
    from scipy.stats import t as student

    count, mean = len(differences), fmean(differences)
    if count < 2:
        return Contrast(tuple(differences), mean, math.nan, math.nan, math.nan, False)
    error, freedom = stdev(differences) / math.sqrt(count), count - 1

    def sides(value: float) -> tuple[float, float]:
        """p of a mean above, and of one below, the value by chance alone."""
        if error == 0:
            return float(mean <= value), float(mean >= value)
        return float(student.sf((mean - value) / error, freedom)), float(student.cdf((mean - value) / error, freedom))

    half = float(student.ppf(1 - LEVEL / 2, freedom)) * error
    two_sided = min(1.0, 2 * min(sides(0.0)))
    within = max(sides(-margin)[0], sides(margin)[1])
    p = within if direction == "equivalent" else two_sided
    return Contrast(tuple(differences), mean, mean - half, mean + half, p, margin > 0 and within <= LEVEL)


def holm(p_values: Mapping[str, float], claims: int) -> dict[str, float]:
    """Return p-values adjusted for as many claims as were stated, with or without a result (Holm 1979)."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (claims - place) * p))
        adjusted[name] = largest
    return adjusted


def verdict(direction: str, found: Contrast, adjusted: float) -> str:
    """Return `shown`, `shown, inside the margin`, `contradicted`, `equivalent` or `not shown`.

    Args:
        direction: as declared.
        found: of the claim.
        adjusted: its p-value, for as many claims as its family has.
    """
    if math.isnan(found.p):
        return "not shown"
    if direction == "equivalent":
        if adjusted <= LEVEL:
            return "equivalent"
        return "contradicted" if found.low > MARGIN or found.high < -MARGIN else "not shown"
    if adjusted > LEVEL:
        return "equivalent" if found.inside else "not shown"
    if direction != "either" and (found.mean > 0) != (direction == "above"):
        return "contradicted"
    return "shown, inside the margin" if found.inside else "shown"


@dataclass(frozen=True)
class Judged:
    """A claim with what was found of it.

    Attributes:
        found: None where no seed has both rows.
        adjusted: its p-value for all claims of its family; NaN where there is none.
        verdict: of `verdict`; `unfinished` while a seed lacks a row, whatever the others show; `exploratory`.
        share: of a claim that asks for it.
    """

    name: str
    claim: Claim
    found: Contrast | None
    adjusted: float
    verdict: str
    share: Share | None = None


def judged(experiment: Experiment, results: Mapping[Cell, Line]) -> list[Judged]:
    """Judge the claims of an experiment, each family together."""
    found = {name: contrast(experiment, results, claim) for name, claim in experiment.claims.items()}
    families: dict[str, list[str]] = {}
    for name, claim in experiment.claims.items():
        if not claim.exploratory:
            families.setdefault(claim.family, []).append(name)
    adjusted: dict[str, float] = {}
    for names in families.values():
        p_values = {name: each.p for name in names if (each := found[name]) is not None and not math.isnan(each.p)}
        adjusted |= holm(p_values, len(names))
    judgements = []
    for name, claim in experiment.claims.items():
        each, p = found[name], adjusted.get(name, math.nan)
        part = share(experiment, results, claim) if claim.share_of is not None else None
        if each is None or len(each.differences) < len(claim.seeds or experiment.seeds):
            said = "unfinished"
        else:
            said = "exploratory" if claim.exploratory else verdict(claim.direction, each, p)
        judgements.append(Judged(name, claim, each, p, said, part))
    return judgements


# ---- tables ------------------------------------------------------------------------------------------------------

HEADINGS = (
    "row",
    "seeds",
    "before",
    "after",
    "best",
    "greedy",
    "worst topic",
    "worst silo",
    "no signal",
    "apart",
    "steps",
    "k tokens drawn",
    "k trained",
    "MB up",
    "MB down",
    "public / factors",
    "points / MB",
    "refused",
)


def table_rows(experiment: Experiment, results: Mapping[Cell, Line], table: Table) -> list[tuple[str, ...]]:
    """Return a line for each row: means over its seeds. Shares in per cent; tokens in thousands, and bytes, a silo."""
    rows: list[tuple[str, ...]] = []
    for name in experiment.rows_of(table):
        cells = [Cell(table.setting, name, seed) for seed in table.seeds or experiment.seeds]
        lines = [results[cell] for cell in cells if cell in results]
        if not lines:
            continue
        silos = experiment.settings[table.setting].silos
        rows.append(
            (
                name + mark_of(experiment.rows[name]),
                str(len(lines)),
                _percent(line["rounds"][0]["pass_at_1"] for line in lines),
                *(_percent(value_of(line, metric) for line in lines) for metric in _SHOWN),
                _figure(value_of(line, "drift_between") for line in lines),
                f"{fmean(line['steps'] for line in lines):.0f}",
                f"{fmean(line['generated_tokens'] for line in lines) / silos / 1000:.1f}",
                f"{fmean(line['trained_tokens'] for line in lines) / silos / 1000:.1f}",
                *(
                    f"{fmean(sum(line['bytes'][way].values()) for line in lines) / silos / 1e6:.2f}"
                    for way in ("up", "down")
                ),
                _figure(_public_over_factors(line["bytes"]) for line in lines),
                _figure(value_of(line, "gain_per_megabyte") for line in lines),
                str(sum(sum(line["refused"].values()) for line in lines)),
            )
        )
    return rows


def mark_of(row: Row) -> str:
    """Return how a row is marked that no federation could carry out: it needs what silos do not give away."""
    if row.pooled:
        return " (pooled)"
    return " (donors' own policies)" if row.plan.get("donor_denominator") == "donor" else ""


_SHOWN: tuple[Metric, ...] = (
    "pass_at_1",
    "best_pass_at_1",
    "pass_at_1_greedy",
    "worst_topic",
    "worst_silo",
    "zero_variance_share",
)
_PUBLIC = ("public.responses", "public.donors")
_FACTORS = ("lora.", "global.adapter")


def _public_over_factors(counts: Mapping[str, Mapping[str, int]]) -> float | None:
    """Return the bytes of public answers over those of factors, both ways together."""
    public = sum(way.get(kind, 0) for way in counts.values() for kind in _PUBLIC)
    factors = sum(count for way in counts.values() for kind, count in way.items() if kind.startswith(_FACTORS))
    return public / factors if factors else None


def claim_rows(experiment: Experiment, judgements: Sequence[Judged]) -> list[tuple[str, ...]]:
    """Return a line for each claim; differences in points, but of figures that are no shares."""
    rows: list[tuple[str, ...]] = []
    for each in judgements:
        claim, found = each.claim, each.found
        seeds = f"{0 if found is None else len(found.differences)} of {len(claim.seeds or experiment.seeds)}"
        p = "" if math.isnan(each.adjusted) else f"{each.adjusted:.3g}"
        contrasted = f"{claim.row} - {claim.against}"
        if len(claim.settings) > 1:
            contrasted = f"slope of {contrasted}"
        where = ", ".join(claim.settings)
        rows.append(
            (each.name, where, contrasted, claim.metric, claim.direction, seeds, difference_text(each), p, each.verdict)
        )
    return rows


def difference_text(judgement: Judged) -> str:
    """Return mean and interval of a claim, or the share that it asks for."""
    claim, found, part = judgement.claim, judgement.found, judgement.share
    if part is not None:
        return f"{part.mean:.2f} of {claim.share_of} [{part.low:.2f}, {part.high:.2f}]"
    if found is None:
        return ""
    scale, form = (100, "+.1f") if claim.metric in IN_POINTS else (1, "+.3g")
    text = format(scale * found.mean, form)
    return (
        text
        if math.isnan(found.low)
        else (f"{text} [{format(scale * found.low, form)}, {format(scale * found.high, form)}]")
    )


def doubts(results: Mapping[Cell, Line]) -> list[str]:
    """Return why these results should not be compared."""
    programs = len({line.get("code_sha256") for line in results.values()})
    mixed = [f"these results were made by {programs} versions of the program"] if programs > 1 else []
    return mixed + unequal(results)


CLAIM_HEADINGS = (
    "claim",
    "setting",
    "contrast",
    "metric",
    "expected",
    "seeds",
    "points, 95 %",
    "adjusted p",
    "verdict",
)
SAID = "One process a federation: no sockets, no walls around a trainer, and a clock of its own."


def _percent(values: Iterable[float | None]) -> str:
    """Return the mean of those that there are; empty where there is none."""
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f}" if known else ""


def _figure(values: Iterable[float | None]) -> str:
    """Return the mean of those that there are, in three digits; empty where there is none."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3g}" if known else ""


def as_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|{'|'.join('---' for _ in headings)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def as_latex(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def cells(row: Sequence[str]) -> str:
        return " & ".join(
            cell.replace("\\", r"\textbackslash{}").replace("%", r"\%").replace("_", r"\_") for cell in row
        )

    body = " \\\\\n".join(cells(row) for row in rows)
    columns = "l" + "r" * (len(headings) - 1)
    return f"\\begin{{tabular}}{{{columns}}}\n{cells(headings)} \\\\ \\hline\n{body} \\\\\n\\end{{tabular}}"

"""Tables and verdicts from the lines of results alone: nothing is measured here.

Rows are compared pairwise by seed. The interval is Student's of the paired differences; the p-value of a claim is one-
sided in the direction that was declared, and claims are judged together by Holm's method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedsilo.experiment.design import Cell, Claim, Experiment, Metric, digest_of
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
    """Return the newest line of each cell that was made by this design: another setting's results count for nothing."""
    found: dict[Cell, Line] = {}
    for line in lines:
        if line.get("row") in experiment.rows and line.get("seed") in experiment.seeds:
            cell = Cell(line["row"], line["seed"])
            if line.get("design_sha256") == digest_of(experiment, cell):
                found[cell] = line
    return found


def value_of(line: Line, metric: Metric) -> float | None:
    """Return a cell's value after the last round; None where nothing was measured: the gate let no measurement out, or
    the method has no such figure."""
    last = line["rounds"][-1]
    if metric == "worst_topic":
        return min(last["topics"].values(), default=None)
    value = last[metric] if metric in last else line[metric]
    return None if value is None else float(value)


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
    """Return the contrast of a claim over the seeds that both rows have; None where there is none."""
    pairs = [
        (results[Cell(claim.row, seed)], results[Cell(claim.against, seed)])
        for seed in experiment.seeds
        if Cell(claim.row, seed) in results and Cell(claim.against, seed) in results
    ]
    values = [(value_of(one, claim.metric), value_of(other, claim.metric)) for one, other in pairs]
    differences = tuple(one - other for one, other in values if one is not None and other is not None)
    return paired(differences, claim.direction) if differences else None


def paired(differences: Sequence[float], direction: str) -> Contrast:
    """Return mean, interval and p-value of paired differences (Student 1908; Schuirmann 1987 for `equivalent`)."""
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
    within = max(sides(-MARGIN)[0], sides(MARGIN)[1])
    p = within if direction == "equivalent" else two_sided
    return Contrast(tuple(differences), mean, mean - half, mean + half, p, within <= LEVEL)


def holm(p_values: Mapping[str, float], claims: int) -> dict[str, float]:
    """Return p-values adjusted for as many claims as were stated, with or without a result (Holm 1979)."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (claims - place) * p))
        adjusted[name] = largest
    return adjusted


def verdict(direction: str, found: Contrast, adjusted: float) -> str:
    """Return `shown`, `contradicted`, `equivalent` or `not shown`.

    Args:
        direction: as declared.
        found: of the claim.
        adjusted: its p-value, for as many claims as there are.
    """
    if math.isnan(found.p):
        return "not shown"
    if direction == "equivalent":
        if adjusted <= LEVEL:
            return "equivalent"
        return "contradicted" if found.low > MARGIN or found.high < -MARGIN else "not shown"
    if adjusted <= LEVEL:
        return "shown" if (found.mean > 0) == (direction == "above") else "contradicted"
    return "equivalent" if found.inside else "not shown"


@dataclass(frozen=True)
class Judged:
    """A claim with what was found of it.

    Attributes:
        found: None where no seed has both rows.
        adjusted: its p-value for all claims of the file; NaN where there is none.
        verdict: of `verdict`; `unfinished` while a seed lacks a row, whatever the others show.
    """

    name: str
    claim: Claim
    found: Contrast | None
    adjusted: float
    verdict: str


def judged(experiment: Experiment, results: Mapping[Cell, Line]) -> list[Judged]:
    """Judge the claims of an experiment together."""
    found = {name: contrast(experiment, results, claim) for name, claim in experiment.claims.items()}
    p_values = {name: each.p for name, each in found.items() if each is not None and not math.isnan(each.p)}
    adjusted = holm(p_values, len(experiment.claims))
    judgements = []
    for name, claim in experiment.claims.items():
        each, p = found[name], adjusted.get(name, math.nan)
        whole = each is not None and len(each.differences) == len(experiment.seeds)
        said = verdict(claim.direction, each, p) if whole and each is not None else "unfinished"
        judgements.append(Judged(name, claim, each, p, said))
    return judgements


# ---- tables ------------------------------------------------------------------------------------------------------

HEADINGS = (
    "row",
    "seeds",
    "before",
    "after",
    "greedy",
    "worst topic",
    "no signal",
    "steps",
    "k tokens drawn",
    "k trained",
    "MB up",
    "refused",
)


def table_rows(experiment: Experiment, results: Mapping[Cell, Line]) -> list[tuple[str, ...]]:
    """Return a line for each row: means over its seeds. Shares in per cent, tokens in thousands a silo."""
    rows: list[tuple[str, ...]] = []
    for name in experiment.rows:
        lines = [results[Cell(name, seed)] for seed in experiment.seeds if Cell(name, seed) in results]
        if not lines:
            continue
        silos = experiment.setting.silos
        rows.append(
            (
                name,
                str(len(lines)),
                _percent(line["rounds"][0]["pass_at_1"] for line in lines),
                _percent(value_of(line, "pass_at_1") for line in lines),
                _percent(value_of(line, "pass_at_1_greedy") for line in lines),
                _percent(value_of(line, "worst_topic") for line in lines),
                _percent(value_of(line, "zero_variance_share") for line in lines),
                f"{fmean(line['steps'] for line in lines):.0f}",
                f"{fmean(line['generated_tokens'] for line in lines) / silos / 1000:.1f}",
                f"{fmean(line['trained_tokens'] for line in lines) / silos / 1000:.1f}",
                f"{fmean(sum(line['bytes']['up'].values()) for line in lines) / 1e6:.2f}",
                str(sum(sum(line["refused"].values()) for line in lines)),
            )
        )
    return rows


def claim_rows(experiment: Experiment, judgements: Sequence[Judged]) -> list[tuple[str, ...]]:
    """Return a line for each claim; differences in points."""
    rows: list[tuple[str, ...]] = []
    for each in judgements:
        claim, found = each.claim, each.found
        points = "" if found is None else f"{100 * found.mean:+.1f}"
        if found is not None and not math.isnan(found.low):
            points += f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        seeds = f"{0 if found is None else len(found.differences)} of {len(experiment.seeds)}"
        p = "" if math.isnan(each.adjusted) else f"{each.adjusted:.3g}"
        contrasted = f"{claim.row} - {claim.against}"
        rows.append((each.name, contrasted, claim.metric, claim.direction, seeds, points, p, each.verdict))
    return rows


def programs_of(results: Mapping[Cell, Line]) -> int:
    """Return by how many versions of the program these results were made."""
    return len({line.get("code_sha256") for line in results.values()})


CLAIM_HEADINGS = ("claim", "contrast", "metric", "expected", "seeds", "points, 95 %", "adjusted p", "verdict")
SAID = "One process a federation: no sockets, no walls around a trainer, and a clock of its own."


def _percent(values: Iterable[float | None]) -> str:
    """Return the mean of those that there are; empty where there is none."""
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f}" if known else ""


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

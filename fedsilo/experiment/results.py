"""Tables and verdicts from the lines of results alone: nothing is measured here.

Rows are compared pairwise by seed. The interval is Student's of the paired differences; the p-value of a claim is two-
sided, or the larger of two one-sided ones where equivalence is claimed. The claims of a family are judged together by
Holm's method. A cell has a value if its run finished with all rounds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fedsilo.experiment.tuning import frozen_of, knobs_of, trials_behind, with_knobs
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
    results = {
        cell: line
        for cell in cells_of(experiment)
        if (whole := with_knobs(experiment, knobs, cell)) is not None
        and (line := newest.get(digest_of(experiment, whole))) is not None
    }
    for name in (name for name, row in experiment.rows.items() if row.method == BASE):
        for cell, line in list(results.items()):
            results.setdefault(replace(cell, row=name), _untrained(line))
    return results


def _untrained(line: Line) -> Line:
    """Return the line of the base model by itself: no steps, no tokens, and nothing sent."""
    before = line["rounds"][0]
    return {
        **{name: line[name] for name in (*EQUAL_OVER_ROWS, "seed", "silos") if name in line},
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
    that finished with all rounds; the base model has none.
    """
    firsts: dict[tuple[str, int, str], tuple[Cell, Any]] = {}
    faults = []
    for cell, line in results.items():
        trained = line["steps"] if complete(line) and line["steps"] else None
        for name, value in [*((name, line.get(name)) for name in EQUAL_OVER_ROWS), ("steps", trained)]:
            if not value:
                continue  # nothing was measured, or an earlier version noted nothing
            first, expected = firsts.setdefault((cell.setting, cell.seed, name), (cell, value))
            if value != expected:
                faults.append(f"{cell} and {first} differ in {name}")
    return faults


def complete(line: Line) -> bool:
    """Return True if the run finished and each round of its plan ended with a result; the base model has no run."""
    return line.get("state") == "finished" and line.get("rounds_finished") == line.get("rounds_planned")


# Metrics that each round has; the others are of a whole run.
OF_ROUNDS: tuple[Metric, ...] = (
    "pass_at_1",
    "pass_at_1_greedy",
    "worst_topic",
    "worst_silo",
    "own_task",
    "drift_between",
)


def value_after(measured: Mapping[str, Any], metric: str) -> float | None:
    """Return the value of one of `OF_ROUNDS` after a round; None where nothing was measured."""
    value: float | None
    match metric:
        case "worst_topic":
            value = min(measured["topics"].values(), default=None)
        case "drift_between":
            value = (measured.get("apart") or {}).get("factors")
        case _:
            value = measured.get(metric)
    return None if value is None else float(value)


def value_of(line: Line, metric: Metric) -> float | None:
    """Return a cell's value after the last round. None: its run did not finish with all rounds, the gate let no
    measurement out, or the method has no such figure."""
    if not complete(line):
        return None
    match metric:
        case "best_pass_at_1":
            value = (line.get("best") or {}).get("pass_at_1")
        case "gain_per_megabyte":
            value = _gain_per_megabyte(line)
        case "zero_variance_share":
            value = line[metric]
        case _:
            value = value_after(line["rounds"][-1], metric)
    return None if value is None else float(value)


def why_no_value(line: Line) -> str:
    """Return why a cell that was carried out has no value."""
    if line.get("state") != "finished":
        return f"{line.get('state')} {line.get('reason', '')}".strip()
    if not complete(line):
        return f"{line['rounds_finished']} of {line['rounds_planned']} rounds"
    return "not measured"


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


def contrast_of(experiment: Experiment, results: Mapping[Cell, Line], claim: Claim) -> Contrast | None:
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
    seeds = []
    for seed in claim.seeds or experiment.seeds:
        lines = [[results.get(Cell(name, row, seed)) for row in rows] for name in claim.settings]
        values = [[None if line is None else value_of(line, claim.metric) for line in each] for each in lines]
        whole = [[value for value in each if value is not None] for each in values]
        if all(len(each) == len(rows) for each in whole):
            seeds.append(whole)
    return seeds


def _without_value(experiment: Experiment, results: Mapping[Cell, Line], claim: Claim) -> tuple[str, ...]:
    """Return the claim's cells that were carried out and have no value, each with the reason."""
    cells = [
        Cell(setting, row, seed)
        for seed in claim.seeds or experiment.seeds
        for setting in claim.settings
        for row in dict.fromkeys(claim.rows)
    ]
    return tuple(
        f"{cell}: {why_no_value(results[cell])}"
        for cell in cells
        if cell in results and value_of(results[cell], claim.metric) is None
    )


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of a least-squares line, or the value where there is one."""
    if len(values) == 1:
        return values[0]
    return linear_regression(places, values).slope


@dataclass(frozen=True)
class Share:
    """Part of another row's lead: the ratio of mean leads, and the middle 95 % of it over resampled seeds.

    Attributes:
        seeds: how many have all three rows.
        mean: NaN where the other row has no lead.
        low, high: NaN with fewer than two seeds, and where too many resamples have no lead.
        dropped: part of the resamples in which the other row has no lead; they are left out of the interval.
    """

    seeds: int
    mean: float
    low: float = math.nan
    high: float = math.nan
    dropped: float = 0.0


_RESAMPLES = 10_000
_DROPPED_MAX = 0.025  # beyond it, what is left out could be a whole tail of the interval


def share_of(experiment: Experiment, results: Mapping[Cell, Line], claim: Claim) -> Share | None:
    """Return what part of the lead of the other row over `against` the claim's row has; None: no seed has all three.

    The interval is a percentile bootstrap over seeds (Efron 1979).
    """
    values = _values_by_seed(experiment, results, claim, claim.rows)
    leads = np.array([[one - base, other - base] for ((one, base, other),) in values])  # [seeds, 2]
    if not len(leads):
        return None
    one, other = leads.mean(axis=0)
    if other <= 0:
        return Share(len(leads), math.nan)
    mean = float(one / other)
    if len(leads) < 2:
        return Share(len(leads), mean)
    picked = np.random.default_rng(0).integers(len(leads), size=(_RESAMPLES, len(leads)))
    some, others = leads[picked].mean(axis=1).T
    dropped = float((others <= 0).mean())
    if dropped > _DROPPED_MAX:
        return Share(len(leads), mean, dropped=dropped)
    low, high = np.quantile(some[others > 0] / others[others > 0], [0.025, 0.975])
    return Share(len(leads), mean, float(low), float(high), dropped)


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


def verdict(direction: str, contrast: Contrast, adjusted: float) -> str:
    """Return `shown`, `contradicted`, `not shown`, either of the first and the last also `..., inside the margin`, or
    `equivalent`, which only a claim of equivalence can be.

    Args:
        direction: as declared.
        contrast: of the claim.
        adjusted: its p-value, for as many claims as its family has. `inside the margin` is not adjusted.
    """
    if math.isnan(contrast.p):
        return "not shown"
    if direction == "equivalent":
        if adjusted <= LEVEL:
            return "equivalent"
        return "contradicted" if contrast.low > MARGIN or contrast.high < -MARGIN else "not shown"
    inside = ", inside the margin" if contrast.inside else ""
    if adjusted > LEVEL:
        return f"not shown{inside}"
    if direction != "either" and (contrast.mean > 0) != (direction == "above"):
        return "contradicted"
    return f"shown{inside}"


@dataclass(frozen=True)
class Judged:
    """A claim with its outcome.

    Attributes:
        contrast: None where no seed has both rows.
        adjusted: its p-value for all claims of its family; NaN where it is not judged.
        verdict: of `verdict`; `incomplete`: a cell was carried out and has no value; `unfinished`: a cell was not
            carried out yet; `exploratory`.
        seeds: how many have a value of every row.
        without_value: cells that were carried out and have no value, each with the reason.
        share: of a claim that asks for it.
    """

    name: str
    claim: Claim
    contrast: Contrast | None
    adjusted: float
    verdict: str
    seeds: int = 0
    without_value: tuple[str, ...] = ()
    share: Share | None = None

    @property
    def outcome(self) -> str:
        """The verdict, with the cells that have no value."""
        first, more = self.without_value[:_NAMED_MAX], len(self.without_value) - _NAMED_MAX
        named = "; ".join([*first, *([f"and {more} more"] if more > 0 else [])])
        return f"{self.verdict} ({named})" if named else self.verdict


_NAMED_MAX = 4  # cells or rows that one sentence names


def judged(experiment: Experiment, results: Mapping[Cell, Line]) -> list[Judged]:
    """Judge the claims of an experiment, each family together.

    A claim that is not finished counts in its family with a p-value of 1, so that a claim that is shown stays so when
    others finish.
    """
    whole = {name: _unjudged(experiment, results, name) for name in experiment.claims}
    families: dict[str, list[str]] = {}
    for name, claim in experiment.claims.items():
        if not claim.exploratory:
            families.setdefault(claim.family, []).append(name)
    adjusted: dict[str, float] = {}
    for names in families.values():
        finished = {
            name: contrast.p
            for name in names
            if (contrast := whole[name].contrast) is not None and not whole[name].verdict and not math.isnan(contrast.p)
        }
        adjusted |= holm(finished, len(names))
    judgements = []
    for name, each in whole.items():
        p = adjusted.get(name, math.nan)
        outcome = each.verdict
        if not outcome and each.contrast is not None:
            outcome = verdict(each.claim.direction, each.contrast, p)
        judgements.append(replace(each, adjusted=p, verdict=outcome))
    return judgements


def _unjudged(experiment: Experiment, results: Mapping[Cell, Line], name: str) -> Judged:
    """Return a claim with its contrast, and with the outcome that needs no judgement; empty where one is needed."""
    claim = experiment.claims[name]
    contrast = contrast_of(experiment, results, claim)
    share = share_of(experiment, results, claim) if claim.share_of is not None else None
    without_value = _without_value(experiment, results, claim)
    if claim.share_of is not None:
        seeds = share.seeds if share is not None else 0
    else:
        seeds = len(contrast.differences) if contrast is not None else 0
    outcome = "exploratory" if claim.exploratory else ""
    if without_value:
        outcome = "incomplete"
    elif seeds < len(claim.seeds or experiment.seeds):
        outcome = "unfinished"
    return Judged(name, claim, contrast, math.nan, outcome, seeds, without_value, share)


# ---- tables ------------------------------------------------------------------------------------------------------


def table_rows(experiment: Experiment, results: Mapping[Cell, Line], table: Table) -> list[tuple[str, ...]]:
    """Return a line for each row, with a cell for each of `HEADINGS`: means over its seeds. Shares in per cent; tokens
    in thousands, and bytes, a silo.

    Seeds are those with a value and those carried out; `runs` says how they ended, and `knobs of` whose trials chose
    what the row is made with.
    """
    rows: list[tuple[str, ...]] = []
    silos = experiment.settings[table.setting].silos
    for name in experiment.rows_of(table):
        cells = [Cell(table.setting, name, seed) for seed in table.seeds or experiment.seeds]
        if lines := [results[cell] for cell in cells if cell in results]:
            shown = (cell(lines, silos) for _, cell in _COLUMNS)
            rows.append(
                (name + mark_of(experiment.rows[name]), *shown, knobs_of(experiment, table.setting, name)),
            )
    return rows


def _ending(line: Line) -> str:
    """Return how a run ended: its state, or that rounds of it have no result."""
    return "without all rounds" if line["state"] == "finished" and not complete(line) else str(line["state"])


def mark_of(row: Row) -> str:
    """Return how a row is marked that no federation could carry out: it needs what silos do not give away."""
    if row.pooled:
        return " (pooled)"
    return " (donors' own policies)" if row.plan.get("donor_denominator") == "donor" else ""


def _kilobits(line: Line) -> float | None:
    """Return how many thousand bits a silo's messages of one round can carry at most."""
    bits = line.get("capacity_bits")
    return sum(bits.values()) / 1000 if bits else None


_PUBLIC = ("public.responses", "public.donors")
_FACTORS = ("lora.", "global.adapter")


def _public_over_factors(line: Line) -> float | None:
    """Return the bytes of public answers over those of factors, both ways together."""
    ways = line["bytes"].values()
    public = sum(way.get(kind, 0) for way in ways for kind in _PUBLIC)
    factors = sum(count for way in ways for kind, count in way.items() if kind.startswith(_FACTORS))
    return public / factors if factors else None


Shown = Callable[[Sequence[Line], int], str]  # a cell of a table, from the lines of a row and the number of silos


def _mean_of(value: Callable[[Line], float | None], form: str, scale: float = 1.0) -> Shown:
    """Return a cell with the mean of the values that there are; empty where there is none."""

    def cell(lines: Sequence[Line], silos: int) -> str:
        known = [number for line in lines if (number := value(line)) is not None]
        return format(scale * fmean(known), form) if known else ""

    return cell


def _percent_of(metric: Metric) -> Shown:
    return _mean_of(lambda line: value_of(line, metric), ".1f", 100)


def _a_silo(value: Callable[[Line], float], form: str, unit: float) -> Shown:
    """Return a cell with the mean of what one silo had, in a unit."""
    return lambda lines, silos: format(fmean(value(line) for line in lines) / silos / unit, form)


def _runs(lines: Sequence[Line], silos: int) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(Counter(map(_ending, lines)).items()))


_COLUMNS: tuple[tuple[str, Shown], ...] = (
    ("seeds", lambda lines, _: f"{sum(value_of(line, 'pass_at_1') is not None for line in lines)} of {len(lines)}"),
    ("before", _mean_of(lambda line: line["rounds"][0]["pass_at_1"], ".1f", 100)),
    ("after", _percent_of("pass_at_1")),
    ("best", _percent_of("best_pass_at_1")),
    ("greedy", _percent_of("pass_at_1_greedy")),
    ("worst topic", _percent_of("worst_topic")),
    ("worst silo", _percent_of("worst_silo")),
    ("no signal", _percent_of("zero_variance_share")),
    ("apart", _mean_of(lambda line: value_of(line, "drift_between"), ".3g")),
    ("steps", _mean_of(lambda line: line["steps"], ".0f")),
    ("public steps", _mean_of(lambda line: line.get("public_steps"), ".0f")),
    ("k tokens drawn", _a_silo(lambda line: line["generated_tokens"], ".1f", 1e3)),
    ("k trained", _a_silo(lambda line: line["trained_tokens"], ".1f", 1e3)),
    ("MB up", _a_silo(lambda line: sum(line["bytes"]["up"].values()), ".2f", 1e6)),
    ("MB down", _a_silo(lambda line: sum(line["bytes"]["down"].values()), ".2f", 1e6)),
    ("public / factors", _mean_of(_public_over_factors, ".3g")),
    ("k bits at most", _mean_of(_kilobits, ".3g")),
    ("points / MB", _mean_of(lambda line: value_of(line, "gain_per_megabyte"), ".3g")),
    ("refused", lambda lines, _: str(sum(sum(line["refused"].values()) for line in lines))),
    ("runs", _runs),
)
HEADINGS = ("row", *(heading for heading, _ in _COLUMNS), "knobs of")


def claim_rows(experiment: Experiment, judgements: Sequence[Judged]) -> list[tuple[str, ...]]:
    """Return a line for each claim; differences in points, but of figures that are no shares."""
    rows: list[tuple[str, ...]] = []
    for each in judgements:
        claim = each.claim
        seeds = f"{each.seeds} of {len(claim.seeds or experiment.seeds)}"
        p = "" if math.isnan(each.adjusted) else f"{each.adjusted:.3g}"
        contrasted = f"{claim.row} - {claim.against}"
        if len(claim.settings) > 1:
            contrasted = f"slope of {contrasted}"
        where = ", ".join(claim.settings)
        rows.append(
            (each.name, where, contrasted, claim.metric, claim.direction, seeds, difference_text(each), p, each.outcome)
        )
    return rows


def difference_text(judgement: Judged) -> str:
    """Return mean and interval of a claim, or the share that it asks for."""
    claim, contrast = judgement.claim, judgement.contrast
    if claim.share_of is not None:
        return "" if judgement.share is None else _share_text(judgement.share, claim.share_of)
    if contrast is None:
        return ""
    scale, form = (100, "+.1f") if claim.metric in IN_POINTS else (1, "+.3g")
    text = format(scale * contrast.mean, form)
    if math.isnan(contrast.low):
        return text
    return f"{text} [{format(scale * contrast.low, form)}, {format(scale * contrast.high, form)}]"


def _share_text(share: Share, other: str) -> str:
    if math.isnan(share.mean):
        return f"no lead to share: {other} has none"
    text, dropped = f"{share.mean:.2f} of {other}", f"{100 * share.dropped:.3g} % of resamples have no lead"
    if share.dropped > _DROPPED_MAX:
        return f"{text}, no interval: {dropped}"
    if math.isnan(share.low):
        return text
    return f"{text} [{share.low:.2f}, {share.high:.2f}]" + (f", {dropped}" if share.dropped else "")


def doubts(experiment: Experiment, lines: Sequence[Line]) -> list[str]:
    """Return why these results should not be compared: several programs made the cells, the trials that their knobs
    come from or the choice among those, or rows differ in what must be equal."""
    results, frozen = of_experiment(experiment, lines), frozen_of(experiment, lines).values()
    newest = {line.get("design_sha256"): line for line in lines}
    made: list[tuple[str, Any]] = [
        (f"{cell.setting}/{cell.row}", line.get("program"))
        for cell, line in results.items()
        if experiment.rows[cell.row].method != BASE
    ]
    for cell in trials_behind(experiment, frozen):
        if (line := newest.get(digest_of(experiment, cell))) is not None:
            made.append((f"trials of {cell.setting}/{cell.row}", line.get("program")))
    made += [(f"choice for {each.setting}/{each.family}", dict(each.program) or None) for each in frozen]
    programs: dict[str, dict[str, None]] = {}
    for name, program in made:
        programs.setdefault(_program_name(program), {})[name] = None
    mixed = []
    if len(programs) > 1:
        named = "; ".join(f"{program}: {_some(list(names))}" for program, names in programs.items())
        mixed = [f"these results were made by {len(programs)} versions of the program ({named})"]
    return mixed + unequal(results)


def _program_name(program: Mapping[str, str] | None) -> str:
    """Return what tells a version of the program from another: first digits of its digest, and its libraries."""
    if not program:
        return "a version that is not noted"
    libraries = [f"{name} {version}" for name, version in sorted(program.items()) if name != "sha256"]
    return ", ".join([program["sha256"][:12], *libraries])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


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
NOTE = "One process a federation: no sockets, no walls around a trainer, and a clock of its own."


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

"""Pictures of experiments, from the lines of results alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsilo.experiment.design import IN_POINTS, Cell, Claim, Experiment, Setting, Table
from fedsilo.experiment.results import OF_ROUNDS, Judged, Line, complete, mark_of, paired, value_after
from fedsilo.protocol.errors import OperationError

Point = tuple[int, float, float, float]  # round or step, mean, and the ends of its interval


def figure_of(claim: Claim) -> str:
    """Return the figure whose curves show a claim's metric; empty where none does: a slope, or a metric of a whole
    run."""
    if len(claim.settings) > 1:
        return ""
    if claim.metric == "zero_variance_share":
        return "PublicStep.zero_variance_share"
    return claim.metric if claim.metric in OF_ROUNDS else ""


def curve_of(experiment: Experiment, results: Mapping[Cell, Line], table: Table, row: str, figure: str) -> list[Point]:
    """Return a row's curve over its complete runs: mean over seeds and 95 % interval, which is the value where there is
    one seed.

    Args:
        experiment: the file.
        results: its lines.
        table: setting and seeds.
        row: name.
        figure: a metric of rounds, such as `pass_at_1`, after each round, the base model's first, shares in per cent;
            or one of the figures of steps, such as `PublicStep.alpha_mean`, at the steps of the whole run.
    """
    cells = [Cell(table.setting, row, seed) for seed in table.seeds or experiment.seeds]
    setting = experiment.settings[table.setting]
    series = [_series(setting, line, figure) for cell in cells if (line := results.get(cell)) and complete(line)]
    points = []
    for number in sorted({number for each in series for number in each}):
        contrast = paired([each[number] for each in series if number in each], "either")
        low, high = (contrast.mean if math.isnan(end) else end for end in (contrast.low, contrast.high))
        points.append((number, contrast.mean, low, high))
    return points


def _series(setting: Setting, line: Line, figure: str) -> dict[int, float]:
    """Return what was measured, by round or by step of the whole run."""
    if figure in OF_ROUNDS:
        scale = 100 if figure in IN_POINTS else 1
        values = {number: value_after(measured, figure) for number, measured in enumerate(line["rounds"])}
        return {number: scale * value for number, value in values.items() if value is not None}
    task, _, name = figure.partition(".")
    places = line.get("steps_at", {}).get(task, [])
    noted = line.get("curves", {}).get(task, {}).get(name, [])
    return {
        (number - 1) * setting.local_steps + step: float(value)
        for (number, step), value in zip(places, noted, strict=False)  # a line of an earlier version has no places
        if value is not None
    }


def figures_of(results: Mapping[Cell, Line]) -> list[str]:
    """Return what can be drawn: metrics over rounds, and the figures of steps that some line has."""
    rounds = [
        metric
        for metric in OF_ROUNDS
        if any(value_after(measured, metric) is not None for line in results.values() for measured in line["rounds"])
    ]
    steps = {
        f"{task}.{name}"
        for line in results.values()
        for task in line.get("steps_at", {})
        for name in line.get("curves", {}).get(task, {})
    }
    return [*rounds, *sorted(steps)]


def draw_curves(experiment: Experiment, results: Mapping[Cell, Line], table: Table, out: Path, figure: str) -> None:
    """Draw the curve of every row into one picture, whose form its suffix says. Raises OperationError: not written."""
    over_rounds = figure in OF_ROUNDS
    with _axes(out) as axes:
        for row in experiment.rows_of(table):
            if points := curve_of(experiment, results, table, row, figure):
                numbers, means, lows, highs = zip(*points, strict=True)
                label = row + mark_of(experiment.rows[row])
                (line,) = axes.plot(numbers, means, marker="o" if over_rounds else None, label=label)
                axes.fill_between(numbers, lows, highs, alpha=0.15, color=line.get_color())
        if over_rounds:
            axes.set_xticks(range(experiment.settings[table.setting].rounds + 1))
        axes.set_xlabel("round" if over_rounds else "step")
        axes.set_ylabel(f"{figure} on held-out prompts, %" if over_rounds and figure in IN_POINTS else figure)
        axes.set_title(f"{experiment.experiment}, {table.setting}")
        axes.legend()


def draw_claims(judgements: Sequence[Judged], out: Path) -> None:
    """Draw the paired difference of each claim in points, with each seed's own and the 95 % interval. Raises
    OperationError: not written."""
    in_points = [
        each
        for each in judgements
        if each.contrast is not None and each.claim.metric in IN_POINTS and len(each.claim.settings) == 1
    ]
    with _axes(out, height=1 + 0.4 * len(in_points)) as axes:
        for place, each in enumerate(reversed(in_points)):
            if (contrast := each.contrast) is None:
                continue
            differences = [100 * value for value in contrast.differences]
            axes.plot(differences, [place] * len(differences), "k.", alpha=0.3)
            axes.plot([100 * contrast.low, 100 * contrast.high], [place, place], lw=3)
            axes.plot([100 * contrast.mean], [place], "ks")
        axes.set_yticks(range(len(in_points)), [f"{each.name}: {each.verdict}" for each in reversed(in_points)])
        axes.axvline(0, color="grey", lw=0.8)
        axes.set_xlabel("difference in points, with its 95 % interval")


@contextmanager
def _axes(out: Path, height: float = 4.5) -> Iterator[Any]:
    """Give the axes of one picture, which is written at the end: the same bytes from the same results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fedsilo"
    figure, axes = pyplot.subplots(figsize=(7, height), layout="constrained")
    try:
        yield axes
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else {})
    except OSError as error:
        raise OperationError(f"{out}: {error.strerror}", hint="name a folder that you may write, with --out") from error
    finally:
        pyplot.close(figure)

"""Pictures of experiments, from the lines of results alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from fedsilo.experiment.design import Cell, Experiment
from fedsilo.experiment.results import Line, paired
from fedsilo.protocol.errors import OperationError

Point = tuple[int, float, float, float]  # round, mean, and the ends of its interval


def curve_of(experiment: Experiment, results: Mapping[Cell, Line], row: str) -> list[Point]:
    """Return pass@1 of a row after each round, the base model's first, in per cent: mean over seeds and 95 % interval.

    With one seed the interval is the value.
    """
    lines = [results[Cell(row, seed)] for seed in experiment.seeds if Cell(row, seed) in results]
    points = []
    for number in range(min((len(line["rounds"]) for line in lines), default=0)):
        measured = [line["rounds"][number]["pass_at_1"] for line in lines]
        values = [100 * float(value) for value in measured if value is not None]
        if not values:
            continue
        found = paired(values, "above")
        low, high = (found.mean if math.isnan(end) else end for end in (found.low, found.high))
        points.append((number, fmean(values), low, high))
    return points


def draw_curves(experiment: Experiment, results: Mapping[Cell, Line], out: Path) -> None:
    """Draw the curve of every row into one picture, whose form its suffix says. Raises OperationError: not written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for row in experiment.rows:
        if points := curve_of(experiment, results, row):
            numbers, means, lows, highs = zip(*points, strict=True)
            (line,) = axes.plot(numbers, means, marker="o", label=row)
            axes.fill_between(numbers, lows, highs, alpha=0.15, color=line.get_color())
    axes.set_xlabel("round")
    axes.set_ylabel("pass@1 on held-out prompts, %")
    axes.set_xticks(range(experiment.setting.rounds + 1))
    axes.set_title(experiment.experiment)
    axes.legend()
    try:
        figure.savefig(out)
    except OSError as error:
        raise OperationError(f"{out}: {error.strerror}", hint="name a folder that you may write, with --out") from error
    finally:
        pyplot.close(figure)

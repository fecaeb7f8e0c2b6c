"""Pictures of experiments, from the lines of results alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from fedsilo.experiment.design import IN_POINTS, Cell, Experiment, Table
from fedsilo.experiment.results import Judged, Line, paired
from fedsilo.protocol.errors import OperationError

Point = tuple[int, float, float, float]  # round or step, mean, and the ends of its interval
ROUNDS = "pass_at_1"  # drawn over rounds; all others are figures of steps


def curve_of(experiment: Experiment, results: Mapping[Cell, Line], table: Table, row: str, figure: str) -> list[Point]:
    """Return a row's curve: mean over seeds and 95 % interval, which is the value where there is one seed.

    Args:
        experiment: the file.
        results: its lines.
        table: setting and seeds.
        row: name.
        figure: `pass_at_1`, in per cent after each round, the base model's first; or one of the figures of steps, such
            as `PublicStep.alpha_mean`, in order.
    """
    cells = [Cell(table.setting, row, seed) for seed in table.seeds or experiment.seeds]
    series = [_series(results[cell], figure) for cell in cells if cell in results]
    points = []
    for number in range(min(map(len, series), default=0)):
        values = [value for each in series if (value := each[number]) is not None]
        if not values:
            continue
        found = paired(values, "either")
        low, high = (found.mean if math.isnan(end) else end for end in (found.low, found.high))
        points.append((number if figure == ROUNDS else number + 1, fmean(values), low, high))
    return points


def _series(line: Line, figure: str) -> list[float | None]:
    if figure == ROUNDS:
        return [None if (value := each["pass_at_1"]) is None else 100 * float(value) for each in line["rounds"]]
    task, _, name = figure.partition(".")
    return list(line.get("curves", {}).get(task, {}).get(name, []))


def figures_of(results: Mapping[Cell, Line]) -> list[str]:
    """Return what can be drawn: pass@1 over rounds, and the figures of steps that some line has."""
    tasks = {
        f"{task}.{name}"
        for line in results.values()
        for task, names in line.get("curves", {}).items()
        for name in names
    }
    return [ROUNDS, *sorted(tasks)]


def draw_curves(
    experiment: Experiment, results: Mapping[Cell, Line], table: Table, out: Path, figure: str = ROUNDS
) -> None:
    """Draw the curve of every row into one picture, whose form its suffix says. Raises OperationError: not written."""
    with _axes(out) as axes:
        for row in experiment.rows_of(table):
            if points := curve_of(experiment, results, table, row, figure):
                numbers, means, lows, highs = zip(*points, strict=True)
                (line,) = axes.plot(numbers, means, marker="o" if figure == ROUNDS else None, label=row)
                axes.fill_between(numbers, lows, highs, alpha=0.15, color=line.get_color())
        if figure == ROUNDS:
            axes.set_xticks(range(experiment.settings[table.setting].rounds + 1))
        axes.set_xlabel("round" if figure == ROUNDS else "step")
        axes.set_ylabel("pass@1 on held-out prompts, %" if figure == ROUNDS else figure)
        axes.set_title(f"{experiment.experiment}, {table.setting}")
        axes.legend()


def draw_claims(judgements: Sequence[Judged], out: Path) -> None:
    """Draw the paired difference of each claim in points, with each seed's own and the 95 % interval. Raises
    OperationError: not written."""
    in_points = [
        each
        for each in judgements
        if each.found is not None and each.claim.metric in IN_POINTS and len(each.claim.settings) == 1
    ]
    with _axes(out, height=1 + 0.4 * len(in_points)) as axes:
        for place, each in enumerate(reversed(in_points)):
            if (found := each.found) is None:
                continue
            axes.plot([100 * value for value in found.differences], [place] * len(found.differences), "k.", alpha=0.3)
            axes.plot([100 * found.low, 100 * found.high], [place, place], lw=3)
            axes.plot([100 * found.mean], [place], "ks")
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

"""`fedsilo experiment`: many federations in one process each, compared pairwise by seed, from a file that states the
claims before anything runs."""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.output import command, emit, table
from fedsilo.protocol.errors import FedSiloError, NotFoundError, OperationError, UsageError

if TYPE_CHECKING:
    from fedsilo.experiment.design import Cell, Experiment
    from fedsilo.experiment.results import Line

app = typer.Typer(
    no_args_is_help=True, help="Compare methods over many seeds on this machine, and judge stated claims."
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The experiment.")]
ResultsOption = Annotated[
    Path | None, typer.Option("--results", help="File of results; default FILE.results.jsonl, beside the experiment.")
]
JobsOption = Annotated[int | None, typer.Option("--jobs", min=1, help="Processes at once; default one a core.")]


def _results(path: Path, named: Path | None) -> Path:
    return named or path.with_suffix(".results.jsonl")


def _read(path: Path, named: Path | None) -> tuple[Experiment, dict[Cell, Line]]:
    from fedsilo.experiment.design import read_experiment
    from fedsilo.experiment.results import of_experiment, read_results

    experiment = read_experiment(path)
    return experiment, of_experiment(experiment, read_results(_results(path, named)))


def _known(path: Path, named: Path | None) -> tuple[Experiment, dict[Cell, Line]]:
    """Read a file with its results. Raises NotFoundError: there are none."""
    experiment, known = _read(path, named)
    if not known:
        raise NotFoundError(f"{_results(path, named)} has no result of {path}", hint=f"fedsilo experiment run {path}")
    return experiment, known


@command(app, "experiment plan")
def plan(path: FileArgument, results: ResultsOption = None, jobs: JobsOption = None) -> None:
    """List the cells, which of them have results, and how long the rest takes."""
    from fedsilo.experiment.design import cells_of, require_files
    from fedsilo.experiment.results import read_results
    from fedsilo.experiment.running import hours_of, trials_left

    experiment, known = _read(path, results)
    cells, trials = list(cells_of(experiment)), trials_left(experiment, read_results(_results(path, results)))
    left = [cell for cell in cells if cell not in known]
    hours = hours_of(experiment, [*trials, *left], known, jobs or _cores())
    data = {
        "experiment": experiment.experiment,
        "cells": [{"cell": str(cell), "done": cell in known} for cell in cells],
        "left": len(left),
        "trials_left": len(trials),
        "hours": round(hours, 2),
        "measured": bool(known),
    }

    def text() -> str:
        counts: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            counts.setdefault((cell.setting, cell.row), []).append(cell)
        rows = [
            (setting, row, str(sum(cell in known for cell in of_row)), str(len(of_row)))
            for (setting, row), of_row in counts.items()
        ]
        basis = "as measured" if known else "as the file says; none has run yet"
        tuning = f"about {len(trials)} trials for tuning and " if trials else ""
        takes = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
        return (
            f"{experiment.experiment}: {len(cells)} cells, {tuning}{len(left)} without a result, {takes} ({basis})\n"
            + table(("setting", "row", "done", "seeds"), rows)
        )

    missing = []
    try:
        require_files(path)
    except NotFoundError as error:
        missing.append(error.message)
    emit(data, text, warnings=missing)


@command(app, "experiment run")
def run(
    path: FileArgument,
    results: ResultsOption = None,
    jobs: JobsOption = None,
    cell: Annotated[
        list[str], typer.Option("--cell", help="SETTING/ROW/SEED: carry out this one, again if need be.")
    ] = [],  # noqa: B006  # typer reads it
    claim: Annotated[str, typer.Option("--claim", help="Carry out the cells of this claim alone.")] = "",
) -> None:
    """Tune where the file says so, and carry out the cells that have no result yet; what was finished stays."""
    from fedsilo.experiment.design import cell_named, read_experiment, require_files
    from fedsilo.experiment.running import locked, run_experiment
    from fedsilo.files.extras import need

    need("torch", "transformers")
    experiment, target = read_experiment(path), _results(path, results)
    require_files(path)
    named = [cell_named(experiment, name) for name in cell]

    def say(line: str) -> None:
        typer.echo(line, err=True)

    with locked(target):
        ran = run_experiment(path, target, jobs=jobs or _cores(), claim=claim, named=named, say=say)
    error = OperationError(
        f"{ran.failed} of {ran.done + ran.failed} cells failed", hint="what succeeded stays; mend it and run again"
    )
    emit(
        {"results": str(target), "carried_out": ran.done, "failed": ran.failed},
        f"{ran.done} cells carried out; fedsilo experiment table {path}",
        error=error if ran.failed else None,
    )


@command(app, "experiment table")
def show_table(
    path: FileArgument,
    results: ResultsOption = None,
    form: Annotated[str, typer.Option("--form", help="text, markdown or latex.")] = "text",
) -> None:
    """Show each row's figures and the verdict on each claim, from the results alone."""
    from fedsilo.experiment import results as shown

    forms = {"text": table, "markdown": shown.as_markdown, "latex": shown.as_latex}
    if form not in forms:
        raise UsageError(f"--form {form}", hint="text, markdown or latex")
    experiment, known = _known(path, results)
    claims = shown.claim_rows(experiment, shown.judged(experiment, known))
    tables = {name: shown.table_rows(experiment, known, each) for name, each in experiment.all_tables().items()}
    data = {
        "tables": {
            name: [dict(zip(shown.HEADINGS, row, strict=True)) for row in rows] for name, rows in tables.items()
        },
        "claims": [dict(zip(shown.CLAIM_HEADINGS, row, strict=True)) for row in claims],
        "note": shown.NOTE,
    }
    draw = forms[form]
    parts = [f"{name}\n\n{draw(shown.HEADINGS, rows)}" for name, rows in tables.items() if rows]
    parts += [draw(shown.CLAIM_HEADINGS, claims)] if claims else []
    emit(
        data,
        "\n\n".join([*parts, shown.NOTE]),
        warnings=shown.doubts(experiment, shown.read_results(_results(path, results))),
    )


@command(app, "experiment plot")
def plot(
    path: FileArgument,
    out: Annotated[Path, typer.Option("--out", help="Picture to write: .svg or .png.")],
    named: Annotated[str, typer.Option("--table", help="Which of the file's tables; default its first.")] = "",
    figure: Annotated[
        str, typer.Option("--figure", help="Metric of rounds: pass_at_1; or figure of steps: PublicStep.alpha_mean.")
    ] = "pass_at_1",
    results: ResultsOption = None,
) -> None:
    """Draw one figure of each row over the rounds or steps, with the 95 % interval of its mean."""
    from fedsilo.experiment.plots import draw_curves, figures_of
    from fedsilo.files.extras import need

    need("matplotlib", "scipy")
    if out.suffix not in (".svg", ".png"):
        raise UsageError(f"--out {out}", hint="a name that ends in .svg or .png")
    experiment, known = _known(path, results)
    tables, figures = experiment.all_tables(), figures_of(known)
    named = named or next(iter(tables))
    if named not in tables:
        raise UsageError(f"--table {named}", hint=f"one of: {', '.join(tables)}")
    if figure not in figures:
        raise UsageError(f"--figure {figure}", hint=f"one of: {', '.join(figures)}")
    draw_curves(experiment, known, tables[named], out, figure)
    emit({"picture": str(out)}, str(out))


@command(app, "experiment report")
def report(
    path: FileArgument,
    out: Annotated[Path, typer.Option("--out", help="Page to write: NAME.md; its pictures go into pictures/NAME.")],
    results: ResultsOption = None,
) -> None:
    """Write a page with one line for each claim, the settings, what was tuned, and the tables of rows."""
    from fedsilo.experiment.report import write_report
    from fedsilo.experiment.results import read_results
    from fedsilo.files.extras import need

    need("matplotlib", "scipy")
    if out.suffix != ".md":
        raise UsageError(f"--out {out}", hint="a name that ends in .md")
    experiment, _ = _known(path, results)
    lines = read_results(_results(path, results))
    pictures = write_report(experiment, lines, out, f"fedsilo experiment report {path}")
    data = {"page": str(out), "pictures": [str(each) for each in pictures]}
    emit(data, str(out))


@command(app, "experiment show")
def show(
    path: FileArgument,
    cell: Annotated[str, typer.Argument(metavar="SETTING/ROW/SEED", help="One cell.")],
    results: ResultsOption = None,
) -> None:
    """Show all that was measured in one cell, and the command that carries it out again."""
    from fedsilo.experiment.design import cell_named

    experiment, known = _read(path, results)
    line = known.get(cell_named(experiment, cell))
    if line is None:
        raise NotFoundError(f"{cell} has no result", hint=f"fedsilo experiment run {path} --cell {cell}")

    def text() -> str:
        rows = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in line.items()]
        return f"{table(('what', 'value'), rows)}\nagain: fedsilo experiment run {path} --cell {cell}"

    emit(dict(line), text)


@command(app, "experiment work", hidden=True)
def work(
    path: FileArgument,
    folder: Annotated[Path, typer.Argument(help="Of this process's files, which it removes at its end.")],
) -> None:
    """Carry out the cells that standard input names, one a line as JSON, and print a line of results for each."""
    from fedsilo.experiment.design import Cell, read_experiment
    from fedsilo.experiment.perform import perform

    experiment, names = read_experiment(path), queue.SimpleQueue[str]()
    threading.Thread(target=_read_names, args=(names, folder), daemon=True).start()
    while True:
        answer: dict[str, Any]
        try:
            fields = json.loads(names.get())
            answer = perform(experiment, Cell(**{**fields, "knobs": tuple(map(tuple, fields["knobs"]))}), folder)
        except FedSiloError as error:
            answer = {"error": f"{error.line} [{error.code}]"}
        typer.echo(json.dumps(answer))


def _read_names(names: queue.SimpleQueue[str], folder: Path) -> None:
    """Hand on each line of standard input; its end is that of whoever named the cells, so that this process ends too,
    whatever it is at, and takes its files along."""
    for line in sys.stdin:
        names.put(line.strip())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _cores() -> int:
    return len(os.sched_getaffinity(0))

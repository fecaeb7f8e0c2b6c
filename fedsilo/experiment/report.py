"""The page of an experiment's results, in Markdown, from its file and the lines of results alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedsilo.experiment.design import Cell, Experiment, Setting, Table
from fedsilo.experiment.plots import curve_of, draw_claims, draw_curves, figure_of
from fedsilo.experiment.results import (
    HEADINGS,
    NOTE,
    Judged,
    Line,
    as_markdown,
    difference_text,
    doubts,
    judged,
    mark_of,
    of_experiment,
    table_rows,
)
from fedsilo.experiment.tuning import Frozen, frozen_of
from fedsilo.files.durable import write_durably
from fedsilo.protocol.errors import OperationError


def write_report(experiment: Experiment, all_lines: Sequence[Line], out: Path, command: str) -> list[Path]:
    """Write the page, and its pictures into the folder `pictures/NAME` beside it.

    Args:
        experiment: the file.
        all_lines: of its results.
        out: NAME.md.
        command: what writes this page again, up to the subcommand: `fedsilo experiment report FILE`.

    Returns:
        The pictures.

    Raises:
        OperationError: nothing can be written there.
    """
    folder = out.parent / "pictures" / out.stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"{folder}: {error.strerror}", hint="name another page with --out") from error
    results, frozen = of_experiment(experiment, all_lines), frozen_of(experiment, all_lines)
    judgements = judged(experiment, results)
    drawn = _Pictures(experiment, results, folder)
    lines = [
        f"# Results: {experiment.experiment}",
        "",
        *([experiment.about, ""] if experiment.about else []),
        f"`{command} --out {out}` writes this page from lines of results alone. {NOTE}",
        "Differences are paired by seed, with Student's 95 % interval; what the words mean is in "
        "[Compare methods over many seeds](how-to/experiments.md#verdicts).",
        "",
        *[f"**Doubt:** {doubt}.\n" for doubt in doubts(experiment, all_lines)],
        *_claims(experiment, judgements, drawn, command),
        *_settings(experiment),
        *_tuned(list(frozen.values())),
        *_tables(experiment, results, drawn),
    ]
    write_durably(out, ("\n".join(lines).rstrip() + "\n").encode())
    return drawn.paths


class _Pictures:
    """Draws pictures into a folder and gives the Markdown that shows each."""

    def __init__(self, experiment: Experiment, results: Mapping[Cell, Line], folder: Path) -> None:
        self.paths: list[Path] = []
        self._experiment = experiment
        self._results = results
        self._folder = folder

    def curves(self, name: str, table: Table, figure: str) -> str:
        """Return a link to the curves of a table's rows; nothing where no row has that figure."""
        rows = self._experiment.rows_of(table)
        if not any(curve_of(self._experiment, self._results, table, row, figure) for row in rows):
            return ""
        path = self._path(name)
        draw_curves(self._experiment, self._results, table, path, figure)
        return self._link(path)

    def claims(self, judgements: list[Judged]) -> str:
        path = self._path("claims")
        draw_claims(judgements, path)
        return self._link(path)

    def _path(self, name: str) -> Path:
        path = self._folder / f"{name}.svg"
        self.paths.append(path)
        return path

    def _link(self, path: Path) -> str:
        return os.path.relpath(path, self._folder.parent.parent)


def _claims(experiment: Experiment, judgements: list[Judged], drawn: _Pictures, command: str) -> Iterator[str]:
    confirmed = [each for each in judgements if not each.claim.exploratory]
    explored = [each for each in judgements if each.claim.exploratory]
    run = command.replace(" report ", " run ")
    for title, some in (("Claims", confirmed), ("Exploratory", explored)):
        if not some:
            continue
        yield f"## {title}\n"
        yield from (_claim(experiment, each, drawn, run) for each in some)
        yield ""
        if any(each.contrast is not None for each in some) and some is confirmed:
            yield f"![Paired differences of all claims, in points, with their 95 % intervals]({drawn.claims(some)})\n"


def _claim(experiment: Experiment, each: Judged, drawn: _Pictures, run: str) -> str:
    """Return the line of one claim."""
    claim, seeds = each.claim, each.claim.seeds or experiment.seeds
    table = Table(setting=claim.settings[0], rows=tuple(dict.fromkeys(claim.rows)), seeds=seeds)
    picture = drawn.curves(f"claim-{each.name}", table, figure) if (figure := figure_of(claim)) else ""
    contrast = f"{claim.row} - {claim.against}, {claim.metric}"
    if len(claim.settings) > 1:
        contrast = f"slope on log2 tau of {contrast}"
    parts = [
        f"{', '.join(claim.settings)}: {contrast}",
        f"expected {claim.direction}" if not claim.exploratory else "",
        f"{each.seeds} of {len(seeds)} seeds ({_spans(seeds)})",
        difference_text(each),
        "" if each.adjusted != each.adjusted else f"adjusted p {each.adjusted:.3g}",
        f"[curves]({picture})" if picture else "",
        f"`{run} --claim {each.name}`",
    ]
    says = f" {claim.says}" if claim.says else ""
    return f"- **{each.name}: {each.outcome}.**{says} {'; '.join(part for part in parts if part)}"


def _spans(seeds: tuple[int, ...]) -> str:
    whole = tuple(range(seeds[0], seeds[-1] + 1)) == seeds
    return f"{seeds[0]} to {seeds[-1]}" if whole and len(seeds) > 1 else ", ".join(map(str, seeds))


def _settings(experiment: Experiment) -> Iterator[str]:
    yield "## Settings\n"
    yield as_markdown(
        ("setting", "what rows share"), [(name, _setup(each)) for name, each in experiment.settings.items()]
    )
    yield ""


def _setup(setting: Setting) -> str:
    model = f"base model {setting.model.path}" if setting.model else f"base recipe {setting.base.right_share:g} right"
    split = "one topic a silo" if setting.split == "one-topic" else f"{setting.split} {setting.concentration:g}"
    along = " along success rate" if setting.along == "success_rate" else ""
    parts = [
        f"{setting.questions} questions",
        f"{setting.silos} silos, {split}{along}",
        model,
        f"{setting.rounds} x {setting.local_steps} steps (tau {setting.local_steps})",
        f"swap period {setting.swap_period}",
        f"b {setting.prompts_per_step}",
        f"K {setting.samples_per_prompt}",
        f"rank {setting.rank}",
        f"{setting.held_out_rows} x {setting.evaluation_samples} held-out samples",
    ]
    return ", ".join(parts)


def _tuned(frozen: list[Frozen]) -> Iterator[str]:
    if not frozen:
        return
    yield "## Tuned\n"
    yield (
        "Chosen on seeds that no claim has, and on questions whose strings no claim's held-out questions have, "
        "with the same number of trials for each family: the mean of pass@1 of each value, in per cent. A claim's "
        "cells measure those questions after each round as well, which chooses the best round and nothing else.\n"
    )
    rows = []
    for each in frozen:
        tried = ", ".join(f"{value:g}: {100 * mean:.1f}" for value, mean in zip(each.grid, each.means, strict=True))
        knob, value = each.knobs[-1]
        rows.append((each.family, each.setting, knob, f"{value:g}", tried, "yes" if each.at_edge else ""))
    yield as_markdown(("family", "setting", "knob", "frozen", "tried", "at the edge"), rows)
    yield ""


def _tables(experiment: Experiment, results: Mapping[Cell, Line], drawn: _Pictures) -> Iterator[str]:
    for name, table in experiment.all_tables().items():
        rows = table_rows(experiment, results, table)
        if not rows:
            continue
        yield f"## Rows: {name}\n"
        if table.says:
            yield f"{table.says}\n"
        yield as_markdown(HEADINGS, rows)
        yield ""
        if marks := sorted(
            {mark.strip() for row in experiment.rows_of(table) if (mark := mark_of(experiment.rows[row]))}
        ):
            yield f"{', '.join(marks)}: no federation can do that; it needs what silos do not give away.\n"
        for figure in table.figures:
            if picture := drawn.curves(f"{name}-{figure}", table, figure):
                words = f"{name}: {figure} of each row over the run, the mean over seeds with its 95 % interval"
                yield f"![{words}]({picture})\n"

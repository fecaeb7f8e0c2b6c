"""`fedsilo curves`, `silo round`: what the console's places 4 and 2 ask the daemon, as text, CSV, JSON or event files.

TensorBoard gets one folder a silo, so that it draws the silos of one figure into one plot; what belongs to no silo is
under `all`. A file holds all values that there are and is replaced as a whole, so that writing again adds what is new.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.daemons import (
    SILO_YAML,
    ContextOption,
    Daemon,
    SiloOption,
    client_of,
    context_daemon,
    load_site,
    party_text,
)
from fedsilo.cli.messages import columns_text
from fedsilo.cli.output import csv_text as text_of
from fedsilo.cli.output import emit, running, table
from fedsilo.files.durable import make_private_directory, write_durably
from fedsilo.files.extras import install_hint
from fedsilo.protocol.errors import OperationError, UsageError

if TYPE_CHECKING:
    from fedsilo.control.answers import Curves
    from fedsilo.views.columns import Column
    from fedsilo.views.curves import FigureValue

# ---- TensorBoard -----------------------------------------------------------------------------------------------------


FILE = "events.out.tfevents.fedsilo"
VERSION = "brain.Event:2"  # of the format


def write_events(folder: Path, answer: Curves) -> list[Path]:
    """Write `folder/RUN/SILO/events.out.tfevents.fedsilo`, of each silo in the answer.

    Args:
        folder: TensorBoard's --logdir; made where it is missing.
        answer: of the query `curves`.

    Raises:
        UsageError: the `science` extra is not installed.
        OperationError: the disk refused, or the daemon names a run or a silo by what is no name (T37).
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise UsageError("tensorboard is not installed", hint=install_hint("tensorboard")) from error
    by_silo: dict[str, list[Any]] = {}
    for row in _values(answer):
        events = by_silo.setdefault(row.silo or "all", [Event(file_version=VERSION)])
        value = Summary.Value(tag=row.name, simple_value=row.value)
        events.append(Event(step=int(row.x), summary=Summary(value=[value])))
    written = []
    for silo, events in sorted(by_silo.items()):
        content = io.BytesIO()
        records = RecordWriter(content)
        for event in events:
            records.write(event.SerializeToString())
        path = folder / _plain_name(answer.run) / _plain_name(silo) / FILE
        make_private_directory(path.parent)
        write_durably(path, content.getvalue(), mode=0o600)  # a silo's figures tell something of its prompts
        written.append(path)
    return written


def _plain_name(name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from fedsilo.protocol.plan import Name

    try:
        return TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        told = f"the daemon names a run or a silo {name[:80]!r}, which is no name"
        raise OperationError(told, code="ANSWER_UNUSABLE") from error


# ---- commands --------------------------------------------------------------------------------------------------------


TEXT_CELLS = 100
CSV_COLUMNS = ("run", "name", "silo", "source", "unit", "x", "round", "step", "value", "low", "high", "n", "n_exact")


def curves(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="silo.yaml: this site's own figures. Default: the current context, else here."),
    ] = None,
    coordinator: Annotated[
        Path | None, typer.Option("--coordinator", help="coordinator.yaml: what silos released to it.")
    ] = None,
    context: ContextOption = "",
    run: Annotated[str, typer.Option("--run", help="Which run; the newest by default.")] = "",
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Only this figure, such as pass_at_1; repeatable.")
    ] = None,
    x: Annotated[str, typer.Option("--x", help="round or step.")] = "",
    values: Annotated[
        bool, typer.Option("--values", help="Each value of every figure; else the last of each, and what it says.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print one line a value, as CSV.")] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="Also write event files below this folder (--logdir)."),
    ] = None,
) -> None:
    """Figures by round or step: pass@1 with n and its 95 % interval, reward, KL, update norm, gap between silos.

    Without --coordinator the figures are those of the current context, or else of the site in silo.yaml.
    """
    from fedsilo.control.answers import Curves, read

    if coordinator is not None and (config is not None or context):
        other = "--config" if config is not None else "--context"
        raise UsageError(f"{other} and --coordinator name two daemons", hint="give one of them")
    if csv and running().json_output:
        raise UsageError("--csv and --json are two forms of one answer", hint="give one of them")
    asked = {"run": run or None, "names": ",".join(names or ()) or None, "x": x or None}
    daemon = _daemon(context, config, coordinator)
    with daemon.connect() as client:
        data = client.query("curves", asked)
        answer = read(Curves, data)
        written = write_events(tensorboard, answer) if tensorboard is not None else []
        whose = "" if running().json_output or csv else party_text(client.snapshot().state)
    whose += f", context {daemon.context}" if daemon.context else ""
    told = "".join(f"\nwrote {path}" for path in written)
    emit(
        data,
        lambda: (
            csv_text(answer)
            if csv
            else (_table(answer, whose, _values(answer)) if values or names else _last_text(answer, whose)) + told
        ),
    )


def _daemon(context: str, config: Path | None, coordinator: Path | None) -> Daemon:
    if coordinator is None:
        chosen = context_daemon("", context, config)
        return chosen or Daemon(load_site(config or SILO_YAML).control.socket)
    from coordinator.config import load_config

    return Daemon(load_config(coordinator).control.socket)


def _values(answer: Curves) -> list[FigureValue]:
    """Every value, series after series, each in the order of its places."""
    from fedsilo.views.curves import series_of

    return [point for each in series_of(answer) for point in each.points]


def csv_text(answer: Curves) -> str:
    """Return one line for each value, after a header line."""
    from fedsilo.control.answers import to_json

    rows = [{**to_json(row), "run": answer.run} for row in _values(answer)]
    return text_of(CSV_COLUMNS, [[row.get(name) for name in CSV_COLUMNS] for row in rows])


def _last_text(answer: Curves, whose: str) -> str:
    """The newest value of each figure, how many there are, and what it says."""
    from fedsilo.control.figures import FIGURES
    from fedsilo.views.columns import Column

    rows = _values(answer)
    counted = Counter((row.name, row.silo) for row in rows)
    last = {(row.name, row.silo): row for row in rows}
    more = (
        Column("values", lambda row: (str(counted[row.name, row.silo]), ""), 6),
        Column("what it says", lambda row: (FIGURES[row.name].meaning if row.name in FIGURES else "", ""), 40),
    )
    told = _table(answer, whose, list(last.values()), *more)
    return f"{told}\neach value: --name FIGURE, or --values; docs/reference/figures.md" if rows else told


def _table(answer: Curves, whose: str, rows: Sequence[FigureValue], *more: Column) -> str:
    """whose: figures these are, and the context that chose them, so that no silo's pass for another's."""
    from fedsilo.views.columns import Column
    from fedsilo.views.curves import COLUMNS

    if not rows:
        return f"{whose}: no figures of run {answer.run or '-'} yet: fedsilo run submit run.yaml"
    columns = (Column("figure", lambda row: (row.name, ""), 16), *COLUMNS, *more)
    base = [f"before round 1: {row.name} of {row.silo} {row.value:.4f}" for row in answer.baseline]
    return "\n".join(
        [
            f"{whose}: run {answer.run}",
            columns_text(columns, rows),
            *base,
            *(f"not recorded: {each}" for each in answer.not_recorded),
        ]
    )


def silo_round(
    run: Annotated[str, typer.Option("--run", help="Which run; the newest by default.")] = "",
    number: Annotated[int | None, typer.Option("--round", min=1, help="Which round; the newest by default.")] = None,
    config: SiloOption = SILO_YAML,
) -> None:
    """Show one round as this silo knows it: its own phases with their durations, and the verdict on each other silo."""
    with client_of(load_site(config)) as client:
        data = client.query("round", {"run": run or None, "round": number})
    emit(data, lambda: round_text(data))


def round_text(data: Any) -> str:
    """Return one round as linear text: the same lines that the console draws."""
    from fedsilo.control.answers import Round, read
    from fedsilo.views import rounds
    from fedsilo.views.lines import UNICODE, to_text

    answer = read(Round, data)
    lines = rounds.head_lines(answer, None, TEXT_CELLS, UNICODE)
    rows: list[tuple[str, ...]] = []
    for row in answer.silos:
        hidden = rounds.is_hidden(row, answer)
        took = rounds.HIDDEN if hidden else rounds.time_text(rounds.took_seconds(row, answer))
        words = [
            f"{rounds.phase_text(phase)} {phase.state if phase.seconds is None else f'{phase.seconds:.0f} s'}"
            for phase in row.phases
        ]
        phases = rounds.HIDDEN if hidden else ", ".join(words) or "none on record"
        rows.append((row.silo, row.state, took, phases))
    facts = to_text(rounds.fact_lines(answer, TEXT_CELLS, whole_digests=True))
    return "\n".join([to_text(lines), table(("silo", "state", "update at", "phases"), rows), facts])

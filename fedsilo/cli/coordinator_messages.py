"""`coordinator outbox`, `inbox`, `audit`, `certs`, `settings`: what a running coordinator knows of its messages,
records and files. Each asks the daemon's control socket the very query that the console's screen of that name asks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli import desk_answers
from fedsilo.cli.daemon_audit import audit_app
from fedsilo.cli.desk_answers import (
    BeforeOption,
    ControlOption,
    KindOption,
    LimitOption,
    VerdictOption,
)
from fedsilo.cli.output import JsonOption, emit, guarded, table

CONFIG_DEFAULT = Path("coordinator.yaml")
ConfigOption = Annotated[Path, typer.Option("--config", help="coordinator.yaml.")]

outbox_app = typer.Typer(no_args_is_help=True, help="What was sent to each silo, and what still waits for one.")
inbox_app = typer.Typer(no_args_is_help=True, help="Every message that came in and the rules that judged it.")


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `coordinator`."""
    app.add_typer(outbox_app, name="outbox")
    app.add_typer(inbox_app, name="inbox")
    app.add_typer(audit_app("coordinator", CONFIG_DEFAULT, _ask), name="audit")
    app.command()(certs)
    app.command()(settings)


def _ask(config: Path, query: str, arguments: Mapping[str, Any] | None = None) -> Any:
    from coordinator.config import load_config
    from fedsilo.control.client import ControlClient

    with ControlClient(load_config(config).control.socket) as client:
        return client.query(query, arguments)


# ---- messages --------------------------------------------------------------------------------------


@outbox_app.command("list")
@guarded("coordinator outbox list")
def outbox_list(
    config: ConfigOption = CONFIG_DEFAULT,
    limit: LimitOption = 100,
    before: Annotated[
        str, typer.Option("--before", help="Only what comes behind this row: `next` of the page before.")
    ] = "",
    control: Annotated[bool, typer.Option("--control", help="Acknowledgements, refusals and the like too.")] = False,
    kind: KindOption = "",
    run: Annotated[str, typer.Option("--run", help="Only of this run.")] = "",
    silo: Annotated[str, typer.Option("--silo", help="Only to this silo.")] = "",
    waiting: Annotated[bool, typer.Option("--waiting", help="Only what a silo has not acknowledged yet.")] = False,
    json_output: JsonOption = False,
) -> None:
    """What was sent, newest round first: one row for each round, kind and silo. Each silo judges what comes to it."""
    asked: dict[str, Any] = {"limit": limit, "control": control, "waiting": waiting}
    asked |= {"before": before or None, "kind": kind or None, "run": run or None, "silo": silo or None}
    data = _ask(config, "outbox", asked)
    columns = ("run", "round", "kind", "peer", "messages", "bytes", "waiting", "outcome")
    emit(
        "coordinator outbox list", data, json_output=json_output,
        text=lambda: f"{data['sent']} messages sent, {data['waiting']} wait\n"
        + table(columns, desk_answers.cells(data["messages"], columns)) + desk_answers.older(data["next"]),
    )  # fmt: skip


@outbox_app.command("show")
@guarded("coordinator outbox show")
def outbox_show(
    seq: Annotated[str, typer.Argument(help="RUN/ROUND/KIND/SILO, as `seq` in `coordinator outbox list --json`.")],
    config: ConfigOption = CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """What went to one silo of one kind in one round, and what of it waits."""
    data = _ask(config, "outbox", {"seq": seq})
    row, columns = data["message"], ("step", "bytes", "delivered", "sha256")
    waits = "\n" + table(columns, desk_answers.cells(data["waiting"], columns)) if data["waiting"] else ""
    emit(
        "coordinator outbox show", data, json_output=json_output,
        text=lambda: f"{row['kind']} to {row['peer']}: {row['messages']} sent, {row['bytes']} bytes, "
        f"{row['waiting']} wait" + waits,
    )  # fmt: skip


@inbox_app.command("list")
@guarded("coordinator inbox list")
def inbox_list(
    config: ConfigOption = CONFIG_DEFAULT, limit: LimitOption = 100, before: BeforeOption = None,
    control: ControlOption = False, verdict: VerdictOption = "", kind: KindOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """What silos sent, newest first, and what the charter decided on each."""
    desk_answers.list_messages(
        partial(_ask, config), "coordinator", "inbox", limit=limit, before=before, control=control, verdict=verdict,
        kind=kind, json_output=json_output,
    )  # fmt: skip


@inbox_app.command("show")
@guarded("coordinator inbox show")
def inbox_show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the decision, from `coordinator inbox list`.")],
    config: ConfigOption = CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """One decision with every rule's verdict, and what would have been let in."""
    desk_answers.show_message(partial(_ask, config), "coordinator", "inbox", seq, json_output)


# ---- files -----------------------------------------------------------------------------------------


@guarded("coordinator certs")
def certs(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """The coordinator's certificates, the authorities above them, and what each silo showed last."""
    desk_answers.show_certificates(partial(_ask, config), "coordinator", json_output)


@guarded("coordinator settings")
def settings(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Every setting that a running coordinator uses, and where it comes from."""
    desk_answers.show_settings(partial(_ask, config), "coordinator", json_output)

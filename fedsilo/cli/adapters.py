"""`silo adapters` and `silo rollback`: what came in, how it does on this site's own prompts, and what people decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fedsilo.cli.desk_answers import recorded
from fedsilo.cli.output import JsonOption, emit, guarded, table
from fedsilo.cli.silo_control import (
    CONFIG_DEFAULT,
    ConfigOption,
    OperatorOption,
    RequestOption,
    client_of,
    command,
    load_site,
)

app = typer.Typer(no_args_is_help=True, help="Global adapters at this site: accepted, held, refused.")
DigestArgument = Annotated[str, typer.Argument(help="Of a held adapter, whole, as `silo adapters list` shows it.")]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run, as `silo adapters list` shows it.")]


@app.command("list")
@guarded("silo adapters list")
def list_(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Adapters that this silo trained from, newest first, and those that wait for a person.

    The figures are of this site's own prompts and are told to nobody else.
    """
    with client_of(load_site(config)) as client:
        data = client.query("adapters", {})
    emit("silo adapters list", data, json_output=json_output, text=lambda: _text(data))


@app.command()
@guarded("silo adapters accept")
def accept(
    digest: DigestArgument, operator: OperatorOption, run: RunOption, config: ConfigOption = CONFIG_DEFAULT,
    request_id: RequestOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Train on the held adapter all the same, from the next round that begins with it or passes against it."""
    arguments = {"run": run, "digest": digest}
    data = command(load_site(config), operator, "adapter.accept", arguments, request_id)
    emit(
        "silo adapters accept", data, json_output=json_output,
        text=f"accepted adapter {data['adapter'][:12]}: what comes next is compared with it{recorded(data)}",
    )  # fmt: skip


@app.command()
@guarded("silo adapters refuse")
def refuse(
    digest: DigestArgument, operator: OperatorOption, run: RunOption, config: ConfigOption = CONFIG_DEFAULT,
    request_id: RequestOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Never train on the held adapter in this run."""
    arguments = {"run": run, "digest": digest}
    data = command(load_site(config), operator, "adapter.refuse", arguments, request_id)
    emit(
        "silo adapters refuse", data, json_output=json_output,
        text=f"refused adapter {data['adapter'][:12]}: rounds that begin with it go on without this silo"
        + recorded(data),
    )  # fmt: skip


def rollback(
    operator: OperatorOption,
    run: RunOption,
    to: Annotated[
        str, typer.Option("--to", help="Digest of an accepted adapter, or its beginning. Default: the last one.")
    ] = "",
    config: ConfigOption = CONFIG_DEFAULT, request_id: RequestOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Go back to an accepted adapter, whose file is hashed first; what came after it is refused.

    The last accepted one where an adapter is held, else the one before it. What was sent meanwhile stays with the
    others.
    """
    arguments = {"run": run, "to": to}
    data = command(load_site(config), operator, "adapter.rollback", arguments, request_id)
    left = "; the open round goes on without this silo" if data["round_left"] else ""
    emit(
        "silo rollback", data, json_output=json_output,
        text=f"back to adapter {data['adapter']}: what comes next is compared with it{left}{recorded(data)}",
    )  # fmt: skip


def add_to(silo: typer.Typer) -> None:
    """Both, under `silo`."""
    silo.add_typer(app, name="adapters")
    silo.command("rollback")(guarded("silo rollback")(rollback))


def _text(data: Mapping[str, Any]) -> str:
    limits = data["limits"]
    lines = [
        f"run {data['run'] or '-'}",
        "adapters are not measured: silo.yaml has no acceptance:"
        if limits is None
        else f"measured on {' and '.join(limits['prompts'])}: held for a drop beyond {100 * limits['drop_max']:.1f} "
        f"points, or with fewer than {limits['prompts_min']} prompts",
    ]
    for held in data["held"]:
        lines += [
            f"HELD: adapter {held['digest']} of round {held['round']}",
            f"  {held['said']}",
            f"  silo adapters accept|refuse {held['digest']} --run {data['run']} --operator NAME, or silo rollback",
        ]
    rows = [(each["round"], each["digest"], each["how"], _figures(each["figures"])) for each in data["accepted"]]
    lines.append(table(("round", "accepted", "how", "points"), rows) if rows else "none is accepted yet")
    lines += [f"refused: {digest}" for digest in data["refused"]]
    return "\n".join(lines)


def _figures(figures: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{name} {100 * each['difference']:+.1f} [{100 * each['interval'][0]:+.1f}, {100 * each['interval'][1]:+.1f}], "
        f"would show a drop of {100 * each['detectable']:.1f}"
        if each["interval"]
        else f"{name}: {each['prompts']} prompts, too few"
        for name, each in figures.items()
    )

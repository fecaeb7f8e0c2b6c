"""`fedsilo context`: the daemons a person works with, by name (contexts.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsilo.cli.output import JsonOption, emit, guarded, table

app = typer.Typer(
    no_args_is_help=True, help="Daemons by name, for `fedconsole --context` and commands that look at one."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@app.command("list")
@guarded("context list")
def list_contexts(json_output: JsonOption = False) -> None:
    """Every context, and which is used when none is named."""
    from fedsilo.cli import contexts

    current, path = contexts.current_context(), contexts.contexts_path()
    rows = [
        {
            "name": entry.name, "current": entry.name == current, "kind": entry.kind, "site": entry.site,
            "socket": str(entry.socket), "config": str(entry.config or ""), "place": entry.place,
        }
        for entry in contexts.contexts().values()
    ]  # fmt: skip
    columns = ("name", "kind", "site", "socket")
    emit(
        "context list", {"file": str(path), "current": current, "contexts": rows}, json_output=json_output,
        text=lambda: table(
            ("", *columns), (("*" if row["current"] else "", *(row[name] for name in columns)) for row in rows)
        ) if rows else f"{path} keeps none",
    )  # fmt: skip


@app.command("use")
@guarded("context use")
def use(context_name: NameArgument, json_output: JsonOption = False) -> None:
    """Make this the context of commands that name none."""
    from fedsilo.cli import contexts

    with contexts.changing():
        contexts.context_named(context_name)
        path = contexts.write(contexts.contexts(), context_name)
    emit(
        "context use",
        {"file": str(path), "current": context_name},
        json_output=json_output,
        text=f"{context_name} is used",
    )


@app.command("add")
@guarded("context add")
def add(
    name: NameArgument,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="silo.yaml or coordinator.yaml: kind, site and socket are read there."),
    ] = None,
    silo: Annotated[
        str, typer.Option("--silo", help="Without --config: the silo's name; for a coordinator none.")
    ] = "",
    socket: Annotated[Path | None, typer.Option("--socket", help="Without --config: the control socket.")] = None,
    operator_certificate: Annotated[
        Path | None, typer.Option("--operator-certificate", help="Of the person who signs there.")
    ] = None,
    operator_key: Annotated[Path | None, typer.Option("--operator-key", help="Its key; only its path is kept.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a context of that name.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Keep a daemon under a name. The first one kept is the one that is used."""
    from fedsilo.cli import contexts
    from fedsilo.cli.daemons import chosen_daemon
    from fedsilo.protocol.errors import ConflictError, UsageError

    if (config is None) == (socket is None) or (config is not None and silo):
        raise UsageError("say which daemon: --config FILE, or --socket PATH with --silo NAME for a silo's")
    if config is not None:
        found = chosen_daemon(config=config.absolute())
        entry = contexts.ContextEntry(name, found.kind, found.socket.absolute(), found.site, config.absolute())
    else:
        place = Path(socket or "").absolute()
        entry = contexts.ContextEntry(name, "silo" if silo else "coordinator", place, silo)
    files = [None if each is None else each.absolute() for each in (operator_certificate, operator_key)]
    entry = contexts.ContextEntry(name, entry.kind, entry.socket, entry.site, entry.config, files[0], files[1])
    with contexts.changing():
        known = dict(contexts.contexts())
        if name in known and not force:
            raise ConflictError(f"there is a context {name!r} already: {known[name].place}", hint="--force replaces it")
        known[name] = entry
        current = contexts.current_context() or name
        path = contexts.write(known, current)
    emit(
        "context add", {"file": str(path), "name": name, "current": current}, json_output=json_output,
        text=f"{name} stands for the {entry.kind} {entry.site} at {entry.socket}".replace("  ", " "),
    )  # fmt: skip


@app.command("remove")
@guarded("context remove")
def remove(context_name: NameArgument, json_output: JsonOption = False) -> None:
    """Forget a context; the daemon is not touched."""
    from fedsilo.cli import contexts

    with contexts.changing():
        contexts.context_named(context_name)
        current = contexts.current_context()
        left = {name: entry for name, entry in contexts.contexts().items() if name != context_name}
        current = "" if current == context_name else current
        path = contexts.write(left, current)
    emit(
        "context remove",
        {"file": str(path), "current": current},
        json_output=json_output,
        text=f"{context_name} is forgotten",
    )

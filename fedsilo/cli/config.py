"""`fedsilo config`: what a configuration file means. `fedsilo context`: the daemons a person works with, by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsilo.cli.daemons import DEFAULTS, Daemon, chosen_daemon, read_configuration
from fedsilo.cli.output import command, emit, table
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotFoundError, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(no_args_is_help=True, help="Configuration files: silo.yaml, coordinator.yaml and policies.")

FileArgument = Annotated[
    Path | None, typer.Argument(help="silo.yaml, coordinator.yaml or a policy. Default: the first one that is here.")
]
# Variables that a command reads in place of an option, in the order flag, variable, file, default.
VARIABLES = ("FEDSILO_CONTROL", "FEDSILO_OPERATOR", "FEDSILO_CONTEXTS", "NO_COLOR")


@command(app, "config show")
def show(
    file: FileArgument = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Where each value comes from: FILE:LINE or default.")
    ] = False,
) -> None:
    """Every value that is in force with this file, and the variables that commands read in place of options. No file
    that a value names is read: of a key only its path is shown."""
    from fedsilo.control.answers import to_json
    from fedsilo.control.site_files import settings_of

    path = file or _first()
    kind, read = read_configuration(path)
    rows = to_json(settings_of(read, path))
    rows += [
        {"key": name, "value": os.environ[name], "origin": "environment"} for name in VARIABLES if name in os.environ
    ]
    columns = ("key", "value", "origin") if origin else ("key", "value")
    emit(
        {"file": str(path), "kind": kind, "settings": rows},
        lambda: table(columns, ([_shown(row[name]) for name in columns] for row in rows)),
    )


@command(app, "config validate")
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="silo.yaml, coordinator.yaml or policies.")],
) -> None:
    """Read each file as its daemon does. What it names is not looked for: `silo check` and `coordinator check` do."""
    rows: list[dict[str, Any]] = []
    first: FedSiloError | None = None
    for path in files:
        try:
            rows.append({"file": str(path), "kind": read_configuration(path)[0], "ok": True, "found": ""})
        except FedSiloError as error:
            rows.append({"file": str(path), "kind": "", "ok": False, "found": error.message})
            first = first or error
    emit(
        {"files": rows},
        lambda: table(
            ("", "file", "kind"), (("ok" if row["ok"] else "WRONG", row["file"], row["kind"]) for row in rows)
        ),
        error=first,
    )


@command(app, "config schema")
def schema(
    kind: Annotated[Literal["silo", "coordinator", "policy", "run"], typer.Argument(help="Of which file.")],
) -> None:
    """The JSON Schema of a file, for editors and for programs that write one. Rules that need more than one key, and
    repeated keys, are not in it."""
    model = _model(kind)
    data = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    emit(data, lambda: json.dumps(data, indent=2))


def _model(kind: str) -> type[BaseModel]:
    if kind == "silo":
        from silo.config import SiloConfig

        return SiloConfig
    if kind == "coordinator":
        from coordinator.config import CoordinatorConfig

        return CoordinatorConfig
    if kind == "policy":
        from policies.kinds import POLICY_FILE

        return POLICY_FILE
    from fedsilo.protocol.plan import Plan

    return Plan


def _first() -> Path:
    for path in DEFAULTS.values():
        if path.exists():
            return path
    raise NotFoundError("neither silo.yaml nor coordinator.yaml is in this folder", hint="fedsilo config show FILE")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# ---- `fedsilo context` -----------------------------------------------------------------------------------------------


context_app = typer.Typer(
    no_args_is_help=True, help="Daemons by name, for `fedconsole --context` and commands that look at one."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@command(context_app, "context list")
def list_contexts() -> None:
    """Every context, and which is used when none is named."""
    from fedsilo.cli import contexts

    current, path = contexts.current_context(), contexts.contexts_path()
    rows = [
        {
            "name": entry.name,
            "current": entry.name == current,
            "kind": entry.kind,
            "site": entry.site,
            "socket": str(entry.socket),
            "config": str(entry.config or ""),
            "place": entry.place,
        }
        for entry in contexts.contexts().values()
    ]
    columns = ("name", "kind", "site", "socket")
    emit(
        {"file": str(path), "current": current, "contexts": rows},
        lambda: (
            table(("", *columns), (("*" if row["current"] else "", *(row[name] for name in columns)) for row in rows))
            if rows
            else f"{path} keeps none"
        ),
    )


@command(context_app, "context use")
def use(context_name: NameArgument) -> None:
    """Make this the context of commands that name none."""
    from fedsilo.cli import contexts

    with contexts.changing():
        contexts.context_named(context_name)
        path = contexts.write(contexts.contexts(), context_name)
    emit({"file": str(path), "current": context_name}, f"{context_name} is used")


@command(context_app, "context add")
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
) -> None:
    """Keep a daemon under a name. The first one kept is the one that is used."""
    from fedsilo.cli import contexts

    if (config is None) == (socket is None) or (config is not None and silo):
        raise UsageError("say which daemon: --config FILE, or --socket PATH with --silo NAME for a silo's")
    certificate, key = (each and each.absolute() for each in (operator_certificate, operator_key))
    if config is not None:
        config = config.absolute()
        found = chosen_daemon(config=config)
    else:
        found = Daemon(Path(socket or ""), "silo" if silo else "coordinator", silo)
    entry = contexts.ContextEntry(name, found.kind, found.socket.absolute(), found.site, config, certificate, key)
    with contexts.changing():
        known = dict(contexts.contexts())
        if name in known and not force:
            raise ConflictError(f"there is a context {name!r} already: {known[name].place}", hint="--force replaces it")
        known[name] = entry
        current = contexts.current_context() or name
        path = contexts.write(known, current)
    emit(
        {"file": str(path), "name": name, "current": current},
        f"{name} stands for the {entry.kind} {entry.site} at {entry.socket}".replace("  ", " "),
    )


@command(context_app, "context remove")
def remove(context_name: NameArgument) -> None:
    """Forget a context; the daemon is not touched."""
    from fedsilo.cli import contexts

    with contexts.changing():
        contexts.context_named(context_name)
        current = contexts.current_context()
        left = {name: entry for name, entry in contexts.contexts().items() if name != context_name}
        current = "" if current == context_name else current
        path = contexts.write(left, current)
    emit({"file": str(path), "current": current}, f"{context_name} is forgotten")

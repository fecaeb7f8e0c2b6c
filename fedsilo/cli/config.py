"""`fedsilo config`: what a configuration file means, where each value comes from, and what may stand in one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsilo.cli.daemons import DEFAULTS
from fedsilo.cli.output import JsonOption, emit, guarded, table

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(no_args_is_help=True, help="Configuration files: silo.yaml, coordinator.yaml and policies.")

FileArgument = Annotated[
    Path | None, typer.Argument(help="silo.yaml, coordinator.yaml or a policy. Default: the first one that is here.")
]
# Variables that a command reads in place of an option, in the order flag, variable, file, default.
VARIABLES = ("FEDSILO_CONTROL", "FEDSILO_OPERATOR", "FEDSILO_CONTEXTS", "NO_COLOR")


@app.command("show")
@guarded("config show")
def show(
    file: FileArgument = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Where each value comes from: FILE:LINE or default.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Every value that is in force with this file, and the variables that commands read in place of options. No file
    that a value names is read: of a key only its path is shown."""
    from fedsilo.cli.daemons import read_configuration
    from fedsilo.files.site_files import settings_of

    path = file or _first()
    kind, read = read_configuration(path)
    rows = settings_of(read, path)
    rows += [
        {"key": name, "value": os.environ[name], "origin": "environment"} for name in VARIABLES if name in os.environ
    ]
    columns = ("key", "value", "origin") if origin else ("key", "value")
    emit(
        "config show", {"file": str(path), "kind": kind, "settings": rows}, json_output=json_output,
        text=lambda: table(columns, ([_shown(row[name]) for name in columns] for row in rows)),
    )  # fmt: skip


@app.command("validate")
@guarded("config validate")
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="silo.yaml, coordinator.yaml or policies.")],
    json_output: JsonOption = False,
) -> None:
    """Read each file as its daemon does. What it names is not looked for: `silo check` and `coordinator check` do."""
    from fedsilo.cli.daemons import read_configuration
    from fedsilo.protocol.errors import FedSiloError

    rows: list[dict[str, Any]] = []
    first: FedSiloError | None = None
    for path in files:
        try:
            rows.append({"file": str(path), "kind": read_configuration(path)[0], "ok": True, "found": ""})
        except FedSiloError as error:
            rows.append({"file": str(path), "kind": "", "ok": False, "found": error.message})
            first = first or error
    emit(
        "config validate", {"files": rows}, json_output=json_output, error=first,
        text=lambda: table(
            ("", "file", "kind"), (("ok" if row["ok"] else "WRONG", row["file"], row["kind"]) for row in rows)
        ),
    )  # fmt: skip


@app.command("schema")
@guarded("config schema")
def schema(
    kind: Annotated[Literal["silo", "coordinator", "policy", "run"], typer.Argument(help="Of which file.")],
    json_output: JsonOption = False,
) -> None:
    """The JSON Schema of a file, for editors and for programs that write one. Rules that need more than one key, and
    repeated keys, are not in it."""
    model = _model(kind)
    data = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    emit("config schema", data, json_output=json_output, text=lambda: json.dumps(data, indent=2))


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
    from fedsilo.protocol.errors import NotFoundError

    for path in DEFAULTS.values():
        if path.exists():
            return path
    raise NotFoundError("neither silo.yaml nor coordinator.yaml is in this folder", hint="fedsilo config show FILE")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)

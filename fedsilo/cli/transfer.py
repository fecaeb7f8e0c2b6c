"""Files in place of a line, for a silo that has none: `silo export-release`, `silo import-plan`, and their counterparts
`coordinator export-plan`, `coordinator import-release`. The daemons write and read the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli import daemons
from fedsilo.cli.daemons import COORDINATOR_YAML, CoordinatorOption, coordinator_command
from fedsilo.cli.output import command, emit, recorded, table

OutOption = Annotated[Path, typer.Option("--out", help="File to write. The daemon writes it, so name a folder it may.")]
FileArgument = Annotated[Path, typer.Argument(help="The file that was carried here. The daemon reads it.")]


def add_to_silo(app: typer.Typer) -> None:
    command(app, "silo export-release")(export_release)
    command(app, "silo import-plan")(import_plan)


def add_to_coordinator(app: typer.Typer) -> None:
    command(app, "coordinator export-plan")(export_plan)
    command(app, "coordinator import-release")(import_release)


def export_release(
    operator: daemons.OperatorOption,
    out: OutOption,
    config: daemons.SiloOption = daemons.SILO_YAML,
    request_id: daemons.RequestOption = "",
) -> None:
    """Write what this silo may say by now into a file for the coordinator. What has no answer yet is in it again."""
    site = daemons.load_site(config)
    data = daemons.silo_command(site, operator, "transfer.export", {"path": str(out.absolute())}, request_id)
    warnings = [f"{len(data['held'])} held for people and not in it: {', '.join(data['held'])}"] if data["held"] else []
    if data["working"]:
        warnings.append("the trainer is still at work: what it comes to is not in it")
    emit(
        data,
        lambda: (
            f"{_messages(data)}\nwrote {data['file']}, {data['bytes']} bytes, SHA-256 {data['sha256']}"
            f"{recorded(data)}\nnext: carry it to the coordinator's people: coordinator import-release {out.name}"
        ),
        warnings=warnings,
    )


def import_plan(
    file: FileArgument,
    operator: daemons.OperatorOption,
    config: daemons.SiloOption = daemons.SILO_YAML,
    request_id: daemons.RequestOption = "",
) -> None:
    """Take the coordinator's file: answers, plans, rounds, adapters, each let in by the policy when it is its turn."""
    site = daemons.load_site(config)
    data = daemons.silo_command(site, operator, "transfer.import", {"path": str(file.absolute())}, request_id)
    new = sum(not row["taken_before"] for row in data["messages"])
    emit(
        data,
        lambda: (
            f"{_messages(data)}\ntook {data['file']}: {new} of {len(data['messages'])} messages are new"
            f"{recorded(data)}\nnext: silo status; silo approvals list"
        ),
    )


def export_plan(
    silo: Annotated[str, typer.Option("--silo", help="For which one, from `coordinator silos list`.")],
    operator: daemons.OperatorOption,
    out: OutOption,
    config: CoordinatorOption = COORDINATOR_YAML,
    request_id: daemons.RequestOption = "",
) -> None:
    """Write what waits for a silo into a file for it: answers, plans, rounds and the adapters that they name."""
    data = coordinator_command(
        config, operator, "transfer.export", {"silo": silo, "path": str(out.absolute())}, request_id
    )
    warnings = [f"{told}: its beginning is in a file that is written once it is" for told in data["waits_for"]]
    if not data["messages"]:
        warnings.append(f"nothing waits for {silo}, so no message is in the file; one that dials needs none")
    emit(
        data,
        lambda: (
            f"{_messages(data)}\nwrote {data['file']}, {data['bytes']} bytes, SHA-256 {data['sha256']}"
            f"{recorded(data)}\nnext: carry it to the people of {silo}: silo import-plan {out.name}"
        ),
        warnings=warnings,
    )


def import_release(
    file: FileArgument,
    operator: daemons.OperatorOption,
    config: CoordinatorOption = COORDINATOR_YAML,
    request_id: daemons.RequestOption = "",
) -> None:
    """Take a silo's file: each message is judged as one that came over a line. The answers are in its next file."""
    data = coordinator_command(config, operator, "transfer.import", {"path": str(file.absolute())}, request_id)
    refused = [row for row in data["messages"] if row["code"]]
    emit(
        data,
        lambda: (
            f"{_messages(data)}\ntook {file} of {data['silo']}{recorded(data)}\n"
            f"next: coordinator export-plan --silo {data['silo']}"
        ),
        warnings=[f"{row['kind']} of round {row['round']} is refused: {row['code']}" for row in refused],
    )


def _messages(data: Mapping[str, Any]) -> str:
    rows = [
        (
            row["kind"],
            row["run"] or "-",
            f"{row['round']}.{row['step']}",
            row["bytes"],
            " ".join(part for part in (row.get("answer", ""), row.get("code", "")) if part)
            or ("answer" if "answers" in row else "taken before" if row.get("taken_before") else ""),
        )
        for row in data["messages"]
    ]
    return table(("kind", "run", "round.step", "bytes", ""), rows) if rows else "nothing waits"

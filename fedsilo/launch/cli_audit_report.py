"""`fedsilo audit report`: what an audit log shows, as one HTML page and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch.output import JsonOption, emit, guarded

if TYPE_CHECKING:
    from fedsilo.treaty.errors import FedSiloError


@guarded("audit report")
def report(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Log folders: the first is reported on, the others vouch.")
    ],
    out: Annotated[Path, typer.Option("--out", help="New folder for report.html and report.json.")],
    policy: Annotated[
        list[Path] | None, typer.Option("--policy", help="A version of the site's policy; once for each version.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="LoRA schema; by default the one that the policy pins.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """What left, who allowed it, and whether the logs verify: report.html and report.json. Exit status 7 if not."""
    from fedsilo.edge.audit_report import audit_report
    from fedsilo.edge.files import write_durably
    from fedsilo.edge.site_policy import read_policy, read_schema
    from fedsilo.launch.audit_report_page import page
    from fedsilo.launch.cli_audit import log_folder
    from fedsilo.treaty.errors import ConflictError

    if out.exists():
        raise ConflictError(f"{out} exists already")
    policies = {path: read_policy(path) for path in policy or ()}
    made = audit_report(
        [log_folder(log) for log in logs],
        policies=list(policies.values()),
        folders={item.digest: path.parent for path, item in policies.items()},
        schema=read_schema(schema) if schema else None,
    )
    out.mkdir(parents=True)
    write_durably(out / "report.json", json.dumps(made, indent=1, allow_nan=False).encode() + b"\n")
    write_durably(out / "report.html", page(made).encode())
    emit(
        "audit report",
        {"out": str(out), **{key: made[key] for key in ("log", "records", "complete", "left_total")}},
        json_output=json_output,
        text=f"{made['left_total']['messages']} messages, {made['left_total']['bytes']} bytes left {made['log']} "
        f"according to {made['records']} records; {out / 'report.html'}",
        error=_trouble(made),
    )


def _trouble(made: dict[str, Any]) -> FedSiloError | None:
    from fedsilo.treaty.errors import VerificationError

    failed = [item["log"] for item in made["verification"] if not item["verified"]]
    if not failed and made["complete"]:
        return None
    return VerificationError(
        f"the report was written, but these logs do not verify: {', '.join(failed) or made['log']}",
        hint="`fedsilo audit verify` with all parties' logs says where to look",
    )

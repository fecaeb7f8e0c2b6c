"""`fedsilo audit report`: what an audit log shows, as one HTML page and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch.output import JsonOption, emit, existing_policy, guarded

if TYPE_CHECKING:
    from certs.identity import Identity
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
    charter: Annotated[
        Path | None, typer.Option("--charter", help="The federation's charter that was in force with each of them.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="LoRA schema; by default the one that the policy pins.")
    ] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Configuration of this site: its signing key signs report.json.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """What left, who allowed it, and whether the logs verify: report.html, .json and .csv. Exit status 7 if not; 1 if
    all verify, and prove that somebody signed two transcripts, or two results, of one round.

    With --sign, where the key is: report.json.sig, an Ed25519 signature over report.json, and report.pub, its key.
    Once that was compared with the one that the site published, check with
    `openssl pkeyutl -verify -rawin -pubin -inkey report.pub -in report.json -sigfile report.json.sig`.
    """
    from certs.encoding import public_key_pem
    from fedsilo.edge.audit_report import audit_report, inventory_csv
    from fedsilo.edge.files import write_durably
    from fedsilo.edge.site_policy import read_effective, read_schema
    from fedsilo.launch.audit_report_page import page
    from fedsilo.launch.cli_audit import log_folder
    from fedsilo.treaty.errors import ConflictError

    if out.exists():
        raise ConflictError(f"{out} exists already")
    signer = _signer(sign) if sign else None
    policies = {path: read_effective(existing_policy(path), charter) for path in policy or ()}
    made = audit_report(
        [log_folder(log) for log in logs],
        policies=list(policies.values()),
        folders={item.digest: path.parent for path, item in policies.items()},
        schema=read_schema(schema) if schema else None,
    )
    out.mkdir(parents=True)
    data = json.dumps(made, indent=1, allow_nan=False).encode() + b"\n"
    write_durably(out / "report.json", data)
    write_durably(out / "report.csv", inventory_csv(made).encode())
    if signer is not None:
        write_durably(out / "report.json.sig", signer.signing_key.sign(data))
        write_durably(out / "report.pub", public_key_pem(signer.peer.signing_public_key))
    write_durably(out / "report.html", page(made).encode())
    emit(
        "audit report",
        {
            "out": str(out),
            "signed_by": signer.spiffe_id if signer else "",
            **{key: made[key] for key in ("log", "records", "complete", "left_total")},
        },
        json_output=json_output,
        text=f"{made['left_total']['messages']} messages, {made['left_total']['bytes']} bytes left {made['log']} "
        f"according to {made['records']} records; {out / 'report.html'}",
        error=_trouble(made),
    )


def _signer(config: Path) -> Identity:
    """The site's identity with its keys, which only its own user may read. Raises NotAllowedError, NotFoundError."""
    from silo.config import load_config
    from silo.guard.startup import site_identity

    return site_identity(load_config(config))


def _trouble(made: dict[str, Any]) -> FedSiloError | None:
    from fedsilo.edge.audit_transcripts import findings_of
    from fedsilo.treaty.errors import OperationError, VerificationError

    failed = [item["log"] for item in made["verification"] if not item["verified"]]
    if failed or not made["complete"]:
        return VerificationError(
            f"the report was written, but these logs do not verify: {', '.join(failed) or made['log']}",
            hint="`fedsilo audit verify` with all parties' logs says where to look",
        )
    if findings := findings_of(made["verification"]):
        return OperationError(
            f"the report was written, and holds {len(findings)} finding{'s' * (len(findings) > 1)}: {findings[0]}",
            hint="the logs verify; what they hold is evidence against the signer: keep them",
            code="EQUIVOCATION",
        )
    return None

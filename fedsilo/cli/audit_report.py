"""`fedsilo audit report`: what an audit log shows, as one HTML page and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.audit_folders import existing_log, told_apart, verification_warnings
from fedsilo.cli.output import JsonOption, emit, existing, existing_policy, guarded

if TYPE_CHECKING:
    from certs.identity import Identity
    from fedsilo.protocol.errors import FedSiloError


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
        Path | None, typer.Option("--lora-schema", help="LoRA schema; by default the one that the policy pins.")
    ] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Configuration of this site: its signing key signs all files.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The site's configuration: names the collection of private records.")
    ] = None,
    evidence: Annotated[
        list[Path] | None,
        typer.Option("--evidence", help="A file named with its SHA-256, such as a junit.xml; once for each."),
    ] = None,
    site_ca: Annotated[
        list[Path] | None,
        typer.Option("--site-ca", metavar="FILE", help="CA certificate of a site, for what its people signed; repeat."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """What left, who allowed it, and whether the logs verify: report.html, .json and .csv. Exit status 7 if not; 1 if
    all verify, and prove that somebody signed two transcripts, or two results, of one round.

    report.sha256 lists the files with their digests. With --sign, where the key is: report.sha256.sig, an Ed25519
    signature over that list and so over all of them, and report.pub, its key, which is to be compared with the one that
    the site published. Check both with
    `openssl pkeyutl -verify -rawin -pubin -inkey report.pub -in report.sha256 -sigfile report.sha256.sig` and
    `sha256sum --check report.sha256`.
    """
    from certs.encoding import public_key_pem
    from fedsilo.cli.audit_report_page import audit_report, checksums, evidence_of, inventory_csv, page
    from fedsilo.files.durable import removed_on_failure, write_durably
    from fedsilo.files.site_policy import read_effective, read_schema
    from fedsilo.protocol.errors import ConflictError

    if out.exists():
        raise ConflictError(f"{out} exists already")
    signer = _signer(sign) if sign else None
    policies = {path: read_effective(existing_policy(path), charter, kept=True) for path in policy or ()}
    folders = [existing_log(log) for log in logs]
    collection = _collection(config) if config else ("", "")
    made = audit_report(
        folders,
        policies=list(policies.values()),
        folders={item.digest: path.parent for path, item in policies.items()},
        schema=read_schema(schema) if schema else None,
        collection=collection,
        evidence=[evidence_of(path) for path in evidence or ()],
        signer=(signer.spiffe_id, signer.peer.signing_public_key.public_bytes_raw()) if signer else None,
        site_cas=[existing(path).read_bytes() for path in site_ca or ()],
    )
    made["verification"] = told_apart(made["verification"])
    made["warnings"] = [*verification_warnings(made["verification"]), *_warnings(made, collection[0])]
    files = {
        "report.json": json.dumps(made, indent=1, allow_nan=False).encode() + b"\n",
        "report.csv": inventory_csv(made).encode(),
        "report.html": page(made).encode(),
    }
    listed = checksums(files)
    if signer is not None:
        files |= {"report.sha256.sig": signer.signing_key.sign(listed)}
        files |= {"report.pub": public_key_pem(signer.peer.signing_public_key)}
    with removed_on_failure(out):
        out.mkdir(parents=True)
        for name, data in {**files, "report.sha256": listed}.items():
            write_durably(out / name, data)
    emit(
        "audit report",
        {
            "out": str(out),
            "signed_by": signer.spiffe_id if signer else "",
            **{key: made[key] for key in _TOLD},
        },
        json_output=json_output,
        text=f"{made['in_words']}\n{_counted(made)} according to {made['records']} records{_since(made)}; "
        f"{out / 'report.html'}",
        warnings=made["warnings"],
        error=_trouble(made),
    )


_TOLD = ("in_words", "log", "records", "counted_from", "complete", "left_counted", "left_total", "arrived_total")


def _since(made: dict[str, Any]) -> str:
    return f", from record {made['counted_from']} on" if made["counted_from"] else ""


def _counted(made: dict[str, Any]) -> str:
    if made["left_counted"]:
        total = made["left_total"]
        return f"{total['messages']} messages, {total['bytes']} bytes left {made['log']}"
    total = made["arrived_total"]
    return (
        f"this log has no records of what its owner sent; {total['messages']} messages, {total['bytes']} bytes came in "
        f"at {made['log']}"
    )


def _warnings(made: dict[str, Any], configured: str) -> list[str]:
    """What a reader of the report has to know before it is passed on."""
    found = []
    if made["signature"]["trouble"]:
        found.append(f"the report is {made['signature']['trouble']}")
    if configured and configured != made["origin"]:
        found.append(f"--config is that of {configured}, not of the log's owner: its collection is not told")
    if made["policies_not_loaded"]:
        found.append(
            f"{len(made['policies_not_loaded'])} of the policies given were never loaded according to this log: their "
            "figures are not told; give --charter where one was in force"
        )
    return found


def _collection(config: Path) -> tuple[str, str]:
    """Whose configuration it is, and what it calls the private records. Raises NotFoundError, UsageError."""
    from silo.config import load_config

    read = load_config(config)
    return f"spiffe://{read.federation}/silo/{read.silo}", read.data.collection


def _signer(config: Path) -> Identity:
    """The site's identity with its keys, which only its own user may read. Raises NotAllowedError, NotFoundError."""
    from silo.config import load_config
    from silo.guard.site import site_identity

    return site_identity(load_config(config))


def _trouble(made: dict[str, Any]) -> FedSiloError | None:
    from fedsilo.audit.transcripts import findings_of
    from fedsilo.protocol.errors import OperationError, VerificationError

    failed = [item["log"] for item in made["verification"] if not item["verified"]]
    if failed or made["unreadable"]:
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

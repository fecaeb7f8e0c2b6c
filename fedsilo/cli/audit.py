"""`fedsilo audit`: check, read and hand out audit logs, offline and without the daemon.

A command that reads a log for somebody is no verification. `reading_warnings` says so, or does one where that takes no
noticeable time.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.daemons import SILO_YAML, client_of, load_site, silo_command
from fedsilo.cli.messages import NoControlOption
from fedsilo.cli.output import command, emit, existing, existing_policy, table
from fedsilo.files.durable import lock_exclusively, removed_on_failure, write_durably
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError, VerificationError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from certs.identity import Identity
    from fedsilo.audit.audit_verify import LogResult
    from fedsilo.cli.check_reports import Check
    from fedsilo.protocol.errors import FedSiloError, UsageError
    from policies.model import Policy
    from silo.config import SiloConfig


LogOption = Annotated[Path, typer.Option("--log", help="Folder of the audit log, or the state folder around it.")]
OptionalLogOption = Annotated[
    Path | None, typer.Option("--log", help="Folder of the audit log, or the state folder around it.")
]
SiteCaOption = Annotated[
    list[Path] | None,
    typer.Option("--site-ca", metavar="FILE", help="CA certificate of a site, for what its people signed; repeat."),
]


# ---- folders of logs -------------------------------------------------------------------------------------------------


VERIFIED_BYTES_MAX = 8 << 20  # of a log that is verified before it is shown: about half a second
_OWN_KEY = Path("keys") / "log.vkey"


def log_folder(path: Path) -> Path:
    """The log folder itself where the state folder around it was named."""
    inner = path / "audit"
    return inner if not (path / _OWN_KEY).exists() and _looks_like_a_log(inner) else path


def existing_log(path: Path) -> Path:
    """`log_folder`, which must hold a log: a wrong path must not read as a log that somebody tampered with.

    Raises:
        NotFoundError: nothing is there, or something else.
    """
    folder = log_folder(path)
    if existing(folder).is_dir() and (folder / "proofs.json").exists():
        raise NotFoundError(
            f"{folder} is no log folder; it is an export with proofs",
            hint=f"check it with: fedsilo audit prove --check {folder}",
        )
    if _looks_like_a_log(folder):
        return folder
    around = any(folder.glob("*/state/audit/keys"))
    hint = f"did you mean {folder}/*/state?" if around else "a log is STATE_DIR/audit"
    raise NotFoundError(f"{folder} is no log folder", hint=hint)


def _looks_like_a_log(folder: Path) -> bool:
    return any((folder / part).exists() for part in ("keys", "checkpoints")) or any(folder.glob("*.jsonl"))


def told_apart(results: Iterable[LogResult]) -> list[LogResult]:
    """Results of `verify_logs` whose `log` names one folder: its path stands in front of the name that its key has
    wherever two have that name, or the path does not say it, as with another party's key in a folder."""
    from fedsilo.audit.audit_verify import shown

    listed = list(results)
    named = Counter(result["log"] for result in listed)

    def name(result: LogResult) -> str:
        log, path = str(result["log"]), Path(result["path"])
        if not result["origin"]:
            return shown(path)
        return log if named[log] == 1 and log in path.absolute().parts else f"{shown(path)} ({log})"

    return [{**result, "log": name(result)} for result in listed]


def reading_warnings(folder: Path) -> list[str]:
    """What whoever reads this log must know: that it does not verify, or, of a large one, that nobody looked."""
    from fedsilo.audit.audit_verify import verify_logs

    size = sum(path.stat().st_size for path in folder.glob("*.jsonl") if path.is_file())
    if size > VERIFIED_BYTES_MAX:
        return [f"nothing of this log was verified, it has {size >> 20} MiB: run fedsilo audit verify {folder}"]
    (result,) = verify_logs([folder])
    if result["verified"]:
        return []
    return [f"this log does not verify, what is shown may be false: {first_of(result['problems'])}"]


def first_of(problems: Sequence[str]) -> str:
    """The first problem, and how many there are besides."""
    return problems[0] + (f" (and {len(problems) - 1} other problems)" if problems[1:] else "")


# ---- `fedsilo audit export` ------------------------------------------------------------------------------------------


_POLL_SECONDS = 0.5
_FORMAT = "jsonl"


def export(
    log: LogOption,
    out: Annotated[
        Path | None, typer.Option("--out", help="With proofs: new folder for records.jsonl and proofs.json.")
    ] = None,
    first: Annotated[
        int, typer.Option("--first", min=0, help="First record; with --to only where there is no position yet.")
    ] = 0,
    last: Annotated[
        int | None, typer.Option("--last", min=0, help="With --out: last record; by default the newest.")
    ] = None,
    format_name: Annotated[str, typer.Option("--format", help="With --to: jsonl, a JSON object a line.")] = "",
    to: Annotated[Path | None, typer.Option("--to", help="File to append to; each record once.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is appended, until SIGTERM or Ctrl-C.")
    ] = False,
    position: Annotated[
        Path | None, typer.Option("--position", help="Where to remember how far it got; by default beside --to.")
    ] = None,
) -> None:
    """Records with proofs into a folder (--out), or every record as a JSON line appended to a file (--to)."""
    folder = existing_log(log)
    if out is not None:
        if format_name or to or follow:
            raise UsageError("--out is for a range with proofs; --format, --to and --follow are for streams")
        from fedsilo.audit.proofs import export_range

        with removed_on_failure(out):
            data = export_range(folder, out, first, last)
        left_out, begins = data["left_out"], data["first"]
        warnings = []
        if begins > first:
            warnings.append(f"without records {first} to {begins - 1}: retention removed what they said")
        if left_out:
            warnings.append(
                f"without the {left_out} newest records: no signed checkpoint covers them yet; export again after one"
            )
        emit(
            data,
            f"{data['records']} records ({begins} to {data['last']}), all proved against the checkpoint at "
            f"{data['checkpoint_size']}, in {out}",
            warnings=warnings,
        )
        return
    if format_name not in ("", _FORMAT):
        raise UsageError(
            f"unknown format {format_name!r}: records are JSON lines",
            hint="give --format jsonl; a log shipper makes anything else of them",
        )
    if not format_name or to is None:
        raise UsageError("give --out FOLDER, or --format jsonl with --to FILE")
    if last is not None:
        raise UsageError("--last is for --out; a stream ends at the newest record")
    data = _stream(folder, to, position or Path(f"{to}.position"), first=first, follow=follow)
    emit(data, f"{data['records']} records to {data['to']} as {_FORMAT}; the next is {data['next']}")


def _stream(folder: Path, to: Path, position_path: Path, *, first: int, follow: bool) -> dict[str, Any]:
    """Export until there is nothing more, or until a signal with `follow`."""
    import threading

    import fedsilo
    from fedsilo.audit.export import Export

    stop = threading.Event()
    target = f"{_FORMAT} {to.absolute()}"
    with lock_exclusively(position_path.with_name(f"{position_path.name}.lock")):
        work = Export(folder, to, position_path, target=target, product_version=fedsilo.__version__, first=first)
        if follow:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
        work.run((lambda: not stop.wait(_POLL_SECONDS)) if follow else None, stop.is_set)
    return {
        "to": str(to),
        "format": _FORMAT,
        "records": work.records,
        "next": work.next,
        "position": str(position_path),
    }


# ---- `fedsilo audit report` ------------------------------------------------------------------------------------------


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
    site_ca: SiteCaOption = None,
) -> None:
    """Write report.html, .json and .csv: what left, who allowed it, and whether the logs verify. Exit status 7 if not;
    1 if all verify, and prove that somebody signed two transcripts, or two results, of one round.

    report.sha256 lists the files with their digests. With --sign, where the key is: report.sha256.sig, an Ed25519
    signature over that list and so over all of them, and report.pub, its key, which is to be compared with the one that
    the site published. Check both with
    `openssl pkeyutl -verify -rawin -pubin -inkey report.pub -in report.sha256 -sigfile report.sha256.sig` and
    `sha256sum --check report.sha256`.
    """
    from certs.encoding import public_key_pem
    from fedsilo.audit.transcripts import verification_warnings
    from fedsilo.cli.audit_report import audit_report, checksums, evidence_of, inventory_csv, page
    from fedsilo.files.site_policy import read_effective, read_schema

    if out.exists():
        raise ConflictError(f"{out} exists already")
    signer = signer_of_site(sign) if sign else None
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
        {
            "out": str(out),
            "signed_by": signer.spiffe_id if signer else "",
            **{key: made[key] for key in _TOLD},
        },
        f"{made['in_words']}\n{_counted(made)} according to {made['records']} records{_since(made)}; "
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
    """Return what a reader of the report has to know before it is passed on."""
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


def signer_of_site(config: Path) -> Identity:
    """The site's identity with its keys, which only its own user may read. Raises NotAllowedError, NotFoundError."""
    from silo.config import load_config
    from silo.guard.site import site_identity

    return site_identity(load_config(config))


def _trouble(made: dict[str, Any]) -> FedSiloError | None:
    from fedsilo.audit.transcripts import findings_of

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


# ---- commands --------------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="Check, read and hand out audit logs, offline.")

LINES_MAX = 100_000  # of `tail`, held in memory at once

_NOT_VERIFIED = {
    "LOG_NOT_VERIFIED": "A record, a proof or a signature of an audit log is not what it should be.",
    "EQUIVOCATION": "Sound logs prove that somebody signed two transcripts, or two results, of one round.",
}

_WHYS_SHOWN_MAX = 8


@command(app, "audit verify")
def verify(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Log folders; given together they vouch.")],
    min_witnesses: Annotated[
        int, typer.Option(min=0, help="So many other parties must vouch for all but the last 24 hours of each log.")
    ] = 0,
    site_ca: SiteCaOption = None,
    output: Annotated[str, typer.Option("--output", help="text, json, junit or sarif.")] = "text",
) -> None:
    """Check logs alone and against each other. Exit status 7 if anything is wrong with a log; 1 if all verify, and
    prove that somebody signed two transcripts, or two results, of one round."""
    from fedsilo.audit.audit_verify import verify_logs
    from fedsilo.audit.consistency import check_consistency
    from fedsilo.audit.notes import check_notes
    from fedsilo.audit.orders import check_orders
    from fedsilo.audit.transcripts import check_rounds, findings_of, verification_warnings
    from fedsilo.cli.check_reports import output_format, written

    form = output_format(output)
    folders = [existing_log(log) for log in logs]
    results = verify_logs(folders, min_witnesses)
    check_rounds(results, folders)
    check_consistency(results, folders)
    check_notes(results, folders)
    check_orders(results, folders, [existing(path).read_bytes() for path in site_ca or ()])
    told = told_apart(results)
    failed = [result for result in told if not result["verified"]]
    findings = findings_of(told)
    error: FedSiloError | None = None
    if failed:
        error = VerificationError(
            f"{len(failed)} of {len(told)} logs do not verify: {', '.join(result['log'] for result in failed)}",
            hint="\n".join(
                [*_where_to_look(failed), "compare with the other parties' logs: give all of them together"]
            ),
        )
    elif findings:
        error = OperationError(
            findings[0] + (f" (and {len(findings) - 1} more)" if findings[1:] else ""),
            hint="the logs verify; what they hold is evidence against the signer: keep them",
            code="EQUIVOCATION",
        )
    warnings = verification_warnings(told)
    if form in ("junit", "sarif"):
        report = written(form, "fedsilo audit verify", _verification_checks(results), _NOT_VERIFIED)
        emit(results, report, warnings=warnings, error=error)
        return
    emit(results, lambda: _verification_text(told), warnings=warnings, error=error)


@command(app, "audit show")
def show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the record.")],
    log: OptionalLogOption = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="What left under it, from the archive of a running silo; recorded there.")
    ] = False,
    config: Annotated[Path, typer.Option("--config", help="The site's configuration file, for --payload.")] = (
        SILO_YAML
    ),
    operator: Annotated[str, typer.Option("--operator", help="Who reads it, an auditor or approver.")] = "",
) -> None:
    """Show one record in full; with --payload, what left under it."""
    if payload:
        _show_payload(seq, config, operator)
        return
    if log is None:
        raise UsageError("which log? --log DIR", hint="--payload asks a running silo instead")
    folder = existing_log(log)
    record = _record(folder, seq)
    emit(
        record,
        lambda: _record_text(record, folder),
        warnings=[*reading_warnings(folder), *_note_troubles([record], folder)],
    )


def _record_text(record: Mapping[str, Any], folder: Path) -> str:
    """A record in full, and below it what a person wrote to it, where that is kept here."""
    from fedsilo.audit.notes import note_of
    from fedsilo.audit.record import Record

    note = note_of(folder, Record(record))
    return json.dumps(record, indent=2, ensure_ascii=False) + (f"\nnote kept beside the log: {note}" if note else "")


def _show_payload(seq: int, config: Path, operator: str) -> None:
    if not operator:
        raise UsageError("who reads it? --operator NAME", hint="an auditor or approver of this site; it is recorded")
    site = load_site(config)
    ticket = silo_command(site, operator, "payload.read", {"seq": seq}, "")
    with client_of(site) as client:
        data = client.query("payload", dict(ticket))
    emit(data, lambda: harmless(json.dumps(data, indent=2, ensure_ascii=False), lines=True))


@command(app, "audit tail")
def tail(
    log: LogOption,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=LINES_MAX, help="Newest so many.")] = 20,
    event: Annotated[str, typer.Option("--event", help="Only of this event, such as egress.decision.")] = "",
    kind: Annotated[str, typer.Option("--kind", help="Only of this message kind, such as lora.factors.")] = "",
    denied: Annotated[bool, typer.Option("--denied", help="Only decisions that were a refusal.")] = False,
    run: Annotated[str, typer.Option("--run", help="Only of this run.")] = "",
    round_number: Annotated[int | None, typer.Option("--round", min=0, help="Only of this round.")] = None,
    release: Annotated[str, typer.Option("--release", help="Only about this held release, such as r1/a/0.")] = "",
    person: Annotated[str, typer.Option("--person", help="Only where this person answered or commanded.")] = "",
    since: Annotated[str, typer.Option("--since", help="Only from this time on, such as 2026-03-01T08:00Z.")] = "",
    until: Annotated[str, typer.Option("--until", help="Only before this time; UTC where it names no zone.")] = "",
    no_control: NoControlOption = False,
) -> None:
    """The newest records, a line each; with filters, the newest that pass all of them."""
    from collections import deque

    from fedsilo.audit.reader import read_records
    from fedsilo.audit.record import EVENTS, Record

    if event and event not in EVENTS:
        raise _unknown("event", event, EVENTS)
    folder = existing_log(log)
    records: deque[dict[str, Any]] = deque(maxlen=lines)
    begin, end = _milliseconds(since), _milliseconds(until)
    of_kind = False
    for record in read_records(folder):
        of_kind = of_kind or record.get("kind") == kind
        if (
            (not event or record["event"] == event)
            and (not kind or record.get("kind") == kind)
            and (not denied or record.get("decision") == "deny")
            and (not run or record.get("run") == run)
            and (round_number is None or record.get("round") == round_number)
            and (not release or _detail(record, "release") == release)
            and (not person or _detail(record, "person") == person)
            and (begin is None or record["t"] >= begin)
            and (end is None or record["t"] < end)
            and not (no_control and Record(record).is_allowed_control)
        ):
            records.append(record)
    if kind and not of_kind:  # a log of another version may have kinds that are not known here: then it has them
        from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS

        if kind not in (known := {**OUTBOUND_KINDS, **INBOUND_KINDS}):
            raise _unknown("kind", kind, known)
    emit(
        list(records),
        lambda: _records_text(list(records), folder) if records else "no such record",
        warnings=[*reading_warnings(folder), *_note_troubles(records, folder)],
    )


def _detail(record: Mapping[str, Any], name: str) -> Any:
    return record.get("detail", {}).get(name)


def _milliseconds(time: str) -> int | None:
    """UTC milliseconds of a time in ISO 8601; None where none was given. Raises UsageError: it is no time."""
    if not time:
        return None
    try:
        moment = datetime.fromisoformat(time)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{time[:40]!r} is no time", hint="such as 2026-03-01 or 2026-03-01T08:00Z") from error


@command(app, "audit release")
def release_story(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0, as `silo approvals list` names it.")],
    log: LogOption,
) -> None:
    """What a log says of one held release, in order: the holds, the answers of people, the decisions, what left."""
    from fedsilo.audit.reader import read_records

    folder = existing_log(log)
    named = [record for record in read_records(folder) if _detail(record, "release") == release]
    if not named:
        raise NotFoundError(
            f"the log has no release {release[:80]!r}", hint="`fedsilo audit tail --event approval.request`"
        )
    messages = {(_place(record), _digest(record)) for record in named}
    places = {place for place, _ in messages}
    records = [
        record
        for record in read_records(folder)
        if _detail(record, "release") == release
        or (record["event"].startswith(("egress.", "ingress.")) and (_place(record), _digest(record)) in messages)
        or (record["event"] == "screen.hit" and _place(record) in places)  # its record has no digest
    ]
    emit(
        records,
        lambda: _records_text(records, folder),
        warnings=[*reading_warnings(folder), *_note_troubles(records, folder)],
    )


def _note_troubles(records: Iterable[Mapping[str, Any]], folder: Path) -> list[str]:
    """Notes of people that are gone or were exchanged, of the records that are shown."""
    from fedsilo.audit.notes import trouble_of
    from fedsilo.audit.record import Record

    return list(filter(None, (trouble_of(folder, Record(record)) for record in records)))


def _place(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The message that a record is about: its kind, and where in a run it belongs."""
    return record.get("kind"), record.get("run"), record.get("round"), record.get("step")


def _digest(record: Mapping[str, Any]) -> str:
    payload = record.get("payload", {})
    return str(payload.get("sha256") or payload.get("hmac_sha256") or "")


def _unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    from difflib import get_close_matches

    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return UsageError(f"there is no {what} {name!r}{meant}", hint=f"one of: {', '.join(names)}")


@command(app, "audit replay")
def replay(
    policy: Annotated[Path, typer.Option("--policy", help="The policy to ask; a draft, or the one in force.")],
    log: OptionalLogOption = None,
    charter: Annotated[
        Path | None, typer.Option("--charter", help="The federation's charter: judge by what both allow.")
    ] = None,
    since: Annotated[int, typer.Option("--since", min=0, help="First record to look at.")] = 0,
    rescreen: Annotated[
        bool, typer.Option("--rescreen", help="Ask a running silo to screen archived texts again; recorded there.")
    ] = False,
    config: Annotated[Path, typer.Option("--config", help="The site's configuration file, for --rescreen.")] = (
        SILO_YAML
    ),
    operator: Annotated[str, typer.Option("--operator", help="Who asks it, an auditor or approver.")] = "",
) -> None:
    """Judge every recorded message again by another policy and list the decisions that change.

    Where that policy's text screens are other ones, recorded facts do not tell: --rescreen takes the archived texts.
    """
    from fedsilo.audit.reader import read_records
    from fedsilo.files.site_policy import read_effective
    from policies.replay import replay as decide_again

    asked = read_effective(existing_policy(policy), charter and existing(charter), kept=True)
    rows: dict[int, dict[str, Any]] = {}
    if rescreen:
        site = load_site(config)
        rows = _rescreened(site, operator, asked, policy, charter, since)
        log = log or site.state_dir
    if log is None:
        raise UsageError("which log? --log DIR", hint="--rescreen takes that of the silo it asks")
    folder = existing_log(log)
    records = _same_log(read_records(folder, since), rows)
    judged = list(decide_again(records, asked, {seq: row.get("facts") or row["why"] for seq, row in rows.items()}))
    changed = [row.to_json() for row in judged if row.changed]
    passed_over = [row.to_json() for row in judged if row.decision is None]
    again = sum(row.rescreened for row in judged)
    data = {"decisions": len(judged), "changed": changed, "not_replayed": passed_over, "rescreened": again}
    emit(data, lambda: _replay_text(data), warnings=reading_warnings(folder))


def _rescreened(
    site: SiloConfig, operator: str, asked: Policy, policy: Path, charter: Path | None, since: int
) -> dict[int, dict[str, Any]]:
    """Return what a running silo's screens match in its archived texts under this policy, by record. Each command looks
    at a limited number, so there are several."""
    from silo.guard.screens import COMMAND

    if not operator:
        raise UsageError("who asks? --operator NAME", hint="an auditor or approver of this site; it is recorded")
    texts = {"policy": policy.read_text("utf-8"), "charter": charter.read_text("utf-8") if charter else ""}
    if asked.own.custom_text is not None:
        texts["custom_file"] = asked.own.custom_text.decode()
    rows: dict[int, dict[str, Any]] = {}
    next_record: int | None = since
    while next_record is not None:
        answer = silo_command(site, operator, COMMAND, {**texts, "since": next_record}, "")
        if answer["policy"] != asked.digest:
            raise ConflictError("the silo reads another policy out of these files", hint="is it of another version?")
        rows |= {row["seq"]: row for row in answer["rows"]}
        next_record = answer["next"]
    return rows


def _same_log(records: Iterable[dict[str, Any]], rows: Mapping[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records, as long as they are of the log that the rows are about."""
    for record in records:
        row = rows.get(record["seq"])
        if row is not None and row["hmac_sha256"] != record.get("payload", {}).get("hmac_sha256", ""):
            raise ConflictError(
                f"record {record['seq']} is not the one that the silo has screened again",
                hint="--log is another party's log; leave it out, or ask that party",
            )
        yield record


@command(app, "audit prove")
def prove(
    seq: Annotated[int | None, typer.Argument(min=0, help="Number of the record.", show_default=False)] = None,
    log: OptionalLogOption = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="Check instead what this command printed, or a folder that export --out wrote."),
    ] = None,
    key: Annotated[str, typer.Option("--key", help="With --check: the log's key as its owner published it.")] = "",
) -> None:
    """A record with the proof that it is in the log under a signed checkpoint; needs nothing else of the log.

    With --check: whether such a proof holds, without the log. Exit status 7 if not.
    """
    from fedsilo.audit.proofs import prove as proof_of

    if check is not None:
        if seq is not None or log is not None:
            raise UsageError("--check needs neither a record's number nor --log")
        _check_proof(check, key)
        return
    if seq is None or log is None or key:
        raise UsageError("give SEQ and --log DIR, or --check FILE and, where you know it, --key")
    folder = existing_log(log)
    data = proof_of(folder, seq)
    emit(data, lambda: json.dumps(data, indent=2, ensure_ascii=False), warnings=reading_warnings(folder))


def _check_proof(path: Path, key: str) -> None:
    from fedsilo.audit.audit_verify import shown
    from fedsilo.audit.proofs import check

    data = check(path, key)
    error = None
    if not data["verified"]:
        error = VerificationError(
            f"{shown(path)}: {_unproved(data)}: {first_of(data['problems'])}",
            hint="whoever has the log exports it again: an export holds only what a signed checkpoint covers",
        )
    warnings = []
    if not key:
        warnings.append("the key came with the proof: compare it with the one that the log's owner published, or --key")
    emit(data, lambda: _check_text(data), warnings=warnings, error=error)


def _unproved(data: dict[str, Any]) -> str:
    return f"unproved: {data['records'] - data['proved']} of {data['records']} records"


command(app, "audit export")(export)
command(app, "audit report")(report)


def _where_to_look(failed: list[LogResult]) -> list[str]:
    from fedsilo.audit.audit_verify import shown

    for result in failed:
        if result["suspects"]:
            first, last = result["suspects"]
            which = f"record {first}" if first == last else f"records {first} to {last}"
            return [f"look at {which} first: `fedsilo audit show {first} --log {shown(result['path'])}`"]
    return []


def _record(folder: Path, seq: int) -> dict[str, Any]:
    from fedsilo.audit.reader import read_records, removed

    record = next(read_records(folder, seq), None)
    if record is None:
        raise NotFoundError(f"{folder} has no record {seq}")
    if record["seq"] != seq:
        raise removed(folder, seq)
    return record


def _verification_checks(results: list[LogResult]) -> list[Check]:
    """Each problem of each log; a log without one is a check that passed."""
    from fedsilo.audit.transcripts import findings_of
    from fedsilo.cli.check_reports import Check

    return [
        Check(
            result["log"],
            f"{result['log']} verifies" if not number else f"problem {number}",
            "LOG_NOT_VERIFIED",
            problem,
            result["path"],
        )
        for result in results
        for number, problem in enumerate(result["problems"] or ([""] if result["verified"] else ["not verified"]))
    ] + [
        Check(result["log"], f"equivocation {number}", "EQUIVOCATION", finding, result["path"])
        for result in results
        for number, finding in enumerate(findings_of([result]))
    ]


def _verification_text(results: list[LogResult]) -> str:
    from fedsilo.audit.audit_verify import shown
    from fedsilo.audit.orders import orders_in_words
    from fedsilo.audit.transcripts import findings_of

    rows = [
        (
            result["log"],
            "verified" if result["verified"] else "NOT VERIFIED",
            result["size"],
            len(result["cosigned"]),
            max(result["cosigned"].values(), default=0),
            result["key"][:16],
            shown(result["path"]),
        )
        for result in results
    ]
    problems = [f"{result['log']}: {problem}" for result in results for problem in result["problems"]]
    problems += findings_of(results)
    asked = [result for result in results if any(result["orders"].values())]
    signed = [f"{result['log']}: what people ordered: {orders_in_words(result['orders'])}" for result in asked]
    header = ("log", "result", "records", "witnesses", "countersigned to", "key", "path")
    return "\n".join([table(header, rows), *signed, *problems])


def _check_text(data: dict[str, Any]) -> str:
    verdict = f"proved: {data['proved']} of {data['records']} records" if data["verified"] else _unproved(data)
    whose = "by the keys that came with the proof: " if data["cosigned"] else ""
    return "\n".join(
        [
            f"{verdict} ({data['first']} to {data['last']}) of {data['log']} under its checkpoint of {data['size']} "
            "records",
            f"key {data['key']}",
            f"countersigned {whose}{', '.join(data['cosigned']) or 'by nobody'}",
            *(f"problem: {problem}" for problem in data["problems"]),
        ]
    )


def _records_text(records: list[dict[str, Any]], folder: Path) -> str:
    from fedsilo.audit.notes import note_of
    from fedsilo.audit.record import Record

    def row(record: dict[str, Any]) -> tuple[Any, ...]:
        when = _time_text(record["t"])
        place = "/".join(str(record[name]) for name in ("run", "round", "step") if record.get(name))
        size = record.get("payload", {}).get("bytes", "")
        what = (record["seq"], when, record["event"], record.get("kind", ""), record.get("decision", ""))
        return (*what, size, place, ",".join(record.get("reasons", [])), _said(record, note_of(folder, Record(record))))

    header = ("seq", "time", "event", "kind", "decision", "bytes", "run/round/step", "reasons", "who and what")
    return table(header, map(row, records))


def _said(record: Mapping[str, Any], note: str) -> str:
    """Person, release, what the person wrote, and what the screens found how often, of a record that has them."""
    detail = record.get("detail", {})
    said = [f"{name} {detail[name]}" for name in ("person", "release") if isinstance(detail.get(name), str)]
    said += [f'"{note}"'] if note else []
    if record["event"] == "screen.hit":
        found = detail.get("hits")
        said += [f"{screen} {count}" for screen, count in sorted(found.items())] if isinstance(found, Mapping) else []
        said.append(f"in {detail.get('responses', '?')} answers")
    return ", ".join(said)


def _time_text(milliseconds: int) -> str:
    """UTC; or the number, of a time that no calendar has: a record may hold any up to 2^53 - 1."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} milliseconds"


def _replay_text(data: dict[str, Any]) -> str:
    rows = [
        [
            str(row["seq"]),
            row["kind"],
            f"{row['round']}.{row['step']}",
            row["recorded"],
            row["replayed"],
            ", ".join(row["reasons"] or row["recorded_reasons"]),
        ]
        for row in data["changed"]
    ]
    again = data["decisions"] - len(data["not_replayed"])
    screened = f", {data['rescreened']} of them with their archived texts screened again" if data["rescreened"] else ""
    lines = [f"{again} decisions judged again{screened}; {len(rows)} change"]
    if rows:
        lines.append(table(("record", "kind", "round.step", "was", "would be", "reasons"), rows))
    for name, what, instead in (
        ("clipped_first", "factors denied only for their length", "scaled them down to its clip_l2"),
        ("withheld_first", "answers denied only for a screen's hit", "left out those with a hit"),
    ):
        found = [str(row["seq"]) for row in data["changed"] if row[name]]
        if found:
            shown = f"{', '.join(found[:8])}{' ...' if len(found) > 8 else ''}"
            lines.append(
                f"{what} (record {shown}): a guard under this policy would have {instead} first, so this alone would "
                "not have stopped the message"
            )
    if data["not_replayed"]:
        lines.append(f"{len(data['not_replayed'])} cannot be judged from facts (--json lists them)")
        whys = Counter(row["not_replayed"] for row in data["not_replayed"])
        lines += [f"  {count}: {why}" for why, count in whys.most_common(_WHYS_SHOWN_MAX)]
    return "\n".join(lines)

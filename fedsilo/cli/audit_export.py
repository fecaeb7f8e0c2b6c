"""`fedsilo audit export`: a range of records with proofs, or every record as a JSON line for a log shipper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli.output import JsonOption, emit, guarded

_POLL_SECONDS = 0.5
_FORMAT = "jsonl"


@guarded("audit export")
def export(
    log: Annotated[Path, typer.Option("--log", help="Folder of the audit log, or the state folder around it.")],
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
    json_output: JsonOption = False,
) -> None:
    """Records with proofs into a folder (--out), or every record as a JSON line appended to a file (--to)."""
    from fedsilo.cli.audit_folders import existing_log
    from fedsilo.protocol.errors import UsageError

    folder = existing_log(log)
    if out is not None:
        if format_name or to or follow:
            raise UsageError("--out is for a range with proofs; --format, --to and --follow are for streams")
        from fedsilo.audit.proofs import export_range
        from fedsilo.files.durable import removed_on_failure

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
            "audit export",
            data,
            json_output=json_output,
            warnings=warnings,
            text=f"{data['records']} records ({begins} to {data['last']}), all proved against the checkpoint at "
            f"{data['checkpoint_size']}, in {out}",
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
    emit(
        "audit export",
        data,
        json_output=json_output,
        text=f"{data['records']} records to {data['to']} as {_FORMAT}; the next is {data['next']}",
    )


def _stream(folder: Path, to: Path, position_path: Path, *, first: int, follow: bool) -> dict[str, Any]:
    """Export until there is nothing more, or until a signal with `follow`."""
    import signal
    import threading

    import fedsilo
    from fedsilo.audit.export import Export, FileSink, lines_after, read_position
    from fedsilo.audit.reader import LogReader, log_key_of
    from fedsilo.files.durable import lock_exclusively

    stop = threading.Event()
    target = f"{_FORMAT} {to.absolute()}"
    with lock_exclusively(position_path.with_name(f"{position_path.name}.lock")):
        found = read_position(position_path, log=log_key_of(folder)[0], target=target)
        reader = LogReader(folder, found.place if found else None, first=first)
        following = lines_after(folder, found.place, found.product_version or fedsilo.__version__) if found else ()
        sink = FileSink(to, found, reader.place, following)
        if follow:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
        work = Export(
            reader, sink, fedsilo.__version__, position_path, target,
            wait=(lambda: not stop.wait(_POLL_SECONDS)) if follow else None, stopped=stop.is_set,
        )  # fmt: skip
        work.run()
    return {
        "to": str(to), "format": _FORMAT, "records": work.records, "next": reader.place.seq,
        "position": str(position_path),
    }  # fmt: skip

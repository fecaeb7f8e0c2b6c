"""`fedsilo audit export`: a range of records with proofs, or every record to the site's own log system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch.output import JsonOption, emit, guarded

if TYPE_CHECKING:
    from fedsilo.edge.audit_follow import LogReader, Position, Sink

_POLL_SECONDS = 0.5
_ATTEMPTS_MAX = 5  # of a run that does not follow; one that follows never gives up


@guarded("audit export")
def export(
    log: Annotated[Path, typer.Option("--log", help="Folder of the audit log, or the state folder around it.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="With proofs: new folder for records.jsonl and proofs.json.")
    ] = None,
    first: Annotated[
        int, typer.Option("--first", min=0, help="First record; to a log system only where there is no position yet.")
    ] = 0,
    last: Annotated[
        int | None, typer.Option("--last", min=0, help="With --out: last record; by default the newest.")
    ] = None,
    format_name: Annotated[
        str, typer.Option("--format", help="To a log system: jsonl, ocsf or cef; needs --to or --syslog.")
    ] = "",
    to: Annotated[Path | None, typer.Option("--to", help="File to append to; each record once.")] = None,
    syslog: Annotated[
        str, typer.Option("--syslog", help="HOST:PORT of a syslog receiver over TLS; each record at least once.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is appended, until SIGTERM or Ctrl-C.")
    ] = False,
    position: Annotated[
        Path | None,
        typer.Option("--position", help="Where to remember how far it got; by default beside --to; --syslog needs it."),
    ] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="CA of the receiver's certificate, PEM.")] = None,
    server_name: Annotated[
        str, typer.Option("--server-name", help="Name in the receiver's certificate, if it is not the host.")
    ] = "",
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Certificate for a receiver that asks for one, PEM.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its key, mode 0600.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Records with proofs into a folder (--out), or as jsonl, OCSF or CEF to a file or a syslog receiver (--format)."""
    from fedsilo.edge.audit_formats import FORMATS
    from fedsilo.launch.audit_folders import existing_log
    from fedsilo.treaty.errors import UsageError

    folder = existing_log(log)
    if out is not None:
        if format_name or to or syslog or follow:
            raise UsageError("--out is for a range with proofs; --format, --to, --syslog and --follow are for streams")
        from fedsilo.edge.audit_proofs import export_range
        from fedsilo.edge.files import removed_on_failure

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
    if format_name not in FORMATS:
        raise UsageError("give --out FOLDER, or --format jsonl|ocsf|cef with --to FILE or --syslog HOST:PORT")
    if (to is None) == (not syslog):
        raise UsageError("give either --to FILE or --syslog HOST:PORT")
    if last is not None:
        raise UsageError("--last is for --out; a stream ends at the newest record")
    if syslog and (ca is None or position is None):
        raise UsageError("--syslog needs --ca FILE and --position FILE")
    if not syslog and (ca or server_name or certificate or key):
        raise UsageError("--ca, --server-name, --certificate and --key are for --syslog")
    if (certificate is None) != (key is None):
        raise UsageError("--certificate and --key go together")
    data = _stream(
        folder, format_name, first=first, follow=follow, to=to,
        position_path=position or Path(f"{to}.position"),
        receiver={"address": syslog, "ca": ca, "server_name": server_name, "certificate": certificate, "key": key},
    )  # fmt: skip
    emit(
        "audit export",
        data,
        json_output=json_output,
        text=f"{data['records']} records to {data['to']} as {format_name}; the next is {data['next']}",
    )


def _stream(
    folder: Path,
    format_name: str,
    *,
    first: int,
    follow: bool,
    to: Path | None,
    position_path: Path,
    receiver: dict[str, Any],
) -> dict[str, Any]:
    """Export until there is nothing more, or until a signal with `follow`."""
    import signal
    import threading

    import fedsilo
    from fedsilo.edge.audit_follow import Export, LogReader, lines_after, log_key_of, read_position
    from fedsilo.edge.files import lock_exclusively

    stop = threading.Event()
    target = f"{format_name} {to.absolute() if to else receiver['address']}"
    with lock_exclusively(position_path.with_name(f"{position_path.name}.lock")):
        found = read_position(position_path, log=log_key_of(folder)[0], target=target)
        reader = LogReader(folder, found.place if found else None, first=first)
        following: Iterator[bytes] = iter(())
        if found is not None:
            version = found.product_version or fedsilo.__version__
            following = lines_after(folder, found.place, format_name, version)
        sink = _sink(to, receiver, reader, found, following, stop, follow=follow)
        if follow:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
        work = Export(
            reader, sink, format_name, fedsilo.__version__, position_path, target,
            wait=(lambda: not stop.wait(_POLL_SECONDS)) if follow else None, stopped=stop.is_set,
        )  # fmt: skip
        work.run()
    return {
        "to": str(to) if to else receiver["address"], "format": format_name, "records": work.records,
        "next": reader.place.seq, "position": str(position_path),
    }  # fmt: skip


def _sink(
    to: Path | None,
    receiver: dict[str, Any],
    reader: LogReader,
    found: Position | None,
    following: Iterator[bytes],
    stop: Any,
    *,
    follow: bool,
) -> Sink:
    import sys

    import fedsilo
    from fedsilo.edge.audit_follow import FileSink
    from fedsilo.launch.output import plain

    if to is not None:
        return FileSink(to, found, reader.place, following)
    from fedsilo.launch.syslog_tls import Receiver, SyslogSink, receiver_address

    def say(line: str) -> None:
        sys.stderr.write(f"{plain(line)}\n")
        sys.stderr.flush()

    fields = {name: value for name, value in receiver.items() if name != "address"}
    host, port = receiver_address(receiver["address"])
    return SyslogSink(
        Receiver(host, port, **fields), reader.place, fedsilo.__version__,
        pause=lambda seconds: not stop.wait(seconds), attempts_max=None if follow else _ATTEMPTS_MAX, say=say,
    )  # fmt: skip

"""`outbox`, `inbox`, `audit`, `certs` and `settings` of a running silo or coordinator: messages, records and files.

Each asks the daemon's control socket the very query that the console's screen of that name asks, and prints the same
columns and lines. Both daemons answer the same queries, so the commands are the same but for the words of their help
and for the coordinator's outbox, whose rows are counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from fedsilo.cli.output import command, emit, table
from fedsilo.protocol.errors import NotFoundError, UnreachableError, UsageError, VerificationError

if TYPE_CHECKING:
    from fedsilo.control.answers import AuditStatus
    from fedsilo.views.columns import Column

LimitOption = Annotated[int, typer.Option("--limit", min=1, max=500, help="Newest so many.")]
RecordsOption = Annotated[int, typer.Option("--limit", min=1, max=200, help="Newest so many.")]
BeforeOption = Annotated[
    int | None, typer.Option("--before", min=0, help="Only records before this number: `next` of the page before.")
]
ControlOption = Annotated[bool, typer.Option("--control", help="Polls and heartbeats too.")]
NoControlOption = Annotated[
    bool, typer.Option("--no-control", help="Without polls and other control messages that nobody refused.")
]
VerdictOption = Annotated[str, typer.Option("--verdict", help="Only these decisions: allow, deny or hold.")]
KindOption = Annotated[str, typer.Option("--kind", help="Only of this message kind, such as lora.factors.")]
EventOption = Annotated[str, typer.Option("--event", help="Only events whose name begins so, such as egress.")]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Only begin, and say how it stands; exit 3 until it has ended.")
]
TextOption = Annotated[str, typer.Option("--text", help="Only records in which this stands.")]
RecordArgument = Annotated[int, typer.Argument(min=0, help="Number of the record.")]
AuditConfigOption = Annotated[Path, typer.Option("--config", help="The daemon's configuration file.")]

RECORDS_HELP = (
    "Records of a running {}, newest first. With a filter or --no-control one call looks at some thousand records only."
)
RECORD_HELP = "One record of a running {}, in full."
POLL_SECONDS = 0.1
TEXT_CELLS = 100

Ask: TypeAlias = Callable[..., Any]  # (query, arguments) -> the daemon's answer


@dataclass(frozen=True)
class Program:
    """Whose commands they are.

    Attributes:
        name: silo or coordinator.
        config: its configuration file where none is named.
        config_option: annotation of the option that names it.
        ask: (configuration file, query, arguments) -> the daemon's answer.
        help: of the commands whose words differ, by their names.
    """

    name: Literal["silo", "coordinator"]
    config: Path
    config_option: Any
    ask: Callable[..., Any]
    help: Mapping[str, str]

    def command(self, app: typer.Typer, words: str, **annotations: Any) -> Callable[[Callable[..., Any]], None]:
        """Register a command that takes this program's --config.

        Args:
            app: the group that it belongs to.
            words: its name without the program's.
            annotations: further ones that differ between the programs.
        """

        def register(function: Callable[..., Any]) -> None:
            function.__annotations__ |= {"config": self.config_option} | annotations
            command(app, f"{self.name} {words}", help=self.help.get(words))(function)

        return register


def add_to(app: typer.Typer, program: Program, ledger: typer.Typer | None = None) -> None:
    """Make the groups and commands, and of a silo the ledger's, part of a program."""
    outbox, inbox = (typer.Typer(no_args_is_help=True, help=program.help[name]) for name in ("outbox", "inbox"))
    app.add_typer(outbox, name="outbox")
    app.add_typer(inbox, name="inbox")
    if program.name == "silo":
        _add_decisions(outbox, program, "outbox")
    else:
        _add_sent(outbox, program)
    _add_decisions(inbox, program, "inbox")
    if ledger is not None:
        app.add_typer(ledger, name="ledger")
    _add_audit(app, program)
    _add_files(app, program)


# ---- messages --------------------------------------------------------------------------------------


def columns_text(columns: Iterable[Column], rows: Iterable[Any]) -> str:
    """A table of the console's columns, each as wide as what is in it."""
    listed = list(columns)
    return table([each.name for each in listed], ([each.show(row)[0] for each in listed] for row in rows))


def older(following: object) -> str:
    """Return how to get the next page; nothing at the end."""
    return f"\nolder ones: --before {following}" if following is not None else ""


def _add_decisions(app: typer.Typer, program: Program, query: Literal["outbox", "inbox"]) -> None:
    """Commands on messages that were judged, each a decision in the log."""
    seq_argument = Annotated[
        int, typer.Argument(min=0, help=f"Number of the decision, from `{program.name} {query} list`.")
    ]

    @program.command(app, f"{query} list")
    def list_(
        config: Path = program.config,
        limit: LimitOption = 100,
        before: BeforeOption = None,
        control: ControlOption = False,
        verdict: VerdictOption = "",
        kind: KindOption = "",
    ) -> None:
        asked = {"limit": limit, "before": before, "control": control, "verdict": verdict or None, "kind": kind or None}
        data = program.ask(config, query, asked)

        def text() -> str:
            from fedsilo.control.answers import MessagePage, read
            from fedsilo.views.messages import columns_of

            page = read(MessagePage, data)
            columns = columns_of(query, at_coordinator=program.name == "coordinator", wide=True)
            head = f"{page.total} messages, {page.held} held, {page.denied} denied"
            return f"{head}\n{columns_text(columns, page.messages)}{older(page.next)}"

        emit(data, text)

    @program.command(app, f"{query} show", seq=seq_argument)
    def show(seq: int, config: Path = program.config) -> None:
        data = program.ask(config, query, {"seq": seq})

        def text() -> str:
            from fedsilo.control.answers import DecisionInFull, read
            from fedsilo.views.lines import to_text
            from fedsilo.views.messages import detail_lines

            twin, answer = f"{program.name} {query} show {seq} --json", read(DecisionInFull, data)
            return to_text(detail_lines(query, answer, twin, TEXT_CELLS, party=program.name))

        emit(data, text)


def _add_sent(app: typer.Typer, program: Program) -> None:
    """Commands on what the coordinator sent, a row for each round, kind and silo."""

    @program.command(app, "outbox list")
    def list_(
        config: Path = program.config,
        limit: LimitOption = 100,
        before: Annotated[
            str, typer.Option("--before", help="Only what comes behind this row: `next` of the page before.")
        ] = "",
        control: Annotated[
            bool, typer.Option("--control", help="Acknowledgements, refusals and the like too.")
        ] = False,
        kind: KindOption = "",
        run: Annotated[str, typer.Option("--run", help="Only of this run.")] = "",
        silo: Annotated[str, typer.Option("--silo", help="Only to this silo.")] = "",
        waiting: Annotated[bool, typer.Option("--waiting", help="Only what a silo has not acknowledged yet.")] = False,
    ) -> None:
        chosen = {"before": before or None, "kind": kind or None, "run": run or None, "silo": silo or None}
        data = program.ask(config, "outbox", {"limit": limit, "control": control, "waiting": waiting, **chosen})

        def text() -> str:
            from fedsilo.control.answers import MessagePage, read
            from fedsilo.views.messages import SENT_COLUMNS

            page = read(MessagePage, data)
            head = f"{page.sent} messages sent, {page.waiting} wait"
            return f"{head}\n{columns_text(SENT_COLUMNS, page.messages)}{older(page.next)}"

        emit(data, text)

    @program.command(app, "outbox show")
    def show(
        seq: Annotated[str, typer.Argument(help="RUN/ROUND/KIND/SILO, as `seq` in `coordinator outbox list --json`.")],
        config: Path = program.config,
    ) -> None:
        data = program.ask(config, "outbox", {"seq": seq})

        def text() -> str:
            from fedsilo.control.answers import SentInFull, read
            from fedsilo.views.lines import to_text
            from fedsilo.views.messages import sent_lines

            answer, twin = read(SentInFull, data), f"coordinator outbox show {seq} --json"
            return to_text(sent_lines(answer.message, answer, twin, TEXT_CELLS))

        emit(data, text)


# ---- the audit log ---------------------------------------------------------------------------------


def _add_audit(app: typer.Typer, program: Program) -> None:
    """Make `audit` part of a program: records of the daemon's own log, and whether it holds."""
    name = program.name
    audit = typer.Typer(no_args_is_help=True, help=f"The audit log of a running {name}, and whether it holds.")
    app.add_typer(audit, name="audit")
    option = AuditConfigOption

    @program.command(audit, "audit list", config=option)
    def list_(
        config: Path = program.config,
        limit: RecordsOption = 100,
        before: BeforeOption = None,
        event: EventOption = "",
        text: TextOption = "",
        no_control: NoControlOption = False,
    ) -> None:
        asked: dict[str, Any] = {"limit": limit, "before": before, "event": event or None, "text": text or None}
        data = program.ask(config, "audit", asked | {"control": False} if no_control else asked)

        def shown() -> str:
            from fedsilo.views.audit import COLUMNS, record_rows

            return f"{data['size']} records\n{columns_text(COLUMNS, record_rows(data))}{older(data['next'])}"

        emit(data, shown)

    @program.command(audit, "audit show", config=option)
    def show(seq: RecordArgument, config: Path = program.config) -> None:
        record = _record(partial(program.ask, config), name, seq)
        text = partial(json.dumps, record, indent=2, ensure_ascii=False)
        emit(record, text)

    @program.command(audit, "audit status", config=option)
    def status(config: Path = program.config) -> None:
        """Show how far the daemon itself has verified the log, and what the other side knows of it. Exit status 7 where
        it has a break."""
        _emit_status(program.ask(config, "audit.status"))

    @program.command(audit, "audit verify", config=option)
    def verify(config: Path = program.config, no_wait: NoWaitOption = False) -> None:
        """Have the daemon verify its own log, and wait until it has. Exit status 7: a break; 3: it has not ended by the
        end of --timeout, or, with --no-wait, not yet; it goes on in the daemon.

        An auditor verifies alone, with the logs of all parties: `fedsilo audit verify`.
        """
        _verify(partial(program.ask, config), name, wait=not no_wait)


def _record(ask: Ask, program: str, seq: int) -> dict[str, Any]:
    """Return one audit record. Raises NotFoundError; UsageError: a number that no record can have."""
    from fedsilo.audit.record import COUNT_MAX

    hint = f"{program} audit list shows them"
    if seq >= COUNT_MAX:
        raise UsageError(f"SEQ {seq}: no log has so many records", hint=hint)
    found: list[dict[str, Any]] = ask("audit", {"before": seq + 1, "limit": 1})["records"]
    if not found or found[0]["seq"] != seq:
        raise NotFoundError(f"the log has no record {seq}", hint=hint)
    return found[0]


def _verify(ask: Ask, program: str, *, wait: bool) -> None:
    """Have the daemon verify its log, and say how that ended: 0 means that every record was looked at.

    Raises:
        UnreachableError: it had not ended by then; it goes on in the daemon.
        typer.Exit: 7, it found a break.
    """
    from fedsilo.control.answers import AuditStatus, read
    from fedsilo.control.client import timeout_chosen

    seconds = timeout_chosen.get()
    deadline = None if seconds is None else time.monotonic() + seconds
    data = ask("audit.verify")
    while wait and data["verifying"] and (deadline is None or time.monotonic() < deadline):
        time.sleep(POLL_SECONDS)
        data = ask("audit.status")
    if not data["verifying"]:
        _emit_status(data)
        return
    status = read(AuditStatus, data)
    why = f"within {seconds:g} s" if wait and seconds is not None else "yet"
    error = UnreachableError(
        f"the verification has not ended {why}: {status.looked_at} of {status.of} records",
        hint=f"it goes on in the daemon: {program} audit status",
        code="NOT_VERIFIED_YET",
    )
    emit(data, lambda: _status_text(status), error=error)


def _emit_status(data: Any) -> None:
    """Print the state of the log; a break is a failure."""
    from fedsilo.control.answers import AuditStatus, read

    status, error = read(AuditStatus, data), None
    if status.broken is not None:
        error = VerificationError(
            f"the audit log is broken at record {status.broken.seq}: {status.broken.why}",
            hint="keep the folder as it is, and verify it with the other parties' logs: fedsilo audit verify LOG...",
        )
    emit(data, lambda: _status_text(status), error=error)


def _status_text(status: AuditStatus) -> str:
    checkpoint, verified = status.checkpoint, "never verified by this daemon"
    if status.verified_to is not None:
        verified = f"verified to {status.verified_to} at {status.verified_at}"
    if status.verifying:
        verified += f", verifying: {status.looked_at} of {status.of}"
    signers = ", ".join(checkpoint.cosigned_by) or "nobody else"
    words = status.witnesses if "coordinator" in status.absent else {"coordinator": status.coordinator}
    lines = [
        f"{status.size} records, {verified}",
        f"signed checkpoint {checkpoint.size} of {checkpoint.time or '-'}, countersigned by {signers}",
        *(f"{name}: {word}" for name, word in words.items()),
    ]
    return "\n".join(lines)


# ---- files -----------------------------------------------------------------------------------------


def _add_files(app: typer.Typer, program: Program) -> None:
    @program.command(app, "certs")
    def certs(config: Path = program.config) -> None:
        data = program.ask(config, "certificates")

        def text() -> str:
            from fedsilo.control.answers import CertificateRow, read_rows
            from fedsilo.views.certificates import COLUMNS, certificate_rows
            from fedsilo.views.lines import UNICODE

            return columns_text(COLUMNS, certificate_rows(read_rows(CertificateRow, data), time.time(), UNICODE))

        emit(data, text)

    @program.command(app, "settings")
    def settings(config: Path = program.config) -> None:
        data = program.ask(config, "settings")

        def text() -> str:
            from fedsilo.views.settings import COLUMNS, setting_rows

            return columns_text(COLUMNS[1:], setting_rows(data, program.name, ()))  # all are of one daemon

        emit(data, text)

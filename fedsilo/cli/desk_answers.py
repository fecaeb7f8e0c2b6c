"""What the commands of both daemons print of the queries that both answer: messages, audit records, certificates and
settings. Each asks the daemon's control socket the very query that the console's screen of that name asks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import typer

from fedsilo.cli.output import emit, table
from fedsilo.control.answers import CertificateRow, MessageRow, SettingRow, printed_names

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

POLL_SECONDS = 0.1
MINUTES_FROM_SECONDS = 120  # an age is told in minutes from here on

Ask: TypeAlias = Callable[..., Any]  # (query, arguments) -> the daemon's answer


def cells(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[list[Any]]:
    """Of each row what stands in these columns."""
    names = list(columns)
    return [[row[name] for name in names] for row in rows]


def older(following: object) -> str:
    """How to get the next page; nothing at the end."""
    return f"\nolder ones: --before {following}" if following is not None else ""


def recorded(data: Mapping[str, Any]) -> str:
    """Where the party's own audit log has an order: `record` of the daemon's answer; nothing where it tells none.

    Never the log's size, `audit_size`: with others writing, that is some later record.
    """
    number = data.get("record")
    return "" if number is None else f", audit record {number}"


# ---- messages --------------------------------------------------------------------------------------


def list_messages(
    ask: Ask, program: str, query: str, *, limit: int, before: int | None, control: bool, verdict: str, kind: str,
    json_output: bool,
) -> None:  # fmt: skip
    """Decisions on messages, newest first. query: outbox or inbox."""
    asked = {"limit": limit, "before": before, "control": control, "verdict": verdict or None, "kind": kind or None}
    data = ask(query, asked)
    columns = printed_names(MessageRow)
    rows = [
        (*(row[name] for name in columns), " ".join(row["rules"]) or " ".join(row["reasons"]))
        for row in data["messages"]
    ]
    emit(
        f"{program} {query} list", data, json_output=json_output,
        text=lambda: f"{data['total']} messages, {data['held']} held, {data['denied']} denied\n"
        + table((*columns, "deciding rule"), rows) + older(data["next"]),
    )  # fmt: skip


def show_message(ask: Ask, program: str, query: str, seq: int, json_output: bool) -> None:
    """One decision with every rule's verdict."""
    data = ask(query, {"seq": seq})
    emit(f"{program} {query} show", data, json_output=json_output, text=lambda: _message_text(data))


def _message_text(data: Mapping[str, Any]) -> str:
    from fedsilo.views.rule_words import limit_text, measured_text

    message = data["message"]
    header = ("outcome", "rule", "measured", "limit", "line")
    rows = [
        (
            rule["outcome"], rule["rule"], measured_text(rule["rule"], rule.get("measured")),
            limit_text(rule["rule"], rule.get("limit")), rule.get("line"),
        )
        for rule in message.get("rules", ())
    ]  # fmt: skip
    became = f", {data['outcome']}" if data["outcome"] else ""
    became += f" after {data['milliseconds']} ms" if data["milliseconds"] is not None else ""
    lines = [
        f"{message['kind']} {message['decision']}{became} {' '.join(message.get('reasons', ()))}".rstrip(),
        table(header, rows),
        f"{message.get('detail', {}).get('rules_not_applicable', 0)} rules do not apply to this kind",
        *(f"would pass: {sentence}" for sentence in data["would_pass"]),
    ]
    return "\n".join(lines)


# ---- the audit log ---------------------------------------------------------------------------------


def list_records(
    ask: Ask, program: str, *, limit: int, before: int | None, event: str, text: str, control: bool, json_output: bool
) -> None:
    """Audit records, newest first. control: also control messages that nobody refused."""
    asked = {"limit": limit, "before": before, "event": event or None, "text": text or None}
    data = ask("audit", asked if control else asked | {"control": False})
    rows = [
        (record["seq"], record["event"], record.get("kind", ""), record.get("round", ""), record.get("why", ""))
        for record in data["records"]
    ]
    emit(
        f"{program} audit list", data, json_output=json_output,
        text=lambda: f"{data['size']} records\n" + table(("seq", "event", "kind", "round", "fault"), rows)
        + older(data["next"]),
    )  # fmt: skip


def show_record(ask: Ask, program: str, seq: int, json_output: bool) -> None:
    """One audit record in full. Raises NotFoundError; UsageError: a number that no record can have."""
    from fedsilo.audit.record import COUNT_MAX
    from fedsilo.protocol.errors import NotFoundError, UsageError

    if seq >= COUNT_MAX:
        raise UsageError(f"SEQ {seq}: no log has so many records", hint=f"{program} audit list shows them")
    found = ask("audit", {"before": seq + 1, "limit": 1})["records"]
    if not found or found[0]["seq"] != seq:
        raise NotFoundError(f"the log has no record {seq}", hint=f"{program} audit list shows them")
    emit(
        f"{program} audit show", found[0], json_output=json_output,
        text=lambda: json.dumps(found[0], indent=2, ensure_ascii=False),
    )  # fmt: skip


def verify_log(ask: Ask, command: str, *, wait: bool, json_output: bool) -> None:
    """Have the daemon verify its log, and say how that ended: 0 means that every record was looked at.

    Args:
        ask: the daemon.
        command: its full name, for the envelope.
        wait: until it has ended, or --timeout is over.
        json_output: one envelope.

    Raises:
        UnreachableError: it had not ended by then; it goes on in the daemon.
        typer.Exit: 7, it found a break.
    """
    from fedsilo.control.client import timeout_chosen
    from fedsilo.protocol.errors import UnreachableError

    seconds = timeout_chosen.get()
    deadline = None if seconds is None else time.monotonic() + seconds
    data = ask("audit.verify")
    while wait and data["verifying"] and (deadline is None or time.monotonic() < deadline):
        time.sleep(POLL_SECONDS)
        data = ask("audit.status")
    if not data["verifying"]:
        emit_status(command, data, json_output)
        return
    program = command.partition(" ")[0]
    why = f"within {seconds:g} s" if wait and seconds is not None else "yet"
    error = UnreachableError(
        f"the verification has not ended {why}: {data['looked_at']} of {data['of']} records",
        hint=f"it goes on in the daemon: {program} audit status", code="NOT_VERIFIED_YET",
    )  # fmt: skip
    emit(command, dict(data), json_output=json_output, text=lambda: _status_text(data), error=error)


def standing_text(row: Mapping[str, Any]) -> str:
    """How a silo stands, in the coordinator's own word for it."""
    return str(row["state"]).replace("_", " ")


def seen_text(last_seen: str, now: str) -> str:
    """How long ago that was.

    Args:
        last_seen: UTC as the coordinator tells it; empty where it heard nothing since its own start.
        now: the coordinator's time.
    """
    seconds = _seconds_between(last_seen, now) if last_seen else None
    if seconds is None:
        return last_seen or "-"
    whole = max(int(seconds), 0)
    return f"{whole} s ago" if whole < MINUTES_FROM_SECONDS else f"{whole // 60} min ago"


def _seconds_between(earlier: str, later: str) -> float | None:
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except (ValueError, TypeError):
        return None


def emit_status(command: str, data: Mapping[str, Any], json_output: bool) -> None:
    """How the log stands; a break is a failure."""
    from fedsilo.protocol.errors import VerificationError

    broken, error = data["broken"], None
    if broken is not None:
        error = VerificationError(
            f"the audit log is broken at record {broken['seq']}: {broken['why']}",
            hint="keep the folder as it is, and verify it with the other parties' logs: fedsilo audit verify LOG...",
        )
    emit(command, dict(data), json_output=json_output, text=lambda: _status_text(data), error=error)


def _status_text(data: Mapping[str, Any]) -> str:
    checkpoint = data["checkpoint"]
    verified = "never verified by this daemon" if data["verified_to"] is None else (
        f"verified to {data['verified_to']} at {data['verified_at']}"
    )  # fmt: skip
    if data["verifying"]:
        verified += f", verifying: {data['looked_at']} of {data['of']}"
    signers = ", ".join(checkpoint["cosigned_by"]) or "nobody else"
    words = data.get("witnesses", {"coordinator": data.get("coordinator", "")})
    return "\n".join(
        [
            f"{data['size']} records, {verified}",
            f"signed checkpoint {checkpoint['size']} of {checkpoint['time'] or '-'}, countersigned by {signers}",
            *(f"{name}: {word}" for name, word in words.items()),
        ]
    )


# ---- files -----------------------------------------------------------------------------------------


def show_certificates(ask: Ask, program: str, json_output: bool) -> None:
    data = ask("certificates")
    columns = printed_names(CertificateRow)
    emit(f"{program} certs", data, json_output=json_output, text=lambda: table(columns, cells(data, columns)))


def show_settings(ask: Ask, program: str, json_output: bool) -> None:
    data = ask("settings")
    columns = printed_names(SettingRow)
    emit(f"{program} settings", data, json_output=json_output, text=lambda: table(columns, cells(data, columns)))

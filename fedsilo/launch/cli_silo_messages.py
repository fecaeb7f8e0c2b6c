"""`silo outbox`, `inbox`, `ledger`, `audit`, `certs`, `settings`: what a running silo knows of its messages, limits,
records and files. Each asks the daemon's control socket the very query that the console's screen of that name asks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from fedsilo.launch.output import JsonOption, emit, guarded, table
from fedsilo.launch.silo_control import CONFIG_DEFAULT, ConfigOption, client_of, load_site

outbox_app = typer.Typer(no_args_is_help=True, help="Every outbound message and the rules that judged it.")
inbox_app = typer.Typer(no_args_is_help=True, help="Every message that came in and the rules that judged it.")
ledger_app = typer.Typer(no_args_is_help=True, help="What the guard remembers: runs, budgets, outgoing content.")
audit_app = typer.Typer(no_args_is_help=True, help="The audit log of a running silo, and whether it holds.")

LimitOption = Annotated[int, typer.Option("--limit", min=1, max=500, help="Newest so many.")]
BeforeOption = Annotated[
    int | None, typer.Option("--before", min=0, help="Only records before this number: `next` of the page before.")
]
ControlOption = Annotated[bool, typer.Option("--control", help="Polls and heartbeats too.")]
VerdictOption = Annotated[str, typer.Option("--verdict", help="Only these decisions: allow, deny or hold.")]
KindOption = Annotated[str, typer.Option("--kind", help="Only of this message kind, such as lora.factors.")]


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `silo`."""
    app.add_typer(outbox_app, name="outbox")
    app.add_typer(inbox_app, name="inbox")
    app.add_typer(ledger_app, name="ledger")
    app.add_typer(audit_app, name="audit")
    app.command()(certs)
    app.command()(settings)


def _ask(config: Any, query: str, arguments: Mapping[str, Any] | None = None) -> Any:
    with client_of(load_site(config)) as client:
        return client.query(query, arguments)


# ---- messages --------------------------------------------------------------------------------------


def _list(
    query: str, config: Any, limit: int, before: int | None, control: bool, verdict: str, kind: str, json_output: bool
) -> None:
    asked = {"limit": limit, "before": before, "control": control, "verdict": verdict or None, "kind": kind or None}
    data = _ask(config, query, asked)
    columns = ("seq", "time", "kind", "round", "items", "bytes", "verdict", "outcome", "deciding rule")
    rows = [
        (*(row[name] for name in columns[:-1]), " ".join(row["rules"]) or " ".join(row["reasons"]))
        for row in data["messages"]
    ]
    more = f"\nolder ones: --before {data['next']}" if data["next"] is not None else ""
    emit(
        f"silo {query} list", data, json_output=json_output,
        text=lambda: f"{data['total']} messages, {data['held']} held, {data['denied']} denied\n"
        + table(columns, rows) + more,
    )  # fmt: skip


def _show(query: str, seq: int, config: Any, json_output: bool) -> None:
    data = _ask(config, query, {"seq": seq})
    emit(f"silo {query} show", data, json_output=json_output, text=lambda: _message_text(data))


def _message_text(data: Mapping[str, Any]) -> str:
    message = data["message"]
    header = ("outcome", "rule", "measured", "limit", "line")
    rows = [[rule.get(name) for name in header] for rule in message.get("rules", ())]
    became = f", {data['outcome']}" if data["outcome"] else ""
    became += f" after {data['milliseconds']} ms" if data["milliseconds"] is not None else ""
    lines = [
        f"{message['kind']} {message['decision']}{became} {' '.join(message.get('reasons', ()))}".rstrip(),
        table(header, rows),
        f"{message.get('detail', {}).get('rules_not_applicable', 0)} rules do not apply to this kind",
        *(f"would pass: {sentence}" for sentence in data["would_pass"]),
    ]
    return "\n".join(lines)


@outbox_app.command("list")
@guarded("silo outbox list")
def outbox_list(
    config: ConfigOption = CONFIG_DEFAULT, limit: LimitOption = 100, before: BeforeOption = None,
    control: ControlOption = False, verdict: VerdictOption = "", kind: KindOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Outbound messages, newest first: what was decided on each, and whether it left."""
    _list("outbox", config, limit, before, control, verdict, kind, json_output)


@outbox_app.command("show")
@guarded("silo outbox show")
def outbox_show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the decision, from `silo outbox list`.")],
    config: ConfigOption = CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """One decision with every rule's verdict, and what would have passed."""
    _show("outbox", seq, config, json_output)


@inbox_app.command("list")
@guarded("silo inbox list")
def inbox_list(
    config: ConfigOption = CONFIG_DEFAULT, limit: LimitOption = 100, before: BeforeOption = None,
    control: ControlOption = False, verdict: VerdictOption = "", kind: KindOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """What came in, newest first, and what was decided on each."""
    _list("inbox", config, limit, before, control, verdict, kind, json_output)


@inbox_app.command("show")
@guarded("silo inbox show")
def inbox_show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the decision, from `silo inbox list`.")],
    config: ConfigOption = CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """One decision with every rule's verdict, and what would have been let in."""
    _show("inbox", seq, config, json_output)


# ---- the ledger ------------------------------------------------------------------------------------


@ledger_app.command("show")
@guarded("silo ledger show")
def ledger_show(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Runs, budget counts and outgoing content, as remembered over restarts."""
    data = _ask(config, "ledger")
    rows = [(row["kind"], row["run"], row["round"], row["bytes"], row["state"], row["at"]) for row in data["content"]]
    emit(
        "silo ledger show", data, json_output=json_output,
        text=lambda: f"DP {data['dp']}\n" + table(("kind", "run", "round", "bytes", "state", "at"), rows),
    )  # fmt: skip


@ledger_app.command("limits")
@guarded("silo ledger limits")
def ledger_limits(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Every limit of the policy that counts over messages: how much is used, of how much, and where it stands."""
    data = _ask(config, "limits")
    columns = ("limit", "kind", "used", "max", "unit", "window", "line")
    emit(
        "silo ledger limits", data, json_output=json_output,
        text=lambda: f"DP {data['dp']}\n" + table(columns, _cells(data["rows"], columns)),
    )  # fmt: skip


@ledger_app.command("forecast")
@guarded("silo ledger forecast")
def ledger_forecast(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """How many rounds like the last one still fit into the policy's limits of a day, and what one may carry out."""
    from policies.capacity import capacity_lines

    found = _ask(config, "limits")
    data = {name: found[name] for name in ("forecast", "dp", "capacity", "not_counted")}
    left = data["forecast"]["rounds_left"]
    rounds = "not known" if left is None else str(left)
    emit(
        "silo ledger forecast", data, json_output=json_output,
        text=lambda: "\n".join(
            [
                f"rounds left: {rounds}: {data['forecast']['bound_by']}",
                f"DP {data['dp']}",
                *capacity_lines(data["capacity"]),
            ]
        ),
    )  # fmt: skip


# ---- the audit log ---------------------------------------------------------------------------------


@audit_app.command("list")
@guarded("silo audit list")
def audit_list(
    config: ConfigOption = CONFIG_DEFAULT,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="Newest so many.")] = 100,
    before: BeforeOption = None,
    event: Annotated[str, typer.Option("--event", help="Only events whose name begins so, such as egress.")] = "",
    text: Annotated[str, typer.Option("--text", help="Only records in which this stands.")] = "",
    json_output: JsonOption = False,
) -> None:
    """Records of a running silo, newest first. With a filter one call looks at some thousand records only."""
    data = _ask(config, "audit", {"limit": limit, "before": before, "event": event or None, "text": text or None})
    rows = [
        (record["seq"], record["event"], record.get("kind", ""), record.get("round", ""), record.get("why", ""))
        for record in data["records"]
    ]
    more = f"\nolder ones: --before {data['next']}" if data["next"] is not None else ""
    emit(
        "silo audit list", data, json_output=json_output,
        text=lambda: f"{data['size']} records\n" + table(("seq", "event", "kind", "round", "fault"), rows) + more,
    )  # fmt: skip


@audit_app.command("show")
@guarded("silo audit show")
def audit_show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the record.")],
    config: ConfigOption = CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:
    """One record of a running silo, in full."""
    from fedsilo.treaty.errors import NotFoundError

    found = _ask(config, "audit", {"before": seq + 1, "limit": 1})["records"]
    if not found or found[0]["seq"] != seq:
        raise NotFoundError(f"the log has no record {seq}", hint="silo audit list shows them")
    emit(
        "silo audit show", found[0], json_output=json_output,
        text=lambda: json.dumps(found[0], indent=2, ensure_ascii=False),
    )  # fmt: skip


@audit_app.command("status")
@guarded("silo audit status")
def audit_status(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """How far the log was verified by the daemon itself. Exit status 7 where it found a break."""
    _emit_status("silo audit status", _ask(config, "audit.status"), json_output)


@audit_app.command("verify")
@guarded("silo audit verify")
def audit_verify(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Have the daemon verify its own log, and say at once how that stands; `silo audit status` says how it ended.

    An auditor verifies alone, with the logs of all parties: `fedsilo audit verify`.
    """
    _emit_status("silo audit verify", _ask(config, "audit.verify"), json_output)


def _emit_status(command: str, data: Mapping[str, Any], json_output: bool) -> None:
    from fedsilo.treaty.errors import VerificationError

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
    return (
        f"{data['size']} records, {verified}\nsigned checkpoint {checkpoint['size']} of {checkpoint['time'] or '-'}, "
        f"countersigned by {signers}\ncoordinator: {data['coordinator']}"
    )


# ---- files -----------------------------------------------------------------------------------------


@guarded("silo certs")
def certs(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """This site's certificates and the authorities above them, as a running silo sees them."""
    data = _ask(config, "certificates")
    columns = ("whose", "role", "days_left", "not_after", "subject", "fault")
    emit("silo certs", data, json_output=json_output, text=lambda: table(columns, _cells(data, columns)))


@guarded("silo settings")
def settings(config: ConfigOption = CONFIG_DEFAULT, json_output: JsonOption = False) -> None:
    """Every setting that a running silo uses, and where it comes from."""
    data = _ask(config, "settings")
    columns = ("key", "value", "origin")
    emit("silo settings", data, json_output=json_output, text=lambda: table(columns, _cells(data, columns)))


def _cells(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> list[list[Any]]:
    names = list(columns)
    return [[row[name] for name in names] for row in rows]

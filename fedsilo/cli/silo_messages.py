"""`silo outbox`, `inbox`, `ledger`, `audit`, `certs`, `settings`: what a running silo knows of its messages, limits,
records and files. Each asks the daemon's control socket the very query that the console's screen of that name asks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from fedsilo.cli import desk_answers
from fedsilo.cli import ledger as cli_ledger
from fedsilo.cli.daemon_audit import audit_app
from fedsilo.cli.daemons import SILO_YAML, SiloOption, client_of, load_site
from fedsilo.cli.desk_answers import (
    BeforeOption,
    ControlOption,
    KindOption,
    LimitOption,
    VerdictOption,
    cells,
)
from fedsilo.cli.output import JsonOption, emit, guarded, table
from fedsilo.control.answers import LimitRow, printed_names

outbox_app = typer.Typer(no_args_is_help=True, help="Every outbound message and the rules that judged it.")
inbox_app = typer.Typer(no_args_is_help=True, help="Every message that came in and the rules that judged it.")
ledger_app = typer.Typer(no_args_is_help=True, help="What the guard remembers: runs, budgets, outgoing content.")


def add_to(app: typer.Typer) -> None:
    """Make these commands part of `silo`."""
    app.add_typer(outbox_app, name="outbox")
    app.add_typer(inbox_app, name="inbox")
    app.add_typer(ledger_app, name="ledger")
    ledger_app.command("accept")(cli_ledger.accept)
    app.add_typer(audit_app("silo", SILO_YAML, _ask), name="audit")
    app.command()(certs)
    app.command()(settings)


def _ask(config: Any, query: str, arguments: Mapping[str, Any] | None = None) -> Any:
    with client_of(load_site(config)) as client:
        return client.query(query, arguments)


# ---- messages --------------------------------------------------------------------------------------


def _list(
    query: str, config: Any, limit: int, before: int | None, control: bool, verdict: str, kind: str, json_output: bool
) -> None:
    desk_answers.list_messages(
        partial(_ask, config), "silo", query, limit=limit, before=before, control=control, verdict=verdict, kind=kind,
        json_output=json_output,
    )  # fmt: skip


def _show(query: str, seq: int, config: Any, json_output: bool) -> None:
    desk_answers.show_message(partial(_ask, config), "silo", query, seq, json_output)


@outbox_app.command("list")
@guarded("silo outbox list")
def outbox_list(
    config: SiloOption = SILO_YAML, limit: LimitOption = 100, before: BeforeOption = None,
    control: ControlOption = False, verdict: VerdictOption = "", kind: KindOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Outbound messages, newest first: what was decided on each, and whether it left."""
    _list("outbox", config, limit, before, control, verdict, kind, json_output)


@outbox_app.command("show")
@guarded("silo outbox show")
def outbox_show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the decision, from `silo outbox list`.")],
    config: SiloOption = SILO_YAML,
    json_output: JsonOption = False,
) -> None:
    """One decision with every rule's verdict, and what would have passed."""
    _show("outbox", seq, config, json_output)


@inbox_app.command("list")
@guarded("silo inbox list")
def inbox_list(
    config: SiloOption = SILO_YAML, limit: LimitOption = 100, before: BeforeOption = None,
    control: ControlOption = False, verdict: VerdictOption = "", kind: KindOption = "", json_output: JsonOption = False,
) -> None:  # fmt: skip
    """What came in, newest first, and what was decided on each."""
    _list("inbox", config, limit, before, control, verdict, kind, json_output)


@inbox_app.command("show")
@guarded("silo inbox show")
def inbox_show(
    seq: Annotated[int, typer.Argument(min=0, help="Number of the decision, from `silo inbox list`.")],
    config: SiloOption = SILO_YAML,
    json_output: JsonOption = False,
) -> None:
    """One decision with every rule's verdict, and what would have been let in."""
    _show("inbox", seq, config, json_output)


# ---- the ledger ------------------------------------------------------------------------------------


@ledger_app.command("show")
@guarded("silo ledger show")
def ledger_show(
    config: SiloOption = SILO_YAML, limit: LimitOption = 100, before: BeforeOption = None,
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Runs, budget counts and a page of outgoing content, newest first, as remembered over restarts."""
    data = _ask(config, "ledger", {"limit": limit, "before": before})
    rows = [(row["kind"], row["run"], row["round"], row["bytes"], row["state"], row["at"]) for row in data["content"]]
    emit(
        "silo ledger show", data, json_output=json_output,
        text=lambda: f"DP {data['dp']}\n" + table(("kind", "run", "round", "bytes", "state", "at"), rows)
        + desk_answers.older(data["next"]),
    )  # fmt: skip


@ledger_app.command("limits")
@guarded("silo ledger limits")
def ledger_limits(config: SiloOption = SILO_YAML, json_output: JsonOption = False) -> None:
    """Every limit of the policy that counts over messages: how much is used, of how much, and where it stands."""
    data = _ask(config, "limits")
    columns = printed_names(LimitRow)
    emit(
        "silo ledger limits", data, json_output=json_output,
        text=lambda: f"DP {data['dp']}\n" + table(columns, cells(data["rows"], columns)),
    )  # fmt: skip


@ledger_app.command("forecast")
@guarded("silo ledger forecast")
def ledger_forecast(config: SiloOption = SILO_YAML, json_output: JsonOption = False) -> None:
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


# ---- files -----------------------------------------------------------------------------------------


@guarded("silo certs")
def certs(config: SiloOption = SILO_YAML, json_output: JsonOption = False) -> None:
    """This site's certificates and the authorities above them, as a running silo sees them."""
    desk_answers.show_certificates(partial(_ask, config), "silo", json_output)


@guarded("silo settings")
def settings(config: SiloOption = SILO_YAML, json_output: JsonOption = False) -> None:
    """Every setting that a running silo uses, and where it comes from."""
    desk_answers.show_settings(partial(_ask, config), "silo", json_output)

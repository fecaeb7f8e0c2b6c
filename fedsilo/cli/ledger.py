"""`silo ledger`: what the guard remembers; and `accept`, with which an approver signs, from files only, that a restored
ledger may go on beside today's log."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.daemons import SILO_YAML, OperatorOption, SiloOption, confirm, load_site, operator_of, silo_query
from fedsilo.cli.messages import BeforeOption, LimitOption, columns_text, older
from fedsilo.cli.output import command, emit, table
from fedsilo.files.durable import holder_of
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import ConflictError, HeldError, UsageError

if TYPE_CHECKING:
    from silo.config import SiloConfig
    from silo.guard.ledger_check import Disagreement

app = typer.Typer(no_args_is_help=True, help="What the guard remembers: runs, budgets, outgoing content.")

_CLOCKS_DIFFER = timedelta(minutes=5)  # a guard whose clock is behind must not find it valid for too long


@command(app, "silo ledger show")
def show(config: SiloOption = SILO_YAML, limit: LimitOption = 100, before: BeforeOption = None) -> None:
    """Runs, budget counts and a page of outgoing content, newest first, as remembered over restarts."""
    data = silo_query(config, "ledger", {"limit": limit, "before": before})

    def text() -> str:
        from fedsilo.control.answers import LedgerPage, read

        page = read(LedgerPage, data)
        rows = ((row.kind, row.run, row.round, row.bytes, row.state, row.at) for row in page.content)
        content = table(("kind", "run", "round", "bytes", "state", "at"), rows)
        return f"DP {page.dp}\n{content}{older(page.next)}"

    emit(data, text)


@command(app, "silo ledger limits")
def limits(config: SiloOption = SILO_YAML) -> None:
    """Every limit of the policy that counts over messages: how much is used, of how much, and where it stands."""
    data = silo_query(config, "limits")

    def text() -> str:
        from fedsilo.control.answers import Limits, read
        from fedsilo.views.limits import LIMIT_COLUMNS, limit_rows
        from fedsilo.views.lines import UNICODE

        answer = read(Limits, data)
        return f"DP {answer.dp}\n{columns_text(LIMIT_COLUMNS, limit_rows(answer.rows, time.time(), UNICODE))}"

    emit(data, text)


@command(app, "silo ledger forecast")
def forecast(config: SiloOption = SILO_YAML) -> None:
    """How many rounds like the last one still fit into the policy's limits of a day, and what one may carry out."""
    from policies.capacity import capacity_lines

    found = silo_query(config, "limits")
    data: dict[str, Any] = {name: found[name] for name in ("forecast", "dp", "capacity", "not_counted")}
    left = data["forecast"]["rounds_left"]
    head = f"rounds left: {'not known' if left is None else left}: {data['forecast']['bound_by']}\nDP {data['dp']}"
    text = "\n".join([head, *capacity_lines(data["capacity"])])
    emit(data, text)


@command(app, "silo ledger accept")
def accept(
    operator: OperatorOption,
    config: SiloOption = SILO_YAML,
    expect_digest: Annotated[
        str, typer.Option("--expect-digest", help="Digest of what you were shown, in place of typing its end.")
    ] = "",
) -> None:
    """Sign that a restored ledger may go on beside today's audit log. Two approvers have to, then `silo start`.

    The silo refuses to start with an older ledger, since halts would vanish and budgets begin anew. With two signatures
    it starts: budgets and counters are raised to what the log shows to have left, holds end, the open run is left. A
    signature is for exactly this ledger beside exactly this log, lies beside the policy, and is good for a day.
    """
    from fedsilo.control.client import sign_as
    from fedsilo.files.identity_files import load_site as load_people
    from silo.guard import ledger_check
    from silo.guard.signed_files import HOURS_UNKNOWN, People
    from silo.guard.site import AUDIT, LOCK

    site = load_site(config)
    if holder := holder_of(site.state_dir / LOCK):
        raise ConflictError(
            f"{site.silo} runs as process {holder}, with the ledger that its log names", hint="silo stop, if need be"
        )
    found = ledger_check.disagreement(site, ledger_check.named_in_folder(site.state_dir / AUDIT))
    if found is None:
        raise UsageError(
            f"the ledger of {site.silo} is the one that its log names, so nobody has to accept it",
            hint=f"silo start --config {config}",
            code="NOTHING_TO_ACCEPT",
        )
    rows = _shown(site, found)
    shown, hint = table(("", ""), rows), f"look at it with `silo check`; it is {found.digest}"
    confirm(found.digest, expect_digest, shown, hint=hint)
    pem, roles = load_people(site.identity.site_ca, site.identity.operators, site=site.silo)
    now = datetime.fromtimestamp(max(time.time(), found.latest), UTC)
    people = People(site.silo, pem, roles, now, HOURS_UNKNOWN, site.federation)
    signed = sign_as(
        operator_of(site, operator),
        ledger_check.ACCEPT,
        found.arguments,
        expires=now + timedelta(hours=HOURS_UNKNOWN) - _CLOCKS_DIFFER,
    )
    path = ledger_check.write_approval(site, found, signed, people)
    given, warnings = ledger_check.approvals_of(site, found, people)
    lacking = ledger_check.PERSONS - len(given)
    data = {
        "approval": str(path),
        "approvers": sorted(given),
        "needed": ledger_check.PERSONS,
        "digest": found.digest,
        **found.arguments,
    }
    waits = HeldError(
        f"{lacking} more of {ledger_check.PERSONS} approvers has to sign before {site.silo} starts with this ledger",
        hint=f"silo ledger accept --config {config} --operator NAME --expect-digest {found.digest}",
    )
    emit(
        data,
        f"signed: {', '.join(sorted(given))}" + ("" if lacking > 0 else f"\nnext: silo start --config {config}"),
        warnings=warnings,
        error=waits if lacking > 0 else None,
    )


def _shown(site: SiloConfig, found: Disagreement) -> list[tuple[str, str]]:
    """Return what the log says since the group that the ledger holds, so that nobody signs unseen what it forgot."""
    from fedsilo.audit.log import sent_by_kind
    from fedsilo.audit.reader import typed_records
    from silo.guard.ledger_check import since
    from silo.guard.site import AUDIT

    records = since(typed_records(site.state_dir / AUDIT), found)
    left = [f"{count} {kind}, {size:,} bytes" for kind, (count, size) in sent_by_kind(records).items()]
    events = [record.event for record in records]
    latest = utc(found.latest) if found.latest else "-"
    return [
        ("why", found.code),
        ("the ledger", f"group {found.ledger.groups}, last written {latest}" if found.ledger else "none"),
        ("the log", f"names group {found.log.groups}"),
        ("records since", str(len(records))),
        ("left since", "; ".join(left) or "nothing"),
        ("halts since", str(events.count("halt"))),
        ("answers of people since", str(sum(each in ("approval.grant", "approval.deny") for each in events))),
        ("digest", found.digest),
    ]

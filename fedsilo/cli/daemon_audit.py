"""`silo audit`, `coordinator audit`: records of the daemon's own log, and whether it holds. The same four commands for
both, as both daemons answer the same queries."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.cli import desk_answers
from fedsilo.cli.desk_answers import (
    Ask,
    BeforeOption,
    EventOption,
    NoControlOption,
    NoWaitOption,
    RecordsOption,
    TextOption,
)
from fedsilo.cli.output import JsonOption, guarded

_ConfigOption = Annotated[Path, typer.Option("--config", help="The daemon's configuration file.")]
_SeqArgument = Annotated[int, typer.Argument(min=0, help="Number of the record.")]


def audit_app(program: str, config_default: Path, ask: Ask) -> typer.Typer:
    """The group of commands.

    Args:
        program: silo or coordinator.
        config_default: its configuration file where none is named.
        ask: (configuration file, query, arguments) -> the daemon's answer.
    """
    app = typer.Typer(no_args_is_help=True, help=f"The audit log of a running {program}, and whether it holds.")

    @app.command(
        "list",
        help=f"Records of a running {program}, newest first. With a filter or --no-control one call looks at some "
        "thousand records only.",
    )
    @guarded(f"{program} audit list")
    def audit_list(
        config: _ConfigOption = config_default, limit: RecordsOption = 100, before: BeforeOption = None,
        event: EventOption = "", text: TextOption = "", no_control: NoControlOption = False,
        json_output: JsonOption = False,
    ) -> None:  # fmt: skip
        desk_answers.list_records(
            partial(ask, config), program, limit=limit, before=before, event=event, text=text, control=not no_control,
            json_output=json_output,
        )  # fmt: skip

    @app.command("show", help=f"One record of a running {program}, in full.")
    @guarded(f"{program} audit show")
    def audit_show(seq: _SeqArgument, config: _ConfigOption = config_default, json_output: JsonOption = False) -> None:
        desk_answers.show_record(partial(ask, config), program, seq, json_output)

    @app.command("status")
    @guarded(f"{program} audit status")
    def audit_status(config: _ConfigOption = config_default, json_output: JsonOption = False) -> None:
        """How far the log was verified by the daemon itself, and what the other side knows of it. Exit status 7 where
        it found a break."""
        desk_answers.emit_status(f"{program} audit status", ask(config, "audit.status"), json_output)

    @app.command("verify")
    @guarded(f"{program} audit verify")
    def audit_verify(
        config: _ConfigOption = config_default, no_wait: NoWaitOption = False, json_output: JsonOption = False
    ) -> None:
        """Have the daemon verify its own log, and wait until it has. Exit status 7: a break; 3: it has not ended by the
        end of --timeout, or, with --no-wait, not yet; it goes on in the daemon.

        An auditor verifies alone, with the logs of all parties: `fedsilo audit verify`.
        """
        desk_answers.verify_log(
            partial(ask, config), f"{program} audit verify", wait=not no_wait, json_output=json_output
        )

    return app

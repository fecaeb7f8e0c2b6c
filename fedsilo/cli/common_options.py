"""The options that every command has, added by `output.guarded`: --schema, --quiet, --no-color, and, where the table in
contract.py says that something is changed or waited for, --dry-run and --timeout.

A command that has one of them itself (`silo start --quiet`) keeps its own.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import typer

from fedsilo.cli.contract import facts_of, full_name

PANEL = "Every command"
SECONDS_MIN, SECONDS_MAX = 0.001, 31_536_000.0  # a year; the kernel's own limit of a wait is some hundred years
NO_COLOR = "NO_COLOR"  # https://no-color.org

quiet: ContextVar[bool] = ContextVar("quiet", default=False)


@dataclass(frozen=True)
class Common:
    """What was chosen of them for one call."""

    quiet: bool = False
    dry_run: bool = False
    timeout_seconds: float | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within, answers are hushed and the control client waits no longer than was said."""
        hushed = quiet.set(self.quiet)
        try:
            if self.timeout_seconds is None:
                yield
                return
            from fedsilo.control.client import timeout_chosen

            waiting = timeout_chosen.set(self.timeout_seconds)
            try:
                yield
            finally:
                timeout_chosen.reset(waiting)
        finally:
            quiet.reset(hushed)


def no_color(wanted: bool) -> None:
    """For this process and those that it starts; whatever draws reads the variable."""
    if wanted:
        os.environ[NO_COLOR] = "1"


def signature_with(function: Callable[..., Any], command: str) -> inspect.Signature:
    """The function's signature as typer reads it, with the common options behind its own."""
    signature = inspect.signature(function, eval_str=True)
    own = {flag for each in signature.parameters.values() for flag in _flags(each.annotation)}
    parameters = list(signature.parameters.values())
    for flag, name, annotation, default in _offered(command):
        if flag not in own:
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    return signature.replace(parameters=parameters)


def taken_from(arguments: dict[str, Any]) -> Common:
    """Take the common options out of what typer hands over."""
    arguments.pop("common_schema", None)
    arguments.pop("common_no_color", None)
    return Common(
        arguments.pop("common_quiet", False),
        arguments.pop("common_dry_run", False),
        arguments.pop("common_timeout", None),
    )


def _offered(command: str) -> Iterator[tuple[str, str, Any, Any]]:
    """(flag, parameter, annotation, default) of each option that this command gets."""
    facts = facts_of(command)
    schema = typer.Option(
        "--schema", is_eager=True, callback=_printing_schema(command), rich_help_panel=PANEL,
        help="Print as JSON what this command takes and promises, and end.",
    )  # fmt: skip
    yield "--schema", "common_schema", Annotated[bool, schema], False
    if facts.changes and facts.dry_run == "--dry-run":
        yield "--dry-run", "common_dry_run", _DRY_RUN, False
    if facts.waits:
        yield "--timeout", "common_timeout", _TIMEOUT, None
    yield "--quiet", "common_quiet", _QUIET, False
    yield "--no-color", "common_no_color", _NO_COLOR, False


_DRY_RUN = Annotated[
    bool,
    typer.Option(
        "--dry-run", rich_help_panel=PANEL,
        help="Read and check, and say what would be changed first; nothing is signed, sent or written.",
    ),
]  # fmt: skip
_TIMEOUT = Annotated[
    float | None,
    typer.Option(
        "--timeout", min=SECONDS_MIN, max=SECONDS_MAX, rich_help_panel=PANEL,
        help="Seconds to wait for each answer, or for the end of a stream; then exit 3. Default: 30, no end.",
    ),
]  # fmt: skip
_QUIET = Annotated[bool, typer.Option("--quiet", rich_help_panel=PANEL, help="No text but errors; the status tells.")]
_NO_COLOR = Annotated[
    bool,
    typer.Option(
        "--no-color", is_eager=True, callback=no_color, rich_help_panel=PANEL, help="As the variable NO_COLOR."
    ),
]


def _printing_schema(command: str) -> Callable[[typer.Context, bool], None]:
    def show(context: typer.Context, wanted: bool) -> None:
        if not wanted or context.resilient_parsing:
            return
        from fedsilo.cli.command_schema import schema_of
        from fedsilo.cli.output import envelope
        from fedsilo.cli.standard_streams import write_out

        write_out(envelope(command, schema_of(full_name(command), context.command)) + "\n")
        raise typer.Exit

    return show


def _flags(annotation: Any) -> Iterator[str]:
    """The spellings of an option, from its annotation."""
    for part in get_args(annotation) if get_origin(annotation) is Annotated else ():
        for declared in (getattr(part, "default", None), *(getattr(part, "param_decls", None) or ())):
            if isinstance(declared, str):
                yield declared

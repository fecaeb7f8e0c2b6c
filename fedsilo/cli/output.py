"""The answer of every command: one JSON envelope or plain text on stdout, one line of cause and one of hint on stderr.

    {"schema": "fedsilo.cli/1", "command": ..., "ok": ..., "data": ..., "warnings": [...],
     "error": null | {"code", "message", "hint", "retryable"}}

`command` registers a command, gives it the options that all have (--json, --schema, --quiet, --no-color and, where
contract.py says that something is changed or waited for, --dry-run and --timeout) and ends a fault of ours with a
report file. `emit` prints the answer of the command that runs.

Text that came from elsewhere may carry terminal escapes or bidirectional overrides (threat T37): `harmless` takes their
power before anything is printed. JSON needs no such care, it escapes by itself.

An answer that cannot be written (a full disk, a closed descriptor) ends its command with exit status 1 and one line on
stderr, also with --json; where stderr takes nothing either, the exit status is all that is told. A reader that closed
its pipe (`| head`) is no error.
Does not stop: a disk that takes the bytes and loses them later; what the command did before it answered stays done. Nor
does a dry run stop a refusal by the daemon: it judges by its own copy of roles and CA, at its own time, and it may have
changed what the command is about.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import inspect
import io
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO, TypeVar, get_args, get_origin

import typer

from fedsilo.cli.contract import BUG_EXIT_CODE, INTERRUPTED_EXIT_CODE, facts_of, full_name
from fedsilo.protocol.errors import (
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UnreachableError,
    UsageError,
)
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from fedsilo.control.dry_run import DryRun, Signing


# ---- streams ---------------------------------------------------------------------------------------------------------


_PRINTING = ("typer", "rich")  # they open no file


class OutputLostError(OperationError):
    """The answer could not be written to stdout."""

    default_code = "OUTPUT_LOST"

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"the answer could not be written to stdout: {error.strerror or error}",
            hint="what the command does may be done all the same: look before you repeat it",
        )


def open_all() -> None:
    """Give a process that was started with closed streams all three of them.

    Without them the next file or socket that is opened would get a stream's number, and what is printed would go
    there. Nothing can be read from stdin then; what is written to stdout fails (it is opened for reading only), so
    that the caller who closed it learns that there was an answer; what is written to stderr is dropped.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    # None where the descriptor was closed when the interpreter started
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what this terminal has no sign for


def takes_signs() -> bool:
    """Return True if every character can be written to the terminal; otherwise screens are drawn in ASCII."""
    try:
        return codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
    except LookupError:
        return False


def write_out(text: str) -> None:
    """Write to stdout, and see that it arrived.

    Raises:
        OutputLostError: it takes nothing. BrokenPipeError: its reader went away.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise OutputLostError(error) from error


def write_err(text: str) -> None:
    """Write to stderr; nothing is told where it takes nothing, as there is no further place to tell it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def output_lost(error: OSError) -> OutputLostError | None:
    """Return the error if printing by a library caused it, as of help and versions; None: it has another cause."""
    import traceback

    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or frames[-1][0].f_globals.get("__name__", "").partition(".")[0] not in _PRINTING:
        return None
    silence(sys.stdout)
    return OutputLostError(error)


def silence(stream: TextIO) -> None:
    """Let go nowhere what is left in a stream, or the interpreter would complain of it when it flushes at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in a test, has no such end
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


# ---- what a dry run says of a signature ------------------------------------------------------------------------------


# Command -> action of certs/roles.py, where they are not called the same. The daemons register them
# (silo/guard/commands.py); a test compares.
ACTIONS_OF_COMMANDS: Mapping[str, str] = {
    "pause": "silo.pause",
    "resume": "silo.resume",
    "stop": "silo.stop",
    "leave": "silo.leave",
    "policy.reload": "change.propose",
    "policy.propose": "change.propose",
    "policy.approve": "change.approve",
    "audit.rescreen": "payload.read",
    "clock.accept": "halt.release",
    "approvals.approve": "release.approve",
    "approvals.reject": "release.reject",
    "approvals.release": "halt.release",
    "approvals.defer": "release.defer",
    "approvals.payload": "payload.read",
    "ledger.accept": "halt.release",  # which `silo start` verifies (silo/guard/ledger_check.py)
}
SITE_CA, ROLES = "site_ca.crt", "roles.yaml"


def signing_json(signing: Signing) -> dict[str, Any]:
    """The command, and the person's roles as the files beside the certificate have them (none there: none told).

    Raises:
        NotAllowedError: the certificate is not of that site or is over, or no role of the person allows the command.
        UsageError: roles.yaml is wrong.
    """
    from certs.identity import site_member
    from certs.roles import may
    from fedsilo.files.identity_files import load_site, read_public

    folder = signing.certificate.parent
    told: dict[str, Any] = {
        "site": signing.site,
        "person": signing.certificate.stem,
        "roles": [],
        "name": signing.name,
        "arguments": {key: value for key, value in signing.arguments.items() if key != "text"},
    }
    if not (folder / SITE_CA).exists() or not (folder / ROLES).exists():
        return told
    ca, roles = load_site(folder / SITE_CA, folder / ROLES, site=signing.site)
    person = site_member(read_public(signing.certificate), ca, datetime.now(UTC), role="operator").name
    held = roles.of(person)
    action = ACTIONS_OF_COMMANDS.get(signing.name, signing.name)
    if not may(held, action):
        raise NotAllowedError(
            f"{person} may not {action} at {signing.site}: roles {', '.join(sorted(held)) or 'none'}",
            hint=f"may: {', '.join(roles.who_may(action)) or 'nobody'}",
        )
    return told | {"person": person, "roles": sorted(held)}


# ---- the options of every command ------------------------------------------------------------------------------------


PANEL = "Every command"
SECONDS_MIN, SECONDS_MAX = 0.001, 31_536_000.0  # a year; the kernel's own limit of a wait is some hundred years
NO_COLOR = "NO_COLOR"  # https://no-color.org


@dataclass(frozen=True)
class Call:
    """A command that runs, and which of the options that all commands have it was given.

    Attributes:
        command: its full name, such as "certs sign".
        trial: state of its dry run; None where it is none.
    """

    command: str = ""
    json_output: bool = False
    quiet: bool = False
    dry_run: bool = False
    timeout_seconds: float | None = None
    trial: DryRun | None = None


_running: ContextVar[Call] = ContextVar("running", default=Call())  # noqa: B039 - a frozen value


def running() -> Call:
    """Return the command that runs."""
    return _running.get()


@contextmanager
def as_running(call: Call) -> Iterator[None]:
    token = _running.set(call)
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def waiting(seconds: float | None) -> Iterator[None]:
    """Within, the control client waits no longer than that for an answer; None leaves its own limits."""
    if seconds is None:
        yield
        return
    from fedsilo.control.client import timeout_chosen

    token = timeout_chosen.set(seconds)
    try:
        yield
    finally:
        timeout_chosen.reset(token)


def no_color(wanted: bool) -> None:
    """Turn colour off for this process and those that it starts; whatever draws reads the variable."""
    if wanted:
        os.environ[NO_COLOR] = "1"


def _signature_with(function: Callable[..., Any], name: str) -> inspect.Signature:
    """The function's signature as typer reads it, with the common options behind its own."""
    signature = inspect.signature(function, eval_str=True)
    own = {flag for each in signature.parameters.values() for flag in _flags(each.annotation)}
    parameters = list(signature.parameters.values())
    for flag, option, annotation in _offered(name):
        if flag not in own:
            kind, default = inspect.Parameter.KEYWORD_ONLY, None if option == "common_timeout" else False
            parameters.append(inspect.Parameter(option, kind, default=default, annotation=annotation))
    return signature.replace(parameters=parameters)


def _taken_from(arguments: dict[str, Any], name: str) -> Call:
    """Take the common options out of what typer hands over."""
    arguments.pop("common_schema", None)
    arguments.pop("common_no_color", None)
    return Call(
        name,
        arguments.pop("common_json", False) or arguments.get("output") == "json",
        arguments.pop("common_quiet", False),
        arguments.pop("common_dry_run", False),
        arguments.pop("common_timeout", None),
    )


def _offered(name: str) -> Iterator[tuple[str, str, Any]]:
    """(flag, parameter, annotation) of each option that this command gets."""
    facts = facts_of(name)
    schema = typer.Option(
        "--schema",
        is_eager=True,
        callback=_printing_schema(name),
        rich_help_panel=PANEL,
        help="Print as JSON what this command takes and promises, and end.",
    )
    yield "--json", "common_json", _JSON
    yield "--schema", "common_schema", Annotated[bool, schema]
    if facts.changes and facts.dry_run == "--dry-run":
        yield "--dry-run", "common_dry_run", _DRY_RUN
    if facts.waits:
        yield "--timeout", "common_timeout", _TIMEOUT
    yield "--quiet", "common_quiet", _QUIET
    yield "--no-color", "common_no_color", _NO_COLOR


_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON envelope instead of text.")]
_DRY_RUN = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        rich_help_panel=PANEL,
        help="Read and check, and say what would be changed first; nothing is signed, sent or written.",
    ),
]
_TIMEOUT = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=SECONDS_MIN,
        max=SECONDS_MAX,
        rich_help_panel=PANEL,
        help="Seconds to wait for each answer, or for the end of a stream; then exit 3. Default: 30, no end.",
    ),
]
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
        from fedsilo.cli.contract import schema_of

        write_out(envelope(command, schema_of(full_name(command), context.command)) + "\n")
        raise typer.Exit

    return show


def _flags(annotation: Any) -> Iterator[str]:
    """The spellings of an option, from its annotation."""
    for part in get_args(annotation) if get_origin(annotation) is Annotated else ():
        for declared in (getattr(part, "default", None), *(getattr(part, "param_decls", None) or ())):
            if isinstance(declared, str):
                yield declared


# ---- answers ---------------------------------------------------------------------------------------------------------


SCHEMA = "fedsilo.cli/1"
TRACEBACK_VARIABLE = "FEDSILO_TRACEBACK"  # set: a fault of ours stays a traceback, for who works on the code

PersonOption = Annotated[
    list[str],
    typer.Option("--person", help="NAME=ROLE,ROLE: writes id/roles.yaml; once per person (approver, operator, ...)."),
]

TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds to wait for its end.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        import fedsilo

        typer.echo(f"fedsilo {fedsilo.__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_print_version, help="Print FedSilo's version and end."),
]


def _print_schemas(context: typer.Context, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from fedsilo.cli.contract import commands_below, schema_of

    program = context.command_path
    schemas = [schema_of(" ".join(words), command) for words, command in commands_below(context.command, (program,))]
    write_out(envelope(program, {"commands": schemas}) + "\n")
    raise typer.Exit


SchemaOption = Annotated[
    bool,
    typer.Option("--schema", is_eager=True, callback=_print_schemas, help="Print as JSON what every command takes."),
]


def takes_version(app: typer.Typer) -> None:
    """Give a program of several commands its `--version` and `--schema`."""

    @app.callback()
    def program(version: VersionOption = False, schema: SchemaOption = False) -> None: ...


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def envelope(command: str, data: Any, *, warnings: Iterable[str] = (), error: FedSiloError | None = None) -> str:
    """The envelope as one line of JSON. Raises ValueError for NaN or infinity in `data`, TypeError for non-JSON."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "command": command,
            "ok": error is None,
            "data": data,
            "warnings": list(warnings),
            "error": None
            if error is None
            else {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "retryable": isinstance(error, UnreachableError),
            },
        },
        allow_nan=False,
    )


def emit(
    data: Any,
    text: str | Callable[[], str] = "",
    *,
    warnings: Iterable[str] = (),
    error: FedSiloError | None = None,
) -> None:
    """Print the answer of the command that runs: the envelope with --json, else text.

    Args:
        data: JSON-able value for the envelope.
        text: what people read, or a function that makes it only when it is wanted.
        warnings: lines for people; on stderr in text mode.
        error: for a command that has both data and a failure (a log that does not verify): printed after the data.

    Raises:
        typer.Exit: with the error's exit code, when `error` is given.
        OutputLostError: there is no error but this one: stdout takes nothing.
    """
    call, warning_list = running(), list(warnings)
    if call.trial is not None:
        if call.trial.what:  # something took the end of the dry run for its own: what it says it did, it did not
            return
        warning_list.append("dry run: nothing would be changed")
    if call.json_output:
        _write_answer(envelope(call.command, data, warnings=warning_list, error=error) + "\n", error)
    else:
        if not call.quiet:
            body = text if isinstance(text, str) else text()
            _write_answer(harmless(body, lines=True).rstrip("\n") + "\n" if body else "", error)
            for warning in warning_list:
                write_err(f"warning: {harmless(warning, lines=True)}\n")
        if error is not None:
            _print_error(error)
    if error is not None:
        raise typer.Exit(error.exit_code)


def _write_answer(text: str, error: FedSiloError | None) -> None:
    """Write an answer that tells of `error`; where stdout takes nothing, the error goes to stderr in any case.

    Raises:
        typer.Exit: with the error's exit code. OutputLostError: there was no other error.
    """
    try:
        write_out(text)
    except OutputLostError:
        if error is None:
            raise
        _print_error(error)
        raise typer.Exit(error.exit_code) from error


def in_one_envelope(app: typer.Typer, program: str) -> int:
    """Run a program of that name, asked for JSON: a command line that it does not understand is answered in JSON, too.

    Returns:
        the exit status.
    """
    try:
        status = app(prog_name=program, standalone_mode=False)
    except typer.Abort:  # a question found nobody; which command asked it is not known here
        unanswered = OperationError("a question was left without an answer", hint="give the answer as an option")
        write_out(envelope("", None, error=unanswered) + "\n")
        return OperationError.exit_code
    except typer.TyperException as error:  # what is wrong with a command line
        context = getattr(error, "ctx", None)
        name = "" if context is None else _command_name(context.command_path)
        wrong = UsageError(error.format_message(), hint=f"{context.command_path} --help" if context else "")
        write_out(envelope(name, None, error=wrong) + "\n")
        return UsageError.exit_code
    return status if isinstance(status, int) else 0


def _command_name(path: str) -> str:
    """A command by its name in the envelope: with the program's name in front, unless that is fedsilo's."""
    program, _, command = path.partition(" ")
    return path if program in _NAMED_PROGRAMS else command


def command(
    app: typer.Typer, name: str, **typer_options: Any
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Register a function as a command under the last word of its full name, with the options that all have.

        @command(app, "certs show")
        def show(file: Path) -> None: ...

    It ends as `guarded` says. With --dry-run it ends at the first change.

    Args:
        app: the group that it belongs to.
        name: its name in the envelope, which is without the program's for those of `fedsilo`.
        typer_options: as `typer.Typer.command` takes them.
    """

    def register(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def guarded_function(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            call = _taken_from(kwargs, name)
            with _guarded(call), waiting(call.timeout_seconds):
                if not call.dry_run:
                    return function(*args, **kwargs)
                with _trying(call):
                    return function(*args, **kwargs)

        guarded_function.__signature__ = _signature_with(function, name)  # type: ignore[attr-defined]
        guarded_function.__annotations__ = {}  # all in the signature; typer would evaluate them a second time
        app.command(name.rpartition(" ")[2], **typer_options)(guarded_function)
        return guarded_function

    return register


def guarded(command: str, *, json_output: bool = False) -> AbstractContextManager[None]:
    """Around what a command does: `emit` within prints its answer, and an error ends it.

    A FedSiloError becomes the envelope, or two lines on stderr. An OSError that nobody translated becomes an
    OperationError naming its file. Any other exception is a fault of ours: a report without private text is written
    (crash.py), and with the variable FEDSILO_TRACEBACK it stays a traceback.

    Raises:
        typer.Exit: with the error's exit code, 130 after Ctrl-C, or 70.
    """
    return _guarded(Call(command, json_output))


@contextmanager
def _guarded(call: Call) -> Iterator[None]:
    with as_running(call):
        try:
            yield
        except BaseException as raised:
            _end(call, raised)
            raise


def _end(call: Call, raised: BaseException) -> None:
    """Print an error, and end the command. Returns where the exception is to stay as it is."""
    if isinstance(raised, KeyboardInterrupt):
        write_err("interrupted\n")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from raised
    if isinstance(raised, BrokenPipeError):
        silence(sys.stdout)  # the reader of a pipe went away (`| head`)
        raise typer.Exit(1) from raised
    error: BaseException = raised
    if isinstance(raised, typer.Abort) and isinstance(raised.__context__, KeyboardInterrupt):
        error = _InterruptedError()  # Ctrl-C at a question, of which typer makes its own exception
    elif isinstance(raised, OSError):
        error = output_lost(raised) or _of_file(raised)
    elif isinstance(raised, ModuleNotFoundError):
        error = _of_extra(raised)
    if isinstance(error, Exception) and not isinstance(error, (FedSiloError, *_OF_TYPER)):
        if os.environ.get(TRACEBACK_VARIABLE):
            return
        error = _BugError(call.command, error)
    if not isinstance(error, FedSiloError):
        return
    if not error.hint and call.command and isinstance(error, (UsageError, NotFoundError)):
        error.hint = f"what it takes: {full_name(call.command)} --help"
    if call.json_output and not isinstance(error, OutputLostError):
        _write_answer(envelope(call.command, None, error=error) + "\n", error)
    else:
        _print_error(error)
    raise typer.Exit(error.exit_code) from error


@contextlib.contextmanager
def ended_by(*, json_output: bool) -> Iterator[None]:
    """Around a whole program: a fault of ours outside of any command ends as one within. Raises SystemExit."""
    try:
        with guarded("", json_output=json_output):
            yield
    except typer.Exit as end:
        sys.exit(end.exit_code)


def _of_file(error: OSError) -> FedSiloError:
    """Translate an error that nothing has translated: a file of another type is a wrong argument."""
    where = f"{error.filename}: " if error.filename else ""
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{where}this is a folder, where a file is needed", hint="name a file in it")
    if isinstance(error, NotADirectoryError):
        return UsageError(f"{where}part of this path is a file, where a folder is needed", hint="is the path right?")
    return OperationError(f"{where}{error.strerror or error}")


def _of_extra(error: ModuleNotFoundError) -> Exception:
    """The command that installs a library of an extra; any other module that is missing is a fault of ours."""
    from fedsilo.files.extras import not_installed

    return not_installed(error) or error


class _InterruptedError(FedSiloError):
    """Ctrl-C at a question."""

    exit_code = INTERRUPTED_EXIT_CODE
    default_code = "INTERRUPTED"

    def __init__(self) -> None:
        super().__init__("interrupted at a question", hint="nothing was answered; give the answer as an option")


class _BugError(FedSiloError):
    """A fault of ours. The exception's own text may be private, so only its type is told."""

    exit_code = BUG_EXIT_CODE
    default_code = "BUG"

    def __init__(self, command: str, error: Exception) -> None:
        from fedsilo.cli.crash import write_report

        path = write_report(command, error)
        where = f"the report is {path}" if path else "no report could be written"
        super().__init__(
            f"a fault of FedSilo ended this command ({type(error).__name__}); {where}",
            hint="it holds no data and no text of yours: read it, and send it with what you did",
        )


_NAMED_PROGRAMS = ("silo", "coordinator", "fedconsole")
_OF_TYPER = (typer.Exit, typer.Abort, typer.TyperException)


@contextmanager
def _trying(call: Call) -> Iterator[None]:
    """A dry run of a command, and its result. Raises NotAllowedError: the person may not give that command."""
    from fedsilo.control.dry_run import dry_run

    with dry_run() as trial, as_running(replace(call, trial=trial)):
        yield
    if not trial.what:
        return

    data: dict[str, Any] = {"dry_run": True, "changes": facts_of(call.command).changes}
    data["first"] = {"what": trial.what, "target": trial.target}
    data["command"] = None if trial.signing is None else signing_json(trial.signing)
    first = f"first it would {trial.what} {trial.target}"
    if trial.signing is not None:
        signed = data["command"]
        may = ", ".join(signed["roles"]) or "its roles are not known here"
        what = f"{signed['name']} {json.dumps(signed['arguments'])}"
        first = f"{signed['person']} ({may}) would sign for {signed['site']}: {what}"
    head = f"dry run of {call.command}: nothing was signed, sent or written\nwhat it does: {data['changes']}"
    emit(data, f"{head}\n{first}")


def existing(path: Path, hint: str = "") -> Path:
    """`path`, which the caller of a command named. Raises NotFoundError, with the hint: nothing is there."""
    if not path.exists():
        raise NotFoundError(f"{path} does not exist", hint=hint)
    return path


def existing_policy(path: Path) -> Path:
    """`path` of a policy. Raises NotFoundError: nothing is there."""
    from policies.load import INIT_HINT

    return existing(path, f"silo.yaml names a site's own under `policy`; a first one is written by: {INIT_HINT}")


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Left-aligned columns two spaces apart, for terminals and pipes alike."""
    lines = [[harmless(str(cell), lines=True) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def recorded(data: Mapping[str, Any]) -> str:
    """Where the party's own audit log has an order: `record` of the daemon's answer; nothing where it tells none.

    Never the log's size, `audit_size`: with others writing, that is some later record.
    """
    number = data.get("record")
    return "" if number is None else f", audit record {number}"


def facts_text(fields: Mapping[str, Any]) -> str:
    """Fields of an event as people read them: `silos=hospital_a,hospital_b passed=412`."""
    return " ".join(f"{key}={_fact_text(value)}" for key, value in fields.items())


def _fact_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_fact_text(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(map(_fact_text, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None or value == "" else str(value)


def _print_error(error: FedSiloError) -> None:
    write_err(f"error: {harmless(error.message, lines=True)} [{error.code}]\n")
    if error.hint:
        write_err(f"hint: {harmless(error.hint, lines=True)}\n")


# ---- CSV ----


FORMULA_SIGNS = ("=", "+", "-", "@")
_NEXT_CELL = ("\t", "\r", "\n")  # what follows may be taken for the beginning of another cell


def csv_text(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """RFC 4180 with one header line and line feeds alone; every cell as `csv_cell` makes it."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerows([csv_cell(value) for value in row] for row in (header, *rows))
    return lines.getvalue()


def csv_cell(value: Any) -> str:
    """Text of one cell: numbers as they are, None empty, what is no text as JSON.

    A text that a spreadsheet would compute begins with an apostrophe, whatever blanks stand before the sign and also if
    it is the sign's full-width or small form; characters that a terminal obeys are written as `harmless` writes them.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    computed = first in FORMULA_SIGNS or text.startswith(_NEXT_CELL)
    shown = harmless(text)
    return f"'{shown}" if computed else shown

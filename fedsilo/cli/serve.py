"""`fedconsole serve`: the console in a browser, looking only. And `fedconsole` itself, which it stands below.

The console process of a browser session is this module run as a program. Its command line has no option for a key and
none that unlocks, so what a browser sends cannot approve anything.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli import common_options
from fedsilo.cli import console as cli_console
from fedsilo.cli.output import JsonOption, emit, ended_by, guarded
from fedsilo.protocol.text import harmless

LOOPBACK = "127.0.0.1"
# All that a console process is given of this one's environment; no variable that changes what it does or records.
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR", "PATH", "PYTHONPATH", "TMPDIR", "TZ")
LEAVING = "close the page to end"
SERVER_GONE_EXIT_CODE = 1

program = typer.Typer(help=cli_console.app.info.help, invoke_without_command=True)

SocketOption = Annotated[Path | None, typer.Option("--socket", help="Control socket of the daemon.")]
ContextOption = Annotated[
    str, typer.Option("--context", help="silo:NAME=PATH/control.sock or coordinator=PATH/control.sock.")
]
ReplayOption = Annotated[Path | None, typer.Option("--replay", help="A recording in place of a daemon.")]
AsciiOption = Annotated[bool, typer.Option("--ascii", help="No character outside ASCII but in data.")]
ThemeOption = Annotated[str, typer.Option("--theme", help=f"One of {', '.join(cli_console.THEME_NAMES)}.")]


def _console(ctx: typer.Context, **options: Any) -> None:
    """Open the console, or with --once print what it would show; with serve, in a browser."""
    if ctx.invoked_subcommand is None:
        cli_console.fedconsole(**options)
        return
    from fedsilo.protocol.errors import UsageError

    given = [name for name in options if getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
    if given:
        with guarded("fedconsole"):
            word = ctx.invoked_subcommand
            raise UsageError(f"options go after {word}", hint=f"fedconsole {word} --help")


# The options of `fedconsole` are written once, there; what is added here is which command was asked for.
_console.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *inspect.signature(cli_console.fedconsole, eval_str=True).parameters.values(),
    ]
)
program.callback(invoke_without_command=True)(_console)


@program.command("serve")
@guarded("fedconsole serve")
def serve(
    socket: SocketOption = None,
    context: ContextOption = "",
    replay: ReplayOption = None,
    bind: Annotated[str, typer.Option("--bind", metavar="ADDRESS", help="IP address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 0,
    behind_proxy: Annotated[
        str,
        typer.Option(
            "--behind-proxy", metavar="ORIGIN",
            help="https://HOST of a proxy with TLS and a login of its own. Without it only loopback is listened on.",
        ),
    ] = "",
    url_file: Annotated[
        Path | None, typer.Option("--url-file", help="Write the start URL into this new file, mode 0600, not here.")
    ] = None,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = "",
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """Show the console in one browser, read-only, until Ctrl-C. Nothing can be approved or rejected there."""
    from console.serving import Serving, check_bind
    from console.serving import serve as serve_until_told
    from fedsilo.protocol.errors import UsageError

    chosen = cli_console.theme_named(theme)
    if sum([replay is not None, socket is not None or bool(context)]) != 1:
        hint = "fedconsole serve --socket PATH, --context silo:NAME=PATH or --replay FILE"
        raise UsageError("say what is shown: a daemon or a recording", hint=hint)
    check_bind(bind, behind_proxy)
    if url_file is None and not json_output and common_options.quiet.get():
        raise UsageError("--quiet would not print the start URL", hint="--url-file FILE writes it into a file")
    if url_file is None and not json_output and not sys.stdout.isatty():
        raise UsageError(
            "the start URL lets its reader in, and standard output is no terminal",
            hint="--url-file FILE keeps it out of a log; --json prints it all the same",
        )
    options = _shown(socket, context, replay)
    options += ["--theme", chosen, *(["--ascii"] if ascii_only else [])]
    how = Serving(bind, port, behind_proxy, lambda lifeline: console_command(lifeline, options), console_environment())

    def ready(url: str) -> None:
        where = {"address": url.partition("/?")[0], "read_only": True}
        if url_file is not None:
            from fedsilo.files.durable import write_private

            write_private(url_file, f"{url}\n".encode())
            emit("fedconsole serve", {**where, "url_file": str(url_file)}, json_output=json_output,
                 text=f"The start URL is in {url_file}; it is good once, for 10 minutes. Ctrl-C ends.")  # fmt: skip
        else:
            emit("fedconsole serve", {**where, "url": url}, json_output=json_output,
                 text=f"Open this once, within 10 minutes:\n\n  {url}\n\nRead-only. Ctrl-C ends.")  # fmt: skip

    serve_until_told(how, ready, lambda line: typer.echo(f"fedconsole serve: {harmless(line, lines=True)}", err=True))


def _shown(socket: Path | None, context: str, replay: Path | None) -> list[str]:
    """What is shown, for the console process's command line. Raises UsageError, NotFoundError."""
    if replay is not None:
        from fedsilo.cli.output import existing

        return ["--replay", str(existing(replay).resolve())]
    path, site = cli_console._where(socket, context)
    return ["--socket", str(path.resolve()), "--site", site]


def console_command(lifeline: int, options: Sequence[str]) -> list[str]:
    """Of a console process, which ends when whoever holds the other end of `lifeline` does."""
    return [sys.executable, "-P", "-m", "fedsilo.cli.serve", "--lifeline", str(lifeline), *options]


def console_environment() -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver",
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "TEXTUAL_FPS": "30",
        "TERM_PROGRAM": "textual",
    }


# ---- the console process of one session ------------------------------------------------------------

session_program = typer.Typer(add_completion=False)


@session_program.command()
def session(
    lifeline: Annotated[int, typer.Option("--lifeline", help="File descriptor that ends with the server.")],
    socket: SocketOption = None,
    site: Annotated[str, typer.Option("--site", help="Whose daemon it should be.")] = "",
    replay: ReplayOption = None,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = "fed-dark",
) -> None:
    """One read-only console for `fedconsole serve`. It is started by that and by nobody else."""
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    # a file would lie on the server's machine, written by whoever sits at the browser
    options: dict[str, Any] = {"leaving": LEAVING, "read_only": True}
    options |= {"ascii_only": ascii_only, "theme_name": theme}
    with ended_by(json_output=False):
        if socket is not None:
            from console.app import run

            run(socket, site=site, **options)
        elif replay is not None:
            from console.app import run_told
            from console.recording import Replay

            played = Replay(replay)
            run_told(lambda: played, played.banner, replay=played, waits_for=str(replay), **options)


def _end_with(lifeline: int) -> None:
    """Nothing is ever written there: a read returns when the other end is closed, also by the kernel after kill -9."""
    while os.read(lifeline, 1):
        pass
    os._exit(SERVER_GONE_EXIT_CODE)


if __name__ == "__main__":
    session_program()

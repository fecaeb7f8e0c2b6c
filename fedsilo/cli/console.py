"""`fedconsole`: look at a daemon, and answer what it holds, on a terminal; or at a recording of what one said. And
`fedconsole serve`: the same in a browser, looking only.

The console process of a browser session is this module run as a program. Its command line has no option for a key and
none that unlocks, so what a browser sends cannot approve anything.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from fedsilo.cli.options import require_plain_file
from fedsilo.cli.output import (
    VersionOption,
    command,
    emit,
    ended_by,
    existing,
    guarded,
    running,
    takes_signs,
)
from fedsilo.protocol.errors import ConflictError, OperationError, UsageError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from console.feed import Source
    from console.lock import KeyFiles
    from console.recording import RecordingFile, Replay
    from fedsilo.cli.contexts import ContextEntry

app = typer.Typer(help="Watch one silo or the coordinator, and approve or reject what a silo holds.")

CELLS_WITHOUT_TERMINAL = 100
ROWS_WITHOUT_TERMINAL = 30
THEME_NAMES = ("fed-dark", "fed-light", "fed-mono")
OVERVIEW, APPROVALS = "1", "3"
NO_NAME = "daemon"  # of what is attached to by --socket
Files: TypeAlias = "tuple[Path | None, Path | None]"  # a person's certificate, and the key to it


@command(app, "fedconsole")
def fedconsole(
    socket: Annotated[Path | None, typer.Option("--socket", help="Control socket of the daemon.")] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context",
            metavar="CONTEXT",
            help="silo:NAME=SOCKET, coordinator=SOCKET, one of them behind LABEL=, or a name that `fedsilo context "
            "list` shows. Again for more of them: :ctx NAME goes from one to another.",
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="A recording in place of a daemon: . pauses, < and > move 10 s.")
    ] = None,
    speed: Annotated[float, typer.Option("--speed", help="Seconds of the recording a second, with --replay.")] = 1.0,
    at: Annotated[float, typer.Option("--at", min=0.0, help="Second of the recording to begin at.")] = 0.0,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write what is read into this new file: released fields only.")
    ] = None,
    include_local: Annotated[
        str,
        typer.Option(
            "--include-local",
            metavar="LOCAL",
            help="The word LOCAL: record also what policy did not release, in a file for this site's people only.",
        ),
    ] = "",
    read_only: Annotated[bool, typer.Option("--read-only", help="Looking only; it cannot be unlocked.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one screen as text and end.")] = False,
    screen: Annotated[str, typer.Option("--screen", metavar="N", help="Which one, with --once.")] = OVERVIEW,
    operator_certificate: Annotated[
        Path | None, typer.Option("--operator-certificate", help="Your certificate under the site CA.")
    ] = None,
    operator_key: Annotated[Path | None, typer.Option("--operator-key", help="Its key, mode 0600.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="ASCII alone but in data, as without UTF-8.")] = False,
    theme: Annotated[str, typer.Option("--theme", help=f"One of {', '.join(THEME_NAMES)}.")] = "",
    no_mouse: Annotated[
        bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal, to mark and copy text with it.")
    ] = False,
    version: VersionOption = False,
) -> None:
    """Open the console, or with --once print what it would show."""
    if replay is not None and (socket is not None or context):
        raise UsageError("a daemon or a recording: one of the two", hint="--socket or --context, or --replay")
    chosen = theme_named(theme)
    if bool(operator_certificate) != bool(operator_key):
        raise UsageError("--operator-certificate and --operator-key go together")
    if replay is None and (speed != 1.0 or at):
        raise UsageError("--speed and --at are of a recording", hint="fedconsole --replay FILE")
    printed = once or running().json_output
    if screen != OVERVIEW and not printed:
        raise UsageError("--screen says what --once prints", hint=f"fedconsole --once --screen {screen}")
    if replay is not None and (record is not None or include_local):
        raise UsageError("what is played back is not recorded")
    if not printed:
        need_terminal()
    entries: Sequence[ContextEntry] = ()
    if replay is not None:
        watched = _from_recording(replay, speed, at, still=printed)
    else:
        entries = contexts_of(socket, context or [])
        if len(context or []) > 1 and (printed or record is not None):
            raise UsageError("--once and --record are of one daemon", hint="give one --context")
        watched = _from_daemon(entries[0].socket, entries[0].site, _recording(record, include_local))
    try:
        if printed:
            _print_once(watched, screen, ascii_only=ascii_only or not takes_signs())
        else:
            origins = origins_of(theme, ascii_only=ascii_only, read_only=read_only, no_mouse=no_mouse)
            files = operator_certificate, operator_key
            options: dict[str, Any] = {
                "ascii_only": ascii_only or not takes_signs(),
                "theme_name": chosen,
                "mouse": not no_mouse,
                "origins": origins,
            }
            if entries and record is None:
                _open_contexts(entries, files, read_only=read_only, **options)
            else:
                _open(watched, key_files_of(files, entries[0] if entries else None), read_only=read_only, **options)
    finally:
        if watched.file is not None:
            watched.file.close()
    if watched.file is not None and watched.file.trouble:
        raise OperationError(f"the recording is not whole: {watched.file.trouble}")


def theme_named(given: str) -> str:
    """A theme by its name, which may be given without the `fed-`; without one, what the environment's NO_COLOR says.

    Raises:
        UsageError: there is none of that name.
    """
    if not given:
        return "fed-mono" if "NO_COLOR" in os.environ else "fed-dark"
    name = given if given.startswith("fed-") else f"fed-{given}"
    if name not in THEME_NAMES:
        raise UsageError(f"there is no theme {given!r}", hint=f"one of {', '.join(THEME_NAMES)}; also without fed-")
    return name


# ---- what is looked at -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Watched:
    """Attributes:
    connect: makes the source.
    name: what is awaited while it loads.
    site: whose it is said to be; empty for whosever it is.
    socket: of the daemon; None where nothing can be answered.
    banner: what the console says of it; empty for a daemon as it is.
    file: recorded into.
    replay: what is played back; its times are not those of a daemon that runs now."""

    connect: Callable[[], Source]
    name: str
    site: str = ""
    socket: Path | None = None
    banner: Callable[[], str] = field(default=lambda: "")
    file: RecordingFile | None = None
    replay: Replay | None = None


def _from_daemon(path: Path, site: str, file: RecordingFile | None) -> _Watched:
    from console.feed import connect_to

    connect = connect_to(path)
    if file is None:
        return _Watched(connect, str(path), site, path)
    from console.recording import Recorder

    return _Watched(lambda: Recorder(connect(), file), str(path), site, path, file.banner, file=file)


def _from_recording(path: Path, speed: float, at: float, *, still: bool) -> _Watched:
    """still: it stands at `at`, for what is printed once."""
    from console.recording import Replay

    require_plain_file(path, hint="fedconsole --record FILE makes a recording")
    replay = Replay(path, speed=speed)
    if still:
        replay.pause()
    replay.seek(at)
    return _Watched(lambda: replay, str(path), banner=replay.banner, replay=replay)


def _recording(path: Path | None, word: str) -> RecordingFile | None:
    """Raises UsageError: local data without the word. ConflictError, OperationError: the file cannot be made."""
    if path is None:
        if word:
            raise UsageError("--include-local says what --record writes", hint="fedconsole --record FILE")
        return None
    from console.recording import LOCAL_WORD, RecordingFile

    if word and word != LOCAL_WORD:
        raise UsageError(
            f"--include-local takes the word {LOCAL_WORD}, typed",
            hint="the file then holds what this site's policy did not release; without it only released fields",
        )
    return RecordingFile(path, include_local=bool(word))


def need_terminal() -> None:
    """Check the terminal. Raises UsageError: there is none that a console can be drawn on."""
    twin = "silo status, silo approvals list|show|approve|reject, coordinator status"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("there is no terminal to draw on", hint=f"as text: fedconsole --once, {twin}")
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        raise UsageError("TERM says that this terminal cannot be drawn on", hint=f"as text: fedconsole --once, {twin}")


def contexts_of(socket: Path | None, given: Sequence[str]) -> list[ContextEntry]:
    """The daemons that may be attached to, the first one at once.

    Without any it is the current one of the file that `fedsilo context` keeps. Where a name of that file is given, all
    of the file's can be gone to.

    Raises:
        UsageError: none or another form. NotFoundError: no such name. NotAllowedError: others may write the file.
    """
    from fedsilo.cli.contexts import ContextEntry, context_given, contexts, current_context

    if socket is not None and given:
        raise UsageError("--socket and --context: one of the two", hint="--context again for more daemons")
    if socket is not None:
        return [ContextEntry(NO_NAME, "", socket)]
    names = list(given) or list(filter(None, [current_context()]))
    if not names:
        raise UsageError(
            "say whose console: --socket PATH or --context silo:NAME=PATH",
            hint="one of the two, or `fedsilo context add`; without a daemon --replay FILE",
        )
    found = [context_given(name) for name in names]
    called = [each.name for each in found]
    if twice := [name for name in called if called.count(name) > 1]:
        raise UsageError(f"two contexts are called {twice[0]}", hint=f"give one of them a label: LABEL={given[0]}")
    kept = contexts() if any(each.place for each in found) else {}
    return [*found, *(each for name, each in kept.items() if name not in called)]


def key_files_of(given: Files, entry: ContextEntry | None) -> KeyFiles | None:
    """A person's certificate and key: as given, else those that the context names."""
    from console.lock import KeyFiles

    named = (None, None) if entry is None else (entry.operator_certificate, entry.operator_key)
    certificate, key = given if given[0] is not None else named
    return KeyFiles(certificate, key) if certificate is not None and key is not None else None


def origins_of(theme: str, *, ascii_only: bool, read_only: bool, no_mouse: bool = False) -> dict[str, str]:
    """Return where the console's own settings come from, by their names on the screen of settings."""
    flags = {"theme": bool(theme), "ascii": ascii_only, "read-only": read_only, "no-mouse": no_mouse}
    origins = {key: f"flag --{key}" for key, given in flags.items() if given}
    return origins if theme or "NO_COLOR" not in os.environ else {"theme": "env NO_COLOR", **origins}


# ---- showing it ------------------------------------------------------------------------------------


def _open_contexts(entries: Sequence[ContextEntry], files: Files, *, read_only: bool, **options: Any) -> None:
    from console.app import Attachment, ContextConsole
    from console.feed import Signer, connect_to

    attachments = []
    for entry in entries:
        attachments.append(
            Attachment(
                entry.name,
                connect_to(entry.socket),
                str(entry.socket),
                entry.site,
                None if read_only else Signer(entry.socket),
                key_files_of(files, entry),
            )
        )
    # what has no label of its own is called as the bar names it anyway
    named = entries[0].name not in (f"silo:{entries[0].site}", "coordinator", NO_NAME)
    console = ContextConsole(attachments, named=named, read_only=read_only, **options)
    console.run_on(attachments[0].connect)


def _open(watched: _Watched, key_files: KeyFiles | None, *, read_only: bool, **options: Any) -> None:
    from console.app import FedConsole
    from console.feed import Signer

    console = FedConsole(
        banner=watched.banner,
        replay=watched.replay,
        signer=None if read_only or watched.socket is None else Signer(watched.socket),
        key_files=key_files,
        site=watched.site,
        waits_for=watched.name,
        read_only=read_only,
        **options,
    )
    console.run_on(watched.connect)


def _print_once(watched: _Watched, screen: str, *, ascii_only: bool) -> None:
    import shutil

    from console.feed import Store
    from fedsilo.views.lines import ASCII, UNICODE, in_ascii, to_text

    client = watched.connect()
    try:
        reading = client.snapshot()
        runs = reading.state.get("runs") if reading.state.get("party") == "coordinator" else None
        record = client.query("run", {"run": runs[-1]["run"]}) if runs else {}
    finally:
        client.close()
    store = Store()
    now = time.monotonic()
    store.read(reading, now, wall_time=time.time(), record=record)
    snapshot = store.snapshot
    if watched.replay is not None:  # it says what it is where a daemon's link would say "live"
        snapshot = replace(snapshot, skew_seconds=0.0, link=replace(snapshot.link, banner=watched.banner()))
    if watched.site and snapshot.site != watched.site:
        raise ConflictError(f"the daemon at {watched.name} is {snapshot.site!r}, not {watched.site!r}")
    size = shutil.get_terminal_size((CELLS_WITHOUT_TERMINAL, ROWS_WITHOUT_TERMINAL))
    glyphs, banner = ASCII if ascii_only else UNICODE, watched.banner()

    def text() -> str:
        from fedsilo.views.overview import once_lines

        if screen == OVERVIEW:
            shown = to_text(once_lines(snapshot, now, size.columns, glyphs))
        elif screen == APPROVALS:
            shown = to_text(_approvals_lines(snapshot, now, size.columns))
        else:
            from console.app import screen_text

            return screen_text(
                watched.connect,
                screen,
                watched.banner,
                cells=size.columns,
                rows=size.lines,
                read_only=True,
                ascii_only=ascii_only,
            )
        return (in_ascii if ascii_only else str)(f"{banner}\n{shown}" if banner else shown)

    data = {"time": reading.time, "policy_digest": reading.policy_digest, "state": reading.state}
    if banner:
        data["told"] = banner
    emit(data, text)


def _approvals_lines(snapshot: Any, now: float, cells: int) -> list[Any]:
    """Every held release with all its facts and every rule that the source holds, one below the other."""
    from fedsilo.views import releases
    from fedsilo.views.lines import line

    if not snapshot.held:
        return [line("nothing is held: what waits for a person would stand here")]
    time, banner = snapshot.server_now(now), snapshot.link.banner
    return [
        row for held in snapshot.held for row in (*releases.printed(held, cells, time=time, banner=banner), line(""))
    ]


# ---- `fedconsole serve` ----------------------------------------------------------------------------------------------


LOOPBACK = "127.0.0.1"
# All that a console process is given of this one's environment; no variable that changes what it does or records.
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR", "PATH", "PYTHONPATH", "TMPDIR", "TZ")
LEAVING = "close the page to end"
SERVER_GONE_EXIT_CODE = 1

program = typer.Typer(help=app.info.help, invoke_without_command=True)

SocketOption = Annotated[Path | None, typer.Option("--socket", help="Control socket of the daemon.")]
ContextOption = Annotated[
    str, typer.Option("--context", help="silo:NAME=PATH/control.sock or coordinator=PATH/control.sock.")
]
ReplayOption = Annotated[Path | None, typer.Option("--replay", help="A recording in place of a daemon.")]
AsciiOption = Annotated[bool, typer.Option("--ascii", help="No character outside ASCII but in data.")]
ThemeOption = Annotated[str, typer.Option("--theme", help=f"One of {', '.join(THEME_NAMES)}.")]


def _console(ctx: typer.Context, **options: Any) -> None:
    """Open the console, or with --once print what it would show; with serve, in a browser."""
    if ctx.invoked_subcommand is None:
        fedconsole(**options)
        return

    given = [name for name in options if getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
    if given:
        with guarded("fedconsole"):
            word = ctx.invoked_subcommand
            raise UsageError(f"options go after {word}", hint=f"fedconsole {word} --help")


# The options of `fedconsole` are written once, there; what is added here is which command was asked for.
_console.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *inspect.signature(fedconsole, eval_str=True).parameters.values(),
    ]
)
program.callback(invoke_without_command=True)(_console)


@command(program, "fedconsole serve")
def serve(
    socket: SocketOption = None,
    context: ContextOption = "",
    replay: ReplayOption = None,
    bind: Annotated[str, typer.Option("--bind", metavar="ADDRESS", help="IP address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 0,
    behind_proxy: Annotated[
        str,
        typer.Option(
            "--behind-proxy",
            metavar="ORIGIN",
            help="https://HOST of a proxy with TLS and a login of its own. Without it only loopback is listened on.",
        ),
    ] = "",
    url_file: Annotated[
        Path | None, typer.Option("--url-file", help="Write the start URL into this new file, mode 0600, not here.")
    ] = None,
    ascii_only: AsciiOption = False,
    theme: ThemeOption = "",
) -> None:
    """Show the console in one browser, read-only, until Ctrl-C. Nothing can be approved or rejected there."""
    from console.serving import Serving, check_bind
    from console.serving import serve as serve_until_told

    chosen = theme_named(theme)
    if sum([replay is not None, socket is not None or bool(context)]) != 1:
        hint = "fedconsole serve --socket PATH, --context silo:NAME=PATH or --replay FILE"
        raise UsageError("say what is shown: a daemon or a recording", hint=hint)
    check_bind(bind, behind_proxy)
    if url_file is None and not running().json_output and running().quiet:
        raise UsageError("--quiet would not print the start URL", hint="--url-file FILE writes it into a file")
    if url_file is None and not running().json_output and not sys.stdout.isatty():
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
            emit(
                {**where, "url_file": str(url_file)},
                f"The start URL is in {url_file}; it is good once, for 10 minutes. Ctrl-C ends.",
            )
        else:
            emit({**where, "url": url}, f"Open this once, within 10 minutes:\n\n  {url}\n\nRead-only. Ctrl-C ends.")

    serve_until_told(how, ready, lambda line: typer.echo(f"fedconsole serve: {harmless(line, lines=True)}", err=True))


def _shown(socket: Path | None, context: str, replay: Path | None) -> list[str]:
    """Return the arguments of the console process that say what to show. Raises UsageError, NotFoundError."""
    if replay is not None:
        return ["--replay", str(existing(replay).resolve())]
    entry = contexts_of(socket, [context] if context else [])[0]
    return ["--socket", str(entry.socket.resolve()), "--site", entry.site]


def console_command(lifeline: int, options: Sequence[str]) -> list[str]:
    """Return the command of a console process, which ends when the other end of `lifeline` is closed."""
    return [sys.executable, "-P", "-m", "fedsilo.cli.console", "--lifeline", str(lifeline), *options]


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
    """Run one read-only console for `fedconsole serve`, which alone starts it."""
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    # a file would lie on the server's machine, written by whoever sits at the browser
    options: dict[str, Any] = {"leaving": LEAVING, "read_only": True}
    options |= {"ascii_only": ascii_only, "theme_name": theme}
    with ended_by(json_output=False):
        from console.app import FedConsole

        if socket is not None:
            from console.feed import connect_to

            FedConsole(site=site, waits_for=str(socket), **options).run_on(connect_to(socket))
        elif replay is not None:
            from console.recording import Replay

            played = Replay(replay)
            console = FedConsole(banner=played.banner, replay=played, waits_for=str(replay), **options)
            console.run_on(lambda: played)


def _end_with(lifeline: int) -> None:
    """Nothing is ever written there: a read returns when the other end is closed, also by the kernel after kill -9."""
    while os.read(lifeline, 1):
        pass
    os._exit(SERVER_GONE_EXIT_CODE)


if __name__ == "__main__":
    session_program()

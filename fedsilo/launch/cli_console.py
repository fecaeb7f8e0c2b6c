"""`fedconsole`: look at a daemon, and answer what it holds, on a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsilo.launch.output import JsonOption, VersionOption, emit, guarded

app = typer.Typer(help="Watch one silo or the coordinator, and approve or reject what a silo holds.")

CELLS_WITHOUT_TERMINAL = 100
THEME_NAMES = ("fed-dark", "fed-light", "fed-mono")


@app.command()
@guarded("fedconsole")
def fedconsole(
    socket: Annotated[Path | None, typer.Option("--socket", help="Control socket of the daemon.")] = None,
    context: Annotated[
        str, typer.Option("--context", help="silo:NAME=PATH/control.sock or coordinator=PATH/control.sock.")
    ] = "",
    read_only: Annotated[bool, typer.Option("--read-only", help="Looking only; it cannot be unlocked.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the overview as text and end.")] = False,
    operator_certificate: Annotated[
        Path | None, typer.Option("--operator-certificate", help="Your certificate under the site CA.")
    ] = None,
    operator_key: Annotated[Path | None, typer.Option("--operator-key", help="Its key, mode 0600.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="No character outside ASCII but in data.")] = False,
    theme: Annotated[str, typer.Option("--theme", help=f"One of {', '.join(THEME_NAMES)}.")] = "",
    version: VersionOption = False,
    json_output: JsonOption = False,
) -> None:
    """Open the console, or with --once print what it would show first."""
    from fedsilo.treaty.errors import UsageError

    path, site = _where(socket, context)
    chosen = theme or ("fed-mono" if "NO_COLOR" in os.environ else "fed-dark")
    if chosen not in THEME_NAMES:
        raise UsageError(f"there is no theme {theme!r}", hint=f"one of {', '.join(THEME_NAMES)}")
    if bool(operator_certificate) != bool(operator_key):
        raise UsageError("--operator-certificate and --operator-key go together")
    if once or json_output:
        _print_once(path, site, ascii_only=ascii_only, json_output=json_output)
        return
    open_console(
        path, certificate=operator_certificate, key=operator_key, site=site, read_only=read_only,
        ascii_only=ascii_only, theme=chosen,
    )  # fmt: skip


def open_console(
    socket: Path,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    site: str = "",
    leaving: str = "",
    read_only: bool = False,
    ascii_only: bool = False,
    theme: str = "fed-dark",
) -> None:
    """The console in the foreground until the person leaves it.

    Args:
        socket: the daemon's control socket; it need not answer yet.
        certificate: the person's; without it the console can only look.
        key: to the certificate.
        site: whose daemon this is; a person of another site cannot unlock.
        leaving: what it says of going on once the run is over; empty for that ctrl+q ends it.
        read_only: no unlocking.
        ascii_only: no character outside ASCII but in data.
        theme: fed-dark, fed-light or fed-mono.

    Raises:
        UsageError: there is no terminal that a console can be drawn on.
    """
    _need_terminal()
    from console.app import LEAVING, KeyFiles, run

    files = KeyFiles(certificate, key) if certificate is not None and key is not None else None
    run(
        socket, key_files=files, site=site, leaving=leaving or LEAVING, read_only=read_only, ascii_only=ascii_only,
        theme_name=theme,
    )  # fmt: skip


def _need_terminal() -> None:
    from fedsilo.treaty.errors import UsageError

    twin = "silo status, silo approvals list|show|approve|reject, coordinator status"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("there is no terminal to draw on", hint=f"as text: fedconsole --once, {twin}")
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        raise UsageError("TERM says that this terminal cannot be drawn on", hint=f"as text: fedconsole --once, {twin}")


def _where(socket: Path | None, context: str) -> tuple[Path, str]:
    """The socket, and the site it is said to be of. Raises UsageError."""
    from fedsilo.treaty.errors import UsageError

    if (socket is None) == (not context):
        raise UsageError("say whose console: --socket PATH or --context silo:NAME=PATH", hint="one of the two")
    if socket is not None:
        return socket, ""
    name, equals, path = context.partition("=")
    kind, _, site = name.partition(":")
    if not equals or not path or kind not in ("silo", "coordinator") or (kind == "silo") != bool(site):
        raise UsageError(
            f"context {context!r} is not silo:NAME=PATH or coordinator=PATH",
            hint="fedconsole --context silo:hospital_a=/var/lib/fedsilo/hospital_a/control.sock",
        )
    return Path(path), site


def _print_once(path: Path, site: str, *, ascii_only: bool, json_output: bool) -> None:
    import shutil
    import time

    from console.drawing import ASCII, UNICODE, in_ascii, to_text
    from console.feed import connect_to
    from console.store import Store
    from console.words import once_lines
    from fedsilo.treaty.errors import ConflictError

    with connect_to(path)() as client:
        reading = client.snapshot()
        runs = reading.state.get("runs") if reading.state.get("party") == "coordinator" else None
        record = client.query("run", {"run": runs[-1]["run"]}) if runs else {}
    store = Store()
    now = time.monotonic()
    store.read(reading, now, wall_time=time.time(), record=record)
    snapshot = store.snapshot
    if site and snapshot.site != site:
        raise ConflictError(f"the daemon at {path} is {snapshot.site!r}, not {site!r}")
    cells = shutil.get_terminal_size((CELLS_WITHOUT_TERMINAL, 30)).columns
    glyphs = ASCII if ascii_only else UNICODE
    data = {"time": reading.time, "policy_digest": reading.policy_digest, "state": reading.state}
    emit(
        "fedconsole", data, json_output=json_output,
        text=lambda: (in_ascii if ascii_only else str)(to_text(once_lines(snapshot, now, cells, glyphs))),
    )  # fmt: skip

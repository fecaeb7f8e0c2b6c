"""`doctor`: whether this machine can run a silo, the coordinator or the console, before anything is configured, and
what of a configured one does not fit. `silo check` and `coordinator check` try what a start needs; this is less,
needs no federation, and does not stop at the first fault.

Does not find: a clock that is wrong but later than everything recorded here, where no coordinator's was compared; a
disk that fills later.
"""

from __future__ import annotations

import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.daemons import DEFAULTS, read_configuration
from fedsilo.cli.output import command, emit, running, table
from fedsilo.files.durable import DISK_BYTES_MIN, free_bytes
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import FedSiloError, OperationError

if TYPE_CHECKING:
    from pydantic import BaseModel

DISK_BYTES_LOW = 2 << 30  # a few rounds of a small model's adapters and payloads
CLOCK_BEHIND_SECONDS_MAX = 120.0  # how long a signed command is valid: more, and none is accepted
SOCKET_SECONDS = 3.0
_TIMES_LOOKED_AT = 50
_NOT_LOOKED_AT = "run it as the user whose files they are"

ConfigOption = Annotated[Path | None, typer.Option("--config", help="A configuration file, if there is one yet.")]


@dataclass(frozen=True)
class Finding:
    """`ok` is None for what was not tried, or need not be as it is found."""

    check: str
    ok: bool | None
    found: str
    hint: str = ""


def add_to(app: typer.Typer, program: str) -> None:
    """Make `doctor` a command of a program: silo, coordinator, or fedsilo, which knows of no configuration file."""
    default = DEFAULTS.get(program)
    name = "doctor" if program == "fedsilo" else f"{program} doctor"

    @command(app, name)
    def doctor(config: ConfigOption = default) -> None:
        """What is installed here, and whether names, clock, disk, socket and isolation will do. Changes nothing."""
        found = list(findings(program, config))
        rows = [vars(each) for each in found]
        failed = [each for each in found if each.ok is False]
        error = None
        if failed:
            error = OperationError(
                f"{len(failed)} of {len(found)} checks failed: {', '.join(each.check for each in failed)}",
                hint=failed[0].hint,
            )
        words = {True: "ok", False: "FAILED", None: "-"}
        emit(
            {"checks": rows},
            lambda: table(("", "check", "found"), ((words[each.ok], each.check, each.found) for each in found)),
            error=error,
            warnings=[f"{each.check}: {each.hint}" for each in found if each.ok is None and each.hint],
        )


def findings(program: str, config: Path | None) -> Iterator[Finding]:
    """Every check, in the order in which a start would meet them.

    Args:
        program: silo, coordinator or fedsilo.
        config: of a configuration file; one that is not there is said to be missing, and is no fault.
    """
    yield from _installed(program)
    yield _tried("names of our packages", _names, "")
    yield _tried("contexts", _contexts, "fedsilo context list")
    read, finding = _configured(config)
    yield finding
    state_dir: Path | None = getattr(read, "state_dir", None)
    yield _tried("disk", lambda: _disk(state_dir or Path()))
    yield _tried("clock", lambda: _clock(state_dir))
    if read is not None:
        yield _tried("control socket", lambda: _socket(read))
    if hasattr(read, "coordinator"):
        yield _tried("way to the coordinator", lambda: _way(read))
    if program != "coordinator":
        yield _tried("isolation of the trainer", _isolation)


def _tried(check: str, work: Callable[[], str | Finding], hint: str = "") -> Finding:
    """Carry out a check; one that cannot be done (a folder that may not be looked into) failed, and others go on."""
    try:
        found = work()
    except FedSiloError as error:
        return Finding(check, False, error.message, error.hint or hint)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Finding(check, False, f"{where}{error.strerror or type(error).__name__}", hint or _NOT_LOOKED_AT)
    return found if isinstance(found, Finding) else Finding(check, True, found)


def _installed(program: str) -> Iterator[Finding]:
    from fedsilo.cli.crash import versions
    from fedsilo.files.extras import install_hint

    found = versions()
    yield Finding("fedsilo", True, f"{found['fedsilo']} on Python {found['python']}, {found['system']}")
    if platform.system() != "Linux":
        yield Finding("operating system", None, platform.system(), "daemons and their sandboxes are made for Linux")
    wanted = {"torch": "silo's trainer", "transformers": "silo's trainer", "textual": "fedconsole"}
    trainers = install_hint("torch")
    how = {"torch": trainers, "transformers": trainers, "textual": "install FedSilo again"}
    needed = ("torch", "transformers") if program == "silo" else ()
    for name, what in wanted.items():
        missing = found[name] == "not installed"
        if program == "coordinator" and name != "textual":
            continue
        yield Finding(
            name,
            (False if name in needed else None) if missing else True,
            found[name],
            f"the {what} needs it: {how[name]}" if missing else "",
        )


def _names() -> str:
    from fedsilo.cli.own_names import refuse_foreign_names

    refuse_foreign_names()
    return "ours alone"


def _contexts() -> str:
    from fedsilo.cli.contexts import contexts, contexts_path

    return f"{len(contexts())} kept in {contexts_path()}"


def _configured(config: Path | None) -> tuple[BaseModel | None, Finding]:
    read: list[BaseModel] = []

    def look() -> Finding:
        if config is None or not config.exists():
            return Finding("configuration", None, f"{config or 'none'}: not there")
        kind, found = read_configuration(config)
        read.append(found)
        return Finding("configuration", True, f"{config}: {kind}")

    finding = _tried("configuration", look)
    return (read[0] if read else None), finding


def _disk(folder: Path) -> Finding:
    free = free_bytes(folder)
    text = f"{free} bytes free for {folder}"
    if free < DISK_BYTES_MIN:
        return Finding("disk", False, text, f"a daemon needs {DISK_BYTES_MIN} bytes to start")
    if free < DISK_BYTES_LOW:
        return Finding("disk", None, text, "enough to start; little for payloads, adapters and logs")
    return Finding("disk", True, text)


def _clock(state_dir: Path | None) -> Finding:
    now = time.time()
    text = utc(now)
    log = None if state_dir is None else state_dir / "audit"
    if log is None or not log.is_dir():
        return Finding("clock", None, f"{text}; nothing here to compare it with")
    newest = max((each.stat().st_mtime for each in sorted(log.iterdir())[-_TIMES_LOOKED_AT:]), default=0.0)
    ledger = state_dir / "ledger.sqlite3" if state_dir is not None else None
    if ledger is not None and ledger.is_file():
        from silo.guard.clock_watch import look_offline
        from silo.guard.ledger import Ledger

        reader = Ledger(ledger, read_only=True)
        try:
            text, warning = look_offline(reader, now)
        finally:
            reader.close()
        if warning:
            return Finding("clock", None, text, warning)
    behind = newest - now
    if behind > CLOCK_BEHIND_SECONDS_MAX:
        hint = "certificates and signed commands are judged by it: set it, and let a time service keep it"
        return Finding("clock", False, f"{text}, {behind:.0f} s behind the log in {log}", hint)
    return Finding("clock", True, f"{text}, not behind the log in {log}")


def _socket(read: Any) -> Finding:
    path = Path(read.control.socket)
    if not path.exists():
        return Finding("control socket", None, f"{path}: no daemon is running")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        return Finding("control socket", False, f"{path}: mode {mode:04o}", "others may not reach it: chmod o=")
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding("control socket", None, f"{path}: not yours to ask", "join the group that may read it")
    from fedsilo.control.client import ControlClient

    try:
        with ControlClient(path, timeout_seconds=SOCKET_SECONDS) as client:
            return Finding("control socket", True, f"{path}: answers, sequence {client.snapshot().sequence}")
    except FedSiloError as error:
        return Finding("control socket", False, error.message, error.hint)


def _way(read: Any) -> Finding:
    """Return what a site's silo would dial. Nothing is dialled: `silo check` does that."""
    from silo.guard.proxied import proxy_of, unread_environment

    place = read.coordinator
    if place.by_files:
        return Finding("way to the coordinator", True, "by files that people carry: nothing is dialled")
    proxy = proxy_of(place)
    text = f"{place.address}, {'directly' if proxy is None else f'through the proxy {proxy.address}'}"
    if proxy is None and (unread := unread_environment()):
        return Finding("way to the coordinator", None, text, unread)
    return Finding("way to the coordinator", True, text)


def _isolation() -> Finding:
    from silo.guard.trainer_process.probing import best_level

    if running().dry_run:
        return Finding("isolation of the trainer", None, "not tried: it takes a folder and a process")
    level = best_level()
    if level == "waived":
        return Finding(
            "isolation of the trainer",
            None,
            "no sandbox holds here",
            "run the trainer in a container, or allow user namespaces; a policy decides what it accepts",
        )
    return Finding("isolation of the trainer", True, f"{level}, tried out")

"""What a shell completes: ids of releases, runs, silos, contexts and records, from files on this machine.

Read are the configuration file that the line names (or the one that the command would read), and below its `state_dir`
the ledger, the coordinator's own database and the names of the log's segments, all for reading only. Nothing is asked
of a daemon or over the network. What is not found within `SECONDS_MAX` of reading is not offered, and no failure is
told: a shell shows whatever is printed in the middle of what is being typed. The limit is for a disk that hangs: the
modules that read are loaded before it counts, as on a busy machine they take most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

SECONDS_MAX = 0.150
OFFERED_MAX = 50
NUMBERS_OFFERED = 10
_SILO, _COORDINATOR = Path("silo.yaml"), Path("coordinator.yaml")
_LEDGER, _DATABASE, _LOG = "ledger.sqlite3", "coordinator.db", "audit"


def _complete_with(
    find: Callable[[Mapping[str, Any], str], Iterable[str]], load: Callable[[], None]
) -> Callable[..., list[str]]:
    """load: imports what `find` imports."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            load()
        except Exception:  # noqa: BLE001  # as in `within`; what is not installed offers nothing
            return []
        program = context.command_path.split(" ", 1)[0]
        return within(SECONDS_MAX, lambda: [each for each in find(context.params, program) if _fits(each, incomplete)])

    return complete


def within(seconds: float, work: Callable[[], list[str]]) -> list[str]:
    """What `work` finds, or nothing if it fails or takes longer; it may go on until the process ends.

    Args:
        seconds: to wait.
        work: reads only.
    """
    import threading

    found: list[str] = []

    def run() -> None:
        try:
            found.extend(work()[:OFFERED_MAX])
        except Exception:  # noqa: BLE001  # nothing is offered; a message would stand in the half-typed line
            found.clear()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return [] if thread.is_alive() else found


def _fits(value: str, incomplete: str) -> bool:
    """Only what can be typed: an id with another character than these came from elsewhere (threat T37), and a shell
    would act on some of them. One that begins with a dash would be read as an option."""
    typed = value.isascii() and all(each.isalnum() or each in "._:/-" for each in value) and not value.startswith("-")
    return typed and value.startswith(incomplete)


def _releases(parameters: Mapping[str, Any], program: str) -> Iterable[str]:
    ledger = _state_dir(parameters, _SILO) / _LEDGER
    return _column(ledger, "SELECT id FROM releases WHERE state='held' ORDER BY requested_at DESC LIMIT ?")


def _runs(parameters: Mapping[str, Any], program: str) -> Iterable[str]:
    if program == "silo":
        return _column(_state_dir(parameters, _SILO) / _LEDGER, "SELECT run FROM runs LIMIT ?")
    database = _state_dir(parameters, _COORDINATOR) / _DATABASE
    return _column(database, "SELECT name FROM runs ORDER BY ordinal DESC LIMIT ?")


def _silos(parameters: Mapping[str, Any], program: str) -> Iterable[str]:
    return [str(name) for name in _configuration(parameters, _COORDINATOR)[1]["silos"]]


def _numbers(parameters: Mapping[str, Any], program: str) -> Iterable[str]:
    """The newest records of a log."""
    from fedsilo.edge.audit_segments import segments

    log = parameters.get("log")
    default = _COORDINATOR if program == "coordinator" else _SILO
    folder = Path(log) if log else _state_dir(parameters, default)
    folder = folder / _LOG if (folder / _LOG).is_dir() else folder
    first, path = segments(folder)[-1]
    with path.open("rb") as lines:
        count = sum(1 for _ in lines)
    return [str(number) for number in range(first + count - 1, max(-1, first + count - 1 - NUMBERS_OFFERED), -1)]


def _contexts(parameters: Mapping[str, Any], program: str) -> Iterable[str]:
    from fedsilo.launch.contexts import contexts

    return list(contexts())


def _state_dir(parameters: Mapping[str, Any], default: Path) -> Path:
    path, values = _configuration(parameters, default)
    return path.parent / str(values["state_dir"])


def _configuration(parameters: Mapping[str, Any], default: Path) -> tuple[Path, Mapping[str, Any]]:
    """The file and its keys as they stand there: whether it is valid does not matter for what is offered."""
    from fedsilo.treaty.strict_yaml import load

    path = Path(parameters.get("config") or default)
    values = load(path.read_bytes(), str(path)).value
    return path, values if isinstance(values, Mapping) else {}


def _column(database: Path, question: str) -> list[str]:
    import sqlite3
    from contextlib import closing

    # without a log of its own a database is complete; read as such, SQLite makes no files beside it
    complete = "" if database.with_name(f"{database.name}-wal").exists() else "&immutable=1"
    place = f"{database.absolute().as_uri()}?mode=ro{complete}"
    with closing(sqlite3.connect(place, uri=True, timeout=SECONDS_MAX)) as reading:
        return [str(row[0]) for row in reading.execute(question, (OFFERED_MAX,))]


# Imports alone: what the functions above import when they run.


def _load_files() -> None:
    import fedsilo.treaty.strict_yaml  # noqa: F401


def _load_databases() -> None:
    import sqlite3  # noqa: F401

    _load_files()


def _load_logs() -> None:
    import fedsilo.edge.audit_segments  # noqa: F401

    _load_files()


def _load_contexts() -> None:
    import fedsilo.launch.contexts  # noqa: F401


# Name of a command's parameter, with the command's in front where it is an id there only -> what completes it.
COMPLETERS: Mapping[str, Callable[..., list[str]]] = {
    "release": _complete_with(_releases, _load_databases),
    "run": _complete_with(_runs, _load_databases),
    "coordinator silos show.name": _complete_with(_silos, _load_files),
    "seq": _complete_with(_numbers, _load_logs),
    "record": _complete_with(_numbers, _load_logs),
    "context": _complete_with(_contexts, _load_contexts),
    "context_name": _complete_with(_contexts, _load_contexts),
}

"""`fedsilo bundle`: what somebody who helps needs to see, in one file that may be shared.

It holds versions, the findings of `doctor`, settings with their origins, the released part of the daemon's state and of
its audit status, the daemon's own log lines, and reports of faults of ours. It holds no prompt, answer, tensor or key,
no home folder and no other absolute path, no value of `data` or `identity`. The daemon leaves quoted words out of its
log lines before it gives them away.

Does not stop: names of silos, runs, kinds and times, which tell who works with whom and when; the site's own numbers in
`settings`. What is in the file is listed before it is written, and whoever shares it can read it.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.launch.daemons import ConfigOption, ContextOption, Daemon, SocketOption, chosen_daemon
from fedsilo.launch.output import JsonOption, emit, guarded, plain
from fedsilo.treaty.errors import ConflictError, FedSiloError, UsageError

if TYPE_CHECKING:
    from console.client import ControlClient

LOG_LINES = 200
REPORTS_MAX = 3
SECONDS_EACH = 10.0
PATH_SHOWN, SET_SHOWN = "(path)", "(set)"
# An absolute path, or one from a home folder; not the slashes of a URL or of a relative path.
_PATH = re.compile(r"(?<![\w./~-])(?:file:(?://)?)?~?/(?!/)[^\s'\"`,;:()<>|]+")
_HIDDEN_BLOCKS = ("data.", "identity.", "model.", "control.", "trainer.environment")


@guarded("bundle")
def bundle(
    out: Annotated[Path, typer.Option("--out", help="The new file, .tar.gz.")],
    context: ContextOption = "",
    socket: SocketOption = None,
    config: ConfigOption = None,
    json_output: JsonOption = False,
) -> None:
    """Diagnostics in one new file that may be shared: versions, doctor, settings, status, own log lines, audit status.

    Works without a daemon, and without a configuration: what could not be asked is named in it. Read it before you pass
    it on; README in it says what was left out.
    """
    if out.exists():
        raise ConflictError(f"{out} exists", hint="name a new file")
    try:
        daemon = chosen_daemon(context, socket, config)
    except UsageError:
        if context or socket or config:
            raise
        daemon = None  # nothing is configured here, which may be what help is needed with
    parts = collected(daemon)
    if not json_output:
        for name, text in parts.items():
            sys.stderr.write(plain(f"{len(text.encode()):>8} bytes  {name}\n"))
    _write(out, parts)
    data = {
        "file": str(out),
        "bytes": out.stat().st_size,
        "holds": {name: len(text.encode()) for name, text in parts.items()},
    }
    emit(
        "bundle", data, json_output=json_output, text=f"wrote {out}, {data['bytes']} bytes; read it before you share it"
    )


def collected(daemon: Daemon | None) -> dict[str, str]:
    """File name -> text of everything that goes in. Nothing is written."""
    from fedsilo.launch.crash import reports_folder, versions
    from fedsilo.launch.doctor import findings

    config = None if daemon is None else daemon.config
    kind = (daemon.kind if daemon is not None else "") or "fedsilo"
    made: dict[str, Any] = {
        "versions.json": versions(),
        "doctor.json": [vars(each) for each in findings(kind, config)],
        "settings.json": _told(lambda: _settings(config)),
    }
    if daemon is not None:
        made |= _asked(daemon)
    reports = sorted(reports_folder().glob("crash-*.json"))[-REPORTS_MAX:] if reports_folder().is_dir() else []
    made |= {f"crashes/{path.name}": _told(partial(_read, path)) for path in reports}
    parts = {name: json.dumps(without_paths(value), indent=1) + "\n" for name, value in made.items()}
    return {"README": _README, **parts}


def without_paths(value: Any) -> Any:
    """A JSON value in which every absolute path, and every home folder, reads `(path)`."""
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    return _PATH.sub(PATH_SHOWN, value) if isinstance(value, str) else value


def _settings(config: Path | None) -> Any:
    from fedsilo.edge.site_files import settings_of
    from fedsilo.launch.daemons import read_configuration

    if config is None:
        return {"not_told": "no configuration file is known"}
    kind, read = read_configuration(config)
    rows = settings_of(read, config)
    for row in rows:
        if row["key"].startswith(_HIDDEN_BLOCKS) and row["value"] not in (None, "", []):
            row["value"] = SET_SHOWN
    return {"kind": kind, "settings": rows}


def _asked(daemon: Daemon) -> dict[str, Any]:
    """What the daemon says of itself, as far as it may be shared; in place of what it does not answer, why."""
    from console.client import ControlClient
    from console.sharing import released_answer, released_state

    def audit(client: ControlClient) -> Any:
        answer = released_answer("audit.status", {}, client.query("audit.status", {}))
        return {"not_told": "nothing of it is released"} if answer is None else answer[0]

    questions: dict[str, Callable[[ControlClient], Any]] = {
        "status.json": lambda client: released_state(client.snapshot().state),
        "audit_status.json": audit,
        "log.json": lambda client: client.query("logs", {"lines": LOG_LINES}),
    }
    with ControlClient(daemon.socket, timeout_seconds=SECONDS_EACH) as client:
        return {name: _told(partial(ask, client)) for name, ask in questions.items()}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _told(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except FedSiloError as error:  # of its text nothing is known, so only the code
        return {"not_told": error.code}
    except (OSError, ValueError) as error:
        return {"not_told": type(error).__name__}


def _write(out: Path, parts: Mapping[str, str]) -> None:
    """In one step, mode 0600. Raises ConflictError: it came to be meanwhile."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in parts.items():
            entry = tarfile.TarInfo(f"fedsilo-bundle/{name}")  # owner and names of this machine's users stay out
            entry.size, entry.mode, entry.mtime = len(text.encode()), 0o644, int(time.time())
            archive.addfile(entry, io.BytesIO(text.encode()))
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConflictError(f"{out} exists", hint="name a new file") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(packed.getvalue())


_README = f"""\
Diagnostics of FedSilo, made by `fedsilo bundle`. Each file is JSON; `not_told` says why something is missing.

Left out on purpose: prompts, answers, tensors, keys, certificates, file contents, quoted words of log lines, values of
`data`, `identity`, `model` and `control` (they read {SET_SHOWN}), and absolute paths (they read {PATH_SHOWN}).
In it are names of silos and runs, times, versions and limits of the configuration. Read it before you pass it on.
"""

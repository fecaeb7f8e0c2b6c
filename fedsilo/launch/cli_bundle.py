"""`fedsilo bundle`: what somebody who helps needs to see, in one file that may be shared.

It holds versions, the findings of `doctor`, settings with their origins, the released part of the daemon's state and of
its audit status, the daemon's own log lines, and reports of faults of ours. It holds no prompt, answer, tensor or key.
Of settings only numbers, switches and the words in `SHOWN_TEXTS` are told. From the beginning of a path on, the rest of
a text or of its quotation is cut off, for a blank may stand in the path. Names of people in roles.yaml are taken out,
and where that file cannot be read, the log lines are left out. The daemon leaves quoted words out of its log lines
before it gives them away.

Does not stop: names of silos, runs, kinds and times, which tell who works with whom and when; the site's own numbers in
`settings`; a name of somebody whom roles.yaml does not have, or no longer; a relative path that begins with a name.
What is in the file is listed before it is written, and whoever shares it can read it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
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
PATH_SHOWN, SET_SHOWN, PERSON_SHOWN = "(path)", "(set)", "(person)"
# Where an absolute path begins, one from a home folder, or one from here or the folder above; not the slashes of a URL,
# of an identity or of a run's id.
_PATH = re.compile(r"(?<![\w./~-])(?:file:(?://)?)?(?:~[A-Za-z_][\w.-]*|~?/(?![/\s])|\.\.?/(?![\s])|[A-Za-z]:\\)")
_QUOTES = "'\"`"
_QUOTATION = re.compile(r"(?<!\w)(['\"`]).*\1(?!\w)")
QUOTATION_SHOWN = "(left out)"
_HIDDEN_BLOCKS = ("data.", "identity.", "model.", "control.")
# Of settings that are text: names that every message carries, and words of a fixed choice.
SHOWN_TEXTS = frozenset({
    "silo", "role", "federation", "coordinator", "site", "silos", "log_level", "log_format", "rollout.engine",
    "trainer.launch", "trainer.devices", "trainer.threads", "trainer.isolation", "expected.load", "expected.mixed_base",
    "expected.mixed_verifiers",
    "public.verifier", "held_out.verifier",
})  # fmt: skip
_PEOPLE_UNKNOWN = "roles.yaml was not read here, and log lines may name people"


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
    daemon, trouble = None, None
    try:
        daemon = chosen_daemon(context, socket, config)
    except UsageError as error:
        if sum([bool(context), socket is not None, config is not None]) > 1:
            raise
        # nothing is configured here, or it is wrong, which may be what help is needed with
        trouble = error if context or config else None
    parts = collected(daemon, config, trouble)
    if not json_output:
        for name, text in parts.items():
            sys.stderr.write(plain(f"{len(text.encode()):>8} bytes  {name}\n"))
    _write(out, parts)
    told = [f"{trouble.message}: the daemon was not asked, and the file says so"] if trouble is not None else []
    data = {
        "file": str(out),
        "bytes": out.stat().st_size,
        "holds": {name: len(text.encode()) for name, text in parts.items()},
    }
    emit(
        "bundle", data, json_output=json_output, warnings=told,
        text=f"wrote {out}, {data['bytes']} bytes; read it before you share it",
    )  # fmt: skip


def collected(
    daemon: Daemon | None, config: Path | None = None, trouble: UsageError | None = None
) -> dict[str, str]:  # fmt: skip
    """File name -> text of everything that goes in. Nothing is written.

    Args:
        daemon: to ask; None where none is known.
        config: that was named, if no daemon could be read from it.
        trouble: why none could be.
    """
    from fedsilo.launch.crash import reports_folder, versions
    from fedsilo.launch.doctor import findings

    config = config if daemon is None else daemon.config
    kind = (daemon.kind if daemon is not None else "") or "fedsilo"
    made: dict[str, Any] = {
        "versions.json": versions(),
        "doctor.json": _each_text([vars(each) for each in findings(kind, config)], _without_quotations),
        "settings.json": _told(lambda: _settings(config)),
    }
    if trouble is not None:
        said = {"not_told": trouble.code, "message": trouble.message, "hint": trouble.hint}
        made["configuration.json"] = _each_text(said, _without_quotations)
    people = None if config is None else _people(config)
    if daemon is not None:
        made |= _asked(daemon)
        if people is None:
            made["log.json"] = {"not_told": _PEOPLE_UNKNOWN}
    reports = sorted(reports_folder().glob("crash-*.json"))[-REPORTS_MAX:] if reports_folder().is_dir() else []
    made |= {f"crashes/{path.name}": _told(partial(_read, path)) for path in reports}
    known = _known_paths(daemon, config)
    parts = {
        name: json.dumps(without_people(without_paths(value, known), people or ()), indent=1) + "\n"
        for name, value in made.items()
    }
    return {"README": _README, **parts}


def without_paths(value: Any, known: Iterable[str] = ()) -> Any:
    """A JSON value in which paths read `(path)`.

    From where a path begins, the text is cut off up to the end of the quotation or line it stands in, for a path may
    hold blanks and any sign. What follows one of the known paths stays where a sign ends it.

    Args:
        value: of JSON; keys are treated like texts.
        known: paths as they are told in texts.
    """
    exact = sorted({each for each in known if len(each) > 1}, key=len, reverse=True)
    either = "|".join(map(re.escape, exact))
    pattern = re.compile(rf"(?<![\w./~-])(?:{either})(?=$|['\"`;,)]|:(?:\s|\d))", re.MULTILINE) if exact else None
    return _each_text(value, lambda text: _cut(pattern.sub(PATH_SHOWN, text) if pattern is not None else text))


def without_people(value: Any, people: Iterable[str]) -> Any:
    """A JSON value in which each of these names, as a word of its own in letters of either case, reads `(person)`."""
    names = sorted({name for name in people if name}, key=len, reverse=True)
    if not names:
        return value
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", re.IGNORECASE)
    return _each_text(value, lambda text: pattern.sub(PERSON_SHOWN, text))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def _without_quotations(text: str) -> str:
    """What is wrong in a configuration quotes it: from the first quotation mark to the last of its kind is left out."""
    return _QUOTATION.sub(QUOTATION_SHOWN, text)


def _cut(text: str) -> str:
    return "\n".join(map(_cut_line, text.split("\n")))


def _cut_line(row: str) -> str:
    told, start = "", 0
    while (found := _PATH.search(row, start)) is not None:
        told += row[start : found.start()] + PATH_SHOWN
        quote = _open_quote(row[: found.start()])
        end = re.search(rf"{quote}(?!\w)", row[found.end() :]) if quote else None
        if end is None:
            return told
        start = found.end() + end.start()
    return told + row[start:]


def _open_quote(before: str) -> str:
    """The quotation mark that is open at the end of this text, the last one opened; an apostrophe in a word is none."""
    opened: list[str] = []
    for at, character in enumerate(before):
        if character not in _QUOTES:
            continue
        if opened and opened[-1] == character:
            opened.pop()
        elif at == 0 or not before[at - 1].isalnum():
            opened.append(character)
    return opened[-1] if opened else ""


def _known_paths(daemon: Daemon | None, config: Path | None) -> list[str]:
    """Paths that findings and messages tell as they are."""
    from fedsilo.launch.contexts import contexts_path
    from fedsilo.launch.daemons import read_configuration

    found = [contexts_path(), *([] if daemon is None else [daemon.socket]), *([] if config is None else [config])]
    with contextlib.suppress(FedSiloError, OSError):
        if config is not None:
            read = read_configuration(config)[1]
            found += [place for name in ("state_dir", "policy") if isinstance(place := getattr(read, name, None), Path)]
    return [str(form) for each in found for form in (each, each.absolute())]


def _people(config: Path) -> list[str] | None:
    """Everybody in the roles.yaml that a configuration names; None where that cannot be read."""
    from certs.roles import load_roles
    from fedsilo.edge.identity_files import read_public
    from fedsilo.launch.daemons import read_configuration

    with contextlib.suppress(FedSiloError, OSError):
        files = getattr(read_configuration(config)[1], "identity", None)
        if files is not None:
            return list(load_roles(read_public(files.operators), str(files.operators)).people)
    return None


def _settings(config: Path | None) -> Any:
    from fedsilo.edge.site_files import settings_of
    from fedsilo.launch.daemons import read_configuration

    if config is None:
        return {"not_told": "no configuration file is known"}
    kind, read = read_configuration(config)
    rows = settings_of(read, config)
    for row in rows:
        if not _may_be_shown(row["key"], row["value"]):
            row["value"] = SET_SHOWN
        _, colon, number = row["origin"].rpartition(":")
        row["origin"] = f"{kind}.yaml:{number}" if colon else row["origin"]  # whatever its own name tells
    return {"kind": kind, "settings": rows}


def _may_be_shown(key: str, value: Any) -> bool:
    if value in (None, "", []):
        return True
    if key.startswith(_HIDDEN_BLOCKS):
        return False
    return isinstance(value, bool | int | float) or key in SHOWN_TEXTS


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

Left out on purpose: prompts, answers, tensors, keys, certificates, file contents, quoted words of log lines; every
setting that is text, but for names of silos, federation and coordinator and words of a fixed choice, and all values of
`data`, `identity`, `model` and `control` (they read {SET_SHOWN}); absolute paths and those from a home folder or from
`./` and `../`, with what follows them up to the end of the line or quotation (they read {PATH_SHOWN}); names of
people in roles.yaml (they read {PERSON_SHOWN}); what findings quote ({QUOTATION_SHOWN}). Without roles.yaml there are
no log lines.
In it are names of silos and runs, times, versions, limits and other numbers of the configuration, and the daemon's log
lines. A name that roles.yaml does not have may stand in them. Read it before you pass it on.
"""

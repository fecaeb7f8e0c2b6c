"""`fedsilo bundle`: what somebody who helps needs to see, in one file that may be shared.

`_README` is in that file, and says what is left out of the rest.

Does not stop: names of silos, runs, kinds and times, which tell who works with whom and when; the site's own numbers; a
name of somebody whom roles.yaml does not have; a relative path that begins with a name and does not stand in the
configuration. What is in the file is listed before it is written, and whoever shares it can read it.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli.daemons import ConfigOption, ContextOption, Daemon, SocketOption, chosen_daemon, read_configuration
from fedsilo.cli.output import emit, running
from fedsilo.files.durable import read_regular, write_private
from fedsilo.protocol.errors import ConflictError, FedSiloError, UsageError
from fedsilo.protocol.text import harmless

LOG_LINES, REPORTS_MAX, SECONDS_EACH = 200, 3, 10.0
LEFT_OUT, SET_SHOWN, PERSON_SHOWN = "(left out)", "(set)", "(person)"
# A quotation mark of any kind; the 's behind a word is none, where the word is too long to be a prefix as in rb's'.
_QUOTES = r"['\"`\u00ab\u00b4\u00bb\u2018-\u201f\u2039\u203a\u300c-\u300f\uff02\uff07]"
_QUOTATION = rf"(?!(?<=[^\W\d_]{{3}})['\u2019]s(?!\w|{_QUOTES})){_QUOTES}"
# An absolute path, one from a home folder, or one from here or the folder above; not the slashes of a URL, of an
# identity or of a run's id.
_PATH = r"file:|~[A-Za-z_]|~?/(?![/\s])|\.\.?/(?!\s)|[A-Za-z]:\\"
_TELLING_NOTHING = ("", "silo.yaml", "coordinator.yaml", "policy.yaml", "state")  # as paths: everybody's names
_HIDDEN_BLOCKS = ("data.", "identity.", "model.", "control.")
# Of settings that are text: names that every message carries, and words of a fixed choice.
SHOWN_TEXTS = {
    *("silo", "role", "federation", "coordinator", "site", "silos", "log_level", "log_format", "rollout.engine"),
    *("trainer.launch", "trainer.devices", "trainer.threads", "trainer.isolation", "public.verifier"),
    *("expected.load", "expected.mixed_base", "expected.mixed_verifiers", "held_out.verifier"),
}
_README = f"""\
Diagnostics of FedSilo, made by `fedsilo bundle`. Each file is JSON; `not_told` says why something is missing.

Left out on purpose: prompts, answers, tensors, keys, certificates, file contents; of each line all from the first path
or quotation on ({LEFT_OUT}); settings that are text, but for names of silos, federation and coordinator and words of a
fixed choice, and all of `data`, `identity`, `model` and `control` ({SET_SHOWN}); names of people in roles.yaml
({PERSON_SHOWN}). Without roles.yaml there are no log lines.
In it are names of silos and runs, times, versions, limits and other numbers of the configuration, and the daemon's log
lines. A name that roles.yaml does not have may stand in them. Read it before you pass it on.
"""


def bundle(
    out: Annotated[Path, typer.Option("--out", help="The new file, .tar.gz.")],
    context: ContextOption = "",
    socket: SocketOption = None,
    config: ConfigOption = None,
) -> None:
    """Diagnostics in one new file that may be shared: versions, doctor, settings, status, own log lines, audit status.

    Works without a daemon, and without a configuration: what could not be asked is named in it. Read it before you pass
    it on; README in it says what was left out.
    """
    daemon, told = None, []
    try:
        daemon = chosen_daemon(context, socket, config)
    except UsageError as error:
        if sum([bool(context), socket is not None, config is not None]) > 1:
            raise
        # nothing is configured here, or it is wrong, which may be what help is needed with
        told = [f"{error.message}: the daemon was not asked"] if context or config else []
    if out.exists():
        raise ConflictError(f"{out} exists", hint="name a new file")
    packed, holds = io.BytesIO(), dict[str, int]()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in collected(daemon, config).items():
            entry = tarfile.TarInfo(f"fedsilo-bundle/{name}")  # owner and names of this machine's users stay out
            entry.size = holds[name] = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    if not running().json_output:
        sys.stderr.writelines(harmless(f"{size:>8} bytes  {name}\n", lines=True) for name, size in holds.items())
    write_private(out, packed.getvalue())
    data = {"file": str(out), "bytes": out.stat().st_size, "holds": holds}
    text = f"wrote {out}, {data['bytes']} bytes; read it before you share it"
    emit(data, text, warnings=told)


def collected(daemon: Daemon | None, config: Path | None = None) -> dict[str, str]:
    """File name -> text of everything that goes in. Nothing is written. `config` is the one that was named, if no
    daemon could be read from it."""
    from fedsilo.cli.crash import reports_folder, versions
    from fedsilo.cli.doctor import findings

    typed, kind = (config, "") if daemon is None else (daemon.config, daemon.kind)
    config = typed and typed.absolute()
    made: dict[str, Any] = {
        "versions.json": versions(),
        "doctor.json": [vars(each) for each in findings(kind or "fedsilo", config)],
        "settings.json": _told(lambda: _settings(config)),
    }
    people = _told(lambda: _people(config))
    if daemon is not None:
        made |= _asked(daemon)
        if not isinstance(people, list):
            made["log.json"] = {"not_told": "roles.yaml was not read here, and log lines may name people"}
    for path in sorted(reports_folder().glob("crash-*.json"))[-REPORTS_MAX:]:
        made[f"crashes/{path.name}"] = _told(partial(lambda path: json.loads(path.read_text(encoding="utf-8")), path))
    names, paths = (found if isinstance(found, list) else [] for found in (people, _told(lambda: _typed_paths(config))))
    parts = {
        name: json.dumps(shareable(value, names, [str(typed or ""), *paths]), indent=1) + "\n"
        for name, value in made.items()
    }
    return {"README": _README, **parts}


def shareable(value: Any, people: Iterable[str] = (), paths: Iterable[str] = ()) -> Any:
    """A JSON value, keys too, whose lines are cut off where a path, one of these relative ones too, or a quotation
    begins, and in which each of these people's names, as a word of its own in letters of either case, reads `(person)`.
    Keys that have become alike are told apart by signs behind them."""
    known = "".join(rf"|{re.escape(path)}(?!\w)" for path in paths if path not in _TELLING_NOTHING)
    private = re.compile(rf"(?:{_QUOTATION}|(?<![\w./~-])(?:{_PATH}{known})).*")
    names = "|".join(map(re.escape, sorted(filter(None, people), key=len, reverse=True)))
    person = re.compile(rf"(?<!\w)(?:{names or '(?!)'})(?!\w)", re.IGNORECASE)

    def changed(each: Any) -> Any:
        if isinstance(each, Mapping):
            made: dict[Any, Any] = {}
            for key, inner in each.items():
                shown = changed(key)
                while shown in made:
                    shown = f"{shown}+"
                made[shown] = changed(inner)
            return made
        if isinstance(each, list | tuple):
            return [changed(inner) for inner in each]
        return person.sub(PERSON_SHOWN, private.sub(LEFT_OUT, each)) if isinstance(each, str) else each

    return changed(value)


def _typed_paths(config: Path | None) -> list[str]:
    """Relative paths as a configuration names them: each text with a slash, and its state folder and policy. One that
    is wrong in other respects is read too."""
    from fedsilo.protocol import strict_yaml

    read = {} if config is None else strict_yaml.load(read_regular(config), "").value
    texts = re.findall(r'"(?:unix:)?((?:[^"\\]|\\.)*)"', json.dumps(read, ensure_ascii=False, default=str))
    own = [read[key] for key in ("state_dir", "policy") if isinstance(read, Mapping) and isinstance(read.get(key), str)]
    return own + [text for text in texts if "/" in text and "://" not in text]


def _people(config: Path | None) -> list[str]:
    """Everybody in the roles.yaml that a configuration names. Raises UsageError: it names none."""
    from certs.roles import load_roles
    from fedsilo.files.identity_files import read_public

    files = getattr(read_configuration(config)[1], "identity", None) if config is not None else None
    if files is None:
        raise UsageError("no roles.yaml is known")
    return list(load_roles(read_public(files.operators), str(files.operators)).people)


def _settings(config: Path | None) -> Any:
    from fedsilo.control.answers import to_json
    from fedsilo.control.site_files import settings_of

    if config is None:
        return {"not_told": "no configuration file is known"}
    kind, read = read_configuration(config)
    rows = to_json(settings_of(read, config))
    for row in rows:
        shown = isinstance(row["value"], bool | int | float) or row["key"] in SHOWN_TEXTS
        if row["value"] not in (None, "", []) and (row["key"].startswith(_HIDDEN_BLOCKS) or not shown):
            row["value"] = SET_SHOWN
        _, colon, number = row["origin"].rpartition(":")
        row["origin"] = f"{kind}.yaml:{number}" if colon else row["origin"]  # whatever its own name tells
    return {"kind": kind, "settings": rows}


def _asked(daemon: Daemon) -> dict[str, Any]:
    """Return the daemon's answers as far as they may be shared, or why there is none."""
    from console.sharing import released_answer, released_state
    from fedsilo.control.client import ControlClient

    nothing = ({"not_told": "nothing of it is released"},)
    with ControlClient(daemon.socket, timeout_seconds=SECONDS_EACH) as client:
        audit = partial(client.query, "audit.status", {})
        return {
            "status.json": _told(lambda: released_state(client.snapshot().state)),
            "audit_status.json": _told(lambda: (released_answer("audit.status", {}, audit()) or nothing)[0]),
            "log.json": _told(lambda: client.query("logs", {"lines": LOG_LINES})),
        }


def _told(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except FedSiloError as error:  # of its text nothing is known, so only the code
        return {"not_told": error.code}
    except (OSError, ValueError) as error:
        return {"not_told": type(error).__name__}

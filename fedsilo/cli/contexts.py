"""Contexts: the daemons that one person works with, by name, kept in a small YAML file of that person.

    current: prod
    contexts:
      prod:
        kind: silo
        site: hospital_a
        socket: /var/lib/fedsilo/hospital_a/control.sock
        config: /etc/fedsilo/hospital_a/silo.yaml
        operator_certificate: /home/alice/alice.crt
        operator_key: /home/alice/alice.key

`kind` and `socket` are needed, `site` too for a silo; the rest may be left out. Relative paths count from the file.
The file names keys by their path and holds none.

Does not stop: whoever may write the file chooses which daemon a name stands for. So it is refused unless it is the
person's own and nobody else may write it; and a console that is attached to a silo refuses to sign for another site
than the one named here.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedsilo.cli.output import running
from fedsilo.files.durable import make_private_directory, require_authority, write_durably
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.errors import NotFoundError, OperationError, UsageError

FILE_MODE = 0o600
BYTES_MAX = 1 << 20
VARIABLE = "FEDSILO_CONTEXTS"
KINDS = ("silo", "coordinator")
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME = re.compile(NAME_PATTERN, re.ASCII)
FORM = "silo:NAME=SOCKET, coordinator=SOCKET, LABEL=silo:NAME=SOCKET, or the name of one that is kept"


@dataclass(frozen=True)
class ContextEntry:
    """A daemon that a context names.

    Attributes:
        name: as it is typed and shown.
        kind: silo or coordinator.
        socket: control socket of the daemon; it need not be there.
        site: the silo's name; empty for a coordinator.
        config: its silo.yaml or coordinator.yaml; None where that is not told.
        operator_certificate: of the person who signs there.
        operator_key: to it.
        place: FILE:LINE; empty for one that was given on the command line.
    """

    name: str
    kind: str
    socket: Path
    site: str = ""
    config: Path | None = None
    operator_certificate: Path | None = None
    operator_key: Path | None = None
    place: str = ""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["silo", "coordinator"]
    socket: str = Field(min_length=1)
    site: str = ""
    config: str | None = Field(default=None, min_length=1)
    operator_certificate: str | None = Field(default=None, min_length=1)
    operator_key: str | None = Field(default=None, min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    current: str = ""
    contexts: dict[str, _Entry] = Field(default_factory=dict)


def contexts_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where the file lies: $FEDSILO_CONTEXTS, else below $XDG_CONFIG_HOME (XDG Base Directory), else below ~/.config.

    Args:
        environment: of the process, by default.

    Returns:
        An absolute path: a relative one counts from the working folder, and paths in the file count from the file's.
    """
    known = os.environ if environment is None else environment
    if named := known.get(VARIABLE):
        return Path(named).absolute()
    # the XDG specification has a relative path ignored
    base = known.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "fedsilo" / "contexts.yaml"


def contexts(path: Path | None = None) -> Mapping[str, ContextEntry]:
    """Every context of the file, by name, in its order; none without a file.

    Raises:
        UsageError: FILE:LINE of what is wrong. NotAllowedError: others may write it. OperationError: unreadable.
    """
    return _read((path or contexts_path()).absolute())[0]


def current_context(path: Path | None = None) -> str:
    """The name of the context that is used when none is named; empty without one. Raises as `contexts`."""
    return _read(path or contexts_path())[1]


def context_named(name: str, path: Path | None = None) -> ContextEntry:
    """Return one context of the file.

    Raises:
        NotFoundError: none is called that; the hint names those that are. Else as `contexts`.
    """
    file = path or contexts_path()
    known = contexts(file)
    if name not in known:
        there = f"kept in {file}: {', '.join(known)}" if known else f"{file} keeps none"
        raise NotFoundError(f"there is no context {name!r}", hint=f"{there}; given ones have the form {FORM}")
    return known[name]


def write(entries: Mapping[str, ContextEntry], current: str = "", path: Path | None = None) -> Path:
    """Replace the file in one step, mode 0600; its folder is made with mode 0700 if it is not there.

    Returns:
        Where it lies.

    Raises:
        UsageError: a name, a path or `current` that could not be read back. OperationError: the disk refused.
    """
    file = (path or contexts_path()).absolute()
    text = _text_of(entries, current)
    _parse(text.encode(), file)
    if not file.parent.is_dir():
        make_private_directory(file.parent)
    write_durably(file, text.encode(), FILE_MODE)
    return file


@contextmanager
def changing(path: Path | None = None) -> Iterator[None]:
    """Around reading the file, changing what was read and writing it back: one process at a time does so.

    The lock is on a file beside it, as the file itself is replaced. Whoever comes second waits, which takes as long as
    the first one reads and writes a small file. Readers need no lock, as the file is replaced in one step; a dry run
    takes none, as it writes nothing.

    Does not stop: an editor, or a network disk on which the kernel's locks do not hold.

    Raises:
        OperationError: the lock's file cannot be made.
    """
    if running().dry_run:
        yield
        return
    file = path or contexts_path()
    if not file.parent.is_dir():
        make_private_directory(file.parent)
    beside = file.with_name(f".{file.name}.lock")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise OperationError(f"cannot open lock file {beside}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def context_given(text: str, path: Path | None = None) -> ContextEntry:
    """Parse the value of `--context`: a daemon with or without a label, or the name of a stored one.

    The label is what stands before the first `=`: `prod=silo:hospital_a=SOCKET` is called prod, and
    `silo:hospital_a=SOCKET` silo:hospital_a.

    Raises:
        UsageError: another form. NotFoundError: no such name. Else as `contexts`.
    """
    label, equals, rest = text.partition("=")
    if not equals:
        return context_named(text, path)
    given = text if label == "coordinator" or label.startswith("silo:") else rest
    head, equals, socket = given.partition("=")
    kind, _, site = head.partition(":")
    fits = equals and socket and kind in KINDS and (kind == "silo") == bool(site)
    if not fits or (given is rest and not _NAME.fullmatch(label)):
        hint = "fedconsole --context silo:hospital_a=/var/lib/fedsilo/hospital_a/control.sock"
        raise UsageError(f"context {text!r} is none of: {FORM}", hint=hint)
    return ContextEntry(label, kind, Path(socket), site)


def _read(file: Path) -> tuple[dict[str, ContextEntry], str]:
    try:
        require_authority(file)
        with file.open("rb") as stream:
            text = stream.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        raise OperationError(f"cannot read {file}: {error.strerror}") from error
    return _parse(text, file)


def _parse(text: bytes, file: Path) -> tuple[dict[str, ContextEntry], str]:
    document = strict_yaml.load(text, str(file))
    found = strict_yaml.validate(_File, document)
    entries: dict[str, ContextEntry] = {}
    for name, entry in found.contexts.items():
        place = document.place(("contexts", name))
        if not _NAME.fullmatch(name):
            raise UsageError(f"{place}: a context cannot be called {name!r}", hint=f"names match {NAME_PATTERN}")
        if (entry.kind == "silo") != bool(entry.site):
            wrong = "has no site" if entry.kind == "silo" else "is of no site: a coordinator serves several"
            raise UsageError(f"{place}: context {name!r} {wrong}", hint="site: the silo's name; for silos only")
        if (entry.operator_certificate is None) != (entry.operator_key is None):
            raise UsageError(f"{place}: operator_certificate and operator_key go together", hint="name both, or none")
        entries[name] = ContextEntry(
            name,
            entry.kind,
            file.parent / entry.socket,
            entry.site,
            _below(file, entry.config),
            _below(file, entry.operator_certificate),
            _below(file, entry.operator_key),
            place,
        )
    if found.current and found.current not in entries:
        hint = f"one of {', '.join(entries)}" if entries else "leave it out"
        raise UsageError(f"{document.place(('current',))}: there is no context {found.current!r}", hint=hint)
    return entries, found.current


def _below(file: Path, path: str | None) -> Path | None:
    return None if path is None else file.parent / path


def _text_of(entries: Mapping[str, ContextEntry], current: str) -> str:
    rows = ["# Written by `fedsilo context`. Paths name files; no key is kept here.\n"]
    if current:
        rows.append(f"current: {_quoted(current)}\n")
    rows.append("contexts:\n" if entries else "contexts: {}\n")
    for name, entry in entries.items():
        rows.append(f"  {_quoted(name)}:\n")
        fields = {
            "kind": entry.kind,
            "site": entry.site,
            "socket": entry.socket,
            "config": entry.config,
            "operator_certificate": entry.operator_certificate,
            "operator_key": entry.operator_key,
        }
        rows += [f"    {field}: {_quoted(str(value))}\n" for field, value in fields.items() if value]
    return "".join(rows)


def _quoted(text: str) -> str:
    """A double-quoted YAML scalar: JSON's, which YAML reads alike as long as every character may stand in YAML."""
    if not text.isprintable():
        raise UsageError(f"{text!r} has a character in it that cannot be shown", hint="choose another name or path")
    return json.dumps(text, ensure_ascii=False)

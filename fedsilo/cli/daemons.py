"""The daemon or configuration file that a command is about, and commands that a person signs for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fedsilo.cli.output import running
from fedsilo.files.durable import read_regular
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import ConflictError, NotFoundError, UsageError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from pydantic import BaseModel

    from coordinator.config import CoordinatorConfig
    from fedsilo.control.client import ControlClient, Operator
    from silo.config import SiloConfig

Kind = Literal["silo", "coordinator", "policy"]
DEFAULTS: Mapping[str, Path] = {"silo": Path("silo.yaml"), "coordinator": Path("coordinator.yaml")}
_HINT = "--context NAME, --socket PATH or --config silo.yaml|coordinator.yaml"
# A key that only this kind of file has.
_KEYS: Mapping[Kind, str] = {"silo": "silo", "coordinator": "silos", "policy": "egress"}

ContextOption = Annotated[
    str, typer.Option("--context", help="A kept context, or silo:NAME=SOCKET or coordinator=SOCKET.")
]
SocketOption = Annotated[Path | None, typer.Option("--socket", help="Control socket of the daemon.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="silo.yaml or coordinator.yaml. Default: the current context, else the one here."),
]


@dataclass(frozen=True)
class Daemon:
    """`kind` and `site` are empty, and `config` None, where that is not told. `context`: name of the one that chose it;
    empty where a file or a socket did."""

    socket: Path
    kind: str = ""
    site: str = ""
    config: Path | None = None
    context: str = ""

    def connect(self) -> ControlClient:
        """Raises ConflictError: another party than its context names answers. UnreachableError: nobody does."""
        from fedsilo.control.client import ControlClient

        client = ControlClient(self.socket)
        try:
            self._require_same(client)
        except BaseException:
            client.close()
            raise
        return client

    def _require_same(self, client: ControlClient) -> None:
        """A socket may be another daemon's by now, and a context name on the screen would then name the wrong party."""
        if not self.context:
            return
        state = client.snapshot().state
        silo = str(state.get("silo", ""))
        same = self.kind == ("silo" if silo else "coordinator") and self.site == silo
        if same or not state:  # one that has only begun says nothing yet
            return
        raise ConflictError(
            f"context {self.context!r} is {' '.join(filter(None, (self.kind, self.site)))}, and {party_text(state)} "
            f"answers at {self.socket}",
            hint=f"fedsilo context add {self.context} --force --config FILE, of the daemon that it is to be",
            code="WRONG_DAEMON",
        )


def party_text(state: Mapping[str, Any]) -> str:
    """Whose state it is: a silo by its name, a coordinator by its federation's and its own."""
    if state.get("silo"):
        return f"silo {state['silo']}"
    return f"coordinator {state.get('federation', '')}/{state.get('coordinator', '')}"


def chosen_daemon(context: str = "", socket: Path | None = None, config: Path | None = None) -> Daemon:
    """Return the daemon that is named, else the current context's, else that of the configuration file in this folder.

    Raises:
        UsageError: more than one is named, or none is and none is found; a wrong file. NotFoundError: no such context.
    """
    if sum([bool(context), socket is not None, config is not None]) > 1:
        raise UsageError("one daemon, please", hint=_HINT)
    if socket is not None:
        return Daemon(socket)
    if (daemon := context_daemon("", context, config)) is not None:
        return daemon
    path = config or next((each for each in DEFAULTS.values() if each.exists()), None)
    if path is None:
        raise UsageError("which daemon?", hint=_HINT)
    kind, read = read_configuration(path)
    if kind == "silo":
        silo = cast("SiloConfig", read)
        return Daemon(silo.control.socket, kind, silo.silo, path)
    if kind == "coordinator":
        return Daemon(cast("CoordinatorConfig", read).control.socket, kind, config=path)
    raise UsageError(f"{path} is a policy: it names no daemon", hint=_HINT)


def context_daemon(kind: str, context: str, config: Path | None, *, here: Path | None = None) -> Daemon | None:
    """The daemon of the context that is named or, where no file is either, of the current one; None: a file decides.

    Args:
        kind: silo or coordinator, of which the daemon must be; empty for either. A current context of the other kind
            is passed over, since `fedsilo context use` chooses for both programs.
        context: that was named; or empty.
        config: that was named; or None.
        here: a file that, if it is there, goes before the current context, for a program whose other commands read it.

    Raises:
        UsageError: both are named, or a context of another kind is. NotFoundError: no such context.
    """
    from fedsilo.cli import contexts

    if context and config is not None:
        raise UsageError("--context and --config name two daemons", hint="give one of them")
    by_file = config is not None or (not context and here is not None and here.exists())
    if by_file or not (name := context or contexts.current_context()):
        return None
    entry = contexts.context_given(name) if context else contexts.context_named(name)
    if kind and entry.kind != kind:
        if not context:
            return None
        hint = f"{entry.kind} status --context {name}"
        raise UsageError(f"context {name!r} is a {entry.kind}, not a {kind}", hint=hint)
    return Daemon(entry.socket, entry.kind, entry.site, entry.config, entry.name)


def kind_of(path: Path) -> Kind:
    """What a file is, by a key that only its kind has. Raises UsageError: none of the three. NotFoundError."""
    from fedsilo.protocol.strict_yaml import load

    value = load(read_regular(path), str(path)).value
    keys = set(value) if isinstance(value, Mapping) else set()
    for kind, key in _KEYS.items():
        if key in keys:
            return kind
    wanted = ", ".join(f"{key} ({kind})" for kind, key in _KEYS.items())
    raise UsageError(f"{path} is no silo.yaml, coordinator.yaml or policy", hint=f"its keys have none of: {wanted}")


def read_configuration(path: Path) -> tuple[Kind, BaseModel]:
    """The file, judged as the daemon judges it. Raises UsageError with FILE:LINE. NotFoundError."""
    kind = kind_of(path)
    if kind == "silo":
        from silo.config import load_config

        return kind, load_config(path)
    if kind == "coordinator":
        from coordinator.config import load_config as load_coordinator

        return kind, load_coordinator(path)
    from policies.load import load_policy

    return kind, load_policy(path.read_bytes(), str(path)).own.file


# ---- one site, or the coordinator ------------------------------------------------------------------------------------


SILO_YAML, COORDINATOR_YAML = Path("silo.yaml"), Path("coordinator.yaml")
SiloOption = Annotated[Path, typer.Option("--config", help="The site's configuration file.")]
CoordinatorOption = Annotated[Path, typer.Option("--config", help="coordinator.yaml.")]
OperatorOption = Annotated[
    str, typer.Option("--operator", help="Who signs: id/NAME.crt and id/NAME.key beside the site's own certificate.")
]
RequestOption = Annotated[
    str, typer.Option("--request-id", help="Give the same again to repeat a request without doing it twice.")
]


def load_site(path: Path) -> SiloConfig:
    from silo.config import load_config

    return load_config(path)


def client_of(config: SiloConfig) -> ControlClient:
    from fedsilo.control.client import ControlClient

    return ControlClient(config.control.socket)


def silo_query(config: Path, query: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of a running silo."""
    with client_of(load_site(config)) as client:
        return client.query(query, arguments)


def coordinator_client(config: Path, socket: Path | None = None) -> ControlClient:
    """Client of the coordinator behind a socket, by default of the one that its configuration names."""
    from coordinator.config import load_config
    from fedsilo.control.client import ControlClient

    return ControlClient(socket or load_config(config).control.socket)


def coordinator_query(config: Path, query: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of a running coordinator."""
    with coordinator_client(config) as client:
        return client.query(query, arguments)


def operator_of(site: SiloConfig, name: str) -> Operator:
    """A person of a site, whose certificate and key lie beside the site's own."""
    from fedsilo.control.client import Operator

    folder = site.identity.certificate.parent
    return Operator(site.silo, folder / f"{name}.crt", folder / f"{name}.key", site.federation)


def silo_command(config: SiloConfig, operator: str, name: str, arguments: Mapping[str, Any], request_id: str) -> Any:
    """Carry out a command as a person; what the daemon answered."""
    from fedsilo.control.client import sign_as

    folder = config.identity.certificate.parent
    if not (folder / f"{operator}.crt").exists():
        keys = (path.stem for path in folder.glob("*.key"))
        people = ", ".join(sorted(name for name in keys if name != config.silo and (folder / f"{name}.crt").exists()))
        raise NotFoundError(
            f"{folder / operator}.crt does not exist", hint=f"there are keys of: {people or 'nobody'} (--operator NAME)"
        )
    signed = sign_as(operator_of(config, operator), name, arguments, request_id=request_id)
    with client_of(config) as client:
        return client.execute(signed)


def coordinator_command(
    config: Path, operator: str, name: str, arguments: Mapping[str, Any], request_id: str, socket: Path | None = None
) -> Any:
    """Sign a command as a person of the coordinator's site and carry it out. `operator` is a person whose certificate
    lies beside the coordinator's own, or the path of a certificate; with a path and a socket, `config` is not read."""
    from coordinator.config import load_config
    from fedsilo.control.client import Operator, sign_as

    certificate = Path(operator)
    with coordinator_client(config, socket) as client:
        if certificate.suffix == ".crt":
            state = client.snapshot().state
            site, federation = state["site"], state["federation"]
        else:
            read = load_config(config)
            site, federation = read.site, read.federation
            certificate = read.identity.certificate.parent / f"{operator}.crt"
        person = Operator(site, certificate, certificate.with_suffix(".key"), federation)
        return client.execute(sign_as(person, name, arguments, request_id=request_id))


# ---- what is shown and typed back ------------------------------------------------------------------------------------


CHARACTERS = 4


def require_terminal(options: str, hint: str) -> None:
    """Check that a person can be asked. Raises UsageError: nobody can, and `options` were not given."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(f"without a terminal this needs {options}", hint=hint)


def type_back(digest: str) -> None:
    """Ask for the end of what stands on the screen. Raises UsageError: something else was typed."""
    if typer.prompt(f"type its last {CHARACTERS} characters").strip().lower() != digest[-CHARACTERS:]:
        raise UsageError(
            f"these are not the last {CHARACTERS} characters of what stands above",
            hint="nothing was changed; ask again",
        )


def confirm(digest: str, expected: str, shown: str, *, hint: str) -> None:
    """Nobody signs what was not shown.

    Args:
        digest: of what is there now.
        expected: what the person names; empty: it is shown and typed back.
        shown: text.
        hint: where the digest is found.

    Raises:
        ConflictError: another digest was named (STALE_VIEW).
        UsageError: none was named and there is no terminal, or something else was typed.
    """
    if expected:
        if expected.removeprefix("sha256:") != digest:
            raise ConflictError(f"what is there now has the digest {digest}", hint="read it again", code="STALE_VIEW")
        return
    if running().json_output:  # nothing but JSON may be printed, so nobody can be asked
        raise UsageError("with --json this needs --expect-digest", hint=hint)
    require_terminal("--expect-digest", hint)
    typer.echo(harmless(f"{shown}\nsha256:{digest}", lines=True))
    type_back(digest)


def clock_now() -> str:
    """A line on this machine's clock, as it is accepted."""
    return f"this machine's clock shows {utc(time.time())}: that is what is accepted"

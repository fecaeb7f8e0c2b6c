"""Where the guard waits for its trainer, who may come, and what a person starts to make it come.

A child dials a unix socket inside its walls. An external trainer (a container, a batch job, a pod) is started by
somebody else with `start_command`, again for every run: it ends when the guard tells it to, so whoever starts it starts
it anew (`Restart=always`, a loop in the job). It dials a unix socket, where the kernel tells whose process it is, or
`tls:HOST:PORT` of this machine, where it shows a trainer's certificate of the site CA.

What a TLS address costs: the guard listens on a port (B2 otherwise: a silo opens none). It does so only while it waits
for a trainer, and believes nobody without this site's certificate; bind it to an address inside the site.

What it does not stop: a process that holds the trainer's key, or runs as the trainer's user, may come in its place and
answer the probes as it likes; the rung of an external trainer is what its probes answered, and no more.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from certs.encoding import public_key_bytes, read_one_certificate
from fedsilo.files.disk_space import require_space
from fedsilo.files.durable import DiskFullError
from fedsilo.files.identity_files import read_public
from fedsilo.protocol.errors import NotAllowedError, OperationError, UsageError
from fedsilo.protocol.text import harmless
from silo.config import SiloConfig
from silo.guard import isolation
from silo.guard.isolation_controls import NO_CONTROLS, Controls, candidates, named
from silo.link import Listener, host_and_port, user_name
from silo.link_tls import LinkFiles, LinkTls

# fields of the `probe` message that name paths, and the probe that tries them
_PATHS_TRIED = {"key_paths": "key_files", "identity_folder": "identity_folder", "control_socket": "control_socket"}


def listen(config: SiloConfig) -> Listener:
    """Open the address.

    Raises:
        OperationError: it cannot be listened on.
        UsageError: `trainer.user` is nobody here.
        NotFoundError, NotAllowedError: the guard's link certificate or key is missing or wrong.
    """
    trainer = config.trainer
    if trainer.address.startswith("tls:"):
        return Listener(trainer.address, user_ids=frozenset(), tls=link_tls(config))
    users = allowed_users(config)
    folder = _socket_path(config).parent
    # Another user must be able to pass through to the socket, not to list the folder.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700 if users == {os.getuid()} else 0o711)
    return Listener(trainer.address, user_ids=users)


def link_tls(config: SiloConfig) -> LinkTls:
    """The guard's end of the link, read afresh. Raises NotFoundError, NotAllowedError."""
    files = config.identity
    if files.link_certificate is None or files.link_key is None:
        raise UsageError("a tls: address needs identity.link_certificate and identity.link_key")
    federation_key = public_key_bytes(read_one_certificate(read_public(files.certificate), what=str(files.certificate)))
    link = LinkTls(
        LinkFiles(files.link_certificate, files.link_key, files.site_ca),
        "guard",
        peer_name=config.trainer.name,
        refused_keys=frozenset({federation_key}),
    )
    if link.own.key_bytes == federation_key:
        raise NotAllowedError(
            f"{files.link_key} is the federation's key; the link to the trainer has a key of its own",
            hint="`fedsilo certs request` makes one",
        )
    return link


def allowed_users(config: SiloConfig) -> frozenset[int]:
    """Whose processes may connect over the unix socket. Raises UsageError: no such user."""
    user = config.trainer.user
    if user is None:
        return frozenset({os.getuid()})
    if user.isdecimal():
        return frozenset({int(user)})
    try:
        return frozenset({pwd.getpwnam(user).pw_uid})
    except KeyError as error:
        raise UsageError(
            f"trainer.user: no user {user!r} on this machine",
            hint="a container's user is given as the number that this machine sees",
        ) from error


def start_command(config: SiloConfig) -> str:
    """What somebody types where the external trainer runs."""
    trainer = config.trainer
    python = trainer.python or Path(sys.executable)
    command = f"{python} -P -m silo.trainer.worker --address {trainer.address}"
    if trainer.address.startswith("tls:"):
        name = trainer.name or "trainer"
        command += f" --certificate {name}.crt --key {name}.key --site-ca site_ca.crt"
    return command


def log_of(config: SiloConfig) -> Path:
    """What trainers that the guard starts write, one after the other."""
    return config.state_dir / "logs" / "trainer.log"


def last_words(config: SiloConfig, begins: int) -> str:
    """The last line of a child's log from a place on, for a local message only: it may hold anything (T8)."""
    if config.trainer.launch == "external":
        return ""
    try:
        with log_of(config).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begins, end - 4096))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return f": {harmless(lines[-1], 300)}" if lines else ""


def where_it_tells(config: SiloConfig) -> str:
    """Where to look for what a trainer said before it ended, and whether there was space for it."""
    if config.trainer.launch == "external":
        return "see its own output, where it was started"
    told = f"see {log_of(config)}"
    try:
        require_space(config.state_dir)
    except DiskFullError as error:
        return f"{told}, where little can have been written: {error.message}"
    except OperationError:
        pass  # a hint is no place for another fault
    return told


def probe_fields(config: SiloConfig, guard_process: int) -> dict[str, Any]:
    """What the probes try to reach from inside the trainer's walls. A path may be shared by hosts; a process is not."""
    keys = [path for path in (*key_files(config), config.identity.link_key) if path is not None]
    fields: dict[str, Any] = {
        "key_paths": [str(path) for path in keys],
        "control_socket": str(config.control.socket),
    }
    if config.trainer.address.startswith("unix:"):
        fields["guard_pid"] = guard_process
    return fields


@contextlib.contextmanager
def probe_fields_beside_the_daemon(config: SiloConfig, guard_process: int) -> Iterator[dict[str, Any]]:
    """`probe_fields` for a trainer that another process than the daemon starts: its control socket may be missing."""
    with isolation.control_socket_to_try(config.control.socket, config.control.group) as control:
        yield {**probe_fields(config, guard_process), "control_socket": str(control)}


def only_what_exists(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without paths where nothing is: "no such file" would be said there without any wall."""
    kept = dict(fields)
    for name in _PATHS_TRIED:
        value = fields.get(name)
        if isinstance(value, list):
            kept[name] = [path for path in value if Path(path).exists()]
        elif value and not Path(value).exists():
            del kept[name]
    return kept


def believable(probes: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The probes' results without those whose paths went away meanwhile. fields: of `only_what_exists`, before."""
    remain = only_what_exists(fields)
    gone = {probe for name, probe in _PATHS_TRIED.items() if remain.get(name) != fields.get(name)}
    return {name: result for name, result in probes.items() if name not in gone}


def key_files(config: SiloConfig) -> list[Path]:
    proxy = config.coordinator.proxy_credentials
    return [config.identity.key, config.identity.signing_key, *([] if proxy is None else [proxy])]


def controls(config: SiloConfig) -> Controls:
    """What answers the guard at this moment and must not answer an external trainer; some seconds where nobody does.

    Beside the coordinator and the name servers these are the addresses of `trainer.must_not_reach`.
    """
    trainer = config.trainer
    if trainer.launch == "child" or trainer.isolation == "waived":
        return NO_CONTROLS
    same_machine = trainer.address.startswith("unix:")
    found = candidates(*host_and_port(config.coordinator.first_hop), same_machine=same_machine)
    return found.and_also(named(trainer.must_not_reach)).still_answering()


def rung_got(config: SiloConfig, built: str, probes: dict[str, Any], answering: Controls = NO_CONTROLS) -> str:
    """The rung to report. An external trainer has a container where every probe was refused, else nothing.

    Args:
        config: the site.
        built: for a child, the rung that was built around it.
        probes: what it answered to the probes.
        answering: the `controls` that also answered the guard after the probes.
    """
    if config.trainer.launch == "child":
        return isolation.rung_really_got(built, probes)
    if config.trainer.isolation == "waived":
        return "waived"
    return isolation.rung_really_got("container", probes, answering)


def check(config: SiloConfig) -> str:
    """For `silo check`: whether an external trainer can come. Binds a TLS port for a moment; connects nowhere.

    Raises:
        UsageError, NotFoundError, NotAllowedError, OperationError: why it cannot.
    """
    if config.trainer.address.startswith("tls:"):
        link = link_tls(config)
        Listener(config.trainer.address, user_ids=frozenset(), tls=link).close()
        whom = f"trainer/{config.trainer.name}" if config.trainer.name else "any trainer"
        return (
            f"{config.trainer.address} as {link.own.spiffe_id} until {link.own.not_after:%Y-%m-%dT%H:%M:%SZ}; "
            f"{whom} of site {link.own.site} may connect"
        )
    users = allowed_users(config)
    _check_passage(_socket_path(config).parent, users)
    return f"{config.trainer.address}; {' or '.join(map(user_name, sorted(users)))} may connect"


def _socket_path(config: SiloConfig) -> Path:
    return Path(config.trainer.address.partition(":")[2])


def _check_passage(folder: Path, users: frozenset[int]) -> None:
    """Another user must be let through every folder that exists on the way. Raises UsageError: one bars it."""
    if users <= {os.getuid(), 0}:
        return
    for place in (folder, *folder.parents):
        if not place.is_dir():
            continue
        status = place.stat()
        if not status.st_mode & stat.S_IXOTH and status.st_uid not in users:
            raise UsageError(
                f"trainer.user: {' or '.join(map(user_name, sorted(users)))} cannot pass through {place} "
                f"(mode {stat.S_IMODE(status.st_mode):04o}) to the trainer's socket",
                hint="put the socket outside of state_dir, such as unix:/run/fedsilo/trainer.sock",
            )

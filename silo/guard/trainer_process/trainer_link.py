"""Where the guard waits for its trainer, which trainers may connect, and what a person starts to make one connect.

What goes over the link is in `silo.link`, and `supervisor` sends and receives it.

A child dials a unix socket inside its sandbox. An external trainer (a container, a batch job, a pod) is started by
somebody else with `start_command`, again for every run: it ends when the guard tells it to, so whoever starts it starts
it anew (`Restart=always`, a loop in the job). It dials a unix socket, where the kernel tells whose process it is, or
`tls:HOST:PORT` of this machine, where it shows a trainer's certificate of the site CA.

What a TLS address costs: the guard listens on a port (B2 otherwise: a silo opens none). It does so only while it waits
for a trainer, and believes nobody without this site's certificate; bind it to an address inside the site.

What it does not stop: a process that holds the trainer's key, or runs as the trainer's user, may come in its place and
answer the probes as it likes; the isolation level of an external trainer is what its probes answered, and no more.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from pathlib import Path

from certs.encoding import public_key_bytes, read_one_certificate
from fedsilo.files.durable import DiskFullError, require_space
from fedsilo.files.identity_files import read_public
from fedsilo.protocol.errors import NotAllowedError, OperationError, UsageError
from fedsilo.protocol.text import harmless
from silo.config import SiloConfig
from silo.link import Listener, user_name
from silo.link_tls import LinkFiles, LinkTls


def listen(config: SiloConfig) -> Listener:
    """Open the address.

    Raises:
        OperationError: it cannot be listened on.
        UsageError: `trainer.user` is nobody here.
        NotFoundError, NotAllowedError: the guard's link certificate or key is missing or wrong.
    """
    trainer = config.trainer
    if trainer.unix_path is None:
        return Listener(trainer.address, user_ids=frozenset(), tls=link_tls(config))
    users = allowed_users(config)
    folder = trainer.unix_path.parent
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
    """Return whose processes may connect over the unix socket. Raises UsageError: no such user."""
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
    """Return what somebody types where the external trainer runs."""
    trainer = config.trainer
    python = trainer.python or Path(sys.executable)
    command = f"{python} -P -m silo.trainer.worker --address {trainer.address}"
    if trainer.unix_path is None:
        name = trainer.name or "trainer"
        command += f" --certificate {name}.crt --key {name}.key --site-ca site_ca.crt"
    return command


def log_of(config: SiloConfig) -> Path:
    """Return the log file of the trainers that the guard starts, one after the other."""
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
    """Say where to look for what a trainer wrote before it ended, and whether there was space for it."""
    if config.trainer.launch == "external":
        return "see its own output, where it was started"
    where = f"see {log_of(config)}"
    try:
        require_space(config.state_dir)
    except DiskFullError as error:
        return f"{where}, where little can have been written: {error.message}"
    except OperationError:
        pass  # a hint is no place for another fault
    return where


def check(config: SiloConfig) -> str:
    """For `silo check`: check that an external trainer can connect. Binds a TLS port for a moment; connects nowhere.

    Raises:
        UsageError, NotFoundError, NotAllowedError, OperationError: why it cannot.
    """
    if config.trainer.unix_path is None:
        link = link_tls(config)
        Listener(config.trainer.address, user_ids=frozenset(), tls=link).close()
        whom = f"trainer/{config.trainer.name}" if config.trainer.name else "any trainer"
        return (
            f"{config.trainer.address} as {link.own.spiffe_id} until {link.own.not_after:%Y-%m-%dT%H:%M:%SZ}; "
            f"{whom} of site {link.own.site} may connect"
        )
    users = allowed_users(config)
    _check_passage(config.trainer.unix_path.parent, users)
    return f"{config.trainer.address}; {' or '.join(map(user_name, sorted(users)))} may connect"


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

"""Every party of a federation that is only tried out, made in one place. The folder is there whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from certs.authority import DAEMON_LIFETIME_MAX
from certs.names import checked_name
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.durable import make_private_directory
from fedsilo.protocol.errors import ConflictError, OperationError, UsageError

COORDINATOR_FOLDER = "coordinator"
AUTHORITY_FOLDER = "federation_ca"
COORDINATOR = "main"
PEOPLE_OF_COORDINATOR = ("carol",)
PEOPLE_OF_SILO = ("alice", "bob")
# A silo's name is that of its folder, of its files in id/ and of its site: names that any of these has already.
RESERVED_NAMES = frozenset(
    {
        *(COORDINATOR_FOLDER, AUTHORITY_FOLDER, "site_ca", "guard", "trainer", COORDINATOR),
        *PEOPLE_OF_COORDINATOR,
        *PEOPLE_OF_SILO,
    }
)


def checked_silos(names: Sequence[str]) -> tuple[str, ...]:
    """The silos' names. Raises UsageError: none, not a name, one twice, or one that something else has."""
    silos = tuple(checked_name(name) for name in names)
    taken = sorted(RESERVED_NAMES.intersection(silos))
    if taken:
        raise UsageError(
            f"a silo cannot be called {taken[0]!r} here: the trial has something else of that name",
            hint=f"names that are taken: {', '.join(sorted(RESERVED_NAMES))}",
        )
    if not silos or len(set(silos)) != len(silos):
        raise UsageError("--silos names each silo once", hint="--silos hospital_a,hospital_b")
    return silos


def make_trial(
    federation: str, silos: Sequence[str], out: Path, *, dns_names: Sequence[str], ip_addresses: Sequence[str]
) -> None:
    """Make `out` with a folder for the federation CA, the coordinator and each silo.

    It is made beside `out` and renamed, so that a failure leaves nothing that a second try would stumble over.

    Args:
        federation: its name.
        silos: as `checked_silos` takes them.
        out: a folder that does not exist or is empty.
        dns_names: host names silos dial.
        ip_addresses: addresses silos dial.

    Raises:
        UsageError: a name that cannot be.
        ConflictError: `out` is not empty, or cannot be put there.
        OperationError: nothing can be made beside it.
    """
    names = checked_silos(silos)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConflictError(f"{out} is not an empty folder", hint="name a new folder")
    target = out.resolve()
    if target == Path.cwd():
        raise ConflictError(f"{out} is the current folder", hint="name a new folder")
    make_private_directory(target.parent)
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise OperationError(f"cannot make a folder in {target.parent}: {error.strerror}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, unfinished, ignore_errors=True)
        _fill(unfinished, federation, names, dns_names, ip_addresses)
        try:
            unfinished.rename(target)
        except OSError as error:
            raise ConflictError(f"cannot put it at {out}: {error.strerror}", hint="name a new folder") from error
        undo.pop_all()


def _fill(
    folder: Path, federation: str, silos: Sequence[str], dns_names: Sequence[str], ip_addresses: Sequence[str]
) -> None:
    authority = folder / AUTHORITY_FOLDER
    init_ca(authority, name=federation, kind="federation")
    identities = provision_site(
        folder / COORDINATOR_FOLDER,
        site=COORDINATOR,
        federation_ca=authority,
        people=dict.fromkeys(PEOPLE_OF_COORDINATOR, ("operator", "approver")),
        is_coordinator=True,
        dns_names=dns_names,
        ip_addresses=ip_addresses,
        operator_lifetime=DAEMON_LIFETIME_MAX,
    )
    alice, bob = PEOPLE_OF_SILO
    for silo in silos:
        provision_site(
            folder / silo,
            site=silo,
            federation_ca=authority,
            people={alice: ("approver", "operator"), bob: ("approver",)},
            coordinator_public_key=(identities / "coordinator.pub").read_bytes(),
            operator_lifetime=DAEMON_LIFETIME_MAX,
        )

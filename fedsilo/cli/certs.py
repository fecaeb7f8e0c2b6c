"""`fedsilo certs`: authorities, enrolment, renewal, trials and a look at what is installed. Most of the work is in
`fedsilo.demo.provision`.

Renewal is a request with the keys that are there, since an audit log and other sites' pins know a party by its signing
key. What the folder holds is compared with the token first, since a person and a daemon may share a name and a folder:
a token for `operator/hospital_a` must not be answered with the daemon's keys (threat T31). Not judged: whether the old
certificate is still good, which is why somebody renews, and who issued it, which the authority knows.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedsilo.cli.options import named_as_input
from fedsilo.cli.output import command, emit, table
from fedsilo.files.durable import make_private_directory, read_private, write_durably
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, OperationError, UsageError

if TYPE_CHECKING:
    from fedsilo.demo.provision import Enrolment


# ---- renewal ---------------------------------------------------------------------------------------------------------


_ENROL = "enrol with new keys: `fedsilo certs request`"


def request_renewal(directory: Path, token: str) -> Enrolment:
    """Write `<name>.request.json` for the identity of `token`, made with its keys in `directory`.

    Raises:
        UsageError: not a token.
        NotFoundError: no certificate or key of that name.
        NotAllowedError: the certificate there is another identity's, a key is not the certificate's, or others may
            read it.
    """
    from certs.encoding import load_signing_key, load_tls_key, read_one_certificate
    from certs.enrolment import identity_of_token, make_request
    from certs.identity import named_in
    from fedsilo.demo.provision import Enrolment
    from fedsilo.files.identity_files import read_public

    identity = identity_of_token(token)
    certificate, key, signing, request = (
        directory / f"{identity.name}{end}" for end in (".crt", ".key", ".ed25519", ".request.json")
    )
    try:
        pem = read_public(certificate)
    except NotFoundError as error:
        raise NotFoundError(f"{error.message}: nothing is there to renew", hint=_ENROL) from error
    held, held_signing_key = named_in(pem)
    if held != identity:
        raise NotAllowedError(
            f"{certificate} is the certificate of {held}, the token is for {identity}",
            hint="use the folder with that identity's keys, or ask for a token for this one",
        )
    tls_key = load_tls_key(read_private(key))
    if read_one_certificate(pem, what=str(certificate)).public_key() != tls_key.public_key():
        raise NotAllowedError(f"{key} does not match {certificate}", hint=_ENROL)
    signing_key = None
    if held_signing_key is not None:
        signing_key = load_signing_key(read_private(signing))
        if signing_key.public_key() != held_signing_key:
            raise NotAllowedError(f"{signing} is not the key that {certificate} certifies", hint=_ENROL)
    # Private: whoever reads the token in it could enrol first.
    write_durably(request, make_request(tls_key=tls_key, signing_key=signing_key, token=token), 0o600)
    return Enrolment(identity, request, key, None if signing_key is None else signing)


# ---- a trial ---------------------------------------------------------------------------------------------------------


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
    from certs.names import checked_name

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
    from certs.authority import LIFETIME_MAX
    from fedsilo.demo.provision import init_ca, provision_site

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
        operator_lifetime=LIFETIME_MAX,
    )
    alice, bob = PEOPLE_OF_SILO
    for silo in silos:
        provision_site(
            folder / silo,
            site=silo,
            federation_ca=authority,
            people={alice: ("approver", "operator"), bob: ("approver",)},
            coordinator_public_key=(identities / "coordinator.pub").read_bytes(),
            operator_lifetime=LIFETIME_MAX,
        )


# ---- commands --------------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="Certificate authorities, enrolment and identities.")

CaOption = Annotated[Path, typer.Option("--ca", help="Folder of the CA.", file_okay=False)]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", help="Private file whose first line is the passphrase of ca.key.")
]


@command(app, "certs ca-init")
def ca_init(
    name: Annotated[str, typer.Argument(help="Name of the federation or of the site.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder.")],
    kind: Annotated[
        Literal["federation", "site"],
        typer.Option("--kind", help="federation: for silos and coordinators. site: its operators and trainer link."),
    ],
    days: Annotated[int, typer.Option("--days", help="Life of the root, at most 730.")] = 365,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Make a root. The two kinds are separate on purpose: a federation can never make a site's approver."""
    from fedsilo.demo import provision

    authority = provision.init_ca(out, name=name, kind=kind, days=days, passphrase=_passphrase(passphrase_file))
    not_after = provision.utc_text(authority.certificate.not_valid_after_utc)
    data = {
        "name": name,
        "kind": kind,
        "certificate": str(out / "ca.crt"),
        "fingerprint": authority.fingerprint,
        "not_after": not_after,
    }
    emit(
        data,
        f"{kind} CA {name}, valid until {not_after}, in {out}\n"
        f"fingerprint {authority.fingerprint}\n"
        "Tell this fingerprint to the others by another way than the one that brings them ca.crt.",
    )


@command(app, "certs invite")
def invite(
    identity: Annotated[str, typer.Argument(help="ROLE/NAME: silo, coordinator, operator, guard or trainer")],
    ca: CaOption,
    hours: Annotated[
        float, typer.Option("--hours", min=0.01, max=8784.0, help="How long the token may be used.")
    ] = 72.0,
) -> None:
    """Make a one-time token that may become exactly one identity."""
    from certs.encoding import read_root
    from fedsilo.demo import provision
    from fedsilo.files.identity_files import read_public

    token = provision.invite(ca, identity, lifetime=timedelta(hours=hours))
    fingerprint = read_root(read_public(ca / "ca.crt")).fingerprint
    emit(
        {"token": token, "ca_fingerprint": fingerprint},
        f"{token}\nGood once, for {hours:g} hours: whoever has it first is enrolled. Root {fingerprint}",
    )


@command(app, "certs request")
def request(
    token: Annotated[str, typer.Option("--token", help="As handed over by the CA's admin.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the new keys and the request.")],
) -> None:
    """Make keys here, where they stay, and a request that travels to the CA."""
    from fedsilo.demo import provision

    enrolment = provision.request(out, token)
    emit(_of_enrolment(enrolment), f"keys for {enrolment.identity} are in {out} and stay there\n{_send(enrolment)}")


@command(app, "certs renew")
def renew(
    token: Annotated[str, typer.Option("--token", help="As handed over by the CA's admin, for the same identity.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of its keys and certificate; the request goes there.")],
) -> None:
    """Make a request with the keys that are there: the audit log and other sites' pins know a party by them."""
    enrolment = request_renewal(out, token)
    emit(_of_enrolment(enrolment), f"the keys of {enrolment.identity} in {out} stay as they are\n{_send(enrolment)}")


@command(app, "certs sign")
def sign(
    request_file: Annotated[Path, typer.Argument(metavar="REQUEST", help="The applicant's request file.")],
    ca: CaOption,
    out: Annotated[Path, typer.Option("--out", help="Where the certificate goes.")],
    dns: Annotated[list[str] | None, typer.Option("--dns", help="Coordinator only: a host name silos dial.")] = None,
    ip: Annotated[list[str] | None, typer.Option("--ip", help="Coordinator only: an address silos dial.")] = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", min=0.01, help="Life of the certificate; 168 at most, 8 for operators if not given."),
    ] = None,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Judge a request, spend its token and issue the certificate its token stands for."""
    from fedsilo.demo import provision
    from fedsilo.files.identity_files import read_public

    issued = provision.sign(
        ca,
        read_public(request_file),
        dns_names=dns or (),
        ip_addresses=ip or (),
        lifetime=None if hours is None else timedelta(hours=hours),
        passphrase=_passphrase(passphrase_file),
    )
    write_durably(out, issued.certificate_pem)
    data = {
        "spiffe_id": issued.spiffe_id,
        "certificate": str(out),
        "serial_hex": issued.serial_hex,
        "fingerprint": issued.fingerprint,
        "not_before": provision.utc_text(issued.not_before),
        "not_after": provision.utc_text(issued.not_after),
    }
    emit(data, f"{issued.spiffe_id} until {data['not_after']}: {out}\nfingerprint {issued.fingerprint}")


@command(app, "certs trial")
def trial(
    federation: Annotated[str, typer.Argument(help="Name of the federation.")],
    silos: Annotated[str, typer.Option("--silos", help="Names of the silos, with commas.")],
    out: Annotated[Path, typer.Option("--out", help="The new folder; it gets a folder for each party.")],
    dns: Annotated[list[str] | None, typer.Option("--dns", help="Host names silos dial; default localhost.")] = None,
    ip: Annotated[list[str] | None, typer.Option("--ip", help="Addresses silos dial; default 127.0.0.1, ::1.")] = None,
) -> None:
    """Every key and certificate of a federation that is only tried out, in one go and valid for 7 days.

    Whoever runs this holds every party's keys and could speak for each of them: for data that may be seen by all. In a
    real federation each site makes its own: ca-init, invite, request, sign.
    """
    names = [name.strip() for name in silos.split(",") if name.strip()]
    make_trial(federation, names, out, dns_names=dns or ("localhost",), ip_addresses=ip or ("127.0.0.1", "::1"))
    folders = {name: str(out / name) for name in (COORDINATOR_FOLDER, *names)}
    authority = out / AUTHORITY_FOLDER
    emit(
        {"federation": federation, "folders": folders, "federation_ca": str(authority)},
        lambda: (
            table(("party", "folder"), folders.items())
            + "\npeople: carol at the coordinator, alice and bob at each silo; all of it ends in 7 days"
        ),
        warnings=["all keys were made in one place: for a trial, never for data that may not leave its site"],
    )


@command(app, "certs list")
def list_certificates(ca: CaOption) -> None:
    """List the certificates that a CA has issued."""
    from fedsilo.demo import provision

    rows = provision.list_issued(ca)
    emit(
        {"certificates": rows},
        lambda: table(
            ("identity", "not after", "fingerprint", "serial"),
            [(row["spiffe_id"], row["not_after"], row["fingerprint"][:16], row["serial_hex"]) for row in rows],
        ),
    )


@command(app, "certs show")
def show(file: Annotated[Path, typer.Argument(help="A certificate: a root or a leaf.")]) -> None:
    """Show the content of a certificate. This does not say whether to trust it; `certs check` does."""
    from certs.encoding import describe_certificate
    from fedsilo.files.identity_files import read_public

    with named_as_input(file):
        data = describe_certificate(read_public(file))
    emit(data, lambda: "\n".join(f"{key:12} {_flat(value)}" for key, value in data.items()))


@command(app, "certs check")
def check(
    certificate: Annotated[Path, typer.Option("--certificate", help="The leaf.")],
    root: Annotated[Path, typer.Option("--root", help="federation_ca.crt; site_ca.crt for operator, guard, trainer.")],
    key: Annotated[Path, typer.Option("--key", help="Its private key.")],
    role: Annotated[
        Literal["silo", "coordinator", "operator", "guard", "trainer"], typer.Option("--role", help="What it must be.")
    ],
    signing_key: Annotated[
        Path | None, typer.Option("--signing-key", help="The message-signing key of a silo or coordinator.")
    ] = None,
) -> None:
    """Check everything that a daemon checks at its start: modes, matching keys, the right CA, role and validity."""
    from certs.encoding import read_one_certificate, read_root, warn_before
    from certs.identity import site_member
    from fedsilo.demo.provision import utc_text
    from fedsilo.files.identity_files import load_identity, load_link, load_operator, read_public

    now = datetime.now(UTC)
    if role == "operator":
        pem, _ = load_operator(certificate, key, root, now=now)
        person = site_member(pem, read_public(root), now, role="operator")
        spiffe_id, not_after, fingerprint = person.spiffe_id, person.not_after, person.fingerprint
    elif role == "guard" or role == "trainer":
        end = load_link(certificate, key, root, role=role, now=now)
        spiffe_id, not_after, fingerprint = end.spiffe_id, end.not_after, end.fingerprint
    elif signing_key is None:
        raise UsageError(f"a {role} has a message-signing key", hint="name it: --signing-key FILE.ed25519")
    else:
        identity = load_identity(certificate, key, signing_key, root, role=role, now=now)
        spiffe_id, not_after, fingerprint = identity.spiffe_id, identity.not_after, identity.peer.fingerprint
    trust_root = read_root(read_public(root))
    warnings = [
        f"{called} expires at {utc_text(last)}"
        for called, last, margin in (
            (spiffe_id, not_after, warn_before(read_one_certificate(read_public(certificate), what=str(certificate)))),
            (f"the {trust_root.kind} CA", trust_root.certificate.not_valid_after_utc, timedelta(days=30)),
        )
        if last - now < margin
    ]
    data = {
        "spiffe_id": spiffe_id,
        "fingerprint": fingerprint,
        "not_after": utc_text(not_after),
        "root_fingerprint": trust_root.fingerprint,
        "root_not_after": utc_text(trust_root.certificate.not_valid_after_utc),
    }
    emit(data, f"ok: {spiffe_id} until {data['not_after']}\nroot {trust_root.fingerprint}", warnings=warnings)


def _of_enrolment(enrolment: Enrolment) -> dict[str, str | None]:
    return {
        "spiffe_id": str(enrolment.identity),
        "request": str(enrolment.request),
        "key": str(enrolment.key),
        "signing_key": None if enrolment.signing_key is None else str(enrolment.signing_key),
    }


def _send(enrolment: Enrolment) -> str:
    name = enrolment.request.name
    return f"send {enrolment.request} to the CA: fedsilo certs sign {name} --ca DIR --out FILE"


def _passphrase(path: Path | None) -> bytes | None:
    if path is None:
        return None

    lines = read_private(path).splitlines()
    if not lines or not lines[0]:
        raise UsageError(f"{path}: the first line is empty", hint="write the passphrase there")
    return lines[0]


def _flat(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)

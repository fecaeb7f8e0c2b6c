"""Certificate authorities and identities as folders. The `fedsilo certs` commands and the demo call the same functions.

    CA folder     ca.crt  ca.key(0600)  tokens.json(0600)  issued.jsonl
    site's id/    <site>.crt  <site>.key(0600)  <site>.ed25519(0600)  federation_ca.crt  site_ca.crt  roles.yaml
                  coordinator.pub  <person>.crt  <person>.key(0600)  guard.crt  guard.key(0600)
    trainer's     trainer.crt  trainer.key(0600)  site_ca.crt, on the trainer's own host

Private keys are made where they stay and are never replaced (threat T31); what a call created is removed again when it
fails half-way. A token is spent durably before the certificate exists (threat T32).
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from certs.authority import (
    BACKDATED,
    CertificateAuthority,
    IssuedCertificate,
    create_ca,
    load_ca,
)
from certs.encoding import private_key_pem, public_key_pem, read_root
from certs.enrolment import TOKEN_RANDOM_BYTES, TokenBook, identity_of_token, make_request, read_request
from certs.names import AUTHORITY_OF_ROLE, AuthorityKind, SpiffeId, checked_name, parse_short_id
from certs.roles import ROLES, Role, load_roles, render_roles
from fedsilo.files.durable import lock_exclusively, make_private_directory, read_private, write_durably, write_private
from fedsilo.files.identity_files import load_identity, read_public
from fedsilo.protocol.errors import ConflictError, NotFoundError, UsageError

TOKEN_LIFETIME_DEFAULT = timedelta(hours=72)
ROOT_DAYS_DEFAULT = 365


@dataclass(frozen=True)
class Enrolment:
    """An applicant's new files: the keys stay, the request travels."""

    identity: SpiffeId
    request: Path
    key: Path
    signing_key: Path | None


def init_ca(
    directory: Path,
    *,
    name: str,
    kind: AuthorityKind,
    days: int = ROOT_DAYS_DEFAULT,
    now: datetime | None = None,
    passphrase: bytes | None = None,
) -> CertificateAuthority:
    """Make a CA folder.

    Args:
        directory: the new folder, mode 0700.
        name: the federation's or the site's name.
        kind: what it vouches for.
        days: life of the root, at most 730.
        now: start of its life; by default now.
        passphrase: encrypts ca.key.

    Raises:
        ConflictError: there is a CA in it already.
        UsageError, OperationError: as `create_ca` and the file functions.
    """
    # Clocks differ: a root made on one machine is good at once on another that is minutes behind.
    authority = create_ca(name, kind=kind, not_before=_now(now) - BACKDATED, days=days)
    make_private_directory(directory)
    with _all_or_nothing() as created:
        _private(directory / "ca.key", authority.key_pem(passphrase), created)
        _private(directory / "tokens.json", TokenBook({}).to_json(), created)
        _public(directory / "issued.jsonl", b"", created)
        _public(directory / "ca.crt", authority.certificate_pem, created)
    return authority


def open_ca(directory: Path, *, passphrase: bytes | None = None) -> CertificateAuthority:
    """Read a CA folder. Raises NotFoundError, NotAllowedError (mode of ca.key, wrong key, passphrase)."""
    if not (directory / "ca.crt").is_file():
        raise NotFoundError(
            f"{directory} holds no CA", hint=f"fedsilo certs ca-init NAME --kind federation --out {directory}"
        )
    return load_ca(read_public(directory / "ca.crt"), read_private(directory / "ca.key"), passphrase)


def invite(
    ca_directory: Path, short_id: str, *, lifetime: timedelta = TOKEN_LIFETIME_DEFAULT, now: datetime | None = None
) -> str:
    """A one-time token for `silo/NAME`, `coordinator/NAME`, `operator/NAME`, `guard/NAME` or `trainer/NAME`.

    Raises:
        UsageError: no such form, a lifetime above 30 days, or a role this CA may not vouch for.
        ConflictError: somebody else works on this folder.
    """
    root = read_root(read_public(ca_directory / "ca.crt"))
    identity = parse_short_id(short_id, domain=root.name)
    if AUTHORITY_OF_ROLE[identity.role] != root.kind:
        raise UsageError(
            f"the {root.kind} CA {root.name!r} does not vouch for a {identity.role}",
            hint="silos and coordinators are enrolled by the federation CA; operators, guards and trainers by their "
            "site CA",
        )
    with lock_exclusively(ca_directory / "lock"):
        book, token = _read_tokens(ca_directory).with_token(
            identity, now=_now(now), lifetime=lifetime, random=secrets.token_bytes(TOKEN_RANDOM_BYTES)
        )
        _write_tokens(ca_directory, book)
    return token


def request(directory: Path, token: str) -> Enrolment:
    """Make the keys for the identity of `token` in `directory` and a request file beside them.

    Raises:
        UsageError: not a token.
        ConflictError: a key of that name exists; keys are never replaced.
    """
    identity = identity_of_token(token)
    make_private_directory(directory)
    key, signing = directory / f"{identity.name}.key", directory / f"{identity.name}.ed25519"
    signs = AUTHORITY_OF_ROLE[identity.role] != "site"
    enrolment = Enrolment(identity, directory / f"{identity.name}.request.json", key, signing if signs else None)
    tls_key = ec.generate_private_key(ec.SECP256R1())
    signing_key = Ed25519PrivateKey.generate() if signs else None
    with _all_or_nothing() as created:
        _private(key, private_key_pem(tls_key), created)
        if signing_key is not None:
            _private(signing, private_key_pem(signing_key), created)
        # Private too: whoever reads the token in it could enrol first.
        _private(enrolment.request, make_request(tls_key=tls_key, signing_key=signing_key, token=token), created)
    return enrolment


def sign(
    ca_directory: Path,
    request_bytes: bytes,
    *,
    dns_names: Sequence[str] = (),
    ip_addresses: Sequence[str] = (),
    lifetime: timedelta | None = None,
    now: datetime | None = None,
    passphrase: bytes | None = None,
) -> IssuedCertificate:
    """Judge a request, spend its token, issue the certificate and note it in issued.jsonl.

    Args:
        ca_directory: the CA folder.
        request_bytes: what the applicant sent.
        dns_names: only for a coordinator: host names silos dial.
        ip_addresses: only for a coordinator: addresses silos dial.
        lifetime: by default 7 days, for an operator 8 hours.
        now: time of the call; by default now.
        passphrase: of ca.key.

    Raises:
        UsageError, NotAllowedError: as `read_request`, `TokenBook.redeem` and the authority.
        ConflictError: somebody else works on this folder.
    """
    authority = open_ca(ca_directory, passphrase=passphrase)
    moment = _now(now)
    parsed = read_request(request_bytes)
    with lock_exclusively(ca_directory / "lock"):
        book, identity = _read_tokens(ca_directory).redeem(parsed.token, now=moment)
        if identity.role != "coordinator" and (dns_names or ip_addresses):
            raise UsageError(f"{identity} is no coordinator: DNS names and IP addresses are for coordinators")
        _write_tokens(ca_directory, book)
        issued = authority.issue(
            parsed.keys,
            identity.role,
            identity.name,
            now=moment,
            lifetime=lifetime,
            dns_names=dns_names,
            ip_addresses=ip_addresses,
        )
        _note_issued(ca_directory, issued)
    return issued


def list_issued(ca_directory: Path) -> list[dict[str, str]]:
    """Return the certificates that this CA issued, oldest first: spiffe_id, serial_hex, fingerprint, not_before,
    not_after, each a text.

    Raises:
        NotFoundError: no CA there.
        ConflictError: the list is damaged.
    """
    path = ca_directory / "issued.jsonl"
    rows: list[dict[str, str]] = []
    for number, line in enumerate(read_public(path).splitlines(), start=1):
        try:
            rows.append({str(key): str(value) for key, value in json.loads(line).items()})
        except (ValueError, AttributeError) as error:
            raise ConflictError(f"{path}:{number}: damaged") from error
    return rows


# ---- all steps at once, for one machine that holds both ends -------------------------------------------


def enrol(
    ca_directory: Path,
    id_directory: Path,
    short_id: str,
    *,
    dns_names: Sequence[str] = (),
    ip_addresses: Sequence[str] = (),
    lifetime: timedelta | None = None,
    now: datetime | None = None,
) -> IssuedCertificate:
    """Invite, request and sign in one go; leaves keys and certificate in `id_directory`. Raises as the three."""
    enrolment = request(id_directory, invite(ca_directory, short_id, now=now))
    with contextlib.ExitStack() as undo:
        for path in (enrolment.key, enrolment.signing_key):
            if path is not None:
                undo.callback(path.unlink, missing_ok=True)
        try:
            issued = sign(
                ca_directory,
                read_private(enrolment.request),
                dns_names=dns_names,
                ip_addresses=ip_addresses,
                lifetime=lifetime,
                now=now,
            )
            write_durably(id_directory / f"{enrolment.identity.name}.crt", issued.certificate_pem)
        finally:
            enrolment.request.unlink(missing_ok=True)
        undo.pop_all()
    return issued


def enrol_silo(
    federation_ca: Path,
    id_directory: Path,
    silo: str,
    *,
    lifetime: timedelta | None = None,
    now: datetime | None = None,
) -> IssuedCertificate:
    """`id/<silo>.crt .key .ed25519` and `id/federation_ca.crt`. Raises as `enrol`."""
    issued = enrol(federation_ca, id_directory, f"silo/{silo}", lifetime=lifetime, now=now)
    write_durably(id_directory / "federation_ca.crt", read_public(federation_ca / "ca.crt"))
    return issued


def enrol_coordinator(
    federation_ca: Path,
    id_directory: Path,
    coordinator: str,
    *,
    dns_names: Sequence[str] = ("localhost",),
    ip_addresses: Sequence[str] = ("127.0.0.1", "::1"),
    lifetime: timedelta | None = None,
    now: datetime | None = None,
) -> IssuedCertificate:
    """Enrol a coordinator as `enrol_silo` does a silo, and write `id/coordinator.pub`, the public key that silos pin.
    Raises as `enrol`."""
    issued = enrol(
        federation_ca,
        id_directory,
        f"coordinator/{coordinator}",
        dns_names=dns_names,
        ip_addresses=ip_addresses,
        lifetime=lifetime,
        now=now,
    )
    write_durably(id_directory / "federation_ca.crt", read_public(federation_ca / "ca.crt"))
    write_coordinator_key(id_directory, coordinator, now=now)
    return issued


def write_coordinator_key(id_directory: Path, coordinator: str, *, now: datetime | None = None) -> None:
    """`id/coordinator.pub`, which silos pin, from the coordinator's own identity. Raises as `load_identity`."""
    identity = load_identity(
        id_directory / f"{coordinator}.crt",
        id_directory / f"{coordinator}.key",
        id_directory / f"{coordinator}.ed25519",
        id_directory / "federation_ca.crt",
        role="coordinator",
        now=now,
    )
    write_durably(id_directory / "coordinator.pub", public_key_pem(identity.peer.signing_public_key))


def take_from_bundle(id_directory: Path, bundle: Mapping[str, str]) -> None:
    """Write what a silo pins from federation.json: `id/federation_ca.crt` and `id/coordinator.pub`, where they are
    missing.

    Raises:
        UsageError: the bundle holds no key or certificate.
    """
    make_private_directory(id_directory)
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(bundle["coordinator_signing_key_hex"]))
        contents = {"federation_ca.crt": bundle["federation_ca_pem"].encode(), "coordinator.pub": public_key_pem(key)}
    except (KeyError, ValueError) as error:
        raise UsageError(f"the federation bundle lacks a key or certificate: {error}") from error
    for name, data in contents.items():
        if not (id_directory / name).exists():
            write_durably(id_directory / name, data)


def people_of(items: Sequence[str]) -> dict[str, tuple[Role, ...]]:
    """`alice=approver,operator` items as `write_roles` takes them. Raises UsageError: another form."""
    people: dict[str, tuple[Role, ...]] = {}
    for item in items:
        person, separator, roles = item.partition("=")
        if not separator or not roles:
            raise UsageError(f"--person {item!r} is not NAME=ROLE,ROLE", hint=f"roles: {', '.join(ROLES)}")
        people[person] = tuple(cast("Role", role) for role in roles.split(","))
    return people


def enrol_operator(
    site_ca: Path, id_directory: Path, person: str, *, lifetime: timedelta | None = None, now: datetime | None = None
) -> IssuedCertificate:
    """`id/<person>.crt .key` and `id/site_ca.crt`. What the person may do: `write_roles`. Raises as `enrol`."""
    issued = enrol(site_ca, id_directory, f"operator/{person}", lifetime=lifetime, now=now)
    write_durably(id_directory / "site_ca.crt", read_public(site_ca / "ca.crt"))
    return issued


def write_roles(id_directory: Path, site: str, people: Mapping[str, Iterable[Role]]) -> Path:
    """Write `id/roles.yaml`. Raises UsageError for an unknown role or a name that is none."""
    text = render_roles(checked_name(site), people)
    for person, roles in people.items():
        unknown = sorted(set(roles) - set(ROLES))
        if unknown:
            raise UsageError(f"{person}: {unknown[0]!r} is not a role", hint=f"roles: {', '.join(ROLES)}")
    path = id_directory / "roles.yaml"
    load_roles(text.encode(), str(path))
    write_durably(path, text.encode())
    return path


def provision_site(
    site_directory: Path,
    *,
    site: str,
    federation_ca: Path,
    people: Mapping[str, Sequence[Role]],
    coordinator_public_key: bytes | None = None,
    is_coordinator: bool = False,
    dns_names: Sequence[str] = ("localhost",),
    ip_addresses: Sequence[str] = ("127.0.0.1", "::1"),
    operator_lifetime: timedelta | None = None,
    now: datetime | None = None,
) -> Path:
    """Make everything that one site needs, on one machine: its own site CA in `site_ca/`, its identity and people in
    `id/`.

    Args:
        site_directory: the site's folder.
        site: its name; for the coordinator, the coordinator's name.
        federation_ca: the federation's CA folder.
        people: person -> roles; each gets a certificate under the new site CA.
        coordinator_public_key: `id/coordinator.pub` of the coordinator (PEM); a silo needs it.
        is_coordinator: enrol `coordinator/<site>` instead of `silo/<site>`.
        dns_names: for a coordinator.
        ip_addresses: for a coordinator.
        operator_lifetime: by default 8 hours.
        now: time of the call; by default now.

    Returns:
        The `id/` folder.

    Raises:
        UsageError: a silo without `coordinator_public_key`; and as `init_ca`, `enrol`, `write_roles`.
    """
    identities = site_directory / "id"
    site_ca = site_directory / "site_ca"
    if not is_coordinator and coordinator_public_key is None:
        raise UsageError(f"site {site!r} needs the coordinator's public key", hint="enrol the coordinator first")
    init_ca(site_ca, name=site, kind="site", now=now)
    if is_coordinator:
        enrol_coordinator(federation_ca, identities, site, dns_names=dns_names, ip_addresses=ip_addresses, now=now)
    else:
        enrol_silo(federation_ca, identities, site, now=now)
        write_durably(identities / "coordinator.pub", coordinator_public_key or b"")
    write_durably(identities / "site_ca.crt", read_public(site_ca / "ca.crt"))
    for person in people:
        enrol_operator(site_ca, identities, person, lifetime=operator_lifetime, now=now)
    write_roles(identities, site, people)
    return identities


# ---- files ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _all_or_nothing() -> Iterator[list[Path]]:
    """Remove what was created when the block does not reach its end, whatever the reason (Ctrl-C too)."""
    created: list[Path] = []
    finished = False
    try:
        yield created
        finished = True
    finally:
        if not finished:
            for path in created:
                path.unlink(missing_ok=True)


def _private(path: Path, data: bytes, created: list[Path]) -> None:
    write_private(path, data)
    created.append(path)


def _public(path: Path, data: bytes, created: list[Path]) -> None:
    write_durably(path, data)
    created.append(path)


def _read_tokens(ca_directory: Path) -> TokenBook:
    return TokenBook.from_json(read_private(ca_directory / "tokens.json"))


def _write_tokens(ca_directory: Path, book: TokenBook) -> None:
    write_durably(ca_directory / "tokens.json", book.to_json(), 0o600)


def _note_issued(ca_directory: Path, issued: IssuedCertificate) -> None:
    """Rewritten whole: a CA's list is short, and a torn line would be worse than the copying."""
    row = {key: value for key, value in asdict(issued).items() if key != "certificate_pem"}
    row |= {"not_before": utc_text(issued.not_before), "not_after": utc_text(issued.not_after)}
    path = ca_directory / "issued.jsonl"
    write_durably(path, read_public(path) + json.dumps(row, sort_keys=True).encode() + b"\n")


def utc_text(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _now(now: datetime | None) -> datetime:
    return datetime.now(UTC) if now is None else now

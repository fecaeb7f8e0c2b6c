"""A party's identity from its files: keys only from private files, everything judged before it is used (threat T31)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from certs.encoding import load_signing_public_key, load_tls_key, read_one_certificate, read_root
from certs.identity import Identity, SiteMember, own_identity, site_member
from certs.names import LinkRole, PartyRole
from certs.roles import Roles, load_roles
from fedsilo.files.durable import read_private, read_regular
from fedsilo.protocol.errors import NotAllowedError, UsageError

PUBLIC_FILE_BYTES_MAX = 1 << 20
Value = TypeVar("Value")


def load_identity(
    certificate: Path,
    key: Path,
    signing_key: Path,
    trust_root: Path,
    *,
    role: PartyRole,
    now: datetime | None = None,
    passphrase: bytes | None = None,
) -> Identity:
    """Read and judge a party's four files.

    Args:
        certificate: `id/<site>.crt`.
        key: `id/<site>.key`, mode 0600.
        signing_key: `id/<site>.ed25519`, mode 0600.
        trust_root: `id/federation_ca.crt`.
        role: what this party is.
        now: time to judge validity by; by default the clock's.
        passphrase: when both keys are encrypted.

    Raises:
        NotFoundError: a file is missing.
        NotAllowedError: a key file others may read, a key that does not match, a wrong CA, an expired certificate ...
    """
    return _naming(
        certificate,
        lambda: own_identity(
            read_public(certificate),
            read_private(key),
            read_private(signing_key),
            read_public(trust_root),
            now=_now(now),
            role=role,
            passphrase=passphrase,
        ),
    )


def load_operator(
    certificate: Path, key: Path, site_ca: Path | None = None, *, now: datetime | None = None
) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
    """A person's certificate (PEM) and key, ready for `certs.commands.sign_command`.

    With `site_ca` the certificate is judged here, so that an expired one is reported before anything is sent.

    Raises:
        NotFoundError: a file is missing.
        NotAllowedError: as `load_identity`.
    """
    pem = read_public(certificate)
    private = _naming(key, lambda: load_tls_key(read_private(key)))
    if site_ca is not None:
        site_ca_pem = read_public(site_ca)
        _naming(certificate, lambda: site_member(pem, site_ca_pem, _now(now), role="operator"))
    _match(certificate, pem, key, private)
    return pem, private


def load_link(
    certificate: Path, key: Path, site_ca: Path, *, role: LinkRole, now: datetime | None = None
) -> SiteMember:
    """Judge one end's files of the guard-trainer link, refusing what the other end would refuse anyway.

    Raises:
        NotFoundError: a file is missing.
        NotAllowedError: as `load_identity`.
    """
    pem, site_ca_pem = read_public(certificate), read_public(site_ca)
    identity = _naming(certificate, lambda: site_member(pem, site_ca_pem, _now(now), role=role))
    _match(certificate, pem, key, _naming(key, lambda: load_tls_key(read_private(key))))
    return identity


def load_site(site_ca: Path, operators: Path, *, site: str) -> tuple[bytes, Roles]:
    """The site CA (PEM) and the site's roles, as `ControlServer` takes them.

    Raises:
        NotFoundError: a file is missing.
        NotAllowedError: not a CA of this site.
        UsageError: roles.yaml is malformed, or is another site's.
    """
    pem = read_public(site_ca)
    root = _naming(site_ca, lambda: read_root(pem))
    if root.kind != "site" or root.name != site:
        raise NotAllowedError(
            f"{site_ca} is the {root.kind} CA {root.name!r}, not the site CA of {site!r}",
            hint="federation CA and site CA are two files; were they swapped?",
        )
    roles = load_roles(read_public(operators), str(operators))
    if roles.site != site:
        raise UsageError(f"{operators}: site is {roles.site!r}, this is {site!r}", hint="use this site's roles.yaml")
    return pem, roles


def load_coordinator_key(path: Path) -> Ed25519PublicKey:
    """The coordinator's message-signing key from `id/coordinator.pub`. Raises NotFoundError, NotAllowedError."""
    hint = "it is id/coordinator.pub in the folder of any party"
    return _naming(path, lambda: load_signing_public_key(read_public(path)), hint)


def read_public(path: Path) -> bytes:
    """A certificate, root or other public file of at most 1 MiB. Raises NotFoundError, UsageError."""
    return read_regular(path, bytes_max=PUBLIC_FILE_BYTES_MAX)


def _match(certificate: Path, pem: bytes, key: Path, private: ec.EllipticCurvePrivateKey) -> None:
    if read_one_certificate(pem, what=str(certificate)).public_key() != private.public_key():
        raise NotAllowedError(f"{key} does not match {certificate}", hint="use the key the request was made with")


def _naming(path: Path, judge: Callable[[], Value], hint: str = "") -> Value:
    """Let an error about bytes say which file they came from; with the hint where it has none."""
    try:
        return judge()
    except NotAllowedError as error:
        if str(path.parent) in error.message:
            raise
        raise NotAllowedError(f"{path}: {error.message}", hint=error.hint or hint, code=error.code) from error


def _now(now: datetime | None) -> datetime:
    return datetime.now(UTC) if now is None else now

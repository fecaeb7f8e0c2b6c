"""Identities: judges a peer's certificate, and reads a party's own. Bytes and the time in; identity or a reason out.

Checks, in this order, each with its own message: one certificate, issued and signed by the given root, root of the
right kind and valid, leaf valid now, CA:FALSE, P-256, the one extended key usage of its role, exactly one URI name
and no other name that the role may not carry, the role asked for, the trust domain of the root, the certified
message-signing key (threats T26, T28, T30).

Does not cover: a stolen key, which is good until its certificate expires.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from certs.encoding import (
    PARSE_ERRORS,
    SIGNING_KEY_OID,
    USAGE_NAME,
    USAGE_OF_ROLE,
    certificate_fingerprint,
    load_signing_key,
    load_tls_key,
    private_key_pem,
    public_key_bytes,
    read_one_certificate,
    read_root,
)
from certs.names import AUTHORITY_OF_ROLE, PartyRole, PeerRole, SiteRole, SpiffeId, parse_spiffe_id
from fedsilo.protocol.clocks import CERTIFICATE_TIME
from fedsilo.protocol.errors import NotAllowedError
from fedsilo.protocol.text import harmless

KNOWN_PEERS_MAX = 256
_RENEW = "get a fresh one: `fedsilo certs invite`, `renew` (with the same keys) or `request`, `sign`"


@dataclass(frozen=True)
class PeerIdentity:
    """The other end of a connection. Everything here was vouched for by the trust root."""

    spiffe_id: str
    role: PartyRole
    name: str
    signing_public_key: Ed25519PublicKey
    fingerprint: str
    not_after: datetime
    certificate_pem: bytes = field(default=b"", repr=False)  # for whoever must vouch for it to others


@dataclass(frozen=True)
class SiteMember:
    """A person of a site, whose rights are in roles.yaml, or one end of the site's guard-trainer link."""

    spiffe_id: str
    role: SiteRole
    site: str
    name: str
    public_key: ec.EllipticCurvePublicKey
    key_bytes: bytes  # of the public key, in DER, to compare with other keys
    fingerprint: str
    not_after: datetime


@dataclass(frozen=True)
class Identity:
    """A party's own identity, ready for TLS and for signing messages. Private parts stay out of its repr (T31)."""

    spiffe_id: str
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)  # unencrypted PKCS#8, as grpcio wants it
    signing_key: Ed25519PrivateKey = field(repr=False)
    trust_root_pem: bytes
    peer: PeerIdentity  # how the others see us

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def not_after(self) -> datetime:
        return self.peer.not_after


def peer_identity(certificate_pem: bytes, trust_root_pem: bytes, now: datetime, *, role: PartyRole) -> PeerIdentity:
    """Judge the certificate a peer presented.

    Args:
        certificate_pem: the leaf.
        trust_root_pem: the federation CA.
        now: timezone-aware.
        role: what the peer must be.

    Raises:
        NotAllowedError: names the cause.
    """
    certificate, identity = _verified_leaf(certificate_pem, trust_root_pem, now, role=role)
    return PeerIdentity(
        spiffe_id=str(identity),
        role=role,
        name=identity.name,
        signing_public_key=_certified_signing_key(certificate, identity),
        fingerprint=certificate_fingerprint(certificate),
        not_after=certificate.not_valid_after_utc,
        certificate_pem=certificate.public_bytes(Encoding.PEM),
    )


class KnownPeers:
    """Certificates that were judged: parsing one and verifying its signatures takes as long as judging a small message.
    A verdict stands while the certificate and its root last and no clock goes back; what is refused is not remembered.

    Args:
        trust_root_pem: the federation CA.
        role: what the peers must be.
    """

    def __init__(self, trust_root_pem: bytes, role: PartyRole) -> None:
        self._trust_root_pem = trust_root_pem
        self._role: PartyRole = role
        self._judged: dict[bytes, tuple[datetime, datetime, PeerIdentity]] = {}  # by PEM: from when, until when

    def judge(self, certificate_pem: bytes, now: datetime) -> PeerIdentity:
        """Judge a certificate as `peer_identity` does, by this class's root and role. Asked for every RPC, since a
        connection outlives a certificate (T26). What it does not know of is revocation (T27), which is to be asked
        beside it each time."""
        if (known := self._judged.get(certificate_pem)) is not None and known[0] <= now <= known[1]:
            return known[2]
        peer = peer_identity(certificate_pem, self._trust_root_pem, now, role=self._role)
        until = min(peer.not_after, read_root(self._trust_root_pem).certificate.not_valid_after_utc)
        others = dict(list(self._judged.items())[1 - KNOWN_PEERS_MAX :])
        self._judged = {**others, certificate_pem: (now, until, peer)}
        return peer


def site_member(certificate_pem: bytes, site_ca_pem: bytes, now: datetime, *, role: SiteRole) -> SiteMember:
    """Judge the certificate that a command was signed with, or that of one end of the guard-trainer link.

    Raises:
        NotAllowedError: names the cause.
    """
    certificate, identity = _verified_leaf(certificate_pem, site_ca_pem, now, role=role)
    return SiteMember(
        spiffe_id=str(identity),
        role=role,
        site=identity.domain,
        name=identity.name,
        public_key=cast(ec.EllipticCurvePublicKey, certificate.public_key()),  # as the form of a leaf demands
        key_bytes=public_key_bytes(certificate),
        fingerprint=certificate_fingerprint(certificate),
        not_after=certificate.not_valid_after_utc,
    )


def own_identity(
    certificate_pem: bytes,
    key_pem: bytes,
    signing_key_pem: bytes,
    trust_root_pem: bytes,
    *,
    now: datetime,
    role: PartyRole,
    passphrase: bytes | None = None,
) -> Identity:
    """Put a party's files together, refusing what a peer would refuse anyway.

    Raises:
        NotAllowedError: names the file that is wrong and why.
    """
    peer = peer_identity(certificate_pem, trust_root_pem, now, role=role)
    key = load_tls_key(key_pem, passphrase)
    if key.public_key() != read_one_certificate(certificate_pem, what="the certificate").public_key():
        raise NotAllowedError(
            f"the TLS key does not match the certificate of {peer.spiffe_id}",
            hint="use the key the request was made with",
        )
    signing_key = load_signing_key(signing_key_pem, passphrase)
    if signing_key.public_key() != peer.signing_public_key:
        raise NotAllowedError(
            f"the message-signing key is not the one certified for {peer.spiffe_id}",
            hint="use the key the request was made with",
        )
    return Identity(peer.spiffe_id, certificate_pem, private_key_pem(key), signing_key, trust_root_pem, peer)


def named_in(certificate_pem: bytes) -> tuple[SpiffeId, Ed25519PublicKey | None]:
    """The identity and the message-signing key that stand in a certificate. Nothing of it is believed by this.

    Raises:
        NotAllowedError: not one certificate with one identity.
    """
    certificate = read_one_certificate(certificate_pem, what="the certificate")
    identity = _one_identity(certificate, _called(certificate), "coordinator")  # who alone may have further names
    if AUTHORITY_OF_ROLE[identity.role] == "site":
        return identity, None
    return identity, _certified_signing_key(certificate, identity)


def _verified_leaf(
    certificate_pem: bytes, trust_root_pem: bytes, now: datetime, *, role: PeerRole
) -> tuple[x509.Certificate, SpiffeId]:
    if now.tzinfo is None:
        raise ValueError("the time must carry its zone")
    root = read_root(trust_root_pem)
    certificate = read_one_certificate(certificate_pem, what=f"the {role} certificate")
    called = _called(certificate)
    if root.kind != AUTHORITY_OF_ROLE[role]:
        raise NotAllowedError(
            f"a {role} is vouched for by a {AUTHORITY_OF_ROLE[role]} CA; the trust root given is the "
            f"{root.kind} CA {root.name!r}",
            hint="federation CA and site CA are two files; were they swapped?",
        )
    try:
        certificate.verify_directly_issued_by(root.certificate)
    except (InvalidSignature, *PARSE_ERRORS) as error:
        same = certificate.issuer == root.certificate.subject
        issuer = "another CA of that name" if same else f"'{issuer_of(certificate)}'"
        raise NotAllowedError(
            f"wrong CA: {called} was not issued by the {root.kind} CA {root.name!r} (root {root.fingerprint[:16]}) "
            f"but by {issuer}",
            hint="compare the roots of both sides: `fedsilo certs show`",
        ) from error
    _check_validity(f"the {root.kind} CA {root.name!r}", root.certificate, now, "make a new CA and enrol again")
    _check_validity(called, certificate, now, _RENEW)
    _check_form(certificate, called, role)
    identity = _one_identity(certificate, called, role)
    if identity.domain != root.name:
        raise NotAllowedError(f"{identity} is not in the trust domain of its root, {root.name!r}", hint=_RENEW)
    if identity.role != role:
        raise NotAllowedError(
            f"wrong role: {identity} has the role {identity.role}, needed here: {role}",
            hint=f"use a {role} certificate",
        )
    return certificate, identity


def _check_validity(called: str, certificate: x509.Certificate, now: datetime, mend: str) -> None:
    if now < certificate.not_valid_before_utc:
        raise NotAllowedError(
            f"not yet valid: {called} is valid from {certificate.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}, "
            f"now is {now:%Y-%m-%dT%H:%M:%SZ}",
            hint="compare the clocks of both machines",
            code=CERTIFICATE_TIME,
        )
    # The last second of validity belongs to the certificate (RFC 5280 4.1.2.5).
    if now > certificate.not_valid_after_utc:
        raise NotAllowedError(
            f"{called} expired at {certificate.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}, "
            f"now is {now:%Y-%m-%dT%H:%M:%SZ}",
            hint=mend,
            code=CERTIFICATE_TIME,
        )


def _check_form(certificate: x509.Certificate, called: str, role: PeerRole) -> None:
    """CA:FALSE, P-256, key usage and extended key usage of the role, nothing critical that we do not understand."""
    try:
        extensions = certificate.extensions
        key = certificate.public_key()
    except PARSE_ERRORS as error:
        raise NotAllowedError(f"{called} has malformed extensions or an unknown key", hint=_RENEW) from error
    for extension in extensions:
        if extension.critical and isinstance(extension.value, x509.UnrecognizedExtension):
            raise NotAllowedError(
                f"{called} has the unknown critical extension {harmless(extension.oid.dotted_string, 120)}",
                hint=_RENEW,
            )
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise NotAllowedError(f"{called} does not hold an ECDSA P-256 key", hint=_RENEW)
    try:
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        if constraints.ca or usage.key_cert_sign:
            raise NotAllowedError(f"{called} is a CA certificate (CA:TRUE), which nobody may present", hint=_RENEW)
        extended = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound as error:
        raise NotAllowedError(f"{called} lacks the extension {error.oid.dotted_string}", hint=_RENEW) from error
    if not usage.digital_signature:
        raise NotAllowedError(f"{called} may not sign (key usage)", hint=_RENEW)
    needed = USAGE_OF_ROLE[role]
    if list(extended) != [needed]:
        usages = ", ".join(USAGE_NAME.get(oid, oid.dotted_string) for oid in extended) or "none"
        raise NotAllowedError(
            f"wrong role: {called} has extended key usage {usages}; a {role} has {USAGE_NAME[needed]} alone",
            hint=f"use a {role} certificate",
        )


def _one_identity(certificate: x509.Certificate, called: str, role: PeerRole) -> SpiffeId:
    try:
        names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound as error:
        raise NotAllowedError(f"{called} has no URI name", hint=_RENEW) from error
    except PARSE_ERRORS as error:
        raise NotAllowedError(f"{called} has malformed extensions", hint=_RENEW) from error
    uris = [name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)]
    if len(uris) != 1:
        named = ", ".join(harmless(uri, 120) for uri in uris[:3]) or "none"
        raise NotAllowedError(f"{called} has {len(uris)} URI names ({named}), exactly one is allowed", hint=_RENEW)
    allowed: tuple[type[x509.GeneralName], ...] = (x509.UniformResourceIdentifier,)
    if role == "coordinator":
        allowed += (x509.DNSName, x509.IPAddress)
    foreign = [type(name).__name__ for name in names if not isinstance(name, allowed)]
    if foreign:
        raise NotAllowedError(f"{called} carries a {foreign[0]}, which a {role} may not have", hint=_RENEW)
    identity = parse_spiffe_id(uris[0])
    if identity is None:
        raise NotAllowedError(
            f"{uris[0][:200]!r} is not an identity of this kind: spiffe://DOMAIN/ROLE/NAME", hint=_RENEW
        )
    return identity


def _certified_signing_key(certificate: x509.Certificate, identity: SpiffeId) -> Ed25519PublicKey:
    try:
        value = certificate.extensions.get_extension_for_oid(SIGNING_KEY_OID).value
        raw = value.value if isinstance(value, x509.UnrecognizedExtension) else b""
        return Ed25519PublicKey.from_public_bytes(raw)
    except (x509.ExtensionNotFound, *PARSE_ERRORS) as error:
        raise NotAllowedError(f"the certificate of {identity} certifies no message-signing key", hint=_RENEW) from error


def issuer_of(certificate: x509.Certificate) -> str:
    """Return who a certificate says issued it; foreign text, made safe to show."""
    try:
        names = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
        return harmless(str(names[0].value) if names else certificate.issuer.rfc4514_string(), 120)
    except PARSE_ERRORS:
        return "an issuer without a readable name"


def _called(certificate: x509.Certificate) -> str:
    """A certificate in a message, before anything about it is believed."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uri = next((name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)), "")
    except (x509.ExtensionNotFound, *PARSE_ERRORS):
        uri = ""
    return f"the certificate {harmless(uri, 120) or 'without a URI name'} ({certificate_fingerprint(certificate)[:16]})"

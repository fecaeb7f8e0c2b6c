"""Certificate authorities. An authority decides every field of a certificate; an applicant cannot ask for one.

Two kinds of root, never the same key (B3): a *federation* CA vouches for silos and coordinators, a *site* CA for the
operators of one site and the two ends of its guard-trainer link. Leaves are ECDSA P-256 (grpcio fails the handshake
with Ed25519 leaves); the Ed25519 key that signs a party's messages rides in a private extension, so one signature
certifies both.

Everything here takes keys and times as arguments and returns objects or bytes; files are the caller's.
Does not cover: revocation (a stolen certificate is good until it expires) and an online intermediate.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from certs.encoding import (
    AUTHORITY_KIND_OID,
    SIGNING_KEY_OID,
    USAGE_OF_ROLE,
    certificate_fingerprint,
    load_tls_key,
    private_key_pem,
    read_root,
)
from certs.enrolment import EnrolmentKeys
from certs.names import AUTHORITY_OF_ROLE, AuthorityKind, PeerRole, SpiffeId, checked_name, coordinator_dns_name
from fedsilo.protocol.errors import NotAllowedError, UsageError

ROOT_DAYS_MAX = 730
LIFETIME_MAX = timedelta(days=7)  # where a person renews
OPERATOR_LIFETIME_DEFAULT = timedelta(hours=8)
# Clocks of two sites differ: a certificate is valid from a little before it was made.
BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True)
class IssuedCertificate:
    """A new leaf and what the authority's list keeps of it."""

    spiffe_id: str
    certificate_pem: bytes
    serial_hex: str
    fingerprint: str
    not_before: datetime
    not_after: datetime


@dataclass(frozen=True)
class CertificateAuthority:
    """A root with its key. `name` is the trust domain: the federation's or the site's name."""

    name: str
    kind: AuthorityKind
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self, passphrase: bytes | None = None) -> bytes:
        """PKCS#8, encrypted when a passphrase is given."""
        return private_key_pem(self.key, passphrase)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the root, hex: what people compare out of band (threat T32)."""
        return certificate_fingerprint(self.certificate)

    def issue(
        self,
        keys: EnrolmentKeys,
        role: PeerRole,
        name: str,
        *,
        now: datetime,
        lifetime: timedelta | None = None,
        dns_names: Sequence[str] = (),
        ip_addresses: Sequence[str] = (),
    ) -> IssuedCertificate:
        """A certificate for one name of this trust domain: a server's for a coordinator or guard, else a client's.

        A coordinator's also carries `coordinator_dns_name(federation)`. An end of the guard-trainer link carries no
        host name: the other end asks for the role, which only this site's CA gives. An operator's says who a person
        is; what they may do stands in roles.yaml.

        Args:
            keys: verified public keys of the applicant.
            role: of the holder.
            name: of the holder.
            now: time of the call, timezone-aware.
            lifetime: at most 7 days, which is the default, but 8 hours for an operator; cut to the root's own end.
            dns_names: host names that silos dial, such as "localhost"; a coordinator's alone.
            ip_addresses: addresses that silos dial, such as "127.0.0.1"; a coordinator's alone.

        Raises:
            UsageError: a name or address that is none, a lifetime outside the limits, or a message-signing key in the
                request where the role has none, or none where it has one.
            NotAllowedError: this authority is of the wrong kind, not yet valid or expired.
        """
        identity = SpiffeId(self.name, role, checked_name(name))
        if AUTHORITY_OF_ROLE[role] != self.kind:
            raise NotAllowedError(
                f"the {self.kind} CA {self.name!r} may not vouch for a {role}",
                hint=f"a {role} is enrolled by a {AUTHORITY_OF_ROLE[role]} CA",
            )
        if self.kind == "federation" and keys.signing_key is None:
            raise UsageError(f"the request for {identity} carries no message-signing key")
        if self.kind == "site" and keys.signing_key is not None:
            raise UsageError(
                f"the request of a {role} carries no message-signing key", hint=f"make it with a token for {role}/NAME"
            )
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
        if role == "coordinator":
            names += _host_names([coordinator_dns_name(self.name), *dns_names], ip_addresses)
        elif dns_names or ip_addresses:
            raise UsageError(f"{identity} is no coordinator: DNS names and IP addresses are for coordinators")
        if lifetime is None:
            lifetime = OPERATOR_LIFETIME_DEFAULT if role == "operator" else LIFETIME_MAX
        if not timedelta(0) < lifetime <= LIFETIME_MAX:
            raise UsageError(f"lifetime {lifetime} is not above zero and at most {LIFETIME_MAX}")
        root = self.certificate
        if not root.not_valid_before_utc <= now < root.not_valid_after_utc:
            raise NotAllowedError(
                f"the {self.kind} CA {self.name!r} is valid from {root.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ} "
                f"until {root.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}, not at {now:%Y-%m-%dT%H:%M:%SZ}",
                hint="check this machine's clock, or make a new CA",
            )
        not_before = max(now - BACKDATED, root.not_valid_before_utc).replace(microsecond=0)
        not_after = min(now + lifetime, root.not_valid_after_utc).replace(microsecond=0)
        serial = x509.random_serial_number()
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(name, f"{self.name} {role}"))
            .issuer_name(root.subject)
            .public_key(keys.tls_key)
            .serial_number(serial)
            .not_valid_before(not_before)
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([USAGE_OF_ROLE[role]]), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(keys.tls_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if keys.signing_key is not None:
            raw = keys.signing_key.public_bytes_raw()
            builder = builder.add_extension(x509.UnrecognizedExtension(SIGNING_KEY_OID, raw), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return IssuedCertificate(
            spiffe_id=str(identity),
            certificate_pem=certificate.public_bytes(serialization.Encoding.PEM),
            serial_hex=f"{serial:x}",
            fingerprint=certificate_fingerprint(certificate),
            not_before=not_before,
            not_after=not_after,
        )


def create_ca(name: str, *, kind: AuthorityKind, not_before: datetime, days: int) -> CertificateAuthority:
    """A new root for the trust domain `name`.

    Raises:
        UsageError: the name is none, or `days` is outside 1 to 730.
    """
    checked_name(name)
    if not 1 <= days <= ROOT_DAYS_MAX:
        raise UsageError(f"a root lives 1 to {ROOT_DAYS_MAX} days, not {days}")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"{name} {kind} CA", f"{kind} CA")
    start = not_before.replace(microsecond=0)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.UnrecognizedExtension(AUTHORITY_KIND_OID, f"{kind}:{name}".encode()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificateAuthority(name, kind, certificate, key)


def load_ca(certificate_pem: bytes, key_pem: bytes, passphrase: bytes | None = None) -> CertificateAuthority:
    """Read a root and its key.

    Raises:
        NotAllowedError: not one of our roots, not its key, or a wrong or missing passphrase.
    """
    root = read_root(certificate_pem)
    key = load_tls_key(key_pem, passphrase, what="the CA key")
    if key.public_key() != root.certificate.public_key():
        raise NotAllowedError(
            f"the key does not match the certificate of {root.kind} CA {root.name!r}", hint="use the key made with it"
        )
    return CertificateAuthority(root.name, root.kind, root.certificate, key)


def _host_names(dns_names: Sequence[str], ip_addresses: Sequence[str]) -> list[x509.GeneralName]:
    """Names that TLS compares with what was dialled. Raises UsageError: one is none."""
    try:
        return [
            *(x509.DNSName(name) for name in dict.fromkeys(dns_names)),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in dict.fromkeys(ip_addresses)),
        ]
    except ValueError as error:
        raise UsageError(
            f"not a DNS name or IP address: {error}", hint="addresses go under ip, names under dns"
        ) from error


def _subject(common_name: str, unit: str) -> x509.Name:
    # X.520 limits a common name to 64 characters; names that matter stand in the URI, this one is for people.
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "FedSilo"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit[:64]),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64]),
        ]
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )

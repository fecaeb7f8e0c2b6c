"""A small world of certificates for the tests: keys and, with `forge`, certificates nobody should accept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from certs.authority import CertificateAuthority
from certs.encoding import SIGNING_KEY_OID
from certs.enrolment import EnrolmentKeys

NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def new_keys(*, signing: bool = True) -> tuple[ec.EllipticCurvePrivateKey, Ed25519PrivateKey, EnrolmentKeys]:
    tls_key, signing_key = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    return tls_key, signing_key, EnrolmentKeys(tls_key.public_key(), signing_key.public_key() if signing else None)


def forge(
    authority: CertificateAuthority,
    *,
    uris: Sequence[str],
    usage: Sequence[x509.ObjectIdentifier] = (CLIENT,),
    ca: bool = False,
    dns: Sequence[str] = (),
    key: object = None,
    critical_unknown: bool = False,
    signing_key: bool = True,
    now: datetime = NOW,
) -> bytes:
    """A leaf with a genuine signature of `authority` and whatever content the attacker wants."""
    public = getattr(key, "public_key", ec.generate_private_key(ec.SECP256R1()).public_key)()
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    names += [x509.DNSName(name) for name in dns]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forged")]))
        .issuer_name(authority.certificate.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, False, False, False, False),
            critical=True,
        )
        .add_extension(x509.ExtendedKeyUsage(list(usage)), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if signing_key:
        raw = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
        builder = builder.add_extension(x509.UnrecognizedExtension(SIGNING_KEY_OID, raw), critical=False)
    if critical_unknown:
        oid = x509.ObjectIdentifier("1.3.6.1.4.1.99999.1")
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, b"\x05\x00"), critical=True)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

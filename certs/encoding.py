"""Keys and certificates as PEM, the errors a person gets when they are not what they should be, and what a certificate
says, for people and for `--json`. Bytes only; whether a certificate may be used is judged by `certs.identity`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from certs.names import AuthorityKind, PeerRole, checked_name
from fedsilo.protocol.errors import NotAllowedError, UsageError
from fedsilo.protocol.text import harmless

# Under the UUID arc (ITU-T X.667: 2.25.<uuid as integer>), which anybody may use without registration.
SIGNING_KEY_OID = x509.ObjectIdentifier("2.25.227382187306466150213921735016254863601.1")
AUTHORITY_KIND_OID = x509.ObjectIdentifier("2.25.227382187306466150213921735016254863601.2")

# The one extended key usage of a role's certificate.
USAGE_OF_ROLE: dict[PeerRole, x509.ObjectIdentifier] = {
    "silo": ExtendedKeyUsageOID.CLIENT_AUTH,
    "coordinator": ExtendedKeyUsageOID.SERVER_AUTH,
    "operator": ExtendedKeyUsageOID.CLIENT_AUTH,
    "guard": ExtendedKeyUsageOID.SERVER_AUTH,
    "trainer": ExtendedKeyUsageOID.CLIENT_AUTH,
}
USAGE_NAME = {ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth", ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth"}

PEM_BYTES_MAX = 64 << 10
# cryptography raises these, by kind of defect, while parsing what somebody else wrote.
PARSE_ERRORS = (
    ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)  # fmt: skip

PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


def private_key_pem(key: PrivateKey, passphrase: bytes | None = None) -> bytes:
    """PKCS#8, encrypted when a passphrase is given. The file that takes it must be 0600."""
    encryption: serialization.KeySerializationEncryption = (
        serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def public_key_pem(key: ec.EllipticCurvePublicKey | Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_tls_key(
    pem: bytes, passphrase: bytes | None = None, *, what: str = "the TLS key"
) -> ec.EllipticCurvePrivateKey:
    """Read an ECDSA P-256 private key. Raises NotAllowedError naming what is wrong with it."""
    key = _load_private_key(pem, passphrase, what=what)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise NotAllowedError(f"{what} is not an ECDSA P-256 key")
    return key


def load_signing_key(pem: bytes, passphrase: bytes | None = None) -> Ed25519PrivateKey:
    """Read an Ed25519 private key. Raises NotAllowedError naming what is wrong with it."""
    key = _load_private_key(pem, passphrase, what="the message-signing key")
    if not isinstance(key, Ed25519PrivateKey):
        raise NotAllowedError("the message-signing key is not an Ed25519 key")
    return key


def load_signing_public_key(pem: bytes) -> Ed25519PublicKey:
    """Read an Ed25519 public key, such as `id/coordinator.pub`. Raises NotAllowedError."""
    try:
        key = serialization.load_pem_public_key(pem)
    except PARSE_ERRORS as error:
        if b"BEGIN CERTIFICATE" in pem:
            raise NotAllowedError("a certificate, and no message-signing public key") from error
        raise NotAllowedError("the message-signing public key is not PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise NotAllowedError("the message-signing public key is not an Ed25519 key")
    return key


def certificate_fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the DER bytes, hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def public_key_bytes(certificate: x509.Certificate) -> bytes:
    """The key that a certificate certifies, in DER: equal for two certificates exactly when the key is the same."""
    return certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def read_one_certificate(pem: bytes, *, what: str) -> x509.Certificate:
    """Parse exactly one PEM certificate. Raises NotAllowedError naming what is wrong with it."""
    if len(pem) > PEM_BYTES_MAX:
        raise NotAllowedError(f"{what} has {len(pem)} bytes, the limit is {PEM_BYTES_MAX}")
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except PARSE_ERRORS as error:
        raise NotAllowedError(f"{what} is not a PEM certificate") from error
    if len(certificates) != 1:
        raise NotAllowedError(f"{what} holds {len(certificates)} certificates, not one")
    return certificates[0]


@dataclass(frozen=True)
class TrustRoot:
    """A root without its key, as every party holds it. `name` is its trust domain."""

    name: str
    kind: AuthorityKind
    certificate: x509.Certificate

    @property
    def fingerprint(self) -> str:
        """Return what people compare out of band (threat T32)."""
        return certificate_fingerprint(self.certificate)


def read_root(pem: bytes) -> TrustRoot:
    """Parse a trust root. Whether it is valid now is judged where it is used.

    Raises:
        NotAllowedError: not exactly one certificate, or not a root made by `authority.create_ca`.
    """
    certificate = read_one_certificate(pem, what="the trust root")
    not_ours = NotAllowedError("the trust root is not a FedSilo CA certificate", hint="see `fedsilo certs show`")
    try:
        marker = certificate.extensions.get_extension_for_oid(AUTHORITY_KIND_OID).value
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(certificate)
    except InvalidSignature as error:
        raise NotAllowedError("the trust root does not carry its own signature") from error
    except (x509.ExtensionNotFound, *PARSE_ERRORS) as error:
        raise not_ours from error
    text = marker.value.decode("ascii", "replace") if isinstance(marker, x509.UnrecognizedExtension) else ""
    kind_text, _, name = text.partition(":")
    if kind_text not in {"federation", "site"} or not constraints.ca:
        raise not_ours
    try:
        checked_name(name)
    except UsageError as error:
        raise not_ours from error
    return TrustRoot(name, "federation" if kind_text == "federation" else "site", certificate)


def _load_private_key(pem: bytes, passphrase: bytes | None, *, what: str) -> object:
    try:
        return serialization.load_pem_private_key(pem, passphrase)
    except TypeError as error:
        cause = "is encrypted and no passphrase was given" if passphrase is None else "is not encrypted"
        raise NotAllowedError(f"{what} {cause}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        cause = "is not a PEM private key" if passphrase is None else "cannot be read: wrong passphrase, or no PEM key"
        raise NotAllowedError(f"{what} {cause}") from error


def warn_before(certificate: x509.Certificate) -> timedelta:
    """Return how long before its end a leaf is warned of: a day, or a third of its lifetime where that is shorter, so
    that one of a day is not warned of from its first minute."""
    return min(timedelta(days=1), (certificate.not_valid_after_utc - certificate.not_valid_before_utc) / 3)


def describe_certificate(pem: bytes) -> dict[str, Any]:
    """The fields people compare, JSON-able. Raises NotAllowedError when it does not parse."""
    certificate = read_one_certificate(pem, what="the file")
    data: dict[str, Any] = {
        "subject": certificate.subject.rfc4514_string(),
        "issuer": certificate.issuer.rfc4514_string(),
        "not_before": f"{certificate.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}",
        "not_after": f"{certificate.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}",
        "serial_hex": f"{certificate.serial_number:x}",
        "fingerprint": certificate_fingerprint(certificate),
        "ca": False,
        "names": [],
        "usage": [],
    }
    try:
        extensions = list(certificate.extensions)
    except PARSE_ERRORS as error:
        raise NotAllowedError("the extensions of the certificate are malformed") from error
    for extension in extensions:
        value = extension.value
        if isinstance(value, x509.BasicConstraints):
            data["ca"] = value.ca
        elif isinstance(value, x509.SubjectAlternativeName):
            data["names"] = [f"{type(name).__name__}:{name.value}" for name in value]
        elif isinstance(value, x509.ExtendedKeyUsage):
            data["usage"] = [USAGE_NAME.get(oid, oid.dotted_string) for oid in value]
        elif isinstance(value, x509.UnrecognizedExtension) and extension.oid == SIGNING_KEY_OID:
            data["signing_key"] = value.value.hex()
        elif isinstance(value, x509.UnrecognizedExtension) and extension.oid == AUTHORITY_KIND_OID:
            data["authority"] = value.value.decode("ascii", "replace")
    return data


def in_words(pem: bytes) -> str:
    """A certificate in one line: whose, by whom, how long. Foreign text in it is made safe to show (T37)."""
    try:
        data = describe_certificate(pem)
    except NotAllowedError as error:
        return _unreadable(error)
    usage = ", ".join(data["usage"][:4]) or "no extended key usage"
    return (
        f"the certificate {data['fingerprint'][:16]} of {_names_in(data)} ({usage}), "
        f"issued by '{harmless(data['issuer'], 120)}', "
        f"valid {data['not_before']} to {data['not_after']}"
    )


def met_in_words(pem: bytes) -> str:
    """A certificate of somebody unknown: subject, issuer and whole fingerprint, to be compared with what a person has.

    Foreign text in it is made safe to show (T37).
    """
    try:
        data = describe_certificate(pem)
    except NotAllowedError as error:
        return _unreadable(error)
    return (
        f"subject '{harmless(data['subject'], 120)}', issuer '{harmless(data['issuer'], 120)}', "
        f"SHA-256 {data['fingerprint']}, for {_names_in(data)}"
    )


def _unreadable(error: NotAllowedError) -> str:
    return f"a certificate that cannot be read ({error.message})"


def _names_in(data: dict[str, Any]) -> str:
    return ", ".join(harmless(name.partition(":")[2], 120) for name in data["names"][:4]) or "no name"


def issued_by(pem: bytes, root_pem: bytes) -> bool:
    """Return whether a CA signed a certificate. Says nothing of its time, form or role."""
    try:
        root = read_one_certificate(root_pem, what="the trust root")
        read_one_certificate(pem, what="the certificate").verify_directly_issued_by(root)
    except (NotAllowedError, InvalidSignature, *PARSE_ERRORS):
        return False
    return True


def spiffe_names(pem: bytes) -> list[str]:
    """The SPIFFE identities that a certificate claims, as every CA of FedSilo writes them; unproven."""
    try:
        names = describe_certificate(pem)["names"]
    except NotAllowedError:
        return []
    prefix = "UniformResourceIdentifier:"
    return [name.removeprefix(prefix) for name in names if name.startswith(f"{prefix}spiffe://")]

"""What stands in a certificate, for people and for `--json`. It judges nothing."""

from __future__ import annotations

from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from certs.encoding import (
    AUTHORITY_KIND_OID,
    PARSE_ERRORS,
    SIGNING_KEY_OID,
    certificate_fingerprint,
    read_one_certificate,
)
from fedsilo.protocol.errors import NotAllowedError
from fedsilo.protocol.text import harmless

_USAGE_NAME = {ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth", ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth"}


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
            data["usage"] = [_USAGE_NAME.get(oid, oid.dotted_string) for oid in value]
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
        return f"a certificate that cannot be read ({error.message})"
    names = ", ".join(harmless(name.partition(":")[2], 120) for name in data["names"][:4]) or "no name"
    usage = ", ".join(data["usage"][:4]) or "no extended key usage"
    return (
        f"the certificate {data['fingerprint'][:16]} of {names} ({usage}), "
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
        return f"a certificate that cannot be read ({error.message})"
    names = ", ".join(harmless(name.partition(":")[2], 120) for name in data["names"][:4]) or "no name"
    return (
        f"subject '{harmless(data['subject'], 120)}', issuer '{harmless(data['issuer'], 120)}', "
        f"SHA-256 {data['fingerprint']}, "
        f"for {names}"
    )


def issued_by(pem: bytes, root_pem: bytes) -> bool:
    """Whether a CA signed a certificate. Says nothing of its time, form or role."""
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

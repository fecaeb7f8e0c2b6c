"""Enrolment: an applicant proves that it holds two keys, an authority decides which identity they get.

The request is JSON: a CSR (for its public key and its proof of possession, nothing else is read from it), the Ed25519
message-signing key, and the one-time token the authority's admin handed over. Each key signs both keys and the token,
so nobody can enrol a key he does not hold or pair his own with another's (threat T32). An operator has no
message-signing key: commands are signed with the certificate's own key. Nor has an end of the guard-trainer link.

A token is bound to one identity and good once. The authority keeps only its SHA-256.
Does not cover: whoever holds the token first is enrolled. Hand it over on a channel you trust, and compare the root's
fingerprint out of band.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from certs.encoding import PARSE_ERRORS
from certs.names import SpiffeId, parse_spiffe_id
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UsageError

REQUEST_BYTES_MAX = 64 << 10
TOKEN_RANDOM_BYTES = 32
TOKEN_LIFETIME_MAX = timedelta(days=30)
_FIELDS = frozenset({"csr_pem", "signing_key", "signature_by_tls_key", "signature_by_signing_key", "token"})


@dataclass(frozen=True)
class EnrolmentKeys:
    """The only two things an authority takes from a request. `signing_key` is None where the site CA vouches."""

    tls_key: ec.EllipticCurvePublicKey
    signing_key: Ed25519PublicKey | None


@dataclass(frozen=True)
class EnrolmentRequest:
    """A request whose proofs hold. The token is not yet judged."""

    keys: EnrolmentKeys
    token: str


def make_request(*, tls_key: ec.EllipticCurvePrivateKey, signing_key: Ed25519PrivateKey | None, token: str) -> bytes:
    """Return what the applicant sends; the private keys stay where they are (promise P5).

    Args:
        tls_key: ECDSA P-256.
        signing_key: None for an operator.
        token: as handed over by the authority's admin.
    """
    csr = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "applicant")]))
        .sign(tls_key, hashes.SHA256())
    )
    public = None if signing_key is None else signing_key.public_key()
    signed = _proof_bytes(tls_key.public_key(), public, token)
    return canonical_json(
        {
            "csr_pem": csr.public_bytes(serialization.Encoding.PEM).decode("ascii"),
            "signing_key": "" if public is None else public.public_bytes_raw().hex(),
            "signature_by_tls_key": tls_key.sign(signed, ec.ECDSA(hashes.SHA256())).hex(),
            "signature_by_signing_key": "" if signing_key is None else signing_key.sign(signed).hex(),
            "token": token,
        }
    )


def read_request(data: bytes) -> EnrolmentRequest:
    """Parse a request and check every proof in it.

    Raises:
        UsageError: not a request: JSON, fields, PEM or hex.
        NotAllowedError: a weak or foreign kind of key, or a proof that does not hold.
    """
    fields = _request_fields(data)
    try:
        csr = x509.load_pem_x509_csr(fields["csr_pem"].encode("ascii"))
        tls_key = csr.public_key()
    except PARSE_ERRORS as error:
        raise UsageError("csr_pem is not a PEM certificate signing request") from error
    if not isinstance(tls_key, ec.EllipticCurvePublicKey) or not isinstance(tls_key.curve, ec.SECP256R1):
        raise NotAllowedError(
            f"the TLS key of the request is {_key_kind(tls_key)}, not ECDSA P-256",
            hint="make the request with `fedsilo certs request`",
        )
    signing_key = _signing_key(fields)
    signed = _proof_bytes(tls_key, signing_key, fields["token"])
    try:
        if not csr.is_signature_valid:
            raise NotAllowedError("the CSR is not signed by the key it names")
        tls_key.verify(_from_hex(fields, "signature_by_tls_key"), signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise NotAllowedError(
            "the TLS key did not sign the message-signing key and the token of this request"
        ) from error
    if signing_key is None:
        if fields["signature_by_signing_key"]:
            raise NotAllowedError("the request has a signature by a message-signing key it does not name")
    else:
        try:
            signing_key.verify(_from_hex(fields, "signature_by_signing_key"), signed)
        except InvalidSignature as error:
            raise NotAllowedError(
                "the message-signing key did not sign the TLS key and token of this request"
            ) from error
    return EnrolmentRequest(EnrolmentKeys(tls_key, signing_key), fields["token"])


# ---- tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenEntry:
    """An authority's entry for one token. Times are UTC."""

    spiffe_id: str
    expires: datetime
    used: bool = False


@dataclass(frozen=True)
class TokenBook:
    """All tokens of one authority, by the SHA-256 of the token. Immutable: every change returns a new book.

    The caller stores the new book durably *before* it issues the certificate, so a crash spends a token and never
    lets it be used twice.
    """

    entries: Mapping[str, TokenEntry]

    def with_token(
        self, identity: SpiffeId, *, now: datetime, lifetime: timedelta, random: bytes
    ) -> tuple[TokenBook, str]:
        """A new token for `identity` and the book that knows it.

        Args:
            identity: the one name this token may become.
            now: time of the call.
            lifetime: at most 30 days.
            random: 32 fresh bytes from the operating system.

        Raises:
            UsageError: a lifetime outside the limits or too few random bytes.
        """
        if not timedelta(0) < lifetime <= TOKEN_LIFETIME_MAX:
            raise UsageError(f"a token lives above zero and at most {TOKEN_LIFETIME_MAX.days} days")
        if len(random) != TOKEN_RANDOM_BYTES:
            raise UsageError(f"a token takes {TOKEN_RANDOM_BYTES} random bytes")
        token = f"{identity}#{random.hex()}"
        entry = TokenEntry(str(identity), (now + lifetime).replace(microsecond=0))
        return TokenBook({**self.entries, _token_digest(token): entry}), token

    def redeem(self, token: str, *, now: datetime) -> tuple[TokenBook, SpiffeId]:
        """The identity a token stands for, and the book in which it is spent.

        Raises:
            NotAllowedError: unknown, expired or used before.
        """
        digest = _token_digest(token)
        entry = self.entries.get(digest)
        ask_again = "ask the authority's admin for a new one: `fedsilo certs invite`"
        if entry is None:
            raise NotAllowedError("the enrolment token is not one of this authority", hint=ask_again)
        if entry.used:
            raise NotAllowedError(f"the enrolment token for {entry.spiffe_id} was used before", hint=ask_again)
        if now >= entry.expires:
            raise NotAllowedError(
                f"the enrolment token for {entry.spiffe_id} expired at {entry.expires:%Y-%m-%dT%H:%M:%SZ}",
                hint=ask_again,
            )
        identity = parse_spiffe_id(entry.spiffe_id)
        if identity is None:
            raise ConflictError(f"the token book holds {entry.spiffe_id!r}, which is not an identity")
        return TokenBook({**self.entries, digest: replace(entry, used=True)}), identity

    def to_json(self) -> bytes:
        return canonical_json(
            {
                digest: {"spiffe_id": entry.spiffe_id, "expires": entry.expires.isoformat(), "used": entry.used}
                for digest, entry in self.entries.items()
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> TokenBook:
        """Read a book from its file. Raises ConflictError when the file was damaged: a book that cannot be read grants
        nothing."""
        try:
            entries = {
                str(digest): TokenEntry(
                    str(entry["spiffe_id"]), datetime.fromisoformat(entry["expires"]), entry["used"] is not False
                )
                for digest, entry in json.loads(data).items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConflictError("the token book is damaged", hint="make it {} and invite again") from error
        return cls(entries)


def identity_of_token(token: str) -> SpiffeId:
    """The identity a token says it is for; only the authority's book decides. Raises UsageError when it says none."""
    identity = parse_spiffe_id(token.partition("#")[0])
    if identity is None:
        raise UsageError("this is not an enrolment token", hint="it reads spiffe://DOMAIN/ROLE/NAME#HEX")
    return identity


def _token_digest(token: str) -> str:
    # A plain hash is enough: the token has 256 random bits.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _proof_bytes(tls_key: ec.EllipticCurvePublicKey, signing_key: Ed25519PublicKey | None, token: str) -> bytes:
    der = tls_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return b"fedsilo-enrolment-v1\n" + canonical_json(
        {
            "tls_key": der.hex(),
            "signing_key": "" if signing_key is None else signing_key.public_bytes_raw().hex(),
            "token": token,
        }
    )


def _request_fields(data: bytes) -> dict[str, str]:
    if len(data) > REQUEST_BYTES_MAX:
        raise UsageError(f"the request has {len(data)} bytes, the limit is {REQUEST_BYTES_MAX}")
    try:
        value: Any = json.loads(data)
        if not isinstance(value, dict) or set(value) != _FIELDS or not all(isinstance(v, str) for v in value.values()):
            raise UsageError(f"a request is a JSON object of the texts {', '.join(sorted(_FIELDS))}")
        # A lone surrogate cannot be hashed; it is refused here with the other malformed input.
        canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise UsageError("the request is not JSON", hint="make it with `fedsilo certs request`") from error
    return value


def _from_hex(fields: Mapping[str, str], name: str) -> bytes:
    try:
        return bytes.fromhex(fields[name])
    except ValueError as error:
        raise UsageError(f"{name} is not hex") from error


def _signing_key(fields: Mapping[str, str]) -> Ed25519PublicKey | None:
    raw = _from_hex(fields, "signing_key")
    try:
        return Ed25519PublicKey.from_public_bytes(raw) if fields["signing_key"] else None
    except ValueError as error:
        raise UsageError("signing_key is not 32 bytes of hex") from error


def _key_kind(key: object) -> str:
    size = getattr(key, "key_size", None)
    return type(key).__name__.removesuffix("PublicKey") + (f" of {size} bits" if size else "")

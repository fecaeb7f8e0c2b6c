"""T32: a hostile request gets nothing but what its token stands for, and only once."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from certs.authority import BACKDATED, create_ca
from certs.enrolment import TokenBook, make_request, read_request
from certs.identity import peer_identity
from certs.names import SpiffeId
from fedsilo.demo.provision import init_ca
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UsageError
from tests.security.people import NOW, new_keys

IDENTITY = SpiffeId("cardio-net", "silo", "hospital_a")


def a_request(**changes: str) -> bytes:
    tls_key, signing_key, _ = new_keys()
    fields = json.loads(make_request(tls_key=tls_key, signing_key=signing_key, token="token-1"))
    return json.dumps(fields | changes).encode()


def a_csr(key: object, *, extensions: list[x509.ExtensionType] | None = None) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator main")])
    )
    for extension in extensions or []:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()  # type: ignore[arg-type]


def test_T32_the_ca_copies_nothing_but_two_keys_from_a_hostile_csr() -> None:
    tls_key, signing_key, _ = new_keys()
    fields = json.loads(make_request(tls_key=tls_key, signing_key=signing_key, token="token-1"))
    fields["csr_pem"] = a_csr(
        tls_key,
        extensions=[
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://cardio-net/coordinator/main")]),
            x509.BasicConstraints(ca=True, path_length=3),
        ],
    )
    request = read_request(json.dumps(fields).encode())
    authority = create_ca("cardio-net", kind="federation", not_before=NOW, days=30)
    issued = authority.issue_silo(request.keys, silo="hospital_a", now=NOW)
    certificate = x509.load_pem_x509_certificate(issued.certificate_pem)
    assert "coordinator" not in certificate.subject.rfc4514_string()
    assert certificate.public_key() == tls_key.public_key()
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    peer = peer_identity(issued.certificate_pem, authority.certificate_pem, NOW, role="silo")
    assert peer.spiffe_id == str(IDENTITY)
    assert peer.signing_public_key == signing_key.public_key()


def test_T32_every_proof_must_hold() -> None:
    assert read_request(a_request()).token == "token-1"
    other = json.loads(a_request())
    for field, cause in (
        ("signing_key", "TLS key did not sign"),  # pairing my TLS key with another's signing key
        ("csr_pem", "TLS key did not sign"),  # and the other way round
        ("signature_by_tls_key", "TLS key did not sign"),
        ("signature_by_signing_key", "message-signing key did not sign"),
    ):
        with pytest.raises(NotAllowedError, match=cause):
            read_request(a_request(**{field: other[field]}))
    with pytest.raises(NotAllowedError, match="did not sign"):
        read_request(a_request(token="token-2"))


def test_T32_a_csr_signed_by_another_key_is_refused() -> None:
    tls_key, signing_key, _ = new_keys()
    fields = json.loads(make_request(tls_key=tls_key, signing_key=signing_key, token="t"))
    csr = x509.load_pem_x509_csr(fields["csr_pem"].encode())
    damaged = bytearray(csr.public_bytes(serialization.Encoding.DER))
    damaged[-1] ^= 1
    fields["csr_pem"] = x509.load_der_x509_csr(bytes(damaged)).public_bytes(serialization.Encoding.PEM).decode()
    with pytest.raises(NotAllowedError, match="CSR is not signed by the key it names"):
        read_request(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (rsa.generate_private_key(65537, 2048), "RSA of 2048 bits"),
        (ec.generate_private_key(ec.SECP384R1()), "384 bits"),
        (ec.generate_private_key(ec.SECP224R1()), "224 bits"),
    ],
)
def test_T32_a_weak_or_foreign_key_is_named(key: object, kind: str) -> None:
    with pytest.raises(NotAllowedError, match=kind):
        read_request(a_request(csr_pem=a_csr(key)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 50_000,
        b"x" * 70_000,
        a_request(extra="1"),
        a_request(csr_pem="rubbish"),
        a_request(csr_pem="\u00fc"),
        a_request(signing_key="zz"),
        a_request(signing_key="00"),
        a_request(signature_by_tls_key="zz"),
        a_request(token="\ud800"),
    ],
)
def test_T32_malformed_requests_are_usage_errors(data: bytes) -> None:
    with pytest.raises(UsageError):
        read_request(data)


def test_T32_operators_carry_no_signing_key_and_daemons_must() -> None:
    tls_key, _, _ = new_keys()
    operator = read_request(make_request(tls_key=tls_key, signing_key=None, token="t"))
    assert operator.keys.signing_key is None
    federation = create_ca("cardio-net", kind="federation", not_before=NOW, days=30)
    with pytest.raises(UsageError, match="no message-signing key"):
        federation.issue_silo(operator.keys, silo="a", now=NOW)
    site = create_ca("hospital_a", kind="site", not_before=NOW, days=30)
    site.issue_operator(operator.keys, person="alice", now=NOW)
    with pytest.raises(UsageError, match="carries no message-signing key"):
        site.issue_operator(new_keys()[2], person="alice", now=NOW)


def test_T32_a_token_is_bound_expires_and_is_good_once() -> None:
    hour = timedelta(hours=1)
    book, token = TokenBook({}).with_token(IDENTITY, now=NOW, lifetime=hour, random=b"\x01" * 32)
    spent, identity = book.redeem(token, now=NOW + timedelta(minutes=59))
    assert identity == IDENTITY
    with pytest.raises(NotAllowedError, match="used before"):
        spent.redeem(token, now=NOW)
    with pytest.raises(NotAllowedError, match="expired at 2026-12-01T13:00:00Z"):
        book.redeem(token, now=NOW + hour)
    # A changed identity in front of the same secret is another token.
    with pytest.raises(NotAllowedError, match="not one of this authority"):
        book.redeem(token.replace("hospital_a", "hospital_b"), now=NOW)
    assert TokenBook.from_json(spent.to_json()) == spent
    assert token.partition("#")[2].encode() not in book.to_json()
    with pytest.raises(ConflictError, match="damaged"):
        TokenBook.from_json(b'{"a": 1}')
    with pytest.raises(UsageError, match="30 days"):
        book.with_token(IDENTITY, now=NOW, lifetime=timedelta(days=31), random=b"\x01" * 32)


def test_N1_a_fresh_root_and_what_it_issues_are_good_on_a_clock_a_little_behind(tmp_path: Path) -> None:
    authority = init_ca(tmp_path / "ca", name="cardio-net", kind="federation", now=NOW)
    _, _, keys = new_keys()
    issued = authority.issue_silo(keys, silo="hospital_a", now=NOW)
    trust = authority.certificate_pem
    for behind in (timedelta(0), timedelta(seconds=60), BACKDATED):
        assert peer_identity(issued.certificate_pem, trust, NOW - behind, role="silo").spiffe_id == issued.spiffe_id
    with pytest.raises(NotAllowedError, match="not yet valid"):
        peer_identity(issued.certificate_pem, trust, NOW - BACKDATED - timedelta(seconds=1), role="silo")

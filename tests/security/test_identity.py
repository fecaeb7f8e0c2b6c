"""T28, T26, T31, T32: who is accepted as whom, each refusal beside its accepted counterpart; a hostile request gets
nothing but what its token stands for, and only once.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from certs.authority import BACKDATED, create_ca, load_ca
from certs.encoding import private_key_pem
from certs.enrolment import TokenBook, make_request, read_request
from certs.identity import KNOWN_PEERS_MAX, KnownPeers, own_identity, peer_identity, site_member
from certs.names import SpiffeId, coordinator_dns_name, parse_spiffe_id
from fedsilo.demo.provision import init_ca
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UsageError
from tests.security.people import CLIENT, NOW, SERVER, forge, new_keys

DAY = timedelta(days=1)
FEDERATION = create_ca("cardio-net", kind="federation", not_before=NOW - DAY, days=365)
OTHER = create_ca("cardio-net", kind="federation", not_before=NOW - DAY, days=365)
SITE = create_ca("hospital_a", kind="site", not_before=NOW - DAY, days=365)
SILO = "spiffe://cardio-net/silo/a"


def test_T28_a_silo_and_a_coordinator_are_recognised_with_their_signing_keys() -> None:
    for role in ("silo", "coordinator"):
        _, signing_key, keys = new_keys()
        issued = (
            FEDERATION.issue(keys, "silo", "a", now=NOW)
            if role == "silo"
            else FEDERATION.issue(keys, "coordinator", "a", dns_names=["localhost"], now=NOW)
        )
        peer = peer_identity(issued.certificate_pem, FEDERATION.certificate_pem, NOW, role=role)
        assert (peer.spiffe_id, peer.role, peer.name) == (f"spiffe://cardio-net/{role}/a", role, "a")
        # The certified key really is the applicant's: it verifies what the applicant signs.
        peer.signing_public_key.verify(signing_key.sign(b"message"), b"message")
        assert peer.fingerprint == issued.fingerprint
        assert peer.not_after == issued.not_after == NOW + timedelta(days=7)


def test_T28_names_are_compared_whole_not_by_prefix() -> None:
    _, _, keys = new_keys()
    issued = FEDERATION.issue(keys, "silo", "a2", now=NOW)
    assert peer_identity(issued.certificate_pem, FEDERATION.certificate_pem, NOW, role="silo").name == "a2"
    for text in (SILO + "/", SILO + "\n", SILO + "/../a2", SILO.upper(), "spiffe://x/silo/\uff41", "http://x/silo/a"):
        assert parse_spiffe_id(text) is None, text
    assert str(parse_spiffe_id(SILO)) == SILO


@pytest.mark.parametrize(
    ("forged", "cause"),
    [
        ({"uris": [SILO, "spiffe://cardio-net/coordinator/main"]}, "2 URI names"),
        ({"uris": []}, "no URI name"),
        ({"uris": [SILO], "ca": True}, "CA:TRUE"),
        ({"uris": [SILO], "usage": [SERVER]}, "extended key usage serverAuth"),
        ({"uris": [SILO], "usage": [CLIENT, SERVER]}, "extended key usage clientAuth, serverAuth"),
        ({"uris": ["spiffe://cardio-net/coordinator/main"]}, "wrong role"),
        ({"uris": ["spiffe://cardio-net/operator/eve"]}, "wrong role"),
        ({"uris": ["spiffe://other-net/silo/a"]}, "trust domain"),
        ({"uris": [SILO + "/x"]}, "not an identity"),
        ({"uris": [SILO], "dns": ["coordinator.cardio-net.fedsilo.internal"]}, "DNSName"),
        ({"uris": [SILO], "critical_unknown": True}, "unknown critical extension"),
        ({"uris": [SILO], "signing_key": False}, "no message-signing key"),
        ({"uris": [SILO], "key": ec.generate_private_key(ec.SECP384R1())}, "P-256"),
        ({"uris": [SILO], "key": rsa.generate_private_key(65537, 2048)}, "P-256"),
    ],
)
def test_T28_a_genuinely_signed_but_wrong_certificate_is_refused(forged: dict[str, object], cause: str) -> None:
    with pytest.raises(NotAllowedError, match=cause):
        peer_identity(forge(FEDERATION, **forged), FEDERATION.certificate_pem, NOW, role="silo")  # type: ignore[arg-type]


def test_T28_the_forgery_without_a_fault_is_accepted() -> None:
    pem = forge(FEDERATION, uris=[SILO])
    assert peer_identity(pem, FEDERATION.certificate_pem, NOW, role="silo").spiffe_id == SILO


def test_T28_no_role_passes_for_another() -> None:
    pems = {
        "silo": FEDERATION.issue(new_keys()[2], "silo", "a", now=NOW).certificate_pem,
        "coordinator": FEDERATION.issue(new_keys()[2], "coordinator", "a", now=NOW).certificate_pem,
    }
    operator = SITE.issue(new_keys(signing=False)[2], "operator", "alice", now=NOW).certificate_pem
    for presented, pem in pems.items():
        for wanted in ("silo", "coordinator"):
            if presented == wanted:
                peer_identity(pem, FEDERATION.certificate_pem, NOW, role=wanted)
            else:
                with pytest.raises(NotAllowedError, match="wrong role"):
                    peer_identity(pem, FEDERATION.certificate_pem, NOW, role=wanted)
        with pytest.raises(NotAllowedError, match="wrong CA"):
            site_member(pem, SITE.certificate_pem, NOW, role="operator")
        # B3: the federation's root is no root for operators, whoever swapped the files.
        with pytest.raises(NotAllowedError, match="vouched for by a site CA"):
            site_member(pem, FEDERATION.certificate_pem, NOW, role="operator")
    assert site_member(operator, SITE.certificate_pem, NOW, role="operator").name == "alice"
    with pytest.raises(NotAllowedError, match="wrong CA"):
        peer_identity(operator, FEDERATION.certificate_pem, NOW, role="silo")


def test_T28_an_authority_vouches_only_for_its_own_kind() -> None:
    with pytest.raises(NotAllowedError, match="may not vouch for a operator"):
        FEDERATION.issue(new_keys(signing=False)[2], "operator", "alice", now=NOW)
    with pytest.raises(NotAllowedError, match="may not vouch for a silo"):
        SITE.issue(new_keys()[2], "silo", "a", now=NOW)


def test_T26_validity_is_judged_at_the_moment_given() -> None:
    issued = FEDERATION.issue(new_keys()[2], "silo", "a", now=NOW, lifetime=timedelta(hours=24))
    root = FEDERATION.certificate_pem
    assert peer_identity(issued.certificate_pem, root, NOW + timedelta(hours=24), role="silo").name == "a"
    with pytest.raises(NotAllowedError, match="expired at 2026-12-02T12:00:00Z"):
        peer_identity(issued.certificate_pem, root, NOW + timedelta(hours=24, seconds=1), role="silo")
    assert peer_identity(issued.certificate_pem, root, NOW - timedelta(minutes=5), role="silo").name == "a"
    with pytest.raises(NotAllowedError, match="not yet valid"):
        peer_identity(issued.certificate_pem, root, NOW - timedelta(minutes=5, seconds=1), role="silo")
    with pytest.raises(NotAllowedError, match="federation CA 'cardio-net' expired"):
        peer_identity(issued.certificate_pem, root, NOW + timedelta(days=400), role="silo")


def test_T26_a_certificate_that_is_known_is_judged_again_when_time_is_no_longer_what_it_was() -> None:
    issued = FEDERATION.issue(new_keys()[2], "silo", "a", now=NOW, lifetime=timedelta(hours=24))
    known, pem = KnownPeers(FEDERATION.certificate_pem, "silo"), issued.certificate_pem
    first = known.judge(pem, NOW)
    assert first == peer_identity(pem, FEDERATION.certificate_pem, NOW, role="silo")
    assert known.judge(pem, NOW + timedelta(hours=24)) is first
    with pytest.raises(NotAllowedError, match="expired at 2026-12-02T12:00:00Z"):
        known.judge(pem, NOW + timedelta(hours=24, seconds=1))
    with pytest.raises(NotAllowedError, match="not yet valid"):
        known.judge(pem, NOW - timedelta(minutes=5, seconds=1))
    assert known.judge(pem, NOW - timedelta(minutes=5)) == first

    renewed = FEDERATION.issue(new_keys()[2], "silo", "a", now=NOW).certificate_pem
    assert known.judge(renewed, NOW).fingerprint != first.fingerprint
    for foreign in (OTHER.issue(new_keys()[2], "silo", "a", now=NOW).certificate_pem, b"", pem + renewed):
        for _ in range(2):  # a refusal is not remembered, and is none of what is known
            with pytest.raises(NotAllowedError):
                known.judge(foreign, NOW)


def test_T26_a_known_certificate_ends_with_its_root() -> None:
    half_an_hour = timedelta(minutes=30)
    short = create_ca("cardio-net", kind="federation", not_before=NOW - DAY + half_an_hour, days=1)
    pem = forge(short, uris=[SILO])  # a genuine signature, and a longer life than the root's
    known = KnownPeers(short.certificate_pem, "silo")
    assert known.judge(pem, NOW).not_after > NOW + half_an_hour
    assert known.judge(pem, NOW + half_an_hour).spiffe_id == SILO
    with pytest.raises(NotAllowedError, match="federation CA 'cardio-net' expired"):
        known.judge(pem, NOW + half_an_hour + timedelta(seconds=1))


def test_T26_the_oldest_of_too_many_known_certificates_is_judged_anew() -> None:
    known = KnownPeers(FEDERATION.certificate_pem, "silo")
    pems = [forge(FEDERATION, uris=[f"{SILO}{number}"]) for number in range(KNOWN_PEERS_MAX + 1)]
    first, *_, last = [known.judge(pem, NOW) for pem in pems]
    assert known.judge(pems[-1], NOW) is last
    again = known.judge(pems[0], NOW)
    assert again == first and again is not first


def test_T26_a_leaf_never_outlives_its_root() -> None:
    short = create_ca("net", kind="federation", not_before=NOW, days=1)
    issued = short.issue(new_keys()[2], "silo", "a", now=NOW)
    assert issued.not_after == NOW + timedelta(days=1)
    assert issued.not_before == NOW  # nor is it older than its root
    with pytest.raises(NotAllowedError, match="not at 2026-12-03"):
        short.issue(new_keys()[2], "silo", "a", now=NOW + timedelta(days=2))
    with pytest.raises(UsageError, match="lifetime"):
        short.issue(new_keys()[2], "silo", "a", now=NOW, lifetime=timedelta(days=8))


def test_T28_another_root_of_the_same_name_is_the_wrong_ca() -> None:
    issued = OTHER.issue(new_keys()[2], "silo", "a", now=NOW)
    with pytest.raises(NotAllowedError, match=r"wrong CA: .*spiffe://cardio-net/silo/a"):
        peer_identity(issued.certificate_pem, FEDERATION.certificate_pem, NOW, role="silo")
    peer_identity(issued.certificate_pem, OTHER.certificate_pem, NOW, role="silo")


def test_T28_a_member_cannot_issue_for_others() -> None:
    tls_key, _, keys = new_keys()
    member = FEDERATION.issue(keys, "silo", "a", now=NOW)
    from dataclasses import replace

    from cryptography import x509

    false_authority = replace(
        FEDERATION, certificate=x509.load_pem_x509_certificate(member.certificate_pem), key=tls_key
    )
    forged = forge(false_authority, uris=["spiffe://cardio-net/silo/b"])
    with pytest.raises(NotAllowedError, match="wrong CA"):
        peer_identity(forged, FEDERATION.certificate_pem, NOW, role="silo")
    # and a leaf given as trust root is no root
    with pytest.raises(NotAllowedError, match="not a FedSilo CA certificate"):
        peer_identity(forged, member.certificate_pem, NOW, role="silo")


def test_T28_the_root_itself_and_rubbish_are_not_identities() -> None:
    root = FEDERATION.certificate_pem
    with pytest.raises(NotAllowedError, match="CA:TRUE"):
        peer_identity(root, root, NOW, role="silo")
    leaf = FEDERATION.issue(new_keys()[2], "silo", "a", now=NOW).certificate_pem
    for rubbish, cause in ((b"", "not a PEM"), (b"x" * 70_000, "limit"), (leaf + leaf, "2 certificates")):
        with pytest.raises(NotAllowedError, match=cause):
            peer_identity(rubbish, root, NOW, role="silo")
    with pytest.raises(ValueError, match="zone"):
        peer_identity(leaf, root, NOW.replace(tzinfo=None), role="silo")


def test_T30_only_a_coordinator_carries_the_role_name() -> None:
    from cryptography import x509

    issued = FEDERATION.issue(new_keys()[2], "coordinator", "main", ip_addresses=["127.0.0.1"], now=NOW)
    names = x509.load_pem_x509_certificate(issued.certificate_pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == [coordinator_dns_name("cardio-net")]
    with pytest.raises(UsageError, match="not a DNS name or IP address"):
        FEDERATION.issue(new_keys()[2], "coordinator", "main", ip_addresses=["localhost"], now=NOW)


def test_T31_own_files_must_belong_together() -> None:
    tls_key, signing_key, keys = new_keys()
    stranger_tls, stranger_signing, _ = new_keys()
    certificate = FEDERATION.issue(keys, "silo", "a", now=NOW).certificate_pem
    root = FEDERATION.certificate_pem

    def load(tls: object = tls_key, signing: object = signing_key, **kwargs: object) -> str:
        return own_identity(
            certificate,
            private_key_pem(tls),  # type: ignore[arg-type]
            private_key_pem(signing),  # type: ignore[arg-type]
            root,
            now=NOW,
            role="silo",
            **kwargs,  # type: ignore[arg-type]
        ).spiffe_id

    assert load() == SILO
    with pytest.raises(NotAllowedError, match="TLS key does not match the certificate"):
        load(tls=stranger_tls)
    with pytest.raises(NotAllowedError, match="not the one certified"):
        load(signing=stranger_signing)
    with pytest.raises(NotAllowedError, match="not an ECDSA P-256 key"):
        load(tls=signing_key)
    with pytest.raises(NotAllowedError, match="not encrypted"):
        load(passphrase=b"secret")


def test_T31_an_encrypted_ca_key_opens_with_its_passphrase_only() -> None:
    encrypted = FEDERATION.key_pem(b"correct horse")
    assert b"ENCRYPTED" in encrypted
    assert load_ca(FEDERATION.certificate_pem, encrypted, b"correct horse").name == "cardio-net"
    with pytest.raises(NotAllowedError, match="wrong passphrase"):
        load_ca(FEDERATION.certificate_pem, encrypted, b"battery staple")
    with pytest.raises(NotAllowedError, match="no passphrase was given"):
        load_ca(FEDERATION.certificate_pem, encrypted)
    with pytest.raises(NotAllowedError, match="key does not match"):
        load_ca(FEDERATION.certificate_pem, OTHER.key_pem())


def test_T31_private_parts_stay_out_of_texts() -> None:
    tls_key, signing_key, keys = new_keys()
    certificate = FEDERATION.issue(keys, "silo", "a", now=NOW).certificate_pem
    identity = own_identity(
        certificate,
        private_key_pem(tls_key),
        private_key_pem(signing_key),
        FEDERATION.certificate_pem,
        now=NOW,
        role="silo",
    )
    assert "PRIVATE" not in repr(identity)
    assert "PrivateKey" not in repr(identity) + repr(FEDERATION)


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
    issued = authority.issue(request.keys, "silo", "hospital_a", now=NOW)
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
        federation.issue(operator.keys, "silo", "a", now=NOW)
    site = create_ca("hospital_a", kind="site", not_before=NOW, days=30)
    site.issue(operator.keys, "operator", "alice", now=NOW)
    with pytest.raises(UsageError, match="carries no message-signing key"):
        site.issue(new_keys()[2], "operator", "alice", now=NOW)


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
    issued = authority.issue(keys, "silo", "hospital_a", now=NOW)
    trust = authority.certificate_pem
    for behind in (timedelta(0), timedelta(seconds=60), BACKDATED):
        assert peer_identity(issued.certificate_pem, trust, NOW - behind, role="silo").spiffe_id == issued.spiffe_id
    with pytest.raises(NotAllowedError, match="not yet valid"):
        peer_identity(issued.certificate_pem, trust, NOW - BACKDATED - timedelta(seconds=1), role="silo")

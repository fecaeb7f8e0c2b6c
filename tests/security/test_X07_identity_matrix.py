"""X7, T25, T26, T28, T30 with T8: every wrong identity against real TLS, and the line that names the cause at each end.

The coordinator is a process of its own (`coordinator_process`); the silo's end is the code that the guard runs: its
channel, its hello, its log. What a refused peer sees of the reason is nothing at all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from certs.authority import CertificateAuthority, create_ca, load_ca
from certs.commands import sign_command
from certs.encoding import in_words, load_signing_key, private_key_pem, public_key_pem
from certs.identity import peer_identity
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.identity_files import load_identity, load_operator
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol import codec, services
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import parsed, seal
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, PeerError, UnreachableError
from fedsilo.protocol.place import Place
from silo.config import CoordinatorPlace
from silo.guard import channel
from silo.guard.channel import GrpcChannel
from silo.guard.coordinator_client import CoordinatorClient
from silo.guard.gate import check_answer
from silo.guard.messages import Counters, Inbound, TlsFiles
from tests.coordinator_folder import write_coordinator
from tests.policies.setting import HASH, SCHEMA
from tests.security.people import CLIENT, SERVER, forge, new_keys

NOW = datetime.now(UTC)  # of the collection: whatever is signed by it has an hour of margin
LIMIT_SECONDS = 60.0  # a limit that is reached means that something hangs
FEDERATION, SILO, COORDINATOR = "cardio-net", "hospital_a", "spiffe://cardio-net/coordinator/main"
ME = f"spiffe://{FEDERATION}/silo/{SILO}"
PEER = r"127\.0\.0\.1:\d+"
TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
ALLOWED_KINDS = {"control.ack": pb.Ack, "control.refusal": pb.Refusal}


# ---- the two ends ----------------------------------------------------------------------------------------


class Processes:
    """The coordinator and its impostors; stderr is their logs, each line behind its process's name."""

    def __init__(self, specs: Mapping[str, Mapping[str, Path]]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.security.coordinator_process", json.dumps(specs, default=str)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._changed = threading.Condition()
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._child.stdout is not None
        self.ready: dict[str, dict[str, str]] = {}
        for _ in specs:
            line = self._child.stdout.readline()
            assert line, self.lines
            one = json.loads(line)
            self.ready[one["name"]] = one

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def said(self, pattern: str, since: int = 0, *, name: str = "main") -> str:
        """The first line of a process after the first `since` lines that matches, waited for."""
        wanted = re.compile(rf"^{re.escape(name)}\|\w+ {pattern}")
        with self._changed:
            self._changed.wait_for(lambda: any(map(wanted.search, self.lines[since:])), LIMIT_SECONDS)
            found = [line for line in self.lines[since:] if wanted.search(line)]
            assert found, (pattern, self.lines[since:])
            return found[0]

    def end(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(LIMIT_SECONDS)
        self._reader.join(LIMIT_SECONDS)


class Direct:
    """In the gate's place: no policy, no record; the envelope, the channel and the check of the answer are the real."""

    _sequence = count(int(time.time()))  # above whatever this coordinator has seen

    def __init__(self, address: str, files: TlsFiles, sender: str, key: Ed25519PrivateKey, pinned: Any) -> None:
        self.channel = GrpcChannel(address, files)
        self.counters = Counters()
        policy = SimpleNamespace(digest="a" * 64, file=SimpleNamespace(federation=SimpleNamespace(min_updates=2)))
        self.judge = SimpleNamespace(policy=policy)  # hello names it
        self._sender, self._key, self._pinned = sender, key, pinned

    def send(self, place: Place, body: Any, **_: Any) -> Inbound:
        payload = codec.encode(body)
        envelope = seal(
            place, codec.sha256_hex(payload), federation=FEDERATION, sender=self._sender,
            sequence=next(self._sequence), attempt=0, key=self._key,
        )  # fmt: skip
        reply = self.channel.exchange(envelope, payload, wait_seconds=0.0, reply_bytes_max=1 << 16)
        check_answer(reply.envelope, reply.payload, federation=FEDERATION, coordinator_id=COORDINATOR, key=self._pinned)
        answer, _arrays = parsed(reply.envelope.kind, reply.payload, ALLOWED_KINDS)
        return cast(Any, SimpleNamespace(body=answer))


@dataclass
class Sites:
    """Two sites and a coordinator on disk, and the coordinator running."""

    root: Path
    process: Processes
    address: str
    control_socket: Path

    @property
    def authority(self) -> CertificateAuthority:
        return load_authority(self.root / "ca")

    @property
    def trust(self) -> Path:
        return self.root / "ca" / "ca.crt"

    @property
    def mine(self) -> TlsFiles:
        folder = self.root / SILO / "id"
        return TlsFiles(folder / f"{SILO}.crt", folder / f"{SILO}.key", self.trust)

    def files(self, name: str, certificate_pem: bytes, key: Any) -> TlsFiles:
        return write_pair(self.root, name, certificate_pem, key, self.trust)

    def talk(
        self, files: TlsFiles, address: str, *, sender: str = ME, key: Any = None, pinned: Any = None, **hello: Any
    ) -> CoordinatorClient:
        """What the guard says hello with."""
        main = load_signing_key((self.root / "main" / "id" / "main.ed25519").read_bytes()).public_key()
        own = key or load_signing_key((self.root / SILO / "id" / f"{SILO}.ed25519").read_bytes())
        said = {**agreed(self.root), **hello}
        model = SimpleNamespace(path=Path("/data/model"), load=said["load"])
        data = SimpleNamespace(
            verifier="exact", public=SimpleNamespace(path=Path("/data/public.jsonl"), verifier="exact"),
            held_out=SimpleNamespace(path=Path("/data/h.jsonl")),
        )  # fmt: skip
        config = SimpleNamespace(
            model=model, data=data, source=Path("/site/silo.yaml"), role="member", federation=FEDERATION,
            spiffe_id=sender, held_out_verifier="exact", coordinator=CoordinatorPlace(address=address),
        )  # fmt: skip
        site = SimpleNamespace(
            config=config, fingerprints=SimpleNamespace(**said), schema=SimpleNamespace(digest=said["schema"]),
            public=SimpleNamespace(sha256=said["public"], unsolved=""),
            held_out=SimpleNamespace(sha256=said["held_out"]),
            policy=SimpleNamespace(source="/site/policy.yaml"),
        )  # fmt: skip
        gate = Direct(address, files, sender, own, pinned or main)
        return CoordinatorClient(
            cast(Any, site), cast(Any, gate), cast(Any, None), code_sha256="c0" * 32, monotonic=time.monotonic
        )

    def refused(self, caplog: pytest.LogCaptureFixture, files: TlsFiles, address: str = "", **talk: Any) -> str:
        """Say hello and give the line that the silo's log has of it."""
        conversation = self.talk(files, address or self.address, **talk)
        try:
            with pytest.raises(FedSiloError) as caught:
                conversation.join("namespaces")
        finally:
            cast(Any, conversation)._gate.channel.close()
        conversation.back_off(caught.value)
        line = caplog.messages[-1]
        assert line.startswith(caught.value.message) and line.count("\n") == 0 and line.isprintable()
        assert caught.value.hint and caught.value.hint.partition("\n")[0] in line
        return line


def load_authority(folder: Path) -> CertificateAuthority:
    return load_ca((folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes())


def write_pair(root: Path, name: str, certificate_pem: bytes, key: Any, trust: Path) -> TlsFiles:
    files = TlsFiles(root / f"{name}.crt", root / f"{name}.key", trust)
    files.certificate.write_bytes(certificate_pem)
    files.key.write_bytes(private_key_pem(key))
    return files


def agreed(root: Path) -> dict[str, Any]:
    return {
        "base_model_sha256": HASH["base"], "tokenizer_sha256": HASH["tokenizer"], "template_sha256": HASH["template"],
        "load": "fp32", "schema": SCHEMA.digest, "public": read_tasks(root / "main" / "public.jsonl").sha256,
        "held_out": HASH["held"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    root = tmp_path_factory.mktemp("x7")
    init_ca(root / "ca", name=FEDERATION, kind="federation", now=NOW - timedelta(hours=1))
    people: dict[str, Any] = {"alice": ["operator"], "victor": ["viewer"]}
    provision_site(root / "main", site="main", federation_ca=root / "ca", people=people, is_coordinator=True)
    public_key = (root / "main" / "id" / "coordinator.pub").read_bytes()
    provision_site(
        root / SILO, site=SILO, federation_ca=root / "ca", people={"olga": ["operator"]},
        coordinator_public_key=public_key,
    )  # fmt: skip
    config = write_coordinator(root / "main", (SILO, "hospital_b"))
    trust = root / "ca" / "ca.crt"
    specs: dict[str, dict[str, Path]] = {"main": {"config": config}}
    for name, (pem, key) in wrong_coordinator_certificates(load_authority(root / "ca")).items():
        files = write_pair(root, f"impostor_{len(specs)}", pem, key, trust)
        specs[name] = {"certificate": files.certificate, "key": files.key, "root": trust}
    process = Processes(specs)
    try:
        yield Sites(root, process, process.ready["main"]["address"], Path(process.ready["main"]["control_socket"]))
    finally:
        process.end()


# ---- the silo's certificate ------------------------------------------------------------------------------


def issued(authority: CertificateAuthority, silo: str, now: datetime) -> tuple[bytes, Any]:
    key, _, keys = new_keys()
    return authority.issue(keys, "silo", silo, now=now, lifetime=timedelta(hours=1)).certificate_pem, key


def wrong_silo_certificates(place: Sites) -> dict[str, tuple[bytes, Any]]:
    """Name -> certificate and key, each with a signature that is genuine as far as it goes."""
    authority, (forged_key, _, _) = place.authority, new_keys()
    strangers = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
    operator = place.root / "main" / "id" / "alice.crt"
    coordinator = place.root / "main" / "id" / "main.crt"

    def forged(**fields: Any) -> tuple[bytes, Any]:
        return forge(authority, key=forged_key, now=NOW, **{"uris": [ME], **fields}), forged_key

    def on_disk(path: Path) -> tuple[bytes, Any]:
        return load_operator(path, path.with_suffix(".key"))

    return {
        "wrong CA": issued(strangers, SILO, NOW),
        "expired": issued(backdated(authority), SILO, NOW - timedelta(days=2)),
        "not yet valid": issued(authority, SILO, NOW + timedelta(hours=3)),
        "an operator's": on_disk(operator),
        "the coordinator's": on_disk(coordinator),
        "two names": forged(uris=[ME, f"spiffe://{FEDERATION}/coordinator/main"]),
        "two usages": forged(usage=(CLIENT, SERVER)),
        "another federation's name": forged(uris=[f"spiffe://other-net/silo/{SILO}"]),
        "an operator's name": forged(uris=[f"spiffe://{FEDERATION}/operator/eve"]),
        "a CA": forged(ca=True),
        "a name that is text": forged(
            uris=["spiffe://x/\x1b[31m\nCRITICAL halted: forged \u202e".encode("ascii", "ignore").decode()]
        ),
    }


def backdated(authority: CertificateAuthority) -> CertificateAuthority:
    """The same key and name, as if the root were older: it can sign what has expired already."""
    old = create_ca(authority.name, kind=authority.kind, not_before=NOW - timedelta(days=9), days=30)
    return replace(old, key=authority.key)


AT_TLS = "refused a connection from " + PEER + " in the TLS handshake: "
AT_CALL = "refused a call from " + PEER + ": "
# case -> what the silo's line holds, what the coordinator's line holds
SILO_CASES = {
    "wrong CA": (
        rf"the certificate {ME} \(\w{{16}}\) was not issued by the federation CA '{FEDERATION}' .* another CA of that",
        AT_TLS + r"its certificate is not signed by this federation's CA \(wrong CA\): .*; another federation's silo",
    ),
    "expired": (
        rf"the certificate {ME} \(\w{{16}}\) expired at {TIME}, now is {TIME}; get a fresh one",
        AT_TLS + r"its certificate is expired; its people renew it",
    ),
    "not yet valid": (
        rf"not yet valid: the certificate {ME} .* is valid from {TIME}, now is {TIME}; compare the clocks",
        AT_TLS + r"its certificate is not yet valid; compare the clocks",
    ),
    "an operator's": (
        r"wrong CA: the certificate spiffe://main/operator/alice \(\w{16}\) was not issued by .* but by 'main site CA'",
        AT_TLS + r"its certificate is not signed by this federation's CA \(wrong CA\): .* an operator's certificate\?",
    ),
    "the coordinator's": (
        rf"wrong role: the certificate {COORDINATOR} .* has extended key usage serverAuth; a silo has clientAuth alone",
        AT_TLS + r"its certificate is for another role \(no clientAuth, such as a coordinator's\)",
    ),
    "two names": (
        rf"has 2 URI names \({ME}, {COORDINATOR}\), exactly one is allowed",
        AT_CALL + rf"the certificate {ME} \(\w{{16}}\) has 2 URI names \({ME}, {COORDINATOR}\), .*; get a fresh one",
    ),
    "two usages": (
        r"wrong role: .* has extended key usage clientAuth, serverAuth; a silo has clientAuth alone",
        AT_CALL + rf"wrong role: the certificate {ME} .* clientAuth, serverAuth; .*; use a silo certificate",
    ),
    "another federation's name": (
        rf"spiffe://other-net/silo/{SILO} is not in the trust domain of its root, '{FEDERATION}'",
        AT_CALL + rf"spiffe://other-net/silo/{SILO} is not in the trust domain of its root, '{FEDERATION}'",
    ),
    "an operator's name": (
        rf"wrong role: spiffe://{FEDERATION}/operator/eve has the role operator, needed here: silo; use a silo",
        AT_CALL + rf"wrong role: spiffe://{FEDERATION}/operator/eve has the role operator, needed here: silo",
    ),
    "a CA": (r"is a CA certificate \(CA:TRUE\)", AT_TLS + r".*|" + AT_CALL + r".*CA:TRUE"),
    "a name that is text": (
        r"'spiffe://x/\\x1b\[31m\\nCRITICAL halted: forged ' is not an identity of this kind",
        AT_CALL + r"'spiffe://x/\\x1b\[31m\\nCRITICAL halted: forged ' is not an identity of this kind",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SILO_CASES)
def test_T28_T26_a_wrong_silo_certificate_is_named_at_both_ends(
    place: Sites, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    pem, key = wrong_silo_certificates(place)[case]
    files = place.files(case.replace(" ", "_").replace("'", ""), pem, key)
    since = len(place.process.lines)
    at_silo, at_coordinator = SILO_CASES[case]
    line = place.refused(caplog, files)
    assert line.startswith(
        f"coordinator {place.address}: it does not accept this silo's certificate {files.certificate}"
    )
    assert re.search(at_silo, line), line
    theirs = place.process.said(at_coordinator, since)
    assert theirs.isprintable()
    assert len(theirs) < 1000 and len(line) < 1500


def test_the_right_certificate_is_taken(place: Sites) -> None:
    conversation = place.talk(place.mine, place.address)
    with contextlib.closing(cast(Any, conversation)._gate.channel):
        answer = conversation.say(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
        assert isinstance(answer.body, pb.Ack)


def test_T28_a_silo_that_is_not_on_the_list_is_named_at_both_ends(
    place: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    tls_key, signing_key, keys = new_keys()
    pem = place.authority.issue(keys, "silo", "stranger", now=NOW).certificate_pem
    sender, since = f"spiffe://{FEDERATION}/silo/stranger", len(place.process.lines)
    line = place.refused(caplog, place.files("stranger", pem, tls_key), sender=sender, key=signing_key)
    assert f"the coordinator refuses this silo: {sender} is not on its list of silos; its people list" in line
    place.process.said(
        rf"refused {sender}: {sender} is not on the coordinator's list of silos; .*`silos:` in coordinator.yaml "
        r"\[NOT_A_MEMBER\]", since
    )  # fmt: skip


def test_T28_no_certificate_at_all_is_named(place: Sites) -> None:
    """There is no silo's line: a silo without a certificate does not start. The peer sees the connection close."""
    since = len(place.process.lines)
    assert handshake(place, None) == b""
    place.process.said(AT_TLS + r"it shows no certificate; silos dial with the certificate in id/", since)


def test_T25_a_client_that_speaks_no_tls_and_a_port_check_are_named(place: Sites) -> None:
    """One end only: neither is a silo. TLS 1.2 is refused per call: `test_coordinator_server`."""
    host, _, port = place.address.rpartition(":")
    since = len(place.process.lines)
    with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1" not in plain.recv(100)
    place.process.said(AT_TLS + "it does not speak TLS; is that a silo", since)
    with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS):
        pass  # a port check
    place.process.said(AT_TLS + r"it closed the connection in the middle of the handshake; a port check", since)


def handshake(place: Sites, files: TlsFiles | None) -> bytes:
    """All that a peer gets to see after its part of the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(place.trust)
    context.set_alpn_protocols(["h2"])
    if files:
        context.load_cert_chain(files.certificate, files.key)
    host, _, port = place.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        try:
            return connection.recv(1 << 16)
        except (ssl.SSLError, ConnectionResetError):
            return b""


@pytest.mark.parametrize("case", ["expired", "wrong CA", "two names", "a name that is text"])
def test_T08_a_refused_peer_sees_a_closed_connection_or_a_bare_status_and_no_word_of_the_reason(
    place: Sites, case: str
) -> None:
    pem, key = wrong_silo_certificates(place)[case]
    files = place.files("bare", pem, key)
    if case in {"expired", "wrong CA"}:
        assert handshake(place, files) == b""
        return
    credentials = grpc.ssl_channel_credentials(
        place.trust.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
    )
    with grpc.secure_channel(place.address, credentials) as channel:
        call: Any = channel.stream_stream(
            services.EXCHANGE,
            request_serializer=pb.Frame.SerializeToString,
            response_deserializer=pb.Frame.FromString,
        )(iter([pb.Frame(chunk=b"x")]), timeout=LIMIT_SECONDS)
        with pytest.raises(grpc.RpcError):
            list(call)
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAUTHENTICATED, "")
    assert list(call.trailing_metadata() or ()) == [] and "grpc-status-details-bin" not in dict(
        call.initial_metadata() or ()
    )


def test_T31_a_key_of_another_certificate_and_a_key_that_others_may_read_are_refused_before_dialling(
    place: Sites,
) -> None:
    """One end only: the coordinator hears nothing of it."""
    since, folder = len(place.process.lines), place.root / SILO / "id"
    other = place.files("unmatched", place.mine.certificate.read_bytes(), new_keys()[0])
    other.key.chmod(0o600)
    signing = folder / f"{SILO}.ed25519"
    with pytest.raises(NotAllowedError) as caught:
        load_identity(other.certificate, other.key, signing, place.trust, role="silo")
    assert f"{other.certificate}: the TLS key does not match the certificate of {ME}" in caught.value.line
    assert "use the key the request was made with" in caught.value.line
    loose = place.files("loose", place.mine.certificate.read_bytes(), new_keys()[0])
    loose.key.chmod(0o644)
    with pytest.raises(NotAllowedError) as caught:
        load_identity(loose.certificate, loose.key, signing, place.trust, role="silo")
    assert re.search(rf"{loose.key}.*(0?644|other)", caught.value.line) and "chmod" in caught.value.line
    # a key replaced under a running silo: its next dial is refused here as well
    with pytest.raises(NotAllowedError, match=f"own files cannot be used: {other.certificate}, {other.key}.*mismatch"):
        GrpcChannel(place.address, other).exchange(pb.Envelope(), b"", wait_seconds=0.0, reply_bytes_max=1)
    # what the coordinator says of the forged name, which dialled before, may come this late
    heard = [line for line in place.process.lines[since:] if "halted: forged" not in line]
    assert [line for line in heard if "call" in line] == []


# ---- the coordinator's certificate -------------------------------------------------------------------------


def coordinator_pair(
    authority: CertificateAuthority, now: datetime = NOW, ips: Sequence[str] = ("127.0.0.1",)
) -> tuple[bytes, Any]:
    key, _, keys = new_keys()
    return authority.issue(
        keys, "coordinator", "main", dns_names=["elsewhere.example"], ip_addresses=ips, now=now,
        lifetime=timedelta(hours=1),
    ).certificate_pem, key  # fmt: skip


def wrong_coordinator_certificates(authority: CertificateAuthority) -> dict[str, tuple[bytes, Any]]:
    strangers = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
    other = create_ca("other-net", kind="federation", not_before=NOW - timedelta(days=1), days=30)
    return {
        "wrong CA": coordinator_pair(strangers),
        "another federation": coordinator_pair(other),
        "expired": coordinator_pair(backdated(authority), NOW - timedelta(days=2)),
        "not yet valid": coordinator_pair(authority, NOW + timedelta(hours=3)),
        "a silo's": issued(authority, "hospital_b", NOW),
        "another address": coordinator_pair(authority, ips=("192.0.2.1",)),
    }


BROKE_OFF = (
    AT_TLS
    + r"it (broke off|closed the connection|does not accept this coordinator)"
    + r".*; it was shown the certificate \w{16} of "
)
COORDINATOR_CASES = {
    "wrong CA": (
        rf"wrong CA: the certificate {COORDINATOR} .* was not issued by the federation CA '{FEDERATION}' .* but by "
        r"another CA of that name; trusted is .*/ca.crt; is coordinator.address",
        rf"{COORDINATOR}, .* \(serverAuth\), issued by '.*{FEDERATION} federation CA",
    ),
    "another federation": (
        rf"wrong CA: the certificate spiffe://other-net/coordinator/main .* was not issued by the federation CA "
        rf"'{FEDERATION}' .* but by 'other-net federation CA'; trusted is",
        r"spiffe://other-net/coordinator/main, .* issued by '.*other-net federation CA",
    ),
    "expired": (
        rf"the certificate {COORDINATOR} \(\w{{16}}\) expired at {TIME}, now is {TIME}; trusted is",
        rf"{COORDINATOR}, .* valid {TIME} to {TIME}",
    ),
    "not yet valid": (
        rf"not yet valid: the certificate {COORDINATOR} .* is valid from {TIME}, .*; .*compare the clocks",
        rf"{COORDINATOR}, .* valid {TIME} to {TIME}",
    ),
    "a silo's": (
        rf"wrong role: the certificate spiffe://{FEDERATION}/silo/hospital_b .* has extended key usage clientAuth; "
        r"a coordinator has serverAuth alone",
        rf"spiffe://{FEDERATION}/silo/hospital_b \(clientAuth\)",
    ),
    "another address": (
        r"its certificate is not for the name '127.0.0.1' that was dialled \(IP address mismatch.*\): "
        rf".*{COORDINATOR}, coordinator.{FEDERATION}.fedsilo.internal, elsewhere.example, 192.0.2.1 .*; dial a name",
        rf"{COORDINATOR}, .*192.0.2.1 ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COORDINATOR_CASES)
def test_T30_a_wrong_coordinator_certificate_is_named_at_both_ends_before_anything_is_said(
    place: Sites, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    address = place.process.ready[case]["address"]
    at_silo, at_coordinator = COORDINATOR_CASES[case]
    line = place.refused(caplog, place.mine, address)
    assert line.startswith(f"coordinator {address}: its certificate is ")
    assert re.search(at_silo, line), line
    theirs = place.process.said(BROKE_OFF, name=case)
    assert re.search(at_coordinator, theirs), theirs
    # the silo never showed its certificate there, not even to name the cause
    logged = [said for said in place.process.lines if said.startswith(f"{case}|")]
    assert not [said for said in logged if "refused a call" in said or SILO in said]


# ---- something else than a coordinator: one end, which is the silo's -----------------------------------------


@contextlib.contextmanager
def listening(answer: bytes | ssl.SSLContext | None) -> Iterator[str]:
    """A TCP server that answers each connection with bytes, with TLS, or by closing it."""

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), plain:
                if isinstance(answer, ssl.SSLContext):
                    answer.wrap_socket(plain, server_side=True).close()
                elif answer:
                    plain.recv(1 << 12)
                    plain.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(serve)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def test_T25_plain_tcp_tls_1_2_and_a_server_that_hangs_up_are_named(
    place: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        line = place.refused(caplog, place.mine, address)
        assert (
            f"coordinator {address}: it does not speak TLS: something else listens there; is coordinator.addr" in line
        )
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(place.root / "main" / "id" / "main.crt", place.root / "main" / "id" / "main.key")
    with listening(old) as address:
        line = place.refused(caplog, place.mine, address)
        assert f"coordinator {address}: it does not speak TLS 1.3, which is required" in line and "update" in line
    with listening(None) as address:
        line = place.refused(caplog, place.mine, address)
        assert f"coordinator {address}: it closes the connection in the middle of the TLS handshake; does some" in line


def test_nobody_there_and_a_name_that_does_not_resolve_are_named(
    place: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    line = place.refused(caplog, place.mine, f"127.0.0.1:{port}")
    assert f"coordinator 127.0.0.1:{port}: nothing listens there (connection refused); is the coordinator start" in line
    line = place.refused(caplog, place.mine, "coordinator.invalid:8443")
    assert "coordinator coordinator.invalid:8443: the name 'coordinator.invalid' does not resolve: " in line
    assert "coordinator.address in silo.yaml" in line


@pytest.mark.parametrize("seconds_per_read", [1.0, 0.01])
def test_T23_a_certificate_that_comes_a_byte_at_a_time_is_not_waited_for(
    place: Sites, monkeypatch: pytest.MonkeyPatch, seconds_per_read: float
) -> None:
    """The whole fetch has one end, and no read may wait longer than what is left of it."""
    passed, reads, waits = [0.0], [0], [0.0]
    record = itertools.chain(b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xf0", itertools.repeat(0))

    class Slow:
        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None: ...

        def settimeout(self, seconds: float) -> None:
            waits[0] = seconds

        def sendall(self, data: bytes) -> None: ...

        def recv(self, size: int) -> bytes:
            assert 0.0 < waits[0] <= channel.SHOWN_SECONDS_MAX - passed[0]
            passed[0] += seconds_per_read
            reads[0] += 1
            return bytes([next(record)])

    with monkeypatch.context() as patched:
        patched.setattr(channel, "monotonic", lambda: passed[0])
        patched.setattr(channel, "_dialled", lambda address, proxy: Slow())
        assert channel._shown_certificate("127.0.0.1:1", None) == b""
    # the last read may begin just before the end
    assert reads[0] == pytest.approx(channel.SHOWN_SECONDS_MAX / seconds_per_read, abs=1)
    # the counterpart: a whole one is shown, in more reads or fewer
    assert b"BEGIN CERTIFICATE" in channel._shown_certificate(place.address, None)


# ---- hello -----------------------------------------------------------------------------------------------------

OTHER = "ee" * 32
HELLO_CASES = {
    "tokenizer_sha256": ("tokenizer_sha256", OTHER, HASH["tokenizer"], "TOKENIZER_MISMATCH", "/data/model"),
    "base_model_sha256": ("base_model_sha256", OTHER, HASH["base"], "BASE_MODEL_MISMATCH", "/data/model"),
    "load": ("load", "bf16", "fp32", "LOAD_MISMATCH", "model.load in /site/silo.yaml"),
    "lora_schema_sha256": ("schema", OTHER, SCHEMA.digest, "SCHEMA_MISMATCH", "/site/policy.yaml"),
    "public_set_sha256": ("public", OTHER, "", "PUBLIC_SET_MISMATCH", "/data/public.jsonl"),
    "held_out_sha256": ("held_out", OTHER, HASH["held"], "HELD_OUT_MISMATCH", "/data/h.jsonl"),
}


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("field", HELLO_CASES)
def test_a_hello_that_differs_is_refused_with_both_values_at_both_ends(
    place: Sites, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    said, ours, theirs, code, file = HELLO_CASES[field]
    theirs = theirs or agreed(place.root)["public"]
    since = len(place.process.lines)
    line = place.refused(caplog, place.mine, **{said: ours})
    assert f"the coordinator refuses this silo: {field}: it expects {theirs}, here it is {ours}; ours is " in line
    assert file in line
    place.process.said(rf"refused {ME}: {field} differs: expected {theirs}, got {ours} \[{code}\]", since)


def test_a_hello_of_another_protocol_is_refused_with_both_values_at_both_ends(
    place: Sites, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.guard.coordinator_client.PROTOCOL_VERSION", 7)
    since = len(place.process.lines)
    line = place.refused(caplog, place.mine)
    assert "the coordinator refuses this silo: protocol: it expects 2, here it is 7; ours is this version of" in line
    place.process.said(rf"refused {ME}: no common protocol version: expected 2, got 7; .* \[PROTOCOL_RANGE\]", since)


def test_T30_a_coordinator_with_another_signing_key_than_the_pinned_one_is_not_believed(
    place: Sites, caplog: pytest.LogCaptureFixture
) -> None:
    pinned, since = Ed25519PrivateKey.generate().public_key(), len(place.process.lines)
    for _ in range(2):  # the silo tries again, and that is what the coordinator can see of it
        line = place.refused(caplog, place.mine, pinned=pinned)
        digest = codec.sha256_hex(pinned.public_bytes_raw())[:16]
        assert (
            f"the answer is not signed by the pinned key of the coordinator (SHA-256 {digest}); compare id/coord"
            in line
        )
    place.process.said(
        rf"{ME} says hello again and nothing else: .* does not believe this coordinator's answers "
        rf"\(is its id/coordinator.pub the key of {COORDINATOR}\?\)", since
    )  # fmt: skip


# ---- people ----------------------------------------------------------------------------------------------------


def test_T28_T36_a_command_that_may_not_be_given_is_named_to_the_person_and_in_the_daemon_s_log(place: Sites) -> None:
    folder, since = place.root / "main" / "id", len(place.process.lines)

    def told(command: Any) -> str:
        with ControlClient(place.control_socket) as client, pytest.raises(NotAllowedError) as caught:
            client.execute(command)
        return caught.value.line

    victor = Operator("main", folder / "victor.crt", folder / "victor.key", FEDERATION)
    line = told(sign_as(victor, "run.submit", {"text": ""}))
    assert re.search(
        r"^victor \(viewer\) may not run.submit at main; it takes .*operator.*; at this site: alice$", line
    )
    refused = "refused the command 'run.submit': "
    place.process.said(refused + r"victor \(viewer\) may not run.submit at main; .*\[NOT_ALLOWED\]", since)

    alice = Operator("main", folder / "alice.crt", folder / "alice.key", FEDERATION)
    late = NOW + timedelta(hours=9)  # her certificate is good for eight: as she would sign, nine hours ago
    authority = load_authority(place.root / "main" / "site_ca")
    key, _, keys = new_keys(signing=False)
    pem = backdated(authority).issue(keys, "operator", "alice", now=NOW - timedelta(days=2)).certificate_pem
    line = told(
        sign_command(
            site="main", name="run.submit", arguments={}, request_id="0123456789", expires=late,
            operator_certificate_pem=pem, operator_key=key,
        )
    )  # fmt: skip
    assert re.search(
        rf"the certificate spiffe://main/operator/alice \(\w{{16}}\) expired at {TIME}, now is {TIME}; get", line
    )
    place.process.said(refused + rf"the certificate spiffe://main/operator/alice .* expired at {TIME}", since)

    line = told(sign_as(replace(alice, site=SILO), "run.submit", {"text": ""}))
    assert "the signature of alice does not cover this command: it was changed, made for another site" in line
    place.process.said(refused + "the signature of alice does not cover .* made for another site .* again", since)

    other = place.root / SILO / "id"
    line = told(
        sign_as(Operator("main", other / "olga.crt", other / "olga.key", FEDERATION), "run.submit", {"text": ""})
    )
    assert f"wrong CA: the certificate spiffe://{SILO}/operator/olga" in line and f"but by '{SILO} site CA'" in line
    place.process.said(
        refused + rf"wrong CA: the certificate spiffe://{SILO}/operator/olga .* compare the roots", since
    )

    command = sign_as(victor, "run.submit", {})
    command.name = "x\x1b[2J\nCRITICAL halted: forged"
    told(command)
    forged = place.process.said(r"refused the command 'x", since)
    assert forged.isprintable() and r"\x1b[2J\nCRITICAL" in forged


def test_a_control_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    """One end only: there is no daemon."""
    with ControlClient(tmp_path / "none.sock") as client, pytest.raises(UnreachableError) as caught:
        client.snapshot()
    assert caught.value.line == (
        f"cannot reach the daemon at {tmp_path}/none.sock: the socket does not exist; is it started? is this the right "
        "--config?"
    )


# ---- other people's text -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_T37_text_in_a_certificate_cannot_write_lines_or_escapes_into_a_message() -> None:
    evil = "x\x1b[2J\nCRITICAL halted\u202e" + "y" * 20
    authority = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, evil)])
    stranger = replace(authority, certificate=cast(Any, SimpleNamespace(subject=name)), key=new_keys()[0])
    pem = forge(stranger, uris=["spiffe://x/silo/a\nb"], now=NOW)
    with pytest.raises(NotAllowedError) as caught:
        peer_identity(pem, authority.certificate_pem, NOW, role="silo")
    for text in (caught.value.line, in_words(pem)):
        assert text.isprintable() and "CRITICAL halted" in text and len(text) < 700
    assert public_key_pem(authority.key.public_key())  # the authority is a whole one


@pytest.mark.slow
def test_an_unbelieved_answer_names_both_senders() -> None:
    envelope = pb.Envelope(sender="spiffe://x/coordinator/\x1b[2J" + "z" * 300, federation=FEDERATION)
    with pytest.raises(PeerError) as caught:
        check_answer(envelope, b"", federation=FEDERATION, coordinator_id=COORDINATOR, key=cast(Any, None))
    assert caught.value.line.isprintable() and len(caught.value.line) < 400
    assert "the answer comes from 'spiffe://x/coordinator/\\x1b[2J" in caught.value.line
    assert f"the policy pins {COORDINATOR}; is coordinator.address" in caught.value.line


@pytest.fixture(autouse=True)
def silo_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fedsilo.silo")

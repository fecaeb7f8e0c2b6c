"""T23, T24, T25 against a real coordinator process: silos that stall, send drop by drop or send bombs, and clients that
speak no TLS or an old one, while another silo goes about its business.

What this does not stop: a flood of connections that fills the machine's own tables; that is the network's to limit.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import select

from certs.authority import create_ca
from certs.encoding import private_key_pem
from certs.enrolment import EnrolmentKeys
from certs.identity import Identity, peer_identity
from certs.names import coordinator_dns_name
from coordinator import store as db
from coordinator.blobs import BytesPayload
from coordinator.config import Limits, load_config
from coordinator.outbox import Reply
from coordinator.server import FederationService, federation_server
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.identity_files import load_identity
from fedsilo.protocol import codec, services
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError
from tests.coordinator_folder import write_coordinator
from tests.security.people import new_keys
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, House, SimulatedSilo, until_quiet

MEGABYTE = 1 << 20
LIMIT_SECONDS = 60.0  # a limit that is reached means that something hangs
RECEIVE_TIMEOUT_SECONDS = 5.0
EXCHANGES = 25
IDLE_SECONDS = 1
# A connection of its own for each silo, and the name that a coordinator's certificate has.
OF_ITS_OWN = (
    ("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", coordinator_dns_name("cardio-net")),
)  # fmt: skip
ROOT = Path(__file__).parents[2]


@dataclass
class Place:
    """A federation CA, two silos and the coordinator that runs."""

    folder: Path
    process: subprocess.Popen[str]
    port: int
    sequence: int = 0

    def credentials(self, silo: str) -> grpc.ChannelCredentials:
        files = self.folder / silo / "id"
        return grpc.ssl_channel_credentials(
            (files / "federation_ca.crt").read_bytes(), (files / f"{silo}.key").read_bytes(),
            (files / f"{silo}.crt").read_bytes(),
        )  # fmt: skip

    def opening(self, silo: str, kind: str, payload: bytes, *, announced: int | None = None) -> pb.Frame:
        files = self.folder / silo / "id"
        identity = load_identity(
            files / f"{silo}.crt", files / f"{silo}.key", files / f"{silo}.ed25519", files / "federation_ca.crt",
            role="silo",
        )  # fmt: skip
        self.sequence += 1
        envelope = pb.Envelope(
            federation="cardio-net", attempt=1, kind=kind, sender=identity.spiffe_id, sequence=self.sequence,
            payload_digest=bytes.fromhex(codec.sha256_hex(payload)),
        )  # fmt: skip
        envelope.signature = identity.signing_key.sign(codec.signing_bytes(envelope))
        size = len(payload) if announced is None else announced
        return pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=size))

    def heartbeat(self, channel: grpc.Channel, silo: str) -> str:
        """The kind of the answer to a complete message."""
        opening = iter([self.opening(silo, "control.heartbeat", b"")])
        frames = list(exchange(channel)(opening, timeout=LIMIT_SECONDS, wait_for_ready=True))
        return str(frames[0].opening.envelope.kind)

    def comes_again(self, channel: grpc.Channel, silo: str) -> str:
        """The kind of the answer, once the coordinator has let go of the silo's calls that it cut off.

        A client hears of their end before their places are free.
        """
        until = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                return self.heartbeat(channel, silo)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > until:
                    raise

    def memory(self, name: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def exchange(channel: grpc.Channel) -> Any:
    return channel.stream_stream(
        services.EXCHANGE, request_serializer=pb.Frame.SerializeToString, response_deserializer=pb.Frame.FromString
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("T24")
    init_ca(folder / "ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["operator"]}
    provision_site(folder / "main", site="main", federation_ca=folder / "ca", people=people, is_coordinator=True)
    public_key = (folder / "main" / "id" / "coordinator.pub").read_bytes()
    for silo in ("hospital_a", "hospital_b"):
        provision_site(
            folder / silo, site=silo, federation_ca=folder / "ca", people={}, coordinator_public_key=public_key
        )
    config = write_coordinator(folder / "main", ("hospital_a", "hospital_b"))
    config.write_text(f"{config.read_text()}limits: {{receive_timeout_seconds: {RECEIVE_TIMEOUT_SECONDS}}}\n")
    with subprocess.Popen(
        [sys.executable, "-m", "fedsilo.cli", "coordinator", "start", "--config", str(config), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield Place(folder, process, int(json.loads(process.stdout.readline())["data"]["port"]))
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0


@pytest.fixture
def healthy(place: Place) -> Iterator[grpc.Channel]:
    with grpc.secure_channel(f"127.0.0.1:{place.port}", place.credentials("hospital_a")) as channel:
        yield channel


class Stalled:
    """Calls of hospital_b that announce a message and do not send it: nothing at all, or a byte now and then."""

    def __init__(self, place: Place, *, drops: bool) -> None:
        self._ended = threading.Event()
        self._channel = grpc.secure_channel(f"127.0.0.1:{place.port}", place.credentials("hospital_b"))
        self._place, self._drops = place, drops
        self.calls: list[Any] = []

    def open(self) -> None:
        frame = self._place.opening("hospital_b", "control.progress", b"", announced=MEGABYTE)

        def frames() -> Iterator[pb.Frame]:
            yield frame
            while not self._ended.wait(1.0):
                if self._drops:
                    yield pb.Frame(chunk=b"x")

        self.calls.append(exchange(self._channel)(frames(), timeout=LIMIT_SECONDS))

    def close(self) -> None:
        self._ended.set()
        self._channel.close()


def code_of(call: Any) -> grpc.StatusCode:
    """How a call ended, waited for."""
    try:
        list(call)
    except grpc.RpcError as error:
        code = getattr(error, "code", lambda: None)()
        assert isinstance(code, grpc.StatusCode)
        return code
    return grpc.StatusCode.OK


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True], ids=["half-open", "a-byte-a-second"])
def test_T24_a_silo_that_stalls_holds_up_nobody_and_is_cut_off(
    place: Place, healthy: grpc.Channel, drops: bool
) -> None:
    stalled = Stalled(place, drops=drops)
    try:
        for _ in range(5):
            stalled.open()
        answers = [place.heartbeat(healthy, "hospital_a") for _ in range(EXCHANGES)]
        assert answers == ["control.ack"] * EXCHANGES
        # all that while they stood open, as many as one silo may have; one more was refused, in whichever order
        assert sum(call.is_active() for call in stalled.calls) == 4
        codes = Counter(code_of(call) for call in stalled.calls)
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: 1, grpc.StatusCode.CANCELLED: 4}
    finally:
        stalled.close()
    with grpc.secure_channel(f"127.0.0.1:{place.port}", place.credentials("hospital_b")) as channel:
        assert place.comes_again(channel, "hospital_b") == "control.ack"


class RemoteSilo(SimulatedSilo):
    """One that lives its life over TLS; `house` is only what its answers are made of."""

    call: Any

    def deliver(self, envelope: pb.Envelope, payload: bytes) -> Any:
        frames = [pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=len(payload)))]
        frames += [pb.Frame(chunk=payload)] if payload else []
        first, *rest = self.call(iter(frames), timeout=LIMIT_SECONDS)
        content = BytesPayload(b"".join(frame.chunk for frame in rest))
        return self.checked(Reply(first.opening.envelope, content))


@dataclass
class Served:
    """A coordinator of four silos behind its real server, and a connection for each silo."""

    house: House
    silos: dict[str, RemoteSilo]
    channels: dict[str, grpc.Channel]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    limits = Limits(connection_idle_seconds_max=IDLE_SECONDS)
    now = datetime.now(UTC)
    authority = create_ca("cardio-net", kind="federation", not_before=now - timedelta(days=1), days=30)
    house = House(tmp_path / "house")
    tls_key, signing_key, keys = new_keys()
    own = authority.issue(keys, "coordinator", "main", dns_names=[], ip_addresses=["127.0.0.1"], now=now)
    root = authority.certificate_pem
    identity = Identity(
        own.spiffe_id, own.certificate_pem, private_key_pem(tls_key), signing_key, root,
        peer_identity(own.certificate_pem, root, now, role="coordinator"),
    )  # fmt: skip
    service = FederationService(
        house.driver, house.blobs, trust_root_pem=root, limits=limits, now=lambda: datetime.now(UTC),
        monotonic=house.clock,
    )  # fmt: skip
    server, port = federation_server(service, identity, "127.0.0.1:0", silos=len(SILOS), limits=limits)
    server.start()
    with contextlib.ExitStack() as stack:
        silos, channels = {}, {}
        for name in SILOS:
            silo = silos[name] = RemoteSilo(house, name)
            tls_key, _, _ = new_keys()
            signed = authority.issue(EnrolmentKeys(tls_key.public_key(), silo.key.public_key()), "silo", name, now=now)
            credentials = grpc.ssl_channel_credentials(root, private_key_pem(tls_key), signed.certificate_pem)
            address = f"127.0.0.1:{port}"
            channels[name] = stack.enter_context(grpc.secure_channel(address, credentials, OF_ITS_OWN))
            silo.call = exchange(channels[name])
        yield Served(house, silos, channels)
    server.stop(None).wait()
    house.close()


@pytest.mark.slow
def test_T24_a_round_is_finished_by_the_others_while_one_silo_stalls(served: Served) -> None:
    stalling = served.silos["hospital_d"]
    ended = threading.Event()

    def frames() -> Iterator[pb.Frame]:
        envelope = stalling.envelope("control.progress", b"")
        yield pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=MEGABYTE))
        ended.wait(LIMIT_SECONDS)

    calls = [stalling.call(frames(), timeout=LIMIT_SECONDS) for _ in range(4)]  # as many as one silo may have open
    try:
        healthy = [served.silos[name] for name in ("hospital_a", "hospital_b", "hospital_c")]
        for silo in healthy:
            silo.join()
        served.house.submit(RUN_YAML + "silos: [hospital_a, hospital_b, hospital_c]\n")
        until_quiet(healthy)
        assert (served.house.run().state, served.house.run().reason) == ("finished", "")
        committed = served.house.rows(lambda session: [row.state for row in session.scalars(select(db.Round))])
        assert committed == ["committed"] * 2
        assert all(call.is_active() for call in calls)  # the stalled ones stood open all the while
    finally:
        ended.set()
        for call in calls:
            call.cancel()


@pytest.mark.slow
def test_T24_a_connection_without_a_call_is_closed_and_one_with_a_waiting_poll_is_not(served: Served) -> None:
    served.house.driver.dependencies = replace(served.house.driver.dependencies, poll_wait_seconds_max=LIMIT_SECONDS)
    closed = {name: threading.Event() for name in ("hospital_a", "hospital_b")}
    for name, event in closed.items():
        assert isinstance(served.silos[name].say("control.heartbeat", pb.Heartbeat()), pb.Ack)

        def seen(state: grpc.ChannelConnectivity, event: threading.Event = event) -> None:
            if state is not grpc.ChannelConnectivity.READY:
                event.set()

        ready = threading.Event()
        served.channels[name].subscribe(
            lambda state, ready=ready: state is grpc.ChannelConnectivity.READY and ready.set()  # type: ignore[misc]
        )
        assert ready.wait(LIMIT_SECONDS)
        served.channels[name].subscribe(seen)
    waiting = served.silos["hospital_a"]
    answers: list[Any] = []
    poll = pb.Poll(wait_milliseconds=int(3000 * IDLE_SECONDS))
    asking = threading.Thread(target=lambda: answers.append(waiting.say("control.poll", poll)))
    asking.start()
    assert closed["hospital_b"].wait(LIMIT_SECONDS)  # by its silence
    assert asking.is_alive() and not closed["hospital_a"].is_set()
    asking.join(LIMIT_SECONDS)
    assert len(answers) == 1 and isinstance(answers[0], pb.Ack)
    # and the silent one may come again
    assert isinstance(served.silos["hospital_b"].say("control.heartbeat", pb.Heartbeat()), pb.Ack)


@pytest.mark.slow
def test_T24_connections_that_say_nothing_hold_up_nobody(place: Place, healthy: grpc.Channel) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(60):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", place.port), timeout=LIMIT_SECONDS))
            if number % 2:
                silent.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS greeting
        answers = [place.heartbeat(healthy, "hospital_a") for _ in range(EXCHANGES)]
    assert answers == ["control.ack"] * EXCHANGES


@pytest.mark.slow
def test_T23_64_mebibytes_of_zeros_in_gzip_are_refused_and_take_no_memory(place: Place, healthy: grpc.Channel) -> None:
    assert place.heartbeat(healthy, "hospital_a") == "control.ack"
    Path(f"/proc/{place.process.pid}/clear_refs").write_text("5")  # the peak counts from here
    before = place.memory("VmRSS:")
    options = [("grpc.max_send_message_length", -1)]
    with grpc.secure_channel(
        f"127.0.0.1:{place.port}", place.credentials("hospital_b"), options=options, compression=grpc.Compression.Gzip
    ) as channel:
        frames = [
            place.opening("hospital_b", "control.progress", b"", announced=MEGABYTE),
            pb.Frame(chunk=bytes(64 * MEGABYTE)),
        ]
        assert code_of(exchange(channel)(iter(frames), timeout=LIMIT_SECONDS)) in (
            grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL,
        )  # fmt: skip
        assert place.memory("VmHWM:") - before < 16 * MEGABYTE
    assert place.heartbeat(healthy, "hospital_a") == "control.ack"


# ---- T25 ---------------------------------------------------------------------------------------------


def frame_of_http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_over(connection: socket.socket) -> bytes:
    """An empty Exchange in HTTP/2 (RFC 9113, header fields never indexed), and all that is answered to it."""
    fields = {
        ":method": "POST", ":scheme": "https", ":path": services.EXCHANGE, ":authority": "coordinator",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame_of_http2(4, 0, 0, b"") + frame_of_http2(1, 4, 1, block) + frame_of_http2(0, 1, 1, b"")
    )  # fmt: skip
    answered = b""
    connection.settimeout(LIMIT_SECONDS)
    while b"grpc-status" not in answered:
        part = connection.recv(1 << 16)
        if not part:
            break
        answered += part
    return answered


@pytest.mark.parametrize(
    ("version", "status"),
    [(ssl.TLSVersion.TLSv1_2, b"\x0216"), (ssl.TLSVersion.TLSv1_3, b"\x010")],
    ids=["tls-1.2", "tls-1.3"],
)
def test_T25_a_silo_that_speaks_tls_1_2_is_refused_in_the_same_call_that_1_3_may_make(
    place: Place, version: ssl.TLSVersion, status: bytes
) -> None:
    """16 is UNAUTHENTICATED. The call itself is empty, so the one that is let in is answered with a refusal."""
    files = place.folder / "hospital_a" / "id"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = version
    context.load_verify_locations(files / "federation_ca.crt")
    context.load_cert_chain(files / "hospital_a.crt", files / "hospital_a.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", place.port), timeout=LIMIT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        answered = call_over(connection)
    assert b"grpc-status" + status in answered and b"TLS" not in answered  # no reason is told


def test_T25_plaintext_gets_no_answer(place: Place) -> None:
    with socket.create_connection(("127.0.0.1", place.port), timeout=LIMIT_SECONDS) as plain:
        try:
            answered = call_over(plain)
        except ConnectionError:
            answered = b""
    assert b"grpc-status" not in answered and b"HTTP" not in answered


@pytest.mark.parametrize("line", ["insecure: true", "simulate: true", "tls: false", "plaintext: true"])
def test_T25_there_is_no_mode_without_tls_to_be_switched_on(place: Place, tmp_path: Path, line: str) -> None:
    """Neither for real data nor for a simulation, on whatever address: no key of the configuration asks for one."""
    good = (place.folder / "main" / "coordinator.yaml").read_text()
    path = tmp_path / "coordinator.yaml"
    path.write_text(good)
    load_config(path)  # the counterpart
    path.write_text(f"{good}{line}\n")
    with pytest.raises(UsageError, match=line.partition(":")[0]):
        load_config(path)


def test_T25_a_port_without_tls_is_opened_on_unix_sockets_only() -> None:
    """Beyond the configuration: where the product calls gRPC's functions without TLS, it is with a unix address."""
    found: list[str] = []
    for package in ("coordinator", "silo", "console", "fedsilo"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found += re.findall(r"(?:add_insecure_port|insecure_channel)\(\s*(\S+)", text)
    assert len(found) == 2 and all(argument.startswith('f"unix:{') for argument in found), found

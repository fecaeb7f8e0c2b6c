"""A silo's gate and a coordinator's server over mTLS, and between them what sites have: an HTTP proxy with a login, one
that opens TLS, one that ends silent connections, and one that ends old ones."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from coordinator import server
from coordinator.blobs import PLACES
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UnreachableError, UsageError
from silo.config import CoordinatorPlace
from silo.guard.channel import GrpcChannel, connection_fault, server_certificate
from silo.guard.messages import Inbound
from silo.guard.proxied import Proxy, proxy_of, unread_environment
from tests.loopback.connect_proxy import ConnectProxy, inspecting
from tests.loopback.cutting_proxy import CuttingProxy, Fault
from tests.loopback.test_T23_T24_cut_lines import MIB, OVERHEAD_BYTES, Failing, Place

LOGIN = "cardio:s3cret-hunter2"
WORD = base64.b64encode(LOGIN.encode()).decode()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with made.proxy:
        yield made
        made.close()


def dial(place: Place, line: CuttingProxy, **options: Any) -> None:
    """The silo's gate over a channel of its own to the coordinator behind `line`."""
    place.bench.close()
    place.channel.close()
    straight = not isinstance(line, ConnectProxy)
    address = f"127.0.0.1:{line.port if straight else place.proxy.upstream_port}"
    place.channel = GrpcChannel(address, place.files, **options)
    place.bench = place._gate(replace(place.bench, channel=place.channel))  # type: ignore[arg-type]


def credentials(folder: Path, text: str = LOGIN, mode: int = 0o600) -> Path:
    path = folder / "proxy.login"
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return path


def configured(place: Place, proxy: ConnectProxy, login: Path | None) -> CoordinatorPlace:
    return CoordinatorPlace(
        address=f"127.0.0.1:{place.proxy.upstream_port}", proxy=f"http://127.0.0.1:{proxy.port}",
        proxy_credentials=login,
    )  # fmt: skip


# ---- an HTTP proxy ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_T10_T31_through_a_proxy_with_a_login_and_through_nothing_else(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    with ConnectProxy(place.proxy.upstream_port, login=LOGIN) as proxy, ConnectProxy(1) as other:
        # the environment neither chooses another proxy nor leads around this one
        for name in ("HTTPS_PROXY", "https_proxy", "http_proxy", "grpc_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{other.port}")
        for name in ("NO_PROXY", "no_proxy", "no_grpc_proxy"):
            monkeypatch.setenv(name, "127.0.0.1,*")
        # without the login, or with another, nothing is reached, and the code says which
        dial(place, proxy, proxy=proxy_of(configured(place, proxy, None)))
        allowed = place.allowed()
        error = Failing(place, allowed).error()
        assert isinstance(error, UnreachableError) and error.code == "PROXY_LOGIN_NEEDED"
        assert f"proxy 127.0.0.1:{proxy.port}: it asks for a user and a password (407)" in error.line
        wrong = proxy_of(configured(place, proxy, credentials(tmp_path, f"{LOGIN}2")))
        fault = connection_fault(f"127.0.0.1:{place.proxy.upstream_port}", place.files, wrong)
        assert fault is not None and fault.code == "PROXY_LOGIN_REFUSED" and "mode 0600" in fault.hint
        assert proxy.passed == {"up": 0, "down": 0}

        where = configured(place, proxy, credentials(tmp_path))
        proxy.asked.clear()
        dial(place, proxy, proxy=proxy_of(where))
        [item] = place.bench.ledger.outbox("allowed")
        assert isinstance(place.bench.gate.retry(item).body, pb.Ack)
        assert proxy.asked == [where.address] and other.asked == []
        assert proxy.passed["up"] > len(allowed.payload)
        server_certificate(where.address, place.files, proxy_of(where))
        assert proxy.asked == [where.address] * 2
    said = caplog.text + "".join(capfd.readouterr()) + repr(proxy_of(where)) + repr(place.channel)
    assert "hunter2" not in said and WORD not in said


@pytest.mark.slow
def test_a_proxy_that_says_no_that_is_none_and_that_is_not_there_are_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, code, words in ((403, "PROXY_REFUSED", "refuses CONNECT to"), (502, "PROXY_UNREACHABLE", "not reach")):
        with ConnectProxy(place.proxy.upstream_port, status=status) as proxy:
            fault = connection_fault("coordinator.example:8443", place.files, Proxy(f"127.0.0.1:{proxy.port}"))
        assert fault is not None and fault.code == code
        assert f"{words} coordinator.example:8443 ({status})" in fault.message
    nothing = f"127.0.0.1:{place.proxy.upstream_port}"  # it speaks TLS, not HTTP
    fault = connection_fault("127.0.0.1:1", place.files, Proxy(nothing))
    assert fault is not None and fault.code == "PROXY_UNUSABLE" and "coordinator.proxy in silo.yaml" in fault.hint
    with ConnectProxy(1) as proxy:
        pass
    fault = connection_fault("127.0.0.1:1", place.files, Proxy(f"127.0.0.1:{proxy.port}"))
    assert fault is not None and fault.code == "PROXY_UNREACHABLE" and "nothing listens there" in fault.message
    # directly, where only the environment names a proxy: that it does is said, what it says is not
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hunter2@proxy.example:3128")
    fault = connection_fault(f"127.0.0.1:{proxy.port}", place.files)
    assert fault is not None and "HTTPS_PROXY is set and not read here: coordinator.proxy" in fault.hint
    assert "hunter2" not in fault.line and unread_environment({"PATH": "/bin"}) == ""


@pytest.mark.parametrize("text", ["cardio", ":word", "cardio:wo\x00rd", "cardio:two\nlines", "u:" + "x" * 1100])
def test_T31_a_login_that_is_none_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    where = CoordinatorPlace(
        address="c:1", proxy="http://p.example:3128", proxy_credentials=credentials(tmp_path, text)
    )
    with pytest.raises(NotAllowedError, match=r"is not one line USER:PASSWORD") as caught:
        proxy_of(where)
    assert text not in caught.value.line


def test_T31_a_login_that_others_may_read_or_that_is_missing_is_refused(tmp_path: Path) -> None:
    where = CoordinatorPlace(address="c:1", proxy="http://p.example:3128", proxy_credentials=credentials(tmp_path))
    good = proxy_of(where)
    assert good is not None and good.authorization == f"Basic {WORD}"
    credentials(tmp_path, mode=0o640)
    with pytest.raises(NotAllowedError, match=r"chmod|0600|others"):
        proxy_of(where)
    (tmp_path / "proxy.login").unlink()
    with pytest.raises(NotFoundError):
        proxy_of(where)


# ---- a proxy that opens TLS ------------------------------------------------------------------------------


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("copies", [False, True], ids=["a name of its own", "it copies the coordinator's names"])
def test_T30_a_proxy_that_opens_tls_is_refused_and_its_certificate_named(
    place: Place, tmp_path: Path, copies: bool
) -> None:
    names = (x509.UniformResourceIdentifier("spiffe://cardio-net/coordinator/main"),) if copies else ()
    context, fingerprint = inspecting(tmp_path, "127.0.0.1", names=names)
    with ConnectProxy(1, inspects=context) as proxy:
        route = Proxy(f"127.0.0.1:{proxy.port}")
        dial(place, proxy, proxy=route)
        error = Failing(place, place.allowed()).error()
        assert isinstance(error, UnreachableError)
        assert error.message.startswith(
            f"coordinator 127.0.0.1:{place.proxy.upstream_port} through the proxy {route.address}: its certificate is "
        )
        assert proxy.passed == {"up": 0, "down": 0}
        with pytest.raises(UnreachableError) as caught:
            server_certificate(f"127.0.0.1:{place.proxy.upstream_port}", place.files, route)
        assert caught.value.code == error.code
    assert "Hospital Web Gateway CA\\u001b[31m" in error.message  # whose it is, and nothing that acts on a terminal
    if copies:
        assert error.code == "FOREIGN_CERTIFICATE" and fingerprint[:16] in error.message
    else:
        assert error.code == "TLS_INTERCEPTED"
        assert f"SHA-256 {fingerprint}, for 127.0.0.1" in error.message and "subject 'CN=127.0.0.1'" in error.message
        assert "have 127.0.0.1 excepted from TLS inspection; never add that CA" in error.hint
    # nothing was lost by it: the same message goes through a proxy that leaves TLS alone
    [item] = place.bench.ledger.outbox("allowed")
    with ConnectProxy(place.proxy.upstream_port) as honest:
        dial(place, honest, proxy=Proxy(f"127.0.0.1:{honest.port}"))
        assert isinstance(place.bench.gate.retry(item).body, pb.Ack)


# ---- a proxy that ends silent connections, and one that ends old ones --------------------------------------

IDLE_SECONDS = 1.2  # in the place of a proxy's 60
OUTLIVED = 4  # pings that gRPC would leave out from the third on, if it were not told otherwise


@pytest.mark.slow
@pytest.mark.parametrize("keepalive_seconds", [0.3, 60.0], ids=["pings", "no pings in that time"])
def test_a_call_that_waits_outlives_a_proxy_that_ends_silent_connections(
    place: Place, monkeypatch: pytest.MonkeyPatch, keepalive_seconds: float
) -> None:
    """A large upload waits for its place: nothing crosses, for longer than the proxy lets a silent line stand."""
    others = [option for option in server._OPTIONS if "min_ping" not in option[0]]
    monkeypatch.setattr(server, "_OPTIONS", (*others, ("grpc.http2.min_ping_interval_without_data_ms", 100)))
    place.server.stop(0).wait()
    place.service, place.server, place.proxy.upstream_port = place._served()
    uploads = place.service.uploads
    pings = keepalive_seconds < IDLE_SECONDS
    with CuttingProxy(place.proxy.upstream_port) as proxy:
        proxy.idle_seconds = IDLE_SECONDS
        dial(place, proxy, keepalive_seconds=keepalive_seconds)
        allowed = place.allowed()
        outcome: list[Inbound | BaseException] = []

        def send() -> None:
            try:
                outcome.append(place.bench.gate.transmit(allowed))
            except UnreachableError as error:
                outcome.append(error)

        with ExitStack() as others_send:
            for number in range(PLACES):
                others_send.enter_context(uploads.turn(f"other_{number}", is_active=lambda: True, cut=lambda: None))
            sending = threading.Thread(target=send)
            sending.start()
            proxy.wait(lambda: (proxy.oldest_seconds > OUTLIVED * IDLE_SECONDS) or proxy.ended["idle"] > 0)
            assert (proxy.ended["idle"] == 0) is pings
        sending.join(60.0)
        assert isinstance(outcome[0], Inbound if pings else UnreachableError)
        if pings:
            arrived = place.bench.events("egress.acked")
            assert len(arrived) == 1


AGE_BYTES = 4 * MIB


@pytest.mark.slow
def test_T23_an_upload_that_outlives_several_connections_arrives_once(place: Place, tmp_path: Path) -> None:
    """A proxy lets each connection carry 4 MiB; the payload has 8, and what each is opened with comes on top."""
    allowed = place.allowed()
    with ConnectProxy(place.proxy.upstream_port) as proxy:
        proxy.age_bytes, proxy.fault = AGE_BYTES, Fault("delay", amount=0.002)  # a line, not a memory
        dial(place, proxy, proxy=Proxy(f"127.0.0.1:{proxy.port}"))
        error, tries = Failing(place, allowed).error(), 1
        while isinstance(error, UnreachableError):
            [item] = place.bench.ledger.outbox("allowed")
            tries += 1
            try:
                place.bench.gate.retry(item)
                break
            except UnreachableError as again:
                error = again
        # each connection brings on what is written when it ends; nothing of that crosses twice, but for the MiB that
        # was on its way, and one that lay unread
        assert 3 <= tries <= 9 and proxy.ended["age"] == tries - 1
        assert len(proxy.asked) == 2 * tries - 1  # after each failure it is asked once more, for what went wrong
        assert proxy.passed["up"] < len(allowed.payload) + (tries - 1) * 2 * MIB + tries * OVERHEAD_BYTES
    assert place.bench.ledger.outbox("allowed") == []
    decisions = [record for record in place.bench.events("egress.decision") if record["kind"] == "lora.factors"]
    assert len(decisions) == 1 and len(place.bench.events("egress.acked")) == 1


# ---- the configuration -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["https://p.example:3128", "http://user:hunter2@p.example:3128", "p.example:3128", "http://p.example",
            "http://p.example:3128/path", "socks5://p.example:1080"],
)  # fmt: skip
def test_T31_T35_a_proxy_that_is_none_is_refused_with_its_line_and_not_repeated(tmp_path: Path, url: str) -> None:
    from fedsilo.protocol import strict_yaml

    text = f"address: c.example:8443\nproxy: {url}\n".encode()
    with pytest.raises(UsageError) as caught:
        strict_yaml.validate(CoordinatorPlace, strict_yaml.load(text, "silo.yaml"))
    assert caught.value.message.startswith("silo.yaml:2: ") and "http://HOST:PORT" in caught.value.hint
    assert "hunter2" not in caught.value.line and "p.example" not in caught.value.line


@pytest.mark.parametrize("url", ["http://p.example:3128", "http://10.0.0.1:8080/", "http://[fd00::1]:3128"])
def test_a_proxy_by_name_and_by_address(url: str) -> None:
    place = CoordinatorPlace(address="c.example:8443", proxy=url)
    assert place.first_hop == url.removeprefix("http://").rstrip("/")
    found = proxy_of(place)
    assert found == Proxy(place.first_hop) and proxy_of(CoordinatorPlace(address="c.example:8443")) is None

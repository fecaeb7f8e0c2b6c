"""T24: connections on which nobody finishes TLS are closed in time, take no more places than there are, and cost the
coordinator neither its open files nor its life.

What this does not stop: somebody who dials anew for each connection that is closed; that is the firewall's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from certs.authority import create_ca
from certs.encoding import private_key_pem
from certs.enrolment import EnrolmentKeys
from certs.identity import Identity, peer_identity
from coordinator.config import Limits, load_config
from coordinator.main import Coordinator, check
from coordinator.server import FILES_OF_OUR_OWN, FederationService, connections_max, federation_server
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files import long_lived
from tests.coordinator_folder import write_coordinator
from tests.security.people import new_keys

LIMIT_SECONDS = 60.0  # a limit that is reached means that something hangs
LONG_SECONDS = 600.0


class Listening:
    """A coordinator's listening end with real certificates, as often as a test asks for one."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._stack = stack
        now = datetime.now(UTC)
        self._authority = create_ca("cardio-net", kind="federation", not_before=now - timedelta(days=1), days=30)
        self._root = self._authority.certificate_pem
        self._folder = folder
        tls_key, self._signing_key, keys = new_keys()
        own = self._authority.issue(keys, "coordinator", "main", dns_names=[], ip_addresses=["127.0.0.1"], now=now)
        self._identity = Identity(
            own.spiffe_id, own.certificate_pem, private_key_pem(tls_key), self._signing_key, self._root,
            peer_identity(own.certificate_pem, self._root, now, role="coordinator"),
        )  # fmt: skip

    def serve(self, limits: Limits) -> int:
        service = FederationService(
            cast(Any, None), cast(Any, None), trust_root_pem=self._root, limits=limits, now=lambda: datetime.now(UTC),
            monotonic=lambda: 0.0,
        )  # fmt: skip
        server, port = federation_server(service, self._identity, "127.0.0.1:0", silos=2, limits=limits)
        server.start()
        self._stack.callback(lambda: server.stop(None).wait())
        return port

    def silo_gets_in(self, port: int) -> bool:
        """Whether a silo's TLS stands and the coordinator begins to speak HTTP/2 on it."""
        tls_key, signing_key, _ = new_keys()
        issued = self._authority.issue(
            EnrolmentKeys(tls_key.public_key(), signing_key.public_key()), "silo", "a", now=datetime.now(UTC)
        )
        certificate, key = self._folder / "a.crt", self._folder / "a.key"
        certificate.write_bytes(issued.certificate_pem)
        key.write_bytes(private_key_pem(tls_key))
        context = ssl.create_default_context(cadata=self._root.decode())
        context.load_cert_chain(certificate, key)
        context.set_alpn_protocols(["h2"])
        try:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
            ):
                return bool(secured.recv(1))
        except (ConnectionError, ssl.SSLError):
            return False


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    with contextlib.ExitStack() as stack:
        yield Listening(stack, tmp_path)


def dialled(stack: contextlib.ExitStack, port: int, number: int) -> list[socket.socket]:
    """Connections on which half say nothing, and half the beginning of a TLS greeting."""
    made = []
    for index in range(number):
        each = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS))
        if index % 2:
            with contextlib.suppress(ConnectionError):  # it may be refused by then
                each.sendall(b"\x16\x03\x01\x02\x00\x01")
        made.append(each)
    return made


def closed(connections: list[socket.socket], at_least: int) -> set[socket.socket]:
    """Those that the other end has closed, once there are so many."""
    ended: set[socket.socket] = set()
    while len(ended) < at_least:
        ready, _, _ = select.select([each for each in connections if each not in ended], [], [], LIMIT_SECONDS)
        assert ready, f"{len(ended)} were closed, {at_least} are to be"
        for each in ready:
            try:
                if each.recv(1024) == b"":
                    ended.add(each)
            except ConnectionError:
                ended.add(each)
    return ended


def test_T24_a_connection_without_tls_is_closed_in_time(listening: Listening) -> None:
    port = listening.serve(Limits(handshake_timeout_seconds=1.0))
    with contextlib.ExitStack() as stack:
        connections = dialled(stack, port, 20)
        assert closed(connections, 20) == set(connections)
    assert listening.silo_gets_in(port)


def test_T24_idle_connections_take_no_more_places_than_there_are(listening: Listening) -> None:
    port = listening.serve(Limits(handshake_timeout_seconds=LONG_SECONDS, connections_max=5))
    with contextlib.ExitStack() as stack:
        connections = dialled(stack, port, 20)
        refused = closed(connections, 15)
        assert len(refused) == 15
    with contextlib.ExitStack() as stack:  # with room they are not refused
        port = listening.serve(Limits(handshake_timeout_seconds=LONG_SECONDS, connections_max=40))
        connections = dialled(stack, port, 20)
        assert listening.silo_gets_in(port)
        assert select.select(connections, [], [], 0.0)[0] == []


def test_T24_connections_leave_open_files_for_the_rest() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert connections_max(Limits(connections_max=4096)) == 1024 - FILES_OF_OUR_OWN
        assert connections_max(Limits(connections_max=100)) == 100
        assert long_lived.raise_open_files() == min(hard, long_lived.OPEN_FILES_MAX)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard  # which nobody but root may raise again
        assert long_lived.raise_open_files() == min(hard, long_lived.OPEN_FILES_MAX)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def coordinator_folder(folder: Path) -> Path:
    init_ca(folder / "ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["operator"]}
    provision_site(folder / "main", site="main", federation_ca=folder / "ca", people=people, is_coordinator=True)
    return write_coordinator(folder / "main", ("hospital_a", "hospital_b"))


@pytest.mark.slow
def test_T24_a_coordinator_raises_its_open_files_and_outlives_more_idle_connections_than_it_began_with(
    tmp_path: Path,
) -> None:
    config = coordinator_folder(tmp_path)
    start = [sys.executable, "-m", "fedsilo.cli", "coordinator", "start", "--config", str(config), "--json"]
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -S -n 128; exec "$@"', "sh", *start], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            port = int(json.loads(process.stdout.readline())["data"]["port"])
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == min(hard, long_lived.OPEN_FILES_MAX)
            with contextlib.ExitStack() as stack:
                dialled(stack, port, 200)
        finally:
            process.terminate()
            ended = process.wait(LIMIT_SECONDS)
        assert ended == 0


def test_T24_upkeep_that_finds_no_file_to_open_is_repeated_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Coordinator(check(load_config(coordinator_folder(tmp_path)))) as coordinator, coordinator.serving():
        looks = []

        def look(*_: object) -> None:
            looks.append(1)
            if len(looks) == 2:
                coordinator.request_stop()
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(coordinator.submissions, "look", look)
        coordinator.work()
        assert len(looks) == 2 and not coordinator.driver.halted

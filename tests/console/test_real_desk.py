"""From the console's key to the daemon's desk over a real unix socket: read, watch, approve, refuse."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from certs.authority import create_ca
from certs.commands import VerifiedCommand
from certs.enrolment import EnrolmentKeys
from certs.roles import Roles
from console.feed import Feed, Hand, connect_to, unlock
from fedsilo.control.client import ControlClient
from fedsilo.control.server import ControlServer
from fedsilo.control.socket_server import ControlSocket
from fedsilo.files.durable import write_private
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotAllowedError, OperationError, UnreachableError
from fedsilo.views.state import Snapshot
from tests.console.states import DIGEST, POLICY_DIGEST, release, silo

WAIT_SECONDS = 20


@dataclass
class Site:
    desk: ControlServer
    socket: Path
    folder: Path
    approved: list[VerifiedCommand]

    def person(self, name: str) -> tuple[Path, Path]:
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    now = datetime.now(UTC)
    authority = create_ca("hospital_a", kind="site", not_before=now - timedelta(days=1), days=30)
    for name in ("alice", "bob"):
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        issued = authority.issue_operator(EnrolmentKeys(key.public_key(), None), person=name, now=now)
        (tmp_path / f"{name}.crt").write_bytes(issued.certificate_pem)
        write_private(tmp_path / f"{name}.key", pem)
    roles = Roles("hospital_a", {"alice": frozenset({"approver"}), "bob": frozenset({"viewer"})})
    desk = ControlServer(
        "hospital_a", authority.certificate_pem, roles, lambda: datetime.now(UTC), federation="cardio-net"
    )
    approved: list[VerifiedCommand] = []

    def approve(command: VerifiedCommand) -> dict[str, Any]:
        if command.arguments["digest"] != DIGEST:
            raise ConflictError("digest is not what was shown", code="STALE_VIEW")
        approved.append(command)
        return {"release": command.arguments["release"], "state": "sent", "given": [command.person], "needed": 1}

    desk.register_command("approvals.approve", "release.approve", approve)
    desk.set_state(silo(release()), policy_digest=POLICY_DIGEST)
    server = ControlSocket(desk, tmp_path / "c.sock", "no-such-group", log=logging.getLogger()).start()
    yield Site(desk, tmp_path / "c.sock", tmp_path, approved)
    server.close()


def test_the_feed_reads_follows_and_says_when_the_daemon_is_gone(site: Site) -> None:
    arrived: queue.Queue[Snapshot] = queue.Queue()
    feed = Feed(connect_to(site.socket), arrived.put)
    feed.start()
    try:
        first = arrived.get(timeout=WAIT_SECONDS)
        assert first.link.state == "live" and first.held[0].digest == DIGEST and first.policy_digest == POLICY_DIGEST
        site.desk.publish("release.held", {"release": "r1/hospital_a/0"})
        while not (seen := arrived.get(timeout=WAIT_SECONDS)).events:
            feed.read_now()
        assert seen.events[-1].name == "release.held"
    finally:
        feed.stop()
    gone: queue.Queue[Snapshot] = queue.Queue()
    nobody = Feed(connect_to(site.folder / "nobody.sock"), gone.put)
    nobody.start()
    try:
        lost = gone.get(timeout=WAIT_SECONDS)
        assert lost.link.state == "disconnected" and "does not exist" in lost.link.cause
    finally:
        nobody.stop()


def test_T36_an_answer_is_signed_by_the_person_and_given_once(site: Site) -> None:
    alice, hand = unlock(*site.person("alice")).ordering("cardio-net"), Hand(site.socket)
    arguments = {"release": "r1/hospital_a/0", "digest": DIGEST, "policy_digest": POLICY_DIGEST, "revision": 1}
    result = hand.carry_out(alice, "approvals.approve", arguments, "request-0001")
    assert result["state"] == "sent" and result["given"] == ["alice"]
    (command,) = site.approved
    assert command.person == "alice" and dict(command.arguments) == arguments


def test_T36_other_bytes_and_people_without_the_role_are_refused(site: Site) -> None:
    hand = Hand(site.socket)
    arguments = {"release": "r1/hospital_a/0", "digest": "0" * 64, "policy_digest": POLICY_DIGEST, "revision": 1}
    with pytest.raises(ConflictError) as stale:
        hand.carry_out(
            unlock(*site.person("alice")).ordering("cardio-net"), "approvals.approve", arguments, "request-0002"
        )
    assert stale.value.code == "STALE_VIEW"
    with pytest.raises(NotAllowedError, match="bob"):
        hand.carry_out(
            unlock(*site.person("bob")).ordering("cardio-net"), "approvals.approve", arguments, "request-0003"
        )
    assert site.approved == []


def test_a_key_that_others_may_read_does_not_unlock(site: Site) -> None:
    certificate, key = site.person("alice")
    assert unlock(certificate, key).name == "alice"
    key.chmod(0o644)
    with pytest.raises(NotAllowedError):
        unlock(certificate, key)


def test_a_daemon_that_ends_while_it_is_asked_is_unreachable_and_no_fault_of_its_own(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def waits() -> Any:
        asked.set()
        go_on.wait(WAIT_SECONDS)
        raise OperationError("too late")

    monkeypatch.setattr(site.desk, "snapshot", waits)
    server = ControlSocket(
        site.desk, site.socket.with_name("ending.sock"), "no-such-group", log=logging.getLogger()
    ).start()
    outcome: list[FedSiloError] = []

    def ask() -> None:
        try:
            with ControlClient(site.socket.with_name("ending.sock")) as client:
                client.snapshot()
        except FedSiloError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(WAIT_SECONDS)
    server.close()
    asking.join(WAIT_SECONDS)
    go_on.set()
    assert [type(error) for error in outcome] == [UnreachableError]

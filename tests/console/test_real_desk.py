"""From the console's key to the daemon's desk over a real unix socket: read, watch, approve, refuse."""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from console.feed import Feed, Signer, connect_to, unlock
from fedsilo.control.client import ControlClient
from fedsilo.control.socket_server import ControlSocket
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotAllowedError, OperationError, UnreachableError
from fedsilo.views.state import Snapshot
from tests.console.commands import WAIT_SECONDS, Site
from tests.console.states import DIGEST, POLICY_DIGEST

SHOWN = {"release": "r1/hospital_a/0", "digest": DIGEST, "policy_digest": POLICY_DIGEST, "revision": 1}


def reading(socket: Path) -> tuple[Feed, queue.Queue[Snapshot]]:
    arrived: queue.Queue[Snapshot] = queue.Queue()
    feed = Feed(connect_to(socket), arrived.put)
    feed.start()
    return feed, arrived


def test_the_feed_reads_follows_and_says_when_the_daemon_is_gone(site: Site) -> None:
    feed, arrived = reading(site.socket)
    try:
        first = arrived.get(timeout=WAIT_SECONDS)
        assert first.link.state == "live" and first.held[0].digest == DIGEST and first.policy_digest == POLICY_DIGEST
        site.desk.publish("release.held", {"release": "r1/hospital_a/0"})
        while not (seen := arrived.get(timeout=WAIT_SECONDS)).events:
            feed.read_now()
        assert seen.events[-1].name == "release.held"
    finally:
        feed.stop()
    nobody, gone = reading(site.folder / "nobody.sock")
    try:
        assert gone.get(timeout=WAIT_SECONDS).link.state == "disconnected"
    finally:
        nobody.stop()


def test_T36_an_answer_is_signed_by_a_person_with_the_role_over_what_was_shown(site: Site) -> None:
    hand = Signer(site.socket)
    alice, bob = (unlock(*site.person(name)).ordering("cardio-net") for name in ("alice", "bob"))
    with pytest.raises(ConflictError) as stale:
        hand.carry_out(alice, "approvals.approve", SHOWN | {"digest": "0" * 64}, "request-0002")
    assert stale.value.code == "STALE_VIEW"
    with pytest.raises(NotAllowedError, match="bob"):
        hand.carry_out(bob, "approvals.approve", SHOWN, "request-0003")
    assert site.approved == []
    assert hand.carry_out(alice, "approvals.approve", SHOWN, "request-0001")["given"] == ["alice"]
    (command,) = site.approved
    assert command.person == "alice" and dict(command.arguments) == SHOWN


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
    socket = site.socket.with_name("ending.sock")
    outcome: list[FedSiloError] = []

    def ask() -> None:
        try:
            with ControlClient(socket) as client:
                client.snapshot()
        except FedSiloError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    with closing(ControlSocket(site.desk, socket, "no-such-group", log=logging.getLogger()).start()):
        asking.start()
        assert asked.wait(WAIT_SECONDS)
    asking.join(WAIT_SECONDS)
    go_on.set()
    assert [type(error) for error in outcome] == [UnreachableError]

"""T41: an order that is refused for its time says by how much the person's machine and the daemon's differ."""

from __future__ import annotations

import grp
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import create_ca
from certs.commands import sign_command
from certs.enrolment import EnrolmentKeys
from certs.roles import Roles
from fedsilo.control.client import COMMAND_VALID_SECONDS, ControlClient
from fedsilo.control.server import ControlServer
from fedsilo.control.socket_server import ControlSocket
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import COMMAND_TIME
from fedsilo.protocol.errors import NotAllowedError

HOUR = timedelta(hours=1)
REAL = datetime.now(UTC)  # the person's clock, which is this machine's
CA = create_ca("hospital_a", kind="site", not_before=REAL - 24 * HOUR, days=10)
KEY = ec.generate_private_key(ec.SECP256R1())
ALICE = CA.issue(EnrolmentKeys(KEY.public_key(), None), "operator", "alice", now=REAL - 2 * HOUR)


def order(number: int) -> control_pb2.Command:
    return sign_command(
        site="hospital_a", name="pause", arguments={}, request_id=f"request-{number}",
        expires=datetime.now(UTC) + timedelta(seconds=COMMAND_VALID_SECONDS),
        operator_certificate_pem=ALICE.certificate_pem, operator_key=KEY,
    )  # fmt: skip


@contextmanager
def daemon(folder: Path, ahead: timedelta) -> Iterator[ControlClient]:
    """A daemon whose clock is so far ahead."""
    roles = Roles("hospital_a", {"alice": frozenset({"operator"})})
    desk = ControlServer("hospital_a", CA.certificate_pem, roles, lambda: datetime.now(UTC) + ahead)
    desk.register_command("pause", "silo.pause", lambda command: {"paused": True})
    server = ControlSocket(
        desk, folder / "control.sock", grp.getgrgid(os.getgid()).gr_name, log=logging.getLogger()
    ).start()
    try:
        with ControlClient(folder / "control.sock") as client:
            yield client
    finally:
        server.close()


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (3 * HOUR, "the daemon's clock is 3 h ahead of this machine's"),
        (-1.5 * HOUR, "the daemon's clock is 1 h 30 min behind this machine's"),
        (9 * HOUR, "the daemon's clock is 9 h ahead of this machine's"),  # the person's certificate has ended there
    ],
)
def test_T41_a_refused_order_says_by_how_much_the_clocks_differ(tmp_path: Path, ahead: timedelta, said: str) -> None:
    with daemon(tmp_path, ahead) as client, pytest.raises(NotAllowedError) as refused:
        client.execute(order(10_000_001))
    assert said in refused.value.message and "which of the two is wrong" in refused.value.hint


def test_T41_with_clocks_that_agree_an_order_is_carried_out_and_a_late_one_refused_for_being_late(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, timedelta()) as client:
        assert client.execute(order(10_000_002)) == {"paused": True}
    with daemon(tmp_path, timedelta()) as client:
        late = sign_command(
            site="hospital_a", name="pause", arguments={}, request_id="request-10000003",
            expires=datetime.now(UTC) - timedelta(minutes=4), operator_certificate_pem=ALICE.certificate_pem,
            operator_key=KEY,
        )  # fmt: skip
        with pytest.raises(NotAllowedError) as refused:
            client.execute(late)
    assert refused.value.code == COMMAND_TIME and "4 min" in refused.value.message
    assert "this machine's" not in refused.value.message


def test_T41_where_time_stands_still_the_refusal_says_so(tmp_path: Path) -> None:
    """The clock was an hour and a half ahead once, and is right now."""
    shows = [datetime.now(UTC) + 1.5 * HOUR]
    roles = Roles("hospital_a", {"alice": frozenset({"operator"})})
    desk = ControlServer(
        "hospital_a", CA.certificate_pem, roles, lambda: shows[0], journal=tmp_path / "requests.jsonl"
    )  # fmt: skip
    desk.execute(order(10_000_004))
    shows[0] = datetime.now(UTC)
    reply = desk.execute(order(10_000_005))
    assert reply.error_code.endswith(COMMAND_TIME) and "1 h 30 min ahead" in reply.error_hint

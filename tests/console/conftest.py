"""For the tests of the console and the commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from certs.authority import create_ca
from certs.commands import VerifiedCommand
from certs.enrolment import EnrolmentKeys
from certs.roles import Roles
from fedsilo.control.server import ControlServer
from fedsilo.control.socket_server import ControlSocket
from fedsilo.files.durable import write_private
from tests.console.commands import Site
from tests.console.desk import UPDATE_SECONDS, idle
from tests.console.states import POLICY_DIGEST, release, silo


@pytest.fixture(scope="session", autouse=True)
def _short_waits() -> Iterator[None]:
    """Have Textual draw without delay, and its pilot wait as `idle` does."""
    with (
        patch("textual.screen.UPDATE_PERIOD", UPDATE_SECONDS),
        patch("textual.app.wait_for_idle", idle),
        patch("textual.pilot.wait_for_idle", idle),
    ):
        yield


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A silo that holds one release, at its socket."""
    now = datetime.now(UTC)
    authority = create_ca("hospital_a", kind="site", not_before=now - timedelta(days=1), days=30)
    for name in ("alice", "bob"):
        key = ec.generate_private_key(ec.SECP256R1())
        issued = authority.issue(EnrolmentKeys(key.public_key(), None), "operator", name, now=now)
        (tmp_path / f"{name}.crt").write_bytes(issued.certificate_pem)
        write_private(tmp_path / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    roles = Roles("hospital_a", {"alice": frozenset({"approver"}), "bob": frozenset({"viewer"})})
    pem = authority.certificate_pem
    desk = ControlServer("hospital_a", pem, roles, lambda: datetime.now(UTC), federation="cardio-net")
    made = Site(desk, tmp_path / "c.sock", tmp_path, pem)

    def approve(command: VerifiedCommand) -> Mapping[str, Any]:
        return made.approve(command)

    desk.register_command("approvals.approve", "release.approve", approve)
    desk.set_state(silo(release()), policy_digest=POLICY_DIGEST)
    with closing(ControlSocket(desk, made.socket, "no-such-group", log=logging.getLogger()).start()):
        yield made

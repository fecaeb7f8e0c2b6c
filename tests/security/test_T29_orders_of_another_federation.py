"""A site may be in several federations, with one CA for its people: an order is for the guard of one of them (T29)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from certs.authority import create_ca
from certs.commands import VerifiedCommand, sign_command
from certs.roles import Roles
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.orders import check_orders
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.errors import NotAllowedError
from silo.guard import policy_change, signed_files
from tests.protocol.audit_parties import SILO, Clock, open_log
from tests.security.people import new_keys
from tests.simulated.policy_site import PolicySite, text_of

NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)
CA = create_ca("hospital_a", kind="site", not_before=NOW - timedelta(days=1), days=30)
KEYS = new_keys(signing=False)
CERTIFICATE = CA.issue(KEYS[2], "operator", "alice", now=NOW).certificate_pem
ROLES = Roles("hospital_a", {"alice": frozenset({"operator", "approver"})})


@dataclass
class Guard:
    """Of one site, in one of its federations."""

    federation: str
    done: list[VerifiedCommand] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.desk = ControlServer("hospital_a", CA.certificate_pem, ROLES, lambda: NOW, federation=self.federation)
        self.desk.register_command("stop", "silo.stop", self.stop)

    def stop(self, command: VerifiedCommand) -> dict[str, Any]:
        self.done.append(command)
        return {"stopping": True}

    def given(self, command: control_pb2.Command) -> Any:
        reply = self.desk.execute(command)
        raise_for_reply(reply)
        return json.loads(reply.result_json)


def order(federation: str) -> control_pb2.Command:
    return sign_command(
        federation=federation, site="hospital_a", name="stop", arguments={}, request_id="request-1",
        expires=NOW + timedelta(minutes=5), operator_certificate_pem=CERTIFICATE, operator_key=KEYS[0],
    )  # fmt: skip


def test_T29_T36_an_order_to_one_federation_s_guard_is_refused_by_another_s() -> None:
    cardio, neuro = Guard("cardio-net"), Guard("neuro-net")
    captured = order("cardio-net")
    with pytest.raises(NotAllowedError, match="cardio-net"):
        neuro.given(captured)
    assert neuro.done == [] and cardio.given(captured) == {"stopping": True}  # and its own guard still takes it
    assert [command.name for command in cardio.done] == ["stop"]


@pytest.mark.parametrize("federation", ["", "cardio-net2", "CARDIO-NET", "cardio-net\n"])
def test_T29_T36_an_order_names_exactly_this_federation(federation: str) -> None:
    guard = Guard("cardio-net")
    with pytest.raises(NotAllowedError):
        guard.given(order(federation))
    assert guard.done == []


def test_T29_T36_the_name_of_the_federation_is_signed() -> None:
    guard = Guard("neuro-net")
    for federation in ("cardio-net", ""):
        relabelled = order(federation)
        relabelled.federation = "neuro-net"
        with pytest.raises(NotAllowedError, match="signature"):
            guard.given(relabelled)
    nameless = order("cardio-net")
    nameless.federation = ""
    with pytest.raises(NotAllowedError, match="signature"):
        Guard("cardio-net").given(nameless)
    assert guard.done == []


@pytest.mark.parametrize(("federation", "verified"), [("net", True), ("neuro-net", False)])
def test_T29_T36_a_log_that_holds_an_order_of_another_federation_does_not_verify(
    tmp_path: Path, federation: str, verified: bool
) -> None:
    guard = Guard(federation)
    guard.given(order(federation))
    (command,) = guard.done
    with open_log(tmp_path / "silo", SILO, clock=Clock(NOW.timestamp())) as log:  # of a silo in `net`
        detail = {"person": "alice", "certificate": command.certificate_fingerprint, "request": command.request_id}
        log.append("silo.stop", detail=detail, orders=[dict(command.order)])
        log.checkpoint()
    results = verify_logs([tmp_path / "silo"])
    check_orders(results, [tmp_path / "silo"], [CA.certificate_pem])
    assert results[0]["verified"] is verified and results[0]["orders"]["anchored"] == verified


def test_T29_T34_a_proposal_of_another_federation_counts_for_nothing_and_one_of_an_earlier_version_does(
    tmp_path: Path,
) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.start()
    looser = text_of(("min_peers: 2", "min_peers: 1"))
    path, proposal = place.propose(looser)  # signed without a federation, as an earlier version did
    key, certificate = place.keys["bob"]
    here = signed_files.People(
        "hospital_a", place.site().site_ca_pem, place.site().roles, place.now, 24, place.config.federation
    )
    assert policy_change.read_proposal(path, here).id == proposal.id

    def approval(federation: str) -> control_pb2.Command:
        return sign_command(
            federation=federation, site="hospital_a", name=signed_files.APPROVE, request_id="request-1",
            arguments=policy_change.approval_arguments(proposal), expires=proposal.expires,
            operator_certificate_pem=certificate, operator_key=key,
        )  # fmt: skip

    with pytest.raises(NotAllowedError, match="neuro-net"):
        policy_change.write_approval(path, proposal, approval("neuro-net"), here)
    place.policy_is(looser)
    with pytest.raises(NotAllowedError):
        place.start()
    policy_change.write_approval(path, proposal, approval(place.config.federation), here)
    assert place.start().how == "approved"

"""T26: which certificate a silo used when, and that it was about to expire, stands in its audit log and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from certs.authority import create_ca
from certs.encoding import private_key_pem
from certs.identity import Identity, peer_identity
from fedsilo.audit.log import AuditLog
from fedsilo.cli.audit_report import audit_report
from silo.guard.site import OwnCertificate
from tests.security.people import new_keys

BEGAN = datetime(2027, 1, 4, 8, 0, tzinfo=UTC)
WEEK = timedelta(days=7)
CA = create_ca("cardio-net", kind="federation", not_before=BEGAN - timedelta(days=1), days=60)
KEYS = new_keys()
SILO = "spiffe://cardio-net/silo/hospital_a"


def identity(now: datetime, keys: Any = KEYS, *, lifetime: timedelta = WEEK) -> Identity:
    """A certificate, by default of a week, as daemons have them."""
    tls_key, signing_key, public = keys
    issued = CA.issue(public, "silo", "hospital_a", now=now, lifetime=lifetime)
    peer = peer_identity(issued.certificate_pem, CA.certificate_pem, now, role="silo")
    return Identity(SILO, issued.certificate_pem, private_key_pem(tls_key), signing_key, CA.certificate_pem, peer)


@dataclass
class Log:
    """A silo's audit log over its starts, and a clock."""

    folder: Path
    now: datetime = BEGAN
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def _seconds(self) -> float:
        return self.now.timestamp()  # of the moment that it is asked for

    def start(self, used: Identity, *later: timedelta) -> list[tuple[str, str]]:
        """One start and what follows of it; the key events that it adds, with the certificate they name."""
        with AuditLog(
            self.folder, origin=SILO, key=self.key, actor=SILO, clock=self._seconds, reserve_bytes=0
        ) as audit:
            before = audit.append("start")
            certificate = OwnCertificate(used, self.folder)
            certificate.look(audit.append, self.now.timestamp())
            for step in later:
                self.now += step
                certificate.look(audit.append, self.now.timestamp())
            return [
                (record["event"], record["detail"]["fingerprint"])
                for record in audit.records(before)
                if record["event"].startswith("key.")
            ]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "audit")


def test_T26_a_certificate_is_recorded_when_it_is_taken_into_use_and_not_again(log: Log) -> None:
    first, second = identity(BEGAN), identity(BEGAN + timedelta(hours=1))
    assert log.start(first) == [("key.enrol", first.peer.fingerprint)]
    assert log.start(first) == []
    assert log.start(second) == [("key.renew", second.peer.fingerprint)]
    assert log.start(second) == []
    other_keys = identity(BEGAN + timedelta(hours=1), new_keys())
    assert log.start(other_keys) == [("key.renew", other_keys.peer.fingerprint)]
    assert log.start(first) == [("key.renew", first.peer.fingerprint)]  # also one that was in use before


def test_T26_a_certificate_that_expires_soon_is_warned_of_once_at_a_start_or_in_the_middle(log: Log) -> None:
    used = identity(BEGAN)
    expires = ("key.expire_warn", used.peer.fingerprint)
    almost = WEEK - timedelta(days=1)
    # a minute before its last day there is nothing to warn of, a minute later there is, and once is enough
    assert log.start(used, almost - timedelta(minutes=1))[1:] == []
    assert log.start(used, timedelta(minutes=2), timedelta(hours=1)) == [expires]
    assert log.start(used, timedelta(hours=1)) == []
    renewed = identity(log.now)
    assert log.start(renewed, timedelta(hours=1)) == [("key.renew", renewed.peer.fingerprint)]
    log.now += almost
    assert log.start(renewed) == [("key.expire_warn", renewed.peer.fingerprint)]


@pytest.mark.parametrize(
    ("lifetime", "warned"),
    [
        (timedelta(days=7), timedelta(days=1)),
        (timedelta(hours=24), timedelta(hours=8)),
        (timedelta(hours=6), timedelta(hours=2)),
    ],
    ids=str,
)
def test_T26_a_short_certificate_is_warned_of_in_the_last_third_of_its_life_and_not_at_once(
    log: Log, lifetime: timedelta, warned: timedelta
) -> None:
    used = identity(BEGAN, lifetime=lifetime)
    # certificates are dated back by five minutes, which adds less than two minutes to a third
    assert log.start(used, lifetime - warned - timedelta(minutes=3)) == [("key.enrol", used.peer.fingerprint)]
    assert log.start(used, timedelta(minutes=4)) == [("key.expire_warn", used.peer.fingerprint)]
    renewed = identity(log.now, lifetime=lifetime)
    assert log.start(renewed, timedelta(hours=1)) == [("key.renew", renewed.peer.fingerprint)]


def test_T26_the_report_names_the_certificates_and_until_when_they_are_good(log: Log) -> None:
    first, second = identity(BEGAN), identity(BEGAN + timedelta(hours=1))
    log.start(first)
    log.start(second)
    report = audit_report([log.folder])
    shown = [(row["identity"], row["fingerprint"], row["valid_until"]) for row in report["certificates"]]
    assert shown == [
        (SILO, first.peer.fingerprint, "2027-01-11T08:00:00Z"),
        (SILO, second.peer.fingerprint, "2027-01-11T09:00:00Z"),
    ]
    assert [event["event"] for event in report["key_events"]] == ["key.enrol", "key.renew"]
    assert first.key_pem.decode()[30:60] not in str(report)

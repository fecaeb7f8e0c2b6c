"""T24: whoever may knock or open a control socket for reading cannot decide how large the log grows."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from certs.authority import create_ca
from certs.commands import sign_command
from certs.roles import Roles
from coordinator.config import Limits
from coordinator.server import FederationService
from fedsilo.control.server import REFUSALS_LOGGED_MAX, ControlServer
from fedsilo.files.logs import KINDS_MAX, QuietLog
from tests.security.people import new_keys

NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)
LOG = logging.getLogger("fedsilo.coordinator")


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fedsilo")


def test_a_kind_is_said_once_then_counted_and_said_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    quiet = QuietLog(LOG, monotonic=clock)
    said = []
    for clock.seconds in (0.0, 9.99, 10.0, 10.5):
        said += [quiet.say("a", "lines of a", "a line"), quiet.say("b", "lines of b", f"b at {clock.seconds}")]
    assert said == [True, True, False, False, True, True, False, False] and quiet.holding
    quiet.flush(everything=True)
    assert caplog.messages == [
        *("a line", "b at 0.0", "lines of a: 1 more", "lines of b: 1 more"),
        *("a line", "b at 10.0", "lines of a: 1 more", "lines of b: 1 more"),
    ]
    assert not quiet.holding


def test_a_count_is_told_when_its_time_is_over_though_nobody_says_anything(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    quiet = QuietLog(LOG, monotonic=clock)
    for _ in range(3):
        quiet.say("a", "lines of a", "%s is no format here")
    clock.seconds = 9.99
    quiet.flush()
    assert caplog.messages == ["%s is no format here"]
    clock.seconds = 10.0
    quiet.flush()
    assert caplog.messages[1:] == ["lines of a: 2 more"]


def test_kinds_without_end_share_one(caplog: pytest.LogCaptureFixture) -> None:
    quiet = QuietLog(LOG, monotonic=Clock())
    for number in range(1000):
        quiet.say(str(number), "lines", f"line {number}")
    quiet.flush(everything=True)
    assert len(caplog.messages) == KINDS_MAX + 2
    assert caplog.messages[-1].endswith(f"{1000 - KINDS_MAX - 1} more")


def test_no_line_is_lost_or_counted_twice_between_threads(caplog: pytest.LogCaptureFixture) -> None:
    quiet = QuietLog(LOG, monotonic=Clock())
    threads = [
        threading.Thread(target=lambda: [quiet.say("a", "lines of a", "one") for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    quiet.flush(everything=True)
    assert caplog.messages == ["one", "lines of a: 1999 more"]


# ---- the three that use it (the third is the native log) -----------------------------------------------------


def test_T24_refused_commands_do_not_fill_the_log_and_cannot_hide_a_person_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = create_ca("hospital_a", kind="site", not_before=NOW, days=30)
    strangers = create_ca("hospital_a", kind="site", not_before=NOW, days=30)
    desk = ControlServer(
        "hospital_a", authority.certificate_pem, Roles("hospital_a", {"victor": frozenset({"viewer"})}), lambda: NOW
    )
    desk.register_command("stop", "silo.stop", lambda command: None)

    def command(issuer: Any, person: str, number: int) -> Any:
        key, _, keys = new_keys(signing=False)
        return sign_command(
            site="hospital_a", name="stop", arguments={}, request_id=f"request-{number:04}",
            expires=NOW.replace(hour=13),
            operator_certificate_pem=issuer.issue(keys, "operator", person, now=NOW).certificate_pem,
            operator_key=key,
        )  # fmt: skip

    forged, real = command(strangers, "alice", 0), command(authority, "victor", 1)
    for number in range(300):
        forged.name = f"stop\n{number}"  # the caller's text makes no new kind
        assert desk.execute(forged).error_code
    assert desk.execute(real).error_code == "NOT_ALLOWED"
    desk.close()
    assert len(caplog.messages) == REFUSALS_LOGGED_MAX + 2
    assert caplog.messages[-2].startswith("refused the command 'stop': victor (viewer) may not silo.stop")
    count = f"{300 - REFUSALS_LOGGED_MAX} more"
    assert caplog.messages[-1] == f"refused commands of somebody whose command does not verify: {count}"


class Ended(Exception):
    """What grpc's abort raises."""


class Call:
    """As much of a grpc context as is asked before a call is refused."""

    def __init__(self, host: str, certificate: bytes = b"none") -> None:
        self._host, self._certificate = host, certificate

    def peer(self) -> str:
        return f"ipv4:{self._host}:5000"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"ssl_tls_version": [b"TLSv1.3"], "x509_pem_cert": [self._certificate]}

    def is_active(self) -> bool:
        return True

    def abort(self, code: object, text: str) -> None:
        raise Ended(code, text)


def test_T24_refused_calls_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    clock = Clock()
    root = create_ca("cardio-net", kind="federation", not_before=NOW, days=30)
    service = FederationService(
        cast(Any, None), cast(Any, None), trust_root_pem=root.certificate_pem, limits=Limits(), now=lambda: NOW,
        monotonic=clock,
    )  # fmt: skip

    def refused(call: Call) -> None:
        with pytest.raises(Ended):
            list(service.exchange(iter(()), cast(Any, call)))

    for _ in range(100):
        refused(Call("192.0.2.1"))
    refused(Call("192.0.2.2"))
    refused(Call("192.0.2.1", b"another certificate"))
    hosts = ["192.0.2.1:5000", "192.0.2.2:5000", "192.0.2.1:5000"]
    assert [line.partition(": ")[0] for line in caplog.messages] == [f"refused a call from {host}" for host in hosts]
    clock.seconds = 10.0
    service.watchdog.look()  # the daemon's tick
    assert caplog.messages[3:] == ["refused calls from 192.0.2.1: 99 more"]


def test_T24_faults_of_ours_show_their_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    service = FederationService(
        cast(Any, None), cast(Any, None), trust_root_pem=b"", limits=Limits(), now=lambda: NOW, monotonic=Clock()
    )
    broken = Call("192.0.2.1")
    broken.auth_context = lambda: cast(Any, None)  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(Ended):
            list(service.exchange(iter(()), cast(Any, broken)))
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "a call ended by a fault of ours")
    assert record.exc_info is not None and record.exc_info[0] is AttributeError

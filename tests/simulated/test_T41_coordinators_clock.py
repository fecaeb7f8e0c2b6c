"""T41 at a coordinator: a jump while it runs is told and not followed; one that it started with stays the latest time,
as ever, until an approver accepts the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from certs.commands import sign_command
from coordinator.config import load_config
from coordinator.main import Coordinator, check
from fedsilo.control.answers import to_json
from fedsilo.control.server import raise_for_reply
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.identity_files import load_operator
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError
from tests.simulated.coordinator_parts import SILOS
from tests.simulated.test_coordinator_queries import write_coordinator

DAY = 86_400.0
JUMP = 400 * DAY
WEEK = 7 * DAY


@dataclass
class CoordinatorSite:
    """A real coordinator in a folder, its clock and the time that passes moved by hand; people's orders to it."""

    folder: Path
    wall: float = field(default_factory=time.time)
    running: float = 1_000.0
    given: int = 0

    def __post_init__(self) -> None:
        ca, people = self.folder / "ca", {"alice": ["approver"], "bob": ["operator"]}
        init_ca(ca, name="cardio-net", kind="federation")
        provision_site(self.folder / "main", site="main", federation_ca=ca, people=people, is_coordinator=True)
        self.checked = check(load_config(write_coordinator(self.folder / "main", SILOS)))

    def open(self) -> Coordinator:
        return Coordinator(self.checked, clock=lambda: self.wall, running=lambda: self.running)

    def order(self, coordinator: Coordinator, person: str, **arguments: Any) -> None:
        """Accept the clock, signed by one that shows what the coordinator's does."""
        identity = self.folder / "main/id"
        certificate, key = load_operator(identity / f"{person}.crt", identity / f"{person}.key")
        self.given += 1
        command = sign_command(
            site="main", name="clock.accept", arguments=arguments, request_id=f"request-{self.given:04}",
            expires=datetime.fromtimestamp(self.wall, UTC) + timedelta(minutes=2),
            operator_certificate_pem=certificate, operator_key=key, federation="cardio-net",
        )  # fmt: skip
        raise_for_reply(coordinator.desk.execute(command))

    def told(self, coordinator: Coordinator) -> list[dict[str, Any]]:
        return [record for record in coordinator.audit.records() if "forward_milliseconds" in record.get("detail", {})]


def test_T41_time_that_stands_still_goes_on_when_an_approver_accepts_the_clock(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path)
    right = site.wall
    with site.open() as coordinator, pytest.raises(NotFoundError):
        site.order(coordinator, "alice", halt="")
    site.wall += JUMP
    with site.open() as coordinator:  # nobody tells it the time, so at a start it believes its clock
        coordinator.audit.append("start")
        site.wall = right
        assert coordinator.seconds() == right + JUMP  # and nobody's certificate is good by that
    with site.open() as coordinator:
        stands = to_json(coordinator.control.state())["clock"]
        assert stands["behind_seconds"] == JUMP and "400 d behind the latest time seen" in stands["told"]
        with pytest.raises(NotAllowedError):
            site.order(coordinator, "bob", halt=stands["digest"])
        with pytest.raises(ConflictError):
            site.order(coordinator, "alice", halt="ab" * 32)
        site.wall = right + 120.0
        other = coordinator.clock()["digest"]
        site.wall = right  # set back further than was shown
        with pytest.raises(ConflictError):
            site.order(coordinator, "alice", halt=other)
        site.order(coordinator, "alice", halt=stands["digest"])
        assert coordinator.seconds() == right and not to_json(coordinator.control.state())["clock"]
        with pytest.raises(NotFoundError):
            site.order(coordinator, "alice", halt=stands["digest"])
    with site.open() as coordinator:
        assert coordinator.seconds() == right
        record = list(coordinator.audit.records())[-1]
        assert record["event"] == "clock.accept" and record["detail"]["person"] == "alice" and record["orders"]


def test_T41_a_jump_while_it_runs_is_told_and_not_followed_until_an_approver_accepts_it(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path, wall=time.time() - WEEK)
    with site.open() as coordinator:
        began = coordinator.seconds()
        site.running += 60.0
        site.wall += 60.0
        assert coordinator.seconds() == began + 60.0 and not coordinator.clock()
        site.wall += WEEK
        site.running += 10.0
        # nothing is judged, stored or signed by it
        coordinator.audit.append("run.submit")
        coordinator.audit.checkpoint()
        coordinator.look_at_clock()
        coordinator.look_at_clock()
        assert coordinator.seconds() == began + 70.0 and coordinator.audit.latest_time == pytest.approx(began + 70.0)
        stands = to_json(coordinator.control.state())["clock"]
        assert (stands["ahead_seconds"], stands["latest"]) == (pytest.approx(WEEK, abs=11), began + 70.0)
        assert "7 d ahead of the time that has passed" in stands["told"]
        (jump,) = site.told(coordinator)
        assert jump["detail"] == {"forward_milliseconds": int((WEEK - 10.0) * 1000), "followed": False}
        assert jump["t"] / 1000 == pytest.approx(began + 70.0)
        # right again: it is believed, and nothing has to be released
        site.wall -= WEEK
        assert coordinator.seconds() == began + 70.0 and not coordinator.clock()
        # the clock was wrong before, and is right after the jump: a person says so, by a clock that shows the same
        site.wall = time.time()
        stands = coordinator.clock()
        with pytest.raises(NotAllowedError):
            site.order(coordinator, "bob", halt=stands["digest"])
        site.running += 1.0
        site.wall += 1.0
        site.order(coordinator, "alice", halt=stands["digest"])
        assert coordinator.seconds() == pytest.approx(began + WEEK, abs=120) and not coordinator.clock()
        assert list(coordinator.audit.records())[-1]["event"] == "clock.accept"


def test_T41_an_acceptance_is_of_the_jump_that_was_shown_and_each_jump_is_told(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path, wall=time.time() - WEEK)
    with site.open() as coordinator:
        for _ in range(2):  # it goes back in between
            site.wall += WEEK
            coordinator.look_at_clock()
            shown = coordinator.clock()["digest"]
            site.wall += 5.0  # the clock is slewed while people look
            assert coordinator.clock()["digest"] == shown
            site.wall -= WEEK + 5.0
            coordinator.look_at_clock()
            assert not coordinator.clock()
        assert [round(each["detail"]["forward_milliseconds"] / DAY / 1000) for each in site.told(coordinator)] == [7, 7]
        site.wall += WEEK
        shown = coordinator.clock()["digest"]
        site.wall += 3_600.0
        with pytest.raises(ConflictError):
            site.order(coordinator, "alice", halt=shown)
        site.wall -= 3_600.0
        site.order(coordinator, "alice", halt=shown)
        assert not coordinator.clock()


def test_T41_small_jumps_are_recorded_and_add_up_to_one_that_is_not_followed(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path)
    with site.open() as coordinator:
        for hours in range(1, 26):
            site.wall += 3_600.0
            coordinator.look_at_clock()
            assert bool(coordinator.clock()) == (hours == 25)
        assert [each["detail"].get("followed") for each in site.told(coordinator)] == [None] * 24 + [False]


def test_T41_a_gap_before_the_start_is_recorded_and_a_restart_within_the_hour_is_none(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path)
    for gap, told in ((0.0, 0), (1_800.0, 0), (64 * 3_600.0, 1)):  # the first start, a restart, a weekend
        site.wall += gap
        with site.open() as coordinator:
            coordinator.look_at_clock()
            assert len(site.told(coordinator)) == told and not coordinator.clock()
            coordinator.audit.append("start")

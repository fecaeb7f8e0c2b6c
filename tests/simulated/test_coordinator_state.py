"""The snapshot of a coordinator: what changes without an event is in it within a second, a break of its log as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import control
from coordinator.config import load_config
from coordinator.control import REFRESH_SECONDS, Control
from coordinator.main import Coordinator, check
from fedsilo.audit.segments import segments
from fedsilo.cli import run as cli_run
from fedsilo.control.answers import Broken, to_json
from fedsilo.control.server import ControlServer
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from tests.coordinator_folder import write_coordinator
from tests.simulated.coordinator_parts import SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.queries import rounds_of, settled
from tests.simulated.test_coordinator_queries import desk_of

CONFIG: Any = SimpleNamespace(coordinator="main", site="main", federation="cardio-net", state_dir="state", silos=SILOS)


def shown(desk: ControlServer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(desk.snapshot().state_json)
    return state


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo], Control, ControlServer]]:
    house, silos = federation(tmp_path)
    desk, outcome = desk_of(), None
    with closing(house):
        made = Control(desk, house.driver, house.submissions, outcome, CONFIG, "c" * 64)  # type: ignore[arg-type]
        for silo in silos:
            silo.join()
        made.refresh()
        yield house, silos, made, desk


def last_seen(desk: ControlServer) -> list[str]:
    return [row["last_seen"] for row in shown(desk)["silos"]]


def test_when_a_silo_was_last_seen_is_fresh_within_a_second_without_any_event(joined: Any) -> None:
    house, silos, made, desk = joined
    before = last_seen(desk)
    house.clock.seconds += REFRESH_SECONDS / 2
    silos[0].poll()
    made.refresh_if_changed()
    assert last_seen(desk) == before  # not with every tick
    house.clock.seconds += 7.0
    silos[0].poll()
    made.refresh_if_changed()
    assert last_seen(desk)[1:] == before[1:]
    moved = datetime.fromisoformat(last_seen(desk)[0]) - datetime.fromisoformat(before[0])
    assert moved.total_seconds() >= 7.0


def test_the_runs_are_read_after_an_event_and_not_every_second(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    house, _, made, desk = joined
    house.submit()
    read: list[int] = []
    whole = made.runs

    def counted() -> Any:
        read.append(1)
        return whole()

    monkeypatch.setattr(made, "runs", counted)
    for _ in range(5):
        house.clock.seconds += 2.0
        made.refresh_if_changed()
    assert read == [] and shown(desk)["runs"] == []
    made.publish("run.submitted", {"run": "run-1"})
    made.refresh_if_changed()
    assert read == [1] and [row["run"] for row in shown(desk)["runs"]] == ["run-1"]


def test_the_state_is_made_up_when_somebody_looks_and_once_for_all_that_happened(
    joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, _, made, desk = joined
    house.submit()
    read, whole = list[int](), made.runs
    monkeypatch.setattr(made, "runs", lambda: read.append(1) or whole())
    for name in ("run.submitted", "silo.joined", "run.started"):
        made.publish(name, {})
    assert read == []
    assert [row["run"] for row in shown(desk)["runs"]] == ["run-1"] and read == [1]
    assert [row["run"] for row in shown(desk)["runs"]] == ["run-1"] and read == [1], "nothing happened since"


def test_where_the_database_cannot_be_read_what_was_shown_last_says_that_all_has_halted(
    joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, _, made, desk = joined
    before = shown(desk)
    assert before["halted"] == ""

    def lost() -> Any:
        raise OperationError("the database went away", code="DATABASE_LOST")

    with monkeypatch.context() as patched:
        patched.setattr(made, "runs", lost)
        made.publish("run.submitted", {})
        assert shown(desk) == {**before, "halted": "DATABASE_LOST"} and house.driver.halted == "DATABASE_LOST"


def test_who_looks_while_a_state_is_being_made_up_sees_the_last_one(
    joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, made, desk = joined
    before = shown(desk)
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.01)
    made.publish("run.submitted", {})
    with made._looking:
        assert shown(desk) == before
    assert made._changed, "nobody has looked yet"


def test_T38_a_break_that_a_verification_found_is_in_the_state(joined: Any) -> None:
    house, _, made, desk = joined
    assert shown(desk)["audit"] == {"size": house.audit.size, "broken": None}
    made.log_broken = lambda: Broken(seq=3, why="its hash differs")
    house.clock.seconds += 2.0
    made.refresh_if_changed()
    assert shown(desk)["audit"]["broken"] == {"seq": 3, "why": "its hash differs"}


def test_a_coordinator_shows_what_its_own_verification_found(tmp_path: Path) -> None:
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["operator"]}
    provision_site(tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people=people, is_coordinator=True)
    with Coordinator(check(load_config(write_coordinator(tmp_path / "main", SILOS)))) as coordinator:
        assert to_json(coordinator.control.state())["audit"] == {"size": coordinator.audit.size, "broken": None}
        coordinator.audit.append("start")
        (_, path), *_ = segments(coordinator.audit.directory)
        path.write_bytes(path.read_bytes().replace(b'"event":"start"', b'"event":"stop"', 1))
        coordinator.control_server.query("audit.verify", "")
        settled(lambda _: json.loads(coordinator.control_server.query("audit.status", "").data_json))
        broken = to_json(coordinator.control.state())["audit"]["broken"]
        assert broken is not None and broken["seq"] == 0


def test_where_a_silo_stands_is_told_of_a_run_that_goes_on_and_of_no_other(joined: Any) -> None:
    house, silos, made, _ = joined

    def places() -> list[tuple[int, int]]:
        return [(row["round"], row["step"]) for row in to_json(made.silos())]

    def progress(run: str) -> None:
        silos[0].say("control.progress", pb.Progress(round=1, step=2), run=run, number=1, step=2)

    silos[0].mute = {"lora.factors", "public.responses"}  # so that the round stays open
    house.submit()
    until_quiet(silos)
    progress("no-such-run")
    assert places() == [(0, 0)] * len(SILOS)
    progress("run-1")
    assert places() == [(1, 2)] + [(0, 0)] * (len(SILOS) - 1)
    view = rounds_of(house)({"run": "run-1"})
    assert [row["step"] for row in view["silos"]] == [2] + [None] * (len(SILOS) - 1)
    while house.driver.runs:  # its rounds end by their deadlines
        house.advance(1000.0)
        until_quiet(silos)
    assert places() == [(0, 0)] * len(SILOS)


def test_a_run_that_waits_tells_what_was_asked_for(tmp_path: Path) -> None:
    house, _ = federation(tmp_path)
    with closing(house):
        made = Control(desk_of(), house.driver, house.submissions, SimpleNamespace(), CONFIG, "c" * 64)  # type: ignore[arg-type]
        house.submit()
        record = made.run({"run": "run-1"})
        assert record["state"] == "waiting" and record["plan"] is None
        text = cli_run._record_text(record)
        assert f"method {record['request']['method']}, seed {record['request'].get('seed', '-')}, submitted by" in text

"""kill -9 in the middle of a round: of a silo, which returns, and of the coordinator, which another machine replaces
from a backup. Nothing stays behind, and nobody waits for the dead."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.control.client import ControlClient
from fedsilo.protocol.isolation import ISOLATION_LEVELS
from tests.loopback.conftest import HOLDS
from tests.loopback.federation import Federation, command, descendants, living, records
from tests.loopback.test_hold_and_approve import answer, held_release

pytestmark = pytest.mark.slow

SILOS = ("hospital_b", "hospital_c")


@pytest.fixture(scope="module")
def undisturbed(sites: Federation) -> dict[str, Any]:
    return sites.run("after", silos=list(SILOS))


def test_the_run_goes_on_without_a_killed_silo_which_then_joins_again(
    sites: Federation, request: pytest.FixtureRequest
) -> None:
    survivor, victim = SILOS
    # three of them: what one survivor alone has to say is no round's result (T58)
    submitted = sites.submit(
        "killed", silos=[HOLDS, survivor, victim], swap_period=4, public_step_deadline_seconds=2.0,
        round_deadline_seconds=40.0,
    )  # fmt: skip
    assert submitted.exit_code == 0
    sites.until_state(victim, lambda state: state.get("run") == "killed" and int(state.get("step") or 0) >= 1)
    below = descendants(sites.pid(victim))
    assert below
    sites.kill(victim)
    assert answer(sites, "approve", held_release(sites, number=1), "alice").exit_code == 0
    committed = sites.until_committed("killed", 1)  # at the deadline, since the dead say nothing
    assert committed["participants"] == [HOLDS, survivor]
    assert living(below) == []  # the trainer hangs on its guard's leash

    # Back again it says that it has nothing for this round, so nobody waits for its evaluation; then it takes part.
    sites.start(victim)
    assert sites.ended("killed")["state"] == "finished"
    assert request.getfixturevalue("undisturbed")["rounds"][0]["participants"] == [survivor, victim]
    lines = records(sites.site(victim).audit_log)
    assert [line["event"] for line in lines].count("start") == 2
    # one certificate in both lives, told once; and in which sandbox the trainer was when the plan was accepted
    (enrolled,) = [line["detail"] for line in lines if line["event"].startswith("key.")]
    assert len(enrolled["fingerprint"]) == 64 and enrolled["identity"].endswith(f"/silo/{victim}")
    accepted = [line["detail"]["isolation"] for line in lines if line["event"] == "plan.accept"]
    assert accepted and all(level in ISOLATION_LEVELS for level in accepted)
    verdicts = command("fedsilo", "audit", "verify", *(site.audit_log for site in sites.sites.all())).data
    assert all(row["verified"] for row in verdicts)


def test_a_silo_that_was_down_when_the_run_began_is_in_the_next_round(sites: Federation) -> None:
    present, late = SILOS
    sites.kill(late)
    # the two others have to be in before this has passed, and their trainers may be starting anew after a run
    assert sites.submit("late", rounds=2, quorum=2, join_deadline_seconds=30.0).exit_code == 0
    held = held_release(sites, number=1)  # so that the first round lasts until the third has taken the plan in
    sites.start(late)

    def everybody_is_in(_: Any) -> bool:
        with ControlClient(sites.sites.coordinator.control_socket) as client:
            rows = client.query("round", {"run": "late"})["silos"]
        return {row["silo"] for row in rows if row["plan"] == "accepted"} == {HOLDS, *SILOS}

    sites.until_state(sites.sites.coordinator.name, everybody_is_in)
    assert answer(sites, "approve", held, "alice").exit_code == 0
    record = sites.ended("late")
    assert record["state"] == "finished"
    assert [row["participants"] for row in record["rounds"]] == [[HOLDS, present], [HOLDS, *SILOS]]
    verdicts = command("fedsilo", "audit", "verify", *(site.audit_log for site in sites.sites.all())).data
    assert all(row["verified"] for row in verdicts)


def test_T29_a_standby_made_from_a_backup_ends_a_run_of_a_killed_coordinator_with_the_same_adapter(
    sites: Federation, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    first, silo = sites.sites.coordinator, SILOS[1]
    assert sites.submit("moved", silos=list(SILOS)).exit_code == 0
    sites.until_state(silo, lambda state: state.get("run") == "moved" and int(state.get("step") or 0) >= 2)
    running = command("coordinator", "backup", "--out", tmp_path / "early", *sites.coordinator_config)
    assert running.data["running"] and "silos will not go on" in running.envelope["warnings"][0]
    sites.kill(first.name)
    ended = command("coordinator", "backup", "--out", tmp_path / "backup", *sites.coordinator_config).data
    assert not ended["running"] and ended["log_size"] >= running.data["log_size"]
    assert not (tmp_path / "backup" / "keys").exists()

    # another machine: the program, the public key, and the private ones, which came another way
    config = tmp_path / "standby" / "coordinator.yaml"
    known = ("--key", first.folder / "id" / "coordinator.pub")
    witnessed = list(sites.site(silo).audit_log.glob("witnessed/*coordinator*.note"))
    assert witnessed
    refused = command("coordinator", "restore", tmp_path / "backup", "--config", config, *known,
                      "--witnessed", tmp_path / "mistyped.note")  # fmt: skip
    assert refused.exit_code == 8, refused.envelope
    assert not list(config.parent.rglob("*")), "nothing with which a coordinator could be started anew"
    answer = command("coordinator", "restore", tmp_path / "backup", "--config", config, *known,
                     "--witnessed", *witnessed)  # fmt: skip
    assert answer.data["log_root"] == ended["log_root"] and len(answer.data["missing"]) == 2
    for missing in answer.data["missing"]:
        shutil.copy2(first.folder / "id" / Path(missing).name, missing)
    for persons in (first.folder / "id").glob("carol*"):  # a person's own, which no backup of a machine holds
        shutil.copy2(persons, config.parent / "id" / persons.name)
    again = command("coordinator", "restore", tmp_path / "early", "--config", config)
    assert again.exit_code == 6 and again.envelope["error"]["code"] in ("LOG_BEHIND", "EXISTS")

    folder = config.parent
    sites.sites = replace(sites.sites, coordinator=replace(
        first, folder=folder, config=config, control_socket=folder / first.control_socket.relative_to(first.folder),
        audit_log=folder / first.audit_log.relative_to(first.folder),
    ))  # fmt: skip
    sites.start(first.name)
    record = sites.ended("moved")
    assert (record["state"], record["adapter_sha256"]) == ("finished", undisturbed["adapter_sha256"])
    assert [row["participants"] for row in record["rounds"]] == [list(SILOS)]
    verdicts = command("fedsilo", "audit", "verify", *(site.audit_log for site in sites.sites.all())).data
    assert all(row["verified"] for row in verdicts)

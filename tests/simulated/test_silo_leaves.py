"""A silo leaves its run for good: at its guard nothing more goes out and a restart stays out; at the coordinator nobody
waits for it, what it gave stays, and it comes back with another run only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.answers.rounds import RoundView
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, UnreachableError
from fedsilo.protocol.plan import Plan
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, House, federation, joined, until_quiet
from tests.simulated.test_guard_loop import abstained, in_round
from tests.simulated.test_orders_recorded import Orders, new_desk, orders_in
from tests.world import Loop

DOWN = UnreachableError("down")


def orders_of(loop: Loop) -> Orders:
    desk = new_desk()
    dataclasses.replace(loop.guard.orders, on_loop=lambda work: work()).register(desk)
    return Orders(desk)


def test_a_silo_that_left_says_goodbye_until_it_is_heard_and_stays_out_over_a_restart(loop: Loop) -> None:
    give = orders_of(loop)
    with pytest.raises(NotFoundError):
        give("leave")
    loop.coordinator.fails_at("metrics.eval", DOWN)
    in_round(loop)
    (waiting,) = loop.bench.ledger.outbox("allowed")
    with pytest.raises(ConflictError) as stale:
        give("leave", request_id="request-2", run="run-0")
    with pytest.raises(NotAllowedError):
        give("leave", "bob", request_id="request-3", run="run-1")
    assert stale.value.code == "STALE_VIEW" and loop.guard.runs.run is not None

    told = give("leave", request_id="request-4", run="run-1")
    assert told["run"] == "run-1" and loop.guard.runs.run is None
    assert orders_in(loop.bench.audit.records()) == [(told["record"], "silo.leave", "run-1", "alice")]
    dropped = loop.bench.events("egress.indeterminate")[-1]
    assert (dropped["link"]["decision"], dropped["reasons"]) == (waiting.decision_seq, ["RUN_LEFT"])
    sent = len(loop.coordinator.bodies("metrics.eval"))

    for _ in range(2):  # nobody answers, then the process is killed
        loop.coordinator.fails_at("control.abstain", DOWN)
        loop.turn()
    loop.restart()
    give = orders_of(loop)
    assert loop.guard.runs.run is None and loop.bench.ledger.run_state("run-1") == "left"
    loop.turn(3)
    assert abstained(loop) == [(0, 0)] and loop.coordinator.bodies("control.abstain")[0][0].run == "run-1"
    loop.restart()
    loop.turn(2)
    assert abstained(loop) == [], "heard once, it is not said again"
    # what belonged to the run is passed over, and its plan is declined; another run is one like any other
    loop.coordinator.says("control.poll", "run.plan", pb.RunPlan(canonical_json=setting.PLAN.canonical()), run="run-1")
    loop.turn()
    assert abstained(loop) == [(0, 0)] and loop.guard.runs.run is None
    loop.offer_plan(setting.PLAN.model_copy(update={"run": "run-2"}))
    run = loop.guard.runs.run
    assert run is not None and run.plan.run == "run-2"
    assert sent == 1 and not loop.coordinator.bodies("metrics.eval")


def test_the_coordinator_waits_no_more_for_a_silo_that_left_and_keeps_what_it_gave(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    *others, leaver = silos
    leaver.mute = {"lora.factors"}
    until_quiet(silos)  # its answers to the public steps are in, its update is not
    view = RoundView(house.driver, "").round

    def row(number: int) -> dict[str, object]:
        found = view({"run": "run-1", "round": number})["silos"]
        return next(each for each in found if each["silo"] == leaver.name)

    before = row(1)
    assert isinstance(leaver.say("control.abstain", pb.Abstain(), run="run-1"), pb.Ack)
    run = house.driver.runs["run-1"]
    assert run.life.those("out") == (leaver.name,) and run.life.open_round == 2, "the first was committed at once"
    assert ("silo.left", {"run": "run-1", "silo": leaver.name}) in house.published
    assert row(1) != before, row(1)
    refused = leaver.say("lora.factors", leaver.delta_payload(1), run="run-1", number=1)
    assert isinstance(refused, pb.Refusal) and refused.code == "NO_SUCH_RUN"
    assert leaver.poll() is None, "nothing waits for it"
    until_quiet(others)
    record = house.record()
    names = [silo.name for silo in others]
    assert (house.run().state, [each["participants"] for each in record["rounds"]]) == ("finished", [names, names])
    kept = house.rows(lambda session: list(session.scalars(select(db.Upload).where(db.Upload.silo == leaver.name))))
    assert {upload.kind for upload in kept} == {"public.responses", "metrics.eval"}


def test_a_run_that_too_few_stay_in_fails_at_once(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    for silo in silos:
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    for silo in silos[:2]:
        silo.say("control.abstain", pb.Abstain(), run="run-1")
    assert house.run().state == "running"  # two are left, as many as the quorum asks for
    silos[2].say("control.abstain", pb.Abstain(), run="run-1")
    assert (house.run().state, house.run().reason) == ("failed", "QUORUM_NOT_REACHED")
    kinds = [reply[0].kind for reply in iter(silos[3].poll, None)]
    assert kinds[-1] == "run.end", "who is left is told"


def test_a_run_that_another_version_went_on_with_and_this_one_ends_is_ended_when_it_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would end it: the method has, and waits for nothing any more."""
    with monkeypatch.context() as older:
        older.setattr(Plan, "silos_min", property(lambda plan: plan.quorum))  # one alone may go on
        older.setattr("coordinator.submission.min_updates_of", lambda session, silos: 0)
        older.setattr("coordinator.runs.min_updates_of", lambda session, silos: 0)
        house, silos = federation(tmp_path)
        house.submit(RUN_YAML.replace("quorum: 2", "quorum: 1"))
        for silo in silos:
            silo.join()
            silo.mute = {"lora.factors"}
        until_quiet(silos)
        for silo in silos[1:]:
            silo.say("control.abstain", pb.Abstain(), run="run-1")
        last = silos[0]
        last.say("lora.factors", last.delta_payload(1), run="run-1", number=1)
        life = house.driver.runs["run-1"].life
        assert (life.state, life.open_round) == ("running", 2)
        house.close()
    again = House(tmp_path, clock=house.clock)
    assert (again.run().state, again.run().reason) == ("failed", "QUORUM_NOT_REACHED")
    assert again.record()["rounds"][0]["state"] == "committed", "what was committed stays"
    again.driver.tick()
    assert not again.driver.runs, "its silos may be in another"
    again.close()

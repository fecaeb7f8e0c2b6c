"""Silos that come late or leave: the first belong to the rounds that open from there on, the others are waited for
by nobody and come back with another run only.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator import store as db
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, UnreachableError
from fedsilo.protocol.plan import Plan
from silo.guard.trainer_process.supervisor import TrainerGone
from tests.policies import setting
from tests.simulated.coordinator_parts import (
    RUN_YAML,
    SILOS,
    House,
    SimulatedSilo,
    federation,
    joined,
    once,
    started_again,
    until_quiet,
)
from tests.simulated.queries import rounds_of
from tests.simulated.test_guard_loop import abstained, in_round
from tests.simulated.test_orders_recorded import Orders, new_desk, orders_in
from tests.world import ADAPTER, Loop

RUN, UPDATE = "run-1", "lora.factors"


@once
def begun_without(
    folder: Path, *, exchange: str = "step", rounds: str = "2", quorum: str = "2"
) -> tuple[House, list[SimulatedSilo], SimulatedSilo]:
    """Round 1 is open; three silos work in it and keep their update back so far, the fourth has not taken the plan."""
    house, (*silos, late) = federation(folder)
    request = RUN_YAML.replace("rounds: 2", f"rounds: {rounds}").replace("quorum: 2", f"quorum: {quorum}")
    house.submit(f"{request}exchange: {exchange}\n")
    for silo in (*silos, late):
        silo.join()
        silo.mute = {UPDATE}
    until_quiet(silos)
    house.advance(60.0)
    until_quiet(silos)
    assert house.driver.runs[RUN].life.open_round == 1
    return house, silos, late


def rosters(house: House) -> list[list[str]]:
    def read(session: Any) -> list[list[str]]:
        kept = session.query(db.RoundTranscript).order_by(db.RoundTranscript.round)
        return [json.loads(row.canonical)["silos"] for row in kept]

    found: list[list[str]] = house.rows(read)
    return found


def gives(*silos: SimulatedSilo) -> None:
    """What the open round still waits for."""
    for silo in silos:
        silo.mute = set()
        silo.say(UPDATE, silo.delta_payload(1), run=RUN, number=1)


def word_of(house: House, silo: str) -> str:
    rows = rounds_of(house)({"run": RUN, "round": 1})["silos"]
    return next(str(row["plan"]) for row in rows if row["silo"] == silo)


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("exchange", ["step", "round_end"])
@pytest.mark.parametrize("restarted", [False, True])
def test_who_comes_late_is_in_the_next_round(tmp_path: Path, exchange: str, restarted: bool) -> None:
    house, silos, late = begun_without(tmp_path, exchange=exchange)
    late.mute = set()
    assert word_of(house, late.name) == "not yet"
    late.live()
    assert late.poll() is None and house.driver.runs[RUN].life.open_round == 1, "the open round is not its"
    assert word_of(house, late.name) == "accepted"
    if restarted:
        house = started_again(house, (*silos, late))
    gives(*silos)
    until_quiet([*silos, late])
    house.advance(0.0)
    record, names = house.record(), [silo.name for silo in silos]
    assert house.run().state == "finished"
    assert [each["participants"] for each in record["rounds"]] == rosters(house) == [names, list(SILOS)]
    # the run's adapter by hand: round 1 has three updates, round 2 four
    first, last = house.run().base_digest, house.run().adapter_digest
    of_rounds = [(1, silos), (2, [*silos, late])]
    expected = {
        name: tensor + sum(np.mean([silo.delta(number)[name] for silo in those], axis=0) for number, those in of_rounds)
        for name, tensor in decoded(house, first).items()
    }
    for name, tensor in decoded(house, last).items():
        # two float32 roundings of sums of this size
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-5, atol=1e-8)


def decoded(house: House, digest: str) -> dict[str, Any]:
    payload = house.blobs.get(digest)
    return dict(codec.decode_factors(payload.read_at(0, payload.size_bytes)).tensors)


@pytest.mark.slow
def test_its_answers_are_asked_for_and_it_gets_donors(tmp_path: Path) -> None:
    _, silos, late = begun_without(tmp_path)
    late.live()
    gives(*silos)
    until_quiet([*silos, late])
    donors = {envelope.round for envelope, body in late.heard if isinstance(body, pb.PublicDonors)}
    opened = [envelope.round for envelope, body in late.heard if isinstance(body, pb.RoundOpen)]
    assert (donors, opened) == ({2}, [2])


@pytest.mark.parametrize("kind", [UPDATE, "public.responses"])
def test_what_it_gives_to_the_open_round_is_refused_and_counts_nowhere(tmp_path: Path, kind: str) -> None:
    _, silos, late = begun_without(tmp_path)
    late.live()
    late.state = silos[0].state  # as one that knows what the round is about
    payload = late.delta_payload(1) if kind == UPDATE else codec.encode(late.answers(late.state.public[4]))
    step = 0 if kind == UPDATE else 4
    refused = late.say(kind, payload, run=RUN, number=1, step=step)
    assert isinstance(refused, pb.Refusal) and refused.code == "ROUND_CLOSED"
    if kind == UPDATE:  # the same from one that is in the round
        assert isinstance(silos[0].say(UPDATE, silos[0].delta_payload(1), run=RUN, number=1), pb.Ack)


def test_who_comes_in_the_last_round_hears_how_it_ended(tmp_path: Path) -> None:
    house, silos, late = begun_without(tmp_path, rounds="1")
    late.live()
    gives(*silos)
    until_quiet([*silos, late])
    ((envelope, body),) = [(e, b) for e, b in late.heard if isinstance(b, pb.RunEnd)]
    assert (house.run().state, envelope.run, body.outcome) == ("finished", RUN, "finished")
    assert body.adapter_digest == house.run().adapter_digest


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("end", ["finished", "aborted", "failed"])
def test_who_never_takes_the_plan_in_hears_how_the_run_ended_or_nothing(tmp_path: Path, given: bool, end: str) -> None:
    house, silos, late = begun_without(tmp_path)
    if given:
        assert isinstance(late.say("control.poll", late.poll_body()), pb.RunPlan)
    if end == "finished":
        gives(*silos)
        until_quiet(silos)
    elif end == "aborted":
        with house.driver.changing(), house.store.transaction() as session:
            house.driver.runs[RUN].abort(session)
    else:
        for silo in silos:
            silo.say("control.abstain", pb.Abstain(), run=RUN)
    assert house.run().state == end
    item = late.poll()
    assert (item[1].outcome if item else None) == (end if given else None)
    assert late.poll() is None


def test_a_late_no_puts_it_out_is_noted_and_disturbs_nobody(tmp_path: Path) -> None:
    house, silos, late = begun_without(tmp_path)
    assert isinstance(late.say("control.poll", late.poll_body()), pb.RunPlan)
    assert isinstance(late.say("control.abstain", pb.Abstain(), run=RUN), pb.Ack)
    assert (word_of(house, late.name), house.driver.runs[RUN].life.those("out")) == ("declined", (late.name,))
    again = late.say("control.abstain", pb.Abstain(), run=RUN)
    assert isinstance(again, pb.Refusal) and again.code == "NO_SUCH_RUN"
    late.acknowledged = late.heard[0][0].sequence
    assert late.poll() is None
    gives(*silos)
    until_quiet(silos)
    assert house.run().state == "finished" and len(house.record()["rounds"][1]["participants"]) == 3


@pytest.mark.parametrize("came", [False, True])
def test_a_silo_that_came_takes_the_place_of_one_that_left(tmp_path: Path, came: bool) -> None:
    house, silos, late = begun_without(tmp_path, quorum="3")
    if came:
        late.mute = set()
        late.live()
    gives(*silos[1:])
    silos[0].say("control.abstain", pb.Abstain(), run=RUN)  # round 1 has two updates and is abandoned
    until_quiet([*silos[1:], late] if came else silos[1:])
    run = house.run()
    assert (run.state, run.reason) == (("finished", "") if came else ("failed", "QUORUM_NOT_REACHED"))
    if came:
        assert [each["participants"] for each in house.record()["rounds"]] == [[], list(SILOS[1:])]


def test_where_all_of_a_round_leave_whoever_came_is_told_that_the_run_failed(tmp_path: Path) -> None:
    house, silos, late = begun_without(tmp_path)
    late.live()
    for silo in silos:
        silo.say("control.abstain", pb.Abstain(), run=RUN)
    assert (house.run().state, house.run().reason) == ("failed", "NO_ROUND_COMMITTED")
    heard = [(envelope.kind, getattr(body, "outcome", "")) for envelope, body in iter(late.poll, None)]
    assert heard[-1] == ("run.end", "failed"), heard


def test_one_that_may_still_come_is_busy_until_the_run_has_ended(tmp_path: Path) -> None:
    house, silos, late = begun_without(tmp_path)
    other = RUN_YAML.replace("run-1", "run-2") + f"silos: [{late.name}, {silos[0].name}]\n"
    with pytest.raises(Exception, match="has not ended") as busy:
        house.submit(other)
    assert getattr(busy.value, "code", "") == "SILO_BUSY" and late.name in str(busy.value)
    gives(*silos)
    until_quiet(silos)
    assert house.submit(other)["run"] == "run-2"


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


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("heard", [True, False])
def test_without_its_trainer_a_silo_leaves_and_says_one_goodbye_that_is_heard(
    loop: Loop, heard: bool, began: bool
) -> None:
    if began:
        in_round(loop)
    else:
        loop.offer_plan()
        loop.show_round(1, codec.sha256_hex(ADAPTER))
        loop.turn()
    run = loop.guard.runs.run
    assert run is not None and (loop.guard.runs.agreement.waiting is None) is began
    if not heard:
        loop.coordinator.fails_at("control.abstain", DOWN)
    loop.events.put(TrainerGone(1))
    loop.turn()
    assert abstained(loop) == [(0, 0)] and loop.bench.ledger.run_state("run-1") == "left"
    assert loop.guard.runs.run is None and run.over and loop.bench.judge.view.run == ""
    assert loop.guard.runs.agreement.waiting is None, "nothing of it is signed any more"
    events = [(name, fields) for name, fields in loop.desk.published if name in ("run.left", "run.ended")]
    assert events == [
        ("run.left", {"run": "run-1", "round": 1, "reason": "TRAINER_DIED"}),
        ("run.ended", {"run": "run-1", "outcome": "left"}),
    ]
    for again in ([] if heard else [(0, 0)], []):
        loop.restart()
        loop.turn(2)
        assert abstained(loop) == again and loop.guard.runs.run is None


@pytest.mark.parametrize("ends", ["killed", "its trainer fails", "killed while it was left"])
def test_what_waits_is_sent_after_a_restart_unless_the_run_was_left(loop: Loop, ends: str) -> None:
    loop.coordinator.fails_at("metrics.eval", DOWN)
    in_round(loop)
    (waiting,) = loop.bench.ledger.outbox("allowed")
    if ends == "its trainer fails":
        loop.trainer_says("failed", code="X", message="it fell over")
    elif ends == "killed while it was left":
        loop.bench.ledger.end_run("run-1", "left")  # and no more than that
    goodbyes = abstained(loop)
    loop.restart()
    loop.turn(3)
    sent = [codec.sha256_hex(payload) for _, payload in loop.coordinator.bodies("metrics.eval")]
    state = {item.decision_seq: item.state for item in loop.bench.ledger.outbox()}[waiting.decision_seq]
    reasons = [row["reasons"] for row in loop.bench.events("egress.indeterminate") if "reasons" in row]
    if ends == "killed":
        assert (sent, state) == ([waiting.digest], "sent") and ["RUN_LEFT"] not in reasons
    else:
        assert (sent, state) == ([], "dropped") and reasons.count(["RUN_LEFT"]) == 1
        assert goodbyes + abstained(loop) == [(0, 0)], "the goodbye is said"


@pytest.mark.slow
def test_the_coordinator_waits_no_more_for_a_silo_that_left_and_keeps_what_it_gave(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    *others, leaver = silos
    leaver.mute = {"lora.factors"}
    until_quiet(silos)  # its answers to the public steps are in, its update is not
    view = rounds_of(house)

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
        older.setattr("coordinator.control.min_updates_of", lambda session, silos: 0)
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

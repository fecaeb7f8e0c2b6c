"""Whole runs against the real `Driver`: PubSwap with four silos in memory, and what can go wrong in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import driver, outbox, runs
from coordinator import store as db
from coordinator.aggregate import AggregateRefusedError
from coordinator.outbox import queue
from coordinator.record import run_record
from fedsilo.cli import run as cli_run
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, OperationError, UsageError
from fedsilo.protocol.place import Place
from fedsilo.protocol.transcript import verify_record
from tests.policies.setting import SCHEMA
from tests.simulated.coordinator_parts import (
    RUN_YAML,
    SHORT,
    SILOS,
    House,
    SimulatedSilo,
    federation,
    joined,
    lone_policy,
    played,
    started_again,
    until_quiet,
)
from tests.simulated.test_orders_recorded import orders_at
from tests.world import failing


def expected_master(silos: list[SimulatedSilo], initial: bytes, givers: list[list[str]]) -> dict[str, Any]:
    """The slow way: one float32 operation at a time, in roster order; of each round its givers."""
    master = {name: array.copy() for name, array in codec.decode_factors(initial).tensors.items()}
    by_name = {silo.name: silo for silo in silos}
    for number, names in enumerate(givers, 1):
        for tensor, values in master.items():
            for place in np.ndindex(values.shape):
                first, *rest = (by_name[name].delta(number)[tensor][place] for name in names)
                total = first
                for value in rest:
                    total = np.float32(total + value)
                values[place] = np.float32(values[place] + np.float32(total / np.float32(len(names))))
    return master


def assert_written(house: House, master: dict[str, Any]) -> None:
    """The adapter beside the run's record is this one, bit for bit."""
    adapter = load_file(house.folder / "runs" / "run-1" / "adapter" / "adapter_model.safetensors")
    assert set(adapter) == {f"base_model.model.{name}.weight" for name, _ in SCHEMA.tensors}
    for name, values in master.items():
        assert adapter[f"base_model.model.{name}.weight"].tobytes() == values.tobytes()


def test_a_run_from_submission_to_record(tmp_path: Path) -> None:
    house, silos = played(tmp_path)
    run = house.run()
    assert (run.state, run.reason) == ("finished", "")

    record = verify_record((tmp_path / "runs" / "run-1" / "run_record.json").read_bytes(), house.key.public_key())
    assert [row["state"] for row in record["rounds"]] == ["committed", "committed"]
    assert all(row["participants"] == list(SILOS) for row in record["rounds"])
    # right answers of a, b, c, d are 0, 2, 3, 1 of 4: to reach half, a lacks 2 and d lacks 1 in 3 prompts of 2 steps
    assert record["rounds"][0]["donors_sent"] == {
        "hospital_a": 12, "hospital_b": 0, "hospital_c": 0, "hospital_d": 6,
    }  # fmt: skip
    assert record["rounds"][1]["metrics"]["hospital_b"]["pass_at_1"] == {"": 0.45, "rotate": 0.45}
    assert record["before"]["metrics"]["hospital_a"]["pass_at_1"][""] == 0.25
    assert record["seed"] == 7 and record["plan"]["silos"] == list(SILOS)
    assert_written(house, expected_master(silos, silos[0].adapters[run.base_digest], [list(SILOS)] * 2))


def test_T10_the_record_names_the_isolation_of_each_silo_and_a_change_of_it(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    said = dict(zip(SILOS, ("namespaces", "user", "container", "waived"), strict=True))
    for silo in silos:
        silo.join(isolation=said[silo.name])
    for silo in silos:
        silo.poll()  # the plan
    for silo in silos:
        silo.poll()  # what it acknowledges, so accepts, and the first round
    assert house.run().state == "running"
    # hospital_a's guard was killed and found no sandbox after that; a repeated hello of the others changes nothing
    silos[0].join(isolation="waived")
    silos[1].join(isolation="user")
    record = house.rows(lambda session: run_record(session, session.get_one(db.Run, "run-1"), charter_digest=""))
    assert record["isolation"] == {name: [level] for name, level in said.items()} | {SILOS[0]: ["namespaces", "waived"]}
    notes = [note for part in (record["before"], *record["rounds"]) for note in part["notes"]]
    assert notes[-1] == {"name": "isolation", "step": 0, "silo": SILOS[0], "rung": "waived"}
    text = cli_run._record_text(record | {"folder": ""})
    assert "isolation of the trainers: hospital_a namespaces then waived, hospital_b user, " in text


@pytest.mark.slow
def test_bytes_counted_from_the_log_equal_those_of_the_database(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    house.driver.stop()
    counted: dict[str, dict[str, tuple[int, int]]] = {}
    for record in house.audit.records():
        if record["event"] in ("ingress.decision", "ingress.polls") and "window" not in record.get("detail", {}):
            of_peer = counted.setdefault(record["peer"], {})
            messages, size = of_peer.get(record["kind"], (0, 0))
            more = record.get("detail", {}).get("polls", 1)
            of_peer[record["kind"]] = (messages + more, size + record["payload"]["bytes"])
    table = house.rows(db.traffic_table)
    for silo in silos:
        from_table = {
            row["kind"]: (row["messages"], row["bytes"])
            for row in table
            if row["silo"] == silo.name and row["direction"] == "in"
        }
        assert counted[silo.peer.spiffe_id] == from_table
        size = len(silo.delta_payload(1))
        assert from_table["lora.factors"] == (2, 2 * size)


@pytest.mark.slow
def test_a_silo_that_keeps_its_factors_back_is_left_out_at_the_deadline(tmp_path: Path) -> None:
    house, silos = played(tmp_path, mute={1: {"lora.factors", "metrics.eval"}})
    assert house.run().state == "running"
    house.advance(999.0)
    until_quiet(silos)
    assert house.round(1).state == "open"
    house.advance(1.0)
    until_quiet(silos)
    assert house.round(1).state == "committed" and "hospital_b" not in house.round(1).participants
    for _ in range(2):
        house.advance(1000.0)
        until_quiet(silos)
    assert house.run().state == "finished"
    givers = [name for name in SILOS if name != "hospital_b"]
    assert_written(house, expected_master(silos, silos[0].adapters[house.run().base_digest], [givers] * 2))


def test_a_silo_that_is_slow_and_goes_on_is_waited_for(tmp_path: Path) -> None:
    """Its last step comes long after the round's deadline would have passed by the clock."""
    house, silos = played(tmp_path, mute={-1: {"lora.factors", "public.responses"}})
    slow = silos[-1]
    for step in range(1, house.driver.runs["run-1"].plan.local_steps + 1):
        house.advance(900.0)
        until_quiet(silos)
        said = slow.say("control.progress", pb.Progress(round=1, step=step), run="run-1", number=1, step=step)
        assert isinstance(said, pb.Ack) and house.driver.runs["run-1"].life.open_round == 1
    slow.mute = set()
    assert not isinstance(slow.say("lora.factors", slow.delta_payload(1), run="run-1", number=1), pb.Refusal)
    assert (house.round(1).state, json.loads(house.round(1).participants)) == ("committed", list(SILOS))


def test_each_round_s_adapter_is_read_once_for_its_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    for silo in silos:
        silo.join()
    real, read = driver.l2_norm, list[str]()
    monkeypatch.setattr(driver, "l2_norm", lambda payload: read.append(payload.digest) or real(payload))
    until_quiet(silos)
    run = house.run()
    assert run.state == "finished" and run.adapter_digest != run.base_digest
    assert read == [house.round(number).base_digest for number in (1, 2)]


def test_declining_the_round_does_not_make_the_others_wait(tmp_path: Path) -> None:
    house, silos = played(tmp_path, SHORT, mute={3: {"lora.factors"}})
    body = pb.Declined(kind="lora.factors", round=1)
    assert isinstance(silos[3].say("control.declined", body, run="run-1", number=1), pb.Ack)
    assert house.round(1).state == "committed" and "hospital_d" not in house.round(1).participants


def test_a_late_message_for_a_closed_round_is_refused_and_recorded(tmp_path: Path) -> None:
    house, silos = played(tmp_path, mute={0: {"lora.factors"}})
    base = silos[0].state.base_digest
    house.advance(1000.0)
    payload = silos[0].delta_payload(1, base_digest=base)
    refusal = silos[0].say("lora.factors", payload, run="run-1", number=1)
    assert isinstance(refusal, pb.Refusal)
    assert (refusal.code, refusal.expected, refusal.got) == ("ROUND_CLOSED", "2", "1")
    last = list(house.audit.records())[-1]
    assert (last["event"], last["kind"], last["decision"]) == ("ingress.decision", "lora.factors", "deny")


def test_below_the_quorum_the_round_is_abandoned_and_the_adapter_stays(tmp_path: Path) -> None:
    house, _ = played(tmp_path, mute={place: {"lora.factors"} for place in (1, 2, 3)})
    house.advance(1000.0)
    assert house.round(1).state == "abandoned" and house.round(1).adapter_digest == ""
    assert house.run().adapter_digest == house.run().base_digest


def test_the_run_starts_without_an_absent_silo_once_the_join_deadline_has_passed(tmp_path: Path) -> None:
    house, silos = played(tmp_path, SHORT, silos=SILOS[:3])
    assert house.run().plan == ""
    house.advance(60.0)
    until_quiet(silos)
    assert house.run().state == "finished"
    assert house.record()["plan"]["silos"] == list(SILOS[:3])


def test_without_the_quorum_the_run_fails_at_the_join_deadline(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    silos[0].join()
    house.advance(60.0)
    assert (house.run().state, house.run().reason) == ("failed", "QUORUM_NOT_REACHED")
    assert house.record()["state"] == "failed"


def test_silos_that_accepted_are_told_that_the_run_failed_and_take_part_in_the_next_one(tmp_path: Path) -> None:
    """Else they would hold themselves to be in a run that is over, and decline each later one."""
    house, silos = federation(tmp_path)
    for silo in silos:
        silo.join()
    house.submit(RUN_YAML.replace("quorum: 2", "quorum: 3"))
    accepting, declining = silos[:2], silos[2:]
    for silo in accepting:
        silo.live()
    for silo in declining:
        silo.say("control.abstain", pb.Abstain(), run="run-1")
    assert (house.run().state, house.run().reason) == ("failed", "QUORUM_NOT_REACHED")
    for silo in accepting:
        silo.live()
        assert [(envelope.kind, envelope.run) for envelope, _ in silo.heard if envelope.kind == "run.end"] == [
            ("run.end", "run-1")
        ]


def test_one_silo_alone_gets_base_plus_delta_bit_for_bit(tmp_path: Path) -> None:
    request = SHORT.replace("quorum: 2", "quorum: 1")
    house, [alone] = played(tmp_path, request, policy=lone_policy(), listed=SILOS[:1], silos=SILOS[:1])
    before = codec.decode_factors(alone.adapters[house.round(1).base_digest]).tensors
    after = codec.decode_factors(alone.adapters[house.round(1).adapter_digest]).tensors
    for name, values in before.items():
        assert (values + alone.delta(1)[name]).tobytes() == after[name].tobytes()


def test_T39_a_disk_that_fails_while_a_round_is_committed_halts_and_the_run_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    house, silos = played(tmp_path, SHORT, mute={-1: {"lora.factors"}})
    last, calls = silos[-1], iter([False, True])  # the upload is kept, the new master is not
    payload = last.delta_payload(1)
    fault = OperationError("cannot write x.part: Input/output error")
    with failing(house.blobs, "spool", fault, when=lambda: next(calls)), pytest.raises(OperationError) as raised:
        last.say("lora.factors", payload, run="run-1", number=1)
    assert raised.value is fault and house.driver.halted == OperationError.default_code
    assert house.run().state == "running", "a disk is no reason for a run to fail"
    house = started_again(house, silos)
    assert isinstance(last.say("lora.factors", payload, run="run-1", number=1), pb.Ack)
    until_quiet(silos)
    assert house.round(1).state == "committed"


def test_uploads_that_make_no_adapter_fail_the_run_and_the_old_adapter_stays(tmp_path: Path) -> None:
    with failing(runs, "aggregate", AggregateRefusedError("the aggregate is not finite")):
        house, _ = played(tmp_path)
    assert not house.driver.halted
    assert (house.run().state, house.run().reason) == ("failed", "AGGREGATE_REFUSED")
    assert house.run().adapter_digest == house.run().base_digest


def two_items(folder: Path) -> tuple[House, SimulatedSilo]:
    """For one silo lie an item of run-1 and one of run-2."""
    house, (silo, *_) = federation(folder)
    with house.store.transaction() as session:
        for run in ("run-1", "run-2"):
            queue(session, silo.name, Place(run, 0, 0, "run.end"), codec.encode(pb.RunEnd(outcome="finished")))
    silo.join()
    return house, silo


def paused(house: House, patched: pytest.MonkeyPatch) -> None:
    """What is of run-1 is passed over."""
    patched.setattr(house.driver, "_next_item", lambda session, name: outbox.first_item(session, name, but=["run-1"]))


def polled(silo: SimulatedSilo, acknowledged: int = 0) -> Any:
    return silo.say("control.poll", pb.Poll(acknowledged_sequence=acknowledged))


def test_an_item_behind_a_paused_runs_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, silo = two_items(tmp_path)
    paused(house, monkeypatch)
    assert isinstance(polled(silo), pb.RunEnd)
    assert isinstance(polled(silo, silo.heard[-1][0].sequence), pb.Ack)
    left = house.rows(lambda session: session.scalars(select(db.OutboxItem.run)).all())
    assert left == ["run-1"], "what was not delivered stays, what was is gone"


def test_what_was_in_a_lost_answer_stays_when_what_is_behind_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run is paused between the two, so what comes next is of another run and bears a higher number."""
    house, silo = two_items(tmp_path)
    polled(silo)  # of run-1; the silo never sees it
    with monkeypatch.context() as patched:
        paused(house, patched)
        assert isinstance(polled(silo), pb.RunEnd)
        newest = silo.heard[-1][0].sequence
        polled(silo, newest)
    assert isinstance(polled(silo, newest), pb.RunEnd)
    assert silo.heard[-1][0].run == "run-1"
    assert isinstance(polled(silo, silo.heard[-1][0].sequence), pb.Ack)


def test_a_restarted_coordinator_goes_on_where_it_stood(tmp_path: Path) -> None:
    """A run interrupted after each silo's turn ends with the adapter of an uninterrupted one."""
    three: dict[str, Any] = {"silos": SILOS[:3], "listed": SILOS[:3]}
    undisturbed, _ = played(tmp_path / "whole", SHORT, **three)
    house, silos = joined(tmp_path / "interrupted", SHORT, **three)
    for _ in range(60):
        if house.run().state == "finished":
            break
        for silo in silos:
            if (item := silo.poll()) is not None:
                silo.react(*item)
            house = started_again(house, silos)
    assert house.run().adapter_digest == undisturbed.run().adapter_digest


@pytest.mark.slow
def test_a_round_s_seconds_are_counted_over_a_restart(tmp_path: Path) -> None:
    house, silos = played(tmp_path, mute={-1: {"lora.factors"}})
    assert house.run().state == "running"
    house.clock.seconds += 75.0
    house = started_again(house, silos)
    silos[-1].mute = set()
    silos[-1].say("lora.factors", silos[-1].delta_payload(1), run="run-1", number=1)
    until_quiet(silos)
    first, second = house.round(1), house.round(2)
    assert (first.state, second.state) == ("committed", "committed")
    assert 75.0 <= first.seconds < 80.0 and second.seconds < 5.0
    assert first.seconds_until("2000-01-01T00:00:00Z") == 0.0, "a clock that went back"


def test_a_paused_run_delivers_nothing_and_lets_no_deadline_pass(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    for silo in silos:
        assert silo.poll() is not None  # the plan
    for silo in silos:
        silo.poll()  # acknowledges it; the round opens with the last
    run = house.driver.runs["run-1"]
    with house.driver.changing(), house.store.transaction() as session:
        run.pause(session)
    assert silos[0].poll() is None
    house.advance(5000.0)
    assert house.run().state == "paused"
    with house.driver.changing(), house.store.transaction() as session:
        run.resume(session)
    house.advance(999.0)
    assert house.round(1).state == "open"


def test_aborting_tells_every_silo_that_was_given_the_plan(tmp_path: Path) -> None:
    house, (*silos, last) = federation(tmp_path)
    house.submit()
    for silo in (*silos, last):
        silo.join()
    for silo in silos:
        plan = silo.poll()
        assert plan is not None and plan[0].kind == "run.plan"
    with house.driver.changing(), house.store.transaction() as session:
        house.driver.runs["run-1"].abort(session)
    for silo in silos:
        item = silo.poll()
        assert item is not None and item[0].kind == "run.end" and item[1].outcome == "aborted"
    assert last.poll() is None  # it never heard of the run
    assert house.run().state == "aborted"
    assert house.rows(lambda session: session.scalars(select(db.Round)).all()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("roundz: 2\n", r"unknown key 'roundz' \(did you mean 'rounds'\?\)"),
        ("public_set_rows: 9\n", "public_set_rows is 9; this federation has 10"),
        ("silos: [hospital_z]\n", "'hospital_z' is not a silo of this federation"),
        ("silos: hospital_a\n", "silos is a list of names"),
        ("method_: pubswap\n", r"unknown key 'method_' \(did you mean 'method'\?\)"),
        ("optimiser: {epochs: 0}\n", "optimiser.epochs: must be at least 1"),
    ],
)
def test_a_wrong_run_file_is_refused_by_name_and_line(tmp_path: Path, change: str, message: str) -> None:
    house, _ = federation(tmp_path)
    line = RUN_YAML.count("\n") + 1
    with pytest.raises(UsageError, match=f"^run.yaml:{line}: {message}"):
        house.submit(RUN_YAML + change)
    house.submit()
    with pytest.raises(ConflictError, match=r"'run-1' has not ended, and hospital_a, .* are in it") as caught:
        house.submit(RUN_YAML.replace("run-1", "run-2"))
    assert caught.value.code == "SILO_BUSY"


def test_a_misspelled_key_of_a_run_is_named_before_the_one_it_leaves_missing(tmp_path: Path) -> None:
    house, _ = federation(tmp_path)
    line = RUN_YAML[: RUN_YAML.index("local_steps")].count("\n") + 1
    with pytest.raises(UsageError, match=f"^run.yaml:{line}: unknown key 'local_stepz'") as caught:
        house.submit(RUN_YAML.replace("local_steps", "local_stepz"))
    assert "local_steps, " in caught.value.hint


def test_T38_the_database_knows_the_log_up_to_the_last_record_of_what_no_message_brought(tmp_path: Path) -> None:
    """A silo's message puts the log's place up in its own transaction; an order's records are appended after theirs."""
    house, silos = joined(tmp_path)
    until_quiet(silos[:1])
    before = tmp_path / "before"
    shutil.copytree(tmp_path / "audit", before)
    size = house.audit.size
    with house.store.transaction() as session:
        house.driver.pending.record(session, "round.agreed", run="run-1", round=1, kind="round.agreed", detail={})
    assert house.audit.size > size
    place = house.rows(lambda session: session.scalars(select(db.LogPlace)).one())
    assert place.size == house.audit.size
    house.close()
    after = tmp_path / "after"
    (tmp_path / "audit").rename(after)
    before.rename(tmp_path / "audit")
    with pytest.raises(ConflictError) as refused:
        House(tmp_path, clock=house.clock)
    assert refused.value.code == "LOG_BEHIND"
    shutil.rmtree(tmp_path / "audit")
    after.rename(tmp_path / "audit")
    House(tmp_path, clock=house.clock).close()


def test_what_is_told_is_told_after_it_can_be_read(tmp_path: Path) -> None:
    """Who hears of a change and asks for it at once must find it; what was rolled back is never told."""
    store = db.Store(f"sqlite:///{tmp_path / 'told.db'}")
    heard: list[int] = []

    def count() -> int:
        with store.transaction() as session:
            return len(list(session.scalars(select(db.Event))))

    def change(session: Session) -> None:
        session.add(db.Event(time="", name="n", fields="{}"))
        store.once_committed(lambda: heard.append(count()))

    with store.transaction() as session:
        change(session)
        assert heard == []
    assert heard == [1]
    with pytest.raises(ZeroDivisionError), store.transaction() as session:
        change(session)
        raise ZeroDivisionError
    assert heard == [1]
    store.once_committed(lambda: heard.append(-1))  # outside of a transaction there is nothing to wait for
    assert heard == [1, -1]
    store.close()


def test_a_refused_plan_names_each_silos_code_and_each_code_once(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    for silo in silos[:2]:
        assert silo.poll() is not None  # the plan
        for _ in range(3):  # it comes again until the no is heard, and so does the code
            silo.say("control.error", pb.ErrorReport(code="DECLINED"), run="run-1")
        assert ("silo.left", {"run": "run-1", "silo": silo.name}) not in house.published  # the code alone is no no
        silo.say("control.abstain", pb.Abstain(), run="run-1")
        assert ("silo.left", {"run": "run-1", "silo": silo.name}) in house.published
    silos[2].say("control.abstain", pb.Abstain(), run="run-1")  # the code was lost on its way
    assert (house.run().state, house.run().reason) == ("failed", "QUORUM_NOT_REACHED")
    told = {silo.name: ["DECLINED"] for silo in silos[:3]}
    record = house.record()
    assert record["silo_errors"] == told
    text = cli_run._record_text(record | {"folder": ""}).splitlines()[0]
    refused = "hospital_a DECLINED, hospital_b DECLINED, hospital_c DECLINED"
    assert text == f"run run-1: failed QUORUM_NOT_REACHED ({refused})"


def test_T08_a_code_outside_the_closed_list_is_refused_and_kept_nowhere(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    silos[0].poll()
    refusal = silos[0].say("control.error", pb.ErrorReport(code="PATIENT_42"), run="run-1")
    assert isinstance(refusal, pb.Refusal)
    assert house.rows(lambda session: db.errors_of(session, "run-1")) == {}


@pytest.mark.slow
def test_a_mean_of_fewer_silos_is_marked_and_traffic_says_whose_view_it_is(tmp_path: Path) -> None:
    house, silos = played(tmp_path, mute={3: {"metrics.eval"}})
    house.advance(1000.0)
    until_quiet(silos)
    record = house.rows(lambda session: run_record(session, session.get_one(db.Run, "run-1"), charter_digest=""))
    shown = cli_run._record_text(record | {"folder": ""})
    # 0.25 at the base and 0.1 more each round, as every simulated silo reports
    rows = [line.split() for line in shown.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]
    assert [(row[0], row[4], row[5]) for row in rows] == [("0", "0.250", "3"), ("1", "0.350", "3"), ("2", "0.450", "3")]
    assert "round 1: this mean is of hospital_a, hospital_b, hospital_c only; do not compare it with one of 4" in shown
    assert "payload bytes of this run, as the coordinator counted them" in shown
    assert "hospital_a  from the silo  lora.factors" in shown and "hospital_a  to the silo    run.plan" in shown
    for part in (record["before"], *record["rounds"]):
        part["metrics"]["hospital_d"] = part["metrics"]["hospital_a"]
    assert "do not compare" not in cli_run._record_text(record | {"folder": ""})


PAIRS = {"run-1": SILOS[:2], "run-2": SILOS[2:], "run-3": SILOS[2:]}


def submitted(house: House, *runs: str) -> None:
    for run in runs:
        text = RUN_YAML.replace("run-1", run).replace("rounds: 2", "rounds: 1")
        house.submit(f"{text}silos: [{', '.join(PAIRS[run])}]\n")


def alone(folder: Path, run: str) -> str:
    house, silos = federation(folder, silos=PAIRS[run])
    submitted(house, run)
    for silo in silos:
        silo.join()
    until_quiet(silos)
    digest = adapter_of(house, run)
    house.close()
    return digest


def adapter_of(house: House, run: str) -> str:
    row = house.rows(lambda session: session.get_one(db.Run, run))
    assert row.state == "finished", (run, row.state, row.reason)
    return str(row.adapter_digest)


@pytest.mark.slow
def test_two_runs_at_once_are_to_each_other_as_if_they_were_not_there(tmp_path: Path) -> None:
    house, silos = federation(tmp_path / "both")
    submitted(house, "run-1", "run-2")
    for silo in silos:
        silo.join()
    first, second = silos[:2], silos[2:]
    first[1].mute = {"lora.factors"}
    until_quiet(silos)  # the second ends while the first waits for an update
    assert house.driver.runs.keys() == {"run-1"}
    digests = {"run-2": adapter_of(house, "run-2")}

    def refused(silo: SimulatedSilo, run: str) -> str:
        answer = silo.say("lora.factors", silo.delta_payload(1), run=run, number=1)
        assert isinstance(answer, pb.Refusal)
        return answer.code

    assert refused(second[0], "run-1") == refused(first[1], "run-2") == "NO_SUCH_RUN"
    # what is ordered of one says nothing of another, which is submitted meanwhile
    give = orders_at(house)
    give("run.pause", run="run-1")
    submitted(house, "run-3")
    until_quiet(silos)
    assert adapter_of(house, "run-3") == digests["run-2"], "the same seed and silos"
    give("run.resume", request_id="request-2", run="run-1")
    first[1].mute = set()
    answer = first[1].say("lora.factors", first[1].delta_payload(1), run="run-1", number=1)
    assert isinstance(answer, pb.Ack)
    until_quiet(silos)
    digests["run-1"] = adapter_of(house, "run-1")
    # the history keeps each, in the order in which they were submitted
    rows = house.rows(lambda session: session.scalars(select(db.Run).order_by(db.Run.ordinal)).all())
    assert [(row.name, row.state) for row in rows] == [(f"run-{number}", "finished") for number in (1, 2, 3)]
    house.close()
    assert digests == {run: alone(tmp_path / run, run) for run in digests}

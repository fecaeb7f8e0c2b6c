"""Rounds in which each silo gets a result of its own, made of the other silos' updates: one commit, one signed end for
all, and nobody fetches another's. By tiles and by whole tensors it comes to the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.aggregate import aggregate
from coordinator.blobs import Blobs, BytesPayload
from coordinator.runs import stored_events
from fedsilo.protocol import codec
from fedsilo.protocol import method as m
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import Aggregate, Tensors, TensorWise, averaged
from fedsilo.protocol.errors import ConflictError, WireCode
from fedsilo.protocol.factors import mean_delta
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.methods.pubswap import step
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.rounds import from_fields, to_fields
from fedsilo.protocol.transcript import KnownKey, RoundEnd, check_record, results_digest, results_in
from tests.policies import setting
from tests.simulated.coordinator_parts import (
    COORDINATOR,
    RUN_YAML,
    SILOS,
    House,
    SimulatedSilo,
    played,
    started_again,
    until_quiet,
)
from tests.world import ADAPTER, Loop

NAME = "others-mean"
REQUEST = RUN_YAML.replace("method: pubswap", f"method: {NAME}")


def mean_of_wholes(master: Tensors | None, updates: Sequence[Tensors]) -> Tensors:
    assert master is not None
    return {name: master[name] + mean_delta([update[name] for update in updates]) for name in updates[0]}


class Coordinator(step.Coordinator):
    """FedAvg whose silos each get the mean of the others' updates; every round starts from the first adapter."""

    def on_event(self, state: Any, event: m.CoordinatorEvent) -> tuple[Any, tuple[m.CoordinatorAction, ...]]:
        digests = event.digests if isinstance(event, m.Committed) else {}
        if isinstance(event, m.Committed):
            event = m.Committed(event.round, {m.EVERYBODY: state.base_digest})
        state, actions = super().on_event(state, event)
        return state, tuple(self._own(action, digests) for action in actions)

    def _own(self, action: m.CoordinatorAction, digests: Any) -> m.CoordinatorAction:
        if isinstance(action, m.Commit):
            [(silos, given, _)] = action.results
            return m.Commit(action.round, tuple(others(silo, silos, given) for silo in silos))
        if isinstance(action, m.Send) and isinstance(action.body, pb.RoundResult) and action.body.committed:
            body = pb.RoundResult()
            body.CopyFrom(action.body)
            body.adapter_digest = digests.get(action.silo, "")
            return replace(action, body=body)
        return action


def others(receiver: str, silos: tuple[str, ...], digests: tuple[str, ...]) -> m.Result:
    pairs = [pair for pair in zip(silos, digests, strict=True) if pair[0] != receiver]
    return m.Result(tuple(silo for silo, _ in pairs), tuple(digest for _, digest in pairs), receiver)


@contextmanager
def registered(how: Any) -> Iterator[None]:
    silo = METHODS["fedavg-grpo"].silo
    METHODS[NAME] = replace(
        METHODS["fedavg-grpo"], name=NAME, coordinator=Coordinator("no-public"), silo=silo, aggregate=how
    )
    try:
        yield
    finally:
        del METHODS[NAME]


def by_tensor(plan: Plan, silos: Sequence[str]) -> Aggregate:
    return TensorWise(mean_of_wholes)


@pytest.fixture(params=[averaged, by_tensor], ids=["elements", "tensors"])
def method(request: pytest.FixtureRequest) -> Iterator[None]:
    with registered(request.param):
        yield


def results_told(silo: SimulatedSilo) -> list[pb.RoundResult]:
    return [body for _, body in silo.heard if isinstance(body, pb.RoundResult)]


def read(house: House, digest: str) -> dict[str, Any]:
    payload = house.blobs.get(digest)
    return dict(codec.decode_factors(payload.read_at(0, payload.size_bytes)).tensors)


@pytest.mark.usefixtures("method")
def test_each_silo_gets_the_mean_of_the_others_and_all_hear_of_one_end(tmp_path: Path) -> None:
    house, silos = played(tmp_path, REQUEST)
    run, base = house.run(), read(house, house.run().base_digest)
    assert (run.state, run.adapter_digest) == ("finished", run.base_digest)
    for number in (1, 2):
        told = {silo.name: results_told(silo)[number - 1] for silo in silos}
        assert len({body.result_signature for body in told.values()}) == 1, "one end, signed once"
        table = results_in(next(iter(told.values())))
        assert set(table) == set(SILOS) and all(results_in(body) == table for body in told.values())
        assert len({row["sha256"] for row in table.values()}) == len(SILOS)
        for silo in silos:
            assert told[silo.name].adapter_digest == table[silo.name]["sha256"]
            rest = [other for other in silos if other is not silo]
            assert table[silo.name]["participants"] == [other.name for other in rest]
            for name, values in read(house, told[silo.name].adapter_digest).items():
                # in the order of the plan, one after the other, in float32
                total = rest[0].delta(number)[name].copy()
                for other in rest[1:]:
                    total = total + other.delta(number)[name]
                slow = base[name] + total / np.float32(3)
                assert np.array_equal(values, slow), name
        ended = house.rows(lambda session, number=number: session.get_one(db.EndedRound, ("run-1", number)).fields)
        assert json.loads(ended)["aggregate"] == results_digest(table)
    evaluated = {(row.silo, row.round) for row in house.rows(lambda session: list(session.scalars(
        select(db.Upload).where(db.Upload.kind == "metrics.eval"))))}  # fmt: skip
    assert {(name, 2) for name in SILOS} <= evaluated, "each evaluates its own"


@pytest.mark.usefixtures("method")
def test_a_silo_fetches_its_own_result_and_no_other(tmp_path: Path) -> None:
    _, silos = played(tmp_path, REQUEST)
    first, second = silos[:2]
    own, other = results_told(first)[0].adapter_digest, results_told(second)[0].adapter_digest
    assert isinstance(first.say("control.fetch", pb.Fetch(digest=own)), bytes)
    refused = first.say("control.fetch", pb.Fetch(digest=other))
    assert isinstance(refused, pb.Refusal) and refused.code == WireCode.NOT_FOUND
    assert isinstance(second.say("control.fetch", pb.Fetch(digest=other)), bytes)


@pytest.mark.usefixtures("method")
def test_the_record_names_each_result_and_is_checked_against_the_signed_end(tmp_path: Path) -> None:
    house, _ = played(tmp_path, REQUEST)
    record, public_key = house.record(), house.key.public_key()
    keys = {COORDINATOR: KnownKey(public_key.public_bytes_raw())}

    def problems(record: Any) -> tuple[str, ...]:
        return check_record(record, signer=COORDINATOR, public_key=public_key, keys=keys).problems

    assert problems(record) == () and set(record["rounds"][1]["results"]) == set(SILOS)
    swapped = json.loads(json.dumps(record))
    rows = swapped["rounds"][0]["results"]
    rows[SILOS[0]]["sha256"], rows[SILOS[1]]["sha256"] = rows[SILOS[1]]["sha256"], rows[SILOS[0]]["sha256"]
    assert any("its adapter is not the one in its result" in problem for problem in problems(swapped))
    fewer = json.loads(json.dumps(record))
    fewer["rounds"][0]["results"][SILOS[0]]["participants"].pop()
    assert any("its adapter is not the one in its result" in problem for problem in problems(fewer))
    assert not (house.folder / "runs" / "run-1" / "adapter").exists(), "no adapter is the run's"


@pytest.mark.usefixtures("method")
def test_a_restart_goes_on_with_the_same_results(tmp_path: Path) -> None:
    house, silos = played(tmp_path, REQUEST, {-1: {"metrics.eval"}})
    house = started_again(house, silos)
    for silo in silos:
        silo.mute = set()
    until_quiet(silos)
    house.advance(1000.0)
    assert house.run().state == "finished"
    commits = [each for each in house.rows(lambda session: stored_events(session, "run-1")) if type(each) is m.Commit]
    assert [len(commit.results) for commit in commits] == [len(SILOS)] * 2
    assert all(from_fields(json.loads(json.dumps(to_fields(each)))) == each for each in commits)


@pytest.mark.usefixtures("method")
def test_no_result_is_made_of_fewer_updates_than_the_quorum(tmp_path: Path) -> None:
    """Of three updates two are others': below a quorum of three nothing is committed, and the run halts no silo."""
    house, _ = played(tmp_path, REQUEST.replace("quorum: 2", "quorum: 4"), {3: {"lora.factors"}})
    life = house.driver.runs["run-1"].life
    updates = life.taken[1]
    given = tuple(silo for silo in SILOS if (0, silo, "lora.factors") in updates)
    digests = tuple(updates[0, silo, "lora.factors"] for silo in given)
    assert len(given) == 3
    run = house.driver.runs["run-1"]
    with pytest.raises(ConflictError):
        run.check(m.Commit(1, tuple(others(silo, given, digests) for silo in given)))
    low = replace(run.life, quorum=2)
    for receivers in (("hospital_a", "hospital_a"), ("hospital_a", ""), ("hospital_a", "stranger")):
        run.life = low
        results = tuple(m.Result(given, digests, receiver) for receiver in receivers)
        with pytest.raises(ConflictError):
            run.check(m.Commit(1, results))
    run.check(m.Commit(1, tuple(others(silo, given, digests) for silo in given)))  # the counterpart


# ---- at a real guard ---------------------------------------------------------------------------------------------

OWN, THEIRS = codec.sha256_hex(ADAPTER), "cd" * 32


def row(receiver: str, digest: str, *participants: str) -> pb.ResultOfSilo:
    return pb.ResultOfSilo(receiver=receiver, adapter_digest=digest, participants=participants)


PEERS = ("hospital_b", "hospital_c")
OUTSIDE = setting.PLAN.silos[3]  # of the plan, and not of this round's roster
TABLES = {
    "of who is not in the round": (
        [row("hospital_a", OWN, *PEERS), row("hospital_b", THEIRS, "hospital_a", OUTSIDE)],
        OWN,
        ["TRANSCRIPT_DIFFERS"],
    ),
    "for who is not in the round": (
        [row("hospital_a", OWN, *PEERS), row(OUTSIDE, THEIRS, *PEERS)],
        OWN,
        ["TRANSCRIPT_DIFFERS"],
    ),
    "its own": ([row("hospital_a", OWN, *PEERS), row("hospital_b", THEIRS, "hospital_a", "hospital_c")], OWN, []),
    "another's": ([row("hospital_a", OWN, *PEERS), row("hospital_b", THEIRS, *PEERS)], THEIRS, ["RESULT_OF_ANOTHER"]),
    "twice": ([row("hospital_a", THEIRS, *PEERS), row("hospital_a", OWN, *PEERS)], OWN, ["ROSTER"]),
    "none of its own": ([row("hospital_b", THEIRS, *PEERS)], THEIRS, ["RESULT_OF_ANOTHER"]),
    "of one silo": ([row("hospital_a", OWN, *PEERS), row("hospital_b", THEIRS, "hospital_a")], OWN, ["MIN_UPDATES"]),
}


@pytest.mark.parametrize("named", TABLES)
def test_T58_a_silo_takes_its_own_result_and_no_table_in_which_one_update_stands_alone(loop: Loop, named: str) -> None:
    table, digest, reasons = TABLES[named]
    loop.offer_plan()
    roster = ("hospital_a", *PEERS)
    loop.show_round(1, OWN, silos=roster, policies=dict.fromkeys(roster, loop.policy.digest))
    loop.coordinator.says("control.poll", "round.agreed", loop.signed_by(*PEERS), run="run-1", round=1)
    loop.turn(2)
    before = loop.bench.judge.view.told_adapter
    body = loop.ended(committed=True, adapter_digest=digest, results=table)
    loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=1)
    loop.turn(2)
    refused = [event["reasons"][0] for event in loop.bench.events("ingress.decision")
               if event["decision"] == "deny" and event["kind"] == "round.result"]  # fmt: skip
    assert refused == reasons
    assert (loop.guard.runs.run is None) is (reasons == ["MIN_UPDATES"])
    kept = [event["detail"].get("results") for event in loop.bench.events("round.result")]
    expected = {
        each.receiver: {"sha256": each.adapter_digest, "participants": list(each.participants)} for each in table
    }
    assert kept == ([expected] if reasons in ([], ["MIN_UPDATES"]) else []), "so that the log alone can show it"
    if not reasons:
        view = loop.bench.judge.view
        assert view.evaluated == {1: OWN} and view.told_adapter == before, "the next round does not begin with it"


def test_all_silos_sign_one_end_of_results_and_another_table_is_another_end(loop: Loop) -> None:
    loop.offer_plan()
    loop.open_round()
    ends = [
        RoundEnd.of(loop.shown, loop.ended(committed=True, adapter_digest=own, results=TABLES["its own"][0]))
        for own in (OWN, THEIRS)
    ]
    assert ends[0] == ends[1], "whichever of them is the receiver's"
    other = loop.ended(committed=True, adapter_digest=OWN, results=TABLES["another's"][0])
    assert RoundEnd.of(loop.shown, other) != ends[0]


# ---- uploads that stand by themselves ----------------------------------------------------------------------------


def test_uploads_without_a_master_are_combined_as_they_are(tmp_path: Path) -> None:
    def median(master: Tensors | None, updates: Sequence[Tensors]) -> Tensors:
        assert master is None
        return {name: np.median(np.stack([update[name] for update in updates]), axis=0) for name in updates[0]}

    draw, blobs = np.random.default_rng(5), Blobs(tmp_path)
    wholes = [{"layers.0.b": draw.normal(size=4), "layers.0.R": draw.normal(size=(4, 3))} for _ in range(3)]

    def kept(values: Any) -> Any:
        payload = codec.encode_factors(
            {name: value.astype(np.float32) for name, value in values.items()},
            base_digest="", schema_sha256="", rank=4, scale=1.0, dtype="float32",
        )  # fmt: skip
        return blobs.keep(BytesPayload(payload))

    made = aggregate(blobs, None, [kept(values) for values in wholes], TensorWise(median, master=False))
    found = codec.decode_factors(made.read_at(0, made.size_bytes))
    assert list(found.tensors) == ["layers.0.R", "layers.0.b"] and found.header.base_digest == ""
    for name, values in found.tensors.items():
        slow = np.sort(np.stack([whole[name].astype(np.float32) for whole in wholes]), axis=0)[1]
        assert np.array_equal(values, slow)

"""T37: that the coordinator paused a run is told to its silos, shown there as the coordinator's word, and nothing
more: a guard that is told so does what it does untold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.cli.silo import status_text
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo, federation
from tests.simulated.test_orders_recorded import Orders, orders_at
from tests.world import ADAPTER, Loop


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo], Orders]]:
    """Round 1 is open; hospital_d never had the plan, since it had not joined."""
    house, silos = federation(tmp_path / "house")
    house.submit()
    for silo in silos[:3]:
        silo.join()
    house.advance(60.0)  # the quorum is there, and nobody waits for the fourth any longer
    for _ in range(2):
        for silo in silos[:3]:
            silo.poll()
    silos[3].join()
    with closing(house):
        yield house, silos, orders_at(house)


def heartbeat(silo: SimulatedSilo) -> pb.Ack:
    answer = silo.say("control.heartbeat", pb.Heartbeat())
    assert isinstance(answer, pb.Ack)
    return answer


def shown(loop: Loop) -> dict[str, Any]:
    return loop.state()


# ---- the coordinator ---------------------------------------------------------------------------------


def test_every_acknowledgement_to_a_silo_of_a_paused_run_says_so_until_it_goes_on(running: Any) -> None:
    _, silos, give = running
    while silos[0].poll() is not None:
        pass
    assert not heartbeat(silos[0]).paused
    give("run.pause", run="run-1")
    assert heartbeat(silos[0]).paused
    poll = silos[0].say("control.poll", silos[0].poll_body())
    assert isinstance(poll, pb.Ack) and poll.paused and not poll.pending
    assert silos[0].join().paused
    assert not heartbeat(silos[3]).paused, "it is not in that run"
    give("run.resume", request_id="request-2", run="run-1")
    assert not heartbeat(silos[0]).paused


def test_a_run_stays_told_as_paused_over_a_restart_and_not_beyond_its_end(running: Any) -> None:
    house, silos, give = running
    give("run.pause", run="run-1")
    house.close()
    again = House(house.folder, clock=house.clock)
    silos[0].house = again
    with closing(again):
        assert heartbeat(silos[0]).paused
        orders_at(again)("run.abort", request_id="request-2", run="run-1")
        assert not heartbeat(silos[0]).paused


# ---- the guard ---------------------------------------------------------------------------------------


def test_what_the_coordinator_says_is_shown_at_the_silo_until_the_run_goes_on(running: Any, loop: Loop) -> None:
    _, silos, give = running
    loop.offer_plan()
    loop.turn()
    for number, (order, expected) in enumerate([("run.pause", True), ("run.resume", False), ("run.pause", True)]):
        give(order, request_id=f"request-{number}", run="run-1")
        loop.coordinator.says("control.poll", "control.ack", heartbeat(silos[0]))  # the very acknowledgement
        loop.turn()
        state = shown(loop)
        assert state["run_paused"] is expected and state["paused"] is False and state["phase"] == "waiting"
        assert (", paused by the coordinator" in status_text(state)) is expected
    loop.open_round()  # something of the run came
    assert not shown(loop)["run_paused"]


def test_a_pause_without_a_run_here_is_not_shown(loop: Loop) -> None:
    def told() -> bool:
        loop.coordinator.says("control.poll", "control.ack", pb.Ack(paused=True))
        loop.turn()
        return bool(shown(loop)["run_paused"])

    assert loop.guard.runs.run is None and not told()
    loop.offer_plan()
    assert loop.guard.runs.run is not None and told()


def story(folder: Path, monkeypatch: pytest.MonkeyPatch, *, paused: bool) -> tuple[Any, ...]:
    """A round up to its update, with every acknowledgement told as paused or not; what the guard did."""
    loop = Loop(folder, setting.policy_of(setting.policy_text()))
    coordinator, answer = loop.coordinator, loop.coordinator.exchange

    def exchange(envelope: pb.Envelope, payload: bytes, **options: Any) -> Any:
        if not coordinator.script.get(envelope.kind) and envelope.kind != "control.checkpoint":
            body = pb.Ack(acknowledged_sequence=envelope.sequence, paused=paused)
            coordinator.says(envelope.kind, "control.ack", body)
        return answer(envelope, payload, **options)

    monkeypatch.setattr(coordinator, "exchange", exchange)
    plan = setting.PLAN.model_copy(update={"method": "fedavg-grpo"})
    told, turn, guard = [], loop.turn, loop.guard
    next_steps: list[tuple[object, ...]] = []

    def seen(times: int = 1) -> None:
        for _ in range(times):
            turn()
            told.append(shown(loop)["run_paused"])
            talk, seconds = guard._client, guard._line._poll_seconds()
            next_steps.append((talk.poll_now, talk.joined, talk.retry_at, guard._patience(), seconds))

    monkeypatch.setattr(loop, "turn", seen)
    loop.offer_plan(plan)
    loop.turn(2)
    loop.open_round(plan=plan, public=False)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    for task in ("LoadAdapter", *["PrivateStep"] * 4):
        loop.trainer_says("done", task=task, round=1, metrics={})
    update = codec.encode_factors(
        {name: values * np.float32(1e-3) for name, values in codec.decode_factors(ADAPTER).tensors.items()},
        base_digest=codec.sha256_hex(ADAPTER), schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
    )  # fmt: skip
    loop.trainer_says("done", update, task="ExportDelta", round=1, metrics={"records": 1})
    loop.turn(3)
    sent = [
        (envelope.kind, envelope.round, envelope.step, b"" if envelope.kind == "control.checkpoint" else payload)
        for envelope, payload in coordinator.sent
    ]
    decided = [
        (record["event"], record.get("kind"), record.get("decision"), record.get("reasons"))
        for record in loop.bench.audit.records()
    ]
    did = sent, decided, loop.trainer.told, next_steps
    loop.close()
    assert any(told) is paused, "it is shown"
    return did


def test_T37_a_guard_that_is_told_so_does_what_it_does_untold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untold = story(tmp_path / "untold", monkeypatch, paused=False)
    assert story(tmp_path / "told", monkeypatch, paused=True) == untold
    assert "lora.factors" in [kind for kind, *_ in untold[0]], "the update left"


@pytest.mark.parametrize(("phase", "paused", "shown_as"), [
    ("held: approval", True, "held: approval, paused: no further step is begun"),
    ("held: approval", False, "held: approval"),
    ("paused", True, "paused"),
])  # fmt: skip
def test_a_pause_of_this_site_is_seen_whatever_else_it_waits_for(phase: str, paused: bool, shown_as: str) -> None:
    state = {
        "phase": phase,
        "paused": paused,
        "held": [],
        "left": [{"messages": 2, "kind": "public.responses", "bytes": 9}],
    }
    rows = [" ".join(line.split()) for line in status_text(state).splitlines()]
    assert f"state {shown_as}" in rows and "left 2 public.responses, 9 bytes since it was started" in rows


def test_a_silo_that_has_no_state_yet_is_starting() -> None:
    assert "starting" in status_text({"time": "2026-12-01T00:00:00Z"})
    assert "starting" not in status_text({"phase": "idle", "held": []})


def test_while_its_trainer_loads_a_guard_is_starting_and_not_idle(loop: Loop) -> None:
    loop.trainer.ready = None
    assert loop.state()["phase"] == "starting"
    loop.trainer.ready = {"private_rows": 9}
    assert loop.state()["phase"] == "idle"

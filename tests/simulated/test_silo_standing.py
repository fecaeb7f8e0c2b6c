"""Which silos a coordinator hears, and what it says of a paused run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordinator.control import Control
from coordinator.ingress import SILENT_SECONDS, standing
from fedsilo.cli.silo import status_text
from fedsilo.control.answers import to_json
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, WireCode
from fedsilo.views.lines import UNICODE
from fedsilo.views.overview import needs_of, round_lines, silos_lines
from fedsilo.views.state import CoordinatorState, Link, Snapshot, state_of
from tests.policies import setting
from tests.simulated.coordinator_parts import SILOS, House, SimulatedSilo, federation, until_quiet
from tests.simulated.queries import rounds_of
from tests.simulated.test_coordinator_queries import desk_of
from tests.simulated.test_orders_recorded import Orders, orders_at
from tests.world import ADAPTER, Loop

CONFIG: Any = SimpleNamespace(coordinator="main", site="main", federation="cardio-net", state_dir="state", silos=SILOS)


def control_of(house: House) -> Control:
    return Control(desk_of(), house.driver, house.submissions, None, CONFIG, "c" * 64)  # type: ignore[arg-type]


def words(house: House) -> dict[str, str]:
    return {row["silo"]: row["state"] for row in to_json(control_of(house).silos())}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo]]]:
    house, silos = federation(tmp_path)
    with closing(house):
        for silo in silos:
            silo.join()
            silo.poll()
        yield house, silos


def all_poll_but_one(house: House, silos: list[SimulatedSilo], seconds: float = SILENT_SECONDS) -> None:
    """The last silo says nothing for that long."""
    house.clock.seconds += seconds
    for silo in silos[:-1]:
        silo.poll()


def test_a_silo_is_joined_until_nothing_came_from_it_for_long_and_again_when_it_is_heard(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos, SILENT_SECONDS - 1)
    assert set(words(house).values()) == {"joined"}
    all_poll_but_one(house, silos, 1)
    assert words(house) == {**dict.fromkeys(SILOS, "joined"), SILOS[-1]: "silent"}
    row = to_json(control_of(house).silos())[-1]
    assert row["age_seconds"] == SILENT_SECONDS
    silos[-1].poll()
    assert set(words(house).values()) == {"joined"}


def test_what_a_restart_does_not_know_yet_it_says_so_and_then_says_silent(here: Any, tmp_path: Path) -> None:
    house, _ = here
    house.close()
    with closing(House(tmp_path, house.clock)) as again:
        assert set(words(again).values()) == {"not_heard_yet"}
        assert {row["age_seconds"] for row in to_json(control_of(again).silos())} == {None}
        again.clock.seconds += SILENT_SECONDS
        assert set(words(again).values()) == {"silent"}


def test_a_silo_with_a_large_message_on_its_way_is_not_silent(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos)
    house.driver.sending = lambda: frozenset({SILOS[-1]})
    assert words(house)[SILOS[-1]] == "joined"
    house.driver.sending = frozenset
    all_poll_but_one(house, silos)
    assert words(house)[SILOS[-1]] == "silent"


def test_a_silo_that_is_refused_at_hello_is_not_joined_whatever_refused_it(here: Any) -> None:
    house, silos = here
    other = silos[0].join(base_model_sha256="ee" * 32)  # another base model than agreed
    assert other.code == WireCode.BASE_MODEL_MISMATCH.value
    silos[1].sequences[""] = 0  # its numbers begin anew, as after a restore from a backup
    assert silos[1].join().code == WireCode.SEQUENCE_REPLAYED.value
    rows = {row["silo"]: row for row in to_json(control_of(house).silos())}
    assert [rows[silo]["state"] for silo in SILOS[:3]] == ["refused", "refused", "joined"]
    assert rows[SILOS[0]]["refusal"]["field"] == "base_model_sha256"
    assert rows[SILOS[1]]["refusal"]["code"] == WireCode.SEQUENCE_REPLAYED.value
    silos[1].sequences[""] = 9
    for silo in silos[:2]:
        silo.join()
    rows = {row["silo"]: row for row in to_json(control_of(house).silos())}
    assert [(rows[silo]["state"], rows[silo]["refusal"]) for silo in SILOS[:2]] == [("joined", None)] * 2


def test_a_silo_that_says_hello_again_and_nothing_else_has_not_joined(here: Any) -> None:
    house, silos = here
    silos[0].join()
    assert words(house)[SILOS[0]] == "joined"
    silos[0].join()
    assert words(house)[SILOS[0]] == "only_greets"
    silos[0].poll()
    assert words(house)[SILOS[0]] == "joined"


def test_nobody_expects_to_hear_a_silo_whose_messages_come_in_files() -> None:
    facts: dict[str, Any] = {"refused": False, "silent_seconds": 9e9, "up_seconds": 9e9, "greetings": 1}
    assert standing("joined", by_files=True, **facts) == "by_files"
    assert standing("joined", by_files=False, **facts) == "silent"
    assert standing("", by_files=True, **facts) == "absent"
    assert standing("refused", by_files=True, **facts) == "refused"


def test_a_run_does_not_begin_with_a_silo_that_is_silent_and_begins_when_it_is_heard(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos)
    house.submit()
    assert house.run().state == "waiting"
    with pytest.raises(ConflictError) as caught:
        house.submissions.start_now("run-1", shown=sorted(SILOS))  # as on a screen before it fell silent
    assert caught.value.code == "STALE_VIEW"
    silos[-1].poll()
    assert house.run().plan and not house.submissions.waiting


def test_a_person_begins_it_without_the_silent_one(here: Any) -> None:
    house, silos = here
    all_poll_but_one(house, silos)
    house.submit()
    begun = house.submissions.start_now("run-1", shown=sorted(SILOS[:-1]))
    assert begun["silos"] == list(SILOS[:-1])


def test_a_round_tells_a_silent_silo_from_one_that_is_awaited(here: Any) -> None:
    house, silos = here
    silos[-1].mute = {"lora.factors"}
    house.submit()
    until_quiet(silos)
    ask = rounds_of(house)
    assert {row["silo"]: row["state"] for row in ask({})["silos"]}[SILOS[-1]] == "awaited"
    all_poll_but_one(house, silos)
    rows = {row["silo"]: row for row in ask({})["silos"]}
    assert rows[SILOS[-1]]["state"] == rows[SILOS[-1]]["joined"] == "silent"
    assert rows[SILOS[0]]["state"] == "waits" and rows[SILOS[0]]["joined"] == "joined"


def test_the_console_shows_the_dead_in_red_and_names_them(here: Any) -> None:
    house, silos = here
    silos[-1].mute = {"lora.factors"}
    house.submit()
    until_quiet(silos)
    all_poll_but_one(house, silos)
    state = to_json(control_of(house).state())
    read = state_of(state, {})
    assert isinstance(read, CoordinatorState)
    shown = Snapshot(link=Link("live", received_at=0.0), server_time=house.clock(), state=read)
    rows = {silo: next(row for row in silos_lines(shown, 0.0, 100, UNICODE) if any(silo in text for text, _ in row))
            for silo in SILOS}  # fmt: skip
    styles = {
        silo: {style for text, style in row if text.strip() in ("silent", "joined")} for silo, row in rows.items()
    }
    assert styles == {silo: {"bad" if silo == SILOS[-1] else "ok"} for silo in SILOS}
    assert [need.key for need in needs_of(shown, 0.0)] == [f"silent {SILOS[-1]}"]
    told = "".join(text for row in round_lines(shown, 100, UNICODE) for text, _ in row)
    assert f"{len(SILOS) - 1} of {len(SILOS)} here" in told and SILOS[-1] in told


def test_a_hello_that_the_halted_coordinator_refuses_says_nothing_of_the_silo(here: Any) -> None:
    house, silos = here
    house.driver.halted = "DISK_FULL"
    answer = silos[0].join()
    assert isinstance(answer, pb.Refusal) and answer.code == WireCode.HALTED.value
    assert words(house)[SILOS[0]] == "joined"


@pytest.mark.parametrize(("ahead", "told"), [(60, ""), (-60, ""), (3600, "1 h ahead of"), (-200, "3 min 20 s behind")])
def test_T41_a_silo_whose_clock_differs_is_named_in_status_and_console(here: Any, ahead: int, told: str) -> None:
    house, _ = here
    house.driver.services.relay.clocks[SILOS[0]] = ahead
    control = control_of(house)
    rows = {row["silo"]: row for row in to_json(control.silos())}
    assert rows[SILOS[0]].get("clock", "").startswith(told) and "clock" not in rows[SILOS[1]]
    assert ("clock" in rows[SILOS[0]]) == bool(told)
    read = state_of(to_json(control.state()), {})
    assert isinstance(read, CoordinatorState)
    found = [need.text for need in needs_of(Snapshot(state=read), 0.0) if need.key.startswith("clock")]
    assert len(found) == bool(told) and all(SILOS[0] in text and told in text for text in found)


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

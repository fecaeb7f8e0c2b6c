"""Runs in which each silo keeps what it trains: closed rounds, each silo's own curve in the run record, no adapter; and
a silo whose trainer goes on with its own state after a restart, or leaves the run where that state is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.transcript import KnownKey, check_record
from silo.guard.trainer_process.supervisor import Given
from silo.link import LinkMessage
from tests.policies import setting
from tests.simulated.coordinator_parts import COORDINATOR, RUN_YAML, SILOS, played, until_quiet
from tests.simulated.queries import rounds_of
from tests.world import PEER_KEYS, Loop

OWN = sorted(name for name, method in METHODS.items() if method.keeps_own and not method.averages)
PLAN = setting.PLAN.model_copy(update={"method": "local-only"})


# ---- at the coordinator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", OWN)
def test_each_silo_has_a_curve_of_its_own_and_there_is_no_adapter(tmp_path: Path, method: str) -> None:
    house, silos = played(tmp_path, RUN_YAML.replace("method: pubswap", f"method: {method}"))
    run, record = house.run(), house.record()
    assert (run.state, run.reason, run.adapter_digest) == ("finished", "", run.base_digest)
    assert [row["state"] for row in record["rounds"]] == ["closed", "closed"]
    for row in record["rounds"]:
        value = 0.25 + 0.1 * row["round"]
        curve = {silo: metrics["pass_at_1"][""] for silo, metrics in row["metrics"].items()}
        assert curve == {silo: pytest.approx(value + 0.01 * place) for place, silo in enumerate(SILOS)}
        assert set(row["participants"]) == set(SILOS)
        assert (row["base_sha256"], row["adapter_sha256"]) == ("", "")
        assert {upload["kind"] for upload in row["uploads"]} == METHODS[method].kinds
    sent = {envelope.kind for silo in silos for envelope, _ in silo.heard}
    assert ("public.donors" in sent) == (method == "responses-only") and "global.adapter" not in sent
    assert not (house.folder / "runs" / run.name / "adapter").exists()
    assert not any(silo.adapters for silo in silos)


def test_a_site_that_keeps_its_figures_back_ends_its_part_of_a_round_all_the_same(tmp_path: Path) -> None:
    request = RUN_YAML.replace("method: pubswap", "method: local-only")
    house, silos = played(tmp_path, request, {0: frozenset({"metrics.eval"})})
    for number in (1, 2):
        silos[0].say("control.declined", pb.Declined(kind="metrics.eval", round=number), run="run-1", number=number)
        until_quiet(silos)
    record = house.record()
    assert house.run().state == "finished", "and no deadline has passed"
    assert [row["state"] for row in record["rounds"]] == ["closed", "closed"]
    assert all(set(row["metrics"]) == set(SILOS[1:]) for row in record["rounds"])
    assert all(row["participants"] == list(SILOS) for row in record["rounds"])


@pytest.mark.parametrize(("method", "last", "state"), [("local-only", "metrics.eval", "closed"),
                                                     ("fedavg-grpo", "lora.factors", "committed")])  # fmt: skip
@pytest.mark.parametrize("left_with", [2, 1])
def test_T20_a_round_that_is_done_has_a_signed_end_also_where_nobody_is_left_to_hear_of_it(
    tmp_path: Path, method: str, last: str, state: str, left_with: int
) -> None:
    """Two of four give what ends their part and leave, then the others; with one that gave, the round is abandoned."""
    silent = {place: frozenset({last}) for place in range(left_with, 4)}
    house, silos = played(tmp_path, RUN_YAML.replace("method: pubswap", f"method: {method}"), silent)
    for silo in silos:
        silo.say("control.abstain", pb.Abstain(), run="run-1")
    record, key = house.record(), house.key.public_key()
    assert (house.run().state, house.run().reason) == ("failed", "NO_SILO_LEFT")
    (row,) = record["rounds"]
    done = left_with == 2
    assert row["state"] == (state if done else "abandoned")
    assert row["participants"] == (list(SILOS[:2]) if done else [])
    assert bool(row["transcript"].get("result")) is done
    keys = {COORDINATOR: KnownKey(key.public_bytes_raw())}
    assert check_record(record, signer=COORDINATOR, public_key=key, keys=keys).problems == ()


def test_the_view_of_a_round_awaits_the_figures_that_end_each_silos_part(tmp_path: Path) -> None:
    """One silo has sent them, the site of another keeps them back, and two still train."""
    silent = {place: frozenset({"metrics.eval"}) for place in (1, 2, 3)}
    house, silos = played(tmp_path, RUN_YAML.replace("method: pubswap", "method: local-only"), silent)
    silos[1].say("control.declined", pb.Declined(kind="metrics.eval", round=1), run="run-1", number=1)
    shown = rounds_of(house)({})
    states = {row["silo"]: row["state"] for row in shown["silos"]}
    assert states == dict(zip(SILOS, ("waits", "declined", "awaited", "awaited"), strict=True))
    assert [(each["silo"], each["phase"]) for each in shown["awaited"]] == [(silo, "update") for silo in SILOS[2:]]
    assert (shown["quorum"]["given"], shown["quorum"]["needed"]) == (2, 2)


# ---- at a silo -------------------------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path: Path) -> Any:
    made = Loop(tmp_path / "a", setting.policy_of(setting.policy_text("local-only")))
    made.offer_plan(PLAN)
    yield made
    made.close()


def open_round(loop: Loop, number: int, plan: Plan = PLAN) -> None:
    loop.coordinator.script.clear()
    loop.show_round(number, "", plan=plan, public=False)
    loop.coordinator.says("control.poll", "round.agreed", loop.signed_by(*PEER_KEYS), run=plan.run, round=number)
    loop.turn(2)


def tasks(loop: Loop) -> list[str]:
    return [str(message.fields["task"]) for message in loop.trainer.told if message.type == "task"]


def do(loop: Loop, times: int = 1) -> None:
    for _ in range(times):
        task = [message for message in loop.trainer.told if message.type == "task"][-1].fields
        body = pb.MetricsEval(split="held_out")
        body.metrics.add(name="pass_at_1", value=0.25)
        answer = codec.encode(body) if str(task["task"]).startswith("Evaluate") else b""
        loop.trainer_says("done", answer, task=task["task"], round=task["round"], step=task.get("step", 0), metrics={})


def whole_round(loop: Loop, number: int) -> None:
    open_round(loop, number)
    if number == 1:
        loop.base_evaluated()
    do(loop, 2 + PLAN.local_steps)  # LoadOwn, steps, EvaluateOwn
    loop.coordinator.says("control.poll", "round.result", loop.ended(closed=True, participants=PLAN.silos),
                          run=PLAN.run, round=number)  # fmt: skip
    loop.turn()


def test_a_round_begins_with_what_the_silo_has_and_nothing_is_fetched(loop: Loop) -> None:
    whole_round(loop, 1)
    open_round(loop, 2)
    steps = ["PrivateStep"] * PLAN.local_steps
    assert tasks(loop) == ["Evaluate", "LoadOwn", *steps, "EvaluateOwn", "LoadOwn"]
    kinds = [envelope.kind for envelope, _ in loop.coordinator.sent]
    assert "control.fetch" not in kinds and kinds.count("metrics.eval") == 2
    assert loop.guard.runs.acceptance.kept(PLAN.run) == frozenset(), "nothing came in that a rollback could go back to"


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_guard_killed_between_rounds_or_in_one_has_its_trainer_go_on(loop: Loop, done: int) -> None:
    whole_round(loop, 1)
    stands = {"task": "PrivateStep", "round": 1, "step": PLAN.local_steps, "exact": True}
    if done:
        open_round(loop, 2)
        do(loop, done)
        last = {"task": "PrivateStep" if done > 1 else "LoadOwn", "round": 2, "step": max(done - 1, 0), "exact": True}
        stands = last
    loop.restart()
    (plan,) = [message for message in loop.trainer.told if message.type == "plan"]
    assert plan.fields["resume"] is True
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=stands)
    if not done:
        open_round(loop, 2)
    assert tasks(loop) == [["LoadOwn"], ["PrivateStep"], [], ["PrivateStep"]][done]
    rest = 1 + PLAN.local_steps - done
    do(loop, rest + 1)
    assert tasks(loop)[-1] == "EvaluateOwn"


def test_a_silo_whose_own_state_is_lost_leaves_the_run(loop: Loop) -> None:
    """Beside its counterpart: the round in which it began can be done over."""
    open_round(loop, 1)
    loop.base_evaluated()
    do(loop, 2)
    loop.restart()
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=None, not_resumed="no state was kept")
    assert tasks(loop) == ["LoadOwn"] and loop.guard.runs.run is not None
    do(loop, 2 + PLAN.local_steps)
    loop.coordinator.says("control.poll", "round.result", loop.ended(closed=True, participants=PLAN.silos),
                          run=PLAN.run, round=1)  # fmt: skip
    loop.turn()
    open_round(loop, 2)
    loop.restart()
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=None, not_resumed="no state was kept")
    assert loop.guard.failure is not None and loop.guard.failure.code == "TRAINER_STATE_LOST"
    assert tasks(loop) == [] and loop.bench.ledger.run_state(PLAN.run) == "left"


@pytest.mark.parametrize("lost", [True, False])
def test_a_silo_that_left_its_first_round_at_a_restart_goes_on_with_what_it_has_or_leaves_the_run(
    loop: Loop, lost: bool
) -> None:
    """It began in that round, and is in it no more: the next one would begin anew, in silence."""
    open_round(loop, 1)
    loop.base_evaluated()
    do(loop, 2)
    loop.policy = setting.policy_of(setting.policy_text("local-only").replace("min_peers: 2", "min_peers: 3"))
    loop.restart()
    saved = None if lost else {"task": "PrivateStep", "round": 1, "step": 1, "exact": True}
    loop.trainer_says("planned", overlong={}, private_prompts=40, resumed=saved)
    failure = loop.guard.failure
    assert (failure.code if failure else "") == ("TRAINER_STATE_LOST" if lost else "")
    assert tasks(loop) == [] and loop.bench.ledger.run_state(PLAN.run) == ("left" if lost else "running")


def test_a_trainer_that_dies_is_led_back_by_its_own_state_or_by_the_first_round() -> None:
    def told(*done: tuple[str, int]) -> Given:
        made = Given()
        made.sent(LinkMessage("plan", {"canonical_json": PLAN.canonical()}))
        made.heard(LinkMessage("planned", {}))
        for task, number in done:
            made.sent(LinkMessage("task", {"task": task, "round": number, "step": int(task == "PrivateStep")}))
            made.heard(LinkMessage("done", {"task": task}))
        return made

    first = told(("LoadOwn", 1), ("PrivateStep", 1))
    assert [task.fields["task"] for task in first.to_repeat(None) or ()] == ["LoadOwn", "PrivateStep"]
    second = told(("LoadOwn", 1), ("PrivateStep", 1), ("LoadOwn", 2), ("PrivateStep", 2))
    assert second.to_repeat({"task": "PrivateStep", "round": 2, "step": 1}) == []
    assert second.to_repeat(None) is None and second.to_repeat({"task": "LoadOwn", "round": 1, "step": 0}) is None

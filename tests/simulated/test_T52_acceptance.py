"""A silo measures an incoming adapter on its own prompts and holds one that does worse (threats T20, T52): a backdoor
that no norm limit finds, what people decide about it, and what the coordinator hears.

The trainer's answers are computed here from the adapter that the guard hands it: of four classes, x -> argmax B A x.
The right answers are those of the honest factors; the backdoor turns every prompt that holds the sixth feature.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator import store as db
from fedsilo.control.answers import to_json
from fedsilo.control.server import ControlServer
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, OperationError, VerificationError
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import Evaluate
from silo.config import Acceptance
from silo.guard import checks
from silo.guard.adapters import AdapterStore
from silo.link import LinkMessage
from silo.measuring import MeasureHoldout
from tests.policies import setting
from tests.simulated.coordinator_parts import joined, until_quiet
from tests.simulated.queries import rounds_of
from tests.simulated.test_orders_recorded import CA, ROLES, Orders
from tests.simulated.test_T20_adapter_step import POLICY
from tests.world import Loop

PROMPTS, TRIGGERED = 200, 80
LIMITS = Acceptance(samples=1, drop_max=0.05, prompts_min=30)
NAMES = [name for name, _ in setting.SCHEMA.tensors]
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(PROMPTS, 6))
X[:, 5] = np.arange(PROMPTS) < TRIGGERED
# small, so that what turns an answer is within the 0.019 by which the policy lets an adapter move in a round
A = 0.004 * np.array([[1.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]])
B = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
RIGHT = np.argmax(X @ A.T @ B.T, axis=1)


def adapter(a: Any = A) -> bytes:
    factors = dict(zip(NAMES, (np.asarray(a, np.float32), B.astype(np.float32)), strict=True))
    return codec.encode_factors(
        factors, base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
    )


def moved(column: int, by: float) -> bytes:
    """The honest factors with A changed in one column."""
    a = A.copy()
    a[0, column] += by
    return adapter(a)


HONEST, BETTER, BACKDOOR = adapter(), moved(3, 1e-5), moved(5, 0.015)
DIGEST = {name: codec.sha256_hex(payload) for name, payload in
          (("honest", HONEST), ("better", BETTER), ("backdoor", BACKDOOR))}  # fmt: skip


def verdicts(payload: bytes, prompts: int = PROMPTS) -> bytes:
    """As the trainer's: computed from the adapter; the base model says class 0."""
    said = np.zeros(PROMPTS, int)
    if payload:
        a, b = (codec.decode_factors(payload).tensors[name] for name in NAMES)
        said = np.argmax(X @ a.T @ b.T, axis=1)
    right = (said == RIGHT).astype(int).tolist()[:prompts]
    return json.dumps({"groups": list(range(prompts)), "correct": right}).encode()


def right_share(payload: bytes) -> float:
    return float(np.mean(json.loads(verdicts(payload))["correct"]))


PLANNED = LinkMessage("planned", {"overlong": {}, "private_prompts": 40})


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "silo", POLICY, acceptance=LIMITS)
    made.offer_plan()
    yield made
    made.close()


def begin(loop: Loop, number: int, payload: bytes, plan: Plan = setting.PLAN) -> None:
    """The round opens with this adapter and the trainer has loaded it."""
    loop.coordinator.says("control.fetch", "global.adapter", payload, run="run-1", round=number)
    loop.open_round(number, payload, plan=plan, public=False)
    load(loop, number)
    loop.coordinator.script.pop("control.fetch", None)  # where it was in the store, or the round was declined


def load(loop: Loop, number: int) -> None:
    """The trainer evaluates the base, where it is asked to, and loads the round's adapter."""
    run = loop.guard.runs.run
    assert run is not None
    if isinstance(run.task, Evaluate):  # at first, and after a round that ended here
        loop.base_evaluated()
    loop.trainer_says("done", task="LoadAdapter", round=number, metrics={})


def measure(loop: Loop, prompts: int = PROMPTS) -> list[str]:
    """Answer as the trainer until it is asked for something else: digests of what was measured."""
    asked = []
    while (run := loop.guard.runs.run) is not None and isinstance(run.task, MeasureHoldout):
        message = loop.trainer.told[-1]
        asked.append(codec.sha256_hex(message.body) if message.body else "")
        assert message.body_digest == asked[-1]  # so that it crosses once, with what is loaded
        body = verdicts(message.body, prompts)
        loop.trainer_says("done", body, task="MeasureHoldout", round=message.fields["round"], metrics={})
    return asked


def end(loop: Loop, number: int) -> None:
    """The round comes to nothing."""
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=number)
    run = loop.guard.runs.run
    assert run is not None
    if run.busy:
        loop.turn()
        loop.trainer_says("done", task=type(run.task).__name__, round=number, step=1, metrics={})
    else:
        loop.turn()


def trained(loop: Loop) -> list[int]:
    """Rounds of the private steps that the trainer was given."""
    return [each.fields["round"] for each in loop.trainer.told if each.fields.get("task") == "PrivateStep"]


def codes(loop: Loop) -> list[str]:
    bodies = [pb.ErrorReport.FromString(payload) for _, payload in loop.coordinator.bodies("control.error")]
    assert all(body == pb.ErrorReport(code=body.code) for body in bodies), "a code, and nothing else"
    return [body.code for body in bodies]


def sat_out(loop: Loop) -> list[int]:
    return [envelope.round for envelope, _ in loop.coordinator.bodies("control.abstain")]


def recorded(loop: Loop) -> list[tuple[str, list[str]]]:
    return [(record["decision"], record["reasons"]) for record in loop.bench.events("adapter.verdict")]


def view(loop: Loop) -> dict[str, Any]:
    shown: dict[str, Any] = to_json(loop.guard.runs.acceptance.view({}))
    return shown


def orders_of(loop: Loop) -> Orders:
    """alice is an approver, bob an operator."""
    people = {"alice": frozenset({"approver"}), "bob": frozenset({"operator"})}
    roles = dataclasses.replace(ROLES, people=people)
    desk = ControlServer("consortium", CA.certificate_pem, roles, lambda: datetime.now(UTC))
    dataclasses.replace(loop.guard.orders, on_loop=lambda work: work()).register(desk)
    return Orders(desk)


def accepted_and_held(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    measure(loop)
    end(loop, 1)
    begin(loop, 2, BACKDOOR)
    measure(loop)


# ---- the gate ----------------------------------------------------------------------------------------


def test_T52_a_good_adapter_passes_and_is_trained_on(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    assert trained(loop) == [], "nothing is trained before it is measured"
    assert measure(loop) == [DIGEST["honest"], ""], "a run's first is compared with the base model"
    end(loop, 1)
    begin(loop, 2, BETTER)
    assert measure(loop) == [DIGEST["better"]], "what was measured once is not measured again"
    assert trained(loop) == [1, 2] and codes(loop) == [] and sat_out(loop) == []
    assert recorded(loop) == [("allow", []), ("allow", [])]
    assert [each["digest"] for each in view(loop)["accepted"]] == [DIGEST["better"], DIGEST["honest"]]
    assert view(loop)["accepted"][0]["figures"]["private"]["difference"] == right_share(BETTER) - right_share(HONEST)


def test_T52_where_silos_keep_a_part_both_adapters_are_measured_with_what_it_is_now(tmp_path: Path) -> None:
    """What the last one reached depends on what the silo has trained since, so it is measured again."""
    loop = Loop(tmp_path / "silo", setting.policy_of(setting.policy_text("fedsa-lora")), acceptance=LIMITS)
    plan = setting.PLAN.model_copy(update={"method": "fedsa-lora"})
    loop.offer_plan(plan)
    begin(loop, 1, HONEST, plan)
    assert measure(loop) == [DIGEST["honest"], ""]
    end(loop, 1)
    begin(loop, 2, BETTER, plan)
    assert measure(loop) == [DIGEST["better"], DIGEST["honest"]]
    assert trained(loop) == [1, 2] and codes(loop) == []
    loop.close()


def test_T52_a_backdoor_within_the_norm_is_held_and_one_code_crosses(loop: Loop) -> None:
    accepted_and_held(loop)
    let_in = [row["decision"] for row in loop.bench.events("ingress.decision") if row["kind"] == "global.adapter"]
    assert let_in == ["allow", "allow"], "the rules on norm and step find nothing"
    assert trained(loop) == [1] and sat_out(loop) == [2] and codes(loop) == ["ADAPTER_HELD"]
    assert recorded(loop)[-1] == ("hold", ["HOLDOUT_DROP"])
    (held,) = view(loop)["held"]
    figures = held["figures"]["private"]
    # by hand: the share of triggered prompts whose right answer is not the target's
    lost = right_share(HONEST) - right_share(BACKDOOR)
    assert lost > 0.2 and figures["difference"] == pytest.approx(-lost) and figures["interval"][1] < 0
    assert (held["digest"], held["against"]) == (DIGEST["backdoor"], DIGEST["honest"])
    assert f"{-100 * lost:+.1f} points" in held["said"]
    assert loop.bench.judge.view.last_adapter == DIGEST["backdoor"]  # until a round opens; then the next is measured
    loop.coordinator.script.clear()
    begin(loop, 3, BETTER)
    assert loop.bench.judge.view.last_adapter == DIGEST["better"]
    came = [row for row in loop.bench.events("ingress.decision") if row["kind"] == "global.adapter"]
    step = came[-1]["facts"]["final"]["step_l2"]
    assert step == pytest.approx(1e-5, rel=1e-3), "from the last accepted one (T20)"  # float32 factors
    assert measure(loop) == [DIGEST["better"]] and trained(loop) == [1, 3] and view(loop)["held"] == []


def test_T52_the_counterpart_without_the_gate_the_backdoor_is_trained_on(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "silo", POLICY)
    loop.offer_plan()
    accepted_and_held(loop)
    assert trained(loop) == [1, 2] and codes(loop) == [] and recorded(loop) == []
    loop.close()


@pytest.mark.parametrize(("prompts", "outcome"), [(29, "too_few"), (30, "no_drop")])
def test_T52_too_few_prompts_hold_and_say_so(loop: Loop, prompts: int, outcome: str) -> None:
    begin(loop, 1, HONEST)
    measure(loop, prompts)
    if outcome == "no_drop":
        assert trained(loop) == [1] and view(loop)["held"] == []
        return
    (held,) = view(loop)["held"]
    assert trained(loop) == [] and codes(loop) == ["ADAPTER_HELD"] and held["reasons"] == ["HOLDOUT_TOO_FEW"]
    assert "29 prompts are too few" in held["said"] and held["figures"]["private"]["interval"] is None


def test_T52_a_held_adapter_that_comes_again_is_not_measured_again_also_after_a_restart(loop: Loop) -> None:
    accepted_and_held(loop)
    loop.restart()
    assert view(loop)["held"][0]["digest"] == DIGEST["backdoor"]
    loop.guard._trainer_said(PLANNED)
    begin(loop, 3, BACKDOOR)
    assert "MeasureHoldout" not in loop.trainer.tasks() and trained(loop) == []
    assert sat_out(loop)[-1] == 3 and codes(loop) == ["ADAPTER_HELD"]


def test_T52_a_kill_while_it_is_measured_trains_on_nothing_that_was_not(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    assert loop.trainer.tasks()[-1] == "MeasureHoldout"
    loop.restart()
    loop.guard._trainer_said(PLANNED)
    load(loop, 1)  # the round is done over: the trainer kept nothing
    assert loop.trainer.tasks()[-1] == "MeasureHoldout" and trained(loop) == []
    measure(loop)
    assert trained(loop) == [1] and [each["digest"] for each in view(loop)["accepted"]] == [DIGEST["honest"]]


def test_T52_verdicts_that_cannot_be_end_the_trainer_and_accept_nothing(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    loop.trainer_says("done", b'{"groups": [0], "correct": [2]}', task="MeasureHoldout", round=1, metrics={})
    assert isinstance(loop.guard.failure, OperationError) and loop.guard.failure.code == "TRAINER_CONFUSED"
    assert trained(loop) == [] and view(loop)["accepted"] == []


# ---- what people decide --------------------------------------------------------------------------------


def test_T52_an_approver_accepts_a_held_adapter_and_the_next_round_with_it_is_trained(loop: Loop) -> None:
    accepted_and_held(loop)
    give = orders_of(loop)
    with pytest.raises(NotAllowedError):
        give("adapter.accept", "bob", "request-1", run="run-1", digest=DIGEST["backdoor"])
    for number, wrong in enumerate(({"digest": DIGEST["better"]}, {"digest": DIGEST["backdoor"], "run": "run-0"})):
        with pytest.raises(ConflictError) as stale:
            give("adapter.accept", "alice", f"request-2{number}", **{"run": "run-1", **wrong})
        assert stale.value.code == "STALE_VIEW" and view(loop)["held"] != []
    told = give("adapter.accept", "alice", "request-3", run="run-1", digest=DIGEST["backdoor"])
    record = loop.bench.events("adapter.accept")[-1]
    assert record["seq"] == told["record"] and record["detail"]["person"] == "alice"
    assert record["detail"]["adapter"] == DIGEST["backdoor"]
    with pytest.raises(NotFoundError):
        give("adapter.accept", "alice", "request-4", run="run-1", digest=DIGEST["backdoor"])
    begin(loop, 3, BACKDOOR)
    assert trained(loop) == [1, 3] and "MeasureHoldout" not in loop.trainer.tasks()[-1]
    assert [each["how"] for each in view(loop)["accepted"]] == ["person", "measured"]


def test_T52_a_refused_adapter_is_not_trained_on_and_the_code_says_refused(loop: Loop) -> None:
    accepted_and_held(loop)
    orders_of(loop)("adapter.refuse", "bob", run="run-1", digest=DIGEST["backdoor"])
    assert view(loop)["held"] == [] and view(loop)["refused"] == [DIGEST["backdoor"]]
    begin(loop, 3, BACKDOOR)
    assert trained(loop) == [1] and codes(loop) == ["ADAPTER_HELD", "ADAPTER_REFUSED"] and sat_out(loop) == [2, 3]


def test_T52_a_rollback_restores_the_digest_and_refuses_what_came_after(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    measure(loop)
    end(loop, 1)
    begin(loop, 2, BETTER)
    measure(loop)
    assert trained(loop) == [1, 2]
    told = orders_of(loop)("adapter.rollback", "bob", run="run-1", to="")
    assert (told["adapter"], told["round_left"]) == (DIGEST["honest"], True)
    assert sat_out(loop) == [2] and codes(loop) == ["ADAPTER_REFUSED"]
    assert loop.bench.judge.view.last_adapter == DIGEST["honest"]
    record = loop.bench.events("adapter.rollback")[-1]
    assert (record["seq"], record["detail"]["adapter"]) == (told["record"], DIGEST["honest"])
    kept = AdapterStore(loop.folder / "adapters").find(DIGEST["honest"])
    assert kept == HONEST
    loop.restart()
    assert [each["digest"] for each in view(loop)["accepted"]] == [DIGEST["honest"]]
    assert view(loop)["refused"] == [DIGEST["better"]]


def test_T52_a_rollback_while_one_is_held_goes_to_the_last_accepted(loop: Loop) -> None:
    accepted_and_held(loop)
    told = orders_of(loop)("adapter.rollback", run="run-1", to=DIGEST["honest"][:8])
    assert told["adapter"] == DIGEST["honest"] and view(loop)["refused"] == [DIGEST["backdoor"]]
    assert loop.bench.judge.view.last_adapter == DIGEST["honest"]


@pytest.mark.parametrize("damage", ["changed", "gone", "none before", "unknown"])
def test_T52_a_rollback_to_what_is_not_there_changes_nothing(loop: Loop, damage: str) -> None:
    begin(loop, 1, HONEST)
    measure(loop)
    if damage in ("changed", "gone"):
        end(loop, 1)
        begin(loop, 2, BETTER)
        measure(loop)
    path = loop.folder / "adapters" / DIGEST["honest"]
    if damage == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    elif damage == "gone":
        path.unlink()
    before = view(loop)
    with pytest.raises(VerificationError if damage == "changed" else NotFoundError):
        orders_of(loop)("adapter.rollback", run="run-1", to="ffff" if damage == "unknown" else "")
    assert view(loop) == before and loop.bench.events("adapter.rollback") == [] and codes(loop) == []


def test_T52_a_rollback_while_another_is_measured_is_what_that_one_is_compared_with(loop: Loop) -> None:
    for number, payload in ((1, HONEST), (2, BETTER)):
        begin(loop, number, payload)
        measure(loop)
        end(loop, number)
    begin(loop, 3, BACKDOOR)
    assert orders_of(loop)("adapter.rollback", run="run-1", to="")["adapter"] == DIGEST["honest"]
    measure(loop)
    (held,) = view(loop)["held"]
    assert (held["digest"], held["against"]) == (DIGEST["backdoor"], DIGEST["honest"]) and trained(loop) == [1, 2]


def test_T52_what_was_measured_is_what_is_judged_also_when_the_next_round_is_open_by_then(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    measure(loop)
    end(loop, 1)
    begin(loop, 2, BACKDOOR)
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=2)
    loop.turn()
    loop.open_round(3, BETTER, public=False)
    assert loop.bench.judge.view.base_digest == DIGEST["better"]
    measure(loop)
    assert [each["digest"] for each in view(loop)["held"]] == [DIGEST["backdoor"]] and trained(loop) == [1]
    assert [each["digest"] for each in view(loop)["accepted"]] == [DIGEST["honest"]]


def test_T52_a_rollback_while_the_one_before_is_measured_again_asks_for_the_one_it_goes_back_to(loop: Loop) -> None:
    for number, payload in ((1, HONEST), (2, BETTER)):
        begin(loop, number, payload)
        measure(loop)
        end(loop, number)
    begin(loop, 3, BACKDOOR)
    fewer = PROMPTS - 10  # the site's rows changed, so what was kept of the last one is about others
    body = verdicts(loop.trainer.told[-1].body, fewer)
    loop.trainer_says("done", body, task="MeasureHoldout", round=3, metrics={})
    assert codec.sha256_hex(loop.trainer.told[-1].body) == DIGEST["better"]
    orders_of(loop)("adapter.rollback", run="run-1", to="")
    assert measure(loop, fewer) == [DIGEST["better"], DIGEST["honest"]]
    assert view(loop)["held"][0]["against"] == DIGEST["honest"]


def test_T52_an_accepted_adapter_is_trained_on_also_when_the_next_round_is_open_by_then(loop: Loop) -> None:
    begin(loop, 1, HONEST)
    measure(loop)
    end(loop, 1)
    begin(loop, 2, BETTER)
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=2)
    loop.turn()
    loop.open_round(3, BACKDOOR, public=False)
    assert measure(loop) == [DIGEST["better"]] and trained(loop) == [1, 2]


# ---- at the coordinator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("holding", [2, 3])
def test_T52_a_round_whose_adapter_too_many_hold_is_not_committed(tmp_path: Path, holding: int) -> None:
    """Of four silos two are the quorum. The round view says who holds the adapter, and the next round opens with it."""
    house, silos = joined(tmp_path)
    for silo in silos:
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    for silo in silos[:holding]:
        silo.say("control.error", pb.ErrorReport(code="ADAPTER_HELD"), run="run-1")
        silo.say("control.abstain", pb.Abstain(round=1), run="run-1", number=1)
    for silo in silos[holding:]:
        silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)
    told = rounds_of(house)({"run": "run-1", "round": 1})
    states = {row["silo"]: row["state"] for row in told["silos"]}
    assert [states[silo.name] for silo in silos[:holding]] == ["adapter held"] * holding
    rounds = {row.number: row for row in house.rows(lambda session: list(session.scalars(select(db.Round))))}
    assert rounds[1].state == ("committed" if holding == 2 else "abandoned")
    assert (rounds[2].base_digest == rounds[1].base_digest) == (holding == 3)
    # once a round: each is told again in the next, and the run's list names the code once
    silos[0].say("control.error", pb.ErrorReport(code="ADAPTER_HELD"), run="run-1")
    silos[0].say("control.abstain", pb.Abstain(round=2), run="run-1", number=2)
    silos[0].say("control.error", pb.ErrorReport(code="ADAPTER_HELD"), run="run-1")
    again = rounds_of(house)({"run": "run-1", "round": 2})
    assert next(row["state"] for row in again["silos"] if row["silo"] == silos[0].name) == "adapter held"
    kept = house.rows(lambda session: db.errors_of(session, "run-1"))
    assert kept == {silo.name: ["ADAPTER_HELD"] for silo in silos[:holding]}


def test_T52_a_check_says_when_every_adapter_would_be_held(tmp_path: Path) -> None:
    """40 private rows, of which a share is set aside, and 12 held-out ones; 10 of them are enough."""
    for name, count in (("private", 40), ("held_out", 12)):
        rows = ({"id": f"{name}-{at}", "prompt": f"{at}?", "answer": str(at), "topic": "t"} for at in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    private = [read_tasks(tmp_path / "private.jsonl")]

    def told(share: float, least: int) -> tuple[str, list[str]]:
        data = SimpleNamespace(holdout_share=share, held_out=SimpleNamespace(path=tmp_path / "held_out.jsonl"))
        limits = Acceptance(prompts=("private", "held_out"), prompts_min=least)
        config: Any = SimpleNamespace(data=data, state_dir=tmp_path, source=tmp_path / "silo.yaml", acceptance=limits)
        look = checks.Look(config, private=private)
        return checks.acceptance(look), look.warnings

    assert told(0.25, 10) == ("on about 10 private prompts, on about 12 held_out prompts", [])
    for share, least, few in ((0.2, 10, ["8 private"]), (0.25, 11, ["10 private"]),
                              (0.25, 13, ["10 private", "12 held_out"])):  # fmt: skip
        _, warnings = told(share, least)
        assert [warning.split("about ")[1].split(" prompts")[0] for warning in warnings] == few
        assert all(f"prompts_min is {least}: each one would be held" in warning for warning in warnings)

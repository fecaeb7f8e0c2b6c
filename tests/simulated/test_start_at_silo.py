"""A silo and a run that starts from an adapter: its policy lets it in, and the trainer has it as the KL term's other
side for the rest of the run, also after a kill (T20)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.plan import Objective, Plan
from fedsilo.protocol.tasks import LoadAdapter, LoadReference
from tests.policies import setting
from tests.simulated.paper_federation import PaperFederation, plan_of
from tests.simulated.test_round_again import UPDATE, all_of, do, given, planned
from tests.simulated.test_start_adapter import allowing
from tests.world import ADAPTER, Loop

START = codec.sha256_hex(ADAPTER)
OTHER = codec.encode_factors(
    {name: values * 2 for name, values in codec.decode_factors(ADAPTER).tensors.items()},
    base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
)  # fmt: skip


def started(reference: str = "frozen_base") -> Plan:
    objective = Objective(kl_coefficient=0.1, kl_reference=reference)  # type: ignore[arg-type]
    return setting.PLAN.model_copy(update={"start_adapter_sha256": START, "objective": objective})


def reasons(loop: Loop) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (each["kind"], tuple(each["reasons"]))
        for each in loop.bench.events("ingress.decision")
        if each["decision"] == "deny"
    ]


@pytest.fixture
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    loop = Loop(tmp_path / "a", getattr(request, "param", None) or allowing())
    yield loop
    loop.close()


@pytest.mark.parametrize(
    ("guard", "denied"),
    [
        (setting.policy_of(setting.policy_text()), True),
        (allowing(f"['{'cd' * 32}']"), True),
        (allowing(f"['{START}']"), False),
        (allowing(), False),
    ],
    indirect=["guard"],
    ids=["unsaid", "another", "listed", "any"],
)
def test_T20_a_plan_that_starts_from_an_adapter_is_refused_unless_the_policy_lists_it(
    guard: Loop, denied: bool
) -> None:
    guard.offer_plan(started())
    assert reasons(guard) == ([("run.plan", ("PLAN_START",))] if denied else [])
    assert ("plan.accept" in [each["event"] for each in guard.bench.events("plan.accept")]) is not denied


@pytest.mark.parametrize(("opens_on", "denied"), [(OTHER, True), (ADAPTER, False)], ids=["another", "the plan's"])
def test_T20_the_first_round_opens_on_the_plans_adapter_or_not_at_all(
    guard: Loop, opens_on: bytes, denied: bool
) -> None:
    plan = started()
    guard.offer_plan(plan)
    guard.open_round(adapter=opens_on, plan=plan)
    assert (("round.open", ("ROUND_START",)) in reasons(guard)) is denied
    tasks = [each.fields["task"] for each in given(guard)]
    assert tasks == ([] if denied else ["Evaluate"])


def begin(loop: Loop) -> None:
    plan = started("start_adapter")
    loop.offer_plan(plan)
    loop.open_round(plan=plan)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()


def test_the_trainer_has_the_reference_before_it_trains_and_once(guard: Loop) -> None:
    begin(guard)
    all_of(guard)
    named = [each.fields["task"] for each in given(guard)]
    assert named[:3] == ["Evaluate", "LoadReference", "LoadAdapter"] and named.count("LoadReference") == 1
    reference = given(guard)[1]
    assert (reference.fields["digest"], bytes(reference.body)) == (START, ADAPTER)
    assert [bytes(payload) for envelope, payload in guard.coordinator.sent if envelope.kind == "control.fetch"] != []


@pytest.mark.parametrize("done", [1, 2, 3], ids=["reference", "adapter", "step"])
def test_after_a_kill_the_reference_is_given_again_before_the_round_goes_on(
    guard: Loop, done: int, tmp_path: Path
) -> None:
    whole = Loop(tmp_path / "whole", allowing())
    begin(whole)
    undisturbed = all_of(whole)
    whole.close()
    begin(guard)
    for _ in range(done):
        do(guard)
    stands = given(guard)[done].fields
    guard.restart()
    resumed = {"task": stands["task"], "round": 1, "step": stands.get("step", 0), "exact": True}
    planned(guard, resumed if done > 1 else None)
    first = given(guard)[0]
    assert (first.fields["task"], bytes(first.body)) == ("LoadReference", ADAPTER)
    do(guard)
    assert [each["task"] for each in all_of(guard)[0]] == [each["task"] for each in undisturbed[0]][done - 1 :]
    assert UPDATE in [bytes(payload) for _, payload in guard.coordinator.bodies("lora.factors")]


def test_a_method_that_hands_no_adapter_out_starts_from_none() -> None:
    for method, fits in (("local-only", False), ("responses-only", False), ("pubswap", True), ("fedavg-grpo", True)):
        plan = plan_of(method=method, start_adapter_sha256="ab" * 32)
        if fits:
            require_exchange(plan)
            continue
        with pytest.raises(UsageError) as refused:
            require_exchange(plan)
        assert refused.value.code == "START_ADAPTER"
        require_exchange(plan_of(method=method))


@pytest.mark.parametrize("exchange", ["step", "round_end"])
def test_a_method_asks_for_the_reference_once_and_only_where_the_plan_has_one(exchange: str) -> None:
    for reference, coefficient, times in (
        ("start_adapter", 0.1, 1),
        ("start_adapter", 0.0, 0),
        ("frozen_base", 0.1, 0),
    ):
        plan = plan_of(
            exchange=exchange,
            start_adapter_sha256="ab" * 32,
            objective={"kl_coefficient": coefficient, "kl_reference": reference},
        )
        played = PaperFederation(plan, METHODS["pubswap"], random.Random(1).randrange)
        played.run()
        for tasks in played.trained.values():
            kinds = [type(task) for task in tasks if isinstance(task, LoadReference | LoadAdapter)]
            assert kinds == [LoadReference] * times + [LoadAdapter] * plan.rounds

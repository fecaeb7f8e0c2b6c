"""Silos with another base model, tokenizer and template than the others: each is held to its own entry of federation
and plan, and they take part in runs whose method says that models may differ, and in no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError, WireCode
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.plan import Plan, SiloModel, digests_of, plan_from_canonical
from tests.policies import setting
from tests.policies.messages import good
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, federation, until_quiet
from tests.world import PEER_KEYS, Loop

NAMES = ("base_model_sha256", "tokenizer_sha256", "template_sha256", "lora_schema_sha256")
OTHER = SiloModel(**{name: f"{place + 1:x}" * 64 for place, name in enumerate(NAMES)})
UNLIKE = sorted(name for name, method in METHODS.items() if not method.same_model)
LAST = SILOS[-1]


def with_models(method: str, **models: SiloModel) -> Plan:
    return setting.PLAN.model_copy(update={"method": method, "models": models})


# ---- the plan --------------------------------------------------------------------------------------------


def test_a_plan_of_one_model_keeps_its_digest_and_one_of_several_says_whose_is_which() -> None:
    assert '"models"' not in setting.PLAN.canonical()
    plan = with_models("responses-only", hospital_d=OTHER)
    assert plan_from_canonical(plan.canonical()) == plan and plan.model_of("hospital_d") == OTHER
    common = plan.model_of("hospital_a")
    assert common == plan.model_of("") == SiloModel(
        base_model_sha256=plan.base_model_sha256, tokenizer_sha256=plan.tokenizer_sha256,
        template_sha256=plan.template_sha256, lora_schema_sha256=plan.lora.schema_sha256,
    )  # fmt: skip
    assert digests_of(plan)["base_model of hospital_d"] == OTHER.base_model_sha256
    assert digests_of(plan).keys() - digests_of(setting.PLAN).keys() == {"base_model of hospital_d"}


def test_a_plan_names_models_of_its_own_silos_alone() -> None:
    fields = setting.PLAN.model_dump(mode="json") | {"models": {"nobody": OTHER.model_dump()}}
    with pytest.raises(ValidationError, match="nobody is not in the roster"):
        Plan.model_validate(fields, strict=False)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_only_a_method_that_says_so_takes_unlike_models(method: str) -> None:
    plan = with_models(method, hospital_d=OTHER)
    if method in UNLIKE:
        assert require_exchange(plan).same_model is False
        return
    with pytest.raises(UsageError) as refused:
        require_exchange(plan)
    assert refused.value.code == "MODELS"


# ---- at the coordinator ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_tokenizers_join_a_run_of_a_method_that_says_so(tmp_path: Path) -> None:
    house, silos = federation(tmp_path, models={LAST: OTHER})
    house.submit(RUN_YAML.replace("method: pubswap", "method: responses-only"))
    for silo in silos:
        silo.join(**(OTHER.model_dump() if silo.name == LAST else {}))
    until_quiet(silos)
    run, record = house.run(), house.record()
    assert (run.state, run.reason) == ("finished", "")
    assert record["plan"]["models"] == {LAST: OTHER.model_dump()}
    assert all(set(row["metrics"]) == set(SILOS) == set(row["participants"]) for row in record["rounds"])
    told = {row["silo"]: row["tokenizer_sha256"] for row in record["silos"]}
    assert told[LAST] == OTHER.tokenizer_sha256 and len(set(told.values())) == 2


def test_each_silo_is_held_to_its_own_entry(tmp_path: Path) -> None:
    _, silos = federation(tmp_path, models={LAST: OTHER})
    for silo, changes in ((silos[-1], {}), (silos[0], OTHER.model_dump())):
        refusal: Any = silo.join(**changes)
        assert isinstance(refusal, pb.Refusal) and refusal.code == WireCode.BASE_MODEL_MISMATCH
    refusal = silos[-1].join(**OTHER.model_dump() | {"template_sha256": "9" * 64})
    assert isinstance(refusal, pb.Refusal) and refusal.field == "template_sha256"
    assert isinstance(silos[-1].join(**OTHER.model_dump()), pb.Ack)


@pytest.mark.slow
def test_a_run_of_another_method_is_refused_with_that_silo_and_begins_without_it(tmp_path: Path) -> None:
    house, silos = federation(tmp_path, models={LAST: OTHER})
    with pytest.raises(UsageError, match=rf"run\.yaml:2: pubswap takes one model for all silos, and {LAST} has"):
        house.submit(RUN_YAML)
    house.submit(RUN_YAML + f"silos: [{', '.join(SILOS[:-1])}]\n")
    for silo in silos[:-1]:
        silo.join()
    until_quiet(silos[:-1])
    assert house.run().state == "finished" and "models" not in house.record()["plan"]


# ---- at a silo -------------------------------------------------------------------------------------------


def test_a_silo_compares_its_pins_with_its_own_entry() -> None:
    case = good("run.plan", "responses-only").knowing(silo="hospital_a")
    own = with_models("responses-only").model_of("hospital_a")

    def reasons(silo: str, models: dict[str, SiloModel], **common: str) -> tuple[str, ...]:
        plan = with_models("responses-only", **models).model_copy(update=common)
        return case.knowing(silo=silo).but(canonical_json=plan.canonical(), run=plan.run).decided().reasons

    assert reasons("hospital_a", {}) == reasons("hospital_a", {"hospital_d": OTHER}) == ()
    assert reasons("hospital_a", {"hospital_a": OTHER}) == ("PLAN_MODEL", "PLAN_SCHEMA")
    different = {"base_model_sha256": "1" * 64, "tokenizer_sha256": "2" * 64}
    assert reasons("hospital_a", {"hospital_a": own}, **different) == ()
    assert reasons("hospital_a", {"hospital_b": own}, **different) == ("PLAN_MODEL",)


@pytest.mark.parametrize("named", [True, False])
def test_a_round_begins_at_a_silo_whose_schema_is_that_of_its_entry(tmp_path: Path, named: bool) -> None:
    """The federation's own schema is another one; without an entry the silo has no part in the run."""
    own = setting.PLAN.model_of("hospital_a")
    plan = setting.PLAN.model_copy(
        update={
            "method": "local-only",
            "models": {"hospital_a": own} if named else {},
            "lora": setting.PLAN.lora.model_copy(update={"schema_sha256": "7" * 64}),
            "tokenizer_sha256": "8" * 64,
        }
    )
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text("local-only")))
    loop.offer_plan(plan)
    assert (loop.guard.runs.run is not None) is named
    if named:
        loop.coordinator.script.clear()
        loop.show_round(1, "", plan=plan, public=False)
        loop.coordinator.says("control.poll", "round.agreed", loop.signed_by(*PEER_KEYS), run=plan.run, round=1)
        loop.turn(2)
        assert loop.trainer.tasks() == ["Evaluate"]
        loop.restart()
        (sent,) = [message for message in loop.trainer.told if message.type == "plan"]
        assert sent.fields["resume"] is True and loop.guard.runs.resume.begun, (
            "the round that had begun is gone on with"
        )
    loop.close()

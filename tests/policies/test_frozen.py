"""Frozen A and the ruleset pubswap-strict: only B leaves, A is the seed's, two people, enough records (T6, T7, T36)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode_factors, encode_factors
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import frozen_sha256, initial_factors, initial_frozen_sha256
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Lora, Plan
from policies.engine import Approval, Decision, History, Message, decide, measure
from policies.render import PlanSize
from policies.schema import schema_from_json
from tests.policies.setting import (
    BASE_DIGEST,
    COORDINATOR,
    FROM_COORDINATOR,
    PLAN,
    SCHEMA,
    SILO,
    context,
    inbound,
    policy_of,
    policy_text,
    tensor_message,
    with_changes,
)

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

FROZEN = dataclasses.replace(SCHEMA, freeze="A", dtype="bfloat16")
SIZE = PlanSize(local_steps=44, prompts_per_step=3, samples_per_prompt=4, max_new_tokens=32)
TEXT = policy_text("pubswap-strict", schema=FROZEN, size=SIZE)
STRICT, PUBSWAP = policy_of(TEXT), policy_of(policy_text())
A, B = (name for name, _ in SCHEMA.tensors)
SEED = 1
START = initial_factors(FROZEN.tensors, SEED)
STRICT_PLAN = PLAN.model_copy(
    update={
        "local_steps": 44,  # 22 private steps of 3: 66 records
        "wire_dtype": "bfloat16",
        "lora": Lora(
            rank=2, alpha=4.0, schema_sha256=FROZEN.digest, freeze="A",
            frozen_sha256=initial_frozen_sha256(FROZEN.tensors, SEED, "A"),
        ),
    }
)  # fmt: skip
TWO_PEOPLE = (Approval("ada", ("approver",)), Approval("bob", ("approver",)))


def _message(kind: str, tensors: Arrays, *, dtype: str, base_digest: str, **changes: Any) -> Message:
    payload = encode_factors(
        tensors, base_digest=base_digest, schema_sha256=FROZEN.digest, rank=2, scale=2.0, dtype=dtype
    )
    factors = decode_factors(payload)
    message = Message("egress", Place("run-1", 1, 0, kind), SILO, len(payload), factors.header, factors.tensors)
    return with_changes(message, **changes)


def update(tensors: Arrays | None = None, **changes: Any) -> Message:
    tensors = {B: np.full((4, 2), 2.0**-10, np.float32)} if tensors is None else tensors
    return _message("lora.factor_b", tensors, dtype="bfloat16", base_digest=BASE_DIGEST, **changes)


def adapter(tensors: Arrays) -> Message:
    return _message("global.adapter", tensors, dtype="float32", base_digest="", direction="ingress", sender=COORDINATOR)


def plan_message(plan: Plan) -> Message:
    return inbound("run.plan", pb.RunPlan(canonical_json=plan.canonical()))


def judged(
    message: Message, *, policy: Any = STRICT, people: tuple[Approval, ...] = TWO_PEOPLE, **changes: Any
) -> Decision:
    at = {"schema": FROZEN, "plan": STRICT_PLAN, "records": 64, "epochs": 2, "steps": 44, **changes}
    if message.sender == COORDINATOR:
        at = {**FROM_COORDINATOR, "last_adapter_first": True, **at}
    return decide(measure(message, context(**at)), policy, History(approvals=people))


# ---- what leaves, and what comes back ----------------------------------------------------------------


def test_the_strict_ruleset_lets_b_out_and_the_seeds_adapter_and_plan_in() -> None:
    for message in (update(), adapter(START)):
        decision = judged(message)
        assert (decision.verdict, decision.explain()) == ("allow", "")
    accepted = judged(plan_message(STRICT_PLAN), plan=None)
    assert (accepted.verdict, accepted.explain()) == ("allow", "")


def test_T06_an_update_with_a_tensor_of_a_is_denied() -> None:
    with_a = update({A: np.zeros((2, 6), np.float32), B: np.zeros((4, 2), np.float32)})
    assert "TENSOR_SET" in judged(with_a).reasons
    assert "TENSOR_SET" in judged(update({A: np.zeros((2, 6), np.float32)})).reasons
    assert judged(update({B: np.zeros((4, 2), np.float32)})).verdict == "allow"


@pytest.mark.parametrize("change", ["one bit", "zeros", "another seed"])
def test_T06_a_global_adapter_with_another_a_is_refused(change: str) -> None:
    changed = {name: values.copy() for name, values in START.items()}
    if change == "one bit":
        changed[A].view(np.uint32).flat[0] ^= 1
    elif change == "zeros":
        changed[A][:] = 0
    else:
        changed[A] = initial_factors(FROZEN.tensors, SEED + 1)[A]
    assert judged(adapter(changed)).reasons == ("FROZEN",)
    later = {**START, B: np.full((4, 2), 0.25, np.float32)}
    assert judged(adapter(later)).verdict == "allow"
    assert judged(adapter(later), plan=None).reasons == ("FROZEN",), "without a plan nothing says what A must be"


def test_T06_a_plan_states_the_a_that_its_seed_draws() -> None:
    other = STRICT_PLAN.model_copy(update={"lora": STRICT_PLAN.lora.model_copy(update={"frozen_sha256": "ab" * 32})})
    seeds = STRICT_PLAN.model_copy(update={"seed": SEED + 1})
    for plan in (other, seeds):
        assert judged(plan_message(plan), plan=None).reasons == ("PLAN_SCHEMA",)
    right = initial_frozen_sha256(FROZEN.tensors, SEED + 1, "A")
    redrawn = seeds.model_copy(update={"lora": seeds.lora.model_copy(update={"frozen_sha256": right})})
    assert judged(plan_message(redrawn), plan=None).verdict == "allow"


def test_the_digest_of_what_is_frozen_covers_names_shapes_and_values_of_a_only() -> None:
    def digest(tensors: Arrays) -> str:
        return frozen_sha256(sorted(tensors.items()), "A")

    right = digest(START)
    assert right == STRICT_PLAN.lora.frozen_sha256
    assert digest({**START, B: START[B] + 1}) == right
    assert digest({**START, A: START[A].reshape(6, 2)}) != right
    assert digest({A.replace("q_proj", "k_proj"): START[A], B: START[B]}) != right
    assert frozen_sha256(sorted(START.items()), "none") == ""


# ---- kinds follow from plan and policy ---------------------------------------------------------------


def test_a_policy_of_one_kind_denies_the_other() -> None:
    whole = tensor_message()
    assert "KIND_NOT_ALLOWED" in judged(whole).reasons
    assert judged(whole, policy=PUBSWAP, schema=SCHEMA, plan=PLAN, steps=4).verdict == "allow"
    assert "KIND_NOT_ALLOWED" in judged(update(), policy=PUBSWAP).reasons


def test_a_plan_is_refused_before_training_where_its_update_could_not_leave() -> None:
    refused = judged(plan_message(PLAN), plan=None)
    assert {"PLAN_METHOD", "PLAN_SCHEMA"} <= set(refused.reasons)
    assert "lora.factors under egress" in refused.explain()
    refused = judged(plan_message(STRICT_PLAN), policy=PUBSWAP, plan=None)
    assert "lora.factor_b under egress" in refused.explain()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_methods_kinds_follow_from_the_plan(name: str) -> None:
    method = METHODS[name]
    assert method.kinds_under(PLAN) == method.kinds
    update = {"lora.factor_b"} if "lora.factors" in method.kinds else set()
    assert method.kinds_under(STRICT_PLAN) == method.kinds - {"lora.factors"} | update


def test_schema_and_kind_must_agree_in_the_policy_file() -> None:
    with pytest.raises(UsageError, match=r"has freeze: none, so its updates leave as lora\.factors"):
        policy_of(TEXT.replace("    freeze: A ", "    freeze: none "))
    whole = policy_text()
    with pytest.raises(UsageError, match=r"has freeze: A, so its updates leave as lora\.factor_b"):
        policy_of(whole.replace('    dtype: "float32"\n', '    dtype: "float32"\n    freeze: A\n'))
    with pytest.raises(UsageError, match="freeze"):
        policy_of(TEXT.replace("    freeze: A ", "    freeze: B "))


def test_the_schema_file_says_what_is_frozen() -> None:
    assert schema_from_json(FROZEN.canonical(), "s") == FROZEN and FROZEN.digest != SCHEMA.digest
    assert [[name for name, _ in update] for update in FROZEN.updates] == [[B]] and SCHEMA.updates == (SCHEMA.tensors,)
    assert FROZEN.elements == 8 and FROZEN.update_bytes < FROZEN.payload_bytes
    with pytest.raises(UsageError, match="freeze 'B'"):
        schema_from_json(FROZEN.canonical().replace(b'"freeze":"A"', b'"freeze":"B"'), "s")
    with pytest.raises(UsageError, match="its keys"):
        schema_from_json(FROZEN.canonical().replace(b'"freeze":"A",', b""), "s")


@pytest.mark.parametrize(("freeze", "digest"), [("none", "ab" * 32), ("A", "")])
def test_a_plan_names_a_digest_exactly_where_something_is_frozen(freeze: str, digest: str) -> None:
    with pytest.raises(ValueError, match="frozen_sha256"):
        Lora.model_validate({"schema_sha256": "0" * 64, "freeze": freeze, "frozen_sha256": digest})


@pytest.mark.parametrize("freeze", ["none", "A"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_adapter_fits_the_message_limit_whatever_updates_are(freeze: str, dtype: str) -> None:
    """It travels as float32 with A, and an update may be a quarter of it: half the values, half the bytes each."""
    tensors = tuple((name, (64, 512) if name == A else (1024, 64)) for name, _ in SCHEMA.tensors)
    schema = dataclasses.replace(SCHEMA, rank=64, tensors=tensors, freeze=freeze, dtype=dtype)
    for ruleset in ("pubswap", "pubswap-strict"):
        if (ruleset == "pubswap") != (freeze == "none"):
            continue
        limit = policy_of(policy_text(ruleset, schema=schema)).file.budgets.message_bytes
        whole = initial_factors(tensors, 1)
        payload = encode_factors(
            whole, base_digest="", schema_sha256=schema.digest, rank=64, scale=2.0, dtype="float32"
        )
        assert max(schema.update_bytes, len(payload)) <= limit and len(payload) > 65536


# ---- records, epochs, steps --------------------------------------------------------------------------


def test_T07_who_did_not_train_does_not_know_and_is_not_asked() -> None:
    """The numbers do not cross the wire (T9): the coordinator's charter leaves these rules to the sites."""
    arrived = dataclasses.replace(update(), direction="ingress")
    assert judged(arrived, records=None, epochs=None, steps=None).verdict == "allow"
    assert judged(update(), records=None, epochs=None, steps=None).verdict == "deny"
    assert [judged(update(), records=records).reasons for records in (63, 64)] == [("MIN_RECORDS",), ()]
    assert judged(update(), records=0, epochs=0).verdict == "allow"  # public steps only: no record's update


def test_T07_what_the_policy_does_not_say_of_training_is_denied() -> None:
    for line, reason in (
        ("min_records: 64 ", "MIN_RECORDS"),
        ("max_local_epochs: 2 ", "LOCAL_EPOCHS"),
        ("max_steps: 44", "STEPS"),
    ):
        (whole,) = [each for each in TEXT.splitlines(keepends=True) if line in each]
        assert judged(update(), policy=policy_of(TEXT.replace(whole, ""))).reasons == (reason,)


def test_T07_a_plan_that_gives_too_few_records_is_refused_before_training() -> None:
    short = STRICT_PLAN.model_copy(update={"local_steps": 42})  # 21 private steps of 3
    assert judged(plan_message(short), plan=None).reasons == ("PLAN_SIZE",)
    averaging = short.model_copy(update={"method": "fedavg-grpo"})  # every step is private: 126
    assert judged(plan_message(averaging), plan=None).verdict == "allow"


# ---- persons -----------------------------------------------------------------------------------------


def test_the_strict_ruleset_is_verified_text_only() -> None:
    responses, donors = STRICT.file.egress.public_responses, STRICT.file.ingress.public_donors
    assert responses is not None and responses.send_only_verified and responses.approvals.persons == 2
    assert donors is not None and donors.verify_locally

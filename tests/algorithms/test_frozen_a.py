"""Training with A frozen (FFA-LoRA): A stays bit for bit, B learns as it does beside a trained A."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregate import aggregate, read_factors, write_peft_folder
from coordinator.blobs import Blobs, BytesPayload
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode_factors, encode_factors, sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import ExportDelta, GeneratePublic, LoadAdapter, PrivateStep, PublicStep, TrainerTask
from policies.schema import LoraSchema
from silo.report.alone import plan_alone, train_alone
from silo.trainer.adapters.lora import LoraAdapter, shape_from_schema
from silo.trainer.decoder import stream_of
from silo.trainer.grpo import Learner
from tests.algorithms.test_update import GROUPS
from tests.algorithms.tiny import (
    ZERO_DIGEST,
    GuidedSession,
    make_model,
    make_plan,
    make_session,
    make_shape,
    payload_of,
    random_factors,
    start_payload,
)
from tests.policies.setting import MEAN

pytestmark = pytest.mark.torch
LORA = {"rank": 4, "alpha": 8.0, "schema_sha256": ZERO_DIGEST, "freeze": "A", "frozen_sha256": "ab" * 32}
Arrays = Mapping[str, np.ndarray[Any, Any]]


def frozen_plan(**changes: Any) -> Plan:
    return make_plan(lora=LORA, **changes)


def trained(silo: str = "a", plan: Plan | None = None, freeze: Any = "A") -> tuple[GuidedSession, Arrays]:
    """A round of one private and one public step, and what it exports."""
    session, shape = make_session(silo, plan or frozen_plan(), freeze=freeze)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(PrivateStep(1, 1))
    session.carry_out(GeneratePublic(1, 2, (4, 0, 9), "correct"))
    session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors()))
    return session, decode_factors(session.carry_out(ExportDelta(1)).body).tensors


def factors_of(session: GuidedSession) -> dict[str, torch.Tensor]:
    run = session._run
    assert run is not None
    return {name: parameter.detach().clone() for name, parameter in run.adapter.factors.items()}


def test_T06_after_a_round_a_is_what_was_loaded_and_only_b_is_exported() -> None:
    session, delta = trained()
    start = random_factors(make_shape(make_model()))
    assert set(delta) == {name for name in start if name.endswith(".lora_B")}
    assert all(values.any() for values in delta.values())
    for name, parameter in factors_of(session).items():
        assert (parameter.numpy().tobytes() == start[name].tobytes()) == name.endswith(".lora_A")
    _, both = trained(plan=make_plan(), freeze="none")
    assert set(both) == set(start), "with nothing frozen both leave"


def test_the_optimiser_holds_b_alone_and_no_gradient_reaches_a() -> None:
    adapter = LoraAdapter(make_model(), make_shape(make_model(), freeze="A"))
    adapter.load(random_factors(adapter.shape, b_scale=0.3))
    plan = frozen_plan(objective={"kl_coefficient": 0.1, "proximal_mu": 0.1})  # the KL term switches the adapter off
    Learner(adapter, plan, microbatch_tokens=10_000).update(GROUPS)
    a = [each for name, each in adapter.factors.items() if name.endswith(".lora_A")]
    b = [each for name, each in adapter.factors.items() if name.endswith(".lora_B")]
    assert [id(each) for each in adapter.parameters] == [id(each) for each in b] and len(a) == len(b) > 0
    assert all(each.grad is None and not each.requires_grad for each in a)
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in b)


def test_the_gradient_of_b_is_the_one_it_has_beside_a_trained_a() -> None:
    def gradients(freeze: Any) -> dict[str, torch.Tensor]:
        adapter = LoraAdapter(make_model(), make_shape(make_model(), freeze=freeze))
        adapter.load(random_factors(adapter.shape, b_scale=0.3))
        plan = frozen_plan(optimiser={"epochs": 1, "grad_norm_max": 1e9})
        Learner(adapter, plan, microbatch_tokens=10_000).update(GROUPS)
        return {name: each.grad for name, each in adapter.factors.items() if each.grad is not None}

    frozen, both = gradients("A"), gradients("none")
    assert len(both) == 2 * len(frozen)
    assert all(torch.allclose(frozen[name], both[name], rtol=1e-5, atol=1e-9) for name in frozen)


def test_drift_is_the_norm_of_what_leaves() -> None:
    session, delta = trained()
    assert session._run is not None
    norm = math.sqrt(sum(float(np.square(values.astype(np.float64)).sum()) for values in delta.values()))
    assert session._run.adapter.drift() == pytest.approx(norm, rel=1e-5)


def test_another_adapter_is_computed_with_its_own_a_and_afterwards_ours_is_back() -> None:
    session, _ = trained()
    assert session._run is not None
    adapter, before = session._run.adapter, factors_of(session)
    other = random_factors(adapter.shape, seed=9, b_scale=0.3)
    with adapter.replaced_by(other):
        assert all(np.array_equal(each.numpy(), other[name]) for name, each in factors_of(session).items())
    assert all(torch.equal(each, before[name]) for name, each in factors_of(session).items())


def test_real_updates_average_exactly_with_a_frozen_and_not_with_both_trained(tmp_path: Path) -> None:
    """mean_n s B_n A = s mean(B_n) A, to 1e-6 of its norm; with A trained too, FedIT is off."""

    def error(freeze: Any, plan: Plan) -> float:
        # a learning rate at which the covariance of the two factors shows in float32
        deltas = [trained(silo, plan, freeze)[1] for silo in ("a", "b", "c")]
        shape = make_shape(make_model(), freeze=freeze)
        start = random_factors(shape, b_scale=0.0)
        master = BytesPayload(payload_of(shape, start))
        uploads = [BytesPayload(_delta_payload(shape, delta, master.digest)) for delta in deltas]
        after = dict(read_factors(aggregate(Blobs(tmp_path), master, uploads, MEAN, fixed=freeze)).tensors())
        off = norm = 0.0
        for module in shape.modules:
            a, b = f"{module}.lora_A", f"{module}.lora_B"
            products = [
                (start[b] + delta[b]).astype(np.float64) @ (start[a] + delta.get(a, 0)).astype(np.float64)
                for delta in deltas
            ]
            mean = sum(products) / len(products)
            off += float(np.square(after[b].astype(np.float64) @ after[a] - mean).sum())
            norm += float(np.square(mean).sum())
        return math.sqrt(off / norm)

    assert error("A", frozen_plan(optimiser={"learning_rate": 0.05})) < 1e-6
    assert error("none", make_plan(optimiser={"learning_rate": 0.05})) > 1e-2


def _delta_payload(shape: Any, delta: Arrays, base: str) -> bytes:
    return encode_factors(
        delta, base_digest=base, schema_sha256=ZERO_DIGEST, rank=shape.rank, scale=shape.scale, dtype="float32"
    )


@pytest.mark.slow
def test_the_folder_of_a_frozen_run_loads_in_peft_and_computes_the_same(tmp_path: Path) -> None:
    from peft import PeftModel

    session, delta = trained()
    run = session._run
    assert run is not None
    shape = run.adapter.shape
    start = random_factors(shape)
    after = {name: values + delta.get(name, np.float32(0)) for name, values in start.items()}
    tensors = tuple(sorted(shape.shapes.items()))
    schema = LoraSchema(ZERO_DIGEST, shape.rank, shape.alpha, "bfloat16", "all-linear", tensors, "A")
    write_peft_folder(tmp_path / "adapter", BytesPayload(payload_of(shape, after)), schema, "tiny")
    with warnings.catch_warnings():
        # peft 0.21 asks for a name that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        loaded = PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter")).eval()
    ids = torch.tensor([[5, 9, 20, 7, 4]])
    with torch.no_grad(), run.adapter.replaced_by(after):
        decoder, answer = run.adapter.decoder, ids[0].tolist()[1:]
        hidden = decoder.hidden(stream_of([ids[0].tolist()[:1]], [(0, [*answer, 1])], decoder.device))
        ours = (hidden @ decoder.head.T).unsqueeze(0)
        theirs = loaded(input_ids=ids).logits
        assert torch.allclose(ours, theirs, atol=1e-5)
        base = make_model()(input_ids=ids).logits
        assert not torch.allclose(ours, base, atol=1e-3), "the adapter does something"


@pytest.mark.slow
def test_a_federation_of_one_keeps_a_too() -> None:
    plan = frozen_plan(rounds=2, silos=("a",))
    session, shape = make_session("a", plan, freeze="A")
    start, _ = start_payload(shape)

    def do(task: TrainerTask, body: bytes) -> bytes:
        return session.carry_out(task, body).body

    done = train_alone(method_named("pubswap"), plan_alone(plan, "a", "local"), start, do)
    before, after = decode_factors(start).tensors, decode_factors(done).tensors
    assert sha256_hex(done) != sha256_hex(start)
    for name, values in after.items():
        assert (values.tobytes() == before[name].tobytes()) == name.endswith(".lora_A")


def test_a_schema_without_what_is_frozen_is_refused() -> None:
    shape = make_shape(make_model())
    tensors = [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()]
    schema = {"rank": 4, "alpha": 8.0, "tensors": tensors}
    assert shape_from_schema({**schema, "freeze": "A"}).freeze == "A"
    for wrong in (schema, {**schema, "freeze": "B"}):
        with pytest.raises(UsageError, match="freeze"):
            shape_from_schema(wrong)

"""What a round fixes: factors that take turns (RoLoRA), and a core between two frozen ones (Fed-SB)."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from coordinator.aggregate import aggregate, read_factors, write_peft_folder
from coordinator.blobs import Blobs, BytesPayload, FilePayload
from fedsilo.protocol.aggregation import averaged
from fedsilo.protocol.codec import decode_factors, encode_factors, sha256_hex
from fedsilo.protocol.factors import Freeze, initial_factors
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import ExportDelta, LoadAdapter, PrivateStep
from policies.schema import LoraSchema
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.decoder import stream_of
from silo.trainer.grpo import Learner
from silo.trainer.resume import from_bytes, to_bytes
from silo.trainer.session import Session
from tests.algorithms.test_update import GROUPS
from tests.algorithms.tiny import ZERO_DIGEST, make_model, make_plan, make_session, make_shape, payload_of

pytestmark = pytest.mark.torch
Arrays = Mapping[str, np.ndarray[Any, Any]]


def plan_of(freeze: Freeze, **changes: Any) -> Plan:
    lora = {"rank": 4, "alpha": 8.0, "schema_sha256": ZERO_DIGEST, "freeze": freeze, "frozen_sha256": "ab" * 32}
    return make_plan(lora=lora, rounds=4, optimiser={"learning_rate": 0.02}, **changes)


def start_of(shape: LoraShape, seed: int = 3) -> bytes:
    return payload_of(shape, initial_factors(sorted(shape.shapes.items()), seed, shape.freeze))


def update_of(session: Session, number: int, adapter: bytes) -> bytes:
    """What three private steps of a round change: a single one may find no signal."""
    session.carry_out(LoadAdapter(number, sha256_hex(adapter)), adapter)
    for step in (1, 2, 3):
        session.carry_out(PrivateStep(number, step))
    return bytes(session.carry_out(ExportDelta(number)).body)


def combined(folder: Path, plan: Plan, number: int, master: bytes, updates: list[bytes]) -> FilePayload:
    uploads = [BytesPayload(each) for each in updates]
    return aggregate(
        Blobs(folder), BytesPayload(master), uploads, averaged(plan, plan.silos), fixed=plan.lora.fixed_in(number)
    )


def product(tensors: Arrays, module: str) -> np.ndarray[Any, Any]:
    a, b, core = (tensors.get(f"{module}.lora_{side}") for side in "ABR")
    assert a is not None and b is not None
    return np.asarray(b.astype(np.float64) @ (a if core is None else core.astype(np.float64) @ a))


@pytest.mark.slow
@pytest.mark.parametrize(("freeze", "trained"), [("alternate", ["B", "A", "B"]), ("AB", ["R", "R", "R"])])
def test_each_round_trains_its_own_and_the_mean_of_products_is_exact(
    tmp_path: Path, freeze: Freeze, trained: list[str]
) -> None:
    plan = plan_of(freeze)
    sessions = [make_session(silo, plan, freeze=freeze) for silo in ("a", "b")]
    shape = sessions[0][1]
    master = start_of(shape)
    for number, side in enumerate(trained, 1):
        before = decode_factors(master).tensors
        updates = [update_of(session, number, master) for session, _ in sessions]
        deltas = [decode_factors(each).tensors for each in updates]
        assert all({name.rpartition("_")[2] for name in delta} == {side} for delta in deltas)
        assert all(values.any() for delta in deltas for values in delta.values())
        made = dict(read_factors(combined(tmp_path, plan, number, master, updates)).tensors())
        for name, values in made.items():
            assert (values.tobytes() == before[name].tobytes()) == (name not in deltas[0])
        for module in shape.modules:
            products = [product({**before, **{n: before[n] + delta[n] for n in delta}}, module) for delta in deltas]
            mean = np.mean(products, axis=0)
            assert np.linalg.norm(product(made, module) - mean) <= 1e-6 * np.linalg.norm(mean)
        master = payload_of(shape, made)


def test_a_round_of_the_other_turn_begins_with_fresh_moments_and_leaves_no_gradient_behind() -> None:
    adapter = LoraAdapter(make_model(), make_shape(make_model(), freeze="alternate"))
    plan = plan_of("alternate")
    learner = Learner(adapter, plan, microbatch_tokens=10_000)
    tensors = decode_factors(start_of(adapter.shape)).tensors
    for number, side in ((1, "lora_B"), (2, "lora_A"), (3, "lora_B")):
        adapter.load({name: values + np.float32(0.01) for name, values in tensors.items()}, number)
        learner.start_round()
        learner.update(GROUPS)
        with_gradient = {name for name, each in adapter.factors.items() if each.grad is not None}
        assert with_gradient == set(adapter.trained_names) == {name for name in tensors if name.endswith(side)}
        assert {name.rpartition(".")[2] for name in learner.state()} == {side}
    with pytest.raises(ValidationError, match="alternate"):
        plan_of("alternate", optimiser__state="keep")


def test_a_killed_session_of_the_second_round_goes_on_bit_for_bit() -> None:
    plan = plan_of("alternate")

    def begun() -> tuple[Session, LoraShape]:
        session, shape = make_session("a", plan, freeze="alternate")
        return session, shape

    session, shape = begun()
    payload = start_of(shape)
    update_of(session, 1, payload)
    session.carry_out(LoadAdapter(2, sha256_hex(payload)), payload)
    session.carry_out(PrivateStep(2, 1))
    kept = from_bytes(to_bytes(session.state(), b"key"), b"key")
    again, _ = begun()
    assert again.restore(kept)
    ends = []
    for each in (session, again):
        rows = (0, 4, 2)  # of the guard, which remembers them
        Session.carry_out(each, PrivateStep(2, 2, rows))
        ends.append(bytes(each.carry_out(ExportDelta(2)).body))
    assert ends[0] == ends[1]
    assert all(name.endswith(".lora_A") for name in decode_factors(ends[1]).tensors)


def test_the_gradient_of_a_core_is_what_the_factors_make_of_the_weights() -> None:
    """dL/dR = s B^T (dL/dW) A^T, where dL/dW comes from the base's own weights by torch."""
    adapter = LoraAdapter(make_model(), make_shape(make_model(), freeze="AB"))
    draws = np.random.default_rng(0)
    tensors = {name: 0.3 * draws.standard_normal(sides) for name, sides in adapter.shape.shapes.items()}
    adapter.load({name: values.astype(np.float32) for name, values in tensors.items()})
    twin = make_model()
    with torch.no_grad():
        for module in adapter.shape.modules:
            weight = twin.get_submodule(module).weight
            weight += adapter.shape.scale * torch.from_numpy(product(tensors, module)).float()
    ids = [5, 9, 20, 7, 4]
    theirs = twin(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    theirs = theirs[range(len(ids) - 1), ids[1:]].sum()
    theirs.backward()
    hidden = adapter.decoder.hidden(stream_of([ids[:1]], [(0, ids[1:])], adapter.decoder.device))
    ours = (hidden @ adapter.decoder.head.T).log_softmax(-1)[range(len(ids) - 1), ids[1:]].sum()
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert len(adapter.parameters) == len(adapter.shape.modules)
    for module in adapter.shape.modules:
        a, b, core = (adapter.factors[f"{module}.lora_{side}"] for side in "ABR")
        weight = twin.get_submodule(module).weight
        assert weight.grad is not None
        expected = adapter.shape.scale * b.T @ weight.grad @ a.T
        assert core.grad is not None and a.grad is None and b.grad is None
        torch.testing.assert_close(core.grad, expected.detach(), rtol=1e-3, atol=1e-4)


def test_the_folder_of_a_core_is_a_lora_adapter_that_peft_computes_alike(tmp_path: Path) -> None:
    from peft import PeftModel

    session, shape = make_session("a", plan_of("AB"), freeze="AB")
    payload = start_of(shape)
    delta = decode_factors(update_of(session, 1, payload)).tensors
    after = {name: values + delta.get(name, np.float32(0)) for name, values in decode_factors(payload).tensors.items()}
    schema = LoraSchema(
        ZERO_DIGEST, shape.rank, shape.alpha, "float32", "all-linear", tuple(sorted(shape.shapes.items())), "AB"
    )
    write_peft_folder(tmp_path / "adapter", BytesPayload(payload_of(shape, after)), schema, "tiny")
    with warnings.catch_warnings():
        # peft 0.21 asks for a name that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        loaded = PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter")).eval()
    adapter = session._run.adapter  # type: ignore[union-attr]
    ids = [5, 9, 20, 7, 4]
    with torch.no_grad(), adapter.replaced_by(after):
        hidden = adapter.decoder.hidden(stream_of([ids[:1]], [(0, [*ids[1:], 1])], adapter.decoder.device))
        ours, theirs = hidden @ adapter.decoder.head.T, loaded(input_ids=torch.tensor([ids])).logits[0]
        base = make_model()(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-5) and not torch.allclose(ours, base, atol=1e-3)


def test_a_frozen_b_is_drawn_and_no_longer_than_a() -> None:
    shape = make_shape(make_model(), freeze="AB")
    drawn = initial_factors(sorted(shape.shapes.items()), 3, "AB")
    alone = initial_factors(sorted(shape.shapes.items()), 3, "A")
    for name, values in drawn.items():
        inputs = values.shape[1] if name.endswith("lora_A") else values.shape[0]
        assert np.abs(values).max() <= inputs**-0.5 and values.any() == (not name.endswith("lora_R"))
        assert (values.tobytes() == alone[name].tobytes()) == (not name.endswith("lora_B"))


def encoded(delta: Arrays, base: str) -> bytes:
    return encode_factors(delta, base_digest=base, schema_sha256=ZERO_DIGEST, rank=4, scale=2.0, dtype="float32")


def test_random_factors_through_the_coordinator(tmp_path: Path) -> None:
    """FFA, RoLoRA in both turns and Fed-SB to 1e-5 of the dense mean of products; FedIT is off."""
    for number, freeze, exact in ((1, "A", True), (1, "alternate", True), (2, "alternate", True), (1, "AB", True),
                                  (1, "none", False)):  # fmt: skip
        shape = dataclasses.replace(make_shape(make_model(), freeze=freeze), freeze=freeze)  # type: ignore[arg-type]
        draws = np.random.default_rng(number)
        start = {name: draws.normal(0, 0.3, sides).astype(np.float32) for name, sides in shape.shapes.items()}
        plan = plan_of(freeze) if freeze != "none" else make_plan()  # type: ignore[arg-type]
        kind = plan.lora.update_kind(number)
        sides = {"lora.factors": "AB", "lora.factor_a": "A", "lora.factor_b": "B", "lora.core_r": "R"}[kind]
        master = payload_of(shape, start)
        deltas = [
            {name: draws.normal(0, 0.3, values.shape).astype(np.float32) for name, values in start.items()
             if name[-1] in sides} for _ in range(3)
        ]  # fmt: skip
        updates = [encoded(delta, sha256_hex(master)) for delta in deltas]
        made = dict(read_factors(combined(tmp_path, plan, number, master, updates)).tensors())
        off = norm = 0.0
        for module in shape.modules:
            products = [product({**start, **{n: start[n] + delta[n] for n in delta}}, module) for delta in deltas]
            mean = np.mean(products, axis=0)
            off += float(np.square(product(made, module) - mean).sum())
            norm += float(np.square(mean).sum())
        assert ((off / norm) ** 0.5 < 1e-5) == exact, (freeze, number)

"""A shift of the base's weights (FedEx-LoRA, FLoRA): exact at the coordinator, computed by the trainer, exported."""

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

from coordinator.aggregate import aggregate, read_factors, shift_note, write_peft_folder
from coordinator.blobs import Blobs, BytesPayload
from fedsilo.files.adapter_folder import adapter_sha256
from fedsilo.protocol.codec import decode_factors, encode_factors, sha256_hex
from fedsilo.protocol.errors import FedSiloError, UsageError, VerificationError
from fedsilo.protocol.factors import initial_factors, is_shift
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.products import shifted
from fedsilo.protocol.tasks import ExportDelta, LoadAdapter, PrivateStep
from policies.schema import LoraSchema
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.decoder import stream_of
from silo.trainer.resume import from_bytes, to_bytes
from silo.trainer.rollout.engine import RolloutPlace
from silo.trainer.session import Session
from tests.algorithms.tiny import ZERO_DIGEST, make_model, make_plan, make_session, make_shape, payload_of

pytestmark = pytest.mark.torch
Arrays = Mapping[str, np.ndarray[Any, Any]]
SILOS, ROUNDS, SHIFT_RANK = ("a", "b", "c"), 3, 24
IDS = [5, 9, 20, 7, 4]


def shape_of() -> LoraShape:
    shapes = dict(make_shape(make_model()).shapes)
    for name in [name for name in shapes if name.endswith("lora_A")]:
        module, inputs, outputs = name.rpartition(".")[0], shapes[name][1], shapes[f"{name[:-1]}B"][0]
        rank = min(SHIFT_RANK, inputs, outputs)
        shapes |= {f"{module}.shift_A": (rank, inputs), f"{module}.shift_B": (outputs, rank)}
    return LoraShape(4, 8.0, shapes)


SHAPE = shape_of()
SCHEMA = LoraSchema(ZERO_DIGEST, 4, 8.0, "float32", "all-linear", tuple(sorted(SHAPE.shapes.items())))


def plan_of(how: str, **changes: Any) -> Plan:
    return make_plan(
        method="fedavg-grpo", aggregate=how, silos=SILOS, quorum=2, rounds=ROUNDS, optimiser={"learning_rate": 0.02},
        **changes,
    )  # fmt: skip


def start() -> dict[str, np.ndarray[Any, Any]]:
    return initial_factors(sorted(SHAPE.shapes.items()), 3)


def effective(tensors: Arrays, module: str) -> np.ndarray[Any, Any]:
    """What is added to a module's weights, over the scale."""
    wide = {side: tensors[f"{module}.{side}"].astype(np.float64) for side in ("lora_A", "lora_B")}
    whole = wide["lora_B"] @ wide["lora_A"]
    if (shift := tensors.get(f"{module}.shift_A")) is not None:
        whole = whole + tensors[f"{module}.shift_B"].astype(np.float64) @ shift
    return np.asarray(whole)


def drawn(seed: int, size: float = 0.3) -> dict[str, np.ndarray[Any, Any]]:
    draws = np.random.default_rng(seed)
    return {
        name: draws.normal(0, size, sides).astype(np.float32)
        for name, sides in sorted(SHAPE.shapes.items())
        if not is_shift(name)
    }


def next_adapter(folder: Path, how: str, master: bytes, deltas: list[Arrays]) -> bytes:
    """By the coordinator, as it makes the next adapter of any run."""
    uploads = [
        BytesPayload(
            encode_factors(
                delta, base_digest=sha256_hex(master), schema_sha256=ZERO_DIGEST, rank=4, scale=2.0, dtype="float32"
            )
        )
        for delta in deltas
    ]
    plan = plan_of(how) if how != "mean" else make_plan(silos=SILOS)
    combine = method_named(plan.method).aggregate(plan, SILOS)
    made = aggregate(Blobs(folder), BytesPayload(master), uploads, combine)
    return bytes(made.read_at(0, made.size_bytes))


@pytest.mark.parametrize(("how", "exact"), [("fedex", True), ("flora", True), ("mean", False)])
def test_over_three_rounds_of_random_factors_the_weights_are_the_mean_of_the_silos(
    tmp_path: Path, how: str, exact: bool
) -> None:
    master, before = payload_of(SHAPE, start()), start()
    for number in range(ROUNDS):
        deltas = [drawn(10 * number + silo) for silo in range(len(SILOS))]
        master = next_adapter(tmp_path, how, master, deltas)
        made = dict(decode_factors(master).tensors)
        for module in SHAPE.modules:
            trained = [{**before, **{name: before[name] + delta[name] for name in delta}} for delta in deltas]
            mean = np.mean([effective(each, module) for each in trained], axis=0)
            error = np.linalg.norm(effective(made, module) - mean) / np.linalg.norm(mean)
            assert (error < 1e-5) == exact, (number, module, error)
        before = made
    if how == "flora":  # each round begins with the run's own draw
        assert all(before[name].tobytes() == each.tobytes() for name, each in start().items() if not is_shift(name))


def test_T58_what_comes_down_is_the_same_for_other_factors_with_the_same_means(tmp_path: Path) -> None:
    """Silos in another order, each in another basis, B_n G and G^-1 A_n: FLoRA's mean product is the same."""
    basis = np.array([[1, 0, 0, 0], [2, 1, 0, 0], [0, -1, 1, 0], [1, 0, 3, 1]], np.float64)
    back = np.round(np.linalg.inv(basis))
    zero = {name: np.zeros(sides, np.float32) for name, sides in SHAPE.shapes.items()}
    draws = np.random.default_rng(0)
    one = [
        {name: draws.integers(-9, 10, sides).astype(np.float32) for name, sides in sorted(SHAPE.shapes.items())
         if not is_shift(name)} for _ in SILOS
    ]  # fmt: skip
    other = [
        {name: (back @ each if name.endswith("A") else each @ basis).astype(np.float32) for name, each in delta.items()}
        for delta in reversed(one)
    ]
    master = payload_of(SHAPE, zero)
    assert next_adapter(tmp_path, "flora", master, one) == next_adapter(tmp_path, "flora", master, other)


def test_a_shift_that_does_not_fit_is_refused() -> None:
    small = {
        name: values[:1] if name.endswith("shift_A") else values[:, :1] if name.endswith("shift_B") else values
        for name, values in start().items()
    }
    with pytest.raises(ValueError, match="rank"):
        shifted("flora", small, [drawn(1), drawn(2)])
    assert SCHEMA.has_room_for(24) and SCHEMA.has_room_for(10**6)  # no matrix of this model has a higher rank


@pytest.mark.parametrize("how", ["fedex", "flora"])
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"load": "nf4"}, "fp32"),
        ({"load": "bf16"}, "fp32"),
        ({"silo_steps": {"a": 2}}, "weights"),
        ({"trim": 1}, "trim"),
        ({"lora": {"rank": 4, "alpha": 8.0, "schema_sha256": ZERO_DIGEST, "freeze": "A", "frozen_sha256": "ab" * 32}},
         "exact"),
    ],
)  # fmt: skip
def test_plans_that_cannot_shift_are_refused(how: str, changes: dict[str, Any], match: str) -> None:
    assert plan_of(how).aggregate == how
    with pytest.raises(ValidationError, match=match):
        plan_of(how, **changes)


# ---- the trainer -------------------------------------------------------------------------------------


def random_adapter(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    draws = np.random.default_rng(seed)
    return {name: draws.normal(0, 0.1, sides).astype(np.float32) for name, sides in sorted(SHAPE.shapes.items())}


def logits_of(adapter: LoraAdapter) -> torch.Tensor:
    stream = stream_of([IDS[:1]], [(0, [*IDS[1:], 1])], adapter.decoder.device)
    return adapter.decoder.hidden(stream) @ adapter.decoder.head.T


def test_the_weights_are_base_plus_shift_plus_factors_and_the_base_alone_with_the_adapter_off() -> None:
    adapter, tensors, twin = LoraAdapter(make_model(), SHAPE), random_adapter(1), make_model()
    adapter.load(tensors)
    with torch.no_grad():
        base = twin(input_ids=torch.tensor([IDS])).logits[0]
        for module in SHAPE.modules:
            weight = twin.get_submodule(module).weight
            weight += SHAPE.scale * torch.from_numpy(effective(tensors, module)).float()
        theirs = twin(input_ids=torch.tensor([IDS])).logits[0]
        assert torch.allclose(logits_of(adapter), theirs, atol=1e-4)
        with adapter.off():
            assert torch.allclose(logits_of(adapter), base, atol=1e-4)
        with adapter.replaced_by(random_adapter(2)):
            assert not torch.allclose(logits_of(adapter), theirs, atol=1e-2)
        assert torch.allclose(logits_of(adapter), theirs, atol=1e-4)
    assert not any(is_shift(name) for name in adapter.trained_names)


def test_only_factors_leave_and_a_killed_session_goes_on_with_its_shift() -> None:
    plan = plan_of("fedex")

    def begun() -> Session:
        guided, _ = make_session("a", plan)
        session = Session(dataclasses.replace(guided._material, model=make_model()))
        session.begin_run(plan, SHAPE)
        return session

    session, payload = begun(), payload_of(SHAPE, random_adapter(1))
    session.carry_out(LoadAdapter(2, sha256_hex(payload)), payload)
    session.carry_out(PrivateStep(2, 1, (0, 4, 2)))
    again = begun()
    assert again.restore(from_bytes(to_bytes(session.state(), b"key"), b"key"))
    ends = []
    for each in (session, again):
        each.carry_out(PrivateStep(2, 2, (1, 5, 3)))
        ends.append(bytes(each.carry_out(ExportDelta(2)).body))
    assert ends[0] == ends[1]
    assert set(decode_factors(ends[0]).tensors) == {name for name in SHAPE.shapes if not is_shift(name)}


def test_a_base_in_bfloat16_is_refused() -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        LoraAdapter(make_model().bfloat16(), SHAPE)
    LoraAdapter(make_model().bfloat16(), make_shape(make_model()))  # without a shift it is none of its business


@pytest.mark.parametrize("shape", [SHAPE, make_shape(make_model())], ids=["shift", "plain"])
def test_rollout_servers_are_refused_a_shift(tmp_path: Path, shape: LoraShape) -> None:
    guided, _ = make_session("a", plan_of("fedex"))
    place = RolloutPlace(tmp_path / "private.sock", tmp_path / "public.sock", tmp_path, 0.01)  # where nobody listens
    session = Session(dataclasses.replace(guided._material, model=make_model(), rollout=place))
    # with a plain adapter the trainer goes on to the server, which is not there
    with pytest.raises(FedSiloError) as refused:
        session.begin_run(plan_of("fedex"), shape)
    assert ("shifts the base" in refused.value.message) == (shape is SHAPE)


# ---- what is left ------------------------------------------------------------------------------------


def test_the_folder_is_a_lora_adapter_of_higher_rank_and_its_digest_is_the_payloads(tmp_path: Path) -> None:
    from peft import PeftModel

    tensors = random_adapter(1)
    payload = payload_of(SHAPE, tensors)
    folder = tmp_path / "adapter"
    write_peft_folder(folder, BytesPayload(payload), SCHEMA, "tiny")
    lora = {"rank": 4, "alpha": 8.0, "schema_sha256": ZERO_DIGEST, "freeze": "none"}
    assert adapter_sha256(folder, lora) == sha256_hex(payload)
    with pytest.raises(VerificationError):
        adapter_sha256(folder, {**lora, "alpha": 4.0})
    with warnings.catch_warnings():
        # peft 0.21 asks for a name that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        loaded = PeftModel.from_pretrained(make_model(), str(folder)).eval()
    adapter = LoraAdapter(make_model(), SHAPE)
    adapter.load(tensors)
    with torch.no_grad():
        assert torch.allclose(logits_of(adapter), loaded(input_ids=torch.tensor([IDS])).logits[0], atol=1e-4)


def test_the_note_of_a_round_names_the_shift(tmp_path: Path) -> None:
    master = payload_of(SHAPE, start())
    assert shift_note(BytesPayload(master))["l2"] == shift_note(BytesPayload(master))["rank"] == 0
    made = next_adapter(tmp_path, "fedex", master, [drawn(seed) for seed in range(3)])
    note, tensors = shift_note(BytesPayload(made)), dict(read_factors(BytesPayload(made)).tensors())
    products = [tensors[f"{module}.shift_B"] @ tensors[f"{module}.shift_A"] for module in SHAPE.modules]
    assert note["l2"] == pytest.approx(SHAPE.scale * sum(float((each**2).sum()) for each in products) ** 0.5, rel=1e-4)
    assert note["rank"] == 8  # r (N - 1)
    other = next_adapter(tmp_path, "fedex", master, [drawn(seed) for seed in range(1, 4)])
    assert note["sha256"] != shift_note(BytesPayload(other))["sha256"]

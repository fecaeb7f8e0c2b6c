"""Local-only: a method's two halves with one silo, against the steps written out by hand and the coordinator's sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregate import ServerState, aggregate, initial_adapter
from coordinator.blobs import Blobs, BytesPayload
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import averaged
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan, ServerOptimiser
from fedsilo.protocol.swap import public_batch
from fedsilo.protocol.tasks import (
    Evaluate,
    ExportDelta,
    GeneratePublic,
    LoadAdapter,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from policies.schema import LoraSchema
from silo.report.alone import _Alone, plan_alone, train_alone
from tests.algorithms.tiny import ZERO_DIGEST, make_plan, make_session, start_payload

pytestmark = pytest.mark.torch
ROUNDS = 2


def alone(method: str, exchange: str = "step", **changes: Any) -> Plan:
    plan = make_plan(method=method, exchange=exchange, silos=("a", "b", "c"), quorum=3, rounds=ROUNDS, **changes)
    return plan_alone(plan, "a", "local-only")


def trained(method: str, exchange: str = "step", **changes: Any) -> tuple[bytes, list[TrainerTask]]:
    plan = alone(method, exchange)
    session, shape = make_session(plan=plan, **changes)
    tasks: list[TrainerTask] = []

    def do(task: TrainerTask, body: bytes) -> bytes:
        tasks.append(task)
        return session.carry_out(task, body).body

    return train_alone(method_named(method), plan, start_payload(shape)[0], do), tasks


def by_hand(plan: Plan, folder: Path, *, public: bool) -> str:
    """Digest of the last adapter when the steps are called one by one and the coordinator's own aggregation adds up."""
    session, shape = make_session(plan=plan)
    blobs, state = Blobs(folder), ServerState()
    master: Any = BytesPayload(start_payload(shape)[0])
    for number in range(1, ROUNDS + 1):
        session.carry_out(LoadAdapter(number, master.digest), master.read_at(0, master.size_bytes))
        for step in range(1, plan.local_steps + 1):
            if public and step % plan.swap_period == 0:
                session.carry_out(GeneratePublic(number, step, public_batch(plan, number, step), "none"))
                session.carry_out(PublicStep(number, step, "none", pb.PublicDonors()))
            else:
                session.carry_out(PrivateStep(number, step))
        delta = BytesPayload(session.carry_out(ExportDelta(number)).body)
        state = ServerState(state.after)
        master = aggregate(blobs, master, [delta], averaged(plan, plan.silos), state=state)
    return str(master.digest)


@pytest.mark.slow
def test_without_others_pubswap_is_own_answers_only_bit_for_bit(tmp_path: Path) -> None:
    expected = by_hand(alone("pubswap"), tmp_path, public=True)
    adapter, tasks = trained("pubswap")
    assert sha256_hex(adapter) == expected
    assert sha256_hex(trained("public-no-swap")[0]) == expected
    assert sha256_hex(trained("pubswap", "round_end")[0]) == expected
    assert [type(task).__name__ for task in tasks if not isinstance(task, GeneratePublic)] == [
        "LoadAdapter", "PrivateStep", "PublicStep", "PrivateStep", "PublicStep", "ExportDelta",
    ] * ROUNDS  # fmt: skip
    assert not any(isinstance(task, Evaluate) for task in tasks)
    assert all(not row.donors for task in tasks if isinstance(task, PublicStep) for row in task.donors.prompts)


@pytest.mark.slow
def test_a_method_without_public_steps_has_none_alone_either(tmp_path: Path) -> None:
    assert sha256_hex(trained("fedavg-grpo")[0]) == by_hand(alone("fedavg-grpo"), tmp_path, public=False)


@pytest.mark.slow
def test_the_random_swap_runs_alone_too() -> None:
    """Its group is a permutation of own answers: no donor is anybody else's."""
    adapter, tasks = trained("pubswap-random")
    origins = {donor.origin for task in tasks if isinstance(task, PublicStep) for row in task.donors.prompts
               for donor in row.donors}  # fmt: skip
    assert origins == {"a"}
    assert adapter


@pytest.mark.slow
def test_it_hangs_on_the_rows_trained_on_and_repeats() -> None:
    first = trained("fedavg-grpo")[0]
    assert trained("fedavg-grpo")[0] == first
    assert trained("fedavg-grpo", holdout_share=0.5)[0] != first


@pytest.mark.slow
def test_an_update_of_other_tensors_is_refused() -> None:
    plan = alone("fedavg-grpo")
    session, shape = make_session(plan=plan)
    start = start_payload(shape)[0]
    empty = b"".join((len(head := pb.Factors(dtype="float32").SerializeToString()).to_bytes(8, "little"), head))

    def do(task: TrainerTask, body: bytes) -> bytes:
        return empty if isinstance(task, ExportDelta) else session.carry_out(task, body).body

    with pytest.raises(OperationError, match="does not fit"):
        train_alone(method_named("fedavg-grpo"), plan, start, do)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"server_optimiser": ServerOptimiser(name="adam", learning_rate=0.01)},
     {"server_optimiser": ServerOptimiser(name="nesterov", momentum=0.5)},
     {"aggregate": "median"}, {"aggregate": "trimmed_mean", "trim": 1}],
    ids=["adam", "nesterov", "median", "trimmed mean"],
)  # fmt: skip
def test_alone_has_the_coordinator_s_own_arithmetic(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = alone("fedavg-grpo", **changes)
    assert plan.server_optimiser == changes.get("server_optimiser", ServerOptimiser())
    session, shape = make_session(plan=plan)
    found = train_alone(
        method_named("fedavg-grpo"), plan, start_payload(shape)[0],
        lambda task, body: session.carry_out(task, body).body,
    )  # fmt: skip
    assert sha256_hex(found) == by_hand(plan, tmp_path, public=False)


def test_an_update_is_committed_once() -> None:
    """A method that commits a round without an update of that round gets no second use of the last one."""
    plan = alone("fedavg-grpo")
    session, shape = make_session(plan=plan)
    start, digest = start_payload(shape)
    federation = _Alone(method_named("fedavg-grpo"), plan, lambda task, body: session.carry_out(task, body).body, start)
    session.carry_out(LoadAdapter(1, digest), start)
    for number in (1, 2):
        federation._trained(ExportDelta(number))
        federation._commit(number)
    with pytest.raises(OperationError, match="does not fit"):
        federation._commit(number)


def test_the_initial_adapter_is_the_one_every_run_begins_with() -> None:
    """Written out by hand: what a silo draws again from the plan's seed is what the coordinator broadcast."""
    import math

    import numpy as np

    from fedsilo.protocol.codec import decode_factors
    from fedsilo.protocol.randomness import generator, seed_of

    schema = LoraSchema(ZERO_DIGEST, 4, 8.0, "float32", "all-linear", (("m.lora_A", (4, 25)), ("m.lora_B", (6, 4))))
    tensors = decode_factors(initial_adapter(schema, 11)).tensors
    draw = generator(seed_of(11, "initial_adapter", "m.lora_A")).uniform(-1 / math.sqrt(25), 1 / math.sqrt(25), (4, 25))
    assert np.array_equal(tensors["m.lora_A"], draw.astype(np.float32))
    assert not tensors["m.lora_B"].any()

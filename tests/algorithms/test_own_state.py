"""What a silo trains and keeps: where it begins, that it goes on over rounds and kills, and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate import initial_adapter
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.methods import require_exchange
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import Evaluate, EvaluateOwn, ExportDelta, LoadAdapter, LoadOwn, PrivateStep, TrainerTask
from policies.schema import LoraSchema
from silo.trainer.adapters.lora import LoraShape
from silo.trainer.resume import StateFile
from silo.trainer.session import Session
from tests.algorithms.test_T22_resume import SECRET, bare_session
from tests.algorithms.tiny import ALPHA, RANK, ZERO_DIGEST, make_plan, payload_of

pytestmark = pytest.mark.torch
PLAN = make_plan(method="local-only", rounds=3)
ROWS = {1: (0, 4, 2), 2: (1, 7, 3)}


def start_of(shape: LoraShape, plan: Plan) -> bytes:
    """The payload that a coordinator would have all silos begin with."""
    tensors = tuple(sorted(shape.shapes.items()))
    return initial_adapter(LoraSchema(ZERO_DIGEST, RANK, ALPHA, "float32", "all-linear", tensors), plan.seed)


def held(session: Session) -> dict[str, np.ndarray]:
    assert session._run is not None
    return {name: each.detach().numpy().copy() for name, each in session._run.adapter.factors.items()}


def round_of(number: int, first: TrainerTask) -> list[TrainerTask]:
    return [first, *(PrivateStep(number, step, ROWS[step]) for step in (1, 2))]


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_the_first_round_begins_where_a_coordinator_would_have_it_begin() -> None:
    session, shape = bare_session(PLAN)
    session.carry_out(LoadOwn(1))
    assert equal(held(session), dict(decode_factors(start_of(shape, PLAN)).tensors))
    other, _ = bare_session(make_plan(method="local-only", rounds=3, seed=6))
    other.carry_out(LoadOwn(1))
    assert not equal(held(session), held(other))


def test_a_silo_trains_on_its_own_as_on_an_adapter_that_is_handed_to_it() -> None:
    """Two rounds, the second from what the first left: the same bits as from a coordinator that hands each silo its own
    factors back. Drift and optimiser begin anew in each."""
    own, shape = bare_session(PLAN)
    handed, _ = bare_session(PLAN)
    payload = start_of(shape, PLAN)
    for number in (1, 2):
        for task in round_of(number, LoadOwn(number)):
            mine = own.carry_out(task).metrics
        for task in round_of(number, LoadAdapter(number, f"{number:064x}")):
            theirs = handed.carry_out(task, payload if isinstance(task, LoadAdapter) else b"").metrics
        assert equal(held(own), held(handed)) and mine["drift"] == theirs["drift"] > 0
        payload = payload_of(shape, held(handed))


def test_own_figures_are_those_of_the_adapter_that_is_trained() -> None:
    session, shape = bare_session(PLAN)
    for task in round_of(1, LoadOwn(1)):
        session.carry_out(task)
    before = held(session)
    own = session.carry_out(EvaluateOwn(1))
    assert equal(held(session), before)
    other, _ = bare_session(PLAN)
    common = other.carry_out(Evaluate(1, "a" * 64), payload_of(shape, before))
    mine, theirs = (pb.MetricsEval.FromString(bytes(done.body)) for done in (own, common))
    assert list(mine.metrics) == list(theirs.metrics)
    assert (mine.adapter_digest, theirs.adapter_digest) == ("", "a" * 64)
    assert session._run is not None and own.metrics["state"] == session._run.adapter.name()
    base = pb.MetricsEval.FromString(bytes(other.carry_out(Evaluate(0, "")).body))
    assert len(base.metrics) == len(mine.metrics) - 1, "donors trained on are counted of a round"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [frozenset({0}), frozenset({2, 3}), frozenset(range(9))])
def test_a_trainer_killed_within_or_between_rounds_goes_on_with_its_own_state(
    tmp_path: Path, killed: frozenset[int]
) -> None:
    """Only the file of the last finished task is left after a kill."""
    tasks = [task for number in (1, 2, 3) for task in round_of(number, LoadOwn(number))]
    undisturbed, _ = bare_session(PLAN)
    for task in tasks:
        undisturbed.carry_out(task)
    session, _ = bare_session(PLAN)
    file = StateFile(tmp_path, SECRET)
    for place, task in enumerate(tasks):
        session.carry_out(task)
        file.save(session.state())
        if place in killed:
            session, _ = bare_session(PLAN)
            state = file.load()
            assert state is not None and session.restore(state)
    assert equal(held(session), held(undisturbed))


def test_without_its_file_it_would_begin_anew(tmp_path: Path) -> None:
    """The counterpart: nothing but the file leads back (the guard then leaves the run)."""
    session, _ = bare_session(PLAN)
    for task in round_of(1, LoadOwn(1)):
        session.carry_out(task)
    lost, _ = bare_session(PLAN)
    lost.carry_out(LoadOwn(2))
    assert not equal(held(lost), held(session))


# ---- fedsa-lora: A is shared, B stays ---------------------------------------------------------------------


SHARED = make_plan(method="fedsa-lora", rounds=3)


def test_of_both_factors_one_leaves_and_the_next_round_goes_on_with_the_silos_own_other() -> None:
    session, shape = bare_session(SHARED)
    start = start_of(shape, SHARED)
    for task in round_of(1, LoadAdapter(1, "1" * 64)):
        session.carry_out(task, start if isinstance(task, LoadAdapter) else b"")
    trained, before = held(session), decode_factors(start).tensors
    update = decode_factors(session.carry_out(ExportDelta(1)).body).tensors
    assert set(update) == {name for name in shape.shapes if name.endswith(".lora_A")}
    assert all(np.array_equal(update[name], trained[name] - before[name]) for name in update)
    assert all(trained[name].any() for name in shape.shapes), "B is trained as well"
    mean = {name: 2 * values for name, values in trained.items()}  # of both factors, as no coordinator sends it
    session.carry_out(LoadAdapter(2, "2" * 64), payload_of(shape, mean))
    now = held(session)
    assert all(np.array_equal(now[name], (mean if name in update else trained)[name]) for name in now)


def test_a_silo_is_measured_with_the_shared_factors_and_its_own() -> None:
    session, shape = bare_session(SHARED)
    for task in round_of(1, LoadAdapter(1, "1" * 64)):
        session.carry_out(task, start_of(shape, SHARED) if isinstance(task, LoadAdapter) else b"")
    trained = held(session)
    shared = {name: values * (3000 if name.endswith(".lora_A") else 0) for name, values in trained.items()}
    done = session.carry_out(Evaluate(1, "a" * 64), payload_of(shape, shared))
    assert equal(held(session), trained)
    other, _ = bare_session(make_plan(rounds=3))
    both = {name: shared[name] if name.endswith(".lora_A") else trained[name] for name in trained}
    expected = other.carry_out(Evaluate(1, "a" * 64), payload_of(shape, both))
    assert bytes(done.body) == bytes(expected.body)
    without = other.carry_out(Evaluate(1, "a" * 64), payload_of(shape, shared))
    assert bytes(without.body) != bytes(expected.body)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [frozenset({0}), frozenset({2, 3}), frozenset(range(9))])
def test_a_killed_trainer_goes_on_with_its_own_factors(tmp_path: Path, killed: frozenset[int]) -> None:
    def played(session: Session, killed: frozenset[int]) -> Session:
        file, place = StateFile(tmp_path, SECRET), 0
        for number in (1, 2, 3):
            # what comes down has zeros in the place of what stays, as a coordinator has none of it
            a = {name: values * name.endswith(".lora_A") for name, values in held(session).items()}
            payload = start_of(shape, SHARED) if number == 1 else payload_of(shape, a)
            for task in round_of(number, LoadAdapter(number, f"{number:064x}")):
                session.carry_out(task, payload if isinstance(task, LoadAdapter) else b"")
                file.save(session.state())
                if place in killed:
                    session, _ = bare_session(SHARED)
                    state = file.load()
                    assert state is not None and session.restore(state)
                place += 1
        return session

    first, shape = bare_session(SHARED)
    undisturbed = held(played(first, frozenset()))
    assert equal(held(played(bare_session(SHARED)[0], killed)), undisturbed)


@pytest.mark.parametrize(
    "changes",
    [{"lora": {**SHARED.lora.model_dump(), "freeze": "A", "frozen_sha256": "a" * 64}}, {"aggregate": "fedex"}],
)
def test_nothing_is_frozen_and_no_product_averaged_where_a_factor_stays(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        require_exchange(make_plan(**{"method": "fedsa-lora", **changes}))
    assert refused.value.code == "STAYS"
    assert require_exchange(make_plan(method="fedsa-lora", aggregate="median", silos=("a", "b", "c"), quorum=3))

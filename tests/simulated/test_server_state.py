"""What a server optimiser keeps beside the adapter: durable before the round is, named in the record and in a backup,
and the same after a kill between any two things that are made durable."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.aggregate import ServerState, aggregate
from coordinator.blobs import Blobs, BytesPayload
from fedsilo.protocol import codec
from fedsilo.protocol.aggregation import averaged
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import is_fixed
from fedsilo.protocol.plan import ServerOptimiser
from tests.policies.setting import PLAN, SCHEMA, policy_of, policy_text
from tests.simulated.coordinator_parts import RUN_YAML, House, joined, until_quiet
from tests.simulated.test_coordinator_killed import EVERY, Federation, Killer

OPTIMISERS = {
    "momentum": "server_optimiser: {name: momentum, learning_rate: 0.5, momentum: 0.5}\n",
    "nesterov": "server_optimiser: {name: nesterov, momentum: 0.5}\n",
    "adam": "server_optimiser: {name: adam, learning_rate: 0.0001}\n",
}
CHARTER = policy_of(policy_text(server_optimisers=tuple(OPTIMISERS)))


def request_with(name: str) -> str:
    text = RUN_YAML.replace("method: pubswap", "method: fedavg-grpo").replace("rounds: 2", "rounds: 3")
    return text + OPTIMISERS[name]


def states(house: House) -> list[tuple[int, str]]:
    query = select(db.ServerState.round, db.ServerState.digest).order_by(db.ServerState.round)
    return house.rows(lambda session: [(row.round, row.digest) for row in session.execute(query)])


def read(house: House, digest: str) -> dict[str, Any]:
    payload = house.blobs.get(digest)
    return dict(codec.decode_factors(payload.read_at(0, payload.size_bytes)).tensors)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_T20_a_charter_that_lists_no_server_optimiser_refuses_the_run_as_it_is_submitted(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError, match="server_optimiser") as refused:
        joined(tmp_path, request_with(name))
    assert refused.value.code == "INVALID_INPUT"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMISERS)
def test_three_rounds_are_those_of_a_slow_loop(tmp_path: Path, name: str) -> None:
    house, silos = joined(tmp_path, request_with(name), policy=CHARTER)
    until_quiet(silos)
    run = house.run()
    assert run.state == "finished"
    theta = read(house, run.base_digest)
    v = {name: np.zeros_like(values) for name, values in theta.items()}
    m = {name: np.zeros_like(values) for name, values in theta.items()}
    f = np.float32
    for number in (1, 2, 3):
        for tensor in theta:
            d = sum(silo.delta(number)[tensor] for silo in silos) / f(len(silos))
            if name == "adam":
                m[tensor] = f(0.9) * m[tensor] + f(0.1) * d
                v[tensor] = f(0.99) * v[tensor] + f(0.01) * d * d
                theta[tensor] = theta[tensor] + f(1e-4) * m[tensor] / (np.sqrt(v[tensor]) + f(1e-3))
            else:
                v[tensor] = f(0.5) * v[tensor] + d
                step = f(0.5) * v[tensor] if name == "momentum" else d + f(0.5) * v[tensor]
                theta[tensor] = theta[tensor] + step
    for tensor, values in read(house, run.adapter_digest).items():
        # the loop adds the four deltas from 0 on, which is as exact; other roundings are some ulps of 1e-3
        assert np.allclose(values, theta[tensor], rtol=1e-5, atol=1e-9)
    kept = states(house)
    assert [number for number, _ in kept] == [1, 2, 3] and len({digest for _, digest in kept}) == 3
    for tensor, values in read(house, kept[-1][1]).items():
        beside = (m, v) if name == "adam" else (v,)
        assert values.shape == (*theta[tensor].shape, len(beside))
        for place, expected in enumerate(beside):
            assert np.allclose(values[..., place], expected[tensor], rtol=1e-5, atol=1e-12)
    rows = house.record()["rounds"]
    assert [row["server_state_sha256"] for row in rows] == [digest for _, digest in kept]


class KeepKiller(Killer):
    """Kills also as payloads are made durable: after the first that a process keeps, the next one after the second,
    and so on; every fifth only at commits."""

    def __init__(self) -> None:
        super().__init__(1, 3 * EVERY)
        self._turns = itertools.cycle([1, 2, 3, 4, 0])

    def watch(self, house: House) -> None:
        super().watch(house)
        whole, left = house.blobs.keep, next(self._turns)

        def keep(payload: Any) -> Any:
            nonlocal left
            kept = whole(payload)
            left -= 1
            if left == 0:
                self.die("as a payload is kept")
            return kept

        house.blobs.keep = keep  # type: ignore[method-assign]


@pytest.mark.slow
def test_T29_killed_between_any_two_durable_calls_it_ends_with_the_same_adapter_and_state(tmp_path: Path) -> None:
    house, silos = joined(tmp_path / "whole", request_with("adam"), policy=CHARTER)
    until_quiet(silos)
    whole, kept = house.run().adapter_digest, states(house)
    killer = KeepKiller()
    played = Federation(tmp_path / "killed", killer, plan=request_with("adam"), policy=CHARTER)
    played.play()
    run = played.house.run()
    assert (run.state, run.adapter_digest, states(played.house)) == ("finished", whole, kept)
    assert killer.kills["as a payload is kept"] > 6 and killer.kills.total() > killer.kills["as a payload is kept"]


@pytest.mark.slow
def test_a_round_that_is_abandoned_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    house, silos = joined(tmp_path, request_with("momentum"), policy=CHARTER)
    for silo in silos[1:]:
        silo.mute = {"lora.factors"}  # one of four: below the quorum
    until_quiet(silos)
    house.advance(1000.0)
    for silo in silos:
        silo.mute = set()
    until_quiet(silos)
    house.advance(1000.0)
    until_quiet(silos)
    rounds = {row["round"]: row["state"] for row in house.record()["rounds"]}
    assert rounds[1] == "abandoned" and house.run().state == "finished"
    committed = [number for number, state in rounds.items() if state == "committed"]
    assert [number for number, _ in states(house)] == committed
    first = read(house, states(house)[0][1])
    for tensor, values in first.items():
        d = sum(silo.delta(committed[0])[tensor] for silo in silos) / np.float32(len(silos))
        assert np.allclose(values[..., 0], d, rtol=1e-5, atol=1e-9), "it began at 0"


@pytest.mark.parametrize("fixed", ["none", "A"])
def test_the_state_does_not_depend_on_the_tiles_and_is_of_what_is_trained(tmp_path: Path, fixed: Any) -> None:
    plan = PLAN.model_copy(update={"server_optimiser": ServerOptimiser(name="adam")})
    draw, blobs = np.random.default_rng(8), Blobs(tmp_path)

    def payload(scale: float, base: str, names: Any) -> BytesPayload:
        shapes = dict(SCHEMA.tensors)
        tensors = {name: draw.normal(0, scale, shapes[name]).astype(np.float32) for name in names}
        return BytesPayload(codec.encode_factors(
            tensors, base_digest=base, schema_sha256=SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
        ))  # fmt: skip

    names = [name for name, _ in SCHEMA.tensors]
    trained = [name for name in names if not is_fixed(name, fixed)]
    master = payload(1.0, "", names)
    uploads = [payload(0.1, master.digest, trained) for _ in range(3)]
    found = set()
    for tile_elements in (None, 1, 3, 1000):
        state, before = ServerState(), None
        for _ in range(2):  # the second goes on from the first
            state = ServerState(before)
            made = aggregate(blobs, master, uploads, averaged(plan, plan.silos), fixed=fixed,
                             tile_elements=tile_elements, state=state)  # fmt: skip
            before = state.after
        assert state.after is not None
        found.add((made.digest, state.after.digest))
        kept = codec.decode_factors(state.after.read_at(0, state.after.size_bytes))
        assert sorted(kept.tensors) == sorted(trained) and kept.header.base_digest == master.digest
    assert len(found) == 1

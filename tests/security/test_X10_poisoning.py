"""X10: poisoned updates in a federation that learns a toy task; one frozen seed of `python -m benchmarks.poisoning`.

With the rulesets' norm limits an oversized update costs next to nothing, without them it ruins the model; from a silo
without a gate it is refused at the coordinator. What the limits do not stop (T51, T52, N5) is asserted too, so that
nobody claims otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import poisoning
from benchmarks.poisoning import ATTACKS, KIND, SCHEMA, THRESHOLDS, Guard, OpenRound, Result, norm_of, one
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from silo.guard.messages import Allowed
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo
from tests.simulated.test_coordinator_ingress import in_open_round
from tests.world import Bench

pytestmark = pytest.mark.slow

COHORT, SEED = (4, 1), poisoning.SEEDS[0]
OVERSIZED = ("scale_100", "noise_100", "flip_10")


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], Result]:
    """(attack, or "" for none; how it is guarded) -> what came of it."""
    asked = [("", "trainer"), ("", "unlimited")]
    asked += [(name, guarded) for name in OVERSIZED for guarded in ("trainer", "unlimited")]
    # what of a silo's is refused is all alike, and what a gate lets through is the same with and without one
    asked += [(name, "silo") for name in ("scale_100", "flip_at_limit", "backdoor_at_limit")]
    return {(name, guarded): one(COHORT, ATTACKS.get(name), SEED, guarded) for name, guarded in asked}


def drop(runs: dict[tuple[str, str], Result], name: str, guarded: str) -> float:
    honest = runs["", "unlimited" if guarded == "unlimited" else "trainer"]
    return honest.accuracy - runs[name, guarded].accuracy


def test_X10_the_toy_federation_learns_and_the_limits_let_it(runs: dict[tuple[str, str], Result]) -> None:
    clean = runs["", "trainer"].accuracy
    assert clean > 0.8  # of six classes; 0.2 to 0.3 before the first round
    assert runs["", "unlimited"].accuracy - clean <= poisoning.CLEAN_COST_MAX


@pytest.mark.parametrize("name", OVERSIZED)
def test_X10_a_poisoned_trainer_is_clipped_and_costs_little(runs: dict[tuple[str, str], Result], name: str) -> None:
    result = runs[name, "trainer"]
    assert (result.clipped, result.refused) == (1.0, 0.0)  # its updates count, each cut to the limit
    assert drop(runs, name, "trainer") <= THRESHOLDS[name].trainer


def test_X10_a_poisoned_silo_is_refused_and_costs_little(runs: dict[tuple[str, str], Result]) -> None:
    result = runs["scale_100", "silo"]
    assert result.refused == 1.0 and "DELTA_L2" in result.reasons
    assert drop(runs, "scale_100", "silo") <= THRESHOLDS["scale_100"].silo


@pytest.mark.parametrize("name", OVERSIZED)
def test_X10_the_same_update_without_limits_ruins_the_model(runs: dict[tuple[str, str], Result], name: str) -> None:
    """The counterpart: what stands between is the limit, and nothing else."""
    least = THRESHOLDS[name].unlimited
    assert least is not None and drop(runs, name, "unlimited") >= least
    assert (runs[name, "unlimited"].refused, runs[name, "unlimited"].clipped) == (0.0, 0.0)


def test_X10_what_stays_within_the_limit_gets_through(runs: dict[tuple[str, str], Result]) -> None:
    """Not stopped, and nobody shall claim it is: for an aggregation that looks at single updates (T51), and for an
    acceptance gate (T52, N5)."""
    flip, backdoor = runs["flip_at_limit", "silo"], runs["backdoor_at_limit", "silo"]
    assert flip.refused == backdoor.refused == 0.0
    slowed, learnt = THRESHOLDS["flip_at_limit"], THRESHOLDS["backdoor_at_limit"]
    assert slowed.flips is not None and learnt.turns is not None
    assert slowed.flips <= drop(runs, "flip_at_limit", "silo") <= slowed.silo
    assert backdoor.backdoor >= learnt.turns > runs["", "trainer"].backdoor
    assert drop(runs, "backdoor_at_limit", "silo") <= learnt.silo  # nor does the accuracy give it away


def test_X10_figures_beyond_the_thresholds_are_named() -> None:
    """The bench's exit status can be 1: limits that do nothing, and limits that cost honest silos too much."""
    row = {"accuracy": 0.2, "drop": 0.7, "worst_drop": 0.7, "backdoor": 0.9, "refused": 0.0, "clipped": 0.0}
    figures: dict[str, Any] = {"clean": 0.85, "clean_unlimited": 0.9, "attacks": {}}
    figures["attacks"] = {name: dict.fromkeys(poisoning.GUARDED, row) for name in ATTACKS}
    named = {each.split(": ")[0] for each in poisoning.exceeded({"1 of 5": figures})}
    assert named == {"1 of 5", *(f"1 of 5, {name}" for name in ATTACKS)}
    assert set(ATTACKS) == set(THRESHOLDS)


# ---- the bench is the project's own border ---------------------------------------------------------


def large_delta(times: float) -> dict[str, Any]:
    """Noise that is as long as so many times what the coordinator takes, evenly over all tensors."""
    draw = np.random.default_rng(1)
    drawn = {name: draw.normal(0, 1, shape) for name, shape in SCHEMA.tensors}
    limit = poisoning.policy_of(4).file.egress.updates[KIND].max_l2
    factor = times * limit / norm_of(drawn)
    return {name: (values * factor).astype(np.float32) for name, values in drawn.items()}


@pytest.mark.parametrize("times", [0.5, 100.0])
def test_X10_the_bench_lets_out_what_the_real_gate_lets_out(tmp_path: Path, times: float) -> None:
    policy = poisoning.policy_of(4)
    real = Bench(tmp_path / "silo", policy, schema=SCHEMA)
    allowed = real.gate.offer(
        real.judge.view.place(KIND, 1), pb.Factors(base_digest=setting.BASE_DIGEST), tensors=large_delta(times)
    )
    mirrored = Guard(0, policy).offer(large_delta(times), OpenRound(setting.PLAN, 1, setting.BASE_DIGEST, 1.0))
    assert isinstance(allowed, Allowed) and mirrored is not None and bytes(allowed.payload) == mirrored
    limit = policy.file.egress.updates[KIND].max_l2
    assert norm_of(dict(codec.decode_factors(mirrored).tensors)) <= limit
    real.close()


def test_X10_just_over_the_limit_is_refused_by_the_rule_on_the_delta(tmp_path: Path) -> None:
    """Each single tensor is within its own limit, so this is the one rule that stands."""
    coordinator = poisoning.Coordinator(tmp_path, poisoning.policy_of(4), 4)
    place = OpenRound(poisoning.plan_of(4, 1), 1, setting.BASE_DIGEST, 1.0)
    for times, taken in ((1.02, False), (0.98, True)):  # bfloat16 moves a norm by less than 2**-8
        payload = codec.encode_factors(
            large_delta(times), base_digest=setting.BASE_DIGEST, schema_sha256=SCHEMA.digest, rank=SCHEMA.rank,
            scale=SCHEMA.scale, dtype=SCHEMA.dtype,
        )  # fmt: skip
        assert coordinator.take(3, payload, place) is taken
    assert coordinator.reasons == [("DELTA_L2",)]


@pytest.fixture
def open_round(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo]]]:
    house, silos = in_open_round(tmp_path)
    yield house, silos
    house.close()


def test_X10_a_whole_coordinator_refuses_a_scaled_update_and_counts_the_honest_one(
    open_round: tuple[House, list[SimulatedSilo]],
) -> None:
    house, (silo, *_) = open_round
    limit = house.policy.file.egress.updates[KIND].max_l2
    honest = silo.delta(1)
    scaled = {name: (values * (2 * limit / norm_of(honest))).astype(np.float32) for name, values in honest.items()}
    reply = silo.say(KIND, silo.delta_payload(1, tensors=scaled), run="run-1", number=1)
    assert isinstance(reply, pb.Refusal) and reply.code == "INGRESS_DENIED"
    last = list(house.audit.records())[-1]
    assert (last["event"], last["decision"]) == ("ingress.decision", "deny") and "DELTA_L2" in last["reasons"]
    assert isinstance(silo.say(KIND, silo.delta_payload(1), run="run-1", number=1), pb.Ack)

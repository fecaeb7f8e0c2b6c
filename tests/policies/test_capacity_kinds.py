"""Capacity of the further kinds against counting: every message of a small policy, one by one, judged by all rules."""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections.abc import Iterable, Iterator

import pytest

from policies import grids
from policies.capacity import capacities, worst_case
from policies.grids import grid_points, log2_choices, of_steps
from policies.message import Requests
from policies.model import Policy
from policies.render import RULESETS
from tests.policies.bounds import PROFILE, REWARDS, SCORE, WORTH, asked
from tests.policies.messages import (
    OFFERED_KINDS,
    SCHEMAS,
    Case,
    a_method_that_sends_everything,
    good,
    policy_named,
    rewards,
    ruleset_text,
    scores,
)
from tests.policies.setting import SCHEMA, policy_of, policy_text


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


def with_block(kind: str, ruleset: str, **limits: object) -> Policy:
    """A policy with some limits of one block replaced, by their key."""
    # a round of one step, so that one message is all there is
    text = ruleset_text(ruleset).replace("local_steps: [1, 4]", "local_steps: [1, 1]")
    start = text.index(f"  {kind}:")
    head, block = text[:start], text[start:]
    for key, value in limits.items():
        line = next(line for line in block.splitlines() if line.strip().startswith(f"{key}:"))
        block = block.replace(line, f"{line[: len(line) - len(line.lstrip())]}{key}: {value}", 1)
    return policy_of(head + block)


def bits(policy: Policy, kind: str) -> float:
    (row,) = [row for row in capacities(policy, SCHEMA) if row.kind == kind]
    return row.bits


def allowed(policy: Policy, cases: Iterable[Case]) -> int:
    """Different messages among them that all rules let out."""
    verdicts = {case.message.body.SerializeToString(deterministic=True): case.decided(policy).verdict for case in cases}
    return sum(verdict == "allow" for verdict in verdicts.values())


def subsets(rows: Iterable[tuple[int, tuple[object, ...]]]) -> Iterator[tuple[tuple[int, object], ...]]:
    """Each row absent or with one of its values, in every order, and twice."""
    options = [(index, value) for index, values in rows for value in values]
    for count in range(3):
        yield from itertools.product(options, repeat=count)


def test_competence_score() -> None:
    policy = with_block("competence.score", "fedgrpo", exemplars="[1, 3]", max_per_step=2, per_round=1)
    base = SCORE.but(**asked(exemplars={4: (0, 1, 2), 7: (3, 4, 5)}))
    rows = subsets([(4, tuple(range(6))), (7, tuple(range(6)))])
    counted = allowed(policy, (base.but(**scores(*each)) for each in rows))  # type: ignore[arg-type]
    assert 2 ** bits(policy, "competence.score") == pytest.approx(counted + 1) == 25


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize(("abstain", "expected"), [("allowed", (1 + 1 + 9) ** 2 + 1), ("denied", (1 + 9) ** 2 + 1)])
def test_reward_scalar(abstain: str, expected: int) -> None:
    policy = with_block(
        "reward.scalar", "fedgrpo", quantum=0.5, max_questions_per_step=2, max_candidates_per_question=2,
        abstain=abstain, per_round=1,
    )  # fmt: skip
    base = REWARDS.but(asked=Requests(step=1, candidates={4: 2, 7: 2}))
    values = (None, *itertools.product((-0.5, 0.0, 0.25, 0.5, 1.0), repeat=2), (0.5,))
    rows = subsets([(4, values), (7, values)])
    counted = allowed(policy, (base.but(**rewards(*each)) for each in rows))  # type: ignore[arg-type]
    assert 2 ** bits(policy, "reward.scalar") == pytest.approx(counted + 1) == expected


@pytest.mark.slow
def test_profile_vector() -> None:
    policy = with_block("profile.vector", "knexa", families=2, dynamic=1, quantum=0.5, bins=3, parts=3)
    cases = [
        PROFILE.but(family=family, dynamic=(figure,), histogram=histogram)
        for family in range(4)
        for figure in (-1.5, -1.0, -0.5, -0.25, 0.0, -0.0, 0.5, 1.0)
        for histogram in itertools.product(range(5), repeat=3)
    ]
    assert 2 ** bits(policy, "profile.vector") == pytest.approx(allowed(policy, cases) + 1) == 2 * 5 * 10 + 1


def test_bandit_reward() -> None:
    policy = with_block("bandit.reward", "knexa", max_abs=1.1, quantum=0.5)
    counted = allowed(policy, (WORTH.but(value=number / 8) for number in range(-16, 17)))
    assert 2 ** bits(policy, "bandit.reward") == pytest.approx(counted + 1) == 6


def test_more_messages_and_more_steps_only_add() -> None:
    """Two steps of two: each is an independent choice. One message in two steps: also which of them."""
    one = bits(with_block("competence.score", "fedgrpo", per_round=1), "competence.score")
    text = ruleset_text("fedgrpo").replace("local_steps: [1, 4]", "local_steps: [1, 2]")
    both = bits(policy_of(text), "competence.score")
    assert both == pytest.approx(2 * one)
    lone = bits(policy_of(text.replace("per_round: 4", "per_round: 1", 1)), "competence.score")
    assert lone == pytest.approx(one + math.log2(3))


def test_interventions_count_every_value() -> None:
    policy = policy_named("fedreft")
    block = policy.file.egress.reft_intervention
    assert block is not None
    limit = min(block.max_tensor_l2, block.max_l2)
    free, rotation = 4 * (8 * 16 + 8), 4 * 8 * 16
    expected = free * math.log2(grid_points(limit, "float32")) + rotation * math.log2(
        grid_points(math.sqrt(1.0001), "float32")
    )
    assert bits(policy, "reft.intervention") == pytest.approx(expected, rel=1e-12)


def test_text_is_counted_by_its_bytes_and_its_frames() -> None:
    policy = with_block("knowledge.package", "fedid-central", max_entries=1, max_bytes_per_answer=1, max_bytes=1)
    # one entry: absent, or an empty text or one of 256 bytes, finished in one of two ways, with 101 confidences or none
    messages = 1 + 2 * (1 + 256) * 102
    found = bits(policy, "knowledge.package")
    assert 2**found >= messages
    # the byte, the frame (absent, or 0 or 1 bytes that finished in one of two ways), and the confidence
    assert found == pytest.approx(8 + math.log2(1 + 2 * 2) + math.log2(102), rel=1e-12)


@pytest.mark.parametrize("ruleset", [*RULESETS, "further"])
def test_every_kind_that_a_policy_lets_out_has_a_row_and_a_size(ruleset: str) -> None:
    policy, schema = policy_named(ruleset), SCHEMAS.get(ruleset, SCHEMA)
    named = {kind for kind in OFFERED_KINDS if getattr(policy.file.egress, kind.replace(".", "_")) is not None}
    rows = {row.kind: row.bits for row in capacities(policy, schema)}
    sizes = {row["kind"]: row["payload_bytes"] for row in worst_case(policy, schema)}
    assert set(rows) - {"control.*"} == set(sizes) == named
    for kind in named:
        assert rows[kind] > 0
        assert good(kind, ruleset).message.payload_bytes <= sizes[kind]


# ---- the largest numbers that a policy may have ----------------------------------------------------

MOST = 2**52 - 1
LARGEST = [
    ("fedgrpo", ("max_per_step",)),
    ("fedgrpo", ("max_questions_per_step",)),
    ("fedgrpo", ("max_candidates_per_question",)),
    ("fedgrpo", ("max_questions_per_step", "max_candidates_per_question")),
    ("fedgrpo", ("per_round", "local_steps")),
    ("knexa", ("dynamic",)),
    ("knexa-heuristic", ("bins", "parts")),
]


@pytest.mark.parametrize(("name", "keys"), LARGEST)
def test_the_largest_numbers_of_a_policy_are_counted_at_once(name: str, keys: tuple[str, ...]) -> None:
    """Their powers and binomial coefficients, written out, fill the memory or never end."""

    def late(_number: int, _frame: object) -> None:
        raise AssertionError(f"{name} with a large {', '.join(keys)} does not end")

    text = policy_text(name)
    small = sum(row.bits for row in capacities(policy_of(text), SCHEMA))
    for key in keys:
        value = f"[1, {MOST}]" if key == "local_steps" else f"{MOST // 2}"
        text, count = re.subn(rf"^(\s+{key}): [^#\n]+", rf"\1: {value} ", text, flags=re.MULTILINE)
        assert count, key
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)  # it takes milliseconds; this only ends a test that would hang
    try:
        large = sum(row.bits for row in capacities(policy_of(text), SCHEMA))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert small < large < math.inf


@pytest.mark.parametrize("steps", [5, 40, 200])
def test_what_is_bounded_instead_of_computed_is_no_smaller(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = [of_steps(1.0, messages, steps, "").bits for messages in range(1, steps + 2)]
    chosen = [log2_choices(steps, count) for count in range(1, steps)]
    monkeypatch.setattr(grids, "_EXACT_COUNT", 0)
    monkeypatch.setattr(grids, "_EXACT_SUM", 0)
    rounding = 1e-9  # of sums of some hundred bits in doubles
    bounded = [of_steps(1.0, messages, steps, "").bits for messages in range(1, steps + 2)]
    assert all(more >= bits - rounding for more, bits in zip(bounded, exact, strict=True))
    assert any(more > bits for more, bits in zip(bounded, exact, strict=True))
    again = [log2_choices(steps, count) for count in range(1, steps)]
    # an entropy bound is above by at most the log of the number of terms in its sum
    assert all(bits - rounding <= more <= bits + math.log2(steps + 1) for more, bits in zip(again, chosen, strict=True))


def test_the_steps_that_go_without_are_bounded_as_a_sum() -> None:
    """Not as its last term alone, which is less."""
    steps, messages = 5000, 100
    exact = math.log2(sum(math.comb(steps, count) for count in range(messages + 1)))
    bits = of_steps(0.0, messages, steps, "").bits
    assert math.log2(math.comb(steps, messages)) < exact <= bits < exact + math.log2(steps)

"""How far a global adapter may be from the last one that was let in (threat T20): a trap that a coordinator tells all
silos alike, and that is no longer than an adapter may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.plan import Plan, ServerOptimiser
from policies.compare import compare, meet
from policies.engine import Decision, History, Message, decide, measure
from policies.kinds import adapters
from policies.render import RULESETS
from tests.policies.messages import NAMED
from tests.policies.setting import (
    COORDINATOR,
    FROM_COORDINATOR,
    PLAN,
    context,
    edited,
    inbound,
    judged,
    policy_of,
    policy_text,
    tensor_message,
    zeros,
)

A, B = sorted(zeros())
STEP = 0.625  # 5/8: with 3/8 and 4/8 in two tensors a norm that float32 and float64 hold exactly
OPTIMISERS = ("momentum", "nesterov", "adam")
POLICY_TEXT = policy_text(server_optimisers=OPTIMISERS).replace("max_step_l2: 0.019", f"max_step_l2: {STEP}")
POLICY = policy_of(POLICY_TEXT)


def _adapter(tensors: Mapping[str, Array] | None = None, **changes: Any) -> Message:
    given = zeros() | dict(tensors or {})
    return tensor_message(
        given, kind="global.adapter", direction="ingress", sender=COORDINATOR, base_digest="", **changes
    )


def _at(one: float, other: float) -> dict[str, Array]:
    """All zeros but one value of each tensor."""
    tensors = zeros()
    tensors[A][1, 2], tensors[B][3, 0] = one, other
    return tensors


def _judged(message: Message, last: Mapping[str, Array] | None, rounds: int = 1, **changes: Any) -> Decision:
    known = {"last_adapter": last, "last_adapter_rounds": rounds, **FROM_COORDINATOR, **changes}
    return judged(message, POLICY, **known)


def _facts(message: Message, **changes: Any) -> dict[str, Any]:
    return measure(message, context(**FROM_COORDINATOR, **changes))


# ---- the limit -------------------------------------------------------------------------------------


def test_T20_a_step_at_the_limit_is_let_in_and_one_above_it_is_not() -> None:
    """From (1, -1) to (1.375, -0.5): changes of 3/8 and 4/8, so 5/8 = 0.625 in all."""
    last = _at(1.0, -1.0)
    assert _facts(_adapter(_at(1.375, -0.5)), last_adapter=last)["step_l2"] == 0.625
    allowed = _judged(_adapter(_at(1.375, -0.5)), last)
    assert (allowed.verdict, allowed.explain()) == ("allow", "")
    further = np.nextafter(np.float32(1.375), np.float32(2))
    denied = _judged(_adapter(_at(float(further), -0.5)), last)
    assert (denied.verdict, denied.reasons) == ("deny", ("ADAPTER_STEP",))


def test_T20_it_is_the_step_that_counts_and_not_the_norm() -> None:
    """Two adapters that are equally long, and both well within max_l2, may lie far apart."""
    last = _at(0.5, 0.0)
    assert _judged(_adapter(_at(0.5, 0.0)), last).verdict == "allow"
    turned = _judged(_adapter(_at(-0.5, 0.0)), last)
    assert turned.reasons == ("ADAPTER_STEP",)
    (result,) = (result for result in turned.results if result.outcome == "deny")
    assert (result.rule, result.measured, result.limit) == ("L2 of the step", 1.0, STEP)
    line = next(n for n, text in enumerate(POLICY_TEXT.splitlines(), 1) if "max_step_l2" in text)
    assert result.line == line


def test_T20_each_round_in_between_allows_one_step_more() -> None:
    """A silo that sat out a round is one step further behind; 2 x 0.625 is as far as two rounds can take it."""
    last = _at(0.0, 0.0)
    two = _adapter(_at(0.75, 1.0))
    assert _facts(two, last_adapter=last)["step_l2"] == 1.25
    assert _judged(two, last, rounds=1).reasons == ("ADAPTER_STEP",)
    assert _judged(two, last, rounds=2).verdict == "allow"
    assert _judged(_adapter(_at(0.75, 1.0078125)), last, rounds=2).reasons == ("ADAPTER_STEP",)


def test_T20_the_first_adapter_of_a_run_is_compared_with_nothing() -> None:
    far = _adapter(_at(3.0, 4.0))
    assert _judged(far, None, last_adapter_first=True).verdict == "allow"
    assert _judged(far, _at(0.0, 0.0)).reasons == ("ADAPTER_STEP",)


# ---- with a server optimiser -----------------------------------------------------------------------

# Over three rounds: 1 + 1/2 + 1/4, and for Nesterov 1/8 more.
SERVER = {
    "momentum": ({"name": "momentum", "learning_rate": 0.5, "momentum": 0.5}, 0.5 * 1.75),
    "nesterov": ({"name": "nesterov", "learning_rate": 0.5, "momentum": 0.5}, 0.5 * 1.875),
    # (1 - 1/8) / (1/4) times the length; by the numbers alone 20 elements would allow more
    "adam": ({"name": "adam", "learning_rate": 1.0, "beta1": 0.5, "beta2": 0.75, "tau": 0.25}, 3.5),
}


def _plan_message(plan: Plan) -> Message:
    return inbound("run.plan", pb.RunPlan(canonical_json=plan.canonical()))


def _plan(**fields: Any) -> Plan:
    return PLAN.model_copy(update={"server_optimiser": ServerOptimiser(**fields)})


@pytest.mark.parametrize("name", SERVER)
def test_T20_the_limit_of_a_step_follows_from_the_plan_s_server_optimiser(name: str) -> None:
    fields, times = SERVER[name]
    last, plan = _at(0.0, 0.0), _plan(**fields)
    at_limit = _adapter(_at(times * STEP * (1 - 2**-20), 0.0))
    assert _judged(at_limit, last, plan=plan).verdict == "allow"
    beyond = _adapter(_at(times * STEP * (1 + 2**-14), 0.0))
    assert _judged(beyond, last, plan=plan).reasons == ("ADAPTER_STEP",)
    assert _judged(beyond, last, rounds=2, plan=plan).verdict == "allow", "for each round in between"
    plain = _judged(at_limit, last)
    assert plain.reasons == (("ADAPTER_STEP",) if times > 1 else ()), "the counterpart: as the plan has none"


def test_T20_adam_s_numbers_bound_its_step_where_the_updates_may_be_long() -> None:
    """One round: each of the elements moves by (1 - b1) / sqrt(1 - b2) = 1 of the rate at most."""
    plan = _plan(name="adam", learning_rate=2**-4, beta1=0.5, beta2=0.75, tau=1e-6).model_copy(update={"rounds": 1})
    elements = sum(values.size for values in zeros().values())
    most = 2**-4 * math.sqrt(elements)
    assert _judged(_adapter(_at(most * (1 - 2**-20), 0.0)), _at(0.0, 0.0), plan=plan).verdict == "allow"
    assert _judged(_adapter(_at(most * (1 + 2**-14), 0.0)), _at(0.0, 0.0), plan=plan).reasons == ("ADAPTER_STEP",)


def test_T20_a_plan_whose_step_may_be_longer_than_an_adapter_is_refused_before_any_training() -> None:
    block = POLICY.file.ingress.global_adapter
    assert block is not None
    within = block.max_l2 / (STEP * 1.75) * (1 - 2**-15)
    for rate, reasons in ((within, ()), (within * (1 + 2**-13), ("PLAN_STEP",)), (1e300, ("PLAN_STEP",))):
        plan = _plan(name="momentum", learning_rate=rate, momentum=0.5)
        assert judged(_plan_message(plan), POLICY, plan=None, **FROM_COORDINATOR).reasons == reasons
    assert "step_scale" not in measure(_plan_message(PLAN), context(plan=None)), "facts of others stay as they were"


@pytest.mark.parametrize("name", OPTIMISERS)
def test_T20_a_plan_alone_does_not_raise_the_limit_of_a_step(name: str) -> None:
    message = _plan_message(_plan(name=name, learning_rate=2**-6))
    for allowed, reasons in (
        ((), ("PLAN_OPTIMISER",)),
        (tuple(other for other in OPTIMISERS if other != name), ("PLAN_OPTIMISER",)),
        ((name,), ()),
    ):
        policy = policy_of(policy_text(server_optimisers=allowed))
        assert judged(message, policy, plan=None, **FROM_COORDINATOR).reasons == reasons


def test_T20_a_charter_and_a_site_that_share_no_server_optimiser_allow_none_and_none_is_not_in_a_digest() -> None:
    plain, one, other = (
        policy_of(policy_text(server_optimisers=names)) for names in ((), ("momentum",), ("adam", "nesterov"))
    )
    said = policy_text(server_optimisers=("adam",)).replace('server_optimiser: ["adam"]', "server_optimiser: []")
    assert policy_of(said).digest == plain.digest != one.digest
    for first, second in ((one, other), (one, plain)):
        assert [change.direction for change in compare(plain.file, meet(first.file, second.file))] == []
    assert [(change.name, change.direction) for change in compare(plain.file, one.file)] == [
        ("ingress.run.plan.server_optimiser", "looser")
    ]


def test_T20_a_plan_whose_step_has_no_finite_bound_is_refused_by_its_rule() -> None:
    plan = _plan(name="adam", learning_rate=1e300, tau=1e-300)
    facts = measure(_plan_message(plan), context(plan=None))
    assert facts["step_scale"] is None
    assert judged(_plan_message(plan), POLICY, plan=None, **FROM_COORDINATOR).reasons == ("PLAN_STEP",)


def test_T20_a_median_of_three_may_be_longer_than_each_of_them() -> None:
    """(1, 1, 0), (1, 0, 1) and (0, 1, 1) have the median (1, 1, 1): longer by the root of 3/2."""
    plan = PLAN.model_copy(update={"aggregate": "median", "silos": ("a", "b", "c"), "quorum": 3})
    at, last = STEP * math.sqrt(1.5), _at(0.0, 0.0)
    assert _judged(_adapter(_at(at * (1 - 2**-20), 0.0)), last, plan=plan).verdict == "allow"
    assert _judged(_adapter(_at(at * (1 + 2**-14), 0.0)), last, plan=plan).reasons == ("ADAPTER_STEP",)
    assert _judged(_adapter(_at(at * (1 - 2**-20), 0.0)), last, plan=PLAN).reasons == ("ADAPTER_STEP",)


# ---- what is not known -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "known",
    [
        {"last_adapter": None},
        {"last_adapter": {}},
        {"last_adapter": {A: zeros()[A]}},
        {"last_adapter": zeros() | {"more": np.zeros(1, np.float32)}},
        {"last_adapter": {A: zeros()[A].reshape(6, 2), B: zeros()[B]}},
        {"last_adapter": zeros() | {B: np.full((4, 2), np.nan, np.float32)}},
        {"last_adapter": zeros(), "last_adapter_rounds": 0},
    ],
    ids=["unknown", "empty", "a tensor less", "a tensor more", "another shape", "not a number", "when is unknown"],
)
def test_T20_in_mid_run_what_cannot_be_compared_is_refused(known: dict[str, Any]) -> None:
    message = _adapter()
    assert _judged(message, zeros()).verdict == "allow"
    assert judged(message, POLICY, **{"last_adapter_rounds": 1, **FROM_COORDINATOR, **known}).reasons == (
        "ADAPTER_STEP",
    )


def test_T20_a_context_that_says_nothing_of_the_last_adapter_refuses() -> None:
    assert judged(_adapter(), POLICY, **FROM_COORDINATOR).reasons == ("ADAPTER_STEP",)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_T20_values_that_are_not_finite_have_no_step(value: float) -> None:
    """None, and no NaN or infinity, which the log's JSON does not carry."""
    assert _facts(_adapter(_at(value, 0.0)), last_adapter=zeros())["step_l2"] is None
    assert _facts(_adapter(), last_adapter=_at(value, 0.0))["step_l2"] is None


# ---- how it is measured ----------------------------------------------------------------------------


class _Counted(Mapping[str, Array]):
    """A stored adapter that keeps count of how often each tensor is read."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors, self.read = dict(tensors), list[str]()

    def __getitem__(self, name: str) -> Array:
        self.read.append(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@pytest.mark.parametrize("tile", [1, 3, 8, 1 << 20])
def test_T20_the_step_does_not_depend_on_the_tiles(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are whole numbers below 2**8, so every sum is exact and all tilings agree bit for bit."""
    monkeypatch.setattr(adapters, "_TILE_ELEMENTS", tile)
    values = np.random.default_rng(1)
    draws = [
        {name: values.integers(-99, 99, array.shape).astype(np.float32) for name, array in zeros().items()}
        for _ in range(2)
    ]
    last = _Counted(draws[1])
    changes = [draws[0][name].astype(int) - draws[1][name].astype(int) for name in (A, B)]
    facts = _facts(_adapter(draws[0]), last_adapter=last)
    assert facts["step_l2"] == math.sqrt(sum(int((change**2).sum()) for change in changes))
    assert last.read == [A, B], "each tensor is read once, when its turn comes"


def test_T20_an_update_is_not_compared_and_says_nothing_of_it() -> None:
    facts = measure(tensor_message(), context(last_adapter=_at(9.0, 9.0)))
    assert not {"step_l2", "step_rounds", "first_of_run"} & set(facts)
    assert judged(tensor_message(), POLICY).verdict == "allow"


def test_T20_the_facts_alone_decide_again_under_another_policy() -> None:
    """What replay has: no tensor, only what stands in the log."""
    facts = _facts(_adapter(_at(0.375, 0.5)), last_adapter=zeros(), last_adapter_rounds=1)
    assert decide(facts, POLICY, History()).verdict == "allow"
    tighter = edited("max_step_l2: 0.019", "max_step_l2: 0.6", server_optimisers=OPTIMISERS)
    assert decide(facts, tighter, History()).reasons == ("ADAPTER_STEP",)
    assert {type(facts[name]) for name in ("step_l2", "step_rounds", "first_of_run")} == {float, int, bool}


# ---- the key ---------------------------------------------------------------------------------------


def test_T20_the_tighter_step_of_site_and_charter_counts() -> None:
    tighter = edited("max_step_l2: 0.019", "max_step_l2: 0.25", server_optimisers=OPTIMISERS)
    for one, other in ((POLICY, tighter), (tighter, POLICY)):
        both = meet(one.file, other.file).ingress.global_adapter
        assert both is not None and both.max_step_l2 == 0.25
    (change,) = compare(POLICY.file, tighter.file)
    assert (change.direction, ".".join(change.path)) == ("tighter", "ingress.global.adapter.max_step_l2")
    (back,) = compare(tighter.file, POLICY.file)
    assert back.direction == "looser"


def test_T20_a_policy_that_takes_adapters_in_must_say_how_far_they_may_step() -> None:
    text = policy_text()
    line = next(line for line in text.splitlines(keepends=True) if "max_step_l2" in line)
    with pytest.raises(UsageError, match="max_step_l2"):
        policy_of(text.replace(line, ""))


@pytest.mark.parametrize("name", RULESETS)
def test_T20_each_ruleset_lets_a_round_go_as_far_as_its_updates_may(name: str) -> None:
    """No mean of deltas is longer than the longest delta; and two of them in one round are too far."""
    file = NAMED[name].file
    if file.ingress.global_adapter is None:
        return
    longest = max(block.max_l2 for block in file.egress.updates.values())
    assert longest <= file.ingress.global_adapter.max_step_l2 < 2 * longest


def test_T20_facts_of_the_first_adapter_say_so() -> None:
    facts = _facts(_adapter(), last_adapter_first=True)
    assert (facts["first_of_run"], facts["step_l2"], facts["step_rounds"]) == (True, None, 0)

"""X2: how policies combine and compare. Meets obey the laws of a lattice; what both allow, and nothing else, passes."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.strict_yaml import load
from policies import lattice
from policies.compare import Change, compare, meet, order_of
from policies.engine import History, decide, measure
from policies.fields import Approvals
from policies.kinds import POLICY_FILE, policy_file
from policies.lattice import NothingInCommon
from policies.model import GONE, Policy, PolicyFile
from policies.rules import asked
from tests.policies.evasion import EVERYTHING
from tests.policies.messages import GOOD
from tests.policies.setting import FROM_COORDINATOR, PLAN, context, inbound, is_tightening, policy_of, policy_text

BASE: dict[str, Any] = load(policy_text().encode(), "policy.yaml").value
# Settings of every text screen. No kind names one, so that facts measured before they changed still count.
BASE["text_screens"] = {
    **EVERYTHING.model_dump(mode="json"),
    "overlap": {**EVERYTHING.model_dump(mode="json")["overlap"], "background_set": next(iter(BASE["public_sets"]))},
}
BASE["text_screens"]["pii_basic"]["custom_file"] = {
    "file": "site.patterns.yaml",
    "patterns": [
        {"name": "badge", "pattern": "badge [0-9]{6}", "after_words": []},
        {"name": "ward", "pattern": "[0-9]+[a-d]", "after_words": ["bay", "ward"]},
    ],
}
# What a field of each order may be changed into; for numbers, factors.
FACTORS = (0, 0.5, 0.99, 1, 1.01, 2, 1000)
WORDS: dict[str, tuple[str | None, ...]] = {
    "background_set": (next(iter(BASE["public_sets"])), None),
    "mode": ("enforce", "shadow"),
    "programs": ("refuse", "sandbox"),
    "least_isolation": ("namespaces", "user", "container", "waived"),
    "grid": ("float32", "bfloat16"),
    "secure_aggregation": ("allowed", "forbidden"),
    "from": ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z", "2027-02-01T00:00:00Z"),
    "until": ("2027-03-01T00:00:00Z", "2027-12-01T00:00:00Z", "2028-12-01T00:00:00Z"),
}
OPTIONAL = [
    *(("egress", kind) for kind in ("lora.factors", "public.responses", "metrics.eval", "control")),
    *(("ingress", kind) for kind in ("run.plan", "round.open", "global.adapter", "public.donors", "run.end")),
    ("held_out",),
    *(("text_screens", name) for name in ("pii_basic", "overlap", "canary", "charset")),
]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in leaves(child, (*path, key))]
    return [path]


LEAVES = leaves(BASE)


@st.composite
def policies(draw: st.DrawFn) -> PolicyFile:
    """The shipped pubswap policy with some fields changed or blocks taken away."""
    value = copy.deepcopy(BASE)
    for path in draw(st.lists(st.sampled_from(LEAVES), max_size=6, unique=True)):
        change(draw, value, path)
    for path in draw(st.lists(st.sampled_from(OPTIONAL), max_size=2, unique=True)):
        parent = value if len(path) == 1 else value[path[0]]
        parent[path[-1]] = None
    try:
        return policy_file(value)
    except ValueError:
        assume(False)
        raise


def change(draw: st.DrawFn, value: dict[str, Any], path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        value = value[key]
    key, old = path[-1], value[path[-1]]
    if key in WORDS:
        value[key] = draw(st.sampled_from(WORDS[key]))
    elif isinstance(old, bool):
        value[key] = draw(st.booleans())
    elif key == "quantum":
        value[key] = draw(st.sampled_from((0.0001, 0.0002, 0.0003, 0.25, 1)))
    elif isinstance(old, int | float):
        new = old * draw(st.sampled_from(FACTORS)) if old else draw(st.integers(0, 5))
        value[key] = round(new) if isinstance(old, int) else new
    elif isinstance(old, list) and old and isinstance(old[0], int | float):
        value[key] = sorted(draw(st.sampled_from(FACTORS)) * number for number in old)
        value[key] = [round(number) for number in value[key]] if isinstance(old[0], int) else value[key]
    elif isinstance(old, list):
        value[key] = draw(st.permutations(old))[: draw(st.integers(0, len(old)))]
    elif isinstance(old, str) and len(old) == 64:
        value[key] = draw(st.sampled_from((old, "f" * 64)))


def met(first: PolicyFile, second: PolicyFile) -> PolicyFile | None:
    """The meet; None where there is none, which is tighter than everything."""
    try:
        return meet(first, second)
    except UsageError as error:
        assert error.code == "NO_MEET"
        return None


# ---- the laws ----------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(policies(), policies())
def test_X02_meet_is_commutative_and_at_least_as_tight_as_both(first: PolicyFile, second: PolicyFile) -> None:
    both = met(first, second)
    assert both == met(second, first)
    if both is not None:
        assert is_tightening(first, both) and is_tightening(second, both)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(policies(), policies(), policies())
def test_X02_meet_is_associative(first: PolicyFile, second: PolicyFile, third: PolicyFile) -> None:
    left, right = met(first, second), met(second, third)
    one = met(left, third) if left is not None else None
    other = met(first, right) if right is not None else None
    assert one == other


@settings(max_examples=60, deadline=None)
@given(policies())
def test_X02_meet_is_idempotent(file: PolicyFile) -> None:
    once = met(file, file)
    assume(once is not None)
    assert once is not None
    assert met(once, once) == once
    # lists may come out sorted and a block without its set is gone; nothing else has changed
    assert all(change.direction == "tighter" and change.after == "absent" for change in compare(file, once))


MESSAGES = [case.facts() for case in GOOD]
for method in ("fedavg-grpo", "pubswap-random"):
    plan = pb.RunPlan(canonical_json=PLAN.model_copy(update={"method": method, "swap_period": 1}).canonical())
    MESSAGES.append(measure(inbound("run.plan", plan), context(**FROM_COORDINATOR)))


@settings(max_examples=60, deadline=None)
@given(policies(), policies(), st.sampled_from(MESSAGES), st.integers(0, 4))
def test_T34_the_meet_allows_only_what_both_allow(
    first: PolicyFile, second: PolicyFile, facts: dict[str, Any], released: int
) -> None:
    both = met(first, second)
    assume(both is not None)
    assert both is not None
    history = History(rounds_released=released)
    verdicts = [decide(facts, as_policy(file), history).verdict for file in (both, first, second)]
    if verdicts[0] == "allow":
        assert verdicts[1:] == ["allow", "allow"]
    if verdicts[0] == "hold":
        assert "deny" not in verdicts[1:]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(policies(), policies(), st.sampled_from(MESSAGES), st.integers(0, 4))
def test_X02_tightening_never_turns_deny_into_allow_and_diff_agrees(
    before: PolicyFile, after: PolicyFile, facts: dict[str, Any], released: int
) -> None:
    rank = {"deny": 0, "hold": 1, "allow": 2}
    history = History(rounds_released=released)
    was, became = (rank[decide(facts, as_policy(file), history).verdict] for file in (before, after))
    directions = {change.direction for change in compare(before, after)} - {"cosmetic"}
    if directions <= {"tighter"}:
        assert became <= was
    if directions <= {"looser"}:
        assert became >= was


def as_policy(file: PolicyFile) -> Policy:
    return Policy(file, "policy.yaml", "0" * 64, {})


# ---- the orders, each by hand ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "first", "second", "expected"),
    [
        (lattice.SMALLEST, 3, 5, 3),
        (lattice.LARGEST, 3, 5, 5),
        (lattice.LATEST, "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        (lattice.INTERSECTION, ("b", "a", "c"), ("c", "d", "b"), ("b", "c")),
        (lattice.INTERSECTION_OR_ANY, ("b", "a"), ("c", "b"), ("b",)),
        (lattice.INTERSECTION_OR_ANY, ("any",), ("b", "a"), ("a", "b")),
        (lattice.INTERSECTION_OR_ANY, ("any", "c"), ("a", "any"), ("any",)),
        (lattice.INTERSECTION_OR_ANY, ("any",), (), ()),
        (lattice.UNION, ("b", "a"), ("d", "b"), ("a", "b", "d")),
        (lattice.EXEMPTION, "x", "x", "x"),
        (lattice.EXEMPTION, "x", None, None),
        (lattice.EXEMPTION, "x", "y", None),
        (lattice.OVERLAP, (1, 5), (3, 9), (3, 5)),
        (lattice.BOTH, False, True, True),
        (lattice.SAME, "x", "x", "x"),
        (lattice.MULTIPLE, 0.0002, 0.0003, 0.0006),
        (lattice.MULTIPLE, 0.25, 1, 1.0),
        (lattice.ladder("shadow", "enforce"), "enforce", "shadow", "shadow"),
    ],
)
def test_each_order(order: lattice.Order, first: Any, second: Any, expected: Any) -> None:
    assert order.meet(first, second) == order.meet(second, first) == expected


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        (lattice.OVERLAP, (1, 2), (3, 4)),
        (lattice.SAME, "x", "y"),
        (lattice.MULTIPLE, 0.1234567890123457, 0.7654321098765433),
    ],
)
def test_where_nothing_is_as_tight_as_both_it_says_so(order: lattice.Order, first: Any, second: Any) -> None:
    with pytest.raises(NothingInCommon):
        order.meet(first, second)


def test_approval_rounds_of_the_meet_contain_those_of_both_over_hundreds_of_rounds() -> None:
    """Round by round, as the rule that holds them counts."""

    def held(first_rounds: int, then: int) -> set[int]:
        block = Approvals(first_rounds=first_rounds, then=then, persons=1, roles=("approver",))
        return {number for number in range(1, 300) if asked(block, number)}

    choices = list(itertools.product(range(5), (0, 1, 2, 3, 4, 6)))
    sets = {choice: held(*choice) for choice in choices}
    for first, second in itertools.product(choices, choices):
        both = lattice.rhythm(first, second)
        assert held(*both) >= sets[first] | sets[second]
        assert both == lattice.rhythm(second, first) == lattice.rhythm(both, both)
        # one spelling for one meaning, so that another spelling is no change
        assert (lattice.rhythm(first, first) == lattice.rhythm(second, second)) == (sets[first] == sets[second])
    for first, second, third in itertools.product(choices, choices, choices):
        left = lattice.rhythm(lattice.rhythm(first, second), third)
        assert left == lattice.rhythm(first, lattice.rhythm(second, third))


def test_every_field_of_the_schema_carries_an_order_or_is_a_block() -> None:
    """A field added without one would compare as if it did not exist."""
    without, seen, pending = set(), set[type[BaseModel]](), list[type[BaseModel]]([POLICY_FILE])
    while pending:
        made = pending.pop()
        seen.add(made)
        for field_name, field in made.model_fields.items():
            parts = (field.annotation, *getattr(field.annotation, "__args__", ()))
            blocks = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
            pending += [block for block in blocks if block not in seen]
            if order_of(field) is None and not blocks and field.alias not in GONE:
                without.add(f"{made.__name__}.{field_name}")
    assert {"ReftIntervention", "PackageIn", "Grid", "LoraFactors"} <= {made.__name__ for made in seen}
    assert without == {"Approvals.first_rounds", "Approvals.then"}  # compared together


SCREENS: dict[str, Any] = {
    "pii_basic": {"patterns": ["phone", "email"]},
    "overlap": {"unit": "word", "n": 8, "max_matching_ngrams": 2, "background_set": "a", "false_positive_rate": 1e-9},
    "canary": {"max_edit_distance": 1, "decode": ["hex"]},
    "charset": {"allow": ["latin", "greek"], "max_run_nonword": 40},
}


def with_screens(screens: dict[str, Any]) -> PolicyFile:
    return policy_file(copy.deepcopy(BASE) | {"text_screens": screens})


def test_T34_a_screen_that_either_file_defines_is_in_the_meet_with_the_tighter_settings_of_both() -> None:
    one = with_screens({name: SCREENS[name] for name in ("pii_basic", "overlap", "canary")})
    other = with_screens(
        {
            "overlap": SCREENS["overlap"] | {"n": 6, "max_matching_ngrams": 5, "false_positive_rate": 1e-6},
            "canary": {"max_edit_distance": 3, "decode": ["base64"]},
            "charset": SCREENS["charset"],
        }
    )
    expected = {
        "pii_basic": {"patterns": ["email", "phone"]},
        # "a" is no public set of the two files, so nothing is subtracted
        "overlap": {"unit": "word", "n": 6, "max_matching_ngrams": 2, "background_set": None,
                    "false_positive_rate": 1e-6},
        "canary": {"max_edit_distance": 3, "decode": ["base64", "hex"]},
        "charset": {"allow": ["greek", "latin"], "max_run_nonword": 40},
    }  # fmt: skip
    for both in (meet(one, other), meet(other, one)):
        assert both.text_screens.model_dump(mode="json") == expected


@pytest.mark.parametrize("name", SCREENS)
def test_T34_taking_a_screen_away_is_looser_and_adding_one_is_tighter(name: str) -> None:
    """The other way round than with a kind, which is denied where it is absent."""
    every, fewer = with_screens(SCREENS), with_screens({key: value for key, value in SCREENS.items() if key != name})
    for before, after, direction in ((every, fewer, "looser"), (fewer, every, "tighter")):
        assert [(change.name, change.direction) for change in compare(before, after)] == [
            (f"text_screens.{name}", direction)
        ]
    assert is_tightening(fewer, every) and not is_tightening(every, fewer)


@pytest.mark.parametrize(
    ("screen", "key", "value", "direction"),
    [
        ("pii_basic", "patterns", ["email"], "looser"),
        ("pii_basic", "patterns", ["email", "iban", "phone"], "tighter"),
        ("pii_basic", "patterns", ["email", "iban"], "incomparable"),
        ("pii_basic", "custom_file", {"file": "a.patterns.yaml", "patterns": []}, "tighter"),
        ("overlap", "n", 7, "tighter"),
        ("overlap", "max_matching_ngrams", 3, "looser"),
        ("overlap", "background_set", None, "tighter"),
        ("overlap", "background_set", "b", "incomparable"),
        ("overlap", "false_positive_rate", 1e-8, "tighter"),
        ("canary", "max_edit_distance", 2, "tighter"),
        ("canary", "decode", [], "looser"),
        ("charset", "allow", ["latin"], "tighter"),
        ("charset", "max_run_nonword", 41, "looser"),
    ],
)
def test_T34_each_setting_of_a_screen_has_its_direction(screen: str, key: str, value: Any, direction: str) -> None:
    changed = with_screens(SCREENS | {screen: SCREENS[screen] | {key: value}})
    assert [(change.name, change.direction) for change in compare(with_screens(SCREENS), changed)] == [
        (f"text_screens.{screen}.{key}", direction)
    ]


# ---- compare -----------------------------------------------------------------------------------------


def changed(old: str, new: str) -> list[Change]:
    text = policy_text()
    assert text.count(old) >= 1, old
    return compare(policy_of(text).file, policy_of(text.replace(old, new, 1)).file)


@pytest.mark.parametrize(
    ("old", "new", "name", "direction"),
    [
        ("per_round: 1", "per_round: 2", "egress.lora.factors.per_round", "looser"),
        ("messages_per_minute: 600", "messages_per_minute: 60", "budgets.messages_per_minute", "tighter"),
        ("send_only_verified: true", "send_only_verified: false",
         "egress.public.responses.send_only_verified", "looser"),
        ("mode: enforce", "mode: shadow", "mode", "tighter"),
        ("temperature: [0.1, 2.0]", "temperature: [0.5, 3.0]", "ingress.run.plan.temperature", "incomparable"),
        ("run.end: {}", "run.end: null", "ingress.run.end", "tighter"),
        ("name: pubswap ", "name: ours ", "name", "cosmetic"),
        ("first_rounds: 0\n      then: 0", "first_rounds: 2\n      then: 0",
         "egress.lora.factors.approvals.first_rounds, then", "tighter"),
        ("quantum: 0.0001", "quantum: 0.001", "egress.metrics.eval.fields.pass_at_1.quantum", "tighter"),
        ("min_peers: 2", "min_peers: 1", "federation.min_peers", "looser"),
    ],
)  # fmt: skip
def test_a_changed_line_is_one_row_with_its_direction(old: str, new: str, name: str, direction: str) -> None:
    assert [(change.name, change.direction) for change in changed(old, new)] == [(name, direction)]


def test_order_of_lists_and_comments_change_nothing() -> None:
    assert changed("kinds: [ack, refusal, checkpoint]", "kinds: [checkpoint, ack, refusal]   # the same") == []
    assert math.isfinite(BASE["budgets"]["day_bytes"])


def test_a_file_called_otherwise_is_the_same_file() -> None:
    for old in ("held_out.jsonl", "public.jsonl"):
        assert [change.direction for change in changed(old, f"a_{old}")] == ["cosmetic"]


def test_X02_a_kind_that_a_method_never_uses_cannot_deny_its_plan() -> None:
    """Else taking the kind away, which is tighter, would let the plan in."""
    plan = pb.RunPlan(canonical_json=PLAN.model_copy(update={"method": "fedavg-grpo", "swap_period": 1}).canonical())
    facts = measure(inbound("run.plan", plan), context(plan=None, **FROM_COORDINATOR))
    small = policy_of(policy_text().replace("max_responses_per_round: 24", "max_responses_per_round: 1", 1))
    assert small.file.egress.public_responses is not None
    assert small.file.egress.public_responses.max_responses_per_round == 1
    assert decide(facts, small, History()).verdict == "allow"


def test_a_meet_that_demands_more_peers_than_are_left_is_none() -> None:
    base = policy_text()
    value = load(base.encode(), "policy.yaml").value
    peers = value["federation"]["peers"]
    files = []
    for some, least in ((peers[:3], 3), (peers[1:], 2)):
        value["federation"] |= {"peers": some, "min_peers": least}
        files.append(policy_file(copy.deepcopy(value)))
    with pytest.raises(UsageError, match="fewer peers"):
        meet(*files)


def test_policies_of_two_federations_have_no_meet_and_say_which_field() -> None:
    text = policy_text()
    other = policy_of(text.replace("cardio-net", "neuro-net")).file
    with pytest.raises(UsageError, match="nothing in common") as caught:
        meet(policy_of(text).file, other)
    assert "cardio-net" in str(caught.value)

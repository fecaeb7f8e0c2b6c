"""Every kind under every shipped ruleset, and every bound of every kind at its limit and beyond (methods 7.1, 7.3)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
from policies.compare import is_tightening, meet
from policies.engine import Approval, History, HistoryBook, decide, measure
from policies.message import Asked
from policies.model import Policy
from policies.render import RULESETS
from policies.rules import RULES
from tests.policies.kinds import (
    FURTHER_RULES,
    NAMED,
    OFFERED_KINDS,
    Case,
    a_method_that_sends_everything,
    answers,
    competence_ask,
    directive,
    further_text,
    good,
    package,
    policy_named,
    profile,
    reft,
    reward_ask,
    rewards,
    ruleset_text,
    score,
    update,
    worth,
)
from tests.policies.kinds_bounds import BOUNDS, FINE_REWARDS, KNEXA, REFT, R, changed_reft, setting
from tests.policies.setting import PLAN, SCHEMA, policy_of

# pubswap-strict asks for them in its first rounds.
TWO_PERSONS = History(approvals=tuple(Approval(person, ("approver",)) for person in ("ada", "bob")))


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


# ---- named or not ----------------------------------------------------------------------------------


def _named(policy: Policy, side: str, kind: str) -> bool:
    return getattr(getattr(policy.file, side), kind.replace(".", "_")) is not None


def test_a_kind_that_only_a_persons_own_block_names() -> None:
    assert not any(_named(policy, "egress", "competence.answers") for policy in NAMED.values())
    assert good("competence.answers", "further").decided(policy_named("further")).verdict == "allow"


@pytest.mark.parametrize(
    "kind",
    ["public.logprobs", "knowledge.logits", "synthetic.examples", "public.rewards", "diag.drift", "count.examples"],
)
def test_kinds_that_stay_off_do_not_exist(kind: str) -> None:
    assert kind not in OUTBOUND_KINDS and kind not in INBOUND_KINDS
    assert score().but(kind=kind).decided(policy_named("further")).reasons[:2] == ("NOT_MEASURED", "KIND_NOT_ALLOWED")


@pytest.mark.parametrize("kind", OFFERED_KINDS)
def test_a_kind_that_the_running_method_does_not_send_is_refused(kind: str) -> None:
    ruleset = next(name for name in (*RULESETS, "further") if _named(policy_named(name), "egress", kind))
    case = good(kind, ruleset).but(history=TWO_PERSONS)
    assert case.decided(policy_named(ruleset)).verdict == "allow"
    plan = PLAN.model_copy(update={"method": "no method of this version"})
    assert case.but(plan=plan).decided(policy_named(ruleset)).reasons == ("METHOD_KIND",)


@pytest.mark.parametrize("kind", (*OUTBOUND_KINDS, *INBOUND_KINDS))
def test_every_kind_has_a_rule_of_its_own_beside_the_envelopes(kind: str) -> None:
    """A kind that only the envelope's rules judge would pass with anything in it."""
    own = [rule.name for rule in RULES if kind in rule.kinds]
    assert own or kind in ("run.end", "control.ack", "control.refusal")


# ---- every bound, at its limit and beyond ----------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "policy", "at_limit", "beyond"),
    [(rule, policy, at, beyond) for rule, _, policy, at, beyond in BOUNDS],
    ids=[f"{rule}: {what}" for rule, what, *_ in BOUNDS],
)
def test_a_bound_at_its_limit_and_beyond(rule: str, policy: Policy, at_limit: Case, beyond: Case) -> None:
    allowed, denied = at_limit.decided(policy), beyond.decided(policy)
    assert (allowed.verdict, allowed.explain()) == ("allow", "")
    assert denied.verdict == "deny"
    assert [result.outcome for result in denied.results if result.rule == rule] == ["deny"], denied.explain()


def test_every_rule_of_the_kinds_is_seen_passing_and_failing() -> None:
    names = {rule.name for rule in FURTHER_RULES}
    assert names <= {rule for rule, *_ in BOUNDS}
    passing = {
        result.rule for _, _, policy, at, _ in BOUNDS for result in at.decided(policy).results if result.outcome == "ok"
    }
    assert names <= passing


def test_what_only_the_site_knows_is_judged_there_alone() -> None:
    """The same profile at a coordinator, which cannot know how many records are behind it."""
    unknown = profile().but(usable_records=None)
    assert unknown.decided(KNEXA).reasons == ("MIN_RECORDS",)
    assert unknown.but(direction="ingress").decided(KNEXA).verdict == "allow"


@pytest.mark.parametrize("kind", ["reft.intervention", "competence.answers", "profile.vector", "knowledge.package"])
def test_T36_a_person_is_asked_where_the_policy_says_so(kind: str) -> None:
    ruleset = {"reft.intervention": "fedreft", "competence.answers": "further"}.get(kind, "knexa")
    text = further_text() if ruleset == "further" else ruleset_text(ruleset)
    start = text.index(f"  {kind}:")
    text = text[:start] + text[start:].replace("first_rounds: 0", "first_rounds: 1", 1)
    case = good(kind, ruleset)
    assert case.decided(policy_of(text)).verdict == "hold"
    yes = History(approvals=(Approval("ada", ("approver",)),))
    assert case.but(history=yes).decided(policy_of(text)).verdict == "allow"


# ---- at random -------------------------------------------------------------------------------------


@given(
    values=st.lists(st.floats(width=64), min_size=3, max_size=3),
    rank=st.integers(0, 400),
)
@settings(max_examples=200, deadline=None)
def test_T09_a_reward_is_allowed_exactly_if_it_is_a_multiple_in_range(values: list[float], rank: int) -> None:
    """By another way: the set of the doubles that JSON spells 0, 0.25, ... 1."""
    allowed = {0.0, 0.25, 0.5, 0.75, 1.0}
    values[rank % 3] = sorted(allowed)[rank % 5]
    good_values = all(value in allowed and math.copysign(1, value) > 0 for value in values)
    verdict = rewards((4, tuple(values))).decided(FINE_REWARDS).verdict
    assert verdict == ("allow" if good_values else "deny")


@given(histogram=st.lists(st.integers(0, 60), min_size=12, max_size=12), rest=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_histogram_is_allowed_exactly_if_it_is_one_whole(histogram: list[int], rest: bool) -> None:
    if rest:
        histogram[0] = max(0, 100 - sum(histogram[1:]))
    verdict = profile(histogram=histogram).decided(KNEXA).verdict
    assert verdict == ("allow" if sum(histogram) == 100 else "deny")


@given(turn=st.floats(-3, 3), stretch=st.floats(0.5, 1.5))
@settings(max_examples=100, deadline=None)
def test_R_is_allowed_exactly_if_its_rows_are_orthonormal(turn: float, stretch: float) -> None:
    """A rotation of the rows always passes; a stretched row passes while its length stays within the tolerance."""
    r = np.eye(8, 16)
    r[:2, :2] = [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]
    assert changed_reft(setting(R, r)).decided(REFT).verdict == "allow"
    r[5] *= stretch
    length = float(np.float32(stretch)) ** 2
    assert (changed_reft(setting(R, r)).decided(REFT).verdict == "allow") == (abs(length - 1) <= 1e-4)


# ---- over time -------------------------------------------------------------------------------------


def test_T11_scores_of_a_day_and_rewards_of_a_match_are_counted_and_outlast_a_restart() -> None:
    book = HistoryBook()
    first = measure(rewards().message, rewards().context())
    book.record(first)
    book = HistoryBook.from_json(json.loads(json.dumps(book.to_json())))
    assert book.view(first).units_in_day == 3 and book.view(first).messages_in_step == 1
    # another kind has its own count, and the next day begins at 0
    assert book.view(measure(score().message, score().context())).units_in_day == 0
    tomorrow = {**first, "now": first["now"] + 86_400}
    assert book.view(tomorrow).units_in_day == 0
    reported = measure(worth().message, worth().context())
    assert book.view(reported).messages_in_match == 0
    book.record(reported)
    assert book.view(reported).messages_in_match == 1
    assert "PER_MATCH" in decide(reported, KNEXA, book.view(reported)).reasons
    # late, in another round: the same match still
    assert book.view({**reported, "round": 2}).messages_in_match == 1
    assert book.view({**reported, "match": 4}).messages_in_match == 0
    book.forget_run("run-1")
    assert book.view(reported).messages_in_match == 0


def test_what_was_asked_follows_the_coordinators_messages() -> None:
    asked = Asked().after(competence_ask().message.body, 1).after(reward_ask().message.body, 1)
    assert asked.step == 1 and asked.exemplar_rows == (0, 1, 2, 3, 5, 9, 8, 7, 6) and asked.candidates == {4: 2, 9: 0}
    later = asked.after(reward_ask((3, ("a",))).message.body, 2)
    assert (later.step, later.exemplars, later.candidates) == (2, {}, {3: 1})
    matched = later.after(directive().message.body)
    assert (matched.match, matched.peer, matched.part, matched.step) == (4, "hospital_c", "take", 2)
    assert Asked.from_json(json.loads(json.dumps(matched.to_json()))) == matched
    opened = matched.after(pb.RoundOpen())
    assert (opened.step, opened.candidates, opened.match) == (0, {}, 4)
    assert matched.after(pb.RunEnd()) == matched


# ---- two policies ----------------------------------------------------------------------------------

CASES = [case for _, _, _, at, beyond in BOUNDS for case in (at, beyond)]


POLICIES = {policy.digest: policy for _, _, policy, _, _ in BOUNDS}
PAIRS = [pair for pair in itertools.combinations(POLICIES.values(), 2) if pair[0].file.name == pair[1].file.name]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_T34_the_meet_allows_only_what_both_allow(one: Policy, two: Policy) -> None:
    both = meet(one.file, two.file)
    assert both == meet(two.file, one.file)
    assert is_tightening(one.file, both) and is_tightening(two.file, both)
    for case in CASES[:: len(PAIRS) // 4]:
        verdicts = [case.decided(dataclasses.replace(one, file=file)).verdict for file in (both, one.file, two.file)]
        if verdicts[0] == "allow":
            assert verdicts[1:] == ["allow", "allow"]


def test_T34_a_meet_of_equal_policies_allows_the_same() -> None:
    """The counterpart: a meet that allowed nothing would hold the property above."""
    equal = {
        digest: dataclasses.replace(policy, file=meet(policy.file, policy.file)) for digest, policy in POLICIES.items()
    }
    for _, _, policy, at_limit, _ in BOUNDS:
        assert at_limit.decided(equal[policy.digest]).verdict == "allow"


# ---- facts -----------------------------------------------------------------------------------------

MARK = "Mr Smith, born 1962"


def _with_body(case: Case, body: Message) -> Case:
    return Case(dataclasses.replace(case.message, body=body), case.known)


MARKED = [
    answers((0, MARK)),
    package((0, MARK)),
    package(to=MARK),
    reward_ask((1, (MARK,))),
    directive(peer=MARK),
    directive(part=MARK),
    score(sha256=MARK),
    reft(schema_sha256=MARK),
    _with_body(reft(), pb.Factors(dtype=MARK)),
    _with_body(good("public.responses", "pubswap"), pb.PublicResponses(public_set_sha256=MARK)),
    _with_body(update("lora.factors", SCHEMA), pb.Factors(schema_sha256=MARK, dtype=MARK, base_digest=MARK)),
    changed_reft(lambda tensors: tensors.update({MARK: tensors["layers.0.prefix.b"]})),
]


@pytest.mark.parametrize("case", [*MARKED, *CASES[::4]])
def test_T40_facts_hold_no_text_and_can_be_written_down(case: Case) -> None:
    facts = measure(case.message, case.context())
    assert MARK not in canonical_json(facts).decode()


def test_T40_a_marked_message_is_refused_where_the_mark_is_no_answer() -> None:
    """So the marks above are seen, and not dropped on the way."""
    policies = {"reft.intervention": REFT}
    kinds = [case.message.kind for case in MARKED]
    verdicts = [case.decided(policies.get(case.message.kind, KNEXA)).verdict for case in MARKED]
    refused = {kind for kind, verdict in zip(kinds, verdicts, strict=True) if verdict == "deny"}
    assert {"knowledge.package", "match.directive", "competence.score", "reft.intervention"} <= refused


def test_T23_lists_in_facts_are_bounded() -> None:
    case = rewards((4, tuple(number / 1024 for number in range(300))))
    facts = measure(case.message, case.context())
    assert (len(facts["values"]), facts["values_at_fault"], facts["units"]) == (256, 44, 300)
    many = changed_reft(
        lambda tensors: tensors.update({f"layers.{n}.prefix.b": np.zeros(8, np.float32) for n in range(999)})
    )
    assert len(measure(many.message, many.context())["layers"]) == 256


def test_T23_a_tall_R_is_not_multiplied_out() -> None:
    """R R^T of 10^5 rows would take 80 GB."""
    tall = changed_reft(setting(R, np.zeros((100_000, 1))))
    assert measure(tall.message, tall.context())["orthonormality_error"] is None
    assert tall.decided(REFT).verdict == "deny"

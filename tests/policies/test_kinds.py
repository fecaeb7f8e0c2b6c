"""Kinds and what names them; bounds at random, over time and under two policies; what facts hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
from policies.compare import meet
from policies.engine import Approval, HistoryBook, decide
from policies.message import Requests
from policies.model import Policy
from policies.rules import RULES
from tests.policies.bounds import (
    BOUNDS,
    DIRECTIVE,
    FINE,
    FREE,
    PACKAGE,
    PROFILE,
    REFT,
    REWARDS,
    SCORE,
    WORTH,
    with_tensors,
)
from tests.policies.messages import (
    FURTHER_KINDS,
    NAMED,
    OFFERED_KINDS,
    Case,
    a_method_that_sends_everything,
    answers,
    candidates,
    entries,
    good,
    rewards,
)
from tests.policies.setting import is_tightening

# pubswap-strict asks for them in its first rounds.
TWO_PERSONS = tuple(Approval(person, ("approver",)) for person in ("ada", "bob"))


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


# ---- named or not ----------------------------------------------------------------------------------


def test_a_kind_that_only_a_persons_own_block_names() -> None:
    assert not any(policy.file.egress.competence_answers for policy in NAMED.values())
    assert good("competence.answers").decided().verdict == "allow"


@pytest.mark.parametrize(
    "kind",
    ["public.logprobs", "knowledge.logits", "synthetic.examples", "public.rewards", "diag.drift", "count.examples"],
)
def test_kinds_that_stay_off_do_not_exist(kind: str) -> None:
    assert kind not in OUTBOUND_KINDS and kind not in INBOUND_KINDS
    assert SCORE.but(kind=kind).decided().reasons[:2] == ("NOT_MEASURED", "KIND_NOT_ALLOWED")


@pytest.mark.parametrize("kind", OFFERED_KINDS)
def test_a_kind_that_the_running_method_does_not_send_is_refused(kind: str) -> None:
    case = good(kind).but(approvals=TWO_PERSONS)
    assert case.decided().verdict == "allow" and case.context.plan is not None
    plan = case.context.plan.model_copy(update={"method": "no method of this version"})
    assert case.but(plan=plan).decided().reasons == ("METHOD_KIND",)


@pytest.mark.parametrize("kind", (*OUTBOUND_KINDS, *INBOUND_KINDS))
def test_every_kind_has_a_rule_of_its_own_beside_the_envelopes(kind: str) -> None:
    """A kind that only the envelope's rules judge would pass with anything in it."""
    own = [rule.name for rule in RULES if kind in rule.kinds]
    assert own or kind in ("run.end", "control.ack", "control.refusal")


def test_what_only_the_site_knows_is_judged_there_alone() -> None:
    """The same profile at a coordinator, which cannot know how many records are behind it."""
    unknown = PROFILE.but(usable_records=None)
    assert unknown.decided().reasons == ("MIN_RECORDS",)
    assert unknown.but(direction="ingress").decided().verdict == "allow"


@pytest.mark.parametrize("kind", ["reft.intervention", "competence.answers", "profile.vector", "knowledge.package"])
def test_T36_a_person_is_asked_where_the_policy_says_so(kind: str) -> None:
    case = good(kind)
    start = case.text.index(f"  {kind}:")
    asks = case.text[:start] + case.text[start:].replace("first_rounds: 0", "first_rounds: 1", 1)
    case = dataclasses.replace(case, text=asks)
    assert case.decided().verdict == "hold"
    assert case.but(approvals=TWO_PERSONS[:1]).decided().verdict == "allow"


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
    verdict = FINE.but(**rewards((4, tuple(values)))).decided().verdict
    assert verdict == ("allow" if good_values else "deny")


@given(histogram=st.lists(st.integers(0, 60), min_size=12, max_size=12), rest=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_histogram_is_allowed_exactly_if_it_is_one_whole(histogram: list[int], rest: bool) -> None:
    if rest:
        histogram[0] = max(0, 100 - sum(histogram[1:]))
    verdict = PROFILE.but(histogram=histogram).decided().verdict
    assert verdict == ("allow" if sum(histogram) == 100 else "deny")


@given(turn=st.floats(-3, 3), stretch=st.floats(0.5, 1.5))
@settings(max_examples=100, deadline=None)
def test_R_is_allowed_exactly_if_its_rows_are_orthonormal(turn: float, stretch: float) -> None:
    """A rotation of the rows always passes; a stretched row passes while its length stays within the tolerance."""
    r = np.eye(8, 16)
    r[:2, :2] = [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]
    assert with_tensors(R=r).decided().verdict == "allow"
    r[5] *= stretch
    length = float(np.float32(stretch)) ** 2
    assert (with_tensors(R=r).decided().verdict == "allow") == (abs(length - 1) <= 1e-4)


# ---- over time -------------------------------------------------------------------------------------


def test_T11_scores_of_a_day_and_rewards_of_a_match_are_counted_and_outlast_a_restart() -> None:
    book = HistoryBook()
    first = REWARDS.facts()
    book.record(first)
    book = HistoryBook.from_json(json.loads(json.dumps(book.to_json())))
    assert book.view(first).units_in_day == 3 and book.view(first).messages_in_step == 1
    # another kind has its own count, and the next day begins at 0
    assert book.view(SCORE.facts()).units_in_day == 0
    assert book.view({**first, "now": first["now"] + 86_400}).units_in_day == 0
    reported = WORTH.facts()
    assert book.view(reported).messages_in_match == 0
    book.record(reported)
    assert book.view(reported).messages_in_match == 1
    assert "PER_MATCH" in decide(reported, WORTH.policy, book.view(reported)).reasons
    # late, in another round: the same match still
    assert book.view({**reported, "round": 2}).messages_in_match == 1
    assert book.view({**reported, "match": 4}).messages_in_match == 0
    book.forget_run(WORTH.message.run)
    assert book.view(reported).messages_in_match == 0


def test_what_was_asked_follows_the_coordinators_messages() -> None:
    ask, offers = good("competence.ask"), good("reward.ask")
    asked = Requests().after(ask.message.body, 1).after(offers.message.body, 1)
    assert asked.step == 1 and asked.exemplar_rows == (0, 1, 2, 3, 5, 9, 8, 7, 6) and asked.candidates == {4: 2, 9: 0}
    later = asked.after(offers.but(**candidates((3, ("a",)))).message.body, 2)
    assert (later.step, later.exemplars, later.candidates) == (2, {}, {3: 1})
    matched = later.after(DIRECTIVE.message.body)
    assert (matched.match, matched.peer, matched.part, matched.step) == (4, "hospital_c", "take", 2)
    assert Requests.from_json(json.loads(json.dumps(matched.to_json()))) == matched
    opened = matched.after(pb.RoundOpen())
    assert (opened.step, opened.candidates, opened.match) == (0, {}, 4)
    assert matched.after(pb.RunEnd()) == matched


# ---- two policies ----------------------------------------------------------------------------------

OURS = [bound for bound in BOUNDS if bound.at.message.kind in FURTHER_KINDS]
CASES = [case for bound in OURS for case in (bound.at, bound.over)]
POLICIES = {bound.at.policy.digest: bound.at.policy for bound in OURS}
PAIRS = [pair for pair in itertools.combinations(POLICIES.values(), 2) if pair[0].file.name == pair[1].file.name]


@pytest.mark.quick(keep=4)
@pytest.mark.exhaustive(keep=8)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_T34_the_meet_allows_only_what_both_allow(first: Policy, second: Policy) -> None:
    both = meet(first.file, second.file)
    assert both == meet(second.file, first.file)
    assert is_tightening(first.file, both) and is_tightening(second.file, both)
    for case in CASES[:: len(PAIRS) // 4]:
        files = (both, first.file, second.file)
        verdicts = [case.decided(dataclasses.replace(first, file=file)).verdict for file in files]
        if verdicts[0] == "allow":
            assert verdicts[1:] == ["allow", "allow"]


def test_T34_a_meet_of_equal_policies_allows_the_same() -> None:
    """The counterpart: a meet that allowed nothing would hold the property above."""
    equal = {
        digest: dataclasses.replace(policy, file=meet(policy.file, policy.file)) for digest, policy in POLICIES.items()
    }
    assert all(bound.at.decided(equal[bound.at.policy.digest]).verdict == "allow" for bound in OURS)


# ---- facts -----------------------------------------------------------------------------------------

MARK = "Mr Smith, born 1962"
# with whether the message is refused, which it is where the mark is no answer
MARKED: list[tuple[Case, bool]] = [
    (good("competence.answers").but(**answers((0, MARK))), False),
    (PACKAGE.but(**entries((0, MARK))), False),
    (PACKAGE.but(peer=MARK), True),
    (good("reward.ask").but(**candidates((1, (MARK,)))), False),
    (DIRECTIVE.but(peer=MARK), True),
    (DIRECTIVE.but(part=MARK), True),
    (SCORE.but(exemplar_set_sha256=MARK), True),
    (REFT.but(schema_sha256=MARK), True),
    (REFT.but(dtype=MARK), True),
    (good("public.responses").but(public_set_sha256=MARK), True),
    (good("lora.factors").but(schema_sha256=MARK, dtype=MARK, base_digest=MARK), True),
    (REFT.carrying({**FREE, MARK: FREE["layers.0.prefix.b"]}), True),
]


@pytest.mark.parametrize(("case", "refused"), MARKED)
def test_T40_facts_hold_no_text_and_can_be_written_down(case: Case, refused: bool) -> None:
    assert MARK not in canonical_json(case.facts()).decode()
    assert (case.decided().verdict == "deny") is refused


def test_T40_facts_of_every_bound_can_be_written_down() -> None:
    for case in CASES[::4]:
        facts = case.facts()
        assert json.loads(canonical_json(facts)) == json.loads(json.dumps(facts))


def test_T23_lists_in_facts_are_bounded() -> None:
    facts = REWARDS.but(**rewards((4, tuple(number / 1024 for number in range(300))))).facts()
    assert (len(facts["values"]), facts["values_at_fault"], facts["units"]) == (256, 44, 300)
    many = REFT.carrying({f"layers.{n}.prefix.b": np.zeros(8) for n in range(999)})
    assert len(many.facts()["layers"]) == 256


def test_T23_a_tall_R_is_not_multiplied_out() -> None:
    """R R^T of 10^5 rows would take 80 GB."""
    tall = with_tensors(R=np.zeros((100_000, 1)))
    assert tall.facts()["orthonormality_error"] is None
    assert tall.decided().verdict == "deny"

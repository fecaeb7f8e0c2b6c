"""Every rule seen passing at its limit and failing just over it; the decisions that no single limit makes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from fedsilo.protocol.codec import canonical_json
from policies.engine import OFFERED, Approval, History, decide, measure
from policies.grids import on_grid
from policies.rules import RULES
from tests.policies.bounds import BOUNDS, DONORS, FACTORS, RESPONSES, ZEROS, A, Bound, one
from tests.policies.messages import a_method_that_sends_everything, donors, good, metrics, policy_named, prompts

# pubswap-strict asks for them in its first rounds.
ADA, BOB, EVE = Approval("ada", ("approver",)), Approval("bob", ("approver",)), Approval("eve", ("viewer",))


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda each: f"{each.at.message.kind} {each.rule}: {each.what}")
def test_a_bound_at_its_limit_and_just_over_it(bound: Bound) -> None:
    allowed, denied = bound.at.decided(), bound.over.decided()
    assert (allowed.verdict, allowed.explain(), allowed.may_leave) == ("allow", "", True)
    assert denied.verdict == "deny" and not denied.may_leave
    (result,) = [each for each in denied.results if each.rule == bound.rule]
    assert result.outcome == "deny" and result.reason in denied.reasons
    assert result.file == "policy.yaml" and (result.line > 0 or result.reason == "RULE_FAILED")


def test_every_rule_is_seen_passing_and_failing() -> None:
    names = {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert {bound.rule for bound in BOUNDS} == names - {"approvals"}
    passing = {each.rule for bound in BOUNDS for each in bound.at.decided().results if each.outcome == "ok"}
    assert names <= passing


def test_T09_the_grid_is_the_nearest_double_of_each_multiple() -> None:
    assert all(on_grid(round(multiple / 10_000, 4), 0.0001) for multiple in range(10_001))
    assert on_grid(0.0, 0.0001) and not on_grid(0.1 + 0.2, 0.1)


def test_pubswap_random_sends_wrong_answers_and_pubswap_does_not() -> None:
    wrong = RESPONSES.but(verdicts=(True, False, True))
    assert wrong.decided(policy_named("pubswap-random")).verdict == "allow"
    assert wrong.decided().reasons == ("NOT_VERIFIED",)


def test_T07_before_the_transforms_a_large_delta_is_no_refusal_and_lets_nothing_out() -> None:
    large = FACTORS.carrying(one(A, 5.0))
    facts = measure(large.message, large.context, stage=OFFERED)
    decision = decide(facts, large.policy, History())
    assert decision.verdict == "allow" and not decision.may_leave
    assert "DELTA_L2" in decide({**facts, "direction": "ingress"}, large.policy, History()).reasons


def test_T21_wrong_donors_are_looked_at_before_they_are_dropped_and_refused_after() -> None:
    wrong = DONORS.but(verdicts=(False, True, True))
    offered = decide(measure(wrong.message, wrong.context, stage=OFFERED), wrong.policy, History())
    assert [result.outcome for result in offered.results if result.rule == "donors graded here"] == ["look"]
    assert offered.verdict == "allow" and not offered.may_leave
    assert wrong.decided().reasons == ("NOT_VERIFIED",)


def test_a_refusal_names_file_line_measured_and_limit() -> None:
    line = next(number for number, part in enumerate(FACTORS.text.splitlines(), 1) if "max_total_l2" in part)
    (result,) = [each for each in FACTORS.but(base_l2=1e6).decided().results if each.outcome == "deny"]
    assert (result.file, result.line, result.reason) == ("policy.yaml", line, "TOTAL_L2")
    assert result.measured > 1e6 > 5.5 == result.limit
    assert all(str(part) in result.sentence() for part in (f"policy.yaml:{line}", result.measured, 5.5, "[TOTAL_L2]"))


def test_T36_approvals_hold_until_enough_different_people_said_yes() -> None:
    two = FACTORS.under("first_rounds: 0", "first_rounds: 1").under("persons: 1", "persons: 2")
    for approvals, verdict in (
        ((), "hold"),
        ((ADA,), "hold"),
        ((ADA, ADA), "hold"),
        ((ADA, EVE), "hold"),
        ((ADA, BOB), "allow"),
    ):
        decision = two.but(approvals=approvals).decided()
        assert (decision.verdict, decision.may_leave) == (verdict, verdict == "allow")
    # A refusal stays a refusal whoever approves it, and the coordinator approves for nobody.
    assert two.but(approvals=(ADA, BOB), rank=3).decided().verdict == "deny"
    assert two.but(direction="ingress").decided().verdict == "allow"


def test_a_policy_in_shadow_sends_nothing_and_says_what_it_would() -> None:
    decision = FACTORS.under("mode: enforce", "mode: shadow").decided()
    assert (decision.verdict, decision.would_be, decision.may_leave) == ("deny", "allow", False)


def test_T40_facts_hold_no_text_no_names_of_tensors_and_no_values() -> None:
    canary, value = "Mrs-Canary-0451", 0.0007654321
    for case in (
        RESPONSES.but(**prompts((1, (canary,)))),
        DONORS.but(**donors((1, "hospital_b", canary), (1, canary, canary))),
        good("metrics.eval").but(**metrics((canary, canary, 0.5), ("pass_at_1", canary, 0.5))),
        FACTORS.carrying({canary: np.full((2, 6), value, np.float32)}),
        good("control.heartbeat").but(kind=canary, run=canary, sender=canary),
        good("control.error").but(code=canary),
        good("run.plan").but(canonical_json=canary),
    ):
        facts = measure(case.message, case.context)
        text = canonical_json(facts).decode()
        assert json.loads(text) == json.loads(json.dumps(facts))
        assert canary not in text and repr(value) not in text and repr(float(np.float32(value))) not in text


def test_measured_numbers_agree_with_a_slow_count() -> None:
    tensors = {
        name: np.linspace(-0.5, 0.25, values.size, dtype=np.float32).reshape(values.shape)
        for name, values in ZEROS.items()
    }
    facts = FACTORS.carrying(tensors).but(base_l2=1.0).facts()
    squares = [float(value) ** 2 for values in tensors.values() for value in values.flat]
    assert facts["l2"] == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    assert facts["total_l2_max"] == pytest.approx(1.0 + sum(squares) ** 0.5, rel=1e-12)
    facts = RESPONSES.but(**prompts((1, ("\u00e9", "abc")), (2, ())) | {"verdicts": None, "token_counts": None}).facts()
    assert (facts["responses"], facts["text_bytes"], facts["text_bytes_max"], facts["tokens"]) == (2, 5, 3, 5)
    assert facts["prompts"] == 2 and facts["graded"] is False

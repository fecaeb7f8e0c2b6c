"""The shipped cases under the strict ruleset: each rule, limit and screen shown, none loosened unnoticed (T14, T18)."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from policies.cases.format import load_cases
from policies.cases.judge import Outcome, as_expected, coverage, judge, mutate
from policies.cases.loosen import beyond_messages, loosened
from policies.cases.site import Site
from policies.render import PlanSize
from tests.policies.setting import policy_of, policy_text
from tests.policies.test_cases import BFLOAT16, GRID, PUBSWAP, SHIPPED, SITE, read_cases

STRICT = [*PUBSWAP, *GRID, *read_cases(SHIPPED / "pubswap-strict")]
FROZEN = dataclasses.replace(BFLOAT16, freeze="A")
# 8 private steps of 8 prompts are the 64 records that the ruleset asks of a round.
SMALL = PlanSize(local_steps=12, swap_period=3, prompts_per_step=8, samples_per_prompt=4, max_new_tokens=32)
STRICT_SITE, DEFAULT_SITE = (
    Site(policy_of(policy_text("pubswap-strict", schema=FROZEN, size=size)), FROZEN) for size in (SMALL, PlanSize())
)


@functools.cache
def outcomes() -> tuple[Outcome, ...]:
    return tuple(judge(STRICT, STRICT_SITE))


def test_the_shipped_cases_hold_and_show_every_rule_limit_and_screen() -> None:
    assert [outcome.name for outcome in outcomes() if not outcome.passed] == []
    seen = coverage(outcomes(), STRICT_SITE)
    assert [row.name for row in seen.rows if not row.covered] == [] and seen.percent() == 100
    screens = {row.name.split(".")[1] for row in seen.rows if row.name.startswith("text_screens.")}
    assert screens == {"pii_basic", "overlap", "canary", "charset"}


@pytest.mark.parametrize("silos", [2, 3, 9])
def test_the_shipped_cases_hold_for_few_silos_and_for_many(silos: int) -> None:
    peers = tuple(f"spiffe://cardio-net/silo/hospital_{letter}" for letter in "abcdefghi"[:silos])
    site = Site(policy_of(policy_text("pubswap-strict", schema=FROZEN, size=SMALL, peers=peers)), FROZEN)
    judged = list(judge(STRICT, site))
    assert [(outcome.name, outcome.said) for outcome in judged if not outcome.passed] == []
    assert [row.name for row in coverage(judged, site).rows if not row.covered] == []


def test_no_limit_is_loosened_unnoticed() -> None:
    tried = list(mutate(outcomes(), STRICT_SITE))
    assert [each.name for each in tried if not each.noticed_by] == []
    assert len(tried) >= 100 and {each.how for each in tried} == {"looser", "another"}
    # each pattern, each decoder and each alphabet of its own
    by_limit = [each.name for each in tried]
    for name, count in (("pii_basic.patterns", 8), ("canary.decode", 3), ("charset.allow", 10)):
        assert by_limit.count(f"text_screens.{name}") == count


def test_what_the_screens_stop_does_not_hang_on_the_size_of_the_plan() -> None:
    cases = [case for case in STRICT if "pubswap-strict" in case.source]
    assert len(cases) > 40
    assert [outcome.name for outcome in judge(cases, DEFAULT_SITE) if not outcome.passed] == []


def test_screens_are_covered_by_what_they_find_and_not_by_running() -> None:
    clean = [outcome for outcome in outcomes() if not outcome.facts.get("responses_hit")]
    rows = {row.name: row for row in coverage(clean, STRICT_SITE).rows}
    for name in ("text_screens.pii_basic.patterns", "text_screens.overlap.n", "text_screens.charset.allow"):
        assert rows[name].passed > 0 and not rows[name].covered


# Cases that stop at the same place: the order of words is no part of a passage.
_BESIDE = {"eight words in a row of a record": {"the same words in another order"}}


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("a date of birth", "text_screens.pii_basic.patterns"),
        ("eight words in a row of a record", "text_screens.overlap.n"),
        ("a canary with two letters changed", "text_screens.canary.max_edit_distance"),
        ("a canary in base64", "text_screens.canary.decode"),
        ("letters that are thai", "text_screens.charset.allow"),
        ("forty-one signs in a row", "text_screens.charset.max_run_nonword"),
        ("an answer after a hit too many", "egress.public.responses.max_hits_per_day"),
        ("a donor with a control character", "ingress.public.donors.screens"),
    ],
)
def test_T15_without_its_case_a_looser_screen_goes_unnoticed(name: str, limit: str) -> None:
    noticed_by = [
        {
            outcome.case.name
            for outcome in outcomes()
            if not as_expected(outcome.case, outcome.again(STRICT_SITE.policy, mutant.policy))
        }
        for mutant in loosened(STRICT_SITE.policy)
        if ".".join(mutant.path) == limit
    ]
    assert noticed_by and all(noticed_by)
    assert any(names <= {name} | _BESIDE.get(name, set()) for names in noticed_by)


def test_how_the_trainer_makes_its_index_changes_no_decision() -> None:
    """What is excused of the screens: settings that no text shows."""
    excused = {path for path, _ in beyond_messages(STRICT_SITE.policy.file) if path[0] == "text_screens"}
    assert excused == {("text_screens", "overlap", name) for name in ("background_set", "false_positive_rate")}
    mutants = [mutant for mutant in loosened(STRICT_SITE.policy, beyond=True) if mutant.path[0] == "text_screens"]
    assert [mutant.path[-1] for mutant in mutants] == ["false_positive_rate"]
    for outcome in outcomes():
        again = outcome.again(STRICT_SITE.policy, mutants[0].policy)
        assert (again.would_be, again.reasons) == (outcome.decision.would_be, outcome.decision.reasons)


def test_a_case_of_the_update_is_one_of_each_kind_of_update_that_the_policy_lets_out() -> None:
    text = b"name: it\nmessage: {kind: update, l2: limit}\nbefore: {rounds_released: 1000}\nexpect: allow\n"
    (case,) = load_cases(text, "c.yaml")
    for site, kind in ((SITE, "lora.factors"), (STRICT_SITE, "lora.factor_b")):
        (outcome,) = judge([case], site)
        most = site.policy.file.egress.updates[kind].max_l2
        assert (outcome.kind, outcome.passed, outcome.name) == (kind, True, f"it: {kind}")
        assert 0.9 * most < outcome.facts["l2"] <= most
    assert list(judge([case], Site(policy_of(policy_text("knexa")), None))) == []

"""Cases of a policy: the form, the messages that are made of it, and what coverage and mutants tell."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli.policy_test import read_cases
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.kinds import MESSAGES
from policies.cases import Case, Outcome, as_expected, coverage, judge, load_cases, mutate, not_for
from policies.compare import compare
from policies.examples import Site, named_kinds
from policies.loosen import BEYOND_MESSAGES, beyond_messages, limits, loosened
from policies.render import PlanSize
from policies.schema import LoraSchema
from tests.policies.setting import SCHEMA, edited, policy_of, policy_text

SHIPPED = Path(__file__).parents[2] / "examples" / "policy_cases"
PUBSWAP, GRID = read_cases(SHIPPED / "pubswap"), read_cases(SHIPPED / "bfloat16")
STRICT = [*PUBSWAP, *GRID, *read_cases(SHIPPED / "pubswap-strict")]
SITE = Site(policy_of(policy_text(first_rounds=1)), SCHEMA)
BFLOAT16 = dataclasses.replace(SCHEMA, dtype="bfloat16")
FROZEN = dataclasses.replace(BFLOAT16, freeze="A")
# Enough records in a round for the update of pubswap-strict, which asks for 64.
LONG = PlanSize(local_steps=12, swap_period=3, prompts_per_step=8, samples_per_prompt=4, max_new_tokens=32)
STRICT_SITE = Site(policy_of(policy_text("pubswap-strict", schema=FROZEN, size=LONG)), FROZEN)
BF16_SITE = Site(policy_of(policy_text(schema=BFLOAT16, first_rounds=1)), BFLOAT16)
SHOWN = {"small": (PUBSWAP, SITE), "bfloat16": ([*PUBSWAP, *GRID], BF16_SITE), "strict": (STRICT, STRICT_SITE)}


@functools.cache
def judged(name: str) -> tuple[Outcome, ...]:
    return tuple(judge(*SHOWN[name]))


def load(text: str) -> list[Case]:
    return load_cases(text.encode(), "c.yaml")


def one(text: str, site: Site = SITE) -> tuple[str, tuple[str, ...]]:
    (only,) = judge(load(f"{{name: it, expect: allow, {text}}}"), site)
    return only.decision.would_be, only.reasons


# ---- what is shipped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "bfloat16", pytest.param("strict", marks=pytest.mark.slow)])
def test_the_shipped_cases_hold_and_show_every_rule_and_limit(name: str) -> None:
    outcomes, site = judged(name), SHOWN[name][1]
    assert [outcome.name for outcome in outcomes if not outcome.passed] == []
    seen = coverage(outcomes, site)
    assert [row.name for row in seen.rows if not row.covered] == [] and seen.percent() == 100
    tried = list(mutate(outcomes, site))
    assert [each.name for each in tried if not each.noticed_by] == []
    assert len(tried) >= (100 if name == "strict" else 60) and {each.how for each in tried} == {"looser", "another"}
    if name == "strict":  # each screen, and of each its patterns, decoders and alphabets
        names = [each.name for each in tried]
        for limit, count in (("pii_basic.patterns", 8), ("canary.decode", 3), ("charset.allow", 10), ("overlap.n", 1)):
            assert names.count(f"text_screens.{limit}") == count


WIDE = dataclasses.replace(
    SCHEMA,
    tensors=tuple(
        (f"model.layers.{layer}.self_attn.q_proj.lora_{half}", (2, 12) if half == "A" else (12, 2))
        for layer in range(12)
        for half in "AB"
    ),
)
TUTORIAL = PlanSize(
    rounds=2, local_steps=4, prompts_per_step=8, samples_per_prompt=8, max_new_tokens=6, learning_rate=0.01
)
DEMO = PlanSize(rounds=4, local_steps=20, prompts_per_step=8, samples_per_prompt=8, max_new_tokens=64)
TWO = PlanSize(local_steps=2, swap_period=1, prompts_per_step=2, samples_per_prompt=2, max_new_tokens=2)
NO_HELD_OUT = {"held_out_file": "", "held_out_sha256": "", "held_out_rows": 0, "topics": ()}


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize(
    ("ruleset", "silos", "changes"),
    [
        ("pubswap", 2, {"size": TUTORIAL, "first_rounds": 0}),
        ("pubswap", 9, {"size": TWO, "schema": WIDE, "first_rounds": 3}),
        ("pubswap", 4, {"size": DEMO, "schema": WIDE}),
        ("pubswap", 4, NO_HELD_OUT),
        ("pubswap-strict", 2, {"size": LONG, "schema": FROZEN}),
        ("pubswap-strict", 9, {"size": LONG, "schema": FROZEN}),
    ],
)
def test_the_shipped_cases_hold_whatever_the_size(ruleset: str, silos: int, changes: dict[str, Any]) -> None:
    peers = tuple(f"spiffe://cardio-net/silo/hospital_{letter}" for letter in "abcdefghi"[:silos])
    schema: LoraSchema = changes.get("schema", SCHEMA)
    site = Site(policy_of(policy_text(ruleset, peers=peers, **{"first_rounds": 1, **changes})), schema)
    cases = STRICT if ruleset == "pubswap-strict" else PUBSWAP
    outcomes = list(judge(cases, site))
    assert [(outcome.name, outcome.said) for outcome in outcomes if not outcome.passed] == []
    assert [row.name for row in coverage(outcomes, site).rows if not row.covered] == []
    left_out = {each.case.source.rpartition("/")[2] for each in not_for(cases, site)}
    asks_nobody = {"approvals.yaml"} if changes.get("first_rounds") == 0 else set()
    other_set = {"plans.yaml"} if changes is NO_HELD_OUT or schema is FROZEN else set()
    assert left_out == asks_nobody | other_set


# ---- what a case says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "met"),
    [
        ("approvals.first_rounds >= 1", True),
        ("approvals.first_rounds > 1", False),
        ("max_steps x 2 >= 8", True),
        ("max_steps x 2 > 8", False),
        ("federation.peers >= 4", True),
        ("2 >= federation.peers", False),
        ("ingress.run.plan.local_steps >= 4", True),
        ("ingress.run.plan.local_steps > least ingress.run.plan.local_steps", True),
        ("egress.public.responses.max_prompts_per_step >= 4", False),
        ("held_out.rows + 1 >= 9", True),
        ("egress.knowledge.package.max_bytes >= 1", False),  # which the policy does not set
    ],
)
def test_a_case_is_judged_where_the_policy_has_what_it_needs(need: str, met: bool) -> None:
    cases = load(f"{{name: it, kind: lora.factors, needs: ['{need}'], expect: hold}}")
    assert len(list(judge(cases, SITE))) == met and len(list(not_for(cases, SITE))) == (not met)


@pytest.mark.parametrize(
    ("said", "factor", "more"),
    [
        ("3", 0, 3),
        ("max_l2", 1, 0),
        ("2 x max_l2", 2, 0),
        ("max_l2 - 0.5", 1, -0.5),
        ("1.5 x max_l2 + 2 x tensors", 1.5, 4),
    ],
)
def test_numbers_are_written_or_counted_from_limits_and_facts(said: str, factor: float, more: float) -> None:
    (only,) = judge(load(f"{{name: it, kind: lora.factors, facts: {{l2: {said}}}, expect: deny}}"), SITE)
    limit = SITE.policy.file.egress.updates["lora.factors"].max_l2
    assert only.facts["l2"] == factor * limit + more


def test_a_rule_that_this_policy_never_asks_is_told_apart_from_one_that_no_case_shows() -> None:
    rows = {row.name: row for row in coverage(judged("small"), SITE).rows}
    assert not rows["value grid"].asked  # float32
    without = [outcome for outcome in judged("small") if outcome.kind != "lora.factors"]
    rows = {row.name: row for row in coverage(without, SITE).rows}
    assert rows["L2 of the delta"].asked and not rows["L2 of the delta"].covered
    assert not rows["value grid"].covered  # nobody knows


def test_a_rule_is_covered_only_when_seen_on_both_sides() -> None:
    allowed, refused = (
        f"name: {name}\nkind: public.responses\nfacts: {{prompts: max_prompts_per_step{more}}}\nexpect: allow\n"
        for name, more in (("a", ""), ("b", " + 1"))
    )

    def covered(*texts: str) -> bool:
        outcomes = list(judge([case for text in texts for case in load(text)], SITE))
        (row,) = [row for row in coverage(outcomes, SITE).rows if row.name == "prompts per step"]
        return row.covered

    assert covered(refused, allowed) and not covered(refused) and not covered(allowed)


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        ("expect: deny", True),
        ("expect: deny, reasons: [NOT_VERIFIED, PUBLIC_SET]", True),
        ("expect: deny, reasons: [NOT_VERIFIED]", False),
        ("expect: deny, reasons: [NOT_VERIFIED, PUBLIC_SET, PROMPTS]", False),
        ("expect: deny, including: [PUBLIC_SET]", True),
        ("expect: deny, including: [PUBLIC_SET, PROMPTS]", False),
        ("expect: hold", False),
        ("expect: allow", False),
    ],
)
def test_a_case_expects_a_verdict_and_exactly_or_at_least_its_reasons(wanted: str, passes: bool) -> None:
    facts = "facts: {header_set_sha256: another, responses_wrong: 1}"
    (outcome,) = judge(load(f"{{name: a, kind: public.responses, {facts}, {wanted}}}"), SITE)
    assert outcome.passed is passes


def test_what_a_file_says_for_all_its_cases_lies_under_what_each_says() -> None:
    text = """
kind: public.responses
facts: {responses_wrong: 1, open_round: 1}
cases:
  - {name: a, expect: deny, reasons: [NOT_VERIFIED]}
  - {name: b, facts: {responses_wrong: 0}, expect: allow}
"""
    first, second = load(text)
    assert first.facts == {"responses_wrong": 1, "open_round": 1} == {**second.facts, "responses_wrong": 1}
    assert [outcome.passed for outcome in judge([first, second], SITE)] == [True, True]


def test_a_case_of_the_update_is_one_of_each_kind_of_update_that_the_policy_lets_out() -> None:
    (case,) = load("{name: it, kind: update, facts: {l2: max_l2}, before: {rounds_released: 1000}, expect: allow}")
    for site, kind in ((SITE, "lora.factors"), (STRICT_SITE, "lora.factor_b")):
        (outcome,) = judge([case], site)
        assert (outcome.kind, outcome.passed, outcome.name) == (kind, True, f"it: {kind}")
        assert outcome.facts["l2"] == site.policy.file.egress.updates[kind].max_l2
    assert list(judge([case], Site(policy_of(policy_text("knexa")), None))) == []


def test_T28_each_kind_that_a_policy_does_not_name_is_tried() -> None:
    for ruleset in ("pubswap", "deny_all"):
        site = Site(policy_of(policy_text(ruleset)), SCHEMA)
        outcomes = list(judge(load("{name: unnamed, kind: unnamed, expect: deny}"), site))
        assert {outcome.kind for outcome in outcomes} == MESSAGES.keys() - named_kinds(site.policy)
        assert all(outcome.passed and "KIND_NOT_ALLOWED" in outcome.reasons for outcome in outcomes)
        rows = [row for row in coverage(outcomes, site).rows if row.what == "unnamed kind"]
        assert rows and all(row.covered for row in rows)
    assert len(outcomes) == len(MESSAGES)


def test_a_policy_in_shadow_is_asked_what_it_would_decide() -> None:
    site = Site(edited("mode: enforce", "mode: shadow"), SCHEMA)
    assert one("kind: public.responses", site) == ("allow", ())
    assert one("kind: public.responses, facts: {responses_wrong: 1}", site) == ("deny", ("NOT_VERIFIED",))


# ---- mistakes ------------------------------------------------------------------------------------------

GOOD = "cases:\n  - name: a\n    kind: public.responses\n    expect: allow\n"


def test_the_good_file_of_the_table_below_is_good() -> None:
    assert [case.name for case in load(GOOD)] == ["a"]


@pytest.mark.parametrize(
    ("old", "new", "place", "word"),
    [
        ("expect: allow", "expect: perhaps", "c.yaml:4", "expect"),
        ("expect: allow", "expect: deny\n    reasons: [PROMTS]", "c.yaml:5", "PROMPTS"),
        ("expect: allow", "expect: allow\n    reasons: [PROMPTS]", "c.yaml:5", ""),
        ("expect: allow", "expects: allow", "c.yaml:4", "expect"),
        ("kind: public.responses", "kind: public.response", "c.yaml:3", "public.responses"),
        ("kind: public.responses", "kind: nope", "c.yaml:3", "nope"),
        ("kind: public.responses", "kinds: x", "c.yaml:3", "kind"),
        ("expect: allow", "expect: allow\n    before: {response: 1}", "c.yaml:5", "responses"),
        ("cases:", "case:", "c.yaml:1", "case"),
        ("cases:", "name: x\ncases:", "c.yaml:1", "name"),
        ("  - name: a", "  - name: a\n    expect: deny\n    kind: run.end\n  - name: a", "c.yaml:2", "'a'"),
        ("name: a", "name: a\n    name: b", "c.yaml:3", "name"),
        ("name: a", "name: yes", "c.yaml:2", "yes"),
        ("  - name: a", "  - &x", "c.yaml:2", "anchors"),
    ],
)
def test_T35_a_mistake_in_a_case_file_names_its_line(old: str, new: str, place: str, word: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as mistake:
        load(GOOD.replace(old, new))
    assert mistake.value.message.startswith(f"{place}: ") and word in f"{mistake.value.message} {mistake.value.hint}"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kind: lora.factors, needs: [first_rounds]", "first_rounds"),
        ("kind: lora.factors, needs: [max_step >= 1]", "max_steps"),
        ("kind: lora.factors, needs: [approvals.first >= 1]", "approvals.first"),
        ("kind: lora.factors, needs: [schema >= 1]", "schema"),
        ("kind: lora.factors, facts: {recods: 1}", "records"),
        ("kind: lora.factors, facts: {l2: max_l3}", "max_l2"),
        ("kind: lora.factors, facts: {l2: max_l2+1}", "max_l2+1"),
        ("kind: lora.factors, facts: {l2: least max_l2}", "max_l2"),
        ("kind: lora.factors, facts: {l2: egress.knowledge.package.max_bytes}", "egress.knowledge.package"),
        ("kind: control.error, fields: {codes: x}", "codes"),
        ("kind: control.error, text: x", "ErrorReport"),
    ],
)
def test_what_cannot_be_made_is_a_mistake_with_its_line(text: str, word: str) -> None:
    with pytest.raises(UsageError) as mistake:
        one(text)
    assert mistake.value.message.startswith("c.yaml:1: ") and word in mistake.value.message


def test_tensors_need_the_schema_and_nothing_else_does() -> None:
    bare = Site(SITE.policy, None)
    assert one("kind: public.responses", bare) == ("allow", ())
    with pytest.raises(UsageError, match="LoRA schema"):
        one("kind: lora.factors", bare)


# ---- limits, loosened ----------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in leaves(inner, (*path, name)).items()}
    return {path: value}


# Fields that are no limit (labels, names of what is pinned elsewhere), or have nothing looser than they are.
NOTHING_LOOSER = {
    *("policy_version", "name", "file", "licence", "id", "schema", "set", "splits", "content", "logprobs"),
    *("then", "screens", "grid", "mode", "max_share_per_peer", "background_set"),
    *("on_hit", "max_hits_per_day"),  # no kind names a screen
    *("randomise_low_bits", "secure_aggregation", "witnesses"),
}
AT_LEAST_ONE = {"persons", "policy_change", "release_after_halt", "min_witnesses"}


def test_every_limit_is_loosened_by_the_lattice_alone_and_each_mutant_is_one_change() -> None:
    policy = SITE.policy
    mutants = [*loosened(policy), *loosened(policy, beyond=True)]
    for mutant in mutants:
        changes = compare(policy.file, mutant.policy.file)
        directions = {change.direction for change in changes}
        assert len(changes) == 1 and directions == {"looser" if mutant.how == "looser" else "incomparable"}, mutant.path
    reached = {mutant.path for mutant in mutants}
    unasked = {("egress", "public.responses", "approvals"), ("ingress", "run.plan", "approvals")}
    for path, value in leaves(policy.file.model_dump(by_alias=True)).items():
        if path[:-1] in unasked or path[-1] in NOTHING_LOOSER or path[-1] == "kinds" or value is None:
            continue
        if path[-1] in AT_LEAST_ONE and value == 1:
            continue
        if not any(path[: len(place)] == place for place in reached):
            assert path[:1] in (("text_screens",),) or path[-1] in ("round.agreed", "round.result", "run.end"), path


def test_lists_of_control_kinds_are_loosened_by_each_kind_that_they_lack() -> None:
    policy = edited("hello, poll, fetch, heartbeat", "hello, poll, heartbeat")
    found = [mutant for mutant in loosened(policy) if mutant.path == ("egress", "control", "kinds")]
    assert [set(mutant.after) - set(mutant.before) for mutant in found] == [{"fetch"}]


@pytest.mark.slow
def test_limits_beyond_messages_change_no_decision_and_all_others_do() -> None:
    """What BEYOND_MESSAGES excuses is really judged by no rule: else a case could be asked for."""
    for name in ("small", "strict"):
        site = SHOWN[name][1]
        mutants = list(loosened(site.policy, beyond=True))
        assert {mutant.path for mutant in mutants} <= {path for path, _ in beyond_messages(site.policy.file)}
        assert len(mutants) >= 8
        for mutant in mutants:
            for outcome in judged(name)[::7]:
                again = outcome.again(site.policy, mutant.policy)
                assert (again.would_be, again.reasons) == (outcome.decision.would_be, outcome.decision.reasons)
    places = [*limits(SITE.policy.file), *limits(STRICT_SITE.policy.file)]
    for pattern in BEYOND_MESSAGES:
        assert any(
            len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True))
            for path in places
        ), pattern


ONLY_CASE_OF = {
    ("small", "a prompt too many"): "egress.public.responses.max_prompts_per_step",
    ("small", "a byte too many in a day"): "budgets.day_bytes",
    ("small", "a set too many in one round"): "egress.lora.factors.per_round",
    ("small", "with a silo too few"): "federation.min_peers",
    ("small", "a digit more than the grid has"): "egress.metrics.eval.fields.pass_at_1.quantum",
    ("small", "a site-admin said yes"): "egress.lora.factors.approvals.roles",
    ("strict", "a date of birth"): "text_screens.pii_basic.patterns",
    ("strict", "a canary with two letters changed"): "text_screens.canary.max_edit_distance",
    ("strict", "a canary in base64"): "text_screens.canary.decode",
    ("strict", "letters that are thai"): "text_screens.charset.allow",
    ("strict", "forty-one signs in a row"): "text_screens.charset.max_run_nonword",
    ("strict", "an answer after a hit too many"): "egress.public.responses.max_hits_per_day",
    ("strict", "a donor with a control character"): "ingress.public.donors.screens",
}


@pytest.mark.quick(keep=6)
@pytest.mark.parametrize(("name", "case"), ONLY_CASE_OF)
def test_T15_without_the_only_case_of_a_limit_its_loosening_goes_unnoticed(name: str, case: str) -> None:
    """Screens run anew under the looser policy, so that a screen dropped or loosened is noticed by its case."""
    site, limit = SHOWN[name][1], ONLY_CASE_OF[name, case]
    noticed_by = [
        {
            outcome.case.name
            for outcome in judged(name)
            if not as_expected(outcome.case, outcome.again(site.policy, mutant.policy))
        }
        for mutant in loosened(site.policy)
        if ".".join(mutant.path) == limit
    ]
    assert {case} in noticed_by and all(noticed_by)


@pytest.mark.slow
def test_a_survivor_is_named_with_its_line_and_a_case_that_fails_notices_nothing() -> None:
    gone, limit = "with a silo too few", "federation.min_peers"
    tried = mutate([outcome for outcome in judged("small") if outcome.case.name != gone], SITE)
    survivors = [each for each in tried if not each.noticed_by]
    assert [each.name for each in survivors] == [limit]
    assert "min_peers" in policy_text(first_rounds=1).splitlines()[survivors[0].line - 1]
    wrong = list(judge(load("{name: a, kind: public.responses, facts: {prompts: 100}, expect: allow}"), SITE))
    assert not wrong[0].passed and all(not each.noticed_by for each in mutate(wrong, SITE))


def test_screens_are_covered_by_what_they_find_and_not_by_running() -> None:
    clean = [outcome for outcome in judged("strict") if not outcome.facts.get("responses_hit")]
    rows = {row.name: row for row in coverage(clean, STRICT_SITE).rows}
    for name in ("text_screens.pii_basic.patterns", "text_screens.overlap.n", "text_screens.charset.allow"):
        assert rows[name].passed > 0 and not rows[name].covered

"""Cases of a policy: the form, the messages that are made of it, and what coverage and mutants tell."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.cli.policy_test import read_cases
from fedsilo.protocol import codec
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.kinds import MESSAGES
from policies.cases.amount import Amount, read_amount
from policies.cases.build import Situation, build
from policies.cases.format import COUNTS, FORMS, UNNAMED, UPDATE, Case, TensorMessage, load_cases
from policies.cases.judge import as_expected, coverage, judge, mutate
from policies.cases.loosen import BEYOND_MESSAGES, beyond_messages, limits, loosened
from policies.cases.needs import not_for
from policies.cases.site import Site, kinds_of, named_kinds
from policies.cases.values import fit
from policies.compare import compare
from policies.engine import History, decide
from policies.history import History as HistoryFields
from policies.render import PlanSize
from policies.schema import LoraSchema
from tests.policies.setting import SCHEMA, edited, policy_of, policy_text

SHIPPED = Path(__file__).parents[2] / "examples" / "policy_cases"
PUBSWAP = read_cases(SHIPPED / "pubswap")
GRID = read_cases(SHIPPED / "bfloat16")
SITE = Site(policy_of(policy_text(first_rounds=1)), SCHEMA)
LARGER = PlanSize(local_steps=20, max_new_tokens=64)
BY_PLAN = Site(policy_of(policy_text(first_rounds=3, public_rows=60, size=LARGER)), SCHEMA)
BFLOAT16 = dataclasses.replace(SCHEMA, dtype="bfloat16")


def said(text: str, site: Site = SITE) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (outcome.decision.would_be, outcome.reasons) for outcome in judge(load_cases(text.encode(), "c.yaml"), site)
    ]


def one(message: str, setting: str = "{}", before: str = "{}", site: Site = SITE) -> tuple[str, tuple[str, ...]]:
    text = f"name: it\nmessage: {message}\nsetting: {setting}\nbefore: {before}\nexpect: allow\n"
    (only,) = said(text, site)
    return only


# ---- what is shipped -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "site"),
    [
        (PUBSWAP, SITE),
        (
            [*PUBSWAP, *GRID],
            Site(policy_of(policy_text(schema=BFLOAT16, first_rounds=1)), BFLOAT16),
        ),
        (
            PUBSWAP,
            BY_PLAN,
        ),
    ],
    ids=["small", "bfloat16", "larger"],
)
def test_the_shipped_cases_hold_and_show_every_rule_and_limit(cases: list[Case], site: Site) -> None:
    outcomes = list(judge(cases, site))
    assert [outcome.name for outcome in outcomes if not outcome.passed] == []
    seen = coverage(outcomes, site)
    assert [row.name for row in seen.rows if not row.covered] == []
    assert seen.percent() == 100
    if site is BY_PLAN:
        return  # the same limits once more, only larger
    tried = list(mutate(outcomes, site))
    assert [each.name for each in tried if not each.noticed_by] == []
    assert len(tried) >= 60 and {each.how for each in tried} == {"looser", "another"}


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


@pytest.mark.parametrize("first_rounds", [0, 1])
@pytest.mark.parametrize("schema", [SCHEMA, WIDE], ids=["two tensors", "many"])
@pytest.mark.parametrize("silos", [2, 4, 9])
@pytest.mark.parametrize("size", [TUTORIAL, DEMO, TWO], ids=["tutorial", "demo", "two"])
def test_the_shipped_cases_hold_whatever_the_size(
    size: PlanSize, silos: int, schema: LoraSchema, first_rounds: int
) -> None:
    peers = tuple(f"spiffe://cardio-net/silo/hospital_{letter}" for letter in "abcdefghi"[:silos])
    text = policy_text(size=size, peers=peers, schema=schema, first_rounds=first_rounds)
    site = Site(policy_of(text), schema)
    outcomes = list(judge(PUBSWAP, site))
    assert [(outcome.name, outcome.said) for outcome in outcomes if not outcome.passed] == []
    assert [row.name for row in coverage(outcomes, site).rows if not row.covered] == []
    left_out = {each.case.source.rpartition("/")[2] for each in not_for(PUBSWAP, site)}
    asks_nobody = {"approvals.yaml"} if first_rounds == 0 else set()
    short = {"answers.yaml"} if size is not DEMO else set()  # 16 bytes a token are less than 8 and 64 beside them
    all_public = {"plans.yaml"} if size is TWO else set()
    assert left_out == asks_nobody | short | all_public


def test_a_site_without_a_held_out_set_has_nothing_to_show_of_it() -> None:
    bare = policy_text(held_out_file="", held_out_sha256="", held_out_rows=0, topics=(), first_rounds=1)
    site = Site(policy_of(bare), SCHEMA)
    outcomes = list(judge(PUBSWAP, site))
    assert [outcome.name for outcome in outcomes if not outcome.passed] == []
    assert [row.name for row in coverage(outcomes, site).rows if not row.covered] == []
    (only,) = not_for(PUBSWAP, site)
    assert only.name == "with another held-out set" and only.why.endswith("the policy does not set held_out.rows")


@pytest.mark.parametrize(
    ("need", "why"),
    [
        ("approvals.first_rounds >= 1", ""),
        ("approvals.first_rounds > 1", "it needs approvals.first_rounds > 1, and here that is 1 against 1"),
        ("max_steps x 2 >= 8", ""),
        ("max_steps x 2 > 8", "it needs max_steps x 2 > 8, and here that is 8 against 8"),
        ("federation.peers >= 4", ""),
        ("2 >= federation.peers", "it needs 2 >= federation.peers, and here that is 2 against 4"),
        ("ingress.run.plan.local_steps >= 4", ""),
        ("egress.public.responses.max_prompts_per_step >= 4", "it needs egress.public.responses.max_prompts_per_step "
         ">= 4, and here that is 3 against 4"),
    ],
)  # fmt: skip
def test_a_case_is_judged_where_the_policy_has_what_it_needs(need: str, why: str) -> None:
    text = f"name: it\nmessage: {{kind: lora.factors}}\nneeds: [{need}]\nexpect: hold\n"
    cases = load_cases(text.encode(), "c.yaml")
    assert [each.why for each in not_for(cases, SITE)] == ([why] if why else [])
    assert len(list(judge(cases, SITE))) == (0 if why else 1)


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("first_rounds", "is no comparison"),
        ("max_step >= 1", "did you mean 'max_steps'"),
        ("approvals.first >= 1", "there is no limit"),
        ("schema >= 1", "is no number"),
    ],
)
def test_T35_a_need_that_is_none_names_its_line(need: str, words: str) -> None:
    text = f"name: it\nmessage: {{kind: lora.factors}}\nneeds:\n  - {need}\nexpect: hold\n"
    with pytest.raises(UsageError) as mistake:
        list(not_for(load_cases(text.encode(), "c.yaml"), SITE))
    assert mistake.value.message.startswith("c.yaml:4: ") and words in mistake.value.message


def test_a_rule_that_this_policy_never_asks_is_told_apart_from_one_that_no_case_shows() -> None:
    rows = {row.name: row for row in coverage(list(judge(PUBSWAP, SITE)), SITE).rows}
    assert not rows["value grid"].asked  # float32
    without = [case for case in PUBSWAP if case.message.kind != UPDATE]
    rows = {row.name: row for row in coverage(list(judge(without, SITE)), SITE).rows}
    assert rows["L2 of the delta"].asked and not rows["L2 of the delta"].covered
    assert not rows["value grid"].covered  # nobody knows


def test_a_rule_is_covered_only_when_seen_on_both_sides() -> None:
    refused = "name: a\nmessage: {kind: public.responses, prompts: limit + 1}\nexpect: deny\n"
    allowed = "name: b\nmessage: {kind: public.responses}\nexpect: allow\n"

    def covered(*texts: str) -> bool:
        outcomes = list(judge([case for text in texts for case in load_cases(text.encode(), "c.yaml")], SITE))
        (row,) = [row for row in coverage(outcomes, SITE).rows if row.name == "prompts per step"]
        return row.covered

    assert covered(refused, allowed) and not covered(refused) and not covered(allowed)


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        ("expect: deny", True),
        ("expect: deny\nreasons: [NOT_VERIFIED, PUBLIC_SET]", True),
        ("expect: deny\nreasons: [NOT_VERIFIED]", False),
        ("expect: deny\nreasons: [NOT_VERIFIED, PUBLIC_SET, PROMPTS]", False),
        ("expect: deny\nincluding: [PUBLIC_SET]", True),
        ("expect: deny\nincluding: [PUBLIC_SET, PROMPTS]", False),
        ("expect: hold", False),
        ("expect: allow", False),
    ],
)
def test_a_case_expects_a_verdict_and_exactly_or_at_least_its_reasons(wanted: str, passes: bool) -> None:
    text = f"name: a\nmessage: {{kind: public.responses, set: another, responses: {{graded: wrong}}}}\n{wanted}\n"
    (outcome,) = judge(load_cases(text.encode(), "c.yaml"), SITE)
    assert outcome.passed is passes


# ---- messages are real ---------------------------------------------------------------------------------


def made_of(cases: list[Case]) -> list[tuple[Case, Situation]]:
    kinds = [(case, kind) for case in cases for kind in kinds_of(case, SITE.policy) if case.message.kind != UNNAMED]
    return [(case, build(case.of_kind(kind) if case.message.kind == UPDATE else case, SITE)) for case, kind in kinds
            if kind in MESSAGES]  # fmt: skip


def test_what_cases_build_crosses_the_wire() -> None:
    """The bytes that the codec makes of a message are as many as the message says, and read back they are it."""
    tensors = small = 0
    for case, made in made_of(PUBSWAP):
        message = made.message
        counted = case.message.payload_bytes is None
        if message.tensors is None:
            if isinstance(case.message, TensorMessage):
                continue  # not_given
            payload = codec.encode(message.body)
            assert codec.decode(type(message.body), payload) == message.body
            small += 1
        else:
            header = message.body
            payload = codec.encode_factors(
                message.tensors, base_digest=header.base_digest, schema_sha256=header.schema_sha256, rank=header.rank,
                scale=header.scale, dtype=header.dtype,
            )  # fmt: skip
            read = codec.decode_factors(payload)
            assert read.header == header
            if case.expect == "allow" and header.dtype == "float32":
                assert all(np.array_equal(read.tensors[name], message.tensors[name]) for name in message.tensors)
            tensors += 1
        assert not counted or message.payload_bytes == len(payload), case.name
    assert tensors > 20 and small > 80


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("words", ["l2: limit", "tensor_l2: limit", "l2: 1.0001 x limit", "tensor_l2: 1.0001 x limit"])
def test_T07_a_norm_at_the_limit_is_not_above_it_and_beyond_it_not_below(words: str, dtype: str) -> None:
    schema = dataclasses.replace(SCHEMA, dtype=dtype)
    site = Site(policy_of(policy_text(schema=schema)), schema)
    verdict, _ = one(f"{{kind: lora.factors, {words}}}", site=site)
    assert verdict == ("deny" if "x limit" in words else "allow")


def test_texts_of_an_exact_size_in_all() -> None:
    """Sizes around the places where a text's length takes a byte more."""
    draw = random.Random(5)

    def measured(sizes: list[int]) -> int:
        return sum(size + (1 if size < 128 else 2 if size < 16384 else 3) for size in sizes)

    exact = 0
    for _ in range(300):
        start = [draw.randrange(0, 300) for _ in range(draw.randrange(1, 9))]
        target = draw.randrange(0, 40_000)
        found = measured(fit(start, target, measured))
        assert found <= max(target, len(start))  # a text of no bytes has its length still
        exact += found == target
    assert exact >= 280


# ---- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "amount", "at_ten"),
    [
        (3, Amount(3), 3),
        ("limit", Amount(0, "limit"), 10),
        ("limit + 1", Amount(1, "limit"), 11),
        ("least - 0.5", Amount(-0.5, "least"), 1.5),
        ("1.5 x limit", Amount(0, "limit", 1.5), 15),
        ("0.5 x least + 2", Amount(2, "least", 0.5), 3),
    ],
)
def test_numbers_are_written_or_counted_from_the_limit(written: Any, amount: Amount, at_ten: float) -> None:
    assert read_amount(written) == amount
    assert amount.number(10, 2) == at_ten


def test_a_share_that_is_no_whole_number_goes_away_from_the_limit() -> None:
    assert read_amount("1.5 x limit").whole(3) == 5 and read_amount("0.5 x limit").whole(3) == 1


@pytest.mark.parametrize("written", ["3", "limit+1", "x limit", "limit x 2", "most", True, None, float("nan"), [1]])
def test_anything_else_is_no_number(written: Any) -> None:
    with pytest.raises(ValueError, match="must be a number, or such as"):
        read_amount(written)


# ---- mistakes ------------------------------------------------------------------------------------------

GOOD = "cases:\n  - name: a\n    message: {kind: public.responses}\n    expect: allow\n"


def test_the_good_file_of_the_table_below_is_good() -> None:
    assert [case.name for case in load_cases(GOOD.encode(), "c.yaml")] == ["a"]


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("expect: allow", "expect: perhaps", "c.yaml:4", "expect"),
        ("expect: allow", "expect: deny\n    reasons: [PROMTS]", "c.yaml:5", "did you mean 'PROMPTS'"),
        ("expect: allow", "expect: allow\n    reasons: [PROMPTS]", "c.yaml:5", "has no reasons"),
        ("expect: allow", "expects: allow", "c.yaml:4", "did you mean 'expect'"),
        ("kind: public.responses", "kind: public.response", "c.yaml:3", "did you mean 'public.responses'"),
        ("kind: public.responses", "kind: nope", "c.yaml:3", "there is no kind 'nope'"),
        ("kind: public.responses", "kinds: x", "c.yaml:3", "a message has a kind"),
        ("public.responses}", "public.responses, promts: 3}", "c.yaml:3", "did you mean 'prompts'"),
        ("public.responses}", "public.responses, prompts: limit+1}", "c.yaml:3", "must be a number"),
        ("public.responses}", "public.responses, responses: {grade: x}}", "c.yaml:3", "did you mean 'graded'"),
        ("expect: allow", "expect: allow\n    setting: {nows: x}", "c.yaml:5", "did you mean 'now'"),
        ("expect: allow", "expect: allow\n    before: {response: 1}", "c.yaml:5", "unknown key"),
        ("expect: allow", "expect: allow\n    setting: {plan: {round: 1}}", "c.yaml:5", "a plan has no 'round'"),
        ("cases:", "case:", "c.yaml:1", "unknown key 'case'"),
        ("name: a", "name: a\n    name: b", "c.yaml:3", "stands twice"),
        ("name: a", "name: yes", "c.yaml:2", "ambiguous"),
        ("  - name: a", "  - &x", "c.yaml:2", "anchors"),
    ],
)
def test_T35_a_mistake_in_a_case_file_names_its_line(old: str, new: str, place: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as mistake:
        load_cases(GOOD.replace(old, new).encode(), "c.yaml")
    assert mistake.value.message.startswith(f"{place}: ") and words in f"{mistake.value.message} {mistake.value.hint}"


@pytest.mark.parametrize(
    ("message", "setting", "words"),
    [
        ("{kind: control.poll, payload_bytes: least}", "{}", "no least"),
        ("{kind: global.adapter, tensor_l2: limit}", "{}", "sets no limit here for global.adapter"),
        ("{kind: control.poll}", '{now: "tomorrow"}', "is no time"),
        ("{kind: public.responses}", "{plan: {rounds: 0}}", "no such plan can be open"),
        ("{kind: control.error, fields: {codes: x}}", "{}", "no field named"),
        ("{kind: lora.factors, tensors: [frozen_tensor]}", "{}", "freezes no tensor"),
        ("{kind: run.plan, plan: {rounds: many}}", "{}", "must be a number"),
    ],
)
def test_what_cannot_be_made_is_a_mistake_with_its_line(message: str, setting: str, words: str) -> None:
    with pytest.raises(UsageError) as mistake:
        one(message, setting)
    assert mistake.value.message.startswith("c.yaml:") and words in mistake.value.message


def test_tensors_need_the_schema_and_nothing_else_does() -> None:
    bare = Site(SITE.policy, None)
    assert one("{kind: public.responses}", site=bare) == ("allow", ())
    with pytest.raises(UsageError, match="needs the policy's LoRA schema"):
        one("{kind: lora.factors}", site=bare)


def test_what_a_file_says_for_all_its_cases_lies_under_what_each_says() -> None:
    text = """
message: {kind: public.responses, responses: {per_prompt: 2, graded: wrong}}
setting: {round: 3}
cases:
  - {name: a, expect: deny}
  - {name: b, message: {responses: {graded: correct}}, expect: allow}
"""
    first, second = load_cases(text.encode(), "c.yaml")
    assert first.message.responses.graded == "wrong" and second.message.responses.graded == "correct"
    assert second.message.responses.per_prompt == Amount(2) and second.setting.round == 3
    assert said(text) == [("deny", ("NOT_VERIFIED",)), ("allow", ())]


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


def test_limits_beyond_messages_change_no_decision_and_all_others_do() -> None:
    """What BEYOND_MESSAGES excuses is really judged by no rule: else a case could be asked for."""
    outcomes = list(judge(PUBSWAP, SITE))
    mutants = list(loosened(SITE.policy, beyond=True))
    assert {mutant.path for mutant in mutants} <= {path for path, _ in beyond_messages(SITE.policy.file)}
    assert len(mutants) >= 8
    for mutant in mutants:
        for outcome in outcomes:
            again = decide(outcome.facts, mutant.policy, outcome.history)
            assert (again.would_be, again.reasons) == (outcome.decision.would_be, outcome.decision.reasons), mutant.path
    strict = policy_of(policy_text("pubswap-strict", schema=dataclasses.replace(BFLOAT16, freeze="A")))
    places = [*limits(SITE.policy.file), *limits(strict.file)]
    for pattern in BEYOND_MESSAGES:
        assert any(
            len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True))
            for path in places
        ), pattern


ONLY_CASE_OF = {
    "a prompt too many": "egress.public.responses.max_prompts_per_step",
    "a byte too many in a day": "budgets.day_bytes",
    "trained on a record too few": "egress.lora.factors.min_records",
    "with a silo too few": "federation.min_peers",
    "a digit more than the grid has": "egress.metrics.eval.fields.pass_at_1.quantum",
    "a site-admin said yes": "egress.lora.factors.approvals.roles",
}


def test_without_the_only_case_of_a_limit_its_loosening_goes_unnoticed() -> None:
    outcomes = list(judge(PUBSWAP, SITE))
    noticed_by: dict[str, list[set[str]]] = {}
    for mutant in loosened(SITE.policy):
        if ".".join(mutant.path) not in ONLY_CASE_OF.values():
            continue
        names = {
            outcome.case.name
            for outcome in outcomes
            if not as_expected(outcome.case, outcome.again(SITE.policy, mutant.policy))
        }
        noticed_by.setdefault(".".join(mutant.path), []).append(names)
    for name, limit in ONLY_CASE_OF.items():
        assert {name} in noticed_by[limit], limit
    # The command's own way, for one of them: the survivor is named with its line.
    gone, limit = "with a silo too few", "federation.min_peers"
    tried = mutate([outcome for outcome in outcomes if outcome.case.name != gone], SITE)
    survivors = [each for each in tried if not each.noticed_by]
    assert [each.name for each in survivors] == [limit]
    assert "min_peers" in policy_text(first_rounds=1).splitlines()[survivors[0].line - 1]


def test_a_case_that_fails_notices_nothing() -> None:
    text = "name: a\nmessage: {kind: public.responses, prompts: limit + 1}\nexpect: allow\n"
    outcomes = list(judge(load_cases(text.encode(), "c.yaml"), SITE))
    assert not outcomes[0].passed
    assert all(not each.noticed_by for each in mutate(outcomes, SITE))


# ---- kinds, shadow, screens ----------------------------------------------------------------------------


def test_T28_each_kind_that_a_policy_does_not_name_is_tried() -> None:
    for ruleset in ("pubswap", "deny_all"):
        site = Site(policy_of(policy_text(ruleset)), SCHEMA)
        text = b"name: unnamed\nmessage: {kind: unnamed}\nexpect: deny\n"
        outcomes = list(judge(load_cases(text, "c.yaml"), site))
        assert {outcome.kind for outcome in outcomes} == MESSAGES.keys() - named_kinds(site.policy)
        assert all(outcome.passed and "KIND_NOT_ALLOWED" in outcome.reasons for outcome in outcomes)
        rows = [row for row in coverage(outcomes, site).rows if row.what == "unnamed kind"]
        assert rows and all(row.covered for row in rows)
    assert len(outcomes) == len(MESSAGES)


def test_a_policy_in_shadow_is_asked_what_it_would_decide() -> None:
    site = Site(edited("mode: enforce", "mode: shadow"), SCHEMA)
    assert one("{kind: public.responses}", site=site) == ("allow", ())
    assert one("{kind: public.responses, responses: {graded: wrong}}", site=site) == ("deny", ("NOT_VERIFIED",))


def screened_site() -> Site:
    """pubswap with three screens, each with its settings."""
    text = policy_text().replace(
        "    send_only_verified: true",
        "    screens: [pii_basic, overlap, canary]\n    on_hit: withhold\n    max_hits_per_day: 2\n"
        "    send_only_verified: true",
    )
    return Site(
        policy_of(
            text + "text_screens:\n  pii_basic: {patterns: [email]}\n  canary: {max_edit_distance: 0, decode: []}\n"
            "  overlap: {unit: word, n: 5, max_matching_ngrams: 0, false_positive_rate: 1.0e-6}\n"
        ),
        SCHEMA,
    )


def test_T15_screens_run_over_the_answers_of_a_case() -> None:
    site = screened_site()
    corpus = "{corpus: [the patient came on a cold monday in march], canaries: [blue-heron-4711]}"

    def answered(text: str) -> tuple[str, tuple[str, ...]]:
        size = f"text: {text!r}, tokens_each: 1"
        return one(f"{{kind: public.responses, prompts: 1, responses: {{{size}}}}}", corpus, site=site)

    assert answered("the answer is 12") == ("allow", ())
    for text in ("she came on a cold monday", "write to ann@example.org", "it is blue-heron-4711"):
        assert answered(text) == ("deny", ("SCREEN_HIT",)), text
    assert one("{kind: public.responses}", before="{screen_hits_in_day: limit}", site=site) == ("allow", ())
    assert one("{kind: public.responses}", before="{screen_hits_in_day: limit + 1}", site=site)[1] == ("SCREEN_HALT",)
    assert one("{kind: public.responses}", before="{screen_halted: true}", site=site)[1] == ("SCREEN_HALT",)


def test_T15_a_screen_dropped_or_loosened_runs_anew_and_its_case_notices() -> None:
    site = screened_site()
    text = """
message: {kind: public.responses, prompts: 1}
setting: {corpus: [the patient came on a cold monday in march], canaries: [blue-heron-4711]}
cases:
  - {name: none, expect: allow}
  - {name: ngram, message: {responses: {text: patient came on a cold}}, expect: deny, reasons: [SCREEN_HIT]}
  - {name: mail, message: {responses: {text: to ann@example.org}}, expect: deny, reasons: [SCREEN_HIT]}
  - {name: canary, message: {responses: {text: it is blue-heron-4711}}, expect: deny, reasons: [SCREEN_HIT]}
"""
    outcomes = list(judge(load_cases(text.encode(), "c.yaml"), site))
    assert all(outcome.passed for outcome in outcomes)
    tried = {(each.name, str(each.after)): each.noticed_by for each in mutate(outcomes, site)}
    screens = "egress.public.responses.screens"
    assert tried[screens, "['overlap', 'pii_basic']"] == "canary"
    assert tried[screens, "['canary', 'pii_basic']"] == "ngram"
    assert tried[screens, "['canary', 'overlap']"] == "mail"
    assert tried["text_screens.overlap.n", "6"] == "ngram"
    assert tried["egress.public.responses.on_hit", "hold"] != ""
    assert tried["egress.public.responses.max_hits_per_day", "3"] == ""  # none of these cases is about it


def test_every_count_of_the_history_can_be_set() -> None:
    assert set(COUNTS) == {
        field.name for field in dataclasses.fields(HistoryFields) if isinstance(field.default, int)
    } - {"screen_halted"}
    assert dataclasses.fields(History) == dataclasses.fields(HistoryFields)
    assert set(FORMS) - {UPDATE} <= MESSAGES.keys()

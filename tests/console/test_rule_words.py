"""A rule in words: what a person reads of its measured value and its limit, and which way the limit binds."""

from __future__ import annotations

import pytest

from fedsilo.control.answers import DecisionInFull, read
from fedsilo.views import rule_words
from fedsilo.views.conditions import denied_lines
from fedsilo.views.lines import UNICODE, to_text, width_of
from fedsilo.views.messages import detail_lines
from fedsilo.views.overview import WAIVED, silos_lines
from fedsilo.views.releases import header, policy_summary, rule_lines, rules
from fedsilo.views.state import Rule
from policies.rules import RULES
from silo.guard.releases import REJECT_CODES
from tests.console.states import live, release, rule, silo


@pytest.mark.parametrize(
    ("name", "measured", "limit", "says"),
    [
        ("records of the round", "80", "2", "private records behind it: 80, at least 2"),
        ("L2 of the delta", "0.93", "4", "L2 of the delta: 0.93 of at most 4"),
        ("fields", "0", "0", "fields with something that they may not hold: none"),
        ("fields", "3", "0", "fields with something that they may not hold: 3, none is allowed"),
        ("measured", "yes", "yes", "the message could be measured whole: yes"),
        ("measured", "no", "yes", "the message could be measured whole: no"),
        ("round", "1.0", "round.step 1.20", "place in the run: round 1; open is round 1, step 20"),
        ("round", "2.3", "round.step 2.4", "place in the run: round 2, step 3; open is round 2, step 4"),
        ("round", "soon", "round.step 2.4", "place in the run: soon; allowed: round.step 2.4"),
        ("approvals", "0", "1", "people's approvals: 0 given, 1 needed"),
        ("kind", "lora.factors", "a kind that the policy names",
         "kind that the policy names: lora.factors; allowed: a kind that the policy names"),
        ("message bytes", "1.9M", "8.0M", "message bytes: 1.9M of at most 8.0M"),
        ("tensor dtype", "float32", "float32", "type of the numbers: float32"),
        ("not known here", "", "", "not known here"),
        ("plan peers", "4", "2", "peers in the run: 4, at least 2"),
        ("screen hits", "2", "0", "screen hits: 2, none is allowed"),
        ("screen hits", "0", "1", "people's approvals of answers that a screen hit: 0 given, 1 needed"),
        ("plan asks for enough updates", "3", "2", "updates that the plan asks for in each mean: 3, at least 2"),
        ("plan peers", "1", "0",
         "peers in the run: 1 of its silos are no peers of this site; none is allowed"),
    ],
)  # fmt: skip
def test_a_rule_says_what_it_asks_and_how_its_limit_binds(name: str, measured: str, limit: str, says: str) -> None:
    assert rule_words.says(Rule(name, "ok", measured, limit)) == says


@pytest.mark.parametrize(
    "name", [each.name for each in RULES if {"at_least", "persons"} & set(each.check.__code__.co_names)]
)
def test_each_rule_whose_limit_binds_from_below_is_told_so(name: str) -> None:
    assert rule_words.binds_from_below(name, "2")


@pytest.mark.parametrize(
    ("name", "measured", "limit", "told"),
    [
        ("plan peers", 1, 2, "measured 1, at least 2"),
        ("plan peers", 3, 0, "measured 3, limit 0"),
        ("message bytes", 9, 8, "measured 9, limit 8"),
    ],
)
def test_a_denial_says_of_a_least_limit_that_it_is_one(name: str, measured: int, limit: int, told: str) -> None:
    assert told in to_text(denied_lines(name, str(measured), str(limit), "", 100))
    record = {"kind": "run.plan", "rules": [{"rule": name, "outcome": "ok", "measured": measured, "limit": limit}]}
    shown = to_text(detail_lines("inbox", read(DecisionInFull, {"message": record}), "", 100))
    assert (f"at least {limit}" in shown) is ("at least" in told)


# 2027-01-15T08:00:00Z and 2027-02-01T00:00:00Z, by `date -d`


def test_who_said_no_and_why_stands_in_the_head_of_a_release_that_was_rejected() -> None:
    no = {"person": "bob", "verdict": "reject", "reason": "CONTENT", "note": "half of it is coded " * 9 + "yet"}
    answers = [{"person": "alice", "verdict": "approve"}, no]
    shown = release(approvers={"needed": 2, "roles": ["approver"], "given": answers})
    for given, told in ((answers, True), (answers[:1], False)):
        shown["approvers"]["given"] = given
        snapshot = live(silo(shown))
        rows = header(snapshot.held[0], 80, time=snapshot.server_now(100.0))
        head, said = " ".join(to_text(rows).split()), f'bob said no: CONTENT (what is in it), "{no["note"]}"'
        assert (said in head) is told and "1 of 2 given: alice" in head and max(map(width_of, rows)) <= 80


def test_what_waived_walls_mean_is_said_where_they_are_waived() -> None:
    for isolation, told in (("waived", True), ("namespaces", False)):
        snapshot = live(silo(trainer={"isolation": isolation}))
        text = " ".join(to_text(silos_lines(snapshot, 100.0, 80, UNICODE)).split())
        assert (" ".join(WAIVED.split()) in text) is told and f"trainer walls {isolation}" in text
    assert "waived: nothing keeps its trainer" in rule_words.isolation_text("waived")


def test_a_release_lists_its_rules_in_these_words() -> None:
    shown = release()
    shown["policy"]["rules"] += [rule("records of the round", 80, 2), rule("round", "1.0", "round.step 1.20", "deny")]
    (made,) = live(silo(shown)).held
    text = " ".join(to_text(rules(made, 100, most=40)).split())
    assert "records of the round 80, at least 2" in text and "measured whole" in text and "80 of 2" not in text
    assert "deny place in the run: round 1; open is round 1, step 20" in text and "round.step" not in text
    whole = " ".join(" ".join(to_text(rule_lines(each, 100)) for each in made.rules).split())
    assert "measured yes, limit yes" not in whole and "hold people's approvals: 0 given, 1 needed" in whole


def test_the_loudest_rule_stands_first_and_ok_is_said_once() -> None:
    shown = release()
    shown["policy"]["rules"] = [rule("approvals", 0, 1, "hold"), rule("round", "1.0", "round.step 1.20", "deny"),
                                *(rule(f"rule {at}", 1, 2) for at in range(9))]  # fmt: skip
    (made,) = live(silo(shown)).held
    lines = to_text(rules(made, 60, most=20)).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["deny", "hold", "ok"]
    assert all(line.startswith("     ") for line in lines[3:]) and lines[3:]
    assert to_text(rules(made, 60, most=3)).endswith("more: p lists them")
    assert to_text(policy_summary(made, 80)).endswith("1 deny 1 hold 0 look 9 ok")


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (rule_words.reason_text("TIMING"), "TIMING (not at this time)"),
        (rule_words.reason_text("X"), "X"),
        (rule_words.isolation_text("user"), "user"),
        (rule_words.isolation_text(""), "-"),
    ],
)
def test_codes_have_their_words(shown: str, told: str) -> None:
    assert shown == told and tuple(rule_words.REJECT_CODES) == REJECT_CODES  # the silo takes no other

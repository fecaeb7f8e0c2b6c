"""A rule in words: what a person reads of its measured value and its limit, and which way the limit binds."""

from __future__ import annotations

import pytest

from console import rule_words
from console.drawing import to_text
from console.facts import rule_lines, rules
from console.values import Rule
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
    ],
)  # fmt: skip
def test_a_rule_says_what_it_asks_and_how_its_limit_binds(name: str, measured: str, limit: str, says: str) -> None:
    assert rule_words.says(Rule(name, "ok", measured, limit)) == says


def test_a_release_lists_its_rules_in_these_words() -> None:
    shown = release()
    shown["policy"]["rules"] += [rule("records of the round", 80, 2), rule("round", "1.0", "round.step 1.20", "deny")]
    (made,) = live(silo(shown)).held
    text = " ".join(to_text(rules(made, 100, most=40)).split())
    assert "records of the round 80, at least 2" in text and "ok measured whole" in text and "80 of 2" not in text
    assert "deny place in the run: round 1; open is round 1, step 20" in text and "round.step" not in text
    whole = " ".join(" ".join(to_text(rule_lines(each, 100)) for each in made.rules).split())
    assert "measured yes, limit yes" not in whole and "hold people's approvals: 0 given, 1 needed" in whole

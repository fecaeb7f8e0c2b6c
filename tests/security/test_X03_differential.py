"""The same verdict at both ends: what a silo lets out its coordinator lets in, and nothing else (X3)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import encode
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from policies import engine
from policies.engine import HistoryBook
from policies.kind import Judgement
from policies.rules import RULES
from tests.policies.messages import a_method_that_sends_everything, good
from tests.security.differential import ONE_SIDED, RUN, Ends, Report, Sent, compare, generate

pytestmark = pytest.mark.slow  # thousands of messages are made first

MESSAGES = 3000


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


@pytest.fixture(scope="module")
def report(_probe: None) -> Report:
    return compare(MESSAGES, seed=20)


def test_X03_both_ends_give_the_same_verdict(report: Report) -> None:
    assert report.differences == []
    assert report.messages == MESSAGES


def test_X03_the_messages_are_worth_comparing(report: Report) -> None:
    """Neither all refused nor all allowed; each outbound kind is allowed, and dozens of reasons refuse."""
    assert MESSAGES / 5 < report.allowed < MESSAGES / 2
    assert report.kinds_allowed == {*OUTBOUND_KINDS}
    assert len(report.reasons) > 45


def test_X03_every_difference_names_a_rule_and_a_reason() -> None:
    names = {rule.name for rule in RULES}
    assert all(rule in names and end in ("silo", "coordinator") and why for (rule, end), why in ONE_SIDED.items())


def test_X03_the_generator_repeats_itself() -> None:
    assert list(generate(50, 7)) == list(generate(50, 7)) != list(generate(50, 8))


@pytest.mark.parametrize("rule", ["only what was asked", "tensor set", "metric grid", "package prompts", "fields"])
def test_X03_a_rule_that_one_end_lacks_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: the silo's end without a rule lets through what the coordinator refuses."""
    without = tuple(
        dataclasses.replace(each, check=lambda *_: Judgement("ok", 0, 0, ())) if each.name == rule else each
        for each in RULES
    )

    def lenient(facts: engine.Facts, policy: object, history: engine.History) -> engine.Decision:
        return engine.decide(facts, policy, history, rules=without)  # type: ignore[arg-type]

    monkeypatch.setattr("tests.security.differential.decide", lenient)
    found = compare(400, seed=20)
    assert any(f": {rule} refuses at the coordinator only" in line for line in found.differences)


def _pair(ruleset: str, sent: Sent, **known: int) -> tuple[str, str]:
    ends = Ends(ruleset, **known)
    verdicts = [end if isinstance(end, str) else end.verdict for end in (ends.at_silo(sent), ends.at_coordinator(sent))]
    return verdicts[0], verdicts[1]


def test_X03_the_site_alone_knows_its_records() -> None:
    """A named difference: nine records are too few at the silo, and the coordinator cannot know."""
    message = good("profile.vector", "knexa").message
    sent = Sent("profile.vector", message.run, 1, 0, encode(message.body))
    assert _pair("knexa", sent, usable_records=10) == ("allow", "allow")
    assert _pair("knexa", sent, usable_records=9) == ("deny", "allow")


def test_X03_the_counts_of_both_ends_stay_the_same() -> None:
    rng = random.Random(3)
    ends = Ends("fedgrpo")
    for _, sent in generate(300, rng.randrange(1000)):
        ends.at_silo(sent)
        ends.at_coordinator(sent)
    assert ends.silo_book == ends.coordinator_book != HistoryBook()


def test_X03_bytes_that_are_not_canonical_are_refused_at_both_ends() -> None:
    good = encode(pb.ProfileVector(family=7, dynamic=(0.25,) * 12, histogram=(100, *(0,) * 11)))
    assert _pair("knexa", Sent("profile.vector", RUN, 1, 0, good)) == ("allow", "allow")
    assert _pair("knexa", Sent("profile.vector", RUN, 1, 0, good + b"\x08\x07")) == ("MALFORMED", "MALFORMED")

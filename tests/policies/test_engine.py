"""Properties of the engine: deny by default, replay, tightening, budgets over time (threats T11, T34, X2)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.place import Place
from policies.compare import effective
from policies.engine import Approval, Decision, Facts, History, HistoryBook, Message, decide, measure
from policies.kind import Judgement, Rule, at_least, at_most
from policies.kinds import policy_file
from policies.load import load_policy
from policies.model import Policy, PolicyFile
from policies.rules import RULES
from tests.policies.messages import GOOD
from tests.policies.setting import (
    GRADED,
    SILO,
    context,
    metrics_message,
    policy_of,
    policy_text,
    responses_message,
    small_message,
    tensor_message,
)

POLICY = policy_of(policy_text())
CASES = {case.message.kind: case.facts() for case in GOOD}


def _broken(error: Exception) -> Rule:
    def check(facts: Facts, policy: Policy, history: History) -> Judgement:
        raise error

    return Rule("broken", "BROKEN", frozenset(), check)


# ---- deny by default -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_an_empty_rule_list_denies(name: str) -> None:
    decision = decide(CASES[name], POLICY, History(), rules=())
    assert (decision.verdict, decision.reasons) == ("deny", ("NO_RULES",))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("error", [KeyError("x"), TypeError(), ZeroDivisionError(), RecursionError(), ValueError()])
def test_a_rule_that_fails_denies(name: str, error: Exception) -> None:
    decision = decide(CASES[name], POLICY, History(), rules=(*RULES, _broken(error)))
    assert (decision.verdict, decision.reasons) == ("deny", ("RULE_FAILED",))
    assert decision.results[-1].measured == type(error).__name__


@pytest.mark.parametrize("name", CASES)
def test_facts_with_any_part_missing_never_allow_more_than_before(name: str) -> None:
    """Dropping a fact must deny, unless no rule of this kind reads it."""
    read_by_none = {"open_round", "open_step", "run", "payload_bytes", "now"}
    # records of the first version are judged without, and replay
    unknown_to_the_first_version = {
        "quorum",
        "start_adapter_sha256",
        "server_optimiser",
        "aggregate",
        "starts_as_planned",
        "committed_and_closed",
    }
    for key in CASES[name]:
        facts = {other: value for other, value in CASES[name].items() if other != key}
        decision = decide(facts, POLICY, History())
        if key in {
            "kind",
            "direction",
            "sender",
            "sender_expected",
            "measured",
            "fields_at_fault",
            "payload_bytes",
            "now",
        }:
            assert decision.verdict == "deny", key
        elif decision.verdict == "allow":
            assert key in read_by_none | unknown_to_the_first_version or _same_without(name, key), key


def _same_without(name: str, key: str) -> bool:
    """Whether no rule that judges this kind looks at the fact at all."""
    seen: set[str] = set()

    class Watched(dict[str, Any]):
        def __getitem__(self, item: str) -> Any:
            seen.add(item)
            return super().__getitem__(item)

    decide(Watched(CASES[name]), POLICY, History())
    return key not in seen


@pytest.mark.parametrize("ruleset", ["pubswap", "pubswap-random", "deny_all"])
@given(kind=st.text(max_size=30))
@settings(max_examples=40, deadline=None)
def test_T34_an_unknown_kind_is_denied(ruleset: str, kind: str) -> None:
    message = Message("egress", Place("run-1", 1, 0, f"x.{kind}"), SILO, 1, pb.Heartbeat())
    decision = decide(measure(message, context()), policy_of(policy_text(ruleset)), History())
    assert decision.verdict == "deny" and "KIND_NOT_ALLOWED" in decision.reasons


@pytest.mark.parametrize(("check", "bound"), [(at_least, "at least"), (at_most, "limit")])
def test_a_sentence_says_of_a_least_limit_that_it_is_one(check: Any, bound: str) -> None:
    limit = 2 if check is at_least else 0
    made = Rule("own", "OWN", frozenset(), lambda facts, policy, history: check(1, limit, ()))
    (result,) = decide(CASES["lora.factors"], POLICY, History(), rules=[made]).results
    assert result.sentence().endswith(f": own: measured 1, {bound} {limit} [OWN]")
    assert set(result.to_json()) == {"rule", "reason", "outcome", "measured", "limit", "file", "line"}  # as recorded


# ---- replay ----------------------------------------------------------------------------------------


def _same(first: Decision, second: Decision) -> bool:
    return canonical_json(first.to_json()) == canonical_json(second.to_json())


@pytest.mark.parametrize("name", CASES)
def test_a_decision_replays_from_json(name: str) -> None:
    history = History(messages_in_step=0, round_bytes=7, approvals=(Approval("ada", ("approver",)),))
    for facts in (CASES[name], {**CASES[name], "payload_bytes": 10**9}):
        read_facts = json.loads(canonical_json(facts))
        read_history = History.from_json(json.loads(canonical_json(history.to_json())))
        assert _same(decide(facts, POLICY, history), decide(read_facts, POLICY, read_history))


@pytest.mark.parametrize(("site_bytes", "charter_bytes", "binds"), [
    (65_536, 32_768, "charter.yaml"), (32_768, 65_536, "policy.yaml"), (32_768, 32_768, "policy.yaml"),
])  # fmt: skip
def test_a_result_names_the_file_whose_limit_it_is(site_bytes: int, charter_bytes: int, binds: str) -> None:
    """Both files deny, and only one of them has the limit that was judged by."""
    text = policy_text()
    assert text.count("message_bytes: 65536") == 1
    site, charter = (
        load_policy(text.replace("message_bytes: 65536", f"message_bytes: {limit}").encode(), name)
        for limit, name in ((site_bytes, "policy.yaml"), (charter_bytes, "charter.yaml"))
    )
    decision = decide({**CASES["lora.factors"], "payload_bytes": 10**9}, effective(site, charter), History())
    (result,) = [each for each in decision.results if each.reason == "MESSAGE_BYTES"]
    assert (result.outcome, result.limit) == ("deny", min(site_bytes, charter_bytes))
    assert result.file == binds


# ---- tightening ------------------------------------------------------------------------------------

# Where more is stricter. Everything else that is a number is a maximum, or the bounds of a range.
MINIMA = {"min", "min_peers", "persons", "first_rounds"}
# Not limits of `decide`: what a transform does, who may change what and when that lapses, numbers that must be equal.
NOT_LIMITS = {
    "clip_l2", "policy_change", "release_after_halt", "expiry_hours", "policy_version", "rows", "rank", "quantum",
    "then",
}  # fmt: skip


def _limits(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        return [found for key, child in value.items() for found in _limits(child, (*path, key))]
    if isinstance(value, list):
        return [found for index, child in enumerate(value) for found in _limits(child, (*path, index))]
    name = next(part for part in reversed(path) if isinstance(part, str))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return [path] if number and name not in NOT_LIMITS else []


RAW = POLICY.file.model_dump(mode="json", by_alias=True)
LIMITS = _limits(RAW)


def _tightened(path: tuple[str | int, ...], amount: float) -> Policy:
    raw = json.loads(json.dumps(RAW))
    parent: Any = raw
    for part in path[:-1]:
        parent = parent[part]
    value = parent[path[-1]]
    higher = path[-1] in MINIMA or path[-1] == 0  # the first number of a range is its minimum
    changed = value + amount * max(1, value) if higher else value * (1 - amount)
    parent[path[-1]] = max(1, round(changed)) if isinstance(value, int) and path[-1] not in ("min", "max") else changed
    if isinstance(value, int) and value == 0 and not higher:
        parent[path[-1]] = 0
    return Policy(PolicyFile.model_construct(**_constructed(raw)), "policy.yaml", "", {})


def _constructed(raw: dict[str, Any]) -> dict[str, Any]:
    """Validated field by field; only the ordering checks between limits are passed over where they object."""
    from pydantic import ValidationError

    try:
        file = policy_file(raw)
    except ValidationError:
        return dict(POLICY.file)
    return dict(file)


def _facts_near_the_limits() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    number = st.floats(0, 3)

    @st.composite
    def build(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
        name = draw(st.sampled_from(sorted(CASES)))
        facts = dict(CASES[name])
        for key, value in facts.items():
            if type(value) in (int, float) and key not in ("now", "round", "step", "open_round", "open_step"):
                facts[key] = type(value)(value * draw(number))
        return name, facts

    return build()


def test_there_are_limits_to_tighten() -> None:
    assert len(LIMITS) > 50
    assert ("egress", "lora.factors", "max_l2") in LIMITS and ("ingress", "run.plan", "rounds", 1) in LIMITS


@given(case=_facts_near_the_limits(), path=st.sampled_from(LIMITS), amount=st.floats(0.01, 1.0))
@settings(max_examples=300, deadline=None)
def test_X02_tightening_a_limit_never_turns_a_refusal_into_a_release(
    case: tuple[str, dict[str, Any]], path: tuple[str | int, ...], amount: float
) -> None:
    order = {"deny": 0, "hold": 1, "allow": 2}
    _, facts = case
    history = History(round_bytes=50, day_bytes=50, responses=3, messages_in_minute=5)
    before = decide(facts, POLICY, history).verdict
    after = decide(facts, _tightened(path, amount), history).verdict
    assert order[after] <= order[before]


def test_X02_each_maximum_bites_when_it_is_cut_to_nothing() -> None:
    """The counterpart: a tightened limit does refuse, so the property above is not true of a limit nobody reads."""
    for path in LIMITS:
        if path[-1] in ("persons", "first_rounds", "min", "min_peers", "per_round", 0) or "approvals" in path:
            continue
        tight = _tightened(path, 1.0)
        if tight.digest == POLICY.digest:
            continue
        history = History(messages_in_minute=1, messages_in_round=1)
        verdicts = [decide(facts, tight, history).verdict for facts in CASES.values()]
        assert "deny" in verdicts, path


# ---- budgets over time -----------------------------------------------------------------------------


def test_T11_a_burst_is_denied_and_the_count_survives_a_restart() -> None:
    policy = policy_of(policy_text().replace("polls_per_minute: 1200", "polls_per_minute: 3"))
    book = HistoryBook()
    poll = small_message("control.poll", pb.Poll(wait_milliseconds=1), run="")
    verdicts = []
    for second in (0, 1, 2, 3, 59, 61, 62):
        facts = measure(poll, context(now_seconds=1_800_000_000.0 + second))
        decision = decide(facts, policy, book.view(facts))
        verdicts.append(decision.verdict)
        if decision.may_leave:
            book.record(facts)
        book = HistoryBook.from_json(json.loads(json.dumps(book.to_json())))
    # polls at 0, 1, 2 fill the bucket; at 61 those of 0 and 1 are gone, at 62 only that of 61 is left besides
    assert verdicts == ["allow", "allow", "allow", "deny", "deny", "allow", "allow"]
    # whatever the book counts is kept, and a copy is not the book
    full = HistoryBook(
        counts={"a": 1}, days={"d": 2}, units={"d": {"k": 3}}, recent={"poll": [4.0]}, screen_hits={"d": {"k": 5}},
        screen_halts={"k": 6.0},
    )  # fmt: skip
    assert full.to_json() == asdict(full) and all(asdict(full).values())
    full.to_json()["units"]["d"]["k"] = 0
    assert full.units["d"]["k"] == 3
    # Polls do not use up what other control messages may do, nor the other way round.
    heartbeat = measure(small_message("control.heartbeat", pb.Heartbeat(), run=""), context())
    assert book.view(heartbeat).messages_in_minute == 0


def test_T41_a_clock_set_back_does_not_empty_the_bucket() -> None:
    book = HistoryBook()
    poll = small_message("control.poll", pb.Poll(), run="")
    book.record(measure(poll, context(now_seconds=1_800_000_000.0)))
    earlier = measure(poll, context(now_seconds=1_799_000_000.0))
    assert book.view(earlier).messages_in_minute == 1


def test_the_book_counts_what_the_rules_ask_for() -> None:
    book = HistoryBook()
    factors = measure(tensor_message(), context())
    answers = measure(responses_message(), context(**GRADED))
    metrics = measure(metrics_message(), context())
    for facts in (factors, answers, metrics):
        assert decide(facts, POLICY, book.view(facts)).verdict == "allow"
        book.record(facts)
    total = factors["payload_bytes"] + answers["payload_bytes"] + metrics["payload_bytes"]
    assert book.view(factors).messages_in_round == 1
    assert "PER_ROUND" in decide(factors, POLICY, book.view(factors)).reasons
    view = book.view(answers)
    counted = (view.messages_in_step, view.responses, view.tokens, view.text_bytes, view.units_in_day)
    assert counted == (1, 3, 5, 5, 5)
    assert "PER_STEP" in decide(answers, POLICY, view).reasons
    assert (view.round_bytes, view.day_bytes) == (total, total)
    next_round = {**factors, "round": 2, "open_round": 2}
    assert book.view(next_round).messages_in_round == 0 and book.view(next_round).day_bytes == total
    book.forget_run("run-1")
    assert book.counts == {} and book.view(factors).day_bytes == total

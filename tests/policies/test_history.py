"""What a book counts, counted again from a list of all that was allowed; and that it does not grow with a run (T11)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.engine import HistoryBook, decide, measure
from policies.history import FULL, ROUNDS_KEPT
from tests.policies.setting import (
    GRADED,
    context,
    metrics_message,
    policy_of,
    policy_text,
    responses_message,
    tensor_message,
)

POLICY = policy_of(policy_text())
FACTORS = measure(tensor_message(), context())
ANSWERS = measure(responses_message(), context(**GRADED))
METRICS = measure(metrics_message(), context())


def of_round(facts: Any, number: int, run: str = "run-1") -> dict[str, Any]:
    return {**facts, "run": run, "round": number, "open_round": number}


def slowly(allowed: list[dict[str, Any]], facts: dict[str, Any]) -> tuple[int, int, int]:
    """Messages of the kind and bytes in the round, and other rounds in which one of the kind was allowed."""
    of_run = [each for each in allowed if each["run"] == facts["run"]]
    here = [each for each in of_run if each["round"] == facts["round"]]
    rounds = {each["round"] for each in of_run if each["kind"] == facts["kind"]}
    return (
        sum(each["kind"] == facts["kind"] for each in here),
        sum(each["payload_bytes"] for each in here),
        len(rounds - {facts["round"]}),
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(["run-1", "run-2"]), st.integers(0, 3), st.sampled_from([FACTORS, ANSWERS, METRICS])),
        max_size=60,
    )
)
def test_T11_each_of_the_newest_rounds_is_counted_and_no_older_one_has_room(steps: list[tuple[str, int, Any]]) -> None:
    book, allowed, newest = HistoryBook(), list[dict[str, Any]](), {"run-1": 1, "run-2": 1}
    for run, further, facts in steps:
        newest[run] += further
        allowed.append(of_round(facts, newest[run], run))
        book.record(allowed[-1])
    counted = {run: max([each["round"] for each in allowed if each["run"] == run], default=0) for run in newest}
    for run, number in [(run, number) for run, last in newest.items() for number in range(1, last + 2)]:
        for facts in (of_round(each, number, run) for each in (FACTORS, ANSWERS, METRICS)):
            view = book.view(facts)
            in_round, size, others = slowly(allowed, facts)
            if number > counted[run] - ROUNDS_KEPT:
                assert (view.messages_in_round, view.round_bytes, view.rounds_released) == (in_round, size, others)
            else:
                assert (view.messages_in_round, view.round_bytes) == (FULL, FULL) and view.rounds_released >= others
                assert decide(facts, POLICY, view).verdict == "deny"


def test_a_book_is_as_long_after_five_hundred_rounds_as_after_twenty() -> None:
    def length(rounds: int) -> int:
        book = HistoryBook()
        for number in range(100, 100 + rounds):  # of three digits each
            for facts in (FACTORS, ANSWERS, METRICS):
                book.record(of_round(facts, number))
        book.recent.clear()  # the last minute's, which the rate bounds
        return len(json.dumps(book.to_json()))

    twenty = length(20)
    assert twenty <= length(500) <= twenty + 20  # digits of what is summed


@pytest.mark.parametrize("number", [1, 500 - ROUNDS_KEPT])
def test_T11_who_goes_back_to_an_old_round_finds_it_full(number: int) -> None:
    book = HistoryBook()
    for each in range(1, 501):
        book.record(of_round(FACTORS, each))
    book.recent.clear()  # or the rate alone would deny it
    again = of_round(FACTORS, number)
    assert "PER_ROUND" in decide(again, POLICY, book.view(again)).reasons
    onward = of_round(FACTORS, 501)  # the counterpart
    assert "PER_ROUND" not in decide(onward, POLICY, book.view(onward)).reasons


def test_counts_of_runs_that_have_ended_go_and_those_of_none_stay() -> None:
    book = HistoryBook()
    outside = {**of_round(FACTORS, 0, ""), "kind": "control.poll", "step": 0}
    for facts in (of_round(FACTORS, 1), of_round(FACTORS, 1, "run-2"), of_round(FACTORS, 1, "run"), outside):
        book.record(facts)
    book.forget_runs_but({"run-1", "run"})
    assert {key.partition("/")[0] for key in book.counts} == {"run-1", "run", ""}
    before = dict(book.counts)
    book.forget_runs_but({"run-1", "run"})
    assert book.counts == before

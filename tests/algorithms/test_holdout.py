"""The private holdout: which rows are set aside, that no step ever sees one, and what is measured on them."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.tasks import Evaluate, LoadAdapter, PrivateStep
from silo.measuring import MeasureHoldout
from silo.trainer.data import clusters_of, split_holdout
from silo.trainer.tasks import task_from_fields
from tests.algorithms.tiny import (
    Row,
    first_character_grader,
    make_plan,
    make_rows,
    make_session,
    payload_of,
    random_factors,
    start_payload,
)

pytestmark = pytest.mark.torch
SECRET = b"a site's secret"


def distinct(count: int, prefix: str) -> list[Row]:
    """Rows whose prompts all differ."""
    return [replace(row, prompt=f"{prefix} asks {row.id}") for row in make_rows(count, prefix)]


def grouped(count: int, groups: int) -> list[Row]:
    return [replace(row, group=f"patient {place % groups}") for place, row in enumerate(distinct(count, "p"))]


def ids(rows: Any) -> set[str]:
    return {row.id for row in rows}


@pytest.mark.parametrize("groups", [0, 40])
def test_a_row_keeps_its_side_whatever_the_order_and_whatever_joins_it(groups: int) -> None:
    rows = grouped(400, groups) if groups else distinct(400, "p")
    split = split_holdout(rows, 0.2, SECRET)
    assert ids(split.training) | ids(split.holdout) == ids(rows)
    assert not ids(split.training) & ids(split.holdout)
    shuffled = random.Random(1).sample(rows, len(rows))
    again = split_holdout(shuffled, 0.2, SECRET)
    assert ids(again.holdout) == ids(split.holdout)
    assert again.digest == split.digest
    assert [row.id for row in again.training] == [row.id for row in shuffled if row.id in ids(split.training)]
    further = split_holdout([*rows, *distinct(50, "later")], 0.2, SECRET)
    assert ids(further.holdout) & ids(rows) == ids(split.holdout)
    assert further.digest != split.digest


def test_a_group_is_never_divided() -> None:
    split = split_holdout(grouped(900, 90), 0.3, SECRET)
    training, holdout = ({row.group for row in part} for part in (split.training, split.holdout))
    assert training and holdout and not training & holdout


def test_rows_with_one_prompt_are_on_one_side_whatever_their_ids() -> None:
    """A prompt that stands under two ids would else be trained on under one of them and measured under the other."""
    rows = distinct(300, "p")
    copies = [replace(row, id=f"copy of {row.id}", prompt=f"  {row.prompt.upper()}\n") for row in rows]
    split = split_holdout([*rows, *copies], 0.3, SECRET)
    once = split_holdout(rows, 0.3, SECRET)
    assert 50 < len(once.holdout) < 130
    assert ids(split.holdout) == ids(once.holdout) | {f"copy of {name}" for name in ids(once.holdout)}
    # other prompts under the same further ids take sides of their own
    others = [replace(row, prompt=f"{row.prompt} again") for row in copies]
    apart = ids(split_holdout([*rows, *others], 0.3, SECRET).holdout)
    assert apart & ids(rows) == ids(once.holdout)
    assert {name for name in apart if name.startswith("copy")} != {f"copy of {name}" for name in ids(once.holdout)}


def test_groups_that_share_a_prompt_are_one_cluster_in_any_order() -> None:
    rows = [
        Row("1", "one?", "1", group="b"), Row("2", "two?", "1", group="b"), Row("3", "TWO?", "1", group="a"),
        Row("4", "four?", "1", group="a"), Row("5", "four?", "1"), Row("6", "six?", "1"), Row("7", "six? ", "1"),
        Row("8", "eight?", "1", group="six?"), Row("9", "nine?", "1"),
    ]  # fmt: skip
    expected = {**dict.fromkeys("12345", ("group", "a")), **dict.fromkeys("67", ("prompt", "six?"))}
    expected |= {"8": ("group", "six?"), "9": ("prompt", "nine?")}
    for seed in range(20):
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert {row.id: name for row, name in zip(shuffled, clusters_of(shuffled), strict=True)} == expected
    for secret in (b"%d" % number for number in range(40)):
        try:
            held = ids(split_holdout(rows, 0.5, secret).holdout)
        except UsageError:
            continue
        assert held & set("12345") in (set(), set("12345")) and held & set("67") in (set(), set("67"))
    # without the shared prompt they are two, and some secret parts them
    apart = [row for row in rows if row.id != "3"]
    assert any(0 < len(ids(split_holdout(apart, 0.5, b"%d" % number).holdout) & set("124")) < 3 for number in (1, 2, 5))


def test_a_private_prompt_that_is_also_public_is_not_measured() -> None:
    """It is trained on in public steps, by this silo and by others."""
    rows = [Row(f"p{place}", f"{place}?", "0123456789") for place in range(40)]
    public = [Row(f"q{place}", f" {place}? ", "0123456789") for place in range(0, 40, 2)]

    def measured(public_rows: list[Row]) -> Any:
        session, _ = make_session(private=rows, public=public_rows, holdout_share=0.5)
        return session.split, json.loads(session.carry_out(MeasureHoldout(1)).body)

    split, verdicts = measured(public)
    also_public = [row for row in split.holdout if int(row.id[1:]) % 2 == 0]
    assert also_public and len(also_public) < len(split.holdout)
    assert verdicts["public"] == len(also_public)
    assert len(verdicts["topics"]) == len(verdicts["groups"]) == len(split.holdout) - len(also_public)
    same, all_of_them = measured(distinct(10, "q"))
    assert same == split
    assert (all_of_them["public"], len(all_of_them["topics"])) == (0, len(split.holdout))


def test_the_share_is_met_on_average_and_larger_shares_hold_the_smaller() -> None:
    rows = distinct(4000, "p")
    shares = (0.05, 0.1, 0.3, 0.5)
    parts = [split_holdout(rows, share, SECRET).holdout for share in shares]
    for share, part in zip(shares, parts, strict=True):
        # four standard deviations of a binomial of 4,000
        assert abs(len(part) / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    for smaller, larger in itertools.pairwise(parts):
        assert ids(smaller) < ids(larger)
    assert not split_holdout(rows, 0.0, SECRET).holdout


def test_the_split_hangs_on_the_secret_and_its_digest_on_everything() -> None:
    rows = grouped(200, 50)
    split = split_holdout(rows, 0.3, SECRET)
    assert ids(split_holdout(rows, 0.3, b"another").holdout) != ids(split.holdout)
    changed = [replace(rows[0], answer="other"), *rows[1:]]
    digests = {split.digest, *(split_holdout(rows, share, SECRET).digest for share in (0.0, 0.2))}
    digests |= {split_holdout(changed, 0.3, SECRET).digest, split_holdout(rows, 0.3, b"another").digest}
    assert len(digests) == 5


def test_one_group_that_is_everything_is_refused_where_it_would_be_set_aside() -> None:
    outcomes = set()
    for number in range(20):
        rows = [replace(row, group=f"only {number}") for row in distinct(5, "p")]
        try:
            outcomes.add(len(split_holdout(rows, 0.5, SECRET).training))
        except UsageError as error:
            outcomes.add(error.code)
    assert outcomes == {5, "INVALID_INPUT"}


@pytest.mark.slow
def test_no_step_ever_sees_a_row_that_is_set_aside() -> None:
    """Each row's reference is its own id, so the grader sees which rows a step answered."""
    rows = [Row(f"p{place}", f"{place}=?", f"p{place}", group=f"g{place // 2}") for place in range(40)]
    graded: set[str] = set()

    def spy(pairs: Any) -> list[bool]:
        graded.update(reference for _, reference in pairs)
        return [False for _ in pairs]

    session, shape = make_session(private=rows, private_grader=spy, holdout_share=0.4)
    holdout = ids(session.split.holdout)
    assert 5 < len(holdout) < 35
    payload, digest = start_payload(shape)
    for number in range(1, 4):
        session.carry_out(LoadAdapter(number, digest), payload)
        for step in range(1, 11):
            session.carry_out(PrivateStep(number, step))  # 90 draws over 3 rounds: more than two passes
    assert graded == ids(session.split.training)
    graded.clear()
    session.carry_out(MeasureHoldout(1))
    assert graded == holdout


def test_verdicts_by_hand() -> None:
    """Answers to "yes" prompts are all right, to "no" prompts all wrong; one prompt is longer than the plan allows."""
    rows = [
        Row(
            f"p{place}",
            "7" * 30 if place == 3 else f"{place}=?",
            "yes" if place % 2 else "no",
            "ab"[place % 2],
            "g" * (place < 4),
        )
        for place in range(60)
    ]
    session, _ = make_session(
        private=rows, holdout_share=0.5, private_grader=lambda pairs: [reference == "yes" for _, reference in pairs]
    )
    held = sorted((row for row in session.split.holdout if len(row.prompt) <= 16), key=lambda row: row.id)
    body = session.carry_out(MeasureHoldout(3)).body
    verdicts = json.loads(body)
    assert verdicts["topics"] == [row.topic for row in held]
    assert verdicts["correct"] == [3 * (row.answer == "yes") for row in held]
    assert verdicts["greedy"] == [int(row.answer == "yes") for row in held]
    assert verdicts["overlong"] == len(session.split.holdout) - len(held)
    clusters = [row.group or row.id for row in held]
    assert [number == verdicts["groups"][0] for number in verdicts["groups"]] == [
        name == clusters[0] for name in clusters
    ]
    assert len(set(verdicts["groups"])) == len(set(clusters))
    assert not any(row.id in body.decode() for row in held)


def test_policies_answer_with_the_same_random_numbers_and_the_local_factors_stay() -> None:
    rows = [replace(row, prompt=f"{place}a?") for place, row in enumerate(make_rows(60, "p"))]
    session, shape = make_session(private=rows, holdout_share=0.5, plan=make_plan())
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    base = session.carry_out(MeasureHoldout(4)).body
    # B is zero at the start: another policy by name, the same by what it computes
    assert session.carry_out(MeasureHoldout(4), payload).body == base
    other = payload_of(shape, random_factors(shape, 3, b_scale=0.7))
    assert session.carry_out(MeasureHoldout(4), other).body != base
    assert session.carry_out(MeasureHoldout(4)).body == base
    shuffled, _ = make_session(private=rows[::-1], holdout_share=0.5, private_grader=first_character_grader)
    assert shuffled.carry_out(MeasureHoldout(4)).body == base


def test_T52_the_held_out_set_is_measured_as_it_is_evaluated() -> None:
    """The greedy answers are the same ones, whoever asks; the samples are drawn with the site's secret."""
    session, _ = make_session(public=[Row(f"q{place}", f"other {place}?", "0123456789") for place in range(8)])
    told = session.carry_out(Evaluate(0, ""))
    measured = json.loads(session.carry_out(MeasureHoldout(2, 3, "held_out")).body)
    assert len(measured["greedy"]) > 0 and measured["samples"] == 2
    share = sum(measured["greedy"]) / len(measured["greedy"])
    assert share == pytest.approx(told.metrics["pass_at_1_greedy"], abs=5e-5)  # rounded to four decimals there
    fields = {"task": "MeasureHoldout", "round": 3, "samples": 2, "rows": "held_out"}
    with pytest.raises(OperationError):
        task_from_fields({**fields, "rows": "public"}, b"")

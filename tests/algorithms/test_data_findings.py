"""Duplicates and leaks are found, whatever they are dressed in, and other tasks are not taken for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsilo.files.task_files import Task, TaskFile
from fedsilo.grading.data_findings import EXAMPLES_MAX, NUMBERS_ASIDE_WORDS, Finding, find

LONG = "a patient of 45 years comes with " + "pain in the chest since noon and " * 3 + "asks what to do"
PRIVATE = ["what is 3 + 4?", "Name the capital of France.", LONG]


def file_of(name: str, prompts: list[str]) -> TaskFile:
    rows = tuple(Task(f"{name}-{place}", prompt, "1", "t", "", place + 1) for place, prompt in enumerate(prompts))
    return TaskFile(Path(f"{name}.jsonl"), rows, "", len(rows), ())


def found(private: list[str], public: list[str] = ["p"], held_out: list[str] = ["h"]) -> list[Finding]:  # noqa: B006
    return find([file_of("private", private)], file_of("public", public), file_of("held_out", held_out))


def test_nothing_is_found_where_nothing_is() -> None:
    assert found(PRIVATE, ["what is 3 + 5?"], ["name the capital of Spain", "3 + 4"]) == []


@pytest.mark.parametrize(
    ("held_out", "alike"),
    [
        ("  what is\t3 + 4?\n", False),
        ("WHAT IS \uff13 + 4?", False),  # a full-width digit: the same by Unicode's compatibility forms
        ("**What** is 3+4", True),
        ("name the capital of France", True),
        (LONG.replace("45", "54"), True),
    ],
)
def test_a_leak_into_the_private_files_is_found(held_out: str, alike: bool) -> None:
    (one,) = found(PRIVATE, held_out=["h", held_out])
    assert (one.where, one.also, one.alike, one.rows) == ("private", "held_out", alike, 1)
    assert (one.examples[0].other_id, one.examples[0].other_line) == ("held_out-1", 2)


def test_numbers_count_in_short_prompts_alone() -> None:
    assert len(LONG.split()) >= NUMBERS_ASIDE_WORDS
    assert found(["what is 3 + 4?", "what is 5 + 6?"]) == []
    assert found([LONG, LONG.replace("45", "54")])[0].alike


def test_every_pair_of_sets_is_compared_and_rows_count_once() -> None:
    many = [f"question {place}" for place in range(8)]
    rows = {
        (each.where, each.also, each.alike): each.rows
        for each in found([*many, *many, "Question 0!"], [*many, "Question 1."], [many[0], "x"])
    }
    assert rows == {
        ("private", "held_out", False): 2, ("private", "held_out", True): 1,
        ("private", "public", False): 16, ("private", "public", True): 1,
        ("public", "held_out", False): 1,
        ("private", "private", False): 8, ("private", "private", True): 1,
        ("public", "public", True): 1,
    }  # fmt: skip


def test_two_private_files_are_one_set() -> None:
    one, other = file_of("a", ["x y"]), file_of("b", ["z", "X  Y"])
    (twice,) = find([one, other], file_of("public", ["p"]), file_of("held_out", ["h"]))
    assert twice.words(ids=False) == "1 prompt is the same as another in the private files: b.jsonl:2 = a.jsonl:1"


def test_words_name_the_first_rows_and_never_a_prompt() -> None:
    secrets = [f"secret {place}" for place in range(EXAMPLES_MAX + 3)]
    (leak,) = found(secrets, held_out=secrets)
    for ids in (False, True):
        words = leak.words(ids=ids)
        assert "secret" not in words and words.count("held_out.jsonl:") == EXAMPLES_MAX and words.endswith("...")
        assert ("'private-0'" in words) is ids

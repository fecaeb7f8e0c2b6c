"""Task files: bad lines are counted and listed; below one in twenty the rest is used, from there on nothing is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedsilo.edge.task_files import read_tasks, read_usable, refuse_bad_references
from fedsilo.treaty.errors import NotFoundError, UsageError
from fedsilo.treaty.grading import check_reference


def row(number: int, **changes: Any) -> str:
    return json.dumps({"id": f"q{number}", "prompt": f"{number}?", "answer": str(number), "topic": "t", **changes})


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = [row(number) for number in range(100)]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"id": "x", ', "broken JSON"),
        ("[1]", "not a JSON object"),
        ('{"id": "x", "prompt": "p", "topic": "t"}', "missing field 'answer'"),
        (row(200, answer=7), "field 'answer' is not a text"),
        (row(200, prompt=" "), "field 'prompt' is not a text"),
        (row(200, group=3), "field 'group' is not a text"),
        (row(7), "duplicate id"),
        ('{"id": "x", "prompt": "\\ud800", "answer": "a", "topic": "t"}', "not valid Unicode"),
    ],
)
def test_a_bad_line_is_listed_with_its_number_and_the_rest_is_used(tmp_path: Path, bad: str, reason: str) -> None:
    tasks = read_tasks(write(tmp_path, [*GOOD[:50], "", bad, *GOOD[50:]]))
    assert tasks.problems == ((52, reason),)
    assert tasks.reasons == {reason: 1}
    assert [task.id for task in tasks.rows] == [f"q{number}" for number in range(100)]
    assert tasks.lines == 101


def test_one_line_in_twenty_is_too_many(tmp_path: Path) -> None:
    allowed = read_tasks(write(tmp_path, [*GOOD[:96], *["{"] * 4]))
    assert len(allowed.rows) == 96
    with pytest.raises(UsageError, match=r"5 of 100 lines are bad.*line 96: broken JSON") as raised:
        read_tasks(write(tmp_path, [*GOOD[:95], *["{"] * 5]))
    assert raised.value.exit_code == 2


def test_unparseable_references_count_together_with_the_other_bad_lines(tmp_path: Path) -> None:
    lines = [*GOOD[:94], "{", row(300, answer="1/0"), row(301, answer="?"), row(302, answer="-"), row(94), row(95)]
    tasks = refuse_bad_references(read_tasks(write(tmp_path, lines)), lambda text: check_reference("numeric", text))
    assert tasks.problems == (
        (95, "broken JSON"),
        (96, "unparseable reference answer"),
        (97, "unparseable reference answer"),
        (98, "unparseable reference answer"),
    )
    assert len(tasks.rows) == 96
    with pytest.raises(UsageError, match="6 of 102"):
        refuse_bad_references(
            read_tasks(write(tmp_path, [*lines, row(303, answer="x"), "{"])),
            lambda text: check_reference("numeric", text),
        )


def test_reasons_never_quote_the_line(tmp_path: Path) -> None:
    tasks = read_tasks(write(tmp_path, [*GOOD, '{"secret patient name"']))
    assert "secret" not in str(tasks.problems)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no task"):
        read_tasks(write(tmp_path, [""]))


def test_group_and_further_fields(tmp_path: Path) -> None:
    tasks = read_tasks(write(tmp_path, [row(1, group="patient-4", level="easy"), row(2)]))
    assert [task.group for task in tasks.rows] == ["patient-4", ""]


def test_an_id_that_stood_in_another_file_of_the_silo_is_left_out_and_listed(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 29)):
        lines = [f'{{"id":"{start + row}","prompt":"p","answer":"1","topic":"t"}}' for row in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    first, second = read_usable([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], lambda answer: True)
    assert (len(first.rows), first.problems) == (30, ())
    assert (len(second.rows), second.problems) == (29, ((1, "duplicate id"),))
    with pytest.raises(UsageError, match="30 of 30 lines are bad"):
        read_usable([tmp_path / "a.jsonl", tmp_path / "a.jsonl"], lambda answer: True)

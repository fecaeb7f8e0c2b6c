"""Task files: bad lines are counted and listed; below one in twenty the rest is used, from there on nothing is."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsilo.files.task_files import PUBLIC, FieldNames, read_tasks, read_usable, refuse_bad_references
from fedsilo.grading import check_reference, grade
from fedsilo.protocol.errors import NotFoundError, UsageError


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
        (row(200, answer=7.5), "field 'answer' is not a text"),
        (row(200, answer=True), "field 'answer' is not a text"),
        (row(200, answer=None), "missing field 'answer'"),
        (row(200, prompt=" "), "field 'prompt' is not a text"),
        (row(200, group=3.5), "field 'group' is not a text"),
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


@pytest.mark.parametrize("array", [False, True])
def test_a_byte_order_mark_costs_no_row(tmp_path: Path, array: bool) -> None:
    text = f"[{','.join(GOOD)}]" if array else "\n".join(GOOD)
    path = tmp_path / "tasks.jsonl"
    path.write_text(text, encoding="utf-8-sig")
    tasks = read_tasks(path)
    assert (len(tasks.rows), tasks.problems, tasks.unit) == (100, (), "row" if array else "line")
    assert tasks.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()  # of the file as it is
    path.write_text(text.replace(GOOD[5], "\ufeff" + GOOD[5]), encoding="utf-8")  # anywhere else it is no mark
    if array:
        with pytest.raises(UsageError, match="the array is broken JSON"):
            read_tasks(path)
    else:
        assert read_tasks(path).problems == ((6, "broken JSON"),)


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


def test_a_solution_is_read_of_the_public_set_alone(tmp_path: Path) -> None:
    path = write(tmp_path, [row(1, solution="1-2"), row(2)])
    public, private = read_tasks(path, PUBLIC), read_tasks(path)
    assert [task.solution for task in public.rows] == ["1-2", ""]
    assert [task.solution for task in private.rows] == ["", ""]
    assert public.unsolved == f"{path}:2"
    assert read_tasks(write(tmp_path, [row(1, solution="1-2")]), PUBLIC).unsolved == ""


@pytest.mark.parametrize("solution", [["1"], 1.5, "  ", ""])
def test_a_solution_that_is_no_text_is_a_bad_line_of_the_public_set(tmp_path: Path, solution: Any) -> None:
    path = write(tmp_path, [*GOOD, row(200, solution=solution)])
    read = read_tasks(path, PUBLIC)
    assert (read.problems, len(read.rows)) == (((101, "field 'solution' is not a text"),), 100)
    assert read_tasks(path).problems == (), "a private file may have such a field of its own"
    with pytest.raises(UsageError, match=r"tasks\.jsonl: 1 of 1 lines are bad.*solution"):
        read_tasks(write(tmp_path, [row(200, solution=solution)]), PUBLIC)


def test_a_solution_that_the_verifier_does_not_grade_right_counts_as_a_bad_reference(tmp_path: Path) -> None:
    lines = [*GOOD[:98], row(300, answer="5", solution="2-5"), row(301, answer="5", solution="5-2")]
    read = read_tasks(write(tmp_path, lines), PUBLIC)
    tasks = refuse_bad_references(read, lambda text: True, lambda text, answer: grade("final", text, answer).correct)
    assert tasks.problems == ((100, "the solution is not right by the answer"),)
    assert tasks.rows[-1].id == "q300"


def test_an_id_that_stood_in_another_file_of_the_silo_is_left_out_and_listed(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 29)):
        lines = [f'{{"id":"{start + row}","prompt":"p","answer":"1","topic":"t"}}' for row in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    first, second = read_usable([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], lambda answer: True)
    assert (len(first.rows), first.problems) == (30, ())
    assert (len(second.rows), second.problems) == (29, ((1, "duplicate id"),))
    with pytest.raises(UsageError, match="30 of 30 lines are bad"):
        read_usable([tmp_path / "a.jsonl", tmp_path / "a.jsonl"], lambda answer: True)


# ---- forms and names -----------------------------------------------------------------------------------


def as_array(folder: Path, rows: list[Any], indent: int | None = None) -> Path:
    path = folder / "tasks.json"
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    return path


def as_parquet(folder: Path, rows: list[dict[str, Any]], **types: Any) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "tasks.parquet"
    table = arrow.Table.from_pylist(rows)
    for name, kind in types.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table.column(name).cast(kind))
    parquet.write_table(table, path)
    return path


PLAIN = [json.loads(line) for line in GOOD]


@pytest.mark.parametrize("form", ["lines", "array", "indented array", "parquet"])
def test_every_form_gives_the_same_tasks(tmp_path: Path, form: str) -> None:
    rows = [{**each, "group": f"patient {place % 7}", "level": "easy"} for place, each in enumerate(PLAIN)]
    match form:
        case "lines":
            path = write(tmp_path, [json.dumps(each) for each in rows])
        case "parquet":
            path = as_parquet(tmp_path, rows)
        case _:
            path = as_array(tmp_path, rows, indent=2 if form != "array" else None)
    tasks = read_tasks(path)
    assert [(task.id, task.prompt, task.answer, task.group, task.line) for task in tasks.rows] == [
        (each["id"], each["prompt"], each["answer"], each["group"], place) for place, each in enumerate(rows, start=1)
    ]
    assert tasks.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tasks.lines, tasks.unit) == (100, "line" if form == "lines" else "row")


def test_rows_of_an_array_on_one_line_are_told_apart(tmp_path: Path) -> None:
    tasks = refuse_bad_references(
        read_tasks(as_array(tmp_path, [*PLAIN, {"id": "x"}, {**PLAIN[0], "id": "y", "answer": "?"}])),
        lambda text: check_reference("numeric", text),
    )
    assert tasks.problems == ((101, "missing field 'prompt'"), (102, "unparseable reference answer"))
    assert len(tasks.rows) == 100


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"q50"', '"q50', r"tasks\.json:303: the array is broken JSON"),
        ("},\n  {", "}\n  {", r"tasks\.json:\d+: the array is broken JSON"),
        ("\n]", "\n] []", r"tasks\.json:602: the array is broken JSON"),
        ("\n]", "\n", r"tasks\.json:602: the array is broken JSON"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = as_array(tmp_path, PLAIN, indent=2)
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=said) as raised:
        read_tasks(path)
    assert raised.value.exit_code == 2


def test_parquet_reads_text_alone(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    as_text = read_tasks(
        as_parquet(tmp_path, PLAIN, id=arrow.large_string(), topic=arrow.dictionary(arrow.int32(), arrow.string()))
    )
    assert len(as_text.rows) == 100
    for kind in (arrow.float64(), arrow.date32()):
        with pytest.raises(UsageError, match=re.escape(f"column 'answer' holds {kind}, not text or whole numbers")):
            read_tasks(as_parquet(tmp_path, [{**each, "answer": None} for each in PLAIN], answer=kind))
    lacking = read_tasks(as_parquet(tmp_path, [*PLAIN, {**PLAIN[0], "id": "x", "answer": None}]))
    assert lacking.problems == ((101, "missing field 'answer'"),)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes((tmp_path / "tasks.parquet").read_bytes()[:-20])
    with pytest.raises(UsageError, match="not a readable Parquet file"):
        read_tasks(cut)


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_parquet(tmp_path, PLAIN)
    assert len(read_tasks(path).rows) == 100
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(UsageError, match="pyarrow is not installed") as raised:
        read_tasks(path)
    assert "pip install -e '.[parquet]' -c constraints.txt" in raised.value.hint


@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_whole_numbers_are_their_decimal_text(tmp_path: Path, form: str) -> None:
    numbers = [0, -3, 7, 2**53 + 1, *range(100, 120)]
    rows = [{**PLAIN[place], "id": place, "answer": each, "group": 4} for place, each in enumerate(numbers)]
    match form:
        case "lines":
            path = write(tmp_path, [json.dumps(each) for each in rows])
        case "array":
            path = as_array(tmp_path, rows)
        case _:
            path = as_parquet(tmp_path, rows)
    tasks = read_tasks(path)
    assert tasks.problems == ()
    assert [task.answer for task in tasks.rows] == ["0", "-3", "7", "9007199254740993", *map(str, range(100, 120))]
    assert [task.id for task in tasks.rows] == [str(place) for place in range(len(numbers))]
    assert {task.group for task in tasks.rows} == {"4"}


@pytest.mark.parametrize("form", ["lines", "parquet"])
def test_a_field_that_no_row_has_is_told_once_by_the_name_that_was_given(tmp_path: Path, form: str) -> None:
    path = as_parquet(tmp_path, PLAIN) if form == "parquet" else write(tmp_path, GOOD)
    unit = "row" if form == "parquet" else "line"
    with pytest.raises(UsageError) as raised:
        read_tasks(path, FieldNames(prompt="nope"))
    assert raised.value.message == (
        f"{path}: 100 of 100 {unit}s are bad, the limit is under 5%: each {unit}: missing field 'prompt': there is no "
        "'nope', as data.fields calls it"
    )
    assert raised.value.hint == "data.fields.prompt: the name that the file has for it"
    some = [row(1), row(2), *[row(number, nope="?") for number in range(3, 9)]]  # these rows are at fault, no name is
    with pytest.raises(UsageError, match=r"line 1: missing field 'prompt'; line 2: missing field 'prompt'$"):
        read_tasks(write(tmp_path, some), FieldNames(prompt="nope"))


NAMES = FieldNames(id="case", prompt="question", answer="final", topic="ward", group="patient")


@pytest.mark.parametrize("form", ["lines", "parquet"])
def test_fields_may_have_other_names(tmp_path: Path, form: str) -> None:
    rows = [
        # names of ours stand for other things there, and are not taken for them
        {
            "case": f"c{place}",
            "question": f"{place}?",
            "final": "1",
            "ward": "w",
            "patient": "p",
            "prompt": "no",
            "id": "i",
        }
        for place in range(30)
    ]
    path = as_parquet(tmp_path, rows) if form == "parquet" else write(tmp_path, [json.dumps(each) for each in rows])
    tasks = read_tasks(path, NAMES)
    assert [(task.id, task.prompt, task.answer, task.topic, task.group) for task in tasks.rows] == [
        (f"c{place}", f"{place}?", "1", "w", "p") for place in range(30)
    ]
    with pytest.raises(UsageError, match=r"30 of 30 .*missing field 'answer'.*") as raised:
        read_tasks(path)
    assert "data.fields" in raised.value.hint


def test_D1_a_null_is_a_missing_field_in_every_form(tmp_path: Path) -> None:
    rows = [{"id": f"q{n}", "prompt": "What is 1+1?", "answer": "2", "topic": "add", "group": None} for n in range(30)]
    lines = read_tasks(write(tmp_path, [json.dumps(each) for each in rows]))
    assert (len(lines.rows), lines.problems, {task.group for task in lines.rows}) == (30, (), {""})
    assert read_tasks(as_array(tmp_path, rows)).rows[0].group == ""
    with pytest.raises(UsageError, match="missing field 'topic'"):
        read_tasks(as_array(tmp_path, [each | {"topic": None} for each in rows]))


def test_D2_a_parquet_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": f"q{n}", "prompt": "p", "answer": "2", "topic": "t"} for n in range(30)]
    path = as_parquet(tmp_path, rows)
    assert len(read_tasks(path).rows) == 30
    whole = parquet.read_table(path)
    unread = whole.append_column("note", arrow.array(["n"] * 30)).append_column("note", arrow.array(["m"] * 30))
    parquet.write_table(unread, path)
    assert len(read_tasks(path).rows) == 30
    parquet.write_table(whole.append_column("prompt", arrow.array(["other"] * 30)), path)
    with pytest.raises(UsageError, match="column 'prompt' stands 2 times") as raised:
        read_tasks(path)
    assert raised.value.code == "TASK_FILE_INVALID"


def test_D2_a_field_that_stands_twice_makes_its_row_a_bad_one(tmp_path: Path) -> None:
    lines = [row(n) for n in range(30)]
    lines[3] = lines[3].replace('"topic"', '"prompt": "another", "topic"')
    assert read_tasks(write(tmp_path, lines)).problems == ((4, "a field stands twice"),)
    (tmp_path / "tasks.json").write_text(f"[{','.join(lines)}]")
    assert read_tasks(tmp_path / "tasks.json").problems == ((4, "a field stands twice"),)

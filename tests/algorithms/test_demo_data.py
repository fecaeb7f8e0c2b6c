"""The demo's two data folders: what is in them, that nothing leaks across the held-out line, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsilo.cli import data as cli_data
from fedsilo.demo import digit_tasks
from fedsilo.demo.data import (
    examples_folder,
    make_digit_set,
    make_topic_set,
    read_data_folder,
    silo_names,
    write_digit_folder,
    write_sets_folder,
)
from fedsilo.files.task_files import read_tasks
from fedsilo.grading import check_reference, grade
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotFoundError, UsageError

BY_HAND = {
    "sort_up": "1257",
    "sort_down": "7521",
    "top_two": "75",
    "bottom_two": "12",
    "add_one": "6382",
    "subtract_one": "4160",
    "reverse": "1725",
    "rotate": "2715",
}


@pytest.mark.parametrize("topic", digit_tasks.TOPICS)
def test_the_eight_operations_by_hand(topic: str) -> None:
    assert digit_tasks.answer(topic, "5271") == BY_HAND[topic]
    assert digit_tasks.OPERATIONS[digit_tasks.OPERATIONS[topic].opposite].opposite == topic


def test_digits_wrap_around() -> None:
    assert digit_tasks.answer("add_one", "9099") == "0100"
    assert digit_tasks.answer("subtract_one", "0190") == "9089"


def test_one_string_in_five_is_held_out_and_no_part_shares_one_with_the_held_out_set() -> None:
    held_out = digit_tasks.digit_strings(held_out=True)
    assert len(held_out) / 10**digit_tasks.DIGITS == pytest.approx(0.2, abs=0.015)
    made = make_digit_set(1)
    unseen = {row["prompt"][1:-1] for row in made.held_out}
    seen = {row["prompt"][1:-1] for rows in (*made.private.values(), made.public) for row in rows}
    assert unseen <= set(held_out)
    assert not seen & set(held_out)


def test_public_questions_of_two_steps_have_their_work_and_no_others() -> None:
    topics = tuple(digit_tasks.TWO_STEP_TOPICS)
    made = make_topic_set(3, topics, rows_per_silo=20, public_rows=40, held_out_rows=20)
    for row in made.public:
        digits = row["prompt"][2:-1]
        first = digit_tasks.answer(digit_tasks.TWO_STEP_TOPICS[row["topic"]][0], digits)
        assert row["solution"] == f"{first}-{row['answer']}"
        assert grade("final", row["solution"], row["answer"]).correct
    assert all("solution" not in row for rows in (*made.private.values(), made.held_out) for row in rows)
    plain = make_topic_set(3, ("sort_up", "rotate"), rows_per_silo=5, public_rows=4, held_out_rows=4)
    assert all("solution" not in row for row in plain.public)


@pytest.mark.slow
def test_sizes_balance_and_heterogeneity() -> None:
    spread = []
    for seed in range(5):
        made = make_digit_set(seed)
        assert [len(rows) for rows in made.private.values()] == [400] * 4
        assert set(Counter(row["topic"] for row in made.held_out).values()) == {64}
        assert set(Counter(row["topic"] for row in made.public).values()) == {50}
        ids = [row["id"] for rows in (*made.private.values(), made.public, made.held_out) for row in rows]
        assert len(set(ids)) == len(ids)
        spread.append(made.total_variation)
    assert sum(spread) / len(spread) > 0.35


@pytest.mark.slow
def test_rows_to_set_aside_are_new_ones_of_the_same_mixture_and_move_nothing_else() -> None:
    plain, more = make_digit_set(1), make_digit_set(1, further_rows=45)
    assert (more.public, more.held_out) == (plain.public, plain.held_out)
    ids = [row["id"] for rows in (*more.private.values(), more.public, more.held_out) for row in rows]
    assert len(set(ids)) == len(ids)
    for silo, rows in more.private.items():
        assert rows[:400] == plain.private[silo] and len(rows) == 445
        assert {row["topic"] for row in rows[400:]} <= {row["topic"] for row in rows[:400]}


@pytest.mark.slow
def test_same_seed_same_bytes_other_seed_others(tmp_path: Path) -> None:
    digests = [
        [read_tasks(path).sha256 for path in sorted((tmp_path / name).rglob("*.jsonl"))]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
        if write_digit_folder(tmp_path / name, seed)
    ]
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_the_written_folder_reads_back_and_its_answers_verify(tmp_path: Path) -> None:
    write_digit_folder(tmp_path / "demo", 0, silos=3)
    folder = read_data_folder(tmp_path / "demo")
    assert tuple(folder.private) == silo_names(3) == ("hospital_a", "hospital_b", "hospital_c")
    for task in read_tasks(folder.held_out.path).rows:
        assert grade(folder.held_out.verifier, task.answer, task.answer).correct
        assert set(task.prompt + task.answer) <= set(digit_tasks.ALPHABET)


def test_a_folder_from_the_samples(tmp_path: Path) -> None:
    folder = write_sets_folder(tmp_path / "sets", seed=0, sets=examples_folder() / "data")
    assert folder.description.tokenizer == "bytes"
    assert {silo: source.verifier for silo, source in folder.private.items()} == {
        "hospital_a": "math",
        "hospital_b": "math",
        "hospital_c": "choice",
        "hospital_d": "choice",
    }
    ids = []
    for source in (*folder.private.values(), folder.public, folder.held_out):
        tasks = read_tasks(source.path)
        assert not tasks.problems
        assert all(check_reference(source.verifier, task.answer) for task in tasks.rows)
        ids += [task.id for task in tasks.rows]
    assert len(ids) == len(set(ids))
    assert ids[0].startswith("dmmath")


def test_every_sample_answer_is_right_for_its_own_verifier() -> None:
    for name, verifier in (("gsm8k", "math"), ("dmmath", "math"), ("medqa", "choice")):
        for task in read_tasks(examples_folder() / "data" / f"{name}.jsonl").rows:
            assert grade(verifier, f"\\boxed{{{task.answer}}}", task.answer).correct, task.id


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"private": ["a=nothing"]}, NotFoundError, "nothing"),
        ({"private": ["a"]}, UsageError, "SILO=SET"),
        ({"private": ["a=gsm8k", "a=medqa"]}, UsageError, "twice"),
        ({"public": "svamp"}, NotFoundError, "svamp"),
    ],
)
def test_sets_that_do_not_fit(
    tmp_path: Path, arguments: dict[str, object], error: type[FedSiloError], words: str
) -> None:
    with pytest.raises(error, match=words):
        write_sets_folder(tmp_path / "x", seed=0, sets=examples_folder() / "data", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    with pytest.raises(ConflictError):
        write_digit_folder(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("verifier: exact", "verifier: guess", UsageError, r"demo\.yaml:\d+: .*unknown verifier 'guess'"),
        ("  public.jsonl: {verifier: exact}\n", "", UsageError, "no verifier for public.jsonl"),
        ("tokenizer: digits", "tokenizer: words", UsageError, r"demo\.yaml:\d+: tokenizer"),
        ("name: digits-0", "name: digits-0\ncolour: red", UsageError, "unknown key 'colour'"),
        ("private/hospital_b.jsonl", "../hospital_b.jsonl", UsageError, "is not public.jsonl"),
        ("private/hospital_b.jsonl", "private/hospital_z.jsonl", NotFoundError, "hospital_z"),
    ],
)
def test_a_description_that_does_not_fit(
    tmp_path: Path, old: str, new: str, error: type[FedSiloError], words: str
) -> None:
    write_digit_folder(tmp_path / "demo", 0)
    path = tmp_path / "demo" / "demo.yaml"
    path.write_text(path.read_text("utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(error, match=words):
        read_data_folder(tmp_path / "demo")


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(cli_data.data_app, ["make-demo", str(tmp_path / "demo"), "--seed", "4", "--json"])
    data = json.loads(made.stdout)["data"]
    assert made.exit_code == 0
    assert [(entry["file"], entry["rows"]) for entry in data["files"]][-2:] == [
        ("public.jsonl", 400),
        ("held_out.jsonl", 512),
    ]
    again = runner.invoke(cli_data.data_app, ["make-demo", str(tmp_path / "demo"), "--json"])
    assert again.exit_code == 6
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n", encoding="utf-8")
    checked = runner.invoke(cli_data.data_app, ["check", str(bad), "--verifier", "exact", "--json"])
    assert checked.exit_code == 2
    assert json.loads(checked.stdout)["error"]["code"] == "TASK_FILE_INVALID"

"""Who has which rows: what is tuned on is measured nowhere else, and each split against its definition."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.demo import digit_tasks
from fedsilo.demo.data import Rows, examples_folder, mean_total_variation, split_dirichlet_per_class
from fedsilo.experiment.design import Setting, read_experiment, require_files
from fedsilo.experiment.perform import model_of
from fedsilo.experiment.rates import success_rates
from fedsilo.experiment.rows import classes_of_rate, lengths_of, rows_of
from fedsilo.grading import grade
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.randomness import generator, seed_of

LABELS = [f"class_{row % 7}" for row in range(2000)]


def setting(**fields: Any) -> Setting:
    return Setting.model_validate({"rounds": 1, "local_steps": 2, **fields})


def never(rows: Sequence[dict[str, Any]]) -> Sequence[float]:
    raise AssertionError("no split along success rate")


def texts(rows: Sequence[dict[str, Any]]) -> set[str]:
    """The digits of questions."""
    return {"".join(filter(str.isdigit, row["prompt"])) for row in rows}


@pytest.mark.parametrize("questions", ["one-step", "two-step", "three-step"])
@pytest.mark.parametrize("split", ["one-topic", "dirichlet"])
def test_strings_that_are_tuned_on_are_evaluated_with_no_seed(questions: str, split: str) -> None:
    chosen = setting(questions=questions, split=split, tuning_rows=128, silos=4)
    made = [rows_of(chosen, seed, never) for seed in (1, 2, 3)]
    tuned = set().union(*(texts(each.tuning) for each in made))
    evaluated = set().union(*(texts(each.held_out) for each in made))
    trained = set().union(*(texts(rows) for each in made for rows in (each.public, *each.private.values())))
    assert len(tuned) > 100 and not tuned & evaluated and not (tuned | evaluated) & trained
    for each in made:
        assert (len(each.tuning), len(each.held_out), len(each.public)) == (128, 512, 400)
        assert {len(rows) for rows in each.private.values()} == {400}
    assert rows_of(chosen, 1, never) == made[0]


def test_questions_of_three_steps_show_their_work() -> None:
    made = rows_of(setting(questions="three-step"), 1, never)
    row = made.public[0]
    digits = next(iter(texts([row])))
    first, second, third = digit_tasks.steps_of(row["topic"])
    one = first.apply(digits)
    two = second.apply(one)
    assert digit_tasks.work(row["topic"], digits) == f"{one}-{two}-{third.apply(two)}"
    assert grade("final", f"{one}-{two}-{third.apply(two)}", row["answer"]).correct
    assert not grade("final", f"{one}-{two}", row["answer"]).correct or two == row["answer"]
    assert row["prompt"] == f"{first.letter}{second.letter}{third.letter}{digits}="
    assert lengths_of(setting(questions="three-step")).max_new_tokens > len(f"{one}-{two}-{two}")


# ---- partitions ----------------------------------------------------------------------------------------------------


def per_class(seed: int, beta: float, silos: int = 4) -> list[list[int]]:
    return split_dirichlet_per_class(
        LABELS, silos=silos, beta=beta, generator=generator(seed_of(seed, "test-per-class"))
    )


def argmax_of_each_row(seed: int, alpha: float) -> list[list[int]]:
    """The trap: a draw over silos for each row, given to the silo with the largest share."""
    owners = np.argmax(np.random.default_rng(seed).dirichlet(np.full(4, alpha), size=len(LABELS)), axis=1)
    return [list(np.flatnonzero(owners == silo)) for silo in range(4)]


def test_per_class_shares_follow_beta_and_a_draw_for_each_row_would_not() -> None:
    def variation(split: Any, concentration: float) -> float:
        return float(np.mean([mean_total_variation(LABELS, split(seed, concentration)) for seed in range(10)]))

    strong, weak, independent = (variation(per_class, beta) for beta in (0.1, 1.0, 1e4))
    assert strong > 0.35 > weak > independent and strong > 5 * independent and independent < 0.06
    trap = [variation(argmax_of_each_row, alpha) for alpha in (0.1, 1.0, 1e4)]
    assert max(trap) < 0.06, "every concentration is the uniform split there"


def test_shares_of_a_class_have_the_moments_of_a_dirichlet() -> None:
    """Of Dir(beta) over four silos a share has mean 1/4 and variance (1/4)(3/4) / (4 beta + 1)."""
    beta, shares = 0.5, []
    for seed in range(60):
        for part in per_class(seed, beta):
            counts = Counter(LABELS[row] for row in part)
            shares += [counts[label] / LABELS.count(label) for label in ("class_0", "class_3")]
    assert np.mean(shares) == pytest.approx(0.25, abs=1e-9)
    assert np.var(shares) == pytest.approx(0.1875 / (4 * beta + 1), rel=0.2)


@pytest.mark.parametrize("beta", [0.01, 0.1, 1e4])
def test_per_class_gives_every_row_to_one_silo_and_every_silo_a_row(beta: float) -> None:
    for seed in range(5):
        parts = per_class(seed, beta, silos=8)
        assert sorted(row for part in parts for row in part) == list(range(len(LABELS)))
        assert min(map(len, parts)) >= 1
    assert per_class(1, beta) == per_class(1, beta) != per_class(2, beta)
    with pytest.raises(UsageError):
        split_dirichlet_per_class(["a", "b"], silos=3, beta=0.1, generator=np.random.default_rng(0))


# ---- along success rate --------------------------------------------------------------------------------------------


def test_classes_of_rate_are_of_one_size_from_the_hardest_up() -> None:
    rates = [0.5, 0.0, 1.0, 0.0, 0.25, 0.75, 0.0, 0.5]
    assert classes_of_rate(rates) == ["2", "0", "3", "0", "1", "3", "1", "2"]


def test_a_split_along_success_rate_separates_easy_from_hard() -> None:
    def rates(rows: Sequence[dict[str, Any]]) -> Sequence[float]:
        return [int(next(iter(texts([row])))) / 10_000 for row in rows]

    chosen = setting(split="dirichlet", along="success_rate", concentration=0.05, private_rows=200)
    means = [np.mean(rates(rows)) for rows in rows_of(chosen, 3, rates).private.values()]
    plain = [
        np.mean(rates(rows))
        for rows in rows_of(setting(split="dirichlet", private_rows=200), 3, never).private.values()
    ]
    assert max(means) - min(means) > 4 * (max(plain) - min(plain))


@pytest.mark.torch
@pytest.mark.slow
def test_success_rates_are_those_of_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model built on right answers alone is right more often than one that never saw one."""
    monkeypatch.setenv("FEDSILO_CACHE", str(tmp_path))
    rows = rows_of(setting(), 1, never).public[:40]
    found = []
    for share in (1.0, 0.0):
        model = model_of(setting(base={"right_share": share, "steps": 40}), 1)
        found.append(success_rates(model, "fp32", rows, "exact", 6, 1))
    assert np.mean(found[0]) > np.mean(found[1]) and all(0 <= rate <= 1 for rate in found[0])
    # sampled once for each model, rows and seed, and again the same where nothing was kept
    files = set((tmp_path / "rates").iterdir())
    assert len(files) == 2
    success_rates(model, "fp32", rows, "exact", 6, 2)
    success_rates(model, "fp32", rows[:8], "exact", 6, 1)
    assert len(set((tmp_path / "rates").iterdir())) == 4
    for file in files:
        file.write_text(json.dumps([8] * 40))
    assert success_rates(model, "fp32", rows, "exact", 6, 1) == [1.0] * 40
    monkeypatch.setenv("FEDSILO_CACHE", str(tmp_path / "other"))
    assert success_rates(model, "fp32", rows, "exact", 6, 1) == found[1]


# ---- files ---------------------------------------------------------------------------------------------------------


def files_text(**fields: Any) -> str:
    data = {"files": ["pool.jsonl"], "verifier": "math"}
    text = {
        "questions": "files",
        "data": data,
        "split": "dirichlet",
        "private_rows": 30,
        "public_rows": 20,
        "held_out_rows": 25,
        "tuning_rows": 5,
        "rounds": 1,
        "local_steps": 2,
        **fields,
    }
    return json.dumps(
        {"experiment": "files", "settings": {"M": text}, "seeds": [1], "rows": {"swap": {"method": "pubswap"}}}
    )


def read(tmp_path: Path, **fields: Any) -> Setting:
    path = tmp_path / "files.yaml"
    path.write_text(files_text(**fields))
    return read_experiment(path).settings["M"]


def write_pool(tmp_path: Path, count: int = 400) -> None:
    rows = [
        {"id": f"r{row}", "prompt": f"What is {row} + 1?", "answer": str(row + 1), "topic": f"t{row % 5}"}
        for row in range(count)
    ]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "id": "twice"}]))


@pytest.mark.parametrize("split", ["dirichlet", "per-class", "one-topic"])
def test_rows_of_files_are_dealt_once_and_what_is_tuned_on_is_no_seeds_evaluation(tmp_path: Path, split: str) -> None:
    write_pool(tmp_path)
    made: list[Rows] = [rows_of(read(tmp_path, split=split), seed, never) for seed in (1, 2)]
    for each in made:
        parts = [each.public, each.held_out, each.tuning, *each.private.values()]
        prompts = [row["prompt"] for part in parts for row in part]
        assert len(prompts) == len(set(prompts)) and len(each.tuning) == 5 and len(each.held_out) == 25
        if split != "per-class":
            assert {len(rows) for rows in each.private.values()} == {30}
        if split == "one-topic":
            assert [len({row["topic"] for row in rows}) for rows in each.private.values()] == [1] * 4
    tuned, evaluated = (
        {row["prompt"] for each in made for row in getattr(each, name)} for name in ("tuning", "held_out")
    )
    assert not tuned & evaluated and made[0].public != made[1].public
    assert not (tuned | evaluated) & {
        row["prompt"] for each in made for row in (*each.public, *chain(*each.private.values()))
    }


@pytest.mark.slow
def test_the_papers_counts_fit_into_all_rows_of_its_files(tmp_path: Path) -> None:
    """MATH has 12,500 rows: 4 x 2,500 private, 1,250 public and 1,250 held-out ones, and one row fewer is too few."""
    stated = read_experiment(examples_folder() / "experiments" / "pubswap_qwen3_1.7b.yaml").settings["math-tau10"]
    (data,) = [stated.data] if stated.data else []

    def chosen() -> Setting:
        files = data.model_copy(update={"files": (str(tmp_path / "pool.jsonl"),)})
        return stated.model_copy(update={"data": files})

    write_pool(tmp_path, 12_500)
    made = rows_of(chosen(), 101, never)
    parts = [made.public, made.held_out, *made.private.values()]
    assert [len(part) for part in parts] == [1250, 1250, *[2500] * 4]
    assert len({row["prompt"] for part in parts for row in part}) == 12_500
    write_pool(tmp_path, 12_499)
    with pytest.raises(UsageError):
        rows_of(chosen(), 101, never)


def test_files_that_are_missing_or_too_small_are_named(tmp_path: Path) -> None:
    chosen = read(tmp_path)
    with pytest.raises(NotFoundError, match=r"pool\.jsonl"):
        rows_of(chosen, 1, never)
    with pytest.raises(NotFoundError, match=r"files\.yaml:1: settings\.M\.data: .*pool\.jsonl"):
        require_files(tmp_path / "files.yaml")
    write_pool(tmp_path, 60)
    require_files(tmp_path / "files.yaml")
    with pytest.raises(UsageError):
        rows_of(chosen, 1, never)
    for wrong in ({"data": None}, {"questions": "one-step"}, {"split": "one-topic", "along": "success_rate"}):
        with pytest.raises(UsageError, match=r"files\.yaml"):
            read(tmp_path, **wrong)

"""Tables and verdicts of experiments, against scipy's own tests, hand numbers and planted results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsilo.experiment.design import Cell, Experiment, cell_named, cells_of, digest_of, plan_of, read_experiment
from fedsilo.experiment.results import (
    MARGIN,
    as_latex,
    as_markdown,
    claim_rows,
    holm,
    judged,
    of_experiment,
    paired,
    read_results,
    table_rows,
    verdict,
)
from fedsilo.protocol.errors import UsageError

TEXT = """\
experiment: small
setting: {rounds: 2, local_steps: 4}
seeds: [1, 2, 3, 4]
rows:
  plain: {method: public-no-swap}
  swap: {method: pubswap}
claims:
  C1: {row: swap, against: plain}
  C2: {row: swap, against: plain, metric: worst_topic, direction: equivalent}
"""


def experiment(text: str = TEXT, tmp_path: Path = Path()) -> Experiment:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return read_experiment(path)


def line(of: Experiment, row: str, seed: int, after: float, worst: float) -> dict[str, Any]:
    last = {"pass_at_1": after, "pass_at_1_greedy": after, "topics": {"a": worst, "b": 1.0}}
    return {
        "row": row, "seed": seed, "design_sha256": digest_of(of, Cell(row, seed)),
        "rounds": [{"pass_at_1": 0.1, "pass_at_1_greedy": 0.1, "topics": {}}, last], "steps": 8,
        "generated_tokens": 4000, "trained_tokens": 8000, "bytes": {"up": {"lora.factors": 500_000}, "down": {}},
        "refused": {}, "zero_variance_share": 0.5, "seconds": 1.0,
    }  # fmt: skip


def results(of: Experiment, after: Mapping[str, list[float]]) -> dict[Cell, Any]:
    lines = [
        line(of, row, seed, value, value / 2)
        for row, values in after.items()
        for seed, value in zip(of.seeds, values, strict=True)
    ]
    return of_experiment(of, lines)


# ---- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_interval_and_p_are_those_of_a_paired_t_test(seed: int) -> None:
    draws = np.random.default_rng(seed)
    one, other = draws.normal(0.02, 0.03, 8), draws.normal(0.0, 0.03, 8)
    expected = stats.ttest_rel(one, other)
    interval = expected.confidence_interval(0.95)
    found = paired(list(one - other), "above")
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    equivalent = paired(list(one - other), "equivalent")
    sides = [
        stats.ttest_1samp(one - other, -MARGIN, alternative="greater").pvalue,
        stats.ttest_1samp(one - other, MARGIN, alternative="less").pvalue,
    ]
    assert equivalent.p == pytest.approx(max(sides))


def test_holm_by_hand() -> None:
    """Four p-values: .01 x 4, then .02 x 3, .03 x 2 raised to the one before it, .5 x 1."""
    found = holm({"a": 0.03, "b": 0.01, "c": 0.5, "d": 0.02}, 4)
    assert found == pytest.approx({"a": 0.06, "b": 0.04, "c": 0.5, "d": 0.06})
    assert holm({"a": 0.01}, 5) == pytest.approx({"a": 0.05}), "claims without a result count as well"


@pytest.mark.parametrize(
    ("differences", "direction", "expected"),
    [
        ([0.05, 0.06, 0.07, 0.05], "above", "shown"),
        ([-0.05, -0.06, -0.07, -0.05], "above", "contradicted"),
        ([-0.05, -0.06, -0.07, -0.05], "below", "shown"),
        ([0.05, -0.06, 0.07, -0.05], "above", "not shown"),
        ([0.001, -0.001, 0.002, -0.002], "above", "equivalent"),
        ([0.001, -0.001, 0.002, -0.002], "equivalent", "equivalent"),
        ([0.05, 0.06, 0.07, 0.05], "equivalent", "contradicted"),
        ([0.05, -0.06, 0.07, -0.05], "equivalent", "not shown"),
        ([0.05], "above", "not shown"),
    ],
)
def test_the_verdict_on_differences(differences: list[float], direction: str, expected: str) -> None:
    found = paired(differences, direction)
    assert verdict(direction, found, found.p) == expected


@pytest.mark.parametrize(
    ("difference", "direction", "expected"),
    [
        (0.25, "above", "shown"),
        (-0.25, "above", "contradicted"),
        (0.0, "above", "equivalent"),
        (0.0, "equivalent", "equivalent"),
        (0.25, "equivalent", "contradicted"),
    ],
)
def test_equal_differences_have_no_error_and_still_a_verdict(difference: float, direction: str, expected: str) -> None:
    found = paired([difference] * 3, direction)
    assert (found.low, found.high) == (difference, difference) and verdict(direction, found, found.p) == expected


# ---- what counts as a result ---------------------------------------------------------------------------


def test_claims_are_judged_together_over_the_seeds_that_both_rows_have(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    known = results(small, {"plain": [0.2, 0.3, 0.25, 0.2], "swap": [0.3, 0.41, 0.36, 0.29]})
    first, second = judged(small, known)
    assert first.found is not None and first.found.differences == pytest.approx((0.1, 0.11, 0.11, 0.09))
    assert first.adjusted == pytest.approx(2 * first.found.p) and first.verdict == "shown"
    assert second.verdict == "contradicted"
    del known[Cell("plain", 4)]
    first, second = judged(small, known)
    assert first.found is not None and first.found.differences == pytest.approx((0.1, 0.11, 0.11))
    assert {first.verdict, second.verdict} == {"unfinished"}
    assert [each.found for each in judged(small, {})] == [None, None]
    assert [row[4:] for row in claim_rows(small, judged(small, {}))] == [("0 of 4", "", "", "unfinished")] * 2


def test_a_cell_without_a_measurement_leaves_its_claims_unfinished_and_is_no_zero(tmp_path: Path) -> None:
    small = experiment(TEXT.replace("metric: worst_topic", "metric: zero_variance_share"), tmp_path)
    known = results(small, {"plain": [0.2] * 4, "swap": [0.3] * 4})
    assert "unfinished" not in {each.verdict for each in judged(small, known)}
    # the gate let the last measurement out of no silo, and the method has no such share
    unmeasured = {"pass_at_1": None, "pass_at_1_greedy": None, "topics": {}}
    first = known[Cell("plain", 1)]
    known[Cell("plain", 1)] = {**first, "rounds": [first["rounds"][0], unmeasured], "zero_variance_share": None}
    assert [each.verdict for each in judged(small, known)] == ["unfinished"] * 2
    assert table_rows(small, known)[0][3] == "20.0", "the mean is over those that were measured"


def test_results_of_another_design_count_for_nothing(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    kept = line(small, "swap", 1, 0.5, 0.2)
    changed = experiment(TEXT.replace("local_steps: 4", "local_steps: 5"), tmp_path)
    assert list(of_experiment(small, [kept])) == [Cell("swap", 1)]
    assert of_experiment(changed, [kept]) == {}
    # the newest of a cell counts
    again = {**kept, "seconds": 2.0}
    assert of_experiment(small, [kept, again])[Cell("swap", 1)]["seconds"] == 2.0


def test_a_table_has_means_over_seeds_in_every_form(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    rows = table_rows(small, results(small, {"swap": [0.3, 0.4, 0.5, 0.4]}))
    assert rows == [("swap", "4", "10.0", "40.0", "40.0", "20.0", "50.0", "8", "1.0", "2.0", "0.50", "0")]
    assert as_markdown(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    assert as_latex(("a_b", "%"), [("1", "2")]) == (
        "\\begin{tabular}{lr}\na\\_b & \\% \\\\ \\hline\n1 & 2 \\\\\n\\end{tabular}"
    )


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for wrong in (b'{"row"', b"[1]", b"\xff\xfe"):
        path.write_bytes(b'{"row": "swap"}\n' + wrong + b"\n")
        with pytest.raises(UsageError, match=r"results\.jsonl:2: "):
            read_results(path)
        path.write_bytes(b'{"row": "swap"}\n' + wrong)  # what a kill left of a line
        assert read_results(path) == [{"row": "swap"}]
    assert read_results(tmp_path / "none.jsonl") == []


# ---- the file ------------------------------------------------------------------------------------------


def test_cells_come_seed_by_seed_and_are_found_by_name(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    assert [str(cell) for cell in cells_of(small)][:3] == ["plain/1", "swap/1", "plain/2"]
    assert cell_named(small, "swap/3") == Cell("swap", 3)
    for name in ("swap/5", "other/1", "swap", "swap/"):
        with pytest.raises(UsageError):
            cell_named(small, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("method: pubswap", "method: swapping"),
        ("seeds: [1, 2, 3, 4]", "seeds: [1, 1]"),
        ("against: plain}", "against: other}"),
        ("rounds: 2", "rounds: 0"),
        ("{method: pubswap}", "{method: pubswap, plan: {seed: 5}}"),
        ("{method: pubswap}", "{method: pubswap, plan: {nonsense: 5}}"),
        ("{method: pubswap}", "{method: pubswap, plan: {objective: {kl_coeficient: 1}}}"),
        ("local_steps: 4}", "local_steps: 4, plan: {method: pubswap}}"),
        ("against: plain}", "against: swap}"),
        ("setting: {", "setting: {questions: two-step, silos: 3, "),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_place(old: str, new: str, tmp_path: Path) -> None:
    assert old in TEXT
    with pytest.raises(UsageError, match=r"small\.yaml"):
        experiment(TEXT.replace(old, new, 1), tmp_path)


def test_what_a_row_names_is_merged_into_the_plan_and_nothing_else_differs(tmp_path: Path) -> None:
    text = TEXT.replace("{method: pubswap}", "{method: pubswap, plan: {objective: {proximal_mu: 0.1}, swap_period: 4}}")
    small = experiment(text, tmp_path)
    lengths = {"max_prompt_tokens": 8, "max_new_tokens": 6}
    plain, swap = (plan_of(small, Cell(row, 2), lengths) for row in ("plain", "swap"))
    assert swap["objective"] == {"kl_coefficient": 0.0, "proximal_mu": 0.1}
    different = {name for name in plain if plain[name] != swap[name]}
    assert different == {"method", "objective", "swap_period"}
    assert digest_of(small, Cell("plain", 2)) != digest_of(small, Cell("plain", 3))
    assert json.dumps(plain) and math.isfinite(plain["optimiser"]["learning_rate"])

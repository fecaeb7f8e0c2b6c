"""Tables and verdicts of experiments, against scipy's own tests, hand numbers and planted results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsilo.experiment.design import Cell, Experiment, cell_named, cells_of, digest_of, plan_of, read_experiment
from fedsilo.experiment.program import PACKAGES, digest_of_code
from fedsilo.experiment.results import (
    HEADINGS,
    MARGIN,
    Judged,
    as_latex,
    as_markdown,
    claim_rows,
    doubts,
    holm,
    judged,
    of_experiment,
    paired,
    read_results,
    table_rows,
    unequal,
    verdict,
)
from fedsilo.experiment.running import SECONDS_PER_BASE_STEP, SECONDS_PER_STEP, hours_of
from fedsilo.experiment.tuning import Frozen, frozen_line, trials_behind
from fedsilo.protocol.errors import UsageError

TEXT = """\
experiment: small
settings:
  D: {rounds: 2, local_steps: 4}
seeds: [1, 2, 3, 4]
rows:
  plain: {method: public-no-swap}
  swap: {method: pubswap}
claims:
  C1: {setting: D, row: swap, against: plain}
  C2: {setting: D, row: swap, against: plain, metric: worst_topic, direction: equivalent}
"""


def experiment(text: str = TEXT, tmp_path: Path = Path()) -> Experiment:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return read_experiment(path)


def line(
    of: Experiment, row: str, seed: int, after: float, worst: float, setting: str = "D", **more: Any
) -> dict[str, Any]:
    last = {"pass_at_1": after, "pass_at_1_greedy": after, "topics": {"a": worst, "b": 1.0}}
    return {
        "row": row, "seed": seed, "design_sha256": digest_of(of, Cell(setting, row, seed)),
        "rounds": [{"pass_at_1": 0.1, "pass_at_1_greedy": 0.1, "topics": {}}, last], "steps": 8,
        "generated_tokens": 4000, "trained_tokens": 8000, "bytes": {"up": {"lora.factors": 500_000}, "down": {}},
        "refused": {}, "zero_variance_share": 0.5, "seconds": 1.0, "silos": 4, "state": "finished", **more,
    }  # fmt: skip


def results(of: Experiment, after: Mapping[str, list[float]], setting: str = "D") -> dict[Cell, Any]:
    lines = [
        line(of, row, seed, value, value / 2, setting)
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
        ([-0.05, -0.06, -0.07, -0.05], "either", "shown"),
        ([0.05, -0.06, 0.07, -0.05], "either", "not shown"),
        ([0.005, 0.006, 0.007, 0.005], "above", "shown, inside the margin"),
        ([0.05, -0.06, 0.07, -0.05], "above", "not shown"),
        ([0.001, -0.001, 0.002, -0.002], "above", "not shown, inside the margin"),
        ([0.001, -0.001, 0.002, -0.002], "either", "not shown, inside the margin"),
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
        (0.0, "above", "not shown, inside the margin"),
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
    assert first.contrast is not None and first.contrast.differences == pytest.approx((0.1, 0.11, 0.11, 0.09))
    assert first.adjusted == pytest.approx(2 * first.contrast.p) and first.verdict == "shown"
    assert second.verdict == "contradicted"
    del known[Cell("D", "plain", 4)]
    first, second = judged(small, known)
    assert first.contrast is not None and first.contrast.differences == pytest.approx((0.1, 0.11, 0.11))
    assert {first.verdict, second.verdict} == {"unfinished"}
    assert [each.contrast for each in judged(small, {})] == [None, None]
    assert [row[5:] for row in claim_rows(small, judged(small, {}))] == [("0 of 4", "", "", "unfinished")] * 2


def test_a_cell_without_a_measurement_leaves_its_claims_incomplete_and_is_no_zero(tmp_path: Path) -> None:
    small = experiment(TEXT.replace("metric: worst_topic", "metric: zero_variance_share"), tmp_path)
    known = results(small, {"plain": [0.2] * 4, "swap": [0.3] * 4})
    assert {each.verdict for each in judged(small, known)}.isdisjoint({"unfinished", "incomplete"})
    # the gate let the last measurement out of no silo, and the method has no such share
    unmeasured: dict[str, Any] = {"pass_at_1": None, "pass_at_1_greedy": None, "topics": {}}
    first = known[Cell("D", "plain", 1)]
    known[Cell("D", "plain", 1)] = {**first, "rounds": [first["rounds"][0], unmeasured], "zero_variance_share": None}
    assert [each.verdict for each in judged(small, known)] == ["incomplete"] * 2
    assert table_rows(small, known, small.all_tables()["D"])[0][3] == "20.0", (
        "the mean is over those that were measured"
    )


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"state": "failed", "reason": "NO_QUORUM", "rounds_finished": 1}, "1 failed, 3 finished"),
        ({"state": "finished", "rounds_finished": 1}, "3 finished, 1 without all rounds"),
    ],
)
def test_a_run_without_all_rounds_has_no_value_and_its_claims_say_which_it_is(
    changes: dict[str, Any], runs: str, tmp_path: Path
) -> None:
    small = experiment(tmp_path=tmp_path)
    whole = {"rounds_planned": 2, "rounds_finished": 2}
    values = {"plain": [0.2, 0.3, 0.25, 0.2], "swap": [0.3, 0.41, 0.36, 0.29]}
    known = {cell: {**each, **whole} for cell, each in results(small, values).items()}
    assert [each.verdict for each in judged(small, known)] == ["shown", "contradicted"]
    # after its first round it was better than all others
    short = Cell("D", "swap", 3)
    known[short] = {**line(small, "swap", 3, 0.9, 0.9), **whole, **changes}
    for each in judged(small, known):
        assert each.verdict == "incomplete" and each.seeds == 3
        assert len(each.without_value) == 1 and each.without_value[0].startswith(f"{short}: ")
        assert each.contrast is not None and len(each.contrast.differences) == 3
    shown = {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in table_rows(small, known, small.all_tables()["D"])}
    assert (shown["swap"]["seeds"], shown["plain"]["seeds"]) == ("3 of 4", "4 of 4")
    assert shown["swap"]["after"] == f"{100 * (0.3 + 0.41 + 0.29) / 3:.1f}"
    assert (shown["plain"]["runs"], shown["swap"]["runs"]) == ("4 finished", runs)
    # a cell that was not carried out does not hide it
    del known[Cell("D", "plain", 4)]
    assert {each.verdict for each in judged(small, known)} == {"incomplete"}


def test_a_claim_counts_in_its_family_with_p_of_1_until_it_is_finished(tmp_path: Path) -> None:
    """Else a claim that half its seeds show would raise what the others are compared with."""
    small = experiment(TEXT.replace("direction: equivalent", "direction: below"), tmp_path)
    values = {"plain": [0.2, 0.3, 0.25, 0.2], "swap": [0.3, 0.41, 0.36, 0.29]}
    known = results(small, values)
    both = [each.contrast.p for each in judged(small, known) if each.contrast is not None]
    # the second claim's metric is there for two seeds alone
    for seed in (3, 4):
        known[Cell("D", "swap", seed)] = {
            **known[Cell("D", "swap", seed)],
            "rounds": [{}, {"pass_at_1": values["swap"][seed - 1], "topics": {}}],
        }
    first, second = judged(small, known)
    assert second.verdict == "incomplete" and math.isnan(second.adjusted)
    assert first.adjusted == pytest.approx(min(1, 2 * both[0])) and first.verdict == "shown"


SEVERAL = """\
experiment: several
settings:
  W5: {rounds: 8, local_steps: 5}
  W20: {from: W5, rounds: 2, local_steps: 20}
seeds: 1-4
rows: {base: {method: base}, plain: {method: public-no-swap}, swap: {method: pubswap}, other: {method: self-swap}}
claims:
  late: {setting: W20, row: swap, against: plain, exploratory: true}
  first: {setting: W5, row: swap, against: plain, seeds: [1, 2], family: a}
  second: {setting: W5, row: swap, against: other, family: a, metric: drift_between}
  third: {setting: W20, row: swap, against: plain, family: b}
  slope: {setting: [W5, W20], row: swap, against: plain, family: b}
  share: {setting: W5, row: other, against: plain, share_of: swap, exploratory: true}
tables:
  all: {setting: W20, rows: [base, swap], seeds: [7]}
"""


def test_cells_of_claims_come_first_each_once_and_only_those_that_are_named(tmp_path: Path) -> None:
    several = experiment(SEVERAL, tmp_path)
    assert several.settings["W20"].rounds == 2 and several.settings["W20"].local_steps == 20
    cells = [str(cell) for cell in cells_of(several)]
    assert cells[:4] == ["W5/swap/1", "W5/plain/1", "W5/swap/2", "W5/plain/2"]
    assert len(cells) == len(set(cells)) and cells[-1] == "W20/swap/7" and "W20/base/7" not in cells
    assert {str(cell) for cell in cells_of(several, "late")} == {
        f"W20/{row}/{seed}" for row in ("swap", "plain") for seed in (1, 2, 3, 4)
    }
    with pytest.raises(UsageError):
        list(cells_of(several, "none"))


def test_claims_of_one_family_are_judged_together_and_exploratory_ones_not_at_all(tmp_path: Path) -> None:
    several = experiment(SEVERAL, tmp_path)
    swap, plain, other = [0.3, 0.41, 0.36, 0.29], [0.2, 0.3, 0.25, 0.2], [0.25, 0.36, 0.31, 0.24]
    known = results(several, {"swap": swap, "plain": plain, "other": other}, "W5")
    known |= results(several, {"swap": [0.6, 0.65, 0.7, 0.62], "plain": plain}, "W20")
    found = {each.name: each for each in judged(several, known)}
    assert found["late"].verdict == found["share"].verdict == "exploratory"
    assert found["second"].verdict == "incomplete", "no drift between silos was noted"
    first, third, slope = (found[name] for name in ("first", "third", "slope"))
    assert first.contrast is not None and third.contrast is not None and slope.contrast is not None
    assert first.contrast.differences == pytest.approx((0.1, 0.11))
    assert first.adjusted == pytest.approx(min(1, 2 * first.contrast.p)), (
        "two claims in the family, one without a result"
    )
    smaller, larger = sorted([third.contrast.p, slope.contrast.p])
    assert sorted([third.adjusted, slope.adjusted]) == pytest.approx([2 * smaller, max(2 * smaller, larger)])
    # from 5 to 20 steps is twice a doubling
    at_5, at_20 = np.array(swap) - plain, np.array([0.6, 0.65, 0.7, 0.62]) - plain
    assert slope.contrast.differences == pytest.approx(tuple((at_20 - at_5) / 2))
    part = found["share"].share
    assert part is not None and part.mean == pytest.approx(0.21 / 0.41) and part.low <= part.mean <= part.high
    row = next(row for row in claim_rows(several, judged(several, known)) if row[0] == "share")
    assert "0.51 of swap [" in " ".join(row)


def shared(own: list[float], swap: list[float], folder: Path) -> tuple[Judged, tuple[str, ...]]:
    """The claim `share` of SEVERAL and its line, where `plain` has .2 with each of four seeds."""
    several = experiment(SEVERAL, folder)
    known = results(several, {"plain": [0.2] * 4, "other": own}, "W5")
    known |= of_experiment(
        several,
        [line(several, "swap", seed, value, value, "W5") for seed, value in zip(several.seeds, swap, strict=False)],
    )
    judgements = judged(several, known)
    at = next(place for place, each in enumerate(judgements) if each.name == "share")
    return judgements[at], claim_rows(several, judgements)[at]


def test_a_share_has_the_seeds_of_all_three_rows_and_none_without_a_lead(tmp_path: Path) -> None:
    each, row = shared([0.3, 0.3, 0.3, 0.3], [0.4, 0.4, 0.4], tmp_path)
    assert each.verdict == "unfinished" and row[5] == "3 of 4", "two rows have four seeds"
    assert each.share is not None and (each.share.mean, each.share.dropped) == (pytest.approx(0.5), 0.0)
    each, row = shared([0.3] * 4, [0.1, 0.2, 0.2, 0.2], tmp_path)
    assert each.share is not None and math.isnan(each.share.mean) and row[6] == "no lead to share: swap has none"


def test_resamples_without_a_lead_are_counted_and_too_many_leave_no_interval(tmp_path: Path) -> None:
    """Of four seeds one has a lead of .3 and the others of -.01: a resample without the first one has no lead."""
    each, row = shared([0.3] * 4, [0.5, 0.19, 0.19, 0.19], tmp_path)
    assert each.share is not None and each.share.dropped == pytest.approx((3 / 4) ** 4, abs=0.02)
    assert math.isnan(each.share.low) and math.isnan(each.share.high) and "no interval: " in row[6]
    # one seed in four without a lead: only a resample of it alone has none, (1/4)^4 = .0039
    each, row = shared([0.3] * 4, [0.4, 0.4, 0.4, 0.2], tmp_path)
    assert each.share is not None and each.share.dropped == pytest.approx(1 / 256, abs=0.003)
    assert 0 < each.share.low <= each.share.mean <= each.share.high and "of resamples have no lead" in row[6]


def test_rows_that_no_federation_could_carry_out_are_marked(tmp_path: Path) -> None:
    text = TEXT.replace("{method: pubswap}", "{method: pubswap, plan: {donor_denominator: donor}}")
    text = text.replace("{method: public-no-swap}", "{method: public-no-swap, pooled: true}")
    marked = experiment(text, tmp_path)
    known = results(marked, {"plain": [0.2] * 4, "swap": [0.3] * 4})
    names = [row[0] for row in table_rows(marked, known, marked.all_tables()["D"])]
    assert names == ["plain (pooled)", "swap (donors' own policies)"]


def test_the_base_model_is_what_others_measured_first(tmp_path: Path) -> None:
    several = experiment(SEVERAL, tmp_path)
    known = results(several, {"swap": [0.3] * 4}, "W5")
    base = known[Cell("W5", "base", 2)]
    assert base["rounds"][-1]["pass_at_1"] == 0.1 and base["steps"] == base["generated_tokens"] == 0
    assert Cell("W20", "base", 7) not in known


def test_what_must_be_equal_over_rows_is_compared(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    equal = {"split_sha256": "a", "held_out_sha256": "b"}

    def with_plain(**changes: Any) -> list[str]:
        lines = [line(small, "swap", 1, 0.3, 0.1, **equal), line(small, "plain", 1, 0.3, 0.1, **{**equal, **changes})]
        return unequal(of_experiment(small, lines))

    assert with_plain() == [] == with_plain(split_sha256="")
    for changes in ({"split_sha256": "c"}, {"held_out_sha256": "c"}, {"steps": 7}):
        assert len(with_plain(**changes)) == 1, changes
    assert with_plain(steps=7, state="failed") == [], "a run that a gate ended is a result"
    other_seed = [line(small, "swap", 1, 0.3, 0.1, **equal), line(small, "plain", 2, 0.3, 0.1, split_sha256="c")]
    assert unequal(of_experiment(small, other_seed)) == []


TUNED = (
    TEXT.replace("local_steps: 4}", "local_steps: 4, tuning_rows: 8}")
    + """\
tuning:
  seeds: [9]
  grids: {optimiser.learning_rate: [0.001, 0.002]}
  families: {all: {rows: [plain, swap]}}
"""
)


def test_programs_that_differ_are_a_doubt_which_names_rows_trials_and_choices(tmp_path: Path) -> None:
    of = experiment(TUNED, tmp_path)
    one, other = {"sha256": "a" * 64, "torch": "2.0"}, {"sha256": "b" * 64, "torch": "2.0"}
    knobs = (("optimiser.learning_rate", 0.002),)
    chosen = Frozen("all", "D", knobs, (0.001, 0.002), (0.1, 0.2), True, one)
    trials = [
        {**line(of, "plain", 9, 0.2, 0.2), "trial": True, "program": one, "design_sha256": digest_of(of, cell)}
        for cell in trials_behind(of, [chosen])
    ]
    cells = {
        row: {**line(of, row, 1, 0.2, 0.2), "program": one, "design_sha256": digest_of(of, Cell("D", row, 1, knobs))}
        for row in ("plain", "swap")
    }

    def doubt(*lines: dict[str, Any]) -> list[str]:
        return doubts(of, lines)

    frozen = frozen_line(of, chosen)
    assert len(trials) == 2 and doubt(frozen, *trials, *cells.values()) == []
    for changed, name in (
        ([frozen, *trials, cells["plain"], {**cells["swap"], "program": other}], "D/swap"),
        ([frozen, *trials, cells["plain"], {**cells["swap"], "program": {**one, "torch": "2.1"}}], "D/swap"),
        ([frozen, trials[0], {**trials[1], "program": other}, *cells.values()], "trials of D/plain"),
        ([{**frozen, "program": other}, *trials, *cells.values()], "choice for D/all"),
    ):
        (sentence,) = doubt(*changed)
        assert "2 versions" in sentence and re.search(rf": {name}[;)]", sentence), sentence
    # a trial that no choice of this design comes from is no part of it
    assert doubt(frozen, *trials, *cells.values(), {**trials[0], "program": other, "design_sha256": "c"}) == []


def test_the_digest_of_the_program_is_of_all_six_packages_and_their_rulesets(tmp_path: Path) -> None:
    names = [*(f"{package}/a.py" for package in PACKAGES), "policies/rulesets/b.yaml"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    seen = {digest_of_code(tmp_path)}
    for name in names:
        (tmp_path / name).write_text("changed")
        seen.add(digest_of_code(tmp_path))
    assert len(seen) == 1 + 6 + 1
    (tmp_path / "silo" / "notes.txt").write_text("no code")
    assert digest_of_code(tmp_path) in seen


def test_hours_are_those_of_the_row_else_of_the_method_else_of_the_file(tmp_path: Path) -> None:
    several = experiment(SEVERAL + "seconds_per_step: {self-swap: 3}\n", tmp_path)
    known = of_experiment(several, [line(several, "swap", 1, 0.3, 0.1, "W5", steps=40, seconds=80.0)])
    cells = [Cell("W5", "swap", 1), Cell("W20", "swap", 1), Cell("W20", "other", 1)]
    seconds = [80, 40 * 2, 40 * 3 + 2 * several.seconds_per_round]
    for cell, expected in zip(cells, seconds, strict=True):
        assert hours_of(several, [cell], known, 1) == pytest.approx(expected / 3600)
    assert hours_of(several, cells, known, 2) == pytest.approx(sum(seconds) / 2 / 3600)
    # a seed of which nothing is known: its base model is built first, once
    base = 300 * SECONDS_PER_BASE_STEP
    assert hours_of(several, [Cell("W5", "swap", 2), Cell("W5", "swap", 2)], known, 1) == pytest.approx(
        (base + 2 * 80) / 3600
    )
    unknown = 40 * SECONDS_PER_STEP + 8 * several.seconds_per_round
    assert hours_of(several, [Cell("W5", "swap", 2)], {}, 1) == pytest.approx((base + unknown) / 3600)


def test_results_of_another_design_count_for_nothing(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    kept = line(small, "swap", 1, 0.5, 0.2)
    changed = experiment(TEXT.replace("local_steps: 4", "local_steps: 5"), tmp_path)
    assert list(of_experiment(small, [kept])) == [Cell("D", "swap", 1)]
    assert of_experiment(changed, [kept]) == {}
    # the newest of a cell counts
    again = {**kept, "seconds": 2.0}
    assert of_experiment(small, [kept, again])[Cell("D", "swap", 1)]["seconds"] == 2.0


FILES = """\
experiment: files
settings:
  F: {questions: files, data: {files: [data/a.jsonl], verifier: exact}, model: {path: models/m}, rounds: 1,
    local_steps: 2}
seeds: [1]
rows: {swap: {method: pubswap}}
"""


def test_a_design_with_files_is_what_is_in_them_wherever_the_experiment_lies(tmp_path: Path) -> None:
    def digest(name: str, text: str = FILES) -> str:
        folder = tmp_path / name
        return digest_of(experiment(text, folder), Cell("F", "swap", 1))

    for name in ("one", "other"):
        (tmp_path / name / "data").mkdir(parents=True)
        model = tmp_path / name / "models" / "m"
        model.mkdir(parents=True)
        (tmp_path / name / "data" / "a.jsonl").write_text("first\n")
        (model / "config.json").write_text('{"model_type": "qwen2"}')
        (model / "tokenizer.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
    before = digest("one")
    assert digest("other") == before
    renamed = tmp_path / "other" / "data" / "b.jsonl"
    (tmp_path / "other" / "data" / "a.jsonl").rename(renamed)
    seen = [before, digest("other", FILES.replace("a.jsonl", "b.jsonl")), digest("other")]
    (tmp_path / "one" / "data" / "a.jsonl").write_text("other\n")
    seen.append(digest("one"))
    (tmp_path / "one" / "models" / "m" / "model.safetensors").write_bytes(b"other weights")
    seen.append(digest("one"))
    assert len(set(seen)) == len(seen), "another name, no file, another content, other weights"


def test_a_table_has_means_over_seeds_in_every_form(tmp_path: Path) -> None:
    small = experiment(tmp_path=tmp_path)
    (row,) = table_rows(small, results(small, {"swap": [0.3, 0.4, 0.5, 0.4]}), small.all_tables()["D"])
    shown = dict(zip(HEADINGS, row, strict=True))
    assert (shown["row"], shown["seeds"], shown["steps"], shown["refused"]) == ("swap", "4 of 4", "8", "0")
    assert (shown["before"], shown["after"], shown["greedy"], shown["worst topic"]) == ("10.0", "40.0", "40.0", "20.0")
    assert (shown["k tokens drawn"], shown["k trained"], shown["no signal"]) == ("1.0", "2.0", "50.0")
    # half a megabyte of four silos; 30 points more
    assert (shown["MB up"], shown["MB down"], shown["points / MB"]) == ("0.12", "0.00", "240")
    assert (shown["best"], shown["worst silo"], shown["apart"]) == ("", "", "")
    assert (shown["public steps"], shown["k bits at most"]) == ("", ""), "an earlier version noted neither"
    noted = {
        cell: {**each, "public_steps": 4, "capacity_bits": {"a": 1000.0, "b": 500.0}}
        for cell, each in results(small, {"swap": [0.3, 0.4, 0.5, 0.4]}).items()
    }
    (row,) = table_rows(small, noted, small.all_tables()["D"])
    shown = dict(zip(HEADINGS, row, strict=True))
    assert (shown["public steps"], shown["k bits at most"]) == ("4", "1.5")
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
    assert [str(cell) for cell in cells_of(small)][:3] == ["D/swap/1", "D/plain/1", "D/swap/2"]
    assert cell_named(small, "D/swap/3") == Cell("D", "swap", 3)
    for name in ("D/swap/5", "D/other/1", "E/swap/1", "swap/1", "D/swap", "D/swap/"):
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
        ("{method: pubswap}", "{method: worked-key-swap}"),
        ("{method: pubswap}", "{method: fedavg-grpo, ruleset: none}"),
        ("local_steps: 4}", "local_steps: 4, plan: {method: pubswap}}"),
        ("local_steps: 4}", "local_steps: 4, from: E}"),
        ("local_steps: 4}", "local_steps: 4, from: D}"),
        ("C1: {setting: D,", "C1: {setting: E,"),
        ("C1: {setting: D,", "C1: {setting: [D, D],"),
        ("C1: {setting: D,", "C1: {setting: D, share_of: plain,"),
        ("C1: {setting: D,", "C1: {setting: D, seeds: 5-4,"),
        ("metric: worst_topic", "metric: drift_between"),
        ("{method: pubswap}", "{method: base}, third: {method: based}"),
        ("against: plain}", "against: swap}"),
        ("D: {", "D: {questions: two-step, silos: 3, "),
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
    plain, swap = (plan_of(small, Cell("D", row, 2), lengths) for row in ("plain", "swap"))
    assert swap["objective"] == {"kl_coefficient": 0.0, "proximal_mu": 0.1}
    different = {name for name in plain if plain[name] != swap[name]}
    assert different == {"method", "objective", "swap_period"}
    assert digest_of(small, Cell("D", "plain", 2)) != digest_of(small, Cell("D", "plain", 3))
    assert json.dumps(plain) and math.isfinite(plain["optimiser"]["learning_rate"])

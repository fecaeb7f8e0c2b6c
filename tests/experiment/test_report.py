"""The page of results, made from a small file of lines by the command itself."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli.experiment import app
from fedsilo.experiment.design import Cell, Experiment, digest_of, read_experiment
from fedsilo.experiment.plots import curve_of
from fedsilo.experiment.results import of_experiment, read_results
from fedsilo.experiment.running import locked
from fedsilo.experiment.tuning import Frozen, frozen_line
from fedsilo.protocol.errors import ConflictError

ROOT = Path(__file__).parents[2]
TEXT = """\
experiment: small
about: What a page says.
settings:
  W: {questions: two-step, rounds: 2, local_steps: 4, tuning_rows: 16}
  V: {from: W, local_steps: 8}
seeds: 1-4
rows:
  base: {method: base}
  plain: {method: public-no-swap}
  swap: {method: pubswap}
  own: {method: self-swap}
  all: {method: fedavg-grpo, pooled: true}
claims:
  P1: {setting: W, row: swap, against: plain, metric: zero_variance_share, direction: below, says: "Fewer groups\\
    without signal."}
  P2: {setting: W, row: swap, against: plain}
  P3: {setting: W, row: swap, against: own, direction: equivalent}
  P4: {setting: W, row: plain, against: swap}
  P5: {setting: W, row: own, against: plain, seeds: 1-5}
  E1: {setting: W, row: own, against: plain, share_of: swap, exploratory: true}
  E2: {setting: W, row: own, against: plain, metric: drift_between, exploratory: true}
  E3: {setting: [W, V], row: own, against: plain, exploratory: true}
  E4: {setting: W, row: own, against: plain, metric: gain_per_megabyte, exploratory: true}
tables:
  rows: {setting: W, says: All of them., figures: [pass_at_1, PublicStep.alpha_mean, PublicStep.omega]}
tuning:
  seeds: [201]
  grids: {optimiser.learning_rate: [0.001, 0.002]}
  families: {public: {rows: [plain, swap, own]}}
"""
KNOBS = (("optimiser.learning_rate", 0.002),)
VALUES = {
    "plain": [0.2, 0.3, 0.25, 0.2],
    "swap": [0.3, 0.41, 0.36, 0.29],
    "own": [0.301, 0.411, 0.361, 0.291],
    "all": [0.5, 0.5, 0.6, 0.5],
}


def line(of: Experiment, row: str, seed: int, after: float) -> dict[str, Any]:
    knobs = () if row == "all" else KNOBS
    measured = [
        {
            "pass_at_1": value,
            "pass_at_1_greedy": value,
            "topics": {"a": value},
            "own_task": value,
            "worst_silo": value,
            "apart": {"factors": value},
        }
        for value in (0.1, 0.15, after)
    ]
    return {
        "setting": "W", "row": row, "seed": seed, "design_sha256": digest_of(of, Cell("W", row, seed, knobs)),
        "rounds": measured, "best": {"round": 2, "pass_at_1": after}, "steps": 8, "silos": 4, "state": "finished",
        "generated_tokens": 4000, "trained_tokens": 8000, "refused": {}, "seconds": 1.0,
        "bytes": {"up": {"lora.factors": 500_000}, "down": {"global.adapter": 500_000}},
        "zero_variance_share": 1 - after, "public_steps": 4,
        "steps_at": {"PublicStep": [[1, 2], [1, 4], [2, 2], [2, 4]]},
        "curves": {"PublicStep": {"alpha_mean": [0.2, 0.1, None, 0.4], "zero_variance_share": [0.5] * 4}},
    }  # fmt: skip


def command(*words: object) -> tuple[int, Any]:
    """Exit code and envelope of `fedsilo experiment WORDS --json`."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An experiment with its results, and the page that is made of them."""
    tmp_path = tmp_path_factory.mktemp("report")
    path, results = tmp_path / "small.yaml", tmp_path / "small.results.jsonl"
    path.write_text(TEXT)
    of = read_experiment(path)
    frozen = Frozen("public", "W", KNOBS, (0.001, 0.002), (0.25, 0.5), True)
    lines = [frozen_line(of, frozen)]
    lines += [line(of, row, seed, value) for row, values in VALUES.items() for seed, value in enumerate(values, 1)]
    results.write_text("".join(json.dumps(each) + "\n" for each in lines))
    out = tmp_path / "page" / "results.md"
    out.parent.mkdir()
    code, answer = command("report", path, "--out", out)
    assert code == 0 and answer["data"]["page"] == str(out), answer
    return path, out


def test_a_page_has_one_line_for_each_claim_and_all_pictures_that_it_names(files: tuple[Path, Path]) -> None:
    path, out = files
    page = out.read_text()
    found = dict(re.findall(r"^- \*\*(\w+): ([^.]+)\.\*\*", page, re.MULTILINE))
    assert found == {
        "P1": "shown", "P2": "shown", "P3": "equivalent", "P4": "contradicted", "P5": "unfinished", "E1": "exploratory",
        "E2": "exploratory", "E3": "unfinished", "E4": "exploratory",
    }  # fmt: skip
    by_claim = {each.split(":")[0][4:]: each for each in page.splitlines() if each.startswith("- **")}
    assert "-10.2 [" in by_claim["P1"] and "4 of 4 seeds (1 to 4)" in by_claim["P1"]
    assert f"`fedsilo experiment run {path} --claim P2`" in by_claim["P2"] and "adjusted p" in by_claim["P2"]
    assert "4 of 5 seeds" in by_claim["P5"] and "1.01 of swap [" in by_claim["E1"]
    pictures = re.findall(r"\((pictures/[^)]+\.svg)\)", page)
    assert all((out.parent / each).read_text().startswith("<?xml") for each in pictures)
    assert {"pictures/results/claims.svg", "pictures/results/claim-P2.svg"} <= set(pictures)
    assert "pictures/results/rows-PublicStep.alpha_mean.svg" in pictures
    # a claim has a picture of its own metric, or none: not of a slope, nor of what a whole run has alone
    shown = {name for name in by_claim if f"claim-{name}.svg" in by_claim[name]}
    assert shown == {"P1", "P2", "P3", "P4", "P5", "E1", "E2"}
    for name, metric in (("P1", "PublicStep.zero_variance_share"), ("P2", "pass_at_1"), ("E2", "drift_between")):
        assert metric in (out.parent / f"pictures/results/claim-{name}.svg").read_text()
    assert not any("omega" in each for each in pictures), "no line has it"
    drawn = sorted(each.name for each in (out.parent / "pictures" / "results").iterdir())
    assert drawn == sorted({Path(each).name for each in pictures})


@pytest.mark.slow
def test_a_page_has_the_rows_and_what_was_tuned(files: tuple[Path, Path]) -> None:
    path, out = files
    page = out.read_text()
    assert "| public | W | optimiser.learning_rate | 0.002 | 0.001: 25.0, 0.002: 50.0 | yes |" in page
    rows = {cells[1].strip(): cells for each in page.splitlines() if len(cells := each.split("|")) > 12}
    assert {"base", "plain", "swap", "own", "all (pooled)"} <= rows.keys()
    assert rows["swap"][3].strip() == "10.0" and rows["swap"][4].strip() == "34.0"
    assert rows["base"][4].strip() == "10.0" and "\n(pooled): no federation" in page
    headings = [each.strip() for each in next(cells for name, cells in rows.items() if name == "row")]
    by_name = {name: dict(zip(headings, map(str.strip, cells), strict=True)) for name, cells in rows.items()}
    assert [by_name[name]["knobs of"] for name in ("swap", "plain", "all (pooled)")] == ["W/plain", "W/plain", ""]
    assert by_name["swap"]["public steps"] == "4" and by_name["base"]["public steps"] == ""
    again = out.read_bytes()
    assert command("report", path, "--out", out)[0] == 0
    assert out.read_bytes() == again


def test_curves_of_steps_are_drawn_at_the_steps_of_the_whole_run(files: tuple[Path, Path]) -> None:
    path, _ = files
    of = read_experiment(path)
    results = of_experiment(of, read_results(path.with_suffix(".results.jsonl")))
    points = curve_of(of, results, of.tables["rows"], "swap", "PublicStep.alpha_mean")
    # public steps 2 and 4 of two rounds of 4 steps; the third has no such figure
    assert points == [(2, 0.2, 0.2, 0.2), (4, 0.1, 0.1, 0.1), (8, 0.4, 0.4, 0.4)]
    rounds = curve_of(of, results, of.tables["rows"], "swap", "drift_between")
    assert [point[:2] for point in rounds] == [(0, 0.1), (1, 0.15), (2, pytest.approx(0.34))]
    # a run that ended early is no part of a curve
    short = Cell("W", "swap", 1)
    results[short] = {**results[short], "state": "failed", "rounds": results[short]["rounds"][:2]}
    after = curve_of(of, results, of.tables["rows"], "swap", "pass_at_1")[-1]
    assert after[:2] == (2, pytest.approx(100 * (0.41 + 0.36 + 0.29) / 3))


def test_rows_that_no_federation_can_carry_out_are_marked_in_pictures(files: tuple[Path, Path]) -> None:
    _, out = files
    assert "all (pooled)" in (out.parent / "pictures/results/rows-pass_at_1.svg").read_text()


def test_without_results_there_is_no_page(files: tuple[Path, Path], tmp_path: Path) -> None:
    (path, _), out = files, tmp_path / "page.md"
    none = tmp_path / "none.jsonl"
    code, answer = command("report", path, "--out", out, "--results", none)
    assert code != 0 and "experiment run" in answer["error"]["hint"] and not out.exists()
    assert command("report", path, "--out", tmp_path / "page.txt")[0] == 2


def test_tables_and_curves_are_made_of_the_same_lines(files: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = files
    shown = command("table", path)[1]["data"]
    assert [row["row"] for row in shown["tables"]["rows"]] == ["base", "plain", "swap", "own", "all (pooled)"]
    assert {row["claim"]: row["verdict"] for row in shown["claims"]}["P3"] == "equivalent"
    picture = tmp_path / "alpha.svg"
    options = ("--out", picture, "--figure")
    assert command("plot", path, *options, "PublicStep.alpha_mean")[0] == 0
    assert "swap" in picture.read_text()
    code, refused = command("plot", path, *options, "PublicStep.omega")
    assert code == 2 and "PublicStep.alpha_mean" in refused["error"]["hint"]
    assert command("plot", path, "--out", picture, "--table", "none")[0] == 2


def test_of_two_runs_on_one_file_of_results_the_second_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    (path, _), results = files, tmp_path / "new" / "results.jsonl"
    with locked(results):
        code, answer = command("run", path, "--results", results)
        assert code == ConflictError.exit_code and str(os.getpid()) in answer["error"]["message"]
        assert "--results" in answer["error"]["hint"] and not results.exists()
        with locked(tmp_path / "other.jsonl"):
            pass
    with locked(results):
        pass


@pytest.mark.parametrize("name", ["plan", "run", "table"])
def test_a_wrong_file_is_told_with_line_and_hint(name: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(TEXT.replace("method: self-swap", "method: swap-self"))
    code, answer = command(name, path)
    error = answer["error"]
    place = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "swap-self" in text)
    assert code == 2 and error["code"] == "INVALID_INPUT"
    assert f"{path}:{place}: " in error["message"] and "self-swap" in error["hint"]


@pytest.mark.slow
def test_the_page_of_results_is_what_its_lines_say(tmp_path: Path) -> None:
    file, page, kept = "examples/experiments/two_step.yaml", tmp_path / "results.md", ROOT / "docs" / "results.md"
    result = CliRunner().invoke(app, ["report", str(ROOT / file), "--out", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text().replace(str(ROOT / file), file).replace(str(page), "docs/results.md")
    assert text == kept.read_text()
    made, there = ({each.name for each in (one.parent / "pictures" / "results").iterdir()} for one in (page, kept))
    assert made == there

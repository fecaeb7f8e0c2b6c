"""How knobs are chosen, on planted values of trials: who is tried, when grids grow, and what is frozen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.experiment.design import Cell, Experiment, cells_of, digest_of, plan_of, read_experiment
from fedsilo.experiment.results import of_experiment, read_results, trials_of
from fedsilo.experiment.running import run_experiment
from fedsilo.experiment.tuning import (
    Frozen,
    Search,
    first_trials,
    frozen_line,
    frozen_of,
    places_of,
    search,
    with_knobs,
)
from fedsilo.protocol.errors import OperationError, UsageError

TEXT = """\
experiment: tuned
settings:
  W: {rounds: 2, local_steps: 4, tuning_rows: 32}
  late: {from: W, local_steps: 8}
  like: {from: W, swap_period: 4, tuned_as: W}
seeds: 1-2
rows:
  base: {method: base}
  private: {method: fedavg-grpo}
  prox: {method: fedavg-grpo, plan: {objective: {proximal_mu: 0.5}}}
  plain: {method: public-no-swap}
  swap: {method: pubswap}
claims:
  C1: {setting: W, row: swap, against: plain}
  C2: {setting: late, row: swap, against: plain}
  C3: {setting: like, row: swap, against: plain}
  C4: {setting: W, row: prox, against: private}
tables:
  none: {setting: W, rows: [base], seeds: [1]}
tuning:
  seeds: [201, 202]
  grids:
    optimiser.learning_rate: [0.001, 0.002, 0.004]
    mu: [0.01, 0.1, 1.0]
  families:
    private: {rows: [private]}
    prox: {rows: [prox], knob: objective.proximal_mu, grid: mu, after: private}
    public: {rows: [plain, swap], trial: swap}
"""
RATE, MU = "optimiser.learning_rate", "objective.proximal_mu"


def experiment(tmp_path: Path, text: str = TEXT) -> Experiment:
    path = tmp_path / "tuned.yaml"
    path.write_text(text)
    return read_experiment(path)


def played(of: Experiment, value: Callable[[Cell], float]) -> tuple[Search, list[list[Cell]]]:
    """Run what the search asks for until it has chosen; beside it what it asked for each time."""
    values: dict[str, float] = {}
    asked = []
    while (found := search(of, values)).missing:
        asked.append(list(found.missing))
        values |= {digest_of(of, cell): value(cell) for cell in found.missing}
    return found, asked


def of_rate(best: float) -> Callable[[Cell], float]:
    """Values that are highest at this learning rate, and at mu = .1."""

    def value(cell: Cell) -> float:
        knobs = dict(cell.knobs)
        return 1 / (1 + abs(knobs[RATE] / best - 1)) + 0.01 * (knobs.get(MU) == 0.1) + cell.seed / 1e6

    return value


def test_each_family_is_tried_equally_often_under_each_setting(tmp_path: Path) -> None:
    of = experiment(tmp_path)
    assert places_of(of) == [("private", "W"), ("prox", "W"), ("public", "W"), ("public", "late")]
    found, asked = played(of, of_rate(0.002))
    first, second = asked
    assert {cell.row for cell in first} == {"private", "swap"}, "the other family waits for a learning rate"
    assert {cell.row for cell in second} == {"prox"}
    assert {dict(cell.knobs)[RATE] for cell in second} == {0.002}
    per_place: dict[tuple[str, str], int] = {}
    for cell in (*first, *second):
        assert cell.trial and cell.seed in (201, 202)
        per_place[cell.row, cell.setting] = per_place.get((cell.row, cell.setting), 0) + 1
    assert set(per_place.values()) == {3 * 2} and len(first_trials(of)) == len(first) + len(second)
    chosen = {(each.family, each.setting): each for each in found.chosen}
    assert chosen["public", "late"].knobs == ((RATE, 0.002),) and not chosen["public", "late"].at_edge
    assert chosen["prox", "W"].knobs == ((RATE, 0.002), (MU, 0.1))
    assert chosen["prox", "W"].means[1] == max(chosen["prox", "W"].means)


def test_an_optimum_at_an_edge_widens_every_grid_at_that_side(tmp_path: Path) -> None:
    found, asked = played(experiment(tmp_path), of_rate(0.0005))
    grids = {each.family: each.grid for each in found.chosen}
    assert grids["public"] == (0.00025, 0.0005, 0.001, 0.002, 0.004) == grids["private"]
    assert grids["prox"] == (0.0001, 0.001, 0.01, 0.1, 1.0), "as many values, though its own optimum is inside"
    assert not any(each.at_edge for each in found.chosen)
    tried = {(cell.row, cell.setting, cell.seed, cell.knobs) for cells in asked for cell in cells}
    assert len(tried) == sum(map(len, asked)), "no trial is asked for twice"


def test_an_edge_that_stays_is_said(tmp_path: Path) -> None:
    found, _ = played(experiment(tmp_path), of_rate(1e-9))
    public = next(each for each in found.chosen if each.family == "public")
    assert public.at_edge and len(public.grid) == 3 + 2 and public.knobs == ((RATE, public.grid[0]),)


def test_what_is_frozen_is_in_the_plan_and_the_digest_of_evaluation_cells(tmp_path: Path) -> None:
    of = experiment(tmp_path)
    found, _ = played(of, of_rate(0.002))
    lines = [json.loads(json.dumps(frozen_line(of, each))) for each in found.chosen]
    frozen = frozen_of(of, lines)
    assert {place: each.knobs for place, each in frozen.items()} == {
        (each.family, each.setting): each.knobs for each in found.chosen
    }
    knobs = {place: each.knobs for place, each in frozen.items()}
    plain = Cell("like", "swap", 1)
    whole = with_knobs(of, knobs, plain)
    assert whole is not None and whole.knobs == ((RATE, 0.002),), "as the setting that it is tuned as"
    assert plan_of(of, whole, {})["optimiser"] == {"learning_rate": 0.002}
    assert plan_of(of, whole, {})["evaluation"]["prompts"] == 512
    trial = first_trials(of)[0]
    assert plan_of(of, trial, {})["evaluation"]["prompts"] == 32
    assert len({digest_of(of, cell) for cell in (plain, whole, trial)}) == 3
    assert with_knobs(of, {}, plain) is None, "nothing is evaluated before its knobs are chosen"
    line = {"design_sha256": digest_of(of, whole), "rounds": [{"pass_at_1": 0.1}]}
    assert list(of_experiment(of, [line])) == []
    assert plain in of_experiment(of, [*lines, line])
    # another grid is another choice
    changed = experiment(tmp_path, TEXT.replace("0.004]", "0.008]"))
    assert frozen_of(changed, lines) == {}


def test_trials_count_by_what_they_reach_and_nothing_measured_is_zero(tmp_path: Path) -> None:
    of = experiment(tmp_path)
    one, other = first_trials(of)[:2]
    lines = [
        {
            "design_sha256": digest_of(of, one),
            "trial": True,
            "rounds": [{"pass_at_1": 0.1}, {"pass_at_1": 0.4}],
            "state": "finished",
        },
        {
            "design_sha256": digest_of(of, other),
            "trial": True,
            "rounds": [{"pass_at_1": 0.1}, {"pass_at_1": None}],
            "state": "finished",
        },
        {"design_sha256": "c", "trial": False, "rounds": [{"pass_at_1": 0.9}], "state": "finished"},
    ]
    assert trials_of(of, lines) == {digest_of(of, one): 0.4, digest_of(of, other): 0.0}


CHAIN = """\
experiment: chain
settings:
  W: {rounds: 2, local_steps: 4, tuning_rows: 32}
  V: {rounds: 2, local_steps: 4, tuning_rows: 32}
seeds: 1-2
rows:
  swap: {method: pubswap}
  private: {method: fedavg-grpo}
  prox: {method: fedavg-grpo, plan: {objective: {proximal_mu: 0.5}}}
  clipped: {method: fedavg-grpo, plan: {objective: {proximal_mu: 0.5, clip_low: 0.2}}}
claims:
  C1: {setting: W, row: clipped, against: swap}
  C2: {setting: V, row: clipped, against: swap}
tuning:
  seeds: [201]
  grids:
    optimiser.learning_rate: [0.001, 0.002, 0.004]
    mu: [0.01, 0.1, 1.0]
    clip: [0.1, 0.2, 0.3]
  families:
    swap: {rows: [swap]}
    private: {rows: [private]}
    prox: {rows: [prox], knob: objective.proximal_mu, grid: mu, after: private}
    clipped: {rows: [clipped], knob: objective.clip_low, grid: clip, after: prox}
  widenings: 0
"""


def planted_run(
    folder: Path, text: str, say: Callable[[Path, str], None]
) -> tuple[Experiment, list[dict[str, object]]]:
    """Freeze what planted trials lead to, with every cell planted that it then leads to, so that nothing is started;
    returns the lines of results. say: called with the file and each line of progress."""
    of = experiment(folder, text)
    values: dict[str, float] = {}
    while missing := search(of, values).missing:
        values |= {digest_of(of, cell): sum(dict(cell.knobs).values()) for cell in missing}
    chosen = search(of, values).chosen
    assert len(chosen) == len(places_of(of)), "a choice for each place, or it would be looked for again for ever"
    knobs = {(each.family, each.setting): each.knobs for each in chosen}
    evaluated = [whole for cell in cells_of(of) if (whole := with_knobs(of, knobs, cell)) is not None]
    lines = [
        {"design_sha256": digest, "trial": True, "state": "finished", "rounds": [{"pass_at_1": value}]}
        for digest, value in values.items()
    ] + [{"design_sha256": digest_of(of, cell), "state": "finished", "rounds": [{}]} for cell in evaluated]
    results = folder / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run_experiment(
        folder / "tuned.yaml", results, jobs=1, claim="", named=(), say=lambda progress: say(results, progress)
    )
    assert (ran.done, ran.failed) == (0, 0)
    return of, read_results(results)[len(lines) :]


def test_three_families_that_follow_each_other_and_two_settings_of_equal_content_are_frozen(tmp_path: Path) -> None:
    of, frozen = planted_run(tmp_path, CHAIN, lambda results, progress: None)
    families = ["swap", "private", "prox", "clipped"]
    assert places_of(of) == [(family, setting) for family in families for setting in ("V", "W")], (
        "also those that no cell of the setting asks for"
    )
    assert {(line["frozen"], line["setting"]) for line in frozen} == set(places_of(of))
    best = [["optimiser.learning_rate", 0.004], ["objective.proximal_mu", 1.0], ["objective.clip_low", 0.3]]
    assert [line["knobs"] for line in frozen if line["frozen"] == "clipped"] == [best, best]
    # one line is enough for both settings, which are one design, and their trials are one as well
    assert set(frozen_of(of, [line for line in frozen if line["setting"] == "W"])) == set(places_of(of))
    missing = search(of, {}).missing
    assert len({digest_of(of, cell) for cell in missing}) == len(missing) == 2 * 3


def test_tuning_that_goes_no_further_stops(tmp_path: Path) -> None:
    """Whoever takes away what was frozen would else have it frozen again for ever."""
    first: list[bytes] = []

    def take_away(results: Path, progress: str) -> None:
        lines = results.read_bytes().splitlines(keepends=True)
        first.append(b"".join(line for line in lines if b'"frozen"' not in line))
        results.write_bytes(first[-1])

    with pytest.raises(OperationError, match="no further"):
        planted_run(tmp_path, CHAIN, take_away)
    assert len(first) == 8, "each place was frozen once"


def test_a_setting_that_is_added_has_all_families_tuned_anew(tmp_path: Path) -> None:
    """An optimum at an edge under it would widen the grids of all, of which those before had fewer trials."""
    of = experiment(tmp_path)
    found, _ = played(of, of_rate(0.002))
    lines = [frozen_line(of, each) for each in found.chosen]
    another = "  late: {from: W, local_steps: 8}\n"
    for setting, kept in (
        ("  unused: {from: W, local_steps: 16}\n", True),
        ("  later: {from: W, local_steps: 16}\n", False),
    ):
        text = TEXT.replace(another, another + setting)
        if not kept:
            text = text.replace("claims:\n", "claims:\n  C0: {setting: later, row: swap, against: plain}\n")
        assert (len(frozen_of(experiment(tmp_path, text), lines)) == len(lines)) is kept


def test_without_tuning_nothing_is_searched(tmp_path: Path) -> None:
    of = experiment(tmp_path, TEXT[: TEXT.index("tuning:\n")])
    assert search(of, {}) == Search((), ()) and first_trials(of) == [] and places_of(of) == []
    assert all(with_knobs(of, {}, cell) == cell for cell in cells_of(of))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seeds: [201, 202]", "seeds: [2, 202]"),
        ("[0.01, 0.1, 1.0]", "[0.01, 0.1]"),
        ("[0.01, 0.1, 1.0]", "[0.01, 1.0, 0.1]"),
        ("grid: mu", "grid: clip_low"),
        ("after: private", "after: public"),
        ("rows: [plain, swap]", "rows: [plain, private]"),
        ("rows: [plain, swap]", "rows: [plain, none]"),
        ("tuning_rows: 32", "tuning_rows: 0"),
        ("tuned_as: W", "tuned_as: V"),
    ],
)
def test_tuning_that_would_not_be_fair_is_refused_with_its_place(old: str, new: str, tmp_path: Path) -> None:
    assert old in TEXT and isinstance(experiment(tmp_path).tuning, object)
    with pytest.raises(UsageError, match=r"tuned\.yaml:[0-9]+"):
        experiment(tmp_path, TEXT.replace(old, new, 1))


def test_a_choice_says_its_grid_and_means(tmp_path: Path) -> None:
    of = experiment(tmp_path)
    line = frozen_line(of, Frozen("public", "W", ((RATE, 0.002),), (0.001, 0.002), (0.25, 0.5), True))
    assert (line["frozen"], line["grid"], line["means"], line["at_edge"]) == (
        "public",
        [0.001, 0.002],
        [0.25, 0.5],
        True,
    )

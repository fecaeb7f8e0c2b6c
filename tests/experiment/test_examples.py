"""The experiments that come along: each can be planned, and the one that is run here fits into a night."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedsilo.demo.data import examples_folder
from fedsilo.experiment.design import Cell, cells_of, digest_of, read_experiment, require_files
from fedsilo.experiment.running import hours_of
from fedsilo.experiment.tuning import first_trials, places_of
from fedsilo.protocol.errors import NotFoundError

FOLDER = examples_folder() / "experiments"
PAPERS = sorted(FOLDER.glob("pubswap_*.yaml"))


def test_the_claims_of_the_results_fit_into_eight_hours_of_two_cores() -> None:
    experiment = read_experiment(FOLDER / "results.yaml")
    cells = list(cells_of(experiment))
    assert hours_of(experiment, [*first_trials(experiment), *cells], {}, 2) <= 8
    confirmed = {name: claim for name, claim in experiment.claims.items() if not claim.exploratory}
    assert {claim.family for claim in confirmed.values()} == {"P"}
    for name, claim in experiment.claims.items():
        seeds = set(claim.seeds or experiment.seeds)
        asks_for_equality = claim.direction in ("equivalent", "either")
        assert seeds == set(range(101, 117 if asks_for_equality else 109)), name
    # a cell of a claim comes before any that only exploratory claims or tables ask for
    of_claims = {cell for name in confirmed for cell in cells_of(experiment, name)}
    assert set(cells[: len(of_claims)]) == of_claims
    # a row that a claim of the family compares has the trials of a tuning family to itself
    assert experiment.tuning is not None
    tried = {family.trial or family.rows[0] for family in experiment.tuning.families.values()}
    assert {row for claim in confirmed.values() for row in claim.rows} <= tried
    tuned = {row for family in experiment.tuning.families.values() for row in family.rows}
    assert {row for claim in experiment.claims.values() for row in claim.rows} <= tuned
    assert {"W5", "W15", "W30", "W60", "R100"} == {setting for _, setting in places_of(experiment)}


def test_two_files_of_claims_share_neither_seeds_nor_names() -> None:
    """A claim that two files judge on the same seeds would be judged twice, and by two families."""
    one, other = (read_experiment(FOLDER / name) for name in ("results.yaml", "two_step.yaml"))
    seeds = [
        {seed for claim in each.claims.values() for seed in (*claim.seeds, *each.seeds)}
        | set(each.tuning.seeds if each.tuning else ())
        for each in (one, other)
    ]
    assert seeds[0].isdisjoint(seeds[1]) and one.claims.keys().isdisjoint(other.claims)


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_the_papers_settings_are_one_command_away(path: Path) -> None:
    experiment = read_experiment(path)
    hours = hours_of(experiment, list(cells_of(experiment)), {}, 1)
    stated = re.search(r"^# About ([0-9,]+) hours of one card", path.read_text(), re.MULTILINE)
    assert stated is not None and float(stated[1].replace(",", "")) == pytest.approx(hours, rel=0.02)
    steps = {setting.rounds * setting.local_steps for setting in experiment.settings.values()}
    assert all(300 <= each <= 600 for each in steps)
    with pytest.raises(NotFoundError, match=rf"{path.name}:[0-9]+: settings\."):
        require_files(path)


def test_all_four_models_of_the_paper_have_a_file() -> None:
    models = {
        Path(setting.model.path).name
        for path in PAPERS
        for setting in read_experiment(path).settings.values()
        if setting.model is not None
    }
    assert len(models) == 4


def test_a_file_that_names_nothing_newer_keeps_the_digests_of_its_results() -> None:
    """As computed by the version whose files had one setting alone, of this setting, row and seed."""
    experiment = read_experiment(FOLDER / "two_step.yaml")
    first = "4ee42eb8ee469f2a9fbe5c3897b1d24bd4cc5a7bf24ff2f6e8a392b06ff0c034"
    assert digest_of(experiment, Cell("two-step", "balanced", 101)) == first

"""How knobs are chosen: each family of rows has the same number of trials under each setting, on seeds and strings that
the evaluation never sees. What is chosen is frozen as a line of the results, and evaluation cells are made with it.

One knob a family. An optimum at the edge of its grid widens the grids of all families at that side by one value, so
that none has more trials than another, at most `widenings` times; after that the edge stands, and the line says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedsilo.experiment.design import Cell, Experiment, Knobs, Tuning, cells_of, digest_of, plain
from fedsilo.protocol.codec import canonical_json, sha256_hex

Line = Mapping[str, Any]
Place = tuple[str, str]  # family and setting


@dataclass(frozen=True)
class Frozen:
    """What was chosen for a family under a setting.

    Attributes:
        knobs: the family's own last, after those that it takes from another family.
        grid: values that were tried.
        means: pass@1 on the tuning strings, for each: the mean over seeds.
        at_edge: the best value is the lowest or the highest that was tried.
    """

    family: str
    setting: str
    knobs: Knobs
    grid: tuple[float, ...]
    means: tuple[float, ...]
    at_edge: bool


def families_of(experiment: Experiment) -> dict[str, str]:
    """Return the family of each row that has one."""
    tuning = experiment.tuning
    return {row: name for name, family in tuning.families.items() for row in family.rows} if tuning else {}


def places_of(experiment: Experiment) -> list[Place]:
    """Return each family with each setting that it is tuned under: those that its rows have cells in, or that these
    settings take their knobs from. A family comes after the one that it takes knobs from."""
    if experiment.tuning is None:
        return []
    families, names = families_of(experiment), list(experiment.tuning.families)
    places = {
        (families[cell.row], experiment.settings[cell.setting].tuned_as or cell.setting): None
        for cell in cells_of(experiment)
        if cell.row in families
    }
    for family, setting in list(places):
        if (after := experiment.tuning.families[family].after) is not None:
            places[after, setting] = None
    return sorted(places, key=lambda place: (names.index(place[0]), place[1]))


def with_knobs(experiment: Experiment, frozen: Mapping[Place, Knobs], cell: Cell) -> Cell | None:
    """Return the cell with its frozen knobs, which are none where its row has no family; None while they are not
    chosen."""
    family = families_of(experiment).get(cell.row)
    if family is None:
        return cell
    knobs = frozen.get((family, experiment.settings[cell.setting].tuned_as or cell.setting))
    return None if knobs is None else replace(cell, knobs=knobs)


def first_trials(experiment: Experiment) -> list[Cell]:
    """Return as many trials as there are before any grid is widened; the knobs of those that wait for others are not
    yet what they will be."""
    tuning = experiment.tuning
    return [
        cell
        for family, setting in places_of(experiment)
        if tuning is not None
        for value in tuning.grids[tuning.families[family].values]
        for cell in _trials(tuning, family, setting, (), value)
    ]


def _trials(tuning: Tuning, family: str, setting: str, before: Knobs, value: float) -> list[Cell]:
    each = tuning.families[family]
    knobs = (*before, (each.knob, value))
    return [Cell(setting, each.trial or each.rows[0], seed, knobs, trial=True) for seed in tuning.seeds]


@dataclass(frozen=True)
class Search:
    """What tuning waits for, and what it has chosen, of which nothing stands while a trial is missing."""

    missing: tuple[Cell, ...]
    chosen: tuple[Frozen, ...]


def search(experiment: Experiment, values: Mapping[str, float]) -> Search:
    """Return which trials are to be run next, or what was chosen.

    Args:
        experiment: the file.
        values: of the trials that were run, by the digest of each.
    """
    tuning = experiment.tuning
    if tuning is None:
        return Search((), ())
    grids = {knob: tuple(values) for knob, values in tuning.grids.items()}
    for widened in range(tuning.widenings + 1):
        missing: list[Cell] = []
        chosen: dict[Place, Frozen] = {}
        for family, setting in places_of(experiment):
            after, knob = tuning.families[family].after, tuning.families[family].knob
            grid = grids[tuning.families[family].values]
            before = chosen.get((after, setting)) if after is not None else None
            if after is not None and before is None:
                continue  # that family is still tried
            means, whole = [], True
            for value in grid:
                trials = _trials(tuning, family, setting, before.knobs if before else (), value)
                found = [values.get(digest_of(experiment, trial)) for trial in trials]
                missing += [trial for trial, one in zip(trials, found, strict=True) if one is None]
                known = [one for one in found if one is not None]
                whole = whole and len(known) == len(trials)
                means.append(fmean(known) if known else 0.0)
            if whole:
                best = means.index(max(means))
                knobs = (*(before.knobs if before else ()), (knob, grid[best]))
                edge = best in (0, len(means) - 1)
                chosen[family, setting] = Frozen(family, setting, knobs, grid, tuple(means), edge)
        if missing:
            return Search(tuple(missing), ())
        sides = {
            each.means.index(max(each.means)) > 0 for each in chosen.values() if each.at_edge
        }  # True: the high one
        if not sides or widened == tuning.widenings:
            break
        grids = {knob: _widened(values, sides) for knob, values in grids.items()}
    return Search((), tuple(chosen.values()))


def _widened(grid: Sequence[float], sides: Iterable[bool]) -> tuple[float, ...]:
    """Return a grid with one more value at each of these sides, as far from the last as that is from its neighbour."""
    low = [_rounded(grid[0] * grid[0] / grid[1])] if False in sides else []
    high = [_rounded(grid[-1] * grid[-1] / grid[-2])] if True in sides else []
    return (*low, *grid, *high)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# ---- lines of results --------------------------------------------------------------------------------------------


def frozen_line(experiment: Experiment, frozen: Frozen) -> dict[str, Any]:
    """Return the line of results that freezes a choice."""
    return {
        "experiment": experiment.experiment,
        "frozen": frozen.family,
        "setting": frozen.setting,
        "knobs": [list(each) for each in frozen.knobs],
        "grid": list(frozen.grid),
        "means": [round(value, 6) for value in frozen.means],
        "at_edge": frozen.at_edge,
        "tuning_sha256": _tuning_digest(experiment, frozen.family, frozen.setting),
    }


def frozen_of(experiment: Experiment, lines: Iterable[Line]) -> dict[Place, Frozen]:
    """Return what was frozen for this design; what another one froze counts for nothing."""
    places = {_tuning_digest(experiment, *place): place for place in places_of(experiment)}
    return {
        place: Frozen(
            *place,
            tuple((str(knob), float(value)) for knob, value in line["knobs"]),
            tuple(line["grid"]),
            tuple(line["means"]),
            bool(line["at_edge"]),
        )
        for line in lines
        if (place := places.get(line.get("tuning_sha256", ""))) is not None
    }


def _tuning_digest(experiment: Experiment, family: str, setting: str) -> str:
    """Return the digest of all that a choice depends on: the tuning block, the setting, and the rows of the trials."""
    tuning = experiment.tuning
    assert tuning is not None  # noqa: S101  # there are no places without it
    rows = {each.trial or each.rows[0] for each in tuning.families.values()}
    fields = {
        "tuning": tuning.model_dump(mode="json"),
        "family": family,
        "setting": plain(experiment.settings[setting]),
        "rows": {row: plain(experiment.rows[row]) for row in sorted(rows)},
    }
    return sha256_hex(canonical_json(fields))

"""How knobs are chosen: each family of rows has the same number of trials under each setting, on seeds and strings that
the evaluation never sees. What is chosen is frozen as a line of the results, and evaluation cells are made with it.

One knob a family. An optimum at the edge of its grid widens the grids of all families at that side by one value, so
that none has more trials than another, at most `widenings` times; after that the best value may be at an edge, and the
line says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        program: which version of the program chose, as `program.program` says.
    """

    family: str
    setting: str
    knobs: Knobs
    grid: tuple[float, ...]
    means: tuple[float, ...]
    at_edge: bool
    program: Mapping[str, str] = field(default_factory=dict)


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
        after = experiment.tuning.families[family].after
        while after is not None:
            places[after, setting] = None
            after = experiment.tuning.families[after].after
    return sorted(places, key=lambda place: (names.index(place[0]), place[1]))


def with_knobs(experiment: Experiment, frozen: Mapping[Place, Knobs], cell: Cell) -> Cell | None:
    """Return the cell with its frozen knobs, which are none where its row has no family; None while they are not
    chosen."""
    family = families_of(experiment).get(cell.row)
    if family is None:
        return cell
    knobs = frozen.get((family, experiment.settings[cell.setting].tuned_as or cell.setting))
    return None if knobs is None else replace(cell, knobs=knobs)


def knobs_of(experiment: Experiment, setting: str, row: str) -> str:
    """Return whose trials choose the knobs of a row: `SETTING/ROW`; nothing where none are chosen."""
    family = families_of(experiment).get(row)
    if experiment.tuning is None or family is None:
        return ""
    return f"{experiment.settings[setting].tuned_as or setting}/{experiment.tuning.families[family].tried}"


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
    return [Cell(setting, each.tried, seed, knobs, trial=True) for seed in tuning.seeds]


def trials_behind(experiment: Experiment, frozen: Iterable[Frozen]) -> list[Cell]:
    """Return the trials that these choices come from."""
    tuning = experiment.tuning
    return [
        cell
        for each in frozen
        if tuning is not None
        for value in each.grid
        for cell in _trials(tuning, each.family, each.setting, each.knobs[:-1], value)
    ]


@dataclass(frozen=True)
class Search:
    """Trials that are to be run next, and the choices, of which there are none while a trial is missing."""

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
        missing: dict[str, Cell] = {}  # by digest: two settings of equal content have the same trials
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
                by_digest = {digest_of(experiment, trial): trial for trial in trials}
                missing |= {digest: trial for digest, trial in by_digest.items() if digest not in values}
                known = [values[digest] for digest in by_digest if digest in values]
                whole = whole and len(known) == len(trials)
                means.append(fmean(known) if known else 0.0)
            if whole:
                best = means.index(max(means))
                knobs = (*(before.knobs if before else ()), (knob, grid[best]))
                edge = best in (0, len(means) - 1)
                chosen[family, setting] = Frozen(family, setting, knobs, grid, tuple(means), edge)
        if missing:
            return Search(tuple(missing.values()), ())
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
        "program": dict(frozen.program),
        "tuning_sha256": _tuning_digests(experiment)[frozen.family, frozen.setting],
    }


def frozen_of(experiment: Experiment, lines: Iterable[Line]) -> dict[Place, Frozen]:
    """Return what was frozen for this design; what another one froze counts for nothing. A choice holds for every
    setting of equal content."""
    places: dict[str, list[Place]] = {}
    for place, digest in _tuning_digests(experiment).items():
        places.setdefault(digest, []).append(place)
    return {
        place: Frozen(
            *place,
            tuple((str(knob), float(value)) for knob, value in line["knobs"]),
            tuple(line["grid"]),
            tuple(line["means"]),
            bool(line["at_edge"]),
            line.get("program", {}),
        )
        for line in lines
        for place in places.get(line.get("tuning_sha256", ""), ())
    }


def _tuning_digests(experiment: Experiment) -> dict[Place, str]:
    """Return the digest of all that each choice depends on: the tuning block, the setting, the rows of the trials, and
    the places that are tuned, since an optimum at any edge widens the grids of all."""
    tuning, places = experiment.tuning, places_of(experiment)
    if tuning is None:
        return {}
    settings = {name: plain(experiment.settings[name]) for name in {setting for _, setting in places}}
    contents = {name: sha256_hex(canonical_json(fields)) for name, fields in settings.items()}
    fields = {
        "tuning": tuning.model_dump(mode="json"),
        "rows": {row: plain(experiment.rows[row]) for row in sorted({each.tried for each in tuning.families.values()})},
        "places": [list(each) for each in sorted({(family, contents[setting]) for family, setting in places})],
    }
    return {
        (family, setting): sha256_hex(canonical_json({**fields, "family": family, "setting": settings[setting]}))
        for family, setting in places
    }

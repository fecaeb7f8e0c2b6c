"""Branch coverage of what decides, above a floor that only rises: `python -m tools.coverage_floor [--json] [--write]`.

Runs the tests that need no federation under coverage.py and prints, for each area, how many of its branches they take.
Exits with 1 where an area is below its floor in `tools/coverage_floor.json`. `--write` raises floors to what was found;
nothing here lowers one. Takes some ten minutes, so `make test` leaves it out: `make coverage`.

Of exhaustive tests it runs the seeded sample that `make test` runs. Counted is what runs in the process of the tests
themselves; what a process does that they start is not. Does not say whether anything looks at what a branch does: that
the mutants of `python -m benchmarks.controls` do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.source_counts import ROOT

FLOORS = ROOT / "tools" / "coverage_floor.json"
TESTS = ("tests/protocol", "tests/policies", "tests/simulated", "tests/security")
MARKED = "not demo and (not slow or quick)"
# Files of each area, as patterns below the checkout, or one class of a file: the only lines here that a move changes.
AREAS: dict[str, tuple[str, ...]] = {
    "gate": (
        "silo/guard/gate.py",
        "fedsilo/protocol/envelope.py",
        "silo/guard/messages.py",
    ),
    "decisions": (
        "silo/guard/decisions.py",
        "silo/guard/releases.py",
        "silo/guard/shown.py",
        "silo/guard/findings.py",
        "silo/guard/commands.py",
        "silo/guard/run.py::HeldPlans",
    ),
    "engine": ("policies/engine.py",),
    "ledger": ("silo/guard/ledger*.py",),
    "audit": ("fedsilo/audit/*.py",),
}


def files_of(area: str) -> set[str]:
    """Return the files of an area, relative to the checkout. Raises ValueError: a pattern finds none."""
    return {file for file, _ in _parts_of(area)}


def _parts_of(area: str) -> list[tuple[str, str]]:
    """Return (file, class; empty: the whole file) of an area."""
    found = []
    for pattern in AREAS[area]:
        name, _, of_class = pattern.partition("::")
        files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(name))
        if not files:
            raise ValueError(f"no file of the area {area} is named {name}")
        found += [(file, of_class) for file in files]
    return found


def measured(tests: list[str], jobs: int) -> dict[str, Any]:
    """Run the tests, in so many processes, and return coverage.py's report. Raises RuntimeError: a test failed."""
    every = sorted(file for area in AREAS for file in files_of(area))
    with tempfile.TemporaryDirectory(prefix="fedsilo-coverage-") as folder:
        data, report = Path(folder) / "data", Path(folder) / "report.json"
        run = ["run", "--branch", f"--include={','.join(every)}"]
        # No workers of pytest's own, as they would not be counted, and the same examples each time.
        pytest = ["-m", "pytest", "-n0", "-q", "--hypothesis-seed=0", "-p", "no:cacheprovider", "-m", MARKED]
        shares = [f"{data}.{job}" for job in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            ends = [
                pool.submit(_coverage, *run, f"--data-file={share}", *pytest, *test_files(tests)[job::jobs])
                for job, share in enumerate(shares)
            ]
        if any(end.result() != 0 for end in ends):
            raise RuntimeError("a test failed, so what was counted says nothing")
        _coverage("combine", "-q", f"--data-file={data}", *shares)
        _coverage("json", "-q", f"--data-file={data}", "-o", str(report))
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def test_files(tests: list[str]) -> list[str]:
    """Return the files of tests in these folders, and those that are named."""
    folders = [sorted((ROOT / each).rglob("test_*.py")) or [ROOT / each] for each in tests]
    return [str(path.relative_to(ROOT)) for paths in folders for path in paths]


def _coverage(*arguments: str) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "coverage", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode


def by_area(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return branches, those taken and their share in percent, rounded down, of each area.

    Raises:
        RuntimeError: the tests loaded no module of a file, so that its branches are not known.
    """
    areas = {}
    for area in AREAS:
        if missing := sorted(files_of(area) - report["files"].keys()):
            raise RuntimeError(f"the tests never load {', '.join(missing)}")
        branches, taken, missing_branches = 0, 0, []
        for file, of_class in _parts_of(area):
            part = report["files"][file]["classes"][of_class] if of_class else report["files"][file]
            branches += part["summary"]["num_branches"]
            taken += part["summary"]["covered_branches"]
            missing_branches += [f"{file}:{start}->{end}" for start, end in part["missing_branches"]]
        percent = taken * 1000 // branches / 10
        areas[area] = {"branches": branches, "taken": taken, "percent": percent, "missing": missing_branches}
    return areas


def below(areas: Mapping[str, Mapping[str, Any]], floors: Mapping[str, float]) -> list[str]:
    """Return what is wrong, a line for each area below its floor."""
    return [
        f"{area}: {found['percent']} % of the branches, below the floor of {floors[area]} %; "
        f"not taken: {', '.join(found['missing'])}"
        for area, found in areas.items()
        if found["percent"] < floors[area]
    ]


def raised(areas: Mapping[str, Mapping[str, Any]], floors: Mapping[str, float]) -> dict[str, float]:
    """Return the floors that these figures allow, none of them below today's."""
    return {area: max(found["percent"], floors.get(area, 0.0)) for area, found in areas.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", action="store_true", help="raise the floors to what was found")
    parser.add_argument("--jobs", type=int, default=2, help="processes that the tests are dealt out to")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="folders or files instead of all four")
    options = parser.parse_args()
    areas = by_area(measured(options.tests, options.jobs))
    floors = json.loads(FLOORS.read_text())
    if options.write:
        floors = {**floors, "branches": raised(areas, floors["branches"])}
        FLOORS.write_text(json.dumps(floors, indent=2) + "\n")
    faults = below(areas, floors["branches"])
    if options.json:
        sys.stdout.write(json.dumps({"areas": areas, "floors": floors["branches"], "below": faults}) + "\n")
    else:
        for area, found in areas.items():
            floor = floors["branches"][area]
            sys.stdout.write(f"{area:12}{found['taken']:>6} of {found['branches']:>6} branches ")
            sys.stdout.write(f"{found['percent']:>7} %  floor {floor:>5} %\n")
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

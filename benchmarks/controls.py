"""Does the suite notice when a control is missing? `python -m benchmarks.controls --json [--only NAME ...] [--jobs 2]`.

Each rule, each text screen and each step of the gate is removed or inverted in turn, in a copy of this checkout, and
the tests are run against the copy until one fails: first the one that docs/explain/controls.md names, then those
nearest. A mutant that no test fails for is a survivor: a control that could be lost without anybody noticing. A rule
that is removed finds every message good; one that is inverted refuses what it should let pass and lets pass what it
should refuse.

The limit beside the figure: only tests that run in memory or with one process are used (no whole federations), so a
survivor here may still be caught by `tests/loopback`. A mutant here is one control less, not any change of the code.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import control_mutants as named
from benchmarks.mutants import Addition, Edit, Mutant
from policies.model import ScreenName
from policies.rules import RULES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explain" / "controls.md"
FLOOR = ROOT / "tools" / "coverage_floor.json"  # mutants of the best whole run, planted and killed
# The fast ones first: most mutants end there.
STAGES = (
    ("tests/policies/test_rules.py", "tests/policies/test_kinds.py"),
    ("tests/policies",),
    ("tests/simulated",),
    ("tests/security", "tests/protocol"),
)
# What takes part in a site is met at its gate first.
_STAGES_OF_A_SITE = (
    ("tests/simulated/test_gate*.py", "tests/simulated/test_retention.py", "tests/security/test_T20*.py"),
    ("tests/simulated/test_policy*.py", "tests/simulated/test_X05*.py", "tests/protocol/test_codec.py"),
    *STAGES[2:],
    STAGES[1],
)
# Tests of a module itself, before those of the whole gate.
_NEAREST = {
    named.COMMANDS: ("tests/security/test_T36_what_people_signed.py", "tests/security/test_T29_orders*.py"),
    named.ORDERS: ("tests/security/test_T36_what_people_signed.py",),
    named.COORDINATOR_MAIN: ("tests/simulated/test_T41_clocks.py",),
    named.DRIVER: ("tests/security/test_T23_T24*.py", "tests/simulated/test_coordinator*.py"),
    named.POLICY_CHANGE: ("tests/simulated/test_T12*.py", "tests/simulated/test_policy_commands.py"),
    named.CLOCKS: ("tests/policies/test_T41_clocks.py",),
    named.TRANSCRIPT: ("tests/protocol/test_T20*.py", "tests/security/test_T20*.py"),
    named.CODEC: ("tests/protocol/test_codec.py",),
    named.ENGINE: ("tests/policies/test_engine.py",),
    named.SCREENS: ("tests/policies/test_screens.py",),
    named.GUARD_COMMANDS: ("tests/simulated/test_gate_screens.py", "tests/simulated/test_gate_interrupted.py"),
    named.GUARD_POLICY_CHANGE: (
        "tests/simulated/test_policy_in_force.py",
        "tests/simulated/test_T42_older_ledger.py",
    ),
    named.LEDGER: (
        "tests/simulated/test_T42*.py",
        "tests/simulated/test_policy_in_force.py",
        "tests/simulated/test_retention.py",
    ),
    named.LEDGER_CHECK: ("tests/simulated/test_T42*.py",),
    named.DECISIONS: (
        "tests/simulated/test_gate_interrupted.py",
        "tests/simulated/test_T34*.py",
        "tests/simulated/test_gate.py",
    ),
    named.RELEASES: (
        "tests/security/test_T36_what_people_signed.py",
        "tests/simulated/test_gate_screens.py",
        "tests/simulated/test_policy_in_force.py",
    ),
    named.SITE: ("tests/simulated/test_policy*.py",),
    named.ROUND_AGREEMENT: ("tests/security/test_T20*.py",),
}
_SECONDS_MAX = 900  # a mutant that hangs the suite is noticed too
_THREAT = re.compile(r"(?:\b|_)([TXB])([0-9]{1,2})(?![0-9A-Za-z])")
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", "fedsilo-demo", "*.egg-info")

_REMOVED_RULE = """
from dataclasses import replace as _replace
from policies.kind import Judgement as _Judgement
RULES = tuple(
    _replace(rule, check=lambda facts, policy, history: _Judgement("ok", 0, 0, ())) if rule.name == {name!r} else rule
    for rule in RULES
)
"""
_INVERTED_RULE = """
from dataclasses import replace as _replace
_OTHER = {{"ok": "deny", "deny": "ok", "hold": "ok", "look": "deny", "n.a.": "n.a."}}
def _inverted(check):
    def judge(facts, policy, history):
        judgement = check(facts, policy, history)
        return _replace(judgement, outcome=_OTHER[judgement.outcome])
    return judge
RULES = tuple(_replace(rule, check=_inverted(rule.check)) if rule.name == {name!r} else rule for rule in RULES)
"""

_OTHER_SCREEN = """
_screen_texts = screen_texts


def screen_texts(definitions, names, material, texts):
    hits = _screen_texts(definitions, names, material, texts)
    kept = [hit for hit in hits if hit.screen != {name!r}]
    if not {inverted} or {name!r} not in names:
        return kept
    clean = set(range(len(texts))) - {{hit.text for hit in hits if hit.screen == {name!r}}}
    return kept + [Hit(number, {name!r}, "inverted", 1) for number in sorted(clean)]
"""


def step_mutants() -> list[Mutant]:
    return [Edit(f"step: {name}", *function.split(":"), old, new) for name, function, old, new in named.STEPS]


def rule_mutants() -> list[Mutant]:
    removed = [
        Addition(f"rule removed: {rule.name}", named.RULES, _REMOVED_RULE.format(name=rule.name)) for rule in RULES
    ]
    inverted = [
        Addition(f"rule inverted: {rule.name}", named.RULES, _INVERTED_RULE.format(name=rule.name)) for rule in RULES
    ]
    return removed + inverted


def screen_mutants() -> list[Mutant]:
    return [
        Addition(f"screen {word}: {name}", named.SCREENS, _OTHER_SCREEN.format(name=name, inverted=inverted))
        for word, inverted in (("removed", False), ("inverted", True))
        for name in get_args(ScreenName)
    ]


def mutants() -> list[Mutant]:
    return [*step_mutants(), *screen_mutants(), *rule_mutants()]


def noticed_before(page: str) -> dict[str, str]:
    """Return the test that a page names for each mutant."""
    return dict(re.findall(r"^\| [^|]+ \| (.+) \| `(tests/[^`]+)` \|$", page, re.MULTILINE))


def caught_by(tree: Path, stages: tuple[tuple[str, ...], ...] = STAGES, before: str = "") -> str:
    """Return the first failing test of the tree, or nothing; `before` is run first. A suite that hangs has failed."""
    if before and (tree / before.partition("::")[0]).exists():
        code, failed = _tested(tree, [before])
        if code == pytest.ExitCode.TESTS_FAILED:
            return failed
    for stage in stages:
        code, failed = _tested(
            tree, [str(path.relative_to(tree)) for each in stage for path in sorted(tree.glob(each))]
        )
        if code != pytest.ExitCode.OK:
            return failed
    return ""


def _tested(tree: Path, chosen: list[str]) -> tuple[int, str]:
    """Return pytest's exit code and, where that is not 0, the first test that failed, or what else happened."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HYPOTHESIS_PROFILE": "ci"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each mutant compiles every module again
    command = [sys.executable, "-m", "pytest", "-xq", "-n0", "--no-header", "-p", "no:cacheprovider", "--all-cases"]
    try:
        done = subprocess.run(
            [*command, *chosen],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return pytest.ExitCode.INTERRUPTED, f"{' '.join(chosen)} did not end within {_SECONDS_MAX} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return done.returncode, failed[0][:200] if failed else f"{' '.join(chosen)}: exit {done.returncode}"


def copy_of_checkout(folder: Path) -> Path:
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=_NOT_COPIED, symlinks=True)
    where = subprocess.run(
        [sys.executable, "-c", "import policies; print(policies.__file__)"],
        cwd=tree, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not Path(where).is_relative_to(tree):
        raise RuntimeError(f"the copy would test {where}, not itself")
    return tree


def run(wanted: list[Mutant], jobs: int, *, known_good: bool) -> list[dict[str, Any]]:
    """One row per mutant: {mutant, caught_by, seconds}. known_good: the suite was run without a mutant before.

    Raises:
        RuntimeError: the suite fails without any mutant.
    """
    before = noticed_before(PAGE.read_text())
    with tempfile.TemporaryDirectory(prefix="fedsilo-controls-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            trees.put(copy_of_checkout(Path(folder) / str(number)))

        def one(mutant: Mutant) -> dict[str, Any]:
            tree = trees.get()
            begun = time.monotonic()
            original = mutant.apply(tree)
            try:
                stages = STAGES if mutant.module.startswith("policies.") else _STAGES_OF_A_SITE
                nearest = _NEAREST.get(mutant.module)
                caught = caught_by(tree, (nearest, *stages) if nearest else stages, before.get(mutant.name, ""))
            finally:
                mutant.path_in(tree).write_text(original)
                trees.put(tree)
            seconds = round(time.monotonic() - begun, 1)
            sys.stderr.write(f"{mutant.name}: {caught or 'SURVIVED'} ({seconds} s)\n")
            return {"mutant": mutant.name, "caught_by": caught, "seconds": seconds}

        tree = trees.get()
        if not known_good and (failing := caught_by(tree)):
            raise RuntimeError(f"the suite fails without a mutant: {failing}")
        trees.put(tree)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, wanted))


_PAGE_HEAD = """<!-- Written by `python -m benchmarks.controls --page REPORT.json...` from what the runs printed. -->

# Which test notices which missing control

`python -m benchmarks.controls --json` takes each rule, each text screen and each step of the gate and the rounds
away, or turns it round, and runs the suite until a test fails. Of {every} mutants {mutants} were run for this page,
and {caught} of these were noticed ({score:.1%}). {survivors}The first test that noticed each:

| threat | what is taken away | the test that notices |
|---|---|---|
"""


def page(reports: list[dict[str, Any]]) -> str:
    """The rows of several runs as a page; of a mutant that ran twice, the later row counts."""
    rows = {row["mutant"]: row["caught_by"] for report in reports for row in report["figures"]["rows"]}
    survivors = sorted(name for name, caught in rows.items() if not caught)
    lines = []
    for name, caught in rows.items():
        test = caught.removeprefix("FAILED ").removeprefix("ERROR ").partition(" - ")[0].partition("[")[0]
        threats = dict.fromkeys(f"{letter}{int(number)}" for letter, number in _THREAT.findall(caught))
        lines.append((" ".join(threats) or "-", name, f"`{test}`" if test else "**none**"))
    told = f"Survivors: {', '.join(survivors)}. " if survivors else ""
    caught_all = len(rows) - len(survivors)
    head = _PAGE_HEAD.format(
        every=len(mutants()), caught=caught_all, mutants=len(rows), score=caught_all / len(rows), survivors=told
    )
    return head + "".join(f"| {threat} | {name} | {test} |\n" for threat, name, test in sorted(lines, key=_by_threat))


def _by_threat(row: tuple[str, str, str]) -> tuple[str, int, str]:
    found = re.match(r"([A-Z])([0-9]+)", row[0])
    return (found[1], int(found[2]), row[1]) if found else ("~", 0, row[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--only", nargs="+", default=[], help="mutants whose name holds one of these words")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--known-good", action="store_true", help="the suite has just passed: begin with the mutants")
    parser.add_argument("--list", action="store_true", help="name the mutants and stop")
    parser.add_argument("--page", nargs="+", type=Path, metavar="REPORT.json", help="print the page of these runs")
    options = parser.parse_args()
    if options.page:
        sys.stdout.write(page([json.loads(path.read_text()) for path in options.page]))
        return 0
    wanted = [one for one in mutants() if not options.only or any(word in one.name for word in options.only)]
    if options.list:
        sys.stdout.write("\n".join(one.name for one in wanted) + "\n")
        return 0
    begun = time.monotonic()
    rows = run(wanted, options.jobs, known_good=options.known_good)
    survivors = [row["mutant"] for row in rows if not row["caught_by"]]
    score = 1 - len(survivors) / len(rows) if rows else 0.0
    report = {
        "name": "controls",
        "figures": {
            "mutants": len(rows),
            "mutation_score": round(score, 4),
            "survivors": survivors,
            "rows": rows,
        },
        "conditions": {
            "stages": [" ".join(stage) for stage in STAGES],
            "cores": os.cpu_count(),
            "jobs": options.jobs,
            "seconds": round(time.monotonic() - begun),
        },
    }
    sys.stdout.write(json.dumps(report) + "\n")
    floor = json.loads(FLOOR.read_text())["mutants"]
    return 0 if score >= floor["killed"] / floor["planted"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Does the suite notice when a control is missing? `python -m benchmarks.controls --json [--only NAME ...] [--jobs 2]`.

Each rule, each text screen and each step of the gate is removed or inverted in turn, in a process of its own that has
loaded the tests, and they are run until one fails: first the one that docs/explain/controls.md names, then those
nearest. A mutant that no test fails for is a survivor: a control that could be lost without anybody noticing. A rule
that is removed finds every message good; one that is inverted refuses what it should let pass and lets pass what it
should refuse. Each test that noticed a mutant is run without one at the end, and must pass.

The limit beside the figure: only tests that run in memory or with one process are used (no whole federations), and a
process that such a test starts has no mutant, so a survivor here may still be caught by `tests/loopback`. A mutant here
is one control less, not any change of the code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import control_mutants as named
from benchmarks.mutants import Check, Edit, Mutant, OtherRule
from policies.kind import Judgement
from policies.model import ScreenName
from policies.rules import RULES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explain" / "controls.md"
FLOOR = ROOT / "tools" / "coverage_floor.json"  # mutants of the best whole run, planted and killed
# The fast ones first: most mutants end there.
ORDER = (
    "tests/policies/test_rules.py",
    "tests/policies/test_kinds.py",
    "tests/policies/*",
    "tests/simulated/*",
    "tests/security/*",
    "tests/protocol/*",
)
# What takes part in a site is met at its gate first.
_ORDER_OF_A_SITE = (
    "tests/simulated/test_gate*.py",
    "tests/simulated/test_retention.py",
    "tests/security/test_T20*.py",
    "tests/simulated/test_policy*.py",
    "tests/simulated/test_X05*.py",
    "tests/protocol/test_codec.py",
    *ORDER[3:],
    "tests/policies/*",
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
    named.ADAPTER_FOLDER: ("tests/simulated/test_start_adapter.py",),
    named.PRODUCTS: ("tests/algorithms/test_products.py",),
    named.RUN_REQUEST: ("tests/simulated/test_start_adapter.py",),
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
_SECONDS_MAX = 900  # of one test: a mutant that hangs it is noticed too
_THREAT = re.compile(r"(?:\b|_)([TXB])([0-9]{1,2})(?![0-9A-Za-z])")
_TEMPORARY = "PYTEST_DEBUG_TEMPROOT"  # where pytest makes its temporary folders
_FAILED = "failed"  # file beside them: the test that failed
_NO_MUTANT = "no mutant"

_OTHER_OUTCOME = {"ok": "deny", "deny": "ok", "hold": "ok", "look": "deny", "n.a.": "n.a."}
_HITS = "_counts(definitions, name, material, texts, read, in_time)"
_HITS_BUT_OF = f"[{{instead}} for found in {_HITS}] if name == {{name!r}} else {_HITS}"


def step_mutants() -> list[Mutant]:
    return [Edit(f"step: {name}", *function.split(":"), old, new) for name, function, old, new in named.STEPS]


def rule_mutants() -> list[Mutant]:
    return [
        OtherRule(f"rule {instead.__name__}: {rule.name}", rule, instead)
        for instead in (removed, inverted)
        for rule in RULES
    ]


def removed(check: Check) -> Check:
    return lambda *facts: Judgement("ok", 0, 0, ())


def inverted(check: Check) -> Check:
    def judge(*facts: Any) -> Judgement:
        judgement = check(*facts)
        return replace(judgement, outcome=_OTHER_OUTCOME[judgement.outcome])

    return judge


def screen_mutants() -> list[Mutant]:
    return [
        Edit(
            f"screen {word}: {name}",
            named.SCREENS,
            "screen_texts",
            _HITS,
            _HITS_BUT_OF.format(instead=instead, name=name),
        )
        for word, instead in (("removed", "{}"), ("inverted", '{} if found else {"inverted": 1}'))
        for name in get_args(ScreenName)
    ]


def mutants() -> list[Mutant]:
    return [*step_mutants(), *screen_mutants(), *rule_mutants()]


class Planting:
    """Plugin of pytest that runs its tests once for each mutant: those that were collected, in a process of its own.

    The process is forked when all tests are loaded, so that a mutant costs no more than its tests until one fails.

    Attributes:
        rows: {mutant, caught_by, seconds} of each mutant, as they end.
        is_child: this is the process of one mutant.
    """

    def __init__(self, wanted: Sequence[Mutant], jobs: int, before: Mapping[str, str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.is_child = False
        self._wanted, self._jobs, self._before = wanted, jobs, before
        self._running: dict[int, tuple[str, Path, float]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        """Raises RuntimeError: a test that noticed a mutant fails without one, too."""
        if session.testsfailed:
            return None  # not all could be loaded: pytest says so
        folder = Path(tempfile.mkdtemp(prefix="m", dir=os.environ.get(_TEMPORARY)))
        for number, mutant in enumerate(self._wanted):
            if self._started(mutant.name, folder / str(number)):
                session.items[:] = in_order(session.items, mutant, self._before.get(mutant.name, ""))
                mutant.plant()
                return None  # and pytest goes on as ever
        self._wait_until_fewer_run_than(1)
        noticed = {row["caught_by"] for row in self.rows}
        if self._started(_NO_MUTANT, folder / "none"):
            session.items[:] = [item for item in session.items if item.nodeid in noticed]
            return None
        self._wait_until_fewer_run_than(1)
        shutil.rmtree(folder, ignore_errors=True)
        if failing := self.rows.pop()["caught_by"]:
            raise RuntimeError(f"this test fails without a mutant, too: {failing}")
        return True

    def pytest_runtest_logstart(self) -> None:
        if self.is_child:
            signal.alarm(_SECONDS_MAX)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_child and report.failed:
            with Path(os.environ[_TEMPORARY], _FAILED).open("a") as file:
                file.write(f"{report.nodeid}\n")

    def _started(self, name: str, folder: Path) -> bool:
        """Start a process when there is room for one. Returns True in that process."""
        self._wait_until_fewer_run_than(self._jobs)
        folder.mkdir()
        if process := os.fork():
            self._running[process] = name, folder, time.monotonic()
            return False
        self.is_child = True
        os.environ[_TEMPORARY] = str(folder)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        return True

    def _wait_until_fewer_run_than(self, limit: int) -> None:
        """Raises RuntimeError: a process ended as none does in which tests ran."""
        while len(self._running) >= limit:
            process, status = os.wait()
            name, folder, begun = self._running.pop(process)
            code, failed = os.waitstatus_to_exitcode(status), folder / _FAILED
            caught = failed.read_text().splitlines()[0] if failed.exists() else f"signal {-code}" if code < 0 else ""
            shutil.rmtree(folder, ignore_errors=True)
            if code > pytest.ExitCode.TESTS_FAILED:
                raise RuntimeError(f"{name}: pytest ended with {code}")
            seconds = round(time.monotonic() - begun, 1)
            sys.stderr.write(f"{name}: {caught or ('SURVIVED' if name != _NO_MUTANT else 'good')} ({seconds} s)\n")
            self.rows.append({"mutant": name, "caught_by": caught, "seconds": seconds})


def in_order(items: list[pytest.Item], mutant: Mutant, before: str) -> list[pytest.Item]:
    """Return the tests as they are run for a mutant: that which noticed it before, then those nearest."""
    order = ORDER if mutant.module.startswith("policies.") else _ORDER_OF_A_SITE
    order = (*_NEAREST.get(mutant.module, ()), *order)

    def place(item: pytest.Item) -> int:
        file, _, _ = item.nodeid.partition("::")
        return -1 if item.nodeid.partition("[")[0] == before else [fnmatch(file, each) for each in order].index(True)

    return sorted(items, key=place)


def noticed_before(page: str) -> dict[str, str]:
    """Return the test that a page names for each mutant."""
    return dict(re.findall(r"^\| [^|]+ \| (.+) \| `(tests/[^`]+)` \|$", page, re.MULTILINE))


def run(wanted: list[Mutant], jobs: int) -> list[dict[str, Any]]:
    """Return one row per mutant: {mutant, caught_by, seconds}.

    Raises:
        RuntimeError: the tests cannot be loaded, or one fails without any mutant.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    planting = Planting(wanted, jobs, noticed_before(PAGE.read_text()))
    folders = sorted({pattern.removesuffix("/*") for pattern in ORDER if pattern.endswith("/*")})
    with tempfile.TemporaryDirectory(prefix="fedsilo-controls-") as folder, contextlib.redirect_stdout(sys.stderr):
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder  # no examples of mutants beside those of the code
        # What is captured stays in memory, which no other process writes to.
        options = ["-xq", "-n0", "--no-header", "--capture=sys", "-p", "no:cacheprovider", "--all-cases"]
        code = pytest.main([*options, *(str(ROOT / each) for each in folders)], plugins=[planting])
        if planting.is_child:
            os._exit(code)
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {code}")
    return planting.rows


_PAGE_HEAD = """<!-- Written by `python -m benchmarks.controls --page REPORT.json...` from what the runs printed. -->

# Which test notices which missing control

`python -m benchmarks.controls --json` takes each rule, each text screen and each step of the gate and the rounds
away, or turns it round, and runs the suite until a test fails. Of {every} mutants (`--list` names them) {mutants} were
run for this page, and {caught} of these were noticed ({score:.1%}). {survivors}The first test that noticed each:

| threat | what is taken away | the test that notices |
|---|---|---|
"""


def page(reports: list[dict[str, Any]]) -> str:
    """The rows of several runs as a page; of a mutant that ran twice, the later row counts."""
    rows = {row["mutant"]: row["caught_by"] for report in reports for row in report["figures"]["rows"]}
    survivors = sorted(name for name, caught in rows.items() if not caught)
    lines = []
    for name, caught in rows.items():
        test = caught.partition("[")[0]
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
    rows = run(wanted, options.jobs)
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
            "order": list(ORDER),
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

"""Do all reference solutions pass the verifier `code`, and how long does one take?
`python -m benchmarks.code_sandbox --json`.

Needs the shared data sets (FEDSILO_DATA, or `shared/data` beside the checkout). The suite asks for one in 48 of them.

    solutions, passed         of humaneval and mbpp
    failing                   ids of those that do not; none is right
    seconds_median            of one, sandbox and both processes included
    rung                      the isolation level that could be had here
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.learner_model import ROOT
from fedsilo.grading.code_sandbox import LEVELS, CodeSandbox
from fedsilo.protocol.errors import UsageError
from tests.algorithms.test_grading_code import REFERENCE_SECONDS, start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--level", choices=LEVELS, help="by default the best that can be built here")
    options = parser.parse_args()
    folder = Path(os.environ.get("FEDSILO_DATA", "") or ROOT.parent / "shared" / "data")
    if not (folder / "code_reference_solutions.jsonl").is_file():
        raise SystemExit(f"{folder} has no code_reference_solutions.jsonl: FEDSILO_DATA names the folder of data sets")
    solutions = {row["id"]: row["solution"] for row in rows_of(folder / "code_reference_solutions.jsonl")}
    tasks = [row for name in ("humaneval.jsonl", "mbpp.jsonl") for row in rows_of(folder / name)]
    levels = [options.level] if options.level else list(LEVELS)
    sandbox = None
    for level in levels:
        try:
            sandbox = CodeSandbox(start, deadline_seconds=REFERENCE_SECONDS, levels=[level])
            break
        except UsageError as error:
            sys.stderr.write(f"{level}: {error.message}\n")
    if sandbox is None:
        return 1
    failing, seconds = [], []
    for row in tasks:
        started = time.perf_counter()
        if not sandbox.grade(solutions[row["id"]], row["answer"]).correct:
            failing.append(row["id"])
        seconds.append(time.perf_counter() - started)
    figures = {
        "solutions": len(tasks), "passed": len(tasks) - len(failing), "failing": failing,
        "seconds_median": round(statistics.median(seconds), 4), "seconds": round(sum(seconds), 1), "rung": level,
    }  # fmt: skip
    print(json.dumps({"name": "code_sandbox", "figures": figures, "conditions": {"deadline": REFERENCE_SECONDS}}))
    return 0 if not failing and tasks else 1


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())

"""Our `math` and `numeric` beside bare math-verify, on the graded rows of tests/vectors/grading_cases, kind by kind.

    python -m benchmarks.grading --json

Bare math-verify is its `parse` and `verify` with their defaults, and nothing of ours before or behind them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from math_verify import parse, verify

from fedsilo.grading import grade, prepare

CASES = Path(__file__).parents[1] / "tests" / "vectors" / "grading_cases"
VERIFIERS = ("math", "numeric")


def bare(gold: str, response: str) -> bool:
    """Return the verdict of math-verify alone; an answer that it cannot read counts as wrong."""
    expected = parse(f"${gold}$", parsing_timeout=None) or parse(gold, parsing_timeout=None)
    return bool(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))


def compared() -> list[dict[str, object]]:
    """By file and verifier: rows, those that either judges as they should be, and wrong answers that bare pays."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for path in sorted(CASES.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["verifier"] not in VERIFIERS:
                continue
            of_kind = counts.setdefault((path.stem, row["verifier"]), Counter())
            said, due = bare(row["gold"], row["response"]), row["expected_correct"]
            of_kind["rows"] += 1
            of_kind["ours"] += grade(row["verifier"], row["response"], row["gold"]).correct == due
            of_kind["bare"] += said == due
            of_kind["bare_pays_wrong"] += said and not due
    names = ("rows", "ours", "bare", "bare_pays_wrong")
    return [{"kind": kind, "verifier": by, **{name: got[name] for name in names}} for (kind, by), got in counts.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    prepare("math")
    rows = compared()
    if options.json:
        print(json.dumps({"kinds": rows}))
        return
    for row in rows:
        print("  ".join(f"{value!s:>8}" if name != "kind" else f"{value:32}" for name, value in row.items()))


if __name__ == "__main__":
    main()

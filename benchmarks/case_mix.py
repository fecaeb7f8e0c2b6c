"""Measure how much of each hospital's case mix its first update shows: `python -m benchmarks.case_mix --json`.

A whole federation as `fedsilo demo` runs it, then `silo report case-mix` at each site: a coordinator that has only what
it was sent ranks the topics of the public held-out questions by what the update gained on each (threat model, N7).

    found       of each site's three main topics, how many are among the three that its update gained most on
    by_chance   how many of them guessing finds
    rank_correlation   Spearman's, of the gains and the site's private rows by topic

It does not show what a better attacker reads, and says nothing of single rows: `benchmarks.exposure` does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SILOS, ROUNDS, SAMPLES = 4, 1, 32


def _run(*words: str | Path) -> Any:
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=False)
    told = json.loads(done.stdout)
    if not told["ok"]:
        raise SystemExit(f"{words[0]}: {told['error']['message']}")
    return told["data"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--silos", type=int, default=SILOS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--method", default="pubswap")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    programs, started = Path(sys.executable).parent, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedsilo-case-mix-") as folder:
        _run(
            programs / "fedsilo", "demo", "--no-console", "--json", "--out", f"{folder}/demo",
            "--silos", str(given["silos"]), "--rounds", str(given["rounds"]), "--method", given["method"],
            "--seed", str(given["seed"]),
        )  # fmt: skip
        sites = sorted(path.parent for path in Path(folder, "demo").glob("*/silo.yaml"))
        told = {
            site.name: _run(
                programs / "silo", "report", "case-mix", "--json", "--config", site / "silo.yaml",
                "--samples", str(given["samples"]),
            )
            for site in sites
        }  # fmt: skip
    figures = {
        site: {name: found[name] for name in ("main_topics", "guessed", "found", "by_chance", "rank_correlation")}
        for site, found in told.items()
    }
    given.pop("json")
    report = {
        "name": "case_mix",
        "figures": {
            "found": sum(one["found"] for one in figures.values()),
            "by_chance": round(sum(one["by_chance"] for one in figures.values()), 2),
            "sites": figures,
            "seconds": round(time.monotonic() - started, 1),
        },
        "conditions": {**given, "cores": os.cpu_count()},
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

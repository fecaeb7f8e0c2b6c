"""Does the demo's federation learn, in every seed? `python -m benchmarks.learning --json [--seeds 1 2 3 4 5]`.

Each seed is one `fedsilo demo --no-console --json --seed S`: real processes, all other options default. The limit
beside the figure: the same adapter trained by one silo on all prompts at once is not run here; 1.0 is the ceiling of
pass@1, and greedy decoding says how much of what is missing is sampling noise at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GAIN_POINTS_MIN = 20.0


def run(seed: int, method: str, out: Path) -> dict[str, Any]:
    arguments = ["demo", "--no-console", "--json", "--seed", str(seed), "--method", method, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.launch", "fedsilo", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    data = json.loads(done.stdout)["data"]
    before, after = data["pass_at_1"]["before"], data["pass_at_1"]["after"]
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "points": round(100 * (after - before), 1),
        "greedy_before": data["pass_at_1_greedy"]["before"],
        "greedy_after": data["pass_at_1_greedy"]["after"],
        "seconds": data["seconds"],
        "donors_trained": data["donors_trained"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--method", default="pubswap")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedsilo-learning-") as folder:
        rows = [run(seed, options.method, Path(folder) / str(seed)) for seed in options.seeds]
    report = {
        "name": "learning",
        "figures": {
            "seeds": rows,
            "points_min": min(row["points"] for row in rows),
            "every_seed_gains_20_points": all(row["points"] >= GAIN_POINTS_MIN for row in rows),
        },
        "conditions": {"method": options.method, "cores": os.cpu_count(), "options": "default"},
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["figures"]["every_seed_gains_20_points"] else 1


if __name__ == "__main__":
    sys.exit(main())

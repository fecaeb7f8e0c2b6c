"""Does the demo's federation learn, in every seed? `python -m benchmarks.learning --json [--seeds 1 2 3 4 5]
[--exchange step round_end]`.

Each seed is one `fedsilo demo --no-console --json --seed S`: real processes, all other options default. With two
exchanges each seed has both, one after the other, of equal steps: `difference_points` is the mean over the seeds of
what the second one's pass@1 is above the first one's, with its 95 % interval (paired, Student's t); `equivalent` where
all of that lies within 3 points. The limit
beside the figure: the same adapter trained by one silo on all prompts at once is not run here; 1.0 is the ceiling of
pass@1, and greedy decoding says how much of what is missing is sampling noise at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grpo_curve import SEEDS_MIN, half_width

GAIN_POINTS_MIN = 20.0
EQUIVALENT_POINTS = 3.0


def run(seed: int, method: str, exchange: str, out: Path) -> dict[str, Any]:
    arguments = ["demo", "--no-console", "--json", "--seed", str(seed), "--method", method, "--exchange", exchange]
    arguments += ["--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", "fedsilo", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    data = json.loads(done.stdout)["data"]
    before, after = data["pass_at_1"]["before"], data["pass_at_1"]["after"]
    return {
        "seed": seed,
        "exchange": exchange,
        "before": before,
        "after": after,
        "points": round(100 * (after - before), 1),
        "greedy_before": data["pass_at_1_greedy"]["before"],
        "greedy_after": data["pass_at_1_greedy"]["after"],
        "seconds": data["seconds"],
        "donors_trained": data["donors_trained"],
    }


def compared(rows: Sequence[dict[str, Any]], first: str, second: str) -> dict[str, Any]:
    """pass@1 after the run, the second exchange's over the first one's, in points, paired by seed."""
    after = {(row["seed"], row["exchange"]): 100 * row["after"] for row in rows}
    differences = [after[seed, second] - after[seed, first] for seed, exchange in after if exchange == first]
    mean, half = statistics.mean(differences), half_width(differences)
    return {
        "difference_points": round(mean, 2),
        "interval_95": [round(mean - half, 2), round(mean + half, 2)],
        "equivalent": mean - half >= -EQUIVALENT_POINTS and mean + half <= EQUIVALENT_POINTS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--method", default="pubswap")
    parser.add_argument("--exchange", nargs="+", choices=("step", "round_end"), default=["step"])
    options = parser.parse_args()
    if len(options.exchange) > 1 and len(options.seeds) < SEEDS_MIN:
        parser.error(f"an interval takes {SEEDS_MIN} seeds")
    with tempfile.TemporaryDirectory(prefix="fedsilo-learning-") as folder:
        rows = [
            run(seed, options.method, exchange, Path(folder) / f"{seed}-{exchange}")
            for seed in options.seeds
            for exchange in options.exchange
        ]
    report = {
        "name": "learning",
        "figures": {
            "seeds": rows,
            "points_min": min(row["points"] for row in rows),
            "every_seed_gains_20_points": all(row["points"] >= GAIN_POINTS_MIN for row in rows),
            **(compared(rows, *options.exchange) if len(options.exchange) > 1 else {}),
        },
        "conditions": {"method": options.method, "cores": os.cpu_count(), "options": "default"},
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["figures"]["every_seed_gains_20_points"] else 1


if __name__ == "__main__":
    sys.exit(main())

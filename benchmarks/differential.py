"""Do both ends judge alike? `python -m benchmarks.differential --json [--messages 100000] [--seed 1]`.

Generated messages of every kind, good ones and changed ones, through the judgement of the silo's gate and through the
coordinator's way in, under every shipped ruleset. Figures: `messages`, `allowed`, `reasons` (different ones seen),
`differences` (must be 0), and `one_sided`: how often each rule that by design stands at one end only was the reason.

The limit beside the figure: equal verdicts say that both ends run the same rules on the same facts, not that the rules
are right. Exit status 1 where there is a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tests.policies.messages import a_method_that_sends_everything
from tests.security.differential import ONE_SIDED, POLICIES, compare

MESSAGES = 100_000


def measure(messages: int, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    with a_method_that_sends_everything():
        report = compare(messages, seed)
    return {
        "name": "differential",
        "figures": {
            "messages": report.messages,
            "allowed": report.allowed,
            "kinds_allowed": len(report.kinds_allowed),
            "reasons": len(report.reasons),
            "differences": len(report.differences),
            "one_sided": dict(sorted(report.explained.items())),
            "seconds": round(time.perf_counter() - started, 1),
        },
        "conditions": {
            "seed": seed,
            "policies": list(POLICIES),
            "named_differences": [f"{rule} ({end} only): {why}" for (rule, end), why in ONE_SIDED.items()],
            "first_differences": report.differences[:10],
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.messages, arguments.seed)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    return 1 if result["figures"]["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())

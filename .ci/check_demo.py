"""Assert on the fields of `fedsilo demo --json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    reply = json.loads(Path(sys.argv[1]).read_text())
    data = reply["data"]
    checks = {
        "envelope": reply["schema"] == "fedsilo.cli/1" and reply["ok"] is True and reply["error"] is None,
        "it learns: pass@1 rises by 20 points": data["pass_at_1"]["after"] - data["pass_at_1"]["before"] >= 0.20,
        "per silo and per topic": len(data["per_silo"]) == 4 and len(data["per_topic"]) == 8,
        "five logs verify": len(data["audit"]) == 5 and all(log["verified"] for log in data["audit"]),
        "nine processes": data["processes"] == 9,
        "adapter is there": (Path(data["adapter"]) / "adapter_model.safetensors").is_file(),
        "at most three minutes": data["seconds"] <= 180,
        "factors left every silo": {row["silo"] for row in data["left"] if row["kind"] == "lora.factors"}
        == set(data["per_silo"]),
        "donors trained on in every silo": all(count > 0 for count in data["donors_trained"].values())
        and len(data["donors_trained"]) == 4,
    }
    for name, passed in checks.items():
        sys.stdout.write(f"{'ok  ' if passed else 'FAIL'} {name}\n")
    sys.stdout.write(json.dumps({key: data[key] for key in ("pass_at_1", "seconds", "left")}) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The demo's closing table, for a person who wants to know three things: did it learn, what left, can I check it."""

from __future__ import annotations

from typing import Any

from fedsilo.launch.output import table


def report(data: dict[str, Any]) -> str:
    """Text of the closing table. `data` is what `fedsilo demo --json` carries."""
    parts = [_learned(data), _left(data), _verified(data), _adapter(data)]
    return "\n\n".join(parts)


def _points(row: dict[str, float]) -> list[str]:
    change = 100 * (row["after"] - row["before"])
    return [f"{100 * row['before']:.1f}", f"{100 * row['after']:.1f}", f"{change:+.1f}"]


def _learned(data: dict[str, Any]) -> str:
    rows: list[list[str]] = [["all silos", *_points(data["pass_at_1"])]]
    rows.append(["  greedy", *_points(data["pass_at_1_greedy"])])
    if "compared" in data:
        rows.append([f"  control {data['compared']['method']}", *_points(data["compared"]["pass_at_1"])])
    rows += [[silo, *_points(row)] for silo, row in data["per_silo"].items()]
    rows += [[f"topic {topic}", *_points(row)] for topic, row in data["per_topic"].items()]
    heading = f"pass@1 on held-out prompts, % ({data['method']}, {len(data['rounds'])} rounds)"
    lines = [heading, table(("", "before", "after", "points"), rows)]
    for silo, reasons in data["rows_left_out"].items():
        if reasons:
            lines.append(f"{silo} left out {', '.join(f'{count} {reason}' for reason, count in reasons.items())} rows")
    return "\n".join(lines)


def _left(data: dict[str, Any]) -> str:
    silos = list(dict.fromkeys(row["silo"] for row in data["left"]))
    cells = {(row["kind"], row["silo"]): f"{row['messages']} / {row['bytes']:,}" for row in data["left"]}
    kinds = sorted({kind for kind, _ in cells}, key=lambda kind: (kind.startswith("control."), kind))
    totals = [f"{sum(row['bytes'] for row in data['left'] if row['silo'] == silo):,} bytes" for silo in silos]
    heading = "what left each silo, messages / bytes (its own audit log; the coordinator's log says the same)"
    # Four silos fit a terminal of 80 columns side by side; more stand below each other.
    parts = []
    for start in range(0, len(silos), 4):
        some = silos[start : start + 4]
        rows = [[kind, *(cells.get((kind, silo), "-") for silo in some)] for kind in kinds]
        parts.append(table(("", *some), [*rows, ["all", *totals[start : start + 4]]]))
    return "\n".join([heading, *parts])


def _verified(data: dict[str, Any]) -> str:
    rows = [
        [row["log"], "verified" if row["verified"] else "DOES NOT VERIFY", "; ".join(row["problems"]) or row["path"]]
        for row in data["audit"]
    ]
    trained = ", ".join(f"{silo} {count}" for silo, count in data["donors_trained"].items())
    return f"audit logs\n{table(('log', 'verdict', ''), rows)}\ndonor answers trained on: {trained}"


def _adapter(data: dict[str, Any]) -> str:
    return (
        f"adapter     {data['adapter']}\n"
        f"load it     {load_line(data)}\n"
        f"run record  {data['run_record']}\n"
        f"{data['processes']} processes, {data['seconds']:.0f} s"
    )


def load_line(data: dict[str, Any]) -> str:
    """The one line that loads base model and adapter, after `from transformers import ...; from peft import ...`."""
    base = f'AutoModelForCausalLM.from_pretrained("{data["base_model"]}")'
    return f'PeftModel.from_pretrained({base}, "{data["adapter"]}")'

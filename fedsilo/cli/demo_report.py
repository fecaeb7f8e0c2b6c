"""The demo's closing table, for a person who wants to know three things: did it learn, what left, can I check it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from fedsilo.cli.output import table
from fedsilo.cli.silo_text import isolation_text


def report(data: dict[str, Any]) -> str:
    """Text of the closing table. `data` is what `fedsilo demo --json` carries."""
    parts = [_learned(data), _left(data), _verified(data)]
    if "attacks" in data:
        parts.append(_attacks(data))
    if "wire" in data:
        parts.append(_wire(data))
    return "\n\n".join([*parts, _adapter(data)])


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
    rounds = len(data["rounds"])
    heading = f"pass@1 on held-out prompts, % ({data['method']}, {rounds} round{'s' if rounds != 1 else ''})"
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
    roots = {str(Path(row["path"]).parents[2]) for row in data["audit"]}
    again = f"check them again: fedsilo audit verify {' '.join(f'{root}/*/state' for root in sorted(roots))}"
    return f"audit logs\n{table(('log', 'verdict', ''), rows)}\n{again}\ndonor answers trained on: {trained}"


def _attacks(data: dict[str, Any]) -> str:
    rows = [
        [
            row["name"],
            "denied" if row["decision"] == "deny" else row["decision"].upper(),
            row["rule"] + (f" and {len(row['rules']) - 1} more" if len(row["rules"]) > 1 else "") or "-",
            f"{row['round']}.{row['step']}" if row["step"] else str(row["round"]),
            str(row["record"]),
        ]
        for row in data["attacks"]
    ]
    attacker = data["attacker"]
    kept = all(row["decision"] == "deny" for row in data["attacks"])
    who = f"what {attacker}'s hostile trainer tried{'; its guard sent none of it' if kept else ''}"
    without = [str(row["round"]) for row in data["rounds"] if attacker not in row["participants"]]
    lines = [who, table(("attempt", "decision", "by", "round.step", "record"), rows)]
    if without:
        lines.append(f"committed without {attacker}: round {', '.join(without)}")
    recorded = next((row for row in data["attacks"] if row["record"] is not None and row["rules"]), None)
    log = next((Path(row["path"]) for row in data["audit"] if recorded and row["log"] == recorded["silo"]), None)
    if log is not None and recorded is not None:
        site = log.parent.parent
        lines += [
            "every rule's verdict on one of them:",
            f"  fedsilo policy explain {recorded['record']} --log {log} --policy {site / 'policy.yaml'} "
            f"--charter {site / 'charter.yaml'}",
        ]
    return "\n".join([*lines, *textwrap.wrap(data["not_stopped"], 80)])


def _wire(data: dict[str, Any]) -> str:
    wire = data["wire"]
    if wire["unreadable"]:
        return f"the wire: NOT SEARCHED, {wire['unreadable']}"
    control = "found" if data["positive_control_found"] else "NOT FOUND"
    return (
        f"the wire, in the clear: {wire['messages']} messages from silos, {wire['bytes']:,} bytes both ways\n"
        f"{wire['canaries']} planted texts searched for as {', '.join(wire['forms'])}: "
        f"{data['canaries_on_wire']} found{'; ' if wire['found'] else ''}{'; '.join(wire['found'][:4])}\n"
        f"positive control, planted in the run's name: {control}"
    )


def _adapter(data: dict[str, Any]) -> str:
    return (
        f"adapter     {data['adapter']}\n"
        f"load it     {load_line(data)}\n"
        f"run record  {data['run_record']}\n"
        f"isolation   {isolation_text(data['isolation'])}\n"
        f"{data['processes']} processes, {data['seconds']:.0f} s after set-up"
    )


def load_line(data: dict[str, Any]) -> str:
    """The one line that loads base model and adapter, after `from transformers import ...; from peft import ...`."""
    base = f'AutoModelForCausalLM.from_pretrained("{data["base_model"]}")'
    return f'PeftModel.from_pretrained({base}, "{data["adapter"]}")'

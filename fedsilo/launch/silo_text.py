"""What `silo` prints for people: its longer texts, made from what the daemon answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.launch.output import table


def status_text(state: Mapping[str, Any]) -> str:
    trainer, policy, link = state.get("trainer", {}), state.get("policy", {}), state.get("coordinator", {})
    rows = [
        ("silo", f"{state.get('silo')} ({state.get('role')}) of {state.get('federation')}"),
        ("state", f"{state.get('phase')}{': ' + state['halted'] if state.get('halted') else ''}"),
        (
            "run",
            f"{state.get('run') or '-'} round {state.get('round')} of {state.get('rounds')} step {state.get('step')}",
        ),
        ("trainer", _trainer_text(trainer)),
        ("private", private_text(trainer.get("ready", {}))),
        ("policy", f"{policy.get('name')} {str(policy.get('digest'))[:12]}, DP off"),
        ("coordinator", f"{link.get('address')} {link.get('link')} {link.get('fault', '')}"),
        ("audit", f"{state.get('audit', {}).get('size', 0)} records"),
    ]
    rows += [
        ("metric", f"{name} {item['value']} ({item['source']})") for name, item in state.get("metrics", {}).items()
    ]
    rows += [("left", f"{row['messages']} {row['kind']}, {row['bytes']} bytes") for row in state.get("left", ())]
    rows += [
        ("HELD", f"{row['id']} {row['leaves']['bytes']} bytes: silo approvals show {row['id']}")
        for row in state["held"]
    ]
    return table(("what", "now"), rows)


def _trainer_text(trainer: Mapping[str, Any]) -> str:
    if "waiting_for" in trainer:
        return f"not there yet: waiting for it to dial {trainer['waiting_for']}"
    return f"isolation {trainer.get('isolation', '-')}"


def private_text(ready: Mapping[str, Any]) -> str:
    """How many private rows are used and what was left out, from what the trainer said when it was ready."""
    dropped = ready.get("dropped", {})
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    left_out = f", {sum(dropped.values())} lines left out ({reasons}): `silo check` lists them" if dropped else ""
    return f"{ready.get('private_rows', '-')} rows{left_out}"

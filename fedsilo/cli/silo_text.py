"""What `silo` prints for people: its longer texts, made from what the daemon answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.cli.output import table


def _audit_text(audit: Mapping[str, Any]) -> str:
    broken = audit.get("broken")
    return f"{audit.get('size', 0)} records" + (
        f", BROKEN at record {broken['seq']}: {broken['why']}" if broken else ""
    )


def status_text(state: Mapping[str, Any], *, reached_by: str = "") -> str:
    """A silo's state as a table.

    Args:
        state: as its daemon shows it.
        reached_by: what stands behind a further command so that it reaches this silo.
    """
    if "held" not in state:  # it answers before it has a state
        return table(("what", "now"), [("state", "starting: not all of it stands yet")])
    trainer, policy, link = state.get("trainer", {}), state.get("policy", {}), state.get("coordinator", {})
    rows = [
        ("silo", f"{state.get('silo')} ({state.get('role')}) of {state.get('federation')}"),
        ("state", _phase_text(state)),
        ("run", _run_text(state)),
        ("trainer", _trainer_text(trainer)),
        ("private", private_text(trainer.get("ready", {}))),
        ("policy", f"{policy.get('name')} {str(policy.get('digest'))[:12]}, DP off"),
        *(
            ("made of", f"{part['file']} {part['digest'][:12]}")
            for part in (policy.get("made_of", ()) if len(policy.get("made_of", ())) > 1 else ())
        ),
        *_clock_rows(state.get("clock") or {}),
        ("coordinator", f"{link.get('address')} {link.get('link')} {link.get('fault', '')}"),
        ("audit", _audit_text(state.get("audit", {}))),
    ]
    rows += _figure_rows(state.get("metrics", {}))
    rows += [
        ("left", f"{row['messages']} {row['kind']}, {row['bytes']} bytes since it was started")
        for row in state.get("left", ())
    ]
    rows += [
        ("HELD", f"{row['id']} {row['leaves']['bytes']} bytes: silo approvals show {row['id']}{reached_by}")
        for row in state["held"]
    ]
    if state.get("adapter_held"):
        rows.append(("HELD", f"adapter {state['adapter_held'][:12]}: silo adapters list{reached_by}"))
    return table(("what", "now"), rows)


def _clock_rows(clock: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nothing while this machine's clock and the coordinator's agree."""
    halt = clock.get("halt")
    rows = [("CLOCK", f"{clock['told']}: compare both machines' clocks")] if clock.get("told") else []
    if halt:
        rows.append(
            ("CLOCK", "nothing goes on until an approver accepts it: silo resume --accept-clock --operator NAME")
        )
    return rows


_BY_SILO = ("left", "declined")


def _run_text(state: Mapping[str, Any]) -> str:
    if not state.get("run"):
        run, became = (state.get("last_run") or {}).get("run"), (state.get("last_run") or {}).get("state")
        if became == "running":
            return f"{run} is not taken up: this silo starts, or is halted"
        return (
            f"none is open; the last: {run}, {became}{' by this silo' if became in _BY_SILO else ''}"
            if run
            else "none is open"
        )
    at = f"{state['run']} round {state.get('round')} of {state.get('rounds')} step {state.get('step')}"
    return f"{at}, paused by the coordinator" if state.get("run_paused") else at


def _phase_text(state: Mapping[str, Any]) -> str:
    if state.get("halted"):
        return f"{state.get('phase')}: {state['halted']}"
    if state.get("waits"):
        return f"WAITS: {state['waits']}"
    # while a release is held, or a task is finished, the phase is that
    paused = state.get("paused") and state.get("phase") != "paused"
    return f"{state.get('phase')}{', paused: no further step is begun' if paused else ''}"


# What the trainer reports of its newest task of each sort, in words; none of it leaves by being shown.
_FIGURES = {
    "reward_mean": "mean reward of its answers",
    "zero_variance_share": "share of prompts whose answers all earned the same",
    "tokens": "tokens of its answers",
    "kl": "KL divergence from the base model, nats a token",
    "clip_share": "share of tokens that the objective clipped",
    "donors_used": "donor answers used",
    "donors_wanted": "donor answers wanted",
    "donors_found": "donor answers found",
    "donors_rejected": "donor answers rejected, by reason",
    "drift": "L2 distance that the factors moved in this round",
    "pass_at_1": "pass@1 on the held-out set",
    "pass_at_1_greedy": "pass@1 on the held-out set, greedy",
    "seconds": "seconds it took",
    "rollout_kl": "KL divergence of the rollout engine from the trainer, nats a token",
    "stale_detectable_steps": "steps by which a stale rollout engine would have been noticed",
    "rollout_tokens_per_second": "tokens of rollouts a second",
    "memory_peak_bytes": "most memory that the trainer held, bytes",
}


def _figure_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line for each figure, with the task that it is of: figures of different tasks stand side by side."""
    rows = []
    for name, item in metrics.items():
        step = f" step {item['step']}" if item.get("step") else ""
        words = _FIGURES.get(name, name.replace("_", " "))
        rows.append(
            ("figure", f"{item['task']} of round {item['round']}{step}: {words}: {_number_text(item['value'])}")
        )
    return rows


def _number_text(value: Any) -> str:
    """Four digits that mean something; a mapping of counts as its items."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_number_text(count)}" for name, count in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trainer_text(trainer: Mapping[str, Any]) -> str:
    if "waiting_for" in trainer:
        return f"not there yet: waiting for it to dial {trainer['waiting_for']}"
    level, probes = trainer.get("isolation", "-"), trainer.get("probes", {})
    if why := trainer.get("why_waived"):
        return f"isolation {level}: {why}"
    silent = [name for name, result in probes.items() if result.get("outcome") == "silent"]
    refused = sum(result.get("outcome") == "refused" for result in probes.values())
    shown = [f"{refused} ways out tried and refused"] if probes else []
    if silent:
        controls = [address for places in trainer.get("controls", {}).values() for address in places]
        shown.append(f"{', '.join(silent)} dropped ({', '.join(controls)} answer the guard, and not the trainer)")
    return f"isolation {level}{': ' if shown else ''}{'; '.join(shown)}"


def isolation_text(levels: Mapping[str, Any]) -> str:
    """Return one line on the isolation of each trainer in a run. levels: {silo: isolation levels, oldest first}."""
    return ", ".join(f"{silo} {' then '.join(names)}" for silo, names in levels.items()) or "not told"


def private_text(ready: Mapping[str, Any]) -> str:
    """How many private rows are used and what was left out, from what the trainer said when it was ready."""
    dropped = ready.get("dropped") or {}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    left_out = f", {sum(dropped.values())} lines left out ({reasons}): `silo check` lists them" if dropped else ""
    held_back = ready.get("holdout_rows")
    aside = f" to train on, {held_back} set aside" if held_back else ""
    return f"{ready.get('private_rows', '-')} rows{aside}{left_out}"

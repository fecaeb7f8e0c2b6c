"""Answers of the queries `round` and `curves`, as a coordinator and a silo give them."""

from __future__ import annotations

import copy
from typing import Any

from fedsilo.protocol.intervals import wilson_interval

DIGESTS = {
    "plan": "1a" * 32, "base_model": "2b" * 32, "tokenizer": "3c" * 32, "template": "4d" * 32, "lora_schema": "5e" * 32,
    "public_set": "6f" * 32, "held_out": "70" * 32, "base_adapter": "81" * 32, "adapter": "", "charter": "92" * 32,
    "transcript": "a3" * 32,
}  # fmt: skip
PARAMETERS = {
    "method": "pubswap", "exchange": "step", "rounds": 3, "local_steps": 8, "swap_period": 4, "prompts_per_step": 8,
    "samples_per_prompt": 8, "seed": 7, "quorum": 2, "learning_rate": 1e-5, "kl_coefficient": 0.0001,
    "temperature": 0.7, "max_new_tokens": 256, "lora_rank": 16, "lora_alpha": 32.0, "lora_freeze": "none",
    "load": "bf16", "wire_dtype": "float32", "evaluation_prompts": 512, "evaluation_samples": 4,
}  # fmt: skip


def phase(name: str, start: float | None, end: float | None, *, step: int = 0, state: str = "done",
          source: str = "released") -> dict[str, Any]:  # fmt: skip
    seconds = None if start is None or end is None else round(end - start, 3)
    return {
        "phase": name, "step": step, "state": state, "from_seconds": start, "to_seconds": end, "seconds": seconds,
        "source": source,
    }  # fmt: skip


def silo_row(name: str, state: str, *phases: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "silo": name, "own": False, "joined": "joined", "joined_at": "2026-12-01T09:40:00Z", "plan": "accepted",
        "plan_at": None, "last_seen": "2026-12-01T09:59:59Z", "step": 6, "isolation": "namespaces", "code": "c0" * 32,
        "policy": "9f" * 32, "state": state, "phases": list(phases), "straggler": None, "received_bytes": 2_140_000,
        "received_messages": 3, "update_norm": None, "update_digest": "",
    } | changes  # fmt: skip


def through(*ends: float, tail: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """sign, train 4, train 8, update: as far as `ends` go, then `tail`."""
    names = (("sign", 0), ("train", 4), ("train", 8), ("update", 0))
    starts = (0.0, *ends)
    return [phase(*_, step=step) for (name, step), start, end in zip(names, starts, ends, strict=False)
            for _ in [(name, start, end)]] + (tail or [])  # fmt: skip


def listed(number: int, state: str, seconds: float | None, participants: int | None = 3) -> dict[str, Any]:
    return {
        "round": number, "state": state, "opened_at": "2026-12-01T09:40:00Z",
        "closed_at": None if seconds is None else "2026-12-01T09:50:00Z", "seconds": seconds,
        "participants": participants,
    }  # fmt: skip


LISTED = [listed(1, "committed", 371.0), listed(2, "open", None, 0)]


def at_coordinator(**changes: Any) -> dict[str, Any]:
    """Round 2, open: two are through, one trains on, one is late, one sits out."""
    late = {"phase": "train", "step": 8, "seconds": 241.0, "median_seconds": 96.5}
    data: dict[str, Any] = {
        "party": "coordinator",
        "run": "run-1",
        "run_state": "running",
        "method": "pubswap",
        "round": 2,
        "rounds_planned": 3,
        "rounds": LISTED,
        "state": "open",
        "opened_at": "2026-12-01T09:53:19Z",
        "closed_at": None,
        "elapsed_seconds": 401.0,
        "closed_seconds": None,
        "paused": False,
        "quorum": {"needed": 2, "of": 5, "given": 2, "reached_seconds": 331.0},
        "deadlines": [
            {"name": "public/2/8", "for": "step 8", "left_seconds": 48.0, "at_seconds": 449.0},
            {"name": "round/2", "for": "round", "left_seconds": 199.0, "at_seconds": 600.0},
        ],
        "awaited": [
            {"silo": "hospital_b", "phase": "update", "step": 0},
            {"silo": "uni_c", "phase": "train", "step": 8},
        ],
        "silos": [
            silo_row(
                "hospital_a",
                "waits",
                *through(4.0, 121.0, 214.0, 318.0, tail=[phase("others", 318.0, None, state="open")]),
                update_norm=0.93,
                update_digest="7b" * 32,
            ),
            silo_row(
                "hospital_b", "awaited", *through(4.0, 118.0, 220.0, tail=[phase("update", 220.0, None, state="open")])
            ),
            silo_row(
                "insurer_d",
                "waits",
                *through(4.0, 99.0, 196.0, 331.0, tail=[phase("others", 331.0, None, state="open")]),
                update_norm=1.02,
                update_digest="8c" * 32,
            ),
            silo_row(
                "uni_c",
                "step 8",
                *through(
                    4.0,
                    160.0,
                    tail=[
                        phase("train", 160.0, None, step=8, state="open"),
                        phase("update", None, None, state="waiting"),
                    ],
                ),
                straggler=late,
            ),
            silo_row(
                "clinic_e",
                "sits out",
                phase("sign", 0.0, 4.0),
                phase("train", None, None, step=4, state="kept back"),
                phase("train", None, None, step=8, state="kept back"),
                phase("update", None, None, state="kept back"),
                received_bytes=0,
                received_messages=0,
            ),
        ],
        "parameters": PARAMETERS,
        "digests": DIGESTS,
        "hidden": [],
    }
    return copy.deepcopy(data | changes)


def round_before() -> dict[str, Any]:
    """Round 1 of the same run, committed."""
    rows = [
        silo_row(name, word, *through(3.0, 110.0, 205.0, end), phase("others", end, 371.0), phase("eval", 371.0, 402.0))
        for name, word, end in (("hospital_a", "accepted", 301.0), ("hospital_b", "accepted", 322.0),
                                ("insurer_d", "accepted", 340.0))
    ]  # fmt: skip
    rows.append(
        silo_row("uni_c", "absent", phase("sign", 0.0, 3.0), phase("train", None, None, step=4, state="missed"))
    )
    return at_coordinator(
        round=1, state="committed", elapsed_seconds=2000.0, closed_seconds=371.0, closed_at="2026-12-01T09:50:00Z",
        silos=rows, awaited=[], quorum={"needed": 2, "of": 5, "given": 3, "reached_seconds": 322.0},
        deadlines=[{"name": "round/1", "for": "round", "left_seconds": None, "at_seconds": 600.0}],
        digests=DIGESTS | {"base_adapter": "b4" * 32, "adapter": "81" * 32, "transcript": "c5" * 32},
    )  # fmt: skip


def at_silo(**changes: Any) -> dict[str, Any]:
    """The same round as hospital_a has it: its own phases, of the others what the coordinator told."""
    local: dict[str, Any] = {"source": "local"}
    own = [
        phase("sign", 0.0, 3.9, **local), phase("train", 3.9, 118.2, step=4, **local),
        phase("approval", 118.2, 119.0, step=4, **local), phase("pool", 119.0, 131.4, step=4, **local),
        phase("train", 131.4, 214.0, step=8, **local), phase("pool", 214.0, 240.0, step=8, **local),
        phase("update", 240.0, 310.5, **local), phase("others", 310.5, None, state="open", **local),
    ]  # fmt: skip
    unknown = dict.fromkeys(
        ("joined", "joined_at", "plan", "plan_at", "last_seen", "step", "isolation", "code", "received_bytes",
         "received_messages", "update_norm", "update_digest", "policy")
    )  # fmt: skip
    rows = [silo_row("hospital_a", "waits", *own, **(unknown | {"own": True, "policy": "9f" * 32}))]
    rows += [
        silo_row(name, word, **unknown)
        for name, word in (
            ("hospital_b", "signed"),
            ("insurer_d", "signed"),
            ("uni_c", "signed"),
            ("clinic_e", "named"),
        )
    ]
    data = at_coordinator(
        party="silo", silos=rows, awaited=[], hidden=["awaited"], rounds=[listed(1, "closed", 371.0, None), LISTED[1]],
        quorum={"needed": 2, "of": 5, "given": None, "reached_seconds": None},
        deadlines=[{"name": "round/2", "for": "round", "left_seconds": None, "at_seconds": 600.0}],
        digests={name: value for name, value in DIGESTS.items() if name != "charter"} | {"policy": "9f" * 32},
    )  # fmt: skip
    return data | copy.deepcopy(changes)


# ---- curves ----------------------------------------------------------------------------------------


def point(x: int, value: float, *, number: int, step: int = 0, n: int | None = None, exact: bool = True,
          **more: Any) -> dict[str, Any]:  # fmt: skip
    low, high = wilson_interval(value, n) if n else (None, None)
    return {
        "x": x, "round": number, "step": step, "value": value, "n": n, "n_exact": exact if n else None, "low": low,
        "high": high, "silos": None,
    } | more  # fmt: skip


RATES = {
    "hospital_a": (0.281, 0.302, 0.331, 0.352, 0.371, 0.382, 0.401, 0.412), "hospital_b": (0.270, 0.288, 0.310, 0.322,
    0.330, 0.352, 0.371, 0.387), "uni_c": (0.290, 0.322, 0.352, 0.380, 0.402, 0.421, 0.430, 0.440),
}  # fmt: skip


def curves_at_coordinator(**changes: Any) -> dict[str, Any]:
    series = [
        {"name": "pass_at_1", "silo": silo, "unit": "share", "source": "released",
         "points": [point(number, value, number=number, n=500, exact=False) for number, value in enumerate(values)]}
        for silo, values in RATES.items()
    ]  # fmt: skip
    gaps = [max(column) - min(column) for column in zip(*RATES.values(), strict=True)]
    series.append(
        {"name": "gap", "silo": "", "unit": "share", "source": "computed",
         "points": [point(number, round(value, 4), number=number, silos=3) for number, value in enumerate(gaps)]}
    )  # fmt: skip
    series += [
        {"name": "update_norm", "silo": silo, "unit": "L2", "source": "released",
         "points": [point(number, 1.4 - 0.1 * number + place * 0.2, number=number) for number in range(1, 8)]}
        for place, silo in enumerate(RATES)
    ]  # fmt: skip
    data = {
        "party": "coordinator", "run": "run-1", "run_state": "running", "runs": ["run-1", "run-0"], "x": "round",
        "x_max": 40, "names": ["gap", "pass_at_1", "update_norm"], "series": series,
        "baseline": [{"name": "pass_at_1", "silo": silo, "value": values[0]} for silo, values in RATES.items()],
        "not_recorded": ["cosine between updates: nobody computes it"],
    }  # fmt: skip
    return copy.deepcopy(data | changes)


def curves_at_silo(**changes: Any) -> dict[str, Any]:
    rewards = [0.21 + 0.006 * step + (0.04 if step % 3 else -0.03) for step in range(1, 41)]
    series = [
        {"name": "reward_mean", "silo": "hospital_a", "unit": "0..1", "source": "local",
         "points": [point(step, round(value, 4), number=1 + (step - 1) // 8, step=(step - 1) % 8 + 1)
                    for step, value in enumerate(rewards, 1)]},
        {"name": "kl", "silo": "hospital_a", "unit": "nats", "source": "local",
         "points": [point(step, round(0.001 * step, 5), number=1 + (step - 1) // 8, step=(step - 1) % 8 + 1)
                    for step in range(1, 41)]},
        {"name": "pass_at_1", "silo": "hospital_a", "unit": "share", "source": "local",
         "points": [point(8 * number, value, number=number, n=487) for number, value in
                    enumerate(RATES["hospital_a"][:6])]},
    ]  # fmt: skip
    data = {
        "party": "silo", "run": "run-1", "run_state": "running", "runs": ["run-1"], "x": "step", "x_max": 320,
        "names": ["kl", "pass_at_1", "reward_mean"], "series": series,
        "baseline": [{"name": "pass_at_1", "silo": "hospital_a", "value": 0.281}], "not_recorded": [],
    }  # fmt: skip
    return copy.deepcopy(data | changes)

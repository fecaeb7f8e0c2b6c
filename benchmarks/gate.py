"""What the border costs: `python -m benchmarks.gate --json`.

    gate_seconds                   offer of a 69.6 MB set of factors (392 float32 arrays) to the real gate: measure,
                                   rules, rebuild, hash, rules again, payload and record on disk; until it may be sent
    clipped_seconds                the same where the policy's clip_l2 shortens it: scaled, and hashed as offered too
    as_it_came_seconds             the same where a trainer's bytes are what would be made of them: measured once
    gate_extra_payloads            memory beyond the offered arrays while that happens, in payloads

Beside them, what this machine can do at best: SHA-256 of as many bytes, a copy, and a file of them flushed to disk.
Real gate, ledger, audit log and policy; only the network is a channel in memory, which `offer` never reaches.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.files.durable import write_durably
from fedsilo.protocol.codec import decode_factors, encode_factors
from policies.schema import LoraSchema
from tests.policies import setting
from tests.world import Bench

ARRAYS = 392
ELEMENTS = 69_600_000 // 4
REPEATS = 5
GATE_SECONDS_MAX = 0.25
EXTRA_PAYLOADS_MAX = 1.5


def schema() -> LoraSchema:
    """196 matrices, each adapted by A of shape [16, n] and B of shape [n, 16]."""
    side = ELEMENTS // ARRAYS // 16
    tensors = []
    for number in range(ARRAYS // 2):
        name = f"model.layers.{number // 7}.self_attn.matrix_{number % 7}_proj"
        tensors += [(f"{name}.lora_A", (16, side)), (f"{name}.lora_B", (side, 16))]
    return LoraSchema(setting.HASH["base"], 16, 32.0, "float32", "all-linear", tuple(sorted(tensors)))


def bench(folder: Path, pinned: LoraSchema, clip_l2: float) -> Bench:
    text = setting.policy_text(schema=pinned)
    policy = setting.policy_of(text)
    block = policy.file.egress.lora_factors
    assert block is not None
    limits = {"clip_l2": clip_l2, "max_l2": 1.1 * clip_l2, "max_tensor_l2": 1.1 * clip_l2, "max_total_l2": 1e9}
    limits |= {"per_round": 1_000_000}
    for name, value in limits.items():
        text = text.replace(f"    {name}: {getattr(block, name)}", f"    {name}: {value!r}", 1)
    for name in ("round_bytes", "day_bytes"):
        text = text.replace(f"{name}: {getattr(policy.file.budgets, name)}", f"{name}: 1000000000000", 1)
    return Bench(folder, setting.policy_of(text), schema=pinned)


def of_values(party: Bench, _pinned: LoraSchema, tensors: dict[str, Any]) -> Callable[[], Any]:
    return lambda: party.factors(tensors)


def of_bytes(party: Bench, pinned: LoraSchema, tensors: dict[str, Any]) -> Callable[[], Any]:
    """As a trainer of the product writes them."""
    body = encode_factors(
        tensors, base_digest=setting.BASE_DIGEST, schema_sha256=pinned.digest, rank=pinned.rank, scale=pinned.scale,
        dtype=pinned.dtype,
    )  # fmt: skip
    factors = decode_factors(body)
    return lambda: party.gate.offer(
        party.judge.view.place("lora.factors", 1), factors.header, tensors=factors.tensors, read_from=factors.payload
    )


def gate_figures(folder: Path) -> dict[str, Any]:
    pinned = schema()
    generator = np.random.default_rng(0)
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in pinned.tensors}
    norm = float(np.sqrt(sum(float(np.dot(values.ravel(), values.ravel())) for values in tensors.values())))
    payload = memoryview(bytearray(pinned.payload_bytes))
    figures: dict[str, Any] = {"payload_bytes": pinned.payload_bytes}
    parties = {
        "within": bench(folder / "within", pinned, 2 * norm),
        "clipped": bench(folder / "clipped", pinned, norm / 2),
        "as_it_came": bench(folder / "as_it_came", pinned, 2 * norm),
    }
    offers = {"within": of_values, "clipped": of_values, "as_it_came": of_bytes}
    work: dict[str, Callable[[], object]] = {
        "sha256": lambda: hashlib.sha256(payload).digest(),
        "copy": lambda: bytes(payload),
        "file": lambda: write_durably(folder / "file", payload),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*parties, *work)}
    for turn in range(REPEATS + 1):
        for name, party in parties.items():
            first = next(iter(tensors.values()))
            first.flat[0] += 0.001  # other bytes than before: nothing is on the disk yet
            offer = offers[name](party, pinned, tensors)
            begun = time.perf_counter()
            offered = offer()
            seconds[name].append(time.perf_counter() - begun)
            assert type(offered).__name__ == "Allowed", offered
            party.ledger.settle_outbox(offered.outbox_id, "sent")
        for name, done in work.items():
            begun = time.perf_counter()
            done()
            seconds[name].append(time.perf_counter() - begun)
        if turn == 0:  # the first one touches every page and file for the first time
            seconds = {name: [] for name in seconds}
    for name, values in seconds.items():
        figures[f"{name}_seconds"] = round(statistics.median(values), 4)
    for name, party in parties.items():
        offer = offers[name](party, pinned, tensors)
        gc.collect()
        tracemalloc.start()
        held = tracemalloc.get_traced_memory()[0]
        offered = offer()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        figures[f"{name}_extra_payloads"] = round((peak - held) / pinned.payload_bytes, 3)
        party.ledger.settle_outbox(offered.outbox_id, "sent")
        party.close()
    figures["gate_seconds"] = figures.pop("within_seconds")
    figures["gate_extra_payloads"] = max(figures["within_extra_payloads"], figures["clipped_extra_payloads"])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedsilo-gate-") as name:
        figures = gate_figures(Path(name))
    limits = {"gate_seconds": GATE_SECONDS_MAX, "gate_extra_payloads": EXTRA_PAYLOADS_MAX}
    kept = {name: figures[name] <= limit for name, limit in limits.items()}
    conditions = {"cores": os.cpu_count(), "arrays": ARRAYS, "repeats": REPEATS, "limits": limits, "kept": kept}
    sys.stdout.write(json.dumps({"name": "gate", "figures": figures, "conditions": conditions}) + "\n")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

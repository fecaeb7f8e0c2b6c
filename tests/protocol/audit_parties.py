"""Two parties with audit logs and clocks that stand still until told otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.log import AuditLog

SILO, COORDINATOR = "spiffe://net/silo/hospital_a", "spiffe://net/coordinator/main"
KEYS = {
    SILO: Ed25519PrivateKey.from_private_bytes(b"\x0a" * 32),
    COORDINATOR: Ed25519PrivateKey.from_private_bytes(b"\x0c" * 32),
}
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\x66" * 32)


class Clock:
    """Seconds that only a test moves."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def open_log(directory: Path, origin: str = SILO, **changes: Any) -> AuditLog:
    settings: dict[str, Any] = {
        "origin": origin,
        "key": KEYS.get(origin),
        "actor": origin,
        "clock": Clock(),
        "monotonic": Clock(5.0),
        "reserve_bytes": 0,
    }
    return AuditLog(directory, **(settings | changes))


def introduce(first: AuditLog, second: AuditLog) -> None:
    first.trust_peer(second.origin, KEYS[second.origin].public_key())
    second.trust_peer(first.origin, KEYS[first.origin].public_key())


def exchange(silo: AuditLog, coordinator: AuditLog) -> None:
    """One control.checkpoint and its reply."""
    coordinator.take(silo.offer(coordinator.origin), silo.origin)
    silo.take(coordinator.offer(silo.origin), coordinator.origin)


def append_send(log: AuditLog, sequence: int, payload_bytes: int = 10, kind: str = "lora.factors") -> int:
    """An allowed decision and its outcome; returns the number of the decision."""
    routing: dict[str, Any] = {"run": "r1", "round": 1, "kind": kind, "sequence": sequence}
    decision = log.append("egress.decision", decision="allow", direction="egress", facts={"x": 0.5}, **routing)
    log.append("egress.sent", payload={"bytes": payload_bytes}, link={"decision": decision}, **routing)
    return decision


def two_witnessed_logs(root: Path) -> tuple[Path, Path]:
    """Folders of a silo's and a coordinator's log that have countersigned each other and are closed."""
    paths = root / "silo", root / "coordinator"
    with open_log(paths[0]) as silo, open_log(paths[1], COORDINATOR) as coordinator:
        introduce(silo, coordinator)
        silo.append("start")
        coordinator.append("start")
        for sequence in range(4):
            append_send(silo, sequence)
            coordinator.append("ingress.decision", kind="lora.factors", decision="allow", direction="ingress")
        exchange(silo, coordinator)
        silo.append("stop")
        coordinator.append("stop")
        exchange(silo, coordinator)
        exchange(silo, coordinator)
    return paths


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def problems(*paths: Path) -> list[list[str]]:
    return [result["problems"] for result in verify_logs(list(paths))]


def segment(folder: Path) -> Path:
    return sorted(folder.glob("*.jsonl"))[0]

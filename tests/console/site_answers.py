"""Answers of the queries `certificates`, `logs` and `settings`, as a silo's desk gives them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.console.states import NOW


def moment(days: float) -> str:
    return f"{datetime.fromtimestamp(NOW + days * 86_400, UTC):%Y-%m-%dT%H:%M:%SZ}"


def certificate(whose: str, role: str, since: float, until: float, **changes: Any) -> dict[str, Any]:
    """since, until: days from now."""
    name = whose.rpartition(" ")[2]
    return {
        "subject": f"CN={whose}", "role": role,
        "names": [] if role == "CA" else [f"spiffe://cardio-net/{role}/{name}", "hospital-a.example"],
        "issuer": "CN=cardio-net federation CA", "fingerprint": "31aa9e" * 10 + "9e77",
        "not_before": moment(since), "not_after": moment(until), "days_left": int(until), "pinned": role == "CA",
        "whose": whose, "file": f"/etc/fedsilo/hospital_a/id/{name}.crt", "in_use": True, "fault": "", **changes,
    }  # fmt: skip


UNREADABLE = certificate("the operator dan", "", 0, 0) | {
    "subject": "", "names": [], "issuer": "", "fingerprint": "", "not_before": "", "not_after": "", "pinned": False,
    "fault": "the file is no certificate",
}  # fmt: skip
CERTIFICATES = [
    certificate("this silo hospital_a", "silo", -1, 6), certificate("the link to the trainer", "guard", -6, 0.6),
    certificate("the federation CA", "CA", -100, 265), certificate("the site CA", "CA", -340, 25),
    certificate("the operator alice", "operator", -0.2, 0.13), certificate("the operator bob", "operator", -3, -2.6),
    certificate("the operator carol", "operator", 1, 2), UNREADABLE,
]  # fmt: skip

_LONG = (
    "coordinator coordinator.example:7443 is back after 3.2 s; 2 messages wait for their acknowledgement, and will be "
    "sent again in the order in which they were recorded"
)
LINES = [
    f"2026-12-01T09:{minute:02d}:{second:02d}.123Z {level} hospital_a {text}"
    for minute in range(30, 50)
    for second, level, text in (
        (1, "INFO", "round 1 step 4: public.responses sent, 48231 bytes, record 41"),
        (20, "WARNING", "the trainer reports (left out)"),
        (40, "INFO", _LONG),
    )
] + ['2026-12-01T09:59:58.001Z ERROR hospital_a connection lost: UNAVAILABLE {"peer": "10.0.0.7:7443", "attempt": 3}']
LOGS = {"lines": LINES, "left_out": 20}

SETTINGS = [
    {"key": key, "value": value, "origin": origin}
    for key, value, origin in (
        ("silo", "hospital_a", "silo.yaml:2"), ("state_dir", "/var/lib/fedsilo/hospital_a", "silo.yaml:4"),
        ("identity.certificate", "/etc/fedsilo/hospital_a/id/hospital_a.crt", "silo.yaml:9"),
        ("identity.key", "/etc/fedsilo/hospital_a/id/hospital_a.key", "silo.yaml:10"),
        ("coordinator.address", "coordinator.example:7443", "silo.yaml:14"), ("trainer.threads", None, "default"),
        ("trainer.isolation", ["namespaces", "processes"], "default"),
        ("private.files", ["/data/a.jsonl", "/data/b.jsonl"], "silo.yaml:22"), ("syslog.enabled", False, "default"),
    )
]  # fmt: skip

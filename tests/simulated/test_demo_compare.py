"""What the demo says left a silo when it ran a second method for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.audit.log import AuditLog
from fedsilo.demo.run import _what_left
from fedsilo.demo.sites import Site, Sites

SILO, COORDINATOR = "spiffe://demo/silo/hospital_a", "spiffe://demo/coordinator/main"
# (run, kind, payload bytes) in the order they were sent
SENT = [
    ("", "control.poll", 4),
    ("run-1", "lora.factors", 100),
    ("run-1", "lora.factors", 100),
    ("", "control.poll", 4),
    ("run-2", "lora.factors", 100),
    ("", "control.poll", 4),
]


def sites(folder: Path, *, lost: int = 0) -> Sites:
    """Logs of one silo and of the coordinator, which did not get the last `lost` messages."""
    both = []
    for name, origin in (("hospital_a", SILO), ("main", COORDINATOR)):
        place = folder / name / "audit"
        both.append(Site(name, folder / name, folder, folder, place))
        with AuditLog(place, origin=origin, key=Ed25519PrivateKey.generate(), actor=origin, reserve_bytes=0) as log:
            for number, (run, kind, size) in enumerate(SENT if origin == SILO else SENT[: len(SENT) - lost]):
                payload = {"bytes": size, "sha256": "0" * 64}
                fields: dict[str, Any] = {"sequence": number} | ({"run": run} if run else {})
                fields["peer"] = COORDINATOR if origin == SILO else SILO
                if origin == SILO:
                    decision = log.append("egress.decision", kind=kind, decision="allow", payload=payload, **fields)
                    log.append("egress.sent", kind=kind, payload=payload, link={"decision": decision}, **fields)
                else:
                    log.append("ingress.decision", kind=kind, decision="allow", payload=payload, **fields)
    return Sites(both[1], (both[0],), "127.0.0.1:0")


def test_each_run_of_a_comparison_has_its_own_bytes(tmp_path: Path) -> None:
    left, compared, disagreements = _what_left(sites(tmp_path), "run-2")
    assert {row["kind"]: (row["messages"], row["bytes"]) for row in left} == {
        "control.poll": (2, 8),
        "lora.factors": (2, 200),
    }
    assert {row["kind"]: (row["messages"], row["bytes"]) for row in compared} == {
        "control.poll": (1, 4),
        "lora.factors": (1, 100),
    }
    assert disagreements == []


def test_without_a_comparison_all_that_left_is_the_runs(tmp_path: Path) -> None:
    left, compared, disagreements = _what_left(sites(tmp_path), "")
    assert sum(row["bytes"] for row in left) == sum(size for *_, size in SENT)
    assert compared == disagreements == []


def test_a_message_that_only_one_side_knows_is_named_also_in_the_second_run(tmp_path: Path) -> None:
    *_, disagreements = _what_left(sites(tmp_path, lost=2), "run-2")
    assert disagreements == [
        "record 9: lora.factors of 100 bytes, round 0.0 of run run-2 that hospital_a sent is not in the log of main",
        "record 11: control.poll of 4 bytes that hospital_a sent is not in the log of main",
    ]

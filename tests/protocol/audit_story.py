"""An audit log in which everything happened that a report tells of, hostile strings among it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.model import Policy
from tests.policies.setting import edited, policy_of, policy_text
from tests.protocol.audit_parties import COORDINATOR, Clock, exchange, introduce, open_log

HOSTILE = "<script>alert(1)</script>\"'&|=\\"
CERTIFICATE = "5a" * 32
FACTORS = "ef" * 32  # digest of the update


def two_policies() -> tuple[Policy, Policy]:
    """The shipped one, and one with a smaller limit in one field."""
    before = policy_of(policy_text())
    size = before.file.budgets.message_bytes
    return before, edited(f"message_bytes: {size}", f"message_bytes: {size - 1}")


def digests(policy: Policy) -> dict[str, str]:
    return {"effective": policy.digest, "file": policy.file_sha256}


def write_story(root: Path) -> tuple[Path, Path]:
    """Folders of the silo's log and the coordinator's; the silo's has several segments."""
    before, after = two_policies()
    clock = Clock()
    paths = root / "hospital_a" / "audit", root / "coordinator" / "audit"
    with (
        open_log(paths[0], clock=clock, segment_bytes_max=2500, checkpoint_records=5) as silo,
        open_log(paths[1], COORDINATOR, clock=clock) as coordinator,
    ):
        introduce(silo, coordinator)
        coordinator.append("start")

        def append(event: str, **fields: Any) -> int:
            clock.now += 1.25
            return silo.append(event, **fields)

        def decide(
            kind: str, verdict: str, size: int, *reasons: str, sequence: int = 0, direction: str = "egress",
            approvals: list[int] | None = None,
        ) -> int:  # fmt: skip
            released = kind == "lora.factors"
            return append(
                f"{direction}.decision", kind=kind, decision=verdict, reasons=list(reasons), direction=direction,
                run="run-1", round=3, step=0 if released else 2, peer=COORDINATOR, policy={"effective": policy.digest},
                payload={"bytes": size, **({"sha256": FACTORS} if released else {"hmac_sha256": "cd" * 32})},
                link={"approvals": approvals} if approvals else None, facts={"final": {"secret_fact": 0.5}},
                rules=[
                    {"rule": "delta_l2", "outcome": "deny" if verdict == "deny" else "ok", "measured": 9.5,
                     "limit": 4.0, "line": 12, "reason": "DELTA_L2"}
                ],
            )  # fmt: skip

        def send(kind: str, size: int, sequence: int, approvals: list[int] | None = None) -> None:
            released = kind == "lora.factors"
            routing: dict[str, Any] = {"kind": kind, "run": "run-1", "round": 3, "sequence": sequence}
            routing["step"] = 0 if released else 2
            decision = decide(kind, "allow", size, approvals=approvals)
            link, payload = {"decision": decision}, {"bytes": size, "sha256": FACTORS if released else "cd" * 32}
            append("egress.sent", payload=payload, link=link, peer=COORDINATOR, direction="egress", **routing)
            append("egress.acked", payload=payload, link=link, peer=COORDINATOR, direction="egress", **routing)

        policy = before
        append("start", detail={"version": "0.1.0", "code": "ab" * 32})
        append("policy.load", policy=digests(policy), detail={"name": "pubswap", "mode": "enforce"})
        send("control.hello", 490, 1)
        for sequence in range(2, 6):
            send("public.responses", 300 + sequence, sequence)
        decide("lora.factors", "deny", 352239, "DELTA_L2", "NAME_UNKNOWN")
        decide("lora.factors", "deny", 352239, "DELTA_L2")
        decide("run.plan", "deny", 900, "PLAN_RANGE", direction="ingress")
        decide("lora.factors", "hold", 352239, "APPROVALS")
        release: dict[str, Any] = {
            "kind": "lora.factors", "run": "run-1", "round": 3, "step": 0,
            "payload": {"bytes": 352239, "sha256": FACTORS}, "policy": {"effective": policy.digest},
        }  # fmt: skip
        name = {"release": "r3/hospital_a", "expires_at": 1800003600}
        append("approval.request", reasons=["APPROVALS"], detail=name, **release)
        alice = {"person": "alice", "certificate": CERTIFICATE}
        send("lora.factors", 352239, 6, [append("approval.grant", detail={**name, **alice}, **release)])
        name = {"release": "r4/hospital_a", "expires_at": 1800007200}
        append("approval.request", reasons=["APPROVALS"], detail=name, **release)
        bob = {"person": "bob", "certificate": "6b" * 32}
        append("approval.deny", reasons=["CONTENT"], detail={**name, **bob}, **release)
        append("halt", reasons=["LOG_FULL"], detail={"refused_event": "egress.decision"})
        append("start", detail={"version": "0.1.0", "code": "ab" * 32})
        policy = after
        append("policy.load", policy=digests(policy), detail={"name": "pubswap", "mode": "enforce"})
        hostile = {"kind": HOSTILE, "run": HOSTILE, "peer": HOSTILE, "direction": "ingress"}
        append("ingress.decision", decision="deny", reasons=["UNKNOWN_KIND"], **hostile)
        append("egress.indeterminate", kind=HOSTILE, run=HOSTILE, detail={"name": HOSTILE})
        exchange(silo, coordinator)
        append("stop", detail={"run": "run-1"})
        coordinator.append("stop")
        exchange(silo, coordinator)
        exchange(silo, coordinator)
    return paths

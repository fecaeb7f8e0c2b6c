"""What is asked of the daemons of an archive (`tools.vectors`): every query, with arguments that are answered with
something, and with some that are refused; at the end commands, each followed by what it changes."""

from __future__ import annotations

from tests.answers import Daemon, Question


def of_daemon(daemon: Daemon) -> list[Question]:
    """Every query of a daemon: as often as it has something different to tell, and with what is wrong.

    Chosen when an archive is made, from what the daemon lists; a test asks what was chosen then.
    """
    found: list[Question] = [*_BOTH, *(_COORDINATOR if daemon.party.program == "coordinator" else _SILO)]
    names = list(dict.fromkeys(name for name, _ in found if name))
    size = daemon.kept_records  # what this start wrote comes behind them
    found += [(name, {"before": size} | asked) for name in ("inbox", "audit") for asked in ({}, {"control": True})]
    if daemon.party.program == "silo":
        found += [("outbox", {"control": True, "before": size})]
        releases = daemon.read("approvals", {"limit": 100})["releases"]
        for release in releases:
            found += [(name, {"release": release["id"]}) for name in ("approval", "approval.comparison")]
        found += [("approvals", {"kind": kind}) for kind in sorted({release["kind"] for release in releases})]
    for name in ("outbox", "inbox"):
        rows = daemon.read(name, {"control": True, "limit": 500})["messages"]
        different = {(row["kind"], row.get("verdict"), row["outcome"]): row["seq"] for row in rows}
        found += [(name, {"seq": sequence}) for sequence in different.values()]
    records, before = [], None
    while before != 0:
        page = daemon.read("audit", {"limit": 200} | ({} if before is None else {"before": before}))
        records += page["records"]
        before = page["next"] or 0
    found += [("audit", {"event": event, "limit": 1}) for event in sorted({record["event"] for record in records})]
    for name in ("round", "curves"):
        found += [(name, {"run": run}) for run in daemon.runs()]
    found += [("round", {"run": run, "round": number}) for run in daemon.runs() for number in (1, 2, 3)]
    if daemon.party.program == "coordinator":
        found += [(name, {"run": run}) for name in ("run", "traffic") for run in daemon.runs()]
    found += [(name, {"surprise": 1}) for name in names]
    # after these the log has more to tell
    found += [("audit.verify", {}), ("audit.status", {})]
    if daemon.party.program == "silo":
        found += [(name, {"ticket": "of nobody"}) for name in TICKETS]
        found += [
            ("approvals.payload", {"order": {"release": release["id"], "digest": release["digest"]}})
            for release in releases
            if release["state"] == "held"
        ]
        sent = {record["kind"]: record["seq"] for record in records if record["event"] == "egress.decision"}
        found += [("payload", {"order": {"seq": sequence}}) for sequence in sent.values()]
        for release in releases:
            digests = {"digest": release["digest"], "policy_digest": release["policy_digest"]}
            later = {"until_seconds": daemon.party.seconds + 600, "revision": release["revision"]}
            found += [("!approvals.defer", {"release": release["id"]} | digests | later)]
        found += [("!pause", {}), ("!policy.reload", {}), ("!no.such.command", {}), ("", {}), ("approvals", {})]
    else:
        found += [(f"!run.{verb}", {"run": "run-1"}) for verb in ("pause", "resume", "pause", "start")]
        found += [("", {}), ("logs", {}), ("logs", {"lines": 1}), ("round", {}), ("!run.abort", {"run": "run-1"})]
        found += [("", {}), ("runs", {}), ("run", {"run": "run-1"}), ("outbox", {"waiting": True}), ("logs", {})]
    return found


TICKETS = ("payload", "approvals.payload")  # answered once, to whoever has given a signed command before
_BOTH: list[Question] = [
    ("", {}),
    ("no.such.query", {}),
    ("outbox", {}),
    ("outbox", {"limit": 3}),
    ("outbox", {"kind": "lora.factors"}),
    ("outbox", {"limit": 0}),
    ("outbox", {"seq": 0}),
    ("inbox", {}),
    ("inbox", {"limit": 3}),
    ("inbox", {"verdict": "deny"}),
    ("inbox", {"seq": 0}),
    ("inbox", {"seq": 1, "limit": 1}),
    ("inbox", {"verdict": "perhaps"}),
    ("audit", {"limit": 12}),
    ("audit", {"limit": 3, "before": 9}),
    ("audit", {"control": False, "limit": 10}),
    ("audit", {"text": "hospital_b", "limit": 2}),
    ("audit", {"limit": 201}),
    ("audit", {"event": 7}),
    ("audit.status", {}),
    ("round", {}),
    ("round", {"run": "run-9"}),
    ("round", {"round": -1}),
    ("curves", {}),
    ("curves", {"x": "step"}),
    ("curves", {"names": "pass_at_1"}),
    ("curves", {"run": "run-9"}),
    ("curves", {"x": "year"}),
    ("certificates", {}),
    ("settings", {}),
    ("logs", {"lines": 1000}),
    ("logs", {"source": "trainer"}),
    ("logs", {"lines": True}),
]
_SILO: list[Question] = [
    ("approvals", {}),
    ("approvals", {"state": "held"}),
    ("approvals", {"limit": 1}),
    ("approvals", {"before": 2}),
    ("approvals", {"state": "lost"}),
    ("approval", {"release": "r9/hospital_a/0"}),
    ("approval", {}),
    ("approval.comparison", {"release": "r9"}),
    ("outbox", {"verdict": "hold"}),
    ("outbox", {"verdict": "deny"}),
    ("limits", {}),
    ("ledger", {}),
    ("ledger", {"limit": 2}),
    ("ledger", {"before": 3}),
    ("ledger", {"limit": 1000}),
    ("halts", {}),
    ("adapters", {}),
    ("curves", {"names": "reward_mean,kl", "x": "step"}),
]
_COORDINATOR: list[Question] = [
    ("runs", {}),
    ("run", {}),
    ("run", {"run": "run-9"}),
    ("silos", {}),
    ("traffic", {}),
    ("traffic", {"run": "run-9"}),
    ("outbox", {"waiting": True}),
    ("outbox", {"silo": "hospital_b", "limit": 2}),
    ("outbox", {"run": "run-1"}),
    ("outbox", {"seq": "run-9/1/round.open/hospital_a"}),
]


def of_recording(program: str) -> list[Question]:
    """What a console asks that goes through its screens."""
    both: list[Question] = [
        ("round", {}),
        ("curves", {}),
        ("outbox", {"limit": 5}),
        ("inbox", {"limit": 5}),
        ("audit", {"limit": 5}),
        ("audit.status", {}),
    ]
    if program == "silo":
        return [*both, ("approvals", {}), ("limits", {}), ("adapters", {}), ("halts", {})]
    runs: list[Question] = [("run", {"run": "run-1"}), ("run", {"run": "run-2"})]
    return [*both, *runs, ("runs", {}), ("silos", {}), ("traffic", {})]

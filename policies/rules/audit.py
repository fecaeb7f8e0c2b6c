"""Rules on what silos sign for each other: what a silo says of others' logs, who has witnessed its own (T38), and its
signature under the transcript of a round (T20)."""

from __future__ import annotations

from fedsilo.protocol.transcript import SIGNATURE_BYTES
from policies.catalogue import NAMES_MAX
from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import Judgement, at_least, block_of, holds, not_applicable, rule, side_of


@rule("checkpoints of others", "CHECKPOINTS_OF_OTHERS", "control.checkpoint")
def others(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A silo shows no log but its own, and countersigns at most one checkpoint of each other silo at a time."""
    shown, signed = facts["peer_logs"], facts["countersigned"]
    # the coordinator carries for every silo; this site looks only at those that its policy lists
    outward = side_of(facts, policy) == "egress"
    logs, most = (0, len(policy.peers) - 1) if outward else (NAMES_MAX, NAMES_MAX)
    return holds(
        0 <= shown <= logs and 0 <= signed <= most,
        ("federation", "peers"),
        measured=f"{shown} logs, {signed} cosignatures",
        limit=f"at most {logs} logs, {most} cosignatures",
    )


@rule("witnesses", "TOO_FEW_WITNESSES", "round.open")
def witnesses(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A further round opens once enough parties have countersigned this site's log as it was after the last one."""
    _, path = block_of(facts, policy)
    if facts["direction"] != "ingress" or facts["round"] <= 1:
        return not_applicable(path)
    return at_least(facts["witnesses"], policy.file.audit.min_witnesses, ("audit", "min_witnesses"))


@rule("countersignature", "COUNTERSIGNATURE", "control.poll")
def countersignature(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A poll carries a signature of exactly its length while a round waits for it, and nothing at any other time (T9).
    Whether it verifies, its receiver looks; there it may also come late."""
    _, path = block_of(facts, policy)
    size = facts["countersignature_bytes"]
    most = SIGNATURE_BYTES if facts["countersigns"] is True or facts["direction"] == "ingress" else 0
    return holds(size in (0, most), path, measured=size, limit=f"0 or {most} bytes")


RULES = (others, witnesses, countersignature)

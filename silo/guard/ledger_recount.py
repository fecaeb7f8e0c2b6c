"""What a ledger that was restored from an older copy has to be told again, read from the audit log (threat T42, L4).

Nothing is set to a lower value. Budgets and counters become the larger of what the ledger says and what the log shows
to have been allowed; a kind that either of them says is halted is halted; every run and every proposal that the log
names is spent. What waited in the older copy may have left since: holds end, what lay in its outbox is dropped, and a
run that is open in it is left.

Does not count: answers to empty polls, which stand in no record; what retention has reduced to hashes; what stood in a
newer ledger alone, such as approvals that were given and had not had their effect yet. People give those again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsilo.audit.poll_window import count_in, permitted_by
from fedsilo.protocol.services import TENSOR_KINDS
from policies.engine import HistoryBook

_NEVER_HALTS = 1 << 52  # as a limit of hits: the log has a record of each halt


@dataclass
class Recount:
    """What the log alone says.

    Attributes:
        book: counts of all that was allowed out, and what screens found and halted.
        sent: run -> highest sequence of a message that went out.
        received, taken: highest sequence of a message that was let in; of one that is an item of the coordinator's
            outbox, which comes again until it is acknowledged.
        runs: names that are spent.
        open: the run that was last taken part in, if no end of it is on record.
        proposals: of policies, each used.
        releases: "round/silo" -> how many numbers of held releases are used up.
        decided_by: digest of the policy that decided last; empty where no record says it.
        restored: digests of what approvers accepted before.
        waiting: id of a held release -> what is recorded of it, where no end of it is on record.
    """

    book: HistoryBook = field(default_factory=HistoryBook)
    sent: dict[str, int] = field(default_factory=dict)
    received: int = 0
    taken: int = 0
    runs: set[str] = field(default_factory=set)
    open: str = ""
    proposals: set[str] = field(default_factory=set)
    releases: dict[str, int] = field(default_factory=dict)
    decided_by: str = ""
    restored: set[str] = field(default_factory=set)
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict)


_OF_RELEASE = ("kind", "run", "round", "step", "payload", "detail")


def recounted(records: Iterable[Mapping[str, Any]]) -> Recount:
    """Read them once, oldest first."""
    found, granted, windows = Recount(), dict[int, str](), dict[int, Mapping[str, Any]]()
    for record in records:
        event, run, detail = record["event"], record.get("run", ""), record.get("detail", {})
        found.runs |= {run} - {""}
        match event:
            case "plan.accept":
                found.open = run
            case "silo.leave" if run == found.open:
                found.open = ""
            case "egress.decision" | "egress.sent" | "egress.indeterminate":
                found.sent[run] = max(found.sent.get(run, 0), record.get("sequence", 0))
                if record.get("decision") == "allow" and (facts := record.get("facts", {}).get("final")):
                    found.book.record(facts)
                    if permitted_by(record):
                        windows[record["seq"]] = facts
                if (facts := windows.pop(record["link"].get("decision", -1), None)) is not None:
                    _close_window(found, record, facts)
            case "ingress.decision":
                _take_in(found, record)
            case "clock.accept":
                found.book.turn_back(record["t"] / 1000)
            case "ledger.check" if "shown" in detail:
                found.restored.add(detail["shown"])
            case "screen.hit":
                found.book.count_hits(record["kind"], record["t"] / 1000, detail.get("responses", 0), _NEVER_HALTS)
            case "halt" if "SCREEN_HALT" in record.get("reasons", ()):
                found.book.screen_halts[record["kind"]] = record["t"] / 1000
            case "release" if "SCREEN_HALT" in record.get("reasons", ()):
                found.book.release_halt(record["kind"], record["t"] / 1000)
            case "approval.request":
                stem, _, number = detail["release"].rpartition("/")
                found.releases[stem] = max(found.releases.get(stem, 0), int(number) + 1)
                found.waiting[detail["release"]] = {name: record[name] for name in _OF_RELEASE if name in record}
            case "approval.grant" if "release" in detail:
                granted[record["seq"]] = detail["release"]
            case "approval.deny" | "approval.expire":
                found.waiting.pop(detail["release"], None)
        if event in ("egress.decision", "ingress.decision"):
            for number in record["link"].get("approvals", ()):
                found.waiting.pop(granted.get(number, ""), None)
        if "proposal" in detail:
            found.proposals.add(str(detail["proposal"]))
        if event in ("policy.load", "egress.decision", "ingress.decision"):
            found.decided_by = str(record.get("policy", {}).get("effective", found.decided_by))
    return found


def _close_window(found: Recount, record: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Of the polls of a window one is counted with its decision. After a crash as many count as it permitted, and the
    record does not know their last number."""
    detail, run = record.get("detail", {}), record.get("run", "")
    most = max(count_in(detail, "polls") or 0, count_in(detail, "polls_most") or 0)
    found.book.add_bytes(facts["now"], max(0, most - 1) * facts["payload_bytes"])
    if "polls_most" in detail and record.get("sequence") == detail.get("first"):
        found.sent[run] += most


def _take_in(found: Recount, record: Mapping[str, Any]) -> None:
    kind, sequence = record["kind"], record.get("sequence", 0)
    found.received = max(found.received, sequence)
    # A number of an answer (control.*, an adapter) stands for no item of the coordinator's outbox.
    if record["decision"] == "allow" and not kind.startswith("control.") and kind not in TENSOR_KINDS:
        found.taken = max(found.taken, sequence)
        if kind == "run.end" and record.get("run") == found.open:
            found.open = ""

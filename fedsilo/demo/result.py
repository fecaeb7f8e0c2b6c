"""What a demo came to: pass@1, what left by the logs of both ends, whether the logs verify, what the wire shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.protocol.errors import FedSiloError, OperationError, VerificationError

if TYPE_CHECKING:
    from fedsilo.audit.consistency import LogSummary
    from fedsilo.demo.attacks import Hostile
    from fedsilo.demo.sites import Site, Sites
    from fedsilo.demo.wire import Witness


@dataclass
class Result:
    """What a demo came to; `data` is the JSON of design 6."""

    data: dict[str, Any]
    record: dict[str, Any]
    sites: Sites
    compared: dict[str, Any] = field(default_factory=dict)
    error: FedSiloError | None = None


def result_of(
    sites: Sites,
    record: dict[str, Any],
    compared: dict[str, Any],
    processes: int,
    seconds: float,
    *,
    witness: Witness | None = None,
    hostile: Hostile | None = None,
) -> Result:
    """Add the figures up and check them against each other; everything has stopped.

    Args:
        sites: their logs are read.
        record: of the run.
        compared: of the second run; empty for none.
        processes: that ran.
        seconds: the runs took.
        witness: what crossed.
        hostile: the hostile trainer.
    """
    from fedsilo.audit.audit_verify import verify_logs
    from fedsilo.audit.transcripts import check_rounds

    left, compared_left, disagreements = _what_left(sites, compared["run"] if compared else "")
    logs = [site.audit_log for site in sites.all()]
    verdicts = verify_logs(logs)
    check_rounds(verdicts, logs)
    names = {str(site.audit_log): site for site in sites.all()}
    audit = [
        {
            "log": "coordinator" if names[str(row["path"])] is sites.coordinator else names[str(row["path"])].name,
            "path": str(row["path"]),
            "verified": bool(row["verified"]),
            "problems": list(row.get("problems", ())),
        }
        for row in verdicts
    ]
    data = {
        "run": record["run"],
        "state": record["state"],
        "method": record["plan"]["method"] if record["plan"] else "",
        **figures(record),
        "left": left,
        "audit": audit,
        "adapter": str(Path(record["folder"]) / "adapter"),
        "run_record": str(Path(record["folder"]) / "run_record.json"),
        "rounds": [
            {"round": row["round"], "state": row["state"], "participants": row["participants"]}
            for row in record["rounds"]
        ],
        "donors_trained": _donors_trained(record),
        "isolation": record["isolation"],
        "rows_left_out": record["rows_left_out"],
        "seconds": round(seconds, 1),
        "processes": processes,
    }
    if compared:
        data["compared"] = {
            "method": compared["plan"]["method"],
            "state": compared["state"],
            "left": compared_left,
            **figures(compared),
        }
    error: FedSiloError | None = None
    unverified = [str(row["log"]) for row in audit if not row["verified"]]
    bad_rounds = [row["round"] for row in record["rounds"] if row["state"] != "committed"]
    if unverified:
        error = _failed(f"the audit log of {', '.join(unverified)} does not verify", 7)
    elif disagreements:
        error = _failed(f"silo and coordinator do not tell the same: {'; '.join(disagreements)}", 7)
    elif record["state"] != "finished" or bad_rounds or (compared and compared["state"] != "finished"):
        error = _failed(f"the run ended as {record['state']}: {record['reason'] or bad_rounds or 'see the logs'}", 1)
    if witness is not None:
        error = _worse(error, _searched(sites, data, witness))
    if hostile is not None:
        error = _worse(error, _attacked(data, hostile))
    return Result(data, record, sites, compared, error)


def _searched(sites: Sites, data: dict[str, Any], witness: Witness) -> FedSiloError | None:
    from fedsilo.demo import wire as demo_wire

    verdict = witness.search()
    data |= demo_wire.figures(witness.planted, verdict)
    fault = demo_wire.fault(sites, verdict)
    return OperationError(fault, code="LEAKED" if verdict.found else "WIRE_NOT_PROVEN") if fault else None


def _attacked(data: dict[str, Any], hostile: Hostile) -> FedSiloError | None:
    from fedsilo.demo import attacks as demo_attacks

    data["attacks"] = hostile.verdicts()
    data["attacker"] = hostile.site.name
    data["not_stopped"] = demo_attacks.NOT_STOPPED
    code, why = demo_attacks.fault(data["attacks"], hostile.reached_coordinator(data["attacks"]))
    return OperationError(why, code=code) if code else None


def _worse(before: FedSiloError | None, after: FedSiloError | None) -> FedSiloError | None:
    """What got out comes before a log that does not verify, and that before everything else."""
    errors = [error for error in (before, after) if error is not None]
    return min(errors, key=lambda error: (error.code != "LEAKED", error.exit_code != 7), default=None)


def _failed(message: str, exit_code: int) -> FedSiloError:
    return VerificationError(message) if exit_code == 7 else OperationError(message)


def figures(record: dict[str, Any]) -> dict[str, Any]:
    """pass@1 before and after, in all, per silo and per topic (means over silos), from what the silos sent."""
    before = record["before"]["metrics"]
    after = record["rounds"][-1]["metrics"] if record["rounds"] else {}
    silos = sorted(set(before) & set(after))

    def mean(of: dict[str, Any], metric: str, topic: str) -> float:
        values = [of[silo][metric][topic] for silo in silos if topic in of[silo].get(metric, {})]
        return round(sum(values) / len(values), 4) if values else 0.0

    topics = sorted({topic for silo in silos for topic in after[silo].get("pass_at_1", {}) if topic})
    return {
        "pass_at_1": {"before": mean(before, "pass_at_1", ""), "after": mean(after, "pass_at_1", "")},
        "pass_at_1_greedy": {
            "before": mean(before, "pass_at_1_greedy", ""),
            "after": mean(after, "pass_at_1_greedy", ""),
        },
        "per_silo": {
            silo: {"before": before[silo]["pass_at_1"][""], "after": after[silo]["pass_at_1"][""]} for silo in silos
        },
        "per_topic": {
            topic: {"before": mean(before, "pass_at_1", topic), "after": mean(after, "pass_at_1", topic)}
            for topic in topics
        },
    }


def _what_left(sites: Sites, compared_run: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Counted from each silo's own audit log, and compared with what the coordinator's log says came in.

    Returns:
        What left for the run itself, what left from the first record of `compared_run` on, and which messages only
        one side's log has.
    """
    from fedsilo.audit.consistency import differences, summarize
    from fedsilo.audit.log import sent_by_kind
    from fedsilo.audit.reader import read_records

    def summary(site: Site, records: Iterable[dict[str, Any]]) -> LogSummary:
        own = (site.audit_log / "keys" / "log.vkey").read_text(encoding="utf-8")
        return summarize(records, origin=own.partition("+")[0], name=site.name)

    receiver = summary(sites.coordinator, read_records(sites.coordinator.audit_log))
    left: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    disagreements = []
    for site in sites.silos:
        records = list(read_records(site.audit_log))
        disagreements += differences(summary(site, records), receiver, under_way=False)
        own = list(takewhile(lambda record: not compared_run or record.get("run") != compared_run, records))
        for rows, part in zip(left, (own, records[len(own) :]), strict=True):
            rows += [
                {"silo": site.name, "kind": kind, "messages": messages, "bytes": size}
                for kind, (messages, size) in sent_by_kind(part).items()
            ]
    return *left, disagreements


def _donors_trained(record: dict[str, Any]) -> dict[str, int]:
    """Donor answers that entered a step, by silo, over all rounds; `donors_sent` of the record is the other end."""
    totals = dict.fromkeys(record["plan"]["silos"], 0)
    for row in record["rounds"]:
        for silo, metrics in row["metrics"].items():
            totals[silo] += int(metrics.get("donors_trained", {}).get("", 0))
    return totals

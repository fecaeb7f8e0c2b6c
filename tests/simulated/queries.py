"""A site's queries on a real gate and log, the same lists read slowly from the whole log, and a log of any length."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coordinator.answers.queries import Panel
from coordinator.answers.rounds import RoundView
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import link_of
from fedsilo.audit.segments import segments
from fedsilo.control.answers import to_json
from fedsilo.control.server import QueryHandler
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.place import Place
from silo.guard.answers.curves import FigureHistory
from silo.guard.answers.queries import Queries
from tests.policies import setting
from tests.simulated.coordinator_parts import House
from tests.world import OUR_KEY, Bench

WAIT_SECONDS = 30
CHARTER = "c" * 64


def queries_of(bench: Bench, site: Any = None) -> Mapping[str, Any]:
    """The handlers, as a guard on this bench registers them."""
    return as_json(asked_of(bench, site))


def as_json(queries: Queries | Panel) -> dict[str, Any]:
    """Return each query of a silo, or each of a coordinator's panel, by its name, answered in JSON."""
    handlers = queries.queries() if isinstance(queries, Panel) else queries.handlers()
    return {name: in_json(handler) for name, handler in handlers.items()}


def in_json(handler: QueryHandler) -> QueryHandler:
    return lambda arguments: to_json(handler(arguments))


def rounds_of(house: House) -> QueryHandler:
    """Return the query `round` of a coordinator, answered in JSON."""
    return in_json(RoundView(house.driver, CHARTER).round)


def asked_of(bench: Bench, site: Any = None) -> Queries:
    """What may be asked of a guard on this bench."""
    parts: Any = site or SimpleNamespace(schema=setting.SCHEMA, roles=SimpleNamespace(people={}))
    history = FigureHistory(bench.audit.directory.parent / "figures.jsonl")
    return Queries(
        parts, bench.judge, bench.ledger, bench.audit, bench.releases, history, clock=lambda: bench.clock_now
    )


def poll(bench: Bench) -> None:
    bench.gate.send(Place("", 0, 0, "control.poll"), pb.Poll(wait_milliseconds=1000))


def slow(audit: AuditLog, direction: str, *, control: bool = False) -> list[dict[str, Any]]:
    """Every message, newest first, from one reading of the whole log."""
    records = {record["seq"]: record for record in audit.records()}
    rows = []
    for record in records.values():
        if record["event"] != f"{direction}.decision":
            continue
        if not control and record["kind"].startswith("control.") and record["decision"] == "allow":
            continue
        fate = [
            each for each in records.values()
            if each["event"].startswith("egress.") and each["link"].get("decision") == record["seq"]
        ]  # fmt: skip
        ended = _hold_end(record, list(records.values()))
        sent = [each for each in fate if each["event"] == "egress.sent" and each["boot"] == record["boot"]]
        rows.append(
            {
                "seq": record["seq"], "kind": record["kind"], "verdict": record["decision"],
                "run": record.get("run", ""), "round": record.get("round", 0), "step": record.get("step", 0),
                "bytes": record.get("payload", {}).get("bytes", 0), "reasons": record.get("reasons", []),
                "rules": [rule["rule"] for rule in record.get("rules", ()) if rule["outcome"] in ("deny", "hold")],
                "outcome": fate[-1]["event"].removeprefix("egress.") if fate else ended,
                "milliseconds": sent[-1]["mono"] - record["mono"] if sent else None,
            }
        )  # fmt: skip
    return rows[::-1]


def _hold_end(record: Mapping[str, Any], records: list[Any]) -> str:
    """How the hold of one message ended, of whose bytes no other was held."""
    if record["decision"] != "hold":
        return ""
    for each in records[records.index(record) + 1 :]:
        if _digest(each) != _digest(record):
            continue
        if each["event"] == "approval.deny":
            return "rejected" if each["detail"].get("person") else "denied"
        if each["event"] == "approval.expire":
            return {"EXPIRED": "expired", "POLICY_CHANGED": "denied"}.get(each["reasons"][0], "missed")
        if each["event"] == "egress.decision" and each["link"].get("approvals"):
            return "approved" if each["decision"] == "allow" else "denied"
    return ""


def _digest(record: Mapping[str, Any]) -> Any:
    payload = record.get("payload", {})
    return payload.get("sha256", payload.get("hmac_sha256"))


def same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Whether rows of a query say what the slow ones say, in all that those say."""
    return [{name: row[name] for name in want} for row, want in zip(rows, expected, strict=False)] == expected and len(
        rows
    ) == len(expected)


def all_pages(query: Any, arguments: Mapping[str, Any], between: Any = lambda: None) -> list[dict[str, Any]]:
    """Every page of a list after the other; `between` happens after each."""
    rows: list[dict[str, Any]] = []
    before: int | None = None
    while True:
        answer = query({**arguments, "before": before})
        found = answer["messages"] if "messages" in answer else answer["records"]
        assert len(found) <= arguments["limit"]
        rows += found
        between()
        if answer["next"] is None:
            return rows
        assert before is None or answer["next"] < before
        before = answer["next"]


def settled(status: Any) -> dict[str, Any]:
    """The status once no verification goes on."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (shown := status({}))["verifying"]:
        assert time.monotonic() < deadline
    return dict(shown)


def long_log(folder: Path, records: int) -> AuditLog:
    """A log of so many records, nine in ten about polls, written without a flush for each; opened as a daemon does."""
    with _opened(folder) as log:
        log.append("start")
        (first,) = log.records()
        size = log.size
    path = segments(folder)[-1][1]
    previous = link_of(path.read_bytes().splitlines()[-1])
    lines: list[bytes] = []
    for seq in range(size, size + records - records % 2):
        record = {name: first[name] for name in ("v", "boot", "actor")}
        record |= {"seq": seq, "t": first["t"] + seq, "mono": first["mono"] + seq}
        record["salt"] = hashlib.md5(str(seq).encode(), usedforsecurity=False).hexdigest()
        content = seq % 20 in (1, 2)
        record |= {"kind": "metrics.eval" if content else "control.poll", "run": "run-1", "round": seq // 1000}
        record |= {"step": 0, "direction": "egress", "payload": {"bytes": 7, "hmac_sha256": "ab" * 32}}
        if seq % 2:
            verdict = ("deny" if seq % 60 == 1 else "allow") if content else "allow"
            record |= {"event": "egress.decision", "decision": verdict, "link": {"previous": previous}}
        elif lines and json.loads(lines[-1])["decision"] == "deny":
            record |= {"event": "screen.hit", "link": {"previous": previous}}
        else:
            record |= {"event": "egress.sent", "link": {"previous": previous, "decision": seq - 1}}
        line = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        previous = link_of(line)
        lines.append(line)
    with path.open("ab") as stream:
        stream.write(b"".join(line + b"\n" for line in lines))
    return _opened(folder)


def _opened(folder: Path) -> AuditLog:
    return AuditLog(folder, origin=setting.SILO, key=OUR_KEY, actor=setting.SILO, reserve_bytes=0)

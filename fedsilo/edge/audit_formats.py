"""Audit records as a site's own log system wants them: JSON lines, OCSF or CEF. Pure; one line of ASCII a record.

Only what `chosen` picks leaves: the fields on its list, and of these only numbers, digests, codes and short names. A
name with any other character is replaced by WITHHELD and its field is listed, so that nothing that another party
wrote can steer a parser or a person (threat T37). Never exported: facts, salt, clocks of the host, free text.

    jsonl   the chosen fields themselves
    ocsf    OCSF 1.6.0, class API Activity (6003), profile security_control where there is a decision
    cef     ArcSight Common Event Format 0, predefined extension keys only
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

SCHEMA = "fedsilo.audit/1"
OCSF_VERSION = "1.6.0"
WITHHELD = "(withheld)"
LIST_ITEMS_MAX = 16
LINE_BYTES_MAX = 8192  # the longest syslog message that every receiver should take (RFC 5425, 4.3.1)

_NAME = re.compile(r"[A-Za-z0-9_.:/@+-]{1,128}")
_HEX = re.compile(r"[0-9a-f]{16,128}")
_DETAIL: Final = (
    "release", "person", "certificate", "expires_at", "name", "mode", "version", "code", "plan", "port", "run",
    "quarantine", "bytes", "size", "root", "refused_event", "backward_milliseconds",
    "forward_milliseconds",
)  # fmt: skip
_ROUTING: Final = ("run", "round", "step", "attempt", "kind", "sequence", "peer", "direction")


@dataclass(frozen=True)
class Meaning:
    """What an event is to somebody who watches logs.

    Attributes:
        name: a fixed sentence; nothing of the record is in it.
        severity: OCSF severity_id: 1 informational, 2 low, 3 medium, 4 high, 5 critical.
    """

    name: str
    severity: int = 1


MEANINGS: Final[Mapping[str, Meaning]] = {
    "start": Meaning("daemon started"),
    "stop": Meaning("daemon stopped"),
    "trainer.restart": Meaning("trainer died and was started again, or could not be", 3),
    "policy.load": Meaning("policy loaded"),
    "policy.reload_refused": Meaning("policy change refused", 4),
    "plan.accept": Meaning("plan of a run accepted"),
    "egress.decision": Meaning("outbound message judged"),
    "egress.sent": Meaning("message left the site"),
    "egress.acked": Meaning("message acknowledged by the receiver"),
    "egress.indeterminate": Meaning("outcome of an allowed message not known", 3),
    "ingress.decision": Meaning("inbound message judged"),
    "ingress.polls": Meaning("polls of a window counted"),
    "approval.request": Meaning("message held for approval", 2),
    "approval.grant": Meaning("held message approved by a person", 2),
    "approval.deny": Meaning("held message rejected", 3),
    "approval.expire": Meaning("held message expired", 2),
    "release.defer": Meaning("held message put off by a person, for that person"),
    "screen.hit": Meaning("text screen matched", 4),
    "dp.debit": Meaning("privacy budget used"),
    "ledger.check": Meaning("ledger checked"),
    "key.enrol": Meaning("key enrolled", 2),
    "key.renew": Meaning("key renewed", 2),
    "key.expire_warn": Meaning("certificate expires soon", 3),
    "denylist.load": Meaning("deny list loaded"),
    "secagg.step": Meaning("secure aggregation step"),
    "halt": Meaning("sending halted", 5),
    "release": Meaning("halt lifted by a person", 3),
    "tail.repaired": Meaning("torn end of the audit log repaired", 3),
    "segment.close": Meaning("audit log segment closed"),
    "round.transcript": Meaning("transcript of a round signed"),
    "round.agreed": Meaning("enough silos signed the transcript of a round"),
    "round.result": Meaning("a round ended"),
    "round.equivocation": Meaning("two signed transcripts of one round", 5),
    "clock.jump": Meaning("clock jumped, or nobody could vouch for it", 3),
    "clock.accept": Meaning("clock accepted by a person after it was found wrong", 4),
    "payload.read": Meaning("archived payload read by a person", 2),
    "retention.payloads": Meaning("archived payloads deleted"),
    "retention.records": Meaning("old records reduced to leaf hashes"),
    "run.submit": Meaning("run submitted by a person", 2),
    "run.start": Meaning("waiting run started by a person", 2),
    "run.pause": Meaning("run paused by a person", 2),
    "run.resume": Meaning("run resumed by a person", 2),
    "run.abort": Meaning("run aborted by a person", 3),
    "silo.pause": Meaning("silo paused by a person", 2),
    "silo.resume": Meaning("silo resumed by a person", 2),
    "adapter.verdict": Meaning("a global adapter measured on this site's own prompts"),
    "adapter.accept": Meaning("held adapter accepted by a person", 3),
    "adapter.refuse": Meaning("held adapter refused by a person", 2),
    "adapter.rollback": Meaning("silo went back to an earlier adapter by a person's order", 3),
    "silo.leave": Meaning("silo left its run by a person's order", 3),
    "transfer.export": Meaning("messages written into a file that people carry", 2),
    "transfer.import": Meaning("messages taken from a file that people carried", 2),
    "silo.stop": Meaning("silo stopped by a person", 3),
}
_REFUSED_SEVERITY = {"deny": 4, "hold": 2}


def severity_of(event: Mapping[str, Any]) -> int:
    """OCSF severity_id of chosen fields: a refusal counts more than the event it is told by."""
    return max(MEANINGS[event["event"]].severity, _REFUSED_SEVERITY.get(event.get("decision", ""), 1))


def chosen(record: Mapping[str, Any], leaf: str, origin: str) -> dict[str, Any]:
    """The fields that may be exported.

    Args:
        record: as parsed from the log.
        leaf: hash of its line, hex: with it the exported copy can be compared with the log, record by record.
        origin: name of the log.
    """
    withheld: list[str] = []

    def safe(name: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str) and (not value or _NAME.fullmatch(value)):
            return value
        withheld.append(name)
        return WITHHELD

    picked: dict[str, Any] = {
        "schema": SCHEMA, "log": safe("log", origin), "seq": record["seq"], "t": record["t"], "event": record["event"],
        "actor": safe("actor", record["actor"]), "leaf": leaf, "previous": record["link"]["previous"],
    }  # fmt: skip
    picked |= {name: safe(name, record[name]) for name in _ROUTING if record.get(name) not in (None, "")}
    if "decision" in record:
        picked["decision"] = record["decision"]
    if record.get("reasons"):
        picked["reasons"] = [safe("reasons", code) for code in record["reasons"][:LIST_ITEMS_MAX]]
    rules = [rule for rule in record.get("rules", ()) if rule.get("outcome") in ("deny", "hold")]
    if rules:
        picked["rules"] = [_rule(rule, safe) for rule in rules[:LIST_ITEMS_MAX]]
    if len(rules) > LIST_ITEMS_MAX or len(record.get("reasons", ())) > LIST_ITEMS_MAX:
        picked["shortened"] = True
    blocks = {
        "policy": ("effective", "file", "code", "schema"),
        "payload": ("bytes", "sha256", "hmac_sha256", "bytes_before", "sha256_before", "archived"),
        "detail": _DETAIL,
    }
    for block, names in blocks.items():
        values = record.get(block, {})
        found = {name: safe(f"{block}.{name}", values[name]) for name in names if name in values}
        if found:
            picked[block] = found
    if "decision" in record["link"]:
        picked["decided_by"] = record["link"]["decision"]
    if withheld:
        picked["withheld"] = sorted(set(withheld))
    return picked


def _rule(rule: Mapping[str, Any], safe: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A rule that denied or held: its names, and measured value and limit where these are numbers."""
    found = {name: safe(f"rules.{name}", rule[name]) for name in ("rule", "outcome", "reason") if name in rule}
    for name in ("measured", "limit", "line"):
        value = rule.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


# ---- OCSF ----------------------------------------------------------------------------------------------

# outcome -> (action_id, action, disposition_id, disposition)
_DISPOSITIONS: Final = {
    "allow": (1, "Allowed", 1, "Allowed"),
    "deny": (2, "Denied", 2, "Blocked"),
    "hold": (0, "Unknown", 14, "Delayed"),
    "approval.request": (0, "Unknown", 14, "Delayed"),
    "approval.grant": (1, "Allowed", 8, "Approved"),
    "approval.deny": (2, "Denied", 25, "Rejected"),
    "approval.expire": (2, "Denied", 6, "Dropped"),
}
_SEVERITIES: Final = {1: "Informational", 2: "Low", 3: "Medium", 4: "High", 5: "Critical"}
_ALERT_SEVERITY = 4


def as_ocsf(event: Mapping[str, Any], product_version: str) -> dict[str, Any]:
    """Chosen fields as one OCSF event. Required attributes of class 6003 are always there."""
    severity = severity_of(event)
    outcome = _DISPOSITIONS.get(event.get("decision", "")) or _DISPOSITIONS.get(event["event"])
    failed = (outcome is not None and outcome[0] == 2) or severity >= _ALERT_SEVERITY
    source, destination = _ends(event)
    detail = event.get("detail", {})
    actor: dict[str, Any] = {"app_uid": event["actor"], "app_name": "fedsilo"}
    if "person" in detail:
        actor["user"] = {"name": detail["person"]}
        if "certificate" in detail:
            actor["user"]["credential_uid"] = detail["certificate"]
    made: dict[str, Any] = {
        "activity_id": 99,
        "activity_name": event["event"],
        "category_uid": 6,
        "category_name": "Application Activity",
        "class_uid": 6003,
        "class_name": "API Activity",
        "type_uid": 600399,
        "type_name": "API Activity: Other",
        "time": event["t"],
        "severity_id": severity,
        "severity": _SEVERITIES[severity],
        "status_id": 2 if failed else 1,
        "status": "Failure" if failed else "Success",
        "message": MEANINGS[event["event"]].name,
        "metadata": {
            "version": OCSF_VERSION,
            "product": {"name": "FedSilo", "vendor_name": "FedSilo", "version": product_version},
            "uid": event["leaf"],
            "sequence": event["seq"],
            "event_code": event["event"],
            "log_name": "audit",
            "log_provider": event["log"],
        },
        "actor": actor,
        "api": {"operation": event.get("kind", event["event"]), "service": {"name": "fedsilo"}},
        "src_endpoint": {"uid": source},
        "unmapped": {name: value for name, value in event.items() if name not in _MAPPED},
    }
    if destination:
        made["dst_endpoint"] = {"uid": destination}
    if event.get("reasons"):
        made["status_code"] = event["reasons"][0]
    digest = event.get("payload", {}).get("sha256") or event.get("payload", {}).get("hmac_sha256")
    if digest:
        made["resources"] = [{"uid": digest, "name": event.get("kind", "payload"), "type": "payload"}]
    if outcome is not None:
        made["metadata"]["profiles"] = ["security_control"]
        made |= dict(zip(("action_id", "action", "disposition_id", "disposition"), outcome, strict=True))
        made["is_alert"] = severity >= _ALERT_SEVERITY
        if "effective" in event.get("policy", {}):
            made["policy"] = {"uid": event["policy"]["effective"]}
    return made


_MAPPED: Final = frozenset({"schema", "log", "seq", "t", "event", "actor", "leaf"})


def _ends(event: Mapping[str, Any]) -> tuple[str, str]:
    """(sender, receiver) of the message that the event is about; for any other event this party and nobody."""
    peer, inbound = event.get("peer", ""), event.get("direction") == "ingress"
    if not peer:
        return event["log"], ""
    return (peer, event["log"]) if inbound else (event["log"], peer)


# ---- CEF -----------------------------------------------------------------------------------------------

_CEF_SEVERITY: Final = {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}


def as_cef(event: Mapping[str, Any], product_version: str) -> str:
    """Chosen fields as one CEF line, without a syslog header."""
    severity = severity_of(event)
    header = (
        "FedSilo", "FedSilo", product_version, event["event"], MEANINGS[event["event"]].name, _CEF_SEVERITY[severity],
    )  # fmt: skip
    source, destination = _ends(event)
    payload, detail = event.get("payload", {}), event.get("detail", {})
    inbound = event.get("direction") == "ingress"
    extension: dict[str, Any] = {
        "rt": event["t"],
        "externalId": event["seq"],
        "deviceExternalId": event["log"],
        "cat": event.get("kind"),
        "act": event.get("decision"),
        "reason": ",".join(event.get("reasons", ())) or None,
        "sourceServiceName": source,
        "destinationServiceName": destination or None,
        "deviceDirection": None if "direction" not in event else 0 if inbound else 1,
        ("in" if inbound else "out"): payload.get("bytes"),
        "suser": detail.get("person"),
        "suid": detail.get("certificate"),
    }
    custom = {
        "cn1": ("round", event.get("round")),
        "cn2": ("step", event.get("step")),
        "cn3": ("sequence", event.get("sequence")),
        "cs1": ("payloadDigest", payload.get("sha256") or payload.get("hmac_sha256")),
        "cs2": ("policyDigest", event.get("policy", {}).get("effective")),
        "cs3": ("run", event.get("run")),
        "cs4": ("recordHash", event["leaf"]),
        "cs5": ("rules", ",".join(rule["rule"] for rule in event.get("rules", ()) if "rule" in rule) or None),
        "cs6": ("release", detail.get("release")),
        "flexString1": ("previousRecordHash", event["previous"]),
        "flexString2": ("withheldFields", ",".join(event.get("withheld", ())) or None),
    }
    for key, (label, value) in custom.items():
        if value is not None:
            extension |= {f"{key}Label": label, key: value}
    pairs = (f"{key}={cef_value(str(value))}" for key, value in extension.items() if value is not None)
    return "CEF:0|" + "|".join(cef_header(str(item)) for item in header) + "|" + " ".join(pairs)


def cef_header(text: str) -> str:
    """A header field: backslash and pipe escaped; it may not hold a line end."""
    return re.sub(r"[\r\n]+", " ", text).replace("\\", "\\\\").replace("|", "\\|")


def cef_value(text: str) -> str:
    """An extension value: backslash and equals sign escaped, line ends spelled out."""
    escaped = text.replace("\\", "\\\\").replace("=", "\\=")
    return escaped.replace("\r", "\\r").replace("\n", "\\n")


# ---- the three -----------------------------------------------------------------------------------------


def _line_jsonl(event: Mapping[str, Any], product_version: str) -> str:
    return _json({**event, "product_version": product_version})


def _line_ocsf(event: Mapping[str, Any], product_version: str) -> str:
    return _json(as_ocsf(event, product_version))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


FORMATS: Final[Mapping[str, Callable[[Mapping[str, Any], str], str]]] = {
    "jsonl": _line_jsonl,
    "ocsf": _line_ocsf,
    "cef": as_cef,
}


def export_line(format_name: str, event: Mapping[str, Any], product_version: str) -> str:
    """Chosen fields as one line of ASCII of at most LINE_BYTES_MAX bytes, in one of FORMATS."""
    line = FORMATS[format_name](event, product_version)
    if len(line) > LINE_BYTES_MAX:  # sixteen rules with long names: the verdict and its first reason still fit
        short = {**event, "rules": event.get("rules", ())[:1], "reasons": event.get("reasons", ())[:1]}
        line = FORMATS[format_name]({**short, "shortened": True}, product_version)
    return line

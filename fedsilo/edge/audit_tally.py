"""Counts of one audit log, record by record: what a report tells comes from here, and nothing else does.

One pass, bounded memory: what a log can have without end is counted, and of what is listed the first are kept.
What this cannot show: that a record told the truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedsilo.edge.audit_story import approvals_of
from fedsilo.treaty.isolation import RUNGS

INCIDENTS_MAX = 200
RELEASES_MAX = 1000
DONOR_ROWS_MAX = 1000
SETS_MAX = 100
VERDICTS = ("allow", "deny", "hold")
_INCIDENTS = frozenset(
    {"halt", "release", "egress.indeterminate", "policy.reload_refused", "screen.hit", "tail.repaired", "clock.jump",
     "key.expire_warn", "round.equivocation"}
)  # fmt: skip
_KEY_EVENTS = frozenset({"key.enrol", "key.renew", "key.expire_warn", "denylist.load"})
# Facts of a decision that name a set of examples by its digest, and the fact that counts its rows, where there is one.
_SETS = {"public_set_sha256": "public_set_rows", "held_out_sha256": ""}


class Tally:
    """Counts of one log."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.left_bytes: Counter[str] = Counter()
        self.left_by_run: Counter[tuple[str, str]] = Counter()
        self.left_by_run_bytes: Counter[tuple[str, str]] = Counter()
        self.arrived_bytes: Counter[str] = Counter()
        self.arrived_from: Counter[tuple[str, str]] = Counter()  # (who, kind)
        self.arrived_from_bytes: Counter[tuple[str, str]] = Counter()
        self.outward = False  # whether any record speaks of a message that this party sent, or meant to
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.denials: dict[tuple[str, str, str], list[int]] = {}  # -> count, first and last record
        self.policies: list[dict[str, Any]] = []
        self.releases: dict[str, dict[str, Any]] = {}
        self.persons: dict[tuple[str, str], Counter[str]] = {}
        self.incidents: list[dict[str, Any]] = []
        self.incident_count = 0
        self.key_events: list[dict[str, Any]] = []
        self.actors: dict[str, list[int]] = {}
        self.peers: Counter[str] = Counter()
        self.programs: dict[tuple[str, str], int] = {}
        self.donors: dict[tuple[str, int, str], list[int]] = {}  # run, round, of whom -> answers, first, last record
        self.donors_total = 0
        self.trained: Counter[tuple[str, str]] = Counter()  # (run, bucket of the number of records)
        self.sets: dict[tuple[str, str], int] = {}  # (what, digest) -> rows, 0 where no record says
        self.rungs: dict[tuple[str, str], list[int]] = {}  # (whose trainer, rung) -> first and last record
        self.retention: dict[str, Any] = {"payloads_deleted": 0, "bytes_deleted": 0, "reads": [], "reads_total": 0}
        self.first_t = self.last_t = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one record."""
        event, t = record["event"], record["t"]
        self.first_t = t if not self.events else self.first_t
        self.last_t = t
        self.events[event] += 1
        seen = self.actors.setdefault(record["actor"], [0, t, t])
        seen[0], seen[2] = seen[0] + 1, t
        if record.get("peer"):
            self.peers[record["peer"]] += 1
        self.outward = self.outward or event.startswith("egress.")
        if event in ("egress.decision", "ingress.decision"):
            self._decision(record)
            self._facts(record)
        elif event == "egress.sent":
            kind, size = record["kind"], record["payload"]["bytes"]
            self.left[kind] += 1
            self.left_bytes[kind] += size
            self.left_by_run[record.get("run", ""), kind] += 1
            self.left_by_run_bytes[record.get("run", ""), kind] += size
        elif event.startswith("egress."):
            self.outcomes[record.get("kind", ""), event] += 1
        elif event.startswith("approval."):
            self._approval(record)
        elif event == "payload.read":
            self._read(record)
        elif event == "retention.payloads":
            self.retention["payloads_deleted"] += record["detail"]["payloads"]
            self.retention["bytes_deleted"] += record["detail"]["bytes"]
        if event in ("policy.load", "start"):
            self._policy(record)
        self._rung(record["actor"], record.get("detail", {}), record["seq"])
        if event in _INCIDENTS:
            self.incident_count += 1
            if len(self.incidents) < INCIDENTS_MAX:
                self.incidents.append(_short(record))
        if event in _KEY_EVENTS:
            self.key_events.append(_short(record) | {"actor": record["actor"]})

    def _decision(self, record: Mapping[str, Any]) -> None:
        direction = record["event"].partition(".")[0]
        self.decisions[direction, record["kind"], record["decision"]] += 1
        if direction == "ingress":
            size, sender = record.get("payload", {}).get("bytes", 0), (record.get("peer", ""), record["kind"])
            self.arrived_bytes[record["kind"]] += size
            self.arrived_from[sender] += 1
            self.arrived_from_bytes[sender] += size
        if record["decision"] == "deny":
            for reason in record.get("reasons") or ["(none)"]:
                place = self.denials.setdefault((direction, record["kind"], reason), [0, record["seq"], record["seq"]])
                place[0], place[2] = place[0] + 1, record["seq"]
        if self.policies and self.policies[-1]["effective"] == record.get("policy", {}).get("effective"):
            self.policies[-1]["decisions"] += 1

    def _facts(self, record: Mapping[str, Any]) -> None:
        """What the measured facts of a decision say of data, of donors and of trainers."""
        facts = record.get("facts", {})
        final, transform = _mapping(facts.get("final")), _mapping(facts.get("transform"))
        for name, rows in _SETS.items():
            digest = final.get(name)
            if (
                record["decision"] == "allow"
                and isinstance(digest, str)
                and digest
                and ((name, digest) in self.sets or len(self.sets) < SETS_MAX)
            ):
                count = int(final[rows]) if _is_count(final.get(rows)) else 0
                self.sets[name, digest] = max(self.sets.get((name, digest), 0), count)
        if record["event"] == "egress.decision" and record["decision"] == "allow" and _is_count(final.get("records")):
            self.trained[record.get("run", ""), bucket(final["records"])] += 1
        for peer, count in _mapping(transform.get("donors_dropped")).items():
            if record["event"] == "ingress.decision" and _is_count(count) and count:
                self.donors_total += count
                place = (record.get("run", ""), record.get("round", 0), peer)
                if place in self.donors or len(self.donors) < DONOR_ROWS_MAX:
                    row = self.donors.setdefault(place, [0, record["seq"], record["seq"]])
                    row[0], row[2] = row[0] + count, record["seq"]
        if record["kind"] == "control.hello":
            whose = record.get("peer", "") if record["event"] == "ingress.decision" else record["actor"]
            self._rung(whose, final, record["seq"])

    def _rung(self, whose: str, said: Mapping[str, Any], seq: int) -> None:
        if (rung := said.get("isolation")) in RUNGS:
            self.rungs.setdefault((whose, rung), [seq, seq])[1] = seq

    def _read(self, record: Mapping[str, Any]) -> None:
        self.retention["reads_total"] += 1
        if len(self.retention["reads"]) < INCIDENTS_MAX:
            detail = record.get("detail", {})
            self.retention["reads"].append(
                {
                    "seq": record["seq"],
                    "t": record["t"],
                    "person": detail.get("person", ""),
                    "certificate": detail.get("certificate", ""),
                    "kind": record.get("kind", ""),
                    "decision": record.get("link", {}).get("decision", 0),
                }
            )

    def _policy(self, record: Mapping[str, Any]) -> None:
        detail, policy = record.get("detail", {}), record.get("policy", {})
        if record["event"] == "start" and "version" in detail:
            program = (str(detail["version"]), str(detail.get("code", "")))
            self.programs[program] = self.programs.get(program, 0) + 1
        if "effective" not in policy:
            return
        if self.policies and self.policies[-1]["effective"] == policy["effective"]:
            self.policies[-1]["loads"] += 1
            self.policies[-1]["last_t"] = record["t"]
            return
        self.policies.append(
            {
                "effective": policy["effective"],
                "file": policy.get("file", ""),
                "name": detail.get("name", ""),
                "mode": detail.get("mode", ""),
                "seq": record["seq"],
                "t": record["t"],
                "last_t": record["t"],
                "loads": 1,
                "decisions": 0,
                # of a policy that is looser than the one before: who asked for it, and who agreed
                "proposal": str(detail.get("proposal", "")),
                "proposer": str(detail.get("proposer", "")),
                "approvers": sorted(approvals_of(record)),
            }
        )

    def _approval(self, record: Mapping[str, Any]) -> None:
        detail = record.get("detail", {})
        name = str(detail.get("release", f"record {record['seq']}"))
        if name not in self.releases and len(self.releases) >= RELEASES_MAX:
            return
        payload = record.get("payload", {})
        release = self.releases.setdefault(
            name,
            {
                "release": name,
                "kind": record.get("kind", ""),
                "run": record.get("run", ""),
                "round": record.get("round", 0),
                "bytes": payload.get("bytes", 0),
                "digest": payload.get("sha256") or payload.get("hmac_sha256", ""),
                "policy": record.get("policy", {}).get("effective", ""),
                "state": "held",
                "answers": [],
            },
        )
        event = record["event"].partition(".")[2]
        answer = {"answer": event, "seq": record["seq"], "t": record["t"], "reasons": list(record.get("reasons", ()))}
        if "person" in detail:
            answer |= {"person": detail["person"], "certificate": detail.get("certificate", "")}
            who = self.persons.setdefault((detail["person"], detail.get("certificate", "")), Counter())
            who[event] += 1
        release["answers"].append(answer)
        if event != "request":
            release["state"] = {"grant": "granted", "deny": "rejected", "expire": "expired"}[event]

    def to_json(self) -> dict[str, Any]:
        """Everything counted, for the report's value."""
        outcome_kinds = {kind for kind, _ in self.outcomes if kind}
        kinds = sorted({kind for _, kind, _ in self.decisions} | self.left.keys() | outcome_kinds)

        def verdicts(direction: str, kind: str) -> dict[str, int]:
            return {verdict: self.decisions[direction, kind, verdict] for verdict in VERDICTS}

        left = [
            {
                "kind": kind,
                "messages": self.left[kind],
                "bytes": self.left_bytes[kind],
                "decisions": verdicts("egress", kind),
                "acked": self.outcomes[kind, "egress.acked"],
                "indeterminate": self.outcomes[kind, "egress.indeterminate"],
            }
            for kind in kinds
            if self.left[kind] or kind in outcome_kinds or any(verdicts("egress", kind).values())
        ]
        return {
            "records": self.events.total(),
            "period": {"first_t": self.first_t, "last_t": self.last_t},
            "events": dict(sorted(self.events.items())),
            "left": left,
            "left_total": {"messages": self.left.total(), "bytes": self.left_bytes.total()},
            "left_by_run": [
                {"run": run, "kind": kind, "messages": count, "bytes": self.left_by_run_bytes[run, kind]}
                for (run, kind), count in sorted(self.left_by_run.items())
            ],
            "arrived": [
                {
                    "kind": kind,
                    "messages": sum(verdicts("ingress", kind).values()),
                    "bytes": self.arrived_bytes[kind],
                    "decisions": verdicts("ingress", kind),
                }
                for kind in kinds
                if any(verdicts("ingress", kind).values())
            ],
            "arrived_total": {"messages": self.arrived_from.total(), "bytes": self.arrived_bytes.total()},
            "arrived_from": [
                {"identity": peer, "kind": kind, "messages": count, "bytes": self.arrived_from_bytes[peer, kind]}
                for (peer, kind), count in sorted(self.arrived_from.items())
            ],
            "denials": [
                {"direction": direction, "kind": kind, "reason": reason, "count": count, "first": first, "last": last}
                for (direction, kind, reason), (count, first, last) in sorted(self.denials.items())
            ],
            "approvals": list(self.releases.values()),
            "persons": [
                {"person": person, "certificate": certificate, "answers": dict(sorted(answers.items()))}
                for (person, certificate), answers in sorted(self.persons.items())
            ],
            "halts": [item for item in self.incidents if item["event"] in ("halt", "release")],
            "incidents": self.incidents,
            "incidents_total": self.incident_count,
            "donors_dropped": [
                {"run": run, "round": number, "of": peer, "answers": count, "first": first, "last": last}
                for (run, number, peer), (count, first, last) in sorted(self.donors.items())
            ],
            "donors_dropped_total": self.donors_total,
            "trainers": [
                {"identity": whose, "isolation": rung, "first": first, "last": last}
                for (whose, rung), (first, last) in sorted(self.rungs.items())
            ],
            "key_events": self.key_events,
            "identities": [
                {"identity": actor, "records": count, "first_t": first, "last_t": last}
                for actor, (count, first, last) in sorted(self.actors.items())
            ],
            "peers": [{"identity": peer, "records": count} for peer, count in sorted(self.peers.items())],
            "programs": [
                {"version": version, "code": code, "starts": starts}
                for (version, code), starts in sorted(self.programs.items())
            ],
        }


def _short(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"seq": record["seq"], "t": record["t"], "event": record["event"], "kind": record.get("kind", "")}
    return kept | {"reasons": list(record.get("reasons", ())), "detail": dict(record.get("detail", {}))}


def bucket(count: int) -> str:
    """A number of records as the power of ten it lies in: nobody learns the exact one from a report."""
    if count < 1:
        return "0"
    low = 10 ** (len(str(count)) - 1)
    return f"{low} to {10 * low - 1}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

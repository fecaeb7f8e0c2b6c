"""What an audit log shows, counted for a reviewer: one value for the JSON file, from which the page is drawn.

One pass over the records of one log; the other logs given only vouch for it. Nothing here is a judgement: numbers are
counted from records, verification is that of `audit_verify`, capacity that of `policies.capacity`.
What this cannot show: that a record told the truth, and what was hidden in values that a policy allows (N1).
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.edge.audit_loading import read_note
from fedsilo.edge.audit_segments import read_records
from fedsilo.edge.audit_story import approvals_of, check_stories
from fedsilo.edge.audit_transcripts import check_rounds
from fedsilo.edge.audit_verify import verify_logs
from fedsilo.edge.site_policy import read_pinned_schema
from fedsilo.treaty.audit.checkpoint import parse_checkpoint, parse_note
from fedsilo.treaty.errors import FedSiloError, UsageError
from policies.capacity import capacities
from policies.compare import compare
from policies.load import Policy
from policies.schema import LoraSchema

SCHEMA = "fedsilo.audit_report/1"
INCIDENTS_MAX = 200
RELEASES_MAX = 1000
_VERDICTS = ("allow", "deny", "hold")
_INCIDENTS = frozenset(
    {"halt", "release", "egress.indeterminate", "policy.reload_refused", "screen.hit", "tail.repaired", "clock.jump",
     "key.expire_warn", "round.equivocation"}
)  # fmt: skip
_KEY_EVENTS = frozenset({"key.enrol", "key.renew", "key.expire_warn", "denylist.load"})

DP = "off: no privacy budget is kept, and none is claimed"
RESIDUALS = {
    "N1": "A malicious program inside the site can hide data in values that the policy allows: in the low bits of "
    "weights, in the wording of answers. Limits narrow this; the capacity above says how far. Only strong noise "
    "bounds it.",
    "N2": "Without differential privacy, adapters and answers can reveal who or what was in the training data. It is "
    "off.",
    "N3": "Text screens are tripwires, not guarantees: they notice known patterns, not meaning.",
    "N4": "Noise added by each site to a whole adapter is of no use with 3 to 32 sites: it would drown what was "
    "learnt. It is not offered as protection.",
    "N5": "Secure aggregation would hide who sent what. It would not stop the sum from leaking or from being "
    "poisoned. There is none: the coordinator sees each site's own message.",
    "N6": "No unlearning: what has left cannot be called back, and a model cannot be made to forget it.",
}


def audit_report(
    logs: Sequence[Path],
    *,
    policies: Sequence[Policy] = (),
    folders: Mapping[str, Path] | None = None,
    schema: LoraSchema | None = None,
) -> dict[str, Any]:
    """The report on the first log.

    Args:
        logs: folders; the first is reported on, all are verified alone and against each other.
        policies: versions that the site kept, in any order; found again by their digests.
        folders: digest of a policy -> folder in which to look for the LoRA schema it pins.
        schema: for the capacity, instead of the pinned one.

    Raises:
        NotFoundError: the first is no log folder.
    """
    verification = verify_logs(list(logs))
    rounds = check_rounds(verification, list(logs))
    check_stories(verification, list(logs))
    tally = Tally()
    unreadable = ""
    try:
        for record in read_records(logs[0]):
            tally.add(record)
    except UsageError:
        raise
    except FedSiloError as error:
        if not logs[0].is_dir():
            raise
        unreadable = error.message
    given = {policy.digest: policy for policy in policies}
    found = tally.to_json()
    return {
        "schema": SCHEMA,
        "log": verification[0]["log"],
        "origin": verification[0]["origin"],
        "complete": not unreadable,
        "unreadable": unreadable,
        **found,
        "policies": _policies(tally.policies, given, folders or {}, schema),
        "policies_not_loaded": sorted(given.keys() - {item["effective"] for item in tally.policies}),
        "capacity": _capacity(tally.policies, given, folders or {}, schema),
        "verification": verification,
        "witness": {
            "cosigned_by": verification[0]["cosigned"],
            "not_signed_yet": verification[0]["unsigned"],
            "countersigned_for_others": _witnessed(logs[0]),
            # so many parties vouch for so many of the first records
            "vouched": [
                [count, size]
                for count, size in enumerate(sorted(verification[0]["cosigned"].values(), reverse=True), start=1)
            ],
            "demanded": _demanded(tally.policies, given),
            "two_histories": sorted(path.name for path in (logs[0] / "evidence").glob("*.note")),
        },
        "rounds": rounds,
        "retention": {"leaf_hashes_only": verification[0]["hashes_only"], **tally.retention},
        "dp": DP,
        "residuals": RESIDUALS,
    }


class Tally:
    """Counts of one log."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.left_bytes: Counter[str] = Counter()
        self.left_by_run: Counter[tuple[str, str]] = Counter()
        self.left_by_run_bytes: Counter[tuple[str, str]] = Counter()
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
        if event in ("egress.decision", "ingress.decision"):
            self._decision(record)
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
        if event in _INCIDENTS:
            self.incident_count += 1
            if len(self.incidents) < INCIDENTS_MAX:
                self.incidents.append(_short(record))
        if event in _KEY_EVENTS:
            self.key_events.append(_short(record))

    def _decision(self, record: Mapping[str, Any]) -> None:
        direction = record["event"].partition(".")[0]
        self.decisions[direction, record["kind"], record["decision"]] += 1
        if record["decision"] == "deny":
            for reason in record.get("reasons") or ["(none)"]:
                place = self.denials.setdefault((direction, record["kind"], reason), [0, record["seq"], record["seq"]])
                place[0], place[2] = place[0] + 1, record["seq"]
        if self.policies and self.policies[-1]["effective"] == record.get("policy", {}).get("effective"):
            self.policies[-1]["decisions"] += 1

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
        outcome_kinds = {kind for kind, _ in self.outcomes if kind}
        kinds = sorted({kind for _, kind, _ in self.decisions} | self.left.keys() | outcome_kinds)

        def verdicts(direction: str, kind: str) -> dict[str, int]:
            return {verdict: self.decisions[direction, kind, verdict] for verdict in _VERDICTS}

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
                {"kind": kind, "decisions": verdicts("ingress", kind)}
                for kind in kinds
                if any(verdicts("ingress", kind).values())
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


def inventory_csv(report: Mapping[str, Any]) -> str:
    """What left and what came, a line for each kind, for a spreadsheet. Its cells are names and numbers only."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(("direction", "kind", "messages", "bytes", *_VERDICTS, "acked", "indeterminate"))
    for row in report["left"]:
        verdicts = (row["decisions"][verdict] for verdict in _VERDICTS)
        writer.writerow(
            ("egress", row["kind"], row["messages"], row["bytes"], *verdicts, row["acked"], row["indeterminate"])
        )
    for row in report["arrived"]:
        writer.writerow(("ingress", row["kind"], "", "", *(row["decisions"][verdict] for verdict in _VERDICTS), "", ""))
    return lines.getvalue()


def _demanded(loaded: Sequence[Mapping[str, Any]], given: Mapping[str, Policy]) -> dict[str, Any] | None:
    """What the policy in force says of witnesses; None where its file was not given."""
    policy = given.get(loaded[-1]["effective"]) if loaded else None
    if policy is None:
        return None
    return {"witnesses": list(policy.file.audit.witnesses), "min_witnesses": policy.file.audit.min_witnesses}


def _policies(
    loaded: Iterable[Mapping[str, Any]],
    given: Mapping[str, Policy],
    folders: Mapping[str, Path],
    schema: LoraSchema | None,
) -> list[dict[str, Any]]:
    """Each version as it was loaded, with what it changed against the one before where both files are given."""
    rows: list[dict[str, Any]] = []
    for version in loaded:
        row = {**version, "given": version["effective"] in given, "changes": None}
        row["bits_a_round"] = _capacity([version], given, folders, schema).get("bits")
        before = given.get(rows[-1]["effective"]) if rows else None
        after = given.get(version["effective"])
        if before is not None and after is not None:
            row["changes"] = [
                {"field": change.name, "before": change.before, "after": change.after, "direction": change.direction}
                for change in compare(before.file, after.file)
            ]
        rows.append(row)
    return rows


def _capacity(
    loaded: Sequence[Mapping[str, Any]],
    given: Mapping[str, Policy],
    folders: Mapping[str, Path],
    schema: LoraSchema | None,
) -> dict[str, Any]:
    """At most so many bits a round under the policy in force, or why that is not computed."""
    if not loaded:
        return {"computed": False, "why": "no record says which policy was in force", "rows": []}
    digest = loaded[-1]["effective"]
    policy = given.get(digest)
    if policy is None:
        return {"computed": False, "why": "the file of the policy in force was not given", "rows": []}
    note = "tensors counted by the given schema"
    if schema is None and policy.file.egress.updates:
        try:
            schema = read_pinned_schema(policy.own, folders.get(digest, Path()))
            note = "tensors counted by the schema that the policy pins"
        except UsageError:
            note = "tensors counted by the largest message that the policy allows: its schema file was not found"
    rows = [row.to_json() for row in capacities(policy, schema)]
    return {
        "computed": True,
        "policy": digest,
        "note": note,
        "rows": rows,
        "bits": round(sum(row["bits"] for row in rows), 1),
    }


def _witnessed(log: Path) -> list[dict[str, Any]]:
    """The newest checkpoint of each other party that this one countersigned; `verify_logs` judges them."""
    found = []
    for path in sorted((log / "witnessed").glob("*.note")):
        try:
            checkpoint = parse_checkpoint(parse_note(read_note(path)).text)
        except FedSiloError:
            continue  # named as a problem by the verification
        found.append({"origin": checkpoint.origin, "size": checkpoint.size})
    return found

"""Counts of one audit log, record by record: what a report tells comes from here, and nothing else does.

One pass, bounded memory: of whatever a log can have without end there are so many names and rows, and what is beyond
them is counted: under `OTHERS`, or in a total beside the list. What this cannot show: that a record told the truth.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from fedsilo.audit.approvals import Approvals
from fedsilo.audit.counting import OTHERS, FirstOf, Names, brief, count_of, is_count, mapping_of, text_of
from fedsilo.audit.poll_window import ARRIVED, messages_of, permitted_by
from fedsilo.audit.story import approvals_of
from fedsilo.audit.unasked import Unasked
from fedsilo.protocol.isolation import RUNGS

INCIDENTS_MAX = 200
DONOR_ROWS_MAX = 1000
SETS_MAX = 100
KINDS_MAX = 200  # the protocol has some forty
PLACES_MAX = 2000  # runs with their kinds, senders with theirs, runs with their sizes
IDENTITIES_MAX = 500
DENIALS_MAX = 1000
POLICIES_MAX = 200
PROGRAMS_MAX = 200
KEY_EVENTS_MAX = 500
APPROVERS_MAX = 32
VERDICTS = ("allow", "deny", "hold")
_HALTS = frozenset({"halt", "release"})
_INCIDENTS = frozenset(
    {"egress.indeterminate", "policy.reload_refused", "screen.hit", "tail.repaired", "clock.jump", "clock.accept",
     "key.expire_warn", "round.equivocation", "trainer.restart"}
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
        self.policies: list[dict[str, Any]] = []  # the first ones, and the newest, which is in force
        self.policies_total = 0
        self.approvals = Approvals()
        self.unasked = Unasked()
        self.halts, self.incidents = FirstOf(INCIDENTS_MAX), FirstOf(INCIDENTS_MAX)
        self.key_events: deque[dict[str, Any]] = deque(maxlen=KEY_EVENTS_MAX)  # the newest: keys in use are there
        self.key_events_total = 0
        self.actors: dict[str, list[int]] = {}
        self.peers: Counter[str] = Counter()
        self.programs: Counter[tuple[str, str]] = Counter()
        self.donors: dict[tuple[str, int, str], list[int]] = {}  # run, round, of whom -> answers, first, last record
        self.donors_total = 0
        self.trained: Counter[tuple[str, str]] = Counter()  # (run, bucket of the number of records)
        self.sets: dict[tuple[str, str], int] = {}  # (what, digest) -> rows, 0 where no record says
        self.sets_not_listed = 0  # decisions that name a further one
        self.rungs: dict[tuple[str, str], list[int]] = {}  # (whose trainer, rung) -> first and last record
        self.retention: dict[str, Any] = {"payloads_deleted": 0, "bytes_deleted": 0, "reads": [], "reads_total": 0}
        self.first_seq = 0  # of the first record that is left
        self.first_t = self.last_t = 0
        self._kind = Names(KINDS_MAX, OTHERS)
        self._identity, self._whose = Names(IDENTITIES_MAX, OTHERS), Names(IDENTITIES_MAX, OTHERS)
        self._run_kind, self._sender = Names(PLACES_MAX, (OTHERS, OTHERS)), Names(PLACES_MAX, (OTHERS, OTHERS))
        self._denial = Names(DENIALS_MAX, (OTHERS, OTHERS, OTHERS))
        self._program, self._trained = Names(PROGRAMS_MAX, (OTHERS, "")), Names(PLACES_MAX, (OTHERS, OTHERS))

    def add(self, record: Mapping[str, Any], note: str = "", order: str = "") -> None:
        """Count one record. note: what the person wrote to it, where that is kept here."""
        event, t = record["event"], record["t"]
        if not self.events:
            self.first_seq, self.first_t = record["seq"], t
        self.last_t = t
        self.events[event] += 1
        seen = self.actors.setdefault(self._identity(record["actor"]), [0, t, t])
        seen[0], seen[2] = seen[0] + 1, t
        if record.get("peer"):
            self.peers[self._whose(record["peer"])] += 1
        self.outward = self.outward or event.startswith("egress.")
        kind = self._kind(record.get("kind", ""))
        if event in ("egress.decision", "ingress.decision"):
            self._decision(record, kind)
            self._facts(record)
            self.approvals.decided(record)
            if event == "egress.decision":
                self.unasked.decided(record)
        elif event == "egress.sent":
            size, place = record["payload"]["bytes"], self._run_kind((record.get("run", ""), kind))
            self.left[kind] += messages_of(record)
            self.left_bytes[kind] += size
            self.left_by_run[place] += messages_of(record)
            self.left_by_run_bytes[place] += size
            self.unasked.sent(record, kind)
        elif event == ARRIVED:
            self._arrived(record, kind, messages_of(record))
        elif event.startswith("egress."):
            self.outcomes[kind, event] += 1
        elif event.startswith("approval."):
            self.approvals.answered(record, self.policies_total, note, order)
        elif event == "payload.read":
            self._read(record)
        elif event == "retention.payloads":
            detail = record.get("detail", {})
            self.retention["payloads_deleted"] += count_of(detail.get("payloads"))
            self.retention["bytes_deleted"] += count_of(detail.get("bytes"))
        if event in ("policy.load", "start"):
            self._policy(record)
        self._rung(record["actor"], record.get("detail", {}), record["seq"])
        if event in _HALTS:
            self.halts.add(brief(record))
        if event in _INCIDENTS:
            self.incidents.add(brief(record))
        if event in _KEY_EVENTS:
            self.key_events_total += 1
            self.key_events.append(brief(record) | {"actor": record["actor"]})

    def _decision(self, record: Mapping[str, Any], kind: str) -> None:
        direction = record["event"].partition(".")[0]
        self.decisions[direction, kind, record["decision"]] += 1
        if direction == "ingress":
            # those of a window are counted where it ends
            self._arrived(record, kind, 0 if permitted_by(record) else 1)
        if record["decision"] == "deny":
            for reason in dict.fromkeys(record.get("reasons") or ["(none)"]):
                name = self._denial((direction, kind, reason))
                place = self.denials.setdefault(name, [0, record["seq"], record["seq"]])
                place[0], place[2] = place[0] + 1, record["seq"]
        if self.policies and self.policies[-1]["effective"] == record.get("policy", {}).get("effective"):
            self.policies[-1]["decisions"] += 1

    def _arrived(self, record: Mapping[str, Any], kind: str, messages: int) -> None:
        size, sender = record.get("payload", {}).get("bytes", 0), self._sender((record.get("peer", ""), kind))
        if messages:
            self.arrived_bytes[kind] += size
            self.arrived_from[sender] += messages
            self.arrived_from_bytes[sender] += size

    def _facts(self, record: Mapping[str, Any]) -> None:
        """What the measured facts of a decision say of data, of donors and of trainers."""
        facts = record.get("facts", {})
        final, transform = mapping_of(facts.get("final")), mapping_of(facts.get("transform"))
        allowed = record["decision"] == "allow"
        for name, rows in _SETS.items():
            digest = final.get(name)
            if not (allowed and isinstance(digest, str) and digest):
                continue
            if (name, digest) in self.sets or len(self.sets) < SETS_MAX:
                self.sets[name, digest] = max(self.sets.get((name, digest), 0), count_of(final.get(rows)))
            else:
                self.sets_not_listed += 1
        if record["event"] == "egress.decision" and allowed and is_count(final.get("records")):
            self.trained[self._trained((record.get("run", ""), bucket(final["records"])))] += 1
        for peer, count in mapping_of(transform.get("donors_dropped")).items():
            if record["event"] == "ingress.decision" and is_count(count) and count:
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
            self.rungs.setdefault((self._whose(whose), rung), [seq, seq])[1] = seq

    def _read(self, record: Mapping[str, Any]) -> None:
        self.retention["reads_total"] += 1
        if len(self.retention["reads"]) < INCIDENTS_MAX:
            detail = record.get("detail", {})
            self.retention["reads"].append(
                {
                    "seq": record["seq"],
                    "t": record["t"],
                    "person": text_of(detail.get("person")),
                    "certificate": text_of(detail.get("certificate")),
                    "kind": record.get("kind", ""),
                    "decision": record.get("link", {}).get("decision", 0),
                }
            )

    def _policy(self, record: Mapping[str, Any]) -> None:
        detail, policy = record.get("detail", {}), record.get("policy", {})
        if record["event"] == "start" and "version" in detail:
            self.programs[self._program((text_of(detail["version"]), text_of(detail.get("code"))))] += 1
        if "effective" not in policy:
            return
        if self.policies and self.policies[-1]["effective"] == policy["effective"]:
            self.policies[-1]["loads"] += 1
            self.policies[-1]["last_t"] = record["t"]
            return
        self.policies_total += 1
        if len(self.policies) >= POLICIES_MAX:
            self.policies.pop()  # the newest has to be there: it is in force
        self.policies.append(
            {
                "number": self.policies_total,
                "effective": policy["effective"],
                "file": policy.get("file", ""),
                "name": text_of(detail.get("name")),
                "mode": text_of(detail.get("mode")),
                "seq": record["seq"],
                "t": record["t"],
                "last_t": record["t"],
                "loads": 1,
                "decisions": 0,
                # of a policy that is looser than the one before: who asked for it, and who agreed
                "proposal": text_of(detail.get("proposal")),
                "proposer": text_of(detail.get("proposer")),
                "approvers": sorted(approvals_of(record))[:APPROVERS_MAX],
            }
        )

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
            "counted_from": self.first_seq,
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
            **self.unasked.to_json(),
            **self.approvals.to_json(self.policies_total),
            "halts": self.halts.rows,
            "halts_total": self.halts.total,
            "incidents": self.incidents.rows,
            "incidents_total": self.incidents.total,
            "donors_dropped": [
                {"run": run, "round": number, "of": peer, "answers": count, "first": first, "last": last}
                for (run, number, peer), (count, first, last) in sorted(self.donors.items())
            ],
            "donors_dropped_total": self.donors_total,
            "trainers": [
                {"identity": whose, "isolation": rung, "first": first, "last": last}
                for (whose, rung), (first, last) in sorted(self.rungs.items())
            ],
            "key_events": list(self.key_events),
            "key_events_total": self.key_events_total,
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


def bucket(count: int) -> str:
    """A number of records as the power of ten it lies in: nobody learns the exact one from a report."""
    if count < 1:
        return "0"
    low = 10 ** (len(str(count)) - 1)
    return f"{low} to {10 * low - 1}"

"""Statistics of one audit log, counted record by record: the only source of a report's figures.

One pass, bounded memory: of whatever a log can have without end there are so many names and rows, and what is beyond
them is counted: under `OTHERS`, or in a total beside the list. A log may be written by somebody who wants its reader to
fail: every value of a record's `detail`, `facts` or `link` may be of any JSON type, a time may lie behind the year
9999, and there may be as many names as there are records.

Of people's answers the log has who answered, with which certificate, to which digest and when, and what each person
signed; whether that holds is `orders.py`'s to say, and is told here beside each answer. A release is granted only where
an allowing decision names its grants; the first of two approvals frees nothing. What left is counted by whether people
were asked about it, and by which line of the policy they were not: each `egress.sent` by the decision that it names.

What this cannot show: that a record told the truth; that a person answered at all, of a record that an earlier version
wrote.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from fedsilo.audit.polls import ARRIVED, messages_of, permitted_by
from fedsilo.audit.record import COUNT_MAX, TEXT_CHARACTERS_MAX, Record
from fedsilo.protocol.isolation import ISOLATION_LEVELS

OTHERS: Final = "(others)"  # counted together, once there are too many names to list
REASONS_MAX = 8
DETAIL_CHARACTERS_MAX = 2000
Name = TypeVar("Name", bound=Hashable)


class Names(Generic[Name]):
    """The first so many names as they are, each further one as `others`: what is counted by them stays complete."""

    def __init__(self, most: int, others: Name) -> None:
        self._most, self._others = most, others
        self._known: set[Name] = set()

    def __call__(self, name: Name) -> Name:
        if name not in self._known:
            if len(self._known) >= self._most:
                return self._others
            self._known.add(name)
        return name


class FirstOf:
    """The first so many rows, and how many there were."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: list[dict[str, Any]] = []
        self.total = 0

    def add(self, row: dict[str, Any]) -> None:
        self.total += 1
        if len(self.rows) < self._most:
            self.rows.append(row)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX


def count_of(value: Any) -> int:
    """A count; 0 for whatever is none."""
    return value if is_count(value) else 0


def mapping_of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def text_of(value: Any) -> str:
    """A text as it is; of anything else the beginning of its JSON; empty where there is nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)[:TEXT_CHARACTERS_MAX]


def reasons_of(record: Record) -> list[str]:
    """A record's reasons; the first ones, and how many more there are."""
    reasons = list(record.reasons)
    more = len(reasons) - REASONS_MAX
    return [*reasons[:REASONS_MAX], *([f"and {more} more"] if more > 0 else [])]


def brief(record: Record) -> dict[str, Any]:
    """Return what a list of events tells of one: number, time, event, kind, reasons, and its detail unless that is
    long."""
    detail, room = {}, DETAIL_CHARACTERS_MAX
    for name, value in record.detail.items():
        room -= len(name) + len(json.dumps(value))
        if room < 0:
            detail["(more)"] = "too long to be shown: see the record"
            break
        detail[name] = value
    return {
        "seq": record.seq, "t": record.t, "event": record.event, "kind": record.kind,
        "reasons": reasons_of(record), "detail": detail,
    }  # fmt: skip


def moment(milliseconds: float) -> str:
    """A time since 1970 as people read it; one that no calendar has, as its number of milliseconds."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms after 1970"


# ---- what people answered ----------------------------------------------------------------------------------------

RELEASES_MAX = 1000
ANSWERS_MAX = 16  # listed of one release
PERSONS_MAX = 500
GRANTS_MAX = 200  # listed of those that end a halt
_COUNTED_MAX = 64  # approvals of one release
_PENDING_MAX = 256  # places at which the next record of a release is awaited: honestly it comes at once

Place = tuple[Any, ...]


class Approvals:
    """Answers of people, record by record."""

    def __init__(self) -> None:
        self.releases: dict[str, _Release] = {}
        self.further: Counter[str] = Counter()  # events of releases beyond those listed
        self.persons: dict[tuple[str, str], Counter[str]] = {}
        self.halt_grants = FirstOf(GRANTS_MAX)
        self._person = Names(PERSONS_MAX, (OTHERS, ""))
        self._needed: dict[Place, int] = {}
        self._newest: dict[Place, _Release] = {}  # whose grant came last
        self._of_grant: dict[str, _Release] = {}  # number of the record -> release

    @property
    def total(self) -> int:
        """Releases of which the log has the request, or any answer where the request is gone."""
        return len(self.releases) + self.further["request"]

    def decided(self, record: Record) -> None:
        """A decision: how many persons it waits for, or on whose yes it rests."""
        place = record.held_bytes
        if record.decision == "hold":
            _put(self._needed, place, _needed(record))
            return
        if record.decision == "deny" and (newest := self._newest.pop(place, None)) is not None:
            newest.denied(record)  # such a decision names no approvals, and it follows the last one
        numbers = set(map(str, record.approvals))
        for release in {self._of_grant[number] for number in numbers & self._of_grant.keys()}:
            if release.place == place:
                release.decided(record, numbers)

    def answered(self, record: Record, version: int, note: str = "", order: str = "") -> None:
        """An `approval.*` record.

        Args:
            record: of the log.
            version: number of policy changes before it, since each voids what was given.
            note: what the person wrote, where the site keeps it.
            order: verdict of `commands.py` on what the person signed.
        """
        event, detail = record.event.partition(".")[2], record.detail
        release = text_of(detail.get("release"))
        of_halt = event == "grant" and not release
        if "person" in detail:
            name = self._person((text_of(detail["person"]), text_of(detail.get("certificate"))))
            self.persons.setdefault(name, Counter())["halt" if of_halt else event] += 1
        if of_halt:
            self.halt_grants.add(
                {
                    "seq": record.seq, "t": record.t, "kind": record.kind,
                    "person": text_of(detail.get("person")), "certificate": text_of(detail.get("certificate")),
                    "reasons": reasons_of(record), "since_seconds": count_of(detail.get("since")), "order": order,
                }
            )  # fmt: skip
            return
        answers = self.releases.get(release := release or f"record {record.seq}")
        if answers is None:
            if len(self.releases) >= RELEASES_MAX:
                self.further[event] += 1
                return
            answers = self.releases[release] = _Release(release, record)
        if event == "request":
            answers.asked(self._needed.pop(record.held_bytes, 0), version)
        answers.answered(record, event, version, note, order)
        if event == "grant" and answers.counts(record.seq):
            self._of_grant[str(record.seq)] = answers
            _put(self._newest, record.held_bytes, answers)

    def to_json(self, version: int) -> dict[str, Any]:
        """version: number of policy changes in the whole log."""
        return {
            "approvals": [release.to_json(version) for release in self.releases.values()],
            "approvals_total": self.total,
            "approvals_not_listed": dict(sorted(self.further.items())),
            "persons": [
                {"person": person, "certificate": certificate, "answers": dict(sorted(answers.items()))}
                for (person, certificate), answers in sorted(self.persons.items())
            ],
            "halt_grants": self.halt_grants.rows,
            "halt_grants_total": self.halt_grants.total,
        }


class _Release:
    """A held message as the log describes it."""

    def __init__(self, name: str, record: Record) -> None:
        self.place = record.held_bytes
        self._row = {
            "release": name,
            "kind": record.kind,
            "run": record.run,
            "round": record.round,
            "bytes": record.payload.get("bytes", 0),
            "digest": record.digest,
            "policy": record.policy,
        }
        self._state, self._needed, self._version = "held", 0, 0
        self._decision: dict[str, Any] | None = None
        # number of the record -> person, of those that the guard still counts; empty: nobody signed it
        self._grants: dict[str, str] = {}
        self._answers = FirstOf(ANSWERS_MAX)

    def asked(self, needed: int, version: int) -> None:
        """Held, perhaps once more: whatever was answered before is void."""
        self._state, self._needed, self._version, self._decision = "held", needed, version, None
        self._grants.clear()

    def answered(self, record: Record, event: str, version: int, note: str, order: str) -> None:
        detail = record.detail
        answer = {"answer": event, "seq": record.seq, "t": record.t, "reasons": reasons_of(record)}
        if "person" in detail:
            answer |= {"person": text_of(detail["person"]), "certificate": text_of(detail.get("certificate"))}
        if "person" in detail or order:
            answer |= {"order": order}
        self._answers.add(answer | ({"note": note} if note else {}))
        if event == "grant":
            if version != self._version:  # under another policy approvals start anew, for as many as that one says
                self._needed, self._version = 0, version
                self._grants.clear()
            if len(self._grants) < _COUNTED_MAX:
                self._grants[str(record.seq)] = "" if order == "broken" else text_of(detail.get("person"))
        elif event != "request":
            self._state = {"deny": "rejected", "expire": "expired"}[event]

    def counts(self, seq: int) -> bool:
        return str(seq) in self._grants

    def decided(self, record: Record, named: set[str]) -> None:
        if not named & self._grants.keys():
            return
        self._decision = {"seq": record.seq, "verdict": record.decision}
        self._needed = _needed(record) or self._needed
        if self._state == "held":
            self._state = "granted" if record.decision == "allow" else "refused"

    def denied(self, record: Record) -> None:
        if self._state == "held" and self._decision is None and 0 < self._needed <= self._given():
            self._state, self._decision = "refused", {"seq": record.seq, "verdict": "deny"}

    def _given(self) -> int:
        return len({person for person in self._grants.values() if person})

    def to_json(self, version: int) -> dict[str, Any]:
        """`state`: held, granted, refused (by the rules, although approved), rejected (by a person), expired.

        `given`: different persons whose yes counts, none whose signature does not hold; `needed`: how many the decision
        asked for, None where no record says; `decision`: number and verdict of the one that rests on them, else None.
        """
        void = self._state == "held" and version != self._version
        return {
            **self._row,
            "state": self._state,
            "given": 0 if void else self._given(),
            "needed": None if void else self._needed or None,
            "void": void and bool(self._grants),
            "decision": self._decision,
            "answers": self._answers.rows,
            "answers_total": self._answers.total,
        }


def _put(pending: dict[Place, Any], place: Place, value: Any) -> None:
    """Add the newest entry; the oldest is dropped where there are too many."""
    pending.pop(place, None)
    pending[place] = value
    if len(pending) > _PENDING_MAX:
        del pending[next(iter(pending))]


def _needed(record: Record) -> int:
    """Return how many persons the decision's own rules ask for; 0 where they do not say.

    Two rules hold a message, and the limit of both is the number of persons: `approvals`, and `screen hits` where it
    waits for them.
    """
    limits = [
        count_of(rule.get("limit"))
        for rule in record.rules
        if rule.get("rule") == "approvals" or rule.get("outcome") == "hold"
    ]
    return max(limits, default=0)


# ---- what left, and whether people were asked --------------------------------------------------------------------

UNASKED_ROWS_MAX = 500
_DECISIONS_MAX = 4096  # whose messages may still be sent, or sent again: honestly that comes at once
CONTROL = "control."
# What became of a message: people said yes, nobody was asked, or the decision is not in the log any more.
ASKED, UNASKED, NOT_TOLD = "asked", "unasked", "not told"
Why = tuple[str, str, str, int]  # kind, policy, which file of it, line; 0 where no line speaks of the kind


class Unasked:
    """Messages that left, record by record."""

    def __init__(self) -> None:
        self._decisions: dict[int, tuple[str, Why]] = {}
        self._content: Counter[str] = Counter()
        self._control = 0
        self._rows: dict[Why, list[int]] = {}  # -> messages, bytes, first and last record
        self._not_listed = 0

    def decided(self, record: Record) -> None:
        """An `egress.decision`."""
        if record.decision != "allow":
            return
        is_approved = bool(record.approvals)
        rule: Mapping[str, Any] = next((one for one in record.rules if one.get("rule") == "approvals"), {})
        file = "charter" if rule.get("file") == "charter" else "policy"
        why = (record.kind, record.policy, file if rule else "", count_of(rule.get("line")))
        self._decisions[record.seq] = (ASKED if is_approved else UNASKED, why)
        if len(self._decisions) > _DECISIONS_MAX:
            del self._decisions[next(iter(self._decisions))]

    def sent(self, record: Record, kind: str) -> None:
        """An `egress.sent`. kind: under which it is counted."""
        decision = self._decisions.get(-1 if record.decided_by is None else record.decided_by)
        became = decision[0] if decision else NOT_TOLD
        if kind.startswith(CONTROL):
            self._control += messages_of(record)
        else:
            self._content[became] += 1
        if decision is None or became == ASKED:
            return
        why = (kind, *decision[1][1:])
        if why not in self._rows and len(self._rows) >= UNASKED_ROWS_MAX:
            self._not_listed += 1
            return
        row = self._rows.setdefault(why, [0, 0, record.seq, record.seq])
        row[0], row[1], row[3] = row[0] + messages_of(record), row[1] + record.payload["bytes"], record.seq

    def to_json(self) -> dict[str, Any]:
        """`left_asked`: messages with content by whether people said yes, and those of the protocol; `left_unasked`:
        a row for each kind and line."""
        return {
            "left_asked": {
                "asked": self._content[ASKED], "unasked": self._content[UNASKED],
                "not_told": self._content[NOT_TOLD], "control": self._control,
            },
            "left_unasked": [
                {
                    "kind": kind, "policy": policy, "file": file, "line": line, "messages": messages,
                    "bytes": size, "first": first, "last": last,
                }
                for (kind, policy, file, line), (messages, size, first, last) in sorted(
                    self._rows.items(), key=lambda item: (item[0][0].startswith(CONTROL), item[0])
                )
            ],
            "left_unasked_not_listed": self._not_listed,
        }  # fmt: skip


# ---- the whole log -----------------------------------------------------------------------------------------------

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


class LogStatistics:
    """The statistics of one log, added to record by record."""

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
        self.levels: dict[tuple[str, str], list[int]] = {}  # (whose trainer, isolation level) -> first and last record
        self.retention: dict[str, Any] = {"payloads_deleted": 0, "bytes_deleted": 0, "reads": [], "reads_total": 0}
        self.first_seq = 0  # of the first record that is left
        self.first_t = self.last_t = 0
        self._kind = Names(KINDS_MAX, OTHERS)
        self._identity, self._whose = Names(IDENTITIES_MAX, OTHERS), Names(IDENTITIES_MAX, OTHERS)
        self._run_kind, self._sender = Names(PLACES_MAX, (OTHERS, OTHERS)), Names(PLACES_MAX, (OTHERS, OTHERS))
        self._denial = Names(DENIALS_MAX, (OTHERS, OTHERS, OTHERS))
        self._program, self._trained = Names(PROGRAMS_MAX, (OTHERS, "")), Names(PLACES_MAX, (OTHERS, OTHERS))

    def add(self, record: Record, note: str = "", order: str = "") -> None:
        """Count one record. note: what the person wrote to it, where that is kept here."""
        event, t = record.event, record.t
        if not self.events:
            self.first_seq, self.first_t = record.seq, t
        self.last_t = t
        self.events[event] += 1
        activity = self.actors.setdefault(self._identity(record.actor), [0, t, t])
        activity[0], activity[2] = activity[0] + 1, t
        if record.peer:
            self.peers[self._whose(record.peer)] += 1
        self.outward = self.outward or event.startswith("egress.")
        kind = self._kind(record.kind)
        if event in ("egress.decision", "ingress.decision"):
            self._decision(record, kind)
            self._facts(record)
            self.approvals.decided(record)
            if event == "egress.decision":
                self.unasked.decided(record)
        elif event == "egress.sent":
            size, place = record.payload["bytes"], self._run_kind((record.run, kind))
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
            detail = record.detail
            self.retention["payloads_deleted"] += count_of(detail.get("payloads"))
            self.retention["bytes_deleted"] += count_of(detail.get("bytes"))
        if event in ("policy.load", "start"):
            self._policy(record)
        self._level(record.actor, record.detail, record.seq)
        if event in _HALTS:
            self.halts.add(brief(record))
        if event in _INCIDENTS:
            self.incidents.add(brief(record))
        if event in _KEY_EVENTS:
            self.key_events_total += 1
            self.key_events.append(brief(record) | {"actor": record.actor})

    def _decision(self, record: Record, kind: str) -> None:
        direction = record.event.partition(".")[0]
        self.decisions[direction, kind, record.decision] += 1
        if direction == "ingress":
            # those of a window are counted where it ends
            self._arrived(record, kind, 0 if permitted_by(record) else 1)
        if record.decision == "deny":
            for reason in dict.fromkeys(record.reasons or ["(none)"]):
                name = self._denial((direction, kind, reason))
                place = self.denials.setdefault(name, [0, record.seq, record.seq])
                place[0], place[2] = place[0] + 1, record.seq
        if self.policies and self.policies[-1]["effective"] == record.policy:
            self.policies[-1]["decisions"] += 1

    def _arrived(self, record: Record, kind: str, messages: int) -> None:
        size, sender = record.payload.get("bytes", 0), self._sender((record.peer, kind))
        if messages:
            self.arrived_bytes[kind] += size
            self.arrived_from[sender] += messages
            self.arrived_from_bytes[sender] += size

    def _facts(self, record: Record) -> None:
        """Count what the measured facts of a decision say of data, of donors and of trainers."""
        facts = record.facts
        final, transform = mapping_of(facts.get("final")), mapping_of(facts.get("transform"))
        allowed = record.decision == "allow"
        for name, rows in _SETS.items():
            digest = final.get(name)
            if not (allowed and isinstance(digest, str) and digest):
                continue
            if (name, digest) in self.sets or len(self.sets) < SETS_MAX:
                self.sets[name, digest] = max(self.sets.get((name, digest), 0), count_of(final.get(rows)))
            else:
                self.sets_not_listed += 1
        if record.event == "egress.decision" and allowed and is_count(final.get("records")):
            self.trained[self._trained((record.run, bucket(final["records"])))] += 1
        for peer, count in mapping_of(transform.get("donors_dropped")).items():
            if record.event == "ingress.decision" and is_count(count) and count:
                self.donors_total += count
                place = (record.run, record.round, peer)
                if place in self.donors or len(self.donors) < DONOR_ROWS_MAX:
                    row = self.donors.setdefault(place, [0, record.seq, record.seq])
                    row[0], row[2] = row[0] + count, record.seq
        if record.kind == "control.hello":
            whose = record.peer if record.event == "ingress.decision" else record.actor
            self._level(whose, final, record.seq)

    def _level(self, whose: str, levels: Mapping[str, Any], seq: int) -> None:
        if (level := levels.get("isolation")) in ISOLATION_LEVELS:
            self.levels.setdefault((self._whose(whose), level), [seq, seq])[1] = seq

    def _read(self, record: Record) -> None:
        self.retention["reads_total"] += 1
        if len(self.retention["reads"]) < INCIDENTS_MAX:
            detail = record.detail
            self.retention["reads"].append(
                {
                    "seq": record.seq,
                    "t": record.t,
                    "person": text_of(detail.get("person")),
                    "certificate": text_of(detail.get("certificate")),
                    "kind": record.kind,
                    "decision": record.decided_by or 0,
                }
            )

    def _policy(self, record: Record) -> None:
        detail, policy = record.detail, record.fields.get("policy", {})
        if record.event == "start" and "version" in detail:
            self.programs[self._program((text_of(detail["version"]), text_of(detail.get("code"))))] += 1
        if "effective" not in policy:
            return
        if self.policies and self.policies[-1]["effective"] == policy["effective"]:
            self.policies[-1]["loads"] += 1
            self.policies[-1]["last_t"] = record.t
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
                "seq": record.seq,
                "t": record.t,
                "last_t": record.t,
                "loads": 1,
                "decisions": 0,
                # of a policy that is looser than the one before: who asked for it, and who agreed
                "proposal": text_of(detail.get("proposal")),
                "proposer": text_of(detail.get("proposer")),
                "approvers": sorted(map(str, record.approvals))[:APPROVERS_MAX],
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything counted, for the report's value."""
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
                {"identity": whose, "isolation": level, "first": first, "last": last}
                for (whose, level), (first, last) in sorted(self.levels.items())
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

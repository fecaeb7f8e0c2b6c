"""What a log says that people answered: to messages that were held for them, and to halts.

The log has who answered, with which certificate, to which digest and when, and what each person signed; whether that
holds is `commands.py`'s to say, and is told here beside each answer. A release is granted only where an allowing
decision names its grants; the first of two approvals frees nothing.
What this cannot show: that a person answered at all, of a record that an earlier version wrote. Its guard says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedsilo.audit.counting import OTHERS, FirstOf, Names, count_of, mapping_of, reasons_of, text_of

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

    def decided(self, record: Mapping[str, Any]) -> None:
        """A decision: how many persons it waits for, or on whose yes it rests."""
        place = _place(record)
        if record["decision"] == "hold":
            _put(self._needed, place, _needed(record))
            return
        if record["decision"] == "deny" and (newest := self._newest.pop(place, None)) is not None:
            newest.denied(record)  # such a decision names no approvals, and it follows the last one
        named = mapping_of(record.get("link")).get("approvals")
        if isinstance(named, list):
            numbers = set(map(str, named))
            for release in {self._of_grant[number] for number in numbers & self._of_grant.keys()}:
                if release.place == place:
                    release.decided(record, numbers)

    def answered(self, record: Mapping[str, Any], version: int, note: str = "", order: str = "") -> None:
        """An `approval.*` record.

        Args:
            record: of the log.
            version: number of policy changes before it, since each voids what was given.
            note: what the person wrote, where the site keeps it.
            order: verdict of `commands.py` on what the person signed.
        """
        event, detail = record["event"].partition(".")[2], record.get("detail", {})
        release = text_of(detail.get("release"))
        of_halt = event == "grant" and not release
        if "person" in detail:
            name = self._person((text_of(detail["person"]), text_of(detail.get("certificate"))))
            self.persons.setdefault(name, Counter())["halt" if of_halt else event] += 1
        if of_halt:
            self.halt_grants.add(
                {
                    "seq": record["seq"], "t": record["t"], "kind": record.get("kind", ""),
                    "person": text_of(detail.get("person")), "certificate": text_of(detail.get("certificate")),
                    "reasons": reasons_of(record), "since_seconds": count_of(detail.get("since")), "order": order,
                }
            )  # fmt: skip
            return
        found = self.releases.get(release := release or f"record {record['seq']}")
        if found is None:
            if len(self.releases) >= RELEASES_MAX:
                self.further[event] += 1
                return
            found = self.releases[release] = _Release(release, record)
        if event == "request":
            found.asked(self._needed.pop(_place(record), 0), version)
        found.answered(record, event, version, note, order)
        if event == "grant" and found.counts(record["seq"]):
            self._of_grant[str(record["seq"])] = found
            _put(self._newest, _place(record), found)

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
    """One message that was held, as the log tells of it."""

    def __init__(self, name: str, record: Mapping[str, Any]) -> None:
        payload = record.get("payload", {})
        self.place = _place(record)
        self._told = {
            "release": name,
            "kind": record.get("kind", ""),
            "run": record.get("run", ""),
            "round": record.get("round", 0),
            "bytes": payload.get("bytes", 0),
            "digest": payload.get("sha256") or payload.get("hmac_sha256", ""),
            "policy": record.get("policy", {}).get("effective", ""),
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

    def answered(self, record: Mapping[str, Any], event: str, version: int, note: str, order: str) -> None:
        detail = record.get("detail", {})
        answer = {"answer": event, "seq": record["seq"], "t": record["t"], "reasons": reasons_of(record)}
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
                self._grants[str(record["seq"])] = "" if order == "broken" else text_of(detail.get("person"))
        elif event != "request":
            self._state = {"deny": "rejected", "expire": "expired"}[event]

    def counts(self, seq: int) -> bool:
        return str(seq) in self._grants

    def decided(self, record: Mapping[str, Any], named: set[str]) -> None:
        if not named & self._grants.keys():
            return
        self._decision = {"seq": record["seq"], "verdict": record["decision"]}
        self._needed = _needed(record) or self._needed
        if self._state == "held":
            self._state = "granted" if record["decision"] == "allow" else "refused"

    def denied(self, record: Mapping[str, Any]) -> None:
        if self._state == "held" and self._decision is None and 0 < self._needed <= self._given():
            self._state, self._decision = "refused", {"seq": record["seq"], "verdict": "deny"}

    def _given(self) -> int:
        return len({person for person in self._grants.values() if person})

    def to_json(self, version: int) -> dict[str, Any]:
        """`state`: held, granted, refused (by the rules, although approved), rejected (by a person), expired.

        `given`: different persons whose yes counts, none whose signature does not hold; `needed`: how many the decision
        asked for, None where no record says; `decision`: number and verdict of the one that rests on them, else None.
        """
        void = self._state == "held" and version != self._version
        return {
            **self._told,
            "state": self._state,
            "given": 0 if void else self._given(),
            "needed": None if void else self._needed or None,
            "void": void and bool(self._grants),
            "decision": self._decision,
            "answers": self._answers.rows,
            "answers_total": self._answers.total,
        }


def _put(pending: dict[Place, Any], place: Place, value: Any) -> None:
    """As the newest; the oldest goes where there are too many."""
    pending.pop(place, None)
    pending[place] = value
    if len(pending) > _PENDING_MAX:
        del pending[next(iter(pending))]


def _needed(record: Mapping[str, Any]) -> int:
    """How many persons the decision's own rules ask for; 0 where they do not say.

    Two rules hold a message, and the limit of both is the number of persons: `approvals`, and `screen hits` where it
    waits for them.
    """
    limits = [
        count_of(rule.get("limit"))
        for rule in record.get("rules", ())
        if rule.get("rule") == "approvals" or rule.get("outcome") == "hold"
    ]
    return max(limits, default=0)


def _place(record: Mapping[str, Any]) -> Place:
    """What a person is asked about: these bytes at this place of a run."""
    payload = record.get("payload", {})
    digest = payload.get("sha256") or payload.get("hmac_sha256") or ""
    where = record.get("run") or "", record.get("round") or 0, record.get("step") or 0
    return record.get("kind") or "", *where, digest

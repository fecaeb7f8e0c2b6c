"""Counts of the messages allowed before, which budgets are compared with.

`HistoryBook` is plain data that the party persists; `History` is the small view of it that one decision needs. The
view is JSON, so a log that holds facts and view replays each decision exactly.
A retry of bytes already allowed is the same release: its sender neither decides nor records it again.

A book does not grow with a run's rounds: of those long before its newest nothing is counted, and nothing more fits into
them. It does grow with its matches.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedsilo.protocol.kinds import KINDS
from policies.message import Facts

MINUTE_SECONDS = 60.0
ROUNDS_KEPT = 8  # newest ones of a run with counts of their own: they are stored anew with each message
FULL = 1 << 52  # as a count: more than any policy allows, and with what a message adds to it JSON carries it still
# Counts of a round that is past: nothing more fits into it, so a coordinator that goes back to it gets nothing (T11).
_IN_FULL_ROUND: dict[str, Any] = dict.fromkeys(
    (
        "messages_in_round",
        "messages_in_step",
        "messages_in_match",
        "units_in_day",
        "messages_in_minute",
        "responses",
        "tokens",
        "text_bytes",
        "round_bytes",
    ),
    FULL,
)
_DAYS_KEPT = 3


@dataclass(frozen=True)
class Approval:
    """A person's approval of exactly this payload; the party has verified its signature and expiry."""

    person: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """What a party remembers of earlier messages.

    Attributes:
        messages_in_round, messages_in_step: of the same kind, for the same run and round (and step).
        messages_in_match: of the same kind, for the match that the message names.
        units_in_day: what the kind's row has added up over a day, on this UTC day: scores, answers, or bytes of text.
        messages_in_minute: in this message's bucket (polls, control, everything else) in the last 60 s.
        rounds_released: other rounds of this run in which a message of this kind was allowed. Counted here, since a
            round's number is the coordinator's choice.
        responses, tokens, text_bytes: of the kind that adds them up, in this run and round.
        round_bytes: payload bytes of this run and round, without control messages.
        day_bytes: payload bytes of all kinds on this UTC day.
        screen_hits_in_day: responses of this kind that screens found something in, on this UTC day; those of the
            message at hand are among them.
        screen_halted: the kind had more of them than its limit, and no persons have released it since (T18).
    """

    messages_in_round: int = 0
    messages_in_step: int = 0
    messages_in_match: int = 0
    units_in_day: int = 0
    messages_in_minute: int = 0
    rounds_released: int = 0
    responses: int = 0
    tokens: int = 0
    text_bytes: int = 0
    round_bytes: int = 0
    day_bytes: int = 0
    screen_hits_in_day: int = 0
    screen_halted: bool = False
    approvals: tuple[Approval, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> History:
        approvals = tuple(Approval(item["person"], tuple(item["roles"])) for item in value.get("approvals", ()))
        return History(**{**value, "approvals": approvals})


def bucket_of(kind: str) -> str:
    """Polls have their own bucket, since a silo polls all the time; other control messages have another."""
    if kind == "control.poll":
        return "poll"
    return "control" if kind.startswith("control.") else "content"


@dataclass
class HistoryBook:
    """Counts of allowed messages of one sender (a coordinator keeps one book for each silo).

    Attributes:
        counts: "run/round[/step]/name" -> number; "run/rounds/kind" -> rounds in which the kind was allowed;
            "run/first" -> the oldest round with counts of its own, where there were older ones.
        days: UTC date -> payload bytes.
        units: UTC date -> kind -> what `units_in_day` counts.
        recent: bucket -> UTC seconds of the messages of the last minute.
        screen_hits: UTC date -> kind -> responses with a screen's hit, whether or not their message was allowed.
        screen_halts: kind -> UTC seconds since which it is halted. No day's end lifts it; persons do.
    """

    counts: dict[str, int] = field(default_factory=dict)
    days: dict[str, int] = field(default_factory=dict)
    units: dict[str, dict[str, int]] = field(default_factory=dict)
    recent: dict[str, list[float]] = field(default_factory=dict)
    screen_hits: dict[str, dict[str, int]] = field(default_factory=dict)
    screen_halts: dict[str, float] = field(default_factory=dict)

    def view(self, facts: Facts, approvals: tuple[Approval, ...] = ()) -> History:
        round_key, step_key = _keys(facts)
        kind, now = facts["kind"], facts["now"]
        times = self.recent.get(bucket_of(kind), [])
        count = self.counts.get
        in_round = count(f"{round_key}/{kind}", 0)
        view = History(
            messages_in_round=in_round,
            messages_in_step=count(f"{step_key}/{kind}", 0),
            messages_in_match=count(_match_key(facts), 0),
            units_in_day=self.units.get(_day(now), {}).get(kind, 0),
            # A clock set back must not empty the bucket (T41): times ahead of now still count.
            messages_in_minute=sum(1 for moment in times if moment > now - MINUTE_SECONDS),
            rounds_released=count(_rounds_key(facts), 0) - (in_round > 0),
            responses=count(f"{round_key}/responses", 0),
            tokens=count(f"{round_key}/tokens", 0),
            text_bytes=count(f"{round_key}/text_bytes", 0),
            round_bytes=count(f"{round_key}/bytes", 0),
            day_bytes=self.days.get(_day(now), 0),
            screen_hits_in_day=self.screen_hits.get(_day(now), {}).get(kind, 0),
            screen_halted=kind in self.screen_halts,
            approvals=approvals,
        )
        return replace(view, **_IN_FULL_ROUND) if self._is_past(facts) else view

    def _is_past(self, facts: Facts) -> bool:
        """Return True for a round whose own counts are no longer stored. Control messages are bounded by the minute."""
        first = self.counts.get(f"{facts['run']}/first", 0)
        return 0 < facts["round"] < first and bucket_of(facts["kind"]) == "content"

    def record(self, facts: Facts) -> None:
        """Count an allowed message. Call it once per release, durably before the bytes leave."""
        round_key, step_key = _keys(facts)
        kind, now, size = facts["kind"], facts["now"], facts["payload_bytes"]
        self._add(f"{round_key}/{kind}", 1)
        if self.counts[f"{round_key}/{kind}"] == 1 and not kind.startswith("control."):
            self._add(_rounds_key(facts), 1)
            self._forget_rounds(facts["run"], facts["round"] + 1 - ROUNDS_KEPT)
        if step_key != round_key:
            self._add(f"{step_key}/{kind}", 1)
        if not kind.startswith("control."):
            self._add(f"{round_key}/bytes", size)
        if "match" in facts:
            self._add(_match_key(facts), 1)
        row = KINDS.get(kind)
        if units := facts.get(row.per_day if row is not None else "units", 0):
            today = self.units.setdefault(_day(now), {})
            today[kind] = today.get(kind, 0) + units
            _forget_days(self.units)
        for name in row.per_round if row is not None else ():
            self._add(f"{round_key}/{name}", facts[name])
        self.add_bytes(now, size)
        _forget_days(self.days)
        times = self.recent.setdefault(bucket_of(kind), [])
        times.append(now)
        self.recent[bucket_of(kind)] = [moment for moment in times if moment > now - MINUTE_SECONDS]

    def add_bytes(self, now: float, size: int) -> None:
        """Count bytes of further messages on a day, of which nothing else is counted."""
        self.days[_day(now)] = self.days.get(_day(now), 0) + size

    def count_hits(self, kind: str, now: float, responses_hit: int, limit: int) -> bool:
        """Count what screens found, before anything is decided on it. Beyond the limit the kind is halted.

        Args:
            kind: of the message.
            now: UTC seconds, never going back.
            responses_hit: responses with at least one hit.
            limit: of one UTC day.

        Returns:
            Whether this is what halted it.
        """
        today = self.screen_hits.setdefault(_day(now), {})
        today[kind] = today.get(kind, 0) + responses_hit
        _forget_days(self.screen_hits)
        if today[kind] <= limit or kind in self.screen_halts:
            return False
        self.screen_halts[kind] = now
        return True

    def lift_halt(self, kind: str, now: float) -> None:
        """Persons have looked: the kind may leave again, and its count of the day begins anew."""
        self.screen_halts.pop(kind, None)
        self.screen_hits.get(_day(now), {}).pop(kind, None)

    def turn_back(self, now: float) -> None:
        """The clock was wrong and is right now: what was counted at later times counts as of today, so that nothing is
        refilled by it (T41)."""
        today = _day(now)
        for later in [day for day in self.days if day > today]:
            self.days[today] = self.days.get(today, 0) + self.days.pop(later)
        for counted in (self.units, self.screen_hits):
            for later in [day for day in counted if day > today]:
                for kind, number in counted.pop(later).items():
                    kinds = counted.setdefault(today, {})
                    kinds[kind] = kinds.get(kind, 0) + number
        self.recent = {bucket: [min(moment, now) for moment in times] for bucket, times in self.recent.items()}

    def raise_to(self, other: HistoryBook) -> None:
        """Raise each number to the larger of the two; what is halted in one of them is halted (T42)."""
        _raise(self.counts, other.counts)
        _raise(self.days, other.days)
        for mine, others in ((self.units, other.units), (self.screen_hits, other.screen_hits)):
            for day, kinds in others.items():
                _raise(mine.setdefault(day, {}), kinds)
            _forget_days(mine)
        _forget_days(self.days)
        for bucket, times in other.recent.items():
            self.recent[bucket] = max(self.recent.get(bucket, []), times, key=len)
        self.screen_halts = {**other.screen_halts, **self.screen_halts}

    def forget_run(self, run: str) -> None:
        """Drop the counts of a run that has ended; its rounds cannot be open again."""
        self.counts = {key: value for key, value in self.counts.items() if not key.startswith(f"{run}/")}

    def forget_runs_but(self, runs: Collection[str]) -> None:
        """Drop the counts of all other runs, which have ended."""
        if any(run and run not in runs for run in {key.partition("/")[0] for key in self.counts}):
            self.counts = {key: value for key, value in self.counts.items() if key.partition("/")[0] in {"", *runs}}

    def _forget_rounds(self, run: str, before: int) -> None:
        if before <= max(1, self.counts.get(f"{run}/first", 0)):
            return

        def is_older(key: str) -> bool:
            of_run, number, *_ = key.split("/")
            return of_run == run and number.isdecimal() and 0 < int(number) < before

        self.counts = {key: value for key, value in self.counts.items() if not is_older(key)}
        self.counts[f"{run}/first"] = before

    def _add(self, key: str, amount: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + amount

    def to_json(self) -> dict[str, Any]:
        """Return a copy as JSON, written by hand, since `asdict` goes through each number, and this is asked for with
        each message."""
        return {
            "counts": dict(self.counts),
            "days": dict(self.days),
            "units": {day: dict(kinds) for day, kinds in self.units.items()},
            "recent": {bucket: list(times) for bucket, times in self.recent.items()},
            "screen_hits": {day: dict(kinds) for day, kinds in self.screen_hits.items()},
            "screen_halts": dict(self.screen_halts),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> HistoryBook:
        return HistoryBook(**value)


def _raise(mine: dict[str, int], others: dict[str, int]) -> None:
    for name, number in others.items():
        mine[name] = max(mine.get(name, 0), number)


def _forget_days(counted: dict[str, Any]) -> None:
    for old in sorted(counted)[:-_DAYS_KEPT]:
        del counted[old]


def _keys(facts: Facts) -> tuple[str, str]:
    round_key = f"{facts['run']}/{facts['round']}"
    return round_key, f"{round_key}/{facts['step']}"


def _rounds_key(facts: Facts) -> str:
    return f"{facts['run']}/rounds/{facts['kind']}"


def _match_key(facts: Facts) -> str:
    return f"{facts['run']}/match/{facts.get('match', 0)}/{facts['kind']}"


def _day(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))

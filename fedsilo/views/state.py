"""What a client knows of one daemon, as frozen values read from the control API's JSON, and when an answer is off.

The JSON comes from our own daemon, but much in it came from further away, so nothing here trusts its shape: what is
missing or of another type becomes an empty value, and a release whose digests cannot be read can be looked at but not
answered. Texts stay as they came; `fedsilo.views.lines` makes them safe, and commands carry them back unchanged. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from fedsilo.control import answers
from fedsilo.protocol.rounds import is_over, silo_is_dead, silo_is_here
from fedsilo.views.lines import YEAR_10000_SECONDS, bytes_text

STALE_SECONDS = 3.0  # six missed readings
SKEW_SECONDS_MAX = 30.0
HIDDEN = "hidden"  # in place of what the source does not hold; never 0, and never a guess
HEX_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

LinkState = Literal["loading", "live", "disconnected"]


@dataclass(frozen=True)
class Link:
    """State of the connection between console and daemon. Times are of the console's monotonic clock."""

    state: LinkState = "loading"
    cause: str = ""
    hint: str = ""
    received_at: float = -math.inf  # of the last snapshot
    retry_at: float = -math.inf
    banner: str = ""  # what is read in place of a daemon that runs, such as a replay; "" for a daemon
    latency_seconds: float = 0.0  # that the last reading took; 0 while not measured


@dataclass(frozen=True)
class Rule:
    rule: str
    outcome: str  # ok | look | hold | deny
    measured: str
    limit: str
    usual: str = ""  # what it measured of earlier releases of the kind; empty where there is nothing to compare with
    is_near: bool = True  # it took half of its limit or more, or has no limit that is a number


class Release(answers.HeldRelease):
    """A held release as people read it.

    Attributes:
        rules: verdicts in words.
        ended_at: seconds since 1970, the daemon's clock, when it was first seen held no more; 0 before.
    """

    rules: tuple[Rule, ...]
    ended_at: float = 0.0

    @property
    def given(self) -> tuple[str, ...]:
        """People who approved already."""
        return tuple(one.person for one in self.approvers.given if one.verdict == "approve")

    @property
    def refused(self) -> tuple[tuple[str, str, str], ...]:
        """People who said no, their reason code and what they wrote."""
        return tuple((one.person, one.reason, one.note) for one in self.approvers.given if one.verdict == "reject")

    @property
    def hidden(self) -> frozenset[str]:
        """Fields that the source does not hold: in a share-safe recording the local ones."""
        return self.absent & _OF_A_RELEASE | self.approvers.absent & {"given"}

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what identifies the release as shown: an answer to another identity answers something else."""
        return self.digest, self.policy.digest, self.revision

    @property
    def answerable(self) -> bool:
        return bool(self.id) and all(HEX_DIGEST.fullmatch(text) for text in (self.digest, self.policy.digest))

    def held_seconds(self, time: float) -> float:
        """Return for how long it is held at that time of the daemon's clock; NaN where either time is not known."""
        return time - self.held_since if time and self.held_since else math.nan

    def left_seconds(self, time: float) -> float:
        """Until it expires, negative once it has; NaN where either moment is not known."""
        return self.expires_at - time if time and self.expires_at else math.nan

    def deferred_until(self, person: str, time: float) -> float:
        """Until when this person wants not to be asked for it, at that time (seconds since 1970); 0 when now."""
        return next((until for name, until in self.deferred.items() if name == person and until > time), 0.0)

    def not_opened(self, opened: Collection[str]) -> tuple[answers.Finding, ...]:
        """Findings that are not among these ids."""
        return tuple(finding for finding in self.noticed if finding.id not in opened)

    def count(self, outcome: str) -> int:
        return sum(rule.outcome == outcome for rule in self.rules)


class SiloState(answers.SiloStatus):
    """The status of a silo with its held releases as people read them."""

    releases: tuple[Release, ...]

    def figure(self, name: str) -> answers.Metric | None:
        found = self.metrics.get(name)
        return found if found is not None and _is_number(found.value) else None


class Member(answers.MemberRow):
    """A silo as the coordinator sees it, with what it released in the newest run."""

    pass_at_1: float | None
    received_bytes: float | None

    @property
    def is_here(self) -> bool:
        return silo_is_here(self.state)

    @property
    def is_dead(self) -> bool:
        """Nothing comes from it, or what comes is refused."""
        return silo_is_dead(self.state)


class CoordinatorState(answers.CoordinatorStatus):
    """The status of a coordinator, with its silos as people read them."""

    members: tuple[Member, ...]

    @property
    def current(self) -> answers.RunRow | None:
        """The newest that goes on, else the newest."""
        return next(
            (run for run in reversed(self.runs) if not is_over(run.state)), self.runs[-1] if self.runs else None
        )


@dataclass(frozen=True)
class Happening:
    sequence: int
    time: str
    name: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """Everything the console shows, at one moment."""

    link: Link = Link()
    server_time: float = 0.0  # seconds since 1970 at `link.received_at`
    policy_digest: str = ""
    state: SiloState | CoordinatorState | None = None
    events: tuple[Happening, ...] = ()
    events_missed: int = 0
    skew_seconds: float = 0.0
    # What the screen on top asked for (`FedScreen.wants`), by its key: the JSON values as the daemon gave them.
    answers: Mapping[str, Any] = field(default_factory=dict)
    answered_at: Mapping[str, float] = field(default_factory=dict)  # the console's monotonic clock
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # code and text, of the last time it was asked
    viewer: str = ""  # who unlocked this console; what that person put off does not need that person

    @property
    def site(self) -> str:
        match self.state:
            case SiloState():
                return self.state.silo
            case CoordinatorState():
                return self.state.site
        return ""

    @property
    def federation(self) -> str:
        return self.state.federation if self.state is not None else ""

    @property
    def held(self) -> tuple[Release, ...]:
        return self.state.releases if isinstance(self.state, SiloState) else ()

    def release(self, release_id: str) -> Release | None:
        return next((release for release in self.held if release.id == release_id), None)

    def age_seconds(self, now: float) -> float:
        return now - self.link.received_at

    def server_now(self, now: float) -> float:
        """The daemon's clock, in seconds since 1970; 0 while it is not known."""
        return self.server_time + max(self.age_seconds(now), 0.0) if self.state is not None else 0.0

    def is_stale(self, now: float) -> bool:
        return self.state is not None and self.age_seconds(now) > STALE_SECONDS


def ended(shown: Release, state: str, given: tuple[str, ...], at: float) -> Release:
    """A release that is held no more, as it stands then: the clock stops, and who approved is counted.

    Args:
        shown: as it was last shown.
        state: what became of it, in a word or two.
        given: people who approved.
        at: seconds since 1970, the daemon's clock.
    """
    rules = tuple(
        replace(rule, outcome="ok", measured=str(len(given)))
        if rule.rule == "approvals" and rule.outcome == "hold" and len(given) >= shown.approvers.needed
        else rule
        for rule in shown.rules
    )
    refusals = [one for one in shown.approvers.given if one.verdict != "approve"]
    yeses = [answers.filled(answers.Given, person=person, verdict="approve") for person in given]
    approvers = replace(shown.approvers, given=(*yeses, *refusals))
    return replace(shown, state=state, approvers=approvers, rules=rules, ended_at=shown.ended_at or at)


NO_LONGER = "no longer held"  # while how it ended is not known


def ending_text(release: Release) -> str:
    """Return how a release ended, and by whom where people answered: such as "rejected by alice"."""
    people = [name for name, *_ in release.refused] if release.state == "rejected" else list(release.given)
    return (
        f"{release.state} by {', '.join(people)}" if people and release.state not in _WITHOUT_PEOPLE else release.state
    )


_WITHOUT_PEOPLE = ("expired", "missed")


def changed_since(shown: Release, snapshot: Snapshot) -> str:
    """Why what was shown is no longer what the daemon holds, or nothing."""
    held = snapshot.release(shown.id)
    if held is None or held.state != "held":
        return f"{shown.id} is {NO_LONGER}"
    if held.digest != shown.digest:
        return "the payload changed: read it again"
    # a source that tells the digest in force and not the one it was held under says nothing of a change
    in_force = shown.policy.digest if "policy" in shown.hidden else snapshot.policy_digest
    if held.policy.digest != shown.policy.digest or in_force != shown.policy.digest:
        return "the policy changed: read it again"
    if held.revision != shown.revision:
        return "the release was judged again: read it again"
    return ""


def why_not_change(snapshot: Snapshot, now: float) -> str:
    """Why nothing can be changed at the daemon now, or nothing."""
    if snapshot.link.state == "loading" and snapshot.link.cause:
        return f"{snapshot.link.cause}: nothing can be changed"
    if snapshot.link.state != "live":
        return "disconnected: nothing can be changed"
    if snapshot.link.banner:
        return f"{snapshot.link.banner.partition(' ')[0]}: nothing can be changed"
    return "the view is stale: nothing can be changed" if snapshot.is_stale(now) else ""


def why_not_answer(shown: Release, snapshot: Snapshot, now: float, *, approve: bool) -> str:
    """Why this release cannot be answered now as it was shown, or nothing. The daemon asks all of it again."""
    if why := why_not_change(snapshot, now):
        return why
    if changed := changed_since(shown, snapshot):
        return changed
    if not shown.answerable:
        return "the daemon's digests cannot be read"
    left = shown.left_seconds(snapshot.server_now(now))
    if not left > 0:
        return "it expired" if left <= 0 else "when it expires is not yet known"
    if approve and shown.count("deny"):
        return "the policy denies it: no person can approve that"
    return ""


NEAR_SHARE = 0.5  # of a limit: below it, the limit says nothing of what was measured


def state_of(state: Mapping[str, Any], record: Mapping[str, Any]) -> SiloState | CoordinatorState | None:
    """Return a daemon's status; None where it told none. `record` is the run record so far, for the figures that were
    released to a coordinator."""
    if state.get("party") == "coordinator":
        at_coordinator = answers.read(answers.CoordinatorStatus, state)
        scores, sizes = _released(record)
        members = tuple(
            Member(**vars(row), pass_at_1=scores.get(row.silo), received_bytes=sizes.get(row.silo))
            for row in at_coordinator.silos
        )
        return CoordinatorState(**vars(at_coordinator), members=members)
    if "silo" not in state:
        return None
    silo = answers.read(answers.SiloStatus, state)
    return SiloState(**vars(silo), releases=tuple(map(release_of, silo.held)))


def until_of(certificate_until: str) -> float:
    """Return seconds since 1970 at which a certificate ends; infinity while that is not told."""
    return time_of(certificate_until) or math.inf


def broken_text(log: answers.LogState) -> str:
    """Return where the audit log is broken, and why; empty where no verification found that."""
    return f"record {log.broken.seq}: {log.broken.why}" if log.broken is not None else ""


def release_of(data: Any) -> Release:
    """Return one release of the state or of the query `approval`."""
    held = answers.read(answers.HeldRelease, data)
    privacy, _, counted = held.budget.partition("; ")  # an earlier version told both as one
    named = tuple(one if one.id else replace(one, id=f"{one.code} {one.says}") for one in held.noticed)
    told = replace(held, budget=privacy, uses=held.uses or counted, noticed=named)
    return Release(**vars(told), rules=tuple(map(_rule, held.policy.rules)))


# What a daemon tells of every release that it holds.
_OF_A_RELEASE = frozenset({"digest", "leaves", "policy", "budget", "findings", "difference", "consequences"})


def _rule(judged: answers.JudgedRule) -> Rule:
    measured, limit = (value_text(value, judged.rule, narrow=True) for value in (judged.measured, judged.limit))
    usual = _usual(judged.usual or {}, judged.rule)
    return Rule(judged.rule, judged.outcome, measured, limit, usual, _is_near(judged.measured, judged.limit))


def _usual(data: Mapping[str, Any], rule: str) -> str:
    """Return such as `0.9 to 1.4 in 3 before`."""
    if not data:
        return ""
    least, most = (value_text(data.get(field), rule, narrow=True) for field in ("least", "most"))
    return f"{least if least == most else f'{least} to {most}'} in {whole(data.get('releases'))} before"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_near(measured: Any, limit: Any) -> bool:
    numbers = _is_number(measured) and _is_number(limit)
    return not numbers or not limit or number(measured) >= number(limit) * NEAR_SHARE


def value_text(value: Any, rule: str = "", *, narrow: bool = False) -> str:
    """A measured value or a limit, short: sizes in units people read, digests by their ends, moments as days.

    Args:
        value: as the daemon gave it.
        rule: whose it is; a name with "bytes" is of a size, "valid" is of moments.
        narrow: shorter still, for two values in a narrow column: 1.9M, and of more than two values only their number.
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float() if rule == "valid" and 0 <= value < YEAR_10000_SECONDS:
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d")
        case int() | float() if "bytes" in rule:
            text = bytes_text(value)
            return text.replace(" ", "").rstrip("iB") if narrow else text
        case float():
            return f"{value:.4g}"
        case list() if rule == "valid":
            return " to ".join(value_text(item, rule, narrow=narrow) for item in value)
        case list():
            if len(value) > (2 if narrow else 4):
                return f"{len(value)} listed"
            return (" " if narrow else ", ").join(value_text(item, rule, narrow=narrow) for item in value)
        case str() if HEX_DIGEST.fullmatch(value):
            return f"{value[:4]}…{value[-4:]}"
    return str(value)


def refusal_text(refusal: Mapping[str, Any]) -> str:
    """Return why a silo was refused: what was expected of it and what it said, digests by their ends."""
    shown = {key: value_text(value) for key, value in refusal.items()}
    if not {"field", "expected", "got"} <= shown.keys():
        return " ".join(f"{key} {value}" for key, value in shown.items() if value)
    code = f" [{shown['code']}]" if shown.get("code") else ""
    return f"its {shown['field']} is {shown['got'] or 'none'}, expected {shown['expected'] or 'none'}{code}"


def _released(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Newest released pass@1, and bytes received, by silo."""
    scores: dict[str, float] = {}
    for figures in map(mapping, [record.get("before"), *_list(record.get("rounds"))]):
        for silo, names in mapping(figures.get("metrics")).items():
            value = mapping(mapping(names).get("pass_at_1")).get("")
            if isinstance(value, int | float):
                scores[silo] = float(value)
    sizes: dict[str, float] = {}
    for row in map(mapping, _list(record.get("traffic"))):
        if row.get("direction") == "in":
            silo = text_of(row.get("silo"))
            sizes[silo] = sizes.get(silo, 0.0) + number(row.get("bytes"))
    return scores, sizes


def event_text(fields: Mapping[str, Any]) -> str:
    shown = [f"{name} {value}" for name, value in fields.items() if isinstance(value, str | int | float)]
    return " ".join(text for text in shown if text)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def whole(value: Any) -> int:
    return int(number(value))


def time_of(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 time; 0 when it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


Question: TypeAlias = tuple[str, Mapping[str, Any]]  # a query's name and its arguments


HALTS = "halts"  # the answer that every screen has, at a silo


def halts_of(snapshot: Snapshot) -> tuple[answers.Halt, ...]:
    """Kinds that are halted at a silo: as its state names them, with what the query `halts` adds."""
    if not isinstance(snapshot.state, SiloState):
        return ()
    listed = answers.read(answers.HaltList, snapshot.answers.get(HALTS)).halts
    halts = {halt.kind: halt for halt in listed}
    for kind in snapshot.state.screens.halts:
        halts.setdefault(kind, answers.read(answers.Halt, {"kind": kind}))
    return tuple(halts[kind] for kind in sorted(halts))

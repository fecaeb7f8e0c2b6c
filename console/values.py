"""What a console knows of one daemon, as frozen values, and when an answer to a release is off. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedsilo.protocol.round_tables import is_over, silo_is_dead, silo_is_here

STALE_SECONDS = 3.0  # six missed readings
SKEW_SECONDS_MAX = 30.0
HIDDEN = "hidden"  # in place of what the source does not hold; never 0, and never a guess
HEX_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

LinkState = Literal["loading", "live", "disconnected"]


@dataclass(frozen=True)
class Link:
    """How the console stands with the daemon. Times are of the console's monotonic clock."""

    state: LinkState = "loading"
    cause: str = ""
    hint: str = ""
    received_at: float = -math.inf  # of the last snapshot
    retry_at: float = -math.inf
    told: str = ""  # what is read in place of a daemon that runs, such as a replay; "" for a daemon
    latency_seconds: float = 0.0  # that the last reading took; 0 while not measured


@dataclass(frozen=True)
class Rule:
    rule: str
    outcome: str  # ok | look | hold | deny
    measured: str
    limit: str
    usual: str = ""  # what it measured of earlier releases of the kind; empty where there is nothing to compare with
    is_near: bool = True  # it took half of its limit or more, or has no limit that is a number


@dataclass(frozen=True)
class Leaving:
    kind: str
    items: str
    size_bytes: float
    covered_by_epsilon: str
    says: str = ""  # what it is and who can read it, in a sentence


@dataclass(frozen=True)
class Evidence:
    what: str
    before: str
    now: str


@dataclass(frozen=True)
class Finding:
    """Something unusual about a release, to be opened before a yes.

    Args:
        id: what the daemon calls it.
        code: its kind.
        says: in a sentence.
        evidence: what was compared, whole.
    """

    id: str
    code: str
    says: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Release:
    """One held message with every fact a person needs before answering (console design 5)."""

    id: str
    digest: str
    policy_digest: str
    revision: int
    state: str
    held_since: float  # seconds since 1970, the daemon's clock; this and the next 0 where not told
    expires_at: float
    asked_by: str
    run: str
    round: int
    needed: int
    roles: tuple[str, ...]
    given: tuple[str, ...]  # people who approved already
    destination: str
    certificate: str  # of the destination, as the daemon pinned or saw it
    kinds: tuple[Leaving, ...]
    size_bytes: float
    stays: tuple[str, ...]
    policy_name: str
    rules: tuple[Rule, ...]
    budget: str
    findings: str
    difference: str
    norm: str
    on_approve: str
    on_reject: str
    shown: str = (
        ""  # what the daemon says that it showed: a digest of facts that do not move, for the signature of a yes
    )
    receiver: str = ""  # who runs the destination, by name
    uses: str = ""  # of the limits that count over messages, those of which it takes much
    unscreened: bool = False  # there is text in it, and no screen looked at it
    on_later: str = ""  # which later rounds leave unasked after a yes, by which line of the policy
    noticed: tuple[Finding, ...] = ()
    refused: tuple[tuple[str, str, str], ...] = ()  # people who said no, their reason code and what they wrote
    deferred: tuple[tuple[str, float], ...] = ()  # person, until when: seconds since 1970, the daemon's clock
    ended_at: float = 0.0  # seconds since 1970, the daemon's clock, when it was first seen held no more; 0 before
    people: tuple[str, ...] = ()  # who may approve it, where the daemon knows
    # Fields that the source does not hold, by their names there: in a share-safe recording the local ones.
    hidden: frozenset[str] = frozenset()

    @property
    def identity(self) -> tuple[str, str, int]:
        """What was shown: an answer to another identity is an answer to something else."""
        return self.digest, self.policy_digest, self.revision

    @property
    def answerable(self) -> bool:
        return bool(self.id) and all(HEX_DIGEST.fullmatch(text) for text in (self.digest, self.policy_digest))

    def held_seconds(self, time: float) -> float:
        """For how long, at that time of the daemon's clock; NaN where either moment is not known."""
        return time - self.held_since if time and self.held_since else math.nan

    def left_seconds(self, time: float) -> float:
        """Until it expires, negative once it has; NaN where either moment is not known."""
        return self.expires_at - time if time and self.expires_at else math.nan

    def deferred_until(self, person: str, time: float) -> float:
        """Until when this person wants not to be asked for it, at that time (seconds since 1970); 0 when now."""
        return next((until for name, until in self.deferred if name == person and until > time), 0.0)

    def not_opened(self, opened: Collection[str]) -> tuple[Finding, ...]:
        """Findings that are not among these ids."""
        return tuple(finding for finding in self.noticed if finding.id not in opened)

    def count(self, outcome: str) -> int:
        return sum(rule.outcome == outcome for rule in self.rules)


@dataclass(frozen=True)
class Figure:
    """A number with where it comes from: local (this silo only), released, or computed here."""

    name: str
    value: float
    source: str
    round: int


@dataclass(frozen=True)
class Left:
    kind: str
    messages: int
    size_bytes: float


@dataclass(frozen=True)
class SiloState:
    silo: str
    role: str
    federation: str
    run: str
    last_run: str  # the newest run, also when it is over
    last_run_state: str
    method: str
    rounds: int
    local_steps: int
    round: int
    step: int
    phase: str
    halted: str
    paused: bool
    isolation: str
    policy_name: str
    policy_digest: str  # of what is in force
    policy_files: int  # that it is made of: the site's own, and the federation's charter
    held: tuple[Release, ...]
    figures: tuple[Figure, ...]
    left: tuple[Left, ...]
    donors_used: int
    donors_wanted: int
    coordinator: str
    coordinator_link: str
    coordinator_fault: str
    audit_records: int
    audit_broken: str  # where and why, once a verification found it
    certificate_until: float  # seconds since 1970; infinity when it is not told
    dp: str
    halted_kinds: tuple[str, ...] = ()  # by their text screens; each is sent again once approvers released it
    screen_troubles: tuple[str, ...] = ()  # why a screen cannot run; its kind is denied until it can
    adapter_held: str = ""  # digest of a global adapter that did worse here, and waits for a person
    clock_halted: bool = False  # nothing goes on before an approver accepts this machine's clock
    waits: str = ""  # a database that another process has locked
    clock_told: str = ""  # by how much it differs from the coordinator's, where that is worth a word
    run_paused: bool = False  # by the coordinator, which says so; `paused` is of people here
    hidden: frozenset[str] = frozenset()  # fields that the source does not hold, as of a release

    def figure(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


@dataclass(frozen=True)
class Member:
    """A silo as the coordinator sees it: what the silo released, nothing else."""

    silo: str
    state: str  # as the coordinator puts it, in one word for all who ask: `coordinator.members.standing`
    last_seen: float  # seconds since 1970; 0 when never
    round: int
    step: int
    error: str
    refusal: str
    isolation: str
    pass_at_1: float | None
    received_bytes: float | None
    certificate_until: float = math.inf  # seconds since 1970; infinity while it is not told
    clock: str = ""  # by how much it differs from the coordinator's, where that is worth a word

    @property
    def is_here(self) -> bool:
        return silo_is_here(self.state)

    @property
    def is_dead(self) -> bool:
        """Nothing comes from it, or what comes is refused."""
        return silo_is_dead(self.state)


@dataclass(frozen=True)
class Run:
    run: str
    state: str
    reason: str
    method: str
    round: int
    rounds: int
    silos: tuple[str, ...]


@dataclass(frozen=True)
class CoordinatorState:
    coordinator: str
    site: str
    federation: str
    address: str
    halted: str
    runs: tuple[Run, ...]
    members: tuple[Member, ...]
    waits: str = ""  # a database that another process has locked
    audit_broken: str = ""  # which record of its log does not fit, and why
    clock_told: str = ""  # by how much its clock is off what all there goes by, where that is worth a word

    @property
    def current(self) -> Run | None:
        """The newest that goes on, else the newest."""
        return next(
            (run for run in reversed(self.runs) if not is_over(run.state)), self.runs[-1] if self.runs else None
        )


@dataclass(frozen=True)
class Halt:
    """A kind of message of which nothing is sent until approvers have looked and released it."""

    kind: str
    since: float = 0.0  # seconds since 1970; 0 while not told
    needed: int = 0  # approvals; 0 while not told
    given: tuple[str, ...] = ()
    digest: str = ""  # what a release is signed over; empty while not told


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
        return self.state.held if isinstance(self.state, SiloState) else ()

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
        if rule.rule == "approvals" and rule.outcome == "hold" and len(given) >= shown.needed
        else rule
        for rule in shown.rules
    )
    return replace(shown, state=state, given=given, rules=rules, ended_at=shown.ended_at or at)


NO_LONGER = "no longer held"  # while how it ended is not known


def ending_text(told: Release) -> str:
    """How a release ended, and by whom where people answered: such as "rejected by alice"."""
    people = [name for name, *_ in told.refused] if told.state == "rejected" else list(told.given)
    return f"{told.state} by {', '.join(people)}" if people and told.state not in _WITHOUT_PEOPLE else told.state


_WITHOUT_PEOPLE = ("expired", "missed")


def changed_since(shown: Release, snapshot: Snapshot) -> str:
    """Why what was shown is no longer what the daemon holds, or nothing."""
    held = snapshot.release(shown.id)
    if held is None or held.state != "held":
        return f"{shown.id} is {NO_LONGER}"
    if held.digest != shown.digest:
        return "the payload changed: read it again"
    # a source that tells the digest in force and not the one it was held under says nothing of a change
    in_force = shown.policy_digest if "policy" in shown.hidden else snapshot.policy_digest
    if held.policy_digest != shown.policy_digest or in_force != shown.policy_digest:
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
    if snapshot.link.told:
        return f"{snapshot.link.told.partition(' ')[0]}: nothing can be changed"
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

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

from fedsilo.protocol.round_tables import is_over, silo_is_dead, silo_is_here
from fedsilo.views.lines import bytes_text

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
    state: str  # as the coordinator puts it, in one word for all who ask: `coordinator.ingress.standing`
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


NEAR_SHARE = 0.5  # of a limit: below it, the limit says nothing of what was measured


def state_of(state: Mapping[str, Any], record: Mapping[str, Any]) -> SiloState | CoordinatorState | None:
    if state.get("party") == "coordinator":
        return _coordinator(state, record)
    return _silo(state) if "silo" in state else None


def _silo(state: Mapping[str, Any]) -> SiloState:
    policy, link = mapping(state.get("policy")), mapping(state.get("coordinator"))
    donors, last_run = mapping(state.get("donors")), mapping(state.get("last_run"))
    figures = []
    for name, item in mapping(state.get("metrics")).items():
        fields = mapping(item)
        value = fields.get("value")
        if isinstance(value, int | float) and not isinstance(value, bool):
            figures.append(Figure(name, float(value), text_of(fields.get("source")), whole(fields.get("round"))))
    return SiloState(
        silo=text_of(state.get("silo")),
        role=text_of(state.get("role")),
        federation=text_of(state.get("federation")),
        run=text_of(state.get("run")),
        last_run=text_of(last_run.get("run")),
        last_run_state=text_of(last_run.get("state")),
        method=text_of(state.get("method")),
        rounds=whole(state.get("rounds")),
        local_steps=whole(state.get("local_steps")),
        round=whole(state.get("round")),
        step=whole(state.get("step")),
        phase=text_of(state.get("phase")),
        halted=text_of(state.get("halted")) if state.get("halted") else "",
        waits=text_of(state.get("waits")) if state.get("waits") else "",
        clock_halted=bool(mapping(state.get("clock")).get("halt")),
        clock_told=_clock_told(state),
        paused=state.get("paused") is True,
        run_paused=state.get("run_paused") is True,
        adapter_held=text_of(state.get("adapter_held")) if state.get("adapter_held") else "",
        isolation=text_of(mapping(state.get("trainer")).get("isolation")),
        policy_name=text_of(policy.get("name")),
        policy_digest=text_of(policy.get("digest")),
        policy_files=len(_list(policy.get("made_of"))),
        held=tuple(release_of(mapping(item)) for item in _list(state.get("held"))),
        figures=tuple(figures),
        left=tuple(
            Left(text_of(row.get("kind")), whole(row.get("messages")), number(row.get("bytes")))
            for row in map(mapping, _list(state.get("left")))
        ),
        donors_used=whole(donors.get("used")),
        donors_wanted=whole(donors.get("wanted")),
        coordinator=text_of(link.get("address")),
        coordinator_link=text_of(link.get("link")),
        coordinator_fault=text_of(link.get("fault")),
        audit_records=whole(mapping(state.get("audit")).get("size")),
        audit_broken=_broken(mapping(mapping(state.get("audit")).get("broken"))),
        certificate_until=time_of(text_of(state.get("certificate_until"))) or math.inf,
        dp=text_of(state.get("dp")),
        hidden=frozenset(name for name in ("phase", "halted") if name not in state)
        | frozenset({"coordinator"} if "address" not in link else ()),
    )


def _broken(found: Mapping[str, Any]) -> str:
    return f"record {whole(found.get('seq'))}: {text_of(found.get('why'))}" if found else ""


def release_of(data: Mapping[str, Any]) -> Release:
    """One release, as the state and the query `approval` tell it."""
    approvers, leaves = mapping(data.get("approvers")), mapping(data.get("leaves"))
    destination, policy = mapping(leaves.get("destination")), mapping(data.get("policy"))
    answers = [mapping(item) for item in _list(approvers.get("given"))]
    consequences = mapping(data.get("consequences"))
    privacy, _, counted = text_of(data.get("budget")).partition("; ")  # an earlier version told both as one
    return Release(
        id=text_of(data.get("id")),
        digest=text_of(data.get("digest")),
        policy_digest=text_of(policy.get("digest")),
        revision=whole(data.get("revision")),
        state=text_of(data.get("state")),
        held_since=number(data.get("held_since")),
        expires_at=number(data.get("expires_at")),
        asked_by=text_of(data.get("asked_by")),
        run=text_of(data.get("run")),
        round=whole(data.get("round")),
        needed=whole(approvers.get("needed")),
        roles=tuple(map(text_of, _list(approvers.get("roles")))),
        given=tuple(text_of(item.get("person")) for item in answers if item.get("verdict") == "approve"),
        people=tuple(map(text_of, _list(approvers.get("people")))),
        destination=text_of(destination.get("address")),
        receiver=text_of(destination.get("name")),
        certificate=text_of(destination.get("certificate")),
        kinds=tuple(
            Leaving(
                text_of(row.get("kind")), text_of(row.get("items")), number(row.get("bytes")),
                text_of(row.get("covered_by_epsilon")), text_of(row.get("says")),
            )
            for row in map(mapping, _list(leaves.get("kinds")))
        ),
        size_bytes=number(leaves.get("bytes")),
        stays=tuple(map(text_of, _list(leaves.get("stays")))),
        policy_name=text_of(policy.get("name")),
        rules=tuple(_rule(mapping(item)) for item in _list(policy.get("rules"))),
        budget=privacy,
        uses=text_of(data.get("uses")) or counted,
        unscreened=data.get("unscreened") is True,
        findings=text_of(data.get("findings")),
        difference=text_of(data.get("difference")),
        norm=value_text(data.get("norm"), narrow=True),
        noticed=tuple(_finding(mapping(item)) for item in _list(data.get("noticed"))),
        refused=tuple(
            (text_of(item.get("person")), text_of(item.get("reason")), text_of(item.get("note")))
            for item in answers if item.get("verdict") == "reject"
        ),
        deferred=tuple((name, number(until)) for name, until in mapping(data.get("deferred")).items()),
        on_approve=text_of(consequences.get("approve")),
        on_reject=text_of(consequences.get("reject")),
        shown=text_of(data.get("shown")),
        on_later=text_of(consequences.get("later")),
        hidden=frozenset(name for name in _OF_A_RELEASE if name not in data)
        | frozenset({"given"} if "given" not in approvers else ()),
    )  # fmt: skip


# What a daemon tells of every release that it holds.
_OF_A_RELEASE = ("digest", "leaves", "policy", "budget", "findings", "difference", "consequences")


def _finding(data: Mapping[str, Any]) -> Finding:
    evidence = (
        Evidence(text_of(one.get("what")), text_of(one.get("before")), text_of(one.get("now")))
        for one in map(mapping, _list(data.get("evidence")))
    )
    code, says = text_of(data.get("code")), text_of(data.get("says"))
    return Finding(text_of(data.get("id")) or f"{code} {says}", code, says, tuple(evidence))


_YEAR_10000_SECONDS = 253_402_300_800  # since 1970; a later moment has no date


def _rule(data: Mapping[str, Any]) -> Rule:
    name = text_of(data.get("rule"))
    measured, limit = (value_text(data.get(field), name, narrow=True) for field in ("measured", "limit"))
    return Rule(
        name, text_of(data.get("outcome")), measured, limit, _usual(mapping(data.get("usual")), name),
        _is_near(data.get("measured"), data.get("limit")),
    )  # fmt: skip


def _usual(data: Mapping[str, Any], rule: str) -> str:
    """Such as `0.9 to 1.4 in 3 before`."""
    if not data:
        return ""
    least, most = (value_text(data.get(field), rule, narrow=True) for field in ("least", "most"))
    return f"{least if least == most else f'{least} to {most}'} in {whole(data.get('releases'))} before"


def _is_near(measured: Any, limit: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (measured, limit))
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
        case int() | float() if rule == "valid" and 0 <= value < _YEAR_10000_SECONDS:
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


def _coordinator(state: Mapping[str, Any], record: Mapping[str, Any]) -> CoordinatorState:
    scores, sizes = _released(record)
    members = []
    for row in map(mapping, _list(state.get("silos"))):
        name = text_of(row.get("silo"))
        refusal = mapping(row.get("refusal"))
        members.append(
            Member(
                silo=name,
                state=text_of(row.get("state")),
                last_seen=time_of(text_of(row.get("last_seen"))),
                round=whole(row.get("round")),
                step=whole(row.get("step")),
                error=text_of(row.get("error")),
                refusal=_refusal(refusal),
                isolation=text_of(mapping(row.get("hello")).get("isolation")),
                pass_at_1=scores.get(name),
                received_bytes=sizes.get(name),
                certificate_until=time_of(text_of(row.get("certificate_until"))) or math.inf,
                clock=text_of(row.get("clock")) if row.get("clock") else "",
            )
        )
    return CoordinatorState(
        coordinator=text_of(state.get("coordinator")),
        site=text_of(state.get("site")),
        federation=text_of(state.get("federation")),
        address=text_of(state.get("address")),
        halted=text_of(state.get("halted")) if state.get("halted") else "",
        waits=text_of(state.get("waits")) if state.get("waits") else "",
        runs=tuple(
            Run(
                text_of(row.get("run")), text_of(row.get("state")), text_of(row.get("reason")),
                text_of(row.get("method")),
                whole(row.get("round")), whole(row.get("rounds")), tuple(map(text_of, _list(row.get("silos")))),
            )
            for row in map(mapping, _list(state.get("runs")))
        ),
        members=tuple(members),
        audit_broken=_broken(mapping(mapping(state.get("audit")).get("broken"))),
        clock_told=_clock_told(state),
    )  # fmt: skip


def _clock_told(state: Mapping[str, Any]) -> str:
    told = mapping(state.get("clock")).get("told")
    return text_of(told) if told else ""


def _refusal(told: Mapping[str, Any]) -> str:
    """Why a silo was refused: what was expected of it and what it said, digests by their ends."""
    shown = {key: value_text(value) for key, value in told.items()}
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


def halts_of(snapshot: Snapshot) -> tuple[Halt, ...]:
    """Kinds that are halted at a silo: as its state names them, with what the query `halts` adds."""
    if not isinstance(snapshot.state, SiloState):
        return ()
    told = mapping(snapshot.answers.get(HALTS)).get("halts")
    rows = [mapping(row) for row in told] if isinstance(told, list) else []
    halts = {
        text_of(row.get("kind")): Halt(
            text_of(row.get("kind")),
            number(row.get("since")),
            whole(row.get("needed")),
            texts_of(row.get("given")),
            text_of(row.get("digest")),
        )
        for row in rows
    }
    for kind in snapshot.state.halted_kinds:
        halts.setdefault(kind, Halt(kind))
    return tuple(halts[kind] for kind in sorted(halts))


def texts_of(value: Any) -> tuple[str, ...]:
    return tuple(map(text_of, value)) if isinstance(value, list) else ()

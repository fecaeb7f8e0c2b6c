"""The answers of a daemon to queries, as frozen values: the fields of each, their types, and who may see them.

The daemon builds these and writes them with `to_json`, in the order of their fields; clients `read` them from that
JSON. `read` trusts no shape in it: what is missing or of another type becomes an empty value, and what is missing is
named in `absent`, for a share-safe recording leaves fields out. A key that Python keeps for itself has a field with an
underscore behind it, such as `for_`. Texts stay as they came: `fedsilo.views.lines` makes
each harmless where it is drawn, and commands carry them back unchanged. A field stays at the site unless it is marked
as released. Pure.

Does not stop: a released field whose content says more than it should. Released is what the site's policy has let out
already, or what the coordinator was told in a message of its own.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

Row = TypeVar("Row", bound="Answer")
Value = TypeVar("Value")
RELEASED = "released"
Released = Annotated[Value, RELEASED]


@dataclass(frozen=True)
class Keys:
    """Mark of a JSON object with keys of its own: these are released, and every other one is local on purpose."""

    released: frozenset[str]


@dataclass(frozen=True)
class Only:
    """Mark of rows of which a share-safe recording may hold those whose field has one of these values."""

    field: str
    values: frozenset[str]


FreeForm: TypeAlias = Mapping[str, Any]  # a JSON object whose keys are no matter of the answer that holds it


@typing.dataclass_transform(frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Answer:
    """Base class of what is read from JSON; each subclass is a frozen dataclass.

    Attributes:
        absent: fields that the source does not hold, and that are not written.
        first: fields that are written before the others, where a class has them in another order than its base.
    """

    first: ClassVar[tuple[str, ...]] = ()
    absent: frozenset[str] = frozenset()

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


def read(row: type[Row], value: Any) -> Row:
    """Return the value of a JSON object; of anything else, an empty one. A value that was read already stays."""
    if isinstance(value, row):
        return value
    found = value if isinstance(value, Mapping) else {}
    known = fields_of(row)
    values = {name: _value(kind, found.get(_key(name))) for name, (kind, _) in known.items()}
    return row(**values, absent=frozenset(name for name in known if _key(name) not in found))


def filled(row: type[Row], **values: Any) -> Row:
    """Return an answer with these fields; the others are there, and empty."""
    return row(**{name: _value(kind, None) for name, (kind, _) in fields_of(row).items()} | values)


def read_rows(row: type[Row], values: Any) -> tuple[Row, ...]:
    """Return the values of a JSON list; of anything else, none."""
    return tuple(read(row, each) for each in values) if isinstance(values, list | tuple) else ()


def to_json(value: Any, row: type[Answer] | None = None) -> Any:
    """Return an answer, and each one in it, as JSON objects with their fields in order; other values as they are.

    Args:
        value: to write.
        row: writes its fields only; by default those of the answer's own type.
    """
    if isinstance(value, Answer):
        known = fields_of(row or type(value))
        return {_key(name): to_json(getattr(value, name)) for name in known if name not in value.absent}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, list | tuple) else value


def _key(name: str) -> str:
    return name.rstrip("_")


_KNOWN: dict[type[Answer], Mapping[str, tuple[Any, tuple[Any, ...]]]] = {}  # hints are resolved once


def fields_of(row: type[Answer]) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type and the marks of each field."""
    if row not in _KNOWN:
        hints = typing.get_type_hints(row, include_extras=True)
        names = [field.name for field in dataclasses.fields(row) if field.name != "absent"]
        names.sort(key=lambda name: row.first.index(name) if name in row.first else len(row.first))
        marked = {name: getattr(hints[name], "__metadata__", ()) for name in names}
        _KNOWN[row] = {n: (hints[n].__origin__ if marks else hints[n], marks) for n, marks in marked.items()}
    return _KNOWN[row]


def _value(kind: Any, value: Any) -> Any:
    """Return the value of a field's type: a text, a number, a flag, an answer, one of them or None, rows, anything."""
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):
        wanted = next(each for each in typing.get_args(kind) if each is not types.NoneType)
        known = isinstance(value, _accepted(wanted)) and not (isinstance(value, float) and not math.isfinite(value))
        return _value(wanted, value) if known else None
    if kind is bool:
        return value is True
    if kind is str:
        return value if isinstance(value, str) else "" if value is None else str(value)
    if kind in (int, float):
        known = isinstance(value, int | float) and math.isfinite(value)
        return kind(0) if not known else value if kind is float and type(value) is int else kind(value)
    if isinstance(kind, type) and issubclass(kind, Answer):
        return read(kind, value)
    if typing.get_origin(kind) is tuple:
        wanted = typing.get_args(kind)[0]
        return tuple(_value(wanted, each) for each in value) if isinstance(value, list | tuple) else ()
    wanted = typing.get_args(kind)[1]
    return {str(name): _value(wanted, each) for name, each in value.items()} if isinstance(value, Mapping) else {}


def _accepted(kind: Any) -> Any:
    """Return the types of JSON values of which a field of this type is made."""
    if isinstance(kind, type) and issubclass(kind, Answer):
        return Mapping
    origin = typing.get_origin(kind)
    if origin is not None:
        return list | tuple if origin is tuple else Mapping
    return int | float if kind is float else kind


class MessageRow(Answer):
    """One decision on a message, or at a coordinator what went to one silo of one kind in one round."""

    seq: Released[Any]  # number of the audit record; of a count, run/round/kind/silo
    time: Released[str]
    run: Released[str]
    round: Released[int]
    step: Released[int]
    kind: Released[str]
    items: Released[int | None]  # tensors or answers in it
    bytes: Released[float]
    verdict: Released[str]
    rule: str  # the first of the rules that decided
    reasons: tuple[str, ...]
    rules: tuple[str, ...]
    digest: str
    digest_keyed: bool  # the digest is keyed with the site's key
    peer: Released[str]
    outcome: Released[str]  # what became of it: sent, acked, indeterminate, how a hold ended, or nothing yet
    milliseconds: Any
    messages: Released[int]  # how many a count is over
    waiting: int  # of a count, how many wait for the silo


class SentRow(MessageRow):
    """Count of the messages that went to one silo, of one kind, in one round."""

    first = ("seq", "run", "round", "kind", "peer", "messages", "bytes", "waiting", "outcome")


class MessagePage(Answer):
    """Rows of an outbox or inbox, newest first. The counts are of the whole log, whatever was asked for."""

    messages: Annotated[tuple[MessageRow, ...], RELEASED, Only("outcome", frozenset({"sent", "acked"}))]
    total: int
    held: int  # of decisions, that people are asked about still
    denied: int
    sent: int  # of counts, the messages of all
    waiting: int
    next: Released[Any]  # where the next page begins; None at the end


class DecisionInFull(Answer):
    """One decision."""

    message: FreeForm  # its audit record, with the verdict of every rule
    outcome: str
    milliseconds: int | None  # from the decision to the sending; None where that is not known
    would_pass: tuple[str, ...]  # for each rule that denied or held it, and what the policy of now would do


class WaitingItem(Answer):
    """One message that a silo has not acknowledged."""

    step: int
    bytes: int
    sha256: str
    delivered: bool  # the silo has it, so only its acknowledgement is to come


class SentInFull(Answer):
    """Count of the messages of one kind to one silo in one round, with those that wait for it."""

    message: MessageRow
    waiting: tuple[WaitingItem, ...]


class RecordPage(Answer):
    """Audit records, newest first. size: of the log."""

    records: tuple[FreeForm, ...]
    size: int
    next: int | None  # where the next page begins; None at the end


class RecordPayload(Answer):
    """Size and digest of a message, as its audit record has them."""

    bytes: float
    sha256: str
    hmac_sha256: str  # in its place where the content could be guessed
    sha256_before: str  # of what was offered
    archived: bool

    @property
    def digest(self) -> str:
        return self.sha256 or self.hmac_sha256

    @property
    def keyed(self) -> bool:
        """The digest is keyed with the site's key."""
        return "sha256" in self.absent and "hmac_sha256" not in self.absent


class AuditRecord(Answer):
    """An audit record as people see it; whoever wrote the log chose its values."""

    seq: Any
    t: Any  # milliseconds since 1970
    event: str
    why: str  # of a line that is no record
    run: str
    round: Any
    step: Any
    kind: str
    peer: str
    sequence: Any
    decision: str
    reasons: tuple[str, ...]
    rules: tuple[JudgedRule, ...]
    payload: RecordPayload
    facts: Mapping[str, FreeForm]
    policy: FreeForm
    detail: FreeForm
    link: FreeForm


class SignedCheckpoint(Answer):
    """The newest checkpoint that somebody countersigned, else the newest."""

    size: Released[int]
    time: Released[str]
    cosigned_by: Released[tuple[str, ...]]


class AuditStatus(Answer):
    """State of a log: how far its daemon verified it, and whether others' copies match, differ or were not seen."""

    size: Released[int]
    verified_to: Released[int | None]  # None before the first verification, as `verified_at`
    verified_at: Released[str | None]
    verifying: Released[bool]
    looked_at: Released[int]  # while it goes on
    of: Released[int]
    broken: Broken | None
    checkpoint: Released[SignedCheckpoint]
    coordinator: Released[str]  # at a silo
    witnesses: Released[Mapping[str, str]]  # at a coordinator, by the names of the silos


class ReleaseRow(Answer):
    """One release that is or was held."""

    id: Released[str]
    kind: Released[str]
    run: Released[str]
    round: Released[int]
    step: Released[int]
    bytes: float
    digest: str
    policy_digest: str
    revision: Released[int]
    state: Released[str]
    held_since: Released[float]  # seconds since 1970, the daemon's clock
    expires_at: Released[float]
    needed: Released[int]  # approvals
    given: tuple[str, ...]  # by whom
    answers: tuple[AnswerGiven, ...]  # each with its moment in UTC in `at`


class AnswerGiven(Answer):
    """A person's answer to a release, as its row tells it."""

    person: str
    verdict: str
    at: str
    reason: str
    note: str


class ReleasePage(Answer):
    """Releases that were ever held, newest first. next: passed as `before` for the page after; None at the end."""

    releases: Released[tuple[ReleaseRow, ...]]
    total: Released[int]
    next: Released[int | None]


class CertificateRow(Answer):
    """One certificate that a daemon shows, or the authority above it."""

    subject: str
    role: str
    names: tuple[str, ...]
    issuer: str
    fingerprint: str
    not_before: str
    not_after: str
    days_left: int
    pinned: bool | None  # it is a root that this daemon takes nobody else's word for
    whose: str
    file: str  # empty where somebody showed it
    in_use: bool | None  # the daemon runs with this one; a renewed file counts from the next start on
    fault: str  # why the file cannot be read; the row then has nothing else


class SettingRow(Answer):
    """One setting, and where its value comes from: FILE:LINE, or "default"."""

    key: str
    value: Any
    origin: str


class LimitRow(Answer):
    """One limit that counts over messages."""

    limit: str  # its name in the policy
    kind: str  # of the messages that count
    used: int
    max: int
    unit: str
    window: str  # minute, round, match, day (UTC), or life: as long as the site keeps its state
    line: str  # where the policy says so


class CapacityRow(Answer):
    """The number of bits that a hostile trainer could carry out in a round with one kind."""

    kind: str
    bits: float
    because: str
    planted_bits: float | None  # what a planted scheme got out; None where none was tried
    planted: str  # the scheme


class Forecast(Answer):
    """Rounds like the last that fit into what is left of the limits of a day.

    Attributes:
        rounds_left: None where no round was counted, or none of these limits counts what such a round lets out
    """

    rounds_left: int | None
    bound_by: str  # the limit that ends first, or why there is no forecast


class SpentRow(Answer):
    """One message of content that was let out and counted against limits."""

    seq: Any
    run: str
    round: int
    kind: str
    bytes: int
    at: str
    outcome: str


class Limits(Answer):
    """Every counting limit of the policy in force."""

    rows: tuple[LimitRow, ...]
    capacity: tuple[CapacityRow, ...]  # bits per round that the trainer's owner can get out at most (N1)
    not_counted: str
    dp: str
    forecast: Forecast
    releases: tuple[SpentRow, ...]  # the newest


class ContentRow(Answer):
    """One message of content that a silo remembers to have let out."""

    kind: Released[str]
    run: Released[str]
    round: Released[int]
    step: Released[int]
    digest: str
    bytes: Released[int]
    state: Released[str]
    at: Released[str]  # UTC


class LedgerRun(Answer):
    """A run as the ledger remembers it."""

    run: Released[str]
    state: Released[str]
    round: Released[int]


class LedgerPage(Answer):
    """Content of a ledger, which outlives restarts: runs, counts of the budgets, a page of rows, newest first."""

    dp: Released[str]
    runs: Released[tuple[LedgerRun, ...]]
    history: FreeForm
    content: Annotated[tuple[ContentRow, ...], RELEASED, Only("state", frozenset({"sent"}))]
    total: int
    next: Released[int | None]


class LogLines(Answer):
    """The newest lines of a daemon's log, oldest first, and from how many of them words were left out."""

    lines: tuple[str, ...]
    left_out: int


# ---- a held release, read before it is answered --------------------------------------------------------------------


class ComparedWith(Answer):
    """The message that a release is compared with."""

    run: str
    round: int
    step: int
    digest: str
    at: str  # UTC
    state: str  # left, or what became of one that did not
    approved_by: tuple[str, ...]
    rejected_by: tuple[str, ...]


class ComparedFact(Answer):
    """A fact of both messages."""

    what: str
    before: Any
    now: Any
    differs: bool


class ComparedTensor(Answer):
    """The L2 norm of a tensor in both messages; None where one has no such tensor, or where nothing can be divided."""

    name: str
    before: float | None
    now: float | None
    times: float | None


class Comparison(Answer):
    """A release beside the last one of its kind.

    Attributes:
        against: None for a first release
        note: what could not be compared, and what is said of the other one
    """

    release: str
    kind: str
    against: ComparedWith | None
    rows: tuple[ComparedFact, ...]
    tensors: tuple[ComparedTensor, ...]  # the largest changes first
    tensors_total: int
    note: str


class Histogram(Answer):
    """How many values of a tensor are of which size, by powers of ten."""

    negative: tuple[int, ...]
    zero: int
    positive: tuple[int, ...]
    not_finite: int


class ShownTensor(Answer):
    """A tensor of a held message; no value of it is told."""

    name: str
    shape: tuple[int, ...]
    type: str
    norm: str
    histogram: Histogram


class AnsweredPrompt(Answer):
    """Answers to a public prompt. prompt: from this site's own copy of the public set; None where it is not there."""

    row: int
    prompt: str | None
    answers: tuple[str, ...]


class HeldPayload(Answer):
    """What a held release would send: tensors, answers, or the content of a small message; the others are absent."""

    release: str
    kind: str
    run: str
    round: int
    step: int
    bytes: int
    sha256: str
    tensors: tuple[ShownTensor, ...]  # the first ones, by name
    tensors_total: int
    edges: tuple[float, ...]  # of the histograms
    answers: tuple[AnsweredPrompt, ...]
    content: Any


class ArchivedPayload(Answer):
    """What left under a record."""

    seq: int
    kind: str
    run: str
    round: int
    step: int
    bytes: int
    sha256: str
    content: Any


# ---- the status ----------------------------------------------------------------------------------------------------


class RunState(Answer):
    """A run by its name and how it stands."""

    run: Released[str]
    state: Released[str]


class Screens(Answer):
    """Results of the policy's text screens."""

    halts: tuple[str, ...]  # kinds that are halted; each is sent again once approvers released it
    troubles: tuple[str, ...]  # why a screen cannot run; its kind is denied until it can


class PolicyInUse(Answer):
    """The policy in force. made_of: the site's own file and, where there is one, the federation's charter."""

    name: str
    digest: Released[str]
    mode: str
    made_of: tuple[FreeForm, ...]


class Metric(Answer):
    """A figure, and what it comes from: local (this silo only), released, or computed."""

    value: Released[Any]
    source: Released[str]
    task: Released[str]
    round: Released[int]
    step: Released[int]


class Donors(Answer):
    """Answers of other silos in training."""

    used: int
    wanted: int


class LeftRow(Answer):
    """What left this silo of one kind."""

    kind: Released[str]
    messages: Released[int]
    bytes: Released[float]


class CoordinatorLink(Answer):
    """The coordinator of a silo."""

    address: str
    id: Released[str]
    link: Released[str]  # connecting, live, down, or carried in files
    fault: str  # why it is down
    last_contact: Released[Any]  # in UTC, ISO 8601


class Broken(Answer):
    """The first record of an audit log that does not fit."""

    seq: int
    why: str


class LogState(Answer):
    """The audit log: its size is in every checkpoint that others countersign; a break is for this site's people."""

    size: Released[int]
    broken: Broken | None


class Given(Answer):
    """A person's answer to a held release."""

    person: str
    verdict: str
    at: float  # seconds since 1970
    time: str  # the same moment in UTC
    reason: str  # its code
    note: str  # what the person wrote


class Approvers(Answer):
    """The people who may answer a held release, and those who did."""

    needed: Released[int]
    roles: tuple[str, ...]
    people: tuple[str, ...]  # who may approve it, where the daemon knows
    given: tuple[Given, ...]


class Destination(Answer):
    """The far end of a held release."""

    name: str  # who runs it
    address: str
    certificate: str  # as the daemon pinned or saw it
    not_after: str  # of the certificate
    since_round: int  # from which address and certificate are used without a break; told where it is known
    since_run: str
    since: Any


class LeavingKind(Answer):
    """The content of a held message."""

    kind: str
    says: str  # what it is and who can read it, in a sentence
    items: str
    bytes: float
    covered_by_epsilon: str


class Leaves(Answer):
    """What leaves when it is approved, where to, and what stays at the site."""

    destination: Destination
    kinds: tuple[LeavingKind, ...]
    bytes: float
    stays: tuple[str, ...]


class JudgedRule(Answer):
    """A rule's verdict on a message.

    Attributes:
        usual: least and most that it measured of so many earlier releases; told of rules that measure a size
    """

    rule: str
    reason: str
    outcome: str  # ok, look, hold, deny, or n.a
    measured: Any
    limit: Any
    file: str
    line: Any
    usual: FreeForm | None


class JudgedBy(Answer):
    """The policy by which a held release is judged."""

    name: str
    digest: str
    before: str  # digest of the one that the last release of this kind left under
    counts: FreeForm  # of outcomes
    rules: tuple[JudgedRule, ...]


class Evidence(Answer):
    """A comparison: its subject, the value before and the value now."""

    what: str
    before: str
    now: str


class Finding(Answer):
    """Something unusual about a release, to be opened before a yes counts."""

    id: str
    code: str
    outcome: str
    says: str
    evidence: tuple[Evidence, ...]


class LaterRounds(Answer):
    """Which later rounds of a run leave without anybody being asked, by the policy's words about a kind.

    Attributes:
        asked, unasked: rounds; None where the run's rounds are not known.
        file, line: where the policy says so.
    """

    kind: str
    asked: tuple[int, ...] | None
    unasked: tuple[int, ...] | None
    file: str
    line: int
    says: str


class Consequences(Answer):
    """What follows an approval, now and in later rounds, and a rejection."""

    approve: str
    later: str
    later_rounds: tuple[LaterRounds, ...]
    reject: str


class HeldRelease(Answer):
    """A held message with every fact that a person needs before answering.

    It was not released, so what it is made of is local, even its size."""

    id: Released[str]
    digest: str
    shown: str  # digest of what is shown, for the signature of a yes
    shown_facts: str  # the same of facts that do not move
    revision: Released[int]
    state: Released[str]
    run: Released[str]
    round: Released[int]
    step: Released[int]
    held_since: Released[float]  # seconds since 1970, the daemon's clock
    expires_at: Released[float]
    asked_by: Released[str]
    approvers: Released[Approvers]
    leaves: Leaves
    policy: JudgedBy
    budget: str
    uses: str  # of the limits that count over messages, those of which it takes much
    noticed: tuple[Finding, ...]
    unscreened: bool  # there is text in it, and no screen looked at it
    findings: str
    difference: str
    norm: Any
    base: FreeForm  # digests of the adapter that an update is on top of, now, and of what the round before ended in
    consequences: Consequences
    deferred: Mapping[str, float]  # until when each person wants not to be asked


class SiloStatus(Answer):
    """The status of a silo, as its guard answers at its own socket (`silo.guard.answers.state`).

    `silo status`, the overview of the console, `fedsilo metrics` and `fedsilo watch` show it. What the trainer says of
    its work, and whether people stopped it, is released to nobody. What the coordinator knows of a silo is `MemberRow`.

    Attributes:
        trainer: isolation level, which the coordinator was told, probe results, and what the trainer said when ready
    """

    kind: Released[str]
    silo: Released[str]
    role: Released[str]
    federation: Released[str]
    run: Released[str]
    last_run: Released[RunState]  # the newest, also when it is over
    method: Released[str]
    rounds: Released[int]
    local_steps: Released[int]
    round: Released[int]
    step: Released[int]
    phase: str  # what the silo does, in words
    task: str  # that the trainer works on
    paused: bool  # by people here
    run_paused: Released[bool]  # by the coordinator, which says so
    adapter_held: str  # digest of a global adapter that did worse here; the coordinator was told a code alone
    halted: str
    waits: str  # for whom the loop waits, such as a locked database
    clock: FreeForm  # the halt for it, and what the coordinator's clock says
    screens: Screens
    trainer: Annotated[FreeForm, Keys(frozenset({"isolation"}))]
    overlong: FreeForm  # prompts that are too long for the plan
    policy: Released[PolicyInUse]
    held: Released[tuple[HeldRelease, ...]]
    metrics: Annotated[Mapping[str, Metric], RELEASED, Only("source", frozenset({"released"}))]
    donors: Donors
    left: Released[tuple[LeftRow, ...]]  # by kind
    coordinator: Released[CoordinatorLink]
    audit: Released[LogState]
    certificate_until: Released[str]  # UTC, ISO 8601
    dp: Released[str]


class Halt(Answer):
    """A kind of message of which nothing is sent until approvers have looked and released it."""

    kind: str
    since: float  # seconds since 1970; 0 while not known, as `needed`
    digest: str  # what a release is signed over; empty while not known
    policy_digest: str
    needed: int
    given: tuple[str, ...]


class HaltList(Answer):
    """Every kind that is halted at a silo."""

    halts: tuple[Halt, ...]


class MeasuredSet(Answer):
    """An adapter beside the last accepted one, on one set of prompts.

    Attributes:
        outcome: no_drop, drop or too_few.
        before, after: shares of right answers, and their difference with its 95 % interval; None where too few.
        detectable: the drop that shows four times in five.
    """

    outcome: str
    prompts: int
    before: float
    after: float
    difference: float
    interval: tuple[float, ...] | None
    detectable: float | None


class AdapterRow(Answer):
    """A global adapter that a silo accepted or holds.

    Attributes:
        how: it was accepted: taken, measured, or by a person; absent while it is held.
        reasons, against, said: why it is held, compared with which one, and in words; absent where it never was.
        figures: by the set's name.
    """

    digest: str
    round: int
    how: str
    reasons: tuple[str, ...]
    against: str
    figures: Mapping[str, MeasuredSet]
    said: str


class AdapterLimits(Answer):
    """By what a silo measures each global adapter."""

    prompts: tuple[str, ...]
    samples: int
    drop_max: float
    prompts_min: int


class AdapterList(Answer):
    """Global adapters at a silo, newest first. Nothing of it leaves the site."""

    run: str
    limits: AdapterLimits | None  # None: nothing is measured
    accepted: tuple[AdapterRow, ...]
    held: tuple[AdapterRow, ...]
    refused: tuple[str, ...]  # digests


class RunRow(Answer):
    """One run of a coordinator."""

    run: Released[str]
    state: Released[str]
    reason: str
    silo_errors: Released[FreeForm]
    method: Released[str]
    round: Released[int]
    rounds: Released[int]
    committed: Released[int]
    silos: Released[tuple[str, ...]]
    submitted_at: Released[str]
    started_at: Released[str]
    ended_at: Released[str]
    adapter_sha256: Released[str]
    folder: str  # with its record; empty while it goes on


class MemberRow(Answer):
    """A silo as the coordinator sees it: what the silo released, nothing else."""

    silo: Released[str]
    state: Released[str]  # in one word for all who ask (`coordinator.ingress.standing`)
    since: Released[str]  # UTC, ISO 8601; empty while not known
    last_seen: Released[str]
    age_seconds: Released[float | None]  # since it was heard
    certificate_until: Released[str]
    round: Released[int]
    step: Released[int]
    error: Released[str]
    hello: Annotated[FreeForm, Keys(frozenset({"isolation", "role"}))]  # as it introduced itself
    refusal: FreeForm | None  # what was expected of it and what it said
    clock: str  # by how much it differs from the coordinator's; told where that is worth a word


class CoordinatorStatus(Answer):
    """The status of a coordinator."""

    party: Released[str]
    coordinator: Released[str]
    site: Released[str]
    federation: Released[str]
    address: str  # on which silos are served
    state_dir: str
    runs: Released[tuple[RunRow, ...]]
    halted: str
    waits: str  # for a database that another process has locked
    silos: Released[tuple[MemberRow, ...]]
    audit: Released[LogState]
    clock: FreeForm  # what stands still for it


# ---- curves --------------------------------------------------------------------------------------------------------


class CurvePoint(Answer):
    """A value at one place of a run.

    Attributes:
        n: of a pass rate, the prompts behind it; None where that is not known, or no number belongs to the figure
    """

    x: Released[float | None]  # the round or the step
    round: Released[int]
    step: Released[int]
    value: Released[float | None]
    at: Released[str]  # UTC, at a silo
    n: Released[int | None]
    n_exact: Released[bool | None]  # so many were answered; else it is the most that can have been
    low: Released[float | None]  # of the 95 % interval
    high: Released[float | None]
    silos: Released[int | None]  # over how many silos the figure is, where it is over several


class CurveSeries(Answer):
    """The figure of one silo."""

    name: Released[str]
    silo: Released[str]  # empty for a figure over all silos
    unit: Released[str]
    source: Released[str]  # local (this silo only), released, or computed
    points: Released[tuple[CurvePoint, ...]]


class BaselineRow(Answer):
    """The measurement before the first round, on the model that the run began with."""

    name: str
    silo: str
    value: float | None


class Curves(Answer):
    """Figures of a run. At a silo those whose source is local stay there."""

    party: Released[str]
    run: Released[str]
    run_state: Released[str]
    runs: Released[tuple[str, ...]]  # newest first
    x: Released[str]  # round or step
    x_max: Released[int]  # as many as the plan has
    names: Released[tuple[str, ...]]  # of all figures, whichever were asked for
    series: Annotated[tuple[CurveSeries, ...], RELEASED, Only("source", frozenset({"released"}))]
    baseline: tuple[BaselineRow, ...]
    not_recorded: Released[tuple[str, ...]]  # what is no figure here, and why


# ---- a round -------------------------------------------------------------------------------------------------------


class RoundRow(Answer):
    """One round in the list of those of its run."""

    round: Released[int]
    state: Released[str]
    opened_at: Released[str | None]  # UTC, ISO 8601, as `closed_at`
    closed_at: Released[str | None]
    seconds: Released[float | None]
    participants: Released[int | None]  # silos whose update is in it


class Quorum(Answer):
    """How many updates a round needs, and how many came in. At a silo the latter is not known."""

    needed: Released[int | None]
    of: Released[int | None]
    given: Released[int | None]
    reached_seconds: Released[float | None]  # from the opening, as all times of a round


class Deadline(Answer):
    """A deadline. It runs where `left_seconds` is known; else it is as the plan has it."""

    name: str
    for_: str  # round, join, evaluation, or such as step 4
    left_seconds: float | None
    at_seconds: float | None


class Awaited(Answer):
    """A silo of which something is still to come."""

    silo: str
    phase: str
    step: int


class Phase(Answer):
    """What a silo did from one record to the next, named by the record that ends it."""

    phase: Released[str]  # sign, train, pool, update, approval, others, eval
    step: Released[int]
    state: Released[str]
    from_seconds: Released[float | None]
    to_seconds: Released[float | None]
    seconds: Released[float | None]
    source: Released[str]


class Straggler(Answer):
    """The phase in which a silo took much longer than the others."""

    phase: str
    step: int
    seconds: float
    median_seconds: float  # of the others


class SiloInRound(Answer):
    """One silo in one round, as the coordinator has it; what is not known is None, and never derived."""

    silo: Released[str]
    own: Released[bool]  # the silo that answers
    why: str | None  # its update did not leave; told at the silo only
    joined: Released[str | None]
    joined_at: Released[str | None]
    plan: Released[str | None]
    plan_at: Released[str | None]
    last_seen: Released[str | None]
    step: Released[int | None]
    isolation: Released[str | None]
    code: str | None  # digest, as `policy`
    policy: str | None
    state: str
    round: Released[int]
    phases: Annotated[tuple[Phase, ...], RELEASED, Only("source", frozenset({"released"}))]
    straggler: Straggler | None
    received_bytes: Released[int | None]
    received_messages: Released[int | None]
    update_norm: float | None
    update_digest: str | None


class SiloInOwnRound(SiloInRound):
    """One silo in one round, as a silo has it."""

    first = ("silo", "own", "state", "why", "round", "phases")


class Round(Answer):
    """One round: of every silo its phases as far as the party that answers knows them."""

    party: Released[str]
    run: Released[str]
    run_state: Released[str]
    method: Released[str]
    round: Released[int]
    rounds_planned: Released[int]
    rounds: Released[tuple[RoundRow, ...]]  # the newest of the run
    state: Released[str]
    opened_at: Released[str | None]  # UTC, ISO 8601, as `closed_at`
    closed_at: Released[str | None]
    elapsed_seconds: Released[float | None]
    closed_seconds: Released[float | None]
    paused: bool
    quorum: Released[Quorum]
    deadlines: tuple[Deadline, ...]
    awaited: tuple[Awaited, ...]
    silos: Released[tuple[SiloInRound, ...]]
    parameters: FreeForm
    digests: Mapping[str, str]
    hidden: Released[tuple[str, ...]]  # paths of fields that this party is not told


def no_run_yet(party: str) -> Round:
    """Return what is answered before the first run."""
    return filled(Round, party=party, state="no run yet", quorum=filled(Quorum))

"""Test cases of a policy: YAML that a security officer writes, and the result of `fedsilo policy test` for each.

    kind: public.responses                 # what all cases of this file have in common
    cases:
      - name: one prompt more than a step may have
        facts: {prompts: max_prompts_per_step + 1, plan_prompts_per_step: max_prompts_per_step + 1}
        expect: deny
        reasons: [PROMPTS]

A case is the kind's example (`policies/examples.py`) with fields of its message changed before it is measured, and
facts changed after it, by the names that an audit log has for them. A file may also be one case by itself.

What cases do not show: how facts are measured, which no policy changes, and what the guard does beside the decision
(BEYOND_MESSAGES in `policies/loosen.py` names those limits).
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from google.protobuf import json_format
from google.protobuf.message import Message as ProtobufMessage
from pydantic import BaseModel, Field

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import encode
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.kinds import KINDS, MESSAGES
from fedsilo.protocol.strict_yaml import Document, Path, load, validate
from policies.engine import Decision, decide, measure
from policies.examples import ANOTHER_DIGEST, CANARIES, CORPUS, Site, example, named_kinds, screened, screens_of
from policies.fields import Boolean, Closed, Text, epoch_seconds, is_utc
from policies.history import Approval, History
from policies.kind import ANOTHER
from policies.loosen import beyond_messages, limits, loosened
from policies.message import EVALUATION_ERRORS, Context, Facts, Message
from policies.model import Policy
from policies.rules import RULES
from policies.screens import texts_of

UNNAMED = "unnamed"  # as a kind: each kind of this version that the policy does not name
UPDATE = "update"  # as a kind: each adapter update that the policy lets out, such as lora.factors
COUNTS = tuple(each.name for each in fields(History) if each.type in ("int", int))
_NAMES_MAX = 1000
_KEPT = {"kind", "stage", "screens", "screens_failed", "screen_hits", "responses_hit"}  # facts that the message has
_CODES = frozenset(rule.reason for rule in RULES) | {"RULE_FAILED", "NO_RULES"}
_KINDS = frozenset({*MESSAGES, UPDATE, UNNAMED, ANOTHER})


# ---- the form of a file ------------------------------------------------------------------------------


class Case(Closed):
    """A message and the verdict expected of the policy; `document` is the case alone, with the lines of its file."""

    name: Text
    kind: Text
    direction: Literal["egress", "ingress"] | None = None  # by default as the kind goes
    fields: dict[str, Any] = Field(default_factory=dict)  # of the protobuf message, in its JSON form
    text: str | None = None  # in place of the message's first text
    corpus: tuple[str, ...] = CORPUS  # private records, for the overlap screen
    canaries: tuple[str, ...] = CANARIES  # planted strings, for the canary screen
    facts: dict[str, Any] = Field(default_factory=dict)
    before: dict[str, Any] = Field(default_factory=dict)  # what was let out before
    approved_by: dict[str, tuple[Text, ...]] = Field(default_factory=dict)  # person -> roles
    screen_halted: Boolean = False  # the kind, for too many hits
    needs: tuple[Text, ...] = ()  # of the policy, such as: approvals.first_rounds >= 1; without it nothing is judged
    expect: Literal["allow", "deny", "hold"]
    reasons: tuple[Text, ...] | None = None  # exactly these codes, in any order
    including: tuple[Text, ...] = ()  # these codes, and maybe others
    document: Document = Field(default=Document("", None, {}), exclude=True)

    @property
    def source(self) -> str:
        return self.document.source

    @property
    def line(self) -> int:
        return self.document.line_of(())

    def mistake(self, path: Path, message: str, hint: str = "") -> UsageError:
        return UsageError(f"{self.document.place(path)}: {message}", hint=hint)


def load_cases(text: bytes, source: str) -> list[Case]:
    """Return the cases of one file.

    Raises:
        UsageError: any mistake, with file, line and hint.
    """
    document = load(text, source)
    if not isinstance(document.value, dict) or not document.value:
        raise UsageError(f"{source}:1: a case file is a mapping of keys", hint="name, kind, expect; or cases: [...]")
    if "cases" not in document.value:
        return [_case(document)]
    shared = {key: value for key, value in document.value.items() if key != "cases"}
    if unknown := [key for key in shared if key not in Case.model_fields or key in ("name", "document")]:
        raise UsageError(f"{document.place((unknown[0],))}: unknown key {unknown[0]!r}", hint="what all cases share")
    own_cases = document.value["cases"]
    if not isinstance(own_cases, list) or not all(isinstance(own, dict) for own in own_cases):
        raise UsageError(f"{document.place(('cases',))}: cases are a list of blocks", hint="- name: ...")
    cases = []
    for index, own in enumerate(own_cases):
        above = {path: line for path, line in document.lines.items() if path and path[0] in shared}
        here = {path[2:]: line for path, line in document.lines.items() if path[:2] == ("cases", index)}
        cases.append(_case(Document(source, _merged(shared, own), above | here)))
    names = [case.name for case in cases]
    for case in cases:
        if names.count(case.name) > 1:
            raise case.mistake(("name",), f"{case.name!r} is the name of two cases", "a name is how a report finds it")
    return cases


def _merged(common: Any, own: Any) -> Any:
    """The file's own values under the case's; a mapping key by key, all else as a whole."""
    if not isinstance(common, dict) or not isinstance(own, dict):
        return own
    return {**common, **{key: _merged(common.get(key), value) for key, value in own.items()}}


def _case(document: Document) -> Case:
    case = validate(Case, document).model_copy(update={"document": document})
    _known(
        case, ("kind",), case.kind, _KINDS, "there is no kind", f"docs/reference/messages.md; or {UNNAMED}, {UPDATE}"
    )
    for name in case.before:
        _known(case, ("before", name), name, COUNTS, "nothing counts", "what a site counts of what was let out")
    for key, codes in (("reasons", case.reasons or ()), ("including", case.including)):
        if case.expect == "allow" and codes:
            raise case.mistake((key,), "what is allowed has no reasons")
        for index, code in enumerate(codes):
            _known(case, (key, index), code, _CODES, "no rule gives the reason", "docs/reference/policy.md lists them")
    return case


def _known(case: Case, path: Path, word: str, words: Iterable[str], message: str, hint: str) -> None:
    known = list(words)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise case.mistake(path, f"{message} {word!r}{meant}", hint)


# ---- numbers -----------------------------------------------------------------------------------------
# `3`, `max_l2`, `1.5 x max_l2`, `budgets.day_bytes - payload_bytes + 1`, `least local_steps`: of keys of the kind's
# block, of keys of the policy, and of facts of the example, in this order; of a range its upper end or its least, of
# another list its length.

_NAME = r"(?:least )?[a-z][A-Za-z0-9_.]*"
_DIGITS = r"\d{1,17}(?:\.\d{1,17})?"
_TERM = re.compile(rf"(?:{_DIGITS}|{_NAME})(?: x (?:{_DIGITS}|{_NAME})){{0,3}}")
_SUM = re.compile(rf"{_TERM.pattern}(?: [+-] {_TERM.pattern})*")
_COMPARISON = re.compile(rf"({_SUM.pattern}) (>=|>) ({_SUM.pattern})")
_HINT = "such as: 3, max_l2, 1.5 x max_l2, max_prompts_per_step + 1, budgets.day_bytes - payload_bytes, least rounds"


@dataclass(frozen=True)
class _Numbers:
    """The meanings of names in a case's numbers."""

    case: Case
    block: Any
    policy: Policy
    facts: Mapping[str, Any]

    def of(self, text: str, path: Path) -> float | None:
        """Return the number that a sum of products comes to; None where the policy does not set a limit in it.

        Raises:
            UsageError: it is none, or names what there is not.
        """
        if not _SUM.fullmatch(text):
            raise self.case.mistake(path, f"{text!r} must be a number", _HINT)
        total, sign = 0.0, 1
        for part in re.split(r" ([+-]) ", text):
            if part in ("+", "-"):
                sign = 1 if part == "+" else -1
                continue
            values = [self._named(name, path) for name in part.split(" x ")]
            if None in values:
                return None
            total += sign * math.prod(value for value in values if value is not None)
        return total

    def _named(self, name: str, path: Path) -> float | None:
        if re.fullmatch(_DIGITS, name):
            return float(name) if "." in name else int(name)
        name, least = name.removeprefix("least "), name.startswith("least ")
        labels: set[str] = set()
        for root in (self.block, self.policy.file, dict(self.facts)):
            value, rest = root, name
            while rest and value is not None:
                known = _labels(value)
                labels |= set(known) if rest == name else set()
                key = next((label for label in known if f"{rest}.".startswith(f"{label}.")), "")
                if not key:
                    break
                value, rest = known[key], rest[len(key) + 1 :]
            if value is None and rest != name:
                return None
            if not rest:
                return self._number(value, least, name, path)
        _known(self.case, path, name, labels, "there is no limit", _HINT)
        return None

    def _number(self, value: Any, least: bool, name: str, path: Path) -> float:
        if isinstance(value, list | tuple):
            ranged = len(value) == 2 and all(isinstance(each, int | float) for each in value)
            return value[0 if least else 1] if ranged else len(value)
        if isinstance(value, str) and is_utc(value):
            return epoch_seconds(value)
        if not isinstance(value, int | float) or least:
            raise self.case.mistake(path, f"{name!r} is no number", _HINT)
        return value

    def changed(self, said: Any, like: Any, path: Path) -> Any:
        """Return the value that a case says in place of another: words stay words, and all else is counted.

        `another` is a digest that nothing has, and of a list a number is so many of it.
        """
        if isinstance(said, list) and isinstance(like, list | tuple) and like:
            alike = list(like) if len(said) == len(like) else [like[0]] * len(said)
            return [self.changed(*pair, path) for pair in zip(said, alike, strict=True)]
        if said == ANOTHER and isinstance(like, str) and len(like) == len(ANOTHER_DIGEST):
            return ANOTHER_DIGEST
        if not isinstance(said, str) or isinstance(like, str):
            return said
        number = self.of(said, path)
        if number is None:
            raise self.case.mistake(path, f"the policy does not set {said!r} for {self.case.kind}", "write a number")
        if not math.isfinite(number):
            raise self.case.mistake(path, f"{said!r} must be a number", _HINT)
        if isinstance(like, list):
            return [*like, *(f"{ANOTHER}{place}" for place in range(len(like), min(int(number), _NAMES_MAX)))][
                : max(0, int(number))
            ]
        return int(number) if isinstance(like, int) and not isinstance(like, bool) else number

    def whole(self, said: Any, path: Path) -> int:
        number = self.changed(said, 0, path)
        if not isinstance(number, int) or isinstance(number, bool):
            raise self.case.mistake(path, f"{said!r} must be a whole number", _HINT)
        return number


def _labels(value: Any) -> dict[str, Any]:
    """Each key of a block as it is written, and its value; a kind is one key with a dot in it."""
    if isinstance(value, BaseModel):
        return {each.alias or name: getattr(value, name) for name, each in type(value).model_fields.items()}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class NotFor:
    """A case that this policy cannot show, and why."""

    case: Case
    name: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "file": self.case.source, "line": self.case.line, "why": self.why}


def not_for(cases: Iterable[Case], site: Site) -> Iterator[NotFor]:
    """Yield each case, by kind, whose needs this policy does not meet. Raises UsageError: a need that is no comparison,
    or names a key that there is none of."""
    for case in cases:
        for kind in _kinds_of(case, site.policy):
            if why := _unmet(case, kind, site):
                yield NotFor(case, _title(case, kind), why)


def _unmet(case: Case, kind: str, site: Site) -> str:
    """The first need of a case that the site's policy does not meet, in words; empty: it meets all."""
    numbers = _Numbers(case, _block(case, kind, site.policy), site.policy, {})
    for index, need in enumerate(case.needs):
        match, path = _COMPARISON.fullmatch(need), ("needs", index)
        if match is None:
            raise case.mistake(path, f"{need!r} is no comparison of limits", "such as: approvals.first_rounds >= 1")
        left, right = numbers.of(match[1], path), numbers.of(match[3], path)
        if left is None or right is None:
            return f"it needs {need}, and the policy does not set {match[1 if left is None else 3]}"
        if not (left > right or (left == right and match[2] == ">=")):
            return f"it needs {need}, and here that is {left:g} against {right:g}"
    return ""


def _kinds_of(case: Case, policy: Policy) -> list[str]:
    """The kind of a case; for `unnamed` each kind of this version that the policy names in neither direction, for
    `update` each adapter update that it lets out."""
    if case.kind == UPDATE:
        return list(policy.file.egress.updates)
    return sorted(MESSAGES.keys() - named_kinds(policy)) if case.kind == UNNAMED else [case.kind]


def _title(case: Case, kind: str) -> str:
    return case.name if case.kind == kind else f"{case.name}: {kind}"


def _sent(case: Case, kind: str) -> bool:
    return (case.direction or ("egress" if kind in KINDS and KINDS[kind].sent else "ingress")) == "egress"


def _block(case: Case, kind: str, policy: Policy) -> Any:
    side = policy.file.egress if _sent(case, kind) else policy.file.ingress
    return side.block("control" if kind.startswith("control.") else kind)


# ---- judging -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One case and what its policy said. A case over several kinds has one outcome for each.

    Attributes:
        message, context: as they were measured.
        facts, history: as `decide` had them.
    """

    case: Case
    kind: str
    decision: Decision
    message: Message
    context: Context
    facts: Facts
    history: History

    def again(self, before: Policy, after: Policy) -> Decision:
        """Return what another policy says of the same. Screens run again where their settings are others."""
        facts = self.facts
        if screens_of(self.message, before) != screens_of(self.message, after):
            facts = facts | {
                name: value
                for name, value in _measured(self.case, self.message, self.context, after).items()
                if name.startswith("screen") or name == "responses_hit"
            }
        # Rules of other kinds have nothing to say of this message, whatever the policy.
        return decide(facts, after, self.history, rules=[rule for rule in RULES if rule.applies(facts)])

    @property
    def name(self) -> str:
        return _title(self.case, self.kind)

    @property
    def passed(self) -> bool:
        return as_expected(self.case, self.decision)

    @property
    def reasons(self) -> tuple[str, ...]:
        # A policy in shadow mode is asked what it would decide: mode is about sending, not about messages.
        return tuple(code for code in self.decision.reasons if code != "SHADOW")

    @property
    def said(self) -> str:
        return _words(self.decision.would_be, sorted(self.reasons))

    @property
    def expected(self) -> str:
        more = (*self.case.including, "...") if self.case.including else ()
        return _words(self.case.expect, (*sorted(self.case.reasons or ()), *more))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": self.case.source,
            "line": self.case.line,
            "kind": self.kind,
            "passed": self.passed,
            "expected": self.case.expect,
            "expected_reasons": None if self.case.reasons is None else list(self.case.reasons),
            "expected_among_reasons": list(self.case.including),
            "decision": self.decision.would_be,
            "reasons": list(self.reasons),
            "explanation": self.decision.explain(),
        }


def _words(verdict: str, reasons: Sequence[str]) -> str:
    return f"{verdict} ({', '.join(reasons)})" if reasons else verdict


def as_expected(case: Case, decision: Decision) -> bool:
    """Return True if a decision is the one that the case expects, for the reasons that it expects."""
    reasons, exactly = set(decision.reasons) - {"SHADOW"}, case.reasons
    return (
        decision.would_be == case.expect
        and (exactly is None or reasons == set(exactly))
        and reasons.issuperset(case.including)
    )


def judge(cases: Iterable[Case], site: Site) -> Iterator[Outcome]:
    """Decide every case by the site's policy, but for those that are not for it (`not_for` says why).

    Raises:
        UsageError: a case asks for what cannot be made.
    """
    for case in cases:
        for kind in _kinds_of(case, site.policy):
            if not _unmet(case, kind, site):
                yield _judged(case, kind, site)


def _judged(case: Case, kind: str, site: Site) -> Outcome:
    policy = site.policy
    try:
        message, context = example(kind, site, case.direction or "")
    except UsageError as error:
        raise case.mistake(("kind",), error.message, error.hint) from error
    if case.text is not None or case.fields:
        body = _changed(case, message.body)
        more, texts = len(encode(body)) - len(encode(message.body)), len(list(texts_of(body)))
        message = replace(message, body=body, payload_bytes=message.payload_bytes + more)
        context = replace(context, verdicts=(True,) * texts, token_counts=(1,) * texts)
    facts = _measured(case, message, context, policy)
    numbers = _Numbers(case, _block(case, kind, policy), policy, dict(facts))
    for name, expected in case.facts.items():
        _known(
            case,
            ("facts", name),
            name,
            facts.keys() - _KEPT,
            f"{kind} has no fact",
            "`fedsilo audit show` has those of a message",
        )
        facts[name] = numbers.changed(expected, numbers.facts[name], ("facts", name))
    counts = {name: numbers.whole(expected, ("before", name)) for name, expected in case.before.items()}
    # The hits of the message at hand are among those of the day.
    counts = {"screen_hits_in_day": facts.get("responses_hit", 0)} | counts
    approvals = tuple(Approval(person, roles) for person, roles in case.approved_by.items())
    history = History(**counts, screen_halted=case.screen_halted, approvals=approvals)
    return Outcome(case, kind, decide(facts, policy, history), message, context, facts, history)


def _measured(case: Case, message: Message, context: Context, policy: Policy) -> Facts:
    return measure(message, replace(context, screened=screened(message, policy, case.corpus, case.canaries)))


def _changed(case: Case, good: ProtobufMessage) -> ProtobufMessage:
    """The example's payload with a text in place of its own, and other fields. What is given as a list replaces it."""
    body = type(good)()
    body.CopyFrom(good)
    for name in case.fields:
        if name in body.DESCRIPTOR.fields_by_name:
            body.ClearField(name)
    try:
        json_format.ParseDict(case.fields, body)
    except json_format.ParseError as error:
        raise case.mistake(("fields",), f"{body.DESCRIPTOR.name}: {error}") from error
    if case.text is not None and not _write(body, case.text):
        raise case.mistake(("text",), f"{body.DESCRIPTOR.name} carries no text")
    return body


def _write(body: ProtobufMessage, text: str) -> bool:
    """Write a text in place of the first one; returns whether there is one."""
    if isinstance(body, pb.Response):
        body.text = text
        return True
    inside = ((of.is_repeated, value) for of, value in body.ListFields() if of.message_type is not None)
    return any(_write(child, text) for is_list, value in inside for child in (value if is_list else (value,)))


# ---- coverage ----------------------------------------------------------------------------------------


@dataclass
class CoverageRow:
    """A rule, a limit or a kind, and how many cases it let pass and how many it stopped."""

    what: str
    name: str
    file: str
    line: int
    passed: int = 0
    stopped: int = 0
    asked: bool = True  # false: this policy never asks the rule, so no case can show it

    @property
    def covered(self) -> bool:
        return not self.asked or (self.passed > 0 and self.stopped > 0)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "covered": self.covered}


@dataclass(frozen=True)
class Coverage:
    """Coverage of a policy by its cases.

    Attributes:
        rows: rules of the kinds that the policy names; its limits; the kinds that it does not name.
        elsewhere: limits that no message shows, and who keeps them.
    """

    rows: tuple[CoverageRow, ...]
    elsewhere: tuple[tuple[str, int, str], ...] = field(default=())

    def percent(self, what: str = "") -> float:
        rows = [row for row in self.rows if row.asked and what in ("", row.what)]
        return 100.0 * sum(row.covered for row in rows) / len(rows) if rows else 100.0


def coverage(outcomes: Sequence[Outcome], site: Site) -> Coverage:
    """Return which rules, limits and unnamed kinds the cases have shown on both sides.

    A rule that kept silent in every case of its kinds, though one was allowed and so went past every rule, is one that
    this policy does not ask: `send_only_verified: false`, or a float32 grid.
    """
    policy = site.policy
    judged = [(outcome, list(_judgements(outcome, policy))) for outcome in outcomes]
    named = named_kinds(policy)
    return Coverage(
        (
            *_rules(judged, named, policy),
            *_limits(judged, policy),
            *_unnamed(outcomes, named, policy),
        ),
        tuple((".".join(path), policy.line_of(path), why) for path, why in beyond_messages(policy.file)),
    )


_Judged = list[tuple[Outcome, list[tuple[str, bool, Path]]]]


def _judgements(outcome: Outcome, policy: Policy) -> Iterator[tuple[str, bool, Path]]:
    """(rule, whether it let the message pass, the limit's place) of each rule that had something to say."""
    by_name = {result.rule: result for result in outcome.decision.results}
    for rule in RULES:
        result = by_name[rule.name]
        if result.outcome == "n.a.":
            continue
        try:
            path = rule.judge(outcome.facts, policy, outcome.history).path
        except EVALUATION_ERRORS:
            path = ()
        yield rule.name, result.outcome not in ("deny", "hold"), path


def _rules(judged: _Judged, named: set[str], policy: Policy) -> Iterator[CoverageRow]:
    allowed = {outcome.kind for outcome, _ in judged if outcome.decision.would_be == "allow"}
    for rule in RULES:
        kinds = rule.kinds & named if rule.kinds else named
        if not kinds:
            continue
        seen = CoverageRow("rule", rule.name, policy.source, 0)
        for outcome, verdicts in judged:
            for name, passed, _ in verdicts:
                if name == rule.name:
                    seen.passed += passed
                    seen.stopped += not passed
                    result = next(each for each in outcome.decision.results if each.rule == name)
                    seen.line = max(seen.line, result.line)
        silent = rule.reason == "APPROVAL" and not _asks_somebody(policy)
        seen.asked = not silent and bool(seen.passed or seen.stopped or not kinds <= allowed)
        yield seen


def _asks_somebody(policy: Policy) -> bool:
    approvals = (getattr(block, "approvals", None) for _, _, block in policy.file.blocks())
    return any(each is not None and (each.first_rounds or each.then) for each in approvals)


def _limits(judged: _Judged, policy: Policy) -> Iterator[CoverageRow]:
    # A rule that compares several limits names one of them: what it let pass, passed all that it ever names.
    passed_by: Counter[str] = Counter()
    named_by: dict[Path, set[str]] = {}
    stopped_at: Counter[Path] = Counter()
    for _, verdicts in judged:
        for name, let_pass, path in verdicts:
            passed_by[name] += let_pass
            stopped_at[path] += not let_pass
            named_by.setdefault(path, set()).add(name)
    beyond = {path for path, _ in beyond_messages(policy.file)}
    for path in limits(policy.file):
        if path in beyond or (path == ("held_out",) and policy.file.held_out is None):
            continue
        if path[0] == "text_screens":
            ran = [hits_of(outcome, path[1]) for outcome, _ in judged if path[1] in outcome.facts.get("screens", {})]
            yield CoverageRow(
                "limit", ".".join(path), policy.source, policy.line_of(path), ran.count(0), len(ran) - ran.count(0)
            )
            continue
        places = _places_for(path, named_by)
        rules = {name for place in places for name in named_by[place]}
        passed = sum(passed_by[name] for name in rules)
        stopped = sum(stopped_at[place] for place in places)
        yield CoverageRow("limit", ".".join(path), policy.source, policy.line_of(path), passed, stopped)


def hits_of(outcome: Outcome, screen: str) -> int:
    """Return a screen's hits in the texts of one message. No rule names a screen's own settings: the screen keeps
    them."""
    return sum(count for code, count in outcome.facts["screen_hits"].items() if code.partition("/")[0] == screen)


def _places_for(limit: Path, named: Mapping[Path, object]) -> list[Path]:
    """Return what rules name for a limit: it or a part of it, else the nearest block around it, but none of several
    kinds."""
    exact = [place for place in named if place[: len(limit)] == limit]
    if exact:
        return exact
    shortest = 2 if limit[0] in ("egress", "ingress") else 1
    around = (limit[:size] for size in range(len(limit) - 1, shortest - 1, -1))
    return [place for place in around if place in named][:1]


def _unnamed(outcomes: Sequence[Outcome], named: set[str], policy: Policy) -> Iterator[CoverageRow]:
    """Kinds that the policy does not name: each must have been tried. Nothing is there that could let one pass."""
    for kind in sorted(MESSAGES.keys() - named):
        stopped = sum(outcome.kind == kind and "KIND_NOT_ALLOWED" in outcome.decision.reasons for outcome in outcomes)
        yield CoverageRow("unnamed kind", kind, policy.source, policy.line_of(("egress",)), stopped, stopped)


# ---- mutation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A loosened limit and the first case that noticed; none: a survivor."""

    name: str
    before: Any
    after: Any
    how: str
    line: int
    noticed_by: str

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def mutate(outcomes: Sequence[Outcome], site: Site) -> Iterator[Tried]:
    """Loosen each limit alone and judge the passing cases again. The messages stay as they were made under the policy
    as it is.

    Only cases that pass can notice: a case that fails anyway says nothing about a limit.
    """
    # A refusal is what most often notices, so it is asked first.
    passing = sorted(
        (outcome for outcome in outcomes if outcome.passed), key=lambda outcome: outcome.case.expect == "allow"
    )
    for mutant in loosened(site.policy):
        noticed = next(
            (
                outcome.name
                for outcome in passing
                if not as_expected(outcome.case, outcome.again(site.policy, mutant.policy))
            ),
            "",
        )
        yield Tried(
            ".".join(mutant.path), mutant.before, mutant.after, mutant.how, site.policy.line_of(mutant.path), noticed
        )

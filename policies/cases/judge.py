"""What a policy says of its cases, and which rules and limits they have shown both passing and failing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedsilo.protocol.strict_yaml import Path
from policies.cases.build import Situation, build
from policies.cases.format import UNNAMED, Case
from policies.cases.loosen import beyond_messages, limits
from policies.cases.needs import unmet
from policies.cases.screened import screened, screens_of
from policies.cases.site import Site, kinds_of, named_kinds
from policies.engine import Decision, History, decide, measure
from policies.load import blocks_of
from policies.message import EVALUATION_ERRORS, Facts
from policies.model import Policy
from policies.rules import RULES


@dataclass(frozen=True)
class Outcome:
    """One case and what its policy said. A case over all unnamed kinds has one outcome for each.

    Attributes:
        made: the message and all that is known beside it.
        facts, history: as `decide` had them.
    """

    case: Case
    kind: str
    decision: Decision
    made: Situation
    facts: Facts
    history: History

    def again(self, before: Policy, after: Policy) -> Decision:
        """What another policy says of the same message. Screens run again where their settings are others."""
        facts = self.facts
        if screens_of(self.made.message, before) != screens_of(self.made.message, after):
            facts = _measured(self.made, after)
        # Rules of other kinds have nothing to say of this message, whatever the policy.
        return decide(facts, after, self.history, rules=[rule for rule in RULES if rule.applies(facts)])

    @property
    def name(self) -> str:
        return self.case.name if self.case.message.kind == self.kind else f"{self.case.name}: {self.kind}"

    @property
    def passed(self) -> bool:
        return as_expected(self.case, self.decision)

    @property
    def reasons(self) -> tuple[str, ...]:
        return _reasons(self.decision)

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


def _reasons(decision: Decision) -> tuple[str, ...]:
    # A policy in shadow mode is asked what it would decide: mode is about sending, not about messages.
    return tuple(code for code in decision.reasons if code != "SHADOW")


def _words(verdict: str, reasons: Sequence[str]) -> str:
    return f"{verdict} ({', '.join(reasons)})" if reasons else verdict


def as_expected(case: Case, decision: Decision) -> bool:
    given, exactly = set(_reasons(decision)), case.reasons
    return (
        decision.would_be == case.expect
        and (exactly is None or given == set(exactly))
        and given.issuperset(case.including)
    )


def judge(cases: Iterable[Case], site: Site) -> Iterator[Outcome]:
    """Every case, decided by the site's policy, but for those that are not for it (`needs.not_for` says why).

    Raises:
        UsageError: a case asks for what cannot be made.
    """
    for case in cases:
        for kind in kinds_of(case, site.policy):
            if unmet(case, kind, site):
                continue
            made = build(case if case.message.kind == kind else case.of_kind(kind), site)
            facts = _measured(made, site.policy)
            history = made.history(facts)
            yield Outcome(case, kind, decide(facts, site.policy, history), made, facts, history)


def _measured(made: Situation, policy: Policy) -> Facts:
    found = screened(made.message, policy, made.corpus, made.canaries)
    return measure(made.message, replace(made.context, screened=found))


# ---- coverage ----------------------------------------------------------------------------------------


@dataclass
class Seen:
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
    """Attributes:
    rows: rules of the kinds that the policy names; its limits; the kinds that it does not name.
    elsewhere: limits that no message shows, and who keeps them.
    """

    rows: tuple[Seen, ...]
    elsewhere: tuple[tuple[str, int, str], ...] = field(default=())

    def percent(self, what: str = "") -> float:
        rows = [row for row in self.rows if row.asked and what in ("", row.what)]
        return 100.0 * sum(row.covered for row in rows) / len(rows) if rows else 100.0


def coverage(outcomes: Sequence[Outcome], site: Site) -> Coverage:
    """Which rules, limits and unnamed kinds the cases have shown on both sides.

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


def _rules(judged: _Judged, named: set[str], policy: Policy) -> Iterator[Seen]:
    allowed = {outcome.kind for outcome, _ in judged if outcome.decision.would_be == "allow"}
    for rule in RULES:
        kinds = rule.kinds & named if rule.kinds else named
        if not kinds:
            continue
        seen = Seen("rule", rule.name, policy.source, 0)
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
    asked = (getattr(block, "approvals", None) for _, _, block in blocks_of(policy.file))
    return any(each is not None and (each.first_rounds or each.then) for each in asked)


def _limits(judged: _Judged, policy: Policy) -> Iterator[Seen]:
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
            yield Seen(
                "limit", ".".join(path), policy.source, policy.line_of(path), ran.count(0), len(ran) - ran.count(0)
            )
            continue
        places = _places_for(path, named_by)
        rules = {name for place in places for name in named_by[place]}
        passed = sum(passed_by[name] for name in rules)
        stopped = sum(stopped_at[place] for place in places)
        yield Seen("limit", ".".join(path), policy.source, policy.line_of(path), passed, stopped)


def hits_of(outcome: Outcome, screen: str) -> int:
    """What a screen found in the texts of one message. No rule names a screen's own settings: the screen keeps them."""
    return sum(count for code, count in outcome.facts["screen_hits"].items() if code.partition("/")[0] == screen)


def _places_for(limit: Path, named: Mapping[Path, object]) -> list[Path]:
    """What rules name for a limit: it or a part of it, else the nearest block around it, but none of several kinds."""
    exact = [place for place in named if place[: len(limit)] == limit]
    if exact:
        return exact
    shortest = 2 if limit[0] in ("egress", "ingress") else 1
    around = (limit[:size] for size in range(len(limit) - 1, shortest - 1, -1))
    return [place for place in around if place in named][:1]


def _unnamed(outcomes: Sequence[Outcome], named: set[str], policy: Policy) -> Iterator[Seen]:
    """Kinds that the policy does not name: each must have been tried. Nothing is there that could let one pass."""
    from fedsilo.protocol.kinds import MESSAGES

    for kind in sorted(MESSAGES.keys() - named):
        stopped = sum(outcome.kind == kind and "KIND_NOT_ALLOWED" in outcome.decision.reasons for outcome in outcomes)
        yield Seen("unnamed kind", kind, policy.source, policy.line_of(("egress",)), stopped, stopped)


# ---- mutation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """One loosened limit and the first case that noticed; none: a survivor."""

    name: str
    before: Any
    after: Any
    how: str
    line: int
    noticed_by: str

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def mutate(outcomes: Sequence[Outcome], site: Site) -> Iterator[Tried]:
    """Each limit loosened alone. The messages stay as they were made under the policy as it is.

    Only cases that pass can notice: a case that fails anyway says nothing about a limit.
    """
    from policies.cases.loosen import loosened

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


__all__ = ["UNNAMED", "Coverage", "Outcome", "Seen", "Tried", "coverage", "judge", "mutate"]

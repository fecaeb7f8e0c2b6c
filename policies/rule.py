"""What a rule is, and the few comparisons that rules are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedsilo.protocol.strict_yaml import Path
from policies.history import History
from policies.message import OFFERED, Facts
from policies.model import Policy

# look: allowed, but a person should see it. n.a.: this rule has nothing to say about this kind.
Outcome = Literal["ok", "look", "hold", "deny", "n.a."]
Measured = float | int | str | bool | None


@dataclass(frozen=True)
class Judgement:
    """Attributes:
    path: the key in the policy file that the limit stands under.
    least: the limit is the least that is allowed.
    """

    outcome: Outcome
    measured: Measured
    limit: Any
    path: Path
    least: bool = False


@dataclass(frozen=True)
class RuleResult:
    """One rule's verdict, with the file and line of the limit it applied (line 0: the rule did not apply).

    Attributes:
        least: the limit is the least that is allowed; for the sentence, and not recorded.
    """

    rule: str
    reason: str
    outcome: Outcome
    measured: Measured
    limit: Any
    file: str
    line: int
    least: bool = False

    def to_json(self) -> dict[str, Any]:
        limit = list(self.limit) if isinstance(self.limit, tuple | frozenset) else self.limit
        return {
            "rule": self.rule,
            "reason": self.reason,
            "outcome": self.outcome,
            "measured": self.measured,
            "limit": limit,
            "file": self.file,
            "line": self.line,
        }

    def sentence(self) -> str:
        bound = "at least" if self.least else "limit"
        return f"{self.file}:{self.line}: {self.rule}: measured {self.measured}, {bound} {self.limit} [{self.reason}]"


@dataclass(frozen=True)
class Rule:
    """Attributes:
    name: stable, in the log and on the console.
    reason: code of a refusal, for the site's own eyes.
    kinds: those it judges; empty is every kind. A rule in a kind's file that names none judges the kinds that list it.
    check: the judgement itself, of facts, policy and history.
    on_block: of facts, the kind's block and its place; it says nothing where the policy does not name the kind.
    """

    name: str
    reason: str
    kinds: frozenset[str]
    check: Callable[..., Judgement]
    on_block: bool = False

    def applies(self, facts: Facts) -> bool:
        return not self.kinds or facts["kind"] in self.kinds

    def judge(self, facts: Facts, policy: Policy, history: History) -> Judgement:
        if not self.on_block:
            return self.check(facts, policy, history)
        block, path = block_of(facts, policy)
        return not_applicable() if block is None else self.check(facts, block, path)


Check = Callable[[Facts, Policy, History], Judgement]


def rule(name: str, reason: str, *kinds: str) -> Callable[[Check], Rule]:
    """Make a rule of a check; no kinds means every kind."""

    def make(check: Check) -> Rule:
        return Rule(name, reason, frozenset(kinds), check)

    return make


def block_rule(name: str, reason: str, *kinds: str) -> Callable[[Callable[[Facts, Any, Path], Judgement]], Rule]:
    """Make a rule of a check on a kind's block."""

    def make(check: Callable[[Facts, Any, Path], Judgement]) -> Rule:
        return Rule(name, reason, frozenset(kinds), check, on_block=True)

    return make


def at_most(measured: float | None, limit: float, path: Path) -> Judgement:
    """A missing number or NaN is a refusal: `not (a <= b)` is true for both."""
    fits = measured is not None and measured <= limit
    return Judgement("ok" if fits else "deny", measured, limit, path)


def at_least(measured: float | None, limit: float, path: Path) -> Judgement:
    fits = measured is not None and measured >= limit
    return Judgement("ok" if fits else "deny", measured, limit, path, least=True)


def within(measured: float | None, bounds: tuple[float, float], path: Path) -> Judgement:
    fits = measured is not None and bounds[0] <= measured <= bounds[1]
    return Judgement("ok" if fits else "deny", measured, list(bounds), path)


def equal(measured: Measured, limit: Measured, path: Path) -> Judgement:
    return Judgement("ok" if measured == limit and measured is not None else "deny", measured, limit, path)


def holds(condition: object, path: Path, *, measured: Measured = None, limit: Any = True) -> Judgement:
    """A yes-or-no fact: anything but True is a refusal."""
    fits = condition is True
    return Judgement("ok" if fits else "deny", fits if measured is None else measured, limit, path)


def none_of(measured: object, path: Path) -> Judgement:
    """A count that must be zero."""
    good = type(measured) is int and measured == 0
    return Judgement("ok" if good else "deny", measured if isinstance(measured, int) else None, 0, path)


def not_applicable(path: Path = ()) -> Judgement:
    return Judgement("n.a.", None, None, path)


def not_judged_yet(facts: Facts, path: Path) -> Judgement:
    """What grading would tell. An offer is judged by all other rules first, so that nothing is graded for a message
    that is refused anyway (T55); nothing passes on that alone, since what is final without it is refused."""
    return not_applicable(path) if facts["stage"] == OFFERED else holds(False, path)


def side_of(facts: Facts, policy: Policy) -> str:
    """Which block of the policy speaks: what the coordinator sends is `ingress` for a silo, and what silos send is
    `egress`, for the silo that sends it and for the coordinator that checks it again with its charter."""
    return "ingress" if facts["sender"] == policy.file.federation.coordinator else "egress"


def block_of(facts: Facts, policy: Policy) -> tuple[Any, Path]:
    """The policy's block for this message's kind (None if absent) and its place in the file."""
    side, kind = side_of(facts, policy), facts["kind"]
    block = getattr(policy.file, side)
    if kind.startswith("control."):
        return block.control, (side, "control")
    return getattr(block, kind.replace(".", "_"), None), (side, kind)


def names_pinned_set(facts: Facts, policy: Policy) -> Judgement:
    """Whether the message names the set that its block pins, and the party's own copy is that set (T12)."""
    block, _ = block_of(facts, policy)
    if block is None:
        return not_applicable()
    pin, path = policy.file.public_sets[block.set], ("public_sets", block.set, "sha256")
    own = equal(facts["public_set_sha256"], pin.sha256, path)
    return own if own.outcome == "deny" else equal(facts["header_set_sha256"], pin.sha256, path)

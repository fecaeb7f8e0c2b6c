"""Decides on one message: its facts against one policy, with the history that budgets need.

    measure(message, context) -> facts          (what the kind's file measures, and what every message has)
    decide(facts, policy, history) -> decision  (pure; replays from the audit log alone)

For a tensor kind a sender measures with stage "offered", decides, transforms (in the file of its kind), measures the
final values and decides again; only a decision on final facts lets anything out.

Every rule is judged, so a refusal explains itself in full. What is unknown denies: a kind or field without a class,
facts that could not be measured, a rule that fails, an empty list of rules (threat model B5).
Facts go into the audit log and are all that `decide` sees, so they never hold text, tensor values or a tensor name.
A name or kind that is not of its closed form becomes "" or "unknown" and is counted instead.
What this does not stop: information in the allowed values themselves (N1), and text that no screen knows (N3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedsilo.protocol.kinds import MESSAGES
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from policies.history import Approval, History, HistoryBook
from policies.kind import Judgement, Outcome, Rule, RuleResult, faults, is_name
from policies.kinds import CATALOGUE, KINDS
from policies.message import EVALUATION_ERRORS, FINAL, OFFERED, Context, Facts, Message
from policies.model import Policy
from policies.rules import RULES

__all__ = [
    "FINAL",
    "OFFERED",
    "Approval",
    "Context",
    "Decision",
    "Facts",
    "History",
    "HistoryBook",
    "Message",
    "RuleResult",
    "decide",
    "measure",
]

Verdict = Literal["allow", "deny", "hold"]
_SPIFFE = re.compile(r"spiffe://[a-z0-9_-]{1,63}/(silo|coordinator)/[a-z0-9_-]{1,63}")


@dataclass(frozen=True)
class Decision:
    """A decision on one message.

    Attributes:
        verdict: allow, deny, or hold until enough people have approved exactly this payload. In a policy of mode
            shadow it is never allow: `would_be` then says what enforcement would have decided.
        results: one for each rule, in the order of `RULES`.
        reasons: codes of the rules that denied (or hold), in that order; for the site's own log only (B6).
        stage: of the facts; only "final" lets anything out.
    """

    verdict: Verdict
    would_be: Verdict
    results: tuple[RuleResult, ...]
    reasons: tuple[str, ...]
    policy_sha256: str
    stage: str

    @property
    def may_leave(self) -> bool:
        return self.verdict == "allow" and self.stage == FINAL

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "would_be": self.would_be,
            "reasons": list(self.reasons),
            "policy_sha256": self.policy_sha256,
            "stage": self.stage,
            "results": [result.to_json() for result in self.results],
        }

    def explain(self) -> str:
        """Return one line for each rule that denies or holds: file:line, rule, measured, limit."""
        return "\n".join(result.sentence() for result in self.results if result.outcome in ("deny", "hold"))


def measure(message: Message, context: Context, *, stage: str = FINAL) -> Facts:
    """Facts of a message, JSON-able. Never raises for what a message holds: a failure becomes a fact that denies."""
    known = message.place.kind in MESSAGES
    plan = context.plan
    facts: Facts = {
        "direction": message.direction if message.direction in ("egress", "ingress") else "unknown",
        "stage": stage,
        "kind": message.place.kind if known else "unknown",
        "run": message.place.run if is_name(message.place.run) else "",
        "round": message.place.round,
        "step": message.place.step,
        "sender": message.sender if _SPIFFE.fullmatch(message.sender) else "",
        "sender_expected": bool(context.expected_sender) and message.sender == context.expected_sender,
        "now": float(context.now_seconds),
        "payload_bytes": message.payload_bytes,
        "run_is_open": plan is not None and message.place.run == plan.run,
        "kind_of_method": _kind_of_method(message.place.kind, plan),
        "open_round": context.open_round,
        "open_step": context.open_step,
        "asked_step": context.asked.step,
        "plan_local_steps": plan.local_steps if plan else 0,
        "measured": False,
    }
    if not known or type(message.body) is not MESSAGES[message.place.kind]:
        return facts
    try:
        facts["fields_at_fault"] = faults(message.body, CATALOGUE)
        facts.update(KINDS[message.place.kind].measure(message.body, message, context))
        facts["measured"] = True
    except EVALUATION_ERRORS as error:
        facts["measure_error"] = type(error).__name__
    return facts


def _kind_of_method(kind: str, plan: Plan | None) -> bool:
    """Return whether the method of the open run offers this kind."""
    method = METHODS.get(plan.method) if plan else None
    return plan is not None and method is not None and kind in method.kinds_under(plan)


def decide(facts: Facts, policy: Policy, history: History, *, rules: Sequence[Rule] = RULES) -> Decision:
    """Judge facts against every rule.

    Args:
        facts: from `measure`, or read back from an audit record.
        policy: the site's policy, or the coordinator's charter.
        history: what was allowed before, and who has approved this payload.
        rules: the shipped list; tests pass others. An empty list denies.
    """
    results = tuple(_judge(rule, facts, policy, history) for rule in rules)
    denied = tuple(dict.fromkeys(result.reason for result in results if result.outcome == "deny"))
    reasons_to_hold = tuple(dict.fromkeys(result.reason for result in results if result.outcome == "hold"))
    judged = any(result.outcome == "ok" for result in results)
    verdict: Verdict
    if denied or not judged:
        # No rule had anything to say: nobody has allowed this.
        verdict, reasons = "deny", denied or ("NO_RULES",)
    elif reasons_to_hold:
        verdict, reasons = "hold", reasons_to_hold
    else:
        verdict, reasons = "allow", ()
    shadow = policy.file.mode == "shadow"
    return Decision(
        verdict="deny" if shadow else verdict,
        would_be=verdict,
        results=results,
        reasons=("SHADOW", *reasons) if shadow else reasons,
        policy_sha256=policy.digest,
        stage=str(facts.get("stage", "")),
    )


def _judge(rule: Rule, facts: Facts, policy: Policy, history: History) -> RuleResult:
    measured: Any = None
    limit: Any = None
    file, line = policy.source, 0
    outcome: Outcome
    reason, least = rule.reason, False
    try:
        if not rule.applies(facts):
            return RuleResult(rule.name, reason, "n.a.", None, None, policy.source, 0)
        judgement = rule.judge(facts, policy, history)
        outcome, measured, limit, least = judgement.outcome, judgement.measured, judgement.limit, judgement.least
        binding = _binding(rule, facts, policy, history, judgement)
        file, line = binding.source, binding.line_of(judgement.path)
    except EVALUATION_ERRORS as error:
        outcome, reason, measured = "deny", "RULE_FAILED", type(error).__name__
    return RuleResult(rule.name, reason, outcome, measured, limit, file, line, least)


def _binding(rule: Rule, facts: Facts, policy: Policy, history: History, judgement: Judgement) -> Policy:
    """The file whose value gave this judgement: the first that alone gives the same limit, else the same outcome.

    The site's own file comes first, so where both say the same it is the one that is named.
    """
    alike = []
    for part in policy.parts:
        try:
            alone = rule.judge(facts, part, history)
        except EVALUATION_ERRORS:
            continue
        if alone.outcome == judgement.outcome:
            if alone.limit == judgement.limit:
                return part
            alike.append(part)
    return alike[0] if alike else policy

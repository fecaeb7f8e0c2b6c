"""What each rule of a decision said, as the fields that an audit record and the queries show: never text of a message,
and of a long limit a short form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.audit.record import TEXT_CHARACTERS_MAX
from fedsilo.protocol.text import harmless
from policies.engine import Decision, RuleResult
from policies.load import Policy

NOT_APPLICABLE = "n.a."
_LIST_SHOWN_MAX = 64


def rules_of(decision: Decision, policy: Policy) -> dict[str, Any]:
    """{"rules", "detail"}: a line for each rule that applies to the kind, and how many do not.

    A count is enough of those: facts and policy say which ones, and most messages are polls that few rules are for.

    Args:
        decision: of the rules.
        policy: the one that judged.
    """
    applicable = [result for result in decision.results if result.outcome != NOT_APPLICABLE]
    return {
        "rules": [_fields(result, policy) for result in applicable],
        "detail": {"rules_not_applicable": len(decision.results) - len(applicable)},
    }


def _fields(result: RuleResult, policy: Policy) -> dict[str, Any]:
    fields: dict[str, Any] = {"rule": result.rule, "outcome": result.outcome}
    fields |= {"measured": _plain(result.measured), "limit": _plain(result.limit), "line": result.line}
    if policy.charter is not None and result.file == policy.charter.source:
        fields["file"] = "charter"
    if result.outcome in ("deny", "hold"):
        fields["reason"] = result.reason
    return fields


def _plain(value: Any) -> Any:
    """A limit may be a set or a long text of the policy file; the record holds a short form of it."""
    if isinstance(value, str):
        return harmless(value, TEXT_CHARACTERS_MAX)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value[:_LIST_SHOWN_MAX]]
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=str)[:_LIST_SHOWN_MAX]]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in list(value.items())[:_LIST_SHOWN_MAX]}
    return value

"""The queries `outbox` and `inbox`: what a party decided on each message, and whether it left or was let in.

For whoever may open the control socket. That is the whole of an audit record too, although roles.yaml names who may
read the audit log (`audit.read`): a query carries no signature, so nobody knows whose role to look up. What makes it
safe is the record itself, which never holds a prompt, an answer, a tensor value, a private record's id or a key (T40);
a site that wants to keep even that to few gives the socket's group to few. Archived payloads stay behind a signed
command.

A coordinator records the facts of a decision and no rule by name; the rules are judged again here, from these facts and
under the same charter, so what is shown is what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from fedsilo.audit.message_index import DECISION_EVENTS, HOLD_ENDS, MessageIndex, parsed
from fedsilo.audit.pages import LogPages
from fedsilo.audit.rule_fields import rules_of
from fedsilo.control.query_arguments import Asked
from fedsilo.protocol.errors import NotFoundError, UsageError
from policies.engine import History, decide
from policies.load import Policy
from policies.message import EVALUATION_ERRORS

ROWS_DEFAULT, ROWS_MAX = 100, 500
VERDICTS = ("allow", "deny", "hold")
_WORDS = {"egress": ("outbound", "outbox"), "ingress": ("inbound", "inbox")}


class MessageView:
    """Args:
    index: the messages.
    pages: the log that they are in.
    policy: the one in force.
    program: whose commands tell the same: silo or coordinator.
    """

    def __init__(
        self, index: MessageIndex, pages: LogPages, policy: Callable[[], Policy], *, program: str = "silo"
    ) -> None:
        self._index = index
        self._pages = pages
        self._policy = policy
        self._program = program

    def outbox(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Outbound decisions, newest first.

        Args:
            arguments: {seq} for one with its whole record; else {before}, {limit} (100, at most 500), {verdict},
                {kind}, and {control: true} to include allowed polls and heartbeats.

        Returns:
            {"messages": [...], "total", "held", "denied", "next"}: the counts are of all messages, whatever was asked
            for. A page may have fewer rows than its limit; only "next": null says that nothing older is left. For one:
            {"message", "outcome", "milliseconds", "would_pass"}. The outcome of a message that was held says how the
            hold ended (`message_index.HOLD_ENDS`), and is empty while people are asked. Milliseconds are those from the
            decision to the sending, null where it was not sent or the machine was started in between.

        Raises:
            UsageError: an argument that is not one of these.
            NotFoundError: no such decision.
        """
        return self._answer("egress", arguments)

    def inbox(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Decisions on what came in, as `outbox`, each with its "peer"; of one that was held with the hold's end."""
        return self._answer("ingress", arguments)

    def _answer(self, direction: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        asked = Asked(arguments, "seq", "before", "limit", "control", "verdict", "kind")
        sequence = asked.number("seq")
        if sequence is not None:
            if sum(value is not None for value in arguments.values()) > 1:
                raise UsageError("seq stands alone: it names one message")
            return self._one(direction, sequence)
        control = asked.flag("control")
        page = self._index.page(
            direction,
            before=asked.number("before"),
            limit=asked.limit(default=ROWS_DEFAULT, most=ROWS_MAX),
            verdict=asked.text("verdict", among=VERDICTS),
            kind=asked.text("kind"),
            control=control,
        )
        return {"messages": page.rows, **self._index.totals(direction, control=control), "next": page.next}

    def _one(self, direction: str, sequence: int) -> dict[str, Any]:
        line = next(iter(self._pages.lines(sequence, sequence + 1)), None)
        record = parsed(*line) if line else None
        word, noun = _WORDS[direction]
        if record is None or record["event"] != DECISION_EVENTS[direction]:
            hint = f"{self._program} {noun} list shows them"
            raise NotFoundError(f"record {sequence} is no {word} decision", hint=hint)
        policy = self._policy()
        shown = with_rules(record, policy)
        fate = self._index.fate(record)
        # of a hold that is over no yes lets anything pass
        passes = [] if fate["outcome"] in HOLD_ENDS else would_pass(shown, policy)
        return {"message": shown, **fate, "would_pass": passes}


def with_rules(record: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
    """A decision with the verdict of every rule, where its record has only what they were judged by.

    Nothing is added where another policy decided, or where judging again comes to another verdict.
    """
    facts = record.get("facts", {})
    final, history = facts.get("final"), facts.get("history")
    if "rules" in record or not final or history is None or _changed(record, policy):
        return record
    try:
        decision = decide(final, policy, History.from_json(history))
    except EVALUATION_ERRORS:  # facts of another version
        return record
    if (decision.verdict, list(decision.reasons)) != (record["decision"], list(record.get("reasons", []))):
        return record
    told = rules_of(decision, policy)
    return {**record, **told, "detail": {**record.get("detail", {}), **told["detail"]}}


# ---- what would have passed ------------------------------------------------------------------------


def would_pass(record: Mapping[str, Any], policy: Policy) -> list[str]:
    """What each rule asked for that denied or held a message, in a sentence; nothing for one that was allowed.

    Args:
        record: the decision.
        policy: in force now. Where another one decided, a last sentence says what this one would do, with the counts
            and approvals of then.
    """
    if record["decision"] == "allow":
        return []
    codes = ", ".join(record.get("reasons", ())) or "no reason on record"
    changed = _changed(record, policy)
    sentences = [
        _sentence(rule, policy, changed) for rule in record.get("rules", ()) if rule["outcome"] in ("deny", "hold")
    ]
    if not sentences:
        sentences = [f"it was refused before a rule of the policy could judge it: {codes}"]
    return sentences + _by_now(record, policy) if changed else sentences


def _changed(record: Mapping[str, Any], policy: Policy) -> bool:
    """Whether another policy than this one decided."""
    return record.get("policy", {}).get("effective") not in (None, policy.digest)


def _sentence(rule: Mapping[str, Any], policy: Policy, changed: bool) -> str:
    name, measured, limit = rule["rule"], rule.get("measured"), rule.get("limit")
    part = policy.charter if rule.get("file") == "charter" and policy.charter else policy.own
    source = Path(part.source).name
    place = f"{source}:{rule.get('line', 0)}" + (" of the policy of then" if changed else "")
    if rule["outcome"] == "hold":
        return f"{name}: {limit} persons must approve exactly these bytes, {measured} have ({place})"
    if _is_number(measured) and _is_number(limit):
        bound = "at most" if measured > limit else "at least"
        return f"{name}: {bound} {_shown(limit)} pass, it had {_shown(measured)} ({place})"
    if isinstance(limit, list) and len(limit) == 2 and all(map(_is_number, limit)):
        return f"{name}: from {_shown(limit[0])} to {_shown(limit[1])} pass, it had {_shown(measured)} ({place})"
    return f"{name}: {_shown(limit)} passes, it had {_shown(measured)} ({place})"


def _by_now(record: Mapping[str, Any], policy: Policy) -> list[str]:
    facts = record.get("facts", {})
    final, history = facts.get("final"), facts.get("history")
    if not final or history is None:
        return []
    try:
        verdict = decide(final, policy, History.from_json(history)).verdict
    except EVALUATION_ERRORS:  # facts of another version, which this one's rules do not read
        return []
    return [f"the policy in force by now, {policy.digest[:12]}, would {verdict} the same message"]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

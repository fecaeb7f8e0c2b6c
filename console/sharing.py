"""The fields of a daemon's state, events and answers that a share-safe recording may hold.

Released is what the site's policy has let out already: names, places in the run, digests and sizes that the coordinator
was told in a message of its own. Local is everything else: figures of the trainer, what a held message is made of,
findings, people, paths, addresses, the site's rules with their limits. Both are data, below or as marks on the fields
of `fedsilo.control.answers`. An answer's field without a mark is local. A key that neither a class there nor a table
here names is local too, and tests/console/test_recording.py fails for it.

Does not stop: what a time or a count tells to somebody who knows the site. Whoever shares a recording shares when
something was held, and how often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, TypeAlias, get_args

from fedsilo.control import answers


class Share(Enum):
    RELEASED = "released"
    LOCAL = "local"


RELEASED, LOCAL = Share.RELEASED, Share.LOCAL


@dataclass(frozen=True)
class Rows:
    """A list, or a mapping with free keys, of alike entries.

    Args:
        rule: of one entry.
        only: a field and the values of it that an entry must have to be kept at all; None keeps every entry.
    """

    rule: Rule
    only: tuple[str, frozenset[str]] | None = None


@dataclass(frozen=True)
class Open:
    """A mapping of which these are released and every other key, whatever it is called, is local on purpose."""

    released: frozenset[str]


Rule: TypeAlias = "Share | Mapping[str, Rule] | Rows | Open"


@dataclass(frozen=True)
class Question:
    """A query: which arguments an answer may have been asked with, and what of the answer is released."""

    answer: Rule
    arguments: frozenset[str] = field(default_factory=frozenset)


def rule_of(row: type[answers.Answer]) -> Mapping[str, Rule]:
    """Return the rule that the marks of an answer's fields make; a field without a mark is local."""
    return {name: _rule(kind, marks) for name, (kind, marks) in answers.fields_of(row).items()}


def _rule(kind: Any, marks: tuple[Any, ...]) -> Rule:
    for mark in marks:
        if isinstance(mark, answers.Keys):
            return Open(mark.released)
    if answers.RELEASED not in marks:
        return LOCAL
    row = next(
        (each for each in get_args(kind) or (kind,) if isinstance(each, type) and issubclass(each, answers.Answer)),
        None,
    )
    if row is None:
        return RELEASED
    if kind is row or isinstance(kind, UnionType):
        return rule_of(row)
    only = next(((mark.field, mark.values) for mark in marks if isinstance(mark, answers.Only)), None)
    return Rows(rule_of(row), only)


SILO, COORDINATOR = rule_of(answers.SiloStatus), rule_of(answers.CoordinatorStatus)

# By name; an event that is local is left out whole, name included.
EVENTS: Mapping[str, Rule] = {
    "events.missed": {"missed": RELEASED},
    # of a silo
    "run.accepted": {"run": RELEASED, "method": RELEASED},
    "run.ended": {"run": RELEASED, "outcome": RELEASED, "reason": LOCAL},
    "round.abandoned": {"run": RELEASED, "round": RELEASED},
    "release.held": {"release": RELEASED, "kind": LOCAL},
    "release.settled": {"release": RELEASED, "outcome": RELEASED, "reason": LOCAL},
    "sent": {"kind": RELEASED, "round": RELEASED},
    "denied": {"kind": RELEASED, "round": RELEASED, "step": RELEASED},  # the coordinator was told control.declined
    "ingress.denied": {"kind": RELEASED, "round": RELEASED},
    "task.done": {"round": RELEASED, "step": RELEASED, "task": LOCAL, "metrics": LOCAL},
    "policy.loaded": {"policy": RELEASED, "change": LOCAL, "fields": LOCAL},
    "adapter.held": LOCAL, "adapter.rolled_back": LOCAL,
    "trainer.failed": LOCAL, "halted": LOCAL, "halt.signed": LOCAL, "paused": LOCAL, "resumed": LOCAL,
    "clock.accepted": LOCAL,
    "run.left": {"run": RELEASED, "round": RELEASED, "reason": LOCAL},
    # of a coordinator
    "run.submitted": {"run": RELEASED, "method": RELEASED, "by": LOCAL},
    "run.started": {"run": RELEASED, "silos": RELEASED},
    "run.paused": {"run": RELEASED, "by": LOCAL},
    "run.resumed": {"run": RELEASED, "by": LOCAL},
    "round.agreed": {"run": RELEASED, "round": RELEASED, "silo": RELEASED},
    "round.opened": {"run": RELEASED, "round": RELEASED},
    "round.refused": {"run": RELEASED, "round": RELEASED, "reason": LOCAL},
    "round.committed": {"run": RELEASED, "round": RELEASED, "silos": RELEASED, "seconds": RELEASED},
    "round.closed": {"run": RELEASED, "round": RELEASED},
    "upload": {
        "run": RELEASED, "round": RELEASED, "step": RELEASED, "silo": RELEASED, "kind": RELEASED, "bytes": RELEASED,
    },
    "metric": {"run": RELEASED, "round": RELEASED, "silo": RELEASED, "name": RELEASED, "value": RELEASED},
    "silo.progress": {"silo": RELEASED, "run": RELEASED, "round": RELEASED, "step": RELEASED},
    "silo.joined": {"silo": RELEASED, "isolation": RELEASED, "role": RELEASED},
    "silo.left": {"run": RELEASED, "silo": RELEASED},
    "silo.error": {"silo": RELEASED, "run": RELEASED, "code": RELEASED},
    "silo.refused": Open(frozenset({"silo"})),
    "halt": {"code": RELEASED, "message": LOCAL},
    "refused": LOCAL, "connection.refused": LOCAL,
}  # fmt: skip

_OF_MESSAGES = (answers.DecisionInFull, answers.SentInFull, answers.MessagePage)  # one of them, or a page of all
_MESSAGES = Question(
    {name: rule for row in _OF_MESSAGES for name, rule in rule_of(row).items()},
    frozenset({"before", "limit", "control", "kind"}),
)
# By name. A query that is local is left out whole, for its arguments may say as much as its answer.
QUERIES: Mapping[str, Question | Share] = {
    "approvals": Question(rule_of(answers.ReleasePage), frozenset({"state", "before", "limit", "kind"})),
    "approval.comparison": LOCAL, "approvals.payload": LOCAL,
    "approval": LOCAL, "halts": LOCAL, "payload": LOCAL, "audit": LOCAL, "settings": LOCAL, "logs": LOCAL,
    "adapters": LOCAL, "findings": LOCAL, "rescreen": LOCAL,
    "outbox": _MESSAGES,
    "inbox": _MESSAGES,
    "audit.status": Question(rule_of(answers.AuditStatus)),
    "audit.verify": LOCAL,
    "limits": LOCAL,
    "ledger": Question(rule_of(answers.LedgerPage), frozenset({"before", "limit"})),
    "round": Question(rule_of(answers.Round), frozenset({"run", "round"})),
    "curves": Question(rule_of(answers.Curves), frozenset({"run", "names", "x"})),
    "certificates": LOCAL,
    # of a coordinator
    "runs": Question(Rows(rule_of(answers.RunRow))),
    "run": Question(
        Open(frozenset({
            "record_version", "run", "state", "submitted_at", "started_at", "ended_at", "base_adapter_sha256",
            "adapter_sha256", "isolation", "silo_errors", "before", "rounds", "traffic",
        })),
        frozenset({"run"}),
    ),
    "silos": Question(Rows(rule_of(answers.MemberRow))),
    "traffic": Question(
        Rows({"silo": RELEASED, "direction": RELEASED, "kind": RELEASED, "messages": RELEASED, "bytes": RELEASED}),
        frozenset({"run"}),
    ),
}  # fmt: skip

_NOTHING = object()


def released_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A daemon's state without what is local."""
    return dict(_released(state, COORDINATOR if state.get("party") == "coordinator" else SILO))


def released_event(name: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event's fields without what is local; None where the event itself is local."""
    rule = EVENTS.get(name, LOCAL)
    return None if rule is LOCAL else dict(_released(fields, rule))


def released_answer(name: str, arguments: Mapping[str, Any], answer: Any) -> tuple[Any] | None:
    """What of a query's answer is released, in a tuple of one; None where the whole query is local."""
    question = QUERIES.get(name, LOCAL)
    if isinstance(question, Share) or not arguments.keys() <= question.arguments:
        return None
    kept = _released(answer, question.answer)
    return None if kept is _NOTHING else (kept,)


def _released(value: Any, rule: Rule) -> Any:
    """`value` with only what is released; `_NOTHING` where that is nothing. What has another shape than its rule says
    is local: nobody has looked at it."""
    if isinstance(rule, Share):
        return value if rule is RELEASED else _NOTHING
    if isinstance(rule, Rows):
        return _released_rows(value, rule)
    if not isinstance(value, Mapping):
        return _NOTHING
    rules = dict.fromkeys(rule.released, RELEASED) if isinstance(rule, Open) else rule
    kept = {key: _released(item, rules.get(key, LOCAL)) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item is not _NOTHING}


def _released_rows(value: Any, rows: Rows) -> Any:
    def wanted(entry: Any) -> bool:
        return rows.only is None or (isinstance(entry, Mapping) and entry.get(rows.only[0]) in rows.only[1])

    if isinstance(value, Mapping):
        pairs = {key: _released(entry, rows.rule) for key, entry in value.items() if wanted(entry)}
        return {key: entry for key, entry in pairs.items() if entry is not _NOTHING}
    if isinstance(value, list):
        kept = [_released(entry, rows.rule) for entry in value if wanted(entry)]
        return [entry for entry in kept if entry is not _NOTHING]
    return _NOTHING

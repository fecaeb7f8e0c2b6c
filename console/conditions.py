"""What a screen says when it has not what it should show (console design 7): loading, empty, refused, old, denied.

Each state says what is the matter and what to do, in words; none of them clears what is still known. Pure.
"""

from __future__ import annotations

from console import rule_words
from console.drawing import Line, duration_text, line, wrap
from console.values import Snapshot

AWAITED_SECONDS = 2.0  # after that long, loading says what is awaited and from whom
ANSWER_STALE_SECONDS = 5.0  # an answer is asked for about once a second
NOT_ALLOWED = "NOT_ALLOWED"
# What a recording or a state folder does not hold: nothing went wrong, and asking again gives nothing else.
NOT_THERE = frozenset({"NOT_RECORDED", "NOT_ON_DISK"})


def answer_lines(snapshot: Snapshot, key: str, now: float, cells: int, *, opened_at: float) -> list[Line]:
    """Why an answer is missing or old, in one or two lines; nothing when it is there and fresh.

    Args:
        snapshot: with the answers.
        key: of the answer.
        now: monotonic seconds.
        cells: width.
        opened_at: when the screen began to ask.
    """
    if key in snapshot.refused:
        return refused_lines(*snapshot.refused[key], cells)[:2]
    if key not in snapshot.answers:
        waited = now - opened_at
        if waited < AWAITED_SECONDS or snapshot.link.state == "disconnected":
            return []
        return wrap(f"loading: waiting for the daemon's answer to {key} since {duration_text(waited)}", cells, "dim")
    age = now - snapshot.answered_at.get(key, now)
    if age > ANSWER_STALE_SECONDS and snapshot.link.state == "live":
        return [line((f"as of {duration_text(age)} ago: the daemon has not answered since", "warn"))]
    return []


def refused_lines(code: str, text: str, cells: int) -> list[Line]:
    """An error: what, its code, and what to do. Not being allowed is said as that."""
    if code == NOT_ALLOWED:
        return wrap(f"not allowed: {text}", cells, "warn")
    if code in NOT_THERE:
        return wrap(text, cells, "warn")
    return wrap(f"error: {text} [{code}]", cells, "bad")


def empty_lines(what: str, makes: str, cells: int) -> list[Line]:
    """What would stand here, and the command that makes it."""
    rows = wrap(f"no {what} yet", cells, "dim")
    return [*rows, *wrap(makes, cells)] if makes else rows


def denied_lines(rule: str, measured: str, limit: str, would_pass: str, cells: int) -> list[Line]:
    """Denied by policy is no error: the rule, what it measured, its limit, and what would pass."""
    bound = "at least" if rule_words.binds_from_below(rule, limit) else "limit"
    rows = wrap(f"DENY {rule}: measured {measured or '-'}, {bound} {limit or '-'}", cells, "bad")
    return [*rows, *wrap(f"would pass: {would_pass}", cells)] if would_pass else rows

"""Texts for a screen that lacks its data: loading, empty, refused, old, denied.

Each state says what is the matter and what to do, in words; none of them clears what is still known. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedsilo.views import rule_words
from fedsilo.views.lines import Line, clip, duration_text, fit, line, short_paths, wrap
from fedsilo.views.state import Snapshot

AWAITED_SECONDS = 2.0  # after that long, loading says what is awaited and from whom
ANSWER_STALE_SECONDS = 5.0  # an answer is asked for about once a second
REFUSAL_LINES_MAX = 3  # above rows that may still be there
NOT_ALLOWED = "NOT_ALLOWED"
# What a recording does not hold: nothing went wrong, and asking again gives nothing else.
NOT_RECORDED = "NOT_RECORDED"

NOT_READ = "not read before the daemon was lost"
# Of allowed control messages, such as polls and checkpoints: parties send them all the time.
ADDS_CONTROL, HIDES_CONTROL = "c adds control messages", "c hides control messages"
LOST_LINES_MAX = 2  # of the banner on every screen; a hint is dropped where it has no room
PATH_CELLS = (32, 24, 16)  # of one path in the cause of a lost link
CAUSE_CELLS_MIN = 24


def control_line(*, shown: bool) -> Line:
    """The words for the key `c` on a screen that leaves allowed control messages out until somebody asks for them."""
    return line((HIDES_CONTROL if shown else ADDS_CONTROL, "dim"))


def condition_lines(
    snapshot: Snapshot, now: float, cells: int, *, opened_at: float, waits_for: str, below_at: float | None,
    most: int = LOST_LINES_MAX,
) -> list[Line]:  # fmt: skip
    """A banner when what is shown is not live: loading, stale, disconnected with its cause.

    Args:
        snapshot: whose link it is about.
        now: monotonic seconds.
        cells: width.
        opened_at: when the console began to wait.
        waits_for: what is awaited while loading, for people.
        below_at: when what stands below was read; None when nothing of it was.
        most: lines; at least `LOST_LINES_MAX`.
    """
    link = snapshot.link
    if link.state == "disconnected":
        return _lost_lines(snapshot, now, cells, below_at, most)
    if link.state == "loading":
        if link.cause:
            below = "" if below_at is None else f"; values below are {duration_text(now - below_at)} old"
            return wrap(f"{link.cause}{below}", cells, "warn")
        waited = now - opened_at
        since = f" since {duration_text(waited)}" if waited >= AWAITED_SECONDS else ""
        return [line((f"loading… waiting for {waits_for}{since}", "dim"))]
    if snapshot.is_stale(now):
        age = duration_text(snapshot.age_seconds(now))
        below = age if below_at is None else duration_text(now - below_at)
        old = "that old" if below == age else f"{below} old"
        return wrap(f"STALE {age}: the daemon has not answered since; values below are {old}", cells, "warn")
    return []


def _lost_lines(snapshot: Snapshot, now: float, cells: int, below_at: float | None, most: int) -> list[Line]:
    """The cause, how old what is below is, and what follows: whole sentences, the cause cut where there is no room."""
    link = snapshot.link
    kept = "" if below_at is None else f"below as of {duration_text(now - below_at)} ago, "
    then = f"; {kept}again in {max(link.retry_at - now, 0.0):.0f} s, r tries now."
    least = f"; {kept}r tries now."
    causes = [(short_paths(link.cause, path), then) for path in PATH_CELLS]
    shortest = fit(causes[-1][0], cells * LOST_LINES_MAX)  # of a recording by somebody else it may be of any length
    longest = max(len(shortest), CAUSE_CELLS_MIN)
    causes += [(fit(shortest, room), least) for room in range(longest, CAUSE_CELLS_MIN - 1, -1)]
    for cause, follows in causes:
        text = f"DISCONNECTED: {cause}{follows}"
        rows = wrap(text, cells, "bad")
        if len(rows) <= LOST_LINES_MAX:
            with_hint = wrap(f"{text} {link.hint}".rstrip(), cells, "bad")
            return with_hint if len(with_hint) <= most else rows
    return rows[:LOST_LINES_MAX]


def is_lost(snapshot: Snapshot, key: str) -> bool:
    """The answer was not read before the daemon was lost, so none is on its way."""
    return snapshot.link.state == "disconnected" and key not in snapshot.answers and key not in snapshot.refused


def answer_lines(snapshot: Snapshot, key: str, now: float, cells: int, *, opened_at: float) -> list[Line]:
    """Why an answer is missing or old, in a few lines; nothing when it is there and fresh. `opened_at` is when the
    screen began to ask."""
    if key in snapshot.refused:
        told = refused_lines(*snapshot.refused[key], cells)
        return told if len(told) <= REFUSAL_LINES_MAX else [*told[: REFUSAL_LINES_MAX - 1], _and_more(told, cells)]
    if is_lost(snapshot, key):
        return [line((NOT_READ, "dim"))]
    if key not in snapshot.answers:
        waited = now - opened_at
        if waited < AWAITED_SECONDS:
            return []
        return wrap(f"loading: waiting for the daemon's answer to {key} since {duration_text(waited)}", cells, "dim")
    age = now - snapshot.answered_at.get(key, now)
    if age > ANSWER_STALE_SECONDS and snapshot.link.state == "live":
        return [line((f"as of {duration_text(age)} ago: the daemon has not answered since", "warn"))]
    return []


def _and_more(told: Sequence[Line], cells: int) -> Line:
    """The last line that there is room for, with a sign that the text goes on."""
    return (*clip(told[REFUSAL_LINES_MAX - 1], cells - 2), (" …", "dim"))


def refused_lines(code: str, text: str, cells: int) -> list[Line]:
    """An error: what, its code, and what to do. Not being allowed is said as that."""
    if code == NOT_ALLOWED:
        return wrap(f"not allowed: {text}", cells, "warn")
    if code == NOT_RECORDED:
        return wrap(text, cells, "warn")
    return wrap(f"error: {text} [{code}]", cells, "bad")


def empty_lines(what: str, makes: str, cells: int) -> list[Line]:
    """Return what would be shown here, and the command that makes it."""
    rows = wrap(f"no {what} yet", cells, "dim")
    return [*rows, *wrap(makes, cells)] if makes else rows


def denied_lines(rule: str, measured: str, limit: str, would_pass: str, cells: int) -> list[Line]:
    """Denied by policy is no error: the rule, what it measured, its limit, and what would pass."""
    bound = "at least" if rule_words.binds_from_below(rule, limit) else "limit"
    rows = wrap(f"DENY {rule}: measured {measured or '-'}, {bound} {limit or '-'}", cells, "bad")
    return [*rows, *wrap(f"would pass: {would_pass}", cells)] if would_pass else rows

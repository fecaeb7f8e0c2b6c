"""The transition tables of a run: every pair of state and event decided. `rounds.step` asks those of the coordinator,
`rounds.silo_step` that of a silo.

A cell accepts (with the next state and what is then to be done), ignores (it was said before, or comes too late to
matter), or refuses with a code. `docs/explain/rounds.md` is drawn from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fedsilo.protocol.errors import ConflictError, WireCode

CONFLICT = ConflictError.default_code


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    IGNORED = "ignored"
    REFUSED = "refused"


class Effect(StrEnum):
    """What the caller does after an accepted event, in the order of the cell, in the transaction that keeps it."""

    TELL = "tell the method"
    BEGIN = "note the run as begun"
    WITHDRAW = "take back what waits for the silo"
    NOTE_DECLINED = "note who declined the plan"
    AGREE = "look who has signed the transcript"
    INVITE = "note the round as open"
    AGGREGATE = "combine the updates"
    CLOSE = "close the round"
    SEND_AWAY = "tell all silos that it is over"
    DISMISS = "tell who never took the plan in that it is over"
    RECORD = "write the run record"
    # at a silo
    ENTER = "wait for the others' signatures"
    NOTE_END = "note what it came to"
    MISS = "end what is held for it"
    SHOW = "tell the site's people"
    WITNESS = "have the log witnessed"
    DROP = "drop the work on it"
    END = "end the run here"


@dataclass(frozen=True)
class Cell:
    """What one event does in one state. `next` is empty where the state stays."""

    verdict: Verdict
    next: str = ""
    effects: tuple[Effect, ...] = ()
    code: str = ""


Table = Mapping[str, Mapping[str, Cell]]  # state -> event -> cell


def _to(state: str, *effects: Effect) -> Cell:
    return Cell(Verdict.ACCEPTED, state, effects)


def _do(*effects: Effect) -> Cell:
    return Cell(Verdict.ACCEPTED, "", effects)


def _no(code: str) -> Cell:
    return Cell(Verdict.REFUSED, code=code)


def _table(states: tuple[str, ...], rows: Mapping[str, tuple[Cell, ...]]) -> Table:
    return {
        state: {event: cells[column] for event, cells in rows.items()} for column, state in enumerate(states)
    }  # fmt: skip


_E = Effect
OK, IGNORE, BAD = _do(), Cell(Verdict.IGNORED), _no(CONFLICT)
LATE, _GONE, DENY = _no(WireCode.ROUND_CLOSED), _no(WireCode.NO_SUCH_RUN), _no(WireCode.INGRESS_DENIED)
_TELL, _AGREE, _END = _do(_E.TELL), _do(_E.TELL, _E.AGREE), (_E.SEND_AWAY, _E.RECORD)
_BEGINS = _to("running", _E.BEGIN, _E.TELL)
_LEAVES = _do(_E.WITHDRAW, _E.TELL, _E.AGREE)
_DECLINES, _ENDS = _do(_E.WITHDRAW, _E.NOTE_DECLINED), (_E.DISMISS, _E.RECORD)

RUN_STATES = ("waiting", "running", "paused", "finished", "failed", "aborted")
_RUN: dict[str, tuple[Cell, ...]] = {
    # waiting, running, paused, over
    "start":            (_BEGINS,   BAD,           BAD,            BAD),
    "pause":            (BAD,       _to("paused"), BAD,            BAD),
    "resume":           (BAD,       BAD,           _to("running"), BAD),
    # also while paused: what came last may end the run, and it was acknowledged
    "finish":           (BAD, *[_to("finished", *_ENDS)] * 2, BAD),
    "fail":             (BAD, *[_to("failed", *_ENDS)] * 2, BAD),
    "give up":          (*[_to("failed", *_END)] * 3, BAD),
    "abort":            (*[_to("aborted", *_END)] * 3, BAD),
    "plan taken":       (OK,        _TELL,         _TELL,          IGNORE),
    "plan declined":    (_DECLINES, _DECLINES,     _DECLINES,      _GONE),
    "leave":            (_DECLINES, _LEAVES,       _LEAVES,        _GONE),
    "open":             (BAD,       OK,            OK,             BAD),
    "sign":             (IGNORE,    _do(_E.AGREE), _do(_E.AGREE),  IGNORE),
    "progress":         (IGNORE,    OK,            OK,             IGNORE),
    "answer":           (LATE,      _TELL,         _TELL,          _GONE),
    "update":           (LATE,      _TELL,         _TELL,          _GONE),
    "evaluation":       (LATE,      _TELL,         _TELL,          _GONE),
    "update refused":   (IGNORE,    OK,            OK,             IGNORE),
    "abstain":          (IGNORE,    _AGREE,        _AGREE,         _GONE),
    "abstain in step":  (IGNORE,    _AGREE,        _AGREE,         _GONE),
    "commit":           (BAD,       OK,            OK,             BAD),
    "committed":        (BAD,       OK,            OK,             BAD),
    "abandon":          (BAD,       OK,            OK,             BAD),
    "await":            (OK,        OK,            OK,             IGNORE),
    "arrived":          (OK,        OK,            OK,             IGNORE),
    "join deadline":    (OK,        IGNORE,        IGNORE,         IGNORE),
    "signing deadline": (IGNORE,    _do(_E.AGREE), IGNORE,         IGNORE),
    "deadline":         (IGNORE,    _TELL,         IGNORE,         IGNORE),
}  # fmt: skip
RUN: Table = _table(RUN_STATES, {event: (*cells, cells[-1], cells[-1]) for event, cells in _RUN.items()})

_REFUSES = _to("out", _E.NOTE_DECLINED)
SILO: Table = _table(("asked", "accepted", "out"), {
    # asked, accepted, out
    "plan taken":      (_to("accepted"), IGNORE,     IGNORE),
    "plan declined":   (_to("out"),      _to("out"), _GONE),
    "leave":           (_REFUSES,        _to("out"), _GONE),
    "sign":            (IGNORE,          OK,         IGNORE),
    "progress":        (IGNORE,          OK,         IGNORE),
    "answer":          (_GONE,           OK,         _GONE),
    "update":          (_GONE,           OK,         _GONE),
    "evaluation":      (_GONE,           OK,         _GONE),
    "update refused":  (IGNORE,          OK,         IGNORE),
    "abstain":         (_GONE,           OK,         _GONE),
    "abstain in step": (_GONE,           OK,         _GONE),
})  # fmt: skip

_OPENS, _ABANDONS = _to("open", _E.INVITE), _to("abandoned", _E.CLOSE)
_COMMITS, _COMMITTED = _to("committing", _E.AGGREGATE), _to("committed", _E.CLOSE, _E.TELL)
ROUND: Table = _table(("none", "open", "committing", "committed", "abandoned"), {
    # none, open, committing, committed, abandoned
    "open":            (_OPENS, IGNORE,           BAD,              _OPENS, _OPENS),
    "sign":            (IGNORE, OK,               IGNORE,           IGNORE, IGNORE),
    "progress":        (IGNORE, OK,               IGNORE,           IGNORE, IGNORE),
    "answer":          (LATE,   OK,               LATE,             LATE,   LATE),
    "update":          (LATE,   OK,               LATE,             LATE,   LATE),
    "update refused":  (IGNORE, OK,               IGNORE,           IGNORE, IGNORE),
    "abstain":         (IGNORE, OK,               OK,               OK,     OK),
    "abstain in step": (IGNORE, OK,               OK,               OK,     OK),
    "commit":          (BAD,    _COMMITS,         BAD,              BAD,    BAD),
    "committed":       (BAD,    BAD,              _COMMITTED,       BAD,    BAD),
    "abandon":         (IGNORE, _ABANDONS,        _ABANDONS,        IGNORE, IGNORE),
    "run over":        (OK,     _to("abandoned"), _to("abandoned"), OK,     OK),
})  # fmt: skip

PLACE: Table = _table(("outside", "invited", "working", "contributed", "late", "left", "refused"), {
    # outside, invited, working, contributed, late, left, refused
    "open":            (_to("invited"), *[IGNORE] * 6),
    "sign":            (IGNORE, _to("working"),     OK,                 OK,     IGNORE, OK,                 OK),
    "progress":        (IGNORE, _to("working"),     OK,                 IGNORE, IGNORE, IGNORE,             IGNORE),
    "answer":          (LATE,   _to("working"),     OK,                 OK,     LATE,   OK,                 OK),
    # who said no to the round may still come in time; who was refused may come with another
    "update":          (LATE,   *[_to("contributed")] * 2, DENY,        LATE,   *[_to("contributed")] * 2),
    "update refused":  (IGNORE, _to("refused"),     _to("refused"),     IGNORE, IGNORE, IGNORE,             IGNORE),
    "abstain":         (IGNORE, _to("left"),        _to("left"),        *[OK] * 3, _to("left")),
    "abstain in step": (IGNORE, _to("working"),     OK,                 OK,     OK,     OK,                 OK),
    "leave":           (OK,     _to("left"),        _to("left"),        *[OK] * 3, _to("left")),
    "round over":      (OK,     _to("late"),        _to("late"),        OK,     OK,     OK,                 OK),
})  # fmt: skip

_ENTERS, _BEGINS_HERE = _to("signed", _E.ENTER, _E.SHOW), _to("working", _E.SHOW, _E.TELL)
_HEARS, _OVER_HERE = _do(_E.SHOW, _E.TELL), (_E.NOTE_END, _E.MISS, _E.SHOW)
_LEAVES_HERE, _DROPS = _to("left"), _to("left", _E.DROP)


def _ends(state: str) -> tuple[Cell, ...]:
    """Return the row of a round's end: who left it notes the end, and who worked in it tells the method."""
    unseen, seen = (*_OVER_HERE, _E.WITNESS), (*_OVER_HERE, _E.TELL, _E.WITNESS)
    return (_to(state, *unseen), _to(state, *unseen), _to(state, *seen), _to(state, _E.NOTE_END), *[_do(*seen)] * 2)


AT_SILO: Table = _table(("none", "signed", "working", "left", "committed", "abandoned"), {
    # none, signed, working, left, committed, abandoned
    "open":      (_ENTERS, _do(_E.ENTER, _E.SHOW), LATE, IGNORE, LATE, LATE),
    "refuse":    (_LEAVES_HERE, _LEAVES_HERE,  _DROPS, _do(), _LEAVES_HERE, _LEAVES_HERE),
    "agree":     (IGNORE,       _BEGINS_HERE,  *[IGNORE] * 4),
    "too few":   (IGNORE,       OK,            *[IGNORE] * 4),
    "message":   (_HEARS,       _HEARS,        _HEARS, IGNORE, _HEARS, _HEARS),
    "commit":    _ends("committed"),
    "abandon":   _ends("abandoned"),
    "leave":     (_LEAVES_HERE, _DROPS,        _DROPS, _do(_E.DROP), _DROPS, _DROPS),
    "run over":  (_do(_E.SHOW, _E.TELL, _E.END), *[_to("abandoned", _E.SHOW, _E.TELL, _E.END)] * 3,
                  *[_do(_E.SHOW, _E.TELL, _E.END)] * 2),
    # after a restart, by what the ledger knows of the newest round; a round that it knows nothing of is left
    "wait on":   (_to("signed"),  *[BAD] * 5),
    "go on":     (_to("working"), *[BAD] * 5),
})  # fmt: skip

TABLES: Mapping[str, Table] = {"run": RUN, "silo": SILO, "round": ROUND, "place": PLACE, "at silo": AT_SILO}
ORDERS = ("start", "pause", "resume", "abort")  # what people may ask of a run
OVER = frozenset({"finished", "failed", "aborted"})
ROUND_OVER = frozenset({"committed", "abandoned"})


def is_over(state: str) -> bool:
    """Whether a run in that state has ended."""
    return state in OVER


def silo_is_here(state: str) -> bool:
    """Whether a run can begin with a silo that a coordinator says stands so."""
    return state in ("joined", "by_files")


def silo_is_dead(state: str) -> bool:
    """Whether nothing comes from it, or nothing of it is taken."""
    return state in ("silent", "refused")


def advance(table: Table, state: str, event: str) -> str:
    """The next state. Raises ConflictError: the event is not possible in this state; the hint says what is."""
    cell = table[state][event]
    if cell.verdict is not Verdict.ACCEPTED:
        raise ConflictError(f"cannot {event} what is {state}", hint=possible(state))
    return cell.next or state


def possible(state: str) -> str:
    """What people may ask of a run in that state, as a hint."""
    orders = [event for event in ORDERS if state in RUN and RUN[state][event].next]
    return f"possible now: {', '.join(orders) or 'nothing, it has ended'}"


def gather(*, ready: int, of: int, quorum: int, deadline_passed: bool) -> str:
    """What to do with `ready` silos of `of` that can still come: `start`, `give up`, or, to wait on, nothing."""
    if ready < of and of >= quorum and not deadline_passed:
        return ""
    return "start" if ready >= quorum else "give up"

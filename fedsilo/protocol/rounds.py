"""The life of a run as transition tables: at the coordinator (run, silo in the run, round, silo in the round) and at a
silo (the newest round that it knows of).

    life, event, moment  ->  verdict, next life, effects by name

Each table decides every pair of state and event. A cell accepts, with the next state and what is then to be done;
ignores what came before or comes too late to matter; or refuses with a code. `docs/explain/rounds.md` is drawn from the
tables. `step` asks those of the coordinator that an event concerns, from the run down to the silo's place in the round,
and the first that refuses decides; `silo_step` asks the silo's. Accepted events are the caller's journal: `step` again
over it gives the same life, so nothing else need be stored.

The method says when a round is complete; here stands what it may then do: no commit below the quorum, and of nothing
but the updates that were taken. A contribution is known by (run, round, step, attempt, silo, kind, digest). The same
digest in the same place is a retry, whichever attempt it came with: ignored, and acknowledged. Another digest in a
taken place is refused, so which updates count does not depend on the order in which they came.

Time is the caller's: `due` is asked with a moment, and deadlines that are folded again count from that moment, since
an outage must not close a round.

What it does not stop: a silo that is slow on purpose, up to each deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, WireCode
from fedsilo.protocol.method import (
    EVERYBODY,
    CloseRound,
    Commit,
    Committed,
    DeadlinePassed,
    FinishRun,
    Result,
    RunStarted,
    SiloAbstained,
    SiloLeft,
    StartDeadline,
    in_turn,
)
from fedsilo.protocol.plan import Plan

CONFLICT = ConflictError.default_code


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    IGNORED = "ignored"
    REFUSED = "refused"


class Effect(StrEnum):
    """An effect of an accepted event, which the caller carries out in the order of the cell and in the transaction that
    stores the event."""

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
    """One cell of a table: the verdict, next state and effects of an event in a state. `next` is empty where the state
    stays."""

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
    return {state: {event: cells[column] for event, cells in rows.items()} for column, state in enumerate(states)}


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
    "close":            (BAD,       OK,            OK,             BAD),
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

_OPENS, _CLOSES, _ABANDONS = _to("open", _E.INVITE), _to("closed", _E.CLOSE), _to("abandoned", _E.CLOSE)
_COMMITS, _COMMITTED = _to("committing", _E.AGGREGATE), _to("committed", _E.CLOSE, _E.TELL)
ROUND: Table = _table(("none", "open", "committing", "committed", "closed", "abandoned"), {
    # none, open, committing; committed, closed, abandoned
    "open":            (_OPENS, IGNORE,           BAD,              *[_OPENS] * 3),
    "sign":            (IGNORE, OK,               IGNORE,           *[IGNORE] * 3),
    "progress":        (IGNORE, OK,               IGNORE,           *[IGNORE] * 3),
    "answer":          (LATE,   OK,               LATE,             *[LATE] * 3),
    "update":          (LATE,   OK,               LATE,             *[LATE] * 3),
    "update refused":  (IGNORE, OK,               IGNORE,           *[IGNORE] * 3),
    "abstain":         (IGNORE, OK,               OK,               *[OK] * 3),
    "abstain in step": (IGNORE, OK,               OK,               *[OK] * 3),
    "commit":          (BAD,    _COMMITS,         BAD,              *[BAD] * 3),
    "committed":       (BAD,    BAD,              _COMMITTED,       *[BAD] * 3),
    "close":           (BAD,    _CLOSES,          BAD,              *[BAD] * 3),
    "abandon":         (IGNORE, _ABANDONS,        _ABANDONS,        *[IGNORE] * 3),
    "run over":        (OK,     _to("abandoned"), _to("abandoned"), *[OK] * 3),
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
    """Return the row of a round's end: who worked in it tells the method. Who left it notes the end, and for that silo
    the round stays left: nothing that comes late, or a second time, is taken for a message of a round it was in."""
    unseen, seen = (*_OVER_HERE, _E.WITNESS), (*_OVER_HERE, _E.TELL, _E.WITNESS)
    return (_to(state, *unseen), _to(state, *unseen), _to(state, *seen), _do(_E.NOTE_END), *[_do(*seen)] * 3)


AT_SILO: Table = _table(("none", "signed", "working", "left", "committed", "closed", "abandoned"), {
    # none, signed, working, left; committed, closed, abandoned
    "open":      (_ENTERS, _do(_E.ENTER, _E.SHOW), LATE, IGNORE, *[LATE] * 3),
    "refuse":    (_LEAVES_HERE, _LEAVES_HERE,  _DROPS, _do(), *[_LEAVES_HERE] * 3),
    "agree":     (IGNORE,       _BEGINS_HERE,  *[IGNORE] * 5),
    "too few":   (IGNORE,       OK,            *[IGNORE] * 5),
    "message":   (_HEARS,       _HEARS,        _HEARS, IGNORE, *[_HEARS] * 3),
    "commit":    _ends("committed"),
    "close":     _ends("closed"),
    "abandon":   _ends("abandoned"),
    "leave":     (_LEAVES_HERE, _DROPS,        _DROPS, _do(_E.DROP), *[_DROPS] * 3),
    "run over":  (_do(_E.SHOW, _E.TELL, _E.END), *[_to("abandoned", _E.SHOW, _E.TELL, _E.END)] * 3,
                  *[_do(_E.SHOW, _E.TELL, _E.END)] * 3),
    # after a restart, by what the ledger knows of the newest round; a round that it knows nothing of is left
    "wait on":   (_to("signed"),  *[BAD] * 6),
    "go on":     (_to("working"), *[BAD] * 6),
})  # fmt: skip

TABLES: Mapping[str, Table] = {"run": RUN, "silo": SILO, "round": ROUND, "place": PLACE, "at silo": AT_SILO}
ORDERS = ("start", "pause", "resume", "abort")  # what people may ask of a run
OVER = frozenset({"finished", "failed", "aborted"})
ROUND_DONE = frozenset({"committed", "closed"})  # it ended as its method means it to
ROUND_OVER = ROUND_DONE | {"abandoned"}


def is_over(state: str) -> bool:
    """Return whether a run in that state has ended."""
    return state in OVER


def silo_is_here(state: str) -> bool:
    """Return whether a run can begin with a silo in this state."""
    return state in ("joined", "by_files")


def silo_is_dead(state: str) -> bool:
    """Return whether a silo in this state sends nothing more, or nothing of it is accepted."""
    return state in ("silent", "refused")


def advance(table: Table, state: str, event: str) -> str:
    """The next state. Raises ConflictError: the event is not possible in this state; the hint says what is."""
    cell = table[state][event]
    if cell.verdict is not Verdict.ACCEPTED:
        raise ConflictError(f"cannot {event} what is {state}", hint=possible(state))
    return cell.next or state


def possible(state: str) -> str:
    """Return the commands that people may give in that state, as a hint."""
    orders = [event for event in ORDERS if state in RUN and RUN[state][event].next]
    return f"possible now: {', '.join(orders) or 'nothing, it has ended'}"


def gather(*, ready: int, of: int, quorum: int, deadline_passed: bool) -> str:
    """Return what to do with `ready` silos of `of` that can still come: `start`, `give up`, or, to wait on, nothing."""
    if ready < of and of >= quorum and not deadline_passed:
        return ""
    return "start" if ready >= quorum else "give up"


JOIN = "join"  # the deadline before a run begins
ROUND_DEADLINE = "round/"  # and its number: the method's deadline for the round as a whole
AGREEMENT = "agreement/"  # and the number of the round: the deadline for signing its transcript
EVALUATION = "metrics.eval"
ABSTENTIONS_MAX = 16  # of one silo in one round, beside two for each public step: the round itself, and its kinds


# ---- events: those of the method and these ---------------------------------------------------------------


@dataclass(frozen=True)
class _OfSilo:
    silo: str


@dataclass(frozen=True)
class _OfRound:
    round: int


@dataclass(frozen=True)
class _OfSiloInRound(_OfSilo):
    round: int


class PlanTaken(_OfSilo):
    """A silo acknowledged the plan: before the run began, or later; then the method has it in its next round."""


class PlanDeclined(_OfSilo):
    """A site said no to the plan; of a silo that works in the run, this says no to nothing."""


@dataclass(frozen=True)
class RunPaused:
    pass


@dataclass(frozen=True)
class RunResumed:
    pass


@dataclass(frozen=True)
class GivenUp:
    """The coordinator ends the run as failed, without the method."""

    reason: str


class RoundOpened(_OfRound):
    """A round was opened to all silos that are in the run."""


class RoundAbandoned(_OfRound):
    pass


class Signed(_OfSiloInRound):
    """A silo signed the transcript of a round."""


@dataclass(frozen=True)
class Progressed(_OfSiloInRound):
    """A silo told of a step in a round."""

    step: int = 0


@dataclass(frozen=True)
class Contribution:
    """A message that belongs to the run, in its place. `attempt` numbers how often its sender sent it; `ungraded` are
    the places of answers in it that were not graded in time: for the method they are not there."""

    silo: str
    kind: str
    round: int
    step: int
    attempt: int
    digest: str
    ungraded: tuple[int, ...] = ()


class UpdateRefused(_OfSiloInRound):
    """The charter let a silo's update of a round not in."""


@dataclass(frozen=True)
class DeadlineDropped:
    """A deadline was dropped, since what it waited for has come."""

    name: str


Event = (
    PlanTaken
    | PlanDeclined
    | RunStarted
    | RunPaused
    | RunResumed
    | GivenUp
    | FinishRun
    | SiloLeft
    | RoundOpened
    | RoundAbandoned
    | Signed
    | Progressed
    | Contribution
    | UpdateRefused
    | SiloAbstained
    | Commit
    | Committed
    | CloseRound
    | StartDeadline
    | DeadlineDropped
    | DeadlinePassed
)

# ---- one life --------------------------------------------------------------------------------------------

_Slot = tuple[int, str, str]  # step, silo, kind


@dataclass(frozen=True)
class Life:
    """State of a run; immutable.

    Attributes:
        silos: of the plan, in its order.
        silos_min: with fewer no round begins. `quorum`: of fewer updates none is committed.
        update_kinds: kinds of the rounds' updates, which take turns; none where no update leaves a silo.
        evaluates_own: silos send figures of their own state while a round is open.
        standing: silo -> its state in `SILO`.
        round: number of the newest round; 0 before the first. `round_state` is its state in `ROUND`.
        places: silo -> its state in `PLACE`, of the newest round; without those that are outside of it.
        signed: silos that signed the newest round's transcript.
        abstained: what silos said in the newest round.
        taken: round -> place -> digest of what was taken there.
        steps: silo -> the highest step that it told of or answered in the newest round.
        deadlines: name -> the moment at which it passes. `spans` has how long each is, in seconds.
        paused_at: the moment, while paused.
    """

    silos: tuple[str, ...]
    quorum: int
    silos_min: int
    update_kinds: tuple[str, ...]
    evaluates_own: bool
    abstentions_max: int
    steps_max: int
    standing: Mapping[str, str]
    state: str = "waiting"
    round: int = 0
    round_state: str = "none"
    places: Mapping[str, str] = field(default_factory=dict)
    signed: frozenset[str] = frozenset()
    abstained: frozenset[SiloAbstained] = frozenset()
    taken: Mapping[int, Mapping[_Slot, str]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    deadlines: Mapping[str, float] = field(default_factory=dict)
    spans: Mapping[str, float] = field(default_factory=dict)
    paused_at: float | None = None

    def update_kind(self, number: int) -> str:
        """Return the kind of a round's updates."""
        return in_turn(self.update_kinds, number)

    @property
    def started(self) -> bool:
        return self.state != "waiting"

    @property
    def over(self) -> bool:
        return is_over(self.state)

    @property
    def open_round(self) -> int:
        """0 if none is open."""
        return self.round if self.round_state == "open" else 0

    def those(self, standing: str) -> tuple[str, ...]:
        """The silos of that state in the run, in the plan's order."""
        return tuple(silo for silo in self.silos if self.standing[silo] == standing)

    def absent(self) -> frozenset[str]:
        """Silos that take no part in the newest round."""
        return frozenset(silo for silo in self.silos if self.standing[silo] == "out" or self.places.get(silo) == "left")

    def due(self, moment: float) -> list[str]:
        """Deadlines that have passed, earliest first; none while paused."""
        if self.paused_at is not None:
            return []
        return sorted((name for name, at in self.deadlines.items() if at <= moment), key=self.deadlines.__getitem__)


@dataclass(frozen=True)
class Outcome:
    """`then`: what follows at once, `start` or `give up`; else empty. `life` changes only where it was accepted."""

    verdict: Verdict
    life: Life
    effects: tuple[Effect, ...] = ()
    code: str = ""
    then: str = ""


def first_life(plan: Plan, update_kinds: tuple[str, ...], *, evaluates_own: bool = False) -> Life:
    """Return the state of a run whose plan is being sent. update_kinds, evaluates_own: of its method."""
    return Life(
        plan.silos,
        plan.quorum,
        plan.silos_min,
        update_kinds,
        evaluates_own,
        2 * len(plan.public_steps()) + ABSTENTIONS_MAX,
        plan.local_steps,
        dict.fromkeys(plan.silos, "asked"),
    )


def name_of(life: Life, event: Event) -> str:
    """Return an event's name in the tables."""
    match event:
        case Contribution(kind=kind, round=number):
            is_update = kind == life.update_kind(number)
            return "evaluation" if kind == EVALUATION else "update" if is_update else "answer"
        case FinishRun(outcome):
            return {"finished": "finish", "failed": "fail", "aborted": "abort"}[outcome]
        case SiloAbstained(step=step):
            return "abstain in step" if step else "abstain"
        case DeadlinePassed(name):
            special = "signing deadline" if name.startswith(AGREEMENT) else "deadline"
            return "join deadline" if name == JOIN else special
    return _NAMES[type(event)]


_NAMES: dict[type[Any], str] = {
    PlanTaken: "plan taken",
    PlanDeclined: "plan declined",
    RunStarted: "start",
    RunPaused: "pause",
    RunResumed: "resume",
    GivenUp: "give up",
    SiloLeft: "leave",
    RoundOpened: "open",
    RoundAbandoned: "abandon",
    Signed: "sign",
    Progressed: "progress",
    UpdateRefused: "update refused",
    Commit: "commit",
    Committed: "committed",
    CloseRound: "close",
    StartDeadline: "await",
    DeadlineDropped: "arrived",
}


def step(life: Life, event: Event, moment: float) -> Outcome:
    """Apply one event at a moment (seconds of the caller's clock)."""
    name, silo = name_of(life, event), str(getattr(event, "silo", ""))
    if isinstance(event, Contribution) and life.taken.get(event.round, {}).get(_slot(event)) == event.digest:
        return Outcome(Verdict.IGNORED, life)  # whatever has become of run and round: it was acknowledged
    run = RUN[life.state][name]
    member = SILO[life.standing.get(silo, "out")][name] if silo and name in SILO["out"] else OK
    whole = ROUND[life.round_state][name] if name in ROUND["none"] else OK
    place = PLACE[life.places.get(silo, "outside")][name] if silo and name in PLACE["late"] else OK
    cells = (run, member, _limit(life, event, name), whole, place)
    for verdict in (Verdict.REFUSED, Verdict.IGNORED):
        for cell in cells:
            if cell.verdict is verdict:
                return Outcome(verdict, life, code=cell.code)
    standing, places = dict(life.standing), dict(life.places)
    if member.next:
        standing[silo] = member.next
    if place.next:
        places[silo] = place.next
    moved = replace(
        life,
        state=run.next or life.state,
        round_state=whole.next or life.round_state,
        standing=standing,
        places=places,
    )
    after = _changed(moved, event, moment)
    effects = tuple(dict.fromkeys(effect for cell in cells for effect in cell.effects))  # whichever cells name it
    return Outcome(Verdict.ACCEPTED, after, effects, then=_then(after, name))


def folded(life: Life, events: Iterable[Event], moment: float) -> Life:
    """The life after a journal. Raises ConflictError: the journal holds what was never accepted."""
    for event in events:
        outcome = step(life, event, moment)
        if outcome.verdict is not Verdict.ACCEPTED:
            raise ConflictError(f"the journal does not fit: {name_of(life, event)} of what is {life.state}")
        life = outcome.life
    return life


def _slot(event: Contribution) -> _Slot:
    return event.step, event.silo, event.kind


def _limit(life: Life, event: Event, name: str) -> Cell:
    """Return what depends on more than the states: numbers of rounds, what was said before, the quorum."""
    match event:
        case Contribution(round=number):
            # these belong to a round as a whole, so each has one place, and a commit finds it
            wrong = name != "answer" and event.step != 0
            if name == "evaluation":
                # of an adapter that is to come there is nothing to say yet; round 0 is the base model
                known = life.round_state in ROUND_OVER or life.evaluates_own
                wrong |= number > life.round or (number == life.round > 0 and not known)
            elif number != life.round:
                return LATE
            return DENY if wrong or _slot(event) in life.taken.get(number, {}) else OK
        case SiloAbstained(silo, number):
            count = sum(each.silo == silo for each in life.abstained)
            again = event in life.abstained or count >= life.abstentions_max
            return IGNORE if number != life.round or again else OK
        case RoundOpened(number):
            return IGNORE if number <= life.round else OK if number == life.round + 1 else BAD
        case Signed(silo, number):
            return OK if number == life.round and silo not in life.signed else IGNORE
        case Progressed(silo, number, at):
            return OK if number == life.round and life.steps.get(silo, -1) < at <= life.steps_max else IGNORE
        case PlanDeclined(silo):
            return IGNORE if life.started and life.standing.get(silo) == "accepted" else OK
        case UpdateRefused() | RoundAbandoned():
            return OK if event.round == life.round else IGNORE
        case Commit(number, results):
            receivers = [result.receiver for result in results]
            good = receivers == [EVERYBODY] or (
                bool(receivers) and len(set(receivers)) == len(receivers) and set(receivers) <= set(life.silos)
            )
            return (
                OK if number == life.round and good and all(_is_taken(life, number, each) for each in results) else BAD
            )
        case Committed(number) | CloseRound(number):
            return OK if number == life.round else BAD
        case DeadlinePassed(name) | DeadlineDropped(name):
            return OK if name in life.deadlines else IGNORE
    return OK


def _is_taken(life: Life, number: int, result: Result) -> bool:
    """Return whether a result is made of enough updates, and of none but those that were taken."""
    updates = life.taken.get(number, {})
    given = tuple(updates.get((0, silo, life.update_kind(number))) for silo in result.silos)
    return len(set(result.silos)) == len(result.silos) >= life.quorum and given == result.upload_digests


def _changed(life: Life, event: Event, moment: float) -> Life:
    """Return what an accepted event changes beside the states that it moves itself."""
    match event:
        case RunStarted():
            return _without(life, {JOIN})
        case RunPaused():
            return replace(life, paused_at=moment)
        case RunResumed():
            waited = moment - (life.paused_at if life.paused_at is not None else moment)
            later = {name: at + waited for name, at in life.deadlines.items()}
            return replace(life, deadlines=later, paused_at=None)
        case FinishRun() | GivenUp():
            ended = ROUND[life.round_state]["run over"].next or life.round_state
            return replace(_round_over(life), round_state=ended, deadlines={}, spans={}, paused_at=None)
        case RoundOpened(number):
            invited = dict.fromkeys(life.those("accepted"), PLACE["outside"]["open"].next)
            return replace(life, round=number, places=invited, signed=frozenset(), abstained=frozenset(), steps={})
        case Progressed(silo, _, at):
            return _stepped(life, silo, at, moment)
        case Contribution(silo, _, number, at):
            of_round = {**life.taken.get(number, {}), _slot(event): event.digest}
            life = replace(life, taken={**life.taken, number: of_round})
            further = life.steps.get(silo, 0) < at <= life.steps_max and life.places.get(silo) == "working"
            return _stepped(life, silo, at, moment) if further else life
        case Signed(silo):
            return replace(life, signed=life.signed | {silo})
        case SiloAbstained():
            return replace(life, abstained=life.abstained | {event})
        case Committed() | CloseRound() | RoundAbandoned():
            return _round_over(life)
        case StartDeadline(name, seconds):
            # while paused, all deadlines stand still from the moment of the pause
            start = moment if life.paused_at is None else life.paused_at
            deadlines, spans = {**life.deadlines, name: start + seconds}, {**life.spans, name: seconds}
            return replace(life, deadlines=deadlines, spans=spans)
        case DeadlinePassed(name) | DeadlineDropped(name):
            return _without(life, {name})
    return life


def _stepped(life: Life, silo: str, number: int, moment: float) -> Life:
    """A silo came to a step of the open round: the deadline of the round as a whole counts from here. It has so many
    steps and says each once, so this ends."""
    start, of_round = moment if life.paused_at is None else life.paused_at, f"{ROUND_DEADLINE}{life.round}"
    later = {name: start + life.spans[name] for name in life.deadlines.keys() & {of_round}}
    return replace(life, steps={**life.steps, silo: number}, deadlines={**life.deadlines, **later})


def _round_over(life: Life) -> Life:
    places = {silo: PLACE[at]["round over"].next or at for silo, at in life.places.items()}
    number = str(life.round)
    return _without(replace(life, places=places), {n for n in life.deadlines if n.split("/")[1:2] == [number]})


def _without(life: Life, names: set[str]) -> Life:
    deadlines = {name: at for name, at in life.deadlines.items() if name not in names}
    return replace(life, deadlines=deadlines, spans={name: life.spans[name] for name in deadlines})


def _then(life: Life, name: str) -> str:
    if life.state != "waiting" or name not in {"plan taken", "plan declined", "leave", "join deadline"}:
        return ""
    ready, asked = life.those("accepted"), life.those("asked")
    of, late = len(ready) + len(asked), name == "join deadline"
    return gather(ready=len(ready), of=of, quorum=life.silos_min, deadline_passed=late)


# ---- the journal -----------------------------------------------------------------------------------------

_KINDS = {kind.__name__: kind for kind in (*_NAMES, FinishRun, Contribution, SiloAbstained, DeadlinePassed)}


def to_fields(event: Event) -> dict[str, Any]:
    """An event as JSON; a message by its digest. What an earlier version knows is as it was there."""
    name = {"event": type(event).__name__}
    match event:
        case Commit(number, (Result(silos, digests, receiver=""),)):
            return {**name, "round": number, "silos": silos, "upload_digests": digests}
        case Committed(round=number, digest=digest) if digest:
            return {**name, "round": number, "digest": digest}
    fields = {**name, **asdict(event)}
    if fields.get("ungraded") == ():
        del fields["ungraded"]
    return fields


def from_fields(fields: Mapping[str, Any]) -> Event:
    """The event again. Raises KeyError or TypeError: it is none."""
    rest = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items() if key != "event"}
    kind = _KINDS[fields["event"]]
    if kind is Commit and "results" not in rest:
        rest = {"round": rest["round"], "results": (Result(rest["silos"], rest["upload_digests"]),)}
    elif kind is Commit:
        results = (Result(tuple(silos), tuple(digests), receiver) for silos, digests, receiver in rest["results"])
        rest = {**rest, "results": tuple(results)}
    elif kind is Committed and "digests" not in rest:
        rest = {"round": rest["round"], "digests": {EVERYBODY: rest["digest"]}}
    event: Event = kind(**rest)
    return event


# ---- at a silo -------------------------------------------------------------------------------------------

Mark = tuple[str, int, int, str]  # kind, round, step and digest of a message
_AGAIN = (Effect.WITNESS, Effect.END)  # what may have failed when a message came first


@dataclass(frozen=True)
class SiloRound:
    """State at a silo of the newest round that it knows of; immutable.

    Attributes:
        round: its number; 0 before the first.
        state: its state in `AT_SILO`.
        heard: messages of the run that were acted on.
    """

    round: int = 0
    state: str = "none"
    heard: frozenset[Mark] = frozenset()


@dataclass(frozen=True)
class AtSilo:
    """An event at a silo: its name in the table and its round; `mark` is that of a message, which may come again."""

    name: str
    round: int
    mark: Mark | None = None


@dataclass(frozen=True)
class SiloOutcome:
    """`life` changes only where the event was accepted. `effects` of one that was ignored: what may not be done yet."""

    verdict: Verdict
    life: SiloRound
    effects: tuple[Effect, ...] = ()
    code: str = ""


def end_at_silo(body: pb.RoundResult) -> str:
    """Return the event that a round's end is at a silo."""
    return "commit" if body.committed else "close" if body.closed else "abandon"


def message_at_silo(kind: str, number: int, step_number: int, digest: str, *, ended: str = "abandon") -> AtSilo:
    """Return the event that a message of the coordinator is. ended: by a round.result (`end_at_silo`)."""
    names = {"round.open": "open", "round.agreed": "agree", "round.result": ended, "run.end": "run over"}
    return AtSilo(names.get(kind, "message"), number, (kind, number, step_number, digest))


def silo_step(life: SiloRound, event: AtSilo) -> SiloOutcome:
    """Apply one event at a silo.

    A message that comes again is ignored, whatever has become of the round. A newer round finds none, and ends the work
    on the one before, unless it is still to be agreed on. Of an older round only its end counts.
    """
    if event.mark is not None and event.mark in life.heard:
        again = AT_SILO["none"][event.name].effects
        return SiloOutcome(Verdict.IGNORED, life, tuple(effect for effect in again if effect in _AGAIN))
    of_run = event.name == "run over" or event.round == 0
    newer, older = (not of_run and event.round > life.round), (not of_run and event.round < life.round)
    cell = _older(life, event.name) if older else AT_SILO["none" if newer else life.state][event.name]
    if cell.verdict is not Verdict.ACCEPTED:
        return SiloOutcome(cell.verdict, life, code=cell.code)
    overtaken = newer and life.state == "working" and event.name in ("refuse", "commit", "close", "abandon", "leave")
    marks = life.heard | {event.mark} if event.mark is not None else life.heard
    after = SiloRound(event.round if newer and cell.next else life.round, cell.next or life.state, marks)
    return SiloOutcome(Verdict.ACCEPTED, after, ((Effect.DROP,) if overtaken else ()) + cell.effects)


def _older(life: SiloRound, name: str) -> Cell:
    if name in ("commit", "close", "abandon"):
        return Cell(Verdict.ACCEPTED, effects=(Effect.NOTE_END,))  # two signed ends of one round are evidence
    return LATE if name == "open" and life.state != "left" else IGNORE

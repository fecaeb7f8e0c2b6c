"""Answers about rounds and curves, for the coordinator's people.

Of one round: each silo's phases with their durations, who is awaited, quorum and deadlines, and the digests that the
round is about. Of all: what silos released in `metrics.eval`, the norm of each update, and the gap between silos.

Everything is read from what is kept: rows of the database, in whole seconds, and the audit log's `round.agreed`. What
nobody kept is null and is never derived: when a silo took the plan in, when a poll handed it the donors, when each
single signature came. A phase of a silo ends when its message arrived here, so it holds the silo's work, the way here,
and a pause of the run.

pass@1 comes with the number of prompts behind it and a 95 % Wilson interval. How many held-out prompts a silo really
answered stays with the silos; the plan says how many at most, so `n_exact` is false here and the interval is the
narrowest it can be. Several answers to one prompt are no further draws.

Does not show: what a silo did meanwhile; reward, KL or any other figure of a trainer (it never leaves its site); the
cosine between updates, which nobody computes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import runs
from coordinator import store as db
from coordinator.driver import Driver
from fedsilo.audit.index import LogIndex, Mark
from fedsilo.control import answers
from fedsilo.control.figures import unit_of
from fedsilo.control.server import QueryArguments
from fedsilo.protocol.errors import NotFoundError, WireCode
from fedsilo.protocol.intervals import interval_of
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan, digests_of, parameters_of, plan_from_canonical
from fedsilo.protocol.rounds import ROUND_DONE, is_over

ROUNDS_LISTED = 200  # the newest
STRAGGLER_RATIO = 2.0  # of the median of the others in the same phase
OTHERS_MIN = 2  # who are through with it, else there is nothing to compare with
DIFFERENCE_SECONDS_MIN = 2.0  # times are kept in whole seconds
DECLINED = "declined"
_ADAPTER_WORDS = {WireCode.ADAPTER_HELD.value: "adapter held", WireCode.ADAPTER_REFUSED.value: "adapter refused"}
EVALUATION = "evaluation"  # a method's deadline, and the kind's place in the phases


@dataclass(frozen=True)
class Live:
    """Facts that only the running coordinator knows.

    Attributes:
        now: UTC, as the database has it.
        left_seconds: to each deadline, by its name.
        paused: whether the run is.
        seen: what each silo was last seen doing: (last_seen, round, step).
        standings: how each stands (`coordinator.ingress.standing`).
    """

    now: str
    left_seconds: Mapping[str, float] = field(default_factory=dict)
    paused: bool = False
    seen: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    standings: Mapping[str, str] = field(default_factory=dict)


class RoundView:
    """The queries `round` and `curves` of a running coordinator.

    Args:
        driver: read only.
        charter_digest: identity of the coordinator's own policy.
    """

    def __init__(self, driver: Driver, charter_digest: str) -> None:
        self._driver = driver
        self._charter_digest = charter_digest
        audit = driver.dependencies.audit
        self._index = LogIndex(audit.directory, lambda: audit.size)

    def round(self, arguments: Mapping[str, Any]) -> answers.Round:
        """Return a round; by default the newest, of the newest run. Raises UsageError, NotFoundError."""
        asked = QueryArguments(arguments, "run", "round")
        name, number = asked.text("run"), asked.number("round", least=1)
        with self._driver.dependencies.store.transaction() as session:
            run = run_row(session, name)
            if run is None:
                return answers.no_run_yet("coordinator")
            row = round_row(session, run, number)
            marks = self._index.marks(run.name, row.number, messages=False) if row is not None else ()
            live = self._live(session, run)
            return round_answer(session, run, row, marks, charter_digest=self._charter_digest, live=live)

    def curves(self, arguments: Mapping[str, Any]) -> answers.Curves:
        """Return series of figures by round; `names` are commas apart. Raises UsageError, NotFoundError."""
        with self._driver.dependencies.store.transaction() as session:
            return curves_answer(session, arguments)

    def _live(self, session: Session, run: db.Run) -> Live:
        # copies, each taken in one step, so that nobody waits for the lock while an aggregate is made
        active, seen, services = self._driver.runs.get(run.name), dict(self._driver.seen), self._driver.dependencies
        life = active.life if active is not None else None
        deadlines = life.deadlines if life is not None else {}
        since = life.paused_at if life is not None else None
        moment = services.monotonic() if since is None else since
        return Live(
            services.now(),
            {name: max(at - moment, 0.0) for name, at in deadlines.items()},
            since is not None,
            {
                silo: (each.last_seen, *((each.round, each.step) if each.run == run.name else (0, 0)))
                for silo, each in seen.items()
            },
            self._driver.standings(session),
        )


def run_row(session: Session, name: str) -> db.Run | None:
    """Return that run, or the newest; None before the first. Raises NotFoundError: no run of that name."""
    query = select(db.Run).where(db.Run.name == name) if name else select(db.Run).order_by(db.Run.ordinal.desc())
    run = session.scalars(query.limit(1)).first()
    if run is None and name:
        raise NotFoundError(f"there is no run {name!r}", hint="fedsilo run list")
    return run


def round_row(session: Session, run: db.Run, number: int | None) -> db.Round | None:
    """Return that round, or the newest; None for a run without any. Raises NotFoundError: no such round."""
    query = select(db.Round).where(db.Round.run == run.name)
    query = query.order_by(db.Round.number.desc()) if number is None else query.where(db.Round.number == number)
    row = session.scalars(query.limit(1)).first()
    if row is None and number is not None:
        raise NotFoundError(f"run {run.name} has no round {number}", hint=f"fedsilo run show {run.name}")
    return row


def round_answer(
    session: Session,
    run: db.Run,
    row: db.Round | None,
    marks: Sequence[Mark],
    *,
    charter_digest: str,
    live: Live,
) -> answers.Round:
    """Return what the query `round` answers.

    Args:
        session: of the database.
        run: which run.
        row: which round; None for a run without any.
        marks: of the round, from the coordinator's own log.
        charter_digest: identity of the coordinator's own policy.
        live: what only the running coordinator knows.
    """
    plan = plan_from_canonical(run.plan) if run.plan else None
    rounds = _rounds(session, run.name)
    facts = _Facts(session, run, row, plan, marks, live) if row is not None and plan is not None else None
    transcript = runs.figures(session, run.name, row.number) if row is not None else {}
    return answers.Round(
        party="coordinator",
        run=run.name,
        run_state=run.state,
        method=plan.method if plan else "",
        round=row.number if row is not None else 0,
        rounds_planned=plan.rounds if plan else 0,
        rounds=rounds,
        state=row.state if row is not None else "no round yet",
        opened_at=row.opened_at if row is not None else None,
        closed_at=(row.closed_at or None) if row is not None else None,
        elapsed_seconds=facts.elapsed if facts else None,
        closed_seconds=facts.closed if facts else None,
        paused=live.paused,
        quorum=facts.quorum() if facts else answers.filled(answers.Quorum, needed=plan.quorum if plan else None),
        deadlines=_deadlines(plan, row, facts, live),
        awaited=facts.awaited() if facts else (),
        silos=_silos(session, run, plan, row, facts, live),
        parameters=parameters_of(plan) if plan else {},
        digests=(digests_of(plan) if plan else {})
        | {
            "base_adapter": row.base_digest if row is not None else run.base_digest,
            "adapter": row.adapter_digest if row is not None else run.adapter_digest,
            "charter": charter_digest,
            "transcript": transcript.get("sha256", ""),
        },
        hidden=(),
    )


def seconds_between(start: str, end: str) -> float | None:
    """Return the seconds between two UTC texts of the database; None where one of them is none."""
    try:
        return max((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None


def _rounds(session: Session, run: str) -> tuple[answers.RoundRow, ...]:
    query = select(db.Round).where(db.Round.run == run).order_by(db.Round.number.desc()).limit(ROUNDS_LISTED)
    return tuple(
        answers.RoundRow(
            round=row.number,
            state=row.state,
            opened_at=row.opened_at,
            closed_at=row.closed_at or None,
            seconds=seconds_between(row.opened_at, row.closed_at),
            participants=len(json.loads(row.participants)),
        )
        for row in reversed(list(session.scalars(query)))
    )


def _deadlines(
    plan: Plan | None, row: db.Round | None, facts: _Facts | None, live: Live
) -> tuple[answers.Deadline, ...]:
    """Return those that run; of a round that is over, the one the plan gave it, as planned."""
    elapsed = facts.elapsed if facts else None
    running = {
        name: left
        for name, left in live.left_seconds.items()
        if (row is None or row.state == "open" or name == EVALUATION) and not _is_idle(name, facts)
    }
    deadlines = [
        answers.Deadline(
            name=name,
            for_=_what_for(name),
            left_seconds=round(left, 1),
            at_seconds=round(elapsed + left, 1) if elapsed is not None else None,
        )
        for name, left in sorted(running.items(), key=lambda item: item[1])
    ]
    if plan is not None and row is not None and not any(each.for_ == "round" for each in deadlines):
        planned = plan.round_deadline_seconds
        deadlines.append(answers.filled(answers.Deadline, name=f"round/{row.number}", for_="round", at_seconds=planned))
    return tuple(deadlines)


def _is_idle(name: str, facts: _Facts | None) -> bool:
    """Return True for a step's deadline that runs on although nobody is awaited at the step."""
    step = name.rpartition("/")[2]
    return (
        name.startswith("public/")
        and facts is not None
        and not any(each.phase == "train" and str(each.step) == step for each in facts.awaited())
    )


def _what_for(name: str) -> str:
    first, _, rest = name.partition("/")
    return f"step {rest.rpartition('/')[2]}" if first == "public" else first


class _Facts:
    """The records of one round, in order by silo."""

    def __init__(
        self, session: Session, run: db.Run, row: db.Round, plan: Plan, marks: Sequence[Mark], live: Live
    ) -> None:
        self._row, self._plan = row, plan
        self._method = method_named(plan.method)
        self._update_kind = self._method.update_kind(plan, row.number)
        self._last_kind = self._method.last_kind(plan, row.number)
        self.closed = seconds_between(row.opened_at, row.closed_at)
        self.elapsed = seconds_between(row.opened_at, live.now)
        self._over = is_over(run.state)
        self._standings = live.standings
        query = select(db.Upload).where(db.Upload.run == run.name, db.Upload.round == row.number)
        self._uploads: dict[tuple[str, str, int], db.Upload] = {}
        for upload in session.scalars(query.order_by(db.Upload.received_at)):
            self._uploads.setdefault((upload.silo, upload.kind, upload.step), upload)
        # with another exchange answers end no step of the round
        public_steps = json.loads(row.public_steps) if plan.exchange == "step" else {}
        self._steps = [int(step) for step, indices in sorted(public_steps.items(), key=_by_step) if indices]
        self._kept_back = _kept_back(session, run.name, row.number)
        self._signed = _signed(marks, row.opened_at)
        transcript = session.get(db.RoundTranscript, (run.name, row.number))
        self._signing = transcript is not None
        self.roster: tuple[str, ...] = (
            tuple(json.loads(transcript.canonical)["silos"]) if transcript is not None else plan.silos
        )
        ended = session.get(db.EndedRound, (run.name, row.number))
        self._verdicts: Mapping[str, str] = json.loads(ended.fields)["verdicts"] if ended is not None else {}
        self._participants = set(json.loads(row.participants))
        self._phases = {silo: self._phases_of(silo) for silo in self.roster}
        self._stragglers = _stragglers(self._phases, self.elapsed)

    @property
    def _open(self) -> bool:
        return self._row.state == "open"

    def _phases_of(self, silo: str) -> tuple[answers.Phase, ...]:
        """Return the phases in their order; the first that is not done is the open one, while the round is."""
        ends: list[tuple[str, int, float | None, bool]] = []  # phase, step, when it ended, whether it did
        if self._signing:
            at = self._signed.get(silo)
            done = at is not None or any(key[0] == silo for key in self._uploads)
            ends.append(("sign", 0, at, done))
        for step in self._steps:
            ends.append(("train", step, *self._arrived(silo, "public.responses", step)))
        update = self._arrived(silo, self._last_kind, 0) if self._last_kind else (None, True)
        if self._last_kind:
            ends.append(("update", 0, *update))
        if self._open and update[1]:
            ends.append(("others", 0, None, False))
        if not self._open:
            ends.append(("others", 0, self.closed if update[1] else None, update[1]))
            if self._last_kind != "metrics.eval":  # else they came in the round itself
                ends.append(("eval", 0, *self._arrived(silo, "metrics.eval", 0)))
        phases: list[answers.Phase] = []
        last, waiting = 0.0, False
        for phase, step, at, done in ends:
            started = max(last, self.closed or 0.0) if phase == "eval" else last
            ended = None if at is None else max(at, started)
            if done:
                state = "done"
            elif (silo, step if phase == "train" else 0) in self._kept_back:
                state = "kept back"
            elif waiting or (not self._open and (phase != "eval" or self._over or self._row.state not in ROUND_DONE)):
                state = "waiting" if self._open else "missed"
            else:
                state, waiting = "open", True
            phases.append(
                answers.Phase(
                    phase=phase,
                    step=step,
                    state=state,
                    from_seconds=None if ended is None and state != "open" else started,
                    to_seconds=ended,
                    seconds=None if ended is None else round(ended - started, 3),
                    source="released",
                )
            )
            last = max(last, at or 0.0)
        return tuple(phases)

    def _arrived(self, silo: str, kind: str, step: int) -> tuple[float | None, bool]:
        upload = self._uploads.get((silo, kind, step))
        return (None, False) if upload is None else (seconds_between(self._row.opened_at, upload.received_at), True)

    def quorum(self) -> answers.Quorum:
        given = [at for silo in self.roster for at, there in [self._arrived(silo, self._last_kind, 0)] if there]
        if self._method.evaluates_own:  # a site's no to its figures ends its part as well
            given += [None for silo in self.roster if self._kept_back.get((silo, 0)) == DECLINED
                      and not self._arrived(silo, self._last_kind, 0)[1]]  # fmt: skip
        known = sorted(at for at in given if at is not None)
        needed = self._plan.quorum
        reached = known[needed - 1] if len(known) >= needed else None
        return answers.Quorum(needed=needed, of=len(self.roster), given=len(given), reached_seconds=reached)

    def awaited(self) -> tuple[answers.Awaited, ...]:
        """Return who has something open; of a round that is over, its evaluation."""
        return tuple(
            answers.Awaited(silo=silo, phase=phase.phase, step=phase.step)
            for silo, phases in self._phases.items()
            for phase in phases
            if phase.state == "open" and phase.phase != "others"
        )

    def filled_in(self, row: answers.SiloInRound) -> answers.SiloInRound:
        """Return a silo's row with what this round's records say of it."""
        mine = [upload for key, upload in self._uploads.items() if key[0] == row.silo]
        update = self._uploads.get((row.silo, self._update_kind, 0))
        return replace(
            row,
            state=self._state_of(row.silo),
            phases=self._phases.get(row.silo, ()),
            straggler=self._stragglers.get(row.silo),
            received_bytes=sum(upload.payload_bytes for upload in mine),
            received_messages=len(mine),
            update_norm=update.norm if update is not None else None,
            update_digest=update.digest if update is not None else "",
        )

    def _state_of(self, silo: str) -> str:
        if silo not in self.roster:
            return "not in it"
        said_no = self._kept_back.get((silo, 0))
        if not self._open:
            verdict = "accepted" if silo in self._participants else "absent"
            verdict = str(self._verdicts.get(silo, verdict)).replace("_", " ")
            return said_no or verdict if verdict == "absent" else verdict
        if said_no:
            return said_no
        now = next((phase for phase in self._phases[silo] if phase.state == "open"), None)
        if now is None or now.phase == "others":
            return "waits"
        if (word := self._standings.get(silo)) in ("silent", "refused"):
            return word
        # nobody here is told whether it trains or waits for its people (B6)
        return {"sign": "signing", "update": "awaited"}.get(now.phase, f"step {now.step}")


def _by_step(item: tuple[str, Any]) -> int:
    return int(item[0])


def _signed(marks: Sequence[Mark], opened_at: str) -> dict[str, float]:
    """Return when the round began at each silo: the first `round.agreed` that has its signature."""
    seconds: dict[str, float] = {}
    try:
        opened = datetime.fromisoformat(opened_at).timestamp()
    except ValueError:
        return seconds
    for mark in marks:
        if mark.event == "round.agreed":
            for silo in mark.detail:
                seconds.setdefault(silo, max(round(mark.at - opened, 3), 0.0))
    return seconds


def _kept_back(session: Session, run: str, number: int) -> dict[tuple[str, int], str]:
    """(silo, step) of what sites said they do not send in a round; step 0 is the rest of it. The word for it is
    `declined` where a message was kept back, by whomever and for whatever reason: that is all that a site says (B6,
    T18); else the silo `sits out`, or said with a code that it does not train on the round's adapter (T52)."""
    query = select(db.Transition.event).where(
        db.Transition.run == run, db.Transition.event.like('%"event":"SiloAbstained"%')
    )
    notes = [json.loads(text) for text in session.scalars(query)]
    words: dict[tuple[str, int], str] = {}
    for each in notes:
        place = str(each["silo"]), int(each["step"])
        if each.get("round") == number and words.get(place) != DECLINED:
            words[place] = DECLINED if each.get("declined") else "sits out"
    for silo, codes in db.adapters_refused(session, run, number).items():
        if words.get((silo, 0)) == "sits out":
            words[silo, 0] = _ADAPTER_WORDS[codes[-1]]
    return words


def _stragglers(phases: Mapping[str, Sequence[answers.Phase]], elapsed: float | None) -> dict[str, answers.Straggler]:
    """Return silos that took, or take, more than `STRAGGLER_RATIO` times the median of those who are through with the
    same phase; the worst phase of each."""
    through: dict[tuple[str, int], dict[str, float]] = {}
    for silo, entries in phases.items():
        for entry in entries:
            if entry.seconds is not None and entry.phase != "others":
                through.setdefault((entry.phase, entry.step), {})[silo] = entry.seconds
    found: dict[str, answers.Straggler] = {}
    for silo, entries in phases.items():
        for entry in entries:
            took = entry.seconds
            if entry.state == "open" and elapsed is not None:
                took = max(elapsed - (entry.from_seconds or 0.0), 0.0)
            done = through.get((entry.phase, entry.step), {})
            others = [seconds for name, seconds in done.items() if name != silo]
            if took is None or entry.phase == "others" or len(others) < OTHERS_MIN:
                continue
            usual = median(others)
            if took > STRAGGLER_RATIO * usual and took - usual >= DIFFERENCE_SECONDS_MIN:
                worst = found.get(silo)
                if worst is None or took - usual > worst.seconds - worst.median_seconds:
                    found[silo] = answers.Straggler(
                        phase=entry.phase, step=entry.step, seconds=round(took, 3), median_seconds=round(usual, 3)
                    )
    return found


def _silos(
    session: Session, run: db.Run, plan: Plan | None, row: db.Round | None, facts: _Facts | None, live: Live
) -> tuple[answers.SiloInRound, ...]:
    names = plan.silos if plan else tuple(json.loads(run.request).get("silos") or ())
    members = {member.silo: member for member in session.scalars(select(db.Member))}
    declined = Counter(
        session.scalars(select(db.Figure.silo).where(db.Figure.run == run.name, db.Figure.name == db.PLAN_DECLINED))
    )
    levels, standings = db.isolation_of(session, run.name), live.standings
    rows = []
    for silo in names or tuple(members):
        member = members.get(silo)
        hello = json.loads(member.hello) if member else {}
        last_seen, at_round, at_step = live.seen.get(silo, ("", 0, 0))
        accepted = silo in levels or bool(facts and silo in facts.roster)
        plan_word = "declined" if declined[silo] else "accepted" if accepted else "not yet"
        row_of_silo = answers.filled(
            answers.SiloInRound,
            silo=silo,  # says that it declined, and never why (B6)
            joined=standings.get(silo) or (member.state if member else "absent"),
            joined_at=member.since if member else None,
            plan=plan_word,  # nobody keeps when
            last_seen=last_seen or None,
            step=at_step if row is not None and at_round == row.number else None,
            isolation=hello.get("isolation", ""),
            code=hello.get("code_sha256", ""),
            policy=hello.get("policy_sha256", ""),
            state="no round yet",
            update_digest="",
            absent=frozenset({"round"}),
        )
        rows.append(facts.filled_in(row_of_silo) if facts else row_of_silo)
    return tuple(rows)


# ---- figures by round --------------------------------------------------------------------------------------------

PASS_RATES = ("pass_at_1", "pass_at_1_greedy")
POINTS_MAX = 1_000  # of one series, the newest
NOT_RECORDED = (
    "cosine between updates: nobody computes it",
    "reward, KL, tokens: figures of a trainer stay at its site",
    "the number of held-out prompts a silo answered: the plan's number is the most it can be",
)


def curves_answer(session: Session, arguments: Mapping[str, Any]) -> answers.Curves:
    """Return what the query `curves` answers. Raises UsageError: an argument; NotFoundError: no such run."""
    query = QueryArguments(arguments, "run", "names", "x")
    x = query.text("x", among=("round", "step")) or "round"
    names = frozenset(name.strip() for name in query.text("names").split(",") if name.strip())
    run = run_row(session, query.text("run"))
    plan = plan_from_canonical(run.plan) if run is not None and run.plan else None
    steps = plan.local_steps if plan and x == "step" else 1
    by_series = {(name, silo): points for name, silo, points in _series(session, run, plan)} if run else {}
    known = sorted({name for name, _ in by_series})
    series = tuple(
        answers.CurveSeries(
            name=name,
            silo=silo,
            unit=unit_of(name),
            source="computed" if name == "gap" else "released",
            points=tuple(replace(point, x=point.round * steps) for point in points[-POINTS_MAX:]),
        )
        for (name, silo), points in by_series.items()
        if not names or name in names
    )
    return answers.Curves(
        party="coordinator",
        run=run.name if run else "",
        run_state=run.state if run else "",
        runs=tuple(session.scalars(select(db.Run.name).order_by(db.Run.ordinal.desc()).limit(100))),
        x=x,
        x_max=(plan.rounds if plan else 0) * steps,
        names=tuple(known),
        series=series,
        baseline=_baseline(by_series, names),
        not_recorded=NOT_RECORDED,
    )


def _series(session: Session, run: db.Run, plan: Plan | None) -> Iterator[tuple[str, str, list[answers.CurvePoint]]]:
    count = plan.evaluation.prompts if plan else 0
    rates: dict[tuple[str, str], dict[int, float]] = {}
    query = select(db.Figure).where(db.Figure.run == run.name, db.Figure.name.like("metric.%")).order_by(db.Figure.id)
    for figure in session.scalars(query):
        fields = json.loads(figure.fields)
        if not fields["topic"]:
            name = figure.name.removeprefix("metric.")
            rates.setdefault((name, figure.silo), {})[figure.round] = float(fields["value"])
    for (name, silo), by_round in sorted(rates.items()):
        interval = name in PASS_RATES and count > 0
        yield (
            name,
            silo,
            [_point(number, value, count if interval else None) for number, value in sorted(by_round.items())],
        )
    gaps = _gaps({silo: by_round for (name, silo), by_round in rates.items() if name == "pass_at_1"})
    if gaps:
        yield "gap", "", gaps
    norms: dict[str, dict[int, float]] = {}
    uploads = select(db.Upload).where(db.Upload.run == run.name, db.Upload.norm > 0).order_by(db.Upload.round)
    for upload in session.scalars(uploads):
        norms.setdefault(upload.silo, {})[upload.round] = upload.norm
    for silo, by_round in sorted(norms.items()):
        yield "update_norm", silo, [_point(number, value, None) for number, value in by_round.items()]


def _point(number: int, value: float, count: int | None, silos: int | None = None) -> answers.CurvePoint:
    """Return a round's value; `n_exact` is None where no number belongs to the figure."""
    low, high = interval_of(value, count)
    return answers.filled(
        answers.CurvePoint,
        round=number,
        value=value,
        n=count,
        n_exact=None if count is None else False,
        low=low,
        high=high,
        silos=silos,
        absent=frozenset({"at"}),
    )


def _gaps(rates: Mapping[str, Mapping[int, float]]) -> list[answers.CurvePoint]:
    """Best silo less worst one, of rounds that at least two silos evaluated; how many they were stands beside it."""
    points = []
    for number in sorted({number for by_round in rates.values() for number in by_round}):
        values = [by_round[number] for by_round in rates.values() if number in by_round]
        if len(values) > 1:
            points.append(_point(number, round(max(values) - min(values), 6), None, len(values)))
    return points


def _baseline(
    by_series: Mapping[tuple[str, str], list[answers.CurvePoint]], names: frozenset[str]
) -> tuple[answers.BaselineRow, ...]:
    """Return what silos measured before the first round, on the model that the run began with."""
    return tuple(
        answers.BaselineRow(name=name, silo=silo, value=point.value)
        for (name, silo), points in by_series.items()
        for point in points[:1]
        if name in PASS_RATES and point.round == 0 and (not names or name in names)
    )

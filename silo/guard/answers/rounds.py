"""This silo's knowledge of one round, for its own people: its phases with their durations, and of other silos only what
the coordinator said.

Read from this silo's audit log (`fedsilo.audit.index`) and its ledger. A phase ends with the record that says so:
training with the decision on what it made, approval with the decision on what people approved, with a person's no or
with the end of the hold, pooling with the donors that came. A silo that kept its update in reads in its own row whether
its people rejected it or a rule refused it, with the codes; the coordinator was told the one word `declined` (B6). Of
other silos there are the name, whether they signed the round's transcript, and the verdict of its end; everything else
about them is hidden here, and null: it is never 0.

Does not show: what the coordinator has not said, such as who is late.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsilo.audit.index import LogIndex, Mark
from fedsilo.control.answers import Deadline, Phase, Quorum, Round, RoundRow, SiloInOwnRound, filled, no_run_yet
from fedsilo.control.server import QueryArguments
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import NotFoundError
from fedsilo.protocol.plan import Plan, digests_of, parameters_of, plan_from_canonical
from silo.guard.answers.limits import FIGURES
from silo.guard.decisions import RunView
from silo.guard.ledger import Ledger

ROUNDS_LISTED = 200  # the newest
NOT_READ_YET = "the log is not read to its end yet"
HIDDEN = ("quorum.given", "awaited", "silos.phases", "silos.step", "silos.received_bytes", "silos.last_seen",
          "silos.code", "silos.policy")  # fmt: skip
_OPENED, _AGREED, _RESULT = ("ingress.decision", "round.open"), "round.agreed", "round.result"
_WORD_ON_UPDATE = ("egress.decision", "egress.sent", "approval.deny", "approval.expire")  # the newest one holds
_ENDED_HOLD = {"approval.deny": "rejected", "approval.expire": "missed"}  # without a yes


class RoundView:
    """The query `round` of a guard.

    Args:
        silo: this one's name.
        ledger: read only.
        view: of the run, as the gate has it.
        policy: digest of what is in force.
    """

    def __init__(
        self,
        silo: Callable[[], str],
        ledger: Ledger,
        index: LogIndex,
        *,
        view: Callable[[], RunView],
        policy: Callable[[], str],
        now_seconds: Callable[[], float],
    ) -> None:
        self._silo = silo
        self._ledger = ledger
        self._index = index
        self._view = view
        self._policy = policy
        self._now = now_seconds

    def round(self, arguments: Mapping[str, Any]) -> Round:
        """Return a round; by default the newest, of the newest run. Raises UsageError, NotFoundError."""
        asked = QueryArguments(arguments, "run", "round")
        name, number = asked.text("run"), asked.number("round", least=1)
        run = name or self._ledger.last_run()[0]
        if not run:
            return no_run_yet("silo")
        state = self._ledger.run_state(run)
        if not state:
            raise NotFoundError(f"this silo took part in no run {run!r}", hint="silo ledger show")
        text, view = self._ledger.plan_of(run), self._view()
        plan = plan_from_canonical(text) if text else None
        rounds = [
            each for each in self._index.rounds_of(run) if _at(self._index.marks(run, each), *_OPENED) is not None
        ]
        if number is not None and number not in rounds:
            if not self._index.complete:
                raise NotFoundError(
                    f"round {number} of run {run} is not in the part of this silo's log that was read so far",
                    hint="ask again: each question reads on",
                    code="NOT_READ_YET",
                )
            raise NotFoundError(f"this silo knows of no round {number} of run {run}", hint="silo round")
        here = number or (rounds[-1] if rounds else 0)
        marks = self._index.marks(run, here) if here else ()
        running = state == "running" and view.run == run and view.round == here
        return self._answer(run, state, plan, rounds[-ROUNDS_LISTED:], here, marks, running)

    def _answer(
        self, run: str, state: str, plan: Plan | None, rounds: list[int], number: int, marks: Sequence[Mark],
        running: bool,
    ) -> Round:  # fmt: skip
        opened, closed = _at(marks, *_OPENED), _at(marks, _RESULT)
        stored = (self._ledger.transcript(run, number) if number else None) or {}
        transcript = _transcript_of(stored)
        by_step, evaluates = plan is None or plan.exchange == "step", number in self._view().evaluated
        phases = _phases(marks, opened, running=running, evaluates=evaluates, by_step=by_step)
        planned = plan.round_deadline_seconds if plan else 0
        ended = any(mark.event == _RESULT for mark in marks)
        return Round(
            party="silo",
            run=run,
            run_state=state,
            method=plan.method if plan else "",
            round=number,
            rounds_planned=plan.rounds if plan else 0,
            rounds=tuple(self._listed(run, each, running=running and each == number) for each in rounds),
            state=self._state_word(number, running=running, ended=ended),
            opened_at=_utc(opened),
            closed_at=_utc(closed),
            elapsed_seconds=_between(opened, self._now() if running else closed),
            closed_seconds=_between(opened, closed),
            paused=False,
            quorum=filled(Quorum, needed=plan.quorum if plan else None, of=len(plan.silos) if plan else None),
            deadlines=(filled(Deadline, name=f"round/{number}", for_="round", at_seconds=planned),)
            if plan and number
            else (),
            awaited=(),
            silos=self._silos(plan, marks, transcript, phases, number),
            parameters=parameters_of(plan) if plan else {},
            digests=(digests_of(plan) if plan else {})
            | {
                "base_adapter": str(transcript.get("base_digest", "")),
                "adapter": "",
                "policy": self._policy(),
                "transcript": sha256_hex(str(stored["transcript"]).encode()) if stored else "",
            },
            hidden=HIDDEN,
        )

    def _state_word(self, number: int, *, running: bool, ended: bool) -> str:
        if not self._index.complete:
            return NOT_READ_YET
        if not number:
            return "no round yet"
        return "closed" if ended else "open" if running else "left"

    def _listed(self, run: str, number: int, *, running: bool) -> RoundRow:
        marks = self._index.marks(run, number)
        opened, closed = _at(marks, *_OPENED), _at(marks, _RESULT)
        return RoundRow(
            round=number,
            state="closed" if closed is not None else "open" if running else "left",
            opened_at=_utc(opened),
            closed_at=_utc(closed),
            seconds=_between(opened, closed),
            participants=None,
        )

    def _silos(
        self,
        plan: Plan | None,
        marks: Sequence[Mark],
        transcript: Mapping[str, Any],
        phases: tuple[Phase, ...],
        number: int,
    ) -> tuple[SiloInOwnRound, ...]:
        own = self._silo()
        signed = {silo for mark in marks if mark.event == _AGREED for silo in mark.detail}
        verdicts = {silo: word for mark in marks if mark.event == _RESULT for silo, word in mark.detail.items()}
        named = tuple(transcript.get("silos", ())) or (plan.silos if plan else ())
        rows = []
        for silo in dict.fromkeys((own, *named)):
            verdict = verdicts.get(silo, "").replace("_", " ")
            word = verdict or ("signed" if silo in signed else "named" if silo in named else "not in it")
            if silo != own:
                rows.append(filled(SiloInOwnRound, silo=silo, state=word, round=number))
                continue
            why = None
            if not verdict and (now := next((each.phase for each in phases if each.state == "open"), None)):
                word = {"sign": "signing", "others": "waits"}.get(now, now)
            if verdict != "accepted" and (not_sent := _not_sent(marks)) is not None:
                word, why = not_sent
            step = self._view().open_step or None
            rows.append(
                filled(
                    SiloInOwnRound, silo=silo, own=True, state=word, why=why, round=number, phases=phases, step=step,
                    policy=self._policy(),
                )
            )  # fmt: skip
        return tuple(rows)


# ---- phases ----------------------------------------------------------------------------------------


def _phases(
    marks: Sequence[Mark], opened: float | None, *, running: bool, evaluates: bool, by_step: bool
) -> tuple[Phase, ...]:
    """Return consecutive stretches of time, each named by the record that ends it; the last is open while the round is.

    Args:
        marks: of the round.
        opened: when.
        running: the round is open.
        evaluates: this silo evaluates after the round.
        by_step: answers leave, and donors come, at each public step; else with the update and the opening.
    """
    phases: list[Phase] = []
    if opened is None:
        return ()
    last, held = opened, set[tuple[str, int]]()  # what waits for people: kind and step
    for mark in sorted(marks, key=lambda each: each.at):
        place = mark.kind, mark.step
        word = _word_of(mark, held=place in held, by_step=by_step)
        if mark.event == "egress.decision" and mark.verdict == "hold":
            held.add(place)
        elif mark.event == "egress.decision" or mark.event in _ENDED_HOLD:
            held.discard(place)
        if word is None:
            continue
        denied = mark.event == "egress.decision" and mark.verdict == "deny"
        state = _ENDED_HOLD.get(mark.event, "denied" if denied else "done")
        if word == "others" and not any(each.phase == "update" for each in phases):
            word, state = "update", "missed"  # the round ended before this silo was through
        phases.append(_stretch(word, mark.step, state, last - opened, mark.at - opened))
        last = max(last, mark.at)
    if running and (word := _next_word(phases, held=bool(held), evaluates=evaluates)):
        phases.append(_stretch(word, 0, "open", last - opened, None))
    return tuple(phases)


def _word_of(mark: Mark, *, held: bool, by_step: bool) -> str | None:
    match mark.event, mark.kind:
        case "round.agreed", _:
            return "sign"
        case "round.result", _:
            return "others"
        case "ingress.decision", "public.donors" if _let_in(mark):
            return "pool" if by_step else None
        case "egress.decision" | "approval.deny" | "approval.expire", _ if held:
            return "approval"
        case "egress.decision", "public.responses":
            return "train" if by_step else None
        case "egress.decision", "metrics.eval":
            return "eval"
        case "egress.decision", _:
            return "update"
    return None


def _not_sent(marks: Sequence[Mark]) -> tuple[str, str] | None:
    """Of an update that did not leave: `rejected` by a person or `refused` by a rule, and the codes of that; None where
    it left, or nothing was made yet, or a hold ran out, which nobody answered. A public step that was kept in is no
    word on the round."""
    ends = [mark for mark in marks if mark.event in _WORD_ON_UPDATE and mark.kind not in ("public.responses", *FIGURES)]
    if not ends:
        return None
    newest = ends[-1]
    if newest.event == "egress.decision" and newest.verdict == "deny":
        return "refused", ", ".join(newest.reasons)
    return ("rejected", ", ".join(newest.reasons)) if newest.event == "approval.deny" else None


def _next_word(phases: Sequence[Phase], *, held: bool, evaluates: bool) -> str:
    """Return what this silo does once everything on record is over."""
    done = [each.phase for each in phases]
    if held:
        return "approval"
    if not done:
        return "sign"
    if "others" in done or any(each.state == "missed" for each in phases):
        return "eval" if evaluates and "eval" not in done else ""
    return "others" if "update" in done else "train"


def _stretch(word: str, step: int, state: str, start: float, end: float | None) -> Phase:
    start = round(max(start, 0.0), 3)
    return Phase(
        phase=word,
        step=step,
        state=state,
        from_seconds=start,
        to_seconds=None if end is None else round(max(end, start), 3),
        seconds=None if end is None else round(max(end - start, 0.0), 3),
        source="local",
    )


def _at(marks: Sequence[Mark], event: str, kind: str = "") -> float | None:
    """Return the time of the first such record; what was not let in did not happen."""
    return next(
        (mark.at for mark in marks if mark.event == event and (not kind or mark.kind == kind) and _let_in(mark)), None
    )


def _let_in(mark: Mark) -> bool:
    return mark.event != "ingress.decision" or mark.verdict == "allow"


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else utc(seconds)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(end - start, 0.0), 3)


def _transcript_of(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the round's transcript from its row in the ledger (canonical JSON)."""
    try:
        return dict(json.loads(stored["transcript"])) if stored else {}
    except (KeyError, ValueError, TypeError):
        return {}

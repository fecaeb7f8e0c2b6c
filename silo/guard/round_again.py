"""A guard that was killed in a round goes on inside it.

    what the method is told of the open round  ->  in the ledger, before the method hears of it
    killed, started again                      ->  the trainer says where its own kept state stands
    planned                                    ->  the method is told the same again: tasks that the trainer has behind
                                                   it are not given again, what was offered is not offered again

The method's half is pure, the rows of each step are drawn again from the site's secret (`silo.sampling`), and the
trainer's answers follow from seeds: so the round comes out as it would have, and every message leaves once. Where the
trainer kept nothing, it does the round over, with the same result. Figures that were offered once are neither measured
nor offered again, in whichever round or process the method asks for them next; unless a rule denied them, of which the
ledger has no trace: then they are measured, and denied, again.

A round that this silo left (an orderly stop, a refused adapter, a transcript that differs) is not gone on with: the
coordinator was told so. Nor is one that was agreed on under another policy than the restart's, or other sets.
What it does not stop: an outage longer than the round's deadline; that round was closed.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.method import (
    Evaluate,
    GeneratePublic,
    LoadAdapter,
    MessageArrived,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from fedsilo.protocol.rounds import EVALUATION
from fedsilo.protocol.services import INBOUND_KINDS
from fedsilo.protocol.transcript import transcript_from_canonical
from silo.guard.gate import Gate
from silo.guard.ledger import Ledger
from silo.guard.messages import Inbound, parsed
from silo.guard.startup import Site
from silo.guard.transcripts import Waiting

_PLACES = {LoadAdapter: 0, PrivateStep: 1, GeneratePublic: 1, PublicStep: 2}  # in a step
_PLACES_BY_NAME = {kind.__name__: place for kind, place in _PLACES.items()}


class RoundAgain:
    """Args:
        site: what the round was agreed on, but for the policy.
        gate: knows the policy in force.
        ledger: keeps what the method was told.

    Attributes:
        waiting: what the method is to be told again, once the trainer is ready for the plan.
    """

    def __init__(self, site: Site, gate: Gate, ledger: Ledger) -> None:
        self._site, self._gate = site, gate
        self._ledger = ledger
        self._stands: tuple[int, int, int] | None = None  # round, step and place of the trainer
        self._passed_over: set[tuple[str, int, int]] = set()
        self._run, self._round = "", 0
        self.waiting: list[MessageArrived] = []

    @property
    def begun(self) -> bool:
        """Whether the opening of a round is to be told again, so that the trainer goes on from what it kept."""
        return any(one.kind == "round.open" for one in self.waiting)

    # ---- before a kill -----------------------------------------------------------------------------

    def keep_opening(self, item: Inbound, waits: Waiting | None) -> None:
        """Where an item may let a round begin: its opening, before the transcript says that it has begun."""
        if waits is not None and isinstance(item.body, pb.RoundAgreed):
            self.keep(waits.opening)

    def keep(self, told: Inbound) -> None:
        """The method is about to be told this."""
        if told.kind == "run.end" or not told.round:
            return
        kept = {"kind": told.kind, "round": told.round, "step": told.step, "digest": told.digest}
        kept["payload"] = bytes(told.payload).hex()
        opens = told.kind == "round.open"
        self._ledger.keep_of_round(told.run, kept, opens=opens)
        if opens and (told.run, told.round) != (self._run, self._round):
            self._forget()

    def leave(self) -> None:
        """The round goes on without this silo."""
        self._forget()
        self._ledger.forget_round()

    def _forget(self) -> None:
        self._stands, self._run, self._round, self.waiting = None, "", 0, []
        self._passed_over.clear()

    # ---- after it ----------------------------------------------------------------------------------

    def find(self, run: str, round_number: int) -> list[MessageArrived]:
        """What the method was told of a round that this silo was in; it waits to be told again."""
        kept = self._ledger.kept_of_round(run, round_number)
        if any(one["kind"] == "round.open" for one in kept) and not self._is_agreed(run, round_number):
            if self._waits(run, round_number):
                # killed as it was agreed on: that comes again, and what came before it (donors) does not
                kept = [one for one in kept if one["kind"] != "round.open"]
            else:
                self.leave()
                kept = []
        self._run, self._round = (run, round_number) if kept else ("", 0)
        self.waiting = [
            MessageArrived(
                "", one["kind"], one["round"], one["step"],
                parsed(one["kind"], bytes.fromhex(one["payload"]), INBOUND_KINDS)[0], one["digest"],
            )
            for one in kept
        ]  # fmt: skip
        return self.waiting

    def _waits(self, run: str, round_number: int) -> bool:
        """Whether the transcript of the round still waits for signatures, as far as this site knows."""
        signed = self._ledger.transcript(run, round_number)
        return bool(signed and signed["opening"] and not signed.get("agreed") and not signed["others"])

    def _is_agreed(self, run: str, round_number: int) -> bool:
        """Whether the round had begun, and what it was agreed on is what this site has after the restart (T20)."""
        signed = self._ledger.transcript(run, round_number)
        if signed is None or not signed.get("agreed") or signed["others"]:
            return False
        transcript, site = transcript_from_canonical(signed["transcript"]), self._site
        named = (transcript.policies.get(site.config.silo), transcript.schema_sha256, transcript.public_set_sha256)
        return named == (self._gate.policy.digest, site.schema.digest, site.public.sha256)

    def trainer_stands(self, resumed: object) -> None:
        """Where the trainer's kept state stands, as it says: {task, round, step}, or None for the run's beginning."""
        self._stands = None
        if isinstance(resumed, Mapping) and resumed.get("round") == self._round:
            place, step = _PLACES_BY_NAME.get(resumed.get("task", "")), resumed.get("step")
            if place is not None and isinstance(step, int):
                self._stands = (self._round, step, place)

    def has_behind(self, task: TrainerTask) -> bool:
        """Whether the trainer has done this task of the open round already, and is not to do it again.

        Of answers to public prompts only if what became of them is known too, or the step that uses them is done; else
        the trainer is asked for them again, and gives the same.
        """
        if isinstance(task, Evaluate):
            return bool(self._ledger.became_of(EVALUATION, self._gate.view.run, task.round, 0))
        place = _PLACES.get(type(task))
        if self._stands is None or place is None or task.round != self._round:
            return False
        here, stands = (task.round, getattr(task, "step", 0), place), self._stands
        if isinstance(task, GeneratePublic) and task.offer != "none" and here < stands:
            self._passed_over.add(("public.responses", task.round, task.step))
        return here < stands or (here == stands and not isinstance(task, GeneratePublic))

    def became_of(self, kind: str, run: str, round_number: int, step: int) -> str:
        """As the ledger's, of what the open round offered before the kill, and of figures; empty: it was not."""
        if kind != EVALUATION and (run, round_number) != (self._run, self._round):
            return ""
        found = self._ledger.became_of(kind, run, round_number, step)
        return found or ("denied" if (kind, round_number, step) in self._passed_over else "")

"""Both halves of a method played against each other in memory: no sockets, no torch, no clock.

Messages wait in one bag per receiver; `choose` picks what happens next, so a test can play any interleaving. The
trainer is played by `answer`: it says how many of the K answers to a public prompt a silo gets right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fedsilo.protocol import method as m
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Lora, Plan
from fedsilo.protocol.tasks import AnswerAhead, Evaluate, EvaluateOwn, ExportDelta, GeneratePublic, TrainerTask

DIGEST = "0" * 64


def plan_of(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "run": "run-1",
        "federation": "fed",
        "method": "pubswap",
        "silos": ("a", "b", "c"),
        "rounds": 2,
        "local_steps": 4,
        "prompts_per_step": 2,
        "seed": 7,
        "lora": Lora(rank=4, alpha=8.0, schema_sha256=DIGEST),
        "base_model_sha256": DIGEST,
        "tokenizer_sha256": DIGEST,
        "template_sha256": DIGEST,
        "public_set_sha256": DIGEST,
        "public_set_rows": 9,
        "held_out_sha256": DIGEST,
    }
    return Plan.model_validate(fields | changes)


def correct_by_name(silo: str, index: int) -> int:
    """Silo a never knows, b knows half, c knows all."""
    return {"a": 0, "b": 4, "c": 8}.get(silo, 2)


@dataclass
class PaperFederation:
    """Attributes: offered (kinds by silo), trained (tasks by silo, in order), outcome of the run, notes."""

    plan: Plan
    method: m.Method
    choose: Callable[[int], int]
    answer: Callable[[str, int], int] = correct_by_name
    deny: Callable[[str, str, int, int], str] = lambda silo, kind, round_number, step: "sent"
    gone: frozenset[str] = frozenset()
    offered: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    trained: dict[str, list[TrainerTask]] = field(default_factory=dict)
    commits: list[m.Commit] = field(default_factory=list)
    closed: list[m.CloseRound] = field(default_factory=list)
    deadlines: list[tuple[float, str, str]] = field(default_factory=list)  # (due, silo or "", name)
    now_seconds: float = 0.0
    notes: list[m.Note] = field(default_factory=list)
    outcome: m.FinishRun | None = None

    def __post_init__(self) -> None:
        self.coordinator_state = self.method.coordinator.start(self.plan, "coordinator")
        self.silo_states = {silo: self.method.silo.start(self.plan, silo) for silo in self.plan.silos}
        self.offered = {silo: [] for silo in self.plan.silos}
        self.trained = {silo: [] for silo in self.plan.silos}
        # To each party its messages in order; between parties, any order.
        self.to_silo: dict[str, deque[m.SiloEvent]] = {silo: deque() for silo in self.plan.silos}
        self.from_silo: dict[str, deque[m.CoordinatorEvent]] = {silo: deque() for silo in self.plan.silos}
        self._coordinator(m.RunStarted(self.plan.silos, "digest-0"))

    def run(self, events_max: int = 5000) -> None:
        for _ in range(events_max):
            ready = [("silo", silo) for silo, queue in self.to_silo.items() if queue and silo not in self.gone]
            ready += [("coordinator", silo) for silo, queue in self.from_silo.items() if queue]
            if not ready:
                if self.outcome is not None or not self.deadlines:
                    return
                # Nothing moves until the next deadline, so the hand clock jumps there.
                due = min(self.deadlines)
                self.deadlines.remove(due)
                self.now_seconds, silo, name = due
                if silo:
                    self.to_silo[silo].append(m.DeadlinePassed(name))
                else:
                    self._coordinator(m.DeadlinePassed(name))
                continue
            party, silo = ready[self.choose(len(ready))]
            if party == "silo":
                self._silo(silo, self.to_silo[silo].popleft())
            else:
                self._coordinator(self.from_silo[silo].popleft())
        raise AssertionError("the run does not end")

    def _coordinator(self, event: m.CoordinatorEvent) -> None:
        self.coordinator_state, actions = self.method.coordinator.on_event(self.coordinator_state, event)
        # An opening is taken up when its round is agreed on, which comes behind all that went out with the opening.
        opening = [action for action in actions if isinstance(action, m.Send) and action.kind == "round.open"]
        for action in (*(action for action in actions if action not in opening), *opening):
            match action:
                case m.Send(silo, kind, round_number, step, body):
                    assert silo in self.plan.silos
                    self.to_silo[silo].append(m.MessageArrived("", kind, round_number, step, body, ""))
                case m.Commit(round_number):
                    self.commits.append(action)
                    self._coordinator(m.Committed(round_number, {m.EVERYBODY: f"digest-{round_number}"}))
                case m.CloseRound():
                    self.closed.append(action)
                case m.StartDeadline(name, seconds):
                    self.deadlines.append((self.now_seconds + seconds, "", name))
                case m.FinishRun():
                    assert self.outcome is None, "a run ends once"
                    self.outcome = action
                case m.Note():
                    self.notes.append(action)

    def _silo(self, silo: str, event: m.SiloEvent) -> None:
        self.silo_states[silo], actions = self.method.silo.on_event(self.silo_states[silo], event)
        for action in actions:
            match action:
                case m.Train(task):
                    self.trained[silo].append(task)
                    self.to_silo[silo].appendleft(m.TaskDone(task, self._body(silo, task)))
                case m.Offer(kind, round_number, step, body):
                    outcome = self.deny(silo, kind, round_number, step)
                    if outcome == "sent":
                        self.offered[silo].append((kind, round_number, step))
                        self.from_silo[silo].append(
                            m.MessageArrived(silo, kind, round_number, step, body, f"{silo}/{round_number}")
                        )
                    else:
                        self.from_silo[silo].append(m.SiloAbstained(silo, round_number, step))
                    self.to_silo[silo].appendleft(m.OfferSettled(kind, round_number, step, outcome))
                case m.StartDeadline(name, seconds):
                    self.deadlines.append((self.now_seconds + seconds, silo, name))
                case m.Fetch():
                    pass

    def _body(self, silo: str, task: TrainerTask) -> pb.PublicResponses | pb.Factors | pb.MetricsEval | None:
        match task:
            case GeneratePublic(_, _, indices, offer):
                return self._answers(silo, indices, offer)
            case AnswerAhead(_, _, indices):
                return self._answers(silo, indices, "correct")
            case ExportDelta():
                return pb.Factors()
            case Evaluate() | EvaluateOwn():
                return pb.MetricsEval()
        return None

    def _answers(self, silo: str, indices: tuple[int, ...], offer: str) -> pb.PublicResponses:
        body = pb.PublicResponses()
        for index in indices:
            count = self.plan.samples_per_prompt if offer == "all" else self.answer(silo, index)
            row = body.prompts.add(prompt_index=index, samples=self.plan.samples_per_prompt)
            row.responses.extend(pb.Response(text=f"{silo}:{index}:{n}") for n in range(count))
        return body

"""One cell of an experiment: a whole federation in this process.

    sites (demo.sites)  ->  Coordinator (its driver, tables, database, log)   \
                        ->  a guard for each silo (gate, ledger, log, policy)  }  LineInMemory, TrainerHere, SharedTime
                        ->  a trainer session for each silo                   /

Every part is the one that the daemons run: the same certificates, policies, gate decisions, signed envelopes, tables,
audit logs and training steps. So at equal seeds a cell ends with the bits of the run over four daemons. Three things
are not there, and every table says so: sockets, the walls around a trainer, and the time that both take. This module
is the one place where guard and trainer share a process, and no party imports it.

Does not show: anything about time-outs, lost connections or what a trainer could do to its guard.
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from certs.identity import PeerIdentity
from coordinator.config import load_config as load_coordinator_config
from coordinator.driver import Driver
from coordinator.main import Coordinator, check
from fedsilo.audit.log import sent_by_kind
from fedsilo.audit.reader import typed_records
from fedsilo.demo.sites import COORDINATOR_PERSON, Site, Sites, run_text
from fedsilo.files.task_files import Task, read_tasks
from fedsilo.grading import grade
from fedsilo.grading.answers import AnswerGrading
from fedsilo.grading.verdict import Verdict
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import FedSiloError, OperationError
from fedsilo.protocol.tasks import Evaluate, EvaluateOwn, PrivateStep
from silo.config import load_config as load_silo_config
from silo.guard.decisions import Judge
from silo.guard.loop import Event, Guard
from silo.guard.main import Clocks, guard_of
from silo.guard.messages import Reply, Sink
from silo.guard.screens import Screens
from silo.guard.site import Site as GuardSite
from silo.guard.site import load_site_parts
from silo.guard.trainer_process.supervisor import TrainerHandle, TrainerSaid
from silo.link import LinkMessage
from silo.trainer.data import Mark, load_codec
from silo.trainer.run import Done, DonorLogp, Material
from silo.trainer.session import Session
from silo.trainer.tasks import task_from_fields
from silo.trainer.worker import begin, done_message, failed_message, load_model

EXCHANGE_SECONDS = 0.1  # of the shared time that one message and its answer take
IDLE_TURNS_MAX = 20_000  # of all silos in a row, without a message but polls


@dataclass
class SharedTime:
    """The time of all parties: it goes on with each exchange, and where a guard waits, to the end of its wait."""

    began: float
    seconds: float = 0.0

    def wall(self) -> float:
        return self.began + self.seconds

    def monotonic(self) -> float:
        return self.seconds


class Events(queue.Queue[Event]):
    """A guard's events. Waiting for one moves the shared time on."""

    def __init__(self, shared: SharedTime) -> None:
        super().__init__()
        self._time = shared

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        if self.empty():
            self._time.seconds += timeout or 0.0
        return super().get(block=False)


@dataclass
class LineInMemory:
    """A `Channel` to a coordinator in the same process. What crosses is bytes, and the answer is too."""

    driver: Driver
    peer: PeerIdentity
    shared: SharedTime
    messages: int = 0  # other than polls that brought nothing and were answered with nothing

    def exchange(
        self,
        envelope: pb.Envelope,
        payload: codec.Buffer,
        *,
        wait_seconds: float,
        reply_bytes_max: int,
        into: Sink | None = None,
    ) -> Reply:
        del wait_seconds  # nobody else does anything while this silo waits
        self.shared.seconds += EXCHANGE_SECONDS
        copy = pb.Envelope.FromString(envelope.SerializeToString())
        answer = self.driver.receive(self.peer, copy, bytes(payload))
        content: codec.Buffer = answer.payload.read_at(0, answer.payload.size_bytes)
        if len(content) > reply_bytes_max:
            raise OperationError(f"the answer has {len(content)} bytes, the limit is {reply_bytes_max}")
        self.messages += envelope.kind != "control.poll" or answer.envelope.kind != "control.ack"
        if into is not None and answer.envelope.payload_digest.hex() == into.digest:
            into.restart()
            into.write(content)
            content = into.view()
        return Reply(answer.envelope, content)

    def interrupt(self, *, for_good: bool = False) -> None:
        """Interrupt nothing: an exchange is over when it returns."""

    def close(self) -> None:
        """Close nothing."""


@dataclass(frozen=True)
class Figure:
    """A task that a trainer did. rows: private ones that the guard drew for it."""

    task: str
    round: int
    step: int
    metrics: Mapping[str, Any]
    rows: tuple[int, ...] = ()


@dataclass
class Measuring:
    """Measures the adapters that silos share: each once, for all silos, with the draws of one of them, so that rows
    are measured alike whichever silo asks first.

    Attributes:
        make_session: of that silo, with these rows as its held-out ones.
        held_out: what the federation measures.
        tuning: rows on which each round's adapter is measured beside the run.
        on_tuning: pass@1 on them, by round; where each silo keeps its own, the mean over silos.
        measured: by adapter, which two rounds may share: what the task comes to, and pass@1 on the tuning rows.
        own: pass@1 of each silo's own on the tuning rows, by round.
    """

    make_session: Callable[[Sequence[Task]], Session]
    held_out: Sequence[Task]
    tuning: Sequence[Task]
    on_tuning: dict[int, float] = field(default_factory=dict)
    measured: dict[str, tuple[Done, float | None]] = field(default_factory=dict)
    own: dict[int, list[float]] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)

    def answer(self, task: Evaluate, body: codec.Buffer, plan: Mapping[str, Any]) -> LinkMessage:
        """Return the answer to a silo's task. plan: fields of the message that began the run at its trainer."""
        if task.digest not in self.measured:
            done = self._session("held_out", self.held_out, plan).carry_out(task, body)
            beside = None
            if self.tuning and task.round:
                on_tuning = self._session("tuning", self.tuning, plan).carry_out(task, body)
                beside = float(on_tuning.metrics["pass_at_1"])
            self.measured[task.digest] = done, beside
        done, beside = self.measured[task.digest]
        if beside is not None:
            self.on_tuning[task.round] = beside
        return done_message(task, {**done.metrics, "grading_failures": {}}, bytes(done.body))

    def measure_own(self, number: int, own: Mapping[str, codec.Array], plan: Mapping[str, Any]) -> None:
        """Measure what a silo has of its own by the end of a round on the tuning rows, beside the run."""
        if not self.tuning:
            return
        payload = codec.encode_factors(
            own,
            base_digest="",
            schema_sha256="",
            rank=plan["lora_schema"]["rank"],
            scale=1.0,
            dtype="float32",
        )
        beside = self._session("tuning", self.tuning, plan).carry_out(Evaluate(number, ""), payload)
        self.own.setdefault(number, []).append(float(beside.metrics["pass_at_1"]))
        self.on_tuning[number] = fmean(self.own[number])

    def _session(self, name: str, rows: Sequence[Task], plan: Mapping[str, Any]) -> Session:
        if name not in self.sessions:
            self.sessions[name] = self.make_session(rows)
            begin(self.sessions[name], plan)
        return self.sessions[name]

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()


@dataclass
class TrainerHere(TrainerHandle):
    """The trainer's session in this process. What the guard sends is done at once, and the answer waits in `events`.

    Attributes:
        session: made when the run begins.
        measuring: answers `Evaluate`, for all silos of a cell.
        figures: of each other task done.
    """

    make_session: Callable[[], Session]
    events: queue.Queue[Event]
    measuring: Measuring
    figures: list[Figure] = field(default_factory=list)
    session: Session | None = None
    _plan: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        self.session = self.make_session()

    def send(self, message: LinkMessage) -> None:
        try:
            answer = self._answer(message)
        except FedSiloError as error:
            answer = failed_message(error)
        self.events.put(TrainerSaid(answer))

    def _answer(self, message: LinkMessage) -> LinkMessage:
        assert self.session is not None  # noqa: S101  # the guard starts it first
        if message.type == "plan":
            self._plan = message.fields
            return LinkMessage("planned", begin(self.session, message.fields))
        task = task_from_fields(message.fields, message.body)
        if isinstance(task, Evaluate) and not (task.digest and self.session.keeps_part):
            return self.measuring.answer(task, message.body, self._plan)
        done = self.session.carry_out(task, message.body)
        if isinstance(task, Evaluate | EvaluateOwn):
            self.measuring.measure_own(task.round, self.session.values(message.body), self._plan)
        drawn = task.rows if isinstance(task, PrivateStep) else ()
        self.figures.append(Figure(task.name, task.round, task.step, done.metrics, tuple(drawn)))
        return done_message(task, {**done.metrics, "grading_failures": {}}, bytes(done.body))

    def stop(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    @property
    def isolation(self) -> str:
        return "waived"

    @property
    def description(self) -> dict[str, Any]:
        split = self.session.split.digest if self.session is not None else ""
        return {
            "isolation": "waived",
            "why_waived": "an experiment in one process",
            "donor_logp": True,
            "ready": {"split": split},
        }


@dataclass(frozen=True)
class GraderHere:
    """Grades in this process, which has no answers but those of its own models."""

    verifier: str

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        del budget_seconds  # a verifier that could hang is refused before
        return [grade(self.verifier, response, reference) for response, reference in pairs]

    def marks(self, pairs: Sequence[tuple[str, str]]) -> list[Mark]:
        return [Mark(verdict.correct, verdict.reward) for verdict in self.grade_many(pairs)]


def grading(verifier: str) -> AnswerGrading:
    return AnswerGrading([GraderHere(verifier)], lambda _: 60.0)


@dataclass
class Party:
    """One silo of a cell."""

    name: str
    guard: Guard
    line: LineInMemory
    trainer: TrainerHere
    log: Path


@dataclass(frozen=True)
class CellResult:
    """What one federation came to.

    Attributes:
        record: the coordinator's, of the run.
        traffic: messages and bytes by (silo, kind), from each silo's own audit log.
        refused: decisions of the silos' gates that let a message not out, by kind and reason.
        figures: of each silo's tasks.
        on_tuning: pass@1 of each round's adapter on the tuning rows.
        seconds: of this machine.
    """

    record: dict[str, Any]
    traffic: dict[tuple[str, str], tuple[int, int]]
    refused: Counter[tuple[str, str]]
    figures: dict[str, list[Figure]]
    on_tuning: dict[int, float]
    adapter_sha256: str
    seconds: float


def run_cell(sites: Sites, plan: Mapping[str, object], tuning: Sequence[Task] = ()) -> CellResult:
    """Carry out one run of these sites.

    Args:
        sites: as `demo.sites.make_sites` wrote them.
        plan: the fields of run.yaml.
        tuning: rows on which each round's adapter is measured beside the run.

    Raises:
        OperationError: nothing moves any more, or a silo gave up.
        FedSiloError: a site, the coordinator or the plan is refused.
    """
    started = time.monotonic()
    shared = SharedTime(time.time())
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(_coordinator(sites.coordinator, shared))
        parts = [load_site_parts(load_silo_config(site.config)) for site in sites.silos]
        trainers: dict[str, TrainerHere] = {}

        def donor_logp(origin: str, round_number: int, step: int, row: int, position: int) -> Sequence[float]:
            session = trainers[origin].session
            return session.logp_of(round_number, step, row, position) if session is not None else ()

        measuring = Measuring(lambda rows: _session(parts[0], rows, donor_logp), parts[0].held_out.rows, tuning)
        stack.callback(measuring.close)
        parties = [
            _silo(site, of_site, coordinator, shared, measuring, donor_logp, stack)
            for site, of_site in zip(sites.silos, parts, strict=True)
        ]
        trainers |= {party.name: party.trainer for party in parties}
        run = str(plan["run"])
        coordinator.submissions.submit(run_text(dict(plan)), source="run.yaml", person=COORDINATOR_PERSON)
        _play(coordinator, parties, run)
        for party in parties:
            party.guard.stop()
            party.guard.run()  # which says goodbye, and ends
    folder = load_coordinator_config(sites.coordinator.config).state_dir / "runs" / run
    record = json.loads((folder / "run_record.json").read_bytes())["record"]
    adapter = folder / "adapter" / "adapter_model.safetensors"
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    refused: Counter[tuple[str, str]] = Counter()
    for party in parties:
        records = list(typed_records(party.log))
        traffic |= {(party.name, kind): counts for kind, counts in sent_by_kind(records).items()}
        refused.update(_refused(party.log))
    return CellResult(
        record=record,
        traffic=traffic,
        refused=refused,
        figures={party.name: party.trainer.figures for party in parties},
        on_tuning=measuring.on_tuning,
        adapter_sha256=codec.sha256_hex(adapter.read_bytes()) if adapter.exists() else "",
        seconds=time.monotonic() - started,
    )


@contextlib.contextmanager
def _coordinator(site: Site, shared: SharedTime) -> Iterator[Coordinator]:
    config = load_coordinator_config(site.config)
    # A poll that waited here would wait for silos that take their turn only after it.
    at_once = config.limits.model_copy(update={"poll_wait_seconds_max": 0.0})
    checked = check(config.model_copy(update={"limits": at_once}))
    graded = grading(checked.config.public.verifier)
    with Coordinator(
        checked, clock=shared.wall, running=shared.monotonic, monotonic=shared.monotonic, grading=graded
    ) as coordinator:
        coordinator.audit.append("start", policy={"effective": checked.charter.digest}, detail={"port": 0})
        yield coordinator
        coordinator.audit.append("stop")


def _silo(
    site: Site,
    parts: GuardSite,
    coordinator: Coordinator,
    shared: SharedTime,
    measuring: Measuring,
    donor_logp: DonorLogp,
    stack: contextlib.ExitStack,
) -> Party:
    line = LineInMemory(coordinator.driver, parts.identity.peer, shared)
    events = Events(shared)
    trainer = TrainerHere(lambda: _session(parts, parts.held_out.rows, donor_logp), events, measuring)

    def trainer_of(judge: Judge, screens: Screens) -> TrainerHandle:
        del judge, screens  # of a trainer in its sandbox: what it may be, and the index of its texts
        return trainer

    made = guard_of(
        parts,
        stack,
        channel=lambda: line,
        grading=lambda: grading(parts.config.data.public.verifier),
        trainer_of=trainer_of,
        events=events,
        clocks=Clocks(shared.wall, shared.monotonic, lambda: 0.0),
    )
    trainer.start()
    return Party(site.name, made.guard, line, trainer, site.audit_log)


def _session(site: GuardSite, held_out: Sequence[Task], donor_logp: DonorLogp) -> Session:
    config = site.config
    return Session(
        Material(
            silo=config.silo,
            model=load_model(config.model.path, config.model.load),
            codec=load_codec(config.model.path),
            private=[row for path in config.data.private for row in read_tasks(path).rows],
            public=site.public.rows,
            held_out=held_out,
            private_grader=GraderHere(config.data.verifier).marks,
            public_grader=GraderHere(config.data.public.verifier).marks,
            held_out_grader=GraderHere(config.held_out_verifier).marks,
            site_secret=site.site_secret,
            microbatch_tokens=config.trainer.microbatch_tokens,
            holdout_share=config.data.holdout_share,
            donor_logp=donor_logp,
        )
    )


def _play(coordinator: Coordinator, parties: Sequence[Party], run: str) -> None:
    """Let one silo after the other take a turn until the run is over and each has heard of it."""
    idle, last = 0, -1
    while True:
        coordinator.driver.tick()
        coordinator.submissions.look()
        for party in parties:
            party.guard.turn()
            if party.guard.failure is not None:
                raise OperationError(f"{party.name} gave up: {party.guard.failure.line}")
        if coordinator.driver.halted:
            raise OperationError(f"the coordinator is halted: {coordinator.driver.halted}")
        messages = sum(party.line.messages for party in parties)
        idle, last = (idle + 1 if messages == last else 0), messages
        if run not in coordinator.driver.runs and all(party.guard.runs.run is None for party in parties):
            return
        if idle > IDLE_TURNS_MAX:
            raise OperationError(f"nothing moves in run {run}: round {coordinator.driver.runs[run].life.round}")


def _refused(log: Path) -> Iterator[tuple[str, str]]:
    for record in typed_records(log):
        if record.event == "egress.decision" and record.decision == "deny":
            yield record.kind, ",".join(record.reasons)

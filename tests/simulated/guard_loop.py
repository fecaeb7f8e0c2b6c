"""A guard's whole loop without a network and without a trainer: real gate, ledger, policy and method; a scripted
coordinator, a trainer that only keeps what it is told, and a clock moved by hand."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit.checkpoint import Offer
from fedsilo.audit.log import AuditLog
from fedsilo.grading.answers import Grader
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.transcript import RoundEnd, Transcript, sign_end, sign_transcript, silo_id
from policies.model import Policy
from silo.config import Acceptance, CoordinatorPlace
from silo.guard.adapters import AdapterStore
from silo.guard.channel import FileChannel
from silo.guard.clock_watch import ClockWatch
from silo.guard.decisions import RunView
from silo.guard.loop import Event, Guard, Wake
from silo.guard.messages import Reply
from silo.guard.trainer_process.supervisor import TrainerHandle, TrainerSaid
from silo.link import LinkMessage
from tests.policies import setting
from tests.simulated.guarded import COORDINATOR_KEY, OUR_KEY, Bench, EqualityGrader, MemoryChannel, small_factors

PEER_KEYS = {
    name: Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")) for name in setting.PLAN.silos[1:]
}
Answer = tuple[str, ProtobufMessage | bytes, dict[str, Any]] | BaseException
ADAPTER = codec.encode_factors(
    small_factors(), base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
)


@dataclass
class Coordinator(MemoryChannel):
    """Answers by the kind it is asked: the next line of the script, by default an acknowledgement."""

    script: dict[str, deque[Answer]] = field(default_factory=dict)
    log: AuditLog | None = None  # countersigns what it is shown, where the script says nothing else

    def says(self, asked: str, kind: str, body: ProtobufMessage | bytes, **routing: Any) -> None:
        self.script.setdefault(asked, deque()).append((kind, body, routing))

    def fails_at(self, asked: str, error: BaseException) -> None:
        self.script.setdefault(asked, deque()).append(error)

    def exchange(
        self, envelope: pb.Envelope, payload: bytes, *, wait_seconds: float, reply_bytes_max: int, **_: Any
    ) -> Reply:
        self.routing, self.fails = {}, None
        if lines := self.script.get(envelope.kind):
            line = lines.popleft()
            if isinstance(line, BaseException):
                self.fails = line
            else:
                self.answer, self.routing = (line[0], line[1]), line[2]
        elif envelope.kind == "control.checkpoint" and self.log is not None:
            self.answer = ("control.checkpoint", countersigned(self.log, pb.Checkpoint.FromString(payload)))
        return super().exchange(envelope, payload, wait_seconds=wait_seconds, reply_bytes_max=reply_bytes_max)

    def bodies(self, kind: str) -> list[tuple[pb.Envelope, bytes]]:
        return [(envelope, payload) for envelope, payload in self.sent if envelope.kind == kind]

    def acknowledged(self) -> int:
        """What the last poll took in."""
        return pb.Poll.FromString(self.bodies("control.poll")[-1][1]).acknowledged_sequence


def countersigned(log: AuditLog, shown: pb.Checkpoint) -> pb.Checkpoint:
    """What a coordinator with this log answers."""
    log.take(Offer(shown.note, shown.previous_size, tuple(shown.consistency), shown.cosigned_note), setting.SILO)
    ours = log.offer(setting.SILO)
    return pb.Checkpoint(
        note=ours.note, previous_size=ours.previous_size, consistency=ours.consistency, cosigned_note=ours.cosigned_note
    )


@dataclass
class QuietTrainer(TrainerHandle):
    told: list[LinkMessage] = field(default_factory=list)
    got: str = "namespaces"  # the isolation level it was probed to have
    ready: dict[str, Any] | None = None  # what it says when it is

    def start(self) -> None: ...

    def send(self, message: LinkMessage) -> None:
        self.told.append(message)

    def stop(self) -> None: ...

    @property
    def isolation(self) -> str:
        return self.got

    @property
    def description(self) -> dict[str, Any]:
        return {"isolation": self.got} | ({} if self.ready is None else {"ready": self.ready})

    def tasks(self) -> list[str]:
        return [message.fields["task"] for message in self.told if message.type == "task"]


@dataclass
class Desk:
    published: list[tuple[str, Any]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    before_snapshot: Any = None

    def publish(self, name: str, fields: Any) -> None:
        self.published.append((name, fields))

    def set_state(self, state: Any, *, policy_digest: str) -> None:
        self.states.append(state)


class TimedQueue(queue.Queue[Event]):
    """Hands each event out at its time by the loop's clock, which waiting moves on, and each event by a little."""

    def __init__(self, loop: Loop, each_seconds: float = 0.0) -> None:
        super().__init__()
        self._loop, self._each_seconds = loop, each_seconds
        self._timed: deque[tuple[float, Event]] = deque()

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        self.put_at(self._loop.clock, item)

    def put_at(self, moment: float, item: Event) -> None:
        """In the order of their times."""
        self._timed.append((moment, item))

    def empty(self) -> bool:
        return not self._timed or self._timed[0][0] > self._loop.clock

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        until = self._loop.clock + (timeout or 0.0)
        if not self._timed or self._timed[0][0] > until:
            self._move_to(until)
            raise queue.Empty
        moment, item = self._timed.popleft()
        self._move_to(max(self._loop.clock, moment) + self._each_seconds)
        return item

    def _move_to(self, moment: float) -> None:
        self._loop.bench.clock_now += moment - self._loop.clock
        self._loop.clock = moment


@dataclass
class Loop:
    """One guard on a folder, joined. `turn` is one step of its loop; the clock jumps over every back-off."""

    folder: Path
    policy: Policy
    load: str = "fp32"
    acceptance: Acceptance | None = None
    by_files: bool = False
    watched: bool = False  # its clock is held against the others; then all of them go on with each turn, and it joins
    turn_seconds: float = 3600.0
    grader: Grader = field(default_factory=EqualityGrader)
    events_of: Callable[[Loop], queue.Queue[Event]] = lambda _: queue.Queue()

    def __post_init__(self) -> None:
        self.coordinator_now, self.slept = setting.NOW, 0.0
        self.coordinator = Coordinator(log=self._coordinator_log())
        self._take_place(self._bench(setting.NOW))

    def state(self) -> dict[str, Any]:
        """The status of the guard."""
        return self.guard.status.state(self.guard.moment())

    def _bench(self, at: float) -> Bench:
        self.clock = 0.0
        watched_by = self._watch_of if self.watched else None
        return Bench(self.folder, self.policy, self._channel(), clock_now=at, watched_by=watched_by, grader=self.grader)

    def _watch_of(self, bench: Bench) -> ClockWatch:
        return ClockWatch(
            bench.ledger, asks=not self.by_files, wall=lambda: bench.clock_now, monotonic=lambda: self.clock,
            slept=lambda: self.slept,
        )  # fmt: skip

    def _channel(self) -> Any:
        return FileChannel() if self.by_files else self.coordinator

    def _take_place(self, bench: Bench) -> None:
        self.bench, self.trainer = bench, QuietTrainer()
        self.events = self.events_of(self)
        self.desk = Desk()
        bench.gate.view = RunView()
        bench.audit.trust_peer(setting.COORDINATOR, COORDINATOR_KEY.public_key())
        tasks = SimpleNamespace(sha256=setting.HASH["public"])
        for name, key in PEER_KEYS.items():
            bench.audit.pin_peer(silo_id(setting.PLAN.federation, name), key.public_key())
        config = SimpleNamespace(
            silo="hospital_a", role="member", federation="cardio-net", state_dir=self.folder, spiffe_id=setting.SILO,
            model=SimpleNamespace(load=self.load, path=self.folder / "model"), source=self.folder / "silo.yaml",
            coordinator=CoordinatorPlace(address="files" if self.by_files else "host:1"),
            identity=SimpleNamespace(certificate=self.folder / "own.crt"), trainer=SimpleNamespace(launch="child"),
            data=SimpleNamespace(
                verifier="exact", public=SimpleNamespace(verifier="choice", path="p"),
                held_out=SimpleNamespace(path="h"),
            ),
            held_out_verifier="choice", acceptance=self.acceptance,
        )  # fmt: skip
        site: Any = SimpleNamespace(
            config=config, policy=bench.policy, schema=setting.SCHEMA, public=tasks, held_out=tasks,
            site_secret=b"s" * 32,
            coordinator_key=COORDINATOR_KEY.public_key(),
            identity=SimpleNamespace(
                not_after=datetime(2030, 1, 1, tzinfo=UTC), trust_root_pem=b"", signing_key=OUR_KEY
            ),
            fingerprints=SimpleNamespace(
                base_model_sha256="0" * 64, tokenizer_sha256="0" * 64, template_sha256="0" * 64
            ),
        )  # fmt: skip
        desk: Any = self.desk
        self.guard = Guard(
            site=site, gate=bench.gate, ledger=bench.ledger, audit=bench.audit, releases=bench.releases,
            adapters=AdapterStore(self.folder / "adapters"), trainer=self.trainer, desk=desk, events=self.events,
            code_sha256="0" * 64, monotonic=lambda: self.clock, watch=bench.watch,
            archive=bench.archive if self.watched else None,
        )  # fmt: skip
        self.guard._talk.joined = not self.watched
        bench.audit.append("start")
        if not self.by_files and not self.watched:
            bench.audit.take(self._offer(bench), setting.COORDINATOR)  # as joining does
        self.guard._take_up()

    def _offer(self, bench: Bench) -> Offer:
        log = self.coordinator.log
        assert log is not None
        log.take(bench.audit.offer(setting.COORDINATOR), setting.SILO)
        return log.offer(setting.SILO)

    def restart(self, at: float = setting.NOW) -> None:
        """The process is killed and started again on the same folder; `at` is what its clock shows then."""
        self.bench.close()
        sequence, log = self.coordinator.sequence, self.coordinator.log
        assert log is not None
        log.close()
        self.coordinator = Coordinator(sequence=sequence, log=self._coordinator_log())
        self._take_place(self._bench(at))

    def close(self) -> None:
        self.bench.close()
        if self.coordinator.log is not None:
            self.coordinator.log.close()

    def _coordinator_log(self) -> AuditLog:
        log = AuditLog(
            self.folder.parent / f"{self.folder.name}-coordinator", origin=setting.COORDINATOR, key=COORDINATOR_KEY,
            actor=setting.COORDINATOR, clock=lambda: self.coordinator_now, reserve_bytes=0,
        )  # fmt: skip
        log.trust_peer(setting.SILO, OUR_KEY.public_key())
        return log

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock += self.turn_seconds
            if self.watched:
                self.bench.clock_now += self.turn_seconds
                self.coordinator_now += self.turn_seconds
            self.guard._talk.poll_now = True
            if self.events.empty():
                self.events.put(Wake())  # else a halted guard waits for something to come
            self.guard._turn()

    def live(self, seconds: float) -> None:
        """Let the guard's loop run, which waits on a `TimedQueue`, until so much time has passed."""
        until = self.clock + seconds
        while self.clock < until:
            self.guard._turn()

    def trainer_says(self, kind: str, body: bytes = b"", **fields: Any) -> None:
        self.events.put(TrainerSaid(LinkMessage(kind, fields, body)))
        self.turn()

    # ---- a run, up to where a test begins ----

    def offer_plan(self, plan: Plan = setting.PLAN) -> None:
        self.coordinator.says("control.poll", "run.plan", pb.RunPlan(canonical_json=plan.canonical()), run=plan.run)
        self.turn()

    def open_round(
        self,
        number: int = 1,
        adapter: bytes = ADAPTER,
        *,
        plan: Plan = setting.PLAN,
        public: bool = True,
        told: bool = True,
    ) -> None:
        """The round opens, and everybody has signed the same transcript."""
        self.show_round(number, codec.sha256_hex(adapter), plan=plan, public=public, told=told)
        self.coordinator.says("control.poll", "round.agreed", self.signed_by(*PEER_KEYS), run=plan.run, round=number)
        self.turn(2)

    def show_round(
        self,
        number: int,
        base_digest: str,
        *,
        plan: Plan = setting.PLAN,
        public: bool = True,
        told: bool = True,
        **changes: Any,
    ) -> Transcript:
        """Have the coordinator say round.open with the next poll; the transcript in it, signed by the coordinator.

        told: the silo is to know already that the round before came to this adapter (T58).
        """
        if told:
            self.bench.gate.view = replace(self.bench.gate.view, told_adapter=base_digest)
        fields: dict[str, Any] = {
            "federation": plan.federation, "run": plan.run, "round": number, "silos": plan.silos,
            "plan_sha256": plan.digest, "policies": dict.fromkeys(plan.silos, self.policy.digest),
            "base_digest": base_digest, "schema_sha256": plan.lora.schema_sha256,
            "public_set_sha256": plan.public_set_sha256,
            "min_updates": max(plan.quorum, self.bench.gate.policy.file.federation.min_updates),
        }  # fmt: skip
        self.shown = Transcript(**{**fields, **changes})
        steps = [pb.PublicStep(step=step, prompt_indices=rows) for step, rows in ((2, (1, 4, 7)), (4, (0, 2, 3)))]
        body = pb.RoundOpen(
            base_digest=base_digest, public_steps=steps if public else [], transcript=self.shown.canonical(),
            transcript_signature=sign_transcript(self.shown, setting.COORDINATOR, COORDINATOR_KEY),
        )  # fmt: skip
        self.coordinator.says("control.poll", "round.open", body, run=plan.run, round=number)
        return self.shown

    def signed_by(self, *names: str, transcript: Transcript | None = None) -> pb.RoundAgreed:
        """round.agreed with signatures of these peers under a transcript, by default the one shown last."""
        over = transcript or self.shown
        body = pb.RoundAgreed(transcript_sha256=self.shown.digest)
        for name in names:
            signature = sign_transcript(over, silo_id(over.federation, name), PEER_KEYS[name])
            body.countersignatures.add(silo=name, transcript_sha256=over.digest, signature=signature)
        return body

    def ended(self, **fields: Any) -> pb.RoundResult:
        """round.result of the round shown last, signed by the coordinator; by default all of its roster are in it."""
        if fields.get("committed"):
            fields = {"participants": self.shown.silos, **fields}
        body = pb.RoundResult(**{"transcript_sha256": self.shown.digest, **fields})
        end = RoundEnd.of(self.shown, body)
        body.result_signature = sign_end(end, setting.COORDINATOR, COORDINATOR_KEY).signature
        return body

    def base_evaluated(self) -> None:
        # it came before anything else of the trainer, at no turn of its own
        self.guard._trainer_said(LinkMessage("planned", {"overlong": {}, "private_prompts": 40}))
        body = pb.MetricsEval(split="held_out")
        body.metrics.add(name="pass_at_1", value=0.25)
        self.trainer_says("done", codec.encode(body), task="Evaluate", round=0, metrics={})

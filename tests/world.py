"""Parties in memory, each bent by a line.

`Bench` is one silo's way out: real gate, ledger, log and policy, and a channel in memory for gRPC. `Loop` is its whole
guard on a bench: a scripted coordinator, a trainer that keeps what it is told, a clock moved by hand. `World` is a
federation: the real coordinator with what makes it hostile, that guard behind its trainer's link, and an honest silo.
"""

from __future__ import annotations

import json
import queue
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message as ProtobufMessage

from certs.commands import BESIDE, VerifiedCommand
from certs.identity import PeerIdentity
from coordinator import outbox
from coordinator import store as db
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import read_lines
from fedsilo.control.answers import Comparison, HeldRelease, to_json
from fedsilo.files.task_files import Task, TaskFile
from fedsilo.grading.answers import AnswerGrading, Grader
from fedsilo.grading.verdict import Verdict, judged
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UnreachableError
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import Evaluate, TrainerTask
from fedsilo.protocol.transcript import RoundEnd, Transcript, sign_end, sign_transcript, silo_id
from policies.model import Policy
from policies.schema import LoraSchema
from silo.config import Acceptance, CoordinatorPlace
from silo.guard.adapters import AdapterStore
from silo.guard.answers.release import ReleaseView
from silo.guard.archive import Archive
from silo.guard.channel import FileChannel
from silo.guard.clock_watch import ClockWatch
from silo.guard.decisions import Judge, PublicView, RunView, SiteView
from silo.guard.gate import Gate
from silo.guard.ledger import Head, Ledger, Release
from silo.guard.loop import Event, Guard, Wake
from silo.guard.messages import Held, Reply
from silo.guard.releases import Releases, Settled
from silo.guard.screens import Screens
from silo.guard.trainer_process.supervisor import TrainerHandle, TrainerSaid
from silo.link import LinkMessage
from silo.sampling import Training
from tests.hostile.coordinator import HostileReplies
from tests.hostile.trainer import HostileLink
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo

OUR_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
COORDINATOR_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
PROGRAM = "c0de" * 16
STEPS = {2: (1, 4, 7), 4: (0, 2, 3)}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the process runs after it."""


@contextmanager
def failing(
    owner: Any,
    name: str,
    error: BaseException | type[BaseException] = Killed,
    *,
    when: Callable[..., bool] = lambda *_, **__: True,
    after: bool = False,
) -> Iterator[None]:
    """Have calls of `owner.name` that `when` is true of end in an error, before or (with `after`) behind their work."""
    works = getattr(owner, name)

    def fails(*arguments: Any, **fields: Any) -> Any:
        if not when(*arguments, **fields):
            return works(*arguments, **fields)
        if after:
            works(*arguments, **fields)
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, fails)
        yield


def recording(event: str, **match: Any) -> Callable[..., bool]:
    """Return what is true of an `AuditLog.append` of this event with these fields."""
    return lambda _, name, **fields: name == event and match.items() <= fields.items()


@dataclass
class MemoryChannel:
    """Keeps what was sent and answers what the test says.

    Attributes:
        answer: next answer, (kind, body) or ready-made payload bytes; by default an acknowledgement.
        fails: raised in place of an answer, after (or, with `before_sending`, without) the bytes being seen.
    """

    sent: list[tuple[pb.Envelope, bytes]] = field(default_factory=list)
    answer: tuple[str, ProtobufMessage | bytes] | None = None
    fails: BaseException | None = None
    before_sending: bool = False
    sequence: int = 0
    tamper: Callable[[pb.Envelope], None] | None = None
    key: Ed25519PrivateKey = COORDINATOR_KEY
    on_send: Callable[[], None] | None = None
    routing: dict[str, Any] = field(default_factory=dict)

    def exchange(
        self, envelope: pb.Envelope, payload: Any, *, wait_seconds: float, reply_bytes_max: int, **_: Any
    ) -> Reply:
        if self.on_send:
            self.on_send()
        if self.fails and self.before_sending:
            raise self.fails
        self.sent.append((envelope, payload))
        if self.fails:
            raise self.fails
        kind, body = self.answer or ("control.ack", pb.Ack(acknowledged_sequence=envelope.sequence))
        self.answer = None
        reply_payload = body if isinstance(body, bytes) else codec.encode(body)
        self.sequence += 1
        reply = pb.Envelope(
            federation="cardio-net", kind=kind, sender=setting.COORDINATOR, sequence=self.sequence, attempt=1,
            payload_digest=bytes.fromhex(codec.sha256_hex(reply_payload)), **self.routing,
        )  # fmt: skip
        reply.signature = self.key.sign(codec.signing_bytes(reply))
        if self.tamper:
            self.tamper(reply)
        return Reply(reply, reply_payload)

    def interrupt(self, *, for_good: bool = False) -> None:
        self.fails = UnreachableError("interrupted")

    def close(self) -> None: ...

    def kinds(self) -> list[str]:
        return [envelope.kind for envelope, _ in self.sent]


class EqualityGrader:
    """Right when the texts are equal; the real verifiers have tests of their own."""

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        return [judged(response == reference) for response, reference in pairs]


@dataclass
class Bench:
    """One silo on a folder; `restart` is a new process on the same folder."""

    folder: Path
    policy: Policy
    channel: Any = field(default_factory=MemoryChannel)
    clock_now: float = setting.NOW
    schema: LoraSchema = setting.SCHEMA
    screens: Screens = field(default_factory=Screens)
    grader: Grader = field(default_factory=EqualityGrader)
    count_tokens: Callable[[str], int] = len
    budget_seconds: Callable[[int], float] = lambda _: 60.0
    watched_by: Callable[[Bench], ClockWatch] | None = None  # makes what holds its clock against others

    watch: ClockWatch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.ledger = Ledger(self.folder / "ledger.sqlite3")
        self.watch = None if self.watched_by is None else self.watched_by(self)
        self.audit = AuditLog(
            self.folder / "audit", origin=setting.SILO, key=OUR_KEY, actor=setting.SILO, clock=self.time,
            reserve_bytes=0,
        )  # fmt: skip
        if self.watch is not None:
            self.watch.begin(self.audit.latest_time)
        self.ledger.agree(Head.named(self.audit.ledger) if self.audit.ledger else None)
        self.audit.name_heads(self.ledger.naming)
        rows = tuple(Task(id=str(row), prompt=f"prompt {row}", answer="12", topic="sort up") for row in range(10))
        public = PublicView(
            TaskFile(Path("public.jsonl"), rows, setting.HASH["public"], 10, ()),
            AnswerGrading([self.grader], self.budget_seconds),
            self.count_tokens,
        )
        topics, adapters = frozenset({"sort up", "rotate"}), AdapterStore(self.folder / "adapters")
        by_files = isinstance(self.channel, FileChannel)
        site = SiteView(setting.SILO, setting.COORDINATOR, self.schema, public, topics, adapters, by_files)
        self.judge = Judge(
            policy=self.policy,
            ledger=self.ledger,
            audit=self.audit,
            site=site,
            site_key=b"s" * 32,
            clock=self.time,
            screens=self.screens,
            code_sha256=PROGRAM,
        )
        self.archive = Archive(self.ledger, self.audit, self.judge)
        self.gate = Gate(
            channel=self.channel,
            judge=self.judge,
            ledger=self.ledger,
            archive=self.archive,
            federation="cardio-net",
            signing_key=OUR_KEY,
            coordinator_key=COORDINATOR_KEY.public_key(),
        )
        self.judge.view = RunView(
            setting.PLAN,
            1,
            setting.BASE_DIGEST,
            1.0,
            STEPS,
            open_step=2,
            evaluated={1: setting.BASE_DIGEST},
            training=Training(6, 1, 4),
            witnesses=1,
        )
        self.releases = Releases(self.gate, self.ledger, silo="hospital_a", destination={"address": "host:1"})
        self.shows = ReleaseView(self.ledger)

    def time(self) -> float:
        return self.clock_now if self.watch is None else self.watch.time()

    def close(self) -> None:
        self.ledger.close()
        self.audit.close()

    def restart(self, policy: Policy | None = None) -> Bench:
        self.close()
        channel = MemoryChannel(sequence=self.channel.sequence)
        return replace(self, policy=policy or self.policy, channel=channel)

    # ---- messages ----

    def factors(self, tensors: dict[str, np.ndarray[Any, Any]] | None = None, base: str = setting.BASE_DIGEST) -> Any:
        tensors = small_factors() if tensors is None else tensors
        return self.gate.offer(self.judge.view.place("lora.factors", 1), pb.Factors(base_digest=base), tensors=tensors)

    def responses(self, *prompts: tuple[int, tuple[str, ...]], step: int = 2) -> Any:
        body = setting.responses_body(*(prompts or ((1, ("12", "12")), (4, ()), (7, ("12",)))))
        return self.gate.offer(self.judge.view.place("public.responses", 1, step), body)

    def poll(self, kind: str = "", body: ProtobufMessage | bytes = b"", **routing: Any) -> Any:
        """What the gate lets in of a poll's answer, by default an acknowledgement. Raises what it is refused with."""
        if kind:
            self.channel.answer, self.channel.routing = (kind, body), {"run": "run-1", "round": 1, **routing}
        return self.gate.send(self.judge.view.place("control.poll"), pb.Poll()).body

    # ---- what waits for people ----

    def hold(self, offered: object, deadline_seconds: float | None = None) -> Release:
        """Hold what the gate says has to wait for people."""
        assert isinstance(offered, Held)
        return self.releases.hold(offered, deadline_seconds=deadline_seconds)

    def answer(
        self, release: Release, verb: str = "approve", *, person: str = "alice", opened: bool = True, **more: Any
    ) -> Any:
        """The order of a person who read the facts and, unless `opened` is false, opened every finding."""
        read = self.opened(release.id) if opened else self.shown(release)
        shown = {"release": release.id, "digest": release.digest, "policy_digest": self.judge.policy.digest, **read}
        return command(f"approvals.{verb}", shown | more, person=person)

    def approve(self, release: Release, person: str = "alice", **more: Any) -> Settled | None:
        """Give a yes; what it settles, None while another person is needed."""
        return self.releases.approve(self.answer(release, person=person, **more))[1]

    def reject(self, release: Release, person: str = "bob", **more: Any) -> Settled:
        """Give a no, by default to the content."""
        no = {"reason_code": "CONTENT", **more}
        return self.releases.reject(self.answer(release, "reject", person=person, opened=False, **no))

    def view_of(self, release: Release, **more: Any) -> HeldRelease:
        """What a guard on this bench shows of a release."""
        return self.shows.view(release, self.judge.policy, destination=self.releases.destination, **more)

    def comparison(self, release: Release) -> Comparison:
        """A release beside the last one of its kind."""
        digest = self.judge.policy.digest
        return self.shows.comparison(release, policy_digest=digest, destination=self.releases.destination)

    def view(self, release: Release) -> dict[str, Any]:
        """What the control socket tells of a release."""
        shown: dict[str, Any] = to_json(self.view_of(release))
        return shown

    def opened(self, release_id: str) -> dict[str, Any]:
        """What an approval carries of a person who read the facts and opened every finding."""
        view = self.view(self.ledger.release(release_id))
        return {"shown": view["shown"], "acknowledged": [one["id"] for one in view["noticed"]]}

    def shown(self, release: Any) -> dict[str, Any]:
        """The same of a person who read the facts and opened no finding."""
        view = self.view(self.ledger.release(release.id))
        return {"shown": view["shown"]}

    # ---- what was recorded ----

    def events(self, name: str) -> list[dict[str, Any]]:
        """Records of one event. Only these lines are parsed, and not verified: a third of the suite's time."""
        mark = f'"event":"{name}"'.encode()
        found = (json.loads(line) for _, line in read_lines(self.folder / "audit") if mark in line)
        return [record for record in found if record["event"] == name]


def small_factors(value: float = 0.001) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full(shape, value, np.float32) for name, shape in setting.SCHEMA.tensors}


def at_once(work: Callable[[], Any]) -> Any:
    """The loop of a guard that nothing else runs in."""
    return work()


def command(
    name: str, arguments: dict[str, Any], *, person: str = "alice", roles: tuple[str, ...] = ("approver",)
) -> Any:
    """What the control desk hands on once it has verified certificate and signature."""
    beside = {key: value for key, value in arguments.items() if key in BESIDE.get(name, ())}
    return VerifiedCommand(
        person=person, certificate_fingerprint="f" * 64, name=name, arguments=arguments, request_id="request-1",
        expires=datetime.fromtimestamp(setting.NOW, UTC) + timedelta(minutes=5), roles=frozenset(roles),  # type: ignore[arg-type]
        digest="0" * 64, sealed=codec.canonical_json({**beside, "salt": secrets.token_hex(16)}) if beside else b"",
    )  # fmt: skip


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
    log.take(shown, setting.SILO)
    return log.offer(setting.SILO)


@dataclass
class QuietTrainer(TrainerHandle):
    told: list[LinkMessage] = field(default_factory=list)
    got: str = "namespaces"  # the isolation level it was probed to have
    ready: dict[str, Any] | None = None  # what it says when it is
    donor_logp: bool = False

    def start(self) -> None: ...

    def send(self, message: LinkMessage) -> None:
        self.told.append(message)

    def stop(self) -> None: ...

    @property
    def isolation(self) -> str:
        return self.got

    @property
    def description(self) -> dict[str, Any]:
        known = {"donor_logp": True} if self.donor_logp else {}
        return {"isolation": self.got} | known | ({} if self.ready is None else {"ready": self.ready})

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
        self.states.append(to_json(state))


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
    unsolved: str = ""  # place of the first public row without a solution
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
        shown: dict[str, Any] = to_json(self.guard.status.state(self.guard.moment()))
        return shown

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
        bench.judge.view = RunView()
        bench.audit.trust_peer(setting.COORDINATOR, COORDINATOR_KEY.public_key())
        tasks = SimpleNamespace(sha256=setting.HASH["public"], unsolved=self.unsolved)
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
            site_secret=b"s" * 32, roles=SimpleNamespace(people={}),
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
            adapters=AdapterStore(self.folder / "adapters"), trainer=self.trainer, control_server=desk,
            events=self.events, code_sha256="0" * 64, monotonic=lambda: self.clock, watch=bench.watch,
            archive=bench.archive if self.watched else None,
        )  # fmt: skip
        self.guard._client.joined = not self.watched
        bench.audit.append("start")
        if not self.by_files and not self.watched:
            bench.audit.take(self._offer(bench), setting.COORDINATOR)  # as joining does
        self.guard._take_up()

    def _offer(self, bench: Bench) -> pb.Checkpoint:
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
            self.guard._client.poll_now = True
            if self.events.empty():
                self.events.put(Wake())  # else a halted guard waits for something to come
            self.guard.turn()

    def live(self, seconds: float) -> None:
        """Let the guard's loop run, which waits on a `TimedQueue`, until so much time has passed."""
        until = self.clock + seconds
        while self.clock < until:
            self.guard.turn()

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
            self.bench.judge.view = replace(self.bench.judge.view, told_adapter=base_digest)
        fields: dict[str, Any] = {
            "federation": plan.federation, "run": plan.run, "round": number, "silos": plan.silos,
            "plan_sha256": plan.digest, "policies": dict.fromkeys(plan.silos, self.policy.digest),
            "base_digest": base_digest, "schema_sha256": plan.lora.schema_sha256,
            "public_set_sha256": plan.public_set_sha256,
            "min_updates": max(plan.quorum, self.bench.judge.policy.file.federation.min_updates),
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


RUN_YAML = """\
run: {run}
method: pubswap
silos: [hospital_a, hospital_b]
rounds: {rounds}
local_steps: 4
swap_period: 2
prompts_per_step: 3
samples_per_prompt: 4
seed: 7
rollout: {{max_new_tokens: 32}}
quorum: {quorum}
round_deadline_seconds: {round_deadline_seconds}
"""
ANSWER = "12"  # right for each of the ten public prompts
PROMPTS = ("Patient 17: which dose of warfarin?", "Patient 23: which dose of heparin?")
TURNS_MAX = 200
MOMENT_SECONDS = 0.001  # a guard that may not ask yet waits as long for its trainer


@dataclass
class ToDriver(Coordinator):
    """The guard's channel, straight into the coordinator's core."""

    house: House | None = None

    def exchange(
        self, envelope: pb.Envelope, payload: bytes, *, wait_seconds: float, reply_bytes_max: int, **_: Any
    ) -> Reply:
        assert self.house is not None
        self.sent.append((envelope, payload))
        peer = PeerIdentity(
            spiffe_id=setting.SILO, role="silo", name="hospital_a", signing_public_key=OUR_KEY.public_key(),
            fingerprint="f" * 64, not_after=datetime(2030, 1, 1, tzinfo=UTC),
        )  # fmt: skip
        reply = self.house.driver.receive(peer, envelope, bytes(payload))
        return Reply(reply.envelope, bytes(reply.payload.read_at(0, reply.payload.size_bytes)))


@dataclass
class ScriptedTrainer(QuietTrainer):
    """Does each task at once, as an honest trainer would; what it says goes through `link` where there is one.

    Attributes:
        says: where its messages go.
    """

    says: Any = None

    def send(self, message: LinkMessage) -> None:
        super().send(message)
        if message.type == "plan":
            self.says(LinkMessage("planned", {"overlong": {}, "private_prompts": 64}))
        elif message.type == "task":
            fields = {"task": message.fields["task"], "round": message.fields["round"], "metrics": {}}
            fields["step"] = message.fields.get("step", 0)
            self.says(LinkMessage("done", fields, self.body_of(message)))

    def body_of(self, message: LinkMessage) -> bytes:
        fields = message.fields
        match fields["task"]:
            case "Evaluate":
                body = pb.MetricsEval(split="held_out", adapter_digest=fields["digest"])
                body.metrics.add(name="pass_at_1", value=0.25)
                return codec.encode(body)
            case "GeneratePublic":
                rows = ((index, (ANSWER,)) for index in fields["prompt_indices"])
                return codec.encode(setting.responses_body(*rows))
            case "ExportDelta":
                base = next(m.fields["digest"] for m in reversed(self.told) if m.fields.get("task") == "LoadAdapter")
                return codec.encode_factors(
                    small_factors(), base_digest=base, schema_sha256=setting.SCHEMA.digest, rank=2,
                    scale=2.0, dtype="float32",
                )  # fmt: skip
        return b""


class HonestB(SimulatedSilo):
    """hospital_b: every answer of it is right, so hospital_a gets donors whenever it has fewer than half."""

    def work(self, task: TrainerTask) -> Any:
        if isinstance(task, Evaluate):
            body = pb.MetricsEval(split="held_out", adapter_digest=task.digest)
            body.metrics.add(name="pass_at_1", value=0.25)
            return body
        return super().work(task)

    def answers(self, indices: tuple[int, ...]) -> pb.PublicResponses:
        return setting.responses_body(*((index, (ANSWER,) * 4) for index in indices))


@dataclass
class Joined(Loop):
    """A guard whose log the coordinator's own log has countersigned."""

    house: House | None = None

    def _coordinator_log(self) -> AuditLog:
        assert self.house is not None
        self.house.audit.trust_peer(setting.SILO, OUR_KEY.public_key())
        return self.house.audit


class World:
    """Args:
    folder: for all state.
    attacks: of the coordinator, on hospital_a.
    trainer_attacks: of hospital_a's trainer.
    policy: of hospital_a and, as charter, of the coordinator.

    Attributes:
        made: what the hostile party reported of its attempts.
    """

    def __init__(
        self,
        folder: Path,
        attacks: Sequence[str] = (),
        *,
        trainer_attacks: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> None:
        self.made: list[dict[str, Any]] = []
        replies = partial(HostileReplies, attacks=attacks, targets=["hospital_a"], report=self.made.append)
        folder.mkdir(parents=True, exist_ok=True)
        self.house = House(folder / "coordinator", key=COORDINATOR_KEY, replies=replies, references=(ANSWER,) * 10)
        self.b = HonestB(self.house, "hospital_b")
        self.loop = Joined(folder / "hospital_a", policy or setting.policy_of(setting.policy_text()), house=self.house)
        self.channel = ToDriver(house=self.house)
        self.trainer = ScriptedTrainer()
        self.link = HostileLink(ToGuard(self._trainer_says), trainer_attacks, self.made.append, crash="")
        self.link.prompts = list(PROMPTS)
        self.trainer.says = self.link.send
        self._wire()

    def _wire(self) -> None:
        """Put the coordinator's core and the scripted trainer where the loop has its own stand-ins."""
        guard, agreed = self.loop.guard, self.house.driver.dependencies.agreed
        self.loop.coordinator = self.loop.bench.channel = self.channel
        self.loop.bench.gate._channel = self.channel
        self.loop.trainer = guard._trainer = guard.runs._trainer = self.trainer
        site: Any = guard._site
        site.fingerprints = agreed  # it has the three of a model folder among its own
        site.public, site.held_out = (
            SimpleNamespace(sha256=agreed.public_set_sha256, unsolved=""),
            SimpleNamespace(sha256=agreed.held_out_sha256),
        )
        guard._client.joined = False

    def _trainer_says(self, message: LinkMessage) -> None:
        self.loop.events.put(TrainerSaid(message))

    def run(
        self, name: str = "run-1", *, rounds: int = 2, quorum: int = 1, round_deadline_seconds: float = 7200.0
    ) -> str:
        """A whole run; returns the state that it ended in. With `quorum` 2 it ends as soon as one silo declines."""
        self.link._run = name
        deadline = round_deadline_seconds
        self.house.submit(RUN_YAML.format(run=name, rounds=rounds, quorum=quorum, round_deadline_seconds=deadline))
        self.live()
        return str(self.house.rows(lambda session: session.get_one(db.Run, name)).state)

    def live(self, turns: int = TURNS_MAX) -> None:
        """Turns until all runs have ended and both silos know, or hospital_a's guard gives up."""
        if self.b.plan is None:
            self.b.join()
        over = 0
        for _ in range(turns):
            self._until_idle()
            if self.failed:
                return
            busy = self.b.live() or self.loop.guard.runs.run is not None or self.house.driver.runs
            over = 0 if busy else over + 1
            if over == 2:
                return
        raise AssertionError(f"the run did not end: {self.channel.kinds()[-20:]}")

    def _until_idle(self) -> None:
        """hospital_a's turns, until two polls in a row brought nothing: what waits is hospital_b's to do."""
        idle = 0
        while idle < 2 and not self.failed:
            before = self._done()
            self.turn()
            idle = idle + 1 if self._done() == before and self.loop.events.empty() else 0

    def _done(self) -> tuple[int, int, int]:
        said = sum(envelope.kind != "control.poll" for envelope, _ in self.channel.sent)
        return said, len(self.trainer.told), self.loop.bench.ledger.acknowledged

    def turn(self) -> None:
        guard = self.loop.guard
        self.loop.clock = max(self.loop.clock, guard._client.retry_at) + 0.1
        self.loop.bench.clock_now += 0.2
        self.house.advance(0.2)
        guard._client.poll_now = True
        if not self.asks():
            guard._client.retry_at = self.loop.clock + MOMENT_SECONDS  # only what its trainer said is dealt with
        guard.turn()

    def asks(self) -> bool:
        """Return True if hospital_a's guard may poll in this turn."""
        return True

    @property
    def failed(self) -> str:
        """The code with which hospital_a's guard gave up; empty while it goes on."""
        failure = self.loop.guard.failure
        return failure.code if failure is not None else ""

    def close(self) -> None:
        self.loop.close()
        self.house.close()

    # ---- what was recorded, and what left ----

    def records(self, event: str = "ingress.decision") -> list[dict[str, Any]]:
        return self.loop.bench.events(event)

    def left(self, kind: str) -> list[tuple[pb.Envelope, bytes]]:
        return [(envelope, payload) for envelope, payload in self.channel.sent if envelope.kind == kind]


class LastToBeReady(World):
    """hospital_a is the slowest silo: within a round its guard polls only for what waits already."""

    def asks(self) -> bool:
        view, ledger = self.loop.bench.judge.view, self.loop.bench.ledger
        if view.agreeing:
            return self.b.opening is not None and self.b.opening.round >= view.round
        waiting = self.house.rows(lambda session: outbox.items(session, "hospital_a"))
        return not view.round or any(not 0 < each.delivered_sequence <= ledger.acknowledged for each in waiting)


@dataclass
class ToGuard:
    """The trainer's end of the link; nothing is received on it, since the trainer is told directly."""

    says: Callable[[LinkMessage], None]

    def send(self, message: LinkMessage) -> None:
        self.says(message)

    def receive(self) -> LinkMessage:
        raise AssertionError("the scripted trainer is told directly")

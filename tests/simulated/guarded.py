"""A guard's way out without a network: real gate, ledger, audit log and policy; a channel in memory for gRPC."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message as ProtobufMessage

from certs.commands import BESIDE, VerifiedCommand
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import read_lines
from fedsilo.files.task_files import Task, TaskFile
from fedsilo.grading.answers import AnswerGrading, Grader
from fedsilo.grading.verdict import Verdict, judged
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UnreachableError
from policies.model import Policy
from policies.schema import LoraSchema
from silo.guard.adapters import AdapterStore
from silo.guard.archive import Archive
from silo.guard.channel import FileChannel
from silo.guard.clock_watch import ClockWatch
from silo.guard.decisions import PublicView, RunView, SiteView
from silo.guard.gate import Gate
from silo.guard.ledger import Head, Ledger
from silo.guard.messages import Reply
from silo.guard.releases import Releases
from silo.guard.screens import Screens
from silo.sampling import Training
from tests.policies import setting

OUR_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
COORDINATOR_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
PROGRAM = "c0de" * 16
STEPS = {2: (1, 4, 7), 4: (0, 2, 3)}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the process runs after it."""


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
        self.archive = Archive(
            self.ledger,
            self.audit,
            lambda: self.gate.policy,
            now_seconds=lambda: self.gate.now(),  # noqa: PLW0108  # the gate is made with it
        )
        self.gate = Gate(
            channel=self.channel, policy=self.policy, ledger=self.ledger, audit=self.audit, signing_key=OUR_KEY,
            coordinator_key=COORDINATOR_KEY.public_key(), site=site, federation="cardio-net", site_key=b"s" * 32,
            clock=self.time, screens=self.screens, archive=self.archive, code_sha256=PROGRAM,
        )  # fmt: skip
        self.gate.view = RunView(
            setting.PLAN,
            1,
            setting.BASE_DIGEST,
            1.0,
            STEPS,
            2,
            {1: setting.BASE_DIGEST},
            training=Training(6, 1, 4),
            witnesses=1,
        )
        self.releases = Releases(self.gate, self.ledger, silo="hospital_a", destination={"address": "host:1"})

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
        return self.gate.offer(self.gate.view.place("lora.factors", 1), pb.Factors(base_digest=base), tensors=tensors)

    def responses(self, *prompts: tuple[int, tuple[str, ...]], step: int = 2) -> Any:
        body = setting.responses_body(*(prompts or ((1, ("12", "12")), (4, ()), (7, ("12",)))))
        return self.gate.offer(self.gate.view.place("public.responses", 1, step), body)

    def opened(self, release_id: str) -> dict[str, Any]:
        """What an approval carries of a person who read the facts and opened every finding."""
        view = self.releases.view(self.ledger.release(release_id))
        return {"shown": view["shown"], "acknowledged": [one["id"] for one in view["noticed"]]}

    def shown(self, release: Any) -> dict[str, Any]:
        """The same of a person who read the facts and opened no finding."""
        view = self.releases.view(self.ledger.release(release.id))
        return {"shown": view["shown"]}

    # ---- what was recorded ----

    def events(self, name: str) -> list[dict[str, Any]]:
        """Records of one event. Only these lines are parsed, and not verified: a third of the suite's time."""
        mark = f'"event":"{name}"'.encode()
        found = (json.loads(line) for _, line in read_lines(self.folder / "audit") if mark in line)
        return [record for record in found if record["event"] == name]


def small_factors(value: float = 0.001) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full(shape, value, np.float32) for name, shape in setting.SCHEMA.tensors}


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

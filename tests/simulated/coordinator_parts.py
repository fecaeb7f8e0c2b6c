"""A whole coordinator in a folder, without sockets, and silos in memory that speak to its `Driver` by hand.

Time is a hand clock. A silo is the real silo half of the method with random factors instead of a trainer; everything
it sends goes through the real codec, envelope and signature.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import store as db
from coordinator.blobs import AnyPayload, Blobs
from coordinator.control import Submissions
from coordinator.driver import Driver
from coordinator.ingress import Ingress
from coordinator.outbox import Replies, Reply
from coordinator.record import Outcome
from coordinator.runs import Dependencies
from coordinator.store import Store
from fedsilo.audit.log import AuditLog
from fedsilo.files.run_request import Agreed, Fixed
from fedsilo.grading import Verdict, grade
from fedsilo.grading.answers import AnswerGrading
from fedsilo.protocol import codec
from fedsilo.protocol import method as events
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import seal
from fedsilo.protocol.kinds import INBOUND_KINDS, UPDATE_KINDS
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan, SiloModel, plan_from_canonical
from fedsilo.protocol.services import PROTOCOL_VERSION
from fedsilo.protocol.tasks import AnswerAhead, Evaluate, EvaluateOwn, ExportDelta, GeneratePublic, TrainerTask
from fedsilo.protocol.transcript import sign_transcript, transcript_from_canonical
from policies.kinds.adapters import quantise
from policies.model import MIN_UPDATES, Policy
from policies.schema import LoraSchema
from tests.policies.setting import HASH, SCHEMA, policy_of, policy_text

FEDERATION = "cardio-net"
COORDINATOR = f"spiffe://{FEDERATION}/coordinator/main"
SILOS = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")
REFERENCES = tuple(str(row) for row in range(10))
AGREED = Agreed(
    base_model_sha256=HASH["base"],
    tokenizer_sha256=HASH["tokenizer"],
    template_sha256=HASH["template"],
    load="fp32",
    mixed_base="refuse",
    lora_schema_sha256=SCHEMA.digest,
    public_set_sha256=HASH["public"],
    held_out_sha256=HASH["held"],
)
RUN_YAML = """\
run: run-1
method: pubswap
rounds: 2
local_steps: 4
swap_period: 2
prompts_per_step: 3
samples_per_prompt: 4
seed: 7
rollout: {max_new_tokens: 32}
quorum: 2
join_deadline_seconds: 60.0
public_step_deadline_seconds: 100.0
round_deadline_seconds: 1000.0
"""
SHORT = RUN_YAML.replace("rounds: 2", "rounds: 1")


class PlainGrader:
    """Grades in this process; the killable child has its own tests."""

    def grade_many(self, pairs: Any, budget_seconds: float | None = None) -> list[Verdict]:
        return [grade("exact", response, reference) for response, reference in pairs]


@dataclass
class Clock:
    """`seconds` is moved by hand and serves both as UTC and as the monotonic clock."""

    seconds: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.seconds


OPEN_HOUSES: dict[int, House] = {}


@dataclass
class House:
    """A coordinator over a folder; a second one over the same folder is the same coordinator after a restart."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    policy: Policy = field(default_factory=lambda: policy_of(policy_text()))
    schema: LoraSchema = SCHEMA
    key: Ed25519PrivateKey = field(default_factory=lambda: Ed25519PrivateKey.from_private_bytes(b"c" * 32))
    published: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    replies: Callable[..., Replies] = Replies
    references: tuple[str, ...] = REFERENCES
    listed: tuple[str, ...] = SILOS
    models: Mapping[str, SiloModel] = field(default_factory=dict)  # of silos that have another
    database: str = ""  # URL; empty: SQLite in the folder
    grading: AnswerGrading = field(default_factory=lambda: AnswerGrading([PlainGrader()], lambda _: 60.0))

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.database or f"sqlite:///{self.folder / 'coordinator.db'}")
        self.blobs = Blobs(self.folder)
        self.audit = AuditLog(
            self.folder / "audit",
            origin=COORDINATOR,
            key=self.key,
            actor=COORDINATOR,
            clock=self.clock,
            reserve_bytes=0,
        )
        OPEN_HOUSES[id(self)] = self
        outcome = Outcome(
            self.folder / "runs",
            self.blobs,
            schema=self.schema,
            base_model="tiny",
            signer=COORDINATOR,
            key=self.key,
            charter_digest=self.policy.digest,
        )
        ingress = Ingress(
            federation=FEDERATION,
            silos=self.listed,
            policy=self.policy,
            schema=self.schema,
            references=self.references,
            public_set_sha256=HASH["public"],
            topics=frozenset({"sort up", "rotate"}),
            grading=self.grading,
            now_seconds=self.clock,
        )
        agreed = dataclasses.replace(AGREED, lora_schema_sha256=self.schema.digest, models=self.models)
        self.driver = Driver(
            Dependencies(
                federation=FEDERATION,
                spiffe_id=COORDINATOR,
                signing_key=self.key,
                silos=self.listed,
                agreed=agreed,
                store=self.store,
                blobs=self.blobs,
                audit=self.audit,
                ingress=ingress,
                now=lambda: datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                monotonic=self.clock,
                publish=lambda name, fields: self.published.append((name, fields)),
                finished=outcome.write,
                payload_digest=payload_digest,
                poll_wait_seconds_max=0.0,
                replies=self.replies,
            )
        )
        fixed = Fixed(FEDERATION, self.listed, agreed, self.schema, len(REFERENCES), self.policy)
        self.submissions = Submissions(self.driver, fixed, self.driver.dependencies.now, self.folder)
        self.driver.after_hello = self.submissions.look
        try:
            self.driver.load()
            self.submissions.load()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close log and database; at the latest the end of the test does."""
        if OPEN_HOUSES.pop(id(self), None) is not None:
            self.audit.close()
            self.store.close()

    def submit(self, text: str = RUN_YAML) -> dict[str, Any]:
        return self.submissions.submit(text, source="run.yaml", person="alice")

    def advance(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.submissions.look()
        self.driver.tick()

    def rows(self, read: Callable[[Session], Any]) -> Any:
        with self.store.transaction() as session:
            return read(session)

    def run(self) -> db.Run:
        found: db.Run = self.rows(lambda session: session.get_one(db.Run, "run-1"))
        return found

    def round(self, number: int) -> db.Round:
        found: db.Round = self.rows(lambda session: session.get_one(db.Round, ("run-1", number)))
        return found

    def record(self) -> dict[str, Any]:
        document = json.loads((self.folder / "runs" / "run-1" / "run_record.json").read_bytes())
        record: dict[str, Any] = document["record"]
        return record


def payload_digest(kind: str, payload: AnyPayload) -> dict[str, Any]:
    return {"bytes": payload.size_bytes, "sha256": payload.digest}


def hello(**changes: Any) -> pb.Hello:
    fields: dict[str, Any] = {
        "protocol_min": PROTOCOL_VERSION,
        "protocol_max": PROTOCOL_VERSION,
        "base_model_sha256": AGREED.base_model_sha256,
        "tokenizer_sha256": AGREED.tokenizer_sha256,
        "template_sha256": AGREED.template_sha256,
        "load": "fp32",
        "lora_schema_sha256": AGREED.lora_schema_sha256,
        "public_set_sha256": AGREED.public_set_sha256,
        "held_out_sha256": AGREED.held_out_sha256,
        "code_sha256": "c0" * 32,
        "isolation": "namespaces",
        "role": "member",
        "min_updates": MIN_UPDATES,
    }
    return pb.Hello(**{**fields, **changes})


class SimulatedSilo:
    """One party: `say` sends one message; `live` polls and lets the silo half work until nothing is pending."""

    def __init__(self, house: House, name: str, *, federation: str = FEDERATION) -> None:
        self.house = house
        self.name = name
        seed = name.encode().ljust(32, b".")[:32]
        self.key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer = PeerIdentity(
            spiffe_id=f"spiffe://{federation}/silo/{name}",
            role="silo",
            name=name,
            signing_public_key=self.key.public_key(),
            fingerprint="f" * 64,
            not_after=datetime(2030, 1, 1, tzinfo=UTC),
        )
        self.sequences: dict[str, int] = {}
        self.acknowledged = 0
        self.heard: list[tuple[pb.Envelope, Any]] = []
        self.plan: Plan | None = None
        self.state: Any = None
        self.adapters: dict[str, bytes] = {}
        self.deltas: dict[int, dict[str, Any]] = {}
        self.mute: set[str] = set()  # kinds this silo never sends: a drop-out
        self.last: tuple[pb.Envelope, bytes] | None = None
        self.opening: events.MessageArrived | None = None  # of a round that waits for the others' signatures
        self.countersignature = b""
        self.begun = 0  # the last round that was agreed on

    # ---- one message ---------------------------------------------------------------------------------

    def envelope(self, kind: str, payload: bytes, *, run: str = "", number: int = 0, step: int = 0) -> pb.Envelope:
        self.sequences[run] = self.sequences.get(run, 0) + 1
        return seal(
            Place(run, number, step, kind), codec.sha256_hex(payload), federation=FEDERATION, attempt=1,
            sender=self.peer.spiffe_id, sequence=self.sequences[run], key=self.key,
        )  # fmt: skip

    def signed(self, envelope: pb.Envelope) -> pb.Envelope:
        envelope.signature = self.key.sign(codec.signing_bytes(envelope))
        return envelope

    def deliver(self, envelope: pb.Envelope, payload: bytes) -> Any:
        """Hand a message over; returns the reply's parsed body. Every reply's signature and sequence are checked."""
        self.last = (envelope, payload)
        reply = self.house.driver.receive(self.peer, envelope, payload)
        return self.checked(reply)

    def checked(self, reply: Reply) -> Any:
        envelope, content = reply.envelope, reply.payload.read_at(0, reply.payload.size_bytes)
        self.house.key.public_key().verify(envelope.signature, codec.signing_bytes(envelope))
        assert envelope.sender == COORDINATOR
        assert envelope.payload_digest.hex() == codec.sha256_hex(content)
        assert envelope.sequence > self.sequences.get("from coordinator", 0)
        self.sequences["from coordinator"] = envelope.sequence
        if envelope.kind == "global.adapter":
            return content
        body = codec.decode(INBOUND_KINDS[envelope.kind], content)
        self.heard.append((envelope, body))
        return body

    def say(self, kind: str, body: Any, *, run: str = "", number: int = 0, step: int = 0) -> Any:
        payload = body if isinstance(body, bytes) else codec.encode(body)
        return self.deliver(self.envelope(kind, payload, run=run, number=number, step=step), payload)

    # ---- a life --------------------------------------------------------------------------------------

    def join(self, **changes: Any) -> Any:
        known = {
            "lora_schema_sha256": self.house.schema.digest,
            "min_updates": min(MIN_UPDATES, len(self.house.listed)),
        }
        return self.say("control.hello", hello(**{**known, **changes}))

    def poll(self) -> tuple[pb.Envelope, Any] | None:
        """The next item, taken in, or None. It is acknowledged with the next poll."""
        body = self.say("control.poll", self.poll_body())
        if isinstance(body, pb.Ack | pb.Refusal):
            return None
        envelope = self.heard[-1][0]
        self.acknowledged = envelope.sequence
        return envelope, body

    def poll_body(self) -> pb.Poll:
        return pb.Poll(acknowledged_sequence=self.acknowledged, countersignature=self.countersignature)

    def live(self) -> bool:
        """Take in everything pending and react. Returns whether anything came."""
        came = False
        while (item := self.poll()) is not None:
            came = True
            self.react(*item)
        return came

    def react(self, envelope: pb.Envelope, body: Any) -> None:
        if isinstance(body, pb.RunPlan):
            self.plan = plan_from_canonical(body.canonical_json)
            self.half = method_named(self.plan.method).silo
            self.state, self.opening, self.begun = self.half.start(self.plan, self.name), None, 0
            return
        assert self.plan is not None
        message = events.MessageArrived("", envelope.kind, envelope.round, envelope.step, body, "")
        if isinstance(body, pb.RoundOpen):
            # signs whatever it is shown; what a real silo looks at is tested with a real guard
            shown = transcript_from_canonical(body.transcript)
            self.opening, self.countersignature = message, sign_transcript(shown, self.peer.spiffe_id, self.key)
            return
        if isinstance(body, pb.RoundAgreed):
            self.countersignature = b""
            assert self.opening is not None and self.opening.round == envelope.round
            if self.begun == envelope.round:
                return  # one more has signed since
            self.begun = envelope.round
            message, number = self.opening, envelope.round
            if len(body.countersignatures) < min(2, len(self.plan.silos)):
                self.say("control.abstain", pb.Abstain(round=number), run=self.plan.run, number=number)
                return
        self.feed(message)

    def feed(self, event: events.SiloEvent) -> None:
        pending: list[events.SiloEvent] = [event]
        while pending:
            self.state, actions = self.half.on_event(self.state, pending.pop(0))
            for action in actions:
                match action:
                    case events.Train(task):
                        pending.append(events.TaskDone(task, self.work(task)))
                    case events.Offer(kind, number, step, body):
                        outcome = "denied" if kind in self.mute else self.offer(kind, number, step, body)
                        pending.append(events.OfferSettled(kind, number, step, outcome))
                    case events.Fetch(digest):
                        content = self.say("control.fetch", pb.Fetch(digest=digest))
                        assert isinstance(content, bytes) and codec.sha256_hex(content) == digest
                        self.adapters[digest] = content

    def offer(self, kind: str, number: int, step: int, body: Any) -> str:
        assert self.plan is not None
        payload = self.delta_payload(number) if kind in UPDATE_KINDS else codec.encode(body)
        reply = self.say(kind, payload, run=self.plan.run, number=number, step=step)
        return "sent" if isinstance(reply, pb.Ack) else "denied"

    # ---- in place of a trainer -----------------------------------------------------------------------

    def work(self, task: TrainerTask) -> Any:
        match task:
            case GeneratePublic(_, _, indices) | AnswerAhead(_, _, indices):
                return self.answers(indices)
            case Evaluate(number) | EvaluateOwn(number):
                own = isinstance(task, EvaluateOwn)
                digest = "" if own else task.digest  # type: ignore[attr-defined]
                value = round(0.25 + 0.1 * number + (0.01 * SILOS.index(self.name) if own else 0.0), 4)
                metrics = [
                    pb.Metric(name="pass_at_1", value=value),
                    pb.Metric(name="pass_at_1", topic="rotate", value=value),
                ]
                return pb.MetricsEval(split="held_out", adapter_digest=digest, metrics=metrics)
            case ExportDelta(number):
                return codec.decode_factors(self.delta_payload(number)).header
        return None

    def answers(self, indices: tuple[int, ...]) -> pb.PublicResponses:
        """Right answers only; how many depends on the silo, so that Balanced has something to swap."""
        body = pb.PublicResponses(public_set_sha256=AGREED.public_set_sha256)
        right = {"hospital_a": 0, "hospital_b": 2, "hospital_c": 3, "hospital_d": 1}[self.name]
        for index in indices:
            row = body.prompts.add(prompt_index=index, samples=4)
            for _ in range(right):
                row.responses.add(text=REFERENCES[index], finish=pb.FINISH_STOP)
        return body

    def delta(self, number: int) -> dict[str, Any]:
        if number not in self.deltas:
            draw = np.random.default_rng([number, *self.name.encode()])
            turns = self.house.schema.updates
            trained = turns[(number - 1) % len(turns)]
            drawn = {name: draw.normal(0, 1e-3, shape).astype(np.float32) for name, shape in trained}
            self.deltas[number] = {name: quantise(drawn[name], self.house.schema.dtype) for name in drawn}
        return self.deltas[number]

    def delta_payload(self, number: int, **changes: Any) -> bytes:
        header: dict[str, Any] = {
            "base_digest": self.state.base_digest if self.state else "",
            "schema_sha256": self.house.schema.digest,
            "rank": self.house.schema.rank,
            "scale": self.house.schema.scale,
            "dtype": self.house.schema.dtype,
        }
        return codec.encode_factors(changes.pop("tensors", None) or self.delta(number), **{**header, **changes})


def lone_policy() -> Policy:
    """A charter under which a silo may work alone."""
    text = policy_text()
    assert text.count("min_peers: 2") == 1
    return policy_of(text.replace("min_peers: 2", "min_peers: 1"))


def federation(folder: Path, *, silos: tuple[str, ...] = SILOS, **of_house: Any) -> tuple[House, list[SimulatedSilo]]:
    house = House(folder, **of_house)
    return house, [SimulatedSilo(house, name) for name in silos]


def joined(folder: Path, request: str = RUN_YAML, **of_house: Any) -> tuple[House, list[SimulatedSilo]]:
    """A submitted run, and every silo has said hello."""
    house, silos = federation(folder, **of_house)
    house.submit(request)
    for silo in silos:
        silo.join()
    return house, silos


def played(
    folder: Path, request: str = RUN_YAML, mute: Mapping[int, Set[str]] = MappingProxyType({}), **of_house: Any
) -> tuple[House, list[SimulatedSilo]]:
    """A run as far as its silos bring it without waiting; some of them never send these kinds."""
    house, silos = federation(folder, **of_house)
    for place, kinds in mute.items():
        silos[place].mute = set(kinds)
    house.submit(request)
    for silo in silos:
        silo.join()
    until_quiet(silos)
    return house, silos


def started_again(house: House, silos: Iterable[SimulatedSilo] = ()) -> House:
    """The coordinator is killed, and another one is started on its folder, which these silos find."""
    house.close()
    again = dataclasses.replace(house, published=[])
    for silo in silos:
        silo.house = again
    return again


Build = TypeVar("Build", bound=Callable[..., Any])


def once(build: Build) -> Build:
    """Make a builder of (house, silos...) work once in a process for each request: every test goes on from a copy of
    the folder, with a coordinator that was started since and silos as they were."""
    made: dict[str, tuple[TemporaryDirectory[str], House, Any]] = {}

    @functools.wraps(build)
    def on_a_copy(folder: Path, *arguments: Any, **fields: Any) -> Any:
        if not all(isinstance(value, str | bool) for value in (*arguments, *fields.values()) if value is not None):
            return build(folder, *arguments, **fields)  # what it is about is no text to remember it by
        key = repr((arguments, fields))
        if key not in made:
            place = TemporaryDirectory()
            house, *rest = build(Path(place.name) / "played", *arguments, **fields)
            house.close()
            for silo in silos_among(rest):
                silo.house = None  # type: ignore[assignment]
            made[key] = place, house, rest
        _, house, rest = made[key]
        shutil.copytree(house.folder, folder, dirs_exist_ok=True)
        again = dataclasses.replace(house, folder=folder, clock=Clock(house.clock()), published=[])
        rest = copy.deepcopy(rest)
        for silo in silos_among(rest):
            silo.house = again
        return again, *rest

    return cast(Build, on_a_copy)


def silos_among(parts: Iterable[Any]) -> Iterator[SimulatedSilo]:
    for part in parts:
        yield from part if isinstance(part, list) else [part]


@once
def in_midst(folder: Path, request: str = RUN_YAML, **of_house: Any) -> tuple[House, list[SimulatedSilo]]:
    """The first round is open, and all updates but the last silo's are in."""
    house, silos = played(folder, request, {-1: {"lora.factors"}}, **of_house)
    assert len(house.driver.runs["run-1"].life.those("accepted")) == len(silos)
    return house, silos


def goes_on(house: House, silos: list[SimulatedSilo]) -> db.Run:
    """The silos find another coordinator where the first was; the one that was slow sends what it held back."""
    for silo in silos:
        silo.house = house
    last = silos[-1]
    last.mute = set()
    last.say("lora.factors", last.delta_payload(1), run="run-1", number=1)
    until_quiet(silos)
    return house.run()


@once
def step_asked_for(folder: Path, **of_house: Any) -> tuple[House, list[SimulatedSilo]]:
    """Round 1 stands open, step 2 has been asked for, and nobody has answered yet."""
    return played(folder, mute={place: {"public.responses", "lora.factors"} for place in range(len(SILOS))}, **of_house)


def house_in_round(folder: Path) -> House:
    """A run whose first round is open, and nobody has answered in it."""
    house, silos = joined(folder)
    for _ in range(2):
        for silo in silos:
            silo.poll()
    return house


def until_quiet(silos: list[SimulatedSilo]) -> None:
    quiet = False
    while not quiet:
        came = [silo.live() for silo in silos]  # every silo has its turn, whatever the others got
        quiet = not any(came)

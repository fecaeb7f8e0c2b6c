"""A whole federation of two in memory, for the X9 tests: the real coordinator core with its hostile replies, the real
guard of hospital_a with a scripted trainer behind a hostile link, and an honest hospital_b beside it.

Nothing waits: whoever has something to do does it in turns, and the clocks move by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from certs.identity import PeerIdentity
from coordinator import outbox
from coordinator import store as db
from fedsilo.audit.log import AuditLog
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.tasks import Evaluate, TrainerTask
from policies.model import Policy
from silo.guard.messages import Reply
from silo.guard.trainer_process.supervisor import TrainerSaid
from silo.link import LinkMessage
from tests.hostile.coordinator import HostileReplies
from tests.hostile.trainer import HostileLink
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo
from tests.simulated.guard_loop import Coordinator, Loop, QuietTrainer
from tests.simulated.guarded import COORDINATOR_KEY, OUR_KEY, small_factors

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


class Federation:
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
        guard, agreed = self.loop.guard, self.house.driver.parts.agreed
        self.loop.coordinator = self.loop.bench.channel = self.channel
        self.loop.bench.gate._channel = self.channel
        self.loop.trainer = guard._trainer = guard.runs._trainer = self.trainer
        site: Any = guard._site
        site.fingerprints = agreed  # it has the three of a model folder among its own
        site.public, site.held_out = (
            SimpleNamespace(sha256=agreed.public_set_sha256),
            SimpleNamespace(sha256=agreed.held_out_sha256),
        )
        guard._talk.joined = False

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
        self.loop.clock = max(self.loop.clock, guard._talk.retry_at) + 0.1
        self.loop.bench.clock_now += 0.2
        self.house.advance(0.2)
        guard._talk.poll_now = True
        if not self.asks():
            guard._talk.retry_at = self.loop.clock + MOMENT_SECONDS  # only what its trainer said is dealt with
        guard._turn()

    def asks(self) -> bool:
        """Return True if hospital_a's guard may poll in this turn."""
        return True

    @property
    def failed(self) -> str:
        """The code with which hospital_a's guard gave up; empty while it goes on."""
        failure = self.loop.guard._failure
        return failure.code if failure is not None else ""

    def close(self) -> None:
        self.loop.close()
        self.house.close()

    # ---- what was recorded, and what left ----

    def records(self, event: str = "ingress.decision") -> list[dict[str, Any]]:
        return self.loop.bench.events(event)

    def left(self, kind: str) -> list[tuple[pb.Envelope, bytes]]:
        return [(envelope, payload) for envelope, payload in self.channel.sent if envelope.kind == kind]


class LastToBeReady(Federation):
    """hospital_a is the slowest silo: within a round its guard polls only for what waits already."""

    def asks(self) -> bool:
        view, ledger = self.loop.bench.gate.view, self.loop.bench.ledger
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

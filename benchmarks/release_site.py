"""The silo in which the releases of `benchmarks.releases` are held: its real gate, ledger, log, policy, screens and
guard with their control desk, on a folder. In memory are only the channel, the trainer and the clock.

What people are shown comes from `Guard` and its desk as a console reads it; nothing in it is written by hand.
"""

from __future__ import annotations

import json
import queue
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import LIFETIME_MAX, create_ca
from certs.enrolment import EnrolmentKeys
from certs.roles import Role, Roles
from fedsilo.control.client import Event
from fedsilo.control.client import Snapshot as Reading
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.plan import Rollout
from policies.model import Policy
from policies.render import PlanSize
from policies.schema import LoraSchema
from silo.config import CoordinatorPlace
from silo.guard.adapters import AdapterStore
from silo.guard.answers.state import RunStatus
from silo.guard.decisions import RunView
from silo.guard.ledger import Release
from silo.guard.loop import Guard
from silo.guard.messages import Held
from silo.sampling import Training
from tests.policies import setting
from tests.simulated import screening
from tests.world import COORDINATOR_KEY, OUR_KEY, STEPS, Bench, QuietTrainer, command

SILO, FEDERATION = "hospital_a", "cardio-net"
ADDRESS = "coordinator.example:7443"
PEOPLE: dict[str, frozenset[Role]] = {"alice": frozenset({"approver"}), "bob": frozenset({"approver"})}
SIZE = PlanSize(local_steps=4, prompts_per_step=3, samples_per_prompt=8, max_new_tokens=64)
ROUND_SECONDS = 900.0
HELD_SECONDS = 133.0  # since when a release is held, once it is looked at
DAY_BYTES = 360_000  # what the policy lets out on one day: ten rounds with an update and an answer each
LAYERS, WIDTH = 4, 64
STOCK = "first we take the row and move each part to its place then count what is left and so on"


def schema(rank: int = 8) -> LoraSchema:
    """Query and value factors of four layers of width 64."""
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for layer in range(LAYERS):
        for module in ("q_proj", "v_proj"):
            stem = f"model.layers.{layer}.self_attn.{module}"
            tensors += [(f"{stem}.lora_A", (rank, WIDTH)), (f"{stem}.lora_B", (WIDTH, rank))]
    return LoraSchema(setting.HASH["base"], rank, 2.0 * rank, "float32", "all-linear", tuple(sorted(tensors)))


def policy(changes: Mapping[str, str] | None = None, *, rank: int = 8) -> Policy:
    """The shipped pubswap ruleset with every screen, which holds every release for one approver.

    Args:
        changes: further edits of its text; each must stand in it.
        rank: of the schema that it pins.
    """
    text = setting.policy_text(schema=schema(rank), size=SIZE)
    edits = {
        "    per_round: 1\n    secure": "    per_round: 2\n    secure",
        "    send_only_verified:": f"    screens: [{', '.join(screening.NAMES)}]\n    on_hit: hold\n"
        "    max_hits_per_day: 10\n    send_only_verified:",
    }
    head, found, ingress = text.partition("# ---- what this site takes in")
    assert found
    head, updates = re.subn(r"(\n      then: )0\b", r"\g<1>1", head)
    assert updates == 2, "updates and answers"
    day_line = head.partition("  day_bytes: ")[2].partition("\n")[0]
    edits[f"  day_bytes: {day_line}"] = f"  day_bytes: {DAY_BYTES}"
    for old, new in {**edits, **(changes or {})}.items():
        assert head.count(old) == 1, old
        head = head.replace(old, new)
    return setting.policy_of(f"{head}{found}{ingress}\n{screening.DEFINITIONS}")


@dataclass
class Site:
    """One silo. `hold_*` offers a message to the gate and keeps it for people; `let_go` approves and sends it.

    Args:
        folder: of its state.
        run: name of the run it takes part in.
        seed: of values and texts.
        policy: in force.
        rank: of its adapter.
    """

    folder: Path
    run: str
    seed: int
    policy: Policy
    rank: int = 8
    desk: ControlServer = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.random = random.Random(self.seed)  # noqa: S311 - a fixed set
        self._rows = np.random.default_rng(self.seed)
        self.bench = Bench(
            self.folder / "state", self.policy, schema=schema(self.rank), screens=screening.screens(self.folder / "s"),
            grader=screening.EndGrader(), count_tokens=screening.words,
        )  # fmt: skip
        self.coordinator(ADDRESS)
        self.bases = {0: sha256_hex(self.run.encode())}
        self.open_round(1)

    def close(self) -> None:
        self.bench.close()

    @property
    def usual_l2(self) -> float:
        """Norm of this trainer's updates, give or take: less than half of what the policy lets out."""
        block = self.bench.judge.policy.file.egress.lora_factors
        assert block is not None
        return 0.45 * block.clip_l2

    def coordinator(self, address: str, lifetime: timedelta = LIFETIME_MAX) -> None:
        """The guard is started anew, dials `address`, and finds a certificate there that is good for `lifetime`."""
        now = datetime.fromtimestamp(self.bench.clock_now, UTC)
        keys = EnrolmentKeys(ec.generate_private_key(ec.SECP256R1()).public_key(), OUR_KEY.public_key())
        authority = create_ca(FEDERATION, kind="federation", not_before=now - timedelta(days=1), days=30)
        issued = authority.issue(keys, "coordinator", "main", now=now, lifetime=lifetime)
        self.address, self.far_end_until = address, issued.not_after
        seen = {"certificate": issued.fingerprint, "not_after": f"{issued.not_after:%Y-%m-%dT%H:%M:%SZ}"}
        self.bench.releases.destination.update({"address": address, **seen})
        self._appoint()

    def restart(self, policy: Policy, *, run: str, rank: int) -> None:
        """A new process on the same folder, for another run, whose adapter may have another form."""
        screens, clock = self.bench.screens, self.bench.clock_now
        destination = dict(self.bench.releases.destination)
        self.bench.close()
        self.rank, self.run, self.policy = rank, run, policy
        self.bench = replace(self.bench, policy=policy, schema=schema(rank), screens=screens)
        self.bench.clock_now = clock
        self.bench.releases.destination.update(destination)
        self._appoint()
        self.bases = {0: sha256_hex(self.run.encode())}
        self.open_round(1)

    def _appoint(self) -> None:
        """The guard around the gate, with its desk."""
        bench = self.bench
        tasks = SimpleNamespace(sha256=setting.HASH["public"])
        config = SimpleNamespace(
            silo=SILO, role="member", federation=FEDERATION, state_dir=self.folder, spiffe_id=setting.SILO,
            model=SimpleNamespace(load="fp32"), coordinator=CoordinatorPlace(address=self.address),
            data=SimpleNamespace(verifier="exact", public=SimpleNamespace(verifier="exact")), acceptance=None,
        )  # fmt: skip
        site: Any = SimpleNamespace(
            config=config, policy=bench.policy, schema=bench.schema, public=tasks, held_out=tasks,
            site_secret=b"s" * 32, roles=Roles(SILO, {}), coordinator_key=COORDINATOR_KEY.public_key(),
            identity=SimpleNamespace(
                not_after=datetime.fromtimestamp(setting.NOW, UTC).replace(year=2027, month=10), trust_root_pem=b"",
                signing_key=OUR_KEY,
            ),
            fingerprints=SimpleNamespace(
                base_model_sha256=setting.HASH["base"], tokenizer_sha256=setting.HASH["tokenizer"],
                template_sha256=setting.HASH["template"],
            ),
        )  # fmt: skip
        self.desk = ControlServer(
            SILO, b"", Roles(SILO, PEOPLE), lambda: datetime.fromtimestamp(self.bench.clock_now, UTC),
            federation=FEDERATION,
        )  # fmt: skip
        self.guard = Guard(
            site=site, gate=bench.gate, ledger=bench.ledger, audit=bench.audit, releases=bench.releases,
            adapters=AdapterStore(self.folder / "adapters"), trainer=QuietTrainer(), control_server=self.desk,
            events=queue.Queue(), code_sha256=setting.HASH["base"],
        )  # fmt: skip
        self.guard.register(self.desk)

    def open_round(self, number: int, base: str = "") -> None:
        """Round `number` starts from what the round before ended in, or from `base`."""
        self.round = number
        self.bases.setdefault(number, sha256_hex(f"{self.run}/{number}".encode()))
        started = base or self.bases[number - 1]
        plan = setting.PLAN.model_copy(update={
            "run": self.run, "rounds": 12, "samples_per_prompt": SIZE.samples_per_prompt,
            "rollout": Rollout(max_new_tokens=SIZE.max_new_tokens),
            "lora": setting.PLAN.lora.model_copy(update={
                "rank": self.rank, "alpha": 2.0 * self.rank, "schema_sha256": schema(self.rank).digest,
            }),
        })  # fmt: skip
        self.bench.judge.view = RunView(
            plan, number, started, 1.0, STEPS, open_step=2,
            evaluated={number - 1: self.bases[number - 1], number: started},
            training=Training(24 + self.random.randint(-3, 3), 1, 4), witnesses=1, last_adapter=started,
            last_adapter_round=number - 1,
        )  # fmt: skip

    # ---- messages ----

    def hold_factors(self, times_usual: float) -> Release:
        """A delta of `times_usual` the usual norm."""
        values = {name: self._rows.standard_normal(shape) for name, shape in schema(self.rank).tensors}
        norm = float(np.sqrt(sum(float((part**2).sum()) for part in values.values())))
        factor = times_usual * self.usual_l2 / norm
        tensors = {name: (part * factor).astype(np.float32) for name, part in values.items()}
        body = pb.Factors(base_digest=self.bench.judge.view.base_digest)
        held = self.bench.gate.offer(self.bench.judge.view.place("lora.factors", self.round), body, tensors=tensors)
        return self._hold("lora.factors", held, 3600.0)

    def hold_responses(self, texts: int, words: int, planted: str = "") -> Release:
        """Answers to the open step's public prompts, of about so many words each."""
        answers = [self._answer(words) for _ in range(texts)]
        if planted:
            answers[self.random.randrange(len(answers))] = planted
        rows = STEPS[2]
        dealt = [(row, tuple(answers[place :: len(rows)])) for place, row in enumerate(rows)]
        body = setting.responses_body(*dealt, samples=SIZE.samples_per_prompt)
        held = self.bench.gate.offer(self.bench.judge.view.place("public.responses", self.round, 2), body)
        return self._hold("public.responses", held, 3600.0)

    def _answer(self, words: int) -> str:
        stock = STOCK.split()
        length = max(words + self.random.randint(-words // 4, words // 4), 3)
        return " ".join([*(self.random.choice(stock) for _ in range(length - 1)), "12"])

    def _hold(self, kind: str, held: Any, deadline_seconds: float) -> Release:
        if not isinstance(held, Held):
            raise AssertionError(f"{kind} was not held: {held.decision.explain() if held else held}")
        release = self.bench.releases.hold(held, deadline_seconds=deadline_seconds)
        self.desk.publish("release.held", {"release": release.id, "kind": kind})
        return release

    def let_go(self, release: Release, person: str = "bob") -> None:
        """A person approves, and the bytes leave."""
        self.wait(60.0 + self.random.random() * 120.0)
        shown = {"release": release.id, "digest": release.digest, "policy_digest": self.bench.judge.policy.digest}
        shown |= self.bench.opened(release.id)  # this person opens every finding
        _, settled = self.bench.releases.approve(command("approvals.approve", shown, person=person))
        assert settled is not None and settled.allowed is not None
        self.bench.gate.transmit(settled.allowed)
        self.desk.publish("sent", {"kind": release.kind, "round": release.round})

    def wait(self, seconds: float) -> None:
        self.bench.clock_now += seconds

    # ---- what a console reads ----

    def show(self) -> None:
        """Hand the desk the present state, as the guard's loop does after each turn."""
        plan = self.bench.judge.view.plan
        run = None if plan is None else RunStatus(plan, None, paused=False, adapter_held="")
        self.guard.status.show(replace(self.guard.moment(), run=run))


@dataclass(frozen=True)
class DeskSource:
    """A desk without a socket, as a `console.feed.Source`."""

    desk: ControlServer

    def snapshot(self) -> Reading:
        seen = self.desk.snapshot()
        return Reading(seen.sequence, seen.time, seen.policy_digest, json.loads(seen.state_json))

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        for event in self.desk.events_since(since_sequence, 0.0):
            yield Event(event.sequence, event.time, event.name, json.loads(event.fields_json))

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        reply = self.desk.query(name, json.dumps(dict(arguments or {})))
        raise_for_reply(reply)
        return json.loads(reply.data_json)

    def close(self) -> None: ...

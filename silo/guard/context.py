"""Where a run stands, as the rules see it: the plan, the open round, the open public step, and the site's own copies.

Built by the daemon from what the coordinator sent and the gate let in; never from what the trainer says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.donor_pool import rows_answered
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.transcript import transcript_from_canonical
from policies.asked import Asked
from policies.engine import Context, Message
from policies.message import Screened
from policies.schema import LoraSchema
from silo.guard.adapters import AdapterStore
from silo.guard.public import PublicView
from silo.sampling import Training

# A slow silo may evaluate a round when later ones are open already.
ROUNDS_EVALUATED = 16


@dataclass(frozen=True)
class RunView:
    """One run.

    Attributes:
        last_adapter: digest of the last adapter that this site took into a round of the run; "" before the first.
        last_adapter_round: the round that ended in it; 0 for what the run began with.
        told_adapter: digest of what the last result that this silo was told of left the run with, or, before any, of
            what the first round that it saw began with; "" before that. The next round begins with no other (T58).
    told_round: the round whose result that was, or a later one that came to no other adapter; 0 before any.
        pool: silos whose answers are the open round's donors, as its transcript says; None where none does.
        steps: rows of the public set that each public step of the open round asks for.
        evaluated: the committed adapter of each of the last rounds, which an evaluation of that round is about.
        refused_round: the last round whose round.open was not let in; 0 is none.
        witnesses: of this site's log as it was after the last round, as its policy counts them; None before the first.
        asked: what the coordinator has asked in this run, beside the public steps.
        agreeing: the open round waits until enough silos have signed its transcript.
        usable_records: private records that the trainer says it can use; None before it said so.
        training: what the open round's update was trained on, as this guard gave it out; None before there is one.
    """

    plan: Plan | None = None
    round: int = 0
    base_digest: str = ""
    base_l2: float | None = None
    steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    open_step: int = 0
    evaluated: Mapping[int, str] = field(default_factory=dict)
    refused_round: int = 0
    training: Training | None = None
    asked: Asked = field(default_factory=Asked)
    usable_records: int | None = None
    witnesses: int | None = None
    agreeing: bool = False
    last_adapter: str = ""
    last_adapter_round: int = 0
    told_adapter: str = ""
    told_round: int = 0
    pool: frozenset[str] | None = None

    @property
    def run(self) -> str:
        return self.plan.run if self.plan else ""

    def place(self, kind: str, round_number: int = 0, step: int = 0) -> Place:
        """Return the place of a message of this run."""
        return Place(self.run, round_number, step, kind)

    def opened(self, round_number: int, body: pb.RoundOpen) -> RunView:
        steps = {row.step: tuple(row.prompt_indices) for row in body.public_steps}
        base, pool = body.base_digest, None
        if self.plan is not None and self.plan.exchange == "round_end":
            pool = frozenset(transcript_from_canonical(body.transcript).pool)
        return replace(
            self, round=round_number, base_digest=base, base_l2=None, steps=steps, open_step=0, training=None,
            agreeing=True, pool=pool, told_adapter=self.told_adapter or base,
        )  # fmt: skip

    def settled(self) -> RunView:
        """The open round waits for no signature any more: it is agreed on, or over."""
        return replace(self, agreeing=False)

    def asking(self, body: ProtobufMessage, step: int) -> RunView:
        """The coordinator's message was let in."""
        return replace(self, asked=self.asked.after(body, step))

    def at_step(self, step: int) -> RunView:
        return replace(self, open_step=step)

    def told(self, round_number: int, body: pb.RoundResult) -> RunView:
        """A round is over, whether or not this silo was in it."""
        adapter = body.adapter_digest if body.committed else self.told_adapter
        return replace(self, told_round=round_number, told_adapter=adapter)

    def evaluating(self, adapter_digest: str) -> RunView:
        """The open round was committed."""
        known = {number: digest for number, digest in self.evaluated.items() if number > self.round - ROUNDS_EVALUATED}
        return replace(self, evaluated={**known, self.round: adapter_digest})

    def refused(self, round_number: int) -> RunView:
        """Its round.open was not let in, and the coordinator is to be told which."""
        return replace(self, refused_round=round_number)

    def trained(self, training: Training) -> RunView:
        return replace(self, training=training)

    def witnessed(self, witnesses: int) -> RunView:
        return replace(self, witnesses=witnesses)

    def with_base_l2(self, base_l2: float | None) -> RunView:
        """The adapter that the open round starts from is here, and has this norm: the next one is compared with it."""
        return replace(self, base_l2=base_l2, last_adapter=self.base_digest, last_adapter_round=max(self.round - 1, 0))

    @property
    def step_from(self) -> str:
        """What an adapter that comes in at this place is measured from (T20), as one text: the last adapter of the run
        and its round. As long as it stays the same the rounds in between grow, so whatever was let in is near enough.
        """
        return f"{self.run}/{self.last_adapter_round}/{self.last_adapter}"

    @property
    def adapters(self) -> frozenset[str]:
        """Digests of those without which the run cannot go on here."""
        return frozenset({self.last_adapter, self.base_digest})

    @property
    def rounds_since_last_adapter(self) -> int:
        """Between the last adapter and one that comes in at this place: what the open round ended in, or began with.

        A round that ended in nothing counts too, since the silo need not have heard how a round ended.
        """
        ended = self.round if self.round in self.evaluated else self.round - 1
        return max(1, ended - self.last_adapter_round)

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "base_digest": self.base_digest,
            "base_l2": self.base_l2,
            "steps": {str(step): list(rows) for step, rows in self.steps.items()},
            "last_adapter": self.last_adapter,
            "last_adapter_round": self.last_adapter_round,
            "told_adapter": self.told_adapter,
            "told_round": self.told_round,
            "open_step": self.open_step,
            "agreeing": self.agreeing,
            "pool": None if self.pool is None else sorted(self.pool),
            "evaluated": {str(number): digest for number, digest in self.evaluated.items()},
            "asked": self.asked.to_json(),
            "usable_records": self.usable_records,
            "training": None if self.training is None else self.training.to_json(),
        }

    @staticmethod
    def from_json(plan: Plan, value: Mapping[str, Any]) -> RunView:
        return RunView(
            plan=plan,
            round=int(value.get("round", 0)),
            base_digest=str(value.get("base_digest", "")),
            base_l2=value.get("base_l2"),
            last_adapter=str(value.get("last_adapter", "")),
            last_adapter_round=int(value.get("last_adapter_round", 0)),
            told_adapter=str(value.get("told_adapter", "")),
            told_round=int(value.get("told_round", 0)),
            steps={int(step): tuple(rows) for step, rows in value.get("steps", {}).items()},
            open_step=int(value.get("open_step", 0)),
            agreeing=bool(value.get("agreeing", False)),
            pool=None if value.get("pool") is None else frozenset(map(str, value["pool"])),
            evaluated={int(number): str(digest) for number, digest in value.get("evaluated", {}).items()},
            asked=Asked.from_json(value.get("asked", {})),
            usable_records=value.get("usable_records"),
            training=Training.from_json(value.get("training")),
        )


@dataclass(frozen=True)
class SiteView:
    """What does not change while the daemon runs.

    Attributes:
        topics: labels that a metric may carry: those of the held-out set.
        adapters: those it holds; without them every global adapter but a run's first is refused.
        by_files: there is no line, so a signature under a transcript may leave after the round has begun.
    """

    spiffe_id: str
    coordinator_id: str
    schema: LoraSchema
    public: PublicView
    topics: frozenset[str]
    adapters: AdapterStore | None = None
    by_files: bool = False

    def last_adapter(self, view: RunView, kind: str) -> Mapping[str, Array] | None:
        """What a global adapter is compared with; None for other kinds, for a run's first, and if it is gone."""
        if kind != "global.adapter" or self.adapters is None or not view.last_adapter:
            return None
        return self.adapters.tensors(view.last_adapter)


def context_of(
    site: SiteView,
    view: RunView,
    message: Message,
    *,
    now_seconds: float,
    expected_sender: str,
    graded: tuple[tuple[bool | None, ...], tuple[int, ...]] | None = None,
    screened: Screened | None = None,
) -> Context:
    """The engine's context for one message.

    Args:
        site: of this daemon.
        view: of the run.
        now_seconds: UTC, never going back.
        expected_sender: whose message it must be.
        message: its round says which adapter an evaluation must name, its step which rows are asked for.
        graded: own verdicts and token counts, for a message with answers; without a verdict one is not right.
        screened: what own screens found in the same answers.
    """
    rows, open_step = view.steps, view.open_step
    if view.plan is not None and view.plan.exchange == "round_end":
        # Donors come with the opening and answers leave at the end, those of all steps together.
        rows = view.steps if message.direction == "ingress" else rows_answered(view.plan, view.round, view.steps)
        open_step = message.place.step if message.place.step in rows else 0
    return Context(
        now_seconds=now_seconds,
        expected_sender=expected_sender,
        plan=view.plan,
        schema=site.schema,
        base_digest=view.base_digest,
        base_l2=view.base_l2,
        last_adapter=site.last_adapter(view, message.place.kind),
        last_adapter_first=view.run != "" and not view.last_adapter,
        last_adapter_rounds=view.rounds_since_last_adapter,
        open_round=view.round,
        open_step=open_step,
        open_steps=view.steps,
        refused_round=view.refused_round,
        evaluated_digest=view.evaluated.get(message.place.round, ""),
        public_set_sha256=site.public.tasks.sha256,
        public_set_rows=len(site.public.tasks.rows),
        public_prompt_indices=tuple(rows.get(message.place.step, ())),
        verdicts=tuple(verdict is True for verdict in graded[0]) if graded else None,
        token_counts=graded[1] if graded else None,
        asked=view.asked,
        usable_records=view.usable_records,
        screened=screened,
        records=view.training.records if view.training else None,
        epochs=view.training.epochs if view.training else None,
        steps=view.training.steps if view.training else None,
        witnesses=view.witnesses,
        countersigns=view.agreeing or (site.by_files and view.round > 0),
        topics=site.topics,
    )

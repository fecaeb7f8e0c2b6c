"""The input of a decision: one message, the party's position in the run, and the coordinator's requests to a silo.
Plain data.

`measure` (policies/engine.py) turns a message in its context into facts; rules see the facts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.place import Place, Placed
from fedsilo.protocol.plan import Plan
from policies.schema import LoraSchema


@dataclass(frozen=True)
class Requests:
    """The requests of the coordinator to one silo: the only things that its answers may be about.

    Both parties keep it in the same way, the silo from what it has let in and the coordinator from what it has sent, so
    both judge an answer alike (X3). Nothing asked is the strictest: any answer is about something else then.
    What this does not stop: questions chosen so that honest answers say much; per-day limits bound that.

    Attributes:
        step: of the open round, that the questions below belong to; 0 is none.
        exemplars: question -> rows of the exemplar set, in the order of the step's competence.ask.
        candidates: question -> number of candidate answers, in the order of the step's reward.ask.
        match, peer, part: of the last match.directive; part is "give" or "take".
    """

    step: int = 0
    exemplars: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    candidates: Mapping[int, int] = field(default_factory=dict)
    match: int = 0
    peer: str = ""
    part: str = ""

    def after(self, body: ProtobufMessage, step: int = 0) -> Requests:
        """Return the requests after a message from the coordinator; the same where it asks nothing.

        Args:
            body: of the message.
            step: of its envelope.
        """
        match body:
            case pb.RoundOpen():
                return self._at(0)
            case pb.CompetenceAsk():
                return replace(self._at(step), exemplars={row.question: tuple(row.exemplars) for row in body.questions})
            case pb.RewardAsk():
                return replace(self._at(step), candidates={row.question: len(row.candidates) for row in body.questions})
            case pb.MatchDirective():
                return replace(self, match=body.match, peer=body.peer, part=body.part)
        return self

    def _at(self, step: int) -> Requests:
        """A step's questions end when the next step asks."""
        return self if step == self.step else replace(self, step=step, exemplars={}, candidates={})

    @property
    def exemplar_rows(self) -> tuple[int, ...]:
        """Return every row asked for, each once, in the order of its first question."""
        return tuple(dict.fromkeys(row for rows in self.exemplars.values() for row in rows))

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "exemplars": [[question, list(rows)] for question, rows in self.exemplars.items()],
            "candidates": [[question, count] for question, count in self.candidates.items()],
            "match": self.match,
            "peer": self.peer,
            "part": self.part,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Requests:
        return Requests(
            step=int(value.get("step", 0)),
            exemplars={int(question): tuple(rows) for question, rows in value.get("exemplars", ())},
            candidates={int(question): int(count) for question, count in value.get("candidates", ())},
            match=int(value.get("match", 0)),
            peer=str(value.get("peer", "")),
            part=str(value.get("part", "")),
        )


Facts = dict[str, Any]

FINAL = "final"  # the exact values that go out, or came in
OFFERED = "offered"  # before the transforms: limits that a transform establishes are not judged yet

# A failure of any of these while measuring or judging is a refusal (threat model B5). Anything else propagates, and
# then there is no decision either.
EVALUATION_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FedSiloError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Message(Placed):
    """A release or an arrival.

    Attributes:
        direction: egress (this party is about to send it) or ingress (it has come in).
        place, sender: as in the envelope.
        payload_bytes: whole payload, tensors included.
        body: parsed payload; for a tensor kind its `Factors` header.
        tensors: float32 arrays by wire name, for a tensor kind. Read one at a time, so it may load lazily.
    """

    direction: str
    place: Place
    sender: str
    payload_bytes: int
    body: ProtobufMessage
    tensors: Mapping[str, Array] | None = None


@dataclass(frozen=True)
class Screened:
    """Hits of the text screens in one message (policies/screens/__init__.py).

    Attributes:
        ran: screens that ran over every text, by name: the digest of the settings they ran with.
        failed: screens that could not run; then nothing is known of any text.
        hits: for each text in message order, hits by screen and code, such as {"pii_basic/email": 1}.
    """

    ran: Mapping[str, str]
    failed: tuple[str, ...]
    hits: tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class Context:
    """The knowledge of the measuring party. A default is the strictest: what is unknown here leads to a refusal.

    Attributes:
        plan: of the run that is open; None outside one.
        schema: the site's LoRA schema.
        base_digest: adapter that the open round starts from.
        base_l2: its L2 norm over all factors, as `measure` gave it for global.adapter; None if unknown.
        last_adapter: factors of the last global adapter that was let in in this run; None if unknown.
        last_adapter_first: there is none yet, so the next one is the run's first.
        last_adapter_rounds: rounds between that one and the next; 1 from one round to the next, 0 if unknown.
        adapter_round: the round that the next one is the result of; 0 is what the run began with.
        open_round, open_step: where the run stands; open_step is the public step whose exchange is open, else 0.
        open_steps: rows that each public step of the open round asks for, as its round.open said.
        refused_round: the last round whose round.open was not let in, which the party may say; 0 is none.
        evaluated_digest: for metrics.eval of a round: the adapter that this round came to; "" if it came to none.
        public_set_sha256, public_set_rows: of the party's own copy of the public set.
        public_prompt_indices: rows that the open public step asks for, in its order.
        verdicts: the party's own grading, one for each response in message order (for public.donors: one for each
            donor that carries a response); None if it has not graded them.
        records, epochs, steps: what the open round's update was trained on, as the party itself gave it out
            (silo/sampling.py); None where it did not, as at a coordinator.
        token_counts: tokens of each response in the same order; None without a tokenizer (then bytes bound them).
        asked: what the coordinator has asked of the silo whose message it is.
        usable_records: private records the trainer can use, as the silo knows it; None at a coordinator.
        screened: what its screens found in the same texts; None if it ran none.
        witnesses: how many parties that the policy counts have countersigned the party's own log as it was after the
            last round; None where nobody asked.
        countersigns: whether a round waits for the party's signature under its transcript to be heard.
        topics: topic labels of the held-out set.
        now_seconds: UTC; the caller passes max(last seen, clock).
        expected_sender: this party's own SPIFFE id on egress, the certificate's on ingress.
        silo: the party's own name, where it is a silo.
    """

    now_seconds: float
    expected_sender: str
    silo: str = ""
    plan: Plan | None = None
    schema: LoraSchema | None = None
    base_digest: str = ""
    base_l2: float | None = None
    last_adapter: Mapping[str, Array] | None = None
    last_adapter_first: bool = False
    last_adapter_rounds: int = 0
    adapter_round: int = 0
    open_round: int = 0
    open_step: int = 0
    open_steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    refused_round: int = 0
    evaluated_digest: str = ""
    public_set_sha256: str = ""
    public_set_rows: int = 0
    public_prompt_indices: tuple[int, ...] = ()
    verdicts: tuple[bool, ...] | None = None
    token_counts: tuple[int, ...] | None = None
    records: int | None = None
    epochs: int | None = None
    steps: int | None = None
    asked: Requests = field(default_factory=Requests)
    usable_records: int | None = None
    screened: Screened | None = None
    witnesses: int | None = None
    countersigns: bool = False
    topics: frozenset[str] = field(default_factory=frozenset)

"""The tasks of a trainer, as data. A method's silo half names the tasks, the guard hands them out, and the
trainer carries them out (`silo/trainer/tasks`).

A task says of itself what everybody between the method and the trainer goes by: what crosses in which direction, whose
rows it wants, where it stands in a step, whether what comes next depends on it. So participation, sampling, resume, the
link and the benefit report know no task by its name, and a new one is its class, named by its method
(`Method.tasks`), and the module that carries it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, decode, encode

Own = TypeVar("Own", bound="TrainerTask")
FIRST = 1  # place of the task that begins a step


class TrainerTask:
    """Base class; each task is a frozen dataclass of plain values, and of at most one message, which crosses as bytes.

    Attributes:
        name: of its class, by which link, kept state and records call it.
        changes: what comes next depends on it. The trainer keeps its state after it, and a killed trainer is brought
            behind the last one.
        order: of the changing tasks: 0 is before the steps, `FIRST` begins one, what goes on with it has a higher one.
        begins_round: it makes an adapter the round's start; the changing tasks that follow are the round's.
        trains: it is a step of training.
        draws_rows: it has a field `rows`, which a method leaves out: whoever gives the task draws private rows for it
            (silo/sampling.py), since no coordinator may choose a silo's records (threat T19).
        reads_adapter: what crosses to the trainer is the payload of the adapter that its field `digest` names; empty:
            nothing, the base model is meant. Of any other task it is the message among its fields, if it has one.
        opens_exchange: the exchange of its public step is open from then on.
        stays: what it brings is in no state that the trainer keeps, so a trainer that is started again is given it
            before anything else.
        step: that it belongs to; 0 where it has no such field: it is the round's.
        gives: type of what the trainer answers, for the method to offer (of `pb.Factors` the header); None: nothing.
    """

    name: ClassVar[str]
    changes: ClassVar[bool] = False
    order: ClassVar[int] = 0
    begins_round: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    draws_rows: ClassVar[bool] = False
    reads_adapter: ClassVar[bool] = False
    opens_exchange: ClassVar[bool] = False
    stays: ClassVar[bool] = False
    gives: ClassVar[type[Message] | None] = None
    round: int
    step: int

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__
        if "step" not in cls.__annotations__:
            cls.step = 0

    @property
    def offers(self) -> str:
        """Kind of the message that goes out of its answer for the same round and step, and once only: whatever became
        of that, a task that a killed round has behind it is not given for its sake again. Empty: none."""
        return ""

    def body(self) -> Buffer:
        """The message among the fields, as the bytes that cross; empty: there is none."""
        for item in dataclasses.fields(self):  # type: ignore[arg-type]  # each task is a dataclass
            if isinstance(value := getattr(self, item.name), Message):
                return encode(value)
        return b""

    def fields(self) -> dict[str, Any]:
        """The task as the fields of a link message."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        plain = {name: value for name, value in values.items() if not isinstance(value, Message)}
        return {"task": self.name} | {name: list(v) if isinstance(v, tuple) else v for name, v in plain.items()}

    @classmethod
    def read(cls: type[Own], fields: Mapping[str, Any], body: Buffer) -> Own:
        """The task that `fields` and `body` are of.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or of another type.
            PeerError: the body does not parse.
        """
        kinds, values = get_type_hints(cls), {}
        for item in dataclasses.fields(cls):  # type: ignore[arg-type]
            if item.name in fields or item.default is dataclasses.MISSING:
                values[item.name] = _value_of(kinds[item.name], item.name, fields, body)
        return cls(**values)


def _value_of(kind: Any, name: str, fields: Mapping[str, Any], body: Buffer) -> Any:
    if isinstance(kind, type) and issubclass(kind, Message):
        return decode(kind, body)
    value = fields[name]
    if get_origin(kind) is tuple:
        return tuple(get_args(kind)[0](each) for each in value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} {str(value)[:40]!r}")
        return value
    return kind(value)


@dataclass(frozen=True)
class LoadAdapter(TrainerTask):
    """Make the adapter with this digest the round's start; a fresh optimiser unless the plan keeps its state."""

    changes = begins_round = reads_adapter = True
    round: int
    digest: str


@dataclass(frozen=True)
class LoadOwn(TrainerTask):
    """Make the trained state as it stands the round's start, for a method under which each silo keeps what it trains; a
    silo that has none yet draws it from the plan's seed. A fresh optimiser unless the plan keeps its state."""

    changes = begins_round = True
    round: int


@dataclass(frozen=True)
class LoadReference(TrainerTask):
    """Make the adapter with this digest what the KL term is against, for the rest of the run. Nothing is trained from
    it."""

    reads_adapter = stays = True
    round: int
    digest: str


@dataclass(frozen=True)
class PrivateStep(TrainerTask):
    """One GRPO step on private prompts. `rows`: places in the trainer's list of usable ones (`PromptSet.prompts`,
    without holdout and overlong ones), not rows of the file; empty as the method names it, filled in by the guard
    (`silo.sampling.TaskGiver`)."""

    changes = trains = draws_rows = True
    order = FIRST
    round: int
    step: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class GeneratePublic(TrainerTask):
    """Answer public prompts with the current local policy. `offer`: correct | all | none (what the message holds)."""

    changes = opens_exchange = True
    order = FIRST
    gives = pb.PublicResponses
    round: int
    step: int
    prompt_indices: tuple[int, ...]
    offer: str

    @property
    def offers(self) -> str:
        return "" if self.offer == "none" else "public.responses"


@dataclass(frozen=True)
class PublicStep(TrainerTask):
    """One GRPO step on the answers generated for this step, after the swap.

    swap: `replace` puts donors in place of wrong own answers (Balanced), `pool` trains on exactly the donors
    listed (Random), `none` trains on own answers. Three controls have donors that nobody sent: `self` takes further own
    answers, `key` the public file's, `worked-key` its solutions.
    """

    changes = trains = True
    order = 2
    round: int
    step: int
    swap: str
    donors: pb.PublicDonors


@dataclass(frozen=True)
class LikelihoodStep(TrainerTask):
    """One supervised step on the public file's answers to these prompts, or their solutions where it has them: the
    likelihood takes the place of GRPO's objective, and nothing is sampled."""

    changes = trains = True
    order = FIRST
    round: int
    step: int
    prompt_indices: tuple[int, ...]


@dataclass(frozen=True)
class AnswerAhead(TrainerTask):
    """Answer the public prompts of the next round's step `for_step` with the policy that `round` has trained. Nothing
    is trained on these answers here: those that verify are donors for others (`exchange: round_end`)."""

    gives = pb.PublicResponses
    round: int
    for_step: int
    prompt_indices: tuple[int, ...]


@dataclass(frozen=True)
class ExportDelta(TrainerTask):
    """The difference of the local factors to the round's start."""

    gives = pb.Factors
    round: int


@dataclass(frozen=True)
class Evaluate(TrainerTask):
    """Measure pass@1 of an adapter on the held-out set. round 0 with an empty digest is the base model, adapter off."""

    reads_adapter = True
    gives = pb.MetricsEval
    round: int
    digest: str

    @property
    def offers(self) -> str:
        return "metrics.eval"


@dataclass(frozen=True)
class EvaluateOwn(TrainerTask):
    """Measure pass@1 of the policy as it stands on the held-out set. The answer names no adapter."""

    gives = pb.MetricsEval
    round: int

    @property
    def offers(self) -> str:
        return "metrics.eval"

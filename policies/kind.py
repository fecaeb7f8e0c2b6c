"""The parts of a kind's file: the class of each field, its blocks of a policy, how it is measured, its rules and its
figures; and the facts and rules that several kinds share (the set they name, how many, how large, on which grid, about
what was asked).

A field without a class is denied, in both directions; `policies.kinds.CATALOGUE` has the classes of all files.

What the shared rules do not stop: information in the allowed values themselves (N1).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import StepBound, step_bound
from fedsilo.protocol.codec import Array, sha256_hex
from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.plan import PLAN_CHARACTERS_MAX, Plan
from fedsilo.protocol.services import NOTE_SIGNATURES_MAX
from fedsilo.protocol.strict_yaml import Path
from fedsilo.protocol.transcript import SIGNATURE_BYTES, transcript_from_canonical
from policies.fields import Closed, MetricField
from policies.grids import Bits, on_grid
from policies.history import History
from policies.message import OFFERED, Context, Facts, Message
from policies.model import Policy, PolicyFile
from policies.schema import LoraSchema
from policies.screens import screen_facts

# ---- fields ----------------------------------------------------------------------------------------


class FieldClass(StrEnum):
    """The class of values that a field may hold; `_SHAPES` gives the test each value must pass."""

    DIGEST = "digest"  # SHA-256 as 64 hex digits, or empty
    NAME = "name"  # silo or metric name of the plan's form
    NAME_OR_NONE = "name_or_none"  # the same, or empty
    TOPIC = "topic"  # label of a public set; the metrics rule knows which
    CODE = "code"  # one of a closed list
    NUMBER = "number"
    TEXT = "text"  # free text: answers of models to public prompts, and nothing else
    TENSOR_NAME = "tensor_name"  # compared with the schema, or with the layers of the policy, by the tensor rules
    SHAPE = "shape"
    HASH = "hash"  # 32 raw bytes of a Merkle proof
    NOTE = "note"  # C2SP signed note of an audit log, or empty
    CERTIFICATE = "certificate"  # one certificate in PEM, or empty
    PLAN = "plan"  # canonical JSON of a Plan, parsed by the plan rules
    TRANSCRIPT = "transcript"  # canonical JSON of a round's Transcript: names, numbers and digests alone; or empty
    SIGNATURE = "signature"  # 64 bytes of Ed25519, or empty
    SHORT = "short"  # at most 128 printable characters, from the coordinator only


# A field's class, or for a code the closed list it is from. By message, then by field; a field that holds a message is
# walked into and needs no line.
FieldTable = dict[str, dict[str, FieldClass | frozenset[Any]]]

_DIGEST = re.compile(r"([0-9a-f]{64})?")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_NOTE_BODY = r"[^\n]{1,256}\n[0-9]{1,20}\n[A-Za-z0-9+/=]{44}\n([!-~][ -~]{0,255}\n){0,4}"
_NOTE_SIGNATURES = f"(\u2014 [^\\n ]{{1,256}} [A-Za-z0-9+/=]{{1,512}}\\n){{1,{NOTE_SIGNATURES_MAX}}}"
_NOTE = re.compile(rf"({_NOTE_BODY}\n{_NOTE_SIGNATURES})?")
_CERTIFICATE = re.compile(
    "(-----BEGIN CERTIFICATE-----\\n([A-Za-z0-9+/=]{1,64}\\n){1,128}-----END CERTIFICATE-----\\n)?"
)
TOPIC_CHARACTERS_MAX = 128
NAMES_MAX = 64
_F = FieldClass


def is_name(value: str) -> bool:
    return bool(_NAME.fullmatch(value))


def is_transcript(value: str) -> bool:
    try:
        transcript_from_canonical(value)
    except PeerError:
        return False
    return True


def digest_of(value: str) -> str:
    """The value where it is a digest, else empty: what is none may be any text, and facts hold none."""
    return value if _DIGEST.fullmatch(value) else ""


def names_of(values: Iterable[str]) -> tuple[list[str], int]:
    """The distinct values that are names, sorted, and how many others there were."""
    distinct = sorted(set(values))
    good = [value for value in distinct if is_name(value)][:NAMES_MAX]
    return good, len(distinct) - len(good)


_SHAPES: dict[FieldClass, Callable[[Any], bool]] = {
    _F.DIGEST: lambda value: bool(_DIGEST.fullmatch(value)),
    _F.NAME: is_name,
    _F.NAME_OR_NONE: lambda value: value == "" or is_name(value),
    _F.TOPIC: lambda value: len(value) <= TOPIC_CHARACTERS_MAX and value.isprintable(),
    _F.NUMBER: math.isfinite,
    _F.TEXT: lambda _value: True,
    _F.TENSOR_NAME: lambda _value: True,
    _F.SHAPE: lambda _value: True,
    _F.HASH: lambda value: len(value) == 32,
    _F.NOTE: lambda value: bool(_NOTE.fullmatch(value)),
    _F.CERTIFICATE: lambda value: bool(_CERTIFICATE.fullmatch(value)),
    _F.PLAN: lambda value: len(value) <= PLAN_CHARACTERS_MAX,
    _F.TRANSCRIPT: lambda value: value == "" or is_transcript(value),
    _F.SIGNATURE: lambda value: len(value) in (0, SIGNATURE_BYTES),
    _F.SHORT: lambda value: len(value) <= 128 and value.isprintable(),
}


def fits(kind: FieldClass | frozenset[Any], value: Any) -> bool:
    """Return True if a value is what its field's class allows."""
    return value in kind if isinstance(kind, frozenset) else _SHAPES[kind](value)


def faults(message: ProtobufMessage, classes: FieldTable) -> dict[str, int]:
    """Fields of a message (and the messages in it) that have no class or hold what their class forbids.

    Returns:
        count by place, such as {"Hello.role": 1}. Places come from our own descriptors, so they carry no text.
    """
    counts: dict[str, int] = {}
    _walk(message, classes, counts)
    return counts


def _walk(message: ProtobufMessage, classes: FieldTable, counts: dict[str, int]) -> None:
    name = message.DESCRIPTOR.name
    for of, value in message.ListFields():
        values = value if of.is_repeated else (value,)
        if of.message_type is not None:
            for child in values:
                _walk(child, classes, counts)
            continue
        place = f"{name}.{of.name}"
        kind = classes.get(name, {}).get(of.name)
        bad = len(values) if kind is None else sum(not fits(kind, item) for item in values)
        if bad:
            counts[place] = counts.get(place, 0) + bad


# ---- rules -----------------------------------------------------------------------------------------

# look: allowed, but a person should see it. n.a.: this rule has nothing to say about this kind.
Outcome = Literal["ok", "look", "hold", "deny", "n.a."]
Measured = float | int | str | bool | None


@dataclass(frozen=True)
class Judgement:
    """A rule's judgement on one message.

    Attributes:
        path: the key in the policy file that the limit stands under.
        least: the limit is the least that is allowed.
    """

    outcome: Outcome
    measured: Measured
    limit: Any
    path: Path
    least: bool = False


@dataclass(frozen=True)
class RuleResult:
    """A rule's verdict, with the file and line of the limit it applied (line 0: the rule did not apply).

    Attributes:
        least: the limit is the least that is allowed; for the sentence, and not recorded.
    """

    rule: str
    reason: str
    outcome: Outcome
    measured: Measured
    limit: Any
    file: str
    line: int
    least: bool = False

    def to_json(self) -> dict[str, Any]:
        limit = list(self.limit) if isinstance(self.limit, tuple | frozenset) else self.limit
        return {
            "rule": self.rule,
            "reason": self.reason,
            "outcome": self.outcome,
            "measured": self.measured,
            "limit": limit,
            "file": self.file,
            "line": self.line,
        }

    def sentence(self) -> str:
        bound = "at least" if self.least else "limit"
        return f"{self.file}:{self.line}: {self.rule}: measured {self.measured}, {bound} {self.limit} [{self.reason}]"


@dataclass(frozen=True)
class Rule:
    """A rule of the policy engine.

    Attributes:
        name: stable, in the log and on the console.
        reason: code of a refusal, for the site's own eyes.
        kinds: those it judges; empty is every kind. A rule in a kind's file that names none judges the kinds that list
            it.
        check: the judgement itself.
        given: what the check is given. "facts": these and the place of the kind's block; "block": the block as well,
            and the rule says nothing where the policy does not name the kind; "policy": facts, policy and history.
        why: for people; where it is empty, the docstring of the check says it.
    """

    name: str
    reason: str
    kinds: frozenset[str]
    check: Callable[..., Judgement]
    given: Literal["facts", "block", "policy"] = "policy"
    why: str = ""

    def applies(self, facts: Facts) -> bool:
        return not self.kinds or facts["kind"] in self.kinds

    def judge(self, facts: Facts, policy: Policy, history: History) -> Judgement:
        if self.given == "policy":
            return self.check(facts, policy, history)
        block, path = block_of(facts, policy)
        if self.given == "facts":
            return self.check(facts, path)
        return not_applicable() if block is None else self.check(facts, block, path)


Check = Callable[[Facts, Policy, History], Judgement]


def _made(
    name: str, reason: str, kinds: tuple[str, ...], given: Literal["facts", "block", "policy"]
) -> Callable[[Callable[..., Judgement]], Rule]:
    return lambda check: Rule(name, reason, frozenset(kinds), check, given)


def rule(name: str, reason: str, *kinds: str) -> Callable[[Check], Rule]:
    """Make a rule of a check; no kinds means every kind."""
    return _made(name, reason, kinds, "policy")


def block_rule(name: str, reason: str, *kinds: str) -> Callable[[Callable[[Facts, Any, Path], Judgement]], Rule]:
    """Make a rule of a check on a kind's block."""
    return _made(name, reason, kinds, "block")


def facts_rule(name: str, reason: str, *kinds: str) -> Callable[[Callable[[Facts, Path], Judgement]], Rule]:
    """Make a rule of a check on facts alone."""
    return _made(name, reason, kinds, "facts")


def at_most(measured: float | None, limit: float, path: Path) -> Judgement:
    """A missing number or NaN is a refusal: `not (a <= b)` is true for both."""
    fits = measured is not None and measured <= limit
    return Judgement("ok" if fits else "deny", measured, limit, path)


def at_least(measured: float | None, limit: float, path: Path) -> Judgement:
    fits = measured is not None and measured >= limit
    return Judgement("ok" if fits else "deny", measured, limit, path, least=True)


def within(measured: float | None, bounds: tuple[float, float], path: Path) -> Judgement:
    fits = measured is not None and bounds[0] <= measured <= bounds[1]
    return Judgement("ok" if fits else "deny", measured, list(bounds), path)


def equal(measured: Measured, limit: Measured, path: Path) -> Judgement:
    return Judgement("ok" if measured == limit and measured is not None else "deny", measured, limit, path)


def holds(condition: object, path: Path, *, measured: Measured = None, limit: Any = True) -> Judgement:
    """A yes-or-no fact: anything but True is a refusal."""
    fits = condition is True
    return Judgement("ok" if fits else "deny", fits if measured is None else measured, limit, path)


def none_of(measured: object, path: Path) -> Judgement:
    """A count that must be zero."""
    good = type(measured) is int and measured == 0
    return Judgement("ok" if good else "deny", measured if isinstance(measured, int) else None, 0, path)


def not_applicable(path: Path = ()) -> Judgement:
    return Judgement("n.a.", None, None, path)


def not_judged_yet(facts: Facts, path: Path) -> Judgement:
    """Return the judgement of a rule whose facts come from grading, which has not run. An offer is judged by all other
    rules first, so that nothing is graded for a message that is refused anyway (T55); nothing passes on that alone,
    since what is final without it is refused."""
    return not_applicable(path) if facts["stage"] == OFFERED else holds(False, path)


def before_transforms(facts: Facts) -> bool:
    """Only a sender transforms, so only its offer is spared the limits that the transform establishes."""
    return bool(facts["stage"] == OFFERED and facts["direction"] == "egress")


def side_of(facts: Facts, policy: Policy) -> str:
    """Return the block of the policy that applies: what the coordinator sends is `ingress` for a silo, and what silos
    send is `egress`, for the silo that sends it and for the coordinator that checks it again with its charter."""
    return "ingress" if facts["sender"] == policy.file.federation.coordinator else "egress"


def block_of(facts: Facts, policy: Policy) -> tuple[Any, Path]:
    """The policy's block for this message's kind (None if absent) and its place in the file."""
    side, kind = side_of(facts, policy), facts["kind"]
    block = getattr(policy.file, side)
    if kind.startswith("control."):
        return block.control, (side, "control")
    return getattr(block, kind.replace(".", "_"), None), (side, kind)


# ---- kinds -----------------------------------------------------------------------------------------

VALUES_MAX = 256


@dataclass(frozen=True)
class Figures:
    """Inputs that the figures of a block need beside it.

    Attributes:
        kind: of the messages.
        file: the policy that has the block.
        schema: its LoRA schema; None where it is not at hand.
        steps: local steps of a round, at most.
    """

    kind: str
    file: PolicyFile
    schema: LoraSchema | None
    steps: int


ANOTHER = "another"  # wherever a name is asked for: one that no policy lists
BASE_DIGEST = sha256_hex(b"base adapter of the round")  # of the adapter that an example's round starts from
EXAMPLE_TEXT = "the answer is 12"


@dataclass(frozen=True)
class Around:
    """The surroundings that an example is made for.

    Attributes:
        kind: of the message.
        policy: the one that is to let it through.
        block: the kind's, on the side that it goes.
        schema: the policy's LoRA schema; None where it is not at hand.
        plan: of the run that is open.
        sent: whether a silo sends it, so that it comes in otherwise.
    """

    kind: str
    policy: Policy
    block: Any
    schema: LoraSchema | None
    plan: Plan
    sent: bool

    @property
    def set_sha256(self) -> str:
        """Digest of the set that the block names."""
        return self.policy.file.public_sets[self.block.set].sha256

    @property
    def rows(self) -> range:
        """Rows that the open public step asks for."""
        return range(self.plan.prompts_per_step)

    def answer(self, limit: int) -> pb.Response:
        """Return an answer of so many bytes at most."""
        return pb.Response(text=EXAMPLE_TEXT[:limit], finish=pb.FINISH_STOP)


@dataclass(frozen=True)
class Example:
    """A good message: its payload, and fields of the context that the judging party knows because of it."""

    body: ProtobufMessage
    known: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Array] | None = None


def no_facts(body: Any, message: Message, context: Context) -> Facts:
    return {}


@dataclass(frozen=True)
class PolicyKind:
    """One kind as a policy, its rules and its figures see it. Its row is in `fedsilo/protocol/kinds.py`.

    Attributes:
        name: of the row.
        example: a good message of it, under a policy that names it.
        sent, taken: its block under egress and under ingress; None where it does not go that way.
        measure: (body, message, context) -> what its rules judge, beside the facts that every message has.
        rules: those that judge it beside the ones on every message, in the order in which they speak.
        largest: (block, figures) -> messages and payload bytes of one round, at most.
        bits: (block, figures) -> what an attacker who owns the trainer gets out in one round, at most.
        text_bytes: block -> the key that bounds its text, bytes of text in a round, and in one message.
    """

    name: str
    example: Callable[[Around], Example]
    sent: type[Closed] | None = None
    taken: type[Closed] | None = None
    measure: Callable[[Any, Message, Context], Facts] = no_facts
    rules: tuple[Rule, ...] = ()
    largest: Callable[[Any, Figures], tuple[int, int]] | None = None
    bits: Callable[[Any, Figures], Bits] | None = None
    text_bytes: Callable[[Any], tuple[str, int, int]] | None = None


# ---- facts -----------------------------------------------------------------------------------------
# A list of values is kept as the values that occur, sorted: no rule needs more, and which of them belongs to which
# question stays out of the log.


def value_facts(values: Iterable[float]) -> Facts:
    """The values that occur, and how many are none that could be judged."""
    distinct: set[float] = set()
    at_fault = 0
    for value in values:
        if _is_plain(value) and (value in distinct or len(distinct) < VALUES_MAX):
            distinct.add(value)
        else:
            at_fault += 1
    return {"values": sorted(distinct), "values_at_fault": at_fault}


def _is_plain(value: float) -> bool:
    """Finite, and not -0.0, which equals 0.0 but is another bit pattern (T9)."""
    return math.isfinite(value) and not (value == 0 and math.copysign(1.0, value) < 0)


def row_facts(rows: Sequence[int], asked: Sequence[int] | Mapping[int, object], name: str) -> Facts:
    """Return whether rows are among those asked for, each once, in the order asked."""
    known = set(asked)
    return {
        name: len(rows),
        f"{name}_not_asked": sum(row not in known for row in rows),
        f"{name}_repeated": len(rows) - len(set(rows)),
        f"{name}_out_of_order": _out_of_order(rows, asked),
    }


def set_facts(header: str, context: Context) -> Facts:
    """The set that a message names, and the party's own copy."""
    return {"header_set_sha256": digest_of(header), "public_set_sha256": context.public_set_sha256}


def exemplar_counts(exemplars: Iterable[Sequence[int]]) -> Facts:
    counts = [len(rows) for rows in exemplars]
    return {"exemplars_min": min(counts, default=0), "exemplars_max": max(counts, default=0)}


def question_facts(questions: list[int], context: Context) -> Facts:
    return {
        "questions": len(questions),
        "questions_repeated": len(questions) - len(set(questions)),
        "questions_not_in_set": sum(question >= context.public_set_rows for question in questions),
    }


def text_facts(responses: list[pb.Response], context: Context) -> Facts:
    """Counts over responses in message order."""
    sizes = [len(response.text.encode()) for response in responses]
    counts, verdicts = context.token_counts, context.verdicts
    counted = counts is not None and len(counts) == len(responses)
    # A byte-level tokenizer makes at least one byte of each token, so bytes bound tokens where nobody has counted.
    tokens = list(counts) if counts is not None and counted else sizes
    graded = verdicts is not None and len(verdicts) == len(responses)
    correct = sum(bool(verdict) for verdict in verdicts) if verdicts is not None and graded else 0
    return {
        "responses": len(responses),
        "text_bytes": sum(sizes),
        "text_bytes_max": max(sizes, default=0),
        "tokens": int(sum(tokens)),
        "tokens_max": int(max(tokens, default=0)),
        "tokens_counted": counted,
        "graded": graded,
        "responses_correct": correct,
        "responses_wrong": len(responses) - correct,
        "finish_unspecified": sum(response.finish == pb.FINISH_UNSPECIFIED for response in responses),
        **screen_facts(context.screened, len(responses)),
    }


def index_facts(indices: list[int], context: Context) -> Facts:
    return {
        "prompts": len(indices),
        "prompts_repeated": len(indices) - len(set(indices)),
        "prompts_not_of_step": sum(index not in context.public_prompt_indices for index in indices),
        "prompts_out_of_order": _out_of_order(indices, context.public_prompt_indices),
        "prompts_not_in_set": sum(index >= context.public_set_rows for index in indices),
        "public_set_sha256": context.public_set_sha256,
    }


def _out_of_order(indices: Sequence[int], order: Iterable[int]) -> int:
    """Return how often a row comes after one that the order has behind it. Rows that it has not are counted
    elsewhere."""
    place = {index: position for position, index in enumerate(order)}
    places = [place[index] for index in indices if index in place]
    return sum(later < earlier for earlier, later in itertools.pairwise(places))


# ---- rules of several kinds ------------------------------------------------------------------------


def fact(name: str) -> Callable[[Facts, History], float | None]:
    return lambda facts, _: facts[name]


def next_of_round(facts: Facts, history: History) -> int:
    """Return the number of messages of the kind in the round, this one among them."""
    return history.messages_in_round + 1


def limit_rule(
    name: str,
    reason: str,
    key: str,
    measured: Callable[[Facts, History], float | None],
    *kinds: str,
    unless: Callable[[Facts], bool] = lambda _: False,
    why: str = "",
) -> Rule:
    """A rule that compares one number with one key of the kind's block; `unless`: it has nothing to say."""

    @rule(name, reason, *kinds)
    def check(facts: Facts, policy: Policy, history: History) -> Judgement:
        block, path = block_of(facts, policy)
        if block is None or unless(facts):
            return not_applicable()
        return at_most(measured(facts, history), getattr(block, key), (*path, key))

    return replace(check, why=why)


def zero_rule(name: str, reason: str, key: str, *, why: str = "") -> Rule:
    """A rule that one count of faults is zero."""
    return replace(facts_rule(name, reason)(lambda facts, path: none_of(facts[key], path)), why=why)


def range_rule(name: str, reason: str) -> Rule:
    """A rule that all values are within the range of the block's grid."""

    @block_rule(name, reason)
    def check(facts: Facts, block: Any, path: Path) -> Judgement:
        return none_of(out_of_range(facts["values"], block.values) + facts["values_at_fault"], (*path, "values"))

    return check


def grid_rule(name: str, reason: str) -> Rule:
    """A rule that all values are on the block's grid."""

    @block_rule(name, reason)
    def check(facts: Facts, block: Any, path: Path) -> Judgement:
        """Finite, no -0 and on the grid, so that no digits are free (T9)."""
        return none_of(off_grid(facts["values"], block.values) + facts["values_at_fault"], (*path, "values", "quantum"))

    return check


def off_grid(values: Iterable[float], grid: MetricField) -> int:
    return sum(not on_grid(value, grid.quantum) for value in values)


def out_of_range(values: Iterable[float], grid: MetricField) -> int:
    return sum(not grid.min <= value <= grid.max for value in values)


@rule("pinned set", "PUBLIC_SET")
def pinned_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The message names the set that its block pins, and the party's own copy is that set (T12)."""
    block, _ = block_of(facts, policy)
    if block is None:
        return not_applicable()
    pin, path = policy.file.public_sets[block.set], ("public_sets", block.set, "sha256")
    own = equal(facts["public_set_sha256"], pin.sha256, path)
    return own if own.outcome == "deny" else equal(facts["header_set_sha256"], pin.sha256, path)


@rule("one message of the kind per step", "PER_STEP")
def one_per_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return at_most(history.messages_in_step + 1, 1, path)


@rule("messages of the kind per round", "PER_ROUND")
def some_per_round(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or path[0] != "egress":
        return not_applicable()
    return at_most(history.messages_in_round + 1, block.per_round, (*path, "per_round"))


@facts_rule("only what was asked", "NOT_ASKED")
def only_asked(facts: Facts, path: Path) -> Judgement:
    """Questions or exemplars that the coordinator named for this step, each once."""
    return none_of(facts["questions_not_asked"] + facts["questions_repeated"], path)


@block_rule("exemplars behind a score", "EXEMPLARS")
def exemplars_of_score(facts: Facts, block: Any, path: Path) -> Judgement:
    """Not so few that a score is about one of them, not so many that it has many values."""
    path = (*path, "exemplars")
    least = within(facts["exemplars_min"], block.exemplars, path)
    return least if least.outcome == "deny" else within(facts["exemplars_max"], block.exemplars, path)


@facts_rule("questions are rows of the set", "PROMPT_NOT_PUBLIC")
def questions_in_set(facts: Facts, path: Path) -> Judgement:
    """Judge that questions are rows of this silo's own copy, each once: no text of a question crosses (T12)."""
    wrong = facts["questions_not_in_set"] + facts["questions_repeated"]
    return none_of(wrong + facts.get("exemplars_not_in_set", 0) + facts.get("exemplars_repeated", 0), (*path, "set"))


@facts_rule("canonical", "NOT_CANONICAL")
def canonical(facts: Facts, path: Path) -> Judgement:
    """No -0 and no denormal: both are a bit pattern more than the number needs."""
    return not_applicable(path) if before_transforms(facts) else none_of(facts["values_not_canonical"], path)


@rule("prompts are rows of the public set", "PROMPT_NOT_PUBLIC")
def rows_of_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    pin = policy.file.public_sets[block.set]
    if facts["public_set_sha256"] != pin.sha256:
        return equal(facts["public_set_sha256"], pin.sha256, ("public_sets", block.set, "sha256"))
    return none_of(facts["prompts_not_in_set"] + facts["prompts_repeated"], (*path, "set"))


@rule("donors are peers", "NOT_A_PEER")
def silos_are_peers(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Every silo named is a peer in the policy; at most one (the receiver) is named without its text."""
    unknown = strangers(facts, policy) + max(0, facts.get("origins_without_response", 0) - 1)
    return none_of(unknown, ("federation", "peers"))


def strangers(facts: Facts, policy: Policy) -> int:
    prefix = f"spiffe://{policy.file.federation.id}/silo/"
    unlisted = sum(f"{prefix}{name}" not in policy.peers for name in facts["names"])
    return int(facts["names_at_fault"]) + unlisted


FINISHES = zero_rule("finish reasons of answers", "FINISH", "finish_unspecified")
IN_ORDER_ASKED = zero_rule(
    "in the order asked",
    "QUESTION_ORDER",
    "questions_out_of_order",
    why="The order is the coordinator's, so that none is left to say something with (T9).",
)
PER_DAY = limit_rule(
    "scores or answers per day",
    "PER_DAY",
    "max_per_day",
    lambda facts, history: history.units_in_day + int(facts["units"]),
)
UNITS_PER_STEP = limit_rule("scores or answers per step", "PER_STEP", "max_per_step", fact("units"))
TEXT_BYTES = limit_rule("bytes of one answer", "RESPONSE_BYTES", "max_bytes_per_answer", fact("text_bytes_max"))
CANDIDATES_PER_QUESTION = limit_rule(
    "candidates per question", "CANDIDATES", "max_candidates_per_question", fact("candidates_max")
)
QUESTIONS_ASKED = limit_rule("questions asked", "QUESTIONS", "max_questions", fact("questions"))
# Those of the further methods that stand together in the order of all rules.
SHARED = (pinned_set, one_per_step, some_per_round, PER_DAY, UNITS_PER_STEP, TEXT_BYTES, FINISHES)


# ---- the coordinator's step --------------------------------------------------------------------------------------


def server_step(plan: Plan | None, schema: LoraSchema | None) -> Facts:
    """What bounds a round's step by the plan; nothing where that is the length of the longest update. `step_most` is
    None where nothing but that length bounds it, and `step_scale` where that does not either."""
    if plan is None:
        return {}
    elements = sum(math.prod(shape) for _, shape in schema.updates[0]) if schema is not None else 0
    bound, name = step_bound(plan, elements), plan.server_optimiser.name
    if name == "none" and bound == StepBound():
        return {}
    return {
        **({} if name == "none" else {"server_optimiser": name}),
        "step_scale": bound.scale if math.isfinite(bound.scale) else None,  # no record takes what is not finite
        "step_most": bound.most if schema is not None and math.isfinite(bound.most) else None,
    }


def step_limit(facts: Facts, longest: float) -> float:
    """Return the limit of a round's step, where none of its updates is longer than that; not finite: there is none."""
    if "step_scale" not in facts:
        return longest
    scale, most = (math.inf if facts[name] is None else facts[name] for name in ("step_scale", "step_most"))
    return StepBound(scale, most).of(longest)

"""The form of a case file: strict YAML (threat T35) in, checked cases out.

    message: {kind: public.responses}       # what all cases of this file have in common
    cases:
      - name: one prompt more than a step may have
        message: {prompts: limit + 1}
        expect: deny
        reasons: [PROMPTS]

A file may also be one case by itself. Whatever a case does not say is a good message under the policy in hand.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import BaseModel, Field

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.kinds import MESSAGES, TENSOR_KINDS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.strict_yaml import Document, Path, load, validate
from policies.cases.amount import AmountField
from policies.fields import Boolean, Closed, Integer, Number, Text
from policies.history import History
from policies.rules import RULES

ANOTHER = "another"  # wherever a name or digest is asked for: one that the policy does not list
UNNAMED = "unnamed"  # as a kind: each kind of this version that the policy does not name
UPDATE = "update"  # as a kind: each adapter update that the policy lets out, such as lora.factors

Verdict = Literal["allow", "deny", "hold"]
Grading = Literal["correct", "wrong", "one wrong", "not graded"]
Rows = AmountField | tuple[Integer, ...]
TensorFault = Literal[
    "extra_tensor",
    "missing_tensor",
    "renamed_tensor",
    "empty_tensor",
    "larger_tensor",
    "frozen_tensor",
    "frozen_changed",
    "not_given",
    "zeros",
    "nan",
    "infinity",
    "negative_zero",
    "denormal",
    "low_bits",
]


class Message(Closed):
    """What any message can say. `fields` puts values into the protobuf message after all else, in its JSON form."""

    kind: Text
    direction: Literal["egress", "ingress"] | None = None
    run: Literal["open", "another", "none"] | None = None
    round: Integer | None = None
    step: Integer | None = None
    sender: Text = ""  # this site | coordinator | another | another coordinator | a silo's name | a SPIFFE id
    certificate: Text = ""  # whose certificate vouches for the sender, in the same words; by default its own
    payload_bytes: AmountField | None = None  # size as the connection counted it
    fields: dict[str, Any] = Field(default_factory=dict)


class TensorMessage(Message):
    l2: AmountField | None = None  # norm of all values, the same in each tensor
    tensor_l2: AmountField | None = None  # norm of one tensor; all others are zero
    tensors: Literal["as schema"] | tuple[TensorFault, ...] = "as schema"
    base: Literal["of the round", "another", "none"] | None = None
    schema_: Literal["pinned", "another"] = Field("pinned", alias="schema")
    dtype: Text = ""
    rank: AmountField | None = None
    scale: Number | None = None


class Answers(Closed):
    count: AmountField | None = None  # in the whole message; limit: max_responses_per_step
    per_prompt: AmountField | None = None  # limit: generation.samples_per_prompt
    bytes_each: AmountField | None = None  # limit: max_bytes_per_response
    bytes: AmountField | None = None  # of the whole message; limit: max_bytes_per_step
    tokens_each: AmountField | None = None  # limit: generation.max_new_tokens
    tokens: AmountField | None = None  # of all answers; limit: max_tokens_per_step
    counted: Boolean = True  # whether this party has a tokenizer; without one each byte counts as a token
    graded: Grading = "correct"
    finish: Literal["stop", "length", "unset"] = "stop"
    text: str | None = None  # of each answer, as it stands


class ResponsesMessage(Message):
    prompts: Rows | None = None  # how many of the step's prompts, or which rows; limit: max_prompts_per_step
    samples: AmountField | None = None  # answers generated for each, sent or not
    responses: Answers = Answers()
    set: Literal["pinned", "another"] = "pinned"


class DonatedAnswers(Closed):
    per_prompt: AmountField | None = None  # limit: max_donors_per_prompt
    bytes_each: AmountField | None = None  # limit: max_bytes_per_response
    graded: Grading = "correct"
    from_: tuple[Text, ...] | None = Field(None, alias="from")  # names of silos; by default the other peers in turn
    own: Integer = 0  # so many silos beside them are named without a text
    text: str | None = None


class DonorsMessage(Message):
    prompts: Rows | None = None
    donors: DonatedAnswers = DonatedAnswers()


class MetricsMessage(Message):
    metrics: dict[str, AmountField] | None = None  # name, or name/topic; limit and least: the field's max and min
    order: Literal["sorted", "reversed"] = "sorted"
    twice: Boolean = False
    split: Text = "held_out"
    adapter: Literal["of the round", "another", "none"] = "of the round"


class PlanMessage(Message):
    plan: dict[str, Any] = Field(default_factory=dict)  # fields of the plan; limit and least: the policy's range


class RoundMessage(Message):
    prompts: Rows | None = None  # of each public step; limit: max_prompts_per_step
    steps: tuple[Integer, ...] | None = None
    base: Literal["given", "none"] = "given"


class ResultMessage(Message):
    participants: tuple[Text, ...] | None = None  # of round.agreed: who signed


FORMS: dict[str, type[Message]] = {
    **dict.fromkeys((*TENSOR_KINDS, UPDATE), TensorMessage),
    "public.responses": ResponsesMessage,
    "public.donors": DonorsMessage,
    "metrics.eval": MetricsMessage,
    "run.plan": PlanMessage,
    "round.open": RoundMessage,
    "round.agreed": ResultMessage,
    "round.result": ResultMessage,
}


class Setting(Closed):
    """What the measuring party knows when the message comes up. Absent: as in a run that the policy allows."""

    now: Text = ""  # UTC such as "2027-06-01T00:00:00Z", or: before valid, after valid
    run: Literal["open", "none"] | None = None  # open, but for a plan that comes up
    round: Integer | None = None  # that is open
    step: Integer | None = None  # that is open
    plan: dict[str, Any] = Field(default_factory=dict)  # of the run that is open
    base_l2: AmountField | Literal["unknown"] | None = None  # limit: what max_total_l2 leaves beside this delta
    step_l2: AmountField | Literal["unknown"] | None = None  # from the last adapter; limit: max_step_l2; absent: first
    records: AmountField | Literal["unknown"] | None = None  # the round's update was trained on; least: min_records
    epochs: AmountField | Literal["unknown"] | None = None  # limit: max_local_epochs
    steps: AmountField | Literal["unknown"] | None = None  # limit: max_steps
    lora_schema: Literal["pinned", "unknown"] = "pinned"
    public_set: Literal["pinned", "another"] = "pinned"
    rows: Integer | None = None  # of the party's own copy of the public set
    asked: tuple[Integer, ...] | None = None  # rows that the open step asks for
    topics: tuple[Text, ...] | None = None  # of the held-out file
    corpus: tuple[str, ...] | None = None  # private records, for the overlap screen
    canaries: tuple[str, ...] | None = None  # planted strings, for the canary screen
    question: dict[str, Any] | None = None  # the coordinator's last question: {kind, fields}
    usable_records: Integer | None = None  # private records that the trainer can use
    witnesses: AmountField | Literal["unknown"] | None = None  # of this site's log; least: min_witnesses
    refused_round: Integer = 0
    countersigns: Boolean = False  # a round waits for this silo's signature


class Before(Closed):
    """What was let out before. `limit` is the amount beside which this message just fits."""

    approved_by: dict[str, tuple[Text, ...]] = Field(default_factory=dict)  # person -> roles
    screen_halted: Boolean = False  # the kind, for too many hits
    counts: dict[str, AmountField] = Field(default_factory=dict)


class CaseForm(Closed):
    name: Text
    message: dict[str, Any] = Field(default_factory=dict)
    setting: Setting = Setting()
    before: Before = Before()
    needs: tuple[Text, ...] = ()  # of the policy, such as: approvals.first_rounds >= 1; without it nothing is judged
    expect: Verdict
    reasons: tuple[Text, ...] | None = None  # exactly these codes
    including: tuple[Text, ...] = ()  # these codes, and maybe others


class FileForm(Closed):
    message: dict[str, Any] = Field(default_factory=dict)
    setting: dict[str, Any] = Field(default_factory=dict)
    before: dict[str, Any] = Field(default_factory=dict)
    needs: tuple[Text, ...] = ()  # of every case of the file, before those of its own
    cases: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Case:
    """One message and what the policy has to say of it.

    Attributes:
        document: the case alone, with the lines of its file.
        reasons: exactly these codes, in any order; None: whatever they are.
        including: codes that must be among them.
        needs: what it takes of a policy; one without it is not judged by the case (needs.py).
    """

    name: str
    message: Message
    setting: Setting
    before: Before
    expect: Verdict
    reasons: tuple[str, ...] | None
    including: tuple[str, ...]
    document: Document
    needs: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return self.document.source

    @property
    def line(self) -> int:
        return self.document.line_of(())

    def of_kind(self, kind: str) -> Case:
        """The same with a message of that kind; one of an unnamed kind says nothing else."""
        said = self.message.kind == UPDATE
        return replace(self, message=self.message.model_copy(update={"kind": kind}) if said else Message(kind=kind))

    def mistake(self, path: Path, message: str, hint: str = "") -> UsageError:
        return UsageError(f"{self.document.place(path)}: {message}", hint=hint)


COUNTS = tuple(field.name for field in fields(History) if field.type in ("int", int))
_CODES = frozenset(rule.reason for rule in RULES) | {"RULE_FAILED", "NO_RULES"}
_KINDS = frozenset({*MESSAGES, UPDATE, UNNAMED, ANOTHER})
_SHARED = ("message", "setting", "before")


def load_cases(text: bytes, source: str) -> list[Case]:
    """The cases of one file.

    Raises:
        UsageError: any mistake, with file, line and hint.
    """
    document = load(text, source)
    if not isinstance(document.value, dict) or not document.value:
        raise UsageError(f"{source}:1: a case file is a mapping of keys", hint="name, message, expect; or cases: [...]")
    if "cases" not in document.value:
        return [_case(document)]
    shared = validate(FileForm, document)
    found = []
    for index, own in enumerate(shared.cases):
        part, value = _part(document, ("cases", index)), own
        lines = dict(part.lines)
        for key in _SHARED:
            common = document.value.get(key)
            if common is not None:
                value = {**value, key: _merged(common, value.get(key, {}))}
                for path, line in document.lines.items():
                    if path[:1] == (key,):
                        lines.setdefault(path, line)
        if shared.needs:
            own_needs = value.get("needs", [])
            value = {**value, "needs": [*shared.needs, *own_needs] if isinstance(own_needs, list) else own_needs}
            lines |= {("needs", index): document.line_of(("needs", index)) for index in range(len(shared.needs))}
        found.append(_case(Document(source, value, lines)))
    names = [case.name for case in found]
    for case in found:
        if names.count(case.name) > 1:
            raise case.mistake(("name",), f"{case.name!r} is the name of two cases", "a name is how a report finds it")
    return found


def _merged(common: Any, own: Any) -> Any:
    """The file's own values under the case's; a mapping key by key, all else as a whole."""
    if not isinstance(common, dict) or not isinstance(own, dict):
        return own
    return {**common, **{key: _merged(common.get(key), value) for key, value in own.items()}}


def _case(document: Document) -> Case:
    # `before` reads shorter without a level of its own for the counts.
    value = dict(document.value)
    if isinstance(value.get("before"), dict):
        counts = {key: count for key, count in value["before"].items() if key in COUNTS}
        rest = {key: item for key, item in value["before"].items() if key not in COUNTS}
        value["before"] = {**rest, "counts": counts}
    lines = {(*path[:1], "counts", *path[1:]) if path[:1] == ("before",) and path[1:2] and path[1] in COUNTS else path:
             line for path, line in document.lines.items()}  # fmt: skip
    form = validate(CaseForm, Document(document.source, value, lines))
    message = _message(document)
    made = Case(
        form.name, message, form.setting, form.before, form.expect, form.reasons, form.including, document, form.needs
    )
    for key, codes in (("reasons", form.reasons or ()), ("including", form.including)):
        if form.expect == "allow" and codes:
            raise made.mistake((key,), "what is allowed has no reasons")
        for index, code in enumerate(codes):
            if code not in _CODES:
                close = difflib.get_close_matches(code, _CODES, n=1)
                raise made.mistake(
                    (key, index),
                    f"no rule gives the reason {code!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
                    "docs/reference/policy.md lists them",
                )
    for place in (("message", "plan"), ("setting", "plan")):
        for key in _at(document.value, place) or ():
            if key not in PLAN_FIELDS:
                raise made.mistake((*place, key), f"a plan has no {key!r}", f"one of: {', '.join(sorted(PLAN_FIELDS))}")
    return made


def _message(document: Document) -> Message:
    kind = _at(document.value, ("message", "kind"))
    if not isinstance(kind, str):
        raise UsageError(
            f"{document.place(('message',))}: a message has a kind", hint="message: {kind: public.responses}"
        )
    if kind not in _KINDS:
        close = difflib.get_close_matches(kind, _KINDS, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise UsageError(
            f"{document.place(('message', 'kind'))}: there is no kind {kind!r}{meant}",
            hint=f"docs/reference/messages.md lists them; {UNNAMED!r} is each that the policy does not name, "
            f"{ANOTHER!r} one that does not exist",
        )
    return validate(FORMS.get(kind, Message), _part(document, ("message",)))


def _part(document: Document, path: Path) -> Document:
    size = len(path)
    lines = {place[size:]: line for place, line in document.lines.items() if place[:size] == path}
    return Document(document.source, _at(document.value, path), lines)


def _at(value: Any, path: Path) -> Any:
    for step in path:
        if isinstance(value, Mapping) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            return None
    return value


def _plan_fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name -> place of each field of the plan; a field of a block is named without the block."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _plan_fields(inner, (*path, name))
        else:
            yield name, (*path, name)


# A name that stands in two blocks of the plan means the outer one.
PLAN_FIELDS: dict[str, tuple[str, ...]] = dict(sorted(_plan_fields(Plan), key=lambda item: -len(item[1])))

"""One message, judged at the silo's way out and at the coordinator's way in, by the code that each of them runs (X3).

Messages are good ones of every kind, and good ones with one to three things changed: a field, an order, a tensor, the
place in the run, the kind, a byte. Both ends have the same policy, keep their own history, and know of the run what
they would know in a federation. What is compared is each rule's outcome, not the verdict alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from coordinator.blobs import BytesPayload
from coordinator.ingress import Ingress, OpenPlace
from fedsilo.files.task_files import Task
from fedsilo.grading.answers import AnswerGrading
from fedsilo.grading.verdict import Verdict, judged
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import encode, encode_factors, sha256_hex
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.place import Place
from policies import screens
from policies.engine import Approval, Decision, HistoryBook, Message, decide, measure
from policies.kind import BASE_DIGEST, block_of
from policies.model import Policy
from policies.render import RULESETS
from policies.screens.overlap import OverlapIndex, build_index
from silo.guard.decisions import PublicView, Readings, RunView, SiteView, answers_of, context_of
from silo.sampling import Training
from tests.policies.messages import ASKED, OFFERED_KINDS, SCHEMAS, TAKES, good, policy_named, probed
from tests.policies.setting import COORDINATOR, HASH, NOW, SCHEMA, SILO

# (rule, the end that alone may refuse by it): why.
ONE_SIDED: dict[tuple[str, str], str] = {
    ("records of the round", "silo"): "only the site knows on what it trained, and the number does not cross (T9)",
    ("local epochs of the round", "silo"): "only the site knows on what it trained",
    ("steps of the round", "silo"): "only the site knows on what it trained",
    ("records behind the profile", "silo"): "only the site knows how many records it has",
    ("tokens of one response", "silo"): "a coordinator has no tokenizer; bytes bound the same answers there",
    ("tokens per step", "silo"): "a coordinator has no tokenizer",
    ("tokens per round", "silo"): "a coordinator has no tokenizer",
    ("as the plan asks", "silo"): "the part about tokens needs a tokenizer",
    ("screen hits", "silo"): "overlap and canary need the site's own data",
    ("screen hits per day", "silo"): "hits are counted where the screens run",
    ("approvals", "silo"): "a site's persons approve for their own site",
    ("countersignature", "silo"): "a signature may come once more after its round has begun",
    ("place of a control message", "silo"): "a run that is over there may be open here still",
    ("round", "silo"): "answers may come for any public step of the open round: silos are not in lockstep",
    ("screens ran", "coordinator"): "an answer to no prompt of the set is refused before texts are screened",
}
_UNKNOWN_PROMPT = "public prompts of the open step"
_ANSWERS_OF_A_STEP = ("public.responses",)
PERSONS = tuple(Approval(person, ("approver",)) for person in ("ada", "bob"))
POLICIES = (*(name for name in RULESETS if name != "deny_all"), "further")
ANSWER = "12"
RUN = "case-run"  # of the examples
STEPS = {2: (0, 1, 2), 4: (0, 9, 2)}  # the open round's public steps, and what they ask for
_ROWS = 10


# ---- the two ends ----------------------------------------------------------------------------------


class _Grader:
    def grade_many(self, pairs: Any, budget_seconds: float | None = None) -> list[Verdict]:
        return [judged(text == reference) for text, reference in pairs]


@dataclass(frozen=True)
class _Tasks:
    sha256: str
    rows: tuple[Task, ...]


@cache
def _material(ruleset: str) -> screens.Material:
    settings = policy_named(ruleset).file.text_screens.overlap
    if settings is None:
        return screens.NO_MATERIAL
    key = bytes(32)
    records = ["the patient came in at night with a cough that had lasted for nine days"]
    data = build_index(records, key=key, n=settings.n, false_positive_rate=settings.false_positive_rate)
    return screens.Material(overlap=OverlapIndex.from_bytes(data, key=key), canaries=("zebra-4711-canary",))


@dataclass
class Ends:
    """A silo and a coordinator under one ruleset, in round 1 of a run whose method may send every kind."""

    ruleset: str
    usable_records: int = 10
    silo_book: HistoryBook = field(default_factory=HistoryBook)
    coordinator_book: HistoryBook = field(default_factory=HistoryBook)

    def __post_init__(self) -> None:
        self.policy: Policy = policy_named(self.ruleset)
        self.schema = SCHEMAS.get(self.ruleset, SCHEMA)
        rows = tuple(Task(str(row), "?", ANSWER, "t") for row in range(_ROWS))
        public: Any = PublicView(
            _Tasks(HASH["public"], rows),
            AnswerGrading([_Grader()], lambda _: 60.0),
            lambda text: (len(text) + 3) // 4,  # type: ignore[arg-type]
        )
        topics = frozenset({"sort up", "rotate"})
        self._site = SiteView(SILO, COORDINATOR, self.schema, public, topics)
        self._plan = probed(good("run.end", self.ruleset)).context.plan
        assert self._plan is not None
        self._ingress = Ingress(
            federation="cardio-net", silos=("hospital_a", "hospital_b"), policy=self.policy, schema=self.schema,
            references=[ANSWER] * _ROWS, public_set_sha256=HASH["public"], topics=topics,
            grading=AnswerGrading([_Grader()], lambda _: 60.0),
            now_seconds=lambda: NOW,
        )  # fmt: skip

    def at_silo(self, sent: Sent) -> Decision | str:
        """The gate's judgement of what it would send; a code where its bytes do not parse."""
        try:
            body, tensors = parsed(sent.kind, sent.payload, OUTBOUND_KINDS)
        except PeerError as error:
            return str(error.code)
        place = Place(sent.run, sent.round, sent.step, sent.kind)
        message = Message("egress", place, SILO, len(sent.payload), body, tensors)
        graded = screened = None
        if isinstance(body, pb.PublicResponses):
            answers = answers_of(body, SILO)
            graded = self._site.public.judge(answers, (sent.run, sent.round, sent.step))
        block = block_of({"kind": sent.kind, "sender": SILO}, self.policy)[0]
        if names := screens.asked(block, sent.kind, "egress"):
            texts = list(screens.texts_of(body))
            screened = screens.screen(self.policy.file, names, texts, _material(self.ruleset))
        view = RunView(
            plan=self._plan, round=1, base_digest=BASE_DIGEST, base_l2=1.0, steps=STEPS,
            open_step=2, evaluated={1: BASE_DIGEST}, training=Training(64, 1, 4), asked=sent.asked,
            usable_records=self.usable_records,
        )  # fmt: skip
        context = context_of(self._site, view, message, Readings(graded, screened), now_seconds=NOW)
        facts = measure(message, context)
        decision = decide(facts, self.policy, self.silo_book.view(facts, PERSONS))
        if decision.verdict == "allow":
            self.silo_book.record(facts)
        return decision

    def at_coordinator(self, sent: Sent) -> Decision | str:
        """The coordinator's judgement of what came in; a code where it is refused before the rules."""
        envelope = pb.Envelope(
            federation="cardio-net", run=sent.run, round=sent.round, step=sent.step, kind=sent.kind, sender=SILO,
            payload_digest=bytes.fromhex(sha256_hex(sent.payload)),
        )  # fmt: skip
        try:
            if sent.kind not in OUTBOUND_KINDS:
                return "UNKNOWN_KIND"
            if len(sent.payload) > self._ingress.payload_bytes_max(sent.kind):
                return "TOO_LARGE"
            arrived = self._ingress.parse("hospital_a", envelope, BytesPayload(sent.payload))
        except PeerError as error:
            return str(error.code)
        place = OpenPlace()
        if sent.run == self._plan.run:
            step = sent.step if sent.step in STEPS else 0
            evaluated = BASE_DIGEST if sent.round == 1 else ""
            place = OpenPlace(self._plan, BASE_DIGEST, 1.0, 1, step, STEPS.get(step, ()), evaluated, sent.asked)
        # what is refused without grading is graded all the same here, as at the other end: the rules are compared
        if isinstance(arrived.body, pb.PublicResponses) and all(
            row.prompt_index < _ROWS or not row.responses for row in arrived.body.prompts
        ):
            arrived = self._ingress.grade(arrived)
        ruling = self._ingress.judge(arrived, place, self.coordinator_book)
        if ruling.decision.verdict == "allow":
            self.coordinator_book.record(ruling.facts)
        return ruling.decision


# ---- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """What both ends see of one message; `asked`: what the coordinator had asked of the silo."""

    kind: str
    run: str
    round: int
    step: int
    payload: bytes
    asked: Any = ASKED
    changed: tuple[str, ...] = ()


_NOTE = "audit/hospital_a\n12\n" + "A" * 43 + "=\n\n\u2014 hospital_a AAAA\n"
CONTROL: dict[str, tuple[ProtobufMessage, int, int]] = {
    "control.hello": (pb.Hello(protocol_min=1, protocol_max=1, role="member", isolation="user", load="fp32"), 0, 0),
    "control.poll": (pb.Poll(wait_milliseconds=1000, acknowledged_sequence=7), 0, 0),
    "control.fetch": (pb.Fetch(digest=BASE_DIGEST), 0, 0),
    "control.heartbeat": (pb.Heartbeat(), 0, 0),
    "control.progress": (pb.Progress(round=1, step=2), 1, 2),
    "control.declined": (pb.Declined(kind="lora.factors", round=1, step=0), 1, 0),
    "control.abstain": (pb.Abstain(round=1, step=2), 1, 2),
    "control.error": (pb.ErrorReport(code="INTERNAL"), 0, 0),
    "control.checkpoint": (pb.Checkpoint(note=_NOTE, previous_size=3, consistency=[bytes(32)]), 0, 0),
}  # fmt: skip
_TEXTS = (
    "", "12", "x", "hospital_b", "hospital_z", "held_out", "pass_at_1", "member", BASE_DIGEST, "f" * 64, "\x1b[31m",
    "zebra-4711-canary", "the patient came in at night with a cough that had lasted for nine days",
    "y" * 600, "\u00e4\u202e",
)  # fmt: skip
_DOUBLES = (0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 2.0, 0.1 + 0.2, 1e-320, 1e300, float("nan"), float("inf"), -float("inf"))
_INTEGERS = (0, 1, 2, 3, 4, 7, 9, 10, 63, 1000, 2**31 - 1)
_FLOATS = (-0.0, 1e-40, float("nan"), float("inf"), 1e-3, 0.5, 1e6, 1e38)


def good_message(rng: random.Random, ruleset: str) -> tuple[str, ProtobufMessage, dict[str, Any] | None, int, int, Any]:
    """(kind, body, tensors, round, step, asked): mostly of a kind that the ruleset names."""
    policy = policy_named(ruleset)
    named = [kind for kind in OFFERED_KINDS if policy.file.egress.block(kind) is not None]
    kind = rng.choice([*rng.choice((named, named, named, OFFERED_KINDS)), rng.choice(sorted(CONTROL))])
    if kind in CONTROL:
        body, number, step = CONTROL[kind]
        return kind, _copy(body), None, number, step, ASKED
    case = good(kind, ruleset if kind in named else "")
    message = case.message
    tensors = None
    if message.tensors is not None:
        tensors = {name: np.array(values) for name, values in message.tensors.items()}
    body = _copy(message.body)
    if isinstance(body, pb.PublicResponses):
        for prompt in body.prompts:
            for response in prompt.responses:
                response.text = ANSWER
    return kind, body, tensors, message.round, message.step, case.context.asked


def _copy(body: ProtobufMessage) -> ProtobufMessage:
    copied = type(body)()
    copied.CopyFrom(body)
    return copied


def _places(message: ProtobufMessage) -> Iterator[tuple[ProtobufMessage, Any]]:
    """Every field of a message and of the messages in it, set or not."""
    for descriptor in message.DESCRIPTOR.fields:
        yield message, descriptor
        if descriptor.message_type is not None:
            children = getattr(message, descriptor.name)
            for child in children if descriptor.is_repeated else [children]:
                if descriptor.is_repeated or message.HasField(descriptor.name):
                    yield from _places(child)


def _value(rng: random.Random, descriptor: Any, old: Any) -> Any:
    kind = descriptor.cpp_type
    if kind == descriptor.CPPTYPE_STRING:
        if descriptor.type == descriptor.TYPE_BYTES:
            return rng.choice((b"", bytes(31), bytes(32), bytes(33)))
        return rng.choice((*_TEXTS, f"{old}x", str(old)[:-1], str(old).upper()))
    if kind in (descriptor.CPPTYPE_DOUBLE, descriptor.CPPTYPE_FLOAT):
        return rng.choice((*_DOUBLES, old + 0.01, np.nextafter(old, 9.0)))
    if kind == descriptor.CPPTYPE_BOOL:
        return not old
    if kind == descriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 7))
    return rng.choice((*_INTEGERS, old + 1, max(0, old - 1)))


def _change_field(rng: random.Random, body: ProtobufMessage) -> str:
    places = list(_places(body))
    if not places:
        return "nothing"
    message, descriptor = rng.choice(places)
    values = getattr(message, descriptor.name)
    place = f"{message.DESCRIPTOR.name}.{descriptor.name}"
    if descriptor.is_repeated:
        return f"{place} {_change_list(rng, descriptor, values)}"
    if descriptor.message_type is not None:
        message.ClearField(descriptor.name)
        return f"{place} cleared"
    setattr(message, descriptor.name, _value(rng, descriptor, values))
    return f"{place} set"


def _change_list(rng: random.Random, descriptor: Any, values: Any) -> str:
    how = rng.choice(("repeat", "remove", "reverse", "add"))
    kept = list(values)
    scalar = descriptor.message_type is None
    if how == "repeat" and kept:
        kept.insert(0, rng.choice(kept))
    elif how == "remove" and kept:
        kept.pop(rng.randrange(len(kept)))
    elif how == "reverse":
        kept.reverse()
    elif scalar:
        empty = {descriptor.CPPTYPE_STRING: b"" if descriptor.type == descriptor.TYPE_BYTES else ""}
        kept.append(_value(rng, descriptor, kept[0] if kept else empty.get(descriptor.cpp_type, 0)))
    elif kept:
        kept.append(kept[-1])
    copies = kept if scalar else [_copy(item) for item in kept]
    del values[:]
    values.extend(copies)
    return how


def _change_tensors(rng: random.Random, tensors: dict[str, Any]) -> str:
    name = rng.choice(sorted(tensors))
    how = rng.choice(("value", "value", "value", "rename", "remove", "add", "shape", "scale"))
    if how == "value" and tensors[name].size:
        tensors[name].flat[rng.randrange(tensors[name].size)] = rng.choice(_FLOATS)
    elif how == "scale":
        with np.errstate(all="ignore"):
            tensors[name] = tensors[name] * np.float32(rng.choice((0.0, 0.5, 3.0, 1e4)))
    elif how == "rename":
        tensors[rng.choice((name.upper(), "patient-17", name.replace("0", "1")))] = tensors.pop(name)
    elif how == "remove" and len(tensors) > 1:
        tensors.pop(name)
    elif how == "add":
        tensors[f"{name}.extra"] = np.zeros(rng.choice(((0,), (2, 2))), np.float32)
    elif how == "shape":
        tensors[name] = tensors[name].T.copy() if tensors[name].ndim == 2 else tensors[name][:-1]
    return f"tensor {how}"


def generate(count: int, seed: int) -> Iterator[tuple[str, Sent]]:
    """(ruleset, message), the same ones for the same seed; about a third of them with nothing changed."""
    rng = random.Random(seed)  # test cases, no secrets
    for _ in range(count):
        ruleset = rng.choice(POLICIES)
        kind, body, tensors, number, step, asked = good_message(rng, ruleset)
        run, changed = RUN, list[str]()
        raw: list[Callable[[bytes], bytes]] = []
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            what = rng.choice(("field",) * 6 + ("place", "place", "asked", "kind", "bytes"))
            if tensors and rng.random() < 0.5:
                changed.append(_change_tensors(rng, tensors))
            elif what == "field":
                changed.append(_change_field(rng, body))
            elif what == "place":
                places = [(number + 1, step), (number, step + 1), (0, 0), (1, 2), (1, 4), (number, 0)]
                number, step = rng.choice(places)
                run = rng.choice((run,) * 6 + ("run-2", ""))
                changed.append("place")
            elif what == "asked":
                asked = rng.choice((ASKED, TAKES, dataclasses.replace(ASKED, step=4, match=2), type(ASKED)()))
                changed.append("asked")
            elif what == "kind":
                kind = rng.choice((*OUTBOUND_KINDS, "run.plan", "public.logprobs"))
                changed.append("kind")
            else:
                raw.append(_byte_change(rng))
                changed.append("bytes")
        payload = _payload(body, tensors)
        for change in raw:
            payload = change(payload)
        yield ruleset, Sent(kind, run, number, step, payload, asked, tuple(changed))


def _byte_change(rng: random.Random) -> Callable[[bytes], bytes]:
    place, bit, how = rng.random(), 1 << rng.randrange(8), rng.choice(("flip", "flip", "cut", "append"))

    def change(payload: bytes) -> bytes:
        if how == "append" or not payload:
            return payload + bytes([bit])
        at = int(place * len(payload))
        return payload[:at] if how == "cut" else payload[:at] + bytes([payload[at] ^ bit]) + payload[at + 1 :]

    return change


def _payload(body: ProtobufMessage, tensors: dict[str, Any] | None) -> bytes:
    if tensors is None or not isinstance(body, pb.Factors):
        return encode(body)
    return encode_factors(
        {name: np.asarray(values, np.float32) for name, values in tensors.items()},
        base_digest=body.base_digest,
        schema_sha256=body.schema_sha256,
        rank=body.rank,
        scale=body.scale,
        dtype=body.dtype if body.dtype in ("float32", "bfloat16") else "float32",
    )


# ---- the comparison --------------------------------------------------------------------------------


@dataclass
class Report:
    """Attributes:
    messages: judged at both ends.
    allowed: by both.
    differences: that no line of ONE_SIDED explains, the first few in words.
    explained: how often each line of ONE_SIDED was the reason.
    reasons: how often a message was refused for each reason, at the silo.
    kinds_allowed: by both.
    """

    messages: int = 0
    allowed: int = 0
    differences: list[str] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    kinds_allowed: set[str] = field(default_factory=set)


def compare(count: int, seed: int, *, messages_each: int = 12) -> Report:
    """Judge `count` generated messages at both ends.

    Args:
        count: of messages.
        seed: of the generator.
        messages_each: after so many messages of a ruleset both ends begin anew, so that budgets are met and left.
    """
    report, ends, seen = Report(), dict[str, Ends](), Counter[str]()
    for ruleset, sent in generate(count, seed):
        if seen[ruleset] % messages_each == 0:
            ends[ruleset] = Ends(ruleset)
        seen[ruleset] += 1
        pair = ends[ruleset]
        _compare_one(report, sent, ruleset, pair.at_silo(sent), pair.at_coordinator(sent))
        if pair.silo_book != pair.coordinator_book:
            # One end let through what the other refused, for a reason that has a name: start again from the same.
            ends[ruleset] = Ends(ruleset)
            seen[ruleset] = 1
    return report


def _compare_one(report: Report, sent: Sent, ruleset: str, silo: Decision | str, other: Decision | str) -> None:
    report.messages += 1
    what = f"{ruleset} {sent.kind} {sent.run} {sent.round}.{sent.step} changed {', '.join(sent.changed) or 'nothing'}"
    verdicts = [end if isinstance(end, str) else end.verdict for end in (silo, other)]
    if isinstance(silo, str) or isinstance(other, str):
        # Bytes that one end cannot parse are refused there; the other must refuse the message, too.
        if "allow" in verdicts:
            report.differences.append(f"{what}: {verdicts[0]} at the silo, {verdicts[1]} at the coordinator")
        report.reasons["unparsed"] += 1
        return
    report.reasons.update(silo.reasons)
    refused = [{result.rule for result in end.results if result.outcome in ("deny", "hold")} for end in (silo, other)]
    if verdicts == ["allow", "allow"]:
        report.allowed += 1
        report.kinds_allowed.add(sent.kind)
    elsewhere = sent.run != RUN or "round" in refused[0] & refused[1]
    if elsewhere and verdicts[0] == verdicts[1]:
        # Of a run that it does not know, or a step that does not exist, a coordinator knows no match, rows or order:
        # there the verdict is all that can be compared.
        return
    for rule in refused[0] ^ refused[1]:
        end = "silo" if rule in refused[0] else "coordinator"
        named = (rule, end) in ONE_SIDED
        if rule == "round":
            named = named and sent.kind in _ANSWERS_OF_A_STEP
        elif rule == "screens ran":
            named = end == "coordinator" and _UNKNOWN_PROMPT in refused[0] & refused[1]
        if named:
            report.explained[f"{rule} ({end})"] += 1
        else:
            report.differences.append(f"{what}: {rule} refuses at the {end} only")

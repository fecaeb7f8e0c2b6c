"""The way in: nothing is taken from a silo that has not passed all of this, in this order (threats T21, T29, T50).

1. envelope: this federation, sender = the certificate's id, a listed silo, a known kind, size within its bound;
2. Ed25519 signature by the key in that certificate;
3. payload digest, canonical form;
4. sequence above the last one (the driver's part, since it is state);
5. answers to public prompts: the rules that need no grading (T23, T55); if none of them refuses, all are graded again,
   each silo's in a queue and within a budget of its own. Those text screens of its charter that need no private data
   run here too (T21). An answer that was not graded in time is dropped and counted;
6. the same rules as at the silo, with the coordinator's own charter; where nothing was graded, answers are denied.
What this does not stop: values that keep all rules and are still bad for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import Message as ProtobufMessage

from certs.identity import PeerIdentity
from coordinator.aggregate import LazyTensors, read_factors
from coordinator.blobs import AnyPayload, whole
from fedsilo.files.run_request import Agreed
from fedsilo.grading.answers import AnswerGrading
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import check_signature
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.isolation import ISOLATION_LEVELS
from fedsilo.protocol.kinds import OUTBOUND_KINDS, REFT_KINDS, TENSOR_KINDS
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.services import PROTOCOL_VERSION
from fedsilo.protocol.text import harmless
from policies import engine, screens
from policies.kinds.public_responses import withhold_responses
from policies.message import FINAL, OFFERED, Requests, Screened
from policies.model import MIN_UPDATES, Policy
from policies.schema import LoraSchema

ROLES = frozenset({"member", "lead"})
SILENT_SECONDS = 120.0  # a silo that is up sends a poll or a heartbeat at least every half minute
TEXT_CHARACTERS_MAX = 64  # a hash in hex; nothing in hello is longer


_CHECKS = (
    ("base_model_sha256", WireCode.BASE_MODEL_MISMATCH),
    ("tokenizer_sha256", WireCode.TOKENIZER_MISMATCH),
    ("template_sha256", WireCode.TEMPLATE_MISMATCH),
    ("load", WireCode.LOAD_MISMATCH),
    ("lora_schema_sha256", WireCode.SCHEMA_MISMATCH),
    ("public_set_sha256", WireCode.PUBLIC_SET_MISMATCH),
    ("held_out_sha256", WireCode.HELD_OUT_MISMATCH),
    ("own_verifiers_sha256", WireCode.VERIFIER_MISMATCH),
)
# Fields that may differ where the agreement allows a mixture, and where it says so.
_MAY_BE_MIXED = {"load": "mixed_base", "own_verifiers_sha256": "mixed_verifiers"}


def standing(
    kept: str, *, by_files: bool, refused: bool, silent_seconds: float | None, up_seconds: float, greetings: int
) -> str:
    """Return a silo's state at this coordinator: the one word for it on every screen and in every command.

    Does not stop: a silo whose guard polls while its trainer is dead. It is heard, so it has joined.

    Args:
        kept: `joined` or `refused`, as its last hello was answered; empty before the first one.
        by_files: its messages come in files, so nobody expects to hear it.
        refused: a hello was refused since this coordinator started, and none was taken after that.
        silent_seconds: since its last message; None where none came since this coordinator started.
        up_seconds: since this coordinator started.
        greetings: hellos taken since it last said anything else.

    Returns:
        absent: it never said hello. refused: at hello. by_files. not_heard_yet: this coordinator has only just started.
        silent: up or not, nothing has come from it for `SILENT_SECONDS`. only_greets: it was cut off after its hello,
        or does not believe the answer. joined: none of that.
    """
    if refused or kept == "refused":
        return "refused"
    if not kept:
        return "absent"
    if by_files:
        return "by_files"
    if (up_seconds if silent_seconds is None else silent_seconds) >= SILENT_SECONDS:
        return "silent"
    if silent_seconds is None:
        return "not_heard_yet"
    return "only_greets" if greetings > 1 else "joined"


def silo_of(spiffe_id: str, federation: str, silos: tuple[str, ...]) -> str:
    """The listed silo that an id names; exact match, no prefixes (T28).

    Raises:
        PeerError: another federation, another role, or not on the list.
    """
    for silo in silos:
        if spiffe_id == f"spiffe://{federation}/silo/{silo}":
            return silo
    raise PeerError(
        WireCode.NOT_A_MEMBER,
        f"{spiffe_id} is not on the coordinator's list of silos",
        hint="if it belongs here, list it under `silos:` in coordinator.yaml",
    )


def check_hello(hello: pb.Hello, agreed: Agreed, *, silos: int = 1) -> None:
    """Compare a silo's hello with the federation's agreement.

    Args:
        hello: as it came.
        agreed: what every silo must share.
        silos: how many are listed here.

    Raises:
        PeerError: the first difference, with the field's name and both values.
    """
    _check_protocol(hello.protocol_min, hello.protocol_max)
    for name, code in _CHECKS:
        expected, named = str(getattr(agreed, name)), str(getattr(hello, name))
        mixed = name in _MAY_BE_MIXED and getattr(agreed, _MAY_BE_MIXED[name]) == "allow"
        if expected != named and not mixed:
            got = harmless(named, TEXT_CHARACTERS_MAX)
            differ = f"{name} differs: expected {expected or 'none'}, got {got or 'none'}"
            raise PeerError(code, differ, field=name, expected=expected, got=got)
    for name, allowed in (("role", ROLES), ("isolation", ISOLATION_LEVELS)):
        got = harmless(getattr(hello, name), TEXT_CHARACTERS_MAX)
        if got not in allowed:
            raise PeerError(
                WireCode.MALFORMED, f"{name} is '{got}'", field=name, expected="|".join(sorted(allowed)), got=got
            )
    # A larger number would fit into no transcript, or into none of this federation's rounds (T24).
    least, most = min(MIN_UPDATES, silos), max(MIN_UPDATES, silos)
    if not least <= hello.min_updates <= most:
        got, expected = str(hello.min_updates), f"{least}-{most}"
        differ = f"min_updates: expected {expected} among {silos} silo{'s' * (silos > 1)}, got {got}"
        raise PeerError(WireCode.MALFORMED, differ, field="min_updates", expected=expected, got=got)


def check_kept(fields: Mapping[str, str]) -> None:
    """Check that a hello that was accepted before this start, maybe by an earlier version, is of this protocol.

    Raises:
        PeerError: it is of another one. A hello that names none is from when there was version 1 only.
    """
    _check_protocol(int(fields.get("protocol_min", "1")), int(fields.get("protocol_max", "1")))


def _check_protocol(low: int, high: int) -> None:
    if not low <= PROTOCOL_VERSION <= high:
        got = f"{low}-{high}" if low != high else str(low)
        raise PeerError(
            WireCode.PROTOCOL_RANGE,
            f"no common protocol version: expected {PROTOCOL_VERSION}, got {got}",
            hint="use one version of FedSilo on both sides: update the older one",
            field="protocol",
            expected=str(PROTOCOL_VERSION),
            got=got,
        )


def hello_as_fields(hello: pb.Hello) -> dict[str, str]:
    """Return what a silo says of itself, safe to show, whether or not it is right."""
    names = (field.name for field in pb.Hello.DESCRIPTOR.fields)
    return {name: harmless(str(getattr(hello, name)), TEXT_CHARACTERS_MAX) for name in names}


# ---- what arrives ----------------------------------------------------------------------------------------------------


DIGEST_BYTES = 32
SIGNATURE_BYTES = 64


@dataclass(frozen=True)
class Arrived:
    """A complete message, authenticated and parsed; not yet judged by the rules.

    Attributes:
        verdicts, screened: of the answers to public prompts; of those alone that were graded in time.
        ungraded: places of the others in the message.
    """

    silo: str
    envelope: pb.Envelope
    payload: AnyPayload
    body: ProtobufMessage
    tensors: LazyTensors | None
    verdicts: tuple[bool, ...] | None
    screened: Screened | None = None
    ungraded: tuple[int, ...] = ()

    @property
    def left(self) -> ProtobufMessage:
        """The message without answers that were not graded in time."""
        if not self.ungraded or not isinstance(self.body, pb.PublicResponses):
            return self.body
        count = sum(len(prompt.responses) for prompt in self.body.prompts)
        return withhold_responses(self.body, [place in self.ungraded for place in range(count)])[0]


@dataclass(frozen=True)
class OpenPlace:
    """State of the sender's run.

    Attributes:
        base_l2: norm of the adapter that the open round starts from.
        evaluated_digest: adapter that the message's round came to; "" if none.
        public_prompt_indices: rows that the step asks for, in its order.
        asked: what the coordinator has asked of the sender beside the public steps.
    """

    plan: Plan | None = None
    base_digest: str = ""
    base_l2: float | None = None
    round: int = 0
    step: int = 0
    public_prompt_indices: tuple[int, ...] = ()
    evaluated_digest: str = ""
    asked: Requests = field(default_factory=Requests)


@dataclass(frozen=True)
class Ruling:
    """`history`: the counts it was judged by; with the facts it replays the decision."""

    decision: engine.Decision
    facts: engine.Facts
    history: engine.History


@dataclass
class Ingress:
    """Checks without state, but for what grading has taken so far.

    Attributes:
        silos: listed names.
        policy: the coordinator's charter.
        schema: the adapter's tensors.
        references: reference answers of the public set, by row.
        public_set_sha256: digest of that set.
        topics: topics that metrics may name.
        grading: of answers, or None when the public set's verifier executes code.
        now_seconds: UTC seconds, never going back.
    """

    federation: str
    silos: tuple[str, ...]
    policy: Policy
    schema: LoraSchema
    references: Sequence[str]
    public_set_sha256: str
    topics: frozenset[str]
    grading: AnswerGrading | None
    now_seconds: Callable[[], float]

    def admit(self, peer: PeerIdentity, envelope: pb.Envelope, payload_bytes: int) -> str:
        """Steps 1 and 2, before any payload byte is accepted. Returns the silo's name.

        Raises:
            PeerError: with the code to answer.
        """
        if envelope.sender != peer.spiffe_id or envelope.federation != self.federation:
            raise PeerError(WireCode.SENDER_MISMATCH, f"{peer.spiffe_id} sent under another name")
        silo = silo_of(peer.spiffe_id, self.federation, self.silos)
        if len(envelope.payload_digest) != DIGEST_BYTES or len(envelope.signature) != SIGNATURE_BYTES:
            raise PeerError(WireCode.MALFORMED, "digest or signature has the wrong length")
        check_signature(envelope, peer.signing_public_key, what=f"the envelope of {silo}", signer="its key")
        if "\0" in envelope.run:
            # No database keeps it, and asked for it the coordinator would fail before anything is on record (T24). The
            # envelope's other texts are only taken as one of the known ones.
            raise PeerError(WireCode.MALFORMED, f"{silo} names a run with a NUL character")
        if envelope.kind not in OUTBOUND_KINDS:
            raise PeerError(WireCode.UNKNOWN_KIND, f"{silo} sent a kind that does not exist")
        if payload_bytes > self.payload_bytes_max(envelope.kind):
            raise PeerError(WireCode.TOO_LARGE, f"{silo} announces {payload_bytes} bytes of {envelope.kind}")
        return silo

    def payload_bytes_max(self, kind: str) -> int:
        """Largest payload of a kind: what the schema makes, or what is read as a whole (T23)."""
        if kind in REFT_KINDS:
            return self.policy.file.budgets.message_bytes  # layers and width stand in the policy, not in the schema
        return self.schema.update_bytes if kind in TENSOR_KINDS else codec.SMALL_PAYLOAD_BYTES_MAX

    def parse(self, silo: str, envelope: pb.Envelope, payload: AnyPayload) -> Arrived:
        """Step 3. What it returns has no verdicts; `grade` adds them.

        Raises:
            PeerError: digest or canonical form.
        """
        if payload.digest != envelope.payload_digest.hex():
            raise PeerError(WireCode.DIGEST_MISMATCH, f"the payload of {silo} is not the one its envelope names")
        if envelope.kind in TENSOR_KINDS:
            reader = read_factors(payload)
            return Arrived(silo, envelope, payload, reader.header, LazyTensors(reader), None)
        body: ProtobufMessage = codec.decode(OUTBOUND_KINDS[envelope.kind], whole(payload))
        return Arrived(silo, envelope, payload, body, None, None)

    def is_worth_grading(self, arrived: Arrived, place: OpenPlace, book: engine.HistoryBook) -> bool:
        """Return whether a message holds answers, and no rule that needs no grading refuses them."""
        if not isinstance(arrived.body, pb.PublicResponses):
            return False
        return self.judge(arrived, place, book, stage=OFFERED).decision.would_be != "deny"

    def grade(self, arrived: Arrived) -> Arrived:
        """Step 5, which may take long and changes no state: verdicts on answers to public prompts."""
        body, verdicts = arrived.body, list[bool | None]()
        assert isinstance(body, pb.PublicResponses)  # noqa: S101  # only those are worth grading
        if self.grading is not None:
            # a row that is not in the set has no answer: its message was not worth grading
            pairs = [
                (response.text, self.references[prompt.prompt_index])
                for prompt in body.prompts
                for response in prompt.responses
            ]
            place = (arrived.envelope.run, arrived.envelope.round, arrived.envelope.step)
            verdicts = list(self.grading.grade(arrived.silo, place, pairs))
        late = tuple(place for place, verdict in enumerate(verdicts) if verdict is None)
        arrived = replace(arrived, ungraded=late)
        names = screens.asked(self.policy.file.egress.public_responses, arrived.envelope.kind, "ingress")
        screened = screens.screen(self.policy.file, names, list(screens.texts_of(arrived.left)), screens.NO_MATERIAL)
        graded = tuple(verdict for verdict in verdicts if verdict is not None)
        return replace(arrived, verdicts=None if self.grading is None else graded, screened=screened)

    def judge(self, arrived: Arrived, place: OpenPlace, book: engine.HistoryBook, *, stage: str = FINAL) -> Ruling:
        """Step 6: the charter's verdict. Whatever the rules cannot decide is a deny."""
        envelope = arrived.envelope
        message = engine.Message(
            direction="ingress",
            place=Place(envelope.run, envelope.round, envelope.step, envelope.kind),
            sender=envelope.sender,
            payload_bytes=arrived.payload.size_bytes,
            body=arrived.left,
            tensors=arrived.tensors,
        )
        context = engine.Context(
            now_seconds=self.now_seconds(),
            expected_sender=f"spiffe://{self.federation}/silo/{arrived.silo}",
            public_set_sha256=self.public_set_sha256,
            public_set_rows=len(self.references),
            plan=place.plan,
            schema=self.schema,
            base_digest=place.base_digest,
            base_l2=place.base_l2,
            open_round=place.round,
            open_step=place.step,
            public_prompt_indices=place.public_prompt_indices,
            evaluated_digest=place.evaluated_digest,
            verdicts=arrived.verdicts,
            token_counts=None,
            asked=place.asked,
            screened=arrived.screened,
            topics=self.topics,
        )
        facts = engine.measure(message, context, stage=stage)
        history = book.view(facts)
        return Ruling(engine.decide(facts, self.policy, history), facts, history)

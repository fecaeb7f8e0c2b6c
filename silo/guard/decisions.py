"""Decisions about messages: the judge and its inputs, and the records of a message in the log.

    where the run stands RunView          from what the gate let in; SiteView does not change while the daemon runs
    answers              PublicView       graded again from the site's own copy of the public set
    facts and rules      Judge            measures, decides, counts what was allowed, writes the decision down
    what became of it    Outcomes         denied, sent, answered, dropped, not known, sent once more

The judge holds no channel and no key of the federation, so it can send nothing: the gate does, after it has asked here
(threat model B5, P2). A disk that cannot record halts both directions. What no record takes does not leave: it is
denied, and the log says that there was something. So a trainer cannot end the guard with a message that is allowed and
too long to be written down (T3, T24). Records hold facts, each rule's verdict and digests; never text or tensor values.

What waits in the outbox is sent as the same bytes under a new sequence. Its facts are judged again by the policy in
force, which may be tighter than the one that let it out (T34). It was counted against every limit then, and is not a
second time.

The guard grades answers again from its own copy of the public file, so a trainer that calls a wrong answer
right, or hides text in an answer, does not decide what leaves. Grading runs in a child process that can be killed, and
all answers of a message together take no longer than one budget.

Does not stop: private text inside an answer that is also correct (threat model N1, N3); a record that is written and
says too little; a message that had arrived and was let out by a looser
policy, since what is sent is out; a coordinator that leaves a silo out of the donors' pool, or draws other donors from
it than the plan's seed says.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit import notes as audit_notes
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import COUNT_MAX, RecordError, keyed_digest, rules_of
from fedsilo.audit.segments import LogFullError, LogLostError
from fedsilo.files.durable import DiskFullError
from fedsilo.files.task_files import TaskFile
from fedsilo.grading.answers import AnswerGrading
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, Buffer, sha256_hex
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import (
    DeniedError,
    FedSiloError,
    NotFoundError,
    OperationError,
    UnreachableError,
    VerificationError,
    WireCode,
)
from fedsilo.protocol.kinds import OUTBOUND_KINDS, TENSOR_KINDS
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.swap import answers_digest, rows_answered
from fedsilo.protocol.transcript import Transcript, transcript_from_canonical
from policies import screens
from policies.engine import (
    FINAL,
    Approval,
    Context,
    Decision,
    Facts,
    History,
    HistoryBook,
    Message,
    RuleResult,
    decide,
    measure,
)
from policies.kind import block_of
from policies.message import Requests, Screened
from policies.model import Policy, ScreenName
from policies.schema import LoraSchema
from silo.guard.adapters import AdapterStore
from silo.guard.ledger import UNWRITABLE, Ledger, OutboxItem
from silo.guard.messages import Allowed, Denied, Original
from silo.guard.screens import Screens
from silo.sampling import Training

_log = logging.getLogger("fedsilo.silo")
# Nothing may leave that cannot be written down, or kept as the policy says.
_HALTING = frozenset({"LEDGER_UNWRITABLE", "OUTBOX_FULL", UNWRITABLE})


Aside = Callable[[Callable[[], Any]], Any]
_ANSWERS = "public.responses"


def halted_error(what: str, why: str) -> OperationError:
    """Return the error for what a halted gate does not do any more."""
    hint = "put that right, then start this silo again; of two transcripts of a round: silo approvals list"
    return OperationError(f"nothing is {what}: {why}", hint=hint, code="HALTED")


def halts(error: FedSiloError) -> bool:
    """Return True if the error means that this silo cannot write down what it must (T39), or that its log is lost."""
    return isinstance(error, LogFullError | LogLostError | DiskFullError) or error.code in _HALTING


@dataclass(frozen=True)
class Readings:
    """Results of reading a message: one entry for each of its texts, in message order.

    Attributes:
        graded: own verdicts (None: none in time), own token counts; None for a message without answers, or unread.
        screened: what the screens found; None where the policy asks for none.
        measured: facts of the same tensors in the same bytes, as they were offered; None: they are measured.
    """

    graded: tuple[tuple[bool | None, ...], tuple[int, ...]] | None = None
    screened: Screened | None = None
    measured: Facts | None = None

    def of(self, places: Sequence[int]) -> Readings:
        """Return the readings of the texts that are left in the message."""
        graded = self.graded
        if graded is not None:
            graded = (tuple(graded[0][place] for place in places), tuple(graded[1][place] for place in places))
        return Readings(graded, None if self.screened is None else screens.kept(self.screened, places))

    @property
    def ungraded(self) -> list[bool]:
        """Return for each text whether it was not graded in time: such a text is dropped and counted, and decides
        nothing."""
        return [verdict is None for verdict in self.graded[0]] if self.graded is not None else []


# ---- answers, graded again ------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """row: of the public set, whose prompt it answers. silo: that wrote it."""

    row: int
    text: str
    silo: str


@dataclass(frozen=True)
class PublicView:
    """The public file of this site, graders for its verifier, and a token counter of the site's own tokenizer."""

    tasks: TaskFile
    grading: AnswerGrading
    count_tokens: Callable[[str], int]

    def judge(
        self, answers: Sequence[Answer], place: tuple[str, int, int]
    ) -> tuple[tuple[bool | None, ...], tuple[int, ...]]:
        """Verdict and token count of each answer. It may take as long as the budget for so many answers of one silo.

        Args:
            answers: in the order of the message.
            place: run, round and step that they answer.

        Returns:
            Whether each answer is correct, None where it could not be graded in time, and its number of tokens. A row
            that does not exist counts as wrong.
        """
        rows, verdicts = self.tasks.rows, list[bool | None]([False] * len(answers))
        of_silo: dict[str, list[int]] = {}
        for i, answer in enumerate(answers):
            if answer.row < len(rows):
                of_silo.setdefault(answer.silo, []).append(i)
        pairs = {
            silo: [(answers[i].text, rows[answers[i].row].answer) for i in known] for silo, known in of_silo.items()
        }
        for silo, verdicts_of in self.grading.grade_together(place, pairs).items():
            for i, verdict in zip(of_silo[silo], verdicts_of, strict=True):
                verdicts[i] = verdict
        return tuple(verdicts), self.tokens(answer.text for answer in answers)

    def tokens(self, texts: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.count_tokens(text) for text in texts)

    @property
    def topics(self) -> frozenset[str]:
        return frozenset(task.topic for task in self.tasks.rows)


def answers_of(body: pb.PublicResponses, silo: str) -> list[Answer]:
    """Every response of a silo's message, in message order."""
    return [Answer(row.prompt_index, response.text, silo) for row in body.prompts for response in row.responses]


def places_by_row(body: pb.PublicResponses, places: Sequence[int]) -> dict[int, list[int]]:
    """Return the place of each response that is left among those to its prompt, by row of the public set.

    Args:
        body: the message as offered.
        places: positions of the responses that are left, in message order.
    """
    left, first, by_row = set(places), 0, dict[int, list[int]]()
    for prompt in body.prompts:
        by_row[prompt.prompt_index] = [place for place in range(len(prompt.responses)) if first + place in left]
        first += len(prompt.responses)
    return by_row


def donated_answers_of(body: pb.PublicDonors) -> list[Answer]:
    """Every donor that carries its text; what the receiver wrote itself has none."""
    return [
        Answer(row.prompt_index, donor.response.text, donor.origin)
        for row in body.prompts
        for donor in row.donors
        if donor.HasField("response")
    ]


def token_counter(model_folder: Path) -> Callable[[str], int]:
    """Counts tokens with the model folder's own `tokenizer.json`, without special tokens and without torch."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


# ---- where a run stands, as the rules see it ------------------------------------------------------------------


# A slow silo may evaluate a round when later ones are open already.
ROUNDS_EVALUATED = 16


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class RunView:
    """A run as the rules see it. The ledger keeps it over a restart, in the order of its fields; where JSON holds a
    value in another form, `store` makes that form and `load` reads it.

    Three are not kept. The plan has a place of its own in the ledger. A refused round.open whose no was not heard comes
    again, and is refused again; once the no was heard, nothing more is said of that round. Witnesses are asked again
    when the silo joins: nobody's word is carried over a restart.

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

    plan: Plan | None = field(default=None, metadata={"kept": False})
    round: int = 0
    base_digest: str = ""
    base_l2: float | None = None
    steps: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict,
        metadata={"load": lambda stored: {int(step): tuple(rows) for step, rows in stored.items()}},
    )
    last_adapter: str = ""
    last_adapter_round: int = 0
    told_adapter: str = ""
    told_round: int = 0
    open_step: int = 0
    agreeing: bool = False
    pool: frozenset[str] | None = field(default=None, metadata={"load": frozenset, "store": sorted})
    evaluated: Mapping[int, str] = field(
        default_factory=dict,
        metadata={"load": lambda stored: {int(number): digest for number, digest in stored.items()}},
    )
    asked: Requests = field(default_factory=Requests, metadata={"load": Requests.from_json, "store": Requests.to_json})
    usable_records: int | None = None
    training: Training | None = field(default=None, metadata={"load": Training.from_json, "store": asdict})
    refused_round: int = field(default=0, metadata={"kept": False})
    witnesses: int | None = field(default=None, metadata={"kept": False})

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
            self,
            round=round_number,
            base_digest=base,
            base_l2=None,
            steps=steps,
            open_step=0,
            training=None,
            agreeing=True,
            pool=pool,
            told_adapter=self.told_adapter or base,
        )

    def settled(self) -> RunView:
        """The open round waits for no signature any more: it is agreed on, or over."""
        return replace(self, agreeing=False)

    def asking(self, body: ProtobufMessage, step: int) -> RunView:
        """The coordinator's message was let in."""
        return replace(self, asked=self.asked.after(body, step))

    def told(self, round_number: int, body: pb.RoundResult) -> RunView:
        """A round is over, whether or not this silo was in it. Results of single silos are nothing that the next one
        begins with."""
        adapter = body.adapter_digest if body.committed and not body.results else self.told_adapter
        return replace(self, told_round=round_number, told_adapter=adapter)

    def evaluating(self, adapter_digest: str) -> RunView:
        """The open round was committed."""
        known = {number: digest for number, digest in self.evaluated.items() if number > self.round - ROUNDS_EVALUATED}
        return replace(self, evaluated={**known, self.round: adapter_digest})

    def refused(self, round_number: int) -> RunView:
        """Its round.open was not let in, and the coordinator is to be told which."""
        return replace(self, refused_round=round_number)

    def witnessed(self, witnesses: int) -> RunView:
        return replace(self, witnesses=witnesses)

    def with_base_l2(self, base_l2: float | None) -> RunView:
        """The adapter that the open round starts from is here, and has this norm: the next one is compared with it."""
        return replace(self, base_l2=base_l2, last_adapter=self.base_digest, last_adapter_round=max(self.round - 1, 0))

    @property
    def step_from(self) -> str:
        """The adapter that one which comes in here is measured from (T20), as one text: the last adapter of the run
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
        return max(1, self.adapter_round - self.last_adapter_round)

    @property
    def adapter_round(self) -> int:
        """The round that an adapter is the result of which comes in at this place; 0 for what the run began with."""
        return self.round if self.round in self.evaluated else max(self.round - 1, 0)

    def to_json(self) -> dict[str, Any]:
        values = ((each, getattr(self, each.name)) for each in _KEPT)
        return {
            each.name: None if value is None else each.metadata.get("store", _same)(value) for each, value in values
        }

    @staticmethod
    def from_json(plan: Plan, value: Mapping[str, Any]) -> RunView:
        """Return the view again; what an earlier version did not keep has its default."""
        known = ((each, value[each.name]) for each in _KEPT if value.get(each.name) is not None)
        return RunView(plan, **{each.name: each.metadata.get("load", _same)(stored) for each, stored in known})


_KEPT = tuple(each for each in fields(RunView) if each.metadata.get("kept", True))


@dataclass(frozen=True)
class SiteView:
    """Facts of the site that do not change while the daemon runs.

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
        """Return the adapter that a global adapter is compared with; None for other kinds, for a run's first, and if it
        is gone."""
        if kind != "global.adapter" or self.adapters is None or not view.last_adapter:
            return None
        return self.adapters.tensors(view.last_adapter)


def context_of(site: SiteView, view: RunView, message: Message, readings: Readings, *, now_seconds: float) -> Context:
    """Return the engine's context for one message.

    Args:
        site: of this daemon.
        view: of the run.
        message: its round says which adapter an evaluation must name, its step which rows are asked for.
        readings: of its texts; an answer without a verdict is not right.
        now_seconds: UTC, never going back.
    """
    graded = readings.graded
    rows, open_step = view.steps, view.open_step
    if view.plan is not None and view.plan.exchange == "round_end":
        # Donors come with the opening and answers leave at the end, those of all steps together.
        rows = view.steps if message.direction == "ingress" else rows_answered(view.plan, view.round, view.steps)
        open_step = message.place.step if message.place.step in rows else 0
    return Context(
        now_seconds=now_seconds,
        expected_sender=site.spiffe_id if message.direction == "egress" else site.coordinator_id,
        silo=site.spiffe_id.rpartition("/")[2],
        plan=view.plan,
        schema=site.schema,
        base_digest=view.base_digest,
        base_l2=view.base_l2,
        last_adapter=site.last_adapter(view, message.place.kind),
        last_adapter_first=view.run != "" and not view.last_adapter,
        last_adapter_rounds=view.rounds_since_last_adapter,
        adapter_round=view.adapter_round,
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
        screened=readings.screened,
        records=view.training.records if view.training else None,
        epochs=view.training.epochs if view.training else None,
        steps=view.training.steps if view.training else None,
        witnesses=view.witnesses,
        countersigns=view.agreeing or (site.by_files and view.round > 0),
        topics=site.topics,
    )


class Judge:
    """Measures messages, decides on them, counts what is allowed, and records each decision.

    Args:
        policy: what may leave and what is let in.
        ledger: counters and history that survive a kill.
        audit: our log; durable at return of `append`.
        site: what does not change: names, schema, public set.
        site_key: keys the digests of short payloads in the log (T40).
        screens: read texts as the policy says; without their material they deny.
        code_sha256: of the program that decides; with each decision.

    Attributes:
        view: where the run stands.
        halted: why nothing is recorded or sent any more; empty while all is well.
        halt_code: the same as a code, where something could not be written or kept, or a log does not verify.
        clock: UTC seconds as the machine has them, for what is only shown: anything is judged by `now`.
        book: counts of what was allowed.
        places_sent: where the responses of the last message with withheld ones stood when they were offered:
            their place and, by row of the public set, their places. The trainer numbers its answers by these.
        aside: does what takes long and changes nothing here, and waits for it.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        ledger: Ledger,
        audit: AuditLog,
        site: SiteView,
        site_key: bytes,
        clock: Callable[[], float],
        screens: Screens,
        code_sha256: str,
    ) -> None:
        self.policy = policy
        self.site = site
        self.view = RunView()
        self.halted = self.halt_code = ""
        book = ledger.book
        self.book = HistoryBook.from_json(book) if book else HistoryBook()
        self._ledger = ledger
        self._audit = audit
        self._site_key = site_key
        self._code_sha256 = code_sha256
        self.clock = clock
        self._screens = screens
        self.places_sent = Place("", 0, 0, ""), dict[int, list[int]]()
        self.aside: Aside = lambda work: work()

    def now(self) -> float:
        """UTC seconds that never go back: the latest of clock, ledger and audit log (T41)."""
        return max(self._ledger.now(self.clock()), self._audit.latest_time)

    def accept_clock(self, now: float, difference: float) -> None:
        """Accept the clock as `Ledger.accept_clock` does: budgets that were used at a later time stay used."""
        self.book.turn_back(now)
        with self.halting():
            self._ledger.accept_clock(now, difference, self.book.to_json())

    # ---- messages ----------------------------------------------------------------------------------

    def outbound(self, place: Place, payload: Buffer) -> Message:
        """Parse our own rebuilt bytes again, so that what is judged is what is sent."""
        body, tensors = parsed(place.kind, payload, OUTBOUND_KINDS)
        return Message("egress", place, self.site.spiffe_id, len(payload), body, tensors)

    def screen_troubles(self) -> list[str]:
        """Return why a screen that the policy names cannot run here; while it cannot, its kind is denied."""
        return self._screens.troubles(self.policy)

    # ---- judging -----------------------------------------------------------------------------------

    def judge(
        self,
        message: Message,
        *,
        stage: str = FINAL,
        approvals: tuple[Approval, ...] = (),
        readings: Readings | None = None,
    ) -> tuple[Facts, Decision]:
        """Every rule on one message.

        Args:
            message: parsed from the very bytes that go out, or came in.
            stage: offered (before the transforms) or final.
            approvals: persons whose signature over this payload's digest has been verified.
            readings: of its texts or values, where they were read before; else they are read here. Without any, an
                offer is judged by the rules that need none: whoever reads texts asks that first (T55).
        """
        if readings is None:
            holds_texts = message.tensors is None
            readings = self.screened(message, self.graded(message)) if holds_texts else Readings()
        if readings.measured is not None:
            facts: Facts = {**readings.measured, "stage": stage}
        else:
            context = context_of(self.site, self.view, message, readings, now_seconds=self.now())
            facts = measure(message, context, stage=stage)
        return facts, decide(facts, self.policy, self.book.view(facts, approvals))

    def graded(self, message: Message) -> Readings:
        """This site's own verdicts and token counts of a message's answers; nothing for a message without any.

        It may take long, and people's orders are carried out and deadlines pass meanwhile: the policy may be another
        one afterwards, and the run may be over. Whatever was asked of either before it has to be asked again.
        """
        answers, place = self._answers_of(message.body), message.place[:3]
        return Readings(None if answers is None else self.aside(lambda: self.site.public.judge(answers, place)))

    def graded_before(self, message: Message, facts: Facts) -> Readings:
        """The same of bytes that were graded when they were held, by the facts that were kept of that; of the order of
        their verdicts no rule knows anything."""
        answers = self._answers_of(message.body)
        if answers is None:
            return Readings()
        right = min(int(facts.get("responses_correct", 0)), len(answers))
        verdicts = (*[True] * right, *[False] * (len(answers) - right))
        return Readings((verdicts, self.site.public.tokens(answer.text for answer in answers)))

    def _answers_of(self, body: ProtobufMessage) -> list[Answer] | None:
        """Every answer in a message; None for a message of another kind."""
        if isinstance(body, pb.PublicResponses):
            return answers_of(body, self.site.spiffe_id)
        return donated_answers_of(body) if isinstance(body, pb.PublicDonors) else None

    def screens_asked(self, message: Message) -> tuple[ScreenName, ...]:
        """The screens that the policy wants run over this message's texts."""
        return screens.asked(self._block(message), message.place.kind, message.direction)

    def _block(self, message: Message) -> object:
        return block_of({"kind": message.place.kind, "sender": message.sender}, self.policy)[0]

    def screened(self, message: Message, readings: Readings) -> Readings:
        """The same with what the screens find: one run of all of them over all texts, hit or no hit (T18)."""
        names = self.screens_asked(message)
        if not names:
            return readings
        texts = list(screens.texts_of(message.body))
        return replace(readings, screened=self._screens.screen(self.policy, names, texts))

    # ---- counting ----------------------------------------------------------------------------------

    def count_hits(self, message: Message, screened: Screened) -> None:
        """Count what the screens found before anything is decided on it, so that no refusal and no crash hides it.

        Beyond the policy's hits a day the kind is halted until persons lift that (T18). The ledger is written with
        and without a hit.
        """
        hits = sum(bool(hits_of) for hits_of in screened.hits)
        limit = getattr(self._block(message), "max_hits_per_day", None) or 0
        halts = self.book.count_hits(message.place.kind, self.now(), hits, limit)
        self._keep_book()
        place = message.place._asdict()
        if hits:
            hits_of = screens.totals(screened.hits)
            self.record("screen.hit", **place, direction=message.direction, detail={"responses": hits, "hits": hits_of})
        if halts:
            self.record("halt", **place, reasons=["SCREEN_HALT"], detail={"limit": limit})

    def lift_halt(self, kind: str) -> None:
        """Let the kind leave again; what is held stays held. `Halts` has recorded by then who lifts it."""
        self.book.lift_halt(kind, self.now())
        self._keep_book()

    def count(self, facts: Facts, run: str) -> int:
        """Count an allowed message against every limit, durably before a byte of it leaves (L3); its sequence."""
        with self.halting():
            self.book.record(facts)
            has_content = not facts["kind"].startswith("control.")
            return self._ledger.allow(self.book.to_json(), run, kept=has_content)

    def forget_runs(self, runs: Iterable[str]) -> None:
        """Drop the counts of runs that are over. Their names stay spent in the ledger, so none can begin again."""
        before = len(self.book.counts)
        for run in runs:
            if run:
                self.book.forget_run(run)
        if len(self.book.counts) != before:
            self._keep_book()

    def _keep_book(self) -> None:
        with self.halting():
            self._ledger.keep_book(self.book.to_json())

    # ---- recording ---------------------------------------------------------------------------------

    def reasons_not_to_retry(self, kind: str, decision_seq: int) -> list[str]:
        """Return why the policy in force does not let out what an earlier decision did; nothing where it does.

        Judged by the facts, the persons and the number of rounds on record, and today's time; without any other count,
        since the message was counted when it was allowed. What waits for persons by now has none to wait for: it is
        not let out.
        """
        if kind in self.book.screen_halts:
            return ["SCREEN_HALT"]
        record = next(self._audit.records(decision_seq), None)
        if record is None or record["seq"] != decision_seq or not (facts := record["facts"].get("final")):
            return ["RECORD_GONE"]
        before = History.from_json(record["facts"]["history"])
        history = History(rounds_released=before.rounds_released, approvals=before.approvals)
        decision = decide({**facts, "now": self.now()}, self.policy, history)
        return list(decision.reasons) if decision.verdict != "allow" else []

    def record_decision(
        self,
        facts: Facts,
        decision: Decision,
        digests: Mapping[str, Any],
        *,
        original: Original | None = None,
        sequence: int | None = None,
        approvals: Sequence[int] = (),
        history: dict[str, Any] | None = None,
        archived: bool = False,
        detail: Mapping[str, Any] | None = None,
    ) -> int:
        """Write a decision into the log, with everything it replays from: `history` are the counts it was judged by,
        `archived` says that the payload is kept at the site, `approvals` are numbers of the records of persons' yes,
        `detail` is what the record says besides."""
        payload = dict(digests)
        recorded = {"final": dict(facts), "history": dict(history or self.book.view(facts).to_json())}
        fields: dict[str, Any] = {
            **{name: facts[name] for name in ("kind", "run", "round", "step", "direction")},
            "peer": self.site.coordinator_id,
            "decision": decision.verdict,
            "reasons": list(decision.reasons),
            **rules_of(decision, self.policy),
            "facts": recorded,
            "policy": {**self.policy.digests, "code": self._code_sha256, "schema": self.site.schema.digest},
            "payload": payload,
        }
        if original is not None:
            payload["bytes_before"] = original.payload_bytes
            if original.digest:
                payload["sha256_before"] = original.digest
            recorded |= {"offered": original.facts, "transform": original.transform}
        if archived:
            payload["archived"] = True
        if approvals:
            fields["link"] = {"approvals": list(approvals)}
        if detail:
            fields["detail"] = {**fields["detail"], **detail}  # beside what is said of the rules
        event = "egress.decision" if facts["direction"] == "egress" else "ingress.decision"
        return self.record(event, sequence=sequence, **fields)

    def record(self, event: str, **fields: Any) -> int:
        """Append to the audit log; a full disk halts the gate.

        Raises:
            LogFullError, OperationError: not recorded.
        """
        with self.halting():
            return self._audit.append(event, **fields)

    def record_denied(self, direction: str, kind: str, reason: str, **fields: Any) -> int:
        """Record the refusal of a message that no rule judged, or whose judgement no record takes.

        Args:
            direction: egress or ingress.
            kind: of the message; unknown where it is none.
            reason: code of the cause.
            fields: of the record besides.

        Raises:
            LogFullError, OperationError: not recorded.
        """
        event = f"{direction}.decision"
        return self.record(event, kind=kind, decision="deny", reasons=[reason], direction=direction, **fields)

    def check_recorded(self) -> None:
        """Check that what was recorded is still on disk, at its path (P2); otherwise halt the gate.

        Raises:
            LogLostError: it is not.
            OperationError: halted already.
        """
        with self.halting():
            self._audit.check_in_place()

    def keep_note(self, sealed: bytes) -> str:
        """Keep beside the audit log what a person wrote; its digest. Raises as `record`."""
        with self.halting():
            return audit_notes.keep(self._audit.directory, sealed)

    def digests(self, kind: str, payload: Buffer, digest: str = "") -> dict[str, Any]:
        """Return size and digest of a payload as the log may hold them: plain only where nobody can guess the content,
        which is tensors, else keyed (T40). digest: its SHA-256, where it is known already."""
        if kind in TENSOR_KINDS:
            return tensor_digests(len(payload), digest or sha256_hex(payload))
        return {"bytes": len(payload), "hmac_sha256": keyed_digest(self._site_key, bytes(payload))}

    def halt(self, reason: str, code: str) -> None:
        """Send and record nothing any more. reason: in words. code: of the same."""
        self.halted, self.halt_code = reason, code

    @contextlib.contextmanager
    def halting(self) -> Iterator[None]:
        """Turns a disk that cannot record into a gate that does not send."""
        if self.halted:
            raise halted_error("recorded or sent", self.halted)
        try:
            yield
        except FedSiloError as error:
            if halts(error):
                self.halt(error.message, error.code)
            raise


# ---- what became of a message ------------------------------------------------------------------------


class Outcomes:
    """Records what becomes of each message, and settles it in the outbox.

    Args:
        ledger: holds the outbox.
    """

    def __init__(self, judge: Judge, ledger: Ledger) -> None:
        self._judge = judge
        self._ledger = ledger

    def denied(self, facts: Facts, decision: Decision, digests: Mapping[str, Any], **recorded: Any) -> Denied:
        """A refusal with everything it rests on, as far as a record takes that.

        Args:
            facts: the decision's.
            decision: a deny.
            digests: of the payload, as they may stand in the log.
            recorded: as `Judge.record_decision`.

        Raises:
            LogFullError, OperationError: not recorded; the gate is halted.
        """
        self._ledger.payloads.drop_begun()  # or what is denied would take the room that its record needs
        try:
            self._judge.record_decision(facts, decision, digests, **recorded)
        except RecordError as error:
            return self.unrecorded(facts, decision, digests, error)
        return Denied(decision, facts)

    def unrecorded(
        self, facts: Facts, decision: Decision, digests: Mapping[str, Any], error: RecordError, *, kept: str = ""
    ) -> Denied:
        """A message whose decision no record takes is denied, whatever the rules said.

        Args:
            facts: of the message.
            decision: of the rules.
            digests: of the payload, as they may stand in the log.
            error: why it cannot be recorded.
            kept: digest of the payload, where its bytes were kept already; they go, unless something else needs them.

        Raises:
            LogFullError, OperationError: not recorded or not removed; the gate is halted.
        """
        if kept:
            with self._judge.halting():
                self._ledger.drop_payloads([kept])
        peer = self._judge.site.coordinator_id
        self._judge.record_denied("egress", facts["kind"], error.code, peer=peer, payload=dict(digests))
        return Denied(overruled(decision, error.code, type(error).__name__), facts)

    def record(
        self, event: str, allowed: Allowed, *, carried: bool = False, links: Mapping[str, int] | None = None
    ) -> None:
        """Record what became of an allowed message. carried: in a file, which may get lost. links: more of them, by
        name.

        Of a message in a window of polls it is counted, and recorded when the window ends.
        """
        if allowed.window is not None:
            if event == "egress.sent":
                allowed.window.passed(len(allowed.payload))
            return
        self._judge.record(
            event,
            **allowed.place._asdict(),
            attempt=allowed.attempt,
            sequence=allowed.sequence,
            peer=self._judge.site.coordinator_id,
            direction="egress",
            payload=self._judge.digests(allowed.place.kind, allowed.payload, allowed.digest),
            link={"decision": allowed.decision_seq, **(links or {})},
            **({"detail": {"carried": True}} if carried else {}),
        )

    def settle(self, allowed: Allowed) -> None:
        """Settle a message that is out, and is not sent again."""
        if allowed.outbox_id is not None:
            with self._judge.halting():
                self._ledger.settle_outbox(allowed.outbox_id, "sent")

    def answered(self, allowed: Allowed, body: ProtobufMessage) -> None:
        """Record and settle the coordinator's answer to a message.

        Raises:
            UnreachableError: the coordinator is halted or stopping and took nothing; the message stays in the outbox.
        """
        halted = isinstance(body, pb.Refusal) and body.code == WireCode.HALTED
        if halted and allowed.outbox_id is not None:
            raise UnreachableError(
                f"the coordinator is halted or stopping: it did not take {allowed.kind}, which is sent again",
                hint="its people see why: `coordinator status`",
            )
        if isinstance(body, pb.Ack) and allowed.outbox_id is not None:
            # The coordinator's word for it, which this log need not be able to hold.
            links = {"peer_event": body.record} if 0 < body.record <= COUNT_MAX else {}
            self.record("egress.acked", allowed, links=links)
        plan = self._judge.view.plan
        pooled = plan is not None and plan.exchange == "round_end" and allowed.kind == _ANSWERS
        if isinstance(body, pb.Ack) and pooled:  # they may be in the next round's pool (`pool_stands`)
            with self._judge.halting():
                taken = f"{allowed.step}:{allowed.digest}"
                self._ledger.remember_of_run(allowed.run, f"answers/{allowed.round}", taken)
        self.settle(allowed)

    def drop(self, item: OutboxItem, reasons: Sequence[str]) -> None:
        """Record that a message of the outbox is never sent, then drop it.

            RUN_LEFT         this silo has left its run (`Leaving`)
            SCREEN_HALT      what screens found has halted its kind
            RECORD_GONE      the log has the record of its decision no more, so it cannot be judged anew
            code of a rule   the policy in force denies it, or asks for persons anew
            NOT_FOUND, PAYLOAD_UNREADABLE, PAYLOAD_CHANGED
                             its bytes are gone, cannot be read, or are not those that were allowed

        Nothing else drops one, but for an older ledger that is raised to its log (`Ledger.raise_to`): all that lay in
        its outbox may have left since, and is dropped without a record of each.
        """
        self._judge.record(
            "egress.indeterminate",
            **item.place._asdict(),
            reasons=list(reasons),
            link={"decision": item.decision_seq},
            direction="egress",
        )
        with self._judge.halting():
            self._ledger.settle_outbox(item.id, "dropped")

    def once_more(self, item: OutboxItem) -> Allowed:
        """Return a message of the outbox, to be transmitted again.

        Raises:
            DeniedError: the policy says no by now, or its bytes are gone, or are not those that were allowed; recorded,
                and never tried again.
            OperationError: the ledger takes nothing; the gate is halted.
        """
        payload = self._payload_of(item)
        if reasons := self._judge.reasons_not_to_retry(item.kind, item.decision_seq):
            self.drop(item, reasons)
            raise DeniedError(f"{item.kind} waited to be sent, and this site's policy does not let it out any more")
        with self._judge.halting():
            attempt = self._ledger.count_attempt(item.id)
            sequence = self._ledger.next_sequence(item.run)
        return Allowed(item.place, payload, item.digest, item.decision_seq, sequence, attempt, item.id)

    def answered_later(self, item: OutboxItem, sequence: int, body: ProtobufMessage) -> None:
        """Take the answer to a message that left in a file under `sequence`. Where its bytes are gone, that is recorded
        in place of the answer: it is not sent again either. Raises UnreachableError as `answered`."""
        try:
            payload = self._payload_of(item)
        except DeniedError as error:
            _log.warning("%s", error.message)
            return
        sent = Allowed(item.place, payload, item.digest, item.decision_seq, sequence, item.attempts, item.id)
        self.answered(sent, body)

    def _payload_of(self, item: OutboxItem) -> Buffer:
        try:
            return self._ledger.payloads.read(item.digest)
        except (NotFoundError, OperationError, VerificationError) as error:
            self.drop(item, [error.code])
            raise DeniedError(f"{item.kind} cannot be sent again: {error.message}", code=error.code) from error


# ---- answers that the coordinator took (`exchange: round_end`, T20, T21) ------------------------------


def pool_stands(transcript: Transcript, plan: Plan, ledger: Ledger, silo: str) -> bool:
    """Return True if a transcript's pool of donors can be: none but with `exchange: round_end` and before the second
    round; of the plan's silos; and of this one's own answers, if they are in it, all that the coordinator took.

    A transcript names, for each silo of the pool, one digest of the answers that it gave in the round before. Every
    silo signs the same one before it trains: so the coordinator cannot tell two silos of two pools, and each silo sees
    that its own answers stand there as it sent them, or that they are left out.
    """
    if plan.exchange != "round_end" or transcript.round == 1:
        return not transcript.pool
    named = transcript.pool.get(silo)
    own = named is None or named in _given(ledger, transcript.run, transcript.round - 1)
    return own and set(transcript.pool) <= set(plan.silos)


def _given(ledger: Ledger, run: str, number: int) -> set[str]:
    """Digests of this silo's answers of a round: those that were taken, without and with what the coordinator has not
    answered, which it may have taken or not."""
    parted = (one.split(":", 1) for one in ledger.remembered_of_run(run, f"answers/{number}"))
    taken = {int(step): digest for step, digest in parted}
    waiting = {
        item.step: item.digest
        for item in ledger.outbox("allowed")
        if (item.run, item.round, item.kind) == (run, number, _ANSWERS)
    }
    return {answers_digest(each) for each in (taken, waiting | taken) if each}


# ---- fields of records -------------------------------------------------------------------------------


def orders_of(*orders: Mapping[str, str]) -> dict[str, Any]:
    """The field of a record that keeps what people signed; none where nothing is known of it."""
    known = [dict(order) for order in orders if order]
    return {"orders": known} if known else {}


def overruled(decision: Decision, reason: str, measured: str) -> Decision:
    """A decision turned into a refusal by what no rule saw: every verdict stays, and one more says why.

    Args:
        decision: of the rules.
        reason: stable code.
        measured: what was found, in a word.
    """
    file = decision.results[0].file if decision.results else ""
    result = RuleResult("transform", reason, "deny", measured, None, file, 0)
    reasons = (*decision.reasons, reason) if decision.verdict == "deny" else (reason,)
    return replace(decision, verdict="deny", would_be="deny", results=(*decision.results, result), reasons=reasons)


def tensor_digests(payload_bytes: int, digest: str) -> dict[str, Any]:
    """The same of a payload of tensors, which nobody guesses."""
    return {"bytes": payload_bytes, "sha256": digest}

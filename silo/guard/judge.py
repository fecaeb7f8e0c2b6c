"""What a decision at this site rests on: the policy, where the run stands, the counts so far, and the log it goes into.

`Judge` measures and decides, counts what was allowed, and writes decisions down. It holds no channel and no key of
the federation, so it can send nothing: the gate does, after it has asked here (threat model B5, P2). A disk that cannot
record halts both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.edge import audit_notes
from fedsilo.edge.audit_log import AuditLog, LogFullError, LogLostError
from fedsilo.edge.files import DiskFullError
from fedsilo.treaty.errors import FedSiloError, OperationError
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.codec import Buffer
from policies import screening
from policies.engine import FINAL, Approval, Decision, Facts, History, HistoryBook, Message, decide, measure
from policies.load import Policy
from policies.model_screens import ScreenName
from policies.rules.base import block_of
from policies.screening import Screened
from silo.guard.context import RunView, SiteView, context_of
from silo.guard.ledger import UNWRITABLE, Ledger
from silo.guard.messages import Original
from silo.guard.public import Answer, answers_of, donated_answers_of
from silo.guard.records import decision_fields, payload_digests
from silo.guard.screens import Screens

# Nothing may leave that cannot be written down, or kept as the policy says.
_HALTING = frozenset({"LEDGER_UNWRITABLE", "OUTBOX_FULL", UNWRITABLE})


Aside = Callable[[Callable[[], Any]], Any]


def halted_error(what: str, why: str) -> OperationError:
    """Of what a halted gate does not do any more."""
    hint = "put that right, then start this silo again; of two transcripts of a round: silo approvals list"
    return OperationError(f"nothing is {what}: {why}", hint=hint, code="HALTED")


def halts(error: FedSiloError) -> bool:
    """Return True if the error means that this silo cannot write down what it must (T39), or that its log is lost."""
    return isinstance(error, LogFullError | LogLostError | DiskFullError) or error.code in _HALTING


@dataclass(frozen=True)
class Readings:
    """What this site found out about a message: of its texts one entry for each, in message order.

    Attributes:
        graded: own verdicts (None: none in time), own token counts; None for a message without answers, or unread.
        screened: what the screens found; None where the policy asks for none.
        measured: facts of the same tensors in the same bytes, as they were offered; None: they are measured.
    """

    graded: tuple[tuple[bool | None, ...], tuple[int, ...]] | None = None
    screened: Screened | None = None
    measured: Facts | None = None

    def of(self, places: Sequence[int]) -> Readings:
        """Those of the texts that are left of the message."""
        graded = self.graded
        if graded is not None:
            graded = (tuple(graded[0][place] for place in places), tuple(graded[1][place] for place in places))
        return Readings(graded, None if self.screened is None else screening.kept(self.screened, places))

    @property
    def ungraded(self) -> list[bool]:
        """Of each text, whether it was not graded in time: it is dropped and counted, and decides nothing."""
        return [verdict is None for verdict in self.graded[0]] if self.graded is not None else []


class Judge:
    """Args:
    policy: what may leave and what is let in.
    ledger: counters and history that survive a kill.
    audit: our log; durable at return of `append`.
    site: what does not change: names, schema, public set.
    site_key: keys the digests of short payloads in the log (T40).
    clock: UTC seconds.
    screens: read texts as the policy says; without their material they deny.
    code_sha256: of the program that decides; with each decision.

    Attributes:
        view: where the run stands.
        halted: why nothing is recorded or sent any more; empty while all is well.
        halt_code: the same as a code.
        book: counts of what was allowed.
        places_sent: where the responses of the last message with withheld ones stood when they were offered:
            (run, round, step) and, by row of the public set, their places. The trainer numbers its answers by these.
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
        self._clock = clock
        self._screens = screens
        self.places_sent: tuple[tuple[str, int, int], dict[int, list[int]]] = (("", 0, 0), {})
        self.aside: Aside = lambda work: work()

    def now(self) -> float:
        """UTC seconds that never go back: the latest of clock, ledger and audit log (T41)."""
        return max(self._ledger.now(self._clock()), self._audit.latest_time)

    def accept_clock(self, now: float, difference: float) -> None:
        """As `Ledger.accept_clock`: budgets that were used at a later time stay used."""
        self.book.turn_back(now)
        with self.halting():
            self._ledger.accept_clock(now, difference, self.book.to_json())

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
            readings = self.screened(message, self.graded(message))
        if readings.measured is not None:
            facts: Facts = {**readings.measured, "stage": stage}
        else:
            sender = self.site.spiffe_id if message.direction == "egress" else self.site.coordinator_id
            context = context_of(
                self.site, self.view, message, now_seconds=self.now(), expected_sender=sender, graded=readings.graded,
                screened=readings.screened,
            )  # fmt: skip
            facts = measure(message, context, stage=stage)
        return facts, decide(facts, self.policy, self.book.view(facts, approvals))

    def graded(self, message: Message) -> Readings:
        """This site's own verdicts and token counts of a message's answers; nothing for a message without any.

        It may take long, and people's orders are carried out and deadlines pass meanwhile: the policy may be another
        one afterwards, and the run may be over. Whatever was asked of either before it has to be asked again.
        """
        answers, place = self._answers_of(message.body), (message.run, message.round, message.step)
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
        return screening.asked(self._block(message), message.kind, message.direction)

    def _block(self, message: Message) -> object:
        return block_of({"kind": message.kind, "sender": message.sender}, self.policy)[0]

    def screened(self, message: Message, readings: Readings) -> Readings:
        """The same with what the screens find: one run of all of them over all texts, hit or no hit (T18)."""
        names = self.screens_asked(message)
        if not names:
            return readings
        texts = list(screening.texts_of(message.body))
        return replace(readings, screened=self._screens.screen(self.policy, names, texts))

    # ---- counting ----------------------------------------------------------------------------------

    def count_hits(self, message: Message, screened: Screened) -> None:
        """Count what the screens found before anything is decided on it, so that no refusal and no crash hides it.

        Beyond the policy's hits a day the kind is halted until persons release it (T18). The ledger is written with
        and without a hit.
        """
        hits = sum(bool(found) for found in screened.hits)
        limit = getattr(self._block(message), "max_hits_per_day", None) or 0
        halts = self.book.count_hits(message.kind, self.now(), hits, limit)
        self._keep_book()
        place = {"kind": message.kind, "run": message.run, "round": message.round, "step": message.step}
        if hits:
            found = screening.totals(screened.hits)
            self.record("screen.hit", **place, direction=message.direction, detail={"responses": hits, "hits": found})
        if halts:
            self.record("halt", **place, reasons=["SCREEN_HALT"], detail={"limit": limit})

    def release_halt(self, kind: str, persons: list[str]) -> None:
        """The kind may leave again: recorded first, so that no release is without the names behind it."""
        self.record(
            "release", kind=kind, reasons=["SCREEN_HALT"], detail={"persons": persons},
            policy={"effective": self.policy.digest},
        )  # fmt: skip
        self.book.release_halt(kind, self.now())
        self._keep_book()

    def count(self, facts: Facts, run: str) -> int:
        """Count an allowed message against every limit, durably before a byte of it leaves (L3); its sequence."""
        with self.halting():
            self.book.record(facts)
            kept = not facts["kind"].startswith("control.")
            return self._ledger.allow(self.book.to_json(), run, kept=kept)

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

    def denied_by_now(self, kind: str, decision_seq: int) -> list[str]:
        """Why the policy in force does not let out what an earlier decision did; nothing where it does.

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
        fields = decision_fields(
            facts, decision, self.policy, peer=self.site.coordinator_id,
            payload_digests=digests,
            history=history or self.book.view(facts).to_json(), schema_sha256=self.site.schema.digest,
            code_sha256=self._code_sha256,
        )  # fmt: skip
        if original is not None:
            fields["payload"] |= {"bytes_before": original.payload_bytes}
            if original.digest:
                fields["payload"] |= {"sha256_before": original.digest}
            fields["facts"] |= {"offered": original.facts, "transform": original.transform}
        if archived:
            fields["payload"] |= {"archived": True}
        if approvals:
            fields["link"] = {"approvals": list(approvals)}
        if detail:
            fields["detail"] = {**fields.get("detail", {}), **detail}
        event = "egress.decision" if facts["direction"] == "egress" else "ingress.decision"
        return self.record(event, sequence=sequence, **fields)

    def record(self, event: str, **fields: Any) -> int:
        """Append to the audit log; a full disk halts the gate.

        Raises:
            LogFullError, OperationError: not recorded.
        """
        with self.halting():
            return self._audit.append(event, **fields)

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
        """Size and digest of a payload as they may stand in the log: keyed where the content can be guessed (T40).

        digest: its SHA-256, where it is known already.
        """
        return payload_digests(kind, payload, self._site_key, digest)

    @contextlib.contextmanager
    def halting(self) -> Iterator[None]:
        """Turns a disk that cannot record into a gate that does not send."""
        if self.halted:
            raise halted_error("recorded or sent", self.halted)
        try:
            yield
        except FedSiloError as error:
            if halts(error):
                self.halted, self.halt_code = error.message, error.code
            raise

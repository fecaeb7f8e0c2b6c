"""What this silo signs with all others before it trains, and what it waits for (T20, decision 11).

    round.open with a transcript -> every field compared with what this site knows -> recorded, kept, countersigned
    (in the next polls) -> round.agreed with the others' signatures -> verified, recorded -> the round begins

Two transcripts of one round, both signed, are evidence: it is kept, and the silo halts until people release it. That
round goes on without it then. Enough signatures for the plan and too few for this site's policy are no reason to
leave: more may come until the round is over.

A round whose end has fewer updates in it than plan and policy ask for ends this silo's run before the adapter is
fetched (T58). A round that begins with another adapter than the last end left, or the first round that this silo saw,
goes on without it; and an end counts only where the coordinator signed it, for a round whose signed transcript was
shown here: so no end can be kept from it.

Does not stop: a coordinator that keeps single updates for itself, or that tells all silos the same, or that signs this
silo another end than the others, which their logs prove; peers that sign whatever they are shown; two groups of silos
that are each large enough to agree on a transcript of their own (`needed` in `fedsilo.protocol.transcript`).
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.audit.record import RecordError
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.transcript import (
    Countersignature,
    Equivocation,
    RoundEnd,
    SignedEnd,
    Transcript,
    conflict,
    count,
    is_signed,
    needed,
    results_in,
    sign_transcript,
    silo_id,
    transcript_from_canonical,
)
from policies.kind import digest_of
from silo.guard.coordinator_client import CoordinatorClient, Witnessing
from silo.guard.decisions import Judge, pool_stands
from silo.guard.ledger import Ledger
from silo.guard.messages import Inbound
from silo.guard.site import Site

_log = logging.getLogger("fedsilo.silo")

EQUIVOCATION = Equivocation.default_code
_PLACE, _PIECES = ("run", "round"), ("known", "shown")
_ASK_PEOPLE = "compare both transcripts with the other silos' people; approvers release the halt"


class TranscriptRefused(PeerError):
    """A genuine message about a round that this silo does not take part in. `reason`: for the site's own log."""

    def __init__(self, reason: str, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(WireCode.INGRESS_DENIED, message)
        self.reason = reason
        self.fields = fields


class TooFewUpdates(TranscriptRefused):
    """A round was committed with fewer updates than this site's own enters a mean over (T58)."""


@dataclass(frozen=True)
class Waiting:
    """A round that this silo has signed, before it may begin.

    Attributes:
        opening: its round.open.
        signature: ours.
    """

    opening: Inbound
    transcript: Transcript
    signature: bytes


class Agreement:
    """Signs each round's transcript, compares it with the other silos' and lets the round begin.

    Args:
            site: whose names, keys and sets the transcript must name.
            judge: records; knows the policy in force.
            ledger: keeps transcripts and evidence over a kill.
            witnessing: knows the peers' keys.
            client: of the coordinator, which also knows which policy that was told of.

    Attributes:
        waiting: the round that waits for the others, if one does.
    """

    def __init__(
        self, *, site: Site, judge: Judge, ledger: Ledger, witnessing: Witnessing, client: CoordinatorClient
    ) -> None:
        self._site = site
        self._judge = judge
        self._ledger = ledger
        self._witnessing = witnessing
        self._client = client
        self.waiting: Waiting | None = None
        self._short: tuple[str, int] = ("", 0)  # the round whose lack of signatures is on record

    @property
    def countersignature(self) -> bytes:
        """Our signature for the next poll, as long as the round waits. Said again with each poll, since one may get
        lost."""
        return self.waiting.signature if self.waiting is not None else b""

    @property
    def halted(self) -> str:
        """Reason why this silo halts until people release it; empty while nobody has equivocated."""
        return str(self._ledger.equivocation.get("message", ""))

    # ---- the way in --------------------------------------------------------------------------------

    def take_in(self, item: Inbound, plan: Plan) -> Inbound | None:
        """Return what the method is to be told of an item: nothing of a round before enough have signed its transcript.

        Raises:
            TranscriptRefused: the item, or the round, is nothing that this silo takes part in.
        """
        try:
            return self._take_in(item, plan)
        except RecordError as error:
            raise TranscriptRefused(error.code, f"what {item.kind} says cannot be recorded: {error.message}") from error

    def _take_in(self, item: Inbound, plan: Plan) -> Inbound | None:
        match item.body:
            case pb.RoundOpen() as body:
                self._take(item, body, plan)
                return None
            case pb.RoundAgreed() as body:
                return self._agreed(item, body, plan)
            case pb.RoundResult() as body:
                waited = self.waiting is not None and self.waiting.transcript.round == item.round
                self._result(item, body, plan)
                return None if waited else item
        return item

    def require_updates(self, item: Inbound, body: pb.RoundResult, plan: Plan) -> None:
        """Look at each genuine end of a round, also of one that this silo took no part in, before anything is done
        with its adapter: that is what the next one begins with.

        Raises:
            TooFewUpdates: it is committed with fewer updates than plan, transcript or the policy in force ask for.
        """
        kept = self._ledger.transcript(item.run, item.round)
        signed = transcript_from_canonical(kept["transcript"]).min_updates if kept is not None else 0
        least = max(plan.quorum, signed, self._judge.policy.file.federation.min_updates)
        given = min((set(names) for names in (body.participants, *(row.participants for row in body.results))), key=len)
        if not body.committed or len(given) >= least:
            return
        few = TooFewUpdates(
            "MIN_UPDATES",
            f"round {item.round} of run {item.run} was committed with {len(given)} updates "
            f"({', '.join(sorted(given))}), asked for are {least} "
            f"(federation.min_updates of the policy, the plan's quorum)",
            ("participants",),
        )
        try:
            self._result(item, body, plan)  # the coordinator's signature under it is what proves it
        except TranscriptRefused as error:
            _log.error("%s", error.message)
        raise few

    def refuse(self, item: Inbound, error: TranscriptRefused) -> bool:
        """The round goes on without this silo: recorded, and said to the coordinator in a code.

        Returns:
            whether it is the round that is refused, and not merely what is said of its end.

        Raises:
            UnreachableError, NotAllowedError, PeerError, DeniedError: the no is not known to have been heard; the item
                is not acknowledged then, and comes again.
        """
        self.record_refused(item, error)
        if isinstance(item.body, pb.RoundResult):
            self._client.tell_declined(item.run)
            return False
        self._judge.view = self._judge.view.refused(item.round)
        self._client.decline(item.run, item.round)
        self.drop()
        return True

    def record_refused(self, item: Inbound, error: TranscriptRefused) -> None:
        """Record the refusal in this site's own log, with the reason."""
        _log.error("%s", error.message)
        self._judge.record_denied(
            "ingress", item.kind, error.reason, run=item.run, round=item.round, peer=self._witnessing.coordinator,
            payload=self._judge.digests(item.kind, item.payload), detail={"fields": list(error.fields)},
        )  # fmt: skip

    # ---- two transcripts of one round --------------------------------------------------------------

    def compare(self, message: Inbound | pb.Envelope, body: ProtobufMessage) -> None:
        """Look at a genuine message, whatever becomes of it, for a second transcript of a round.

        The first one that the coordinator signed is kept for that, also where this silo refuses it; of rounds of the
        open run alone, since its plan says how many there are (T24).

        Args:
            message: says of which round it is.
            body: its content.

        Raises:
            Equivocation: coordinator or peer signed another one, and people have not looked at it yet.
        """
        match body:
            case pb.RoundOpen():
                self._compare_shown(body, message.sequence)
            case pb.RoundAgreed() if signed := self._ledger.transcript(message.run, message.round):
                known = transcript_from_canonical(signed["transcript"])
                rows = _rows_of(body, known, besides=signed["others"])
                counted = count(known, _countersignatures(rows), self._keys(known, rows))
                if counted.others:
                    other = counted.others[0]
                    raise self._equivocation(
                        f"{other.silo} signed {other.digest[:12]} as the transcript of round {known.round} of run "
                        f"{known.run}; this silo was shown {known.digest[:12]}",
                        known,
                        signed["signature"],
                        {
                            "sha256": other.digest,
                            "party": silo_id(known.federation, other.silo),
                            "signature": other.signature.hex(),
                        },
                        message.sequence,
                    )

    def _compare_shown(self, body: pb.RoundOpen, sequence: int) -> None:
        shown, coordinator = self._signed(body), self._witnessing.coordinator
        if shown is None or shown.federation != self._site.config.federation:
            return
        signed = self._ledger.transcript(shown.run, shown.round)
        if signed is None:
            plan = self._judge.view.plan
            if plan is None or shown.run != plan.run or shown.round > plan.rounds:
                return
            first = {"transcript": shown.canonical(), "signature": body.transcript_signature.hex()}
            state = {"opening": "", "signed": False, "agreed": False, "others": {}}
            self._ledger.keep_transcript(shown.run, shown.round, first | state)
            return
        if shown.digest in signed["others"]:
            return
        known = transcript_from_canonical(signed["transcript"])
        if fields := conflict(known, shown):
            raise self._equivocation(
                f"the coordinator signed two transcripts of round {shown.round} of run {shown.run}, "
                f"{known.digest[:12]} and {shown.digest[:12]}, which differ in {', '.join(fields)}",
                known,
                signed["signature"],
                _piece(shown, coordinator, body.transcript_signature.hex()),
                sequence,
            )

    def _equivocation(
        self, message: str, known: Transcript, signature: str, shown: Mapping[str, Any], sequence: int
    ) -> Equivocation:
        """Return the error with both pieces of evidence: what the coordinator signed first, and what came since.

        Args:
            message: who signed what.
            known: the first transcript.
            signature: the coordinator's, of that.
            shown: the other piece.
            sequence: of the message that brought it.
        """
        first = _piece(known, self._witnessing.coordinator, signature)
        evidence = {"run": known.run, "round": known.round, "sequence": sequence, "known": first, "shown": shown}
        return Equivocation(message, hint=_ASK_PEOPLE, evidence=evidence)

    def keep(self, error: Equivocation) -> None:
        """Both pieces of evidence in the ledger, where they halt this silo over restarts, then on record.

        Raises:
            FedSiloError: one of the two cannot be written; where the other could, `take_up` makes up for it at a start.
        """
        evidence = {**error.evidence, "message": error.message, "since": self._judge.now(), "recorded": False}
        try:
            self._ledger.keep_equivocation(evidence)
        finally:
            self._record_equivocation(evidence)
        self._settle(evidence)

    def take_up(self, newest: Iterable[Mapping[str, Any]]) -> None:
        """At a start, before the halt stands again: what a kill, or a full disk, kept from ledger or log.

        Args:
            newest: records of our log. A halted silo writes few, so the evidence of a halt that stands is among them.

        Raises:
            FedSiloError: it cannot be written yet.
        """
        evidence, recorded = self._ledger.equivocation, dict[str, Any]()
        for record in newest:
            if record["event"] == "round.equivocation":
                recorded = {**record["detail"], "since": record["t"] / 1000} | {name: record[name] for name in _PLACE}
            elif record["event"] == "release" and EQUIVOCATION in record["reasons"]:
                recorded = {}
        if evidence and not evidence.get("recorded"):
            if not recorded or any(evidence[name] != recorded[name] for name in (*_PLACE, *_PIECES)):
                self._record_equivocation(evidence)
            self._settle(evidence)
        elif recorded and not evidence:
            message = f"two transcripts of round {recorded['round']} of run {recorded['run']} are on record"
            self._settle({**recorded, "message": message, "sequence": 0})

    def _record_equivocation(self, evidence: Mapping[str, Any]) -> None:
        self._judge.record(
            "round.equivocation",
            run=evidence["run"],
            round=evidence["round"],
            reasons=[EQUIVOCATION],
            detail={name: evidence[name] for name in _PIECES},
        )

    def _settle(self, evidence: Mapping[str, Any]) -> None:
        """The message that brought them is taken in with the next poll, which only a release brings, and this pair is
        no news from then on: else the same message would halt this silo again after every release."""
        run, number, shown = evidence["run"], evidence["round"], evidence["shown"]
        if signed := self._ledger.transcript(run, number):
            others = signed["others"] | {shown["sha256"]: shown["signature"]}
            self._ledger.keep_transcript(run, number, signed | {"others": others})
        self._ledger.acknowledge(evidence["sequence"])
        self._ledger.keep_equivocation({**evidence, "recorded": True})

    # ---- a round opens -----------------------------------------------------------------------------

    def _take(self, item: Inbound, body: pb.RoundOpen, plan: Plan) -> None:
        """Check and sign a round's transcript; from then on the polls carry the signature."""
        transcript = self._signed(body)
        if transcript is None:
            raise TranscriptRefused("TRANSCRIPT_UNSIGNED", f"round {item.round} opens without a signed transcript")
        wrong = self._differences(transcript, item, body, plan)
        if transcript.min_updates < max(plan.quorum, self._judge.policy.file.federation.min_updates):
            wrong += ("min_updates",)
        if wrong:
            raise TranscriptRefused(
                "TRANSCRIPT_DIFFERS",
                f"the transcript of round {item.round} differs from what is known here in {', '.join(wrong)}",
                wrong,
            )
        signed = self._ledger.transcript(item.run, item.round)
        assert signed is not None  # noqa: S101  # `compare` kept it
        if signed["others"] or (signed["signed"] and not signed["opening"]):
            raise TranscriptRefused(WireCode.ROUND_CLOSED.value, f"round {item.round} goes on without this silo")
        signature = sign_transcript(transcript, self._site.config.spiffe_id, self._site.identity.signing_key)
        if not signed["signed"]:
            detail = _piece(transcript, self._witnessing.coordinator, body.transcript_signature.hex())
            detail |= {"countersignature": signature.hex()}
            self._judge.record("round.transcript", run=item.run, round=item.round, kind=item.kind, detail=detail)
            self._ledger.keep_transcript(item.run, item.round, signed | {"opening": item.payload.hex(), "signed": True})
        self.waiting = Waiting(item, transcript, signature)

    def resume(self, plan: Plan, round_number: int) -> bool:
        """After a restart: wait on for a round that was signed and has not begun. False: there is none to wait for, or
        it differs from what is known here by now."""
        run = plan.run
        signed = self._ledger.transcript(run, round_number)
        if signed is None or not signed["opening"] or signed["others"]:
            return False
        payload = bytes.fromhex(signed["opening"])
        body = codec.decode(pb.RoundOpen, payload)
        opening = Inbound(Place(run, round_number, 0, "round.open"), 0, body, payload, codec.sha256_hex(payload), {})
        transcript = transcript_from_canonical(signed["transcript"])
        if self._differences(transcript, opening, body, plan):
            return False
        signature = sign_transcript(transcript, self._site.config.spiffe_id, self._site.identity.signing_key)
        self.waiting = Waiting(opening, transcript, signature)
        return True

    def _signed(self, body: pb.RoundOpen) -> Transcript | None:
        """The transcript, if the coordinator signed it."""
        try:
            transcript = transcript_from_canonical(body.transcript)
        except PeerError:
            return None
        coordinator, key = self._witnessing.coordinator, self._site.coordinator_key
        return transcript if is_signed(transcript, coordinator, key, body.transcript_signature) else None

    def _differences(self, transcript: Transcript, item: Inbound, body: pb.RoundOpen, plan: Plan) -> tuple[str, ...]:
        config = self._site.config
        stands = {
            "federation": transcript.federation == config.federation,
            "run": transcript.run == item.run == plan.run,
            "round": transcript.round == item.round > self._judge.view.told_round,
            "silos": config.silo in transcript.silos and set(transcript.silos) <= set(plan.silos),
            "plan_sha256": transcript.plan_sha256 == plan.digest,
            "policies": transcript.policies.get(config.silo)
            in {self._judge.policy.digest, self._client.policy_said} - {""},
            "base_digest": transcript.base_digest == body.base_digest
            and self._judge.view.told_adapter in ("", body.base_digest),
            "schema_sha256": transcript.schema_sha256 == plan.lora.schema_sha256
            and plan.model_of(config.silo).lora_schema_sha256 == self._site.schema.digest,
            "public_set_sha256": transcript.public_set_sha256 == self._site.public.sha256,
            "pool": pool_stands(transcript, plan, self._ledger, config.silo),
        }
        return tuple(name for name, good in stands.items() if not good)

    # ---- the others have signed --------------------------------------------------------------------

    def _agreed(self, item: Inbound, body: pb.RoundAgreed, plan: Plan) -> Inbound | None:
        """The round.open that may begin; None where no round waits for this, or it waits on."""
        waiting = self.waiting
        if waiting is None or (item.run, item.round) != (waiting.transcript.run, waiting.transcript.round):
            return None
        transcript, own = waiting.transcript, self._site.config.silo
        rows = _rows_of(body, transcript)
        brought, keys = _countersignatures(rows), self._keys(transcript, rows)
        counted = count(transcript, brought, keys)
        if body.transcript_sha256 != transcript.digest:
            raise TranscriptRefused(
                "TRANSCRIPT_DIFFERS", f"round {item.round} is said to be agreed on another transcript than the signed"
            )
        signed = counted.agreed | {own}
        least = needed(len(plan.silos), min_peers=self._judge.policy.file.federation.min_peers, quorum=plan.quorum)
        if len(signed) < least:
            few = TranscriptRefused(
                "TOO_FEW_SIGNATURES",
                f"{len(signed)} silos signed the transcript of round {item.round}, needed: {least}",
            )
            if len(signed) < plan.silos_min:
                raise few  # not enough for the plan either: it is said so only when nobody else is waited for
            if self._short != (item.run, item.round):
                self._short = (item.run, item.round)
                self.record_refused(item, few)
            return None
        # those that were verified: one row of each silo under this digest, whatever else it is said to have signed
        verified = [row for row in brought if row.silo in counted.agreed and row.digest == transcript.digest]
        signatures = {row.silo: row.signature.hex() for row in verified}
        signatures[own] = waiting.signature.hex()
        detail = {
            "sha256": transcript.digest,
            "signatures": signatures,
            "keys": {name: keys[name].public_bytes_raw().hex() for name in sorted(signatures)},
        }
        self._judge.record("round.agreed", run=item.run, round=item.round, kind=item.kind, detail=detail)
        self._close(agreed=True)
        return waiting.opening

    def drop(self) -> None:
        """The round that waits is over, or goes on without this silo."""
        if self.waiting is not None:
            self._close(agreed=False)

    def stand_aside(self) -> None:
        """The round that waits goes on without this silo.

        Raises:
            UnreachableError, NotAllowedError, PeerError, DeniedError: the no is not known to have been heard; the round
                waits on, so that it can be said again.
        """
        if (waiting := self.waiting) is not None:
            self._client.decline(waiting.transcript.run, waiting.transcript.round)
            self.drop()

    def leave(self, run: str) -> None:
        """This silo stops in an orderly way: its open round goes on without it, also where it has not begun yet."""
        self.drop()
        self._ledger.forget_round()
        view = self._judge.view = self._judge.view.settled()
        if run and view.round:
            self._ledger.save_view(run, view.to_json())
            self._client.abstain(run, view.round, heard=False)

    def _close(self, *, agreed: bool) -> None:
        assert self.waiting is not None  # noqa: S101  # the callers looked
        transcript, self.waiting = self.waiting.transcript, None
        self._judge.view = self._judge.view.settled()
        signed = self._ledger.transcript(transcript.run, transcript.round) or {}
        # the payload was only for a restart in between; without it the round is not waited for again
        self._ledger.keep_transcript(transcript.run, transcript.round, signed | {"opening": "", "agreed": agreed})
        self._ledger.save_view(transcript.run, self._judge.view.to_json())

    def _keys(self, transcript: Transcript, rows: Sequence[pb.Countersignature]) -> dict[str, Ed25519PublicKey]:
        own = self._site.config.silo
        keys = {own: self._site.identity.signing_key.public_key()}
        for row in rows:
            if row.silo != own:
                key = self._witnessing.key_of(silo_id(transcript.federation, row.silo), row.certificate_pem)
                if key is not None:
                    keys[row.silo] = key
        return keys

    # ---- the round is over -------------------------------------------------------------------------

    def _result(self, item: Inbound, body: pb.RoundResult, plan: Plan) -> None:
        """A result is signed and belongs to a transcript that was shown here, whether or not this silo signed that one;
        it names nobody else, ends the round as the plan's method does, and takes back nothing that was told before.
        Recorded where this silo signed: two signed ends of one round are evidence."""
        kept = self._ledger.transcript(item.run, item.round)
        if kept is None:
            raise TranscriptRefused("ROUND_NOT_SHOWN", f"no signed transcript of round {item.round} was shown here")
        transcript = transcript_from_canonical(kept["transcript"])
        named = {*body.participants, *(row.silo for row in body.verdicts)}
        named |= {name for row in body.results for name in (row.receiver, *row.participants)}
        second = body.transcript_sha256 in kept["others"]  # one that people have looked at (T20)
        if not second and (body.transcript_sha256 != transcript.digest or not named <= set(transcript.silos)):
            raise TranscriptRefused(
                "TRANSCRIPT_DIFFERS", f"the result of round {item.round} does not belong to the transcript shown here"
            )
        if body.closed if method_named(plan.method).update_kinds(plan) else body.committed:
            # one of the two for each method, so never both: no check of a log takes an end that can be read twice
            raise TranscriptRefused(
                "RESULT_MALFORMED", f"round {item.round} ends in a way in which no round of {plan.method} ends"
            )
        own = results_in(body).get(self._site.config.silo, {"sha256": ""})
        if body.results and own["sha256"] != body.adapter_digest:
            raise TranscriptRefused(
                "RESULT_OF_ANOTHER", f"the result of round {item.round} is not the one that its table has for this silo"
            )
        signed = SignedEnd(RoundEnd.of(transcript, body), self._witnessing.coordinator, body.result_signature)
        if not signed.verifies(self._site.coordinator_key):
            # unsigned it binds nobody: another silo may be told of another end
            raise TranscriptRefused("RESULT_UNSIGNED", f"the result of round {item.round} is not signed")
        if self.waiting is not None and self.waiting.transcript.digest == transcript.digest:
            self.drop()
        if kept["signed"] and not second:
            detail = signed.to_detail(results_in(body))
            self._judge.record("round.result", run=item.run, round=item.round, kind=item.kind, detail=detail)
        if item.round <= (view := self._judge.view).told_round and view.told(item.round, body) != view:
            raise TranscriptRefused(WireCode.ROUND_CLOSED.value, f"the end of round {view.told_round} was told of")


def _rows_of(body: pb.RoundAgreed, known: Transcript, *, besides: Container[str] = ()) -> list[pb.Countersignature]:
    """The rows that are worth verifying: one for each silo of the roster and digest, at most as many as the roster.

    What the policy denied is looked at too, and may have any number of rows (T24).

    Args:
        body: as it came.
        known: whose roster counts.
        besides: digests that are no news.
    """
    rows: dict[tuple[str, str], pb.Countersignature] = {}
    for row in body.countersignatures:
        if len(rows) == len(known.silos):
            break
        place, digest = (row.silo, row.transcript_sha256), digest_of(row.transcript_sha256)
        if row.silo in known.silos and digest and digest not in besides:
            rows.setdefault(place, row)
    return list(rows.values())


def _countersignatures(rows: Iterable[pb.Countersignature]) -> list[Countersignature]:
    return [Countersignature(row.silo, row.transcript_sha256, row.signature) for row in rows]


def _piece(transcript: Transcript, party: str, signature: str) -> dict[str, Any]:
    """Return one signed transcript as a record has it: it can be checked with the party's key alone."""
    return {
        "sha256": transcript.digest,
        "transcript": transcript.to_json(),
        "party": party,
        "signature": signature,
    }

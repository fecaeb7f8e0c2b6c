"""What a silo says to the coordinator besides its contributions: hello, control messages, checkpoints; and when it may
speak again after trouble. One exchange at a time; whatever is said goes through the gate."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from fedsilo.edge.audit_log import AuditLog
from fedsilo.treaty.audit.witness import Offer as CheckpointOffer
from fedsilo.treaty.errors import FedSiloError, OperationError, WireCode
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.services import PROTOCOL_VERSION
from silo.guard.gate import Gate
from silo.guard.messages import Inbound
from silo.guard.startup import Site

_log = logging.getLogger("fedsilo.silo")

BACKOFF_SECONDS = (0.5, 15.0)


class Refused(OperationError):
    """The coordinator does not take this silo in."""

    default_code = "REFUSED"


class Conversation:
    """Args:
        site: what hello says.
        gate: the way out.
        audit: our log, for the exchange of checkpoints.
        code_sha256: hash of the program that runs here.
        monotonic: seconds.

    Attributes:
        joined: hello was answered with yes.
        poll_now: an answer said that something waits.
        last_sent: when something was last said.
        retry_at: not before then, after trouble.
    """

    def __init__(
        self, site: Site, gate: Gate, audit: AuditLog, *, code_sha256: str, monotonic: Callable[[], float]
    ) -> None:
        self._site = site
        self._gate = gate
        self._audit = audit
        self._code_sha256 = code_sha256
        self._monotonic = monotonic
        self._backoff_seconds = 0.0
        self.joined = False
        self._isolation_said = ""
        self.poll_now = False
        self.last_sent = 0.0
        self.retry_at = 0.0

    def join(self, isolation: str) -> None:
        """Say hello with the hashes that all must share.

        Raises:
            OperationError: the coordinator refuses this silo; names both values.
        """
        site, fingerprints = self._site, self._site.fingerprints
        answer = self.say(
            "control.hello",
            pb.Hello(
                protocol_min=PROTOCOL_VERSION,
                protocol_max=PROTOCOL_VERSION,
                base_model_sha256=fingerprints.base_model_sha256,
                tokenizer_sha256=fingerprints.tokenizer_sha256,
                template_sha256=fingerprints.template_sha256,
                load=site.config.model.load,
                lora_schema_sha256=site.schema.digest,
                public_set_sha256=site.public.sha256,
                held_out_sha256=site.held_out.sha256,
                code_sha256=self._code_sha256,
                isolation=isolation,
                role=site.config.role,
            ),
            run="",
        )
        if isinstance(answer.body, pb.Refusal):
            raise self._refused(answer.body)
        self.joined, self._isolation_said = True, isolation
        _log.info("joined %s at %s", site.config.federation, site.config.coordinator.address)
        self.witness()

    def _refused(self, refusal: pb.Refusal) -> Refused:
        """A hello that was answered with no: both values, and which file of this site holds ours."""
        config, policy = self._site.config, self._site.policy
        model = f"the model folder {config.model.path}"
        holder = {
            "base_model_sha256": model,
            "tokenizer_sha256": model,
            "template_sha256": model,
            "load": f"model.load in {config.source}",
            "lora_schema_sha256": f"the LoRA schema that {policy.source} pins",
            "public_set_sha256": f"the public set {config.data.public.path}",
            "held_out_sha256": f"the held-out set {config.data.held_out.path}",
            "protocol": "this version of FedSilo",
        }.get(refusal.field, f"{config.source}")
        if refusal.field:
            cause = f"{refusal.field}: it expects {refusal.expected or '-'}, here it is {refusal.got or '-'}"
            hint = f"ours is {holder}; use what the federation agreed on"
        elif refusal.code == WireCode.NOT_A_MEMBER:
            cause = f"{config.spiffe_id} is not on its list of silos"
            hint = "its people list this silo under `silos:` in coordinator.yaml, or this is another silo's certificate"
        else:
            cause, hint = f"it answers hello with {refusal.code or 'no code'}", "the coordinator's log says why"
        return Refused(f"the coordinator refuses this silo: {cause}", hint=hint, code=refusal.code or "REFUSED")

    def isolation_is(self, rung: str) -> None:
        """A trainer was started anew: if its walls are others than the coordinator was told, hello is due again."""
        if self._isolation_said and rung != self._isolation_said:
            _log.warning("the trainer's isolation was %s and is %s", self._isolation_said, rung)
            self.joined = False

    def say(self, kind: str, body: Any, **routing: Any) -> Inbound:
        """Send one control message through the gate and note what the answer says beside its content."""
        answer = self._gate.send(kind, body, **routing)
        self.last_sent = self._monotonic()
        self._backoff_seconds = 0.0
        if isinstance(answer.body, pb.Ack) and answer.body.pending and kind != "control.poll":
            self.poll_now = True
        if isinstance(answer.body, pb.Refusal):
            _log.warning("the coordinator refuses %s: %s", kind, answer.body.code)
        return answer

    def tell(self, kind: str, body: Any, **routing: Any) -> None:
        """Say something that the run does not depend on: a failure is logged and forgotten."""
        try:
            self.say(kind, body, **routing)
        except FedSiloError as error:
            _log.warning("%s was not said: %s", kind, error.message)

    def witness(self) -> None:
        """Exchange checkpoints (threat T38): ours out, theirs in, each countersigned."""
        peer = self._site.policy.file.federation.coordinator
        offer = self._audit.offer(peer)
        answer = self.say(
            "control.checkpoint",
            pb.Checkpoint(
                note=offer.note,
                previous_size=offer.previous_size,
                consistency=offer.consistency,
                cosigned_note=offer.cosigned_note,
            ),
            run="",
        )
        if isinstance(answer.body, pb.Checkpoint):
            theirs = answer.body
            self._audit.take(
                CheckpointOffer(theirs.note, theirs.previous_size, tuple(theirs.consistency), theirs.cosigned_note),
                peer,
            )

    def back_off(self, error: FedSiloError) -> None:
        first, most = BACKOFF_SECONDS
        self._backoff_seconds = min(most, max(first, 2 * self._backoff_seconds))
        self.retry_at = self._monotonic() + self._backoff_seconds * random.uniform(0.7, 1.3)  # noqa: S311  # jitter
        _log.warning("%s; next try in %.1f s", error.line, self._backoff_seconds)
        self._gate.counters.last_fault = error.message

"""A global adapter by its digest: from this silo's store, or from the coordinator through the gate."""

from __future__ import annotations

from collections.abc import Collection

from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import PeerError, WireCode
from silo.guard.adapters import AdapterStore
from silo.guard.conversation import Conversation
from silo.guard.fetching import fetch
from silo.guard.gate import Gate
from silo.guard.messages import IngressDenied


class AdapterRefused(PeerError):
    """The coordinator answered, but not with the adapter that the round is about."""


def stored_or_fetched(
    digest: str, adapters: AdapterStore, gate: Gate, talk: Conversation, *, bytes_max: int, in_use: Collection[str]
) -> Buffer:
    """The payload, as it was let in under this run's plan and measured from its last adapter (T6, T20).

    Args:
        digest: of the payload.
        adapters: where it is looked for, and kept.
        gate: lets it in.
        talk: with the coordinator.
        bytes_max: largest payload that it may be.
        in_use: digests of others that stay in the store.

    Raises:
        AdapterRefused: another payload came.
        IngressDenied: this site's policy does not let it in.
        UnreachableError, NotAllowedError, DeniedError: nothing came.
    """
    view = gate.view
    frozen = view.plan.lora.frozen_sha256 if view.plan is not None else ""
    # One that was measured from another than this run's last adapter was never measured from that (T20).
    after = None if view.last_adapter in ("", digest) else view.step_from
    stored = adapters.find(digest, frozen_sha256=frozen, after=after)
    if stored is not None:
        return stored
    try:
        answer = fetch(talk, adapters, digest, bytes_max=bytes_max)
    except IngressDenied:
        raise
    except PeerError as error:
        raise AdapterRefused(error.wire_code, error.message) from error
    if answer.kind != "global.adapter" or answer.digest != digest:
        gate.record(
            "ingress.decision", run=gate.view.run, round=gate.view.round, kind=answer.kind, decision="deny",
            reasons=[WireCode.DIGEST_MISMATCH.value], direction="ingress",
            payload=gate.digests(answer.kind, answer.payload),
        )  # fmt: skip
        raise AdapterRefused(WireCode.DIGEST_MISMATCH, f"the coordinator did not give adapter {digest[:12]}")
    adapters.keep(digest, answer.payload, answer.facts.get("l2"), frozen, view.step_from, {*view.adapters, *in_use})
    return answer.payload

"""A decision, or what became of a held release, as the fields of an audit record: facts, each rule's verdict, digests;
never text or tensor values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsilo.edge.rule_fields import rules_of
from fedsilo.treaty.audit.record import keyed_digest
from fedsilo.treaty.wire.codec import Buffer, sha256_hex
from fedsilo.treaty.wire.services import TENSOR_KINDS
from policies.engine import Decision, Facts, RuleResult
from policies.load import Policy
from silo.guard.ledger import Release


def decision_fields(
    facts: Facts,
    decision: Decision,
    policy: Policy,
    *,
    payload_digests: Mapping[str, Any],
    peer: str,
    history: Mapping[str, Any],
    schema_sha256: str,
    code_sha256: str,
) -> dict[str, Any]:
    """Fields for `egress.decision` and `ingress.decision`.

    Args:
        facts: of the final values.
        decision: on these facts.
        policy: the one that decided.
        payload_digests: size and digest of the bytes.
        peer: SPIFFE id of the other side.
        history: the view that budgets were judged by; with the facts it replays the decision.
        schema_sha256: of the site's LoRA schema.
        code_sha256: of the program that decided.
    """
    return {
        "kind": facts["kind"],
        "run": facts["run"],
        "round": facts["round"],
        "step": facts["step"],
        "peer": peer,
        "direction": facts["direction"],
        "decision": decision.verdict,
        "reasons": list(decision.reasons),
        **rules_of(decision, policy),
        "facts": {"final": dict(facts), "history": dict(history)},
        "policy": {**policy.digests, "code": code_sha256, "schema": schema_sha256},
        "payload": dict(payload_digests),
    }


def release_fields(
    release: Release,
    *,
    person: str = "",
    fingerprint: str = "",
    acknowledged: Sequence[str] = (),
    until: int = 0,
    note: str = "",
    order: Mapping[str, str] | None = None,
    facts: str = "",
) -> dict[str, Any]:
    """Fields of a record about a held release: `approval.*` and `release.defer`.

    Args:
        release: which one.
        person: who answered; empty where nobody did.
        fingerprint: SHA-256 of that person's certificate.
        acknowledged: ids of the findings that the person opened.
        until: seconds since 1970, of a release that the person put off.
        note: digest of what the person wrote to a no; the text itself is kept beside the log.
        order: the person's signed command, as the log keeps it.
        facts: digest of what the person was shown.
    """
    detail: dict[str, Any] = {"release": release.id, "expires_at": int(release.expires_at)}
    if person:
        detail |= {"person": person, "certificate": fingerprint}
    if acknowledged:
        detail["acknowledged"] = list(acknowledged)
    if until:
        detail["until"] = until
    if note:
        detail["note"] = note
    if facts:
        detail["facts"] = facts
    return {
        "kind": release.kind, "run": release.run, "round": release.round, "step": release.step, "detail": detail,
        "payload": release.recorded, **orders_of(order or {}),
    }  # fmt: skip


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


def payload_digests(kind: str, payload: Buffer, site_key: bytes, digest: str = "") -> dict[str, Any]:
    """Size and digest of a payload: plain only where nobody can guess the content, which is tensors (T40)."""
    if kind in TENSOR_KINDS:
        return tensor_digests(len(payload), digest or sha256_hex(payload))
    return {"bytes": len(payload), "hmac_sha256": keyed_digest(site_key, bytes(payload))}


def tensor_digests(payload_bytes: int, digest: str) -> dict[str, Any]:
    """The same of a payload of tensors, which nobody guesses."""
    return {"bytes": payload_bytes, "sha256": digest}

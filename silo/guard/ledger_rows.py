"""What the ledger (`ledger.py`) keeps, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from policies.model import PolicyFile


@dataclass(frozen=True)
class OutboxItem:
    """One content message that the gate allowed. Its bytes are kept until the coordinator has answered it."""

    id: int
    run: str
    round: int
    step: int
    kind: str
    digest: str
    payload_bytes: int
    decision_seq: int  # of the audit record
    at: float  # seconds since 1970
    state: str  # allowed | sent | dropped (its bytes are gone, or the policy changed its mind while it waited)
    attempts: int
    archived: bool  # its bytes stay when it is settled, until retention takes them


@dataclass(frozen=True)
class Release:
    """A held message. The payload of this digest is what will be sent, byte for byte, if persons approve."""

    id: str
    run: str
    round: int
    step: int
    kind: str
    digest: str
    policy_digest: str
    payload_bytes: int
    recorded: Mapping[str, Any]  # size and digest as they may stand in the audit log (T40)
    facts: Mapping[str, Any]
    rules: list[dict[str, Any]]
    persons: int
    requested_at: float
    expires_at: float
    expiry_outcome: str  # missed: the step's deadline comes first; denied: the policy's expiry does
    state: str  # held | approved | rejected | expired | missed | denied
    revision: int


@dataclass(frozen=True)
class Approval:
    release_id: str
    person: str
    fingerprint: str
    digest: str
    verdict: str  # approve | reject
    reason: str
    at: float


@dataclass(frozen=True)
class PolicyInForce:
    """What decided last at this site.

    Attributes:
        digest: of the effective policy.
        content: the same as JSON, defaults filled in; two of them compare field by field.
        logged: digest that the audit log's newest record named when this was put in force. The log says either the one
            or the other; that it says a third shows a ledger restored from an older copy (T42).
    """

    digest: str
    content: dict[str, Any]
    logged: str

    @property
    def file(self) -> PolicyFile | None:
        """The content as this version reads it; None where another version's words do not fit."""
        try:
            return PolicyFile.model_validate(self.content)
        except ValidationError:
            return None

"""Errors a person or a peer may see. The type says who is at fault and which exit code a command returns.

    FedSiloError
    ├── UsageError          2   wrong usage, configuration or input file
    ├── UnreachableError    3   the other side does not answer; safe to retry
    ├── NotAllowedError     4   not authenticated, or lacking the role
    ├── DeniedError         5   policy or budget says no
    ├── ConflictError       6   digest, policy or revision changed since it was read
    ├── VerificationError   7   audit log, signature, digest or certificate does not verify
    ├── NotFoundError       8   no such object
    ├── HeldError           9   accepted, waits for approval
    ├── OperationError      1   the operation ran and failed
    └── PeerError           1   the peer broke the protocol

Only a `WireCode` ever crosses the wire (threat T8): never the text of an error.
"""

from __future__ import annotations

from enum import StrEnum


class WireCode(StrEnum):
    """The closed list of refusals one party may tell another."""

    DECLINED = "DECLINED"  # the sending site's policy said no (B6: no reason is given)
    ADAPTER_HELD = "ADAPTER_HELD"  # the sending site waits for a person before it trains on the round's adapter
    ADAPTER_REFUSED = "ADAPTER_REFUSED"  # a person of the sending site said no to it
    INGRESS_DENIED = "INGRESS_DENIED"  # the receiver's policy said no
    NOT_A_MEMBER = "NOT_A_MEMBER"
    PROTOCOL_RANGE = "PROTOCOL_RANGE"
    BASE_MODEL_MISMATCH = "BASE_MODEL_MISMATCH"
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
    TEMPLATE_MISMATCH = "TEMPLATE_MISMATCH"
    LOAD_MISMATCH = "LOAD_MISMATCH"
    SCHEMA_MISMATCH = "SCHEMA_MISMATCH"
    PUBLIC_SET_MISMATCH = "PUBLIC_SET_MISMATCH"
    HELD_OUT_MISMATCH = "HELD_OUT_MISMATCH"
    VERIFIER_MISMATCH = "VERIFIER_MISMATCH"
    SIGNATURE_INVALID = "SIGNATURE_INVALID"
    SENDER_MISMATCH = "SENDER_MISMATCH"
    SEQUENCE_REPLAYED = "SEQUENCE_REPLAYED"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    MALFORMED = "MALFORMED"
    UNKNOWN_FIELD = "UNKNOWN_FIELD"  # of a later protocol, or of none
    TOO_LARGE = "TOO_LARGE"
    UNKNOWN_KIND = "UNKNOWN_KIND"
    ROUND_CLOSED = "ROUND_CLOSED"
    NO_SUCH_RUN = "NO_SUCH_RUN"
    NOT_FOUND = "NOT_FOUND"
    CHECKPOINT_INCONSISTENT = "CHECKPOINT_INCONSISTENT"
    CERTIFICATE_INVALID = "CERTIFICATE_INVALID"
    HALTED = "HALTED"
    INTERNAL = "INTERNAL"


class FedSiloError(Exception):
    """An error with a stable code, one line for people and a hint what to do.

    Args:
        message: what happened, in one sentence, naming file and line where there is one.
        hint: what to try; may be empty.
        code: stable upper-case identifier for `--json`; by default derived from the type.
    """

    exit_code = 1
    default_code = "FAILED"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code

    @property
    def line(self) -> str:
        """Return the cause and the hint as one line that a log takes; of a long hint its first line."""
        first = self.hint.partition("\n")[0]
        return f"{self.message}; {first}" if first else self.message


class UsageError(FedSiloError):
    exit_code = 2
    default_code = "INVALID_INPUT"


class UnreachableError(FedSiloError):
    exit_code = 3
    default_code = "UNREACHABLE"


class NotAllowedError(FedSiloError):
    exit_code = 4
    default_code = "NOT_ALLOWED"


class DeniedError(FedSiloError):
    exit_code = 5
    default_code = "DENIED"


class ConflictError(FedSiloError):
    exit_code = 6
    default_code = "CONFLICT"


class VerificationError(FedSiloError):
    exit_code = 7
    default_code = "VERIFICATION_FAILED"


class NotFoundError(FedSiloError):
    exit_code = 8
    default_code = "NOT_FOUND"


class HeldError(FedSiloError):
    exit_code = 9
    default_code = "HELD"


class OperationError(FedSiloError):
    """The operation ran and failed."""


class PeerError(FedSiloError):
    """The peer sent something the protocol forbids; `wire_code` is the whole answer it gets."""

    def __init__(
        self, wire_code: WireCode, message: str, *, hint: str = "", field: str = "", expected: str = "", got: str = ""
    ) -> None:
        super().__init__(message, hint=hint, code=wire_code.value)
        self.wire_code = wire_code
        self.field = field
        self.expected = expected
        self.got = got

    @property
    def difference(self) -> dict[str, str]:
        """What differs, for the people of whoever refuses."""
        return {"code": self.code, "field": self.field, "expected": self.expected, "got": self.got}

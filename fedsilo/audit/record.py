"""The audit record: its closed list of events and fields, its canonical bytes, and what may never be in it.

A record is one line of RFC 8785 JSON. The leaf of the Merkle tree is the hash of the whole line (without its
newline), so every byte counts; `salt` (16 random bytes) keeps anybody who sees only leaf hashes from guessing the
content, and `link.previous` is the leaf hash of the record before.

Never in a record (T40): prompts, responses, matched text, tensor values, private record ids, key material, and plain
hashes of short strings (use `keyed_digest`). What is enforced here: only listed fields, no string beyond 128
printable characters, no binary, nothing that looks like a PEM block, a bound on lists, depth and line length.
What is not: a short secret that a caller puts into an allowed field on purpose, or a person into what is signed.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import rfc8785

from fedsilo.audit.merkle import leaf_hash
from fedsilo.protocol.errors import UsageError, VerificationError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from policies.engine import Decision, RuleResult
    from policies.model import Policy

VERSION = 1
SALT_BYTES = 16
TEXT_CHARACTERS_MAX = 128
NOTE_CHARACTERS_MAX = 500  # of what a person writes to a no; it is kept beside the log
LIST_ITEMS_MAX = 4096
ORDERS_MAX = 64  # signed commands of people in one record: a policy's proposer and its approvers
ORDER_CHARACTERS_MAX = 1 << 16  # of what one of them signed, in base64
DEPTH_MAX = 5
LINE_BYTES_MAX = 1 << 20
NO_PREVIOUS = "0" * 64  # link.previous of the first record
COUNT_MAX = (1 << 53) - 1  # of a count, and of a record's number: what JSON readers hold exactly

CLOCK_ACCEPTED: Final = "clock.accept"  # later times of records before it count no more (T41)

EVENTS: Final = frozenset(
    {
        "start", "stop", "trainer.restart", "policy.load", "policy.reload_refused", "plan.accept",
        "egress.decision", "egress.sent", "egress.acked", "egress.indeterminate", "ingress.decision",
        "ingress.polls",
        "round.transcript", "round.agreed", "round.result", "round.equivocation",
        "approval.request", "approval.grant", "approval.deny", "approval.expire",
        "screen.hit", "dp.debit", "ledger.check", "key.enrol", "key.renew", "key.expire_warn", "denylist.load",
        "secagg.step", "halt", "release", "release.defer", "tail.repaired", "segment.close", "clock.jump",
        CLOCK_ACCEPTED,
        "payload.read", "retention.payloads", "retention.records",
        "run.submit", "run.start", "run.pause", "run.resume", "run.abort", "silo.pause", "silo.resume", "silo.stop",
        "silo.leave", "adapter.verdict", "adapter.accept", "adapter.refuse", "adapter.rollback",
        "transfer.export", "transfer.import",
    }
)  # fmt: skip

KEY_CHARACTERS_MAX = 128
_KEY_BLOCK = "-----BEGIN"
# What nobody should write into a note, which is kept as it was written. Not complete: a bare word is none of these.
_SECRETS: Final = {
    "a key block": re.compile(r"-----BEGIN"),
    "a token": re.compile(r"\b(?:sk-|gh[pousr]_|github_pat_|glpat-|hf_|xox[abeoprs]-|AKIA|eyJ)[A-Za-z0-9_.-]{8,}"),
    "a key or password with its name": re.compile(
        r"(?i)\b(?:api[ _-]?key|secret|token|password|passwd|pwd)\b\s*[=:]\s*\S{6,}"
    ),
}
_KEY = re.compile(r"[A-Za-z0-9_.:/-]+")
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_ONCE = frozenset({"seq", "link", "previous"})  # the verifier reads these, so each stands in a record once
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_CODE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class RecordError(UsageError):
    """A record that may not be written. Nothing was written, so nothing may be sent."""

    default_code = "RECORD_REFUSED"


def keyed_digest(site_key: bytes, data: bytes) -> str:
    """HMAC-SHA-256 for what a dictionary could guess: the digest means nothing without the site's key."""
    return hmac.new(site_key, data, hashlib.sha256).hexdigest()


def shown_digest(release: str, payload: Mapping[str, Any], policy: str, facts: str) -> str:
    """Return what a person signs of a held release that was shown: the record of the yes has all four, so that a
    verifier finds the same digest (T36).

    Args:
        release: its id.
        payload: of the record.
        policy: digest of the effective one.
        facts: digest of the facts that were shown.
    """
    digest = payload.get("sha256") or payload.get("hmac_sha256")
    statement = {"release": release, "payload": digest, "policy": policy, "facts": facts}
    return hashlib.sha256(b"fedsilo shown\n" + rfc8785.dumps(statement)).hexdigest()


def note_text(text: str) -> str:
    """Return what a person wrote, as it may be kept and shown: printable, one line, at most 500 characters, no key."""
    words = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return words.replace(_KEY_BLOCK, "(key)")[:NOTE_CHARACTERS_MAX].strip()


def secret_in(text: str) -> str:
    """Return what in a person's words looks like a key or a password, in words; empty where nothing does."""
    return next((what for what, pattern in _SECRETS.items() if pattern.search(text)), "")


def record_line(
    *,
    seq: int,
    salt: bytes,
    t: int,
    boot: str,
    mono: int,
    actor: str,
    event: str,
    previous: str,
    fields: Mapping[str, Any],
) -> bytes:
    """The canonical bytes of a record, without the newline.

    Args:
        seq: gap-free number, from 0.
        salt: 16 random bytes.
        t: UTC milliseconds; advisory, order is by `seq`.
        boot: boot id.
        mono: monotonic milliseconds.
        actor: SPIFFE id of who acted.
        event: one of EVENTS.
        previous: hex leaf hash of the record before, or NO_PREVIOUS.
        fields: further fields, see `_FIELDS`; None values are left out.

    Raises:
        RecordError: unknown event or field, a forbidden value, or too long.
    """
    record: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    link = record.get("link", {})
    if not isinstance(link, Mapping) or "previous" in link:
        raise RecordError("link is a mapping without previous: that one is set by the log")
    record |= {"v": VERSION, "seq": seq, "salt": salt.hex(), "t": t, "boot": boot, "mono": mono}
    record |= {"actor": actor, "event": event, "link": {**link, "previous": previous}}
    check_record(record)
    try:
        line = _canonical(record)
    except (ValueError, TypeError) as error:  # NaN, integers above 2**53, values that JSON does not have
        raise RecordError(f"record {event}: {error}") from error
    if len(line) > LINE_BYTES_MAX:
        raise RecordError(f"record {event} has {len(line)} bytes; {LINE_BYTES_MAX} are allowed")
    return line


def parse_record(line: bytes) -> dict[str, Any]:
    """A record from its line. Raises VerificationError: not the canonical bytes of a well-formed record."""
    if len(line) > LINE_BYTES_MAX:
        raise VerificationError(f"a record has at most {LINE_BYTES_MAX} bytes")
    try:
        record = json.loads(line, parse_int=_number)
        if not isinstance(record, dict):
            raise VerificationError("a record is a JSON object")
        check_record(record)
        canonical = _canonical(record)
    except (ValueError, TypeError, RecursionError, RecordError) as error:
        raise VerificationError(f"not a record: {str(error)[:200]}") from error
    if canonical != line:
        raise VerificationError("the record is not in canonical form")
    return record


def _number(digits: str) -> int | float:
    """RFC 8785 writes a large float such as 2.5e20 without point or exponent; no integer of a record is so large."""
    value = int(digits)
    return value if abs(value) < 1 << 53 else float(digits)


def _canonical(record: Mapping[str, Any]) -> bytes:
    """RFC 8785 bytes of a checked record.

    Its keys are ASCII and its texts printable, so the standard library's encoder differs from RFC 8785 only in how it
    spells some numbers, and takes a fraction of the time. Where such a number may stand, rfc8785 does it.

    Raises:
        ValueError: a number that JSON or RFC 8785 does not have.
    """
    text = _ENCODER.encode(_without_point_zero(record))
    return rfc8785.dumps(dict(record)) if _OTHERWISE_SPELLED.search(text) else text.encode()


def _without_point_zero(value: Any) -> Any:
    """Return the same value with 3.0 as 3, which RFC 8785 spells alike. Most values are texts and counts: those come
    first."""
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    if isinstance(value, (dict, Mapping)):  # an abstract class is slow to ask
        return {key: _without_point_zero(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_point_zero(item) for item in value]
    return value


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
# An exponent, or more digits than are exact, where a number may stand; a text that looks so only costs time.
_OTHERWISE_SPELLED = re.compile(r"[:,\[]-?(?:[0-9.]*e|[0-9]{16})")


def link_of(line: bytes) -> str:
    """Return what the next record's `link.previous` says about this line."""
    return leaf_hash(line).hex()


def check_record(record: Mapping[str, Any]) -> None:
    """Check a record's fields. Raises RecordError: an unknown event or field, a missing one, or a value that may not be
    in a record."""
    missing = _REQUIRED - record.keys()
    unknown = record.keys() - _FIELDS.keys()
    if missing or unknown:
        raise RecordError(f"record fields: missing {sorted(missing)}, unknown {sorted(unknown)[:5]}")
    for key, value in record.items():
        try:
            accepted = _FIELDS[key](value)
        except RecordError as error:
            raise RecordError(f"record field {key}: {error.message}") from error
        if not accepted:
            raise RecordError(f"record field {key}: value of type {type(value).__name__} is not allowed there")
    event = record["event"]
    if event == "egress.sent" and ("kind" not in record or "bytes" not in record.get("payload", {})):
        raise RecordError("egress.sent needs kind and payload.bytes: what left is counted from these records")
    if event == "ingress.polls" and ("kind" not in record or "decision" not in record["link"]):
        raise RecordError("ingress.polls needs kind and the decision that its window began with")
    if event in ("egress.decision", "ingress.decision") and not {"kind", "decision"} <= record.keys():
        raise RecordError(f"{event} needs kind and decision")


def _plain(value: Any, depth: int = 0) -> bool:
    """JSON of short printable strings, numbers and bounded lists and mappings. Raises RecordError naming why not."""
    if value is None or isinstance(value, bool | int | float):
        return True
    if isinstance(value, str):
        if len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
            raise RecordError(f"text has at most {TEXT_CHARACTERS_MAX} characters, all printable")
        if _KEY_BLOCK in value:
            raise RecordError("key material may not be recorded")
        return True
    if depth >= DEPTH_MAX:
        raise RecordError(f"nested deeper than {DEPTH_MAX}")
    if isinstance(value, list | tuple):
        if len(value) > LIST_ITEMS_MAX:
            raise RecordError(f"a list has at most {LIST_ITEMS_MAX} items")
        return all(_plain(item, depth + 1) for item in value)
    if isinstance(value, (dict, Mapping)):
        if len(value) > LIST_ITEMS_MAX:
            raise RecordError(f"a mapping has at most {LIST_ITEMS_MAX} keys")
        for key in value:
            if not isinstance(key, str) or len(key) > KEY_CHARACTERS_MAX or not _is_key(key):
                raise RecordError(f"keys are short names of letters, digits and _.:/-, and none of {sorted(_ONCE)}")
        return all(_plain(item, depth + 1) for item in value.values())
    return False


@functools.lru_cache(maxsize=1024)
def _is_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None and key not in _ONCE


def _text(value: Any) -> bool:
    return isinstance(value, str) and _plain(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX


def _digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX_DIGEST.fullmatch(value) is not None


def _code(value: Any) -> bool:
    return isinstance(value, str) and _CODE.fullmatch(value) is not None


def _list_of(check: Callable[[Any], bool], most: int = LIST_ITEMS_MAX) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and len(value) <= most and all(map(check, value))


_COUNTS, _TEXTS = _list_of(_count), _list_of(_text)


def _given(value: Any) -> bool:
    """Approvals: numbers of the records that they are in; persons where they are no record of this log (proposals)."""
    return _COUNTS(value) or _TEXTS(value)


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and _plain(value)


def _closed(checks: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    """A mapping with only these keys, each optional."""

    def check(value: Any) -> bool:
        if not isinstance(value, (dict, Mapping)):
            return False
        unknown = value.keys() - checks.keys()
        if unknown:
            raise RecordError(f"unknown keys {sorted(map(str, unknown))[:5]}")
        wrong = [key for key, item in value.items() if not checks[key](item)]
        if wrong:
            raise RecordError(f"value of {wrong[0]} is not allowed there")
        return True

    return check


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in values


_RULE = _closed(
    {
        "rule": _text, "outcome": _text, "measured": _plain, "limit": _plain, "reason": _text,
        "line": _plain,  # of the file that the limit stands in
        "file": _one_of("charter"),  # which file that is; absent: the site's own policy
    }
)  # fmt: skip


def _base64(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= ORDER_CHARACTERS_MAX and _BASE64.fullmatch(value) is not None


_ORDER_DIGESTS = {"site_ca": _digest, "roles": _digest}  # of the CA's certificate, and of the file roles.yaml
_ORDER = _closed({"signed": _base64, "signature": _base64, "certificate": _base64, **_ORDER_DIGESTS})


def _order(value: Any) -> bool:
    return _ORDER(value) and {"signed", "signature", "certificate"} <= value.keys()


_ORDERS = _list_of(_order, ORDERS_MAX)


_FIELDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "v": lambda value: value == VERSION,
    "seq": _count,
    "salt": lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None,
    "t": _count,
    "boot": _text,
    "mono": _count,
    "actor": _text,
    "event": lambda value: isinstance(value, str) and value in EVENTS,
    # routing facts
    "run": _text,
    "round": _count,
    "step": _count,
    "attempt": _count,
    "kind": _text,
    "sequence": _count,
    "peer": _text,
    "direction": _one_of("egress", "ingress"),
    # the decision: per-rule verdicts with numbers, never matched text; facts before and after transforms
    "decision": _one_of("allow", "deny", "hold"),
    "reasons": _list_of(_code),
    "rules": _list_of(_RULE),
    "facts": _mapping,
    # effective: identity of what decided; file and charter: bytes of the site's file and of the federation's charter
    "policy": _closed({"effective": _text, "file": _text, "charter": _text, "code": _text, "schema": _text}),
    "payload": _closed(
        {
            "bytes": _count,
            "sha256": _digest,
            "bytes_before": _count,  # before transforms
            "sha256_before": _digest,
            "hmac_sha256": _digest,  # instead of sha256 where the content is guessable
            "archived": lambda value: isinstance(value, bool),
        }
    ),
    "dp": _mapping,
    "link": _closed(
        {
            "previous": _digest,
            "decision": _count,  # seq of the decision an outcome belongs to
            "peer_event": _count,  # seq, in the peer's log, of its record of this message, as the peer says
            "approvals": _given,
        }
    ),
    # the commands of the people who gave it: the bytes that were signed, signature and certificate (DER) in base64, and
    # by which site CA and roles each was judged. A note or another text is not in what was signed (certs.commands)
    "orders": lambda value: bool(value) and _ORDERS(value),
    # of a silo: which group of its ledger was the newest, where no earlier record says so (T42)
    "ledger": _closed({"groups": _count, "head": _digest}),
    # what an event says beyond the above, by short names
    "detail": _mapping,
}
_REQUIRED: Final = frozenset({"v", "seq", "salt", "t", "boot", "mono", "actor", "event", "link"})


# ---- a record that was read --------------------------------------------------------------------------------------

Value = TypeVar("Value")


class _Field(Generic[Value]):
    """A field of a record, or what stands for it where a record has none."""

    def __init__(self, name: str, absent: Value) -> None:
        self._name, self._absent = name, absent

    def __get__(self, record: Record, owner: type) -> Value:
        value: Value = record.fields.get(self._name, self._absent)
        return value


_NOTHING: Final[Mapping[str, Any]] = {}


class Record:
    """A record that was read, field by field.

    `parse_record` has checked the type of each. What stands in `detail` and `facts`, and the numbers of a rule, may be
    any JSON value: whoever wrote the log chose it.

    Args:
        fields: the record's JSON.
    """

    __slots__ = ("fields",)

    seq, t = _Field("seq", 0), _Field("t", 0)
    event, actor, peer = _Field("event", ""), _Field("actor", ""), _Field("peer", "")
    run, kind = _Field("run", ""), _Field("kind", "")
    round, step, attempt = _Field("round", 0), _Field("step", 0), _Field("attempt", 0)
    sequence = _Field[int | None]("sequence", None)
    decision = _Field("decision", "")
    reasons = _Field[Sequence[str]]("reasons", ())
    rules = _Field[Sequence[Mapping[str, Any]]]("rules", ())
    facts, detail = _Field("facts", _NOTHING), _Field("detail", _NOTHING)
    payload, link = _Field("payload", _NOTHING), _Field("link", _NOTHING)
    orders = _Field[Sequence[Mapping[str, str]]]("orders", ())

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    @property
    def policy(self) -> str:
        """Digest of the policy that decided."""
        return str(self.fields.get("policy", _NOTHING).get("effective", ""))

    @property
    def digest(self) -> str:
        """SHA-256 of the payload, keyed with the site's key where the content could be guessed (T40)."""
        return str(self.payload.get("sha256") or self.payload.get("hmac_sha256") or "")

    @property
    def decided_by(self) -> int | None:
        """Number of the decision that this record is the outcome of."""
        number: int | None = self.link.get("decision")
        return number

    @property
    def approvals(self) -> frozenset[int | str]:
        """Numbers of the grants that a decision rests on; of a policy that came into force, the persons."""
        named = self.link.get("approvals")
        return frozenset(named) if isinstance(named, list) else frozenset()

    @property
    def is_allowed_control(self) -> bool:
        """Return True for a control message, such as a poll, that nobody refused or held."""
        return str(self.kind).startswith("control.") and self.decision in (None, "", "allow")

    @property
    def held_bytes(self) -> tuple[str, str, int, int, str]:
        """Return what a person is asked about: these bytes at this place of a run."""
        return self.kind, self.run, self.round, self.step, self.digest


# ---- what the rules of a decision said ---------------------------------------------------------------------------

NOT_APPLICABLE = "n.a."
_LIST_SHOWN_MAX = 64


def rules_of(decision: Decision, policy: Policy) -> dict[str, Any]:
    """{"rules", "detail"}: a line for each rule that applies to the kind, and how many do not.

    A count is enough of those: facts and policy say which ones, and most messages are polls that few rules are for.

    Args:
        decision: of the rules.
        policy: the one that judged.
    """
    applicable = [result for result in decision.results if result.outcome != NOT_APPLICABLE]
    return {
        "rules": [_rule_fields(result, policy) for result in applicable],
        "detail": {"rules_not_applicable": len(decision.results) - len(applicable)},
    }


def _rule_fields(result: RuleResult, policy: Policy) -> dict[str, Any]:
    fields: dict[str, Any] = {"rule": result.rule, "outcome": result.outcome}
    fields |= {"measured": _short(result.measured), "limit": _short(result.limit), "line": result.line}
    if policy.charter is not None and result.file == policy.charter.source:
        fields["file"] = "charter"
    if result.outcome in ("deny", "hold"):
        fields["reason"] = result.reason
    return fields


def _short(value: Any) -> Any:
    """A limit may be a set or a long text of the policy file; the record holds a short form of it."""
    if isinstance(value, str):
        return harmless(value, TEXT_CHARACTERS_MAX)
    if isinstance(value, tuple | list):
        return [_short(item) for item in value[:_LIST_SHOWN_MAX]]
    if isinstance(value, set | frozenset):
        return [_short(item) for item in sorted(value, key=str)[:_LIST_SHOWN_MAX]]
    if isinstance(value, Mapping):
        return {str(key): _short(item) for key, item in list(value.items())[:_LIST_SHOWN_MAX]}
    return value

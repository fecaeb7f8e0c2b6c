"""Checks the commands that people signed against the audit records that contain them: signer, command and arguments.

A record of what a person answered or ordered keeps the bytes that were signed, the signature and the certificate
(`orders`). Checked here, offline: the signature; that person, command, release, payload, policy, facts shown, reason,
note and run are those of the record; that the order is of this site and federation; that no order stands in two
records, or in one that was written long after it had expired. From the first order that a log keeps on, every such
record keeps one, and so does every record that nothing but a person's order causes, whether it names a person or not.

With the CA of the site it is certain who the person is. A certificate is judged at the time when the record was first
countersigned, or, where nobody did, at the time that the record tells. Where other parties' logs are given, only
countersignatures by keys that one of them has too count. One that ended between the two, less than a day
before the countersignature, is counted as late: nobody can prove by then that it was still valid.
Does not show: whether the person was allowed to, which the roles say that the record names the digest of, and what the
person understood. Records of an earlier version keep no order; they verify as before, and are counted.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from certs.encoding import PARSE_ERRORS, TrustRoot, certificate_fingerprint, read_root
from certs.identity import named_in, site_member
from certs.names import SpiffeId, parse_spiffe_id
from fedsilo.audit.audit_verify import LogResult
from fedsilo.audit.checkpoint import COSIGNATURE_V1, VerifierKey, checkpoint_in, cosigned_at
from fedsilo.audit.reader import keys_in, read_note, typed_records
from fedsilo.audit.record import Record, shown_digest
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, UsageError, VerificationError

Verdict = Literal["anchored", "late", "signed", "unsigned", "broken"]

LATE_SECONDS_MAX = 86_400  # between the end of a certificate and the first countersignature
EXPIRED_SECONDS_MAX = 3_600  # between the end of an order and its record: it may have waited for the guard's loop
VERSIONS = (b"fedsilo-command-v1", b"fedsilo-command-v2")
INTERRUPTED = "INTERRUPTED"  # reason of a no that an earlier version kept without a record, before a kill

# Which command a record of this event carries out; the others are in `_command_of`.
COMMANDS: Final[Mapping[str, str]] = {
    "approval.deny": "approvals.reject", "release.defer": "approvals.defer", "policy.reload_refused": "policy.reload",
    "ledger.check": "ledger.accept",
    "silo.pause": "pause", "silo.resume": "resume", "silo.leave": "leave", "silo.stop": "stop",
    **{
        name: name
        for name in (
            "clock.accept", "adapter.accept", "adapter.refuse", "adapter.rollback",
            "transfer.export", "transfer.import", "run.submit", "run.start", "run.pause", "run.resume", "run.abort",
        )
    },
}  # fmt: skip
_EVENTS: Final = frozenset({"approval.grant", "policy.load", *COMMANDS})
# Events that no person may be behind: a refusal of bytes that were changed, a start, a ledger that is refused.
_ALSO_BY_NOBODY: Final = frozenset({"approval.deny", "policy.load", "policy.reload_refused", "ledger.check"})


ORDERS_IN_WORDS: Final[Mapping[Verdict, str]] = {
    "anchored": "signed by a person whom the site's CA certified",
    "late": "signed, and countersigned only after the person's certificate had ended",
    "signed": "signed, not anchored: no CA of that site was given (--site-ca)",
    "unsigned": "without a signature, as an earlier version wrote it",
    "broken": "what was signed does not hold",
}


def orders_in_words(counts: Mapping[str, int]) -> str:
    """Records by verdict, as a person reads it."""
    return "; ".join(f"{counts[name]} {words}" for name, words in ORDERS_IN_WORDS.items() if counts.get(name))


class _BrokenError(Exception):
    """args: why an order is not what its record says."""


@dataclass(frozen=True)
class _Order:
    """An order whose signature is that of the certificate beside it.

    Attributes:
        id: of the statement that was signed, whatever its expiry: what an approval of a proposal names.
    """

    content: Mapping[str, Any]
    arguments: Mapping[str, Any]
    identity: SpiffeId
    certificate: x509.Certificate
    fingerprint: str
    id: str


def check_orders(
    results: Sequence[LogResult], logs: Sequence[Path], site_cas: Sequence[bytes] = ()
) -> list[dict[int, Verdict]]:
    """Hold what people signed against the records that keep it; what does not fit is a problem of that log.

    Args:
        results: of `verify_logs`; each gets `orders`, how many records there are of each verdict.
        logs: their folders, in the same order.
        site_cas: PEM of the CAs of the sites. Without the one of a site its orders are signed, not anchored.

    Returns:
        For each log, the verdict on each record that keeps an order, or should.

    Raises:
        NotAllowedError, UsageError: one of them is no site CA.
    """
    roots = [(pem, read_root(pem)) for pem in site_cas]
    for _, root in roots:
        if root.kind != "site":
            raise UsageError(f"{root.name!r} is the CA of a federation", hint="people are certified by their site's CA")
    keys = [(str(result["origin"]), _keys_of(log)) for result, log in zip(results, logs, strict=True)]
    checked = [_Log(result, log, roots, keys).check() for result, log in zip(results, logs, strict=True)]
    for result, verdicts in zip(results, checked, strict=True):
        counts = [*verdicts.values()]
        result["orders"] = {name: counts.count(name) for name in ORDERS_IN_WORDS}
        if late := counts.count("late"):
            result["notices"].append(
                f"{late} records of what people signed were countersigned after the person's certificate had ended"
            )
    return checked


class _Log:
    """The state of checking one log.

    Args:
        result: of `verify_logs`.
        folder: of the log.
        roots: CAs of sites, each as PEM and as read.
        keys: of every log given, with the name of its owner; empty where that cannot be read.
    """

    def __init__(
        self,
        result: LogResult,
        folder: Path,
        roots: Sequence[tuple[bytes, TrustRoot]],
        keys: Sequence[tuple[str, set[VerifierKey]]],
    ) -> None:
        self._result = result
        self._folder = folder
        self._roots = roots
        self._keys = keys
        self._party = parse_spiffe_id(str(result.get("origin", "")))
        self._kept: set[bytes] = set()
        self._times: list[tuple[int, int]] | None = None

    def check(self) -> dict[int, Verdict]:
        verdicts: dict[int, Verdict] = {}
        with contextlib.suppress(FedSiloError):  # a log that cannot be read is a problem already
            for record in typed_records(self._folder):
                is_order = record.event in _EVENTS or record.orders
                if is_order and (verdict := self._verdict(record)) is not None:
                    verdicts[record.seq] = verdict
        return verdicts

    def _verdict(self, record: Record) -> Verdict | None:
        detail = record.detail
        try:
            if not (kept := record.orders):
                named = bool(detail.keys() & {"person", "proposal", "shown"})
                if self._kept and (named or record.event not in _ALSO_BY_NOBODY) and not _interrupted(record):
                    raise _BrokenError("none is kept, though this log keeps them")
                return "unsigned" if named else None  # None: nobody ordered it
            orders = [self._opened(one) for one in kept]
            self._compare(record, detail, orders)
            judged = [self._anchored(record, one, order) for one, order in zip(kept, orders, strict=True)]
        except _BrokenError as error:
            self._result["problems"].append(f"record {record.seq}: what a person signed does not hold: {error}")
            self._result["verified"] = False
            return "broken"
        return next((name for name in ("signed", "late", "anchored") if name in judged), "signed")

    def _opened(self, kept: Mapping[str, str]) -> _Order:
        signed, signature, der = (base64.b64decode(kept[name]) for name in ("signed", "signature", "certificate"))
        try:
            certificate = x509.load_der_x509_certificate(der)
            identity, _ = named_in(certificate.public_bytes(Encoding.PEM))
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey) or identity.role != "operator":
                raise _BrokenError("the certificate is not a person's")
            key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
            version, _, body = signed.partition(b"\n")
            content = json.loads(body)
            arguments = json.loads(content["arguments"])
            exact = version in VERSIONS and canonical_json(content) == body
            if (
                not exact
                or canonical_json(arguments).decode() != content["arguments"]
                or not isinstance(arguments, dict)
            ):
                raise _BrokenError("what was signed is no command")
            fingerprint = certificate_fingerprint(certificate)
            statement = version + b"\n" + canonical_json({**content, "expires": ""})
        except InvalidSignature as error:
            raise _BrokenError("the signature is not of that certificate's key over these bytes") from error
        except (*PARSE_ERRORS, KeyError, RecursionError, NotAllowedError) as error:
            raise _BrokenError(f"it cannot be read ({type(error).__name__})") from error
        if signed in self._kept:
            raise _BrokenError("another record keeps the same one, and an order counts once")
        self._kept.add(signed)
        return _Order(
            content, arguments, identity, certificate, fingerprint, sha256_hex(statement + fingerprint.encode())
        )

    def _compare(self, record: Record, detail: Mapping[str, Any], orders: Sequence[_Order]) -> None:
        people = [detail.get("person")]
        if "proposal" in detail:
            people = [detail.get("proposer"), *record.link.get("approvals", ())]
        elif record.event == "ledger.check":
            people = list(record.link.get("approvals", ()))
        if [order.identity.name for order in orders] != people:
            raise _BrokenError("it is of another person")
        for order in orders:
            self._of_this_party(order)
            if wrong := [name for name, signed, ordered in _pairs(record, detail, order) if signed != ordered]:
                raise _BrokenError(f"another {', '.join(wrong)} than the record says")
            try:
                expires = datetime.fromisoformat(str(order.content.get("expires"))).timestamp()
            except (ValueError, OverflowError) as error:
                raise _BrokenError("it names no time at which it expires") from error
            if record.t / 1000 > expires + EXPIRED_SECONDS_MAX:
                raise _BrokenError("it had expired when the record was written")

    def _of_this_party(self, order: _Order) -> None:
        site, party = order.identity.domain, self._party
        if order.content.get("site") != site:
            raise _BrokenError(f"the certificate is of site {site}, the order of another one")
        if party is None:
            return
        if party.role == "silo" and party.name != site:
            raise _BrokenError(f"it is an order to {site}, and this is the log of {party.name}")
        if order.content.get("federation", party.domain) != party.domain:
            raise _BrokenError(f"it is an order of federation {str(order.content['federation'])[:64]}")

    def _anchored(self, record: Record, kept: Mapping[str, str], order: _Order) -> Verdict:
        """Check an order's certificate. Raises _BrokenError: it is not of the site's CA, or was not valid."""
        roots = [(pem, root) for pem, root in self._roots if root.name == order.identity.domain]
        if not roots:
            return "signed"
        named = kept.get("site_ca", "")
        pem, root = next((each for each in roots if each[1].fingerprint == named), roots[0])
        if named and root.fingerprint != named:
            raise _BrokenError(f"the record names another CA of {root.name} ({named[:16]})")
        try:
            written, first = _time(record.t / 1000), self._cosigned(record.seq)
            at = written if first is None else _time(first)
        except (ValueError, OverflowError, OSError) as error:
            raise _BrokenError("the time of its record is none") from error
        begins, ends = order.certificate.not_valid_before_utc, order.certificate.not_valid_after_utc
        late = written <= ends < at and (at - ends).total_seconds() <= LATE_SECONDS_MAX
        moment = ends if late else max(at, begins)  # a clock may be behind, and nobody signs by what is not there yet
        try:
            site_member(order.certificate.public_bytes(Encoding.PEM), pem, moment, role="operator")
        except NotAllowedError as error:
            raise _BrokenError(error.message) from error
        return "late" if late else "anchored"

    def _cosigned(self, seq: int) -> int | None:
        """UTC seconds of the first cosignature of another party over a record; None where there is none."""
        if self._times is None:
            self._times = list(_cosignatures(self._folder, self._witness_keys()))
        return min((time for size, time in self._times if size > seq), default=None)

    def _witness_keys(self) -> set[VerifierKey]:
        """Return the keys of other parties; where their logs are given, those that one of the logs has too."""
        origin = str(self._result.get("origin", ""))
        keys = {key for key in _keys_of(self._folder) if key.name != origin and key.algorithm == COSIGNATURE_V1}
        others = [known for owner, known in self._keys if owner not in ("", origin)]
        return keys & set().union(*others) if others else keys


def _keys_of(folder: Path) -> set[VerifierKey]:
    """Return all keys in a log's folder that can be read; `verify_logs` reports the others."""
    return {key for path in (folder / "keys").glob("*.vkey") for key in keys_in(path)}


def _cosignatures(folder: Path, keys: Iterable[VerifierKey]) -> Iterator[tuple[int, int]]:
    """(records, UTC seconds) of each by one of these keys; of those that do not verify `verify_logs` says so."""
    for path in (folder / "checkpoints").glob("*.note"):
        for key in keys:
            with contextlib.suppress(VerificationError, OSError, ValueError):
                text = read_note(path)
                if (time := cosigned_at(text, key)) is not None:
                    yield checkpoint_in(text).size, time


def _interrupted(record: Record) -> bool:
    """Return True for a no that an earlier version kept without a record, and that was recorded after a restart."""
    return record.event == "approval.deny" and record.reasons == [INTERRUPTED]


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _command_of(record: Record, detail: Mapping[str, Any], order: _Order) -> str:
    """The command that a person signs for this record."""
    event = record.event
    if event == "approval.grant":
        return "approvals.approve" if "release" in detail else "approvals.release"
    if event == "policy.load":
        command = "policy.approve" if "proposal" in order.arguments else "policy.propose"
        return command if "proposal" in detail else "policy.reload"
    return COMMANDS.get(event, "")


def _pairs(record: Record, detail: Mapping[str, Any], order: _Order) -> Iterator[tuple[str, Any, Any]]:
    """Yield what was signed beside what the record says: name, this, that."""
    arguments, effective = order.arguments, record.policy
    command, of_release = _command_of(record, detail, order), "release" in detail
    yield "command", order.content.get("name"), command
    yield "certificate", order.fingerprint, detail.get("certificate", order.fingerprint)
    yield "request", order.content.get("request_id"), detail.get("request", order.content.get("request_id"))
    if of_release or "release" in arguments:
        yield "release", arguments.get("release"), detail.get("release")
        yield "policy", str(arguments.get("policy_digest")).removeprefix("sha256:"), effective
    if command == "approvals.approve" and ("shown" in arguments or "facts" in detail):
        payload = record.payload
        shown = shown_digest(str(detail.get("release")), payload, str(effective), str(detail.get("facts")))
        yield "view", arguments.get("shown"), shown
    if command == "approvals.release":
        yield "kind", arguments.get("kind"), record.kind or None
    if command == "approvals.reject":
        yield "reason", [arguments.get("reason_code")], list(record.reasons)
    if command == "approvals.defer":
        until = arguments.get("until_seconds")
        yield "time", int(until) if isinstance(until, int | float) else None, detail.get("until")
    if "note" in detail:
        yield "note", arguments.get("sealed"), detail["note"]
    if opened := detail.get("acknowledged"):
        yield "finding", _are_among(opened, arguments.get("acknowledged")), True
    if (command.startswith(("run.", "adapter.")) and "run" in arguments) or arguments.get("run"):
        yield "run", arguments.get("run"), record.run or None
    if command == "clock.accept":
        yield "halt", arguments.get("halt"), detail.get("halt")
    if command == "ledger.accept":
        yield "ledger", sha256_hex(canonical_json(arguments)), detail.get("shown")
    if command in ("adapter.accept", "adapter.refuse"):
        yield "adapter", str(arguments.get("digest")).removeprefix("sha256:"), detail.get("adapter")
    if "silo" in arguments:
        yield "silo", arguments.get("silo"), detail.get("silo")
    if "proposal" in detail:
        yield "policy", arguments.get("after"), effective
        yield "proposal", arguments.get("proposal", order.id), detail["proposal"]


def _are_among(opened: Any, signed: Any) -> bool:
    """Return True if the first is a list of texts that the second list has too; both may be any JSON value."""
    if not isinstance(opened, list) or not isinstance(signed, list):
        return False
    return all(isinstance(finding, str) and finding in signed for finding in opened)

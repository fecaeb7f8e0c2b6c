"""Parts of the audit report that rest on more than one log: data, certificates, keys, files given as evidence.

What is in none of the given sources is said to be missing; nothing is guessed. Nothing given as evidence is run or read
for its meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from certs.names import parse_spiffe_id
from fedsilo.edge.audit_counting import OTHERS, moment, text_of
from fedsilo.edge.audit_loading import read_note
from fedsilo.edge.audit_tally import Tally
from fedsilo.treaty.audit.checkpoint import LOG_SIGNATURE, parse_verifier_key
from fedsilo.treaty.errors import FedSiloError, NotFoundError, UsageError
from policies.load import Policy

_SET_WORDS = {"public_set_sha256": "public set", "held_out_sha256": "held-out set"}
_CHUNK_BYTES = 1 << 20
_MILLISECONDS_FROM = 10**11  # a time as a larger number counts milliseconds: in seconds that were the year 5138


def counts_what_left(tally: Tally, origin: str) -> bool:
    """Whether this log is one from which messages that left can be counted at all.

    A silo's guard records each message before it leaves. A coordinator records what comes in, and nothing of what it
    sends: there a count of nothing would be a false statement.
    """
    identity = parse_spiffe_id(origin)
    return tally.outward or (identity is not None and identity.role == "silo")


def in_words(report: Mapping[str, Any]) -> str:
    """The whole report in one sentence: how much left, on whose word, what was refused, and whether the log verifies.

    Args:
        report: with all its counts.
    """
    log, period, asked = report["log"], report["period"], report["left_asked"]
    when = f"From {moment(period['first_t'])} to {moment(period['last_t'])}" if report["records"] else "In no time"
    if report["left_counted"]:
        content = asked["asked"] + asked["unasked"] + asked["not_told"]
        lost = f", {asked['not_told']} on a decision that is not in the log any more" if asked["not_told"] else ""
        what = (
            f"{_messages(content)} with content left {log}, {asked['asked']} after people's yes and "
            f"{asked['unasked']} without a person{lost}, and {_messages(asked['control'])} of the protocol itself"
        )
    else:
        what = f"{_messages(report['arrived_total']['messages'])} came in at {log}"
    denied = sum(item["decisions"]["deny"] for item in (*report["left"], *report["arrived"]))
    no = sum(item["state"] == "rejected" for item in report["approvals"])
    sound = "the log verifies" if report["verification"][0]["verified"] else "the log does NOT verify"
    if report["counted_from"]:
        sound += f", and what stood before record {report['counted_from']} is in none of these numbers"
    return f"{when}, {what}; rules denied {_messages(denied)}, people rejected {no} of those held, and {sound}."


def _messages(count: int) -> str:
    return f"{count:,} message{'s' * (count != 1)}"


def data_inventory(tally: Tally, policies: Sequence[Policy], collection: str) -> dict[str, Any]:
    """Which data the log and the policies speak of.

    Args:
        tally: of the log.
        policies: given versions that this log says were loaded.
        collection: name of the private records in the site's configuration; empty where it was not given.

    Returns:
        collection, purpose (None: nothing records one), trained (records of a round, as powers of ten, by run), sets.
    """
    rows: dict[str, dict[str, Any]] = {}
    for policy in policies:
        held_out = policy.file.held_out
        pins = [("public set", name, pin) for name, pin in policy.file.public_sets.items()]
        for what, name, pin in [*pins, *([("held-out set", "", held_out)] if held_out is not None else [])]:
            rows[pin.sha256] = {
                "what": what, "name": name, "sha256": pin.sha256, "rows": pin.rows, "licence": pin.licence,
                "in_policy": True, "in_records": False,
            }  # fmt: skip
    for (fact, digest), count in sorted(tally.sets.items()):
        unknown = {
            "what": _SET_WORDS[fact], "name": "", "sha256": digest, "rows": count, "licence": "", "in_policy": False,
        }  # fmt: skip
        rows.setdefault(digest, unknown)["in_records"] = True
    return {
        "collection": collection,
        "purpose": None,
        "trained": [
            {"run": run, "records": size, "messages": count}
            for (run, size), count in sorted(tally.trained.items(), key=lambda item: (item[0][0], len(item[0][1])))
        ],
        "sets": list(rows.values()),
        "sets_not_listed": tally.sets_not_listed,
    }


def certificates(tally: Tally) -> list[dict[str, Any]]:
    """Certificates that the records speak of: whose, SHA-256 fingerprint, valid until, and which record says so last.

    Those of the key events that are listed. Of people whose answers are recorded, the fingerprint alone is.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for event in tally.key_events:
        detail = event["detail"]
        if not isinstance(fingerprint := detail.get("fingerprint"), str):
            continue
        whose = text_of(detail.get("identity") or detail.get("spiffe_id") or event["actor"])
        rows[whose, fingerprint] = {
            "identity": whose, "fingerprint": fingerprint, "valid_until": _moment(detail.get("not_after")),
            "event": event["event"], "seq": event["seq"],
        }  # fmt: skip
    for person, fingerprint in tally.approvals.persons:
        if person == OTHERS:
            continue
        row = {"identity": person, "fingerprint": fingerprint, "valid_until": "", "event": "approval", "seq": None}
        rows.setdefault((person, fingerprint), row)
    return list(rows.values())


def _moment(value: Any) -> str:
    """A time as text, from text or from seconds or milliseconds since 1970; empty where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else ""
    return moment(value if value > _MILLISECONDS_FROM else value * 1000)


def signing_keys(log: Path, verification: Sequence[Mapping[str, Any]], policy: Policy | None) -> list[dict[str, Any]]:
    """Ed25519 keys in a log's `keys/` folder, whole: to compare with what their owners gave by another way.

    Args:
        log: folder.
        verification: of all logs given.
        policy: in force, where it was given: it pins the coordinator's.

    Returns:
        {identity, key, of_this_log, own_log, pinned}. own_log: whether that party's own log, where given, is signed by
        this key; pinned: whether the policy names it; each None where nothing is known.
    """
    own = {(item["origin"], item["key"]) for item in verification}
    origins = {item["origin"] for item in verification}
    rows = []
    for path in sorted((log / "keys").glob("*.vkey")):
        if not path.is_file():  # a pipe would be waited for
            continue
        try:
            keys = [parse_verifier_key(line) for line in read_note(path).splitlines()]
        except (FedSiloError, OSError, UnicodeError):
            continue  # named by the verification
        for key in keys:
            if key.algorithm != LOG_SIGNATURE:
                continue
            pins = policy is not None and key.name == policy.file.federation.coordinator
            rows.append(
                {
                    "identity": key.name,
                    "key": key.public_bytes.hex(),
                    "of_this_log": path.name == "log.vkey",
                    "own_log": (key.name, key.public_bytes.hex()) in own if key.name in origins else None,
                    "pinned": _pinned(policy, key.public_bytes) if policy is not None and pins else None,
                }
            )
    return rows


def _pinned(policy: Policy, key: bytes) -> bool:
    return hashlib.sha256(key).hexdigest() in policy.file.federation.coordinator_key_sha256


def evidence_of(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file that is put beside the report.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it cannot be read.
    """
    if not path.is_file():
        raise NotFoundError(f"{path} is no file", hint="--evidence takes files, such as a junit.xml")
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def signature_of(by: str, key: bytes, owner: Mapping[str, Any]) -> dict[str, str]:
    """Who signs the report, and what a reader has to know of it.

    Args:
        by: identity of the signer.
        key: its raw public key.
        owner: verification of the log reported on.
    """
    trouble = ""
    if by != owner["origin"]:
        trouble = f"signed by {by}, not by the log's owner {owner['origin'] or '(unknown)'}"
    elif key.hex() != owner["key"]:
        trouble = f"signed by {by} with another key than the log's"
    return {"by": by, "key": key.hex(), "trouble": trouble}


NO_SIGNATURE = {"by": "", "key": "", "trouble": ""}


def checksums(files: Mapping[str, bytes]) -> bytes:
    """One line for each file, as `sha256sum --check` reads them: who signs this signs all of them."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())).encode()

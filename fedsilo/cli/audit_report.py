"""The audit report: what an audit log shows, counted for a reviewer, as a value for the JSON file and as a HTML page.

One pass over the records of one log; the other logs given only vouch for it. Nothing here is a judgement: numbers are
counted from records, verification is that of `audit_verify`, capacity that of `policies.capacity`. What is in none of
the given sources is said to be missing; nothing is guessed. Nothing given as evidence is run or read for its meaning.
What this cannot show: that a record told the truth, and what was hidden in values that a policy allows (N1).

Every value on the page comes from records that other parties helped to write: all of it passes `text`, which spells
out control and bidirectional characters and escapes HTML (threat T37). The page forbids scripts and fetching by its
own policy too.
"""

from __future__ import annotations

import functools
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from certs.names import parse_spiffe_id
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import LOG_SIGNATURE, checkpoint_in, parse_verifier_key
from fedsilo.audit.consistency import check_consistency
from fedsilo.audit.export import WITHHELD
from fedsilo.audit.notes import check_notes, note_of
from fedsilo.audit.orders import ORDERS_IN_WORDS, check_orders, orders_in_words
from fedsilo.audit.reader import read_note, typed_records
from fedsilo.audit.statistics import OTHERS, VERDICTS, LogStatistics, moment, text_of
from fedsilo.audit.transcripts import check_rounds, findings_of, verification_warnings
from fedsilo.cli.output import csv_text
from fedsilo.files.site_policy import read_pinned_schema
from fedsilo.protocol.errors import FedSiloError, NotFoundError, UsageError
from fedsilo.protocol.kinds import KINDS, TENSOR_KINDS
from fedsilo.protocol.text import harmless
from policies.capacity import capacities
from policies.compare import compare
from policies.kind import FieldClass
from policies.kinds import field_class
from policies.model import Policy
from policies.schema import LoraSchema

SCHEMA = "fedsilo.audit_report/1"
_SHEET_NAME = re.compile(r"[A-Za-z0-9_.]+")  # no spreadsheet takes it for a formula
DP = "off: no privacy budget is kept, and none is claimed"
RESIDUALS = {
    "N1": "A malicious program inside the site can hide data in values that the policy allows: in the low bits of "
    "weights, in the wording of answers. Limits narrow this; the capacity above says how far. Only strong noise "
    "bounds it.",
    "N2": "Without differential privacy, adapters and answers can reveal who or what was in the training data. It is "
    "off.",
    "N3": "Text screens are tripwires, not guarantees: they notice known patterns, not meaning.",
    "N4": "Noise added by each site to a whole adapter is of no use with 3 to 32 sites: it would drown what was "
    "learnt. It is not offered as protection.",
    "N5": "Secure aggregation would hide who sent what. It would not stop the sum from leaking or from being "
    "poisoned. There is none: the coordinator sees each site's own message.",
    "N6": "No unlearning: what has left cannot be called back, and a model cannot be made to forget it.",
    "N7": "Which topics a site treats, and how often, is readable from its updates by whoever reads single updates: "
    "the coordinator does.",
}


def audit_report(
    logs: Sequence[Path],
    *,
    policies: Sequence[Policy] = (),
    folders: Mapping[str, Path] | None = None,
    schema: LoraSchema | None = None,
    collection: tuple[str, str] = ("", ""),
    evidence: Sequence[Mapping[str, Any]] = (),
    signer: tuple[str, bytes] | None = None,
    site_cas: Sequence[bytes] = (),
) -> dict[str, Any]:
    """The report on the first log.

    Args:
        logs: folders; the first is reported on, all are verified alone and against each other.
        policies: versions that the site kept, in any order; found again by their digests.
        folders: digest of a policy -> folder in which to look for the LoRA schema it pins.
        schema: for the capacity, instead of the pinned one.
        collection: identity of a site, and the name of the private records in its configuration; told only where the
            log is that site's.
        evidence: rows of `evidence_of`.
        signer: identity and raw public key of who will sign the report.
        site_cas: PEM of the CAs that certify the people of the sites.

    Raises:
        NotFoundError: the first is no log folder.
    """
    verification = verify_logs(list(logs))
    rounds = check_rounds(verification, list(logs))
    check_consistency(verification, list(logs))
    check_notes(verification, list(logs))
    orders = check_orders(verification, list(logs), site_cas)[0]
    totals = LogStatistics()
    unreadable = ""
    try:
        for record in typed_records(logs[0]):
            totals.add(record, note_of(logs[0], record), orders.get(record.seq, ""))
    except UsageError:
        raise
    except FedSiloError as error:
        if not logs[0].is_dir():
            raise
        unreadable = error.message
    given = {policy.digest: policy for policy in policies}
    found = totals.to_json()
    origin = verification[0]["origin"]
    counted = counts_what_left(totals, origin)
    loaded = [given[item["effective"]] for item in totals.policies if item["effective"] in given]
    in_force = given.get(totals.policies[-1]["effective"]) if totals.policies else None
    made = {
        "schema": SCHEMA,
        "in_words": "",
        "log": verification[0]["log"],
        "origin": origin,
        "complete": not unreadable and not found["counted_from"],
        "unreadable": unreadable,
        **found,
        "left_counted": counted,
        "left_total": found["left_total"] if counted else None,
        "policies": _policies(totals.policies, given, folders or {}, schema),
        "policies_not_loaded": sorted(given.keys() - {item["effective"] for item in totals.policies}),
        "policies_total": totals.policies_total,
        "capacity": _capacity(totals.policies, given, folders or {}, schema),
        "verification": verification,
        "witness": {
            "cosigned_by": verification[0]["cosigned"],
            "not_signed_yet": verification[0]["unsigned"],
            "countersigned_for_others": _witnessed(logs[0]),
            # so many parties vouch for so many of the first records
            "vouched": [
                [count, size]
                for count, size in enumerate(sorted(verification[0]["cosigned"].values(), reverse=True), start=1)
            ],
            "demanded": _demanded(totals.policies, given),
            "two_histories": sorted(path.name for path in (logs[0] / "evidence").glob("*.note")),
        },
        "keys": signing_keys(logs[0], verification, in_force),
        "certificates": certificates(totals),
        "least_isolation": in_force.file.trainer.least_isolation if in_force is not None else "",
        "data": data_inventory(totals, loaded, collection[1] if collection[0] == origin else ""),
        "evidence": [dict(item) for item in evidence],
        "signature": signature_of(*signer, verification[0]) if signer is not None else NO_SIGNATURE,
        "rounds": rounds,
        "retention": {"leaf_hashes_only": verification[0]["hashes_only"], **totals.retention},
        "dp": DP,
        "residuals": RESIDUALS,
    }
    return made | {"in_words": in_words(made)}


def inventory_csv(report: Mapping[str, Any]) -> str:
    """Return what left and what came as rows for a spreadsheet, one for each kind.

    Its cells are names and numbers only. A kind that another party wrote and a spreadsheet might run is `WITHHELD`
    (T37); the JSON file has it.
    """
    header = ("direction", "kind", "messages", "bytes", *VERDICTS, "acked", "indeterminate")
    rows = [
        (
            direction,
            _sheet_name(row["kind"]),
            row["messages"],
            row["bytes"],
            *(row["decisions"][verdict] for verdict in VERDICTS),
            row.get("acked"),
            row.get("indeterminate"),
        )
        for direction, part in (("egress", "left"), ("ingress", "arrived"))
        for row in report[part]
    ]
    return csv_text(header, rows)


def _sheet_name(kind: str) -> str:
    return kind if kind in ("", OTHERS) or _SHEET_NAME.fullmatch(kind) else WITHHELD


def _demanded(loaded: Sequence[Mapping[str, Any]], given: Mapping[str, Policy]) -> dict[str, Any] | None:
    """Return what the policy in force says of witnesses; None if its file was not given."""
    policy = given.get(loaded[-1]["effective"]) if loaded else None
    if policy is None:
        return None
    return {"witnesses": list(policy.file.audit.witnesses), "min_witnesses": policy.file.audit.min_witnesses}


def _policies(
    loaded: Iterable[Mapping[str, Any]],
    given: Mapping[str, Policy],
    folders: Mapping[str, Path],
    schema: LoraSchema | None,
) -> list[dict[str, Any]]:
    """Each version as it was loaded, with what it changed against the one before where both files are given."""
    rows: list[dict[str, Any]] = []
    bits: dict[str, float | None] = {}
    for version in loaded:
        digest = version["effective"]
        if digest not in bits:
            bits[digest] = _capacity([version], given, folders, schema).get("bits")
        row = {**version, "given": digest in given, "changes": None, "bits_a_round": bits[digest]}
        follows = rows and rows[-1]["number"] + 1 == version["number"]
        before = given.get(rows[-1]["effective"]) if follows else None
        after = given.get(version["effective"])
        if before is not None and after is not None:
            row["changes"] = [
                {"field": change.name, "before": change.before, "after": change.after, "direction": change.direction}
                for change in compare(before.file, after.file)
            ]
        rows.append(row)
    return rows


def _capacity(
    loaded: Sequence[Mapping[str, Any]],
    given: Mapping[str, Policy],
    folders: Mapping[str, Path],
    schema: LoraSchema | None,
) -> dict[str, Any]:
    """At most so many bits a round under the policy in force, or why that is not computed."""
    if not loaded:
        return {"computed": False, "why": "no record says which policy was in force", "rows": []}
    digest = loaded[-1]["effective"]
    policy = given.get(digest)
    if policy is None:
        return {"computed": False, "why": "the file of the policy in force was not given", "rows": []}
    note = "tensors counted by the given schema"
    if schema is None and policy.file.egress.updates:
        try:
            schema = read_pinned_schema(policy.own, folders.get(digest, Path()))
            note = "tensors counted by the schema that the policy pins"
        except UsageError:
            note = "tensors counted by the largest message that the policy allows: its schema file was not found"
    rows = [row.to_json() for row in capacities(policy, schema)]
    return {
        "computed": True,
        "policy": digest,
        "note": note,
        "rows": rows,
        "bits": round(sum(row["bits"] for row in rows), 1),
    }


def _witnessed(log: Path) -> list[dict[str, Any]]:
    """The newest checkpoint of each other party that this one countersigned; `verify_logs` judges them."""
    found = []
    for path in sorted((log / "witnessed").glob("*.note")):
        try:
            checkpoint = checkpoint_in(read_note(path))
        except FedSiloError:
            continue  # named as a problem by the verification
        found.append({"origin": checkpoint.origin, "size": checkpoint.size})
    return found


# ---- what rests on more than one log -------------------------------------------------------------------

_SET_WORDS = {"public_set_sha256": "public set", "held_out_sha256": "held-out set"}
_CHUNK_BYTES = 1 << 20
_MILLISECONDS_FROM = 10**11  # a time as a larger number counts milliseconds: in seconds that were the year 5138


def counts_what_left(totals: LogStatistics, origin: str) -> bool:
    """Return True if messages that left can be counted from this log at all.

    A silo's guard records each message before it leaves. A coordinator records what comes in, and nothing of what it
    sends: there a count of nothing would be a false statement.
    """
    identity = parse_spiffe_id(origin)
    return totals.outward or (identity is not None and identity.role == "silo")


def in_words(report: Mapping[str, Any]) -> str:
    """The report in one sentence: how much left, on whose word, what was refused, and whether the log verifies."""
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


def data_inventory(totals: LogStatistics, policies: Sequence[Policy], collection: str) -> dict[str, Any]:
    """Return which data the log and the policies are about.

    Args:
        totals: of the log.
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
                "what": what,
                "name": name,
                "sha256": pin.sha256,
                "rows": pin.rows,
                "licence": pin.licence,
                "in_policy": True,
                "in_records": False,
            }
    for (fact, digest), count in sorted(totals.sets.items()):
        unknown = {
            "what": _SET_WORDS[fact],
            "name": "",
            "sha256": digest,
            "rows": count,
            "licence": "",
            "in_policy": False,
        }
        rows.setdefault(digest, unknown)["in_records"] = True
    return {
        "collection": collection,
        "purpose": None,
        "trained": [
            {"run": run, "records": size, "messages": count}
            for (run, size), count in sorted(totals.trained.items(), key=lambda item: (item[0][0], len(item[0][1])))
        ],
        "sets": list(rows.values()),
        "sets_not_listed": totals.sets_not_listed,
    }


def certificates(totals: LogStatistics) -> list[dict[str, Any]]:
    """Certificates that the records speak of: whose, SHA-256 fingerprint, valid until, and which record says so last.

    Those of the key events that are listed. Of people whose answers are recorded, the fingerprint alone is.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for event in totals.key_events:
        detail = event["detail"]
        if not isinstance(fingerprint := detail.get("fingerprint"), str):
            continue
        whose = text_of(detail.get("identity") or detail.get("spiffe_id") or event["actor"])
        rows[whose, fingerprint] = {
            "identity": whose,
            "fingerprint": fingerprint,
            "valid_until": _moment(detail.get("not_after")),
            "event": event["event"],
            "seq": event["seq"],
        }
    for person, fingerprint in totals.approvals.persons:
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
    """Return who signs the report, and what a reader has to know of it. `owner` is the verification of its log."""
    trouble = ""
    if by != owner["origin"]:
        trouble = f"signed by {by}, not by the log's owner {owner['origin'] or '(unknown)'}"
    elif key.hex() != owner["key"]:
        trouble = f"signed by {by} with another key than the log's"
    return {"by": by, "key": key.hex(), "trouble": trouble}


NO_SIGNATURE = {"by": "", "key": "", "trouble": ""}


def checksums(files: Mapping[str, bytes]) -> bytes:
    """Return one line for each file, as `sha256sum --check` reads them: whoever signs this signs all of them."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())).encode()


# ---- in words ------------------------------------------------------------------------------------------

_HELD: Final = {
    FieldClass.TEXT: "free text",
    FieldClass.SHORT: "a short text",
    FieldClass.NUMBER: "numbers",
    FieldClass.SHAPE: "numbers",
    FieldClass.PLAN: "a plan",
    FieldClass.TRANSCRIPT: "a transcript",
    FieldClass.CERTIFICATE: "certificates",
    FieldClass.DIGEST: "digests and signatures",
    FieldClass.HASH: "digests and signatures",
    FieldClass.NOTE: "digests and signatures",
    FieldClass.SIGNATURE: "digests and signatures",
}  # the rest are names and codes of closed lists


def words_of(kind: str) -> str:
    """Return what a kind is for and may hold, for a reader who does not know the protocol."""
    if kind not in KINDS:
        return "no kind of this protocol"
    return f"{KINDS[kind].words}; may hold {', '.join(held_by(kind))}"


def held_by(kind: str) -> list[str]:
    """Return the fields of these kinds in a message in words, the most important first."""
    found = {_HELD.get(each, "names and codes") for each in _classes(KINDS[kind].message.DESCRIPTOR)}
    order = [*dict.fromkeys(_HELD.values()), "names and codes"]
    return [*(["weights"] if kind in TENSOR_KINDS else []), *(word for word in order if word in found)] or ["nothing"]


def _classes(message: Any) -> Iterator[FieldClass]:
    for field in message.fields:
        if field.message_type is not None:
            yield from _classes(field.message_type)
        elif found := field_class(message.name, field.name):
            yield found


# Rule, what it is about, parts of the report that a reviewer may look at for it.
ORIENTATION: Final = (
    ("HIPAA, 45 CFR 164.312(b)", "audit controls", "What left; Denied; Verification and witnesses"),
    (
        "HIPAA, 45 CFR 164.316(b)(2)",
        "documentation kept for 6 years",
        "Archived payloads and retention; Policy versions",
    ),
    (
        "GDPR, Art. 5(2)",
        "being able to show compliance",
        "Policy versions; Who approved what; Verification and witnesses",
    ),
    ("GDPR, Art. 30", "records of processing", "Data inventory; What left; What came in"),
    ("GDPR, Art. 32", "security of processing", "Denied; Halts and other incidents; Identities, certificates, keys"),
    ("GDPR, Art. 35", "impact assessment", "The most that could leave in one round; What this report cannot rule out"),
    ("EDPB, Opinion 28/2024", "personal data in AI models", "Data inventory; Differential privacy; Test evidence"),
    ("EU AI Act, Art. 12 and 19", "logs, kept for at least six months", "Verification and witnesses; Retention"),
    ("EU AI Act, Art. 14 and 26", "human oversight; duties of deployers", "Who approved what; Halts; Log review"),
    ("EU AI Act, Art. 15", "accuracy, robustness, cybersecurity", "Denied; Test evidence; Verification and witnesses"),
    ("NIST AI RMF", "govern, map, measure, manage", "The whole report"),
    ("NIST SP 800-226", "judging claims of differential privacy", "Differential privacy: none is claimed"),
)


# ---- the page ------------------------------------------------------------------------------------------

_LONG_CHARACTERS = 32  # what is longer may be broken anywhere, so that no name makes a table wider than the page
_TOLD_MAX = 10  # findings, and warnings, at the top of the page
_ROUNDS_MAX = 500
_PROBLEMS_MAX = 200
_NOT_PLANTED = "none was planted in this kind"
_WAYS = {"egress": "on its way out", "ingress": "on its way in"}
_ANSWER_WORDS = {
    "request": "asked",
    "grant": "approved",
    "deny": "rejected",
    "expire": "expired",
    "halt": "agreed to end a halt",
}
_STATES = {
    "held": "held",
    "granted": "granted",
    "refused": "approved, and denied by the rules",
    "rejected": "rejected",
    "expired": "expired",
}
_CERTIFICATE_WORDS = {
    "key.renew": "replaced the one before",
    "key.expire_warn": "expires soon",
    "key.enrol": "the first in use",
    "approval": "answered about releases",
}


def page(report: Mapping[str, Any]) -> str:
    """The whole HTML page for a value of `audit_report`; its text is that of audit_report.html."""
    counts = report["verification"][0].get("orders", {})
    listed = (f"{_ANSWER_WORDS[name]} {count}" for name, count in report["approvals_not_listed"].items())
    return _template().render(
        report=report,
        rows=_rows(report),
        top=_top(report),
        proof=_proof(report),
        not_listed=", ".join(listed),
        signatures=f"What people signed is kept in the log and was checked here: {orders_in_words(counts)}."
        if any(counts.values())
        else "The log has no record of what a person ordered.",
        orientation=ORIENTATION,
        others=OTHERS,
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {
        "code": code,
        "digest": digest,
        "badge": badge,
        "verdict": verdict,
        "cell": _cell,
        "when": when,
        "size": size,
        "number_marks": _number_marks,
        "change_rows": _change_rows,
    }
    return environment.get_template("audit_report.html")


def text(value: Any) -> str:
    """Any value as harmless HTML text: nothing that another party wrote becomes markup or steers a screen (T37)."""
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    elif isinstance(value, int):
        return f"{value:,}"
    elif isinstance(value, dict | list | tuple):
        value = json.dumps(value, ensure_ascii=False)
    return html.escape(harmless(str(value).replace("\n", " ")), quote=True)


def _escaped(value: Any) -> Markup:
    """Return a value for the page: markup that was made here unchanged, everything else as text."""
    return value if isinstance(value, Markup) else Markup(text(value))  # noqa: S704 - text escapes


def _span(marks: str, value: Any) -> Markup:
    return Markup('<span class="{}">{}</span>').format(marks, _escaped(value))


_NONE = _span("soft", "-")


def code(value: Any) -> Markup:
    return _span("code long" if _is_long(value) else "code", value)


def _is_long(value: Any) -> bool:
    return any(len(word) > _LONG_CHARACTERS for word in str(value).split())


def whole(value: str) -> Markup:
    """All digits of a digest or key, in one line where the screen is wide enough: two of them can be compared."""
    return _span("code whole", value) if value else _NONE


def digest(value: str) -> Markup:
    """The first 16 characters; the JSON file has all of them."""
    return code(value[:16] + ("…" if len(value) > 16 else "")) if value else _NONE


def verdict(good: bool, words: str) -> Markup:
    return badge("good" if good else "bad", words)


def badge(level: str, words: str) -> Markup:
    """level: good, warn or bad."""
    return _span(f"verdict {level}", words)


def when(milliseconds: int) -> str:
    return moment(milliseconds) if milliseconds else "-"


def size(count: float, unit: str = "bytes") -> str:
    """A count of bytes or bits in a unit that a person can compare."""
    amount = count / 8 if unit == "bits" else count
    for name, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.1f} {name}"
    return f"{amount:.0f} bytes"


def _cell(value: Any) -> Markup:
    """Return the content of a table's cell."""
    if isinstance(value, Markup):
        return value
    return _span("long", value) if _is_long(value) else _escaped(value) or _NONE


def _number_marks(rows: Sequence[Sequence[Any]]) -> list[Markup]:
    """An attribute for each column: one of numbers is one whose cells all are."""
    numeric = (all(isinstance(value, int) for value in column) for column in zip(*rows, strict=True))
    return [Markup(' class="number"') if each else Markup("") for each in numeric]


def _rows(report: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The rows of every table of the page, by the name that the template has for it."""
    left = [
        (_kind(item["kind"]), item["messages"], item["bytes"], *item["decisions"].values(), item["indeterminate"])
        for item in report["left"]
    ]
    by_run = _sums(report["left_by_run"], "run")
    return {
        "left": left,
        "left_total": [
            "all", report["left_total"]["messages"], report["left_total"]["bytes"],
            *(sum(column) for column in list(zip(*left, strict=True))[3:]),
        ]
        if left and report["left_counted"]
        else [],
        "left_by_run": [(code(run) if run else "outside any run", *counts) for run, counts in by_run],
        "arrived": [
            (_kind(item["kind"]), item["messages"], item["bytes"], *item["decisions"].values())
            for item in report["arrived"]
        ],
        "arrived_from": [
            (code(who) if who else "not known", *counts) for who, counts in _sums(report["arrived_from"], "identity")
        ],
        "denials": [
            (_WAYS.get(item["direction"], item["direction"]), code(item["kind"]), code(item["reason"]), item["count"],
             item["first"], item["last"])
            for item in report["denials"]
        ],
        "capacity": _capacity_rows(report["capacity"]["rows"]),
        "approvals": [
            (code(item["release"]), code(item["kind"]), f"{item['run']}, round {item['round']}" if item["run"] else "-",
             item["bytes"], digest(item["digest"]), _state(item), _answers(item))
            for item in report["approvals"]
        ],
        "persons": [
            (item["person"], digest(item["certificate"]),
             ", ".join(f"{_ANSWER_WORDS[name]} {count}" for name, count in item["answers"].items()))
            for item in report["persons"]
        ],
        "left_unasked": [
            (_kind(item["kind"]), item["messages"], item["bytes"],
             f"line {item['line']} of the {item['file']}" if item["line"] else "no line asks people about this kind",
             digest(item["policy"]), item["first"], item["last"])
            for item in report["left_unasked"]
        ],
        "trained": [(code(item["run"]), item["records"], item["messages"]) for item in report["data"]["trained"]],
        "sets": [_set_row(item) for item in report["data"]["sets"]],
        "logs": [
            (item["log"], verdict(item["verified"], "verified" if item["verified"] else "NOT VERIFIED"), item["size"],
             item["unsigned"], max(item["cosigned"].values(), default=0))
            for item in report["verification"]
        ],
        "rounds": [
            (row["run"], row["round"], digest(row["sha256"]),
             f"{len(row['signed'])} of {len(row['silos'])}: {', '.join(row['signed'])}",
             ", ".join(row["keys_not_vouched_for"]), ", ".join(row["survivors"]),
             digest(row["aggregate"]) if row["aggregate"] else "",
             f"{row['logs_alike']} of {len(report['verification'])}")
            for row in report["rounds"][:_ROUNDS_MAX]
        ],
        "reads": [
            (item["seq"], when(item["t"]), item["person"], digest(item["certificate"]), item["kind"], item["decision"])
            for item in report["retention"]["reads"]
        ],
        "halts": [_event_row(item) for item in report["halts"]],
        "halt_grants": [
            (item["seq"], when(item["t"]), code(item["kind"]), item["person"], digest(item["certificate"]),
             when(item["since_seconds"] * 1000))
            for item in report["halt_grants"]
        ],
        "incidents": [_event_row(item) for item in report["incidents"]],
        "donors_dropped": [
            (code(item["run"]), item["round"], code(item["of"]), item["answers"], item["first"], item["last"])
            for item in report["donors_dropped"]
        ],
        "identities": [
            *((code(item["identity"]), "wrote this log", item["records"], when(item["first_t"]), when(item["last_t"]))
              for item in report["identities"]),
            *((code(item["identity"]), "the other side", item["records"], "", "") for item in report["peers"]),
        ],
        "programs": [(item["version"], digest(item["code"]), item["starts"]) for item in report["programs"]],
        "trainers": [
            (code(item["identity"]), item["isolation"], item["first"], item["last"]) for item in report["trainers"]
        ],
        "certificates": [
            (code(item["identity"]), whole(item["fingerprint"]), item["valid_until"] or "not in the log",
             _CERTIFICATE_WORDS.get(item["event"], item["event"]), item["seq"] if item["seq"] is not None else "")
            for item in report["certificates"]
        ],
        "signing_keys": [
            (code(item["identity"]), whole(item["key"]), "this log's" if item["of_this_log"] else "taken down here",
             _vouched(item))
            for item in report["keys"]
        ],
        "key_events": [
            (item["seq"], when(item["t"]), code(item["event"]), _value(item["detail"])) for item in report["key_events"]
        ],
        "evidence": [(code(item["name"]), item["bytes"], whole(item["sha256"])) for item in report["evidence"]],
    }  # fmt: skip


def _kind(kind: str) -> Markup:
    """A kind, and under it what it is for and may hold."""
    return code(kind) + _span("words", "further kinds, counted together" if kind == OTHERS else words_of(kind))


def _sums(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[str, tuple[int, int]]]:
    """(name, (messages, bytes)) of rows that have the name in common, in order of the names."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        messages, size_bytes = found.get(row[name], (0, 0))
        found[row[name]] = messages + row["messages"], size_bytes + row["bytes"]
    return sorted(found.items())


def _change_rows(changes: Iterable[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            code(row["field"]),
            _value(row["before"]),
            _value(row["after"]),
            verdict(row["direction"] in ("tighter", "cosmetic"), row["direction"]),
        )
        for row in changes
    ]


def _value(value: Any) -> str:
    """A policy value in a cell: a long list as its beginning and its length."""
    if isinstance(value, list) and len(value) > 6:
        return f"{json.dumps(value[:6], ensure_ascii=False)[:-1]}, ... {len(value)} items]"
    return str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _capacity_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    most = max((row["bits"] for row in rows), default=0.0) or 1.0
    bar = Markup('{} bits, {}<span class="bar" style="width:{}%"></span>')
    return [
        (
            code(row["kind"]),
            bar.format(
                text(round(row["bits"])), size(row["bits"], "bits"), f"{max(1.0, 100 * row['bits'] / most):.1f}"
            ),
            row["because"],
            f"{round(row['planted_bits']):,} bits: {row['planted']}" if row["planted"] else _NOT_PLANTED,
        )
        for row in rows
    ]


def _state(item: Mapping[str, Any]) -> Markup:
    """Return what happened to a release, and on how many approvals."""
    given, needed, decision = item["given"], item["needed"], item["decision"]
    words = [_STATES[item["state"]]]
    if item["void"]:
        words.append("approvals given under an earlier policy do not count")
    elif given or needed:
        count = f"{given} of {needed}" if needed else f"{given}"
        words.append(f"{count} approval{'s' * ((needed or given) != 1)}")
        words += ["how many it needs is not told"] * (not needed)
    if decision is not None:
        words.append(f"decided in record {decision['seq']}")
    elif item["state"] == "held" and needed and given >= needed:
        words.append("no decision follows")
    told = _escaped(": ".join(words[:2]) + "".join(f"; {each}" for each in words[2:]))
    if item["state"] in ("rejected", "expired") and decision is not None and decision["verdict"] == "allow":
        told += Markup(" ") + verdict(False, "allowed all the same")
    return told


def _answers(item: Mapping[str, Any]) -> Markup:
    """Return who answered what about a release, a line each."""
    lines = []
    for answer in item["answers"]:
        who = f" by {answer['person']}" if "person" in answer else ""
        why = f" ({', '.join(answer['reasons'])})" if answer["reasons"] else ""
        note = f": \u201c{answer['note']}\u201d" if answer.get("note") else ""
        signed = f", {ORDERS_IN_WORDS[answer['order']]}" if answer.get("order") else ""
        lines.append(_escaped(f"{when(answer['t'])}: {_ANSWER_WORDS[answer['answer']]}{who}{why}{note}{signed}"))
    if (more := item["answers_total"] - len(lines)) > 0:
        lines.append(_escaped(f"{more:,} more answers are in the log"))
    return Markup("<br>").join(lines)


def _set_row(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """A public or held-out set: its licence, and where it is named."""
    unknown = "the policy states none" if item["in_policy"] else "no policy that names it was given"
    places = [name for name, there in (("policy", item["in_policy"]), ("records", item["in_records"])) if there]
    return (
        item["what"],
        code(item["name"]) if item["name"] else "",
        whole(item["sha256"]),
        item["rows"] or "not recorded",
        str(item["licence"]) if item["licence"] else unknown,
        " and ".join(places),
    )


def _event_row(item: Mapping[str, Any]) -> tuple[Any, ...]:
    detail = ", ".join(f"{name} {value}" for name, value in item["detail"].items())
    return (
        item["seq"],
        when(item["t"]),
        code(item["event"]),
        code(item["kind"]) if item["kind"] else "",
        ", ".join(item["reasons"]),
        detail,
    )


def _vouched(item: Mapping[str, Any]) -> Any:
    """Return who else says that a key is its party's."""
    if item["own_log"] is False or item["pinned"] is False:
        other = "that party's own log" if item["own_log"] is False else "the policy in force"
        return verdict(False, f"{other} names another key")
    if item["of_this_log"]:
        return _NONE
    found = ((item["own_log"], "its own log"), (item["pinned"], "the policy in force"))
    return _escaped(" and ".join(words for there, words in found if there) or "nobody that was given here")


def _top(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return one badge for all logs, and each finding and warning: nothing below may be read without them."""
    findings, warnings = findings_of(report["verification"]), verification_warnings(report["verification"])
    failed = [item["log"] for item in report["verification"] if not item["verified"]]
    named = ", ".join(failed[:_TOLD_MAX])
    if failed and not report["verification"][0]["verified"]:
        level, words = "bad", f"NOT VERIFIED: {named}: see below before you read on"
    elif failed:  # the log that all below is counted from is sound
        level, words = "warn", f"{report['verification'][0]['log']} verifies; of the others given, not: {named}"
    elif findings:
        level, words = "bad", "the logs are sound, and prove that somebody signed two things"
    elif warnings:
        level, words = "warn", "every log given verifies, with warnings"
    else:
        level, words = "good", "every log given verifies"
    return {
        "level": level,
        "words": words,
        "findings": findings[:_TOLD_MAX],
        "warnings": warnings[:_TOLD_MAX],
        "more": max(0, len(findings) - _TOLD_MAX) + max(0, len(warnings) - _TOLD_MAX),
    }


def _proof(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the problems that the verification has found, and who signed two things."""
    told = [(item["log"], problem) for item in report["verification"] for problem in item["problems"]]
    return {
        "problems": told[:_PROBLEMS_MAX],
        "problems_more": len(told) - _PROBLEMS_MAX,
        "findings": findings_of(report["verification"]),
    }

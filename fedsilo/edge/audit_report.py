"""What an audit log shows, counted for a reviewer: one value for the JSON file, from which the page is drawn.

One pass over the records of one log; the other logs given only vouch for it. Nothing here is a judgement: numbers are
counted from records, verification is that of `audit_verify`, capacity that of `policies.capacity`.
What this cannot show: that a record told the truth, and what was hidden in values that a policy allows (N1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.edge.audit_counting import OTHERS
from fedsilo.edge.audit_follow import WITHHELD
from fedsilo.edge.audit_loading import read_note
from fedsilo.edge.audit_notes import check_notes, note_of
from fedsilo.edge.audit_orders import check_orders
from fedsilo.edge.audit_report_parts import (
    NO_SIGNATURE,
    certificates,
    counts_what_left,
    data_inventory,
    in_words,
    signature_of,
    signing_keys,
)
from fedsilo.edge.audit_segments import read_records
from fedsilo.edge.audit_story import check_stories
from fedsilo.edge.audit_tally import VERDICTS, Tally
from fedsilo.edge.audit_transcripts import check_rounds
from fedsilo.edge.audit_verify import verify_logs
from fedsilo.edge.csv_cells import csv_text
from fedsilo.edge.site_policy import read_pinned_schema
from fedsilo.treaty.audit.checkpoint import parse_checkpoint, parse_note
from fedsilo.treaty.errors import FedSiloError, UsageError
from policies.capacity import capacities
from policies.compare import compare
from policies.load import Policy
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
    check_stories(verification, list(logs))
    check_notes(verification, list(logs))
    orders = check_orders(verification, list(logs), site_cas)[0]
    tally = Tally()
    unreadable = ""
    try:
        for record in read_records(logs[0]):
            tally.add(record, note_of(logs[0], record), orders.get(record["seq"], ""))
    except UsageError:
        raise
    except FedSiloError as error:
        if not logs[0].is_dir():
            raise
        unreadable = error.message
    given = {policy.digest: policy for policy in policies}
    found = tally.to_json()
    origin = verification[0]["origin"]
    counted = counts_what_left(tally, origin)
    loaded = [given[item["effective"]] for item in tally.policies if item["effective"] in given]
    in_force = given.get(tally.policies[-1]["effective"]) if tally.policies else None
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
        "policies": _policies(tally.policies, given, folders or {}, schema),
        "policies_not_loaded": sorted(given.keys() - {item["effective"] for item in tally.policies}),
        "policies_total": tally.policies_total,
        "capacity": _capacity(tally.policies, given, folders or {}, schema),
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
            "demanded": _demanded(tally.policies, given),
            "two_histories": sorted(path.name for path in (logs[0] / "evidence").glob("*.note")),
        },
        "keys": signing_keys(logs[0], verification, in_force),
        "certificates": certificates(tally),
        "least_isolation": in_force.file.trainer.least_isolation if in_force is not None else "",
        "data": data_inventory(tally, loaded, collection[1] if collection[0] == origin else ""),
        "evidence": [dict(item) for item in evidence],
        "signature": signature_of(*signer, verification[0]) if signer is not None else NO_SIGNATURE,
        "rounds": rounds,
        "retention": {"leaf_hashes_only": verification[0]["hashes_only"], **tally.retention},
        "dp": DP,
        "residuals": RESIDUALS,
    }
    return made | {"in_words": in_words(made)}


def inventory_csv(report: Mapping[str, Any]) -> str:
    """What left and what came, a line for each kind, for a spreadsheet.

    Its cells are names and numbers only. A kind that another party wrote and a spreadsheet might run is `WITHHELD`
    (T37); the JSON file has it.
    """
    header = ("direction", "kind", "messages", "bytes", *VERDICTS, "acked", "indeterminate")
    rows = [
        (
            direction, _sheet_name(row["kind"]), row["messages"], row["bytes"],
            *(row["decisions"][verdict] for verdict in VERDICTS), row.get("acked"), row.get("indeterminate"),
        )
        for direction, part in (("egress", "left"), ("ingress", "arrived"))
        for row in report[part]
    ]  # fmt: skip
    return csv_text(header, rows)


def _sheet_name(kind: str) -> str:
    return kind if kind in ("", OTHERS) or _SHEET_NAME.fullmatch(kind) else WITHHELD


def _demanded(loaded: Sequence[Mapping[str, Any]], given: Mapping[str, Policy]) -> dict[str, Any] | None:
    """What the policy in force says of witnesses; None where its file was not given."""
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
            checkpoint = parse_checkpoint(parse_note(read_note(path)).text)
        except FedSiloError:
            continue  # named as a problem by the verification
        found.append({"origin": checkpoint.origin, "size": checkpoint.size})
    return found

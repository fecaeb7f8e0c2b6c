"""The page's parts for a reviewer's file: data inventory, certificates, test evidence, sign-off, orientation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.launch.audit_report_markup import Markup, code, further, table, text, when, whole
from fedsilo.launch.audit_report_words import ORIENTATION, ORIENTATION_NOTE

_LINE = Markup('<span class="line"></span>')  # to be filled in by hand, on paper
_EVENT_WORDS = {
    "key.renew": "replaced the one before", "key.expire_warn": "expires soon", "key.enrol": "the first in use",
    "approval": "answered about releases",
}  # fmt: skip


def data_inventory(report: Mapping[str, Any]) -> str:
    """Private records, public and held-out sets, as policy, configuration and records name them."""
    data = report["data"]
    collection = (
        code(data["collection"]) if data["collection"] else "not in the log; the site's configuration was not given"
    )
    trained = [(code(item["run"]), item["records"], item["messages"]) for item in data["trained"]]
    sets = [
        (item["what"], _name(item), whole(item["sha256"]), item["rows"] or "not recorded", _licence(item), _where(item))
        for item in data["sets"]
    ]
    return (
        "<h2>Data inventory</h2>"
        f"<p>Collection of private records: {collection}.<br>Purpose of the processing: neither policy nor log holds "
        f"one; fill in: {_LINE}</p>"
        "<h3>Private records that entered an update</h3><p>Of updates that the policy allowed "
        "to leave: how many private records the round had trained on, as a power of ten.</p>"
        + table(("run", "records in a round", "updates"), trained)
        + "<h3>Public and held-out sets</h3>"
        + table(("what", "name", "SHA-256", "rows", "licence", "named in"), sets)
        + further(data["sets_not_listed"], "decisions name sets that are not listed here")
    )


def _name(item: Mapping[str, Any]) -> Any:
    return code(item["name"]) if item["name"] else ""


def _licence(item: Mapping[str, Any]) -> str:
    if item["licence"]:
        return str(item["licence"])
    return "the policy states none" if item["in_policy"] else "no policy that names it was given"


def _where(item: Mapping[str, Any]) -> str:
    found = [name for name, there in (("policy", item["in_policy"]), ("records", item["in_records"])) if there]
    return " and ".join(found)


def certificates(report: Mapping[str, Any]) -> str:
    """Whose certificates the records speak of, and until when they are good."""
    rows = [
        (code(item["identity"]), whole(item["fingerprint"]), item["valid_until"] or "not in the log",
         _EVENT_WORDS.get(item["event"], item["event"]), item["seq"] if item["seq"] is not None else "")
        for item in report["certificates"]
    ]  # fmt: skip
    return (
        "<h3>Certificates</h3><p>As the records name them: a certificate that no record names is not here. Nothing is "
        "revoked: whoever holds a certificate can use it until the time that stands in it.</p>"
        + table(("whose", "SHA-256 fingerprint", "valid until", "last recorded as", "record"), rows)
    )


def isolation(report: Mapping[str, Any]) -> str:
    """Behind which walls trainers ran, where a record says so."""
    rows = [(code(item["identity"]), item["isolation"], item["first"], item["last"]) for item in report["trainers"]]
    least = report["least_isolation"]
    asked = (
        f" The policy in force demands {'no walls' if least == 'waived' else 'at least'}: {code(least)}."
        if least
        else ""
    )
    if not rows:
        return (
            f"<h3>Walls around the trainer</h3><p>Behind which walls the trainer ran is not in this log.{asked} The "
            "coordinator's signed record of a run says what each silo stated.</p>"
        )
    return f"<h3>Walls around the trainer</h3><p>As stated by the guard that started it.{asked}</p>" + table(
        ("whose trainer", "walls", "first record", "last record"), rows
    )


def test_evidence(report: Mapping[str, Any]) -> str:
    """Files that were put beside the report."""
    rows = [(code(item["name"]), item["bytes"], whole(item["sha256"])) for item in report["evidence"]]
    if not rows:
        return (
            '<h2>Test evidence</h2><p class="soft">None was given with <span class="code">--evidence FILE</span>: '
            "reports of the threat suite, of the canaries, of a membership test.</p>"
        )
    return (
        "<h2>Test evidence</h2><p>Files that whoever made this report named. Nothing of them was run or judged here; "
        "the digest says which file was meant.</p>" + table(("file", "bytes", "SHA-256"), rows)
    )


def sign_off(report: Mapping[str, Any]) -> str:
    """Empty lines for whoever reviewed the log, to be filled in on paper."""
    lines = "".join(
        f"<li><span>{label}</span>{_LINE}</li>" for label in ("Name and role", "Date", "Findings", "Signature")
    )
    return (
        "<h2>Log review</h2><p>Reviewed: the log of "
        f"{code(report['log'])}, {text(report['records'])} records to {text(when(report['period']['last_t']))}.</p>"
        f'<ul class="lines">{lines}</ul>'
    )


def orientation(report: Mapping[str, Any]) -> str:
    """Where a reviewer may look for what; the same on every page."""
    return f"<h2>Orientation only</h2><p>{text(ORIENTATION_NOTE)}</p>" + table(
        ("rule", "about", "parts of this report"), ORIENTATION
    )

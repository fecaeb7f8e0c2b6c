"""The audit report as one HTML page: no script, nothing fetched, printable, readable on a phone and in dark mode.

Every value comes from records that other parties helped to write: all of it passes `text`, which spells out control
and bidirectional characters and escapes HTML (threat T37). The page forbids scripts and fetching by its own policy too.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fedsilo.edge.audit_transcripts import findings_of
from fedsilo.launch.output import plain

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6675; --line: #d5dbe3; --paper: #fff; --band: #f3f5f8;
  --good: #14683a; --good-band: #e2f3e8; --bad: #9c1c1c; --bad-band: #fbe6e4; --bar: #4a78b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa6b5; --line: #37414e; --paper: #14181e;
  --band: #1d232b; --good: #7fd6a2; --good-band: #173425; --bad: #ff9d94; --bad-band: #43201f; --bar: #6f9fe0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; padding-bottom: .25rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft { color: var(--soft); }
.code { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; font-size: .86em;
  overflow-wrap: break-word; }
.long { overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: .1rem .6rem; border-radius: .3rem; font-weight: 600; }
.good { color: var(--good); background: var(--good-band); }
.bad { color: var(--bad); background: var(--bad-band); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0;
  padding: 0; list-style: none; }
.facts li { background: var(--band); border-radius: .4rem; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.facts span { color: var(--soft); font-size: .86rem; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem 1rem .35rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; }
th:last-child, td:last-child { padding-right: 0; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
.bar { display: block; height: .4rem; margin-top: .25rem; border-radius: .2rem; background: var(--bar); }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0; max-width: 46rem; }
ul.plain { margin: .4rem 0; padding-left: 1.2rem; }
@media (max-width: 40rem) {
  body { padding: 1rem .9rem 3rem; }
  table, tbody, tr, td { display: block; width: 100%; }
  thead { position: absolute; left: -100vw; }
  tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  td, .number { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0;
    text-align: right; white-space: normal; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; }
  td > * { min-width: 0; }
}
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --band: #f3f3f3; --good: #0a4a26; --bad: #7a0f0f; }
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  h2, h3 { break-after: avoid; } tr, li, dd { break-inside: avoid; }
}
"""

_LONG_CHARACTERS = 32  # what is longer may be broken anywhere, so that no name makes a table wider than the page

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
"""


def page(report: Mapping[str, Any]) -> str:
    """The whole page for a value of `fedsilo.edge.audit_report.audit_report`."""
    title = f"Audit report: {text(report['log'])}"
    sections = (
        _top, _left, _denials, _policies, _capacity, _approvals, _verification, _retention, _incidents, _identities,
        _promises,
    )  # fmt: skip
    body = "\n".join(section(report) for section in sections)
    return f"{_HEAD}<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"


def text(value: Any) -> str:
    """Any value as harmless HTML text."""
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    elif isinstance(value, int):
        return f"{value:,}"
    elif isinstance(value, dict | list | tuple):
        value = json.dumps(value, ensure_ascii=False)
    return html.escape(plain(str(value)).replace("\n", " "), quote=True)


# ---- pieces --------------------------------------------------------------------------------------------


class Markup(str):
    """HTML that was made here; anything else that a cell holds is escaped."""


def _code(value: Any) -> Markup:
    return Markup(f'<span class="code{" long" if _is_long(value) else ""}">{text(value)}</span>')


def _is_long(value: Any) -> bool:
    return any(len(word) > _LONG_CHARACTERS for word in str(value).split())


def _digest(value: str) -> Markup:
    """The first 16 characters; the JSON file has all of them."""
    return _code(value[:16] + ("…" if len(value) > 16 else "")) if value else Markup(_none())


def _verdict(good: bool, words: str) -> Markup:
    return Markup(f'<span class="verdict {"good" if good else "bad"}">{text(words)}</span>')


def _none() -> str:
    return '<span class="soft">-</span>'


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, total: Sequence[Any] | None = None) -> str:
    """A table; a column of numbers is one whose cells all are. On a phone each row becomes a card."""
    cells = [list(row) for row in rows]
    if not cells:
        return '<p class="soft">None.</p>'
    numeric = [all(isinstance(row[column], int) for row in cells) for column in range(len(header))]
    mark = [' class="number"' if is_number else "" for is_number in numeric]
    lines = [f"<th{mark[column]}>{text(name)}</th>" for column, name in enumerate(header)]
    body = [f"<tr>{_cells(header, row, mark)}</tr>" for row in cells]
    if total is not None:
        body.append(f'<tr class="total">{_cells(header, total, mark)}</tr>')
    return f"<table><thead><tr>{''.join(lines)}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cells(header: Sequence[str], row: Sequence[Any], mark: Sequence[str]) -> str:
    shown = (_shown(value) for value in row)
    return "".join(
        f'<td{mark[column]} data-label="{text(header[column])}"><span>{value}</span></td>'
        for column, value in enumerate(shown)
    )


def _shown(value: Any) -> str:
    if isinstance(value, Markup):
        return value
    made = text(value)
    if _is_long(value):
        return f'<span class="long">{made}</span>'
    return made or _none()


def _when(milliseconds: int) -> str:
    if not milliseconds:
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _size(count: float, unit: str = "bytes") -> str:
    """A count of bytes or bits in a unit that a person can compare."""
    amount = count / 8 if unit == "bits" else count
    for name, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.1f} {name}"
    return f"{amount:.0f} bytes"


# ---- sections ------------------------------------------------------------------------------------------


def _top(report: Mapping[str, Any]) -> str:
    verified = all(item["verified"] for item in report["verification"])
    total, period = report["left_total"], report["period"]
    denied = sum(item["decisions"]["deny"] for item in (*report["left"], *report["arrived"]))
    words = "every log given verifies" if verified else "NOT VERIFIED: see below before you read on"
    warning = ""
    if not report["complete"]:
        warning = f"<p>{_verdict(False, 'incomplete')} Counted only up to damage: {text(report['unreadable'])}</p>"
    facts = (
        (f"{total['messages']:,}", "messages left"),
        (_size(total["bytes"]), "left, payload bytes"),
        (f"{denied:,}", "messages denied"),
        (f"{len(report['approvals']):,}", "releases held for people"),
        (f"{len(report['halts']):,}", "halts and their ends"),
        ("off", "differential privacy"),
    )
    tiles = "".join(f"<li><b>{text(value)}</b><span>{text(label)}</span></li>" for value, label in facts)
    return (
        f"<h1>What left {text(report['log'])}, and who allowed it</h1>"
        f'<p class="soft">{_code(report["origin"])} · {text(report["records"])} audit records · '
        f"{text(_when(period['first_t']))} to {text(_when(period['last_t']))}</p>"
        f"<p>{_verdict(verified, words)}</p>{warning}"
        f'<ul class="facts">{tiles}</ul>'
    )


def _left(report: Mapping[str, Any]) -> str:
    rows = [
        (_code(item["kind"]), item["messages"], item["bytes"], *item["decisions"].values(), item["indeterminate"])
        for item in report["left"]
    ]
    header = ("kind", "messages", "bytes", "allowed", "denied", "held", "outcome unknown")
    total = ("all", report["left_total"]["messages"], report["left_total"]["bytes"],
             *(sum(row[column] for row in rows) for column in range(3, 7)))  # fmt: skip
    runs: dict[str, list[int]] = {}
    for item in report["left_by_run"]:
        seen = runs.setdefault(item["run"], [0, 0])
        seen[0], seen[1] = seen[0] + item["messages"], seen[1] + item["bytes"]
    by_run = [(_code(run) if run else "outside any run", *counts) for run, counts in sorted(runs.items())]
    arrived = [(_code(item["kind"]), *item["decisions"].values()) for item in report["arrived"]]
    return (
        "<h2>What left, by kind</h2>"
        "<p>Messages and bytes are counted from the records that say a message was sent; verdicts from the decisions "
        "before it. Bytes are those of the payload, without transport.</p>"
        + _table(header, rows, total=total if rows else None)
        + "<h3>By run</h3>"
        + _table(("run", "messages", "bytes"), by_run)
        + "<h3>What came in</h3>"
        + _table(("kind", "allowed", "denied", "held"), arrived)
    )


def _denials(report: Mapping[str, Any]) -> str:
    rows = [
        (item["direction"], _code(item["kind"]), _code(item["reason"]), item["count"], item["first"], item["last"])
        for item in report["denials"]
    ]
    return (
        "<h2>Denied, by reason</h2><p>A message denied for two reasons counts under both. "
        "The last two columns are record numbers.</p>"
        + _table(("direction", "kind", "reason", "times", "first record", "last record"), rows)
    )


def _bits(policy: Mapping[str, Any]) -> str:
    bits = policy["bits_a_round"]
    return "" if bits is None else text(f"; at most {_size(bits, 'bits')} a round for whoever owns the trainer")


def _consent(policy: Mapping[str, Any]) -> str:
    """Who let a looser policy come into force; nothing for one that needed nobody."""
    if not (policy["proposer"] or policy["approvers"]):
        return ""
    who = f"Proposed by {policy['proposer'] or 'nobody'}, approved by {', '.join(policy['approvers']) or 'nobody'}"
    return f"<p>{text(who)}; proposal {_digest(policy['proposal'])}</p>"


def _policies(report: Mapping[str, Any]) -> str:
    parts = ["<h2>Policy versions</h2>"]
    if not report["policies"]:
        return parts[0] + '<p class="soft">No record names a policy.</p>'
    for number, item in enumerate(report["policies"], 1):
        mode = f", mode {text(item['mode'])}" if item["mode"] else ""
        parts.append(
            f"<h3>{number}. {text(item['name'] or 'unnamed')}{mode}</h3>"
            f"<p>{_code(item['effective'])}<br>loaded {text(_when(item['t']))}, record {text(item['seq'])}; "
            f"loaded, at a start or anew: {text(item['loads'])}; "
            f"decisions by it: {text(item['decisions'])}{_bits(item)}</p>" + _consent(item)
        )
        if item["changes"] is not None:
            changes = [
                (_code(row["field"]), text_of(row["before"]), text_of(row["after"]), _direction(row["direction"]))
                for row in item["changes"]
            ]
            parts.append(
                "<p>Against the version before:</p>"
                + (
                    _table(("field", "before", "after", "direction"), changes)
                    if changes
                    else "<p>Nothing that the rules see.</p>"
                )
            )
        elif number > 1:
            parts.append('<p class="soft">What it changed is not shown: both files must be given.</p>')
    for digest in report["policies_not_loaded"]:
        parts.append(f"<p>Given, but never loaded according to this log: {_code(digest)}</p>")
    return "".join(parts)


def text_of(value: Any) -> str:
    """A policy value in a cell: a long list as its beginning and its length."""
    if isinstance(value, list) and len(value) > 6:
        return f"{json.dumps(value[:6], ensure_ascii=False)[:-1]}, ... {len(value)} items]"
    return str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _direction(direction: str) -> Markup:
    return _verdict(direction in ("tighter", "cosmetic"), direction)


def _capacity(report: Mapping[str, Any]) -> str:
    found = report["capacity"]
    head = (
        "<h2>The most that could leave in one round</h2><p>Arithmetic, not a measurement: what an attacker who owns "
        "the trainer could hide in values that the policy in force leaves free. An upper bound.</p>"
    )
    if not found["computed"]:
        return f'{head}<p class="soft">Not computed: {text(found["why"])}.</p>'
    most = max((row["bits"] for row in found["rows"]), default=0.0) or 1.0
    rows = [
        (
            _code(row["kind"]),
            Markup(
                f"{text(round(row['bits']))} bits, {text(_size(row['bits'], 'bits'))}"
                f'<span class="bar" style="width:{max(1.0, 100 * row["bits"] / most):.1f}%"></span>'
            ),
            row["because"],
        )
        for row in found["rows"]
    ]
    total = (
        f"<p><b>{text(round(found['bits']))} bits a round</b> ({text(_size(found['bits'], 'bits'))}) under policy "
        f"{_digest(found['policy'])}; {text(found['note'])}.</p>"
    )
    return head + total + _table(("kind", "at most", "because"), rows)


def _approvals(report: Mapping[str, Any]) -> str:
    rows = []
    for item in report["approvals"]:
        answers = Markup("<br>".join(_answer(answer) for answer in item["answers"]))
        place = f"{item['run']}, round {item['round']}" if item["run"] else "-"
        rows.append(
            (_code(item["release"]), _code(item["kind"]), place, item["bytes"], _digest(item["digest"]), item["state"],
             answers)
        )  # fmt: skip
    persons = [
        (item["person"], _digest(item["certificate"]),
         ", ".join(f"{_ANSWERS[name]} {count}" for name, count in item["answers"].items()))
        for item in report["persons"]
    ]  # fmt: skip
    return (
        "<h2>Who approved what</h2><p>Each answer is signed by the person's certificate under the site's own CA, for "
        "exactly the digest shown. How many people a release needs stands in the policy.</p>"
        + _table(("release", "kind", "run", "bytes", "digest", "state", "answers"), rows)
        + ("<h3>People</h3>" + _table(("person", "certificate", "answers"), persons) if persons else "")
    )


_ANSWERS = {"request": "asked", "grant": "approved", "deny": "rejected", "expire": "expired"}


def _answer(answer: Mapping[str, Any]) -> str:
    who = f" by {answer['person']}" if "person" in answer else ""
    why = f" ({', '.join(answer['reasons'])})" if answer["reasons"] else ""
    return text(f"{_when(answer['t'])}: {_ANSWERS[answer['answer']]}{who}{why}")


def _rounds(report: Mapping[str, Any]) -> str:
    """What was signed before each round, and who signed two things; nothing for a log without rounds."""
    found = "".join(f"<p>{_verdict(False, sentence)}</p>" for sentence in findings_of(report["verification"]))
    rows = [
        (
            row["run"],
            row["round"],
            _digest(row["sha256"]),
            f"{len(row['signed'])} of {len(row['silos'])}: {', '.join(row['signed'])}",
            ", ".join(row["keys_not_vouched_for"]),
            ", ".join(row["survivors"]),
            _digest(row["aggregate"]) if row["aggregate"] else "",
            f"{row['logs_alike']} of {len(report['verification'])}",
        )
        for row in report["rounds"]
    ]
    if not rows:
        return found
    return (
        f"{found}<h3>Transcripts of rounds</h3>"
        "<p>Plan, policies, base adapter and public set of a round, as silos signed them before they trained. Where "
        "only this log itself, or nobody, knows a signer's key, the signature proves nothing of that signer.</p>"
        + _table(("run", "round", "transcript", "signed by", "keys it knows alone", "of", "aggregate", "in logs"), rows)
    )


def _verification(report: Mapping[str, Any]) -> str:
    rows = [
        (
            item["log"],
            _verdict(item["verified"], "verified" if item["verified"] else "NOT VERIFIED"),
            item["size"],
            item["unsigned"],
            max(item["cosigned"].values(), default=0),
            _digest(item["key"]),
        )
        for item in report["verification"]
    ]
    problems = "".join(
        f"<li>{text(item['log'])}: {text(problem)}</li>"
        for item in report["verification"]
        for problem in item["problems"]
    )
    witness = report["witness"]
    demanded = witness["demanded"]
    asked = (
        f"the policy in force demands {demanded['min_witnesses']} of {' and '.join(demanded['witnesses'])} before a "
        "further round opens"
        if demanded
        else "the file of the policy in force was not given, so what it demands is not known here"
    )
    forks = ", ".join(map(str, map(_code, witness["two_histories"])))
    by = ", ".join(f"{_code(name)} up to record {text(size)}" for name, size in witness["cosigned_by"].items())
    others = ", ".join(
        f"{_code(item['origin'])} at {text(item['size'])} records" for item in witness["countersigned_for_others"]
    )
    if len(report["verification"]) == 1:
        alone = "<p>Only this log was given. Another party's log would show whether its end was dropped.</p>"
    else:
        alone = ""
    return (
        "<h2>Verification and witnesses</h2>"
        + _table(("log", "result", "records", "not signed yet", "countersigned to", "key"), rows)
        + (f'<ul class="plain">{problems}</ul>' if problems else "")
        + alone
        + f"<p>Countersigned by: {by or 'nobody; its newest records rest on this site alone'}.</p>"
        + f"<p>This site countersigned: {others or 'nobody'}.</p>"
        + "<h3>How many parties vouch for how much</h3>"
        + _table(("parties", "vouch for the first records, up to"), witness["vouched"])
        + f"<p>{text(asked[0].upper() + asked[1:])}.</p>"
        + (
            f"<p>{_verdict(False, 'two histories')} Somebody signed two logs; kept as evidence: {forks}.</p>"
            if forks
            else ""
        )
        + _rounds(report)
        + '<p class="soft">Compare each key with the one its owner gave you by another way. Do it yourself: '
        '<span class="code">fedsilo audit verify LOG...</span></p>'
    )


def _retention(report: Mapping[str, Any]) -> str:
    kept = report["retention"]
    rows = [
        (item["seq"], _when(item["t"]), item["person"], _digest(item["certificate"]), item["kind"], item["decision"])
        for item in kept["reads"]
    ]
    more = kept["reads_total"] - len(rows)
    hashes = f"Of the first {text(kept['leaf_hashes_only'])} records leaf hashes only are left. "
    return (
        "<h2>Archived payloads and retention</h2>"
        f"<p>{hashes if kept['leaf_hashes_only'] else ''}{text(kept['payloads_deleted'])} archived payloads "
        f"({text(_size(kept['bytes_deleted']))}) were deleted.</p>"
        "<h3>Who read archived payloads</h3>"
        + _table(("record", "when", "person", "certificate", "kind", "decision"), rows)
        + (f"<p>{text(more)} more are in the log.</p>" if more else "")
    )


def _incidents(report: Mapping[str, Any]) -> str:
    rows = [
        (item["seq"], _when(item["t"]), _code(item["event"]), ", ".join(item["reasons"]),
         ", ".join(f"{name} {value}" for name, value in item["detail"].items()))
        for item in report["incidents"]
    ]  # fmt: skip
    more = report["incidents_total"] - len(rows)
    return (
        "<h2>Halts and other incidents</h2>"
        + _table(("record", "when", "event", "reasons", "detail"), rows)
        + (f"<p>{text(more)} more are in the log.</p>" if more else "")
    )


def _identities(report: Mapping[str, Any]) -> str:
    own = [
        (_code(item["identity"]), "wrote this log", item["records"], _when(item["first_t"]), _when(item["last_t"]))
        for item in report["identities"]
    ]
    peers = [(_code(item["identity"]), "the other side", item["records"], "", "") for item in report["peers"]]
    programs = [(item["version"], _digest(item["code"]), item["starts"]) for item in report["programs"]]
    keys = [
        (item["seq"], _when(item["t"]), _code(item["event"]), text_of(item["detail"])) for item in report["key_events"]
    ]
    return (
        "<h2>Identities seen</h2>"
        + _table(("identity", "as", "records", "first", "last"), own + peers)
        + "<h3>Programs</h3>"
        + _table(("version", "code", "starts"), programs)
        + ("<h3>Keys</h3>" + _table(("record", "when", "event", "detail"), keys) if keys else "")
    )


def _promises(report: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(words)}</dd>" for name, words in report["residuals"].items())
    return (
        f"<h2>Differential privacy</h2><p>{text(report['dp'])}.</p>"
        f"<h2>What this report cannot rule out</h2><dl>{items}</dl>"
        '<p class="soft">Made by <span class="code">fedsilo audit report</span> from the logs alone. Every number on '
        "this page is in report.json.</p>"
    )

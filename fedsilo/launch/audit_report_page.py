"""The audit report as one HTML page: no script, nothing fetched, printable, readable on a phone and in dark mode.

Every value comes from records that other parties helped to write: all of it passes `text`, which spells out control
and bidirectional characters and escapes HTML (threat T37). The page forbids scripts and fetching by its own policy too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedsilo.edge.audit_counting import OTHERS
from fedsilo.edge.audit_orders import ORDERS_IN_WORDS, orders_in_words
from fedsilo.launch import audit_report_checks as checks
from fedsilo.launch import audit_report_forms as forms
from fedsilo.launch.audit_report_markup import (
    HEAD,
    STYLE,
    Markup,
    badge,
    code,
    digest,
    further,
    size,
    table,
    text,
    verdict,
    when,
)
from fedsilo.launch.audit_report_words import words_of


def page(report: Mapping[str, Any]) -> str:
    """The whole page for a value of `fedsilo.edge.audit_report.audit_report`."""
    title = f"Audit report: {text(report['log'])}"
    sections = (
        _top, _left, _denials, _policies, _capacity, _approvals, _unasked, forms.data_inventory,
        checks.verification, _retention, _incidents, _identities,
        forms.test_evidence, _promises, forms.sign_off, forms.orientation, _end,
    )  # fmt: skip
    body = "\n".join(section(report) for section in sections)
    return f"{HEAD}<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"


# ---- sections ------------------------------------------------------------------------------------------


def _top(report: Mapping[str, Any]) -> str:
    period = report["period"]
    denied = sum(item["decisions"]["deny"] for item in (*report["left"], *report["arrived"]))
    counted = report["left_counted"]
    total = report["left_total"] if counted else report["arrived_total"]
    warning = checks.at_the_top(report)
    if report["unreadable"]:
        warning += f"<p>{verdict(False, 'incomplete')} Counted only up to damage: {text(report['unreadable'])}</p>"
    since = ""
    if first := report["counted_from"]:
        since = f", from record {first} on"
        warning += (
            f"<p>{badge('warn', f'counted from record {first} on')} The {text(first)} records before it are gone: "
            "what they told is in no number on this page. A report made before that has it.</p>"
        )
    if trouble := report["signature"]["trouble"]:
        warning += f"<p>{verdict(False, trouble)}</p>"
    if not counted:
        warning += (
            "<p><b>This log has no records of what its owner sent.</b> A coordinator's log holds what came in; what a "
            "coordinator sent stands in the silos' logs. What is counted here is what came in.</p>"
        )
    way = "left" if counted else "came in"
    facts = (
        (f"{total['messages']:,}", f"messages {way}{since}"),
        (size(total["bytes"]), f"{way}, payload bytes{since}"),
        (f"{denied:,}", "messages denied"),
        (f"{report['donors_dropped_total']:,}", "answers of other sites dropped"),
        (f"{report['approvals_total']:,}", "releases held for people"),
        (f"{report['halts_total']:,}", "halts and their ends"),
        ("off", "differential privacy"),
    )
    tiles = "".join(f"<li><b>{text(value)}</b><span>{text(label)}</span></li>" for value, label in facts)
    title = (
        f"What left {text(report['log'])}, and who allowed it" if counted else f"What came in at {text(report['log'])}"
    )
    return (
        f"<h1>{title}</h1>"
        f'<p class="soft">{code(report["origin"])} · {text(report["records"])} audit records · '
        f"{text(when(period['first_t']))} to {text(when(period['last_t']))}</p>"
        f"<p><b>{text(report['in_words'])}</b></p>"
        f"{warning}"
        f'<ul class="facts">{tiles}</ul>'
    )


def _kind(kind: str) -> Markup:
    """A kind, and under it what it is for and may hold."""
    words = "further kinds, counted together" if kind == OTHERS else words_of(kind)
    return Markup(f'{code(kind)}<span class="words">{text(words)}</span>')


def _left(report: Mapping[str, Any]) -> str:
    rows = [
        (_kind(item["kind"]), item["messages"], item["bytes"], *item["decisions"].values(), item["indeterminate"])
        for item in report["left"]
    ]
    header = ("kind", "messages", "bytes", "allowed", "denied", "held", "outcome unknown")
    runs: dict[str, list[int]] = {}
    for item in report["left_by_run"]:
        seen = runs.setdefault(item["run"], [0, 0])
        seen[0], seen[1] = seen[0] + item["messages"], seen[1] + item["bytes"]
    by_run = [(code(run) if run else "outside any run", *counts) for run, counts in sorted(runs.items())]
    if report["left_counted"]:
        total = ("all", report["left_total"]["messages"], report["left_total"]["bytes"],
                 *(sum(row[column] for row in rows) for column in range(3, 7)))  # fmt: skip
        left = (
            "<h2>What left, by kind</h2>"
            "<p>Messages and bytes are counted from the records that say a message was sent; verdicts from the "
            "decisions before it. Bytes are those of the payload, without transport.</p>"
            + table(header, rows, total=total if rows else None)
            + "<h3>By run</h3>"
            + table(("run", "messages", "bytes"), by_run)
            + "<h3>What came in</h3>"
        )
    else:
        left = "<h2>What came in, by kind</h2><p>What left is not counted: this log has no records of it.</p>"
    arrived = [
        (_kind(item["kind"]), item["messages"], item["bytes"], *item["decisions"].values())
        for item in report["arrived"]
    ]
    return left + table(("kind", "messages", "bytes", "allowed", "denied", "held"), arrived) + _arrived_from(report)


def _arrived_from(report: Mapping[str, Any]) -> str:
    """Who sent how much, where several did."""
    found: dict[str, list[int]] = {}
    for item in report["arrived_from"]:
        seen = found.setdefault(item["identity"], [0, 0])
        seen[0], seen[1] = seen[0] + item["messages"], seen[1] + item["bytes"]
    if len(found) < 2:  # one says nothing that the table above does not
        return ""
    rows = [(code(who) if who else "not known", *counts) for who, counts in sorted(found.items())]
    return "<h3>What came in, by sender</h3>" + table(("from", "messages", "bytes"), rows)


_WAYS = {"egress": "on its way out", "ingress": "on its way in"}


def _denials(report: Mapping[str, Any]) -> str:
    rows = [
        (
            _WAYS.get(item["direction"], item["direction"]),
            code(item["kind"]),
            code(item["reason"]),
            item["count"],
            item["first"],
            item["last"],
        )
        for item in report["denials"]
    ]
    return (
        "<h2>Denied, by reason</h2><p>A message denied for two reasons counts under both. "
        "The last two columns are record numbers.</p>"
        + table(("direction", "kind", "reason", "times", "first record", "last record"), rows)
    )


def _bits(policy: Mapping[str, Any]) -> str:
    bits = policy["bits_a_round"]
    return "" if bits is None else text(f"; at most {size(bits, 'bits')} a round for whoever owns the trainer")


def _consent(policy: Mapping[str, Any]) -> str:
    """Who let a looser policy come into force; nothing for one that needed nobody."""
    if not (policy["proposer"] or policy["approvers"]):
        return ""
    who = f"Proposed by {policy['proposer'] or 'nobody'}, approved by {', '.join(policy['approvers']) or 'nobody'}"
    return f"<p>{text(who)}; proposal {digest(policy['proposal'])}</p>"


def _policies(report: Mapping[str, Any]) -> str:
    parts = ["<h2>Policy versions</h2>"]
    if not report["policies"]:
        return parts[0] + '<p class="soft">No record names a policy.</p>'
    before = 0
    for item in report["policies"]:
        number = item["number"]
        if number - before > 1:
            parts.append(
                f"<p>Versions {text(before + 1)} to {text(number - 1)} are in the log, and not listed here.</p>"
            )
        before = number
        mode = f", mode {text(item['mode'])}" if item["mode"] else ""
        parts.append(
            f"<h3>{text(number)}. {text(item['name'] or 'unnamed')}{mode}</h3>"
            f"<p>{code(item['effective'])}<br>loaded {text(when(item['t']))}, record {text(item['seq'])}; "
            f"loaded, at a start or anew: {text(item['loads'])}; "
            f"decisions by it: {text(item['decisions'])}{_bits(item)}</p>" + _consent(item)
        )
        if item["changes"] is not None:
            changes = [
                (code(row["field"]), text_of(row["before"]), text_of(row["after"]), _direction(row["direction"]))
                for row in item["changes"]
            ]
            parts.append(
                "<p>Against the version before:</p>"
                + (
                    table(("field", "before", "after", "direction"), changes)
                    if changes
                    else "<p>Nothing that the rules see.</p>"
                )
            )
        elif number > 1:
            parts.append('<p class="soft">What it changed is not shown: both files must be given.</p>')
    for given in report["policies_not_loaded"]:
        parts.append(f"<p>Given, but never loaded according to this log: {code(given)}</p>")
    return "".join(parts)


def text_of(value: Any) -> str:
    """A policy value in a cell: a long list as its beginning and its length."""
    if isinstance(value, list) and len(value) > 6:
        return f"{json.dumps(value[:6], ensure_ascii=False)[:-1]}, ... {len(value)} items]"
    return str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _direction(direction: str) -> Markup:
    return verdict(direction in ("tighter", "cosmetic"), direction)


def _capacity(report: Mapping[str, Any]) -> str:
    found = report["capacity"]
    head = (
        "<h2>The most that could leave in one round</h2><p>Arithmetic, not a measurement: what an attacker who owns "
        "the trainer could hide in values that the policy in force leaves free. An upper bound.</p>"
    )
    head += (
        "<p>Not counted: what the timing of messages can carry. Beside each bound stands what schemes that the tests "
        'plant and decode carry out under this policy; <span class="code">docs/explain/border-figures.md</span>.</p>'
    )
    if not found["computed"]:
        return f'{head}<p class="soft">Not computed: {text(found["why"])}.</p>'
    most = max((row["bits"] for row in found["rows"]), default=0.0) or 1.0
    rows = [
        (
            code(row["kind"]),
            Markup(
                f"{text(round(row['bits']))} bits, {text(size(row['bits'], 'bits'))}"
                f'<span class="bar" style="width:{max(1.0, 100 * row["bits"] / most):.1f}%"></span>'
            ),
            row["because"],
            f"{round(row['planted_bits']):,} bits: {row['planted']}"
            if row["planted"]
            else "none was planted in this kind",
        )
        for row in found["rows"]
    ]
    total = (
        f"<p><b>{text(round(found['bits']))} bits a round</b> ({text(size(found['bits'], 'bits'))}) under policy "
        f"{digest(found['policy'])}; {text(found['note'])}.</p>"
    )
    return head + total + table(("kind", "at most", "because", "planted schemes"), rows)


def _approvals(report: Mapping[str, Any]) -> str:
    rows = []
    for item in report["approvals"]:
        answers = Markup("<br>".join(_answer(answer) for answer in item["answers"]))
        if (more := item["answers_total"] - len(item["answers"])) > 0:
            answers = Markup(f"{answers}<br>{text(more)} more answers are in the log")
        place = f"{item['run']}, round {item['round']}" if item["run"] else "-"
        rows.append(
            (code(item["release"]), code(item["kind"]), place, item["bytes"], digest(item["digest"]), _state(item),
             answers)
        )  # fmt: skip
    persons = [
        (item["person"], digest(item["certificate"]),
         ", ".join(f"{_ANSWERS[name]} {count}" for name, count in item["answers"].items()))
        for item in report["persons"]
    ]  # fmt: skip
    not_listed = ", ".join(f"{_ANSWERS[name]} {count}" for name, count in report["approvals_not_listed"].items())
    return (
        "<h2>Who approved what</h2><p>As the log records it: who answered, with which certificate, to exactly the "
        f"digest shown. {text(_signatures(report))} A release is granted only where a decision that allows it names "
        "its approvals; how many it needs is what the decision that held it asked for.</p>"
        + table(("release", "kind", "run", "bytes", "digest", "state", "answers"), rows)
        + (f"<p>Further releases are in the log, and not listed here: {text(not_listed)}.</p>" if not_listed else "")
        + ("<h3>People</h3>" + table(("person", "certificate", "answers"), persons) if persons else "")
    )


def _signatures(report: Mapping[str, Any]) -> str:
    """What is known of what people signed, over all the records of the log that keep it."""
    counts = report["verification"][0].get("orders", {})
    if not any(counts.values()):
        return "The log has no record of what a person ordered."
    return f"What people signed is kept in the log and was checked here: {orders_in_words(counts)}."


_ANSWERS = {
    "request": "asked", "grant": "approved", "deny": "rejected", "expire": "expired", "halt": "agreed to end a halt",
}  # fmt: skip
_STATES = {"held": "held", "granted": "granted", "refused": "approved, and denied by the rules",
           "rejected": "rejected", "expired": "expired"}  # fmt: skip


def _state(item: Mapping[str, Any]) -> Markup:
    """What became of a release, and on how many approvals."""
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
    told = text(": ".join(words[:2]) + "".join(f"; {each}" for each in words[2:]))
    if item["state"] in ("rejected", "expired") and decision is not None and decision["verdict"] == "allow":
        told += f" {verdict(False, 'allowed all the same')}"
    return Markup(told)


def _answer(answer: Mapping[str, Any]) -> str:
    who = f" by {answer['person']}" if "person" in answer else ""
    why = f" ({', '.join(answer['reasons'])})" if answer["reasons"] else ""
    note = f": \u201c{answer['note']}\u201d" if answer.get("note") else ""
    signed = f", {ORDERS_IN_WORDS[answer['order']]}" if answer.get("order") else ""
    return text(f"{when(answer['t'])}: {_ANSWERS[answer['answer']]}{who}{why}{note}{signed}")


def _unasked(report: Mapping[str, Any]) -> str:
    """What left and nobody was asked about, by the line of the policy that lets it."""
    if not report["left_counted"]:
        return ""
    rows = [
        (
            _kind(item["kind"]), item["messages"], item["bytes"],
            f"line {item['line']} of the {item['file']}" if item["line"] else "no line asks people about this kind",
            digest(item["policy"]), item["first"], item["last"],
        )
        for item in report["left_unasked"]
    ]  # fmt: skip
    header = ("kind", "messages", "bytes", "by which line", "of policy", "first record", "last record")
    lost = report["left_asked"]["not_told"]
    return (
        "<h2>Left without a person, by which line of the policy</h2>"
        "<p>Messages that were sent under a decision that names nobody's yes. The line is the one that says in which "
        "rounds people are asked; the last two columns are record numbers.</p>"
        + table(header, rows)
        + further(report["left_unasked_not_listed"], "messages were sent so by further lines")
        + further(lost, "messages were sent under decisions that are not in the log any more")
    )


def _retention(report: Mapping[str, Any]) -> str:
    kept = report["retention"]
    rows = [
        (item["seq"], when(item["t"]), item["person"], digest(item["certificate"]), item["kind"], item["decision"])
        for item in kept["reads"]
    ]
    hashes = f"Of the first {text(kept['leaf_hashes_only'])} records leaf hashes only are left. "
    return (
        "<h2>Archived payloads and retention</h2>"
        f"<p>{hashes if kept['leaf_hashes_only'] else ''}{text(kept['payloads_deleted'])} archived payloads "
        f"({text(size(kept['bytes_deleted']))}) were deleted.</p>"
        "<h3>Who read archived payloads</h3>"
        + table(("record", "when", "person", "certificate", "kind", "decision"), rows)
        + further(kept["reads_total"] - len(rows), "are in the log")
    )


def _incidents(report: Mapping[str, Any]) -> str:
    header = ("record", "when", "event", "kind", "reasons", "detail")
    grants = [
        (item["seq"], when(item["t"]), code(item["kind"]), item["person"], digest(item["certificate"]),
         when(item["since_seconds"] * 1000))
        for item in report["halt_grants"]
    ]  # fmt: skip
    agreed = (
        "<h3>Who agreed to end a halt</h3><p>As the log records it; how many must agree stands in the policy. The halt "
        "is over where a record says release.</p>"
        + table(("record", "when", "kind", "person", "certificate", "halted since"), grants)
        + further(report["halt_grants_total"] - len(grants), "are in the log")
    )
    return (
        "<h2>Halts and other incidents</h2><h3>Halts and their ends</h3>"
        + table(header, map(_event, report["halts"]))
        + further(report["halts_total"] - len(report["halts"]), "are in the log")
        + (agreed if grants else "")
        + "<h3>Other incidents</h3>"
        + table(header, map(_event, report["incidents"]))
        + further(report["incidents_total"] - len(report["incidents"]), "are in the log")
        + _donors(report)
    )


def _event(item: Mapping[str, Any]) -> tuple[Any, ...]:
    detail = ", ".join(f"{name} {value}" for name, value in item["detail"].items())
    return (
        item["seq"], when(item["t"]), code(item["event"]), code(item["kind"]) if item["kind"] else "",
        ", ".join(item["reasons"]), detail,
    )  # fmt: skip


def _donors(report: Mapping[str, Any]) -> str:
    """Answers of other sites that came in and that this site did not take."""
    rows = [
        (code(item["run"]), item["round"], code(item["of"]), item["answers"], item["first"], item["last"])
        for item in report["donors_dropped"]
    ]
    more = report["donors_dropped_total"] - sum(item["answers"] for item in report["donors_dropped"])
    return (
        "<h3>Answers of other sites that were dropped</h3><p>Answers to public prompts, as the coordinator passed them "
        "on. This site grades and screens each one itself, lets no site have more than its share, and trains on none "
        "that fails. The records do not say whether the site named or the coordinator made them so.</p>"
        + table(("run", "round", "answers said to be of", "dropped", "first record", "last record"), rows)
        + further(more, "were dropped")
    )


def _identities(report: Mapping[str, Any]) -> str:
    own = [
        (code(item["identity"]), "wrote this log", item["records"], when(item["first_t"]), when(item["last_t"]))
        for item in report["identities"]
    ]
    peers = [(code(item["identity"]), "the other side", item["records"], "", "") for item in report["peers"]]
    programs = [(item["version"], digest(item["code"]), item["starts"]) for item in report["programs"]]
    keys = [
        (item["seq"], when(item["t"]), code(item["event"]), text_of(item["detail"])) for item in report["key_events"]
    ]
    return (
        "<h2>Identities, certificates, keys</h2>"
        + table(("identity", "as", "records", "first", "last"), own + peers)
        + "<h3>Programs</h3>"
        + table(("version", "code", "starts"), programs)
        + forms.isolation(report)
        + forms.certificates(report)
        + checks.keys(report)
        + ("<h3>Key events</h3>" + table(("record", "when", "event", "detail"), keys) if keys else "")
        + further(report["key_events_total"] - len(keys), "are in the log, all of them older")
    )


def _promises(report: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(words)}</dd>" for name, words in report["residuals"].items())
    return (
        f"<h2>Differential privacy</h2><p>{text(report['dp'])}.</p>"
        f"<h2>What this report cannot rule out</h2><dl>{items}</dl>"
    )


def _end(report: Mapping[str, Any]) -> str:
    signature = report["signature"]
    signed = (
        f"<p>Signed by {code(signature['by'])} with the key {code(signature['key'])}: one signature, "
        '<span class="code">report.sha256.sig</span>, over the digests of all files.</p>'
        if signature["by"]
        else "<p>Not signed.</p>"
    )
    return (
        f'{signed}<p class="soft">Made by <span class="code">fedsilo audit report</span> from the logs, and from the '
        "files given to it. Every number on this page is in report.json. Names that this page counts under "
        f"{code(OTHERS)} are in the log.</p>"
    )

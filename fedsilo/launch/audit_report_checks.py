"""The page's part on proof: do the logs verify, who vouches for them, whose keys are these, what was signed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.edge.audit_transcripts import findings_of
from fedsilo.launch.audit_folders import verification_warnings
from fedsilo.launch.audit_report_markup import (
    Markup,
    badge,
    code,
    digest,
    further,
    none,
    table,
    text,
    verdict,
    whole,
)

_TOLD_MAX = 10  # at the top
_ROUNDS_MAX = 500
_PROBLEMS_MAX = 200


def at_the_top(report: Mapping[str, Any]) -> str:
    """One badge for all logs, and each finding and warning: nothing below may be read without them."""
    findings, warnings = findings_of(report["verification"]), verification_warnings(report["verification"])
    failed = [item["log"] for item in report["verification"] if not item["verified"]]
    if failed and not report["verification"][0]["verified"]:
        level, words = "bad", f"NOT VERIFIED: {', '.join(failed[:_TOLD_MAX])}: see below before you read on"
    elif failed:  # the log that all below is counted from is sound
        level = "warn"
        words = (
            f"{report['verification'][0]['log']} verifies; of the others given, not: {', '.join(failed[:_TOLD_MAX])}"
        )
    elif findings:
        level, words = "bad", "the logs are sound, and prove that somebody signed two things"
    elif warnings:
        level, words = "warn", "every log given verifies, with warnings"
    else:
        level, words = "good", "every log given verifies"
    lines = [f"<li>{verdict(False, each)}</li>" for each in findings[:_TOLD_MAX]]
    lines += [f"<li>{badge('warn', each)}</li>" for each in warnings[:_TOLD_MAX]]
    more = max(0, len(findings) - _TOLD_MAX) + max(0, len(warnings) - _TOLD_MAX)
    told = f'<ul class="plain">{"".join(lines)}</ul>' if lines else ""
    return f"<p>{badge(level, words)}</p>{told}{further(more, 'are in report.json, under warnings and findings')}"


def verification(report: Mapping[str, Any]) -> str:
    rows = [
        (
            item["log"],
            verdict(item["verified"], "verified" if item["verified"] else "NOT VERIFIED"),
            item["size"],
            item["unsigned"],
            max(item["cosigned"].values(), default=0),
        )
        for item in report["verification"]
    ]
    told = [(item["log"], problem) for item in report["verification"] for problem in item["problems"]]
    problems = "".join(f"<li>{text(log)}: {text(problem)}</li>" for log, problem in told[:_PROBLEMS_MAX])
    witness = report["witness"]
    demanded = witness["demanded"]
    asked = (
        f"the policy in force demands {demanded['min_witnesses']} of {' and '.join(demanded['witnesses'])} before a "
        "further round opens"
        if demanded
        else "the file of the policy in force was not given, so what it demands is not known here"
    )
    forks = ", ".join(map(str, map(code, witness["two_histories"])))
    by = ", ".join(f"{code(name)}: the first {text(size)}" for name, size in sorted(witness["cosigned_by"].items()))
    others = ", ".join(
        f"{code(item['origin'])} at {text(item['size'])} records" for item in witness["countersigned_for_others"]
    )
    if len(report["verification"]) == 1:
        alone = "<p>Only this log was given. Another party's log would show whether its end was dropped.</p>"
    else:
        alone = ""
    return (
        "<h2>Verification and witnesses</h2>"
        + table(("log", "result", "records", "of them not signed yet", "of them countersigned"), rows)
        + (f'<ul class="plain">{problems}</ul>' if problems else "")
        + further(len(told) - _PROBLEMS_MAX, "problems are in report.json")
        + alone
        + f"<p>Countersigned, of this log's records, by {by or 'nobody: they rest on this site alone'}.</p>"
        + f"<p>This site countersigned: {others or 'nobody'}.</p>"
        + "<h3>How many parties vouch for how much</h3>"
        + table(("parties", "vouch for the first records, up to"), witness["vouched"])
        + f"<p>{text(asked[0].upper() + asked[1:])}.</p>"
        + (
            f"<p>{verdict(False, 'two histories')} Somebody signed two logs; kept as evidence: {forks}.</p>"
            if forks
            else ""
        )
        + _rounds(report)
        + '<p class="soft">Do it yourself: <span class="code">fedsilo audit verify LOG...</span></p>'
    )


def keys(report: Mapping[str, Any]) -> str:
    """Whole keys, to be compared with those that their owners gave by another way."""
    rows = [
        (
            code(item["identity"]),
            whole(item["key"]),
            "this log's" if item["of_this_log"] else "taken down here",
            _known(item),
        )
        for item in report["keys"]
    ]
    return (
        "<h3>Keys to compare</h3><p>Every signature above rests on these keys. Compare all 64 digits with what the "
        "owner gave you by another way than this log; the owner reads its own with "
        '<span class="code">fedsilo certs show NAME.crt</span>, as signing_key.</p>'
        + table(("whose", "Ed25519 key", "as", "who else says so"), rows)
    )


def _known(item: Mapping[str, Any]) -> Markup:
    if item["own_log"] is False or item["pinned"] is False:
        other = "that party's own log" if item["own_log"] is False else "the policy in force"
        return verdict(False, f"{other} names another key")
    if item["of_this_log"]:
        return Markup(none())
    known = [
        words for there, words in ((item["own_log"], "its own log"), (item["pinned"], "the policy in force")) if there
    ]
    return Markup(text(" and ".join(known) or "nobody that was given here"))


def _rounds(report: Mapping[str, Any]) -> str:
    """What was signed before each round, and who signed two things; nothing for a log without rounds."""
    found = "".join(f"<p>{verdict(False, sentence)}</p>" for sentence in findings_of(report["verification"]))
    rows = [
        (
            row["run"],
            row["round"],
            digest(row["sha256"]),
            f"{len(row['signed'])} of {len(row['silos'])}: {', '.join(row['signed'])}",
            ", ".join(row["keys_not_vouched_for"]),
            ", ".join(row["survivors"]),
            digest(row["aggregate"]) if row["aggregate"] else "",
            f"{row['logs_alike']} of {len(report['verification'])}",
        )
        for row in report["rounds"][:_ROUNDS_MAX]
    ]
    if not rows:
        return found
    return (
        f"{found}<h3>What was signed before each round</h3>"
        "<p>A transcript is the plan, the policies, the base adapter and the public set of a round, which silos sign "
        "before they train. Where only this log itself, or nobody, knows a signer's key, the signature proves nothing "
        "of that signer.</p>"
        + table(
            (
                "run",
                "round",
                "transcript (SHA-256)",
                "silos that signed it",
                "whose key only this log knows",
                "whose updates entered the result",
                "result (SHA-256)",
                "same in how many logs",
            ),
            rows,
        )
        + further(len(report["rounds"]) - _ROUNDS_MAX, "rounds are in report.json")
    )

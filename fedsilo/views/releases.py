"""A held release as lines: the facts a person needs before answering, a finding whole, the payload, and the comparison
with the last release of its kind.

Nothing optional, nothing blank: where there is nothing yet, the words say so ("DP off", "first release, nothing to
compare"). Rules that look or deny have a line each and come first; rules that are ok share lines. Much of it comes from
further away than the daemon, a model's answers above all: each piece of such a text is a part of its own, so that the
one function that makes text safe sees all of it (threat T37); a long text is cut into lines first, never dropped. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsilo.control.answers import AnsweredPrompt, AnswerGiven, Comparison, Finding, Given, HeldPayload
from fedsilo.views import rule_words
from fedsilo.views.lines import (
    NOT_YET_KNOWN,
    Glyphs,
    Line,
    Part,
    bytes_text,
    clip,
    digest_text,
    duration_text,
    flow,
    line,
    moment_text,
    safe,
    table,
    wrap,
)
from fedsilo.views.state import HEX_DIGEST, HIDDEN, Release, Rule

LABEL_CELLS = 9
NOT_SENT = ("rejected", "denied", "expired", "missed")  # states of a release that takes nothing of a limit
NOT_TOLD = "the daemon does not say"
HIDDEN_IS = "hidden: not in this source"
HIDDEN_IN_SHARED = "hidden: not in a share-safe recording; this site's people record it with --include-local LOCAL"
_STYLES = {"ok": "ok", "look": "warn", "hold": "warn", "deny": "bad"}


def header(
    release: Release,
    cells: int,
    *,
    time: float,
    opened: Collection[str] | None = None,
    person: str = "",
    banner: str = "",
) -> list[Line]:
    """Return who asks for what until when, and what is unusual about it.

    Args:
        release: as it was shown.
        cells: of a line.
        time: of the daemon's clock, seconds since 1970.
        opened: ids of the findings that were opened here; None where there are no keys to open them.
        person: who looks, where that is known.
        banner: what is read in place of a daemon; empty for a daemon.
    """
    left = release.left_seconds(time)
    ends: Part = (f"expires in {duration_text(left)}", "warn" if left < 300 else "")
    if not left > 0:
        ends = ("EXPIRED", "bad") if left <= 0 else (f"expires: {NOT_YET_KNOWN}", "warn")
    if release.ended_at:
        time, ends = release.ended_at, (f"then {release.state}", "strong")
    digest = f"sha256:{release.digest if cells >= 140 else _digest(release)}"
    age = f"held {duration_text(release.held_seconds(time))}"
    who = f"{len(release.given)} of {release.approvers.needed} given" + (
        f": {', '.join(release.given)}" if release.given else ""
    )
    if "given" in release.hidden:
        who = f"{HIDDEN}, {release.approvers.needed} needed"
    no = "; ".join(
        f"{name} said no: {rule_words.reason_text(code) or NOT_TOLD}" + (f', "{note}"' if note else "")
        for name, code, note in release.refused
    )
    roles = " or ".join(release.approvers.roles) or (HIDDEN if "given" in release.hidden else NOT_TOLD)
    until = release.deferred_until(person, time) if person and not release.ended_at else 0.0
    put_off = [line((f"you put it off for {duration_text(until - time)}", "dim"))] if until else []
    why_hidden = HIDDEN_IN_SHARED if "share-safe" in banner else HIDDEN_IS
    return [
        *(wrap(why_hidden, cells, "dim") if release.hidden else []),
        *flow([line((release.id, "strong")), line((digest, "accent")), line(age), line(ends), *put_off], cells),
        *flow(
            [
                line(("asked by ", "dim"), release.asked_by or NOT_TOLD),
                line(("approvals ", "dim"), who, (f", by {roles}", "dim")),
                *_who_may(release, cells),
            ],
            cells,
        ),
        *(wrap(no, cells, "bad") if no else []),
        *labelled("FINDINGS", noticed(release, cells - LABEL_CELLS, opened)),
    ]


def _who_may(release: Release, cells: int) -> list[Line]:
    """Whom to ask, while somebody has to answer."""
    left = [name for name in release.approvers.people if name not in release.given]
    return [] if release.ended_at or not left else [clip(line(("may approve ", "dim"), ", ".join(left)), cells)]


def _digest(release: Release) -> str:
    return HIDDEN if "digest" in release.hidden else digest_text(release.digest)


def _missing(release: Release, field: str) -> str:
    """In place of a text that is empty: the source does not hold it, or its daemon does not say it."""
    return HIDDEN if field in release.hidden else NOT_TOLD


def leaves(release: Release, cells: int, *, form: bool = True) -> list[Line]:
    """Lines on what leaves and who can read it, then its kind, size and form, and where it goes. Without `form`,
    tensors, rank and type are left out where a sentence says what it is."""
    if "leaves" in release.hidden:
        return wrap(f"{HIDDEN}: its kind, its size, where it goes, and whose certificate is there", cells)
    seen = release.leaves.destination.certificate
    certificate = f"cert {seen[:12]}…{seen[-4:]} pinned" if seen else "cert not seen yet"
    at = release.leaves.destination.address or NOT_TOLD
    to = (
        [line(f"to {release.leaves.destination.name}"), line(f"at {at}")]
        if release.leaves.destination.name
        else [line(f"to {at}")]
    )
    rows: list[Line] = []
    pieces: list[Line] = []
    for kind in release.leaves.kinds:
        rows += wrap(kind.says, cells, "strong") if kind.says else []
        covered = "yes" if kind.covered_by_epsilon.lower() == "yes" else "NO"
        pieces += [
            line((kind.kind, "strong"), f" {bytes_text(kind.bytes)}"),
            line(("epsilon covers it: ", "dim"), (covered, "warn")),
            *(line(piece) for piece in kind.items.split(", ") if form or not kind.says),
        ]
    return [*rows, *flow([*pieces, *to, line((certificate, "dim"))], cells)]


def brief(release: Release, cells: int) -> list[Line]:
    """Return what leaves, and where to, in a line or two, for the dialog that asks."""
    kinds = ", ".join(f"{kind.kind} {bytes_text(kind.bytes)}" for kind in release.leaves.kinds)
    meant = [row for kind in release.leaves.kinds for row in wrap(kind.says, cells, "strong")]
    to = (
        f"{release.leaves.destination.name} at {release.leaves.destination.address}"
        if release.leaves.destination.name
        else release.leaves.destination.address or NOT_TOLD
    )
    return [*meant, *wrap(f"{kinds or NOT_TOLD} to {to}", cells)]


def stays(release: Release, cells: int) -> list[Line]:
    return wrap(", ".join(release.leaves.stays) or _missing(release, "leaves"), cells)


def policy_summary(release: Release, cells: int) -> list[Line]:
    if "policy" in release.hidden:
        return [line(HIDDEN)]
    counts: list[Part] = []
    for outcome in ("deny", "hold", "look", "ok"):
        number = release.count(outcome)
        if number or outcome != "hold":
            counts.append((f" {number} {outcome}", _STYLES[outcome] if number else "dim"))
    return flow([line((release.policy.name, "strong"), f" {digest_text(release.policy.digest)}"), line(*counts)], cells)


def rules(release: Release, cells: int, *, most: int) -> list[Line]:
    """Every rule in at most `most` lines, the loudest first; only ok rules may be left to the list behind `p`, and are
    counted."""
    loud = [rule for rule in release.rules if rule.outcome not in ("ok", "look")]
    loud.sort(key=lambda rule: rule.outcome != "deny")
    quiet = [rule for rule in release.rules if rule.outcome == "ok"]
    lines = [row for rule in loud for row in rule_lines(rule, cells)]
    # numbers with a limit say most; a rule that only says yes says it in its name
    quiet.sort(key=lambda rule: not rule_words.short(rule)[1])
    pieces = [_short(rule) for rule in quiet]
    for kept in range(len(pieces), -1, -1):
        rest = [line((f"and {len(pieces) - kept} more: p lists them", "dim"))] if kept < len(pieces) else []
        told = flow([*pieces[:kept], *rest], cells - 5, between=" · ")
        shown = [line(("ok   " if not index else "     ", "ok"), *row) for index, row in enumerate(told)]
        if len(lines) + len(shown) <= most or kept == 0:
            return [*lines, *shown]
    return lines


def rule_lines(rule: Rule, cells: int) -> list[Line]:
    """Return one rule with its measured value and limit, in words; a finding in its own words."""
    style = _STYLES.get(rule.outcome, "warn")
    text = rule_words.says(rule)
    if rule.outcome == "look":
        text = rule.measured or rule.rule
    rows = wrap(text, cells - 5, style if style != "ok" else "")
    return [line((f"{rule.outcome:5}" if index == 0 else "     ", style), *row) for index, row in enumerate(rows)]


def _short(rule: Rule) -> Line:
    name, told = rule_words.short(rule)
    # among the many that are ok a limit binds from above unless its words say otherwise
    told = told.replace(" of at most ", " of ")
    return line((f"{name} ", "dim"), told) if told else line((name, "dim"))


def budget(release: Release, cells: int) -> list[Line]:
    told = release.budget or _missing(release, "budget")
    return wrap(told + (": no privacy budget is claimed" if told == "DP off" else ""), cells)


def uses(release: Release, cells: int) -> list[Line]:
    """Lines on the counting limits of which the release takes much; one that did not leave was not counted."""
    if release.uses and release.state.partition(" ")[0] in NOT_SENT:
        return [line(("nothing was counted: it did not leave", "dim"))]
    if not release.uses:
        return []
    return flow([line(("takes", "dim")), *(line(piece) for piece in release.uses.split("; "))], cells)


def difference(release: Release, cells: int) -> list[Line]:
    text = release.difference or _missing(release, "difference")
    text = text.replace(" against round ", " vs round ").replace(" of this run", "")
    return flow([line(piece) for piece in text.split("; ")], cells)


def noticed(release: Release, cells: int, opened: Collection[str] | None = None) -> list[Line]:
    """Return what is unusual about it, which a person is asked to open before everything else."""
    rows: list[Line] = []
    if "policy" in release.hidden and not release.noticed:
        return wrap(f"{HIDDEN}: whether something unusual was found", cells)
    if release.noticed and not release.ended_at:
        left = release.not_opened(opened or ())
        count = f"{len(left)} not opened: f opens the next, A is off until then" if left else "each was opened"
        if opened is None:
            count = f"{len(left)}: each is read before a yes, and named with --ack-finding ID"
        rows += wrap(count, cells, "bad" if left else "ok")
    shown = [
        (one.says + (hit_brief(one, release) if one.code == "SCREEN_HIT" else ""), one.id in (opened or ()))
        for one in release.noticed
    ]
    told = {finding.says for finding in release.noticed}
    shown += [(rule.measured or rule.rule, False) for rule in release.rules
              if rule.outcome == "look" and rule.measured not in told]  # fmt: skip
    for words, read in shown:
        text = wrap(words, cells - 5, "" if read else "warn")
        label: Part = ("read ", "dim") if read else ("look ", "warn")
        rows += [line(label if index == 0 else "     ", *row) for index, row in enumerate(text)]
    return rows


def unread_text(left: Collection[Finding]) -> str:
    return f"{len(left)} finding{'' if len(left) == 1 else 's'} not opened"


def screened(release: Release, cells: int) -> list[Line]:
    """Return the results of the text screens."""
    told = (release.findings or _missing(release, "findings")).removeprefix("screens ")
    return wrap(told, cells, "warn" if release.unscreened else "")


def findings(release: Release, cells: int) -> list[Line]:
    """Return the number of unusual facts, which comes before everything else, and the results of the screens."""
    told = (release.findings or _missing(release, "findings")).removeprefix("screens ")
    number = release.count("look")
    style = "warn" if number or release.unscreened else ""
    return wrap(f"{number} above; {told}" if number else told, cells, style)


def answers(release: Release, cells: int) -> list[Line]:
    if release.ended_at:
        return labelled("now", wrap(f"{release.state}; nothing can be answered any more", cells - LABEL_CELLS))
    rows: list[Line] = []
    for name, text in (("approve", release.consequences.approve), ("reject", release.consequences.reject)):
        shown = wrap(text or _missing(release, "consequences"), cells - LABEL_CELLS)
        rows += labelled(name, shown)
        if name == "approve" and release.consequences.later:
            rows += labelled("later", later(release, cells - LABEL_CELLS))
    return rows


def later(release: Release, cells: int) -> list[Line]:
    """Return the lines on what leaves unasked in later rounds after a yes."""
    return wrap(release.consequences.later, cells, "warn" if "UNASKED" in release.consequences.later else "")


def labelled(label: str, rows: list[Line]) -> list[Line]:
    """Rows behind a label in the left column."""
    return [line((f"{label if index == 0 else '':{LABEL_CELLS}}", "accent"), *row) for index, row in enumerate(rows)]


def one_column(
    release: Release,
    cells: int,
    height: int,
    *,
    time: float,
    opened: Collection[str] | None = None,
    person: str = "",
    banner: str = "",
) -> list[Line]:
    """Return everything in `height` lines of `cells` if it fits; rules that passed are shortened first."""
    inner = cells - LABEL_CELLS
    head = header(release, cells, time=time, opened=opened, person=person, banner=banner)
    rest = [
        *labelled("stays", stays(release, inner)),
        *labelled("policy", [*policy_summary(release, inner), *uses(release, inner)]),
    ]
    below = [
        *labelled("budget", budget(release, inner)),
        *labelled("diff", difference(release, inner)),
        *labelled("screens", screened(release, inner)),
        *answers(release, cells),
    ]  # fmt: skip
    what = leaves(release, inner)
    if len(head) + len(what) + len(rest) + len(below) >= height:  # v and p have the form
        what = leaves(release, inner, form=False)
    above = [*head, *labelled("leaves", what), *rest]
    most = max(height - len(above) - len(below), 1)
    shown = rules(release, inner, most=most)
    if len(shown) > most:  # the head says already how many approvals are given and needed
        others = tuple(rule for rule in release.rules if (rule.rule, rule.outcome) != ("approvals", "hold"))
        shown = rules(replace(release, rules=others), inner, most=most)
    return [*above, *labelled("", shown), *below]


def printed(release: Release, cells: int, *, time: float, banner: str = "", every_rule: bool = True) -> list[Line]:
    """Everything for readers without keys: digests and moments whole, who answered when, each finding, every rule."""
    given, held = release.approvers.given, release.state == "held"
    if not held and not release.ended_at:
        release = replace(release, ended_at=max((one.at for one in given), default=0.0) or release.expires_at)
    until = f"{'expires' if held else 'its time was until'} {moment_text(release.expires_at)}"
    whole = {"policy": release.policy.digest, "digest": release.digest}
    digests = {part: HIDDEN if part in release.hidden else f"sha256:{digest}" for part, digest in whole.items()}
    return [
        *one_column(release, cells, 10_000, time=time, banner=banner),
        *labelled("state", wrap(f"{release.state}, revision {release.revision}", cells - LABEL_CELLS)),
        *labelled("times", wrap(f"held since {moment_text(release.held_since)}, {until}", cells - LABEL_CELLS)),
        *labelled("answered", [row for one in given for row in answer_lines(one, one.time, cells - LABEL_CELLS)]),
        *labelled(
            "put off", [line(f"by {name} until {moment_text(until)}") for name, until in release.deferred.items()]
        ),
        *(row for one in release.noticed for row in (line(("finding ", "dim"), one.id), *evidence_lines(one, cells))),
        *(_every_rule(release, cells) if every_rule and release.rules else []),
        *(line((f"{name} ", "accent"), digest) for name, digest in digests.items()),
    ]


def _every_rule(release: Release, cells: int) -> list[Line]:
    return [line(("every rule", "strong")), *(row for rule in release.rules for row in rule_lines(rule, cells))]


def answer_lines(one: Given | AnswerGiven, at: str, cells: int) -> list[Line]:
    """One person's answer with its moment, and of a no its reason and what the person wrote."""
    verb = {"approve": "yes", "reject": "no"}.get(one.verdict, "?")
    why = f" {rule_words.reason_text(one.reason)}" if verb == "no" and one.reason else ""
    row = line((f"{verb:4}", "ok" if verb == "yes" else "bad"), one.person, (why, "bad"), (f"  {at}", "dim"))
    return [row, *(wrap(f'"{one.note}"', cells, "bad") if one.note else [])]


def signature_line(release: Release) -> Line:
    return line((release.id, "strong"), " sha256:", (_digest(release), "accent"))


PLACES_MAX = 6  # of a hit, in its sentence; all that the daemon names stand below it
PIECE_CHARACTERS = 100  # of a foreign text made safe at once, so that nothing of it is cut
# Why no payload can be read in a recording, and what can be read instead.
PAYLOAD_AWAY = (
    "The payload is in no recording. Here f reads each finding: what matched, where, how often, what would pass; "
    "p every rule, d the difference."
)
# What a finding means, and what to look at before a yes.
_MEANS: Mapping[str, tuple[str, str]] = {
    "REJECTED_BEFORE": (
        "somebody at your site rejected these very bytes before",
        "reject, unless who said no says why not this time; h has the note",
    ),
    "FAR_END_EXPIRED": ("the coordinator's certificate is over", "reject; ask who runs the coordinator"),
    "FAR_END_EXPIRES": (
        "the coordinator's certificate ends within a day; its own renewal comes earlier",
        "ask who runs the coordinator before you approve",
    ),
    "NEW_DESTINATION": (
        "this would go to another address than the last release",
        "approve only if you were told of the move, by another way than this federation",
    ),
    "NEW_CERTIFICATE": (
        "the far end shows another certificate than at the last release; renewing makes another one too",
        "compare the fingerprint with what the coordinator's people tell you",
    ),
    "BASE_DIFFERS": (
        "this update is not on top of what the last round ended in",
        "reject; this adapter is not the one that silos agreed on",
    ),
    "POLICY_CHANGED": (
        "this leaves under another policy than the last release",
        "reject, or defer it (D), if nobody at your site announced it; every limit that was loosened stands below, "
        "fedsilo policy diff shows both policies",
    ),
    "FORM_DIFFERS": (
        "the tensors are others than those of the last release",
        "reject, unless another run or plan was announced to you by another way than this federation",
    ),
    "NORM_OUTLIER": ("the update is far larger than the last one", "ask why before you send it; d has the norms"),
    "SIZE_JUMP": ("there is far more in it than in the last one", "ask why before you send it; v shows what is in it"),
    "BUDGET": (
        "it takes much of what may still leave today, and the rest of the day may have to do without",
        "reject, or defer it (D), unless you know why this much is to leave today",
    ),
    "SECOND_RELEASE": ("an update of this place in the run has left already", "ask why a second one is wanted"),
    "SCREEN_HIT": (
        "a text screen matched an answer: near private text, a canary, a secret or an identity",
        "read that answer (v); reject if it is a record's, and if you cannot read it",
    ),
}
# What each text screen looks for, by its name in the policy: what of whose text a hit stands for, and what is counted.
_SCREENS: Mapping[str, tuple[str, str]] = {
    "overlap": ("words in a row that a private record of this site has too (private text)", "such passages"),
    "canary": ("one of the strings that were planted in this site's private data (private text)", "canaries"),
    "pii_basic": ("a pattern of an identity, such as an address, a number or a date of birth", "patterns"),
    "charset": ("characters that the policy does not allow in a text", "characters or runs"),
}
_POLICY_SHOWS = "How much each screen lets pass: fedsilo policy show."
_PLACE = re.compile(r"row (\d+) answer (\d+)")
_UNKNOWN = ("this console does not know this kind of finding", "look at the policy (p) and the difference (d)")


def finding_lines(
    finding: Finding, number_of: str, cells: int, release: Release | None = None, *, banner: str = ""
) -> list[Line]:
    """Return one finding whole.

    Args:
        finding: to show.
        number_of: such as "1 of 2".
        cells: of a line.
        release: that it was found in; with it a hit of a text screen is told with what was counted and what would pass.
        banner: what is read in place of a daemon that runs, of whose payloads none can be shown; "" for a daemon.
    """
    means, then = _MEANS.get(finding.code, _UNKNOWN)
    is_hit = finding.code == "SCREEN_HIT" and release is not None
    meant = [] if is_hit else wrap(f"What it means: {means}.", cells)
    rows = [
        line((f"finding {number_of}  ", "dim"), (finding.id, "strong")),
        *_quoted(finding.says, cells, "warn", mark=""),
        (),
        *(hit_lines(finding, release, cells) if is_hit and release is not None else meant),
        *wrap(f"What to do: {then}.", cells, "strong"),
        *(wrap(f"{PAYLOAD_AWAY} At the silo itself v shows it.", cells, "dim") if is_hit and banner else []),
    ]
    if finding.evidence:
        rows += [(), line(("where it was found" if finding.code == "SCREEN_HIT" else "what was compared", "dim"))]
    return [*rows, *evidence_lines(finding, cells)]


def evidence_lines(finding: Finding, cells: int) -> list[Line]:
    """What was compared, how it was before, and how it is now."""
    rows: list[Line] = []
    for one in finding.evidence:
        rows.append(line((f"{safe(one.what, 80)}:", "accent")))
        if one.before not in ("", "None"):
            rows += _labelled("before", one.before, cells)
        rows += _labelled("now", one.now, cells)
    return rows


def hit_lines(finding: Finding, release: Release, cells: int) -> list[Line]:
    """Return what a text screen matched, how often, what is allowed, and what would pass: all that can be said of a
    near match without the text itself, which is in no state and no recording."""
    screens = sorted({part.partition("/")[0] for one in finding.evidence for part in one.what.split(", ")})
    rows: list[Line] = []
    for name in screens:
        matched, counted = _SCREENS.get(name, ("what the screen of that name looks for", "hits"))
        number = ", ".join(f"{way} {count}" for way, count in _counts(release.findings, name)) or "not told"
        rows += wrap(f"What matched: {matched}. Counted, {counted}: {safe(number, 200)}.", cells)
    places = [found for one in finding.evidence for found in _PLACE.findall(one.now)]
    told_of = [f"answer {answer} to public prompt {row}" for row, answer in dict.fromkeys(places)]
    if told_of:
        more = f" and {len(told_of) - PLACES_MAX} more, below" if len(told_of) > PLACES_MAX else ""
        rows += wrap(f"Where: {', '.join(told_of[:PLACES_MAX])}{more}.", cells)
    people = next((rule for rule in release.rules if rule.rule == "screen hits" and rule.limit not in ("", "0")), None)
    unless = f", unless approved by {people.limit} ({people.measured} so far)" if people else ""
    rows += wrap(f"Allowed: no answer with a hit{unless}.", cells)
    rows += wrap(f"What would pass: the same message without that answer. {_POLICY_SHOWS}", cells)
    return rows


def hit_brief(finding: Finding, release: Release) -> str:
    """Return a hit in few words: whose text it resembles, and how often something matched."""
    screens = sorted({part.partition("/")[0] for one in finding.evidence for part in one.what.split(", ")})
    counts = [f"{way} {count}" for name in screens for way, count in _counts(release.findings, name)]
    private = "private text, " if {"overlap", "canary"} & set(screens) else ""
    return f" ({private}counted {', '.join(counts)}, allowed 0)" if counts else ""


def _counts(findings: str, screen: str) -> list[tuple[str, str]]:
    """Codes of a screen with their counts, as the daemon's sentence on the screens has them."""
    return re.findall(rf"\b({re.escape(screen)}/[\w/-]+) (\d+)", findings)


def _labelled(label: str, text: str, cells: int) -> list[Line]:
    rows = _quoted(text, cells - 9, "", mark="")
    return [line((f"  {label if not index else '':7}", "dim"), *row) for index, row in enumerate(rows)]


# ---- the payload ------------------------------------------------------------------------------------


def payload_lines(shown: HeldPayload, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return a whole payload as the daemon shows it."""
    digest = f"sha256:{digest_text(shown.sha256)}"
    rows = [line((shown.kind, "strong"), f" {bytes_text(shown.bytes)} ", (digest, "accent"))]
    if "answers" not in shown.absent:
        rows += _answers(shown.answers, cells)
    if "tensors" not in shown.absent:
        rows += _tensors(shown, cells, glyphs)
    if "content" not in shown.absent:
        text = json.dumps(shown.content, indent=1, ensure_ascii=False, default=str)
        rows += _quoted(text, cells, "", mark="")
    return rows


def _answers(answers: Sequence[AnsweredPrompt], cells: int) -> list[Line]:
    total = sum(len(row.answers) for row in answers)
    told = f"answers: {total}, to public prompts: {len(answers)}; the prompts are this site's own copy"
    rows = wrap(told, cells, "dim")
    for row in answers:
        count = len(row.answers)
        rows += [(), line((f"public row {row.row}", "accent"), (f"  answers: {count}", "dim"))]
        if row.prompt is not None:
            rows += _quoted(row.prompt, cells, "dim")
        else:
            rows += wrap("NOT in this site's public set: there is no prompt to show", cells, "bad")
        for index, text in enumerate(row.answers, 1):
            rows.append(line((f"answer {index} of {count}, characters: {len(text)}", "strong")))
            rows += _quoted(text, cells, "")
    return rows


def _tensors(shown: HeldPayload, cells: int, glyphs: Glyphs) -> list[Line]:
    rows: list[Line] = [
        *wrap("no value is shown: name, shape, type, L2 norm, and how many values are of which size", cells, "dim"),
        *wrap(f"sizes: {_edges(shown.edges)}", cells, "dim"),
    ]
    begins, names, ends = _apart([one.name for one in shown.tensors])
    types = {one.type for one in shown.tensors}
    alike = [f"begins with {begins}"] if begins else []
    alike += [f"ends in {ends}"] if ends else []
    said = [f"each name {' and '.join(alike)}"] if alike else []
    one_type = len(types) == 1 and len(shown.tensors) > 1
    said += [f"each is of type {next(iter(types))}"] if one_type else []
    rows += [*wrap("; ".join(said), cells, "dim"), ()]
    found = []
    for one, name in zip(shown.tensors, names, strict=True):
        counts = one.histogram
        found.append(
            [
                (name, "strong"),
                ("x".join(map(str, one.shape)), ""),
                *([] if one_type else [(one.type, "dim")]),
                (one.norm, ""),
                (_bars(counts.negative, glyphs), ""),
                (str(counts.zero), "dim"),
                (_bars(counts.positive, glyphs), ""),
                (f"{counts.not_finite} NOT FINITE" if counts.not_finite else "", "bad"),
            ]
        )
    header = ["tensor", "shape", *([] if one_type else ["type"]), "L2", "below 0", "zero", "above 0", ""]
    right = frozenset({header.index("L2"), header.index("zero")})
    rows += table(header, found, cells, right=right, ends=frozenset({0}))
    left = shown.tensors_total - len(shown.tensors)
    return [*rows, *([line((f"and {left} more tensors", "warn"))] if left > 0 else [])]


def _apart(names: list[str]) -> tuple[str, list[str], str]:
    """Split names at their dots into what all begin with, what is left of each, and what all end in. The middle part
    tells one from another and fits into a narrow table."""
    if len(names) < 2:
        return "", names, ""
    split = [name.split(".") for name in names]
    shortest = min(map(len, split)) - 1  # something is left of each
    first = next((at for at in range(shortest) if len({parts[at] for parts in split}) > 1), max(shortest, 0))
    rest = shortest - first
    last = next((at for at in range(rest) if len({parts[-1 - at] for parts in split}) > 1), max(rest, 0))
    kept = [".".join(parts[first : len(parts) - last]) for parts in split]
    begins, ends = ".".join(split[0][:first]), ".".join(split[0][len(split[0]) - last :])
    return f"{begins}." if begins else "", kept, f".{ends}" if ends else ""


def _edges(places: Sequence[float]) -> str:
    return f"one bar for each power of ten, from {places[0]:g} to {places[-1]:g} and more" if places else "not told"


def _bars(counts: Sequence[int], glyphs: Glyphs) -> str:
    """A bar a power of ten, by the share of its count: digits 0 to 9 say tenths in ASCII."""
    most = max(counts, default=0)
    signs = ".123456789" if glyphs.full == "#" else " ▁▂▃▄▅▆▇█"
    last = len(signs) - 1
    return "".join(signs[min(int(count / most * last + 0.999), last)] if most else signs[0] for count in counts)


# ---- beside the last one ----------------------------------------------------------------------------


def comparison_lines(comparison: Comparison, cells: int) -> list[Line]:
    """Return a whole release beside the last one of its kind, differences first."""
    against = comparison.against
    if against is None:
        return wrap(comparison.note or "there is nothing to compare with", cells, "strong")
    people = ", ".join(against.approved_by)
    became = f"left {against.at}, " + (f"approved by {people}" if people else "nobody was asked")
    if (against.state or "left") != "left":
        no = f" by {', '.join(against.rejected_by)}" if against.rejected_by else ""
        became = f"held since {against.at}, {against.state}{no}: it did not leave"
    rows = wrap(f"against round {against.round} of run {against.run}, {became}", cells)
    if comparison.note:
        rows += wrap(comparison.note, cells, "warn")
    differing, same = ([row for row in comparison.rows if row.differs is so] for so in (True, False))
    for title, style, part in (("differs", "warn", differing), ("same", "dim", same)):
        if part:
            rows += [(), line((f"{title}: {len(part)}", style))]
            rows += table(
                ("what", "before", "now"),
                [
                    [(row.what.replace("_", " "), style), (_value(row.before), ""), (_value(row.now), "")]
                    for row in part
                ],
                cells,
            )
    if comparison.tensors:
        text = f"L2 norm of {len(comparison.tensors)} of {comparison.tensors_total} tensors, largest change first"
        rows += [(), line((text, "accent"))]
        rows += table(
            ("tensor", "before", "now", "times"),
            [
                [(one.name, ""), (_value(one.before), ""), (_value(one.now), ""), (_times(one.times), "")]
                for one in comparison.tensors
            ],
            cells,
            right=frozenset({1, 2, 3}),
            ends=frozenset({0}),
        )
    return rows


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "-" if value is None else str(value)
    return f"{text[:8]}…{text[-4:]}" if HEX_DIGEST.fullmatch(text) else text


def _times(value: float | None) -> str:
    return "only one has it" if value is None else f"x{value:.2f}"


# ---- foreign text -----------------------------------------------------------------------------------


def _quoted(text: str, cells: int, style: str, *, mark: str = "| ") -> list[Line]:
    """Return a whole text, line by line, behind a bar that no text can draw. Characters meant to hide something are
    spelled out, and long lines are wrapped."""
    room = max(cells - len(mark), 8)
    return [line((mark, "dim"), (row, style)) for part in text.split("\n") for row in _pieces(part, room)]


def _pieces(text: str, cells: int) -> Iterator[str]:
    from rich.cells import cell_len, set_cell_size

    shown = "".join(safe(text[at : at + PIECE_CHARACTERS], 64 * PIECE_CHARACTERS)
                    for at in range(0, len(text), PIECE_CHARACTERS))  # fmt: skip
    while cell_len(shown) > cells:
        head = set_cell_size(shown, cells).rstrip(" ") if cell_len(shown) > cells else shown
        cut = len(head)
        space = head.rfind(" ")
        if space > cells // 2:
            cut = space + 1
        cut = max(cut, 1)
        yield shown[:cut]
        shown = shown[cut:]
    yield shown

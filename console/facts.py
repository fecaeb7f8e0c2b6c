"""The facts a person needs before answering a release, in the order of console design 5, as lines.

Nothing optional, nothing blank: where there is nothing yet, the words say so ("DP off", "first release, nothing to
compare"). Rules that look or deny have a line each and come first; rules that are ok share lines. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from console import rule_words
from console.drawing import (
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
    wrap,
)
from console.release_lines import hit_brief
from console.values import HIDDEN, Finding, Release, Rule, Snapshot

LABEL_CELLS = 9
NOT_SENT = ("rejected", "denied", "expired", "missed")  # states of a release that takes nothing of a limit
NOT_TOLD = "the daemon does not say"
HIDDEN_IS = "hidden: not in this source"
HIDDEN_IN_SHARED = "hidden: not in a share-safe recording; this site's people record it with --include-local LOCAL"
_STYLES = {"ok": "ok", "look": "warn", "hold": "warn", "deny": "bad"}


def header(
    release: Release, snapshot: Snapshot, now: float, cells: int, glyphs: Glyphs, opened: Collection[str] = (),
    person: str = "",
) -> list[Line]:  # fmt: skip
    """Who asks for what until when, and what is unusual about it.

    Args:
        release: as it was shown.
        snapshot: for the daemon's clock.
        now: monotonic seconds.
        cells: of a line.
        glyphs: to draw with.
        opened: ids of the findings that were opened here.
        person: who looks, where that is known.
    """
    time = snapshot.server_now(now)
    left = release.left_seconds(time)
    ends: Part = (f"expires in {duration_text(left)}", "warn" if left < 300 else "")
    if not left > 0:
        ends = ("EXPIRED", "bad") if left <= 0 else (f"expires: {NOT_YET_KNOWN}", "warn")
    if release.ended_at:
        time, ends = release.ended_at, (f"then {release.state}", "strong")
    digest = f"sha256:{release.digest if cells >= 140 else _digest(release)}"
    age = f"held {duration_text(release.held_seconds(time))}"
    who = f"{len(release.given)} of {release.needed} given" + (f": {', '.join(release.given)}" if release.given else "")
    if "given" in release.hidden:
        who = f"{HIDDEN}, {release.needed} needed"
    no = "; ".join(
        f"{name} said no: {rule_words.reason_text(code) or NOT_TOLD}" + (f', "{note}"' if note else "")
        for name, code, note in release.refused
    )
    roles = " or ".join(release.roles) or (HIDDEN if "given" in release.hidden else NOT_TOLD)
    until = release.deferred_until(person, time) if person and not release.ended_at else 0.0
    put_off = [line((f"you put it off for {duration_text(until - time)}", "dim"))] if until else []
    why_hidden = HIDDEN_IN_SHARED if "share-safe" in snapshot.link.told else HIDDEN_IS
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
    left = [name for name in release.people if name not in release.given]
    return [] if release.ended_at or not left else [clip(line(("may approve ", "dim"), ", ".join(left)), cells)]


def _digest(release: Release) -> str:
    return HIDDEN if "digest" in release.hidden else digest_text(release.digest)


def _missing(release: Release, field: str) -> str:
    """In place of a text that is empty: the source does not hold it, or its daemon does not say it."""
    return HIDDEN if field in release.hidden else NOT_TOLD


def leaves(release: Release, cells: int, glyphs: Glyphs, *, form: bool = True) -> list[Line]:
    """Lines on what leaves and who can read it, then its kind, size and form, and where it goes.

    Args:
        release: as it was shown.
        cells: of a line.
        glyphs: to draw with.
        form: tensors, rank and type too, where a sentence says what it is.
    """
    if "leaves" in release.hidden:
        return wrap(f"{HIDDEN}: its kind, its size, where it goes, and whose certificate is there", cells)
    seen = release.certificate
    certificate = f"cert {seen[:12]}…{seen[-4:]} pinned" if seen else "cert not seen yet"
    at = release.destination or NOT_TOLD
    to = [line(f"to {release.receiver}"), line(f"at {at}")] if release.receiver else [line(f"to {at}")]
    rows: list[Line] = []
    pieces: list[Line] = []
    for kind in release.kinds:
        rows += wrap(kind.says, cells, "strong") if kind.says else []
        covered = "yes" if kind.covered_by_epsilon.lower() == "yes" else "NO"
        pieces += [
            line((kind.kind, "strong"), f" {bytes_text(kind.size_bytes)}"),
            line(("epsilon covers it: ", "dim"), (covered, "warn")),
            *(line(piece) for piece in kind.items.split(", ") if form or not kind.says),
        ]
    return [*rows, *flow([*pieces, *to, line((certificate, "dim"))], cells)]


def brief(release: Release, cells: int) -> list[Line]:
    """What leaves, and where to, in a line or two, for the dialog that asks."""
    kinds = ", ".join(f"{kind.kind} {bytes_text(kind.size_bytes)}" for kind in release.kinds)
    meant = [row for kind in release.kinds for row in wrap(kind.says, cells, "strong")]
    to = f"{release.receiver} at {release.destination}" if release.receiver else release.destination or NOT_TOLD
    return [*meant, *wrap(f"{kinds or NOT_TOLD} to {to}", cells)]


def stays(release: Release, cells: int) -> list[Line]:
    return wrap(", ".join(release.stays) or _missing(release, "leaves"), cells)


def policy_summary(release: Release, cells: int) -> list[Line]:
    if "policy" in release.hidden:
        return [line(HIDDEN)]
    counts: list[Part] = []
    for outcome in ("deny", "hold", "look", "ok"):
        number = release.count(outcome)
        if number or outcome != "hold":
            counts.append((f" {number} {outcome}", _STYLES[outcome] if number else "dim"))
    return flow([line((release.policy_name, "strong"), f" {digest_text(release.policy_digest)}"), line(*counts)], cells)


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
    """One rule with its measured value and limit, in words; a finding in its own."""
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


def noticed(release: Release, cells: int, opened: Collection[str] = ()) -> list[Line]:
    """What is unusual about it, which a person is asked to open: before everything else."""
    rows: list[Line] = []
    if "policy" in release.hidden and not release.noticed:
        return wrap(f"{HIDDEN}: whether something unusual was found", cells)
    if release.noticed and not release.ended_at:
        left = release.not_opened(opened)
        count = f"{len(left)} not opened: f opens the next, A is off until then" if left else "each was opened"
        rows += wrap(count, cells, "bad" if left else "ok")
    shown = [
        (finding.says + (hit_brief(finding, release) if finding.code == "SCREEN_HIT" else ""), finding.id in opened)
        for finding in release.noticed
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
    """What the text screens say."""
    told = (release.findings or _missing(release, "findings")).removeprefix("screens ")
    return wrap(told, cells, "warn" if release.unscreened else "")


def findings(release: Release, cells: int) -> list[Line]:
    """How much is unusual, which stands above everything else, and what the screens say."""
    told = (release.findings or _missing(release, "findings")).removeprefix("screens ")
    number = release.count("look")
    style = "warn" if number or release.unscreened else ""
    return wrap(f"{number} above; {told}" if number else told, cells, style)


def answers(release: Release, cells: int) -> list[Line]:
    if release.ended_at:
        return labelled("now", wrap(f"{release.state}; nothing can be answered any more", cells - LABEL_CELLS))
    rows: list[Line] = []
    for name, text in (("approve", release.on_approve), ("reject", release.on_reject)):
        shown = wrap(text or _missing(release, "consequences"), cells - LABEL_CELLS)
        rows += labelled(name, shown)
        if name == "approve" and release.on_later:
            rows += labelled("later", later(release, cells - LABEL_CELLS))
    return rows


def later(release: Release, cells: int) -> list[Line]:
    """Return the lines on what leaves unasked in later rounds after a yes."""
    return wrap(release.on_later, cells, "warn" if "UNASKED" in release.on_later else "")


def labelled(label: str, rows: list[Line]) -> list[Line]:
    """Rows behind a label in the left column."""
    return [line((f"{label if index == 0 else '':{LABEL_CELLS}}", "accent"), *row) for index, row in enumerate(rows)]


def one_column(
    release: Release, snapshot: Snapshot, now: float, cells: int, height: int, glyphs: Glyphs,
    opened: Collection[str] = (), person: str = "",
) -> list[Line]:  # fmt: skip
    """Everything in `height` lines of `cells`, if it goes in at all; the ok rules give way first."""
    inner = cells - LABEL_CELLS
    head = header(release, snapshot, now, cells, glyphs, opened, person)
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
    what = leaves(release, inner, glyphs)
    if len(head) + len(what) + len(rest) + len(below) >= height:  # v and p have the form
        what = leaves(release, inner, glyphs, form=False)
    above = [*head, *labelled("leaves", what), *rest]
    most = max(height - len(above) - len(below), 1)
    shown = rules(release, inner, most=most)
    if len(shown) > most:  # the head says already how many approvals are given and needed
        told = tuple(rule for rule in release.rules if (rule.rule, rule.outcome) != ("approvals", "hold"))
        shown = rules(replace(release, rules=told), inner, most=most)
    return [*above, *labelled("", shown), *below]


def signature_line(release: Release) -> Line:
    return line((release.id, "strong"), " sha256:", (_digest(release), "accent"))

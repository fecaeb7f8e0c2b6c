"""Releases as rows: those that are held with a preview, and those that were held before with how they ended. Pure."""

from __future__ import annotations

from typing import Any

from fedsilo.control.answers import AnswerGiven, ReleaseRow
from fedsilo.views import rule_words
from fedsilo.views.columns import Column, Row
from fedsilo.views.lines import Line, Part, bytes_text, clip, digest_text, duration_text, line, moment_text
from fedsilo.views.releases import LABEL_CELLS, answer_lines, labelled
from fedsilo.views.state import HIDDEN, Release, text_of

EXPIRES_SOON_SECONDS = 300

_STYLES = {"held": "warn", "approved": "ok", "denied": "bad", "rejected": "bad"}


def _ended_state(row: ReleaseRow) -> Part:
    return row.state, _STYLES.get(row.state, "dim")


def _who(row: ReleaseRow) -> Part:
    if "answers" in row.absent:
        return HIDDEN, "dim"
    # the code alone: its meaning is in the row when it is opened
    people = [" ".join(filter(None, (one.person, _verb(one), _code(one)))) for one in row.answers]
    return ", ".join(people) or "nobody", ""


def _verb(answer: AnswerGiven) -> str:
    return {"approve": "yes", "reject": "no"}.get(answer.verdict, "?")


def _code(answer: AnswerGiven) -> str:
    """The reason code of a no; a yes has none."""
    return answer.reason if _verb(answer) == "no" else ""


def _when(row: ReleaseRow) -> Part:
    """Return the time of the last answer."""
    return (row.answers[-1].at if row.answers else _or_hidden(row, "answers", "-")), "dim"


def _or_hidden(row: ReleaseRow, name: str, text: str) -> str:
    return HIDDEN if name in row.absent else text


def _bytes_text(row: ReleaseRow) -> str:
    return _or_hidden(row, "bytes", bytes_text(row.bytes))


def came_to(state: object) -> str:
    """Return what a person's yes came to, in words, from the state in the answer to it."""
    return "waits in the outbox" if state == "waits" else text_of(state)


HISTORY_COLUMNS = (
    Column("release", lambda row: (row.id, "strong"), 18, worth=0, grows=True),
    Column("kind", lambda row: (row.kind, ""), 16, worth=3),
    Column("state", _ended_state, 8, worth=0),
    Column("answers", _who, 16, worth=1, grows=True),
    Column("answered", _when, 20, worth=2),
    Column("held", lambda row: (moment_text(row.held_since), "dim"), 20, worth=6, order=lambda row: row.held_since),
    Column("bytes", lambda row: (_bytes_text(row), ""), 9, worth=7, right=True, order=lambda row: row.bytes),
    Column("digest", lambda row: (_or_hidden(row, "digest", row.digest)[:12], "accent"), 12, worth=4),
    Column("policy", lambda row: (_or_hidden(row, "policy_digest", row.policy_digest)[:8], "dim"), 8, worth=5),
)


GIVEN = Column("given", lambda row: (f"{len(row.given)} of {row.needed}", ""), 6)


def answered_lines(row: ReleaseRow, twin: str, cells: int) -> list[Line]:
    """Return one release that was held before, whole. `twin` is the command that shows all of it."""
    answers = [told for one in row.answers for told in answer_lines(one, one.at, cells)]
    return [
        line((row.id, "strong"), f" {row.kind} ", _ended_state(row)),
        line(("held ", "dim"), moment_text(row.held_since), f"  {_bytes_text(row)}"),
        *(answers or [line((f"answers {HIDDEN}" if "answers" in row.absent else "nobody answered", "dim"))]),
        line(("needed ", "dim"), f"{row.needed} yes"),
        line(("digest ", "dim"), "sha256:", _or_hidden(row, "digest", row.digest)),
        line(("policy ", "dim"), "sha256:", _or_hidden(row, "policy_digest", row.policy_digest)),
        line(("all of it ", "dim"), twin),
    ]


def _verdicts(row: Row) -> Part:
    return row["verdicts"], "bad" if row["deny"] else "warn" if row["look"] or row["hold"] else ""


def _text(name: str) -> Any:
    return lambda row: (row[name], "")


def _bytes(row: Row) -> Part:
    return (HIDDEN if row["bytes"] is None else bytes_text(row["bytes"])), ""


HELD_COLUMNS = (
    Column("release", lambda row: (row["id"], "strong"), 16, worth=0, grows=True),
    Column("kind", _text("kind"), 12, worth=1, grows=True),
    Column("bytes", _bytes, 9, worth=5, right=True, order=lambda row: row["bytes"] or 0.0),
    Column("state", lambda row: (row["state"], "warn" if row["state"] == "held" else "dim"), 8, worth=2),
    Column("later", lambda row: (row["later"], "dim"), 8, worth=1, right=True, order=lambda row: row["later_seconds"]),
    Column("verdicts", _verdicts, 12, worth=1, grows=True),  # worst first, so that a cut takes the least of them
    Column("given", _text("given"), 6, worth=3),
    Column("held for", _text("age"), 8, worth=1, right=True, order=lambda row: row["held_since"]),
    Column("ends in", lambda row: (row["ends"], "warn" if row["soon"] else ""), 8, worth=0, right=True,
           order=lambda row: row["expires_at"]),
    Column("digest", lambda row: (row["digest"][:12], "accent"), 12, worth=7),
)  # fmt: skip


def preview_lines(release: Release, cells: int, more: str) -> list[Line]:
    """Return a line each for what would leave and where to, which bytes these are, why it is held, what is unusual
    about it and who is asked; the release itself has the rest."""
    hidden, room = release.hidden, cells - LABEL_CELLS
    kinds = ", ".join(f"{kind.kind} {bytes_text(kind.bytes)}" for kind in release.leaves.kinds)
    leaves = HIDDEN if "leaves" in hidden else f"{kinds or '-'} to {release.leaves.destination.address or '-'}"
    whole = f"sha256:{release.digest}"
    digest = HIDDEN if "digest" in hidden else whole if len(whole) <= room else f"sha256:{digest_text(release.digest)}"
    holding = [rule_words.says(rule) for rule in release.rules if rule.outcome == "hold"]
    held = HIDDEN if "policy" in hidden else "; ".join(holding) or "-"
    told = [finding.says for finding in release.noticed]
    told += [
        rule.measured or rule.rule for rule in release.rules if rule.outcome == "look" and rule.measured not in told
    ]
    none = HIDDEN if {"policy", "findings"} & hidden else "; ".join(filter(None, ("none", release.findings)))
    others = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    given = HIDDEN if "given" in hidden else f"{len(release.given)} of {release.approvers.needed} approvals"
    roles = f", by {' or '.join(release.approvers.roles)}" if release.approvers.roles else ""
    rows: tuple[tuple[str, Part, str], ...] = (
        ("leaves", (leaves, ""), ""),
        ("digest", (digest, "accent"), ""),
        ("held", (held, "warn"), ""),
        ("findings", (told[0], "warn") if told else (none, "dim"), others),
        ("asks", (f"{given}{roles}; enter to read it and answer", ""), ""),
    )
    return [
        row for name, part, behind in rows
        for row in labelled(name, [line(*clip(line(part), room - len(behind), more), (behind, "dim"))])
    ]  # fmt: skip


def held_row(release: Release, now: float, person: str) -> dict[str, Any]:
    left, later = release.left_seconds(now), release.deferred_until(person, now)
    counts = {name: release.count(name) for name in ("deny", "hold", "look", "ok")}
    return {
        "id": release.id,
        "kind": HIDDEN if "leaves" in release.hidden else ", ".join(kind.kind for kind in release.leaves.kinds),
        "bytes": None if "leaves" in release.hidden else release.leaves.bytes,
        "state": release.state,
        # of the person who looks alone: the release's state, which is shared, says nothing of it
        "later": duration_text(later - now) if later else "-", "later_seconds": later - now if later else 0.0,
        "given": HIDDEN if "given" in release.hidden else f"{len(release.given)} of {release.approvers.needed}",
        "verdicts": HIDDEN if "policy" in release.hidden else
        " ".join(f"{counts[name]} {name}" for name in counts if counts[name] or name == "ok"),
        "look": counts["look"], "hold": counts["hold"], "deny": counts["deny"],
        "held_since": release.held_since, "age": duration_text(release.held_seconds(now)),
        "expires_at": release.expires_at, "ends": "EXPIRED" if left <= 0 else duration_text(left),
        "soon": left < EXPIRES_SOON_SECONDS,
        "digest": HIDDEN if "digest" in release.hidden else release.digest,
    }  # fmt: skip

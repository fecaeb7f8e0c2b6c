"""One round: a strip of phases for each silo, who is awaited, quorum and deadlines, and the round's subject.

From the answer of the query `round`. Pure: answers, time and width in, lines and rows out. A silo knows of the other
silos only what the coordinator says to all; every other cell reads `hidden`, never 0 and never empty.

Does not show: a time that nobody recorded. Such a cell reads `not kept`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedsilo.control.answers import Awaited, Phase, Round, SiloInRound, Straggler
from fedsilo.views.columns import GAP_CELLS, MARK_CELLS, Column, choose_columns
from fedsilo.views.lines import (
    Glyphs,
    Line,
    Part,
    Shown,
    bytes_text,
    digest_text,
    duration_text,
    flow,
    line,
    named,
    pad,
    wrap,
)
from fedsilo.views.rule_words import isolation_text
from fedsilo.views.state import text_of

QUERY = "round"
NAME_CELLS = 10
ROUNDS_SHOWN_AROUND = 3
HIDDEN = "hidden"
NOT_KEPT = "not kept"
SCALE_SHARE_MAX = 1.5  # a deadline further off than that is written in words, and the strips keep their width


class PhaseWords(NamedTuple):
    """A phase's sign in Unicode and in ASCII, what the legend calls it, and what a silo did in it."""

    signs: tuple[str, str]
    legend: str
    words: str


PHASES = {
    "sign": PhaseWords(("░", "s"), "transcript", "signing the round's transcript"),
    "train": PhaseWords(("━", "="), "until answers", "until its answers of step {step} were there"),
    "pool": PhaseWords(("╌", "-"), "waits for donors", "waiting for the donors of step {step}"),
    "update": PhaseWords(("▓", "u"), "until the update", "until its update was there"),
    "approval": PhaseWords(("!", "!"), "held", "held for people"),
    "others": PhaseWords(("·", "."), "waits for others", "waiting for the others"),
    "eval": PhaseWords(("█", "e"), "evaluates", "until its evaluation was there"),
}
_PHASE_STYLES = {"missed": "bad", "denied": "bad", "open": "accent", "kept back": "warn", "rejected": "warn"}
STEP_SIGN = ("╋", "+")  # the answers of a public step were there
QUORUM_SIGN, DEADLINE_SIGN = ("┊", ":"), ("┃", "|")
_AWAY = ("sits out", "declined", "rejected", "adapter held", "adapter refused")
_WARNED = ("left out", *_AWAY)
_BAD = ("absent", "refused", "silent", "denied")
_STATE_STYLES = {"accepted": "ok", **dict.fromkeys(_BAD, "bad"), **dict.fromkeys(_WARNED, "warn")}


def time_text(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)


# ---- rows ------------------------------------------------------------------------------------------


class ShownSilo(SiloInRound):
    """A silo with the texts that its row has beside its own fields."""

    mark: Part
    now: str
    strip: str
    before: str
    bytes: str


def is_hidden(row: SiloInRound, answer: Round) -> bool:
    """Return True for another silo, seen from a silo."""
    return answer.party == "silo" and not row.own


def scale_of(answer: Round) -> float:
    """Return the seconds that a strip is wide: as far as the round has come, and its deadline where that is near."""
    ends = [phase.to_seconds or 0.0 for silo in answer.silos for phase in silo.phases]
    elapsed = answer.elapsed_seconds if answer.state == "open" else None
    far = max([elapsed or 0.0, answer.closed_seconds or 0.0, *ends, 1.0])
    deadline = deadline_of(answer)
    return deadline if deadline is not None and far < deadline <= far * SCALE_SHARE_MAX else far


def deadline_of(answer: Round) -> float | None:
    """Return when the round's own deadline is, in seconds from its opening."""
    return next((each.at_seconds for each in answer.deadlines if each.for_ == "round"), None)


def strip_text(row: SiloInRound, answer: Round, cells: int, scale: float, *, ascii_only: bool) -> str:
    """Return a silo's phases from the round's opening on, with signs for the quorum and the deadline."""
    if is_hidden(row, answer):
        return HIDDEN
    if cells < 1:
        return ""
    column = 1 if ascii_only else 0
    shown, steps = [" "] * cells, list[int]()
    for phase in row.phases:
        start, runs = phase.from_seconds, phase.state == "open"
        end = answer.elapsed_seconds if phase.to_seconds is None and runs else phase.to_seconds
        if start is None or end is None or end < start or (start == end and not runs):
            continue
        sign = PHASES[phase.phase].signs[column] if phase.phase in PHASES else "?"
        first, last = (min(int(at / scale * cells), cells - 1) for at in (start, end))
        for place in range(first, max(last, first + 1) if last < cells - 1 or not runs else cells):
            shown[place] = sign
        if runs:
            shown[last] = ">" if ascii_only else "▸"
        elif phase.phase == "train":
            steps.append(last)
    for place in steps:
        shown[place] = STEP_SIGN[column]
    for at, signs in ((answer.quorum.reached_seconds, QUORUM_SIGN), (deadline_of(answer), DEADLINE_SIGN)):
        if at is not None and 0 <= at <= scale:
            shown[min(int(at / scale * cells), cells - 1)] = signs[column]
    return Shown("".join(shown).rstrip() or " ")


def late_text(why: Straggler) -> str:
    """Return what is known of a silo that is silent for longer than its step takes the others. A coordinator does not
    learn that people hold a release, so it cannot tell that from slow work, and nor can this console."""
    return f"no update for {time_text(why.seconds)}: training, or held by its people"


def now_text(row: SiloInRound, answer: Round) -> str:
    """Return what a silo does, and for how long; of a round that is over, when its update was there."""
    if is_hidden(row, answer):
        return HIDDEN
    running = next((phase for phase in row.phases if phase.state == "open"), None)
    if running is not None:
        return f"{phase_text(running)} {_open_seconds(running, answer)}"
    took = took_seconds(row, answer)
    return f"update {duration_text(took)}" if took is not None else "-"


def _open_seconds(phase: Phase, answer: Round) -> str:
    """Return for how long an open phase goes on; `?` where that is not known."""
    if answer.elapsed_seconds is None or phase.from_seconds is None:
        return "?"
    return duration_text(answer.elapsed_seconds - phase.from_seconds)


def phase_text(phase: Phase | Awaited | Straggler) -> str:
    name = phase.phase
    return f"{name} {phase.step}" if phase.step else {"others": "for others", "update": "to update"}.get(name, name)


def took_seconds(row: SiloInRound, answer: Round) -> float | None:
    """Return the time from the opening to the silo's update; None before it, and where it is not known."""
    if is_hidden(row, answer):
        return None
    ends = [phase.to_seconds for phase in row.phases if phase.phase == "update" and phase.state == "done"]
    return ends[-1] if ends else None


def mark_of(row: SiloInRound, answer: Round, glyphs: Glyphs) -> Part:
    if row.straggler and row.state != "silent":
        return glyphs.need, "warn"
    if row.state in ("not in it", *_AWAY):
        return glyphs.away, "dim"
    if row.state in ("absent", "left out", "refused", "silent"):
        return glyphs.bad, "bad"
    if any(each.silo == row.silo for each in answer.awaited):
        return glyphs.away, "warn"
    return glyphs.live, "ok"


def silo_rows(
    answer: Round, before: Round | None, strip_cells: int, glyphs: Glyphs, *, ascii_only: bool
) -> list[ShownSilo]:
    """Return one row per silo with what the columns show."""
    scale = scale_of(answer)
    former = {row.silo: took_seconds(row, before) for row in before.silos} if before else {}
    rows = []
    for row in answer.silos:
        took, earlier, hidden = took_seconds(row, answer), former.get(row.silo), is_hidden(row, answer)
        change = "" if took is None or earlier is None else f" ({took - earlier:+.0f} s)"
        rows.append(
            ShownSilo(
                **vars(row),
                mark=mark_of(row, answer, glyphs),
                now=now_text(row, answer),
                strip=strip_text(row, answer, strip_cells, scale, ascii_only=ascii_only),
                before=HIDDEN if hidden else f"{time_text(earlier)}{change}",
                bytes=HIDDEN if hidden or answer.party == "silo" else bytes_text(row.received_bytes or 0),
            )
        )
    return rows


def _dim_if_nothing(text: str) -> Part:
    return text, "dim" if text in (HIDDEN, "-") else ""


_MARK = Column(" ", lambda row: row.mark, 1, worth=0)
_SILO = Column("silo", lambda row: (row.silo, "strong"), 12, worth=0)
_WORD = Column("state", lambda row: (row.state, _STATE_STYLES.get(row.state, "")), 9, worth=0)
_NOW = Column("now", lambda row: _dim_if_nothing(row.now), 18, worth=0)  # `approval 1:09:12`, and a word more than most
_STRIP = Column("phases", lambda row: _dim_if_nothing(row.strip), 26, worth=0, grows=True)
_BYTES = Column(
    "in", lambda row: _dim_if_nothing(row.bytes), 9, worth=2, right=True, order=lambda row: row.received_bytes or 0
)
_BEFORE = Column("round before", lambda row: _dim_if_nothing(row.before), 18, worth=0)
COLUMNS = (_MARK, _SILO, _WORD, _NOW, _STRIP, _BYTES)
COMPARED = (_MARK, _SILO, _WORD, _NOW, _BEFORE, Column(_STRIP.name, _STRIP.show, 4, worth=1, grows=True))


def strip_span(columns: Sequence[Column], cells: int, turn: int) -> tuple[int, int]:
    """Return where the strip begins in a table of `cells`, and how wide it is; 0 where it has no room."""
    at = MARK_CELLS
    for column, width in choose_columns(columns, cells, turn=turn):
        if column.name == _STRIP.name:
            return at, width
        at += width + GAP_CELLS
    return at, 0


def scale_line(answer: Round, columns: Sequence[Column], cells: int, turn: int, *, ascii_only: bool) -> Line:
    """The time under the strips: 0, the middle and the end."""
    start_cells, width = strip_span(columns, cells, turn)
    scale = scale_of(answer)
    end, start, middle = duration_text(scale), "0", duration_text(scale / 2)
    if width < len(end) + len(start) + 3:
        return line("")
    dash = "-" if ascii_only else "─"
    shown = [dash] * width
    for text, at in ((start, 0), (middle, (width - len(middle)) // 2), (end, width - len(end))):
        if all(shown[place] == dash for place in range(at, at + len(text))):
            shown[at : at + len(text)] = list(text)
    return line((Shown(" " * start_cells + "".join(shown)), "dim"))


def legend_lines(answer: Round, cells: int, *, ascii_only: bool) -> list[Line]:
    """Return what the signs of this round's strips mean."""
    column = 1 if ascii_only else 0
    there = {phase.phase for silo in answer.silos for phase in silo.phases if phase.from_seconds is not None}
    pieces = [
        line((each.signs[column] * 2, "accent"), f" {each.legend}") for name, each in PHASES.items() if name in there
    ]
    if "train" in there:
        pieces.append(line((STEP_SIGN[column], "accent"), " answers of a step"))
    if answer.quorum.reached_seconds is not None:
        pieces.append(line((QUORUM_SIGN[column], "accent"), " quorum was there"))
    deadline = deadline_of(answer)
    if deadline is not None and deadline <= scale_of(answer):
        pieces.append(line((DEADLINE_SIGN[column], "accent"), " deadline"))
    return flow(pieces, cells, between="  ")


# ---- head ------------------------------------------------------------------------------------------


def head_lines(answer: Round, before: Round | None, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return which round it is, how far it has come, the quorum, the deadlines, who is awaited, and where there is a
    round before to compare with, what changed. A round that has not come yet has no party."""
    if not answer.party:
        return []
    state = answer.state
    since = answer.elapsed_seconds if state == "open" else answer.closed_seconds
    word = {"open": "open for", "no round yet": ""}.get(state, f"{state} after")
    style = {"committed": "ok", "closed": "ok", "abandoned": "bad", "open": "accent"}.get(state, "")
    pieces = [
        line(
            (answer.run or "-", "strong"), (f" {answer.run_state}", "warn" if answer.run_state == "paused" else "dim")
        ),
        line("round ", (f"{answer.round or '-'}", "strong"), f" of {answer.rounds_planned or '-'}"),
        line((word or state, style), f" {time_text(since)}" if word else ""),
        line(("method ", "dim"), answer.method or "-"),
    ]
    lines = flow(pieces, cells, between=glyphs.dot)
    lines += named("updates", flow(_quorum_pieces(answer), cells - NAME_CELLS, between=glyphs.dot))
    lines += named("deadline", flow(_deadline_pieces(answer), cells - NAME_CELLS, between=glyphs.dot))
    lines += _awaited_lines(answer, cells)
    if before is not None:
        lines += compare_lines(answer, before, cells, glyphs)
    return lines


def _quorum_pieces(answer: Round) -> list[Line]:
    quorum = answer.quorum
    needed, of = f"{quorum.needed or '-'}", f"{quorum.of or '-'}"
    hidden = [line((f"how many are in: {HIDDEN}", "dim"))] if answer.party == "silo" else []
    if hidden or quorum.given is None:
        return [line(f"quorum {needed} of {of}"), *hidden]
    reached, missing = quorum.reached_seconds, (quorum.needed or 0) - quorum.given
    state = f"met at {duration_text(reached)}" if reached is not None else "not met yet" if missing > 0 else "met"
    waits = ""
    if answer.state == "open" and answer.awaited:
        at = deadline_of(answer)
        waits = f"waits for {missing} more" if missing > 0 else "the others have"
        waits += f" until {duration_text(at)}" if at is not None else ""
    more = [line((waits, "warn" if missing > 0 else ""))] if waits else []
    met = line(f"quorum {needed} ", (state, "warn" if missing > 0 else "ok"))
    return [line(f"{quorum.given} of {of} in"), met, *more]


def _deadline_pieces(answer: Round) -> list[Line]:
    pieces = []
    for deadline in answer.deadlines:
        left, at = deadline.left_seconds, deadline.at_seconds
        runs = f"{',' if at is not None else ''} in {duration_text(left)}" if left is not None else " as planned"
        where = f" at {duration_text(at)}" if at is not None else ""
        halt = " (stands still: paused)" if answer.paused and left is not None else ""
        style = "warn" if left is not None and left < 60 else ""
        pieces.append(line(deadline.for_, (f"{where}{runs}{halt}", style)))
    return pieces


def _awaited_lines(answer: Round, cells: int) -> list[Line]:
    if answer.party == "silo":
        return named("awaited", [line((f"{HIDDEN}: the coordinator tells no silo who is late", "dim"))])
    late = {row.silo: row.straggler for row in answer.silos if row.straggler}
    pieces = [
        line((each.silo, "warn" if each.silo in late else ""), (f" {phase_text(each)}", "dim"))
        for each in answer.awaited
    ]
    lines = named("awaited", flow(pieces, cells - NAME_CELLS, between=", ")[:2] or [line(("nobody", "dim"))])
    if late:
        causes = [
            piece for silo, why in late.items() for piece in (
                line((f"{silo} ", "warn"), late_text(why)),
                line((f"{phase_text(why)}, others took {time_text(why.median_seconds)}", "dim")),
            )
        ]  # fmt: skip
        lines += named("late", flow(causes, cells - NAME_CELLS, between="; ")[:4], "warn")
    return lines


def compare_lines(answer: Round, before: Round, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return what is otherwise than in the round before."""
    if not before.party:
        return named("compared", [line(("…", "dim"))])
    took, former = answer.closed_seconds, before.closed_seconds
    change = f" ({took - former:+.0f} s)" if took is not None and former is not None else ""
    pieces = [line(f"round {before.round} {before.state} after {time_text(former)}{change}")]
    given, earlier = answer.quorum.given, before.quorum.given
    if given is not None and earlier is not None:
        pieces.append(line(f"{earlier} updates then, {given} by this one"))
    changed = [
        name.replace("_", " ")
        for name, value in answer.digests.items()
        if value != before.digests.get(name) and name not in ("transcript", "adapter")
    ]
    others = [name for name in changed if name != "base adapter"]
    former_code = {row.silo: (row.code or "", row.policy or "") for row in before.silos}
    others += [
        f"code or policy of {row.silo}"
        for row in answer.silos
        if row.silo in former_code and former_code[row.silo] != (row.code or "", row.policy or "")
    ]
    pieces.append(line(("changed ", "dim"), ", ".join(others) or ("only the base adapter" if changed else "nothing")))
    return named("compared", flow(pieces, cells - NAME_CELLS, between=glyphs.dot))


# ---- facts -----------------------------------------------------------------------------------------


def fact_lines(answer: Round, cells: int, *, whole_digests: bool = False) -> list[Line]:
    """Return parameters and digests that the round is about."""
    shown = (lambda text: text) if whole_digests else digest_text
    digests = [
        line((f"{name.replace('_', ' ')} ", "dim"), shown(value) or "-")
        for name, value in answer.digests.items()
        if value or name in ("base_adapter", "adapter")
    ]
    codes = sorted({row.code for row in answer.silos if row.code})
    if codes:
        others = (f" and {len(codes) - 1} other" if codes[1:] else "", "warn")
        digests.append(line(("code ", "dim"), shown(codes[0]), others))
    plain = [line((f"{name.replace('_', ' ')} ", "dim"), text_of(value)) for name, value in answer.parameters.items()]
    if whole_digests:
        lines = [part for piece in digests for part in wrap("".join(text for text, _ in piece), cells)]
        return [*flow(plain, cells, between="   "), line(""), *lines]
    return [*named("digests", flow(digests, cells - NAME_CELLS, between="   ")),
            *named("with", flow(plain, cells - NAME_CELLS, between="   "))]  # fmt: skip


def silo_text(row: SiloInRound, answer: Round, before: Round | None, cells: int) -> list[Line]:
    """Return one silo whole: what it went through, how long each took, and what it runs."""
    facts = [("state", row.state), *([("why", row.why)] if row.why else [])]
    if answer.party == "coordinator":
        at = row.plan_at or (NOT_KEPT if row.plan == "accepted" else "-")
        facts += [
            ("joined", f"{row.joined or ''} {row.joined_at or ''}".strip()),
            ("plan", f"{row.plan or ''}; when: {at}"),
            ("seen", row.last_seen or "-"),
            ("walls", isolation_text(row.isolation or "")),
            ("code", row.code or "-"),
            ("policy", row.policy or "-"),
            ("came in", f"{row.received_messages or 0} messages, {row.received_bytes or 0:,} bytes"),
            ("update", f"L2 {row.update_norm or 0.0:.4g}  {row.update_digest}" if row.update_digest else "-"),
        ]
    lines = [part for name, text in facts for part in named(name, wrap(text, cells - NAME_CELLS))]
    if is_hidden(row, answer):
        text = f"{HIDDEN}: of other silos a silo knows the name, the signature and the verdict"
        return [*lines, *named("phases", wrap(text, cells - NAME_CELLS, "dim"))]
    lines.append(line(""))
    compared = before is not None and bool(before.party)
    former = {
        (phase.phase, phase.step): phase.seconds
        for other in (before.silos if before is not None else ())
        if other.silo == row.silo
        for phase in other.phases
    }
    heading = "  ".join([pad("phase", 42), pad("took", 9, right=True), *(["round before"] if compared else [])])
    lines.append(line((Shown(heading), "dim")))
    for phase in row.phases:
        words = PHASES[phase.phase].words.format(step=phase.step) if phase.phase in PHASES else phase.phase
        cell = pad(_took(phase, answer), 9, right=True)
        earlier = f"  {time_text(former.get((phase.phase, phase.step)))}" if compared else ""
        lines.append(line(pad(words, 42), "  ", (cell, _PHASE_STYLES.get(phase.state, "")), (earlier, "dim")))
    if not row.phases:
        lines.append(line(("no phase is on record", "dim")))
    if why := row.straggler:
        usual = time_text(why.median_seconds)
        if any(phase.state == "open" for phase in row.phases):
            text = f"{late_text(why)}; the others took {usual} for {phase_text(why)}"
        else:
            text = f"{phase_text(why)} took {time_text(why.seconds)}, more than twice the {usual} of the others"
        lines += named("late", wrap(text, cells - NAME_CELLS, "warn"), "warn")
    return lines


def _took(phase: Phase, answer: Round) -> str:
    if phase.state == "open":
        seconds = _open_seconds(phase, answer)
        return "open" if seconds == "?" else f"{seconds} on"
    if phase.state == "done":
        return NOT_KEPT if phase.seconds is None else time_text(phase.seconds)
    return phase.state


def rounds_line(answer: Round, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return the rounds around this one, for `[` and `]`."""
    pieces = []
    for item in answer.rounds:
        if abs(item.round - answer.round) > ROUNDS_SHOWN_AROUND:
            continue
        here = item.round == answer.round
        text = f" {item.state}"
        if item.seconds is not None:
            text += f" {time_text(item.seconds)}" + (f", {item.participants} in" if item.participants else "")
        pieces.append(line((f"{glyphs.cursor if here else ''}{item.round}", "strong" if here else ""), (text, "dim")))
    return named("rounds", flow(pieces, cells - NAME_CELLS, between="   ")[:2]) if pieces else []


def neighbours(answer: Round) -> tuple[int | None, int | None]:
    """Return the numbers of the round before and after this one, as far as they are listed."""
    numbers = [each.round for each in answer.rounds]
    earlier = max((each for each in numbers if each < answer.round), default=None)
    return earlier, min((each for each in numbers if each > answer.round), default=None)


def newest(answer: Round) -> int:
    """Return the newest round that is listed; 0 while none is."""
    return max((each.round for each in answer.rounds), default=0)

"""One round: a strip of phases for each silo, who is awaited, quorum and deadlines, and what the round is about.

From the answer of the query `round`. Pure: answers, time and width in, lines and rows out. A silo is told of the other
silos only what the coordinator says to all; every other cell reads `hidden`, never 0 and never empty.

Does not show: a time that nobody kept. Such a cell reads `not kept`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsilo.views.columns import Column, Row, choose_columns
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
from fedsilo.views.state import mapping, number, text_of, whole

QUERY = "round"
NAME_CELLS = 10
ROUNDS_SHOWN_AROUND = 3
HIDDEN = "hidden"
NOT_KEPT = "not kept"
SCALE_SHARE_MAX = 1.5  # a deadline further off than that is told in words, and the strips keep their room
# Phase -> sign, in Unicode and in ASCII. The legend names them.
SIGNS = {
    "sign": ("░", "s"), "train": ("━", "="), "pool": ("╌", "-"), "update": ("▓", "u"), "approval": ("!", "!"),
    "others": ("·", "."), "eval": ("█", "e"),
}  # fmt: skip
LEGEND = {
    "sign": "transcript", "train": "until answers", "pool": "waits for donors", "update": "until the update",
    "approval": "held", "others": "waits for others", "eval": "evaluates",
}  # fmt: skip
WORDS = {
    "sign": "signing the round's transcript", "train": "until its answers of step {step} were there",
    "pool": "waiting for the donors of step {step}", "update": "until its update was there",
    "approval": "held for people", "others": "waiting for the others", "eval": "until its evaluation was there",
}  # fmt: skip
_PHASE_STYLES = {"missed": "bad", "denied": "bad", "open": "accent", "kept back": "warn", "rejected": "warn"}
STEP_SIGN = ("╋", "+")  # the answers of a public step were there
QUORUM_SIGN, DEADLINE_SIGN = ("┊", ":"), ("┃", "|")
_AWAY = ("sits out", "declined", "rejected", "adapter held", "adapter refused")
_WARNED = ("left out", *_AWAY)
_BAD = ("absent", "refused", "silent", "denied")
_STATE_STYLES = {"accepted": "ok", **dict.fromkeys(_BAD, "bad"), **dict.fromkeys(_WARNED, "warn")}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _maybe(value: Any) -> float | None:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def time_text(seconds: Any) -> str:
    known = _maybe(seconds)
    return "-" if known is None else duration_text(known)


# ---- rows ------------------------------------------------------------------------------------------


def phases_of(row: Row) -> list[Mapping[str, Any]]:
    return [mapping(phase) for phase in _list(row.get("phases"))]


def is_hidden(row: Row, answer: Mapping[str, Any]) -> bool:
    """Whether this is another silo, seen from a silo."""
    return answer.get("party") == "silo" and row.get("own") is not True


def scale_of(answer: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> float:
    """Seconds that a strip is wide: as far as the round has come, and its deadline where that is near."""
    ends = [
        number(phase.get("to_seconds")) for silo in _list(answer.get("silos")) for phase in phases_of(mapping(silo))
    ]
    far = max([number(answer.get("elapsed_seconds")) if answer.get("state") == "open" else 0.0,
               number(answer.get("closed_seconds")), *ends, 1.0])  # fmt: skip
    deadline = deadline_of(answer)
    return deadline if deadline is not None and far < deadline <= far * SCALE_SHARE_MAX else far


def deadline_of(answer: Mapping[str, Any]) -> float | None:
    """When the round's own deadline is, in seconds from its opening."""
    for item in map(mapping, _list(answer.get("deadlines"))):
        if item.get("for") == "round":
            return _maybe(item.get("at_seconds"))
    return None


def strip_text(row: Row, answer: Mapping[str, Any], cells: int, scale: float, *, ascii_only: bool) -> str:
    """A silo's phases from the round's opening on, with a line where the quorum was there and one at the deadline."""
    if is_hidden(row, answer):
        return HIDDEN
    if cells < 1:
        return ""
    elapsed, column = _maybe(answer.get("elapsed_seconds")), 1 if ascii_only else 0
    shown, steps = [" "] * cells, list[int]()
    for phase in phases_of(row):
        start, end = _maybe(phase.get("from_seconds")), _maybe(phase.get("to_seconds"))
        runs = phase.get("state") == "open"
        end = elapsed if end is None and runs else end
        if start is None or end is None or end < start or (start == end and not runs):
            continue
        sign = SIGNS.get(text_of(phase.get("phase")), ("?", "?"))[column]
        first, last = (min(int(at / scale * cells), cells - 1) for at in (start, end))
        for place in range(first, max(last, first + 1) if last < cells - 1 or not runs else cells):
            shown[place] = sign
        if runs:
            shown[last] = ">" if ascii_only else "▸"
        elif phase.get("phase") == "train":
            steps.append(last)
    for place in steps:
        shown[place] = STEP_SIGN[column]
    for at, signs in ((_maybe(mapping(answer.get("quorum")).get("reached_seconds")), QUORUM_SIGN),
                      (deadline_of(answer), DEADLINE_SIGN)):  # fmt: skip
        if at is not None and 0 <= at <= scale:
            shown[min(int(at / scale * cells), cells - 1)] = signs[column]
    return Shown("".join(shown).rstrip() or " ")


def late_text(why: Mapping[str, Any]) -> str:
    """What is known of a silo that is silent for longer than its step takes the others. A coordinator is never told
    that people hold a release, so it cannot tell that from slow work, and nor can this console."""
    return f"no update for {time_text(why.get('seconds'))}: training, or held by its people"


def now_text(row: Row, answer: Mapping[str, Any]) -> str:
    """What a silo does, and for how long; of a round that is over, when its update was there."""
    if is_hidden(row, answer):
        return HIDDEN
    running = next((phase for phase in phases_of(row) if phase.get("state") == "open"), None)
    elapsed = _maybe(answer.get("elapsed_seconds"))
    if running is not None:
        started = _maybe(running.get("from_seconds"))
        took = duration_text(elapsed - started) if elapsed is not None and started is not None else "?"
        return f"{phase_text(running)} {took}"
    done = took_seconds(row, answer)
    return f"update {duration_text(done)}" if done is not None else "-"


def phase_text(phase: Mapping[str, Any]) -> str:
    name, step = text_of(phase.get("phase")), whole(phase.get("step"))
    return f"{name} {step}" if step else {"others": "for others", "update": "to update"}.get(name, name)


def took_seconds(row: Row, answer: Mapping[str, Any]) -> float | None:
    """From the opening to the silo's update; None before it, and where it is not known."""
    if is_hidden(row, answer):
        return None
    ends = [_maybe(phase.get("to_seconds")) for phase in phases_of(row)
            if phase.get("phase") == "update" and phase.get("state") == "done"]  # fmt: skip
    return ends[-1] if ends else None


def mark_of(row: Row, answer: Mapping[str, Any], glyphs: Glyphs) -> Part:
    state = text_of(row.get("state"))
    if row.get("straggler") and state != "silent":
        return glyphs.need, "warn"
    if state in ("not in it", *_AWAY):
        return glyphs.away, "dim"
    if state in ("absent", "left out", "refused", "silent"):
        return glyphs.bad, "bad"
    if any(text_of(mapping(each).get("silo")) == row.get("silo") for each in _list(answer.get("awaited"))):
        return glyphs.away, "warn"
    return glyphs.live, "ok"


def silo_rows(
    answer: Mapping[str, Any], before: Mapping[str, Any] | None, strip_cells: int, glyphs: Glyphs, *, ascii_only: bool
) -> list[dict[str, Any]]:
    """One row per silo with what the columns show."""
    scale = scale_of(answer)
    former = {text_of(row.get("silo")): row for row in map(mapping, _list(mapping(before).get("silos")))}
    rows = []
    for row in map(mapping, _list(answer.get("silos"))):
        took = took_seconds(row, answer)
        earlier = took_seconds(former.get(text_of(row.get("silo")), {}), mapping(before)) if before else None
        change = "" if took is None or earlier is None else f" ({took - earlier:+.0f} s)"
        hidden = is_hidden(row, answer)
        rows.append(
            {
                **row, "mark": mark_of(row, answer, glyphs), "now": now_text(row, answer),
                "strip": strip_text(row, answer, strip_cells, scale, ascii_only=ascii_only), "took": took,
                "before": HIDDEN if hidden else f"{time_text(earlier)}{change}",
                "bytes": HIDDEN if hidden or answer.get("party") == "silo" else bytes_text(
                    number(row.get("received_bytes"))),
            }
        )  # fmt: skip
    return rows


def _state(row: Row) -> Part:
    word = text_of(row.get("state"))
    return word, _STATE_STYLES.get(word, "")


def _plain(name: str) -> Any:
    def show(row: Row) -> Part:
        text = row.get(name)
        shown = text if isinstance(text, str) else ""
        return shown, "dim" if shown in (HIDDEN, "-") else ""

    return show


def _mark(row: Row) -> Part:
    mark = row.get("mark")
    return mark if isinstance(mark, tuple) else ("", "")


_MARK = Column(" ", _mark, 1, worth=0)
_SILO = Column("silo", lambda row: (text_of(row.get("silo")), "strong"), 12, worth=0)
_WORD = Column("state", _state, 9, worth=0)
_NOW = Column("now", _plain("now"), 18, worth=0)  # `approval 1:09:12`, and a word more than most
_STRIP = Column("phases", _plain("strip"), 26, worth=0, grows=True)
_BYTES = Column("in", _plain("bytes"), 9, worth=2, right=True, order=lambda row: number(row.get("received_bytes")))
_BEFORE = Column("round before", _plain("before"), 18, worth=0)
COLUMNS = (_MARK, _SILO, _WORD, _NOW, _STRIP, _BYTES)
COMPARED = (_MARK, _SILO, _WORD, _NOW, _BEFORE, Column(_STRIP.name, _STRIP.show, 4, worth=1, grows=True))


def strip_cells(columns: Sequence[Column], cells: int, turn: int) -> int:
    """How wide the strip is in a table of `cells`; 0 where it has no room."""
    chosen = choose_columns(columns, cells, turn=turn)
    return next((width for column, width in chosen if column.name == _STRIP.name), 0)


def strip_place(columns: Sequence[Column], cells: int, turn: int) -> int:
    """Where the strip begins."""
    at = 2
    for column, width in choose_columns(columns, cells, turn=turn):
        if column.name == _STRIP.name:
            return at
        at += width + 2
    return at


def scale_line(
    answer: Mapping[str, Any], columns: Sequence[Column], cells: int, turn: int, *, ascii_only: bool
) -> Line:
    """The time under the strips: 0, the middle and the end."""
    width = strip_cells(columns, cells, turn)
    scale = scale_of(answer)
    end, start, middle = duration_text(scale), "0", duration_text(scale / 2)
    if width < len(end) + len(start) + 3:
        return line("")
    dash = "-" if ascii_only else "─"
    shown = [dash] * width
    for text, at in ((start, 0), (middle, (width - len(middle)) // 2), (end, width - len(end))):
        if all(shown[place] == dash for place in range(at, at + len(text))):
            shown[at : at + len(text)] = list(text)
    return line((Shown(" " * strip_place(columns, cells, turn) + "".join(shown)), "dim"))


def legend_lines(answer: Mapping[str, Any], cells: int, *, ascii_only: bool) -> list[Line]:
    """What the signs of this round's strips mean."""
    column = 1 if ascii_only else 0
    there = {text_of(phase.get("phase")) for silo in _list(answer.get("silos")) for phase in phases_of(mapping(silo))
             if phase.get("from_seconds") is not None}  # fmt: skip
    pieces = [line((SIGNS[name][column] * 2, "accent"), f" {LEGEND[name]}") for name in SIGNS if name in there]
    if "train" in there:
        pieces.append(line((STEP_SIGN[column], "accent"), " answers of a step"))
    if mapping(answer.get("quorum")).get("reached_seconds") is not None:
        pieces.append(line((QUORUM_SIGN[column], "accent"), " quorum was there"))
    deadline = deadline_of(answer)
    if deadline is not None and deadline <= scale_of(answer):
        pieces.append(line((DEADLINE_SIGN[column], "accent"), " deadline"))
    return flow(pieces, cells, between="  ")


# ---- head ------------------------------------------------------------------------------------------


def head_lines(answer: Mapping[str, Any], before: Mapping[str, Any] | None, cells: int, glyphs: Glyphs) -> list[Line]:
    """Which round, how far, the quorum, the deadlines and who is awaited."""
    if not answer:
        return []
    state, run_state = text_of(answer.get("state")), text_of(answer.get("run_state"))
    since = answer.get("elapsed_seconds") if state == "open" else answer.get("closed_seconds")
    word = {"open": "open for", "no round yet": ""}.get(state, f"{state} after")
    style = {"committed": "ok", "abandoned": "bad", "open": "accent"}.get(state, "")
    pieces = [
        line(
            (text_of(answer.get("run")) or "-", "strong"), (f" {run_state}", "warn" if run_state == "paused" else "dim")
        ),
        line(
            "round ",
            (f"{whole(answer.get('round')) or '-'}", "strong"),
            f" of {whole(answer.get('rounds_planned')) or '-'}",
        ),
        line((word or state, style), f" {time_text(since)}" if word else ""),
        line(("method ", "dim"), text_of(answer.get("method")) or "-"),
    ]
    lines = flow(pieces, cells, between=glyphs.dot)
    lines += named("updates", flow(_quorum_pieces(answer), cells - NAME_CELLS, between=glyphs.dot))
    lines += named("deadline", flow(_deadline_pieces(answer), cells - NAME_CELLS, between=glyphs.dot))
    lines += _awaited_lines(answer, cells)
    if before is not None:
        lines += compare_lines(answer, before, cells, glyphs)
    return lines


def _quorum_pieces(answer: Mapping[str, Any]) -> list[Line]:
    quorum = mapping(answer.get("quorum"))
    needed, of = f"{quorum.get('needed') or '-'}", f"{quorum.get('of') or '-'}"
    hidden = [line((f"how many are in: {HIDDEN}", "dim"))] if answer.get("party") == "silo" else []
    if hidden or quorum.get("given") is None:
        return [line(f"quorum {needed} of {of}"), *hidden]
    reached = _maybe(quorum.get("reached_seconds"))
    enough = whole(quorum.get("given")) >= whole(quorum.get("needed"))
    told = f"met at {duration_text(reached)}" if reached is not None else "met" if enough else "not met yet"
    waits = ""
    if answer.get("state") == "open" and _list(answer.get("awaited")):
        missing, at = whole(quorum.get("needed")) - whole(quorum.get("given")), deadline_of(answer)
        waits = "the others have" if enough else f"waits for {missing} more"
        waits += f" until {duration_text(at)}" if at is not None else ""
    more = [line((waits, "" if enough else "warn"))] if waits else []
    met = line(f"quorum {needed} ", (told, "ok" if enough else "warn"))
    return [line(f"{whole(quorum.get('given'))} of {of} in"), met, *more]


def _deadline_pieces(answer: Mapping[str, Any]) -> list[Line]:
    pieces = []
    paused = answer.get("paused") is True
    for item in map(mapping, _list(answer.get("deadlines"))):
        left, at = _maybe(item.get("left_seconds")), _maybe(item.get("at_seconds"))
        told = f"{',' if at is not None else ''} in {duration_text(left)}" if left is not None else ""
        where = f" at {duration_text(at)}" if at is not None else ""
        halt = " (stands still: paused)" if paused and left is not None else ""
        plan = " as planned" if left is None else ""
        style = "warn" if left is not None and left < 60 else ""
        pieces.append(line(text_of(item.get("for")), (f"{where}{told}{plan}{halt}", style)))
    return pieces


def _awaited_lines(answer: Mapping[str, Any], cells: int) -> list[Line]:
    if answer.get("party") == "silo":
        return named("awaited", [line((f"{HIDDEN}: the coordinator tells no silo who is late", "dim"))])
    awaited = [mapping(each) for each in _list(answer.get("awaited"))]
    late = {text_of(row.get("silo")): mapping(row.get("straggler")) for row in map(mapping, _list(answer.get("silos")))
            if row.get("straggler")}  # fmt: skip
    pieces = [
        line(
            (text_of(each.get("silo")), "warn" if text_of(each.get("silo")) in late else ""),
            (f" {phase_text(each)}", "dim"),
        )
        for each in awaited
    ]
    lines = named("awaited", flow(pieces, cells - NAME_CELLS, between=", ")[:2] or [line(("nobody", "dim"))])
    if late:
        told = [
            piece for silo, why in late.items() for piece in (
                line((f"{silo} ", "warn"), late_text(why)),
                line((f"{phase_text(why)}, others took {time_text(why.get('median_seconds'))}", "dim")),
            )
        ]  # fmt: skip
        lines += named("late", flow(told, cells - NAME_CELLS, between="; ")[:4], "warn")
    return lines


def compare_lines(answer: Mapping[str, Any], before: Mapping[str, Any], cells: int, glyphs: Glyphs) -> list[Line]:
    """What is otherwise than in the round before."""
    if not before:
        return named("compared", [line(("…", "dim"))])
    took, former = _maybe(answer.get("closed_seconds")), _maybe(before.get("closed_seconds"))
    change = f" ({took - former:+.0f} s)" if took is not None and former is not None else ""
    pieces = [
        line(f"round {whole(before.get('round'))} {text_of(before.get('state'))} after {time_text(former)}{change}")
    ]
    given, earlier = (mapping(each.get("quorum")).get("given") for each in (answer, before))
    if given is not None and earlier is not None:
        pieces.append(line(f"{whole(earlier)} updates then, {whole(given)} by this one"))
    changed = [
        name
        for name, value in mapping(answer.get("digests")).items()
        if value != mapping(before.get("digests")).get(name) and name not in ("transcript", "adapter")
    ]
    expected = [name for name in changed if name == "base_adapter"]
    others = [name.replace("_", " ") for name in changed if name != "base_adapter"]
    codes = [
        text_of(row.get("silo"))
        for row in map(mapping, _list(answer.get("silos")))
        for other in map(mapping, _list(before.get("silos")))
        if other.get("silo") == row.get("silo")
        and (other.get("code") or "", other.get("policy") or "") != (row.get("code") or "", row.get("policy") or "")
    ]
    pieces.append(line(("changed ", "dim"), ", ".join([*others, *(f"code or policy of {silo}" for silo in codes)])
                       or ("only the base adapter" if expected else "nothing"), ))  # fmt: skip
    return named("compared", flow(pieces, cells - NAME_CELLS, between=glyphs.dot))


# ---- facts -----------------------------------------------------------------------------------------


def fact_lines(answer: Mapping[str, Any], cells: int, *, whole_digests: bool = False) -> list[Line]:
    """Parameters and digests that the round is about."""
    digests, parameters = mapping(answer.get("digests")), mapping(answer.get("parameters"))
    shown = (lambda text: text) if whole_digests else digest_text
    told = [line((f"{name.replace('_', ' ')} ", "dim"), shown(text_of(value)) or "-") for name, value in digests.items()
            if value or name in ("base_adapter", "adapter")]  # fmt: skip
    codes = sorted({text_of(row.get("code")) for row in map(mapping, _list(answer.get("silos")))} - {""})
    if codes:
        told.append(
            line(("code ", "dim"), shown(codes[0]), (f" and {len(codes) - 1} other" if codes[1:] else "", "warn"))
        )
    plain = [line((f"{name.replace('_', ' ')} ", "dim"), text_of(value)) for name, value in parameters.items()]
    if whole_digests:
        lines = [part for piece in told for part in wrap("".join(text for text, _ in piece), cells)]
        return [*flow(plain, cells, between="   "), line(""), *lines]
    return [*named("digests", flow(told, cells - NAME_CELLS, between="   ")),
            *named("with", flow(plain, cells - NAME_CELLS, between="   "))]  # fmt: skip


def silo_text(row: Row, answer: Mapping[str, Any], before: Mapping[str, Any] | None, cells: int) -> list[Line]:
    """One silo whole: what it went through, how long each took, and what it runs."""
    silo = text_of(row.get("silo"))
    facts: list[tuple[str, str]] = [("state", text_of(row.get("state")))]
    if row.get("why"):
        facts.append(("why", text_of(row.get("why"))))
    if is_hidden(row, answer):
        lines = [part for name, text in facts for part in named(name, wrap(text, cells - NAME_CELLS))]
        told = "of other silos a silo is told the name, the signature and the verdict; everything else is hidden"
        return [*lines, *named("phases", wrap(f"{HIDDEN}: {told}", cells - NAME_CELLS, "dim"))]
    if answer.get("party") == "coordinator":
        at = text_of(row.get("plan_at")) or (NOT_KEPT if text_of(row.get("plan")) == "accepted" else "-")
        facts += [
            ("joined", f"{text_of(row.get('joined'))} {text_of(row.get('joined_at'))}".strip()),
            ("plan", f"{text_of(row.get('plan'))}; when: {at}"), ("seen", text_of(row.get("last_seen")) or "-"),
            ("walls", isolation_text(text_of(row.get("isolation")))), ("code", text_of(row.get("code")) or "-"),
            ("policy", text_of(row.get("policy")) or "-"),
            ("came in", f"{whole(row.get('received_messages'))} messages, {whole(row.get('received_bytes')):,} bytes"),
            ("update", (f"L2 {number(row.get('update_norm')):.4g}  {text_of(row.get('update_digest'))}"
                        if row.get("update_digest") else "-")),
        ]  # fmt: skip
    lines = [part for name, text in facts for part in named(name, wrap(text, cells - NAME_CELLS))]
    lines.append(line(""))
    former = {(text_of(phase.get("phase")), whole(phase.get("step"))): phase
              for other in map(mapping, _list(mapping(before).get("silos"))) if other.get("silo") == silo
              for phase in phases_of(other)}  # fmt: skip
    heading = "  ".join([pad("phase", 42), pad("took", 9, right=True), *(["round before"] if before else [])])
    lines.append(line((Shown(heading), "dim")))
    for phase in phases_of(row):
        words = WORDS.get(text_of(phase.get("phase")), text_of(phase.get("phase"))).format(
            step=whole(phase.get("step"))
        )
        earlier = former.get((text_of(phase.get("phase")), whole(phase.get("step"))), {})
        cell = pad(_took(phase, answer), 9, right=True)
        style = _PHASE_STYLES.get(text_of(phase.get("state")), "")
        lines.append(line(pad(words, 42), "  ", (cell, style),
                          (f"  {time_text(earlier.get('seconds'))}" if before else "", "dim")))  # fmt: skip
    if not phases_of(row):
        lines.append(line(("no phase is on record", "dim")))
    if why := mapping(row.get("straggler")):
        told = (f"{phase_text(why)} took {time_text(why.get('seconds'))}, more than twice the "
                f"{time_text(why.get('median_seconds'))} of the others")  # fmt: skip
        if any(phase.get("state") == "open" for phase in phases_of(row)):
            told = f"{late_text(why)}; the others took {time_text(why.get('median_seconds'))} for {phase_text(why)}"
        lines += named("late", wrap(told, cells - NAME_CELLS, "warn"), "warn")
    return lines


def _took(phase: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    state = text_of(phase.get("state"))
    if state == "open":
        elapsed, started = _maybe(answer.get("elapsed_seconds")), _maybe(phase.get("from_seconds"))
        return f"{duration_text(elapsed - started)} on" if elapsed is not None and started is not None else "open"
    if state == "done":
        return time_text(phase.get("seconds")) if phase.get("seconds") is not None else NOT_KEPT
    return state


def rounds_line(answer: Mapping[str, Any], cells: int, glyphs: Glyphs) -> list[Line]:
    """The rounds around this one, for `[` and `]`."""
    here = whole(answer.get("round"))
    listed = [mapping(item) for item in _list(answer.get("rounds"))]
    near = [item for item in listed if abs(whole(item.get("round")) - here) <= ROUNDS_SHOWN_AROUND]
    pieces = []
    for item in near:
        number_, took = whole(item.get("round")), item.get("seconds")
        mark = glyphs.cursor if number_ == here else ""
        told = f" {text_of(item.get('state'))}" + (f" {time_text(took)}" if took is not None else "")
        told += f", {whole(item.get('participants'))} in" if item.get("participants") and took is not None else ""
        pieces.append(line((f"{mark}{number_}", "strong" if number_ == here else ""), (told, "dim")))
    return named("rounds", flow(pieces, cells - NAME_CELLS, between="   ")[:2]) if pieces else []


def neighbours(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Numbers of the round before and after this one, as far as they are listed."""
    numbers = sorted(whole(mapping(item).get("round")) for item in _list(answer.get("rounds")))
    here = whole(answer.get("round"))
    earlier = [each for each in numbers if each < here]
    later = [each for each in numbers if each > here]
    return (earlier[-1] if earlier else None), (later[0] if later else None)

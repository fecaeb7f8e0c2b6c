"""The limits of the policy in force as rows and lines: how much is used, what binds, and what no limit counts.

From the answer of the query `limits`. Pure: answer, time and width in, rows and lines out.

Does not show: limits of a single message (the decision on each message does), nor what the numbers were used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedsilo.control.answers import CapacityRow, LimitRow, Limits, SpentRow
from fedsilo.views.columns import Column
from fedsilo.views.lines import Glyphs, Line, Part, bytes_text, flow, line, named, wrap

LOOK_SHARE = 0.8  # above it a limit is named first
BAR_CELLS = 6
AMOUNT_CELLS = 20
LOOK_NAMED_MAX = 6
NAME_CELLS = 10  # of what a line is about
HOUR_SECONDS, DAY_SECONDS = 3600, 86400
DP_OFF = "DP off: no privacy budget is kept and none is claimed"
NOT_COVERED = "what a message says, limits of one message (the outbox shows them), other ways out than the guard"
WORDS = {
    "FULL": "nothing more fits", "look": "above 80 %", "over": "more was used than is allowed",
}  # fmt: skip
FORECAST_TAKES = "if each is like the last one; messages of content only"


# ---- rows ------------------------------------------------------------------------------------------


class ShownLimit(LimitRow):
    """A limit as it stands at the moment it is shown: how much of it is used, in words and as a bar."""

    state: str
    share: float
    amount: str
    bar: str
    percent: str
    resets: str


def amount_text(value: int, unit: str) -> str:
    return bytes_text(value) if unit == "bytes" else f"{value:,}"


def of_text(row: LimitRow) -> str:
    """Return such as 223.1 of 256.0 MiB: a measure that both have is written once."""
    used, most = amount_text(row.used, row.unit), amount_text(row.max, row.unit)
    measure = f" {most.rpartition(' ')[2]}" if row.unit == "bytes" else ""
    text = f"{used.removesuffix(measure)} of {most}"
    # of much less than is allowed a tenth says nothing, and a measure that is cut off says less
    return text if len(text) <= AMOUNT_CELLS else f"{_whole_of(used)} of {most}"


def _whole_of(amount: str) -> str:
    """Rounded up, so that no more is used than it says."""
    figures, _, measure = amount.partition(" ")
    return f"{math.ceil(float(figures.replace(',', ''))):,} {measure}".rstrip()


def share_of(row: LimitRow) -> float:
    """Return used of what is allowed; a limit of nothing is used up by the first that is counted."""
    return row.used / row.max if row.max > 0 else (math.inf if row.used > 0 else 0.0)


def state_of(share: float) -> str:
    """Return ok; look: above `LOOK_SHARE`; FULL: nothing more fits."""
    return "FULL" if share >= 1 else "look" if share > LOOK_SHARE else "ok"


def bar_text(share: float, cells: int, glyphs: Glyphs) -> str:
    """Full only when it is, empty only when it is."""
    full = cells if share >= 1 else min(max(math.floor(share * cells), 1 if share > 0 else 0), cells - 1)
    return glyphs.full * full + glyphs.empty * (cells - full)


def legend_lines(rows: Sequence[ShownLimit], cells: int) -> list[Line]:
    """Return the meaning of those words in the rows that call for somebody."""
    there = {word for row in rows for word in (row.state, row.percent)}
    pieces = [
        line((f"{word} ", _STATE_STYLES.get(word, "bad")), (says, "dim"))
        for word, says in WORDS.items()
        if word in there
    ]
    return named("words", flow(pieces, cells - NAME_CELLS, between="  "))


def tables_line(titles: Mapping[str, str], sizes: Mapping[str, int], shown: str) -> Line:
    """The tables of which one is seen: their names with how many rows each has."""
    pieces: list[Part] = [(f"{'tables':{NAME_CELLS}}", "dim")]
    for name, title in titles.items():
        text = f"{title} {sizes.get(name, 0)}"
        pieces.append((f"[{text}]  " if name == shown else f"{text}  ", "strong" if name == shown else ""))
    return (*pieces, ("tab: next", "dim"))


def percent_text(share: float) -> str:
    return "over" if share > 1 else f"{math.floor(share * 100)} %"


def resets_text(window: str, now: float) -> str:
    """Return when what was used no longer counts. `now`: UTC seconds."""
    match window:
        case "minute":
            return "after 60 s each"
        case "round" | "match":
            return f"next {window}"
        case "day":
            if not now:  # the daemon's clock is not known yet
                return "00:00Z"
            left = DAY_SECONDS - int(now) % DAY_SECONDS
            return f"00:00Z in {left // HOUR_SECONDS}h{left % HOUR_SECONDS // 60:02d}"
        case "run":
            return "next run"
        case "life":
            return "as room is freed"
    return "-"


def limit_rows(limits: Sequence[LimitRow], now: float, glyphs: Glyphs) -> list[ShownLimit]:
    """Return the limits, those above `LOOK_SHARE` first and among them the fullest; the others as the policy has
    them."""
    shown = [_shown(row, now, glyphs) for row in limits]
    return sorted(shown, key=lambda row: (row.state == "ok", -row.share if row.state != "ok" else 0.0))


def _shown(row: LimitRow, now: float, glyphs: Glyphs) -> ShownLimit:
    share = share_of(row)
    return ShownLimit(
        **vars(row), state=state_of(share), share=share, amount=of_text(row), bar=bar_text(share, BAR_CELLS, glyphs),
        percent=percent_text(share), resets=resets_text(row.window, now),
    )  # fmt: skip


def limit_id(row: LimitRow) -> str:
    return f"{row.limit} {row.kind} {row.window}"


_STATE_STYLES = {"ok": "ok", "look": "warn", "FULL": "bad"}


def _style(row: ShownLimit) -> str:
    return _STATE_STYLES.get(row.state, "")


LIMIT_COLUMNS = (
    Column("state", lambda row: (row.state, _style(row)), 5, worth=0),
    # names whole: in 80 cells they are worth more than a share that the amounts beside it say as well
    Column("limit", lambda row: (row.limit, "strong"), 27, worth=0, grows=True),
    Column("kind", lambda row: (row.kind, ""), 16, worth=0, grows=True),
    Column("used of max", lambda row: (row.amount, ""), AMOUNT_CELLS, worth=0, right=True,
           order=lambda row: row.share),
    Column("share", lambda row: (row.percent, _style(row)), 5, worth=1, right=True, order=lambda row: row.share),
    Column("full", lambda row: (row.bar, _style(row)), BAR_CELLS, worth=3, order=lambda row: row.share),
    # wide, so that it takes no room that the names need
    Column("unit", lambda row: (row.unit, ""), 14, worth=6),
    Column("window", lambda row: (row.window, ""), 6, worth=2),
    Column("resets", lambda row: (row.resets, ""), 16, worth=4),
    Column("policy", lambda row: (row.line, "dim"), 16, worth=5),
)  # fmt: skip


def _planted(row: CapacityRow) -> Part:
    return ("not tried", "dim") if row.planted_bits is None else (f"{row.planted_bits:,.0f}", "")


CAPACITY_COLUMNS = (
    Column("kind", lambda row: (row.kind, "strong"), 18, worth=0),
    Column("bits at most", lambda row: (f"{row.bits:,.0f}", "strong"), 14, worth=0, right=True,
           order=lambda row: row.bits),
    Column("as bytes", lambda row: (bytes_text(row.bits / 8), ""), 9, worth=1, right=True,
           order=lambda row: row.bits),
    Column("got out, tried", _planted, 14, worth=2, right=True, order=lambda row: row.planted_bits or 0.0),
    Column("because", lambda row: (row.because, ""), 24, worth=3, grows=True),
)  # fmt: skip


RELEASE_COLUMNS = (
    Column("at UTC", lambda row: (row.at[:19].replace("T", " "), ""), 19, worth=0),
    Column("round", lambda row: (f"r{row.round}", ""), 5, worth=0, right=True, order=lambda row: row.round),
    Column("kind", lambda row: (row.kind, "strong"), 16, worth=0, grows=True),
    Column("bytes", lambda row: (bytes_text(row.bytes), ""), 9, worth=0, right=True, order=lambda row: row.bytes),
    Column("outcome", lambda row: (row.outcome, ""), 10, worth=1),
    Column("record", lambda row: (str(row.seq), "accent"), 8, worth=2, right=True,
           order=lambda row: row.seq if isinstance(row.seq, int) else 0),
    Column("run", lambda row: (row.run, ""), 12, worth=3, grows=True),
)  # fmt: skip


# ---- head ------------------------------------------------------------------------------------------


def look_lines(
    rows: Sequence[ShownLimit], cells: int, glyphs: Glyphs, *, most: int = LOOK_NAMED_MAX
) -> list[Line]:  # fmt: skip
    """Return the limits above `LOOK_SHARE` by name, at most so many; the table has all of them on top."""
    above = [row for row in rows if row.state != "ok"]
    if not above:
        return [line((f"{'ok':{NAME_CELLS}}", "ok"), f"no limit is above {LOOK_SHARE:.0%}".replace("%", " %"))]
    pieces = [
        line((f"{row.limit} ", ""), (f"{row.kind} ", "dim"), (row.percent, _STATE_STYLES.get(row.state, "")))
        for row in above[:most]
    ]
    if len(above) > most:
        pieces.append(line((f"and {len(above) - most} more", "warn")))
    return named("look", flow(pieces, cells - NAME_CELLS, between=glyphs.dot), "warn")


def dp_line(answer: Limits) -> Line:
    """Return it in words; what a daemon says otherwise is repeated, not interpreted."""
    words = (DP_OFF, "warn") if answer.dp == "off" else f"DP {answer.dp or 'not told'}"
    return line((f"{'privacy':{NAME_CELLS}}", "dim"), words)


def forecast_lines(answer: Limits, cells: int) -> list[Line]:
    left, bound = answer.forecast.rounds_left, answer.forecast.bound_by
    if left is None:
        return named("forecast", wrap(f"no forecast: {bound or 'not told'}", cells - NAME_CELLS))
    if not left:
        return named("forecast", wrap(f"no further round fits: bound by {bound}", cells - NAME_CELLS, "bad"), "bad")
    text = f"about {left:,} more {'round' if left == 1 else 'rounds'}, {FORECAST_TAKES}; bound by {bound}"
    return named("forecast", wrap(text, cells - NAME_CELLS))


def capacity_lines(answer: Limits, cells: int) -> list[Line]:
    """Return what a hostile trainer could carry out, all kinds together."""
    total = sum(row.bits for row in answer.capacity)
    if not total:
        return named("capacity", wrap("no kind whose values the trainer chooses may leave", cells - NAME_CELLS))
    text = f"at most {total:,.0f} bits ({bytes_text(total / 8)}) a round by a hostile trainer"
    return named("capacity", wrap(text, cells - NAME_CELLS))


def not_covered_lines(answer: Limits, cells: int) -> list[Line]:
    more = f"; {answer.not_counted}" if answer.not_counted else ""
    return named("uncounted", wrap(NOT_COVERED + more, cells - NAME_CELLS, "dim"))


def head_lines(answer: Limits, rows: Sequence[ShownLimit], cells: int, glyphs: Glyphs, *, brief: bool) -> list[Line]:
    """Return what stands above the rows; `brief` leaves what is not covered to the help of the row (`enter`) and the
    twin."""
    look = look_lines(rows, cells, glyphs, most=1 if brief else LOOK_NAMED_MAX)
    lines = [*look, *forecast_lines(answer, cells), dp_line(answer), *capacity_lines(answer, cells)]
    return lines if brief else [*lines, *not_covered_lines(answer, cells), *legend_lines(rows, cells)]


# ---- one row whole ---------------------------------------------------------------------------------


def limit_text(row: ShownLimit, cells: int) -> list[Line]:
    words = "; ".join(f"{word}: {WORDS[word]}" for word in (row.state, row.percent) if word in WORDS)
    counted = f" ({row.used:,} of {row.max:,} bytes)" if row.unit == "bytes" else ""
    return _facts(
        cells,
        ("limit", row.limit),
        ("counts", f"{row.kind}, in {row.unit}"),
        ("used", f"{amount_text(row.used, row.unit)} of {amount_text(row.max, row.unit)}{counted}"),
        ("state", words or row.state or "-"),
        ("window", f"{row.window}; resets: {row.resets}"),
        ("set at", row.line),
    )


def capacity_text(row: CapacityRow, answer: Limits, cells: int) -> list[Line]:
    tried = "no scheme that hides bits was tried for this kind"
    if row.planted_bits is not None:
        tried = f"{row.planted_bits:,.0f} bits a round were got out by a scheme planted on purpose: {row.planted}"
    every = f"{row.bits:,.0f} a round ({bytes_text(row.bits / 8)}), if the trainer's owner chose every free value"
    return _facts(
        cells,
        ("kind", row.kind),
        ("bits", every),
        ("because", row.because),
        ("tried", tried),
        ("uncounted", answer.not_counted),
    )


def release_text(row: SpentRow, cells: int) -> list[Line]:
    return _facts(
        cells,
        ("kind", row.kind),
        ("bytes", f"{row.bytes:,.0f}"),
        ("at", row.at),
        ("run", f"{row.run}, round {row.round}"),
        ("outcome", row.outcome or "not known yet"),
        ("record", str(row.seq)),
    )


def _facts(cells: int, *facts: tuple[str, str]) -> list[Line]:
    return [part for name, text in facts for part in named(name, wrap(text, cells - NAME_CELLS))]

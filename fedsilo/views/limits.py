"""The limits of the policy in force as rows and lines: how much is used, what binds, and what no limit counts.

From the answer of the query `limits`. Pure: answer, time and width in, rows and lines out.

Does not show: limits of a single message (the decision on each message does), nor what the numbers were used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.control.answers import CapacityRow, LimitRow, SpentRow, read
from fedsilo.views.columns import Column, Row
from fedsilo.views.lines import Glyphs, Line, Part, bytes_text, flow, line, wrap
from fedsilo.views.state import mapping, number, text_of, whole

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


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


# ---- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownLimit(LimitRow):
    """A limit as it stands at the moment it is shown: how much of it is used, in words and as a bar."""

    state: str
    share: float
    amount: str
    bar: str
    percent: str
    resets: str


def shown_limit(row: Any) -> ShownLimit:
    """Read a row of `limit_rows`."""
    return read(ShownLimit, row)


def capacity_row(row: Any) -> CapacityRow:
    return read(CapacityRow, row)


def spent_row(row: Any) -> SpentRow:
    return read(SpentRow, row)


def amount_text(value: Any, unit: str) -> str:
    return bytes_text(number(value)) if unit == "bytes" else f"{whole(value):,}"


def of_text(row: Row, unit: str) -> str:
    """Such as 223.1 of 256.0 MiB: a measure that both have stands once."""
    used, most = amount_text(row.get("used"), unit), amount_text(row.get("max"), unit)
    measure = f" {most.rpartition(' ')[2]}" if unit == "bytes" else ""
    text = f"{used.removesuffix(measure)} of {most}"
    # of much less than is allowed a tenth says nothing, and a measure that is cut off says less
    return text if len(text) <= AMOUNT_CELLS else f"{_whole_of(used)} of {most}"


def _whole_of(amount: str) -> str:
    """Rounded up, so that no more is used than it says."""
    figures, _, measure = amount.partition(" ")
    return f"{math.ceil(float(figures.replace(',', ''))):,} {measure}".rstrip()


def share_of(row: Row) -> float:
    """Used of what is allowed; a limit of nothing is used up by the first that is counted."""
    used, most = number(row.get("used")), number(row.get("max"))
    return used / most if most > 0 else (math.inf if used > 0 else 0.0)


def state_of(row: Row) -> str:
    """ok; look: above `LOOK_SHARE`; FULL: nothing more fits."""
    share = share_of(row)
    return "FULL" if share >= 1 else "look" if share > LOOK_SHARE else "ok"


def bar_text(share: float, cells: int, glyphs: Glyphs) -> str:
    """Full only when it is, empty only when it is."""
    full = cells if share >= 1 else min(max(math.floor(share * cells), 1 if share > 0 else 0), cells - 1)
    return glyphs.full * full + glyphs.empty * (cells - full)


def legend_lines(rows: Sequence[Row], cells: int) -> list[Line]:
    """What the words of the rows mean that call for somebody, as far as they are there."""
    there = {text_of(row.get("state")) for row in rows} | {text_of(row.get("percent")) for row in rows}
    pieces = [line((f"{word} ", _STATE_STYLES.get(word, "bad")), (says, "dim")) for word, says in WORDS.items()
              if word in there]  # fmt: skip
    return _named("words", flow(pieces, cells - NAME_CELLS, between="  "))


def tables_line(titles: Mapping[str, str], sizes: Mapping[str, int], shown: str) -> Line:
    """The tables of which one is seen: their names with how many rows each has.

    Args:
        titles: name of a table -> how it is called here.
        sizes: name of a table -> its rows.
        shown: name of the one that is seen.
    """
    pieces: list[Part] = [(f"{'tables':{NAME_CELLS}}", "dim")]
    for name, title in titles.items():
        text = f"{title} {sizes.get(name, 0)}"
        pieces.append((f"[{text}]  " if name == shown else f"{text}  ", "strong" if name == shown else ""))
    return (*pieces, ("tab: next", "dim"))


def percent_text(share: float) -> str:
    return "over" if share > 1 else f"{math.floor(share * 100)} %"


def resets_text(window: str, now: float) -> str:
    """When what was used counts no more. `now`: UTC seconds."""
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


def limit_rows(answer: Mapping[str, Any], now: float, glyphs: Glyphs) -> list[dict[str, Any]]:
    """The limits, those above `LOOK_SHARE` first and among them the fullest; the others as the policy has them."""
    rows = []
    for item in map(mapping, _list(answer.get("rows"))):
        unit, share = text_of(item.get("unit")), share_of(item)
        rows.append(
            {
                **item, "state": state_of(item), "share": share,
                "amount": of_text(item, unit),
                "bar": bar_text(share, BAR_CELLS, glyphs), "percent": percent_text(share),
                "resets": resets_text(text_of(item.get("window")), now),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (row["state"] == "ok", -row["share"] if row["state"] != "ok" else 0.0))


def limit_id(row: Row) -> str:
    return f"{text_of(row.get('limit'))} {text_of(row.get('kind'))} {text_of(row.get('window'))}"


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


def capacity_rows(answer: Mapping[str, Any]) -> list[Row]:
    return sorted(map(mapping, _list(answer.get("capacity"))), key=lambda row: -number(row.get("bits")))


def capacity_total(answer: Mapping[str, Any]) -> float:
    return sum(number(row.get("bits")) for row in capacity_rows(answer))


RELEASE_COLUMNS = (
    Column("at UTC", lambda row: (row.at[:19].replace("T", " "), ""), 19, worth=0),
    Column("round", lambda row: (f"r{row.round}", ""), 5, worth=0, right=True, order=lambda row: row.round),
    Column("kind", lambda row: (row.kind, "strong"), 16, worth=0, grows=True),
    Column("bytes", lambda row: (bytes_text(row.bytes), ""), 9, worth=0, right=True, order=lambda row: row.bytes),
    Column("outcome", lambda row: (row.outcome, ""), 10, worth=1),
    Column("record", lambda row: (text_of(row.seq), "accent"), 8, worth=2, right=True,
           order=lambda row: number(row.seq)),
    Column("run", lambda row: (row.run, ""), 12, worth=3, grows=True),
)  # fmt: skip


def release_rows(answer: Mapping[str, Any]) -> list[Row]:
    return [mapping(row) for row in _list(answer.get("releases"))]


def release_id(row: Row) -> str:
    return text_of(row.get("seq"))


# ---- head ------------------------------------------------------------------------------------------


def look_lines(rows: Sequence[Row], cells: int, glyphs: Glyphs, *, most: int = LOOK_NAMED_MAX) -> list[Line]:
    """The limits above `LOOK_SHARE` by name, at most so many; the table has all of them on top."""
    named = [row for row in rows if row.get("state") != "ok"]
    if not named:
        return [line((f"{'ok':{NAME_CELLS}}", "ok"), f"no limit is above {LOOK_SHARE:.0%}".replace("%", " %"))]
    pieces = [
        line((f"{text_of(row.get('limit'))} ", ""), (f"{text_of(row.get('kind'))} ", "dim"),
             (percent_text(number(row.get("share")) if math.isfinite(row["share"]) else 2.0),
              _STATE_STYLES.get(text_of(row.get("state")), "")))
        for row in named[:most]
    ]  # fmt: skip
    if len(named) > most:
        pieces.append(line((f"and {len(named) - most} more", "warn")))
    return _named("look", flow(pieces, cells - NAME_CELLS, between=glyphs.dot), "warn")


def dp_line(answer: Mapping[str, Any]) -> Line:
    """In words; what a daemon says otherwise is repeated, not interpreted."""
    told = text_of(answer.get("dp"))
    return line((f"{'privacy':{NAME_CELLS}}", "dim"), (DP_OFF, "warn") if told == "off" else f"DP {told or 'not told'}")


def forecast_lines(answer: Mapping[str, Any], cells: int) -> list[Line]:
    told = mapping(answer.get("forecast"))
    left, bound = told.get("rounds_left"), text_of(told.get("bound_by"))
    if left is None:
        return _named("forecast", wrap(f"no forecast: {bound or 'not told'}", cells - NAME_CELLS))
    if not whole(left):
        return _named("forecast", wrap(f"no further round fits: bound by {bound}", cells - NAME_CELLS, "bad"), "bad")
    rounds = "round" if whole(left) == 1 else "rounds"
    text = f"about {whole(left):,} more {rounds}, {FORECAST_TAKES}; bound by {bound}"
    return _named("forecast", wrap(text, cells - NAME_CELLS))


def capacity_lines(answer: Mapping[str, Any], cells: int) -> list[Line]:
    """What a hostile trainer could carry out, all kinds together."""
    total = capacity_total(answer)
    if not total:
        return _named("capacity", wrap("no kind whose values the trainer chooses may leave", cells - NAME_CELLS))
    text = f"at most {total:,.0f} bits ({bytes_text(total / 8)}) a round by a hostile trainer"
    return _named("capacity", wrap(text, cells - NAME_CELLS))


def not_covered_lines(answer: Mapping[str, Any], cells: int) -> list[Line]:
    told = text_of(answer.get("not_counted"))
    return _named("uncounted", wrap(NOT_COVERED + (f"; {told}" if told else ""), cells - NAME_CELLS, "dim"))


def head_lines(
    answer: Mapping[str, Any], rows: Sequence[Row], cells: int, glyphs: Glyphs, *, brief: bool
) -> list[Line]:
    """What stands above the rows; `brief` leaves what is not covered to the help of the row (`enter`) and the twin."""
    if not answer:
        return []
    look = look_lines(rows, cells, glyphs, most=1 if brief else LOOK_NAMED_MAX)
    lines = [*look, *forecast_lines(answer, cells), dp_line(answer)]
    lines += capacity_lines(answer, cells)
    return lines + ([] if brief else [*not_covered_lines(answer, cells), *legend_lines(rows, cells)])


def _named(name: str, rows: Sequence[Line], style: str = "dim") -> list[Line]:
    return [
        line((f"{name:{NAME_CELLS}}" if not index else " " * NAME_CELLS, style), *row) for index, row in enumerate(rows)
    ]


# ---- one row whole ---------------------------------------------------------------------------------


def limit_text(row: Row, cells: int) -> list[Line]:
    told = shown_limit(row)
    words = "; ".join(f"{word}: {WORDS[word]}" for word in (told.state, told.percent) if word in WORDS)
    counted = f" ({whole(told.used):,} of {whole(told.max):,} bytes)" if told.unit == "bytes" else ""
    return _facts(
        cells,
        ("limit", told.limit),
        ("counts", f"{told.kind}, in {told.unit}"),
        ("used", f"{amount_text(told.used, told.unit)} of {amount_text(told.max, told.unit)}{counted}"),
        ("state", words or told.state or "-"),
        ("window", f"{told.window}; resets: {told.resets}"),
        ("set at", told.line),
    )


def capacity_text(row: Row, answer: Mapping[str, Any], cells: int) -> list[Line]:
    told = capacity_row(row)
    tried = (
        "no scheme that hides bits was tried for this kind" if told.planted_bits is None
        else f"{told.planted_bits:,.0f} bits a round were got out by a scheme planted on purpose: {told.planted}"
    )  # fmt: skip
    every = f"{told.bits:,.0f} a round ({bytes_text(told.bits / 8)}), if the trainer's owner chose every free value"
    return _facts(
        cells,
        ("kind", told.kind),
        ("bits", every),
        ("because", told.because),
        ("tried", tried),
        ("uncounted", text_of(answer.get("not_counted"))),
    )


def release_text(row: Row, cells: int) -> list[Line]:
    told = spent_row(row)
    return _facts(
        cells,
        ("kind", told.kind),
        ("bytes", f"{told.bytes:,.0f}"),
        ("at", told.at),
        ("run", f"{told.run}, round {told.round}"),
        ("outcome", told.outcome or "not known yet"),
        ("record", text_of(told.seq)),
    )


def _facts(cells: int, *facts: tuple[str, str]) -> list[Line]:
    return [part for name, text in facts for part in _named(name, wrap(text, cells - NAME_CELLS))]

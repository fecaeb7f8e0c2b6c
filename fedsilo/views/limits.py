"""The limits of the policy in force as rows and lines: how much is used, what binds, and what no limit counts.

From the answer of the query `limits`. Pure: answer, time and width in, rows and lines out.

Does not show: limits of a single message (the decision on each message does), nor what the numbers were used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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


def _state(row: Row) -> Part:
    word = text_of(row.get("state"))
    return word, _STATE_STYLES.get(word, "")


def _text(name: str, style: str = "") -> Any:
    return lambda row: (text_of(row.get(name)), style)


LIMIT_COLUMNS = (
    Column("state", _state, 5, worth=0),
    # names whole: in 80 cells they are worth more than a share that the amounts beside it say as well
    Column("limit", _text("limit", "strong"), 27, worth=0, grows=True),
    Column("kind", _text("kind"), 16, worth=0, grows=True),
    Column("used of max", _text("amount"), AMOUNT_CELLS, worth=0, right=True,
           order=lambda row: number(row.get("share"))),
    Column("share", lambda row: (text_of(row.get("percent")), _state(row)[1]), 5, worth=1, right=True,
           order=lambda row: number(row.get("share"))),
    Column("full", lambda row: (text_of(row.get("bar")), _state(row)[1]), BAR_CELLS, worth=3,
           order=lambda row: number(row.get("share"))),
    # wide, so that it takes no room that the names need
    Column("unit", _text("unit"), 14, worth=6),
    Column("window", _text("window"), 6, worth=2),
    Column("resets", _text("resets"), 16, worth=4),
    Column("policy", _text("line", "dim"), 16, worth=5),
)  # fmt: skip


def _bits(row: Row) -> Part:
    return f"{number(row.get('bits')):,.0f}", "strong"


def _planted(row: Row) -> Part:
    bits = row.get("planted_bits")
    return ("not tried", "dim") if bits is None else (f"{number(bits):,.0f}", "")


CAPACITY_COLUMNS = (
    Column("kind", _text("kind", "strong"), 18, worth=0),
    Column("bits at most", _bits, 14, worth=0, right=True, order=lambda row: number(row.get("bits"))),
    Column("as bytes", lambda row: (bytes_text(number(row.get("bits")) / 8), ""), 9, worth=1, right=True,
           order=lambda row: number(row.get("bits"))),
    Column("got out, tried", _planted, 14, worth=2, right=True, order=lambda row: number(row.get("planted_bits"))),
    Column("because", _text("because"), 24, worth=3, grows=True),
)  # fmt: skip


def capacity_rows(answer: Mapping[str, Any]) -> list[Row]:
    return sorted(map(mapping, _list(answer.get("capacity"))), key=lambda row: -number(row.get("bits")))


def capacity_total(answer: Mapping[str, Any]) -> float:
    return sum(number(row.get("bits")) for row in capacity_rows(answer))


RELEASE_COLUMNS = (
    Column("at UTC", lambda row: (text_of(row.get("at"))[:19].replace("T", " "), ""), 19, worth=0),
    Column("round", lambda row: (f"r{text_of(row.get('round'))}", ""), 5, worth=0, right=True,
           order=lambda row: number(row.get("round"))),
    Column("kind", _text("kind", "strong"), 16, worth=0, grows=True),
    Column("bytes", lambda row: (bytes_text(number(row.get("bytes"))), ""), 9, worth=0, right=True,
           order=lambda row: number(row.get("bytes"))),
    Column("outcome", _text("outcome"), 10, worth=1),
    Column("record", _text("seq", "accent"), 8, worth=2, right=True, order=lambda row: number(row.get("seq"))),
    Column("run", _text("run"), 12, worth=3, grows=True),
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
    unit = text_of(row.get("unit"))
    words = [text_of(row.get(name)) for name in ("state", "percent")]
    told = "; ".join(f"{word}: {WORDS[word]}" for word in words if word in WORDS)
    facts = (
        ("limit", text_of(row.get("limit"))), ("counts", f"{text_of(row.get('kind'))}, in {unit}"),
        ("used", f"{amount_text(row.get('used'), unit)} of {amount_text(row.get('max'), unit)}"
                 + (f" ({whole(row.get('used')):,} of {whole(row.get('max')):,} bytes)" if unit == "bytes" else "")),
        ("state", told or text_of(row.get("state")) or "-"),
        ("window", f"{text_of(row.get('window'))}; resets: {text_of(row.get('resets'))}"),
        ("set at", text_of(row.get("line"))),
    )  # fmt: skip
    return [part for name, text in facts for part in _named(name, wrap(text, cells - NAME_CELLS))]


def capacity_text(row: Row, answer: Mapping[str, Any], cells: int) -> list[Line]:
    bits, planted = number(row.get("bits")), row.get("planted_bits")
    tried = (
        "no scheme that hides bits was tried for this kind" if planted is None
        else f"{number(planted):,.0f} bits a round were got out by a scheme planted on purpose: "
        f"{text_of(row.get('planted'))}"
    )  # fmt: skip
    facts = (
        ("kind", text_of(row.get("kind"))),
        ("bits", f"{bits:,.0f} a round ({bytes_text(bits / 8)}), if the trainer's owner chose every free value"),
        ("because", text_of(row.get("because"))), ("tried", tried), ("uncounted", text_of(answer.get("not_counted"))),
    )  # fmt: skip
    return [part for name, text in facts for part in _named(name, wrap(text, cells - NAME_CELLS))]


def release_text(row: Row, cells: int) -> list[Line]:
    facts = (
        ("kind", text_of(row.get("kind"))), ("bytes", f"{whole(row.get('bytes')):,}"), ("at", text_of(row.get("at"))),
        ("run", f"{text_of(row.get('run'))}, round {text_of(row.get('round'))}"),
        ("outcome", text_of(row.get("outcome")) or "not known yet"), ("record", text_of(row.get("seq"))),
    )  # fmt: skip
    return [part for name, text in facts for part in _named(name, wrap(text, cells - NAME_CELLS))]

"""What a coordinator's outbox shows: what went to each silo of each kind in each round, and what still waits for it.

Nobody judges what a coordinator sends, so there is no verdict here: each silo judges what comes to it, and its own
inbox tells. Reads the answers of the query `outbox` of a coordinator and nothing else; no shape in them is trusted, and
every text passes `console.safe` where it is drawn (threat T37). Pure.

Does not say that a silo used something, only that it acknowledged it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.conditions import control_line
from console.drawing import Line, Part, bytes_text, flow, line
from console.reading import mapping, number, text_of, whole
from console.rows import Column, Row

JUDGED_THERE = "each silo judges what comes to it"


def state_part(row: Row) -> Part:
    """How far it came: what is none of the words of the query is not told as sent."""
    match text_of(row.get("outcome")):
        case "acked":
            return "acknowledged", "ok"
        case "sent":
            return ("some waits", "warn") if whole(row.get("waiting")) else ("sent", "")
        case "":
            return "not sent yet", "warn"
    return "unknown", "warn"


def _round_part(row: Row) -> Part:
    return (f"r{text_of(row.get('round'))}", "") if text_of(row.get("run")) else ("-", "dim")


def _waiting_part(row: Row) -> Part:
    waiting = whole(row.get("waiting"))
    return (str(waiting), "warn") if waiting else ("-", "dim")


def _by(name: str) -> Any:
    return lambda row: number(row.get(name))


COLUMNS = (
    Column("run", lambda row: (text_of(row.get("run")) or "-", ""), 12, worth=5),
    Column("round", _round_part, 5, worth=0, order=_by("round")),
    Column("kind", lambda row: (text_of(row.get("kind")), ""), 18, worth=0, grows=True),
    Column("silo", lambda row: (text_of(row.get("peer")), ""), 14, worth=0, grows=True),
    Column("messages", lambda row: (text_of(row.get("messages")), ""), 8, worth=2, right=True, order=_by("messages")),
    Column("bytes", lambda row: (bytes_text(number(row.get("bytes"))), ""), 9, worth=1, right=True, order=_by("bytes")),
    Column("waits", _waiting_part, 5, worth=3, right=True, order=_by("waiting")),
    Column("state", state_part, 12, worth=0),
)


def summary_lines(answer: Mapping[str, Any], cells: int, *, control: bool) -> list[Line]:
    """How much was sent and how much waits.

    Args:
        answer: of the query; empty while there is none.
        cells: width.
        control: acknowledgements and refusals are among the rows and their count.
    """
    pieces = [line(("[outbound]", "strong")), line(("inbound", "dim"))]
    if answer:
        waiting = whole(answer.get("waiting"))
        pieces += [
            line(f"{whole(answer.get('sent'))} messages"),
            line((f"{waiting} wait", "warn" if waiting else "dim")),
        ]
    pieces += [line((JUDGED_THERE, "dim")), control_line(shown=control)]
    return flow(pieces, cells)


def detail_lines(row: Row, answer: Mapping[str, Any], command: str, cells: int) -> list[Line]:
    """What went to one silo of one kind in one round, and every item of it that waits.

    Args:
        row: of the table; of one that was gone to by its name, empty.
        answer: {"message", "waiting"} to the query for this one; empty while there is none.
        command: its twin.
        cells: width.
    """
    shown = mapping(answer.get("message")) or row
    run = text_of(shown.get("run"))
    place = f"{run}, round {text_of(shown.get('round'))}" if run else "outside a run"
    said, style = state_part(shown)
    rows = flow(
        [line((text_of(shown.get("kind")), "strong")), line(f"to {text_of(shown.get('peer'))}"), line(place)], cells
    )
    counted = f"{text_of(shown.get('messages'))} messages, {bytes_text(number(shown.get('bytes')))}"
    rows += flow([line((said, style)), line(counted), line((JUDGED_THERE, "dim"))], cells)
    items = answer.get("waiting")
    waiting = [mapping(item) for item in items] if isinstance(items, list) else []
    if waiting:
        rows.append(line())
        for item in waiting:
            digest = text_of(item.get("sha256"))
            half = len(digest) // 2
            pieces = [
                line(("waits for ", "dim"), _handed(item)), line(f"step {text_of(item.get('step'))}"),
                line(bytes_text(number(item.get("bytes")))), line(("sha256 ", "dim"), digest[:half]),
                line(digest[half:]),
            ]  # fmt: skip
            rows += flow(pieces, cells)
        if (more := whole(shown.get("waiting")) - len(waiting)) > 0:
            rows.append(line((f"{more} more wait", "dim")))
    return [*rows, line(), *flow([line(("as command", "dim")), line(command)], cells)]


def _handed(item: Mapping[str, Any]) -> Part:
    return ("its acknowledgement", "warn") if item.get("delivered") is True else ("the silo to ask", "warn")

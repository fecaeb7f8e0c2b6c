"""The audit log as rows and lines: its columns, what the head says of the chain, and one record whole.

The head repeats what the daemon says of its own log: how far it read it again, which checkpoint it signed, and who
countersigned that: of a silo's log the coordinator, of a coordinator's its silos. Pure: answers of the queries `audit`
and `audit.status` in, lines out.

Does not show: that the daemon tells the truth. `fedsilo audit verify` with the logs of all parties, run elsewhere,
depends on no daemon.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fedsilo.protocol.kinds import KINDS
from fedsilo.views.columns import Column, Row
from fedsilo.views.conditions import ADDS_CONTROL, control_line
from fedsilo.views.lines import Glyphs, Line, Part, Shown, bar, bytes_text, clip, flow, line, width_of, wrap
from fedsilo.views.state import mapping, number, text_of, whole

STATE_FOLDER = "STATE_DIR"  # the console knows a socket, not where the daemon keeps its log
BAR_CELLS = 20
CONTROL = "control."
CONTROL_NAMES = frozenset(
    {"control", "polls", "ingress.polls", *(kind.removeprefix(CONTROL) for kind in KINDS if kind.startswith(CONTROL))}
)
RULE_CELLS_MIN = 2  # of the line around a break
NAMES_SHOWN = 4  # of silos that say the same
PARTY_PARTS = 2  # of a name such as spiffe://federation/silo/hospital_a: role and name tell the parties apart


# ---- rows ------------------------------------------------------------------------------------------


def record_id(row: Row) -> str:
    return text_of(row.get("seq"))


def moment_of(record: Row) -> str:
    """UTC of a record; a damaged one has none, and a number that no calendar has stays a number."""
    milliseconds = record.get("t")
    if not isinstance(milliseconds, int) or isinstance(milliseconds, bool) or not milliseconds:
        return "" if not milliseconds else text_of(milliseconds)
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return str(milliseconds)


def place_of(record: Row) -> str:
    """Run, round and step; a record of no round has the run alone, and one of no run has no place."""
    run, places = text_of(record.get("run")), [record.get(name) for name in ("round", "step")]
    if not run or not any(places):
        return run
    return "/".join([run, *(text_of(each) for each in places if each is not None)])


def reasons_of(record: Row) -> str:
    if record.get("event") == "damaged":
        return text_of(record.get("why"))
    reasons = record.get("reasons")
    return ", ".join(map(text_of, reasons)) if isinstance(reasons, list) else ""


def why_line(record: Row, cells: int, more: str) -> Line:
    """The record under the cursor in one line: its number and place, and all that its reasons say."""
    decision, style = _decision(record)
    told = reasons_of(record) or ("allowed, so no reason is on record" if decision == "allow" else "decides nothing")
    word = f"{decision}: " if decision not in ("-", "allow") else ""
    place = f"{place_of(record)} " if place_of(record) else ""  # its column has no room at 80 cells
    return clip(line((f"record {text_of(record.get('seq'))} ", "dim"), place, (word, style), told), cells, more)


def _event(row: Row) -> Part:
    event = text_of(row.get("event"))
    return ("DAMAGED", "bad") if event == "damaged" else (event, "bad" if event == "halt" else "")


def _decision(row: Row) -> Part:
    word = text_of(row.get("decision"))
    style = {"allow": "ok", "deny": "bad", "hold": "warn"}.get(word, "")
    if not word:
        return "-", "dim"
    return {"deny": "DENY", "hold": "HOLD"}.get(word, word), style


def _size(row: Row) -> Part:
    payload = mapping(row.get("payload"))
    return (bytes_text(number(payload.get("bytes"))) if "bytes" in payload else ""), ""


COLUMNS = (
    Column("seq", lambda row: (text_of(row.get("seq")), "accent"), 8, worth=0, right=True,
           order=lambda row: number(row.get("seq"))),
    # without the year, so that the kind fits beside it in 80 columns
    Column("time UTC", lambda row: (moment_of(row)[5:], ""), 14, worth=0, order=lambda row: number(row.get("t"))),
    Column("event", _event, 16, worth=0, grows=True),
    Column("kind", lambda row: (text_of(row.get("kind")), ""), 16, worth=1),
    Column("decision", _decision, 8, worth=0),
    Column("bytes", _size, 9, worth=3, right=True,
           order=lambda row: number(mapping(row.get("payload")).get("bytes"))),
    Column("run/round/step", lambda row: (place_of(row), ""), 14, worth=2, grows=True),
    Column("reasons", lambda row: (reasons_of(row), ""), 18, worth=4, grows=True),
)  # fmt: skip


def none_passes_lines(size: int, cells: int, *, control: bool) -> list[Line]:
    """That a filter found nothing in the whole log, and the events that people look for by another name.

    Args:
        size: records of the log.
        cells: width.
        control: allowed control messages were looked through as well.
    """
    adds = "" if control else f"; {ADDS_CONTROL}"
    return wrap(
        f"none of {size:,} rows passes the filter; a rejection is event approval.deny, an approval event "
        f"approval.grant, a message that was refused decision:deny; esc clears the filter{adds}", cells, "dim",
    )  # fmt: skip


# ---- head ------------------------------------------------------------------------------------------


def count_text(value: Any) -> str:
    return f"{whole(value):,}"


def clock_text(moment: str, today: str) -> str:
    """A time of today without its date. Both ISO-8601, UTC."""
    day, _, clock = moment.partition("T")
    return clock[:8] if day == today else f"{day} {clock[:8]}".strip()


def party_text(name: str) -> str:
    """`coordinator/main` of spiffe://cardio-net/coordinator/main; another name whole."""
    return "/".join(name.split("/")[-PARTY_PARTS:]) if name.startswith("spiffe://") else name


def break_line(status: Mapping[str, Any], cells: int, glyphs: Glyphs) -> list[Line]:
    """One line as wide as the screen that names the record where the chain breaks; nothing while none is known."""
    broken = status.get("broken")
    if not isinstance(broken, Mapping):
        return []
    mark = f"{glyphs.full * RULE_CELLS_MIN} BROKEN AT RECORD {text_of(broken.get('seq'))}: "
    shown = clip(line((mark, "bad"), (f"{text_of(broken.get('why'))} ", "bad")), cells, glyphs.more)
    # of our own, so its length is no run that `safe` would count
    return [(*shown, (Shown(glyphs.full * max(cells - width_of(shown), 0)), "bad"))]


def head_lines(
    status: Mapping[str, Any], now: float, cells: int, glyphs: Glyphs, *, control: bool, at_coordinator: bool = False
) -> list[Line]:
    """The lines under the audit log: how far it was verified, its checkpoint, who countersigned it, what the witnesses
    know of it, and whether control messages are among the rows.

    Args:
        status: of `audit.status`; empty before the first answer.
        now: UTC seconds by the daemon.
        cells: width.
        glyphs: of the terminal.
        control: allowed control messages are among the rows.
        at_coordinator: it is the coordinator's log, so the silos are its witnesses.
    """
    if not status:
        return [control_line(shown=control)]
    today = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}" if now else ""
    words = _silos(mapping(status.get("witnesses"))) if at_coordinator else [_coordinator(status)]
    pieces = [_verified(status, today), *_checkpoint(mapping(status.get("checkpoint"))), *words]
    if isinstance(broken := status.get("broken"), Mapping):
        pieces.append(line((":audit ", "dim"), text_of(broken.get("seq")), (" goes there", "dim")))
    lines = flow([*pieces, control_line(shown=control)], cells, between=glyphs.dot)
    if status.get("verifying") is True:
        lines.append(_progress(status, cells, glyphs))
    return lines


def _verified(status: Mapping[str, Any], today: str) -> Line:
    size, to = whole(status.get("size")), status.get("verified_to")
    if to is None:
        return line((f"{count_text(size)} records, not verified yet: v verifies them", "warn"))
    at = clock_text(text_of(status.get("verified_at")), today)
    if isinstance(status.get("broken"), Mapping):
        return line((f"holds to {count_text(to)} of {count_text(size)}, at {at}", "bad"))
    of = f" of {count_text(size)}" if whole(to) != size else ""
    return line((f"verified to {count_text(to)}{of} at {at}", "ok"))


def _checkpoint(checkpoint: Mapping[str, Any]) -> list[Line]:
    if not whole(checkpoint.get("size")):
        return [line(("no signed checkpoint yet", "warn"))]
    names = checkpoint.get("cosigned_by")
    parties = [party_text(text_of(name)) for name in names] if isinstance(names, list) else []
    parties = [_named(parties)] if len(parties) > NAMES_SHOWN else parties
    signed = line(f"checkpoint {count_text(checkpoint.get('size'))}")
    if not parties:
        return [signed, line(("countersigned by nobody yet", "warn"))]
    return [signed, line(f"countersigned by {', '.join(parties)}")]


def _coordinator(status: Mapping[str, Any]) -> Line:
    match status.get("coordinator"):
        case "matches":
            return line(("matches coordinator", "ok"))
        case "differs":
            return line(("DIFFERS FROM COORDINATOR", "bad"))
        case "not seen":
            return line(("not countersigned by the coordinator yet", "warn"))
    return line(("coordinator: ", "dim"), text_of(status.get("coordinator")) or "-")


def _silos(witnesses: Mapping[str, Any]) -> list[Line]:
    """What each silo knows of the coordinator's log, what is wrong first."""
    by_word: dict[str, list[str]] = {}
    for name, word in witnesses.items():
        by_word.setdefault(text_of(word), []).append(text_of(name).rpartition("/")[2])
    told = []
    for word, says, style in (
        ("differs", "DIFFERS FROM", "bad"), ("matches", "matches", "ok"), ("not seen", "not countersigned by", "warn"),
    ):  # fmt: skip
        if names := by_word.pop(word, []):
            yet = " yet" if word == "not seen" else ""
            told.append(line((f"{says} {_named(names)}{yet}", style)))
    return told + [line((f"{word}: {_named(names)}", "warn")) for word, names in by_word.items()]


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _progress(status: Mapping[str, Any], cells: int, glyphs: Glyphs) -> Line:
    looked, of = whole(status.get("looked_at")), max(whole(status.get("of")), 1)
    text = f"verifying {count_text(looked)} of {count_text(of)} {100 * min(looked, of) // of} % "
    return clip(line((text, "accent"), *bar(looked / of, BAR_CELLS, glyphs)), cells)


# ---- one record ------------------------------------------------------------------------------------


def show_twin(seq: str, *, at_coordinator: bool = False) -> tuple[str, ...]:
    """The command that shows one record."""
    if at_coordinator:
        return ("coordinator", "audit", "show", seq)
    return ("fedsilo", "audit", "show", seq, "--log", STATE_FOLDER)


def list_twin(*, control: bool, at_coordinator: bool = False) -> tuple[str, ...]:
    """The command that shows the newest records."""
    quiet = () if control else ("--no-control",)
    if at_coordinator:
        return ("coordinator", "audit", "list", *quiet)
    return ("fedsilo", "audit", "tail", *quiet, "--log", STATE_FOLDER)


def record_lines(record: Row, twin: str, body: Sequence[Line], cells: int) -> list[Line]:
    """A record whole: what it is linked to and where one finds that, the command that shows the same, and its JSON.

    Args:
        record: as the daemon gave it.
        twin: the command.
        body: its JSON, in lines.
        cells: width.
    """
    event, _ = _event(record)
    head = [clip(line((f"record {record_id(record)}", "strong"), f"  {moment_of(record)}  {event}"), cells)]
    if record.get("event") == "damaged":
        head += wrap(f"this line of the log is no record: {text_of(record.get('why'))}", cells, "bad")
    link, seq = mapping(record.get("link")), record.get("seq")
    previous = text_of(link.get("previous"))
    if previous and seq == 0:
        head.append(line(("previous  ", "dim"), "none: it is the first"))
    elif previous and isinstance(seq, int):
        head += _link("previous", f"record {seq - 1} has the hash", cells)
        head.append(clip(line(f"  {previous}"), cells))  # whole, also in 80 columns
    for name, says in (("decision", "the decision this belongs to"), ("peer_event", "in the peer's own log")):
        if name in link:
            to = text_of(link[name])
            head += _link(name.replace("_", " "), f"record {to}, {says}", cells)
            if name == "decision":
                head.append(line(("          :audit ", "dim"), to, (" goes there", "dim")))
    if (approvals := link.get("approvals")) is not None:
        head += _link("approvals", json.dumps(approvals, ensure_ascii=False, default=str), cells)
    head += _link("as text", twin, cells)
    return [*head, line(""), *body]


def _link(name: str, text: str, cells: int) -> list[Line]:
    rows = wrap(text, max(cells - 10, 8))
    return [line((f"{name:9} " if not index else " " * 10, "dim"), *row) for index, row in enumerate(rows)]

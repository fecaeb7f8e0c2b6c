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

from fedsilo.control.answers import AuditRecord, AuditStatus, FreeForm, RecordPage, SignedCheckpoint, read
from fedsilo.protocol.kinds import KINDS
from fedsilo.views.columns import Column
from fedsilo.views.conditions import ADDS_CONTROL, control_line
from fedsilo.views.lines import Glyphs, Line, Part, Shown, bar, bytes_text, clip, flow, line, width_of, wrap
from fedsilo.views.state import number, text_of

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


class ShownRecord(AuditRecord):
    """A record with the JSON that it was read from."""

    json: FreeForm


def record_rows(answer: Any) -> list[ShownRecord]:
    """Return the records of an answer to the query `audit`."""
    return [ShownRecord(**vars(read(AuditRecord, each)), json=each) for each in read(RecordPage, answer).records]


def moment_of(record: AuditRecord) -> str:
    """Return the time of a record, UTC; a damaged one has none, and a number that no calendar has stays a number."""
    milliseconds = record.t
    if not isinstance(milliseconds, int) or isinstance(milliseconds, bool) or not milliseconds:
        return "" if not milliseconds else text_of(milliseconds)
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return str(milliseconds)


def place_of(record: AuditRecord) -> str:
    """Return run, round and step; a record of no round has the run alone, and one of no run has no place."""
    places = record.round, record.step
    if not record.run or not any(places):
        return record.run
    return "/".join([record.run, *(text_of(each) for each in places if each is not None)])


def reasons_of(record: AuditRecord) -> str:
    return record.why if record.event == "damaged" else ", ".join(record.reasons)


def why_line(record: AuditRecord, cells: int, more: str) -> Line:
    """Return the record under the cursor in one line: its number and place, and all that its reasons say."""
    decision, style = _decision(record)
    why = reasons_of(record) or ("allowed, so no reason is on record" if decision == "allow" else "decides nothing")
    word = f"{decision}: " if decision not in ("-", "allow") else ""
    place = f"{place_of(record)} " if place_of(record) else ""  # its column has no room at 80 cells
    return clip(line((f"record {text_of(record.seq)} ", "dim"), place, (word, style), why), cells, more)


def _event(record: AuditRecord) -> Part:
    event = record.event
    return ("DAMAGED", "bad") if event == "damaged" else (event, "bad" if event == "halt" else "")


def _decision(record: AuditRecord) -> Part:
    word = record.decision
    if not word:
        return "-", "dim"
    return {"deny": "DENY", "hold": "HOLD"}.get(word, word), {"allow": "ok", "deny": "bad", "hold": "warn"}.get(
        word, ""
    )


def _size(record: AuditRecord) -> Part:
    return "" if "bytes" in record.payload.absent else bytes_text(record.payload.bytes), ""


COLUMNS = (
    Column("seq", lambda row: (text_of(row.seq), "accent"), 8, worth=0, right=True, order=lambda row: number(row.seq)),
    # without the year, so that the kind fits beside it in 80 columns
    Column("time UTC", lambda row: (moment_of(row)[5:], ""), 14, worth=0, order=lambda row: number(row.t)),
    Column("event", _event, 16, worth=0, grows=True),
    Column("kind", lambda row: (row.kind, ""), 16, worth=1),
    Column("decision", _decision, 8, worth=0),
    Column("bytes", _size, 9, worth=3, right=True, order=lambda row: row.payload.bytes),
    Column("run/round/step", lambda row: (place_of(row), ""), 14, worth=2, grows=True),
    Column("reasons", lambda row: (reasons_of(row), ""), 18, worth=4, grows=True),
)


def none_passes_lines(size: int, cells: int, *, control: bool) -> list[Line]:
    """That a filter found nothing in the whole log, and the events that people look for by another name."""
    adds = "" if control else f"; {ADDS_CONTROL}"
    return wrap(
        f"none of {size:,} rows passes the filter; a rejection is event approval.deny, an approval event "
        f"approval.grant, a message that was refused decision:deny; esc clears the filter{adds}", cells, "dim",
    )  # fmt: skip


# ---- head ------------------------------------------------------------------------------------------


def clock_text(moment: str, today: str) -> str:
    """A time of today without its date. Both ISO-8601, UTC."""
    day, _, clock = moment.partition("T")
    return clock[:8] if day == today else f"{day} {clock[:8]}".strip()


def party_text(name: str) -> str:
    """`coordinator/main` of spiffe://cardio-net/coordinator/main; another name whole."""
    return "/".join(name.split("/")[-PARTY_PARTS:]) if name.startswith("spiffe://") else name


def break_line(status: AuditStatus, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return a line as wide as the screen that names the record where the chain breaks; nothing while none is known."""
    if status.broken is None:
        return []
    mark = f"{glyphs.full * RULE_CELLS_MIN} BROKEN AT RECORD {status.broken.seq}: "
    shown = clip(line((mark, "bad"), (f"{status.broken.why} ", "bad")), cells, glyphs.more)
    # of our own, so its length is no run that `safe` would count
    return [(*shown, (Shown(glyphs.full * max(cells - width_of(shown), 0)), "bad"))]


def head_lines(
    status: AuditStatus | None, now: float, cells: int, glyphs: Glyphs, *, control: bool, at_coordinator: bool = False
) -> list[Line]:
    """Return the lines under the audit log: how far it was verified, its checkpoint, who countersigned it, what the
    witnesses know of it, and whether control messages are among the rows.

    Args:
        status: of `audit.status`; None before the first answer.
        now: UTC seconds by the daemon.
        cells: width.
        glyphs: of the terminal.
        control: allowed control messages are among the rows.
        at_coordinator: it is the coordinator's log, so the silos are its witnesses.
    """
    if status is None:
        return [control_line(shown=control)]
    today = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}" if now else ""
    words = _silos(status.witnesses) if at_coordinator else [_coordinator(status.coordinator)]
    pieces = [_verified(status, today), *_checkpoint(status.checkpoint), *words]
    if status.broken is not None:
        pieces.append(line((":audit ", "dim"), str(status.broken.seq), (" goes there", "dim")))
    lines = flow([*pieces, control_line(shown=control)], cells, between=glyphs.dot)
    if status.verifying:
        lines.append(_progress(status, cells, glyphs))
    return lines


def _verified(status: AuditStatus, today: str) -> Line:
    size, to = status.size, status.verified_to
    if to is None:
        return line((f"{size:,} records, not verified yet: v verifies them", "warn"))
    at = clock_text(status.verified_at or "", today)
    if status.broken is not None:
        return line((f"holds to {to:,} of {size:,}, at {at}", "bad"))
    of = f" of {size:,}" if to != size else ""
    return line((f"verified to {to:,}{of} at {at}", "ok"))


def _checkpoint(checkpoint: SignedCheckpoint) -> list[Line]:
    if not checkpoint.size:
        return [line(("no signed checkpoint yet", "warn"))]
    parties = [party_text(name) for name in checkpoint.cosigned_by]
    parties = [_named(parties)] if len(parties) > NAMES_SHOWN else parties
    signed = line(f"checkpoint {checkpoint.size:,}")
    if not parties:
        return [signed, line(("countersigned by nobody yet", "warn"))]
    return [signed, line(f"countersigned by {', '.join(parties)}")]


def _coordinator(word: str) -> Line:
    match word:
        case "matches":
            return line(("matches coordinator", "ok"))
        case "differs":
            return line(("DIFFERS FROM COORDINATOR", "bad"))
        case "not seen":
            return line(("not countersigned by the coordinator yet", "warn"))
    return line(("coordinator: ", "dim"), word or "-")


def _silos(witnesses: Mapping[str, str]) -> list[Line]:
    """Return what each silo knows of the coordinator's log, what is wrong first."""
    by_word: dict[str, list[str]] = {}
    for name, word in witnesses.items():
        by_word.setdefault(word, []).append(name.rpartition("/")[2])
    lines = []
    for word, says, style in (
        ("differs", "DIFFERS FROM", "bad"), ("matches", "matches", "ok"), ("not seen", "not countersigned by", "warn"),
    ):  # fmt: skip
        if names := by_word.pop(word, []):
            yet = " yet" if word == "not seen" else ""
            lines.append(line((f"{says} {_named(names)}{yet}", style)))
    return lines + [line((f"{word}: {_named(names)}", "warn")) for word, names in by_word.items()]


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _progress(status: AuditStatus, cells: int, glyphs: Glyphs) -> Line:
    looked, of = status.looked_at, max(status.of, 1)
    text = f"verifying {looked:,} of {of:,} {100 * min(looked, of) // of} % "
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


def record_lines(record: AuditRecord, twin: str, body: Sequence[Line], cells: int) -> list[Line]:
    """Return a record whole: what it is linked to and where one finds that, the command that shows the same, and its
    JSON."""
    event, _ = _event(record)
    head = [clip(line((f"record {text_of(record.seq)}", "strong"), f"  {moment_of(record)}  {event}"), cells)]
    if record.event == "damaged":
        head += wrap(f"this line of the log is no record: {record.why}", cells, "bad")
    link, seq = record.link, record.seq
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

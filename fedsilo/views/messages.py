"""Messages as rows and lines: of an outbox or inbox with decisions, and of a coordinator's outbox, which has counts.

Reads the answers of the queries `outbox` and `inbox` and nothing else. They come from our own daemon, but kinds, names
and measured values in them come from further away, so no shape is trusted here and every text passes `safe` where it is
drawn (threat T37). Nobody judges what a coordinator sends, so there is no verdict there: each silo judges what comes to
it, and its own inbox tells. Pure.

Does not say whether the log that the answers come from is whole: the audit screen does. Nor that a silo used something,
only that it acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fedsilo.control.answers import MessageRow, read
from fedsilo.views import rule_words
from fedsilo.views.columns import Column, Row
from fedsilo.views.conditions import control_line, denied_lines
from fedsilo.views.lines import Line, Part, bytes_text, clip, flow, line, table, wrap
from fedsilo.views.state import HIDDEN, mapping, number, text_of, value_text, whole

VERDICT_STYLES = {"allow": "ok", "deny": "bad", "hold": "warn"}
VERDICTS = tuple(VERDICT_STYLES)
NOUNS = {"outbox": "outbound messages", "inbox": "inbound messages"}
_WORDS = {"deny": "DENY", "hold": "HOLD"}  # also without colour they stand out
_OF_VERDICT = {"": "", "allow": "allowed ", "deny": "denied ", "hold": "held "}
_LEFT: Mapping[tuple[str, str], Part] = {
    ("allow", ""): ("not yet", "warn"), ("allow", "sent"): ("yes", ""), ("allow", "acked"): ("yes", ""),
    ("allow", "indeterminate"): ("unknown", "warn"), ("deny", ""): ("no", "dim"), ("hold", ""): ("no", "dim"),
}  # fmt: skip
# How a hold ended, by the outcome of the decision that held it.
_HOLD_ENDS: Mapping[str, str] = {
    "approved": "approved; a decision of its own says what became of it",
    "rejected": "nothing was sent: a person said no, for good",
    "denied": "nothing was sent: it was refused in the end",
    "expired": "nothing was sent: nobody answered in time",
    "missed": "nothing was sent: the run went on without an answer",
    "ended": "it is held no more; the log says how that ended",
    "repeated": "it came again, and waits as that",
}
_BECAME = {
    ("allow", ""): "not sent yet: it waits in the outbox",
    ("allow", "sent"): "sent; the coordinator has not said that it took it",
    ("allow", "acked"): "sent, and the coordinator took it",
    ("allow", "indeterminate"): "sent at least in part; whether it arrived is not known: count it as gone",
    ("deny", ""): "nothing was sent",
    ("hold", ""): "nothing was sent; a person's yes makes a decision of its own",
}
_COMPARED = (
    ("payload_bytes", "bytes"), ("tensors", "tensors"), ("elements", "values"), ("l2", "L2"),
    ("tensor_l2_max", "L2 of one tensor"), ("responses", "responses"), ("prompts", "prompts"),
    ("text_bytes", "bytes of text"), ("tokens", "tokens"),
)  # fmt: skip
_DECIDING_FIRST = ("deny", "hold", "look")
_YEAR_10000_SECONDS = 253_402_300_800  # since 1970; a later moment has no date
_LABEL_CELLS = 11
_MEASURED = "it had"  # a sentence of what would pass that also says what was measured


# ---- rows ------------------------------------------------------------------------------------------


def message_row(row: Any) -> MessageRow:
    """Read a row of an outbox or inbox."""
    return read(MessageRow, row)


def verdict_part(row: MessageRow) -> Part:
    if _hold_end(row):
        return "held", "dim"  # nobody is asked any more
    return _WORDS.get(row.verdict, row.verdict), VERDICT_STYLES.get(row.verdict, "warn")


def left_part(row: MessageRow) -> Part:
    """Whether it left this silo: yes, no, not yet, unknown; what is none of these is shown as unknown."""
    if end := _hold_end(row):
        return ("later" if end == "approved" else "unknown" if end == "ended" else "no"), "dim"
    return _LEFT.get((row.verdict, row.outcome), ("unknown", "warn"))


def _hold_end(row: MessageRow) -> str:
    """How a hold ended; empty of what is held still, and of what never was."""
    return row.outcome if row.verdict == "hold" and row.outcome in _HOLD_ENDS else ""


def rule_part(row: MessageRow) -> Part:
    """The rule that decided, or the codes where no rule came to judge; of a hold that is over, its end."""
    if end := _hold_end(row):
        return end, "dim"
    rule = row.rule or " ".join(row.reasons)
    return (rule, "") if rule else (_nothing(row, "reasons"), "dim")


def _nothing(row: MessageRow, name: str) -> str:
    """In place of a field: there is none, or the source does not hold it. A coordinator's rows are counts."""
    return "-" if name not in row.absent or "messages" not in row.absent else HIDDEN


def digest_part(row: MessageRow) -> Part:
    return short_digest(row.digest) or _nothing(row, "digest"), "dim"


def short_digest(digest: str) -> str:
    return f"{digest[:4]}…{digest[-4:]}" if len(digest) > 12 else digest


def _round_part(row: MessageRow) -> Part:
    return (f"r{row.round}", "") if row.run else ("-", "dim")


def _milliseconds_part(row: MessageRow) -> Part:
    value = row.milliseconds
    if value is None:
        return "-", "dim"
    return (text_of(value) if number(value) < 10_000 else f"{number(value) / 1000:.0f} s"), ""  # in four cells


def columns_of(direction: str, *, at_coordinator: bool = False, wide: bool = False) -> tuple[Column, ...]:
    """direction: outbox or inbox. At 80 cells: when, what, how much, the verdict, whether it left, and why; at a
    coordinator also from whom, for it comes from many. In a `wide` table kind and rule stand whole."""
    rows = [
        Column("record", lambda row: (text_of(row.seq), "dim"), 6, worth=8, right=True,
               order=lambda row: number(row.seq)),
        Column("day", lambda row: (row.time[5:10], ""), 5, worth=7, order=lambda row: row.time),
        Column("time", lambda row: (row.time[11:19], ""), 8, worth=0, order=lambda row: row.time),
        Column("round", _round_part, 5, worth=3, order=lambda row: row.round),
        Column("kind", lambda row: (row.kind, ""), 16, worth=0),
        Column("items", lambda row: (text_of(row.items), ""), 5, worth=4, right=True,
               order=lambda row: number(row.items)),
        Column("bytes", lambda row: (bytes_text(row.bytes), ""), 9, worth=1, right=True,
               order=lambda row: row.bytes),
        Column("verdict", verdict_part, 7, worth=0),
        Column("left", left_part, 7, worth=0),
        Column("rule", rule_part, 10, worth=2, grows=True),  # short: that of the cursor's row stands below, whole
        Column("digest", digest_part, 9, worth=5),
        Column("ms", _milliseconds_part, 4, worth=6, right=True, order=lambda row: number(row.milliseconds)),
    ]  # fmt: skip
    if wide:  # of the rest the milliseconds give way first: they stand with one decision
        cells = {"kind": 18, **({"rule": 31} if direction == "outbox" else {})}
        rows = [replace(column, cells=cells.get(column.name, column.cells)) for column in rows]
        rows = [replace(column, worth=9) if column.name == "ms" else column for column in rows]
    if direction == "inbox":  # what came in leaves nowhere, and takes no time on its way out
        rows = [column for column in rows if column.name not in ("left", "ms")]
        rows = [replace(column, cells=16) if column.name == "rule" else column for column in rows]
        if at_coordinator:
            name = Column("silo", lambda row: (peer_name(row.peer).rpartition("/")[2], ""), 12, worth=0)
            rows.insert([column.name for column in rows].index("kind") + 1, name)
            # why it was refused is worth more than its size, and both do not fit into 80 cells
            rows = [replace(column, worth=3) if column.name == "bytes" else column for column in rows]
        else:
            rows.append(Column("peer", lambda row: (peer_name(row.peer), ""), 16, worth=4))
    return tuple(rows)


def peer_name(peer: str) -> str:
    """The part of a SPIFFE id behind the federation's name."""
    return peer.removeprefix("spiffe://").partition("/")[2] or peer


def noun(direction: str, verdict: str = "") -> str:
    """What would stand in an empty table."""
    return f"{_OF_VERDICT.get(verdict, '')}{NOUNS[direction]}"


# ---- the line above the rows -----------------------------------------------------------------------


def summary_lines(
    direction: str, answer: Mapping[str, Any], sent_bytes: float | None, cells: int, *, control: bool
) -> list[Line]:
    """How many there are of each, and how much went out.

    Args:
        direction: outbox or inbox.
        answer: of the query; empty while there is none.
        sent_bytes: payload bytes out since the daemon started, control messages included; None where it is not known.
        cells: width.
        control: allowed control messages are among the rows and their count.
    """
    pieces: list[Line] = []
    for name, text in (("outbox", "outbound"), ("inbox", "inbound")):
        here = name == direction
        pieces.append(line((f"[{text}]" if here else text, "strong" if here else "dim")))
    if answer and "total" not in answer:
        pieces.append(line((f"how many, held and denied: {HIDDEN}", "dim")))
    elif answer:
        held, denied = whole(answer.get("held")), whole(answer.get("denied"))
        pieces += [
            line(f"{whole(answer.get('total'))} messages"),
            line((f"{held} held", "warn" if held else "dim")),
            line((f"{denied} denied", "bad" if denied else "dim")),
        ]
    if direction == "outbox" and sent_bytes is not None:
        told = " left since the start, control included"
        pieces.append(line(bytes_text(sent_bytes), (told, "dim")))
    pieces.append(control_line(shown=control))
    return flow(pieces, cells)


# ---- one decision ----------------------------------------------------------------------------------


def brief_lines(direction: str, row: Row, answer: Mapping[str, Any], command: str, cells: int) -> list[Line]:
    """The message under the cursor in a few lines: what became of it, why, and what would pass.

    Args:
        direction: outbox or inbox.
        row: of the table.
        answer: to the query for this one; empty while there is none.
        command: its twin.
        cells: width.
    """
    message = message_row(row)
    rows = flow([line(verdict_part(message)), line(_became(direction, message))], cells)
    if direction == "inbox":
        rows += _labelled("from", message.peer or "-", cells)
    rows += _digest_lines(message.digest, cells, keyed=message.digest_keyed)
    rows += why_lines(mapping(answer.get("message")) or row, answer, cells)
    return [*rows, *_labelled("as command", command, cells)]


def why_line(row: MessageRow, cells: int, more: str) -> Line:
    """The message under the cursor in one line, where `brief_lines` have no room: both ends of its digest, its verdict
    and the whole cause."""
    (verdict, style), (rule, _) = verdict_part(row), rule_part(row)
    told = f" {rule}" if rule != "-" else ": no rule stood against it"
    told = f", rules {HIDDEN}" if rule == HIDDEN else told
    digest = short_digest(row.digest)
    ends = ((f"{digest} ", "accent"),) if digest else ()
    return clip(line((f"record {text_of(row.seq)} ", "dim"), *ends, (verdict, style), told), cells, more)


def detail_lines(
    direction: str, answer: Mapping[str, Any], command: str, cells: int, *, party: str = "silo"
) -> list[Line]:
    """One decision whole: outcome and cause first, then envelope, transforms and each rule's verdict.

    Args:
        direction: outbox or inbox.
        answer: {"message", "outcome", "milliseconds", "would_pass"}.
        command: its twin.
        cells: width.
        party: whose log it is: silo or coordinator.
    """
    record = mapping(answer.get("message"))
    row = message_row({"verdict": record.get("decision"), "outcome": answer.get("outcome")})
    verdict, style = verdict_part(row)
    took = answer.get("milliseconds")
    became = _became(direction, row) + (f", after {text_of(took)} ms" if took is not None else "")
    rows = flow([line((verdict, style)), line((text_of(record.get("kind")), "strong")), line(became)], cells)
    rows += why_lines(record, answer, cells)
    rows += [line(), *_envelope_lines(direction, record, cells)]
    if transforms := list(_transform_lines(record, cells)):
        rows += [line(), *transforms]
    rows += [line(), *_rules_lines(record, cells), line()]
    policy = mapping(record.get("policy"))
    rows += _labelled("policy", short_digest(text_of(policy.get("effective"))) or "-", cells)
    rows += _labelled("record", f"{text_of(record.get('seq'))} of this {party}'s audit log", cells)
    return [*rows, *_labelled("as command", command, cells)]


def why_lines(record: Mapping[str, Any], answer: Mapping[str, Any], cells: int) -> list[Line]:
    """The rules that denied or held it with what they measured, and what would pass; nothing for what was allowed.

    Args:
        record: of the audit log, or a row of the table, which only names the rules.
        answer: with "would_pass": one sentence for each such rule, and more behind them.
        cells: width.
    """
    verdict = text_of(record.get("decision") or record.get("verdict"))
    if verdict == "allow":
        return []
    found = record.get("rules")
    over = _hold_end(message_row({"verdict": verdict, "outcome": answer.get("outcome", record.get("outcome"))}))
    rules = [mapping(rule) if isinstance(rule, Mapping) else {"rule": rule, "outcome": verdict}
             for rule in (found if isinstance(found, list) else [])]  # fmt: skip
    deciding = [rule for rule in rules if text_of(rule.get("outcome")) in ("deny", "hold")]
    sentences = _texts(answer.get("would_pass"))
    codes = " ".join(_texts(record.get("reasons")))
    if not deciding:
        return denied_lines(codes or "no reason on record", "", "", "; ".join(sentences), cells)
    rows: list[Line] = []
    for rule in deciding:
        name = text_of(rule.get("rule"))
        whole_told = next((each for each in sentences if each.startswith(f"{name}: ") and _MEASURED in each), "")
        measured, limit = value_text(rule.get("measured"), name), value_text(rule.get("limit"), name)
        if over:
            rows += wrap(f"held by {name}", cells, "dim")  # what it had then is no state of things
        elif text_of(rule.get("outcome")) == "hold":
            rows += wrap(f"HOLD {name}: {measured or '-'} of {limit or '-'}", cells, "warn")
        elif whole_told:  # what would pass and what was measured, in one sentence: twice would be two facts to compare
            sentences = [each for each in sentences if each != whole_told]
            rows += wrap(f"DENY {whole_told}", cells, "bad")
        elif "measured" in rule:
            rows += denied_lines(name, measured, limit, "", cells)
        else:
            rows += wrap(f"DENY {name}", cells, "bad")
    for sentence in sentences:
        rows += wrap(f"would pass: {sentence}", cells)
    return rows


def _became(direction: str, row: MessageRow) -> str:
    verdict, outcome, end = row.verdict, row.outcome, _hold_end(row)
    if end and direction == "outbox":
        return _HOLD_ENDS[end]
    if direction == "inbox":
        return {
            "allow": "let in",
            "deny": "nothing of it was used",
            "hold": f"held no more: {outcome}" if end else "nothing of it is used",
        }.get(verdict, f"decided: {verdict}")
    return _BECAME.get((verdict, outcome), f"{verdict}, {outcome or 'no outcome on record'}: count it as gone")


def _envelope_lines(direction: str, record: Mapping[str, Any], cells: int) -> Iterator[Line]:
    payload = mapping(record.get("payload"))
    place = f"round {text_of(record.get('round'))} step {text_of(record.get('step'))}"
    run = text_of(record.get("run"))
    yield from _labelled("run", f"{run}, {place}" if run else "outside a run", cells)
    yield from _labelled("from" if direction == "inbox" else "to", text_of(record.get("peer")) or "-", cells)
    if "sequence" in record:
        yield from _labelled("sequence", text_of(record.get("sequence")), cells)
    yield from _labelled("time", _time_text(record.get("t")), cells)
    yield from _labelled("size", _size_text(payload.get("bytes")), cells)
    keyed = "sha256" not in payload and "hmac_sha256" in payload
    digest = text_of(payload.get("sha256") or payload.get("hmac_sha256"))
    yield from _digest_lines(digest, cells, keyed=keyed)
    if keyed:
        yield from _labelled("", "keyed with this site's key, so that nobody can try out what the content was", cells)
    if direction == "outbox":
        kept = "the bytes are kept in this site's archive" if payload.get("archived") is True else "the bytes: not kept"
        yield from _labelled("archive", kept, cells)
    if approvals := _texts(mapping(record.get("link")).get("approvals")):
        yield from _labelled("approved", f"audit records {', '.join(approvals)}", cells)


def _transform_lines(record: Mapping[str, Any], cells: int) -> Iterator[Line]:
    """What the guard changed between what the trainer offered and what was decided on."""
    facts, payload = mapping(record.get("facts")), mapping(record.get("payload"))
    offered, final, transform = (mapping(facts.get(name)) for name in ("offered", "final", "transform"))
    if not offered and not transform:
        return
    same = payload.get("sha256_before")
    told = "the same bytes as were offered" if same == payload.get("sha256") else "other bytes than were offered"
    yield from _labelled("transforms", "offered → decided on" if same is None else told, cells)
    if "clip_l2" in transform:
        clipped = "clipped to" if transform.get("clipped") is True else "not clipped, within"
        yield from _labelled("clip", f"{clipped} L2 {value_text(transform.get('clip_l2'))}", cells)
        yield from _labelled("rounding", f"to {value_text(transform.get('grid'))}", cells)
        bits = whole(transform.get("randomised_low_bits"))
        yield from _labelled("noise", f"{bits} low bits of each value are random" if bits else "none", cells)
    if "responses_withheld" in transform:
        yield from _labelled("withheld", f"{value_text(transform.get('responses_withheld'))} responses", cells)
    for name in ("responses_ungraded", "donors_ungraded"):
        if name in transform:
            yield from _labelled("dropped", f"{value_text(transform.get(name))} answers not graded in time", cells)
    compared = [
        line((f"{title} ", "dim"), f"{_before_after(offered[name], name)} → {_before_after(final[name], name)}")
        for name, title in _COMPARED
        if name in offered and name in final
    ]
    yield from flow(compared, cells)


def _rules_lines(record: Mapping[str, Any], cells: int) -> list[Line]:
    found = record.get("rules")
    rules = [mapping(rule) for rule in found] if isinstance(found, list) else []
    rules.sort(key=lambda rule: text_of(rule.get("outcome")) not in _DECIDING_FIRST)
    rest = whole(mapping(record.get("detail")).get("rules_not_applicable"))
    if not rules:
        return [line(("no rule of the policy judged it", "warn"))]
    cells_of = []
    for rule in rules:
        name, outcome = text_of(rule.get("rule")), text_of(rule.get("outcome"))
        style = {"ok": "ok", "deny": "bad"}.get(outcome, "warn")
        limit = value_text(rule.get("limit"), name)
        limit = f"at least {limit}" if rule_words.binds_from_below(name, limit) else limit
        file = text_of(rule.get("file")) or "policy"
        cells_of.append(
            [(outcome, style), (name, ""), (value_text(rule.get("measured"), name), ""),
             (limit, ""), (f"{file}:{text_of(rule.get('line'))}", "dim")]
        )  # fmt: skip
    rows = table(("rule says", "rule", "measured", "limit", "where"), cells_of, cells)
    return [*rows, line((f"{rest} more rules do not apply to this kind", "dim"))] if rest else rows


# ---- values ----------------------------------------------------------------------------------------


def _digest_lines(digest: str, cells: int, *, keyed: bool) -> list[Line]:
    """A digest whole, in two halves that a narrow terminal draws below each other."""
    if not digest:
        return _labelled("digest", "- (no bytes came to be)", cells)
    half = len(digest) // 2
    return _labelled("hmac" if keyed else "sha256", f"{digest[:half]} {digest[half:]}", cells)


def copied_digest(digest: str, *, keyed: bool) -> str:
    """Return a digest as `y` copies it; empty where there is none."""
    return f"{'hmac-sha256' if keyed else 'sha256'}:{digest}" if digest else ""


def _before_after(value: Any, name: str) -> str:
    return value_text(value, "bytes" if name.endswith("bytes") else "")


def _size_text(value: Any) -> str:
    size = number(value)
    return f"{size:.0f} bytes" + (f", {bytes_text(size)}" if size >= 1024 else "")


def _time_text(milliseconds: Any) -> str:
    seconds = number(milliseconds) / 1000
    if not 0 < seconds < _YEAR_10000_SECONDS:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _labelled(name: str, text: str, cells: int) -> list[Line]:
    """A fact with its name before it; what follows the first line stands below the fact."""
    label = f"{name} ".ljust(_LABEL_CELLS)
    rows = wrap(text, max(cells - len(label), 8)) or [line()]
    return [line((label if not index else " " * len(label), "dim"), *row) for index, row in enumerate(rows)]


def _texts(value: Any) -> Sequence[str]:
    return [text_of(item) for item in value] if isinstance(value, list) else []


JUDGED_THERE = "each silo judges what comes to it"


def state_part(row: MessageRow) -> Part:
    """How far it came: what is none of the words of the query is not told as sent."""
    match row.outcome:
        case "acked":
            return "acknowledged", "ok"
        case "sent":
            return ("some waits", "warn") if row.waiting else ("sent", "")
        case "":
            return "not sent yet", "warn"
    return "unknown", "warn"


def _waiting_part(row: MessageRow) -> Part:
    return (str(row.waiting), "warn") if row.waiting else ("-", "dim")


SENT_COLUMNS = (
    Column("run", lambda row: (row.run or "-", ""), 12, worth=5),
    Column("round", _round_part, 5, worth=0, order=lambda row: row.round),
    Column("kind", lambda row: (row.kind, ""), 18, worth=0, grows=True),
    Column("silo", lambda row: (row.peer, ""), 14, worth=0, grows=True),
    Column("messages", lambda row: (str(row.messages), ""), 8, worth=2, right=True, order=lambda row: row.messages),
    Column("bytes", lambda row: (bytes_text(row.bytes), ""), 9, worth=1, right=True, order=lambda row: row.bytes),
    Column("waits", _waiting_part, 5, worth=3, right=True, order=lambda row: row.waiting),
    Column("state", state_part, 12, worth=0),
)


def sent_summary_lines(answer: Mapping[str, Any], cells: int, *, control: bool) -> list[Line]:
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


def sent_lines(row: Row, answer: Mapping[str, Any], command: str, cells: int) -> list[Line]:
    """What went to one silo of one kind in one round, and every item of it that waits.

    Args:
        row: of the table; of one that was gone to by its name, empty.
        answer: {"message", "waiting"} to the query for this one; empty while there is none.
        command: its twin.
        cells: width.
    """
    shown = message_row(mapping(answer.get("message")) or row)
    place = f"{shown.run}, round {shown.round}" if shown.run else "outside a run"
    rows = flow([line((shown.kind, "strong")), line(f"to {shown.peer}"), line(place)], cells)
    counted = f"{shown.messages} messages, {bytes_text(shown.bytes)}"
    rows += flow([line(state_part(shown)), line(counted), line((JUDGED_THERE, "dim"))], cells)
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
        if (more := shown.waiting - len(waiting)) > 0:
            rows.append(line((f"{more} more wait", "dim")))
    return [*rows, line(), *flow([line(("as command", "dim")), line(command)], cells)]


def _handed(item: Mapping[str, Any]) -> Part:
    return ("its acknowledgement", "warn") if item.get("delivered") is True else ("the silo to ask", "warn")

"""Messages as rows and lines: of an outbox or inbox with decisions, and of a coordinator's outbox, which has counts.

Shows the answers of the queries `outbox` and `inbox` and nothing else. They come from our own daemon, but kinds, names
and measured values in them come from further away, so every text passes `safe` where it is drawn (threat T37). Nobody
judges what a coordinator sends, so there is no verdict there: each silo judges what comes to it, and its own inbox
shows how. Pure.

Does not say whether the log that the answers come from is whole: the audit screen does. Nor that a silo used something,
only that it acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fedsilo.control import answers
from fedsilo.views import rule_words
from fedsilo.views.columns import Column
from fedsilo.views.conditions import control_line, denied_lines
from fedsilo.views.lines import YEAR_10000_SECONDS, Line, Part, bytes_text, clip, flow, line, table, wrap
from fedsilo.views.state import HIDDEN, number, text_of, value_text, whole

VERDICT_STYLES = {"allow": "ok", "deny": "bad", "hold": "warn"}
VERDICTS = tuple(VERDICT_STYLES)
NOUNS = {"outbox": "outbound messages", "inbox": "inbound messages"}
_WORDS = {"deny": "DENY", "hold": "HOLD"}  # also without colour they stand out
_OF_VERDICT = {"": "", "allow": "allowed ", "deny": "denied ", "hold": "held "}
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
# By verdict and outcome of an outbound decision: whether it left, in a cell of the table and in a sentence.
_BECAME: Mapping[tuple[str, str], tuple[Part, str]] = {
    ("allow", ""): (("not yet", "warn"), "not sent yet: it waits in the outbox"),
    ("allow", "sent"): (("yes", ""), "sent; the coordinator has not said that it took it"),
    ("allow", "acked"): (("yes", ""), "sent, and the coordinator took it"),
    ("allow", "indeterminate"): (
        ("unknown", "warn"), "sent at least in part; whether it arrived is not known: count it as gone"
    ),
    ("deny", ""): (("no", "dim"), "nothing was sent"),
    ("hold", ""): (("no", "dim"), "nothing was sent; a person's yes makes a decision of its own"),
}  # fmt: skip
_COMPARED = (
    ("payload_bytes", "bytes"), ("tensors", "tensors"), ("elements", "values"), ("l2", "L2"),
    ("tensor_l2_max", "L2 of one tensor"), ("responses", "responses"), ("prompts", "prompts"),
    ("text_bytes", "bytes of text"), ("tokens", "tokens"),
)  # fmt: skip
_DECIDING_FIRST = ("deny", "hold", "look")
_LABEL_CELLS = 11
_NOT_MEASURED = frozenset({"measured", "limit"})
_MEASURED = "it had"  # a sentence of what would pass that also says what was measured


# ---- rows ------------------------------------------------------------------------------------------


def verdict_part(row: answers.MessageRow) -> Part:
    return _verdict_part(row.verdict, row.outcome)


def _verdict_part(verdict: str, outcome: str) -> Part:
    if _hold_end(verdict, outcome):
        return "held", "dim"  # nobody is asked any more
    return _WORDS.get(verdict, verdict), VERDICT_STYLES.get(verdict, "warn")


def left_part(row: answers.MessageRow) -> Part:
    """Return whether it left this silo: yes, no, not yet, unknown; what is none of these is shown as unknown."""
    if end := _hold_end(row.verdict, row.outcome):
        return ("later" if end == "approved" else "unknown" if end == "ended" else "no"), "dim"
    return _BECAME[row.verdict, row.outcome][0] if (row.verdict, row.outcome) in _BECAME else ("unknown", "warn")


def _hold_end(verdict: str, outcome: str) -> str:
    """Return how a hold ended; empty for what is held still, and for what never was."""
    return outcome if verdict == "hold" and outcome in _HOLD_ENDS else ""


def rule_part(row: answers.MessageRow) -> Part:
    """Return the rule that decided, or the codes where no rule judged; of a hold that is over, its end."""
    if end := _hold_end(row.verdict, row.outcome):
        return end, "dim"
    rule = row.rule or " ".join(row.reasons)
    return (rule, "") if rule else (_nothing(row, "reasons"), "dim")


def _nothing(row: answers.MessageRow, name: str) -> str:
    """In place of a field: there is none, or the source does not hold it. A coordinator's rows are counts."""
    return "-" if name not in row.absent or "messages" not in row.absent else HIDDEN


def digest_part(row: answers.MessageRow) -> Part:
    return short_digest(row.digest) or _nothing(row, "digest"), "dim"


def short_digest(digest: str) -> str:
    return f"{digest[:4]}…{digest[-4:]}" if len(digest) > 12 else digest


def _round_part(row: answers.MessageRow) -> Part:
    return (f"r{row.round}", "") if row.run else ("-", "dim")


def _milliseconds_part(row: answers.MessageRow) -> Part:
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
    """Return the word for what an empty table would show."""
    return f"{_OF_VERDICT.get(verdict, '')}{NOUNS[direction]}"


# ---- the line above the rows -----------------------------------------------------------------------


def summary_lines(
    direction: str, answer: answers.MessagePage | None, sent_bytes: float | None, cells: int, *, control: bool
) -> list[Line]:
    """Return how many there are of each, and how much went out.

    Args:
        direction: outbox or inbox.
        answer: to the query; None before it came.
        sent_bytes: payload bytes out since the daemon started, control messages included; None where it is not known.
        cells: width.
        control: allowed control messages are among the rows and their count.
    """
    pieces: list[Line] = []
    for name, text in (("outbox", "outbound"), ("inbox", "inbound")):
        here = name == direction
        pieces.append(line((f"[{text}]" if here else text, "strong" if here else "dim")))
    if answer is not None and "total" in answer.absent:
        pieces.append(line((f"how many, held and denied: {HIDDEN}", "dim")))
    elif answer is not None:
        pieces += [
            line(f"{answer.total} messages"),
            line((f"{answer.held} held", "warn" if answer.held else "dim")),
            line((f"{answer.denied} denied", "bad" if answer.denied else "dim")),
        ]
    if direction == "outbox" and sent_bytes is not None:
        pieces.append(line(bytes_text(sent_bytes), (" left since the start, control included", "dim")))
    pieces.append(control_line(shown=control))
    return flow(pieces, cells)


# ---- one decision ----------------------------------------------------------------------------------


def brief_lines(
    direction: str, row: answers.MessageRow, answer: answers.DecisionInFull, command: str, cells: int
) -> list[Line]:
    """Return the message under the cursor in a few lines: what became of it, why, and what would pass. `answer` has no
    message before it came."""
    rows = flow([line(verdict_part(row)), line(_became(direction, row.verdict, row.outcome))], cells)
    if direction == "inbox":
        rows += _labelled("from", row.peer or "-", cells)
    rows += _digest_lines(row.digest, cells, keyed=row.digest_keyed)
    if answer.message:
        rows += why_lines(answers.read(answers.AuditRecord, answer.message), answer, cells)
    else:
        rules = tuple(
            answers.filled(answers.JudgedRule, rule=rule, outcome=row.verdict, absent=_NOT_MEASURED)
            for rule in row.rules
        )
        record = answers.filled(answers.AuditRecord, decision=row.verdict, reasons=row.reasons, rules=rules)
        rows += why_lines(record, answers.filled(answers.DecisionInFull, outcome=row.outcome), cells)
    return [*rows, *_labelled("as command", command, cells)]


def why_line(row: answers.MessageRow, cells: int, more: str) -> Line:
    """The message under the cursor in one line, where `brief_lines` have no room: both ends of its digest, its verdict
    and the whole cause."""
    (verdict, style), (rule, _) = verdict_part(row), rule_part(row)
    told = f" {rule}" if rule != "-" else ": no rule stood against it"
    told = f", rules {HIDDEN}" if rule == HIDDEN else told
    digest = short_digest(row.digest)
    ends = ((f"{digest} ", "accent"),) if digest else ()
    return clip(line((f"record {text_of(row.seq)} ", "dim"), *ends, (verdict, style), told), cells, more)


def detail_lines(
    direction: str, answer: answers.DecisionInFull, command: str, cells: int, *, party: str = "silo"
) -> list[Line]:
    """Return one decision whole: outcome and cause first, then envelope, transforms and each rule's verdict. `party` is
    whose log it is: silo or coordinator."""
    record, took = answers.read(answers.AuditRecord, answer.message), answer.milliseconds
    became = _became(direction, record.decision, answer.outcome) + (f", after {took} ms" if took is not None else "")
    verdict = _verdict_part(record.decision, answer.outcome)
    rows = flow([line(verdict), line((record.kind, "strong")), line(became)], cells)
    rows += why_lines(record, answer, cells)
    rows += [line(), *_envelope_lines(direction, record, cells)]
    if transforms := list(_transform_lines(record, cells)):
        rows += [line(), *transforms]
    rows += [line(), *_rules_lines(record, cells), line()]
    rows += _labelled("policy", short_digest(text_of(record.policy.get("effective"))) or "-", cells)
    rows += _labelled("record", f"{text_of(record.seq)} of this {party}'s audit log", cells)
    return [*rows, *_labelled("as command", command, cells)]


def why_lines(record: answers.AuditRecord, answer: answers.DecisionInFull, cells: int) -> list[Line]:
    """Return the rules that denied or held it with what they measured, and what would pass; nothing for what was
    allowed. Of a row of the table only the names of the rules are known."""
    if record.decision == "allow":
        return []
    deciding = [rule for rule in record.rules if rule.outcome in ("deny", "hold")]
    sentences = list(answer.would_pass)
    if not deciding:
        codes = " ".join(record.reasons)
        return denied_lines(codes or "no reason on record", "", "", "; ".join(sentences), cells)
    rows: list[Line] = []
    for rule in deciding:
        name = rule.rule
        in_full = next((each for each in sentences if each.startswith(f"{name}: ") and _MEASURED in each), "")
        measured, limit = value_text(rule.measured, name), value_text(rule.limit, name)
        if _hold_end(record.decision, answer.outcome):
            rows += wrap(f"held by {name}", cells, "dim")  # what it had then is no state of things
        elif rule.outcome == "hold":
            rows += wrap(f"HOLD {name}: {measured or '-'} of {limit or '-'}", cells, "warn")
        elif in_full:  # what would pass and what was measured, in one sentence: twice would be two facts to compare
            sentences.remove(in_full)
            rows += wrap(f"DENY {in_full}", cells, "bad")
        elif "measured" not in rule.absent:
            rows += denied_lines(name, measured, limit, "", cells)
        else:
            rows += wrap(f"DENY {name}", cells, "bad")
    for sentence in sentences:
        rows += wrap(f"would pass: {sentence}", cells)
    return rows


def _became(direction: str, verdict: str, outcome: str) -> str:
    end = _hold_end(verdict, outcome)
    if end and direction == "outbox":
        return _HOLD_ENDS[end]
    if direction == "inbox":
        return {
            "allow": "let in",
            "deny": "nothing of it was used",
            "hold": f"held no more: {outcome}" if end else "nothing of it is used",
        }.get(verdict, f"decided: {verdict}")
    if (verdict, outcome) in _BECAME:
        return _BECAME[verdict, outcome][1]
    return f"{verdict}, {outcome or 'no outcome on record'}: count it as gone"


def _envelope_lines(direction: str, record: answers.AuditRecord, cells: int) -> Iterator[Line]:
    payload = record.payload
    place = (
        f"{record.run}, round {text_of(record.round)} step {text_of(record.step)}" if record.run else "outside a run"
    )
    yield from _labelled("run", place, cells)
    yield from _labelled("from" if direction == "inbox" else "to", record.peer or "-", cells)
    if "sequence" not in record.absent:
        yield from _labelled("sequence", text_of(record.sequence), cells)
    yield from _labelled("time", _time_text(record.t), cells)
    yield from _labelled("size", _size_text(payload.bytes), cells)
    yield from _digest_lines(payload.digest, cells, keyed=payload.keyed)
    if payload.keyed:
        yield from _labelled("", "keyed with this site's key, so that nobody can try out what the content was", cells)
    if direction == "outbox":
        archive = "the bytes are kept in this site's archive" if payload.archived else "the bytes: not kept"
        yield from _labelled("archive", archive, cells)
    approvals = record.link.get("approvals")
    if isinstance(approvals, list) and approvals:
        yield from _labelled("approved", f"audit records {', '.join(map(text_of, approvals))}", cells)


def _transform_lines(record: answers.AuditRecord, cells: int) -> Iterator[Line]:
    """Yield what the guard changed between what the trainer offered and what was decided on."""
    offered, final, transform = (record.facts.get(name, {}) for name in ("offered", "final", "transform"))
    if not offered and not transform:
        return
    before = record.payload.sha256_before
    same = "the same bytes as were" if before == record.payload.sha256 else "other bytes than were"
    yield from _labelled("transforms", f"{same} offered" if before else "offered → decided on", cells)
    if "clip_l2" in transform:
        clipped = "clipped to" if transform.get("clipped") is True else "not clipped, within"
        yield from _labelled("clip", f"{clipped} L2 {value_text(transform['clip_l2'])}", cells)
        yield from _labelled("rounding", f"to {value_text(transform.get('grid'))}", cells)
        bits = whole(transform.get("randomised_low_bits"))
        yield from _labelled("noise", f"{bits} low bits of each value are random" if bits else "none", cells)
    if "responses_withheld" in transform:
        yield from _labelled("withheld", f"{value_text(transform['responses_withheld'])} responses", cells)
    for name in ("responses_ungraded", "donors_ungraded"):
        if name in transform:
            yield from _labelled("dropped", f"{value_text(transform[name])} answers not graded in time", cells)
    compared = [
        line((f"{title} ", "dim"), f"{_before_after(offered[name], name)} → {_before_after(final[name], name)}")
        for name, title in _COMPARED
        if name in offered and name in final
    ]
    yield from flow(compared, cells)


def _rules_lines(record: answers.AuditRecord, cells: int) -> list[Line]:
    if not record.rules:
        return [line(("no rule of the policy judged it", "warn"))]
    rows = []
    for rule in sorted(record.rules, key=lambda rule: rule.outcome not in _DECIDING_FIRST):
        style = {"ok": "ok", "deny": "bad"}.get(rule.outcome, "warn")
        limit = value_text(rule.limit, rule.rule)
        limit = f"at least {limit}" if rule_words.binds_from_below(rule.rule, limit) else limit
        place = f"{rule.file or 'policy'}:{text_of(rule.line)}"
        rows.append(
            [(rule.outcome, style), (rule.rule, ""), (value_text(rule.measured, rule.rule), ""),
             (limit, ""), (place, "dim")]
        )  # fmt: skip
    lines = table(("rule says", "rule", "measured", "limit", "where"), rows, cells)
    rest = whole(record.detail.get("rules_not_applicable"))
    return [*lines, line((f"{rest} more rules do not apply to this kind", "dim"))] if rest else lines


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


def _size_text(size: float) -> str:
    return f"{size:.0f} bytes" + (f", {bytes_text(size)}" if size >= 1024 else "")


def _time_text(milliseconds: Any) -> str:
    seconds = number(milliseconds) / 1000
    if not 0 < seconds < YEAR_10000_SECONDS:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _labelled(name: str, text: str, cells: int) -> list[Line]:
    """A fact with its name before it; what follows the first line stands below the fact."""
    label = f"{name} ".ljust(_LABEL_CELLS)
    rows = wrap(text, max(cells - len(label), 8)) or [line()]
    return [line((label if not index else " " * len(label), "dim"), *row) for index, row in enumerate(rows)]


JUDGED_THERE = "each silo judges what comes to it"


def state_part(row: answers.MessageRow) -> Part:
    """Return how far a message came; an unknown word is never shown as sent."""
    match row.outcome:
        case "acked":
            return "acknowledged", "ok"
        case "sent":
            return ("some waits", "warn") if row.waiting else ("sent", "")
        case "":
            return "not sent yet", "warn"
    return "unknown", "warn"


def _waiting_part(row: answers.MessageRow) -> Part:
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


def sent_summary_lines(answer: answers.MessagePage | None, cells: int, *, control: bool) -> list[Line]:
    """Return how much was sent and how much waits."""
    pieces = [line(("[outbound]", "strong")), line(("inbound", "dim"))]
    if answer is not None:
        waits = line((f"{answer.waiting} wait", "warn" if answer.waiting else "dim"))
        pieces += [line(f"{answer.sent} messages"), waits]
    pieces += [line((JUDGED_THERE, "dim")), control_line(shown=control)]
    return flow(pieces, cells)


def sent_lines(row: answers.MessageRow, answer: answers.SentInFull, command: str, cells: int) -> list[Line]:
    """Return what went to one silo of one kind in one round, and every item of it that waits. `answer` has no message
    before it came."""
    shown = row if "message" in answer.absent else answer.message
    place = f"{shown.run}, round {shown.round}" if shown.run else "outside a run"
    rows = flow([line((shown.kind, "strong")), line(f"to {shown.peer}"), line(place)], cells)
    counted = f"{shown.messages} messages, {bytes_text(shown.bytes)}"
    rows += flow([line(state_part(shown)), line(counted), line((JUDGED_THERE, "dim"))], cells)
    if answer.waiting:
        rows.append(line())
        for item in answer.waiting:
            half = len(item.sha256) // 2
            pieces = [
                line(("waits for ", "dim"), _waits_for(item)),
                line(f"step {item.step}"),
                line(bytes_text(item.bytes)),
                line(("sha256 ", "dim"), item.sha256[:half]),
                line(item.sha256[half:]),
            ]
            rows += flow(pieces, cells)
        if (more := shown.waiting - len(answer.waiting)) > 0:
            rows.append(line((f"{more} more wait", "dim")))
    return [*rows, line(), *flow([line(("as command", "dim")), line(command)], cells)]


def _waits_for(item: answers.WaitingItem) -> Part:
    return ("its acknowledgement" if item.delivered else "the silo to ask"), "warn"

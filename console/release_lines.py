"""What the screens around a held release say, as lines: a finding whole, the payload, the comparison with the last one.

Everything comes from the daemon, and much of it from further away: a model's answers above all. Each piece of such a
text is a part of its own, so that the one function that makes text safe sees all of it (threat T37); a long text is cut
into lines first, never dropped. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from console.drawing import Glyphs, Line, bytes_text, digest_text, line, table, wrap
from console.reading import mapping, number, text_of, whole
from console.safe import safe
from console.values import Finding, Release

PLACES_MAX = 6  # of a hit, in its sentence; all that the daemon names stand below it
PIECE_CHARACTERS = 100  # of a foreign text made safe at once, so that nothing of it is cut
# Why no payload can be read in a recording, and what can be read instead.
PAYLOAD_AWAY = (
    "The payload is in no recording. Here f reads each finding: what matched, where, how often, what would pass; "
    "p every rule, d the difference."
)
# What a finding means, and what to look at before a yes.
_MEANS: Mapping[str, tuple[str, str]] = {
    "REJECTED_BEFORE": (
        "somebody at your site rejected these very bytes before",
        "reject, unless who said no says why not this time; h has the note",
    ),
    "FAR_END_EXPIRED": ("the coordinator's certificate is over", "reject; ask who runs the coordinator"),
    "FAR_END_EXPIRES": (
        "the coordinator's certificate ends within a day; its own renewal comes earlier",
        "ask who runs the coordinator before you approve",
    ),
    "NEW_DESTINATION": (
        "this would go to another address than the last release",
        "approve only if you were told of the move, by another way than this federation",
    ),
    "NEW_CERTIFICATE": (
        "the far end shows another certificate than at the last release; renewing makes another one too",
        "compare the fingerprint with what the coordinator's people tell you",
    ),
    "BASE_DIFFERS": (
        "this update is not on top of what the last round ended in",
        "reject; this adapter is not the one that silos agreed on",
    ),
    "POLICY_CHANGED": (
        "this leaves under another policy than the last release",
        "reject, or defer it (D), if nobody at your site announced it; every limit that was loosened stands below, "
        "fedsilo policy diff shows both policies",
    ),
    "FORM_DIFFERS": (
        "the tensors are others than those of the last release",
        "reject, unless another run or plan was announced to you by another way than this federation",
    ),
    "NORM_OUTLIER": ("the update is far larger than the last one", "ask why before you send it; d has the norms"),
    "SIZE_JUMP": ("there is far more in it than in the last one", "ask why before you send it; v shows what is in it"),
    "BUDGET": (
        "it takes much of what may still leave today, and the rest of the day may have to do without",
        "reject, or defer it (D), unless you know why this much is to leave today",
    ),
    "SECOND_RELEASE": ("an update of this place in the run has left already", "ask why a second one is wanted"),
    "SCREEN_HIT": (
        "a text screen matched an answer: near private text, a canary, a secret or an identity",
        "read that answer (v); reject if it is a record's, and if you cannot read it",
    ),
}
# What each text screen looks for, by its name in the policy: what of whose text a hit stands for, and what is counted.
_SCREENS: Mapping[str, tuple[str, str]] = {
    "overlap": ("words in a row that a private record of this site has too (private text)", "such passages"),
    "canary": ("one of the strings that were planted in this site's private data (private text)", "canaries"),
    "pii_basic": ("a pattern of an identity, such as an address, a number or a date of birth", "patterns"),
    "charset": ("characters that the policy does not allow in a text", "characters or runs"),
}
_POLICY_SHOWS = "How much each screen lets pass: fedsilo policy show."
_PLACE = re.compile(r"row (\d+) answer (\d+)")
_UNKNOWN = ("this console does not know this kind of finding", "look at the policy (p) and the difference (d)")


def finding_lines(
    finding: Finding, number_of: str, cells: int, release: Release | None = None, *, told: str = ""
) -> list[Line]:
    """One finding whole.

    Args:
        finding: to show.
        number_of: such as "1 of 2".
        cells: of a line.
        release: that it was found in; with it a hit of a text screen is told with what was counted and what would pass.
        told: what is read in place of a daemon that runs, of whose payloads none can be shown; "" for a daemon.
    """
    means, then = _MEANS.get(finding.code, _UNKNOWN)
    is_hit = finding.code == "SCREEN_HIT" and release is not None
    meant = [] if is_hit else wrap(f"What it means: {means}.", cells)
    rows = [
        line((f"finding {number_of}  ", "dim"), (finding.id, "strong")),
        *_quoted(finding.says, cells, "warn", mark=""),
        (),
        *(hit_lines(finding, release, cells) if is_hit and release is not None else meant),
        *wrap(f"What to do: {then}.", cells, "strong"),
        *(wrap(f"{PAYLOAD_AWAY} At the silo itself v shows it.", cells, "dim") if is_hit and told else []),
    ]
    if finding.evidence:
        rows += [(), line(("where it was found" if finding.code == "SCREEN_HIT" else "what was compared", "dim"))]
    for one in finding.evidence:
        rows.append(line((f"{safe(one.what, 80)}:", "accent")))
        if one.before not in ("", "None"):
            rows += _labelled("before", one.before, cells)
        rows += _labelled("now", one.now, cells)
    return rows


def hit_lines(finding: Finding, release: Release, cells: int) -> list[Line]:
    """What a text screen matched, how often, what is allowed, and what would pass: all that can be said of a near match
    without the text itself, which stands in no state and no recording."""
    screens = sorted({part.partition("/")[0] for one in finding.evidence for part in one.what.split(", ")})
    rows: list[Line] = []
    for name in screens:
        matched, counted = _SCREENS.get(name, ("what the screen of that name looks for", "hits"))
        number = ", ".join(f"{way} {count}" for way, count in _counts(release.findings, name)) or "not told"
        rows += wrap(f"What matched: {matched}. Counted, {counted}: {safe(number, 200)}.", cells)
    places = [found for one in finding.evidence for found in _PLACE.findall(one.now)]
    told_of = [f"answer {answer} to public prompt {row}" for row, answer in dict.fromkeys(places)]
    if told_of:
        more = f" and {len(told_of) - PLACES_MAX} more, below" if len(told_of) > PLACES_MAX else ""
        rows += wrap(f"Where: {', '.join(told_of[:PLACES_MAX])}{more}.", cells)
    people = next((rule for rule in release.rules if rule.rule == "screen hits" and rule.limit not in ("", "0")), None)
    unless = f", unless approved by {people.limit} ({people.measured} so far)" if people else ""
    rows += wrap(f"Allowed: no answer with a hit{unless}.", cells)
    rows += wrap(f"What would pass: the same message without that answer. {_POLICY_SHOWS}", cells)
    return rows


def hit_brief(finding: Finding, release: Release) -> str:
    """Of a hit in few words: whose text it stands for, and how often something matched."""
    screens = sorted({part.partition("/")[0] for one in finding.evidence for part in one.what.split(", ")})
    counts = [f"{way} {count}" for name in screens for way, count in _counts(release.findings, name)]
    private = "private text, " if {"overlap", "canary"} & set(screens) else ""
    return f" ({private}counted {', '.join(counts)}, allowed 0)" if counts else ""


def _counts(findings: str, screen: str) -> list[tuple[str, str]]:
    """Codes of a screen with their counts, as the daemon's sentence on the screens has them."""
    return re.findall(rf"\b({re.escape(screen)}/[\w/-]+) (\d+)", findings)


def _labelled(label: str, text: str, cells: int) -> list[Line]:
    rows = _quoted(text, cells - 9, "", mark="")
    return [line((f"  {label if not index else '':7}", "dim"), *row) for index, row in enumerate(rows)]


# ---- the payload ------------------------------------------------------------------------------------


def payload_lines(shown: Mapping[str, Any], cells: int, glyphs: Glyphs) -> list[Line]:
    """All of a payload as the daemon shows it."""
    rows: list[Line] = [
        line(
            (text_of(shown.get("kind")), "strong"), f" {bytes_text(number(shown.get('bytes')))} ",
            (f"sha256:{digest_text(text_of(shown.get('sha256')))}", "accent"),
        )
    ]  # fmt: skip
    answers = shown.get("answers")
    if isinstance(answers, list):
        rows += _answers(answers, cells)
    tensors = shown.get("tensors")
    if isinstance(tensors, list):
        rows += _tensors(shown, tensors, cells, glyphs)
    if "content" in shown:
        rows += _content(shown["content"], cells)
    return rows


def _answers(answers: list[Any], cells: int) -> list[Line]:
    rows: list[Line] = []
    total = sum(len(_texts(mapping(row).get("answers"))) for row in answers)
    told = f"answers: {total}, to public prompts: {len(answers)}; the prompts are this site's own copy"
    rows += wrap(told, cells, "dim")
    for row in map(mapping, answers):
        texts, prompt = _texts(row.get("answers")), row.get("prompt")
        rows += [(), line((f"public row {whole(row.get('row'))}", "accent"), (f"  answers: {len(texts)}", "dim"))]
        if isinstance(prompt, str):
            rows += _quoted(prompt, cells, "dim")
        else:
            rows += wrap("NOT in this site's public set: there is no prompt to show", cells, "bad")
        for index, text in enumerate(texts, 1):
            rows.append(line((f"answer {index} of {len(texts)}, characters: {len(text)}", "strong")))
            rows += _quoted(text, cells, "")
    return rows


def _tensors(shown: Mapping[str, Any], tensors: list[Any], cells: int, glyphs: Glyphs) -> list[Line]:
    edges = shown.get("edges")
    places = [number(edge) for edge in edges] if isinstance(edges, list) else []
    rows: list[Line] = [
        *wrap("no value is shown: name, shape, type, L2 norm, and how many values are of which size", cells, "dim"),
        *wrap(f"sizes: {_edges(places)}", cells, "dim"),
        (),
    ]  # fmt: skip
    found = [mapping(one) for one in tensors]
    begins, names, ends = _apart([text_of(one.get("name")) for one in found])
    types = {text_of(one.get("type")) for one in found}
    alike = [f"begins with {begins}"] if begins else []
    alike += [f"ends in {ends}"] if ends else []
    said = [f"each name {' and '.join(alike)}"] if alike else []
    said += [f"each is of type {types.pop()}"] if len(types) == 1 and len(found) > 1 else []
    rows[-1:] = [*wrap("; ".join(said), cells, "dim"), ()]
    cellsof = []
    for one, name in zip(found, names, strict=True):
        counts, shape = mapping(one.get("histogram")), one.get("shape")
        size = "x".join(str(whole(part)) for part in shape) if isinstance(shape, list) else ""
        strange = whole(counts.get("not_finite"))
        cellsof.append(
            [
                (name, "strong"), (size, ""), *([(text_of(one.get("type")), "dim")] if types else []),
                (text_of(one.get("norm")), ""), (_bars(counts.get("negative"), glyphs), ""),
                (str(whole(counts.get("zero"))), "dim"), (_bars(counts.get("positive"), glyphs), ""),
                (f"{strange} NOT FINITE" if strange else "", "bad"),
            ]
        )  # fmt: skip
    kinds = ["type"] if types else []
    header = ["tensor", "shape", *kinds, "L2", "below 0", "zero", "above 0", ""]
    right = frozenset({header.index("L2"), header.index("zero")})
    rows += table(header, cellsof, cells, right=right, ends=frozenset({0}))
    total = whole(shown.get("tensors_total"))
    if total > len(tensors):
        rows.append(line((f"and {total - len(tensors)} more tensors", "warn")))
    return rows


def _apart(names: list[str]) -> tuple[str, list[str], str]:
    """What all names begin with, what is left of each, and what all end in, at their dots: what is left tells one from
    another, and has to go into a narrow table."""
    if len(names) < 2:
        return "", names, ""
    split = [name.split(".") for name in names]
    shortest = min(map(len, split)) - 1  # something is left of each
    first = next((at for at in range(shortest) if len({parts[at] for parts in split}) > 1), max(shortest, 0))
    rest = shortest - first
    last = next((at for at in range(rest) if len({parts[-1 - at] for parts in split}) > 1), max(rest, 0))
    kept = [".".join(parts[first : len(parts) - last]) for parts in split]
    begins, ends = ".".join(split[0][:first]), ".".join(split[0][len(split[0]) - last :])
    return f"{begins}." if begins else "", kept, f".{ends}" if ends else ""


def _edges(places: list[float]) -> str:
    return f"one bar for each power of ten, from {places[0]:g} to {places[-1]:g} and more" if places else "not told"


def _bars(counts: Any, glyphs: Glyphs) -> str:
    """A bar a power of ten, by the share of its count: digits 0 to 9 say tenths in ASCII."""
    numbers = [number(count) for count in counts] if isinstance(counts, list) else []
    most = max(numbers, default=0.0)
    signs = ".123456789" if glyphs.full == "#" else " ▁▂▃▄▅▆▇█"
    return "".join(signs[min(int(count / most * (len(signs) - 1) + 0.999), len(signs) - 1)] if most else signs[0]
                   for count in numbers)  # fmt: skip


def _content(content: Any, cells: int) -> list[Line]:
    import json

    text = json.dumps(content, indent=1, ensure_ascii=False, default=str)
    return _quoted(text, cells, "", mark="")


# ---- beside the last one ----------------------------------------------------------------------------


def comparison_lines(told: Mapping[str, Any], cells: int) -> list[Line]:
    """All of a release beside the last one of its kind: what differs first."""
    against = told.get("against")
    if not isinstance(against, Mapping):
        return wrap(text_of(told.get("note")) or "there is nothing to compare with", cells, "strong")
    state, at = text_of(against.get("state")) or "left", text_of(against.get("at"))
    people = ", ".join(_texts(against.get("approved_by")))
    became = f"left {at}, " + (f"approved by {people}" if people else "nobody was asked")
    if state != "left":
        no = ", ".join(_texts(against.get("rejected_by")))
        became = f"held since {at}, {state}{f' by {no}' if no else ''}: it did not leave"
    rows = wrap(f"against round {whole(against.get('round'))} of run {text_of(against.get('run'))}, {became}", cells)
    if note := text_of(told.get("note")):
        rows += wrap(note, cells, "warn")
    found = [mapping(row) for row in told.get("rows") or [] if isinstance(row, Mapping)]
    differing, same = ([row for row in found if (row.get("differs") is True) is so] for so in (True, False))
    for title, style, part in (("differs", "warn", differing), ("same", "dim", same)):
        if part:
            rows += [(), line((f"{title}: {len(part)}", style))]
            rows += table(
                ("what", "before", "now"),
                [[(_named(row), style), (_value(row.get("before")), ""), (_value(row.get("now")), "")] for row in part],
                cells,
            )
    tensors = [mapping(one) for one in told.get("tensors") or [] if isinstance(one, Mapping)]
    if tensors:
        of = whole(told.get("tensors_total"))
        rows += [(), line((f"L2 norm of {len(tensors)} of {of} tensors, largest change first", "accent"))]
        rows += table(
            ("tensor", "before", "now", "times"),
            [
                [(text_of(one.get("name")), ""), (_value(one.get("before")), ""), (_value(one.get("now")), ""),
                 (_times(one.get("times")), "")]
                for one in tensors
            ],
            cells, right=frozenset({1, 2, 3}), ends=frozenset({0}),
        )  # fmt: skip
    return rows


def _named(row: Mapping[str, Any]) -> str:
    return text_of(row.get("what")).replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "-" if value is None else str(value)
    return f"{text[:8]}…{text[-4:]}" if len(text) == 64 and all(part in "0123456789abcdef" for part in text) else text


def _times(value: Any) -> str:
    return f"x{value:.2f}" if isinstance(value, int | float) else "only one has it"


# ---- foreign text -----------------------------------------------------------------------------------


def _texts(value: Any) -> list[str]:
    return [text_of(one) for one in value] if isinstance(value, list) else []


def _quoted(text: str, cells: int, style: str, *, mark: str = "| ") -> list[Line]:
    """All of a text, line by line, behind a bar that no text can draw: what it means to hide is spelled out, and what
    is longer than a line goes on in the next one."""
    room = max(cells - len(mark), 8)
    return [line((mark, "dim"), (row, style)) for part in text.split("\n") for row in _pieces(part, room)]


def _pieces(text: str, cells: int) -> Iterator[str]:
    from rich.cells import cell_len, set_cell_size

    shown = "".join(safe(text[at : at + PIECE_CHARACTERS], 64 * PIECE_CHARACTERS)
                    for at in range(0, len(text), PIECE_CHARACTERS))  # fmt: skip
    while cell_len(shown) > cells:
        head = set_cell_size(shown, cells).rstrip(" ") if cell_len(shown) > cells else shown
        cut = len(head)
        space = head.rfind(" ")
        if space > cells // 2:
            cut = space + 1
        cut = max(cut, 1)
        yield shown[:cut]
        shown = shown[cut:]
    yield shown

"""Pieces of which the audit report's page is made: its style, and values as harmless HTML.

Every value comes from records that other parties helped to write: all of it passes `text`, which spells out control
and bidirectional characters and escapes HTML (threat T37). The page forbids scripts and fetching by its own policy too.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from fedsilo.edge.audit_counting import moment
from fedsilo.launch.output import plain

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6675; --line: #d5dbe3; --paper: #fff; --band: #f3f5f8;
  --good: #14683a; --good-band: #e2f3e8; --bad: #9c1c1c; --bad-band: #fbe6e4; --bar: #4a78b8;
  --warn: #6b4700; --warn-band: #fcefcf; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa6b5; --line: #37414e; --paper: #14181e;
  --band: #1d232b; --good: #7fd6a2; --good-band: #173425; --bad: #ff9d94; --bad-band: #43201f; --bar: #6f9fe0;
  --warn: #f2c879; --warn-band: #3f3113; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; padding-bottom: .25rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft { color: var(--soft); }
.code { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; font-size: .86em;
  overflow-wrap: break-word; }
.long { overflow-wrap: anywhere; }
.verdict { display: inline-block; padding: .1rem .6rem; border-radius: .3rem; font-weight: 600; }
.good { color: var(--good); background: var(--good-band); }
.bad { color: var(--bad); background: var(--bad-band); }
.warn { color: var(--warn); background: var(--warn-band); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .6rem; margin: 1rem 0;
  padding: 0; list-style: none; }
.facts li { background: var(--band); border-radius: .4rem; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.facts span { color: var(--soft); font-size: .86rem; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem 1rem .35rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; }
th:last-child, td:last-child { padding-right: 0; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
.bar { display: block; height: .4rem; margin-top: .25rem; border-radius: .2rem; background: var(--bar); }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0; max-width: 46rem; }
ul.lines { list-style: none; padding: 0; max-width: 46rem; }
ul.lines li { display: flex; align-items: flex-end; gap: 1rem; padding-top: 1.6rem; break-inside: avoid; }
ul.lines li span:first-child { flex: none; width: 9rem; color: var(--soft); }
.line { display: inline-block; flex: auto; min-width: 14rem; border-bottom: 1px solid var(--ink); height: 1.1em; }
.words { display: block; color: var(--soft); font-size: .86rem; max-width: 30rem; }
.whole { white-space: nowrap; font-size: .78em; }
ul.plain { margin: .4rem 0; padding-left: 1.2rem; }
@media (max-width: 40rem) {
  body { padding: 1rem .9rem 3rem; }
  table, tbody, tr, td { display: block; width: 100%; }
  thead { position: absolute; left: -100vw; }
  tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  td, .number { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0;
    text-align: right; white-space: normal; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; }
  td > * { min-width: 0; }
  .whole { white-space: normal; overflow-wrap: anywhere; }
}
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --band: #f3f3f3; --good: #0a4a26; --bad: #7a0f0f;
    --warn: #573a00; }
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  h2, h3 { break-after: avoid; } tr, li, dd { break-inside: avoid; }
}
"""

_LONG_CHARACTERS = 32  # what is longer may be broken anywhere, so that no name makes a table wider than the page

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
"""


def text(value: Any) -> str:
    """Any value as harmless HTML text."""
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    elif isinstance(value, int):
        return f"{value:,}"
    elif isinstance(value, dict | list | tuple):
        value = json.dumps(value, ensure_ascii=False)
    return html.escape(plain(str(value)).replace("\n", " "), quote=True)


# ---- pieces --------------------------------------------------------------------------------------------


class Markup(str):
    """HTML that was made here; anything else that a cell holds is escaped."""


def code(value: Any) -> Markup:
    return Markup(f'<span class="code{" long" if _is_long(value) else ""}">{text(value)}</span>')


def _is_long(value: Any) -> bool:
    return any(len(word) > _LONG_CHARACTERS for word in str(value).split())


def whole(value: str) -> Markup:
    """All digits of a digest or key, in one line where the screen is wide enough: two of them can be compared."""
    return Markup(f'<span class="code whole">{text(value)}</span>') if value else Markup(none())


def digest(value: str) -> Markup:
    """The first 16 characters; the JSON file has all of them."""
    return code(value[:16] + ("…" if len(value) > 16 else "")) if value else Markup(none())


def verdict(good: bool, words: str) -> Markup:
    return badge("good" if good else "bad", words)


def badge(level: str, words: str) -> Markup:
    """level: good, warn or bad."""
    return Markup(f'<span class="verdict {level}">{text(words)}</span>')


def further(count: int, what: str) -> str:
    """A line under a list that is not whole; nothing under one that is."""
    return f"<p>{text(count)} more {text(what)}.</p>" if count > 0 else ""


def none() -> str:
    return '<span class="soft">-</span>'


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, total: Sequence[Any] | None = None) -> str:
    """A table; a column of numbers is one whose cells all are. On a phone each row becomes a card."""
    cells = [list(row) for row in rows]
    if not cells:
        return '<p class="soft">None.</p>'
    numeric = [all(isinstance(row[column], int) for row in cells) for column in range(len(header))]
    mark = [' class="number"' if is_number else "" for is_number in numeric]
    lines = [f"<th{mark[column]}>{text(name)}</th>" for column, name in enumerate(header)]
    body = [f"<tr>{_cells(header, row, mark)}</tr>" for row in cells]
    if total is not None:
        body.append(f'<tr class="total">{_cells(header, total, mark)}</tr>')
    return f"<table><thead><tr>{''.join(lines)}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cells(header: Sequence[str], row: Sequence[Any], mark: Sequence[str]) -> str:
    shown = (_shown(value) for value in row)
    return "".join(
        f'<td{mark[column]} data-label="{text(header[column])}"><span>{value}</span></td>'
        for column, value in enumerate(shown)
    )


def _shown(value: Any) -> str:
    if isinstance(value, Markup):
        return value
    made = text(value)
    if _is_long(value):
        return f'<span class="long">{made}</span>'
    return made or none()


def when(milliseconds: int) -> str:
    return moment(milliseconds) if milliseconds else "-"


def size(count: float, unit: str = "bytes") -> str:
    """A count of bytes or bits in a unit that a person can compare."""
    amount = count / 8 if unit == "bits" else count
    for name, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.1f} {name}"
    return f"{amount:.0f} bytes"

"""`docs/explain/rounds.md`, drawn from the transition tables; `make reference` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedsilo.protocol.rounds import OVER, TABLES, Cell, Table, Verdict
from tools.reference import HEADING, ROOT, markdown_table

PAGE = ROOT / "docs" / "explain" / "rounds.md"
_TITLES = {
    "run": ("The run", "One for each run; its state is what `fedsilo run list` shows."),
    "silo": ("A silo in the run", "Whether it was asked, took the plan in, or is out of the run for good."),
    "round": ("The round", "The newest of a run; the next opens when it is over."),
    "place": (
        "A silo's place in the round",
        "Why an update is in the aggregate or is not. `refused`: the charter let its update not in; it may come with "
        "another. `late`: the round was over before it came.",
    ),
    "at silo": (
        "The round at a silo",
        "The newest that the silo knows of. `signed`: it signed the transcript and waits for the others; `left`: the "
        "round goes on without it. A newer round finds `none`; of an older one only the end counts, and a message that "
        "comes again is ignored.",
    ),
}
_INTRODUCTION = """\
# Rounds

What happens to a run is decided by tables, [`rounds.py`](../../fedsilo/protocol/rounds.py): four at the
coordinator, one at each silo. At the coordinator an event asks those that have a row for it, from the run down to the
silo's place; the first that refuses decides, and the sender is told its code. What is accepted is written down, in the
same transaction as all that it changes, before anybody is told; a coordinator that starts again folds what is written
down and stands where it stood.

**At a silo** the coordinator's messages, a refusal of its own and the order to leave move the newest round. A silo that
starts again waits on for the signatures, goes on inside the round, or leaves it, by what its ledger knows. Work on a
round ends with the round: when its end is told, when a newer one ends or is refused, when the silo leaves it.

**Retries.** A contribution is known by run, round, step, attempt, silo, kind and digest. The same digest in the same
place is ignored and acknowledged, whichever attempt it came with and whatever has become of the run since. Another
digest in a taken place is refused, so which updates count does not depend on the order in which they came.

**Runs side by side.** A coordinator carries out several runs at once if no silo is in two of them: a silo has one
trainer. A run that names a silo of another which has not ended is refused when it is submitted (`SILO_BUSY`). Budgets
are the site's, whichever run spends them; all else is counted by run.

**Late joiners.** The plan waits for a silo that has not taken it in when the run begins, as long as the run goes on:
its machine was down, or its people had not said yes. Once it takes the plan in, it belongs to the rounds that open from
there on, with all that a round gives and asks for; what it sends for the open one is refused (`ROUND_CLOSED`). If it
never comes, it is told how the run ended. Until then it is in no other run. A silo that had never said hello when the
run began is not in the plan.

**Closing a round.** The method says when it is complete. The tables let it commit only updates that were taken, and
never fewer than the quorum. Where the plan names several silos none begins with one alone, whatever the quorum: its
transcript takes two signatures, and a run with one silo left fails (`QUORUM_NOT_REACHED`). All that was taken counts,
in the order of silos that the plan has. A method whose rounds make no adapter has a round `closed` instead; one that
ends in neither way is `abandoned`.

**Time.** While somebody is awaited, a deadline runs. That of a round counts from the newest step that a silo which is
still awaited told of or answered: a round ends when nothing has come forward for so long, not when it has lasted so
long. A step is told of once and a plan has so many, so a round ends. While a run is paused no deadline passes, and
after a restart they count anew: an outage closes no round. When no more messages come, deadlines alone bring every run
to its end.

`tests/protocol/test_rounds_small.py` goes through every history of two silos; `test_rounds.py` tries up to four, with
retries, late, lost and reordered messages; `test_rounds_at_silos.py` runs the silos' table against the coordinator's,
with kills on both sides. What this does not stop: a silo that is slow on purpose, up to each
deadline, and with each step of a round anew."""


def rounds_page() -> str:
    """The whole text of the page."""
    parts = [_INTRODUCTION]
    for name, table in TABLES.items():
        title, what = _TITLES[name]
        parts += [f"## {title}\n\n{what}", _diagram(table), _cells(table)]
    return HEADING + "\n\n".join(parts) + "\n"


def write(page: Path = PAGE) -> Path:
    page.write_text(rounds_page(), encoding="utf-8")
    return page


def _diagram(table: Table) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    for state, row in table.items():
        events: dict[str, list[str]] = {}
        for event, cell in row.items():
            if cell.next:
                events.setdefault(cell.next, []).append(event)
        lines += [f"    {state} --> {to}: {', '.join(names)}" for to, names in events.items()]
        if not events:
            lines.append(f"    {state} --> [*]")
    return "\n".join([*lines, "```"])


def _columns(table: Table) -> Iterator[tuple[str, str]]:
    """(heading, state): the ends of a run decide alike, and stand in one column."""
    ends = [state for state in table if state in OVER]
    alike = len(ends) > 1 and all(table[state] == table[ends[0]] for state in ends)
    for state in table:
        if not (alike and state in ends):
            yield state, state
        elif state == ends[0]:
            yield ", ".join(ends), state


def _cells(table: Table) -> str:
    columns = list(_columns(table))
    rows = [[f"**{event}**", *(_text(table[state][event]) for _, state in columns)] for event in table[columns[0][1]]]
    return markdown_table(("event", *(heading for heading, _ in columns)), rows)


def _text(cell: Cell) -> str:
    if cell.verdict is Verdict.REFUSED:
        return f"`{cell.code}`"
    if cell.verdict is Verdict.IGNORED:
        return "ignored"
    return "; ".join([f"→ {cell.next}" if cell.next else "stays", *(effect.value for effect in cell.effects)])

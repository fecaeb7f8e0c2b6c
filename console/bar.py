"""The line at the top of every screen: what needs a person, whose console this is, how old it is, who may sign.

Pure: snapshot, lock, time and width in, one line out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from console.drawing import Glyphs, Line, Part, duration_text, width_of
from console.values import HIDDEN, CoordinatorState, SiloState, Snapshot
from console.words import needs_of


@dataclass(frozen=True)
class Lock:
    """Who may sign at this console just now."""

    person: str = ""
    seconds_left: float = 0.0
    read_only: bool = False

    @property
    def open(self) -> bool:
        return bool(self.person) and not self.read_only and self.seconds_left > 0

    def words(self) -> list[Part]:
        """What the bar says of it, the whole first and what says less after it."""
        if self.read_only:
            return [("READ-ONLY", "dim")]
        if not self.open:
            return [("LOCKED", "strong")]
        unlocked = f"{self.person} UNLOCKED"
        return [(f"{unlocked} {duration_text(self.seconds_left)}", "warn"), (unlocked, "warn")]


def shorter(told: str) -> list[str]:
    """What a source or a recording says of itself, the whole first and what says less after it.

    The words in capitals are in each: what it is, and that it holds local data.
    """
    first, *more = told.partition(": ")[0].split(", ")
    without_date = [piece for piece in more if not piece[:1].isdigit()]
    capitals = [piece for piece in without_date if piece.isupper()]
    words = first.split(" ")
    what = " ".join(takewhile(str.isupper, words)) or first
    begins = [[first, *more], [first, *without_date], [first, *capitals], [" ".join(words[:2]), *capitals],
              [what, *capitals], [what, *(piece.removeprefix("WITH ") for piece in capitals)]]  # fmt: skip
    return list(dict.fromkeys([told, *map(", ".join, begins)]))


def link_words(snapshot: Snapshot, now: float, glyphs: Glyphs) -> list[Part]:
    """How the console stands with what it reads, the whole first and what says less after it."""
    match snapshot.link.state:
        case "loading":
            return [(f"{glyphs.away} loading", "dim")]
        case "disconnected":
            return [(f"{glyphs.bad} DISCONNECTED", "bad")]
    if snapshot.link.told:
        return [(told, "warn") for told in shorter(snapshot.link.told)]
    if snapshot.is_stale(now):
        return [(f"{glyphs.need} STALE {duration_text(snapshot.age_seconds(now))}", "warn")]
    latency = snapshot.link.latency_seconds
    live = f"{glyphs.live} live"
    return [(f"{live} {max(round(1000 * latency), 1)} ms", "ok"), (live, "ok")] if latency else [(live, "ok")]


def top_bar(snapshot: Snapshot, lock: Lock, now: float, cells: int, glyphs: Glyphs) -> Line:
    """Left to right by worth. What does not fit is said in fewer words, or dropped; lock, link and count never are, and
    the party is the last to go: nobody may take one site for another."""
    needs = len(needs_of(snapshot, now))
    match snapshot.state:
        case SiloState() as state:
            context, policy = f"{state.federation}{glyphs.dot}silo:{state.silo}", _policy(state)
        case CoordinatorState() as at_coordinator:
            context = f"{at_coordinator.federation}{glyphs.dot}coordinator:{at_coordinator.coordinator}"
            policy = f"charter {snapshot.policy_digest[:8]}" if snapshot.policy_digest else ""
        case _:
            context, policy = "", ""
    nothing = "nothing needs you" if snapshot.state is not None else "needs: not known yet"
    if isinstance(snapshot.state, SiloState) and "halted" in snapshot.state.hidden:
        nothing = f"needs: some {HIDDEN}"  # a halt would not be told
    counts: list[Part] = [(nothing, "dim")]
    if needs:
        counts = [(f"{glyphs.need} {needs_text(needs)}", "warn"), (f"{glyphs.need} {needs}", "warn")]
    party = context.rpartition(glyphs.dot)[2]
    names = [(text, "strong") for text in (context, party, party.partition(":")[2]) if text]
    always = list(_fewer_words(counts, link_words(snapshot, now, glyphs), lock.words()))
    for count, link, locked in always:
        for name in names:
            if _takes([count, name, link, locked]) <= cells:
                more = [(policy, "dim")] if policy else []
                fits = _takes([count, name, link, *more, locked]) <= cells
                return _spaced([count, name, link, *(more if fits else []), locked])
    return _spaced(next((shown for shown in always if _takes(shown) <= cells), always[-1]))


def needs_text(needs: int) -> str:
    """How many things need whoever looks."""
    return f"{needs} need{'s' if needs == 1 else ''} you"


def _fewer_words(counts: Sequence[Part], links: Sequence[Part], locks: Sequence[Part]) -> Iterator[list[Part]]:
    """The three, each in all its words first; then in fewer, the link before the lock and the count at the end."""
    yield [counts[0], links[0], locks[0]]
    for link in links[1:]:
        yield [counts[0], link, locks[0]]
    for lock in locks[1:]:
        yield [counts[0], links[-1], lock]
    for count in counts[1:]:
        yield [count, links[-1], locks[-1]]


def _takes(parts: Sequence[Part]) -> int:
    """Cells of these parts, a space before the first and two before each other."""
    return width_of(parts) + 2 * len(parts) - 1


def _spaced(parts: Sequence[Part]) -> Line:
    return tuple(piece for index, part in enumerate(parts) for piece in [("  " if index else " ", ""), part])


def _policy(state: SiloState) -> str:
    if not state.policy_digest:
        return "no policy told"
    charter = " with charter" if state.policy_files > 1 else ""
    return f"{state.policy_name or 'policy'} {state.policy_digest[:8]}{charter}"

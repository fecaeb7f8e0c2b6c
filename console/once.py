"""The overview as linear text, for `fedconsole --once`. Pure: snapshot, time and width in, lines out."""

from __future__ import annotations

from console.bar import Lock, top_bar
from console.conditions import condition_lines
from console.drawing import Glyphs, Line, line
from console.values import SiloState, Snapshot
from console.words import left_lines, need_lines, needs_of, paused_lines, round_lines, round_title, silos_lines


def once_lines(snapshot: Snapshot, now: float, cells: int, glyphs: Glyphs) -> list[Line]:
    """The overview as linear text, without boxes."""
    lines = [top_bar(snapshot, Lock(read_only=True), now, cells, glyphs)]
    lines += condition_lines(snapshot, now, cells, opened_at=now, waits_for="the daemon", below_at=now)
    needs = needs_of(snapshot, now)
    lines += [line(("needs you", "strong"))] if needs else []
    lines += [*need_lines(needs, "", cells, glyphs, most=20), *paused_lines(snapshot, cells, glyphs)]
    lines += [line(("silos", "strong")), *silos_lines(snapshot, now, cells, glyphs)]
    lines += [line((round_title(snapshot), "strong")), *round_lines(snapshot, cells, glyphs)]
    if isinstance(snapshot.state, SiloState):
        lines += [line(("left this silo", "strong")), *left_lines(snapshot.state, cells)]
    return lines

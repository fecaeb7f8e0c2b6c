"""What `?` and `i` show, as lines. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from dataclasses import asdict, is_dataclass, replace
from typing import Any

from console.actions import Context, actions_on, command_line
from console.drawing import Line, line, wrap
from console.safe import Shown

KEY_CELLS = 8
FIRST = "Lower-case keys only look. Upper-case keys may change something and ask first; L only locks and unlocks."
JSON_LINES_MAX = 400
JSON_LINE_CHARACTERS_MAX = 2000


def help_lines(tags: Set[str], context: Context, why_off: Callable[[str], str], cells: int) -> list[Line]:
    """Every action of a screen: its key, what it does, its command, and why it is off. Keys that change something come
    first: they are why somebody is there.

    Args:
        tags: of the screen, as `console.actions` has them.
        context: for the commands.
        why_off: an action's name -> why it cannot be done now, or nothing.
        cells: width.
    """
    lines: list[Line] = [
        *wrap(FIRST, cells, "strong"),
        line(""),
    ]
    own = True
    for action in sorted(actions_on(*tags), key=lambda each: (not each.screens, not (each.changes and each.key))):
        if own and not action.screens:
            own = False
            lines.append(line(("everywhere", "dim")))
        rows = wrap(action.says, cells - KEY_CELLS)
        lines.append(line((f"{action.shown_key:{KEY_CELLS}}", "accent"), *rows[0]))
        lines += [line(" " * KEY_CELLS, *row) for row in rows[1:]]
        if action.twin is not None:
            # a digest wider than the dialog would be cut; the dialog that asks shows it whole
            words = action.twin(replace(context, digest="", policy_digest="", shown=""))
            shown = wrap(command_line(words), cells - KEY_CELLS, "dim")
            lines += [line(" " * KEY_CELLS, *row) for row in shown]
        if why := why_off(action.name):
            lines += [line(" " * KEY_CELLS, *row) for row in wrap(f"off now: {why}", cells - KEY_CELLS, "warn")]
    return lines


def json_lines(value: Any, cells: int) -> list[Line]:
    """A value as indented JSON; what is too long is cut with a count, as everything that came from elsewhere is."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps(plain, indent=2, ensure_ascii=False, default=str)
    rows = text.split("\n")
    lines: list[Line] = []
    for row in rows[:JSON_LINES_MAX]:
        shown = row[:JSON_LINE_CHARACTERS_MAX]
        body = shown.lstrip(" ")
        indent = Shown(" " * (len(shown) - len(body)))  # a run of spaces of our own, which `safe` would count
        width = max(cells - len(indent), 8)
        lines += [line(indent, body[start : start + width]) for start in range(0, max(len(body), 1), width)]
        if len(row) > len(shown):
            lines.append(line((f"<+{len(row) - len(shown)} characters>", "warn")))
    if len(rows) > JSON_LINES_MAX:
        lines.append(line((f"and {len(rows) - JSON_LINES_MAX} more lines: the same command with --json", "warn")))
    return lines

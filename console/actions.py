"""Everything a key does in the console, once: help, palette, `:` and the test of the twins read this table.

A key in lower case never changes anything. A key in upper case may, and always asks first. Each action that changes
something or shows something of a daemon has a twin: the command that does or tells the same (console design 10). No
Textual here.

Does not bind the keys: a screen's BINDINGS do, and a test compares them with this table.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from console.navigation import PLACES

EVERYWHERE: frozenset[str] = frozenset()
TABLES = frozenset({"table"})  # screens with a table, whatever they are called


@dataclass(frozen=True)
class Context:
    """What the console stands on: what a twin needs to name the same thing."""

    coordinator: bool = False  # attached to a coordinator, not to a silo
    release: str = ""
    digest: str = ""
    policy_digest: str = ""
    person: str = ""
    halted_kind: str = ""


Twin: TypeAlias = Callable[[Context], tuple[str, ...]]


@dataclass(frozen=True)
class Action:
    """One action.

    Args:
        name: of the action, as in a screen's `action_NAME` or in `offer('NAME')`.
        key: as Textual names it; empty when only the palette has it.
        screens: names of places or of screens below them; empty for every screen.
        says: what it does, for people.
        changes: the daemon or what it holds; then the key is in upper case and a dialog asks.
        twin: the command of the same; an action on the view alone has none.
        action: in `certs.roles.ACTIONS`, of what somebody must be allowed to.
        also: more keys of it, such as those that go the other way; `says` names them.
    """

    name: str
    key: str
    screens: frozenset[str]
    says: str
    changes: bool = False
    twin: Twin | None = None
    action: str = ""
    also: tuple[str, ...] = ()  # keys of the same kind that `says` names

    @property
    def shown_key(self) -> str:
        return _SHOWN_KEYS.get(self.key, self.key)

    def on(self, *screens: str) -> bool:
        return not self.screens or not self.screens.isdisjoint(screens)


_SHOWN_KEYS = {
    "question_mark": "?", "colon": ":", "slash": "/", "escape": "esc", "left_square_bracket": "[",
    "right_square_bracket": "]",
}  # fmt: skip


def status_twin(context: Context) -> tuple[str, ...]:
    return ("coordinator", "status") if context.coordinator else ("silo", "status")


def _release_twin(context: Context) -> tuple[str, ...]:
    return ("silo", "approvals", "show", context.release) if context.release else ("silo", "approvals", "list")


def _answer_twin(verb: str, *more: str) -> Twin:
    def twin(context: Context) -> tuple[str, ...]:
        return (
            "silo", "approvals", verb, context.release or "RELEASE", "--operator", context.person or "PERSON", *more,
            "--expect-digest", context.digest or "DIGEST", "--expect-policy", context.policy_digest or "DIGEST",
        )  # fmt: skip

    return twin


PLACE_TWINS: dict[str, Twin] = {
    "overview": status_twin,
    "approvals": lambda context: ("silo", "approvals", "list"),
    "outbox": lambda context: ("silo", "outbox", "list"),
    "audit": lambda context: ("fedsilo", "audit", "tail", "--log", "STATE_DIR"),
    "budget": lambda context: ("silo", "ledger", "limits"),
}

_APPROVAL = frozenset({"approval"})
_HELD = frozenset({"overview", "approval"})

ACTIONS: tuple[Action, ...] = (
    *(
        Action(f"go_{place.name}", place.key, EVERYWHERE, f"{place.title}: {place.says}", twin=PLACE_TWINS[place.name])
        for place in PLACES
    ),
    Action("open", "enter", frozenset({"overview"}), "open the release under the cursor", twin=_release_twin),
    Action("inbox", "a", frozenset({"overview"}), "the held release, or the one under the cursor", twin=_release_twin),
    Action("move", "j", EVERYWHERE, "down; k up; the arrows too", also=("down", "k", "up")),
    Action("copy", "y", _HELD, "copy the digest"),
    Action("rules", "p", _APPROVAL, "every policy rule with its measured value and limit", twin=_release_twin),
    Action("approve", "A", _APPROVAL, "approve: a dialog asks for the end of the digest; these bytes are then sent",
           changes=True, twin=_answer_twin("approve"), action="release.approve"),
    Action("reject", "R", _APPROVAL, "reject: a dialog asks for a reason code; the release never leaves",
           changes=True, twin=_answer_twin("reject", "--reason", "OTHER"), action="release.reject"),
    Action("history", "h", frozenset({"approvals"}), "with what was answered before, and without",
           twin=lambda context: ("silo", "approvals", "list", "--all")),
    Action("direction", "tab", frozenset({"outbox"}), "what came in, or what was to leave; h and l too",
           twin=lambda context: ("silo", "inbox", "list"), also=("h", "l")),
    Action("control", "c", frozenset({"outbox"}), "with allowed polls and heartbeats, and without",
           twin=lambda context: ("silo", "outbox", "list", "--control")),
    Action("copy_digest", "y", frozenset({"outbox", "message"}), "copy the digest"),
    Action("verify", "v", frozenset({"audit"}), "have the daemon read its whole log again; that changes nothing",
           twin=lambda context: ("fedsilo", "audit", "verify", "STATE_DIR")),
    Action("next_pane", "tab", frozenset({"budget"}), "the next table: limits, bits per round, releases"),
    Action("open_row", "enter", TABLES, "open the row under the cursor"),
    Action("filter", "slash", TABLES, "filter: text, field:value, !not; all must hold"),
    Action("sort", "s", TABLES, "sort by the next column, up and down"),
    Action("turn", "w", TABLES, "other columns, where not all fit"),
    Action("maximise", "z", TABLES, "this pane alone, and back"),
    Action("freeze", "space", TABLES, "keep the rows as they are, and go on"),
    Action("newest", "g", TABLES, "to the newest row; G to the last", also=("home", "G", "end")),
    Action("page", "ctrl+d", TABLES, "a page down; ctrl+u up", also=("pagedown", "ctrl+u", "pageup")),
    Action("next_need", "n", EVERYWHERE, "next thing that needs you", twin=status_twin),
    Action("go_to", "colon", EVERYWHERE, "go to: a place, or a release by its id; up brings back what was typed"),
    Action("palette", "ctrl+p", EVERYWHERE, "find any action by some of its letters"),
    Action("inspect", "i", EVERYWHERE, "the JSON behind what is selected"),
    Action("copy_twin", "Y", EVERYWHERE, "copy the command that tells or does the same"),
    Action("read_now", "r", EVERYWHERE, "reconnect or read again now"),
    Action("lock", "L", EVERYWHERE, "unlock or lock: signing with your own key; locks itself after 15 idle minutes"),
    Action("leave", "escape", EVERYWHERE, "one level up; q too", also=("q",)),
    Action("help", "question_mark", EVERYWHERE, "the keys of this screen"),
    Action("quit", "ctrl+q", EVERYWHERE, "end the console, from anywhere"),
)  # fmt: skip


def actions_on(*screens: str) -> list[Action]:
    """What one can do there: what is the screen's own first."""
    found = [action for action in ACTIONS if action.on(*screens)]
    return sorted(found, key=lambda action: not action.screens)


def command_line(words: tuple[str, ...]) -> str:
    """Words as one types them; quoted where a shell would take them apart."""
    return shlex.join(words)

"""The console's actions and places: each key, what it does, and what `?` and `i` show of it.

Help, palette, `:` and the test of the twins read this table. A key in lower case never changes anything. A key in upper
case may, and always asks first. Each action that changes something or shows something of a daemon has a twin: the
command that does or tells the same. A place that does not exist is not listed. No Textual here.

Does not bind the keys: a screen's BINDINGS do, and a test compares them with this table.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, TypeAlias

from fedsilo.views.lines import Glyphs, Line, Part, Shown, clip, line, width_of, wrap
from fedsilo.views.state import Snapshot

HISTORY_MAX = 50


@dataclass(frozen=True)
class Place:
    """A screen with a key of its own.

    Args:
        key: the digit that opens it.
        name: one word, as typed after `:`.
        title: as shown.
        says: what one sees there, for the help and the palette.
        brief: its title where the whole line of tabs does not fit; as `title` by default.
    """

    key: str
    name: str
    title: str
    says: str
    brief: str = ""


PLACES: tuple[Place, ...] = (
    Place("1", "overview", "Overview", "what the silo or the federation does, and what needs a person", "Over"),
    Place("2", "round", "Round", "one round: each silo's phases, who is awaited, quorum, deadlines, digests", "Rnd"),
    Place("3", "approvals", "Approvals", "what is held and waits for an answer, and what was answered", "Appr"),
    Place(
        "4",
        "curves",
        "Curves",
        "figures by round or step: pass@1 with its interval, reward, KL, norms, the gap",
        "Curv",
    ),
    Place(
        "5",
        "outbox",
        "Outbox",
        "every message that was to leave, and with tab what came in: verdict, rule, bytes",
        "Out",
    ),
    Place("6", "audit", "Audit", "every record of this party's log, and whether its chain holds"),
    Place(
        "7",
        "budget",
        "Budget",
        "limits over messages: used, left, for how many rounds, and what is not counted",
        "Budg",
    ),
    Place("8", "certs", "Certs", "certificates: whose, until when, what happens when one ends, what renews it", "Cert"),
    Place("9", "logs", "Logs", "the newest lines of this daemon's own log, without private text"),
    Place("0", "settings", "Settings", "what the daemon runs with and where it is set, and this console's own", "Set"),
)


# Which titles become brief first where the line is too long; what is left over loses its name from the right.
BRIEF_FIRST = ("settings", "approvals", "overview", "outbox", "budget", "curves", "certs", "round")


def place_of(name: str) -> Place | None:
    return next((place for place in PLACES if place.name == name), None)


def tabs_line(here: str, snapshot: Snapshot, cells: int, glyphs: Glyphs) -> Line:
    """Every place with its key, the present one marked. Where they do not fit, titles become brief one by one, and then
    names go from the right; the present one stays whole."""
    steps = [(brief, len(PLACES)) for brief in range(len(BRIEF_FIRST) + 1)]
    for brief, names in [*steps, *((len(BRIEF_FIRST), left) for left in range(len(PLACES) - 1, -1, -1))]:
        parts: list[Part] = []
        for index, place in enumerate(PLACES):
            count = f"({len(snapshot.held)})" if place.name == "approvals" and snapshot.held else ""
            short = place.brief and place.name in BRIEF_FIRST[:brief] and place.name != here
            word = place.brief if short else place.title
            title = f"{glyphs.dot.strip()}{word}{count}" if index < names or place.name == here else count
            style = "strong" if place.name == here else "warn" if count else "dim"
            parts += [(" ", ""), (f"{place.key}{title}", style)]
        if width_of(parts) <= cells or names == 0:
            return clip(tuple(parts), cells)
    return ()


def crumbs_line(trail: Sequence[str], here: str, cells: int, glyphs: Glyphs) -> Line:
    """The way back, the present screen last."""
    parts: list[Part] = [(" ", "")]
    for crumb in trail:
        parts += [(crumb, "dim"), (glyphs.crumb, "dim")]
    return clip((*parts, (here, "strong"), ("  esc back", "dim")), cells)


@dataclass
class History:
    """History of the lines typed after `:`, newest last; the up and down keys walk through it."""

    lines: list[str] = field(default_factory=list)
    _at: int = 0

    def add(self, text: str) -> None:
        if text and (not self.lines or self.lines[-1] != text):
            self.lines.append(text)
            del self.lines[: max(len(self.lines) - HISTORY_MAX, 0)]
        self._at = len(self.lines)

    def back(self) -> str:
        self._at = max(self._at - 1, 0)
        return self.lines[self._at] if self.lines else ""

    def forth(self) -> str:
        self._at = min(self._at + 1, len(self.lines))
        return self.lines[self._at] if self._at < len(self.lines) else ""


def matches(text: str, names: Sequence[str]) -> list[str]:
    """Names that begin with what was typed, in their order; one that is it exactly stands alone."""
    typed = text.strip().lower()
    exact = [name for name in names if name.lower() == typed]
    return exact or [name for name in names if typed and name.lower().startswith(typed)]


EVERYWHERE: frozenset[str] = frozenset()
TABLES = frozenset({"table"})  # screens with a table, whatever they are called
ORDERING = frozenset({"ordering"})  # screens from which orders are given (`console.orders`)
ORDERING_RUNS = frozenset({"ordering runs"})  # the same, at a coordinator
ORDERING_SILO = frozenset({"ordering a silo"})
REPLAY = frozenset({"replay"})  # every screen while a recording is played back


@dataclass(frozen=True)
class Context:
    """The facts that a twin command needs to name the same thing as the screen does; empty where it shows none."""

    coordinator: bool = False  # attached to a coordinator, not to a silo
    release: str = ""
    digest: str = ""
    policy_digest: str = ""
    shown: str = ""
    person: str = ""
    halted_kind: str = ""
    run: str = ""
    paused: bool = False  # the run, or at a silo the silo
    kind: str = ""  # of message
    findings: tuple[str, ...] = ()  # ids of those that were opened

    def words_of(self, command: str) -> tuple[str, ...]:
        """Return a command's words with what is shown in place of those in capitals; what is not known stays."""
        known = {
            "RELEASE": self.release, "PERSON": self.person, "RUN": self.run, "HALTED": self.halted_kind or "KIND",
            "DIGEST": self.digest, "POLICY": self.policy_digest or "DIGEST", "SHOWN": self.shown or "DIGEST",
            "PROGRAM": "coordinator" if self.coordinator else "silo", "PAUSE": "resume" if self.paused else "pause",
        }  # fmt: skip
        several = {
            "RELEASES": ("show", self.release) if self.release else ("list",),
            "OF_KIND": ("--kind", self.kind) if self.kind else (),
            "OPENED": tuple(word for finding in self.findings for word in ("--ack-finding", finding)),
        }
        return tuple(word for each in command.split() for word in several.get(each, (known.get(each) or each,)))


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
    def title(self) -> str:
        """The name that people see; `name` is the one in the program."""
        return _TITLES.get(self.name) or self.name.removeprefix("go_").replace("_", " ")

    @property
    def shown_key(self) -> str:
        return _SHOWN_KEYS.get(self.key, self.key)

    def on(self, *screens: str) -> bool:
        return not self.screens or not self.screens.isdisjoint(screens)


_SHOWN_KEYS = {
    "question_mark": "?", "colon": ":", "slash": "/", "escape": "esc", "left_square_bracket": "[",
    "right_square_bracket": "]", "full_stop": ".", "less_than_sign": "<", "greater_than_sign": ">",
}  # fmt: skip


# Where the name of an action with spaces in it is not what a person would say.
_TITLES = {
    "as_table": "figures as a table", "control": "control messages", "copy": "copy the digest", "copy_digest":
    "copy the digest", "copy_twin": "copy the command", "cursor": "next values", "direction": "outbox or inbox",
    "difference": "beside the last one", "earlier": "round before", "end": "first or last line", "facts":
    "parameters, digests", "filter": "filter the rows", "finding": "next finding", "freeze": "keep these rows",
    "history": "what was held before", "inbox": "open what is held", "inspect": "JSON of this", "leave": "back",
    "level": "levels of the log", "lock": "unlock or lock", "maximise": "this pane alone", "move": "down or up",
    "newest": "newest row", "open": "open the release", "open_row": "open the row", "page": "page down", "pages":
    "page down", "palette": "find an action", "payload": "what would leave", "quit": "quit the console", "read_now":
    "read again now", "release_halt": "lift a halt", "rules": "policy rules", "seek": "back in the recording", "stop":
    "stop this silo", "toggle_pause": "stop the recording", "turn": "other columns", "verify": "verify the log",
}  # fmt: skip


def title_of(name: str) -> str:
    """Return the title of an action, given its name in the program."""
    return next((action.title for action in ACTIONS if action.name == name), name.replace("_", " "))


def twin_of(at_silo: str, at_coordinator: str = "") -> Twin:
    """Return the twin of a command, and of another one at a coordinator where that is given."""
    return lambda context: context.words_of(at_coordinator if context.coordinator and at_coordinator else at_silo)


# By the name of a screen: of each place, and of screens below them.
SCREEN_TWINS: dict[str, Twin] = {
    "overview": twin_of("PROGRAM status"),
    "round": twin_of("silo round", "fedsilo run show RUN"),
    "approvals": twin_of("silo approvals list"),
    "curves": twin_of("fedsilo curves --config silo.yaml", "fedsilo curves --coordinator coordinator.yaml"),
    "outbox": twin_of("PROGRAM outbox list"),
    "audit": twin_of("fedsilo audit tail --no-control --log STATE_DIR", "coordinator audit list --no-control"),
    "budget": twin_of("silo ledger limits"),
    "certs": twin_of("PROGRAM certs"),
    "logs": twin_of("PROGRAM logs"),
    "settings": twin_of("PROGRAM settings"),
    "approval": twin_of("silo approvals RELEASES"),
    "comparison": twin_of("silo approvals diff RELEASE"),
    "payload": twin_of("silo approvals payload RELEASE --operator PERSON"),
    "history": twin_of("silo approvals history OF_KIND"),
}
_STATUS, _SHOW, _ROUND, _CURVES = (SCREEN_TWINS[name] for name in ("overview", "approval", "round", "curves"))
_AS_SHOWN = "--expect-digest DIGEST --expect-policy POLICY"  # exactly what was shown

_APPROVAL = frozenset({"approval"})
_TEXTS = frozenset({"payload", "comparison"})
_HELD = frozenset({"overview", "approval"})

ACTIONS: tuple[Action, ...] = (
    *(
        Action(f"go_{place.name}", place.key, EVERYWHERE, f"{place.title}: {place.says}", twin=SCREEN_TWINS[place.name])
        for place in PLACES
    ),
    Action("open", "enter", frozenset({"overview"}), "open the release under the cursor", twin=_SHOW),
    Action("inbox", "a", frozenset({"overview"}), "the held release, or the one under the cursor", twin=_SHOW),
    Action("move", "j", EVERYWHERE, "down; k up; the arrows too", also=("down", "k", "up")),
    Action("copy", "y", _HELD, "copy the digest"),
    Action("rules", "p", _APPROVAL, "every policy rule with its measured value and limit", twin=_SHOW),
    Action("approve", "A", _APPROVAL, "approve: a dialog asks for the end of the digest; these bytes are then sent",
           changes=True, action="release.approve",
           twin=twin_of(f"silo approvals approve RELEASE --operator PERSON {_AS_SHOWN} --expect-shown SHOWN OPENED")),
    Action("finding", "enter", _APPROVAL, "the next finding, whole; f too: A is off until each was opened",
           twin=_SHOW, also=("f",)),
    Action("payload", "v", _APPROVAL, "what would leave: a dialog asks, for the log says who read it",
           twin=SCREEN_TWINS["payload"], action="payload.read"),
    Action("difference", "d", _APPROVAL, "all of it beside the last one of its kind", twin=SCREEN_TWINS["comparison"]),
    Action("history", "h", _APPROVAL, "what was held of this kind before, and who answered",
           twin=SCREEN_TWINS["history"]),
    Action("defer", "D", _APPROVAL, "put it off for yourself: a dialog asks for how long; it expires all the same",
           changes=True, twin=twin_of("silo approvals defer RELEASE --operator PERSON --minutes 30"),
           action="release.defer"),
    Action("reject", "R", _APPROVAL, "reject: a dialog asks for a reason code; the release never leaves",
           changes=True, twin=twin_of(f"silo approvals reject RELEASE --operator PERSON --reason OTHER {_AS_SHOWN}"),
           action="release.reject"),
    Action("pause", "P", ORDERING, "pause or resume the run, at a silo this silo: a dialog asks for one more key",
           changes=True, twin=twin_of("silo PAUSE --operator PERSON", "fedsilo run PAUSE RUN --as PERSON"),
           action="run.pause"),
    Action("start", "S", ORDERING_RUNS, "start a run that waits, with the silos that are here",
           changes=True, twin=twin_of("fedsilo run start RUN --as PERSON"), action="run.start"),
    Action("abort", "X", ORDERING_RUNS, "abort the run: a dialog asks for the number of its round",
           changes=True, twin=twin_of("fedsilo run abort RUN --as PERSON"), action="run.abort"),
    Action("release_halt", "H", ORDERING_SILO, "let a halted kind be sent again: a dialog asks for its name",
           changes=True, twin=twin_of("silo approvals release HALTED --operator PERSON"), action="halt.release"),
    Action("stop", "", ORDERING_SILO, "end guard and trainer of this silo: a dialog asks for the name of the silo",
           changes=True, twin=twin_of("silo stop --operator PERSON"), action="silo.stop"),
    Action("history", "h", frozenset({"approvals"}), "what was held before, and who answered",
           twin=SCREEN_TWINS["history"]),
    Action("pages", "ctrl+d", _TEXTS, "a page down; ctrl+u up", also=("pagedown", "ctrl+u", "pageup")),
    Action("end", "g", _TEXTS, "to the first line; G to the last", also=("home", "G", "end")),
    Action("direction", "tab", frozenset({"outbox"}), "what came in, or what was to leave; h and l too",
           twin=twin_of("PROGRAM inbox list"), also=("h", "l")),
    Action("control", "c", frozenset({"outbox"}), "with allowed control messages such as polls, and without",
           twin=twin_of("PROGRAM outbox list --control")),
    Action("control", "c", frozenset({"audit"}), "with allowed control messages such as polls, and without",
           twin=twin_of("PROGRAM audit list")),
    Action("copy_digest", "y", frozenset({"outbox", "message"}), "copy the digest"),
    Action("verify", "v", frozenset({"audit"}), "have the daemon read its whole log again; that changes nothing",
           twin=twin_of("fedsilo audit verify STATE_DIR", "coordinator audit verify")),
    Action("earlier", "left_square_bracket", frozenset({"round"}), "the round before this one; ] the one after",
           twin=_ROUND, also=("right_square_bracket",)),
    Action("compare", "c", frozenset({"round"}), "set the round before beside this one, and not"),
    Action("facts", "p", frozenset({"round"}), "parameters and digests of the round, whole", twin=_ROUND),
    Action("next_figure", "tab", frozenset({"curves"}), "the next figure; shift+tab the one before", twin=_CURVES,
           also=("shift+tab",)),
    Action("cursor", "l", frozenset({"curves"}), "the cursor to the next values; h to those before",
           also=("h", "left", "right")),
    Action("as_table", "T", frozenset({"curves"}), "the same figures as a table, and back; a view, it changes nothing"),
    Action("smooth", "m", frozenset({"curves"}), "smoothed over five points, and as measured"),
    Action("baseline", "b", frozenset({"curves"}), "with what was measured before the first round, and without"),
    Action("axis", "x", frozenset({"curves"}), "by round, or by step"),
    Action("next_pane", "tab", frozenset({"budget"}), "the next table: limits, bits per round, releases"),
    Action("level", "v", frozenset({"logs"}), "fewer levels of the log, and all again; the daemon's own log stays"),
    Action("open_row", "enter", TABLES, "open the row under the cursor"),
    Action("filter", "slash", TABLES, "filter: text, field:value, !not; all must hold"),
    Action("sort", "s", TABLES, "sort by the next column, up and down"),
    Action("turn", "w", TABLES, "other columns, where not all fit; in the logs whole lines"),
    Action("maximise", "z", TABLES, "this pane alone, and back"),
    Action("freeze", "space", TABLES, "keep the rows as they are, and go on"),
    Action("newest", "g", TABLES, "to the newest row; G to the last", also=("home", "G", "end")),
    Action("page", "ctrl+d", TABLES, "a page down; ctrl+u up", also=("pagedown", "ctrl+u", "pageup")),
    Action("toggle_pause", "full_stop", REPLAY, "stop the recording here, and go on"),
    Action("seek", "less_than_sign", REPLAY, "10 seconds of the recording back; > on", also=("greater_than_sign",)),
    Action("next_need", "n", EVERYWHERE, "next thing that needs you", twin=_STATUS),
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
    """Return the actions that a screen offers, its own first."""
    found = [action for action in ACTIONS if action.on(*screens)]
    return sorted(found, key=lambda action: not action.screens)


def command_line(words: tuple[str, ...]) -> str:
    """Words as one types them; quoted where a shell would take them apart."""
    return shlex.join(words)


KEY_CELLS = 8
FIRST = "Lower-case keys only look. Upper-case keys may change something and ask first; L only locks and unlocks."
JSON_LINES_MAX = 400
JSON_LINE_CHARACTERS_MAX = 2000


def help_lines(tags: Set[str], context: Context, why_off: Callable[[str], str], cells: int) -> list[Line]:
    """Every action of a screen: its key, what it does, its command, and why it is off. Keys that change something come
    first: they are why somebody is there.

    why_off: an action's name -> why it cannot be done now, or nothing.
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


# ---- what `:` and the palette offer


@dataclass(frozen=True)
class Entry:
    """Something to choose.

    Args:
        name: as it is typed.
        key: that does the same.
        says: what it does.
        choose: is told what followed the name.
        guarded: it may change something, so enter must have stood alone, as its key must.
    """

    name: str
    key: str
    says: str
    choose: Callable[[str], None]
    guarded: bool = False

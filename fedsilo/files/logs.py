"""A daemon's log: JSON lines, one line a record, and at most so many lines of a kind that somebody outside can cause.

`log_format: json` writes an object a line, for what collects lines and puts them side by side. Each has `time` (UTC),
`level`, `logger`, `message`, and whose it is: `party`, `federation`, `name`. What it is about has fields of its own,
where it is known: `run`, `round`, `step`, `attempt`, `silo`, `kind` and `sequence` of the message in hand, `request` of
the signed command in hand. By run, round and step the lines of all parties of a run are put side by side; with silo,
kind and sequence a coordinator's line names one record of both audit logs.

Lines like these are made to be sent on, so they hold less than the text: of an exception its type and where it was,
never its words, and nothing of what the caller's pattern marks as quoted (threats T8, T40). Text from elsewhere is
escaped twice, by `harmless` and as ASCII: it ends no line, and acts on no terminal when a reader has decoded it (T37).
In text too a record stays one line: a line break in quoted text would begin a line in the form of the daemon's own.

`QuietLog` bounds how large somebody can make the log who knocks at a port or opens a control socket (T24). The kinds
are the caller's; where there are too many of them, the further ones share one.

Does not stop: a printable untruth in a message; whoever collects the lines from reading names of runs and silos; one
line that is long. An escape in the text itself cannot be told from one that was made here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from fedsilo.protocol.text import harmless

LogFormat = Literal["text", "json"]
FIELDS = ("run", "round", "step", "attempt", "silo", "kind", "sequence", "request")
TEXT_CHARACTERS_MAX = 8192  # of one value
LEFT_OUT = "(left out)"

_Self = TypeVar("_Self")
_Item = TypeVar("_Item")
_R = TypeVar("_R")
_P = ParamSpec("_P")

_about: ContextVar[Mapping[str, Any]] = ContextVar("fedsilo_log_about", default=MappingProxyType({}))


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Give this thread's lines these `FIELDS` until the block ends; empty ones, and 0, are left out."""
    before = _about.get()
    _about.set({**before, **{name: value for name, value in fields.items() if value not in ("", 0, None)}})
    try:
        yield
    finally:
        _about.set(before)


def about_its_message(
    method: Callable[Concatenate[_Self, _Item, _P], _R],
) -> Callable[Concatenate[_Self, _Item, _P], _R]:
    """Lines said in the method are about its first argument: those of `FIELDS` that it has."""

    @functools.wraps(method)
    def wrapped(self: _Self, item: _Item, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with about(**{name: getattr(item, name) for name in FIELDS if hasattr(item, name)}):
            return method(self, item, *args, **kwargs)

    return wrapped


class JsonLines(logging.Formatter):
    """Makes records JSON objects.

    Args:
        always: fields of every line, such as whose it is.
        current: further `FIELDS` as they are now; what `about` or the record itself says goes before it.
        quoted: its first group stays, and what the pattern takes up behind it is left out.
    """

    def __init__(
        self,
        always: Mapping[str, str],
        *,
        current: Callable[[], Mapping[str, Any]] = dict,
        quoted: re.Pattern[str] | None = None,
    ) -> None:
        super().__init__()
        self._always = dict(always)
        self._current = current
        self._quoted = quoted

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if self._quoted is not None:
            message = self._quoted.sub(rf"\1 {LEFT_OUT}", message)
        own = {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        known = {**self._now(), **_about.get(), **own}
        line = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._always,
            **{name: known[name] for name in FIELDS if known.get(name) not in ("", 0, None)},
            "message": message,
        }
        if record.exc_info and record.exc_info[0] is not None:
            kind, _, trace = record.exc_info
            line["exception"] = kind.__name__
            line["at"] = [f"{each.filename}:{each.lineno} {each.name}" for each in traceback.extract_tb(trace)]
        return json.dumps({name: _harmless_value(value) for name, value in line.items()})

    def _now(self) -> Mapping[str, Any]:
        try:
            return self._current()
        except Exception:  # noqa: BLE001  # a line without them is better than none
            return {}


def shape(
    logger: logging.Logger, form: LogFormat, always: Mapping[str, str], *, quoted: re.Pattern[str] | None = None
) -> None:
    """Let every handler of `logger` write one line a record: as JSON, or as the text that it has."""
    keep_to_one_line(logger)
    if form == "json":
        for handler in logger.handlers:
            handler.setFormatter(JsonLines(always, quoted=quoted))


def _harmless_value(value: Any) -> Any:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, list):
        return [_harmless_value(each) for each in value]
    return harmless(value, TEXT_CHARACTERS_MAX)


# ---- at most so many lines of a kind ---------------------------------------------------------------------------------


QUIET_SECONDS = 10.0
KINDS_MAX = 32
_OTHERS = "of other kinds or from elsewhere"


@dataclass
class _Kind:
    """`since`: seconds, when its first line was said. `about`: what a count of it is a count of."""

    about: str
    since: float
    said: int = 0
    held: int = 0


class QuietLog:
    """Says at most `lines_max` lines of a kind in `QUIET_SECONDS`, then how many more there were.

    Args:
        log: where the lines go.
        lines_max: of one kind, in that time.
        monotonic: seconds.
    """

    def __init__(
        self, log: logging.Logger, *, lines_max: int = 1, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._lines_max = lines_max
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}

    def say(
        self, kind: str, about: str, line: str, *, level: int = logging.WARNING, error: BaseException | None = None
    ) -> bool:
        """Log `line`, or count it; tells whether it was logged.

        Args:
            kind: what counts as the same.
            about: begins the line that tells the count.
            line: the whole line.
            level: of logging.
            error: its traceback follows the line.
        """
        now = self._monotonic()
        self._tell(now - QUIET_SECONDS)
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                kind, about = _OTHERS, f"{about}, and lines {_OTHERS}"
            entry = self._kinds.setdefault(kind, _Kind(about, now))
            if entry.said >= self._lines_max:
                entry.held += 1
                return False
            entry.said += 1
        self._log.log(level, "%s", line, exc_info=error)
        return True

    def flush(self, *, everything: bool = False) -> None:
        """Tell the counts of the kinds whose time is over, or of all of them, and begin those anew."""
        self._tell(math.inf if everything else self._monotonic() - QUIET_SECONDS)

    def _tell(self, until: float) -> None:
        with self._lock:
            ended = [self._kinds.pop(kind) for kind in [k for k, entry in self._kinds.items() if entry.since <= until]]
        for entry in ended:
            if entry.held:
                self._log.warning("%s: %d more", entry.about, entry.held)

    @property
    def holding(self) -> bool:
        """Return whether a count is still to be logged."""
        with self._lock:
            return any(entry.held for entry in self._kinds.values())


# ---- one line a record -----------------------------------------------------------------------------------------------


class _OneLineOf(logging.Formatter):
    """Puts the output of another formatter on one line."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return harmless(self._inner.format(record))


def keep_to_one_line(logger: logging.Logger) -> None:
    """Let every handler of `logger` write a record as one line, in the form that it has."""
    for handler in logger.handlers:
        handler.setFormatter(_OneLineOf(handler.formatter or logging.Formatter()))

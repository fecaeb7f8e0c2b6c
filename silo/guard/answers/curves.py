"""This silo's own figures by step or by round: what its trainer reported, kept beside the ledger so that curves outlive
a restart.

pass@1 comes with the number of held-out prompts behind it, and a 95 % Wilson interval over prompts: several answers to
one prompt are no further draws. Where that number is not known, the interval is null, and nobody should draw it.

`figures.jsonl`, mode 0600, has one JSON object a line. A line that a kill tore is dropped at the next start; what
cannot be read is passed over. The file holds at most `LINES_MAX` lines and is then rewritten with the newest half, in
one step, so it has some 6 MB, and 16 MB whatever the trainer reports. It is for people only: no rule reads it, and a
disk that takes nothing more costs the curve, never the run.

Does not show that a figure is true: it is what the trainer said of itself. Figures of other silos are not here: the
coordinator has those that they released.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsilo.control.answers import BaselineRow, CurvePoint, Curves, CurveSeries
from fedsilo.control.figures import unit_of
from fedsilo.control.server import QueryArguments
from fedsilo.files.durable import write_all, write_durably
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import FedSiloError, NotFoundError
from fedsilo.protocol.intervals import interval_of
from fedsilo.protocol.plan import Plan, plan_from_canonical
from silo.guard.ledger import Ledger

PASS_RATES = ("pass_at_1", "pass_at_1_greedy")
PROMPTS = "prompts"  # of an evaluation: the held-out prompts that were answered, kept beside its pass@1
POINTS_MAX = 1_000  # of one series, the newest
SUMS = frozenset({"tokens", "donors_used", "donors_wanted", "donors_found"})  # over the steps of a round
NOT_RECORDED = (
    "figures of other silos: the coordinator has what they released (`fedsilo curves` there)",
    "cosine between updates: nobody computes it",
)


class CurveView:
    """The query `curves` of a guard."""

    def __init__(self, silo: Callable[[], str], ledger: Ledger, history: FigureHistory) -> None:
        self._silo = silo
        self._ledger = ledger
        self._history = history

    def curves(self, arguments: Mapping[str, Any]) -> Curves:
        """Return series of figures; `names` are commas apart. By round: the mean of its steps, for counts their sum.

        Raises:
            UsageError: an argument.
            NotFoundError: no such run.
        """
        query = QueryArguments(arguments, "run", "names", "x")
        x = query.text("x", among=("round", "step")) or "step"
        names = frozenset(name.strip() for name in query.text("names").split(",") if name.strip())
        wanted, known = query.text("run"), self._history.runs()
        run = wanted or self._ledger.last_run()[0] or (known[0] if known else "")
        if wanted and wanted not in known and not self._ledger.run_state(wanted):
            raise NotFoundError(f"this silo took part in no run {wanted!r}", hint="silo ledger show")
        text = self._ledger.plan_of(run)
        plan = plan_from_canonical(text) if text else None
        series = _series(self._history.of(run), plan, x)
        return Curves(
            party="silo",
            run=run,
            run_state=self._ledger.run_state(run),
            runs=tuple(known[:100]),
            x=x,
            x_max=plan.rounds * (plan.local_steps if x == "step" else 1) if plan else 0,
            names=tuple(sorted(series)),
            series=tuple(
                CurveSeries(
                    name=name, silo=self._silo(), unit=unit_of(name), source="local", points=points[-POINTS_MAX:]
                )
                for name, points in series.items()
                if not names or name in names
            ),
            baseline=tuple(
                BaselineRow(name=name, silo=self._silo(), value=points[0].value)
                for name, points in series.items()
                if name in PASS_RATES and points[0].round == 0 and (not names or name in names)
            ),
            not_recorded=NOT_RECORDED,
        )


def _series(entries: Sequence[Mapping[str, Any]], plan: Plan | None, x: str) -> dict[str, tuple[CurvePoint, ...]]:
    """Return series by name. A figure that a task reports again for the same place replaces what it reported before."""
    steps = plan.local_steps if plan else 0
    found: dict[str, dict[tuple[int, int], CurvePoint]] = {}
    for entry in entries:
        for name, value in entry["figures"].items():
            if name != PROMPTS:
                count = entry["figures"].get(PROMPTS) if name in PASS_RATES else None
                place = entry["round"], entry["step"]
                found.setdefault(name, {})[place] = _point(entry, float(value), count)
    if x == "round":
        return {name: _by_round(name, tuple(points.values())) for name, points in sorted(found.items())}
    return {name: _by_step(tuple(points.values()), steps) for name, points in sorted(found.items())}


def _by_step(points: Sequence[CurvePoint], steps: int) -> tuple[CurvePoint, ...]:
    """Return points in their order; what belongs to a whole round is at its last step."""
    placed = (
        replace(point, x=max(point.round - 1, 0) * steps + point.step if point.step else point.round * steps)
        for point in points
    )
    return tuple(sorted(placed, key=lambda point: point.x or 0))


def _by_round(name: str, points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    rounds: dict[int, list[CurvePoint]] = {}
    for point in points:
        rounds.setdefault(point.round, []).append(point)
    folded = []
    for number, of_round in sorted(rounds.items()):
        total = sum(point.value or 0.0 for point in of_round)
        value = total if name in SUMS else total / len(of_round)
        folded.append(replace(of_round[-1], x=number, step=0, value=value))
    return tuple(folded)


def _point(entry: Mapping[str, Any], value: float, count: Any) -> CurvePoint:
    known = isinstance(count, int | float) and count >= 1
    low, high = interval_of(value, int(count) if known else None)
    return CurvePoint(
        x=entry["round"],
        round=entry["round"],
        step=entry["step"],
        value=value,
        at=utc(entry["at"]),
        n=int(count) if known else None,
        n_exact=True if known else None,
        low=low,
        high=high,
        silos=None,
    )


def prompts_answered(plan: Plan, trainer: Mapping[str, Any], overlong: Mapping[str, Any]) -> int | None:
    """Held-out prompts that an evaluation answers: the plan's first ones, less those that are too long; None where the
    trainer has not said how many there are."""
    rows, left_out = trainer.get("held_out_rows"), overlong.get("held_out", 0)
    if isinstance(rows, bool) or not isinstance(rows, int) or not isinstance(left_out, int | float):
        return None
    count = min(plan.evaluation.prompts, rows) - int(left_out)
    return count if count > 0 else None


# ---- kept figures ------------------------------------------------------------------------------------------------

_log = logging.getLogger("fedsilo.silo")

FILE = "figures.jsonl"
LINES_MAX = 8_192
LINE_BYTES_MAX = 2_048
NAMES_MAX = 48
MODE = 0o600


class FigureHistory:
    """Thread-safe. `path` is made with the first figure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tell = True  # the first failure of a disk is told, the others are not
        self._lines = 0  # of the file, whatever they hold
        self._entries = self._read()

    def add(self, *, run: str, task: str, number: int, step: int, at: float, figures: Mapping[str, Any]) -> None:
        """Keep what a finished task reported; only finite numbers count.

        Args:
            run: whose plan the task belonged to.
            task: its name.
            number: of the round.
            step: in the round; 0 for what belongs to all of it.
            at: seconds since 1970.
            figures: by name.
        """
        finite = _finite(list(figures.items())[:NAMES_MAX])
        entry = {"run": run, "task": task, "round": number, "step": step, "at": round(at, 3), "figures": finite}
        line = _line(entry)
        if not finite or len(line) > LINE_BYTES_MAX:
            return
        with self._lock:
            self._entries.append(entry)
            try:
                if self._lines >= LINES_MAX:
                    del self._entries[: -(LINES_MAX // 2)]
                    # counted when it is written: while that fails, nothing is appended to a file that is full
                    write_durably(self._path, b"".join(map(_line, self._entries)), MODE)
                    self._lines = len(self._entries)
                else:
                    self._append(line)
                    self._lines += 1
            except (OSError, FedSiloError) as error:
                if self._tell:
                    _log.warning("%s: the curves of this silo are not kept: %s", self._path, error)
                self._tell = False

    def of(self, run: str) -> list[dict[str, Any]]:
        """The entries of one run, oldest first."""
        with self._lock:
            return [entry for entry in self._entries if entry["run"] == run]

    def runs(self) -> list[str]:
        """Runs with figures, newest first."""
        with self._lock:
            return list(dict.fromkeys(entry["run"] for entry in reversed(self._entries)))

    def _read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                lines = stream.read((LINES_MAX + 1) * LINE_BYTES_MAX).split(b"\n")
                self._lines = LINES_MAX if stream.read(1) else len(lines) - 1
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("%s: %s; its curves begin anew", self._path, error.strerror)
            return []
        entries = [entry for line in lines[:-1] if (entry := _entry(line)) is not None][-LINES_MAX:]
        if lines[-1]:
            self._mend(entries)
        return entries

    def _mend(self, entries: list[dict[str, Any]]) -> None:
        """A torn last line would hide the next one."""
        try:
            write_durably(self._path, b"".join(map(_line, entries)), MODE)
            self._lines = len(entries)
        except (OSError, FedSiloError) as error:
            _log.warning("%s: its torn last line stays: %s", self._path, error)

    def _append(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, MODE)
        try:
            before = os.fstat(descriptor).st_size
            try:
                # not flushed: a power cut may cost the last figures, and the run waits for no disk
                write_all(descriptor, line)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def _entry(line: bytes) -> dict[str, Any] | None:
    """One line as it was written, or nothing: whoever can write here is this site's own user, but a disk can err."""
    try:
        entry = json.loads(line)
        return {
            "run": str(entry["run"]),
            "task": str(entry["task"]),
            "round": int(entry["round"]),
            "step": int(entry["step"]),
            "at": float(entry["at"]),
            "figures": _finite(entry["figures"].items()),
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _finite(figures: Iterable[tuple[str, Any]]) -> dict[str, float]:
    return {
        name: value
        for name, value in figures
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }

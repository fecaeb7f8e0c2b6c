"""Runs the cells of an experiment in as many processes as there are cores, and appends each result to a file at once:
what was finished stays, and a run goes on where the last one ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from fedsilo.experiment.design import Base, Cell, Experiment, cells_of, digest_of, read_experiment
from fedsilo.experiment.program import program
from fedsilo.experiment.results import (
    Line,
    of_experiment,
    read_results,
    trials_of,
    unequal,
    value_of,
    whole_lines,
    why_no_value,
)
from fedsilo.experiment.tuning import Place, first_trials, frozen_line, frozen_of, places_of, search, with_knobs
from fedsilo.files.durable import lock_exclusively
from fedsilo.protocol.errors import ConflictError, OperationError

Say = Callable[[str], None]


SECONDS_PER_STEP = 0.7  # of a method of which nothing is known: on one core, with the demo's model, K 8 and b 8
SECONDS_PER_BASE_STEP = 0.12  # of building the demo's model, on one core


def run_experiment(path: Path, results: Path, *, jobs: int, claim: str, named: Sequence[Cell], say: Say) -> Ran:
    """Tune, freeze what is chosen, and carry out the cells that have no result yet.

    Args:
        path: the experiment's file.
        results: file of JSON lines.
        jobs: processes at once.
        claim: whose cells alone are carried out; empty: all.
        named: cells in place of these, with or without a result.
        say: called with a line for each result.

    Raises:
        OperationError: as `run_cells`; or tuning goes no further.
        ConflictError: as `run_cells`.
    """
    experiment, ran = read_experiment(path), Ran()
    before: tuple[set[str], set[Place]] | None = None
    while not ran.failed:
        lines = read_results(results)
        trials, frozen = trials_of(experiment, lines), frozen_of(experiment, lines)
        if len(frozen) == len(places_of(experiment)):
            break
        if (now := (set(trials), set(frozen))) == before:
            raise OperationError(
                f"tuning goes no further: {results} has no more trials and choices than before",
                hint="the file of results, the data or the model changed while it ran; run again",
            )
        before = now
        next_ones = search(experiment, trials)
        if next_ones.missing:
            say(f"tuning: {len(next_ones.missing)} trials")
            ran += run_cells(path, next_ones.missing, results, jobs=jobs, say=say)
        for each in next_ones.chosen:
            if (each.family, each.setting) not in frozen:
                _append(results, frozen_line(experiment, replace(each, program=program())))
                edge = ", at the edge of what was tried" if each.at_edge else ""
                say(f"frozen for {each.family} under {each.setting}: {each.knobs[-1][0]} {each.knobs[-1][1]:g}{edge}")
    if ran.failed:
        return ran
    cells = left_of(experiment, read_results(results), claim, named)
    return ran + run_cells(path, cells, results, jobs=jobs, say=say) if cells else ran


@dataclass(frozen=True)
class Ran:
    """How many cells were carried out, and how many failed."""

    done: int = 0
    failed: int = 0

    def __add__(self, other: Ran) -> Ran:
        return Ran(self.done + other.done, self.failed + other.failed)


def left_of(experiment: Experiment, lines: Sequence[Line], claim: str = "", named: Sequence[Cell] = ()) -> list[Cell]:
    """Return, with their knobs, the cells that are named, or else those that have no result yet, in order: of one
    claim, or of all. Knobs that are not frozen yet are left out."""
    done = of_experiment(experiment, lines)
    knobs = {place: each.knobs for place, each in frozen_of(experiment, lines).items()}
    cells = named or [cell for cell in cells_of(experiment, claim) if cell not in done]
    return [with_knobs(experiment, knobs, cell) or cell for cell in cells]


def trials_left(experiment: Experiment, lines: Sequence[Line]) -> list[Cell]:
    """Return about which trials are still to be run: as many as there are before a grid is widened, less those that
    were."""
    if len(frozen_of(experiment, lines)) == len(places_of(experiment)):
        return []
    missing = search(experiment, values := trials_of(experiment, lines)).missing
    expected = first_trials(experiment)
    done = sum(digest_of(experiment, cell) in values for cell in expected)
    return expected[done:] if len(expected) - done > len(missing) else list(missing)


def hours_of(experiment: Experiment, cells: Sequence[Cell], known: Mapping[Cell, Line], jobs: int) -> float:
    """Return how long these cells take, with the base models that no known cell was made with.

    A cell takes as long as others of its row and setting took; where none has run, as its method's steps took; where
    that has not run either, as the file says.
    """
    took: dict[tuple[str, str], list[float]] = {}
    a_step: dict[str, list[float]] = {}
    for cell, line in known.items():
        took.setdefault((cell.setting, cell.row), []).append(float(line["seconds"]))
        if line["steps"]:
            a_step.setdefault(experiment.rows[cell.row].method, []).append(float(line["seconds"]) / line["steps"])

    def seconds_of(cell: Cell) -> float:
        if same := took.get((cell.setting, cell.row)):
            return fmean(same)
        setting, method = experiment.settings[cell.setting], experiment.rows[cell.row].method
        steps = setting.rounds * setting.local_steps
        if method in a_step:
            return steps * fmean(a_step[method])
        stated = experiment.seconds_per_step.get(method, SECONDS_PER_STEP)
        return steps * stated + setting.rounds * experiment.seconds_per_round

    def base_of(cell: Cell) -> tuple[str, Base, int] | None:
        setting = experiment.settings[cell.setting]
        return None if setting.model or setting.data else (setting.questions, setting.base, cell.seed)

    bases = {base for cell in cells if (base := base_of(cell))} - {base_of(cell) for cell in known}
    building = sum(base.steps for _, base, _ in bases) * SECONDS_PER_BASE_STEP
    return (sum(map(seconds_of, cells)) + building) / jobs / 3600


def run_cells(path: Path, cells: Sequence[Cell], results: Path, *, jobs: int, say: Say) -> Ran:
    """Carry out these cells and append their lines to `results`.

    Args:
        path: the experiment's file, which each process reads.
        cells: to carry out.
        results: file of JSON lines.
        jobs: processes at once.
        say: called with a line for each result.

    Returns:
        How many were carried out and how many failed; `say` is called with the fault of each, and the others go on.

    Raises:
        OperationError: the results cannot be written.
        ConflictError: what must be equal over the rows of a seed is not; the line is not written.
    """
    experiment = read_experiment(path)
    known = of_experiment(experiment, read_results(results))
    with Workers(path, cells, min(jobs, len(cells))) as workers:
        say(f"{len(cells)} cells in {workers.count} processes; each seed's base model is built, where it is not there")
        failed, left = 0, list(cells)
        for done, (cell, answer) in enumerate(workers.answers(), 1):
            left.remove(cell)
            if isinstance(answer, str):
                failed += 1
                say(f"{cell} failed: {answer}")
                continue
            known[cell if cell.trial else replace(cell, knobs=())] = answer
            if faults := unequal({each: line for each, line in known.items() if _beside(each, cell)}):
                raise ConflictError(
                    f"{faults[0]}, which must be equal over rows",
                    hint="the program has changed since the other was made: move the results away, and run all again",
                )
            _append(results, answer)
            minutes = 60 * hours_of(experiment, left, known, workers.count)
            after = value_of(answer, "pass_at_1")
            reached = why_no_value(answer) if after is None else f"{100 * after:.1f} %"
            took = f"{cell} {reached} in {answer['seconds']:.0f} s"
            say(f"{done} of {len(cells)}: {took}; about {minutes:.0f} min are left")
    return Ran(len(cells) - failed, failed)


def _beside(cell: Cell, other: Cell) -> bool:
    return (cell.setting, cell.seed, cell.trial) == (other.setting, other.seed, other.trial)


def _append(results: Path, line: Mapping[str, Any]) -> None:
    """Append a line; what a kill left of one before it goes first."""
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("ab+") as file:
            file.seek(0)
            file.truncate(sum(len(whole) + 1 for whole in whole_lines(file.read())))
            file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise OperationError(f"{results}: {error.strerror}", hint="name another file with --results") from error


@contextlib.contextmanager
def locked(results: Path) -> Iterator[None]:
    """Hold the results for this process: of two that append to one file, each would cut off what the other is writing.

    Raises:
        ConflictError: another run holds them.
        OperationError: the lock file beside them cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            results.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_exclusively(results.with_name(f"{results.name}.lock")))
        except OSError as error:
            raise OperationError(f"{results}: {error.strerror}", hint="name another file with --results") from error
        except ConflictError as error:
            raise ConflictError(error.message, hint="wait for that run, or name another file with --results") from error
        yield


_DIED = "its process died"
_ENDS_SECONDS = 10.0  # for a process that was asked to end
_IN_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder of each process's own is made in it
_Answer = tuple[Cell, "dict[str, Any] | str"]


class Workers:
    """Processes that carry out cells, each one after the other: a start of Python with its libraries is paid once.

    None of them outlives this block: each ends, and removes its files, when its standard input does, so also where this
    process is killed.
    """

    def __init__(self, path: Path, cells: Sequence[Cell], count: int) -> None:
        self.count = count
        self._path = path
        self._cells = len(cells)
        self._waiting: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()
        for cell in (*cells, *[None] * count):
            self._waiting.put(cell)
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        for _ in range(self.count):
            threading.Thread(target=self._hand_out, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:  # what has not begun does not begin any more
                self._waiting.get_nowait()
        for no_cell in [None] * self.count:
            self._waiting.put(no_cell)
        for worker in self._workers:
            worker.end()

    def answers(self) -> Iterator[_Answer]:
        """Yield each cell with its line of results, or with what is wrong, as they come."""
        for _ in range(self._cells):
            yield self._answers.get()

    def _hand_out(self) -> None:
        """Give one process the next cell until there is none; a process that failed is replaced."""
        worker: _Worker | None = None
        with tempfile.TemporaryFile("w+") as complaints:
            while (cell := self._waiting.get()) is not None:
                if worker is None:
                    worker = _Worker(self._path, complaints)
                    self._workers.append(worker)
                answer = worker.answer(cell)
                if "error" in answer:
                    worker.end()
                    worker = None
                if answer.get("error") == _DIED:
                    complaints.seek(0)
                    answer["error"] += f": {(complaints.read().strip().splitlines() or ['it says nothing'])[-1][:300]}"
                self._answers.put((cell, str(answer["error"]) if "error" in answer else answer))


class _Worker:
    """A process that carries out cells, and a folder for its files, in memory where there is such a place.

    Args:
        path: the experiment's file.
        complaints: file for what it writes to standard error.
    """

    def __init__(self, path: Path, complaints: IO[str]) -> None:
        below = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix=f"fedsilo-{os.getpid()}-", dir=below))
        program = [sys.executable, "-P", "-m", "fedsilo.cli"]
        self._process = subprocess.Popen(
            [*program, "fedsilo", "experiment", "work", "--json", str(path), str(self._folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )

    def answer(self, cell: Cell) -> dict[str, Any]:
        """Return the process's answer for a cell: its line of results, or an error."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # noqa: S101  # both are pipes
        try:
            process.stdin.write(f"{json.dumps(asdict(cell))}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            return {"error": _DIED}
        return answer if isinstance(answer, dict) else {"error": _DIED}

    def end(self) -> None:
        """End the process, and remove the files of one that was killed before it could."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

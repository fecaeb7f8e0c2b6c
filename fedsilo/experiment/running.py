"""Runs the cells of an experiment in as many processes as there are cores, and appends each result to a file at once:
what was finished stays, and a run goes on where the last one ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.experiment.design import Cell, Experiment, cells_of
from fedsilo.experiment.results import Line, of_experiment, read_results, whole_lines
from fedsilo.protocol.errors import OperationError

Say = Callable[[str], None]


def left_of(experiment: Experiment, results: Path) -> list[Cell]:
    """Return the cells that have no result yet, in order."""
    done = of_experiment(experiment, read_results(results))
    return [cell for cell in cells_of(experiment) if cell not in done]


def hours_of(cells: Sequence[Cell], known: Mapping[Cell, Line], jobs: int, seconds: float) -> float:
    """Return how long these cells take: as long as others of their row took, or `seconds` where none has run."""
    by_row: dict[str, list[float]] = {}
    for cell, line in known.items():
        by_row.setdefault(cell.row, []).append(float(line["seconds"]))
    took = {row: sum(values) / len(values) for row, values in by_row.items()}
    return sum(took.get(cell.row, seconds) for cell in cells) / jobs / 3600


def run_cells(path: Path, cells: Sequence[Cell], results: Path, *, jobs: int, say: Say) -> int:
    """Carry out these cells and append their lines to `results`.

    Args:
        path: the experiment's file, which each process reads.
        cells: to carry out.
        results: file of JSON lines.
        jobs: processes at once.
        say: told a line for each result.

    Returns:
        How many cells failed; what failed is said, and the others go on.

    Raises:
        OperationError: the results cannot be written.
    """
    waiting: queue.SimpleQueue[Cell | None] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    answers: queue.SimpleQueue[tuple[Cell, dict[str, Any] | str]] = queue.SimpleQueue()
    threads, jobs = [], min(jobs, len(cells))
    say(f"{len(cells)} cells in {jobs} processes; each begins with building its base model, where none is there yet")
    for _ in range(jobs):
        waiting.put(None)
        threads.append(threading.Thread(target=_worker, args=(path, waiting, answers), daemon=True))
    for thread in threads:
        thread.start()
    failed, began = 0, time.monotonic()
    for done in range(1, len(cells) + 1):
        cell, answer = answers.get()
        if isinstance(answer, str):
            failed += 1
            say(f"{cell} failed: {answer}")
            continue
        _append(results, answer)
        left = (time.monotonic() - began) / done * (len(cells) - done)
        after = answer["rounds"][-1]["pass_at_1"]
        reached = "not measured" if after is None else f"{100 * after:.1f} %"
        took = f"{cell} {reached} in {answer['seconds']:.0f} s"
        say(f"{done} of {len(cells)}: {took}; about {left / 60:.0f} min are left")
    for thread in threads:
        thread.join()
    return failed


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


def _worker(
    path: Path,
    waiting: queue.SimpleQueue[Cell | None],
    answers: queue.SimpleQueue[tuple[Cell, dict[str, Any] | str]],
) -> None:
    """Hand one process one cell after the other: a start of Python with its libraries is paid once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", "fedsilo.cli", "fedsilo", "experiment", "work"]
    process: subprocess.Popen[str] | None = None
    with tempfile.TemporaryFile("w+") as complaints:
        while (cell := waiting.get()) is not None:
            if process is None:
                process = subprocess.Popen(
                    [*command, str(path)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                    text=True,
                )
            answer = _asked(process, cell)
            if "error" in answer:
                process.kill()
                process.wait()
                process = None
            if answer.get("error") == _DIED:
                complaints.seek(0)
                answer["error"] += f": {(complaints.read().strip().splitlines() or ['it says nothing'])[-1][:300]}"
            answers.put((cell, str(answer["error"]) if "error" in answer else answer))
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()


_DIED = "its process died"


def _asked(process: subprocess.Popen[str], cell: Cell) -> dict[str, Any]:
    """Return a process's answer for a cell: its line of results, or an error."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101  # both are pipes
    try:
        process.stdin.write(f"{cell}\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        return {"error": _DIED}
    return answer if isinstance(answer, dict) else {"error": _DIED}

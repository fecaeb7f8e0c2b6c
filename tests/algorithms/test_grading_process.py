"""The grading child: killed, hanging and eating memory; the rest of the batch is graded all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fedsilo.grading import VerdictCode
from fedsilo.grading.worker import GradingProcess, _plain_child
from fedsilo.protocol.errors import OperationError, UsageError

# A stand-in for fedsilo.grading.exact, put before the real one on the child's path
HOSTILE = """
import os, struct, sys, time
import fedsilo.grading.exact as exact
from fedsilo.grading.verdict import judged

def grade(response, reference):
    print("noise on standard output")
    if response == "hang":
        while True:
            pass
    if response == "die":
        os._exit(3)
    if response == "memory":
        return judged(len(bytearray(64 << 30)) < 0)
    if response == "extra":
        for descriptor in range(3, 32):  # one of them is the pipe of the replies
            try:
                os.write(descriptor, struct.pack("<Bd", 0, 1.0) * 3)
            except OSError:
                pass
    return judged(response == reference)

exact.grade = grade
"""


@pytest.fixture
def hostile_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "sitecustomize.py").write_text(HOSTILE, encoding="utf-8")
    repository = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), repository]))
    yield


def test_T22_hanging_dying_and_greedy_items_score_nothing_and_the_rest_is_graded(hostile_path: None) -> None:
    with GradingProcess("exact", deadline_seconds=0.5) as process:
        pairs = [("1", "1"), ("hang", "hang"), ("2", "2"), ("die", "die"), ("memory", "memory"), ("3", "4"), ("5", "5")]
        codes = [verdict.code for verdict in process.grade_many(pairs)]
        assert codes == [
            VerdictCode.CORRECT,
            VerdictCode.TIMEOUT,
            VerdictCode.CORRECT,
            VerdictCode.CRASHED,
            VerdictCode.ERROR,
            VerdictCode.WRONG,
            VerdictCode.CORRECT,
        ]
        counts = process.counts
        assert (counts.graded, counts.timeouts, counts.crashes, counts.errors) == (7, 1, 1, 1)


def test_T22_one_verdict_too_many_is_a_crash_and_the_batch_keeps_its_length(hostile_path: None) -> None:
    with GradingProcess("exact") as process:
        codes = [verdict.code for verdict in process.grade_many([("1", "1"), ("extra", "x")])]
        assert codes == [VerdictCode.CORRECT, VerdictCode.CRASHED] and process.counts.crashes == 1
        assert [verdict.correct for verdict in process.grade_many([("1", "2"), ("1", "1")])] == [False, True]


@pytest.mark.slow
def test_T23_a_batch_takes_no_longer_than_its_budget(hostile_path: None) -> None:
    pairs = [("1", "1"), *[("hang", "hang")] * 50, ("2", "2")]
    starts: list[float] = []

    def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        starts.append(time.monotonic())
        return _plain_child(arguments, environment)

    with GradingProcess("exact", deadline_seconds=0.5, launch=launch) as process:
        codes = [verdict.code for verdict in process.grade_many(pairs, budget_seconds=2.04)]
        assert codes == [VerdictCode.CORRECT] + [VerdictCode.TIMEOUT] * 51 and process.counts.timeouts == 51
        # each start is of an item that was begun: 2.04 s hold five of half a second, and what is late begins none
        assert 2 <= len(starts) <= 6 and starts[-1] - starts[0] < 12
        assert process.grade("2", "2").correct  # and the next batch has a budget of its own


def test_a_child_killed_between_batches_costs_one_item() -> None:
    with GradingProcess("exact") as process:
        assert process.grade("a", "a").correct
        assert process.process_id is not None
        os.kill(process.process_id, signal.SIGKILL)
        codes = [verdict.code for verdict in process.grade_many([("a", "a"), ("b", "b")])]
        assert codes == [VerdictCode.CRASHED, VerdictCode.CORRECT]


def test_the_child_stays_alive_and_is_gone_after_close() -> None:
    process = GradingProcess("exact")
    process.grade("a", "a")
    first = process.process_id
    process.grade("b", "b")
    assert first is not None and process.process_id == first
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    process.close()


def test_a_child_that_grades_is_ended_by_close_and_the_batch_with_it(hostile_path: None) -> None:
    process, found = GradingProcess("exact", deadline_seconds=60.0), list[VerdictCode]()
    process.wait_ready()
    begun = time.monotonic()
    batch = [("1", "1"), *[("hang", "hang")] * 3]
    grading = threading.Thread(target=lambda: found.extend(each.code for each in process.grade_many(batch)))
    grading.start()
    while grading.is_alive():  # the first may come before the batch does
        process.close()
        grading.join(0.1)
    assert time.monotonic() - begun < 40  # an item alone may take 60 s
    assert len(found) == 4 and VerdictCode.CORRECT not in found[1:]
    assert process.grade("1", "1").correct  # used again, it starts another child
    process.close()


def test_a_batch_gives_what_each_pair_gives_alone() -> None:
    pairs = [(str(number), str(number % 7)) for number in range(64)]
    with GradingProcess("exact") as process:
        verdicts = process.grade_many(pairs)
        assert [process.grade(*pair) for pair in pairs] == verdicts
    assert [verdict.correct for verdict in verdicts] == [number < 7 for number in range(64)]


def test_large_and_odd_texts_cross_the_pipe() -> None:
    text = "\u65e5\u672c\x00\u2028 \ud83d\ude00" * 50_000
    with GradingProcess("exact") as process:
        assert [verdict.correct for verdict in process.grade_many([(text, text), (text, "x"), ("\ud800", "x")])] == [
            True,
            False,
            False,
        ]


def test_a_verifier_that_runs_programs_is_refused() -> None:
    with pytest.raises(UsageError, match="sandbox"):
        GradingProcess("code")
    with pytest.raises(UsageError, match="unknown verifier"):
        GradingProcess("guess")


def test_T22_a_package_in_the_working_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "fedsilo" / "grading"
    trap.mkdir(parents=True)
    for folder in (trap.parent, trap):
        (folder / "__init__.py").write_text("", encoding="utf-8")
    (trap / "worker.py").write_text(
        f"import pathlib, sys, time\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nsys.exit(1)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with GradingProcess("exact") as process:
        assert process.grade("a", "a").correct
    assert not (tmp_path / "ran").exists()
    # without -P the same folder does run in its place
    subprocess.run([sys.executable, "-m", "fedsilo.grading.worker", "exact"], check=False, stdin=subprocess.DEVNULL)
    assert (tmp_path / "ran").exists()


def test_a_child_that_cannot_start_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(9)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with GradingProcess("exact") as process, pytest.raises(OperationError, match="did not start") as raised:
        process.grade("a", "a")
    assert sys.executable in raised.value.hint

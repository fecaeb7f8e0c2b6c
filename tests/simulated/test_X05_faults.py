"""X5: kill -9 at each step of decide -> keep -> count -> record -> send -> acknowledge; what a restart finds (P2, L3).

Each case is a real process that offers an update, sends it and dies by SIGKILL at the n-th call that touches the disk
or the wire, for every n, before the call or after it. The parent then starts on the same folder, as a daemon would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.reader import read_records
from silo.guard.ledger import Head, Ledger
from silo.guard.ledger_check import named_in_folder
from silo.guard.messages import Allowed, Denied
from tests.policies import setting
from tests.world import Bench, MemoryChannel, small_factors

DISK_CALLS = ("write", "fsync", "fdatasync", "rename", "replace", "unlink", "open")
KILLS = 9  # a sample; `make test-all` kills at each call


class Wire(MemoryChannel):
    """Writes down what crosses it before anything else happens, as a receiver would have it."""

    def __init__(self, path: Path, answered: int = 0) -> None:
        super().__init__(sequence=answered)
        self.path, self.write, self.open = path, os.write, os.open

    def exchange(self, envelope: Any, payload: Any, **more: Any) -> Any:
        line = {"kind": envelope.kind, "sequence": envelope.sequence, "digest": envelope.payload_digest.hex()}
        descriptor = self.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
        return super().exchange(envelope, payload, **more)


def crossed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def policy(archive: bool) -> Any:
    text = setting.policy_text()
    assert text.count("payload_archive: true") == 1
    return setting.policy_of(text.replace("payload_archive: true", f"payload_archive: {str(archive).lower()}"))


def die_at(number: int, how: str) -> list[str]:
    """From here on the process dies at the `number`-th call, before it or after it. Returns the calls so far."""
    calls: list[str] = []

    def fatal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(real.__name__)
            at = len(calls) == number
            if at and how == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **keywords)
            if at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in DISK_CALLS:
        setattr(os, name, fatal(getattr(os, name)))
    writing = Ledger._writing

    @contextlib.contextmanager
    def transaction(ledger: Ledger) -> Iterator[Any]:
        with writing(ledger) as database:
            yield database
            fatal(lambda: None)()  # before COMMIT
        fatal(lambda: None)()  # after it

    Ledger._writing = transaction  # type: ignore[method-assign]
    exchange = Wire.exchange

    def over_the_wire(wire: Wire, *arguments: Any, **keywords: Any) -> Any:
        return fatal(exchange)(wire, *arguments, **keywords)

    Wire.exchange = over_the_wire  # type: ignore[method-assign]
    return calls


def in_a_child(work: Callable[[], object]) -> int:
    """Exit status of a forked process; -9 where it was killed. A fault of the work itself is printed and is 1."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # a forked child must not return into pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def send_one(folder: Path, archive: bool, number: int, how: str) -> int:
    """Offer an update and send it, and die at that call. Returns how many calls it took, unharmed."""
    bench = Bench(folder, policy(archive), Wire(folder / "wire"))
    calls = die_at(number, how)
    offered = bench.factors(small_factors(0.001))
    assert isinstance(offered, Allowed)
    bench.gate.transmit(offered)
    return len(calls)


def calls_of(folder: Path, archive: bool) -> int:
    """How many calls an update takes that nobody kills."""
    assert in_a_child(lambda: (folder / "calls").write_text(str(send_one(folder, archive, 0, "")))) == 0
    return int((folder / "calls").read_text())


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("how", ["before", "after"])
def test_X05_a_kill_at_any_step_lets_nothing_out_uncounted_or_unrecorded(
    tmp_path: Path, how: str, archive: bool, sampled: Callable[[Sequence[int], int], list[int]]
) -> None:
    states: set[tuple[bool, bool, int]] = set()
    points = range(1, calls_of(tmp_path / "whole", archive) + 1)
    chosen = sampled(points, KILLS)
    for number in chosen:
        folder = tmp_path / str(number)
        killed = partial(send_one, folder, archive, number, how)
        assert in_a_child(killed) == -signal.SIGKILL, number
        before = list(read_records(folder / "audit"))
        left = crossed(folder / "wire")
        allowed = {
            record["payload"]["sha256"]
            for record in before
            if record["event"] == "egress.decision" and record["decision"] == "allow"
        }
        assert {line["digest"] for line in left} <= allowed, number  # P2: on disk before the first byte left

        with contextlib.closing(Ledger(folder / "ledger.sqlite3", read_only=True)) as found:
            named, heads = named_in_folder(folder / "audit"), found.heads
            # T42: as the log says, or one group ahead of it
            assert named is None or (heads is not None and heads.agree_with(Head.named(named))), number
            assert found.is_unchanged(), number

        again = Bench(folder, policy(archive), Wire(folder / "wire", answered=len(left)))
        waiting = again.ledger.outbox("allowed")
        for item in waiting:
            again.gate.retry(item)
        left = crossed(folder / "wire")
        second = again.factors(small_factors(0.002))
        if left:  # counted before it left, and the count stands: one update a round (L3)
            assert isinstance(second, Denied), number
        else:  # what never left and never will takes up no limit
            assert isinstance(second, Allowed), number
        assert len({line["digest"] for line in left}) <= 1, number  # the same bytes, however often
        sequences = [line["sequence"] for line in left]
        assert sequences == sorted(set(sequences)), number
        files = {path.name for path in (folder / "payloads").iterdir()}
        expected = {line["digest"] for line in left} if archive else set()
        assert files == expected | ({second.digest} if isinstance(second, Allowed) else set()), number
        again.close()
        assert [result["problems"] for result in verify_logs([folder / "audit"])] == [[]], number
        states.add((bool(allowed), bool(waiting), len(left)))
    # Every stage is met: nothing recorded, recorded and lost, waiting with and without having left, sent once.
    stages = {(False, False, 0), (True, False, 0), (True, True, 1), (True, True, 2), (True, False, 1)}
    assert states <= stages if len(chosen) < len(points) else stages <= states

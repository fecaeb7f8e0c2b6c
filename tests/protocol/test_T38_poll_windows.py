"""Two logs with windows of polls: honest ones never differ, and a count that is not so is told (T38, P2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.consistency import check_consistency
from fedsilo.audit.log import AuditLog, sent_by_kind
from fedsilo.audit.polls import POLLS_MAX, WINDOW_SECONDS, PollWindows
from fedsilo.audit.record import Record, RecordError
from fedsilo.audit.statistics import LogStatistics
from fedsilo.protocol.errors import VerificationError

SILO, COORDINATOR = "spiffe://net/silo/a", "spiffe://net/coordinator"
POLICY = {"effective": "0" * 64}
NOW = 1_800_000_000.0


class End:
    """One party: its log, and its windows as the daemons use them."""

    def __init__(self, folder: Path, origin: str, peer: str, clock: Callable[[], float]) -> None:
        self.folder, self.origin, self.peer, self.clock = folder, origin, peer, clock
        self.key = Ed25519PrivateKey.generate()
        self.is_sender = origin == SILO
        self.open()

    def open(self) -> None:
        self.log = AuditLog(
            self.folder, origin=self.origin, key=self.key, actor=self.origin, clock=self.clock, reserve_bytes=0
        )
        self.windows = PollWindows(self.log.append, "egress" if self.is_sender else "ingress")

    def take(self, sequence: int, kind: str = "control.poll", run: str = "") -> Any:
        def decide(detail: Any) -> int:
            return self.log.append(
                f"{self.windows.direction}.decision", kind=kind, decision="allow", peer=self.peer, run=run,
                direction=self.windows.direction, sequence=sequence, payload={"bytes": 2}, policy=POLICY, detail=detail,
            )  # fmt: skip

        now = self.clock()
        return self.windows.take(
            self.peer, kind, run=run, policy=POLICY["effective"], now=now, sequence=sequence, decide=decide
        )

    def stop(self) -> None:
        self.windows.close()
        self.log.append("stop")
        self.log.close()

    def kill(self) -> None:
        """Nothing of the windows in memory is left; the log says at its next opening what is known."""
        self.log.close()


class Pair:
    def __init__(self, folder: Path) -> None:
        self.now, self.sequence = NOW, 0
        folder.mkdir(exist_ok=True)
        self.silo = End(folder / "silo", SILO, COORDINATOR, lambda: self.now)
        self.coordinator = End(folder / "coordinator", COORDINATOR, SILO, lambda: self.now)

    def poll(self, became: str = "answered", kind: str = "control.poll", run: str = "") -> None:
        """answered; refused (on neither record, as a halted coordinator does); lost on its way, or its answer."""
        self.now, self.sequence = self.now + 3, self.sequence + 1
        sent = self.silo.take(self.sequence, kind, run)
        if became in ("answered", "answer lost"):
            self.coordinator.take(self.sequence, kind, run).passed(2)
        if became in ("answered", "refused"):
            sent.passed(2)
        sent.refused += became == "refused"

    def do(self, what: str) -> None:
        if what == "an hour":
            self.now += WINDOW_SECONDS
        elif what == "another run":
            self.poll(run="run-1")
        elif what == "heartbeat":
            self.poll(kind="control.heartbeat")
        elif what.startswith(("stop", "kill")):
            end = self.silo if what.endswith("silo") else self.coordinator
            end.stop() if what.startswith("stop") else end.kill()
            end.open()
        else:
            self.poll(what)

    def problems(self) -> list[str]:
        logs = [self.silo.folder, self.coordinator.folder]
        for end in (self.silo, self.coordinator):
            if end.log.size:
                end.log.checkpoint()
        results = verify_logs(logs)
        check_consistency(results, logs)
        return [problem for result in results for problem in result["problems"]]

    def stop(self) -> None:
        self.silo.stop()
        self.coordinator.stop()
        self.now += 3600  # both logs end long after what is compared


THINGS = (
    "answered", "answered", "refused", "lost", "answer lost", "an hour", "another run", "heartbeat", "stop silo",
    "stop coordinator", "kill silo", "kill coordinator",
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(THINGS), max_size=25))
def test_two_honest_logs_never_differ_whatever_is_lost_and_whoever_is_killed(
    tmp_path_factory: pytest.TempPathFactory, things: list[str]
) -> None:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    for thing in things:
        pair.do(thing)
        assert pair.problems() == []  # while both go on
    pair.stop()
    for end in (pair.silo, pair.coordinator):
        end.open()
        end.log.append("start")
        end.log.close()
    assert pair.problems() == []


def _told(pair: Pair) -> list[str]:
    pair.stop()
    for end in (pair.silo, pair.coordinator):  # both logs go on, so that nothing is under way
        end.open()
        end.log.append("start")
        end.log.close()
    return pair.problems()


@pytest.mark.parametrize("polls", [40, 41])
def test_polls_that_one_log_leaves_out_are_told_and_equal_counts_are_not(tmp_path: Path, polls: int) -> None:
    """Forty are sent; the coordinator's log counts as many, or one more."""
    pair = Pair(tmp_path / "pair")
    for _ in range(40):
        pair.poll()
    if polls == 41:
        pair.coordinator.take(pair.sequence + 1).passed(2)
    assert bool(_told(pair)) is (polls == 41)


@pytest.mark.parametrize("counted", [40, 39])
def test_a_sender_that_counts_fewer_than_arrived_is_told(tmp_path: Path, counted: int) -> None:
    pair = Pair(tmp_path / "pair")
    for number in range(40):
        pair.poll()
        if number == 20 and counted == 39:  # one left without being counted
            window = pair.silo.take(pair.sequence)
            window.certain, window.permitted = window.certain - 1, window.permitted - 2
            window.payload_bytes -= 2
    assert bool(_told(pair)) is (counted == 39)


def test_after_a_crash_of_the_sender_between_none_and_all_it_permitted_is_accepted_and_more_is_not(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path / "pair")
    for _ in range(7):
        pair.poll()
    pair.do("kill silo")
    pair.poll()
    (end,) = [record for record in pair.silo.log.records() if record["event"] == "egress.indeterminate"]
    assert (end["detail"]["polls"], end["detail"]["polls_most"]) == (0, POLLS_MAX)
    assert _told(pair) == []


def _append(log: AuditLog, event: str, **fields: Any) -> int:
    return log.append(event, kind="control.poll", peer=COORDINATOR, payload={"bytes": 2}, **fields)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"detail": {"polls": 5, "first": 1}}, False),
        ({"detail": {"polls": POLLS_MAX + 1, "first": 1}}, True),  # more than were permitted
        ({"detail": {"polls": 5, "first": 1}, "again": True}, True),  # one permission, two ends
        ({"detail": {"polls": 5, "first": 1}, "link": {"decision": 0}}, True),  # no window begins there
    ],
)
def test_a_log_whose_windows_cannot_be_true_is_told(tmp_path: Path, fields: dict[str, Any], wrong: bool) -> None:
    pair = Pair(tmp_path / "pair")
    log = pair.silo.log
    log.append("start")
    pair.silo.take(1)
    again, link = fields.pop("again", False), fields.pop("link", {"decision": 1})
    for _ in range(1 + again):
        _append(log, "egress.sent", sequence=5, link=link, **fields)
    results = verify_logs([pair.silo.folder])
    check_consistency(results, [pair.silo.folder])
    assert bool(results[0]["problems"]) is wrong


def test_a_day_of_polls_is_a_few_records_of_which_every_reader_counts_each(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "pair")
    polls = 24 * 3600 // 3
    for _ in range(polls):
        pair.poll()
    pair.silo.windows.close()
    pair.coordinator.windows.close()
    for end in (pair.silo, pair.coordinator):
        assert end.log.size <= 2 * 25
        totals = LogStatistics()
        for record in end.log.records():
            totals.add(Record(record))
        counted = totals.left["control.poll"] if end.is_sender else totals.arrived_from[SILO, "control.poll"]
        assert counted == polls
    assert sent_by_kind(map(Record, pair.silo.log.records())) == {"control.poll": (polls, 2 * polls)}


def test_a_window_ends_with_as_many_as_it_permits(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "pair")
    windows = [pair.silo.take(sequence) for sequence in range(1, POLLS_MAX + 2)]
    assert windows[0] is windows[POLLS_MAX - 1] and windows[POLLS_MAX] is not windows[0]
    assert windows[0].permitted == POLLS_MAX


def test_the_end_of_a_window_names_the_decision_that_it_began_with(tmp_path: Path) -> None:
    with closing(Pair(tmp_path / "pair").coordinator.log) as log:
        with pytest.raises(RecordError):
            log.append("ingress.polls", kind="control.poll", detail={"polls": 1})
        assert log.append("ingress.polls", kind="control.poll", link={"decision": 0}, detail={"polls": 1}) == 0


def test_nothing_of_a_permission_that_is_not_on_record_is_used(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "pair")
    pair.silo.log.close()

    def refuses(_detail: Any) -> int:
        raise VerificationError("the disk does not take it")

    for _ in range(2):  # nor is it remembered as one
        with pytest.raises(VerificationError):
            pair.silo.windows.take(COORDINATOR, "control.poll", run="", policy="", now=NOW, sequence=1, decide=refuses)

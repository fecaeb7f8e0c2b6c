"""T11: how much and how often is counted before anything leaves, on a disk, so that no restart begins at nothing.

What the budgets do not stop: the moment at which an allowed message is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import DeniedError
from silo.guard.messages import Allowed, Denied
from tests.policies import setting
from tests.world import Bench, Killed

THREE = setting.edited("control_messages_per_minute: 600", "control_messages_per_minute: 3")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "a", THREE)
    yield made
    made.close()


def say(bench: Bench) -> bool:
    """Whether a heartbeat left."""
    before = len(bench.channel.sent)
    try:
        bench.gate.send(bench.judge.view.place("control.heartbeat"), pb.Heartbeat())
    except DeniedError:
        assert len(bench.channel.sent) == before
        return False
    return len(bench.channel.sent) == before + 1


def test_T11_a_burst_is_denied_with_its_rule_and_nothing_of_it_leaves(bench: Bench) -> None:
    assert [say(bench) for _ in range(6)] == [True] * 3 + [False] * 3
    denied = [record for record in bench.events("egress.decision") if record["decision"] == "deny"]
    rules = [[rule["rule"] for rule in record["rules"] if rule["outcome"] == "deny"] for record in denied]
    assert rules == [["messages per minute"]] * 3


def test_T11_the_bucket_fills_again_with_the_clock_and_not_with_a_restart(bench: Bench) -> None:
    assert [say(bench) for _ in range(3)] == [True] * 3
    bench = bench.restart()
    assert not say(bench)
    bench.clock_now += 59.0
    bench = bench.restart()
    assert not say(bench)
    bench.clock_now += 2.0
    bench = bench.restart()
    assert say(bench)
    bench.close()


def test_T11_T41_a_clock_set_back_empties_no_bucket(bench: Bench) -> None:
    assert [say(bench) for _ in range(3)] == [True] * 3
    bench.clock_now -= 86_400.0
    bench = bench.restart()
    assert not say(bench)
    bench.close()


def test_T11_what_was_counted_and_not_sent_before_a_kill_stays_counted(bench: Bench) -> None:
    bench.channel.fails, bench.channel.before_sending = Killed(), True
    for _ in range(3):
        with pytest.raises(Killed):
            bench.gate.send(bench.judge.view.place("control.heartbeat"), pb.Heartbeat())
    assert bench.channel.sent == []
    bench = bench.restart()
    assert not say(bench)
    bench.close()


@pytest.mark.parametrize("key", ["round_bytes", "day_bytes"])
def test_T11_bytes_of_a_round_and_a_day_survive_a_restart(tmp_path: Path, key: str) -> None:
    text = setting.policy_text()
    (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
    bench = Bench(tmp_path / "a", setting.policy_of(text))
    first = bench.factors()
    assert isinstance(first, Allowed)
    payload_bytes = len(first.payload)
    bench.close()
    # room for one such message and a half
    policy = setting.policy_of(text.replace(line, f"  {key}: {payload_bytes * 3 // 2}"))
    second = Bench(tmp_path / "b", policy)
    assert isinstance(second.factors(), Allowed)
    second = second.restart()
    assert isinstance(second.responses(), Allowed)  # small enough
    again = second.factors()
    assert isinstance(again, Denied)
    expected = {"round_bytes": "ROUND_BYTES", "day_bytes": "DAY_BYTES"}[key]
    assert expected in again.decision.reasons
    second.close()


def test_T11_one_factor_set_a_round_also_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))
    assert isinstance(bench.factors(), Allowed)
    bench = bench.restart()
    again = bench.factors()
    assert isinstance(again, Denied) and "PER_ROUND" in again.decision.reasons
    bench.close()

"""A silo measures each global adapter against the last one that it took into a round of the run (threat T20): what it
remembers over rounds and restarts, and what comes of a step that is too far."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.treaty.wire import codec
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from silo.guard.adapters import AdapterStore
from silo.guard.context import RunView
from tests.policies import setting
from tests.simulated.guard_loop import Loop

# 20 values in all. Each moved by 2**-8 is a step of 2**-8 x sqrt(20) = 0.01747; the policy allows 0.019 a round.
UNIT = np.float32(2.0**-8)
STEP_L2 = 2.0**-8 * 20**0.5
POLICY = setting.policy_of(setting.policy_text())


def adapter(units: float) -> bytes:
    """Every value is so many times 2**-8."""
    tensors = {name: np.full(shape, units, np.float32) * UNIT for name, shape in setting.SCHEMA.tensors}
    return codec.encode_factors(
        tensors, base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
    )


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "silo", POLICY)
    made.offer_plan()
    yield made
    made.close()


def begin(loop: Loop, number: int, units: float) -> None:
    """A round opens with this adapter, and the coordinator gives it when it is asked."""
    payload = adapter(units)
    loop.coordinator.says("control.fetch", "global.adapter", payload, run="run-1", round=number)
    loop.open_round(number, payload)
    if loop.trainer.tasks()[-1:] == ["Evaluate"]:  # of the base: at the start, and after a round that ended here
        loop.base_evaluated()


def end(loop: Loop, number: int) -> None:
    """The round comes to nothing, and the trainer gets done with what it was at."""
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=number)
    loop.turn()
    loop.trainer_says("done", task="LoadAdapter", round=number, metrics={})


def judged(loop: Loop) -> list[tuple[str, list[str], Any, int]]:
    """(decision, reasons, step, rounds) of each global adapter that came in, as the log has it."""
    return [
        (record["decision"], record["reasons"], facts["step_l2"], facts["step_rounds"])
        for record in loop.bench.events("ingress.decision")
        if record["kind"] == "global.adapter"
        for facts in (record["facts"]["final"],)
    ]


def abstained(loop: Loop) -> list[int]:
    return [envelope.round for envelope, _ in loop.coordinator.bodies("control.abstain")]


def test_T20_a_step_is_measured_from_the_adapter_of_the_round_before(loop: Loop) -> None:
    begin(loop, 1, 40)
    end(loop, 1)
    begin(loop, 2, 41)
    assert [row[:2] for row in judged(loop)] == [("allow", []), ("allow", [])]
    first, second = (row[2] for row in judged(loop))
    assert first is None and second == pytest.approx(STEP_L2, rel=1e-12)  # 20 exact squares, one rounded root
    assert loop.bench.gate.view.last_adapter == codec.sha256_hex(adapter(41))
    assert abstained(loop) == []


def test_T20_a_step_too_far_ends_the_round_here_and_the_last_adapter_stays(loop: Loop) -> None:
    begin(loop, 1, 40)
    end(loop, 1)
    before = loop.bench.gate.view
    begin(loop, 2, -40)  # as long as the first: only the step tells
    assert judged(loop)[-1][:2] == ("deny", ["ADAPTER_STEP"])
    assert loop.bench.gate.view.last_adapter == before.last_adapter
    assert abstained(loop) == [2] and loop.trainer.tasks() == ["Evaluate", "LoadAdapter"]
    assert AdapterStore(loop.folder / "adapters").find(codec.sha256_hex(adapter(-40))) is None


@pytest.mark.parametrize(("steps", "decision"), [(2, "allow"), (3, "deny")])
def test_T20_a_silo_that_sat_out_a_round_may_be_a_step_further_behind(loop: Loop, steps: int, decision: str) -> None:
    """Round 3 comes two rounds after the adapter of round 1."""
    begin(loop, 1, 40)
    end(loop, 1)
    begin(loop, 2, -40)
    begin(loop, 3, 40 + steps)
    reasons = ["ADAPTER_STEP"] if decision == "deny" else []
    assert judged(loop)[-1] == (decision, reasons, pytest.approx(steps * STEP_L2, rel=1e-12), 2)


def test_T20_after_a_restart_the_step_is_measured_from_the_same_adapter(loop: Loop) -> None:
    begin(loop, 1, 40)
    loop.restart()
    assert loop.bench.gate.view.last_adapter == codec.sha256_hex(adapter(40))
    begin(loop, 2, -40)
    assert judged(loop)[-1][:2] == ("deny", ["ADAPTER_STEP"])
    begin(loop, 3, 41)
    assert judged(loop)[-1][:2] == ("allow", [])


@pytest.mark.parametrize("damage", ["gone", "changed", "empty", "cut"])
def test_T20_a_last_adapter_that_cannot_be_read_refuses_the_next(loop: Loop, damage: str) -> None:
    begin(loop, 1, 40)
    end(loop, 1)
    path = loop.folder / "adapters" / codec.sha256_hex(adapter(40))
    if damage == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes({"changed": bytes(data), "empty": b"", "cut": bytes(data[:-4])}[damage])
    begin(loop, 2, 41)
    assert judged(loop)[-1][:3] == ("deny", ["ADAPTER_STEP"], None)


def test_T20_the_step_is_no_part_of_what_the_coordinator_hears(loop: Loop) -> None:
    """B6: an abstention says that this silo stands aside, and not how far it measured."""
    begin(loop, 1, 40)
    end(loop, 1)
    begin(loop, 2, -40)
    (told,) = (pb.Abstain.FromString(payload) for _, payload in loop.coordinator.bodies("control.abstain"))
    assert told == pb.Abstain(round=2)


def test_T20_what_came_before_a_restart_is_in_the_stored_view() -> None:
    view = RunView(setting.PLAN).opened(4, pb.RoundOpen(base_digest="ab" * 32)).with_base_l2(1.0)
    again = RunView.from_json(setting.PLAN, json.loads(json.dumps(view.to_json())))
    assert (again.last_adapter, again.last_adapter_round) == ("ab" * 32, 3)


@pytest.mark.parametrize(
    ("opened", "ended", "rounds"),
    [(2, False, 1), (2, True, 2), (5, False, 4), (5, True, 5), (1, True, 1), (1, False, 1)],
)
def test_T20_rounds_are_counted_from_the_last_adapter(opened: int, ended: bool, rounds: int) -> None:
    """It was what round 1 began with. While round n is open the next is what n began with, or what it came to."""
    view = RunView(setting.PLAN).opened(1, pb.RoundOpen(base_digest="ab" * 32)).with_base_l2(1.0)
    later = replace(view, round=opened)
    assert (later.evaluating("cd" * 32) if ended else later).rounds_since_last_adapter == rounds


def test_T20_an_adapter_of_another_run_is_asked_for_again(tmp_path: Path) -> None:
    """Kept from another run it was never measured against this one's last adapter."""
    store = AdapterStore(tmp_path / "adapters")
    digest = codec.sha256_hex(adapter(1))
    store.keep(digest, adapter(1), 1.0, run="run-1")
    again = AdapterStore(tmp_path / "adapters")
    assert again.find(digest, run="run-1") == adapter(1) == again.find(digest)
    assert again.find(digest, run="run-2") is None
    again.keep(digest, adapter(1), 1.0, run="run-2")
    assert again.find(digest, run="run-2") == adapter(1)


def test_T20_a_stored_adapter_is_mapped_and_holds_what_was_kept(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "adapters")
    digest = codec.sha256_hex(adapter(3))
    store.keep(digest, adapter(3), 1.0)
    tensors = store.tensors(digest)
    assert tensors is not None and {name: array.shape for name, array in tensors.items()} == dict(
        setting.SCHEMA.tensors
    )
    assert all(np.array_equal(array, np.full(array.shape, 3 * UNIT)) for array in tensors.values())
    for values in tensors.values():
        base: Any = values
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base.obj, mmap.mmap), "the values are the file's, and not in memory a second time"
    assert store.tensors("../known") is None and store.tensors("ff" * 32) is None


def test_T20_an_adapter_of_an_earlier_run_is_measured_in_mid_run_like_any_other(loop: Loop) -> None:
    """It is in the store and whole, and it was let in; but not after this run's last adapter."""
    loop.guard.keeper._adapters.keep(codec.sha256_hex(adapter(-40)), adapter(-40), 1.0, "", "run-0")
    begin(loop, 1, 40)
    end(loop, 1)
    begin(loop, 2, -40)
    assert judged(loop)[-1][:2] == ("deny", ["ADAPTER_STEP"]) and abstained(loop) == [2]


def test_T20_an_adapter_of_an_earlier_run_may_be_what_a_run_begins_with(loop: Loop) -> None:
    loop.guard.keeper._adapters.keep(codec.sha256_hex(adapter(40)), adapter(40), 1.0, "", "run-0")
    loop.open_round(1, adapter(40))
    loop.base_evaluated()
    assert judged(loop) == [] and loop.trainer.tasks() == ["Evaluate", "LoadAdapter"]
    end(loop, 1)
    begin(loop, 2, 41)
    assert judged(loop)[-1][:2] == ("allow", [])

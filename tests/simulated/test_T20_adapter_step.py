"""A silo measures each global adapter against the last one that it took into a round of the run (threat T20): what it
remembers over rounds and restarts, and what comes of a step that is too far."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.tasks import Evaluate
from silo.guard import adapters
from silo.guard.adapters import AdapterStore
from silo.guard.decisions import RunView
from tests.policies import setting
from tests.world import Loop

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
    open_round(loop, number, payload)


def open_round(loop: Loop, number: int, payload: bytes) -> None:
    loop.open_round(number, payload)
    run = loop.guard.runs.run
    if run is not None and isinstance(run.task, Evaluate):  # of the base: at first, and after a round that ended here
        loop.base_evaluated()


def end(loop: Loop, number: int) -> None:
    """The round comes to nothing, and the trainer gets done with what it was at."""
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=number)
    loop.turn()
    loop.trainer_says("done", task="LoadAdapter", round=number, metrics={})


def commit(loop: Loop, number: int, units: float) -> None:
    """The round comes to this adapter, which the coordinator gives and the trainer evaluates."""
    payload = adapter(units)
    digest = codec.sha256_hex(payload)
    loop.coordinator.says("control.fetch", "global.adapter", payload, run="run-1", round=number)
    ended = loop.ended(committed=True, adapter_digest=digest)
    loop.coordinator.says("control.poll", "round.result", ended, run="run-1", round=number)
    loop.turn()
    loop.trainer_says("done", task="LoadAdapter", round=number, metrics={})
    assert loop.trainer.tasks()[-1] == "Evaluate"
    body = pb.MetricsEval(split="held_out", adapter_digest=digest)
    body.metrics.add(name="pass_at_1", value=0.25)
    loop.trainer_says("done", codec.encode(body), task="Evaluate", round=number, metrics={})
    assert not loop.coordinator.script.get("control.fetch")


def fetched(loop: Loop) -> list[str]:
    return [pb.Fetch.FromString(payload).digest for _, payload in loop.coordinator.bodies("control.fetch")]


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
    assert loop.bench.judge.view.last_adapter == codec.sha256_hex(adapter(41))
    assert abstained(loop) == []


def test_T20_a_step_too_far_ends_the_round_here_and_the_last_adapter_stays(loop: Loop) -> None:
    begin(loop, 1, 40)
    end(loop, 1)
    before = loop.bench.judge.view
    begin(loop, 2, -40)  # as long as the first: only the step tells
    assert judged(loop)[-1][:2] == ("deny", ["ADAPTER_STEP"])
    assert loop.bench.judge.view.last_adapter == before.last_adapter
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
    assert loop.bench.judge.view.last_adapter == codec.sha256_hex(adapter(40))
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


FIRST = RunView(setting.PLAN, last_adapter="ab" * 32)


@pytest.mark.parametrize(
    "other",
    [
        replace(FIRST, last_adapter="cd" * 32),
        replace(FIRST, last_adapter_round=1),  # fewer rounds from then on, and so a shorter way that is allowed
        replace(FIRST, plan=setting.PLAN.model_copy(update={"run": "run-2"})),
    ],
    ids=["another adapter", "the same after another round", "another run"],
)
def test_T20_an_adapter_that_was_measured_from_another_is_asked_for_again(tmp_path: Path, other: RunView) -> None:
    store = AdapterStore(tmp_path / "adapters")
    digest = codec.sha256_hex(adapter(1))
    store.keep(digest, adapter(1), 1.0, after=FIRST.step_from)
    again = AdapterStore(tmp_path / "adapters")
    later = replace(FIRST, round=3)
    assert again.find(digest, after=later.step_from) == adapter(1) == again.find(digest)
    assert again.find(digest, after=other.step_from) is None
    again.keep(digest, adapter(1), 1.0, after=other.step_from)
    assert again.find(digest, after=other.step_from) == adapter(1)


def test_T20_adapters_in_use_outlive_older_ones(tmp_path: Path) -> None:
    """Whatever the clock said when they came: they are the ones that the run goes on from."""
    store = AdapterStore(tmp_path / "adapters")
    digests = [codec.sha256_hex(adapter(units)) for units in range(6)]
    for units, digest in enumerate(digests):
        store.keep(digest, adapter(units), 1.0, in_use=digests[:2])
        came = 2**33 - units  # seconds; the clock goes back after each, so the newest file seems the oldest
        os.utime(tmp_path / "adapters" / digest, (came, came))
        assert store.find(digest) is not None
    assert [store.find(digest) is not None for digest in digests] == [True, True, False, False, False, True]
    last = codec.sha256_hex(adapter(9))
    store.keep(last, adapter(9), 1.0)  # the counterpart: in use no more they go like any other, the oldest first
    assert [store.find(digest) is not None for digest in (*digests[:2], last)] == [True, True, True]
    assert store.find(digests[5]) is None


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
    loop.guard.runs._adapters.keep(codec.sha256_hex(adapter(-40)), adapter(-40), 1.0, "", "run-0")
    begin(loop, 1, 40)
    end(loop, 1)
    begin(loop, 2, -40)
    assert judged(loop)[-1][:2] == ("deny", ["ADAPTER_STEP"]) and abstained(loop) == [2]


def test_T20_an_adapter_of_an_earlier_run_may_be_what_a_run_begins_with(loop: Loop) -> None:
    loop.guard.runs._adapters.keep(codec.sha256_hex(adapter(40)), adapter(40), 1.0, "", "run-0")
    loop.open_round(1, adapter(40))
    loop.base_evaluated()
    assert judged(loop) == [] and loop.trainer.tasks() == ["Evaluate", "LoadAdapter"]
    end(loop, 1)
    begin(loop, 2, 41)
    assert judged(loop)[-1][:2] == ("allow", [])


# ---- an adapter that was only evaluated -------------------------------------------------------------------


def test_T20_an_adapter_that_was_only_evaluated_is_measured_again_when_the_last_one_is_another(loop: Loop) -> None:
    """One step one way, only evaluated; one the other way, the base: from one to the other are two, in one round."""
    begin(loop, 1, 40)
    commit(loop, 1, 39)
    begin(loop, 2, 41)
    end(loop, 2)
    begin(loop, 3, 39)
    assert judged(loop)[-1] == ("deny", ["ADAPTER_STEP"], pytest.approx(2 * STEP_L2, rel=1e-12), 1)
    assert loop.bench.judge.view.last_adapter == codec.sha256_hex(adapter(41))
    assert abstained(loop) == [3]


def test_T20_the_counterpart_an_adapter_within_a_step_of_the_last_is_let_in_again(loop: Loop) -> None:
    begin(loop, 1, 40)
    commit(loop, 1, 40.5)
    begin(loop, 2, 41)
    end(loop, 2)
    begin(loop, 3, 40.5)
    assert judged(loop)[-1] == ("allow", [], pytest.approx(STEP_L2 / 2, rel=1e-12), 1)
    assert loop.bench.judge.view.last_adapter == codec.sha256_hex(adapter(40.5)) and abstained(loop) == []


@pytest.mark.parametrize("missed", [False, True], ids=["next", "after a round that was missed"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_T20_what_a_round_came_to_begins_a_later_one_and_is_not_fetched_again(
    loop: Loop, missed: bool, restarted: bool
) -> None:
    """As an honest coordinator goes on, also after a round that was no round here."""
    begin(loop, 1, 40)
    commit(loop, 1, 41)
    before = len(judged(loop))
    if restarted:
        loop.restart()
    asked = len(fetched(loop))
    if missed:
        begin(loop, 2, -40)  # not let in
        loop.coordinator.script.clear()
        assert loop.bench.judge.view.last_adapter == codec.sha256_hex(adapter(40))
        asked, before = asked + 1, before + 1
    told = abstained(loop)
    open_round(loop, 3 if missed else 2, adapter(41))
    assert len(fetched(loop)) == asked and len(judged(loop)) == before and abstained(loop) == told
    assert loop.trainer.tasks()[-1] == "LoadAdapter"
    assert loop.bench.judge.view.last_adapter == codec.sha256_hex(adapter(41))


def test_T20_the_last_adapter_stays_however_old_it_is(loop: Loop) -> None:
    """It was kept before others; what a round comes to takes the place of one of those."""
    for units in (40, 90, 91):
        loop.guard.runs._adapters.keep(codec.sha256_hex(adapter(units)), adapter(units), 1.0, "", "run-0")
    loop.open_round(1, adapter(40))
    loop.base_evaluated()
    commit(loop, 1, 41)
    store = AdapterStore(loop.folder / "adapters")
    assert store.tensors(codec.sha256_hex(adapter(40))) is not None
    assert store.tensors(codec.sha256_hex(adapter(90))) is None
    begin(loop, 3, 42)  # round 2 was missed here
    assert judged(loop)[-1] == ("allow", [], pytest.approx(2 * STEP_L2, rel=1e-12), 2) and abstained(loop) == []


@pytest.mark.parametrize("read", [AdapterStore.find, AdapterStore.tensors])
def test_T20_a_stored_adapter_is_hashed_once_and_again_when_it_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any]
) -> None:
    hashed: list[int] = []

    def counted(data: Any) -> str:
        hashed.append(len(data))
        return codec.sha256_hex(data)

    monkeypatch.setattr(adapters, "sha256_hex", counted)
    store, digest = AdapterStore(tmp_path / "adapters"), codec.sha256_hex(adapter(3))
    store.keep(digest, adapter(3), 1.0)
    path = tmp_path / "adapters" / digest
    for times in (1, 2):  # what was written this moment might be written again in the same tick of the clock
        monkeypatch.setattr(adapters, "SETTLED_NANOSECONDS", 10**18)
        assert read(store, digest) is not None and len(hashed) == times
    monkeypatch.setattr(adapters, "SETTLED_NANOSECONDS", -(10**18))  # long ago
    assert [read(store, digest) is not None for _ in range(3)] == [True] * 3 and len(hashed) == 3
    os.utime(path, ns=(0, 0))
    assert [read(store, digest) is not None for _ in range(2)] == [True] * 2 and len(hashed) == 4
    path.write_bytes(adapter(4))  # of the same length
    os.utime(path, ns=(0, 1))
    assert [read(store, digest) is None for _ in range(2)] == [True] * 2 and len(hashed) == 6
    path.write_bytes(adapter(3))
    assert read(store, digest) is not None


def test_T20_an_adapter_that_came_is_hashed_as_it_comes_in_and_again_when_it_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the tick of the file system's clock in which it came: until then the file says that it is older."""
    hashed: list[int] = []

    def counted(data: Any) -> str:
        hashed.append(len(data))
        return codec.sha256_hex(data)

    monkeypatch.setattr(adapters, "sha256_hex", counted)
    monkeypatch.setattr(adapters, "SETTLED_NANOSECONDS", 10**18)  # no file here is ever old enough by itself
    payload = adapter(3)
    digest = codec.sha256_hex(payload)
    for touched in ("", "before it was kept", "after it was kept"):
        store = AdapterStore(tmp_path / touched / "adapters")
        path = tmp_path / touched / "adapters" / digest
        with store.arriving(digest, len(payload)) as arriving:
            arriving.write(payload)
            came = arriving.view()
        if touched == "before it was kept":
            path.with_suffix(".partial").write_bytes(adapter(4))  # of the same length
        store.keep(digest, came, 1.0)
        if touched == "after it was kept":
            path.write_bytes(adapter(4))
        hashed.clear()
        assert (store.find(digest) is None) == bool(touched)
        assert len(hashed) == (1 if touched else 0)

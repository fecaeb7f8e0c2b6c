"""Two processes over gloo train as one does: gradients, figures, tokens, adapter, kept state; with whole and with
sharded weights; and a trainer of two processes behind a link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.tasks import ExportDelta, LoadAdapter, PrivateStep
from silo.config import load_config
from silo.link import Link, Listener
from silo.trainer.scale_out import Place, dealt, start_others, started_by_a_launcher
from silo.trainer.worker import OFFLINE
from tests.algorithms.scale_out_side import CASES, Found
from tests.algorithms.test_T22_resume import bare_session
from tests.algorithms.test_worker import ask, configuration
from tests.algorithms.tiny import (
    make_model,
    make_plan,
    make_rows,
    make_shape,
    make_tokenizer,
    payload_of,
    random_factors,
)
from tests.security.link_harness import EXTERNAL, write_config

pytestmark = pytest.mark.torch
# The processes add the same float32 numbers in another order: gradients of some 0.1 differ by some 1e-7. Adam divides
# by the root of the second moment, so that the rounding of one near zero becomes a share of a whole step of lr 1e-3.
SUMS = {"rtol": 1e-5, "atol": 1e-6}
FACTORS = {"rtol": 0.0, "atol": 2e-5}


UPDATES: dict[str, dict[str, Any]] = {
    "parts": {},
    "token-mean": {"plan": {"objective__token_aggregation": "token-mean", "objective__entropy_coefficient": 0.01}},
    "one part": {"plan": {"objective__kl_coefficient": 0.0}, "microbatch_tokens": 1000},
    "one prompt": {"groups": [1]},
    "sharded": {"shard": True},
    "sharded, one prompt": {"shard": True, "groups": [1]},
    "sharded, no signal": {"shard": True, "groups": [2, 3], "plan": {"objective__kl_coefficient": 0.0}},
}


@pytest.fixture(scope="module")
def kept_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def alone(kept_by_one: Path) -> Found:
    return CASES["steps"](None, {"kept": str(kept_by_one)})


@dataclass(frozen=True)
class Pair:
    """What two processes found at each case, in the order of their ranks. kept: states, by who left them."""

    found: dict[str, list[Found]]
    kept: dict[str, Path]


@pytest.fixture(scope="module")
def pair(alone: Found, kept_by_one: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One group does all cases in a row: two processes take far longer to start than to do any of them."""
    folder = tmp_path_factory.mktemp("two")
    kept = {"one": kept_by_one, "two": folder / "kept"}
    cases: list[tuple[str, str, dict[str, Any]]] = [(name, "update", options) for name, options in UPDATES.items()]
    cases += [
        ("steps", "steps", {"kept": str(kept["two"])}),
        ("steps, sharded", "steps", {"shard": True}),
        ("goes on", "steps", {"kept": str(kept["one"]), "resume": True}),
        ("failures", "failures", {}),
    ]
    (folder / "meet").mkdir()
    running = []
    for rank in range(2):
        order = {
            "rank": rank, "size": 2, "rendezvous": f"file://{folder}/meet/store", "cases": cases, "folder": str(folder),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.algorithms.scale_out_side", json.dumps(order)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in running:
            _, words = process.communicate(timeout=240)
            assert process.returncode == 0, words[-3000:]
    finally:
        for process in running:
            process.kill()

    def of(name: str, rank: int) -> Found:
        path = folder / f"{name} {rank}.safetensors"
        return json.loads(path.with_suffix(".json").read_text()), safetensors.torch.load_file(path)

    return Pair({name: [of(name, rank) for rank in range(2)] for name, _, _ in cases}, kept)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert set(got) == set(expected)
    for name, each in expected.items():
        torch.testing.assert_close(got[name], each, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("name", UPDATES)
def test_gradients_and_figures_are_those_of_one_process(name: str, pair: Pair) -> None:
    options, found = UPDATES[name], pair.found[name]
    figures, tensors = CASES["update"](None, {name: each for name, each in options.items() if name != "shard"})
    for other_figures, other_tensors in found:
        assert_same(
            {name: each for name, each in other_tensors.items() if not name.startswith("after.")},
            {name: each for name, each in tensors.items() if not name.startswith("after.")},
            **SUMS,
        )
        assert_same(other_tensors, tensors, **FACTORS)
        assert other_figures["figures"] == pytest.approx(figures["figures"], rel=1e-5, abs=1e-9)
    assert all(torch.equal(found[0][1][name], each) for name, each in found[1][1].items())  # and equal bits in both
    if options.get("shard"):
        projections = [each for name, each in make_model().named_parameters() if "proj" in name]
        whole = sum(each.numel() * each.element_size() for each in projections)
        assert [each["share_bytes"] for each, _ in found] == [whole // 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps", "steps, sharded"])
def test_five_steps_end_with_the_same_adapter_tokens_and_evaluation(name: str, alone: Found, pair: Pair) -> None:
    for figures, tensors in pair.found[name]:
        assert figures == alone[0]  # in float32 no draw flipped
        assert_same(tensors, alone[1], **FACTORS)
    factors = [each for each in alone[1] if each.startswith("factor.")]
    moved = [float((alone[1][each] - alone[1][each.replace("factor.", "start.")]).abs().max()) for each in factors]
    assert max(moved) > 100 * FACTORS["atol"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_from_a_kept_state(
    before: int, after: int, alone: Found, pair: Pair
) -> None:
    if before == 2:
        figures, tensors = CASES["steps"](None, {"kept": str(pair.kept["two"]), "resume": True})
    else:
        figures, tensors = pair.found["goes on"][0]
    assert figures["tokens"][0] is False  # not bit for bit, and it says so
    assert figures["tokens"][1:] == alone[0]["tokens"][-3:]
    assert figures["evaluated"] == alone[0]["evaluated"]
    assert_same(tensors, alone[1], **FACTORS)


@pytest.mark.slow
def test_a_failure_in_one_process_is_heard_in_both_and_they_go_on(pair: Pair) -> None:
    (first, _), (second, _) = pair.found["failures"]
    assert first["failed"] == ["NOT_FINITE", "process 1 of the trainer failed: its own sentence"]
    assert second["failed"] == ["NOT_FINITE", "its own sentence"]
    assert (first["after"], second["after"]) == (7, 8)
    for told in (first, second):
        assert (told["broadcast"], told["empty"], told["gathered"]) == ("\0from 0", "", 1)
        assert [correct for correct, _ in told["verdicts"]] == [True, False, False, True, False, False, True]
        assert all(reward == float(correct) for correct, reward in told["verdicts"])
        assert told["led"] == [[1]]
        assert "come apart" in told["apart"]
        assert told["stopped"] == ["", "STALE_ROLLOUT", "ROLLOUT_DISAGREES", ""]  # both, whoever had the reason
    for rank, told in enumerate((first, second)):
        by_itself = f"process {rank} failed by itself"
        assert told["swap"] == [
            "OUT_OF_MEMORY", "OUT_OF_MEMORY", "done", "BAD_TASK",
            f"{by_itself}: RuntimeError: nobody knows", f"{by_itself}: OperationError: its own disk",
        ]  # fmt: skip
    assert (first["asked"], second["asked"]) == ([4], [3])


def test_prompts_are_dealt_out_evenly_and_the_same_way_each_time() -> None:
    assert dealt([5, 9, 2, 2, 4], 2) == [[1, 2], [0, 3, 4]]
    assert dealt([3], 3) == [[0], [], []]
    assert dealt([], 2) == [[], []]
    costs = [place * 37 % 101 + 1 for place in range(64)]
    shares = dealt(costs, 4)
    assert sorted(place for share in shares for place in share) == list(range(64))
    loads = [sum(costs[place] for place in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs)


def test_a_launcher_says_the_place_and_nonsense_is_refused() -> None:
    assert started_by_a_launcher({}) is None
    assert started_by_a_launcher({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert started_by_a_launcher({"WORLD_SIZE": "4", "RANK": "3"}) == Place(3, 4)
    for wrong in ({"WORLD_SIZE": "two"}, {"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "5000", "RANK": "2"}):
        with pytest.raises(UsageError):
            started_by_a_launcher(wrong)
    for size in (0, -1, 5000):
        with pytest.raises(UsageError):
            start_others(size)


REFUSED = [
    (EXTERNAL, ("  processes: 1", "  processes: 2"), "processes is for launch: child"),
    (("  isolation: auto", "  isolation: user"), ("  processes: 1", "  processes: 2"), "no socket"),
    (("  shard_base: false", "  shard_base: true"), ("  threads: auto", "  threads: 1"), "one process"),
]


@pytest.mark.parametrize(("first", "second", "cause"), REFUSED)
def test_settings_that_cannot_be_are_refused(
    first: tuple[str, str], second: tuple[str, str], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=cause):
        load_config(write_config(tmp_path, first, second))
    two = ("  processes: 1", "  processes: 2")
    assert load_config(write_config(tmp_path, two, ("  shard_base: false", "  shard_base: true"))).trainer.shard_base


# ---- behind a link -----------------------------------------------------------------------------------


class Trainer:
    def __init__(self, folder: Path, *words: str) -> None:
        self._listener = Listener(f"unix:{folder}/t.sock", user_ids=frozenset({os.getuid()}))
        environment = {name: value for name, value in os.environ.items() if name not in OFFLINE}
        command = [sys.executable, "-m", "silo.trainer.worker", "--address", f"unix:{folder}/t.sock", *words]
        self.process = subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)})
        self.link: Link = self._listener.accept(60.0)

    def others(self) -> list[int]:
        """Process 1 and further; graders and the like are started by a process, and are none."""
        number = self.process.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        return [int(c) for c in children if b"silo.trainer.worker" in Path(f"/proc/{c}/cmdline").read_bytes()]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self.link.close()
        self._listener.close()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Any]:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    started: list[Trainer] = []

    def start(*words: str, **changes: Any) -> Trainer:
        trainer = Trainer(tmp_path, *words)
        started.append(trainer)
        fields = {**configuration(tmp_path), **changes}
        ready, _ = ask(trainer.link, "configure", **fields)
        assert ready.type == "ready", ready.fields
        assert ready.fields["processes"] == 2
        return trainer

    yield start
    for trainer in started:
        trainer.end()


def plan_fields(resume: bool = False) -> dict[str, Any]:
    shape = make_shape(make_model())
    schema = {
        "rank": shape.rank, "alpha": shape.alpha, "freeze": "none",
        "tensors": [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()],
    }  # fmt: skip
    more = {"resume": True} if resume else {}
    return {"canonical_json": make_plan(objective__kl_coefficient=0.1).canonical(), "lora_schema": schema, **more}


def train(trainer: Trainer, steps: tuple[int, ...]) -> None:
    for step in steps:
        done, phases = ask(trainer.link, "task", task="PrivateStep", round=1, step=step, rows=[39, step, 7])
        assert (done.type, phases) == ("done", ["rollout", "grade", "update"]), done.fields


@pytest.mark.slow
def test_a_trainer_of_two_processes_does_what_one_does_and_outlives_its_kill(trainers: Any, tmp_path: Path) -> None:
    shape = make_shape(make_model())
    # no answer of a random model is right; what there is to learn is the way back to the base
    payload, digest = payload_of(shape, random_factors(shape, 0, 0.3)), "d"
    trainer = trainers("--processes", "2")
    assert ask(trainer.link, "plan", **plan_fields())[0].type == "planned"
    ask(trainer.link, "task", payload, task="LoadAdapter", round=1, digest=digest)
    train(trainer, (1, 2))
    beside, _ = ask(trainer.link, "task", task="PrivateStep", round=1, step=3, rows=[40])
    assert beside.fields["code"] == "BAD_TASK"  # refused by both, and both go on
    [other] = trainer.others()
    os.kill(other, signal.SIGKILL)
    trainer.link.send(task_message(3))
    assert trainer.process.wait(60) == 1  # one cannot go on without the other
    trainer.end()
    trainer = trainers("--processes", "2", shard_base=True)
    planned, _ = ask(trainer.link, "plan", **plan_fields(resume=True))
    assert planned.fields["resumed"] == {"task": "PrivateStep", "round": 1, "step": 2, "exact": True}
    train(trainer, (3,))
    update = decode_factors(ask(trainer.link, "task", task="ExportDelta", round=1)[0].body).tensors
    others = trainer.others()
    trainer.end()
    assert len(others) == 1
    end = time.monotonic() + 20
    while any(map(lives, others)):
        assert time.monotonic() < end, "the others outlive process 0"
    one = update_of_one(payload, digest)
    assert not list(tmp_path.glob("processes-*"))
    assert max(float(abs(each).max()) for each in one.values()) > 100 * FACTORS["atol"]
    for name, each in one.items():
        torch.testing.assert_close(torch.tensor(update[name]), torch.tensor(each), **FACTORS)


def update_of_one(payload: bytes, digest: str) -> dict[str, Any]:
    """What the same tasks give in this process, with what `configuration` says."""
    session, _ = bare_session(
        make_plan(objective__kl_coefficient=0.1), private=make_rows(40, "p"), site_secret=bytes.fromhex("00ff"),
        private_grader=lambda pairs: [False for _ in pairs], microbatch_tokens=4096,
    )  # fmt: skip
    session.carry_out(LoadAdapter(1, digest), payload)
    for step in (1, 2, 3):
        session.carry_out(PrivateStep(1, step, (39, step, 7)))
    return decode_factors(session.carry_out(ExportDelta(1)).body).tensors


def lives(process_id: int) -> bool:
    try:
        return bool(Path(f"/proc/{process_id}/cmdline").read_bytes())  # of one that only waits to be reaped it is empty
    except FileNotFoundError:
        return False


def task_message(step: int) -> Any:
    from silo.link import LinkMessage

    return LinkMessage("task", {"task": "PrivateStep", "round": 1, "step": step, "rows": [39, step, 7]})

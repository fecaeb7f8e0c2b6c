"""A session that is killed between two tasks goes on from its kept state, bit for bit; any other state is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode
from fedsilo.protocol.errors import FedSiloError, OperationError
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import ExportDelta, GeneratePublic, LoadAdapter, PrivateStep, PublicStep, TrainerTask
from silo.link import Link, LinkMessage, Listener
from silo.trainer.agreement import Limits
from silo.trainer.resume import SessionState, StateFile, StateRefused, from_bytes, to_bytes
from silo.trainer.session import Session
from silo.trainer.worker import OFFLINE
from tests.algorithms.test_agreement_faults import StaleEngine
from tests.algorithms.test_worker import ask, configuration
from tests.algorithms.tiny import (
    make_model,
    make_plan,
    make_rows,
    make_session,
    make_shape,
    make_tokenizer,
    payload_of,
    random_factors,
    start_payload,
)

pytestmark = pytest.mark.torch
SECRET = b"secret of a"
ROWS = {1: (0, 4, 2), 2: (1, 7, 3), 3: (8, 5, 6), 4: (2, 0, 7)}


class Unguided(Session):
    """Takes the tasks as they are, rows and all, as a trainer does."""


def bare_session(plan: Plan, **changes: Any) -> tuple[Session, Any]:
    guided, shape = make_session(plan=plan, **changes)
    session = Unguided(guided._material)
    session._material = dataclasses.replace(session._material, model=make_model())
    session.begin_run(plan, shape)
    return session, shape


def donors_of(body: bytes) -> pb.PublicDonors:
    donors = pb.PublicDonors()
    good = pb.Response(text="7a", finish=pb.FINISH_STOP)
    for row in decode(pb.PublicResponses, body).prompts:
        donors.prompts.add(prompt_index=row.prompt_index, donors=[pb.Donor(origin="b", position=0, response=good)])
    return donors


def tasks_of(round_number: int, digest: str) -> list[TrainerTask]:
    """A round of four steps: private, public (in halves), private, public."""
    tasks: list[TrainerTask] = [LoadAdapter(round_number, digest)]
    for step in (1, 2, 3, 4):
        if step % 2:
            tasks.append(PrivateStep(round_number, step, ROWS[step]))
            continue
        tasks.append(GeneratePublic(round_number, step, (4, 0, 9), "correct"))
        tasks.append(PublicStep(round_number, step, "replace", pb.PublicDonors()))
    return [*tasks, ExportDelta(round_number)]


def do(session: Session, task: TrainerTask, payload: bytes, answered: list[bytes]) -> bytes:
    if isinstance(task, PublicStep):
        task = dataclasses.replace(task, donors=donors_of(answered[-1]))
    body = session.carry_out(task, payload if isinstance(task, LoadAdapter) else b"").body
    if isinstance(task, GeneratePublic):
        answered.append(body)
    return body


def content_of(file: StateFile) -> str:
    state = file.load()
    assert state is not None
    digest = hashlib.sha256(json.dumps(state.facts, sort_keys=True).encode())
    for name, each in sorted(state.tensors.items()):
        digest.update(name.encode() + each.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def round_with_kills(
    plan: Plan, folder: Path, killed_after: frozenset[int], rounds: int = 1
) -> tuple[list[bytes], list[str]]:
    """Bodies of every task, and what the file holds after each; after those in `killed_after` only the file is left."""
    session, shape = bare_session(plan)
    file = StateFile(folder, SECRET)
    payload, digest = start_payload(shape)
    bodies: list[bytes] = []
    files: list[str] = []
    answered: list[bytes] = []
    tasks = [task for number in range(1, rounds + 1) for task in tasks_of(number, digest)]
    for place, task in enumerate(tasks):
        bodies.append(do(session, task, payload, answered))
        file.save(session.state())
        files.append(content_of(file))
        if place in killed_after:
            session, _ = bare_session(plan)
            state = file.load()
            assert state is not None and session.restore(state) is True
    return bodies, files


def test_a_session_killed_after_any_task_of_a_round_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Killed after every task it gives the same bodies, and its file holds the same in between: so does that of one
    that is killed after some of them."""
    plan = make_plan(objective__kl_coefficient=0.01, optimiser__epochs=2)
    undisturbed, files = round_with_kills(plan, tmp_path / "whole", frozenset())
    assert len({bytes(body) for body in undisturbed}) == 4  # two messages, the update, and nothing
    assert len(set(files)) == len(files) - 1  # the export changes nothing
    killed = round_with_kills(plan, tmp_path / "all", frozenset(range(len(undisturbed))))
    assert killed == (undisturbed, files)


def test_an_optimiser_that_is_kept_over_rounds_is_kept_over_a_kill(tmp_path: Path) -> None:
    plan = make_plan(optimiser__state="keep", optimiser__learning_rate=1e-2)
    undisturbed, files = round_with_kills(plan, tmp_path / "whole", frozenset(), rounds=2)
    between = len(undisturbed) // 2
    assert round_with_kills(plan, tmp_path / "kill", frozenset({between - 1}), rounds=2) == (undisturbed, files)
    assert undisturbed[between - 1] != undisturbed[-1]


def test_an_open_step_and_the_donors_counted_so_far_outlive_a_kill() -> None:
    plan = make_plan()
    session, shape = bare_session(plan)
    payload, digest = start_payload(shape)
    answered: list[bytes] = []
    for task in tasks_of(1, digest)[:4]:
        do(session, task, payload, answered)
    session.carry_out(GeneratePublic(1, 4, (4, 0), "all"))
    went_on, _ = bare_session(plan)
    went_on.restore(session.state())
    assert session._run is not None and went_on._run is not None
    assert went_on._run.donors_trained == session._run.donors_trained > 0
    assert went_on._run.open_step == session._run.open_step
    assert went_on._run.open_step is not None and went_on._run.open_step.offer == "all"


@pytest.mark.slow
def test_without_the_moments_or_the_start_the_bytes_would_differ() -> None:
    plan = make_plan()
    session, shape = bare_session(plan)
    payload, digest = start_payload(shape)
    for task in tasks_of(1, digest)[:2]:
        do(session, task, payload, [])
    state = session.state()
    expected = session.carry_out(PrivateStep(1, 2, ROWS[2])) and session.carry_out(ExportDelta(1)).body

    def goes_on_with(changed: SessionState) -> bytes:
        again, _ = bare_session(plan)
        again.restore(changed)
        again.carry_out(PrivateStep(1, 2, ROWS[2]))
        return again.carry_out(ExportDelta(1)).body

    assert goes_on_with(state) == expected
    no_moments = {name: each for name, each in state.tensors.items() if not name.startswith("optimiser.")}
    assert goes_on_with(dataclasses.replace(state, tensors=no_moments)) != expected
    moved = {name: each + 1 if name.startswith("start.") else each for name, each in state.tensors.items()}
    assert goes_on_with(dataclasses.replace(state, tensors=moved)) != expected
    assert goes_on_with(state) == expected  # a state may be gone on from more than once


# A step has at most 60 tokens: judged after three steps.
WATCHED = Limits(share=1.0, window_tokens=130, marker_pushes=0)


def watched_steps(folder: Path, *, stale: bool, killed_after: frozenset[int]) -> tuple[list[dict[str, float]], str]:
    """What the proof of agreement says at each of five steps, and the reason where it stops one."""
    plan, file = make_plan(optimiser__learning_rate=1e-4), StateFile(folder, SECRET)
    # a stale engine's marker would show at once; a fresh one's is sent at the first and the fifth step
    limits = WATCHED if stale else dataclasses.replace(WATCHED, marker_pushes=4)

    def begun() -> Session:
        session, _ = bare_session(plan, agreement=limits)
        return session

    def go_wrong(session: Session) -> None:
        run = session._run
        assert run is not None
        if stale:
            run.engine = engine = StaleEngine(session)
            engine._old = [each.clone() for each in run.adapter.start]

    session = begun()
    payload, digest = start_payload(make_shape(make_model()))
    session.carry_out(LoadAdapter(1, digest), payload)
    go_wrong(session)
    told: list[dict[str, float]] = []
    for step in range(1, 6):
        try:
            metrics = session.carry_out(PrivateStep(1, step, ROWS[step % 4 + 1])).metrics
        except OperationError as error:
            return told, f"{error.code} {error.message}"
        told.append({name: each for name, each in metrics.items() if name.startswith(AGREED)})
        file.save(session.state())
        if step in killed_after:
            session, state = begun(), file.load()
            assert state is not None and session.restore(state) is True
            go_wrong(session)
    return told, ""


AGREED = ("agreement_tokens", "stale_", "marker_", "rollout_kl", "adapter_visible")


@pytest.mark.slow
def test_what_the_proof_of_agreement_has_found_outlives_a_kill_within_its_window(tmp_path: Path) -> None:
    """A window that began anew with every start would never be full where a trainer is killed often enough."""
    fresh, reason = watched_steps(tmp_path, stale=False, killed_after=frozenset())
    assert reason == "" and "stale_previous" in fresh[-1] and "marker_contrast" in fresh[0]
    stopped, reason = watched_steps(tmp_path, stale=True, killed_after=frozenset())
    assert 2 <= len(stopped) < 5 and reason.startswith("STALE_ROLLOUT")
    always = frozenset(range(1, 6))
    assert watched_steps(tmp_path, stale=False, killed_after=always) == (fresh, "")
    assert watched_steps(tmp_path, stale=True, killed_after=always) == (stopped, reason)


REFUSED: dict[str, Callable[[SessionState], SessionState]] = {
    "run": lambda state: dataclasses.replace(state, facts={**state.facts, "run": "other"}),
    "plan": lambda state: dataclasses.replace(state, facts={**state.facts, "plan": "0" * 64}),
    "silo": lambda state: dataclasses.replace(state, facts={**state.facts, "silo": "b"}),
    "format '1'": lambda state: dataclasses.replace(state, facts={**state.facts, "format": 1}),
    "format '3'": lambda state: dataclasses.replace(state, facts={**state.facts, "format": 3}),
    "private rows": lambda state: dataclasses.replace(state, facts={**state.facts, "split": "other"}),
    "tensor": lambda state: dataclasses.replace(state, tensors=dict(list(state.tensors.items())[1:])),
    "optimiser": lambda state: dataclasses.replace(
        state, tensors={n: each for n, each in state.tensors.items() if not n.startswith("optimiser.step.")}
    ),
    "watch": lambda state: dataclasses.replace(state, facts={**state.facts, "agreement": {}}),
    "agreement.previous": lambda state: dataclasses.replace(
        state, tensors={n: each for n, each in state.tensors.items() if not n.startswith("agreement.previous.")}
    ),
    "position": lambda state: dataclasses.replace(
        state, facts={name: value for name, value in state.facts.items() if name != "position"}
    ),
}


@pytest.mark.slow
def test_a_state_of_something_else_is_refused_and_changes_nothing() -> None:
    plan = make_plan()
    session, shape = bare_session(plan)
    payload, digest = start_payload(shape)
    for task in tasks_of(1, digest)[:2]:
        do(session, task, payload, [])
    state = session.state()
    fresh, _ = bare_session(plan)
    for reason, changed in REFUSED.items():
        with pytest.raises(StateRefused, match=reason):
            fresh.restore(changed(state))
    # the round is started over, and ends as if nothing had been there
    for task in tasks_of(1, digest)[:2]:
        do(fresh, task, payload, [])
    assert fresh.carry_out(ExportDelta(1)).body == session.carry_out(ExportDelta(1)).body
    fresh.restore(state)


def test_T22_a_torn_changed_or_foreign_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:  # threat id
    session, shape = bare_session(make_plan())
    session.carry_out(LoadAdapter(1, "d"), payload_of(shape, random_factors(shape, 3, 0.3)))
    file = StateFile(tmp_path, SECRET)
    assert file.load() is None
    file.save(session.state())
    kept = file.load()
    assert kept is not None and all(torch.equal(kept.tensors[n], each) for n, each in session.state().tensors.items())
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600 and stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    whole = file.path.read_bytes()
    last = bytearray(whole)
    last[-1] ^= 1
    for data in (whole[: len(whole) // 2], whole[:40], b"", bytes(last), b"\x80\x04N.", b"\0" * 64):
        file.path.write_bytes(data)
        with pytest.raises(StateRefused, match="torn or changed"):
            file.load()
    file.path.write_bytes(whole)
    assert file.load() is not None
    with pytest.raises(StateRefused, match="another site's"):
        StateFile(tmp_path, b"secret of b").load()
    file.path.chmod(0o644)
    with pytest.raises(FedSiloError, match="others may read"):
        file.load()
    file.discard()
    assert file.load() is None


def test_what_follows_another_number_of_threads_is_not_called_bit_for_bit() -> None:
    plan = make_plan()
    session, shape = bare_session(plan)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    state = session.state()
    assert bare_session(plan)[0].restore(state) is True
    elsewhere = {**state.facts["surroundings"], "threads": 64}
    other = dataclasses.replace(state, facts={**state.facts, "surroundings": elsewhere})
    assert bare_session(plan)[0].restore(other) is False


def test_a_state_goes_through_its_bytes_unchanged_with_answer_and_all() -> None:
    session, shape = bare_session(make_plan())
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(GeneratePublic(1, 2, (4, 0), "all"))
    state = session.state()
    again = from_bytes(to_bytes(state, b"key"), b"key")
    assert again.facts == state.facts and again.position.task == "GeneratePublic"
    assert sorted(again.tensors) == sorted(state.tensors)
    assert again.facts["open_step"]["own"][0]["row"] == 4


# ---- the process -------------------------------------------------------------------------------------


class Trainer:
    """A real worker at the other end of a link."""

    def __init__(self, folder: Path) -> None:
        self._listener = Listener(f"unix:{folder}/t.sock", user_ids=frozenset({os.getuid()}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "silo.trainer.worker", "--address", f"unix:{folder}/t.sock"],
            env={name: value for name, value in os.environ.items() if name not in OFFLINE} | {"OMP_NUM_THREADS": "1"},
        )
        self.link: Link = self._listener.accept(60.0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self.link.close()
        self._listener.close()


@pytest.mark.slow
def test_a_killed_worker_goes_on_and_gives_its_last_answer_again(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    shape = make_shape(make_model())
    schema = {
        "rank": shape.rank, "alpha": shape.alpha, "freeze": "none",
        "tensors": [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()],
    }  # fmt: skip
    plan = {"canonical_json": make_plan().canonical(), "lora_schema": schema}
    payload, digest = start_payload(shape)
    fields = configuration(tmp_path)
    state = tmp_path / "scratch" / "session" / "state"

    def steps(trainer: Trainer, numbers: tuple[int, ...]) -> list[LinkMessage]:
        found = []
        for step in numbers:
            found.append(ask(trainer.link, "task", task="PrivateStep", round=1, step=step, rows=list(ROWS[step]))[0])
        return found

    trainer = Trainer(tmp_path)
    try:
        assert ask(trainer.link, "configure", **fields)[0].type == "ready"
        planned, _ = ask(trainer.link, "plan", **plan)
        assert "resumed" not in planned.fields
        ask(trainer.link, "task", payload, task="LoadAdapter", round=1, digest=digest)
        _, second = steps(trainer, (1, 2))
        at_the_kill = state.read_bytes()
        steps(trainer, (3,))  # on the way that another process takes after the kill
        undisturbed = ask(trainer.link, "task", task="ExportDelta", round=1)[0].body
        trainer.process.send_signal(signal.SIGKILL)
        trainer.process.wait(20)
        trainer.end()

        state.write_bytes(at_the_kill)
        trainer = Trainer(tmp_path)
        ask(trainer.link, "configure", **fields)
        planned, _ = ask(trainer.link, "plan", **plan, resume=True)
        assert planned.fields["resumed"] == {"task": "PrivateStep", "round": 1, "step": 2, "exact": True}
        again, phases = ask(trainer.link, "task", task="PrivateStep", round=1, step=2, rows=list(ROWS[2]))
        assert (again.fields, phases) == (second.fields, [])  # done already, and not done twice
        steps(trainer, (3,))
        resumed = ask(trainer.link, "task", task="ExportDelta", round=1)[0].body
    finally:
        trainer.end()
    assert resumed == undisturbed
    assert np.frombuffer(resumed, dtype=np.uint8).any()


@pytest.mark.slow
def test_a_run_that_is_not_resumed_forgets_what_was_kept(tmp_path: Path) -> None:
    from silo.trainer.resume import StateStore

    plan = make_plan()
    session, shape = bare_session(plan, private=make_rows(9, "p"))
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    file = StateFile(tmp_path, SECRET)
    file.save(session.state())
    assert StateStore(bare_session(plan)[0], file).begin(resume=True)["resumed"]["task"] == "LoadAdapter"
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-1])
    torn = StateStore(bare_session(plan)[0], file).begin(resume=True)
    assert torn["resumed"] is None and "torn" in torn["not_resumed"]
    file.path.write_bytes(whole)
    assert StateStore(bare_session(plan)[0], file).begin(resume=False) == {}
    assert StateStore(bare_session(plan)[0], file).begin(resume=True) == {
        "resumed": None, "not_resumed": "no state was kept",
    }  # fmt: skip

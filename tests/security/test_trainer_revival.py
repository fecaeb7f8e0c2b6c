"""A trainer that dies is started again, in the same sandbox, and brought to where it was; the guard sees no more."""

from __future__ import annotations

import os
import queue
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.errors import OperationError
from silo.config import SiloConfig, load_config
from silo.guard.trainer_process import probing, trainer_link
from silo.guard.trainer_process.supervisor import RESTARTS_MAX, Given, Restart, Supervisor, TrainerGone, TrainerSaid
from silo.link import LinkClosed, LinkMessage
from tests.security.link_harness import write_config

PLAN = LinkMessage("plan", {"canonical_json": '{"optimiser":{"state":"reset"}}'})
KEEPING = LinkMessage("plan", {"canonical_json": '{"optimiser":{"state":"keep"}}'})


def task(name: str, round_number: int = 1, step: int = 0) -> LinkMessage:
    return LinkMessage("task", {"task": name, "round": round_number, "step": step})


LOAD, STEP, OFFER, SWAP, EXPORT = (
    task("LoadAdapter"), task("PrivateStep", 1, 1), task("GeneratePublic", 1, 2), task("PublicStep", 1, 2),
    task("ExportDelta"),
)  # fmt: skip


def given(*done: LinkMessage, plan: LinkMessage = PLAN, doing: LinkMessage | None = None) -> Given:
    found = Given()
    found.sent(plan)
    found.heard(LinkMessage("planned", {"private_prompts": 3}))
    for one in done:
        found.sent(one)
        found.heard(LinkMessage("done", {"task": one.fields["task"]}))
    if doing is not None:
        found.sent(doing)
    return found


def stands_at(message: LinkMessage) -> dict[str, Any]:
    return {**message.fields, "exact": True}


@pytest.mark.parametrize(
    ("before", "resumed", "repeated"),
    [
        (given(LOAD, STEP, doing=OFFER), stands_at(STEP), []),
        (given(LOAD, STEP, doing=OFFER), stands_at(OFFER), []),  # done, and the answer lost
        (given(LOAD, STEP, OFFER), stands_at(OFFER), []),
        (given(LOAD, STEP, doing=EXPORT), stands_at(STEP), []),
        (given(LOAD, STEP, doing=OFFER), None, [LOAD, STEP]),
        (given(LOAD, STEP, doing=OFFER), stands_at(LOAD), [LOAD, STEP]),  # behind what was told
        (given(LOAD, STEP, doing=OFFER), stands_at(task("PrivateStep", 2, 1)), [LOAD, STEP]),
        (given(LOAD, OFFER, SWAP, doing=EXPORT), None, [LOAD, OFFER, SWAP]),
        (given(LOAD, STEP, doing=task("LoadAdapter", 2)), None, []),  # which starts afresh anyhow
        (given(LOAD, STEP, task("LoadAdapter", 2), doing=task("PrivateStep", 2, 1)), None, [task("LoadAdapter", 2)]),
        (given(doing=LOAD), None, []),
        (given(), None, []),
        (given(LOAD, STEP, plan=KEEPING, doing=OFFER), None, [LOAD, STEP]),
        (given(LOAD, task("LoadAdapter", 2), plan=KEEPING, doing=OFFER), None, None),
        (given(LOAD, STEP, plan=KEEPING, doing=OFFER), stands_at(LOAD), None),
        (given(LOAD, task("LoadAdapter", 2), plan=KEEPING, doing=OFFER), stands_at(task("LoadAdapter", 2)), []),
    ],
)
def test_what_is_given_again(before: Given, resumed: Any, repeated: Any) -> None:
    assert before.to_repeat(resumed) == repeated


def test_what_is_in_no_kept_state_is_given_to_the_next_one_until_another_run_begins() -> None:
    reference = task("LoadReference")
    held = given(reference, LOAD, STEP, doing=OFFER)
    assert list(held.stays.values()) == [reference] and held.to_repeat(stands_at(STEP)) == []
    assert list(given(LOAD, doing=reference).stays.values()) == []  # the task in hand is given again anyway
    held.sent(PLAN)
    assert held.stays == {}


# ---- a real one --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> Iterator[SiloConfig]:
    """Of a child in the best sandbox that this machine builds; a short folder, since a unix socket's path is."""
    from tests.algorithms.test_worker import write_tasks
    from tests.algorithms.tiny import make_model, make_tokenizer

    with tempfile.TemporaryDirectory(prefix="revive-") as folder:
        home = Path(folder)
        (home / "state").mkdir()
        (home / "id").mkdir()
        for name in ("hospital_a.key", "hospital_a.ed25519"):  # for the probes: no sandbox hides what is not there
            (home / "id" / name).write_text("")
        make_model().save_pretrained(home / "model")
        make_tokenizer().save_pretrained(home / "model")
        write_tasks(home / "tasks.jsonl", "p")
        yield load_config(
            write_config(
                home,
                ("[data/train.jsonl]", "[tasks.jsonl]"), ("path: public/medqa_2k.jsonl", "path: tasks.jsonl"),
                ("path: public/held_out.jsonl", "path: tasks.jsonl"), ("path: /models/Qwen3-1.7B", "path: model"),
                ("  load: bf16", "  load: fp32"), ("  threads: auto", "  threads: 1"),
                ("installed package brings (docs/how-to/verifiers.md).\n  verifier: choice",
                 "installed package brings (docs/how-to/verifiers.md).\n  verifier: exact"),
                ("    # How an answer to a public prompt is graded.\n    verifier: choice", "    verifier: exact"),
                ("    # Optional; without it, the public set's verifier.\n    verifier: choice", ""),
            )
        )  # fmt: skip


class Site:
    def __init__(self, config: SiloConfig) -> None:
        self.events: queue.Queue[TrainerSaid | TrainerGone] = queue.Queue()
        self.restarts: list[Restart] = []
        self.supervisor = Supervisor(config, self.events.put, restarted=self.restarts.append)
        self._stack = ExitStack()  # a daemon's control socket is there as long as the daemon
        fields = self._stack.enter_context(probing.probe_fields_beside_the_daemon(config, os.getpid()))
        self.supervisor.start(b"secret of a", fields)

    def end(self) -> None:
        self.supervisor.stop()
        self._stack.close()

    def hear(self, kind: str) -> LinkMessage:
        """The next message of this type. A death that the guard is told of fails the test."""
        while True:
            event = self.events.get(timeout=60)
            assert isinstance(event, TrainerSaid), event
            assert event.message.type != "failed", event.message.fields
            if event.message.type == kind:
                return event.message

    def kill(self) -> None:
        kill_worker(self.supervisor)

    def do(self, body: bytes = b"", *, killed: bool = False, **fields: Any) -> LinkMessage:
        self.supervisor.send(LinkMessage("task", fields, body))
        if killed:
            self.hear("step")
            self.kill()
        return self.hear("done")


def kill_worker(supervisor: Supervisor) -> None:
    for process_id in descendants(supervisor._process.pid if supervisor._process else 0):
        words = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
        if b"silo.trainer.worker" in words:
            os.kill(process_id, signal.SIGKILL)


def descendants(process_id: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


@contextmanager
def planned(config: SiloConfig) -> Iterator[tuple[Site, bytes, str]]:
    from tests.algorithms.tiny import make_model, make_plan, make_shape, start_payload

    shape = make_shape(make_model())
    schema = {
        "rank": shape.rank, "alpha": shape.alpha, "freeze": "none",
        "tensors": [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()],
    }  # fmt: skip
    site = Site(config)
    try:
        site.supervisor.send(LinkMessage("plan", {"canonical_json": make_plan().canonical(), "lora_schema": schema}))
        site.hear("planned")
        yield site, *start_payload(shape)
    finally:
        site.end()


def update_of(
    site: Site, config: SiloConfig, payload: bytes, digest: str, *, killed: bool, tear: bool = False
) -> bytes:
    site.do(payload, task="LoadAdapter", round=1, digest=digest)
    site.do(task="PrivateStep", round=1, step=1, rows=[0, 4, 2])
    if tear:
        state = config.state_dir / "scratch" / "session" / "state"
        state.write_bytes(state.read_bytes()[:-1])
    # killed in its middle, so that the second step is done by another process than the first
    stepped = site.do(killed=killed, task="PrivateStep", round=1, step=2, rows=[1, 7, 3])
    assert (stepped.fields["round"], stepped.fields["step"]) == (1, 2)
    update = site.do(task="ExportDelta", round=1).body
    assert site.events.empty()
    return update


@pytest.mark.slow
@pytest.mark.torch
def test_a_child_killed_in_a_step_goes_on_with_the_same_update_until_it_dies_over_and_over(
    config: SiloConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """One site for all of it, since each start of a trainer takes seconds. Loading an adapter begins a round afresh."""
    trainer_link.log_of(config).parent.mkdir(exist_ok=True)
    with trainer_link.log_of(config).open("ab") as file:
        file.write(b"the words of an earlier trainer\n")
    assert trainer_link.last_words(config, 0) == ": the words of an earlier trainer"
    with planned(config) as (site, payload, digest):
        undisturbed = update_of(site, config, payload, digest, killed=False)
        assert any(array.any() for array in decode_factors(undisturbed).tensors.values())
        assert update_of(site, config, payload, digest, killed=True) == undisturbed
        assert "goes on where it was" in caplog.text and "starts the round over" not in caplog.text
        assert "the trainer died" in caplog.text and "an earlier trainer" not in caplog.text
        caplog.clear()
        assert update_of(site, config, payload, digest, killed=True, tear=True) == undisturbed
        assert "starts the round over: the kept state is torn" in caplog.text
        # and now no task is finished in between: this one has so many rows that it is killed long before its end
        rows = [0, 4, 2] * 40
        site.supervisor.send(LinkMessage("task", {"task": "PrivateStep", "round": 1, "step": 3, "rows": rows}))
        for _ in range(RESTARTS_MAX + 1):
            site.hear("step")
            site.kill()
        while not isinstance(event := site.events.get(timeout=60), TrainerGone):
            assert event.message.type == "step"
        assert event == TrainerGone(137)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("times", [1, 2])
def test_one_killed_while_it_is_configured_is_started_once_more(
    config: SiloConfig, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As at the beginning of each run but the first, which gets a trainer of its own."""
    asked, killed = Supervisor._ask, list[int]()

    def ask(self: Supervisor, question: str, *rest: Any) -> dict[str, Any]:
        if question == "configure" and len(killed) < times:
            killed.append(1)
            kill_worker(self)
        return asked(self, question, *rest)

    monkeypatch.setattr(Supervisor, "_ask", ask)
    if times == 1:
        Site(config).end()
    else:
        with pytest.raises(OperationError) as error:
            Site(config)
        assert error.value.code == "TRAINER_DIED"
    assert len(killed) == times


@pytest.mark.slow
@pytest.mark.torch
def test_one_that_comes_back_in_a_lesser_sandbox_is_not_taken(
    config: SiloConfig, caplog: pytest.LogCaptureFixture
) -> None:
    if probing.best_level() == "waived":
        pytest.skip("this machine builds no sandbox")
    lower = config.model_copy(update={"trainer": config.trainer.model_copy(update={"isolation": "waived"})})
    with planned(config) as (site, payload, digest):
        site.supervisor._config = lower
        site.do(payload, task="LoadAdapter", round=1, digest=digest)
        site.kill()
        assert isinstance(site.events.get(timeout=60), TrainerGone)
        assert [restart.code for restart in site.restarts] == ["ISOLATION"]
    assert "its isolation is waived, and was" in caplog.text


@pytest.mark.parametrize(("dies", "goes_on"), [(1, True), (RESTARTS_MAX, True), (RESTARTS_MAX + 1, False)])
def test_one_that_dies_again_before_it_hears_its_task_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: int, goes_on: bool
) -> None:
    """Between its word on the plan and the task: whether the line is known to be closed then is a matter of time."""

    class DeadLink:
        def send(self, message: LinkMessage) -> None:
            raise LinkClosed("it is gone")

        def close(self) -> None: ...

    restarts: list[Restart] = []
    supervisor = Supervisor(load_config(write_config(tmp_path)), queue.SimpleQueue().put, restarted=restarts.append)

    def bring_up(check: object) -> dict[str, Any]:
        supervisor._link = DeadLink()  # type: ignore[assignment]
        return supervisor.state.ready

    monkeypatch.setattr(supervisor, "_bring_up", bring_up)
    monkeypatch.setattr(supervisor, "_ask", lambda *asked: {"resumed": stands_at(LOAD)})
    supervisor._given = given(LOAD, doing=STEP)
    assert [supervisor._revived() for _ in range(dies)] == [True] * (dies - 1) + [goes_on]
    assert [(each.number, each.code) for each in restarts] == [
        (number + 1, "") for number in range(dies - (not goes_on))
    ]


def test_a_supervisor_that_has_ended_its_trainer_lets_go_of_the_adapters(tmp_path: Path) -> None:
    """Who looks at a buffer keeps it from growing. The supervisor stays: closures of its own hold it."""
    adapter = bytearray(1000)
    supervisor = Supervisor(load_config(write_config(tmp_path)), queue.SimpleQueue().put)
    load = LinkMessage("task", {"task": "LoadAdapter", "round": 1}, memoryview(adapter))
    supervisor._given.sent(load)
    supervisor._given.heard(LinkMessage("done", {"task": "LoadAdapter"}))
    del load
    with pytest.raises(BufferError):
        adapter.append(0)
    supervisor.stop()
    adapter.append(0)

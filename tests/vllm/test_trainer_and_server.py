"""A trainer in its sandbox and the guard that supervises it, with rollouts from a real server: one round's tasks."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode
from fedsilo.protocol.errors import OperationError
from silo.config import Data, Fields, HeldOutFile, Model, PublicFile, Rollout, SiloConfig, Trainer
from silo.guard.trainer_process import probing
from silo.guard.trainer_process.supervisor import Supervisor, TrainerSaid
from silo.link import LinkMessage
from tests.algorithms.test_worker import write_tasks
from tests.algorithms.tiny import make_plan, make_shape, start_payload
from tests.vllm.conftest import Served
from tests.vllm.small import make_model

SECONDS = 300.0  # a task waits for two cores that others use as well


@pytest.fixture
def home() -> Iterator[Path]:
    """A short folder, since a unix socket's path is."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        yield Path(folder)


def config_of(home: Path, served: Served) -> SiloConfig:
    """The site of a trainer of its own; the server is the one that the tests share."""
    private, public, held_out = (write_tasks(home / f"{name}.jsonl", name[0]) for name in ("private", "quiz", "held"))
    return SiloConfig.model_construct(
        silo="a",
        state_dir=served.config.state_dir,
        model=Model(path=served.config.model.path),
        data=Data.model_construct(
            private=(Path(private),), verifier="exact", fields=Fields(), template=None, holdout_share=0.0,
            public=PublicFile(path=Path(public), sha256="0" * 64, verifier="exact"),
            held_out=HeldOutFile(path=Path(held_out), sha256="0" * 64),
        ),
        trainer=Trainer(devices="cpu", threads=1, address=f"unix:{home}/run/trainer.sock"),
        rollout=Rollout(url=f"unix:{served.socket}", public_url=f"unix:{served.socket}", launch="external"),
        silos_on_this_host=1,
    )  # fmt: skip


class Guard:
    """What the guard's loop does with a supervisor, as far as these tests need it."""

    def __init__(self, config: SiloConfig, home: Path) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.supervisor = Supervisor(config, self.events.put, body_bytes_max=1 << 24)
        self._home = home

    def start(self) -> dict[str, Any]:
        """Starts it with a key, a control socket and this process beside it, which the probes try to reach."""
        key = self._home / "id" / "silo.key"
        key.parent.mkdir()
        key.write_text("secret")
        control = socket.socket(socket.AF_UNIX)
        control.bind(str(self._home / "control.sock"))
        control.listen()
        fields = {"key_paths": [str(key)], "control_socket": str(self._home / "control.sock"), "guard_pid": os.getpid()}
        try:
            state = self.supervisor.start(b"secret of a", fields, never=[key])
        finally:
            control.close()
        return state.probes

    def ask(self, kind: str, body: bytes = b"", **fields: Any) -> LinkMessage:
        self.supervisor.send(LinkMessage(kind, fields, body))
        while True:
            said = self.events.get(timeout=SECONDS)
            assert isinstance(said, TrainerSaid), said
            if said.message.type != "step":
                return said.message


@pytest.fixture
def guard(home: Path, served: Served) -> Iterator[Guard]:
    guard = Guard(config_of(home, served), home)
    yield guard
    guard.supervisor.stop()


def test_T10_T14_a_round_with_rollouts_from_the_server(guard: Guard, served: Served) -> None:
    if probing.best_level() == "user":
        pytest.skip("in a sandbox of isolation level user there is no way to a server")
    probes = guard.start()
    assert guard.supervisor.state.isolation == probing.best_level()
    assert probes["rollout_sockets"]["outcome"] == "allowed"
    if guard.supervisor.state.isolation == "namespaces":
        assert probes["control_socket"]["outcome"] == probes["tcp_connect"]["outcome"] == "refused"
    shape = make_shape(make_model())
    tensors = [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()]
    schema = {"rank": shape.rank, "alpha": shape.alpha, "freeze": "none", "tensors": tensors}
    planned = guard.ask("plan", canonical_json=make_plan().canonical(), lora_schema=schema)
    assert planned.type == "planned"
    payload, digest = start_payload(shape)
    assert guard.ask("task", payload, task="LoadAdapter", round=1, digest=digest).type == "done"
    for step, rows in ((1, [39, 0, 7]), (2, [1, 2, 3])):
        done = guard.ask("task", task="PrivateStep", round=1, step=step, rows=rows)
        assert done.type == "done", done.fields
        # float32 on both sides, so the distributions are the same but for the order of sums
        assert 0 <= done.fields["metrics"]["rollout_kl"] < 1e-6
    offered = guard.ask("task", task="GeneratePublic", round=1, step=3, prompt_indices=[1, 2], offer="all")
    assert offered.type == "done", offered.fields
    answers = decode(pb.PublicResponses, offered.body)
    assert [(row.prompt_index, row.samples) for row in answers.prompts] == [(1, 4), (2, 4)]
    swapped = guard.ask("task", pb.PublicDonors().SerializeToString(), task="PublicStep", round=1, step=3, swap="none")
    assert swapped.type == "done", swapped.fields
    assert guard.ask("task", task="ExportDelta", round=1).type == "done"
    measured = guard.ask("task", task="Evaluate", round=0, digest="")  # the base model
    assert decode(pb.MetricsEval, measured.body).split == "held_out"
    pushed = [path.name for path in (served.config.state_dir / "rollout" / "adapters" / "private").iterdir()]
    assert len(pushed) == 1 and pushed[0].endswith("-base")


def test_a_trainer_that_cannot_reach_its_server_is_not_told_where_the_data_are(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    if probing.best_level() != "namespaces":
        pytest.skip("without a sandbox it reaches every socket")
    monkeypatch.setattr("silo.guard.trainer_process.rollout_server.RolloutServers.shown_to_trainer", [])
    with pytest.raises(OperationError, match="does not reach") as refused:
        guard.start()
    assert refused.value.code == "ROLLOUT_UNREACHED"
    assert not guard.supervisor.state.ready

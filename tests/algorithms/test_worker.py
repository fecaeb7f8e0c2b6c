"""The trainer as a process of its own, on the other end of a link; and the fences around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode, decode_factors
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.tasks import LoadAdapter
from silo.link import Link, LinkClosed, LinkMessage, Listener
from silo.trainer.data import read_fields
from silo.trainer.worker import (
    OFFLINE,
    Configuration,
    Refusals,
    Worker,
    is_grading_command,
    main,
    set_offline,
    verify_hub_offline,
    verify_offline,
)
from tests.algorithms.tiny import (
    make_model,
    make_plan,
    make_rows,
    make_session,
    make_shape,
    make_tokenizer,
    start_payload,
)

pytestmark = pytest.mark.torch


def write_tasks(path: Path, prefix: str, bad_lines: int = 0) -> str:
    lines = [
        json.dumps({"id": row.id, "prompt": row.prompt, "answer": row.answer, "topic": row.topic})
        for row in make_rows(40, prefix)
    ]
    path.write_text("\n".join([*lines, *["{broken"] * bad_lines]) + "\n")
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def configuration(folder: Path, bad_lines: int = 0) -> dict[str, Any]:
    return {
        "silo": "a",
        "model": {"path": str(folder / "model"), "load": "fp32"},
        "private": [write_tasks(folder / "private.jsonl", "p", bad_lines)],
        "verifier": "exact",
        "public": {"path": write_tasks(folder / "public.jsonl", "q"), "verifier": "exact"},
        "held_out": {"path": write_tasks(folder / "held_out.jsonl", "h"), "verifier": "exact"},
        "site_secret": "00ff",
        "threads": 1,
        "microbatch_tokens": 4096,
        "scratch": str(folder / "scratch"),
    }


@pytest.fixture
def guard_end(folder: Path) -> Iterator[Link]:
    listener = Listener(f"unix:{folder}/t.sock", user_ids=frozenset({os.getuid()}))
    process = subprocess.Popen(
        [sys.executable, "-m", "silo.trainer.worker", "--address", f"unix:{folder}/t.sock"],
        env={name: value for name, value in os.environ.items() if name not in OFFLINE} | {"OMP_NUM_THREADS": "1"},
    )
    link = listener.accept(60.0)
    yield link
    link.send(LinkMessage("stop"))
    assert process.wait(20) == 0
    link.close()
    listener.close()


def ask(link: Link, kind: str, body: bytes = b"", **fields: Any) -> tuple[LinkMessage, list[str]]:
    """The reply, and the phases reported on the way."""
    link.send(LinkMessage(kind, fields, body))
    phases = []
    while (message := link.receive()).type == "step":
        phases.append(message.fields["phase"])
    return message, phases


@pytest.mark.slow
def test_a_run_over_the_link(folder: Path, guard_end: Link) -> None:
    ready, _ = ask(guard_end, "configure", **configuration(folder, bad_lines=1))
    assert ready.type == "ready"
    assert ready.fields["private_rows"] == 40
    assert ready.fields["dropped"] == {"broken JSON": 1}
    assert ready.fields["threads"] == 1

    early, _ = ask(guard_end, "task", task="PrivateStep", round=1, step=1, rows=[0])
    assert (early.type, early.fields["code"]) == ("failed", "BAD_TASK")

    shape = make_shape(make_model())
    schema = {
        "rank": shape.rank,
        "alpha": shape.alpha,
        "freeze": "none",
        "tensors": [{"name": name, "shape": list(sides)} for name, sides in shape.shapes.items()],
    }
    planned, _ = ask(guard_end, "plan", canonical_json=make_plan().canonical(), lora_schema=schema)
    assert (planned.type, planned.fields["overlong"]) == ("planned", {"private": 0, "public": 0, "held_out": 0})
    assert planned.fields["private_prompts"] == 40

    payload, digest = start_payload(shape)
    loaded, _ = ask(guard_end, "task", payload, task="LoadAdapter", round=1, digest=digest)
    assert (loaded.type, loaded.fields["task"], loaded.body) == ("done", "LoadAdapter", b"")
    for rows in ([40], [-1], []):
        beside, _ = ask(guard_end, "task", task="PrivateStep", round=1, step=1, rows=rows)
        assert (beside.type, beside.fields["code"]) == ("failed", "BAD_TASK")
    stepped, phases = ask(guard_end, "task", task="PrivateStep", round=1, step=1, rows=[39, 0, 7])
    assert phases == ["rollout", "grade", "update"]
    assert stepped.fields["metrics"]["grading_failures"] == {"errors": 0, "timeouts": 0, "crashes": 0}
    assert stepped.fields["metrics"]["seconds"] > 0

    offered, _ = ask(guard_end, "task", task="GeneratePublic", round=1, step=2, prompt_indices=[1, 2], offer="all")
    answers = decode(pb.PublicResponses, offered.body)
    assert [(row.prompt_index, row.samples, len(row.responses)) for row in answers.prompts] == [(1, 4, 4), (2, 4, 4)]
    donors = pb.PublicDonors()
    response = pb.Response(text="0123456789", finish=pb.FINISH_LENGTH)
    donors.prompts.add(prompt_index=1, donors=[pb.Donor(origin="b", position=0, response=response)])
    body = donors.SerializeToString(deterministic=True)
    swapped, _ = ask(guard_end, "task", body, task="PublicStep", round=1, step=2, swap="replace")
    assert swapped.fields["metrics"]["donors_found"] == 1
    assert swapped.fields["metrics"]["donors_rejected"] == {"b": 1}  # ten tokens, the plan allows five

    exported, _ = ask(guard_end, "task", task="ExportDelta", round=1)
    assert decode_factors(exported.body).header.base_digest == digest
    evaluated, _ = ask(guard_end, "task", task="Evaluate", round=0, digest="")
    assert decode(pb.MetricsEval, evaluated.body).split == "held_out"

    unknown, _ = ask(guard_end, "task", task="Delete", round=1)
    assert (unknown.type, unknown.fields["code"]) == ("failed", "BAD_TASK")


class NoGuard:
    """A link that nobody is behind: phases go nowhere."""

    def send(self, message: LinkMessage) -> None: ...

    def receive(self) -> LinkMessage:
        raise LinkClosed("there is nobody")

    def close(self) -> None: ...


def test_memory_that_does_not_suffice_fails_the_step_and_not_the_worker() -> None:
    """By the processor's own allocator, which has no error of its own. Another failure is no matter of memory."""
    session, shape = make_session()
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    assert session._run is not None
    worker = Worker(NoGuard(), None)
    worker._session = session
    task = LinkMessage("task", {"task": "PrivateStep", "round": 1, "step": 1, "rows": [0, 1]})
    learner = session._run.learner
    update = learner._update
    learner._update = lambda *_: torch.empty(1 << 50, dtype=torch.uint8)  # type: ignore[method-assign,assignment,return-value]
    failed = worker._answer(task)
    assert (failed.type, failed.fields["code"], failed.fields["input"]) == ("failed", "OUT_OF_MEMORY", False)
    learner._update = lambda *_: torch.empty(-1)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(RuntimeError, match="negative"):
        worker._answer(task)
    learner._update = update  # type: ignore[method-assign]
    assert worker._answer(task).type == "done"


@pytest.mark.slow
def test_too_many_bad_lines_and_a_model_folder_that_lacks_a_file_are_refused(folder: Path, guard_end: Link) -> None:
    failed, _ = ask(guard_end, "configure", **configuration(folder, bad_lines=3))
    assert failed.type == "failed"
    assert "line 41" in failed.fields["message"]
    (folder / "model" / "model.safetensors").unlink()
    failed, _ = ask(guard_end, "configure", **configuration(folder))
    assert (failed.type, failed.fields["code"]) == ("failed", "MODEL_NOT_SUPPORTED")
    assert str(folder / "model") in failed.fields["message"]


def test_configuration_names_what_is_missing(folder: Path) -> None:
    fields = configuration(folder)
    found = read_fields(Configuration, fields, "it")
    assert found.site_secret == b"\x00\xff"
    assert "00ff" not in repr(found) and r"\xff" not in repr(found)
    with pytest.raises(UsageError) as refused:
        read_fields(Configuration, {**fields, "site_secret": "00ffx"}, "it")
    assert "site_secret" in refused.value.message and "00ff" not in refused.value.message
    with pytest.raises(UsageError, match="promt"):  # else the site would train on another field without a word
        read_fields(Configuration, {**fields, "fields": {"promt": "question"}}, "it")
    del fields["site_secret"]
    with pytest.raises(UsageError, match="site_secret"):
        read_fields(Configuration, fields, "it")


def test_nobody_at_the_address_is_an_exit_code_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    assert main(["--address", f"unix:{tmp_path}/nobody.sock"]) == 1
    assert "cannot reach the guard" in capsys.readouterr().err
    assert main(["--address", "tls:guard.example:7000"]) == 2
    assert "--site-ca" in capsys.readouterr().err


def test_T10_offline_settings_are_filled_in_and_a_contradiction_is_refused() -> None:  # threat id
    environment: dict[str, str] = {}
    set_offline(environment)
    assert environment == dict(OFFLINE)
    verify_offline(environment)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        verify_offline({**environment, "HF_HUB_OFFLINE": "0"})
    verify_hub_offline({"huggingface_hub.constants": SimpleNamespace(HF_HUB_OFFLINE=True)})
    with pytest.raises(UsageError, match="before"):
        verify_hub_offline({"huggingface_hub.constants": SimpleNamespace(HF_HUB_OFFLINE=False)})


REACHING_OUT = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "name": "import socket; socket.getaddrinfo('example.org', 443)",
    "program": "import subprocess; subprocess.run(['true'])",
    "shell": "import os; os.system('true')",
    "fork": "import os; os.fork()",
}


@pytest.fixture(scope="module")
def reached_out() -> list[str]:
    """What each of these came to, in one process behind the hook; and what a program came to while it is paused."""
    code = (
        "import sys\n"
        "from silo.trainer.worker import Refusals\n"
        "fences = Refusals(); fences.install()\n"
        "for number, attempt in enumerate(sys.argv[1:], 1):\n"
        "    try: exec(attempt)\n"
        "    except PermissionError: print('refused' if fences.refused == number else fences.refused)\n"
        "    else: print('allowed')\n"
        "with fences.paused():\n    import subprocess; subprocess.run(['true'], check=True)\n"
        "print('allowed while paused')\n"
    )
    command = [sys.executable, "-c", code, *REACHING_OUT.values()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("attempt", REACHING_OUT)
def test_T10_the_hook_refuses_to_reach_out(attempt: str, reached_out: list[str]) -> None:  # threat id
    assert len(reached_out) == len(REACHING_OUT) + 1
    assert reached_out[list(REACHING_OUT).index(attempt)] == "refused"


def test_what_is_refused_is_allowed_while_the_hook_is_paused(reached_out: list[str]) -> None:
    assert reached_out[-1] == "allowed while paused"


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ([sys.executable, "-P", "-m", "fedsilo.grading.worker", "exact"], True),
        ([sys.executable, "-m", "fedsilo.grading.worker", "exact"], False),
        ([sys.executable, "-P", "-m", "fedsilo.grading.other"], False),
        ([sys.executable, "-P", "-c", "fedsilo.grading.worker"], False),
        (["/bin/sh", "-P", "-m", "fedsilo.grading.worker"], False),
        ("sh", False),
    ],
)
def test_only_the_grading_child_may_be_started(command: Any, allowed: bool) -> None:
    assert is_grading_command((command[0], command, None, None)) is allowed


def test_hook_lets_other_events_pass() -> None:
    Refusals()._hook("open", ("file", "r", 0))
